// embedding_bag.cu - a kernel that sums rows of a compressed table of float32 (an embedding bag): it fetches each row
// from pinned host memory, decodes it in shared memory and adds it up there. The sums are checked against the CPU's,
// bit by bit.
//
//     nvcc -std=c++17 -arch=sm_90 embedding_bag.cu $(pkg-config --cflags --libs ibp) -o embedding_bag
//     ./embedding_bag
//
// Exit status 77: there is no GPU.
#include <ibp_cuda.h>
#include <ibp_device.cuh>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

constexpr int kColumns = 128, kRows = 50000, kBags = 2000, kMostInBag = 40, kWarpsOfBlock = 4, kNoGpu = 77;
constexpr uint32_t kRowBytes = kColumns * sizeof(float);
constexpr uint32_t kKinds = ibp::kDenseRows; // of rows that this table has

static void check(ibp_status status, const char *what)
{
    if (status == IBP_OK) return;
    fprintf(stderr, "%s: %s (%s)\n", what, ibp_status_string(status), ibp_cuda_last_error());
    exit(EXIT_FAILURE);
}
static void check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    exit(EXIT_FAILURE);
}

template <class T> static T *to_device(const std::vector<T> &values)
{
    T *copy = nullptr;
    const size_t num_bytes = std::max<size_t>(values.size(), 1) * sizeof(T);
    check(cudaMalloc(&copy, num_bytes), "cudaMalloc");
    check(cudaMemcpy(copy, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return copy;
}

// A warp a bag: sums[bag] = the sum of the rows ids[k], first_id[bag] <= k < first_id[bag + 1].
__global__ void sum_bags(const __grid_constant__ ibp_table table, const int64_t *ids, const int *first_id,
                         uint32_t warp_bytes, float *sums, int *num_bad)
{
    extern __shared__ uint4 memory[];
    const uint32_t lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, scratch = warp * warp_bytes;
    const uint32_t bag = blockIdx.x * kWarpsOfBlock + warp;
    if (bag >= kBags) return; // the whole warp
    uint8_t *const row =
        reinterpret_cast<uint8_t *>(memory) + scratch + ibp::warp_scratch_bytes<kKinds>(table.codebook);
    float sum[kColumns / 32] = {};
    for (int k = first_id[bag]; k < first_id[bag + 1]; k++) {
        const ibp_status status = ibp::warp_decode_row<kKinds>(table, ids[k], row, scratch);
        if (status != IBP_OK && lane == 0) atomicAdd(num_bad, 1);
        for (int i = 0; i < kColumns / 32; i++) sum[i] += reinterpret_cast<const float *>(row)[i * 32 + lane];
        __syncwarp(); // the row has been read
    }
    for (int i = 0; i < kColumns / 32; i++) sums[bag * kColumns + i * 32 + lane] = sum[i];
}

int main()
{
    if (ibp_cuda_device_count() == 0) {
        printf("embedding_bag: no GPU\n");
        return kNoGpu;
    }
    std::mt19937 generator(1);
    std::normal_distribution<float> normal(0.0f, 0.02f);
    std::vector<float> data(size_t{kRows} * kColumns);
    for (float &x : data) x = normal(generator);
    const uint8_t *const bytes = reinterpret_cast<const uint8_t *>(data.data());
    const int64_t num_bytes = static_cast<int64_t>(data.size() * sizeof(float));

    // The codebook: the exponent of a float32 is its symbol, all else its residual; the nine most frequent exponents
    // have digits of two bits in three planes.
    std::vector<int64_t> counts(256);
    for (float x : data) {
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        counts[bits >> 23 & 0xffu]++;
    }
    std::vector<uint8_t> entries(256);
    std::iota(entries.begin(), entries.end(), uint8_t{0});
    std::stable_sort(entries.begin(), entries.end(), [&](uint8_t a, uint8_t b) { return counts[a] > counts[b]; });
    entries.resize(9);
    ibp_planes planes{};
    planes.entries = entries.data();
    planes.element_bytes = sizeof(float), planes.rotate = 1,
    planes.residual_bits = 24; // the sign is part of the residual
    planes.num_planes = 3;
    for (int p = 0; p < 3; p++) planes.digit_bits[p] = 2;
    ibp_codebook codebook;
    check(ibp_build_planes_codebook(&planes, kRowBytes, entries.size(), &codebook), "ibp_build_planes_codebook");

    // The table, packed: rows one after the other in pinned memory, their lengths and bases on the device.
    std::vector<uint8_t> scratch(ibp_scratch_bytes(kRowBytes));
    std::vector<uint16_t> lengths(kRows);
    std::vector<uint64_t> bases((kRows + IBP_ROWS_PER_BASE - 1) / IBP_ROWS_PER_BASE);
    ibp_table table{};
    table.num_items = kRows, table.item_bytes = kRowBytes, table.slot_bytes = 0, table.codebook = codebook;
    check(ibp_measure_rows(&codebook, bytes, num_bytes, lengths.data(), scratch.data(), scratch.size()),
          "ibp_measure_rows");
    check(ibp_index_rows(lengths.data(), num_bytes, kRowBytes, 0, bases.data(), &table.overflow_bytes),
          "ibp_index_rows");
    table.lengths = lengths.data(), table.bases = bases.data();
    void *pinned, *mapped;
    check(ibp_cuda_alloc_pinned(static_cast<size_t>(table.overflow_bytes), -1, &pinned), "ibp_cuda_alloc_pinned");
    check(ibp_cuda_map_pinned(pinned, &mapped), "ibp_cuda_map_pinned");
    ibp_fault fault{};
    check(ibp_encode_rows(&table, bytes, 0, kRows, nullptr, static_cast<uint8_t *>(pinned), scratch.data(),
                          scratch.size(), &fault),
          "ibp_encode_rows");
    table.overflow = static_cast<const uint8_t *>(mapped);
    table.lengths = to_device(lengths), table.bases = to_device(bases);
    table.codebook.planes.entries = to_device(entries);

    // Bags of random rows.
    std::vector<int> first_id(1);
    std::vector<int64_t> ids;
    for (int bag = 0; bag < kBags; bag++) {
        for (uint32_t k = generator() % kMostInBag; k-- > 0;) ids.push_back(generator() % kRows);
        first_id.push_back(static_cast<int>(ids.size()));
    }
    std::vector<float> sums(size_t{kBags} * kColumns);
    float *const device_sums = to_device(sums);
    int *const num_bad = to_device(std::vector<int>(1));

    const uint32_t warp_bytes = ibp::warp_scratch_bytes<kKinds>(table.codebook) + kRowBytes;
    sum_bags<<<(kBags + kWarpsOfBlock - 1) / kWarpsOfBlock, 32 * kWarpsOfBlock, kWarpsOfBlock * warp_bytes>>>(
        table, to_device(ids), to_device(first_id), warp_bytes, device_sums, num_bad);
    check(cudaGetLastError(), "sum_bags");
    int bad = 0;
    check(cudaMemcpy(&bad, num_bad, sizeof bad, cudaMemcpyDeviceToHost), "cudaMemcpy");
    check(cudaMemcpy(sums.data(), device_sums, sums.size() * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");

    // The CPU adds in the same order.
    int num_wrong = 0;
    for (int bag = 0; bag < kBags; bag++)
        for (int column = 0; column < kColumns; column++) {
            float sum = 0.0f;
            for (int k = first_id[bag]; k < first_id[bag + 1]; k++)
                sum += data[static_cast<size_t>(ids[k]) * kColumns + column];
            num_wrong += std::memcmp(&sum, &sums[static_cast<size_t>(bag) * kColumns + column], sizeof sum) != 0;
        }
    printf("embedding_bag: %d bags of %zu rows, %.1f %% of the bytes saved, %d corrupt rows, %d wrong sums\n", kBags,
           ids.size(), 100.0 * (1.0 - static_cast<double>(table.overflow_bytes) / static_cast<double>(num_bytes)), bad,
           num_wrong);
    return bad == 0 && num_wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
