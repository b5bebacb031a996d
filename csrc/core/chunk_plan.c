/* chunk_plan.c - implements chunk_plan.h. Bases are not trusted. */
#include "chunk_plan.h"

#include "locate.h"

/* Sizes in bytes that suit an H200 on PCIe 5 x16, where a copy takes a few microseconds in addition to the time of the
 * transfer itself. */
#define FIRST_CHUNK_BYTES (1 << 20)
#define LAST_CHUNK_BYTES (1 << 19)
#define LAST_CHUNKS_SHARE 3 /* each of the last chunks has a third of the bytes that are left */

static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static uint64_t align_down(uint64_t v) { return v / IBP_CHUNK_ALIGN * IBP_CHUNK_ALIGN; }
static uint64_t align_up(uint64_t v) { return align_down(v + IBP_CHUNK_ALIGN - 1); }

int64_t ibp_size_chunk(int64_t done_bytes, int64_t left_bytes, int64_t most_bytes, bool ends)
{
    /* Each chunk is as large as FIRST_CHUNK_BYTES plus all chunks before it, so the sizes double. */
    int64_t bytes = min_i64(most_bytes, done_bytes + FIRST_CHUNK_BYTES);
    if (ends) bytes = min_i64(bytes, max_i64(left_bytes / LAST_CHUNKS_SHARE, LAST_CHUNK_BYTES));
    if (left_bytes <= bytes) return left_bytes;
    const int64_t num_equal = (left_bytes - 1) / bytes + 1;
    return (left_bytes - 1) / num_equal + 1;
}

/* Returns the number of bytes of slots before a row, or of all slots if `row` is the number of rows. */
static uint64_t slots_before(const ibp_table *table, int64_t row)
{
    const uint64_t before = (uint64_t)row * table->slot_bytes, all = (uint64_t)table->slots_bytes;
    return before < all ? before : all;
}
/* Returns the number of bytes of overflow before a row, or of all overflow if `row` is the number of rows. Any other
 * `row` must be a multiple of IBP_ROWS_PER_BASE. */
static uint64_t overflow_before(const ibp_table *table, const uint64_t *bases, int64_t row)
{
    /* If rows have their own bases, their overflow parts lie in any order, so chunks have no range of overflow. */
    if (!bases || ibp_has_own_bases(table)) return 0;
    return row >= ibp_num_rows(table) ? (uint64_t)table->overflow_bytes : IBP_LOAD_ONCE(bases[row / IBP_ROWS_PER_BASE]);
}
static int64_t bytes_between(const ibp_table *table, const uint64_t *bases, int64_t row, int64_t end_row)
{
    return (int64_t)(slots_before(table, end_row) + overflow_before(table, bases, end_row) - slots_before(table, row) -
                     overflow_before(table, bases, row));
}

/* Returns the end of a chunk that begins at first_row and has at most wanted_bytes bytes. The chunk consists of as many
 * groups of IBP_ROWS_PER_BASE rows as possible and ends at end_row at the latest. It has at least one group, even if
 * this group is larger than wanted_bytes. */
static int64_t find_end(const ibp_table *table, const uint64_t *bases, int64_t first_row, int64_t end_row,
                        int64_t wanted_bytes)
{
    int64_t low = first_row / IBP_ROWS_PER_BASE + 1, high = (end_row - 1) / IBP_ROWS_PER_BASE + 1;
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2, row = min_i64(middle * IBP_ROWS_PER_BASE, end_row);
        if (bytes_between(table, bases, first_row, row) <= wanted_bytes)
            low = middle;
        else
            high = middle - 1;
    }
    return min_i64(low * IBP_ROWS_PER_BASE, end_row);
}

ibp_chunk ibp_plan_chunk(const ibp_table *table, const uint64_t *bases, int64_t first_row, int64_t end_row,
                         int64_t done_bytes, int64_t room_bytes, bool ends)
{
    const int64_t left = max_i64(1, bytes_between(table, bases, first_row, end_row));
    const int64_t most =
        max_i64(1, room_bytes - 3 * IBP_CHUNK_ALIGN); /* both starts, and the offset of the overflow part in the buffer,
                                                         are rounded */
    ibp_chunk chunk = {.first_row = first_row};
    chunk.last_row = find_end(table, bases, first_row, end_row, ibp_size_chunk(done_bytes, left, most, ends));
    const uint64_t overflow_from = overflow_before(table, bases, first_row),
                   overflow_to = overflow_before(table, bases, chunk.last_row);
    if (overflow_from > overflow_to || overflow_to > (uint64_t)table->overflow_bytes) return chunk;
    chunk.slots_start = align_down(slots_before(table, first_row));
    chunk.slots_bytes = slots_before(table, chunk.last_row) - chunk.slots_start;
    chunk.overflow_start = align_down(overflow_from);
    chunk.overflow_bytes = overflow_to - chunk.overflow_start;
    chunk.fits = ibp_chunk_overflow_offset(&chunk) + chunk.overflow_bytes <= (uint64_t)room_bytes;
    return chunk;
}

uint64_t ibp_chunk_overflow_offset(const ibp_chunk *chunk) { return align_up(chunk->slots_bytes); }
