// torch_ops.cpp - the operations of tables in torch.ops.ibp: tensors to pointers, nothing else. Schemas and fake
// implementations are in ibp/_common/ops.py.
//
// Built against torch's stable ABI, so that one build serves every torch from 2.10 on, with and without CUDA. The
// operations are public: arguments that contradict each other raise, whatever they are. One function serves the CPU and
// CUDA, where both have the operation: it asks which of them its tensors are on.
#include "torch_ranges.h"
#include "torch_tables.h"

#include <algorithm>
#include <memory>
#include <tuple>

namespace {

using namespace ibp_torch;

// ---- describing tables ----

// The bytes of a struct ibp::TableHandle. rooms, used: of a place. fault, plan: what `take` needs on a GPU; the plan is
// [least_bucketed, window_bits, bucketed_sms], or empty: ids are never put in order.
Tensor describe_table(const Device &device, const Tensor &slots, const Tensor &overflow, const Tensor &lengths,
                      const Tensor &bases, const Tensor &codebook, const Codec &codec, int64_t slot_bytes,
                      int64_t overflow_start, int64_t num_items, int64_t item_bytes, const std::optional<Tensor> &rooms,
                      const std::optional<Tensor> &used, const std::optional<Tensor> &fault,
                      const std::vector<int64_t> &plan)
{
    ibp::TableHandle handle{};
    ibp_place &place = handle.place;
    ibp_table &table = place.table;
    const int64_t num_bytes = total_bytes(num_items, item_bytes, "num_items");
    require(item_bytes <= kMaxBytes, "item_bytes is ", item_bytes);
    table.num_items = num_items, table.item_bytes = item_bytes;
    table.codebook = codebook_of(codebook, codec);
    table.slot_bytes = to_u32(slot_bytes, 0, IBP_MAX_ROW_BYTES, "slot_bytes");
    require(overflow_start >= 0, "overflow_start is ", overflow_start);
    table.overflow_start = static_cast<uint64_t>(overflow_start);
    const int64_t num_rows = divide_up(num_bytes, table.codebook.row_bytes);
    table.slots = place.slots = bytes_of(slots, 0, "slots");
    table.slots_bytes = slots.numel();
    table.overflow = place.overflow = bytes_of(overflow, 0, "overflow");
    table.overflow_bytes = overflow.numel();
    table.lengths = place.lengths =
        data_of<uint16_t>(lengths, ScalarType::UInt16, lengths.numel() ? num_rows : 0, "lengths");
    table.bases = place.bases =
        unsigned_longs_of(bases, bases.numel() ? divide_up(num_rows, IBP_ROWS_PER_BASE) : 0, "bases");
    table.rows_per_base = bases.numel() == num_rows ? 1u : IBP_ROWS_PER_BASE; // the same for a table of one row
    require(table.codebook.scheme != IBP_SCHEME_RAW || !table.lengths, "scheme raw has no lengths");
    if (rooms) place.rooms = data_of<uint16_t>(*rooms, ScalarType::UInt16, rooms->numel() ? num_rows : 0, "rooms");
    if (used) {
        place.used = unsigned_longs_of(*used, 1, "used");
        require(place.bases == nullptr || table.rows_per_base == 1u, "bases has ", bases.numel(),
                " elements, one for each of ", num_rows, " rows is needed");
    }
    const auto note = [&](ibp::TablePart part, const void *data, const Tensor &tensor) {
        const auto first = reinterpret_cast<uintptr_t>(data);
        handle.parts[part] = {first, first + static_cast<uintptr_t>(tensor.numel()) * tensor.element_size()};
    };
    note(ibp::kSlots, place.slots, slots), note(ibp::kOverflow, place.overflow, overflow);
    note(ibp::kLengths, place.lengths, lengths), note(ibp::kBases, place.bases, bases);
    note(ibp::kCodebook, memory_of(codebook, "codebook").data, codebook);
    if (rooms) note(ibp::kRooms, place.rooms, *rooms);
    if (used) note(ibp::kUsed, place.used, *used);
    if (fault) note(ibp::kFault, handle.fault = fault_of(*fault), *fault);
    handle.plan.least_bucketed = INT64_MAX;
    if (!plan.empty()) {
        require(plan.size() == 3, "plan has ", static_cast<int64_t>(plan.size()), " numbers, 3 are needed");
        handle.plan = {plan[0], to_u32(plan[1], 0, 62, "window_bits"), sms_of(plan[2])};
    }
    handle.device = device.is_cuda() ? slots.get_device_index() : -1;
    handle.mark = ibp::TableHandle::kMark;
    return bytes_of_struct(handle);
}

// ---- measuring, indexing and coding rows ----

Tensor measure_rows(const Device &device, const Tensor &data, const Tensor &codebook, const Codec &codec)
{
    const ibp_codebook cb = codebook_of(codebook, codec);
    const uint8_t *const bytes = bytes_of(data, 0, "data");
    const int64_t num_rows = divide_up(data.numel(), cb.row_bytes);
    Tensor lengths = new_tensor(data, {num_rows}, ScalarType::UInt16);
    auto *const out = static_cast<uint16_t *>(lengths.data_ptr());
    if (device.is_cuda()) {
        check(ibp_cuda_measure_rows(&cb, bytes, data.numel(), out, device.stream()), "measure_rows");
        return lengths;
    }
    // Rows are read only: samples of 2^19 elements stay on the calling thread, unless columns are searched one by one.
    const int64_t bytes_as_one = cb.scheme == IBP_SCHEME_PLANES && cb.planes.per_column ? 1 : 4;
    const size_t scratch_bytes = ibp_scratch_bytes(cb.row_bytes);
    ibp_fault unused{};
    over_ranges(num_rows, cb.row_bytes / bytes_as_one, scratch_bytes, &unused,
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *) {
                    const int64_t start = first * cb.row_bytes,
                                  end = std::min<int64_t>(data.numel(), last * cb.row_bytes);
                    return ibp_measure_rows(&cb, bytes + start, end - start, out + first, scratch, scratch_bytes);
                });
    return lengths;
}

