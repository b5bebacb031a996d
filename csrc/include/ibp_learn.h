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

/* Adds to counts[8 * i + b] the number of rows whose bit b of byte i is 1. counts: 8 * row_bytes entries, set to 0 by
 * the caller. */
IBP_API ibp_status ibp_count_bits(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint64_t *counts);

/* The paper's threshold: a bit is invariant with value 1 if count > tau * num_rows, with value 0 if count < (1 - tau) *
 * num_rows; with tau = 1, if all rows agree. 0.5 <= tau <= 1. mask, bitval: row_bytes bytes each. */
IBP_API ibp_status ibp_threshold_bits(const uint64_t *counts, uint64_t num_rows, uint32_t row_bytes, double tau,
                                      uint8_t *mask, uint8_t *bitval);

/* For each of the chunks first_chunk to last_chunk - 1 of a row the mask that saves most bits on the given rows, found
 * greedily: bits are added in the order in which most of the rows that still match agree on them, and the best mask on
 * the way is kept; none where nothing pays for the participation bit. This goes beyond the paper, whose threshold looks
 * at each bit alone. mask, bitval: row_bytes bytes each, written where the chunks are. */
IBP_API ibp_status ibp_choose_masks(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint32_t chunk_bytes,
                                    uint32_t first_chunk, uint32_t last_chunk, uint8_t *mask, uint8_t *bitval);

/* The share of the rows' bytes that masks would save, the codebook left out, by up to 64 of the rows and 256 bytes of
 * each: as ibp_choose_masks finds them, of the best chunk_bytes. Meant to be quick, and rather too high. num_rows: at
 * least 1. */
IBP_API ibp_status ibp_estimate_masks(const uint8_t *data, size_t num_rows, uint32_t row_bytes, double *savings);

/* Adds to hits[i] the number of rows whose chunk i participates under the codebook, of scheme ibp; of its first
 * cluster. hits: ceil(row_bytes / chunk_bytes) entries. */
IBP_API ibp_status ibp_count_hits(const ibp_codebook *codebook, const uint8_t *data, size_t num_rows, uint64_t *hits);

/* ---- learning ---------------------------------------------------------------------------------------------------- */

/* How much a codebook may cost the decoder. Fast: dense rows with one plane of 4-bit digits and consecutive entries,
 * which code and decode at the rate of memory, unless they save nothing; then as by default. */
typedef enum ibp_level { IBP_LEVEL_DEFAULT = 0, IBP_LEVEL_FAST = 1 } ibp_level;

/* Rows to learn a codebook from: all of a table's, or some drawn at random. */
typedef struct ibp_sample {
    const uint8_t *rows;    /* num_rows * row_bytes bytes, at most 2^30 */
    int64_t num_rows;       /* at least 1 */
    int64_t table_rows;     /* of the whole table, over which the codebook's bytes are spread; num_rows if more */
    uint32_t row_bytes;     /* 1 to IBP_MAX_ROW_BYTES */
    uint32_t element_bytes; /* 1, 2, 4 or 8; divides row_bytes */
    uint32_t exponent_bits; /* of floats, below 8 * element_bytes; 0: anything else */
    ibp_level level;
    bool codes_invariant; /* code the bits and columns too that all of the sample agrees on: the codebook then has a
                             coded form for any row */
} ibp_sample;

/* Returns the bytes of scratch that ibp_learn_planes and ibp_learn_entries need, or 0 for a sample that they refuse.
 * Scratch is 16-byte aligned. */
IBP_API size_t ibp_learn_scratch_bytes(const ibp_sample *sample);

/* Returns the bytes that the arrays of a codebook for such rows take at most, or 0 for an invalid argument. */
IBP_API size_t ibp_max_planes_bytes(uint32_t row_bytes, uint32_t element_bytes);

/* Learns the best codebook of scheme planes (section 6) for a level. Invariant bits, constant columns, symbol widths,
 * rotation, digit widths, dense or listed rows, and entries for the table or for each column are compared by the bytes
 * that a mean row takes, which counts of the symbols tell. Entries for each column are learned from the even rows and
 * judged by the odd ones, unless the sample is the table.
 * arrays: 8-byte aligned, arrays_bytes bytes, at least ibp_max_planes_bytes; the pointers of *planes point into it.
 * coded_bytes: set to the bytes that a mean row is expected to take, with its share of the codebook; row_bytes if
 * nothing pays.
 * @return IBP_BUFFER_TOO_SMALL if scratch or arrays has too little room. */
IBP_API ibp_status ibp_learn_planes(const ibp_sample *sample, void *scratch, size_t scratch_bytes, uint8_t *arrays,
                                    size_t arrays_bytes, ibp_planes *planes, double *coded_bytes);

/* Learns new entries for a codebook whose other fields are given: the most frequent symbols of what it codes of the
 * sample's rows.
 * planes: of one cluster, with entries that are not consecutive; they are not read. entries: exactly entries_bytes
 * bytes. scratch: as ibp_learn_planes needs it for the same sample. */
IBP_API ibp_status ibp_learn_entries(const ibp_sample *sample, const ibp_planes *planes, void *scratch,
                                     size_t scratch_bytes, uint8_t *entries, size_t entries_bytes);

#ifdef __cplusplus
}
#endif
#endif
