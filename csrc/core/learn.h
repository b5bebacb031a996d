/* learn.h - codebooks of scheme planes from counts. */
#ifndef IBP_LEARN_H
#define IBP_LEARN_H

#include "ibp.h"

#ifdef __cplusplus
extern "C" {
#endif

#define IBP_MOST_SAMPLED_BYTES ((int64_t)1 << 30)

/* Rows to learn a codebook from. */
typedef struct ibp_sample {
    const uint8_t *rows;    /* whole rows, drawn at random */
    int64_t num_rows;       /* at least 1 */
    int64_t table_rows;     /* of the whole table, over which the codebook's bytes are spread */
    uint32_t row_bytes;     /* 1 to IBP_MAX_ROW_BYTES */
    uint32_t element_bytes; /* 1, 2, 4 or 8; divides row_bytes */
    uint32_t exponent_bits; /* of floats; 0: anything else */
} ibp_sample;

/* Bytes of the positions of some listed elements of a row (FORMAT.md, section 6). */
uint32_t ibp_positions_bytes(uint32_t listed, uint32_t columns);

/* Bytes of scratch that ibp_learn_planes needs; 0 for a sample that it refuses. */
size_t ibp_learn_scratch_bytes(const ibp_sample *sample);
/* Bytes that the entries of any codebook for such rows take at most. */
size_t ibp_max_entries_bytes(uint32_t row_bytes, uint32_t element_bytes);

/* The best codebook of scheme planes: symbol widths, rotation, digit widths, dense or listed rows, and entries a table
 * or a column, compared by counts. entries: ibp_max_entries_bytes; planes->entries points to them. coded_bytes: of a
 * mean row with its share of the codebook, as expected. */
ibp_status ibp_learn_planes(const ibp_sample *sample, void *scratch, size_t scratch_bytes, uint8_t *entries,
                            size_t entries_bytes, ibp_planes *planes, double *coded_bytes);

#ifdef __cplusplus
}
#endif
#endif
