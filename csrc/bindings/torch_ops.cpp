// torch_ops.cpp - the operations of torch.ops.ibp that describe, code and decode tables. They turn tensors into
// pointers and call the core.
//
//     describe_table  slots overflow lengths bases codebook codec slot_bytes overflow_start num_items item_bytes
//                     rooms used fault plan -> Tensor
//     measure_rows    data codebook codec -> Tensor
//     index_rows      lengths num_bytes row_bytes slot_bytes -> Tensor
//     survey_rows     lengths num_bytes row_bytes -> Tensor
//     encode_rows     table data fault
//     encode_into     table x buffers row_ids first_row max_sms counts fault is_new
//     move_parts      table bases overflow
//     group_vectors   ids num_matrices -> (Tensor, Tensor)
//     select_rows     table ids first lengths_out bases_out rows_out taken fault  (CPU only)
//     stage_items     table host_slots host_ids stager max_sms out fault          (CUDA only)
//     decode_bytes    table start end max_sms out fault
//     encode_piece    data codebook codec overflow_start max_sms memory
//     decode_piece    coded codebook codec overflow_start max_sms out fault
//     stream_bytes    table host_bases start end streamer begins ends max_sms ring out fault (CUDA only)
//
// Each operation is documented at its function. torch_tables.h documents the arguments that several files share.
// Schemas, fake implementations and the rules for all operations are in ibp/_common/ops.py. data is uint8 [bytes]: the
// rows, one after the other. The last row may be short.
//
// The library is built against torch's stable ABI, so that one build works with torch 2.10 and all later versions, with
// and without CUDA. The operations are public: they raise an error if the arguments are inconsistent, whatever values a
// caller passes. If an operation exists for the CPU and for CUDA, one function implements both, and its argument
// `device` says where the call runs.
#include "torch_tables.h"

#include "../core/checks.h"

#include <algorithm>
#include <memory>
#include <tuple>

