// target.cuh - finds the place where a coded row is stored. If rows have been measured, the table's index gives the
// place. Otherwise a row claims a part of overflow.
#ifndef IBP_ENCODE_TARGET_CUH
#define IBP_ENCODE_TARGET_CUH

#include "encoder.cuh"

namespace ibp {

// Returns the smaller of `room` and the number of bytes from byte `start` of an array to its end.
__device__ __forceinline__ uint32_t room_in(uint32_t room, int64_t array_bytes, uint64_t start)
{
    return static_cast<uint32_t>(min(uint64_t{room}, static_cast<uint64_t>(array_bytes) - start));
}

// ---- rows whose places are known ----

// The place of a row, which is known before the row is coded. slot_room, room: sizes in bytes of the slot and of the
// overflow part, including padding; 0 if nothing is written there. length: the row's entry in `lengths`. in_bounds: the
// place lies inside the table's arrays.
struct RowTarget {
    uint64_t slot_start, overflow_start;
    uint32_t length, slot_room, room;
    bool in_bounds;
};

// Returns the place of a row according to the table's index. Whole slots are written, even those of default rows, so
// that equal tables have equal bytes.
template <class G> __device__ __forceinline__ RowTarget target_of(const ibp_table &table, int64_t row)
{
    const auto length_of = [&](int64_t r) { return table.lengths ? uint32_t{IBP_LOAD_ONCE(table.lengths[r])} : 0u; };
    const uint32_t row_bytes = table.codebook.row_bytes;
    RowTarget target{};
    target.length = static_cast<uint32_t>(G::broadcast(length_of(row))); // the same in all lanes
    ibp_row_place place = ibp_split_row(&table, row, target.length);
    uint64_t base = 0;
    uint32_t rooms = 0;
    if (ibp_needs_base(&table, &place)) { // the lanes add up the rooms of the rows before this one
        for (int64_t r = ibp_first_of_base(&table, row) + G::lane(); r < row; r += G::kLanes)
            rooms += ibp_room_of(length_of(r), row_bytes, row_bytes, table.slot_bytes);
        base = IBP_LOAD_ONCE(table.bases[ibp_base_of_row(&table, row)]);
        rooms = G::sum_in_warp(rooms);
    }
    target.in_bounds = ibp_place_in_bounds(&table, base, rooms, &place);
    if (!target.in_bounds) return target;
    target.slot_start = place.slot_start, target.overflow_start = place.overflow_start;
    if (ibp_part_in_bounds(place.slot_start, 0u, table.slots_bytes) && (place.in_slot != 0u || place.is_default))
        target.slot_room = room_in(table.slot_bytes, table.slots_bytes, place.slot_start);
    if (place.in_overflow != 0u)
        target.room =
            room_in(ibp_overflow_room(place.in_overflow, table.slot_bytes), table.overflow_bytes, place.overflow_start);
    return target;
}

// ---- rows that claim their parts ----

constexpr uint64_t kClaimed = IBP_NO_BASE - 1u; // the base of a row that another group has claimed
constexpr uint64_t kNotSeen = UINT64_MAX;

// The part of overflow that a row owns. base: the byte of overflow at which the part begins; IBP_NO_BASE if there is no
// part. sectors: the part's size in units of IBP_OVERFLOW_ALIGN bytes.
struct OverflowPart {
    uint64_t base;
    uint32_t sectors;
};

// Returns the part that a row's base points to, or no part if that part does not lie in overflow.
__device__ __forceinline__ OverflowPart part_of(const ibp_place &place, int64_t row, uint64_t base, uint32_t valid)
{
    const ibp_table &table = place.table;
    const uint32_t sectors = place.rooms != nullptr
                                 ? IBP_LOAD_ONCE(place.rooms[row])
                                 : ibp_sectors_of(ibp_overflow_part(ibp_stored_bytes(IBP_LOAD_ONCE(place.lengths[row]),
                                                                                     table.codebook.row_bytes, valid),
                                                                    table.slot_bytes));
    if (!ibp_part_in_bounds(base, IBP_OVERFLOW_ALIGN * sectors, table.overflow_bytes)) return {IBP_NO_BASE, 0};
    return {base, sectors};
}

// Claims a row that other groups may store, too, and returns its part as part_of does. Until the row's base is written,
// other groups that claim the row get a part with the base kClaimed.
__device__ __forceinline__ OverflowPart claim_part(const ibp_place &place, int64_t row, uint32_t valid)
{
    const uint64_t base = atomicExch(reinterpret_cast<unsigned long long *>(place.bases + row), kClaimed);
    __threadfence();
    return base == kClaimed ? OverflowPart{kClaimed, 0} : part_of(place, row, base, valid);
}

// Allocates a part that no other row has. If there is no room, returns a part with the base IBP_NO_BASE. seen: the last
// value of the counter place.used that this lane has read; kNotSeen at first.
//
// If the part would not fit at byte `seen`, the counter is read again. If the part does not fit at the counter's new
// value either, nothing is added to the counter. So the counter stays near the size of overflow, however many rows find
// no room. If the part would fit at byte `seen`, the counter is not read first, because a second access to a counter
// that all groups use would delay the row.
__device__ __forceinline__ OverflowPart take_part(const ibp_place &place, uint32_t sectors, uint64_t &seen)
{
    const auto there_are = static_cast<uint64_t>(place.table.overflow_bytes);
    const uint64_t num_bytes = uint64_t{IBP_OVERFLOW_ALIGN} * sectors;
    auto *const used = reinterpret_cast<unsigned long long *>(place.used);
    const auto fits = [&](uint64_t start) { return start <= there_are && num_bytes <= there_are - start; };
    if (!fits(seen)) seen = *static_cast<volatile unsigned long long *>(used);
    if (!fits(seen)) return {IBP_NO_BASE, 0};
    const uint64_t start = atomicAdd(used, static_cast<unsigned long long>(num_bytes));
    seen = start + num_bytes;
    return fits(start) ? OverflowPart{start, sectors} : OverflowPart{IBP_NO_BASE, 0};
}

// Allocates a part for a row whose own part is too small. The new part has room for the raw row if the row had a part,
// the place has an array `rooms` of sizes, and overflow has enough room. Otherwise the new part has room for the coded
// row. own: the part that the row had. in_overflow: size in bytes of the coded row's overflow part.
__device__ __forceinline__ OverflowPart take_part_for(const ibp_place &place, OverflowPart own, uint32_t in_overflow,
                                                      uint32_t valid, uint64_t &seen)
{
    OverflowPart part{IBP_NO_BASE, 0};
    if (place.rooms != nullptr && own.sectors != 0u)
        part = take_part(place, ibp_sectors_of(ibp_overflow_part(valid, place.table.slot_bytes)), seen);
    return part.base != IBP_NO_BASE ? part : take_part(place, ibp_sectors_of(in_overflow), seen);
}

} // namespace ibp

#endif
