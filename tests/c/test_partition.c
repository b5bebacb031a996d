/* test_partition.c - ids in the order of their windows, vectors in groups, and matrices listed, against the
 * definitions. */
#include "check.h"

static int64_t id_at(const ibp_ids *ids, const void *data, int64_t k)
{
    return ids->id_bytes == 8 ? ((const int64_t *)data)[k] : ((const int32_t *)data)[k];
}

static int64_t clamped_window(int64_t id, int64_t num_items, uint32_t window_bits)
{
    const int64_t last = num_items > 0 ? num_items - 1 : 0;
    return (id < 0 ? 0 : id > last ? last : id) / ((int64_t)1 << window_bits);
}

/* spread: percent of the ids that are anywhere, also out of range; the others crowd in a few items. */
static void check_partition(rng *r, int64_t count, int64_t num_items, uint32_t window_bits, uint32_t id_bytes,
                            uint32_t spread)
{
    const size_t size = (size_t)count * id_bytes;
    buffer ids_memory = buffer_new(size, 0), sorted = buffer_new(size, 0), positions = buffer_new(4 * (size_t)count, 0);
    buffer workspace = buffer_new(ibp_partition_workspace_bytes(count, num_items, window_bits), 0);
    const ibp_ids ids = {.data = ids_memory.data, .count = count, .id_bytes = id_bytes};
    for (int64_t k = 0; k < count; k++) {
        const int64_t anywhere = (int64_t)rng_below(r, (uint32_t)num_items + 20) - 10;
        const int64_t id = rng_chance(r, spread) ? anywhere : (int64_t)rng_below(r, 3);
        if (id_bytes == 8)
            ((int64_t *)(void *)ids_memory.data)[k] = id;
        else
            ((int32_t *)(void *)ids_memory.data)[k] = (int32_t)id;
    }
    uint32_t *const at = (uint32_t *)(void *)positions.data;
    CHECK(ibp_partition_ids(&ids, num_items, window_bits, workspace.data, sorted.data, at) == IBP_OK, "%lld ids",
          (long long)count);
    for (int64_t k = 0; k < count; k++) {
        CHECK(at[k] < count && id_at(&ids, sorted.data, k) == id_at(&ids, ids.data, at[k]), "position %u", at[k]);
        if (k == 0) continue;
        const int64_t before = clamped_window(id_at(&ids, sorted.data, k - 1), num_items, window_bits);
        const int64_t window = clamped_window(id_at(&ids, sorted.data, k), num_items, window_bits);
        CHECK(before < window || (before == window && at[k - 1] < at[k]), "windows %lld, %lld at %lld",
              (long long)before, (long long)window, (long long)k);
    }
    buffer_free(&ids_memory);
    buffer_free(&sorted);
    buffer_free(&positions);
    buffer_free(&workspace);
}

/* Ids of matrices, some out of range on either side. */
static void draw_ids(rng *r, buffer *memory, int64_t count, int64_t num_matrices, uint32_t id_bytes)
{
    const uint32_t some = 1 + rng_below(r, (uint32_t)num_matrices + 3);
    for (int64_t k = 0; k < count; k++) {
        const int64_t id = (int64_t)rng_below(r, some) - 1;
        if (id_bytes == 8)
            ((int64_t *)(void *)memory->data)[k] = id;
        else
            ((int32_t *)(void *)memory->data)[k] = (int32_t)id;
    }
}

