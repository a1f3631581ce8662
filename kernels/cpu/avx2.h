// Products by AVX2, in the layouts of matrix.h and attention.h. There are 16 registers of 8 lanes: a tile is 6 rows by 16 outputs, whose sums
// take twelve of them, and what is widened of the weights is widened once for all of its rows.
//
//   bf16  a pair is two float32, by a mask and a shift; activations are kept as float32. Two multiplications a pair and lane.
//   q4    nibble · int8, two products a lane of 16 bits: the eight of a group and lane are at most 8 · 2 · 15 · 127 = 30,480, so they are
//         summed before they are widened
//   q8    the two nibbles of value + 128 apart, as q4; they do not share a register, so eight outputs at a time
//
// Bytes: the weights once for a range of rows, whose tiles fetch those of the next task; keys and values of a block once for 6 queries.
#pragma once
#include "matrix.h"

#ifndef __AVX512BF16__

constexpr int ROWS = 6;  // of x that a tile multiplies at once
constexpr int HALF = LANES / 2;

// What a tile fetches meanwhile, a line at a time: of one that has its task to itself the weights to come, of one of several its part of the next task's.
struct Ahead {
    const char* from;
    int step;
    static Ahead of(const void* panel, size_t size, int panels, int tile, int tiles) {
        const char* const own = (const char*)panel;
        if (tiles == 1) return {own + AHEAD, 64};
        return {own + panels * size + size / tiles * tile, 64 / tiles};
    }
    void fetch() { prefetch(from), from += step; }
};

// The same address, which the compiler takes for another: what it has loaded from there it loads again, instead of keeping it in registers
// that are wanted for sums.
template <class T>
inline const T* again(const T* p) {
    asm("" : "+r"(p));
    return p;
}

// out [R][16], a row every `to`, += x [R][2 · steps] · w, which has 16 lanes of pairs every `line`; the odd ones first.
template <int R>
inline void multiply(const float* start, int start_line, float* out, int out_line, const uint16_t* w, size_t line, const Number* x, size_t stride, int steps, Ahead ahead) {
    const __m256i upper = _mm256_set1_epi32((int)0xFFFF0000);
    __m256 a[R], b[R];
#pragma GCC unroll 6
    for (int i = 0; i < R; i++) a[i] = _mm256_loadu_ps(start + i * start_line), b[i] = _mm256_loadu_ps(start + i * start_line + HALF);
    for (int k = 0; k < steps; k++, w += line, x += 2) {
        const __m256 odd_a = _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)w), upper));
        const __m256 odd_b = _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)w + 1), upper));
        ahead.fetch();
#pragma GCC unroll 6
        for (int i = 0; i < R; i++) {
            const __m256 v = _mm256_set1_ps(x[i * stride + 1]);
            a[i] = _mm256_fmadd_ps(odd_a, v, a[i]), b[i] = _mm256_fmadd_ps(odd_b, v, b[i]);
            asm("" : "+x"(a[i]), "+x"(b[i]));
        }
        const __m256i* const p = (const __m256i*)again(w);
        const __m256 even_a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(p), 16));
        const __m256 even_b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(p + 1), 16));
#pragma GCC unroll 6
        for (int i = 0; i < R; i++) {
            const __m256 v = _mm256_set1_ps(x[i * stride]);
            a[i] = _mm256_fmadd_ps(even_a, v, a[i]), b[i] = _mm256_fmadd_ps(even_b, v, b[i]);
            asm("" : "+x"(a[i]), "+x"(b[i]));
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < R; i++) _mm256_storeu_ps(out + i * out_line, a[i]), _mm256_storeu_ps(out + i * out_line + HALF, b[i]);
}

struct Tile {  // of a task's outputs: M rows of a panel
    const Matrix& w;
    const Rows& x;
    int row, panel, panels, number, tiles;  // panels: of a task; number: of the tile among those of the range
    size_t groups() const { return w.columns / GROUP; }
    F bias() const { return w.bias ? load(w.bias + panel * LANES) : zero(); }
};

