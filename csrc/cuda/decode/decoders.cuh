// decoders.cuh - from a codebook to the decoder that a kernel is instantiated with, and the group of threads that a row gets.
#ifndef IBP_DECODERS_CUH
#define IBP_DECODERS_CUH

#include "dense.cuh"
#include "listed.cuh"
#include "masks.cuh"
#include "pairs.cuh"

namespace ibp {

// Scheme raw: there is nothing to decode.
template <class G> struct RawDecoder : NoBlockMemory {
    using Group = G;
    static constexpr uint32_t kMostThreads = 768, kVectors = 4;
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &) { return 0; }
    __device__ __forceinline__ RawDecoder(const ibp_codebook &, uint32_t) {}
    __device__ __forceinline__ bool decode(uint32_t, bool active, Stage, uint32_t, uint32_t, const Window &) const
    {
        return !active;
    }
};

template <class Decoder> struct Tag {
    using type = Decoder;
};

// Calls launcher with the tag of Decoder<Group> for the group that a row of this length gets: of a warp or a part of one,
template <template <class> class Decoder, class Launcher> ibp_status with_warp(uint32_t row_bytes, const Launcher &launcher)
{
    if (row_bytes <= 4u * kLaneBytes) return launcher(Tag<Decoder<Group<4, 1>>>{});
    if (row_bytes <= 8u * kLaneBytes) return launcher(Tag<Decoder<Group<8, 1>>>{});
    if (row_bytes <= 16u * kLaneBytes) return launcher(Tag<Decoder<Group<16, 1>>>{});
    return launcher(Tag<Decoder<Group<kWarp, 1>>>{});
}
// or of several, where it is longer than longest_of_warp bytes.
template <template <class> class Decoder, class Launcher>
ibp_status with_group(uint32_t row_bytes, uint32_t longest_of_warp, const Launcher &launcher)
{
    if (row_bytes <= longest_of_warp) return with_warp<Decoder>(row_bytes, launcher);
    if (row_bytes <= 2u * kWarp * kLaneBytes) return launcher(Tag<Decoder<Group<kWarp, 2>>>{});
    if (row_bytes <= 4u * kWarp * kLaneBytes) return launcher(Tag<Decoder<Group<kWarp, 4>>>{});
    return launcher(Tag<Decoder<Group<kWarp, kMostWarps, true>>>{});
}
template <template <class> class Decoder, class Launcher> ibp_status with_group(uint32_t row_bytes, const Launcher &launcher)
{
    return with_group<Decoder>(row_bytes, kWarp * kLaneBytes, launcher);
}

// Likewise, where a group whose lanes each have a part of one tile is faster than one for rows of any length.
template <template <class> class Decoder, class Launcher> ibp_status with_tiles(uint32_t row_bytes, const Launcher &launcher)
{
    if (row_bytes > 4u * kWarp * kLaneBytes && row_bytes <= kMostWarps * kWarp * kLaneBytes)
        return launcher(Tag<Decoder<Group<kWarp, kMostWarps>>>{});
    return with_group<Decoder>(row_bytes, launcher);
}

template <class G> using Dense1 = DenseDecoder<uint8_t, G>;
template <class G> using Dense2 = DenseDecoder<uint16_t, G>;
template <class G> using Dense4 = DenseDecoder<uint32_t, G>;
template <class G> using Dense8 = DenseDecoder<uint64_t, G>;
template <class G> using Pairs2 = PairsDecoder<uint16_t, G, false>;
template <class G> using Pairs4 = PairsDecoder<uint32_t, G, false>;
template <class G> using Columns2 = PairsDecoder<uint16_t, G, true>;
template <class G> using Columns4 = PairsDecoder<uint32_t, G, true>;
template <class G> using MaskMoves = MasksDecoder<4, true, G>;
template <class G> using MaskWords = MasksDecoder<4, false, G>;
template <class G> using MaskWord = MasksDecoder<1, false, G>;

// Calls launcher with the tag of the codebook's decoder. by_16: rows start at multiples of 16 bytes on the uncoded side.
template <class Launcher> ibp_status with_decoder(const ibp_codebook &cb, bool by_16, const Launcher &launcher)
{
    if (cb.scheme == IBP_SCHEME_RAW) return with_group<RawDecoder>(cb.row_bytes, launcher);
    if (cb.scheme == IBP_SCHEME_IBP) {
        constexpr uint32_t kLongestOfWarp = 8u << 10; // several warps count a row's bits before they decode it
        if (by_16 && MaskMoves<Group<kWarp, 1>>::has_moves(cb)) return with_warp<MaskMoves>(cb.row_bytes, launcher);
        if (by_16) return with_group<MaskWords>(cb.row_bytes, kLongestOfWarp, launcher);
        if (cb.row_bytes <= kLongestOfWarp) return launcher(Tag<MaskWord<Group<kWarp, 1>>>{});
        return launcher(Tag<MaskWord<Group<kWarp, kMostWarps, true>>>{});
    }
    const bool listed = cb.planes.listed;
    const uint32_t row_bytes = cb.row_bytes;
    if (!listed && has_pairs(cb.planes)) {
        if (cb.planes.element_bytes == 2)
            return cb.planes.per_column ? with_tiles<Columns2>(row_bytes, launcher) : with_tiles<Pairs2>(row_bytes, launcher);
        return cb.planes.per_column ? with_tiles<Columns4>(row_bytes, launcher) : with_tiles<Pairs4>(row_bytes, launcher);
    }
    switch (cb.planes.element_bytes) {
    case 1: return listed ? launcher(Tag<ListedDecoder<uint8_t>>{}) : with_group<Dense1>(row_bytes, launcher);
    case 2: return listed ? launcher(Tag<ListedDecoder<uint16_t>>{}) : with_group<Dense2>(row_bytes, launcher);
    case 4: return listed ? launcher(Tag<ListedDecoder<uint32_t>>{}) : with_group<Dense4>(row_bytes, launcher);
    case 8: return listed ? launcher(Tag<ListedDecoder<uint64_t>>{}) : with_group<Dense8>(row_bytes, launcher);
    default: return IBP_INVALID_ARGUMENT;
    }
}

} // namespace ibp

#endif
