// The best token of each row of logits, a drawn one, without sorting the vocabulary, and bans of tokens.
//
// Drawing is by inversion: weights exp((x - max) / temperature), a floor below which none counts, running sums in
// vocabulary order, and the place of one uniform number in them. A row is computed by one thread from its own numbers.
#include "recording.h"
#include "vectors.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int DIGIT = 10;               // bits that one pass of a search looks at; three passes see all of a float in [0, 2)
constexpr int BUCKETS = 1 << DIGIT;
constexpr int64_t BLOCK = 16 * WIDTH;   // weights that are summed up together
typedef double Doubles __attribute__((vector_size(8 * WIDTH)));

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// The first `count` elements, and -infinity.
inline Floats head(const float* from, int64_t count) {
    if (count >= WIDTH) return load<Floats>(from);
    Floats v = splat(-INFINITY);
    std::memcpy(&v, from, count * sizeof *from);
    return v;
}

inline bool any(Ints v) {
    int found = 0;
    for (int i = 0; i < WIDTH; i++) found |= v[i];
    return found;
}

// The largest number of a row, or NaN where there is one.
float maximum(const float* x, int64_t n) {
    Floats most = splat(-INFINITY);
    Ints odd = {};
    for (int64_t i = 0; i < n; i += WIDTH) {
        const Floats v = head(x + i, n - i);
        most = v > most ? v : most;
        odd |= v != v;
    }
    return any(odd) ? NAN : largest(most);
}

int64_t first_of(const float* x, int64_t n, float wanted) {
    int64_t i = 0;
    while (i + WIDTH <= n && !any(load<Floats>(x + i) == wanted)) i += WIDTH;
    while (i < n && x[i] != wanted) i++;
    return i < n ? i : 0;
}

// Weights in the place of logits; -infinity becomes zero, the maximum one.
void weigh(float* x, int64_t n, float most, float temperature) {
    for (int64_t i = 0; i < n; i += WIDTH) {
        const Floats e = exponential((head(x + i, n - i) - most) / temperature);
        std::memcpy(x + i, &e, std::min<int64_t>(WIDTH, n - i) * sizeof *x);
    }
}

double mass(const float* weights, int64_t n, float floor) {
    Doubles sum = {};
    for (int64_t i = 0; i < n; i += WIDTH) {
        Floats v = head(weights + i, n - i);
        v = v >= floor ? v : Floats{};
        sum += __builtin_convertvector(v, Doubles);
    }
    double all = 0;
    for (int i = 0; i < WIDTH; i++) all += sum[i];
    return all;
}

struct Tally {
    int64_t count = 0;
    double mass = 0;
};

// The largest weight w such that those of at least w are `count` many, or weigh `share`: whichever needs fewer. What a
// pass has found out of w's bits narrows the next one down.
float last_kept(const std::vector<float>& weights, int64_t count, double share) {
    Tally above;
    uint32_t known = 0;
    for (int shift = 2 * DIGIT; shift >= 0; shift -= DIGIT) {
        std::vector<Tally> buckets(BUCKETS);
        for (float w : weights)
            if (bits_of(w) >> (shift + DIGIT) == known) {
                Tally& bucket = buckets[bits_of(w) >> shift & (BUCKETS - 1)];
                bucket.count++;
                bucket.mass += w;
            }
        int chosen = -1;
        for (int i = BUCKETS - 1; i >= 0; i--) {
            if (!buckets[i].count) continue;
            chosen = i;
            if (above.count + buckets[i].count >= count || above.mass + buckets[i].mass >= share) break;
            above.count += buckets[i].count;
            above.mass += buckets[i].mass;
        }
        if (chosen < 0) return 0.0f;
        known = known << DIGIT | uint32_t(chosen);
    }
    float found;
    std::memcpy(&found, &known, 4);
    return found;
}

// As `last_kept`, for a whole row: small weights are looked at only when the large ones do not decide.
float search(const float* weights, int64_t n, float floor, int64_t count, double share) {
    std::vector<float> candidates;
    for (float least : {1e-3f, 1e-5f, 0.0f}) {
        least = std::max(least, floor);
        candidates.clear();
        double sum = 0;
        for (int64_t i = 0; i < n; i += WIDTH) {
            const Floats v = head(weights + i, n - i);
            if (!any(v >= least)) continue;
            for (int j = 0; j < WIDTH; j++)
                if (v[j] >= least && v[j] > 0.0f) {
                    candidates.push_back(v[j]);
                    sum += v[j];
                }
        }
        if (int64_t(candidates.size()) >= count || sum >= share || least <= floor) break;
    }
    return candidates.empty() ? floor : std::max(floor, last_kept(candidates, count, share));
}

