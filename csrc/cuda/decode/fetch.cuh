// fetch.cuh - fetches the stored bytes of rows from the table's memory to shared memory, where a decoder reads them, or
// to the output.
//
// A job is one row, which one group of threads fetches and decodes. A vector is 16 bytes. A stage is a group's buffer
// for a stored row in shared memory. At first a warp looks up its first rows and prefetches one row for each group.
// Then it repeats these steps:
//
// 1. The vectors that the last prefetch has loaded into registers are stored in the stage, or in the output if the row
//    is raw and both the row and the output are aligned (receive). Vectors for which there was no register are fetched
//    now.
// 2. If all rows that were looked up have been fetched, the lanes look up the warp's next rows together, one row each
//    (look_up).
// 3. The group issues loads of its next row's bytes into registers (prefetch). These are the bytes in the slot and the
//    bytes in overflow, which may be in pinned host memory. Groups that share a warp load their rows together.
// 4. While these loads are under way, the group decodes the row that was stored in step 1 (finish).
//
// A regular row is loaded as vectors of 16 bytes, whatever its alignment:
//
//     | ... shift | stored bytes of the row            | ... |      vectors as loaded, and as they lie in the stage
//     ^ multiple of 16                                       ^ multiple of 16
//
// Irregular rows are not prefetched. A separate function, fetch_irregular, fetches such a row in step 4, before it is
// decoded. A row is irregular if its id or its position in the output is out of range, if it is a default row, if only
// a part of it is wanted, if its vectors would reach outside the table's memory, or if it has an overflow part and
// either its slot or this part is not aligned to 16 bytes.
#ifndef IBP_FETCH_CUH
#define IBP_FETCH_CUH

#include "../../core/cache.h"
#include "../../core/ids.h"
#include "decoder.cuh"
#include "find_row.cuh"
#include "decode_request.h"

namespace ibp {

// The row of one job: row `part` of the item with the id `id`, and the position in the output to which the item goes.
struct Ticket {
    int64_t id;
    uint32_t position, part;
};

__device__ __forceinline__ Ticket load_ticket(const Request &request, uint32_t number)
{
    if (!request.by_id) return {number, number, 0};
    const auto rows_per_item = static_cast<uint32_t>(request.rows_per_item);
    const uint32_t item = rows_per_item == 1u ? number : number / rows_per_item;
    int64_t id = item;
    if (request.ids.id_bytes != 0)
        id = request.ids.id_bytes == 8 ? __ldg(static_cast<const long long *>(request.ids.data) + item)
                                       : __ldg(static_cast<const int *>(request.ids.data) + item);
    id = ibp_item_of_id(&request.ids, id);
    return {id, request.ids.positions ? __ldg(request.ids.positions + item) : item, number - item * rows_per_item};
}

// Returns the byte offset at which a position of a strided output begins, as ibp_offset_of_position does, but with
// 32-bit divisions. Not inlined, because inlined code would take registers in the loop over rows, so that other values
// would be spilled.
static __device__ __noinline__ int64_t offset_in_strides(const ibp_ids &ids, uint32_t position)
{
    int64_t offset = 0;
#pragma unroll 1
    for (uint32_t d = ids.num_dims - 1u; d > 0u; d--) {
        const auto size = static_cast<uint64_t>(ids.sizes[d]);
        const uint32_t rest = size >> 32 != 0u ? 0u : position / static_cast<uint32_t>(size);
        offset += static_cast<int64_t>(position - rest * static_cast<uint32_t>(size)) * ids.strides[d];
        position = rest;
    }
    return offset + position * ids.strides[0];
}
__device__ __forceinline__ uint8_t *memory_of_position(const ibp_ids &ids, uint8_t *out, uint32_t position,
                                                       int64_t item_bytes)
{
    if (ids.addresses != nullptr) return reinterpret_cast<uint8_t *>(ids.addresses[position]);
    return out + (ids.num_dims == 0u ? position * item_bytes : offset_in_strides(ids, position));
}

// Returns the byte of overflow at which a row of a packed table begins. If the row's base lies past the end of
// overflow, the result does, too.
__device__ __forceinline__ uint64_t packed_start(const ibp_table &table, int64_t row)
{
    const uint64_t base = __ldg(table.bases + ibp_base_of_row(&table, row)) - table.overflow_start;
    const uint32_t rooms = rooms_before(table, row);
    return base <= static_cast<uint64_t>(table.overflow_bytes) ? base + rooms : ~uint64_t{0};
}

// ---- irregular rows ----

// The kinds of rows. The kinds whose vectors go to the stage are odd numbers.
//
//     kNothing      there is no row, or the row has been written to the output already
//     kCoded        the row is coded, and its vectors go to the stage
//     kRaw          the row is raw, and its vectors go to the output
//     kStagedRaw    the row is raw, and its vectors go to the stage first
//     kIrregular    the row is irregular and has not been fetched yet
//     kRefused      the id is out of range or the row is corrupt. This number is odd, too, but the row has no vectors
enum Kind : uint32_t { kNothing, kCoded, kRaw, kStagedRaw, kIrregular, kRefused };

// The result of fetch_irregular. A coded row (kCoded) is in the stage, and `window` says which of its bytes are wanted.
// Any other row has been written to the output (kNothing), or is refused (kRefused).
struct Fetched {
    Window window;
    uint32_t num_bytes; // size of the row as stored
    Kind kind;
};

struct Job {
    Ticket ticket;
    int64_t row;
    Window window; // dst is NULL if nothing is to be written
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
        // The item touches fewer rows than rows_per_item, so this job has no row, and is not refused. If the id is out
        // of range, the item's first job is.
        job.in_range = true;
        return job;
    }
    job.window.low = static_cast<uint32_t>(max(start - row_start, int64_t{0}));
    job.window.high = static_cast<uint32_t>(min(end - row_start, row_bytes));
    uint8_t *const item =
        request.by_id ? memory_of_position(request.ids, out, job.ticket.position, table.item_bytes) : out;
    job.window.dst = item + (row_start + job.window.low - start);
    return job;
}

