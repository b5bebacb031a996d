/* emulated_delta.cpp - the kernels of csrc/cuda/delta under emulated_simt.h against the C core:
 * deltas of several tensors made, applied, damaged and refused. Usage: emulated_delta [seed] [cases]. */
#include "emulated_simt.h"
#include "core/format.h"
#include "cuda/launch.cuh"
#include "internal/ibp_internal.h"

#include <random>

extern "C" const char *__asan_default_options() { return "detect_leaks=0"; }

namespace {

std::mt19937_64 generator;
long num_wrong = 0;

uint64_t below(uint64_t limit) { return generator() % limit; }
bool chance(uint32_t percent) { return below(100) < percent; }
template <class T> T pick(std::initializer_list<T> choices) { return choices.begin()[below(choices.size())]; }

void check(bool good, const char *what, uint64_t number)
{
    if (good) return;
    if (num_wrong++ < 10) printf("wrong: %s, case %llu\n", what, static_cast<unsigned long long>(number));
}

/* Bytes `offset` after a multiple of 16; of the words that they begin and end in, which kernels may read, all is there.
 */
struct Bytes {
    std::unique_ptr<uint8_t[]> memory;
    uint8_t *data;
    size_t size;

    explicit Bytes(size_t bytes, size_t offset = 0)
        : memory(new uint8_t[(offset + bytes + 3) / 4 * 4]), data(memory.get() + offset), size(bytes)
    {
    }
};

/* Entries -1, 1, -2, 2, ... */
struct Book {
    std::vector<uint64_t> entries;
    ibp_codebook codebook = {};

    Book(uint32_t row_bytes, uint32_t element_bytes)
    {
        ibp_planes p = {};
        p.element_bytes = element_bytes, p.listed = true, p.closed_value = 1;
        const std::vector<uint8_t> digits =
            pick<std::vector<uint8_t>>({{1, 1, 4, 4}, {1, 1, 4, 4}, {2, 4}, {3}, {}, {1, 2, 1}});
        uint32_t count = 0;
        for (const uint8_t bits : digits) p.digit_bits[p.num_planes++] = bits, count += (1u << bits) - 1;
        entries.resize(count + 1);
        for (uint32_t i = 0; i < count; i++) {
            const uint64_t entry = i % 2 ? 1 + i / 2 : 0 - uint64_t{1 + i / 2};
            memcpy(reinterpret_cast<uint8_t *>(entries.data()) + i * element_bytes, &entry, element_bytes);
        }
        p.entries = entries.data();
        if (ibp_build_planes_codebook(&p, row_bytes, count * element_bytes, &codebook) != IBP_OK) abort();
    }
};

struct Tensor {
    Bytes base, newer, differences;
    std::vector<uint16_t> lengths;
    std::vector<uint64_t> bases;
    std::unique_ptr<Bytes> overflow;
    bool is_damaged = false;

    Tensor(size_t num_bytes, size_t offset, size_t other)
        : base(num_bytes, offset), newer(num_bytes, other), differences(num_bytes)
    {
    }
};

/* Two versions: few elements differ, and little, or many, or much. */
Tensor make_tensor(uint32_t row_bytes, uint32_t element_bytes)
{
    const size_t elements = pick({size_t{0}, size_t{1}, size_t{below(40)}, size_t{below(3000)}, size_t{below(9000)}});
    const size_t num_bytes = std::min<size_t>(elements * element_bytes, 40 * row_bytes) / element_bytes * element_bytes;
    Tensor tensor(num_bytes, element_bytes * below(chance(50) ? 1 : 16 / element_bytes + 1),
                  element_bytes * below(chance(50) ? 1 : 16 / element_bytes + 1));
    const uint32_t percent = pick({0u, 1u, 5u, 20u, 70u, 100u});
    const uint64_t most = pick({uint64_t{1}, uint64_t{3}, uint64_t{40}, ~uint64_t{0}});
    const bool only_up = chance(20);
    for (size_t i = 0; i < num_bytes; i++) tensor.base.data[i] = static_cast<uint8_t>(generator());
    for (size_t i = 0; i < num_bytes; i += element_bytes) {
        uint64_t element = 0, step = chance(percent) ? 1 + below(most) : 0;
        if (!only_up && chance(50)) step = 0 - step;
        memcpy(tensor.differences.data + i, &step, element_bytes);
        memcpy(&element, tensor.base.data + i, element_bytes);
        element += step;
        memcpy(tensor.newer.data + i, &element, element_bytes);
    }
    return tensor;
}

uint64_t sum_of(const Bytes &bytes)
{
    uint64_t sum = 0;
    ibp_sum_words(bytes.data, static_cast<int64_t>(bytes.size), 0, &sum);
    return sum;
}

struct Case {
    uint64_t number;
    const ibp_codebook &codebook;
    std::vector<Tensor> tensors;
    std::vector<ibp_delta_tensor> jobs;
    int64_t num_rows = 0;
    std::vector<uint64_t> state;

