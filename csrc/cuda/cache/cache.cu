// cache.cu - a cache of rows: kernels that find rows in maps, copy rows to slabs, claim ways for rows, remove rows from
// maps, and change their entries. The gather that reads slabs is in decode/gather.cuh.
//
// A slab is memory near the GPUs that holds stored rows. A map is an array of sets, and a set is an array of ways of 16
// bytes; two ways share a sector of memory. A way holds a row's number and its entry, which says where the row lies in
// a slab:
//
//     set 0    | row, entry | row, entry | ...    set 1    | row, entry | row, entry | ...
//
// A claim brings missing rows into a cache that replaces its least recently used rows. A claim consists of two kernels.
// touch_rows finds and stamps the requested rows that are in the cache. claim_rows gives the missing rows the ways of
// the least recently used rows, and copies the missing rows to the slots of these ways.
//
// The latency of random reads, and the number of sectors that these reads load, limit the lookups. In find_rows each
// lane looks up one row. In a claim a warp looks up one row at a time, and each lane compares one way.
//
// The memory from which rows are read limits the copies. In fill_rows a warp copies one row at a time. In a claim a
// warp claims ways for up to 32 rows, and then copies these rows as one sequence of vectors.
#include "../../core/cache.h"
#include "../../core/ids.h"
#include "../cuda_checks.h"
#include "../decode/find_row.cuh"
#include "../decode/decode_request.h"
#include "../launch.cuh"

#include <algorithm>

namespace ibp {

constexpr uint32_t kThreads = 256, kWarps = kThreads / kWarp;
constexpr int64_t kMostBlocks = 2048; // more blocks than today's GPUs can hold at the same time

static Launch plan_rows(int64_t num_rows, int64_t a_block)
{
    return plan_jobs(num_rows, a_block, kMostBlocks, kThreads);
}
__device__ __forceinline__ int64_t warp_number() { return int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; }

// ---- requested rows ----

// The requested rows. A job is one row of one item. Jobs are ordered by item and, within an item, by row.
struct RequestedRows {
    const void *ids;
    uint32_t id_bytes, rows_per_item, num_jobs, row_bytes;
    const uint16_t *lengths;
    int64_t num_items;

    __device__ __forceinline__ uint32_t item_of(uint32_t job) const
    {
        return rows_per_item == 1u ? job : job / rows_per_item;
    }
    __device__ __forceinline__ int64_t id_of(uint32_t item) const
    {
        if (id_bytes == 0u) return item;
        return id_bytes == 8u ? __ldg(static_cast<const long long *>(ids) + item)
                              : __ldg(static_cast<const int *>(ids) + item);
    }
    // Returns the number of the row that a job requests, or -1 if its item does not exist.
    __device__ __forceinline__ int64_t row_of(uint32_t job) const
    {
        const uint32_t item = item_of(job);
        const int64_t id = id_of(item);
        return id >= 0 && id < num_items ? id * rows_per_item + (job - item * rows_per_item) : -1;
    }
    __device__ __forceinline__ uint32_t length_of(int64_t row) const { return length_of_row(lengths, row); }
};

// Describes the rows that a query requests. Returns false if the query is invalid or requests too many rows.
static bool ask_for_rows(const ibp_row_query &query, RequestedRows *rows)
{
    if (query.ids == nullptr || !ibp_is_query(&query) || !are_placed_ids(query.ids)) return false;
    if (query.ids->count > kMostJobs / query.rows_per_item) return false;
    *rows = {query.ids->data,
             query.ids->id_bytes,
             static_cast<uint32_t>(query.rows_per_item),
             static_cast<uint32_t>(query.ids->count * query.rows_per_item),
             query.row_bytes,
             query.lengths,
             query.num_rows / query.rows_per_item};
    return true;
}

// ---- counts ----

// The counts of a warp. Lane i holds the number of hits in slab i; the other counts are equal in all lanes.
struct Tally {
    uint64_t missed_bytes;
    uint32_t hits, misses;

