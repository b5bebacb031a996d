/* analysis.c - counts bits, counts the rows in which chunks participate (hits), and finds masks for rows by the paper's
 * threshold (section 4.1) or by a greedy choice, in plain C. */
#include "bits.h"
#include "format.h"
#include "greedy_gain.h"
#include "schemes.h"

/* Returns the bits of a byte as eight bytes of 0 or 1, with bit 0 in the lowest byte. */
static uint64_t spread_bits(uint8_t byte)
{
    const uint64_t one_bit_each = byte * 0x0101010101010101u & 0x8040201008040201u;
    return (one_bit_each + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}

/* COLUMNS: number of bytes of a row that are counted at a time. ROWS_BEFORE_CARRY: number of rows that a counter of one
 * byte can count. */
enum { COLUMNS = 512, ROWS_BEFORE_CARRY = 255 };

ibp_status ibp_count_bits(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint64_t *counts)
{
    if (!ibp_are_sizes(0, row_bytes)) return IBP_INVALID_ARGUMENT;
    for (uint32_t first = 0; first < row_bytes; first += COLUMNS) {
        const uint32_t columns = row_bytes - first < COLUMNS ? row_bytes - first : COLUMNS;
        for (size_t r = 0; r < num_rows; r += ROWS_BEFORE_CARRY) {
            const size_t stop = num_rows - r < ROWS_BEFORE_CARRY ? num_rows : r + ROWS_BEFORE_CARRY;
            uint64_t sums[COLUMNS] = {0}; /* eight counters of one byte each */
            for (size_t q = r; q < stop; q++)
                for (uint32_t i = 0; i < columns; i++) sums[i] += spread_bits(data[q * row_bytes + first + i]);
            for (uint32_t i = 0; i < columns; i++)
                for (uint32_t b = 0; b < 8; b++) counts[8 * (size_t)(first + i) + b] += (sums[i] >> (8 * b)) & 0xffu;
        }
    }
    return IBP_OK;
}

ibp_status ibp_threshold_bits(const uint64_t *counts, uint64_t num_rows, uint32_t row_bytes, double tau, uint8_t *mask,
                              uint8_t *bitval)
{
    if (!ibp_are_sizes(0, row_bytes) || !(tau >= 0.5 && tau <= 1.0)) return IBP_INVALID_ARGUMENT;
    const double high = tau * (double)num_rows, low = (1.0 - tau) * (double)num_rows;
    for (uint32_t i = 0; i < row_bytes; i++) {
        mask[i] = bitval[i] = 0;
        for (uint32_t b = 0; b < 8; b++) {
            const uint64_t count = counts[8 * (size_t)i + b];
            const bool one = tau < 1.0 ? (double)count > high : count == num_rows;
            const bool zero = tau < 1.0 ? (double)count < low : count == 0;
            if (one) bitval[i] |= (uint8_t)(1u << b);
            if (one || zero) mask[i] |= (uint8_t)(1u << b);
        }
    }
    return IBP_OK;
}

/* Returns a chunk as a number, extended with zeros past the end of the row. */
static uint64_t load_chunk(const uint8_t *row, uint32_t row_bytes, uint32_t first, uint32_t chunk_bytes)
{
    return ibp_load_number(row + first, ibp_min_u32(chunk_bytes, row_bytes - first));
}

/* Adds to `hits` as ibp_count_hits does. chunk_bytes must be a constant at every call, so that a complete chunk is
 * loaded in one instruction. */
static inline void count_hits_of(const ibp_codebook *cb, const uint8_t *data, size_t num_rows, uint64_t *hits,
                                 uint32_t chunk_bytes)
{
    const uint8_t *const mask = (const uint8_t *)cb->mask, *const bitval = (const uint8_t *)
                                                                               cb->bitval; /* words are little-endian */
    const uint32_t num_whole = cb->row_bytes / chunk_bytes, rest = num_whole * chunk_bytes;
    for (size_t r = 0; r < num_rows; r++) {
        const uint8_t *const row = data + r * cb->row_bytes;
        for (uint32_t chunk = 0; chunk < num_whole; chunk++) {
            const uint32_t first = chunk * chunk_bytes;
            const uint64_t differing =
                ibp_load_number(row + first, chunk_bytes) ^ ibp_load_number(bitval + first, chunk_bytes);
            hits[chunk] += (differing & ibp_load_number(mask + first, chunk_bytes)) == 0;
        }
        if (rest == cb->row_bytes) continue;
        const uint64_t differing =
            load_chunk(row, cb->row_bytes, rest, chunk_bytes) ^ load_chunk(bitval, cb->row_bytes, rest, chunk_bytes);
        hits[num_whole] += (differing & load_chunk(mask, cb->row_bytes, rest, chunk_bytes)) == 0;
    }
}

ibp_status ibp_count_hits(const ibp_codebook *cb, const uint8_t *data, size_t num_rows, uint64_t *hits)
{
    if (cb->scheme != IBP_SCHEME_IBP || ibp_check_codebook_fields(cb) != IBP_OK) return IBP_INVALID_ARGUMENT;
    IBP_BY_SIZE(cb->chunk_bytes, count_hits_of, cb, data, num_rows, hits);
    return IBP_OK;
}

/* A mask of num_bits bits, which grows by one bit at a time, and the number of rows that match it. */
typedef struct growing_mask {
    uint64_t mask, bitval, num_matching;
    uint32_t num_bits;
} growing_mask;

/* For each bit b, sets ones[b] to the number of rows that match the mask found so far and in which bit b of the chunk
 * is set. column: the address of the chunk in the first row. */
static void count_matching(const uint8_t *column, size_t num_rows, uint32_t row_bytes, uint32_t valid_bytes,
                           const growing_mask *grown, uint64_t ones[IBP_CHUNK_BITS])
{
    uint64_t sums[IBP_CHUNK_BITS / 8] = {0}; /* eight counters of one byte each */
    uint32_t added = 0;
    memset(ones, 0, IBP_CHUNK_BITS * sizeof *ones);
    for (size_t r = 0; r < num_rows; r++) {
        const uint64_t chunk = ibp_load_number(column + r * row_bytes, valid_bytes);
        if (((chunk ^ grown->bitval) & grown->mask) == 0) {
            for (uint32_t i = 0; i < valid_bytes; i++) sums[i] += spread_bits((uint8_t)(chunk >> (8 * i)));
            added++;
        }
        if (added < ROWS_BEFORE_CARRY && r + 1 < num_rows) continue;
        for (uint32_t b = 0; b < 8 * valid_bytes; b++) ones[b] += (sums[b / 8] >> (8 * (b % 8))) & 0xffu;
        memset(sums, 0, sizeof sums);
        added = 0;
    }
}

/* Adds to the mask the bit on which the largest number of matching rows agree. Returns false if no bit is left. */
static bool grow_mask(growing_mask *grown, const uint64_t ones[IBP_CHUNK_BITS], uint32_t valid_bits)
{
    uint64_t most = 0;
    uint32_t best = valid_bits;
    for (uint32_t b = 0; b < valid_bits; b++) {
        if (grown->mask >> b & 1) continue;
        const uint64_t zeros = grown->num_matching - ones[b], agreeing = ones[b] > zeros ? ones[b] : zeros;
        if (best < valid_bits && agreeing <= most) continue;
        most = agreeing;
        best = b;
    }
    if (best == valid_bits) return false;
    grown->mask |= (uint64_t)1 << best;
    if (2 * ones[best] > grown->num_matching) grown->bitval |= (uint64_t)1 << best;
    grown->num_matching = most;
    grown->num_bits++;
    return true;
}

/* Returns the number of bits that a mask saves in all rows, less its participation bits. */
static int64_t gain_of(const growing_mask *grown, size_t num_rows)
{
    return (int64_t)(grown->num_matching * grown->num_bits) - (int64_t)num_rows;
}

ibp_status ibp_choose_masks(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint32_t chunk_bytes,
                            uint32_t first_chunk, uint32_t last_chunk, uint8_t *mask, uint8_t *bitval)
{
    if (!ibp_are_sizes(0, row_bytes) || !ibp_is_element_size(chunk_bytes)) return IBP_INVALID_ARGUMENT;
    if (first_chunk > last_chunk || last_chunk > (row_bytes + chunk_bytes - 1) / chunk_bytes)
        return IBP_INVALID_ARGUMENT;
    for (uint32_t first = first_chunk * chunk_bytes; first < row_bytes && first < last_chunk * chunk_bytes;
         first += chunk_bytes) {
        const uint32_t valid_bytes = ibp_min_u32(chunk_bytes, row_bytes - first), valid_bits = 8 * valid_bytes;
        growing_mask grown = {0, 0, num_rows, 0}, best = grown;
        int64_t best_gain = 0;
        for (;;) {
            /* Stop if even a mask of all bits, with all rows that still match, would not save more. */
            const growing_mask most = {0, 0, grown.num_matching, valid_bits};
            if (gain_of(&most, num_rows) <= best_gain) break;
            uint64_t ones[IBP_CHUNK_BITS];
            count_matching(data + first, num_rows, row_bytes, valid_bytes, &grown, ones);
            if (!grow_mask(&grown, ones, valid_bits)) break;
            if (gain_of(&grown, num_rows) <= best_gain) continue;
            best = grown;
            best_gain = gain_of(&grown, num_rows);
        }
        memcpy(mask + first, &best.mask, valid_bytes);
        memcpy(bitval + first, &best.bitval, valid_bytes);
    }
    return IBP_OK;
}

/* ---- a quick estimate -------------------------------------------------------------------------------------------- */

/* An estimate looks at up to ESTIMATE_ROWS rows, and in each of these rows at up to ESTIMATE_BLOCKS blocks of
 * BLOCK_BYTES bytes. */
enum { ESTIMATE_ROWS = 64, ESTIMATE_BLOCKS = 32, BLOCK_BYTES = IBP_CHUNK_BITS / 8 };

/* Transposes 64 words of 64 bits: bit r of word b becomes bit b of word r. */
static void transpose_bits(uint64_t words[64])
{
    /* low: the lower `size` bits of every 2 * size bits. Each step exchanges, for every 2 * size bits, the upper half
     * in word w with the lower half in word w + size. */
    uint64_t low = 0xffffffffu;
    for (uint32_t size = 32; size > 0; size /= 2, low ^= low << size)
        for (uint32_t w = 0; w < 64; w = (w + size + 1) & ~size) {
            const uint64_t differing = (words[w] >> size ^ words[w + size]) & low;
            words[w] ^= differing << size, words[w + size] ^= differing;
        }
}

ibp_status ibp_estimate_masks(const uint8_t *data, size_t num_rows, uint32_t row_bytes, double *savings)
{
    if (!ibp_are_sizes(0, row_bytes) || num_rows == 0) return IBP_INVALID_ARGUMENT;
    const size_t step = (num_rows + ESTIMATE_ROWS - 1) / ESTIMATE_ROWS, rows = (num_rows + step - 1) / step;
    const uint32_t blocks = (row_bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
    const uint32_t block_step = (blocks + ESTIMATE_BLOCKS - 1) / ESTIMATE_BLOCKS * BLOCK_BYTES;
    uint64_t (*gain)(const uint64_t *, uint32_t, uint32_t) = ibp_greedy_gain;
#if IBP_HAS_X86_ROWS
    if (ibp_cpu_features() & IBP_CPU_AVX512) gain = ibp_greedy_gain_avx512;
#endif
    uint64_t saved[4] = {0}, bytes = 0; /* for chunks of 1, 2, 4 and 8 bytes */
    for (uint32_t first = 0; first < row_bytes; first += block_step) {
        uint64_t columns[8 * BLOCK_BYTES] = {0};
        const uint32_t valid_bytes = ibp_min_u32(BLOCK_BYTES, row_bytes - first);
        for (size_t r = 0; r < rows; r++)
            columns[r] = load_chunk(data + r * step * row_bytes, row_bytes, first, BLOCK_BYTES);
        transpose_bits(columns);
        bytes += valid_bytes;
        for (uint32_t size = 0; size < 4; size++)
            for (uint32_t b = 0; b < 8 * valid_bytes; b += 8u << size)
                saved[size] += gain(columns + b, ibp_min_u32(8u << size, 8 * valid_bytes - b), (uint32_t)rows);
    }
    uint64_t most = 0;
    for (uint32_t size = 0; size < 4; size++)
        if (saved[size] > most) most = saved[size];
    *savings = (double)most / (8.0 * (double)bytes * (double)rows);
    return IBP_OK;
}
