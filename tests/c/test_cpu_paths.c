/* test_cpu_paths.c - rows by each set of features that this processor has against the plain C code: the same bytes,
 * sizes and statuses, from and into buffers that end where they should. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "check.h"

#include <sys/mman.h>

typedef struct planes_sample {
    ibp_codebook codebook;
    uint8_t *entries;
    uint64_t *frequent; /* elements that many columns have */
    uint16_t *live;
    uint8_t *row_template;
} planes_sample;

enum { NUM_FREQUENT = 24 };

static uint64_t low_bits(uint64_t x, uint32_t num_bits)
{
    return num_bits >= 64 ? x : x & (((uint64_t)1 << num_bits) - 1);
}

/* Invariant bits, which the frequent elements get, a default of both signs, and constant columns. */
static void leave_out(rng *r, planes_sample *s, ibp_planes *p, uint32_t columns)
{
    const uint32_t width = 8 * p->element_bytes, most = width - p->residual_bits;
    if (rng_chance(r, 50)) p->invariant_bits = rng_below(r, most < width ? most + 1 : width);
    p->invariant_value = low_bits(rng_next(r), p->invariant_bits);
    for (int i = 0; i < NUM_FREQUENT; i++)
        s->frequent[i] ^= low_bits(s->frequent[i], p->invariant_bits) ^ p->invariant_value;
    p->signed_default = p->listed && rng_chance(r, 50);
    if (columns == 1 || rng_chance(r, 50)) return;
    p->num_constant = 1 + rng_below(r, columns - 1);
    p->live_columns = s->live;
    p->row_template = s->row_template;
    rng_fill(r, s->row_template, columns * p->element_bytes);
    uint32_t left = columns - p->num_constant;
    for (uint32_t column = 0, next = 0; column < columns; column++) {
        if (rng_below(r, columns - column) >= left) continue;
        s->live[next++] = (uint16_t)column;
        memcpy(s->row_template + column * p->element_bytes, &s->frequent[0], p->element_bytes);
        left--;
    }
}

/* Entries are symbols of some of the frequent elements, one in eight of them noise; or consecutive. */
static planes_sample planes_new(rng *r, uint32_t columns, uint32_t element_bytes, bool per_column, bool listed)
{
    planes_sample s = {0};
    ibp_planes planes = {0}, *const p = &planes;
    const uint32_t width = 8 * element_bytes;
    const uint32_t likely[] = {width / 2, width - 8, width - 5, width == 16 ? 7 : width, 0, rng_below(r, width + 1)};
    p->element_bytes = element_bytes;
    p->residual_bits = likely[rng_below(r, 6)];
    p->rotate = rng_below(r, 2);
    p->per_column = per_column;
    p->listed = listed;
    p->num_planes = rng_below(r, IBP_MAX_PLANES + 1);
    uint32_t set_entries = 0, symbol_bytes = 1;
    for (uint32_t i = 0; i < p->num_planes; i++) {
        p->digit_bits[i] = (uint8_t)(1 + rng_below(r, IBP_MAX_DIGIT_BITS));
        set_entries += (1u << p->digit_bits[i]) - 1;
    }
    s.frequent = malloc(NUM_FREQUENT * sizeof *s.frequent);
    s.live = malloc(columns * sizeof *s.live);
    s.row_template = aligned_alloc(16, (columns * element_bytes + 15) / 16 * 16);
    if (!s.frequent || !s.live || !s.row_template) abort();
    for (int i = 0; i < NUM_FREQUENT; i++) s.frequent[i] = low_bits(rng_next(r), width);
    if (rng_chance(r, 50)) leave_out(r, &s, p, columns);
    const uint32_t coded_bits = width - p->invariant_bits, symbol_bits = coded_bits - p->residual_bits;
    while (8 * symbol_bytes < symbol_bits) symbol_bytes *= 2;
    p->consecutive = !per_column && rng_chance(r, 20);
    p->first_symbol = low_bits(rng_next(r), symbol_bits);
    const size_t num_sets = per_column ? columns - p->num_constant : 1,
                 num_entries = p->consecutive ? 0 : set_entries * num_sets;
    s.entries = malloc(num_entries * symbol_bytes + 1);
    if (!s.entries) abort();
    for (size_t i = 0; i < num_entries; i++) {
        const uint64_t x = s.frequent[rng_below(r, NUM_FREQUENT)] >> p->invariant_bits;
        const uint64_t rotated = p->rotate ? low_bits(x << 1, coded_bits) | x >> (coded_bits - 1) : x;
        const uint64_t entry = low_bits(rng_chance(r, 12)  ? rng_next(r)
                                        : symbol_bits == 0 ? 0
                                                           : rotated >> p->residual_bits,
                                        symbol_bits);
        memcpy(s.entries + i * symbol_bytes, &entry, symbol_bytes);
    }
    p->entries = num_entries ? s.entries : NULL;
    p->default_value = s.frequent[0];
    p->closed_value = s.frequent[1];
    const ibp_status status =
        ibp_build_planes_codebook(p, columns * element_bytes, num_entries * symbol_bytes, &s.codebook);
    CHECK(status == IBP_OK, "%u columns of %u bytes", columns, element_bytes);
    CHECK(s.codebook.planes.num_entries == set_entries && s.codebook.planes.symbol_bytes == symbol_bytes, "%u entries",
          set_entries);
    CHECK(ibp_check_codebook(&s.codebook) == IBP_OK, "%u columns of %u bytes", columns, element_bytes);
    return s;
}

