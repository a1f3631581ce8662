// Causal attention over the paged cache, softmax(q · k · scale) · v, keys in blocks of 64 in their order, one online softmax a query.
//
// A page is [kv_heads][block / 16] tiles of 16 tokens: keys [D/2][16 tokens][2], then values [8 pairs of tokens][D][2], bf16, interleaved
// for the product of bf16 pairs. So both products are those of matrix.h, and what one head reads of a tile lies together. In an int8 cache
// these are whole numbers, and behind the values follow scales in bf16, of 16 keys and of 16 values: |largest| / 127 of a token's own key or
// value. A block of them is widened to bf16, which is exact, once for all queries of a span; a key's scale is its scores' factor, a value's
// that of its weights.
//
// Operations: 4 · D for each query head and key, bytes: 4 · D (int8: 2 · D + 4) for each KV head and key, once for all query heads that share it and
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
    uint8_t* pages;
    int kv_heads, block, dim;
    bool is_int8;
    size_t side() const { return (size_t)TILE * dim * (is_int8 ? 1 : 2); }                       // bytes of a tile's keys, or values
    size_t tile_bytes() const { return 2 * side() + (is_int8 ? 2 * TILE * sizeof(uint16_t) : 0); }
    size_t page_bytes() const { return (size_t)kv_heads * (block / TILE) * tile_bytes(); }
    uint8_t* tile(const int32_t* table, int head, int position) const {
        const size_t lane = (size_t)table[position / block] * kv_heads + head;
        return pages + (lane * (block / TILE) + position % block / TILE) * tile_bytes();
    }
    void write(const int32_t* table, int head, int position, const float* key, const float* value) const {
        uint8_t* const to = tile(table, head, position);
        const int token = position % TILE;
        uint16_t* const scales = (uint16_t*)(to + 2 * side()) + token;
        const auto key_place = [&](int i) { return (i / 2 * TILE + token) * 2 + i % 2; };
        const auto value_place = [&](int i) { return (token / 2 * dim + i) * 2 + token % 2; };
        if (is_int8) {
            quantise(key, (int8_t*)to, scales, key_place), quantise(value, (int8_t*)(to + side()), scales + TILE, value_place);
            return;
        }
        round(key, (uint16_t*)to, key_place), round(value, (uint16_t*)(to + side()), value_place);
    }

   private:
    template <class Place>
    void round(const float* x, uint16_t* to, const Place& place) const {
        uint16_t rounded[LANES];
        for (int d = 0; d < dim; d += LANES) {
            store_bf16(rounded, load(x + d));
            for (int i = 0; i < LANES; i++) to[place(d + i)] = rounded[i];
        }
    }
    template <class Place>
    void quantise(const float* x, int8_t* to, uint16_t* scale, const Place& place) const {
        F most = zero(), none = zero();
        for (int d = 0; d < dim; d += LANES) most = greatest(most, abs(load(x + d))), none = fma(load(x + d), zero(), none);
        const float off = sum(none);  // NaN where x is not finite: then so is the scale
        uint16_t scales[LANES];
        store_bf16(scales, all(top(most) / 127.0f + off));
        float step[LANES];
        store(step, from_bf16(scales));
        *scale = scales[0];
        const F by = all(step[0] > 1e-37f ? 1 / step[0] : 0);
        int8_t q[LANES];
        for (int d = 0; d < dim; d += LANES) {
            store_i8(q, rounded(mul(load(x + d), by)));
            for (int i = 0; i < LANES; i++) to[place(d + i)] = q[i];
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
    Lines<float> sums, top, mass;
    alignas(64) float scales[2][KEYS];  // of a block's keys and values
    Lines<uint16_t> wide;  // its keys and values, from int8
    void fit(int rows, int dim, bool is_int8) {
        sums.resize((size_t)rows * dim), top.resize(rows), mass.resize((size_t)rows * LANES);
        if (is_int8) wide.resize((size_t)2 * KEYS * dim);
    }
};

struct Block {  // of keys and values: its tiles, and those to fetch meanwhile, which are its own where nothing is to be fetched
    int first, tiles;
    const uint16_t *keys[4], *values[4], *keys_ahead[4], *values_ahead[4];

    void point(int t, const uint8_t* tile, const uint8_t* ahead, size_t side) {
        keys[t] = (const uint16_t*)tile, values[t] = (const uint16_t*)(tile + side);
        keys_ahead[t] = (const uint16_t*)ahead, values_ahead[t] = (const uint16_t*)(ahead + side);
    }
};

// Tile t of a block from an int8 cache, and its scales.
inline const uint8_t* widened(const Cache& cache, const uint8_t* tile, int t, AttentionScratch& scratch) {
    const int count = 2 * TILE * cache.dim;
    uint16_t* const to = &scratch.wide[(size_t)t * count];
    for (int i = 0; i < count; i += 64) widen(to + i, (const int8_t*)tile + i);
    for (int side = 0; side < 2; side++) store(scratch.scales[side] + t * TILE, from_bf16((const uint16_t*)(tile + count) + side * TILE));
    return (const uint8_t*)to;
}

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
    tile_scores(span.queries + (size_t)row * dim, count, block.keys, block.keys_ahead, dim, out, KEYS);
}

