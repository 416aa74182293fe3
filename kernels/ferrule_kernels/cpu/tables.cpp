// Products with weights that are looked up in tables of floats, on CPUs: y = x Wᵀ + b, for one row or hundreds, sums in
// float32.
//
// A palette has a table of 8 or 16 numbers for each output channel, and a code of 3 or 4 bits for each weight. An additive
// matrix has codebooks of vectors of 8 or 16 weights, and for each so many inputs of a channel a code of each of them: the
// weights are the sum of what these stand for, and each channel has a factor.
//
// A vector has LANES inputs of one channel: bfloat16 where the processor multiplies pairs of them, else float32. Tables
// of a channel fill registers of 64 bytes, by repetition. Four channels are a panel. Its codes are, of a palette,
// [inputs / (LANES * FIELDS)][4][64 bytes, or 32]: a word of each lane has FIELDS codes, lowest bits first, of which each
// is of another vector; of an additive matrix [4][groups][books], as checkpoints have them, each below `entries`.
//
// Sums go over a lane's inputs in their order, whatever other rows there are, and lanes are added up in one order. So a row has
// the same bits alone and in any batch. Where a panel meets more rows than a tile has, it is looked up once.
#include "panels.h"
#include "recording.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int FOUR = 4;      // channels of a panel
constexpr int PANELS = 4;    // of a task
constexpr int TABLE = 64;    // bytes of a channel's
constexpr int VECTOR = 8;    // weights of a codebook's entry, or a part of one
constexpr int64_t ROWS_BYTES = 1 << 20;  // of rows that meet one panel after the other: a second cache
constexpr int64_t SMALL = 1 << 17;       // multiplications that one thread does sooner than two
constexpr int64_t MOST = 192;            // of these rows
constexpr int BLOCK = 40;    // vectors that are looked up at once, of whole words: they and their rows fit the nearest cache
#if defined(__AVX512F__)
constexpr int ROWS = 6;  // of a tile
#else
constexpr int ROWS = 3;
#endif

}  // namespace

extern "C" {

// As `_Matrix` in tables.py. `k` is rounded up to LANES, `n` to 4 but for what is written.
struct TableMatrix {
    const uint8_t* codes;
    const void* tables;    // [n][64 bytes], or codebooks [books][entries][8 * parts]
    const float* factors;  // [n] or null
    const float* bias;     // [n] or null
    int64_t n, k;
    int32_t bits;   // of a code: 3 and 4 of a palette, 8 and 16 of an additive matrix, which keeps as many
    int32_t books;  // 0 of a palette
    int32_t entries, parts;
};
}

namespace {

// Weights and activations as float32.
struct Singles {
    typedef float Element;
    typedef Floats Vector;
    typedef Words Codes;
    static constexpr int LANES = WIDTH;

    static Floats add(Floats sum, Floats w, Floats x) { return sum + w * x; }
    // What a table of 16 numbers says of the lowest 4 bits of each lane.
    static Floats looked_up(const float* table, Words codes) {
#if defined(__AVX512F__)
        return (Floats)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)codes, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
        const __m256i at = (__m256i)codes;
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), at);
        const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), at);
        return (Floats)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(at, 28));
#else
        Floats found;
        for (int i = 0; i < WIDTH; i++) found[i] = table[codes[i] & 15];
        return found;
#endif
    }
    static Floats rounded(const Floats* from) { return *from; }
};

#if defined(__AVX512BF16__)
// As pairs of bfloat16.
struct Pairs {
    typedef uint16_t Element;
    typedef uint16_t Vector __attribute__((vector_size(64)));
    typedef Vector Codes;
    static constexpr int LANES = 32;

    static Floats add(Floats sum, Vector w, Vector x) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
    }
    static Vector looked_up(const uint16_t* table, Vector codes) {  // of 32 numbers, of the lowest 5 bits
        return (Vector)_mm512_maskz_permutexvar_epi16(~0u, (__m512i)codes, _mm512_loadu_si512(table));
    }
    template <class F> static Vector joined(F part) {  // of four parts, from where `part` says
        const auto half = [&](int i) {
            return _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(part(i))), load<__m128i>(part(i + 1)), 1);
        };
        return (Vector)_mm512_inserti64x4(_mm512_castsi256_si512(half(0)), half(2), 1);
    }
    static Vector rounded(const Floats* from) { return (Vector)_mm512_cvtne2ps_pbh((__m512)from[1], (__m512)from[0]); }
};
#endif

