// torch_take_ops.cpp - the operations of torch.ops.ibp that fetch items of tables by their ids.
//
// Tables and models use `take`: it allocates its result, decides by the table's plan whether to sort the ids first,
// looks up rows in a cache if there is one, and launches the kernel. `gather_items` launches the same kernel for
// callers that sort, look up and allocate themselves. `take_matrices` fetches the matrices of a mixture of experts from
// several tables that have caches.
//
//     take          table ids like max_sms way from_end cache notes -> Tensor
//     take.out      table ids out max_sms way cache notes
//     take_many     tables ids positions starts max_sms out
//     list_matrices ids num_matrices num_slots num_rows num_spare -> Tensor
//     take_matrices tables caches ids likes num_matrices num_slots num_rows num_spare max_sms beside events -> Tensor[]
//     decode_many   tables max_sms outs                        (CUDA only)
//     gather_items  table ids max_sms out fault positions addresses outer_dims entries slabs
//     partition_ids ids num_items window_bits -> (Tensor, Tensor)
//
// Each operation is documented at its function. torch_tables.h documents the arguments that several files share.
//
// If an item cannot be fetched, because its id is out of range or a row is corrupt, zeros take its place, and there is
// a fault. On a GPU `take`, take_many, take_matrices and decode_many note the fault in the table's own record. On the
// CPU they raise an error. The exception is a call of `take` with `notes` true, as in code that torch.compile has
// compiled: it notes the fault in the table's record on the CPU, too. `gather_items` notes the fault in `fault` on the
// CPU and on a GPU.
#include "huge_pages.h"
#include "torch_tables.h"

#include <algorithm>
#include <memory>
#include <tuple>

namespace {

using namespace ibp_torch;

// Least size in bytes of a result that gets huge pages. With huge pages, filling new memory of this size is several
// times faster.
constexpr int64_t kLeastHugeBytes = 4 << 20;

// The order in which `take` fetches on a GPU. kPlanned: the table's plan chooses the order. kInOrder: the order of the
// ids. kBucketed: the ids are sorted by windows of the table.
enum Way : int64_t { kPlanned, kInOrder, kBucketed };

// ---- the order of windows ----

struct Ordered {
    Tensor ids, positions; // ids: sorted by a table's windows; positions: for each sorted id its original position
};

Ordered in_order(const Device &device, const Tensor &ids, const ibp_ids &items, int64_t num_items, uint32_t bits)
{
    Ordered ordered{new_tensor(ids, {items.count}, ids.scalar_type()), new_tensor(ids, {items.count}, ScalarType::Int)};
    const auto num_bytes = static_cast<int64_t>(ibp_partition_workspace_bytes(items.count, num_items, bits));
    const Tensor workspace = new_tensor(ids, {num_bytes}, ScalarType::Byte);
    run_on(device, "partition_ids", ibp_cuda_partition_ids, ibp_partition_ids, &items, num_items, bits,
           workspace.data_ptr(), ordered.ids.data_ptr(), static_cast<uint32_t *>(ordered.positions.data_ptr()));
    return ordered;
}

// Sorts ids by the windows of a table, which have 2^window_bits items each. num_items: the number of items of the
// table. Returns (ids, positions): the sorted ids in one dimension, and int32 [ids], the position that each sorted id
// had before.
std::tuple<Tensor, Tensor> partition_ids(const Device &device, const Tensor &ids, int64_t num_items,
                                         int64_t window_bits)
{
    const ibp_ids items = ids_of(ids);
    const uint32_t bits = to_u32(window_bits, 0, 62, "window_bits");
    require(num_items >= 0, "num_items is ", num_items);
    require(items.count <= INT32_MAX, "there are ", items.count, " ids, more than 2^31 - 1");
    require(ibp_num_windows(num_items, bits) <= IBP_MAX_WINDOWS, "window_bits is ", window_bits, ": ", num_items,
            " items fall into more than ", IBP_MAX_WINDOWS, " windows");
    const Ordered ordered = in_order(device, ids, items, num_items, bits);
    return {ordered.ids, ordered.positions};
}

// ---- the kernel, on the CPU and on a GPU ----

// Writes items to items.addresses, or to the memory that begins at `to` if items.addresses is nullptr. cache: nullptr
// if all rows come from the table.
void gather(const Device &device, const ibp_table &table, const ibp_ids &items, const ibp_cache *cache, int64_t max_sms,
            uint8_t *to, ibp_fault *fault)
{
    const int sms = sms_of(max_sms);
    if (device.is_cuda()) {
        const ibp_stream stream = device.stream();
        check(cache ? ibp_cuda_gather_cached(&table, &items, cache, to, fault, sms, stream)
                    : ibp_cuda_gather_items(&table, &items, to, fault, sms, stream),
              "gather_items");
        return;
    }
    const size_t scratch_bytes = ibp_scratch_bytes(table.codebook.row_bytes);
    over_ranges(items.count, std::max<int64_t>(table.item_bytes, table.codebook.row_bytes), scratch_bytes, fault,
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                    return cache
                               ? ibp_gather_cached(&table, &items, cache, first, last, to, scratch, scratch_bytes, mine)
                               : ibp_gather_items(&table, &items, first, last, to, scratch, scratch_bytes, mine);
                });
}

