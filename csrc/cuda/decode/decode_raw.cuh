// decode_raw.cuh - the decoder of scheme raw. Rows of this scheme are stored uncompressed, and fetch.cuh copies them,
// so there is nothing to decode.
#ifndef IBP_DECODE_RAW_CUH
#define IBP_DECODE_RAW_CUH

#include "decoder.cuh"

namespace ibp {

template <class G> struct RawDecoder : NoBlockMemory {
    using Group = G;
    static constexpr uint32_t kMostThreads = 768, kVectors = 4;
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &) { return 0; }
    static __host__ __device__ __forceinline__ uint32_t kept_bytes(const ibp_codebook &cb) { return scratch_bytes(cb); }
    __device__ __forceinline__ RawDecoder(const ibp_codebook &, uint32_t) {}
    // Returns false for an active group, because a row of scheme raw that claims to be coded is corrupt.
    __device__ __forceinline__ bool decode(uint32_t, bool active, Stage, uint32_t, uint32_t, const Window &) const
    {
        return !active;
    }
};

} // namespace ibp

#endif
