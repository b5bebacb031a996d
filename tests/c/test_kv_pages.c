/* test_kv_pages.c - transfers of pages: what is moved from where to where, for any numbers, and what is noted. */
#include "check.h"

enum { NUM_PAGES = 9, NUM_BLOCKS = 7, COUNT = 200 };

/* A transfer of random numbers, one in four of which is out of range. */
typedef struct made {
    ibp_page_transfer transfer;
    int64_t pages[COUNT], blocks[COUNT];
    uint64_t starts[12], block_starts[NUM_BLOCKS];
    uint8_t stored[NUM_PAGES * 4];
} made;

static int64_t number_below(rng *r, int64_t count)
{
    static const int64_t wrong[] = {-1, INT64_MIN, INT64_MAX, 1ll << 40};
    const uint32_t which = rng_below(r, 16);
    if (which == 0) return count;
    return which <= 4 ? wrong[which - 1] : (int64_t)rng_below(r, (uint32_t)count);
}

static made new_transfer(rng *r)
{
    made m = {.transfer = {.count = COUNT, .num_pages = NUM_PAGES, .num_blocks = NUM_BLOCKS, .num_tensors = 4}};
    ibp_page_transfer *const t = &m.transfer;
    t->first_tensor = (uint32_t)rng_below(r, 4), t->tensors = 1 + (uint32_t)rng_below(r, 4 - t->first_tensor);
    t->pieces = 1 + (uint32_t)rng_below(r, 3), t->ids_per_block = t->pieces * (1 + (uint32_t)rng_below(r, 3));
    t->block_stride = (int64_t)rng_below(r, 10000), t->scratch = 77;
    for (int k = 0; k < COUNT; k++) m.pages[k] = number_below(r, NUM_PAGES), m.blocks[k] = number_below(r, NUM_BLOCKS);
    for (size_t k = 0; k < 12; k++) m.starts[k] = rng_below(r, 1 << 20);
    for (size_t k = 0; k < NUM_BLOCKS; k++) m.block_starts[k] = rng_below(r, 1 << 30);
    for (size_t k = 0; k < sizeof m.stored; k++) m.stored[k] = rng_below(r, 2) != 0;
    return m;
}

static void check_plan(rng *r)
{
    made m = new_transfer(r);
    ibp_page_transfer *const t = &m.transfer;
    t->pages = m.pages, t->blocks = m.blocks, t->starts = m.starts;
    const bool apart = rng_below(r, 2) != 0, asks = rng_below(r, 2) != 0;
    if (apart) t->block_starts = m.block_starts;
    const uint32_t n = t->ids_per_block, each = n / t->pieces;
    buffer ids = buffer_new(8u * COUNT * t->tensors * n, 0),
           addresses = buffer_new(8u * COUNT * t->tensors * t->pieces, 0);
    CHECK(ibp_plan_pages(t, asks ? m.stored : NULL, (int64_t *)(void *)ids.data, (uint64_t *)(void *)addresses.data) ==
              IBP_OK,
          "%u pieces", t->pieces);
    const int64_t *id = (const int64_t *)(const void *)ids.data;
    const uint64_t *address = (const uint64_t *)(const void *)addresses.data;
    for (int k = 0; k < COUNT; k++)
        for (uint32_t tensor = 0; tensor < t->tensors; tensor++)
            for (uint32_t i = 0; i < n; i++) {
                const int64_t page = m.pages[k], block = m.blocks[k];
                const bool there = page >= 0 && page < NUM_PAGES && block >= 0 && block < NUM_BLOCKS;
                const int64_t first = there ? 4 * page + t->first_tensor : 0;
                const bool stored = !asks || memchr(m.stored + first, 0, t->tensors) == NULL;
                CHECK(*id++ == (there && stored ? (first + tensor) * n + i : -1), "id %d, %u, %u", k, tensor, i);
                if (i % each != 0) continue;
                const uint64_t from = there ? apart ? m.block_starts[block] : (uint64_t)(block * t->block_stride) : 77;
                CHECK(*address++ == from + (there ? m.starts[tensor * t->pieces + i / each] : 0), "%d, %u", k, tensor);
            }
    buffer_free(&ids);
    buffer_free(&addresses);
}

static void check_notes(rng *r)
{
    enum { ROWS = 12, PER_BLOCK = 3 };
    uint16_t lengths[ROWS], rooms[ROWS];
    int64_t ids[ROWS];
    uint8_t stored[ROWS / PER_BLOCK], seen[ROWS / PER_BLOCK], lost[ROWS / PER_BLOCK] = {0};
    for (int i = 0; i < ROWS; i++)
        lengths[i] = (uint16_t)rng_below(r, 2), rooms[i] = (uint16_t)rng_below(r, 2), ids[i] = i;
    for (int i = 0; i < ROWS; i++) lost[i / PER_BLOCK] |= lengths[i] == 0 && rooms[i] == 0;
    memset(stored, 9, sizeof stored), memset(seen, 9, sizeof seen);
    ids[0] = -1, ids[4] = INT64_MAX, ids[6] = ROWS;
    CHECK(ibp_note_pages(ids, 4, PER_BLOCK, lengths, rooms, ROWS, stored, seen) == IBP_OK, "%s", "notes");
    CHECK(stored[0] == 9 && stored[1] == 0 && stored[2] == 9 && stored[3] == !lost[3], "%u", stored[3]);
    CHECK(memcmp(stored, seen, sizeof stored) == 0, "%s", "the host sees the same");
    CHECK(ibp_note_pages(ids, 4, PER_BLOCK, lengths, NULL, ROWS, stored, seen) == IBP_OK && stored[3] == 1, "%s",
          "slots of whole rows");
    CHECK(ibp_note_pages(ids, -1, PER_BLOCK, lengths, rooms, ROWS, stored, seen) == IBP_INVALID_ARGUMENT, "%s",
          "blocks");
    CHECK(ibp_note_pages(ids, 4, 0, lengths, rooms, ROWS, stored, seen) == IBP_INVALID_ARGUMENT, "%s", "ids");
    CHECK(ibp_note_pages(ids, 4, PER_BLOCK, lengths, rooms, ROWS - 1, stored, seen) == IBP_INVALID_ARGUMENT, "%s",
          "rows that are no whole blocks");
}

static void check_what_is_refused(rng *r)
{
    made m = new_transfer(r);
    m.transfer.pages = m.pages, m.transfer.blocks = m.blocks, m.transfer.starts = m.starts;
    for (int wrong = 0; wrong < 12; wrong++) {
        ibp_page_transfer t = m.transfer;
        if (wrong == 0) t.count = -1;
        if (wrong == 1) t.num_pages = -1;
        if (wrong == 2) t.num_blocks = -1;
        if (wrong == 3) t.pieces = 0;
        if (wrong == 4) t.pieces = 2, t.ids_per_block = 3;
        if (wrong == 5) t.tensors = 0;
        if (wrong == 6) t.first_tensor = 5;
        if (wrong == 7) t.tensors = UINT32_MAX;
        if (wrong == 8) t.num_pages = INT64_MAX;
        if (wrong == 9) t.starts = NULL;
        if (wrong == 10) t.blocks = NULL;
        if (wrong == 11) t.num_tensors = t.tensors = UINT32_MAX, t.first_tensor = 0;
        CHECK(ibp_plan_pages(&t, NULL, NULL, NULL) == IBP_INVALID_ARGUMENT, "%d", wrong);
    }
}

void test_kv_pages(void)
{
    rng r = rng_seed(53);
    for (int i = 0; i < 40; i++) check_plan(&r), check_notes(&r);
    check_what_is_refused(&r);
}
