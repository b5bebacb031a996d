/* bits.h - reads and writes bit fields at any position of byte buffers, for the plain C coders. */
#ifndef IBP_BITS_H
#define IBP_BITS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Calls function(..., n) for n = 1, 2, 4 or 8. If the function is inlined, n is a constant in it. */
#define IBP_BY_SIZE(n, function, ...)      \
    ((n) == 1   ? function(__VA_ARGS__, 1) \
     : (n) == 2 ? function(__VA_ARGS__, 2) \
     : (n) == 4 ? function(__VA_ARGS__, 4) \
                : function(__VA_ARGS__, 8))

/* Loads a number of up to 8 bytes. */
static inline uint64_t ibp_load_number(const void *src, size_t num_bytes)
{
    uint64_t number = 0;
    memcpy(&number, src, num_bytes);
    return number;
}

/* Loads the bits that begin at a bit position; at least 57 of them are valid. Bits past the end of src read as zero. */
static inline uint64_t ibp_load_bits(const uint8_t *src, size_t src_bytes, size_t position)
{
    const size_t byte = position / 8;
    uint64_t bits = 0;
    if (byte + 8 <= src_bytes)
        memcpy(&bits, src + byte, 8);
    else
        for (size_t i = byte; i < src_bytes; i++) bits |= (uint64_t)src[i] << (8 * (i - byte));
    return bits >> (position % 8);
}

static inline uint64_t ibp_low_bits(uint64_t value, uint32_t num_bits)
{
    return num_bits >= 64 ? value : value & (((uint64_t)1 << num_bits) - 1);
}

/* Loads a field of up to 64 bits. */
static inline uint64_t ibp_load_field(const uint8_t *src, size_t src_bytes, size_t position, uint32_t num_bits)
{
    uint64_t bits = ibp_load_bits(src, src_bytes, position);
    if (num_bits > 32) {
        bits = ibp_low_bits(bits, 32);
        bits |= ibp_load_bits(src, src_bytes, position + 32) << 32;
    }
    return ibp_low_bits(bits, num_bits);
}

/* ORs a field of up to 64 bits into a buffer whose bits must still be zero there. `bits` must have no bits above the
 * field. Bits past the end of the buffer are dropped. This happens only if a row changes while it is coded, or if a
 * codebook is wrong. */
static inline void ibp_or_bits(uint8_t *dst, size_t dst_bytes, size_t position, uint64_t bits)
{
    const uint32_t shift = position % 8;
    size_t byte = position / 8;
    if (bits == 0 || byte >= dst_bytes) return;
    dst[byte] |= (uint8_t)(bits << shift);
    for (bits >>= 8 - shift; bits != 0 && ++byte < dst_bytes; bits >>= 8) dst[byte] |= (uint8_t)bits;
}

#endif
