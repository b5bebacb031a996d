// stream.cu - decodes tables that are in pinned host memory. The copy engine copies a table to the GPU chunk by chunk,
// and each chunk is decoded while the following chunks are copied.
//
// The link to the host limits the speed. The ring on the GPU has kPlaces places, each with two events, `filled` and
// `freed`. Chunk k uses place k % kPlaces:
//
//     copy stream:      wait freed[k - kPlaces]    copy chunk k      record filled[k]
//     decode stream:    wait filled[k]             decode chunk k    record freed[k]
//
// So the copy engine is up to kPlaces chunks ahead of the decoder, even across tables. The host does not wait, and the
// caller's stream waits only for the last chunk of a table. The decode stream has the highest priority, so that its few
// blocks get the next SMs that become free.
#include "../../internal/ibp_stream.h"
#include "../../core/chunk_plan.h"
#include "../cuda_checks.h"
#include "../errors.h"

#include <cstdlib>

namespace ibp {

constexpr int kPlaces = 4;

} // namespace ibp

struct ibp_streamer {
    int device;
    cudaStream_t copies, decodes;
    cudaEvent_t begun, ended, filled[ibp::kPlaces], freed[ibp::kPlaces];
    uint8_t *ring;
    int64_t place_bytes;
    // num_chunks: number of chunks since ibp_cuda_begin_stream. done_bytes: size in bytes of the chunks since
    // ibp_cuda_begin_stream or ibp_cuda_continue_stream.
    int64_t num_chunks, done_bytes;
};

namespace ibp {

static ibp_status copy_part(uint8_t *to, const uint8_t *from, uint64_t num_bytes, cudaStream_t stream)
{
    if (num_bytes == 0) return IBP_OK;
    return check_cuda(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream));
}

// Makes the streamer's streams wait for the work that is queued on the caller's stream. The decode stream waits before
// every table, because work on the caller's stream may still use the output's memory. The copy stream waits only before
// the first chunk: work on the caller's stream may use the ring until then, but not afterwards.
static ibp_status fork(ibp_streamer *streamer, cudaStream_t stream)
{
    FirstError calls;
    calls << cudaEventRecord(streamer->begun, stream) << cudaStreamWaitEvent(streamer->decodes, streamer->begun, 0);
    if (streamer->num_chunks == 0) calls << cudaStreamWaitEvent(streamer->copies, streamer->begun, 0);
    return calls.status();
}
static ibp_status join(ibp_streamer *streamer, cudaStream_t stream)
{
    FirstError calls;
    calls << cudaEventRecord(streamer->ended, streamer->decodes) << cudaStreamWaitEvent(stream, streamer->ended, 0);
    return calls.status();
}

// Returns whether the streamer belongs to the current device. Otherwise its streams and events cannot be used.
static bool is_here(const ibp_streamer *streamer)
{
    int device = 0;
    return streamer != nullptr && check_cuda(cudaGetDevice(&device)) == IBP_OK && device == streamer->device;
}

// Queues the copies of a chunk to its place in the ring. block: receives a table of the chunk's rows, whose arrays are
// in the ring. If rows have their own bases, their parts may be anywhere in overflow. Then overflow is not copied, and
// decoders read the parts from host memory.
static ibp_status fill_place(ibp_streamer *streamer, const ibp_table *table, const ibp_chunk &chunk, ibp_table *block)
{
    const int place = static_cast<int>(streamer->num_chunks % kPlaces);
    uint8_t *const ring = streamer->ring + place * streamer->place_bytes;
    const cudaStream_t copies = streamer->copies;
    FirstError calls;
    if (streamer->num_chunks >= kPlaces) calls << cudaStreamWaitEvent(copies, streamer->freed[place], 0);
    if (!calls.ok()) return calls.status();
    *block = *table;
    block->slots = ring;
    block->slots_start = chunk.slots_start;
    block->slots_bytes = static_cast<int64_t>(chunk.slots_bytes);
    calls << copy_part(ring, table->slots + chunk.slots_start, chunk.slots_bytes, copies);
    if (calls.ok() && !ibp_has_own_bases(table)) {
        uint8_t *const overflow = ring + ibp_chunk_overflow_offset(&chunk);
        block->overflow = overflow;
        block->overflow_start = chunk.overflow_start;
        block->overflow_bytes = static_cast<int64_t>(chunk.overflow_bytes);
        calls << copy_part(overflow, table->overflow + chunk.overflow_start, chunk.overflow_bytes, copies);
    }
    // The decode stream waits for the copies that were queued, even after an error.
    calls << cudaEventRecord(streamer->filled[place], copies)
          << cudaStreamWaitEvent(streamer->decodes, streamer->filled[place], 0);
    return calls.status();
}