static void planes_free(planes_sample *s)
{
    free(s->entries);
    free(s->frequent);
    free(s->live);
    free(s->row_template);
}

enum { NUM_PLANES_ROW_KINDS = 6 };

/* Makes a row one that has a coded form: its invariant bits and constant columns. */
static void make_codable(const planes_sample *s, uint8_t *row)
{
    const ibp_planes *const p = &s->codebook.planes;
    const uint32_t columns = s->codebook.row_bytes / p->element_bytes;
    for (uint32_t column = 0, live = 0; column < columns; column++) {
        uint8_t *const element = row + column * p->element_bytes;
        const bool is_live = p->num_constant == 0 || (live < columns - p->num_constant && s->live[live] == column);
        live += is_live;
        uint64_t x = 0;
        memcpy(&x, element, p->element_bytes);
        x ^= low_bits(x, p->invariant_bits) ^ p->invariant_value;
        memcpy(element, is_live ? (uint8_t *)&x : s->row_template + column * p->element_bytes, p->element_bytes);
    }
}

/* Rows of frequent elements, of few, of noise, of defaults but for some; and of defaults but for the closed value. */
static void planes_row(rng *r, const planes_sample *s, int kind, uint8_t *row)
{
    static const uint32_t percent_noise[NUM_PLANES_ROW_KINDS] = {0, 5, 100, 30, 2, 0},
                          percent_default[NUM_PLANES_ROW_KINDS] = {0, 0, 0, 50, 97, 80};
    const uint32_t element_bytes = s->codebook.planes.element_bytes, num_kinds = kind == 1 ? 3 : NUM_FREQUENT;
    for (uint32_t at = 0; at < s->codebook.row_bytes; at += element_bytes) {
        uint64_t x =
            rng_chance(r, percent_noise[kind]) ? rng_next(r) : s->frequent[kind == 5 ? 1 : rng_below(r, num_kinds)];
        if (kind < 5) x ^= s->codebook.planes.residual_bits ? rng_next(r) & 1 : 0;
        if (rng_chance(r, percent_default[kind]))
            x = s->frequent[0] ^ (rng_chance(r, 50) ? (uint64_t)1 << (8 * element_bytes - 1) : 0);
        memcpy(row + at, &x, element_bytes);
    }
    if (rng_chance(r, 90)) make_codable(s, row);
}

/* What a coder makes of a row and of coded bytes. */
typedef struct outcome {
    size_t coded_bytes, encoded_bytes;
    ibp_status encoded, decoded;
    buffer dst, row;
} outcome;

static void run_coder_on(const ibp_codebook *cb, const uint8_t *row, const uint8_t *src, size_t src_bytes, uint8_t *dst,
                         size_t dst_bytes, uint8_t *decoded, outcome *o)
{
    o->coded_bytes = coded_row_bytes(cb, row);
    o->encoded = encode_row(cb, row, dst, dst_bytes, &o->encoded_bytes);
    o->decoded = decode_row(cb, src, src_bytes, decoded);
}

/* A copy of bytes that ends where memory that can be touched does: what vector instructions with masks touch, no
 * sanitizer sees. */
