// Products with bfloat16 weights on CPUs: y = x Wᵀ + b, for one row or hundreds, sums in float32.
//
// Packed weights are read once, front to back. They are cut into panels of 64 channels (the last one may have 16, 32 or
// 48); a panel of C channels is [inputs / 2][C][2]: neighbouring inputs of a channel lie together, as both AVX512-BF16 and
// the tile registers read them; for these it is [inputs / 32][C / 16][16][16][2], so that what one holds lies together.
// Inputs are rounded up to 32 with zeros.
//
// Sums go over the inputs in their order, whatever other rows there are, so a row has the same bits alone and in any batch.
#include <memory>
#include <thread>
#include <vector>
#include "panels.h"
#include "recording.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// A tile has up to ROWS rows and COLUMNS vectors of channels, ALONE for a single row: its sums stay in registers.
#if TILES
constexpr int ROWS = 32;
#elif defined(__AVX512BF16__)
constexpr int ROWS = 6, COLUMNS = 4, ALONE = 4;
#elif defined(__AVX512F__)
constexpr int ROWS = 5, COLUMNS = 4, ALONE = 4;
#else
constexpr int ROWS = BY_HAND ? 6 : 4, COLUMNS = 2, ALONE = 8;
#endif
// Numbers of the rows that are multiplied: where nothing multiplies bfloat16, they are widened once, before the products.
#if TILES || defined(__AVX512BF16__)
typedef uint16_t Cell;
#else
typedef float Cell;
#endif
constexpr bool WIDENED = sizeof(Cell) == sizeof(float);
constexpr int STEP = 32;                  // inputs are rounded up to it: those of a tile register
constexpr int SQUARE = STEP / 2 * LANES;  // pairs of weights in one
// Inputs of a panel that all rows take before the next: so many that L2 holds them, 128 KiB, and of one strip, by tile
// registers, so few that they come just before they are used.
constexpr int64_t BLOCK = 1024, SHORT = TILES ? 256 : 1 << 30;
constexpr int64_t CHUNK = (256 + ROWS - 1) / ROWS * ROWS;  // rows of one task, at most
constexpr int64_t ORDERED = 64;           // rows from which on they are put in the order of tile registers first
constexpr int64_t SOME = 16;              // rows that a thread orders or widens at a time
constexpr int64_t SMALL = 1 << 17;        // multiplications that one thread does sooner than two

}  // namespace

extern "C" {

// As `_Matrix` in dense.py. `k` is rounded up to 32, `n` is not.
struct DenseMatrix {
    uint32_t* weights;
    const float* bias;  // [n], rounded up to a multiple of 16, or null
    int64_t n, k;
};

}

namespace {

typedef DenseMatrix Matrix;

// One of several products.
struct Job {
    const Matrix* w;
    const uint16_t* x;
    void* y;
    int64_t m;
};

inline const uint32_t* panel_at(const Matrix& w, int64_t panel) { return w.weights + panel * PANEL * (w.k / 2); }

// Where in a panel of so many channels a pair of inputs of one of them is, in the order for tile registers or the
// other.
inline int64_t place(int64_t channels, int64_t pair, int64_t channel, bool tiles = TILES) {
    if (!tiles) return pair * channels + channel;
    return pair / 16 * 16 * channels + channel / LANES * SQUARE + pair % 16 * LANES + channel % LANES;
}

// Where rows of x are: `stride` from one to the next of 16, and `hop` from 32 inputs to the next. 16 rows are 16 * k.
struct Rows {
    const Cell* x;
    int64_t k, stride, hop;

