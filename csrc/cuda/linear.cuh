// linear.cuh - products of up to 8 vectors with a coded matrix of BF16: rows are decoded in registers, as operands of
// tensor cores, and never written.
//
// A block takes 16 rows, a strip, and its warps take steps of 128 columns in turn. Bytes of the coming steps are copied
// to shared memory while one is multiplied. A lane holds 32 elements each of rows g and g + 8, for g = lane / 4: of
// them tensor cores take 4 and 4 at a time, in an order of columns that the digits make cheap, and the vectors come in
// the same order. The warps' sums are added in the end.
// Escapes are multiplied like other digits, as if their symbols followed those of the digits. They are
// noted; these products are taken away in the end and the right ones added, when the warps have met all escapes of a
// row: only then the order of its raw symbols is known.
// Rows that are raw, default or corrupt, leave their slot, or have more escapes than are noted are irregular: they are
// multiplied one after the other by the whole block.
// Bound by device memory.
#ifndef IBP_LINEAR_CUH
#define IBP_LINEAR_CUH

#include "decode/find_row.cuh"
#include "floats.cuh"
#include "warp.cuh"

namespace ibp {

constexpr uint32_t kMostVectors = IBP_MOST_VECTORS;

struct LinearJob {
    ibp_table table;
    const uint16_t *x, *bias; // [num_vectors, columns]; [rows] or NULL
    uint16_t *y;              // [num_vectors, rows]
    uint32_t num_vectors, columns, rows;
    ibp_fault *fault;
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
__device__ __forceinline__ uint32_t element_of(uint32_t residual, uint32_t exponent)
{
    return turned(exponent << 8 | residual) & 0xffffu;
}

// Digits of 8 elements, those with even numbers and those with odd ones in bytes.
struct Digits {
    uint32_t even, odd;

