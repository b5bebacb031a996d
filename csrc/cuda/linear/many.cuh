// many.cuh - multiplies up to 32 vectors by coded matrices of BF16, on GPUs of compute capability 9.0. Each weight is
// decoded once for all vectors, in registers, as an operand of `wgmma`.
//
// A cluster of blocks takes tiles of 64 rows, one after the other:
//
// 1. The columns are divided into 16 pieces; step s of 128 columns belongs to piece s % 16 (digits.cuh). Each block
//    takes some neighbouring pieces. It keeps the vectors' elements of these columns in shared memory, so that the
//    vectors are not read again for every tile. The elements are stored in an order in which the digits can be unpacked
//    with few instructions.
// 2. Two groups of four warps multiply; each group takes half of the block's pieces. If there are so many columns that
//    16 blocks have one piece each, tiles have 128 rows, and each group takes half of the rows. While a group
//    multiplies a step, the bytes of its following steps, including those of the next tile, are copied to shared
//    memory.
// 3. The groups write the sums of a tile to shared memory.
// 4. Four more warps of each block, the finishers, take a share of the vectors. For these vectors they add up the sums
//    of all blocks of the cluster, correct the products of escapes as linear.cuh does, and store the results.
//
// Sums are added in the order of linear.cuh, so both kernels give the same results bit for bit.
//
// Device memory limits the kernel.
#ifndef IBP_MANY_CUH
#define IBP_MANY_CUH

#include "sm90.cuh"

