/* samples.c - random numbers, watched buffers, codebooks and rows to test with. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "check.h"

#include <sys/mman.h>

const uint32_t feature_sets[NUM_FEATURE_SETS] = {0, IBP_CPU_AVX2_BMI2, IBP_CPU_AVX2_BMI2 | IBP_CPU_AVX512};

rng rng_seed(uint64_t seed) { return (rng){seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u}; }

uint64_t rng_next(rng *r)
{
    uint64_t z = r->state += 0x9E3779B97F4A7C15u; /* splitmix64 */
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

uint32_t rng_below(rng *r, uint32_t limit) { return (uint32_t)((rng_next(r) >> 32) % limit); }

bool rng_chance(rng *r, uint32_t percent) { return rng_below(r, 100) < percent; }

void rng_fill(rng *r, uint8_t *bytes, size_t num_bytes)
{
    for (size_t i = 0; i < num_bytes; i++) bytes[i] = (uint8_t)rng_next(r);
}

buffer buffer_new(size_t size, size_t offset)
{
    uint8_t *const memory = malloc(size + offset);
    if (!memory && size + offset != 0) abort();
    if (size + offset != 0) memset(memory, 0xA5, size + offset);
    return (buffer){memory, memory + offset, size};
}

buffer buffer_copy(const uint8_t *bytes, size_t size, size_t offset)
{
    const buffer b = buffer_new(size, offset);
    if (size != 0) memcpy(b.data, bytes, size);
    return b;
}

void buffer_free(buffer *b)
{
    free(b->memory);
    *b = (buffer){0};
}

buffer scratch_new(uint32_t row_bytes) { return buffer_new(ibp_scratch_bytes(row_bytes), row_bytes % 16); }

/* The end of one piece of memory: what vector instructions with masks touch after it, no sanitizer sees, but the
 * processor does. */
static buffer scratch_of(const ibp_codebook *codebook)
{
    enum { ROOM = (IBP_MAX_SCRATCH_BYTES + 65535) / 65536 * 65536, FENCE = 65536 };
    static uint8_t *end;
    if (!end) {
        uint8_t *const memory = mmap(NULL, ROOM + FENCE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory + ROOM, FENCE, PROT_NONE) != 0) abort();
        end = memory + ROOM;
    }
    const size_t size = ibp_scratch_bytes(codebook->row_bytes);
    return (buffer){.data = end - size, .size = size};
}

size_t coded_row_bytes(const ibp_codebook *codebook, const uint8_t *row)
{
    const buffer scratch = scratch_of(codebook);
    return ibp_coded_row_bytes(codebook, row, scratch.data, scratch.size);
}

ibp_status encode_row(const ibp_codebook *codebook, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                      size_t *coded_bytes)
{
    const buffer scratch = scratch_of(codebook);
    return ibp_encode_row(codebook, row, dst, dst_bytes, coded_bytes, scratch.data, scratch.size);
}

ibp_status decode_row(const ibp_codebook *codebook, const uint8_t *src, size_t src_bytes, uint8_t *row)
{
    const buffer scratch = scratch_of(codebook);
    return ibp_decode_row(codebook, src, src_bytes, row, scratch.data, scratch.size);
}

static uint8_t mask_byte(rng *r, int kind, uint32_t i, uint32_t chunk_bytes)
{
    const uint8_t a = (uint8_t)rng_next(r), b = (uint8_t)rng_next(r), c = (uint8_t)rng_next(r);
    switch (kind) {
    case 0: return 0;
    case 1: return 0xff;
    case 2: return a;
    case 3: return a & b & c;
    case 4: return i / chunk_bytes % 3 == 1 ? 0 : (uint8_t)(a | b | c);
    case 5: return i % 4 == 3 ? 0x7f : i % 4 == 2 ? 0x80 : 0; /* sign and exponent of float32 */
    default: return i / chunk_bytes % 5 == 0 ? 0xff : 0;
    }
}

sample sample_new(rng *r, uint32_t row_bytes, uint32_t chunk_bytes, bool flag_all, int mask_kind)
{
    uint8_t *const mask = malloc(row_bytes), *const bitval = malloc(row_bytes);
    const size_t num_words = 3 * ibp_codebook_words(row_bytes);
    uint32_t *const words = aligned_alloc(16, num_words * sizeof *words);
    if (!mask || !bitval || !words) abort();
    for (uint32_t i = 0; i < row_bytes; i++) {
        mask[i] = mask_byte(r, mask_kind, i, chunk_bytes);
        bitval[i] = mask[i] & (uint8_t)rng_next(r);
    }
    sample s = {{mask, bitval, row_bytes, chunk_bytes, flag_all}, words, {0}};
    memset(words, 0xA5, num_words * sizeof *words);
    const ibp_status status = ibp_build_codebook(mask, bitval, row_bytes, chunk_bytes, flag_all, words, &s.codebook);
    CHECK(status == IBP_OK, "status %d", (int)status);
    return s;
}

void sample_free(sample *s)
{
    free(s->masks.mask);
    free(s->masks.bitval);
    free(s->words);
}

void sample_rows(rng *r, const sample *s, int row_kind, uint8_t *data, size_t num_bytes)
{
    static const uint32_t percent_broken[NUM_ROW_KINDS] = {0, 3, 50, 100, 0};
    const masks *const m = &s->masks;
    bool breaks = false;
    for (size_t p = 0; p < num_bytes; p++) {
        const uint32_t i = (uint32_t)(p % m->row_bytes);
        if (i % m->chunk_bytes == 0) breaks = rng_chance(r, percent_broken[row_kind]);
        const uint8_t noise = row_kind == 4 ? 0 : (uint8_t)rng_next(r);
        data[p] = (uint8_t)((noise & ~m->mask[i]) | m->bitval[i]);
        if (breaks) data[p] ^= m->mask[i] & (uint8_t)rng_next(r);
    }
}
