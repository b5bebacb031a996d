/* fingerprint_avx512.c - sums the words of a fingerprint, eight at a time. It uses AVX-512 for its instruction that
 * multiplies 64-bit words, which AVX2 does not have. */
#include "../core/schemes.h"

#if IBP_HAS_X86_ROWS
#include "bits_avx512.h"
#include "../core/format.h"

#define WITH_MULTIPLIES __attribute__((target(IBP_AVX512_FEATURES ",avx512dq")))

enum { WORDS = IBP_VECTOR_BYTES / 8 };

static inline WITH_MULTIPLIES __m512i mix_words(__m512i x)
{
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 30));
    x = _mm512_mullo_epi64(x, _mm512_set1_epi64((long long)0xBF58476D1CE4E5B9u));
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 27));
    x = _mm512_mullo_epi64(x, _mm512_set1_epi64((long long)0x94D049BB133111EBu));
    return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}

WITH_MULTIPLIES uint64_t ibp_sum_words_avx512(const uint8_t *words, int64_t num_words, uint64_t first_word)
{
    uint64_t offsets[WORDS];
    for (uint32_t i = 0; i < WORDS; i++) offsets[i] = (first_word + i + 1) * IBP_GOLDEN;
    __m512i offset = _mm512_loadu_si512(offsets), sum = _mm512_setzero_si512();
    const __m512i step = _mm512_set1_epi64((long long)(WORDS * IBP_GOLDEN));
    for (; num_words >= WORDS; num_words -= WORDS, words += IBP_VECTOR_BYTES) {
        sum = _mm512_add_epi64(sum, mix_words(_mm512_add_epi64(_mm512_loadu_si512(words), offset)));
        offset = _mm512_add_epi64(offset, step);
    }
    const __mmask8 rest = (__mmask8)((1u << num_words) - 1);
    const __m512i last = mix_words(_mm512_add_epi64(_mm512_maskz_loadu_epi64(rest, words), offset));
    uint64_t sums[WORDS], total = 0; /* added one by one as unsigned numbers, because the intrinsic that adds the words
                                        of a vector adds signed numbers */
    _mm512_storeu_si512(sums, _mm512_mask_add_epi64(sum, rest, sum, last));
    for (uint32_t i = 0; i < WORDS; i++) total += sums[i];
    return total;
}

#endif
