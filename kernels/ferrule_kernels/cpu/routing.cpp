// Mixtures of experts, beside their products: which experts a token has, from its router's scores, the order of the rows
// of these products, and the weighted sum of their results. The definition is `ferrule_kernels.moe`; arithmetic is float32,
// in one order for each token.
#include "recording.h"
#include "rows.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

extern "C" {

// As `_Routing` in routing.py, whose fields have the meaning of those of `ferrule_kernels.moe.Routing`.
struct Routing {
    int64_t experts, top_k, groups, kept_groups, group_depth, sigmoid, renormalise;
    float scale;
};
}

namespace {

constexpr float LOWEST = -std::numeric_limits<float>::max(), TAKEN = -std::numeric_limits<float>::infinity();
constexpr int64_t GRAIN = 1 << 14;  // numbers that are worth a second thread

// What is not a number is the worst, and nothing is infinite: that is how places are told that were taken.
inline float finite(float x) { return x > LOWEST ? std::min(x, -LOWEST) : LOWEST; }

// The place of the first of the largest numbers, of which at least one is not taken; it is taken after that.
inline int64_t take_best(float* x, int64_t count) {
    const int64_t best = std::max_element(x, x + count) - x;
    x[best] = TAKEN;
    return best;
}

struct Router {
    const Routing& r;
    std::vector<float> scores, choice, worth;
    std::vector<char> open;

    explicit Router(const Routing& routing)
        : r(routing), scores(r.experts), choice(r.experts), worth(r.groups), open(r.groups) {}

    void softmax(const float* logits) {
        const float top = *std::max_element(logits, logits + r.experts);
        Floats sum = {};
        for (int64_t i = 0; i < r.experts; i += WIDTH) {
            const int64_t count = std::min<int64_t>(WIDTH, r.experts - i);
            float some[WIDTH];
            std::fill(some, some + WIDTH, TAKEN);
            std::copy(logits + i, logits + i + count, some);
            const Floats x = load<Floats>(some) - top;
            const Floats power = x == x ? exponential(x) : x;
            sum += power;
            write<F32>(scores.data() + i, power, count);
        }
        const float all = total(sum);
        for (float& score : scores) score /= all;
    }

    // Members of groups that are not among the best are taken before the choice begins.
    void close_groups() {
        const int64_t size = r.experts / r.groups;
        for (int64_t g = 0; g < r.groups; g++) {
            const float* members = choice.data() + g * size;
            float best = TAKEN, second = TAKEN;
            for (int64_t i = 0; i < size; i++) {
                second = std::max(second, std::min(best, members[i]));
                best = std::max(best, members[i]);
            }
            worth[g] = std::max(LOWEST, r.group_depth == 2 ? best + second : best);
        }
        std::fill(open.begin(), open.end(), 0);
        for (int64_t i = 0; i < r.kept_groups; i++) open[take_best(worth.data(), r.groups)] = 1;
        for (int64_t g = 0; g < r.groups; g++)
            if (!open[g]) std::fill_n(choice.data() + g * size, size, TAKEN);
    }

    void run(const float* logits, const float* bias, float* weights, int32_t* ids) {
        if (r.sigmoid)
            for (int64_t i = 0; i < r.experts; i++) scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
        else softmax(logits);
        for (int64_t i = 0; i < r.experts; i++) choice[i] = finite(bias ? scores[i] + bias[i] : scores[i]);
        if (r.groups > 1) close_groups();
        float sum = 0.0f;
        for (int64_t i = 0; i < r.top_k; i++) {
            ids[i] = take_best(choice.data(), r.experts);
            sum += weights[i] = scores[ids[i]];
        }
        const float by = r.renormalise ? sum + 1e-20f : 1.0f;
        for (int64_t i = 0; i < r.top_k; i++) weights[i] = weights[i] / by * r.scale;
    }
};

void route_all(const Routing& r, const float* logits, int64_t stride, const float* bias, float* weights, int32_t* ids,
               int64_t tokens) {
#pragma omp parallel if (tokens * r.experts > GRAIN)
    {
        Router router(r);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < tokens; token++)
            router.run(logits + token * stride, bias, weights + token * r.top_k, ids + token * r.top_k);
    }
}

// A counting sort: it keeps the order of the pairs that have one expert. Returns whether all ids are experts. One that is
// not counts as the first: a recording has nobody to tell, and no memory may be written that is not there.
bool arrange_all(const int32_t* ids, int64_t pairs, int64_t top_k, int64_t experts, int64_t* tokens, int64_t* places,
                 int64_t* counts) {
    bool right = true;
    const auto expert = [&](int64_t i) {
        const bool known = 0 <= ids[i] && ids[i] < experts;
        right &= known;
        return known ? ids[i] : 0;
    };
    std::fill_n(counts, experts, 0);
    for (int64_t i = 0; i < pairs; i++) counts[expert(i)]++;
    std::vector<int64_t> next(experts);
    std::exclusive_scan(counts, counts + experts, next.begin(), int64_t(0));
    for (int64_t i = 0; i < pairs; i++) tokens[places[i] = next[expert(i)]++] = i / top_k;
    return right;
}

template <class T>
void combine_all(const void* rows, const int64_t* places, const float* weights, int64_t top_k, int64_t size, void* out,
                 int64_t tokens) {
    using Element = typename T::Element;
#pragma omp parallel for schedule(static) if (tokens * top_k * size > GRAIN)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t i = 0; i < size; i += WIDTH) {
            Floats sum = {};
            for (int64_t j = token * top_k; j < (token + 1) * top_k; j++)
                sum += read<T>((const Element*)rows + (places ? places[j] : j) * size + i, size - i) * weights[j];
            write<T>((Element*)out + token * size + i, sum, size - i);
        }
}

}  // namespace

extern "C" {

// weights and ids [tokens, top_k] from logits [tokens, experts], which lie `stride` apart; bias [experts] or null.
void ferrule_route(const Routing* r, const float* logits, int64_t stride, const float* bias, float* weights, int32_t* ids,
                   int64_t tokens) {
    recorded([=] { route_all(*r, logits, stride, bias, weights, ids, tokens); });
}

// Sort the pairs of a token and one of its experts, ids [pairs], by the expert. tokens [pairs]: of which token each is after
// that; places [pairs]: where each is then; counts [experts]: how many each expert has. Returns 0 for an id that is none.
int ferrule_arrange(const int32_t* ids, int64_t pairs, int64_t top_k, int64_t experts, int64_t* tokens, int64_t* places,
                    int64_t* counts) {
    const auto arrange = [=] { return arrange_all(ids, pairs, top_k, experts, tokens, places, counts); };
    if (recording) recording->push_back(arrange);
    return arrange();
}

// out [tokens, size]: sums of top_k rows each, the ones at places [tokens, top_k], or where that is null the next ones.
void ferrule_combine_f32(const void* rows, const int64_t* places, const float* weights, int64_t top_k, int64_t size,
                         void* out, int64_t tokens) {
    recorded([=] { combine_all<F32>(rows, places, weights, top_k, size, out, tokens); });
}

void ferrule_combine_bf16(const void* rows, const int64_t* places, const float* weights, int64_t top_k, int64_t size,
                          void* out, int64_t tokens) {
    recorded([=] { combine_all<BF16>(rows, places, weights, top_k, size, out, tokens); });
}
}
