// Products with quantized weights on CPUs: y = x Wᵀ + b, for one row or hundreds.
//
// Weights are unsigned numbers of 8 or 4 bits, with an offset of half their range, and a scale for each output channel
// and group of inputs. A row of x is quantized when it comes, each group of inputs with the row's own scale, to one or
// two digits of 8 bits; a row of two digits is computed as two rows. Within a group all sums are of integers and exact;
// groups are added up in their order. So a row's result has the same bits alone and in any batch.
//
// Packed weights are read once, front to back. They are cut into panels of 64 channels (the last one may have 16, 32 or
// 48); a panel of C channels holds, for each group:
//     scales   [C] bfloat16
//     8 bits   [group / 4][C][4] bytes                 four neighbouring inputs of each channel
//     4 bits   [group / 8][C][4] bytes, low half: inputs 0-3 of eight, high half: inputs 4-7
#include <thread>
#include "matmul.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// A tile has up to ROWS rows, FEWER where a group's sums are added up beside them, and COLUMNS vectors of channels, ALONE
// for a single row: so many that its sums stay in registers.
#if defined(__AVX512F__)
constexpr int ROWS = 6, FEWER = 4, COLUMNS = 4, ALONE = 4;
#else
constexpr int ROWS = 4, FEWER = 4, COLUMNS = 2, ALONE = 8;
#endif
typedef uint8_t Bytes __attribute__((vector_size(4 * WIDTH)));
typedef int8_t Chars __attribute__((vector_size(WIDTH)));

constexpr int64_t CHUNK = TILES ? 256 : 240;  // rows of one task: strips are even
constexpr float TINY = 1e-30f;   // activations below it are zero
constexpr int64_t SMALL = 1 << 17; // multiplications that one thread does sooner than two
constexpr int64_t FEW = 1 << 12;   // activations that one thread quantizes before the others start
constexpr int64_t SOME = 8;        // rows that are quantized at a time

// Add to each channel the products of four unsigned weights with four signed activations.
template <int BITS> inline Ints dot(Ints sum, Bytes w, int32_t x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    // Sums of two products must fit 16 bits: with 8-bit weights they do only where one factor is at most 128 either way,
    // so the activation's sign moves to the weight, whose offset is taken off first.
#if defined(__AVX512BW__)
    __m512i a = (__m512i)w, b = _mm512_set1_epi32(x);
    if (BITS == 8) {
        a = _mm512_xor_si512(a, _mm512_set1_epi8(-128));
        a = _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(b), _mm512_setzero_si512(), a);
        b = _mm512_abs_epi8(b);
        std::swap(a, b);
    }
    return sum + (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1));
#else
    __m256i a = (__m256i)w, b = _mm256_set1_epi32(x);
    if (BITS == 8) {
        a = _mm256_sign_epi8(_mm256_xor_si256(a, _mm256_set1_epi8(-128)), b);
        b = _mm256_abs_epi8(b);
        std::swap(a, b);
    }
    return sum + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
#endif
#else
    int8_t b[4];
    std::memcpy(b, &x, 4);
    for (int i = 0; i < WIDTH; i++)
        sum[i] += w[4 * i] * b[0] + w[4 * i + 1] * b[1] + w[4 * i + 2] * b[2] + w[4 * i + 3] * b[3];
    return sum;
#endif
}

// What `dot` takes off its weights by itself: none of 4 bits, this of 8.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr int TAKEN = 128;
#else
constexpr int TAKEN = 0;
#endif
static_assert(TAKEN == 0 || !TILES, "tile registers take nothing off");

