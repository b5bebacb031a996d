// warp_encode.cuh - the function with which a warp of any kernel encodes a row of scheme ibp, and its contract.
// ibp_device.cuh includes this file.
#ifndef IBP_WARP_ENCODE_CUH
#define IBP_WARP_ENCODE_CUH

#include "encode_masks.cuh"

namespace ibp {

// Returns the size in bytes of the dynamic shared memory that a warp needs to encode rows with a codebook. It is a
// multiple of 16.
__host__ __device__ __forceinline__ uint32_t warp_encode_scratch_bytes(const ibp_codebook &cb)
{
    return bit_stage_bytes(cb.row_bytes);
}

// Encodes a row with a codebook of scheme ibp. The coded row has the same bytes as the one that ibp_encode_row makes.
// All 32 lanes of a warp must call this together, with the same arguments.
//
// cb, scratch: as in warp_decode_coded, except that the scratch has warp_encode_scratch_bytes(cb) bytes.
// row: cb.row_bytes bytes at any address that the device can read. No other thread may change the row meanwhile.
// coded: memory for cb.row_bytes - 1 bytes at any address that the device can write. It must not overlap the row.
// @return in all lanes: the size of the coded row in bytes, which is less than cb.row_bytes. If coding saves no byte,
// or if the codebook has another scheme, the result is 0, and coded is unchanged. On return, the stores to coded are
// visible to all lanes of the warp. The function writes nothing except coded and the scratch.
__device__ __forceinline__ uint32_t warp_encode_row(const ibp_codebook &cb, const uint8_t *row, uint8_t *coded,
                                                    uint32_t scratch)
{
    using Encoder = MasksEncoder<kWarp>;
    using G = Encoder::Group;
    if (cb.scheme != IBP_SCHEME_IBP) return 0;
    const uint32_t stage_bytes = bit_stage_bytes(cb.row_bytes);
    const BitStage stage{reinterpret_cast<uint32_t *>(shared_bytes() + scratch), stage_bytes / 4u - 1u};
    const PlainRow plain{row, cb.row_bytes};
    const Encoder encoder(cb, nullptr);
    const Choice choice = choose_cluster(cb, encoder, plain);
    if (choice.bytes >= cb.row_bytes) return 0;
    const bool numbered = ibp_has_clusters(&cb);
    __syncwarp(); // before the scratch is overwritten
    clear<G>(stage, stage_bytes);
    __syncwarp();
    if (numbered && G::rank() == 0u) stage.or_bits(0, choice.cluster);
    of_cluster(encoder, cb, choice.cluster).encode(plain, stage, numbered ? 8u : 0u, cb.row_bytes - 1u);
    __syncwarp(); // before the stage is read
    copy_out<G>(coded, stage, 0, choice.bytes);
    __syncwarp();
    return choice.bytes;
}

} // namespace ibp

#endif
