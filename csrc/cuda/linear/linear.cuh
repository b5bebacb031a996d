// linear.cuh - products of up to 8 vectors with a coded matrix of BF16: rows are decoded in registers, as operands of
// tensor cores, and never written.
//
// A block takes strips of 16 rows, one after the other. Its multiplying warps take steps of 128 columns in turn: bytes
// of the coming steps, those of the next strip among them, are copied to shared memory while one is multiplied. A lane
// holds 32 elements each of rows g and g + 8, for g = lane / 4: of them tensor cores take 4 and 4 at a time, in an
// order of columns that the digits make cheap, and the vectors come in the same order.
// Escapes are multiplied like other digits, as if their symbols followed those of the digits. One more warp, the
// finisher, takes these products away and adds the right ones, from a list that was made before. It adds up the sums of
// the other warps, always in the same order, and stores them, while those multiply the next strip.
// On GPUs of compute capability 9.0 and later a launch overlaps the one before it in the stream (programmatic dependent
// launch): the first bytes of the matrix are under way before the vectors are there.
// Bound by device memory.
#ifndef IBP_LINEAR_CUH
#define IBP_LINEAR_CUH

#include "../floats.cuh"
#include "../warp.cuh"

#include <cfloat>

namespace ibp {

constexpr uint32_t kMostVectors = IBP_MOST_VECTORS;

struct LinearJob {
    ibp_digit_matrix matrix;
    const uint16_t *x, *bias; // [num_vectors, columns]; [rows] or NULL
    uint16_t *y;              // [num_vectors, rows]
    uint32_t num_vectors;

    __host__ __device__ __forceinline__ uint32_t rows() const { return static_cast<uint32_t>(matrix.num_rows); }
    __host__ __device__ __forceinline__ uint32_t columns() const { return matrix.num_columns; }
};

// ---- what the hardware does ----

// Begins to copy 16 bytes to shared memory; zeros if they are not wanted.
__device__ __forceinline__ void copy_vector(uint32_t shared, const uint8_t *from, bool wanted)
{
#ifdef __CUDACC__
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes() + shared)),
                   num_bytes = wanted ? 16u : 0u;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(num_bytes)
                 : "memory");
#else
    const uint4 vector = wanted ? *reinterpret_cast<const uint4 *>(from) : uint4{};
    *reinterpret_cast<uint4 *>(shared_bytes() + shared) = vector;
#endif
}
// Ends a group of copies, and waits until all groups but the last NUM_LEFT have arrived.
__device__ __forceinline__ void end_copies()
{
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int NUM_LEFT> __device__ __forceinline__ void await_copies()
{
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;" ::"n"(NUM_LEFT) : "memory");
#endif
    __syncwarp();
}

// Lets the next kernel of the stream begin, if it is launched to overlap this one; waits until what the stream had
// before is done and can be read. The vectors are read behind it, and never as read-only data (`ld.global.nc`): other
// kernels may write them while this one has begun.
__device__ __forceinline__ void let_next_begin()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void await_work_before()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// sums += a b, of 16 rows and 8 vectors over 16 columns: `mma.m16n8k16`. Of lane 4 g + t, halves of words: a[0], a[2]:
// row g, columns 2 t and 2 t + 1, and those 8 further; a[1], a[3]: row g + 8; b: vector g; sums: rows g, g, g + 8,
// g + 8, vectors 2 t, 2 t + 1, 2 t, 2 t + 1.
__device__ __forceinline__ void multiply_tile(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
#ifdef __CUDACC__
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    const uint32_t g = lane_id() / 4u, t = lane_id() % 4u;
    for (uint32_t lane = 0; lane < 4u; lane++)
        for (uint32_t i = 0; i < 4u; i++) {
            const uint32_t weights = __shfl_sync(kAllLanes, a[i], static_cast<int>(4u * g + lane));
            for (uint32_t v = 0; v < 2u; v++) {
                const uint32_t x = __shfl_sync(kAllLanes, b[i / 2u], static_cast<int>(4u * (2u * t + v) + lane));
                float &sum = sums[2u * (i % 2u) + v];
                sum += float_of_bits(weights << 16) * float_of_bits(x << 16);
                sum += float_of_bits(weights & 0xffff0000u) * float_of_bits(x & 0xffff0000u);
            }
        }
#endif
}

// A barrier of NUM_THREADS threads of the block, whole warps: some wait until all have arrived, the others only arrive.
template <uint32_t ID, uint32_t NUM_THREADS> __device__ __forceinline__ void await_barrier()
{
#ifdef __CUDACC__
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(NUM_THREADS) : "memory");
#else
    named_barrier(ID, NUM_THREADS);
#endif
}
template <uint32_t ID, uint32_t NUM_THREADS> __device__ __forceinline__ void arrive_at_barrier()
{
#ifdef __CUDACC__
    asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(NUM_THREADS) : "memory");
