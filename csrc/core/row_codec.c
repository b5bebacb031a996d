/* row_codec.c - one coded row in whichever scheme its codebook names, behind its cluster's number if there are several. */
#include "clusters.h"
#include "schemes.h"

/* The coder of a codebook's scheme, for this processor. */
static const ibp_row_coder *coder_of(const ibp_codebook *cb)
{
    const bool planes = cb->scheme == IBP_SCHEME_PLANES;
#if IBP_HAS_X86_ROWS
    const uint32_t features = ibp_cpu_features();
    if (features & IBP_CPU_AVX512) return planes ? &ibp_planes_avx512 : &ibp_masks_avx512;
    if (features & IBP_CPU_AVX2_BMI2) return planes ? &ibp_planes_avx2 : &ibp_masks_avx2;
#endif
    return planes ? &ibp_planes_plain : &ibp_masks_plain;
}

static size_t coded_bytes_of(const ibp_codebook *cb, const uint8_t *row)
{
    const ibp_row_coder *const coder = coder_of(cb);
    if (coder->coded_bytes) return coder->coded_bytes(cb, row);
    size_t bytes;
    coder->encode(cb, row, NULL, 0, &bytes);
    return bytes;
}

/* The cluster that codes a row in the fewest bytes, the first of equal ones, and how many. */
static uint32_t best_cluster(const ibp_codebook *cb, const uint8_t *row, size_t *coded_bytes)
{
    uint32_t best = 0;
    *coded_bytes = SIZE_MAX;
    for (uint32_t k = 0; k < cb->num_clusters; k++) {
        const ibp_codebook one = ibp_cluster_of(cb, k);
        const size_t bytes = coded_bytes_of(&one, row);
        if (bytes >= *coded_bytes) continue;
        *coded_bytes = bytes;
        best = k;
    }
    return best;
}

size_t ibp_coded_row_bytes(const ibp_codebook *cb, const uint8_t *row)
{
    if (!ibp_has_clusters(cb)) return coded_bytes_of(cb, row);
    size_t bytes;
    best_cluster(cb, row, &bytes);
    return bytes + 1;
}

ibp_status ibp_encode_row(const ibp_codebook *cb, const uint8_t *row, uint8_t *dst, size_t dst_bytes, size_t *coded_bytes)
{
    if (!ibp_has_clusters(cb)) return coder_of(cb)->encode(cb, row, dst, dst_bytes, coded_bytes);
    size_t bytes;
    const uint32_t k = best_cluster(cb, row, &bytes);
    const ibp_codebook one = ibp_cluster_of(cb, k);
    *coded_bytes = bytes + 1;
    if (*coded_bytes > dst_bytes) return IBP_BUFFER_TOO_SMALL;
    dst[0] = (uint8_t)k;
    return coder_of(cb)->encode(&one, row, dst + 1, dst_bytes - 1, &bytes);
}

ibp_status ibp_decode_row(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, uint8_t *row)
{
    if (!ibp_has_clusters(cb)) return coder_of(cb)->decode(cb, src, src_bytes, row);
    if (src_bytes < 1 || src[0] >= cb->num_clusters) return IBP_CORRUPT_ROW;
    const ibp_codebook one = ibp_cluster_of(cb, src[0]);
    return coder_of(cb)->decode(&one, src + 1, src_bytes - 1, row);
}
