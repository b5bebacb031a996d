// device.cu - devices, errors, launch sizes and pinned memory.
#include "warp.cuh"

#include <algorithm>
#include <cstring>

namespace ibp {

static thread_local char last_error[256];

constexpr int kStaticSharedBytes = 1024; // at most, of any kernel here

ibp_status check_cuda(cudaError_t error)
{
    if (error == cudaSuccess) return IBP_OK;
    strncpy(last_error, cudaGetErrorString(error), sizeof last_error - 1);
    cudaGetLastError(); // a launch that was refused must not fail the caller's next call too
    return IBP_CUDA_ERROR;
}

// What a block may have, and how many blocks.
struct Limits {
    int sms, shared_bytes;
};
static ibp_status limits_of(int max_sms, Limits *limits)
{
    int device = 0, num_sms = 0;
    ibp_status status = check_cuda(cudaGetDevice(&device));
    if (status == IBP_OK) status = check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    if (status == IBP_OK)
        status = check_cuda(cudaDeviceGetAttribute(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    limits->sms = max_sms > 0 ? std::min(max_sms, num_sms) : num_sms;
    return status;
}

// Always the most: another thread may be about to launch the kernel with more than this one's launch needs.
static ibp_status allow_shared(const void *kernel, int shared_bytes)
{
    return check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes - kStaticSharedBytes));
}
ibp_status allow_shared(const void *kernel)
{
    Limits limits;
    const ibp_status status = limits_of(0, &limits);
    return status == IBP_OK ? allow_shared(kernel, limits.shared_bytes) : status;
}

ibp_status plan_groups(const void *kernel, uint32_t most_threads, uint32_t block_bytes, uint32_t group_bytes,
                       uint32_t group_threads, int64_t num_jobs, int max_sms, Launch *launch)
{
    Limits limits;
    const ibp_status status = limits_of(max_sms, &limits);
    if (status != IBP_OK) return status;
    const uint32_t unit = std::max(group_threads, kWarp),
                   groups_a_unit = unit / group_threads; // threads are added by whole warps and groups
    const uint32_t unit_bytes = groups_a_unit * group_bytes;
    const int64_t room = limits.shared_bytes - kStaticSharedBytes - int64_t{block_bytes};
    const int64_t fitting = unit_bytes ? room / unit_bytes : most_threads;
    const int64_t units = (num_jobs + groups_a_unit - 1) / groups_a_unit, an_sm = (units + limits.sms - 1) / limits.sms;
    const int64_t a_block = std::min({fitting, int64_t{most_threads / unit}, an_sm});
    if (a_block < 1) return IBP_INVALID_ARGUMENT;
    *launch = {static_cast<uint32_t>(std::min<int64_t>((units + a_block - 1) / a_block, limits.sms)),
               static_cast<uint32_t>(a_block * unit), static_cast<uint32_t>(block_bytes + a_block * unit_bytes)};
    return allow_shared(kernel, limits.shared_bytes);
}

} // namespace ibp

extern "C" {

bool ibp_cuda_is_built(void) { return true; }

int ibp_cuda_device_count(void)
{
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();
    return 0;
}

const char *ibp_cuda_last_error(void) { return ibp::last_error; }

ibp_status ibp_cuda_alloc_pinned(size_t num_bytes, void **host)
{
    *host = nullptr;
    return ibp::check_cuda(cudaHostAlloc(host, num_bytes, cudaHostAllocPortable | cudaHostAllocMapped));
}

ibp_status ibp_cuda_free_pinned(void *host) { return ibp::check_cuda(cudaFreeHost(host)); }

ibp_status ibp_cuda_register_pinned(void *host, size_t num_bytes)
{
    return ibp::check_cuda(cudaHostRegister(host, num_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
}

ibp_status ibp_cuda_unregister_pinned(void *host) { return ibp::check_cuda(cudaHostUnregister(host)); }

ibp_status ibp_cuda_map_pinned(void *host, void **device)
{
    *device = nullptr;
    return ibp::check_cuda(cudaHostGetDevicePointer(device, host, 0));
}
}
