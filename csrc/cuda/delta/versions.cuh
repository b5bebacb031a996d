// versions.cuh - what the kernels of deltas share: the rows of many tensors as one sequence, elements side by side in
// words, and sums for fingerprints.
#ifndef IBP_DELTA_VERSIONS_CUH
#define IBP_DELTA_VERSIONS_CUH

#include "../../internal/ibp_delta.h"
#include "../cuda_checks.h"
#include "../digits.cuh"
#include "../kinds.h"
#include "../launch.cuh"
#include "sums.cuh"

namespace ibp {

constexpr uint32_t kMostDeltaRow = 8192; // bytes
// Most rows take few bytes as coded: these are worked on with little shared memory each, by many warps at once, the
// others by a launch of their own.
constexpr uint32_t kShortCoded = 2048;

// Rows that a launch takes.
enum class Coded : uint32_t { kShort, kLong };

// Whether a launch takes a row of this entry of lengths that is stored.
__device__ __forceinline__ bool takes(Coded coded, uint32_t length)
{
    return (length != 0u && length <= kShortCoded) == (coded == Coded::kShort);
}
// Bytes of a row as stored, at most, where a launch takes it.
__host__ __device__ __forceinline__ uint32_t most_stored(Coded coded, uint32_t row_bytes)
{
    return coded == Coded::kShort ? ibp_min_u32(kShortCoded, row_bytes) : row_bytes;
}

// ---- the sequence of rows ----

// Row `row` of a version: bytes from `start` on, `valid` of them; none of a row that no version has.
struct VersionRow {
    int64_t row, start;
    uint32_t version, valid;
};

// The version that has row r of the sequence.
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

// The rows of a warp: runs of rows behind each other, mostly of one version, where there are enough. Few blocks take
// the same version at the same time then: warps that add to the sums of one version at once wait for each other.
struct WarpRows {
    static constexpr uint32_t kRunBits = 3; // of the number of rows in a run
    const int64_t num_rows;
    const uint32_t warps = blockDim.x / kWarp;
    const uint32_t warp = __shfl_sync(kAllLanes, threadIdx.x / kWarp, 0); // known as uniform
    const uint32_t run_bits;

    __device__ __forceinline__ explicit WarpRows(int64_t rows_of_all)
        : num_rows(rows_of_all), run_bits(num_rows >> kRunBits >= int64_t{warps} * gridDim.x ? kRunBits : 0u)
    {
    }
    // The number of its k-th row, which rises with k.
    __device__ __forceinline__ int64_t row(uint32_t k) const
    {
        const int64_t run = (int64_t{k >> run_bits} * gridDim.x + blockIdx.x) * warps + warp;
        return (run << run_bits) + low_bits(k, run_bits);
    }
    // Whether it is there. By all lanes together: a vote, from which the compiler knows that lanes stay together.
    __device__ __forceinline__ bool has(uint32_t k) const { return __any_sync(kAllLanes, row(k) < num_rows); }
};

// Sums of lanes, which are added to a place of device memory and those behind it when the place changes, and at the
// end. By all lanes together.
template <uint32_t N> struct PlacedSums {
    unsigned long long *place = nullptr;
    uint64_t own[N] = {};

    // Turns to a place.
    __device__ __forceinline__ void open(uint64_t *to)
    {
        if (reinterpret_cast<unsigned long long *>(to) != place) flush(to);
    }
    __device__ __forceinline__ void flush(uint64_t *next = nullptr)
    {
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            const uint64_t sum = sum_of_warp(own[i]); // 0 without a place
            if (lane_id() == 0u && sum != 0u) atomicAdd(place + i, static_cast<unsigned long long>(sum));
            own[i] = 0;
        }
        place = reinterpret_cast<unsigned long long *>(next);
    }
};

// ---- codebooks ----

inline bool has_delta_rows(const ibp_codebook *codebook)
{
    if (!is_codebook(codebook) || codebook->scheme != IBP_SCHEME_PLANES) return false;
    return codebook->planes.listed && codebook->planes.default_value == 0u && knows_fields(*codebook, kConsecutive) &&
           !ibp_has_clusters(codebook) && codebook->row_bytes % 16u == 0u && codebook->row_bytes <= kMostDeltaRow;
}

inline bool are_versions(const ibp_delta_tensor *versions, uint32_t num_versions, int64_t num_rows)
{
    return versions != nullptr && num_versions > 0u && num_rows >= 0 && num_rows % IBP_ROWS_PER_BASE == 0 &&
           num_rows <= INT64_MAX / (int64_t{IBP_OVERFLOW_ALIGN} * kMostDeltaRow);
}

// ---- launching ----

// What the functions of deltas are asked for.
struct DeltaCall {
    const ibp_codebook &cb;
    const ibp_delta_tensor *versions;
    uint32_t num_versions;
    int64_t num_rows;
    ibp_stream stream;
};

// Launches a kernel whose warps take the rows of a call.
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
