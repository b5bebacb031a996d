/* bits_avx512.h - loads and stores complete and partial vectors of 64 bytes for the coders that need IBP_CPU_AVX512. */
#ifndef IBP_BITS_AVX512_H
#define IBP_BITS_AVX512_H

#include "bits_avx2.h"

#define IBP_AVX512_FEATURES "avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,avx512vpopcntdq"
#define IBP_AVX512 __attribute__((target(IBP_AVX512_FEATURES)))
#define IBP_AVX512_INLINE static inline __attribute__((always_inline, target(IBP_AVX512_FEATURES)))

enum { IBP_VECTOR_BYTES = 64 };

/* Returns a mask of the first num_bytes bytes of a vector. */
IBP_AVX512_INLINE __mmask64 ibp_first_bytes(size_t num_bytes)
{
    return _bzhi_u64(~(uint64_t)0, num_bytes < IBP_VECTOR_BYTES ? (uint32_t)num_bytes : IBP_VECTOR_BYTES);
}

/* Load and store the first num_bytes bytes of a vector, or the whole vector if num_bytes is larger. The other bytes of
 * the vector are loaded as zeros; memory past the first num_bytes bytes is neither read nor written. */
IBP_AVX512_INLINE __m512i ibp_load_part(const void *src, size_t num_bytes)
{
    return num_bytes >= IBP_VECTOR_BYTES ? _mm512_loadu_si512(src)
                                         : _mm512_maskz_loadu_epi8(ibp_first_bytes(num_bytes), src);
}
IBP_AVX512_INLINE void ibp_store_part(uint8_t *dst, size_t num_bytes, __m512i x)
{
    if (num_bytes >= IBP_VECTOR_BYTES)
        _mm512_storeu_si512(dst, x);
    else
        _mm512_mask_storeu_epi8(dst, ibp_first_bytes(num_bytes), x);
}

#endif
