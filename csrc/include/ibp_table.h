/* ibp_table.h - tables of rows (sections 1 to 3 of FORMAT.md). To make a table, measure its rows (ibp_measure_rows),
 * index them (ibp_index_rows) and code them (ibp_encode_rows), in this order. Then gather items or decode bytes.
 *
 *     ibp_status three_items(const ibp_table *table, uint8_t *out, void *scratch) // items 7, 0 and 7
 *     {
 *         const int32_t numbers[3] = {7, 0, 7};
 *         ibp_ids ids = {0};
 *         ids.data = numbers;
 *         ids.count = 3;
 *         ids.id_bytes = sizeof numbers[0];
 *         ibp_fault fault = {0};
 *         const size_t scratch_bytes = ibp_scratch_bytes(table->codebook.row_bytes);
 *         return ibp_gather_items(table, &ids, 0, 3, out, scratch, scratch_bytes, &fault);
 *     }
 */
#ifndef IBP_TABLE_H
#define IBP_TABLE_H

#include "ibp_codebook.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A table: the addresses of the bytes of a coded tensor, and how the bytes are coded. The tensor is num_items items of
 * item_bytes bytes, back to back. Its bytes are cut into rows of codebook.row_bytes bytes, which are coded one by one.
 * Row r has slot_bytes bytes of `slots` for itself, and a part in `overflow` if it needs more:
 *
 *     lengths    a number for each row: its size as coded; 0 if it is stored raw; a special value for a default row,
 *                which equals the codebook's default row and is not stored
 *     bases      an offset in overflow for every 32 rows, or for each row: where their overflow parts begin
 *     slots      | row 0 | row 1 | row 2 | ...                 slot_bytes bytes each
 *     overflow   | rest of row 0 | rest of row 2 | ...         for rows that are longer than their slot
 *
 * The caller owns all arrays. The pointers are host pointers for the functions of ibp.h, and pointers that the device
 * can use for the functions of ibp_cuda.h. */
typedef struct ibp_table {
    int64_t num_items;       /* number of items: the first size of the tensor */
    int64_t item_bytes;      /* size of an item in bytes; all items together have at most INT64_MAX / 32 bytes */
    const uint8_t *slots;    /* NULL if slots_bytes is 0 */
    const uint8_t *overflow; /* NULL if overflow_bytes is 0 */
    const uint16_t *lengths; /* an entry for each row, or NULL: every row is raw; NULL in scheme raw */
    const uint64_t *bases;   /* an entry for every 32 rows or for each row (rows_per_base), or NULL: no row has an
                                overflow part */
    int64_t slots_bytes;
    int64_t overflow_bytes;
    uint64_t slots_start, overflow_start; /* 0 if slots and overflow hold all rows. If they hold only a block of the
                                             table's rows: the byte offsets at which they begin in the arrays of the
                                             complete table */
    uint32_t slot_bytes;                  /* 0, row_bytes, or a multiple of IBP_OVERFLOW_ALIGN below row_bytes */
    ibp_codebook codebook;
    uint32_t rows_per_base; /* 0 or IBP_ROWS_PER_BASE: overflow parts lie in the order of the rows. 1: every row has
                               its own base, and its part may lie anywhere in overflow */
} ibp_table;

/* The entry of lengths that marks a default row, which is not stored (section 2). */
#define IBP_DEFAULT_LENGTH(row_bytes) ((row_bytes) < 65535u ? (row_bytes) : 65535u)

/* Number of rows that share an entry of bases if overflow parts lie in the order of the rows (section 2). */
#define IBP_ROWS_PER_BASE 32u
/* The sizes of slots, and of overflow parts with their padding, are multiples of this number of bytes, which is the
 * size of a sector of GPU memory. Section 3 names the exceptions: slots as large as rows, and tables without slots. */
#define IBP_OVERFLOW_ALIGN 32u

/* Checks the fields of a table that comes from elsewhere, and its codebook as ibp_check_codebook does. Rows, lengths
 * and bases are not read, because calls that decode rows check them row by row.
 *
 * table: all its pointers are host pointers.
 * @return IBP_OK if the table is valid, else IBP_INVALID_ARGUMENT. */
