// Products with bfloat16 weights on CPUs: y = x Wᵀ + b, for one row or hundreds, sums in float32.
//
// Packed weights are read once, front to back. They are cut into panels of 64 channels (the last one may have 16, 32 or
// 48); a panel of C channels is [inputs / 2][C][2]: neighbouring inputs of a channel lie together, as both AVX512-BF16 and
// the tile registers read them. Inputs are rounded up to 32 with zeros.
//
// Sums go over the inputs in their order, whatever other rows there are, so a row has the same bits alone and in any batch.
#include <vector>
#include "panels.h"
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
constexpr int ROWS = 4, COLUMNS = 2, ALONE = 4;
#endif
constexpr int STEP = 32;                  // inputs are rounded up to it: those of a tile register
// Inputs of a panel that all rows take before the next: so many that L2 holds them, 128 KiB, and of one strip, by tile
// registers, so few that they come just before they are used.
constexpr int64_t BLOCK = 1024, SHORT = TILES ? 256 : 1 << 30;
constexpr int64_t CHUNK = 256 / ROWS * ROWS;  // rows of one task
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

inline const uint32_t* panel_at(const Matrix& w, int64_t panel) { return w.weights + panel * PANEL * (w.k / 2); }

// A part of a product: `rows` of x, beginning with `x` [.., stride], times `inputs` of a panel; `sums` [rows][PANEL] are
// added to, or begun where `fresh`.
struct Part {
    const uint32_t* weights;
    int64_t channels, inputs;
    const uint16_t* x;
    int64_t stride;
    float* sums;
    bool fresh;
    Ahead ahead;
};

#if TILES

// Up to 32 rows times 32 channels, or the 16 that are left.
void multiply_part(const Part& part, int rows, Tiles& tiles) {
    const int first = std::min(rows, 16), next = rows - first;
    const int64_t wide = part.channels * 4, row_bytes = part.stride * 2, sum_bytes = PANEL * 4;
    tiles.hold(first, next);
    for (int64_t column = 0; column < part.channels; column += 2 * LANES) {
        const bool two = column + 2 * LANES <= part.channels;
        float *sums = part.sums + column, *more = sums + 16 * PANEL;
        const uint32_t* from = part.weights + column;
        const uint16_t *x = part.x, *y = x + 16 * part.stride;
        const char* ahead = part.ahead.from(column, part.inputs / 2);
        if (part.fresh) {
            TILE_ZERO(0);
            if (two) TILE_ZERO(1);
            if (next) TILE_ZERO(2);
            if (next && two) TILE_ZERO(3);
        } else {
            TILE_LOAD(0, sums, sum_bytes);
            if (two) TILE_LOAD(1, sums + LANES, sum_bytes);
            if (next) TILE_LOAD(2, more, sum_bytes);
            if (next && two) TILE_LOAD(3, more + LANES, sum_bytes);
        }
        for (int64_t i = 0; i < part.inputs; i += STEP, from += STEP / 2 * part.channels, x += STEP, y += STEP) {
            TILE_LOAD(4, x, row_bytes);
            TILE_LOAD(6, from, wide);
            if (part.ahead.due(i / STEP)) fetch<2 * LANES * STEP * 2>(ahead);
            TILE_DOT_BF16(0, 4, 6);
            if (next) TILE_LOAD(5, y, row_bytes);
            if (next) TILE_DOT_BF16(2, 5, 6);
            if (!two) continue;
            TILE_LOAD(7, from + LANES, wide);
            TILE_DOT_BF16(1, 4, 7);
            if (next) TILE_DOT_BF16(3, 5, 7);
        }
        TILE_STORE(0, sums, sum_bytes);
        if (two) TILE_STORE(1, sums + LANES, sum_bytes);
        if (next) TILE_STORE(2, more, sum_bytes);
        if (next && two) TILE_STORE(3, more + LANES, sum_bytes);
    }
}

#else

// R rows times C vectors of channels, beginning with `column`.
template <int R, int C> inline void tile(const Part& part, int64_t column) {
    const int64_t wide = part.channels, stride = part.stride;
    const uint32_t* from = part.weights + column;
    const uint16_t* x = part.x;
    float* sums = part.sums + column;
    const char* ahead = part.ahead.from(column, part.inputs / 2);
    Floats sum[R][C] = {};
    if (!part.fresh)
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sum[r][c] = load<Floats>(sums + r * PANEL + c * WIDTH);
    for (int64_t i = 0; i < part.inputs; i += 2, from += wide, x += 2) {
        if (part.ahead.due(i / 2)) fetch<C * WIDTH * 4>(ahead);
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
            const Words both = Words{} + load<uint32_t>(x + r * stride);
            const Floats first = (Floats)(both << 16), second = (Floats)(both & 0xffff0000u);
            for (int c = 0; c < C; c++) sum[r][c] += first * even[c];
            for (int c = 0; c < C; c++) sum[r][c] += second * odd[c];
        }
#endif
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(sums + r * PANEL + c * WIDTH, sum[r][c]);
}

