/* row_codec.c - one coded row in whichever scheme its codebook names, behind its cluster's number if there are several.
 */
#include "schemes.h"

size_t ibp_scratch_bytes(uint32_t row_bytes) { return ibp_are_sizes(0, row_bytes) ? IBP_SCRATCH_BYTES(row_bytes) : 0; }

size_t ibp_max_coded_row_bytes(uint32_t row_bytes)
{
    return ibp_are_sizes(0, row_bytes) ? IBP_CODED_ROW_BYTES(row_bytes) : 0;
}

static const ibp_row_coder *coder_of(const ibp_scheme_row *scheme)
{
    const uint32_t features = ibp_cpu_features();
    return features & IBP_CPU_AVX512 ? scheme->avx512 : features & IBP_CPU_AVX2_BMI2 ? scheme->avx2 : scheme->plain;
}

ibp_status ibp_open_codec(const ibp_codebook *cb, void *scratch, ibp_row_codec *codec)
{
    if (ibp_check_codebook_fields(cb) != IBP_OK) return IBP_INVALID_ARGUMENT;
    const ibp_scheme_row *const scheme = ibp_find_scheme(cb->scheme);
    *codec = (ibp_row_codec){cb, scheme, coder_of(scheme), ibp_scratch_from(scratch)};
    return codec->coder ? IBP_OK : IBP_INVALID_ARGUMENT;
}

static size_t coded_bytes_of(const ibp_row_codec *codec, const ibp_codebook *one, const uint8_t *row)
{
    if (codec->coder->coded_bytes) return codec->coder->coded_bytes(one, row);
    size_t bytes;
    codec->coder->encode(one, row, NULL, 0, &bytes, codec->scratch);
    return bytes;
}

/* The cluster that codes a row in the fewest bytes, the first of equal ones, and how many. */
static uint32_t best_cluster(const ibp_row_codec *codec, const uint8_t *row, size_t *coded_bytes)
{
    uint32_t best = 0;
    *coded_bytes = SIZE_MAX;
    for (uint32_t k = 0; k < codec->codebook->num_clusters; k++) {
        const ibp_codebook one = ibp_cluster_of(codec->scheme, codec->codebook, k);
        const size_t bytes = coded_bytes_of(codec, &one, row);
        if (bytes >= *coded_bytes) continue;
        *coded_bytes = bytes;
        best = k;
    }
    return best;
}

size_t ibp_measure_with(const ibp_row_codec *codec, const uint8_t *row)
{
    if (!ibp_has_clusters(codec->codebook)) return coded_bytes_of(codec, codec->codebook, row);
    size_t bytes;
    best_cluster(codec, row, &bytes);
    return bytes + 1;
}

ibp_status ibp_encode_with(const ibp_row_codec *codec, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                           size_t *coded_bytes)
{
    if (!ibp_has_clusters(codec->codebook))
        return codec->coder->encode(codec->codebook, row, dst, dst_bytes, coded_bytes, codec->scratch);
    const uint32_t k = best_cluster(codec, row, coded_bytes);
    *coded_bytes += 1;
    if (*coded_bytes > dst_bytes) return IBP_BUFFER_TOO_SMALL;
    const ibp_codebook one = ibp_cluster_of(codec->scheme, codec->codebook, k);
    dst[0] = (uint8_t)k;
    const ibp_status status = codec->coder->encode(&one, row, dst + 1, dst_bytes - 1, coded_bytes, codec->scratch);
    *coded_bytes += 1;
    return status;
}

ibp_status ibp_decode_with(const ibp_row_codec *codec, const uint8_t *src, size_t src_bytes, uint8_t *row)
{
    if (!ibp_has_clusters(codec->codebook))
        return codec->coder->decode(codec->codebook, src, src_bytes, row, codec->scratch);
    if (src_bytes < 1) return IBP_CORRUPT_ROW;
    const uint32_t k = src[0];
    if (k >= codec->codebook->num_clusters) return IBP_CORRUPT_ROW;
    const ibp_codebook one = ibp_cluster_of(codec->scheme, codec->codebook, k);
    return codec->coder->decode(&one, src + 1, src_bytes - 1, row, codec->scratch);
}

static ibp_status open_checked(const ibp_codebook *cb, void *scratch, size_t scratch_bytes, ibp_row_codec *codec)
{
    if (!scratch || scratch_bytes < IBP_SCRATCH_BYTES(cb->row_bytes)) return IBP_INVALID_ARGUMENT;
    return ibp_open_codec(cb, scratch, codec);
}

size_t ibp_coded_row_bytes(const ibp_codebook *cb, const uint8_t *row, void *scratch, size_t scratch_bytes)
{
    ibp_row_codec codec;
    return open_checked(cb, scratch, scratch_bytes, &codec) == IBP_OK ? ibp_measure_with(&codec, row) : 0;
}

ibp_status ibp_encode_row(const ibp_codebook *cb, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                          size_t *coded_bytes, void *scratch, size_t scratch_bytes)
{
    ibp_row_codec codec;
    *coded_bytes = 0;
    const ibp_status status = open_checked(cb, scratch, scratch_bytes, &codec);
    return status == IBP_OK ? ibp_encode_with(&codec, row, dst, dst_bytes, coded_bytes) : status;
}

ibp_status ibp_decode_row(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, uint8_t *row, void *scratch,
                          size_t scratch_bytes)
{
    ibp_row_codec codec;
    const ibp_status status = open_checked(cb, scratch, scratch_bytes, &codec);
    return status == IBP_OK ? ibp_decode_with(&codec, src, src_bytes, row) : status;
}
