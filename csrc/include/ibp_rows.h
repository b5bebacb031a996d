/* ibp_rows.h - one row, coded and decoded (sections 5 and 6 of FORMAT.md).
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

/* Of codebooks of scheme raw there are no coded rows: these functions refuse them. */

/* Writes the coded row to dst. @return IBP_BUFFER_TOO_SMALL, with nothing useful in dst, if it needs more than
 * dst_bytes, or if the codebook cannot code it; else IBP_OK; and in all cases what ibp_coded_row_bytes returns in
 * *coded_bytes. Writes nothing past dst_bytes. */
IBP_API ibp_status ibp_encode_row(const ibp_codebook *codebook, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                                  size_t *coded_bytes, void *scratch, size_t scratch_bytes);

/* Rebuilds a row (codebook->row_bytes bytes) from exactly src_bytes coded bytes. Reads nothing outside src.
 * @return IBP_CORRUPT_ROW, with unspecified bytes in row, if the coded row does not have exactly src_bytes bytes. */
IBP_API ibp_status ibp_decode_row(const ibp_codebook *codebook, const uint8_t *src, size_t src_bytes, uint8_t *row,
                                  void *scratch, size_t scratch_bytes);

#ifdef __cplusplus
}
#endif
#endif
