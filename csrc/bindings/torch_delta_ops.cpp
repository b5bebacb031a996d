// torch_delta_ops.cpp - the operations of torch.ops.ibp for fingerprints and deltas of tensors (FORMAT.md, sections 10
// and 9). They turn tensors into pointers and call the core.
//
//     sum_words       part first_word sum
//     add_rows        table element_bytes subtracts base change fault                     (CPU only)
//     measure_deltas  tensors codebook codec lengths counts sums                          (CUDA only)
//     encode_deltas   tensors codebook codec lengths counts bases updates_bases overflow  (CUDA only)
//     apply_deltas    tensors num_rows codebook codec takes_back state                    (CUDA only)
//
// Each operation is documented at its function. The last three operations make or apply the deltas of many tensors in
// one call (ibp_delta.h). The rows of all tensors of a call are numbered in one sequence. The three operations share
// these arguments:
//
//     tensors  int64 [n, 10]: n structs ibp_delta_tensor. Their addresses are trusted.
//     lengths  uint16 [rows of the sequence]. The number of rows is a multiple of 32.
//     counts   uint16 [rows of the sequence * 8]: numbers that measure_deltas passes on to encode_deltas.
#include "torch_tables.h"

#include <algorithm>
#include <atomic>

namespace {

using namespace ibp_torch;

// Adds to sum[0] the number that a part of a tensor contributes to the tensor's fingerprint.
//
// part: any dtype and shape. Its size must be a multiple of 8 bytes unless it is the last part of the tensor.
// first_word: the index, in the tensor, of the part's first 8-byte word.
// sum: int64 [1] or more.
void sum_words(const Device &device, const Tensor &part, int64_t first_word, const Out &sum)
{
    constexpr int64_t kWordsARange = 1 << 17; // number of 8-byte words in a range of 1 MiB
    require(first_word >= 0, "first_word is ", first_word);
    const auto start = static_cast<uint64_t>(first_word);
    uint64_t *const out = unsigned_longs_of(sum, 1, "sum");
    const Memory memory = memory_of(part, "part");
    if (device.is_cuda()) {
        check(ibp_cuda_sum_words(memory.data, memory.num_bytes, start, out, device.stream()), "sum_words");
        return;
    }
    std::atomic<uint64_t> total{0};
    torch::stable::parallel_for(0, divide_up(memory.num_bytes, 8), kWordsARange, [&](int64_t first, int64_t last) {
        uint64_t own = 0;
        check(ibp_sum_words(memory.data + 8 * first, std::min(memory.num_bytes, 8 * last) - 8 * first,
                            start + static_cast<uint64_t>(first), &own),
              "sum_words");
        total += own;
    });
    *out += total;
}

// ---- deltas ----

// Adds a table of differences to a tensor, or subtracts it, element by element modulo 2^(8 * element_bytes). A corrupt
// row changes nothing and is noted in fault.
//
// base: contiguous, of any dtype, with as many bytes as the table's tensor.
// change: int64 [1]. The operation adds to it the number by which the sum of base's words (sum_words) changes.
void add_rows(const Device &, const Table &handle, int64_t element_bytes, bool subtracts, const Out &base,
              const Out &change, const Out &fault)
{
    const ibp_table &table = handle.table();
    uint8_t *const to = room_of(base, ibp_bytes_of_table(&table), "base");
    const uint32_t width = to_u32(element_bytes, 1, 8, "element_bytes"), row_bytes = table.codebook.row_bytes;
    const size_t scratch_bytes = ibp_scratch_bytes(row_bytes) + row_bytes;
    std::atomic<uint64_t> total{0};
    over_ranges(ibp_num_rows(&table), row_bytes, scratch_bytes, fault_of(fault),
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                    uint64_t own = 0;
                    const ibp_status status =
                        ibp_add_rows(&table, width, subtracts, first, last, to, &own, scratch, scratch_bytes, mine);
                    total += own;
                    return status;
                });
    *unsigned_longs_of(change, 1, "change") += total;
}

// The structs in the argument `tensors`.
struct DeltaTensors {
    const ibp_delta_tensor *data;
    uint32_t count;
};
static_assert(sizeof(ibp_delta_tensor) == 80, "ten numbers");

DeltaTensors delta_tensors_of(const Tensor &tensors)
{
    require(tensors.dim() == 2 && tensors.size(1) == 10, "tensors is not int64 [n, 10]");
    return {data_of<ibp_delta_tensor>(tensors, ScalarType::Long, 0, "tensors"),
            to_u32(tensors.size(0), 0, 1 << 24, "the number of tensors")};
}

