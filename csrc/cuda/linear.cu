// linear.cu - ibp_cuda_linear: which matrices and vectors the kernel takes, and its launch.
#include "linear.cuh"

#include "checks.h"
#include "kinds.h"
#include "launch.cuh"

namespace ibp {

static bool is_aligned(const void *vectors) { return reinterpret_cast<uintptr_t>(vectors) % 16u == 0u; }

constexpr uint32_t kLinearWarps = 8, kLinearStages = 3, kLinearTiles = 1, kLinearBlocks = 2;
using Strip = LinearStrip<kLinearWarps, kLinearStages, kLinearTiles>;

// Whether rows are residuals of a byte and digits of four bits, whose exponents a sum of bytes gives, all finite.
static bool has_linear_rows(const ibp_codebook &cb)
{
    return cb.scheme == IBP_SCHEME_PLANES && is_fast(cb) && knows_fields(cb, kConsecutive) && !ibp_has_clusters(&cb) &&
           cb.planes.element_bytes == 2u && cb.planes.residual_bits == 8u && cb.planes.rotate == 1u &&
           cb.planes.first_symbol < 0xffu - 15u;
}

static bool is_matrix(const ibp_table &table)
{
    const uint32_t row_bytes = table.codebook.row_bytes;
    return has_linear_rows(table.codebook) && table.item_bytes == row_bytes && row_bytes % 64u == 0u &&
           table.num_items >= Strip::kRows && table.num_items <= INT32_MAX && table.lengths != nullptr &&
           table.slots_start == 0u && table.slot_bytes >= row_bytes / 4u * 3u && table.slot_bytes % 16u == 0u &&
           table.slots_bytes / table.slot_bytes >= table.num_items && is_aligned(table.slots);
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_linear(const ibp_table *table, const uint16_t *x, int64_t num_vectors,
                                      const uint16_t *bias, uint16_t *y, ibp_fault *fault, ibp_stream stream)
{
    using namespace ibp;
    if (!is_table(table) || fault == nullptr || num_vectors < 0 || num_vectors > kMostVectors || !is_matrix(*table))
        return IBP_INVALID_ARGUMENT;
    if (num_vectors == 0) return IBP_OK;
    if (x == nullptr || y == nullptr || !is_aligned(x)) return IBP_INVALID_ARGUMENT;
    const LinearJob job{*table,
                        x,
                        bias,
                        y,
                        static_cast<uint32_t>(num_vectors),
                        table->codebook.row_bytes / 2u,
                        static_cast<uint32_t>(table->num_items),
                        fault};
    const auto kernel = linear_kernel<kLinearWarps, kLinearStages, kLinearTiles, kLinearBlocks>;
    const ibp_status status = allow_shared(reinterpret_cast<const void *>(kernel));
    if (status != IBP_OK) return status;
    const uint32_t blocks = (job.rows + Strip::kRows - 1u) / Strip::kRows;
    return launch_kernel(kernel, {blocks, Strip::kThreads, Strip::kSharedBytes, 1u}, stream, job);
}
