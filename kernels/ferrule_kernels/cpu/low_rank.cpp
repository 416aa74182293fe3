// Products of low rank that are added to other products: y += up (down x), each row with the matrices of its group.
//
// Rows are sorted by their group, so that the matrices of a group are read once for all of its rows; rows of groups without
// ranks cost nothing but a look at them. Sums are float32, and go over inputs and ranks in their order, whatever other rows
// there are, so a row has the same bits alone and in any batch.
#include <algorithm>
#include <vector>
#include "recording.h"
#include "shares.h"
#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 64;      // rows of one task
constexpr int64_t RANKS = 8;       // and rows of `down`
constexpr int64_t CHUNK = 512;     // or outputs
constexpr int64_t SMALL = 1 << 15; // multiplications that one thread does sooner than two
constexpr int64_t AHEAD = 256;     // bytes of a row of `up` for which memory is asked in advance

}  // namespace

extern "C" {

// As `_Weights` in low_rank.py.
struct LowRank {
    const void *down;       // [groups][projections][max_rank][inputs], of a table [groups][inputs][max_rank]
    const void *up;         // [groups][max_rank][outputs]
    const int32_t* ranks;   // [groups][projections]
    const uint8_t* changed; // [groups]
    const float *scales, *offsets;  // [groups][outputs]
    const float* rank_scales; // [groups][projections][max_rank] of products with `down`
    const int64_t* ends;    // [projections] where the outputs of each end
    int64_t groups, projections, max_rank, inputs, outputs;
    int32_t type, table;  // of weights: 0 float, 1 bfloat16, 2 integers of 8 bits
};

}