static uint8_t *fenced(int place, const uint8_t *bytes, size_t size)
{
    enum { NUM_PLACES = 4, ROOM = 8 * IBP_MAX_ROW_BYTES, FENCE = 65536 };
    static uint8_t *ends[NUM_PLACES];
    if (!ends[place]) {
        uint8_t *const memory = mmap(NULL, ROOM + FENCE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory + ROOM, FENCE, PROT_NONE) != 0) abort();
        ends[place] = memory + ROOM;
    }
    if (size > ROOM) abort();
    if (size != 0) memcpy(ends[place] - size, bytes, size);
    return ends[place] - size;
}

static outcome run_coder(uint32_t features, const ibp_codebook *cb, const uint8_t *row, size_t dst_bytes,
                         const buffer *src, size_t offset)
{
    outcome o = {.dst = buffer_new(dst_bytes, offset), .row = buffer_new(cb->row_bytes, offset)};
    ibp_set_cpu_features(features);
    if (offset % 2 == 0) {
        uint8_t *const dst = fenced(0, o.dst.data, dst_bytes), *const decoded = fenced(1, o.row.data, cb->row_bytes);
        run_coder_on(cb, fenced(2, row, cb->row_bytes), fenced(3, src->data, src->size), src->size, dst, dst_bytes,
                     decoded, &o);
        if (dst_bytes != 0) memcpy(o.dst.data, dst, dst_bytes);
        memcpy(o.row.data, decoded, cb->row_bytes);
    } else {
        run_coder_on(cb, row, src->data, src->size, o.dst.data, dst_bytes, o.row.data, &o);
    }
    ibp_set_cpu_features(UINT32_MAX);
    return o;
}

/* Encodes row to dst_bytes and decodes src with each set of features that this processor has. */
static void check_same(const ibp_codebook *cb, const uint8_t *row, size_t dst_bytes, const buffer *src, size_t offset)
{
    outcome plain = run_coder(0, cb, row, dst_bytes, src, offset);
    const ibp_planes *const p = &cb->planes;
    for (int i = 1; i < NUM_FEATURE_SETS; i++) {
        const uint32_t features = feature_sets[i];
        if (features & ~ibp_cpu_features()) continue;
        outcome fast = run_coder(features, cb, row, dst_bytes, src, offset);
#define ABOUT                                                                                                       \
    "features %u, row of %u: elements %u, residuals %u, rotate %u, planes %u (%u %u %u %u), column %d, listed %d, " \
    "src %zu",                                                                                                      \
        features, cb->row_bytes, p->element_bytes, p->residual_bits, p->rotate, p->num_planes, p->digit_bits[0],    \
        p->digit_bits[1], p->digit_bits[2], p->digit_bits[3], p->per_column, p->listed, src->size
        CHECK(fast.coded_bytes == plain.coded_bytes, ABOUT);
        CHECK(fast.encoded == plain.encoded && fast.encoded_bytes == plain.encoded_bytes, ABOUT);
        if (plain.encoded == IBP_OK && fast.encoded == IBP_OK)
            CHECK(memcmp(fast.dst.data, plain.dst.data, plain.encoded_bytes) == 0, ABOUT);
        CHECK(fast.decoded == plain.decoded, ABOUT);
        if (plain.decoded == IBP_OK) CHECK(memcmp(fast.row.data, plain.row.data, plain.row.size) == 0, ABOUT);
#undef ABOUT
        buffer_free(&fast.dst);
        buffer_free(&fast.row);
    }
    buffer_free(&plain.dst);
    buffer_free(&plain.row);
}

