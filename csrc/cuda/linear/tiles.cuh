// tiles.cuh - multiplies up to 256 vectors by coded matrices of BF16, on GPUs of compute capability 9.0. It is used
// for more than IBP_MOST_INVARIANT vectors. Each weight is decoded once for all vectors, in registers, as an operand of
// `wgmma`.
//
// A first kernel copies the vectors to an image in device memory, whose elements have the order of the operands of
// `wgmma`. In a second kernel a block takes tiles of 128 or 192 rows, one after the other; the blocks of a cluster
// divide the columns among themselves:
//
// 1. One warp copies the weights of the following steps of 128 columns to shared memory, and another warp copies the
//    image, half a step at a time.
// 2. Groups of four warps multiply 64 rows each. Tensor cores multiply half a step while the warps decode the next
//    half.
// 3. A warp finds escapes in about one of three steps. It puts their true weights into the operands, so the sums need
//    no correction.
// 4. The blocks of a cluster add up their sums through shared memory, and store the results.
//
// Tensor cores and decoding limit the speed of the second kernel.
#ifndef IBP_LINEAR_TILES_CUH
#define IBP_LINEAR_TILES_CUH

#include "sm90.cuh"
#ifdef __CUDACC__
#include <cuda.h>
#endif

namespace ibp {

struct TilesJob {
#ifdef __CUDACC__
    struct Maps {
        CUtensorMap residuals, digits;
    } maps[IBP_MOST_MATRICES];
#endif
    LinearJob job;
    const uint8_t *image;
    uint32_t parts; // number of parts of the columns, one for each block of a cluster: 1, 2, 3, 4 or 8
};

// The sizes and the shared memory of a block. VECTORS: 64, 128 or 256, the largest number of vectors. GROUPS: number of
// groups of four warps that multiply: 2 or 3, but 3 only if VECTORS is not 256.
template <uint32_t VECTORS, uint32_t GROUPS> struct TileBlock {
    static constexpr uint32_t kVectors = VECTORS, kGroup = 128, kGroups = GROUPS, kTileRows = 64 * kGroups;
    static constexpr uint32_t kMultipliers = kGroup * kGroups, kWarps = kMultipliers / kWarp;
    static constexpr uint32_t kThreads = kMultipliers + kGroup;
    // Number of registers of a thread that multiplies, and of a thread that copies. All threads of the block together
    // use nearly all registers of an SM.
    static constexpr uint32_t kMultiplierRegisters = GROUPS == 2u ? 232 : 152, kCopierRegisters = 40;
    // The time of a step, in the units of TilesPlan::cost. On an H200, a step of 192 rows took about 1.2 times the time
    // of a step of 128 rows.
    static constexpr uint32_t kStepCost = GROUPS == 2u ? 13 : 16;
    static constexpr uint32_t kHalf = kStepColumns / 2u;
    static constexpr uint32_t kWeightStages = VECTORS == 256u                  ? 2
                                              : VECTORS == 64u && GROUPS == 2u ? 5
                                                                               : 3,
                              kHalfStages = 4;
    static constexpr uint32_t kDigitsStart = kTileRows * kStepColumns, kWeightBytes = kDigitsStart / 2u * 3u,
                              kHalfBytes = VECTORS * kHalf * 2u;
    static constexpr uint32_t kHalvesStart = kWeightStages * kWeightBytes,
                              kSumsStart = kHalvesStart + kHalfStages * kHalfBytes;
    // kRound: number of vectors whose sums are in shared memory at the same time. kPitch: distance in floats from one
    // vector's sums to the next vector's.
    static constexpr uint32_t kRound = 64, kPitch = kTileRows + 4u;
    static constexpr uint32_t kBarriersStart = kSumsStart + kRound * kPitch * sizeof(float);
    static constexpr uint32_t kNumBarriers = 2u * (kWeightStages + kHalfStages) + 2u;
    static constexpr uint32_t kSharedBytes = kBarriersStart + kNumBarriers * SharedBarrier::kBytes;

    // Returns the index of a tile's first row in the tile's matrix.
    static __device__ __forceinline__ uint32_t first_row(const LinearMatrix &matrix, uint32_t tile)
    {
        return (tile - matrix.first_tile) * kTileRows;
    }
    static __device__ __forceinline__ SharedBarrier barrier(uint32_t number)
    {
        return {kBarriersStart + number * SharedBarrier::kBytes};
    }
    // Barriers of the cluster. written: all blocks have written their sums of a round. read: all blocks have read the
    // sums of a round, so the memory of these sums may be overwritten.
    static __device__ __forceinline__ SharedBarrier written() { return barrier(kNumBarriers - 2u); }
    static __device__ __forceinline__ SharedBarrier read() { return barrier(kNumBarriers - 1u); }
};

// A ring of stages in shared memory. One warp copies data to the stages, one stage after the other. The warps that
// multiply read the stages and release them. FIRST: index of the ring's first barrier.
template <class Block, uint32_t FIRST, uint32_t STAGES> struct Ring {
    static constexpr uint32_t kUsers = Block::kMultipliers + kWarp; // number of threads that use the ring
    uint32_t stage = 0, turn = 0;

    static __device__ __forceinline__ void begin()
    {
        for (uint32_t i = 0; i < STAGES; i++)
            Block::barrier(FIRST + i).begin(1), Block::barrier(FIRST + STAGES + i).begin(Block::kWarps);
    }
    __device__ __forceinline__ void move_on()
    {
        stage++;
        if (stage == STAGES) stage = 0, turn++;
    }
    __device__ __forceinline__ SharedBarrier filled() const { return Block::barrier(FIRST + stage); }
    // Waits until the stage is empty. Only the warp that copies calls this function.
    __device__ __forceinline__ void await_room() const
    {
#ifdef __CUDACC__
        if (turn > 0u) Block::barrier(FIRST + STAGES + stage).await(turn - 1u);
#else
        if (turn > 0u) named_barrier(FIRST + STAGES + stage + kFirstOfRings, kUsers);
#endif
    }
    // If kernels are emulated without a GPU, signals that the copies are done. On a GPU the function does nothing,
    // because the copies themselves arrive at the barrier.
    __device__ __forceinline__ void say_filled() const
    {
#ifndef __CUDACC__
        named_arrival(FIRST + stage + kFirstOfRings, kUsers);
#endif
    }
    // Waits until the stage is filled. All warps that multiply call this function.
    __device__ __forceinline__ void await_filled() const
    {
#ifdef __CUDACC__
        filled().await(turn);
#else
        named_barrier(FIRST + stage + kFirstOfRings, kUsers);
#endif
    }
    __device__ __forceinline__ void say_emptied() const
    {
        __syncwarp();
#ifdef __CUDACC__
        if (lane_id() == 0u) Block::barrier(FIRST + STAGES + stage).arrive();
#else
        named_arrival(FIRST + STAGES + stage + kFirstOfRings, kUsers);
#endif
    }

  private:
    // If kernels are emulated, named barriers stand in for the barriers of the rings. They have IDs that no named
    // barrier of a GPU has.
    static constexpr uint32_t kFirstOfRings = 16;
};
template <class Block> using WeightRing = Ring<Block, 0, Block::kWeightStages>;
template <class Block> using HalfRing = Ring<Block, 2u * Block::kWeightStages, Block::kHalfStages>;

constexpr uint32_t kAllMultipliers = 1; // ID of the named barrier at which all warps that multiply meet

// A block's share of a job: steps begin to end - 1 of the tiles first_tile, first_tile + tiles_apart and so on.
struct TilesPlace {
    uint32_t part, begin, end, first_tile, tiles_apart;

