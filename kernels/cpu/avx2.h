// Products by AVX2, in the layouts of matrix.h and attention.h. There are 16 registers of 8 lanes: a tile is up to 6 rows by 16 outputs, whose
// sums take twelve of them, and what is widened of the weights is widened once for all of its rows.
//
//   bf16  a pair is two float32, by a mask and a shift; activations are kept as float32
//   q4    nibble · int8, two products a lane of 16 bits: the eight of a group and lane are at most 8 · 2 · 15 · 127 = 30,480, so they are
//         summed before they are widened
//   q8    (value + 128) · int8, both as 16 bits, by a mask and a shift: 16 bits would not hold the sum of two such products
//
// Operations for 8 outputs and 32 of K: 32, 16 and 32, and what scales the sums of a group. Bytes: the weights once for a range of rows, whose
// tiles fetch those of the next task meanwhile; keys and values of a block once for 6 queries.
#pragma once
#include "matrix.h"

#ifndef __AVX512BF16__

constexpr int ROWS = 6;  // of x that a tile multiplies at once
constexpr int HALF = LANES / 2;

// What is fetched meanwhile, a line at a time: where a task is one tile, the weights to come; where it is several, each its part of the next task's.
struct Ahead {
    const char* from;
    int step;
    void fetch(size_t far = 0, int panels = 1) {
        for (int i = 0; i < panels; i++) prefetch(from + i * far);
        from += step;
    }
};

struct Tile {  // up to 6 rows of x by a panel of w
    const Matrix& w;
    const Rows& x;
    int row, panel, panels, number, tiles;  // panels: of a task; number: of the tile among those of the range
    F bias() const { return w.bias ? load(w.bias + panel * LANES) : zero(); }
    const uint8_t* weights(size_t size) const { return (const uint8_t*)w.weights + panel * size; }  // size: bytes of a panel
    Ahead ahead(size_t size) const {
        const char* const own = (const char*)weights(size);
        if (tiles == 1) return {own + AHEAD, 64};
        return {own + panels * size + size / tiles * number, 64 / tiles};
    }
};

// Two things that compilers do would take more registers than there are. They keep what they have loaded for its next use: so its address is hidden.
template <class T>
inline const T* again(const T* p) {
    asm("" : "+r"(p));
    return p;
}
// And they sum whole numbers in an order of their own, for which they keep all summands: so each sum is hidden.
// a, b [M] += w_a, w_b times what `of` says of a row.
template <int M, class V, class Add, class Of>
inline void add_rows(V (&a)[M], V (&b)[M], V w_a, V w_b, const Add& add, const Of& of) {
#pragma GCC unroll 6
    for (int i = 0; i < M; i++) {
        const V x = of(i);
        a[i] = add(a[i], w_a, x), b[i] = add(b[i], w_b, x);
        asm("" : "+x"(a[i]), "+x"(b[i]));
    }
}
inline __m256i half(const void* w) { return _mm256_loadu_si256((const __m256i*)w); }
inline __m256i in_all(const int8_t* x) {  // four bytes or two words
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
inline __m256 add_floats(__m256 sum, __m256 a, __m256 b) { return _mm256_fmadd_ps(a, b, sum); }
inline __m256i add_bytes(__m256i sum, __m256i a, __m256i b) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b)); }
inline __m256i add_words(__m256i sum, __m256i a, __m256i b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }

template <class T>
struct Lined {  // rows of 16, from one to the next `line`; 0: all the same
    T* at;
    size_t line;
};

