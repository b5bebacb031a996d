// warp.cuh - what the kernels share: one warp works on one row, staged in shared memory.
#ifndef IBP_WARP_CUH
#define IBP_WARP_CUH

#include "format.h"
#include "ibp_cuda.h"

namespace ibp {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ uint32_t lane_id() { return threadIdx.x % kWarp; }

// Sum of v over the lanes below this one, and over all lanes.
__device__ __forceinline__ uint32_t exclusive_scan(uint32_t v, uint32_t &total)
{
    uint32_t sum = v;
    for (uint32_t step = 1; step < kWarp; step *= 2) {
        const uint32_t below = __shfl_up_sync(kAllLanes, sum, step);
        if (lane_id() >= step) sum += below;
    }
    total = __shfl_sync(kAllLanes, sum, kWarp - 1);
    return sum - v;
}

__device__ __forceinline__ bool aligned(const void *p, uint32_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// Copies by the whole warp, with the widest accesses that both addresses allow; no byte outside the ranges is touched.
template <typename T> __device__ __forceinline__ void copy_as(uint8_t *dst, const uint8_t *src, uint32_t num_bytes)
{
    const uint32_t whole = num_bytes / sizeof(T);
#pragma unroll 4
    for (uint32_t i = lane_id(); i < whole; i += kWarp) reinterpret_cast<T *>(dst)[i] = reinterpret_cast<const T *>(src)[i];
    for (uint32_t i = whole * sizeof(T) + lane_id(); i < num_bytes; i += kWarp) dst[i] = src[i];
}
__device__ __forceinline__ void copy_bytes(uint8_t *dst, const uint8_t *src, uint32_t num_bytes)
{
    if (aligned(dst, 16) && aligned(src, 16))
        copy_as<uint4>(dst, src, num_bytes);
    else if (aligned(dst, 4) && aligned(src, 4))
        copy_as<uint32_t>(dst, src, num_bytes);
    else
        copy_as<uint8_t>(dst, src, num_bytes);
}
// Bytes up to the first multiple of 16, vectors, bytes again.
__device__ __forceinline__ void zero_bytes(uint8_t *dst, uint32_t num_bytes)
{
    const uint32_t head = ibp_min_u32(static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(dst) % 16u), num_bytes);
    const uint32_t vectors = (num_bytes - head) / 16u, tail = head + 16u * vectors;
    if (lane_id() < head) dst[lane_id()] = 0;
    for (uint32_t i = lane_id(); i < vectors; i += kWarp) reinterpret_cast<uint4 *>(dst + head)[i] = make_uint4(0, 0, 0, 0);
    if (lane_id() < num_bytes - tail) dst[tail + lane_id()] = 0;
}

// A warp's part of shared memory: a row as coded, from byte `shift` on, read as 32-bit words.
struct Stage {
    uint32_t *words;
    uint32_t last_word; // positions past it read this word: a corrupt row asks for them

