/* schemes.h - the table of schemes. Each row of this table holds everything that the core knows about one scheme. To
 * add a scheme, write its coders and add a row to the table in schemes.c. */
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

/* The unused rest of a caller's scratch. Coders take arrays from it, one after the other. The arrays of a coder must
 * together fit in IBP_SCRATCH_BYTES(row_bytes) bytes, less the two rows that functions on tables use.
 * tests/c/test_cpu_paths.c checks this. */
typedef struct ibp_scratch {
    uint8_t *at;
} ibp_scratch;

enum { IBP_SCRATCH_ALIGN = 64 }; /* in bytes: the size of a cache line and of a vector of AVX-512 */

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

/* The coders of a scheme for one kind of processor. They accept codebooks whose fields have been checked, and which
 * have no clusters, constant columns or consecutive entries. They follow the rules of ibp.h. The coders for all kinds
 * of processors give the same bytes and the same statuses. The contents of the codebook's arrays are not trusted.
 * coded_bytes is NULL if measuring a row is not faster than encoding it into a buffer of 0 bytes. */
typedef struct ibp_row_coder {
    size_t (*coded_bytes)(const ibp_codebook *codebook, const uint8_t *row);
    ibp_status (*encode)(const ibp_codebook *codebook, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                         size_t *coded_bytes, ibp_scratch scratch);
    ibp_status (*decode)(const ibp_codebook *codebook, const uint8_t *src, size_t src_bytes, uint8_t *row,
                         ibp_scratch scratch);
} ibp_row_coder;

extern const ibp_row_coder ibp_masks_plain, ibp_planes_plain; /* the reference that the others are compared with */
#if IBP_HAS_X86_ROWS
extern const ibp_row_coder ibp_masks_avx2, ibp_masks_avx512; /* for processors with IBP_CPU_AVX2_BMI2, IBP_CPU_AVX512 */
extern const ibp_row_coder ibp_planes_x86;                   /* for processors with IBP_CPU_AVX2_BMI2, with and without
                                                                IBP_CPU_AVX512 */
#endif

/* ---- the table ---- */

typedef struct ibp_scheme_row {
    ibp_scheme id;
    const char *name;
    /* Coders for processors without these features, with IBP_CPU_AVX2_BMI2, and with both IBP_CPU_AVX2_BMI2 and
     * IBP_CPU_AVX512. All are NULL if the scheme has no coded rows. */
    const ibp_row_coder *plain, *avx2, *avx512;
    /* Returns whether the codebook fields of this scheme are consistent with each other and with row_bytes. The fields
     * that are common to all schemes have been checked before. */
    bool (*are_fields)(const ibp_codebook *codebook);
    /* Returns whether the arrays of a codebook hold valid contents. The codebook must have no clusters, and its fields
     * must have been checked. */
    bool (*are_arrays)(const ibp_codebook *codebook);
    /* Moves the array pointers of `one`, a copy of a codebook with clusters, to cluster k. */
    void (*select_cluster)(ibp_codebook *one, uint32_t k);
} ibp_scheme_row;

/* Returns the row of a scheme; NULL if there is no such scheme. */
const ibp_scheme_row *ibp_find_scheme(ibp_scheme id);

/* Returns cluster k as a codebook without clusters. */
static inline ibp_codebook ibp_cluster_of(const ibp_scheme_row *scheme, const ibp_codebook *codebook, uint32_t k)
{
    ibp_codebook one = *codebook;
    one.num_clusters = 1;
    scheme->select_cluster(&one, k);
    return one;
}

/* The coder for the rows of a codebook on this processor. It is looked up once for many rows. It must not be copied,
 * because `coded` may point to `entries`. */
typedef struct ibp_row_codec {
    const ibp_codebook *codebook;
    ibp_codebook coded; /* the codebook that coders receive: it has the live columns only, and an array of entries even
                           if they are consecutive */
    uint64_t entries[IBP_MAX_PLANES << IBP_MAX_DIGIT_BITS];
    const ibp_scheme_row *scheme;
    const ibp_row_coder *coder;
    ibp_scratch scratch;
    uint8_t *live; /* room for a row's live elements; NULL if all columns are live */
} ibp_row_codec;

/* Opens a codec. scratch: the part of a caller's scratch that is for coders, that is, all of it except the two rows
 * that functions on tables use. Returns IBP_INVALID_ARGUMENT if fields are inconsistent, or if the scheme has no coded
 * rows. */
ibp_status ibp_open_codec(const ibp_codebook *codebook, void *scratch, ibp_row_codec *codec);
/* Returns the size in bytes that a row has when it is coded; IBP_NO_CODED_FORM if the codebook cannot code it. */
size_t ibp_measure_with(const ibp_row_codec *codec, const uint8_t *row);
/* Codes a row, as ibp_encode_row does. */
ibp_status ibp_encode_with(const ibp_row_codec *codec, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                           size_t *coded_bytes);
/* Decodes a row, as ibp_decode_row does. */
ibp_status ibp_decode_with(const ibp_row_codec *codec, const uint8_t *src, size_t src_bytes, uint8_t *row);

/* Do the same as ibp_greedy_gain, and as ibp_sum_words for whole words, on processors with IBP_CPU_AVX512. */
#if IBP_HAS_X86_ROWS
uint64_t ibp_greedy_gain_avx512(const uint64_t *columns, uint32_t num_bits, uint32_t num_rows);
uint64_t ibp_sum_words_avx512(const uint8_t *words, int64_t num_words, uint64_t first_word);
#endif

/* The functions in the rows of the table of schemes. The files of the schemes define these functions. */
bool ibp_are_masks_fields(const ibp_codebook *codebook);
bool ibp_are_masks_words(const ibp_codebook *codebook);
void ibp_select_masks(ibp_codebook *one, uint32_t k);
bool ibp_are_planes_fields(const ibp_codebook *codebook);
bool ibp_are_planes_arrays(const ibp_codebook *codebook);
void ibp_select_planes(ibp_codebook *one, uint32_t k);
/* Makes a codebook that has only the live columns of cb. If the entries of cb are consecutive, they are written to
 * `entries`. */
void ibp_write_out_planes(const ibp_codebook *cb, uint64_t *entries, ibp_codebook *out);

#endif
