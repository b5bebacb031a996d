/* masks_coder.h - defines a coder of scheme ibp from coded_bytes_of, encode_of and decode_of, which are inlined for
 * each chunk size. masks_avx2.c and masks_avx512.c include it at their end. TARGET: the attribute of the coder's
 * functions. CODER: the name of the coder. */
TARGET static size_t coded_bytes(const ibp_codebook *cb, const uint8_t *row)
{
    return IBP_BY_SIZE(cb->chunk_bytes, coded_bytes_of, cb, row);
}

TARGET static ibp_status encode(const ibp_codebook *cb, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                                size_t *coded_size, ibp_scratch scratch)
{
    return IBP_BY_SIZE(cb->chunk_bytes, encode_of, cb, row, dst, dst_bytes, coded_size, &scratch);
}

TARGET static ibp_status decode(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, uint8_t *row,
                                ibp_scratch scratch)
{
    return IBP_BY_SIZE(cb->chunk_bytes, decode_of, cb, src, src_bytes, row, &scratch);
}

const ibp_row_coder CODER = {coded_bytes, encode, decode};
