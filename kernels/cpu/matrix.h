// y = W · x (+ bias) for packed weights. Output rows lie in panels of 16, one lane each; two panels side by side make a task.
//
//   bf16  weights [panel][K/2][16][2]                    2 bytes a weight, x in bf16
//   q8    weights [panel][K/32][8][16][4] of value + 128  1.06, scales [panel][K/32][16] fp16; x in int8, a scale for each 32
//   q4    weights [panel][K/32][4][16][4] two nibbles     0.63, scales [panel][K/32][16 d | 16 m] fp16; w = d · nibble + m
//
// Operations: 2 · N · K a row. An output is one chain of sums in the order of K, whatever the number of rows, the tile or the thread: bit for
// bit the same alone and in any batch. What multiplies: avx2.h, avx512.h, amx.h.
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
constexpr int KEYS = 64;      // of a block of attention
constexpr int TILE = LANES;   // tokens of a tile
constexpr int WEIGHTS = KEYS * sizeof(float) / sizeof(Number);  // from the weights of a query, where its scores lay, to the next one's

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
// -128 · sum [groups][rows], so that what a tile reads of a group lies together. As words they are int16, the even two of four before the odd.
enum Form : uint8_t { AS_NUMBERS, AS_BYTES, AS_WORDS };
struct Rows {
    Form form = AS_NUMBERS;
    int rows = 0, stride = 0;  // stride: a cache line more than the width, so that rows do not share cache sets
    Number* bf16 = nullptr;
    int8_t* q = nullptr;
    float *scale = nullptr, *sum = nullptr;
    int32_t* shift = nullptr;

    void put(int row, int column, const float* values, int count) const {  // whole groups
        if (form == AS_NUMBERS) {
            Number* out = bf16 + (size_t)row * stride + column;
            for (int i = 0; i < count; i += LANES) store_bf16(out + i, load(values + i));
            return;
        }
        for (int i = 0; i < count; i += GROUP) {
            const F a = load(values + i), b = load(values + i + LANES);
            const float most = top(greatest(abs(a), abs(b)));
            const F by = all(most > 0 ? 127.0f / most : 0.0f);
            const F x = rounded(mul(a, by)), y = rounded(mul(b, by));
            const size_t group = (size_t)(column + i) / GROUP * rows + row;
            if (WORDS_FOR_Q8 && form == AS_WORDS) store_words(q + group * 2 * GROUP, x), store_words(q + group * 2 * GROUP + GROUP, y);
            else store_i8(q + group * GROUP, x), store_i8(q + group * GROUP + LANES, y);
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
