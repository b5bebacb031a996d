/* planes_coded.h - the coded bits of elements that have invariant bits, for the coders of scheme planes: these take
 * elements that are not rotated, in lanes whose highest bits are 0. */
#ifndef IBP_PLANES_CODED_H
#define IBP_PLANES_CODED_H

#include "../core/schemes.h"

/* out[i] = the coded bits of elements[i], rotated. @return false if an element has other invariant bits. */
bool ibp_cut_elements_avx2(const ibp_planes *planes, const uint8_t *elements, uint32_t n, uint8_t *out);

/* The inverse, in place. */
void ibp_restore_elements_avx2(const ibp_planes *planes, uint32_t n, uint8_t *elements);

/* A coder of values. `list` finds the n lanes that differ from `value` in bits of `mask`: a bit each, and one after the
 * other, both padded; it says how many. `encode` codes n elements from bit `start` of dst on, or nothing if they end past
 * dst_bytes; it says where they end, or ibp_no_coded_form. */
typedef struct ibp_value_coder {
    uint32_t (*list)(uint32_t lane_bytes, const uint8_t *row, uint32_t n, uint64_t value, uint64_t mask,
                     uint64_t *bitmap, uint8_t *listed);
    size_t (*encode)(const ibp_codebook *cb, const uint8_t *elements, size_t start, uint32_t n, uint8_t *dst,
                     size_t dst_bytes, ibp_scratch *scratch);
} ibp_value_coder;

extern const ibp_value_coder ibp_values_avx2;
static const size_t ibp_no_coded_form = 8 * IBP_NO_CODED_FORM;

/* A row, dense or listed, by a coder of its values. */
ibp_status ibp_encode_planes(const ibp_codebook *cb, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                             size_t *coded_bytes, ibp_scratch scratch, const ibp_value_coder *values);

/* A codebook for the coded bits of another one's elements. */
static inline ibp_codebook ibp_coded_codebook(const ibp_codebook *codebook)
{
    ibp_codebook coded = *codebook;
    coded.planes.rotate = 0;
    return coded;
}

#endif
