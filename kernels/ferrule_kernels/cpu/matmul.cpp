// Products with quantized weights on CPUs: y = x Wᵀ + b, for one row or hundreds.
//
// Weights are unsigned numbers of 8, 6, 5, 4, 3 or 2 bits, from which `middle` is taken off, or codes of 4 bits, which a
// table makes such numbers of 8 bits. Each output channel has a scale for each group of inputs. Rows of x are quantized
// when they come, as activations.h says; a row of two digits is computed as two rows. Within a group all sums are of
// integers and exact; groups are added up in their order. So a row's result has the same bits alone and in any batch.
//
// Packed weights are read once, front to back. They are cut into panels of 64 channels (the last one may have 16, 32 or
// 48); a panel of C channels holds, for each block of inputs, which is a group unless groups have steps:
//     scales   [C] bfloat16, or float16
//     offsets  [C] of these, where the matrix has them: what is added to each weight of a group
// and for each of the block's groups, or of each two that are half of what fills a word:
//     steps    [C] int8: the group's scale is the block's times this; then such of offsets, where the matrix has them. Of
//              4 bits, those of scales and of offsets share [C] bytes: the former in the low half, both from 0 to 15
//     8 bits   [group / 4][C][4] bytes                 four neighbouring inputs of each channel; for tile registers, if
//              [group / 64][C / 16][16][16][4]         64 divides the group, what one holds lies together
//     4 bits   [group / 8][C][4] bytes, low half: inputs 0-3 of eight, high half: inputs 4-7
//     others   [group / UNIT][WORDS][C][4] bytes, as `Planes` in matmul.h says
#include <thread>
#include <vector>
#include "activations.h"
#include "recording.h"

namespace {

// A tile has up to ROWS rows, FEWER where a group's sums are added up beside them, and COLUMNS vectors of channels, ALONE
// for a single row. A group's sums stay in registers; beside HOLD of them at most, those of all groups do, too.
#if defined(__AVX512F__)
constexpr int ROWS = 6, FEWER = 4, COLUMNS = 4, ALONE = 4, HOLD = 16;
#else
constexpr int ROWS = 4, FEWER = 4, COLUMNS = 2, ALONE = 8, HOLD = 8;
#endif
// Numbers of 2, 3, 5 and 6 bits take a large share of the time to unpack, where one instruction multiplies: TALL rows share
// what was unpacked of NARROW vectors of channels. Those of 8 and 4 bits are as fast or faster in tiles that are wider.
#if defined(__AVX512VNNI__)
constexpr int TALL = 8, NARROW = 2;
#else
constexpr int TALL = 0, NARROW = 1;
#endif
typedef uint8_t Bytes __attribute__((vector_size(4 * WIDTH)));

constexpr int64_t CHUNK = TILES ? 256 : 264;  // rows of one task, at most: whole strips of any height
constexpr int64_t SMALL = 1 << 17; // multiplications that one thread does sooner than two
constexpr int64_t FEW = 1 << 12;   // activations that one thread quantizes before the others start
constexpr int64_t SOME = 8;        // rows that are quantized at a time, where each is one group
constexpr int64_t LINE = 16;       // or where it has several: one thread writes all scales that a line of the cache holds
constexpr int64_t PIECE = 512;     // inputs of these

constexpr bool tall(int bits) { return TALL > 0 && bits != 8 && bits != 4; }

// Where one instruction multiplies and adds two neighbours, to 16 bits: how many of such sums fit into 16 bits together, of
// weights below 2**bits and activations of 128 at most either way. None where another adds four, to 32 bits.
constexpr int fitting(int bits) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !TILES
    return bits < 6 ? (1 << 15) / (2 * 128 << bits) : 0;  // of 6 bits two, which would save nothing
#else
    return 0;
#endif
}
typedef int16_t Pairs __attribute__((vector_size(4 * WIDTH)));

// To each two inputs the products of their unsigned weights with signed activations.
inline Pairs pairs(Pairs sum, Bytes w, int32_t x) {
#if defined(__AVX512BW__)
    return sum + (Pairs)_mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    return sum + (Pairs)_mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x));
#else
    return sum;
#endif
}

// Each channel's two.
inline Ints joined(Pairs two) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)two, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    return (Ints)_mm256_madd_epi16((__m256i)two, _mm256_set1_epi16(1));
#else
    return Ints{};