    // Counts one row of each lane. slab: if the row was found, the index of its slab, which must be below num_slabs.
    // stored: if the row was missed, its stored size in bytes. All lanes of the warp must call it.
    __device__ __forceinline__ void add(bool found, uint32_t slab, uint32_t num_slabs, bool missed, uint32_t stored)
    {
        for (uint32_t s = 0; s < num_slabs; s++) {
            const uint32_t here = __ballot_sync(kAllLanes, found && slab == s);
            if (lane_id() == s) hits += ibp_popcount(here);
        }
        misses += ibp_popcount(__ballot_sync(kAllLanes, missed));
        missed_bytes += __reduce_add_sync(kAllLanes, missed ? ibp_sector_bytes(stored) : 0u);
    }
    // Adds the block's counts to *counts. All threads of the block must call it exactly once.
    __device__ __forceinline__ void put(ibp_cache_counts *counts) const
    {
        constexpr uint32_t kNumbers = sizeof(ibp_cache_counts) / sizeof(uint64_t);
        static_assert(kNumbers == IBP_MAX_SLABS + 2u,
                      "the counts must be the hits of each slab, the misses and their bytes");
        __shared__ unsigned long long of_warps[kWarps][kNumbers];
        if (counts == nullptr) return;
        const uint32_t i = lane_id();
        if (i < kNumbers)
            of_warps[threadIdx.x / kWarp][i] = i < IBP_MAX_SLABS ? hits : i == IBP_MAX_SLABS ? misses : missed_bytes;
        __syncthreads();
        if (threadIdx.x >= kNumbers) return;
        unsigned long long sum = 0;
        for (uint32_t w = 0; w < kWarps; w++) sum += of_warps[w][i];
        if (sum != 0) atomicAdd(reinterpret_cast<unsigned long long *>(counts) + i, sum);
    }
};

// ---- maps ----

// Loads a way, which is a row's number and its entry, in one access. CONSTANT: nothing writes to the map meanwhile, so
// the load may use the L1 cache, which then also holds the other way of the sector.
template <bool CONSTANT> __device__ __forceinline__ ulonglong2 load_way(const ibp_cached_row *way)
{
    const auto *const words = reinterpret_cast<const ulonglong2 *>(way);
    return CONSTANT ? __ldg(words) : __ldcg(words);
}
__device__ __forceinline__ bool is_row(const ulonglong2 &way, int64_t row)
{
    return static_cast<int64_t>(way.x) == row;
}

// An iterator over the pairs of ways that may hold a row. A pair is a sector of memory.
struct Search {
    // in_set: index in the set of the next pair's first way. left: number of pairs that remain.
    uint32_t set, step, in_set, left;

    __device__ __forceinline__ Search(const ibp_cache_map &map, int64_t row) : in_set(0)
    {
        const uint64_t hash = ibp_hash_of_row(row);
        set = ibp_home_of_hash(hash, &map);
        step = ibp_step_of_hash(hash, &map);
        left = ibp_searched_sets(&map) * (map.ways / 2u);
    }
    // Returns the index in the map of the next pair's first way.
    __device__ __forceinline__ int64_t next(const ibp_cache_map &map)
    {
        const int64_t way = int64_t{set} * map.ways + in_set;
        left--;
        in_set += 2u;
        if (in_set == map.ways) in_set = 0, set = ibp_next_set(set, step, &map);
        return way;
    }
};

// Loads the number of the row in a way, without its entry.
template <bool CONSTANT> __device__ __forceinline__ int64_t load_row(const ibp_cached_row *way)
{
    const auto *const row = reinterpret_cast<const long long *>(&way->row);
    return CONSTANT ? __ldg(row) : __ldcg(row);
}

// Returns the index of a row's way in the map, or -1 if the map does not have the row. entry: receives the row's entry.
// Most rows are in the first pair. Several of the other pairs are loaded at once, because a warp waits for the longest
// search of its lanes.
template <bool CONSTANT>
__device__ __forceinline__ int64_t find_way(const ibp_cache_map &map, int64_t row, uint64_t *entry)
{
    constexpr uint32_t kAhead = 4;
    if (row < 0 || map.num_sets == 0) return -1;
    Search search(map, row);
    const int64_t home = search.next(map);
    const ulonglong2 first = load_way<CONSTANT>(map.rows + home), second = load_way<CONSTANT>(map.rows + home + 1);
    const bool is_first = is_row(first, row);
    *entry = is_first ? first.y : second.y;
    if (is_first || is_row(second, row)) return is_first ? home : home + 1;
    bool is_over = is_row(first, IBP_WAY_EMPTY) || is_row(second, IBP_WAY_EMPTY);
    int64_t found = -1;
    while (search.left > 0u && !is_over) {
        int64_t pairs[kAhead], rows[kAhead][2];
#pragma unroll
        for (uint32_t a = 0; a < kAhead; a++) {
            pairs[a] = a == 0u || search.left > 0u ? search.next(map) : pairs[0];
            for (uint32_t i = 0; i < 2u; i++) rows[a][i] = load_row<CONSTANT>(map.rows + pairs[a] + i);
        }
#pragma unroll
        for (uint32_t a = 0; a < kAhead; a++)
            for (uint32_t i = 0; i < 2u; i++) {
                if (!is_over && rows[a][i] == row) found = pairs[a] + i;
                is_over = is_over || rows[a][i] == row || rows[a][i] == IBP_WAY_EMPTY;
            }
    }
    *entry = found >= 0 ? load_way<CONSTANT>(map.rows + found).y : 0u;
    return found;
}

// Inserts a row into the map, without an entry. Returns the index of the way that the row gets, or -1 if the row is in
// the map already or there is no empty way. All threads that insert the same row try the ways in the same order, and a
// way that was taken never becomes empty again. So one of these threads gets a way, and the others find the row there.
__device__ __forceinline__ int64_t take_way(const ibp_cache_map &map, int64_t row)
{
    if (map.num_sets == 0) return -1;
    const uint64_t hash = ibp_hash_of_row(row);
    uint32_t set = ibp_home_of_hash(hash, &map);
    const uint32_t step = ibp_step_of_hash(hash, &map);
    for (uint32_t left = ibp_searched_sets(&map); left > 0; left--, set = ibp_next_set(set, step, &map)) {
        const int64_t first = int64_t{set} * map.ways;
        for (int64_t w = first; w < first + map.ways; w++) {
            auto *const key = reinterpret_cast<unsigned long long *>(&map.rows[w].row);
            const auto found = static_cast<int64_t>(
                atomicCAS(key, static_cast<unsigned long long>(IBP_WAY_EMPTY), static_cast<unsigned long long>(row)));
            if (found == IBP_WAY_EMPTY) return w;
            if (found == row) return -1;
        }
    }
    return -1;
}

// ---- find ----

struct Maps {
    ibp_cache_map maps[IBP_MAX_SLABS];
    uint32_t num_maps;
};

__global__ void __launch_bounds__(kThreads)
    find_rows(const __grid_constant__ RequestedRows rows, const __grid_constant__ Maps maps, uint64_t *entries,
              ibp_cache_counts *counts)
{
    await_work_before();
    Tally tally{};
    for (uint32_t base = blockIdx.x * kThreads; base < rows.num_jobs; base += gridDim.x * kThreads) {
        const uint32_t job = base + threadIdx.x;
        const int64_t row = job < rows.num_jobs ? rows.row_of(job) : -1;
        const uint32_t owner = ibp_owner_of_row(row, maps.num_maps);
        uint64_t entry = 0;
        if (row >= 0 && maps.num_maps != 0u) find_way<true>(maps.maps[owner], row, &entry);
        if (!ibp_is_present(entry)) entry = 0;
        if (job < rows.num_jobs) entries[job] = entry;
        if (counts == nullptr) continue;
        const uint32_t length = row >= 0 && entry == 0u ? rows.length_of(row) : 0u;
        tally.add(entry != 0u, owner, maps.num_maps,
                  row >= 0 && entry == 0u && length != IBP_DEFAULT_LENGTH(rows.row_bytes),
                  ibp_stored_bytes(length, rows.row_bytes, rows.row_bytes));
    }
    tally.put(counts);
}

__global__ void __launch_bounds__(kThreads)
    name_owners(const int64_t *rows, int64_t count, uint32_t num_slabs, uint8_t *owners)
{
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads)
        owners[i] = static_cast<uint8_t>(ibp_owner_of_row(rows[i], num_slabs));
}

