// Paged attention on CPUs, for float32 and bfloat16, one kernel for prefill, decode and any mixture.
//
// Everything is counted in cells of 32 bits: one float, or two neighbouring bfloat16. A product of two cells adds one
// or two terms to a float lane, which is what AVX512-BF16 does in one instruction, and AMX for a register of them; all
// other arithmetic is float32. Scores are in units of log 2: their scale contains log2(e).
//
// The cache of one block and kv head is cut into tiles of 16 keys, laid out so that nothing is transposed when read:
//     keys    [dim / PAIR][16] cells      a cell has PAIR neighbouring dims of one key
//     values  [16 / PAIR][dim] cells      a cell has one dim of PAIR neighbouring keys
//
// Where values are the first numbers of keys (latent attention), there are keys alone, and a tile of values is made of
// one of keys before it is used: for all query heads, which share the key head.
//
// A cache of a smaller type than the products' has its numbers in their place: those of 8 bits, and bfloat16 where nothing
// multiplies it. A block of it is widened to cells before it is used.
//
// That is what tile registers read, too: 32 dims of 16 keys, or, where two tiles of values follow each other in memory,
// 16 dims of 32 keys. What does not lie so is copied: values whose tiles are apart, and keys whose number of dims is not
// a multiple of 32, which get rows of zeros.
//
// A query's numbers are summed over blocks of 64 keys (128 with tile registers) that begin at multiples of as many,
// each in one order. Keys that it does not see add nothing, not even a rounding: so its result has the same bits alone,
// in a batch, and however a prompt is cut, as long as its keys lie in one partition.
#include "cells.h"
#include "float8.h"
#include "recording.h"
#include "shares.h"
#include "tiles.h"

#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

namespace {

constexpr int COLUMNS = WIDTH / 4;     // vectors that a row of sums has
constexpr int LANES = 16;              // keys of a tile
constexpr int STRIP = BY_HAND ? 48 : 32;  // queries x heads of a group that are computed together
constexpr int PIECES = 4;              // that the products of a strip are cut into, to run while another is softened
constexpr int NEAR = 4;                // tiles that few rows read at a time: the nearest cache holds the next, too
constexpr int64_t PARTITION = 2048;    // keys of one task where a row has a single query
constexpr float LOWEST = -INFINITY;
constexpr float LOG2_E = 1.44269504088896341f;

}  // namespace

extern "C" {

// As `Batch` in attention.py. Strides are in elements; heads and dims of q, k, v and out are contiguous.
struct Batch {
    const void *q, *k, *v;
    void *out, *cache;
    const int32_t *table, *query_start, *context_lens;
    const int64_t* slots;
    int64_t rows, tokens, heads, kv_heads, dim, block_size, table_stride, cache_stride;
    int64_t q_stride, k_stride, v_stride, window;
    int64_t chunk;        // a query sees keys from the last multiple of it on; 0: from the first
    int64_t value_dim;    // of keys that are values, too; 0: values are apart, and as wide as keys
    int64_t eights;       // what the cache has: 0 the type of q, 1 E4M3, 2 E5M2
    float scale, soft_cap;
    const float* slopes;  // of ALiBi, one per head, or null
    const float* sinks;   // a learned score per head, or null
};
}

namespace {

// One unit of work: some queries of one row, for the heads that share a kv head, and a range of keys.
struct Task {
    int32_t row, kv_head;
    int32_t first, count;        // queries, counted within the row
    int64_t oldest;              // the first key that any of them sees
    int64_t from, until;         // keys; `from` is a multiple of BLOCK
    int32_t partial;             // where the result waits to be combined, or -1
    bool alone;                  // all queries of its row: nobody else reads the keys and values that it writes
};

#define INLINE inline __attribute__((always_inline))  // or sums would be kept in memory, or moved once more

#if BY_HAND
// Sums of six rows and two vectors, which compilers would keep in memory: with both vectors and a row's number these are 15
// of the 16 registers.
struct Six {
    Floats a0, a1, b0, b1, c0, c1, d0, d1, e0, e1, f0, f1;

    // What `sums` says of each, by its row and vector.
    template <class Sums> INLINE explicit Six(Sums sums)
        : a0(sums(0, 0)), a1(sums(0, 1)), b0(sums(1, 0)), b1(sums(1, 1)), c0(sums(2, 0)), c1(sums(2, 1)), d0(sums(3, 0)),
          d1(sums(3, 1)), e0(sums(4, 0)), e1(sums(4, 1)), f0(sums(5, 0)), f1(sums(5, 1)) {}

    // Two numbers of each row, `stride` bytes from one row to the next, times two vectors each, `step` bytes apart.
    INLINE void add(const uint32_t* x, int64_t stride, const uint32_t* from, int64_t step) {
        const char* y = (const char*)x + 3 * stride;
        asm("vmovups (%[from]), %%ymm12\n"
            "vmovups 32(%[from]), %%ymm13\n" ADD_SIX_ROWS("0")
            "vmovups (%[from],%[step]), %%ymm12\n"
            "vmovups 32(%[from],%[step]), %%ymm13\n" ADD_SIX_ROWS("4")
            : [a0] "+x"(a0), [a1] "+x"(a1), [b0] "+x"(b0), [b1] "+x"(b1), [c0] "+x"(c0), [c1] "+x"(c1),
              [d0] "+x"(d0), [d1] "+x"(d1), [e0] "+x"(e0), [e1] "+x"(e1), [f0] "+x"(f0), [f1] "+x"(f1)
            : [x] "r"(x), [y] "r"(y), [stride] "r"(stride), [from] "r"(from), [step] "r"(step)
            : "xmm12", "xmm13", "xmm14", "memory");
    }