#endif
}

// Beside emulated tile registers, which take nothing off. In all the places that use it, it would take minutes to compile.
__attribute__((noinline, unused)) Ints dot_plainly(Ints sum, Bytes w, int32_t x) {
    int8_t b[4];
    std::memcpy(b, &x, 4);
    for (int i = 0; i < WIDTH; i++)
        sum[i] += w[4 * i] * b[0] + w[4 * i + 1] * b[1] + w[4 * i + 2] * b[2] + w[4 * i + 3] * b[3];
    return sum;
}

// Add to each channel the products of four unsigned weights with four signed activations.
template <int BITS> inline Ints dot(Ints sum, Bytes w, int32_t x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__) && !TILES
    // With weights of 8 bits, sums of two products fit 16 bits only where one factor is at most 128 either way: so the
    // activation's sign moves to the weight, whose offset is taken off first.
    if (BITS < 8) return sum + joined(pairs(Pairs{}, w, x));
#if defined(__AVX512BW__)
    const __m512i four = _mm512_set1_epi32(x), signs = _mm512_xor_si512((__m512i)w, _mm512_set1_epi8(-128));
    const __m512i a = _mm512_mask_sub_epi8(signs, _mm512_movepi8_mask(four), _mm512_setzero_si512(), signs);
    return sum + joined((Pairs)_mm512_maddubs_epi16(_mm512_abs_epi8(four), a));
#else
    const __m256i four = _mm256_set1_epi32(x);
    const __m256i a = _mm256_sign_epi8(_mm256_xor_si256((__m256i)w, _mm256_set1_epi8(-128)), four);
    return sum + joined((Pairs)_mm256_maddubs_epi16(_mm256_abs_epi8(four), a));
#endif
#else
    return dot_plainly(sum, w, x);
#endif
}

// What the table says of 4 bits in each byte.
inline Bytes looked_up(Bytes table, Bytes codes) {
#if defined(__AVX512BW__)
    return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(__AVX2__)
    return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#else
    for (int i = 0; i < 4 * WIDTH; i++) codes[i] = table[codes[i]];
    return codes;
#endif
}

constexpr int TILE_ROWS = TILES ? 32 : 0;  // of a strip by tile registers

// A panel of channels, and what is asked for while it is read.
struct Panel {
    const uint8_t* at;
    int64_t channels;
    Ahead ahead;
};

// Scales or offsets of a vector of channels, as they are kept.
inline Floats floats_of(bool halves, const uint8_t* at) {
    return halves ? widen_halves((const uint16_t*)at) : widen((const uint16_t*)at);
}

// What a block's floats are multiplied by, of a vector of channels. Of 4 bits, scales' are below those of offsets.
inline Floats steps_of(int bits, const uint8_t* at, bool of_offsets) {
    const Ints all = bits == 8 ? widen_bytes((const int8_t*)at) : widen_bytes(at);
    return __builtin_convertvector(bits == 8 ? all : of_offsets ? all >> 4 : all & 15, Floats);
}