// ---- stored rows ----

// Copies bytes between addresses of any alignment. Each aligned word of dst is assembled from two aligned words of src.
// All lanes of the warp must call it.
__device__ __forceinline__ void copy_shifted(uint8_t *dst, const uint8_t *src, uint32_t num_bytes)
{
    const auto to = reinterpret_cast<uintptr_t>(dst), from = reinterpret_cast<uintptr_t>(src);
    uint32_t head = static_cast<uint32_t>(-to % 4u); // number of bytes before the first aligned word of dst
    if ((from + head) % 4u > head) head += 4u;       // the first word's source would begin before src
    const auto skew = static_cast<uint32_t>((from + head) % 4u);
    // upper: number of bytes that are read past the four source bytes of a word of dst.
    const uint32_t upper = skew != 0u ? 4u - skew : 0u;
    const uint32_t words = num_bytes >= head + upper ? (num_bytes - head - upper) / 4u : 0u;
    const auto *const low = reinterpret_cast<const uint32_t *>(src + head - skew);
    auto *const out = reinterpret_cast<uint32_t *>(dst + head);
#pragma unroll 4
    for (uint32_t i = lane_id(); i < words; i += kWarp)
        out[i] = skew == 0u ? low[i] : __funnelshift_r(low[i], low[i + 1u], 8u * skew);
    for (uint32_t i = lane_id(); i < num_bytes; i += kWarp)
        if (i < head || i >= head + 4u * words) dst[i] = src[i];
}
// Copies bytes in vectors of 16 bytes; both addresses must be aligned to 16. Several loads are issued before the first
// vector is stored, because the bytes may come from host memory. All lanes of the warp must call it.
__device__ __forceinline__ void copy_vectors(uint8_t *dst, const uint8_t *src, uint32_t num_bytes)
{
    constexpr uint32_t kAhead = 4;
    const uint32_t whole = num_bytes / 16u;
    for (uint32_t first = lane_id(); first < whole; first += kAhead * kWarp) {
        uint4 vectors[kAhead];
#pragma unroll
        for (uint32_t a = 0; a < kAhead; a++)
            if (first + a * kWarp < whole) vectors[a] = reinterpret_cast<const uint4 *>(src)[first + a * kWarp];
#pragma unroll
        for (uint32_t a = 0; a < kAhead; a++)
            if (first + a * kWarp < whole) reinterpret_cast<uint4 *>(dst)[first + a * kWarp] = vectors[a];
    }
    for (uint32_t i = 16u * whole + lane_id(); i < num_bytes; i += kWarp) dst[i] = src[i];
}
__device__ __forceinline__ void copy_part(uint8_t *dst, const uint8_t *src, uint32_t num_bytes)
{
    if (aligned(dst, 16) && aligned(src, 16))
        copy_vectors(dst, src, num_bytes);
    else
        copy_shifted(dst, src, num_bytes);
}

