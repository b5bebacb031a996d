// gather.cu - items fetched and rebuilt by the GPU, from wherever the table's bytes are (the paper's sections 4.3 and 4.4).
//
// A group of threads takes a row a job. The lanes of its warp look up the warp's next rows together, one each; then the groups go through them, each
// decoding a row while the bytes of its next one are on their way to registers. Rows that are out of the ordinary are fetched when their turn
// comes, by functions of their own.
#include "decode/decoders.cuh"

#include <algorithm>

namespace ibp {

constexpr int64_t kMostJobs = 1ll << 31; // of a launch: job numbers have 32 bits

// The items at ids, or, where there are none, the rows of the bytes [start, end): an "item" each, in order.
struct Request {
    ibp_ids ids;
    int64_t start, end;
    int64_t rows_per_item, first_row; // of the bytes
    uint32_t num_jobs;
    bool by_id, whole_rows; // whole_rows: items begin and end with rows
    // Ordinary are the rows of the num_ordinary items from first_ordinary on: whole ones, of row_bytes bytes, that begin in `rows`.
    int64_t first_ordinary;
    uint64_t num_ordinary;
    uint32_t out_items, most_stored; // most_stored: bytes of a row as stored that lie in one piece
    uint8_t *dst;                    // where the row of item 0 would go
    const uint8_t *rows;             // slots or overflow
    int64_t rows_bytes;
    bool packed, copies_vectors; // copies_vectors: raw rows at multiples of 16 bytes can be
};

// Rows that an item can touch.
static int64_t rows_an_item(int64_t item_bytes, int64_t row_bytes)
{
    if (row_bytes % item_bytes == 0) return 1;
    if (item_bytes % row_bytes == 0) return item_bytes / row_bytes;
    return (item_bytes - 2) / row_bytes + 2;
}

// What a job is asked for: row `part` of the item id, which goes to a position of the output.
struct Ticket {
    int64_t id;
    uint32_t position, part;
};

__device__ __forceinline__ Ticket load_ticket(const Request &request, uint32_t number)
{
    if (!request.by_id) return {number, number, 0};
    const auto rows_per_item = static_cast<uint32_t>(request.rows_per_item);
    const uint32_t item = rows_per_item == 1u ? number : number / rows_per_item;
    const int64_t id = request.ids.id_bytes == 8 ? __ldg(static_cast<const long long *>(request.ids.data) + item)
                                                 : __ldg(static_cast<const int *>(request.ids.data) + item);
    return {id, request.ids.positions ? __ldg(request.ids.positions + item) : item, number - item * rows_per_item};
}

// Where in the table's overflow bytes a row begins: past them if its base is.
__device__ __forceinline__ uint64_t overflow_start(const ibp_table &table, int64_t row)
{
    const uint64_t group = static_cast<uint64_t>(row) / kWarp, base = __ldg(table.bases + group) - table.overflow_start;
    const uint32_t in_group = static_cast<uint32_t>(row) % kWarp, row_bytes = table.codebook.row_bytes;
    uint32_t room = 0;
#pragma unroll 8
    for (uint32_t q = 0; q < in_group; q++) {
        const uint32_t length = table.lengths ? __ldg(table.lengths + (group * kWarp + q)) : 0u;
        room += ibp_overflow_room(ibp_overflow_part(length ? length : row_bytes, table.slot_bytes), table.slot_bytes);
    }
    return base <= static_cast<uint64_t>(table.overflow_bytes) ? base + room : ~uint64_t{0};
}

// ---- rows out of the ordinary ----

enum Kind : uint32_t { kNothing, kCoded, kRaw, kStagedRaw, kOther };

// A row that has been fetched: staged if it is coded, else done with. The bytes [low, high) of it are wanted.
struct Fetched {
    Window window;
    uint32_t num_bytes; // as stored
    Kind kind;
};

struct Job {
    Ticket ticket;
    int64_t row;
    Window window; // dst is NULL where nothing is to be written
    bool in_range;
};

static __device__ Job job_of(const ibp_table &table, const Request &request, uint8_t *out, uint32_t number)
{
    Job job{};
    job.ticket = load_ticket(request, number);
    const int64_t row_bytes = table.codebook.row_bytes, id = job.ticket.id;
    int64_t start = request.start, end = request.end;
    job.in_range = true;
    job.row = request.first_row + number;
    if (request.by_id) {
        job.in_range = id >= 0 && id < table.num_items && job.ticket.position < request.out_items;
        start = (id >= 0 && id < table.num_items ? id : 0) * table.item_bytes, end = start + table.item_bytes;
        job.row = start / row_bytes + job.ticket.part;
        if (job.ticket.position >= request.out_items) return job;
    }
    const int64_t row_start = job.row * row_bytes;
    if (row_start >= end) {
        job.in_range = true; // an item that touches fewer rows than others
        return job;
    }
    job.window.low = static_cast<uint32_t>(max(start - row_start, int64_t{0}));
    job.window.high = static_cast<uint32_t>(min(end - row_start, row_bytes));
    job.window.dst = out + (request.by_id ? job.ticket.position * table.item_bytes : 0) + (row_start + job.window.low - start);
    return job;
}

template <class G>
static __device__ __noinline__ void refuse(const ibp_table &table, const Request &request, uint8_t *out, uint32_t number,
                                           ibp_status status, ibp_fault *fault)
{
    const Job job = job_of(table, request, out, number);
    if (job.window.dst) group_zero<G>(job.window.dst, job.window.high - job.window.low);
    if (G::rank() != 0) return;
    if (request.by_id)
        record_fault(fault, status, job.ticket.position, job.ticket.id);
    else
        record_fault(fault, status, job.row, job.row);
}

// Fetches the row of a job, of any kind (FORMAT.md section 3).
template <class G>
static __device__ __noinline__ Fetched fetch_other(const ibp_table &table, const Request &request, uint8_t *out, uint32_t stage,
                                                   uint32_t number, ibp_fault *fault)
{
    Fetched fetched{{nullptr, 0, 0}, 0, kNothing};
    const Job job = job_of(table, request, out, number);
    const uint32_t slot_bytes = table.slot_bytes, row_bytes = table.codebook.row_bytes;
    uint32_t stored = 0, in_slot = 0, in_overflow = 0;
    bool raw = true, in_bounds = job.in_range;
    const uint8_t *slot = table.slots, *overflow = table.overflow;
    if (job.window.dst && job.in_range) {
        const uint32_t valid = ibp_valid_bytes(table.num_items * table.item_bytes, row_bytes, job.row),
                       length = table.lengths ? __ldg(table.lengths + job.row) : 0u;
        raw = length == 0;
        stored = raw ? valid : length;
        in_overflow = ibp_overflow_part(stored, slot_bytes), in_slot = stored - in_overflow;
        const uint64_t start = static_cast<uint64_t>(job.row) * slot_bytes - table.slots_start,
                       end = static_cast<uint64_t>(table.slots_bytes);
        in_bounds =
            stored <= valid && (in_slot == 0 || (start <= end && in_slot <= end - start)) && (in_overflow == 0 || table.bases);
        slot += start;
    }
    if (in_bounds && in_overflow != 0) {
        const uint64_t start = overflow_start(table, job.row), end = static_cast<uint64_t>(table.overflow_bytes);
        in_bounds = start <= end && in_overflow <= end - start;
        overflow += start;
    }
    if (!in_bounds) {
        refuse<G>(table, request, out, number, job.in_range ? IBP_CORRUPT_ROW : IBP_INDEX_OUT_OF_RANGE, fault);
    } else if (job.window.dst && raw) {
        const uint32_t low = job.window.low, high = job.window.high, split = min(max(in_slot, low), high);
        if (split > low) group_copy<G>(job.window.dst, slot + low, split - low);
        if (high > split) group_copy<G>(job.window.dst + (split - low), overflow + (split - in_slot), high - split);
    } else if (job.window.dst) {
        fetched = {job.window, stored, kCoded};
        group_copy<G>(shared_bytes() + stage, slot, in_slot);
        group_copy<G>(shared_bytes() + stage + in_slot, overflow, in_overflow);
    }
    return fetched;
}

// ---- ordinary rows ----

// A row as a lane has looked it up. what: the vectors of 16 bytes at `from` that hold it, how many bytes of the first and of the last are not its, and its
// kind; no vectors where it is out of the ordinary, or there is none.
struct Entry {
    const uint8_t *from;
    uint8_t *dst;
    uint32_t what;
};
struct Row {
    uint8_t *dst;
    uint32_t what;

