// versions.cuh - shared code of the kernels that make and apply deltas: the sequence of the rows of all tensors, the
// distribution of these rows over warps, sums in device memory, and launches. Here a version is an ibp_delta_tensor, a
// tensor whose delta is made or applied.
#ifndef IBP_DELTA_VERSIONS_CUH
#define IBP_DELTA_VERSIONS_CUH

#include "../../internal/ibp_delta.h"
#include "../cuda_checks.h"
#include "../digits.cuh"
#include "../kinds.h"
#include "../launch.cuh"
#include "sums.cuh"

namespace ibp {

constexpr uint32_t kMostDeltaRow = 8192; // largest size of a row in bytes
// Most rows are coded in at most kShortCoded bytes, and one launch processes all of these. Another launch processes all
// other rows. Short rows need little shared memory, so more warps can be resident.
constexpr uint32_t kShortCoded = 2048;

// The rows that a launch processes: coded rows of at most kShortCoded bytes; or longer coded rows, and raw rows.
enum class Coded : uint32_t { kShort, kLong };

// Returns whether a launch processes a row with this entry in `lengths`. The row must not be a default row.
__device__ __forceinline__ bool takes(Coded coded, uint32_t length)
{
    return (length != 0u && length <= kShortCoded) == (coded == Coded::kShort);
}
// Returns the largest stored size in bytes of the rows that a launch processes.
__host__ __device__ __forceinline__ uint32_t most_stored(Coded coded, uint32_t row_bytes)
{
    return coded == Coded::kShort ? ibp_min_u32(kShortCoded, row_bytes) : row_bytes;
}

// ---- the sequence of rows ----

// A row of the sequence. version: index of its version. row: its number among the rows of the version. start: the byte
// of the tensor at which the row begins. valid: number of bytes that the row has; 0 if it belongs to no version.
struct VersionRow {
    int64_t row, start;
    uint32_t version, valid;
};

// Returns the index of the version to which row r of the sequence belongs. If the row belongs to no version, returns
// the index of the last version before it.
__device__ __forceinline__ uint32_t find_version(const ibp_delta_tensor *versions, uint32_t num_versions, int64_t r)
{
    uint32_t first = 0, last = num_versions;
    while (last - first > 1u) {
        const uint32_t middle = (first + last) / 2u;
        if (versions[middle].first_row <= r)
            first = middle;
        else
            last = middle;
    }
    return first;
}
// Returns row r of the sequence. version: the result of find_version for r.
__device__ __forceinline__ VersionRow row_of(const ibp_delta_tensor *versions, uint32_t version, uint32_t row_bytes,
                                             int64_t r)
{
    const int64_t row = r - versions[version].first_row, start = row * row_bytes,
                  left = versions[version].num_bytes - start;
    return {row, start, version, left <= 0 ? 0u : static_cast<uint32_t>(min(left, int64_t{row_bytes}))};
}
__device__ __forceinline__ VersionRow find_row(const ibp_delta_tensor *versions, uint32_t num_versions,
                                               uint32_t row_bytes, int64_t r)
{
    return row_of(versions, find_version(versions, num_versions, r), row_bytes, r);
}

// The rows of the sequence that a warp processes. If there are enough rows for all warps, a warp takes runs of
// 2^kRunBits consecutive rows, which usually belong to one version. Fewer warps then add to the sums of the same
// version at the same time; such atomic additions wait for each other.
struct WarpRows {
    static constexpr uint32_t kRunBits = 3;
    const int64_t num_rows;
    const uint32_t warps = blockDim.x / kWarp;
    // The index of the warp in its block. The shuffle tells the compiler that all lanes have the same value.
    const uint32_t warp = __shfl_sync(kAllLanes, threadIdx.x / kWarp, 0);
    const uint32_t run_bits;