__device__ __forceinline__ uint32_t vectors_of(uint32_t num_bytes) { return (num_bytes + 15u) / 16u; }

// A stored row that is to be copied from the table.
struct Stored {
    ibp_row_place place;
    ibp_status status;
    uint32_t length, num_bytes;

    __device__ __forceinline__ bool has_bytes() const { return status == IBP_OK && !place.is_default; }
    // Returns the address of byte `byte` of the stored row.
    __device__ __forceinline__ const uint8_t *address(const ibp_table &table, uint32_t byte) const
    {
        return byte < place.in_slot ? table.slots + place.slot_start + byte
                                    : table.overflow + place.overflow_start + (byte - place.in_slot);
    }
    // Returns whether the row can be copied in vectors of 16 bytes. Its parts must begin at multiples of 16 bytes. If
    // it has an overflow part, the part in the slot must consist of whole vectors. The last vector must end within the
    // slot or, in overflow, within the padding of the overflow part.
    __device__ __forceinline__ bool is_vectors(const ibp_table &table) const
    {
        const bool spills = place.in_overflow != 0u;
        const uint32_t end = 16u * vectors_of(spills ? place.in_overflow : place.in_slot),
                       room = spills ? ibp_overflow_room(place.in_overflow, table.slot_bytes) : table.slot_bytes;
        return aligned(address(table, 0), 16) && end <= room &&
               (!spills || (place.in_slot % 16u == 0u && aligned(address(table, place.in_slot), 16))) &&
               ibp_part_in_bounds(spills ? place.overflow_start : place.slot_start, end,
                                  spills ? table.overflow_bytes : table.slots_bytes);
    }
    // Copies both parts of the row to dst, one after the other, with the function COPY. All lanes of the warp must call
    // it.
    template <void COPY(uint8_t *, const uint8_t *, uint32_t)>
    __device__ __forceinline__ void copy(const ibp_table &table, uint8_t *dst) const
    {
#pragma unroll 1
        for (uint32_t from = 0, to = place.in_slot; from < num_bytes; from = to, to = num_bytes)
            COPY(dst + from, address(table, from), to - from);
    }
};
__device__ __forceinline__ Stored find_stored(const ibp_table &table, int64_t row)
{
    Stored stored{};
    stored.status = IBP_INDEX_OUT_OF_RANGE;
    if (row < 0 || row >= ibp_rows_of_bytes(ibp_bytes_of_table(&table), table.codebook.row_bytes)) return stored;
    stored.length = length_of_row(table.lengths, row);
    stored.status = find_row(table, row, stored.length, &stored.place) ? IBP_OK : IBP_CORRUPT_ROW;
    stored.num_bytes = stored.place.in_slot + stored.place.in_overflow;
    return stored;
}

// ---- fill ----

__global__ void __launch_bounds__(kThreads)
    fill_rows(const __grid_constant__ ibp_table table, const int64_t *rows, const int64_t *offsets, int64_t count,
              const __grid_constant__ ibp_cache_slab slab, ibp_fault *fault)
{
    const bool is_mapped = slab.map.num_sets > 0;
    for (int64_t i = warp_number(); i < count; i += int64_t{gridDim.x} * kWarps) {
        const int64_t row = IBP_LOAD_ONCE(rows[i]), offset = IBP_LOAD_ONCE(offsets[i]);
        if (row < 0 || offset < 0) continue;
        const auto start = static_cast<uint64_t>(offset);
        Stored stored = find_stored(table, row);
        if (stored.status == IBP_OK && !ibp_part_in_bounds(start, stored.num_bytes, slab.num_bytes))
            stored.status = IBP_BUFFER_TOO_SMALL;
        if (stored.status != IBP_OK && lane_id() == 0u) record_fault(fault, stored.status, i, row);
        if (!stored.has_bytes()) continue;
        int64_t way = is_mapped && lane_id() == 0u ? take_way(slab.map, row) : 0;
        way = __shfl_sync(kAllLanes, way, 0);
        if (way < 0) continue;
        stored.copy<copy_part>(table, slab.bytes + start);
        __threadfence();
        __syncwarp(); // the row must be in the slab before its entry is written
        if (is_mapped && lane_id() == 0u)
            *static_cast<volatile uint64_t *>(&slab.map.rows[way].entry) =
                ibp_make_entry(slab.number, start, stored.length);
    }
}

// ---- the least recently used ----