    INLINE void write(float* to, int64_t across) const {
        const Floats all[6][2] = {{a0, a1}, {b0, b1}, {c0, c1}, {d0, d1}, {e0, e1}, {f0, f1}};
        for (int r = 0; r < 6; r++)
            for (int c = 0; c < 2; c++) write_floats(to + r * across + c * WIDTH, all[r][c]);
    }
};
#endif

// T is the type of q, k, v and the products; S that of the cache: T itself, or a smaller one.
template <class T, class S> struct Attention {
    using Element = typename T::Element;
    using Cell = typename T::Cell;
    using Stored = typename S::Element;
    static constexpr bool SMALL = !std::is_same<T, S>::value;
    static constexpr bool WIDENS = SMALL && T::PAIR == 1;  // few rows take numbers as the cache has them
    static constexpr bool TILED = TILES && std::is_same<T, BF16>::value;
    static constexpr int PARTS = TILED ? 8 : 4;     // tiles of a block
    static constexpr int BLOCK = PARTS * LANES;     // keys whose scores are computed together
    static constexpr int VECTORS = BLOCK / WIDTH;   // of scores
    static constexpr int ROWS = TILED ? 64 : STRIP; // of a task
    static constexpr int FEW = 4;                   // rows that take numbers as the cache has them
    static constexpr int LIGHT = 2;                 // rows whose products take less time than what they read
    static constexpr int DEEP = LANES / WIDTH;      // vectors of keys in a tile
    static constexpr int LINES = std::max<int>(1, 64 / (LANES * sizeof(Stored)));  // dims of a tile's keys in a line
    static constexpr int STEP = TILED ? 32 : 1;     // dims of keys are rounded up to it
    static constexpr std::integral_constant<int, PARTS> ALL{};
    static constexpr int FINE = 2 / DEEP;           // tiles are left out by so many: vectors are computed by twos
    const Batch& b;
    const int group;        // heads that share a kv head
    const int64_t depth;    // dims of q and of keys as the products take them
    const int64_t wide;     // dims of values and results
    const int64_t tile;     // cells of a tile of keys
    const int64_t value_tile;
    const int64_t key_tile; // of keys that were copied
    const int64_t head;     // elements of one block's keys, or values, of one head
    const bool bent;        // scores are more than products times a positive scale
    const float factor;     // that makes a product a score in units of log 2; 1 where scores are bent, which have it

    explicit Attention(const Batch& batch)
        : b(batch), group(int(b.heads / b.kv_heads)), depth((b.dim + STEP - 1) / STEP * STEP),
          wide(b.value_dim ? b.value_dim : b.dim), tile(LANES * b.dim / T::PAIR),
          value_tile(LANES * wide / T::PAIR), key_tile(LANES * depth / T::PAIR), head(b.block_size * b.dim),
          bent(b.soft_cap || b.slopes || b.scale <= 0.0f), factor(bent ? 1.0f : b.scale * LOG2_E) {}

    // What a thread computes a task with. `m` and `l` are the running maximum and sum of the softmax. Of what a strip
    // needs for a block there are two: one is multiplied while the other is softened.
    struct Space {
        Tiles tiles;
        Scratch<uint32_t> q, p, keys, values;
        Scratch<float> s, out, m, shrink, base;
        Scratch<Floats> l;
        Space(const Attention& of, int rows)
            : q(rows * of.depth / T::PAIR), p(2 * STRIP * BLOCK / T::PAIR),
              keys(PARTS * of.key_tile + of.tile), values(PARTS * of.value_tile + of.tile), s(2 * STRIP * BLOCK),
              out(rows * of.wide), m(rows), shrink(2 * STRIP), base(STRIP), l(rows) {
            std::fill_n(q.at(0), rows * of.depth / T::PAIR, 0u);  // dims that are rounded up stay zero
        }
    };

    // A block of keys, and for whom.
    struct Place {
        const Task& task;
        int64_t key;
    };

    // Where the keys of a block's tiles lie, and which tiles are seen: [from, until).
    struct Found {
        const Stored* at[PARTS];
        int64_t key;
        int from, until;
    };

    Found find(const Place& place) const {
        Found found;
        find(place, found.at);
        found.key = place.key;
        limit(place.key, place.task.oldest, place.task.until, found.from, found.until);
        return found;
    }

    // Keys behind the window of every query may lie in blocks that others own by now: for them, and for tiles past the
    // end, stands the null block. Its zeros cannot come back as 0 * NaN.
    void find(const Place& place, const Stored** at) const {
        const Task& task = place.task;
        const uint32_t first = uint32_t(place.key), size = uint32_t(b.block_size);
        const int32_t* block = b.table + task.row * b.table_stride + first / size;
        const auto* cache = (const Stored*)b.cache + task.kv_head * head;
        uint32_t offset = first % size;
        for (int t = 0; t < PARTS; t++) {
            const int64_t key = place.key + t * LANES;
            const bool real = key + LANES > task.oldest && key < task.until;
            at[t] = cache + (real ? *block : 0) * b.cache_stride + offset * b.dim;
            offset += LANES;
            if (offset == size) offset = 0, block++;
        }
    }

    // The tiles of a block that lie in keys [oldest, until), by twos.
    static void limit(int64_t key, int64_t oldest, int64_t until, int& from, int& to) {
        from = TILED ? int(std::max<int64_t>(oldest - key, 0) / (2 * LANES) * 2) : 0;
        to = TILED ? int((std::min<int64_t>(until - key, BLOCK) + 2 * LANES - 1) / (2 * LANES) * 2) : PARTS;
    }

    // The cells of a block's tiles, and for each a tile that is read later, which is asked for while this one is used.
    struct Cells {
        const uint32_t* at[PARTS];
        const char* ahead[PARTS];
    };

    // Tiles [from, until) of a block; `copy` takes those that do not stay where they are, and has room for one of keys
    // behind them. What is asked for lies `far` tiles later, or in the next block. With `kept` all stay.
    void read(uint32_t* copy, const Found& found, const Found& next, bool values, int from, int until, int far,
              Cells& to, bool kept = false) const {
        const int64_t part = values && !b.value_dim ? b.kv_heads * head : 0, size = values ? value_tile : key_tile;
        uint32_t* keys = copy + PARTS * value_tile;  // widened
        far = std::min(far, found.until - found.from);
        for (int t = from; t < until; t++, copy += size) {
            const Stored *at = found.at[t] + part, *beside = found.at[t ^ 1] + part;
            const int over = t + far - found.until;  // the tiles of a block are all asked for by the one before
            to.ahead[t] = (const char*)((over < 0 ? found.at[t + far] : next.at[(next.from + over) % PARTS]) + part);
            to.at[t] = copy;
            const bool apart = values ? (t % 2 ? at - beside : beside - at) != tile * T::PAIR : depth != b.dim;
            if (values && b.value_dim) {
                if constexpr (SMALL) widen_all<S>(at, (Cell*)keys, tile * T::PAIR, to.ahead[t]);
                else keys = (uint32_t*)at;
                turn(keys, copy);
                continue;
            }
            if (kept) to.at[t] = (const uint32_t*)at;
            else if constexpr (SMALL) widen_all<S>(at, (Cell*)copy, tile * T::PAIR, to.ahead[t]);
            else if (TILED && apart) copy_lines(copy, at, tile * 4);
            else to.at[t] = (const uint32_t*)at;
            if (size > tile && !kept) std::fill_n(copy + tile, size - tile, 0u);
        }
    }

    // A tile of values from one of keys whose first dims they are.
    void turn(const uint32_t* keys, uint32_t* values) const {
        if constexpr (T::PAIR == 1) {
            for (int64_t d = 0; d < wide; d++)
                for (int key = 0; key < LANES; key++) values[key * wide + d] = keys[d * LANES + key];
            return;
        }
        // Two cells of keys, dims d and d + 1 of keys 2i and 2i + 1, are two of values when the inner numbers change
        // places. Four of each are turned at a time.
        for (int64_t d = 0; d < wide; d += 8)
            for (int half = 0; half < LANES; half += 8) {
                Fours x[4];
                for (int i = 0; i < 4; i++) {
                    x[i] = load<Fours>(keys + (d / 2 + i) * LANES + half);
                    x[i] = (x[i] & 0xffff00000000ffff) | (x[i] & 0xffff0000) << 16 | (x[i] >> 16 & 0xffff0000);
                }
                const Fours even = {0, 4, 2, 6}, odd = {1, 5, 3, 7}, low = {0, 1, 4, 5}, high = {2, 3, 6, 7};
                const Fours a = __builtin_shuffle(x[0], x[1], even), b = __builtin_shuffle(x[0], x[1], odd);
                const Fours c = __builtin_shuffle(x[2], x[3], even), e = __builtin_shuffle(x[2], x[3], odd);
                const Fours y[4] = {__builtin_shuffle(a, c, low), __builtin_shuffle(b, e, low),
                                    __builtin_shuffle(a, c, high), __builtin_shuffle(b, e, high)};
                for (int i = 0; i < 4; i++) std::memcpy(values + (half / 2 + i) * wide + d, &y[i], sizeof y[i]);
            }
    }

    // Some rows of a task and what they see of a block: its tiles [from, until), all of their keys where `whole`.
    // `fresh`: they have no sums yet. `asks`: their products ask for what comes next. `cut`: their last tiles are left out.
    struct Strip {
        int first, rows, from, until;
        bool whole, fresh, asks, cut;
        int64_t position;  // of the first query
        int64_t ahead;     // from the block's first key to it
        float *s, *shrink;
        uint32_t* p;
    };

    // The tiles of a block, by `each`, that row i of a strip that is cut computes with: those that it sees, or a row that is
    // computed together with it. None of a row that comes before all keys.
    int tiles_of(const Strip& strip, int i, int each = FINE) const {
        const int last = std::min(i / T::ROWS * T::ROWS + T::ROWS, strip.rows) - 1;
        const int64_t newest = strip.ahead + (strip.first % group + last) / group;
        return newest < 0 ? 0 : int(std::min<int64_t>(newest / (each * LANES) * each + each, PARTS));
    }

    // Whether a task's rows are so few that they take numbers as the cache has them.
    bool keeps(const Task& task) const { return WIDENS && task.count * group <= FEW; }

    // Rows of a task from `first` on; `start` is the position of the task's first query.
    Strip strip_at(Space& w, const Place& here, int first, int rows, int64_t start, int turn) const {
        const int64_t key = here.key, position = start + first / group, last = start + (first + rows - 1) / group;
        const int64_t oldest = oldest_of(position), until = std::min(last + 1, here.task.until);
        Strip strip = {};
        strip.asks = true;
        strip.first = first, strip.position = position, strip.ahead = position - key;
        strip.rows = until <= key || oldest >= key + BLOCK ? 0 : rows;
        limit(key, oldest, until, strip.from, strip.until);
        const int64_t end = key + strip.until * LANES;
        strip.whole = std::min(position + 1, here.task.until) >= end && oldest_of(last) <= key + strip.from * LANES;
        strip.cut = !TILED && !strip.whole && !keeps(here.task);
        strip.fresh = key <= std::max(oldest, here.task.from);
        strip.s = w.s.at(turn * STRIP * BLOCK);
        strip.p = w.p.at(turn * STRIP * BLOCK / T::PAIR);
        strip.shrink = w.shrink.at(turn * STRIP);
        return strip;
    }

    // out[r] = a[r] . the keys of a block's first `tiles`, for R rows
    template <int R, bool FIRST, class N> void scores(const uint32_t* a, const Cells& keys, float* out, N tiles) const {
        int v = 0;
        for (; v + COLUMNS <= tiles * DEEP; v += COLUMNS) score_vectors<R, COLUMNS, FIRST>(a, keys, v, out);
        if (v < tiles * DEEP) score_vectors<R, 2, FIRST>(a, keys, v, out);
    }

    // ... of C vectors of keys from `v` on.
    template <int R, int C, bool FIRST>
    INLINE void score_vectors(const uint32_t* a, const Cells& keys, int v, float* out) const {
        const int n = int(b.dim / T::PAIR);
#if BY_HAND
        if constexpr (R == 6) {
            const int t = v * WIDTH / LANES;
            Six sums([](int, int) { return Floats{}; });
            for (int i = 0; i < n; i += 2) {
                if (FIRST && !SMALL) ask_far(keys.ahead[t] + i * 64), ask_far(keys.ahead[t] + (i + 1) * 64);
                sums.add(a + i, n * 4, keys.at[t] + i * LANES, LANES * 4);
            }
            return sums.write(out + v * WIDTH, BLOCK);
        }
#endif
        const uint32_t* k[C];
        for (int c = 0; c < C; c++) k[c] = keys.at[(v + c) * WIDTH / LANES] + (v + c) * WIDTH % LANES;
        Floats sum[R][C] = {};
        for (int i = 0; i < n; i++)
            for (int c = 0; c < C; c++) {
                if (FIRST && !SMALL && (v + c) * WIDTH % LANES == 0) ask_far(keys.ahead[(v + c) * WIDTH / LANES] + i * 64);
                for (int r = 0; r < R; r++) sum[r][c] = T::multiply_add(sum[r][c], a[r * n + i], k[c] + i * LANES);
            }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) write_floats(out + r * BLOCK + (v + c) * WIDTH, sum[r][c]);
    }

