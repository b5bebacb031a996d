// host_pages.h - new pages of host memory: on which NUMA node, as huge as the system has them, and written by all
// processors. Nothing here needs CUDA.
#ifndef IBP_HOST_PAGES_H
#define IBP_HOST_PAGES_H

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace ibp {

// The node that the calling thread runs on; 0 where the system does not say.
inline int node_of_caller()
{
    unsigned node = 0;
    return syscall(SYS_getcpu, nullptr, &node, nullptr) == 0 ? static_cast<int>(node) : 0;
}

// Asks for pages of a node, whichever thread writes to them first, and for others only where it has none left.
// Refused, as in some containers, pages are where the system puts them.
inline void prefer_node(void *pages, size_t num_bytes, int node)
{
    constexpr int kPreferred = 1;                                              // MPOL_PREFERRED of numaif.h
    constexpr size_t kWordBits = 8 * sizeof(unsigned long), kMostNodes = 1024; // as the kernel's own bound
    const size_t bit = static_cast<size_t>(node);
    if (bit >= kMostNodes) return;
    unsigned long nodes[kMostNodes / kWordBits] = {};
    nodes[bit / kWordBits] = 1ul << bit % kWordBits;
    // The kernel reads one bit less than it is told of.
    syscall(SYS_mbind, pages, num_bytes, kPreferred, nodes, kMostNodes + 1, 0);
}

// Writes a 0 to each page, so that there is one: by several threads, a share of at least 32 MiB each.
inline void touch_pages(uint8_t *pages, size_t num_bytes)
{
    const size_t page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE)), least_share = size_t{32} << 20;
    const size_t num_threads = std::max<size_t>(
                     1, std::min<size_t>(std::thread::hardware_concurrency(), num_bytes / least_share)),
                 share = (num_bytes / num_threads / page_bytes + 1) * page_bytes;
    const auto touch = [=](size_t from) {
        for (size_t at = from; at < std::min(from + share, num_bytes); at += page_bytes) pages[at] = 0;
    };
    std::vector<std::thread> threads;
    size_t from = share;
    try {
        for (; from < num_bytes; from += share) threads.emplace_back(touch, from);
    } catch (const std::exception &) { // no more threads or memory: whoever comes next makes the other pages
    }
    touch(0);
    for (std::thread &thread : threads) thread.join();
}

// Makes the pages of a new mapping. node: where they are to be; negative: on the calling thread's.
inline void make_pages(void *pages, size_t num_bytes, int node)
{
    prefer_node(pages, num_bytes, node < 0 ? node_of_caller() : node);
    madvise(pages, num_bytes, MADV_HUGEPAGE); // without them it is slower, no more
    touch_pages(static_cast<uint8_t *>(pages), num_bytes);
}

} // namespace ibp

#endif
