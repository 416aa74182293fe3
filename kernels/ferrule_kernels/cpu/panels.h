// What packed matrices share: the cut into panels of channels, and how results are kept.
#pragma once
#include <algorithm>
#include <vector>
#include "shares.h"
#include "tiles.h"
#include "vectors.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr int LANES = 16;  // channels that the last panel is rounded up to
constexpr int PANEL = 64;  // channels of a panel
constexpr bool SLICED = WIDTH < 16;  // whether registers are too few for several rows' sums of a whole panel

inline int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }
inline int64_t channels_of(int64_t n, int64_t panel) {
    return std::min<int64_t>(PANEL, (n - panel * PANEL + LANES - 1) / LANES * LANES);
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline void store(uint16_t* to, Floats x) { narrow(to, x); }

// Write `count` of the numbers of a vector, at most WIDTH.
template <class Y> inline void store(Y* to, Floats x, int64_t count) {
    if (count >= WIDTH) return store(to, x);
    Y all[WIDTH];
    store(all, x);
    std::memcpy(to, all, count * sizeof(Y));
}

// Ask for BYTES, with FAR only into the second cache.
template <int64_t BYTES, bool FAR = false> inline void fetch(const char*& at) {
    if (FAR)
        for (int64_t i = 0; i < BYTES; i += 64) ask_far(at + i);
    else
        for (int64_t i = 0; i < BYTES; i += 64) __builtin_prefetch(at + i);
    at += BYTES;
}

// What is read later, asked for now, by a strip of rows in one of `every` of its steps, or `slowly`: a quarter of what a step
// reads, four times as often.
struct Ahead {
    const char* at;
    int64_t every;
    bool far;
    bool slowly = false;
    uint64_t part = ~uint64_t(0) / (slowly ? every / 4 : every) + 1;  // of 2**64

    // Whether the steps between divide it: whether a product that wraps is below one part (Lemire, Kaser, Kurz 2019).
    bool due(int64_t step) const { return uint64_t(step) * part <= part - 1; }
    // Ask, if it is due, in a step that reads so many bytes.
    template <int64_t BYTES, bool FAR> inline __attribute__((always_inline)) void ask(int64_t step, const char*& from) const {
        if (!due(step)) return;
        !FAR && slowly ? fetch<BYTES / 4>(from) : fetch<BYTES, FAR>(from);
    }
    // Where a strip's columns from `column` on begin to ask, of `steps`.
    const char* from(int64_t column, int64_t steps) const { return at + column * 4 * (steps / every); }
    Ahead next(int64_t channels, int64_t steps) const { return {from(channels, steps), every, far, slowly}; }
};

// One strip asks for what it reads SOON bytes later, into the first cache: the processor's own prefetching keeps fewer lines
// on their way, and the fewer, the longer each is computed with. What is behind `end`, the next block, is asked for by a
// strip that takes a block `sliced`, a part of each line after the other, and by several strips, each its part, so that
// memory is read while they compute. A few strips wait for memory, so the first ones ask for all of it. Many strips wait for
// the arithmetic units and the second cache, which is slower the more it has to fetch: so each asks for less, one line in
// every fourth step. In fewer steps, processors mispredict the branch.
constexpr int64_t SOON = 12 << 10, MANY_STRIPS = 16;
inline Ahead ahead_of(int64_t strips, bool sliced, const void* begin, const void* end) {
    if (TILES) return {(const char*)end, strips < 2 ? 1 : strips < 4 ? 2 : 4, false};
    if (strips == 1 && !sliced) return {(const char*)begin + SOON, 1, false};
    if (WIDTH == 16 && strips >= MANY_STRIPS) return {(const char*)end, MANY_STRIPS, false, true};
    return {(const char*)end, std::min<int64_t>(strips, 4), strips < 4};
}

// How many of so many rows meet a panel together: about as many each time, in whole strips. `most` is a number of these.
inline int64_t chunk_of(int64_t rows, int64_t most, int64_t strip) {
    const int64_t chunks = std::max<int64_t>(1, (rows + most - 1) / most), each = (rows + chunks - 1) / chunks;
    return std::max<int64_t>(1, (each + strip - 1) / strip) * strip;
}

// Ask for fewer and larger pages, where the system has them to give.
inline void huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
    const uint64_t huge = 1 << 21, first = ((uint64_t)memory + huge - 1) / huge * huge, end = (uint64_t)memory + bytes;
    if (first + huge <= end) madvise((void*)first, (end - first) / huge * huge, MADV_HUGEPAGE);
#endif
}

// Tasks of several products, numbered one product after the other.
class Starts {
  public:
    template <class Jobs, class Count> Starts(const Jobs& jobs, Count count) : starts_(1, 0) {
        for (const auto& job : jobs) starts_.push_back(starts_.back() + count(job));
    }
    int64_t total() const { return starts_.back(); }
    int64_t first(int64_t owner) const { return starts_[owner]; }
    // The product that a task belongs to.
    int64_t owner(int64_t task) const {
        return std::upper_bound(starts_.begin(), starts_.end(), task) - starts_.begin() - 1;
    }

  private:
    std::vector<int64_t> starts_;
};

// Call `use` with each matrix that has rows, the first of them where rows follow each other, and how many: all, or one at a
// time where they are `shared`, since then there is no second one behind the first.
template <class F> inline void visit_counts(const int64_t* counts, int64_t count, bool shared, F use) {
    for (int64_t i = 0, row = 0; i < count; i++)
        for (const int64_t end = row + counts[i]; row < end; row += shared ? 1 : counts[i]) use(i, row, shared ? 1 : counts[i]);
}

}  // namespace