// Returns bases and, as the last entry, the bytes of overflow.
Tensor index_rows(const Device &device, const Tensor &lengths, int64_t num_bytes, int64_t row_bytes, int64_t slot_bytes)
{
    const uint32_t bytes = row_bytes_of(row_bytes), slot = to_u32(slot_bytes, 0, IBP_MAX_ROW_BYTES, "slot_bytes");
    require(0 <= num_bytes && num_bytes <= kMaxBytes, "num_bytes is ", num_bytes);
    const int64_t num_rows = divide_up(num_bytes, bytes), num_bases = divide_up(num_rows, IBP_ROWS_PER_BASE);
    const uint16_t *const given =
        data_of<uint16_t>(lengths, ScalarType::UInt16, lengths.numel() ? num_rows : 0, "lengths");
    Tensor bases = new_tensor(lengths, {num_bases + 1}, ScalarType::Long);
    auto *const last = static_cast<int64_t *>(bases.data_ptr()) + num_bases;
    uint64_t *const out = unsigned_longs_of(bases, num_bases, "bases");
    run_on(device, "index_rows", ibp_cuda_index_rows, ibp_index_rows, given, num_bytes, bytes, slot, out, last);
    return bases;
}

// Returns the stored bytes, and how many rows take 0, 1, ... sectors.
Tensor survey_rows(const Device &device, const Tensor &lengths, int64_t num_bytes, int64_t row_bytes)
{
    constexpr int64_t kSectorBytes = IBP_OVERFLOW_ALIGN;
    const uint32_t bytes = row_bytes_of(row_bytes);
    require(0 <= num_bytes && num_bytes <= kMaxBytes, "num_bytes is ", num_bytes);
    const uint16_t *const given =
        data_of<uint16_t>(lengths, ScalarType::UInt16, divide_up(num_bytes, bytes), "lengths");
    Tensor found = new_counts(lengths, 2 + divide_up(row_bytes, kSectorBytes));
    uint64_t *const out = unsigned_longs_of(found, 2, "survey");
    run_on(device, "survey_rows", ibp_cuda_survey_rows, ibp_survey_rows, given, num_bytes, bytes, out);
    return found;
}

