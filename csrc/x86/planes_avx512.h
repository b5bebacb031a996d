/* planes_avx512.h - functions that planes_avx2.c calls if the processor has AVX-512. */
#ifndef IBP_PLANES_AVX512_H
#define IBP_PLANES_AVX512_H

#include "../core/schemes.h"

/* Finds which of n lanes differ from `value` in bits of `mask`. Sets bit i of `bitmap` if lane i differs. Copies the
 * differing lanes to `listed`, one after the other. Both arrays are padded. Returns the number of differing lanes. */
uint32_t ibp_list_avx512(const uint8_t *row, uint32_t n, uint64_t value, uint64_t mask, uint64_t *bitmap,
                         uint8_t *listed, uint32_t lane_bytes);

/* Returns whether the two functions below accept a codebook. */
bool ibp_takes_avx512(const ibp_planes *planes);
/* Do the same as encode_coded and decode_coded of planes_avx2.c, for codebooks that ibp_takes_avx512 accepts. The
 * decoder also requires dense rows and symbols of one byte. */
size_t ibp_encode_coded_avx512(const ibp_codebook *cb, const uint8_t *elements, size_t start, uint32_t n, uint8_t *dst,
                               size_t dst_bytes, ibp_scratch *scratch);
ibp_status ibp_decode_coded_avx512(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, size_t start,
                                   uint32_t n, uint8_t *elements, ibp_scratch *scratch);

#endif
