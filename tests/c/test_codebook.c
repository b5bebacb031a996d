/* test_codebook.c - building a codebook, and the counts that analysis stands on. */
#include "check.h"
#include "core/format.h"

static void check_flags(const sample *s)
{
    const masks *const m = &s->masks;
    uint32_t position = 0;
    CHECK(s->codebook.num_flags == naive_num_flags(m), "%u flags", s->codebook.num_flags);
    for (uint32_t chunk = 0; chunk < naive_num_chunks(m); chunk++) {
        const uint32_t first = chunk * m->chunk_bytes, entry = s->codebook.flags[first / 4];
        const masks upto = {m->mask, m->bitval,
                            first + m->chunk_bytes < m->row_bytes ? first + m->chunk_bytes : m->row_bytes,
                            m->chunk_bytes, m->flag_all};
        const uint32_t flagged = ibp_flagged_chunks(entry) >> (first % 4 / m->chunk_bytes) & 1u;
        if (first % 4 == 0)
            CHECK(ibp_flag_position(entry) == position, "chunk %u: position %u", chunk, ibp_flag_position(entry));
        position += flagged;
        CHECK(naive_num_flags(&upto) == position, "chunk %u of %u, row of %u", chunk, m->chunk_bytes, m->row_bytes);
    }
}

static void check_words(const sample *s)
{
    const masks *const m = &s->masks;
    const size_t num_words = ibp_codebook_words(m->row_bytes);
    CHECK(num_words % 4 == 0 && 4 * num_words >= m->row_bytes && 4 * num_words < m->row_bytes + 16u, "%zu words",
          num_words);
    for (size_t i = 0; i < 4 * num_words; i++) {
        const uint32_t shift = 8 * (i % 4);
        const uint8_t mask = i < m->row_bytes ? m->mask[i] : 0, bitval = i < m->row_bytes ? m->bitval[i] : 0;
        CHECK((s->codebook.mask[i / 4] >> shift & 0xff) == mask, "mask, byte %zu of %u", i, m->row_bytes);
        CHECK((s->codebook.bitval[i / 4] >> shift & 0xff) == bitval, "bitval, byte %zu of %u", i, m->row_bytes);
    }
    for (size_t w = 0; w < num_words; w++)
        CHECK(s->codebook.flags[w] >> IBP_FLAG_FIRST_GAP ==
                  ibp_gaps_of_word(s->codebook.mask[w], m->chunk_bytes) >> IBP_FLAG_FIRST_GAP,
              "gaps of word %zu: entry %08x", w, s->codebook.flags[w]);
    for (size_t w = (m->row_bytes + 3u) / 4; w < num_words; w++) CHECK(s->codebook.flags[w] == 0, "flags past the row");
}

static void check_refused(uint32_t row_bytes, uint32_t chunk_bytes, uint8_t mask, uint8_t bitval)
{
    uint8_t masks_[4] = {0xff, 0xff, 0xff, mask}, bitvals[4] = {0, 0, 0, bitval};
    _Alignas(16) uint32_t words[12];
    ibp_codebook codebook;
    const ibp_status status = ibp_build_codebook(masks_, bitvals, row_bytes, chunk_bytes, false, words, &codebook);
    CHECK(status == IBP_INVALID_ARGUMENT, "row_bytes %u, chunk_bytes %u, mask %02x, bitval %02x: %s", row_bytes,
          chunk_bytes, mask, bitval, ibp_status_string(status));
}

void test_codebook(void)
{
    rng r = rng_seed(2);
    for (uint32_t row_bytes = 1; row_bytes <= 70; row_bytes++)
        for (uint32_t chunk_bytes = 1; chunk_bytes <= 8; chunk_bytes *= 2)
            for (int kind = 0; kind < 2 * NUM_MASK_KINDS; kind++) {
                sample s = sample_new(&r, row_bytes, chunk_bytes, kind % 2 == 1, kind / 2);
                check_flags(&s);
                check_words(&s);
                sample_free(&s);
            }
    check_refused(0, 4, 0xff, 0);
    check_refused(IBP_MAX_ROW_BYTES + 1, 4, 0xff, 0);
    check_refused(0xffffffffu, 4, 0xff, 0);
    static const uint32_t bad_chunks[] = {0, 3, 5, 6, 7, 9, 16, 0xffffffffu};
    for (size_t i = 0; i < sizeof bad_chunks / sizeof *bad_chunks; i++) check_refused(4, bad_chunks[i], 0xff, 0);
    check_refused(4, 4, 0x7f, 0x80);
    check_refused(4, 1, 0x00, 0x01);
}

