// bf16 products by the CPU's unit for tiles (AMX), in the layouts of matrix.h and attention.h, which are tiles as they lie.
//
// One instruction multiplies up to 16 rows by 16 outputs by 32 of K: 8,192 products in 16 cycles, for which the same CPU's VDPBF16PS
// takes some 500. Two tiles of rows by two panels are done together: 4 KB loaded for 32,768 products, which take 64 cycles, and a second
// cache brings some 32 bytes a cycle. So of the many rows of a prompt a task's two panels stay in the first cache, 576 of K at a time,
// and what passes says that it need not stay; rows come in ranges that the second cache holds beside the weights. Bytes: the weights once
// for a range, x once for each pair of panels from the second cache, keys and values of a block once for 16 queries.
// What is done with a block's outputs is done while the next is multiplied: both have units of their own.
//
// The 16 even and the 16 odd products of a tile are summed apart, then both are added to the chain: another order than VDPBF16PS has.
// So tiles serve every number of rows, one too, and all of attention; a row's bits depend neither on the others nor on their number. A
// chain that is put down in float32 between two parts of K is the same chain.
// Quantised weights stay with matrix.h: scaling the 256 sums of a group and tile takes longer than the product (docs/cpu-step.md).
#pragma once
#include "avx2.h"
#include "avx512.h"

#ifdef __AMX_BF16__

// The registers of one thread: 0 … 3 sums, 4 and 5 x, 6 and 7 what it is multiplied by. What the intrinsics read they hide from the
// compiler, so `use` comes between what this thread has just written and their loads.
class Registers {
   public:
    // Rows of 0, 1 and 4, of 2, 3 and 5. The cut that is there already costs nothing.
    struct Cut {
        int low, high;
    };
    static void use(const Cut& cut) {
        asm volatile("" ::: "memory");
        if (!std::memcmp(&cut, &now_, sizeof cut)) return;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        const int rows[8] = {cut.low, cut.low, cut.high, cut.high, cut.low, cut.high, LANES, LANES};
        for (int i = 0; i < 8; i++) {
            shape.rows[i] = (uint8_t)rows[i];
            shape.bytes[i] = rows[i] ? 64 : 0;
        }
        asm volatile("" ::"r"(&shape) : "memory");  // all of it, of which the intrinsic names eight bytes
        _tile_loadconfig(&shape);
        now_ = cut;
    }
    static void release() {  // a thread that holds none is cheap to switch
        _tile_release();
        now_ = {};
    }

   private:
    static inline thread_local Cut now_{};
};

constexpr int STEP = LANES * PAIR;    // weights of a tile
constexpr int BLOCK = 2 * LANES;      // rows that are multiplied at once
constexpr int PART_STEPS = 18;        // of K, 32 each: their two panels stay in the first cache while rows pass
constexpr int RANGE_BYTES = 800 << 10, RANGE_ROWS = 512;  // of x, which stay in the second cache while a matrix passes
alignas(64) inline constexpr float NO_BIAS[PAIR] = {};

struct ProductScratch {  // of one thread
    Lines<float> out;
    void fit() { out.resize(2 * RANGE_ROWS * PAIR); }
};

struct Panels {  // two, side by side, a tile for each step
    const uint16_t *left, *right;
};

// Of a task's weights, those of four steps later.
inline void fetch_ahead(const Panels& w, int step) {
    const size_t at = (size_t)(step + 4) * STEP;
    for (int i = 0; i < STEP; i += PAIR) prefetch(w.left + at + i), prefetch(w.right + at + i);
}

