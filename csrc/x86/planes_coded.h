/* planes_coded.h - the coded bits of elements that have invariant bits, for the coders of scheme planes: these take
 * elements that are not rotated, in lanes whose highest bits are 0. */
#ifndef IBP_PLANES_CODED_H
#define IBP_PLANES_CODED_H

#include "../core/schemes.h"

/* out[i] = the coded bits of elements[i], rotated. @return false if an element has other invariant bits. */
bool ibp_cut_elements_avx2(const ibp_planes *planes, const uint8_t *elements, uint32_t n, uint8_t *out);

/* The inverse, in place. */
void ibp_restore_elements_avx2(const ibp_planes *planes, uint32_t n, uint8_t *elements);

/* A row, dense or listed, by the widest vectors that the processor has. */
ibp_status ibp_encode_planes(const ibp_codebook *cb, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                             size_t *coded_bytes, ibp_scratch scratch);

/* With AVX-512: lists the n lanes that differ from `value` in bits of `mask`, a bit each and one after the other, both
 * padded, and says how many they are; and encode_coded of planes_avx2.c, for codebooks that it takes. */
uint32_t ibp_list_avx512(const uint8_t *row, uint32_t n, uint64_t value, uint64_t mask, uint64_t *bitmap,
                         uint8_t *listed, uint32_t lane_bytes);
bool ibp_takes_avx512(const ibp_planes *planes);
size_t ibp_encode_coded_avx512(const ibp_codebook *cb, const uint8_t *elements, size_t start, uint32_t n, uint8_t *dst,
                               size_t dst_bytes, ibp_scratch *scratch);

/* A codebook for the coded bits of another one's elements. */
static inline ibp_codebook ibp_coded_codebook(const ibp_codebook *codebook)
{
    ibp_codebook coded = *codebook;
    coded.planes.rotate = 0;
    return coded;
}

#endif
