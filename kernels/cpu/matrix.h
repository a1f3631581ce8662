// y = W · x (+ bias) for packed weights. Output rows lie in panels of 16, one lane each; two panels side by side make a task.
//
//   bf16  weights [panel][K/2][16][2]                    2 bytes a weight, x in bf16
//   q8    weights [panel][K/32][8][16][4] of value + 128  1.06, scales [panel][K/32][16] fp16; x in int8, a scale for each 32
//   q4    weights [panel][K/32][4][16][4] two nibbles     0.63, scales [panel][K/32][16 d | 16 m] fp16; w = d · nibble + m
//
// Operations: 2 · N · K a row. Bytes: the weights once for up to 12 rows (32 with AMX, see amx.h), then from the cache. An output is one
// chain of sums in the order of K, whatever the number of rows, the tile or the thread: bit for bit the same alone and in any batch.
#pragma once
#include <algorithm>
#include <array>
#include <new>
#include <utility>
#include <vector>

#include "simd.h"

enum Kind : int32_t { BF16 = 0, Q8 = 1, Q4 = 2 };

struct Matrix {  // as Python passes it
    int32_t kind, rows, columns, unused;
    const void* weights;
    const uint16_t* scales;
    const float* bias;  // [rows padded to 32], or null
    int pairs() const { return (rows + 31) / 32; }
};

constexpr int GROUP = 32;     // weights and activations that share a scale
constexpr int PAIR = 2 * LANES;
constexpr int AHEAD = 1024;   // bytes

// A vector that begins with a cache line. A tile of 16 rows that all cross lines takes 1.6 times as long to load from the second cache.
template <class T>
struct OnLine {
    using value_type = T;
    OnLine() = default;
    template <class U>
    OnLine(const OnLine<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    bool operator==(const OnLine&) const { return true; }
};
template <class T>
using Lines = std::vector<T, OnLine<T>>;

// Activations, as the matrix that reads them wants them: bf16 [rows][stride], or int8 [groups][rows][32] with scale, scale · sum and
// -128 · sum [groups][rows], so that what a tile reads of a group lies together.
struct Rows {
    bool quantised = false;
    int rows = 0, stride = 0;  // stride: a cache line more than the width, so that rows do not share cache sets
    uint16_t* bf16 = nullptr;
    int8_t* q = nullptr;
    float *scale = nullptr, *sum = nullptr;
    int32_t* shift = nullptr;