// If `refused`, writes zeros to the output of a row, and records the fault. Lanes whose row is not refused must call
// this, too: if only some lanes called it, the compiler would add code that checks before every shuffle whether the
// lanes have converged.
template <class G>
static __device__ __noinline__ void refuse(const ibp_table &table, const Request &request, uint8_t *out,
                                           uint32_t number, bool refused, ibp_fault *fault)
{
    if (!refused) return;
    const Job job = job_of(table, request, out, number);
    if (job.window.dst) group_zero<G>(job.window.dst, job.window.high - job.window.low);
    if (G::rank() != 0) return;
    const ibp_status status = job.in_range ? IBP_CORRUPT_ROW : IBP_INDEX_OUT_OF_RANGE;
    if (request.by_id)
        record_fault(fault, status, request.first_position + job.ticket.position, job.ticket.id);
    else
        record_fault(fault, status, job.row, job.row);
}

// Returns the cache's entry for a job's row; 0 if there is no cache.
__device__ __forceinline__ uint64_t entry_of_job(const Request &request, uint32_t number)
{
    return request.cache.entries != nullptr ? __ldg(request.cache.entries + number) : 0u;
}

// Finds the stored bytes of a job's row. slots: receives the address of the table's slots; if the row is in the cache,
// the address of its slab. A row in the cache has no overflow part. Returns false if the row is corrupt.
static __device__ bool find_source(const ibp_table &table, const Request &request, uint32_t number, int64_t row,
                                   ibp_row_place *place, const uint8_t **slots)
{
    const uint64_t cached = entry_of_job(request, number);
    if (ibp_is_present(cached))
        return ibp_place_in_slab(&request.cache, cached, table.codebook.row_bytes, place, slots);
    *slots = table.slots;
    return find_row(table, row, place);
}

