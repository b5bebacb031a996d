/* ibp_codebook.h - how rows are coded: the schemes (sections 4 to 7 of FORMAT.md) and their codebooks.
 *
 *     ibp_status code_exponents(ibp_codebook *codebook) // BF16: four bits for each exponent from 117 to 131
 *     {
 *         ibp_planes planes = {0};
 *         planes.element_bytes = 2;
 *         planes.rotate = 1; // exponents above signs and fractions
 *         planes.residual_bits = 8;
 *         planes.num_planes = 1;
 *         planes.digit_bits[0] = 4;
 *         planes.consecutive = true;
 *         planes.first_symbol = 117;
 *         return ibp_build_planes_codebook(&planes, 8192, 0, codebook); // rows of 8 KiB
 *     }
 */
#ifndef IBP_CODEBOOK_H
#define IBP_CODEBOOK_H

#include "ibp_status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ibp_scheme { IBP_SCHEME_RAW = 0, IBP_SCHEME_IBP = 1, IBP_SCHEME_PLANES = 2 } ibp_scheme;

#define IBP_MAX_CLUSTERS 256u
#define IBP_MAX_PLANES 4u
#define IBP_MAX_DIGIT_BITS 4u

/* Codebook of scheme planes (section 6). */
typedef struct ibp_planes {
    const void *entries;    /* symbols, symbol_bytes each and aligned to that, [columns or 1][num_entries]; NULL if
                               there are none, not read where they are consecutive */
    uint64_t default_value; /* element that a listed row leaves out, and a default row consists of (section 2) */
    uint64_t closed_value;  /* element that a closed row's listed elements equal */
    uint32_t element_bytes; /* 1, 2, 4 or 8; divides row_bytes */
    uint32_t residual_bits; /* 0 to 8 * element_bytes - invariant_bits */
    uint32_t rotate;        /* 0 or 1 */
    uint32_t num_planes;    /* 0 to IBP_MAX_PLANES */
    uint32_t num_entries;   /* sum of 2^b - 1 over the planes */
    uint32_t symbol_bytes;  /* 1, 2, 4 or 8: the smallest that holds the bits of a symbol: those of an element that are
                               neither invariant nor residual */
    uint8_t digit_bits[IBP_MAX_PLANES]; /* 1 to IBP_MAX_DIGIT_BITS */
    bool per_column, listed;            /* not both */
    bool consecutive;        /* entry i is first_symbol + i, without the bits above a symbol's; not with per_column, nor
                                 with clusters */
    bool signed_default;     /* unlisted elements have any highest bit; with `listed` only */
    uint32_t invariant_bits; /* 0 to 8 * element_bytes: the lowest bits of every element */
    uint64_t invariant_value; /* what they are */
    uint64_t first_symbol;    /* read where entries are consecutive */
    /* Constant columns: all columns that are not live. Where there are any, per_column counts live columns only. */
    uint32_t num_constant;        /* 0: the following are not read; else fewer than there are columns */
    const uint16_t *live_columns; /* the others, in increasing order */
    const uint8_t *row_template;  /* row_bytes bytes: the default row, which is default_value in the live columns */
} ibp_planes;

/* How the rows of a table are coded: a value, whose arrays the caller keeps. The pointers are host pointers for the
 * functions of this file and device pointers for those of ibp_cuda.h. The fields of other schemes than its own are not
 * read. Scheme ibp has a working form with one entry for each 32-bit word of a row, as ibp_build_codebook makes it:
 * each array has ibp_codebook_words(row_bytes) entries, 16-byte aligned; those past the row are zero.
 * ibp_build_codebook and ibp_build_planes_codebook make codebooks that are right. */
typedef struct ibp_codebook {
    ibp_scheme scheme;
    uint32_t row_bytes;     /* 1 to IBP_MAX_ROW_BYTES; read in every scheme */
    const uint32_t *mask;   /* scheme ibp: 1: the bit is invariant */
    const uint32_t *bitval; /* its value; 0 where mask is 0 */
    const uint32_t *flags;  /* bits 0-16: bit position of the word's first participation bit; bits 17-20: which of
                               the chunks that start in the word are flagged; bits 21-31: see format.h */
    uint32_t chunk_bytes;   /* 1, 2, 4 or 8 */
    uint32_t num_flags;     /* participation bits of a row */
    ibp_planes planes;      /* scheme planes */
    /* Clusters (section 7): where there is more than one codebook, the fields above are the first one's. */
    uint32_t num_clusters;         /* 0 or 1: one codebook; at most IBP_MAX_CLUSTERS */
    uint32_t cluster_stride;       /* to the next one's: entries of mask, bitval and flags; bytes of planes.entries */
    const uint32_t *cluster_flags; /* scheme ibp: num_flags of cluster k at [k * cluster_stride] */
} ibp_codebook;

/* "raw", "ibp", "planes"; NULL for what is no scheme. */
IBP_API const char *ibp_scheme_name(ibp_scheme scheme);

/* Entries of each array of a codebook: row_bytes / 4, rounded up to a multiple of 4. */
IBP_API size_t ibp_codebook_words(uint32_t row_bytes);

/* Scheme ibp: builds the working form from the masks and bitvals of a whole row (row_bytes bytes each).
 * flag_all: every chunk has a participation bit (the paper's bytes), not only those with a mask.
 * words: 3 * ibp_codebook_words(row_bytes) entries, 16-byte aligned, filled with mask, bitval and flags; out points
 * into it.
 * @return IBP_INVALID_ARGUMENT if row_bytes or chunk_bytes is out of range or a bitval bit is set where the mask is
 * clear. */
IBP_API ibp_status ibp_build_codebook(const uint8_t *mask, const uint8_t *bitval, uint32_t row_bytes,
                                      uint32_t chunk_bytes, bool flag_all, uint32_t *words, ibp_codebook *out);

/* Scheme planes: works out what follows from the other fields of a codebook: planes->num_entries and
 * planes->symbol_bytes (not read), and the clusters. entries_bytes: of planes->entries in all, one set of entries after
 * the other, a set for each cluster; no array is read, so that they may be in device memory. 0 where there are no
 * entries, and where they are consecutive.
 * @return IBP_INVALID_ARGUMENT if a field is out of range, or entries_bytes is not 1 to IBP_MAX_CLUSTERS sets. */
IBP_API ibp_status ibp_build_planes_codebook(const ibp_planes *planes, uint32_t row_bytes, size_t entries_bytes,
                                             ibp_codebook *out);

/* Whether a codebook is right: its fields, and what its arrays hold (of every cluster: flags that are the masks', no
 * mask past the row, bitvals inside masks; entries of no more bits than symbols have; live columns that increase and
 * exist, a template that has the default in them). Takes as long as to read it.
 * Host pointers only. A codebook that only has fields in range does no harm either, but rows may then come back wrong.
 * @return IBP_INVALID_ARGUMENT if not. */
IBP_API ibp_status ibp_check_codebook(const ibp_codebook *codebook);

#ifdef __cplusplus
}
#endif
#endif
