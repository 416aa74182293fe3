// Weights quantized into the order in which `matmul.cpp` reads them; it says what that is.
#include <vector>
#include "matmul.h"

namespace {

constexpr int TRIES = 12;
constexpr float HUGEST = 1e36f;  // beyond it the scales that are tried are infinite
constexpr float NEAREST = 12582912.0f;  // 1.5 * 2^23: added and taken off, it rounds to nearest, ties to even

inline Floats rounded(Floats x) {  // to bfloat16, to nearest, ties to even
    const Words bits = (Words)x;
    return (Floats)((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

inline Floats counted(float first) {  // first, first + 1 and so on
    Floats x;
    for (int i = 0; i < WIDTH; i++) x[i] = first + float(i);
    return x;
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

// The scale, a bfloat16, with which one group of a channel loses least; `most` is its largest magnitude. 8 bits reach
// to 127 on both sides; fewer, as 4 bits from -8 to 7, so that the side that the largest number is on takes the longer half.
inline float scale_of(const Matrix& w, const float* x, int64_t count) {  // zeros follow x
    Floats above = {}, below = {};
    for (int64_t i = 0; i < count; i += WIDTH) {
        const Floats v = load<Floats>(x + i);
        above = v > above ? v : above;
        below = -v > below ? -v : below;
    }
    const float highest = largest(above), lowest = -largest(below), most = highest >= -lowest ? highest : lowest;
    if (std::fabs(most) <= TINY) return 0.0f;
    if (w.bits == 8) return rounded(splat(std::fabs(most) / 127.0f))[0];
    // A lane for each scale that is tried: the largest number becomes 42/40 of the half, 41/40 and so on.
    constexpr int VECTORS = (TRIES + WIDTH - 1) / WIDTH;
    const float half = float(1 << (w.bits - 1)), wide = most * 5.0f * (8.0f / half);
    Floats scales[VECTORS], inverses[VECTORS], losses[VECTORS] = {};
    for (int i = 0; i < VECTORS; i++) {
        scales[i] = rounded(wide / counted(float(i * WIDTH - 42)));
        inverses[i] = 1.0f / scales[i];
    }
    for (int64_t j = 0; j < count; j++)
        for (int i = 0; i < VECTORS; i++) {
            Floats number = x[j] * inverses[i];
            if (half > 8) number = at_least(number, splat(-half));  // a smaller half is never left: 8 * 42 / 40 rounds to 8
            const Floats lost = x[j] - nearest(number, half - 1) * scales[i];
            losses[i] += lost * lost;
        }
    Floats least = splat(INFINITY), best = splat(INFINITY);
    for (int i = 0; i < VECTORS; i++) {
        losses[i] = counted(float(i * WIDTH)) < float(TRIES) ? losses[i] : splat(INFINITY);
        least = at_most(losses[i], least);
    }
    const float fewest = -largest(-least);
    if (fewest == INFINITY) return 0.0f;
    for (int i = 0; i < VECTORS; i++)  // the first of those that lose least has the smallest size
        best = losses[i] == fewest ? at_most(scales[i] < 0.0f ? -scales[i] : scales[i], best) : best;
    return std::copysign(-largest(-best), -most);
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

// A group's numbers of one channel, as `Planes` says.
template <int BITS>
void keep_planes(const uint8_t* numbers, int64_t count, uint8_t* cells, int64_t channels, int64_t channel) {
    typedef Planes<BITS> P;
    for (int64_t i = 0; i + P::UNIT <= count; i += P::UNIT) {
        uint32_t words[P::WORDS] = {};
        for (int field = 0; field < P::FIELDS; field++) {
            const auto four = load<uint32_t>(&numbers[i + field * 4]);
            words[field * P::LOW / 8] |= (four & P::LOW_MASK) << (field * P::LOW % 8);
            if (P::HIGH) words[P::LOW_WORDS] |= (four >> P::LOW & P::HIGH_MASK) << (field * P::HIGH);
        }
        for (int word = 0; word < P::WORDS; word++, cells += channels * 4) std::memcpy(cells + channel * 4, &words[word], 4);
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

void keep_numbers(const Matrix& w, const uint8_t* numbers, int64_t count, uint8_t* cells, int64_t channels, int64_t c) {
    for (int64_t i = 0; w.bits == 8 && i < count; i += 4)
        std::memcpy(cells + place(channels, c, i, tiled(w)), &numbers[i], 4);
    switch (w.bits) {
        case 6: return keep_planes<6>(numbers, count, cells, channels, c);
        case 5: return keep_planes<5>(numbers, count, cells, channels, c);
        case 4: return keep_planes<4>(numbers, count, cells, channels, c);
        case 3: return keep_planes<3>(numbers, count, cells, channels, c);
        case 2: return keep_planes<2>(numbers, count, cells, channels, c);
    }
}

// Channels past the last have scales of zero. Returns whether scales could be found: whether no weight is NaN or huge.
template <class T> bool pack_panel(const Matrix& w, const T* weights, const Given& given, int64_t panel) {
    const int64_t channels = channels_of(w.n, panel), real = std::min<int64_t>(PANEL, w.n - panel * PANEL);
    const int64_t span = span_of(w), groups = w.k / w.group;
    const int offset = w.coded ? 0 : middle(w);
    const float low = -std::min(offset, 127), high = (1 << w.bits) - 1 - offset;
    std::vector<float> x(span + WIDTH);
    std::vector<uint8_t> bytes(span + WIDTH);
    Ints wrong = {};
    uint8_t* to = w.weights + panel * panel_bytes(w, PANEL);
    std::memset(to, 0, panel_bytes(w, channels));
    for (int64_t begin = 0; begin < w.k; begin += span) {
        const int64_t count = std::max<int64_t>(0, std::min(span, w.inputs - begin)), g = begin / w.group;
        uint8_t* head = begin % w.block ? nullptr : to;
        uint8_t* steps = to + (head ? channels * head_bytes(w) : 0);
        uint8_t* cells = steps + span / w.group * step_bytes(w) * channels;
        for (int64_t c = 0; c < real; c++) {
            const int64_t channel = panel * PANEL + c, at = channel * (w.k / w.block) + begin / w.block;
            visit(weights + channel * w.inputs + begin, count, [&](Floats v, int64_t i) {
                wrong |= ~((v <= HUGEST) & (v >= -HUGEST));
                std::memcpy(&x[i], &v, sizeof v);
            });
            const float scale = given.scales ? given.scales[at] : scale_of(w, x.data(), count);
            const float inverse = given.scales ? 1.0f : scale == 0.0f ? 0.0f : 1.0f / scale;
            if (head) keep_float(w, head + c * 2, scale);
            if (head && w.offsets) keep_float(w, head + (channels + c) * 2, given.offsets[at]);
            for (int64_t i = 0; i < span / w.group; i++)
                keep_steps(w, given, channel * groups + g + i, steps + i * step_bytes(w) * channels + c, channels);
            for (int64_t i = 0; i < count; i += WIDTH) {
                const Floats v = nearest(at_least(load<Floats>(&x[i]) * inverse, splat(low)), high);
                store_bytes(&bytes[i], __builtin_convertvector(v, Ints) + offset);
            }
            std::fill(bytes.begin() + count, bytes.end(), uint8_t(offset));
            keep_numbers(w, bytes.data(), span, cells, channels, c);
        }
        to = cells + channels * span * w.bits / 8;
    }
    int32_t any = 0;
    for (int i = 0; i < WIDTH; i++) any |= wrong[i];
    return given.scales || !any;
}

template <class T> bool pack(const Matrix& w, const T* weights, const Given& given) {
    const int64_t panels = panels_of(w.n);
    Shares shares(panels, thread_count());  // as in products: a panel's memory is on the node of the thread that reads it
    bool right = true;
#pragma omp parallel reduction(&& : right)
    for (int64_t panel; (panel = shares.next(thread_number())) >= 0;) right = pack_panel(w, weights, given, panel) && right;
    return right;
}

}  // namespace

extern "C" {

// Quantize weights [n, inputs] into `matrix->weights`; `type` is 0 for float32, 1 for bfloat16. `scales` [n, blocks],
// which the matrix's type of floats can hold, are those of weights that were quantized before and are numbers now; else
// null. So are `offsets` where the matrix has them, and `steps` and `offset_steps` [n, groups] where it has these. Returns 0
// where weights that were not quantized before are NaN, or larger than any that a model can compute with.
int ferrule_pack(const Matrix* matrix, const void* weights, int32_t type, const float* scales, const float* offsets,
                  const int8_t* steps, const int8_t* offset_steps) {
    const Given given = {scales, offsets, steps, offset_steps};
    return type ? pack(*matrix, (const uint16_t*)weights, given) : pack(*matrix, (const float*)weights, given);
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
