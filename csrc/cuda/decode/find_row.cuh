// find_row.cuh - where a row's stored bytes are, for the threads that fetch it (core/locate.h).
#ifndef IBP_FIND_ROW_CUH
#define IBP_FIND_ROW_CUH

#include "../../core/locate.h"
#include "../warp.cuh"

namespace ibp {

// Bytes that the rows of a row's group before it take in overflow: whole rows.
__device__ __forceinline__ uint32_t rooms_before(const ibp_table &table, int64_t row)
{
    const int64_t first = ibp_first_of_group(row);
    const uint32_t in_group = ibp_row_in_group(row);
    uint32_t rooms = 0;
#pragma unroll 8
    for (uint32_t q = 0; q < in_group; q++)
        rooms += ibp_room_of(table.lengths ? __ldg(table.lengths + (first + q)) : 0u, table.codebook.row_bytes,
                             table.slot_bytes);
    return rooms;
}

// Returns false if the row is corrupt. 0 <= row < rows of the table.
__device__ __forceinline__ bool find_row(const ibp_table &table, int64_t row, ibp_row_place *place)
{
    *place = ibp_split_row(&table, row, table.lengths ? __ldg(table.lengths + row) : 0u);
    const bool needs_base = ibp_needs_base(&table, place);
    const uint64_t base = needs_base ? __ldg(table.bases + ibp_group_of_row(row)) : 0u;
    return ibp_place_in_bounds(&table, base, needs_base ? rooms_before(table, row) : 0u, place);
}

} // namespace ibp

#endif
