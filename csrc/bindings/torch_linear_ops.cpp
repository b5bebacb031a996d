// torch_linear_ops.cpp - the operations of torch.ops.ibp that multiply by coded matrices, for CUDA only
// (ibp_linear.h). They turn tensors into pointers and call the core.
//
//     linear         x parts slot_bytes biases -> Tensor
//     linear.out     x parts slot_bytes biases out
//     linear_groups  slots slot_bytes below starts entries x groups order sharing num_rows out
//     decode_matrix  slots slot_bytes below starts entries out
//
// Each operation is documented at its function. x, biases, out and the matrices are bfloat16. x may have any strides:
// unless it is contiguous and aligned to 16 bytes, it is copied. A matrix is given by these arguments:
//
//     slots       uint8 [bytes], aligned to 16 bytes: the slots of its table, slot_bytes bytes for each row.
//     below       any dtype. Only its number of elements is read. This number must be first_symbol + 2, where
//                 first_symbol is a field of the codebook: the exponent that digit 0 stands for.
//     starts      int32 [rows + 1]: the escapes of row r are entries[starts[r]] to entries[starts[r + 1] - 1].
//     entries     int32 [escapes, 2]: structs ibp_escape, aligned to 8 bytes.
#include "torch_tensors.h"

#include <memory>
#include <optional>

