// gather.cu - items fetched and rebuilt by the GPU, from wherever the table's bytes are (the paper's sections 4.3 and 4.4).
#include "warp.cuh"

namespace ibp {

// The bytes [low, high) of one row, and where they go.
struct Window {
    uint8_t *dst;
    uint32_t low, high;
};

// Writes the bytes of WORDS words that lie in the window: one vector store where it is aligned and whole, else bytes.
template <int WORDS>
__device__ __forceinline__ void store_words(const Window &window, bool vectors, uint32_t w, const uint32_t (&words)[WORDS])
{
    const uint32_t first = 4u * w, end = first + 4u * WORDS;
    if (first >= window.high || end <= window.low) return;
    if (vectors && first >= window.low && end <= window.high) {
        uint32_t *const dst = reinterpret_cast<uint32_t *>(window.dst + (first - window.low));
        if (WORDS == 4)
            *reinterpret_cast<uint4 *>(dst) = make_uint4(words[0], words[1 % WORDS], words[2 % WORDS], words[3 % WORDS]);
        else
            dst[0] = words[0];
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4u * WORDS; i++)
        if (first + i >= window.low && first + i < window.high)
            window.dst[first + i - window.low] = static_cast<uint8_t>(words[i / 4u] >> (8u * (i % 4u)));
}

// Rebuilds a staged row whose first bit is at stage bit start_bit. Returns the bits that it took.
template <int WORDS>
__device__ __forceinline__ uint32_t decode_row(const ibp_codebook &cb, Stage stage, uint32_t start_bit, const Window &window)
{
    const bool vectors = (reinterpret_cast<uintptr_t>(window.dst) - window.low) % (4u * WORDS) == 0;
    const uint32_t num_words = (cb.row_bytes + 15u) / 16u * 4u;
    uint32_t position = cb.num_flags;
    for (uint32_t base = 0; base < num_words; base += kWarp * WORDS) {
        const uint32_t w = base + lane_id() * WORDS;
        uint32_t mask[WORDS], word[WORDS], flags[WORDS], keep[WORDS];
        load_entries(cb.mask, w, num_words, mask);
        load_entries(cb.bitval, w, num_words, word);
        load_entries(cb.flags, w, num_words, flags);
        const uint32_t participation = stage.bits_at(start_bit + ibp_flag_position(flags[0]));
        uint32_t num_kept = 0, total;
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const uint32_t flags_before = (ibp_flag_position(flags[i]) - ibp_flag_position(flags[0])) % 32u;
            keep[i] = ibp_keep_word(participation >> flags_before, mask[i], flags[i], cb.chunk_bytes) &
                      ibp_row_bits_of_word(cb.row_bytes, w + i);
            num_kept += ibp_popcount(keep[i]);
        }
        uint32_t from = start_bit + position + exclusive_scan(num_kept, total);
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            word[i] = (word[i] & ~keep[i]) | ibp_deposit(stage.bits_at(from), keep[i]);
            from += ibp_popcount(keep[i]);
        }
        store_words(window, vectors, w, word);
        position += total;
    }
    return position;
}

// Raw bytes [low, high) of a row, which may lie partly in its slot and partly in overflow.
__device__ __forceinline__ void copy_raw(const RowSpan &span, const Window &window)
{
    const uint32_t split = min(max(span.in_slot, window.low), window.high);
    if (split > window.low) copy_bytes(window.dst, span.slot + window.low, split - window.low);
    if (window.high > split)
        copy_bytes(window.dst + (split - window.low), span.overflow + (split - span.in_slot), window.high - split);
}

// Brings a coded row, in one or two parts, into the stage. Returns the stage byte where it starts.
__device__ __forceinline__ uint32_t stage_span(const ibp_table &table, const RowSpan &span, Stage stage)
{
    if (span.in_slot == 0)
        return stage_row(stage, span.overflow, span.in_overflow, table.overflow, table.overflow + table.overflow_bytes);
    const uint32_t shift = stage_row(stage, span.slot, span.in_slot, table.slots, table.slots + table.slots_bytes);
    if (span.in_overflow == 0) return shift;
    __syncwarp(); // the last vector of the slot may carry bytes past in_slot
    copy_bytes(stage.bytes() + shift + span.in_slot, span.overflow, span.in_overflow);
    return shift;
}

// One row's part of an item.
template <int WORDS>
__device__ __forceinline__ ibp_status fetch_row(const ibp_table &table, int64_t num_bytes, int64_t num_rows, int64_t row,
                                                Stage stage, const Window &window)
{
    const RowSpan span = locate_row(table, num_bytes, num_rows, row);
    ibp_status status = span.in_bounds ? IBP_OK : IBP_CORRUPT_ROW;
    if (status == IBP_OK && span.raw) {
        copy_raw(span, window);
    } else if (status == IBP_OK) {
        const uint32_t shift = stage_span(table, span, stage);
        __syncwarp();
        const uint32_t bits = decode_row<WORDS>(table.codebook, stage, 8u * shift, window);
        if ((bits + 7u) / 8u != span.in_slot + span.in_overflow) status = IBP_CORRUPT_ROW;
        __syncwarp(); // the stage is free for the next row
    }
    if (status != IBP_OK) zero_bytes(window.dst, window.high - window.low);
    return status;
}

