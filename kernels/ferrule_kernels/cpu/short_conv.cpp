// A causal convolution over the last few tokens, for each channel alone, and SiLU.
//
//     y[t] = act(bias + sum over j of weight[j] * x[t - (kernel - 1) + j])
//
// The state is the last kernel - 1 inputs, the oldest first: tokens before those of the step are read from there. Each
// sum is float32, in one order, rounded to the rows' type before the activation.
#include "recording.h"
#include "rows.h"
#include "states.h"

#include <algorithm>

extern "C" {

// As `_Conv` in states.py.
struct Conv {
    const float *weight, *bias;  // [kernel, channels]; [channels] or null
    int64_t channels, kernel, silu;
};
}

namespace {

constexpr int64_t MOST = 16; // tokens of a kernel

template <class T> struct ShortConv {
    using Element = typename T::Element;
    const Conv& c;
    const StateBatch& b;
    const Element* x;  // tokens lie `stride` elements apart
    int64_t stride;
    Element* out;

    Element* state(int64_t row) const { return (Element*)b.data + b.slots[row] * b.stride; }

    void compute(int64_t token) const {
        const int64_t row = std::upper_bound(b.start, b.start + b.rows, token) - b.start - 1, back = c.kernel - 1;
        const Element* from[MOST];
        for (int64_t j = 0; j < c.kernel; j++) {
            const int64_t at = token - back + j;  // of the input, and before the row's first token one of the state
            from[j] = at >= b.start[row] ? x + at * stride : state(row) + (at - b.start[row] + back) * c.channels;
        }
        Element* to = out + token * c.channels;
        for (int64_t i = 0; i < c.channels; i += WIDTH) {
            const int64_t count = c.channels - i;
            Floats sum = {};
            for (int64_t j = 0; j < c.kernel; j++)
                sum += read<T>(from[j] + i, count) * read<F32>(c.weight + j * c.channels + i, count);
            if (c.bias) sum += read<F32>(c.bias + i, count);
            sum = T::round(sum);
            write<T>(to + i, c.silu ? gated(sum, sum) : sum, count);
        }
    }

    void keep(int64_t row) const {
        const int64_t tokens = b.start[row + 1] - b.start[row], back = c.kernel - 1;
        for (int64_t j = 0; j < back; j++) {  // what is read of the old state lies behind what was written
            const int64_t at = tokens - back + j;
            const Element* from = at >= 0 ? x + (b.start[row] + at) * stride : state(row) + (tokens + j) * c.channels;
            std::memmove(state(row) + j * c.channels, from, c.channels * sizeof(Element));
        }
    }

    void run() const {
        const int64_t tokens = b.start[b.rows];
#pragma omp parallel for schedule(static) if (tokens * c.channels > (1 << 14))
        for (int64_t token = 0; token < tokens; token++) compute(token);
        for (int64_t row = 0; row < b.rows; row++) keep(row);
    }
};

}  // namespace

extern "C" {

// out [tokens, channels] from x, whose tokens lie `stride` elements apart; states are of the same type.
void ferrule_short_conv_f32(const Conv* c, const StateBatch* b, const void* x, int64_t stride, void* out) {
    recorded([=, batch = *b] {
        ShortConv<F32>{*c, batch, (const float*)x, stride, (float*)out}.run();
    });
}

void ferrule_short_conv_bf16(const Conv* c, const StateBatch* b, const void* x, int64_t stride, void* out) {
    recorded([=, batch = *b] {
        ShortConv<BF16>{*c, batch, (const uint16_t*)x, stride, (uint16_t*)out}.run();
    });
}
}