    // out[r] = out[r] * shrink[r] + p[r] . the values of a block's first `tiles`, for R rows and C vectors of dims
    template <int R, int C, bool FIRST, class N>
    void weigh(const uint32_t* p, const Cells& values, int column, N tiles, const float* shrink, float* out) const {
        constexpr int inner = LANES / T::PAIR, width = BLOCK / T::PAIR;
#if BY_HAND
        if constexpr (R == 6 && C == 2) {
            Six sums([&](int r, int c) { return load<Floats>(out + r * wide + column + c * WIDTH) * shrink[r]; });
            for (int t = 0; t < tiles; t++)
                for (int i = 0; i < inner; i += 2) {
                    const int64_t at = i * wide + column;
                    if (FIRST && !SMALL) ask_far(values.ahead[t] + at * 4), ask_far(values.ahead[t] + (at + wide) * 4);
                    sums.add(p + t * inner + i, width * 4, values.at[t] + at, wide * 4);
                }
            return sums.write(out + column, wide);
        }
#endif
        Floats sum[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sum[r][c] = load<Floats>(out + r * wide + column + c * WIDTH) * shrink[r];
        for (int t = 0; t < tiles; t++)
            for (int i = 0; i < inner; i++)
                for (int c = 0; c < C; c++) {
                    const int64_t at = i * wide + column + c * WIDTH;
                    if (FIRST && !SMALL && (WIDTH == LANES || c % 2 == 0)) ask_far(values.ahead[t] + at * 4);
                    for (int r = 0; r < R; r++)
                        sum[r][c] = T::multiply_add(sum[r][c], p[r * width + t * inner + i], values.at[t] + at);
                }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) write_floats(out + r * wide + column + c * WIDTH, sum[r][c]);
    }

