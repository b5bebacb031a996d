// warp.cuh - functions that all kernels share: scans, byte and bit operations, access to shared memory and to the rows
// staged there, stores of rows, faults, and waiting for earlier kernels.
//
// Many functions of kernels are not inlined (`__noinline__`). Unless the comment of such a function gives another
// reason, the reason is that a kernel then contains its code once.
#ifndef IBP_WARP_CUH
#define IBP_WARP_CUH

#include "../core/format.h"
#include "ibp_cuda.h"

namespace ibp {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
static_assert(IBP_ROWS_PER_BASE == kWarp, "a warp adds up the rooms of the rows that share a base");

__device__ __forceinline__ uint32_t lane_id() { return threadIdx.x % kWarp; }
// Returns the index of the lowest set bit of a word, such as a mask of lanes; 32 if no bit is set.
__device__ __forceinline__ uint32_t lowest_of(uint32_t bits) { return ibp_popcount(~bits & (bits - 1u)); }

// Returns the sum of v over the lanes below this one. total: receives the sum over all lanes.
template <typename T> __device__ __forceinline__ T exclusive_scan(T v, T &total)
{
    T sum = v;
    for (uint32_t step = 1; step < kWarp; step *= 2) {
        const T below = __shfl_up_sync(kAllLanes, sum, step);
        if (lane_id() >= step) sum += below;
    }
    total = __shfl_sync(kAllLanes, sum, kWarp - 1);
    return sum - v;
}

// Returns the sum of v over the block's threads before this one. total: receives the sum over all threads. THREADS: the
// number of threads of the block, which must be 32 warps.
template <uint32_t THREADS, typename T> __device__ __forceinline__ T block_scan(T v, T &total)
{
    static_assert(THREADS == kWarp * kWarp, "a warp scans the sums of all warps");
    __shared__ T of_warps[kWarp];
    T of_warp, before = exclusive_scan(v, of_warp);
    __syncthreads(); // before of_warps is overwritten
    if (lane_id() == 0) of_warps[threadIdx.x / kWarp] = of_warp;
    __syncthreads();
    const T warps_before = exclusive_scan(of_warps[lane_id()], total);
    return before + __shfl_sync(kAllLanes, warps_before, static_cast<int>(threadIdx.x / kWarp));
}

__device__ __forceinline__ bool aligned(const void *p, uint32_t bytes)
{
    return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Functions for programmatic dependent launch. let_next_begin() lets the stream's next kernel begin, if that kernel is
// launched to overlap this one. await_work_before() waits until the stream's earlier work is done and its results can
// be read. A kernel must not read the results before this wait; the clobber of "memory" keeps the compiler from moving
// a read before it.
__device__ __forceinline__ void let_next_begin()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void await_work_before()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Waits at barrier `id` of the block until num_threads threads have arrived. id: 1 to 15. The threads must be whole
// warps.
#ifdef __CUDACC__
__device__ __forceinline__ void named_barrier(uint32_t id, uint32_t num_threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
#endif

// Returns v, plus the v of the lane `step` lanes below if that lane belongs to the same group of LANES lanes. All lanes
// in `mask` must call this together.
template <uint32_t LANES>
__device__ __forceinline__ uint32_t add_from_below(uint32_t v, uint32_t step, uint32_t mask = kAllLanes)
{
#ifdef __CUDACC__ // the shuffle's predicate says whether there is such a lane
    asm volatile("{.reg .u32 t; .reg .pred p; shfl.sync.up.b32 t|p, %0, %1, %2, %3; @p add.u32 %0, %0, t;}"
                 : "+r"(v)
                 : "r"(step), "n"((kWarp - LANES) << 8), "r"(mask));
    return v;
#else
    const uint32_t below = __shfl_up_sync(mask, v, step, LANES);
    return lane_id() % LANES >= step ? v + below : v;
#endif
}

// Returns four of the eight bytes of low and high. Nibble i of order selects byte i of the result: 0 to 3 select the
// bytes of low, 4 to 7 those of high. The low four nibbles of order must be at most 7.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t order)
{
#ifdef __CUDACC__ // __byte_perm clears the highest bits of the nibbles first
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(order));
    return bytes;
#else
    return __byte_perm(low, high, order);
#endif
}

// Does what permute_bytes does, but a nibble n of 8 or more selects a byte that is eight copies of the highest bit of
// byte n - 8.
template <uint32_t ORDER> __device__ __forceinline__ uint32_t replicate_signs(uint32_t low, uint32_t high)
{
#ifdef __CUDACC__
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "n"(ORDER));
    return bytes;
#else
    return __byte_perm(low, high, ORDER);
#endif
}

// Computes any function of three bits, bit by bit (`lop3`). TABLE: the results of the function; bit 4 * a + 2 * b + c
// is the result for the bits a, b and c.
template <uint32_t TABLE> __device__ __forceinline__ uint32_t of_three_bits(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t bits = 0;
#ifdef __CUDACC__
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(bits) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
#else
    for (uint32_t i = 0; i < 8u; i++)
        if (TABLE >> i & 1u) bits |= (i & 4u ? a : ~a) & (i & 2u ? b : ~b) & (i & 1u ? c : ~c);
#endif
    return bits;
}
// Returns the bits of `ones` where mask is 1, and the bits of `zeros` where mask is 0.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t ones, uint32_t zeros)
{
    return of_three_bits<0xca>(mask, ones, zeros);
}
// Returns (a | b) & mask, in one instruction.
__device__ __forceinline__ uint32_t either_bits(uint32_t a, uint32_t b, uint32_t mask)
{
    return of_three_bits<0xa8>(a, b, mask);
}

// Returns a constant in a form that the compiler does not recognize as constant, so that it stays in a register.
__device__ __forceinline__ uint32_t in_register(uint32_t constant)
{
#ifdef __CUDACC__
    asm volatile("" : "+r"(constant));
#endif
    return constant;
}
// Does what in_register does for each word of a struct, which a loop would otherwise compute anew in each iteration.
template <class Words> __device__ __forceinline__ Words in_registers(Words words)
{
#pragma unroll
    for (uint32_t i = 0; i < sizeof words / 4u; i++)
        reinterpret_cast<uint32_t *>(&words)[i] = in_register(reinterpret_cast<uint32_t *>(&words)[i]);
    return words;
}

// ---- dynamic shared memory: bytes, words and bits are counted from its beginning ----

__device__ __forceinline__ uint8_t *shared_bytes()
{
    extern __shared__ uint4 shared[];
    return reinterpret_cast<uint8_t *>(shared);
}
__device__ __forceinline__ uint32_t &shared_word(uint32_t i) { return reinterpret_cast<uint32_t *>(shared_bytes())[i]; }

// Return the 32 or 64 bits of shared memory that begin at bit `position`.
__device__ __forceinline__ uint32_t shared_bits(uint32_t position)
{
    return __funnelshift_r(shared_word(position / 32u), shared_word(position / 32u + 1u), position);
}

__device__ __forceinline__ uint64_t shared_bits64(uint32_t position)
{
    return shared_bits(position) | static_cast<uint64_t>(shared_bits(position + 32u)) << 32;
}

// A group's stage in dynamic shared memory, which holds a coded row.
struct Stage {
    // first: the byte at which the stage begins, a multiple of 16. last_word: the index of the last word that bits_at
    // may begin with; if a corrupt row asks for a later word, this one is read.
    uint32_t first, last_word;