    const Cell* at(int64_t row, int64_t input) const {
        return x + row / 16 * 16 * k + row % 16 * stride + input / STEP * hop;
    }
};

// A part of a product: rows of x, from `x` on, times `inputs` of a panel; `sums` [rows][PANEL] are added to, or begun
// where `fresh`. `soon` are the rows that come next, in the order of tile registers, or null.
struct Part {
    const uint32_t* weights;
    int64_t channels, inputs;
    const Rows& rows;
    const Cell* x;
    float* sums;
    bool fresh;
    Ahead ahead;
    const Cell* soon;
};

#if TILES

// 16 rows, and with NEXT up to 16 more, times 16 channels, and with TWO 16 more, from `column` on.
template <bool NEXT, bool TWO> void tile(const Part& part, int64_t column) {
    const int64_t wide = part.channels / LANES * SQUARE, hop = part.rows.hop, row_bytes = part.rows.stride * 2;
    float *sums = part.sums + column, *more = sums + 16 * PANEL;
    const uint32_t* from = part.weights + column / LANES * SQUARE;
    const uint16_t *x = part.x, *y = x + 16 * part.rows.k;
    const Ahead ask = part.ahead;
    const char* ahead = ask.from(column, part.inputs / 2);
    const char* soon = part.soon && column ? (const char*)(part.soon + 16 * part.rows.k) : (const char*)part.soon;
    if (part.fresh) {
        TILE_ZERO(0);
        if (TWO) TILE_ZERO(1);
        if (NEXT) TILE_ZERO(2);
        if (NEXT && TWO) TILE_ZERO(3);
    } else {
        TILE_LOAD(0, sums, PANEL * 4);
        if (TWO) TILE_LOAD(1, sums + LANES, PANEL * 4);
        if (NEXT) TILE_LOAD(2, more, PANEL * 4);
        if (NEXT && TWO) TILE_LOAD(3, more + LANES, PANEL * 4);
    }
    for (int64_t i = 0, steps = part.inputs / STEP; i < steps; i++, from += wide, x += hop, y += hop) {
        TILE_LOAD(4, x, row_bytes);
        if (NEXT) TILE_LOAD(5, y, row_bytes);
        TILE_LOAD(6, from, LANES * 4);
        if (TWO) TILE_LOAD(7, from + SQUARE, LANES * 4);
        TILE_DOT_BF16(0, 4, 6);
        if (NEXT) TILE_DOT_BF16(2, 5, 6);
        if (ask.due(i)) fetch<2 * LANES * STEP * 2>(ahead);
        if (part.soon) fetch<16 * STEP * 2>(soon);
        if (TWO) TILE_DOT_BF16(1, 4, 7);
        if (NEXT && TWO) TILE_DOT_BF16(3, 5, 7);
    }
    TILE_STORE(0, sums, PANEL * 4);
    if (TWO) TILE_STORE(1, sums + LANES, PANEL * 4);
    if (NEXT) TILE_STORE(2, more, PANEL * 4);
    if (NEXT && TWO) TILE_STORE(3, more + LANES, PANEL * 4);
}

void multiply_part(const Part& part, int rows, Tiles& tiles) {
    tiles.hold(std::min(rows, 16), std::max(rows - 16, 0));
    for (int64_t column = 0; column < part.channels; column += 2 * LANES)
        if (column + 2 * LANES <= part.channels)
            rows > 16 ? tile<true, true>(part, column) : tile<false, true>(part, column);
        else
            rows > 16 ? tile<true, false>(part, column) : tile<false, false>(part, column);
}

#else

#if BY_HAND
// As `tile` of 6 rows times 2 vectors, in which compilers would keep sums in memory: these, two vectors of weights, a number
// of a row and the mask take all 16 registers.
template <bool FAR> inline void tile_of_six(const Part& part, int64_t column) {
    const int64_t wide = part.channels, stride = part.rows.stride;
    const uint32_t* from = part.weights + column;
    const Cell *x = part.x, *y = x + 3 * stride;
    float* sums = part.sums + column;
    const char* ahead = part.ahead.from(column, part.inputs / 2);
    const Words upper = Words{} + 0xffff0000u;
    const auto held = [&](int row, int vector) {
        return part.fresh ? Floats{} : load<Floats>(sums + row * PANEL + vector * WIDTH);
    };
    Floats a0 = held(0, 0), b0 = held(1, 0), c0 = held(2, 0), d0 = held(3, 0), e0 = held(4, 0), f0 = held(5, 0);
    Floats a1 = held(0, 1), b1 = held(1, 1), c1 = held(2, 1), d1 = held(3, 1), e1 = held(4, 1), f1 = held(5, 1);
    for (int64_t i = 0; i < part.inputs; i += 2, from += wide, x += 2, y += 2) {
        if (part.ahead.due(i / 2)) fetch<2 * WIDTH * 4, FAR>(ahead);
        asm("vmovdqu (%[from]), %%ymm12\n"
            "vmovdqu 32(%[from]), %%ymm13\n"
            "vpslld $16, %%ymm12, %%ymm12\n"
            "vpslld $16, %%ymm13, %%ymm13\n" ADD_SIX_ROWS("0")
            "vpand (%[from]), %[upper], %%ymm12\n"
            "vpand 32(%[from]), %[upper], %%ymm13\n" ADD_SIX_ROWS("4")
            : [a0] "+x"(a0), [b0] "+x"(b0), [c0] "+x"(c0), [d0] "+x"(d0), [e0] "+x"(e0), [f0] "+x"(f0),
              [a1] "+x"(a1), [b1] "+x"(b1), [c1] "+x"(c1), [d1] "+x"(d1), [e1] "+x"(e1), [f1] "+x"(f1)
            : [from] "r"(from), [x] "r"(x), [y] "r"(y), [stride] "r"(stride * 4), [upper] "x"(upper)
            : "xmm12", "xmm13", "xmm14", "memory");
    }
    const Floats all[6][2] = {{a0, a1}, {b0, b1}, {c0, c1}, {d0, d1}, {e0, e1}, {f0, f1}};
    for (int r = 0; r < 6; r++)
        for (int c = 0; c < 2; c++) store(sums + r * PANEL + c * WIDTH, all[r][c]);
}
#endif

// R rows times C vectors of channels, beginning with `column`.
template <bool FAR, int R, int C> inline void tile(const Part& part, int64_t column) {
    const int64_t wide = part.channels, stride = part.rows.stride;
    const uint32_t* from = part.weights + column;
    const Cell* x = part.x;
    float* sums = part.sums + column;
    const char* ahead = part.ahead.from(column, part.inputs / 2);
    Floats sum[R][C] = {};
    if (!part.fresh)
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sum[r][c] = load<Floats>(sums + r * PANEL + c * WIDTH);
    for (int64_t i = 0; i < part.inputs; i += 2, from += wide, x += 2) {
        part.ahead.ask<C * WIDTH * 4, FAR>(i / 2, ahead);
#if defined(__AVX512BF16__)
        __m512bh b[C];
        for (int c = 0; c < C; c++) b[c] = (__m512bh)_mm512_loadu_si512(from + c * WIDTH);
        for (int r = 0; r < R; r++) {
            const auto a = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + r * stride));
            for (int c = 0; c < C; c++) sum[r][c] = (Floats)_mm512_dpbf16_ps((__m512)sum[r][c], b[c], a);
        }
#else
        Floats even[C], odd[C];
        for (int c = 0; c < C; c++) {
            const Words both = load<Words>(from + c * WIDTH);
            even[c] = (Floats)(both << 16);
            odd[c] = (Floats)(both & 0xffff0000u);
        }
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < C; c++) sum[r][c] += x[r * stride] * even[c];
            for (int c = 0; c < C; c++) sum[r][c] += x[r * stride + 1] * odd[c];
        }