namespace {

using namespace ibp_torch;

// ---- describing tables ----

// Returns the handle of a table, which is the argument `table` of other operations: the bytes of a struct
// ibp::TableHandle, uint8 on the CPU. The handle holds the addresses of the tensors, so the tensors must live as long
// as the handle is used.
//
// slots, overflow: uint8 [bytes].
// lengths: uint16 [rows]; empty: every row is raw.
// bases: int64 [ceil(rows / 32)], or [rows] if every row has its own base; empty: no row has an overflow part
//   (FORMAT.md, section 2).
// slot_bytes: the size of a row's slot in bytes.
// overflow_start: 0 for a complete table. For a block of a table's rows: the offset in bytes at which `overflow` begins
//   in the complete table's overflow.
// num_items, item_bytes: the number of items of the coded tensor, and the size of an item in bytes.
// rooms, used: given only if the table is a place, that is, a table into which rows are coded one by one (ibp_place.h).
//   `rooms` is uint16 [rows]; empty if slots hold whole rows. `used` is int64 [1]. With `used`, `bases` must have one
//   entry for each row, or be empty if rows are packed or slots hold whole rows. encode_into refuses a table that is
//   described without `used`.
// fault: the record in which `take` notes faults. On a GPU `take` refuses a table without a record.
// plan: [least_bucketed, window_bits, bucketed_sms] of ibp::GatherPlan; empty: `take` never sorts ids by itself.
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
    table.lengths = place.lengths = lengths_of(lengths, num_rows);
    table.bases = place.bases =
        unsigned_longs_of(bases, bases.numel() ? divide_up(num_rows, IBP_ROWS_PER_BASE) : 0, "bases");
    table.rows_per_base = bases.numel() == num_rows ? 1u : IBP_ROWS_PER_BASE; // both are right for a single row
    require(table.codebook.scheme != IBP_SCHEME_RAW || !table.lengths, "scheme raw has no lengths");
    if (rooms) place.rooms = lengths_of(*rooms, num_rows, "rooms");
    if (used) {
        place.used = unsigned_longs_of(*used, 1, "used");
        require(place.bases == nullptr || table.rows_per_base == 1u, "bases has ", bases.numel(),
                " elements, one for each of ", num_rows, " rows is needed");
    }
    const auto note = [&](ibp::TablePart part, void *data, const Tensor &tensor) {
        handle.parts[part] = {static_cast<uint8_t *>(data),
                              tensor.numel() * static_cast<int64_t>(tensor.element_size())};
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

// Returns lengths, uint16 [rows]: the coded size of each row of data in bytes; 0 if the coded row would not be smaller
// than the row; or the value that marks a default row.
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
    // Measuring writes no coded rows, so it is fast, and four bytes count as one byte of work. It is slower if each
    // column has its own entries, because these entries have to be searched.
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

// Returns int64 [ceil(rows / 32) + 1]: bases, and then the size in bytes of the overflow that the table needs.
//
// lengths: as measure_rows returns them; empty: every row is raw.
// num_bytes: the size of all rows before coding, in bytes.
Tensor index_rows(const Device &device, const Tensor &lengths, int64_t num_bytes, int64_t row_bytes, int64_t slot_bytes)
{
    const uint32_t bytes = row_bytes_of(row_bytes), slot = to_u32(slot_bytes, 0, IBP_MAX_ROW_BYTES, "slot_bytes");
    require(0 <= num_bytes && num_bytes <= kMaxBytes, "num_bytes is ", num_bytes);
    const int64_t num_rows = divide_up(num_bytes, bytes), num_bases = divide_up(num_rows, IBP_ROWS_PER_BASE);
    const uint16_t *const given = lengths_of(lengths, num_rows);
    Tensor bases = new_tensor(lengths, {num_bases + 1}, ScalarType::Long);
    auto *const last = static_cast<int64_t *>(bases.data_ptr()) + num_bases;
    uint64_t *const out = unsigned_longs_of(bases, num_bases, "bases");
    run_on(device, "index_rows", ibp_cuda_index_rows, ibp_index_rows, given, num_bytes, bytes, slot, out, last);
    return bases;
}

// Returns int64 [2 + ceil(row_bytes / 32)]: element 0 is the size in bytes of all rows as stored, and element 1 + k is
// the number of rows that take k sectors of 32 bytes.
//
// lengths: as measure_rows returns them.
// num_bytes: the size of all rows before coding, in bytes.
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

// Codes all rows of data into the slots and overflow of a table whose lengths and bases were made from data. A row that
// does not fit in its slot and its part of overflow is noted in fault.
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

// Copies the overflow parts of a place's rows to `overflow`, uint8 [bytes], in the order of the rows. The rows must
// have been coded with is_new, and none may be lost. Afterwards the place's slots and lengths, together with `bases`
// and `overflow`, form an ordinary table.
//
// table: described with `used`.
// bases: int64 [ceil(rows / 32)], as index_rows returns them.
void move_parts(const Device &device, const Table &handle, const Tensor &bases, const Out &overflow)
{
    ibp_table table = handle.place.table;
    const int64_t num_bases = divide_up(ibp_num_rows(&table), IBP_ROWS_PER_BASE);
    table.bases = unsigned_longs_of(bases, num_bases, "bases"), table.rows_per_base = IBP_ROWS_PER_BASE;
    uint8_t *const to = bytes_of(overflow, 0, "overflow");
    table.overflow_bytes = overflow.numel();
    run_on(device, "move_parts", ibp_cuda_move_parts, ibp_move_parts, &table, &handle.place, to);
}

// ---- coding rows into a place ----

// A dimension of a tensor: its size, and its stride in bytes.
struct Dimension {
    int64_t size, stride;
};

// Returns a tensor's dimensions, the innermost first. Adjacent dimensions are merged if the outer one continues the
// inner one. Entry 0 of the result is the innermost contiguous run of bytes.
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

// Describes the elements of a tensor, in the order of their indices, as rows. If the tensor is contiguous, its last row
// may be short.
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
    for (uint32_t d = 0; d < source.num_dims; d++) { // a source lists its outermost dimension first
        source.sizes[source.num_dims - 1 - d] = dimensions[d].size;
        source.strides[source.num_dims - 1 - d] = dimensions[d].stride;
        source.num_rows *= dimensions[d].size; // cannot overflow: there are no more rows than elements
    }
    return source;
}

// Describes the rows of x, or the rows of buffers that have x's layout.
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
    require(source.num_rows <= INT32_MAX || (!source.buffers && source.num_dims == 0), "x has ", source.num_rows,
            " rows, more than 2^31 - 1");
    return source;
}

