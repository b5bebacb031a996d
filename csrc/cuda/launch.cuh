// launch.cuh - errors of CUDA calls, and the launch of kernels by groups of threads. Host code.
#ifndef IBP_LAUNCH_CUH
#define IBP_LAUNCH_CUH

#include "warp.cuh"

namespace ibp {

// How a kernel is launched. cluster: blocks that go to one cluster. overlaps: it may begin before the kernel before it
// in the stream is done, and waits for that itself (programmatic dependent launch; from compute capability 9.0 on).
struct Launch {
    uint32_t blocks, threads, shared_bytes, cluster;
    bool overlaps = false;
};

// Records the current CUDA error, if any, for ibp_cuda_last_error.
ibp_status check_cuda(cudaError_t error);

// Whether memory is the host's, pinned, which a GPU reads over the link.
bool is_host_memory(const void *memory);

// Lets a kernel have all the dynamic shared memory that a block can have.
ibp_status allow_shared(const void *kernel);

// Blocks of up to most_threads threads, one an SM, for groups of threads that take a job at a time and have
// group_bytes of shared memory each, besides the block's block_bytes; never more SMs than max_sms (0: all). Few jobs
// are spread over all of them. Where max_sms leaves SMs to other kernels, blocks come in clusters of two, which get
// SMs that are neighbours: a matrix product in such clusters cannot use an SM whose neighbour is taken.
ibp_status plan_groups(const void *kernel, uint32_t most_threads, uint32_t block_bytes, uint32_t group_bytes,
                       uint32_t group_threads, int64_t num_jobs, int max_sms, Launch *launch);

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
