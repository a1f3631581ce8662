// Causal attention over the paged cache, softmax(q · k · scale) · v, keys in blocks of 64 in their order, one online softmax a query.
//
// A page is [kv_heads][block / 16] tiles of 16 tokens: keys [D/2][16 tokens][2], then values [8 pairs of tokens][D][2], bf16, interleaved
// for the product of bf16 pairs. So both products are those of matrix.h, and what one head reads of a tile lies together.
//
// Operations: 4 · D for each query head and key, bytes: 4 · D for each KV head and key, once for all query heads that share it and
// up to 48 queries of a chunk. What masks a key adds exact zeros, so a query's result does not depend on its neighbours in the block.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "amx.h"

constexpr int KEYS = 64;          // of a block
constexpr int TILE = LANES;       // tokens of a tile
constexpr int BLOCK_ROWS = 48;    // queries (token and head) that share a pass over the keys, at least one token's
constexpr float NOTHING = -1e30f; // below any score, and finite: the difference of two is not NaN

struct Cache {  // one layer's pages
    uint16_t* pages;
    int kv_heads, block, dim;
    uint16_t* tile(const int32_t* table, int head, int position, int values) const {
        const size_t lane = (size_t)table[position / block] * kv_heads + head;
        return pages + ((lane * (block / TILE) + position % block / TILE) * 2 + values) * TILE * dim;
    }
    void write(const int32_t* table, int head, int position, const float* key, const float* value) const {
        uint16_t *k = tile(table, head, position, 0), *v = tile(table, head, position, 1);
        const int token = position % TILE;
        uint16_t rounded[LANES];
        for (int d = 0; d < dim; d += LANES) {
            store_bf16(rounded, load(key + d));
            for (int i = 0; i < LANES; i++) k[((d + i) / 2 * TILE + token) * 2 + i % 2] = rounded[i];
            store_bf16(rounded, load(value + d));
            for (int i = 0; i < LANES; i++) v[(token / 2 * dim + d + i) * 2 + token % 2] = rounded[i];
        }
    }
};

struct Span {  // some tokens of one row, for one KV head
    const int32_t* table;
    int head, position, tokens;  // of the first token, how many
    const uint16_t* queries;     // [tokens][heads][D], of the heads that share the KV head
    int heads;
    int window;                  // keys a query sees, itself included; 0: all
    float scale;
};

struct AttentionScratch {  // of one thread
    std::vector<float> sums, top, mass;
    void fit(int rows, int dim) { sums.resize((size_t)rows * dim), top.resize(rows), mass.resize((size_t)rows * LANES); }
};

struct Block {  // of keys and values: its tiles, and those to fetch meanwhile, which are its own where nothing is to be fetched
    int first, tiles;
    const uint16_t *keys[4], *values[4], *keys_ahead[4], *values_ahead[4];
};

// q · k of R queries with the keys of a block → out [R][64].
template <int R>
inline void scores(const Span& span, int row, const Block& block, int dim, float* out) {
    const uint32_t* q[R];
    for (int i = 0; i < R; i++) q[i] = (const uint32_t*)(span.queries + (size_t)(row + i) * dim);
    F acc[R][4];
    for (int i = 0; i < R; i++)
        for (int t = 0; t < 4; t++) acc[i][t] = zero();
    for (int d = 0; d < dim / 2; d++) {
        I key[4];
        for (int t = 0; t < 4; t++) key[t] = load_i(block.keys[t] + (size_t)d * PAIR), prefetch(block.keys_ahead[t] + (size_t)d * PAIR);
#pragma GCC unroll 6
        for (int i = 0; i < R; i++) {
            const I value = all_i(q[i][d]);
            for (int t = 0; t < 4; t++) acc[i][t] = dot_bf16(acc[i][t], key[t], value);
        }
    }
    for (int i = 0; i < R; i++)
        for (int t = 0; t < 4; t++) store(out + i * KEYS + t * LANES, acc[i][t]);
}

