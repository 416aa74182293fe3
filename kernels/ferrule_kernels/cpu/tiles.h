// Tile registers (AMX): the instructions that the products use, or the same in plain C++ with FERRULE_EMULATE_TILES,
// by which they are tested where no processor has them. TILES is 1 with either.
//
// Registers: 0-3 are sums [16 rows][16 channels], 0 and 1 of the first rows, 2 and 3 of the next; 4 and 5 are the rows
// [16][64 bytes]; 6 and 7 are weights [16][64 bytes], 16 channels of 4 bytes each. Their numbers must be literals.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(FERRULE_EMULATE_TILES)
#define TILES 1
#include <cmath>

namespace {

struct EmulatedTiles {
    int rows[8] = {};
    uint8_t cells[8][16][64] = {};

    void configure(int first, int next) {
        const int of[8] = {first, first, next, next, first, next, 16, 16};
        std::memcpy(rows, of, sizeof rows);
        std::memset(cells, 0, sizeof cells);
    }
    void zero(int tile) { std::memset(cells[tile], 0, sizeof cells[tile]); }
    void load(int tile, const void* from, int64_t stride) {  // the rows that are not there become zero
        zero(tile);
        for (int r = 0; r < rows[tile]; r++) std::memcpy(cells[tile][r], (const char*)from + r * stride, 64);
    }
    void store(int tile, void* to, int64_t stride) const {
        for (int r = 0; r < rows[tile]; r++) std::memcpy((char*)to + r * stride, cells[tile][r], 64);
    }

    static float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
    static float number(const uint8_t* at) {
        uint16_t half;
        std::memcpy(&half, at, 2);
        const uint32_t bits = uint32_t(half) << 16;
        float x;
        std::memcpy(&x, &bits, 4);
        return flushed(x);
    }
    // Even and odd inputs are summed up apart, then added to each other, then to the sum; all with denormals as zero.
    void dot_bf16(int sum, int a, int b) {
        for (int m = 0; m < rows[sum]; m++)
            for (int n = 0; n < 16; n++) {
                float even = 0.0f, odd = 0.0f, total;
                for (int k = 0; k < rows[b]; k++) {
                    even = flushed(std::fma(number(&cells[a][m][4 * k]), number(&cells[b][k][4 * n]), even));
                    odd = flushed(std::fma(number(&cells[a][m][4 * k + 2]), number(&cells[b][k][4 * n + 2]), odd));
                }
                std::memcpy(&total, &cells[sum][m][4 * n], 4);
                total = flushed(flushed(total) + flushed(even + odd));
                std::memcpy(&cells[sum][m][4 * n], &total, 4);
            }
    }
    void dot_int8(int sum, int a, int b) {  // signed times unsigned
        for (int m = 0; m < rows[sum]; m++)
            for (int n = 0; n < 16; n++) {
                int32_t total;
                std::memcpy(&total, &cells[sum][m][4 * n], 4);
                for (int k = 0; k < 4 * rows[b]; k++)
                    total += int32_t(int8_t(cells[a][m][k])) * int32_t(cells[b][k / 4][4 * n + k % 4]);
                std::memcpy(&cells[sum][m][4 * n], &total, 4);
            }
    }
};

inline EmulatedTiles& emulated_tiles() {
    static thread_local EmulatedTiles tiles;
    return tiles;
}
inline void configure_tiles(int first, int next) { emulated_tiles().configure(first, next); }
inline void release_tiles() {}

}  // namespace

#define TILE_ZERO(tile) emulated_tiles().zero(tile)
#define TILE_LOAD(tile, from, stride) emulated_tiles().load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulated_tiles().store(tile, to, stride)
#define TILE_DOT_BF16(sum, a, b) emulated_tiles().dot_bf16(sum, a, b)
#define TILE_DOT_INT8(sum, a, b) emulated_tiles().dot_int8(sum, a, b)

#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define TILES 1
#include <immintrin.h>

namespace {

// Of this thread, until it is released. All registers become zero.
inline void configure_tiles(int first, int next) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } tiles = {};
    const int of[8] = {first, first, next, next, first, next, 16, 16};
    tiles.palette = 1;
    for (int i = 0; i < 8; i++)
        if (of[i]) tiles.row_bytes[i] = 64, tiles.rows[i] = uint8_t(of[i]);
    asm volatile("" : : "r"(&tiles) : "memory");  // GCC 12 believes that only 8 bytes of it are read
    _tile_loadconfig(&tiles);
}
inline void release_tiles() { _tile_release(); }

}  // namespace

// GCC does not tell itself that a load reads memory: what was written there must be there.
#define TILE_LOAD(tile, from, stride)     \
    do {                                  \
        asm volatile("" : : : "memory");  \
        _tile_loadd(tile, from, stride);  \
    } while (0)
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_DOT_BF16(sum, a, b) _tile_dpbf16ps(sum, a, b)
#define TILE_DOT_INT8(sum, a, b) _tile_dpbsud(sum, a, b)

#else
#define TILES 0
#endif

// Whether the busiest tiles of products are written by hand: with 16 registers compilers keep some of the sums in memory.
#if defined(__AVX2__) && !defined(__AVX512F__) && !TILES
#define BY_HAND 1
// Assembly of a tile of six rows: a float of each, `at` bytes behind x, y = x + 3 * stride and what lies `stride` bytes apart,
// times the vectors in ymm12 and ymm13, to the sums a0, a1 to f0, f1.
#define ADD_ROW(number, sum) \
    "vbroadcastss " number ", %%ymm14\n" \
    "vfmadd231ps %%ymm12, %%ymm14, %[" sum "0]\n" \
    "vfmadd231ps %%ymm13, %%ymm14, %[" sum "1]\n"
#define ADD_SIX_ROWS(at) \
    ADD_ROW(at "(%[x])", "a") ADD_ROW(at "(%[x],%[stride])", "b") ADD_ROW(at "(%[x],%[stride],2)", "c") \
    ADD_ROW(at "(%[y])", "d") ADD_ROW(at "(%[y],%[stride])", "e") ADD_ROW(at "(%[y],%[stride],2)", "f")
#else
#define BY_HAND 0
#endif

namespace {

// Tile registers of a thread, which are set anew only for another number of rows.
class Tiles {
  public:
#if TILES
    ~Tiles() {
        if (first_ >= 0) release_tiles();
    }
    void hold(int first, int next) {
        if (first == first_ && next == next_) return;
        configure_tiles(first_ = first, next_ = next);
    }

  private:
    int first_ = -1, next_ = -1;
#endif
};

}  // namespace
