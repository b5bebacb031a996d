// torch_ranges.h - shares the work of CPU implementations among torch's threads.
#ifndef IBP_TORCH_RANGES_H
#define IBP_TORCH_RANGES_H

#include "torch_tensors.h"

#include <algorithm>
#include <memory>
#include <mutex>

namespace ibp_torch {

inline constexpr int64_t kLookUpBytes = 128;    // looking a row up in a cache takes as long as reading these bytes
inline constexpr int64_t kGrainBytes = 1 << 16; // least work of a thread
inline constexpr int64_t kLeastSharedBytes =
    1 << 19; // less work stays on the calling thread: other threads take some 10 us to wake, and then spin for a while

// Runs work(first, last, scratch, fault) over ranges of [0, count), on several of torch's threads if there is enough
// work, and keeps the fault with the lowest position. bytes_each: bytes that one step reads or writes. scratch_bytes:
// memory of a thread. work returns a status; IBP_INVALID_ARGUMENT raises an error. Memory for all ranges is allocated
// before the first of them begins, so that nothing is half done if there is too little.
template <typename Work>
void over_ranges(int64_t count, int64_t bytes_each, size_t scratch_bytes, ibp_fault *fault, const Work &work)
{
    constexpr size_t kLine = 64; // bytes that threads do not share
    bytes_each = std::max<int64_t>(1, bytes_each);
    const bool is_little = count <= kLeastSharedBytes / bytes_each;
    const int64_t grain = std::max<int64_t>(1, kGrainBytes / bytes_each),
                  num_ranges = is_little ? std::min<int64_t>(1, count)
                                         : std::min<int64_t>(torch::stable::get_num_threads(), divide_up(count, grain)),
                  range = num_ranges == 0 ? 0 : divide_up(count, num_ranges);
    const size_t stride = (scratch_bytes + kLine - 1) / kLine * kLine;
    const std::unique_ptr<uint8_t[]> scratch(new uint8_t[stride * static_cast<size_t>(num_ranges)]);
    std::mutex mutex;
    bool refused = false; // whether any range returned IBP_INVALID_ARGUMENT
    const auto run = [&](int64_t number) {
        ibp_fault mine{};
        const int64_t first = std::min(count, number * range), last = std::min(count, first + range);
        if (first == last) return;
        const ibp_status status = work(first, last, scratch.get() + stride * static_cast<size_t>(number), &mine);
        if (status == IBP_OK) return;
        const std::lock_guard<std::mutex> lock(mutex);
        refused = refused || status == IBP_INVALID_ARGUMENT;
        if (mine.status == IBP_OK) return;
        if (fault->status == IBP_OK || mine.position < fault->position) *fault = mine;
    };
    torch::stable::parallel_for(0, num_ranges, 1, [&](int64_t first, int64_t last) {
        for (int64_t number = first; number < last; number++) run(number);
    });
    check(refused ? IBP_INVALID_ARGUMENT : IBP_OK, "table");
}

} // namespace ibp_torch

#endif