// The quantized rows, in the caller's memory: `q` [rows * digits, k], `scale` and `start` [rows * digits, groups].
// `start` is what a sum begins with: less the weights' offset times the sum of the activations.
struct Rows {
    int8_t* q;
    float* scale;
    int32_t* start;
    Rows(const Matrix& w, int64_t rows, void* memory) {
        const int64_t count = rows * w.digits, groups = w.k / w.group;
        scale = (float*)memory;
        start = (int32_t*)(scale + count * groups);
        q = (int8_t*)(start + count * groups);
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

inline int32_t added(Ints v) {
    int32_t sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += v[i];
    return sum;
}

// Quantize one row. A group with NaN or infinity in it has a scale of NaN.
template <int DIGITS, class T> void quantize(const Matrix& w, const T* x, int64_t row, const Rows& to) {
    const int64_t groups = w.k / w.group;
    const int32_t offset = (1 << (w.bits - 1)) - (w.bits == 8 ? TAKEN : 0);
    constexpr float reach = DIGITS == 1 ? 127.0f : 127.0f * 256.0f;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = g * w.group, count = std::min(w.group, w.inputs - first);
        Words magnitudes = {};  // as integers, of which that of NaN is larger than those of all numbers
        visit(x + first, count, [&](Floats v, int64_t) {
            const Words bits = (Words)v & 0x7fffffffu;
            magnitudes = bits > magnitudes ? bits : magnitudes;
        });
        uint32_t bits = 0;
        for (int i = 0; i < WIDTH; i++) bits = std::max(bits, magnitudes[i]);
        float most;
        std::memcpy(&most, &bits, 4);
        const bool finite = bits < 0x7f800000u, zero = !finite || most <= TINY;
        const float inverse = zero ? 0.0f : reach / most, scale = !finite ? NAN : zero ? 0.0f : most / reach;
        int8_t* q = to.q + row * DIGITS * w.k + first;
        for (int d = 0; d < DIGITS; d++) std::memset(q + d * w.k + count, 0, w.group - count);
        Ints sums[2] = {};
        visit(x + first, count, [&](Floats number, int64_t i) {
            const Ints v = zero ? Ints{} : nearest(number * inverse);
            const Ints upper = DIGITS == 1 ? v : (v + 128) >> 8, lower = v - upper * 256;
            const int64_t n = std::min<int64_t>(WIDTH, count - i);
            sums[0] += upper;
            const Chars cells = __builtin_convertvector(upper, Chars);
            std::memcpy(q + i, &cells, n);
            if (DIGITS == 1) return;
            sums[1] += lower;
            const Chars others = __builtin_convertvector(lower, Chars);
            std::memcpy(q + w.k + i, &others, n);
        });
        for (int d = 0; d < DIGITS; d++) {
            const int64_t at = (row * DIGITS + d) * groups + g;
            to.scale[at] = d + 1 < DIGITS ? scale * 256.0f : scale;
            to.start[at] = -offset * added(sums[d]);
        }
    }
}

// A panel of channels, and what is asked for while it is read.
struct Panel {
    const uint8_t* at;
    int64_t channels;
    Ahead ahead;
};

// out [R][PANEL] = R quantized rows, beginning with `row`, times C vectors of channels, beginning with `column`.
template <int BITS, int R, int C>
void tile(const Matrix& w, const Panel& of, int column, const Rows& x, int64_t row, float* out) {
    const int64_t groups = w.k / w.group, channels = of.channels, step = channels * 4;
    const uint8_t* panel = of.at;
    const char* ahead = of.ahead.from(column, w.k * BITS / 32);
    int64_t steps = 0;
    const int8_t* q = x.q + row * w.k;
    Floats sum[R][C] = {};
    for (int64_t g = 0; g < groups; g++) {
        const auto* scales = (const uint16_t*)panel + column;
        const uint8_t* from = panel + channels * 2 + column * 4;
        Ints part[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) part[r][c] = Ints{} + x.start[(row + r) * groups + g];
        for (int64_t i = 0; i < w.group; i += 32 / BITS, from += step) {
            if (of.ahead.due(steps++)) fetch<C * WIDTH * 4>(ahead);
            if (BITS == 8) {
                for (int c = 0; c < C; c++) {
                    const Bytes b = load<Bytes>(from + c * sizeof(Bytes));
                    for (int r = 0; r < R; r++) part[r][c] = dot<8>(part[r][c], b, load<int32_t>(q + r * w.k + i));
                }
                continue;
            }
            for (int c = 0; c < C; c++) {
                const Ints both = load<Ints>(from + c * sizeof(Bytes));
                const Bytes low = (Bytes)(both & 0x0f0f0f0f), high = (Bytes)((both >> 4) & 0x0f0f0f0f);
                for (int r = 0; r < R; r++) {
                    part[r][c] = dot<4>(part[r][c], low, load<int32_t>(q + r * w.k + i));
                    part[r][c] = dot<4>(part[r][c], high, load<int32_t>(q + r * w.k + i + 4));
                }
            }
        }
        for (int c = 0; c < C; c++) {
            const Floats scale = widen(scales + c * WIDTH);
            for (int r = 0; r < R; r++)
                sum[r][c] += __builtin_convertvector(part[r][c], Floats) * x.scale[(row + r) * groups + g] * scale;
        }
        panel += channels * (2 + w.group * BITS / 8);
        q += w.group;
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) std::memcpy(out + r * PANEL + column + c * WIDTH, &sum[r][c], sizeof(Floats));
}

template <int BITS, int R>
void strip(const Matrix& w, const Panel& panel, const Rows& x, int64_t row, float* out) {
    constexpr int many = R == 1 ? ALONE : COLUMNS;
    int column = 0;
    for (; column + many * WIDTH <= panel.channels; column += many * WIDTH)
        tile<BITS, R, many>(w, panel, column, x, row, out);
    for (; column < panel.channels; column += WIDTH) tile<BITS, R, 1>(w, panel, column, x, row, out);
}

// `count` quantized rows, at most ROWS
template <int BITS>
void strips(const Matrix& w, const Panel& panel, const Rows& x, int64_t row, int count, float* out) {
    switch (count) {
        case 1: return strip<BITS, 1>(w, panel, x, row, out);
        case 2: return strip<BITS, 2>(w, panel, x, row, out);
        case 3: return strip<BITS, 3>(w, panel, x, row, out);
        case 4: return strip<BITS, 4>(w, panel, x, row, out);
#if defined(__AVX512F__)
        case 5: return strip<BITS, 5>(w, panel, x, row, out);
        case 6: return strip<BITS, 6>(w, panel, x, row, out);
#endif
    }
}

#if TILES
constexpr int TILE_ROWS = 32;      // of a strip by tile registers
constexpr int64_t TILE_INPUTS = 64;
constexpr int64_t MANY = 9;        // quantized rows from which on tile registers are used: the sums are the same

inline bool by_tiles(const Matrix& w, int64_t count) {
    return w.bits == 8 && count >= MANY && (w.group == w.k || w.group % TILE_INPUTS == 0);
}

// The inputs of a group that do not fill tile registers, filled up with zeros.
struct Rest {
    int8_t rows[TILE_ROWS][TILE_INPUTS] = {};
    uint8_t weights[TILE_INPUTS / 4][PANEL * 4] = {};