void encode_rows(const Device &device, const TableOut &handle, const Tensor &data, const Out &fault)
{
    const ibp_table &table = handle.table();
    const uint8_t *const bytes = bytes_of(data, ibp_bytes_of_table(&table), "data");
    uint8_t *const to_slots = handle.place.slots, *const to_overflow = handle.place.overflow;
    ibp_fault *const first_fault = fault_of(fault);
    if (device.is_cuda()) {
        check(ibp_cuda_encode_rows(&table, bytes, to_slots, to_overflow, first_fault, device.stream()), "encode_rows");
        return;
    }
    const uint32_t row_bytes = table.codebook.row_bytes;
    const size_t scratch_bytes = ibp_scratch_bytes(row_bytes);
    over_ranges(ibp_num_rows(&table), row_bytes, scratch_bytes, first_fault,
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                    return ibp_encode_rows(&table, bytes, first, last, to_slots, to_overflow, scratch, scratch_bytes,
                                           mine);
                });
}

// Fills the place's lengths too.
void encode_slots(const Device &device, const PlaceOut &handle, const Tensor &data)
{
    const ibp_place &place = handle.place;
    require(place.used != nullptr, "table is not described as a place");
    const uint8_t *const bytes = bytes_of(data, ibp_bytes_of_table(&place.table), "data");
    if (device.is_cuda()) {
        check(ibp_cuda_encode_slots(&place, bytes, device.stream()), "encode_slots");
        return;
    }
    const uint32_t row_bytes = place.table.codebook.row_bytes;
    const size_t scratch_bytes = ibp_scratch_bytes(row_bytes);
    ibp_fault unused{};
    over_ranges(ibp_num_rows(&place.table), row_bytes, scratch_bytes, &unused,
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *) {
                    return ibp_encode_slots(&place, bytes, first, last, scratch, scratch_bytes);
                });
}

// Copies a place's parts into overflow, in the order that bases say.
void move_parts(const Device &device, const Table &handle, const Tensor &bases, const Out &overflow)
{
    ibp_table table = handle.place.table;
    const int64_t num_bases = divide_up(ibp_num_rows(&table), IBP_ROWS_PER_BASE);
    table.bases = unsigned_longs_of(bases, num_bases, "bases"), table.rows_per_base = IBP_ROWS_PER_BASE;
    uint8_t *const to = bytes_of(overflow, 0, "overflow");
    table.overflow_bytes = overflow.numel();
    run_on(device, "move_parts", ibp_cuda_move_parts, ibp_move_parts, &table, &handle.place, to);
}

// data: of one block of rows. One thread: callers code several blocks at once. Sizes of rows come as lengths, and their
// sum as stored[0].
void encode_packed(const Device &, const Tensor &data, const Tensor &codebook, const Codec &codec, const Out &out,
                   const Out &lengths, const Out &stored)
{
    const ibp_codebook cb = codebook_of(codebook, codec);
    const uint8_t *const bytes = bytes_of(data, 0, "data");
    uint8_t *const to = bytes_of(out, 0, "out");
    require(out.numel() >= data.numel(), "out has ", out.numel(), " bytes, data ", data.numel());
    auto *const to_lengths =
        data_of<uint16_t>(lengths, ScalarType::UInt16, divide_up(data.numel(), cb.row_bytes), "lengths");
    const size_t scratch_bytes = ibp_scratch_bytes(cb.row_bytes);
    const std::unique_ptr<uint8_t[]> scratch(new uint8_t[scratch_bytes]);
    check(ibp_encode_packed(&cb, bytes, data.numel(), to, out.numel(), to_lengths,
                            data_of<int64_t>(stored, ScalarType::Long, 1, "stored"), scratch.get(), scratch_bytes),
          "encode_packed");
}

// ---- coding rows into a place ----

// A dimension in which something is counted: how many there are, and how many bytes they are apart.
struct Dimension {
    int64_t size, stride;
};

// The dimensions of a tensor in bytes, from the innermost on; dimensions that continue each other are merged. The first
// one is the bytes that lie one after the other.
std::vector<Dimension> dimensions_of(const Tensor &x)
{
    const auto element_bytes = static_cast<int64_t>(x.element_size());
    std::vector<Dimension> dimensions{{element_bytes, 1}};
    for (int64_t d = x.dim(); d-- > 0;) {
        const int64_t size = x.size(d), stride = x.stride(d) * element_bytes;
        Dimension &inner = dimensions.back();
        if (size == 1) continue;
        if (stride == inner.size * inner.stride)
            inner.size *= size;
        else
            dimensions.push_back({size, stride});
    }
    return dimensions;
}

