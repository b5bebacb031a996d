// gather.cu - gathers rows of a compressed table in pinned host memory by a GPU, through ibp_cuda_gather_items, and
// checks every byte.
//
//     nvcc -std=c++17 -arch=sm_90 gather.cu $(pkg-config --cflags --libs ibp) -o gather && ./gather
//
// Exit status 77: there is no GPU.
#include <ibp_cuda.h>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

constexpr int kColumns = 64, kRows = 100000, kIds = 20000, kNoGpu = 77;
constexpr uint32_t kRowBytes = kColumns * sizeof(float), kChunkBytes = 4, kNumChunks = kRowBytes / kChunkBytes;

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

template <class T> static T *to_device(const T *values, size_t count)
{
    T *copy = nullptr;
    check(cudaMalloc(&copy, std::max<size_t>(count, 1) * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(copy, values, count * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return copy;
}

// Pinned memory, and its address for the current device.
struct Pinned {
    void *host = nullptr, *device = nullptr;

    explicit Pinned(int64_t num_bytes)
    {
        if (num_bytes == 0) return;
        check(ibp_cuda_alloc_pinned(static_cast<size_t>(num_bytes), -1, &host), "ibp_cuda_alloc_pinned");
        check(ibp_cuda_map_pinned(host, &device), "ibp_cuda_map_pinned");
    }
    uint8_t *bytes() const { return static_cast<uint8_t *>(host); }
    const uint8_t *mapped() const { return static_cast<const uint8_t *>(device); }
};

int main()
{
    if (ibp_cuda_device_count() == 0) {
        printf("gather: no GPU\n");
        return kNoGpu;
    }
    // Few values, most of them 0, as bags of words have them.
    std::mt19937 generator(1);
    std::vector<float> data(size_t{kRows} * kColumns);
    for (float &x : data) x = generator() % 10 == 0 ? static_cast<float>(1 + generator() % 5) : 0.0f;
    const uint8_t *const bytes = reinterpret_cast<const uint8_t *>(data.data());
    const int64_t num_bytes = static_cast<int64_t>(data.size() * sizeof(float));

    // The codebook, from the first rows; its words are 16-byte aligned.
    constexpr size_t kSample = 4096;
    const size_t num_words = ibp_codebook_words(kRowBytes);
    std::vector<uint8_t> mask(kRowBytes), bitval(kRowBytes);
    auto *const words = static_cast<uint32_t *>(aligned_alloc(16, 3 * num_words * sizeof(uint32_t)));
    if (words == nullptr) return EXIT_FAILURE;
    ibp_table table{};
    check(ibp_choose_masks(bytes, kSample, kRowBytes, kChunkBytes, 0, kNumChunks, mask.data(), bitval.data()),
          "ibp_choose_masks");
    check(ibp_build_codebook(mask.data(), bitval.data(), kRowBytes, kChunkBytes, false, words, &table.codebook),
          "ibp_build_codebook");

    // The table: slots as long as a row is on the average, what does not fit in overflow, both in pinned memory.
    std::vector<uint8_t> scratch(ibp_scratch_bytes(kRowBytes));
    std::vector<uint16_t> lengths(kRows);
    std::vector<uint64_t> bases((kRows + IBP_ROWS_PER_BASE - 1) / IBP_ROWS_PER_BASE);
    check(ibp_measure_rows(&table.codebook, bytes, num_bytes, lengths.data(), scratch.data(), scratch.size()),
          "ibp_measure_rows");
    int64_t stored = 0;
    for (uint16_t length : lengths) stored += length ? length : kRowBytes;
    table.num_items = kRows, table.item_bytes = kRowBytes;
    table.slot_bytes = static_cast<uint32_t>(stored / kRows) / IBP_OVERFLOW_ALIGN * IBP_OVERFLOW_ALIGN;
    table.slots_bytes = int64_t{kRows} * table.slot_bytes;
    check(ibp_index_rows(lengths.data(), num_bytes, kRowBytes, table.slot_bytes, bases.data(), &table.overflow_bytes),
          "ibp_index_rows");
    table.lengths = lengths.data(), table.bases = bases.data();
    const Pinned slots(table.slots_bytes), overflow(table.overflow_bytes);
    ibp_fault fault{};
    check(ibp_encode_rows(&table, bytes, 0, kRows, slots.bytes(), overflow.bytes(), scratch.data(), scratch.size(),
                          &fault),
          "ibp_encode_rows");

    // What the GPU reads: the rows where they are, all else in device memory.
    table.slots = slots.mapped(), table.overflow = overflow.mapped();
    table.lengths = to_device(lengths.data(), lengths.size()), table.bases = to_device(bases.data(), bases.size());
    table.codebook.mask = to_device(table.codebook.mask, num_words);
    table.codebook.bitval = to_device(table.codebook.bitval, num_words);
    table.codebook.flags = to_device(table.codebook.flags, num_words);

    std::vector<int64_t> ids(kIds);
    for (int64_t &id : ids) id = generator() % kRows;
    const ibp_ids wanted = {to_device(ids.data(), ids.size()), kIds, sizeof(int64_t), nullptr, 0};
    std::vector<uint8_t> rows(size_t{kIds} * kRowBytes);
    uint8_t *const out = to_device(rows.data(), rows.size());
    ibp_fault *const device_fault = to_device(&fault, 1);
    cudaStream_t stream;
    check(cudaStreamCreate(&stream), "cudaStreamCreate");
    check(ibp_cuda_gather_items(&table, &wanted, out, device_fault, 0, stream), "ibp_cuda_gather_items");
    check(cudaStreamSynchronize(stream), "ibp_cuda_gather_items");
    check(cudaMemcpy(rows.data(), out, rows.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    check(cudaMemcpy(&fault, device_fault, sizeof fault, cudaMemcpyDeviceToHost), "cudaMemcpy");

    int num_wrong = 0;
    for (int k = 0; k < kIds; k++)
        num_wrong += memcmp(&rows[size_t{kRowBytes} * k], bytes + size_t{kRowBytes} * ids[k], kRowBytes) != 0;
    const double left = static_cast<double>(table.slots_bytes + table.overflow_bytes) / static_cast<double>(num_bytes);
    printf("gather: %d of %d rows, %.1f %% of the memory saved, fault %lld, %d wrong rows\n", kIds, kRows,
           100.0 * (1.0 - left), static_cast<long long>(fault.status), num_wrong);
    return num_wrong == 0 && fault.status == IBP_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}