    __device__ __forceinline__ explicit Digits(uint32_t digits)
        : even(digits & 0x0f0f0f0fu), odd(digits >> 4 & 0x0f0f0f0fu)
    {
    }
    // Bit 4 of every byte that is an escape, and other bits.
    __device__ __forceinline__ uint32_t escapes() const { return (even + 0x01010101u) | (odd + 0x01010101u); }
};
__device__ __forceinline__ uint32_t any_escape(const Elements &elements)
{
    uint32_t found = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4u; i++) found |= Digits(elements.digits[i]).escapes();
    return found & 0x10101010u;
}

// Adds the products of a lane's elements of two rows with x, 32 elements of a vector. Of four elements in a row of
// columns, 0 and 2 make a word and 1 and 3: exponents of them are neighbours. There are two sums, so that products wait
// for each other less. firsts: first_symbol in every byte.
__device__ __forceinline__ void multiply_elements(float (&sums)[2][4], const Elements (&rows)[2],
                                                  const uint32_t (&x)[16], uint32_t firsts)
{
#pragma unroll
    for (uint32_t i = 0; i < 4u; i++) {
        const Digits digits[2] = {Digits(rows[0].digits[i]), Digits(rows[1].digits[i])};
#pragma unroll
        for (uint32_t half = 0; half < 2u; half++) {
            const uint32_t j = 2u * i + half, even_order = half ? 0x7260u : 0x5240u,
                           odd_order = half ? 0x7361u : 0x5341u;
            uint32_t a[4];
#pragma unroll
            for (uint32_t r = 0; r < 2u; r++) {
                a[r] = turned(permute_bytes(rows[r].residuals[j], digits[r].even + firsts, even_order));
                a[2u + r] = turned(permute_bytes(rows[r].residuals[j], digits[r].odd + firsts, odd_order));
            }
            const uint32_t b[2] = {permute_bytes(x[2u * j], x[2u * j + 1u], 0x5410u),
                                   permute_bytes(x[2u * j], x[2u * j + 1u], 0x7632u)};
            multiply_tile(sums[half], a, b);
        }
    }
}

// ---- a strip ----

// TILES: of 16 rows.
template <uint32_t WARPS, uint32_t STAGES, uint32_t TILES> struct LinearStrip {
    static constexpr uint32_t kRows = 16 * TILES, kColumns = 128; // of a warp's step
    static constexpr uint32_t kThreads = WARPS * kWarp, kStages = STAGES;
    static constexpr uint32_t kDigitsStart = kRows * kColumns, kStageBytes = kRows * kColumns * 3u / 2u;
    static constexpr uint32_t kMostEscapes = 32; // of a row
    static constexpr uint32_t kIrregular = ~0u;

    static constexpr uint32_t kMostMet = kRows * kMostEscapes;

    struct Escape {
        uint32_t row, at; // column and residual
    };

    // Behind the stages in shared memory.
    struct Notes {
        uint4 symbols[kRows][kMostEscapes / 16u]; // the raw ones of a row
        uint32_t wanted[kRows], found[kRows];     // escapes: by the row's length, or kIrregular; met
        uint32_t num_met;
        Escape met[kMostMet];                                           // in the order met
        uint32_t columns[kRows][kMostEscapes];                          // in the order of columns
        float weights[kRows][kMostEscapes], taken[kRows][kMostEscapes]; // what they are, and were multiplied as
    };
    static constexpr uint32_t kNotesStart = WARPS * STAGES * kStageBytes;
    static constexpr uint32_t kSharedBytes = kNotesStart + sizeof(Notes);
    static_assert(STAGES * kStageBytes >= 4u * kRows * kMostVectors, "sums take the place of stages");
    static_assert(kThreads >= kRows * kMostVectors && kThreads >= kRows * kMostEscapes / 16u, "a thread a value");

    const LinearJob &job;
    const uint8_t *const slots;                   // of the first row
    const uint32_t first_row, lane, warp, stages; // shared byte of the warp's stages

    __device__ __forceinline__ LinearStrip(const LinearJob &linear, uint32_t row)
        : job(linear), slots(linear.table.slots + uint64_t{row} * linear.table.slot_bytes), first_row(row),
          lane(lane_id()), warp(threadIdx.x / kWarp), stages(threadIdx.x / kWarp * STAGES * kStageBytes)
    {
    }
    static __device__ __forceinline__ Notes &notes()
    {
        return *reinterpret_cast<Notes *>(shared_bytes() + kNotesStart);
    }
    __device__ __forceinline__ uint32_t coded_bytes() const { return job.columns / 2u * 3u; } // without escapes

    // Begins to copy a step's bytes to a stage. Vector v of the residuals of row r is at v ^ (r % 2), so that lanes
    // that read together read from different banks.
    __device__ __forceinline__ void begin_copies(uint32_t step, uint32_t stage) const
    {
        const uint32_t column = step * kColumns, to = stages + stage * kStageBytes;
        const uint32_t row = lane / 8u, vector = lane % 8u, g = lane / 4u, t = lane % 4u;
        const uint64_t pitch = job.table.slot_bytes;
        const uint8_t *const residuals = slots + row * pitch + column + 16u * vector, *const digits =
                                                                                          slots + g * pitch +
                                                                                          job.columns + column / 2u +
                                                                                          16u * t;
        const uint32_t residuals_to = to + row * kColumns + 16u * (vector ^ row % 2u),
                       digits_to = to + kDigitsStart + g * kColumns / 2u + 16u * t;
        if (column < job.columns) {
#pragma unroll
            for (uint32_t i = 0; i < kRows / 4u; i++)
                copy_vector(residuals_to + 4u * i * kColumns, residuals + 4u * i * pitch,
                            column + 16u * vector < job.columns);
#pragma unroll
            for (uint32_t i = 0; i < kRows / 8u; i++)
                copy_vector(digits_to + 4u * i * kColumns, digits + 8u * i * pitch, column + 32u * t < job.columns);
        }
        end_copies();
    }
    __device__ __forceinline__ Elements elements_of(uint32_t stage, uint32_t row) const
    {
        const uint32_t t = lane % 4u, first = stages + stage * kStageBytes;
        const uint4 *const residuals = reinterpret_cast<const uint4 *>(shared_bytes() + first + row * kColumns);
        const uint4 low = residuals[2u * t ^ row % 2u], high = residuals[(2u * t + 1u) ^ row % 2u];
        const uint4 digits =
            reinterpret_cast<const uint4 *>(shared_bytes() + first + kDigitsStart + row * kColumns / 2u)[t];
        return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, {digits.x, digits.y, digits.z, digits.w}};
    }
    // The lane's elements of vector g, zeros where there are none.
    __device__ __forceinline__ void load_x(uint32_t step, uint32_t (&x)[16]) const
    {
        const uint32_t g = lane / 4u, column = step * kColumns + 32u * (lane % 4u);
        const bool wanted = g < job.num_vectors && column < job.columns;
        const uint4 *const from = reinterpret_cast<const uint4 *>(job.x + uint64_t{g} * job.columns + column);
#pragma unroll
        for (uint32_t i = 0; i < 4u; i++) {
            const uint4 words = wanted ? __ldg(from + i) : make_uint4(0, 0, 0, 0);
            x[4u * i] = words.x, x[4u * i + 1u] = words.y, x[4u * i + 2u] = words.z, x[4u * i + 3u] = words.w;
        }
    }

