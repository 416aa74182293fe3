// Mamba 2's selective state space (Dao and Gu 2024). For each head, a token with input h, vectors B and C and step width
// w = clamp(softplus(width + bias)) changes the state S [dim, states] and reads it:
//
//     S <- exp(w * rate) S + (w h) ⊗ B;    y = S C + skip * h
//
// Prefill and decoding are one loop: some rows of S stay in registers while a part of the tokens goes by, which takes as
// few operations as the form of matrix products (three of a vector for each vector of S and token), and has the same
// bits however tokens are cut into steps. Arithmetic is float32.
#include "recording.h"
#include "rows.h"
#include "states.h"

#include <algorithm>
#include <vector>

extern "C" {

// As `_Selective` in states.py. Heads of one group share B and C.
struct Selective {
    const float *rate, *skip, *bias;  // [heads]; rates are negative
    int64_t heads, dim, states, groups;
    float least, most;  // step width
};
}

namespace {

constexpr int64_t PART = 16;                   // tokens whose B and C are in the nearest cache, as floats
constexpr int ROWS = 2;                        // of a state that are computed together
constexpr int MOST = WIDTH == 16 ? 8 : 4;      // vectors of each that stay in registers

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <class T> struct Scan {
    using Element = typename T::Element;
    const Selective& s;
    const StateBatch& batch;
    const Element* mixed;  // [tokens, h and B and C]
    const Element* width;  // tokens lie `stride` elements apart
    int64_t stride;
    float* out;            // [tokens, heads, dim]

    int64_t inner() const { return s.heads * s.dim; }
    int64_t row_size() const { return inner() + 2 * s.groups * s.states; }

    // What a thread needs for a part of the tokens of one head.
    struct Space {
        std::vector<float> b, c;  // [PART, states]
        float decay[PART], step[PART];
        Floats sums[ROWS][PART];
        explicit Space(int64_t states) : b(PART * states), c(PART * states) {}
    };

    void prepare(Space& w, int64_t head, int64_t first, int64_t count) const {
        const int64_t group = head / (s.heads / s.groups);
        for (int64_t t = 0; t < count; t++) {
            const Element *at = mixed + (first + t) * row_size() + inner() + group * s.states, *c = at + s.groups * s.states;
            for (int64_t i = 0; i < s.states; i += WIDTH) {
                F32::store(w.b.data() + t * s.states + i, T::load(at + i));
                F32::store(w.c.data() + t * s.states + i, T::load(c + i));
            }
            const float x = read<T>(width + (first + t) * stride + head, 1)[0] + s.bias[head];
            w.step[t] = std::min(std::max(softplus(x), s.least), s.most);
            w.decay[t] = std::exp(w.step[t] * s.rate[head]);
        }
    }

    // COUNT vectors of two rows of the state, over the part's tokens; what they add to y is added to `sums`.
    template <int COUNT> void pass(Space& w, float* state, int64_t column, const Element* h, int64_t count) const {
        Floats kept[ROWS][COUNT];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < COUNT; v++) kept[r][v] = load<Floats>(state + r * s.states + column + v * WIDTH);
        for (int64_t t = 0; t < count; t++) {
            const float *b = w.b.data() + t * s.states + column, *c = w.c.data() + t * s.states + column;
            const Floats inputs = read<T>(h + t * row_size(), ROWS) * w.step[t];
            for (int r = 0; r < ROWS; r++) {
                Floats sum = column ? w.sums[r][t] : Floats{};
                for (int v = 0; v < COUNT; v++) {
                    const Floats added = inputs[r] * load<Floats>(b + v * WIDTH);
                    kept[r][v] = kept[r][v] * w.decay[t] + added;
                    sum += kept[r][v] * load<Floats>(c + v * WIDTH);
                }
                w.sums[r][t] = sum;
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < COUNT; v++) F32::store(state + r * s.states + column + v * WIDTH, kept[r][v]);
    }

    void run_part(Space& w, float* state, int64_t head, int64_t first, int64_t count) const {
        prepare(w, head, first, count);
        for (int64_t row = 0; row < s.dim; row += ROWS, state += ROWS * s.states) {
            const Element* h = mixed + first * row_size() + head * s.dim + row;
            for (int64_t at = 0; at < s.states;) {
                const int64_t left = (s.states - at) / WIDTH;
                if (left >= MOST) pass<MOST>(w, state, at, h, count), at += MOST * WIDTH;
                else if (left >= 4) pass<4>(w, state, at, h, count), at += 4 * WIDTH;
                else pass<1>(w, state, at, h, count), at += WIDTH;
            }
            for (int64_t t = 0; t < count; t++) {
                float* to = out + (first + t) * inner() + head * s.dim + row;
                const Floats x = read<T>(h + t * row_size(), ROWS);
                for (int r = 0; r < ROWS; r++) to[r] = total(w.sums[r][t]) + s.skip[head] * x[r];
            }
        }
    }

    void run() const {
#pragma omp parallel
        {
            Space space(s.states);
#pragma omp for collapse(2) schedule(dynamic)
            for (int64_t row = 0; row < batch.rows; row++)
                for (int64_t head = 0; head < s.heads; head++) {
                    float* state = (float*)batch.data + batch.slots[row] * batch.stride + head * s.dim * s.states;
                    const int64_t until = batch.start[row + 1];
                    for (int64_t first = batch.start[row]; first < until; first += PART)
                        run_part(space, state, head, first, std::min(PART, until - first));
                }
        }
    }
};

}  // namespace

extern "C" {

// y [tokens, heads, dim] float32 from `mixed` [tokens, heads * dim + 2 * groups * states], h before B before C, and
// `width` [tokens, heads], whose tokens lie `stride` elements apart. `states` is a multiple of 16, `dim` of 2.
void ferrule_selective_f32(const Selective* s, const StateBatch* b, const void* mixed, const void* width, int64_t stride, float* y) {
    recorded([=, batch = *b] {
        Scan<F32>{*s, batch, (const float*)mixed, (const float*)width, stride, y}.run();
    });
}

void ferrule_selective_bf16(const Selective* s, const StateBatch* b, const void* mixed, const void* width, int64_t stride, float* y) {
    recorded([=, batch = *b] {
        Scan<BF16>{*s, batch, (const uint16_t*)mixed, (const uint16_t*)width, stride, y}.run();
    });
}
}