    /* What the CPU codes. */
    void code()
    {
        std::vector<uint8_t> scratch(ibp_scratch_bytes(codebook.row_bytes));
        for (Tensor &tensor : tensors) {
            const auto num_bytes = static_cast<int64_t>(tensor.base.size);
            const int64_t rows = (num_bytes + codebook.row_bytes - 1) / codebook.row_bytes;
            tensor.lengths.resize(static_cast<size_t>(rows)), tensor.bases.resize(static_cast<size_t>(rows + 31) / 32);
            int64_t overflow_bytes = 0;
            ibp_measure_rows(&codebook, tensor.differences.data, num_bytes, tensor.lengths.data(), scratch.data(),
                             scratch.size());
            ibp_index_rows(tensor.lengths.data(), num_bytes, codebook.row_bytes, 0, tensor.bases.data(),
                           &overflow_bytes);
            tensor.overflow = std::make_unique<Bytes>(overflow_bytes, below(20));
            ibp_table table = {};
            table.num_items = 1, table.item_bytes = num_bytes, table.codebook = codebook;
            table.lengths = tensor.lengths.data(), table.bases = tensor.bases.data();
            table.overflow_bytes = overflow_bytes;
            ibp_fault fault = {};
            ibp_encode_rows(&table, tensor.differences.data, 0, rows, nullptr, tensor.overflow->data, scratch.data(),
                            scratch.size(), &fault);
            ibp_delta_tensor job = {};
            job.base = tensor.base.data, job.newer = tensor.newer.data, job.num_bytes = num_bytes;
            job.first_row = num_rows, job.lengths = tensor.lengths.data(), job.bases = tensor.bases.data();
            job.overflow = tensor.overflow->data, job.overflow_bytes = overflow_bytes;
            job.base_sum = sum_of(tensor.base), job.result_sum = sum_of(tensor.newer);
            jobs.push_back(job);
            num_rows += (rows + 31) / 32 * 32;
        }
    }
    uint32_t count() const { return static_cast<uint32_t>(jobs.size()); }