    // ---- escapes ----

    // What the rows' lengths say, and the raw symbols in their slots.
    __device__ __forceinline__ void begin_notes() const
    {
        const uint32_t room = job.table.slot_bytes - coded_bytes();
        if (threadIdx.x < kRows) {
            const uint32_t length = __ldg(job.table.lengths + first_row + threadIdx.x),
                           most = ibp_min_u32(room, kMostEscapes);
            const bool regular = length - coded_bytes() <= most && length != IBP_DEFAULT_LENGTH(2u * job.columns);
            notes().wanted[threadIdx.x] = regular ? length - coded_bytes() : kIrregular;
            notes().found[threadIdx.x] = 0;
            if (threadIdx.x == 0u) notes().num_met = 0;
        }
        if (threadIdx.x < kRows * kMostEscapes / 16u) {
            const uint32_t row = threadIdx.x / (kMostEscapes / 16u), i = threadIdx.x % (kMostEscapes / 16u);
            const uint8_t *const symbols = slots + uint64_t{row} * job.table.slot_bytes + coded_bytes() + 16u * i;
            notes().symbols[row][i] =
                16u * (i + 1u) <= room ? __ldg(reinterpret_cast<const uint4 *>(symbols)) : make_uint4(0, 0, 0, 0);
        }
        __syncthreads();
    }
    // Of a lane's elements in a row, the first of which is in the given column.
    static __device__ __forceinline__ void note_escapes(const Elements &elements, uint32_t row, uint32_t column)
    {
        if (!any_escape(elements) || notes().wanted[row] == kIrregular) return;
#pragma unroll
        for (uint32_t i = 0; i < 4u; i++)
            for (uint32_t left = escaped(elements.digits[i]); left != 0u; left &= left - 1u) {
                const uint32_t k = ibp_popcount((left & -left) - 1u) / 4u,
                               residuals = k < 4u ? elements.residuals[2u * i] : elements.residuals[2u * i + 1u],
                               place = atomicAdd(&notes().num_met, 1u);
                if (place < kMostMet)
                    notes().met[place] = {row, (column + 8u * i + k) << 8 | (residuals >> 8u * (k % 4u) & 0xffu)};
            }
    }
    // Bit 0 of every nibble that is an escape.
    static __device__ __forceinline__ uint32_t escaped(uint32_t digits)
    {
        digits &= digits >> 1;
        return digits & digits >> 2 & 0x11111111u;
    }
    // Puts the escapes of all rows in order: the rank of each among those of its row is that of its symbol.
    __device__ __forceinline__ void place_escapes() const
    {
        const uint32_t num_met = notes().num_met;
        for (uint32_t i = threadIdx.x; i < num_met; i += kThreads) {
            const Escape met = notes().met[i];
            uint32_t rank = 0;
            for (uint32_t j = 0; j < num_met; j++) rank += notes().met[j].row == met.row && notes().met[j].at < met.at;
            atomicAdd(&notes().found[met.row], 1u);
            if (rank >= kMostEscapes) continue;
            const uint32_t symbol = reinterpret_cast<const uint8_t *>(notes().symbols[met.row])[rank],
                           taken = static_cast<uint32_t>(job.table.codebook.planes.first_symbol) + 15u;
            notes().columns[met.row][rank] = met.at >> 8;
            notes().weights[met.row][rank] = float_of_bits(element_of(met.at & 0xffu, symbol) << 16);
            notes().taken[met.row][rank] = float_of_bits(element_of(met.at & 0xffu, taken) << 16);
        }
        __syncthreads();
    }

    // ---- sums ----

