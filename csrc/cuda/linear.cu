// linear.cu - ibp_cuda_linear: which matrices and vectors the kernel takes, and its launch.
#include "linear.cuh"

#include "checks.h"
#include "kinds.h"
#include "launch.cuh"

#include <algorithm>

namespace ibp {

constexpr uint32_t kBlocksAnSm = 2;
using Block = LinearBlock<8, 3>;

static bool is_aligned(const void *bytes, uintptr_t alignment)
{
    return reinterpret_cast<uintptr_t>(bytes) % alignment == 0u;
}

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
           table.num_items >= kStripRows && table.num_items <= INT32_MAX && table.lengths != nullptr &&
           table.slots_start == 0u && table.slot_bytes >= row_bytes / 4u * 3u && table.slot_bytes % 16u == 0u &&
           table.slots_bytes / table.slot_bytes >= table.num_items && is_aligned(table.slots, 16u);
}

static bool is_list(const ibp_escapes *escapes)
{
    return escapes != nullptr && escapes->starts != nullptr && is_aligned(escapes->starts, 4u) &&
           (escapes->entries != nullptr || escapes->num_entries == 0u) && is_aligned(escapes->entries, 8u);
}

// Blocks that take strips in turn: as many as SMs hold at a time, or one a strip.
static ibp_status plan_blocks(uint32_t num_strips, Launch *launch)
{
    int device = 0, sms = 0, major = 0;
    ibp_status status = check_cuda(cudaGetDevice(&device));
    if (status == IBP_OK) status = check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    if (status == IBP_OK)
        status = check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    const uint32_t blocks = std::min(num_strips, static_cast<uint32_t>(std::max(1, sms)) * kBlocksAnSm);
    *launch = {blocks, Block::kThreads, Block::kSharedBytes, 1u, major >= 9};
    return status;
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_linear(const ibp_table *table, const ibp_escapes *escapes, const uint16_t *x,
                                      int64_t num_vectors, const uint16_t *bias, uint16_t *y, ibp_stream stream)
{
    using namespace ibp;
    if (!is_table(table) || !is_list(escapes) || num_vectors < 0 || num_vectors > kMostVectors || !is_matrix(*table))
        return IBP_INVALID_ARGUMENT;
    if (num_vectors == 0) return IBP_OK;
    if (x == nullptr || y == nullptr || !is_aligned(x, 16u)) return IBP_INVALID_ARGUMENT;
    const LinearJob job{table->slots,
                        table->slot_bytes,
                        *escapes,
                        x,
                        bias,
                        y,
                        static_cast<uint32_t>(num_vectors),
                        table->codebook.row_bytes / 2u,
                        static_cast<uint32_t>(table->num_items),
                        static_cast<uint32_t>(table->codebook.planes.first_symbol)};
    const auto kernel = linear_kernel<Block, kBlocksAnSm>;
    ibp_status status = allow_shared(reinterpret_cast<const void *>(kernel));
    Launch launch;
    if (status == IBP_OK) status = plan_blocks(num_strips(job), &launch);
    return status == IBP_OK ? launch_kernel(kernel, launch, stream, job) : status;
}
