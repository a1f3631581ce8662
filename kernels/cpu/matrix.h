// y = W · x (+ bias) for packed weights. Output rows lie in panels of 16, one lane each; two panels side by side make a task.
//
//   bf16  weights [panel][K/2][16][2]                    2 bytes a weight, x in bf16
//   q8    weights [panel][K/32][8][16][4] of value + 128  1.06, scales [panel][K/32][16] fp16; x in int8, a scale for each 32
//   q4    weights [panel][K/32][4][16][4] two nibbles     0.63, scales [panel][K/32][16 d | 16 m] fp16; w = d · nibble + m
//
// Operations: 2 · N · K a row. Bytes: the weights once for up to 12 rows. An output is one chain of sums in the order of K, whatever
// the number of rows, the tile or the thread: bit for bit the same alone and in any batch.
#pragma once
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
constexpr int TILE_ROWS = 12; // rows of x at once: with two panels 24 chains, enough to hide the latency of a product
constexpr int QUANTISED_ROWS = 8; // there a tile holds a group of weights too
constexpr int PAIR = 2 * LANES;
constexpr int AHEAD = 1024;   // bytes

// Activations, as the matrix that reads them wants them: bf16 [rows][stride], or int8 [groups][rows][32] with scale and scale · sum
// [groups][rows], so that what a tile reads of a group lies together.
struct Rows {
    bool quantised = false;
    int rows = 0, stride = 0;  // stride: a cache line more than the width, so that rows do not share cache sets
    uint16_t* bf16 = nullptr;
    int8_t* q = nullptr;
    float *scale = nullptr, *sum = nullptr;

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
            const float total = ::sum(add(x, y));  // NaN and infinity in, NaN out: never hidden by the conversion
            scale[group] = total - total == 0 ? most / 127.0f : total - total;
            sum[group] = scale[group] * total;
        }
    }
};

template <int M>
inline void tile_bf16(const Matrix& w, const Rows& x, int row, int pair, F (&acc)[M][2]) {
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
}

template <int M, Kind KIND>
inline void panel_quantised(const Matrix& w, const Rows& x, int row, int panel, F (&acc)[M][2], int side) {
    constexpr int BYTES = KIND == Q4 ? 256 : 512, SCALES = KIND == Q4 ? 32 : 16;
    const int groups = w.columns / GROUP;
    const uint8_t* weights = (const uint8_t*)w.weights + (size_t)panel * groups * BYTES;
    const uint16_t* scales = w.scales + (size_t)panel * groups * SCALES;
    const int32_t* in = (const int32_t*)x.q + (size_t)row * GROUP / 4;
    const float *scale = x.scale + row, *sum = x.sum + row;
    for (int g = 0; g < groups; g++, weights += BYTES, scales += SCALES, in += (size_t)x.rows * GROUP / 4, scale += x.rows, sum += x.rows) {
        I q[8];
#pragma GCC unroll 8
        for (int z = 0; z < 8; z += 2) {
            const I v = load_i(weights + (KIND == Q4 ? z / 2 : z) * 64);
            q[z] = KIND == Q4 ? low_nibbles(v) : v;
            q[z + 1] = KIND == Q4 ? high_nibbles(v) : load_i(weights + (z + 1) * 64);
        }
        if (M <= 8)
            for (int z = 0; z < BYTES; z += 64) prefetch(weights + AHEAD + z);
        const F d = from_f16(scales), m = KIND == Q4 ? from_f16(scales + LANES) : mul(d, all(-128));
#pragma GCC unroll 12
        for (int i = 0; i < M; i++) {
            I even = zero_i(), odd = zero_i();
#pragma GCC unroll 8
            for (int z = 0; z < 8; z += 2) {
                even = dot_u8_i8(even, q[z], all_i((uint32_t)in[i * 8 + z]));
                odd = dot_u8_i8(odd, q[z + 1], all_i((uint32_t)in[i * 8 + z + 1]));
            }
            acc[i][side] = fma(mul(d, all(scale[i])), to_float(add_i(even, odd)), acc[i][side]);
            acc[i][side] = fma(m, all(sum[i]), acc[i][side]);
        }
    }
}

// 32 outputs of M rows → out [M][32].
template <int M>
void tile(const Matrix& w, const Rows& x, int row, int pair, float* out) {
    F acc[M][2];
    for (int i = 0; i < M; i++)
        for (int side = 0; side < 2; side++) acc[i][side] = w.bias ? load(w.bias + pair * PAIR + side * LANES) : zero();
    if (w.kind == BF16) {
        tile_bf16<M>(w, x, row, pair, acc);
    } else {
        for (int side = 0; side < 2; side++) {
            if (w.kind == Q4) panel_quantised<M, Q4>(w, x, row, 2 * pair + side, acc, side);
            else panel_quantised<M, Q8>(w, x, row, 2 * pair + side, acc, side);
        }
    }
    for (int i = 0; i < M; i++)
        for (int side = 0; side < 2; side++) store(out + i * PAIR + side * LANES, acc[i][side]);
}

// put(first row, rows, out [PAIRS][rows][32]) for all rows of PAIRS neighbouring tasks, in tiles of nearly equal height.
template <int PAIRS, class Put>
void outputs(const Matrix& w, const Rows& x, int rows, int pair, const Put& put) {
    using Tile = void (*)(const Matrix&, const Rows&, int, int, float*);
    static constexpr Tile of[TILE_ROWS] = {tile<1>, tile<2>, tile<3>, tile<4>,  tile<5>,  tile<6>,
                                           tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};
    alignas(64) float out[PAIRS * TILE_ROWS * PAIR];
    const int most = x.quantised ? QUANTISED_ROWS : TILE_ROWS;
    for (int row = 0, left = (rows + most - 1) / most; left; left--) {
        const int count = (rows - row + left - 1) / left;
        for (int i = 0; i < PAIRS; i++) of[count - 1](w, x, row, pair + i, out + i * count * PAIR);
        put(row, count, out);
        row += count;
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
