// Blocks of GGUF files, to integers with scales and offsets, or to floats; and the numbers of few bits in the words of other
// checkpoints. The plugins' `gguf/blocks.py` and `quantization/words.py` do the same in torch.
// https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
#include "blocks.h"
#include "rows.h"

namespace {

constexpr int MOST = 256, MOST_GROUPS = 16;  // of a block
constexpr int64_t SMALL = 1 << 16;           // bytes that one thread reads sooner than two

// What a block holds: numbers or codes; a scale, which `steps` multiply for each group of numbers where a type has
// groups, and an offset as well.
struct Block {
    int8_t numbers[MOST], steps[MOST_GROUPS], offset_steps[MOST_GROUPS];
    float scale, offset;
};

// Fields of BITS bits, shifted by `place`, put into COUNT numbers. Those of each SPAN bytes: first all lowest fields, then
// all next ones.
template <int BITS, int SPAN, int COUNT> inline void put_fields(const uint8_t* from, int place, int8_t* to) {
    constexpr int FIELDS = 8 / BITS;
    for (int first = 0; first < COUNT; first += SPAN) {
        const uint8_t* bytes = from + first / SPAN / FIELDS * SPAN;
        const int shift = first / SPAN % FIELDS * BITS;
        for (int i = 0; i < SPAN; i++) to[first + i] |= (bytes[i] >> shift & ((1 << BITS) - 1)) << place;
    }
}

template <int COUNT> inline void take_off(int8_t* numbers, int middle) {
    for (int i = 0; i < COUNT; i++) numbers[i] -= middle;
}

typedef uint8_t Sixteen __attribute__((vector_size(16)));

template <int COUNT> inline void look_up(const int8_t* table, int8_t* codes) {
    const auto all = load<Sixteen>(table);
    for (int i = 0; i < COUNT; i += 16) {
        const Sixteen found = __builtin_shuffle(all, load<Sixteen>(codes + i));
        std::memcpy(codes + i, &found, sizeof found);
    }
}

// Types with one scale for 32 numbers. BITS beyond 4 have their highest bits apart.
template <int BITS, bool OFFSET> struct Legacy {
    static constexpr int HEAD = OFFSET ? 4 : 2, APART = BITS == 5 ? 4 : 0;
    static constexpr int COUNT = 32, GROUPS = 0, OFFSETS = OFFSET, BYTES = HEAD + APART + 16;
    static void read(const uint8_t* from, Block& to) {
        to.scale = half_at(from);
        put_fields<4, 16, COUNT>(from + HEAD + APART, 0, to.numbers);
        uint32_t fifths = 0;
        std::memcpy(&fifths, from + HEAD, APART);
        for (int i = 0; i < COUNT; i++) to.numbers[i] |= (fifths >> i & 1) << 4;
        if (OFFSET) to.offset = half_at(from + 2);
        if (!OFFSET) take_off<COUNT>(to.numbers, 1 << (BITS - 1));
    }
};

struct Q8_0 {
    static constexpr int COUNT = 32, GROUPS = 0, OFFSETS = 0, BYTES = 34;
    static void read(const uint8_t* from, Block& to) {
        to.scale = half_at(from);
        std::memcpy(to.numbers, from + 2, COUNT);
    }
};

// Codes, whose table the caller has.
struct IQ4_NL {
    static constexpr int COUNT = 32, GROUPS = 0, OFFSETS = 0, BYTES = 18;
    static void read(const uint8_t* from, Block& to) {
        to.scale = half_at(from);
        put_fields<4, 16, COUNT>(from + 2, 0, to.numbers);
    }
};

struct MXFP4 {
    static constexpr int COUNT = 32, GROUPS = 0, OFFSETS = 0, BYTES = 17;
    static void read(const uint8_t* from, Block& to) {
        to.scale = std::ldexp(1.0f, from[0] - 128);  // the table's numbers are doubled
        put_fields<4, 16, COUNT>(from + 1, 0, to.numbers);
    }
};

struct IQ4_XS {
    static constexpr int COUNT = 256, GROUPS = 8, OFFSETS = 0, BYTES = 136;
    static void read(const uint8_t* from, Block& to) {
        to.scale = half_at(from);
        put_fields<4, 1, GROUPS>(from + 4, 0, to.steps);
        put_fields<2, 1, GROUPS>(from + 2, 4, to.steps);
        take_off<GROUPS>(to.steps, 32);
        put_fields<4, 16, COUNT>(from + 8, 0, to.numbers);
    }
};

struct Q2_K {
    static constexpr int COUNT = 256, GROUPS = 16, OFFSETS = 1, BYTES = 84;
    static void read(const uint8_t* from, Block& to) {
        for (int g = 0; g < GROUPS; g++) to.steps[g] = from[g] & 15, to.offset_steps[g] = from[g] >> 4;
        put_fields<2, 32, COUNT>(from + 16, 0, to.numbers);
        to.scale = half_at(from + 80);
        to.offset = -half_at(from + 82);
    }
};

struct Q3_K {
    static constexpr int COUNT = 256, GROUPS = 16, OFFSETS = 0, BYTES = 110;
    static void read(const uint8_t* from, Block& to) {
        put_fields<1, 32, COUNT>(from, 2, to.numbers);
        put_fields<2, 32, COUNT>(from + 32, 0, to.numbers);
        take_off<COUNT>(to.numbers, 4);
        put_fields<4, 8, GROUPS>(from + 96, 0, to.steps);
        put_fields<2, 4, GROUPS>(from + 104, 4, to.steps);
        take_off<GROUPS>(to.steps, 32);
        to.scale = half_at(from + 108);
    }
};

// Q4_K and Q5_K: eight scales and eight offsets of 6 bits in 12 bytes, and then what BITS have beyond 4.
template <int BITS> struct K {
    static constexpr int HIGH = BITS == 5 ? 32 : 0;
    static constexpr int COUNT = 256, GROUPS = 8, OFFSETS = 1, BYTES = 16 + HIGH + 128;
    static void read(const uint8_t* from, Block& to) {
        to.scale = half_at(from);
        to.offset = -half_at(from + 2);
        for (int g = 0; g < 4; g++) {
            const uint8_t a = from[4 + g], b = from[8 + g], c = from[12 + g];
            to.steps[g] = a & 63, to.steps[4 + g] = (c & 15) | a >> 6 << 4;
            to.offset_steps[g] = b & 63, to.offset_steps[4 + g] = c >> 4 | b >> 6 << 4;
        }
        put_fields<4, 32, COUNT>(from + 16 + HIGH, 0, to.numbers);
        if (HIGH) put_fields<1, 32, COUNT>(from + 16, 4, to.numbers);
    }
};

struct Q6_K {
    static constexpr int COUNT = 256, GROUPS = 16, OFFSETS = 0, BYTES = 210;
    static void read(const uint8_t* from, Block& to) {
        put_fields<4, 64, COUNT>(from, 0, to.numbers);
        put_fields<2, 32, COUNT>(from + 128, 4, to.numbers);
        take_off<COUNT>(to.numbers, 32);
        std::memcpy(to.steps, from + 192, GROUPS);
        to.scale = half_at(from + 208);
    }
};

// Calls `use` with the type of ggml's number, or returns false.
template <class F> bool with_type(int32_t number, F use) {
    switch (number) {
        case 2: return use(Legacy<4, false>{}), true;
        case 3: return use(Legacy<4, true>{}), true;
        case 6: return use(Legacy<5, false>{}), true;
        case 7: return use(Legacy<5, true>{}), true;
        case 8: return use(Q8_0{}), true;
        case 10: return use(Q2_K{}), true;
        case 11: return use(Q3_K{}), true;
        case 12: return use(K<4>{}), true;
        case 13: return use(K<5>{}), true;
        case 14: return use(Q6_K{}), true;
        case 20: return use(IQ4_NL{}), true;
        case 23: return use(IQ4_XS{}), true;
        case 39: return use(MXFP4{}), true;
    }
    return false;
}

// Calls `use` with each block and its place among all; rows of `blocks` begin `across` bytes after each other.
template <class T, class F> void each_block(const uint8_t* rows, int64_t across, int64_t n, int64_t blocks, F use) {
#pragma omp parallel for schedule(static) if (n * blocks * T::BYTES > SMALL)
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = 0; i < blocks; i++) {
            Block block;
            std::memset(block.numbers, 0, T::COUNT);
            std::memset(block.steps, 0, sizeof block.steps);
            block.offset = 0.0f;
            T::read(rows + row * across + i * T::BYTES, block);
            use(block, row * blocks + i);
        }
}

