// Paged attention on CPUs, for float32 and bfloat16, one kernel for prefill, decode and any mixture.
//
// Everything is counted in cells of 32 bits: one float, or two neighbouring bfloat16. A product of two cells adds one
// or two terms to a float lane, which is what AVX512-BF16 does in one instruction; all other arithmetic is float32.
//
// The cache of one block and kv head is cut into tiles of 16 keys, laid out so that nothing is transposed when read:
//     keys    [dim / PAIR][16] cells      a cell has PAIR neighbouring dims of one key
//     values  [16 / PAIR][dim] cells      a cell has one dim of PAIR neighbouring keys
//
// A cache of 8 bits has bytes in the place of a cell's numbers; a block of it is widened to cells before it is used.
//
// A query's numbers are summed over blocks of 64 keys that begin at multiples of 64, each in one order. Keys that it does
// not see add nothing, not even a rounding: so its result has the same bits alone, in a batch, and however a prompt is
// cut, as long as its keys lie in one partition.
#include "float8.h"

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

namespace {

constexpr int COLUMNS = WIDTH / 4;     // vectors that a row of sums has: four rows fill the registers
constexpr int LANES = 16;              // keys of a tile
constexpr int TILES = 4;               // tiles of a block
constexpr int BLOCK = TILES * LANES;   // keys whose scores are computed together
constexpr int VECTORS = BLOCK / WIDTH; // of scores
constexpr int ROWS = 32;               // queries x heads of a group that are computed together
constexpr int64_t PARTITION = 2048;    // keys of one task where a row has a single query
constexpr float LOWEST = -INFINITY;

struct F32 {
    using Element = float;
    static constexpr int PAIR = 1;
    static inline Floats multiply_add(Floats sum, uint32_t a, const uint32_t* b) {
        float x;
        std::memcpy(&x, &a, 4);
        return sum + x * load<Floats>(b);
    }
    static inline Floats read(const Element* from) { return load<Floats>(from); }
    static inline void store(Element* to, Floats x) { std::memcpy(to, &x, sizeof x); }
};

struct BF16 {
    using Element = uint16_t;
    static constexpr int PAIR = 2;
    static inline Floats multiply_add(Floats sum, uint32_t a, const uint32_t* b) {
#if defined(__AVX512BF16__)
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)load<Words>(b));
#else
        const Words w = load<Words>(b);
        const uint32_t low = a << 16, high = a & 0xffff0000u;
        float x, y;
        std::memcpy(&x, &low, 4);
        std::memcpy(&y, &high, 4);
        return sum + x * (Floats)(w << 16) + y * (Floats)(w & 0xffff0000u);
#endif
    }
    static inline Floats read(const Element* from) { return widen(from); }
    static inline void store(Element* to, Floats x) { narrow(to, x); }
};

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