    Rest(const int8_t* q, int64_t stride, int count, const uint8_t* from, int64_t wide, int64_t inputs) {
        for (int r = 0; r < count; r++) std::memcpy(rows[r], q + r * stride, inputs);
        for (int64_t i = 0; i < inputs / 4; i++) std::memcpy(weights[i], from + i * wide, wide);
    }
};

// part [count][PANEL] = `count` quantized rows times a group of a panel, without the weights' offset.
void sums_by_tiles(const int8_t* q, int64_t stride, int count, const uint8_t* weights, int64_t channels, int64_t inputs,
                   const Ahead& ask, Tiles& tiles, int32_t* part) {
    const int first = std::min(count, 16), next = count - first;
    const int64_t wide = channels * 4, whole = inputs / TILE_INPUTS * TILE_INPUTS, part_bytes = PANEL * 4;
    const Rest rest(q + whole, stride, count, weights + whole / 4 * wide, wide, inputs - whole);
    tiles.hold(first, next);
    for (int64_t column = 0; column < channels; column += 2 * LANES) {
        const bool two = column + 2 * LANES <= channels;
        const char* ahead = ask.from(column, inputs / 4);
        const auto add = [&](const int8_t* x, int64_t x_stride, const uint8_t* from, int64_t from_stride) {
            TILE_LOAD(4, x, x_stride);
            TILE_LOAD(6, from, from_stride);
            TILE_DOT_INT8(0, 4, 6);
            if (next) TILE_LOAD(5, x + 16 * x_stride, x_stride);
            if (next) TILE_DOT_INT8(2, 5, 6);
            if (!two) return;
            TILE_LOAD(7, from + LANES * 4, from_stride);
            TILE_DOT_INT8(1, 4, 7);
            if (next) TILE_DOT_INT8(3, 5, 7);
        };
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (next) TILE_ZERO(2);
        if (next) TILE_ZERO(3);
        for (int64_t i = 0; i < whole; i += TILE_INPUTS) {
            if (ask.due(i / TILE_INPUTS)) fetch<2 * LANES * TILE_INPUTS>(ahead);
            add(q + i, stride, weights + i / 4 * wide + column * 4, wide);
        }
        if (whole < inputs) add(rest.rows[0], TILE_INPUTS, rest.weights[0] + column * 4, PANEL * 4);
        TILE_STORE(0, part + column, part_bytes);
        if (two) TILE_STORE(1, part + column + LANES, part_bytes);
        if (next) TILE_STORE(2, part + 16 * PANEL + column, part_bytes);
        if (next && two) TILE_STORE(3, part + 16 * PANEL + column + LANES, part_bytes);
    }
}

// As `strips`, by tile registers: sums of a group are of integers, so that they are the same.
void strip_by_tiles(const Matrix& w, const Panel& panel, const Rows& x, int64_t row, int count, Tiles& tiles, float* out) {
    alignas(64) int32_t part[TILE_ROWS * PANEL];
    const int64_t groups = w.k / w.group, channels = panel.channels;
    std::memset(out, 0, count * PANEL * sizeof(float));
    Ahead ahead = panel.ahead;
    for (int64_t g = 0; g < groups; g++, ahead = ahead.next(channels, w.group / 4)) {
        const uint8_t* from = panel.at + g * channels * (2 + w.group);
        sums_by_tiles(x.q + row * w.k + g * w.group, w.k, count, from + channels * 2, channels, w.group, ahead, tiles, part);
        for (int r = 0; r < count; r++) {
            const int64_t at = (row + r) * groups + g;
            for (int64_t c = 0; c < channels; c += WIDTH) {
                const Ints all = load<Ints>(part + r * PANEL + c) + x.start[at];
                const Floats sum = load<Floats>(out + r * PANEL + c);
                const Floats scale = widen((const uint16_t*)from + c);
                store(out + r * PANEL + c, sum + __builtin_convertvector(all, Floats) * x.scale[at] * scale);
            }
        }
    }
}
#endif

// Add up the digits of `count` quantized rows, and write.
template <class Y> void finish(const Matrix& w, const float* sums, int64_t panel, int64_t row, int count, Y* y) {
    const int64_t first = panel * PANEL, channels = std::min<int64_t>(PANEL, w.n - first);
    for (int i = 0; i < count; i += w.digits) {
        Y* to = y + (row + i) / w.digits * w.n + first;
        for (int64_t c = 0; c < channels; c += WIDTH) {
            Floats sum = load<Floats>(sums + i * PANEL + c);
            if (w.digits == 2) sum += load<Floats>(sums + (i + 1) * PANEL + c);
            if (w.factors) sum *= load<Floats>(w.factors + first + c);
            if (w.bias) sum += load<Floats>(w.bias + first + c);
            store(to + c, sum, channels - c);
        }
    }
}

// Quantized rows [row, end) times a panel.
template <class Y>
void multiply_panel(const Matrix& w, int64_t panel, const Rows& x, int64_t row, int64_t end, Tiles& tiles, Y* y) {
    const int64_t channels = channels_of(w.n, panel);
#if TILES
    const bool tiled = by_tiles(w, end - row);
    const int64_t most = tiled ? TILE_ROWS : w.group == w.k ? ROWS : FEWER;
    constexpr int largest = TILE_ROWS;
#else
    const int64_t most = w.group == w.k ? ROWS : FEWER;
    constexpr int largest = ROWS;
#endif
    const int64_t count = (end - row + most - 1) / most, each = (end - row + count - 1) / count;
    const int64_t step = (each + w.digits - 1) / w.digits * w.digits;  // rows of a strip, alike; digits stay together
    const uint8_t* from = w.weights + panel * panel_bytes(w, PANEL);
    Panel part = {from, channels, ahead_of(count, from + panel_bytes(w, channels))};
    alignas(64) float sums[largest * PANEL];
    for (; row < end; row += step, part.ahead = part.ahead.next(channels, w.k * w.bits / 32)) {
        const int here = int(std::min<int64_t>(step, end - row));
#if TILES
        if (tiled)
            strip_by_tiles(w, part, x, row, here, tiles, sums);
        else
#endif
        if (w.bits == 8)
            strips<8>(w, part, x, row, here, sums);
        else
            strips<4>(w, part, x, row, here, sums);
        finish(w, sums, panel, row, here, y);
    }
}

template <class X, class Y> void multiply(const Matrix& w, const X* x, Y* y, int64_t m, void* memory) {
    const Rows rows(w, m, memory);
    const int64_t count = m * w.digits, panels = panels_of(w.n), chunks = (count + CHUNK - 1) / CHUNK;
    const auto prepare = [&](int64_t from) {
        const int64_t end = std::min(m, from + SOME);
        for (int64_t row = from; row < end; row++)
            w.digits == 1 ? quantize<1>(w, x + row * w.inputs, row, rows) : quantize<2>(w, x + row * w.inputs, row, rows);
        return end - from;
    };
    Shares tasks(panels * chunks, thread_count()), quantizing((m + SOME - 1) / SOME, thread_count());
    std::atomic<int64_t> ready(0);
    if (m * w.k <= FEW)
        for (int64_t task; (task = quantizing.next(0)) >= 0;) ready += prepare(task * SOME);
#pragma omp parallel if (count * w.n * w.k > SMALL)
    {
        const int thread = thread_number();
        for (int64_t task; (task = quantizing.next(thread)) >= 0;) ready += prepare(task * SOME);
        while (ready.load(std::memory_order_acquire) < m) std::this_thread::yield();  // not for a thread that comes late
        Tiles tiles;
        for (int64_t task; (task = tasks.next(thread)) >= 0;) {
            const int64_t first = task / panels * CHUNK;
            multiply_panel(w, task % panels, rows, first, std::min(count, first + CHUNK), tiles, y);
        }
    }
}

}  // namespace

extern "C" {

// Bytes that `ferrule_multiply` needs to quantize m rows in.
int64_t ferrule_multiply_memory(const Matrix* matrix, int64_t m) {
    return m * matrix->digits * (matrix->k + 8 * (matrix->k / matrix->group));
}

// x [m, inputs] to y [m, n], both contiguous; types as above.
void ferrule_multiply(const Matrix* w, const void* x, void* y, int64_t m, int32_t x_type, int32_t y_type, void* memory) {
    if (x_type && y_type)
        multiply(*w, (const uint16_t*)x, (uint16_t*)y, m, memory);
    else if (x_type)
        multiply(*w, (const uint16_t*)x, (float*)y, m, memory);
    else if (y_type)
        multiply(*w, (const float*)x, (uint16_t*)y, m, memory);
    else
        multiply(*w, (const float*)x, (float*)y, m, memory);
}
}