inline void block_sums(const uint16_t* weights, const float* fade, int count, const Block& block, int dim, float* sums) {
    for (int i = 0; i < count; i++)
        for (float *sum = sums + (size_t)i * dim, *end = sum + dim; fade[i] != 1 && sum < end; sum += LANES) store(sum, mul(load(sum), all(fade[i])));
    tile_weigh(weights, KEYS, count, block.values, block.values_ahead, block.tiles, dim, sums);
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

// Of one query: scores of a block's keys → weights in bf16, and what its sums fade by. see(v, otherwise, tile) masks; scales may be null.
template <class See>
inline void soften(const float* score, const float (*scales)[KEYS], float unit, const See& see, float& highest, float* mass, float& fade,
                   uint16_t* weights) {
    F s[KEYS / TILE], most = all(NOTHING);
    for (int t = 0; t < KEYS / TILE; t++) {
        s[t] = load(score + t * TILE);
        if (scales) s[t] = mul(s[t], load(scales[0] + t * TILE));
        most = greatest(most, see(s[t], all(NOTHING), t));
    }
    const float before = highest;
    highest = std::max(before, ::top(most));
    fade = before == highest ? 1 : std::exp2((before - highest) * unit);
    const F by = all(unit), least = all(-highest * unit);
    F total = mul(load(mass), all(fade));
    for (int t = 0; t < KEYS / TILE; t++) {
        const F p = see(decay(fma(s[t], by, least)), zero(), t);
        total = add(total, p);
        store_bf16(weights + t * TILE, scales ? mul(p, load(scales[1] + t * TILE)) : p);
    }
    store(mass, total);
}

// One block of keys for `count` queries from `row` on.
inline void attend_block(const Span& span, int row, int count, const Block& block, int dim, bool is_int8, AttentionScratch& scratch) {
    alignas(64) float score[QUERY_ROWS * KEYS];
    alignas(64) uint16_t weights[QUERY_ROWS * KEYS];
    float fade[QUERY_ROWS];
    block_scores(span, row, count, block, dim, score);
    const float unit = span.scale * 1.4426950409f;
    for (int i = 0; i < count; i++) {
        const int end = span.position + (row + i) / span.heads + 1 - block.first, begin = span.window ? std::max(0, end - span.window) : 0;
        const auto one = [&](const auto& see) {
            soften(score + i * KEYS, is_int8 ? scratch.scales : nullptr, unit, see, scratch.top[row + i], &scratch.mass[(size_t)(row + i) * LANES],
                   fade[i], weights + i * KEYS);
        };
        if (begin == 0 && end >= KEYS) one([](F v, F, int) { return v; });
        else one([&](F v, F otherwise, int t) { return between(v, otherwise, begin - t * TILE, end - t * TILE); });
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
            const uint8_t *tile = cache.tile(span.table, span.head, position), *ahead = next <= last ? cache.tile(span.table, span.head, next) : tile;
            if (cache.is_int8) {  // the tile to fetch is as long as keys in bf16, and its scales
                const uint8_t* const wide = widened(cache, tile, t, scratch);
                block.point(t, wide, wide, cache.dim * TILE * sizeof(uint16_t));
                if (ahead != tile) block.keys_ahead[t] = (const uint16_t*)ahead, prefetch(ahead + 2 * cache.side());
                continue;
            }
            block.point(t, tile, ahead, cache.side());
        }
        for (int row = 0, left = (rows + QUERY_ROWS - 1) / QUERY_ROWS; left; left--) {
            const int count = (rows - row + left - 1) / left;
            attend_block(span, row, count, block, dim, cache.is_int8, scratch);
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
