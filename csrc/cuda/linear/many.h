// many.h - launches the kernels of many.cuh and tiles.cuh. Host code.
#ifndef IBP_MANY_H
#define IBP_MANY_H

#include "digits.cuh"

#include <atomic>

namespace ibp {

// The number of clusters of a kernel that each device runs at the same time.
struct KnownClusters {
    static constexpr int kMostDevices = 64;
    std::atomic<uint32_t> known[kMostDevices]; // the number plus 1; 0: not known

    // Finds the number for the current device. parts: blocks of a cluster. threads, shared_bytes: threads and bytes of
    // shared memory of a block. *clusters receives 0 if the kernel has no code for the device.
    ibp_status count(const void *kernel, uint32_t parts, uint32_t threads, uint32_t shared_bytes, uint32_t *clusters);
};

// Multiplies up to 64 vectors. *launched receives whether the current device has the kernel and the vectors fit shared
// memory; otherwise nothing was launched.
ibp_status multiply_many(const LinearJob &job, ibp_stream stream, bool *launched);

// Multiplies 65 to 256 vectors. *launched receives whether the current device has the kernel; otherwise nothing was
// launched. image: image_bytes() bytes of device memory.
ibp_status multiply_tiles(const LinearJob &job, uint8_t *image, ibp_stream stream, bool *launched);

// Returns the size in bytes of the image that multiply_tiles makes: that of 128 or 256 vectors in whole steps.
constexpr uint32_t kMostOfTiles = 256;
inline int64_t image_bytes(uint32_t num_vectors, uint32_t num_columns)
{
    const int64_t steps = (int64_t{num_columns} + kStepColumns - 1) / kStepColumns;
    return steps * kStepColumns * 2 * (num_vectors <= kMostOfTiles / 2u ? kMostOfTiles / 2u : kMostOfTiles);
}

} // namespace ibp

#endif
