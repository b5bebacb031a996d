// gather.cu - items fetched and rebuilt by the GPU, from wherever the table's bytes are (the paper's sections 4.3 and 4.4).
//
// A group of threads takes a row a job, and works on four jobs at once so that no latency is waited for: it decodes one, has the bytes of the next on
// their way to registers, the place of the one after that, and the id of the fourth.
#include "decoders.cuh"

namespace ibp {

constexpr int64_t kMostJobs = 1ll << 31; // of a launch: job numbers have 32 bits

// The items at ids, or, where there are none, the one "item" of the bytes [start, end).
struct Request {
    ibp_ids ids;
    int64_t rows_per_item, start, end;
    int64_t first_row; // of the bytes
    uint32_t num_jobs;
    bool by_id, whole_rows; // whole_rows: items begin and end with rows
};

// Rows that an item can touch.
static int64_t rows_an_item(int64_t item_bytes, int64_t row_bytes)
{
    if (row_bytes % item_bytes == 0) return 1;
    if (item_bytes % row_bytes == 0) return item_bytes / row_bytes;
    return (item_bytes - 2) / row_bytes + 2;
}

// What a job is asked for: the id and where its item goes.
struct Ticket {
    int64_t id;
    uint32_t position;
};

// A row of an item: the bytes [low, high) of the row go to dst. There is none where dst is NULL.
struct Job {
    int64_t row;
    Window window;
    bool in_range;
};

// The index entries of a row, as loaded; neighbours: lengths of the rows of its group of 32, if it begins in overflow.
template <class G> struct IndexEntries {
    uint64_t base;
    uint16_t length, neighbours[G::kPerWarp];
};

// Where a row's bytes are (FORMAT.md section 3): first in one piece, then, if neither in_slot nor in_overflow is 0, in another.
struct Place {
    const uint8_t *first, *overflow;
    uint32_t in_slot, in_overflow, valid;
    bool raw, in_bounds;
};

// What is done with the vectors of a row that are on their way: nothing, staged and decoded, written out as they are; or the row is none of the
// simple ones (whole, in one piece, all vectors inside its array), and is fetched when its turn comes.
enum Kind : uint32_t { kNothing, kCoded, kRaw, kOther };
struct Arrival {
    uint8_t *dst;
    const uint8_t *from; // aligned to 16 bytes
    uint32_t num_bytes;  // of the row as stored
    uint32_t shift;      // of its first byte after `from`
    Kind kind;
};

template <class Decoder> struct Fetch {
    using G = typename Decoder::Group;
    static constexpr uint32_t kVectors = Decoder::kVectors; // of a thread on their way
    static constexpr bool kStages = !std::is_same<Decoder, RawDecoder>::value;

    const ibp_table &table;
    const Request &request;
    uint8_t *const out;
    const Stage stage;

    // ---- ids and rows ----

    __device__ __forceinline__ uint32_t item_of(uint32_t job) const
    {
        if (!request.by_id) return 0;
        return request.rows_per_item == 1 ? job : job / static_cast<uint32_t>(request.rows_per_item);
    }

    __device__ __forceinline__ Ticket load_ticket(uint32_t job) const
    {
        if (!request.by_id || job >= request.num_jobs) return {0, 0};
        const uint32_t k = item_of(job);
        const int64_t id = request.ids.id_bytes == 8 ? __ldg(static_cast<const long long *>(request.ids.data) + k)
                                                     : __ldg(static_cast<const int *>(request.ids.data) + k);
        const uint32_t position = request.ids.positions ? __ldg(request.ids.positions + k) : k;
        return {id, position};
    }

    __device__ __forceinline__ Job job_of(uint32_t job, const Ticket &ticket) const
    {
        Job found{};
        if (job >= request.num_jobs) return found;
        const int64_t row_bytes = table.codebook.row_bytes, part = job - item_of(job) * request.rows_per_item;
        int64_t start = request.start, end = request.end;
        found.in_range = true;
        if (request.by_id) {
            found.in_range = ticket.id >= 0 && ticket.id < table.num_items;
            start = (found.in_range ? ticket.id : 0) * table.item_bytes, end = start + table.item_bytes;
        }
        if (request.whole_rows)
            found.row = (found.in_range ? ticket.id : 0) * request.rows_per_item + part;
        else
            found.row = (request.by_id ? start / row_bytes : request.first_row) + part;
        const int64_t row_start = found.row * row_bytes;
        if (row_start >= end) return found;
        if (request.ids.positions && ticket.position >= request.ids.out_items) return found;
        found.window.low = static_cast<uint32_t>(max(start - row_start, int64_t{0}));
        found.window.high = static_cast<uint32_t>(min(end - row_start, row_bytes));
        found.window.dst = out + ticket.position * table.item_bytes + (row_start + found.window.low - start);
        return found;
    }

    // ---- places ----

    __device__ __forceinline__ void load_neighbours(int64_t row, IndexEntries<G> &entries) const
    {
        entries.base = __ldg(table.bases + row / kWarp);
#pragma unroll
        for (uint32_t i = 0; i < G::kPerWarp; i++) {
            const uint32_t lane = i * G::kLanes + G::lane();
            entries.neighbours[i] = table.lengths && lane < row % kWarp ? __ldg(table.lengths + (row / kWarp * kWarp + lane)) : uint16_t{0};
        }
    }
    __device__ __forceinline__ IndexEntries<G> look_up(const Job &job) const
    {
        IndexEntries<G> entries{};
        if (!job.window.dst || !table.lengths) return entries;
        entries.length = __ldg(table.lengths + job.row);
        if (table.slot_bytes == 0u && table.bases) load_neighbours(job.row, entries);
        return entries;
    }

    __device__ __forceinline__ Place locate(const Job &job, IndexEntries<G> &entries) const
    {
        Place place{};
        const uint32_t slot_bytes = table.slot_bytes, row_bytes = table.codebook.row_bytes;
        if (job.window.dst && job.in_range) {
            const uint64_t slot_start = static_cast<uint64_t>(job.row) * slot_bytes - table.slots_start, slots_end = static_cast<uint64_t>(table.slots_bytes);
            place.valid = ibp_valid_bytes(table.num_items * table.item_bytes, row_bytes, job.row);
            place.raw = entries.length == 0;
            const uint32_t stored = place.raw ? place.valid : entries.length;
            place.in_overflow = ibp_overflow_part(stored, slot_bytes);
            place.in_slot = stored - place.in_overflow;
            place.in_bounds = stored <= place.valid && (place.in_slot == 0 || (slot_start <= slots_end && place.in_slot <= slots_end - slot_start));
            place.in_bounds = place.in_bounds && (place.in_overflow == 0 || table.bases);
            place.first = table.slots + slot_start;
        }
        const bool overflows = place.in_bounds && place.in_overflow != 0;
        if (!__any_sync(kAllLanes, overflows)) return place;
        if (overflows && slot_bytes != 0u) load_neighbours(job.row, entries);
        uint32_t room = 0;
#pragma unroll
        for (uint32_t i = 0; i < G::kPerWarp; i++)
            if (overflows && i * G::kLanes + G::lane() < job.row % kWarp)
                room += ibp_overflow_room(ibp_overflow_part(entries.neighbours[i] ? entries.neighbours[i] : row_bytes, slot_bytes), slot_bytes);
        const uint64_t before = G::sum(room), start = entries.base - table.overflow_start, end = static_cast<uint64_t>(table.overflow_bytes);
        if (!overflows) return place;
        place.overflow = table.overflow + start + before;
        place.in_bounds = start <= end && before + place.in_overflow <= end - start;
        if (place.in_slot == 0) place.first = place.overflow;
        return place;
    }

    // ---- simple rows: whole, in one piece, every vector inside its array ----

    __device__ __forceinline__ Arrival send_for(const Job &job, IndexEntries<G> entries, uint4 (&vectors)[kVectors]) const
    {
        const Place place = locate(job, entries);
        Arrival row{};
        row.dst = job.window.dst;
        row.num_bytes = place.in_slot + place.in_overflow;
        row.shift = reinterpret_cast<uintptr_t>(place.first) % 16u;
        row.from = place.first - row.shift;
        if (!job.window.dst) return row;
        row.kind = kOther;
        const uint8_t *const begin = place.in_slot ? table.slots : table.overflow,
                      *const end = begin + (place.in_slot ? table.slots_bytes : table.overflow_bytes);
        const uint32_t num_vectors = vectors_of(row);
        const bool whole = place.in_bounds && job.window.low == 0u && job.window.high == table.codebook.row_bytes && (place.in_slot == 0 || place.in_overflow == 0);
        if (!whole || row.from < begin || row.from + 16u * num_vectors > end) return row;
        if (!place.raw)
            row.kind = kCoded;
        else if (row.shift == 0u && row.num_bytes % 16u == 0u && aligned(row.dst, 16))
            row.kind = kRaw;
        else
            return row;
        const uint4 *const from = reinterpret_cast<const uint4 *>(row.from) + G::rank();
#pragma unroll
        for (uint32_t k = 0; k < kVectors; k++)
            if (k * G::kThreads + G::rank() < num_vectors) vectors[k] = from[k * G::kThreads];
        return row;
    }
    static __device__ __forceinline__ uint32_t vectors_of(const Arrival &row) { return (row.shift + row.num_bytes + 15u) / 16u; }

    // Puts the vectors that were on their way where they belong, and fetches those for which there was no room.
    __device__ __forceinline__ void receive(const Arrival &row, const uint4 (&vectors)[kVectors]) const
    {
        if (row.kind != kCoded && row.kind != kRaw) return;
        const uint32_t num_vectors = vectors_of(row);
        const uint4 *const from = reinterpret_cast<const uint4 *>(row.from) + G::rank();
        if (row.kind == kRaw)
            receive_in(reinterpret_cast<uint4 *>(row.dst) + G::rank(), from, num_vectors, vectors);
        else
            receive_in(reinterpret_cast<uint4 *>(stage.words) + G::rank(), from, num_vectors, vectors);
    }
    static __device__ __forceinline__ void receive_in(uint4 *to, const uint4 *from, uint32_t num_vectors, const uint4 (&vectors)[kVectors])
    {
#pragma unroll
        for (uint32_t k = 0; k < kVectors; k++)
            if (k * G::kThreads + G::rank() < num_vectors) to[k * G::kThreads] = vectors[k];
#pragma unroll 4
        for (uint32_t i = kVectors * G::kThreads; i + G::rank() < num_vectors; i += G::kThreads) to[i] = from[i];
    }

    // ---- any row ----

    // Fetches a row of any kind, now; those that are coded are staged, to be decoded by the caller.
    __device__ __forceinline__ void fetch_other(uint32_t number, bool mine, Arrival &row, Window &window, ibp_fault *fault) const
    {
        const Ticket ticket = mine ? load_ticket(number) : Ticket{};
        const Job job = mine ? job_of(number, ticket) : Job{};
        IndexEntries<G> entries = look_up(job);
        const Place place = locate(job, entries);
        if (!mine) return;
        window = job.window;
        row.kind = kNothing;
        if (!place.in_bounds) {
            refuse(number, job.in_range ? IBP_CORRUPT_ROW : IBP_INDEX_OUT_OF_RANGE, window, fault);
        } else if (place.raw) {
            const uint32_t split = min(max(place.in_slot, window.low), window.high);
            if (split > window.low) group_copy<G>(window.dst, place.first + window.low, split - window.low);
            if (window.high > split) group_copy<G>(window.dst + (split - window.low), place.overflow + (split - place.in_slot), window.high - split);
        } else {
            row.kind = kCoded;
            row.shift = 0;
            row.num_bytes = place.in_slot + place.in_overflow;
            group_copy<G>(stage.bytes(), place.first, place.in_slot);
            group_copy<G>(stage.bytes() + place.in_slot, place.overflow, place.in_overflow);
        }
    }

    __device__ __forceinline__ void refuse(uint32_t number, ibp_status status, const Window &window, ibp_fault *fault) const
    {
        group_zero<G>(window.dst, window.high - window.low);
        if (G::rank() != 0) return;
        const Ticket ticket = load_ticket(number);
        const int64_t row = request.first_row + number;
        record_fault(fault, status, request.by_id ? item_of(number) : row, request.by_id ? ticket.id : row);
    }

    // Decodes what has been received. Called by all lanes of a warp together.
    __device__ __forceinline__ void finish(const Decoder &decoder, uint32_t number, Arrival row, ibp_fault *fault) const
    {
        Window window{row.dst, 0, table.codebook.row_bytes};
        if (__any_sync(kAllLanes, row.kind == kOther)) fetch_other(number, row.kind == kOther, row, window, fault);
        if (!kStages || !__any_sync(kAllLanes, row.kind == kCoded)) return;
        G::sync();
        bool coded = row.kind == kCoded, good = true;
        uint32_t cluster = 0, start = coded ? row.shift : 0u, num_bytes = row.num_bytes;
        if (table.codebook.num_clusters > 1u) {
            cluster = stage.bits_at(8u * start) & 0xffu;
            good = !coded || (num_bytes >= 1u && cluster < table.codebook.num_clusters);
            coded = coded && good;
            if (!coded) cluster = 0;
            start += 1u, num_bytes -= 1u;
        }
        good = decoder.decode(cluster, coded, stage, 8u * start, num_bytes, window) && good;
        if (!good) refuse(number, IBP_CORRUPT_ROW, window, fault);
        G::sync(); // the stage is free for the next row
    }
};

// Bound by the link from pinned memory, by instruction issue on few SMs, by device memory or instruction issue otherwise.
template <class Decoder>
__global__ void __launch_bounds__(Decoder::kMostThreads, 1)
    gather_items(const __grid_constant__ ibp_table table, const __grid_constant__ Request request, const uint32_t group_bytes, uint8_t *out, ibp_fault *fault)
{
    using F = Fetch<Decoder>;
    using G = typename Decoder::Group;
    extern __shared__ uint4 shared[];
    uint8_t *const mine = reinterpret_cast<uint8_t *>(shared) + G::in_block() * group_bytes;
    const uint32_t staged = F::kStages ? row_stage_bytes(table.codebook.row_bytes) : 0u;
    const Decoder decoder(table.codebook, mine + staged);
    const F fetch{table, request, out, {reinterpret_cast<uint32_t *>(mine), staged / 4u - 2u}};
    __syncthreads();

    // A warp, or a group of several, takes G::kPerWarp jobs at a time; blocks in turn, so that few jobs spread over all of them.
    const uint32_t teams = blockDim.x / (G::kThreads * G::kPerWarp), team = threadIdx.x / (G::kThreads * G::kPerWarp);
    const uint32_t step = gridDim.x * teams * G::kPerWarp, in_warp = G::kPerWarp > 1 ? G::in_block() % G::kPerWarp : 0;
    uint32_t job = (blockIdx.x + gridDim.x * team) * G::kPerWarp + in_warp;
    uint4 vectors[F::kVectors];
    Ticket next = fetch.load_ticket(job);
    IndexEntries<G> entries = fetch.look_up(fetch.job_of(job, next));
    Arrival arriving = fetch.send_for(fetch.job_of(job, next), entries, vectors);
    next = fetch.load_ticket(job + step);
    entries = fetch.look_up(fetch.job_of(job + step, next));
    Ticket after = fetch.load_ticket(job + 2 * step);
    for (; job - in_warp < request.num_jobs; job += step) {
        const Arrival row = arriving;
        fetch.receive(row, vectors);
        arriving = fetch.send_for(fetch.job_of(job + step, next), entries, vectors);
        next = after;
        entries = fetch.look_up(fetch.job_of(job + 2 * step, next));
        after = fetch.load_ticket(job + 3 * step);
        fetch.finish(decoder, job, row, fault);
    }
}

// Vector stores need every row's part of the output to start at a multiple of 16 bytes.
static ibp_status gather(const ibp_table *table, const Request &request, uint8_t *out, ibp_fault *fault, int max_sms, ibp_stream stream)
{
    if (fault == nullptr || max_sms < 0) return IBP_INVALID_ARGUMENT;
    const ibp_codebook &cb = table->codebook;
    const int64_t pitch = request.by_id ? table->item_bytes : request.start;
    const bool by_16 = reinterpret_cast<uintptr_t>(out) % 16 == 0 && pitch % 16 == 0 && cb.row_bytes % 16 == 0;
    return with_decoder(cb, by_16, [&](auto tag) {
        using Decoder = typename decltype(tag)::type;
        using G = typename Decoder::Group;
        const auto kernel = gather_items<Decoder>;
        const uint32_t group_bytes = Fetch<Decoder>::kStages ? row_stage_bytes(cb.row_bytes) + Decoder::scratch_bytes(cb) : 0u;
        Launch launch;
        const ibp_status status =
            plan_groups(reinterpret_cast<const void *>(kernel), Decoder::kMostThreads, (group_bytes + 15u) / 16u * 16u, G::kThreads, request.num_jobs, max_sms, &launch);
        if (status != IBP_OK) return status;
        kernel<<<launch.blocks, launch.threads, launch.shared_bytes, stream>>>(*table, request, (group_bytes + 15u) / 16u * 16u, out, fault);
        return check_cuda(cudaGetLastError());
    });
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_gather_items(const ibp_table *table, const ibp_ids *ids, uint8_t *out, ibp_fault *fault, int max_sms,
                                            ibp_stream stream)
{
    if (ids->count == 0 || table->item_bytes == 0) return IBP_OK;
    const int64_t rows_per_item = ibp::rows_an_item(table->item_bytes, table->codebook.row_bytes), num_jobs = ids->count * rows_per_item;
    if (num_jobs > ibp::kMostJobs) return IBP_INVALID_ARGUMENT;
    const bool whole_rows = table->item_bytes % table->codebook.row_bytes == 0;
    return ibp::gather(table, {*ids, rows_per_item, 0, 0, 0, static_cast<uint32_t>(num_jobs), true, whole_rows}, out, fault, max_sms, stream);
}

extern "C" ibp_status ibp_cuda_decode_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out, ibp_fault *fault,
                                            int max_sms, ibp_stream stream)
{
    if (start < 0 || start > end || end > table->num_items * table->item_bytes) return IBP_INVALID_ARGUMENT;
    if (start == end) return IBP_OK;
    const int64_t row_bytes = table->codebook.row_bytes, first_row = start / row_bytes, num_rows = (end - 1) / row_bytes - first_row + 1;
    if (num_rows > ibp::kMostJobs) return IBP_INVALID_ARGUMENT;
    return ibp::gather(table, {{}, 1, start, end, first_row, static_cast<uint32_t>(num_rows), false, false}, out, fault, max_sms, stream);
}
