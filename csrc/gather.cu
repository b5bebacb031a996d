// gather.cu - items fetched and rebuilt by the GPU, from wherever the table's bytes are (the paper's sections 4.3 and 4.4).
#include "codecs.cuh"

namespace ibp {

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

// Rebuilds a row that is staged from byte `first` on, with its cluster's codebook if there are several.
template <class Codec>
__device__ __forceinline__ bool decode_row(const ibp_codebook &cb, const Codec &codec, Stage stage, uint32_t first,
                                           uint32_t coded_bytes, const Window &window)
{
    uint32_t k = 0, skipped = 0;
    if (cb.num_clusters > 1u) {
        k = stage.bits_at(8u * first) & 0xffu;
        skipped = 1;
        if (coded_bytes < 1u || k >= cb.num_clusters) return false;
    }
    return codec.of_cluster(cb, k).decode(stage, 8u * (first + skipped), coded_bytes - skipped, window);
}

// One row's part of an item.
template <class Codec>
__device__ __forceinline__ ibp_status fetch_row(const ibp_table &table, const Codec &codec, int64_t num_bytes, int64_t num_rows,
                                                int64_t row, Stage stage, const Window &window)
{
    const RowSpan span = locate_row(table, num_bytes, num_rows, row);
    ibp_status status = span.in_bounds ? IBP_OK : IBP_CORRUPT_ROW;
    if (status == IBP_OK && span.raw) {
        copy_raw(span, window);
    } else if (status == IBP_OK) {
        const uint32_t shift = stage_span(table, span, stage);
        __syncwarp();
        if (!decode_row(table.codebook, codec, stage, shift, span.in_slot + span.in_overflow, window)) status = IBP_CORRUPT_ROW;
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
template <class Codec>
__global__ void __launch_bounds__(1024, 1) gather_items(const ibp_table table, const Request request, uint8_t *out, ibp_fault *fault)
{
    const int64_t num_bytes = table.num_items * table.item_bytes, row_bytes = table.codebook.row_bytes;
    const int64_t num_rows = (num_bytes + row_bytes - 1) / row_bytes, num_jobs = request.ids.count * request.rows_per_item;
    const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarp);
    const Stage stage = warp_stage(table.codebook);
    const Codec codec(table.codebook);
    for (int64_t job = blockIdx.x * static_cast<int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp; job < num_jobs; job += step) {
        const int64_t k = request.rows_per_item == 1 ? job : job / request.rows_per_item;
        const int64_t id = request.ids.data ? id_at(request.ids, k) : 0;
        const int64_t position = request.ids.positions ? int64_t{__ldg(request.ids.positions + k)} : k;
        if (request.ids.positions && position >= request.ids.out_items) {
            note_fault(fault, IBP_INDEX_OUT_OF_RANGE, position, id);
            continue;
        }
        const bool in_range = id >= 0 && id < table.num_items;
        const int64_t item_start = request.ids.data ? (in_range ? id : 0) * table.item_bytes : request.start;
        const int64_t item_end = request.ids.data ? item_start + table.item_bytes : request.end;
        const int64_t row = item_start / row_bytes + (job - k * request.rows_per_item), row_start = row * row_bytes;
        if (row_start >= item_end) continue;
        const uint32_t low = static_cast<uint32_t>(max(item_start - row_start, int64_t{0}));
        const uint32_t high = static_cast<uint32_t>(min(item_end - row_start, row_bytes));
        const Window window{out + position * table.item_bytes + (row_start + low - item_start), low, high};
        ibp_status status = IBP_INDEX_OUT_OF_RANGE;
        if (in_range)
            status = fetch_row(table, codec, num_bytes, num_rows, row, stage, window);
        else
            zero_bytes(window.dst, high - low);
        if (status != IBP_OK) note_fault(fault, status, request.ids.data ? position : row, request.ids.data ? id : row);
    }
}

// Vector stores need every row's part of the output to start at a multiple of 16 bytes.
static ibp_status gather(const ibp_table *table, const Request &request, uint8_t *out, ibp_fault *fault, int max_sms,
                         ibp_stream stream)
{
    if (fault == nullptr || max_sms < 0) return IBP_INVALID_ARGUMENT;
    const int64_t pitch = request.ids.data ? table->item_bytes : request.start;
    const bool by_16 =
        reinterpret_cast<uintptr_t>(out) % 16 == 0 && pitch % 16 == 0 && table->codebook.row_bytes % 16 == 0;
    return with_codec(table->codebook, by_16, [&](auto codec) {
        using Codec = typename decltype(codec)::type;
        const auto kernel = gather_items<Codec>;
        const int64_t num_jobs = request.ids.count * request.rows_per_item;
        Launch launch;
        const ibp_status status =
            plan_launch(reinterpret_cast<const void *>(kernel), table->codebook, num_jobs, max_sms, &launch);
        if (status != IBP_OK) return status;
        kernel<<<launch.blocks, launch.threads, launch.shared_bytes, stream>>>(*table, request, out, fault);
        return check_cuda(cudaGetLastError());
    });
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
    return ibp::gather(table, {{nullptr, 1, 8, nullptr, 0}, num_rows, start, end}, out, fault, max_sms, stream);
}