    __device__ __forceinline__ uint32_t shift() const { return what >> 16 & 15u; }
    __device__ __forceinline__ uint32_t num_bytes() const { return 16u * (what & 0xffffu) - shift() - (what >> 20 & 15u); }
    __device__ __forceinline__ Kind kind() const { return static_cast<Kind>(what >> 24); }
};
static_assert(IBP_MAX_ROW_BYTES / 16u + 1u < 1u << 16, "the fields of Entry::what");
__device__ __forceinline__ uint32_t what_of(uint32_t num_bytes, uint32_t shift, Kind kind)
{
    const uint32_t num_vectors = (shift + num_bytes + 15u) / 16u;
    return num_vectors | shift << 16 | (16u * num_vectors - shift - num_bytes) << 20 | kind << 24;
}
__device__ __forceinline__ uint32_t vectors_in(uint32_t what) { return what & 0xffffu; }
__device__ __forceinline__ bool is_raw(uint32_t what) { return what >> 24 == kRaw; }

__device__ __forceinline__ Entry look_up(const ibp_table &table, const Request &request, uint32_t number)
{
    if (number >= request.num_jobs) return {nullptr, nullptr, what_of(0, 0, kNothing)};
    Entry entry{nullptr, nullptr, what_of(0, 0, kOther)};
    const Ticket ticket = load_ticket(request, number);
    if (static_cast<uint64_t>(ticket.id - request.first_ordinary) >= request.num_ordinary || ticket.position >= request.out_items)
        return entry;
    const auto rows_per_item = static_cast<uint32_t>(request.rows_per_item);
    const int64_t row = request.first_row + ticket.id * rows_per_item + ticket.part;
    const uint32_t length = table.lengths ? __ldg(table.lengths + row) : 0u, stored = length ? length : table.codebook.row_bytes;
    const uint64_t start =
        request.packed ? overflow_start(table, row) : static_cast<uint64_t>(row) * table.slot_bytes - table.slots_start;
    const uint32_t shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(request.rows) + start) % 16u,
                   num_vectors = (shift + stored + 15u) / 16u;
    const int64_t before = static_cast<int64_t>(start) - shift;
    if (stored > request.most_stored || before < 0 || before > request.rows_bytes - 16 * static_cast<int64_t>(num_vectors))
        return entry;
    const Kind kind = length ? kCoded : request.copies_vectors && shift == 0u ? kRaw : kStagedRaw;
    entry.from = request.rows + before;
    entry.dst = request.dst + (static_cast<uint64_t>(ticket.position) * rows_per_item + ticket.part) * table.codebook.row_bytes;
    entry.what = what_of(stored, shift, kind);
    return entry;
}