// Fetches the items at ids, or all items if ids is None. By default the items are written one after the other to out,
// which is contiguous and of any dtype. At most one of the following three arguments may be given, to write them
// elsewhere:
//
// positions: int32 [ids]; item k goes to position positions[k] of out.
// addresses: int64 [ids]; item k goes to addresses[k], which is trusted. Then the address of out is not used, but
//   out must be the first of the tensors that the addresses point into.
// outer_dims: out has any strides. Its first outer_dims dimensions number the items, and its other dimensions hold one
//   item, contiguously.
//
// entries, slabs: the entries of the rows in a cache, and the cache's slabs; or None. Rows that have an entry are read
//   from slabs, and all other rows from the table. Entries can be combined with positions, but not with addresses or
//   outer_dims.
void gather_items(const Device &device, const Table &handle, const std::optional<Tensor> &ids, int64_t max_sms,
                  const Out &out, const Out &fault, const std::optional<Tensor> &positions,
                  const std::optional<Tensor> &addresses, const std::optional<int64_t> &outer_dims,
                  const std::optional<Tensor> &entries, const std::optional<Near> &slabs)
{
    const ibp_table &table = handle.table();
    ibp_ids items{};
    items.count = table.num_items;
    if (ids) items = ids_of(*ids);
    require(positions.has_value() + addresses.has_value() + outer_dims.has_value() <= 1,
            "positions, addresses and outer_dims do not go together");
    uint8_t *to = nullptr;
    if (addresses)
        items.addresses = unsigned_longs_of(*addresses, items.count, "addresses");
    else if (outer_dims)
        to = spread_over(out, *outer_dims, table.item_bytes, &items).data;
    else
        to = room_of(out, positions ? 0 : total_bytes(items.count, table.item_bytes, "items"), "out");
    if (positions) {
        items.positions = data_of<uint32_t>(*positions, ScalarType::Int, items.count, "positions");
        items.out_items = table.item_bytes ? memory_of(out, "out").num_bytes / table.item_bytes : 0;
    }
    ibp_cache found{};
    if (entries) {
        require(slabs && !addresses && !outer_dims, "entries go with slabs, and with no addresses or outer_dims");
        found = cache_of(*entries, *slabs, total_bytes(items.count, rows_per_item_of(table), "rows"));
    }
    ibp_fault *const first_fault = fault_of(fault);
    if (outer_dims && to == nullptr) return;
    gather(device, table, items, entries ? &found : nullptr, max_sms, to, first_fault);
}

// ---- take ----

