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

ibp_status plan_launch(const void *kernel, const ibp_codebook &codebook, int64_t num_jobs, int max_sms, Launch *launch)
{
    int device = 0, num_sms = 0, max_shared = 0;
    ibp_status status = check_cuda(cudaGetDevice(&device));
    if (status == IBP_OK) status = check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    if (status == IBP_OK) status = check_cuda(cudaDeviceGetAttribute(&max_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (status != IBP_OK) return status;
    const int64_t fitting = (max_shared - kStaticSharedBytes) / stage_bytes(codebook);
    const int64_t warps = std::min<int64_t>(fitting, 32);
    if (warps < 1) return IBP_INVALID_ARGUMENT;
    const int64_t sms = max_sms > 0 ? std::min(max_sms, num_sms) : num_sms;
    const int64_t blocks_an_sm = max_sms > 0 ? 1 : 2; // two would spread over twice the SMs
    const int64_t blocks = std::min((num_jobs + warps - 1) / warps, sms * blocks_an_sm);
    *launch = {static_cast<uint32_t>(blocks), static_cast<uint32_t>(warps * kWarp),
               static_cast<uint32_t>(warps * stage_bytes(codebook))};
    return check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(launch->shared_bytes)));
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
