/* test_rows.c - encoding and decoding one row against the bit loops of naive.c, from buffers that end where they
 * should. */
#include "check.h"

static const size_t large_rows[] = {600, 2408, 4096, 14812, 16384, 65535, 65536};
enum { NUM_LARGE_ROWS = sizeof large_rows / sizeof *large_rows };

static void check_decode(const sample *s, const uint8_t *coded, size_t coded_bytes, const uint8_t *expected,
                         size_t offset)
{
    buffer src = buffer_copy(coded, coded_bytes, offset), row = buffer_new(s->masks.row_bytes, offset + 1);
    const ibp_status status = decode_row(&s->codebook, src.data, coded_bytes, row.data);
    if (expected) {
        CHECK(status == IBP_OK, "row of %u, %zu coded bytes: %s", s->masks.row_bytes, coded_bytes,
              ibp_status_string(status));
        CHECK(memcmp(row.data, expected, row.size) == 0, "row of %u, chunks of %u", s->masks.row_bytes,
              s->masks.chunk_bytes);
    } else {
        CHECK(status == IBP_CORRUPT_ROW, "row of %u from %zu bytes: %s", s->masks.row_bytes, coded_bytes,
              ibp_status_string(status));
    }
    buffer_free(&src);
    buffer_free(&row);
}

static void check_encode(const sample *s, const uint8_t *row, const uint8_t *expected, size_t expected_bytes,
                         size_t offset)
{
    size_t coded_bytes = 0;
    buffer dst = buffer_new(expected_bytes, offset);
    CHECK(coded_row_bytes(&s->codebook, row) == expected_bytes, "%zu", coded_row_bytes(&s->codebook, row));
    const ibp_status status = encode_row(&s->codebook, row, dst.data, dst.size, &coded_bytes);
    CHECK(status == IBP_OK && coded_bytes == expected_bytes, "row of %u: %s", s->masks.row_bytes,
          ibp_status_string(status));
    CHECK(memcmp(dst.data, expected, expected_bytes) == 0, "row of %u, chunks of %u", s->masks.row_bytes,
          s->masks.chunk_bytes);
    buffer_free(&dst);

    dst = buffer_new(expected_bytes - 1, offset);
    CHECK(encode_row(&s->codebook, row, dst.data, dst.size, &coded_bytes) == IBP_BUFFER_TOO_SMALL, "a byte too few");
    buffer_free(&dst);
}

static void check_row(rng *r, const sample *s, int row_kind)
{
    const size_t offset = rng_below(r, 8);
    buffer row = buffer_new(s->masks.row_bytes, offset), coded = buffer_new(naive_max_coded_bytes(&s->masks), 0);
    sample_rows(r, s, row_kind, row.data, row.size);
    const size_t coded_bytes = naive_encode_row(&s->masks, row.data, coded.data);
    check_encode(s, row.data, coded.data, coded_bytes, offset);
    check_decode(s, coded.data, coded_bytes, row.data, offset);
    buffer_free(&row);
    buffer_free(&coded);
}

static void check_worked_example(void)
{
    uint8_t mask[] = {0xFF, 0xF0, 0, 0, 0xFF, 0}, bitval[] = {0, 0x40, 0, 0, 0x3C, 0};
    const uint8_t row[] = {0x00, 0x45, 0xEF, 0xBE, 0x3C, 0x12}, coded[] = {0xD7, 0xBB, 0xAF, 0x04};
    _Alignas(16) uint32_t words[12];
    sample s = {{mask, bitval, 6, 2, false}, words, {0}};
    CHECK(ibp_build_codebook(mask, bitval, 6, 2, false, words, &s.codebook) == IBP_OK, "the codebook of FORMAT.md");
    CHECK(s.codebook.num_flags == 2, "%u", s.codebook.num_flags);
    check_encode(&s, row, coded, sizeof coded, 1);
    check_decode(&s, coded, sizeof coded, row, 1);
    const uint8_t other[] = {0x01, 0x45, 0xEF, 0xBE, 0x3C, 0x12};
    CHECK(coded_row_bytes(&s.codebook, other) == 6, "%zu", coded_row_bytes(&s.codebook, other));
}

