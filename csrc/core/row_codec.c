/* row_codec.c - codes and decodes one row in the scheme that its codebook names. If the codebook has clusters, a coded
 * row begins with a byte that holds the index of its cluster:
 *
 *     index of the cluster | the row as coded by that cluster */
#include "../internal/ibp_coding.h"
#include "schemes.h"

#include <string.h>

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
    codec->codebook = cb;
    codec->coded = *cb;
    codec->scheme = scheme;
    codec->coder = coder_of(scheme);
    codec->scratch = ibp_scratch_from(scratch);
    codec->live = NULL;
    if (!codec->coder) return IBP_INVALID_ARGUMENT;
    if (cb->scheme != IBP_SCHEME_PLANES) return IBP_OK;
    ibp_write_out_planes(cb, codec->entries, &codec->coded);
    if (cb->planes.num_constant != 0) codec->live = ibp_take(&codec->scratch, cb->row_bytes);
    return IBP_OK;
}

/* ---- constant columns ---- */

/* Returns the column of live element i. The result is limited to existing columns, because a wrong codebook may hold
 * any number. */
static uint32_t column_of(const ibp_codebook *cb, uint32_t i)
{
    const uint32_t columns = cb->row_bytes / cb->planes.element_bytes;
    return ibp_min_u32(IBP_LOAD_ONCE(cb->planes.live_columns[i]), columns - 1);
}

/* Returns whether the columns first to end - 1 of a row equal the template. */
static bool are_constant(const ibp_codebook *cb, const uint8_t *row, uint32_t first, uint32_t end)
{
    const size_t at = (size_t)first * cb->planes.element_bytes, end_at = (size_t)end * cb->planes.element_bytes;
    return end_at <= at || memcmp(row + at, cb->planes.row_template + at, end_at - at) == 0;
}

/* Returns the live elements of a row, one after the other, as the coders need them; NULL if the constant columns differ
 * from the template. */
static const uint8_t *gather_live(const ibp_row_codec *codec, const uint8_t *row)
{
    if (!codec->live) return row;
    const ibp_codebook *const cb = codec->codebook;
    const uint32_t element_bytes = cb->planes.element_bytes, num_live = codec->coded.row_bytes / element_bytes;
    uint32_t next = 0;
    for (uint32_t i = 0; i < num_live; i++) {
        const uint32_t column = column_of(cb, i);
        if (!are_constant(cb, row, next, column)) return NULL;
        memcpy(codec->live + i * element_bytes, row + column * element_bytes, element_bytes);
        next = column + 1;
    }
    return are_constant(cb, row, next, cb->row_bytes / element_bytes) ? codec->live : NULL;
}

/* Builds a row from the template and the live elements that coders have decoded. */
static void scatter_live(const ibp_row_codec *codec, uint8_t *row)
{
    const ibp_codebook *const cb = codec->codebook;
    const uint32_t element_bytes = cb->planes.element_bytes, num_live = codec->coded.row_bytes / element_bytes;
    memcpy(row, cb->planes.row_template, cb->row_bytes);
    for (uint32_t i = 0; i < num_live; i++)
        memcpy(row + column_of(cb, i) * element_bytes, codec->live + i * element_bytes, element_bytes);
}

/* ---- rows ---- */

static size_t coded_bytes_of(const ibp_row_codec *codec, const ibp_codebook *one, const uint8_t *row)
{
    if (codec->coder->coded_bytes) return codec->coder->coded_bytes(one, row);
    size_t bytes;
    codec->coder->encode(one, row, NULL, 0, &bytes, codec->scratch);
    return bytes;
}

/* Returns the cluster that codes a row in the fewest bytes; if there are several, the first of them. coded_bytes:
 * receives the size of the coded row, including the byte that holds the index of the cluster. */
static uint32_t best_cluster(const ibp_row_codec *codec, const uint8_t *row, size_t *coded_bytes)
{
    uint32_t best = 0;
    *coded_bytes = SIZE_MAX;
    for (uint32_t k = 0; k < codec->codebook->num_clusters; k++) {
        const ibp_codebook one = ibp_cluster_of(codec->scheme, &codec->coded, k);
        const size_t bytes = coded_bytes_of(codec, &one, row);
        if (bytes >= *coded_bytes) continue;
        *coded_bytes = bytes;
        best = k;
    }
    if (*coded_bytes != IBP_NO_CODED_FORM) *coded_bytes += 1;
    return best;
}

size_t ibp_measure_with(const ibp_row_codec *codec, const uint8_t *row)
{
    const uint8_t *const live = gather_live(codec, row);
    if (!live) return IBP_NO_CODED_FORM;
    if (!ibp_has_clusters(&codec->coded)) return coded_bytes_of(codec, &codec->coded, live);
    size_t bytes;
    best_cluster(codec, live, &bytes);
    return bytes;
}

ibp_status ibp_encode_with(const ibp_row_codec *codec, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                           size_t *coded_bytes)
{
    const uint8_t *const live = gather_live(codec, row);
    *coded_bytes = IBP_NO_CODED_FORM;
    if (!live) return IBP_BUFFER_TOO_SMALL;
    if (!ibp_has_clusters(&codec->coded))
        return codec->coder->encode(&codec->coded, live, dst, dst_bytes, coded_bytes, codec->scratch);
    const uint32_t k = best_cluster(codec, live, coded_bytes);
    if (*coded_bytes > dst_bytes || *coded_bytes == IBP_NO_CODED_FORM) return IBP_BUFFER_TOO_SMALL;
    const ibp_codebook one = ibp_cluster_of(codec->scheme, &codec->coded, k);
    dst[0] = (uint8_t)k;
    const ibp_status status = codec->coder->encode(&one, live, dst + 1, dst_bytes - 1, coded_bytes, codec->scratch);
    /* If another thread changes the row meanwhile, the row may no longer have a coded form. */
    if (*coded_bytes != IBP_NO_CODED_FORM) *coded_bytes += 1;
    return status;
}

/* Decodes the live elements of a row with the cluster that the coded row names. */
static ibp_status decode_live(const ibp_row_codec *codec, const uint8_t *src, size_t src_bytes, uint8_t *row)
{
    if (!ibp_has_clusters(&codec->coded))
        return codec->coder->decode(&codec->coded, src, src_bytes, row, codec->scratch);
    if (src_bytes < 1) return IBP_CORRUPT_ROW;
    const uint32_t k = IBP_LOAD_ONCE(src[0]);
    if (k >= codec->coded.num_clusters) return IBP_CORRUPT_ROW;
    const ibp_codebook one = ibp_cluster_of(codec->scheme, &codec->coded, k);
    return codec->coder->decode(&one, src + 1, src_bytes - 1, row, codec->scratch);
}

ibp_status ibp_decode_with(const ibp_row_codec *codec, const uint8_t *src, size_t src_bytes, uint8_t *row)
{
    const ibp_status status = decode_live(codec, src, src_bytes, codec->live ? codec->live : row);
    if (status == IBP_OK && codec->live) scatter_live(codec, row);
    return status;
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