namespace {

using namespace ibp_torch;

// Returns the data of a bfloat16 tensor, which must have exactly `count` elements.
uint16_t *elements_of(const Tensor &tensor, int64_t count, const char *name)
{
    require(tensor.numel() == count, name, " has ", tensor.numel(), " elements, ", count, " are needed");
    return data_of<uint16_t>(tensor, ScalarType::BFloat16, count, name);
}

ibp_digit_matrix matrix_of(const Tensor &slots, int64_t slot_bytes, const Tensor &below, const Tensor &starts,
                           const Tensor &entries, int64_t num_columns)
{
    const int64_t num_rows = starts.numel() - 1;
    require(entries.dim() == 2 && entries.size(1) == 2 && entries.size(0) <= INT32_MAX,
            "entries has the wrong shape: [escapes, 2] is needed");
    ibp_digit_matrix matrix = {};
    matrix.slots = data_of<uint8_t>(slots, ScalarType::Byte, slots.numel(), "slots");
    matrix.slots_bytes = slots.numel();
    matrix.slot_bytes = to_u32(slot_bytes, 16, UINT32_MAX, "slot_bytes");
    matrix.first_symbol = to_u32(below.numel() - 2, 0, UINT8_MAX, "the first symbol");
    matrix.num_rows = num_rows, matrix.num_columns = to_u32(num_columns, 1, INT32_MAX, "the columns");
    matrix.starts = data_of<uint32_t>(starts, ScalarType::Int, num_rows + 1, "starts");
    matrix.escapes = data_of<ibp_escape>(entries, ScalarType::Int, entries.numel(), "entries");
    matrix.num_escapes = static_cast<uint32_t>(entries.size(0));
    return matrix;
}

// Returns x itself if it is contiguous and aligned to 16 bytes, as ibp_cuda_linear requires; otherwise a copy that is.
Tensor aligned(const Tensor &x)
{
    const bool is_aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16u == 0u;
    return is_aligned && x.is_contiguous() ? x : contiguous_copy(x);
}

// The products of vectors with up to four matrices.
struct Products {
    ibp_product each[IBP_MOST_MATRICES] = {};
    int64_t starts[IBP_MOST_MATRICES] = {}; // for each product the index of its first result
    int64_t num_products = 0, num_vectors = 0, num_results = 0;
};

// Reads the arguments that `linear` and `linear.out` share.
Products products_of(const Tensor &x, const Tensors &parts, const std::vector<int64_t> &slot_bytes,
                     const Tensors &biases)
{
    constexpr size_t kParts = 4;
    const size_t count = slot_bytes.size();
    Products products;
    require(count >= 1 && count <= IBP_MOST_MATRICES, "slot_bytes has ", static_cast<int64_t>(count),
            " numbers, 1 to 4 are needed");
    require(parts.size() == kParts * count && (biases.empty() || biases.size() == count),
            "the lists have different lengths");
    require(x.dim() >= 1, "x has no dimension");
    const int64_t columns = x.size(x.dim() - 1);
    products.num_vectors = columns == 0 ? 0 : x.numel() / columns;
    products.num_products = static_cast<int64_t>(count);
    for (size_t i = 0; i < count; i++) {
        const Tensor *const part = &parts[kParts * i];
        ibp_product &product = products.each[i];
        product.matrix = matrix_of(part[0], slot_bytes[i], part[1], part[2], part[3], columns);
        const int64_t num_rows = product.matrix.num_rows;
        if (!biases.empty() && biases[i].numel() != 0) product.bias = elements_of(biases[i], num_rows, "biases");
        products.starts[i] = products.num_results;
        products.num_results += total_bytes(products.num_vectors, num_rows, "results");
    }
    return products;
}

void multiply(const Device &device, const Tensor &x, Products &products, const Tensor &out)
{
    const Tensor near = aligned(x);
    const uint16_t *const vectors = elements_of(near, x.numel(), "x");
    uint16_t *const to = elements_of(out, products.num_results, "out");
    for (int64_t i = 0; i < products.num_products && to != nullptr; i++) products.each[i].y = to + products.starts[i];
    const int64_t num_bytes = ibp_cuda_linear_bytes(products.each, products.num_products, products.num_vectors);
    std::unique_ptr<Tensor> workspace;
    if (num_bytes != 0) workspace = std::make_unique<Tensor>(new_tensor(x, {num_bytes}, ScalarType::Byte));
    auto *const bytes = workspace ? static_cast<uint8_t *>(workspace->data_ptr()) : nullptr;
    check(ibp_cuda_linear(products.each, products.num_products, vectors, products.num_vectors, bytes, device.stream()),
          "linear");
}

// Returns the products x W^T + bias with one to four matrices W of K columns, in one launch. With one matrix of N rows
// the result is [..., N]. With several matrices the result has one dimension and holds the products of the matrices one
// after the other.
//
// x: [..., K], up to 512 vectors.
// parts: four tensors for each matrix: slots, below, starts and entries.
// slot_bytes: one number for each matrix.
// biases: empty, or a tensor [N] for each matrix; an empty tensor adds nothing.
Tensor linear(const Device &device, const Tensor &x, const Tensors &parts, const std::vector<int64_t> &slot_bytes,
              const Tensors &biases)
{
    Products products = products_of(x, parts, slot_bytes, biases);
    std::vector<int64_t> sizes{products.num_results};
    if (products.num_products == 1) sizes = sizes_of(x), sizes.back() = products.each[0].matrix.num_rows;
    const Tensor out = new_tensor(x, sizes, x.scalar_type());
    multiply(device, x, products, out);
    return out;
}

// Multiplies as `linear` does, but writes the results to out, which is contiguous and has exactly one element for each
// result, in any shape.
void linear_out(const Device &device, const Tensor &x, const Tensors &parts, const std::vector<int64_t> &slot_bytes,
                const Tensors &biases, const Out &out)
{
    Products products = products_of(x, parts, slot_bytes, biases);
    multiply(device, x, products, out);
}

// Multiplies groups of vectors, each group by one matrix of a stack. The stack is given as one matrix: the rows of all
// matrices, num_rows for each.
//
// x: [vectors / sharing, K].
// groups: int32 [groups, 3], as group_vectors returns them: the number of a matrix, the number of the first vector, and
//   the number of vectors.
// order: int64 [vectors], or None. The number v in `groups` stands for vector order[v], or for vector v if order is
//   None.
// sharing: the number of consecutive vectors that share one row of x; 1 if order is None.
// out: contiguous, vectors * num_rows elements. The results of vectors that are in no group are not written.
void linear_groups(const Device &device, const Tensor &slots, int64_t slot_bytes, const Tensor &below,
                   const Tensor &starts, const Tensor &entries, const Tensor &x, const Tensor &groups,
                   const std::optional<Tensor> &order, int64_t sharing, int64_t num_rows, const Out &out)
{
    static_assert(sizeof(ibp_vector_group) == 3 * sizeof(int32_t));
    require(x.dim() == 2, "x has ", x.dim(), " dimensions, 2 are needed");
    require(groups.dim() == 2 && groups.size(1) == 3, "groups has the wrong shape: [groups, 3] is needed");
    const ibp_digit_matrix stack = matrix_of(slots, slot_bytes, below, starts, entries, x.size(1));
    const Tensor near = aligned(x);
    const uint16_t *const vectors = elements_of(near, x.numel(), "x");
    const auto *const list = data_of<ibp_vector_group>(groups, ScalarType::Int, groups.numel(), "groups");
    require(sharing >= 1, "sharing is ", sharing, "; wanted at least 1");
    const int64_t num_vectors = total_bytes(x.size(0), sharing, "x");
    const int64_t *numbers = nullptr;
    if (order) {
        require(order->numel() == num_vectors, "order has ", order->numel(), " numbers, ", num_vectors, " are needed");
        numbers = longs_of(*order, num_vectors, "order");
    }
    uint16_t *const to = elements_of(out, total_bytes(num_vectors, num_rows, "out"), "out");
    check(ibp_cuda_linear_groups(&stack, num_rows, list, groups.size(0), numbers, sharing, vectors, num_vectors, to,
                                 device.stream()),
          "linear_groups");
}

// Decodes the weights of a matrix to out, [rows, columns], contiguous.
void decode_matrix(const Device &device, const Tensor &slots, int64_t slot_bytes, const Tensor &below,
                   const Tensor &starts, const Tensor &entries, const Out &out)
{
    require(out.dim() == 2, "out has ", out.dim(), " dimensions, 2 are needed");
    const ibp_digit_matrix matrix = matrix_of(slots, slot_bytes, below, starts, entries, out.size(1));
    uint16_t *const weights = elements_of(out, total_bytes(matrix.num_rows, out.size(1), "out"), "out");
    check(ibp_cuda_decode_matrix(&matrix, weights, device.stream()), "decode_matrix");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m)
{
    operation<linear>(m, "linear", "x parts slot_bytes biases");
    operation<linear_out>(m, "linear.out", "x parts slot_bytes biases out");
    operation<decode_matrix>(m, "decode_matrix", "slots slot_bytes below starts entries out");
    operation<linear_groups>(m, "linear_groups",
                             "slots slot_bytes below starts entries x groups order sharing num_rows out");
}
