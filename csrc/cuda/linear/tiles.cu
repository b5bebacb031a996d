// tiles.cu - plans and launches the kernels of tiles.cuh, which multiply up to 256 vectors and need `wgmma`. For
// compute capability 9.0, this file is therefore compiled for sm_90a in place of sm_90. On other GPUs multiply_tiles
// launches nothing, and linear.cu takes another kernel.
#include "many.h"

#include "tiles.cuh"

#include "../launch.cuh"

#include <algorithm>
#include <iterator>
#ifdef __CUDACC__
#include <cudaTypedefs.h>
#endif

namespace ibp {

// ---- tensor maps of matrices, for copies of tiles ----

#ifdef __CUDACC__
static ibp_status find_encoder(PFN_cuTensorMapEncodeTiled_v12000 *encoder)
{
    static void *found = nullptr; // all threads find the same address, so no lock is needed
    if (found == nullptr) {
        cudaDriverEntryPointQueryResult result;
        const ibp_status status = check_cuda(
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
        if (status != IBP_OK) return status;
    }
    *encoder = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
    return IBP_OK;
}

// Makes the tensor map of an array of bytes [matrix.num_rows, columns], for copies of box_rows rows and box_columns
// columns. Returns whether the driver accepts the map.
static bool make_map(PFN_cuTensorMapEncodeTiled_v12000 encoder, const ibp_digit_matrix &matrix, const uint8_t *bytes,
                     uint32_t columns, uint32_t box_columns, uint32_t box_rows, CUtensorMapSwizzle swizzle,
                     CUtensorMap *map)
{
    const cuuint64_t sizes[2] = {columns, static_cast<cuuint64_t>(matrix.num_rows)}, pitches[1] = {matrix.slot_bytes};
    const cuuint32_t box[2] = {box_columns, box_rows}, apart[2] = {1, 1};
    return encoder(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<uint8_t *>(bytes), sizes, pitches, box, apart,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
#endif

// Makes the tensor maps of all matrices. has_maps: receives whether the driver accepts all of them.
template <class Block> static ibp_status make_maps(TilesJob *tiles, bool *has_maps)
{
    *has_maps = true;
#ifdef __CUDACC__
    PFN_cuTensorMapEncodeTiled_v12000 encoder = nullptr;
    const ibp_status status = find_encoder(&encoder);
    if (status != IBP_OK) return status;
    *has_maps = encoder != nullptr;
    for (uint32_t i = 0; i < tiles->job.num_matrices && *has_maps; i++) {
        const ibp_digit_matrix &matrix = tiles->job.matrices[i].coded();
        const uint32_t columns = matrix.num_columns;
        *has_maps = make_map(encoder, matrix, matrix.slots, columns, kStepColumns, Block::kTileRows,
                             CU_TENSOR_MAP_SWIZZLE_128B, &tiles->maps[i].residuals) &&
                    make_map(encoder, matrix, matrix.slots + columns, columns / 2u, kStepColumns / 2u, Block::kTileRows,
                             CU_TENSOR_MAP_SWIZZLE_64B, &tiles->maps[i].digits);
    }
#endif
    return IBP_OK;
}

// ---- launches ----

// A plan of a launch. cost: estimated time, in arbitrary units, for comparisons of plans. parts: number of parts into
// which the columns are divided, one for each block of a cluster. clusters: number of clusters.
struct TilesPlan {
    uint64_t cost = UINT64_MAX;
    uint32_t parts = 0, clusters = 0;
    ibp_status (*launch)(const LinearJob &job, const uint8_t *image, const TilesPlan &plan, ibp_stream stream,
                         bool *launched) = nullptr;
};

template <class Block>
static ibp_status launch_tiles(const LinearJob &job, const uint8_t *image, const TilesPlan &plan, ibp_stream stream,
                               bool *launched)
{
    TilesJob tiles{};
    tiles.job = job, tiles.image = image, tiles.parts = plan.parts;
    tiles.job.cut(Block::kTileRows);
    ibp_status status = make_maps<Block>(&tiles, launched);
    if (status == IBP_OK && *launched) status = prepare(reinterpret_cast<const void *>(tiles_kernel<Block>));
    if (status != IBP_OK || !*launched) return status;
    const Launch launch{plan.parts * plan.clusters, Block::kThreads, Block::kSharedBytes, plan.parts, true};
    return launch_kernel(tiles_kernel<Block>, launch, stream, tiles);
}

// Replaces *best with the cheapest plan for this type of block, if that plan is cheaper than *best. The estimated time
// of a tile is the time of the block's steps and of kFixed more steps. If the blocks of a cluster exchange sums, the
// time of kOfCluster more steps is added.
template <class Block> static ibp_status plan_tiles(LinearJob job, TilesPlan *best)
{
    constexpr uint32_t kFixed = 2, kOfCluster = Block::kVectors / 64u + 2u, kCounts[] = {1, 2, 3, 4, 8};
    static KnownClusters known[std::size(kCounts)];
    job.cut(Block::kTileRows);
    for (size_t i = 0; i < std::size(kCounts); i++) {
        const uint32_t count = kCounts[i];
        uint32_t found = 0;
        const ibp_status status = known[i].count(reinterpret_cast<const void *>(tiles_kernel<Block>), count,
                                                 Block::kThreads, Block::kSharedBytes, &found);
        if (status != IBP_OK) return status;
        if (found == 0u || count > num_steps(job)) continue;
        const uint64_t turns = (job.num_tiles + found - 1u) / found,
                       steps = (num_steps(job) + count - 1u) / count + kFixed + (i != 0u ? kOfCluster : 0u),
                       cost = turns * steps * Block::kStepCost;
        if (cost < best->cost) *best = {cost, count, std::min(found, job.num_tiles), launch_tiles<Block>};
    }
    return IBP_OK;
}

template <uint32_t VECTORS>
static ibp_status launch_best(const LinearJob &job, uint8_t *image, ibp_stream stream, bool *launched)
{
    TilesPlan plan;
    ibp_status status = plan_tiles<TileBlock<VECTORS, 2>>(job, &plan);
    if constexpr (VECTORS < kMostOfTiles)
        if (status == IBP_OK) status = plan_tiles<TileBlock<VECTORS, 3>>(job, &plan);
    if (status != IBP_OK || plan.launch == nullptr) return status;
    constexpr uint32_t kImageThreads = 256;
    const uint32_t items = num_steps(job) * (kStepColumns / 16u) * VECTORS;
    status = launch_kernel(image_kernel<VECTORS>,
                           Launch{(items + kImageThreads - 1u) / kImageThreads, kImageThreads, 0, 1u, true}, stream,
                           job, image);
    return status == IBP_OK ? plan.launch(job, image, plan, stream, launched) : status;
}

ibp_status multiply_tiles(const LinearJob &job, uint8_t *image, ibp_stream stream, bool *launched)
{
    *launched = false;
    switch (room_of_tiles(job.num_vectors)) {
    case 64: return launch_best<64>(job, image, stream, launched);
    case 128: return launch_best<128>(job, image, stream, launched);
    default: return launch_best<kMostOfTiles>(job, image, stream, launched);
    }
}

} // namespace ibp
