/* fingerprint.c - computes the fingerprint of a tensor's bytes (FORMAT.md section 10). */
#include "../internal/ibp_fingerprint.h"
#include "bits.h"
#include "format.h"
#include "schemes.h"

static uint64_t sum_whole_words(const uint8_t *words, int64_t num_words, uint64_t first_word)
{
#if IBP_HAS_X86_ROWS
    if (ibp_cpu_features() & IBP_CPU_AVX512) return ibp_sum_words_avx512(words, num_words, first_word);
#endif
    uint64_t sum = 0;
    for (int64_t i = 0; i < num_words; i++)
        sum += ibp_mix_word(ibp_load_number(words + 8 * i, 8), first_word + (uint64_t)i);
    return sum;
}

ibp_status ibp_sum_words(const uint8_t *part, int64_t num_bytes, uint64_t first_word, uint64_t *sum)
{
    if (num_bytes < 0) return IBP_INVALID_ARGUMENT;
    const int64_t num_words = num_bytes / 8;
    *sum += sum_whole_words(part, num_words, first_word);
    const size_t left = (size_t)num_bytes % 8;
    if (left) *sum += ibp_mix_word(ibp_load_number(part + 8 * num_words, left), first_word + (uint64_t)num_words);
    return IBP_OK;
}

uint64_t ibp_finish_fingerprint(uint64_t sum, int64_t num_bytes) { return sum + ibp_mix((uint64_t)num_bytes); }

uint64_t ibp_fingerprint(const uint8_t *data, int64_t num_bytes)
{
    uint64_t sum = 0;
    return ibp_sum_words(data, num_bytes, 0, &sum) == IBP_OK ? ibp_finish_fingerprint(sum, num_bytes) : 0;
}
