// torch_cache_ops.cpp - the operations of a cache of rows (ibp.h) in torch.ops.ibp: tensors to pointers, nothing else.
// Schemas and fake implementations are in ibp/_common/ops.py.
#include "torch_ranges.h"
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
    const int64_t numbers = 2 * ways; // of a set
    m.rows = static_cast<ibp_cached_row *>(static_cast<void *>(data_of<int64_t>(map, ScalarType::Long, 0, "map")));
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
    if (!counts) return nullptr;
    return static_cast<ibp_cache_counts *>(static_cast<void *>(unsigned_longs_of(*counts, kNumbers, "counts")));
}

// Rows of an item; items must be whole rows.
int64_t rows_per_item_of(const ibp_table &table)
{
    const int64_t row_bytes = table.codebook.row_bytes;
    require(table.item_bytes > 0 && table.item_bytes % row_bytes == 0, "items of ", table.item_bytes,
            " bytes are not whole rows of ", row_bytes, ", of which a cache is made");
    return table.item_bytes / row_bytes;
}

const int64_t *rows_of(const Tensor &rows) { return data_of<int64_t>(rows, ScalarType::Long, 0, "rows"); }

// ---- find ----

struct Find {
    ibp_ids ids;
    ibp_row_query query;
    std::vector<ibp_cache_map> maps;
    uint64_t *entries;
    ibp_cache_counts *counts;
};

#define IBP_FIND_PARAMETERS                                                                                       \
    Tensor ids, int64_t rows_per_item, int64_t row_bytes, Tensor lengths, std::vector<Tensor> maps, int64_t ways, \
        Tensor entries, std::optional<Tensor> counts
#define IBP_FIND_ARGUMENTS ids, rows_per_item, row_bytes, lengths, maps, ways, entries, counts

// query.ids is for the caller to set.
Find prepare_find(IBP_FIND_PARAMETERS)
{
    Find call{ids_of(ids), {}, maps_of(maps, ways), nullptr, cache_counts_of(counts)};
    require(rows_per_item >= 1, "rows_per_item is ", rows_per_item);
    call.entries = unsigned_longs_of(entries, total_bytes(call.ids.count, rows_per_item, "ids"), "entries");
    call.query.rows_per_item = rows_per_item;
    call.query.row_bytes = to_u32(row_bytes, 1, IBP_MAX_ROW_BYTES, "row_bytes");
    call.query.lengths = data_of<uint16_t>(lengths, ScalarType::UInt16, 0, "lengths");
    call.query.num_rows = call.query.lengths ? lengths.numel() : INT64_MAX;
    Footprints memory;
    memory.reads("ids", ids);
    memory.reads("lengths", lengths);
    for (const Tensor &map : maps) memory.reads("maps", map);
    memory.writes("entries", entries);
    if (counts) memory.writes("counts", *counts);
    return call;
}

void find_cached_cpu(IBP_FIND_PARAMETERS)
{
    require_cpu({&ids, &lengths, &entries, counts ? &*counts : &ids});
    for (const Tensor &map : maps) require_cpu({&map});
    Find call = prepare_find(IBP_FIND_ARGUMENTS);
    call.query.ids = &call.ids;
    constexpr int64_t kBytesOfRow = 128; // what a look-up at a random place takes as long as
    ibp_fault unused{};
    over_ranges(call.ids.count, rows_per_item * kBytesOfRow, 0, &unused,
                [&](int64_t first, int64_t last, uint8_t *, ibp_fault *) {
                    return ibp_find_cached(&call.query, call.maps.data(), static_cast<uint32_t>(call.maps.size()),
                                           first, last, call.entries, call.counts);
                });
}

void find_cached_cuda(IBP_FIND_PARAMETERS)
{
    const auto device = use_cuda(ids, {&lengths, &entries, counts ? &*counts : &ids});
    require_cuda(maps);
    Find call = prepare_find(IBP_FIND_ARGUMENTS);
    call.query.ids = &call.ids;
    check(ibp_cuda_find_cached(&call.query, call.maps.data(), static_cast<uint32_t>(call.maps.size()), call.entries,
                               call.counts, current_stream(ids)),
          "find_cached");
}

