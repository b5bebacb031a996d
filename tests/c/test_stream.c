/* test_stream.c - chunks of a stream: their sizes, and that every row is found in the copy of its chunk; then hostile
 * bases. */
#include "check.h"
#include "core/chunk_plan.h"

enum { MIB = 1 << 20 };

static void check_sizes(int64_t done, int64_t total, int64_t most, bool ends)
{
    int64_t left = total, num_chunks = 0, last = 0;
    while (left > 0) {
        const int64_t bytes = ibp_size_chunk(done, left, most, ends);
        CHECK(bytes >= 1 && bytes <= most && bytes <= left, "%lld of %lld", (long long)bytes, (long long)left);
        if (bytes < 1) return;
        CHECK(bytes <= done + MIB, "%lld after %lld", (long long)bytes, (long long)done);
        CHECK(!ends || bytes <= MIB || bytes <= left / 3 + 1, "%lld of the last %lld", (long long)bytes,
              (long long)left);
        done += bytes;
        left -= bytes;
        last = bytes;
        num_chunks++;
    }
    CHECK(!ends || last <= MIB, "%lld come last", (long long)last);
    CHECK(num_chunks <= total / most + 24, "%lld chunks of %lld", (long long)num_chunks, (long long)total);
}

static void test_sizes(rng *r)
{
    for (int i = 0; i < 2000; i++) {
        const int64_t most = MIB + rng_below(r, 8 * MIB), total = 1 + rng_below(r, i % 2 ? 3 * MIB : 1000 * MIB);
        check_sizes(0, total, most, i % 4 < 2);
        check_sizes(rng_below(r, 100 * MIB), total, most, i % 4 < 2);
    }
    CHECK(ibp_size_chunk(0, 100, 1, true) == 1 && ibp_size_chunk(0, 1, 100, false) == 1, "%s", "the least");
    CHECK(ibp_size_chunk(99 * (int64_t)MIB, 80 * MIB, 8 * MIB, false) == 8 * MIB, "%s",
          "in between, as large as can be");
    CHECK(ibp_size_chunk(99 * (int64_t)MIB, 9 * MIB, 8 * MIB, false) == 9 * MIB / 2, "%s",
          "two equal ones, not a large and a tiny one");
}

typedef struct made {
    sample sample;
    buffer data, slots, overflow;
    uint16_t *lengths;
    uint64_t *bases;
    ibp_table table;
} made;

static made make_table(rng *r, int64_t num_bytes, uint32_t row_bytes, uint32_t slot_bytes, bool raw)
{
    made t = {.sample = sample_new(r, row_bytes, 4, false, (int)rng_below(r, NUM_MASK_KINDS)),
              .data = buffer_new((size_t)num_bytes, 0)};
    sample_rows(r, &t.sample, (int)rng_below(r, NUM_ROW_KINDS), t.data.data, t.data.size);
    t.table =
        (ibp_table){.num_items = num_bytes, .item_bytes = 1, .slot_bytes = slot_bytes, .codebook = t.sample.codebook};
    const int64_t num_rows = ibp_num_rows(&t.table);
    t.lengths = malloc((size_t)num_rows * sizeof *t.lengths);
    t.bases = malloc((size_t)((num_rows + 31) / 32) * sizeof *t.bases);
    if (!t.lengths || !t.bases) abort();
    buffer scratch = scratch_new(row_bytes);
    if (!raw) ibp_measure_rows(&t.sample.codebook, t.data.data, num_bytes, t.lengths, scratch.data, scratch.size);
    ibp_index_rows(raw ? NULL : t.lengths, num_bytes, row_bytes, slot_bytes, t.bases, &t.table.overflow_bytes);
    t.table.slots_bytes = slot_bytes == row_bytes ? num_bytes : num_rows * slot_bytes;
    t.slots = buffer_new((size_t)t.table.slots_bytes, 0);
    t.overflow = buffer_new((size_t)t.table.overflow_bytes, 0);
    t.table.slots = t.slots.data;
    t.table.overflow = t.overflow.data;
    t.table.lengths = raw ? NULL : t.lengths;
    t.table.bases = t.table.overflow_bytes ? t.bases : NULL;

    ibp_fault fault = {0};
    const ibp_status status = ibp_encode_rows(&t.table, t.data.data, 0, num_rows, t.slots.data, t.overflow.data,
                                              scratch.data, scratch.size, &fault);
    CHECK(status == IBP_OK && fault.status == IBP_OK, "%s", ibp_status_string(status));
    buffer_free(&scratch);
    return t;
}

static void free_table(made *t)
{
    sample_free(&t->sample);
    buffer_free(&t->data);
    buffer_free(&t->slots);
    buffer_free(&t->overflow);
    free(t->lengths);
    free(t->bases);
}

/* Decodes a chunk from copies of its ranges, each as large as the range, so that a sanitizer sees what is read beside
 * it.
 * @return whether all rows are intact. */
static bool decode_chunk(const made *t, const ibp_chunk *chunk, uint8_t *out)
{
    const int64_t row_bytes = t->table.codebook.row_bytes, num_bytes = (int64_t)t->data.size;
    const int64_t start = chunk->first_row * row_bytes, last = chunk->last_row * row_bytes,
                  end = last < num_bytes ? last : num_bytes;
    buffer slots = buffer_copy(t->slots.data + chunk->slots_start, chunk->slots_bytes, 0);
    buffer overflow = buffer_copy(t->overflow.data + chunk->overflow_start, chunk->overflow_bytes, 0);
    buffer scratch = scratch_new((uint32_t)row_bytes);
    ibp_table block = t->table;
    block.slots = slots.data, block.slots_start = chunk->slots_start, block.slots_bytes = (int64_t)chunk->slots_bytes;
    block.overflow = overflow.data, block.overflow_start = chunk->overflow_start,
    block.overflow_bytes = (int64_t)chunk->overflow_bytes;
    ibp_fault fault = {0};
    const bool intact = ibp_decode_bytes(&block, start, end, out + start, scratch.data, scratch.size, &fault) == IBP_OK;
    buffer_free(&slots);
    buffer_free(&overflow);
    buffer_free(&scratch);
    return intact;
}

