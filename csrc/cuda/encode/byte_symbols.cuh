// byte_symbols.cuh - 16 bytes of a dense row of scheme planes as symbols of up to a byte, side by side, and residuals
// as they are stored (FORMAT.md section 6), for the encoders of encode_pairs.cuh and encode_fast.cuh.
#ifndef IBP_ENCODE_BYTE_SYMBOLS_CUH
#define IBP_ENCODE_BYTE_SYMBOLS_CUH

#include "../digits.cuh"
#include "../kinds.h"
#include "encoder.cuh"

namespace ibp {

template <typename T> struct ByteSymbols {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "elements that have residuals of a byte or more");
    static constexpr uint32_t kPerLane = kVector / sizeof(T), kPerWord = 4u / sizeof(T);
    static constexpr uint32_t kWords = kPerLane / 4u; // that hold a byte of each element of a lane
    static constexpr uint32_t kOnes = sizeof(T) == 2 ? 0x00010001u : 1u, kAllOfOne = 0xffffffffu / kOnes;
    const uint32_t row_bytes, columns, bits, residual_bits, symbol_bits, invariant_bits, rotate;
    const uint32_t invariant; // the invariant bits' value, in each element of a word

    __device__ __forceinline__ explicit ByteSymbols(const ibp_codebook &cb)
        : row_bytes(cb.row_bytes), columns(cb.row_bytes / static_cast<uint32_t>(sizeof(T))),
          bits(8u * sizeof(T) - cb.planes.invariant_bits), residual_bits(cb.planes.residual_bits),
          symbol_bits(bits_of_symbol(cb.planes)), invariant_bits(cb.planes.invariant_bits), rotate(cb.planes.rotate),
          invariant(static_cast<uint32_t>(cb.planes.invariant_value) * kOnes)
    {
    }

    // Makes the elements of a lane past the first num ones such that they differ in no invariant bit and leave no
    // residual.
    __device__ __forceinline__ void fill_up(uint32_t (&word)[4], uint32_t num) const
    {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t left = num > kPerWord * i ? num - kPerWord * i : 0u,
                           held = low_bits(~0u, 8u * static_cast<uint32_t>(sizeof(T)) * left);
            word[i] = (word[i] & held) | (invariant & ~held);
        }
    }
    // Splits a lane's elements. Returns bits that are set where invariant bits are not what they should be.
    __device__ __forceinline__ uint32_t split(uint32_t (&word)[4], uint32_t (&symbols)[kWords],
                                              uint32_t (&residuals)[4]) const
    {
        uint32_t differ = 0;
        if (invariant_bits != 0u) {
            const uint32_t of_invariant = low_bits(kAllOfOne, invariant_bits) * kOnes,
                           of_rest = kAllOfOne >> invariant_bits % 32u;
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                differ |= (word[i] ^ invariant) & of_invariant;
                word[i] = word[i] >> invariant_bits % 32u & of_rest * kOnes;
            }
        }
        if (rotate != 0u) {
            const uint32_t above_lowest = low_bits(kAllOfOne, bits) * kOnes & ~kOnes;
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                word[i] = (word[i] << 1 & above_lowest) | (word[i] >> (bits - 1u) % 32u & kOnes);
        }
        if (sizeof(T) == 2 && residual_bits == 8u) {
            symbols[0] = permute_bytes(word[0], word[1], 0x7531);
            symbols[1 % kWords] = permute_bytes(word[2], word[3], 0x7531);
            residuals[0] = permute_bytes(word[0], word[1], 0x6420);
            residuals[1] = permute_bytes(word[2], word[3], 0x6420);
            residuals[2] = residuals[3] = 0;
        } else if (sizeof(T) == 4 && residual_bits == 24u) {
            symbols[0] =
                permute_bytes(permute_bytes(word[0], word[1], 0x73), permute_bytes(word[2], word[3], 0x73), 0x5410);
            residuals[0] = permute_bytes(word[0], word[1], 0x4210);
            residuals[1] = permute_bytes(word[1], word[2], 0x5421);
            residuals[2] = permute_bytes(word[2], word[3], 0x6542);
            residuals[3] = 0;
        } else {
            split_bits(word, symbols, residuals);
        }
        return differ;
    }

    // Appends every one of four symbols whose byte in `escaped` is not 0.
    static __device__ __forceinline__ void append(uint8_t *&to, uint32_t symbols, uint32_t escaped)
    {
#pragma unroll
        for (uint32_t e = 0; e < 4; e++)
            if ((escaped >> 8u * e & 0xffu) != 0u) *to++ = static_cast<uint8_t>(symbols >> 8u * e);
    }

  private:
    // Residuals of any width: two halves of num_bits each, one behind the other.
    __device__ __forceinline__ void split_bits(const uint32_t (&word)[4], uint32_t (&symbols)[kWords],
                                               uint32_t (&residuals)[4]) const
    {
        const uint32_t r = residual_bits, of_symbol = low_bits(0xffu, symbol_bits) * kOnes,
                       of_residual = low_bits(kAllOfOne, r);
        uint32_t symbol[4];
        uint64_t fields[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            symbol[i] = (r < 32u ? word[i] >> r : 0u) & of_symbol;
            fields[i] = word[i] & of_residual;
            if (sizeof(T) == 2) fields[i] |= uint64_t{word[i] >> 16 & of_residual} << r;
        }
        if (sizeof(T) == 2) {
            symbols[0] = permute_bytes(symbol[0], symbol[1], 0x6420);
            symbols[1 % kWords] = permute_bytes(symbol[2], symbol[3], 0x6420);
        } else {
            symbols[0] = permute_bytes(permute_bytes(symbol[0], symbol[1], 0x40),
                                       permute_bytes(symbol[2], symbol[3], 0x40), 0x5410);
        }
        const uint32_t field_bits = kPerWord * r, num_bits = 2u * field_bits;
        const uint64_t low = fields[0] | fields[1] << field_bits, high = fields[2] | fields[3] << field_bits;
        const uint64_t first = num_bits < 64u ? low | high << num_bits : low,
                       second = num_bits == 0u ? 0u : high >> (64u - num_bits);
        residuals[0] = static_cast<uint32_t>(first), residuals[1] = static_cast<uint32_t>(first >> 32);
        residuals[2] = static_cast<uint32_t>(second), residuals[3] = static_cast<uint32_t>(second >> 32);
    }
};

} // namespace ibp

#endif
