/* greedy_gain.h - computes how many bits a greedily chosen mask of a chunk saves. analysis.c compiles this code for any
 * processor, and x86/masks_avx512.c compiles it for AVX-512. */
#ifndef IBP_GREEDY_GAIN_H
#define IBP_GREEDY_GAIN_H

#include <stdint.h>

enum { IBP_CHUNK_BITS = 64 }; /* largest number of bits of a chunk */

/* Returns the number of ones in a word. Compilers turn this function into one instruction if the processor has it. */
static inline uint32_t ibp_count_ones(uint64_t word)
{
    word -= word >> 1 & 0x5555555555555555u;
    word = (word & 0x3333333333333333u) + (word >> 2 & 0x3333333333333333u);
    word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0fu;
    return (uint32_t)(word * 0x0101010101010101u >> 56);
}

/* Returns the number of bits that the greedy choice of a chunk's mask saves in all rows, less the participation bits.
 * columns: bit r of columns[b] is bit b of the chunk in row r. num_rows: 1 to 64. */
static inline uint64_t ibp_greedy_gain(const uint64_t *columns, uint32_t num_bits, uint32_t num_rows)
{
    uint64_t matching = ~(uint64_t)0 >> (64 - num_rows), used = 0;
    uint32_t num_matching = num_rows, best = 0;
    for (uint32_t k = 0; k < num_bits && num_matching * num_bits > num_rows + best;) {
        /* top: the largest key. The key of bit b is 64 * (number of agreeing rows) + 63 - b, so that the lowest of
         * equally good bits wins. */
        uint32_t ones[IBP_CHUNK_BITS], top = 0;
        for (uint32_t b = 0; b < num_bits; b++) ones[b] = ibp_count_ones(columns[b] & matching);
        for (uint32_t b = 0; b < num_bits; b++) {
            const uint32_t agreeing = ones[b] > num_matching - ones[b] ? ones[b] : num_matching - ones[b];
            const uint32_t key = used >> b & 1 ? 0 : 64 * agreeing + 63 - b;
            top = key > top ? key : top;
        }
        const uint32_t at = 63 - top % 64, most = top / 64;
        if (most < num_matching) {
            matching &= 2 * ones[at] > num_matching ? columns[at] : ~columns[at], num_matching = most;
            used |= (uint64_t)1 << at, k++;
        } else { /* all matching rows agree on this bit: add all bits on which they agree at once */
            for (uint32_t b = at; b < num_bits; b++)
                used |= (uint64_t)((ones[b] == 0) | (ones[b] == num_matching)) << b;
            k = ibp_count_ones(used);
        }
        if (num_matching * k > num_rows + best) best = num_matching * k - num_rows;
    }
    return best;
}

#endif
