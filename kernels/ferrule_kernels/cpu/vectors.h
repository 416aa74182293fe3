// Vectors of floats as wide as the processor has them, and bfloat16 to and from them. Compiled into each source by itself.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Arrays of vectors become registers where the loops over them are unrolled early, which GCC does on request alone.
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < count; i++)

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16; // floats of a vector
#else
constexpr int WIDTH = 8;
#endif
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

template <class V> inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// Ask for a line that is read later, into the second cache: the nearest waits for few lines at a time, and those are the
// ones that are computed with now.
inline void ask_far(const void* at) { __builtin_prefetch(at, 0, 2); }

inline Floats splat(float x) { return Floats{} + x; }

// Bits of bfloat16 in the upper half of each lane: to nearest, ties to even; NaN stays NaN. AVX512-BF16 makes denormals
// zero.
inline Words rounded_bits(Floats x) {
#if defined(__AVX512BF16__)
    return (Words)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)) << 16;
#else
    const Words bits = (Words)x;
    const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const Ints cells = x == x ? (Ints)rounded : (Ints)(bits | 0x400000u);
    return (Words)cells & 0xffff0000u;
#endif
}

inline Floats widen(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16);  // GCC 12 would widen each half
#elif defined(__AVX2__)
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(from)), 16);  // and split these
#else
    return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16);
#endif
}

// Of integers of 8 bits, signed or not.
template <class T> inline Ints widen_bytes(const T* from) {
#if defined(__AVX512F__)
    const auto bytes = load<__m128i>(from);
    return (Ints)(T(-1) < T(0) ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    const auto bytes = _mm_loadl_epi64((const __m128i*)from);
    return (Ints)(T(-1) < T(0) ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    Ints v;
    for (int i = 0; i < WIDTH; i++) v[i] = from[i];
    return v;
#endif
}

// Of finite numbers of 16 bits with 5 bits of exponent.
inline Floats widen_halves(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
    const Words bits = __builtin_convertvector(load<Halves>(from), Words);
    const Floats magnitudes = (Floats)((bits & 0x7fffu) << 13) * 0x1p112f;  // the exponent counts from 15, not from 127
    return (Floats)((Words)magnitudes | (bits & 0x8000u) << 16);
#endif
}

// One of them, which may be infinite, or NaN.
inline float half_at(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
    const uint32_t magnitude = (bits & 0x7fffu) << 13, infinite = magnitude >= 0x0f800000u ? 0x7f800000u : 0;
    float x;
    std::memcpy(&x, &magnitude, sizeof x);
    x *= 0x1p112f;  // the exponent counts from 15, not from 127
    uint32_t whole;
    std::memcpy(&whole, &x, sizeof whole);
    whole |= infinite | (bits & 0x8000u) << 16;
    std::memcpy(&x, &whole, sizeof x);
    return x;
}

inline void narrow(uint16_t* to, Floats x) {
#if defined(__AVX512BF16__)
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)x);
#elif defined(__AVX512F__)
    const Words cells = rounded_bits(x) >> 16;
    const __m256i halves = _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)cells);  // GCC 12 does not find it by itself
#else
    const Halves halves = __builtin_convertvector(rounded_bits(x) >> 16, Halves);
#endif
    std::memcpy(to, &halves, sizeof halves);
}

// e**x for each x <= 0, within 2 units in the last place; below -87 it is zero (Cephes' expf polynomial). Each operation waits
// for the one before: so several vectors take little longer than one.
template <int N> inline void exponentials(Floats (&x)[N]) {
    Ints far[N], power[N];
    Floats r[N], y[N];
    EACH(i, N) far[i] = x[i] < -87.0f, r[i] = far[i] ? splat(-87.0f) : x[i];
    EACH(i, N) power[i] = __builtin_convertvector(r[i] * 1.44269504088896341f - 0.5f, Ints);  // toward zero, which is upwards
    EACH(i, N) y[i] = __builtin_convertvector(power[i], Floats);
    EACH(i, N) r[i] = r[i] - y[i] * 0.693359375f - y[i] * -2.12194440e-4f;
    EACH(i, N) y[i] = splat(1.9875691500e-4f) * r[i] + 1.3981999507e-3f;
    EACH(i, N) y[i] = y[i] * r[i] + 8.3334519073e-3f;
    EACH(i, N) y[i] = y[i] * r[i] + 4.1665795894e-2f;
    EACH(i, N) y[i] = y[i] * r[i] + 1.6666665459e-1f;
    EACH(i, N) y[i] = y[i] * r[i] + 5.0000001201e-1f;
    EACH(i, N) y[i] = y[i] * r[i] * r[i] + r[i] + 1.0f;
    EACH(i, N) x[i] = far[i] ? Floats{} : (Floats)((Ints)y[i] + (power[i] << 23));
}

inline Floats exponential(Floats x) {
    Floats all[1] = {x};
    exponentials(all);
    return all[0];
}

// What `both` makes of all lanes: of the first half with the other, and so on, always in this order. GCC needs vectors here.
template <class V, class F> inline auto folded(V v, F both) {
    for (int half = WIDTH / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) v[i] = both(v[i], v[i + half]);
    return v[0];
}

inline float largest(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#endif
    return folded(v, [](float a, float b) { return a > b ? a : b; });
}

inline uint32_t largest(Words v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epu32((__m512i)v);
#endif
    return folded(v, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}

inline float total(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);  // which is the same
#endif
    return folded(v, [](float a, float b) { return a + b; });
}

inline int32_t total(Ints v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#endif
    return folded(v, [](int32_t a, int32_t b) { return a + b; });
}

// Write the lowest byte of each lane, or of the first `count`.
inline void store_bytes(void* to, Ints v, int64_t count = WIDTH) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)v);
#elif defined(__AVX2__)
    const __m256i fours = _mm256_shuffle_epi8((__m256i)v, _mm256_set1_epi32(0x0c080400));  // of both halves
    const __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
#else
    uint8_t bytes[WIDTH];
    for (int i = 0; i < WIDTH; i++) bytes[i] = uint8_t(v[i]);
#endif
    std::memcpy(to, &bytes, count < WIDTH ? count : WIDTH);
}

// 8 rows of 8 pairs, `stride` numbers from one to the next, as 8 columns, `step` pairs from one to the next.
inline void transpose(const uint16_t* from, int64_t stride, uint32_t* to, int64_t step) {
#if defined(__AVX2__)
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = load<__m256i>(from + i * stride);
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {  // pairs 2j and 2j + 4, 2j + 1 and 2j + 5 of four rows
            a[i + 2 * j] = _mm256_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm256_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_si256((__m256i*)(to + i * step), _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
        _mm256_storeu_si256((__m256i*)(to + (i + 4) * step), _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
    }
#else
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) std::memcpy(to + j * step + i, from + i * stride + 2 * j, 4);
#endif
}

}  // namespace
