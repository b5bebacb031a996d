/* rows.h - the row coders behind ibp_coded_row_bytes, ibp_encode_row and ibp_decode_row, one set a scheme; contracts as in ibp.h. */
#ifndef IBP_ROWS_H
#define IBP_ROWS_H

#include "ibp.h"

size_t ibp_masks_coded_bytes(const ibp_codebook *codebook, const uint8_t *row);
ibp_status ibp_masks_encode(const ibp_codebook *codebook, const uint8_t *row, uint8_t *dst, size_t dst_bytes, size_t *coded_bytes);
ibp_status ibp_masks_decode(const ibp_codebook *codebook, const uint8_t *src, size_t src_bytes, uint8_t *row);

size_t ibp_planes_coded_bytes(const ibp_codebook *codebook, const uint8_t *row);
ibp_status ibp_planes_encode(const ibp_codebook *codebook, const uint8_t *row, uint8_t *dst, size_t dst_bytes, size_t *coded_bytes);
ibp_status ibp_planes_decode(const ibp_codebook *codebook, const uint8_t *src, size_t src_bytes, uint8_t *row);

#endif