#endif
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(sums + r * PANEL + c * WIDTH, sum[r][c]);
}

template <bool FAR, int R> void strip(const Part& part) {
    constexpr int many = R == 1 ? ALONE : COLUMNS;
    int64_t column = 0;
    for (; column + many * WIDTH <= part.channels; column += many * WIDTH) {
#if BY_HAND
        if constexpr (R == 6) {
            tile_of_six<FAR>(part, column);
            continue;
        }
#endif
        tile<FAR, R, many>(part, column);
    }
    for (; column < part.channels; column += WIDTH) tile<FAR, R, 1>(part, column);
}

template <bool FAR> void multiply_part(const Part& part, int rows) {
    switch (rows) {
        case 1: return strip<FAR, 1>(part);
        case 2: return strip<FAR, 2>(part);
        case 3: return strip<FAR, 3>(part);
        case 4: return strip<FAR, 4>(part);
        case 5: return strip<FAR, 5>(part);
#if BY_HAND || defined(__AVX512BF16__)
        case 6: return strip<FAR, 6>(part);
#endif
    }
}

void multiply_part(const Part& part, int rows, Tiles&) {
    part.ahead.far ? multiply_part<true>(part, rows) : multiply_part<false>(part, rows);
}
#endif

template <class Y> void finish(const Matrix& w, const float* sums, int64_t panel, int64_t row, int64_t count, Y* y) {
    const int64_t first = panel * PANEL, channels = std::min<int64_t>(PANEL, w.n - first);
    for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < channels; c += WIDTH) {
            Floats sum = load<Floats>(sums + i * PANEL + c);
            if (w.bias) sum += load<Floats>(w.bias + first + c);
            store(y + (row + i) * w.n + first + c, sum, channels - c);
        }
}

