// decoder.cuh - what a decoder is: the contract between the kernels that fetch rows and the structs that rebuild them.
#ifndef IBP_DECODER_CUH
#define IBP_DECODER_CUH

#include "../group.cuh"

namespace ibp {

// A decoder that needs no shared memory of the block besides that of each group.
struct NoBlockMemory {
    static __host__ __device__ __forceinline__ uint32_t block_bytes(const ibp_codebook &) { return 0; }
};

} // namespace ibp

#endif