template <typename Owners> Tensor owners_of_rows(const Tensor &rows, int64_t num_slabs, const Owners &owners)
{
    Tensor found = new_tensor(rows, {rows.numel()}, ScalarType::Byte);
    check(owners(rows_of(rows), to_u32(num_slabs, 1, IBP_MAX_SLABS, "num_slabs"), bytes_of(found, 0, "owners")),
          "owners_of_rows");
    return found;
}

Tensor owners_of_rows_cpu(Tensor rows, int64_t num_slabs)
{
    return owners_of_rows(rows, num_slabs, [&](const int64_t *data, uint32_t slabs, uint8_t *owners) {
        return ibp_owners_of_rows(data, rows.numel(), slabs, owners);
    });
}

Tensor owners_of_rows_cuda(Tensor rows, int64_t num_slabs)
{
    const auto device = use_cuda(rows, {});
    return owners_of_rows(rows, num_slabs, [&](const int64_t *data, uint32_t slabs, uint8_t *owners) {
        return ibp_cuda_owners_of_rows(data, rows.numel(), slabs, owners, current_stream(rows));
    });
}

// ---- gather ----

#define IBP_GATHER_CACHED_PARAMETERS                                                                          \
    IBP_TABLE_PARAMETERS, Tensor ids, Tensor entries, std::vector<Tensor> slabs, int64_t max_sms, Tensor out, \
        Tensor fault, std::optional<Tensor> positions

struct GatherCached {
    ibp_table table;
    ibp_ids ids;
    ibp_cache cache;
};

GatherCached prepare_gather(const TableArgs &args, const Tensor &ids, const Tensor &entries,
                            const std::vector<Tensor> &slabs, const Tensor &out, const Tensor &fault,
                            const std::optional<Tensor> &positions)
{
    GatherCached call{args.table(), placed_ids_of(ids, positions, out, args.item_bytes), {}};
    const int64_t num_rows = total_bytes(call.ids.count, rows_per_item_of(call.table), "rows");
    call.cache = cache_of(entries, slabs, num_rows);
    Footprints memory = gather_footprints(args, call.table, call.ids, out, fault);
    memory.reads("entries", entries);
    for (const Tensor &slab : slabs) memory.reads("slabs", slab);
    return call;
}

void gather_cached_cpu(IBP_GATHER_CACHED_PARAMETERS)
{
    require_cpu({&out, IBP_TABLE_TENSORS, &ids, &entries, &fault, positions ? &*positions : &ids});
    for (const Tensor &slab : slabs) require_cpu({&slab});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const GatherCached call = prepare_gather(args, ids, entries, slabs, out, fault, positions);
    sms_of(max_sms);
    uint8_t *const to = room_of(out, 0, "out");
    const size_t scratch_bytes = ibp_scratch_bytes(call.table.codebook.row_bytes);
    over_ranges(call.ids.count, item_bytes, scratch_bytes, fault_of(fault),
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                    return ibp_gather_cached(&call.table, &call.ids, &call.cache, first, last, to, scratch,
                                             scratch_bytes, mine);
                });
}

void gather_cached_cuda(IBP_GATHER_CACHED_PARAMETERS)
{
    const auto device = use_cuda(out, {IBP_TABLE_TENSORS, &ids, &entries, &fault, positions ? &*positions : &ids});
    require_cuda(slabs);
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const GatherCached call = prepare_gather(args, ids, entries, slabs, out, fault, positions);
    check(ibp_cuda_gather_cached(&call.table, &call.ids, &call.cache, room_of(out, 0, "out"), fault_of(fault),
                                 sms_of(max_sms), current_stream(out)),
          "gather_cached");
}

// ---- fill ----

#define IBP_FILL_PARAMETERS                                                                                  \
    IBP_TABLE_PARAMETERS, Tensor rows, Tensor offsets, int64_t slab, int64_t ways, Tensor bytes, Tensor map, \
        Tensor fault

struct Fill {
    ibp_table table;
    const int64_t *rows, *offsets;
    ibp_cache_slab slab;
};

Fill prepare_fill(const TableArgs &args, const Tensor &rows, const Tensor &offsets, int64_t slab, int64_t ways,
                  const Tensor &bytes, const Tensor &map, const Tensor &fault)
{
    Fill call{args.table(), rows_of(rows), data_of<int64_t>(offsets, ScalarType::Long, rows.numel(), "offsets"),
              slab_of(bytes, map, slab, ways)};
    rows_per_item_of(call.table);
    Footprints memory = args.footprints(call.table);
    memory.reads("rows", rows);
    memory.reads("offsets", offsets);
    memory.writes("bytes", bytes);
    memory.writes("map", map);
    memory.writes("fault", fault);
    return call;
}

