// huge_pages.h - asks the operating system for huge pages.
#ifndef IBP_HUGE_PAGES_H
#define IBP_HUGE_PAGES_H

#include <cstddef>
#include <cstdint>

#include <sys/mman.h>
#include <unistd.h>

namespace ibp {

// Asks the operating system to back memory with huge pages. Call it before anything is written to the memory. If the
// system refuses, filling the memory takes longer.
inline void ask_for_huge_pages(uintptr_t address, size_t num_bytes)
{
    const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (address + page_bytes - 1) / page_bytes * page_bytes,
                    end = (address + num_bytes) / page_bytes * page_bytes;
    if (first < end) madvise(reinterpret_cast<void *>(first), end - first, MADV_HUGEPAGE);
}

} // namespace ibp

#endif