namespace ibp {

// The sizes and the shared memory of a block. VECTORS: 16 or 32, the largest number of vectors. PARTS: number of
// blocks in a cluster, 1 to 16, each of which has a part of the columns. SHARES: number of shares of a tile's rows. If
// it is 2, each group that multiplies has half of the rows and all of the block's pieces.
template <uint32_t VECTORS, uint32_t PARTS, uint32_t SHARES = 1> struct ManyBlock {
    static constexpr uint32_t kVectors = VECTORS, kParts = PARTS, kShares = SHARES, kTileRows = 64 * SHARES;
    static constexpr uint32_t kStages = 3; // number of stages of a warp, which receive copied bytes
    // kGroup: number of threads in a multiplying group. kGroups: number of these groups.
    static constexpr uint32_t kGroup = 128, kGroups = 2;
    static constexpr uint32_t kMultipliers = kGroups * kGroup, kThreads = kMultipliers + kGroup;
    static constexpr uint32_t kGroupPieces = kPieces * SHARES / PARTS / kGroups; // number of pieces of a group
    // kPitch: distance in floats from one vector's sums to the next vector's. This distance avoids bank conflicts.
    static constexpr uint32_t kPitch = kTileRows + 4u;
    static constexpr uint32_t kSumsStart = kMultipliers / kWarp * kStages * StripStep::kBytes;
    static constexpr uint32_t kBarriersStart = kSumsStart + VECTORS * kPitch * sizeof(float);
    static constexpr uint32_t kVectorsStart = kBarriersStart + 128u; // a multiple of 128, as `wgmma` requires
    static constexpr uint32_t kStepBytes = VECTORS * kStepColumns * 2u;
    // kFinished: number of vectors of a finishing thread. The thread has every kVectorsApart-th vector of the block's
    // share.
    static constexpr uint32_t kVectorsApart = kGroup / kTileRows, kFinished = VECTORS / PARTS / kVectorsApart;

    static constexpr uint32_t kBlockPieces = kPieces / PARTS;
    // kWriters: number of threads that store the first sums of a tile. It is also the number of threads that write its
    // sums last (leave_sums).
    static constexpr uint32_t kWriters = SHARES * kGroup;

    // Returns the largest number of steps that any block of the cluster has. All blocks have memory for this number of
    // steps.
    static __host__ __device__ __forceinline__ uint32_t block_steps(const LinearJob &job)
    {
        return (num_steps(job) + kPieces - 1u) / kPieces * kBlockPieces;
    }
    static uint32_t shared_bytes(const LinearJob &job) { return kVectorsStart + block_steps(job) * kStepBytes; }
    // Returns the offset in shared memory of 16 bytes of a vector's elements: columns 8 * half to 8 * half + 7 of
    // operand `operand` (0 to 7) in the block's step `step`.
    static __device__ __forceinline__ uint32_t vector_at(uint32_t step, uint32_t operand, uint32_t vector,
                                                         uint32_t half)
    {
        return kVectorsStart + step * kStepBytes + operand * (VECTORS * 32u) + vector / 8u * 256u + half * 128u +
               vector % 8u * 16u;
    }
    // Barriers of the cluster. written: all blocks have written the sums of a tile. read: all blocks have read these
    // sums, so that the sums may be overwritten. A cluster of one block uses named barriers instead.
    static __device__ __forceinline__ SharedBarrier written() { return {kBarriersStart}; }
    static __device__ __forceinline__ SharedBarrier read() { return {kBarriersStart + SharedBarrier::kBytes}; }
    static __device__ __forceinline__ uint32_t sum_at(uint32_t vector, uint32_t row)
    {
        return kSumsStart + (vector * kPitch + row) * static_cast<uint32_t>(sizeof(float));
    }
};

// ---- a block ----

// IDs of the named barriers. The name of each ID says which threads meet there. kBothGroups: both groups that multiply.
// kGroupsAndFinishers: the groups that write sums last, and the finishers. kFinishers: the finishers alone.
// kFinishersAndGroups: in a cluster of one block, the finishers and the groups that write sums first.
constexpr uint32_t kBothGroups = 1, kGroupsAndFinishers = 2, kFinishers = 3, kFinishersAndGroups = 4;

struct Place {
    uint32_t part, first_tile, tiles_apart;
};

// Copies the elements of all vectors in the columns of the block's steps to shared memory. In each iteration a thread
// copies the elements of one vector that belong to a pair of operands of a step: columns 8 * pair + 32 * t to 8 * pair
// + 32 * t + 7 of the step, for t = 0 to 3.
template <class Block> __device__ __forceinline__ void bring_vectors(const LinearJob &job, uint32_t part)
{
#pragma unroll 2
    for (uint32_t item = threadIdx.x; item < Block::block_steps(job) * Block::kVectors * 4u; item += Block::kThreads) {
        const uint32_t pair = item / 8u % 4u, vector = item / 32u % (Block::kVectors / 8u) * 8u + item % 8u,
                       of_block = item / (4u * Block::kVectors),
                       step = of_block / Block::kBlockPieces * kPieces + part * Block::kBlockPieces +
                              of_block % Block::kBlockPieces,
                       column = step * kStepColumns + 8u * pair;
        const uint16_t *const from = job.x + uint64_t{vector} * job.num_columns + column;
        uint4 x[4];
#pragma unroll
        for (uint32_t t = 0; t < 4u; t++) {
            const bool wanted = vector < job.num_vectors && column + 32u * t < job.num_columns;
            x[t] = wanted ? *reinterpret_cast<const uint4 *>(from + 32u * t) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (uint32_t half = 0; half < 2u; half++) {
            const uint32_t order = half ? 0x7632u : 0x5410u;
            const auto store = [&](uint32_t operand, const uint4 &words) {
                *reinterpret_cast<uint4 *>(shared_bytes() + Block::vector_at(of_block, operand, vector, half)) = words;
            };
            store(2u * pair, make_uint4(permute_bytes(x[0].x, x[0].y, order), permute_bytes(x[1].x, x[1].y, order),
                                        permute_bytes(x[2].x, x[2].y, order), permute_bytes(x[3].x, x[3].y, order)));
            store(2u * pair + 1u,
                  make_uint4(permute_bytes(x[0].z, x[0].w, order), permute_bytes(x[1].z, x[1].w, order),
                             permute_bytes(x[2].z, x[2].w, order), permute_bytes(x[3].z, x[3].w, order)));
        }
    }
    publish_vectors();
}

// Waits for earlier work of the stream, copies the vectors to shared memory, and waits for all threads of the cluster
// to call arrive_at_cluster(). All threads of the block must call it.
template <class Block> __device__ __forceinline__ void bring_all_vectors(const LinearJob &job, const Place &place)
{
    await_work_before();
    bring_vectors<Block>(job, place.part);
    await_others_of_cluster();
    __syncthreads();
}

// A group of warps that multiplies. Each warp has 16 rows of a tile.
template <class Block> struct GroupMultiplier {
    static constexpr uint32_t kSums = Block::kVectors / 2u; // number of sums of a thread

    const LinearJob &job;
    const Place &place;
    // strip: the warp's strip in a tile. own_piece, piece: index of the group's first piece, counted in the block and
    // in the row. end: number of steps in a row.
    const uint32_t warp, group, strip, stages, own_piece, piece, end;
    uint32_t copied_tile, copied_step, copied_stage;
    StripRows copied_rows;

    __device__ __forceinline__ GroupMultiplier(const LinearJob &linear, const Place &of)
        : job(linear), place(of), warp(threadIdx.x / kWarp), group(threadIdx.x / Block::kGroup),
          strip(warp % (Block::kTileRows / kStripRows)), stages(warp * Block::kStages * StripStep::kBytes),
          own_piece(Block::kShares == 1u ? group * Block::kGroupPieces : 0u),
          piece(place.part * Block::kBlockPieces + own_piece), end(num_steps(job)), copied_tile(place.first_tile),
          copied_step(piece), copied_stage(0)
    {
    }
    __device__ __forceinline__ void find_rows()
    {
        copied_rows.find(job, copied_tile, Block::kTileRows / kStripRows, strip);
    }
    __device__ __forceinline__ void begin_copies()
    {
        if (copied_tile < job.num_tiles && copied_step < end)
            StripStep::begin_copy(copied_rows, job.num_columns, copied_step * kStepColumns,
                                  stages + copied_stage * StripStep::kBytes);
        end_copies();
        copied_stage = copied_stage + 1u == Block::kStages ? 0u : copied_stage + 1u;
        copied_step++;
        if (copied_step % Block::kGroupPieces == 0u) copied_step += kPieces - Block::kGroupPieces;
        if (copied_step < end) return;
        copied_step = piece, copied_tile += place.tiles_apart;
        find_rows();
    }
    // Starts the first copies, before the vectors are ready.
    __device__ __forceinline__ void begin()
    {
        find_rows();
#pragma unroll
        for (uint32_t i = 0; i < Block::kStages - 1u; i++) begin_copies();
    }
    // Adds the products of a step to `sums`. Up to three batches of two operands are multiplied while the next batch is
    // decoded. of_block: index of the step, counted in the block.
    __device__ __forceinline__ void multiply_step(uint32_t of_block, uint32_t firsts, uint32_t stage,
                                                  uint32_t (&operands)[4][2][4], float (&sums)[kSums])
    {
        await_copies<Block::kStages - 2>();
        begin_copies();
        const uint32_t g = lane_id() / 4u, at = stages + stage * StripStep::kBytes;
        const Elements rows[2] = {StripStep::elements(at, g), StripStep::elements(at, g + 8u)};
#pragma unroll
        for (uint32_t i = 0; i < 4u; i++) {
            GroupProducts::await<3>(operands[i]);
#pragma unroll
            for (uint32_t j = 0; j < 2u; j++) make_operand(operands[i][j], rows, 2u * i + j, firsts);
            GroupProducts::order_registers();
#pragma unroll
            for (uint32_t j = 0; j < 2u; j++)
                GroupProducts::begin(sums, operands[i][j], PackedVectors{Block::vector_at(of_block, 2u * i + j, 0, 0)});
            GroupProducts::end_batch();
        }
    }
    // Multiplies the rows of a tile. sums[0]: receives the sums over the group's pieces, which are added in the order
    // of digits.cuh.
    __device__ __forceinline__ void multiply_tile_rows(uint32_t firsts, uint32_t &stage,
                                                       float (&sums)[Block::kGroupPieces][kSums])
    {
        uint32_t operands[4][2][4] = {};
#pragma unroll
        for (uint32_t p = 0; p < Block::kGroupPieces; p++)
#pragma unroll
            for (uint32_t i = 0; i < kSums; i++) sums[p][i] = 0.0f;
        uint32_t of_block = own_piece;
#pragma unroll 1
        for (uint32_t first = piece; first < end; first += kPieces, of_block += Block::kBlockPieces) {
#pragma unroll
            for (uint32_t i = 0; i < Block::kGroupPieces; i++) {
                if (first + i >= end) break;
                multiply_step(of_block + i, firsts, stage, operands, sums[i]);
                stage = stage + 1u == Block::kStages ? 0u : stage + 1u;
            }
        }
#pragma unroll
        for (uint32_t p = 0; p < Block::kGroupPieces; p++) GroupProducts::await<0>(sums[p]);
#pragma unroll
        for (uint32_t apart = 1; apart < Block::kGroupPieces; apart *= 2u)
#pragma unroll
            for (uint32_t p = 0; p < Block::kGroupPieces; p += 2u * apart)
#pragma unroll
                for (uint32_t i = 0; i < kSums; i++) sums[p][i] += sums[p + apart][i];
    }
    // Writes the sums to shared memory, where the finishers read them. If both groups have the same rows, the first
    // group stores its sums, and then the second group adds its own.
    __device__ __forceinline__ void leave_sums(uint32_t turn, const float (&sums)[kSums]) const
    {
        const uint32_t row = strip * kStripRows + lane_id() / 4u, vector = 2u * (lane_id() % 4u);
        const bool is_first = Block::kShares != 1u || group == 0u;
        if (is_first)
            await_room(turn);
        else
            await_barrier<kBothGroups, Block::kMultipliers>();
#pragma unroll
        for (uint32_t i = 0; i < kSums; i++) {
            float &sum = *reinterpret_cast<float *>(
                shared_bytes() + Block::sum_at(vector + i / 4u * 8u + i % 2u, row + 8u * (i / 2u % 2u)));
            sum = is_first ? sums[i] : sum + sums[i];
        }
        if (Block::kShares == 1u && is_first)
            arrive_at_barrier<kBothGroups, Block::kMultipliers>();
        else
            arrive_at_barrier<kGroupsAndFinishers, Block::kWriters + Block::kGroup>();
    }
    __device__ __forceinline__ void run()
    {
        uint32_t stage = 0;
        for (uint32_t tile = place.first_tile, turn = 0; tile < job.num_tiles; tile += place.tiles_apart, turn++) {
            float of_pieces[Block::kGroupPieces][kSums];
            multiply_tile_rows(job.matrix_of(tile).coded().first_symbol * kEveryByte, stage, of_pieces);
            leave_sums(turn, of_pieces[0]);
        }
    }
    __device__ __forceinline__ void await_room(uint32_t turn) const
    {
        if (turn == 0u) return;
        if (Block::kParts > 1u)
            Block::read().await_cluster(turn - 1u);
        else
            await_barrier<kFinishersAndGroups, Block::kWriters + Block::kGroup>();
    }
};

// The four warps that finish tiles. Each thread has one row of a tile, and all vectors of the block's share, or every
// second vector if tiles have 64 rows.
template <class Block> struct Finishers {
    using OwnCorrections = Corrections<Block::kFinished, Block::kVectorsApart>;
    const LinearJob &job;
    const Place &place;
    const uint32_t thread, row, first_vector;
    RowEscapes escapes, next;

    __device__ __forceinline__ Finishers(const LinearJob &linear, const Place &of)
        : job(linear), place(of), thread(threadIdx.x - Block::kMultipliers), row(thread % Block::kTileRows),
          first_vector(place.part * (Block::kVectors / Block::kParts) + thread / Block::kTileRows)
    {
    }
    __device__ __forceinline__ void say_written(uint32_t turn) const
    {
        await_barrier<kGroupsAndFinishers, Block::kWriters + Block::kGroup>();
        if (Block::kParts == 1u) return;
        if (thread < Block::kParts) Block::written().arrive_in(thread);
        __syncwarp();
        Block::written().await_cluster(turn);
    }
    // Signals to the groups that write sums that this block has read the sums. The signal is a release: no group writes
    // new sums before the loads of read_sums() are complete.
    __device__ __forceinline__ void say_read(bool is_last) const
    {
        if (Block::kParts == 1u) {
            if (!is_last) arrive_at_barrier<kFinishersAndGroups, Block::kWriters + Block::kGroup>();
            return;
        }
        await_barrier<kFinishers, Block::kGroup>();
        if (thread < Block::kParts) Block::read().arrive_in(thread);
    }
    // Reads the sums of the thread's row from all blocks of the cluster, and adds them up for each vector.
    __device__ __forceinline__ void read_sums(float (&sums)[Block::kFinished]) const
    {
        float parts[Block::kFinished][Block::kParts];
#pragma unroll
        for (uint32_t part = 0; part < Block::kParts; part++)
#pragma unroll
            for (uint32_t i = 0; i < Block::kFinished; i++)
                parts[i][part] = float_in(part, Block::sum_at(first_vector + Block::kVectorsApart * i, row));
#pragma unroll
        for (uint32_t i = 0; i < Block::kFinished; i++) sums[i] = sum_in_pairs(parts[i]);
    }
    __device__ __forceinline__ void store_sums(const LinearMatrix &matrix, uint32_t to_row, float bias,
                                               const OwnCorrections &corrections,
                                               const float (&sums)[Block::kFinished]) const
    {
#pragma unroll
        for (uint32_t i = 0; i < Block::kFinished; i++) {
            const uint32_t vector = first_vector + Block::kVectorsApart * i;
            if (vector < job.num_vectors)
                store_sum(matrix, matrix.product.y + uint64_t{vector} * matrix.rows() + to_row,
                          corrections.corrected(sums[i], i), bias);
        }
    }
    // Returns the thread's row of a tile, counted in its matrix.
    __device__ __forceinline__ uint32_t row_of(const LinearMatrix &matrix, uint32_t tile) const
    {
        const uint32_t strip = (tile - matrix.first_tile) * (Block::kTileRows / kStripRows);
        return first_row(matrix, strip + row / kStripRows) + row % kStripRows;
    }
    // Finds the escapes of the thread's row in a tile, or in the last tile if `tile` is past it.
    __device__ __forceinline__ void find(uint32_t tile, RowEscapes &found) const
    {
        const uint32_t known = ibp_min_u32(tile, job.num_tiles - 1u);
        const LinearMatrix &matrix = job.matrix_of(known);
        found.find(matrix, row_of(matrix, known));
    }
    // Starts to load the first escapes, before the vectors are ready.
    __device__ __forceinline__ void begin()
    {
        find(place.first_tile, escapes), find(place.first_tile + place.tiles_apart, next);
        escapes.load(job.num_columns);
    }
    // Finishes all tiles of the cluster. While a tile is multiplied, the function loads the first escapes of the next
    // tile. For the tile after the next, it loads the range of escapes in the list.
    __device__ __forceinline__ void run()
    {
        uint32_t turn = 0;
        for (uint32_t tile = place.first_tile; tile < job.num_tiles; tile += place.tiles_apart, turn++) {
            const LinearMatrix &matrix = job.matrix_of(tile);
            const uint32_t to_row = row_of(matrix, tile);
            OwnCorrections corrections;
            corrections.add(job.vectors(), escapes, first_vector);
            const float bias = bias_of(matrix, to_row);
            escapes = next, escapes.load(job.num_columns);
            find(tile + 2u * place.tiles_apart, next);
            say_written(turn);
            float sums[Block::kFinished];
            read_sums(sums);
            say_read(tile + place.tiles_apart >= job.num_tiles);
            store_sums(matrix, to_row, bias, corrections, sums);
        }
        // Wait, because other blocks may still read the sums of this block.
        if (Block::kParts > 1u) Block::read().await_cluster(turn - 1u);
    }
};

template <class Block>
__global__ void __launch_bounds__(Block::kThreads, 1) many_kernel(const __grid_constant__ LinearJob job)
{
#if !defined(__CUDACC__) || defined(__CUDA_ARCH_FEAT_SM90_ALL) // other code has no `wgmma`
    let_next_begin();
    const Place place{blockIdx.x % Block::kParts, blockIdx.x / Block::kParts, gridDim.x / Block::kParts};
    const bool multiplies = threadIdx.x < Block::kMultipliers;
    if (threadIdx.x == Block::kMultipliers) {
        Block::written().begin(Block::kParts), Block::read().begin(Block::kParts);
        SharedBarrier::publish();
    }
    __syncwarp();
    arrive_at_cluster();
    GroupMultiplier<Block> multiplier(job, place);
    Finishers<Block> finishers(job, place);
    if (multiplies)
        multiplier.begin();
    else
        finishers.begin();
    bring_all_vectors<Block>(job, place);
    if (multiplies)
        multiplier.run();
    else
        finishers.run();
#endif
}

} // namespace ibp

#endif