// Queues the copies and the decoding of one chunk. out: receives the bytes [start, end), which must be in the chunk's
// rows. A chunk that does not fit in a place is decoded from host memory.
static ibp_status stream_chunk(ibp_streamer *streamer, const ibp_table *table, const ibp_chunk &chunk, int64_t start,
                               int64_t end, uint8_t *out, ibp_fault *fault, int max_sms)
{
    const cudaStream_t decodes = streamer->decodes;
    if (!chunk.fits) return ibp_cuda_decode_bytes(table, start, end, out, fault, max_sms, decodes);
    ibp_table block;
    ibp_status status = fill_place(streamer, table, chunk, &block);
    if (status == IBP_OK) status = ibp_cuda_decode_bytes(&block, start, end, out, fault, max_sms, decodes);
    if (status == IBP_OK)
        status = check_cuda(cudaEventRecord(streamer->freed[streamer->num_chunks % kPlaces], decodes));
    streamer->num_chunks++;
    streamer->done_bytes += static_cast<int64_t>(chunk.slots_bytes + chunk.overflow_bytes);
    return status;
}

// Creates the streamer's streams and events, in relaxed capture mode. In another mode, a capture in this thread could
// forbid the calls that create them.
static ibp_status create_events(ibp_streamer *streamer)
{
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    int lowest = 0, highest = 0;
    FirstError calls;
    calls << cudaThreadExchangeStreamCaptureMode(&mode);
    if (!calls.ok()) return calls.status();
    calls << cudaGetDevice(&streamer->device) << cudaDeviceGetStreamPriorityRange(&lowest, &highest)
          << cudaStreamCreateWithPriority(&streamer->copies, cudaStreamNonBlocking, lowest)
          << cudaStreamCreateWithPriority(&streamer->decodes, cudaStreamNonBlocking, highest)
          << cudaEventCreateWithFlags(&streamer->begun, cudaEventDisableTiming)
          << cudaEventCreateWithFlags(&streamer->ended, cudaEventDisableTiming);
    for (int place = 0; place < kPlaces; place++)
        calls << cudaEventCreateWithFlags(&streamer->filled[place], cudaEventDisableTiming)
              << cudaEventCreateWithFlags(&streamer->freed[place], cudaEventDisableTiming);
    calls << cudaThreadExchangeStreamCaptureMode(&mode);
    return calls.status();
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_create_streamer(ibp_streamer **streamer)
{
    if (streamer == nullptr) return IBP_INVALID_ARGUMENT;
    *streamer = static_cast<ibp_streamer *>(calloc(1, sizeof(ibp_streamer)));
    if (*streamer == nullptr) return ibp::check_cuda(cudaErrorMemoryAllocation);
    const ibp_status status = ibp::create_events(*streamer);
    if (status == IBP_OK) return IBP_OK;
    ibp_cuda_destroy_streamer(*streamer);
    *streamer = nullptr;
    return status;
}

extern "C" ibp_status ibp_cuda_destroy_streamer(ibp_streamer *streamer)
{
    if (streamer == nullptr) return IBP_OK;
    ibp::FirstError calls;
    for (int place = 0; place < ibp::kPlaces; place++) {
        if (streamer->filled[place]) calls << cudaEventDestroy(streamer->filled[place]);
        if (streamer->freed[place]) calls << cudaEventDestroy(streamer->freed[place]);
    }
    for (const cudaEvent_t event : {streamer->begun, streamer->ended})
        if (event) calls << cudaEventDestroy(event);
    for (const cudaStream_t stream : {streamer->copies, streamer->decodes})
        if (stream) calls << cudaStreamDestroy(stream);
    free(streamer);
    return calls.status();
}

extern "C" ibp_status ibp_cuda_begin_stream(ibp_streamer *streamer, uint8_t *ring, int64_t ring_bytes)
{
    if (!ibp::is_here(streamer) || !ibp::has_bytes(ring, ring_bytes)) return IBP_INVALID_ARGUMENT;
    if (ring_bytes < 0 || reinterpret_cast<uintptr_t>(ring) % IBP_CHUNK_ALIGN != 0) return IBP_INVALID_ARGUMENT;
    streamer->ring = ring;
    streamer->place_bytes = ring_bytes / ibp::kPlaces / IBP_CHUNK_ALIGN * IBP_CHUNK_ALIGN;
    streamer->num_chunks = streamer->done_bytes = 0;
    return IBP_OK;
}

extern "C" ibp_status ibp_cuda_continue_stream(ibp_streamer *streamer)
{
    if (!ibp::is_here(streamer) || streamer->ring == nullptr) return IBP_INVALID_ARGUMENT;
    streamer->done_bytes = 0; // so that the first chunks are small again
    return IBP_OK;
}

extern "C" ibp_status ibp_cuda_stream_bytes(ibp_streamer *streamer, const ibp_table *table, const uint64_t *bases,
                                            int64_t start, int64_t end, bool ends, uint8_t *out, ibp_fault *fault,
                                            int max_sms, ibp_stream stream)
{
    if (!ibp::is_here(streamer) || !ibp::is_table(table)) return IBP_INVALID_ARGUMENT;
    if (start < 0 || start > end || end > ibp_bytes_of_table(table)) return IBP_INVALID_ARGUMENT;
    if (table->slots_start != 0 || table->overflow_start != 0 || fault == nullptr || max_sms < 0)
        return IBP_INVALID_ARGUMENT;
    if (start == end) return IBP_OK;
    const bool reads_bases = table->bases != nullptr && !ibp_has_own_bases(table);
    if (out == nullptr || (reads_bases && bases == nullptr)) return IBP_INVALID_ARGUMENT;
    const int64_t row_bytes = table->codebook.row_bytes, num_rows = ibp_num_rows(table);
    // If the rows are raw and lie one after the other, they are only copied.
    if (!table->lengths && table->slot_bytes == row_bytes && end <= table->slots_bytes)
        return ibp::copy_part(out, table->slots + start, static_cast<uint64_t>(end - start), stream);
    const int64_t group = IBP_ROWS_PER_BASE, groups_end = ((end - 1) / row_bytes / group + 1) * group;
    const int64_t end_row = groups_end < num_rows ? groups_end : num_rows;
    ibp_status status = ibp::fork(streamer, stream);
    if (status != IBP_OK) return status;
    for (int64_t row = start / row_bytes / group * group; row < end_row && status == IBP_OK;) {
        const ibp_chunk chunk =
            ibp_plan_chunk(table, bases, row, end_row, streamer->done_bytes, streamer->place_bytes, ends);
        const int64_t from = row * row_bytes > start ? row * row_bytes : start;
        const int64_t to = chunk.last_row * row_bytes < end ? chunk.last_row * row_bytes : end;
        status = ibp::stream_chunk(streamer, table, chunk, from, to, out + (from - start), fault, max_sms);
        row = chunk.last_row;
    }
    // Join even after an error: a capture must not end with unjoined work.
    const ibp_status joined = ibp::join(streamer, stream);
    return status != IBP_OK ? status : joined;
}
