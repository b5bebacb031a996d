/* planes_avx512.h - the parts of planes_avx2.c that AVX-512 does, if the processor has it. */
#ifndef IBP_PLANES_AVX512_H
#define IBP_PLANES_AVX512_H

#include "../core/schemes.h"

/* Lists the n lanes that differ from `value` in bits of `mask`: sets a bit for each in `bitmap`, and copies them to
 * `listed` one after the other. Both are padded. Returns how many there are. */
uint32_t ibp_list_avx512(const uint8_t *row, uint32_t n, uint64_t value, uint64_t mask, uint64_t *bitmap,
                         uint8_t *listed, uint32_t lane_bytes);

/* Replace encode_coded and decode_coded of planes_avx2.c for codebooks that ibp_takes_avx512 accepts; the latter only
 * if symbols are bytes. */
bool ibp_takes_avx512(const ibp_planes *planes);
size_t ibp_encode_coded_avx512(const ibp_codebook *cb, const uint8_t *elements, size_t start, uint32_t n, uint8_t *dst,
                               size_t dst_bytes, ibp_scratch *scratch);
ibp_status ibp_decode_coded_avx512(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, size_t start,
                                   uint32_t n, uint8_t *elements, ibp_scratch *scratch);

#endif
