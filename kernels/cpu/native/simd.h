// Sixteen lanes of float32, and the two element formats of the cache as dot products over them.
// Knows nothing of pages, rows or plans.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Loops over arrays that are to stay in registers.
#define UNROLL _Pragma("GCC unroll 8")

namespace radixrt {

// Call f(integral_constant<min(n, MAX)>); n is at least 1.
template <int MAX, class F>
inline void with_constant(int64_t n, const F& f) {
    if constexpr (MAX > 1) {
        if (n < MAX) return with_constant<MAX - 1>(n, f);
    }
    f(std::integral_constant<int, MAX>{});
}

constexpr int LANES = 16;
constexpr int CHUNK = 32;  // elements or positions whose products are added up by themselves, where CHAINS are 2
#if defined(__AVX512F__)
constexpr int REGISTER_ROWS = 6;  // beside 4 vectors: 6 * 4 sums, 4 cached vectors and a weight fill 32 registers
#else
constexpr int REGISTER_ROWS = 2;
#endif
typedef float f32x16 __attribute__((vector_size(64), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64), may_alias));
typedef uint32_t u32x16 __attribute__((vector_size(64), may_alias));
typedef uint32_t u32x8 __attribute__((vector_size(32), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32), may_alias));

template <class Vector>
inline Vector load(const void* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class Vector>
inline void store(void* to, Vector v) {
    std::memcpy(to, &v, sizeof v);
}

constexpr i32x16 LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline f32x16 splat(float x) { return f32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// a * b + c, rounded once. Spelled out, because results must not depend on what a compiler contracts.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    struct Halves { __m256 low, high; } x = load<Halves>(&a), y = load<Halves>(&b), z = load<Halves>(&c);
    z = {_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)};
    return load<f32x16>(&z);
#else
    for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// 2^x for x <= 1, zero below 2^-126; NaN stays NaN. At most 1 ulp off.
inline f32x16 exp2(f32x16 x) {
#if defined(__AVX512DQ__)
    constexpr int NEAREST = 0x8;
    const f32x16 f = (f32x16)_mm512_reduce_ps((__m512)x, NEAREST);  // x less the nearest integer
#else
    // Adding 1.5 * 2^23 + 127 rounds to an integer and leaves the exponent in the low bits.
    const f32x16 shifted = x + 12583039.0f;
    const f32x16 f = x - (shifted - 12583039.0f);
#endif
    // Least maximal relative error on [-0.5, 0.5] (2e-9) among the polynomials with value 1 at 0.
    f32x16 p = splat(1.5353362e-4f);
    p = fma(p, f, splat(1.3398875e-3f));
    p = fma(p, f, splat(9.618437e-3f));
    p = fma(p, f, splat(5.5503324e-2f));
    p = fma(p, f, splat(2.4022648e-1f));
    p = fma(p, f, splat(6.931472e-1f));
    p = fma(p, f, splat(1.0f));
#if defined(__AVX512DQ__)
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (f32x16)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)(x - f));
#else
    const f32x16 scaled = p * (f32x16)((u32x16)shifted << 23);
    return x < -126.0f ? f32x16{} : scaled;
#endif
}

#if defined(__AVX512DQ__)

// The same within 9e-5 of the result, a twentieth of what rounding it to bfloat16 may be, in half of the time. Below
// 2^-126 as the CPU's mode says.
inline f32x16 coarse_exp2(f32x16 x) {
    constexpr int FLOOR = 0x9;
    const f32x16 f = (f32x16)_mm512_reduce_ps((__m512)x, FLOOR);  // x - floor(x)
    f32x16 p = splat(7.706724e-2f);  // as above, on [0, 1]
    p = fma(p, f, splat(2.2764498e-1f));
    p = fma(p, f, splat(6.9511664e-1f));
    p = fma(p, f, splat(1.0f));
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)x);  // p * 2^floor(x)
}

#endif

