// Floats of 8 bits, to and from bfloat16 and float32: E4M3 (no infinity; 0x7f is NaN) and E5M2, as the OCP's paper
// "8-bit Floating Point Specification" has them. What is too large becomes the largest number; NaN stays NaN.
#pragma once
#include "vectors.h"

namespace {

struct E4M3 {
    using Element = uint8_t;
    static constexpr int SHIFT = 20;          // from a magnitude to where a float's exponent and mantissa begin
    static constexpr uint32_t REBIAS = 120;   // float's bias minus this one's
    static constexpr uint32_t SPECIAL = 0x7f; // the first magnitude that is not a number
    static constexpr float MOST = 448.0f, NORMAL = 0x1p-6f;
    static constexpr float ROUNDS = 0x1p14f;  // its last place is the step between subnormal numbers
};

struct E5M2 {
    using Element = uint8_t;
    static constexpr int SHIFT = 21;
    static constexpr uint32_t REBIAS = 112;
    static constexpr uint32_t SPECIAL = 0x7c;
    static constexpr float MOST = 57344.0f, NORMAL = 0x1p-14f;
    static constexpr float ROUNDS = 0x1p7f;
};

#if defined(__AVX2__) && defined(__F16C__)
inline Floats as_floats(Halves float16) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)float16);
#else
    return (Floats)_mm256_cvtph_ps((__m128i)float16);
#endif
}
#endif

// `bytes` has one in each lane. No step has a subnormal float, which some processors take long for.
template <class F> inline Floats from_eight(Words bytes) {
    const Words magnitude = bytes & 0x7fu;
    const Words bits = (magnitude << F::SHIFT) + (F::REBIAS << 23);
    const Words small = (Words)((Floats)(bits + (1u << 23)) - F::NORMAL);
    Words x = (Ints)magnitude < (1 << (23 - F::SHIFT)) ? small : bits;
    x = (Ints)magnitude >= (int32_t)F::SPECIAL ? bits | 0x7f800000u : x;
    return (Floats)(x | (bytes & 0x80u) << 24);
}

// One byte in each lane: to nearest, ties to even.
template <class F> inline Words to_eight(Floats x) {
    const Words sign = ((Words)x >> 24) & 0x80u;
    Floats a = (Floats)((Words)x & 0x7fffffffu);
    a = a > F::MOST ? splat(F::MOST) : a;
    const Words bits = (Words)a;
    const Words normal = ((bits + ((1u << (F::SHIFT - 1)) - 1) + ((bits >> F::SHIFT) & 1u)) >> F::SHIFT) -
                         (F::REBIAS << (23 - F::SHIFT));
    const Words small = (Words)(a + F::ROUNDS) - (Words)splat(F::ROUNDS);
    Words byte = a < F::NORMAL ? small : normal;
    byte = a == a ? byte : Words{} + 0x7fu;
    return byte | sign;
}

// E5M2 is the upper byte of a float16. The exponent of E4M3 is a bit shorter: as float16 it is 2**8 times too small.
template <class F> inline Floats as_floats(const uint8_t* from) {
#if defined(__AVX2__) && defined(__F16C__)
#if defined(__AVX512F__)
    const Halves bytes = (Halves)_mm256_cvtepu8_epi16(load<__m128i>(from));
#else
    const Halves bytes = (Halves)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from));
#endif
    if (F::SHIFT == 21) return as_floats(bytes << 8);
    const Halves magnitude = bytes & 0x7f, nan = (Halves)(magnitude == 0x7f) & 0x7c00;
    return as_floats((bytes & 0x80) << 8 | magnitude << 7 | nan) * 0x1p8f;
#else
    typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
    return from_eight<F>(__builtin_convertvector(load<Bytes>(from), Words));
#endif
}

template <class F> inline void from_eight(const uint8_t* from, float* to) {
    const Floats x = as_floats<F>(from);
    std::memcpy(to, &x, sizeof x);
}

template <class F> inline void from_eight(const uint8_t* from, uint16_t* to) {
    float x[WIDTH];
    from_eight<F>(from, x);
    narrow(to, load<Floats>(x));  // every number of 8 bits is one of bfloat16
}

// `count` bytes, a multiple of 64; line by line `ahead` is asked for, which is what comes next.
template <class F, class Wide> inline void widen_each(const uint8_t* from, Wide* to, int64_t count, const char* ahead) {
    for (int64_t at = 0; at < count; at += 64) {
        ask_far(ahead + at);
        for (int i = 0; i < 64; i += WIDTH) from_eight<F>(from + at + i, to + at + i);
    }
}

template <class F> inline void widen_all(const uint8_t* from, float* to, int64_t count, const char* ahead) {
    widen_each<F>(from, to, count, ahead);
}

#if defined(__AVX512BW__)
// The bytes of bfloat16, by magnitude. A byte's sign is left out of both.
template <class F> struct Halved {
    alignas(64) uint8_t low[128], high[128];
    Halved() {
        for (int i = 0; i < 128; i += WIDTH) {
            uint8_t magnitudes[WIDTH];
            uint16_t wide[WIDTH];
            for (int j = 0; j < WIDTH; j++) magnitudes[j] = uint8_t(i + j);
            from_eight<F>(magnitudes, wide);
            for (int j = 0; j < WIDTH; j++) low[i + j] = uint8_t(wide[j]), high[i + j] = uint8_t(wide[j] >> 8);
        }
    }
};

// Both bytes are looked up in tables that four registers hold.
template <class F>
__attribute__((target("avx512vbmi"))) void widen_by_table(const uint8_t* from, uint16_t* to, int64_t count,
                                                          const char* ahead) {
    static const Halved<F> table;
    const __m512i low0 = _mm512_load_si512(table.low), low1 = _mm512_load_si512(table.low + 64);
    const __m512i high0 = _mm512_load_si512(table.high), high1 = _mm512_load_si512(table.high + 64);
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // unpacking goes by quarters
    const __m512i sign = _mm512_set1_epi8(int8_t(0x80));
    for (int64_t at = 0; at < count; at += 64) {
        ask_far(ahead + at);
        const __m512i x = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + at));
        const __m512i low = _mm512_permutex2var_epi8(low0, x, low1);
        const __m512i magnitude = _mm512_permutex2var_epi8(high0, x, high1);
        const __m512i high = _mm512_ternarylogic_epi64(magnitude, x, sign, 0xf8);  // magnitude | (x & sign)
        _mm512_storeu_si512(to + at, _mm512_unpacklo_epi8(low, high));
        _mm512_storeu_si512(to + at + 32, _mm512_unpackhi_epi8(low, high));
    }
}
#endif

template <class F> inline void widen_all(const uint8_t* from, uint16_t* to, int64_t count, const char* ahead) {
#if defined(__AVX512BW__)
    if (__builtin_cpu_supports("avx512vbmi")) return widen_by_table<F>(from, to, count, ahead);
#endif
    widen_each<F>(from, to, count, ahead);
}

}  // namespace
