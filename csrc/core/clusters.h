/* clusters.h - one cluster's codebook out of several (FORMAT.md section 7), shared by gcc, g++ and nvcc. */
#ifndef IBP_CLUSTERS_H
#define IBP_CLUSTERS_H

#include "format.h"
#include "ibp.h"

IBP_INLINE bool ibp_has_clusters(const ibp_codebook *codebook) { return codebook->num_clusters > 1u; }

/* The codebook of cluster k as one that has no clusters. */
IBP_INLINE ibp_codebook ibp_cluster_of(const ibp_codebook *codebook, uint32_t k)
{
    const uint64_t offset = (uint64_t)k * codebook->cluster_stride;
    ibp_codebook one = *codebook;
    one.num_clusters = 1;
    if (codebook->scheme == IBP_SCHEME_PLANES) {
        one.planes.entries = (const uint8_t *)codebook->planes.entries + offset;
    } else {
        one.mask += offset;
        one.bitval += offset;
        one.flags += offset;
        one.num_flags = codebook->cluster_flags[offset];
    }
    return one;
}

#endif