// out [R][PANEL] = R quantized rows, beginning with `row`, times C vectors of channels, beginning with `column`.
template <int BITS, bool SQUARES, bool CODED, bool FAR, int R, int C>
void tile(const Matrix& w, const Panel& of, int column, const Rows& x, int64_t row, float* out) {
    constexpr bool HELD = R * C <= HOLD;  // whether sums stay in registers beside those of a group
    constexpr int FIT = CODED ? 0 : fitting(BITS);
    const int64_t k = w.k, group = w.group, groups = k / group, rows = x.across, channels = of.channels;
    const int64_t span = span_of(w), many = span / group, numbers = channels * (span * BITS / 8);
    const int64_t square = SQUARES ? TILE_INPUTS : group, step = SQUARES ? LANES * 4 : channels * 4;
    const auto place = [=](int64_t channel) {  // of a channel's first weights
        return SQUARES ? channel / LANES * LANES * square + channel % LANES * 4 : channel * 4;
    };
    const int64_t run = w.block / group;
    const int64_t head = w.steps ? channels * head_bytes(w) : 0;  // of a block, and what comes before a span
    const int64_t skipped = channels * (w.steps ? many * step_bytes(w) : head_bytes(w));
    const int64_t next = w.steps == 8 ? channels : 0;  // from a step to that of the offset
    const int steps = w.steps;
    const bool halves = w.halves;
    const bool offsets = w.offsets;
    const Ahead asked = of.ahead;
    const char* ahead = asked.from(column, k * BITS / 32);
    int64_t words = 0;
    const uint8_t* at = of.at;
    const int8_t* q = x.q + row * k;
    const int32_t* start = x.start + row;
    const float *scale = x.scale + row, *total = x.sum + row;
    float* to = out + column;
    Floats sum[R][C] = {};
    Ints part[R][C];
    Pairs two[R][C] = {};  // what is not in `part` yet
    Floats scales[C] = {}, added[C] = {};  // of a block whose groups have steps
    Bytes table = {};
    for (int i = 0; CODED && i < 4 * WIDTH; i += 16) std::memcpy((char*)&table + i, w.table, 16);
    if (!HELD)
        EACH(r, R) EACH(c, C) store(to + r * PANEL + c * WIDTH, Floats{});
    const auto begin = [&]() __attribute__((always_inline)) {
        EACH(r, R) EACH(c, C) part[r][c] = Ints{} + start[r];
        start += rows;
    };
    const auto join = [&]() __attribute__((always_inline)) {
        EACH(r, R) EACH(c, C) part[r][c] += joined(two[r][c]), two[r][c] = Pairs{};
    };
    const auto add = [&](const uint8_t* own) __attribute__((always_inline)) {  // a group's products, to the sums
        if (FIT) join();
        EACH(c, C) {
            const uint8_t* cells = own + c * WIDTH * (steps ? 1 : 2);
            const Floats factor = steps ? scales[c] * steps_of(steps, cells, false) : floats_of(halves, cells);
            Floats all[R];
            EACH(r, R) all[r] = HELD ? sum[r][c] : load<Floats>(to + r * PANEL + c * WIDTH);
            EACH(r, R) all[r] += __builtin_convertvector(part[r][c], Floats) * scale[r] * factor;
            if (offsets) {
                const Floats more =
                    steps ? added[c] * steps_of(steps, cells + next, true) : floats_of(halves, cells + channels * 2);
                EACH(r, R) all[r] += total[r] * more;
            }
            EACH(r, R) if (HELD) sum[r][c] = all[r]; else store(to + r * PANEL + c * WIDTH, all[r]);
        }
        scale += rows, total += rows;
    };
    for (int64_t first = 0; first < groups; first += run) {
        if (steps) {
            EACH(c, C) scales[c] = floats_of(halves, at + (column + c * WIDTH) * 2);
            if (offsets) EACH(c, C) added[c] = floats_of(halves, at + (channels + column + c * WIDTH) * 2);
            at += head;
        }
        for (int64_t g = 0; g < run; g += many, q += span) {
            const uint8_t* own = at + column * (steps ? 1 : 2);
            const uint8_t* from = at + skipped + place(column);
            at += skipped + numbers;
            begin();
            for (int64_t j = 0; BITS == 8 && j < group; j += square) {
                const uint8_t* here = from + j * channels;
                for (int64_t i = j; i < j + square; i += 4, here += step) {
                    asked.ask<C * WIDTH * 4, FAR>(words++, ahead);
                    EACH(r, R) {
                        const auto four = load<int32_t>(q + r * k + i);
                        EACH(c, C) part[r][c] = dot<8>(part[r][c], load<Bytes>(here + place(c * WIDTH)), four);
                    }
                }
            }
            if constexpr (BITS < 8) {
                typedef Planes<BITS> P;
                for (int64_t i = 0; i < span; i += P::UNIT, from += P::WORDS * step) {
                    for (int word = 0; word < P::WORDS; word++)
                        asked.ask<C * WIDTH * 4, FAR>(words++, ahead);
#pragma GCC unroll 8
                    for (int field = 0; field < P::FIELDS; field++) {
                        if constexpr (BITS == 3)
                            if (field == P::FIELDS / 2 && many == 2) add(own), own += skipped / 2, begin();
                        if constexpr (FIT > 0)
                            if (field % FIT == 0 && (field || (i && i % (4 * FIT) == 0))) join();
                        Bytes b[C];
                        EACH(c, C) {
                            const uint8_t* cells = from + place(c * WIDTH);
                            const Words lower = load<Words>(cells + field * P::LOW / 8 * step);
                            Words both = lower >> (field * P::LOW % 8) & P::LOW_MASK;
                            constexpr uint32_t high = P::HIGH_MASK << P::LOW;
                            const int shift = field * P::HIGH - P::LOW;
                            const Words upper = P::HIGH ? load<Words>(cells + P::LOW_WORDS * step) : Words{};
                            if (P::HIGH) both |= (shift < 0 ? upper << -shift : upper >> (shift < 0 ? 0 : shift)) & high;
                            b[c] = CODED ? looked_up(table, (Bytes)both) : (Bytes)both;
                        }
                        EACH(r, R) {
                            const auto four = load<int32_t>(q + r * k + i + field * 4);
                            if constexpr (FIT > 0)
                                EACH(c, C) two[r][c] = pairs(two[r][c], b[c], four);
                            else
                                EACH(c, C) part[r][c] = dot<CODED ? 8 : BITS>(part[r][c], b[c], four);
                        }
                    }
                }
            }
            add(own);
        }
    }
    if (HELD)
        EACH(r, R) EACH(c, C) store(to + r * PANEL + c * WIDTH, sum[r][c]);
}