template <class Decoder> struct Fetch {
    using G = typename Decoder::Group;
    static constexpr uint32_t kVectors = Decoder::kVectors; // of a thread on their way

    const ibp_table &table;
    const Request &request;
    uint8_t *const out;
    const Stage stage;
    const uint32_t first_stage, group_bytes; // shared bytes: where the block's first group has its own, and how many each has

    // The row that lane i has looked up. By all lanes of a warp together.
    static __device__ __forceinline__ Row row_of(const Entry &entry, uint32_t i)
    {
        return {dst_of(entry, i), __shfl_sync(kAllLanes, entry.what, i)};
    }
    static __device__ __forceinline__ uint8_t *dst_of(const Entry &entry, uint32_t i)
    {
        return reinterpret_cast<uint8_t *>(
            __shfl_sync(kAllLanes, static_cast<uint64_t>(reinterpret_cast<uintptr_t>(entry.dst)), i));
    }

    // Vectors of a warp's rows are fetched row by row, consecutive ones by consecutive lanes, whichever lanes will decode them: the link is used best by
    // wide requests. So of the vectors that are on their way, a lane's k-th is vector_of(k) of the warp's row row_in_warp(k).
    static constexpr uint32_t kRowVectors = kVectors * G::kThreads;
    static __device__ __forceinline__ uint32_t row_in_warp(uint32_t k)
    {
        return G::kPerWarp == 1 ? 0 : (k * kWarp + lane_id()) / kRowVectors;
    }
    static __device__ __forceinline__ uint32_t vector_of(uint32_t k)
    {
        return G::kPerWarp == 1 ? k * G::kThreads + G::rank() : (k * kWarp + lane_id()) % kRowVectors;
    }
    static __device__ __forceinline__ const uint4 *from_of(const Entry &entry, uint32_t i)
    {
        return reinterpret_cast<const uint4 *>(
            __shfl_sync(kAllLanes, static_cast<uint64_t>(reinterpret_cast<uintptr_t>(entry.from)), i));
    }

    // Sends for the bytes of the rows that the lanes from i on have looked up. By all lanes of a warp together.
    static __device__ __forceinline__ void send_for(const Entry &entry, uint32_t i, uint4 (&vectors)[kVectors])
    {
        uint32_t num_vectors = 0;
        const uint4 *from = nullptr;
#pragma unroll
        for (uint32_t k = 0; k < kVectors; k++) {
            if (G::kPerWarp > 1 || k == 0) {
                num_vectors = vectors_in(__shfl_sync(kAllLanes, entry.what, i + row_in_warp(k)));
                from = from_of(entry, i + row_in_warp(k));
            }
            if (vector_of(k) < num_vectors) vectors[k] = from[vector_of(k)];
        }
    }

    // Puts the vectors that were on their way where they belong, and fetches those for which there was no room. By all lanes of a warp together.
    __device__ __forceinline__ void receive(const Row &row, const Entry &entry, uint32_t i, const uint4 (&vectors)[kVectors]) const
    {
        const uint32_t first_group = G::in_block() / G::kPerWarp * G::kPerWarp;
        const auto what_of_row = [&](uint32_t k) {
            return G::kPerWarp == 1 ? row.what : __shfl_sync(kAllLanes, entry.what, i + row_in_warp(k));
        };
        const auto staged = [&](uint32_t k) { return shared_bytes() + first_stage + (first_group + row_in_warp(k)) * group_bytes; };
        if (!G::any(is_raw(row.what))) {
#pragma unroll
            for (uint32_t k = 0; k < kVectors; k++)
                if (vector_of(k) < vectors_in(what_of_row(k))) reinterpret_cast<uint4 *>(staged(k))[vector_of(k)] = vectors[k];
        } else {
#pragma unroll
            for (uint32_t k = 0; k < kVectors; k++) {
                const uint32_t what = what_of_row(k);
                uint8_t *const dst = G::kPerWarp == 1 ? row.dst : dst_of(entry, i + row_in_warp(k));
                if (vector_of(k) < vectors_in(what))
                    reinterpret_cast<uint4 *>(is_raw(what) ? dst : staged(k))[vector_of(k)] = vectors[k];
            }
        }
        const uint32_t num_vectors = vectors_in(row.what);
        if (!G::any(num_vectors > kRowVectors)) return;
        const uint4 *const from = from_of(entry, i + in_warp());
        uint4 *const to = reinterpret_cast<uint4 *>(is_raw(row.what) ? row.dst : stage.bytes());
#pragma unroll 8
        for (uint32_t k = kRowVectors + G::rank(); k < num_vectors; k += G::kThreads) to[k] = from[k];
    }
    // Which of the warp's rows is the group's.
    static __device__ __forceinline__ uint32_t in_warp() { return G::kPerWarp > 1 ? G::in_block() % G::kPerWarp : 0; }

    // Decodes what has been received. Called by all lanes of a warp together.
    __device__ __forceinline__ void finish(const Decoder &decoder, uint32_t number, Row row, ibp_fault *fault) const
    {
        Window window{row.dst, 0, table.codebook.row_bytes};
        if (row.kind() == kOther) {
            const Fetched other = fetch_other<G>(table, request, out, stage.first, number, fault);
            window = other.window;
            row = {other.window.dst, what_of(other.num_bytes, 0, other.kind)};
        }
        if (!G::any(row.kind() == kCoded || row.kind() == kStagedRaw)) return;
        G::sync();
        if (row.kind() == kStagedRaw) group_copy<G>(row.dst, stage.bytes() + row.shift(), row.num_bytes());
        bool coded = row.kind() == kCoded, good = true;
        uint32_t cluster = 0, start = stage.first + row.shift(), num_bytes = row.num_bytes();
        if (table.codebook.num_clusters > 1u) {
            cluster = shared_bits(8u * start) & 0xffu;
            good = !coded || (num_bytes >= 1u && cluster < table.codebook.num_clusters);
            coded = coded && good;
            if (!coded) cluster = 0;
            start += 1u, num_bytes -= 1u;
        }
        if (G::any(coded)) good = decoder.decode(cluster, coded, stage, 8u * start, num_bytes, window) && good;
        G::sync(); // the stage is free for the next row, what was stored of a corrupt one has been
        if (!good) refuse<G>(table, request, out, number, IBP_CORRUPT_ROW, fault);
    }
};

