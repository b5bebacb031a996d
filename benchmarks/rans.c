/* An entropy coder of bytes by range asymmetric numeral systems (Duda, arXiv 1311.2540), with 32 interleaved states
 * that are renormalised by words of 16 bits (Giesen, arXiv 1402.3392). It stands for the rANS on a CPU in section 5.1.5
 * of the report on DietGPU. rans.py compiles this file.
 *
 * Coded bytes, little-endian: the number of bytes as uint64; the frequencies of the 256 symbols as uint16, whose sum is
 * 4096; the 32 states as uint32 from which decoding begins; and the words, in the order in which the decoder reads
 * them. Byte i belongs to state i % 32. No bytes are coded to their number alone.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    NUM_STATES = 32,
    NUM_SYMBOLS = 256,
    SCALE_BITS = 12,
    SCALE = 1 << SCALE_BITS,
    WORD_BITS = 16,
    RECIPROCAL_BITS = 44,
    LENGTH_BYTES = 8,
    HEADER_BYTES = LENGTH_BYTES + 2 * NUM_SYMBOLS + 4 * NUM_STATES,
};
#define LEAST_STATE (1u << WORD_BITS)

/* Returns the largest number of bytes that num_bytes bytes can be coded to: each can take one word. */
size_t rans_bound(size_t num_bytes) { return num_bytes ? HEADER_BYTES + 2 * num_bytes : LENGTH_BYTES; }

/* Makes frequencies with the sum SCALE from the counts of symbols. Symbols that occur get at least 1. */
static void scaled(const uint32_t counts[NUM_SYMBOLS], size_t num_bytes, uint16_t frequencies[NUM_SYMBOLS])
{
    int32_t excess = -SCALE;
    for (int s = 0; s < NUM_SYMBOLS; s++) {
        const uint64_t share = (uint64_t)counts[s] * SCALE / num_bytes;
        frequencies[s] = (uint16_t)(counts[s] && !share ? 1 : share);
        excess += frequencies[s];
    }
    while (excess) {
        int most = 0;
        for (int s = 1; s < NUM_SYMBOLS; s++)
            if (frequencies[s] > frequencies[most]) most = s;
        const int32_t half = frequencies[most] / 2;
        const int32_t step = excess > half ? half : excess;
        frequencies[most] = (uint16_t)(frequencies[most] - step);
        excess -= step;
    }
}

/* Codes bytes. to: at least rans_bound(num_bytes) bytes. Returns the size of the coded bytes. */
size_t rans_encode(const uint8_t *from, size_t num_bytes, uint8_t *to)
{
    const uint64_t length = num_bytes;
    memcpy(to, &length, sizeof length);
    if (!num_bytes) return LENGTH_BYTES;
    uint32_t counts[4][NUM_SYMBOLS] = {{0}}; /* four tables, so that equal bytes do not wait for each other */
    for (size_t i = 0; i < num_bytes; i++) counts[i % 4][from[i]]++;
    for (int s = 0; s < NUM_SYMBOLS; s++) counts[0][s] += counts[1][s] + counts[2][s] + counts[3][s];
    uint16_t frequencies[NUM_SYMBOLS];
    scaled(counts[0], num_bytes, frequencies);

    /* A state is below frequency << (32 - SCALE_BITS) when it is divided by the frequency. So the product with the
     * reciprocal fits 64 bits, and the quotient is exact. */
    struct {
        uint64_t reciprocal;
        uint32_t frequency, start;
    } symbols[NUM_SYMBOLS];
    for (uint32_t s = 0, start = 0; s < NUM_SYMBOLS; start += frequencies[s++]) {
        const uint64_t frequency = frequencies[s];
        symbols[s].reciprocal = frequency ? ((1ull << RECIPROCAL_BITS) + frequency - 1) / frequency : 0;
        symbols[s].frequency = frequencies[s];
        symbols[s].start = start;
    }
    uint32_t states[NUM_STATES];
    for (int k = 0; k < NUM_STATES; k++) states[k] = LEAST_STATE;
    uint8_t *const end = to + rans_bound(num_bytes);
    uint8_t *word = end; /* words are written backwards, because the decoder runs the other way */
    for (size_t i = num_bytes; i-- > 0;) {
        const uint32_t frequency = symbols[from[i]].frequency;
        uint32_t x = states[i % NUM_STATES];
        const uint16_t low = (uint16_t)x; /* is written in any case, and stays if the state is too large */
        memcpy(word - sizeof low, &low, sizeof low);
        const uint32_t is_large = x >> (32 - SCALE_BITS) >= frequency;
        word -= sizeof low * is_large;
        x >>= WORD_BITS * is_large;
        const uint32_t quotient = (uint32_t)(x * symbols[from[i]].reciprocal >> RECIPROCAL_BITS);
        states[i % NUM_STATES] = x + symbols[from[i]].start + quotient * (SCALE - frequency);
    }
    memcpy(to + LENGTH_BYTES, frequencies, sizeof frequencies);
    memcpy(to + LENGTH_BYTES + sizeof frequencies, states, sizeof states);
    memmove(to + HEADER_BYTES, word, (size_t)(end - word));
    return HEADER_BYTES + (size_t)(end - word);
}

