// Where the parts of GGUF files' blocks go, which `blocks.cpp` reads.
#pragma once
#include <cstdint>

extern "C" {

// As `_Parts` in blocks.py: where all of them go, in the order of their blocks. What a type does not have is not read.
struct BlockParts {
    int8_t* numbers;
    float *scales, *offsets;
    int8_t *steps, *offset_steps;
};

void ferrule_blocks_read(
    int32_t type, const uint8_t* rows, int64_t across, int64_t n, int64_t blocks, const BlockParts* to
);
}
