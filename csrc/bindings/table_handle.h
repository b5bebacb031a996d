// table_handle.h - handles of tables and of caches of rows. A handle is a struct of sizes and addresses that have been
// checked once, so that operations need not check them at every call. The operations describe_table and describe_cache
// make handles and return their bytes as a tensor on the CPU. Other operations take this tensor, or a copy of it, as an
// argument.
#ifndef IBP_TABLE_HANDLE_H
#define IBP_TABLE_HANDLE_H

#include "../internal/ibp_internal.h"

#include <type_traits>

namespace ibp {

// The memory of a tensor, or of a part of a tensor. data is nullptr if the memory has no bytes.
struct Memory {
    uint8_t *data;
    int64_t num_bytes;
    // Returns whether the two ranges of memory overlap.
    bool meets(const Memory &other) const { return data < other.end() && other.data < end(); }
    const uint8_t *end() const { return data + num_bytes; }
};

enum TablePart { kSlots, kOverflow, kLengths, kBases, kCodebook, kRooms, kUsed, kFault, kNumParts };
constexpr const char *kPartNames[kNumParts] = {"slots",    "overflow", "lengths", "bases",
                                               "codebook", "rooms",    "used",    "fault"};

// A plan by which `take` fetches items on a GPU. A call with at least least_bucketed ids first sorts them by windows of
// 2^window_bits items, and then fetches the items with at most bucketed_sms multiprocessors (0: all). In large tables
// in pinned host memory, rows are fetched faster in this order.
struct GatherPlan {
    int64_t least_bucketed;
    uint32_t window_bits;
    int32_t bucketed_sms;
};

struct TableHandle {
    static constexpr uint64_t kMark = 0x656c646e61486269; // operations refuse a handle without this mark

    uint64_t mark;
    int64_t device;   // the CUDA device that reads the table; -1: the CPU
    ibp_place place;  // place.counts is nullptr; so is place.used, unless the table was described as a place
    ibp_fault *fault; // the record in which `take` notes faults; if nullptr, `take` refuses the table on a GPU
    GatherPlan plan;
    Memory parts[kNumParts]; // the memory of each part

    const ibp_table &table() const { return place.table; }
};
static_assert(std::is_trivially_copyable_v<TableHandle>, "its bytes are copied");

struct CacheHandle {
    static constexpr uint64_t kMark = 0x6568636143706269;

    uint64_t mark;
    int64_t device; // as in TableHandle
    ibp_cache_map maps[IBP_MAX_SLABS];
    ibp_cache slabs; // entries is nullptr
    ibp_lru lru;     // slot_bytes is 0 unless the cache replaces rows
    ibp_cache_counts *counts;
    Memory parts[2 * IBP_MAX_SLABS + 3]; // the memory of maps, slabs, stamps, clock and counts
};
static_assert(std::is_trivially_copyable_v<CacheHandle>, "its bytes are copied");

} // namespace ibp

#endif