    void put(int row, int column, const float* values, int count) const {  // whole groups
        if (!quantised) {
            uint16_t* out = bf16 + (size_t)row * stride + column;
            for (int i = 0; i < count; i += LANES) store_bf16(out + i, load(values + i));
            return;
        }
        for (int i = 0; i < count; i += GROUP) {
            const F a = load(values + i), b = load(values + i + LANES);
            const float most = top(greatest(abs(a), abs(b)));
            const F by = all(most > 0 ? 127.0f / most : 0.0f);
            const F x = rounded(mul(a, by)), y = rounded(mul(b, by));
            const size_t group = (size_t)(column + i) / GROUP * rows + row;
            store_i8(q + group * GROUP, x), store_i8(q + group * GROUP + LANES, y);
            const float total = ::sum(add(x, y));
            const bool is_finite = total - total == 0;  // NaN and infinity in, NaN out: never hidden by the conversion
            scale[group] = is_finite ? most / 127.0f : total - total;
            sum[group] = scale[group] * total;
            shift[group] = is_finite ? -128 * (int)total : 0;
        }
    }
};

// Rows that are multiplied by all of a matrix before the next ones: so many that they stay in a core's second cache beside its weights.
struct Range {
    int first, count;
    static int blocks(const Rows& x, int rows);
    static Range of(int block, int blocks, int rows) {  // of 32s, as equal as can be
        const int each = ((rows + blocks - 1) / blocks + PAIR - 1) / PAIR * PAIR, first = std::min(rows, block * each);
        return {first, std::min(each, rows - first)};
    }
};

template <int M>
void tile_bf16(const Matrix& w, const Rows& x, int row, int pair, float* out, int line) {
    F acc[M][2];
    for (int i = 0; i < 2 * M; i++) acc[i / 2][i % 2] = w.bias ? load(w.bias + pair * PAIR + i % 2 * LANES) : zero();
    const int steps = w.columns / 2;
    const size_t panel = (size_t)steps * PAIR;
    const uint16_t *left = (const uint16_t*)w.weights + (size_t)pair * 2 * panel, *right = left + panel;
    const uint32_t* in[(M + 2) / 3];
    const size_t stride = x.stride / 2;
    for (int i = 0; i < M; i += 3) in[i / 3] = (const uint32_t*)x.bf16 + (size_t)(row + i) * stride;
    for (int k = 0; k < steps; k++) {
        const I a = load_i(left + (size_t)k * PAIR), b = load_i(right + (size_t)k * PAIR);
        if (M <= 8) prefetch((const char*)(left + (size_t)k * PAIR) + AHEAD), prefetch((const char*)(right + (size_t)k * PAIR) + AHEAD);
#pragma GCC unroll 12
        for (int i = 0; i < M; i++) {
            const I value = all_i(in[i / 3][i % 3 * stride + k]);
            acc[i][0] = dot_bf16(acc[i][0], a, value);
            acc[i][1] = dot_bf16(acc[i][1], b, value);
        }
    }
    for (int i = 0; i < 2 * M; i++) store(out + i / 2 * line + i % 2 * LANES, acc[i / 2][i % 2]);
}

template <int M, Kind KIND>
void panel_quantised(const Matrix& w, const Rows& x, int row, int panel, float* out, int line) {
    constexpr int BYTES = KIND == Q4 ? 256 : 512, SCALES = KIND == Q4 ? 32 : 16;
    const int groups = w.columns / GROUP;
    const uint8_t* weights = (const uint8_t*)w.weights + (size_t)panel * groups * BYTES;
    const uint16_t* scales = w.scales + (size_t)panel * groups * SCALES;
    size_t at = row;
    F acc[M];
    for (F& chain : acc) chain = w.bias ? load(w.bias + panel * LANES) : zero();
    for (int g = 0; g < groups; g++, weights += BYTES, scales += SCALES, at += x.rows) {
        const int32_t* in = (const int32_t*)(x.q + at * GROUP);
        for (int z = 0; z < BYTES; z += 64) prefetch(weights + 2 * AHEAD + z);
        prefetch(scales + AHEAD / 2);
        I dot[M];
        for (int i = 0; i < M; i++) dot[i] = KIND == Q4 ? zero_i() : all_i((uint32_t)x.shift[at + i]);
#pragma GCC unroll 8
        for (int z = 0; z < 8; z++) {  // the rows by turns, so that chains overlap
            const I v = load_i(weights + (KIND == Q4 ? z / 2 : z) * 64), q = KIND == Q8 ? v : z % 2 ? high_nibbles(v) : low_nibbles(v);
#pragma GCC unroll 12
            for (int i = 0; i < M; i++) dot[i] = dot_u8_i8(dot[i], q, all_i((uint32_t)in[i * 8 + z]));
        }
        const F d = from_f16(scales), m = KIND == Q4 ? from_f16(scales + LANES) : zero();
#pragma GCC unroll 12
        for (int i = 0; i < M; i++) {
            acc[i] = fma(mul(d, all(x.scale[at + i])), to_float(dot[i]), acc[i]);
            if (KIND == Q4) acc[i] = fma(m, all(x.sum[at + i]), acc[i]);
        }
    }
    for (int i = 0; i < M; i++) store(out + i * line, acc[i]);
}

// 32 outputs of M rows → out [M][line].
template <int M>
void tile(const Matrix& w, const Rows& x, int row, int pair, float* out, int line) {
    if (w.kind == BF16) return tile_bf16<M>(w, x, row, pair, out, line);
    for (int side = 0; side < 2; side++)
        (w.kind == Q4 ? panel_quantised<M, Q4> : panel_quantised<M, Q8>)(w, x, row, 2 * pair + side, out + side * LANES, line);
}

using Tile = void (*)(const Matrix&, const Rows&, int, int, float*, int);
constexpr auto TILES = []<int... I>(std::integer_sequence<int, I...>) { return std::array<Tile, ROWS>{tile<I + 1>...}; }(std::make_integer_sequence<int, ROWS>());

// put(row, y [PAIRS · 32]) for every row of a range and PAIRS neighbouring tasks, in tiles of nearly equal height.
template <int PAIRS, class Put>
void outputs_by_rows(const Matrix& w, const Rows& x, const Range& range, int pair, const Put& put) {
    constexpr int WIDTH = PAIRS * PAIR;
    alignas(64) float out[ROWS * WIDTH];
    for (int row = range.first, rows = range.count, left = (rows + ROWS - 1) / ROWS; left; left--) {
        const int count = (rows + left - 1) / left;
        for (int i = 0; i < PAIRS; i++) TILES[count - 1](w, x, row, pair + i, out + i * PAIR, WIDTH);
        for (int i = 0; i < count; i++) put(row + i, out + i * WIDTH);
        row += count, rows -= count;
    }
}

// Row `index` of W as float32: the embedding is the head's matrix.
inline void read_row(const Matrix& w, int index, float* out) {
    const int panel = index / LANES, lane = index % LANES;
    if (w.kind == BF16) {
        const uint32_t* at = (const uint32_t*)w.weights + (size_t)panel * (w.columns / 2) * LANES + lane;
        for (int k = 0; k < w.columns / 2; k++) {
            const uint32_t two = at[(size_t)k * LANES], both[2] = {two << 16, two & 0xFFFF0000};
            std::memcpy(out + 2 * k, both, 8);
        }
        return;
    }
    const int groups = w.columns / GROUP, bytes = w.kind == Q4 ? 256 : 512, per_group = w.kind == Q4 ? 32 : 16;
    for (int g = 0; g < groups; g++) {
        const size_t at = (size_t)panel * groups + g;
        const uint8_t* weights = (const uint8_t*)w.weights + at * bytes;
        float d[LANES], m[LANES];
        store(d, from_f16(w.scales + at * per_group));
        if (w.kind == Q4) store(m, from_f16(w.scales + at * per_group + LANES));
        for (int k = 0; k < GROUP; k++) {
            const int quad = k / 4, inside = lane * 4 + k % 4;
            if (w.kind == Q4) {
                const int nibble = weights[quad / 2 * 64 + inside] >> (quad % 2 * 4) & 15;
                out[g * GROUP + k] = d[lane] * (float)nibble + m[lane];
            } else {
                out[g * GROUP + k] = d[lane] * (float)(weights[quad * 64 + inside] - 128);
            }
        }
    }
}
