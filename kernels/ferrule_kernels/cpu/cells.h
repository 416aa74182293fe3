// Cells of 32 bits, one float or two neighbouring bfloat16, as attention multiplies them; and what it computes of vectors.
#pragma once
#include <memory>
#include "tiles.h"
#include "vectors.h"

namespace {

typedef uint64_t Fours __attribute__((vector_size(32)));

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }  // `b` where there is a NaN

// 2**x for x <= 1, within 3 units in the last place; below -126 it is zero. Of 0 it is 1.
inline Floats power_of_two(Floats x) {
#if defined(__AVX512F__)
    const Floats n = (Floats)_mm512_roundscale_ps((__m512)x, 8);
#else
    const Floats n = (x + 0x1.8p23f) - 0x1.8p23f;
#endif
    const Floats r = x - n;
    Floats y = splat(1.326472725e-3f);
    y = y * r + 9.671512786e-3f;
    y = y * r + 5.550733744e-2f;
    y = y * r + 2.402224208e-1f;
    y = y * r + 6.931469776e-1f;
    y = y * r + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 near = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_scalef_ps(near, (__m512)y, (__m512)n);
#else
    y = (Floats)((Ints)y + (__builtin_convertvector(n, Ints) << 23));
    return x < -126.0f ? Floats{} : y;
#endif
}

inline void write_floats(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline void copy_lines(void* to, const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) std::memcpy((char*)to + i, (const char*)from + i, 64);
}

// Memory for numbers that begins where a line of the cache does; what it holds at first is not said.
template <class E> class Scratch {
    struct alignas(64) Line {
        char bytes[64];
    };
    std::unique_ptr<Line[]> lines_;

  public:
    explicit Scratch(size_t count) : lines_(new Line[(count * sizeof(E) + sizeof(Line) - 1) / sizeof(Line)]) {}
    E* at(size_t i) { return (E*)lines_.get() + i; }
};

// A type of attention's arguments. `Cell` is that of the products' numbers, and `Kept` what a cache of this type has.
struct F32 {
    using Element = float;
    using Cell = float;
    using Kept = F32;
    static constexpr int PAIR = 1;
    static constexpr int ROWS = WIDTH == 16 || BY_HAND ? 6 : 4;  // whose sums fit the registers
    static inline Floats multiply_add(Floats sum, uint32_t a, const uint32_t* b) {
        return multiply_add(sum, a, load<Floats>(b));
    }
    static inline Floats multiply_add(Floats sum, uint32_t a, Floats b) {
        float x;
        std::memcpy(&x, &a, 4);
        return sum + x * b;
    }
    static inline Floats read(const Element* from) { return load<Floats>(from); }
    static inline void store(Cell* to, Floats x) { std::memcpy(to, &x, sizeof x); }
};

#if defined(__AVX512BF16__) || TILES
struct BF16 {
    using Element = uint16_t;
    using Cell = uint16_t;
    using Kept = BF16;
    static constexpr int PAIR = 2;
    static constexpr int ROWS = WIDTH == 16 ? 6 : 4;
    static inline Floats multiply_add(Floats sum, uint32_t a, const uint32_t* b) {
#if defined(__AVX512BF16__)
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)load<Words>(b));
#else
        const Words x = Words{} + a, w = load<Words>(b);
        return sum + (Floats)(x << 16) * (Floats)(w << 16) + (Floats)(x & 0xffff0000u) * (Floats)(w & 0xffff0000u);
#endif
    }
    static inline Floats read(const Element* from) { return widen(from); }
    static inline void store(Cell* to, Floats x) { narrow(to, x); }
};
#else
// Where nothing multiplies pairs: all is widened to float32, for few rows while they use it, for many a block before.
struct BF16 : F32 {
    struct Kept {
        using Element = uint16_t;
    };
    using Element = uint16_t;
    static inline Floats read(const Element* from) { return widen(from); }
    using F32::store;
    static inline void store(Element* to, Floats x) { narrow(to, x); }
};
#endif

template <class F> inline Floats as_floats(const uint16_t* from) { return widen(from); }

// As those of 8 bits. `count` is a multiple of 32.
template <class F> inline void widen_all(const uint16_t* from, float* to, int64_t count, const char* ahead) {
    for (int64_t at = 0; at < count; at += 32) {
        ask_far(ahead + at * 2);
        for (int i = 0; i < 32; i += WIDTH) write_floats(to + at + i, widen(from + at + i));
    }
}

}  // namespace
