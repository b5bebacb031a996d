// source.cuh - an ibp_row_source (ibp_place.h) in the form in which kernels receive it. Its divisors have been replaced
// by multipliers (Divider), because computing the address of a row takes several divisions.
#ifndef IBP_ENCODE_SOURCE_CUH
#define IBP_ENCODE_SOURCE_CUH

#include "encoder.cuh"

namespace ibp {

// A divisor from 1 to 2^31 - 1. Dividing a number below 2^31 by it takes a multiplication and a shift.
struct Divider {
    uint32_t divisor, magic, shift;

    static Divider of(int64_t divisor)
    {
        uint32_t bits = 0;
        while (int64_t{1} << bits < divisor) bits++;
        const uint64_t one = uint64_t{1} << (31u + bits);
        return {static_cast<uint32_t>(divisor), static_cast<uint32_t>((one - 1u) / static_cast<uint64_t>(divisor) + 1u),
                31u + bits};
    }
    // Divides n. Returns the quotient, and leaves the remainder in n.
    __device__ __forceinline__ uint32_t split(uint32_t &n) const
    {
        const auto quotient = static_cast<uint32_t>(uint64_t{n} * magic >> shift);
        n -= quotient * divisor;
        return quotient;
    }
};

struct RowSource {
    const uint8_t *data;
    const uint8_t *const *buffers;
    int64_t num_rows, strides[IBP_MAX_SOURCE_DIMS];
    Divider rows_per_buffer, sizes[IBP_MAX_SOURCE_DIMS];
    uint32_t num_dims, row_bytes, last_row_bytes;

    static RowSource of(const ibp_row_source &source, uint32_t row_bytes)
    {
        RowSource made{source.data, source.buffers, source.num_rows, {}, {}, {}, source.num_dims, row_bytes, row_bytes};
        if (source.last_row_bytes != 0u) made.last_row_bytes = source.last_row_bytes;
        if (source.buffers) made.rows_per_buffer = Divider::of(source.rows_per_buffer);
        for (uint32_t d = 0; d < source.num_dims; d++) {
            made.strides[d] = source.strides[d];
            if (d > 0u) made.sizes[d] = Divider::of(source.sizes[d]);
        }
        return made;
    }

    // Returns row i, 0 <= i < num_rows.
    __device__ __forceinline__ PlainRow row(int64_t i) const
    {
        return {address_of(i), i == num_rows - 1 ? last_row_bytes : row_bytes};
    }

  private:
    __device__ __forceinline__ const uint8_t *address_of(int64_t i) const
    {
        if (buffers == nullptr && num_dims == 0u) return data + i * row_bytes;
        auto number = static_cast<uint32_t>(i);
        const uint8_t *from = data;
        if (buffers != nullptr) from = buffers[rows_per_buffer.split(number)];
        if (num_dims == 0u) return from + int64_t{number} * row_bytes;
#pragma unroll
        for (uint32_t d = IBP_MAX_SOURCE_DIMS - 1u; d > 0u; d--) {
            if (d >= num_dims) continue;
            const uint32_t outer = sizes[d].split(number);
            from += number * strides[d];
            number = outer;
        }
        return from + number * strides[0];
    }
};

} // namespace ibp

#endif
