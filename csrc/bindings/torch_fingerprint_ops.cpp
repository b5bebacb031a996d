// torch_fingerprint_ops.cpp - the operations of torch.ops.ibp for fingerprints of tensors (FORMAT.md, section 10). They
// turn tensors into pointers and call the core.
//
//     sum_words  part first_word sum
//     sum_parts  parts first_words numbers sums
#include "torch_tables.h"

#include <algorithm>
#include <atomic>

namespace {

using namespace ibp_torch;

void sum_on_cpu(const ibp_summed_part &part)
{
    constexpr int64_t kWordsARange = 1 << 17; // words in a megabyte
    std::atomic<uint64_t> total{0};
    torch::stable::parallel_for(0, divide_up(part.num_bytes, 8), kWordsARange, [&](int64_t first, int64_t last) {
        uint64_t own = 0;
        check(ibp_sum_words(part.data + 8 * first, std::min(part.num_bytes, 8 * last) - 8 * first,
                            part.first_word + static_cast<uint64_t>(first), &own),
              "sum_words");
        total += own;
    });
    *part.sum += total;
}

ibp_summed_part part_of(const Tensor &tensor, int64_t first_word, uint64_t *sum, const char *name)
{
    require(first_word >= 0, "first_word is ", first_word);
    const Memory memory = memory_of(tensor, name);
    return {memory.data, memory.num_bytes, static_cast<uint64_t>(first_word), sum};
}

void sum_all(const Device &device, const std::vector<ibp_summed_part> &parts)
{
    if (device.is_cuda())
        check(ibp_cuda_sum_words(parts.data(), static_cast<int64_t>(parts.size()), device.stream()), "sum_words");
    else
        for (const ibp_summed_part &part : parts) sum_on_cpu(part);
}

// Adds to sum[0] the contribution of a part of a tensor to its fingerprint.
//
// part: any dtype and shape; a multiple of 8 bytes, except for the last part of a tensor.
// first_word: the number of the part's first 8-byte word in the tensor.
// sum: int64 [1] or more.
void sum_words(const Device &device, const Tensor &part, int64_t first_word, const Out &sum)
{
    sum_all(device, {part_of(part, first_word, unsigned_longs_of(sum, 1, "sum"), "part")});
}

// Adds to sums[numbers[i]] the contribution of part i, for each of many parts of one tensor or of several.
//
// parts: as for sum_words.
// first_words: int [parts], as for sum_words.
// numbers: int [parts].
// sums: int64, longer than the greatest of the numbers.
void sum_parts(const Device &device, const Tensors &parts, const std::vector<int64_t> &first_words,
               const std::vector<int64_t> &numbers, const Out &sums)
{
    const auto count = static_cast<int64_t>(parts.size());
    require(static_cast<int64_t>(first_words.size()) == count && static_cast<int64_t>(numbers.size()) == count,
            "there are ", count, " parts, ", static_cast<int64_t>(first_words.size()), " first_words and ",
            static_cast<int64_t>(numbers.size()), " numbers");
    uint64_t *const out = unsigned_longs_of(sums, 0, "sums");
    std::vector<ibp_summed_part> summed;
    for (size_t i = 0; i < parts.size(); i++) {
        require(0 <= numbers[i] && numbers[i] < sums.numel(), "numbers has ", numbers[i], ", and sums ", sums.numel(),
                " elements");
        summed.push_back(part_of(parts[i], first_words[i], out + numbers[i], "parts"));
    }
    sum_all(device, summed);
}

template <typename Library> void implement(Library &m)
{
    operation<sum_words>(m, "sum_words", "part first_word sum");
    operation<sum_parts>(m, "sum_parts", "parts first_words numbers sums");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m) { implement(m); }