// The elements of a tensor in its own order, as rows. A contiguous one may end with a short row.
ibp_row_source rows_of(const Tensor &x, int64_t row_bytes)
{
    ibp_row_source source{};
    const Memory memory = extent_of(x);
    source.data = memory.data;
    if (memory.data == nullptr) return source;
    std::vector<Dimension> dimensions = dimensions_of(x);
    const int64_t run = dimensions[0].size;
    if (dimensions.size() == 1) {
        source.num_rows = divide_up(run, row_bytes);
        source.last_row_bytes = static_cast<uint32_t>(run - (source.num_rows - 1) * row_bytes);
        return source;
    }
    require(run % row_bytes == 0, "x has runs of ", run, " bytes, which are no whole rows of ", row_bytes);
    dimensions[0] = {run / row_bytes, row_bytes};
    if (dimensions[0].size == 1) dimensions.erase(dimensions.begin());
    require(dimensions.size() <= IBP_MAX_SOURCE_DIMS, "rows of x lie in ", static_cast<int64_t>(dimensions.size()),
            " dimensions, more than 4");
    source.num_rows = 1;
    source.num_dims = static_cast<uint32_t>(dimensions.size());
    for (uint32_t d = 0; d < source.num_dims; d++) { // outermost first there
        source.sizes[source.num_dims - 1 - d] = dimensions[d].size;
        source.strides[source.num_dims - 1 - d] = dimensions[d].stride;
        source.num_rows *= dimensions[d].size; // no more than elements
    }
    return source;
}

// x: rows, of any dtype and strides. buffers: addresses of memory of x's layout, whose rows are coded instead of x's
// own; these are trusted.
ibp_row_source source_of(const Tensor &x, const std::optional<Tensor> &buffers, int64_t row_bytes)
{
    ibp_row_source source = rows_of(x, row_bytes);
    if (buffers) {
        source.buffers = data_of<const uint8_t *>(*buffers, ScalarType::Long, 0, "buffers");
        require(source.num_rows > 0 && source.last_row_bytes % row_bytes == 0, "x has no whole rows of ", row_bytes,
                " bytes");
        source.rows_per_buffer = source.num_rows;
        source.last_row_bytes = 0;
        source.num_rows = total_bytes(buffers->numel(), source.num_rows, "rows of buffers");
    }
    require(source.num_rows <= INT32_MAX, "x has ", source.num_rows, " rows, more than 2^31 - 1");
    return source;
}

void code_rows(const Device &device, const ibp_place &place, const ibp_row_source &source, const int64_t *ids,
               int64_t first_row, int64_t max_sms, ibp_fault *first_fault)
{
    const int sms = sms_of(max_sms);
    if (device.is_cuda()) {
        check(ibp_cuda_encode_into(&place, &source, ids, first_row, first_fault, sms, device.stream()), "encode_into");
        return;
    }
    const uint32_t row_bytes = place.table.codebook.row_bytes;
    const size_t scratch_bytes = ibp_scratch_bytes(row_bytes);
    over_ranges(source.num_rows, row_bytes, scratch_bytes, first_fault,
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                    const ibp_status status =
                        ibp_encode_into(&place, &source, ids, first_row, first, last, scratch, scratch_bytes, mine);
                    return mine->status == IBP_OK ? status : IBP_CORRUPT_ROW; // what is noted does not raise
                });
}

void encode_into(const Device &device, const PlaceOut &handle, const Tensor &x, const std::optional<Tensor> &buffers,
                 const std::optional<Tensor> &row_ids, int64_t first_row, int64_t max_sms, const Out &counts,
                 const Out &fault)
{
    ibp_place place = handle.place;
    require(place.used != nullptr, "table is not described as a place");
    place.counts = data_of<ibp_place_counts>(counts, ScalarType::Long, 2, "counts");
    const uint32_t row_bytes = place.table.codebook.row_bytes;
    const ibp_row_source source = source_of(x, buffers, row_bytes);
    const int64_t num_rows = ibp_rows_of_bytes(ibp_bytes_of_table(&place.table), row_bytes);
    const int64_t *ids = nullptr;
    if (row_ids) {
        ids = data_of<int64_t>(*row_ids, ScalarType::Long, 0, "row_ids");
        require(row_ids->numel() == source.num_rows, "row_ids has ", row_ids->numel(), " elements, x ", source.num_rows,
                " rows");
        first_row = 0;
    } else {
        require(first_row >= 0 && first_row <= num_rows - source.num_rows, source.num_rows, " rows from row ",
                first_row, " on are not among ", num_rows);
    }
    code_rows(device, place, source, ids, first_row, max_sms, fault_of(fault));
}

