// torch_cache_ops.cpp - the operations of torch.ops.ibp for a cache of a table's rows (ibp_cache.h). They turn tensors
// into pointers and call the core.
//
//     describe_cache  maps ways slabs counts stamps clock slot_bytes -> Tensor
//     find_cached     ids rows_per_item row_bytes lengths maps ways entries counts
//     owners_of_rows  rows num_slabs -> Tensor
//     fill_slab       table rows offsets slab ways bytes map fault
//     claim_cached    table ids ways cache_slot_bytes bytes map stamps clock entries counts fault
//     drop_cached     rows ways map
//     set_cached      rows lengths ways dirty map
//
// Only a table whose items are whole rows can have a cache. Each operation is documented at its function.
// torch_tables.h describes the arguments that several files share. The operations of this file also share the following
// arguments:
//
//     map, maps   int64 [sets * ways * 2], aligned to 16 bytes: for each way the number of a row (-1: the way is empty,
//                 -2: its row was removed) and the row's entry (0 if the way is empty). maps: one map for each of up to
//                 8 slabs. Like slabs, maps may be on other CUDA devices than the call's other tensors.
//     ways        Number of ways of a set: 2, 4, 8, 16 or 32.
//     bytes       uint8 [bytes], at most 2^40: the slab to which an operation writes rows.
//     entries     int64 [ids * rows_per_item], written: element k * rows_per_item + r is the cache entry of row r of
//                 item ids[k], in the form that gather_items takes; 0 if the cache does not hold the row.
//     counts      int64 [10], to which the operation adds: the numbers of rows found in slabs 0 to 7; the number of
//                 rows not found; and the size in bytes of the rows not found, each row rounded up to sectors of 32
//                 bytes.
//     stamps      int32 [sets * 33], zeros at first; only for caches that replace rows, whose sets have 32 ways. First,
//                 for each way, the number of the call that used it last. Then, for each set, a lock, which is 0
//                 between calls.
//     clock       int64 [2], zeros at first: two copies of the number of calls so far.
//     rows        int64 [rows]: row numbers; negative ones are skipped.
#include "torch_tables.h"

#include <optional>
#include <vector>

