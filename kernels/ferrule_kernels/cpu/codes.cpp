// Codes of floats: to which number of a sorted table each is nearest, in parts of the largest of its group.
#include <algorithm>
#include "rows.h"

namespace {

constexpr float LEAST = 1e-30f;    // of what a group is divided by
constexpr int64_t SMALL = 1 << 15; // weights that one thread encodes sooner than two

// The larger magnitude in each lane. NaN is the largest of all.
inline Floats larger(Floats most, Floats x) {
    const Floats size = x < 0.0f ? -x : x;
    return (size > most) | (size != size) ? size : most;
}

inline float largest_of(Floats v) {
    return folded(v, [](float a, float b) { return a > b || a != a ? a : b; });
}

// A code is the number of borders that lie below a weight, so it is 0 for NaN.
template <class T>
float encode_group(const typename T::Element* from, const float* borders, int64_t count, int64_t group, uint8_t* codes) {
    Floats sizes = {};
    for (int64_t i = 0; i < group; i += WIDTH) sizes = larger(sizes, read<T>(from + i, group - i));
    const float most = largest_of(sizes);
    const Floats divisor = splat(most < LEAST ? LEAST : most);
    for (int64_t i = 0; i < group; i += WIDTH) {
        const Floats part = read<T>(from + i, group - i) / divisor;
        Ints counts = {};
        for (int64_t border = 0; border < count; border++) counts -= part > splat(borders[border]);
        store_bytes(codes + i, counts, group - i);
    }
    return most;
}

template <class T>
void encode(
    const typename T::Element* weights, int64_t n, int64_t k, int64_t group, const float* borders, int64_t count,
    uint8_t* codes, float* scales
) {
    const int64_t groups = k / group;
#pragma omp parallel for schedule(static) if (n * k > SMALL)
    for (int64_t row = 0; row < n; row++)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t at = row * k + g * group;
            scales[row * groups + g] = encode_group<T>(weights + at, borders, count, group, codes + at);
        }
}

}  // namespace

extern "C" {

// Weights [n, k], of which `group`, that divides k, share a scale: the largest magnitude, NaN where there is one. Codes
// [n, k] count the `borders` below a weight by its scale.
void ferrule_encode_f32(
    const float* weights, int64_t n, int64_t k, int64_t group, const float* borders, int64_t count, uint8_t* codes,
    float* scales
) {
    encode<F32>(weights, n, k, group, borders, count, codes, scales);
}

void ferrule_encode_bf16(
    const uint16_t* weights, int64_t n, int64_t k, int64_t group, const float* borders, int64_t count, uint8_t* codes,
    float* scales
) {
    encode<BF16>(weights, n, k, group, borders, count, codes, scales);
}
}
