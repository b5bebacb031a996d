// digits.cuh - functions for the digits of scheme planes. They spread digits of two or three bits to nibbles (digits of
// any width: DigitSpread in decode/decode_dense.cuh), find and number escapes, which are digits whose bits are all
// ones, spread residuals over elements, and read shared memory at any byte or bit. Digits in nibbles can select bytes,
// because the instruction `prmt` (permute_bytes in warp.cuh) selects each byte of its result by a nibble.
#ifndef IBP_DIGITS_CUH
#define IBP_DIGITS_CUH

#include "warp.cuh"

namespace ibp {

// Returns the lowest num_bits bits of a value; the whole value if num_bits is its number of bits or more.
template <typename Bits> __device__ __forceinline__ Bits low_bits(Bits value, uint32_t num_bits)
{
#ifdef __CUDACC__
    if constexpr (sizeof(Bits) == 4) {
        uint32_t mask;
        asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(mask) : "r"(num_bits));
        return value & mask;
    }
#endif
    return num_bits >= 8u * sizeof(Bits) ? value : value & ((Bits{1} << num_bits) - 1u);
}

// Rounds a number of bits up to a multiple of 8.
__device__ __forceinline__ uint32_t to_byte(uint32_t bits) { return (bits + 7u) & ~7u; }

// Spreads fields over the elements of a word, one field to the low bits of each element. The fields have num_bits bits
// each, and are packed from bit 0 of `bits`.
template <typename T> __device__ __forceinline__ uint32_t spread_fields(uint32_t bits, uint32_t num_bits)
{
    if (sizeof(T) == 4) return low_bits(bits, num_bits);
    const uint32_t half = sizeof(T) == 2 ? num_bits : 2u * num_bits;
    bits = select_bits(0xffffu, bits, bits << (16u - half)) & low_bits(0xffffu, half) * 0x00010001u;
    if (sizeof(T) == 2) return bits;
    return select_bits(0x00ff00ffu, bits, bits << (8u - num_bits)) & low_bits(0xffu, num_bits) * 0x01010101u;
}

// ---- digits of two bits ----

// Returns, for 16 digits, a word in which the lower bit of each digit's field is set if the digit is an escape.
__device__ __forceinline__ uint32_t escaped_pairs(uint32_t digits) { return digits & digits >> 1 & 0x55555555u; }

// Spreads eight of a word's 16 digits, one to each nibble: the upper eight digits if HIGH, else the lower eight.
template <bool HIGH> __device__ __forceinline__ uint32_t spread_pairs(uint32_t digits)
{
    digits = permute_bytes(digits, 0, HIGH ? 0x4342 : 0x4140);
    digits = either_bits(digits, digits << 4, 0x0f0f0f0fu);
    return either_bits(digits, digits << 2, 0x33333333u);
}

// Returns a word in which bit 0 of every nibble is set if its digit is an escape.
__device__ __forceinline__ uint32_t escaped_nibbles(uint32_t digits) { return digits & digits >> 1 & 0x11111111u; }

// ---- digits of three bits ----

// Spreads eight digits, which are packed from bit 0 of `bits`, one to each nibble.
__device__ __forceinline__ uint32_t spread_triples(uint32_t bits)
{
    bits = select_bits(0xfffu, bits, bits << 4);
    bits = select_bits(0x003f003fu, bits, bits << 2);
    return select_bits(0x07070707u, bits, bits << 1) & 0x77777777u;
}
// Returns a word in which bit 3 of every nibble is set if its digit is an escape.
__device__ __forceinline__ uint32_t escaped_triples(uint32_t nibbles) { return (nibbles + 0x11111111u) & 0x88888888u; }

// ---- escapes among nibbles ----

// Returns a word that holds, in each nibble, the number of escapes in lower nibbles. If the nibble is an escape itself,
// this is its index among the escapes. escaped: bit 0 is set in every nibble that is an escape.
__device__ __forceinline__ uint32_t order_of(uint32_t escaped) { return escaped * 0x11111110u; }
// Returns the number of escapes among eight nibbles. order: the result of order_of(escaped).
__device__ __forceinline__ uint32_t count_of(uint32_t escaped, uint32_t order)
{
    return (order >> 28) + (escaped >> 28);
}

// Returns the highest bits of four bytes, packed into the lowest four bits.
__device__ __forceinline__ uint32_t highest_bits(uint32_t bytes)
{
    return (bytes >> 7 & 0x01010101u) * 0x10204080u >> 28;
}

// ---- unaligned reads of shared memory ----

// A position in shared memory, at any byte or bit.
struct Cursor {
    const uint32_t *words;
    uint32_t shift; // in bits; only its low five bits count

    static __device__ __forceinline__ Cursor at(uint32_t byte) { return {&shared_word(byte / 4u), 8u * byte}; }
    // word() returns the 32 bits that begin i words after the cursor. bits() returns the 32 bits that begin `further`
    // bits after the cursor.
    __device__ __forceinline__ uint32_t word(uint32_t i) const
    {
        return __funnelshift_r(words[i], words[i + 1u], shift);
    }
    __device__ __forceinline__ uint32_t bits(uint32_t further) const
    {
        const uint32_t position = shift % 32u + further;
        return __funnelshift_r(words[position / 32u], words[position / 32u + 1u], position);
    }
};

// Returns the eight bytes of shared memory that begin at byte `first`.
__device__ __forceinline__ uint2 eight_bytes(uint32_t first)
{
    const Cursor cursor = Cursor::at(first);
    return make_uint2(cursor.word(0), cursor.word(1));
}

} // namespace ibp

#endif
