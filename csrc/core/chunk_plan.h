/* chunk_plan.h - cuts the rows of a table into chunks. The chunks are copied to a GPU and decoded there one after the
 * other. */
#ifndef IBP_CHUNK_PLAN_H
#define IBP_CHUNK_PLAN_H

#include "ibp.h"

#ifdef __cplusplus
extern "C" {
#endif

#define IBP_CHUNK_ALIGN 128 /* alignment in bytes of a chunk's parts in the table's arrays and in the buffer */

/* A chunk: some consecutive rows of a table, and the ranges of slots and overflow that hold these rows. */
typedef struct ibp_chunk {
    int64_t first_row,
        last_row; /* rows first_row to last_row - 1; both are multiples of IBP_ROWS_PER_BASE, except at the end of
                     the table */
    uint64_t slots_start, slots_bytes;
    uint64_t overflow_start, overflow_bytes; /* 0 if every row has its own base */
    bool fits; /* false if bases are out of order, or if IBP_ROWS_PER_BASE rows are larger than the buffer. Then the
                  ranges must not be used */
} ibp_chunk;

/* Returns the size in bytes that the next chunk should have, 1 to most_bytes. The first chunks are small and grow, so
 * that decoding starts early. Chunks in the middle are about equal. The last chunks shrink, so that little is left to
 * decode when everything has been copied.
 *
 * done_bytes: number of bytes of the stream before this chunk.
 * left_bytes: number of bytes of the stream from this chunk to the end; above 0.
 * ends: whether the stream ends after the left_bytes bytes. */
int64_t ibp_size_chunk(int64_t done_bytes, int64_t left_bytes, int64_t most_bytes, bool ends);

/* Returns the next chunk, which begins at first_row and ends at end_row or before. It has at least IBP_ROWS_PER_BASE
 * rows, or all rows up to end_row. If it has more rows, its size is at most what ibp_size_chunk returns.
 *
 * bases: the table's bases in host memory; table->bases is not read.
 * first_row: a multiple of IBP_ROWS_PER_BASE below end_row.
 * room_bytes: size of the buffer that receives the slots part and then, at the next multiple of IBP_CHUNK_ALIGN, the
 *   overflow part. */
ibp_chunk ibp_plan_chunk(const ibp_table *table, const uint64_t *bases, int64_t first_row, int64_t end_row,
                         int64_t done_bytes, int64_t room_bytes, bool ends);

/* Returns the offset of a chunk's overflow part in its buffer. */
uint64_t ibp_chunk_overflow_offset(const ibp_chunk *chunk);

#ifdef __cplusplus
}
#endif
#endif
