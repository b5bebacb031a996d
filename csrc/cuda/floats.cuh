// floats.cuh - converts float16 and bfloat16 to and from float. The host code gives the same results as the device's
// instructions.
#ifndef IBP_FLOATS_CUH
#define IBP_FLOATS_CUH

#include "../core/format.h"

#ifndef __CUDACC__
#include <cmath>
#include <cstring>
#endif

namespace ibp {

#ifdef __CUDACC__

__device__ __forceinline__ float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t bits_of_float(float value) { return __float_as_uint(value); }

__device__ __forceinline__ float float_of_bfloat16(uint32_t bits) { return float_of_bits(bits << 16); }
__device__ __forceinline__ float float_of_half(uint32_t half)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(half)));
    return value;
}
// Convert two floats to float16 or bfloat16, and return both in one word, the first one in the low half. Values are
// rounded to the nearest, ties to even; NaN becomes 0x7fff.
__device__ __forceinline__ uint32_t halves_of_floats(float first, float second)
{
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
}
__device__ __forceinline__ uint32_t bfloat16s_of_floats(float first, float second)
{
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
}

#else

inline float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of_bfloat16(uint32_t bits) { return float_of_bits(bits << 16); }
inline float float_of_half(uint32_t half)
{
    const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    const float value = std::ldexp(static_cast<float>(magnitude >= 0x400u ? (magnitude & 0x3ffu) | 0x400u : magnitude),
                                   static_cast<int>(magnitude >= 0x400u ? magnitude >> 10 : 1u) - 25);
    return float_of_bits(bits_of_float(value) | sign);
}
inline uint32_t half_of_float(float value)
{
    const uint32_t sign = bits_of_float(value) >> 16 & 0x8000u;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return 0x7fffu;
    if (magnitude >= 65520.0f) return sign | 0x7c00u;
    int exponent = 0;
    std::frexp(magnitude, &exponent); // magnitude < 2^exponent
    const int unit = exponent < -13 ? -24 : exponent - 11;
    const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -unit)));
    return sign | (unit == -24 ? units : (static_cast<uint32_t>(unit + 24) << 10) + units);
}
inline uint32_t bfloat16_of_float(float value)
{
    const uint32_t bits = bits_of_float(value);
    return std::isnan(value) ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
inline uint32_t halves_of_floats(float first, float second)
{
    return half_of_float(first) | half_of_float(second) << 16;
}
inline uint32_t bfloat16s_of_floats(float first, float second)
{
    return bfloat16_of_float(first) | bfloat16_of_float(second) << 16;
}

#endif

} // namespace ibp

#endif
