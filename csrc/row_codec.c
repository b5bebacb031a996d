/* row_codec.c - one coded row in whichever scheme its codebook names. */
#include "rows.h"

size_t ibp_coded_row_bytes(const ibp_codebook *cb, const uint8_t *row)
{
    return cb->scheme == IBP_SCHEME_PLANES ? ibp_planes_coded_bytes(cb, row) : ibp_masks_coded_bytes(cb, row);
}

ibp_status ibp_encode_row(const ibp_codebook *cb, const uint8_t *row, uint8_t *dst, size_t dst_bytes, size_t *coded_bytes)
{
    return cb->scheme == IBP_SCHEME_PLANES ? ibp_planes_encode(cb, row, dst, dst_bytes, coded_bytes)
                                           : ibp_masks_encode(cb, row, dst, dst_bytes, coded_bytes);
}

ibp_status ibp_decode_row(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, uint8_t *row)
{
    return cb->scheme == IBP_SCHEME_PLANES ? ibp_planes_decode(cb, src, src_bytes, row) : ibp_masks_decode(cb, src, src_bytes, row);
}
