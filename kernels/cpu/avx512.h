// Products by AVX-512, in the layouts of matrix.h and attention.h: pairs of bf16, and bytes of whole numbers by VNNI.
//
// Bytes: the weights once for up to 12 rows, then from the cache; keys and values of a block once for 6 queries.
#pragma once
#include "matrix.h"

#ifdef __AVX512BF16__

constexpr int ROWS = 12;      // of x that a tile multiplies at once: with two panels 24 chains, enough to hide the latency of a product

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

// q · k of R queries with the keys of a block → out [R][64].
template <int R, class Block>
inline void scores(const uint16_t* queries, const Block& block, const uint16_t* const* ahead, int dim, float* out) {
    const uint32_t* q[R];
    for (int i = 0; i < R; i++) q[i] = (const uint32_t*)(queries + (size_t)i * dim);
    F acc[R][4];
    for (int i = 0; i < R; i++)
        for (int t = 0; t < 4; t++) acc[i][t] = zero();
    for (int d = 0; d < dim / 2; d++) {
        I key[4];
        for (int t = 0; t < 4; t++) key[t] = load_i(block.keys[t] + (size_t)d * PAIR), prefetch(ahead[t] + (size_t)d * PAIR);
#pragma GCC unroll 6
        for (int i = 0; i < R; i++) {
            const I value = all_i(q[i][d]);
            for (int t = 0; t < 4; t++) acc[i][t] = dot_bf16(acc[i][t], key[t], value);
        }
    }
    for (int i = 0; i < R; i++)
        for (int t = 0; t < 4; t++) store(out + i * KEYS + t * LANES, acc[i][t]);
}

// sums [R][D] += weights · values.
template <int R, class Block>
inline void weigh(const uint16_t* weights, const Block& block, const uint16_t* const* ahead, int dim, float* sums) {
    for (int d = 0; d < dim; d += 2 * LANES) {
        F acc[R][2];
        for (int i = 0; i < R; i++)
            for (int c = 0; c < 2; c++) acc[i][c] = load(sums + (size_t)i * dim + d + c * LANES);
        for (int t = 0; t < block.tiles; t++) {
            for (int pair = 0; pair < TILE / 2; pair++) {
                const size_t at = ((size_t)pair * dim + d) * 2;
                const I a = load_i(block.values[t] + at), b = load_i(block.values[t] + at + PAIR);
                prefetch(ahead[t] + at), prefetch(ahead[t] + at + PAIR);
#pragma GCC unroll 6
                for (int i = 0; i < R; i++) {
                    uint32_t two;
                    std::memcpy(&two, weights + i * WEIGHTS + t * TILE + pair * 2, 4);
                    const I weight = all_i(two);
                    acc[i][0] = dot_bf16(acc[i][0], a, weight);
                    acc[i][1] = dot_bf16(acc[i][1], b, weight);
                }
            }
        }
        for (int i = 0; i < R; i++)
            for (int c = 0; c < 2; c++) store(sums + (size_t)i * dim + d + c * LANES, acc[i][c]);
    }
}

#endif
