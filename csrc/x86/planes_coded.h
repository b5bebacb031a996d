/* planes_coded.h - the coded bits of elements that have invariant bits, for the coders of scheme planes: these take
 * elements that are not rotated, in lanes whose highest bits are 0. */
#ifndef IBP_PLANES_CODED_H
#define IBP_PLANES_CODED_H

#include "../core/schemes.h"

/* out[i] = the coded bits of elements[i], rotated. @return false if an element has other invariant bits. */
bool ibp_cut_elements_avx2(const ibp_planes *planes, const uint8_t *elements, uint32_t n, uint8_t *out);

/* The inverse, in place. */
void ibp_restore_elements_avx2(const ibp_planes *planes, uint32_t n, uint8_t *elements);

/* A codebook for the coded bits of another one's elements. */
static inline ibp_codebook ibp_coded_codebook(const ibp_codebook *codebook)
{
    ibp_codebook coded = *codebook;
    coded.planes.rotate = 0;
    return coded;
}

#endif
