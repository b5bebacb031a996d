/* emulated_cuda.h - streams and events as queues in host memory, for stream.cu and stage.cu of csrc/cuda/stream
 * compiled as C++: what is queued is run afterwards, or where an event is asked for, in any order that the waits allow.
 * Given with -include, without the include of launch.cuh. */
#ifndef EMULATED_CUDA_H
#define EMULATED_CUDA_H

#include "core/format.h"
#include "internal/ibp_internal.h"

#include <cstring>
#include <functional>
#include <vector>

using cudaError_t = int;
enum {
    cudaSuccess,
    cudaErrorMemoryAllocation,
    cudaErrorNotReady,
    cudaMemcpyDefault,
    cudaStreamNonBlocking,
    cudaEventDisableTiming
};
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };

/* Work that may begin when `awaited` has done `count` works. */
struct Work {
    std::function<void()> run;
    const CUstream_st *awaited;
    size_t count;
};
struct CUstream_st {
    std::vector<Work> queue;
    size_t num_done = 0;

    void add(const std::function<void()> &run) { queue.push_back({run, nullptr, 0}); }
};
using cudaStream_t = CUstream_st *;
struct Event {
    const CUstream_st *stream;
    size_t count;
};
using cudaEvent_t = Event *;

extern std::vector<cudaStream_t> created_streams;

/* The current device, which tests change. */
extern int current_device;
inline cudaError_t cudaGetDevice(int *device)
{
    *device = current_device;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device)
{
    current_device = device;
    return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, int)
{
    created_streams.push_back(*stream = new CUstream_st);
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest)
{
    *lowest = 0, *highest = -5;
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, int flags, int)
{
    return cudaStreamCreateWithFlags(stream, flags);
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    delete stream;
    return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, int)
{
    *event = new Event{};
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }

inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    *event = {stream, stream->queue.size()};
    return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, int)
{
    stream->queue.push_back({[] {}, event->stream, event->count});
    return cudaSuccess;
}
/* Runs some of what is queued. */
void run_some();
inline cudaError_t cudaEventQuery(cudaEvent_t event)
{
    run_some();
    return event->stream == nullptr || event->stream->num_done >= event->count ? cudaSuccess : cudaErrorNotReady;
}
/* In two steps, between which other streams may work. */
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t num_bytes, int, cudaStream_t stream)
{
    const size_t half = num_bytes / 2;
    stream->add([=] { memcpy(to, from, half); });
    stream->add(
        [=] { memcpy(static_cast<char *>(to) + half, static_cast<const char *>(from) + half, num_bytes - half); });
    return cudaSuccess;
}

namespace ibp {
inline ibp_status check_cuda(cudaError_t error) { return error == cudaSuccess ? IBP_OK : IBP_CUDA_ERROR; }
} // namespace ibp

#endif
