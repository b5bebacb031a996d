/* whole_table.c - compresses a table of float32 rows in host memory, gathers rows by their ids and checks every byte.
 *
 *     cc whole_table.c $(pkg-config --cflags --libs ibp) -o whole_table && ./whole_table
 */
#include <ibp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    NUM_ROWS = 20000,
    COLUMNS = 64,
    ROW_BYTES = COLUMNS * (int)sizeof(float),
    CHUNK_BYTES = 4, /* one participation bit for each float whose invariant bits pay for it */
    NUM_CHUNKS = ROW_BYTES / CHUNK_BYTES,
    NUM_IDS = 5000,
    SECTOR_BYTES = 32, /* a slot is a multiple of this, so that a GPU reads a row in whole sectors */
};

static void check(ibp_status status, const char *what)
{
    if (status == IBP_OK) return;
    fprintf(stderr, "%s: %s\n", what, ibp_status_string(status));
    exit(EXIT_FAILURE);
}

static void *allocate(size_t count, size_t size)
{
    void *const memory = calloc(count ? count : 1, size);
    if (!memory) {
        fprintf(stderr, "out of memory\n");
        exit(EXIT_FAILURE);
    }
    return memory;
}

/* A linear congruential generator (Knuth, MMIX), its high 32 bits. */
static uint32_t random_bits(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 32);
}

/* Counts with few values a column, as ratings and bags of words have them: 9 in 10 are 0, the others 1 to 5. */
static void fill(float *data)
{
    uint64_t state = 1;
    for (int i = 0; i < NUM_ROWS * COLUMNS; i++) {
        const uint32_t bits = random_bits(&state);
        data[i] = bits % 10 == 0 ? (float)(1 + bits / 10 % 5) : 0.0f;
    }
}

/* Decides which bits are invariant and builds the codebook, whose arrays stay in words. */
static void make_codebook(const uint8_t *data, uint32_t *words, ibp_codebook *codebook)
{
    uint8_t mask[ROW_BYTES], bitval[ROW_BYTES];
    check(ibp_choose_masks(data, NUM_ROWS, ROW_BYTES, CHUNK_BYTES, 0, NUM_CHUNKS, mask, bitval), "ibp_choose_masks");
    check(ibp_build_codebook(mask, bitval, ROW_BYTES, CHUNK_BYTES, false, words, codebook), "ibp_build_codebook");
}

/* The smallest slot that holds 99 of 100 rows. The bytes of the others that do not fit go to the overflow. */
static uint32_t choose_slot_bytes(const uint16_t *lengths)
{
    int64_t longer = NUM_ROWS;
    for (uint32_t slot_bytes = SECTOR_BYTES; slot_bytes < ROW_BYTES; slot_bytes += SECTOR_BYTES) {
        longer = 0;
        for (int64_t r = 0; r < NUM_ROWS; r++) longer += (lengths[r] ? lengths[r] : (uint32_t)ROW_BYTES) > slot_bytes;
        if (longer * 100 <= NUM_ROWS) return slot_bytes;
    }
    return ROW_BYTES;
}

static void check_bytes(const uint8_t *got, const uint8_t *wanted, size_t num_bytes, const char *what)
{
    if (memcmp(got, wanted, num_bytes) == 0) return;
    fprintf(stderr, "%s: the bytes differ\n", what);
    exit(EXIT_FAILURE);
}

