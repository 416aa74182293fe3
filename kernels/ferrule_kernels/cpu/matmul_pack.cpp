// Weights quantized into the order in which `matmul.cpp` reads them, which says what that is; and rows of them read back.
#include <type_traits>
#include <vector>
#include "blocks.h"
#include "float8.h"
#include "matmul.h"
#include "recording.h"

namespace {

constexpr int TRIES = 12, AT_ONCE = 4;  // scales that are tried, and how many of them at once
constexpr int64_t SMALL = 1 << 15;  // weights that one thread reads back sooner than two
constexpr float HUGEST = 1e36f;  // beyond it the scales that are tried are infinite
constexpr float NEAREST = 12582912.0f;  // 1.5 * 2^23: added and taken off, it rounds to nearest, ties to even

// A weight of fp8, e4m3.
struct Eight {
    uint8_t bits;
};

inline Floats numbers(const Eight* x) { return as_floats<E4M3>(&x->bits); }

inline Floats rounded(Floats x) {  // to bfloat16, to nearest, ties to even
    const Words bits = (Words)x;
    return (Floats)((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

inline Floats at_most(Floats x, Floats most) {
#if defined(__AVX512F__)
    return (Floats)_mm512_min_ps((__m512)x, (__m512)most);
#elif defined(__AVX2__)
    return (Floats)_mm256_min_ps((__m256)x, (__m256)most);
#else
    return x < most ? x : most;
#endif
}

inline Floats at_least(Floats x, Floats least) { return -at_most(-x, -least); }

// To the nearest integer, at most `high`, ties to even.
inline Floats nearest(Floats x, float high) { return at_most(x, splat(high)) + NEAREST - NEAREST; }

// Rows as columns.
inline void transpose(Floats* rows) {
    Ints low, high;  // lanes of two vectors in turns: of their first halves, and of their second halves
    for (int i = 0; i < WIDTH; i++) {
        low[i] = i / 2 + i % 2 * WIDTH;
        high[i] = low[i] + WIDTH / 2;
    }
    for (int stage = 1; stage < WIDTH; stage *= 2) {
        Floats next[WIDTH];
        for (int i = 0; i < WIDTH / 2; i++) {
            next[2 * i] = __builtin_shuffle(rows[i], rows[i + WIDTH / 2], low);
            next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + WIDTH / 2], high);
        }
        std::memcpy(rows, next, sizeof next);
    }
}

// Weights of `real` channels, at most WIDTH, as vectors with a lane for each channel; the other lanes are zero.
template <class T> void read_channels(const T* weights, int64_t across, int64_t real, int64_t count, Floats* x) {
    for (int64_t i = 0; i < count; i += WIDTH) {
        Floats rows[WIDTH] = {};
        for (int64_t c = 0; c < real; c++) rows[c] = numbers(weights + c * across + i, count - i);
        transpose(rows);
        std::memcpy(x + i, rows, sizeof rows);
    }
}

// The scales, bfloat16, with which a group of each lane's channel loses least. 8 bits reach to 127 on both sides; fewer,
// as 4 bits from -8 to 7, so that the side that the largest number is on takes the longer half. SHORT: up to 8.
template <bool SHORT> Floats scales_of(const Matrix& w, const Floats* x, int64_t count) {
    Floats above = {}, below = {};
    for (int64_t i = 0; i < count; i++) {
        above = at_least(x[i], above);
        below = at_most(x[i], below);
    }
    const Floats most = above >= -below ? above : below, size = at_least(most, -most);
    if (w.bits == 8) return size <= TINY ? Floats{} : rounded(size / 127.0f);
    const float half = float(1 << (w.bits - 1));
    const Floats wide = most * 5.0f * (8.0f / half);
    Floats least = splat(INFINITY), best = {};
    // The largest number becomes 42/40 of the half, 41/40 and so on.
    for (int first = -42; first < TRIES - 42; first += AT_ONCE) {
        Floats scales[AT_ONCE], inverses[AT_ONCE], losses[AT_ONCE] = {};
        for (int i = 0; i < AT_ONCE; i++) {
            scales[i] = rounded(wide / float(first + i));
            inverses[i] = 1.0f / scales[i];
        }
        for (int64_t j = 0; j < count; j++)
            for (int i = 0; i < AT_ONCE; i++) {
                Floats number = x[j] * inverses[i];
                if (!SHORT) number = at_least(number, splat(-half));  // a short half is never left: 8 * 42 / 40 rounds to 8
                const Floats lost = x[j] - nearest(number, half - 1) * scales[i];
                losses[i] += lost * lost;
            }
        for (int i = 0; i < AT_ONCE; i++) {  // of those that lose least the smallest
            best = losses[i] < least ? scales[i] : best;
            least = losses[i] < least ? losses[i] : least;
        }
    }
    return size <= TINY ? Floats{} : best;
}

// Where in a group of a panel of so many channels a weight of 8 bits is, in the order for tile registers or the other.
inline int64_t place(int64_t channels, int64_t channel, int64_t input, bool tiles) {
    if (!tiles) return input / 4 * channels * 4 + channel * 4 + input % 4;
    const int64_t square = input / TILE_INPUTS * channels + channel / LANES * LANES;
    return square * TILE_INPUTS + input % TILE_INPUTS / 4 * LANES * 4 + channel % LANES * 4 + input % 4;
}

// A float that the matrix's type of 16 bits can hold.
inline void keep_float(const Matrix& w, uint8_t* to, float x) {
    const float moved = w.halves ? x * 0x1p-112f : x;  // float16 has exponents that count from 15, and so its denormals
    uint32_t bits;
    std::memcpy(&bits, &moved, 4);
    const auto kept = uint16_t(w.halves ? (bits >> 16 & 0x8000u) | (bits & 0x7fffffffu) >> 13 : bits >> 16);
    std::memcpy(to, &kept, 2);
}

// Numbers of channels side by side, as `Planes` says; `four` gives bytes of four inputs for each.
template <int BITS, class F> void keep_planes(F four, int64_t count, uint8_t* cells, int64_t channels) {
    typedef Planes<BITS> P;
    for (int64_t i = 0; i + P::UNIT <= count; i += P::UNIT) {
        Words words[P::WORDS] = {};
        for (int field = 0; field < P::FIELDS; field++) {
            const Words bytes = four(i + field * 4);
            words[field * P::LOW / 8] |= (bytes & P::LOW_MASK) << (field * P::LOW % 8);
            if (P::HIGH) words[P::LOW_WORDS] |= (bytes >> P::LOW & P::HIGH_MASK) << (field * P::HIGH);
        }
        for (int word = 0; word < P::WORDS; word++, cells += channels * 4) std::memcpy(cells, &words[word], sizeof(Words));
    }
}

// What a matrix is packed from. With `scales` [n, blocks] the weights are the numbers themselves, and are these whole.
// `offsets` are as the scales where the matrix has them; `steps` and `offset_steps` [n, groups] where groups have steps.
struct Given {
    const float *scales, *offsets;
    const int8_t *steps, *offset_steps;
};

void keep_steps(const Matrix& w, const Given& given, int64_t at, uint8_t* to, int64_t channels) {
    if (w.steps == 4) *to = uint8_t(given.steps[at] | given.offset_steps[at] << 4);
    if (w.steps != 8) return;
    *to = uint8_t(given.steps[at]);
    if (w.offsets) to[channels] = uint8_t(given.offset_steps[at]);
}

// Numbers of the channels from `c` on.
template <class F> void keep_numbers(const Matrix& w, F four, int64_t count, uint8_t* cells, int64_t channels, int64_t c) {
    switch (w.bits) {
        case 6: return keep_planes<6>(four, count, cells + c * 4, channels);
        case 5: return keep_planes<5>(four, count, cells + c * 4, channels);
        case 4: return keep_planes<4>(four, count, cells + c * 4, channels);
        case 3: return keep_planes<3>(four, count, cells + c * 4, channels);
        case 2: return keep_planes<2>(four, count, cells + c * 4, channels);
    }
    for (int64_t i = 0; i < count; i += 4) {
        const Words bytes = four(i);
        std::memcpy(cells + place(channels, c, i, tiled(w)), &bytes, sizeof bytes);
    }
}

// Numbers that are kept: from `low` to `high`, plus `offset`.
struct Range {
    int low, high, offset;
    explicit Range(const Matrix& w) {
        offset = w.coded ? 0 : middle(w);
        low = -std::min(offset, 127);
        high = (1 << w.bits) - 1 - offset;
    }
};

typedef int8_t Bytes __attribute__((vector_size(4 * WIDTH)));
typedef uint8_t Kept __attribute__((vector_size(4 * WIDTH)));

// Four numbers of each channel in its lane, of weights times `inverses`.
inline Words four_of(const Floats* x, Floats inverses, const Range& range) {
    Words bytes = {};
    for (int b = 0; b < 4; b++) {
        const Floats v = nearest(at_least(x[b] * inverses, splat(range.low)), range.high);
        bytes |= (Words)(__builtin_convertvector(v, Ints) + range.offset) << (8 * b);
    }
    return bytes;
}

// Those of numbers that came as bytes.
inline Words four_of(Words numbers, const Range& range) {
    const Bytes low = Bytes{} + int8_t(range.low), high = Bytes{} + int8_t(std::min(range.high, 127));
    Bytes v = (Bytes)numbers;
    v = v < low ? low : v;
    v = v > high ? high : v;
    return (Words)((Kept)v + uint8_t(range.offset));
}

// What weights of fp8 are multiplied by: a scale for each block of `tall` channels and `step` inputs, `across` of which
// are side by side. The products are rounded to bfloat16 where that `rounds`.
struct Scaled {
    const float* scales = nullptr;
    int64_t tall = 1, step = 1, across = 1;
    bool rounds = false;

    // The lanes of x [count] are `real` channels from `first` on, of the inputs from `begin` on.
    void apply(Floats* x, int64_t first, int64_t real, int64_t begin, int64_t count) const {
        for (int64_t i = 0; i < count;) {
            const int64_t column = (begin + i) / step, end = std::min(count, (column + 1) * step - begin);
            Floats own = {};
            for (int64_t c = 0; c < real; c++) own[c] = scales[(first + c) / tall * across + column];
            for (; i < end; i++) x[i] = rounds ? rounded(x[i] * own) : x[i] * own;
        }
    }
};

// Channels past the last are zeros. Returns whether scales could be found: whether no weight is NaN or huge.
template <class T>
bool pack_panel(const Matrix& w, const T* weights, const Given& given, const Scaled& scaled, int64_t panel, Floats* x) {
    const int64_t channels = channels_of(w.n, panel), span = span_of(w), groups = w.k / w.group;
    const Range range(w);
    constexpr bool BYTES = std::is_same<T, int8_t>::value;  // which are read as words of four
    Ints wrong = {};
    uint8_t* const start = w.weights + panel * panel_bytes(w, PANEL);
    std::memset(start, 0, panel_bytes(w, channels));
    for (int64_t c = 0; c < channels; c += WIDTH) {
        const int64_t first = panel * PANEL + c, real = std::max<int64_t>(0, std::min<int64_t>(WIDTH, w.n - first));
        Words there;  // all bits of the channels' lanes: what pads them is zero
        for (int i = 0; i < WIDTH; i++) there[i] = i < real ? ~0u : 0u;
        uint8_t* to = start;
        for (int64_t begin = 0; begin < w.k; begin += span) {
            const int64_t count = std::max<int64_t>(0, std::min(span, w.inputs - begin)), g = begin / w.group;
            uint8_t* head = begin % w.block ? nullptr : to;
            uint8_t* steps = to + (head ? channels * head_bytes(w) : 0);
            uint8_t* numbers = steps + span / w.group * step_bytes(w) * channels;
            const T* from = weights + first * w.inputs + begin;
            const int64_t cells = BYTES ? count / 4 : count;
            if constexpr (BYTES) read_channels((const float*)from, w.inputs / 4, real, cells, x);
            else read_channels(from, w.inputs, real, cells, x);
            if (std::is_same<T, Eight>::value) scaled.apply(x, first, real, begin, cells);
            for (int64_t i = (cells + WIDTH - 1) / WIDTH * WIDTH; i < span; i++) x[i] = Floats{};
            for (int64_t i = 0; i < cells && !BYTES; i++) wrong |= ~((x[i] <= HUGEST) & (x[i] >= -HUGEST));
            Floats inverses = splat(1.0f);
            if (!given.scales) {
                const Floats scales = w.bits > 4 ? scales_of<false>(w, x, count) : scales_of<true>(w, x, count);
                inverses = scales == 0.0f ? Floats{} : 1.0f / scales;
                if (head) narrow((uint16_t*)head + c, scales);
            }
            for (int64_t i = 0; i < real && given.scales; i++) {
                const int64_t channel = first + i, at = channel * (w.k / w.block) + begin / w.block;
                if (head) keep_float(w, head + (c + i) * 2, given.scales[at]);
                if (head && w.offsets) keep_float(w, head + (channels + c + i) * 2, given.offsets[at]);
                for (int64_t s = 0; s < span / w.group; s++)
                    keep_steps(w, given, channel * groups + g + s, steps + s * step_bytes(w) * channels + c + i, channels);
            }
            const auto four = [&](int64_t i) {
                if constexpr (BYTES) return four_of((Words)x[i / 4], range) & there;
                else return four_of(x + i, inverses, range) & there;
            };
            keep_numbers(w, four, span, numbers, channels, c);
            to = numbers + channels * span * w.bits / 8;
        }
    }
    int32_t any = 0;
    for (int i = 0; i < WIDTH; i++) any |= wrong[i];
    return given.scales || !any;
}

template <class T> bool pack(const Matrix& w, const T* weights, const Given& given, const Scaled& scaled = {}) {
    const int64_t panels = panels_of(w.n);
    Shares shares(panels, thread_count());  // as in products: a panel's memory is on the node of the thread that reads it
    bool right = true;
#pragma omp parallel reduction(&& : right)
    {
        std::vector<Floats> x(span_of(w) / WIDTH * WIDTH + WIDTH);
        for (int64_t panel; (panel = shares.next(thread_number())) >= 0;)
            right = pack_panel(w, weights, given, scaled, panel, x.data()) && right;
    }
    return right;
}

// Rows of a GGUF file's blocks, each `across` bytes after the one before.
struct Blocks {
    int32_t type;
    const uint8_t* rows;
    int64_t across, count;  // of a row
};

// The largest of some floats without their signs, not less than `most`; NaN where one is, or `most`.
inline float largest(const std::vector<float>& x, float most) {
    for (const float each : x)
        if (!std::isnan(most) && !(std::fabs(each) <= most)) most = std::fabs(each);
    return most;
}

// A panel is read and packed while its numbers are in the cache. Returns the largest float of a block, or NaN.
float pack_blocks(const Matrix& w, const Blocks& from) {
    Shares shares(panels_of(w.n), thread_count());
    float most = 0.0f;
#pragma omp parallel
    {
        std::vector<Floats> x(span_of(w) / WIDTH * WIDTH + WIDTH);
        const int64_t most_numbers = std::min<int64_t>(PANEL, w.n) * w.k;  // a file may have few very long rows
        std::vector<int8_t> numbers, steps, offset_steps;
        std::vector<float> scales, offsets;
        float own = 0.0f;
        for (int64_t panel; (panel = shares.next(thread_number())) >= 0;) {
            const int64_t first = panel * PANEL;
            Matrix part = w;
            part.weights += panel * panel_bytes(w, PANEL);
            part.n = std::min<int64_t>(PANEL, w.n - first);
            numbers.resize(most_numbers);  // in threads that have a panel alone
            steps.resize(most_numbers / w.group), offset_steps.resize(steps.size());
            scales.resize(most_numbers / w.block), offsets.resize(scales.size());
            const BlockParts parts = {numbers.data(), scales.data(), offsets.data(), steps.data(), offset_steps.data()};
            ferrule_blocks_read(from.type, from.rows + first * from.across, from.across, part.n, from.count, &parts);
            const Given given = {scales.data(), offsets.data(), steps.data(), offset_steps.data()};
            pack_panel(part, numbers.data(), given, {}, 0, x.data());
            own = largest(offsets, largest(scales, own));
        }
#pragma omp critical
        most = largest({own}, most);
    }
    return most;
}

// Numbers of one channel as they were put by `keep_planes`.
template <int BITS> void read_planes(const uint8_t* cells, int64_t channels, int64_t count, uint8_t* numbers) {
    typedef Planes<BITS> P;
    for (int64_t i = 0; i + P::UNIT <= count; i += P::UNIT, cells += P::WORDS * channels * 4) {
        uint32_t words[P::WORDS];
        for (int word = 0; word < P::WORDS; word++) std::memcpy(&words[word], cells + word * channels * 4, 4);
        for (int field = 0; field < P::FIELDS; field++) {
            uint32_t bytes = words[field * P::LOW / 8] >> (field * P::LOW % 8) & P::LOW_MASK;
            if (P::HIGH) bytes |= (words[P::LOW_WORDS] >> (field * P::HIGH) & P::HIGH_MASK) << P::LOW;
            std::memcpy(numbers + i + field * 4, &bytes, 4);
        }
    }
}

// The same for any number of bits; `cells` are those of the panel.
void read_numbers(
    const Matrix& w, const uint8_t* cells, int64_t channels, int64_t c, int64_t count, uint8_t* numbers
) {
    switch (w.bits) {
        case 6: return read_planes<6>(cells + c * 4, channels, count, numbers);
        case 5: return read_planes<5>(cells + c * 4, channels, count, numbers);
        case 4: return read_planes<4>(cells + c * 4, channels, count, numbers);
        case 3: return read_planes<3>(cells + c * 4, channels, count, numbers);
        case 2: return read_planes<2>(cells + c * 4, channels, count, numbers);
    }
    for (int64_t i = 0; i < count; i += 4) std::memcpy(numbers + i, cells + place(channels, c, i, tiled(w)), 4);
}

// What `keep_float` kept.
inline float kept_float(const Matrix& w, const uint8_t* from) {
    if (w.halves) return half_at(from);
    uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
    const uint32_t whole = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &whole, sizeof x);
    return x;
}

// One row of weights, [k], as floats. `numbers` has room for a span.
void read_row(const Matrix& w, int64_t row, uint8_t* numbers, float* to) {
    const int64_t panel = row / PANEL, c = row % PANEL, channels = channels_of(w.n, panel), span = span_of(w);
    const float factor = w.factors ? w.factors[row] : 1.0f;
    const uint8_t* at = w.weights + panel * panel_bytes(w, PANEL);
    float scale = 0.0f, offset = 0.0f;
    for (int64_t begin = 0; begin < w.k; begin += span) {
        if (begin % w.block == 0) {
            scale = kept_float(w, at + c * 2) * factor;
            if (w.offsets) offset = kept_float(w, at + (channels + c) * 2) * factor;
            at += channels * head_bytes(w);
        }
        const uint8_t* cells = at + span / w.group * step_bytes(w) * channels;
        read_numbers(w, cells, channels, c, span, numbers);
        for (int64_t i = 0; i < span && w.coded; i++) numbers[i] = w.table[numbers[i]];
        for (int64_t i = 0; i < span; i += w.group, at += step_bytes(w) * channels) {
            float own = scale, added = offset;
            if (w.steps == 4) own *= at[c] & 15, added *= at[c] >> 4;
            if (w.steps == 8) own *= int8_t(at[c]), added *= w.offsets ? int8_t(at[channels + c]) : 0;
            for (int64_t j = i; j < i + w.group; j++) to[begin + j] = (numbers[j] - middle(w)) * own + added;
        }
        at = cells + channels * span * w.bits / 8;
    }
}

// Rows [count, inputs], up to the first id that has none: its place, else `count`.
template <class Y> int64_t read_rows(const Matrix& w, const int64_t* ids, int64_t count, Y* to) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= w.n) return i;
#pragma omp parallel if (count * w.k > SMALL)
    {
        std::vector<uint8_t> numbers(span_of(w));
        std::vector<float> row(w.k + WIDTH);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++) {
            read_row(w, ids[i], numbers.data(), row.data());
            visit(row.data(), w.inputs, [&](Floats x, int64_t at, int64_t n) { store(to + i * w.inputs + at, x, n); });
        }
    }
    return count;
}

}  // namespace