// Codes the rows of a source into a place. Faults of rows raise no error; they are noted in first_fault unless it is
// nullptr.
//
// ids: for each row of the source the number of the row of the table that it becomes. nullptr: row i becomes row
//   first_row + i.
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
    ibp_fault unused{};
    const auto code = [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
        const ibp_status status =
            ibp_encode_into(&place, &source, ids, first_row, first, last, scratch, scratch_bytes, mine);
        return mine->status == IBP_OK ? status : IBP_CORRUPT_ROW; // a noted fault must not raise
    };
    if (ibp_is_packed(&place)) { // each row begins where the row before it ends, so one thread codes them all
        const std::unique_ptr<uint8_t[]> scratch(new uint8_t[scratch_bytes]);
        check(code(0, source.num_rows, scratch.get(), &unused), "encode_into");
    } else {
        over_ranges(source.num_rows, row_bytes, scratch_bytes, first_fault ? first_fault : &unused, code);
    }
}

// Codes rows into a place (ibp_place.h). Rows may be coded in any order, and coded again whenever they change. A row is
// lost if there is no room for its overflow part. Lost rows are counted, but they are not faults.
//
// table: described with `used`. If it has neither slots nor bases, rows are packed: each begins where the row before it
//   ends, at byte `used` of overflow. Packed rows must be on the CPU. One thread codes all rows of a call, because
//   callers code several blocks at once.
// x: any dtype, shape and strides. The bytes of its elements, in the order of their indices, are cut into rows.
// buffers: int64 [buffers], or None: the addresses of buffers that have the layout of x. Their rows are then coded
//   instead of the rows of x. The addresses are trusted.
// row_ids: int64 [rows of x, or of all buffers], or None: for each row the number of the row of the table that it
//   becomes.
// first_row: read only if row_ids is None: the number of the table's row that the first row becomes. The other rows
//   follow it.
// counts: int64 [2], or None; the number of rows with an overflow part is added to element 0, and the number of lost
//   rows to element 1.
// fault: receives the first wrong id of row_ids. None: wrong ids are not noted.
// is_new: true if none of these rows of the table has been coded before; row_ids must then be None. Then complete slots
//   are written, `bases` need not be filled before the call, and a lost row keeps its length and slot.
void encode_into(const Device &device, const PlaceOut &handle, const Tensor &x, const std::optional<Tensor> &buffers,
                 const std::optional<Tensor> &row_ids, int64_t first_row, int64_t max_sms,
                 const std::optional<Out> &counts, const std::optional<Out> &fault, bool is_new)
{
    ibp_place place = handle.place;
    require(place.used != nullptr, "rows cannot be written: table is described for reading alone");
    require(!row_ids || !(is_new || ibp_is_packed(&place)), "rows that are new or packed have no row_ids");
    if (counts) place.counts = data_of<ibp_place_counts>(*counts, ScalarType::Long, 2, "counts");
    place.is_new = is_new;
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
    code_rows(device, place, source, ids, first_row, max_sms, fault ? fault_of(*fault) : nullptr);
}

// ---- lists of ids ----

// Sorts vectors by the matrices of a stack that multiply them, for linear_groups. Returns (order, groups):
//
// order: int64 [vectors], the vectors' numbers, sorted by matrix. A vector with an id out of range comes last and is in
//   no group.
// groups: int32 [min(vectors, num_matrices) + vectors // 8, 3]: the number of a matrix, the index in `order` of the
//   group's first vector, and the number of vectors in the group, up to 8. Groups without vectors fill the rest.
//
// ids: the matrix of each vector, up to 1024. num_matrices: the number of matrices of the stack, up to 4096.
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

