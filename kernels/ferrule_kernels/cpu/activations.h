// Activations for products with quantized weights: each group of a row's inputs becomes numbers of one or two digits of 8
// bits, with a scale of the row's own.
#pragma once
#include "matmul.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t MANY = 9;     // quantized rows from which on tile registers are used: the sums are the same

// What the instructions of a product take off weights by themselves: none of 4 bits, this of 8.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !TILES
constexpr int TAKEN = 128;
#else
constexpr int TAKEN = 0;
#endif

// What a sum of products with a matrix's numbers is too large by, for each of the activations' sum.
inline int32_t taken_off(const Matrix& w) { return middle(w) - (w.bits == 8 || w.coded ? TAKEN : 0); }

// The quantized rows, in the caller's memory: `q` [rows * digits, k], `scale`, `start` and `sum` [groups, across].
// `start` is what a sum of products begins with: less half the weights' range times the sum of the activations' numbers.
// `sum` is that of the activations themselves. Where rows are `tiled`, q is [rows * digits / 16][k / 64][16][64].
// `across` is the number of rows or, from 16 on, an odd number of lines of the cache: groups that lie a power of two apart would
// share few places there.
struct Rows {
    int8_t* q;
    float* scale;
    int32_t* start;
    float* sum;
    int64_t k, across;
    bool tiled;

    Rows(const Matrix& w, int64_t rows, void* memory)
        : k(w.k), across(across_of(rows * w.digits)), tiled(::tiled(w) && rows * w.digits >= MANY) {
        const int64_t groups = w.k / w.group;
        q = (int8_t*)(((uintptr_t)memory + 63) & ~uintptr_t(63));
        scale = (float*)(q + whole(rows * w.digits) * w.k);
        start = (int32_t*)(scale + across * groups);
        sum = (float*)(start + across * groups);
    }
    // Of memory for so many rows of several products together, however they are divided: with all that each may round up.
    static int64_t bytes(const Matrix& w, int64_t rows, int64_t products = 1) {
        const int64_t count = rows * w.digits;
        return 63 * products + (count + 15 * products) * w.k + 12 * (count + 31 * products) * (w.k / w.group);
    }
    static int64_t whole(int64_t rows) { return (rows + 15) / 16 * 16; }
    static int64_t across_of(int64_t rows) { return rows < 16 ? rows : (whole(rows) / 16 | 1) * 16; }
    int8_t* at(int64_t row, int64_t input) const {
        return tiled ? q + row / 16 * 16 * k + input / 64 * 1024 + row % 16 * 64 + input % 64 : q + row * k + input;
    }
};

inline Ints nearest(Floats x) {  // ties to even
#if defined(__AVX512F__)
    return (Ints)_mm512_maskz_cvtps_epi32(0xffff, (__m512)x);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtps_epi32((__m256)x);
#else
    Ints v;
    for (int i = 0; i < WIDTH; i++) v[i] = int32_t(std::nearbyint(x[i]));
    return v;
#endif
}

// Quantize groups [from, until) of one row. One with NaN or infinity in it has a scale of NaN.
template <int DIGITS, class T>
void quantize(const Matrix& w, const T* x, int64_t row, int64_t from, int64_t until, const Rows& to) {
    const int64_t hop = to.tiled ? 1024 : 64;
    const auto place = [=](int64_t i) { return i / 64 * hop + i % 64; };  // of an input behind the first of a group
    const int32_t offset = taken_off(w);
    constexpr float reach = DIGITS == 1 ? 127.0f : 127.0f * 256.0f;
    for (int64_t g = from; g < until; g++) {
        const int64_t first = g * w.group, count = std::max<int64_t>(0, std::min(w.group, w.inputs - first));
        Words magnitudes = {};  // as integers, of which that of NaN is larger than those of all numbers
        visit(x + first, count, [&](Floats v, int64_t, int64_t) {
            const Words bits = (Words)v & 0x7fffffffu;
            magnitudes = bits > magnitudes ? bits : magnitudes;
        });
        const uint32_t bits = largest(magnitudes);
        float most;
        std::memcpy(&most, &bits, 4);
        const bool finite = bits < 0x7f800000u, zero = !finite || most <= TINY;
        const float inverse = zero ? 0.0f : reach / most, scale = !finite ? NAN : zero ? 0.0f : most / reach;
        int8_t *high = to.at(row * DIGITS, first), *low = to.at(row * DIGITS + DIGITS - 1, first);
        for (int64_t i = count; i < w.group; i++) high[place(i)] = low[place(i)] = 0;
        Ints sums[2] = {};
        visit(x + first, count, [&](Floats number, int64_t i, int64_t n) {
            const Ints v = zero ? Ints{} : nearest(number * inverse);
            const Ints upper = DIGITS == 1 ? v : (v + 128) >> 8, lower = v - upper * 256;
            sums[0] += upper;
            store_bytes(high + place(i), upper, n);
            if (DIGITS == 1) return;
            sums[1] += lower;
            store_bytes(low + place(i), lower, n);
        });
        for (int d = 0; d < DIGITS; d++) {
            const int64_t at = g * to.across + row * DIGITS + d;
            to.scale[at] = d + 1 < DIGITS ? scale * 256.0f : scale;
            const int32_t all = total(sums[d]);
            to.sum[at] = float(all) * to.scale[at];
            to.start[at] = -offset * all;
        }
    }
}

}  // namespace