/* Decodes num_bytes bytes. Returns 0, or -1 if the coded bytes are not those of num_bytes bytes. */
int rans_decode(const uint8_t *from, size_t coded_bytes, uint8_t *to, size_t num_bytes)
{
    uint64_t length;
    if (coded_bytes < LENGTH_BYTES) return -1;
    memcpy(&length, from, sizeof length);
    if (length != num_bytes || (num_bytes ? coded_bytes < HEADER_BYTES : coded_bytes != LENGTH_BYTES)) return -1;
    if (!num_bytes) return 0;
    uint16_t frequencies[NUM_SYMBOLS];
    uint32_t states[NUM_STATES], slots[SCALE]; /* of a slot: frequency - 1, place in its symbol's slots, symbol */
    memcpy(frequencies, from + LENGTH_BYTES, sizeof frequencies);
    memcpy(states, from + LENGTH_BYTES + sizeof frequencies, sizeof states);
    uint32_t start = 0;
    for (uint32_t s = 0; s < NUM_SYMBOLS; s++) {
        if (frequencies[s] > SCALE - start) return -1;
        for (uint32_t k = 0; k < frequencies[s]; k++) slots[start++] = (frequencies[s] - 1u) << 20 | k << 8 | s;
    }
    if (start != SCALE) return -1;

    const uint8_t *word = from + HEADER_BYTES, *const end = from + coded_bytes;
    size_t i = 0;
    for (; num_bytes - i >= NUM_STATES && end - word >= 2 * NUM_STATES; i += NUM_STATES) {
        for (int k = 0; k < NUM_STATES; k++) {
            const uint32_t slot = slots[states[k] % SCALE];
            states[k] = ((slot >> 20) + 1) * (states[k] >> SCALE_BITS) + (slot >> 8 & (SCALE - 1));
            to[i + (size_t)k] = (uint8_t)slot;
        }
        for (int k = 0; k < NUM_STATES; k++) {
            uint16_t next;
            memcpy(&next, word, sizeof next);
            const uint32_t is_short = states[k] < LEAST_STATE;
            states[k] = states[k] << WORD_BITS * is_short | (next & (0u - is_short));
            word += sizeof next * is_short;
        }
    }
    for (; i < num_bytes; i++) {
        uint32_t x = states[i % NUM_STATES];
        const uint32_t slot = slots[x % SCALE];
        x = ((slot >> 20) + 1) * (x >> SCALE_BITS) + (slot >> 8 & (SCALE - 1));
        to[i] = (uint8_t)slot;
        if (x < LEAST_STATE) {
            uint16_t next;
            if (end - word < (ptrdiff_t)sizeof next) return -1;
            memcpy(&next, word, sizeof next);
            word += sizeof next;
            x = x << WORD_BITS | next;
        }
        states[i % NUM_STATES] = x;
    }
    for (int k = 0; k < NUM_STATES; k++)
        if (states[k] != LEAST_STATE) return -1;
    return word == end ? 0 : -1;
}

/* Splits BF16 values into their exponents, and the rest: signs and the seven low bits. */
void split_bfloat16(const uint16_t *from, size_t num_values, uint8_t *exponents, uint8_t *rest)
{
    for (size_t i = 0; i < num_values; i++) {
        exponents[i] = (uint8_t)(from[i] >> 7);
        rest[i] = (uint8_t)((from[i] >> 8 & 0x80) | (from[i] & 0x7f));
    }
}

/* Joins what split_bfloat16 has split. */
void join_bfloat16(const uint8_t *exponents, const uint8_t *rest, size_t num_values, uint16_t *to)
{
    for (size_t i = 0; i < num_values; i++)
        to[i] = (uint16_t)((rest[i] & 0x80) << 8 | exponents[i] << 7 | (rest[i] & 0x7f));
}