// ---- lists of ids ----

// (numbers of vectors in the order of their matrices, int64 as many as ids; groups of them, int32 [groups, 3]).
std::tuple<Tensor, Tensor> group_vectors(const Device &device, const Tensor &ids, int64_t num_matrices)
{
    const ibp_ids matrices = ids_of(ids);
    require(matrices.count <= IBP_MOST_GROUPED, "there are ", matrices.count, " vectors, more than ", IBP_MOST_GROUPED);
    require(num_matrices >= 0 && num_matrices <= IBP_MOST_STACKED, "num_matrices is ", num_matrices, "; wanted 0 to ",
            IBP_MOST_STACKED);
    const int64_t num_groups = std::min(matrices.count, num_matrices) + matrices.count / IBP_MOST_OF_A_GROUP;
    Tensor order = new_tensor(ids, {matrices.count}, ScalarType::Long),
           groups = new_tensor(ids, {num_groups, 3}, ScalarType::Int);
    auto *const numbers = static_cast<int64_t *>(order.data_ptr());
    auto *const list = static_cast<ibp_vector_group *>(groups.data_ptr());
    run_on(device, "group_vectors", ibp_cuda_group_vectors, ibp_group_vectors, &matrices, num_matrices, numbers, list,
           num_groups);
    return {order, groups};
}

// Of ibp_listed: slots [ids], held [num_slots] and rows of stacks, one after the other.
Tensor list_matrices(const Device &device, const Tensor &ids, int64_t num_matrices, int64_t num_slots,
                     const std::vector<int64_t> &num_rows, const std::optional<Out> &num_spare)
{
    const ibp_ids matrices = ids_of(ids);
    ibp_listed listed{};
    require(num_rows.size() <= IBP_MOST_LISTED, "num_rows has ", static_cast<int64_t>(num_rows.size()),
            " numbers, more than ", IBP_MOST_LISTED);
    require(num_slots >= 0 && num_slots <= INT32_MAX, "num_slots is ", num_slots);
    listed.num_slots = num_slots, listed.num_stacks = static_cast<uint32_t>(num_rows.size());
    int64_t total = matrices.count + num_slots;
    for (size_t i = 0; i < num_rows.size(); i++) {
        require(num_rows[i] >= 1 && num_rows[i] <= INT32_MAX / (num_slots + 1), "num_rows is ", num_rows[i]);
        listed.num_rows[i] = num_rows[i], total += num_slots * num_rows[i];
    }
    if (num_spare) listed.num_spare = unsigned_longs_of(*num_spare, 1, "num_spare");
    Tensor numbers = new_tensor(ids, {total}, ScalarType::Long);
    listed.slots = static_cast<int64_t *>(numbers.data_ptr());
    listed.held = listed.slots + matrices.count, listed.rows = listed.held + num_slots;
    run_on(device, "list_matrices", ibp_cuda_list_matrices, ibp_list_matrices, &matrices, num_matrices, &listed);
    return numbers;
}