    /* The same by the kernels. */
    void make()
    {
        std::vector<uint16_t> lengths(num_rows, 7), counts(IBP_DELTA_COUNTS * num_rows, 7);
        std::vector<uint64_t> sums(2 * count()), bases(num_rows / 32);
        check(ibp_cuda_measure_deltas(&codebook, jobs.data(), count(), num_rows, lengths.data(), counts.data(),
                                      sums.data(), nullptr) == IBP_OK,
              "measure", number);
        for (size_t t = 0; t < tensors.size(); t++) {
            const Tensor &tensor = tensors[t];
            check(sums[2 * t] == jobs[t].base_sum && sums[2 * t + 1] == jobs[t].result_sum, "sums", number);
            check(std::equal(tensor.lengths.begin(), tensor.lengths.end(), lengths.begin() + jobs[t].first_row),
                  "lengths", number);
        }
        int64_t overflow_bytes = 0;
        ibp_index_rows(lengths.data(), num_rows * codebook.row_bytes, codebook.row_bytes, 0, bases.data(),
                       &overflow_bytes);
        Bytes overflow(overflow_bytes, below(20));
        const auto before = bytes();
        for (const bool updates_bases : {false, true}) {
            check(ibp_cuda_encode_deltas(&codebook, jobs.data(), count(), num_rows, lengths.data(), counts.data(),
                                         bases.data(), overflow.data, overflow_bytes, updates_bases, nullptr) == IBP_OK,
                  "encode", number);
            expect(updates_bases, before);
            for (size_t t = 0; t < tensors.size(); t++)
                if (tensors[t].overflow->size != 0)
                    check(memcmp(overflow.data + bases[jobs[t].first_row / 32], tensors[t].overflow->data,
                                 tensors[t].overflow->size) == 0,
                          "coded rows", number);
            memset(overflow.data, 0, overflow.size);
        }
        for (size_t t = 0; t < tensors.size(); t++) std::copy(before[t].begin(), before[t].end(), tensors[t].base.data);
    }
    uint64_t apply()
    {
        state.assign(1 + 3 * count(), 0);
        check(ibp_cuda_apply_deltas(&codebook, jobs.data(), count(), num_rows, false, state.data(), nullptr) == IBP_OK,
              "apply", number);
        return state[0];
    }
    void take_back()
    {
        state[0] = IBP_DELTA_DAMAGED;
        check(ibp_cuda_apply_deltas(&codebook, jobs.data(), count(), num_rows, true, state.data(), nullptr) == IBP_OK,
              "take back", number);
    }
    void expect(bool is_new, const std::vector<std::vector<uint8_t>> &before)
    {
        for (size_t t = 0; t < tensors.size(); t++) {
            const uint8_t *const wanted = is_new ? tensors[t].newer.data : before[t].data();
            if (tensors[t].base.size != 0)
                check(memcmp(tensors[t].base.data, wanted, tensors[t].base.size) == 0, "base", number);
        }
    }
    /* What a call leaves of its sums names no other tensors than damaged ones. */
    void expect_others_to_fit()
    {
        for (size_t t = 0; t < tensors.size(); t++)
            if (!tensors[t].is_damaged)
                check(state[1 + 3 * t] + state[2 + 3 * t] == jobs[t].result_sum && state[3 + 3 * t] == 0, "fits",
                      number);
    }
    std::vector<std::vector<uint8_t>> bytes() const
    {
        std::vector<std::vector<uint8_t>> copies;
        for (const Tensor &tensor : tensors) copies.emplace_back(tensor.base.data, tensor.base.data + tensor.base.size);
        return copies;
    }
    /* A byte of what is read, or of a base. Returns whether it is of a base. */
    bool damage()
    {
        Tensor &tensor = tensors[below(tensors.size())];
        tensor.is_damaged = true;
        const auto flip = [](void *bytes, size_t size) {
            if (size != 0) static_cast<uint8_t *>(bytes)[below(size)] ^= static_cast<uint8_t>(1 + below(255));
        };
        switch (below(6)) {
        case 0: flip(tensor.base.data, tensor.base.size); return tensor.base.size != 0;
        case 1: flip(tensor.lengths.data(), 2 * tensor.lengths.size()); return false;
        case 2: flip(tensor.bases.data(), 8 * tensor.bases.size()); return false;
        default: flip(tensor.overflow->data, tensor.overflow->size); return false;
        }
    }
};

void run_case(uint64_t number)
{
    const uint32_t element_bytes = pick({1u, 2u, 4u, 8u}), row_bytes = 16 * (1 + below(chance(50) ? 100 : 512));
    const Book book(row_bytes, element_bytes);
    check(ibp_cuda_makes_deltas(&book.codebook) && ibp_cuda_applies_deltas(&book.codebook), "codebook", number);
    Case tested{number, book.codebook, {}, {}, 0, {}};
    const size_t num_tensors = 1 + below(4);
    for (size_t t = 0; t < num_tensors; t++) tested.tensors.push_back(make_tensor(row_bytes, element_bytes));
    tested.code();
    tested.make();
    const auto before = tested.bytes();
    check(tested.apply() == IBP_DELTA_APPLIED, "verdict", number);
    tested.expect(true, before);
    tested.take_back();
    tested.expect(false, before);
    tested.expect_others_to_fit();
    for (int i = 0; i < 4; i++) {
        const bool is_base = tested.damage();
        const auto damaged = tested.bytes();
        const uint64_t verdict = tested.apply();
        if (is_base) {
            check(verdict == IBP_DELTA_OTHER_BASE, "verdict of another base", number);
            tested.expect(false, damaged);
            return;
        }
        tested.expect(verdict == IBP_DELTA_APPLIED, damaged);
        tested.expect_others_to_fit();
        if (verdict == IBP_DELTA_APPLIED) return;
    }
}

} // namespace

namespace ibp {
ibp_status check_cuda(cudaError_t error) { return error == cudaSuccess ? IBP_OK : IBP_CUDA_ERROR; }
/* A device so small that its blocks take several jobs one after the other. */
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
    for (uint64_t i = 0; i < cases; i++) {
        generator.seed(seed * 1000003 + i);
        simt::seed(generator());
        run_case(i);
    }
    printf("%llu cases, %ld wrong\n", static_cast<unsigned long long>(cases), num_wrong);
    return num_wrong != 0;
}
