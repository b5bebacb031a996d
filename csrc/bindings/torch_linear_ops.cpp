// torch_linear_ops.cpp - torch.ops.ibp.linear: tensors to pointers, as torch_ops.cpp.
#include "torch_tensors.h"

#include <memory>
#include <optional>

namespace {

using namespace ibp_torch;

uint16_t *bfloat16s_of(const Tensor &tensor, int64_t count, const char *name)
{
    require(tensor.numel() == count, name, " has ", tensor.numel(), " elements, ", count, " are needed");
    return data_of<uint16_t>(tensor, ScalarType::BFloat16, count, name);
}

ibp_digit_matrix matrix_of(const Tensor &slots, int64_t slot_bytes, int64_t first_symbol, const Tensor &starts,
                           const Tensor &entries, int64_t num_columns)
{
    const int64_t num_rows = starts.numel() - 1;
    require(entries.dim() == 2 && entries.size(1) == 2 && entries.size(0) <= INT32_MAX,
            "entries has the wrong shape: [escapes, 2] is needed");
    const void *const begins = data_of<int32_t>(starts, ScalarType::Int, num_rows + 1, "starts"),
                      *const list = data_of<int32_t>(entries, ScalarType::Int, entries.numel(), "entries");
    ibp_digit_matrix matrix = {};
    matrix.slots = data_of<uint8_t>(slots, ScalarType::Byte, slots.numel(), "slots");
    matrix.slots_bytes = slots.numel();
    matrix.slot_bytes = to_u32(slot_bytes, 16, UINT32_MAX, "slot_bytes");
    matrix.first_symbol = to_u32(first_symbol, 0, UINT8_MAX, "first_symbol");
    matrix.num_rows = num_rows, matrix.num_columns = to_u32(num_columns, 1, INT32_MAX, "the columns");
    matrix.starts = static_cast<const uint32_t *>(begins);
    matrix.escapes = static_cast<const ibp_escape *>(list), matrix.num_escapes = static_cast<uint32_t>(entries.size(0));
    return matrix;
}

// Vectors as ibp_cuda_linear takes them: at a multiple of 16 bytes.
Tensor aligned(const Tensor &x)
{
    return reinterpret_cast<uintptr_t>(x.data_ptr()) % 16u == 0u ? x : torch::stable::clone(x);
}

void linear(const Device &device, const Tensor &slots, int64_t slot_bytes, int64_t first_symbol, const Tensor &starts,
            const Tensor &entries, const Tensor &x, const std::optional<Tensor> &bias, const Out &out)
{
    require(x.dim() == 2, "x has ", x.dim(), " dimensions, 2 are needed");
    const int64_t num_vectors = x.size(0);
    const ibp_digit_matrix matrix = matrix_of(slots, slot_bytes, first_symbol, starts, entries, x.size(1));
    const Tensor near = aligned(x);
    const uint16_t *const vectors = bfloat16s_of(near, x.numel(), "x");
    uint16_t *const to = bfloat16s_of(out, total_bytes(num_vectors, matrix.num_rows, "out"), "out");
    const uint16_t *const added = bias ? bfloat16s_of(*bias, matrix.num_rows, "bias") : nullptr;
    const int64_t num_bytes = ibp_cuda_linear_bytes(&matrix, num_vectors);
    std::unique_ptr<Tensor> workspace;
    if (num_bytes != 0) workspace = std::make_unique<Tensor>(new_tensor(x, {num_bytes}, ScalarType::Byte));
    auto *const bytes = workspace ? static_cast<uint8_t *>(workspace->data_ptr()) : nullptr;
    check(ibp_cuda_linear(&matrix, vectors, num_vectors, added, to, bytes, device.stream()), "linear");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m)
{
    operation<linear>(m, "linear", "slots slot_bytes first_symbol starts entries x bias out");
}