struct ClaimJob {
    RequestedRows rows;
    ibp_lru lru;
    uint64_t *entries;
    ibp_cache_counts *counts;
    ibp_fault *fault;
    uint32_t per_warp; // number of jobs that a warp takes together, at most kWarp
};

__device__ __forceinline__ uint32_t home_of(const ibp_lru &lru, int64_t row)
{
    return ibp_home_of_hash(ibp_hash_of_row(row), &lru.slab.map);
}

// Looks up all requested rows and stamps those that are in the cache, so that claim_rows does not replace them in the
// same call. Each lane computes the home set of one row, and the warp searches these sets one after the other.
__global__ void __launch_bounds__(kThreads) touch_rows(const __grid_constant__ ClaimJob job)
{
    constexpr uint32_t kAhead = 4; // number of sets that are loaded at once
    await_work_before();
    const RequestedRows &rows = job.rows;
    const ibp_cached_row *const ways_of_lane = job.lru.slab.map.rows + lane_id();
    uint32_t *const stamps_of_lane = job.lru.stamps + lane_id();
    const bool has_sets = job.lru.slab.map.num_sets != 0;
    const uint64_t call = job.lru.clock[0] + 1u;
    const auto now = static_cast<uint32_t>(call);
    if (blockIdx.x == 0u && threadIdx.x == 0u) job.lru.clock[1] = call;
    uint32_t found = 0; // number of rows that this lane has found among the ways that it compares
    for (int64_t first = warp_number() * job.per_warp; first < rows.num_jobs;
         first += int64_t{gridDim.x} * kWarps * job.per_warp) {
        const auto number = static_cast<uint32_t>(first) + lane_id();
        const bool active = lane_id() < job.per_warp && number < rows.num_jobs;
        const int64_t row = active && has_sets ? rows.row_of(number) : -1;
        const uint32_t home = row >= 0 ? home_of(job.lru, row) : 0u;
        uint64_t *const entries = job.entries + first;
        if (active) entries[lane_id()] = 0;
        __syncwarp(); // the zeros are written before a lane that finds a row writes its entry
        for (uint32_t j = 0; has_sets && j < job.per_warp; j += kAhead) {
            ulonglong2 ways[kAhead];
            int64_t asked[kAhead];
            uint32_t homes[kAhead];
#pragma unroll
            for (uint32_t a = 0; a < kAhead; a++) {
                asked[a] = __shfl_sync(kAllLanes, row, static_cast<int>(j + a));
                homes[a] = __shfl_sync(kAllLanes, home, static_cast<int>(j + a));
                ways[a] = load_way<true>(ways_of_lane + uint64_t{homes[a]} * kWarp);
            }
#pragma unroll
            for (uint32_t a = 0; a < kAhead; a++) {
                if (asked[a] < 0 || !is_row(ways[a], asked[a]) || !ibp_is_present(ways[a].y)) continue;
                stamps_of_lane[uint64_t{homes[a]} * kWarp] = now;
                entries[j + a] = ways[a].y;
                found++;
            }
        }
    }
    Tally tally{};
    const uint32_t hits = __reduce_add_sync(kAllLanes, found);
    if (lane_id() == job.lru.slab.number) tally.hits = hits;
    tally.put(job.counts);
}

// A requested row that was not in its set. entry: the row's new entry, or 0 if no way could be claimed for the row.
// is_new: true if the row has to be copied. Each lane has one such struct, in shared memory, so that the other lanes
// can read and write it.
struct Missing {
    Stored stored;
    int64_t row;
    uint64_t entry;
    uint32_t set;
    bool is_new;
};

// Assigns one way of a row's set to the row. The set must be locked. way, stamp: the way of the set that this lane has
// loaded, and its stamp. All lanes of the warp must call it.
__device__ __forceinline__ void claim_way(const ibp_lru &lru, Missing &missing, const ulonglong2 &way, uint32_t stamp,
                                          uint32_t now)
{
    const bool is_here = is_row(way, missing.row) && ibp_is_present(way.y), is_free = static_cast<int64_t>(way.x) < 0;
    const uint32_t here = __ballot_sync(kAllLanes, is_here);
    if (here != 0u) { // another lane with the same row has claimed a way
        if (lane_id() == lowest_of(here)) missing.entry = way.y;
        return;
    }
    const uint32_t age = ibp_age_of_way(now, stamp);
    const uint32_t worth = is_free ? ~0u : (way.y & IBP_ENTRY_DIRTY) != 0u ? 0u : ibp_min_u32(age, ~0u - 1u);
    const uint32_t most = __reduce_max_sync(kAllLanes, worth);
    if (most == 0u || lane_id() != lowest_of(__ballot_sync(kAllLanes, worth == most))) return;
    const int64_t chosen = int64_t{missing.set} * kWarp + lane_id();
    missing.entry =
        ibp_make_entry(lru.slab.number, static_cast<uint64_t>(chosen) * lru.slot_bytes, missing.stored.length);
    missing.is_new = true;
    lru.slab.map.rows[chosen] = {missing.row, missing.entry};
    lru.stamps[chosen] = now;
}

