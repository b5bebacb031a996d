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

void linear_cuda(IBP_TABLE_PARAMETERS, Tensor x, std::optional<Tensor> bias, Tensor out, Tensor fault)
{
    const auto device = use_cuda(x, {IBP_TABLE_TENSORS, &out, &fault, bias ? &*bias : &x});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const ibp_table table = args.table();
    require(x.dim() == 2, "x has ", x.dim(), " dimensions, 2 are needed");
    const int64_t num_vectors = x.size(0);
    require(x.size(1) == item_bytes / 2, "x has rows of ", x.size(1), " elements, ", item_bytes / 2, " are needed");
    const uint16_t *const vectors = bfloat16s_of(x, x.numel(), "x");
    uint16_t *const to = bfloat16s_of(out, total_bytes(num_vectors, num_items, "out"), "out");
    Footprints memory = args.footprints(table);
    memory.reads("x", x);
    if (bias) memory.reads("bias", *bias);
    memory.writes("out", out);
    memory.writes("fault", fault);
    check(ibp_cuda_linear(&table, vectors, num_vectors, bias ? bfloat16s_of(*bias, num_items, "bias") : nullptr, to,
                          fault_of(fault), current_stream(x)),
          "linear");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m) { m.impl("linear", TORCH_BOX(&linear_cuda)); }