// Fetches the row of a job, which may be regular or irregular. A coded row goes to the byte `stage` of shared memory,
// and any other row goes to the output.
template <class G>
static __device__ __noinline__ Fetched fetch_irregular(const ibp_table &table, const Request &request, uint8_t *out,
                                                       uint32_t stage, uint32_t number)
{
    Fetched fetched{{nullptr, 0, 0}, 0, kNothing};
    const Job job = job_of(table, request, out, number);
    ibp_row_place place{};
    bool found = job.in_range;
    const uint8_t *slots = nullptr;
    if (job.window.dst && job.in_range) found = find_source(table, request, number, job.row, &place, &slots);
    const uint8_t *const slot = slots + place.slot_start, *const overflow = table.overflow + place.overflow_start;
    if (!found) {
        fetched.kind = kRefused;
    } else if (job.window.dst && place.is_default) {
        fill_default<G>(table.codebook, job.window.dst, job.window.low, job.window.high);
    } else if (job.window.dst && place.raw) {
        const uint32_t low = job.window.low, high = job.window.high, split = min(max(place.in_slot, low), high);
        if (split > low) group_copy<G>(job.window.dst, slot + low, split - low);
        if (high > split)
            group_copy<G>(job.window.dst + (split - low), overflow + (split - place.in_slot), high - split);
    } else if (job.window.dst) {
        fetched = {job.window, place.in_slot + place.in_overflow, kCoded};
        group_copy<G>(shared_bytes() + stage, slot, place.in_slot);
        group_copy<G>(shared_bytes() + stage + place.in_slot, overflow, place.in_overflow);
    }
    return fetched;
}

// ---- regular rows ----

// A row that a lane has looked up. `what` packs these fields:
//
//     bits 0 to 15    number of vectors of 16 bytes that hold the row; 0 if the row is irregular, or there is no row
//     bits 16 to 19   shift: number of bytes in the first vector before the row begins
//     bits 20 to 23   number of bytes in the last vector after the row ends
//     bits 24 to 26   Kind
//     bit  27         kHasRest
//
// Vector k of the row is at from + k if the vector lies in the slot, and at behind + k if it lies in overflow.
struct Entry {
    const uint4 *from, *behind;
    uint8_t *dst;
    uint32_t what;
};
struct Row {
    uint8_t *dst;
    uint32_t what;

    __device__ __forceinline__ uint32_t shift() const { return what >> 16 & 15u; }
    __device__ __forceinline__ uint32_t num_bytes() const
    {
        return 16u * (what & 0xffffu) - shift() - (what >> 20 & 15u);
    }
    __device__ __forceinline__ Kind kind() const { return static_cast<Kind>(what >> 24 & 7u); }
};
constexpr uint32_t kHasRest = 1u << 27; // bit of `what`: the row's last vectors lie in overflow
static_assert(IBP_MAX_ROW_BYTES / 16u + 1u < 1u << 16,
              "the number of a row's vectors must fit in 16 bits of Entry::what");
__device__ __forceinline__ uint32_t what_of(uint32_t num_bytes, uint32_t shift, Kind kind)
{
    const uint32_t num_vectors = (shift + num_bytes + 15u) / 16u;
    return num_vectors | shift << 16 | (16u * num_vectors - shift - num_bytes) << 20 | kind << 24;
}
__device__ __forceinline__ uint32_t vectors_in(uint32_t what) { return what & 0xffffu; }
__device__ __forceinline__ bool is_raw(uint32_t what) { return (what >> 24 & 7u) == kRaw; }
__device__ __forceinline__ bool goes_to_stage(uint32_t what) { return what >> 24 & 1u; }

// Returns the address of the row's overflow part; NULL if the row has none, or if the part does not lie in whole
// aligned vectors of overflow.
__device__ __forceinline__ const uint8_t *find_rest(const ibp_table &table, int64_t row, uint32_t length)
{
    ibp_row_place place{};
    if (!find_row(table, row, length, &place) || place.in_overflow == 0u) return nullptr;
    const uint64_t start = place.overflow_start, address = reinterpret_cast<uintptr_t>(table.overflow) + start;
    const bool is_whole =
        address % 16u == 0u && ibp_part_in_bounds(start, (place.in_overflow + 15u) / 16u * 16u, table.overflow_bytes);
    return is_whole ? table.overflow + start : nullptr;
}

