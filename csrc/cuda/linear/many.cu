// many.cu - launches the kernel that multiplies up to 32 vectors. If 9.0 is among the compute capabilities that the
// library is compiled for, this file is compiled for sm_90a (wgmma).
#include "many.h"

#include "many.cuh"

#include "../launch.cuh"

#include <algorithm>

namespace ibp {

constexpr uint32_t kMostSharedBytes = 226u << 10;
constexpr uint32_t kMostPortable = 8; // largest number of blocks of a cluster, unless a kernel is allowed more

ibp_status KnownClusters::count(const void *kernel, uint32_t parts, uint32_t threads, uint32_t shared_bytes,
                                uint32_t *clusters)
{
#ifdef __CUDACC__
    int device = 0, major = 0, found = 0;
    ibp_status status = check_cuda(cudaGetDevice(&device));
    if (status != IBP_OK) return status;
    const uint32_t held = device < kMostDevices ? known[device].load(std::memory_order_relaxed) : 0u;
    *clusters = held - 1u;
    if (held != 0u) return IBP_OK;
    cudaFuncAttributes code{};
    status = check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    if (status != IBP_OK) return status;
    const bool has_code = major == 9 && check_cuda(cudaFuncGetAttributes(&code, kernel)) == IBP_OK;
    if (has_code) {
        cudaLaunchAttribute cluster{};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = parts, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = parts, config.blockDim = threads, config.dynamicSmemBytes = shared_bytes;
        config.attrs = &cluster, config.numAttrs = 1;
        status = prepare(kernel);
        if (status == IBP_OK && parts > kMostPortable)
            status = check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
        if (status == IBP_OK) status = check_cuda(cudaOccupancyMaxActiveClusters(&found, kernel, &config));
        if (status != IBP_OK) return status;
    }
    *clusters = static_cast<uint32_t>(std::max(0, found));
    if (device < kMostDevices) known[device] = *clusters + 1u;
    return IBP_OK;
#else
    *clusters = parts == 1u ? 2u : 0u; // without a GPU one block runs at a time
    return IBP_OK;
#endif
}

template <class Block> static ibp_status launch_if_fits(LinearJob job, ibp_stream stream, bool *launched)
{
    job.cut(Block::kTileRows);
    const uint32_t shared_bytes = Block::shared_bytes(job);
    if (shared_bytes > kMostSharedBytes) return IBP_OK;
    const auto kernel = many_kernel<Block>;
    static KnownClusters known;
    uint32_t clusters = 0;
    ibp_status status = known.count(reinterpret_cast<const void *>(kernel), Block::kParts, Block::kThreads,
                                    kMostSharedBytes, &clusters);
    if (status != IBP_OK || clusters == 0u) return status;
    const uint32_t blocks = Block::kParts * std::min(clusters, job.num_tiles);
    status = prepare(reinterpret_cast<const void *>(kernel));
    *launched = status == IBP_OK;
    return status == IBP_OK
               ? launch_kernel(kernel, Launch{blocks, Block::kThreads, shared_bytes, Block::kParts, true}, stream, job)
               : status;
}

// Launches the kernel with a number of blocks in a cluster that suits the number of columns. A tile has a fixed cost
// for each block, so clusters have few blocks if there are few columns.
template <uint32_t VECTORS> static ibp_status launch_parts(const LinearJob &job, ibp_stream stream, bool *launched)
{
#ifdef __CUDACC__
    constexpr uint32_t kShortSteps = 40;
    ibp_status status = IBP_OK;
    if (num_steps(job) <= kShortSteps) status = launch_if_fits<ManyBlock<VECTORS, 4>>(job, stream, launched);
    if (status == IBP_OK && !*launched) status = launch_if_fits<ManyBlock<VECTORS, 8>>(job, stream, launched);
    if constexpr (VECTORS > 16u)
        if (status == IBP_OK && !*launched) status = launch_if_fits<ManyBlock<VECTORS, 16, 2>>(job, stream, launched);
    return status;
#else // without a GPU one block runs at a time
    return launch_if_fits<ManyBlock<VECTORS, 1, VECTORS == 32u ? 2u : 1u>>(job, stream, launched);
#endif
}

ibp_status multiply_many(const LinearJob &job, ibp_stream stream, bool *launched)
{
    *launched = false;
    return job.num_vectors <= 16u ? launch_parts<16>(job, stream, launched) : launch_parts<32>(job, stream, launched);
}

} // namespace ibp
