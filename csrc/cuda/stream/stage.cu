// stage.cu - gathers items of a table. The table and the ids are in host memory. CPU threads gather slots, the copy
// engine copies them to the GPU, and the GPU decodes them.
//
// The CPU's memory or the link to the GPU limits the speed. The items of a call are divided into chunks, and the chunks
// into blocks. Threads take one block after the other. There are two rings of kPlaces places each, one in pinned memory
// and one on the GPU. Consecutive chunks use consecutive places of both rings; the next call begins with the place
// after the last place that this call used. Overflow is not staged: the decoder reads it from host memory. A place
// holds
//
//     | slots of the chunk's items | padding to a multiple of 16 bytes | ids of the items |
//
// The first thread is also the coordinator. It opens places, which allows threads to fill them, and queues complete
// chunks, in order:
//
//     copy stream:         wait decoded[place]    copy the chunk      record copied[place]
//     caller's stream:     wait copied[place]     decode the chunk    record decoded[place]
//
// A place is opened once the event copied[place] is complete. The threads other than the coordinator wait only for
// places to be opened, never for another thread's block.
#include "../../internal/ibp_stream.h"
#include "../../core/stage.h"
#include "../cuda_checks.h"
#include "../decode/decode_request.h"
#include "../errors.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>

namespace ibp {

constexpr int kPlaces = 12;
// Approximate size in bytes of the slots of a block. A thread copies a block in about 10 microseconds.
constexpr int64_t kBlockBytes = 64 << 10;
// The items of a call are divided into about this many chunks or more, if there are enough items. With fewer chunks,
// gathering, copying and decoding hardly overlap.
constexpr int64_t kLeastChunks = 16;
// Calls that fill the ring at most this many times use stores that bypass the CPU's caches. On 16 cores of a Xeon,
// 100,000 rows of 512 bytes were gathered at 60 GB/s with such stores and at 45 GB/s through the caches. 1,000,000
// rows, which use each place 17 times or more, were gathered at 60 GB/s with such stores and at 70 GB/s through the
// caches.
constexpr int64_t kStreamedRings = 3;

static int64_t round_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

} // namespace ibp

struct ibp_stager {
    int device;
    cudaStream_t copies;
    cudaEvent_t copied[ibp::kPlaces], decoded[ibp::kPlaces];
    uint8_t *pinned, *near;
    int64_t place_bytes, next_place;
};

namespace ibp {

// The state of a call of ibp_cuda_stage_items, which its threads share.
class Staging {
  public:
    Staging(ibp_stager *stager, const ibp_table *table, const uint8_t *slots, const ibp_ids *ids, uint8_t *out,
            ibp_fault *fault, int max_sms, ibp_stream stream)
        : stager_(stager), table_(*table), ids_(*ids), out_(out), fault_(fault), max_sms_(max_sms), stream_(stream)
    {
        const auto item_slots =
            static_cast<uint64_t>(table->item_bytes / table->codebook.row_bytes * table->slot_bytes);
        stage_ = {slots, table->num_items, item_slots, table->num_items <= INT32_MAX ? 4u : 8u, false};
        const auto item_bytes = static_cast<int64_t>(item_slots + stage_.id_bytes);
        stage_.streams = ids->count <= kStreamedRings * kPlaces * stager->place_bytes / item_bytes;
        const int64_t fitting = (stager->place_bytes - kAlign) / item_bytes;
        block_items_ = std::max<int64_t>(1, std::min(fitting, kBlockBytes / item_bytes));
        const int64_t few = std::max<int64_t>(1, ids->count / kLeastChunks);
        chunk_items_ = std::min(fitting, round_up(few, block_items_)) / block_items_ * block_items_;
        if (chunk_items_ == 0) return;
        num_chunks_ = (ids->count + chunk_items_ - 1) / chunk_items_;
        num_blocks_ = (ids->count + block_items_ - 1) / block_items_;
    }

    // Returns whether at least one item fits in a place.
    bool fits() const { return chunk_items_ > 0; }

    // Does the work of one thread of the call. Every thread calls this function once. The first thread that calls it
    // becomes the coordinator.
    void work()
    {
        if (!is_coordinated_.exchange(true)) {
            coordinate();
            return;
        }
        for (Taken taken = kBlock; taken != kNone; taken = fill_next())
            if (taken == kWait) std::this_thread::yield();
    }