// The selection of the items at ids from position `first` on, as many as fit lengths (and bases) by their rows and
// rows by their bytes, at least one; taken becomes [items, stored bytes]. Groups of the rows that share a base are
// measured and then copied by torch's threads. Nothing is taken where there is a fault.
void select_rows(const Device &, const Table &handle, const Tensor &ids, int64_t first, const Out &lengths_out,
                 const Out &bases_out, const Out &rows_out, const Out &taken, const Out &fault)
{
    constexpr int64_t kGroup = IBP_ROWS_PER_BASE;
    constexpr int64_t kLengthBytes = 256; // a length at a random place takes as long to read as these bytes in order
    const ibp_table &table = handle.table();
    const int64_t row_bytes = table.codebook.row_bytes, rows_per_item = rows_per_item_of(table);
    ibp_ids items = ids_of(ids);
    require(0 <= first && first < items.count, "first is ", first, " of ", items.count, " ids");
    items.data = static_cast<const uint8_t *>(items.data) + first * items.id_bytes;
    items.count -= first;
    auto *const lengths_to = data_of<uint16_t>(lengths_out, ScalarType::UInt16, rows_per_item, "lengths_out");
    const int64_t most_items = std::min(items.count, lengths_out.numel() / rows_per_item);
    int64_t num_rows = most_items * rows_per_item, num_groups = divide_up(num_rows, kGroup);
    auto *const bases_to = data_of<int64_t>(bases_out, ScalarType::Long, num_groups, "bases_out");
    const auto starts = std::make_unique<int64_t[]>(static_cast<size_t>(num_groups)); // read back, so in no tensor
    auto *const result = data_of<int64_t>(taken, ScalarType::Long, 2, "taken");
    uint8_t *const to = bytes_of(rows_out, (rows_per_item + kGroup) * row_bytes, "rows_out");
    const auto over_groups = [&](int64_t bytes_each, const auto &work) {
        over_ranges(num_groups, bytes_each, 0, fault_of(fault),
                    [&](int64_t begin, int64_t end, uint8_t *, ibp_fault *mine) {
                        ibp_status status = IBP_OK;
                        for (int64_t g = begin; g < end && status == IBP_OK; g++)
                            status = work(g, kGroup * g, std::min(num_rows, kGroup * (g + 1)), mine);
                        mine->position += first;
                        return status;
                    });
    };
    const auto is_ok = [&] { return fault_of(fault)->status == IBP_OK; };
    result[0] = result[1] = 0;
    over_groups(kLengthBytes * kGroup, [&](int64_t g, int64_t from, int64_t until, ibp_fault *mine) {
        uint64_t stored_bytes = 0;
        const ibp_status status =
            ibp_measure_selection(&table, &items, from, until, lengths_to + from, &stored_bytes, mine);
        starts[g] = static_cast<int64_t>(stored_bytes);
        return status;
    });
    if (!is_ok()) return;
    int64_t end = 0;
    for (int64_t g = 0; g < num_groups; g++) {
        const int64_t start = end;
        end += starts[g];
        starts[g] = start;
        if (end <= rows_out.numel()) continue;
        end = start;
        num_groups = g;
        num_rows = kGroup * g;
    }
    over_groups(kGroup * row_bytes, [&](int64_t g, int64_t from, int64_t until, ibp_fault *mine) {
        const int64_t stop = g + 1 < num_groups ? starts[g + 1] : end;
        return ibp_copy_selection(&table, &items, from, until, to + starts[g], static_cast<uint64_t>(stop - starts[g]),
                                  mine);
    });
    if (!is_ok()) return;
    std::copy(starts.get(), starts.get() + num_groups, bases_to);
    result[0] = num_rows / rows_per_item;
    result[1] = end;
}

// The items at ids, on the CPU, with torch's threads (ibp_cuda_stage_items). table: as out's device sees it;
// host_slots: its slots as the CPU does. stager: address of an ibp_stager of out's device.
void stage_items(const Device &device, const Table &handle, const OnCpu &host_slots, const OnCpu &ids, int64_t stager,
                 int64_t max_sms, const Out &out, const Out &fault)
{
    require(stager != 0, "no stager");
    const ibp_table &table = handle.table();
    const ibp_ids items = ids_of(ids);
    uint8_t *const to = room_of(out, total_bytes(items.count, table.item_bytes, "items"), "out");
    const uint8_t *const from = bytes_of(host_slots, table.slots_bytes, "host_slots");
    const ibp_run run = [](void *, int64_t count, void (*work)(void *, int64_t), void *state) {
        torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
            for (int64_t number = first; number < last; number++) work(state, number);
        });
    };
    check(ibp_cuda_stage_items(reinterpret_cast<ibp_stager *>(static_cast<uintptr_t>(stager)), &table, from, &items, to,
                               fault_of(fault), sms_of(max_sms), run, nullptr, torch::stable::get_num_threads(),
                               device.stream()),
          "stage_items");
}