#if BY_HAND
// So many inputs that sums of 16 bits have room for their products.
constexpr int64_t ROOM = 32;
inline bool by_hand(const Matrix& w) { return w.bits == 4 && !w.coded && w.group % ROOM == 0; }

// Four rows times two vectors of channels, with the bits of `tile`, in which GCC keeps some sums in memory and moves them to
// and fro.
template <bool FAR, bool STEPS>
void tile_of_four(const Matrix& w, const Panel& of, int column, const Rows& x, int64_t row, float* out) {
    const int64_t k = w.k, rows = x.across, channels = of.channels, step = channels * 4, run = w.block / w.group;
    const int64_t head = channels * (STEPS ? step_bytes(w) : head_bytes(w));  // of a group
    const int64_t next = w.steps == 8 ? channels : 0;  // from a step to that of the offset
    const bool halves = w.halves, offsets = w.offsets;
    const char* ahead = of.ahead.from(column, k / 8);
    const uint8_t* at = of.at;
    const int8_t *q = x.q + row * k, *y = q + 2 * k;
    const int32_t* start = x.start + row;
    const float *scale = x.scale + row, *total = x.sum + row;
    const Bytes lower = Bytes{} + 15;
    Floats sum[4][2] = {};
    Floats scales[2], added[2];  // of a block whose groups have steps
    for (int64_t g = 0, word = 0; g < k / w.group; g++, start += rows, scale += rows, total += rows) {
        if (STEPS && g % run == 0) {
            EACH(c, 2) scales[c] = floats_of(halves, at + (column + c * WIDTH) * 2);
            if (offsets) EACH(c, 2) added[c] = floats_of(halves, at + (channels + column + c * WIDTH) * 2);
            at += channels * head_bytes(w);
        }
        const uint8_t *own = at + column * (STEPS ? 1 : 2), *from = at + head + column * 4;
        Ints part[4][2];
        EACH(r, 4) part[r][0] = part[r][1] = Ints{} + start[r];
        for (int64_t i = 0; i < w.group; i += ROOM) {
            EACH(n, 4) if (of.ahead.due(word++)) fetch<2 * WIDTH * 4, FAR>(ahead);
            Pairs a0 = {}, a1 = {}, b0 = {}, b1 = {}, c0 = {}, c1 = {}, d0 = {}, d1 = {};
            const int8_t* end = q + ROOM;
#define ADD(numbers, sum) \
    "vpbroadcastd " numbers ", %%ymm13\n" \
    "vpmaddubsw %%ymm13, %%ymm11, %%ymm14\n" \
    "vpmaddubsw %%ymm13, %%ymm12, %%ymm13\n" \
    "vpaddw %%ymm14, %[" sum "0], %[" sum "0]\n" \
    "vpaddw %%ymm13, %[" sum "1], %[" sum "1]\n"
#define ADD_ALL(at) ADD(at "(%[q])", "a") ADD(at "(%[q],%[k])", "b") ADD(at "(%[y])", "c") ADD(at "(%[y],%[k])", "d")
            asm("1:\n"
                "vpand (%[from]), %[lower], %%ymm11\n"
                "vpand 32(%[from]), %[lower], %%ymm12\n" ADD_ALL("0")
                "vpandn (%[from]), %[lower], %%ymm11\n"
                "vpandn 32(%[from]), %[lower], %%ymm12\n"
                "vpsrlw $4, %%ymm11, %%ymm11\n"
                "vpsrlw $4, %%ymm12, %%ymm12\n" ADD_ALL("4")
                "add %[step], %[from]\n"
                "add $8, %[q]\n"
                "add $8, %[y]\n"
                "cmp %[end], %[q]\n"
                "jb 1b\n"
                : [a0] "+x"(a0), [a1] "+x"(a1), [b0] "+x"(b0), [b1] "+x"(b1), [c0] "+x"(c0), [c1] "+x"(c1), [d0] "+x"(d0),
                  [d1] "+x"(d1), [from] "+r"(from), [q] "+r"(q), [y] "+r"(y)
                : [k] "r"(k), [step] "r"(step), [end] "r"(end), [lower] "x"(lower)
                : "xmm11", "xmm12", "xmm13", "xmm14", "memory", "cc");
#undef ADD_ALL
#undef ADD
            const Pairs two[4][2] = {{a0, a1}, {b0, b1}, {c0, c1}, {d0, d1}};
            EACH(r, 4) EACH(c, 2) part[r][c] += joined(two[r][c]);
        }
        EACH(c, 2) {
            const uint8_t* cells = own + c * WIDTH * (STEPS ? 1 : 2);
            const Floats factor = STEPS ? scales[c] * steps_of(w.steps, cells, false) : floats_of(halves, cells);
            EACH(r, 4) sum[r][c] += __builtin_convertvector(part[r][c], Floats) * scale[r] * factor;
            if (!offsets) continue;
            const Floats more =
                STEPS ? added[c] * steps_of(w.steps, cells + next, true) : floats_of(halves, cells + channels * 2);
            EACH(r, 4) sum[r][c] += total[r] * more;
        }
        at += head + channels * w.group / 2;
    }
    EACH(r, 4) EACH(c, 2) store(out + r * PANEL + column + c * WIDTH, sum[r][c]);
}
#endif