// The arguments that measure_deltas and encode_deltas share.
struct DeltaRows {
    DeltaTensors jobs;
    ibp_codebook codebook;
    int64_t num_rows;
    uint16_t *lengths, *counts;

    DeltaRows(const Tensor &tensors, const Tensor &words, const Codec &codec, const Tensor &of_lengths,
              const Tensor &of_counts)
        : jobs(delta_tensors_of(tensors)), codebook(codebook_of(words, codec)), num_rows(of_lengths.numel()),
          lengths(lengths_of(of_lengths, num_rows)),
          counts(data_of<uint16_t>(of_counts, ScalarType::UInt16, total_bytes(num_rows, IBP_DELTA_COUNTS, "rows"),
                                   "counts"))
    {
    }
};

// Measures how each row of the differences newer - base would be coded, and fills lengths and counts.
//
// sums: int64 [2 n], zeros at first; receives for each tensor the sums of words (sum_words) of its base and of its
//   newer version.
void measure_deltas(const Device &device, const Tensor &tensors, const Tensor &codebook, const Codec &codec,
                    const Out &lengths, const Out &counts, const Out &sums)
{
    const DeltaRows rows(tensors, codebook, codec, lengths, counts);
    check(ibp_cuda_measure_deltas(&rows.codebook, rows.jobs.data, rows.jobs.count, rows.num_rows, rows.lengths,
                                  rows.counts, unsigned_longs_of(sums, 2 * int64_t{rows.jobs.count}, "sums"),
                                  device.stream()),
          "measure_deltas");
}

// Codes the differences back to back into overflow, uint8 [bytes].
//
// lengths, counts: as measure_deltas filled them.
// bases: int64 [rows / 32], the bases of the coded rows, as index_rows makes them from lengths.
// updates_bases: whether to overwrite the base of each tensor with its newer version, row by row as the rows are coded.
void encode_deltas(const Device &device, const Tensor &tensors, const Tensor &codebook, const Codec &codec,
                   const Tensor &lengths, const Tensor &counts, const Tensor &bases, bool updates_bases,
                   const Out &overflow)
{
    const DeltaRows rows(tensors, codebook, codec, lengths, counts);
    check(ibp_cuda_encode_deltas(&rows.codebook, rows.jobs.data, rows.jobs.count, rows.num_rows, rows.lengths,
                                 rows.counts,
                                 unsigned_longs_of(bases, divide_up(rows.num_rows, IBP_ROWS_PER_BASE), "bases"),
                                 bytes_of(overflow, 0, "overflow"), overflow.numel(), updates_bases, device.stream()),
          "encode_deltas");
}

// Adds the differences of all tensors to their base tensors. If a base tensor, a row or a result is wrong, all base
// tensors keep their bytes.
//
// num_rows: the number of rows of the sequence.
// state: int64 [1 + 3 n], zeros at first; receives one ibp_delta_verdict, and then three numbers for each tensor.
// takes_back: whether to undo an earlier call instead. `state` is then the state of that call, with IBP_DELTA_DAMAGED
//   in place of its verdict.
void apply_deltas(const Device &device, const Tensor &tensors, int64_t num_rows, const Tensor &codebook,
                  const Codec &codec, bool takes_back, const Out &state)
{
    const DeltaTensors jobs = delta_tensors_of(tensors);
    const ibp_codebook cb = codebook_of(codebook, codec);
    check(ibp_cuda_apply_deltas(&cb, jobs.data, jobs.count, num_rows, takes_back,
                                unsigned_longs_of(state, 1 + 3 * int64_t{jobs.count}, "state"), device.stream()),
          "apply_deltas");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CPU, m)
{
    operation<sum_words>(m, "sum_words", "part first_word sum");
    operation<add_rows>(m, "add_rows", "table element_bytes subtracts base change fault");
}

STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m)
{
    operation<sum_words>(m, "sum_words", "part first_word sum");
    operation<measure_deltas>(m, "measure_deltas", "tensors codebook codec lengths counts sums");
    operation<encode_deltas>(m, "encode_deltas", "tensors codebook codec lengths counts bases updates_bases overflow");
    operation<apply_deltas>(m, "apply_deltas", "tensors num_rows codebook codec takes_back state");
}
