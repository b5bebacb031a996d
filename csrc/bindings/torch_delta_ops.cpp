// torch_delta_ops.cpp - torch.ops.ibp.sum_words: tensors to pointers, as torch_ops.cpp.
#include "torch_tensors.h"

#include <algorithm>
#include <atomic>

namespace {

using namespace ibp_torch;

uint64_t *sum_of(const Tensor &part, const Tensor &sum)
{
    Footprints memory;
    memory.reads("part", part);
    memory.writes("sum", sum);
    return unsigned_longs_of(sum, 1, "sum");
}

// first_word: as int64, whatever its bits say.
void sum_words_cpu(Tensor part, int64_t first_word, Tensor sum)
{
    constexpr int64_t kWordsARange = 1 << 17; // a megabyte
    require_cpu({&part, &sum});
    uint64_t *const out = sum_of(part, sum);
    const Memory memory = memory_of(part, "part");
    std::atomic<uint64_t> total{0};
    torch::stable::parallel_for(0, divide_up(memory.num_bytes, 8), kWordsARange, [&](int64_t first, int64_t last) {
        uint64_t own = 0;
        check(ibp_sum_words(memory.data + 8 * first, std::min(memory.num_bytes, 8 * last) - 8 * first,
                            static_cast<uint64_t>(first_word) + static_cast<uint64_t>(first), &own),
              "sum_words");
        total += own;
    });
    *out += total;
}

void sum_words_cuda(Tensor part, int64_t first_word, Tensor sum)
{
    const auto device = use_cuda(part, {&sum});
    uint64_t *const out = sum_of(part, sum);
    const Memory memory = memory_of(part, "part");
    check(
        ibp_cuda_sum_words(memory.data, memory.num_bytes, static_cast<uint64_t>(first_word), out, current_stream(part)),
        "sum_words");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CPU, m) { m.impl("sum_words", TORCH_BOX(&sum_words_cpu)); }
STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m) { m.impl("sum_words", TORCH_BOX(&sum_words_cuda)); }