    __device__ __forceinline__ uint8_t *bytes() const { return reinterpret_cast<uint8_t *>(words); }
    __device__ __forceinline__ uint32_t bits_at(uint32_t position) const
    {
        const uint32_t w = ibp_min_u32(position / 32u, last_word);
        return __funnelshift_r(words[w], words[w + 1], position);
    }
    __device__ __forceinline__ uint64_t bits64_at(uint32_t position) const
    {
        return bits_at(position) | static_cast<uint64_t>(bits_at(position + 32u)) << 32;
    }
    __device__ __forceinline__ void or_bits(uint32_t position, uint32_t bits) const
    {
        const uint32_t w = position / 32u, shift = position % 32u;
        if (bits == 0u || w > last_word) return;
        atomicOr(&words[w], bits << shift);
        if (shift != 0u && (bits >> (32u - shift)) != 0u) atomicOr(&words[w + 1], bits >> (32u - shift));
    }
};

// Room for a row of row_bytes that starts anywhere in its first 16 bytes, and the word after it.
__host__ __device__ __forceinline__ uint32_t row_stage_bytes(uint32_t row_bytes) { return (row_bytes + 15u) / 16u * 16u + 32u; }

// Room for a queue of listed positions and for a bitmap of all positions, behind the row's stage.
constexpr uint32_t kQueue = 2 * kWarp;
__host__ __device__ __forceinline__ uint32_t listed_bytes(const ibp_codebook &cb)
{
    if (cb.scheme != IBP_SCHEME_PLANES || !cb.planes.listed) return 0;
    return 4u * kQueue + (cb.row_bytes / cb.planes.element_bytes + 127u) / 128u * 16u + 16u;
}

__host__ __device__ __forceinline__ uint32_t stage_bytes(const ibp_codebook &cb)
{
    return row_stage_bytes(cb.row_bytes) + listed_bytes(cb);
}

__device__ __forceinline__ Stage warp_stage(const ibp_codebook &cb)
{
    extern __shared__ uint4 shared[];
    uint8_t *const start = reinterpret_cast<uint8_t *>(shared) + (threadIdx.x / kWarp) * stage_bytes(cb);
    return {reinterpret_cast<uint32_t *>(start), row_stage_bytes(cb.row_bytes) / 4u - 2u};
}

// Brings bytes [src, src + num_bytes) to stage byte src % 16 with aligned 16-byte loads and returns that shift. The loads stay within
// [begin, end), the array that src lies in; where they would leave it, bytes are loaded.
__device__ __forceinline__ uint32_t stage_row(Stage stage, const uint8_t *src, uint32_t num_bytes, const uint8_t *begin,
                                              const uint8_t *end)
{
    const uint32_t shift = reinterpret_cast<uintptr_t>(src) % 16u;
    const uint8_t *const from = src - shift;
    const uint32_t vectors = (shift + num_bytes + 15u) / 16u;
    uint4 *const to = reinterpret_cast<uint4 *>(stage.words);
#pragma unroll 4
    for (uint32_t i = lane_id(); i < vectors; i += kWarp) {
        const uint8_t *const p = from + 16u * i;
        if (p >= begin && p + 16 <= end)
            to[i] = *reinterpret_cast<const uint4 *>(p);
        else
            for (uint32_t j = 0; j < 16u; j++)
                if (p + j >= begin && p + j < end) stage.bytes()[16u * i + j] = p[j];
    }
    return shift;
}

// The bytes [low, high) of one row, and where they go.
struct Window {
    uint8_t *dst;
    uint32_t low, high;
};

// Writes the bytes of WORDS words that lie in the window: one vector store where it is aligned and whole, else words or bytes.
template <int WORDS>
__device__ __forceinline__ void store_words(const Window &window, bool vectors, uint32_t w, const uint32_t (&words)[WORDS])
{
    const uint32_t first = 4u * w, end = first + 4u * WORDS;
    if (first >= window.high || end <= window.low) return;
    if (vectors && first >= window.low && end <= window.high) {
        uint32_t *const dst = reinterpret_cast<uint32_t *>(window.dst + (first - window.low));
        if (WORDS == 4)
            *reinterpret_cast<uint4 *>(dst) = make_uint4(words[0], words[1 % WORDS], words[2 % WORDS], words[3 % WORDS]);
        else
            dst[0] = words[0];
        return;
    }
    if (WORDS > 1 && aligned(window.dst + (first - window.low), 4) && first >= window.low && end <= window.high) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) reinterpret_cast<uint32_t *>(window.dst + (first - window.low))[i] = words[i];
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4u * WORDS; i++)
        if (first + i >= window.low && first + i < window.high)
            window.dst[first + i - window.low] = static_cast<uint8_t>(words[i / 4u] >> (8u * (i % 4u)));
}