template <int R> void strip(const Part& part) {
    constexpr int many = R == 1 ? ALONE : COLUMNS;
    int64_t column = 0;
    for (; column + many * WIDTH <= part.channels; column += many * WIDTH) tile<R, many>(part, column);
    for (; column < part.channels; column += WIDTH) tile<R, 1>(part, column);
}

void multiply_part(const Part& part, int rows, Tiles&) {
    switch (rows) {
        case 1: return strip<1>(part);
        case 2: return strip<2>(part);
        case 3: return strip<3>(part);
        case 4: return strip<4>(part);
#if defined(__AVX512F__)
        case 5: return strip<5>(part);
#endif
#if defined(__AVX512BF16__)
        case 6: return strip<6>(part);
#endif
    }
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
void multiply_panel(const Matrix& w, const uint16_t* x, Y* y, int64_t panel, int64_t row, int64_t count, Tiles& tiles) {
    alignas(64) float sums[CHUNK * PANEL];
    const int64_t channels = channels_of(w.n, panel), block = count <= ROWS ? SHORT : BLOCK;
    const int64_t strips = (count + ROWS - 1) / ROWS;
    const int64_t rows = TILES ? ROWS : (count + strips - 1) / strips;  // of a strip
    const uint32_t* from = panel_at(w, panel);
    for (int64_t k = 0; k < w.k; k += block) {
        const int64_t inputs = std::min(block, w.k - k);
        const uint32_t *begin = from + k / 2 * channels, *end = begin + inputs / 2 * channels;
        Ahead ahead = ahead_of(strips, end);
        for (int64_t i = 0; i < count; i += rows, ahead = ahead.next(channels, inputs / 2)) {
            const Part part = {begin, channels, inputs, x + (row + i) * w.k + k, w.k, sums + i * PANEL, k == 0, ahead};
            multiply_part(part, int(std::min(rows, count - i)), tiles);
        }
    }
    finish(w, sums, panel, row, count, y);
}

template <class Y> void multiply(const Matrix& w, const uint16_t* x, Y* y, int64_t m) {
    const int64_t panels = panels_of(w.n), chunks = (m + CHUNK - 1) / CHUNK;
    Shares shares(panels * chunks, thread_count());
#pragma omp parallel if (m * w.n * w.k > SMALL)
    {
        Tiles tiles;
        for (int64_t task; (task = shares.next(thread_number())) >= 0;) {
            const int64_t row = task / panels * CHUNK;
            multiply_panel(w, x, y, task % panels, row, std::min(CHUNK, m - row), tiles);
        }
    }
}

}  // namespace

extern "C" {

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
    if ((const void*)weights != w.weights) huge_pages(w.weights, (w.n + LANES - 1) / LANES * LANES * w.k * 2);
#pragma omp parallel
    {
        std::vector<uint32_t> rows(PANEL * (w.k / 2));
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < panels; panel++) {
            const int64_t channels = channels_of(w.n, panel), real = std::min<int64_t>(PANEL, w.n - panel * PANEL);
            std::fill(rows.begin(), rows.end(), 0u);
            for (int64_t c = 0; c < real; c++)
                std::memcpy(&rows[c * (w.k / 2)], weights + (panel * PANEL + c) * inputs, inputs * 2);
            uint32_t* to = w.weights + panel * PANEL * (w.k / 2);
            for (int64_t k = 0; k < w.k / 2; k += 16)  // squares of 16, which stay in the nearest cache
                for (int64_t c = 0; c < channels; c += LANES)
                    for (int64_t i = 0; i < 16; i++)
                        for (int64_t j = 0; j < LANES; j++)
                            to[(k + i) * channels + c + j] = rows[(c + j) * (w.k / 2) + k + i];
        }
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
    const DenseMatrix& w = *matrix;
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= w.n) return i;
#pragma omp parallel for schedule(static) if (count * w.k > SMALL)
    for (int64_t i = 0; i < count; i++) {
        const int64_t panel = ids[i] / PANEL, channels = channels_of(w.n, panel);
        const uint32_t* from = panel_at(w, panel) + ids[i] % PANEL;
        for (int64_t k = 0; k + 2 <= inputs; k += 2) std::memcpy(to + i * inputs + k, from + k / 2 * channels, 4);
        if (inputs % 2) std::memcpy(to + i * inputs + inputs - 1, from + inputs / 2 * channels, 2);
    }
    return count;
}

// x bfloat16 [m, k] to y [m, n], both contiguous; `type` of y is 0 for float32, 1 for bfloat16.
void ferrule_dense(const DenseMatrix* w, const uint16_t* x, void* y, int64_t m, int32_t type) {
    type ? multiply(*w, x, (uint16_t*)y, m) : multiply(*w, x, (float*)y, m);
}
}
