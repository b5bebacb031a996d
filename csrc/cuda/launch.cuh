// launch.cuh - plans and launches kernels. Host code.
#ifndef IBP_LAUNCH_CUH
#define IBP_LAUNCH_CUH

#include "errors.h"
#include "warp.cuh"

#include <algorithm>

namespace ibp {

// The configuration of a launch. blocks: number of blocks. threads: number of threads in a block. shared_bytes: size of
// a block's dynamic shared memory. cluster: number of blocks in a cluster. overlaps: the kernel may begin before the
// stream's previous kernel is done; it must call await_work_before() to wait for that kernel (programmatic dependent
// launch, which needs compute capability 9.0).
struct Launch {
    uint32_t blocks, threads, shared_bytes, cluster;
    bool overlaps = false;
};

// Returns whether memory is pinned host memory, which a GPU reads over PCIe or NVLink.
bool is_host_memory(const void *memory);

// Sizes of the current device. number: the device's ordinal. sms: number of SMs. block_bytes: largest size of dynamic
// shared memory that a block can have. sm_bytes: size of an SM's shared memory.
struct DeviceSizes {
    int number, sms, block_bytes, sm_bytes;
};

ibp_status read_device(DeviceSizes *sizes);

// Lets a kernel use all the dynamic shared memory that a block can have. is_of_90: receives whether the kernel was
// compiled for compute capability 9.0 or later. Only such a kernel can be launched in clusters or overlap the kernel
// before it; in other kernels await_work_before() does nothing.
ibp_status prepare(const void *kernel, bool *is_of_90 = nullptr);

// Plans a launch whose blocks consist of groups. A group has group_threads threads and takes one job at a time. A block
// has up to most_threads threads. Each SM that is used gets one block, and at most max_sms SMs are used (0: all). A
// block gets block_bytes bytes of shared memory, and group_bytes more for each of its groups. If there are few jobs,
// blocks are smaller, so that the jobs are spread over all SMs.
//
// The launch overlaps the one before it (programmatic dependent launch), so the kernel must begin with
// await_work_before(). If max_sms leaves SMs to other kernels, blocks come in clusters of two, which get neighbouring
// SMs. Then both SMs of a pair are free or both are taken. This matters to another kernel in clusters of two, such as a
// matrix product, which needs free pairs.
ibp_status plan_groups(const void *kernel, uint32_t most_threads, uint32_t block_bytes, uint32_t group_bytes,
                       uint32_t group_threads, int64_t num_jobs, int max_sms, Launch *launch);

// Plans a launch for num_jobs jobs, without dynamic shared memory. Each block takes a_block jobs at a time. There are
// at most most_blocks blocks.
inline Launch plan_jobs(int64_t num_jobs, int64_t a_block, int64_t most_blocks, uint32_t num_threads)
{
    return {static_cast<uint32_t>(std::min((num_jobs + a_block - 1) / a_block, most_blocks)), num_threads, 0, 1};
}

// Plans a launch for num_jobs jobs as plan_jobs does, for blocks with shared_bytes bytes of dynamic shared memory.
// There are no more blocks than can be resident at once. If max_sms is not 0, there are at most max_sms blocks, one for
// each SM.
inline ibp_status plan_resident(const void *kernel, uint32_t num_threads, uint32_t shared_bytes, int64_t num_jobs,
                                int64_t a_block, int max_sms, Launch *launch)
{
    DeviceSizes device{};
    int blocks_an_sm = 0;
    ibp_status status = read_device(&device);
    if (status == IBP_OK && shared_bytes != 0u) status = prepare(kernel);
    // For fewer jobs, one block on each SM is enough.
    if (status == IBP_OK && max_sms == 0 && num_jobs > a_block * device.sms)
        status = check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_an_sm, kernel,
                                                                          static_cast<int>(num_threads), shared_bytes));
    const int64_t most = max_sms > 0 ? std::min(max_sms, device.sms) : int64_t{device.sms} * std::max(1, blocks_an_sm);
    *launch = plan_jobs(num_jobs, a_block, most, num_threads);
    launch->shared_bytes = shared_bytes;
    return status;
}

// Launches a kernel as planned.
template <class... Parameters, class... Arguments>
ibp_status launch_kernel(void (*kernel)(Parameters...), const Launch &launch, ibp_stream stream,
                         const Arguments &...arguments)
{
#ifdef __CUDACC__
    cudaLaunchAttribute attributes[2]{};
    unsigned num_attributes = 0;
    if (launch.cluster > 1u) {
        cudaLaunchAttribute &cluster = attributes[num_attributes++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = launch.cluster, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    }
    if (launch.overlaps) {
        cudaLaunchAttribute &overlap = attributes[num_attributes++];
        overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        overlap.val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = launch.blocks, config.blockDim = launch.threads, config.dynamicSmemBytes = launch.shared_bytes;
    config.stream = stream;
    config.attrs = attributes, config.numAttrs = num_attributes;
    return check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...));
#else
    emulate(kernel, launch.blocks, launch.threads, launch.shared_bytes, stream, arguments...);
    return IBP_OK;
#endif
}

} // namespace ibp

#endif