// Bound by the link from pinned memory, by instruction issue on few SMs, by device memory or instruction issue otherwise; by address translation where
// the rows that are fetched at the same time lie far apart. So consecutive jobs are done at the same time, by different warps.
template <class Decoder>
__global__ void __launch_bounds__(Decoder::kMostThreads, 1)
    gather_items(const __grid_constant__ ibp_table table, const __grid_constant__ Request request, const uint32_t group_bytes,
                 uint8_t *out, ibp_fault *fault)
{
    using F = Fetch<Decoder>;
    using G = typename Decoder::Group;
    const uint32_t first_stage = Decoder::block_bytes(table.codebook), mine = first_stage + G::in_block() * group_bytes;
    const F fetch{table, request, out, stage_at(mine, table.codebook.row_bytes), first_stage, group_bytes};
    const Decoder decoder(table.codebook, mine + row_stage_bytes(table.codebook.row_bytes));
    __syncthreads();

    // A warp, or a group of several, takes G::kPerWarp jobs a round, blocks in turn, so that few jobs spread over all of them; its lanes look up those
    // of as many rounds as there are lanes for.
    const uint32_t teams = blockDim.x / (G::kThreads * G::kPerWarp), team = threadIdx.x / (G::kThreads * G::kPerWarp);
    const uint32_t num_jobs = request.num_jobs, round = gridDim.x * teams * G::kPerWarp;
    const uint32_t ahead = lane_id() / G::kPerWarp * round + lane_id() % G::kPerWarp;
    uint32_t first = (blockIdx.x + gridDim.x * team) * G::kPerWarp, i = 0;
    if (first >= num_jobs) return;
    uint4 vectors[F::kVectors];
    Entry entry = look_up(table, request, first + ahead);
    F::send_for(entry, 0, vectors);
#pragma unroll 1
    while (first < num_jobs) {
        const Row row = F::row_of(entry, i + F::in_warp());
        const uint32_t number = first + F::in_warp();
        fetch.receive(row, entry, i, vectors);
        first += round, i += G::kPerWarp;
        if (i == kWarp) entry = look_up(table, request, first + ahead), i = 0;
        F::send_for(entry, i, vectors);
        fetch.finish(decoder, number, row, fault);
    }
}

