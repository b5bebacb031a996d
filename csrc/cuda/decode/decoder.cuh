// decoder.cuh - what a decoder is: the contract between the kernels that fetch rows and the structs that rebuild them.
//
// A decoder is a struct for one kind of codebook and one group of threads (group.cuh):
//
//     template <class G> struct SomeDecoder {
//         using Group = G;                          the threads that decode one row together
//         static constexpr uint32_t kMostThreads;   of a block: what its registers allow; a multiple of kWarp
//         static constexpr uint32_t kVectors;       vectors of 16 bytes that each thread has on their way for the
// next row, in
//                                                   registers, while it decodes this one
//         static uint32_t block_bytes(const ibp_codebook &);     shared memory of a block, from byte 0 on; a multiple
// of 16
//         static uint32_t scratch_bytes(const ibp_codebook &);   shared memory of a group, besides its stage
//         SomeDecoder(const ibp_codebook &, uint32_t scratch);   scratch: shared byte with which the group's begins,
// a multiple of 4
//         bool decode(uint32_t cluster, bool active, Stage stage, uint32_t start_bit, uint32_t coded_bytes, const
// Window &window) const;
//     };
//
// What it is guaranteed:
// - The codebook's fields have been checked (ibp_check_codebook_fields); what its arrays hold has not.
// - The constructor is called once by all threads of a block, with a barrier of the block before the first row.
// - decode is called by all lanes of a warp together, and by all warps of a group; `active` is false in groups that
// have no row,
//   which take part in the collectives of their warp all the same.
// - The coded row is staged in shared memory: coded_bytes bytes from start_bit on, a bit of shared memory that begins
// a byte; all of
//   it lies in the group's stage, which is as long as a row, so that coded_bytes may be anything up to row_bytes. 16
// bytes behind it
//   can be read. cluster < num_clusters. The bytes themselves may be anything.
// - The row goes to window.dst: at least one byte of it is wanted, at most row_bytes.
//
// What it guarantees:
// - It returns, in all threads of an active group, whether the row took just coded_bytes and follows the format; true
// where not active.
//   What it has stored of a corrupt row does not matter: the caller overwrites it with zeros.
// - It reads no shared memory outside the group's stage and its own, and stores nothing outside the window, whatever
// the row and the
//   codebook's arrays hold.
// - Shared memory of its own is free for the next row when all lanes of the group have returned and met at a barrier.
//
// To add one: a .cuh with the struct and a .cu that instantiates it with the kernel of gather.cuh; a function in
// decode_request.h, and a line in the list of gather.cu.
#ifndef IBP_DECODER_CUH
#define IBP_DECODER_CUH

#include "../group.cuh"

#include <type_traits>

namespace ibp {

// A decoder that needs no shared memory of the block besides that of each group.
struct NoBlockMemory {
    static __host__ __device__ __forceinline__ uint32_t block_bytes(const ibp_codebook &) { return 0; }
};

// The parts of the contract that a compiler can see.
template <class Decoder> constexpr bool is_decoder()
{
    using G = typename Decoder::Group;
    static_assert(Decoder::kMostThreads <= 1024u && Decoder::kMostThreads % kWarp == 0, "a block of whole warps");
    static_assert(Decoder::kMostThreads >= G::kThreads, "a block of a group at least");
    static_assert(Decoder::kVectors >= 1u, "vectors on their way");
    static_assert(std::is_constructible<Decoder, const ibp_codebook &, uint32_t>::value,
                  "made of a codebook and a shared byte");
    static_assert(std::is_same<decltype(Decoder::block_bytes(ibp_codebook())), uint32_t>::value, "bytes of a block");
    static_assert(std::is_same<decltype(Decoder::scratch_bytes(ibp_codebook())), uint32_t>::value, "bytes of a group");
    static_assert(std::is_same<bool (Decoder::*)(uint32_t, bool, Stage, uint32_t, uint32_t, const Window &) const,
                               decltype(&Decoder::decode)>::value,
                  "decode");
    return true;
}

} // namespace ibp

#endif