// Looks up the rows of items in a cache and fills `entries`. Returns the struct that a gather needs to read these
// entries.
ibp_cache find(const Device &device, const ibp_table &table, const ibp_ids &items, const ibp::CacheHandle &cache,
               uint64_t *entries, ibp_fault *fault)
{
    ibp_cache found = cache.slabs;
    found.entries = entries;
    if (cache.lru.slot_bytes != 0) {
        claim_ways(device, table, items, cache.lru, entries, cache.counts, fault);
        return found;
    }
    const int64_t rows_per_item = rows_per_item_of(table);
    const ibp_row_query query{&items, rows_per_item, table.codebook.row_bytes, table.lengths,
                              table.num_items * rows_per_item};
    find_in_maps(device, query, cache.maps, found.num_slabs, entries, cache.counts);
    return found;
}

// Fetches items of a table through a cache, in the order of the ids. entries: room for the entries of the items' rows.
void fetch_cached(const Device &device, const ibp_table &table, const ibp_ids &items, const ibp::CacheHandle &cache,
                  uint64_t *entries, int64_t max_sms, uint8_t *to, ibp_fault *fault)
{
    const ibp_cache found = find(device, table, items, cache, entries, fault);
    gather(device, table, items, &found, max_sms, to, fault);
}

// Throws if a fault was noted on the CPU.
void require_no_fault(const ibp_fault &raised)
{
    require(raised.status == IBP_OK, ibp_status_string(static_cast<ibp_status>(raised.status)));
}

// Asks for huge pages for a large new result on the CPU.
void prepare_result(const Device &device, const Tensor &out, int64_t num_bytes)
{
    if (!device.is_cuda() && num_bytes >= kLeastHugeBytes)
        ibp::ask_for_huge_pages(reinterpret_cast<uintptr_t>(out.data_ptr()), static_cast<size_t>(num_bytes));
}

int32_t dtype_of(const Tensor &tensor)
{
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    return dtype;
}

// Fetches items for `take` and `take.out`. items: the ids, and the position of each item in the buffer `to`. ids: any
// tensor on the device of the call, because new tensors are made on its device. If the call may sort the ids, `ids`
// must be the tensor that holds them, because the sorted ids get its dtype.
void fetch(const Device &device, const Source &handle, const Tensor &ids, ibp_ids items, int64_t max_sms, int64_t way,
           const std::optional<Cache> &cache, bool notes, uint8_t *to)
{
    const ibp_table &table = handle.table();
    const ibp::GatherPlan &plan = handle.plan;
    notes = notes || device.is_cuda();
    require(way >= kPlanned && way <= kBucketed, "way is ", way);
    require(!notes || handle.fault != nullptr, "table is described without a fault record");
    if (items.count == 0 || (cache && table.item_bytes == 0)) return;
    ibp_fault raised{};
    ibp_fault *const fault = notes ? handle.fault : &raised;
    std::optional<Ordered> ordered;
    if (device.is_cuda() && (way == kBucketed || (way == kPlanned && items.count >= plan.least_bucketed))) {
        require(items.count <= INT32_MAX, "there are ", items.count, " ids, more than 2^31 - 1");
        require(ibp_num_windows(table.num_items, plan.window_bits) <= IBP_MAX_WINDOWS, "the plan has too many windows");
        ordered = in_order(device, ids, items, table.num_items, plan.window_bits);
        items.data = ordered->ids.data_ptr(), items.out_items = items.count;
        items.positions = static_cast<const uint32_t *>(ordered->positions.data_ptr());
        max_sms = max_sms != 0 ? max_sms : plan.bucketed_sms;
    }
    if (!cache) {
        gather(device, table, items, nullptr, max_sms, to, fault);
    } else {
        const int64_t num_rows = total_bytes(items.count, rows_per_item_of(table), "rows");
        const Tensor entries = new_tensor(ids, {num_rows}, ScalarType::Long);
        fetch_cached(device, table, items, *cache, static_cast<uint64_t *>(entries.data_ptr()), max_sms, to, fault);
    }
    require_no_fault(raised);
}

