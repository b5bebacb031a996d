// planes_book.cuh - a codebook of scheme planes and the parts of a coded row (FORMAT.md section 6). T is the element;
// everything else is a run-time value.
#ifndef IBP_PLANES_BOOK_CUH
#define IBP_PLANES_BOOK_CUH

#include "group.cuh"

namespace ibp {

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

// Where the parts of the values are, in stage bits. An absent plane has no bits and only escapes, so that
// digits[IBP_MAX_PLANES] are the raw symbols. mine[p]: the warp's own digits.
struct ValueParts {
    uint32_t residuals, digits[IBP_MAX_PLANES + 1], end;
    DigitRange mine[IBP_MAX_PLANES + 1];

    // Parts of no values at all.
    static __device__ __forceinline__ ValueParts nothing(uint32_t start)
    {
        ValueParts parts{};
        parts.residuals = parts.end = start;
#pragma unroll
        for (uint32_t p = 0; p <= IBP_MAX_PLANES; p++) parts.digits[p] = start;
        return parts;
    }
};

template <typename T> struct PlanesBook {
    static constexpr uint32_t kElementBits = 8u * sizeof(T);
    const ibp_planes &planes;
    const uint8_t *entries; // of the row's cluster
    const uint32_t columns, symbol_bits; // live columns

    __device__ __forceinline__ PlanesBook(const ibp_codebook &cb, uint32_t cluster)
        : planes(cb.planes),
          entries(static_cast<const uint8_t *>(cb.planes.entries) + uint64_t{cluster} * cb.cluster_stride),
          columns(live_columns(cb)), symbol_bits(kElementBits - cb.planes.invariant_bits - cb.planes.residual_bits)
    {
    }
    static __host__ __device__ __forceinline__ uint32_t live_columns(const ibp_codebook &cb)
    {
        return cb.row_bytes / static_cast<uint32_t>(sizeof(T)) - cb.planes.num_constant;
    }

    // Bytes of an entry: at most those of an element.
    static __host__ __device__ __forceinline__ uint32_t symbol_bytes(const ibp_planes &planes)
    {
        return sizeof(T) == 1 ? 1u : planes.symbol_bytes;
    }
    __device__ __forceinline__ T entry(uint32_t i) const
    {
        if (planes.consecutive) return static_cast<T>(low_bits(planes.first_symbol + i, symbol_bits));
        return entry_at(entries, planes, i);
    }
    // Of entries that are not consecutive.
    static __device__ __forceinline__ T entry_at(const uint8_t *entries, const ibp_planes &planes, uint32_t i)
    {
        if (sizeof(T) == 1 || planes.symbol_bytes == 1u) return static_cast<T>(__ldg(entries + i));
        if (sizeof(T) == 2 || planes.symbol_bytes == 2u)
            return static_cast<T>(__ldg(reinterpret_cast<const uint16_t *>(entries) + i));
        if (sizeof(T) == 4 || planes.symbol_bytes == 4u)
            return static_cast<T>(__ldg(reinterpret_cast<const uint32_t *>(entries) + i));
        return static_cast<T>(__ldg(reinterpret_cast<const unsigned long long *>(entries) + i));
    }
    // Bits of a plane's digits; 0 of an absent plane.
    __device__ __forceinline__ uint32_t width_of(uint32_t plane) const
    {
        return plane < planes.num_planes ? planes.digit_bits[plane] : 0u;
    }
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

    // How many of a warp's digits are escapes.
    template <class G>
    static __device__ __forceinline__ uint32_t count_escapes(uint32_t start, DigitRange range, uint32_t num_bits)
    {
        uint32_t count = 0;
        if (num_bits == 2u) { // 16 digits a word
#pragma unroll 1
            for (uint32_t i = range.from + 16u * G::lane(); __any_sync(kAllLanes, i < range.to); i += 16u * G::kLanes)
                if (i < range.to)
                    count += ibp_popcount(
                        escaped_pairs(low_bits(shared_bits(start + 2u * i), 2u * ibp_min_u32(range.to - i, 16u))));
            return G::sum(count);
        }
        const uint32_t per_load = 64u / num_bits;
#pragma unroll 1
        for (uint32_t i = range.from + per_load * G::lane(); __any_sync(kAllLanes, i < range.to);
             i += per_load * G::kLanes) {
            if (i >= range.to) continue;
            const uint32_t position = start + i * num_bits;
            const uint64_t digits = shared_bits(position) | static_cast<uint64_t>(shared_bits(position + 32u)) << 32;
            count += __popcll(low_bits(escapes_in(digits, num_bits), ibp_min_u32(range.to - i, per_load) * num_bits));
        }
        return G::sum(count);
    }

    // Finds the parts of n values that lie in the shared bits from start to end: each plane is as long as the one
    // before has escapes. Where one lies past the end, parts.end does too. mine: the elements of the warp. TWO_BITS:
    // all digits are known to have two.
    // exchanged: shared word with which IBP_MAX_PLANES times G::kWarps words begin. count(plane, start, range,
    // num_bits) counts the escapes of the warp.
    template <class G, bool TWO_BITS, class Count>
    __device__ __forceinline__ ValueParts find_parts(uint32_t start, uint32_t end, uint32_t n, DigitRange mine,
                                                     uint32_t exchanged, const Count &count) const
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
            if (!(TWO_BITS && p < 2u) && p >= planes.num_planes) continue;
            const uint32_t num_bits = TWO_BITS ? 2u : planes.digit_bits[p];
            parts.digits[p + 1] += to_byte(reaching * num_bits);
            if (parts.digits[p + 1] > end) parts.mine[p] = {0, 0}; // nothing is read there
            const uint32_t escaped = count(p, parts.digits[p], parts.mine[p], num_bits),
                           before = G::exchange(exchanged + p * G::kWarps, escaped, reaching);
            parts.mine[p + 1] = {before, before + escaped};
        }
        parts.end = parts.digits[IBP_MAX_PLANES] + to_byte(reaching * symbol_bits);
        return parts;
    }
};

} // namespace ibp

#endif
