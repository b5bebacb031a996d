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

/* The schemes by which rows are coded (sections 4 to 6). */
typedef enum ibp_scheme { IBP_SCHEME_RAW = 0, IBP_SCHEME_IBP = 1, IBP_SCHEME_PLANES = 2 } ibp_scheme;

/* Limits of codebooks (sections 6 and 7). */
#define IBP_MAX_CLUSTERS 256u
#define IBP_MAX_PLANES 4u
#define IBP_MAX_DIGIT_BITS 4u

/* The codebook of scheme planes (section 6). Each element of a row is split into a symbol and a residual. The entries
 * are the frequent symbols. A symbol with an entry is coded as a digit of a few bits in one of the planes; other
 * symbols are stored as they are. ibp_learn_planes fills in the struct. */
typedef struct ibp_planes {
    const void *entries;    /* symbols [N][num_entries] of symbol_bytes bytes each, aligned to symbol_bytes, where N is
                               the number of live columns if per_column is true, else 1; NULL if num_entries is 0; not
                               read if `consecutive` is true */
    uint64_t default_value; /* the value of every live element of a default row; a listed row leaves out the elements
                               that have this value */
    uint64_t closed_value;  /* a closed row does not store its listed elements, because all of them have this value */
    uint32_t element_bytes; /* 1, 2, 4 or 8; divides row_bytes */
    uint32_t residual_bits; /* number of bits of the residual: the lowest coded bits after the rotation, which are
                               stored as they are; 0 to 8 * element_bytes - invariant_bits */
    uint32_t rotate;        /* 0 or 1: number of bits by which the coded bits of an element, which are all bits except
                               the invariant ones, are rotated left before they are split into symbol and residual */
    uint32_t num_planes;    /* 0 to IBP_MAX_PLANES */
    uint32_t num_entries;   /* sum of 2^digit_bits[p] - 1 over the planes p */
    uint32_t symbol_bytes;  /* 1, 2, 4 or 8: the smallest of these sizes that holds a symbol. A symbol consists of the
                               bits of an element that are neither invariant nor residual */
    uint8_t digit_bits[IBP_MAX_PLANES]; /* size in bits of each plane's digits: 1 to IBP_MAX_DIGIT_BITS */
    bool per_column, listed;  /* per_column: each live column has its own entries. listed: rows are listed rows, which
                                 store only the elements that differ from default_value. At most one of the two fields
                                 may be true */
    bool consecutive;         /* entry i is first_symbol + i, truncated to the width of a symbol; not allowed with
                                 per_column or with clusters */
    bool signed_default;      /* elements that differ from default_value only in the highest bit are not listed, and
                                 their highest bits are stored; only allowed with `listed` */
    uint32_t invariant_bits;  /* number of lowest bits that are the same in every element: 0 to 8 * element_bytes - 1 */
    uint64_t invariant_value; /* the value of the invariant bits */
    uint64_t first_symbol;    /* read if entries are consecutive */
    /* Constant columns hold the same element in every row, and are not coded. The other columns are live. */
    uint32_t num_constant;        /* number of constant columns, less than the number of columns; if 0, the following
                                     fields are not read */
    const uint16_t *live_columns; /* the numbers of the live columns, in increasing order */
    const uint8_t *row_template;  /* row_bytes bytes, aligned to 16 bytes: the default row, which has default_value in
                                     the live columns */
} ibp_planes;

/* How the rows of a table are coded. The struct is copied by value; the caller keeps the arrays that it points to.
 * ibp_build_codebook and ibp_build_planes_codebook make codebooks whose fields are consistent.
 *
 * The pointers are host pointers for the functions of ibp.h and device pointers for the functions of ibp_cuda.h. To use
 * a codebook on a GPU, copy its arrays there and change the pointers. Only the fields of the codebook's own scheme are
 * read. In scheme ibp the arrays `mask`, `bitval` and `flags` each have an entry for every 32-bit word of a row:
 * ibp_codebook_words(row_bytes) entries, aligned to 16 bytes. Entries past the end of the row are zero. */
