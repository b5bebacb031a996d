/* schemes.h - the row coders behind ibp_coded_row_bytes, ibp_encode_row and ibp_decode_row: one set a scheme and kind of processor, all
 * with the contracts of ibp.h, the same bytes and the same statuses. The plain C ones are the oracle. */
#ifndef IBP_SCHEMES_H
#define IBP_SCHEMES_H

#include "ibp.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define IBP_HAS_X86_ROWS 1
#else
#define IBP_HAS_X86_ROWS 0
#endif

/* coded_bytes: NULL where nothing is faster than to encode to no bytes at all. */
typedef struct ibp_row_coder {
    size_t (*coded_bytes)(const ibp_codebook *codebook, const uint8_t *row);
    ibp_status (*encode)(const ibp_codebook *codebook, const uint8_t *row, uint8_t *dst, size_t dst_bytes, size_t *coded_bytes);
    ibp_status (*decode)(const ibp_codebook *codebook, const uint8_t *src, size_t src_bytes, uint8_t *row);
} ibp_row_coder;

extern const ibp_row_coder ibp_masks_plain, ibp_planes_plain;
#if IBP_HAS_X86_ROWS
extern const ibp_row_coder ibp_masks_avx2, ibp_planes_avx2;       /* for processors with IBP_CPU_AVX2_BMI2 */
extern const ibp_row_coder ibp_masks_avx512, ibp_planes_avx512; /* with IBP_CPU_AVX512 too */
#endif

#endif
