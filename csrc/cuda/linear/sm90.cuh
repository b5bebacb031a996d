// sm90.cuh - features of GPUs of compute capability 9.0 for the kernels of many.cuh and tiles.cuh: clusters of blocks
// that read each other's shared memory, and matrix products of groups of four warps (`wgmma`). If kernels are emulated
// without a GPU, a cluster has one block.
#ifndef IBP_SM90_CUH
#define IBP_SM90_CUH

#include "digits.cuh"

namespace ibp {

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t shared_address(uint32_t byte)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes() + byte));
}
__device__ __forceinline__ uint32_t address_in(uint32_t block, uint32_t byte)
{
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(byte)), "r"(block));
    return there;
}
#endif

// A barrier in shared memory (`mbarrier`). A phase of the barrier completes when num_threads threads (see begin) have
// arrived and all expected bytes have been copied. The parameter `turn` of await() and await_cluster() is the index of
// the phase to wait for. If kernels are emulated without a GPU, these barriers do nothing.
struct SharedBarrier {
    static constexpr uint32_t kBytes = 8;
    uint32_t byte; // offset of the barrier in shared memory, in bytes

    __device__ __forceinline__ void begin(uint32_t num_threads) const
    {
#ifdef __CUDACC__
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(byte)), "r"(num_threads)
                     : "memory");
#endif
    }
    // Makes the barriers that this thread has initialised (see begin) visible to all blocks of the cluster and to
    // asynchronous copies.
    static __device__ __forceinline__ void publish()
    {
#ifdef __CUDACC__
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __device__ __forceinline__ void arrive() const
    {
#ifdef __CUDACC__
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(byte)) : "memory");
#endif
    }
    __device__ __forceinline__ void arrive_and_expect(uint32_t num_bytes) const
    {
#ifdef __CUDACC__
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(byte)),
                     "r"(num_bytes)
                     : "memory");
#endif
    }
    // Arrives at this barrier in another block of the cluster, with release semantics. Once a thread of that block has
    // returned from await_cluster(), it sees all writes that were made before this call by this thread and by the
    // threads that this thread has met at a barrier. All reads that these threads made before this call are complete
    // then, so the other thread may overwrite what they read.
    __device__ __forceinline__ void arrive_in(uint32_t block) const
    {
#ifdef __CUDACC__
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in(block, byte))
                     : "memory");
#endif
    }
    __device__ __forceinline__ void await(uint32_t turn) const
    {
#ifdef __CUDACC__
        asm volatile("{\n.reg .pred done;\nagain:\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
                         shared_address(byte)),
                     "r"(turn & 1u)
                     : "memory");
#endif
    }
    // Does what await() does, for a barrier at which threads of other blocks of the cluster arrive.
    __device__ __forceinline__ void await_cluster(uint32_t turn) const
    {
#ifdef __CUDACC__
        asm volatile("{\n.reg .pred done;\nagain:\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                     "@!done bra again;\n}" ::"r"(shared_address(byte)),
                     "r"(turn & 1u)
                     : "memory");
#endif
    }
};