#else
    named_arrival(ID, NUM_THREADS);
#endif
}

// ---- elements ----

// 32 elements of a row: a byte of sign and mantissa, and a digit of four bits each.
struct Elements {
    uint32_t residuals[8], digits[4];
};

// Both elements of a word, from residual and exponent in a byte each to sign, exponent, mantissa.
__device__ __forceinline__ uint32_t turned(uint32_t rotated)
{
    return select_bits(0x7fff7fffu, rotated >> 1, rotated << 15);
}

// Exponents of 8 elements, a byte each, those with even numbers apart from those with odd ones. firsts: first_symbol in
// every byte.
struct Exponents {
    uint32_t even, odd;

    __device__ __forceinline__ Exponents(uint32_t digits, uint32_t firsts)
        : even((digits & 0x0f0f0f0fu) + firsts), odd((digits >> 4 & 0x0f0f0f0fu) + firsts)
    {
    }
};

// Adds the products of a lane's elements of two rows with x, 32 elements of a vector. Of four elements in a row of
// columns, 0 and 2 make a word and 1 and 3: exponents of them are neighbours. There are two sums, so that products wait
// for each other less.
__device__ __forceinline__ void multiply_elements(float (&sums)[2][4], const Elements (&rows)[2],
                                                  const uint32_t (&x)[16], uint32_t firsts)
{
#pragma unroll
    for (uint32_t i = 0; i < 4u; i++) {
        const Exponents exponents[2] = {{rows[0].digits[i], firsts}, {rows[1].digits[i], firsts}};
#pragma unroll
        for (uint32_t half = 0; half < 2u; half++) {
            const uint32_t j = 2u * i + half, even_order = half ? 0x7260u : 0x5240u,
                           odd_order = half ? 0x7361u : 0x5341u;
            uint32_t a[4];
#pragma unroll
            for (uint32_t r = 0; r < 2u; r++) {
                a[r] = turned(permute_bytes(rows[r].residuals[j], exponents[r].even, even_order));
                a[2u + r] = turned(permute_bytes(rows[r].residuals[j], exponents[r].odd, odd_order));
            }
            const uint32_t b[2] = {permute_bytes(x[2u * j], x[2u * j + 1u], 0x5410u),
                                   permute_bytes(x[2u * j], x[2u * j + 1u], 0x7632u)};
            multiply_tile(sums[half], a, b);
        }
    }
}

// ---- a block ----

constexpr uint32_t kStripRows = 16, kStepColumns = 128;

