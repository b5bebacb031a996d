// linear.cuh - multiplies up to 8 vectors by coded matrices of BF16. Weights are decoded in registers, as operands of
// tensor cores, and are never written to memory. The vectors may also come in groups of up to 8; then each group is
// multiplied by one matrix of a stack.
//
// The columns are divided into steps of 128, and step s belongs to piece s % 16 (digits.cuh). A block takes strips of
// 16 rows, one after the other:
//
// 1. Warp w of the block's 8 multiplying warps takes pieces 2 w and 2 w + 1: it multiplies steps 2 w, 2 w + 1, 2 w +
//    16, 2 w + 17 and so on. While it multiplies a step, the bytes of its following steps, including those of the next
//    strip, are copied to shared memory.
// 2. A lane holds 32 elements of row g and 32 elements of row g + 8, where g = lane / 4. An instruction of the tensor
//    cores takes 4 elements of each row from a lane. Columns are permuted so that digits can be unpacked with few
//    instructions; the vectors are permuted in the same way.
// 3. Escapes, which are digits of 15, are treated as ordinary digits, as if their symbol were first_symbol + 15.
// 4. A ninth warp, the finisher, adds up the other warps' sums. It subtracts these wrong products of escapes and adds
//    the products with the right weights, which it reads from a list that was made in advance. It stores the results
//    while the other warps multiply the next strip.
//
// On GPUs of compute capability 9.0 and later a launch overlaps the stream's previous kernel (programmatic dependent
// launch): loads of the first bytes of the matrix are issued before the vectors are ready.
//
// Device memory limits the kernel.
#ifndef IBP_LINEAR_CUH
#define IBP_LINEAR_CUH

#include "digits.cuh"

namespace ibp {

constexpr uint32_t kMostVectors = 8;

// Adds the products of a lane's elements of two rows with x to `sums`. x: the lane's 32 elements of a vector. firsts:
// first_symbol in every byte.
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

// The warps and the shared memory of a block:
//
//     | kStages steps of warp 0 | of warp 1 | ... | sums of a strip with an even turn | with an odd turn |
struct LinearBlock {
    static constexpr uint32_t kWarps = 8, kStages = 3, kThreads = (kWarps + 1u) * kWarp;
    static constexpr uint32_t kBlocksAnSm = 2;
    static_assert(2u * kWarps == kPieces, "each warp must have two pieces");
    static constexpr uint32_t kSums = kWarps * kMostVectors * kStripRows; // number of sums of a strip
    static constexpr uint32_t kSumsStart = kWarps * kStages * StripStep::kBytes;
    static constexpr uint32_t kSharedBytes = kSumsStart + 2u * kSums * sizeof(float);

    // Returns a reference to a warp's sum for a vector and a row, in shared memory. turn: the index of the strip among
    // the block's strips. The sums of even and of odd turns have separate memory.
    static __device__ __forceinline__ float &sum(uint32_t turn, uint32_t warp, uint32_t vector, uint32_t row)
    {
        float *const sums = reinterpret_cast<float *>(shared_bytes() + kSumsStart) + turn % 2u * kSums;
        return sums[(warp * kMostVectors + vector) * kStripRows + row];
    }
    // "Written" means that the sums of a turn have been stored in shared memory. "Read" means that the finisher has
    // read these sums, so that the sums of the turn after the next may overwrite them.
    static __device__ __forceinline__ void say_written(uint32_t turn) { Turns<1>::arrive(turn); }
    static __device__ __forceinline__ void await_written(uint32_t turn) { Turns<1>::await(turn); }
    static __device__ __forceinline__ void say_read(uint32_t turn) { Turns<3>::arrive(turn); }
    static __device__ __forceinline__ void await_read(uint32_t turn) { Turns<3>::await(turn); }

  private:
    // Two named barriers, ID for even turns and ID + 1 for odd turns. Their IDs are constants, because otherwise the
    // compiler would reserve all 16 barriers for the block.
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

// ---- strips ----

// The memory in y for the results of a strip's rows, and the coded rows to which these results belong. coded_row: the
// strip's first row in the coded matrix or stack, and in its list of escapes.
struct StripResults {
    const LinearMatrix &matrix;
    uint32_t row, num_rows; // row: the strip's first row of y; num_rows: number of rows of y
    uint32_t coded_row;
    uint16_t *y;
};

// The strips of a job in which each matrix multiplies all vectors.
struct MatrixStrips {
    using Job = LinearJob;
    const LinearJob &job;

