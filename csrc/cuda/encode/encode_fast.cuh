// encode_fast.cuh - encodes dense rows of scheme planes with one plane of digits of four bits over consecutive symbols
// (FORMAT.md section 6). Elements must be rotated, their symbols must be exponents of 8 bits, and rows must consist of
// whole vectors of 16 bytes. Most codebooks that level="fast" makes for floats are of this kind.
//
//     | residuals: 1 or 3 bytes for each element | digits: 4 bits for each element | escaped symbols: 1 byte each |
//
// 1. A lane loads vectors of 16 bytes, and splits their elements into symbols and residuals (split).
// 2. A subtraction and a comparison make the digits of four symbols at once (digits_of).
// 3. A lane's residuals and digits are whole bytes, and their positions in the stage depend only on the column. The
//    lane stores them there (put).
// 4. Escapes are rare. A vote says whether a step has escapes. If so, the escaped symbols are counted and appended
//    (append_escaped).
#ifndef IBP_ENCODE_FAST_CUH
#define IBP_ENCODE_FAST_CUH

#include "../digits.cuh"
#include "../kinds.h"
#include "encoder.cuh"

namespace ibp {

template <typename T, uint32_t THREADS> struct FastEncoder {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "elements must have two or four bytes");
    using Group = EncodeGroup<THREADS>;
    using G = Group;
    static constexpr uint32_t kBlocks = 1;
    static constexpr bool kFillsStage = true;
    // Number of words that hold one byte for each element of a vector.
    static constexpr uint32_t kWords = kVector / sizeof(T) / 4u;
    static constexpr uint32_t kResidualBytes = sizeof(T) - 1u; // size of a residual in bytes
    static constexpr uint32_t kSteps = 2, kStepBytes = kVector * THREADS, kEscape = 15;
    static constexpr uint32_t kHigh = 0x80808080u, kBytes = 0x01010101u;
    const uint32_t row_bytes, columns, first_symbol; // first_symbol: repeated in each byte

