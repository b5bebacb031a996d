// many.h - the launches of the kernels of many.cuh and tiles.cuh. Host code.
#ifndef IBP_MANY_H
#define IBP_MANY_H

#include "digits.cuh"

#include <atomic>

namespace ibp {

// How many clusters of a kernel each device runs at a time.
struct KnownClusters {
    static constexpr int kMostDevices = 64;
    std::atomic<uint32_t> known[kMostDevices]; // 1 more; 0: not known

    // On the current device, for clusters of `parts` blocks with these threads and bytes of shared memory each. 0: it
    // has no code for the device.
    ibp_status count(const void *kernel, uint32_t parts, uint32_t threads, uint32_t shared_bytes, uint32_t *clusters);
};

// y of up to 64 vectors. *launched: whether the current device has the kernel, and the vectors fit shared memory.
ibp_status multiply_many(const LinearJob &job, ibp_stream stream, bool *launched);

// y of 65 to 256 vectors. *launched: whether the current device has the kernel. image: image_bytes bytes.
ibp_status multiply_tiles(const LinearJob &job, uint8_t *image, ibp_stream stream, bool *launched);

// Bytes of the image that multiply_tiles makes: as many as 128 or 256 vectors have, in whole steps.
constexpr uint32_t kMostOfTiles = 256;
inline int64_t image_bytes(uint32_t num_vectors, uint32_t num_columns)
{
    const int64_t steps = (int64_t{num_columns} + kStepColumns - 1) / kStepColumns;
    return steps * kStepColumns * 2 * (num_vectors <= kMostOfTiles / 2u ? kMostOfTiles / 2u : kMostOfTiles);
}

} // namespace ibp

#endif
