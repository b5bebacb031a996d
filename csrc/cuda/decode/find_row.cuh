// find_row.cuh - finds a row's stored bytes in kernels (see core/locate.h).
#ifndef IBP_FIND_ROW_CUH
#define IBP_FIND_ROW_CUH

#include "../../core/locate.h"
#include "../group.cuh"

namespace ibp {

// Returns a row's entry in `lengths`; 0 (a raw row) if the table has no lengths.
__device__ __forceinline__ uint32_t length_of_row(const uint16_t *lengths, int64_t row)
{
    return lengths != nullptr ? __ldg(lengths + row) : 0u;
}

// Returns the total number of bytes that the earlier rows with the same base as this row take in overflow, including
// padding. Before coding, each of these rows has row_bytes bytes: only the last row of a table can be shorter, and it
// is not an earlier row.
__device__ __forceinline__ uint32_t rooms_before(const ibp_table &table, int64_t row)
{
    const int64_t first = ibp_first_of_base(&table, row);
    // A room is the number of bytes that a row takes in overflow, including padding. It is a multiple of `unit`. room()
    // returns what ibp_room_of returns, in fewer instructions.
    const uint32_t num_before = static_cast<uint32_t>(row - first), row_bytes = table.codebook.row_bytes,
                   unit = ibp_overflow_room(1u, table.slot_bytes);
    const auto room = [&](uint32_t length) {
        const uint32_t stored = ibp_stored_bytes(length, row_bytes, row_bytes);
        return (max(stored, table.slot_bytes) - table.slot_bytes + (unit - 1u)) & (0u - unit);
    };
    if (table.lengths == nullptr) return num_before * room(0);
    uint32_t rooms = 0;
#pragma unroll 8
    for (const uint16_t *length = table.lengths + first, *const end = length + num_before; length != end; length++)
        rooms += room(__ldg(length));
    return rooms;
}

// Finds the stored parts of a row. Returns false if the row is corrupt. row: at least 0, and less than the table's
// number of rows. length: the row's entry in `lengths`.
__device__ __forceinline__ bool find_row(const ibp_table &table, int64_t row, uint32_t length, ibp_row_place *place)
{
    *place = ibp_split_row(&table, row, length);
    const bool needs_base = ibp_needs_base(&table, place);
    const uint64_t base = needs_base ? __ldg(table.bases + ibp_base_of_row(&table, row)) : 0u;
    return ibp_place_in_bounds(&table, base, needs_base ? rooms_before(table, row) : 0u, place);
}

__device__ __forceinline__ bool find_row(const ibp_table &table, int64_t row, ibp_row_place *place)
{
    return find_row(table, row, length_of_row(table.lengths, row), place);
}

// Writes the bytes [low, high) of a default row to dst.
template <class G>
__device__ __forceinline__ void fill_default(const ibp_codebook &cb, uint8_t *dst, uint32_t low, uint32_t high)
{
    const uint8_t *const row_template = ibp_template_of(&cb);
    if (row_template != nullptr)
        group_copy<G>(dst, row_template + low, high - low);
    else
        group_fill<G>(dst, high - low, turned_bytes(ibp_default_bytes(&cb), low));
}

} // namespace ibp

#endif