    __device__ __forceinline__ explicit MatrixStrips(const LinearJob &linear) : job(linear) {}
    __device__ __forceinline__ uint32_t count() const { return job.num_tiles; }
    __device__ __forceinline__ uint32_t first_symbol(uint32_t strip) const
    {
        return job.matrix_of(strip).coded().first_symbol;
    }
    __device__ __forceinline__ void find_rows(uint32_t strip, StripRows &rows) const { rows.find(job, strip, 1u, 0u); }
    __device__ __forceinline__ Vectors vectors(uint32_t) const { return job.vectors(); }
    __device__ __forceinline__ StripResults results(uint32_t strip) const
    {
        const LinearMatrix &matrix = job.matrix_of(strip);
        const uint32_t row = first_row(matrix, strip - matrix.first_tile);
        return {matrix, row, matrix.rows(), row, matrix.product.y};
    }
};

// The arguments of a job in which each group of vectors is multiplied by one matrix of a stack.
struct GroupsJob {
    LinearJob job; // has one matrix, the stack
    const ibp_vector_group *groups;
    uint32_t num_groups, num_rows; // num_rows: number of rows of a matrix, a multiple of kStripRows
    // order: a list of numbers of vectors, in which each group has consecutive entries. If it is NULL, each group has
    // consecutive vectors.
    const int64_t *order;
    uint32_t sharing; // number of vectors that share a row of x
};

// The strips of a job of groups. The list of groups ends before the first group without vectors. Each group has all
// strips of its matrix. Earlier work of the stream may have written the groups, so the constructor waits for this work.
struct GroupStrips {
    using Job = GroupsJob;
    const GroupsJob &groups;
    const LinearJob &job;
    const uint32_t of_matrix; // number of strips of a matrix
    uint32_t num_groups = 0;

