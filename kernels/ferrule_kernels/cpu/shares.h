// How threads share work that is cut into tasks.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace {

inline int thread_number() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}
inline int thread_count() {
#if defined(_OPENMP)
    return omp_get_max_threads();
#else
    return 1;
#endif
}

// Tasks 0 to `count`, each given out once. A thread takes those of its own share from the front, so that it reads memory
// in order; when they are gone it takes from the back of another's, so that none waits for one that the system stopped.
class Shares {
  public:
    static constexpr int MOST = 256;  // threads; those past it take from the others

    Shares(int64_t count, int threads) : threads_(std::min(threads, MOST)) {
        for (int i = 0; i < threads_; i++)
            share_[i].store(both(count * i / threads_, count * (i + 1) / threads_), std::memory_order_relaxed);
    }

    // The next task for this thread, or -1.
    int64_t next(int thread) {
        for (int i = 0; i < threads_; i++) {
            const int owner = (thread + i) % threads_;
            std::atomic<uint64_t>& share = share_[owner];
            uint64_t now = share.load(std::memory_order_relaxed);
            while (uint32_t(now >> 32) < uint32_t(now)) {
                const bool own = owner == thread;
                if (share.compare_exchange_weak(now, own ? now + (uint64_t(1) << 32) : now - 1))
                    return own ? int64_t(now >> 32) : int64_t(uint32_t(now)) - 1;
            }
        }
        return -1;
    }

  private:
    static uint64_t both(int64_t first, int64_t end) { return uint64_t(first) << 32 | uint64_t(end); }
    const int threads_;
    std::atomic<uint64_t> share_[MOST];
};

}  // namespace