// As many rows as MANY vectors of channels at a time, then one.
template <int BITS, bool SQUARES, bool CODED, bool FAR, int R, int MANY>
void strip(const Matrix& w, const Panel& panel, const Rows& x, int64_t row, float* out) {
    int column = 0;
#if BY_HAND
    if constexpr (BITS == 4 && !CODED && R == 4)
        for (; by_hand(w) && column + 2 * WIDTH <= panel.channels; column += 2 * WIDTH)
            (w.steps ? tile_of_four<FAR, true> : tile_of_four<FAR, false>)(w, panel, column, x, row, out);
#endif
    for (; column + MANY * WIDTH <= panel.channels; column += MANY * WIDTH)
        tile<BITS, SQUARES, CODED, FAR, R, MANY>(w, panel, column, x, row, out);
    for (; column < panel.channels; column += WIDTH)
        tile<BITS, SQUARES, CODED, FAR, R, 1>(w, panel, column, x, row, out);
}

// `count` quantized rows, of R at least, and at most ROWS, or TALL
template <int BITS, bool SQUARES, bool CODED, bool FAR, int R = 1>
void strips(const Matrix& w, const Panel& panel, const Rows& x, int64_t row, int count, float* out) {
    constexpr int most = tall(BITS) ? TALL : BITS == 8 ? ROWS : FEWER;
    constexpr int many = R == 1 ? ALONE : R > FEWER && tall(BITS) ? NARROW : COLUMNS;
    if (count == R) return strip<BITS, SQUARES, CODED, FAR, R, many>(w, panel, x, row, out);
    if constexpr (R < most) strips<BITS, SQUARES, CODED, FAR, R + 1>(w, panel, x, row, count, out);
}