// Fills in which items are ordinary, and where their rows are.
static void describe_rows(const ibp_table &table, uint8_t *out, Request *request)
{
    const int64_t row_bytes = table.codebook.row_bytes;
    request->packed = table.slot_bytes == 0u;
    request->most_stored = request->packed ? table.codebook.row_bytes : std::min(table.slot_bytes, table.codebook.row_bytes);
    request->rows = request->packed ? table.overflow : table.slots;
    request->rows_bytes = request->packed ? table.overflow_bytes : table.slots_bytes;
    const int64_t pitch = row_bytes * request->rows_per_item;
    if (request->by_id) {
        const bool by_positions = request->ids.positions != nullptr;
        request->out_items =
            static_cast<uint32_t>(std::min<int64_t>(by_positions ? request->ids.out_items : request->ids.count, UINT32_MAX));
        request->num_ordinary = request->whole_rows ? static_cast<uint64_t>(table.num_items) : 0u;
        request->dst = out;
    } else {
        request->out_items = request->num_jobs;
        request->first_ordinary = request->start % row_bytes != 0;
        request->num_ordinary =
            static_cast<uint64_t>(std::max<int64_t>(0, request->end / row_bytes - request->first_row - request->first_ordinary));
        request->dst = out + (request->first_row * row_bytes - request->start);
    }
    if (request->packed && !table.bases) request->num_ordinary = 0;
    request->copies_vectors = reinterpret_cast<uintptr_t>(request->dst) % 16 == 0 && pitch % 16 == 0 && row_bytes % 16 == 0;
}