// Rows [row, row + count) times a panel: a block of its inputs comes once from memory, for all of them.
template <class Y>
void multiply_panel(const Matrix& w, const Rows& x, Y* y, int64_t panel, int64_t row, int64_t count, Tiles& tiles) {
    alignas(64) float sums[CHUNK * PANEL];
    const int64_t channels = channels_of(w.n, panel), block = count <= ROWS ? SHORT : BLOCK;
    const int64_t strips = (count + ROWS - 1) / ROWS;
    const int64_t rows = TILES ? ROWS : (count + strips - 1) / strips;  // of a strip
    const uint32_t* from = panel_at(w, panel);
    for (int64_t k = 0; k < w.k; k += block) {
        const int64_t inputs = std::min(block, w.k - k);
        const uint32_t *begin = from + k / 2 * channels, *end = begin + inputs / 2 * channels;
        Ahead ahead = ahead_of(strips, SLICED && count > 1, begin, end);
        for (int64_t i = 0; i < count; i += rows, ahead = ahead.next(channels, inputs / 2)) {
            const bool last = i + rows >= count, ordered = x.hop > STEP;
            const Cell *here = x.at(row + i, k), *soon = ordered && !last ? x.at(row + i + rows, k) : nullptr;
            const Part part = {begin, channels, inputs, x, here, sums + i * PANEL, k == 0, ahead, soon};
            multiply_part(part, int(std::min(rows, count - i)), tiles);
        }
    }
    finish(w, sums, panel, row, count, y);
}

// This much memory of the calling thread, until its next call: it grows to the largest product.
inline void* scratch(size_t bytes) {
    static thread_local std::unique_ptr<char[]> memory;
    static thread_local size_t size = 0;
    if (bytes > size) {
        memory.reset();
        memory.reset(new char[(size = bytes) + 63]);
        huge_pages(memory.get(), bytes);
    }
    return (void*)(((uintptr_t)memory.get() + 63) & ~uintptr_t(63));
}

// Rows of x, in `memory` where they are to be in the order of tile registers, 16 of them, 32 inputs of each, or are widened.
inline Rows rows_of(const uint16_t* x, int64_t k, bool ordered, void* memory) {
    return {(const Cell*)(memory ? memory : x), k, ordered ? STEP : k, ordered ? 16 * STEP : STEP};
}