    __device__ __forceinline__ explicit TilesPlace(const TilesJob &tiles)
        : part(blockIdx.x % tiles.parts), begin(num_steps(tiles.job) * part / tiles.parts),
          end(num_steps(tiles.job) * (part + 1u) / tiles.parts), first_tile(blockIdx.x / tiles.parts),
          tiles_apart(gridDim.x / tiles.parts)
    {
    }
};

// ---- copies ----

// Copies the weights of one step of a tile: 128 columns of all its rows. In shared memory each row has a line of 128
// bytes of residuals, in units of 16 bytes; unit j is at position j ^ (row % 8). After the lines of all rows, each row
// has a line of 64 bytes of digits, in which unit j is at position j ^ (row / 2 % 4). With these positions, lanes that
// read at the same time read from different banks. Rows and columns outside the matrix are filled with zeros.
template <class Block>
__device__ __forceinline__ void copy_weights(const TilesJob &tiles, uint32_t tile, uint32_t step, uint32_t to,
                                             const SharedBarrier &filled)
{
    const uint32_t number = tiles.job.number_of(tile);
    const LinearMatrix &matrix = tiles.job.matrices[number];
    const uint32_t row = Block::first_row(matrix, tile);
#ifdef __CUDACC__
    if (lane_id() != 0u) return;
    const auto copy = [&](const CUtensorMap &map, uint32_t byte, uint32_t column) {
        asm volatile("{\n.reg .b64 once;\ncreatepolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
                     "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1, {%2, %3}], [%4], once;\n}" ::"r"(shared_address(byte)),
                     "l"(&map), "r"(column), "r"(row), "r"(shared_address(filled.byte))
                     : "memory");
    };
    filled.arrive_and_expect(Block::kWeightBytes);
    copy(tiles.maps[number].residuals, to, step * kStepColumns);
    copy(tiles.maps[number].digits, to + Block::kDigitsStart, step * kStepColumns / 2u);
#else
    const uint32_t columns = tiles.job.num_columns;
    for (uint32_t i = lane_id(); i < Block::kTileRows * 12u; i += kWarp) {
        const uint32_t r = i / 12u, j = i % 12u < 8u ? i % 12u : i % 12u - 8u;
        const bool is_digits = i % 12u >= 8u;
        const uint32_t column = step * kStepColumns + (is_digits ? 32u : 16u) * j;
        const uint8_t *const from = matrix.coded().slots + uint64_t{row + r} * matrix.coded().slot_bytes +
                                    (is_digits ? columns + column / 2u : column);
        uint8_t *const line = shared_bytes() + to + (is_digits ? Block::kDigitsStart + 64u * r : 128u * r);
        const bool is_there = row + r < matrix.rows() && column < columns;
        reinterpret_cast<uint4 *>(line)[j ^ (is_digits ? r / 2u % 4u : r % 8u)] =
            is_there ? *reinterpret_cast<const uint4 *>(from) : uint4{};
    }
#endif
}
template <class Block>
__device__ __forceinline__ void copy_half(const uint8_t *from, uint32_t to, const SharedBarrier &filled)
{
#ifdef __CUDACC__
    if (lane_id() != 0u) return;
    filled.arrive_and_expect(Block::kHalfBytes);
    asm volatile("{\n.reg .b64 again;\ncreatepolicy.fractional.L2::evict_last.b64 again, 1.0;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], again;\n}" ::"r"(shared_address(to)),
                 "l"(from), "r"(Block::kHalfBytes), "r"(shared_address(filled.byte))
                 : "memory");
#else
    for (uint32_t i = lane_id() * 16u; i < Block::kHalfBytes; i += kWarp * 16u)
        *reinterpret_cast<uint4 *>(shared_bytes() + to + i) = *reinterpret_cast<const uint4 *>(from + i);
#endif
}

template <class Block> __device__ __forceinline__ void copy_all_weights(const TilesJob &tiles, const TilesPlace &place)
{
    WeightRing<Block> ring;
    for (uint32_t tile = place.first_tile; tile < tiles.job.num_tiles; tile += place.tiles_apart)
        for (uint32_t step = place.begin; step < place.end; step++, ring.move_on()) {
            ring.await_room();
            copy_weights<Block>(tiles, tile, step, ring.stage * Block::kWeightBytes, ring.filled());
            ring.say_filled();
        }
}
template <class Block> __device__ __forceinline__ void copy_all_halves(const TilesJob &tiles, const TilesPlace &place)
{
    HalfRing<Block> ring;
    await_work_before();
    for (uint32_t tile = place.first_tile; tile < tiles.job.num_tiles; tile += place.tiles_apart)
        for (uint32_t half = 2u * place.begin; half < 2u * place.end; half++, ring.move_on()) {
            ring.await_room();
            copy_half<Block>(tiles.image + uint64_t{half} * Block::kHalfBytes,
                             Block::kHalvesStart + ring.stage * Block::kHalfBytes, ring.filled());
            ring.say_filled();
        }
}

// ---- products ----

// A cursor over the escapes of a row.
struct RowCursor {
    const ibp_escape *at, *end; // at: the entry after `next`
    uint2 entry, next;          // the current escape and the next one, which is loaded ahead

