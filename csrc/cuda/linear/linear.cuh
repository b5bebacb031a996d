// linear.cuh - products of up to 8 vectors with coded matrices of BF16: rows are decoded in registers, as operands of
// tensor cores, and never written.
//
// A block takes strips of 16 rows, one after the other. Each of its multiplying warps has two neighbours of the 16
// pieces of the columns (digits.cuh), and takes their steps of 128 columns from left to right: while a step is
// multiplied, bytes of coming steps, also of the next strip, are copied to shared memory. A lane holds 32 elements each of rows
// g and g + 8, for g = lane / 4: of them tensor cores take 4 and 4 at a time, in an order of columns that the digits
// make cheap, and the vectors come in the same order.
// Escapes are multiplied like other digits, as if their symbols followed those of the digits. One more warp, the
// finisher, takes these products away and adds the right ones, from a list that was made before. It adds up the sums of
// the other warps and stores them, while those multiply the next strip.
// On GPUs of compute capability 9.0 and later a launch overlaps the one before it in the stream (programmatic dependent
// launch): the first bytes of the matrix are under way before the vectors are there.
// Bound by device memory.
#ifndef IBP_LINEAR_CUH
#define IBP_LINEAR_CUH

#include "digits.cuh"

namespace ibp {

constexpr uint32_t kMostVectors = 8;

// Adds the products of a lane's elements of two rows with x, 32 elements of a vector.
__device__ __forceinline__ void multiply_elements(float (&sums)[4], const Elements (&rows)[2], const uint32_t (&x)[16],
                                                  uint32_t firsts)
{
#pragma unroll
    for (uint32_t j = 0; j < 8u; j++) {
        uint32_t a[4];
        make_operand(a, rows, j, firsts);
        const uint32_t b[2] = {permute_bytes(x[2u * j], x[2u * j + 1u], 0x5410u),
                               permute_bytes(x[2u * j], x[2u * j + 1u], 0x7632u)};
        multiply_tile(sums, a, b);
    }
}

// ---- a block ----

// What a block consists of: multiplying warps, stages of each for bytes that are copied, and the sums of two strips.
template <uint32_t WARPS, uint32_t STAGES> struct LinearBlock {
    static constexpr uint32_t kWarps = WARPS, kStages = STAGES, kThreads = (WARPS + 1u) * kWarp;
    static constexpr uint32_t kStageBytes = StripStep::kBytes;
    static_assert(2u * WARPS == kPieces, "a warp has two pieces");
    static constexpr uint32_t kSums = WARPS * kMostVectors * kStripRows; // of a strip
    static constexpr uint32_t kSumsStart = WARPS * STAGES * kStageBytes;
    static constexpr uint32_t kSharedBytes = kSumsStart + 2u * kSums * sizeof(float);

    // The sum of a warp, of strips with even or odd turns of the block.
    static __device__ __forceinline__ float &sum(uint32_t turn, uint32_t warp, uint32_t vector, uint32_t row)
    {
        float *const sums = reinterpret_cast<float *>(shared_bytes() + kSumsStart) + turn % 2u * kSums;
        return sums[(warp * kMostVectors + vector) * kStripRows + row];
    }
    // The sums of a turn are there; they have been read, and the room is free for those of the turn after the next.
    static __device__ __forceinline__ void say_written(uint32_t turn) { Turns<1>::arrive(turn); }
    static __device__ __forceinline__ void await_written(uint32_t turn) { Turns<1>::await(turn); }
    static __device__ __forceinline__ void say_read(uint32_t turn) { Turns<3>::arrive(turn); }
    static __device__ __forceinline__ void await_read(uint32_t turn) { Turns<3>::await(turn); }

  private:
    // Two barriers of the block, of even and odd turns. Their numbers are constants, or the block would have all 16.
    template <uint32_t ID> struct Turns {
        static __device__ __forceinline__ void await(uint32_t turn)
        {
            turn % 2u ? await_barrier<ID + 1u, kThreads>() : await_barrier<ID, kThreads>();
        }
        static __device__ __forceinline__ void arrive(uint32_t turn)
        {
            turn % 2u ? arrive_at_barrier<ID + 1u, kThreads>() : arrive_at_barrier<ID, kThreads>();
        }
    };
};

// ---- warps that multiply ----

template <class Block> struct Multiplier {
    const LinearJob &job;
    const uint32_t warp, stages, piece,
        end; // shared byte of the warp's stages; the first of its pieces; steps of a row
    uint32_t copied_strip, copied_step, copied_stage; // what is copied next, and where to
    StripRows copied_rows;

    __device__ __forceinline__ explicit Multiplier(const LinearJob &linear)
        : job(linear), warp(threadIdx.x / kWarp), stages(warp * Block::kStages * Block::kStageBytes), piece(2u * warp),
          end(num_steps(job)), copied_strip(blockIdx.x), copied_step(piece), copied_stage(0)
    {
        copied_rows.find(job, copied_strip, 1u, 0u);
    }
    // Begins to copy the bytes of the step that is next.
    __device__ __forceinline__ void begin_copies()
    {
        if (copied_strip < job.num_tiles && copied_step < end)
            StripStep::begin_copy(copied_rows, job.num_columns, copied_step * kStepColumns,
                                  stages + copied_stage * Block::kStageBytes);
        end_copies();
        copied_stage = copied_stage + 1u == Block::kStages ? 0u : copied_stage + 1u;
        copied_step += copied_step % 2u == 0u ? 1u : kPieces - 1u;
        if (copied_step < end) return;
        copied_step = piece, copied_strip += gridDim.x;
        copied_rows.find(job, copied_strip, 1u, 0u);
    }
    // The lane's elements of vector g, zeros where there are none.
    __device__ __forceinline__ void load_x(uint32_t step, uint32_t (&x)[16]) const
    {
        const uint32_t g = lane_id() / 4u, column = step * kStepColumns + 32u * (lane_id() % 4u);
        const bool wanted = g < job.num_vectors && column < job.num_columns;
        const uint4 *const from = reinterpret_cast<const uint4 *>(job.x + uint64_t{g} * job.num_columns + column);
#pragma unroll
        for (uint32_t i = 0; i < 4u; i++) {
            const uint4 words = wanted ? from[i] : make_uint4(0, 0, 0, 0);
            x[4u * i] = words.x, x[4u * i + 1u] = words.y, x[4u * i + 2u] = words.z, x[4u * i + 3u] = words.w;
        }
    }
    // Adds the products of a step of a strip. stage: where it is; moved on.
    __device__ __forceinline__ void multiply_step(uint32_t step, uint32_t firsts, uint32_t &stage, float (&sums)[4])
    {
        const uint32_t g = lane_id() / 4u;
        uint32_t x[16];
        load_x(step, x);
        await_copies<Block::kStages - 2>();
        begin_copies();
        const uint32_t at = stages + stage * Block::kStageBytes;
        const Elements rows[2] = {StripStep::elements(at, g), StripStep::elements(at, g + 8u)};
        multiply_elements(sums, rows, x, firsts);
        stage = stage + 1u == Block::kStages ? 0u : stage + 1u;
    }
    __device__ __forceinline__ void run()
    {
        const uint32_t g = lane_id() / 4u, t = lane_id() % 4u;
#pragma unroll
        for (uint32_t i = 0; i < Block::kStages - 1u; i++) begin_copies();
        await_work_before();
        uint32_t stage = 0;
        for (uint32_t strip = blockIdx.x, turn = 0; strip < job.num_tiles; strip += gridDim.x, turn++) {
            const uint32_t firsts = job.matrix_of(strip).coded().first_symbol * 0x01010101u;
            float sums[2][4] = {};
#pragma unroll 1
            for (uint32_t step = piece; step < end; step += kPieces) {
                multiply_step(step, firsts, stage, sums[0]);
                if (step + 1u < end) multiply_step(step + 1u, firsts, stage, sums[1]);
            }
            if (turn >= 2u) Block::await_read(turn);
#pragma unroll
            for (uint32_t i = 0; i < 4u; i++)
                Block::sum(turn, warp, 2u * t + i % 2u, g + 8u * (i / 2u)) = sums[0][i] + sums[1][i];
            Block::say_written(turn);
        }
    }
};

// ---- the warp that finishes ----

// A lane has row lane % 16 of a strip, and vectors lane / 16 + 2 i.
template <class Block> __device__ __forceinline__ void finish_strips(const LinearJob &job)
{
    constexpr uint32_t kVectors = kMostVectors / 2u; // of a lane
    const uint32_t row = lane_id() % kStripRows, first_vector = lane_id() / kStripRows;
    await_work_before();
    for (uint32_t strip = blockIdx.x, turn = 0; strip < job.num_tiles; strip += gridDim.x, turn++) {
        const LinearMatrix &matrix = job.matrix_of(strip);
        const uint32_t to_row = first_row(matrix, strip - matrix.first_tile) + row;
        RowEscapes escapes;
        escapes.find(matrix, to_row), escapes.load(job);
        Corrections<kVectors> corrections;
        corrections.add(job, escapes, first_vector);
        const float bias = bias_of(matrix, to_row);
        Block::await_written(turn);
#pragma unroll
        for (uint32_t i = 0; i < kVectors; i++) {
            const uint32_t vector = first_vector + 2u * i;
            if (vector >= job.num_vectors) continue;
            float sums[Block::kWarps];
#pragma unroll
            for (uint32_t warp = 0; warp < Block::kWarps; warp++) sums[warp] = Block::sum(turn, warp, vector, row);
            store_sum(job, matrix, vector, to_row, corrections.corrected(sum_in_pairs(sums), i), bias);
        }
        if (strip + 2u * gridDim.x < job.num_tiles) Block::say_read(turn);
    }
}

template <class Block, uint32_t BLOCKS>
__global__ void __launch_bounds__(Block::kThreads, BLOCKS) linear_kernel(const __grid_constant__ LinearJob job)
{
    let_next_begin();
    if (threadIdx.x / kWarp < Block::kWarps)
        Multiplier<Block>(job).run();
    else
        finish_strips<Block>(job);
}

} // namespace ibp

#endif
