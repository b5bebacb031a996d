// linear.cu - the functions of ibp_linear.h that multiply vectors by coded matrices, and the one that decodes such a
// matrix. They check the arguments and choose the kernel. This file launches the kernels of linear.cuh and matrix.cuh.
#include "linear.cuh"
#include "many.h"
#include "matrix.cuh"

#include "../launch.cuh"

#include <algorithm>

namespace ibp {

static bool is_aligned(const void *bytes, uintptr_t alignment)
{
    return reinterpret_cast<uintptr_t>(bytes) % alignment == 0u;
}

static bool is_matrix(const ibp_digit_matrix &m)
{
    // kMostFirst: the largest first_symbol for which the weight of digit 15 is finite.
    constexpr uint32_t kColumns = 32, kMostFirst = 0xff - 16;
    return m.slots != nullptr && is_aligned(m.slots, 16u) && m.num_columns != 0u && m.num_columns % kColumns == 0u &&
           m.slot_bytes % 16u == 0u && m.slot_bytes >= uint64_t{m.num_columns} / 2u * 3u && m.num_rows >= kStripRows &&
           m.num_rows <= INT32_MAX && m.slots_bytes / m.slot_bytes >= m.num_rows && m.first_symbol <= kMostFirst;
}

static bool are_matrices(const ibp_product *products, int64_t count)
{
    if (products == nullptr || count < 1 || count > IBP_MOST_MATRICES) return false;
    return std::all_of(products, products + count, [&](const ibp_product &product) {
        return is_matrix(product.matrix) && product.matrix.num_columns == products->matrix.num_columns;
    });
}

static bool has_list(const ibp_digit_matrix &m)
{
    return m.starts != nullptr && is_aligned(m.starts, 4u) && is_aligned(m.escapes, 8u) &&
           (m.escapes != nullptr || m.num_escapes == 0u) && m.num_escapes <= INT32_MAX;
}

// Launches as many blocks as the SMs hold at the same time, but at most one block for each strip. If the code is for
// compute capability 9.0 or later, the launch is a programmatic dependent launch: the kernel may start before the
// stream's previous kernel has ended, and waits for that kernel before it reads the vectors. Code for other GPUs does
// not contain this wait, so its launches do not overlap the previous kernel.
template <class Strips>
static ibp_status launch_strips(const typename Strips::Job &job, uint32_t num_strips, ibp_stream stream)
{
    const auto kernel = linear_kernel<Strips>;
    DeviceSizes device{};
    Launch launch{0, LinearBlock::kThreads, LinearBlock::kSharedBytes, 1};
    ibp_status status = read_device(&device);
    if (status == IBP_OK) status = prepare(reinterpret_cast<const void *>(kernel), &launch.overlaps);
    if (status != IBP_OK) return status;
    launch.blocks = std::min(num_strips, static_cast<uint32_t>(std::max(1, device.sms)) * LinearBlock::kBlocksAnSm);
    return launch_kernel(kernel, launch, stream, job);
}

static ibp_status multiply_few(LinearJob job, ibp_stream stream)
{
    job.cut(kStripRows);
    return launch_strips<MatrixStrips>(job, job.num_tiles, stream);
}

// Multiplies the first vectors of a job with the kernel that suits their number. count: receives the number of these
// vectors.
static ibp_status multiply_some(LinearJob job, uint8_t *image, ibp_stream stream, uint32_t *count)
{
    const uint32_t left = job.num_vectors;
    for (uint32_t most = kMostOfTiles; most > kMostVectors; most /= 2u) {
        if (most >= 2u * left) continue;
        job.num_vectors = *count = std::min(left, most);
        bool launched = false;
        const ibp_status status = *count > IBP_MOST_INVARIANT ? multiply_tiles(job, image, stream, &launched)
                                  : *count > kMostVectors     ? multiply_many(job, stream, &launched)
                                                              : IBP_OK;
        if (status != IBP_OK || launched) return status;
    }
    job.num_vectors = *count = std::min(left, kMostVectors);
    return multiply_few(job, stream);
}

} // namespace ibp

extern "C" int64_t ibp_cuda_linear_bytes(const ibp_product *products, int64_t num_products, int64_t num_vectors)
{
    if (!ibp::are_matrices(products, num_products)) return 0;
    const uint32_t num_columns = products->matrix.num_columns;
    if (num_vectors <= IBP_MOST_INVARIANT || num_vectors > IBP_MOST_VECTORS) return 0;
    return ibp::image_bytes(static_cast<uint32_t>(num_vectors), num_columns);
}