    ibp_status status() const { return calls_.status(); }

  private:
    enum Taken { kBlock, kWait, kNone };
    // Alignment in bytes of the ids, which follow the slots.
    static constexpr int64_t kAlign = 16;

    int64_t items_in(int64_t chunk) const { return std::min(chunk_items_, ids_.count - chunk * chunk_items_); }
    int64_t ids_offset(int64_t chunk) const
    {
        return round_up(items_in(chunk) * static_cast<int64_t>(stage_.item_slots), kAlign);
    }
    int64_t place_of(int64_t chunk) const { return (stager_->next_place + chunk) % kPlaces; }

    // Takes the next block that no thread has taken yet, and copies its slots and ids to the pinned ring. Returns kWait
    // if the block's place is not open, or kNone if no block is left.
    Taken fill_next()
    {
        const int64_t a_chunk = chunk_items_ / block_items_;
        int64_t block = next_block_.load(std::memory_order_relaxed);
        do {
            if (block >= num_blocks_ || is_over_.load(std::memory_order_relaxed)) return kNone;
            if (block / a_chunk >= num_open_.load(std::memory_order_acquire)) return kWait;
        } while (!next_block_.compare_exchange_weak(block, block + 1, std::memory_order_relaxed));
        const int64_t chunk = block / a_chunk, first = block * block_items_, in_chunk = first - chunk * chunk_items_;
        uint8_t *const place = stager_->pinned + place_of(chunk) * stager_->place_bytes;
        const int64_t last = std::min(ids_.count, first + block_items_);
        ibp_stage_items(&stage_, &ids_, first, last, place + in_chunk * static_cast<int64_t>(stage_.item_slots),
                        place + ids_offset(chunk) + in_chunk * stage_.id_bytes);
        num_filled_[place_of(chunk)].fetch_add(last - first, std::memory_order_release);
        return kBlock;
    }

    void coordinate()
    {
        int64_t num_queued = 0;
        int device = stager_->device;
        calls_ << cudaGetDevice(&device);
        if (calls_.ok() && device != stager_->device) calls_ << cudaSetDevice(stager_->device);
        while (calls_.ok() && num_queued < num_chunks_) {
            open_places(num_queued);
            const bool is_filled = num_queued < num_open_ && num_filled_[place_of(num_queued)].load(
                                                                 std::memory_order_acquire) == items_in(num_queued);
            if (is_filled)
                queue(num_queued++);
            else if (fill_next() != kBlock)
                std::this_thread::yield();
        }
        is_over_ = true;
        stager_->next_place = place_of(num_queued);
        if (device != stager_->device) cudaSetDevice(device);
    }

    // Opens the next places whose previous chunks have been copied, so that threads may fill them. Stops at the first
    // place that is still being copied.
    void open_places(int64_t num_queued)
    {
        for (int64_t open = num_open_; open < num_chunks_ && open - kPlaces < num_queued; open++) {
            const cudaError_t query = cudaEventQuery(stager_->copied[place_of(open)]);
            if (query == cudaErrorNotReady) {
                // "Not ready" is not an error. Clear it, so that no later call reports it.
                cudaGetLastError();
                return;
            }
            calls_ << query;
            if (!calls_.ok()) return;
            num_filled_[place_of(open)].store(0, std::memory_order_relaxed);
            num_open_.store(open + 1, std::memory_order_release);
        }
    }

    // Queues the copy and the decoding of a filled chunk.
    void queue(int64_t chunk)
    {
        const int64_t place = place_of(chunk), count = items_in(chunk), first = chunk * chunk_items_;
        uint8_t *const near = stager_->near + place * stager_->place_bytes;
        const auto num_bytes = static_cast<size_t>(ids_offset(chunk) + count * stage_.id_bytes);
        ibp_ids ids{};
        ids.data = near + ids_offset(chunk), ids.count = count, ids.id_bytes = stage_.id_bytes;
        calls_ << cudaStreamWaitEvent(stager_->copies, stager_->decoded[place], 0)
               << cudaMemcpyAsync(near, stager_->pinned + place * stager_->place_bytes, num_bytes, cudaMemcpyDefault,
                                  stager_->copies)
               << cudaEventRecord(stager_->copied[place], stager_->copies)
               << cudaStreamWaitEvent(stream_, stager_->copied[place], 0);
        if (calls_.ok())
            calls_ << gather_staged(&table_, &ids, near, first, out_ + first * table_.item_bytes, fault_, max_sms_,
                                    stream_);
        calls_ << cudaEventRecord(stager_->decoded[place], stream_);
    }

