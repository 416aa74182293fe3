// Products with quantized weights: the matrix, as the sources that pack it and multiply by it share it.
#pragma once
#include "panels.h"

extern "C" {

// As `_Matrix` in matmul.py. `group` divides `k`, which is rounded up; `n` is not.
struct Matrix {
    uint8_t* weights;
    const float* bias;  // [n], rounded up to a multiple of 16, or null
    int64_t n, k, inputs, group;
    int32_t bits, digits, offsets;  // `offsets`: 1 where groups have them beside their scales
    const float* factors;  // [n] as the bias: what each channel's sum is multiplied by, or null
};

// One of several products, as `_jobs` in bank.py makes them.
struct Job {
    const Matrix* w;
    const void* x;
    void* y;
    int64_t m;
};
}

namespace {

constexpr int64_t TILE_INPUTS = 64;  // of 8 bits, in a tile register

// Whether weights can be in the order for tile registers, and whether they are.
inline bool tileable(const Matrix& w) { return w.bits == 8 && w.group % TILE_INPUTS == 0; }
inline bool tiled(const Matrix& w) { return TILES && tileable(w); }

// Of one group of one channel: what comes before its numbers, and all of it.
inline int64_t head_bytes(const Matrix& w) { return 2 + 2 * w.offsets; }
inline int64_t cell_bytes(const Matrix& w) { return head_bytes(w) + w.group * w.bits / 8; }

inline int64_t panel_bytes(const Matrix& w, int64_t channels) {
    return channels * (w.k / w.group) * cell_bytes(w);
}

inline Floats numbers(const float* x) { return load<Floats>(x); }
inline Floats numbers(const uint16_t* x) { return widen(x); }

// Call `use` with vectors of x and where they begin; the last one is filled up with zeros.
template <class T, class F> inline void visit(const T* x, int64_t count, F use) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) use(numbers(x + i), i);
    if (i == count) return;
    T rest[WIDTH] = {};
    std::memcpy(rest, x + i, (count - i) * sizeof(T));
    use(numbers(rest), i);
}

}  // namespace
