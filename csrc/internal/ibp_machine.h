/* ibp_machine.h - finds and chooses features of the processor, lists the architectures of the kernels, lets GPUs read
 * each other's memory, and pins memory that GPUs only read. */
#ifndef IBP_MACHINE_H
#define IBP_MACHINE_H

#include "ibp_cuda_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Features of the processor that make coding in host memory faster. Bytes and statuses do not depend on them. */
typedef enum ibp_cpu_feature {
    IBP_CPU_AVX2_BMI2 = 1,
    IBP_CPU_AVX512 = 2 /* AVX-512 F, BW, DQ, VL, VBMI, VBMI2 and VPOPCNTDQ; never in use without IBP_CPU_AVX2_BMI2 */
} ibp_cpu_feature;

/* Returns the features in use, as a sum of values of ibp_cpu_feature. All features that the processor has are in use,
 * unless ibp_set_cpu_features has chosen others. */
IBP_API uint32_t ibp_cpu_features(void);

/* Chooses the features that all threads use after this call, for tests and benchmarks. Features that the processor does
 * not have are left out; 0 chooses plain C code.
 *
 * @return the features in use. */
IBP_API uint32_t ibp_set_cpu_features(uint32_t features);

/* Returns the compute capabilities that the kernels of this build were compiled for, each times 100, with commas
 * between them, such as "800,900"; "" if the build has no kernels. */
IBP_API const char *ibp_cuda_architectures(void);

/* Pins memory that devices only read, such as a read-only mapping of a file, as ibp_cuda_register_pinned does.
 *
 * @return IBP_CUDA_ERROR if the system cannot pin such memory. */
IBP_API ibp_status ibp_cuda_register_read_only(void *host, size_t num_bytes);

#ifdef __cplusplus
}
#endif
#endif