void prepare(const uint16_t* x, const Rows& to, int64_t row, int64_t end) {
    for (int64_t k = 0; k < to.k; k += STEP)
        for (int64_t i = row; i < end; i++) {
            auto* cells = (Cell*)to.at(i, k);
            const uint16_t* from = x + i * to.k + k;
            if (WIDENED)
                for (int j = 0; j < STEP; j += WIDTH) store((float*)cells + j, widen(from + j));
            else
                std::memcpy(cells, from, STEP * 2);
        }
}

template <class Y> void multiply(const Matrix& w, const uint16_t* x, Y* y, int64_t m) {
    const int64_t panels = panels_of(w.n), chunk = chunk_of(m, CHUNK, ROWS), chunks = (m + chunk - 1) / chunk;
    const bool ordered = TILES && m >= ORDERED;
    const int64_t parts = ordered || WIDENED ? (m + SOME - 1) / SOME : 0;
    const Rows rows = rows_of(x, w.k, ordered, parts ? scratch(parts * SOME * w.k * sizeof(Cell)) : nullptr);
    Shares shares(panels * chunks, thread_count()), preparing(parts, thread_count());
    std::atomic<int64_t> ready(0);
#pragma omp parallel if (m * w.n * w.k > SMALL)
    {
        const int thread = thread_number();
        for (int64_t part; (part = preparing.next(thread)) >= 0; ready++)
            prepare(x, rows, part * SOME, std::min(m, part * SOME + SOME));
        while (ready.load(std::memory_order_acquire) < parts) std::this_thread::yield();
        Tiles tiles;
        for (int64_t task; (task = shares.next(thread)) >= 0;) {
            const int64_t row = task / panels * chunk;
            multiply_panel(w, rows, y, task % panels, row, std::min(chunk, m - row), tiles);
        }
    }
}

// Products of fewer rows than are ordered, each of which a thread multiplies by a panel at a time.
template <class Y> void multiply_few(const std::vector<Job>& jobs) {
    const Starts panels(jobs, [](const Job& job) { return job.m ? panels_of(job.w->n) : 0; });
    const Starts cells(jobs, [](const Job& job) { return WIDENED ? job.m * job.w->k : 0; });
    int64_t work = 0;
    for (const Job& job : jobs) work += job.m * job.w->n * job.w->k;
    auto* memory = cells.total() ? (Cell*)scratch(cells.total() * sizeof(Cell)) : nullptr;
    const auto rows = [&](int64_t i) {
        return rows_of(jobs[i].x, jobs[i].w->k, false, memory ? memory + cells.first(i) : nullptr);
    };
    const int64_t parts = memory ? int64_t(jobs.size()) : 0;
    Shares shares(panels.total(), thread_count()), preparing(parts, thread_count());
    std::atomic<int64_t> ready(0);
#pragma omp parallel if (work > SMALL)
    {
        const int thread = thread_number();
        for (int64_t part; (part = preparing.next(thread)) >= 0; ready++)
            prepare(jobs[part].x, rows(part), 0, jobs[part].m);
        while (ready.load(std::memory_order_acquire) < parts) std::this_thread::yield();
        Tiles tiles;
        for (int64_t task; (task = shares.next(thread)) >= 0;) {
            const int64_t owner = panels.owner(task);
            const Job& job = jobs[owner];
            multiply_panel(*job.w, rows(owner), (Y*)job.y, task - panels.first(owner), 0, job.m, tiles);
        }
    }
}

void multiply_one(const Matrix& w, const uint16_t* x, void* y, int64_t m, int32_t type) {
    type ? multiply(w, x, (uint16_t*)y, m) : multiply(w, x, (float*)y, m);
}

