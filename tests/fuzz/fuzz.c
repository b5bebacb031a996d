/* fuzz.c - inputs as values, fenced memory, codebooks. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "fuzz.h"

#include <sys/mman.h>

/* ---- values ---- */

uint64_t take(input *in, uint32_t num_bytes)
{
    uint64_t value = 0;
    for (uint32_t i = 0; i < num_bytes && in->at < in->end; i++) value |= (uint64_t)*in->at++ << 8 * i;
    return value;
}

uint32_t take_below(input *in, uint32_t limit)
{
    return limit < 2 ? 0 : (uint32_t)(take(in, limit <= 256 ? 1 : 4) % limit);
}

bool take_flag(input *in) { return take(in, 1) & 1; }

uint32_t take_size(input *in)
{
    const uint32_t kind = take_below(in, 256);
    return 1 + take_below(in, kind == 255 ? IBP_MAX_ROW_BYTES : kind > 240 ? 3000 : 256);
}

void take_pattern(input *in, uint8_t *to, size_t num_bytes, size_t most)
{
    const size_t there_are = (size_t)(in->end - in->at), period = there_are < most ? there_are : most;
    for (size_t i = 0; i < num_bytes; i++) to[i] = period != 0 ? in->at[i % period] : 0;
    in->at += period < num_bytes ? period : num_bytes;
}

/* ---- memory ---- */

uint8_t *fenced(int place, size_t num_bytes)
{
    enum { ROOM = 1 << 24, FENCE = 1 << 16 };
    static uint8_t *places[NUM_PLACES];
    REQUIRE(place < NUM_PLACES && num_bytes <= ROOM);
    if (!places[place]) {
        uint8_t *const memory = mmap(NULL, ROOM + FENCE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory + ROOM, FENCE, PROT_NONE) != 0) abort();
        places[place] = memory;
    }
    return places[place] + ROOM - num_bytes;
}

uint8_t *fenced_scratch(uint32_t row_bytes) { return fenced(NUM_PLACES - 1, ibp_scratch_bytes(row_bytes)); }

void damage(input *in, void *array, size_t num_bytes)
{
    if (num_bytes == 0) return;
    for (uint32_t count = take_below(in, 8); count > 0; count--) {
        const size_t at = (size_t)take(in, num_bytes <= 256 ? 1 : 3) % num_bytes;
        ((uint8_t *)array)[at] = (uint8_t)take(in, 1);
    }
}

void on_each_processor(void (*use)(void *), void *argument)
{
    static const uint32_t sets[] = {0, IBP_CPU_AVX2_BMI2, IBP_CPU_AVX2_BMI2 | IBP_CPU_AVX512};
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++)
        if (ibp_set_cpu_features(sets[i]) == sets[i]) use(argument);
    ibp_set_cpu_features(UINT32_MAX);
}

/* ---- codebooks ---- */

enum { WORDS_PLACE, MASK_PLACE, BITVAL_PLACE, ENTRIES_PLACE, LIVE_PLACE, TEMPLATE_PLACE };

static bool take_masks(input *in, uint32_t row_bytes, ibp_codebook *codebook)
{
    const uint32_t chunk_bytes = 1u << take_below(in, 4), num_clusters = 1 + take_below(in, 3);
    const bool flag_all = take_flag(in), is_hostile = take_below(in, 8) == 7;
    const size_t num_words = ibp_codebook_words(row_bytes), stride = 3 * num_words + 4;
    uint8_t *const mask = fenced(MASK_PLACE, row_bytes), *const bitval = fenced(BITVAL_PLACE, row_bytes);
    uint32_t *const all = (void *)fenced(WORDS_PLACE, num_clusters * stride * 4);
    for (uint32_t k = 0; k < num_clusters; k++) {
        ibp_codebook one;
        uint32_t *const words = all + k * stride;
        take_pattern(in, mask, row_bytes, 8);
        take_pattern(in, bitval, row_bytes, 8);
        for (uint32_t i = 0; i < row_bytes; i++) bitval[i] &= mask[i];
        REQUIRE(ibp_build_codebook(mask, bitval, row_bytes, chunk_bytes, flag_all, words, &one) == IBP_OK);
        memcpy(words + 3 * num_words, (uint32_t[4]){one.num_flags}, 16);
        if (k == 0) *codebook = one;
    }
    if (num_clusters > 1) {
        codebook->num_clusters = num_clusters, codebook->cluster_stride = (uint32_t)stride;
        codebook->cluster_flags = all + 3 * num_words;
    }
    REQUIRE(ibp_check_codebook(codebook) == IBP_OK);
    if (is_hostile) damage(in, all, num_clusters * stride * 4);
    return true;
}