static ibp_status gather(const ibp_table *table, Request request, uint8_t *out, ibp_fault *fault, int max_sms, ibp_stream stream)
{
    if (fault == nullptr || max_sms < 0) return IBP_INVALID_ARGUMENT;
    describe_rows(*table, out, &request);
    const ibp_codebook &cb = table->codebook;
    return with_decoder(cb, request.copies_vectors, [&](auto tag) {
        using Decoder = typename decltype(tag)::type;
        using G = typename Decoder::Group;
        const auto kernel = gather_items<Decoder>;
        const uint32_t group_bytes = (row_stage_bytes(cb.row_bytes) + Decoder::scratch_bytes(cb) + 15u) / 16u * 16u;
        Launch launch;
        const ibp_status status =
            plan_groups(reinterpret_cast<const void *>(kernel), Decoder::kMostThreads, Decoder::block_bytes(cb), group_bytes,
                        G::kThreads, request.num_jobs, max_sms, &launch);
        if (status != IBP_OK) return status;
        return launch_kernel(kernel, launch, stream, *table, request, group_bytes, out, fault);
    });
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_gather_items(const ibp_table *table, const ibp_ids *ids, uint8_t *out, ibp_fault *fault, int max_sms,
                                            ibp_stream stream)
{
    if (ids->count == 0 || table->item_bytes == 0) return IBP_OK;
    ibp::Request request{};
    request.ids = *ids;
    request.rows_per_item = ibp::rows_an_item(table->item_bytes, table->codebook.row_bytes);
    if (ids->count > ibp::kMostJobs / request.rows_per_item) return IBP_INVALID_ARGUMENT;
    request.num_jobs = static_cast<uint32_t>(ids->count * request.rows_per_item);
    request.by_id = true;
    request.whole_rows = table->item_bytes % table->codebook.row_bytes == 0;
    return ibp::gather(table, request, out, fault, max_sms, stream);
}

extern "C" ibp_status ibp_cuda_decode_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out, ibp_fault *fault,
                                            int max_sms, ibp_stream stream)
{
    if (start < 0 || start > end || end > table->num_items * table->item_bytes) return IBP_INVALID_ARGUMENT;
    if (start == end) return IBP_OK;
    const int64_t row_bytes = table->codebook.row_bytes;
    ibp::Request request{};
    request.start = start, request.end = end;
    request.rows_per_item = 1;
    request.first_row = start / row_bytes;
    const int64_t num_rows = (end - 1) / row_bytes - request.first_row + 1;
    if (num_rows > ibp::kMostJobs) return IBP_INVALID_ARGUMENT;
    request.num_jobs = static_cast<uint32_t>(num_rows);
    return ibp::gather(table, request, out, fault, max_sms, stream);
}