// What a block consists of: multiplying warps, stages of each for bytes that are copied, and the sums of two strips.
template <uint32_t WARPS, uint32_t STAGES> struct LinearBlock {
    static constexpr uint32_t kWarps = WARPS, kStages = STAGES, kThreads = (WARPS + 1u) * kWarp;
    static constexpr uint32_t kDigitsStart = kStripRows * kStepColumns, kStageBytes = kDigitsStart / 2u * 3u;
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

__host__ __device__ __forceinline__ uint32_t num_strips(const LinearJob &job)
{
    return (job.rows() + kStripRows - 1u) / kStripRows;
}
// The last strip shares rows with the one before where they are no multiple of 16.
__device__ __forceinline__ uint32_t first_row(const LinearJob &job, uint32_t strip)
{
    return ibp_min_u32(strip * kStripRows, job.rows() - kStripRows);
}

// ---- warps that multiply ----

template <class Block> struct Multiplier {
    const LinearJob &job;
    const uint32_t lane, warp, stages;                // shared byte of the warp's stages
    uint32_t copied_strip, copied_step, copied_stage; // what is copied next, and where to

    __device__ __forceinline__ explicit Multiplier(const LinearJob &linear)
        : job(linear), lane(lane_id()), warp(threadIdx.x / kWarp), stages(warp * Block::kStages * Block::kStageBytes),
          copied_strip(blockIdx.x), copied_step(warp), copied_stage(0)
    {
    }
    __device__ __forceinline__ bool has_step(uint32_t step) const { return step * kStepColumns < job.columns(); }

    // Begins to copy the bytes of the step that is next. Vector v of the residuals of row r is at v ^ (r % 2), so that
    // lanes that read together read from different banks.
    __device__ __forceinline__ void begin_copies()
    {
        const uint32_t column = copied_step * kStepColumns, to = stages + copied_stage * Block::kStageBytes;
        const uint32_t row = lane / 8u, vector = lane % 8u, g = lane / 4u, t = lane % 4u;
        if (copied_strip < num_strips(job) && has_step(copied_step)) {
            const uint64_t pitch = job.matrix.slot_bytes;
            const uint8_t *const slots = job.matrix.slots + first_row(job, copied_strip) * pitch,
                                 *const residuals = slots + row * pitch + column + 16u * vector,
                                 *const digits = slots + g * pitch + job.columns() + column / 2u + 16u * t;
            const uint32_t residuals_to = to + row * kStepColumns + 16u * (vector ^ row % 2u),
                           digits_to = to + Block::kDigitsStart + g * kStepColumns / 2u + 16u * t;
#pragma unroll
            for (uint32_t i = 0; i < kStripRows / 4u; i++)
                copy_vector(residuals_to + 4u * i * kStepColumns, residuals + 4u * i * pitch,
                            column + 16u * vector < job.columns());
#pragma unroll
            for (uint32_t i = 0; i < kStripRows / 8u; i++)
                copy_vector(digits_to + 4u * i * kStepColumns, digits + 8u * i * pitch,
                            column + 32u * t < job.columns());
        }
        end_copies();
        copied_stage = copied_stage + 1u == Block::kStages ? 0u : copied_stage + 1u;
        copied_step += Block::kWarps;
        if (!has_step(copied_step)) copied_step = warp, copied_strip += gridDim.x;
    }
    __device__ __forceinline__ Elements elements_of(uint32_t stage, uint32_t row) const
    {
        const uint32_t t = lane % 4u, first = stages + stage * Block::kStageBytes;
        const uint4 *const residuals = reinterpret_cast<const uint4 *>(shared_bytes() + first + row * kStepColumns);
        const uint4 low = residuals[2u * t ^ row % 2u], high = residuals[(2u * t + 1u) ^ row % 2u];
        const uint4 digits =
            reinterpret_cast<const uint4 *>(shared_bytes() + first + Block::kDigitsStart + row * kStepColumns / 2u)[t];
        return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, {digits.x, digits.y, digits.z, digits.w}};
    }
    // The lane's elements of vector g, zeros where there are none.
    __device__ __forceinline__ void load_x(uint32_t step, uint32_t (&x)[16]) const
    {
        const uint32_t g = lane / 4u, column = step * kStepColumns + 32u * (lane % 4u);
        const bool wanted = g < job.num_vectors && column < job.columns();
        const uint4 *const from = reinterpret_cast<const uint4 *>(job.x + uint64_t{g} * job.columns() + column);
#pragma unroll
        for (uint32_t i = 0; i < 4u; i++) {
            const uint4 words = wanted ? from[i] : make_uint4(0, 0, 0, 0);
            x[4u * i] = words.x, x[4u * i + 1u] = words.y, x[4u * i + 2u] = words.z, x[4u * i + 3u] = words.w;
        }
    }
    // Adds the products of the warp's steps of a strip. stage: where the first of them is; moved on.
    __device__ __forceinline__ void multiply_steps(uint32_t &stage, float (&sums)[2][4])
    {
        const uint32_t g = lane / 4u;
        for (uint32_t step = warp; has_step(step); step += Block::kWarps) {
            uint32_t x[16];
            load_x(step, x);
            await_copies<Block::kStages - 2>();
            begin_copies();
            const Elements rows[2] = {elements_of(stage, g), elements_of(stage, g + 8u)};
            multiply_elements(sums, rows, x, job.matrix.first_symbol * 0x01010101u);
            stage = stage + 1u == Block::kStages ? 0u : stage + 1u;
        }
    }
    __device__ __forceinline__ void run()
    {
        const uint32_t g = lane / 4u, t = lane % 4u;
#pragma unroll
        for (uint32_t i = 0; i < Block::kStages - 1u; i++) begin_copies();
        await_work_before();
        uint32_t stage = 0;
        for (uint32_t strip = blockIdx.x, turn = 0; strip < num_strips(job); strip += gridDim.x, turn++) {
            float sums[2][4] = {};
            multiply_steps(stage, sums);
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
template <class Block> struct Finisher {
    static constexpr uint32_t kVectors = kMostVectors / 2u; // of a lane
    static constexpr uint32_t kTogether = 4;                // entries whose loads are under way together

    const LinearJob &job;
    const uint32_t row, first_vector;

    __device__ __forceinline__ explicit Finisher(const LinearJob &linear)
        : job(linear), row(lane_id() % kStripRows), first_vector(lane_id() / kStripRows)
    {
    }
    __device__ __forceinline__ float x_at(uint32_t vector, uint32_t column) const
    {
        return float_of_bits(static_cast<uint32_t>(job.x[uint64_t{vector} * job.columns() + column]) << 16);
    }
    // Adds the products of entries with a vector: of what they were multiplied as, and of what they are. Of the first
    // kind there are none where x is infinite or NaN: both weights have the same sign, and the sum of the strip is
    // infinite or NaN already, as it is to be.
    __device__ __forceinline__ void add_entries(const ibp_escape (&entries)[kTogether], uint32_t num_entries,
                                                uint32_t vector, float *taken, float *right) const
    {
        float x[kTogether];
#pragma unroll
        for (uint32_t j = 0; j < kTogether; j++) x[j] = j < num_entries ? x_at(vector, entries[j].column) : 0.0f;
#pragma unroll
        for (uint32_t j = 0; j < kTogether; j++) {
            if (j >= num_entries) continue;
            const float finite = fabsf(x[j]) <= FLT_MAX ? x[j] : 0.0f;
            *taken = fmaf(float_of_bits(static_cast<uint32_t>(entries[j].taken) << 16), finite, *taken);
            *right = fmaf(float_of_bits(static_cast<uint32_t>(entries[j].weight) << 16), x[j], *right);
        }
    }
    __device__ __forceinline__ void add_escapes(uint32_t of_row, float (&taken)[kVectors], float (&right)[kVectors])
    {
        const uint32_t end = ibp_min_u32(__ldg(job.matrix.starts + of_row + 1u), job.matrix.num_escapes);
        for (uint32_t first = __ldg(job.matrix.starts + of_row); first < end; first += kTogether) {
            ibp_escape entries[kTogether] = {};
            const uint32_t num_entries = ibp_min_u32(end - first, kTogether);
#pragma unroll
            for (uint32_t j = 0; j < kTogether; j++)
                if (j < num_entries) entries[j] = entry_at(first + j);
#pragma unroll
            for (uint32_t i = 0; i < kVectors; i++)
                if (first_vector + 2u * i < job.num_vectors)
                    add_entries(entries, num_entries, first_vector + 2u * i, &taken[i], &right[i]);
        }
    }
    __device__ __forceinline__ ibp_escape entry_at(uint32_t i) const
    {
        const uint2 words = __ldg(reinterpret_cast<const uint2 *>(job.matrix.escapes + i));
        return {ibp_min_u32(words.x, job.columns() - 1u), static_cast<uint16_t>(words.y),
                static_cast<uint16_t>(words.y >> 16)};
    }
    __device__ __forceinline__ void store(uint32_t vector, uint32_t to_row, float sum) const
    {
        if (job.bias != nullptr) sum += float_of_bits(static_cast<uint32_t>(job.bias[to_row]) << 16);
        job.y[uint64_t{vector} * job.rows() + to_row] = static_cast<uint16_t>(bfloat16s_of_floats(sum, sum));
    }
    __device__ __forceinline__ void run()
    {
        await_work_before();
        for (uint32_t strip = blockIdx.x, turn = 0; strip < num_strips(job); strip += gridDim.x, turn++) {
            const uint32_t to_row = first_row(job, strip) + row;
            float taken[kVectors] = {}, right[kVectors] = {};
            add_escapes(to_row, taken, right);
            Block::await_written(turn);
#pragma unroll
            for (uint32_t i = 0; i < kVectors; i++) {
                const uint32_t vector = first_vector + 2u * i;
                if (vector >= job.num_vectors) continue;
                float sum = 0.0f;
#pragma unroll
                for (uint32_t warp = 0; warp < Block::kWarps; warp++) sum += Block::sum(turn, warp, vector, row);
                // In this order an element alone, multiplied by one, comes out exactly.
                store(vector, to_row, (sum - taken[i]) + right[i]);
            }
            if (strip + 2u * gridDim.x < num_strips(job)) Block::say_read(turn);
        }
    }
};

template <class Block, uint32_t BLOCKS>
__global__ void __launch_bounds__(Block::kThreads, BLOCKS) linear_kernel(const __grid_constant__ LinearJob job)
{
    let_next_begin();
    if (threadIdx.x / kWarp < Block::kWarps)
        Multiplier<Block>(job).run();
    else
        Finisher<Block>(job).run();
}

} // namespace ibp

#endif
