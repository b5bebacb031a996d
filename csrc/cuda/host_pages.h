// host_pages.h - allocates the pages of new mappings of host memory with several threads, on a given NUMA node, and as
// huge pages if the system has them. Nothing here needs CUDA.
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

// Returns the node on which the calling thread runs; 0 if the system does not say.
inline int node_of_caller()
{
    unsigned node = 0;
    return syscall(SYS_getcpu, nullptr, &node, nullptr) == 0 ? static_cast<int>(node) : 0;
}

// Asks the system to take pages from a node, whichever thread writes to them first. If the node has no free pages, the
// system takes pages from other nodes. If the system refuses the request, as in some containers, nothing changes: the
// system still chooses the node of each page.
inline void prefer_node(void *pages, size_t num_bytes, int node)
{
    constexpr int kPreferred = 1; // MPOL_PREFERRED of numaif.h
    // kMostNodes: the largest number of nodes that a Linux kernel supports.
    constexpr size_t kWordBits = 8 * sizeof(unsigned long), kMostNodes = 1024;
    const size_t bit = static_cast<size_t>(node);
    if (bit >= kMostNodes) return;
    unsigned long nodes[kMostNodes / kWordBits] = {};
    nodes[bit / kWordBits] = 1ul << bit % kWordBits;
    // The kernel reads one bit less than this argument says.
    syscall(SYS_mbind, pages, num_bytes, kPreferred, nodes, kMostNodes + 1, 0);
}

// Writes a 0 to each page, so that the system allocates it. Several threads do this, each for at least 32 MiB.
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
        // No further thread could be started. The system allocates the pages of the missing threads when they are first
        // written.
    } catch (const std::exception &) {
    }
    touch(0);
    for (std::thread &thread : threads) thread.join();
}

// Allocates the pages of a new mapping. node: the NUMA node on which they should lie; if negative, the calling thread's
// node.
inline void make_pages(void *pages, size_t num_bytes, int node)
{
    prefer_node(pages, num_bytes, node < 0 ? node_of_caller() : node);
    madvise(pages, num_bytes, MADV_HUGEPAGE); // without huge pages, access is only slower
    touch_pages(static_cast<uint8_t *>(pages), num_bytes);
}

} // namespace ibp

#endif
