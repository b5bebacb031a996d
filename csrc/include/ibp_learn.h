/* ibp_learn.h - statistics of rows, and codebooks learned from them.
 *
 *     ibp_status learn(const uint8_t *rows, int64_t num_rows, void *scratch, size_t scratch_bytes, uint8_t *arrays,
 *                      size_t arrays_bytes, ibp_planes *planes)
 *     {
 *         ibp_sample sample = {0}; // of BF16, in rows of 8 KiB
 *         sample.rows = rows;
 *         sample.num_rows = sample.table_rows = num_rows;
 *         sample.row_bytes = 8192;
 *         sample.element_bytes = 2;
 *         sample.exponent_bits = 8;
 *         double coded_bytes = 0;
 *         if (scratch_bytes < ibp_learn_scratch_bytes(&sample)) return IBP_BUFFER_TOO_SMALL;
 *         return ibp_learn_planes(&sample, scratch, scratch_bytes, arrays, arrays_bytes, planes, &coded_bytes);
 *     }
 */
#ifndef IBP_LEARN_H
#define IBP_LEARN_H

#include "ibp_codebook.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- analysis (the paper's section 4.1) ------------------------------------------------------------------------- */

/* Adds to counts[8 * i + b] the number of rows in which bit b of byte i is 1.
 *
 * counts: 8 * row_bytes entries, set to 0 by the caller. */
IBP_API ibp_status ibp_count_bits(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint64_t *counts);

/* Finds invariant bits by the paper's threshold. With tau < 1 a bit is invariant with value 1 if
 * count > tau * num_rows, and with value 0 if count < (1 - tau) * num_rows. With tau = 1 a bit is invariant if all rows
 * agree on it.
 *
 * counts, num_rows: the counts of ibp_count_bits, and the number of rows that were counted.
 * tau: 0.5 to 1.
 * mask, bitval: receive row_bytes bytes each. */
IBP_API ibp_status ibp_threshold_bits(const uint64_t *counts, uint64_t num_rows, uint32_t row_bytes, double tau,
                                      uint8_t *mask, uint8_t *bitval);

/* For each of the chunks first_chunk to last_chunk - 1 of a row, finds a mask that saves many bits in the given rows.
 * The search is greedy: it begins with an empty mask. In each step it considers the rows that match the mask so far,
 * and adds the bit on which most of these rows agree. Of the masks of all steps, the one that saves the most bits is
 * taken. A chunk gets an empty mask if no mask saves more bits than the chunk's participation bits cost. This goes
 * beyond the paper, which compares each bit alone with a threshold.
 *
 * mask, bitval: row_bytes bytes each; only the bytes of these chunks are written. */
IBP_API ibp_status ibp_choose_masks(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint32_t chunk_bytes,
                                    uint32_t first_chunk, uint32_t last_chunk, uint8_t *mask, uint8_t *bitval);

/* Estimates the fraction of the rows' bytes that would be saved by the masks that ibp_choose_masks finds with the best
 * chunk_bytes. The estimate is quick: it looks at up to 64 of the rows, and at up to 256 bytes of each. It leaves out
 * the size of the codebook, and tends to be too high.
 *
 * num_rows: at least 1. */
IBP_API ibp_status ibp_estimate_masks(const uint8_t *data, size_t num_rows, uint32_t row_bytes, double *savings);

/* Adds to hits[i] the number of rows in which chunk i participates, which means that its invariant bits have the values
 * of the codebook. The codebook is of scheme ibp; if it has clusters, the first one is used.
 *
 * hits: ceil(row_bytes / chunk_bytes) entries. */
IBP_API ibp_status ibp_count_hits(const ibp_codebook *codebook, const uint8_t *data, size_t num_rows, uint64_t *hits);

/* ---- learning ---------------------------------------------------------------------------------------------------- */

/* The aim of learning. IBP_LEVEL_DEFAULT asks for the smallest rows, or for rows that are nearly as small and decode
 * faster. IBP_LEVEL_FAST asks for dense rows with one plane of 4-bit digits and consecutive entries, which are coded
 * and decoded as fast as memory can be read and written. If such rows save next to nothing, the codebook is learned as
 * with IBP_LEVEL_DEFAULT. */
typedef enum ibp_level { IBP_LEVEL_DEFAULT = 0, IBP_LEVEL_FAST = 1 } ibp_level;

/* Rows to learn a codebook from: all rows of a table, or rows that are drawn from it at random. */
typedef struct ibp_sample {
    const uint8_t *rows;    /* num_rows * row_bytes bytes, at most 2^30 */
    int64_t num_rows;       /* at least 1 */
    int64_t table_rows;     /* number of rows of the whole table, over which the size of the codebook is spread;
                               num_rows is used instead if it is larger */
    uint32_t row_bytes;     /* 1 to IBP_MAX_ROW_BYTES */
    uint32_t element_bytes; /* 1, 2, 4 or 8; divides row_bytes */
    uint32_t exponent_bits; /* number of exponent bits of floats, below 8 * element_bytes; 0 if elements are not
                               floats */
    ibp_level level;
    bool codes_invariant; /* if true, bits and columns that are the same in all rows of the sample are coded, too, so
                             that the codebook can code any row */
} ibp_sample;

/* Returns the size in bytes of the scratch that ibp_learn_planes and ibp_learn_entries need, which must be aligned to
 * 16 bytes; 0 for a sample that these functions refuse. */
IBP_API size_t ibp_learn_scratch_bytes(const ibp_sample *sample);

/* Returns the largest size in bytes that the arrays of a codebook of scheme planes can have, for rows of row_bytes
 * bytes and elements of element_bytes bytes; 0 for an invalid argument. */
IBP_API size_t ibp_max_planes_bytes(uint32_t row_bytes, uint32_t element_bytes);

/* Learns the best codebook of scheme planes (section 6) for sample->level. It compares choices of invariant bits,
 * constant columns, symbol widths, rotation, digit widths, dense or listed rows, and entries for the table or for each
 * column. It compares them by the mean size of a row, which it computes from counts of the symbols. Unless the sample
 * is the complete table, the function learns entries for each column from the even rows of the sample, and measures
 * their cost on the odd rows.
 *
 * scratch, scratch_bytes: at least ibp_learn_scratch_bytes(sample) bytes, aligned to 16 bytes.
 * arrays, arrays_bytes: at least ibp_max_planes_bytes bytes, aligned to 16 bytes; the pointers of *planes point into
 *   them.
 * coded_bytes: receives the expected mean size of a row in bytes, its share of the codebook included; row_bytes if no
 *   codebook saves anything.
 * @return IBP_BUFFER_TOO_SMALL if scratch or arrays is too small. */
IBP_API ibp_status ibp_learn_planes(const ibp_sample *sample, void *scratch, size_t scratch_bytes, uint8_t *arrays,
                                    size_t arrays_bytes, ibp_planes *planes, double *coded_bytes);

/* Learns new entries for a codebook whose other fields are given: the symbols that are the most frequent in the rows of
 * the sample.
 *
 * planes: has one cluster and entries that are not consecutive; the old entries are not read.
 * scratch, scratch_bytes: at least ibp_learn_scratch_bytes(sample) bytes, aligned to 16 bytes.
 * entries, entries_bytes: receives the entries, exactly entries_bytes bytes. */
IBP_API ibp_status ibp_learn_entries(const ibp_sample *sample, const ibp_planes *planes, void *scratch,
                                     size_t scratch_bytes, uint8_t *entries, size_t entries_bytes);

#ifdef __cplusplus
}
#endif
#endif
