// bf16 products by the CPU's unit for tiles (AMX), in the layouts of matrix.h and attention.h, which are tiles as they lie.
//
// One instruction multiplies up to 16 rows by 16 outputs by 32 of K: 8,192 products in 16 cycles, for which the same CPU's VDPBF16PS
// takes some 500. Two tiles of rows by two panels are done together: 4 KB loaded for 32,768 products. Bytes: the weights once for up
// to 32 rows, keys and values of a block once for 16 queries.
//
// The 16 even and the 16 odd products of a tile are summed apart, then both are added to the chain: another order than VDPBF16PS has.
// So tiles serve every number of rows, one too, and all of attention; a row's bits depend neither on the others nor on their number.
// Quantised weights stay with matrix.h: a group of 32 bytes fills half a tile, and scaling its 256 sums takes longer than the product.
#pragma once
#include "matrix.h"

#ifdef __AMX_BF16__

constexpr int BLOCK_TILES = 4;  // of keys, see attention.h

// The registers of one thread: 0 … 3 sums, 4 and 5 x, 6 and 7 what it is multiplied by. What the intrinsics read they hide from the
// compiler, so `use` comes between what this thread has just written and their loads.
class Registers {
   public:
    // Rows of 0 and 1, of 2 and 3, of 4, 5; quads of bytes of K in 4 | 6, in 5 | 7. The cut that is there already costs nothing.
    struct Cut {
        int low, high, fourth, fifth, depth, other_depth;
    };
    static void use(const Cut& cut) {
        asm volatile("" ::: "memory");
        if (!std::memcmp(&cut, &now_, sizeof cut)) return;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        const int rows[8] = {cut.low, cut.low, cut.high, cut.high, cut.fourth, cut.fifth, cut.depth, cut.other_depth};
        for (int i = 0; i < 8; i++) {
            shape.rows[i] = (uint8_t)rows[i];
            shape.bytes[i] = (uint16_t)(!rows[i] ? 0 : i == 4 ? 4 * cut.depth : i == 5 ? 4 * cut.other_depth : 64);
        }
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
constexpr int FULL = 16, HALF = 8;

// 32 outputs of up to 32 rows → out [rows][32].
inline void product_bf16(const Matrix& w, const Rows& x, int row, int count, int pair, float* out) {
    constexpr int ROW = PAIR * sizeof(float), STEP = LANES * PAIR;
    const int low = std::min(count, LANES), high = count - low;
    float* const second = out + STEP;
    for (int i = 0; i < count * PAIR; i += LANES) store(out + i, w.bias ? load(w.bias + pair * PAIR + i % PAIR) : zero());
    Registers::use({low, high, low, high, FULL, FULL});
    _tile_loadd(0, out, ROW);
    _tile_loadd(1, out + LANES, ROW);
    if (high) {
        _tile_loadd(2, second, ROW);
        _tile_loadd(3, second + LANES, ROW);
    }
    const uint16_t *left = (const uint16_t*)w.weights + (size_t)pair * 2 * w.columns * LANES, *right = left + (size_t)w.columns * LANES;
    const uint16_t* in = x.bf16 + (size_t)row * x.stride;
    for (int k = 0; k < w.columns; k += PAIR, left += STEP, right += STEP) {
        for (int i = 0; i < STEP && row == 0; i += PAIR) prefetch(left + 2 * AHEAD + i), prefetch(right + 2 * AHEAD + i);
        _tile_loadd(4, in + k, x.stride * 2);
        _tile_loadd(6, left, 64);
        _tile_loadd(7, right, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!high) continue;
        _tile_loadd(5, in + (size_t)LANES * x.stride + k, x.stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, ROW);
    _tile_stored(1, out + LANES, ROW);
    if (high) {
        _tile_stored(2, second, ROW);
        _tile_stored(3, second + LANES, ROW);
    }
}

constexpr int BF16_ROWS = 2 * LANES;

inline void product(const Matrix& w, const Rows& x, int row, int count, int pair, float* out) {
    if (w.kind == BF16) return product_bf16(w, x, row, count, pair, out);
    TILES[count - 1](w, x, row, pair, out);
}

// A tile of 16 lines to be fetched, `ahead`, where that is another than the one in use.
inline void fetch_tile(const uint16_t* ahead, const uint16_t* used) {
    for (int i = 0; i < FULL && ahead != used; i++) prefetch(ahead + i * PAIR);
}

// q [count][D] · keys of four tiles → out [count][64].
inline void tile_scores(const uint16_t* q, int count, const uint16_t* const* keys, const uint16_t* const* ahead, int dim, float* out) {
    constexpr int ROW = BLOCK_TILES * LANES * sizeof(float);
    Registers::use({count, count, count, count, FULL, HALF});
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < dim; d += PAIR) {
        const size_t at = (size_t)d * LANES;
        for (int t = 0; t < BLOCK_TILES; t++) fetch_tile(ahead[t] + at, keys[t] + at);
        _tile_loadd(4, q + d, dim * 2);
        _tile_loadd(6, keys[0] + at, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(6, keys[1] + at, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(6, keys[2] + at, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(6, keys[3] + at, 64);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, out, ROW);
    _tile_stored(1, out + LANES, ROW);
    _tile_stored(2, out + 2 * LANES, ROW);
    _tile_stored(3, out + 3 * LANES, ROW);
}

// sums [count][D] += weights [count][64] · values of the tiles.
inline void tile_weigh(const uint16_t* weights, int count, const uint16_t* const* values, const uint16_t* const* ahead, int tiles, int dim, float* sums) {
    Registers::use({count, count, count, count, FULL, HALF});
    for (int d = 0; d < dim; d += PAIR) {
        _tile_loadd(0, sums + d, dim * 4);
        _tile_loadd(1, sums + d + LANES, dim * 4);
        for (int t = 0; t < tiles; t++) {
            const uint16_t* at = values[t] + d * 2;
            fetch_tile(ahead[t] + (size_t)d * LANES, values[t] + (size_t)d * LANES);
            _tile_loadd(5, weights + t * LANES, BLOCK_TILES * LANES * 2);
            _tile_loadd(7, at, dim * 4);
            _tile_dpbf16ps(0, 5, 7);
            _tile_loadd(7, at + PAIR, dim * 4);
            _tile_dpbf16ps(1, 5, 7);
        }
        _tile_stored(0, sums + d, dim * 4);
        _tile_stored(1, sums + d + LANES, dim * 4);
    }
}

#else

struct Registers {
    static void release() {}
};
constexpr int BF16_ROWS = ROWS;

inline void product(const Matrix& w, const Rows& x, int row, int count, int pair, float* out) { TILES[count - 1](w, x, row, pair, out); }

#endif

// put(first row, rows, out [PAIRS][rows][32]) for all rows of PAIRS neighbouring tasks, in tiles of nearly equal height.
template <int PAIRS, class Put>
void outputs(const Matrix& w, const Rows& x, int rows, int pair, const Put& put) {
    alignas(64) float out[PAIRS * BF16_ROWS * PAIR];
    const int most = x.quantised ? ROWS : BF16_ROWS;
    for (int row = 0, left = (rows + most - 1) / most; left; left--) {
        const int count = (rows - row + left - 1) / left;
        for (int i = 0; i < PAIRS; i++) product(w, x, row, count, pair + i, out + i * count * PAIR);
        put(row, count, out);
        row += count;
    }
}