namespace {

struct Row {
    int64_t group, row;
};

// Rows of one group among those that are sorted.
struct Segment {
    int64_t group, first, count;
};

struct Task {
    int64_t segment, first, count, projection, begin, end;  // rows of the segment; ranks or outputs
};

inline Floats read(const float* from) { return load<Floats>(from); }
inline Floats read(const uint16_t* from) { return widen(from); }
inline Floats read(const int8_t* from) { return __builtin_convertvector(widen_bytes(from), Floats); }
inline float one(const float* from) { return *from; }
inline float one(const int8_t* from) { return *from; }
inline float one(const uint16_t* from) {
    const uint32_t bits = uint32_t(*from) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline void write(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline void write(uint16_t* to, Floats x) { narrow(to, x); }
inline void write_one(float* to, float x) { *to = x; }
inline void write_one(uint16_t* to, float x) {
    uint16_t all[WIDTH];
    narrow(all, splat(x));
    *to = all[0];
}

// Products of R rows and K rows of a matrix, times their scales, `inner` [R][stride].
template <int R, int K, class X, class W>
inline void dots(const X* const* x, const W* w, const float* scales, int64_t inputs, float* inner, int64_t stride) {
    int64_t i = 0;
    float sums[R][K];
#if defined(__AVX512BF16__)
    if constexpr (sizeof(X) == 2 && sizeof(W) == 2) {
        __m512 sum[R][K];
        EACH(r, R) EACH(k, K) sum[r][k] = _mm512_setzero_ps();
        for (; i + 32 <= inputs; i += 32) {
            __m512bh numbers[R];
            EACH(r, R) numbers[r] = (__m512bh)_mm512_loadu_si512(x[r] + i);
            EACH(k, K) {
                const __m512bh weights = (__m512bh)_mm512_loadu_si512(w + k * inputs + i);
                EACH(r, R) sum[r][k] = _mm512_dpbf16_ps(sum[r][k], numbers[r], weights);
            }
        }
        EACH(r, R) EACH(k, K) sums[r][k] = total((Floats)sum[r][k]);
    } else
#endif
    {
        Floats sum[R][K] = {};
        for (; i + WIDTH <= inputs; i += WIDTH) {
            Floats numbers[R];
            EACH(r, R) numbers[r] = read(x[r] + i);
            EACH(k, K) {
                const Floats weights = read(w + k * inputs + i);
                EACH(r, R) sum[r][k] += numbers[r] * weights;
            }
        }
        EACH(r, R) EACH(k, K) sums[r][k] = total(sum[r][k]);
    }
    for (; i < inputs; i++)
        EACH(r, R) EACH(k, K) sums[r][k] += one(x[r] + i) * one(w + k * inputs + i);
    EACH(r, R) EACH(k, K) inner[r * stride + k] = sums[r][k] * scales[k];
}

template <int R, class X, class W>
void dots_of_rows(const X* const* x, const W* w, const float* scales, int64_t inputs, float* inner, int64_t stride,
                  int64_t ranks) {
    int64_t k = 0;
    for (; k + 4 <= ranks; k += 4) dots<R, 4>(x, w + k * inputs, scales + k, inputs, inner + k, stride);
    for (; k < ranks; k++) dots<R, 1>(x, w + k * inputs, scales + k, inputs, inner + k, stride);
}

// Sums of R rows for C vectors of outputs, added to y.
template <int R, int C, class Y, class W>
inline void sums(Y* const* y, const float* inner, int64_t stride, const W* up, int64_t outputs, int64_t ranks,
                 const float* scales, const float* offsets) {
    Floats sum[R][C] = {};
    for (int64_t k = 0; k < ranks; k++) {
        const W* from = up + k * outputs;
        if constexpr (C > 1)  // rows are far apart, and the processor foresees few of them
            for (size_t at = 0; at < C * WIDTH * sizeof(W); at += 64) ask_far((const char*)from + AHEAD + at);
        Floats weights[C];
        EACH(c, C) weights[c] = read(from + c * WIDTH);
        EACH(r, R) {
            const Floats number = splat(inner[r * stride + k]);
            EACH(c, C) sum[r][c] += number * weights[c];
        }
    }
    EACH(r, R) EACH(c, C) {
        Floats before = read(y[r] + c * WIDTH);
        if (scales) before = before * read(scales + c * WIDTH) + read(offsets + c * WIDTH);
        write(y[r] + c * WIDTH, before + sum[r][c]);
    }
}

template <int R, class Y, class W>
void sums_of_rows(Y* const* rows, const float* inner, int64_t stride, const W* up, int64_t outputs, int64_t ranks,
                  const float* scales, const float* offsets, int64_t begin, int64_t end) {
    Y* y[R];
    int64_t o = begin;
    const auto at = [&](const float* from) { return from ? from + o : nullptr; };
    for (; o + 4 * WIDTH <= end; o += 4 * WIDTH) {
        EACH(r, R) y[r] = rows[r] + o;
        sums<R, 4>(y, inner, stride, up + o, outputs, ranks, at(scales), at(offsets));
    }
    for (; o + WIDTH <= end; o += WIDTH) {
        EACH(r, R) y[r] = rows[r] + o;
        sums<R, 1>(y, inner, stride, up + o, outputs, ranks, at(scales), at(offsets));
    }
    for (; o < end; o++)
        for (int r = 0; r < R; r++) {
            float sum = 0.0f, before = one(rows[r] + o);
            for (int64_t k = 0; k < ranks; k++) sum += inner[r * stride + k] * one(up + k * outputs + o);
            if (scales) before = before * scales[o] + offsets[o];
            write_one(rows[r] + o, before + sum);
        }
}

// What one call works on.
struct Work {
    std::vector<Row> rows;
    std::vector<Segment> segments;
    std::vector<Task> down, up;
    std::vector<float> inner;  // [rows][projections][max_rank]
};

// Sort the rows that have an adapter by their group. Returns false where there are none.
bool arrange(const LowRank& w, const int64_t* groups, int64_t rows, Work& work) {
    work.rows.clear();
    int64_t last = -1;
    bool adapted = false, sorted = true;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t group = groups[row];
        if (group < 0 || group >= w.groups) continue;
        if (group != last) {
            adapted = w.changed[group];
            for (int64_t p = 0; p < w.projections; p++) adapted |= w.ranks[group * w.projections + p] > 0;
            last = group;
        }
        if (!adapted) continue;
        sorted = sorted && (work.rows.empty() || work.rows.back().group <= group);
        work.rows.push_back({group, row});
    }
    if (!sorted)
        std::stable_sort(work.rows.begin(), work.rows.end(), [](const Row& a, const Row& b) { return a.group < b.group; });
    work.segments.clear();
    for (int64_t i = 0, count = int64_t(work.rows.size()); i < count; i++) {
        if (work.segments.empty() || work.segments.back().group != work.rows[i].group)
            work.segments.push_back({work.rows[i].group, i, 0});
        work.segments.back().count++;
    }
    return !work.rows.empty();
}

// Cut the work into tasks. Returns how many multiplications there are.
int64_t cut(const LowRank& w, Work& work) {
    int64_t all = 0;
    work.down.clear();
    work.up.clear();
    for (int64_t s = 0; s < int64_t(work.segments.size()); s++) {
        const Segment& segment = work.segments[s];
        const int32_t* ranks = w.ranks + segment.group * w.projections;
        for (int64_t first = 0; first < segment.count; first += BLOCK) {
            const int64_t count = std::min(BLOCK, segment.count - first);
            for (int64_t p = 0; p < w.projections; p++) {
                const int64_t rank = std::min<int64_t>(ranks[p], w.max_rank), start = p ? w.ends[p - 1] : 0;
                const int64_t step = w.table ? std::max<int64_t>(rank, 1) : RANKS;
                for (int64_t k = 0; k < rank; k += step)
                    work.down.push_back({s, first, count, p, k, std::min(k + step, rank)});
                if (rank || w.changed[segment.group])
                    for (int64_t o = start; o < w.ends[p]; o += CHUNK)
                        work.up.push_back({s, first, count, p, o, std::min(o + CHUNK, w.ends[p])});
                all += count * rank * (w.inputs * !w.table + w.ends[p] - start);
            }
        }
    }
    return all;
}

template <class X, class W> void multiply_down(const LowRank& w, Work& work, const Task& task, const X* x) {
    const Segment& segment = work.segments[task.segment];
    const int64_t stride = w.projections * w.max_rank, first = segment.first + task.first;
    float* inner = work.inner.data() + first * stride + task.projection * w.max_rank + task.begin;
    const int64_t matrix = (segment.group * w.projections + task.projection) * w.max_rank;
    const W* down = (const W*)w.down + matrix * w.inputs;
    const auto at = [&](int64_t i) { return x + work.rows[first + i].row * w.inputs; };
    for (int64_t i = 0; i < task.count; i += 4) {
        const X* rows[4];
        const int64_t count = std::min<int64_t>(4, task.count - i);
        for (int64_t r = 0; r < count; r++) rows[r] = at(i + r);
        const auto go = [&](auto n) {
            dots_of_rows<n.value, X, W>(rows, down + task.begin * w.inputs, w.rank_scales + matrix + task.begin, w.inputs,
                                        inner + i * stride, stride, task.end - task.begin);
        };
        if (count == 4) go(std::integral_constant<int, 4>());
        else if (count == 3) go(std::integral_constant<int, 3>());
        else if (count == 2) go(std::integral_constant<int, 2>());
        else go(std::integral_constant<int, 1>());
    }
}

// Rows of a table in the place of products: x are ids.
template <class W> void look_up(const LowRank& w, Work& work, const Task& task, const int64_t* ids) {
    const Segment& segment = work.segments[task.segment];
    for (int64_t i = segment.first + task.first; i < segment.first + task.first + task.count; i++) {
        const int64_t id = ids[work.rows[i].row];
        const W* from = (const W*)w.down + (segment.group * w.inputs + id) * w.max_rank;
        const float* scales = w.rank_scales + segment.group * w.max_rank;
        for (int64_t k = task.begin; k < task.end; k++)
            work.inner[i * w.max_rank + k] = id >= 0 && id < w.inputs ? one(from + k) * scales[k] : 0.0f;
    }
}

template <class Y, class W> void multiply_up(const LowRank& w, Work& work, const Task& task, Y* y) {
    const Segment& segment = work.segments[task.segment];
    const int64_t stride = w.projections * w.max_rank, first = segment.first + task.first;
    const int64_t rank = std::min<int64_t>(w.ranks[segment.group * w.projections + task.projection], w.max_rank);
    const float* inner = work.inner.data() + first * stride + task.projection * w.max_rank;
    const W* up = (const W*)w.up + segment.group * w.max_rank * w.outputs;
    const bool changed = w.changed[segment.group];
    const float* scales = changed ? w.scales + segment.group * w.outputs : nullptr;
    const float* offsets = changed ? w.offsets + segment.group * w.outputs : nullptr;
    for (int64_t i = 0; i < task.count; i += 4) {
        Y* rows[4];
        const int64_t count = std::min<int64_t>(4, task.count - i);
        for (int64_t r = 0; r < count; r++) rows[r] = y + work.rows[first + i + r].row * w.outputs;
        const auto go = [&](auto n) {
            sums_of_rows<n.value, Y, W>(rows, inner + i * stride, stride, up, w.outputs, rank, scales, offsets, task.begin,
                                        task.end);
        };
        if (count == 4) go(std::integral_constant<int, 4>());
        else if (count == 3) go(std::integral_constant<int, 3>());
        else if (count == 2) go(std::integral_constant<int, 2>());
        else go(std::integral_constant<int, 1>());
    }
}

template <class X, class Y, class W>
void add(const LowRank& w, const int64_t* groups, const X* x, const int64_t* ids, Y* y, int64_t rows) {
    static thread_local Work kept;
    Work& work = kept;  // of this thread; those that share the work see it by this reference
    if (!arrange(w, groups, rows, work)) return;
    const int64_t all = cut(w, work);
    const size_t numbers = work.rows.size() * w.projections * w.max_rank;
    if (work.inner.size() < numbers) work.inner.resize(numbers);
    const auto down = [&](int64_t task) {
        if (w.table) look_up<W>(w, work, work.down[task], ids);
        else multiply_down<X, W>(w, work, work.down[task], x);
    };
    const auto up = [&](int64_t task) { multiply_up<Y, W>(w, work, work.up[task], y); };
    const int64_t downs = int64_t(work.down.size()), ups = int64_t(work.up.size());
    const int threads = thread_count();
    if (threads == 1 || all < SMALL) {
        for (int64_t task = 0; task < downs; task++) down(task);
        for (int64_t task = 0; task < ups; task++) up(task);
        return;
    }
    Shares first(downs, threads), second(ups, threads);
#pragma omp parallel
    {
        const int thread = thread_number();
        for (int64_t task; (task = first.next(thread)) >= 0;) down(task);
#pragma omp barrier
        for (int64_t task; (task = second.next(thread)) >= 0;) up(task);
    }
}

template <class X, class Y>
void add(const LowRank& w, const int64_t* groups, const void* x, void* y, int64_t rows) {
    const auto* ids = (const int64_t*)x;
    if (w.type == 2) add<X, Y, int8_t>(w, groups, (const X*)x, ids, (Y*)y, rows);
    else if (w.type == 1) add<X, Y, uint16_t>(w, groups, (const X*)x, ids, (Y*)y, rows);
    else add<X, Y, float>(w, groups, (const X*)x, ids, (Y*)y, rows);
}

}  // namespace

extern "C" {

// Rows of x [rows][inputs], of a table ids [rows], and y [rows][outputs]; `narrow` has bit 1 for x and 2 for y of bfloat16.
void ferrule_low_rank(const LowRank* weights, const int64_t* groups, const void* x, void* y, int64_t rows, int32_t narrow) {
    recorded([=] {
        const LowRank& w = *weights;
        if (narrow == 3) add<uint16_t, uint16_t>(w, groups, x, y, rows);
        else if (narrow == 2) add<float, uint16_t>(w, groups, x, y, rows);
        else if (narrow == 1) add<uint16_t, float>(w, groups, x, y, rows);
        else add<float, float>(w, groups, x, y, rows);
    });
}
}