    ibp_stager *const stager_;
    const ibp_table table_;
    const ibp_ids ids_;
    uint8_t *const out_;
    ibp_fault *const fault_;
    const int max_sms_;
    const ibp_stream stream_;
    ibp_stage stage_{};
    int64_t block_items_ = 0, chunk_items_ = 0, num_chunks_ = 0, num_blocks_ = 0;
    std::atomic<int64_t> next_block_{0}, num_open_{0}, num_filled_[kPlaces] = {};
    std::atomic<bool> is_coordinated_{false}, is_over_{false};
    FirstError calls_; // the first error of the coordinator's CUDA calls
};

static ibp_status create(ibp_stager *stager)
{
    FirstError calls;
    calls << cudaGetDevice(&stager->device) << cudaStreamCreateWithFlags(&stager->copies, cudaStreamNonBlocking);
    for (int place = 0; place < kPlaces; place++)
        calls << cudaEventCreateWithFlags(&stager->copied[place], cudaEventDisableTiming)
              << cudaEventCreateWithFlags(&stager->decoded[place], cudaEventDisableTiming);
    return calls.status();
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_create_stager(uint8_t *pinned, uint8_t *near, int64_t ring_bytes, ibp_stager **stager)
{
    if (stager == nullptr) return IBP_INVALID_ARGUMENT;
    *stager = nullptr;
    if (pinned == nullptr || near == nullptr || ring_bytes < 0 || reinterpret_cast<uintptr_t>(near) % 16 != 0)
        return IBP_INVALID_ARGUMENT;
    auto *const made = static_cast<ibp_stager *>(calloc(1, sizeof(ibp_stager)));
    if (made == nullptr) return ibp::check_cuda(cudaErrorMemoryAllocation);
    made->pinned = pinned, made->near = near, made->place_bytes = ring_bytes / ibp::kPlaces / 256 * 256;
    const ibp_status status = ibp::create(made);
    if (status == IBP_OK)
        *stager = made;
    else
        ibp_cuda_destroy_stager(made);
    return status;
}

extern "C" ibp_status ibp_cuda_destroy_stager(ibp_stager *stager)
{
    if (stager == nullptr) return IBP_OK;
    ibp::FirstError calls;
    for (int place = 0; place < ibp::kPlaces; place++) {
        if (stager->copied[place]) calls << cudaEventDestroy(stager->copied[place]);
        if (stager->decoded[place]) calls << cudaEventDestroy(stager->decoded[place]);
    }
    if (stager->copies) calls << cudaStreamDestroy(stager->copies);
    free(stager);
    return calls.status();
}

extern "C" ibp_status ibp_cuda_stage_items(ibp_stager *stager, const ibp_table *table, const uint8_t *slots,
                                           const ibp_ids *ids, uint8_t *out, ibp_fault *fault, int max_sms, ibp_run run,
                                           void *runner, int64_t num_threads, ibp_stream stream)
{
    if (stager == nullptr || !ibp::is_table(table) || !ibp::are_ids(ids) || fault == nullptr || max_sms < 0)
        return IBP_INVALID_ARGUMENT;
    if (ids->count == 0 || table->item_bytes == 0) return IBP_OK;
    const int64_t row_bytes = table->codebook.row_bytes;
    if (out == nullptr || slots == nullptr || ids->positions != nullptr || ids->num_dims != 0 ||
        ids->addresses != nullptr || num_threads < 1 || run == nullptr || table->slot_bytes == 0 ||
        table->slots_start != 0 || table->item_bytes % row_bytes != 0 ||
        table->slots_bytes < table->num_items * (table->item_bytes / row_bytes) * table->slot_bytes)
        return IBP_INVALID_ARGUMENT;
    ibp::Staging staging(stager, table, slots, ids, out, fault, max_sms, stream);
    if (!staging.fits()) return IBP_INVALID_ARGUMENT;
    run(
        runner, num_threads, [](void *of, int64_t) { static_cast<ibp::Staging *>(of)->work(); }, &staging);
    return staging.status();
}
