// encode_pairs.cuh - dense rows of scheme planes with digits of two bits and symbols of a byte, the same entries for
// all columns (FORMAT.md section 6): the twin of decode_pairs.cuh.
//
// A lane takes 16 bytes a step. Residuals and digits of plane 0 have whole bytes a lane, at places that are known;
// the symbols of elements that escape go to a list in shared memory, from which plane 1 is coded, and so on, the list
// becoming shorter in place.
// Bound by instruction issue: counters of an H200 showed 53 an element of BF16 before two of four steps were taken
// out of the loop, and 2.8 a cycle of 4.
#ifndef IBP_ENCODE_PAIRS_CUH
#define IBP_ENCODE_PAIRS_CUH

#include "planes.cuh"

namespace ibp {

template <typename T, uint32_t LANES> struct PairsEncoder : PlanesEncoder<T, false, LANES, kConsecutive> {
    using Base = PlanesEncoder<T, false, LANES, kConsecutive>;
    using Group = typename Base::Group;
    using G = Group;
    using Base::codes, Base::columns, Base::planes, Base::row_bytes, Base::symbol_bits;
    static constexpr uint32_t kPerLane = Base::kPerLane, kSteps = 2, kStepBytes = kVector * LANES;
    static constexpr uint32_t kWords = kPerLane / 4u; // that hold a byte of each element of a lane

    using Base::Base;

    // Shared memory of a group behind its stage: the list.
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &cb)
    {
        return (cb.row_bytes / static_cast<uint32_t>(sizeof(T)) + 31u) / 16u * 16u;
    }

    // A byte of each of four symbols' codes: bit 0 is set if they escape the plane, bits 4 and 5 are their digits
    // there.
    __device__ __forceinline__ uint32_t codes_of(uint32_t symbols, uint32_t plane) const
    {
        uint32_t code[4];
#pragma unroll
        for (uint32_t e = 0; e < 4; e++) code[e] = codes[permute_bytes(symbols, 0, 0x4440 + e)];
        const uint32_t order = plane | (4u + plane) << 4;
        return permute_bytes(permute_bytes(code[0], code[1], order), permute_bytes(code[2], code[3], order), 0x5410);
    }
    // The digits of four codes, two bits each.
    static __device__ __forceinline__ uint32_t digits_of(uint32_t code)
    {
        return (code >> 4 & 0x03030303u) * 0x01041040u >> 24;
    }
    static __device__ __forceinline__ uint32_t escaped_of(uint32_t code) { return code & 0x01010101u; }

    // Appends those of four symbols that have escaped.
    static __device__ __forceinline__ void append(uint8_t *&to, uint32_t symbols, uint32_t escaped)
    {
#pragma unroll
        for (uint32_t e = 0; e < 4; e++)
            if (escaped >> 8u * e & 1u) *to++ = static_cast<uint8_t>(symbols >> 8u * e);
    }

    // Splits a lane's elements, rotated, into symbols and residuals side by side.
    __device__ __forceinline__ void split(const uint32_t (&word)[4], uint32_t (&symbols)[kWords],
                                          uint32_t (&residuals)[4]) const
    {
        const uint32_t r = planes.residual_bits;
        if constexpr (sizeof(T) == 4) {
            symbols[0] =
                permute_bytes(permute_bytes(word[0], word[1], 0x73), permute_bytes(word[2], word[3], 0x73), 0x5410);
            residuals[0] = permute_bytes(word[0], word[1], 0x4210),
            residuals[1] = permute_bytes(word[1], word[2], 0x5421);
            residuals[2] = permute_bytes(word[2], word[3], 0x6542), residuals[3] = 0;
        } else if (r == 8u) {
            symbols[0] = permute_bytes(word[0], word[1], 0x7531),
            symbols[1 % kWords] = permute_bytes(word[2], word[3], 0x7531);
            residuals[0] = permute_bytes(word[0], word[1], 0x6420),
            residuals[1] = permute_bytes(word[2], word[3], 0x6420);
            residuals[2] = residuals[3] = 0;
        } else {
            const uint32_t of_symbol = low_bits(0xffffu, 16u - r) * 0x00010001u, of_residual = low_bits(0xffffu, r);
            symbols[0] = permute_bytes(word[0] >> r & of_symbol, word[1] >> r & of_symbol, 0x6420);
            symbols[1 % kWords] = permute_bytes(word[2] >> r & of_symbol, word[3] >> r & of_symbol, 0x6420);
            uint64_t fields[4]; // 2 * r bits each
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                fields[i] = (word[i] & of_residual) | uint64_t{word[i] >> 16 & of_residual} << r;
            const uint64_t low = fields[0] | fields[1] << 2u * r, high = fields[2] | fields[3] << 2u * r;
            const bool fills = r == 16u; // the first 64 bits
            const uint64_t first = fills ? low : low | high << 4u * r, second = fills ? high : high >> (64u - 4u * r);
            residuals[0] = static_cast<uint32_t>(first), residuals[1] = static_cast<uint32_t>(first >> 32);
            residuals[2] = static_cast<uint32_t>(second), residuals[3] = static_cast<uint32_t>(second >> 32);
        }
    }