// tanh through 2^-|y|: absolute error below 1e-7.
inline f32x16 tanh(f32x16 x) {
    const f32x16 size = (f32x16)((u32x16)x & 0x7FFFFFFFu);
    const f32x16 decay = exp2(size * -2.8853900818f);  // e^(-2 |x|)
    const f32x16 result = (1.0f - decay) / (1.0f + decay);
    return (f32x16)((u32x16)result | ((u32x16)x & 0x80000000u));
}

// 1 / x for x from 1 to 2, at most 1 ulp off.
inline f32x16 reciprocal(f32x16 x) {
#if defined(__AVX512F__)
    const f32x16 near = (f32x16)_mm512_rcp14_ps((__m512)x);  // and a step of Newton's, in a third of a division's time
    return fma(near, fma(-x, near, splat(1.0f)), near);
#else
    return 1.0f / x;
#endif
}

template <class T>
inline T larger(T a, T b) { return a > b ? a : b; }

#if defined(__AVX__) && !defined(__AVX512F__)

// GCC compares vectors that it cuts in two lane by lane, in four times the time.
inline f32x16 larger(f32x16 a, f32x16 b) {
    struct Halves { __m256 low, high; } x = load<Halves>(&a), y = load<Halves>(&b);
    x = {_mm256_max_ps(x.low, y.low), _mm256_max_ps(x.high, y.high)};
    return load<f32x16>(&x);
}

#endif

constexpr int64_t BITS = 64;

// Which of `count` numbers, at most BITS, are at least so large: bit i for x[i].
template <class T>
inline uint64_t at_least(const T* x, int64_t count, T least) {
#if defined(__AVX512BW__)
    if (count == BITS) {
        if constexpr (std::is_same_v<T, uint8_t>)
            return _mm512_cmpge_epu8_mask(load<__m512i>(x), _mm512_set1_epi8(least));
        if constexpr (std::is_same_v<T, float>) {
            uint64_t bits = 0;
            UNROLL for (int i = 0; i < BITS; i += LANES)
                bits |= (uint64_t)_mm512_cmp_ps_mask((__m512)load<f32x16>(x + i), _mm512_set1_ps(least), _CMP_GE_OQ) << i;
            return bits;
        }
    }
#endif
    uint8_t is_set[BITS] = {};
    for (int64_t i = 0; i < count; ++i) is_set[i] = x[i] >= least;
    uint64_t bits = 0;
    for (int i = 0; i < BITS; i += 8)  // multiplying gathers the lowest bits of eight bytes in the highest byte
        bits |= (load<uint64_t>(is_set + i) * 0x0102040810204080u >> 56) << i;
    return bits;
}

// Reduce across lanes, halving the vector, always in the same order.
template <class Combine>
inline float across(f32x16 v, const Combine& combine) {
    typedef float f32x8 __attribute__((vector_size(32)));
    typedef float f32x4 __attribute__((vector_size(16)));
    const f32x8 eight = combine(load<f32x8>(&v), load<f32x8>((const float*)&v + 8));
    const f32x4 four = combine(load<f32x4>(&eight), load<f32x4>((const float*)&eight + 4));
    return combine(combine(four[0], four[2]), combine(four[1], four[3]));
}

#if defined(__AVX512F__)

// The lanes I of a, then (from 16 on) b.
template <int... I>
inline f32x16 pick(f32x16 a, f32x16 b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, i32x16{I...});
#endif
}

// The same for each of `count` vectors, at most 16, into to[16]: many are halved together. Vectors are overwritten.
template <class Combine>
inline void across(f32x16 (&v)[LANES], int count, float* to, const Combine& combine) {
    if (count <= 4) {
        for (int i = 0; i < count; ++i) to[i] = across(v[i], combine);
        return;
    }
    // Vector i has the halves of v[2i] and v[2i + 1], then quarters of four, eighths of eight, at last one lane of each.
    UNROLL for (int i = 0; i < 8; ++i)
        v[i] = combine(pick<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(v[2 * i], v[2 * i + 1]),
                       pick<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(v[2 * i], v[2 * i + 1]));
    UNROLL for (int i = 0; i < 4; ++i)
        v[i] = combine(pick<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(v[2 * i], v[2 * i + 1]),
                       pick<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(v[2 * i], v[2 * i + 1]));
    UNROLL for (int i = 0; i < 2; ++i)
        v[i] = combine(pick<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(v[2 * i], v[2 * i + 1]),
                       pick<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(v[2 * i], v[2 * i + 1]));
    // Lane 4i + j is of vector 4j + i.
    const f32x16 all = combine(pick<0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30>(v[0], v[1]),
                               pick<1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31>(v[0], v[1]));
    store(to, pick<0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15>(all, all));
}

