// Causal attention over the paged cache, softmax(q · k · scale) · v, keys in blocks of 64 in their order, one online softmax a query.
//
// A page is [kv_heads][block / 16] tiles of 16 tokens: keys [D/2][16 tokens][2], then values [8 pairs of tokens][D][2], bf16, interleaved
// for the product of bf16 pairs. So both products are those of matrix.h, and what one head reads of a tile lies together. In an int8 cache
// these are whole numbers, and behind the values follow scales in bf16, of 16 keys and of 16 values: |largest| / 127 of a token's own key or
// value. A block of them is widened to bf16, which is exact, once for all queries of a span; a key's scale is its scores' factor, a value's
// that of its weights.
//
// Operations: 4 · D for each query head and key, bytes: 4 · D (int8: 2 · D + 4) for each KV head and key, once for all query heads that share it and
// up to 96 queries of a chunk. What masks a key adds exact zeros, so a query's result does not depend on its neighbours in the block.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "amx.h"

constexpr int BLOCK_ROWS = 96;     // queries (token and head) that share a pass over the keys, at least one token's
constexpr float NOTHING = -1e30f;  // below any score, and finite: the difference of two is not NaN
constexpr float LARGE = 1e12f;     // of 64 weights: sums stay far from infinity

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
    const Number* queries;       // [tokens][heads][D], of the heads that share the KV head
    int heads;
    int window;                  // keys a query sees, itself included; 0: all
    float scale;
};

#ifdef __AMX_BF16__
constexpr int QUERY_ROWS = LANES;  // that share a pass over a block: those of a tile
#else
constexpr int QUERY_ROWS = 6;  // that share a pass over a block: with four tiles of keys 24 chains
#endif

struct Block {  // of keys and values: its tiles, and those to fetch meanwhile, which are its own where nothing is to be fetched
    int first, tiles;
    const uint16_t *keys[4], *values[4], *keys_ahead[4], *values_ahead[4];
    alignas(64) float scales[2][KEYS];  // of int8
    Lines<uint16_t> own;                // values of all tiles together, then keys from int8
};

struct AttentionScratch {  // of one thread
    Block block;
    Lines<float> scores, sums, level, mass;  // scores become weights in bf16 where they lie
    void fit(int rows, int dim) {
        scores.resize((size_t)rows * KEYS), sums.resize((size_t)rows * dim), mass.resize((size_t)rows * LANES);
        level.resize(rows), block.own.resize((size_t)2 * KEYS * dim);
    }
    Number* weights(int row) { return (Number*)&scores[(size_t)row * KEYS]; }
};

// Tile t of a block, `at` in the cache, and the one to be fetched meanwhile.
inline void point(const Cache& cache, const uint8_t* at, const uint8_t* ahead, int t, Block& block) {
    const int size = TILE * cache.dim;
    block.keys[t] = (const uint16_t*)at, block.keys_ahead[t] = (const uint16_t*)ahead;
    block.values[t] = (const uint16_t*)(at + cache.side()), block.values_ahead[t] = (const uint16_t*)(ahead + cache.side());
    if (!cache.is_int8) return;
    // The tile to fetch is as long as keys in bf16, and its scales.
    uint16_t* const keys = &block.own[(size_t)t * size] + KEYS * cache.dim;
    for (int i = 0; i < size; i += 64) widen(keys + i, (const int8_t*)at + i);
    for (int side = 0; side < 2; side++) store(block.scales[side] + t * TILE, from_bf16((const uint16_t*)(at + 2 * size) + side * TILE));
    if (ahead != at) prefetch(ahead + 2 * size);
    else block.keys_ahead[t] = keys;
    block.keys[t] = keys;
}

// The values of a block together: those from int8 are widened, and AMX sums over the tokens of two tiles at once.
inline void gather_values(const Cache& cache, Block& block) {
    const int size = TILE * cache.dim;
    for (int t = 0; t < KEYS / TILE && (cache.is_int8 || QUERY_ROWS == LANES); t++) {
        uint16_t* const values = &block.own[(size_t)t * size];
        for (int i = 0; cache.is_int8 && i < size; i += 64) widen(values + i, (const int8_t*)block.values[t] + i);
        for (int i = 0; !cache.is_int8 && i < size; i += PAIR) store_i(values + i, load_i(block.values[t] + i));
        if (cache.is_int8 || block.values_ahead[t] == block.values[t]) block.values_ahead[t] = values;
        block.values[t] = values;
    }
}

// Scores of `count` queries from `row` on, and the sums of their weights. Those who come first fetch for all.
inline void find_scores(const Span& span, int row, int count, int dim, AttentionScratch& scratch) {
    const Block& block = scratch.block;
    const Number* const queries = span.queries + (size_t)row * dim;
    const uint16_t* const* const ahead = row ? block.keys : block.keys_ahead;
    float* const out = &scratch.scores[(size_t)row * KEYS];
#ifdef __AMX_BF16__
    tile_scores(queries, count, block.keys, ahead, dim, out, KEYS);
#else
    static constexpr auto of = []<int... I>(std::integer_sequence<int, I...>) { return std::array{scores<I + 1, Block>...}; }(std::make_integer_sequence<int, QUERY_ROWS>());
    of[count - 1](queries, block, ahead, dim, out);
#endif
}