// sums [R][D] · fade + weights [R][64] · values.
template <int R>
inline void weigh(const uint16_t* weights, const float* fade, const Block& block, int dim, float* sums) {
    for (int d = 0; d < dim; d += 2 * LANES) {
        F acc[R][2];
        for (int i = 0; i < R; i++)
            for (int c = 0; c < 2; c++) acc[i][c] = mul(load(sums + (size_t)i * dim + d + c * LANES), all(fade[i]));
        for (int t = 0; t < block.tiles; t++) {
            for (int pair = 0; pair < TILE / 2; pair++) {
                const size_t at = ((size_t)pair * dim + d) * 2;
                const I a = load_i(block.values[t] + at), b = load_i(block.values[t] + at + PAIR);
                prefetch(block.values_ahead[t] + at), prefetch(block.values_ahead[t] + at + PAIR);
#pragma GCC unroll 6
                for (int i = 0; i < R; i++) {
                    uint32_t two;
                    std::memcpy(&two, weights + i * KEYS + t * TILE + pair * 2, 4);
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

#ifdef __AMX_BF16__
constexpr int QUERY_ROWS = LANES;  // that share a pass over a block: those of a tile

inline void block_scores(const Span& span, int row, int count, const Block& block, int dim, float* out) {
    tile_scores(span.queries + (size_t)row * dim, count, block.keys, block.keys_ahead, dim, out);
}

inline void block_sums(const uint16_t* weights, const float* fade, int count, const Block& block, int dim, float* sums) {
    for (int i = 0; i < count; i++)
        for (float *sum = sums + (size_t)i * dim, *end = sum + dim; fade[i] != 1 && sum < end; sum += LANES) store(sum, mul(load(sum), all(fade[i])));
    tile_weigh(weights, count, block.values, block.values_ahead, block.tiles, dim, sums);
}
#else
constexpr int QUERY_ROWS = 6;  // that share a pass over a block: with four tiles of keys 24 chains

inline void block_scores(const Span& span, int row, int count, const Block& block, int dim, float* out) {
    static constexpr auto of = []<int... I>(std::integer_sequence<int, I...>) { return std::array{scores<I + 1>...}; }(std::make_integer_sequence<int, QUERY_ROWS>());
    of[count - 1](span, row, block, dim, out);
}

inline void block_sums(const uint16_t* weights, const float* fade, int count, const Block& block, int dim, float* sums) {
    static constexpr auto of = []<int... I>(std::integer_sequence<int, I...>) { return std::array{weigh<I + 1>...}; }(std::make_integer_sequence<int, QUERY_ROWS>());
    of[count - 1](weights, fade, block, dim, sums);
}
#endif

// One block of keys for `count` queries from `row` on.
inline void attend_block(const Span& span, int row, int count, const Block& block, int dim, AttentionScratch& scratch) {
    alignas(64) float score[QUERY_ROWS * KEYS];
    alignas(64) uint16_t weights[QUERY_ROWS * KEYS];
    float fade[QUERY_ROWS];
    block_scores(span, row, count, block, dim, score);
    const float unit = span.scale * 1.4426950409f;
    for (int i = 0; i < count; i++) {
        const int position = span.position + (row + i) / span.heads;
        const int end = position + 1 - block.first, begin = span.window ? std::max(0, end - span.window) : 0;
        const bool sees_all = begin == 0 && end >= KEYS;
        const auto seen = [&](F v, F otherwise, int t) { return sees_all ? v : between(v, otherwise, begin - t * LANES, end - t * LANES); };
        F s[4], most = all(NOTHING);
        for (int t = 0; t < 4; t++) {
            s[t] = seen(load(score + i * KEYS + t * LANES), all(NOTHING), t);
            most = greatest(most, s[t]);
        }
        float& highest = scratch.top[row + i];
        const float before = highest;
        highest = std::max(before, ::top(most));
        fade[i] = before == highest ? 1 : std::exp2((before - highest) * unit);
        float* mass = &scratch.mass[(size_t)(row + i) * LANES];
        F total = mul(load(mass), all(fade[i]));
        for (int t = 0; t < 4; t++) {
            const F p = seen(power_of_two(mul(sub(s[t], all(highest)), all(unit))), zero(), t);
            total = add(total, p);
            store_bf16(weights + i * KEYS + t * LANES, p);
        }
        store(mass, total);
    }
    block_sums(weights, fade, count, block, dim, &scratch.sums[(size_t)row * dim]);
}

// put(row, out [D]) for each query of the span, rows in the order (token, head).
template <class Put>
void attend(const Cache& cache, const Span& span, AttentionScratch& scratch, const Put& put) {
    const int rows = span.tokens * span.heads, dim = cache.dim, last = span.position + span.tokens - 1;
    std::fill_n(scratch.sums.data(), (size_t)rows * dim, 0.0f);
    std::fill_n(scratch.mass.data(), (size_t)rows * LANES, 0.0f);
    std::fill_n(scratch.top.data(), rows, NOTHING);
    const int from = span.window ? std::max(0, span.position - span.window + 1) / KEYS * KEYS : 0;
    for (int first = from; first <= last; first += KEYS) {
        Block block{first, std::min(KEYS / TILE, (last - first) / TILE + 1), {}, {}, {}, {}};
        for (int t = 0; t < KEYS / TILE; t++) {  // behind the last tile: the first once more, computed in vain and masked
            const int position = first + (t < block.tiles ? t : 0) * TILE, next = first + KEYS + t * TILE;
            block.keys[t] = cache.tile(span.table, span.head, position, 0), block.values[t] = cache.tile(span.table, span.head, position, 1);
            block.keys_ahead[t] = next <= last ? cache.tile(span.table, span.head, next, 0) : block.keys[t];
            block.values_ahead[t] = next <= last ? cache.tile(span.table, span.head, next, 1) : block.values[t];
        }
        for (int row = 0, left = (rows + QUERY_ROWS - 1) / QUERY_ROWS; left; left--) {
            const int count = (rows - row + left - 1) / left;
            attend_block(span, row, count, block, dim, scratch);
            std::copy(block.keys, block.keys + 4, block.keys_ahead), std::copy(block.values, block.values + 4, block.values_ahead);
            row += count;
        }
    }
    for (int row = 0; row < rows; row++) {
        float* out = &scratch.sums[(size_t)row * dim];
        const F by = all(1.0f / ::sum(load(&scratch.mass[(size_t)row * LANES])));
        for (int d = 0; d < dim; d += LANES) store(out + d, mul(load(out + d), by));
        put(row, out);
    }
}