    static __host__ __device__ __forceinline__ uint32_t table_bytes(const ibp_codebook &) { return 0; }
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &) { return 0; }
    __device__ __forceinline__ FastEncoder(const ibp_codebook &cb, uint32_t *)
        : row_bytes(cb.row_bytes), columns(cb.row_bytes / static_cast<uint32_t>(sizeof(T))),
          first_symbol((static_cast<uint32_t>(cb.planes.first_symbol) & 0xffu) * kBytes)
    {
    }
    __device__ __forceinline__ void select(const ibp_codebook &, uint32_t) {}

    // Returns the digits of four symbols, one in each byte. escaped: receives a word in which the highest bit of each
    // byte is set if the digit is an escape.
    __device__ __forceinline__ uint32_t digits_of(uint32_t symbols, uint32_t &escaped) const
    {
        // ahead: each symbol minus first_symbol, modulo 256. The subtraction does not borrow from the next byte.
        const uint32_t difference = (symbols | kHigh) - (first_symbol & ~kHigh);
        const uint32_t ahead = difference ^ ((symbols ^ ~first_symbol) & kHigh);
        escaped = (((ahead & ~kHigh) + (0x80u - kEscape) * kBytes) | ahead) & kHigh;
        return (ahead | (escaped >> 7u) * kEscape) & kEscape * kBytes;
    }
    // Splits the elements of a vector into symbols and residuals, and packs the symbols and the residuals each into
    // consecutive bytes.
    static __device__ __forceinline__ void split(const uint32_t (&word)[4], uint32_t (&symbols)[kWords],
                                                 uint32_t (&residuals)[3])
    {
        if constexpr (sizeof(T) == 2) {
#pragma unroll
            for (uint32_t w = 0; w < 2u; w++) {
                // Each 16-bit element must be rotated left by one, so that its sign becomes its lowest bit. The shift
                // of a whole word carries the sign of the lower element into the upper one instead, so the lowest bits
                // are replaced by each element's own sign.
                const uint32_t low = word[2 * w] << 1, high = word[2 * w + 1] << 1,
                               signs = replicate_signs<0xfdb9>(word[2 * w], word[2 * w + 1]);
                symbols[w] = permute_bytes(low, high, 0x7531);
                residuals[w] = select_bits(0x01010101u, signs, permute_bytes(low, high, 0x6420));
            }
        } else {
            uint32_t rotated[4];
#pragma unroll
            for (uint32_t i = 0; i < 4u; i++) rotated[i] = __funnelshift_l(word[i], word[i], 1);
            symbols[0] = permute_bytes(permute_bytes(rotated[0], rotated[1], 0x73),
                                       permute_bytes(rotated[2], rotated[3], 0x73), 0x5410);
            residuals[0] = permute_bytes(rotated[0], rotated[1], 0x4210);
            residuals[1] = permute_bytes(rotated[1], rotated[2], 0x5421);
            residuals[2] = permute_bytes(rotated[2], rotated[3], 0x6542);
        }
    }
    __device__ __forceinline__ uint32_t default_bytes() const { return ~0u; }
    // Returns the size of the coded row in bits.
    __device__ __forceinline__ uint32_t measure(const PlainRow &row) const
    {
        uint32_t num_escaped[1] = {0};
        for (uint32_t first = kVector * G::rank(); first < row_bytes; first += kStepBytes) {
            uint32_t word[4], symbols[kWords], residuals[3], escaped;
            row.load(first, word);
            split(word, symbols, residuals);
#pragma unroll
            for (uint32_t w = 0; w < kWords; w++) {
                digits_of(symbols[w], escaped);
                num_escaped[0] += ibp_popcount(escaped);
            }
        }
        G::sum(num_escaped);
        return 8u * (columns * kResidualBytes + columns / 2u + num_escaped[0]);
    }

    static __device__ __forceinline__ void put(const uint32_t (&residuals)[3], uint32_t digits, uint8_t *to_residuals,
                                               uint8_t *to_digits)
    {
        if constexpr (sizeof(T) == 2) {
            *reinterpret_cast<uint2 *>(to_residuals) = make_uint2(residuals[0], residuals[1]);
            *reinterpret_cast<uint32_t *>(to_digits) = digits;
        } else {
#pragma unroll
            for (uint32_t i = 0; i < 3u; i++) reinterpret_cast<uint32_t *>(to_residuals)[i] = residuals[i];
            *reinterpret_cast<uint16_t *>(to_digits) = static_cast<uint16_t>(digits);
        }
    }
    // Appends those of four symbols that are escaped, and advances `to` past them.
    static __device__ __forceinline__ void append(uint8_t *&to, uint32_t symbols, uint32_t escaped)
    {
#pragma unroll
        for (uint32_t e = 0; e < 4; e++)
            if ((escaped >> 8u * e & 0xffu) != 0u) *to++ = static_cast<uint8_t>(symbols >> 8u * e);
    }
    // Stores the escaped symbols of kSteps vectors of every lane at `to`, if `room` bytes are enough for all of them.
    // Returns the number of escaped symbols.
    static __device__ __noinline__ uint32_t append_escaped(uint4 symbols, uint4 escaped, uint8_t *to, uint32_t room)
    {
        static_assert(kSteps * kWords <= 4u, "a vector must hold the symbols of all steps");
        const uint32_t of_symbols[4] = {symbols.x, symbols.y, symbols.z, symbols.w},
                       of_escaped[4] = {escaped.x, escaped.y, escaped.z, escaped.w};
        uint32_t counts[1] = {}, before[1], total[1];
#pragma unroll
        for (uint32_t i = 0; i < kSteps * kWords; i++) counts[0] += ibp_popcount(of_escaped[i]) << 16u * (i / kWords);
        G::scan(counts, before, total);
        const uint32_t of_first = total[0] & 0xffffu, count = of_first + (total[0] >> 16);
        if (count > room) return count;
#pragma unroll
        for (uint32_t s = 0; s < kSteps; s++) {
            uint8_t *at = to + (s == 0u ? before[0] & 0xffffu : of_first + (before[0] >> 16));
#pragma unroll
            for (uint32_t w = 0; w < kWords; w++) append(at, of_symbols[s * kWords + w], of_escaped[s * kWords + w]);
        }
        return count;
    }

    // Encodes a row into a stage. Returns the byte at which the coded row ends, or kNoCodedForm if the coded row would
    // be too long even without escapes.
    __device__ __forceinline__ uint32_t encode(const PlainRow &row, const BitStage &stage, uint32_t start_bit,
                                               uint32_t most_bytes) const
    {
        uint8_t *const residuals = reinterpret_cast<uint8_t *>(stage.words), *const digits =
                                                                                 residuals + columns * kResidualBytes;
        uint32_t end = columns * kResidualBytes + columns / 2u; // the byte at which the coded row ends so far
        if (end > most_bytes || start_bit != 0u) return kNoCodedForm;
        const bool is_whole = row.is_whole(row_bytes);
#pragma unroll 1
        for (uint32_t base = 0; base < row_bytes; base += kSteps * kStepBytes) {
            const uint32_t first = base + kVector * G::rank();
            uint32_t word[kSteps][4] = {}, symbols[4] = {}, escaped[4] = {}, any = 0;
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++)
                if (first + s * kStepBytes < row_bytes) row.load(first + s * kStepBytes, is_whole, word[s]);
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                if (first + s * kStepBytes >= row_bytes) continue;
                uint32_t of_lane[3], of_step[kWords], found[kWords], packed = 0;
                split(word[s], of_step, of_lane);
#pragma unroll
                for (uint32_t w = 0; w < kWords; w++) {
                    found[w] = digits_of(of_step[w], escaped[s * kWords + w]);
                    found[w] |= found[w] >> 4;
                    symbols[s * kWords + w] = of_step[w];
                    any |= escaped[s * kWords + w];
                }
                packed = permute_bytes(found[0], found[kWords - 1u], 0x6420);
                const uint32_t column = (first + s * kStepBytes) / static_cast<uint32_t>(sizeof(T));
                put(of_lane, packed, residuals + column * kResidualBytes, digits + column / 2u);
            }
            if (G::any(any != 0u))
                end += append_escaped(make_uint4(symbols[0], symbols[1], symbols[2], symbols[3]),
                                      make_uint4(escaped[0], escaped[1], escaped[2], escaped[3]), residuals + end,
                                      most_bytes - ibp_min_u32(end, most_bytes));
        }
        return end;
    }
};

} // namespace ibp

#endif