// Assigns ways to the rows of the lanes whose bits are set in `lanes`. The sets of these rows must be locked, and no
// two of these rows may have the same set. All lanes of the warp must call it.
__device__ __forceinline__ void claim_locked(const ibp_lru &lru, Missing *rows, uint32_t lanes, uint32_t now)
{
    // Number of sets that are loaded at once. With more sets the kernel would need more than 64 registers.
    constexpr uint32_t kAhead = 2;
    while (lanes != 0u) {
        ulonglong2 ways[kAhead];
        uint32_t stamps[kAhead], lane[kAhead];
#pragma unroll
        for (uint32_t a = 0; a < kAhead; a++, lanes &= lanes - 1u) {
            lane[a] = lanes != 0u ? lowest_of(lanes) : kWarp;
            if (lane[a] == kWarp) continue;
            const int64_t way = int64_t{rows[lane[a]].set} * kWarp + lane_id();
            ways[a] = load_way<false>(lru.slab.map.rows + way);
            stamps[a] = __ldcg(lru.stamps + way);
        }
#pragma unroll
        for (uint32_t a = 0; a < kAhead; a++)
            if (lane[a] != kWarp) claim_way(lru, rows[lane[a]], ways[a], stamps[a], now);
    }
}

// Assigns ways to the rows of all lanes. Each lane tries to lock its row's set. The rows of the lanes that succeed get
// ways. Then these locks are released, and the other lanes try again. So no warp waits while it holds a lock. The
// number of tries is limited, because the locks lie in memory of the caller: a lock that is not 0 before the call would
// never become free. All lanes of the warp must call it.
__device__ __forceinline__ void claim_ways(const ibp_lru &lru, Missing *rows, bool has_row, uint32_t now)
{
    constexpr uint32_t kMostTries = 1u << 20;
    uint32_t *const lock = lru.stamps + (lru.slab.map.num_sets * kWarp + rows[lane_id()].set);
    for (uint32_t tries = 0; tries < kMostTries && __any_sync(kAllLanes, has_row); tries++) {
        const bool is_locked = has_row && atomicCAS(lock, 0u, 1u) == 0u;
        const uint32_t locked = __ballot_sync(kAllLanes, is_locked);
        if (locked == 0u) continue;
        __threadfence();
        __syncwarp(); // the locks are held before any lane reads
        claim_locked(lru, rows, locked, now);
        __syncwarp(); // all lanes have finished before locks are released
        __threadfence();
        if (is_locked) atomicExch(lock, 0u);
        has_row = has_row && !is_locked;
    }
}

// Copies rows to the slots to which their entries point. num_vectors: number of vectors of this lane's row; 0 if the
// row is not copied. The vectors of all rows are numbered consecutively, so that every lane has work, whatever the
// sizes of the rows. Several loads are issued before the first vector is stored. All lanes of the warp must call it.
__device__ __forceinline__ void copy_rows(const ibp_table &table, uint8_t *slab, const Missing *rows,
                                          uint32_t num_vectors)
{
    constexpr uint32_t kAhead = 3; // number of vectors that a lane loads at once
    uint32_t total;
    const uint32_t begin = exclusive_scan(num_vectors, total);
    for (uint32_t first = 0; first < total; first += kAhead * kWarp) {
        uint4 vectors[kAhead], *to[kAhead];
#pragma unroll
        for (uint32_t a = 0; a < kAhead; a++) {
            const uint32_t number = first + a * kWarp + lane_id();
            // lane: the lane whose row contains vector `number`. It is the last lane whose first vector is vector
            // `number` or an earlier one.
            int lane = 0;
            for (int step = kWarp / 2; step > 0; step /= 2)
                if (__shfl_sync(kAllLanes, begin, lane + step) <= number) lane += step;
            const uint32_t byte = 16u * (number - __shfl_sync(kAllLanes, begin, lane));
            const Missing &row = rows[lane];
            to[a] = reinterpret_cast<uint4 *>(slab + ibp_offset_in_slab(row.entry) + byte);
            if (number < total) vectors[a] = *reinterpret_cast<const uint4 *>(row.stored.address(table, byte));
        }
#pragma unroll
        for (uint32_t a = 0; a < kAhead; a++)
            if (first + a * kWarp + lane_id() < total) *to[a] = vectors[a];
    }
}

