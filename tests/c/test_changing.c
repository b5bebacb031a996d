/* test_changing.c - rows and coded rows that change while a coder reads them: it stays in its buffers.
 *
 * The bytes lie in several pages, of which the first and the last are made unreadable in turn: whenever a coder comes
 * to the one that is, a signal handler swaps them, and at a chosen swap it changes all bytes. So each look at the bytes
 * after the first can be the one that sees others, always in the same place. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, sigaction */
#include "check.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

enum { NUM_SWAPS = 8, ROW_BYTES = 16384 };

static struct {
    uint8_t *start, *last; /* pages: the first and the last */
    size_t page_bytes, num_bytes;
    uint8_t *bytes; /* in them, ending with the last page */
    const uint8_t *others;
    int swaps_left; /* until the bytes change; 0: they have */
} watched;

static void protect(uint8_t *page, int access)
{
    if (mprotect(page, watched.page_bytes, access) != 0) abort();
}

static void on_fault(int number, siginfo_t *info, void *context)
{
    (void)context;
    uint8_t *const address = info->si_addr;
    const bool is_first = address >= watched.start && address < watched.start + watched.page_bytes;
    const bool is_last = address >= watched.last && address < watched.last + watched.page_bytes;
    if (watched.swaps_left == 0 || (!is_first && !is_last)) {
        signal(number, SIG_DFL); /* a fault of its own: it ends the program when it comes again */
        return;
    }
    protect(is_first ? watched.start : watched.last, PROT_READ | PROT_WRITE);
    if (--watched.swaps_left == 0)
        memcpy(watched.bytes, watched.others, watched.num_bytes);
    else
        protect(is_first ? watched.last : watched.start, PROT_NONE);
}

/* Memory that ends with the last page, between others that cannot be touched. */
static void watch(const uint8_t *bytes, const uint8_t *others, size_t num_bytes, int swaps)
{
    watched.page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    const size_t page = watched.page_bytes, room = (num_bytes + page - 1) / page * page;
    uint8_t *const memory = mmap(NULL, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + page, room, PROT_READ | PROT_WRITE) != 0) abort();
    watched.start = memory + page;
    watched.last = watched.start + room - page;
    watched.bytes = watched.start + room - num_bytes;
    watched.num_bytes = num_bytes;
    watched.others = others;
    watched.swaps_left = swaps;
    memcpy(watched.bytes, bytes, num_bytes);
    if (room > page) protect(watched.last, PROT_NONE);
}

static void unwatch(void)
{
    const size_t room = (size_t)(watched.last - watched.start) + watched.page_bytes;
    munmap(watched.start - watched.page_bytes, room + 2 * watched.page_bytes);
}

/* A row that takes few bytes and one that takes many, each turning into the other after some looks, into a buffer that
 * has room for just the first or is as large as a row; and likewise a coded row that is decoded. */
static void check_changing(const ibp_codebook *cb, const uint8_t *small, const uint8_t *large)
{
    const uint8_t *const rows[] = {small, large};
    for (int from = 0; from < 2; from++) {
        const size_t num_bytes = coded_row_bytes(cb, rows[from]);
        for (int swaps = 1; swaps <= NUM_SWAPS; swaps++) {
            buffer dst = buffer_new(swaps % 2 ? num_bytes : ROW_BYTES, 1);
            size_t coded_bytes = 0;
            watch(rows[from], rows[!from], ROW_BYTES, swaps);
            const ibp_status encoded = encode_row(cb, watched.bytes, dst.data, dst.size, &coded_bytes);
            unwatch();
            CHECK(encoded == IBP_OK || encoded == IBP_BUFFER_TOO_SMALL, "%s", ibp_status_string(encoded));
            CHECK((encoded == IBP_OK) == (coded_bytes <= dst.size), "%zu bytes in %zu", coded_bytes, dst.size);
            buffer_free(&dst);

            buffer coded = buffer_new(num_bytes, 0), other = buffer_new(num_bytes, 0), row = buffer_new(ROW_BYTES, 1);
            encode_row(cb, rows[from], coded.data, coded.size, &coded_bytes);
            for (size_t i = 0; i < num_bytes; i++) other.data[i] = swaps % 2 ? 0xff : (uint8_t)~coded.data[i];
            watch(coded.data, other.data, num_bytes, swaps);
            const ibp_status decoded = decode_row(cb, watched.bytes, num_bytes, row.data);
            unwatch();
            CHECK(decoded == IBP_OK || decoded == IBP_CORRUPT_ROW, "%s", ibp_status_string(decoded));
            buffer_free(&coded);
            buffer_free(&other);
            buffer_free(&row);
        }
    }
}

static void check_all_features(const ibp_codebook *cb, const uint8_t *small, const uint8_t *large)
{
    for (int i = 0; i < NUM_FEATURE_SETS; i++) {
        if (ibp_set_cpu_features(feature_sets[i]) == feature_sets[i]) check_changing(cb, small, large);
    }
    ibp_set_cpu_features(UINT32_MAX);
}