void fill_slab_cpu(IBP_FILL_PARAMETERS)
{
    require_cpu({&bytes, IBP_TABLE_TENSORS, &rows, &offsets, &map, &fault});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const Fill call = prepare_fill(args, rows, offsets, slab, ways, bytes, map, fault);
    over_ranges(rows.numel(), call.table.codebook.row_bytes, 0, fault_of(fault),
                [&](int64_t first, int64_t last, uint8_t *, ibp_fault *mine) {
                    return ibp_fill_slab(&call.table, call.rows, call.offsets, first, last, &call.slab, mine);
                });
}

void fill_slab_cuda(IBP_FILL_PARAMETERS)
{
    const auto device = use_cuda(bytes, {IBP_TABLE_TENSORS, &rows, &offsets, &map, &fault});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const Fill call = prepare_fill(args, rows, offsets, slab, ways, bytes, map, fault);
    check(ibp_cuda_fill_slab(&call.table, call.rows, call.offsets, rows.numel(), &call.slab, fault_of(fault),
                             current_stream(bytes)),
          "fill_slab");
}

// ---- the least recently used ----

#define IBP_CLAIM_PARAMETERS                                                                                           \
    IBP_TABLE_PARAMETERS, Tensor ids, int64_t ways, int64_t cache_slot_bytes, Tensor bytes, Tensor map, Tensor stamps, \
        Tensor clock, Tensor entries, std::optional<Tensor> counts, Tensor fault

struct Claim {
    ibp_table table;
    ibp_ids ids;
    ibp_lru lru;
    uint64_t *entries;
    ibp_cache_counts *counts;
};

Claim prepare_claim(const TableArgs &args, const Tensor &ids, int64_t ways, int64_t slot_bytes, const Tensor &bytes,
                    const Tensor &map, const Tensor &stamps, const Tensor &clock, const Tensor &entries,
                    const std::optional<Tensor> &counts, const Tensor &fault)
{
    Claim call{args.table(),
               ids_of(ids),
               {slab_of(bytes, map, 0, ways), 0, nullptr, nullptr},
               nullptr,
               cache_counts_of(counts)};
    require(ways == IBP_SEARCHED_WAYS, "ways is ", ways, ", not 32");
    call.lru.slot_bytes = to_u32(slot_bytes, IBP_OVERFLOW_ALIGN, IBP_MAX_ROW_BYTES, "slot_bytes");
    require(slot_bytes % IBP_OVERFLOW_ALIGN == 0, "slot_bytes is ", slot_bytes, ", not a multiple of 32");
    const int64_t num_sets = call.lru.slab.map.num_sets, needed = total_bytes(num_sets * ways, slot_bytes, "bytes");
    require(bytes.numel() >= needed, "bytes has ", bytes.numel(), " bytes, ", needed, " are needed");
    const auto *of_ways = data_of<int32_t>(stamps, ScalarType::Int, num_sets * (ways + 1), "stamps");
    call.lru.stamps = const_cast<uint32_t *>(static_cast<const uint32_t *>(static_cast<const void *>(of_ways)));
    call.lru.clock = unsigned_longs_of(clock, 2, "clock");
    const int64_t num_rows = total_bytes(call.ids.count, rows_per_item_of(call.table), "rows");
    call.entries = unsigned_longs_of(entries, num_rows, "entries");
    Footprints memory = args.footprints(call.table);
    memory.reads("ids", ids);
    for (const auto &[name, tensor] : {std::pair<const char *, const Tensor *>{"bytes", &bytes},
                                       {"map", &map},
                                       {"stamps", &stamps},
                                       {"clock", &clock},
                                       {"entries", &entries},
                                       {"fault", &fault}})
        memory.writes(name, *tensor);
    if (counts) memory.writes("counts", *counts);
    return call;
}

