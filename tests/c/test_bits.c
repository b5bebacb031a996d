/* test_bits.c - the inline bit helpers of format.h against loops over bits, and the status texts. */
#include "check.h"
#include "core/format.h"
#include "internal/ibp_internal.h"

static uint32_t naive_deposit(uint32_t bits, uint32_t keep)
{
    uint32_t word = 0, next = 0;
    for (uint32_t b = 0; b < 32; b++)
        if (keep >> b & 1u) word |= (bits >> next++ & 1u) << b;
    return word;
}

static uint32_t naive_extract(uint32_t word, uint32_t keep)
{
    uint32_t bits = 0, next = 0;
    for (uint32_t b = 0; b < 32; b++)
        if (keep >> b & 1u) bits |= (word >> b & 1u) << next++;
    return bits;
}

static void check_keep(uint32_t keep, uint32_t value)
{
    const uint32_t bits = ibp_extract(value, keep), word = ibp_deposit(value, keep);
    CHECK(bits == naive_extract(value, keep), "extract(%08x, %08x) = %08x", value, keep, bits);
    CHECK(word == naive_deposit(value, keep), "deposit(%08x, %08x) = %08x", value, keep, word);
    CHECK(ibp_deposit(bits, keep) == (value & keep), "deposit(extract(%08x)), keep %08x", value, keep);
    CHECK(ibp_popcount(keep) == (uint32_t)__builtin_popcount(keep), "popcount(%08x)", keep);
}

/* Every set of the chunks of a word may have been taken out of it. */
static void check_gaps(uint32_t mask, uint32_t value)
{
    for (uint32_t chunk_bytes = 1; chunk_bytes <= 8; chunk_bytes *= 2) {
        const uint32_t entry = ibp_gaps_of_word(mask, chunk_bytes), chunk_bits = chunk_bytes < 4 ? 8 * chunk_bytes : 32;
        uint32_t num_gaps = 0;
        for (uint32_t start = 0; start < 32; start += chunk_bits)
            for (uint32_t b = start; b < start + chunk_bits; b++)
                num_gaps += (mask >> b & 1u) && (b == start || !(mask >> (b - 1) & 1u));
        CHECK(((entry & IBP_FLAG_MANY_GAPS) != 0) == (num_gaps > 2), "chunks of %u, mask %08x: entry %08x", chunk_bytes,
              mask, entry);
        CHECK(ibp_flag_position(entry) == 0 && ibp_flagged_chunks(entry) == 0, "chunks of %u, mask %08x: entry %08x",
              chunk_bytes, mask, entry);
        if (num_gaps > 2) continue;
        for (uint32_t taken = 0; taken < 1u << 32 / chunk_bits; taken++) {
            uint32_t removed = 0;
            for (uint32_t b = 0; b < 32; b++)
                if (taken >> b / chunk_bits & 1u) removed |= mask & 1u << b;
            const uint32_t word = ibp_insert_two_gaps(value, removed, entry);
            CHECK(word == naive_deposit(value, ~removed), "chunks of %u, mask %08x, removed %08x: %08x", chunk_bytes,
                  mask, removed, word);
        }
    }
}

static void check_row_bits(uint32_t row_bytes)
{
    for (uint32_t w = 0; w < row_bytes / 4 + 3; w++)
        for (uint32_t b = 0; b < 32; b++) {
            const bool inside = 4 * w + b / 8 < row_bytes;
            CHECK((ibp_row_bits_of_word(row_bytes, w) >> b & 1u) == inside, "row of %u, word %u, bit %u", row_bytes, w,
                  b);
        }
}

