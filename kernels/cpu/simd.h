// Sixteen lanes at a time: one register with AVX-512 (BF16 and VNNI), two with AVX2. Nothing else here but amx.h knows the instruction set.
// Every function does one fixed sequence of roundings, so that a lane's result never depends on what stands in the others.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <initializer_list>

constexpr int LANES = 16;

inline uint32_t lanes_below(int n) { return n <= 0 ? 0 : n >= LANES ? 0xFFFFu : (1u << n) - 1; }

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

using F = __m512;         // 16 float32
using I = __m512i;        // 64 bytes
using Number = uint16_t;  // bf16 as activations are kept that enter products
constexpr bool WORDS_FOR_Q8 = false;  // int8 activations as int16 where 8-bit weights read them

inline F zero() { return _mm512_setzero_ps(); }
inline I zero_i() { return _mm512_setzero_si512(); }
inline F all(float x) { return _mm512_set1_ps(x); }
inline I all_i(uint32_t x) { return _mm512_set1_epi32((int)x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline I load_i(const void* p) { return _mm512_loadu_si512(p); }
inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
inline void store_i(void* p, I v) { _mm512_storeu_si512(p, v); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F least(F bound, F x) { return _mm512_min_ps(bound, x); }     // NaN in x stays
inline F greatest(F bound, F x) { return _mm512_max_ps(bound, x); }  // NaN in x stays
inline float sum(F v) { return _mm512_reduce_add_ps(v); }
inline float top(F v) { return _mm512_reduce_max_ps(v); }
inline F rounded(F v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F fraction(F v) { return _mm512_reduce_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }  // v - floor(v)
inline F times_power(F v, F n) { return _mm512_scalef_ps(v, n); }                                  // v · 2^floor(n)
inline F between(F v, F otherwise, int from, int to) {  // lanes from … to - 1 of v
    return _mm512_mask_mov_ps(otherwise, (__mmask16)(lanes_below(to) & ~lanes_below(from)), v);
}
inline F load_some(const float* p, int n) { return _mm512_maskz_loadu_ps((__mmask16)lanes_below(n), p); }  // n lanes, then zeros
inline void store_some(float* p, F v, int n) { _mm512_mask_storeu_ps(p, (__mmask16)lanes_below(n), v); }  // n lanes
inline F kept(F v, uint32_t lanes) { return _mm512_maskz_mov_ps((__mmask16)lanes, v); }                   // zero elsewhere
inline uint32_t at_least(F v, F bound) { return _mm512_cmp_ps_mask(v, bound, _CMP_GE_OQ); }              // not NaN
inline I count_up(int from) { return _mm512_add_epi32(_mm512_set1_epi32(from), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)); }
inline void pack(int32_t* p, I v, uint32_t lanes) { _mm512_storeu_si512(p, _mm512_maskz_compress_epi32((__mmask16)lanes, v)); }  // 16 are written
inline void pack(float* p, F v, uint32_t lanes) { _mm512_storeu_ps(p, _mm512_maskz_compress_ps((__mmask16)lanes, v)); }
struct Sum {  // in float64
    __m512d a = _mm512_setzero_pd(), b = _mm512_setzero_pd();
    void add(F v) {
        a = _mm512_add_pd(a, _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
        b = _mm512_add_pd(b, _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)));
    }
    double value() const { return _mm512_reduce_add_pd(_mm512_add_pd(a, b)); }
};
inline F from_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void store_bf16(uint16_t* p, F v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v)); }
inline void store_bf16(uint16_t* p, F a, F b) { _mm512_storeu_si512(p, (I)_mm512_cvtne2ps_pbh(b, a)); }  // in the time of one
inline F from_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
#ifdef __AVX512VBMI__
struct alignas(64) Bytes {  // of 0 … 127 in bf16, the low and the high ones
    uint8_t low[128] = {}, high[128] = {};
    constexpr Bytes() {
        for (int i = 0; i < 128; i++) low[i] = (uint8_t)(std::bit_cast<uint32_t>((float)i) >> 16), high[i] = (uint8_t)(std::bit_cast<uint32_t>((float)i) >> 24);
    }
};
inline constexpr Bytes BYTES;
inline void widen(uint16_t* p, const int8_t* q) {  // 64 to bf16, exactly: bytes looked up, two instructions for 64
    const I order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), v = _mm512_permutexvar_epi64(order, load_i(q)), place = _mm512_abs_epi8(v);
    const I low = _mm512_permutex2var_epi8(load_i(BYTES.low), place, load_i(BYTES.low + 64));
    const I magnitude = _mm512_permutex2var_epi8(load_i(BYTES.high), place, load_i(BYTES.high + 64));
    const I high = _mm512_ternarylogic_epi64(magnitude, v, _mm512_set1_epi8((char)0x80), 0xF8);  // a | (b & c)
    _mm512_storeu_si512(p, _mm512_unpacklo_epi8(low, high)), _mm512_storeu_si512(p + 32, _mm512_unpackhi_epi8(low, high));
}
#else
inline void widen(uint16_t* p, const int8_t* q) {  // 64 to bf16, exactly
    for (int i = 0; i < 64; i += LANES) store_bf16(p + i, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(q + i)))));
}
#endif
inline void store_i8(int8_t* p, F v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v))); }
inline void store_words(int8_t*, F) {}
inline F dot_bf16(F acc, I a, I b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }  // + a[2i+1] · b[2i+1] + a[2i] · b[2i]
inline I dot_u8_i8(I acc, I a, I b) { return _mm512_dpbusd_epi32(acc, a, b); }                  // four products a lane, exact
inline F to_float(I v) { return _mm512_cvtepi32_ps(v); }
inline I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
inline I low_nibbles(I v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline I high_nibbles(I v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};
using Number = float;  // bf16 as activations are kept that enter products: widened once for all outputs
constexpr bool WORDS_FOR_Q8 = true;  // int8 activations as int16 where 8-bit weights read them

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline I zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline F all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline I all_i(uint32_t x) { return {_mm256_set1_epi32((int)x), _mm256_set1_epi32((int)x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline I load_i(const void* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)}; }
inline void store(float* p, F v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
inline void store_i(void* p, I v) { _mm256_storeu_si256((__m256i*)p, v.a), _mm256_storeu_si256((__m256i*)p + 1, v.b); }
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F least(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F greatest(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline float sum(F v) {
    const __m256 eight = _mm256_add_ps(v.a, v.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)), two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float top(F v) {
    const __m256 eight = _mm256_max_ps(v.a, v.b);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)), two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline F rounded(F v) { return {_mm256_round_ps(v.a, 8), _mm256_round_ps(v.b, 8)}; }
inline F fraction(F v) { return {_mm256_sub_ps(v.a, _mm256_floor_ps(v.a)), _mm256_sub_ps(v.b, _mm256_floor_ps(v.b))}; }
inline __m256 times_power(__m256 v, __m256 n) {
    const __m256 bounded = _mm256_max_ps(_mm256_set1_ps(-126), _mm256_min_ps(_mm256_set1_ps(127), _mm256_floor_ps(n)));
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(bounded), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(v, _mm256_castsi256_ps(exponent));
}
inline F times_power(F v, F n) { return {times_power(v.a, n.a), times_power(v.b, n.b)}; }
inline I count_up(int from) {
    const __m256i first = _mm256_add_epi32(_mm256_set1_epi32(from), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
    return {first, _mm256_add_epi32(first, _mm256_set1_epi32(8))};
}
inline I below(int n) {  // all bits of the first n lanes
    const __m256i bound = _mm256_set1_epi32(n);
    return {_mm256_cmpgt_epi32(bound, count_up(0).a), _mm256_cmpgt_epi32(bound, count_up(0).b)};
}
inline F between(F v, F otherwise, int from, int to) {
    const I out = below(from), in = below(to);
    const __m256i a = _mm256_andnot_si256(out.a, in.a), b = _mm256_andnot_si256(out.b, in.b);
    return {_mm256_blendv_ps(otherwise.a, v.a, _mm256_castsi256_ps(a)), _mm256_blendv_ps(otherwise.b, v.b, _mm256_castsi256_ps(b))};
}
inline F load_some(const float* p, int n) {
    if (n >= LANES) return load(p);
    return {_mm256_maskload_ps(p, below(n).a), _mm256_maskload_ps(p + 8, below(n).b)};
}
inline void store_some(float* p, F v, int n) {
    if (n >= LANES) return store(p, v);
    _mm256_maskstore_ps(p, below(n).a, v.a), _mm256_maskstore_ps(p + 8, below(n).b, v.b);
}
inline uint32_t at_least(F v, F bound) {
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(v.a, bound.a, _CMP_GE_OQ)), high = _mm256_movemask_ps(_mm256_cmp_ps(v.b, bound.b, _CMP_GE_OQ));
    return (uint32_t)(low | high << 8);
}
inline __m256i mask_of(uint32_t lanes) {  // all bits of the lanes of eight
    const __m256i bit = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)lanes), bit), bit);
}
inline F kept(F v, uint32_t lanes) {
    return {_mm256_and_ps(v.a, _mm256_castsi256_ps(mask_of(lanes))), _mm256_and_ps(v.b, _mm256_castsi256_ps(mask_of(lanes >> 8)))};
}
template <class T, class V>
inline void pack(T* p, V v, uint32_t lanes) {
    T x[LANES];
    std::memcpy(x, &v, sizeof x);
    for (; lanes; lanes &= lanes - 1) *p++ = x[__builtin_ctz(lanes)];
}
struct Sum {  // in float64
    __m256d a = _mm256_setzero_pd(), b = _mm256_setzero_pd();
    void add(F v) {
        for (const __m256 half : {v.a, v.b}) {
            a = _mm256_add_pd(a, _mm256_cvtps_pd(_mm256_castps256_ps128(half)));
            b = _mm256_add_pd(b, _mm256_cvtps_pd(_mm256_extractf128_ps(half, 1)));
        }
    }
    double value() const {
        double x[4];
        _mm256_storeu_pd(x, _mm256_add_pd(a, b));
        return (x[0] + x[1]) + (x[2] + x[3]);
    }
};
inline F from_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline __m256i nearest_bf16(__m256 v) {  // in the upper halves of lanes
    const __m256i bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256 near = _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))));
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
    return _mm256_castps_si256(_mm256_blendv_ps(near, nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
}
inline void store_bf16(uint16_t* p, F v) {
    const __m256i words = _mm256_packus_epi32(_mm256_srli_epi32(nearest_bf16(v.a), 16), _mm256_srli_epi32(nearest_bf16(v.b), 16));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(words, 0xD8));
}
inline void store_bf16(float* p, F v) {
    const __m256i upper = _mm256_set1_epi32((int)0xFFFF0000);
    store_i(p, {_mm256_and_si256(nearest_bf16(v.a), upper), _mm256_and_si256(nearest_bf16(v.b), upper)});
}
inline void store_bf16(Number* p, F a, F b) { store_bf16(p, a), store_bf16(p + LANES, b); }
inline __m256i words_to_high(__m128i v) { return _mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16); }
inline F from_bf16(const uint16_t* p) {
    const __m128i *half = (const __m128i*)p;
    return {_mm256_castsi256_ps(words_to_high(_mm_loadu_si128(half))), _mm256_castsi256_ps(words_to_high(_mm_loadu_si128(half + 1)))};
}
inline __m256i high_words(const int8_t* q) {  // of eight float32
    return _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)q)))), 16);
}
inline void widen(uint16_t* p, const int8_t* q) {  // 64 to bf16, exactly
    for (int i = 0; i < 64; i += LANES)
        _mm256_storeu_si256((__m256i*)(p + i), _mm256_permute4x64_epi64(_mm256_packus_epi32(high_words(q + i), high_words(q + i + 8)), 0xD8));
}
inline void store_i8(int8_t* p, F v) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b));  // a0 b0 a1 b1, four words each
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
inline void store_words(int8_t* p, F v) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8), even_low = _mm256_shufflelo_epi16(ordered, 0xD8);
    _mm256_storeu_si256((__m256i*)p, _mm256_shufflehi_epi16(even_low, 0xD8));
}
inline __m256i low_nibbles(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline F to_float(I v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
inline I add_i(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I low_nibbles(I v) { return {low_nibbles(v.a), low_nibbles(v.b)}; }
inline I high_nibbles(I v) { return {low_nibbles(_mm256_srli_epi16(v.a, 4)), low_nibbles(_mm256_srli_epi16(v.b, 4))}; }

#else
#error "needs AVX-512 with BF16 and VNNI, or AVX2 with FMA and F16C"
#endif

inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
inline void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }  // into the second cache

inline float bottom(F v) { return -top(sub(zero(), v)); }

// 2^x, a relative error of 2e-7; 0 < result even for the smallest x, NaN stays NaN.
inline F power_of_two(F x) {
    x = greatest(all(-126), least(all(127), x));
    const F whole = rounded(x), rest = sub(x, whole);
    F p = all(1.5403530e-4f);
    for (const float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) p = fma(p, rest, all(c));
    return times_power(p, whole);
}
// 2^x, a relative error of 8e-5, a twentieth of bf16's; 0 far below (AVX2: 2^-126). NaN stays NaN.
inline F decay(F x) {
    const F rest = fraction(x);
    F p = all(7.80242750e-2f);
    for (const float c : {2.26067267e-1f, 6.95833627e-1f, 9.99925195e-1f}) p = fma(p, rest, all(c));
    return times_power(p, x);
}
inline F silu(F x) { return div(x, add(all(1), power_of_two(mul(x, all(-1.4426950f))))); }
