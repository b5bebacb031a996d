/* ibp_machine.h - features of the processor, GPUs that read each other's memory, and memory that a GPU only reads. */
#ifndef IBP_MACHINE_H
#define IBP_MACHINE_H

#include "ibp_cuda_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Features of the processor that make coding rows in host memory faster. Bytes and statuses do not depend on them. */
typedef enum ibp_cpu_feature {
    IBP_CPU_AVX2_BMI2 = 1,
    IBP_CPU_AVX512 = 2 /* its parts F, BW, DQ, VL, VBMI, VBMI2 and VPOPCNTDQ; never in use without IBP_CPU_AVX2_BMI2 */
} ibp_cpu_feature;

/* Returns the features in use, a sum of ibp_cpu_feature: all that the processor has, unless ibp_set_cpu_features has
 * chosen others. */
IBP_API uint32_t ibp_cpu_features(void);

/* Chooses, for tests and benchmarks, which features all threads use from now on, if the processor has them; 0: plain C
 * code. @return the features in use. */
IBP_API uint32_t ibp_set_cpu_features(uint32_t features);

/* Lets kernels of `device` read the memory of `peer` as long as the process lives. Further calls do no harm.
 * @return IBP_CUDA_ERROR if the hardware cannot do it. */
IBP_API ibp_status ibp_cuda_enable_peer(int device, int peer);

/* Pins memory as ibp_cuda_register_pinned does, if devices only read it, as they do a mapping of a file for reading.
 * @return IBP_CUDA_ERROR if the system cannot pin such memory. */
IBP_API ibp_status ibp_cuda_register_read_only(void *host, size_t num_bytes);

#ifdef __cplusplus
}
#endif
#endif