    __device__ __forceinline__ uint2 load(const ibp_escape *from) const
    {
        return from < end ? __ldg(reinterpret_cast<const uint2 *>(from)) : make_uint2(UINT32_MAX, 0);
    }
    __device__ __forceinline__ void skip(uint32_t first_column)
    {
        while (entry.x < first_column) entry = next, next = load(at++);
    }
    __device__ __forceinline__ void find(const LinearMatrix &matrix, uint32_t row, uint32_t first_column)
    {
        const ibp_digit_matrix &coded = matrix.coded();
        const uint32_t own = ibp_min_u32(row, matrix.rows() - 1u);
        const auto start = [&](uint32_t of) { return ibp_min_u32(__ldg(coded.starts + of), coded.num_escapes); };
        at = coded.escapes + start(own), end = coded.escapes + start(own + 1u);
        if (row >= matrix.rows()) at = end;
        entry = load(at), next = load(at + 1), at += 2;
        skip(first_column);
    }
};

// The state of a thread in a group of warps that multiplies. Each warp has 16 rows of a tile, and each lane decodes
// elements of the rows `row` and `row + 8`.
template <class Block> struct TileMultiplier {
    static constexpr uint32_t kSums = Block::kVectors / 2u; // number of sums of a thread
    static constexpr uint32_t kOperands = 4;                // number of operands of half a step

    const LinearJob &job;
    const TilesPlace &place;
    const uint32_t t = lane_id() % 4u, row = threadIdx.x / kWarp * kStripRows + lane_id() / 4u;
    uint32_t firsts; // first_symbol of the tile's matrix, repeated in every byte
    WeightRing<Block> weights;
    HalfRing<Block> halves, emptied;
    RowCursor cursors[2];
    uint32_t next_column; // the lowest column of the current escapes in the warp's rows
    uint32_t num_halves = 0;

    // Half a step of the rows `row` and `row + 8`: 16 elements of each row, in the lower half of an `Elements`.
    Elements coded[2];

    __device__ __forceinline__ TileMultiplier(const LinearJob &linear, const TilesPlace &of) : job(linear), place(of) {}
    __device__ __forceinline__ void load(uint32_t half)
    {
        const uint8_t *const from = shared_bytes() + weights.stage * Block::kWeightBytes;
#pragma unroll
        for (uint32_t r = 0; r < 2u; r++) {
            const uint32_t own = row + 8u * r;
            const uint4 residuals =
                *reinterpret_cast<const uint4 *>(from + own * 128u + 16u * ((2u * t + half) ^ own % 8u));
            const uint2 digits = *reinterpret_cast<const uint2 *>(from + Block::kDigitsStart + own * 64u +
                                                                  16u * (t ^ own / 2u % 4u) + 8u * half);
            coded[r] = {{residuals.x, residuals.y, residuals.z, residuals.w}, {digits.x, digits.y}};
        }
    }
    __device__ __forceinline__ void decode(uint32_t (&operands)[kOperands][4]) const
    {
#pragma unroll
        for (uint32_t i = 0; i < kOperands; i++) make_operand(operands[i], coded, i, firsts);
    }

    // ---- escapes ----

    __device__ __forceinline__ void find_next()
    {
        next_column = __reduce_min_sync(kAllLanes, ibp_min_u32(cursors[0].entry.x, cursors[1].entry.x));
    }
    // Returns whether an escape is in a column that this lane decodes in half `half` of the step that ends before
    // column `end`.
    __device__ __forceinline__ bool is_own(const uint2 &entry, uint32_t end, uint32_t half) const
    {
        return entry.x < end && entry.x % kStepColumns / 32u == t && entry.x / 16u % 2u == half;
    }
    // Returns a mask, equal in all lanes, of the escapes of a step. Bit (2 * half + r) is set if any lane has an escape
    // in that half, in its row `row + 8 * r`. Bit 4 is set if any row of the warp has a second escape in the step.
    __device__ __forceinline__ uint32_t find_escapes(uint32_t end) const
    {
        uint32_t found = 0;
#pragma unroll
        for (uint32_t r = 0; r < 2u; r++) {
#pragma unroll
            for (uint32_t half = 0; half < 2u; half++)
                if (is_own(cursors[r].entry, end, half)) found |= 1u << (2u * half + r);
            if (cursors[r].next.x < end) found |= 16u;
        }
        return __reduce_or_sync(kAllLanes, found);
    }
    static __device__ __forceinline__ void put(uint32_t (&operands)[kOperands][4], uint32_t r, const uint2 &entry,
                                               bool is_here)
    {
        // Of four consecutive elements, elements 0 and 2 are the halves of one word, and elements 1 and 3 are the
        // halves of the other word.
        const uint32_t number = entry.x % 16u / 4u * 2u + entry.x % 2u, order = entry.x & 2u ? 0x5410u : 0x3254u;
#pragma unroll
        for (uint32_t i = 0; i < kOperands; i++)
#pragma unroll
            for (uint32_t odd = 0; odd < 2u; odd++) {
                uint32_t &word = operands[i][2u * odd + r];
                word = permute_bytes(word, entry.y, is_here && number == 2u * i + odd ? order : 0x3210u);
            }
    }
    __device__ __forceinline__ void put_escapes(uint32_t (&operands)[kOperands][4], uint32_t found, uint32_t end,
                                                uint32_t half) const
    {
#pragma unroll
        for (uint32_t r = 0; r < 2u; r++) {
            if (found >> (2u * half + r) & 1u) put(operands, r, cursors[r].entry, is_own(cursors[r].entry, end, half));
            if ((found & 16u) == 0u) continue;
            const ibp_escape *at = cursors[r].at;
            for (uint2 entry = cursors[r].next; entry.x < end; entry = cursors[r].load(at++))
                put(operands, r, entry, is_own(entry, end, half));
        }
    }

    // ---- steps ----

    __device__ __forceinline__ void begin_tile(uint32_t tile)
    {
        const LinearMatrix &matrix = job.matrix_of(tile);
        firsts = matrix.coded().first_symbol * 0x01010101u;
#pragma unroll
        for (uint32_t r = 0; r < 2u; r++)
            cursors[r].find(matrix, Block::first_row(matrix, tile) + row + 8u * r, place.begin * kStepColumns);
        find_next();
        weights.await_filled();
        load(0);
    }
    // Adds the products of a step to `sums`, and loads the first half of the next step. The first half of this step
    // must have been loaded.
    __device__ __forceinline__ void multiply_step(uint32_t step, uint32_t (&operands)[2][kOperands][4],
                                                  float (&sums)[kSums])
    {
        const uint32_t end = (step + 1u) * kStepColumns;
        const bool has_escapes = next_column < end;
        const uint32_t found = has_escapes ? find_escapes(end) : 0u;
#pragma unroll
        for (uint32_t half = 0; half < 2u; half++) {
            auto &own = operands[half];
            GroupProducts::await<1>(own);
            if (num_halves++ >= 2u) emptied.say_emptied(), emptied.move_on(); // the half before the previous one
            decode(own);
            if (found != 0u) put_escapes(own, found, end, half);
            if (half == 0u) {
                load(1);
            } else {
                if (has_escapes) {
#pragma unroll
                    for (uint32_t r = 0; r < 2u; r++) cursors[r].skip(end);
                    find_next();
                }
                weights.say_emptied(), weights.move_on();
                if (step + 1u < place.end) weights.await_filled(), load(0);
            }
            halves.await_filled();
            GroupProducts::order_registers();
#pragma unroll
            for (uint32_t i = 0; i < kOperands; i++)
                GroupProducts::begin(sums, own[i],
                                     LinedVectors{Block::kHalvesStart + halves.stage * Block::kHalfBytes, i});
            GroupProducts::end_batch();
            halves.move_on();
        }
    }
    __device__ __forceinline__ void multiply_tile_rows(uint32_t tile, float (&sums)[kSums])
    {
        uint32_t operands[2][kOperands][4] = {};
#pragma unroll
        for (uint32_t i = 0; i < kSums; i++) sums[i] = 0.0f;
        begin_tile(tile);
#pragma unroll 1
        for (uint32_t step = place.begin; step < place.end; step++) multiply_step(step, operands, sums);
        GroupProducts::await<0>(sums);
    }
};

// ---- sums ----

// Adds the biases of rows `row` and `row + 1` to their sums and stores the results, in one word if possible.
struct RowPair {
    const LinearMatrix &matrix;
    uint32_t num_vectors, row;
    float bias[2];