    __device__ __forceinline__ uint8_t *bytes() const { return shared_bytes() + first; }
    __device__ __forceinline__ uint32_t bits_at(uint32_t position) const
    {
        const uint32_t w = ibp_min_u32(position / 32u, last_word);
        return __funnelshift_r(shared_word(w), shared_word(w + 1u), position);
    }
};

// Returns the size of a stage in bytes. The stage has room for a row of row_bytes bytes that begins at any of the
// stage's first 16 bytes, and for at least 16 bytes past the row's end, which may be read.
__host__ __device__ __forceinline__ uint32_t row_stage_bytes(uint32_t row_bytes)
{
    return (row_bytes + 15u) / 16u * 16u + 32u;
}

__device__ __forceinline__ Stage stage_at(uint32_t first, uint32_t row_bytes)
{
    return {first, (first + row_stage_bytes(row_bytes)) / 4u - 2u};
}

// The bytes [low, high) of one row, and the address to which byte `low` goes.
struct Window {
    uint8_t *dst;
    uint32_t low, high;

    // Returns whether the window is the complete row, and can be stored in units of unit_bytes bytes.
    __device__ __forceinline__ bool is_units(uint32_t row_bytes, uint32_t unit_bytes) const
    {
        return low == 0u && high == row_bytes && row_bytes % unit_bytes == 0u && aligned(dst, unit_bytes);
    }
};

// Stores num_words words of a row, at most four, beginning with word w. Bytes outside the window are left out. A word
// that lies completely in the window is stored with one instruction if its address is aligned.
static __device__ __noinline__ void store_part(Window window, uint32_t w, uint32_t num_words, uint4 words)
{
    const uint32_t values[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (uint32_t i = 0; i < 4u; i++) {
        const uint32_t first = 4u * (w + i);
        if (i >= num_words || first >= window.high || first + 4u <= window.low) continue;
        uint8_t *const dst = window.dst + (static_cast<int64_t>(first) - window.low);
        if (first >= window.low && first + 4u <= window.high && aligned(dst, 4)) {
            *reinterpret_cast<uint32_t *>(dst) = values[i];
            continue;
        }
        for (uint32_t b = 0; b < 4u; b++)
            if (first + b >= window.low && first + b < window.high) dst[b] = static_cast<uint8_t>(values[i] >> 8u * b);
    }
}

// Stores WORDS words of a row, 1 or 4, beginning with word w. units: the result of window.is_units for units of WORDS
// words; if it is true, the words must lie in the row.
template <int WORDS>
__device__ __forceinline__ void store_words(const Window &window, bool units, uint32_t w,
                                            const uint32_t (&words)[WORDS])
{
    const uint4 four = make_uint4(words[0], words[1 % WORDS], words[2 % WORDS], words[3 % WORDS]);
    if (!units)
        store_part(window, w, WORDS, four);
    else if (WORDS == 4)
        *reinterpret_cast<uint4 *>(window.dst + 4u * w) = four;
    else
        *reinterpret_cast<uint32_t *>(window.dst + 4u * w) = words[0];
}

// Records a fault, unless a thread has already recorded one.
__device__ __forceinline__ void record_fault(ibp_fault *fault, ibp_status status, int64_t position, int64_t id)
{
    if (atomicCAS(reinterpret_cast<unsigned long long *>(&fault->taken), 0ull, 1ull) != 0ull) return;
    fault->position = position;
    fault->id = id;
    __threadfence_system();
    *reinterpret_cast<volatile int64_t *>(&fault->status) = status;
}

} // namespace ibp

#endif
