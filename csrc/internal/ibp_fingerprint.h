/* ibp_fingerprint.h - fingerprints of tensors (FORMAT.md, section 10).
 *
 *     uint64_t fingerprint_of_two(const uint8_t *first, int64_t first_bytes, const uint8_t *second, int64_t second_bytes)
 *     {
 *         uint64_t sum = 0; // first_bytes is a multiple of 8
 *         ibp_sum_words(first, first_bytes, 0, &sum);
 *         ibp_sum_words(second, second_bytes, (uint64_t)first_bytes / 8, &sum);
 *         return ibp_finish_fingerprint(sum, first_bytes + second_bytes);
 *     }
 */
#ifndef IBP_FINGERPRINT_H
#define IBP_FINGERPRINT_H

#include "ibp_cuda_device.h"
#include "ibp_status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Adds to *sum the contribution of a part of a tensor to its fingerprint. Parts may come in any order.
 *
 * part, num_bytes: the bytes of the part, at any alignment. num_bytes is a multiple of 8 except for the last part.
 * first_word: the number of the tensor's 8-byte word that the part begins with. */
IBP_API ibp_status ibp_sum_words(const uint8_t *part, int64_t num_bytes, uint64_t first_word, uint64_t *sum);

/* Returns the fingerprint of a tensor of num_bytes bytes.
 *
 * sum: starts at 0; ibp_sum_words has added all parts of the tensor to it. */
IBP_API uint64_t ibp_finish_fingerprint(uint64_t sum, int64_t num_bytes);

/* Returns the fingerprint of num_bytes bytes at any alignment. */
IBP_API uint64_t ibp_fingerprint(const uint8_t *data, int64_t num_bytes);

/* The arguments of ibp_sum_words for a part of a tensor in device memory. sum is in device memory, too, and is aligned
 * to 8 bytes. */
typedef struct ibp_summed_part {
    const uint8_t *data;
    int64_t num_bytes;
    uint64_t first_word;
    uint64_t *sum;
} ibp_summed_part;

/* Does on a GPU what ibp_sum_words does for each of many parts, by one launch for up to 96 parts.
 *
 * parts: num_parts structs in host memory, which is read before the function returns. Several parts may have the same
 *   sum. */
IBP_API ibp_status ibp_cuda_sum_words(const ibp_summed_part *parts, int64_t num_parts, ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
