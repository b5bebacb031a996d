/* schemes.h - the table of schemes: all that the core knows of a scheme as one row. A new scheme adds its coders, and a
 * row in schemes.c. */
#ifndef IBP_SCHEMES_H
#define IBP_SCHEMES_H

#include "../internal/ibp_machine.h"
#include "checks.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define IBP_HAS_X86_ROWS 1
#else
#define IBP_HAS_X86_ROWS 0
#endif

/* ---- scratch of row coders ---- */

/* What is left of a caller's scratch. Coders take arrays from it, one after the other; the sum of what any coder takes
 * is at most IBP_SCRATCH_BYTES less the two rows that tables use, which tests/c/test_cpu_paths.c holds against. */
typedef struct ibp_scratch {
    uint8_t *at;
} ibp_scratch;

enum { IBP_SCRATCH_ALIGN = 64 }; /* bytes: a cache line, and a vector of AVX-512 */

static inline ibp_scratch ibp_scratch_from(void *memory)
{
    return (ibp_scratch){(uint8_t *)memory + (0 - (uintptr_t)memory) % IBP_SCRATCH_ALIGN};
}

static inline void *ibp_take(ibp_scratch *scratch, size_t num_bytes)
{
    uint8_t *const taken = scratch->at;
    scratch->at += (num_bytes + IBP_SCRATCH_ALIGN - 1) / IBP_SCRATCH_ALIGN * IBP_SCRATCH_ALIGN;
    return taken;
}

/* ---- coders of single rows ---- */

/* A set of coders for one scheme and kind of processor, of codebooks without clusters, constant columns and consecutive
 * entries, whose fields are checked; with the contracts of ibp.h, the same bytes and the same statuses. Nothing is
 * trusted of what the codebook's arrays hold.
 * coded_bytes: NULL where nothing is faster than to encode to no bytes at all. */
typedef struct ibp_row_coder {
    size_t (*coded_bytes)(const ibp_codebook *codebook, const uint8_t *row);
    ibp_status (*encode)(const ibp_codebook *codebook, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                         size_t *coded_bytes, ibp_scratch scratch);
    ibp_status (*decode)(const ibp_codebook *codebook, const uint8_t *src, size_t src_bytes, uint8_t *row,
                         ibp_scratch scratch);
} ibp_row_coder;

extern const ibp_row_coder ibp_masks_plain, ibp_planes_plain; /* the oracle */
#if IBP_HAS_X86_ROWS
extern const ibp_row_coder ibp_masks_avx2, ibp_masks_avx512; /* for processors with IBP_CPU_AVX2_BMI2, IBP_CPU_AVX512 */
extern const ibp_row_coder ibp_planes_x86;                   /* with both, or the first alone */
#endif

/* ---- the table ---- */

typedef struct ibp_scheme_row {
    ibp_scheme id;
    const char *name;
    /* Coders for processors without features, with IBP_CPU_AVX2_BMI2, with IBP_CPU_AVX512 too. All NULL: the scheme has
     * no coded rows. */
    const ibp_row_coder *plain, *avx2, *avx512;
    /* Whether the scheme's own fields of a codebook fit each other and its row_bytes; called when the fields that all
     * schemes have do. */
    bool (*are_fields)(const ibp_codebook *codebook);
    /* Whether the arrays of a codebook without clusters, whose fields are checked, hold what they should. */
    bool (*are_arrays)(const ibp_codebook *codebook);
    /* Moves the arrays of `one`, a copy of a codebook with clusters, to cluster k. */
    void (*select_cluster)(ibp_codebook *one, uint32_t k);
} ibp_scheme_row;

/* The row of a scheme; NULL if there is none. */
const ibp_scheme_row *ibp_find_scheme(ibp_scheme id);

/* Cluster k as a codebook that has no clusters. */
static inline ibp_codebook ibp_cluster_of(const ibp_scheme_row *scheme, const ibp_codebook *codebook, uint32_t k)
{
    ibp_codebook one = *codebook;
    one.num_clusters = 1;
    scheme->select_cluster(&one, k);
    return one;
}

/* How the rows of a codebook are coded on this processor, looked up once for many rows. Not to be copied. */
typedef struct ibp_row_codec {
    const ibp_codebook *codebook;
    ibp_codebook coded; /* what coders get: of the live columns, with entries where they are consecutive */
    uint64_t entries[IBP_MAX_PLANES << IBP_MAX_DIGIT_BITS];
    const ibp_scheme_row *scheme;
    const ibp_row_coder *coder;
    ibp_scratch scratch;
    uint8_t *live; /* a row's live elements; NULL if it has no others */
} ibp_row_codec;

/* scratch: that of a function of ibp.h less the two rows that tables use.
 * @return IBP_INVALID_ARGUMENT for fields that contradict each other, or a scheme without coded rows. */
ibp_status ibp_open_codec(const ibp_codebook *codebook, void *scratch, ibp_row_codec *codec);
size_t ibp_measure_with(const ibp_row_codec *codec, const uint8_t *row);
ibp_status ibp_encode_with(const ibp_row_codec *codec, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                           size_t *coded_bytes);
ibp_status ibp_decode_with(const ibp_row_codec *codec, const uint8_t *src, size_t src_bytes, uint8_t *row);

/* ibp_sum_words over whole words, and ibp_greedy_gain, with IBP_CPU_AVX512. */
#if IBP_HAS_X86_ROWS
uint64_t ibp_greedy_gain_avx512(const uint64_t *columns, uint32_t num_bits, uint32_t num_rows);
uint64_t ibp_sum_words_avx512(const uint8_t *words, int64_t num_words, uint64_t first_word);
#endif

/* The parts of the table that stand in files of their own. */
bool ibp_are_masks_fields(const ibp_codebook *codebook);
bool ibp_are_masks_words(const ibp_codebook *codebook);
void ibp_select_masks(ibp_codebook *one, uint32_t k);
bool ibp_are_planes_fields(const ibp_codebook *codebook);
bool ibp_are_planes_arrays(const ibp_codebook *codebook);
void ibp_select_planes(ibp_codebook *one, uint32_t k);
/* A codebook of the live columns of cb, whose consecutive entries, if it has such, are written to `entries`. */
void ibp_write_out_planes(const ibp_codebook *cb, uint64_t *entries, ibp_codebook *out);

#endif