void claim_cached_cpu(IBP_CLAIM_PARAMETERS)
{
    require_cpu({&bytes, IBP_TABLE_TENSORS, &ids, &map, &stamps, &clock, &entries, &fault, counts ? &*counts : &ids});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const Claim call =
        prepare_claim(args, ids, ways, cache_slot_bytes, bytes, map, stamps, clock, entries, counts, fault);
    ibp_fault *const first_fault = fault_of(fault);
    const ibp_status status =
        ibp_claim_cached(&call.table, &call.ids, &call.lru, call.entries, call.counts, first_fault);
    require(status != IBP_INVALID_ARGUMENT, "claim_cached: ", ibp_status_string(status));
}

void claim_cached_cuda(IBP_CLAIM_PARAMETERS)
{
    const auto device =
        use_cuda(bytes, {IBP_TABLE_TENSORS, &ids, &map, &stamps, &clock, &entries, &fault, counts ? &*counts : &ids});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const Claim call =
        prepare_claim(args, ids, ways, cache_slot_bytes, bytes, map, stamps, clock, entries, counts, fault);
    check(ibp_cuda_claim_cached(&call.table, &call.ids, &call.lru, call.entries, call.counts, fault_of(fault),
                                current_stream(bytes)),
          "claim_cached");
}

// ---- changes ----

void check_change(const Tensor &rows, const Tensor &lengths, const Tensor &map)
{
    Footprints memory;
    memory.reads("rows", rows);
    memory.reads("lengths", lengths);
    memory.writes("map", map);
}

void drop_cached_cpu(Tensor rows, int64_t ways, Tensor map)
{
    require_cpu({&rows, &map});
    const ibp_cache_map of = map_of(map, ways);
    check_change(rows, rows, map);
    check(ibp_drop_cached(rows_of(rows), rows.numel(), &of), "drop_cached");
}

void drop_cached_cuda(Tensor rows, int64_t ways, Tensor map)
{
    const auto device = use_cuda(map, {&rows});
    const ibp_cache_map of = map_of(map, ways);
    check_change(rows, rows, map);
    check(ibp_cuda_drop_cached(rows_of(rows), rows.numel(), &of, current_stream(map)), "drop_cached");
}

const uint16_t *new_lengths_of(const Tensor &lengths, const Tensor &rows)
{
    return data_of<uint16_t>(lengths, ScalarType::UInt16, lengths.numel() ? rows.numel() : 0, "lengths");
}

void set_cached_cpu(Tensor rows, Tensor lengths, int64_t ways, bool dirty, Tensor map)
{
    require_cpu({&rows, &lengths, &map});
    const ibp_cache_map of = map_of(map, ways);
    check_change(rows, lengths, map);
    check(ibp_set_cached(rows_of(rows), new_lengths_of(lengths, rows), rows.numel(), dirty, &of), "set_cached");
}

void set_cached_cuda(Tensor rows, Tensor lengths, int64_t ways, bool dirty, Tensor map)
{
    const auto device = use_cuda(map, {&rows, &lengths});
    const ibp_cache_map of = map_of(map, ways);
    check_change(rows, lengths, map);
    check(ibp_cuda_set_cached(rows_of(rows), new_lengths_of(lengths, rows), rows.numel(), dirty, &of,
                              current_stream(map)),
          "set_cached");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CPU, m)
{
    m.impl("find_cached", TORCH_BOX(&find_cached_cpu));
    m.impl("owners_of_rows", TORCH_BOX(&owners_of_rows_cpu));
    m.impl("gather_cached", TORCH_BOX(&gather_cached_cpu));
    m.impl("fill_slab", TORCH_BOX(&fill_slab_cpu));
    m.impl("claim_cached", TORCH_BOX(&claim_cached_cpu));
    m.impl("drop_cached", TORCH_BOX(&drop_cached_cpu));
    m.impl("set_cached", TORCH_BOX(&set_cached_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m)
{
    m.impl("find_cached", TORCH_BOX(&find_cached_cuda));
    m.impl("owners_of_rows", TORCH_BOX(&owners_of_rows_cuda));
    m.impl("gather_cached", TORCH_BOX(&gather_cached_cuda));
    m.impl("fill_slab", TORCH_BOX(&fill_slab_cuda));
    m.impl("claim_cached", TORCH_BOX(&claim_cached_cuda));
    m.impl("drop_cached", TORCH_BOX(&drop_cached_cuda));
    m.impl("set_cached", TORCH_BOX(&set_cached_cuda));
}