template <bool FAR>
void strips(const Matrix& w, const Panel& panel, const Rows& x, int64_t row, int count, float* out) {
    if (tiled(w)) return strips<8, TILES, false, FAR>(w, panel, x, row, count, out);
    if (w.coded) return strips<4, false, true, FAR>(w, panel, x, row, count, out);
    switch (w.bits) {
        case 8: return strips<8, false, false, FAR>(w, panel, x, row, count, out);
        case 6: return strips<6, false, false, FAR>(w, panel, x, row, count, out);
        case 5: return strips<5, false, false, FAR>(w, panel, x, row, count, out);
        case 4: return strips<4, false, false, FAR>(w, panel, x, row, count, out);
        case 3: return strips<3, false, false, FAR>(w, panel, x, row, count, out);
        case 2: return strips<2, false, false, FAR>(w, panel, x, row, count, out);
    }
}

#if TILES
// 16 rows, and with NEXT up to 16 more, times 16 channels of a group, and with TWO 16 more, without the weights' offset:
// to `part` [rows][PANEL]. Both are in the order of tile registers, `next` bytes from 16 rows to the next 16.
template <bool NEXT, bool TWO>
void tile(const int8_t* x, int64_t next, const uint8_t* from, int64_t channels, int64_t inputs, Ahead ask,
          const char* ahead, int32_t* part) {
    constexpr int64_t square = LANES * TILE_INPUTS;
    TILE_ZERO(0);
    if (TWO) TILE_ZERO(1);
    if (NEXT) TILE_ZERO(2);
    if (NEXT && TWO) TILE_ZERO(3);
    for (int64_t i = 0; i < inputs / TILE_INPUTS; i++, x += 16 * TILE_INPUTS, from += channels * TILE_INPUTS) {
        TILE_LOAD(4, x, TILE_INPUTS);
        if (NEXT) TILE_LOAD(5, x + next, TILE_INPUTS);
        TILE_LOAD(6, from, LANES * 4);
        if (TWO) TILE_LOAD(7, from + square, LANES * 4);
        TILE_DOT_INT8(0, 4, 6);
        if (NEXT) TILE_DOT_INT8(2, 5, 6);
        if (ask.due(i)) fetch<2 * square>(ahead);
        if (TWO) TILE_DOT_INT8(1, 4, 7);
        if (NEXT && TWO) TILE_DOT_INT8(3, 5, 7);
    }
    TILE_STORE(0, part, PANEL * 4);
    if (TWO) TILE_STORE(1, part + LANES, PANEL * 4);
    if (NEXT) TILE_STORE(2, part + 16 * PANEL, PANEL * 4);
    if (NEXT && TWO) TILE_STORE(3, part + 16 * PANEL + LANES, PANEL * 4);
}

// As `strips`, by tile registers: sums of a group are of integers, so that they are the same.
void strip_by_tiles(const Matrix& w, const Panel& panel, const Rows& x, int64_t row, int count, Tiles& tiles, float* out) {
    alignas(64) int32_t part[TILE_ROWS * PANEL];
    const int64_t groups = w.k / w.group, channels = panel.channels, next = 16 * w.k;
    std::memset(out, 0, count * PANEL * sizeof(float));
    tiles.hold(std::min(count, 16), std::max(count - 16, 0));
    Ahead ahead = panel.ahead;
    for (int64_t g = 0; g < groups; g++, ahead = ahead.next(channels, w.group / 4)) {
        const uint8_t* from = panel.at + g * channels * block_bytes(w);
        for (int64_t column = 0; column < channels; column += 2 * LANES) {
            const bool two = column + 2 * LANES <= channels;
            const auto some = two ? tile<false, true> : tile<false, false>, all = two ? tile<true, true> : tile<true, false>;
            const auto product = count > 16 ? all : some;
            product(x.at(row, g * w.group), next, from + channels * head_bytes(w) + column * TILE_INPUTS, channels, w.group, ahead,
                    ahead.from(column, w.group / 4), part + column);
        }
        for (int r = 0; r < count; r++) {
            const int64_t at = g * x.across + row + r;
            for (int64_t c = 0; c < channels; c += WIDTH) {
                const Ints all = load<Ints>(part + r * PANEL + c) + x.start[at];
                Floats sum = load<Floats>(out + r * PANEL + c);
                const Floats scale = floats_of(w.halves, from + c * 2);
                sum += __builtin_convertvector(all, Floats) * x.scale[at] * scale;
                if (w.offsets) sum += x.sum[at] * floats_of(w.halves, from + (channels + c) * 2);
                store(out + r * PANEL + c, sum);
            }
        }
    }
}
#endif

