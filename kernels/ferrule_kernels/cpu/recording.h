// Calls of kernels that can be made again, without the language that made them first.
#pragma once
#include <functional>
#include <vector>

using Calls = std::vector<std::function<void()>>;

// To which the calls of this thread are added while they are made; null where nothing is recorded.
inline thread_local Calls* recording = nullptr;

// Make a call. It holds all that it is told by value, but for the memory that addresses lead to.
template <class Call> void recorded(const Call& call) {
    if (recording) recording->push_back(call);
    call();
}