    __device__ __forceinline__ float x_at(uint32_t vector, uint32_t column) const
    {
        return float_of_bits(static_cast<uint32_t>(__ldg(job.x + uint64_t{vector} * job.columns + column)) << 16);
    }
    __device__ __forceinline__ void store(uint32_t vector, uint32_t row, float sum) const
    {
        if (job.bias != nullptr) sum += float_of_bits(static_cast<uint32_t>(__ldg(job.bias + row)) << 16);
        job.y[uint64_t{vector} * job.rows + row] = static_cast<uint16_t>(bfloat16s_of_floats(sum, sum));
    }
    static __device__ __forceinline__ float *sums_of_warp(uint32_t number)
    {
        return reinterpret_cast<float *>(shared_bytes() + number * STAGES * kStageBytes);
    }
    __device__ __forceinline__ void multiply(float (&sums)[TILES][2][4]) const
    {
        const uint32_t firsts = static_cast<uint32_t>(job.table.codebook.planes.first_symbol) * 0x01010101u;
        uint32_t stage = 0;
        for (uint32_t step = warp; step * kColumns < job.columns; step += WARPS) {
            uint32_t x[16];
            load_x(step, x);
            await_copies<STAGES - 2>();
            begin_copies(step + (STAGES - 1u) * WARPS, stage == 0u ? STAGES - 1u : stage - 1u);
#pragma unroll
            for (uint32_t tile = 0; tile < TILES; tile++) {
                const uint32_t row = 16u * tile + lane / 4u, column = step * kColumns + 32u * (lane % 4u);
                const Elements rows[2] = {elements_of(stage, row), elements_of(stage, row + 8u)};
                note_escapes(rows[0], row, column);
                note_escapes(rows[1], row + 8u, column);
                multiply_elements(sums[tile], rows, x, firsts);
            }
            stage = stage + 1u == STAGES ? 0u : stage + 1u;
        }
    }
    // Adds up what the warps have, and stores it.
    __device__ __forceinline__ void finish(const float (&sums)[TILES][2][4]) const
    {
        const uint32_t g = lane / 4u, t = lane % 4u;
        __syncthreads(); // all stages have been read, all escapes noted
#pragma unroll
        for (uint32_t tile = 0; tile < TILES; tile++)
#pragma unroll
            for (uint32_t i = 0; i < 4u; i++)
                sums_of_warp(warp)[(16u * tile + g + 8u * (i / 2u)) * kMostVectors + 2u * t + i % 2u] =
                    sums[tile][0][i] + sums[tile][1][i];
        if (notes().num_met > kMostMet) { // by corrupt rows alone: all are looked at one by one
            if (threadIdx.x < kRows) notes().wanted[threadIdx.x] = kIrregular;
            __syncthreads();
            return;
        }
        place_escapes();
        const uint32_t row = threadIdx.x % kRows, vector = threadIdx.x / kRows, wanted = notes().wanted[row];
        if (vector >= job.num_vectors || wanted == kIrregular) return;
        float sum = 0;
        if (notes().found[row] == wanted) {
            for (uint32_t w = 0; w < WARPS; w++) sum += sums_of_warp(w)[row * kMostVectors + vector];
            for (uint32_t j = 0; j < wanted; j++)
                sum = fmaf(-notes().taken[row][j], x_at(vector, notes().columns[row][j]), sum);
            for (uint32_t j = 0; j < wanted; j++)
                sum = fmaf(notes().weights[row][j], x_at(vector, notes().columns[row][j]), sum);
        } else if (vector == 0u) {
            record_fault(job.fault, IBP_CORRUPT_ROW, first_row + row, first_row + row);
        }
        store(vector, first_row + row, sum);
    }
};

// ---- irregular rows ----

// A row's stored bytes, in two parts.
struct StoredRow {
    const uint8_t *slot, *overflow;
    uint32_t in_slot;

    __device__ __forceinline__ uint32_t byte(uint32_t i) const { return i < in_slot ? slot[i] : overflow[i - in_slot]; }
};

// Sum of v over the block's threads before this one, and over all. shared: a word for each warp.
template <uint32_t WARPS> __device__ __forceinline__ uint32_t block_scan(uint32_t v, uint32_t *shared, uint32_t &total)
{
    uint32_t of_warp, before = exclusive_scan(v, of_warp);
    __syncthreads();
    if (lane_id() == 0u) shared[threadIdx.x / kWarp] = of_warp;
    __syncthreads();
    total = 0;
    for (uint32_t w = 0; w < WARPS; w++) {
        before += w < threadIdx.x / kWarp ? shared[w] : 0u;
        total += shared[w];
    }
    return before;
}

