/* ibp_place.h - codes single rows into the memory of a table, in any order and as often as they change.
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

#define IBP_NO_BASE UINT64_MAX /* in bases: a row that owns no overflow part */
#define IBP_MAX_SOURCE_DIMS 4u

/* Counts of rows that were coded into a place, added up over calls. */
typedef struct ibp_place_counts {
    uint64_t spilled; /* rows with an overflow part */
    uint64_t lost;    /* rows for whose overflow part there was no room */
} ibp_place_counts;

/* The memory of a table whose rows are coded one by one, in any order and as often as they change. Every row has a base
 * of its own (rows_per_base 1), and parts of overflow are handed out as rows need them. Rows are read through `table`,
 * once its pointers are set to the same arrays.
 *
 * A row that has never been coded has base IBP_NO_BASE, and 0 in rooms. Fill lengths with 0 and bases with IBP_NO_BASE
 * before the first row is coded: then reading a row that has not been coded is a fault, unless slots hold raw rows.
 *
 * A row keeps its part of overflow as long as its bytes fit. Otherwise it gets a new part, at a multiple of
 * IBP_OVERFLOW_ALIGN, and the old one is lost to the table. With `rooms` a row remembers how much it owns even while it
 * needs less, and a row that outgrows its part gets room for its raw bytes, so that no row ever takes more than two
 * parts. Without `rooms` a row owns what its length says.
 *
 * is_new: 1 if none of the rows that are coded has been coded before. Bases then need no values before the call, and
 * those of rows with a part are written. Whole slots are written, with zeros after a row's bytes. A row without room
 * for its part gets base IBP_NO_BASE, but its length and slot are right, so that ibp_survey_rows says what all rows
 * take. If all parts found room, ibp_move_parts brings them into the order of a table's index. Slots, lengths and
 * overflow are then those that ibp_encode_rows writes, after one pass over the data.
 *
 * If bases is NULL and slot_bytes is 0, rows are packed: each begins in overflow where the row before it ends, at byte
 * *used. One thread codes them in their order, in host memory, and the result is a table in packed layout. A row is
 * lost if overflow has no room for its raw bytes. */
typedef struct ibp_place {
    ibp_table table;   /* sizes and codebook; its pointers are not read. rows_per_base is 1, and both starts are 0 */
    uint8_t *slots;    /* table.slots_bytes bytes */
    uint8_t *overflow; /* table.overflow_bytes bytes */
    uint16_t *lengths; /* one for each row; NULL in scheme raw */
    uint64_t *bases;   /* one for each row; NULL if rows are packed, or have no parts because slot_bytes is row_bytes */
    uint16_t *rooms;   /* for each row how many units of IBP_OVERFLOW_ALIGN it owns, from its base on; or NULL */
    uint64_t *used;    /* bytes of overflow that have been handed out; more than overflow has once a part was refused.
                          NULL only if slot_bytes is row_bytes and bases is NULL */
    ibp_place_counts *counts; /* or NULL */
    uint32_t is_new;          /* 0 or 1 */
} ibp_place;

/* Rows before coding, in one buffer or in many of the same layout (pages, tensors). Row i is row
 * k = i % rows_per_buffer of buffer i / rows_per_buffer. With num_dims 0 it begins at byte k * row_bytes of the buffer.
 * Otherwise k is counted in row-major order over num_dims dimensions, and the row begins at the sum of index * stride,
 * so that a slice of a cache is a source where it lies. A row is row_bytes contiguous bytes at any alignment; 16 bytes
 * are read at once. */
typedef struct ibp_row_source {
    const uint8_t *data;                  /* the buffer; read if `buffers` is NULL */
    const uint8_t *const *buffers;        /* addresses of ceil(num_rows / rows_per_buffer) buffers; NULL: `data`
                                             alone */
    int64_t num_rows;                     /* of all buffers; at most INT32_MAX if there are buffers or dimensions */
    int64_t rows_per_buffer;              /* 1 to INT32_MAX; read if there are buffers */
    int64_t sizes[IBP_MAX_SOURCE_DIMS];   /* outermost first, 1 to INT32_MAX each; their product is at least the
                                             number of rows of a buffer. The first one is not read */
    int64_t strides[IBP_MAX_SOURCE_DIMS]; /* bytes */
    uint32_t num_dims;                    /* 0: rows lie one after the other */
    uint32_t last_row_bytes;              /* bytes of row num_rows - 1 if it is short, with num_dims 0; 0: row_bytes */
} ibp_row_source;

/* Measures and codes rows of a source into a place, in one pass over them. A row that does not shrink is stored raw. A
 * row is lost if there is no room for its part of overflow: its base becomes IBP_NO_BASE and its length 0 (unless the
 * place is new), so that reading it is a fault, and place->counts counts it.
 *
 * place: with arrays in host memory. Its lengths, bases and rooms are not trusted: a part that does not lie in overflow
 *   counts as none.
 * source: the rows. A row with fewer bytes than a row of the table is filled up with zeros; of a row with more bytes
 *   the first ones are taken.
 * row_ids: row i of the source becomes row row_ids[i] of the table. If NULL, it becomes row first_row + i; new and
 *   packed rows require this. Ids must differ. If two are equal and the table has bases, one of the rows is coded, and
 *   the other id may be noted as IBP_INVALID_ARGUMENT.
 * first, last: the rows first to last - 1 of the source are coded. Several threads may each code rows of one source,
 *   unless rows are packed. The order in which they run changes only where parts of overflow lie.
 * scratch, scratch_bytes: at least ibp_scratch_bytes(row_bytes) bytes.
 * fault: receives the first fault if *fault is still zero. An id outside the table is noted as IBP_INDEX_OUT_OF_RANGE,
 *   and its row is left out.
 * @return IBP_OK, or the status of this call's first fault. Lost rows are no fault. */
IBP_API ibp_status ibp_encode_into(const ibp_place *place, const ibp_row_source *source, const int64_t *row_ids,
                                   int64_t first_row, int64_t first, int64_t last, void *scratch, size_t scratch_bytes,
                                   ibp_fault *fault);

/* Copies the overflow parts of new rows, in the order of the rows, to the places that the index of a table gives them.
 *
 * table: the place's sizes and lengths, and bases as ibp_index_rows makes them from these lengths. Slots stay where
 *   they are, and are not read.
 * from: the place, with is_new, whose rows have all found room.
 * overflow: receives the parts; table->overflow_bytes bytes, which must not overlap from->overflow. A part that does
 *   not lie in both arrays is left out. */
IBP_API ibp_status ibp_move_parts(const ibp_table *table, const ibp_place *from, uint8_t *overflow);

#ifdef __cplusplus
}
#endif
#endif