// Copies the stored rows of the items ids[first], ids[first + 1], ..., without decoding them, into a new packed table.
// It copies as many items as fit in the outputs. Items must be whole rows. Torch's threads measure groups of 32 rows,
// which share a base, and then copy the groups that fit.
//
// lengths_out: uint16, room for the rows of at least one item.
// bases_out: int64, one element for every 32 rows that lengths_out has room for.
// rows_out: uint8, room for the rows of one item and for 32 more rows.
// taken: int64 [2], receives the number of items that were copied, and the number of bytes of rows_out that they fill.
//   If there is a fault, both are 0.
void select_rows(const Device &, const Table &handle, const Tensor &ids, int64_t first, const Out &lengths_out,
                 const Out &bases_out, const Out &rows_out, const Out &taken, const Out &fault)
{
    constexpr int64_t kGroup = IBP_ROWS_PER_BASE;
    // Reading a length at a random address takes as long as copying this many bytes.
    constexpr int64_t kLengthBytes = 256;
    const ibp_table &table = handle.table();
    const int64_t row_bytes = table.codebook.row_bytes, rows_per_item = rows_per_item_of(table);
    ibp_ids items = ids_of(ids);
    require(0 <= first && first < items.count, "first is ", first, " of ", items.count, " ids");
    items.data = static_cast<const uint8_t *>(items.data) + first * items.id_bytes;
    items.count -= first;
    auto *const lengths_to = data_of<uint16_t>(lengths_out, ScalarType::UInt16, rows_per_item, "lengths_out");
    const int64_t most_items = std::min(items.count, lengths_out.numel() / rows_per_item);
    int64_t num_rows = most_items * rows_per_item, num_groups = divide_up(num_rows, kGroup);
    int64_t *const bases_to = longs_of(bases_out, num_groups, "bases_out");
    // The starts are read again when rows are copied, so they must be in memory that no caller can write.
    const auto starts = std::make_unique<int64_t[]>(static_cast<size_t>(num_groups));
    int64_t *const result = longs_of(taken, 2, "taken");
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

// Fetches items of whole rows from pinned memory to a GPU with the CPU's help: torch's threads gather the slots into a
// ring, from which they are copied (ibp_cuda_stage_items). Returns when the last copy is queued.
//
// table: its handle has the addresses that the GPU uses.
// host_slots: uint8 on the CPU: the same slots, at the address that the CPU uses.
// host_ids: int32 or int64 [ids] on the CPU.
// stager: the address of a living `_core.Stager` of the GPU.
// out: contiguous, any dtype; receives the items one after the other.
void stage_items(const Device &device, const Table &handle, const OnCpu &host_slots, const OnCpu &ids, int64_t stager,
                 int64_t max_sms, const Out &out, const Out &fault)
{
    require(stager != 0, "stager is 0; wanted the address of a Stager");
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

// Decodes bytes [start, end) of a table's tensor, and writes them to out, which is contiguous and of any dtype. A
// corrupt row is noted in fault, and zeros are written for its bytes.
void decode_bytes(const Device &device, const Table &handle, int64_t start, int64_t end, int64_t max_sms,
                  const Out &out, const Out &fault)
{
    check_span(handle.table(), start, end);
    decode_span(device, handle.table(), start, end, max_sms, out, fault);
}

// ---- rows in one piece of memory ----

// The head of a packed piece of memory, as ibp/_rows/forms.py describes it.
struct PieceHead {
    uint64_t used;
    ibp_place_counts counts;
    ibp_fault fault;
    uint64_t note; // not used in this file
};
static_assert(sizeof(PieceHead) == 64, "a head has 8 entries");

// Returns the place that lies in a packed piece of memory. num_bytes: the size in bytes of all its rows before coding.
// The parts of the piece are
//
//     head | bases, 8 bytes a row | lengths, 2 bytes a row | (at byte overflow_start) overflow
ibp_place place_in(const Tensor &memory, int64_t overflow_start, int64_t num_bytes, const ibp_codebook &codebook)
{
    constexpr int64_t kHead = sizeof(PieceHead), kOfRow = sizeof(uint64_t) + sizeof(uint16_t); // bytes
    const int64_t num_rows = divide_up(num_bytes, codebook.row_bytes);
    require(codebook.scheme != IBP_SCHEME_RAW, "scheme raw has no lengths");
    require(overflow_start >= kHead + num_rows * kOfRow, "overflow_start is ", overflow_start,
            ": the head and the index of ", num_rows, " rows stand before it");
    uint8_t *const bytes = bytes_of(memory, overflow_start, "memory");
    require(reinterpret_cast<uintptr_t>(bytes) % alignof(PieceHead) == 0, "memory is not aligned to 8 bytes");
    auto *const head = static_cast<PieceHead *>(static_cast<void *>(bytes));
    auto *const bases = static_cast<uint64_t *>(static_cast<void *>(head + 1));
    ibp_place place{};
    ibp_table &table = place.table;
    table.codebook = codebook;
    table.num_items = num_rows, table.item_bytes = codebook.row_bytes, table.rows_per_base = 1;
    table.overflow = place.overflow = bytes + overflow_start;
    table.overflow_bytes = memory.numel() - overflow_start;
    table.bases = place.bases = bases;
    table.lengths = place.lengths = static_cast<uint16_t *>(static_cast<void *>(bases + num_rows));
    place.used = &head->used, place.counts = &head->counts;
    return place;
}

// Codes data into a packed piece of memory, whatever the memory held before. The head receives `used`, the two counts
// of encode_into, and a fault record. decode_piece needs only the first `used` bytes of overflow. The bases of rows
// without bytes in overflow are not written.
//
// memory: uint8, aligned to 8 bytes.
// overflow_start: the byte of memory at which overflow begins.
void encode_piece(const Device &device, const Tensor &data, const Tensor &codebook, const Codec &codec,
                  int64_t overflow_start, int64_t max_sms, const Out &memory)
{
    bytes_of(data, 0, "data");
    ibp_place place = place_in(memory, overflow_start, data.numel(), codebook_of(codebook, codec));
    place.is_new = 1;
    auto *const head = static_cast<PieceHead *>(static_cast<void *>(place.used));
    const ibp_row_source source = source_of(data, std::nullopt, place.table.codebook.row_bytes);
    if (device.is_cuda())
        check(ibp_cuda_fill(head, 0, sizeof *head, device.stream()), "encode_piece");
    else
        *head = {};
    code_rows(device, place, source, nullptr, 0, max_sms, &head->fault);
}

// Decodes a piece that encode_piece coded.
//
// coded: uint8, aligned to 8 bytes: the memory of the piece, or at least its bytes before byte overflow_start + used.
// out: contiguous, of any dtype, with exactly as many bytes as the data that was coded.
void decode_piece(const Device &device, const Tensor &coded, const Tensor &codebook, const Codec &codec,
                  int64_t overflow_start, int64_t max_sms, const Out &out, const Out &fault)
{
    const int64_t num_bytes = memory_of(out, "out").num_bytes;
    const ibp_place place = place_in(coded, overflow_start, num_bytes, codebook_of(codebook, codec));
    decode_span(device, place.table, 0, num_bytes, max_sms, out, fault);
}

// Decodes bytes [start, end) of a table in pinned host memory. The GPU's copy engine copies the table chunk by chunk to
// a ring (ibp_stream.h). Several calls, one for each table, form a stream.
//
// host_bases: int64, the table's bases on the CPU.
// streamer: the address of a living `_core.Streamer` of out's device.
// begins, ends: whether this table is the first one of a stream, and whether it is the last one.
// ring: uint8 in device memory, the same for all tables of a stream.
// out: uint8, end - start bytes or more.
void stream_bytes(const Device &device, const Table &handle, const OnCpu &host_bases, int64_t start, int64_t end,
                  int64_t streamer, bool begins, bool ends, int64_t max_sms, const Out &ring, const Out &out,
                  const Out &fault)
{
    const int64_t num_bases = handle.parts[ibp::kBases].num_bytes / int64_t{sizeof(uint64_t)};
    require(host_bases.numel() == num_bases, "host_bases has ", host_bases.numel(), " elements, bases ", num_bases);
    require(streamer != 0, "streamer is 0; wanted the address of a Streamer");
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

// Registers the operations that exist both for the CPU and for CUDA.
template <typename Library> void implement(Library &m)
{
    operation<measure_rows>(m, "measure_rows", "data codebook codec");
    operation<index_rows>(m, "index_rows", "lengths num_bytes row_bytes slot_bytes");
    operation<survey_rows>(m, "survey_rows", "lengths num_bytes row_bytes");
    operation<encode_rows>(m, "encode_rows", "table data fault");
    operation<encode_into>(m, "encode_into", "table x buffers row_ids first_row max_sms counts fault is_new");
    operation<move_parts>(m, "move_parts", "table bases overflow");
    operation<describe_table>(m, "describe_table",
                              "slots overflow lengths bases codebook codec slot_bytes overflow_start num_items "
                              "item_bytes rooms used fault plan");
    operation<decode_bytes>(m, "decode_bytes", "table start end max_sms out fault");
    operation<encode_piece>(m, "encode_piece", "data codebook codec overflow_start max_sms memory");
    operation<decode_piece>(m, "decode_piece", "coded codebook codec overflow_start max_sms out fault");
    operation<group_vectors>(m, "group_vectors", "ids num_matrices");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CPU, m)
{
    implement(m);
    operation<select_rows>(m, "select_rows", "table ids first lengths_out bases_out rows_out taken fault");
}

STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m)
{
    implement(m);
    operation<stage_items>(m, "stage_items", "table host_slots host_ids stager max_sms out fault");
    operation<stream_bytes>(m, "stream_bytes",
                            "table host_bases start end streamer begins ends max_sms ring out fault");
}