    __device__ __forceinline__ RowPair(const LinearJob &job, const LinearMatrix &of, uint32_t first)
        : matrix(of), num_vectors(job.num_vectors), row(first)
    {
#pragma unroll
        for (uint32_t i = 0; i < 2u; i++) bias[i] = row + i < matrix.rows() ? bias_of(matrix, row + i) : 0.0f;
    }
    __device__ __forceinline__ void store(uint32_t vector, float first, float second) const
    {
        if (vector >= num_vectors || row >= matrix.rows()) return;
        uint16_t *const y = matrix.product.y + uint64_t{vector} * matrix.rows() + row;
        const uint32_t both = bfloat16s_of_floats(first + bias[0], second + bias[1]);
        if (reinterpret_cast<uintptr_t>(y) % 4u == 0u && row + 1u < matrix.rows()) {
            *reinterpret_cast<uint32_t *>(y) = both;
            return;
        }
        y[0] = static_cast<uint16_t>(both);
        if (row + 1u < matrix.rows()) y[1] = static_cast<uint16_t>(both >> 16);
    }
};

// Stores a block's sums directly from registers. The block must have multiplied all columns. Lanes with neighbouring
// rows exchange sums, so that each lane stores two rows of one vector.
template <class Block>
__device__ __forceinline__ void store_sums(const LinearJob &job, uint32_t tile,
                                           const float (&sums)[Block::kVectors / 2u])
{
    const LinearMatrix &matrix = job.matrix_of(tile);
    const uint32_t g = lane_id() / 4u, t = lane_id() % 4u,
                   row = Block::first_row(matrix, tile) + threadIdx.x / kWarp * kStripRows + (g & ~1u);
    const RowPair pairs[2] = {RowPair(job, matrix, row), RowPair(job, matrix, row + 8u)};
    const bool is_odd = g % 2u != 0u;
#pragma unroll
    for (uint32_t i = 0; i < Block::kVectors / 8u; i++)
#pragma unroll
        for (uint32_t r = 0; r < 2u; r++) {
            const float first = sums[4u * i + 2u * r], second = sums[4u * i + 2u * r + 1u],
                        other = __shfl_xor_sync(kAllLanes, is_odd ? first : second, 4);
            pairs[r].store(8u * i + 2u * t + g % 2u, is_odd ? other : first, is_odd ? second : other);
        }
}

// In a cluster every block has partial sums for all vectors. Each block takes a share of the vectors, adds up their
// partial sums from all blocks, and stores the results.
template <class Block> struct SharedSums {
    // A thread adds up the sums of one pair of rows. kPairs: number of pairs of rows in a tile. kApart: number of
    // vectors whose sums the threads of a block add up at the same time. It is also the distance from one vector of a
    // thread to the thread's next vector.
    static constexpr uint32_t kPairs = Block::kTileRows / 2u, kApart = Block::kMultipliers / kPairs;

    const TilesJob &tiles;
    const TilesPlace &place;
    uint32_t turn = 0;

    static __device__ __forceinline__ uint32_t at(uint32_t vector, uint32_t row)
    {
        return Block::kSumsStart + (vector * Block::kPitch + row) * static_cast<uint32_t>(sizeof(float));
    }
    static __device__ __forceinline__ float2 floats_in(uint32_t block, uint32_t byte)
    {
#ifdef __CUDACC__
        float2 both;
        asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                     : "=f"(both.x), "=f"(both.y)
                     : "r"(address_in(block, byte)));
        return both;
#else
        return *reinterpret_cast<const float2 *>(shared_bytes() + byte);
#endif
    }
    // Adds up and stores the sums of a round, which has kRound vectors. vectors: the index of the round's first vector.
    template <uint32_t PARTS> __device__ __forceinline__ void add(uint32_t tile, uint32_t vectors) const
    {
        constexpr uint32_t kShare = (Block::kRound + PARTS - 1u) / PARTS, kTogether = 8u / PARTS;
        const uint32_t row = threadIdx.x % kPairs * 2u;
        const LinearMatrix &matrix = tiles.job.matrix_of(tile);
        const RowPair pair(tiles.job, matrix, Block::first_row(matrix, tile) + row);
        const uint32_t begin = place.part * kShare, end = ibp_min_u32(begin + kShare, Block::kRound);
#pragma unroll 1
        for (uint32_t vector = begin + threadIdx.x / kPairs; vector < end; vector += kTogether * kApart) {
            float2 found[kTogether][PARTS];
#pragma unroll
            for (uint32_t part = 0; part < PARTS; part++)
#pragma unroll
                for (uint32_t i = 0; i < kTogether; i++)
                    found[i][part] = floats_in(part, at(ibp_min_u32(vector + i * kApart, end - 1u), row));
#pragma unroll
            for (uint32_t i = 0; i < kTogether; i++) {
                float2 sum = found[i][0];
#pragma unroll
                for (uint32_t part = 1; part < PARTS; part++) sum.x += found[i][part].x, sum.y += found[i][part].y;
                if (vector + i * kApart < end) pair.store(vectors + vector + i * kApart, sum.x, sum.y);
            }
        }
    }
    __device__ __forceinline__ void add_parts(uint32_t tile, uint32_t vectors) const
    {
        if (tiles.parts == 2u) add<2>(tile, vectors);
        if (tiles.parts == 3u) add<3>(tile, vectors);
        if (tiles.parts == 4u) add<4>(tile, vectors);
        if (tiles.parts == 8u) add<8>(tile, vectors);
    }
    // Waits until all blocks have read the sums of the previous round.
    __device__ __forceinline__ void await_read() const
    {
        if (turn > 0u) Block::read().await_cluster(turn - 1u);
    }
    __device__ __forceinline__ void store(uint32_t tile, const float (&sums)[Block::kVectors / 2u])
    {
        const uint32_t own_row = threadIdx.x / kWarp * kStripRows + lane_id() / 4u, t = lane_id() % 4u;
#pragma unroll
        for (uint32_t round = 0; round < Block::kVectors / Block::kRound; round++, turn++) {
            await_read();
#pragma unroll
            for (uint32_t i = 0; i < Block::kRound / 2u; i++)
                *reinterpret_cast<float *>(shared_bytes() +
                                           at(i / 4u * 8u + 2u * t + i % 2u, own_row + 8u * (i / 2u % 2u))) =
                    sums[round * (Block::kRound / 2u) + i];
            await_barrier<kAllMultipliers, Block::kMultipliers>();
            if (threadIdx.x < tiles.parts) Block::written().arrive_in(threadIdx.x);
            Block::written().await_cluster(turn);
            add_parts(tile, round * Block::kRound);
            await_barrier<kAllMultipliers, Block::kMultipliers>();
            if (threadIdx.x < tiles.parts) Block::read().arrive_in(threadIdx.x);
        }
    }
};