inline void add_values(int row, int count, int dim, AttentionScratch& scratch) {
    const Block& block = scratch.block;
    const uint16_t* const* const ahead = row ? block.values : block.values_ahead;
    float* const sums = &scratch.sums[(size_t)row * dim];
#ifdef __AMX_BF16__
    tile_weigh(scratch.weights(row), WEIGHTS, count, block.values, ahead, block.tiles, dim, sums);
#else
    static constexpr auto of = []<int... I>(std::integer_sequence<int, I...>) { return std::array{weigh<I + 1, Block>...}; }(std::make_integer_sequence<int, QUERY_ROWS>());
    of[count - 1](scratch.weights(row), block, ahead, dim, sums);
#endif
}

// Of one query: scores of a block's keys → weights 2^(score · unit - level) in bf16 where they lie, and their mass. The level is the highest
// score of the first block seen, and of a later one whose weights would be large: only then is it looked for, and what was summed fades.
// see(v, otherwise, tile) masks.
template <class See>
inline void soften(int row, int dim, const float (*scales)[KEYS], float unit, const See& see, AttentionScratch& scratch) {
    float *const score = &scratch.scores[(size_t)row * KEYS], *const mass = &scratch.mass[(size_t)row * LANES], &level = scratch.level[row];
    F s[KEYS / TILE], p[KEYS / TILE];
    for (int t = 0; t < KEYS / TILE; t++) {
        s[t] = load(score + t * TILE);
        if (scales) s[t] = mul(s[t], load(scales[0] + t * TILE));
    }
    const auto weigh = [&] {
        for (int t = 0; t < KEYS / TILE; t++) p[t] = see(decay(fma(s[t], all(unit), all(level))), zero(), t);
        return add(add(p[0], p[1]), add(p[2], p[3]));
    };
    F total = weigh();
    if (at_least(total, all(LARGE))) [[unlikely]] {
        F most = all(NOTHING);
        for (int t = 0; t < KEYS / TILE; t++) most = greatest(most, see(s[t], all(NOTHING), t));
        const float before = level;
        level = -::top(most) * unit;
        const F fade = all(std::exp2(level - before));
        store(mass, mul(load(mass), fade));
        for (float *sum = &scratch.sums[(size_t)row * dim], *end = sum + dim; sum < end; sum += LANES) store(sum, mul(load(sum), fade));
        total = weigh();
    }
    store(mass, add(load(mass), total));
    for (int t = 0; scales && t < KEYS / TILE; t++) p[t] = mul(p[t], load(scales[1] + t * TILE));
    for (int t = 0; t < KEYS / TILE; t += 2) store_bf16(scratch.weights(row) + t * TILE, p[t], p[t + 1]);
}

inline void soften(const Span& span, int row, int count, int dim, bool is_int8, AttentionScratch& scratch) {
    const Block& block = scratch.block;
    const float unit = span.scale * 1.4426950409f;
    for (int end_row = row + count; row < end_row; row++) {
        const int end = span.position + row / span.heads + 1 - block.first, begin = span.window ? std::max(0, end - span.window) : 0;
        const auto one = [&](const auto& see) { soften(row, dim, is_int8 ? block.scales : nullptr, unit, see, scratch); };
        if (begin == 0 && end >= KEYS) one([](F v, F, int) { return v; });
        else one([&](F v, F otherwise, int t) { return between(v, otherwise, begin - t * TILE, end - t * TILE); });
    }
}

// put(row, out [D]) for each query of the span, rows in the order (token, head).
template <class Put>
void attend(const Cache& cache, const Span& span, AttentionScratch& scratch, const Put& put) {
    const int rows = span.tokens * span.heads, dim = cache.dim, last = span.position + span.tokens - 1;
    const int passes = (rows + QUERY_ROWS - 1) / QUERY_ROWS, each = (rows + passes - 1) / passes;
    std::fill_n(scratch.sums.data(), (size_t)rows * dim, 0.0f);
    std::fill_n(scratch.mass.data(), (size_t)rows * LANES, 0.0f);
    std::fill_n(scratch.level.data(), rows, -NOTHING);
    const int from = span.window ? std::max(0, span.position - span.window + 1) / KEYS * KEYS : 0;
    for (int first = from; first <= last; first += KEYS) {
        Block& block = scratch.block;
        block.first = first, block.tiles = std::min(KEYS / TILE, (last - first) / TILE + 1);
        for (int t = 0; t < KEYS / TILE; t++) {  // behind the last tile: the first once more, computed in vain and masked
            const int position = first + (t < block.tiles ? t : 0) * TILE, next = first + KEYS + t * TILE;
            const uint8_t* const tile = cache.tile(span.table, span.head, position);
            point(cache, tile, next <= last ? cache.tile(span.table, span.head, next) : tile, t, block);
        }
        // By turns, so that units of the CPU work side by side.
        const auto count = [&](int row) { return std::min(each, rows - row); };
        find_scores(span, 0, count(0), dim, scratch);
        for (int row = 0; row < rows; row += each) {
            soften(span, row, count(row), dim, cache.is_int8, scratch);
            if (!row) gather_values(cache, block);
            if (row + each < rows) find_scores(span, row + each, count(row + each), dim, scratch);
            add_values(row, count(row), dim, scratch);
        }
    }
    for (int row = 0; row < rows; row++) {
        float* out = &scratch.sums[(size_t)row * dim];
        const F by = all(1.0f / ::sum(load(&scratch.mass[(size_t)row * LANES])));
        for (int d = 0; d < dim; d += LANES) store(out + d, mul(load(out + d), by));
        put(row, out);
    }
}
