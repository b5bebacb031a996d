// device.cu - reads the sizes of devices, records errors of CUDA calls, plans launches, and allocates pinned memory.
#include "../internal/ibp_coding.h"
#include "../internal/ibp_machine.h"
#include "launch.cuh"
#include "host_pages.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace ibp {

static thread_local char last_error[256];

ibp_status check_cuda(cudaError_t error)
{
    if (error == cudaSuccess) return IBP_OK;
    strncpy(last_error, cudaGetErrorString(error), sizeof last_error - 1);
    cudaGetLastError(); // clears the error, so that the caller's next CUDA call does not report it again
    return IBP_CUDA_ERROR;
}

bool is_host_memory(const void *memory)
{
    cudaPointerAttributes found{};
    return check_cuda(cudaPointerGetAttributes(&found, memory)) == IBP_OK && found.type == cudaMemoryTypeHost;
}

// Returns the sizes of the current device. Asks CUDA about each device only once, because asking takes a tenth of the
// time of a launch.
ibp_status read_device(DeviceSizes *sizes)
{
    // kStaticBytes: largest size in bytes of the static shared memory of a kernel that also has dynamic shared memory.
    constexpr int kMostDevices = 64, kStaticBytes = 1024;
    // known: for each device, the number of SMs in bits 48 to 63, block_bytes in bits 24 to 47, and sm_bytes in bits 0
    // to 23; 0 if CUDA has not been asked yet.
    static std::atomic<uint64_t> known[kMostDevices];
    ibp_status status = check_cuda(cudaGetDevice(&sizes->number));
    if (status != IBP_OK) return status;
    const bool is_kept = sizes->number < kMostDevices;
    const uint64_t found = is_kept ? known[sizes->number].load(std::memory_order_relaxed) : 0;
    sizes->sms = static_cast<int>(found >> 48), sizes->block_bytes = static_cast<int>(found >> 24 & 0xffffffu);
    sizes->sm_bytes = static_cast<int>(found & 0xffffffu);
    if (found != 0) return IBP_OK;
    const auto ask = [&](auto attribute, int *value) {
        if (status == IBP_OK) status = check_cuda(cudaDeviceGetAttribute(value, attribute, sizes->number));
    };
    ask(cudaDevAttrMultiProcessorCount, &sizes->sms);
    ask(cudaDevAttrMaxSharedMemoryPerBlockOptin, &sizes->block_bytes);
    ask(cudaDevAttrMaxSharedMemoryPerMultiprocessor, &sizes->sm_bytes);
    sizes->block_bytes -= kStaticBytes;
    const auto part = [](int value, int shift) { return static_cast<uint64_t>(value) << shift; };
    if (status == IBP_OK && is_kept)
        known[sizes->number] = part(sizes->sms, 48) | part(sizes->block_bytes, 24) | part(sizes->sm_bytes, 0);
    return status;
}

// Prepares a kernel for the largest dynamic shared memory, even if this thread's launch needs less, because another
// thread may be about to launch the kernel with more. Each thread remembers the kernels that it has prepared.
static ibp_status prepare(const void *kernel, const DeviceSizes &device, bool *is_of_90)
{
    constexpr uintptr_t kMostKernels = 128;
    struct Prepared {
        const void *kernel;
        int device;
        bool is_of_90;
    };
    static thread_local Prepared prepared[kMostKernels];
    Prepared &place = prepared[(reinterpret_cast<uintptr_t>(kernel) / 16) % kMostKernels];
    if (place.kernel != kernel || place.device != device.number) {
        cudaFuncAttributes code{};
        ibp_status status =
            check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.block_bytes));
        if (status == IBP_OK) status = check_cuda(cudaFuncGetAttributes(&code, kernel));
        if (status != IBP_OK) return status;
        place = {kernel, device.number, code.ptxVersion >= 90};
    }
    if (is_of_90 != nullptr) *is_of_90 = place.is_of_90;
    return IBP_OK;
}
ibp_status prepare(const void *kernel, bool *is_of_90)
{
    DeviceSizes device{};
    const ibp_status status = read_device(&device);
    return status == IBP_OK ? prepare(kernel, device, is_of_90) : status;
}