    // Codes the row's residuals and plane 0, and lists the symbols that escape. Returns how many.
    __device__ __forceinline__ uint32_t encode_first(const PlainRow &row, uint8_t *residuals, uint8_t *digits,
                                                     uint8_t *list) const
    {
        const uint32_t r = planes.residual_bits;
        uint32_t num_listed = 0;
#pragma unroll 1
        for (uint32_t base = 0; base < row_bytes; base += kSteps * kStepBytes) {
            uint32_t words[kSteps][4], symbols[kSteps][kWords], escaped[kSteps][kWords], counts[kSteps / 2] = {};
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) row.load(base + s * kStepBytes + kVector * G::lane(), words[s]);
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                const uint32_t first = base + s * kStepBytes + kVector * G::lane(),
                               column = first / static_cast<uint32_t>(sizeof(T));
#pragma unroll
                for (uint32_t w = 0; w < kWords; w++) escaped[s][w] = symbols[s][w] = 0;
                if (column >= columns) continue;
                const uint32_t num = ibp_min_u32(columns - column, kPerLane);
                uint32_t of_lane[4], found[4] = {};
                this->rotate(words[s]);
                split(words[s], symbols[s], of_lane);
                put_bytes(residuals + column * r / 8u, of_lane, (num * r + 7u) / 8u);
#pragma unroll
                for (uint32_t w = 0; w < kWords; w++) {
                    uint32_t code = codes_of(symbols[s][w], 0);
                    if (num < kPerLane) code = low_bits(code, 8u * ibp_min_u32(num - ibp_min_u32(num, 4u * w), 4u));
                    escaped[s][w] = escaped_of(code);
                    found[0] |= digits_of(code) << 8u * w;
                    counts[s / 2] += ibp_popcount(escaped[s][w]) << 16u * (s % 2u);
                }
                put_bytes(digits + column / 4u, found, (num + 3u) / 4u);
            }
            uint32_t before[kSteps / 2], total[kSteps / 2];
            G::scan(counts, before, total);
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                const uint32_t shift = 16u * (s % 2u);
                uint8_t *to = list + num_listed + (before[s / 2] >> shift & 0xffffu);
#pragma unroll
                for (uint32_t w = 0; w < kWords; w++) append(to, symbols[s][w], escaped[s][w]);
                num_listed += total[s / 2] >> shift & 0xffffu;
            }
        }
        G::sync(); // the list is there
        return num_listed;
    }

    // Codes the n symbols of a list in a plane. Returns how many escape it, to which the list shrinks.
    __device__ __forceinline__ uint32_t encode_list(uint32_t plane, uint32_t n, uint8_t *digits, uint8_t *list) const
    {
        uint32_t num_listed = 0;
#pragma unroll 1
        for (uint32_t base = 0; base < n; base += 4u * LANES) {
            const uint32_t i = base + 4u * G::lane(), num = i < n ? ibp_min_u32(n - i, 4u) : 0u;
            uint32_t symbols = 0, escaped = 0;
            if (num != 0u) {
                symbols = low_bits(*reinterpret_cast<const uint32_t *>(list + i), 8u * num);
                const uint32_t code = codes_of(symbols, plane);
                escaped = low_bits(escaped_of(code), 8u * num);
                digits[i / 4u] = static_cast<uint8_t>(low_bits(digits_of(code), 2u * num));
            }
            const uint32_t count[1] = {ibp_popcount(escaped)};
            uint32_t before[1], total[1];
            G::scan(count, before, total);
            G::sync(); // all have read
            uint8_t *to = list + num_listed + before[0];
            append(to, symbols, escaped);
            num_listed += total[0];
        }
        G::sync(); // the list is there
        return num_listed;
    }

    // As PlanesEncoder::encode.
    __device__ __forceinline__ uint32_t encode(const PlainRow &row, const BitStage &stage, uint32_t start_bit,
                                               uint32_t most_bytes) const
    {
        uint8_t *const bytes = reinterpret_cast<uint8_t *>(stage.words), *const list =
                                                                             bytes + bit_stage_bytes(row_bytes);
        const uint32_t most = 8u * most_bytes;
        uint32_t at = start_bit + to_byte(columns * planes.residual_bits), next = at + to_byte(2u * columns);
        if (next > most) return next / 8u;
        uint32_t n = encode_first(row, bytes + start_bit / 8u, bytes + at / 8u, list);
        at = next;
#pragma unroll 1
        for (uint32_t p = 1; p < planes.num_planes; p++, at = next) {
            next = at + to_byte(2u * n);
            if (next > most) return next / 8u;
            n = encode_list(p, n, bytes + at / 8u, list);
        }
        const uint32_t end = at + to_byte(n * symbol_bits);
        if (end > most) return end / 8u;
        for (uint32_t i = G::lane(); i < n; i += LANES)
            stage.or_bits(at + i * symbol_bits, static_cast<uint32_t>(list[i]));
        return end / 8u;
    }
};

} // namespace ibp

#endif