void test_rows(void)
{
    check_worked_example();
    rng r = rng_seed(4);
    for (uint32_t row_bytes = 1; row_bytes <= 200; row_bytes += is_quick && row_bytes >= 72 ? 7 : 1)
        for (uint32_t chunk_bytes = 1; chunk_bytes <= 8; chunk_bytes *= 2)
            for (int kind = 0; kind < 2 * NUM_MASK_KINDS; kind++) {
                sample s = sample_new(&r, row_bytes, chunk_bytes, kind % 2 == 1, kind / 2);
                for (int row_kind = 0; row_kind < NUM_ROW_KINDS; row_kind++) check_row(&r, &s, row_kind);
                sample_free(&s);
            }
    for (size_t i = 0; i < NUM_LARGE_ROWS; i++)
        for (uint32_t chunk_bytes = 1; chunk_bytes <= 8; chunk_bytes *= 2)
            for (int kind = 0; kind < NUM_MASK_KINDS; kind++) {
                sample s = sample_new(&r, (uint32_t)large_rows[i], chunk_bytes, false, kind);
                check_row(&r, &s, 1);
                sample_free(&s);
            }
}

/* Same verdict as the bit loops, and the same row where it is one. */
static void check_hostile(const sample *s, const uint8_t *coded, size_t coded_bytes)
{
    buffer row = buffer_new(s->masks.row_bytes, 0);
    const bool good = naive_decode_row(&s->masks, coded, coded_bytes, row.data);
    check_decode(s, coded, coded_bytes, good ? row.data : NULL, coded_bytes % 5);
    buffer_free(&row);
}

static void check_truncated(const sample *s, const uint8_t *coded, size_t coded_bytes, size_t step)
{
    for (size_t size = 0; size < coded_bytes; size += step) check_decode(s, coded, size, NULL, size % 3);
    buffer longer = buffer_new(coded_bytes + 9, 0);
    memcpy(longer.data, coded, coded_bytes);
    for (size_t size = coded_bytes + 1; size <= longer.size; size++) check_decode(s, longer.data, size, NULL, 0);
    buffer_free(&longer);
}

static void check_corrupt(rng *r, const sample *s, int row_kind)
{
    buffer row = buffer_new(s->masks.row_bytes, 0), coded = buffer_new(naive_max_coded_bytes(&s->masks), 0);
    sample_rows(r, s, row_kind, row.data, row.size);
    const size_t coded_bytes = naive_encode_row(&s->masks, row.data, coded.data);
    check_truncated(s, coded.data, coded_bytes, 1 + row.size / 100);
    for (int i = 0; i < 12; i++) { /* one more bit flipped each time, half of them among the participation bits */
        const uint32_t num_bits =
            i % 2 == 0 && s->codebook.num_flags > 0 ? s->codebook.num_flags : 8 * (uint32_t)coded_bytes;
        const uint32_t bit = rng_below(r, num_bits);
        coded.data[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        check_hostile(s, coded.data, coded_bytes);
    }
    for (int i = 0; i < 4; i++) { /* nothing but noise, zeros or ones */
        const size_t size = rng_below(r, (uint32_t)coded.size + 1);
        if (i == 0) memset(coded.data, 0, coded.size);
        if (i == 1) memset(coded.data, 0xff, coded.size);
        if (i > 1) rng_fill(r, coded.data, coded.size);
        check_hostile(s, coded.data, size);
    }
    buffer_free(&row);
    buffer_free(&coded);
}

void test_corrupt_rows(void)
{
    rng r = rng_seed(5);
    for (uint32_t row_bytes = 1; row_bytes <= 200; row_bytes += row_bytes < 40 ? 1 : is_quick ? 21 : 7)
        for (uint32_t chunk_bytes = 1; chunk_bytes <= 8; chunk_bytes *= 2)
            for (int kind = 0; kind < 2 * NUM_MASK_KINDS; kind++) {
                sample s = sample_new(&r, row_bytes, chunk_bytes, kind % 2 == 1, kind / 2);
                check_corrupt(&r, &s, 1 + kind % 2);
                sample_free(&s);
            }
    for (size_t i = 0; i < NUM_LARGE_ROWS; i++)
        for (uint32_t chunk_bytes = 1; chunk_bytes <= 8; chunk_bytes *= 2) {
            sample s = sample_new(&r, (uint32_t)large_rows[i], chunk_bytes, chunk_bytes == 4, 2 + (int)i % 3);
            check_corrupt(&r, &s, 1);
            sample_free(&s);
        }
}