    template <int R, bool FIRST, class N>
    void weigh_all(const uint32_t* p, const Cells& values, const float* shrink, float* out, N tiles) const {
        constexpr int MANY = WIDTH == LANES && R <= 2 ? 2 * COLUMNS : COLUMNS;  // few rows read values in their order
        int c = 0;
        for (; c + MANY * WIDTH <= wide; c += MANY * WIDTH) weigh<R, MANY, FIRST>(p, values, c, tiles, shrink, out);
        for (; c + COLUMNS * WIDTH <= wide; c += COLUMNS * WIDTH) weigh<R, COLUMNS, FIRST>(p, values, c, tiles, shrink, out);
        for (; c < wide; c += WIDTH) weigh<R, 1, FIRST>(p, values, c, tiles, shrink, out);
    }

    static void add(Floats& sum, uint32_t a, Floats b) { sum = T::multiply_add(sum, a, b); }

    // As `scores`, of tiles as the cache has them, for few rows.
    template <int R, bool FIRST> void scores_kept(const uint32_t* a, const Cells& keys, float* out) const {
        constexpr int TOGETHER = R * DEEP > 4 ? 1 : R * DEEP > 2 ? 2 : 4;  // tiles: sums enough to add without waiting
        const int n = int(b.dim);
        for (int t = 0; t < PARTS; t += TOGETHER) {
            Floats sum[R][TOGETHER * DEEP] = {};
            for (int i = 0; i < n; i++)
                for (int u = 0; u < TOGETHER; u++) {
                    const auto* from = (const Stored*)keys.at[t + u] + i * LANES;
                    if (FIRST && i % LINES == 0) ask_far(keys.ahead[t + u] + i * LANES * sizeof(Stored));
                    for (int v = 0; v < DEEP; v++) {
                        const Floats key = as_floats<S>(from + v * WIDTH);
                        for (int r = 0; r < R; r++) add(sum[r][u * DEEP + v], a[r * n + i], key);
                    }
                }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < TOGETHER * DEEP; v++) write_floats(out + r * BLOCK + t * LANES + v * WIDTH, sum[r][v]);
        }
    }

    // As `weigh`, of tiles as the cache has them, for few rows: some keys at a time with all of their dims, which lie in
    // memory one after the other.
    template <int R, bool FIRST>
    void weigh_kept(const uint32_t* p, const Cells& values, const float* shrink, float* out) const {
        constexpr int SOME = 4;
        for (int key = 0; key < BLOCK; key += SOME) {
            const int t = key / LANES;
            const int64_t first = key % LANES * wide;
            for (int64_t column = 0; column < wide; column += LANES) {
                if (FIRST && column * sizeof(Stored) % 64 == 0)
                    for (int k = 0; k < SOME; k++) ask_far(values.ahead[t] + (first + k * wide + column) * sizeof(Stored));
                Floats sum[R][DEEP];
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < DEEP; v++) {
                        sum[r][v] = load<Floats>(out + r * wide + column + v * WIDTH);
                        if (key == 0) sum[r][v] *= shrink[r];
                    }
                for (int k = 0; k < SOME; k++)
                    for (int v = 0; v < DEEP; v++) {
                        const int64_t at = first + k * wide + column + v * WIDTH;
                        const Floats value = as_floats<S>((const Stored*)values.at[t] + at);
                        for (int r = 0; r < R; r++) add(sum[r][v], p[r * BLOCK + key + k], value);
                    }
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < DEEP; v++) write_floats(out + r * wide + column + v * WIDTH, sum[r][v]);
            }
        }
    }

    // Products of a strip of few rows with a block as the cache has it.
    void score_kept(Space& w, const Strip& strip, const Cells& keys) const {
        by_rows<FEW>(strip.rows, [&](auto count, auto first, int i) {
            const uint32_t* q = w.q.at((strip.first + i) * depth);
            scores_kept<decltype(count)::value, decltype(first)::value>(q, keys, strip.s + i * BLOCK);
        });
    }
    void weigh_kept(Space& w, const Strip& strip, const Cells& values) const {
        by_rows<FEW>(strip.rows, [&](auto count, auto first, int i) {
            float* out = w.out.at((strip.first + i) * wide);
            const uint32_t* p = strip.p + i * BLOCK;
            weigh_kept<decltype(count)::value, decltype(first)::value>(p, values, strip.shrink + i, out);
        });
    }

    // All rows of a strip, as many at a time as there are registers for; the first of them ask for the next block. `some`
    // is given how many as a constant, whether they are the first, and where they begin.
    template <int R, class F> static void by_rows(int rows, F some) {
        int i = 0;
        const auto take = [&](auto count) {
            for (; i + count <= rows; i += count)
                i ? some(count, std::false_type(), i) : some(count, std::true_type(), i);
        };
        take(std::integral_constant<int, R>());
        if constexpr (R > 4) take(std::integral_constant<int, 4>());
        if constexpr (R > 3) take(std::integral_constant<int, 3>());
        if constexpr (R > 2) take(std::integral_constant<int, 2>());
        take(std::integral_constant<int, 1>());
    }

    // Both products of a strip with a block.
    void score_strip(Space& w, const Strip& strip, const Cells& keys) const {
        const auto some = [&](auto count, auto first, int i, auto tiles) {
            const uint32_t* q = w.q.at((strip.first + i) * depth / T::PAIR);
            scores<decltype(count)::value, decltype(first)::value>(q, keys, strip.s + i * BLOCK, tiles);
        };
        by_tiles(strip, FINE, some);
    }

    void weigh_strip(Space& w, const Strip& strip, const Cells& values) const {
        const auto some = [&](auto count, auto first, int i, auto tiles) {
            float* out = w.out.at((strip.first + i) * wide);
            const uint32_t* p = strip.p + i * BLOCK / T::PAIR;
            weigh_all<decltype(count)::value, decltype(first)::value>(p, values, strip.shrink + i, out, tiles);
        };
        by_tiles(strip, 1, some);
    }

    // `some` is also given how many tiles, as a constant where it is all of them.
    template <class F> void by_tiles(const Strip& strip, int each, F some) const {
        if (strip.cut)
            by_rows<T::ROWS>(strip.rows, [&](auto count, auto first, int i) {
                some(count, first, i, tiles_of(strip, i, each));
            });
        else
            by_rows<T::ROWS>(strip.rows, [&](auto count, auto first, int i) { some(count, first, i, ALL); });
    }