// Claims ways for the rows of the lanes, and then copies the rows. Each lane has one row or none. All lanes of the warp
// must call it.
__device__ __forceinline__ void claim_and_copy(const ibp_table &table, const ibp_lru &lru, Missing *rows, bool has_row,
                                               uint32_t now)
{
    const Missing &row = rows[lane_id()];
    const bool fits = has_row && row.stored.num_bytes <= lru.slot_bytes && lru.slab.map.num_sets != 0;
    claim_ways(lru, rows, fits, now);
    // If the first slot of the cache is aligned to 16 bytes, all its slots are.
    const bool is_vectors = aligned(lru.slab.bytes, 16) && row.stored.is_vectors(table);
    copy_rows(table, lru.slab.bytes, rows, row.is_new && is_vectors ? vectors_of(row.stored.num_bytes) : 0u);
    for (uint32_t left = __ballot_sync(kAllLanes, row.is_new && !is_vectors); left != 0u; left &= left - 1u) {
        const Missing &other = rows[lowest_of(left)];
        other.stored.copy<copy_shifted>(table, lru.slab.bytes + ibp_offset_in_slab(other.entry));
    }
}

__global__ void __launch_bounds__(kThreads)
    claim_rows(const __grid_constant__ ibp_table table, const __grid_constant__ ClaimJob job)
{
    __shared__ Missing of_block[kThreads];
    Missing &mine = of_block[threadIdx.x];
    await_work_before();
    const uint64_t call = job.lru.clock[1];
    if (blockIdx.x == 0u && threadIdx.x == 0u) job.lru.clock[0] = call;
    Tally tally{};
    for (int64_t first = warp_number() * job.per_warp; first < job.rows.num_jobs;
         first += int64_t{gridDim.x} * kWarps * job.per_warp) {
        const auto number = static_cast<uint32_t>(first) + lane_id();
        const bool is_missing = lane_id() < job.per_warp && number < job.rows.num_jobs && job.entries[number] == 0u;
        if (!__any_sync(kAllLanes, is_missing)) continue;
        const int64_t row = is_missing ? job.rows.row_of(number) : -1;
        const uint32_t set = row >= 0 && job.lru.slab.map.num_sets != 0 ? home_of(job.lru, row) : 0u;
        __syncwarp(); // the rows of the previous step are copied before they are overwritten
        mine = {find_stored(table, row), row, 0, set, false};
        __syncwarp();
        const uint32_t item = job.rows.item_of(number);
        if (is_missing && mine.stored.status != IBP_OK)
            record_fault(job.fault, mine.stored.status, item, job.rows.id_of(item));
        const bool has_row = is_missing && mine.stored.has_bytes();
        claim_and_copy(table, job.lru, &mine - lane_id(), has_row, static_cast<uint32_t>(call));
        if (has_row) job.entries[number] = mine.entry;
        const bool is_hit = has_row && mine.entry != 0u && !mine.is_new;
        tally.add(is_hit, job.lru.slab.number, IBP_MAX_SLABS, has_row && !is_hit, mine.stored.num_bytes);
    }
    tally.put(job.counts);
}

// ---- changes ----

__global__ void __launch_bounds__(kThreads)
    drop_rows(const int64_t *rows, int64_t count, const __grid_constant__ ibp_cache_map map)
{
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
        uint64_t entry = 0;
        const int64_t way = find_way<false>(map, IBP_LOAD_ONCE(rows[i]), &entry);
        if (way < 0) continue;
        *static_cast<volatile uint64_t *>(&map.rows[way].entry) = 0;
        *static_cast<volatile int64_t *>(&map.rows[way].row) = IBP_WAY_REMOVED;
    }
}

__global__ void __launch_bounds__(kThreads) set_rows(const int64_t *rows, const uint16_t *lengths, int64_t count,
                                                     bool dirty, const __grid_constant__ ibp_cache_map map)
{
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
        uint64_t entry = 0;
        const int64_t way = find_way<false>(map, IBP_LOAD_ONCE(rows[i]), &entry);
        if (way < 0 || !ibp_is_present(entry)) continue;
        const uint32_t length = lengths != nullptr ? IBP_LOAD_ONCE(lengths[i]) : ibp_length_of_entry(entry);
        *static_cast<volatile uint64_t *>(&map.rows[way].entry) = ibp_rewrite_entry(entry, length, dirty);
    }
}

static bool is_cacheable(const ibp_table *table) { return is_table(table) && ibp_has_whole_rows(table); }

} // namespace ibp