template <class T, class To>
void widen_block(Block& block, const int8_t* table, typename To::Element* to) {
    constexpr int GROUP = T::COUNT / (T::GROUPS ? T::GROUPS : 1);
    if (table) look_up<T::COUNT>(table, block.numbers);
    for (int i = 0; i < T::COUNT; i += WIDTH) {
        const int group = i / GROUP;
        const float scale = T::GROUPS ? block.scale * block.steps[group] : block.scale;
        const float offset = T::GROUPS && T::OFFSETS ? block.offset * block.offset_steps[group] : block.offset;
        const Floats numbers = __builtin_convertvector(widen_bytes(block.numbers + i), Floats);
        To::store(to + i, T::OFFSETS ? numbers * scale + offset : numbers * scale);
    }
}

// Eight numbers of so many bits, lowest first, each a byte of the result.
inline uint64_t eight_of(uint64_t packed, int bits) {
    const uint64_t mask = 0x0101010101010101u * ((1u << bits) - 1);
#if defined(__BMI2__)
    return _pdep_u64(packed, mask);
#else
    uint64_t found = 0;
    for (int i = 0; i < 8; i++) found |= (packed >> (i * bits) & mask & 0xff) << (8 * i);
    return found;
#endif
}

}  // namespace

extern "C" {

// Eight times `count` numbers of 1 to 8 bits, lowest first, as bytes. Of each eight the number at `from[i]` becomes the
// one at `i`, if that is not null.
void ferrule_unpack(const uint8_t* packed, int64_t count, int32_t bits, const uint8_t* from, uint8_t* to) {
    Sixteen order = {};
    if (from) std::memcpy(&order, from, 8);
#pragma omp parallel for schedule(static) if (count > SMALL / 8)
    for (int64_t i = 0; i < count; i++) {
        uint64_t word = 0;
        const uint8_t* eight = packed + i * bits;
        if (i + 8 < count) std::memcpy(&word, eight, 8);  // more than is needed, and there
        else std::memcpy(&word, eight, bits);
        word = eight_of(word, bits);
        Sixteen found = {};
        std::memcpy(&found, &word, 8);
        if (from) found = __builtin_shuffle(found, order);
        std::memcpy(to + i * 8, &found, 8);
    }
}

// As `_Shape` in blocks.py: what a block of a type has. `groups` is 0 for types without steps.
struct BlockShape {
    int32_t bytes, numbers, groups, offsets;
};

// Returns 0 for types that are not known here.
int ferrule_block_shape(int32_t type, BlockShape* shape) {
    return with_type(type, [&](auto kind) { *shape = {kind.BYTES, kind.COUNT, kind.GROUPS, kind.OFFSETS}; });
}

// Rows [n] of `blocks` of a known type, each `across` bytes after the one before.
void ferrule_blocks_read(
    int32_t type, const uint8_t* rows, int64_t across, int64_t n, int64_t blocks, const BlockParts* to
) {
    with_type(type, [&](auto kind) {
        using T = decltype(kind);
        each_block<T>(rows, across, n, blocks, [&](const Block& block, int64_t at) {
            std::memcpy(to->numbers + at * T::COUNT, block.numbers, T::COUNT);
            to->scales[at] = block.scale;
            if (T::OFFSETS) to->offsets[at] = block.offset;
            if (T::GROUPS) std::memcpy(to->steps + at * T::GROUPS, block.steps, T::GROUPS);
            if (T::GROUPS && T::OFFSETS) std::memcpy(to->offset_steps + at * T::GROUPS, block.offset_steps, T::GROUPS);
        });
    });
}

// The same as floats, `to` of float32 or, where `short_floats`, of bfloat16. `table` has what 16 codes stand for, or is null.
void ferrule_blocks_widen(
    int32_t type, const uint8_t* rows, int64_t across, int64_t n, int64_t blocks, const int8_t* table,
    int32_t short_floats, void* to
) {
    with_type(type, [&](auto kind) {
        using T = decltype(kind);
        each_block<T>(rows, across, n, blocks, [&](Block& block, int64_t at) {
            if (short_floats) widen_block<T, BF16>(block, table, (uint16_t*)to + at * T::COUNT);
            else widen_block<T, F32>(block, table, (float*)to + at * T::COUNT);
        });
    });
}
}
