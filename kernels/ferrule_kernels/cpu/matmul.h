// Products with quantized weights: the matrix, as the sources that pack it and multiply by it share it.
#pragma once
#include "panels.h"

extern "C" {

// As `_Matrix` in matmul.py. `group` divides `block`, and that `k`, which is rounded up; `n` is not.
struct Matrix {
    uint8_t* weights;
    const float* bias;  // [n], rounded up to a multiple of 16, or null
    int64_t n, k, inputs, group;
    int64_t block;         // inputs with a float as their scale: a group, or several groups with `steps`
    int32_t bits, digits;
    int32_t offsets;       // 1 where groups have them beside their scales
    int32_t coded;         // 1 where numbers are codes of 4 bits: places in the table
    int32_t halves;        // 1 where scales and offsets are float16, not bfloat16; numbers with offsets then begin at 0
    int32_t steps;         // bits of the integer by which a group multiplies its block's scale, and offset: 8, 4, or 0
    const float* factors;  // [n] as the bias: what each channel's sum is multiplied by, or null
    uint8_t table[16];     // of codes: what they stand for, plus 128
};

// One of several products, as bank.py makes them.
struct Job {
    const Matrix* w;
    const void* x;
    void* y;
    int64_t m;
    int64_t across;  // from a row of y to the next
};
}

namespace {

constexpr int64_t TILE_INPUTS = 64;  // of 8 bits, in a tile register
constexpr float TINY = 1e-30f;       // activations and weights are zero in a group that has none beyond it

// Whether weights can be in the order for tile registers, and whether they are.
inline bool tileable(const Matrix& w) { return w.bits == 8 && w.group % TILE_INPUTS == 0; }
inline bool tiled(const Matrix& w) { return TILES && tileable(w); }

// What is taken off a number to get what it stands for.
inline int32_t middle(const Matrix& w) { return w.coded ? 128 : w.halves && w.offsets ? 0 : 1 << (w.bits - 1); }

// Numbers of fewer than 8 bits are cut into a lower part of 4 bits, or 2, and an upper part of what is left. A word of 32
// bits holds such parts of one channel, byte by byte: the first four inputs' in its lowest bits, the next four's above.
// UNIT inputs fill whole WORDS, first those of the lower parts.
template <int BITS> struct Planes {
    static constexpr int LOW = BITS < 4 ? 2 : 4, HIGH = BITS - LOW, UNIT = 32 / (HIGH ? HIGH : LOW);
    static constexpr int LOW_WORDS = UNIT * LOW / 32, WORDS = UNIT * BITS / 32, FIELDS = UNIT / 4;
    static constexpr uint32_t LOW_MASK = 0x01010101u * ((1 << LOW) - 1), HIGH_MASK = 0x01010101u * ((1 << HIGH) - 1);
};

// Numbers that lie together: those of a group, or of two where it takes two to fill whole words.
inline int64_t span_of(const Matrix& w) {
    const int64_t unit = w.bits == 3 || w.bits == 5 ? 32 : 8;
    return std::max(w.group, unit);
}

// Of one channel: the floats of a block, the steps of a group, and all of a block.
inline int64_t head_bytes(const Matrix& w) { return 2 + 2 * w.offsets; }
inline int64_t step_bytes(const Matrix& w) { return w.steps == 8 ? 1 + w.offsets : w.steps == 4; }
inline int64_t block_bytes(const Matrix& w) {
    return head_bytes(w) + w.block / w.group * step_bytes(w) + w.block * w.bits / 8;
}

inline int64_t panel_bytes(const Matrix& w, int64_t channels) { return channels * (w.k / w.block) * block_bytes(w); }

inline Floats numbers(const float* x) { return load<Floats>(x); }
inline Floats numbers(const uint16_t* x) { return widen(x); }

// The first `count` of a vector, or all of it; zeros follow them.
template <class T> inline Floats numbers(const T* x, int64_t count) {
    if (count >= WIDTH) return numbers(x);
    T some[WIDTH] = {};
    std::memcpy(some, x, std::max<int64_t>(0, count) * sizeof(T));
    return numbers(some);
}

// Call `use` with vectors of x, where they begin, and how many of their numbers are x's: zeros follow the last ones.
template <class T, class F> inline void visit(const T* x, int64_t count, F use) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) use(numbers(x + i), i, WIDTH);
    if (i < count) use(numbers(x + i, count - i), i, count - i);
}

}  // namespace