// Products of one row, by all threads of a block, each with a range of columns. Not inlined: few rows need it.
template <class Strip, uint32_t WARPS>
static __device__ __noinline__ void multiply_irregular(const Strip &strip, uint32_t row)
{
    const LinearJob &job = strip.job;
    const uint32_t per_thread = (job.columns + Strip::kThreads - 1u) / Strip::kThreads,
                   first = ibp_min_u32(threadIdx.x * per_thread, job.columns),
                   end = ibp_min_u32(first + per_thread, job.columns);
    uint32_t *const shared = reinterpret_cast<uint32_t *>(shared_bytes());
    ibp_row_place place;
    bool good = find_row(job.table, row, &place);
    const StoredRow stored{job.table.slots + place.slot_start, job.table.overflow + place.overflow_start,
                           place.in_slot};
    const bool coded = good && !place.raw && !place.is_default;
    good = good && (!coded || place.in_slot + place.in_overflow >= strip.coded_bytes());
    uint32_t escapes = 0, total = 0;
    for (uint32_t k = first; coded && good && k < end; k++)
        escapes += (stored.byte(job.columns + k / 2u) >> 4u * (k % 2u) & 15u) == 15u;
    uint32_t symbol_at = strip.coded_bytes() + block_scan<WARPS>(escapes, shared, total);
    good = good && (!coded || total == place.in_slot + place.in_overflow - strip.coded_bytes());
    float sums[kMostVectors] = {};
    for (uint32_t k = first; good && k < end; k++) {
        uint32_t weight = static_cast<uint32_t>(job.table.codebook.planes.default_value);
        if (place.raw) weight = stored.byte(2u * k) | stored.byte(2u * k + 1u) << 8;
        if (coded) {
            const uint32_t digit = stored.byte(job.columns + k / 2u) >> 4u * (k % 2u) & 15u,
                           first_symbol = static_cast<uint32_t>(job.table.codebook.planes.first_symbol),
                           symbol = digit == 15u ? stored.byte(symbol_at++) : first_symbol + digit;
            weight = element_of(stored.byte(k), symbol);
        }
#pragma unroll
        for (uint32_t v = 0; v < kMostVectors; v++)
            if (v < job.num_vectors) sums[v] = fmaf(float_of_bits(weight << 16), strip.x_at(v, k), sums[v]);
    }
    if (!good && threadIdx.x == 0u) record_fault(job.fault, IBP_CORRUPT_ROW, row, row);
    float *const of_warps = reinterpret_cast<float *>(shared);
    __syncthreads();
    for (uint32_t v = 0; v < kMostVectors; v++) {
        for (uint32_t step = kWarp / 2u; step != 0u; step /= 2u) sums[v] += __shfl_xor_sync(kAllLanes, sums[v], step);
        if (strip.lane == 0u) of_warps[strip.warp * kMostVectors + v] = sums[v];
    }
    __syncthreads();
    if (threadIdx.x >= job.num_vectors) return;
    float sum = 0;
    for (uint32_t w = 0; w < WARPS; w++) sum += of_warps[w * kMostVectors + threadIdx.x];
    strip.store(threadIdx.x, row, sum);
}

template <uint32_t WARPS, uint32_t STAGES, uint32_t TILES, uint32_t BLOCKS>
__global__ void __launch_bounds__(WARPS *kWarp, BLOCKS) linear_kernel(const __grid_constant__ LinearJob job)
{
    using Strip = LinearStrip<WARPS, STAGES, TILES>;
    // The last strip shares rows with the one before where the rows are no multiple of a strip's.
    const Strip strip(job, ibp_min_u32(blockIdx.x * Strip::kRows, job.rows - Strip::kRows));
#pragma unroll
    for (uint32_t i = 0; i < STAGES - 1u; i++) strip.begin_copies(strip.warp + i * WARPS, i);
    strip.begin_notes();
    float sums[TILES][2][4] = {};
    strip.multiply(sums);
    strip.finish(sums);
    for (uint32_t row = 0; row < Strip::kRows; row++) {
        if (Strip::notes().wanted[row] != Strip::kIrregular) continue;
        __syncthreads(); // sums of the rows before have been read
        multiply_irregular<Strip, WARPS>(strip, strip.first_row + row);
    }
}

} // namespace ibp

#endif