// The first token at which the running sum of weights that reach the floor passes noise * total.
int64_t invert(const float* weights, int64_t n, float floor, double noise) {
    std::vector<double> sums;
    double total = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        sums.push_back(mass(weights + i, std::min(BLOCK, n - i), floor));
        total += sums.back();
    }
    const double target = std::min(noise * total, std::nextafter(total, 0.0));
    double sum = 0;
    int64_t token = 0;  // the last one seen with a weight: what rounding within a block may leave
    for (size_t block = 0; block < sums.size(); block++) {
        if (sum + sums[block] <= target) {
            sum += sums[block];
            continue;
        }
        double inside = sum;
        for (int64_t i = block * BLOCK; i < std::min<int64_t>(n, (block + 1) * BLOCK); i++) {
            if (weights[i] < floor || weights[i] == 0.0f) continue;
            token = i;
            inside += weights[i];
            if (inside > target) break;
        }
        break;
    }
    return token;
}

}  // namespace

extern "C" {

// As `Sampling.draw` in sampling.py. All are doubles, which hold rows and counts exactly.
struct Draw {
    double row, top_k, noise, top_p, temperature, min_p;  // top_k 0: all
};

// tokens[r] is the first of the largest; most[r] is its logit, or NaN for a row that holds one. A row is finite where that is;
// one that is not becomes zeros.
void ferrule_best(float* logits, int64_t rows, int64_t vocab, int64_t* tokens, float* most, bool* finite) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        float* x = logits + row * vocab;
        most[row] = maximum(x, vocab);
        tokens[row] = first_of(x, vocab, most[row]);
        finite[row] = std::isfinite(most[row]);
        if (!finite[row]) std::fill_n(x, vocab, 0.0f);
    }
}

// found[r] is the first of the largest, and the logarithm of its share: 1 in the sum of exp(x - most).
void ferrule_surest(const float* logits, int64_t rows, int64_t vocab, float* found) {
    recorded([=] {
#pragma omp parallel for schedule(static) if (rows > 1)
        for (int64_t row = 0; row < rows; row++) {
            const float* x = logits + row * vocab;
            const float most = maximum(x, vocab);
            Doubles sum = {};
            for (int64_t i = 0; i < vocab; i += WIDTH)
                sum += __builtin_convertvector(exponential(head(x + i, vocab - i) - most), Doubles);
            double all = 0;
            for (int i = 0; i < WIDTH; i++) all += sum[i];
            found[2 * row] = float(first_of(x, vocab, most));
            found[2 * row + 1] = float(-std::log(all));
        }
    });
}

// One token for each of `draws`, whose rows of logits are overwritten. Each has a finite maximum.
void ferrule_draw(const Draw* draws, int64_t count, float* logits, int64_t vocab, int64_t* tokens) {
#pragma omp parallel for schedule(dynamic, 1) if (count > 1)
    for (int64_t i = 0; i < count; i++) {
        const Draw& d = draws[i];
        float* x = logits + int64_t(d.row) * vocab;
        weigh(x, vocab, maximum(x, vocab), float(d.temperature));
        float floor = float(d.min_p);
        if (d.top_k > 0 && d.top_k < vocab) floor = search(x, vocab, floor, int64_t(d.top_k), INFINITY);
        if (d.top_p < 1.0) floor = search(x, vocab, floor, INT64_MAX, d.top_p * mass(x, vocab, floor));
        tokens[i] = invert(x, vocab, floor, d.noise);
    }
}

// Bans the tokens of rows[i] whose bit in words[i] [width] is 0; those beyond the words, too.
void ferrule_mask(float* logits, int64_t vocab, const int64_t* rows, int64_t count, const uint32_t* words,
                  int64_t width) {
#pragma omp parallel for schedule(static) if (count > 1)
    for (int64_t i = 0; i < count; i++) {
        float* x = logits + rows[i] * vocab;
        for (int64_t at = 0; at < vocab; at += 32) {
            const uint32_t allowed = at / 32 < width ? words[i * width + at / 32] : 0;
            if (allowed == UINT32_MAX) continue;
            const int64_t n = std::min<int64_t>(32, vocab - at);
            for (int64_t j = 0; j < n; j++) x[at + j] = allowed >> j & 1 ? x[at + j] : -INFINITY;
        }
    }
}
}
