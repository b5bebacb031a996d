/* check.h - what the C unit tests share: CHECK, random numbers with fixed seeds, and buffers whose end a sanitizer
 * watches. */
#ifndef CHECK_H
#define CHECK_H

#include "internal/ibp_internal.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern long num_passed, num_failed;
extern bool is_quick; /* fewer rounds with other random numbers */

/* Counts, and prints the first failures with the values that the caller names (printf style). */
#define CHECK(condition, ...)                                              \
    do {                                                                   \
        if (condition) {                                                   \
            num_passed++;                                                  \
        } else if (num_failed++ < 30) {                                    \
            printf("%s:%d: failed: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__);                                           \
            printf("\n");                                                  \
        }                                                                  \
    } while (0)

typedef struct rng {
    uint64_t state;
} rng;

rng rng_seed(uint64_t seed);
uint64_t rng_next(rng *r);
uint32_t rng_below(rng *r, uint32_t limit); /* 0 to limit - 1 */
bool rng_chance(rng *r, uint32_t percent);
void rng_fill(rng *r, uint8_t *bytes, size_t num_bytes);

/* Exactly size bytes at data, the last byte last in its allocation, misaligned by `offset`; filled with 0xA5. */
typedef struct buffer {
    uint8_t *memory, *data;
    size_t size;
} buffer;

buffer buffer_new(size_t size, size_t offset);
buffer buffer_copy(const uint8_t *bytes, size_t size, size_t offset);
void buffer_free(buffer *b);

/* Scratch of just the size that rows of row_bytes bytes need, misaligned. */
buffer scratch_new(uint32_t row_bytes);

/* The functions of ibp.h with such scratch, which ends where memory that can be touched does. */
size_t coded_row_bytes(const ibp_codebook *codebook, const uint8_t *row);
ibp_status encode_row(const ibp_codebook *codebook, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                      size_t *coded_bytes);
ibp_status decode_row(const ibp_codebook *codebook, const uint8_t *src, size_t src_bytes, uint8_t *row);

/* ---- the rules of FORMAT.md bit by bit: slow, and sharing no code with the core (naive.c) ---- */

typedef struct masks {
    uint8_t *mask, *bitval; /* row_bytes each */
    uint32_t row_bytes, chunk_bytes;
    bool flag_all;
} masks;

uint32_t naive_num_chunks(const masks *m);
uint32_t naive_num_flags(const masks *m);
bool naive_participates(const masks *m, const uint8_t *row, uint32_t chunk);
size_t naive_max_coded_bytes(const masks *m);
/* coded: naive_max_coded_bytes. @return the exact coded size. */
size_t naive_encode_row(const masks *m, const uint8_t *row, uint8_t *coded);
bool naive_decode_row(const masks *m, const uint8_t *coded, size_t coded_bytes, uint8_t *row);
/* The valid bytes of a row of a table into out. @return false if it is corrupt. */
bool naive_read_row(const masks *m, const ibp_table *table, int64_t row, uint8_t *out);
uint32_t naive_valid_bytes(const ibp_table *table, int64_t row);
uint32_t naive_stored_bytes(const ibp_table *table, int64_t row);
/* Whether the index says that the row is a default row. */
bool naive_is_marked(const ibp_table *table, int64_t row);

/* ---- codebooks and rows to test with (samples.c) ---- */

enum { NUM_MASK_KINDS = 7, NUM_ROW_KINDS = 5 };

typedef struct sample {
    masks masks;
    uint32_t *words;
    ibp_codebook codebook;
} sample;

sample sample_new(rng *r, uint32_t row_bytes, uint32_t chunk_bytes, bool flag_all, int mask_kind);
void sample_free(sample *s);
/* Writes num_bytes of rows that match the codebook always, mostly, hardly or by chance. */
void sample_rows(rng *r, const sample *s, int row_kind, uint8_t *data, size_t num_bytes);

/* The sets of features that a processor may have, from the least on (samples.c). */
enum { NUM_FEATURE_SETS = 3 };
extern const uint32_t feature_sets[NUM_FEATURE_SETS];

void test_bits(void);
void test_status(void);
void test_codebook(void);
void test_learn(void);
void test_analysis(void);
void test_rows(void);
void test_corrupt_rows(void);
void test_cpu_paths(void);
void test_tables(void);
void test_corrupt_tables(void);
void test_offsets_past_4_gib(void);
void test_kv_pages(void);
void test_places(void);
void test_cache(void);
void test_stream(void);
void test_partition(void);
void test_no_cuda(void);
void test_arguments(void);
void test_hostile_codebooks(void);
void test_changing_rows(void);
void test_changing_arrays(void);
void test_file(void);
void test_stack(void);

#endif
