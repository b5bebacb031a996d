/* stage_order.cpp - items brought by csrc/cuda/stream/stage.cu under emulated_cuda.h, with one thread or several, what
 * is queued run in many random orders: every item must come out right, and no slot be written over before it is copied
 * or decoded. */
#include "emulated_cuda.h"

#include "core/ids.h"
#include "cuda/decode/decode_request.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

std::vector<cudaStream_t> created_streams;
int current_device = 0;

namespace {

std::mt19937_64 generator(11);
long num_chunks = 0;

uint64_t below(uint64_t limit) { return generator() % limit; }

bool is_ready(const CUstream_st *stream)
{
    if (stream->num_done == stream->queue.size()) return false;
    const Work &next = stream->queue[stream->num_done];
    return next.awaited == nullptr || next.awaited->num_done >= next.count;
}

/* @return false if nothing can be run. */
bool run_one(uint64_t favourite)
{
    std::vector<cudaStream_t> ready;
    for (size_t i = 0; i < created_streams.size(); i++)
        if (is_ready(created_streams[i])) ready.insert(ready.end(), i == favourite ? 20 : 1, created_streams[i]);
    if (ready.empty()) return false;
    CUstream_st *const stream = ready[below(ready.size())];
    stream->queue[stream->num_done].run();
    stream->num_done++;
    return true;
}

bool run_all()
{
    const uint64_t favourite = below(created_streams.size() + 1);
    while (run_one(favourite)) {
    }
    for (const CUstream_st *stream : created_streams)
        if (stream->num_done != stream->queue.size()) return false;
    return true;
}

/* Threads that begin in any order; or all of it on one, in any order of the numbers. */
void run_threads(void *is_serial, int64_t count, void (*work)(void *state, int64_t number), void *state)
{
    if (*static_cast<bool *>(is_serial)) {
        for (int64_t number = count; number-- > 0;) work(state, number);
        return;
    }
    std::vector<std::thread> threads;
    for (int64_t number = 0; number < count; number++) threads.emplace_back(work, state, number);
    for (std::thread &thread : threads) thread.join();
}

/* Raw rows in slots. */
struct Rows {
    std::vector<uint8_t> slots;
    ibp_table table = {};

    Rows() : slots(0)
    {
        table.codebook.row_bytes = static_cast<uint32_t>(16 * (1 + below(20)));
        table.slot_bytes = table.codebook.row_bytes;
        table.item_bytes = static_cast<int64_t>(table.codebook.row_bytes * (1 + below(3)));
        table.num_items = static_cast<int64_t>(1 + below(300));
        table.slots_bytes = table.num_items * table.item_bytes;
        slots.resize(static_cast<size_t>(table.slots_bytes));
        for (uint8_t &byte : slots) byte = static_cast<uint8_t>(generator());
        table.slots = slots.data();
    }
};

/* Several calls with one stager, of ids with bad ones among them. */
bool stage(const Rows &rows, cudaStream_t caller)
{
    const auto item_bytes = static_cast<size_t>(rows.table.item_bytes);
    const auto ring_bytes = static_cast<int64_t>(12 * 256 * (1 + item_bytes / 256 + 1 + below(20)));
    std::vector<uint8_t> pinned(static_cast<size_t>(ring_bytes)), memory(static_cast<size_t>(ring_bytes) + 16);
    uint8_t *const near = memory.data() + (16 - reinterpret_cast<uintptr_t>(memory.data()) % 16) % 16;
    ibp_stager *stager;
    if (ibp_cuda_create_stager(pinned.data(), near, ring_bytes, &stager) != IBP_OK) return false;
    std::vector<std::vector<uint8_t>> outs, wanted;
    bool good = true;
    for (int call = 0; call < 3; call++) {
        std::vector<int64_t> ids(1 + below(3000));
        for (int64_t &id : ids) id = static_cast<int64_t>(below(static_cast<uint64_t>(rows.table.num_items)));
        if (below(3) == 0) ids[below(ids.size())] = below(2) ? -1 : int64_t{1} << 32;
        outs.emplace_back(ids.size() * item_bytes), wanted.emplace_back(ids.size() * item_bytes);
        for (size_t k = 0; k < ids.size(); k++)
            if (ids[k] >= 0 && ids[k] < rows.table.num_items)
                memcpy(wanted.back().data() + k * item_bytes,
                       rows.slots.data() + static_cast<size_t>(ids[k]) * item_bytes, item_bytes);
        ibp_ids items = {};
        items.data = ids.data(), items.count = static_cast<int64_t>(ids.size()), items.id_bytes = 8;
        bool is_serial = below(2) == 0;
        ibp_fault fault = {};
        good = good && ibp_cuda_stage_items(stager, &rows.table, rows.slots.data(), &items, outs.back().data(), &fault,
                                            0, run_threads, &is_serial, 4, caller) == IBP_OK;
    }
    good = run_all() && good && outs == wanted;
    return ibp_cuda_destroy_stager(stager) == IBP_OK && good;
}

} // namespace

void run_some()
{
    for (uint64_t count = below(8); count > 0; count--) run_one(below(created_streams.size() + 1));
}

extern "C" ibp_status ibp_cuda_destroy_stager(ibp_stager *stager);

/* Copies rows from the stage, those of bad ids left out. */
ibp_status ibp::gather_staged(const ibp_table *table, const ibp_ids *ids, const uint8_t *stage, int64_t, uint8_t *out,
                              ibp_fault *, int, ibp_stream stream)
{
    num_chunks++;
    stream->add([=, items = *ids, item_bytes = table->item_bytes] {
        for (int64_t k = 0; k < items.count; k++)
            if (ibp_id_at(&items, k) >= 0)
                memcpy(out + k * item_bytes, stage + k * item_bytes, static_cast<size_t>(item_bytes));
    });
    return IBP_OK;
}

int main()
{
    long num_wrong = 0;
    const int num_runs = 200;
    for (int i = 0; i < num_runs; i++) {
        cudaStream_t caller;
        cudaStreamCreateWithFlags(&caller, 0);
        const Rows rows;
        num_wrong += !stage(rows, caller);
        cudaStreamDestroy(caller);
        created_streams.clear();
    }
    printf("%d runs, %ld wrong, %ld chunks\n", num_runs, num_wrong, num_chunks);
    return num_wrong != 0;
}