static void check_counts(rng *r, size_t num_rows, uint32_t row_bytes, size_t offset, bool all_ones)
{
    buffer data = buffer_new(num_rows * row_bytes, offset);
    rng_fill(r, data.data, data.size);
    if (all_ones && data.size > 0) memset(data.data, 0xff, data.size);
    uint64_t *const counts = calloc(8 * (size_t)row_bytes, sizeof *counts);
    if (!counts) abort();
    counts[0] = 7; /* what is there is added to */
    ibp_count_bits(data.data, num_rows, row_bytes, counts);
    for (size_t bit = 0; bit < 8 * (size_t)row_bytes; bit++) {
        uint64_t expected = bit == 0 ? 7 : 0;
        for (size_t row = 0; row < num_rows; row++)
            expected += (uint32_t)data.data[row * row_bytes + bit / 8] >> (bit % 8) & 1u;
        CHECK(counts[bit] == expected, "%zu rows of %u, bit %zu: %llu", num_rows, row_bytes, bit,
              (unsigned long long)counts[bit]);
    }
    free(counts);
    buffer_free(&data);
}

/* counts, of 10 rows, for each tau: '1' and '0' invariant, '-' not. */
static void check_threshold(double tau, uint64_t num_rows, const char *expected)
{
    uint64_t counts[16] = {0};
    uint8_t mask[2], bitval[2];
    for (uint64_t i = 0; i <= num_rows; i++) counts[i] = i;
    const ibp_status status = ibp_threshold_bits(counts, num_rows, 2, tau, mask, bitval);
    CHECK(status == IBP_OK, "tau %g: %s", tau, ibp_status_string(status));
    for (size_t i = 0; i <= num_rows; i++) {
        const bool in_mask = mask[i / 8] >> (i % 8) & 1, value = bitval[i / 8] >> (i % 8) & 1;
        const char got = !in_mask ? (value ? '?' : '-') : value ? '1' : '0';
        CHECK(got == expected[i], "tau %g: %zu of %llu rows gave %c", tau, i, (unsigned long long)num_rows, got);
    }
}

static void check_hits(rng *r, uint32_t row_bytes, uint32_t chunk_bytes, int kind)
{
    enum { NUM_ROWS = 20 };
    sample s = sample_new(r, row_bytes, chunk_bytes, kind % 2 == 1, kind);
    buffer data = buffer_new(NUM_ROWS * (size_t)row_bytes, 3);
    sample_rows(r, &s, 2, data.data, data.size);
    const uint32_t num_chunks = naive_num_chunks(&s.masks);
    uint64_t *const hits = calloc(num_chunks, sizeof *hits);
    if (!hits) abort();
    hits[0] = 100;
    ibp_count_hits(&s.codebook, data.data, NUM_ROWS, hits);
    for (uint32_t chunk = 0; chunk < num_chunks; chunk++) {
        uint64_t expected = chunk == 0 ? 100 : 0;
        for (size_t row = 0; row < NUM_ROWS; row++)
            expected += naive_participates(&s.masks, data.data + row * row_bytes, chunk);
        CHECK(hits[chunk] == expected, "row of %u, chunk %u of %u bytes: %llu", row_bytes, chunk, chunk_bytes,
              (unsigned long long)hits[chunk]);
    }
    free(hits);
    buffer_free(&data);
    sample_free(&s);
}