// `real` rows of `inputs` numbers as a panel of so many channels, those that pad it zero.
void pack_panel(const Matrix& w, const uint16_t* rows, int64_t inputs, int64_t channels, int64_t real, uint32_t* to) {
    const int64_t pairs = inputs / 2 / 8 * 8, whole = real / 8 * 8, step = place(channels, 1, 0);
    if (inputs < w.k || real < channels) std::fill(to, to + channels * (w.k / 2), 0u);
    for (int64_t c = 0; c < whole; c += LANES)  // so that lines are written whole
        for (int64_t i = 0; i < pairs; i += 8)
            for (int64_t d = c; d < std::min<int64_t>(whole, c + LANES); d += 8)
                transpose(rows + d * inputs + 2 * i, inputs, to + place(channels, i, d), step);
    for (int64_t c = 0; c < real; c++)
        for (int64_t i = c < whole ? pairs : 0; 2 * i < inputs; i++)
            std::memcpy(to + place(channels, i, c), rows + c * inputs + 2 * i, std::min<int64_t>(2, inputs - 2 * i) * 2);
}

// Rows of the weights as they were, up to the first id that has none: its place, else `count`.
int64_t copy_rows(const Matrix& w, const int64_t* ids, int64_t count, uint16_t* to, int64_t inputs) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= w.n) return i;
#pragma omp parallel for schedule(static) if (count * w.k > SMALL)
    for (int64_t i = 0; i < count; i++) {
        const int64_t panel = ids[i] / PANEL, channels = channels_of(w.n, panel);
        const uint32_t* from = panel_at(w, panel);
        for (int64_t k = 0; k < inputs; k += 2) {
            const int64_t left = std::min<int64_t>(2, inputs - k);
            std::memcpy(to + i * inputs + k, from + place(channels, k / 2, ids[i] % PANEL), left * sizeof *to);
        }
    }
    return count;
}

}  // namespace

extern "C" {

// x bfloat16 [m, k] to y [m, n], both contiguous; `type` of y is 0 for float32, 1 for bfloat16.
void ferrule_dense(const DenseMatrix* w, const uint16_t* x, void* y, int64_t m, int32_t type) {
    recorded([=] { multiply_one(*w, x, y, m, type); });
}

// Products of x, bfloat16 [rows, k], with several matrices of one shape: the first has the first counts[0] rows, the next one
// the counts[1] after them, and so on; with `shared`, x is one row, and is each of them. The counts are read when it is
// computed, also by a recording. y [sum of counts, n]. Products of many rows come one after the other, the others
// together, so that threads have enough to do and meet once. A row has the same bits as by `ferrule_dense`.
void ferrule_dense_bank(const DenseMatrix* const* matrices, const int64_t* counts, int64_t count, const uint16_t* x, void* y,
                        int32_t shared, int32_t type) {
    recorded([=] {
        std::vector<Job> few;
        visit_counts(counts, count, shared, [&](int64_t i, int64_t row, int64_t m) {
            const Matrix& w = *matrices[i];
            const uint16_t* from = x + (shared ? 0 : row * w.k);
            void* to = (char*)y + row * w.n * (type ? 2 : 4);
            if (m < ORDERED)
                few.push_back({&w, from, to, m});
            else
                multiply_one(w, from, to, m, type);
        });
        type ? multiply_few<uint16_t>(few) : multiply_few<float>(few);
    });
}

// What multiplies: 0 plain code, 1 vectors of float32, 2 pairs of bfloat16, 3 tile registers.
int ferrule_dense_unit() {
#if TILES
    return 3;
#elif defined(__AVX512BF16__)
    return 2;
#elif defined(__AVX2__)
    return 1;
#else
    return 0;
#endif
}

// Pack weights [n, inputs] into `matrix->weights`, which may be the same memory where no panel grows by it: n is a multiple
// of 16, and inputs of 32.
void ferrule_dense_pack(const DenseMatrix* matrix, const uint16_t* weights, int64_t inputs) {
    const DenseMatrix& w = *matrix;
    const int64_t panels = panels_of(w.n);
    const bool in_place = (const void*)weights == w.weights;
#pragma omp parallel
    {
        std::vector<uint16_t> kept(in_place ? PANEL * inputs : 0);
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < panels; panel++) {
            const int64_t channels = channels_of(w.n, panel), real = std::min<int64_t>(PANEL, w.n - panel * PANEL);
            const uint16_t* rows = weights + panel * PANEL * inputs;
            uint32_t* to = w.weights + panel * PANEL * (w.k / 2);
            if (in_place) rows = (const uint16_t*)std::memcpy(kept.data(), rows, real * inputs * 2);
            pack_panel(w, rows, inputs, channels, real, to);
        }
    }
}