/* Constant columns at the front or the back, or anywhere and hostile. */
static void take_constants(input *in, uint32_t columns, uint32_t row_bytes, bool is_hostile, ibp_planes *planes)
{
    planes->num_constant = columns > 1 ? take_below(in, columns) : 0;
    if (planes->num_constant == 0) return;
    const uint32_t num_live = columns - planes->num_constant, first = take_flag(in) ? planes->num_constant : 0;
    const size_t room = (row_bytes + 15) / 16 * 16;
    uint16_t *const live = (void *)fenced(LIVE_PLACE, 2 * (size_t)num_live);
    uint8_t *const row_template = fenced(TEMPLATE_PLACE, room);
    memset(row_template, 0, room);
    take_pattern(in, row_template, row_bytes, 8);
    for (uint32_t i = 0; i < num_live; i++) {
        live[i] = (uint16_t)(first + i);
        memcpy(row_template + (size_t)live[i] * planes->element_bytes, &planes->default_value, planes->element_bytes);
    }
    if (is_hostile) damage(in, live, 2 * (size_t)num_live);
    planes->live_columns = live, planes->row_template = row_template;
}

static uint64_t take_bits(input *in, uint32_t num_bits)
{
    const uint64_t value = take(in, (num_bits + 7) / 8);
    return num_bits >= 64 ? value : value & (((uint64_t)1 << num_bits) - 1);
}

static bool take_planes(input *in, uint32_t row_bytes, ibp_codebook *codebook)
{
    const uint32_t element_bytes = 1u << take_below(in, 4), width = 8 * element_bytes,
                   columns = row_bytes / element_bytes;
    const uint32_t flags = take_below(in, 256);
    const bool is_hostile = (flags & 0xf0) == 0xf0;
    if (row_bytes % element_bytes != 0) return false;
    ibp_planes planes = {.element_bytes = element_bytes, .rotate = flags & 1, .num_planes = take_below(in, 5)};
    planes.invariant_bits = take_flag(in) ? take_below(in, width) : 0;
    planes.residual_bits = take_below(in, width - planes.invariant_bits + 1);
    planes.invariant_value = take_bits(in, planes.invariant_bits);
    planes.listed = (flags & 2) != 0, planes.per_column = !planes.listed && (flags & 4) != 0;
    planes.signed_default = planes.listed && (flags & 8) != 0;
    planes.default_value = take_bits(in, width), planes.closed_value = take_bits(in, width);
    const uint32_t symbol_bits = width - planes.invariant_bits - planes.residual_bits;
    planes.consecutive = !planes.per_column && take_flag(in);
    planes.first_symbol = planes.consecutive ? take_bits(in, symbol_bits) : 0;
    size_t num_entries = 0, symbol_bytes = 1;
    for (uint32_t p = 0; p < planes.num_planes; p++) {
        planes.digit_bits[p] = (uint8_t)(1 + take_below(in, IBP_MAX_DIGIT_BITS));
        num_entries += (1u << planes.digit_bits[p]) - 1;
    }
    while (8 * symbol_bytes < symbol_bits) symbol_bytes *= 2;
    if (take_flag(in)) take_constants(in, columns, row_bytes, is_hostile, &planes);
    const uint32_t sets = planes.per_column ? columns - planes.num_constant : 1, clusters = 1 + take_below(in, 3);
    const size_t num_bytes = planes.consecutive ? 0 : clusters * sets * num_entries * symbol_bytes;
    if (num_bytes > 1 << 21) return false;
    uint8_t *const entries = fenced(ENTRIES_PLACE, num_bytes);
    take_pattern(in, entries, num_bytes, 32);
    for (size_t i = 0; i < num_bytes && !is_hostile; i += symbol_bytes) {
        uint64_t entry = 0;
        memcpy(&entry, entries + i, symbol_bytes);
        if (symbol_bits < 64) entry &= ((uint64_t)1 << symbol_bits) - 1;
        memcpy(entries + i, &entry, symbol_bytes);
    }
    planes.entries = entries;
    const ibp_status status = ibp_build_planes_codebook(&planes, row_bytes, num_bytes, codebook);
    REQUIRE(status == IBP_OK || status == IBP_INVALID_ARGUMENT);
    if (status == IBP_OK && !is_hostile) REQUIRE(ibp_check_codebook(codebook) == IBP_OK);
    return status == IBP_OK;
}

bool take_codebook(input *in, ibp_codebook *codebook)
{
    const bool has_masks = take_flag(in);
    const uint32_t row_bytes = take_size(in);
    return has_masks ? take_masks(in, row_bytes, codebook) : take_planes(in, row_bytes, codebook);
}
