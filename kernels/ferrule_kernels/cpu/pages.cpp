// Copies into memory that was not written before, which has no pages yet: the system makes them part by part, each of which
// is then still in the caches. Else it is called once for each page, which takes longer than to copy it.
#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

constexpr uintptr_t PART = 2 << 20;  // bytes: a huge page, where the memory asked for such
constexpr int WRITE_PAGES = 23;    // MADV_POPULATE_WRITE, of Linux 5.14: headers may be older

}  // namespace

extern "C" {

// Where the system makes no pages this way, they are made as they are written.
void ferrule_copy_to_new(uint8_t* to, const uint8_t* from, int64_t bytes) {
    const auto begin = uintptr_t(to), end = begin + bytes;
    const uintptr_t first = begin / PART * PART, parts = (end - first + PART - 1) / PART;
#if defined(__linux__)
    const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
#endif
#pragma omp parallel for schedule(static) if (parts > 1)
    for (uintptr_t part = 0; part < parts; part++) {
        const uintptr_t start = std::max(begin, first + part * PART), stop = std::min(end, first + (part + 1) * PART);
#if defined(__linux__)
        const uintptr_t whole = (start + page - 1) / page * page, last = stop / page * page;
        if (whole < last) madvise((void*)whole, last - whole, WRITE_PAGES);
#endif
        std::memcpy((void*)start, from + (start - begin), stop - start);
    }
}
}
