/* emulated_fingerprint.cpp - the kernel of csrc/cuda/rows/fingerprint.cu under emulated_simt.h against the C core: sums
 * of many parts at once. Usage: emulated_fingerprint [seed] [cases]. */
#include "emulated_simt.h"
#include "cuda/launch.cuh"
#include "internal/ibp_internal.h"

#include <random>

extern "C" const char *__asan_default_options() { return "detect_leaks=0"; }

namespace {

std::mt19937_64 generator;

uint64_t below(uint64_t limit) { return generator() % limit; }

/* A part of a tensor at any address, in memory that ends with the 8-byte word in which the part ends. */
struct Part {
    std::unique_ptr<uint64_t[]> memory;
    ibp_summed_part summed;

    explicit Part(std::vector<uint64_t> *sums)
    {
        const uint64_t sizes[] = {0, 1 + below(20), 8 * below(300), below(70000)};
        const size_t num_bytes = sizes[below(4)], offset = below(2) ? below(16) : 0;
        memory = std::make_unique<uint64_t[]>((offset + num_bytes + 7) / 8 + 1);
        uint8_t *const data = reinterpret_cast<uint8_t *>(memory.get()) + offset;
        for (size_t i = 0; i < num_bytes; i++) data[i] = static_cast<uint8_t>(generator());
        summed = {data, static_cast<int64_t>(num_bytes), below(1000), &(*sums)[below(sums->size())]};
    }
};

bool is_right(uint64_t num_parts)
{
    std::vector<uint64_t> wanted(1 + below(5)), found;
    for (uint64_t &sum : wanted) sum = generator();
    found = wanted;
    std::vector<Part> parts;
    std::vector<ibp_summed_part> summed;
    for (uint64_t k = 0; k < num_parts; k++) {
        parts.emplace_back(&wanted);
        ibp_summed_part part = parts.back().summed;
        ibp_sum_words(part.data, part.num_bytes, part.first_word, part.sum);
        part.sum = &found[part.sum - wanted.data()];
        summed.push_back(part);
    }
    return ibp_cuda_sum_words(summed.data(), static_cast<int64_t>(num_parts), nullptr) == IBP_OK && found == wanted;
}

} // namespace

namespace ibp {
ibp_status check_cuda(cudaError_t error) { return error == cudaSuccess ? IBP_OK : IBP_CUDA_ERROR; }
ibp_status read_device(DeviceSizes *sizes)
{
    *sizes = {0, 2, 95 << 10, 96 << 10};
    return IBP_OK;
}
ibp_status prepare(const void *, bool *is_of_90)
{
    if (is_of_90 != nullptr) *is_of_90 = true;
    return IBP_OK;
}
} // namespace ibp

int main(int count, char **arguments)
{
    const uint64_t seed = count > 1 ? strtoull(arguments[1], nullptr, 10) : 1,
                   cases = count > 2 ? strtoull(arguments[2], nullptr, 10) : 100;
    uint64_t num_wrong = 0;
    for (uint64_t i = 0; i < cases; i++) {
        generator.seed(seed * 1000003 + i);
        simt::seed(generator());
        num_wrong += !is_right(i == 0 ? 0 : i == 1 ? 200 : 1 + below(7));
    }
    printf("%llu cases, %llu wrong\n", static_cast<unsigned long long>(cases),
           static_cast<unsigned long long>(num_wrong));
    return num_wrong != 0;
}