/* Streams rows first_row to end_row - 1 as stream.cu does, from a table that may be damaged. @return whether every
 * chunk fitted and was intact. */
static bool stream_rows(const made *t, int64_t first_row, int64_t end_row, int64_t room, bool ends, uint8_t *out)
{
    bool intact = true;
    int64_t done = 0;
    for (int64_t row = first_row; row < end_row;) {
        const ibp_chunk chunk = ibp_plan_chunk(&t->table, t->table.bases, row, end_row, done, room, ends);
        CHECK(chunk.first_row == row && chunk.last_row > row && chunk.last_row <= end_row, "rows %lld to %lld",
              (long long)row, (long long)chunk.last_row);
        if (chunk.last_row <= row) return false;
        CHECK(chunk.last_row % 32 == 0 || chunk.last_row == end_row, "ends at %lld", (long long)chunk.last_row);
        row = chunk.last_row;
        intact = intact && chunk.fits;
        if (!chunk.fits) continue;
        CHECK(chunk.slots_start + chunk.slots_bytes <= (uint64_t)t->table.slots_bytes, "%s", "slots past the end");
        CHECK(chunk.overflow_start + chunk.overflow_bytes <= (uint64_t)t->table.overflow_bytes, "%s",
              "overflow past the end");
        CHECK(chunk.slots_start % IBP_CHUNK_ALIGN == 0 && chunk.overflow_start % IBP_CHUNK_ALIGN == 0, "%s",
              "alignment");
        const uint64_t offset = ibp_chunk_overflow_offset(&chunk);
        CHECK(offset % IBP_CHUNK_ALIGN == 0 && offset >= chunk.slots_bytes &&
                  offset + chunk.overflow_bytes <= (uint64_t)room,
              "%s", "parts in the room");
        done += (int64_t)(chunk.slots_bytes + chunk.overflow_bytes);
        intact = decode_chunk(t, &chunk, out) && intact;
    }
    return intact;
}

static void check_intact_table(rng *r, const made *t)
{
    const int64_t num_rows = ibp_num_rows(&t->table), row_bytes = t->table.codebook.row_bytes;
    const int64_t group_bytes = 32 * (int64_t)((row_bytes + 31) / 32 * 32 + 32);
    buffer out = buffer_new(t->data.size, 0);
    for (int i = 0; i < 4; i++) {
        const int64_t room = group_bytes * (1 + (int64_t)rng_below(r, 4)) + 3 * IBP_CHUNK_ALIGN;
        memset(out.data, 0xA5, out.size);
        CHECK(stream_rows(t, 0, num_rows, room, i % 2, out.data), "room for %lld bytes", (long long)room);
        CHECK(memcmp(out.data, t->data.data, out.size) == 0, "room for %lld bytes", (long long)room);
    }
    if (num_rows <= 96) {
        buffer_free(&out);
        return;
    }
    memset(out.data, 0xA5, out.size);
    CHECK(stream_rows(t, 32, 96, group_bytes + 3 * IBP_CHUNK_ALIGN, true, out.data), "%s", "rows 32 to 95");
    CHECK(memcmp(out.data + 32 * row_bytes, t->data.data + 32 * row_bytes, 64 * (size_t)row_bytes) == 0, "%s",
          "rows 32 to 95");
    CHECK(out.data[32 * row_bytes - 1] == 0xA5 && out.data[96 * row_bytes] == 0xA5, "%s", "rows beside them");
    const bool has_bytes = t->table.slots_bytes + t->table.overflow_bytes != 0; /* else all rows are default rows */
    CHECK(stream_rows(t, 0, num_rows, 16, true, out.data) != has_bytes, "%s", "32 rows do not fit 16 bytes");
    buffer_free(&out);
}

static void check_hostile_bases(rng *r, made *t)
{
    const int64_t num_bases = (ibp_num_rows(&t->table) + 31) / 32;
    if (!t->table.bases) return;
    buffer out = buffer_new(t->data.size, 0);
    for (int i = 0; i < 20; i++) {
        uint64_t *const base = &t->bases[rng_below(r, (uint32_t)num_bases)], kept = *base;
        *base = i % 2 ? rng_next(r) : kept + rng_below(r, 2000) - 1000;
        stream_rows(t, 0, ibp_num_rows(&t->table), 20000, i % 4 < 2, out.data);
        if (i % 5) *base = kept; /* else the damage adds up */
    }
    buffer_free(&out);
}

void test_stream(void)
{
    rng r = rng_seed(77);
    test_sizes(&r);
    static const uint32_t row_sizes[] = {1, 4, 33, 100, 128, 600, 2048};
    for (size_t k = 0; k < sizeof row_sizes / sizeof *row_sizes; k++) {
        const uint32_t row_bytes = row_sizes[k];
        const uint32_t slots[] = {0, 32, row_bytes > 96 ? 96 : 0, row_bytes};
        for (int i = 0; i < 16; i++) {
            const uint32_t slot_bytes = slots[i % 4] > row_bytes ? 0 : slots[i % 4];
            const int64_t num_bytes = 1 + (int64_t)rng_below(&r, 700 * row_bytes);
            made t = make_table(&r, num_bytes, row_bytes, slot_bytes, i >= 12);
            check_intact_table(&r, &t);
            check_hostile_bases(&r, &t);
            free_table(&t);
        }
    }
}
