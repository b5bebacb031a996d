// table_handle.h - handles of tables and of caches of rows. describe_table and describe_cache check the memory once and
// return the bytes of a handle as a tensor on the CPU. The operations of that memory's device take this tensor, or a
// copy of it.
#ifndef IBP_TABLE_HANDLE_H
#define IBP_TABLE_HANDLE_H

#include "../internal/ibp_internal.h"

#include <type_traits>

namespace ibp {

// Memory of a tensor, or of a part of it. data: nullptr if there is none.
struct Memory {
    uint8_t *data;
    int64_t num_bytes;
    bool meets(const Memory &other) const { return data < other.end() && other.data < end(); }
    const uint8_t *end() const { return data + num_bytes; }
};

enum TablePart { kSlots, kOverflow, kLengths, kBases, kCodebook, kRooms, kUsed, kFault, kNumParts };
constexpr const char *kPartNames[kNumParts] = {"slots",    "overflow", "lengths", "bases",
                                               "codebook", "rooms",    "used",    "fault"};

// The way in which `take` fetches items from memory that is far from the GPU. If there are at least least_bucketed ids,
// it first sorts them by windows of 2^window_bits items, and then fetches them with bucketed_sms multiprocessors (0:
// all).
struct GatherPlan {
    int64_t least_bucketed;
    uint32_t window_bits;
    int32_t bucketed_sms;
};

struct TableHandle {
    static constexpr uint64_t kMark = 0x656c646e61486269; // bytes without this mark are refused

    uint64_t mark;
    int64_t device;   // the CUDA device that reads the table; -1: the CPU
    ibp_place place;  // counts is nullptr; used is nullptr unless a place was described
    ibp_fault *fault; // the record in which `take` notes faults on a GPU; nullptr: a GPU's `take` refuses the table
    GatherPlan plan;
    Memory parts[kNumParts]; // memory of the tensors

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
    Memory parts[2 * IBP_MAX_SLABS + 3]; // maps, slabs, stamps, clock and counts
};
static_assert(std::is_trivially_copyable_v<CacheHandle>, "its bytes are copied");

} // namespace ibp

#endif
