/* cpu.c - chooses which features of the processor the row coders use. The features are looked up once, unless
 * ibp_set_cpu_features has chosen them before. */
#include "../core/schemes.h"

#include <stdatomic.h>

enum { NOT_LOOKED_UP = 1u << 31 };

static uint32_t supported_features(void)
{
#if IBP_HAS_X86_ROWS
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
                        __builtin_cpu_supports("avx512vpopcntdq");
    return (avx2 ? IBP_CPU_AVX2_BMI2 : 0u) | (avx512 ? IBP_CPU_AVX512 : 0u);
#else
    return 0;
#endif
}

/* Threads that look the features up at the same time store the same value. */
static _Atomic uint32_t features_in_use = NOT_LOOKED_UP;

uint32_t ibp_cpu_features(void)
{
    const uint32_t features = atomic_load_explicit(&features_in_use, memory_order_relaxed);
    return features != NOT_LOOKED_UP ? features : ibp_set_cpu_features(UINT32_MAX);
}

uint32_t ibp_set_cpu_features(uint32_t features)
{
    features &= supported_features();
    if (!(features & IBP_CPU_AVX2_BMI2)) features = 0;
    atomic_store_explicit(&features_in_use, features, memory_order_relaxed);
    return features;
}
