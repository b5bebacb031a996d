// decoder.cuh - the contract between kernels and decoders. Kernels fetch coded rows; decoders are structs that rebuild
// the rows. include/ibp_codebook.h explains codebooks, with their planes, entries, symbols, residuals and digits.
//
// A decoder is a struct for one kind of codebook and one group of threads (group.cuh). warp.cuh defines Stage and
// Window.
//
//     template <class G> struct SomeDecoder {
//         using Group = G;
//         static constexpr uint32_t kMostThreads;
//         static constexpr uint32_t kVectors, kOwnVectors;
//         static constexpr uint32_t kLaneVectors, kLeastLanes;
//         static uint32_t block_bytes(const ibp_codebook &);
//         static uint32_t scratch_bytes(const ibp_codebook &);
//         SomeDecoder(const ibp_codebook &, uint32_t scratch);
//         bool decode(uint32_t cluster, bool active, Stage stage, uint32_t start_bit, uint32_t coded_bytes,
//                     const Window &window) const;
//     };
//
//     Group          the threads that decode one row together
//     kMostThreads   the largest number of threads in a block that the decoder's registers allow; a multiple of kWarp
//     kVectors       number of vectors of 16 bytes that a thread loads into registers from the next row while it
//                    decodes this row
//     kOwnVectors    number of further vectors that a lane loads if its group is a part of a warp, for rows whose coded
//                    form is nearly as long as the row
//     kLaneVectors   the largest number of vectors of 16 bytes of a row that a lane decodes if its group is a part of a
//                    warp
//     kLeastLanes    number of lanes of the smallest group that may be used, 2 or 4. kLaneVectors and kLeastLanes say
//                    which group suits a row (launch_by_warp in gather.cuh)
//     block_bytes    size in bytes of the block's own shared memory, which begins at byte 0; a multiple of 16
//     scratch_bytes  size in bytes of a group's scratch: the shared memory that it needs besides its stage
//     scratch        the byte of shared memory at which the group's scratch begins and its stage ends; a multiple of 16
//
// A decoder may rely on this:
//
//   - The fields of the codebook are checked (ibp_check_codebook_fields). The content of its arrays is not.
//   - All threads of a block call the constructor once, and a barrier of the block follows before the first row. The
//     exception is warp_rows.cuh: there one warp calls the constructor for each row, and __syncwarp follows. Decoders
//     that are used there have no block memory; their block_bytes is 0.
//   - All lanes of a warp, and all warps of a group, call decode together. `active` is false in groups without a row;
//     such groups still take part in the collectives of their warp.
//   - The coded row lies in shared memory. It has coded_bytes bytes and begins at bit start_bit, which is the first bit
//     of a byte. Bits are counted from the beginning of the block's dynamic shared memory. The byte with the index of
//     the row's cluster, if there is one, is not part of these bytes. The bytes may have any values. The complete coded
//     row lies in the group's stage, which has room for row_bytes bytes; coded_bytes is at most row_bytes. The 16 bytes
//     past the coded row can be read.
//   - cluster is the index of one of the codebook's clusters; 0 if the codebook has no clusters.
//   - The wanted bytes of the row, which are 1 to row_bytes bytes, go to window.dst.
//   - window.dst does not lie in the decoder's shared memory. There is one exception: if a decoder has a function
//     kept_bytes(cb), window.dst may lie in its scratch, at byte kept_bytes(cb) of the scratch or later. Bags
//     (linear/bags.cuh) take only decoders that have this function.
//
// A decoder must do this:
//
//   - Return, in all threads of an active group, whether the row follows the format and takes exactly coded_bytes
//     bytes. In other groups, return true. If a row is corrupt, the decoder may leave anything in the window, because
//     the caller writes zeros over it.
//   - Read and write no shared memory except the group's stage, the group's scratch and the block's own memory. Write
//     no other memory except the window. This must hold whatever bytes the row and the codebook's arrays contain.
//   - Be done with the group's stage and scratch once all lanes of the group have returned and met at a barrier,
//     because the next row overwrites them.
//
// To add a decoder, write a .cuh with the struct and a .cu that instantiates it with the kernel of gather.cuh; then add
// a function to decode_request.h, and a line to the list of gather.cu.
#ifndef IBP_DECODER_CUH
#define IBP_DECODER_CUH

#include "../group.cuh"

#include <type_traits>

namespace ibp {

// The limits of groups that are parts of a warp, for decoders without limits of their own.
struct FourLanes {
    static constexpr uint32_t kLaneVectors = 4, kLeastLanes = 4, kOwnVectors = 0;
};

// The base of decoders that need shared memory for each group only, and none for the block.
struct NoBlockMemory : FourLanes {
    static __host__ __device__ __forceinline__ uint32_t block_bytes(const ibp_codebook &) { return 0; }
};

// Checks the parts of the contract that a compiler can check.
template <class Decoder> constexpr bool is_decoder()
{
    using G = typename Decoder::Group;
    static_assert(Decoder::kMostThreads <= 1024u && Decoder::kMostThreads % kWarp == 0,
                  "a block must consist of whole warps");
    static_assert(Decoder::kMostThreads >= G::kThreads, "a block must have room for a group");
    static_assert(Decoder::kVectors >= 1u, "a thread must prefetch at least one vector");
    static_assert(std::is_constructible<Decoder, const ibp_codebook &, uint32_t>::value,
                  "a decoder must be constructible from a codebook and a byte of shared memory");
    static_assert(std::is_same<decltype(Decoder::block_bytes(ibp_codebook())), uint32_t>::value,
                  "block_bytes must return a uint32_t");
    static_assert(std::is_same<decltype(Decoder::scratch_bytes(ibp_codebook())), uint32_t>::value,
                  "scratch_bytes must return a uint32_t");
    static_assert(std::is_same<bool (Decoder::*)(uint32_t, bool, Stage, uint32_t, uint32_t, const Window &) const,
                               decltype(&Decoder::decode)>::value,
                  "decode must have the signature that this file describes");
    return true;
}

} // namespace ibp

#endif