/* A row, its coded bytes, those with more and more bits flipped, and truncated, lengthened and random ones. */
static void check_row_both_ways(rng *r, const ibp_codebook *cb, const uint8_t *row)
{
    const size_t offset = rng_below(r, 8);
    ibp_set_cpu_features(0);
    const size_t exact_bytes = coded_row_bytes(cb, row);
    const bool has_form = exact_bytes != IBP_NO_CODED_FORM;
    CHECK(!has_form || (exact_bytes >= 1 && exact_bytes <= ibp_max_coded_row_bytes(cb->row_bytes)), "%zu bytes",
          exact_bytes);
    const size_t coded_bytes = has_form ? exact_bytes : cb->row_bytes;
    buffer coded = buffer_new(coded_bytes + 9, offset);
    size_t size = 0;
    const ibp_status status = encode_row(cb, row, coded.data, coded_bytes, &size);
    CHECK(status == (has_form ? IBP_OK : IBP_BUFFER_TOO_SMALL) && size == exact_bytes, "%zu bytes", size);
    ibp_set_cpu_features(UINT32_MAX);
    buffer exact = buffer_copy(coded.data, coded_bytes, offset);
    check_same(cb, row, coded_bytes, &exact, offset);
    for (int i = 0; i < 3 && coded_bytes > 0; i++) {
        const size_t bit = rng_below(r, 8 * (uint32_t)coded_bytes);
        exact.data[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        check_same(cb, row, coded_bytes + 5, &exact, offset);
    }
    buffer_free(&exact);
    const size_t others[] = {coded_bytes ? coded_bytes - 1 : 0, rng_below(r, (uint32_t)coded_bytes + 1),
                             coded_bytes + 1, coded_bytes + 9};
    for (size_t i = 0; i < 4; i++) {
        buffer other = buffer_copy(coded.data, others[i], offset);
        check_same(cb, row, others[i], &other, offset);
        if (i == 3) rng_fill(r, other.data, other.size);
        check_same(cb, row, 0, &other, offset);
        buffer_free(&other);
    }
    buffer_free(&coded);
}

static void check_planes(rng *r, uint32_t columns)
{
    for (uint32_t element_bytes = 1; element_bytes <= 8; element_bytes *= 2) {
        if (columns * element_bytes > IBP_MAX_ROW_BYTES) continue;
        for (int form = 0; form < 3; form++) { /* dense, dense with entries a column, listed */
            planes_sample s = planes_new(r, columns, element_bytes, form == 1, form == 2);
            buffer row = buffer_new(s.codebook.row_bytes, rng_below(r, 8));
            /* Of long rows, each kind in one of the forms. */
            const bool is_long = s.codebook.row_bytes > 8192;
            for (int kind = is_long ? form : 0; kind < NUM_PLANES_ROW_KINDS; kind += is_long ? 3 : 1) {
                planes_row(r, &s, kind, row.data);
                check_row_both_ways(r, &s.codebook, row.data);
            }
            buffer_free(&row);
            planes_free(&s);
        }
    }
}

static void check_masks(rng *r, uint32_t row_bytes)
{
    for (uint32_t chunk_bytes = 1; chunk_bytes <= 8; chunk_bytes *= 2)
        for (int kind = 0; kind < NUM_MASK_KINDS; kind++) {
            sample s = sample_new(r, row_bytes, chunk_bytes, rng_chance(r, 50), kind);
            buffer row = buffer_new(row_bytes, rng_below(r, 8));
            sample_rows(r, &s, (int)rng_below(r, NUM_ROW_KINDS), row.data, row_bytes);
            check_row_both_ways(r, &s.codebook, row.data);
            buffer_free(&row);
            sample_free(&s);
        }
}

void test_cpu_paths(void)
{
    CHECK(ibp_set_cpu_features(0) == 0 && ibp_cpu_features() == 0, "%s", "the plain code");
    const uint32_t all = ibp_set_cpu_features(UINT32_MAX);
    CHECK(ibp_cpu_features() == all && ibp_set_cpu_features(all) == all, "features %u", all);
    bool is_known = false;
    for (int i = 0; i < NUM_FEATURE_SETS; i++) is_known = is_known || all == feature_sets[i];
    CHECK(is_known, "features %u", all);
    CHECK(ibp_set_cpu_features(all & ~(uint32_t)IBP_CPU_AVX2_BMI2) == 0, "features %u less those that the others need",
          all);
    ibp_set_cpu_features(UINT32_MAX);
    rng r = rng_seed(11);
    /* Rows of up to two registers of AVX-512, or, when it is quick, those about the ends of each of its quarters. */
    const int num_rounds = is_quick ? 1 : 2;
    for (int round = 0; round < num_rounds; round++)
        for (uint32_t columns = 1; columns <= 80; columns++)
            if (!is_quick || columns <= 17 || (columns + 1) % 16 <= 2) check_planes(&r, columns);
    static const uint32_t many_columns[] = {127, 128, 1433, 65536, 511, 1000, 32767, 32768};
    const size_t num_many = is_quick ? 4 : sizeof many_columns / sizeof *many_columns;
    for (size_t i = 0; i < num_many; i++) check_planes(&r, many_columns[i]);
    for (uint32_t row_bytes = 1; row_bytes <= 160; row_bytes++)
        if (!is_quick || row_bytes <= 33 || (row_bytes + 1) % 16 <= 2) check_masks(&r, row_bytes);
    check_masks(&r, 4099);
    check_masks(&r, IBP_MAX_ROW_BYTES);
    ibp_set_cpu_features(UINT32_MAX);
}