// The panel's weights from its palette, vector by vector.
template <class U, int BITS> struct Palette {
    typedef typename U::Vector Vector;
    static constexpr int FIELDS = sizeof(typename U::Codes) * 8 / U::LANES / BITS;
    const uint8_t* codes;
    const typename U::Element* tables;

    Palette(const TableMatrix& w, int64_t panel)
        : codes(w.codes + panel * FOUR * ((w.k / U::LANES + FIELDS - 1) / FIELDS) * sizeof(typename U::Codes)),
          tables((const typename U::Element*)((const char*)w.tables + panel * FOUR * TABLE)) {}

    // Call `use` with the place of each vector from `first`, a multiple of BLOCK, to `end`, and with what gives it for
    // each channel.
    template <class F> inline void each(int64_t first, int64_t end, F use) const {
        constexpr int64_t size = sizeof(typename U::Codes);
        const uint8_t* at = codes + first / FIELDS * FOUR * size;
        const auto one = [&](int64_t place, int shift) {
            use(place, [&](int c) {
                const auto both = load<typename U::Codes>(at + c * size) >> shift;
                return U::looked_up(tables + c * (TABLE / sizeof(typename U::Element)), both);
            });
        };
        int64_t place = first;
        for (; place + FIELDS <= end; place += FIELDS, at += FOUR * size) {
#pragma GCC unroll 10
            for (int field = 0; field < FIELDS; field++) one(place + field, field * BITS);
        }
        for (int field = 0; place + field < end; field++) one(place + field, field * BITS);
    }
};

// From codebooks. HALVES: the only one has bfloat16; else they are float32, and their sum is rounded where U is of pairs.
template <class U, class Code, bool HALVES> struct Additive {
    typedef typename U::Vector Vector;
    static constexpr int PARTS = U::LANES / VECTOR;
    const TableMatrix& w;
    const Code* codes;
    int64_t stride;  // codes of a channel

    Additive(const TableMatrix& matrix, int64_t panel)
        : w(matrix), stride(matrix.k / VECTOR / matrix.parts * matrix.books) {
        codes = (const Code*)matrix.codes + panel * FOUR * stride;
    }

    // Eight weights of a book for the eighth `part` of a channel's inputs.
    template <class E> inline const E* entry(const Code* channel, int64_t part, int book) const {
        const int64_t group = w.parts == 1 ? part : part / w.parts, rest = w.parts == 1 ? 0 : part % w.parts;
        const int64_t code = channel[group * w.books + book];
        return (const E*)w.tables + ((book * int64_t(w.entries) + code) * w.parts + rest) * VECTOR;
    }

    inline Vector vector(int c, int64_t place) const {
        const Code* channel = codes + c * stride;
        if constexpr (HALVES) {
            return U::joined([&](int i) { return entry<uint16_t>(channel, place * PARTS + i, 0); });
        } else {
            constexpr int COUNT = U::LANES / WIDTH;
            Floats sum[COUNT] = {};
            for (int book = 0; book < w.books; book++)
                for (int i = 0; i < COUNT; i++) sum[i] += floats(channel, (place * COUNT + i) * (WIDTH / VECTOR), book);
            return U::rounded(sum);
        }
    }

    inline Floats floats(const Code* channel, int64_t part, int book) const {
#if defined(__AVX512F__)
        const __m256 low = _mm256_loadu_ps(entry<float>(channel, part, book));
        const __m256 high = _mm256_loadu_ps(entry<float>(channel, part + 1, book));
        return (Floats)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
#else
        return load<Floats>(entry<float>(channel, part, book));
#endif
    }

    template <class F> inline void each(int64_t first, int64_t end, F use) const {
        for (int64_t place = first; place < end; place++) use(place, [&](int c) { return vector(c, place); });
    }
};

// A block of a panel that was looked up: [vectors][4] vectors.
template <class U> struct Found {
    const typename U::Vector* at;

    template <class F> inline void each(int64_t first, int64_t end, F use) const {
        for (int64_t place = first; place < end; place++)
            use(place, [&](int c) { return at[(place - first) * FOUR + c]; });
    }
};