ibp_status plan_groups(const void *kernel, uint32_t most_threads, uint32_t block_bytes, uint32_t group_bytes,
                       uint32_t group_threads, int64_t num_jobs, int max_sms, Launch *launch)
{
    DeviceSizes device{};
    bool is_of_90 = false;
    ibp_status status = read_device(&device);
    if (status == IBP_OK) status = prepare(kernel, device, &is_of_90);
    if (status != IBP_OK) return status;
    const int sms = max_sms > 0 ? std::min(max_sms, device.sms) : device.sms;
    // A block consists of units, each of which has whole warps and whole groups.
    const uint32_t unit = std::max(group_threads, kWarp), groups_a_unit = unit / group_threads;
    const uint32_t unit_bytes = groups_a_unit * group_bytes;
    const int64_t room = device.block_bytes - int64_t{block_bytes};
    const int64_t fitting = unit_bytes ? room / unit_bytes : most_threads;
    const int64_t units = (num_jobs + groups_a_unit - 1) / groups_a_unit, an_sm = (units + sms - 1) / sms;
    const int64_t a_block = std::min({fitting, int64_t{most_threads / unit}, an_sm});
    if (a_block < 1) return IBP_INVALID_ARGUMENT;
    *launch = {static_cast<uint32_t>(std::min<int64_t>((units + a_block - 1) / a_block, sms)),
               static_cast<uint32_t>(a_block * unit), static_cast<uint32_t>(block_bytes + a_block * unit_bytes), 1,
               is_of_90};
    if (sms < device.sms && is_of_90 && launch->blocks % 2u == 0u) launch->cluster = 2;
    return IBP_OK;
}

} // namespace ibp

extern "C" {

bool ibp_cuda_is_built(void) { return true; }

// The text of a macro's value, which may contain commas.
#define IBP_TEXT(...) #__VA_ARGS__
#define IBP_TEXT_OF(...) IBP_TEXT(__VA_ARGS__)

const char *ibp_cuda_architectures(void) { return IBP_TEXT_OF(__CUDA_ARCH_LIST__); }

int ibp_cuda_device_count(void)
{
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();
    return 0;
}

const char *ibp_cuda_last_error(void) { return ibp::last_error; }

// Allocates pinned memory: maps ordinary memory, with huge pages if the system has them, lets several threads write to
// the pages, and then registers the pages with CUDA. On the host of an H200, with 16 processors, this allocates 20 to
// 27 GB per second, where cudaHostAlloc allocates 1.5 to 2.9 GB per second.
ibp_status ibp_cuda_alloc_pinned(size_t num_bytes, int node, void **host)
{
    if (host == nullptr) return IBP_INVALID_ARGUMENT;
    *host = nullptr;
    if (num_bytes == 0) return IBP_OK;
    void *const pages = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return ibp::check_cuda(cudaErrorMemoryAllocation);
    ibp::make_pages(pages, num_bytes, node);
    const ibp_status status = ibp_cuda_register_pinned(pages, num_bytes);
    if (status == IBP_OK)
        *host = pages;
    else
        munmap(pages, num_bytes);
    return status;
}

ibp_status ibp_cuda_free_pinned(void *host, size_t num_bytes)
{
    if (host == nullptr) return IBP_OK;
    const ibp_status status = ibp_cuda_unregister_pinned(host);
    if (status == IBP_OK) munmap(host, num_bytes); // memory that is still registered must stay mapped
    return status;
}

ibp_status ibp_cuda_register_pinned(void *host, size_t num_bytes)
{
    if (host == nullptr || num_bytes == 0) return IBP_INVALID_ARGUMENT;
    return ibp::check_cuda(cudaHostRegister(host, num_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
}

ibp_status ibp_cuda_register_read_only(void *host, size_t num_bytes)
{
    if (host == nullptr || num_bytes == 0) return IBP_INVALID_ARGUMENT;
    const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterReadOnly;
    return ibp::check_cuda(cudaHostRegister(host, num_bytes, flags));
}

ibp_status ibp_cuda_unregister_pinned(void *host)
{
    return host == nullptr ? IBP_INVALID_ARGUMENT : ibp::check_cuda(cudaHostUnregister(host));
}

ibp_status ibp_cuda_map_pinned(void *host, void **device)
{
    if (host == nullptr || device == nullptr) return IBP_INVALID_ARGUMENT;
    *device = nullptr;
    return ibp::check_cuda(cudaHostGetDevicePointer(device, host, 0));
}

ibp_status ibp_cuda_fill(void *memory, uint8_t value, size_t num_bytes, ibp_stream stream)
{
    if (num_bytes == 0) return IBP_OK;
    if (memory == nullptr) return IBP_INVALID_ARGUMENT;
    return ibp::check_cuda(cudaMemsetAsync(memory, value, num_bytes, stream));
}
}