// Put weights that were packed where there are tile registers into the order of where there are none, or the reverse:
// into that of here.
void ferrule_dense_turn(const DenseMatrix* matrix) {
    const DenseMatrix& w = *matrix;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels_of(w.n); panel++) {
        const int64_t channels = channels_of(w.n, panel);
        uint32_t* to = w.weights + panel * PANEL * (w.k / 2);
        const std::vector<uint32_t> from(to, to + channels * (w.k / 2));
        for (int64_t i = 0; i < w.k / 2; i++)
            for (int64_t c = 0; c < channels; c++) to[place(channels, i, c)] = from[place(channels, i, c, !TILES)];
    }
}

// Multiply small numbers, whose sums are exact, by the instructions and by hand. 0: the tile registers are right, or are not
// used here.
int ferrule_check_tiles() {
#if TILES
    constexpr int rows = 24, inputs = 64;
    std::vector<float> x(rows * inputs), w(PANEL * inputs), y(rows * PANEL);
    std::vector<uint16_t> halves(rows * inputs), weights(PANEL * inputs);
    std::vector<uint32_t> packed(PANEL * inputs / 2);
    const auto half = [](float number) {
        uint32_t bits;
        std::memcpy(&bits, &number, 4);
        return uint16_t(bits >> 16);
    };
    for (size_t i = 0; i < x.size(); i++) halves[i] = half(x[i] = float(int(i * 7 % 31) - 15));
    for (size_t i = 0; i < w.size(); i++) weights[i] = half(w[i] = float(int(i * 5 % 29) - 14));
    const Matrix matrix = {packed.data(), nullptr, PANEL, inputs};
    ferrule_dense_pack(&matrix, weights.data(), inputs);
    multiply(matrix, halves.data(), y.data(), rows);
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < PANEL; n++) {
            float sum = 0.0f;
            for (int k = 0; k < inputs; k++) sum += x[m * inputs + k] * w[n * inputs + k];
            if (y[m * PANEL + n] != sum) return 1;
        }
    alignas(64) int8_t a[16][64];
    alignas(64) uint8_t b[16][64];
    alignas(64) int32_t sums[16][16];
    for (int i = 0; i < 1024; i++) a[i / 64][i % 64] = int8_t(i * 37), b[i / 64][i % 64] = uint8_t(i * 91);
    Tiles tiles;
    tiles.hold(16, 0);
    TILE_ZERO(0);
    TILE_LOAD(4, a, 64);
    TILE_LOAD(6, b, 64);
    TILE_DOT_INT8(0, 4, 6);
    TILE_STORE(0, sums, 64);
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            int32_t sum = 0;
            for (int k = 0; k < 64; k++) sum += a[m][k] * b[k / 4][4 * n + k % 4];
            if (sums[m][n] != sum) return 1;
        }
#endif
    return 0;
}

// Rows of the weights as they were, [count, inputs]. Returns the place of the first id that has none, else `count`.
int64_t ferrule_dense_rows(const DenseMatrix* matrix, const int64_t* ids, int64_t count, uint16_t* to, int64_t inputs) {
    const auto copy = [=] { return copy_rows(*matrix, ids, count, to, inputs); };
    if (recording) recording->push_back(copy);
    return copy();
}
}