// Reads a tensor of ids, [ids] with any strides. If it is not contiguous, `kept` receives a contiguous copy, which must
// live as long as the result is used.
ibp_ids read_ids(const Tensor &ids, std::optional<Tensor> *kept)
{
    require(ids.dim() == 1, "ids has ", ids.dim(), " dimensions, 1 is needed");
    if (ids.is_contiguous()) return ids_of(ids);
    *kept = contiguous_copy(ids);
    return ids_of(**kept);
}

// Returns the items at ids: [ids, *item].
//
// ids: [ids] with any strides, on the device of the table.
// like: a tensor with the dtype of the result. Its dimensions after the first are those of an item.
// way: a Way as a number. The CPU always fetches in the order of the ids.
// from_end: the table's number of items if ids below 0 count from the end; 0 if ids below 0 are out of range.
// cache: None, or a cache of the table's rows, which the call reads and updates.
// notes: if true, the CPU notes a fault in the table's record, which must exist, and raises no error.
Tensor take(const Device &device, const Source &handle, const Tensor &ids, const Tensor &like, int64_t max_sms,
            int64_t way, int64_t from_end, const std::optional<Cache> &cache, bool notes)
{
    const ibp_table &table = handle.table();
    std::optional<Tensor> kept;
    ibp_ids items = read_ids(ids, &kept);
    require(from_end == 0 || from_end == table.num_items, "from_end is ", from_end);
    items.from_end = from_end;
    std::vector<int64_t> sizes{items.count};
    for (int64_t d = 1; d < like.dim(); d++) sizes.push_back(like.size(d));
    const Tensor out = new_tensor(ids, sizes, dtype_of(like));
    const int64_t num_bytes = total_bytes(items.count, table.item_bytes, "items");
    require(out.numel() * static_cast<int64_t>(out.element_size()) == num_bytes, "like has items of other bytes than ",
            table.item_bytes);
    prepare_result(device, out, num_bytes);
    fetch(device, handle, kept ? *kept : ids, items, max_sms, way, cache, notes,
          static_cast<uint8_t *>(out.data_ptr()));
    return out;
}

// Returns the number of leading dimensions of out that number the items, or -1 if out must be written through a copy. A
// copy is needed if an item is not contiguous, if two items share memory, or if too many dimensions number the items.
int64_t outer_dims_of(const Tensor &out, int64_t item_bytes)
{
    const auto element_bytes = static_cast<int64_t>(out.element_size());
    int64_t num_bytes = element_bytes, dims = out.dim();
    while (dims > 0 && num_bytes < item_bytes && out.stride(dims - 1) * element_bytes == num_bytes)
        num_bytes *= out.size(--dims);
    Steps steps;
    for (int64_t d = 0; d < dims; d++)
        if (out.size(d) > 1) steps.push_back({out.stride(d) * element_bytes, out.size(d)});
    const bool is_possible = num_bytes == item_bytes && steps.size() <= IBP_MAX_OUT_DIMS;
    return is_possible && bytes_of_items(steps, item_bytes) >= 0 ? dims : -1;
}

// Fetches items as `take` does, but writes them to out: [ids, *item] with any strides. out may have several leading
// dimensions in place of [ids]. If ids is None, all items are fetched in their order. The call may allocate workspace,
// and a copy of out if the items are not contiguous in out.
void take_out(const Device &device, const Source &handle, const std::optional<Tensor> &ids, const Out &out,
              int64_t max_sms, int64_t way, const std::optional<Cache> &cache, bool notes)
{
    const ibp_table &table = handle.table();
    std::optional<Tensor> kept;
    ibp_ids items{};
    items.count = table.num_items;
    if (ids) items = read_ids(*ids, &kept);
    require(ids || way == kInOrder, "all items are taken in the order given");
    const Tensor &read = kept ? *kept : ids ? *ids : out;
    const int64_t num_bytes = total_bytes(items.count, table.item_bytes, "items");
    const int64_t out_bytes = out.numel() * static_cast<int64_t>(out.element_size());
    require(out_bytes == num_bytes, "out has ", out_bytes, " bytes, ", num_bytes, " are needed");
    const auto fetch_to = [&](uint8_t *to) { fetch(device, handle, read, items, max_sms, way, cache, notes, to); };
    const int64_t outer_dims = num_bytes == 0 || out.is_contiguous() ? 0 : outer_dims_of(out, table.item_bytes);
    if (num_bytes == 0 || out.is_contiguous()) {
        fetch_to(room_of(out, num_bytes, "out"));
    } else if (outer_dims >= 0) {
        fetch_to(spread_over(out, outer_dims, table.item_bytes, &items).data);
    } else {
        const Tensor result = new_tensor(out, sizes_of(out), out.scalar_type());
        fetch_to(static_cast<uint8_t *>(result.data_ptr()));
        Tensor to = out;
        torch::stable::copy_(to, result);
    }
}