// `start` + x [count][steps · 32] · weights → out [count][line], in tiles. meanwhile(step) is called at every 32 of K: what does not wait for
// these tiles is done while they are multiplied. What is seen once leaves the first cache to the rest: x, or the weights of few rows.
template <bool MANY, class Meanwhile>
inline void multiply_block(const Panels& w, const uint16_t* x, int stride, int count, int from, int to, const float* start, int start_line,
                           float* out, int line, const Meanwhile& meanwhile) {
    const int low = std::min(count, LANES), high = count - low;
    Registers::use({low, high});
    _tile_loadd(0, start, start_line * 4);
    _tile_loadd(1, start + LANES, start_line * 4);
    if (high) {
        _tile_loadd(2, start + LANES * start_line, start_line * 4);
        _tile_loadd(3, start + LANES * start_line + LANES, start_line * 4);
    }
    for (int step = from; step < to; step++) {
        meanwhile(step);
        const uint16_t* const in = x + (size_t)step * PAIR;
        if (MANY) _tile_stream_loadd(4, in, stride * 2);
        else _tile_loadd(4, in, stride * 2);
        _tile_loadd(6, w.left + (size_t)step * STEP, 64);
        _tile_loadd(7, w.right + (size_t)step * STEP, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!high) continue;
        if (MANY) _tile_stream_loadd(5, in + (size_t)LANES * stride, stride * 2);
        else _tile_loadd(5, in + (size_t)LANES * stride, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, line * 4);
    _tile_stored(1, out + LANES, line * 4);
    if (high) {
        _tile_stored(2, out + LANES * line, line * 4);
        _tile_stored(3, out + LANES * line + LANES, line * 4);
    }
}

// put(row, y [PAIRS · 32]) for every row of a range and PAIRS neighbouring tasks: a block's while the next is multiplied.
template <int PAIRS, class Put>
void outputs_bf16(const Matrix& w, const Rows& x, const Range& range, int pair, ProductScratch& own, const Put& put) {
    constexpr int WIDTH = PAIRS * PAIR;
    const int steps = w.columns / PAIR, blocks = (range.count + BLOCK - 1) / BLOCK, parts = blocks > 1 ? (steps + PART_STEPS - 1) / PART_STEPS : 1;
    const size_t size = (size_t)w.columns * PAIR;
    const uint16_t *const weights = (const uint16_t*)w.weights + pair * size, *fetched = weights + PAIRS * size;  // of the next tasks
    int waiting = 0, next = 0;  // rows whose outputs wait to be put, the first of them
    const float* y = nullptr;
    const auto put_some = [&](int some) {
        for (; some && waiting; some--, waiting--, y += WIDTH) put(next++, y);
    };
    for (int part = 0; part < parts; part++) {
        const int from = steps * part / parts, to = steps * (part + 1) / parts;
        for (int block = 0; block < blocks; block++) {
            const int row = range.first + block * BLOCK, count = std::min(BLOCK, range.first + range.count - row);
            const int each = (waiting + PAIRS * (to - from) - 1) / (PAIRS * (to - from));
            float* const out = &own.out[(size_t)(parts > 1 ? block : block % 2) * BLOCK * WIDTH];
            for (int i = 0; i < PAIRS; i++) {
                const Panels panels{weights + i * size, weights + i * size + size / 2};
                const float* const start = part ? out + i * PAIR : w.bias ? w.bias + (pair + i) * PAIR : NO_BIAS;  // a bias is every row's
                const auto meanwhile = [&](int step) {
                    if (block == 0) return fetch_ahead(panels, step);
                    put_some(each);
                    for (int line = 0; line < 2 * LANES; line += blocks - 1, fetched += PAIR) prefetch_far(fetched);
                };
                const auto multiply = blocks > 1 ? multiply_block<true, decltype(meanwhile)> : multiply_block<false, decltype(meanwhile)>;
                multiply(panels, x.bf16 + (size_t)row * x.stride, x.stride, count, from, to, start, part ? WIDTH : 0, out + i * PAIR, WIDTH, meanwhile);
            }
            if (part + 1 == parts) put_some(waiting), waiting = count, next = row, y = out;
        }
    }
    put_some(waiting);
}

template <int PAIRS, class Put>
void outputs(const Matrix& w, const Rows& x, const Range& range, int pair, ProductScratch& own, const Put& put) {
    if (w.kind == BF16) return outputs_bf16<PAIRS>(w, x, range, pair, own, put);
    outputs_by_rows<PAIRS>(w, x, range, pair, put);
}

// Lines to be fetched, `ahead`, where those are others than the ones in use.
inline void fetch_lines(const uint16_t* ahead, const uint16_t* used, size_t at, int lines) {
    for (int i = 0; i < lines && ahead != used; i++) prefetch(ahead + at + i * PAIR);
}

// q [count][D] · keys of four tiles → out [count][line].
inline void tile_scores(const uint16_t* q, int count, const uint16_t* const* keys, const uint16_t* const* ahead, int dim, float* out, int line) {
    Registers::use({count, count});
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < dim; d += PAIR) {
        const size_t at = (size_t)d * LANES;
        for (int t = 0; t < 4; t++) fetch_lines(ahead[t], keys[t], at, LANES);
        _tile_loadd(4, q + d, dim * 2);
        _tile_loadd(6, keys[0] + at, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, keys[1] + at, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, keys[2] + at, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, keys[3] + at, 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, out, line * 4);
    _tile_stored(1, out + LANES, line * 4);
    _tile_stored(2, out + 2 * LANES, line * 4);
    _tile_stored(3, out + 3 * LANES, line * 4);
}

// sums [count][D] += weights [count][line] · values of the tiles, which follow one another by twos; 32 tokens and 64 of D at once, or 32.
inline void tile_weigh(const uint16_t* weights, int line, int count, const uint16_t* const* values, const uint16_t* const* ahead, int tiles,
                       int dim, float* sums) {
    Registers::use({count, count});
    for (int d = 0; d < dim; d += 2 * PAIR) {
        const bool is_whole = d + PAIR < dim;
        float* const to = sums + d;
        _tile_loadd(0, to, dim * 4);
        _tile_loadd(1, to + LANES, dim * 4);
        if (is_whole) {
            _tile_loadd(2, to + 2 * LANES, dim * 4);
            _tile_loadd(3, to + 3 * LANES, dim * 4);
        }
        for (int t = 0; t < tiles; t += 2) {
            const uint16_t* const at = values[t] + d * 2;
            for (int i = t; i < t + 2; i++) fetch_lines(ahead[i], values[i], (size_t)d * LANES, is_whole ? 2 * LANES : LANES);
            _tile_loadd(5, weights + t * LANES, line * 2);
            _tile_loadd(7, at, dim * 4);
            _tile_dpbf16ps(0, 5, 7);
            _tile_loadd(6, at + PAIR, dim * 4);
            _tile_dpbf16ps(1, 5, 6);
            if (is_whole) {
                _tile_loadd(7, at + 2 * PAIR, dim * 4);
                _tile_dpbf16ps(2, 5, 7);
                _tile_loadd(6, at + 3 * PAIR, dim * 4);
                _tile_dpbf16ps(3, 5, 6);
            }
        }
        _tile_stored(0, to, dim * 4);
        _tile_stored(1, to + LANES, dim * 4);
        if (is_whole) {
            _tile_stored(2, to + 2 * LANES, dim * 4);
            _tile_stored(3, to + 3 * LANES, dim * 4);
        }
    }
}

#else

struct Registers {
    static void release() {}
};
constexpr int RANGE_BYTES = 1 << 20, RANGE_ROWS = 1 << 20;

struct ProductScratch {
    void fit() {}
};

template <int PAIRS, class Put>
void outputs(const Matrix& w, const Rows& x, const Range& range, int pair, ProductScratch&, const Put& put) {
    outputs_by_rows<PAIRS>(w, x, range, pair, put);
}

#endif

inline int Range::blocks(const Rows& x, int rows) {
    const int most = std::clamp(RANGE_BYTES / (x.stride * (int)(x.form == AS_NUMBERS ? sizeof(Number) : 1)), PAIR, RANGE_ROWS);
    return (rows + most - 1) / most;
}