// The items at ids, or, where those are NULL, the one "item" of the bytes [start, end).
struct Request {
    ibp_ids ids;
    int64_t rows_per_item, start, end;
};

__device__ __forceinline__ int64_t id_at(const ibp_ids &ids, int64_t position)
{
    return ids.id_bytes == 8 ? __ldg(static_cast<const long long *>(ids.data) + position)
                             : __ldg(static_cast<const int *>(ids.data) + position);
}

// Rows that an item can touch.
static int64_t rows_an_item(int64_t item_bytes, int64_t row_bytes)
{
    if (row_bytes % item_bytes == 0) return 1;
    if (item_bytes % row_bytes == 0) return item_bytes / row_bytes;
    return (item_bytes - 2) / row_bytes + 2;
}

// One job is one row of one item. Bound by the link from pinned memory; registers, not shared memory, limit the warps for short rows.
template <int WORDS>
__global__ void __launch_bounds__(1024) gather_items(const ibp_table table, const Request request, uint8_t *out, ibp_fault *fault)
{
    const int64_t num_bytes = table.num_items * table.item_bytes, row_bytes = table.codebook.row_bytes;
    const int64_t num_rows = (num_bytes + row_bytes - 1) / row_bytes, num_jobs = request.ids.count * request.rows_per_item;
    const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarp);
    const Stage stage = warp_stage(table.codebook.row_bytes);
    for (int64_t job = blockIdx.x * static_cast<int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp; job < num_jobs; job += step) {
        const int64_t position = request.rows_per_item == 1 ? job : job / request.rows_per_item;
        const int64_t id = request.ids.data ? id_at(request.ids, position) : 0;
        const bool in_range = id >= 0 && id < table.num_items;
        const int64_t item_start = request.ids.data ? (in_range ? id : 0) * table.item_bytes : request.start;
        const int64_t item_end = request.ids.data ? item_start + table.item_bytes : request.end;
        const int64_t row = item_start / row_bytes + (job - position * request.rows_per_item), row_start = row * row_bytes;
        if (row_start >= item_end) continue;
        const uint32_t low = static_cast<uint32_t>(max(item_start - row_start, int64_t{0}));
        const uint32_t high = static_cast<uint32_t>(min(item_end - row_start, row_bytes));
        const Window window{out + position * table.item_bytes + (row_start + low - item_start), low, high};
        ibp_status status = IBP_INDEX_OUT_OF_RANGE;
        if (in_range)
            status = fetch_row<WORDS>(table, num_bytes, num_rows, row, stage, window);
        else
            zero_bytes(window.dst, high - low);
        if (status != IBP_OK) note_fault(fault, status, request.ids.data ? position : row, request.ids.data ? id : row);
    }
}

template <int WORDS>
static ibp_status launch_gather(const ibp_table *table, const Request &request, uint8_t *out, ibp_fault *fault, int max_sms,
                                ibp_stream stream)
{
    const void *const kernel = reinterpret_cast<const void *>(gather_items<WORDS>);
    Launch launch;
    const ibp_status status =
        plan_launch(kernel, table->codebook.row_bytes, request.ids.count * request.rows_per_item, max_sms, &launch);
    if (status != IBP_OK) return status;
    gather_items<WORDS><<<launch.blocks, launch.threads, launch.shared_bytes, stream>>>(*table, request, out, fault);
    return check_cuda(cudaGetLastError());
}

// Vector stores need every row's part of the output to start at a multiple of 16 bytes.
static ibp_status gather(const ibp_table *table, const Request &request, uint8_t *out, ibp_fault *fault, int max_sms,
                         ibp_stream stream)
{
    if (fault == nullptr || max_sms < 0) return IBP_INVALID_ARGUMENT;
    const int64_t pitch = request.ids.data ? table->item_bytes : request.start;
    const bool by_16 = reinterpret_cast<uintptr_t>(out) % 16 == 0 && pitch % 16 == 0 && table->codebook.row_bytes % 16 == 0;
    return by_16 ? launch_gather<4>(table, request, out, fault, max_sms, stream)
                 : launch_gather<1>(table, request, out, fault, max_sms, stream);
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_gather_items(const ibp_table *table, const ibp_ids *ids, uint8_t *out, ibp_fault *fault, int max_sms,
                                            ibp_stream stream)
{
    if (ids->count == 0 || table->item_bytes == 0) return IBP_OK;
    return ibp::gather(table, {*ids, ibp::rows_an_item(table->item_bytes, table->codebook.row_bytes), 0, 0}, out, fault, max_sms,
                       stream);
}

extern "C" ibp_status ibp_cuda_decode_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out, ibp_fault *fault,
                                            int max_sms, ibp_stream stream)
{
    if (start < 0 || start > end || end > table->num_items * table->item_bytes) return IBP_INVALID_ARGUMENT;
    if (start == end) return IBP_OK;
    const int64_t row_bytes = table->codebook.row_bytes, num_rows = (end - 1) / row_bytes - start / row_bytes + 1;
    return ibp::gather(table, {{nullptr, 1, 8}, num_rows, start, end}, out, fault, max_sms, stream);
}