void test_bits(void)
{
    static const uint32_t edges[] = {0,          1,          0x80000000, 0xffffffff, 0x7fffffff,
                                     0xfffffffe, 0x55555555, 0xaaaaaaaa, 0x00ff00ff, 0x0000ffff,
                                     0xffff0000, 0x7f800000, 0x807fffff, 0x80000001};
    const size_t num_edges = sizeof edges / sizeof *edges;
    for (size_t i = 0; i < num_edges; i++)
        for (size_t k = 0; k < num_edges; k++) {
            check_keep(edges[i], edges[k]);
            check_gaps(edges[i], edges[k]);
        }
    rng r = rng_seed(1);
    for (int i = 0; i < 20000; i++) {
        const uint32_t a = (uint32_t)rng_next(&r), b = (uint32_t)rng_next(&r), c = (uint32_t)rng_next(&r);
        const uint32_t keeps[] = {a, a & b, a | b, a & b & c, a | b | c};
        check_keep(keeps[i % 5], (uint32_t)rng_next(&r));
        const uint32_t one_run = ~0u >> a % 32 << b % 32, other_run = ~0u >> c % 32 << c / 32 % 32;
        check_gaps(one_run | other_run, (uint32_t)rng_next(&r));
        check_gaps(one_run & ~other_run, (uint32_t)rng_next(&r));
    }
    for (uint32_t run = 0; run < 32; run++)
        for (uint32_t start = 0; start + run < 32; start++)
            check_keep((0xffffffffu >> (31 - run)) << start, (uint32_t)rng_next(&r));
    for (uint32_t row_bytes = 1; row_bytes <= 40; row_bytes++) check_row_bits(row_bytes);
    CHECK(ibp_lowest_run(0x00000f30u) == 0x30u && ibp_lowest_run(0) == 0 && ibp_lowest_run(~0u) == ~0u, "lowest runs");
}

void test_status(void)
{
#define CHECK_STATUS(name, value, text) \
    CHECK(name == value && strcmp(ibp_status_string(name), text) == 0, "%s: %s", #name, ibp_status_string(name));
    IBP_STATUS_LIST(CHECK_STATUS)
#undef CHECK_STATUS
    CHECK(ibp_status_string((ibp_status)1000) != NULL, "a text for what is no status");
    CHECK(strcmp(ibp_version(), IBP_VERSION) == 0, "version %s", ibp_version());
}

void test_no_cuda(void)
{
    uint8_t byte = 0;
    uint64_t count = 0;
    uint16_t length = 0;
    uint32_t position = 0;
    void *pointer = &byte;
    ibp_fault fault = {0};
    const ibp_table table = {0};
    const ibp_ids ids = {0};
    const ibp_codebook codebook = {0};
    ibp_streamer *streamer = NULL;
    CHECK(!ibp_cuda_is_built() && ibp_cuda_device_count() == 0, "a build without CUDA");
    CHECK(strcmp(ibp_cuda_last_error(), "") == 0, "no error yet");
    const ibp_status statuses[] = {
        ibp_cuda_count_bits(&byte, 1, 1, &count, NULL),
        ibp_cuda_count_hits(&codebook, &byte, 1, &count, NULL),
        ibp_cuda_measure_rows(&codebook, &byte, 1, &length, NULL),
        ibp_cuda_encode_rows(&table, &byte, &byte, &byte, &fault, NULL),
        ibp_cuda_gather_items(&table, &ids, &byte, &fault, 0, NULL),
        ibp_cuda_decode_bytes(&table, 0, 0, &byte, &fault, 0, NULL),
        ibp_cuda_create_streamer(&streamer),
        ibp_cuda_destroy_streamer(streamer),
        ibp_cuda_begin_stream(streamer, &byte, 1),
        ibp_cuda_stream_bytes(streamer, &table, NULL, 0, 0, true, &byte, &fault, 0, NULL),
        ibp_cuda_partition_ids(&ids, 1, 0, &byte, &byte, &position, NULL),
        ibp_cuda_fill(&byte, 0, 1, NULL),
        ibp_cuda_owners_of_rows(NULL, 0, 1, &byte, NULL),
        ibp_cuda_find_cached(NULL, NULL, 0, &count, NULL, NULL),
        ibp_cuda_gather_cached(&table, &ids, NULL, &byte, &fault, 0, NULL),
        ibp_cuda_fill_slab(&table, NULL, NULL, 0, NULL, &fault, NULL),
        ibp_cuda_claim_cached(&table, &ids, NULL, &count, NULL, &fault, NULL),
        ibp_cuda_drop_cached(NULL, 0, NULL, NULL),
        ibp_cuda_set_cached(NULL, NULL, 0, true, NULL, NULL),
        ibp_cuda_alloc_pinned(1, -1, &pointer),
        ibp_cuda_free_pinned(&byte, 1),
        ibp_cuda_register_pinned(&byte, 1),
        ibp_cuda_register_read_only(&byte, 1),
        ibp_cuda_unregister_pinned(&byte),
        ibp_cuda_map_pinned(&byte, &pointer),
    };
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
        CHECK(statuses[i] == IBP_NO_CUDA, "call %zu: %s", i, ibp_status_string(statuses[i]));
}
