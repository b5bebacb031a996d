/* ibp_coding.h - sizes of rows counted, tables coded in one pass, and arrays filled. */
#ifndef IBP_CODING_H
#define IBP_CODING_H

#include "ibp_cuda_device.h"
#include "ibp_learn.h"
#include "ibp_place.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the exact size of a row as coded, whether or not it is smaller than the row, without coding it;
 * IBP_NO_CODED_FORM if the codebook cannot code the row; 0 for an invalid argument, such as a codebook of scheme raw,
 * and if arrays that ibp_check_codebook refuses leave no bit of the row. row: codebook->row_bytes bytes. */
IBP_API size_t ibp_coded_row_bytes(const ibp_codebook *codebook, const uint8_t *row, void *scratch,
                                   size_t scratch_bytes);

/* Adds to survey[0] the bytes of the rows as stored and to survey[1 + k] how many of them take k sectors of
 * IBP_OVERFLOW_ALIGN bytes; one that claims to be longer than a row counts as a row of all sectors. lengths: num_rows
 * entries. survey: 2 + ceil(row_bytes / IBP_OVERFLOW_ALIGN) entries, set to 0 by the caller. */
IBP_API ibp_status ibp_survey_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes, uint64_t *survey);

/* Codes data (num_bytes bytes, the last row may be short) in one pass, as a table in packed layout holds it: rows back
 * to back to dst, lengths as ibp_measure_rows makes them, and *stored_bytes, at most num_bytes: how much was written.
 * Bytes of dst after those may be written to. Tables are coded so by blocks of rows, one after the other.
 * @return IBP_INVALID_ARGUMENT also if dst_bytes is below num_bytes, or the codebook's scheme is raw. */
IBP_API ibp_status ibp_encode_packed(const ibp_codebook *codebook, const uint8_t *data, int64_t num_bytes, uint8_t *dst,
                                     int64_t dst_bytes, uint16_t *lengths, int64_t *stored_bytes, void *scratch,
                                     size_t scratch_bytes);

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

/* ---- on a GPU --------------------------------------------------------------------------------------------------- */

/* Counts bits on a GPU as ibp_count_bits does; adds to counts. */
IBP_API ibp_status ibp_cuda_count_bits(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint64_t *counts,
                                       ibp_stream stream);
/* Counts hits on a GPU as ibp_count_hits does; adds to hits. */
IBP_API ibp_status ibp_cuda_count_hits(const ibp_codebook *codebook, const uint8_t *data, size_t num_rows,
                                       uint64_t *hits, ibp_stream stream);
/* As ibp_survey_rows; adds to survey. */
IBP_API ibp_status ibp_cuda_survey_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes,
                                        uint64_t *survey, ibp_stream stream);
/* As ibp_encode_slots for all rows of the table, and ibp_move_parts. */
IBP_API ibp_status ibp_cuda_encode_slots(const ibp_place *place, const uint8_t *data, ibp_stream stream);
IBP_API ibp_status ibp_cuda_move_parts(const ibp_table *table, const ibp_place *from, uint8_t *overflow,
                                       ibp_stream stream);
/* Sets num_bytes bytes of device memory to one value, such as the arrays of an ibp_place before anything is coded. */
IBP_API ibp_status ibp_cuda_fill(void *memory, uint8_t value, size_t num_bytes, ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
