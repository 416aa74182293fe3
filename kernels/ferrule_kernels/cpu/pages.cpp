// Copies into memory that was not written before, which has no pages yet: the system makes them part by part, each of which
// is then still in the second cache. Else it is called once for each page, which takes longer than to copy it.
#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t PART = 1 << 20;  // bytes
constexpr int WRITE_PAGES = 23;    // MADV_POPULATE_WRITE, of Linux 5.14: headers may be older

}  // namespace

extern "C" {

// Where the system makes no pages this way, they are made as they are written.
void ferrule_copy_to_new(uint8_t* to, const uint8_t* from, int64_t bytes) {
#pragma omp parallel for schedule(static) if (bytes > PART)
    for (int64_t at = 0; at < bytes; at += PART) {
        const int64_t count = std::min(PART, bytes - at);
#if defined(__linux__)
        const auto page = uintptr_t(sysconf(_SC_PAGESIZE)), start = uintptr_t(to + at);
        const uintptr_t first = (start + page - 1) / page * page, last = (start + count) / page * page;
        if (first < last) madvise((void*)first, last - first, WRITE_PAGES);
#endif
        std::memcpy(to + at, from + at, count);
    }
}
}
