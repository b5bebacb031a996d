// many.h - functions that launch the kernels of many.cuh and tiles.cuh. Host code.
#ifndef IBP_MANY_H
#define IBP_MANY_H

#include "digits.cuh"

#include <atomic>

namespace ibp {

// For each device, the number of a kernel's clusters that can run at the same time.
struct KnownClusters {
    static constexpr int kMostDevices = 64;
    std::atomic<uint32_t> known[kMostDevices]; // this number plus 1; 0 if it is not known yet

    // Finds the number of clusters for the current device. parts: number of blocks in a cluster. threads: number of
    // threads in a block. shared_bytes: size of a block's shared memory. clusters: receives the number, or 0 if the
    // kernel has no code for the device.
    ibp_status count(const void *kernel, uint32_t parts, uint32_t threads, uint32_t shared_bytes, uint32_t *clusters);
};

// Multiplies up to IBP_MOST_INVARIANT vectors. launched: receives whether the kernel was launched. The kernel is not
// launched if it has no code for the current device, or if the vectors do not fit in shared memory.
ibp_status multiply_many(const LinearJob &job, ibp_stream stream, bool *launched);

// Multiplies up to 256 vectors. image: image_bytes() bytes of device memory, which receive a copy of the vectors.
// launched: receives whether the kernel was launched. The kernel is not launched if it has no code for the current
// device, or if the driver refuses the tensor maps.
ibp_status multiply_tiles(const LinearJob &job, uint8_t *image, ibp_stream stream, bool *launched);

constexpr uint32_t kMostOfTiles = 256; // largest number of vectors that multiply_tiles takes

// Returns the number of vectors that the kernel for num_vectors vectors has room for: 64, 128 or 256.
inline uint32_t room_of_tiles(uint32_t num_vectors)
{
    return num_vectors <= 64u ? 64u : num_vectors <= 128u ? 128u : kMostOfTiles;
}
// Returns the size in bytes of the image that multiply_tiles makes. The image has room for 64, 128 or 256 vectors, and
// for columns in whole steps.
inline int64_t image_bytes(uint32_t num_vectors, uint32_t num_columns)
{
    const int64_t steps = (int64_t{num_columns} + kStepColumns - 1) / kStepColumns;
    return steps * kStepColumns * 2 * room_of_tiles(num_vectors);
}

} // namespace ibp

#endif
