// decoders.cuh - from a codebook to the decoder that a kernel is instantiated with, and the group of threads that a row gets.
#ifndef IBP_DECODERS_CUH
#define IBP_DECODERS_CUH

#include "decode_dense.cuh"
#include "decode_listed.cuh"
#include "decode_masks.cuh"

namespace ibp {

// Scheme raw: there is nothing to decode, and nothing is staged.
struct RawDecoder {
    using Group = ibp::Group<kWarp, 1>;
    static constexpr uint32_t kMostThreads = 1024, kVectors = 4;
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &) { return 0; }
    __device__ __forceinline__ RawDecoder(const ibp_codebook &, uint8_t *) {}
    __device__ __forceinline__ bool decode(uint32_t, bool, Stage, uint32_t, uint32_t, const Window &) const { return false; }
};

template <class Decoder> struct Tag {
    using type = Decoder;
};

constexpr uint32_t kTeamWarps = 8;             // of a row that is too long to leave every warp one of its own
constexpr uint32_t kLongestOfWarp = 8u << 10;  // bytes

// Calls launcher with the tag of Decoder<Group> for the group that a row of this length gets; at least LEAST bytes of the row a lane.
template <template <class> class Decoder, uint32_t LEAST, class Launcher> ibp_status with_group(uint32_t row_bytes, const Launcher &launcher)
{
    if (row_bytes <= 8u * LEAST) return launcher(Tag<Decoder<Group<8, 1>>>{});
    if (row_bytes <= 16u * LEAST) return launcher(Tag<Decoder<Group<16, 1>>>{});
    if (row_bytes <= kLongestOfWarp) return launcher(Tag<Decoder<Group<kWarp, 1>>>{});
    return launcher(Tag<Decoder<Group<kWarp, kTeamWarps>>>{});
}

template <class G> using Dense1 = DenseDecoder<uint8_t, G>;
template <class G> using Dense2 = DenseDecoder<uint16_t, G>;
template <class G> using Dense4 = DenseDecoder<uint32_t, G>;
template <class G> using Dense8 = DenseDecoder<uint64_t, G>;
template <class G> using MaskWords = MasksDecoder<4, G>;
template <class G> using MaskWord = MasksDecoder<1, G>;

// Calls launcher with the tag of the codebook's decoder. by_16: rows start at multiples of 16 bytes on the uncoded side.
template <class Launcher> ibp_status with_decoder(const ibp_codebook &cb, bool by_16, const Launcher &launcher)
{
    if (cb.scheme == IBP_SCHEME_RAW) return launcher(Tag<RawDecoder>{});
    if (cb.scheme == IBP_SCHEME_IBP) {
        if (by_16) return with_group<MaskWords, 32>(cb.row_bytes, launcher);
        if (cb.row_bytes <= kLongestOfWarp) return launcher(Tag<MaskWord<Group<kWarp, 1>>>{});
        return launcher(Tag<MaskWord<Group<kWarp, kTeamWarps>>>{});
    }
    const bool listed = cb.planes.listed;
    switch (cb.planes.element_bytes) {
    case 1: return listed ? launcher(Tag<ListedDecoder<uint8_t>>{}) : with_group<Dense1, 16>(cb.row_bytes, launcher);
    case 2: return listed ? launcher(Tag<ListedDecoder<uint16_t>>{}) : with_group<Dense2, 32>(cb.row_bytes, launcher);
    case 4: return listed ? launcher(Tag<ListedDecoder<uint32_t>>{}) : with_group<Dense4, 64>(cb.row_bytes, launcher);
    case 8: return listed ? launcher(Tag<ListedDecoder<uint64_t>>{}) : with_group<Dense8, 64>(cb.row_bytes, launcher);
    default: return IBP_INVALID_ARGUMENT;
    }
}

} // namespace ibp

#endif
