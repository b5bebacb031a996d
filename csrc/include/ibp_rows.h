/* ibp_rows.h - codes and decodes single rows (sections 5 and 6 of FORMAT.md).
 *
 *     bool comes_back(const ibp_codebook *codebook, const uint8_t *row, uint8_t *back, void *scratch)
 *     {
 *         static uint8_t coded[IBP_MAX_CODED_ROW_BYTES];
 *         const size_t scratch_bytes = ibp_scratch_bytes(codebook->row_bytes);
 *         size_t coded_bytes = 0;
 *         return ibp_encode_row(codebook, row, coded, sizeof coded, &coded_bytes, scratch, scratch_bytes) == IBP_OK &&
 *                ibp_decode_row(codebook, coded, coded_bytes, back, scratch, scratch_bytes) == IBP_OK;
 *     }
 */
#ifndef IBP_ROWS_H
#define IBP_ROWS_H

#include "ibp_codebook.h"

#ifdef __cplusplus
extern "C" {
#endif

/* These functions refuse codebooks of scheme raw, which have no coded rows. */

/* Codes a row.
 *
 * codebook: its arrays are in host memory.
 * row: codebook->row_bytes bytes.
 * dst, dst_bytes: receives the coded row; nothing past dst_bytes bytes is written. ibp_max_coded_row_bytes(row_bytes)
 *   bytes are always enough.
 * coded_bytes: receives the exact size of the coded row, even if the coded row does not fit in dst or is larger than
 *   the row; IBP_NO_CODED_FORM if the codebook cannot code the row; 0 for an invalid argument.
 * scratch, scratch_bytes: at least ibp_scratch_bytes(codebook->row_bytes) bytes.
 * @return IBP_BUFFER_TOO_SMALL if the coded row needs more than dst_bytes bytes, or if the codebook cannot code the
 * row; dst then has unspecified contents. */
IBP_API ibp_status ibp_encode_row(const ibp_codebook *codebook, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                                  size_t *coded_bytes, void *scratch, size_t scratch_bytes);

/* Decodes a row.
 *
 * codebook: the codebook that the row was coded with; its arrays are in host memory.
 * src, src_bytes: the coded row, of exactly src_bytes bytes; it may be hostile. Nothing outside src is read.
 * row: receives codebook->row_bytes bytes.
 * scratch, scratch_bytes: at least ibp_scratch_bytes(codebook->row_bytes) bytes.
 * @return IBP_CORRUPT_ROW if src is not a coded row of exactly src_bytes bytes; `row` then has unspecified contents. */
IBP_API ibp_status ibp_decode_row(const ibp_codebook *codebook, const uint8_t *src, size_t src_bytes, uint8_t *row,
                                  void *scratch, size_t scratch_bytes);

#ifdef __cplusplus
}
#endif
#endif