#if TILES
    static void ask(const char* at) {
        for (int i = 0; i < 1024; i += 64) __builtin_prefetch(at + i);
    }

    // Two tiles of keys, for up to 16 rows or `MORE`.
    template <bool MORE> void score_tiles(Space& w, const Strip& strip, const Cells& keys, int t) const {
        const uint32_t *q = w.q.at(strip.first * depth / 2), *next = q + 8 * depth;
        const uint32_t *even = keys.at[t], *odd = keys.at[t + 1];
        const bool asks = strip.asks && !SMALL;
        float *s = strip.s + t * LANES, *below = s + 16 * BLOCK;
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (MORE) TILE_ZERO(2);
        if (MORE) TILE_ZERO(3);
        for (int64_t i = 0; i < depth / 2; i += 16) {
            TILE_LOAD(4, q + i, depth * 2);
            TILE_LOAD(6, even + i * LANES, 64);
            if (asks) ask(keys.ahead[t] + i * 64);
            TILE_DOT_BF16(0, 4, 6);
            TILE_LOAD(7, odd + i * LANES, 64);
            if (asks) ask(keys.ahead[t + 1] + i * 64);
            TILE_DOT_BF16(1, 4, 7);
            if (!MORE) continue;
            TILE_LOAD(5, next + i, depth * 2);
            TILE_DOT_BF16(2, 5, 6);
            TILE_DOT_BF16(3, 5, 7);
        }
        TILE_STORE(0, s, BLOCK * 4);
        TILE_STORE(1, s + LANES, BLOCK * 4);
        if (MORE) TILE_STORE(2, below, BLOCK * 4);
        if (MORE) TILE_STORE(3, below + LANES, BLOCK * 4);
    }

    void shrink(const Strip& strip, float* out, int dims) const {
        for (int i = 0; i < strip.rows; i++)
            for (int d = 0; d < dims && strip.shrink[i] != 1.0f; d += WIDTH)
                write_floats(out + i * wide + d, load<Floats>(out + i * wide + d) * strip.shrink[i]);
    }

    // `TWO` registers of dims, or the one that is left, of a strip's sums over tiles [from, until).
    template <bool MORE, bool TWO>
    void weigh_tiles(Space& w, const Strip& strip, const Cells& values, int64_t column, int from, int until) const {
        const int64_t stride = wide * 4;
        const bool asks = strip.asks && !SMALL;
        float *out = w.out.at(strip.first * wide + column), *below = out + 16 * wide;
        if (strip.fresh && from == strip.from) {
            TILE_ZERO(0);
            if (TWO) TILE_ZERO(1);
            if (MORE) TILE_ZERO(2);
            if (MORE && TWO) TILE_ZERO(3);
        } else {
            if (from == strip.from) shrink(strip, out, TWO ? 2 * LANES : LANES);
            TILE_LOAD(0, out, stride);
            if (TWO) TILE_LOAD(1, out + LANES, stride);
            if (MORE) TILE_LOAD(2, below, stride);
            if (MORE && TWO) TILE_LOAD(3, below + LANES, stride);
        }
        for (int t = from; t < until; t += 2) {
            const uint32_t *p = strip.p + t * LANES / 2, *next = p + 16 * BLOCK / 2;
            TILE_LOAD(4, p, BLOCK * 2);
            TILE_LOAD(6, values.at[t] + column, stride);
            TILE_DOT_BF16(0, 4, 6);
            if (MORE) TILE_LOAD(5, next, BLOCK * 2);
            if (MORE) TILE_DOT_BF16(2, 5, 6);
            if (asks) ask(values.ahead[t] + column * 32);
            if (!TWO) continue;
            TILE_LOAD(7, values.at[t] + column + LANES, stride);
            if (asks) ask(values.ahead[t + 1] + column * 32);
            TILE_DOT_BF16(1, 4, 7);
            if (MORE) TILE_DOT_BF16(3, 5, 7);
        }
        TILE_STORE(0, out, stride);
        if (TWO) TILE_STORE(1, out + LANES, stride);
        if (MORE) TILE_STORE(2, below, stride);
        if (MORE && TWO) TILE_STORE(3, below + LANES, stride);
    }

    // Each `step`th pair of the tiles [from, until), or of the registers of dims from `column` on.
    void score_some(Space& w, const Strip& strip, const Cells& keys, int from, int until, int step) const {
        for (int t = from; t < until; t += 2 * step)
            strip.rows > 16 ? score_tiles<true>(w, strip, keys, t) : score_tiles<false>(w, strip, keys, t);
    }
    void weigh_some(Space& w, const Strip& strip, const Cells& values, int from, int until, int column,
                    int step) const {
        for (; column < wide; column += 2 * LANES * step)
            if (column + 2 * LANES > wide)
                strip.rows > 16 ? weigh_tiles<true, false>(w, strip, values, column, from, until)
                                : weigh_tiles<false, false>(w, strip, values, column, from, until);
            else
                strip.rows > 16 ? weigh_tiles<true, true>(w, strip, values, column, from, until)
                                : weigh_tiles<false, true>(w, strip, values, column, from, until);
    }

    // A strip and a block.
    struct Step {
        Found here, next;
        Strip strip;
    };

    // Many rows: while a strip is softened by vectors, tile registers score the next one and weigh the one before.
    void run_many(const Task& task, const Task& then, int64_t start, Space& w, bool asks) const {
        const int rows = task.count * group;
        Step steps[3];
        Cells keys, values;
        int64_t have = -1;  // the block whose values are there
        int count = 0;
        const auto step = [&](int i) { return i >= 0 && i < count ? &steps[i % 3] : nullptr; };
        const auto advance = [&](int i) {
            const Step *now = step(i), *before = step(i - 1), *old = step(i - 2);
            if (old && old->here.key != have) {
                have = old->here.key;
                read(w.values.at(0), old->here, old->next, true, old->here.from, old->here.until, PARTS, values);
            }
            const auto piece = [&](int n) {
                if (old) weigh_some(w, old->strip, values, old->strip.from, old->strip.until, 2 * LANES * n, PIECES);
                if (now) score_some(w, now->strip, keys, now->strip.from + 2 * n, now->strip.until, PIECES);
            };
            if (before) soften({task, before->here.key}, w, before->strip, piece);
            else for (int n = 0; n < PIECES; n++) piece(n);
        };
        w.tiles.hold(16, 16);
        Found here = find({task, task.from});
        for (int64_t key = task.from; key < task.until; key += BLOCK) {
            const Found next = find(key + BLOCK < task.until ? Place{task, key + BLOCK} : Place{then, then.from});
            read(w.keys.at(0), here, next, false, here.from, here.until, PARTS, keys);
            bool first = asks;
            for (int i = 0; i < rows; i += STRIP) {
                Strip strip = strip_at(w, {task, key}, i, std::min(STRIP, rows - i), start, count % 2);
                if (!strip.rows) continue;
                strip.asks = first;
                first = false;
                steps[count % 3] = {here, next, strip};
                advance(count++);
            }
            here = next;
        }
        advance(count);
        advance(count + 1);
    }
