/* ibp_machine.h - features of the processor, GPUs that read each other's memory, and memory that a GPU only reads. */
#ifndef IBP_MACHINE_H
#define IBP_MACHINE_H

#include "ibp_cuda_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Features of the processor that functions for host memory use for rows where it has them. Bytes and statuses are the
 * same without. */
typedef enum ibp_cpu_feature {
    IBP_CPU_AVX2_BMI2 = 1,
    IBP_CPU_AVX512 = 2 /* F, BW, DQ, VL, VBMI, VBMI2 and VPOPCNTDQ of it; never in use without IBP_CPU_AVX2_BMI2 */
} ibp_cpu_feature;

/* The features in use, a sum of ibp_cpu_feature: all that the processor has, unless set otherwise. */
IBP_API uint32_t ibp_cpu_features(void);
/* Uses those of the given features that the processor has, in all threads from now on: for tests and benchmarks, 0
 * being the plain C code. @return the features in use. */
IBP_API uint32_t ibp_set_cpu_features(uint32_t features);

/* Lets kernels of `device` read the memory of `peer`, for maps and slabs that are there. Once is enough, for as long as
 * the process lives; more often does no harm.
 * @return IBP_CUDA_ERROR where the two cannot. */
IBP_API ibp_status ibp_cuda_enable_peer(int device, int peer);

/* The same of memory that devices only read, such as a file that is mapped so: where the system lets. */
IBP_API ibp_status ibp_cuda_register_read_only(void *host, size_t num_bytes);

#ifdef __cplusplus
}
#endif
#endif