namespace {

using namespace ibp_torch;

// ---- arguments ----

ibp_cache_map map_of(const Tensor &map, int64_t ways)
{
    ibp_cache_map m{};
    m.ways = to_u32(ways, 2, IBP_SEARCHED_WAYS, "ways");
    require((m.ways & (m.ways - 1)) == 0, "ways is ", ways, ", not 2, 4, 8, 16 or 32");
    const int64_t numbers = 2 * ways; // number of elements of `map` for each set
    m.rows = data_of<ibp_cached_row>(map, ScalarType::Long, 0, "map");
    require(map.numel() % numbers == 0 && map.numel() / numbers <= int64_t{UINT32_MAX}, "map has ", map.numel(),
            " numbers, not those of whole sets of ", ways, " ways");
    require(reinterpret_cast<uintptr_t>(m.rows) % sizeof *m.rows == 0, "map is not aligned to 16 bytes");
    m.num_sets = map.numel() / numbers;
    return m;
}

std::vector<ibp_cache_map> maps_of(const std::vector<Tensor> &maps, int64_t ways)
{
    std::vector<ibp_cache_map> found;
    require(maps.size() <= IBP_MAX_SLABS, "there are ", static_cast<int64_t>(maps.size()), " maps, more than 8");
    for (const Tensor &map : maps) found.push_back(map_of(map, ways));
    return found;
}

ibp_cache_slab slab_of(const Tensor &bytes, const Tensor &map, int64_t number, int64_t ways)
{
    require(bytes.numel() <= int64_t{1} << IBP_ENTRY_OFFSET_BITS, "bytes has ", bytes.numel(),
            " bytes, more than 2^40");
    return {map_of(map, ways), bytes_of(bytes, 0, "bytes"), bytes.numel(),
            to_u32(number, 0, IBP_MAX_SLABS - 1, "slab")};
}

ibp_cache_counts *cache_counts_of(const std::optional<Tensor> &counts)
{
    constexpr int64_t kNumbers = sizeof(ibp_cache_counts) / sizeof(uint64_t);
    return counts ? data_of<ibp_cache_counts>(*counts, ScalarType::Long, kNumbers, "counts") : nullptr;
}

ibp_lru lru_of(const Tensor &bytes, const Tensor &map, int64_t ways, int64_t slot_bytes, const Tensor &stamps,
               const Tensor &clock)
{
    ibp_lru lru{slab_of(bytes, map, 0, ways), 0, nullptr, nullptr};
    require(ways == IBP_SEARCHED_WAYS, "ways is ", ways, ", not 32");
    lru.slot_bytes = to_u32(slot_bytes, IBP_OVERFLOW_ALIGN, IBP_MAX_ROW_BYTES, "slot_bytes");
    require(slot_bytes % IBP_OVERFLOW_ALIGN == 0, "slot_bytes is ", slot_bytes, ", not a multiple of 32");
    const int64_t num_sets = lru.slab.map.num_sets, needed = total_bytes(num_sets * ways, slot_bytes, "bytes");
    require(bytes.numel() >= needed, "bytes has ", bytes.numel(), " bytes, ", needed, " are needed");
    lru.stamps = data_of<uint32_t>(stamps, ScalarType::Int, num_sets * (ways + 1), "stamps");
    lru.clock = unsigned_longs_of(clock, 2, "clock");
    return lru;
}

// ---- making a handle ----

// Returns the handle of a cache, which is the argument `cache` of `take`: the bytes of a struct ibp::CacheHandle, uint8
// on the CPU. The handle holds the addresses of the tensors, so the tensors must live as long as the handle is used.
// The handle is for calls on the device of `counts`.
//
// maps, slabs: lists of the same length; maps[s] is the map of slabs[s].
// stamps, clock, slot_bytes: the arguments of claim_cached, for a cache that replaces its rows. Such a cache has one
//   slab, and sets of 32 ways. For other caches: None, None and 0.
Tensor describe_cache(const Device &device, const Near &maps, int64_t ways, const Near &slabs, const Tensor &counts,
                      const std::optional<Tensor> &stamps, const std::optional<Tensor> &clock, int64_t slot_bytes)
{
    ibp::CacheHandle cache{};
    size_t num_parts = 0;
    const auto note = [&](const Tensor &tensor) { cache.parts[num_parts++] = memory_of(tensor, "cache"); };
    const std::vector<ibp_cache_map> found = maps_of(maps, ways);
    require(slabs.size() == maps.size(), "there are ", static_cast<int64_t>(maps.size()), " maps and ",
            static_cast<int64_t>(slabs.size()), " slabs");
    for (size_t s = 0; s < found.size(); s++) {
        cache.maps[s] = found[s];
        cache.slabs.slabs[cache.slabs.num_slabs++] = {bytes_of(slabs[s], 0, "slabs"), slabs[s].numel()};
        note(maps[s]), note(slabs[s]);
    }
    cache.counts = cache_counts_of(counts);
    note(counts);
    if (slot_bytes != 0) {
        require(maps.size() == 1 && stamps && clock, "a cache that replaces rows has one slab, stamps and a clock");
        cache.lru = lru_of(slabs[0], maps[0], ways, slot_bytes, *stamps, *clock);
        note(*stamps), note(*clock);
    }
    cache.device = device.is_cuda() ? counts.get_device_index() : -1;
    cache.mark = ibp::CacheHandle::kMark;
    return bytes_of_struct(cache);
}

// ---- looking up rows ----

// Looks up the rows of items in a cache, and fills `entries`.
//
// rows_per_item, row_bytes: the number of rows of an item of the table, and the size of a row in bytes.
// lengths: uint16 [rows], the lengths of the table; empty: every row is raw.
// counts: may be None.
void find_cached(const Device &device, const Tensor &ids, int64_t rows_per_item, int64_t row_bytes,
                 const Tensor &lengths, const Near &maps, int64_t ways, const Out &entries,
                 const std::optional<Out> &counts)
{
    const ibp_ids items = ids_of(ids);
    const std::vector<ibp_cache_map> found = maps_of(maps, ways);
    ibp_cache_counts *const to_counts = cache_counts_of(counts);
    require(rows_per_item >= 1, "rows_per_item is ", rows_per_item);
    uint64_t *const to = unsigned_longs_of(entries, total_bytes(items.count, rows_per_item, "ids"), "entries");
    ibp_row_query query{&items, rows_per_item, row_bytes_of(row_bytes), lengths_of(lengths, 0), INT64_MAX};
    if (query.lengths) query.num_rows = lengths.numel();
    find_in_maps(device, query, found.data(), static_cast<uint32_t>(found.size()), to, to_counts);
}

// Returns uint8 [rows]: for each row the number of the only slab, out of num_slabs slabs, that may hold it. A row is
// looked up only in the map of that slab.
Tensor owners_of_rows(const Device &device, const Tensor &rows, int64_t num_slabs)
{
    Tensor found = new_tensor(rows, {rows.numel()}, ScalarType::Byte);
    const int64_t *const numbers = longs_of(rows, 0, "rows");
    const uint32_t slabs = to_u32(num_slabs, 1, IBP_MAX_SLABS, "num_slabs");
    uint8_t *const owners = bytes_of(found, 0, "owners");
    run_on(device, "owners_of_rows", ibp_cuda_owners_of_rows, ibp_owners_of_rows, numbers, rows.numel(), slabs, owners);
    return found;
}

// ---- filling a slab ----

// Copies stored rows of a table, without decoding them, to `bytes`, the memory of a slab, and enters the rows in `map`,
// the slab's map. If `map` has no elements, the rows are only copied.
//
// offsets: int64 [rows]: for each row the index in `bytes` of its first byte. Rows with a negative offset are left out.
// slab: the number of the slab in its cache.
void fill_slab(const Device &device, const Table &handle, const Tensor &rows, const Tensor &offsets, int64_t number,
               int64_t ways, const Out &bytes, const Out &map, const Out &fault)
{
    const ibp_table &table = handle.table();
    const int64_t *const numbers = longs_of(rows, 0, "rows"), *const places =
                                                                  longs_of(offsets, rows.numel(), "offsets");
    const ibp_cache_slab slab = slab_of(bytes, map, number, ways);
    rows_per_item_of(table);
    ibp_fault *const first_fault = fault_of(fault);
    if (device.is_cuda()) {
        check(ibp_cuda_fill_slab(&table, numbers, places, rows.numel(), &slab, first_fault, device.stream()),
              "fill_slab");
        return;
    }
    over_ranges(rows.numel(), table.codebook.row_bytes, 0, first_fault,
                [&](int64_t first, int64_t last, uint8_t *, ibp_fault *mine) {
                    return ibp_fill_slab(&table, numbers, places, first, last, &slab, mine);
                });
}

// ---- replacing the least recently used rows ----

// Looks up the rows of items in a cache that replaces its rows. Missing rows are copied into the cache in place of the
// rows that were used longest ago. An id out of range and a corrupt row are noted in fault.
//
// ways: 32.
// cache_slot_bytes: the size in bytes of each way's slot in `bytes`, a multiple of 32. Longer rows are not cached.
// counts: may be None.
void claim_cached(const Device &device, const Table &handle, const Tensor &ids, int64_t ways, int64_t slot_bytes,
                  const Out &bytes, const Out &map, const Out &stamps, const Out &clock, const Out &entries,
                  const std::optional<Out> &counts, const Out &fault)
{
    const ibp_table &table = handle.table();
    const ibp_ids items = ids_of(ids);
    const ibp_lru lru = lru_of(bytes, map, ways, slot_bytes, stamps, clock);
    ibp_cache_counts *const to_counts = cache_counts_of(counts);
    const int64_t num_rows = total_bytes(items.count, rows_per_item_of(table), "rows");
    uint64_t *const to = unsigned_longs_of(entries, num_rows, "entries");
    claim_ways(device, table, items, lru, to, to_counts, fault_of(fault));
}

// ---- removing and rewriting rows ----

// Removes rows from a map.
void drop_cached(const Device &device, const Tensor &rows, int64_t ways, const Out &map)
{
    const ibp_cache_map changed = map_of(map, ways);
    const int64_t *const numbers = longs_of(rows, 0, "rows");
    run_on(device, "drop_cached", ibp_cuda_drop_cached, ibp_drop_cached, numbers, rows.numel(), &changed);
}

// Notes in a map that the cached bytes of rows have been rewritten.
//
// lengths: uint16 [rows], the rows' new lengths; empty: the lengths have not changed.
// dirty: true if the cached rows are newer than the rows in the table.
void set_cached(const Device &device, const Tensor &rows, const Tensor &lengths, int64_t ways, bool dirty,
                const Out &map)
{
    const ibp_cache_map changed = map_of(map, ways);
    const int64_t *const numbers = longs_of(rows, 0, "rows");
    const uint16_t *const entries = lengths_of(lengths, rows.numel());
    run_on(device, "set_cached", ibp_cuda_set_cached, ibp_set_cached, numbers, entries, rows.numel(), dirty, &changed);
}

template <typename Library> void implement(Library &m)
{
    operation<find_cached>(m, "find_cached", "ids rows_per_item row_bytes lengths maps ways entries counts");
    operation<describe_cache>(m, "describe_cache", "maps ways slabs counts stamps clock slot_bytes");
    operation<owners_of_rows>(m, "owners_of_rows", "rows num_slabs");
    operation<fill_slab>(m, "fill_slab", "table rows offsets slab ways bytes map fault");
    operation<claim_cached>(m, "claim_cached",
                            "table ids ways cache_slot_bytes bytes map stamps clock entries counts fault");
    operation<drop_cached>(m, "drop_cached", "rows ways map");
    operation<set_cached>(m, "set_cached", "rows lengths ways dirty map");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m) { implement(m); }