// ---- the kernels ----

template <uint32_t REGISTERS, bool MORE> __device__ __forceinline__ void take_registers()
{
#ifdef __CUDACC__
    if constexpr (MORE)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    else
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

template <class Block>
__global__ void __launch_bounds__(Block::kThreads, 1) tiles_kernel(const __grid_constant__ TilesJob tiles)
{
#if !defined(__CUDACC__) || defined(__CUDA_ARCH_FEAT_SM90_ALL) // this code uses `wgmma`
    let_next_begin();
    const TilesPlace place(tiles);
    if (threadIdx.x == 0u) {
        WeightRing<Block>::begin(), HalfRing<Block>::begin();
        Block::written().begin(tiles.parts), Block::read().begin(tiles.parts);
        SharedBarrier::publish();
    }
    __syncthreads();
    arrive_at_cluster(), await_others_of_cluster();
    if (threadIdx.x < Block::kMultipliers) {
        take_registers<Block::kMultiplierRegisters, true>();
        TileMultiplier<Block> multiplier(tiles.job, place);
        SharedSums<Block> shared_sums{tiles, place};
        for (uint32_t tile = place.first_tile; tile < tiles.job.num_tiles; tile += place.tiles_apart) {
            float sums[Block::kVectors / 2u];
            multiplier.multiply_tile_rows(tile, sums);
            if (tile == place.first_tile) await_work_before(); // earlier work may still read y
            if (tiles.parts == 1u)
                store_sums<Block>(tiles.job, tile, sums);
            else
                shared_sums.store(tile, sums);
        }
        shared_sums.await_read();
    } else {
        take_registers<Block::kCopierRegisters, false>();
        const uint32_t warp = (threadIdx.x - Block::kMultipliers) / kWarp;
        if (warp == 0u) copy_all_weights<Block>(tiles, place);
        if (warp == 1u) copy_all_halves<Block>(tiles, place);
    }
#endif
}

// Writes the image of the vectors. The image consists of the halves of all steps, one after the other. In each half,
// every vector has a line of 128 bytes (LinedVectors). A thread copies one operand of one vector. Vectors and columns
// that do not exist are filled with zeros.
template <uint32_t VECTORS> __global__ void image_kernel(const __grid_constant__ LinearJob job, uint8_t *image)
{
    let_next_begin();
    await_work_before();
    constexpr uint32_t kOperands = kStepColumns / 16u; // number of operands in a step
    const uint32_t item = blockIdx.x * blockDim.x + threadIdx.x, operand = item % kOperands,
                   vector = item / kOperands % VECTORS, step = item / (kOperands * VECTORS);
    if (step >= num_steps(job)) return;
    uint2 words[4];
#pragma unroll
    for (uint32_t t = 0; t < 4u; t++) {
        const uint32_t column = step * kStepColumns + 32u * t + 4u * operand;
        const bool is_there = vector < job.num_vectors && column < job.num_columns;
        words[t] = is_there ? *reinterpret_cast<const uint2 *>(job.x + uint64_t{vector} * job.num_columns + column)
                            : make_uint2(0, 0);
    }
    uint8_t *const to = image + uint64_t{2u * step + operand / 4u} * (VECTORS * 128u);
#pragma unroll
    for (uint32_t half = 0; half < 2u; half++) {
        const uint32_t order = half ? 0x7632u : 0x5410u;
        *reinterpret_cast<uint4 *>(to + LinedVectors::place(vector, operand % 4u * 2u + half)) =
            make_uint4(permute_bytes(words[0].x, words[0].y, order), permute_bytes(words[1].x, words[1].y, order),
                       permute_bytes(words[2].x, words[2].y, order), permute_bytes(words[3].x, words[3].y, order));
    }
}

} // namespace ibp

#endif