template <int M>
void panel_bf16(const Tile& tile, float* out, int line) {
    const Rows& x = tile.x;
    const size_t size = (size_t)tile.w.columns * LANES;
    const uint16_t* const weights = (const uint16_t*)tile.w.weights + tile.panel * size;
    alignas(64) static constexpr float NO_BIAS[LANES] = {};
    multiply<M>(tile.w.bias ? tile.w.bias + tile.panel * LANES : NO_BIAS, 0, out, line, weights, PAIR, x.bf16 + (size_t)tile.row * x.stride, x.stride, tile.w.columns / 2,
                Ahead::of(weights, size * 2, tile.panels, tile.number, tile.tiles));
}

// Four bytes, or two words, in each lane.
inline __m256i in_all(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
inline __m256i half_panel(const uint8_t* w) { return _mm256_loadu_si256((const __m256i*)w); }
// In the order of the source: the compiler would sum whole numbers in another, and keep all of them meanwhile.
inline void add_bytes(__m256i& sum, __m256i a, __m256i b) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
    asm("" : "+x"(sum));
}
inline void add_words(__m256i& sum, __m256i a, __m256i b) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
    asm("" : "+x"(sum));
}

template <int M>
void panel_q4(const Tile& tile, float* out, int line) {
    const size_t groups = tile.groups(), bytes = 256;
    const uint8_t* weights = (const uint8_t*)tile.w.weights + tile.panel * groups * bytes;
    const uint16_t* scales = tile.w.scales + tile.panel * groups * 2 * LANES;
    Ahead ahead = Ahead::of(weights, groups * bytes, tile.panels, tile.number, tile.tiles);
    for (int i = 0; i < M; i++) store(out + i * line, tile.bias());
    size_t at = tile.row;
    for (size_t g = 0; g < groups; g++, scales += 2 * LANES, at += tile.x.rows) {
        const int8_t* in = tile.x.q + at * GROUP;
        prefetch(scales + AHEAD / 2);
        __m256i a[M], b[M];
#pragma GCC unroll 6
        for (int i = 0; i < M; i++) a[i] = b[i] = _mm256_setzero_si256();
#pragma GCC unroll 1
        for (int z = 0; z < 4; z++, weights += 64, in += 8) {
            ahead.fetch();
            const __m256i low_a = low_nibbles(half_panel(weights)), low_b = low_nibbles(half_panel(weights + 32));
#pragma GCC unroll 6
            for (int i = 0; i < M; i++) {
                const __m256i four = in_all(in + i * GROUP);
                add_bytes(a[i], low_a, four), add_bytes(b[i], low_b, four);
            }
            const uint8_t* const w = again(weights);
            const __m256i high_a = low_nibbles(_mm256_srli_epi16(half_panel(w), 4)), high_b = low_nibbles(_mm256_srli_epi16(half_panel(w + 32), 4));
#pragma GCC unroll 6
            for (int i = 0; i < M; i++) {
                const __m256i four = in_all(in + i * GROUP + 4);
                add_bytes(a[i], high_a, four), add_bytes(b[i], high_b, four);
            }
        }
        const F d = from_f16(scales), m = from_f16(scales + LANES);
        const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 6
        for (int i = 0; i < M; i++) {
            float* const to = out + i * line;
            const F products = to_float({_mm256_madd_epi16(a[i], ones), _mm256_madd_epi16(b[i], ones)});
            store(to, fma(m, all(tile.x.sum[at + i]), fma(mul(d, all(tile.x.scale[at + i])), products, load(to))));
        }
    }
}

