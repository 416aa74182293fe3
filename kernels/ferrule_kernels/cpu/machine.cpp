// What a processor can do at most: bytes read from memory, and multiply-adds of each of its units with operands that
// stay in registers. All threads do the same work; callers keep the time.
#include "vectors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int CHAINS = 12; // independent sums of a thread, enough to fill the pipelines

// Each unit adds to CHAINS sums that begin apart, or the compiler would compute one for all of them.

template <class V> __attribute__((always_inline)) inline void keep(void* sink, const V& sum) {
    std::memcpy(sink, &sum, sizeof sum);
    asm volatile("" : : "r"(sink) : "memory");  // each of them: none is left out
}

void floats(int64_t rounds, void* sink) {
    Floats sums[CHAINS], x = splat(0.5f);
    for (int i = 0; i < CHAINS; i++) sums[i] = splat(float(i));
    asm volatile("" : "+x"(x));  // not a constant any more
    for (int64_t i = 0; i < rounds; i++)
        for (auto& sum : sums) sum = sum * x + x;
    for (auto& sum : sums) keep(sink, sum);
}

#if defined(__x86_64__)
#define WITH(features) __attribute__((target(features)))

WITH("avx512f,avx512bf16") void bf16_pairs(int64_t rounds, void* sink) {
    __m512 sums[CHAINS];
    for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_set1_ps(float(i));
    __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f003f00);
    asm volatile("" : "+v"(x));
    for (int64_t i = 0; i < rounds; i++)
        for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, x, x);
    for (auto& sum : sums) keep(sink, sum);
}

WITH("avx512f,avx512vnni") void int8_quads(int64_t rounds, void* sink) {
    __m512i sums[CHAINS];
    for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_set1_epi32(i);
    __m512i x = _mm512_set1_epi8(1);
    asm volatile("" : "+v"(x));
    for (int64_t i = 0; i < rounds; i++)
        for (auto& sum : sums) sum = _mm512_dpbusd_epi32(sum, x, x);
    for (auto& sum : sums) keep(sink, sum);
}

WITH("avx2") void int8_words(int64_t rounds, void* sink) {  // without a unit of its own: three instructions for 32
    __m256i sums[CHAINS];
    for (int i = 0; i < CHAINS; i++) sums[i] = _mm256_set1_epi32(i);
    __m256i x = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1);
    asm volatile("" : "+x"(x), "+x"(ones));
    for (int64_t i = 0; i < rounds; i++)
        for (auto& sum : sums) {
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, x), ones));
            asm volatile("" : "+x"(x));  // or the product would leave the loop
        }
    for (auto& sum : sums) keep(sink, sum);
}

struct Tiles {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

WITH("amx-tile") void configure_tiles() {
    Tiles tiles = {};
    tiles.palette = 1;
    for (int i = 0; i < 8; i++) tiles.row_bytes[i] = 64, tiles.rows[i] = 16;
    asm volatile("" : : "r"(&tiles) : "memory");  // GCC 12 believes that only 8 bytes of it are read
    _tile_loadconfig(&tiles);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
}

WITH("amx-tile,amx-bf16") void bf16_tiles(int64_t rounds, void*) {
    configure_tiles();
    for (int64_t i = 0; i < rounds; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
}

WITH("amx-tile,amx-int8") void int8_tiles(int64_t rounds, void*) {
    configure_tiles();
    for (int64_t i = 0; i < rounds; i++) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
}
#endif

struct Unit {
    void (*run)(int64_t rounds, void* sink);
    double operations; // of one round, a multiply-add being two
};

const Unit UNITS[] = {
    // As `_UNITS` in machine.py.
    {floats, 2.0 * WIDTH * CHAINS},
#if defined(__x86_64__)
    {bf16_pairs, 2.0 * 32 * CHAINS},
    {int8_quads, 2.0 * 64 * CHAINS},
    {int8_words, 2.0 * 32 * CHAINS},
    {bf16_tiles, 2.0 * 16 * 16 * 32 * 4},
    {int8_tiles, 2.0 * 16 * 16 * 64 * 4},
#endif
};

}  // namespace

extern "C" {

// Operations that were done by each thread. The processor must have the unit.
double ferrule_rate(int unit, int64_t rounds) {
    const Unit& chosen = UNITS[unit];
#pragma omp parallel
    {
        char sink[sizeof(Floats) + 64];
        chosen.run(rounds, sink);
        asm volatile("" : : "r"(sink) : "memory");
    }
    return chosen.operations * double(rounds);
}

// Read all of `bytes`, a multiple of 4096.
uint64_t ferrule_read(const char* from, int64_t bytes) {
    uint64_t sum = 0;
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (int64_t page = 0; page < bytes / 4096; page++) {
        Words sums[4] = {};
        const char* at = from + page * 4096;
        for (size_t i = 0; i < 4096; i += 4 * sizeof(Words))
            for (int j = 0; j < 4; j++) sums[j] += load<Words>(at + i + j * sizeof(Words));
        const Words all = sums[0] + sums[1] + sums[2] + sums[3];
        for (int i = 0; i < WIDTH; i++) sum += all[i];
    }
    return sum;
}

// Ask Linux for the tile registers; they are for all threads that are started afterwards. 0: they may be used.
int ferrule_use_tiles() {
#if defined(__x86_64__) && defined(__linux__)
    return int(syscall(SYS_arch_prctl, 0x1023, 18));
#else
    return -1;
#endif
}
}
