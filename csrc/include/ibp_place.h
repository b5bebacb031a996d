/* ibp_place.h - codes single rows into the memory of a table, in any order, and again whenever they change.
 *
 *     ibp_status replace_row(const ibp_place *place, int64_t number, const uint8_t *row, void *scratch)
 *     {
 *         ibp_row_source source = {0};
 *         source.data = row;
 *         source.num_rows = 1;
 *         ibp_fault fault = {0};
 *         const size_t scratch_bytes = ibp_scratch_bytes(place->table.codebook.row_bytes);
 *         return ibp_encode_into(place, &source, &number, 0, 0, 1, scratch, scratch_bytes, &fault);
 *     }
 */
#ifndef IBP_PLACE_H
#define IBP_PLACE_H

#include "ibp_table.h"

#ifdef __cplusplus
extern "C" {
#endif

#define IBP_NO_BASE UINT64_MAX /* the entry of `bases` for a row without an overflow part */
#define IBP_MAX_SOURCE_DIMS 4u

/* Counts of the rows that were coded into a place. Each call adds to them. */
typedef struct ibp_place_counts {
    uint64_t spilled; /* number of rows with an overflow part */
    uint64_t lost;    /* number of rows that were not stored, because overflow had no room for a part */
} ibp_place_counts;

/* The memory of a table whose rows are coded one by one, in any order, and again whenever they change. Every row has
 * its own base (rows_per_base 1), and parts of overflow are allocated when rows need them. To read rows, set the
 * pointers of `table` to the same arrays and use it like any other table.
 *
 * A row that has never been coded has base IBP_NO_BASE, and 0 in rooms. Fill lengths and rooms with 0 and bases with
 * IBP_NO_BASE before the first row is coded. Then reading a row that has not been coded is a fault, unless slot_bytes
 * is row_bytes.
 *
 * A row keeps its part of overflow as long as its bytes fit in that part. Otherwise it gets a new part, at a multiple
 * of IBP_OVERFLOW_ALIGN, and the old part is not used again. If the place has `rooms`, the size of a row's part is
 * remembered even while the row needs fewer bytes. A row that outgrows its part then gets a part that can hold its raw
 * bytes, if overflow has enough bytes left. So the row never needs a third part. Without `rooms` the size of a row's
 * part follows from the row's length.
 *
 * is_new: 1 if none of the rows that a call codes has been coded before. Then `bases` need not be filled in before the
 *   call, and only the bases of rows that need a part are written. Whole slots are written, with zeros after a row's
 *   bytes. If overflow has no room for a row's part, the row's base becomes IBP_NO_BASE, but its length and slot are
 *   right, so that ibp_survey_rows can count the sizes of all rows. If overflow had room for all parts, ibp_move_parts
 *   can copy them to the offsets that a table's index gives them. Slots, lengths and overflow are then the same as
 *   ibp_encode_rows would write, but the data was read only once.
 *
 * If bases is NULL and slot_bytes is 0, rows are packed: each row begins in overflow where the row before it ends. The
 * next row that is coded begins at byte *used. One thread codes the rows in their order, in host memory, and the result
 * is a table in packed layout. A row is lost if overflow has no room for its raw bytes, even if the coded row would
 * fit. */
typedef struct ibp_place {
    /* Sizes and codebook; its pointers are not read. rows_per_base is 1; slots_start and overflow_start are 0. */
    ibp_table table;
    uint8_t *slots;    /* table.slots_bytes bytes */
    uint8_t *overflow; /* table.overflow_bytes bytes */
    uint16_t *lengths; /* an entry for each row; NULL in scheme raw */
    uint64_t *bases;   /* an entry for each row; NULL if rows are packed, or if they have no parts because slot_bytes is
                          row_bytes */
    uint16_t *rooms;   /* for each row the size of its overflow part, in units of IBP_OVERFLOW_ALIGN bytes; or NULL */
    uint64_t *used;    /* number of bytes of overflow that have been allocated. It may become larger than
                          overflow_bytes if there was no room for a part. NULL only if slot_bytes is row_bytes and
                          bases is NULL */
    ibp_place_counts *counts; /* or NULL */
    uint32_t is_new;          /* 0 or 1 */
} ibp_place;

/* Rows before coding, in one buffer or in many of the same layout (pages, tensors). Every buffer has rows_per_buffer
 * rows; the rows of all buffers are numbered in one sequence. With num_dims 0, row k of a buffer begins at byte k *
 * row_bytes of the buffer. Otherwise the rows of a buffer are numbered in row-major order over num_dims dimensions, and
 * a row begins at the sum of index * stride over the dimensions. So a slice of a cache can be a source without being
 * copied. A row is row_bytes contiguous bytes at any alignment; rows that begin at multiples of 16 bytes are read
 * fastest. */
typedef struct ibp_row_source {
    const uint8_t *data;                  /* the buffer; read if `buffers` is NULL */
    const uint8_t *const *buffers;        /* addresses of ceil(num_rows / rows_per_buffer) buffers; NULL: `data`
                                             alone */
    int64_t num_rows;                     /* number of rows in all buffers; at most INT32_MAX if there are buffers or
                                             dimensions */
    int64_t rows_per_buffer;              /* 1 to INT32_MAX; read if there are buffers */
    int64_t sizes[IBP_MAX_SOURCE_DIMS];   /* outermost first, 1 to INT32_MAX each; their product is at least the
                                             number of rows of a buffer. sizes[0] is not read */
    int64_t strides[IBP_MAX_SOURCE_DIMS]; /* in bytes */
    uint32_t num_dims;                    /* 0: rows lie one after the other */
    uint32_t last_row_bytes;              /* size of row num_rows - 1 in bytes, at most row_bytes; 0: row_bytes. Only
                                             with num_dims 0 */
} ibp_row_source;

/* Measures and codes rows of a source into a place, in one pass over them. A row that does not shrink is stored raw. If
 * overflow has no room for a row's part, the row is lost: its base becomes IBP_NO_BASE, so that reading it is a fault,
 * and place->counts counts it. Its length becomes 0, unless is_new is 1.
 *
 * place: its arrays are in host memory. Its lengths, bases and rooms are not trusted: a row whose part does not lie in
 *   overflow is treated as a row without a part.
 * source: the rows. A row with fewer bytes than the table's row is extended with zeros; a row with more bytes is cut.
 * row_ids: row i of the source becomes row row_ids[i] of the table. If NULL, it becomes row first_row + i. row_ids must
 *   be NULL if is_new is 1 or if rows are packed. Ids must differ. If two ids are equal and the table has bases, the
 *   table's row becomes one of the two rows, and the other row may be noted as IBP_INVALID_ARGUMENT.
 * first, last: the rows first to last - 1 of the source are coded. Several threads may each code rows of one source,
 *   unless rows are packed. The order in which the threads run affects only the offsets of overflow parts.
 * scratch, scratch_bytes: at least ibp_scratch_bytes(row_bytes) bytes.
 * fault: receives the first fault if *fault is still zero. An id outside the table is noted as IBP_INDEX_OUT_OF_RANGE,
 *   and its row is left out.
 * @return IBP_OK, or the status of this call's first fault. A lost row is not a fault. */
IBP_API ibp_status ibp_encode_into(const ibp_place *place, const ibp_row_source *source, const int64_t *row_ids,
                                   int64_t first_row, int64_t first, int64_t last, void *scratch, size_t scratch_bytes,
                                   ibp_fault *fault);

/* Copies the overflow parts of new rows, in the order of the rows, to the offsets that the index of a table gives them.
 *
 * table: the place's sizes and lengths, and bases as ibp_index_rows makes them from these lengths. Slots stay where
 *   they are, and are not read.
 * from: the place that the rows were coded into, with is_new 1. None of its rows may be lost.
 * overflow: receives the parts; table->overflow_bytes bytes, which must not overlap from->overflow. A part whose source
 *   or destination is out of bounds is skipped. */
IBP_API ibp_status ibp_move_parts(const ibp_table *table, const ibp_place *from, uint8_t *overflow);

#ifdef __cplusplus
}
#endif
#endif