// ---- several tables in one call ----

// Throws if a table overlaps memory that the call writes, or if the call notes faults and the table has no record.
void require_apart(const Device &device, const ibp::TableHandle &handle, const Memory &written)
{
    require(!device.is_cuda() || handle.fault != nullptr, "a table is described without a fault record");
    for (uint32_t p = 0; p < ibp::kNumParts; p++)
        require(!handle.parts[p].meets(written), ibp::kPartNames[p], " of a table and out share memory");
}

// Fetches items of several tables, whose items must all have the same size. Elements ids[starts[t]] to
// ids[starts[t + 1] - 1] are ids of items of table t.
//
// positions: int32 [ids]; the item at ids[k] goes to position positions[k] of out.
// starts: one number for each table, ascending from 0, followed by the number of ids.
// out: contiguous, any dtype.
void take_many(const Device &device, const ListOf<Listed> &tables, const Tensor &ids, const Tensor &positions,
               const std::vector<int64_t> &starts, int64_t max_sms, const Out &out)
{
    const std::vector<Listed> &handles = tables.each;
    const ibp_ids items = ids_of(ids);
    const Memory memory = memory_of(out, "out");
    const uint32_t *const places = data_of<uint32_t>(positions, ScalarType::Int, items.count, "positions");
    require(starts.size() == handles.size() + 1 && starts.front() == 0 && starts.back() == items.count &&
                std::is_sorted(starts.begin(), starts.end()),
            "starts are not those of ", static_cast<int64_t>(handles.size()), " tables and ", items.count, " ids");
    std::vector<ibp_ids> parts(handles.size(), items);
    std::vector<ibp_gather> gathers;
    ibp_fault raised{};
    for (size_t t = 0; t < handles.size(); t++) {
        const ibp_table &table = handles[t].table();
        require(table.item_bytes == handles[0].table().item_bytes && table.item_bytes > 0,
                "tables have items of other sizes");
        require_apart(device, handles[t], memory);
        parts[t].count = starts[t + 1] - starts[t];
        parts[t].data = static_cast<const uint8_t *>(items.data) + starts[t] * items.id_bytes;
        parts[t].positions = places + starts[t], parts[t].out_items = memory.num_bytes / table.item_bytes;
        gathers.push_back({&table, &parts[t], memory.data, handles[t].fault});
        if (!device.is_cuda()) gather(device, table, parts[t], nullptr, max_sms, memory.data, &raised);
    }
    if (device.is_cuda())
        check(ibp_cuda_gather_tables(gathers.data(), static_cast<int64_t>(gathers.size()), sms_of(max_sms),
                                     device.stream()),
              "take_many");
    require_no_fault(raised);
}