/* Bits that the masks which are chosen for chunks of a size save on all rows. */
static int64_t chosen_gain(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint32_t chunk_bytes)
{
    const uint32_t num_chunks = (row_bytes + chunk_bytes - 1) / chunk_bytes;
    uint8_t mask[512], bitval[512];
    int64_t gain = 0;
    ibp_choose_masks(data, num_rows, row_bytes, chunk_bytes, 0, num_chunks, mask, bitval);
    for (uint32_t first = 0; first < row_bytes; first += chunk_bytes) {
        const uint32_t last = first + chunk_bytes < row_bytes ? first + chunk_bytes : row_bytes;
        int64_t bits = 0, hits = 0;
        for (uint32_t i = first; i < last; i++) bits += __builtin_popcount(mask[i]);
        for (size_t row = 0; row < num_rows; row++) {
            bool agrees = true;
            for (uint32_t i = first; i < last; i++) agrees &= ((data[row * row_bytes + i] ^ bitval[i]) & mask[i]) == 0;
            hits += agrees;
        }
        if (bits) gain += hits * bits - (int64_t)num_rows;
    }
    return gain;
}

/* Of few rows and columns the estimate is what the choice of masks gives. */
static void check_estimate(rng *r, size_t num_rows, uint32_t row_bytes)
{
    buffer data = buffer_new(num_rows * row_bytes, 1);
    for (size_t i = 0; i < data.size; i++) data.data[i] = (uint8_t)(rng_next(r) & rng_next(r) & (i % 3 ? 0x0f : 0xff));
    int64_t most = 0;
    for (uint32_t chunk_bytes = 1; chunk_bytes <= 8; chunk_bytes *= 2) {
        const int64_t gain = chosen_gain(data.data, num_rows, row_bytes, chunk_bytes);
        if (gain > most) most = gain;
    }
    double savings = -1;
    const double expected = (double)most / (8.0 * (double)data.size);
    const ibp_status status = ibp_estimate_masks(data.data, num_rows, row_bytes, &savings);
    CHECK(status == IBP_OK && savings == expected, "%zu rows of %u: %g, not %g", num_rows, row_bytes, savings,
          expected);
    buffer_free(&data);
}

void test_analysis(void)
{
    rng r = rng_seed(3);
    static const uint32_t estimated[] = {1, 7, 8, 61, 256};
    for (size_t i = 0; i < sizeof estimated / sizeof *estimated; i++)
        for (size_t num_rows = 1; num_rows <= 64; num_rows += 21) check_estimate(&r, num_rows, estimated[i]);
    static const size_t rows[] = {0, 1, 254, 255, 256, 511, 600};
    for (size_t i = 0; i < 2 * sizeof rows / sizeof *rows; i++)
        check_counts(&r, rows[i / 2], 1 + 7 * (uint32_t)i, i, i % 2 == 1);
    check_counts(&r, 3, 512, 1, false);
    check_counts(&r, 300, 1500, 1, true);

    check_threshold(0.5, 10, "00000-11111");
    check_threshold(0.75, 10, "000-----111");
    check_threshold(0.75, 4, "0---1"); /* 3 > 0.75 * 4 is false, and so is 1 < 0.25 * 4 */
    check_threshold(0.95, 10, "0---------1");
    check_threshold(1.0, 10, "0---------1");
    uint64_t counts[8] = {0};
    uint8_t mask, bitval;
    static const double refused[] = {-1.0, 0.0, 0.49, 1.01, 100.0};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        CHECK(ibp_threshold_bits(counts, 1, 1, refused[i], &mask, &bitval) == IBP_INVALID_ARGUMENT, "tau %g",
              refused[i]);
    CHECK(ibp_threshold_bits(counts, 1, 1, strtod("nan", NULL), &mask, &bitval) == IBP_INVALID_ARGUMENT, "tau NaN");

    for (uint32_t row_bytes = 1; row_bytes <= 40; row_bytes++)
        for (uint32_t chunk_bytes = 1; chunk_bytes <= 8; chunk_bytes *= 2)
            for (int kind = 0; kind < NUM_MASK_KINDS; kind++) check_hits(&r, row_bytes, chunk_bytes, kind);
}