// to [M][P · 16] = from + x [M][2 · steps] · w, which has 16 lanes of pairs every `line`, the P panels `far` apart; of a pair the odd ones first.
template <int M, int P = 1>
inline void multiply(Lined<const float> from, Lined<float> to, const uint16_t* w, size_t line, const Number* x, size_t stride, int steps, Ahead ahead, size_t far = 0) {
    const auto odd = [](const void* w) { return _mm256_castsi256_ps(_mm256_and_si256(half(w), _mm256_set1_epi32((int)0xFFFF0000))); };
    const auto even = [](const void* w) { return _mm256_castsi256_ps(_mm256_slli_epi32(half(w), 16)); };
    __m256 a[M], b[M], c[M], d[M];  // c, d: of a second panel
#pragma GCC unroll 6
    for (int i = 0; i < M; i++) {
        const float* const at = from.at + i * from.line;
        a[i] = _mm256_loadu_ps(at), b[i] = _mm256_loadu_ps(at + HALF);
        if (P == 2) c[i] = _mm256_loadu_ps(at + LANES), d[i] = _mm256_loadu_ps(at + LANES + HALF);
    }
    for (int k = 0; k < steps; k++, w += line, x += 2) {
        ahead.fetch(far * 2, P);
        const auto of_odd = [&](int i) { return _mm256_set1_ps(x[i * stride + 1]); };
        const auto of_even = [&](int i) { return _mm256_set1_ps(x[i * stride]); };
        add_rows<M>(a, b, odd(w), odd(w + LANES), add_floats, of_odd);
        if (P == 2) add_rows<M>(c, d, odd(w + far), odd(w + far + LANES), add_floats, of_odd);
        const uint16_t* const same = again(w);
        add_rows<M>(a, b, even(same), even(same + LANES), add_floats, of_even);
        if (P == 2) add_rows<M>(c, d, even(same + far), even(same + far + LANES), add_floats, of_even);
    }
#pragma GCC unroll 6
    for (int i = 0; i < M; i++) {
        float* const at = to.at + i * to.line;
        _mm256_storeu_ps(at, a[i]), _mm256_storeu_ps(at + HALF, b[i]);
        if (P == 2) _mm256_storeu_ps(at + LANES, c[i]), _mm256_storeu_ps(at + LANES + HALF, d[i]);
    }
}

inline constexpr float NONE[PAIR] = {};

// Few rows have too few sums to hide the latency of a product: two panels at once.
constexpr int panels_of_bf16(int rows) { return rows <= 2 ? 2 : 1; }

template <int M>
void panel_bf16(const Tile& tile, float* out, int line) {
    const Rows& x = tile.x;
    const size_t size = (size_t)tile.w.columns * PAIR;
    const float* const bias = tile.w.bias ? tile.w.bias + tile.panel * LANES : NONE;
    multiply<M, panels_of_bf16(M)>({bias, 0}, {out, (size_t)line}, (const uint16_t*)tile.weights(size), PAIR, x.bf16 + (size_t)tile.row * x.stride,
                                   x.stride, tile.w.columns / 2, tile.ahead(size), size / 2);
}