template <int M>
void panel_q8(const Tile& tile, float* out, int line) {
    const size_t groups = tile.groups(), bytes = 512;
    const uint8_t* weights = (const uint8_t*)tile.w.weights + tile.panel * groups * bytes;
    const uint16_t* scales = tile.w.scales + tile.panel * groups * LANES;
    Ahead ahead = Ahead::of(weights, groups * bytes, tile.panels, tile.number, tile.tiles);
    for (int i = 0; i < M; i++) store(out + i * line, tile.bias());
    size_t at = tile.row;
    for (size_t g = 0; g < groups; g++, scales += LANES, at += tile.x.rows) {
        const int8_t* in = tile.x.q + at * 2 * GROUP;
        prefetch(scales + AHEAD / 2);
        __m256i a[M], b[M];
#pragma GCC unroll 6
        for (int i = 0; i < M; i++) a[i] = b[i] = _mm256_set1_epi32(tile.x.shift[at + i]);
#pragma GCC unroll 1
        for (int z = 0; z < 8; z++, weights += 64, in += 8) {
            const __m256i even = _mm256_set1_epi32(0x00FF00FF);
            ahead.fetch();
            const __m256i even_a = _mm256_and_si256(half_panel(weights), even), even_b = _mm256_and_si256(half_panel(weights + 32), even);
#pragma GCC unroll 6
            for (int i = 0; i < M; i++) {
                const __m256i two = in_all(in + i * 2 * GROUP);
                add_words(a[i], even_a, two), add_words(b[i], even_b, two);
            }
            const uint8_t* const w = again(weights);
            const __m256i odd_a = _mm256_srli_epi16(half_panel(w), 8), odd_b = _mm256_srli_epi16(half_panel(w + 32), 8);
#pragma GCC unroll 6
            for (int i = 0; i < M; i++) {
                const __m256i two = in_all(in + i * 2 * GROUP + 4);
                add_words(a[i], odd_a, two), add_words(b[i], odd_b, two);
            }
        }
        const F d = from_f16(scales);
#pragma GCC unroll 6
        for (int i = 0; i < M; i++) {
            float* const to = out + i * line;
            store(to, fma(mul(d, all(tile.x.scale[at + i])), to_float({a[i], b[i]}), load(to)));
        }
    }
}

template <int M>
void panel(const Tile& tile, float* out, int line) {
    (tile.w.kind == BF16 ? panel_bf16<M> : tile.w.kind == Q4 ? panel_q4<M> : panel_q8<M>)(tile, out, line);
}

constexpr auto PANEL_OF = []<int... I>(std::integer_sequence<int, I...>) { return std::array{panel<I + 1>...}; }(std::make_integer_sequence<int, ROWS>());

// put(row, y [PAIRS · 32]) for every row of a range and PAIRS neighbouring tasks, in tiles of nearly equal height.
template <int PAIRS, class Put>
void outputs_by_rows(const Matrix& w, const Rows& x, const Range& range, int pair, const Put& put) {
    constexpr int WIDTH = PAIRS * PAIR, PANELS = 2 * PAIRS;
    alignas(64) float out[ROWS * WIDTH];
    const int tiles = (range.count + ROWS - 1) / ROWS;
    for (int number = 0, row = range.first; number < tiles; number++) {
        const int count = (range.first + range.count - row + tiles - number - 1) / (tiles - number);
        for (int p = 0; p < PANELS; p++) PANEL_OF[count - 1]({w, x, row, 2 * pair + p, PANELS, number, tiles}, out + p * LANES, WIDTH);
        for (int i = 0; i < count; i++) put(row + i, out + i * WIDTH);
        row += count;
    }
}

// q · k of R queries with the keys of a block → out [R][64].
template <int R, class Block>
inline void scores(const Number* queries, const Block& block, const uint16_t* const* ahead, int dim, float* out) {
    static constexpr float NONE[LANES] = {};
    for (int t = 0; t < KEYS / TILE; t++)
        multiply<R>(NONE, 0, out + t * TILE, KEYS, block.keys[t], PAIR, queries, dim, dim / 2, {(const char*)ahead[t], 64});
}

// sums [R][D] += weights · values.
template <int R, class Block>
inline void weigh(const Number* weights, const Block& block, const uint16_t* const* ahead, int dim, float* to) {
    for (int d = 0; d < dim; d += LANES)
        for (int t = 0; t < block.tiles; t++)
            multiply<R>(to + d, dim, to + d, dim, block.values[t] + d * 2, dim * 2, weights + t * TILE, WEIGHTS, TILE / 2, {(const char*)(ahead[t] + d * 2), dim * 4});
}

#endif