// ---- decoding ----

void check_span(const ibp_table &table, int64_t start, int64_t end)
{
    const int64_t num_bytes = ibp_bytes_of_table(&table);
    require(0 <= start && start <= end && end <= num_bytes, "bytes [", start, ", ", end, ") are not among the table's ",
            num_bytes);
}

void decode_span(const Device &device, const ibp_table &table, int64_t start, int64_t end, int64_t max_sms,
                 const Out &out, const Out &fault)
{
    const int sms = sms_of(max_sms);
    uint8_t *const to = room_of(out, end - start, "out");
    ibp_fault *const first_fault = fault_of(fault);
    if (device.is_cuda()) {
        check(ibp_cuda_decode_bytes(&table, start, end, to, first_fault, sms, device.stream()), "decode_bytes");
        return;
    }
    if (start == end) return;
    const int64_t row_bytes = table.codebook.row_bytes, first_row = start / row_bytes,
                  last_row = (end - 1) / row_bytes + 1;
    const size_t scratch_bytes = ibp_scratch_bytes(table.codebook.row_bytes);
    over_ranges(last_row - first_row, row_bytes, scratch_bytes, first_fault,
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                    const int64_t from = std::max(start, (first_row + first) * row_bytes),
                                  stop = std::min(end, (first_row + last) * row_bytes);
                    return ibp_decode_bytes(&table, from, stop, to + (from - start), scratch, scratch_bytes, mine);
                });
}

void decode_bytes(const Device &device, const Table &handle, int64_t start, int64_t end, int64_t max_sms,
                  const Out &out, const Out &fault)
{
    check_span(handle.table(), start, end);
    decode_span(device, handle.table(), start, end, max_sms, out, fault);
}

// ---- rows in one piece of memory ----

// Rows of num_bytes bytes in memory: counters, a base and a length for each row, and overflow from overflow_start on.
ibp_place place_in(const Tensor &memory, int64_t overflow_start, int64_t num_bytes, const ibp_codebook &codebook)
{
    constexpr int64_t kCounters = 8, kLong = sizeof(uint64_t), kOfRow = kLong + sizeof(uint16_t); // bytes
    const int64_t num_rows = divide_up(num_bytes, codebook.row_bytes);
    require(codebook.scheme != IBP_SCHEME_RAW, "scheme raw has no lengths");
    require(overflow_start >= kCounters * kLong + num_rows * kOfRow, "overflow_start is ", overflow_start,
            ": counters and the index of ", num_rows, " rows stand before it");
    uint8_t *const bytes = bytes_of(memory, overflow_start, "memory");
    require(reinterpret_cast<uintptr_t>(bytes) % kLong == 0, "memory is not aligned to 8 bytes");
    auto *const longs = static_cast<uint64_t *>(static_cast<void *>(bytes));
    ibp_place place{};
    ibp_table &table = place.table;
    table.codebook = codebook;
    table.num_items = num_rows, table.item_bytes = codebook.row_bytes, table.rows_per_base = 1;
    table.overflow = place.overflow = bytes + overflow_start;
    table.overflow_bytes = memory.numel() - overflow_start;
    table.bases = place.bases = longs + kCounters;
    table.lengths = place.lengths = static_cast<uint16_t *>(static_cast<void *>(longs + kCounters + num_rows));
    place.used = longs, place.counts = static_cast<ibp_place_counts *>(static_cast<void *>(longs + 1));
    return place;
}

void fill(const Device &device, void *memory, uint8_t value, size_t num_bytes)
{
    if (device.is_cuda())
        check(ibp_cuda_fill(memory, value, num_bytes, device.stream()), "fill");
    else
        std::memset(memory, value, num_bytes);
}

void encode_piece(const Device &device, const Tensor &data, const Tensor &codebook, const Codec &codec,
                  int64_t overflow_start, int64_t max_sms, const Out &memory)
{
    bytes_of(data, 0, "data");
    const ibp_place place = place_in(memory, overflow_start, data.numel(), codebook_of(codebook, codec));
    auto *const fault = static_cast<ibp_fault *>(static_cast<void *>(place.used + 3));
    const ibp_row_source source = source_of(data, std::nullopt, place.table.codebook.row_bytes);
    const auto bases_bytes = static_cast<size_t>(place.table.num_items) * sizeof(uint64_t);
    static_assert(IBP_NO_BASE == UINT64_MAX);
    fill(device, place.used, 0, reinterpret_cast<uintptr_t>(place.bases) - reinterpret_cast<uintptr_t>(place.used));
    fill(device, place.bases, UINT8_MAX, bases_bytes);
    code_rows(device, place, source, nullptr, 0, max_sms, fault);
}