    __device__ __forceinline__ explicit WarpRows(int64_t rows_of_all)
        : num_rows(rows_of_all), run_bits(num_rows >> kRunBits >= int64_t{warps} * gridDim.x ? kRunBits : 0u)
    {
    }
    // Returns the number, in the sequence, of the warp's k-th row. It increases with k, and may be num_rows or more.
    __device__ __forceinline__ int64_t row(uint32_t k) const
    {
        const int64_t run = (int64_t{k >> run_bits} * gridDim.x + blockIdx.x) * warps + warp;
        return (run << run_bits) + low_bits(k, run_bits);
    }
    // Returns whether the warp has a k-th row. All lanes must call it together. Although all lanes have the same value,
    // the function takes a vote, which tells the compiler that the lanes stay together.
    __device__ __forceinline__ bool has(uint32_t k) const { return __any_sync(kAllLanes, row(k) < num_rows); }
};

// Accumulates N sums in each lane, in own[]. When the destination changes, and when the caller calls flush() at the
// end, the warp's totals are added atomically to N consecutive words of device memory, beginning at `place`. All lanes
// must call every function together.
template <uint32_t N> struct PlacedSums {
    unsigned long long *place = nullptr;
    uint64_t own[N] = {};

    // Makes `to` the destination of what is added to own[] from now on.
    __device__ __forceinline__ void open(uint64_t *to)
    {
        if (reinterpret_cast<unsigned long long *>(to) != place) flush(to);
    }
    // Adds the totals to the present destination, clears own[], and makes `next` the destination.
    __device__ __forceinline__ void flush(uint64_t *next = nullptr)
    {
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            const uint64_t sum = sum_of_warp(own[i]); // 0 if there is no destination yet
            if (lane_id() == 0u && sum != 0u) atomicAdd(place + i, static_cast<unsigned long long>(sum));
            own[i] = 0;
        }
        place = reinterpret_cast<unsigned long long *>(next);
    }
};

// ---- codebooks ----

// Returns whether deltas that are coded with a codebook can be applied (ibp_cuda_applies_deltas).
inline bool has_delta_rows(const ibp_codebook *codebook)
{
    if (!is_codebook(codebook) || codebook->scheme != IBP_SCHEME_PLANES) return false;
    return codebook->planes.listed && codebook->planes.default_value == 0u && knows_fields(*codebook, kConsecutive) &&
           !ibp_has_clusters(codebook) && codebook->row_bytes % 16u == 0u && codebook->row_bytes <= kMostDeltaRow;
}

// Checks the arguments that describe the tensors. The structs are in device memory and are not checked.
inline bool are_versions(const ibp_delta_tensor *versions, uint32_t num_versions, int64_t num_rows)
{
    return versions != nullptr && num_versions > 0u && num_rows >= 0 && num_rows % IBP_ROWS_PER_BASE == 0 &&
           num_rows <= INT64_MAX / (int64_t{IBP_OVERFLOW_ALIGN} * kMostDeltaRow);
}

// ---- launching ----

// The common arguments of the functions that launch kernels for deltas.
struct DeltaCall {
    const ibp_codebook &cb;
    const ibp_delta_tensor *versions;
    uint32_t num_versions;
    int64_t num_rows;
    ibp_stream stream;
};

// Launches a kernel whose warps process the rows of a call, one row at a time (WarpRows). shared_bytes: size of a
// block's dynamic shared memory.
template <class... Parameters, class... Arguments>
ibp_status launch_rows(void (*kernel)(Parameters...), uint32_t num_threads, uint32_t shared_bytes,
                       const DeltaCall &call, const Arguments &...arguments)
{
    Launch launch;
    const ibp_status status = plan_resident(reinterpret_cast<const void *>(kernel), num_threads, shared_bytes,
                                            call.num_rows, num_threads / kWarp, 0, &launch);
    return status == IBP_OK ? launch_kernel(kernel, launch, call.stream, arguments...) : status;
}

} // namespace ibp

#endif