// T is the type of q, k, v and the products; S that of the cache: T itself, or a smaller one.
template <class T, class S> struct Attention {
    using Element = typename T::Element;
    using Stored = typename S::Element;
    static constexpr bool SMALL = !std::is_same<T, S>::value;
    const Batch& b;
    const int group;    // heads that share a kv head
    const int64_t tile; // cells of a tile
    const int64_t head; // elements of one block's keys, or values, of one head

    explicit Attention(const Batch& batch)
        : b(batch), group(int(b.heads / b.kv_heads)), tile(LANES * b.dim / T::PAIR), head(b.block_size * b.dim) {}

    // What a thread computes a task with. `m` and `l` are the running maximum and sum of the softmax.
    struct Space {
        std::vector<uint32_t> q, p, wide;
        std::vector<float> out, m, l, shrink;
        std::vector<Floats> s;
        Space(const Batch& b, int rows)
            : q(rows * b.dim), p(rows * BLOCK), wide(SMALL ? BLOCK * b.dim / T::PAIR : 0), out(rows * b.dim), m(rows),
              l(rows), shrink(rows), s(rows * VECTORS) {}
    };

    // A block of keys, and for whom.
    struct Place {
        const Task& task;
        int64_t key;
    };

    // A tile. Keys behind the window of every query may lie in blocks that others own by now: for them, and for tiles past
    // the end, stands the null block, whose zeros cannot come back as 0 * NaN.
    const Stored* tile_at(const Place& place, int t, bool values) const {
        const Task& task = place.task;
        const int64_t key = place.key + t * LANES;
        const bool real = key + LANES > task.oldest && key < task.until;
        const int64_t block = real ? b.table[task.row * b.table_stride + key / b.block_size] : 0;
        const int64_t part = (values ? b.kv_heads : 0) + task.kv_head;
        return (const Stored*)b.cache + block * b.cache_stride + part * head + key % b.block_size / LANES * tile * T::PAIR;
    }

    // A block: its tiles' cells, and where the block that comes after it lies, which is asked for while this one is used.
    struct Tiles {
        const uint32_t* cells[TILES];
        const char* ahead[TILES];
    };

    Tiles tiles_at(const Place& here, const Place& next, bool values, Space& w) const {
        Tiles tiles;
        for (int t = 0; t < TILES; t++) {
            const Stored* at = tile_at(here, t, values);
            tiles.ahead[t] = (const char*)tile_at(next, t, values);
            if constexpr (SMALL) {
                uint32_t* wide = w.wide.data() + t * tile;
                widen_all<S>(at, (Element*)wide, tile * T::PAIR, tiles.ahead[t]);
                tiles.cells[t] = wide;
            } else {
                tiles.cells[t] = (const uint32_t*)at;
            }
        }
        return tiles;
    }

    // out[r] = a[r] . the keys of a block, for R rows
    template <int R, bool FIRST> void scores(const uint32_t* a, const Tiles& keys, Floats* out) const {
        const int n = int(b.dim / T::PAIR);
        for (int v = 0; v < VECTORS; v += COLUMNS) {
            const uint32_t* k[COLUMNS];
            for (int c = 0; c < COLUMNS; c++) k[c] = keys.cells[(v + c) * WIDTH / LANES] + (v + c) * WIDTH % LANES;
            Floats sum[R][COLUMNS] = {};
            for (int i = 0; i < n; i++)
                for (int c = 0; c < COLUMNS; c++) {
                    if (FIRST && !SMALL && (v + c) * WIDTH % LANES == 0)
                        __builtin_prefetch(keys.ahead[(v + c) * WIDTH / LANES] + i * 64);
                    for (int r = 0; r < R; r++) sum[r][c] = T::multiply_add(sum[r][c], a[r * n + i], k[c] + i * LANES);
                }
            for (int r = 0; r < R; r++)
                for (int c = 0; c < COLUMNS; c++) out[r * VECTORS + v + c] = sum[r][c];
        }
    }

    // out[r] = out[r] * shrink[r] + p[r] . values, for R rows and C vectors of dims
    template <int R, int C, bool FIRST>
    void weigh(const uint32_t* p, const Tiles& values, int column, const float* shrink, float* out) const {
        constexpr int inner = LANES / T::PAIR, width = BLOCK / T::PAIR;
        Floats sum[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sum[r][c] = load<Floats>(out + r * b.dim + column + c * WIDTH) * shrink[r];
        for (int t = 0; t < TILES; t++)
            for (int i = 0; i < inner; i++)
                for (int c = 0; c < C; c++) {
                    const int64_t at = i * b.dim + column + c * WIDTH;
                    if (FIRST && !SMALL && (WIDTH == LANES || c % 2 == 0)) __builtin_prefetch(values.ahead[t] + at * 4);
                    for (int r = 0; r < R; r++)
                        sum[r][c] = T::multiply_add(sum[r][c], p[r * width + t * inner + i], values.cells[t] + at);
                }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) std::memcpy(out + r * b.dim + column + c * WIDTH, &sum[r][c], sizeof(Floats));
    }

    template <int R, bool FIRST> void weigh_all(const uint32_t* p, const Tiles& values, const float* shrink, float* out) const {
        int column = 0;
        for (; column + COLUMNS * WIDTH <= b.dim; column += COLUMNS * WIDTH)
            weigh<R, COLUMNS, FIRST>(p, values, column, shrink, out);
        for (; column < b.dim; column += WIDTH) weigh<R, 1, FIRST>(p, values, column, shrink, out);
    }

    // Both products of a block, for R rows from row i on; `FIRST` are those that ask for the next block.
    template <int R, bool FIRST> void score_rows(Space& w, int i, const Tiles& keys) const {
        scores<R, FIRST>(w.q.data() + i * (b.dim / T::PAIR), keys, w.s.data() + i * VECTORS);
    }
    template <int R, bool FIRST> void weigh_rows(Space& w, int i, const Tiles& values) const {
        weigh_all<R, FIRST>(w.p.data() + i * (BLOCK / T::PAIR), values, &w.shrink[i], &w.out[i * b.dim]);
    }

    void run(const Task& task, const Task& then, Space& w) const {
        const int rows = task.count * group;
        const int64_t length = b.context_lens[task.row];
        const int64_t start = length - (b.query_start[task.row + 1] - b.query_start[task.row]) + task.first;
        const size_t row_bytes = b.dim * sizeof(Element);
        for (int i = 0; i < rows; i++) {
            const int64_t token = b.query_start[task.row] + task.first + i / group;
            const auto* q = (const Element*)b.q + token * b.q_stride + (task.kv_head * group + i % group) * b.dim;
            std::memcpy((char*)w.q.data() + i * row_bytes, q, row_bytes);
        }
        std::fill_n(w.out.data(), rows * b.dim, 0.0f);
        std::fill_n(w.m.data(), rows, LOWEST);
        std::fill_n(w.l.data(), rows, 0.0f);
        for (int64_t key = task.from; key < task.until; key += BLOCK) {
            const bool more = key + BLOCK < task.until;
            visit({task, key}, more ? Place{task, key + BLOCK} : Place{then, then.from}, start, w);
        }
    }

    // `next` is the block that comes after this one. `start` is the position of the task's first query.
    void visit(const Place& here, const Place& next, int64_t start, Space& w) const {
        const int rows = here.task.count * group;
        const Tiles keys = tiles_at(here, next, false, w);
        int i = 0;
        if (rows >= 4) score_rows<4, true>(w, 0, keys), i = 4;
        else if (rows >= 2) score_rows<2, true>(w, 0, keys), i = 2;
        else score_rows<1, true>(w, 0, keys), i = 1;
        for (; i + 4 <= rows; i += 4) score_rows<4, false>(w, i, keys);
        for (; i + 2 <= rows; i += 2) score_rows<2, false>(w, i, keys);
        for (; i < rows; i++) score_rows<1, false>(w, i, keys);
        for (i = 0; i < rows; i++) soften(here.task, w, i, start + i / group, here.key);
        const Tiles values = tiles_at(here, next, true, w);  // in the place of the keys, where they are widened
        if (rows >= 4) weigh_rows<4, true>(w, 0, values), i = 4;
        else if (rows >= 2) weigh_rows<2, true>(w, 0, values), i = 2;
        else weigh_rows<1, true>(w, 0, values), i = 1;
        for (; i + 4 <= rows; i += 4) weigh_rows<4, false>(w, i, values);
        for (; i + 2 <= rows; i += 2) weigh_rows<2, false>(w, i, values);
        for (; i < rows; i++) weigh_rows<1, false>(w, i, values);
    }

    // One row's scores of a block become weights; `position` is the query's.
    void soften(const Task& task, Space& w, int i, int64_t position, int64_t key) const {
        Floats* s = w.s.data() + i * VECTORS;
        const int64_t oldest = b.window ? std::max<int64_t>(position - b.window + 1, 0) : 0;
        const int64_t newest = std::min(position, task.until - 1);
        const bool whole = oldest <= key && newest >= key + BLOCK - 1;
        Ints lanes;
        for (int j = 0; j < WIDTH; j++) lanes[j] = j;
        Floats most = splat(LOWEST);
        for (int t = 0; t < VECTORS; t++) {
            s[t] *= b.scale;
            if (b.soft_cap)
                for (int j = 0; j < WIDTH; j++) s[t][j] = std::tanh(s[t][j] / b.soft_cap) * b.soft_cap;
            const Ints at = lanes + int32_t(key + t * WIDTH - position);  // relative to the query: 0 is itself
            if (b.slopes) s[t] += __builtin_convertvector(at, Floats) * b.slopes[task.kv_head * group + i % group];
            if (!whole) {
                const Ints seen = (at <= int32_t(newest - position)) & (at >= int32_t(oldest - position));
                s[t] = seen ? s[t] : splat(LOWEST);
            }
            most = s[t] > most ? s[t] : most;
        }
        const float m = std::max(w.m[i], largest(most));
        auto* p = (Element*)(w.p.data() + i * (BLOCK / T::PAIR));
        if (m == LOWEST) {  // nothing seen so far
            w.shrink[i] = 1.0f;
            std::memset(p, 0, BLOCK * sizeof(Element));
            return;
        }
        w.shrink[i] = w.m[i] == m ? 1.0f : std::exp(w.m[i] - m);
        Floats sum = {};
        for (int t = 0; t < VECTORS; t++) {
            const Floats e = exponential(s[t] - m);
            sum += e;
            T::store(p + t * WIDTH, e);
        }
        w.l[i] = w.l[i] * w.shrink[i] + total(sum);
        w.m[i] = m;
    }

    // Divide by the softmax's sum and write. A sink is one more key, with a score and no value.
    void finish(const Task& task, int i, const float* out, float m, float l) const {
        const int head = task.kv_head * group + i % group;
        if (b.sinks) l += std::exp(b.sinks[head] - m);
        const int64_t token = b.query_start[task.row] + task.first + i / group;
        auto* to = (Element*)b.out + (token * b.heads + head) * b.dim;
        for (int d = 0; d < b.dim; d += WIDTH) T::store(to + d, load<Floats>(out + d) / l);
    }

    void plan(std::vector<Task>& tasks, int32_t& partials) const {
        const int most = std::max(1, ROWS / group);
        for (int row = 0; row < b.rows; row++) {
            const int count = b.query_start[row + 1] - b.query_start[row];
            const int64_t length = b.context_lens[row];
            for (int first = 0; first < count; first += most) {
                const int n = std::min(most, count - first);
                const int64_t position = length - count + first, until = position + n;
                const int64_t oldest = b.window ? std::max<int64_t>(position - b.window + 1, 0) : 0;
                const int64_t from = oldest / BLOCK * BLOCK;
                const bool split = count == 1 && (until - 1) / PARTITION > from / PARTITION;
                for (int head = 0; head < b.kv_heads; head++)
                    if (!split)
                        tasks.push_back({row, head, first, n, oldest, from, until, -1, n == count});
                    else
                        for (int64_t part = from; part < until; part = (part / PARTITION + 1) * PARTITION)
                            tasks.push_back({row, head, first, n, oldest, part,
                                             std::min(until, (part / PARTITION + 1) * PARTITION), partials++, false});
            }
        }
    }

    // Add up the partitions of one row and kv head, in their order.
    void combine(const Task* task, int count, const float* kept, int64_t size) const {
        std::vector<float> sum(b.dim);
        for (int i = 0; i < group; i++) {
            float m = LOWEST, l = 0.0f;
            for (int part = 0; part < count; part++) m = std::max(m, kept[(task[part].partial * group + i) * size]);
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (int part = 0; part < count; part++) {
                const float* from = kept + (task[part].partial * group + i) * size;
                if (from[0] == LOWEST) continue;
                const float weight = std::exp(from[0] - m);
                l += from[1] * weight;
                for (int d = 0; d < b.dim; d++) sum[d] += from[2 + d] * weight;
            }
            finish(*task, i, sum.data(), m, l);
        }
    }

    void work(const Task& task, const Task& then, Space& space, float* kept, int64_t size) const {
        if (task.alone) write(task.row, task.kv_head);
        run(task, then, space);
        for (int i = 0; i < task.count * group; i++) {
            if (task.partial < 0) {
                finish(task, i, &space.out[i * b.dim], space.m[i], space.l[i]);
                continue;
            }
            float* to = kept + (task.partial * group + i) * size;
            to[0] = space.m[i];
            to[1] = space.l[i];
            std::memcpy(to + 2, &space.out[i * b.dim], b.dim * sizeof(float));
        }
    }

    void attend() const {
        std::vector<Task> tasks;
        int32_t partials = 0;
        plan(tasks, partials);
        const int64_t size = b.dim + 2;
        std::vector<float> kept(int64_t(partials) * group * size);
        int most = 0;
        for (const Task& task : tasks) most = std::max(most, task.count * group);
        std::vector<const Task*> shared;  // the first of a row and kv head, where there are several
        for (const Task& task : tasks)
            if (!task.alone && task.first == 0 && task.from == task.oldest / BLOCK * BLOCK) shared.push_back(&task);
        std::atomic<size_t> taken{0};
#pragma omp parallel
        {
            if (!shared.empty()) {
#pragma omp for schedule(static)
                for (size_t i = 0; i < shared.size(); i++) write(shared[i]->row, shared[i]->kv_head);
            }  // where all wait for each other
            Space space(b, most);
            for (size_t at = taken++; at < tasks.size();) {  // a thread knows its next task, and asks for its memory early
                const size_t then = taken++;
                work(tasks[at], tasks[std::min(then, tasks.size() - 1)], space, kept.data(), size);
                at = then;
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

    static void keep(Stored* to, const Element* from) {  // a vector, as the cache has it
        if constexpr (SMALL) {
            const Words bytes = to_eight<S>(T::read(from));
            for (int j = 0; j < WIDTH; j++) to[j] = Stored(bytes[j]);
        } else {
            std::memcpy(to, from, WIDTH * sizeof(Element));
        }
    }

    // The new keys and values of a row. A tile's values are zeroed when its first key is written: what an earlier owner left there, NaN included, must not
    // come back as 0 * NaN.
    void write(int row, int kv) const {
        constexpr int PAIR = T::PAIR;
        for (int64_t token = b.query_start[row]; token < b.query_start[row + 1]; token++) {
            const int64_t block = b.slots[token] / b.block_size, offset = b.slots[token] % b.block_size;
            auto* base = (Stored*)b.cache + block * b.cache_stride + offset / LANES * LANES * b.dim;
            auto* keys = base + kv * head;
            auto* values = base + (b.kv_heads + kv) * head;
            const int at = offset % LANES;
            const auto* k = (const Element*)b.k + token * b.k_stride + kv * b.dim;
            const auto* v = (const Element*)b.v + token * b.v_stride + kv * b.dim;
            if (at == 0) std::memset(values, 0, LANES * b.dim * sizeof(Stored));
            for (int d = 0; d < b.dim; d += WIDTH) {
                Stored key[WIDTH], value[WIDTH];
                keep(key, k + d);
                keep(value, v + d);
                for (int j = 0; j < WIDTH; j++) {
                    keys[((d + j) / PAIR * LANES + at) * PAIR + j % PAIR] = key[j];
                    values[(at / PAIR * b.dim + d + j) * PAIR + at % PAIR] = value[j];
                }
            }
        }
    }
};

template <class T, class S> void attend(const Batch& batch) {
    Attention<T, S>(batch).attend();
}

template <class T> void attend(const Batch& batch) {
    if (batch.eights == 0) return attend<T, T>(batch);
    if (batch.eights == 1) return attend<T, E4M3>(batch);
    attend<T, E5M2>(batch);
}

}  // namespace

extern "C" {

void ferrule_attend_f32(const Batch* batch) { attend<F32>(*batch); }

void ferrule_attend_bf16(const Batch* batch) { attend<BF16>(*batch); }
}
