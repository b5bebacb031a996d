/* chunk_plan.h - how the rows of a table are cut into chunks that are copied to a GPU and decoded there one after the
 * other. */
#ifndef IBP_CHUNK_PLAN_H
#define IBP_CHUNK_PLAN_H

#include "ibp.h"

#ifdef __cplusplus
extern "C" {
#endif

#define IBP_CHUNK_ALIGN \
    128 /* of a chunk's parts: in the table's arrays, where they start at multiples of it, and in the ring */

/* Rows, and the ranges of the table's slots and overflow that hold them. */
typedef struct ibp_chunk {
    int64_t first_row,
        last_row; /* rows first_row to last_row - 1; multiples of IBP_ROWS_PER_BASE, but for the end of the table */
    uint64_t slots_start, slots_bytes;
    uint64_t overflow_start, overflow_bytes; /* none where every row has a base of its own */
    bool fits; /* else the ranges mean nothing: bases are out of order there, or 32 rows are larger than the room */
} ibp_chunk;

/* Bytes that the next chunk should have. They grow from small ones, so that decoding starts early; shrink before the
 * end (ends: of all that is streamed), so that little is left to decode when all is copied; and are about equal in
 * between. done_bytes, left_bytes: of what is streamed, before this chunk and from it on; left_bytes > 0. @return 1 to
 * most_bytes. */
int64_t ibp_size_chunk(int64_t done_bytes, int64_t left_bytes, int64_t most_bytes, bool ends);

/* The next chunk: from first_row, a multiple of IBP_ROWS_PER_BASE below end_row, as many rows up to end_row as make the
 * size that ibp_size_chunk asks for, but at least IBP_ROWS_PER_BASE. bases: the table's, in host memory (table->bases
 * is not read). room_bytes: of the buffer for the slots part and, from the next multiple of IBP_CHUNK_ALIGN on, the
 * overflow part. */
ibp_chunk ibp_plan_chunk(const ibp_table *table, const uint64_t *bases, int64_t first_row, int64_t end_row,
                         int64_t done_bytes, int64_t room_bytes, bool ends);

/* Where the overflow part of a chunk starts in its buffer. */
uint64_t ibp_chunk_overflow_offset(const ibp_chunk *chunk);

#ifdef __cplusplus
}
#endif
#endif
