/* stream_order.cpp - streams of tables by csrc/cuda/stream/stream.cu under emulated_cuda.h, run in many random orders:
 * every tensor must come out right, and the ring must not be touched before the caller's stream gets to the first chunk
 * or after it has passed the last. */
#include "emulated_cuda.h"
#include "core/chunk_plan.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>

std::vector<cudaStream_t> created_streams;
int current_device = 0;
void run_some() {}

namespace {

std::mt19937_64 generator(7);

uint64_t below(uint64_t limit) { return generator() % limit; }

long num_decodes = 0;

constexpr uint32_t kRowBytes = 90;

struct Codebook {
    alignas(16) uint32_t words[3 * 32] = {};
    ibp_codebook codebook = {};

    Codebook()
    {
        uint8_t mask[kRowBytes] = {}, bitval[kRowBytes] = {};
        for (uint32_t i = 0; i < kRowBytes; i += 2) mask[i] = 0xff;
        ibp_build_codebook(mask, bitval, kRowBytes, 2, false, words, &codebook);
    }
};

struct Tensor {
    std::vector<uint8_t> data, slots, overflow, out;
    std::vector<uint16_t> lengths;
    std::vector<uint64_t> bases;
    ibp_table table = {};
    ibp_fault fault = {};
    int64_t start, end;

    explicit Tensor(const ibp_codebook &codebook) : data(1 + below(60000))
    {
        const auto num_bytes = static_cast<int64_t>(data.size());
        for (size_t i = 0; i < data.size(); i++)
            data[i] = i % kRowBytes % 2 == 0 && below(20) ? 0 : static_cast<uint8_t>(generator());
        const bool raw = below(4) == 0;
        const uint32_t slot_sizes[] = {0, 32, kRowBytes};
        table.num_items = num_bytes, table.item_bytes = 1, table.codebook = codebook,
        table.slot_bytes = slot_sizes[below(3)];
        const int64_t num_rows = ibp_num_rows(&table);
        lengths.resize(static_cast<size_t>(num_rows)), bases.resize(static_cast<size_t>(num_rows + 31) / 32);
        uint8_t scratch[IBP_SCRATCH_BYTES(kRowBytes)];
        ibp_measure_rows(&codebook, data.data(), num_bytes, lengths.data(), scratch, sizeof scratch);
        table.lengths = raw ? nullptr : lengths.data();
        ibp_index_rows(table.lengths, num_bytes, kRowBytes, table.slot_bytes, bases.data(), &table.overflow_bytes);
        table.slots_bytes = table.slot_bytes == kRowBytes ? num_bytes : num_rows * table.slot_bytes;
        slots.resize(static_cast<size_t>(table.slots_bytes)),
            overflow.resize(static_cast<size_t>(table.overflow_bytes));
        table.slots = slots.data(), table.overflow = overflow.data();
        table.bases = table.overflow_bytes ? bases.data() : nullptr;
        if (ibp_encode_rows(&table, data.data(), 0, num_rows, slots.data(), overflow.data(), scratch, sizeof scratch,
                            &fault) != IBP_OK)
            abort();
        start = below(3) ? 0 : static_cast<int64_t>(below(data.size()));
        end = below(3) ? num_bytes : start + static_cast<int64_t>(below(data.size() - static_cast<size_t>(start) + 1));
        out.resize(static_cast<size_t>(end - start));
    }

