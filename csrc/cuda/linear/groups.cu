// groups.cu - two kernels for stacks of matrices. group_vectors sorts vectors by the matrices that multiply them, and
// divides the vectors into the groups that ibp_cuda_linear_groups takes. It runs in a single block. list_matrices lists
// the matrices that ids ask for. Latency limits both kernels.
#include "../../core/groups.h"
#include "../cuda_checks.h"
#include "../launch.cuh"
#include "../warp.cuh"

#include <algorithm>

namespace ibp {

constexpr uint32_t kGroupThreads = IBP_MOST_GROUPED; // one thread for each vector
constexpr uint32_t kHalf = 16;                       // number of bits of a count; two counts share a word
constexpr int64_t kMostListing = 132;                // largest number of blocks that list rows

// Returns the number of a matrix's vectors in the low 16 bits and the number of its groups in the high 16 bits.
// is_there: whether the matrix exists. If it is false, the number of groups is 0.
__device__ __forceinline__ uint32_t both_counts(uint32_t vectors, bool is_there)
{
    const uint32_t groups = (vectors + IBP_MOST_OF_A_GROUP - 1u) / IBP_MOST_OF_A_GROUP;
    return vectors | (is_there ? groups << kHalf : 0u);
}

template <typename Id>
__global__ void __launch_bounds__(kGroupThreads)
    group_vectors(const Id *ids, uint32_t count, uint32_t num_matrices, int64_t *order, ibp_vector_group *groups,
                  uint32_t num_groups)
{
    // At first, the number of vectors of each matrix; later, the position in `order` of its first vector.
    __shared__ uint32_t starts[IBP_MOST_STACKED + 1];
    const uint32_t number = threadIdx.x, warp = number / kWarp;
    const bool is_vector = number < count;
    const uint32_t matrix = is_vector ? ibp_matrix_of_id(ids[number], num_matrices) : ~0u;
    for (uint32_t i = number; i <= num_matrices; i += kGroupThreads) starts[i] = 0;
    __syncthreads();
    const uint32_t peers = __match_any_sync(kAllLanes, matrix), below = peers & ((1u << lane_id()) - 1u);
    uint32_t rank = 0;                                      // the vector's index among the vectors of its matrix
    for (uint32_t turn = 0; turn * kWarp < count; turn++) { // warps count one after the other
        if (turn == warp) {
            if (is_vector) rank = starts[matrix] + ibp_popcount(below);
            __syncwarp(); // all lanes have read starts before it changes
            if (is_vector && below == 0u) starts[matrix] += ibp_popcount(peers);
        }
        __syncthreads();
    }
    const uint32_t a_thread = num_matrices / kGroupThreads + 1u, first = number * a_thread,
                   end = ibp_min_u32(first + a_thread, num_matrices + 1u);
    uint32_t own = 0, total = 0;
    for (uint32_t i = first; i < end; i++) own += both_counts(starts[i], i < num_matrices);
    uint32_t before = block_scan<kGroupThreads>(own, total);
    for (uint32_t i = first; i < end; i++) {
        const uint32_t vectors = starts[i], both = both_counts(vectors, i < num_matrices);
        const uint32_t start = before & ((1u << kHalf) - 1u);
        for (uint32_t g = 0; g < both >> kHalf; g++) {
            const uint32_t done = g * IBP_MOST_OF_A_GROUP;
            groups[(before >> kHalf) + g] = {i, start + done, ibp_min_u32(vectors - done, IBP_MOST_OF_A_GROUP)};
        }
        starts[i] = start, before += both;
    }
    __syncthreads();
    if (is_vector) order[starts[matrix] + rank] = number;
    for (uint32_t g = (total >> kHalf) + number; g < num_groups; g += kGroupThreads) groups[g] = {};
}

// Lists the matrices that ids ask for (ibp_list_matrices). Every block finds all these matrices, and writes a part of
// the numbers of their rows. The first block writes everything else.
template <typename Id>
__global__ void __launch_bounds__(kGroupThreads)
    list_matrices(const Id *ids, uint32_t count, uint32_t num_matrices, const __grid_constant__ ibp_listed listed)
{
    constexpr uint32_t kWords = IBP_MOST_STACKED / kWarp + 1u;
    static_assert(kWords <= kGroupThreads && IBP_MOST_STACKED < 1 << 16);
    // asked: a bit for each matrix. before: number of set bits in the preceding words.
    __shared__ uint32_t asked[kWords], before[kWords];
    __shared__ uint16_t held[IBP_MOST_STACKED + 1];
    const uint32_t number = threadIdx.x, num_slots = static_cast<uint32_t>(listed.num_slots);
    if (number < kWords) asked[number] = 0;
    __syncthreads();
    for (uint32_t k = number; k < count; k += kGroupThreads) {
        const uint32_t matrix = ibp_matrix_of_id(ids[k], num_matrices);
        atomicOr(asked + matrix / kWarp, 1u << matrix % kWarp);
    }
    __syncthreads();
    uint32_t bits = number < kWords ? asked[number] : 0u, used = 0,
             slot = block_scan<kGroupThreads>(ibp_popcount(bits), used);
    if (number < kWords) before[number] = slot;
    for (; bits != 0u; bits &= bits - 1u) held[slot++] = static_cast<uint16_t>(kWarp * number + lowest_of(bits));
    __syncthreads();
    if (blockIdx.x == 0u) {
        for (uint32_t k = number; k < count; k += kGroupThreads) {
            const uint32_t matrix = ibp_matrix_of_id(ids[k], num_matrices);
            const uint32_t below = asked[matrix / kWarp] & ((1u << matrix % kWarp) - 1u);
            listed.slots[k] = before[matrix / kWarp] + ibp_popcount(below);
        }
        for (uint32_t s = number; s < num_slots; s += kGroupThreads) listed.held[s] = s < used ? held[s] : -1;
        if (number == 0u && listed.num_spare != nullptr)
            atomicAdd(reinterpret_cast<unsigned long long *>(listed.num_spare), 1ull * (num_slots - used));
    }
    int64_t *rows = listed.rows;
    for (uint32_t i = 0; i < listed.num_stacks; i++) {
        const auto num_rows = static_cast<uint32_t>(listed.num_rows[i]), total = num_slots * num_rows;
        for (uint32_t j = blockIdx.x * kGroupThreads + number; j < total; j += gridDim.x * kGroupThreads) {
            const uint32_t s = j / num_rows;
            rows[j] = s < used ? int64_t{held[s]} * num_rows + (j - s * num_rows) : 0;
        }
        rows += total;
    }
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_list_matrices(const ibp_ids *ids, int64_t num_matrices, const ibp_listed *listed,
                                             ibp_stream stream)
{
    using namespace ibp;
    if (!ibp_can_list(ids, num_matrices, listed)) return IBP_INVALID_ARGUMENT;
    int64_t most_rows = 1;
    for (uint32_t i = 0; i < listed->num_stacks; i++)
        most_rows = std::max(most_rows, listed->num_slots * listed->num_rows[i]);
    const Launch launch = plan_jobs(most_rows, kGroupThreads, kMostListing, kGroupThreads);
    const auto count = static_cast<uint32_t>(ids->count), matrices = static_cast<uint32_t>(num_matrices);
    return ids->id_bytes == 8u ? launch_kernel(list_matrices<int64_t>, launch, stream,
                                               static_cast<const int64_t *>(ids->data), count, matrices, *listed)
                               : launch_kernel(list_matrices<int32_t>, launch, stream,
                                               static_cast<const int32_t *>(ids->data), count, matrices, *listed);
}

extern "C" ibp_status ibp_cuda_group_vectors(const ibp_ids *ids, int64_t num_matrices, int64_t *order,
                                             ibp_vector_group *groups, int64_t num_groups, ibp_stream stream)
{
    using namespace ibp;
    if (!ibp_can_group(ids, num_matrices, order, groups, num_groups)) return IBP_INVALID_ARGUMENT;
    if (num_groups == 0 && ids->count == 0) return IBP_OK;
    const auto count = static_cast<uint32_t>(ids->count), matrices = static_cast<uint32_t>(num_matrices),
               places = static_cast<uint32_t>(num_groups);
    if (ids->id_bytes == 8u)
        group_vectors<int64_t><<<1, kGroupThreads, 0, stream>>>(static_cast<const int64_t *>(ids->data), count,
                                                                matrices, order, groups, places);
    else
        group_vectors<int32_t><<<1, kGroupThreads, 0, stream>>>(static_cast<const int32_t *>(ids->data), count,
                                                                matrices, order, groups, places);
    return check_cuda(cudaGetLastError());
}