extern "C" {

// Quantize weights [n, inputs] into `matrix->weights`; `type` is 0 for float32, 1 for bfloat16, 2 for numbers of 8 bits, of
// which a row is whole words of four. `scales` [n, blocks], which the matrix's type of floats can hold, are those of weights
// that were quantized before and are numbers now; else null. So are `offsets` where the matrix has them, and `steps` and
// `offset_steps` [n, groups] where it has these. Returns 0 where weights that were not quantized before are NaN, or larger
// than any that a model can compute with.
int ferrule_pack(const Matrix* matrix, const void* weights, int32_t type, const float* scales, const float* offsets,
                  const int8_t* steps, const int8_t* offset_steps) {
    const Given given = {scales, offsets, steps, offset_steps};
    if (type == 2) return pack(*matrix, (const int8_t*)weights, given);
    return type ? pack(*matrix, (const uint16_t*)weights, given) : pack(*matrix, (const float*)weights, given);
}

// The same of weights of fp8 (e4m3), as `Scaled` says.
int ferrule_pack_fp8(const Matrix* matrix, const void* weights, const float* scales, int64_t tall, int64_t step,
                     int64_t across, int32_t rounds) {
    return pack(*matrix, (const Eight*)weights, {}, {scales, tall, step, across, bool(rounds)});
}

// The same of rows [n] of `blocks` of a type in ``blocks.cpp``, each `across` bytes after the one before, which have the
// matrix's numbers, scales and steps. Returns the largest scale or offset without its sign, NaN where one is NaN.
float ferrule_pack_blocks(const Matrix* matrix, int32_t type, const uint8_t* rows, int64_t across, int64_t blocks) {
    return pack_blocks(*matrix, {type, rows, across, blocks});
}

// As `ferrule_dense_rows`: what the numbers stand for, of float32 for the `type` 0 and of bfloat16 for 1.
int64_t ferrule_rows(const Matrix* matrix, const int64_t* ids, int64_t count, int32_t type, void* to) {
    const auto read = [=] {
        return type ? read_rows(*matrix, ids, count, (uint16_t*)to) : read_rows(*matrix, ids, count, (float*)to);
    };
    if (recording) recording->push_back(read);
    return read();
}

// As `ferrule_dense_turn`.
void ferrule_turn(const Matrix* matrix) {
    const Matrix& w = *matrix;
    if (!tileable(w)) return;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels_of(w.n); panel++) {
        const int64_t channels = channels_of(w.n, panel);
        uint8_t* to = w.weights + panel * panel_bytes(w, PANEL);
        for (int64_t g = 0; g < w.k / w.group; g++, to += channels * w.group) {
            to += channels * head_bytes(w);
            const std::vector<uint8_t> from(to, to + channels * w.group);
            for (int64_t i = 0; i < w.group; i += 4)
                for (int64_t c = 0; c < channels; c++)
                    std::memcpy(to + place(channels, c, i, TILES), &from[place(channels, c, i, !TILES)], 4);
        }
    }
}
}