// The sums of the lanes of four vectors, always in one order.
inline void totals(const Floats* v, float* to) {
#if defined(__AVX2__)
    __m256 parts[2];
    for (int half = 0; half < WIDTH / 8; half++) {
        __m256 a[FOUR];
        for (int c = 0; c < FOUR; c++) std::memcpy(&a[c], (const char*)&v[c] + half * 32, 32);
        const __m256 first = _mm256_add_ps(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1]));
        const __m256 next = _mm256_add_ps(_mm256_unpacklo_ps(a[2], a[3]), _mm256_unpackhi_ps(a[2], a[3]));
        const __m256d x = _mm256_castps_pd(first), y = _mm256_castps_pd(next);
        parts[half] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    }
    const __m256 both = WIDTH == 16 ? _mm256_add_ps(parts[0], parts[1]) : parts[0];
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
#else
    for (int c = 0; c < FOUR; c++) to[c] = total(v[c]);
#endif
}

// Vectors `first` to `end` of a panel, and sums [rows][4] of the products with them.
template <class S> struct Part {
    const S& source;
    int64_t first, end;
    Floats* sums;
};

// Add to the sums, or begin them, R rows of x, each `k` from the next.
template <class U, int R, class S> void tile(const Part<S>& of, const typename U::Element* x, int64_t k) {
    typedef typename U::Vector Vector;
    Floats sum[R][FOUR] = {};  // in registers: no loop over it may be left
    if (of.first) {
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < FOUR; c++) sum[r][c] = of.sums[r * FOUR + c];
    }
    of.source.each(of.first, of.end, [&](int64_t place, auto weights) {
        Vector row[R];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) row[r] = load<Vector>(x + r * k + place * U::LANES);
#pragma GCC unroll 4
        for (int c = 0; c < FOUR; c++) {
            const Vector w = weights(c);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) sum[r][c] = U::add(sum[r][c], w, row[r]);
        }
    });
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < FOUR; c++) of.sums[r * FOUR + c] = sum[r][c];
}

template <class U, class S> void tiles(const Part<S>& of, const typename U::Element* x, int64_t k, int64_t rows) {
    switch (rows) {
        case 1: return tile<U, 1>(of, x, k);
        case 2: return tile<U, 2>(of, x, k);
        case 3: return tile<U, 3>(of, x, k);
#if defined(__AVX512F__)
        case 4: return tile<U, 4>(of, x, k);
        case 5: return tile<U, 5>(of, x, k);
        case 6: return tile<U, 6>(of, x, k);
#endif
    }
}

// A product of rows of x [m, k] to y, `stride` from a row to the next.
template <class X, class Y> struct Product {
    const TableMatrix& w;
    const X* x;
    Y* y;
    int64_t m, stride;
};

template <class Y> inline void put(Y* to, float v) { *to = v; }
template <> inline void put(uint16_t* to, float v) {
    const Words bits = rounded_bits(splat(v));
    *to = uint16_t(bits[0] >> 16);
}

template <class P> void finish(const P& of, const Floats* sums, int64_t panel, int64_t row, int64_t count) {
    const TableMatrix& w = of.w;
    const int64_t first = panel * FOUR, channels = std::min<int64_t>(FOUR, w.n - first);
    for (int64_t i = 0; i < count; i++) {
        float all[FOUR];
        totals(sums + i * FOUR, all);
        for (int64_t c = 0; c < channels; c++) {
            if (w.factors) all[c] *= w.factors[first + c];
            if (w.bias) all[c] += w.bias[first + c];
            put(of.y + (row + i) * of.stride + first + c, all[c]);
        }
    }
}

// Rows [row, end) times panels `first` to `last`, of one strip that looks weights up as it goes.
template <class U, class S, class P>
void multiply_few(const P& of, int64_t first, int64_t last, int64_t row, int64_t end) {
    for (int64_t panel = first; panel < last; panel++) {
        const S source(of.w, panel);
        Floats sums[ROWS * FOUR];
        tiles<U>(Part<S>{source, 0, of.w.k / U::LANES, sums}, of.x + row * of.w.k, of.w.k, end - row);
        finish(of, sums, panel, row, end - row);
    }
}