__device__ __forceinline__ Entry look_up(const ibp_table &table, const Request &request, uint32_t number)
{
    if (number >= request.num_jobs) return {nullptr, nullptr, nullptr, what_of(0, 0, kNothing)};
    Entry entry{nullptr, nullptr, nullptr, what_of(0, 0, kIrregular)};
    const Ticket ticket = load_ticket(request, number);
    if (static_cast<uint64_t>(ticket.id - request.first_regular) >= request.num_regular ||
        ticket.position >= request.out_items)
        return entry;
    const auto rows_per_item = static_cast<uint32_t>(request.rows_per_item);
    const int64_t row = request.first_row + ticket.id * rows_per_item + ticket.part;
    const uint32_t row_bytes = table.codebook.row_bytes;
    const uint64_t cached = entry_of_job(request, number);
    const uint8_t *rows = request.rows;
    int64_t rows_bytes = request.rows_bytes;
    uint32_t length, most_stored = request.most_stored;
    uint64_t start;
    if (ibp_is_present(cached)) {
        const ibp_slab &slab = request.cache.slabs[ibp_slab_of_entry(cached)];
        rows = slab.bytes, rows_bytes = slab.num_bytes, most_stored = row_bytes;
        length = ibp_length_of_entry(cached), start = ibp_offset_in_slab(cached);
    } else {
        const uint64_t slot = request.staged ? number : static_cast<uint64_t>(row);
        length = length_of_row(table.lengths, row);
        start = request.packed ? packed_start(table, row) : slot * table.slot_bytes - table.slots_start;
    }
    const uint32_t stored = length ? length : row_bytes;
    if (length == IBP_DEFAULT_LENGTH(row_bytes)) return entry;
    const uint32_t shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(rows) + start) % 16u,
                   in_slot = ibp_min_u32(stored, most_stored), num_vectors = (shift + in_slot + 15u) / 16u;
    const int64_t before = static_cast<int64_t>(start) - shift;
    if (before < 0 || before > rows_bytes - 16 * static_cast<int64_t>(num_vectors)) return entry;
    entry.from = entry.behind = reinterpret_cast<const uint4 *>(rows + before);
    if (stored > in_slot) { // the slot is full, so it ends with a whole vector
        const uint8_t *const rest =
            in_slot == table.slot_bytes && shift == 0u ? find_rest(table, row, length) : nullptr;
        if (rest == nullptr) return entry;
        entry.behind = reinterpret_cast<const uint4 *>(rest - in_slot);
    }
    const Kind kind = length ? kCoded : request.copies_vectors && shift == 0u ? kRaw : kStagedRaw;
    const int64_t item_bytes = static_cast<int64_t>(rows_per_item) * row_bytes;
    entry.dst = memory_of_position(request.ids, request.dst, ticket.position, item_bytes) +
                static_cast<int64_t>(ticket.part) * row_bytes;
    entry.what = what_of(stored, shift, kind) | (stored > in_slot ? kHasRest : 0u);
    return entry;
}

