// Weights quantized into the order in which `matmul.cpp` reads them; it says what that is.
#include <vector>
#include "matmul.h"

namespace {

constexpr int TRIES = 12;
constexpr float NEAREST = 12582912.0f;  // 1.5 * 2^23: added and taken off, it rounds to nearest, ties to even

inline float rounded(float x) {  // to bfloat16, to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
    std::memcpy(&x, &bits, 4);
    return x;
}

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
    if (most == 0.0f) return 0.0f;
    if (w.bits == 8) return rounded(std::fabs(most) / 127.0f);
    const float half = float(1 << (w.bits - 1));
    float best = 0.0f, least = INFINITY;
    for (int i = 0; i < TRIES; i++) {
        const float scale = rounded(most * 5.0f / float(i - 42) * (8.0f / half)), inverse = 1.0f / scale;
        Floats losses = {};
        for (int64_t j = 0; j < count; j += WIDTH) {
            const Floats number = load<Floats>(x + j);
            Floats v = number * inverse;
            v = v < -half ? splat(-half) : v > half - 1 ? splat(half - 1) : v;
            v = v + NEAREST - NEAREST;
            losses += (number - v * scale) * (number - v * scale);
        }
        const float loss = total(losses);
        if (loss < least) least = loss, best = scale;
    }
    return best;
}

// Where in a group of a panel of so many channels a weight of 8 bits is, in the order for tile registers or the other.
inline int64_t place(int64_t channels, int64_t channel, int64_t input, bool tiles) {
    if (!tiles) return input / 4 * channels * 4 + channel * 4 + input % 4;
    const int64_t square = input / TILE_INPUTS * channels + channel / LANES * LANES;
    return square * TILE_INPUTS + input % TILE_INPUTS / 4 * LANES * 4 + channel % LANES * 4 + input % 4;
}

inline void keep(uint8_t* to, float x) {  // the upper half, which is all there is of it
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const auto kept = uint16_t(bits >> 16);
    std::memcpy(to, &kept, 2);
}

// A group's numbers of one channel, as `Planes` says.
template <int BITS>
void keep_planes(const std::vector<uint8_t>& numbers, uint8_t* cells, int64_t channels, int64_t channel) {
    typedef Planes<BITS> P;
    for (size_t i = 0; i + P::UNIT <= numbers.size(); i += P::UNIT) {
        uint32_t words[P::WORDS] = {};
        for (int field = 0; field < P::FIELDS; field++) {
            const auto four = load<uint32_t>(&numbers[i + field * 4]);
            words[field * P::LOW / 8] |= (four & P::LOW_MASK) << (field * P::LOW % 8);
            if (P::HIGH) words[P::LOW_WORDS] |= (four >> P::LOW & P::HIGH_MASK) << (field * P::HIGH);
        }
        for (int word = 0; word < P::WORDS; word++, cells += channels * 4) std::memcpy(cells + channel * 4, &words[word], 4);
    }
}

// Channels past the last have scales of zero. With `given` scales [n, groups] the weights are the numbers themselves;
// `offsets` are as these where the matrix has them.
template <class T>
void pack_panel(const Matrix& w, const T* weights, const float* given, const float* offsets, int64_t panel) {
    const int64_t channels = channels_of(w.n, panel), real = std::min<int64_t>(PANEL, w.n - panel * PANEL);
    const int offset = w.coded ? 0 : middle(w);
    const float low = w.bits == 8 ? -127 : -offset, high = (1 << w.bits) - 1 - offset;
    std::vector<float> x(w.group + WIDTH);
    std::vector<uint8_t> bytes(w.group, uint8_t(offset));
    uint8_t* to = w.weights + panel * panel_bytes(w, PANEL);
    std::memset(to, 0, panel_bytes(w, channels));
    for (int64_t g = 0; g < w.k / w.group; g++) {
        const int64_t begin = g * w.group, count = std::min(w.group, w.inputs - begin);
        for (int64_t c = 0; c < real; c++) {
            const T* from = weights + (panel * PANEL + c) * w.inputs + begin;
            visit(from, count, [&](Floats v, int64_t i) { std::memcpy(&x[i], &v, sizeof v); });
            const int64_t at = (panel * PANEL + c) * (w.k / w.group) + g;
            const float scale = given ? given[at] : scale_of(w, x.data(), count);
            const float inverse = given ? 1.0f : scale == 0.0f ? 0.0f : 1.0f / scale;
            keep(to + c * 2, scale);
            if (w.offsets) keep(to + (channels + c) * 2, offsets[at]);
            for (int64_t i = 0; i < count; i++)
                bytes[i] = uint8_t(int(std::min(std::max(std::nearbyint(x[i] * inverse), low), high)) + offset);
            std::fill(bytes.begin() + count, bytes.end(), uint8_t(offset));
            uint8_t* cells = to + channels * head_bytes(w);
            for (int64_t i = 0; w.bits == 8 && i < w.group; i += 4)
                std::memcpy(cells + place(channels, c, i, tiled(w)), &bytes[i], 4);
            switch (w.bits) {
                case 6: keep_planes<6>(bytes, cells, channels, c); break;
                case 5: keep_planes<5>(bytes, cells, channels, c); break;
                case 4: keep_planes<4>(bytes, cells, channels, c); break;
                case 3: keep_planes<3>(bytes, cells, channels, c); break;
                case 2: keep_planes<2>(bytes, cells, channels, c); break;
            }
        }
        to += channels * cell_bytes(w);
    }
}

template <class T> void pack(const Matrix& w, const T* weights, const float* given, const float* offsets) {
    const int64_t panels = panels_of(w.n);
    huge_pages(w.weights, panel_bytes(w, (w.n + LANES - 1) / LANES * LANES));
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t panel = 0; panel < panels; panel++) pack_panel(w, weights, given, offsets, panel);
}

}  // namespace

extern "C" {

// Quantize weights [n, inputs] into `matrix->weights`; `type` is 0 for float32, 1 for bfloat16. `scales` [n, groups],
// which bfloat16 can hold, are those of weights that were quantized before and are numbers now; else null. So are
// `offsets` [n, groups] where the matrix has them.
void ferrule_pack(const Matrix* matrix, const void* weights, int32_t type, const float* scales, const float* offsets) {
    type ? pack(*matrix, (const uint16_t*)weights, scales, offsets)
         : pack(*matrix, (const float*)weights, scales, offsets);
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