// Decodes all items of each table t to outs[t]. outs[t] must be contiguous, may have any dtype, and must have exactly
// the size in bytes of the table's tensor.
void decode_many(const Device &device, const ListOf<Listed> &tables, int64_t max_sms, const Tensors &outs)
{
    const std::vector<Listed> &handles = tables.each;
    require(outs.size() == handles.size(), "there are ", static_cast<int64_t>(outs.size()), " outs of ",
            static_cast<int64_t>(handles.size()), " tables");
    std::vector<ibp_gather> gathers;
    std::vector<Memory> written;
    for (size_t t = 0; t < handles.size(); t++) {
        const ibp_table &table = handles[t].table();
        written.push_back(memory_of(outs[t], "outs"));
        require(written[t].num_bytes == ibp_bytes_of_table(&table), "outs has ", written[t].num_bytes, " bytes, ",
                ibp_bytes_of_table(&table), " are needed");
        require_apart(device, handles[t], written[t]);
        gathers.push_back({&table, nullptr, written[t].data, handles[t].fault});
    }
    std::sort(written.begin(), written.end(), [](const Memory &a, const Memory &b) { return a.data < b.data; });
    for (size_t t = 1; t < written.size(); t++) require(written[t - 1].end() <= written[t].data, "outs share memory");
    check(
        ibp_cuda_gather_tables(gathers.data(), static_cast<int64_t>(gathers.size()), sms_of(max_sms), device.stream()),
        "decode_many");
}

// ---- matrices of stacks ----

// Makes the arguments of ibp_list_matrices, whose results have no memory yet. *total_rows: the number of rows in all
// slots of all stacks.
ibp_listed listing_of(int64_t num_slots, const std::vector<int64_t> &num_rows, const std::optional<Out> &num_spare,
                      int64_t *total_rows)
{
    ibp_listed listed{};
    require(num_rows.size() <= IBP_MOST_LISTED, "num_rows has ", static_cast<int64_t>(num_rows.size()),
            " numbers, more than ", IBP_MOST_LISTED);
    require(num_slots >= 0 && num_slots <= INT32_MAX, "num_slots is ", num_slots);
    listed.num_slots = num_slots, listed.num_stacks = static_cast<uint32_t>(num_rows.size());
    for (size_t i = 0; i < num_rows.size(); i++) {
        require(num_rows[i] >= 1 && num_rows[i] <= INT32_MAX / (num_slots + 1), "num_rows is ", num_rows[i]);
        listed.num_rows[i] = num_rows[i], *total_rows += num_slots * num_rows[i];
    }
    if (num_spare) listed.num_spare = unsigned_longs_of(*num_spare, 1, "num_spare");
    return listed;
}

void list_in_slots(const Device &device, const ibp_ids &ids, int64_t num_matrices, const ibp_listed &listed)
{
    run_on(device, "list_matrices", ibp_cuda_list_matrices, ibp_list_matrices, &ids, num_matrices, &listed);
}

// Lists the matrices that ids ask for, each matrix once and in the order of their numbers, and gives each matrix a
// slot. Returns one int64 tensor with three parts, one after the other:
//
// slots [ids]: the slot of the matrix that each id asks for.
// held [num_slots]: the matrix in each slot, or -1.
// rows [num_slots * num_rows], for each stack: the numbers of the rows of the matrices in the slots, with zeros for
//   unused slots.
//
// Arguments:
//
// num_matrices: the number of matrices. An id out of range asks for matrix num_matrices, which no stack has.
// num_slots: at least the smaller of the number of ids and num_matrices + 1.
// num_rows: for each of up to 16 stacks the number of rows of a matrix.
// num_spare: int64 [1], or None; the number of unused slots is added to it.
Tensor list_matrices(const Device &device, const Tensor &ids, int64_t num_matrices, int64_t num_slots,
                     const std::vector<int64_t> &num_rows, const std::optional<Out> &num_spare)
{
    const ibp_ids matrices = ids_of(ids);
    int64_t total_rows = 0;
    ibp_listed listed = listing_of(num_slots, num_rows, num_spare, &total_rows);
    Tensor numbers = new_tensor(ids, {matrices.count + num_slots + total_rows}, ScalarType::Long);
    listed.slots = static_cast<int64_t *>(numbers.data_ptr());
    listed.held = listed.slots + matrices.count, listed.rows = listed.held + num_slots;
    list_in_slots(device, matrices, num_matrices, listed);
    return numbers;
}