/* Groups cover the vectors of each matrix in order, up to eight together, and nothing else. */
static void check_groups(rng *r, int64_t count, int64_t num_matrices, uint32_t id_bytes)
{
    const int64_t num_groups = (count < num_matrices ? count : num_matrices) + count / IBP_MOST_OF_A_GROUP;
    buffer memory = buffer_new((size_t)count * id_bytes, 0), orders = buffer_new(8 * (size_t)count, 0);
    buffer lists = buffer_new(sizeof(ibp_vector_group) * (size_t)num_groups, 0);
    const ibp_ids ids = {.data = memory.data, .count = count, .id_bytes = id_bytes};
    draw_ids(r, &memory, count, num_matrices, id_bytes);
    const int64_t *const order = (const int64_t *)(void *)orders.data;
    const ibp_vector_group *const groups = (const ibp_vector_group *)(void *)lists.data;
    CHECK(ibp_group_vectors(&ids, num_matrices, (int64_t *)(void *)orders.data, (ibp_vector_group *)(void *)lists.data,
                            num_groups) == IBP_OK,
          "%lld vectors", (long long)count);
    int64_t group = 0, in_group = 0;
    for (int64_t k = 0; k < count; k++) {
        CHECK(order[k] >= 0 && order[k] < count, "vector %lld", (long long)order[k]);
        const int64_t id = id_at(&ids, memory.data, order[k]), before = k ? id_at(&ids, memory.data, order[k - 1]) : id;
        const bool is_there = id >= 0 && id < num_matrices, was_there = before >= 0 && before < num_matrices;
        CHECK(was_there ? !is_there || before <= id : !is_there, "matrices %lld, %lld", (long long)before,
              (long long)id);
        CHECK(k == 0 || (was_there && before != id) || order[k - 1] < order[k], "order at %lld", (long long)k);
        if (!is_there) continue;
        if (k > 0 && (before != id || in_group == IBP_MOST_OF_A_GROUP)) group++, in_group = 0;
        CHECK(groups[group].matrix == (uint64_t)id && groups[group].first + in_group == k, "group %lld",
              (long long)group);
        in_group++;
        const bool is_last = k + 1 == count || id_at(&ids, memory.data, order[k + 1]) != id;
        if (is_last) CHECK(groups[group].count == in_group, "%u vectors in a group", groups[group].count);
        if (in_group == IBP_MOST_OF_A_GROUP) CHECK(groups[group].count == in_group, "%s", "a group that is not full");
    }
    for (group += in_group != 0; group < num_groups; group++)
        CHECK(groups[group].count == 0, "%u vectors in a group too many", groups[group].count);
    buffer_free(&memory);
    buffer_free(&orders);
    buffer_free(&lists);
}

static void test_groups(rng *r)
{
    for (int round = 0; round < 200; round++) {
        const int64_t count = round < 20 ? round : (int64_t)rng_below(r, IBP_MOST_GROUPED + 1);
        check_groups(r, count, round % 7 ? (int64_t)rng_below(r, 300) : IBP_MOST_STACKED, round % 2 ? 4 : 8);
    }
    const int64_t none = 0;
    int64_t order = 0;
    ibp_vector_group groups[2];
    ibp_ids ids = {.data = &none, .count = 1, .id_bytes = 8};
    CHECK(ibp_group_vectors(&ids, 1, &order, groups, 0) == IBP_INVALID_ARGUMENT, "%s", "too few groups");
    CHECK(ibp_group_vectors(&ids, IBP_MOST_STACKED + 1, &order, groups, 2) == IBP_INVALID_ARGUMENT, "%s", "matrices");
    CHECK(ibp_group_vectors(&ids, 1, NULL, groups, 2) == IBP_INVALID_ARGUMENT, "%s", "no order");
    CHECK(ibp_group_vectors(&ids, 1, &order, NULL, 2) == IBP_INVALID_ARGUMENT, "%s", "no groups");
    ids.count = IBP_MOST_GROUPED + 1;
    CHECK(ibp_group_vectors(&ids, 1, &order, groups, 200) == IBP_INVALID_ARGUMENT, "%s", "too many vectors");
}

/* Matrices are listed in order, each once, with their rows; matrix num_matrices stands for ids out of range. */
static void check_lists(rng *r, int64_t count, int64_t num_matrices, uint32_t id_bytes)
{
    const int64_t most = count < num_matrices + 1 ? count : num_matrices + 1,
                  num_slots = most + (int64_t)rng_below(r, 3);
    const uint32_t num_stacks = rng_below(r, 4);
    buffer memory = buffer_new((size_t)count * id_bytes, 0), slots = buffer_new(8 * (size_t)count, 0);
    buffer held = buffer_new(8 * (size_t)num_slots, 0), rows = buffer_new(8 * (size_t)(num_slots * 5 * num_stacks), 0);
    const ibp_ids ids = {.data = memory.data, .count = count, .id_bytes = id_bytes};
    draw_ids(r, &memory, count, num_matrices, id_bytes);
    uint64_t num_spare = 3;
    int64_t *const slot = (int64_t *)(void *)slots.data, *const matrix = (int64_t *)(void *)held.data;
    ibp_listed listed = {slot, matrix, (int64_t *)(void *)rows.data, &num_spare, num_slots, {0}, num_stacks};
    for (uint32_t i = 0; i < num_stacks; i++) listed.num_rows[i] = 1 + (int64_t)rng_below(r, 5);
    CHECK(ibp_list_matrices(&ids, num_matrices, &listed) == IBP_OK, "%lld ids", (long long)count);
    int64_t used = 0;
    while (used < num_slots && matrix[used] >= 0) used++;
    for (int64_t s = 0; s < num_slots; s++)
        CHECK(s < used ? s == 0 || matrix[s - 1] < matrix[s] : matrix[s] == -1, "slot %lld", (long long)s);
    CHECK(num_spare == 3 + (uint64_t)(num_slots - used), "%llu slots left over", (unsigned long long)num_spare);
    for (int64_t k = 0; k < count; k++) {
        const int64_t id = id_at(&ids, memory.data, k), wanted = id >= 0 && id < num_matrices ? id : num_matrices;
        CHECK(slot[k] >= 0 && slot[k] < used && matrix[slot[k]] == wanted, "id %lld", (long long)k);
    }
    const int64_t *row = listed.rows;
    for (uint32_t i = 0; i < num_stacks; i++)
        for (int64_t j = 0; j < num_slots * listed.num_rows[i]; j++, row++) {
            const int64_t s = j / listed.num_rows[i];
            CHECK(*row == (s < used ? matrix[s] * listed.num_rows[i] + j % listed.num_rows[i] : 0), "row %lld",
                  (long long)j);
        }
    buffer_free(&memory);
    buffer_free(&slots);
    buffer_free(&held);
    buffer_free(&rows);
}