    bool is_right() const { return fault.status == IBP_OK && std::equal(out.begin(), out.end(), data.begin() + start); }
};

bool is_ready(const CUstream_st *stream)
{
    if (stream->num_done == stream->queue.size()) return false;
    const Work &next = stream->queue[stream->num_done];
    return next.awaited == nullptr || next.awaited->num_done >= next.count;
}

/* Runs everything queued; favours one stream for long stretches. @return false if they wait for each other. */
bool run_in_some_order(const std::vector<cudaStream_t> &streams)
{
    const size_t favourite = below(streams.size() + 1);
    for (;;) {
        std::vector<cudaStream_t> ready;
        for (size_t i = 0; i < streams.size(); i++)
            if (is_ready(streams[i])) ready.insert(ready.end(), i == favourite ? 50 : 1, streams[i]);
        if (ready.empty()) break;
        CUstream_st *const stream = ready[below(ready.size())];
        stream->queue[stream->num_done].run();
        stream->num_done++;
    }
    for (const CUstream_st *stream : streams)
        if (stream->num_done != stream->queue.size()) return false;
    return true;
}

/* Two streams of the same tensors, one after the other, the ring used for something else before and after each. */
bool stream_twice(const Codebook &codebook)
{
    cudaStream_t caller;
    cudaStreamCreateWithFlags(&caller, 0);
    ibp_streamer *streamer;
    if (ibp_cuda_create_streamer(&streamer) != IBP_OK) return false;
    alignas(IBP_CHUNK_ALIGN) static uint8_t ring[4 * 16384];
    const auto ring_bytes = static_cast<int64_t>(4 * (8192 + below(8192)));
    std::vector<Tensor> tensors;
    for (uint64_t count = 2 + below(6); tensors.size() < count;) tensors.emplace_back(codebook.codebook);
    bool good = true, undisturbed = true;
    good = ibp_cuda_continue_stream(streamer) == IBP_INVALID_ARGUMENT; /* none has begun */
    for (int round = 0; round < 2; round++) {
        caller->add([=] { memset(ring, 0xEE, sizeof ring); });
        good = good && ibp_cuda_begin_stream(streamer, ring, ring_bytes) == IBP_OK;
        for (Tensor &t : tensors) {
            caller->add([&t] { std::fill(t.out.begin(), t.out.end(), uint8_t{0xA5}); });
            good = good && ibp_cuda_stream_bytes(streamer, &t.table, t.table.bases, t.start, t.end,
                                                 &t == &tensors.back(), t.out.data(), &t.fault, 8, caller) == IBP_OK;
            caller->add([&t, &good] { good = good && t.is_right(); });
        }
        if (round == 0) caller->add([=] { memset(ring, 0xDD, sizeof ring); });
        if (round == 0)
            caller->add([&undisturbed] {
                undisturbed = undisturbed && std::all_of(ring, ring + sizeof ring, [](uint8_t b) { return b == 0xDD; });
            });
    }
    /* A third stream, which nothing but its own work waits for. */
    good = good && ibp_cuda_continue_stream(streamer) == IBP_OK;
    for (Tensor &t : tensors) {
        caller->add([&t] { std::fill(t.out.begin(), t.out.end(), uint8_t{0xA5}); });
        good = good && ibp_cuda_stream_bytes(streamer, &t.table, t.table.bases, t.start, t.end, &t == &tensors.back(),
                                             t.out.data(), &t.fault, 8, caller) == IBP_OK;
        caller->add([&t, &good] { good = good && t.is_right(); });
    }
    /* Of another device: refused before anything is queued. */
    const size_t num_queued = caller->queue.size();
    current_device = 1;
    good = good && ibp_cuda_begin_stream(streamer, ring, ring_bytes) == IBP_INVALID_ARGUMENT;
    good = good &&
           ibp_cuda_stream_bytes(streamer, &tensors[0].table, tensors[0].table.bases, tensors[0].start, tensors[0].end,
                                 true, tensors[0].out.data(), &tensors[0].fault, 8, caller) == IBP_INVALID_ARGUMENT;
    current_device = 0;
    good = good && caller->queue.size() == num_queued;
    good = run_in_some_order(created_streams) && good && undisturbed;
    good = ibp_cuda_destroy_streamer(streamer) == IBP_OK && good;
    cudaStreamDestroy(caller);
    created_streams.clear();
    return good;
}

} // namespace

extern "C" ibp_status ibp_cuda_decode_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out,
                                            ibp_fault *fault, int, ibp_stream stream)
{
    num_decodes++;
    stream->add([=, block = *table] {
        uint8_t scratch[IBP_SCRATCH_BYTES(kRowBytes)];
        ibp_decode_bytes(&block, start, end, out, scratch, sizeof scratch, fault);
    });
    return IBP_OK;
}

int main()
{
    const Codebook codebook;
    long num_wrong = 0;
    const int num_runs = 500;
    for (int i = 0; i < num_runs; i++) num_wrong += !stream_twice(codebook);
    printf("%d runs, %ld wrong, %ld chunks\n", num_runs, num_wrong, num_decodes);
    return num_wrong != 0;
}
