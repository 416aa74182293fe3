// Gated delta net (Yang, Kautz and Hatamizadeh 2024). For each head, a token with query q, key k, value v, decay
// a = exp(softplus(width + bias) * rate) and strength b = sigmoid(strength) changes the state S [keys, values] and reads it:
//
//     S <- a S;    S <- S + k ⊗ b (v - Sᵀk);    y = Sᵀq
//
// What a token needs of S are u = Sᵀk and w = Sᵀq before its decay: the correction is c = b (v - a u), and its result
// a w + (k·q) c. So S goes through the registers once for each token: while S <- a S + k ⊗ c is computed for one, u and w
// are summed up for the next. Prefill and decoding are one loop, with the same bits however tokens are cut into steps.
// Columns of S do not meet each other: some vectors of them are computed at a time. Arithmetic is float32.
#include "recording.h"
#include "rows.h"
#include "states.h"

#include <algorithm>
#include <vector>

extern "C" {

// As `_Delta` in states.py. Each key head serves heads / key_heads value heads.
struct Delta {
    const float *rate, *bias;  // [heads]; rates are negative
    int64_t key_heads, heads, keys, values;
    float eps;                 // of the lengths of queries and keys, which become 1
};
}

namespace {

constexpr int64_t PART = 16;  // tokens whose queries and keys are in the nearest cache, as floats

template <class T> struct Scan {
    using Element = typename T::Element;
    const Delta& d;
    const StateBatch& batch;
    const Element *mixed, *strength, *width;  // tokens of the last two lie `stride` elements apart
    int64_t stride;
    float* out;                               // [tokens, heads, values]

    int64_t row_size() const { return 2 * d.key_heads * d.keys + d.heads * d.values; }

    // What a thread needs for a part of the tokens of one head.
    struct Space {
        std::vector<float> q, k;  // [PART, keys], of length keys**-0.5 and 1
        float decay[PART], strength[PART], meeting[PART];  // the last is k·q
        explicit Space(int64_t keys) : q(PART * keys), k(PART * keys) {}
    };

    void unit(const Element* from, float* to, float scale) const {
        Floats squares = {};
        for (int64_t i = 0; i < d.keys; i += WIDTH) {
            const Floats x = T::load(from + i);
            squares += x * x;
        }
        scale /= std::sqrt(total(squares) + d.eps);
        for (int64_t i = 0; i < d.keys; i += WIDTH) F32::store(to + i, T::load(from + i) * scale);
    }

    void prepare(Space& w, int64_t head, int64_t first, int64_t count) const {
        const int64_t key_head = head / (d.heads / d.key_heads);
        for (int64_t t = 0; t < count; t++) {
            const Element* at = mixed + (first + t) * row_size() + key_head * d.keys;
            float *q = w.q.data() + t * d.keys, *k = w.k.data() + t * d.keys;
            unit(at, q, 1.0f / std::sqrt(float(d.keys)));
            unit(at + d.key_heads * d.keys, k, 1.0f);
            Floats sum = {};
            for (int64_t i = 0; i < d.keys; i += WIDTH) sum += load<Floats>(q + i) * load<Floats>(k + i);
            w.meeting[t] = total(sum);
            const float x = read<T>(width + (first + t) * stride + head, 1)[0] + d.bias[head];
            const float soft = x > 20.0f ? x : std::log1p(std::exp(x));
            w.decay[t] = std::exp(soft * d.rate[head]);
            w.strength[t] = 1.0f / (1.0f + std::exp(-read<T>(strength + (first + t) * stride + head, 1)[0]));
        }
    }

    template <int COUNT> struct Sums {
        Floats u[COUNT], w[COUNT];
    };

    // For COUNT vectors of columns: change the state by a token's key and correction, and sum up what the next one needs.
    template <int COUNT, bool CHANGE, bool READ>
    void pass(float* state, float decay, const float* k, const Floats* correction, const float* next_k,
              const float* next_q, Sums<COUNT>& sums) const {
        for (int v = 0; v < COUNT; v++) sums.u[v] = sums.w[v] = Floats{};
        for (int64_t i = 0; i < d.keys; i++)
            for (int v = 0; v < COUNT; v++) {
                float* at = state + i * d.values + v * WIDTH;
                Floats cell = load<Floats>(at);
                if (CHANGE) {
                    const Floats added = k[i] * correction[v];
                    cell = cell * decay + added;
                    F32::store(at, cell);
                }
                if (READ) sums.u[v] += cell * next_k[i], sums.w[v] += cell * next_q[i];
            }
    }

    template <int COUNT>
    void run_columns(const Space& w, float* state, int64_t head, int64_t column, int64_t first, int64_t count) const {
        const float *q = w.q.data(), *k = w.k.data();
        Sums<COUNT> sums;
        Floats correction[COUNT];
        pass<COUNT, false, true>(state + column, 0.0f, nullptr, nullptr, k, q, sums);
        for (int64_t t = 0; t < count; t++, q += d.keys, k += d.keys) {
            const Element* value = mixed + (first + t) * row_size() + 2 * d.key_heads * d.keys + head * d.values + column;
            float* y = out + ((first + t) * d.heads + head) * d.values + column;
            for (int v = 0; v < COUNT; v++) {
                correction[v] = (T::load(value + v * WIDTH) - w.decay[t] * sums.u[v]) * w.strength[t];
                F32::store(y + v * WIDTH, w.decay[t] * sums.w[v] + w.meeting[t] * correction[v]);
            }
            if (t + 1 < count)
                pass<COUNT, true, true>(state + column, w.decay[t], k, correction, k + d.keys, q + d.keys, sums);
            else pass<COUNT, true, false>(state + column, w.decay[t], k, correction, nullptr, nullptr, sums);
        }
    }

    void run_part(Space& w, float* state, int64_t head, int64_t first, int64_t count) const {
        prepare(w, head, first, count);
        for (int64_t column = 0; column < d.values;) {
            const int64_t left = (d.values - column) / WIDTH;
            if (left >= 4) run_columns<4>(w, state, head, column, first, count), column += 4 * WIDTH;
            else run_columns<1>(w, state, head, column, first, count), column += WIDTH;
        }
    }

    void run() const {
#pragma omp parallel
        {
            Space space(d.keys);
#pragma omp for collapse(2) schedule(dynamic)
            for (int64_t row = 0; row < batch.rows; row++)
                for (int64_t head = 0; head < d.heads; head++) {
                    float* state = (float*)batch.data + batch.slots[row] * batch.stride + head * d.keys * d.values;
                    const int64_t until = batch.start[row + 1];
                    for (int64_t first = batch.start[row]; first < until; first += PART)
                        run_part(space, state, head, first, std::min(PART, until - first));
                }
        }
    }
};

}  // namespace

extern "C" {

// y [tokens, heads, values] float32 from `mixed` [tokens, 2 * key_heads * keys + heads * values], q before k before v, and
// `strength` and `width` [tokens, heads], whose tokens lie `stride` elements apart. Sizes are multiples of 16.
void ferrule_delta_f32(const Delta* d, const StateBatch* b, const void* mixed, const void* strength, const void* width,
                       int64_t stride, float* y) {
    recorded([=, batch = *b] {
        Scan<F32>{*d, batch, (const float*)mixed, (const float*)strength, (const float*)width, stride, y}.run();
    });
}

void ferrule_delta_bf16(const Delta* d, const StateBatch* b, const void* mixed, const void* strength, const void* width,
                        int64_t stride, float* y) {
    recorded([=, batch = *b] {
        Scan<BF16>{*d, batch, (const uint16_t*)mixed, (const uint16_t*)strength, (const uint16_t*)width, stride, y}.run();
    });
}
}