// arrive_at_cluster() and await_others_of_cluster() are the two halves of a barrier of all threads of a cluster. A
// block must publish its own barriers before the first half, and must use barriers of other blocks only after the
// second. Between the two halves a block may use its own memory.
__device__ __forceinline__ void arrive_at_cluster()
{
#ifdef __CUDACC__
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_others_of_cluster()
{
#ifdef __CUDACC__
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ float float_in(uint32_t block, uint32_t byte)
{
#ifdef __CUDACC__
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address_in(block, byte)) : "memory");
    return value;
#else
    return *reinterpret_cast<const float *>(shared_bytes() + byte);
#endif
}
// Makes this thread's writes to shared memory visible to `wgmma` instructions that other threads issue after a barrier.
__device__ __forceinline__ void publish_vectors()
{
#ifdef __CUDACC__
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#ifdef __CUDACC__
#define IBP_FLOATS_4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define IBP_FLOATS_8(i) IBP_FLOATS_4(i), IBP_FLOATS_4((i) + 4)
#define IBP_FLOATS_16(i) IBP_FLOATS_8(i), IBP_FLOATS_8((i) + 8)
#define IBP_FLOATS_32(i) IBP_FLOATS_16(i), IBP_FLOATS_16((i) + 16)
#define IBP_FLOATS_64(i) IBP_FLOATS_32(i), IBP_FLOATS_32((i) + 32)
#define IBP_FLOATS_128(i) IBP_FLOATS_64(i), IBP_FLOATS_64((i) + 64)
#define IBP_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define IBP_NAMES_16 IBP_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define IBP_NAMES_32 IBP_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define IBP_NAMES_64                                                                \
    IBP_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
                 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define IBP_NAMES_128                                                                           \
    IBP_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"             \
                 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"             \
                 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
                 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// Adds the products of 64 rows with VECTORS vectors over 16 columns to d. Each warp has 16 of the rows, as in
// multiply_tile, and each lane has four sums for every 8 vectors. b: the descriptor of the vectors' elements in shared
// memory.
#define IBP_MULTIPLY_GROUP(VECTORS, FLOATS, A0, A1, A2, A3, B)                                             \
    __device__ __forceinline__ void multiply_group(float(&d)[FLOATS], const uint32_t(&a)[4], uint64_t b)   \
    {                                                                                                      \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #VECTORS "k16.f32.bf16.bf16 {" IBP_NAMES_##FLOATS \
                     "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", 1, 1, 1, 0;"                      \
                     : IBP_FLOATS_##FLOATS(0)                                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
    }
IBP_MULTIPLY_GROUP(16, 8, 8, 9, 10, 11, 12)
IBP_MULTIPLY_GROUP(32, 16, 16, 17, 18, 19, 20)
IBP_MULTIPLY_GROUP(64, 32, 32, 33, 34, 35, 36)
IBP_MULTIPLY_GROUP(128, 64, 64, 65, 66, 67, 68)
IBP_MULTIPLY_GROUP(256, 128, 128, 129, 130, 131, 132)
#undef IBP_MULTIPLY_GROUP
#undef IBP_NAMES_128
#undef IBP_FLOATS_128
#undef IBP_NAMES_64
#undef IBP_FLOATS_64
#undef IBP_NAMES_32
#undef IBP_FLOATS_32
#undef IBP_NAMES_16
#undef IBP_FLOATS_16
#undef IBP_NAMES_8
#undef IBP_FLOATS_8
#undef IBP_FLOATS_4
#endif

// The vectors' elements for an operand of 16 columns, in shared memory. Each vector has 16 bytes for each half of the
// columns. The vectors are in groups of eight:
//
//     | vectors 0 to 7, half 0: 128 bytes | vectors 0 to 7, half 1 | vectors 8 to 15, half 0 | ...
struct PackedVectors {
    uint32_t byte;

    __device__ __forceinline__ uint32_t at(uint32_t vector, uint32_t half) const
    {
        return byte + vector / 8u * 256u + half * 128u + vector % 8u * 16u;
    }
#ifdef __CUDACC__
    __device__ __forceinline__ uint64_t descriptor() const
    {
        return uint64_t{(shared_address(byte) & 0x3ffffu) >> 4} | uint64_t{128u >> 4} << 16 | uint64_t{256u >> 4} << 32;
    }
#endif
};
// The vectors' elements in another layout than that of PackedVectors: each vector has a line of 128 bytes, for four
// operands. The line has eight units of 16 bytes; unit j is stored at position j ^ (vector % 8). byte: offset of the
// lines in shared memory, a multiple of 1,024. operand: 0 to 3.
struct LinedVectors {
    uint32_t byte, operand;

    static __host__ __device__ __forceinline__ uint32_t place(uint32_t vector, uint32_t number)
    {
        return vector * 128u + 16u * (number ^ vector % 8u);
    }
    __device__ __forceinline__ uint32_t at(uint32_t vector, uint32_t half) const
    {
        return byte + place(vector, 2u * operand + half);
    }
#ifdef __CUDACC__
    __device__ __forceinline__ uint64_t descriptor() const
    {
        return uint64_t{(shared_address(byte) + 32u * operand & 0x3ffffu) >> 4} | uint64_t{1} << 16 |
               uint64_t{1024u >> 4} << 32 | uint64_t{1} << 62;
    }
#endif
};

// Asynchronous matrix products of a group of four warps (wgmma). The hardware still reads the operand registers `a` and
// writes `sums` after begin() has returned, and the compiler does not know this. Call await() on these registers before
// any other use of them.
struct GroupProducts {
    // Starts to add products to `sums`. vectors: PackedVectors or LinedVectors.
    template <uint32_t FLOATS, class Vectors>
    static __device__ __forceinline__ void begin(float (&sums)[FLOATS], const uint32_t (&a)[4], const Vectors &vectors)
    {
#ifdef __CUDACC__
        multiply_group(sums, a, vectors.descriptor());
#else
        const uint32_t g = lane_id() / 4u, t = lane_id() % 4u;
        for (uint32_t i = 0; i < FLOATS / 4u; i++) {
            uint32_t b[2];
            for (uint32_t half = 0; half < 2u; half++)
                b[half] = *reinterpret_cast<const uint32_t *>(shared_bytes() + vectors.at(8u * i + g, half) + 4u * t);
            float tile[4];
            for (uint32_t j = 0; j < 4u; j++) tile[j] = sums[4u * i + j];
            multiply_tile(tile, a, b);
            for (uint32_t j = 0; j < 4u; j++) sums[4u * i + j] = tile[j];
        }
#endif
    }
    static __device__ __forceinline__ void order_registers()
    {
#ifdef __CUDACC__
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
    }
    static __device__ __forceinline__ void end_batch()
    {
#ifdef __CUDACC__
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
    }
    template <int NUM_LEFT, class T, uint32_t COUNT> static __device__ __forceinline__ void await(T (&registers)[COUNT])
    {
#ifdef __CUDACC__
        asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NUM_LEFT) : "memory");
#pragma unroll
        for (uint32_t i = 0; i < COUNT; i++) touch(registers[i]);
#endif
    }

  private:
#ifdef __CUDACC__
    static __device__ __forceinline__ void touch(float &value) { asm volatile("" : "+f"(value)::"memory"); }
    static __device__ __forceinline__ void touch(uint32_t &value) { asm volatile("" : "+r"(value)::"memory"); }
    static __device__ __forceinline__ void touch(uint32_t (&values)[4])
    {
#pragma unroll
        for (uint32_t i = 0; i < 4u; i++) touch(values[i]);
    }
#endif
};

} // namespace ibp

#endif