template <int M>
void panel_q4(const Tile& tile, float* out, int line) {
    const int groups = tile.w.columns / GROUP, bytes = GROUP * 8;
    const uint8_t* weights = tile.weights((size_t)groups * bytes);
    const uint16_t* scales = tile.w.scales + (size_t)tile.panel * groups * 2 * LANES;
    Ahead ahead = tile.ahead((size_t)groups * bytes);
    size_t at = tile.row;
    for (int i = 0; i < M; i++) store(out + i * line, tile.bias());
    for (int g = 0; g < groups; g++, scales += 2 * LANES, at += tile.x.rows) {
        const int8_t* in = tile.x.q + at * GROUP;
        prefetch(scales + AHEAD / 2);
        __m256i a[M], b[M];
#pragma GCC unroll 6
        for (int i = 0; i < M; i++) a[i] = b[i] = _mm256_setzero_si256();
#pragma GCC unroll 1
        for (int z = 0; z < 4; z++, weights += 64, in += 8) {
            ahead.fetch();
            add_rows<M>(a, b, low_nibbles(half(weights)), low_nibbles(half(weights + 32)), add_bytes, [&](int i) { return in_all(in + i * GROUP); });
            const uint8_t* const same = again(weights);
            const __m256i high_a = low_nibbles(_mm256_srli_epi16(half(same), 4)), high_b = low_nibbles(_mm256_srli_epi16(half(same + 32), 4));
            add_rows<M>(a, b, high_a, high_b, add_bytes, [&](int i) { return in_all(in + i * GROUP + 4); });
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
    const int groups = tile.w.columns / GROUP, bytes = GROUP * LANES;
    const uint8_t* weights = tile.weights((size_t)groups * bytes);
    const uint16_t* scales = tile.w.scales + (size_t)tile.panel * groups * LANES;
    Ahead ahead = tile.ahead((size_t)groups * bytes);
    size_t at = tile.row;
    const auto even = [](const uint8_t* w) { return _mm256_and_si256(half(w), _mm256_set1_epi16(0xFF)); };
    const auto odd = [](const uint8_t* w) { return _mm256_srli_epi16(half(w), 8); };
    for (int i = 0; i < M; i++) store(out + i * line, tile.bias());
    for (int g = 0; g < groups; g++, scales += LANES, at += tile.x.rows) {
        const int8_t* in = tile.x.q + at * 2 * GROUP;
        prefetch(scales + AHEAD / 2);
        __m256i a[M], b[M];
#pragma GCC unroll 6
        for (int i = 0; i < M; i++) a[i] = b[i] = _mm256_set1_epi32(tile.x.shift[at + i]);
#pragma GCC unroll 1
        for (int z = 0; z < 8; z++, weights += 64, in += 8) {
            ahead.fetch();
            add_rows<M>(a, b, even(weights), even(weights + 32), add_words, [&](int i) { return in_all(in + i * 2 * GROUP); });
            const uint8_t* const same = again(weights);
            add_rows<M>(a, b, odd(same), odd(same + 32), add_words, [&](int i) { return in_all(in + i * 2 * GROUP + 4); });
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
constexpr auto PANELS = []<int... I>(std::integer_sequence<int, I...>) { return std::array{panel<I + 1>...}; }(std::make_integer_sequence<int, ROWS>());

// put(row, y [PAIRS · 32]) for every row of a range and PAIRS neighbouring tasks, in tiles of nearly equal height.
template <int PAIRS, class Put>
void outputs_by_rows(const Matrix& w, const Rows& x, const Range& range, int pair, const Put& put) {
    constexpr int WIDTH = PAIRS * PAIR;
    alignas(64) float out[ROWS * WIDTH];
    const int tiles = (range.count + ROWS - 1) / ROWS;
    for (int number = 0, row = range.first, count; number < tiles; number++, row += count) {
        count = (range.first + range.count - row + tiles - number - 1) / (tiles - number);
        const int at_once = w.kind == BF16 ? panels_of_bf16(count) : 1;
        for (int i = 0; i < 2 * PAIRS; i += at_once) PANELS[count - 1]({w, x, row, 2 * pair + i, 2 * PAIRS, number, tiles}, out + i * LANES, WIDTH);
        for (int i = 0; i < count; i++) put(row + i, out + i * WIDTH);
    }
}

// q · k of M queries with the keys of a block → out [M][64].
template <int M, class Block>
inline void scores(const Number* queries, const Block& block, const uint16_t* const* ahead, int dim, float* out) {
    for (int t = 0; t < KEYS / TILE; t++)
        multiply<M>({NONE, 0}, {out + t * TILE, KEYS}, block.keys[t], PAIR, queries, dim, dim / 2, {(const char*)ahead[t], 64});
}

// sums [M][D] += weights · values.
template <int M, class Block>
inline void weigh(const Number* weights, const Block& block, const uint16_t* const* ahead, int dim, float* sums) {
    for (int d = 0; d < dim; d += LANES) {
        const Lined<float> to{sums + d, (size_t)dim};
        for (int t = 0; t < block.tiles; t++)
            multiply<M>({to.at, to.line}, to, block.values[t] + d * 2, dim * 2, weights + t * TILE, WEIGHTS, TILE / 2, {(const char*)(ahead[t] + d * 2), dim * 4});
    }
}

#endif