// Returns a new tensor for matrices in slots, with the dtype, the sizes of a matrix and the strides of `like`.
// matrix_bytes: the size of a matrix, which must fill its part of the tensor.
Tensor new_matrices(const Device &device, const Tensor &ids, const Tensor &like, int64_t num_slots,
                    int64_t matrix_bytes)
{
    require(like.dim() > 1, "likes have ", like.dim(), " dimensions, at least 2 are needed");
    const auto element_bytes = static_cast<int64_t>(like.element_size());
    std::vector<int64_t> sizes{num_slots}, strides{like.stride(0)};
    int64_t count = 1;
    Steps steps;
    for (int64_t d = 1; d < like.dim(); d++) {
        sizes.push_back(like.size(d)), strides.push_back(like.stride(d));
        require(sizes.back() > 0 && strides.back() >= 0, "likes have no elements in a dimension, or count backwards");
        count = total_bytes(count, sizes.back(), "likes");
        if (sizes.back() > 1) steps.push_back({strides.back(), sizes.back()});
    }
    const int64_t num_wanted = total_bytes(count, element_bytes, "likes");
    require(num_wanted == matrix_bytes, "likes have matrices of ", num_wanted, " bytes, ", matrix_bytes, " are needed");
    require(bytes_of_items(steps, 1) == count && strides[0] == count,
            "likes have strides that leave gaps or overlap: dense matrices, one after the other, are needed");
    const int64_t num_bytes = total_bytes(num_slots, matrix_bytes, "likes");
    Tensor made = empty_tensor(sizes, strides, dtype_of(like), device_type_of(ids), ids.get_device_index());
    prepare_result(device, made, num_bytes);
    return made;
}