IBP_API ibp_status ibp_check_table(const ibp_table *table);

/* Returns the number of rows of a table: num_items * item_bytes / row_bytes, rounded up; 0 if these fields are out of
 * range. Reads no array. */
IBP_API int64_t ibp_num_rows(const ibp_table *table);

/* Measures how many bytes each row of a tensor takes when it is coded with a codebook, without writing coded rows.
 *
 * codebook: of scheme ibp or planes; a table of scheme raw has no lengths.
 * data, num_bytes: the bytes of the tensor. The last row may be shorter than codebook->row_bytes.
 * lengths: receives an entry for each row: the size of the coded row; 0 if the coded row would not be smaller than the
 *   row, which is then stored raw; IBP_DEFAULT_LENGTH(row_bytes) if the row equals the codebook's default row, which
 *   takes no bytes.
 * scratch, scratch_bytes: at least ibp_scratch_bytes(row_bytes) bytes. Threads may measure parts of one tensor that
 *   begin at multiples of row_bytes, each with its own scratch.
 * @return IBP_OK, or IBP_INVALID_ARGUMENT, also if scratch is too small. */
IBP_API ibp_status ibp_measure_rows(const ibp_codebook *codebook, const uint8_t *data, int64_t num_bytes,
                                    uint16_t *lengths, void *scratch, size_t scratch_bytes);

/* Computes where the overflow parts of a table's rows lie, in the order of the rows, and how large overflow must be.
 * Call it after ibp_measure_rows and before ibp_encode_rows.
 *
 * lengths: an entry for each row, as ibp_measure_rows makes them; NULL: all rows are raw.
 * num_bytes: size of the tensor in bytes. It has num_bytes / row_bytes rows, rounded up.
 * slot_bytes: 0, row_bytes, or a multiple of IBP_OVERFLOW_ALIGN below row_bytes.
 * bases: receives an entry for every IBP_ROWS_PER_BASE rows, and one for the remaining rows if there are any.
 * overflow_bytes: receives the size of overflow. */
IBP_API ibp_status ibp_index_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes, uint32_t slot_bytes,
                                  uint64_t *bases, int64_t *overflow_bytes);

/* Counts the bytes and the sectors that rows take when they are stored. From these counts the caller can choose the
 * size of slots.
 *
 * lengths: an entry for each row, as ibp_measure_rows makes them. If an entry is wrong because it is above row_bytes,
 *   its row is counted among the rows that take the most sectors.
 * num_bytes: size of the tensor in bytes. It has num_bytes / row_bytes rows, rounded up.
 * survey: 2 + ceil(row_bytes / IBP_OVERFLOW_ALIGN) counters, to which the function adds; set them to 0 before the first
 *   call. The function adds the size of all rows as stored, in bytes, to survey[0], and the number of rows that take k
 *   sectors of IBP_OVERFLOW_ALIGN bytes to survey[1 + k]. */
IBP_API ibp_status ibp_survey_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes, uint64_t *survey);

/* Codes rows of a tensor into slots and overflow, for a table whose lengths and bases are known. Call it after
 * ibp_index_rows. The rest of a row's slot is filled with zeros. In a table with slots, an overflow part is filled with
 * zeros up to a multiple of IBP_OVERFLOW_ALIGN.
 *
 * table: sizes, codebook, lengths and bases. Its pointers slots and overflow are not read.
 * data: the whole tensor, even if only some of its rows are coded.
 * first_row, last_row: the rows first_row to last_row - 1 are coded. Several threads may each code a range of rows.
 * slots, overflow: receive the rows; table->slots_bytes and table->overflow_bytes bytes.
 * scratch, scratch_bytes: at least ibp_scratch_bytes(row_bytes) bytes.
 * fault: if *fault is still zero, it receives the first row that cannot be coded. The call stops at this row.
 * @return IBP_OK; IBP_CORRUPT_ROW if an entry of lengths does not match its row in data; IBP_BUFFER_TOO_SMALL if a part
 * of a row would not lie inside slots or overflow. */