// Add up the digits of `count` quantized rows, and write.
template <class Y> void finish(const Matrix& w, const float* sums, int64_t panel, int64_t row, int count, Y* y, int64_t across) {
    const int64_t first = panel * PANEL, channels = std::min<int64_t>(PANEL, w.n - first);
    for (int i = 0; i < count; i += w.digits) {
        Y* to = y + (row + i) / w.digits * across + first;
        for (int64_t c = 0; c < channels; c += WIDTH) {
            Floats sum = load<Floats>(sums + i * PANEL + c);
            if (w.digits == 2) sum += load<Floats>(sums + (i + 1) * PANEL + c);
            if (w.factors) sum *= load<Floats>(w.factors + first + c);
            if (w.bias) sum += load<Floats>(w.bias + first + c);
            store(to + c, sum, channels - c);
        }
    }
}

// Of a strip.
inline int64_t most_rows(const Matrix& w, bool tiled) {
    if (tiled) return TILE_ROWS;
    return tall(w.bits) ? TALL : w.group == w.k && w.bits == 8 ? ROWS : FEWER;
}

// Quantized rows [row, end) times a panel.
template <class Y> void multiply_panel(const Job& job, int64_t panel, const Rows& x, int64_t row, int64_t end, Tiles& tiles) {
    const Matrix& w = *job.w;
    const int64_t channels = channels_of(w.n, panel), most = most_rows(w, x.tiled);
    const int64_t count = (end - row + most - 1) / most, each = (end - row + count - 1) / count;
    // Rows of a strip, alike, or whole tiles; digits stay together.
    const int64_t step = x.tiled ? most : (each + w.digits - 1) / w.digits * w.digits;
    const uint8_t* from = w.weights + panel * panel_bytes(w, PANEL);
    const bool sliced = SLICED ? end - row > 1 : tall(w.bits) && end - row > FEWER;
    Panel part = {from, channels, ahead_of(count, sliced, from, from + panel_bytes(w, channels))};
    alignas(64) float sums[std::max(std::max(ROWS, TALL), TILE_ROWS) * PANEL];
    for (; row < end; row += step, part.ahead = part.ahead.next(channels, w.k * w.bits / 32)) {
        const int here = int(std::min<int64_t>(step, end - row));
#if TILES
        if (x.tiled)
            strip_by_tiles(w, part, x, row, here, tiles, sums);
        else
#endif
        part.ahead.far ? strips<true>(w, part, x, row, here, sums) : strips<false>(w, part, x, row, here, sums);
        finish(w, sums, panel, row, here, (Y*)job.y, job.across);
    }
}

// Whether the rows of two products are the same, and quantized alike.
inline bool alike(const Job& a, const Job& b) {
    const Matrix &v = *a.w, &w = *b.w;
    return a.x == b.x && a.m == b.m && v.k == w.k && v.inputs == w.inputs && v.group == w.group && taken_off(v) == taken_off(w) &&
           v.digits == w.digits;
}

// What threads quantize at a time of a product's rows: so many rows and groups, `across` pieces for the same rows.
struct Pieces {
    int64_t rows, groups, across, count;

    explicit Pieces(const Job& job)
        : rows(job.w->group == job.w->k ? SOME : LINE), groups(std::max<int64_t>(1, PIECE / job.w->group)),
          across((job.w->k / job.w->group + groups - 1) / groups), count((job.m + rows - 1) / rows * across) {}
};