// Fetches a group's rows and has a decoder decode them. TO_OUT: all bytes of the group's rows are wanted, and each row
// goes to `out`.
template <class Decoder, bool TO_OUT = false> struct Fetch {
    using G = typename Decoder::Group;
    // Number of vectors that a thread loads ahead.
    static constexpr uint32_t kVectors = Decoder::kVectors + Decoder::kOwnVectors;

    const ibp_table &table;
    const Request &request;
    uint8_t *const out;
    const Stage stage;
    // first_stage: the shared byte at which the first group's memory begins. group_bytes: size in bytes of each group's
    // shared memory.
    const uint32_t first_stage, group_bytes;

    // Returns the row that lane i has looked up.
    __device__ __forceinline__ Row row_of(const Entry &entry, uint32_t i) const
    {
        return {TO_OUT ? out : of_lane(entry.dst, i), __shfl_sync(kAllLanes, entry.what, i)};
    }
    template <class Pointer> static __device__ __forceinline__ Pointer of_lane(Pointer pointer, uint32_t i)
    {
        return reinterpret_cast<Pointer>(
            __shfl_sync(kAllLanes, static_cast<uint64_t>(reinterpret_cast<uintptr_t>(pointer)), i));
    }

    // If several groups share a warp, the warp loads the vectors of its rows row by row. Consecutive lanes load
    // consecutive vectors, even vectors that other lanes will decode, because wide requests use the link to host memory
    // best. The k-th vector that a lane loads is vector vector_of(k) of the warp's row row_in_warp(k). The exception is
    // a lane's last kOwnVectors vectors, which belong to the row that the lane itself will decode.
    static constexpr uint32_t kShared = Decoder::kVectors * G::kThreads, kRowVectors = kVectors * G::kThreads;
    static __device__ __forceinline__ uint32_t row_in_warp(uint32_t k)
    {
        return G::kPerWarp == 1 ? 0 : k >= Decoder::kVectors ? in_warp() : (k * kWarp + lane_id()) / kShared;
    }
    static __device__ __forceinline__ uint32_t vector_of(uint32_t k)
    {
        return G::kPerWarp == 1 || k >= Decoder::kVectors ? k * G::kThreads + G::rank()
                                                          : (k * kWarp + lane_id()) % kShared;
    }
    // The vectors of a row, in its slot and in overflow, in the order in which they are fetched. If all vectors of the
    // row can be prefetched, they are fetched in the order of the row. Otherwise the vectors in overflow are fetched
    // first, because they may lie in host memory.
    struct Pieces {
        const uint4 *first, *then;
        uint32_t num_first, skipped; // skipped: number of the row's vectors before `first`

        // place_of(k) returns the address of the k-th vector to fetch; place(k) returns its index in the row.
        __device__ __forceinline__ const uint4 *place_of(uint32_t k) const
        {
            return (k < num_first ? first : then) + k;
        }
        __device__ __forceinline__ uint32_t place(uint32_t k) const
        {
            return skipped == 0u ? k : k < num_first ? k + skipped : k - num_first;
        }
    };
    __device__ __forceinline__ Pieces pieces_of(const Entry &entry, uint32_t i, uint32_t num_vectors) const
    {
        const uint4 *const from = of_lane(entry.from, i), *const behind = of_lane(entry.behind, i);
        const uint32_t in_slot = table.slot_bytes / 16u;
        if (G::kPerWarp > 1 || num_vectors <= kRowVectors || behind == from) return {from, behind, in_slot, 0};
        const uint32_t num_behind = num_vectors - in_slot;
        return {behind + in_slot, from - num_behind, num_behind, in_slot};
    }

    // Loads the vectors of the rows that lanes i, i + 1, ... have looked up, one row for each group of the warp. what:
    // Entry::what of the row to which the lane's first vector belongs. BEHIND: whether any vector may lie in overflow.
    template <bool BEHIND>
    __device__ __forceinline__ void load(const Entry &entry, uint32_t i, uint32_t what,
                                         uint4 (&vectors)[kVectors]) const
    {
        // All loads come after the last shuffle. If there were loads between the shuffles, the compiler would turn them
        // into branches.
        const uint4 *places[kVectors];
        bool wanted[kVectors];
        Pieces pieces{};
#pragma unroll
        for (uint32_t k = 0; k < kVectors; k++) {
            // This vector and the vector before it may belong to different rows.
            if (k * kWarp % kShared == 0u || kShared < kWarp || k >= Decoder::kVectors) {
                if (k != 0u) what = __shfl_sync(kAllLanes, entry.what, i + row_in_warp(k));
                if (BEHIND)
                    pieces = pieces_of(entry, i + row_in_warp(k), vectors_in(what));
                else
                    pieces.then = of_lane(entry.from, i + row_in_warp(k));
            }
            places[k] = pieces.place_of(vector_of(k)), wanted[k] = vector_of(k) < vectors_in(what);
        }
#pragma unroll
        for (uint32_t k = 0; k < kVectors; k++)
            if (wanted[k]) vectors[k] = *places[k];
    }
    // Issues the loads of the rows that lanes i, i + 1, ... have looked up.
    __device__ __forceinline__ void prefetch(const Entry &entry, uint32_t i, uint4 (&vectors)[kVectors]) const
    {
        const uint32_t what = __shfl_sync(kAllLanes, entry.what, i + row_in_warp(0));
        // If groups are whole warps, gathers do not test whether rows have vectors in overflow, because the branch
        // would make gathers 10 % slower if the bandwidth of device memory limits them.
        if ((G::kPerWarp == 1 && !TO_OUT) || G::any_in_warp(((G::kPerWarp == 1 ? what : entry.what) & kHasRest) != 0u))
            load<true>(entry, i, what, vectors);
        else
            load<false>(entry, i, what, vectors);
    }

    // Stores the prefetched vectors in the stage or the output. Then fetches the vectors for which there was no
    // register.
    __device__ __forceinline__ void receive(const Row &row, const Entry &entry, uint32_t i,
                                            const uint4 (&vectors)[kVectors]) const
    {
        if (G::kPerWarp == 1 && vectors_in(row.what) > kRowVectors) return receive_long(row, entry, i, vectors);
        const uint32_t first_group = G::in_block() / G::kPerWarp * G::kPerWarp;
        const auto what_of_row = [&](uint32_t k) {
            return G::kPerWarp == 1 ? row.what : __shfl_sync(kAllLanes, entry.what, i + row_in_warp(k));
        };
        const auto staged = [&](uint32_t k) {
            return shared_bytes() + first_stage + (first_group + row_in_warp(k)) * group_bytes;
        };
        // If a warp has several rows, each stage is filled to its end with whatever the registers hold, so that a lane
        // need not know the lengths of other groups' rows.
        if (!G::any_in_warp(!goes_to_stage(row.what))) {
            const uint32_t num_vectors =
                G::kPerWarp == 1 ? vectors_in(row.what) : row_stage_bytes(table.codebook.row_bytes) / 16u;
#pragma unroll
            for (uint32_t k = 0; k < kVectors; k++)
                if (vector_of(k) < num_vectors) reinterpret_cast<uint4 *>(staged(k))[vector_of(k)] = vectors[k];
        } else {
#pragma unroll
            for (uint32_t k = 0; k < kVectors; k++) {
                const uint32_t what = what_of_row(k);
                uint8_t *const dst = G::kPerWarp == 1 ? row.dst
                                     : TO_OUT         ? of_lane(out, row_in_warp(k) * G::kThreads)
                                                      : of_lane(entry.dst, i + row_in_warp(k));
                if (vector_of(k) < vectors_in(what))
                    reinterpret_cast<uint4 *>(is_raw(what) ? dst : staged(k))[vector_of(k)] = vectors[k];
            }
        }
        if (G::kPerWarp > 1) receive_rest(row, entry, i);
    }
    // Fetches the remaining vectors of rows that were too long to be prefetched completely.
    __device__ __forceinline__ void receive_rest(const Row &row, const Entry &entry, uint32_t i) const
    {
        const uint32_t num_vectors = vectors_in(row.what);
        if (!G::any_in_warp(num_vectors > kRowVectors)) return;
        const Pieces pieces = pieces_of(entry, i + in_warp(), num_vectors);
        uint4 *const to = reinterpret_cast<uint4 *>(is_raw(row.what) ? row.dst : stage.bytes());
#pragma unroll 8
        for (uint32_t k = kRowVectors + G::rank(); k < num_vectors; k += G::kThreads)
            to[pieces.place(k)] = *pieces.place_of(k);
    }
    // Stores the prefetched vectors of a row that is too long to be prefetched completely, and fetches its other
    // vectors. Used only if a group has whole warps.
    __device__ __forceinline__ void receive_long(const Row &row, const Entry &entry, uint32_t i,
                                                 const uint4 (&vectors)[kVectors]) const
    {
        const Pieces pieces = pieces_of(entry, i, vectors_in(row.what));
        uint4 *const to = reinterpret_cast<uint4 *>(is_raw(row.what) ? row.dst : stage.bytes());
#pragma unroll
        for (uint32_t k = 0; k < kVectors; k++) to[pieces.place(vector_of(k))] = vectors[k];
        receive_rest(row, entry, i);
    }
    // Returns the index of this group in its warp, which is also the index of the group's row.
    static __device__ __forceinline__ uint32_t in_warp() { return G::kPerWarp > 1 ? G::in_block() % G::kPerWarp : 0; }

    // Sets row and window in all warps of a group to those of the group's first warp. Each warp has looked up the row
    // for itself, so the results may differ if ids or lengths change meanwhile. The call is a barrier of the group, and
    // another barrier must follow before the next call.
    static __device__ __forceinline__ void agree(Row &row, Window &window)
    {
        struct Seen {
            Row row;
            Window window;
        };
        __shared__ Seen seen_by_first[Decoder::kMostThreads / G::kThreads];
        Seen &seen = seen_by_first[G::in_block()];
        if (G::rank() == 0u) seen = {row, window};
        G::sync();
        row = seen.row, window = seen.window;
    }

    // Completes the rows of a warp that are not regular coded rows: irregular, raw and refused rows. Returns whether
    // any row of the warp still has to be decoded.
    __device__ __forceinline__ bool finish_others(uint32_t number, Row &row, Window &window, ibp_fault *fault) const
    {
        if (G::any_in_warp(row.kind() == kIrregular)) {
            if (row.kind() == kIrregular) {
                const Fetched fetched = fetch_irregular<G>(table, request, out, stage.first, number);
                if (!TO_OUT) window = fetched.window;
                row = {window.dst, what_of(fetched.num_bytes, 0, fetched.kind)};
            }
            if (G::any_in_warp(row.kind() == kRefused))
                refuse<G>(table, request, out, number, row.kind() == kRefused, fault);
        }
        if constexpr (G::kWarps > 1)
            agree(row, window);
        else
            G::sync(); // before the stage is read
        if (row.kind() == kStagedRaw) group_copy<G>(row.dst, stage.bytes() + row.shift(), row.num_bytes());
        const bool any_coded = G::any_in_warp(row.kind() == kCoded);
        if (!any_coded) G::sync(); // before the next row is staged
        return any_coded;
    }
    // Decodes the row that has been received, and records a fault if it is corrupt.
    __device__ __forceinline__ void finish(const Decoder &decoder, uint32_t number, Row row, ibp_fault *fault) const
    {
        Window window{row.dst, 0, table.codebook.row_bytes};
        if (G::kWarps == 1 && !G::any_in_warp(row.kind() != kCoded))
            G::sync(); // before the stage is read
        else if (!finish_others(number, row, window, fault))
            return;
        bool coded = G::kPerWarp == 1 || row.kind() == kCoded, good = true;
        uint32_t cluster = 0, start = stage.first + row.shift(), num_bytes = row.num_bytes();
        if (table.codebook.num_clusters > 1u) {
            cluster = shared_bits(8u * start) & 0xffu;
            good = !coded || (num_bytes >= 1u && cluster < table.codebook.num_clusters);
            coded = coded && good;
            if (!coded) cluster = 0;
            start += 1u, num_bytes -= 1u;
        }
        if (G::any_in_warp(coded))
            good = decoder.decode(cluster, G::kPerWarp == 1 || coded, stage, 8u * start, num_bytes, window) && good;
        // This barrier comes before the next row is staged, and before zeros are written over what was stored of a
        // corrupt row.
        G::sync();
        if (G::any_in_warp(!good)) refuse<G>(table, request, out, number, !good, fault);
    }
};

// Returns the size in bytes of a group's shared memory, which holds the group's stage and scratch. The result is at
// least at_least. If several groups share a warp, padding makes their memory begin in different banks.
template <class Decoder>
__host__ __device__ __forceinline__ uint32_t group_bytes_of(const ibp_codebook &cb, uint32_t at_least = 0)
{
    const uint32_t of_row = row_stage_bytes(cb.row_bytes) + Decoder::scratch_bytes(cb),
                   num_bytes = max((of_row + 15u) / 16u * 16u, at_least);
    return num_bytes +
           (Decoder::Group::kPerWarp == 1 ? 0u : (max(4u * Decoder::Group::kLanes, 16u) - num_bytes) % 128u);
}

} // namespace ibp

#endif