static void test_lists(rng *r)
{
    for (int round = 0; round < 200; round++) {
        const int64_t count = round < 20 ? round : (int64_t)rng_below(r, 3000);
        check_lists(r, count, round % 7 ? (int64_t)rng_below(r, 300) : IBP_MOST_STACKED, round % 2 ? 4 : 8);
    }
    int64_t numbers[9];
    const int64_t id = 0;
    ibp_ids ids = {.data = &id, .count = 1, .id_bytes = 8};
    ibp_listed listed = {numbers, numbers + 1, numbers + 2, NULL, 1, {2}, 1};
    CHECK(ibp_list_matrices(&ids, 3, &listed) == IBP_OK, "%s", "an id");
    CHECK(ibp_list_matrices(&ids, 3, NULL) == IBP_INVALID_ARGUMENT, "%s", "nothing to write");
    CHECK(ibp_list_matrices(&ids, IBP_MOST_STACKED + 1, &listed) == IBP_INVALID_ARGUMENT, "%s", "matrices");
    listed.num_rows[0] = 0;
    CHECK(ibp_list_matrices(&ids, 3, &listed) == IBP_INVALID_ARGUMENT, "%s", "no rows");
    listed.num_rows[0] = 2, listed.num_slots = 0;
    CHECK(ibp_list_matrices(&ids, 3, &listed) == IBP_INVALID_ARGUMENT, "%s", "too few slots");
    listed.num_slots = 1, listed.rows = NULL;
    CHECK(ibp_list_matrices(&ids, 3, &listed) == IBP_INVALID_ARGUMENT, "%s", "nowhere for rows");
    listed.num_stacks = IBP_MOST_LISTED + 1;
    CHECK(ibp_list_matrices(&ids, 3, &listed) == IBP_INVALID_ARGUMENT, "%s", "too many stacks");
}

void test_partition(void)
{
    rng r = rng_seed(12);
    for (int round = 0; round < 200; round++) {
        const int64_t count = round < 3 ? round : (int64_t)rng_below(&r, 2000);
        const int64_t num_items = round < 20 ? round : 1 + (int64_t)rng_below(&r, 60000);
        check_partition(&r, count, num_items, rng_below(&r, 18), round % 2 ? 4 : 8, round % 3 ? 100 : 5);
    }
    const int64_t none = 0;
    ibp_ids ids = {.data = &none, .count = 0, .id_bytes = 8};
    CHECK(ibp_num_windows(0, 3) == 1 && ibp_num_windows(8, 3) == 1 && ibp_num_windows(9, 3) == 2, "%s", "windows");
    CHECK(ibp_partition_ids(&ids, IBP_MAX_WINDOWS + 1, 0, NULL, NULL, NULL) == IBP_INVALID_ARGUMENT, "%s",
          "too many windows");
    CHECK(ibp_partition_ids(&ids, 1, 63, NULL, NULL, NULL) == IBP_INVALID_ARGUMENT, "%s", "windows of 2^63 items");
    ids.count = (int64_t)1 << 32;
    CHECK(ibp_partition_ids(&ids, 1, 0, NULL, NULL, NULL) == IBP_INVALID_ARGUMENT, "%s", "too many ids");
    test_groups(&r);
    test_lists(&r);
}