IBP_API ibp_status ibp_encode_rows(const ibp_table *table, const uint8_t *data, int64_t first_row, int64_t last_row,
                                   uint8_t *slots, uint8_t *overflow, void *scratch, size_t scratch_bytes,
                                   ibp_fault *fault);

#define IBP_MAX_OUT_DIMS 4u

/* The items of a gather, and their positions in its output. Set the struct to zero, then set data, count and
 * id_bytes: item k of the gather is item ids[k] of the table and goes to position k of the output, where items lie back
 * to back. The other fields are for other outputs:
 *
 * positions: item k goes to position positions[k]. An item whose position is out_items or larger is left out and noted
 *   as IBP_INDEX_OUT_OF_RANGE.
 * num_dims, sizes, strides: the output is a strided tensor of items. Its positions are numbered in row-major order of
 *   num_dims dimensions; position (i0, i1, ...) begins at byte i0 * strides[0] + i1 * strides[1] + ... of the output.
 *   No two positions may share a byte.
 * addresses: the output is several pieces of memory, such as the blocks of a paged cache: item k goes to the address
 *   addresses[k]. Addresses are trusted. `out` is not used; positions must be NULL and num_dims 0. */
typedef struct ibp_ids {
    const void *data;  /* the ids, int32_t or int64_t; NULL if id_bytes is 0 */
    int64_t count;     /* number of ids */
    uint32_t id_bytes; /* 4 or 8; 0: the ids are 0, 1, 2, ... */
    const uint32_t *positions;
    int64_t out_items;                 /* number of positions of the output; read if positions is not NULL */
    uint32_t num_dims;                 /* at most IBP_MAX_OUT_DIMS; 0: items lie back to back */
    int64_t sizes[IBP_MAX_OUT_DIMS];   /* at least 1 each; their product is at least the number of positions that the
                                          gather fills */
    int64_t strides[IBP_MAX_OUT_DIMS]; /* bytes, at least 0 */
    const uint64_t *addresses;         /* count addresses, or NULL */
    int64_t from_end;                  /* num_items if negative ids count from the end; 0 if negative ids are out of
                                          range */
} ibp_ids;

/* Gathers items of a table: decodes item ids[k] to its position in the output, for first <= k < last. If an id is out
 * of range, its item becomes zeros. A corrupt row of an item becomes zeros, too. All other rows are right.
 *
 * table: its arrays are in host memory.
 * ids: the items, and their positions in the output.
 * first, last: this call gathers the items ids[first] to ids[last - 1]; 0 and ids->count gather everything. Several
 *   threads may share one gather, each with its own range and its own scratch.
 * out: position 0 of the output, item_bytes bytes for each position.
 * scratch, scratch_bytes: at least ibp_scratch_bytes(row_bytes) bytes.
 * fault: receives the first fault if *fault is still zero.
 * @return IBP_OK, or the status of this call's first fault. */
IBP_API ibp_status ibp_gather_items(const ibp_table *table, const ibp_ids *ids, int64_t first, int64_t last,
                                    uint8_t *out, void *scratch, size_t scratch_bytes, ibp_fault *fault);

/* Decodes a range of a table's bytes. A corrupt row becomes zeros.
 *
 * table: its arrays are in host memory.
 * start, end: the range, in bytes of the original tensor; 0 and num_items * item_bytes decode everything. Several
 *   threads may each decode a range of one table.
 * out: receives end - start bytes.
 * scratch, scratch_bytes: at least ibp_scratch_bytes(row_bytes) bytes.
 * fault: receives the first fault if *fault is still zero; its position and id are the number of the row.
 * @return IBP_OK, or the status of this call's first fault; IBP_INVALID_ARGUMENT also if start > end, or
 * if start or end is outside [0, num_items * item_bytes]. */
IBP_API ibp_status ibp_decode_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out, void *scratch,
                                    size_t scratch_bytes, ibp_fault *fault);

#ifdef __cplusplus
}
#endif
#endif