#else

template <class Combine>
inline void across(f32x16 (&v)[LANES], int count, float* to, const Combine& combine) {
    for (int i = 0; i < count; ++i) to[i] = across(v[i], combine);
}

#endif

struct bfloat16 {
    uint16_t bits;
};

inline f32x16 widen(const bfloat16* from) {
#if defined(__AVX512F__)
    return (f32x16)(u32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16);
#else
    return (f32x16)(__builtin_convertvector(load<u16x16>(from), u32x16) << 16);
#endif
}

// To the nearest bfloat16, ties to even; NaN stays NaN.
inline void narrow(bfloat16* to, f32x16 v) {
#if defined(__AVX512BF16__)
    store(to, _mm512_cvtneps_pbh((__m512)v));
#else
    const u32x16 bits = (u32x16)v;
    const u32x16 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    store(to, __builtin_convertvector(v == v ? rounded : (bits >> 16) | 0x40u, u16x16));
#endif
}

// Two vectors, side by side.
inline void narrow(bfloat16* to, f32x16 first, f32x16 second) {
#if defined(__AVX512BF16__)
    store(to, _mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    narrow(to, first);
    narrow(to + LANES, second);
#endif
}

// LANES of each, as pairs of one of both.
inline u32x16 in_pairs(const bfloat16* first, const bfloat16* second) {
    const auto wide = [](const bfloat16* from) { return __builtin_convertvector(load<u16x16>(from), u32x16); };
    return wide(first) | wide(second) << 16;
}

inline f32x16 to_float(const float* from) { return load<f32x16>(from); }
inline f32x16 to_float(const bfloat16* from) { return widen(from); }
inline void from_float(float* to, f32x16 v) { store(to, v); }
inline void from_float(bfloat16* to, f32x16 v) { narrow(to, v); }

// As if it had been stored as an Element in between.
template <class Element>
inline f32x16 rounded(f32x16 v) {
    Element lanes[LANES];
    from_float(lanes, v);
    return to_float(lanes);
}

// The first `count` of LANES elements, with zeros behind them.
template <class Element>
inline f32x16 load_some(const Element* from, int64_t count) {
    Element lanes[LANES] = {};
    if (count < LANES) from = (const Element*)std::memcpy(lanes, from, count * sizeof(Element));
    return to_float(from);
}

// Only the first `count` lanes, at most LANES.
template <class Element>
inline void store_some(Element* to, f32x16 v, int64_t count) {
    if (count >= LANES) return from_float(to, v);
    Element lanes[LANES];
    from_float(lanes, v);
    std::memcpy(to, lanes, count * sizeof(Element));
}

// An element format says how the cache pairs elements that are summed over, and how 16 lanes of such pairs are
// multiplied and added: `dot(weights, cached, sums)` adds weights * cached, over the elements of a pair in order, to
// sums [CHAINS, rows, vectors]; with two CHAINS, each element of a pair has a sum of its own. Weights (queries and
// probabilities) are kept as Weight, made by an exp2 that is as exact as that, cached elements as Element. A tile of more
// than MANY rows is computed as Wide instead. Rows and their elements are filled up to whole units. While a Mode lives,
// the format's arithmetic holds.
struct Float32 {
    using Element = float;
    using Weight = float;
    using Wide = Float32;
    struct Mode {};
    static constexpr int MANY = 0;
    static constexpr int PAIR = 1, CHAINS = 1, ROW_UNIT = 1, DEPTH_UNIT = 1;
    using Cached = f32x16;

    template <int ROWS, int COLS>
    static void dot(const Weight* weights, int64_t stride, const Cached (&cached)[COLS],
                    f32x16 (&sums)[1][ROWS][COLS]) {
        UNROLL for (int r = 0; r < ROWS; ++r)
            UNROLL for (int c = 0; c < COLS; ++c)
                sums[0][r][c] = fma(splat(weights[r * stride]), cached[c], sums[0][r][c]);
    }
    static f32x16 to_float(const Element* from) { return load<f32x16>(from); }
    static void from_float(Element* to, f32x16 v) { store(to, v); }
    static void to_weights(Weight* to, f32x16 v) { store(to, v); }
    static f32x16 exp2(f32x16 x) { return radixrt::exp2(x); }
};

// Pairs of neighbours, the layout of AVX512_BF16. Its instruction is worth using on AMD (2 a pair of FMAs' time); Intel
// runs it at a quarter of the rate of FMA (Xeon 4th generation: 1.4 against 5.7 a nanosecond), so there pairs are
// widened, a shift and a mask for 32 elements that all rows share, or multiplied in tiles (amx.h).
struct BFloat16 {
    using Element = bfloat16;
    struct Mode {};
    static constexpr int PAIR = 2, CHAINS = 1, ROW_UNIT = 1, DEPTH_UNIT = 1;
    static constexpr int MANY = 8 * REGISTER_ROWS;  // beyond, widening a panel once is 6 % faster than in each block
    using Cached = u32x16;
#if defined(RADIXRT_BF16_DOT)
    using Weight = bfloat16;
    using Wide = BFloat16;
    template <int ROWS, int COLS>
    static void dot(const Weight* weights, int64_t stride, const Cached (&cached)[COLS],
                    f32x16 (&sums)[1][ROWS][COLS]) {
        UNROLL for (int r = 0; r < ROWS; ++r) {
            const __m512bh pair = (__m512bh)(u32x16{} + load<uint32_t>(weights + r * stride));
            UNROLL for (int c = 0; c < COLS; ++c)
                sums[0][r][c] = (f32x16)_mm512_dpbf16_ps((__m512)sums[0][r][c], pair, (__m512bh)cached[c]);
        }
    }
    static void to_weights(Weight* to, f32x16 v) { narrow(to, v); }
    static f32x16 exp2(f32x16 x) { return coarse_exp2(x); }
#else
    using Weight = float;
    using Wide = Float32;
    template <int COUNT, int ROWS, int COLS>
    static void dot(const Weight* weights, int64_t stride, const Cached (&cached)[COLS],
                    f32x16 (&sums)[COUNT][ROWS][COLS]) {
        UNROLL for (int half = 0; half < PAIR; ++half) {
            f32x16 wide[COLS];
            UNROLL for (int c = 0; c < COLS; ++c) wide[c] = (f32x16)(half ? cached[c] & 0xFFFF0000u : cached[c] << 16);
            UNROLL for (int r = 0; r < ROWS; ++r)
                UNROLL for (int c = 0; c < COLS; ++c) {
                    f32x16& sum = sums[half % COUNT][r][c];
                    sum = fma(splat(weights[r * stride + half]), wide[c], sum);
                }
        }
    }
    static void to_weights(Weight* to, f32x16 v) { store(to, v); }
    static f32x16 exp2(f32x16 x) { return radixrt::exp2(x); }
#endif
    static f32x16 to_float(const Element* from) { return widen(from); }
    static void from_float(Element* to, f32x16 v) { narrow(to, v); }
};

// Two vectors of weights, side by side.
template <class Format>
inline void to_weights(typename Format::Weight* to, f32x16 first, f32x16 second) {
    if constexpr (std::is_same_v<typename Format::Weight, bfloat16>) {
        narrow(to, first, second);
    } else {
        Format::to_weights(to, first);
        Format::to_weights(to + LANES, second);
    }
}

// What sums come to, behind what was there.
template <class Format, int R, int C>
inline f32x16 total(f32x16 before, const f32x16 (&sums)[Format::CHAINS][R][C], int r, int c) {
    if constexpr (Format::CHAINS == 1) return sums[0][r][c];
    else return before + (sums[0][r][c] + sums[1][r][c]);
}

}  // namespace radixrt
