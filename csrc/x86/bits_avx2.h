/* bits_avx2.h - reads and writes bit fields of byte buffers with the parallel deposit and extract instructions of BMI2,
 * for the coders that need IBP_CPU_AVX2_BMI2. */
#ifndef IBP_BITS_AVX2_H
#define IBP_BITS_AVX2_H

#include "../core/bits.h"

#include "../core/schemes.h"

#include <immintrin.h>

#define IBP_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define IBP_AVX2_INLINE static inline __attribute__((always_inline, target("avx2,bmi,bmi2,popcnt")))

enum { IBP_AVX2_PADDING = 32 }; /* number of bytes past the end of an input that the functions below may read */

IBP_AVX2_INLINE uint64_t ibp_load64(const uint8_t *src)
{
    uint64_t x;
    memcpy(&x, src, 8);
    return x;
}

IBP_AVX2_INLINE void ibp_store64(uint8_t *dst, uint64_t x) { memcpy(dst, &x, 8); }

/* Loads the 64 bits that begin at a bit position. Reads 9 bytes. */
IBP_AVX2_INLINE uint64_t ibp_load64_at(const uint8_t *src, size_t position)
{
    const uint8_t *const at = src + position / 8;
    const uint32_t shift = position % 8;
    return ibp_load64(at) >> shift | ((uint64_t)at[8] << 1) << (63 - shift);
}

/* Returns a word with the low `bits` bits of each of its lanes set. */
IBP_AVX2_INLINE uint64_t ibp_lane_fields(uint32_t lane_bytes, uint32_t bits)
{
    return ~(uint64_t)0 / ibp_low_bits(~(uint64_t)0, 8 * lane_bytes) * ibp_low_bits(~(uint64_t)0, bits);
}

/* Unpacks n fields of `bits` bits from src into the low bits of n lanes. out: exactly n * lane_bytes bytes. */
IBP_AVX2_INLINE void ibp_unpack_fields(const uint8_t *src, uint32_t n, uint32_t bits, uint32_t lane_bytes, uint8_t *out)
{
    const uint64_t fields = ibp_lane_fields(lane_bytes, bits);
    const uint32_t step = 8 / lane_bytes * bits;
    const size_t end = (size_t)n * lane_bytes;
    size_t position = 0, at = 0;
    if (step <= 57)
        for (; at + 8 <= end; at += 8, position += step)
            ibp_store64(out + at, _pdep_u64(ibp_load64(src + position / 8) >> (position % 8), fields));
    else
        for (; at + 8 <= end; at += 8, position += step)
            ibp_store64(out + at, _pdep_u64(ibp_load64_at(src, position), fields));
    const uint64_t last = at < end ? _pdep_u64(ibp_load64_at(src, position), fields) : 0;
    memcpy(out + at, &last, end - at);
}

/* Returns a mask that coders apply to the position in an entry of flags. The mask has as many bits as num_flags has in
 * binary, so even a wrong position becomes less than 2 * num_flags. */
static inline uint32_t ibp_position_mask(uint32_t num_flags)
{
    return num_flags == 0 ? 0 : UINT32_MAX >> __builtin_clz(num_flags);
}

/* Copies a coded row to scratch and appends zeros: at least `padding` bytes, and more if the copy would otherwise have
 * less than least_bytes bytes. Returns the copy. */
static inline const uint8_t *ibp_pad_row(const uint8_t *src, size_t src_bytes, size_t least_bytes, size_t padding,
                                         ibp_scratch *scratch)
{
    const size_t end = src_bytes + padding > least_bytes ? src_bytes + padding : least_bytes;
    uint8_t *const padded = ibp_take(scratch, end);
    memcpy(padded, src, src_bytes);
    memset(padded + src_bytes, 0, end - src_bytes);
    return padded;
}

/* A writer that appends bits to a buffer, up to 64 at a time. Bits past the end of the buffer are dropped. */
typedef struct ibp_bit_writer {
    uint8_t *dst;
    size_t dst_bytes, at; /* at: the byte that bit 0 of `bits` goes to */
    uint64_t bits;
    uint32_t filled; /* number of bits in `bits`, less than 64 */
} ibp_bit_writer;

/* Stores the appended bits that are still in `bits`, followed by zeros. */
IBP_AVX2_INLINE void ibp_flush_bits(const ibp_bit_writer *w)
{
    if (w->at + 8 <= w->dst_bytes)
        ibp_store64(w->dst + w->at, w->bits);
    else if (w->at < w->dst_bytes)
        memcpy(w->dst + w->at, &w->bits, w->dst_bytes - w->at);
}

/* Appends the low num_bits bits of `bits`. num_bits is at most 64. The higher bits must be 0. */
IBP_AVX2_INLINE void ibp_append_bits(ibp_bit_writer *w, uint64_t bits, uint32_t num_bits)
{
    w->bits |= bits << w->filled;
    ibp_flush_bits(w);
    const uint64_t rest = (bits >> 1) >> (63 - w->filled);
    w->filled += num_bits;
    w->bits = w->filled >= 64 ? rest : w->bits;
    w->at += w->filled / 64 * 8;
    w->filled %= 64;
}

/* Joins two runs of bits in the buffer of the second run. The first run has been written to a separate buffer. The last
 * byte of that buffer has the index of the byte that both runs share. In its own buffer, the second run begins in the
 * byte with this index, at the bit after the first run. Returns the size of both runs together in bytes. If it is
 * larger than the second buffer, the runs are not joined. */
IBP_AVX2_INLINE size_t ibp_join_runs(const ibp_bit_writer *first, const ibp_bit_writer *second)
{
    ibp_flush_bits(first);
    ibp_flush_bits(second);
    const size_t num_bytes = second->at + (second->filled + 7) / 8, shared = first->dst_bytes - 1;
    const size_t filled = first->at + first->filled / 8,
                 whole = filled < shared ? filled : shared; /* a wrong codebook may have more flagged chunks than
                                                               flags */
    if (num_bytes > second->dst_bytes) return num_bytes;
    memcpy(second->dst, first->dst, whole);
    if (first->filled % 8 && whole < num_bytes) second->dst[whole] |= first->dst[whole];
    return num_bytes;
}

/* Packs the low `bits` bits of n lanes into dst, beginning at byte `at`, and writes zeros after them. This is the
 * inverse of ibp_unpack_fields. lanes: the array must be readable up to the next multiple of 8 bytes, and the lanes
 * after lane n - 1 must be 0. dst: dst_bytes bytes; fields past its end are dropped. */
IBP_AVX2_INLINE void ibp_pack_fields(const uint8_t *lanes, uint32_t n, uint32_t bits, uint32_t lane_bytes, uint8_t *dst,
                                     size_t at, size_t dst_bytes)
{
    const uint64_t fields = ibp_lane_fields(lane_bytes, bits);
    const uint32_t step = 8 / lane_bytes * bits;
    const size_t end = (size_t)n * lane_bytes;
    size_t i = 0;
    if (step % 8 == 0) /* 8 bytes of lanes always make whole bytes of fields */
        for (; i + 8 <= end && at + 8 <= dst_bytes; i += 8, at += step / 8)
            ibp_store64(dst + at, _pext_u64(ibp_load64(lanes + i), fields));
    ibp_bit_writer w = {dst, dst_bytes, at, 0, 0};
    for (; i < end; i += 8) ibp_append_bits(&w, _pext_u64(ibp_load64(lanes + i), fields), step);
    ibp_flush_bits(&w);
}

#endif
