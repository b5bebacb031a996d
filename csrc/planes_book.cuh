// planes_book.cuh - a codebook of scheme planes and the parts of a coded row (FORMAT.md section 6). T is the element; everything else is a run-time value.
#ifndef IBP_PLANES_BOOK_CUH
#define IBP_PLANES_BOOK_CUH

#include "group.cuh"

namespace ibp {

template <typename Bits> __device__ __forceinline__ Bits low_bits(Bits value, uint32_t num_bits)
{
    return num_bits >= 8u * sizeof(Bits) ? value : value & ((Bits{1} << num_bits) - 1u);
}

__device__ __forceinline__ uint32_t to_byte(uint32_t bits) { return (bits + 7u) & ~7u; }

// The lowest bit of each digit of num_bits whose bits are all set.
__device__ __forceinline__ uint64_t escapes_in(uint64_t digits, uint32_t num_bits)
{
    switch (num_bits) {
    case 1: return digits;
    case 2: return digits & digits >> 1 & 0x5555555555555555ull;
    case 3: return digits & digits >> 1 & digits >> 2 & 0x9249249249249249ull;
    default: return digits & digits >> 1 & digits >> 2 & digits >> 3 & 0x1111111111111111ull;
    }
}

// Digits of a plane that a warp looks at.
struct DigitRange {
    uint32_t from, to;
};

// Where the parts of the values are, in stage bits. A plane that there is not has no bits and only escapes, so that digits[IBP_MAX_PLANES]
// are the raw symbols. mine[p]: the warp's own digits.
struct ValueParts {
    uint32_t residuals, digits[IBP_MAX_PLANES + 1], end;
    DigitRange mine[IBP_MAX_PLANES + 1];
};

template <typename T> struct PlanesBook {
    static constexpr uint32_t kElementBits = 8u * sizeof(T);
    const ibp_planes &planes;
    const uint8_t *entries; // of the row's cluster
    const uint32_t columns, symbol_bits;

    __device__ __forceinline__ PlanesBook(const ibp_codebook &cb, uint32_t cluster)
        : planes(cb.planes), entries(static_cast<const uint8_t *>(cb.planes.entries) + uint64_t{cluster} * cb.cluster_stride),
          columns(cb.row_bytes / static_cast<uint32_t>(sizeof(T))), symbol_bits(kElementBits - cb.planes.residual_bits)
    {
    }

    __device__ __forceinline__ T entry(uint32_t i) const
    {
        switch (planes.symbol_bytes) {
        case 1: return static_cast<T>(__ldg(entries + i));
        case 2: return static_cast<T>(__ldg(reinterpret_cast<const uint16_t *>(entries) + i));
        case 4: return static_cast<T>(__ldg(reinterpret_cast<const uint32_t *>(entries) + i));
        default: return static_cast<T>(__ldg(reinterpret_cast<const unsigned long long *>(entries) + i));
        }
    }
    // Bits of a plane's digits; 0 of a plane that there is not.
    __device__ __forceinline__ uint32_t width_of(uint32_t plane) const { return plane < planes.num_planes ? planes.digit_bits[plane] : 0u; }
    __device__ __forceinline__ uint32_t escape_of(uint32_t plane) const { return (1u << width_of(plane)) - 1u; }
    // The first entry of a plane.
    __device__ __forceinline__ uint32_t first_of(uint32_t plane) const
    {
        uint32_t first = 0;
#pragma unroll
        for (uint32_t p = 0; p < IBP_MAX_PLANES; p++)
            if (p < plane) first += escape_of(p);
        return first;
    }

    __device__ __forceinline__ T join(T symbol, T residual) const
    {
        const uint32_t r = planes.residual_bits;
        const T rotated = static_cast<T>((r >= kElementBits ? T{0} : static_cast<T>(symbol << r)) | residual);
        return planes.rotate ? static_cast<T>(rotated >> 1 | rotated << (kElementBits - 1u)) : rotated;
    }
    static __device__ __forceinline__ T field(Stage stage, uint32_t position, uint32_t num_bits)
    {
        if (sizeof(T) == 8) return static_cast<T>(low_bits(stage.bits64_at(position), num_bits));
        return static_cast<T>(low_bits(stage.bits_at(position), num_bits));
    }

    template <class G> static __device__ __forceinline__ uint32_t count_escapes(Stage stage, uint32_t start, DigitRange range, uint32_t num_bits)
    {
        uint32_t count = 0;
        if (num_bits == 2u) { // 16 digits a word
            for (uint32_t i = range.from + 16u * G::lane(); __any_sync(kAllLanes, i < range.to); i += 16u * G::kLanes) {
                const uint32_t digits = stage.bits_at(start + 2u * i), left = i < range.to ? range.to - i : 0u;
                count += ibp_popcount(low_bits(digits & digits >> 1 & 0x55555555u, 2u * ibp_min_u32(left, 16u)));
            }
            return G::sum(count);
        }
        const uint32_t per_load = 64u / num_bits;
        for (uint32_t i = range.from + per_load * G::lane(); __any_sync(kAllLanes, i < range.to); i += per_load * G::kLanes) {
            const uint32_t left = i < range.to ? range.to - i : 0u;
            count += __popcll(low_bits(escapes_in(stage.bits64_at(start + i * num_bits), num_bits), ibp_min_u32(left, per_load) * num_bits));
        }
        return G::sum(count);
    }

    // Finds the parts of n values from a stage bit on: each plane is as long as the one before has escapes. mine: the elements of the warp.
    // exchanged: IBP_MAX_PLANES times G::kWarps numbers in shared memory.
    template <class G>
    __device__ __forceinline__ ValueParts find_parts(Stage stage, uint32_t start, uint32_t n, DigitRange mine, uint32_t *exchanged) const
    {
        ValueParts parts;
        parts.residuals = start;
        parts.digits[0] = start + to_byte(n * planes.residual_bits);
        parts.mine[0] = mine;
        uint32_t reaching = n;
#pragma unroll
        for (uint32_t p = 0; p < IBP_MAX_PLANES; p++) {
            parts.digits[p + 1] = parts.digits[p];
            parts.mine[p + 1] = parts.mine[p];
            if (p >= planes.num_planes) continue;
            parts.digits[p + 1] += to_byte(reaching * planes.digit_bits[p]);
            const uint32_t count = count_escapes<G>(stage, parts.digits[p], parts.mine[p], planes.digit_bits[p]);
            const uint32_t before = G::exchange(exchanged + p * G::kWarps, count, reaching);
            parts.mine[p + 1] = {before, before + count};
        }
        parts.end = parts.digits[IBP_MAX_PLANES] + to_byte(reaching * symbol_bits);
        return parts;
    }
};

} // namespace ibp

#endif