// Records the first fault that any thread meets.
__device__ __forceinline__ void record_fault(ibp_fault *fault, ibp_status status, int64_t position, int64_t id)
{
    if (atomicCAS(reinterpret_cast<unsigned long long *>(&fault->taken), 0ull, 1ull) != 0ull) return;
    fault->position = position;
    fault->id = id;
    __threadfence_system();
    *reinterpret_cast<volatile int64_t *>(&fault->status) = status;
}
__device__ __forceinline__ void note_fault(ibp_fault *fault, ibp_status status, int64_t position, int64_t id) // by a whole warp
{
    if (lane_id() == 0 && fault != nullptr) record_fault(fault, status, position, id);
}

// The two places of a row's stored bytes (FORMAT.md section 3).
struct RowSpan {
    const uint8_t *slot, *overflow;
    uint32_t in_slot, in_overflow, valid;
    bool raw, in_bounds;
};

__device__ __forceinline__ uint32_t stored_bytes(const ibp_table &table, int64_t num_bytes, int64_t row)
{
    const uint32_t length = table.lengths ? __ldg(table.lengths + row) : 0u;
    return length ? length : ibp_valid_bytes(num_bytes, table.codebook.row_bytes, row);
}

// By the whole warp: each lane looks at one row of the group of 32 that shares a base.
__device__ __forceinline__ RowSpan locate_row(const ibp_table &table, int64_t num_bytes, int64_t num_rows, int64_t row)
{
    RowSpan span;
    const uint32_t stored = stored_bytes(table, num_bytes, row), slot_bytes = table.slot_bytes;
    const uint64_t slot_start = static_cast<uint64_t>(row) * slot_bytes - table.slots_start, slots_end = static_cast<uint64_t>(table.slots_bytes);
    span.valid = ibp_valid_bytes(num_bytes, table.codebook.row_bytes, row);
    span.raw = !table.lengths || __ldg(table.lengths + row) == 0;
    span.in_overflow = ibp_overflow_part(stored, slot_bytes);
    span.in_slot = stored - span.in_overflow;
    span.slot = table.slots + slot_start;
    span.overflow = table.overflow;
    span.in_bounds = stored <= span.valid && (span.in_slot == 0 || (slot_start <= slots_end && span.in_slot <= slots_end - slot_start));
    if (span.in_overflow == 0) return span;
    if (!table.bases) {
        span.in_bounds = false;
        return span;
    }
    const int64_t neighbour = row / kWarp * kWarp + lane_id();
    uint32_t room = 0;
    if (neighbour < row && neighbour < num_rows)
        room = ibp_overflow_room(ibp_overflow_part(stored_bytes(table, num_bytes, neighbour), slot_bytes), slot_bytes);
    const uint32_t before = __reduce_add_sync(kAllLanes, room);
    const uint64_t start = __ldg(table.bases + row / kWarp) - table.overflow_start,
                   end = static_cast<uint64_t>(table.overflow_bytes);
    span.overflow = table.overflow + start + before;
    span.in_bounds = span.in_bounds && start <= end && uint64_t{before} + span.in_overflow <= end - start;
    return span;
}

// How a kernel with one staged row a warp is launched.
struct Launch {
    uint32_t blocks, threads, shared_bytes;
};

// Records the current CUDA error, if any, for ibp_cuda_last_error.
ibp_status check_cuda(cudaError_t error);

// Blocks of up to most_threads threads, one an SM, for groups of threads that take group_bytes of shared memory each and a job at a time; never more SMs
// than max_sms (0: all). Few jobs are spread over all of them.
ibp_status plan_groups(const void *kernel, uint32_t most_threads, uint32_t group_bytes, uint32_t group_threads, int64_t num_jobs, int max_sms, Launch *launch);

// Blocks of up to 32 warps, as many as shared memory allows, one or two an SM; never more SMs than max_sms (0: all).
ibp_status plan_launch(const void *kernel, const ibp_codebook &codebook, int64_t num_jobs, int max_sms, Launch *launch);

} // namespace ibp

#endif