#endif

    // Products of a strip with tiles [from, until) of a block, which are as the cache has them if `kept`.
    void score(Space& w, const Strip& strip, const Cells& keys, int from, int until, bool kept) const {
#if TILES
        if constexpr (TILED) return score_some(w, strip, keys, from, until, 1);
#endif
        if constexpr (WIDENS)
            if (kept) return score_kept(w, strip, keys);
        score_strip(w, strip, keys);
    }
    void weigh(Space& w, const Strip& strip, const Cells& values, int from, int until, bool kept) const {
#if TILES
        if constexpr (TILED) return weigh_some(w, strip, values, from, until, 0, 1);
#endif
        if constexpr (WIDENS)
            if (kept) return weigh_kept(w, strip, values);
        weigh_strip(w, strip, values);
    }

    // Few rows, or vectors: one after the other, near in memory.
    void run_few(const Task& task, const Task& then, int64_t start, Space& w) const {
        const int rows = task.count * group;
        const bool kept = keeps(task), kept_values = kept && !b.value_dim;
        Cells cells;
        Found here = find({task, task.from});
        for (int64_t key = task.from; key < task.until; key += BLOCK) {
            const Found next = find(key + BLOCK < task.until ? Place{task, key + BLOCK} : Place{then, then.from});
            for (int i = 0; i < rows; i += STRIP) {
                const Strip strip = strip_at(w, {task, key}, i, std::min(STRIP, rows - i), start, 0);
                if (!strip.rows) continue;
                for (int t = strip.from; t < strip.until; t += NEAR) {
                    const int until = std::min(t + NEAR, strip.until);
                    read(w.keys.at(0), here, next, false, t, until, NEAR, cells, kept);
                    score(w, strip, cells, t, until, kept);
                }
                soften({task, key}, w, strip, [](int) {});
                for (int t = strip.from; t < strip.until; t += NEAR) {
                    const int until = std::min(t + NEAR, strip.until);
                    read(w.keys.at(0), here, next, true, t, until, NEAR, cells, kept_values);
                    weigh(w, strip, cells, t, until, kept_values);
                }
            }
            here = next;
        }
    }

    // One query with one or two heads, whose products take less time than their reads. The processor asks for memory by
    // itself, and better than these kernels do, as long as it sees the next reads: so few instructions stand between
    // the products of one block and those of the next, and only the first lines of a tile are asked for.
    void run_light(const Task& task, const Task& then, int64_t position, Space& w) const {
        const auto ask_first = [](const Stored* tile) { ask_far(tile), ask_far(tile + 64 / sizeof(Stored)); };
        const Stored* at[PARTS];
        find({task, task.from}, at);
        for (int64_t key = task.from; key < task.until; key += BLOCK) {
            const Place here = {task, key};
            const bool whole = key >= task.oldest && key + BLOCK <= task.until;
            Cells keys, values;
            for (int t = 0; t < PARTS; t++) {
                const Stored* beside = at[t] + b.kv_heads * head;
                keys.at[t] = (const uint32_t*)at[t], values.at[t] = (const uint32_t*)beside;
                ask_first(beside);
            }
            by_rows<LIGHT>(group, [&](auto count, auto, int i) {
                scores<decltype(count)::value, false>(w.q.at(i * depth / T::PAIR), keys, w.s.at(i * BLOCK), ALL);
            });
            find(key + BLOCK < task.until ? Place{task, key + BLOCK} : Place{then, then.from}, at);
            for (int i = 0; i < group; i++) {
                auto* s = (Floats*)w.s.at(i * BLOCK);
                if (bent) bend(s, 0, VECTORS, here, task.kv_head * group + i, position);
                if (!whole) hide(s, 0, VECTORS, here, position);
                const Floats old = splat(*w.m.at(i)), m = larger(splat(highest(s, 0, VECTORS) * factor), old);
                const Floats base = m == LOWEST ? Floats{} : m, shrink = power_of_two(old - base);
                *w.m.at(i) = m[0], *w.shrink.at(i) = shrink[0];
                to_weights(s, (Cell*)w.p.at(i * BLOCK / T::PAIR), 0, VECTORS, base, shrink[0], *w.l.at(i));
            }
            for (int t = 0; t < PARTS; t++) ask_first(at[t]);
            by_rows<LIGHT>(group, [&](auto count, auto, int i) {
                const uint32_t* p = w.p.at(i * BLOCK / T::PAIR);
                weigh_all<decltype(count)::value, false>(p, values, w.shrink.at(i), w.out.at(i * wide), ALL);
            });
        }
    }

    void run(const Task& task, const Task& then, Space& w, bool asks) const {
        const int rows = task.count * group;
        const int64_t length = b.context_lens[task.row];
        const int64_t start = length - (b.query_start[task.row + 1] - b.query_start[task.row]) + task.first;
        for (int i = 0; i < rows; i++) {
            const int64_t token = b.query_start[task.row] + task.first + i / group;
            const auto* q = (const Element*)b.q + token * b.q_stride + (task.kv_head * group + i % group) * b.dim;
            auto* cells = (Cell*)w.q.at(i * depth / T::PAIR);
            if constexpr (sizeof(Cell) == sizeof(Element)) std::memcpy(cells, q, b.dim * sizeof(Element));
            else for (int d = 0; d < b.dim; d += WIDTH) T::store(cells + d, T::read(q + d));
        }
        std::fill_n(w.m.at(0), rows, LOWEST);
        std::fill_n(w.l.at(0), rows, Floats{});
        if (!TILED) std::fill_n(w.out.at(0), rows * wide, 0.0f);
#if TILES
        if constexpr (TILED) {
            if (rows > 16) return run_many(task, then, start, w, asks);
            w.tiles.hold(rows, 0);
        }
#endif
        if constexpr (T::PAIR == 2 && !SMALL && !TILED)
            if (rows <= LIGHT && task.count == 1 && !b.value_dim) return run_light(task, then, start, w);
        run_few(task, then, start, w);
    }

    int64_t oldest_of(int64_t position) const {
        const int64_t begin = b.chunk ? position / b.chunk * b.chunk : 0;
        return b.window ? std::max(position - b.window + 1, begin) : begin;
    }

    // A row's scores with a cap and a slope, in units of log 2.
    void bend(Floats* s, int from, int until, const Place& here, int head, int64_t position) const {
        for (int t = from; t < until; t++) {
            Floats x = s[t] * b.scale;
            if (b.soft_cap) x = capped(x);
            const Ints at = lanes() + int32_t(here.key + t * WIDTH - position);
            if (b.slopes) x += __builtin_convertvector(at, Floats) * b.slopes[head];
            s[t] = x * LOG2_E;
        }
    }

    Floats capped(Floats x) const {  // tanh(x / cap) * cap
        const Words sign = (Words)x & 0x80000000u;
        const Floats a = (Floats)((Words)x ^ sign) / b.soft_cap;
        const Floats e = power_of_two(a * (-2.0f * LOG2_E));
        return (Floats)((Words)((1.0f - e) / (1.0f + e) * b.soft_cap) | sign);
    }

    static Ints lanes() {
        Ints lanes;
        for (int j = 0; j < WIDTH; j++) lanes[j] = j;
        return lanes;
    }

    void hide(Floats* s, int from, int until, const Place& here, int64_t position) const {
        const int32_t newest = int32_t(std::min(position, here.task.until - 1) - here.key);
        const int32_t oldest = int32_t(oldest_of(position) - here.key);
        for (int t = from; t < until; t++) {
            const Ints at = lanes() + t * WIDTH;
            s[t] = ((at <= newest) & (at >= oldest)) ? s[t] : splat(LOWEST);
        }
    }

    static float highest(const Floats* s, int from, int until) {
        Floats even = splat(LOWEST), odd = even;
        for (int t = from; t < until; t += 2) even = larger(s[t], even), odd = larger(s[t + 1], odd);
        return largest(larger(even, odd));
    }

    // A row's scores become weights: two to the power of what they are above `base`. What `l` has shrinks, and they are
    // added.
    void to_weights(const Floats* s, Cell* p, int from, int until, Floats base, float shrink, Floats& l) const {
        Floats even = {}, odd = {};
        for (int t = from; t < until; t += 2) {
            const Floats x = power_of_two(s[t] * factor - base), y = power_of_two(s[t + 1] * factor - base);
            even += x, odd += y;
            T::store(p + t * WIDTH, x);
            T::store(p + (t + 1) * WIDTH, y);
        }
        l = l * shrink + (even + odd);
    }

    // The scores of a strip become weights.
    template <class Beside> void soften(const Place& here, Space& w, const Strip& strip, Beside beside) const {
        if (!strip.cut) return soften(here, w, strip, beside, [&](int) { return TILED ? strip.until * DEEP : VECTORS; });
        soften(here, w, strip, beside, [&](int i) { return tiles_of(strip, i) * DEEP; });
    }

    // `until` says for a row how many vectors of scores it has.
    template <class Beside, class Until>
    void soften(const Place& here, Space& w, const Strip& strip, Beside beside, Until until) const {
        const int from = TILED ? strip.from * DEEP : 0;
        for (int i = 0; i < strip.rows; i++) {
            auto* s = (Floats*)(strip.s + i * BLOCK);
            const int64_t position = strip.position + (strip.first % group + i) / group;
            if (bent) bend(s, from, until(i), here, here.task.kv_head * group + (strip.first + i) % group, position);
            if (!strip.whole) hide(s, from, until(i), here, position);
            *w.base.at(i) = highest(s, from, until(i)) * factor;
        }
        for (int i = 0; i < strip.rows; i += WIDTH) {
            const Floats old = load<Floats>(w.m.at(strip.first + i)), m = larger(load<Floats>(w.base.at(i)), old);
            const Floats base = m == LOWEST ? Floats{} : m;  // nothing seen so far
            write_floats(w.m.at(strip.first + i), m);
            write_floats(w.base.at(i), base);
            write_floats(strip.shrink + i, power_of_two(old - base));
        }
        for (int piece = 0; piece < PIECES; piece++) {
            for (int i = strip.rows * piece / PIECES; i < strip.rows * (piece + 1) / PIECES; i++) {
                const auto* s = (const Floats*)(strip.s + i * BLOCK);
                auto* p = (Cell*)(strip.p + i * BLOCK / T::PAIR);
                to_weights(s, p, from, until(i), splat(*w.base.at(i)), strip.shrink[i], *w.l.at(strip.first + i));
            }
            beside(piece);
        }
    }

    // Divide by the softmax's sum and write. A sink is one more key, with a score and no value.
    void finish(const Task& task, int i, const float* out, float m, float l) const {
        const int head = task.kv_head * group + i % group;
        if (b.sinks) l += std::exp2(b.sinks[head] * LOG2_E - m);
        const float part = 1.0f / l;
        const int64_t token = b.query_start[task.row] + task.first + i / group;
        auto* to = (Element*)b.out + (token * b.heads + head) * wide;
        for (int d = 0; d < wide; d += WIDTH) T::store(to + d, load<Floats>(out + d) * part);
    }

    void plan(std::vector<Task>& tasks, int32_t& partials) const {
        const int most = std::max(1, ROWS / group);
        for (int row = 0; row < b.rows; row++) {
            const int count = b.query_start[row + 1] - b.query_start[row];
            const int64_t length = b.context_lens[row];
            if (!length) continue;  // it pads a recorded step
            for (int head = 0; head < b.kv_heads; head++)  // whose keys stay in a cache; the longest first
                for (int first = (count - 1) / most * most; first >= 0; first -= most) {
                    const int n = std::min(most, count - first);
                    const int64_t position = length - count + first, until = position + n;
                    const int64_t oldest = oldest_of(position), from = oldest / BLOCK * BLOCK;
                    const bool split = count == 1 && (until - 1) / PARTITION > from / PARTITION;
                    if (!split) tasks.push_back({row, head, first, n, oldest, from, until, -1, n == count});
                    for (int64_t part = from; split && part < until; part = (part / PARTITION + 1) * PARTITION)
                        tasks.push_back({row, head, first, n, oldest, part,
                                         std::min(until, (part / PARTITION + 1) * PARTITION), partials++, false});
                }
        }
    }

    // Add up the partitions of one row and kv head, in their order.
    void combine(const Task* task, int count, const float* kept, int64_t size) const {
        std::vector<float> sum(wide);
        for (int i = 0; i < group; i++) {
            float m = LOWEST, l = 0.0f;
            for (int part = 0; part < count; part++) m = std::max(m, kept[(task[part].partial * group + i) * size]);
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (int part = 0; part < count; part++) {
                const float* from = kept + (task[part].partial * group + i) * size;
                if (from[0] == LOWEST) continue;
                const float weight = std::exp2(from[0] - m);
                l += from[1] * weight;
                for (int d = 0; d < wide; d++) sum[d] += from[2 + d] * weight;
            }
            finish(*task, i, sum.data(), m, l);
        }
    }

    void work(const Task& task, const Task& then, Space& space, float* kept, int64_t size, bool asks) const {
        if (task.alone) write(task.row, task.kv_head);
        run(task, then, space, asks);
        for (int i = 0; i < task.count * group; i++) {
            if (task.partial < 0) {
                finish(task, i, space.out.at(i * wide), *space.m.at(i), total(*space.l.at(i)));
                continue;
            }
            float* to = kept + (task.partial * group + i) * size;
            to[0] = *space.m.at(i);
            to[1] = total(*space.l.at(i));
            std::memcpy(to + 2, space.out.at(i * wide), wide * sizeof(float));
        }
    }

    void attend() const {
        std::vector<Task> tasks;
        int32_t partials = 0;
        plan(tasks, partials);
        const int64_t size = wide + 2;
        std::vector<float> kept(int64_t(partials) * group * size);
        int most = 0;
        for (const Task& task : tasks) most = std::max(most, task.count * group);
        std::vector<const Task*> shared;  // the first of a row and kv head, where there are several
        for (const Task& task : tasks)
            if (!task.alone && task.first == 0 && task.from == task.oldest / BLOCK * BLOCK) shared.push_back(&task);
        Shares shares(int64_t(tasks.size()), thread_count());
#pragma omp parallel
        {
            if (!shared.empty()) {
#pragma omp for schedule(static)
                for (size_t i = 0; i < shared.size(); i++) write(shared[i]->row, shared[i]->kv_head);
            }  // where all wait for each other
            Space space(*this, most <= 16 ? 16 : (most + STRIP - 1) / STRIP * STRIP);
            const Task* before = nullptr;
            for (int64_t at; (at = shares.next(thread_number())) >= 0;) {
                const Task &task = tasks[at], &then = tasks[std::min(size_t(at) + 1, tasks.size() - 1)];  // most likely
                const bool known = before && before->row == task.row && before->kv_head == task.kv_head;
                work(task, then, space, kept.data(), size, !known);
                before = &task;
            }
        }
        for (size_t at = 0; at < tasks.size();) {
            size_t end = at + 1;
            while (end < tasks.size() && tasks[end].row == tasks[at].row && tasks[end].kv_head == tasks[at].kv_head &&
                   tasks[end].partial >= 0)
                end++;
            if (tasks[at].partial >= 0) combine(&tasks[at], int(end - at), kept.data(), size);
            at = end;
        }
    }

    static Words stored(const Element* from) {  // a vector's numbers as the cache has them
        if constexpr (sizeof(Stored) == 1) return to_eight<S>(T::read(from));
        else if constexpr (sizeof(Stored) == 2) return __builtin_convertvector(load<Halves>(from), Words);
        else return load<Words>(from);
    }
    static void keep(uint32_t* to, Words x) { std::memcpy(to, &x, sizeof x); }
    static void keep(uint16_t* to, Words x) {
        const Halves halves = __builtin_convertvector(x, Halves);
        std::memcpy(to, &halves, sizeof halves);
    }
    static void keep(uint8_t* to, Words x) {
        for (int j = 0; j < WIDTH; j++) to[j] = uint8_t(x[j]);
    }
    static void keep(float* to, Words x) { keep((uint32_t*)to, x); }
    static void keep_pairs(uint16_t* to, Words x) { std::memcpy(to, &x, sizeof x); }
    static void keep_pairs(uint8_t* to, Words x) { keep((uint16_t*)to, x); }

    // The new keys and values of a row. A tile's values are zeroed when its first key is written: what an earlier owner
    // left there, NaN included, must not come back as 0 * NaN. So are keys where they are values, too.
    void write(int row, int kv) const {
        const int64_t until = b.query_start[row + 1];
        for (int64_t token = b.query_start[row]; token < until; token++) {
            const int64_t slot = b.slots[token], block = slot / b.block_size, offset = slot % b.block_size;
            if (slot < 0) continue;
            auto* keys = (Stored*)b.cache + block * b.cache_stride + kv * head + offset / LANES * LANES * b.dim;
            auto* values = b.value_dim ? keys : keys + b.kv_heads * head;
            const int at = offset % LANES;
            if constexpr (T::PAIR == 2 && !SMALL)
                if (at == 0 && follow(token, until)) {
                    write_tile(keys, values, token, kv);
                    token += LANES - 1;
                    continue;
                }
            if (at == 0) std::memset(values, 0, LANES * b.dim * sizeof(Stored));
            write_key(keys, at, token, kv);
            if (b.value_dim) continue;
            if constexpr (T::PAIR == 2)
                if (at % 2 == 0 && token + 1 < until && b.slots[token + 1] == slot + 1) {
                    write_pair(values, at, token++, kv);
                    write_key(keys, at + 1, token, kv);
                    continue;
                }
            write_value(values, at, token, kv);
        }
    }

    // Whether the next tokens fill a tile.
    bool follow(int64_t token, int64_t until) const {
        bool all = token + LANES <= until;
        for (int i = 1; all && i < LANES; i++) all = b.slots[token + i] == b.slots[token] + i;
        return all;
    }

    void write_tile(Stored* keys, Stored* values, int64_t token, int kv) const {
        const auto* from = (const Element*)b.k + token * b.k_stride + kv * b.dim;
        for (int d = 0; d < b.dim; d += 16)
            for (int key = 0; key < LANES; key += 8)
                transpose(from + key * b.k_stride + d, b.k_stride, (uint32_t*)keys + d / 2 * LANES + key, LANES);
        for (int key = 0; key < LANES && !b.value_dim; key += 2) write_pair(values, key, token + key, kv);
    }

    void write_key(Stored* keys, int at, int64_t token, int kv) const {
        const auto* from = (const Element*)b.k + token * b.k_stride + kv * b.dim;
        for (int d = 0; d < b.dim; d += WIDTH) {
            Stored key[WIDTH];
            keep(key, stored(from + d));
            for (int j = 0; j < WIDTH; j += T::PAIR)
                std::memcpy(keys + (d + j) * LANES + at * T::PAIR, key + j, T::PAIR * sizeof(Stored));
        }
    }

    void write_value(Stored* values, int at, int64_t token, int kv) const {
        const auto* from = (const Element*)b.v + token * b.v_stride + kv * b.dim;
        Stored* to = values + at / T::PAIR * b.dim * T::PAIR + at % T::PAIR;
        for (int d = 0; d < b.dim; d += WIDTH) {
            Stored value[WIDTH];
            keep(value, stored(from + d));
            for (int j = 0; j < WIDTH; j++) to[(d + j) * T::PAIR] = value[j];
        }
    }

    // Values of two tokens whose places are a pair.
    void write_pair(Stored* values, int at, int64_t token, int kv) const {
        const auto* from = (const Element*)b.v + token * b.v_stride + kv * b.dim;
        for (int d = 0; d < b.dim; d += WIDTH) {
            const Words first = stored(from + d), second = stored(from + b.v_stride + d);
            keep_pairs(values + at * b.dim + d * 2, first | second << (8 * sizeof(Stored)));
        }
    }
};

template <class T, class S> void attend(const Batch& batch) {
    Attention<T, S>(batch).attend();
}

template <class T> void attend(const Batch& batch) {
    if (batch.eights == 0) return attend<T, typename T::Kept>(batch);
    if (batch.eights == 1) return attend<T, E4M3>(batch);
    attend<T, E5M2>(batch);
}

}  // namespace

extern "C" {

void ferrule_attend_f32(const Batch* batch) {
    recorded([b = *batch] { attend<F32>(b); });
}

void ferrule_attend_bf16(const Batch* batch) {
    recorded([b = *batch] { attend<BF16>(b); });
}
}