int main(void)
{
    const int64_t num_bytes = (int64_t)NUM_ROWS * ROW_BYTES;
    float *const data = allocate(NUM_ROWS * COLUMNS, sizeof *data);
    const uint8_t *const bytes = (const uint8_t *)data;
    fill(data);
    printf("ibp %s: %d rows of %d bytes, %lld bytes\n", ibp_version(), NUM_ROWS, ROW_BYTES, (long long)num_bytes);

    /* 1. Analyse: a codebook for all rows. Its words must be 16-byte aligned. */
    const size_t words_bytes = 3 * ibp_codebook_words(ROW_BYTES) * sizeof(uint32_t);
    uint32_t *const words = aligned_alloc(16, words_bytes);
    if (!words) return EXIT_FAILURE;
    ibp_codebook codebook;
    make_codebook(bytes, words, &codebook);

    /* 2. Measure: how many bytes each row takes as coded, and with that the size of a slot. Functions that code rows
     * work in scratch that the caller gives. */
    const size_t scratch_bytes = ibp_scratch_bytes(ROW_BYTES);
    uint8_t *const scratch = allocate(1, scratch_bytes);
    uint16_t *const lengths = allocate(NUM_ROWS, sizeof *lengths);
    check(ibp_measure_rows(&codebook, bytes, num_bytes, lengths, scratch, scratch_bytes), "ibp_measure_rows");
    const uint32_t slot_bytes = choose_slot_bytes(lengths);

    /* 3. Index: where the overflow of each 32 rows starts, and how much there is. */
    const size_t num_bases = (NUM_ROWS + IBP_ROWS_PER_BASE - 1) / IBP_ROWS_PER_BASE;
    uint64_t *const bases = allocate(num_bases, sizeof *bases);
    int64_t overflow_bytes;
    check(ibp_index_rows(lengths, num_bytes, ROW_BYTES, slot_bytes, bases, &overflow_bytes), "ibp_index_rows");

    /* 4. Encode into arrays of exactly the size that the index asks for. */
    const int64_t slots_bytes = (int64_t)NUM_ROWS * slot_bytes;
    uint8_t *const slots = allocate((size_t)slots_bytes, 1);
    uint8_t *const overflow = allocate((size_t)overflow_bytes, 1);
    const ibp_table table = {
        .num_items = NUM_ROWS,
        .item_bytes = ROW_BYTES,
        .slots = slots,
        .overflow = overflow_bytes ? overflow : NULL,
        .lengths = lengths,
        .bases = bases,
        .slots_bytes = slots_bytes,
        .overflow_bytes = overflow_bytes,
        .slot_bytes = slot_bytes,
        .codebook = codebook,
    };
    check(ibp_check_table(&table), "ibp_check_table");
    ibp_fault fault = {0};
    check(ibp_encode_rows(&table, bytes, 0, NUM_ROWS, slots, overflow, scratch, scratch_bytes, &fault),
          "ibp_encode_rows");

    /* 5. Gather rows by their ids. */
    int64_t *const ids = allocate(NUM_IDS, sizeof *ids);
    uint64_t state = 2;
    for (int k = 0; k < NUM_IDS; k++) ids[k] = random_bits(&state) % NUM_ROWS;
    uint8_t *const rows = allocate(NUM_IDS, ROW_BYTES);
    const ibp_ids wanted = {.data = ids, .count = NUM_IDS, .id_bytes = sizeof *ids};
    check(ibp_gather_items(&table, &wanted, 0, NUM_IDS, rows, scratch, scratch_bytes, &fault), "ibp_gather_items");
    for (int k = 0; k < NUM_IDS; k++)
        check_bytes(rows + (size_t)k * ROW_BYTES, bytes + ids[k] * ROW_BYTES, ROW_BYTES, "gathered row");

    /* 6. Decode the whole table. */
    uint8_t *const all = allocate((size_t)num_bytes, 1);
    check(ibp_decode_bytes(&table, 0, num_bytes, all, scratch, scratch_bytes, &fault), "ibp_decode_bytes");
    check_bytes(all, bytes, (size_t)num_bytes, "whole table");

    /* 7. An id out of range leaves zeros in its place and is noted with its position. */
    ids[7] = NUM_ROWS;
    const ibp_status status = ibp_gather_items(&table, &wanted, 0, NUM_IDS, rows, scratch, scratch_bytes, &fault);
    if (status != IBP_INDEX_OUT_OF_RANGE || fault.position != 7 || fault.id != NUM_ROWS) return EXIT_FAILURE;
    printf("ids[%lld] = %lld: %s\n", (long long)fault.position, (long long)fault.id, ibp_status_string(status));

    const int64_t index_bytes = (int64_t)(NUM_ROWS * sizeof *lengths + num_bases * sizeof *bases + words_bytes);
    const int64_t total = slots_bytes + overflow_bytes + index_bytes;
    printf("slots of %u bytes: %lld bytes, overflow %lld, index and codebook %lld\n", slot_bytes,
           (long long)slots_bytes, (long long)overflow_bytes, (long long)index_bytes);
    printf("%lld bytes in all, %.1f%% saved; every byte is the same\n", (long long)total,
           100.0 - 100.0 * (double)total / (double)num_bytes);

    free(data);
    free(words);
    free(lengths);
    free(bases);
    free(slots);
    free(overflow);
    free(scratch);
    free(ids);
    free(rows);
    free(all);
    return EXIT_SUCCESS;
}