extern "C" ibp_status ibp_cuda_linear(const ibp_product *products, int64_t num_products, const uint16_t *x,
                                      int64_t num_vectors, uint8_t *workspace, ibp_stream stream)
{
    using namespace ibp;
    if (!are_matrices(products, num_products) || num_vectors < 0 || num_vectors > IBP_MOST_VECTORS)
        return IBP_INVALID_ARGUMENT;
    if (num_vectors == 0) return IBP_OK;
    if (x == nullptr || !is_aligned(x, 16u)) return IBP_INVALID_ARGUMENT;
    if (ibp_cuda_linear_bytes(products, num_products, num_vectors) != 0 &&
        (workspace == nullptr || !is_aligned(workspace, 128u)))
        return IBP_INVALID_ARGUMENT;
    LinearJob job{};
    for (int64_t i = 0; i < num_products; i++) {
        if (!has_list(products[i].matrix) || products[i].y == nullptr) return IBP_INVALID_ARGUMENT;
        job.matrices[i].product = products[i];
    }
    job.num_matrices = static_cast<uint32_t>(num_products), job.num_columns = products->matrix.num_columns;
    job.num_vectors = static_cast<uint32_t>(num_vectors), job.x = x;
    ibp_status status = IBP_OK;
    while (job.num_vectors != 0u && status == IBP_OK) {
        uint32_t count = 0;
        status = multiply_some(job, workspace, stream, &count);
        job.num_vectors -= count, job.x += uint64_t{count} * job.num_columns;
        for (LinearMatrix &matrix : job.matrices) matrix.product.y += uint64_t{count} * matrix.rows();
    }
    return status;
}

extern "C" ibp_status ibp_cuda_linear_groups(const ibp_digit_matrix *stack, int64_t num_rows,
                                             const ibp_vector_group *groups, int64_t num_groups, const int64_t *order,
                                             int64_t sharing, const uint16_t *x, int64_t num_vectors, uint16_t *y,
                                             ibp_stream stream)
{
    using namespace ibp;
    if (stack == nullptr || !is_matrix(*stack) || !has_list(*stack)) return IBP_INVALID_ARGUMENT;
    if (num_rows < 1 || num_rows % kStripRows != 0 || stack->num_rows % num_rows != 0) return IBP_INVALID_ARGUMENT;
    if (num_vectors < 0 || num_vectors > INT32_MAX || num_groups < 0) return IBP_INVALID_ARGUMENT;
    if (sharing < 1 || num_vectors % sharing != 0 || (order == nullptr && sharing != 1)) return IBP_INVALID_ARGUMENT;
    if (num_vectors == 0 || num_groups == 0) return IBP_OK;
    const int64_t of_matrix = num_rows / kStripRows;
    if (num_groups > INT32_MAX / of_matrix || groups == nullptr || !is_aligned(groups, 4u)) return IBP_INVALID_ARGUMENT;
    if (x == nullptr || y == nullptr || !is_aligned(x, 16u) || !is_aligned(order, 8u)) return IBP_INVALID_ARGUMENT;
    GroupsJob job{};
    job.job.matrices[0].product = {*stack, nullptr, y};
    job.job.num_matrices = 1, job.job.num_columns = stack->num_columns;
    job.job.num_vectors = static_cast<uint32_t>(num_vectors), job.job.x = x;
    job.groups = groups, job.num_groups = static_cast<uint32_t>(num_groups);
    job.num_rows = static_cast<uint32_t>(num_rows);
    job.order = order, job.sharing = static_cast<uint32_t>(sharing);
    return launch_strips<GroupStrips>(job, static_cast<uint32_t>(num_groups * of_matrix), stream);
}

extern "C" ibp_status ibp_cuda_decode_matrix(const ibp_digit_matrix *matrix, uint16_t *weights, ibp_stream stream)
{
    using namespace ibp;
    if (matrix == nullptr || !is_matrix(*matrix) || !has_list(*matrix)) return IBP_INVALID_ARGUMENT;
    if (weights == nullptr || !is_aligned(weights, 16u)) return IBP_INVALID_ARGUMENT;
    const uint32_t num_stretches = (matrix->num_columns + kStretchColumns - 1u) / kStretchColumns;
    const int64_t num_blocks = (matrix->num_rows + kMatrixWarps - 1) / kMatrixWarps * num_stretches;
    if (num_blocks > INT32_MAX) return IBP_INVALID_ARGUMENT;
    const Launch launch{static_cast<uint32_t>(num_blocks), kMatrixWarps * kWarp, 0, 1};
    return launch_kernel(matrix_weights, launch, stream, *matrix, num_stretches, weights);
}
