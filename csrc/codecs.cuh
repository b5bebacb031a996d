// codecs.cuh - from a codebook to the row coder that a kernel is instantiated with.
#ifndef IBP_CODECS_CUH
#define IBP_CODECS_CUH

#include "masks.cuh"
#include "planes.cuh"

namespace ibp {

template <class Codec> struct CodecTag {
    using type = Codec;
};

template <typename T, class Launcher> ibp_status with_planes(bool listed, const Launcher &launcher)
{
    return listed ? launcher(CodecTag<Planes<T, true>>{}) : launcher(CodecTag<Planes<T, false>>{});
}

// Calls launcher with the tag of the codebook's coder. by_16: rows start at multiples of 16 bytes on the uncoded side.
template <class Launcher> ibp_status with_codec(const ibp_codebook &cb, bool by_16, const Launcher &launcher)
{
    if (cb.scheme != IBP_SCHEME_PLANES) return by_16 ? launcher(CodecTag<Masks<4>>{}) : launcher(CodecTag<Masks<1>>{});
    switch (cb.planes.element_bytes) {
    case 1: return with_planes<uint8_t>(cb.planes.listed, launcher);
    case 2: return with_planes<uint16_t>(cb.planes.listed, launcher);
    case 4: return with_planes<uint32_t>(cb.planes.listed, launcher);
    case 8: return with_planes<uint64_t>(cb.planes.listed, launcher);
    default: return IBP_INVALID_ARGUMENT;
    }
}

} // namespace ibp

#endif