void decode_piece(const Device &device, const Tensor &coded, const Tensor &codebook, const Codec &codec,
                  int64_t overflow_start, int64_t max_sms, const Out &out, const Out &fault)
{
    const int64_t num_bytes = memory_of(out, "out").num_bytes;
    const ibp_place place = place_in(coded, overflow_start, num_bytes, codebook_of(codebook, codec));
    decode_span(device, place.table, 0, num_bytes, max_sms, out, fault);
}

// host_bases: the table's bases on the CPU. streamer: address of an ibp_streamer of out's device. begins, ends:
// whether this is the first, the last table of a stream, all through the same ring.
void stream_bytes(const Device &device, const Table &handle, const OnCpu &host_bases, int64_t start, int64_t end,
                  int64_t streamer, bool begins, bool ends, int64_t max_sms, const Out &ring, const Out &out,
                  const Out &fault)
{
    const ibp::Range &bases = handle.parts[ibp::kBases];
    const auto num_bases = static_cast<int64_t>((bases.end - bases.first) / sizeof(uint64_t));
    require(host_bases.numel() == num_bases, "host_bases has ", host_bases.numel(), " elements, bases ", num_bases);
    require(streamer != 0, "no streamer");
    const ibp_table &table = handle.table();
    const uint64_t *const starts = unsigned_longs_of(host_bases, 0, "host_bases");
    check_span(table, start, end);
    uint8_t *const to = bytes_of(out, end - start, "out"), *const staging = bytes_of(ring, 0, "ring");
    auto *const stream = reinterpret_cast<ibp_streamer *>(static_cast<uintptr_t>(streamer));
    if (begins) check(ibp_cuda_begin_stream(stream, staging, ring.numel()), "begin_stream");
    check(ibp_cuda_stream_bytes(stream, &table, starts, start, end, ends, to, fault_of(fault), sms_of(max_sms),
                                device.stream()),
          "stream_bytes");
}

// The operations that the CPU and CUDA have.
template <typename Library> void implement(Library &m)
{
    operation<measure_rows>(m, "measure_rows", "data codebook codec");
    operation<index_rows>(m, "index_rows", "lengths num_bytes row_bytes slot_bytes");
    operation<survey_rows>(m, "survey_rows", "lengths num_bytes row_bytes");
    operation<encode_rows>(m, "encode_rows", "table data fault");
    operation<encode_slots>(m, "encode_slots", "table data");
    operation<move_parts>(m, "move_parts", "table bases overflow");
    operation<encode_into>(m, "encode_into", "table x buffers row_ids first_row max_sms counts fault");
    operation<describe_table>(m, "describe_table",
                              "slots overflow lengths bases codebook codec slot_bytes overflow_start num_items "
                              "item_bytes rooms used fault plan");
    operation<decode_bytes>(m, "decode_bytes", "table start end max_sms out fault");
    operation<encode_piece>(m, "encode_piece", "data codebook codec overflow_start max_sms memory");
    operation<decode_piece>(m, "decode_piece", "coded codebook codec overflow_start max_sms out fault");
    operation<group_vectors>(m, "group_vectors", "ids num_matrices");
    operation<list_matrices>(m, "list_matrices", "ids num_matrices num_slots num_rows num_spare");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CPU, m)
{
    implement(m);
    operation<encode_packed>(m, "encode_packed", "data codebook codec out lengths stored");
    operation<select_rows>(m, "select_rows", "table ids first lengths_out bases_out rows_out taken fault");
}

STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m)
{
    implement(m);
    operation<stage_items>(m, "stage_items", "table host_slots host_ids stager max_sms out fault");
    operation<stream_bytes>(m, "stream_bytes",
                            "table host_bases start end streamer begins ends max_sms ring out fault");
}