static void check_masks(rng *r, uint32_t chunk_bytes, bool flag_all)
{
    sample s = sample_new(r, ROW_BYTES, chunk_bytes, flag_all, 3);
    buffer small = buffer_new(ROW_BYTES, 0), large = buffer_new(ROW_BYTES, 0);
    sample_rows(r, &s, 0, small.data, small.size);
    rng_fill(r, large.data, large.size);
    check_all_features(&s.codebook, small.data, large.data);
    buffer_free(&small);
    buffer_free(&large);
    sample_free(&s);
}

/* num_sets of entries 0, 1, 2, ... for each column or all; the small row has elements that equal some of them. */
static void check_planes(rng *r, uint32_t element_bytes, uint32_t residual_bits, bool per_column, bool listed,
                         uint32_t num_sets)
{
    ibp_planes planes = {.element_bytes = element_bytes,
                         .residual_bits = residual_bits,
                         .num_planes = 2,
                         .digit_bits = {1, 2},
                         .per_column = per_column,
                         .listed = listed,
                         .closed_value = 1};
    const uint32_t columns = ROW_BYTES / element_bytes, symbol_bytes = 8 * element_bytes - residual_bits > 8 ? 2 : 1;
    const size_t num_entries = (size_t)num_sets * (per_column ? columns : 1) * 4;
    buffer entries = buffer_new(num_entries * symbol_bytes, 0), small = buffer_new(ROW_BYTES, 0),
           large = buffer_new(ROW_BYTES, 0);
    memset(entries.data, 0, entries.size);
    for (size_t e = 0; e < num_entries; e++) entries.data[e * symbol_bytes] = (uint8_t)(e % 4);
    planes.entries = entries.data;
    ibp_codebook cb;
    CHECK(ibp_build_planes_codebook(&planes, ROW_BYTES, entries.size, &cb) == IBP_OK, "elements of %u bytes",
          element_bytes);
    CHECK(cb.num_clusters == (num_sets > 1 ? num_sets : 0), "%u clusters", cb.num_clusters);
    memset(small.data, 0, small.size);
    for (uint32_t i = 0; i < columns; i += 1 + rng_below(r, 20))
        small.data[i * element_bytes] = (uint8_t)rng_below(r, 2);
    rng_fill(r, large.data, large.size);
    check_all_features(&cb, small.data, large.data);
    buffer_free(&entries);
    buffer_free(&small);
    buffer_free(&large);
}

/* Elements of four bytes of which the lowest is invariant, every other column constant, entries consecutive, and the
 * default of both signs if rows are listed. */
static void check_left_out(rng *r, bool listed)
{
    enum { COLUMNS = ROW_BYTES / 4 };
    static uint16_t live[COLUMNS / 2];
    static _Alignas(16) uint8_t row_template[ROW_BYTES];
    for (uint32_t i = 0; i < COLUMNS / 2; i++) live[i] = (uint16_t)(2 * i);
    const ibp_planes planes = {.element_bytes = 4,
                               .residual_bits = 20,
                               .num_planes = 1,
                               .digit_bits = {2},
                               .listed = listed,
                               .consecutive = true,
                               .signed_default = listed,
                               .invariant_bits = 8,
                               .num_constant = COLUMNS / 2,
                               .live_columns = live,
                               .row_template = row_template};
    ibp_codebook cb;
    CHECK(ibp_build_planes_codebook(&planes, ROW_BYTES, 0, &cb) == IBP_OK, "%s", "built");
    buffer small = buffer_new(ROW_BYTES, 0), large = buffer_new(ROW_BYTES, 0);
    memset(small.data, 0, small.size);
    memset(large.data, 0, large.size);
    for (uint32_t i = 0; i < COLUMNS / 2; i++) {
        rng_fill(r, large.data + 8 * i + 1, 3);
        if (rng_chance(r, 20)) small.data[8 * i + 3] = 0x80;
    }
    check_all_features(&cb, small.data, large.data);
    buffer_free(&small);
    buffer_free(&large);
}

void test_changing_rows(void)
{
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO}, before[2];
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGBUS, &action, &before[1]);
    rng r = rng_seed(21);
    for (uint32_t chunk_bytes = 1; chunk_bytes <= 8; chunk_bytes *= 2) check_masks(&r, chunk_bytes, chunk_bytes == 2);
    for (uint32_t num_sets = 1; num_sets <= 2; num_sets++) {
        check_planes(&r, 1, 0, false, false, num_sets); /* the AVX-512 coder's, and all symbols */
        check_planes(&r, 2, 8, false, false, num_sets);
        check_planes(&r, 2, 8, true, false, num_sets);  /* ranks in columns */
        check_planes(&r, 2, 0, false, false, num_sets); /* ranks */
        check_planes(&r, 2, 5, true, false, num_sets);
        check_planes(&r, 1, 0, false, true, num_sets);
        check_planes(&r, 4, 24, false, true, num_sets);
    }
    check_left_out(&r, false);
    check_left_out(&r, true);
    sigaction(SIGSEGV, &before[0], NULL);
    sigaction(SIGBUS, &before[1], NULL);
}
