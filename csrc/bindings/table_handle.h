// table_handle.h - a table, or a place for coded rows, as all operations of one device take it: checked and described
// once. ibp._core owns a handle, operations find it in the bytes of a tensor, and a copy of these serves as well.
#ifndef IBP_TABLE_HANDLE_H
#define IBP_TABLE_HANDLE_H

#include "ibp.h"

#include <type_traits>

namespace ibp {

// Bytes [first, end) of an address space.
struct Range {
    uintptr_t first, end;
    bool meets(const Range &other) const { return first < other.end && other.first < end; }
};

enum TablePart { kSlots, kOverflow, kLengths, kBases, kCodebook, kRooms, kUsed, kNumParts };
constexpr const char *kPartNames[kNumParts] = {"slots", "overflow", "lengths", "bases", "codebook", "rooms", "used"};

struct TableHandle {
    static constexpr uint64_t kMark = 0x656c646e61486269; // bytes without it are no handle

    uint64_t mark;
    int64_t device;         // the CUDA device that reads the table; -1: the CPU
    ibp_place place;        // without counts. used is nullptr where no place was described
    Range parts[kNumParts]; // the memory of the tensors

    const ibp_table &table() const { return place.table; }
};
static_assert(std::is_trivially_copyable_v<TableHandle>, "its bytes are copied");

} // namespace ibp

#endif