// Lists the matrices that ids ask for, as list_matrices does, and fetches them from each of several stacks, through a
// cache of the stack's rows. Returns [slots, held, work, stack, ...]:
//
// slots: int64, with the sizes of ids: the slot of the matrix that each id asks for.
// held: int64 [num_slots]: the matrix in each slot, or -1.
// work: int64 [2 * rows in all slots of all stacks], the memory with which the call works.
// stack [num_slots, *matrix], for each stack: the matrices in the slots. Every row of an unused slot is the first row
//   of the stack.
//
// On a GPU the lists are made on the current stream, and the matrices are fetched, one stack after the other, on the
// stream `beside`, which first waits for the current stream. The results belong to the current stream. It must wait for
// events[1 + i] before it reads stack i, and for the last event before any of the results is freed. If the call raises
// an error, the current stream waits for everything that the call has queued.
//
// tables: the stacks, whose items are single rows.
// caches: a cache of each table.
// likes: for each stack a tensor on the device of ids with the dtype and the strides of the result. Its dimensions
//   after the first are those of a matrix. A matrix must be dense.
// num_matrices, num_slots, num_rows, num_spare: as in list_matrices.
// max_sms: for each stack.
// beside, events: the addresses of a CUDA stream, and of one CUDA event more than there are stacks. Another call that
//   uses one of these events must not run at the same time. The CPU reads neither.
Tensors take_matrices(const Device &device, const ListOf<Source> &tables, const ListOf<Cache> &caches,
                      const Tensor &ids, const Tensors &likes, int64_t num_matrices, int64_t num_slots,
                      const std::vector<int64_t> &num_rows, const std::optional<Out> &num_spare,
                      const std::vector<int64_t> &max_sms, int64_t beside, const std::vector<int64_t> &events)
{
    const size_t num_stacks = tables.each.size();
    require(caches.each.size() == num_stacks && likes.size() == num_stacks && num_rows.size() == num_stacks &&
                max_sms.size() == num_stacks,
            "tables, caches, likes, num_rows and max_sms must have the same length");
    require(!device.is_cuda() || (beside != 0 && events.size() == num_stacks + 1), "there are ",
            static_cast<int64_t>(events.size()), " events, or no stream: one for each stack and one more are needed");
    const ibp_ids matrices = ids_of(ids);
    int64_t total_rows = 0;
    ibp_listed listed = listing_of(num_slots, num_rows, num_spare, &total_rows);
    const Tensor slots = new_tensor(ids, sizes_of(ids), ScalarType::Long),
                 held = new_tensor(ids, {num_slots}, ScalarType::Long),
                 work = new_tensor(ids, {2 * total_rows}, ScalarType::Long);
    listed.slots = static_cast<int64_t *>(slots.data_ptr()), listed.held = static_cast<int64_t *>(held.data_ptr());
    listed.rows = static_cast<int64_t *>(work.data_ptr());
    Tensors results{slots, held, work};
    for (size_t i = 0; i < num_stacks; i++) {
        const ibp::TableHandle &handle = tables.each[i];
        const ibp_table &table = handle.table();
        require(rows_per_item_of(table) == 1, "an item of a stack has ", rows_per_item_of(table), " rows");
        require(num_matrices > 0 && table.num_items / num_matrices == num_rows[i] &&
                    table.num_items % num_matrices == 0,
                "a stack has ", table.num_items, " rows, not ", num_rows[i], " of each of ", num_matrices, " matrices");
        require(!device.is_cuda() || handle.fault != nullptr, "table is described without a fault record");
        sms_of(max_sms[i]);
        results.push_back(new_matrices(device, ids, likes[i], num_slots, num_rows[i] * table.item_bytes));
    }
    list_in_slots(device, matrices, num_matrices, listed);
    const auto event = [&](size_t number) {
        return reinterpret_cast<ibp_event>(static_cast<uintptr_t>(events[number]));
    };
    const auto stream = reinterpret_cast<ibp_stream>(static_cast<uintptr_t>(device.is_cuda() ? beside : 0));
    const auto fetch_all = [&](const Device &where) {
        const int64_t *rows = listed.rows;
        uint64_t *entries = reinterpret_cast<uint64_t *>(listed.rows) + total_rows;
        for (size_t i = 0; i < num_stacks; i++) {
            const ibp::TableHandle &handle = tables.each[i];
            ibp_fault raised{};
            ibp_ids items{};
            items.data = rows, items.count = num_slots * num_rows[i], items.id_bytes = sizeof *rows;
            if (items.count != 0)
                fetch_cached(where, handle.table(), items, caches.each[i], entries, max_sms[i],
                             static_cast<uint8_t *>(results[3 + i].data_ptr()),
                             where.is_cuda() ? handle.fault : &raised);
            require_no_fault(raised);
            rows += items.count, entries += items.count;
            if (where.is_cuda()) check(ibp_cuda_record_event(event(1 + i), stream), "record_event");
        }
    };
    if (!device.is_cuda()) {
        fetch_all(device);
        return results;
    }
    check(ibp_cuda_wait_for_stream(stream, device.stream(), event(0)), "wait_for_stream");
    try {
        fetch_all(Device(device, stream));
    } catch (...) { // the results, which the fetches may still write, are freed
        ibp_cuda_wait_for_stream(device.stream(), stream, event(0));
        throw;
    }
    return results;
}

template <typename Library> void implement(Library &m)
{
    operation<take>(m, "take", "table ids like max_sms way from_end cache notes");
    operation<take_out>(m, "take.out", "table ids out max_sms way cache notes");
    operation<take_many>(m, "take_many", "tables ids positions starts max_sms out");
    operation<gather_items>(m, "gather_items",
                            "table ids max_sms out fault positions addresses outer_dims entries slabs");
    operation<list_matrices>(m, "list_matrices", "ids num_matrices num_slots num_rows num_spare");
    operation<take_matrices>(m, "take_matrices",
                             "tables caches ids likes num_matrices num_slots num_rows num_spare max_sms beside events");
    operation<partition_ids>(m, "partition_ids", "ids num_items window_bits");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m)
{
    implement(m);
    operation<decode_many>(m, "decode_many", "tables max_sms outs");
}