typedef struct ibp_codebook {
    ibp_scheme scheme;
    uint32_t row_bytes;     /* 1 to IBP_MAX_ROW_BYTES; read in every scheme */
    const uint32_t *mask;   /* scheme ibp: 1 for each invariant bit of a row */
    const uint32_t *bitval; /* the values of invariant bits; the other bits are 0 */
    const uint32_t *flags;  /* bits 0-16: position, in the coded row, of the word's first participation bit; bits
                               17-20: which of the chunks that start in the word have a participation bit; bits 21-31:
                               the bits of the word at which runs of invariant bits begin (format.h) */
    uint32_t chunk_bytes;   /* 1, 2, 4 or 8 */
    uint32_t num_flags;     /* number of participation bits of a row */
    ibp_planes planes;      /* scheme planes */
    /* Clusters (section 7): if there are several codebooks, each coded row says which of them it was coded with. The
     * fields above then describe the first codebook. */
    uint32_t num_clusters;         /* at most IBP_MAX_CLUSTERS; 0 or 1: one codebook */
    uint32_t cluster_stride;       /* distance from one codebook to the next, in entries of mask, bitval and flags, or
                                      in bytes of planes.entries */
    const uint32_t *cluster_flags; /* scheme ibp: num_flags of cluster k at [k * cluster_stride] */
} ibp_codebook;

/* Returns "raw", "ibp" or "planes"; NULL if `scheme` has another value. */
IBP_API const char *ibp_scheme_name(ibp_scheme scheme);

/* Returns the number of entries of each of the arrays mask, bitval and flags in a codebook of scheme ibp. This is a
 * quarter of row_bytes, rounded up to a multiple of 4. */
IBP_API size_t ibp_codebook_words(uint32_t row_bytes);

/* Builds a codebook of scheme ibp (section 5) from the invariant bits of a row, which ibp_threshold_bits or
 * ibp_choose_masks find.
 *
 * mask, bitval: row_bytes bytes each. mask has a 1 for each invariant bit; bitval has the values of these bits, and 0
 * elsewhere.
 * row_bytes: 1 to IBP_MAX_ROW_BYTES.
 * chunk_bytes: 1, 2, 4 or 8. A row is coded in chunks of this size. If the invariant bits of a chunk have the values in
 *   bitval, they are left out of the coded row. Otherwise the whole chunk is stored. The chunk's participation bit is 1
 *   in the first case and 0 in the second.
 * flag_all: if true, every chunk has a participation bit, as in the paper; otherwise only chunks with invariant bits
 *   have one.
 * words: 3 * ibp_codebook_words(row_bytes) entries, aligned to 16 bytes. The function fills them with mask, bitval and
 *   flags. Keep them as long as the codebook, whose pointers point to them.
 * @return IBP_INVALID_ARGUMENT if row_bytes or chunk_bytes is out of range, or if a bit is 1 in bitval but 0
 * in mask. */
IBP_API ibp_status ibp_build_codebook(const uint8_t *mask, const uint8_t *bitval, uint32_t row_bytes,
                                      uint32_t chunk_bytes, bool flag_all, uint32_t *words, ibp_codebook *out);

/* Builds a codebook of scheme planes (section 6). Computes num_entries and symbol_bytes from the other fields of
 * `planes`, and num_clusters and cluster_stride from entries_bytes. The function reads no array, so the arrays may be
 * in device memory.
 *
 * planes: copied into *out. Its num_entries and symbol_bytes are not read. Keep its arrays as long as the codebook.
 * row_bytes: 1 to IBP_MAX_ROW_BYTES, a multiple of planes->element_bytes.
 * entries_bytes: the size of planes->entries, which holds a set of entries for each cluster, one set after the other; 0
 *   if num_entries is 0, or if planes->consecutive is true, because no entries are stored then.
 * @return IBP_INVALID_ARGUMENT if a field is out of range, or if entries_bytes is not the size of 1 to IBP_MAX_CLUSTERS
 * sets. */
IBP_API ibp_status ibp_build_planes_codebook(const ibp_planes *planes, uint32_t row_bytes, size_t entries_bytes,
                                             ibp_codebook *out);

/* Checks the fields of a codebook and the contents of its arrays, which must be in host memory. Call it for a codebook
 * that comes from elsewhere. The function requires that
 *
 *   - in every cluster, flags match the mask, mask is 0 past the end of the row, and bitval is 0 where mask is 0;
 *   - entries have no more bits than symbols;
 *   - live_columns are existing columns in increasing order, and row_template has default_value in all of them.
 *
 * If only the arrays of a codebook are wrong, other calls with it are safe, but may return wrong rows.
 *
 * @return IBP_OK if the codebook is valid, else IBP_INVALID_ARGUMENT. */
IBP_API ibp_status ibp_check_codebook(const ibp_codebook *codebook);

#ifdef __cplusplus
}
#endif
#endif
