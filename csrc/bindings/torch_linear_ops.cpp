// torch_linear_ops.cpp - torch.ops.ibp.linear: tensors to pointers, as torch_ops.cpp.
#include "torch_tables.h"

#include <optional>

namespace {

using namespace ibp_torch;

uint16_t *bfloat16s_of(const Tensor &tensor, int64_t count, const char *name)
{
    require(tensor.numel() == count, name, " has ", tensor.numel(), " elements, ", count, " are needed");
    return data_of<uint16_t>(tensor, ScalarType::BFloat16, count, name);
}

ibp_escapes escapes_of(const Tensor &starts, const Tensor &entries, int64_t num_rows)
{
    require(starts.numel() == num_rows + 1, "starts has ", starts.numel(), " numbers, ", num_rows + 1, " are needed");
    require(entries.dim() == 2 && entries.size(1) == 2 && entries.size(0) <= INT32_MAX,
            "entries has the wrong shape: [escapes, 2] is needed");
    const void *const begins = data_of<int32_t>(starts, ScalarType::Int, num_rows + 1, "starts"),
                      *const list = data_of<int32_t>(entries, ScalarType::Int, entries.numel(), "entries");
    return {static_cast<const uint32_t *>(begins), static_cast<const ibp_escape *>(list),
            static_cast<uint32_t>(entries.size(0))};
}

void linear_cuda(IBP_TABLE_PARAMETERS, Tensor starts, Tensor entries, Tensor x, std::optional<Tensor> bias, Tensor out)
{
    const auto device = use_cuda(x, {IBP_TABLE_TENSORS, &starts, &entries, &out, bias ? &*bias : &x});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const ibp_table table = args.table();
    require(x.dim() == 2, "x has ", x.dim(), " dimensions, 2 are needed");
    const int64_t num_vectors = x.size(0);
    require(x.size(1) == item_bytes / 2, "x has rows of ", x.size(1), " elements, ", item_bytes / 2, " are needed");
    const uint16_t *const vectors = bfloat16s_of(x, x.numel(), "x");
    uint16_t *const to = bfloat16s_of(out, total_bytes(num_vectors, num_items, "out"), "out");
    const ibp_escapes escapes = escapes_of(starts, entries, num_items);
    Footprints memory = args.footprints(table);
    memory.reads("starts", starts);
    memory.reads("entries", entries);
    memory.reads("x", x);
    if (bias) memory.reads("bias", *bias);
    memory.writes("out", out);
    check(ibp_cuda_linear(&table, &escapes, vectors, num_vectors,
                          bias ? bfloat16s_of(*bias, num_items, "bias") : nullptr, to, current_stream(x)),
          "linear");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m) { m.impl("linear", TORCH_BOX(&linear_cuda)); }