// The same of more rows, by panels that are looked up in `room`, at most PANELS. `sums` are [panels][MOST][4].
template <class U, class S, class P>
void multiply_many(const P& of, int64_t first, int64_t last, int64_t row, int64_t end, typename U::Vector* room, Floats* sums) {
    const int64_t k = of.w.k, vectors = k / U::LANES, count = end - row, strips = (count + ROWS - 1) / ROWS;
    const int64_t step = (count + strips - 1) / strips;
    for (int64_t begin = 0; begin < vectors; begin += BLOCK) {
        const int64_t stop = std::min<int64_t>(vectors, begin + BLOCK);
        for (int64_t panel = first; panel < last; panel++)
            S(of.w, panel).each(begin, stop, [&](int64_t place, auto weights) {
                for (int c = 0; c < FOUR; c++) room[((panel - first) * BLOCK + place - begin) * FOUR + c] = weights(c);
            });
        for (int64_t i = 0; i < count; i += step)
            for (int64_t panel = 0; panel < last - first; panel++) {
                const Found<U> found = {room + panel * BLOCK * FOUR};
                const Part<Found<U>> part = {found, begin, stop, sums + (panel * MOST + i) * FOUR};
                tiles<U>(part, of.x + (row + i) * k, k, std::min(step, count - i));
            }
    }
    for (int64_t panel = first; panel < last; panel++)
        finish(of, sums + (panel - first) * MOST * FOUR, panel, row, count);
}

template <class U, class S, bool DIRECT, class P> void multiply_by(const P& of) {
    const TableMatrix& w = of.w;
    const int64_t panels = (w.n + FOUR - 1) / FOUR, parts = (panels + PANELS - 1) / PANELS;
    const int64_t fits = ROWS_BYTES / (w.k * int64_t(sizeof(typename U::Element))) / ROWS * ROWS;
    const int64_t most = std::min(std::max<int64_t>(fits, 2 * ROWS), MOST);
    const int64_t chunk = chunk_of(of.m, most, ROWS), chunks = (of.m + chunk - 1) / chunk;
    Shares shares(parts * chunks, thread_count());
#pragma omp parallel if (of.m * w.n * w.k > SMALL)
    {
        typename U::Vector room[PANELS * BLOCK * FOUR];
        Floats sums[PANELS * MOST * FOUR];
        for (int64_t task; (task = shares.next(thread_number())) >= 0;) {
            const int64_t row = task / parts * chunk, end = std::min(of.m, row + chunk);
            const int64_t first = task % parts * PANELS, last = std::min(panels, first + PANELS);
            if (DIRECT && end - row <= ROWS)
                multiply_few<U, S>(of, first, last, row, end);
            else
                multiply_many<U, S>(of, first, last, row, end, room, sums);
        }
    }
}

template <class U, class P> void multiply(const P& of) {
    const TableMatrix& w = of.w;
    constexpr bool pairs = sizeof(typename U::Element) == 2;
    if (w.books == 0) {
        w.bits == 3 ? multiply_by<U, Palette<U, 3>, true>(of) : multiply_by<U, Palette<U, 4>, true>(of);
    } else if (pairs && w.books == 1) {
        w.bits == 8 ? multiply_by<U, Additive<U, uint8_t, pairs>, false>(of)
                    : multiply_by<U, Additive<U, uint16_t, pairs>, false>(of);
    } else {
        w.bits == 8 ? multiply_by<U, Additive<U, uint8_t, false>, false>(of)
                    : multiply_by<U, Additive<U, uint16_t, false>, false>(of);
    }
}

template <class U> void multiply(const TableMatrix& w, const void* x, void* y, int64_t m, int64_t stride, int32_t y_type) {
    typedef typename U::Element X;
    if (y_type)
        multiply<U>(Product<X, uint16_t>{w, (const X*)x, (uint16_t*)y, m, stride});
    else
        multiply<U>(Product<X, float>{w, (const X*)x, (float*)y, m, stride});
}

}  // namespace

extern "C" {

// Inputs of a vector, for activations of float32 or of bfloat16; 0: these must be widened.
int ferrule_tables_lanes(int32_t type) {
#if defined(__AVX512BF16__)
    if (type) return Pairs::LANES;
#endif
    return type ? 0 : Singles::LANES;
}

// x [m, k] of `x_type`, contiguous, to y [m, n] of `y_type`, `stride` from a row to the next: 0 float32, 1 bfloat16.
void ferrule_tables(
    const TableMatrix* w, const void* x, void* y, int64_t m, int64_t stride, int32_t x_type, int32_t y_type) {
    recorded([=] {
#if defined(__AVX512BF16__)
        if (x_type) return multiply<Pairs>(*w, x, y, m, stride, y_type);
#endif
        multiply<Singles>(*w, x, y, m, stride, y_type);
    });
}
}
