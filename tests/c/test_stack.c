/* test_stack.c - rows of 64 KiB in a thread with a stack of 128 KiB, all of which take less of it than ibp.h says. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, pthread_attr_setstack */
#include "check.h"

#include <pthread.h>
#include <sys/mman.h>

enum { STACK_BYTES = 128 * 1024, ROW_BYTES = IBP_MAX_ROW_BYTES, PAINT = 0xA5 };

/* What a thread takes before it does anything: its descriptor and the arguments of its start, on top of its stack. */
enum { THREAD_BYTES = 8192 };

#if defined(__SANITIZE_ADDRESS__)
enum { IS_MEASURED = false }; /* frames have red zones; that the thread lives is seen all the same */
#else
enum { IS_MEASURED = true };
#endif

typedef struct job {
    const ibp_codebook *codebook;
    uint8_t *row, *coded, *out, *scratch;
    uint64_t *counts;
} job;

/* Every function that works with rows. */
static void *run_all(void *argument)
{
    const job *const j = argument;
    const ibp_codebook *const cb = j->codebook;
    const size_t scratch_bytes = ibp_scratch_bytes(ROW_BYTES);
    size_t coded_bytes = 0;
    uint16_t length = 0;
    CHECK(ibp_encode_row(cb, j->row, j->coded, IBP_MAX_CODED_ROW_BYTES, &coded_bytes, j->scratch, scratch_bytes) ==
              IBP_OK,
          "%s", "row");
    CHECK(ibp_coded_row_bytes(cb, j->row, j->scratch, scratch_bytes) == coded_bytes, "%zu bytes", coded_bytes);
    CHECK(ibp_decode_row(cb, j->coded, coded_bytes, j->out, j->scratch, scratch_bytes) == IBP_OK, "%zu bytes",
          coded_bytes);
    CHECK(memcmp(j->out, j->row, ROW_BYTES) == 0, "%zu bytes", coded_bytes);
    CHECK(ibp_measure_rows(cb, j->row, ROW_BYTES, &length, j->scratch, scratch_bytes) == IBP_OK, "%u bytes", length);
    const ibp_table table = {.num_items = ROW_BYTES,
                             .item_bytes = 1,
                             .slots = j->coded,
                             .lengths = &length,
                             .slots_bytes = ROW_BYTES,
                             .slot_bytes = ROW_BYTES,
                             .codebook = *cb};
    const int64_t id = 5;
    const ibp_ids ids = {.data = &id, .count = 1, .id_bytes = 8};
    ibp_fault fault = {0};
    CHECK(ibp_check_table(&table) == IBP_OK, "%s", "table");
    CHECK(ibp_encode_rows(&table, j->row, 0, 1, j->coded, NULL, j->scratch, scratch_bytes, &fault) == IBP_OK, "%s",
          "coded");
    CHECK(ibp_decode_bytes(&table, 0, ROW_BYTES, j->out, j->scratch, scratch_bytes, &fault) == IBP_OK, "%s", "decoded");
    CHECK(ibp_gather_items(&table, &ids, 0, 1, j->out, j->scratch, scratch_bytes, &fault) == IBP_OK, "%s", "gathered");
    CHECK(ibp_count_bits(j->row, 1, ROW_BYTES, j->counts) == IBP_OK, "%s", "bits");
    CHECK(ibp_threshold_bits(j->counts, 1, ROW_BYTES, 1.0, j->out, j->coded) == IBP_OK, "%s", "threshold");
    CHECK(ibp_choose_masks(j->row, 1, ROW_BYTES, 8, 0, 16, j->out, j->coded) == IBP_OK, "%s", "masks");
    double savings;
    CHECK(ibp_estimate_masks(j->row, 1, ROW_BYTES, &savings) == IBP_OK, "%s", "masks estimated");
    return NULL;
}

/* Bytes of stack that work took in a thread of its own. */
static size_t measure_stack(job *j)
{
    uint8_t *const stack =
        mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (stack == MAP_FAILED) abort();
    memset(stack, PAINT, STACK_BYTES);
    pthread_attr_t attributes;
    pthread_t thread;
    if (pthread_attr_init(&attributes) != 0 || pthread_attr_setstack(&attributes, stack, STACK_BYTES) != 0) abort();
    if (pthread_create(&thread, &attributes, run_all, j) != 0 || pthread_join(thread, NULL) != 0) abort();
    pthread_attr_destroy(&attributes);
    size_t untouched = 0;
    while (untouched < STACK_BYTES && stack[untouched] == PAINT) untouched++;
    munmap(stack, STACK_BYTES);
    return STACK_BYTES - untouched;
}

static void check_stack(const ibp_codebook *cb, job *j)
{
    j->codebook = cb;
    for (int i = 0; i < NUM_FEATURE_SETS; i++) {
        if (ibp_set_cpu_features(feature_sets[i]) != feature_sets[i]) continue;
        const size_t taken = measure_stack(j);
        CHECK(!IS_MEASURED || taken <= IBP_MAX_STACK_BYTES + THREAD_BYTES, "%zu bytes, features %u, scheme %d", taken,
              feature_sets[i], (int)cb->scheme);
    }
    ibp_set_cpu_features(UINT32_MAX);
}

void test_stack(void)
{
    rng r = rng_seed(22);
    buffer row = buffer_new(ROW_BYTES, 0), coded = buffer_new(IBP_MAX_CODED_ROW_BYTES, 0),
           out = buffer_new(ROW_BYTES, 0), scratch = scratch_new(ROW_BYTES), entries = buffer_new(ROW_BYTES * 8, 0),
           counts = buffer_new(8 * 8 * (size_t)ROW_BYTES, 0);
    memset(counts.data, 0, counts.size);
    job j = {NULL, row.data, coded.data, out.data, scratch.data, (uint64_t *)(void *)counts.data};
    for (uint32_t chunk_bytes = 1; chunk_bytes <= 8; chunk_bytes *= 2) {
        sample s = sample_new(&r, ROW_BYTES, chunk_bytes, true, 3);
        sample_rows(&r, &s, 1, row.data, row.size);
        check_stack(&s.codebook, &j);
        sample_free(&s);
    }
    memset(entries.data, 0, entries.size);
    for (uint32_t element_bytes = 1; element_bytes <= 8; element_bytes *= 2)
        for (int form = 0; form < 6;
             form++) { /* dense, with entries a column, listed; with all symbols and with residuals */
            const uint32_t columns = ROW_BYTES / element_bytes, residual_bits = form < 3 ? 0 : 8 * element_bytes - 7;
            ibp_planes planes = {.element_bytes = element_bytes,
                                 .residual_bits = residual_bits,
                                 .num_planes = 3,
                                 .digit_bits = {1, 1, 1},
                                 .per_column = form % 3 == 1,
                                 .listed = form % 3 == 2,
                                 .entries = entries.data,
                                 .closed_value = 1};
            const size_t num_entries = 3 * (size_t)(planes.per_column ? columns : 1);
            ibp_codebook cb;
            CHECK(ibp_build_planes_codebook(&planes, ROW_BYTES, num_entries * (form < 3 ? element_bytes : 1), &cb) ==
                      IBP_OK,
                  "form %d", form);
            rng_fill(&r, row.data, row.size);
            check_stack(&cb, &j);
        }
    buffer_free(&row);
    buffer_free(&coded);
    buffer_free(&out);
    buffer_free(&scratch);
    buffer_free(&entries);
    buffer_free(&counts);
}
