// Layers that keep a state for each request: which tokens of a step are whose, and where the state is.
#pragma once
#include <cstdint>

extern "C" {

// As `_Batch` in states.py. Row r of a step owns its tokens [start[r], start[r + 1]), and the state at slots[r].
struct StateBatch {
    void* data;             // [all slots, ...], `stride` elements apart
    const int64_t* slots;   // [rows]
    const int64_t* start;   // [rows + 1]
    int64_t rows, stride;
};
}