extern "C" {

ibp_status ibp_cuda_owners_of_rows(const int64_t *rows, int64_t count, uint32_t num_slabs, uint8_t *owners,
                                   ibp_stream stream)
{
    if (count < 0 || num_slabs < 1 || num_slabs > IBP_MAX_SLABS) return IBP_INVALID_ARGUMENT;
    if (count == 0) return IBP_OK;
    if (rows == nullptr || owners == nullptr) return IBP_INVALID_ARGUMENT;
    return ibp::launch_kernel(ibp::name_owners, ibp::plan_rows(count, ibp::kThreads), stream, rows, count, num_slabs,
                              owners);
}

ibp_status ibp_cuda_find_cached(const ibp_row_query *query, const ibp_cache_map *maps, uint32_t num_maps,
                                uint64_t *entries, ibp_cache_counts *counts, ibp_stream stream)
{
    ibp::RequestedRows rows{};
    ibp::Maps given{};
    if (query == nullptr || num_maps > IBP_MAX_SLABS || !ibp::ask_for_rows(*query, &rows)) return IBP_INVALID_ARGUMENT;
    for (; given.num_maps < num_maps; given.num_maps++) {
        if (!ibp_is_map(&maps[given.num_maps])) return IBP_INVALID_ARGUMENT;
        given.maps[given.num_maps] = maps[given.num_maps];
    }
    if (rows.num_jobs == 0) return IBP_OK;
    if (entries == nullptr) return IBP_INVALID_ARGUMENT;
    // Launch only the blocks that can be resident at once, because each block adds to the counts once.
    ibp::Launch launch{};
    const auto *const kernel = reinterpret_cast<const void *>(ibp::find_rows);
    ibp_status status = ibp::plan_resident(kernel, ibp::kThreads, 0, rows.num_jobs, ibp::kThreads, 0, &launch);
    if (status == IBP_OK) status = ibp::prepare(kernel, &launch.overlaps);
    return status == IBP_OK ? ibp::launch_kernel(ibp::find_rows, launch, stream, rows, given, entries, counts) : status;
}

ibp_status ibp_cuda_fill_slab(const ibp_table *table, const int64_t *rows, const int64_t *offsets, int64_t count,
                              const ibp_cache_slab *slab, ibp_fault *fault, ibp_stream stream)
{
    if (!ibp::is_cacheable(table) || slab == nullptr || !ibp_is_cache_slab(slab) || fault == nullptr || count < 0)
        return IBP_INVALID_ARGUMENT;
    if (count == 0) return IBP_OK;
    if (rows == nullptr || offsets == nullptr) return IBP_INVALID_ARGUMENT;
    return ibp::launch_kernel(ibp::fill_rows, ibp::plan_rows(count, ibp::kWarps), stream, *table, rows, offsets, count,
                              *slab, fault);
}

ibp_status ibp_cuda_claim_cached(const ibp_table *table, const ibp_ids *ids, const ibp_lru *lru, uint64_t *entries,
                                 ibp_cache_counts *counts, ibp_fault *fault, ibp_stream stream)
{
    if (!ibp::is_cacheable(table) || lru == nullptr || !ibp_is_lru(lru) || fault == nullptr)
        return IBP_INVALID_ARGUMENT;
    const uint32_t row_bytes = table->codebook.row_bytes;
    const ibp_row_query query{ids, table->item_bytes / row_bytes, row_bytes, table->lengths,
                              ibp_bytes_of_table(table) / row_bytes};
    ibp::ClaimJob job{{}, *lru, entries, counts, fault, 0};
    if (!ibp::ask_for_rows(query, &job.rows)) return IBP_INVALID_ARGUMENT;
    if (job.rows.num_jobs == 0) return IBP_OK;
    if (entries == nullptr) return IBP_INVALID_ARGUMENT;
    // The jobs are spread over at most this number of warps, or over more if a warp would otherwise get more than kWarp
    // jobs. The 132 SMs of an H200 hold more warps at the same time.
    constexpr int64_t kWarpsAtATime = 4096;
    job.per_warp =
        static_cast<uint32_t>(std::min<int64_t>((job.rows.num_jobs + kWarpsAtATime - 1) / kWarpsAtATime, ibp::kWarp));
    ibp::Launch launch = ibp::plan_rows(job.rows.num_jobs, int64_t{job.per_warp} * ibp::kWarps);
    ibp_status status = ibp::prepare(reinterpret_cast<const void *>(ibp::touch_rows), &launch.overlaps);
    if (status == IBP_OK) status = ibp::launch_kernel(ibp::touch_rows, launch, stream, job);
    return status == IBP_OK ? ibp::launch_kernel(ibp::claim_rows, launch, stream, *table, job) : status;
}

ibp_status ibp_cuda_drop_cached(const int64_t *rows, int64_t count, const ibp_cache_map *map, ibp_stream stream)
{
    if (map == nullptr || !ibp_is_map(map) || count < 0) return IBP_INVALID_ARGUMENT;
    if (count == 0) return IBP_OK;
    if (rows == nullptr) return IBP_INVALID_ARGUMENT;
    return ibp::launch_kernel(ibp::drop_rows, ibp::plan_rows(count, ibp::kThreads), stream, rows, count, *map);
}

ibp_status ibp_cuda_set_cached(const int64_t *rows, const uint16_t *lengths, int64_t count, bool dirty,
                               const ibp_cache_map *map, ibp_stream stream)
{
    if (map == nullptr || !ibp_is_map(map) || count < 0) return IBP_INVALID_ARGUMENT;
    if (count == 0) return IBP_OK;
    if (rows == nullptr) return IBP_INVALID_ARGUMENT;
    return ibp::launch_kernel(ibp::set_rows, ibp::plan_rows(count, ibp::kThreads), stream, rows, lengths, count, dirty,
                              *map);
}
}
