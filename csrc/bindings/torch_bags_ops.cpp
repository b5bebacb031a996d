// torch_bags_ops.cpp - the operation torch.ops.ibp.sum_bags, for CUDA only. It turns tensors into pointers and calls
// the core.
//
//     sum_bags  table ids entries slabs offsets weights reduction padding_idx kind max_sms out fault
//
// The operation is documented at its function. torch_tables.h documents the arguments that several operations share.
#include "torch_tables.h"

#include <optional>

namespace {

using namespace ibp_torch;

ScalarType dtype_of(ibp_float_kind kind)
{
    return kind == IBP_FLOAT32 ? ScalarType::Float : kind == IBP_FLOAT16 ? ScalarType::Half : ScalarType::BFloat16;
}

// Makes the struct ibp_bags from the arguments of sum_bags.
ibp_bags bags_of(const ibp_ids &ids, const std::optional<Tensor> &offsets, const std::optional<Tensor> &weights,
                 int64_t reduction, int64_t padding_idx, int64_t kind, const Tensor &out)
{
    ibp_bags bags{};
    require(out.dim() == 2, "out has ", out.dim(), " dimensions, 2 are needed");
    bags.num_bags = out.size(0);
    bags.mode = static_cast<ibp_bag_mode>(to_u32(reduction, IBP_BAG_SUM, IBP_BAG_MAX, "reduction"));
    bags.kind = static_cast<ibp_float_kind>(to_u32(kind, IBP_FLOAT32, IBP_BFLOAT16, "kind"));
    bags.padding_id = padding_idx;
    if (offsets) {
        const ibp_ids of_bags = ids_of(*offsets);
        bags.offsets = of_bags.data, bags.offset_bytes = of_bags.id_bytes;
        require(of_bags.count >= bags.num_bags, "offsets has ", of_bags.count, " elements, ", bags.num_bags,
                " are needed");
    } else {
        require(bags.num_bags == 0 ? ids.count == 0 : ids.count % bags.num_bags == 0, ids.count, " ids are not ",
                bags.num_bags, " bags of equal size");
        bags.bag_size = bags.num_bags == 0 ? 0 : ids.count / bags.num_bags;
    }
    if (weights) {
        require(weights->scalar_type() == dtype_of(bags.kind), "weights has the wrong dtype");
        require(weights->numel() == ids.count, "weights has ", weights->numel(), " elements, ", ids.count,
                " are needed");
        bags.weights = memory_of(*weights, "weights").data;
    }
    return bags;
}

// Reduces each bag of rows to the sum, mean or maximum of its rows (ibp_linear.h). The result of a bag without rows is
// zeros. Each item of the table must be a single row. An id out of range and a corrupt row are noted in fault and count
// as rows of zeros.
//
// entries: int64 [ids], or None. Rows that have an entry are read from slabs, and all other rows from the table.
// offsets: int32 or int64, ascending; bag b begins with ids[offsets[b]]. Only one element for each bag is read. None:
//   all bags have the same number of ids.
// weights: [ids], of the elements' dtype, for sums only. None: all are 1.
// reduction: an ibp_bag_mode as a number.
// padding_idx: ids that equal it are skipped; -1: no id is skipped.
// kind: the elements' dtype, an ibp_float_kind as a number.
// out: [bags, elements], contiguous. Its first dimension is the number of bags.
void sum_bags(const Device &device, const Table &handle, const Tensor &ids, const std::optional<Tensor> &entries,
              const Near &slabs, const std::optional<Tensor> &offsets, const std::optional<Tensor> &weights,
              int64_t reduction, int64_t padding_idx, int64_t kind, int64_t max_sms, const Out &out, const Out &fault)
{
    const ibp_table &table = handle.table();
    const ibp_ids items = ids_of(ids);
    const ibp_bags bags = bags_of(items, offsets, weights, reduction, padding_idx, kind, out);
    uint8_t *const to = room_of(out, total_bytes(bags.num_bags, table.item_bytes, "bags"), "out");
    ibp_cache cache{};
    if (entries) cache = cache_of(*entries, slabs, items.count);
    check(ibp_cuda_sum_bags(&table, &items, entries ? &cache : nullptr, &bags, to, fault_of(fault), sms_of(max_sms),
                            device.stream()),
          "sum_bags");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m)
{
    operation<sum_bags>(m, "sum_bags",
                        "table ids entries slabs offsets weights reduction padding_idx kind max_sms out fault");
}
