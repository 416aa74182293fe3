// Recordings: a step's kernels as a list that one call walks. See recording.h for how a kernel gets there.
#include "recording.h"

#include <cstdint>

extern "C" {

Calls* ferrule_recording_new() { return new Calls; }

void ferrule_recording_free(Calls* calls) { delete calls; }

// Add the calls of this thread from now on; null ends it.
void ferrule_recording_set(Calls* calls) { recording = calls; }

int64_t ferrule_recording_length(const Calls* calls) { return int64_t(calls->size()); }

// Make the calls [from, until) again, in their order.
void ferrule_recording_replay(const Calls* calls, int64_t from, int64_t until) {
    for (int64_t i = from; i < until; i++) (*calls)[i]();
}
}
