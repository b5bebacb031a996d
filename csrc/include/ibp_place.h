/* ibp_place.h - rows coded one by one into the memory of a table, in any order and again and again.
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

/* What has become of rows that were coded into a place; added up over calls. */
typedef struct ibp_place_counts {
    uint64_t spilled; /* rows with an overflow part */
    uint64_t lost;    /* rows for whose overflow part there was no room */
} ibp_place_counts;

/* A table's memory, for rows that are coded one by one, in any order and again and again: every row has a base of its
 * own (rows_per_base 1), and the parts of overflow are handed out as rows need them. What is written here is read
 * through `table`, whose pointers are the same arrays.
 *
 * A row that has never been coded has base IBP_NO_BASE, and 0 in rooms. Fill lengths with 0 and bases with IBP_NO_BASE:
 * reading such a row is a fault then, unless slots hold raw rows.
 * A row keeps the part that it owns for as long as its bytes fit; else it gets a new one, at a multiple of
 * IBP_OVERFLOW_ALIGN, and the old one is lost to the table. With `rooms` a row remembers how much it owns while it
 * needs less, and one that grows gets room for its raw bytes, so that no row ever takes more than two parts; without
 * them it owns what its length says. */
typedef struct ibp_place {
    ibp_table table;   /* sizes and codebook; its pointers are not read. rows_per_base 1, starts 0 */
    uint8_t *slots;    /* table.slots_bytes */
    uint8_t *overflow; /* table.overflow_bytes */
    uint16_t *lengths; /* one a row; NULL in scheme raw */
    uint64_t *bases;   /* one a row; may be NULL where slot_bytes is row_bytes: there are no parts */
    uint16_t *rooms;   /* one a row: units of IBP_OVERFLOW_ALIGN that it owns from its base on; or NULL */
    uint64_t *used;    /* bytes of overflow that have been handed out; more than there are once one was refused. Not
                          NULL where there are bases */
    ibp_place_counts *counts; /* or NULL */
} ibp_place;

/* Rows as they are before coding: in one buffer or in many of the same layout (pages, tensors). Row i is row
 * i % rows_per_buffer of buffer i / rows_per_buffer, and inside a buffer at the sum of index * stride over num_dims
 * dimensions, in which its number is counted with the last one fastest: a slice of a cache is a source as it lies. A
 * row itself is row_bytes bytes one after the other, at any alignment; 16 bytes are read at once. */
typedef struct ibp_row_source {
    const uint8_t *data;                  /* the buffer; not read where there are buffers */
    const uint8_t *const *buffers;        /* addresses of ceil(num_rows / rows_per_buffer) of them; NULL: data alone */
    int64_t num_rows;                     /* of all buffers; at most INT32_MAX */
    int64_t rows_per_buffer;              /* at least 1, at most INT32_MAX; read where there are buffers */
    int64_t sizes[IBP_MAX_SOURCE_DIMS];   /* outermost first, 1 to INT32_MAX; their product is at least the rows of a
                                             buffer. The first one is not read */
    int64_t strides[IBP_MAX_SOURCE_DIMS]; /* bytes */
    uint32_t num_dims;                    /* 0: rows lie one after the other */
    uint32_t last_row_bytes; /* bytes of row num_rows - 1 where it is short, with num_dims 0; 0: row_bytes */
} ibp_row_source;

/* Codes the rows first to last - 1 of a source into a place: row i becomes row row_ids[i] of the table, or
 * first_row + i where row_ids is NULL. Threads may each take rows of one source; the order in which parts are handed
 * out says where they lie, and nothing else. This is the host twin of ibp_cuda_encode_into (ibp_cuda.h), for host
 * pointers, and otherwise does the same with lost rows, equal ids, bytes behind a row's own and untrusted fields.
 * @return the first fault's status, noted in *fault if that is still clear, or IBP_OK; lost rows are counted only. */
IBP_API ibp_status ibp_encode_into(const ibp_place *place, const ibp_row_source *source, const int64_t *row_ids,
                                   int64_t first_row, int64_t first, int64_t last, void *scratch, size_t scratch_bytes,
                                   ibp_fault *fault);

/* ibp_measure_rows and ibp_encode_rows in one pass over data, where the size of slots is known before: codes the rows
 * first_row to last_row - 1 of place->table, back to back in data, into whole slots, and fills their lengths. Parts of
 * overflow are handed out as rows need them; a row without room has base IBP_NO_BASE, and its right length and slot.
 * Where there was room for all parts (ibp_survey_rows says what they take), ibp_move_parts puts them where a table's
 * index says, and slots, lengths and overflow are those of ibp_encode_rows.
 * place: as for ibp_encode_into, of a coded scheme, with *used 0 before the first row; bases are written of rows with a
 * part alone. */
IBP_API ibp_status ibp_encode_slots(const ibp_place *place, const uint8_t *data, int64_t first_row, int64_t last_row,
                                    void *scratch, size_t scratch_bytes);

/* table: with lengths, bases of IBP_ROWS_PER_BASE rows and the sizes of the place's; from: as ibp_encode_slots has left
 * it. overflow: table->overflow_bytes. A part that does not lie in either overflow is left out. */
IBP_API ibp_status ibp_move_parts(const ibp_table *table, const ibp_place *from, uint8_t *overflow);

#ifdef __cplusplus
}
#endif
#endif