    __device__ __forceinline__ explicit GroupStrips(const GroupsJob &given)
        : groups(given), job(given.job), of_matrix(given.num_rows / kStripRows)
    {
        await_work_before();
        for (bool is_end = false; num_groups < groups.num_groups && !is_end;) {
            const uint32_t number = num_groups + lane_id();
            const uint32_t empty = __ballot_sync(kAllLanes, number >= groups.num_groups || num_vectors(number) == 0u);
            is_end = empty != 0u;
            num_groups += is_end ? lowest_of(empty) : kWarp;
        }
    }
    // Returns the number of vectors in a group, or 0 if the group has invalid fields.
    __device__ __forceinline__ uint32_t num_vectors(uint32_t number) const
    {
        const ibp_vector_group group = groups.groups[number];
        const bool is_there = group.first < job.num_vectors && group.count <= job.num_vectors - group.first &&
                              group.matrix < job.matrices[0].rows() / groups.num_rows;
        return is_there && group.count <= kMostVectors ? group.count : 0u;
    }
    __device__ __forceinline__ uint32_t count() const { return num_groups * of_matrix; }
    __device__ __forceinline__ uint32_t first_symbol(uint32_t) const { return job.matrices[0].coded().first_symbol; }
    // Returns the index of a strip's first row, counted over all matrices of the stack.
    __device__ __forceinline__ uint32_t coded_row(uint32_t strip) const
    {
        return groups.groups[strip / of_matrix].matrix * groups.num_rows + strip % of_matrix * kStripRows;
    }
    __device__ __forceinline__ void find_rows(uint32_t strip, StripRows &rows) const
    {
        if (strip >= count()) return;
        const ibp_digit_matrix &stack = job.matrices[0].coded();
        rows.pitch = stack.slot_bytes, rows.first = stack.slots + uint64_t{coded_row(strip)} * stack.slot_bytes;
    }
    __device__ __forceinline__ Vectors vectors(uint32_t strip) const
    {
        const ibp_vector_group group = groups.groups[strip / of_matrix];
        if (groups.order == nullptr)
            return {job.x + uint64_t{group.first} * job.num_columns, group.count, job.num_columns};
        return {job.x, group.count, job.num_columns, groups.order + group.first, job.num_vectors - 1u, groups.sharing};
    }
    __device__ __forceinline__ StripResults results(uint32_t strip) const
    {
        uint16_t *const y = job.matrices[0].product.y;
        const uint32_t first = groups.order == nullptr ? groups.groups[strip / of_matrix].first : 0u;
        return {job.matrices[0], strip % of_matrix * kStripRows, groups.num_rows, coded_row(strip),
                y + uint64_t{first} * groups.num_rows};
    }
};

// ---- warps that multiply ----

template <class Strips> struct Multiplier {
    using Block = LinearBlock;
    const Strips &strips;
    const LinearJob &job;
    // stages: offset in shared memory of the warp's stages. piece: the first of the warp's two pieces.
    const uint32_t warp, stages, piece;
    const uint32_t end; // number of steps of a row
    // The strip and the step to copy next, and the stage that receives the copied bytes.
    uint32_t copied_strip, copied_step, copied_stage;
    StripRows copied_rows;

    __device__ __forceinline__ explicit Multiplier(const Strips &of)
        : strips(of), job(of.job), warp(threadIdx.x / kWarp), stages(warp * Block::kStages * StripStep::kBytes),
          piece(2u * warp), end(num_steps(job)), copied_strip(blockIdx.x), copied_step(piece), copied_stage(0)
    {
        strips.find_rows(copied_strip, copied_rows);
    }
    // Starts to copy the next step.
    __device__ __forceinline__ void begin_copies()
    {
        if (copied_strip < strips.count() && copied_step < end)
            StripStep::begin_copy(copied_rows, job.num_columns, copied_step * kStepColumns,
                                  stages + copied_stage * StripStep::kBytes);
        end_copies();
        copied_stage = copied_stage + 1u == Block::kStages ? 0u : copied_stage + 1u;
        copied_step += copied_step % 2u == 0u ? 1u : kPieces - 1u;
        if (copied_step < end) return;
        copied_step = piece, copied_strip += gridDim.x;
        strips.find_rows(copied_strip, copied_rows);
    }
    // Loads the lane's elements of a vector. Elements past the vector's end are zeros. If vector is NULL, all elements
    // are zeros.
    __device__ __forceinline__ void load_x(const uint16_t *vector, uint32_t step, uint32_t (&x)[16]) const
    {
        const uint32_t column = step * kStepColumns + 32u * (lane_id() % 4u);
        const bool wanted = vector != nullptr && column < job.num_columns;
        const uint4 *const from = reinterpret_cast<const uint4 *>(vector + column);
#pragma unroll
        for (uint32_t i = 0; i < 4u; i++) {
            const uint4 words = wanted ? from[i] : make_uint4(0, 0, 0, 0);
            x[4u * i] = words.x, x[4u * i + 1u] = words.y, x[4u * i + 2u] = words.z, x[4u * i + 3u] = words.w;
        }
    }
    // Adds the products of a step of a strip to `sums`. vector: the lane's vector. stage: the stage that holds the
    // step; the function advances it to the next stage.
    __device__ __forceinline__ void multiply_step(const uint16_t *vector, uint32_t step, uint32_t firsts,
                                                  uint32_t &stage, float (&sums)[4])
    {
        const uint32_t g = lane_id() / 4u;
        uint32_t x[16];
        load_x(vector, step, x);
        await_copies<Block::kStages - 2>();
        begin_copies();
        const uint32_t at = stages + stage * StripStep::kBytes;
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
        for (uint32_t strip = blockIdx.x, turn = 0; strip < strips.count(); strip += gridDim.x, turn++) {
            const uint32_t firsts = strips.first_symbol(strip) * kEveryByte;
            const Vectors vectors = strips.vectors(strip);
            const uint16_t *const vector = g < vectors.count ? vectors.of(g) : nullptr;
            float sums[2][4] = {};
#pragma unroll 1
            for (uint32_t step = piece; step < end; step += kPieces) {
                multiply_step(vector, step, firsts, stage, sums[0]);
                if (step + 1u < end) multiply_step(vector, step + 1u, firsts, stage, sums[1]);
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

// Finishes the strips of a block. A lane computes the results of row lane % 16 of a strip with vectors lane / 16, lane
// / 16 + 2, lane / 16 + 4 and lane / 16 + 6.
template <class Strips> __device__ __forceinline__ void finish_strips(const Strips &strips)
{
    using Block = LinearBlock;
    constexpr uint32_t kVectors = kMostVectors / 2u; // number of vectors of a lane
    const uint32_t row = lane_id() % kStripRows, first_vector = lane_id() / kStripRows;
    await_work_before();
    for (uint32_t strip = blockIdx.x, turn = 0; strip < strips.count(); strip += gridDim.x, turn++) {
        const StripResults to = strips.results(strip);
        const Vectors vectors = strips.vectors(strip);
        RowEscapes escapes;
        escapes.find(to.matrix, to.coded_row + row), escapes.load(vectors.columns);
        Corrections<kVectors> corrections;
        corrections.add(vectors, escapes, first_vector);
        const float bias = bias_of(to.matrix, to.coded_row + row);
        Block::await_written(turn);
#pragma unroll
        for (uint32_t i = 0; i < kVectors; i++) {
            const uint32_t vector = first_vector + 2u * i;
            if (vector >= vectors.count) continue;
            float sums[Block::kWarps];
#pragma unroll
            for (uint32_t warp = 0; warp < Block::kWarps; warp++) sums[warp] = Block::sum(turn, warp, vector, row);
            store_sum(to.matrix, to.y + uint64_t{vectors.place(vector)} * to.num_rows + to.row + row,
                      corrections.corrected(sum_in_pairs(sums), i), bias);
        }
        if (strip + 2u * gridDim.x < strips.count()) Block::say_read(turn);
    }
}

template <class Strips>
__global__ void __launch_bounds__(LinearBlock::kThreads, LinearBlock::kBlocksAnSm)
    linear_kernel(const __grid_constant__ typename Strips::Job job)
{
    let_next_begin();
    const Strips strips(job);
    if (threadIdx.x / kWarp < LinearBlock::kWarps)
        Multiplier<Strips>(strips).run();
    else
        finish_strips(strips);
}

} // namespace ibp

#endif