// Several products at once. Rows that successive ones share are quantized once.
template <class X, class Y> void multiply(const std::vector<Job>& jobs, void* memory) {
    std::vector<Rows> rows;
    std::vector<Job> sources;  // whose rows are quantized
    std::vector<int64_t> source;  // of each job
    auto* at = (char*)memory;
    int64_t work = 0, given = 0;
    for (const Job& job : jobs) {
        work += job.m * job.w->digits * job.w->n * job.w->k;
        if (sources.empty() || !alike(sources.back(), job)) {
            rows.emplace_back(*job.w, job.m, at);
            sources.push_back(job);
            at += Rows::bytes(*job.w, job.m);
            given += job.m * job.w->k;
        }
        source.push_back(int64_t(sources.size()) - 1);
    }
    const auto chunk = [](const Job& job) {
        return chunk_of(job.m * job.w->digits, CHUNK, most_rows(*job.w, tiled(*job.w)));
    };
    const Starts panels(jobs, [&](const Job& job) {
        const int64_t count = job.m * job.w->digits, each = chunk(job);
        return panels_of(job.w->n) * ((count + each - 1) / each);
    });
    const Starts pieces(sources, [](const Job& job) { return Pieces(job).count; });
    const auto prepare = [&](int64_t task) {
        const int64_t owner = pieces.owner(task), own = task - pieces.first(owner);
        const Job& job = sources[owner];
        const Matrix& w = *job.w;
        const Pieces cut(job);
        const int64_t row = own / cut.across * cut.rows, end = std::min(job.m, row + cut.rows);
        const int64_t from = own % cut.across * cut.groups, until = std::min(w.k / w.group, from + cut.groups);
        const auto some = w.digits == 1 ? quantize<1, X> : quantize<2, X>;
        for (int64_t i = row; i < end; i++) some(w, (const X*)job.x + i * w.inputs, i, from, until, rows[owner]);
    };
    Shares tasks(panels.total(), thread_count()), quantizing(pieces.total(), thread_count());
    std::atomic<int64_t> ready(0);
    if (given <= FEW)
        for (int64_t task; (task = quantizing.next(0)) >= 0; ready++) prepare(task);
#pragma omp parallel if (work > SMALL)
    {
        const int thread = thread_number();
        for (int64_t task; (task = quantizing.next(thread)) >= 0; ready++) prepare(task);
        while (ready.load(std::memory_order_acquire) < pieces.total())
            std::this_thread::yield();  // not for a thread that comes late
        Tiles tiles;
        for (int64_t task; (task = tasks.next(thread)) >= 0;) {
            const int64_t owner = panels.owner(task), own = task - panels.first(owner);
            const Job& job = jobs[owner];
            const int64_t count = panels_of(job.w->n), each = chunk(job), first = own / count * each;
            const int64_t end = std::min(job.m * job.w->digits, first + each);
            multiply_panel<Y>(job, own % count, rows[source[owner]], first, end, tiles);
        }
    }
}

void multiply(const std::vector<Job>& jobs, int32_t x_type, int32_t y_type, void* memory) {
    if (x_type && y_type)
        multiply<uint16_t, uint16_t>(jobs, memory);
    else if (x_type)
        multiply<uint16_t, float>(jobs, memory);
    else if (y_type)
        multiply<float, uint16_t>(jobs, memory);
    else
        multiply<float, float>(jobs, memory);
}

}  // namespace

extern "C" {

// Bytes that so many products with such a matrix, one or several at once, need to quantize m rows in.
int64_t ferrule_multiply_memory(const Matrix* matrix, int64_t m, int64_t products) { return Rows::bytes(*matrix, m, products); }

// x [m, inputs] to y [m, n], both contiguous; types as above.
void ferrule_multiply(const Matrix* w, const void* x, void* y, int64_t m, int32_t x_type, int32_t y_type, void* memory) {
    recorded([=] { multiply({Job{w, x, y, m, w->n}}, x_type, y_type, memory); });
}

// Products of successive rows of x with several matrices of one shape, as `ferrule_dense_bank`.
void ferrule_multiply_bank(const Matrix* const* matrices, const int64_t* counts, int64_t count, const void* x, void* y,
                           int32_t shared, int32_t x_type, int32_t y_type, void* memory) {
    recorded([=] {
        std::vector<Job> jobs;
        visit_counts(counts, count, shared, [&](int64_t i, int64_t row, int64_t m) {
            const Matrix& w = *matrices[i];
            const char* from = (const char*)x + (shared ? 0 : row * w.inputs * (x_type ? 2 : 4));
            jobs.push_back({&w, from, (char*)y + row * w.n * (y_type ? 2 : 4), m, w.n});
        });
        multiply(jobs, x_type, y_type, memory);
    });
}

// Several products at once, in the memory that each of them needs.
void ferrule_multiply_many(const Job* jobs, int64_t count, int32_t x_type, int32_t y_type, void* memory) {
    recorded([all = std::vector<Job>(jobs, jobs + count), x_type, y_type, memory] { multiply(all, x_type, y_type, memory); });
}
}
