// torch_ops.cpp - torch.ops.ibp.*: tensors to pointers, nothing else. Schemas and fake implementations are in ibp/_ops.py.
//
// Built against torch's stable ABI, so that one build serves every torch from 2.10 on, with and without CUDA.
#include "ibp.h"
#include "ibp_cuda.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

// Absent from a torch without CUDA.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void **) __attribute__((weak));

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kGrainBytes = 1 << 16; // least work of a CPU thread

// Messages are put together without streams: a compiler that links libstdc++ statically makes those unusable beside torch's.
std::string to_text(const char *text) { return text; }
std::string to_text(int64_t number) { return std::to_string(number); }

// Throws what becomes a RuntimeError in Python unless the condition holds.
template <typename... Parts> void require(bool condition, const Parts &...parts)
{
    if (!condition) throw std::runtime_error("ibp: " + (to_text(parts) + ...));
}

void check(ibp_status status, const char *what)
{
    const bool is_cuda = status == IBP_CUDA_ERROR;
    require(status == IBP_OK, what, ": ", ibp_status_string(status), is_cuda ? ": " : "", is_cuda ? ibp_cuda_last_error() : "");
}

// The data of a contiguous tensor of the given dtype and at least the given number of elements; nullptr if it is empty.
template <typename T> T *data_of(const Tensor &tensor, ScalarType dtype, int64_t least, const char *name)
{
    require(tensor.scalar_type() == dtype, name, " has the wrong dtype");
    require(tensor.is_contiguous(), name, " is not contiguous");
    require(tensor.numel() >= least, name, " has ", tensor.numel(), " elements, ", least, " are needed");
    return tensor.numel() == 0 ? nullptr : static_cast<T *>(tensor.data_ptr());
}

uint8_t *bytes_of(const Tensor &tensor, int64_t least, const char *name)
{
    return data_of<uint8_t>(tensor, ScalarType::Byte, least, name);
}

// The memory of a contiguous tensor of any dtype that has room for least bytes; nullptr if it is empty.
uint8_t *room_of(const Tensor &tensor, int64_t least, const char *name)
{
    require(tensor.is_contiguous(), name, " is not contiguous");
    const int64_t num_bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
    require(num_bytes >= least, name, " has ", num_bytes, " bytes, ", least, " are needed");
    return num_bytes == 0 ? nullptr : static_cast<uint8_t *>(tensor.data_ptr());
}

uint32_t to_u32(int64_t value, int64_t low, int64_t high, const char *name)
{
    require(value >= low && value <= high, name, " is ", value, ", outside [", low, ", ", high, "]");
    return static_cast<uint32_t>(value);
}

int64_t rows_of(int64_t num_bytes, uint32_t row_bytes) { return (num_bytes + row_bytes - 1) / row_bytes; }

// Scheme ibp: codec is [1, row_bytes, chunk_bytes, num_flags], words as codebook_words makes them; of several clusters one after the
// other, each followed by its num_flags and three numbers that mean nothing.
void read_masks(const Tensor &words, const std::vector<int64_t> &codec, ibp_codebook *codebook)
{
    require(codec.size() == 4, "codec of scheme ibp has ", codec.size(), " numbers, 4 are needed");
    codebook->chunk_bytes = to_u32(codec[2], 1, 8, "chunk_bytes");
    require((codebook->chunk_bytes & (codebook->chunk_bytes - 1)) == 0, "chunk_bytes is ", codec[2], ", not 1, 2, 4 or 8");
    codebook->num_flags = to_u32(codec[3], 0, IBP_MAX_ROW_BYTES, "num_flags");
    const auto num_words = static_cast<int64_t>(ibp_codebook_words(codebook->row_bytes)), stride = 3 * num_words + 4;
    const auto *data = static_cast<const uint32_t *>(
        static_cast<const void *>(data_of<int32_t>(words, ScalarType::Int, 3 * num_words, "codebook")));
    require(reinterpret_cast<uintptr_t>(data) % 16 == 0, "codebook is not aligned to 16 bytes");
    codebook->mask = data;
    codebook->bitval = data + num_words;
    codebook->flags = data + 2 * num_words;
    if (words.numel() == 3 * num_words) return;
    require(words.numel() % stride == 0 && words.numel() / stride <= IBP_MAX_CLUSTERS, "codebook has ", words.numel(), " numbers, ",
            3 * num_words, " or some times ", stride, " are needed");
    codebook->num_clusters = static_cast<uint32_t>(words.numel() / stride);
    codebook->cluster_stride = static_cast<uint32_t>(stride);
    codebook->cluster_flags = data + 3 * num_words;
}

// Scheme planes: codec is [2, row_bytes, element_bytes, rotate, residual_bits, per_column, listed, default, closed, digit_bits ...],
// entries the packed symbols, those of several clusters one after the other.
void read_planes(const Tensor &entries, const std::vector<int64_t> &codec, ibp_codebook *codebook)
{
    require(codec.size() >= 9 && codec.size() <= 9 + IBP_MAX_PLANES, "codec of scheme planes has ", codec.size(),
                    " numbers, 9 to 13 are needed");
    ibp_planes planes{};
    planes.element_bytes = to_u32(codec[2], 1, 8, "element_bytes");
    planes.rotate = to_u32(codec[3], 0, 1, "rotate");
    planes.residual_bits = to_u32(codec[4], 0, 8 * codec[2], "residual_bits");
    planes.per_column = codec[5] != 0;
    planes.listed = codec[6] != 0;
    planes.default_value = static_cast<uint64_t>(codec[7]);
    planes.closed_value = static_cast<uint64_t>(codec[8]);
    planes.num_planes = static_cast<uint32_t>(codec.size()) - 9;
    for (uint32_t p = 0; p < planes.num_planes; p++)
        planes.digit_bits[p] = static_cast<uint8_t>(to_u32(codec[9 + p], 1, IBP_MAX_DIGIT_BITS, "digit_bits"));
    planes.entries = bytes_of(entries, 0, "codebook");
    const ibp_status status =
        ibp_build_planes_codebook(&planes, codebook->row_bytes, static_cast<size_t>(entries.numel()), codebook);
    require(status == IBP_OK, "codebook has ", entries.numel(), " bytes, not a codebook of its codec or up to ",
            static_cast<int64_t>(IBP_MAX_CLUSTERS), " of them; or the codec of scheme planes is out of range");
}

ibp_codebook codebook_of(const Tensor &words, const std::vector<int64_t> &codec)
{
    require(codec.size() >= 2, "codec is not [scheme, row_bytes, ...]");
    ibp_codebook codebook{};
    codebook.row_bytes = to_u32(codec[1], 1, IBP_MAX_ROW_BYTES, "row_bytes");
    switch (codec[0]) {
    case IBP_SCHEME_RAW: codebook.scheme = IBP_SCHEME_RAW; break;
    case IBP_SCHEME_IBP: codebook.scheme = IBP_SCHEME_IBP, read_masks(words, codec, &codebook); break;
    case IBP_SCHEME_PLANES: codebook.scheme = IBP_SCHEME_PLANES, read_planes(words, codec, &codebook); break;
    default: require(false, "unknown scheme ", codec[0]);
    }
    return codebook;
}

// The arguments that describe a table, as in TABLE of ibp/_ops.py.
struct TableArgs {
    Tensor slots, overflow, lengths, bases, codebook;
    std::vector<int64_t> codec;
    int64_t slot_bytes, overflow_start, num_items, item_bytes;

    ibp_table table() const
    {
        ibp_table t{};
        int64_t num_bytes = 0;
        const bool fits = !__builtin_mul_overflow(num_items, item_bytes, &num_bytes) && num_bytes <= INT64_MAX - IBP_MAX_ROW_BYTES;
        require(num_items >= 0 && item_bytes >= 0 && fits, "num_items ", num_items, " or item_bytes ", item_bytes, " is out of range");
        t.num_items = num_items;
        t.item_bytes = item_bytes;
        t.codebook = codebook_of(codebook, codec);
        t.slot_bytes = to_u32(slot_bytes, 0, IBP_MAX_ROW_BYTES, "slot_bytes");
        require(overflow_start >= 0, "negative overflow_start");
        t.overflow_start = static_cast<uint64_t>(overflow_start);
        const int64_t num_rows = rows_of(num_bytes, t.codebook.row_bytes);
        t.slots = bytes_of(slots, 0, "slots");
        t.slots_bytes = slots.numel();
        t.overflow = bytes_of(overflow, 0, "overflow");
        t.overflow_bytes = overflow.numel();
        t.lengths = data_of<uint16_t>(lengths, ScalarType::UInt16, lengths.numel() ? num_rows : 0, "lengths");
        t.bases = static_cast<const uint64_t *>(static_cast<const void *>(
            data_of<int64_t>(bases, ScalarType::Long, bases.numel() ? (num_rows + 31) / 32 : 0, "bases")));
        require(t.codebook.scheme != IBP_SCHEME_RAW || !t.lengths, "scheme raw has no lengths");
        return t;
    }
};

ibp_fault *fault_of(const Tensor &fault)
{
    return static_cast<ibp_fault *>(static_cast<void *>(data_of<int64_t>(fault, ScalarType::Long, 4, "fault")));
}

// ---- CUDA plumbing ----

void on_device(const Tensor &expected, std::initializer_list<const Tensor *> tensors)
{
    for (const Tensor *tensor : tensors)
        require(tensor->is_cuda() && tensor->get_device_index() == expected.get_device_index(),
                        "all tensors must be on the same CUDA device");
}

ibp_stream current_stream(const Tensor &tensor)
{
    require(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA support");
    void *stream = nullptr;
    require(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) == 0, "no current CUDA stream");
    return static_cast<ibp_stream>(stream);
}

torch::stable::accelerator::DeviceGuard guard(const Tensor &tensor)
{
    return torch::stable::accelerator::DeviceGuard(tensor.get_device_index());
}

// ---- threads of the CPU implementations ----

// Runs work(first, last, scratch, fault) over ranges of [0, count) and keeps the fault with the lowest position.
template <typename Work>
void over_ranges(int64_t count, int64_t bytes_each, size_t scratch_bytes, ibp_fault *fault, const Work &work)
{
    std::mutex mutex;
    bool refused = false; // an argument, by any range
    const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes_each));
    torch::stable::parallel_for(0, count, grain, [&](int64_t first, int64_t last) {
        std::vector<uint8_t> scratch(scratch_bytes);
        ibp_fault mine{};
        const ibp_status status = work(first, last, scratch.data(), &mine);
        if (status == IBP_OK) return;
        const std::lock_guard<std::mutex> lock(mutex);
        refused = refused || status == IBP_INVALID_ARGUMENT;
        if (mine.status == IBP_OK) return;
        if (fault->status == IBP_OK || mine.position < fault->position) *fault = mine;
    });
    check(refused ? IBP_INVALID_ARGUMENT : IBP_OK, "table");
}

Tensor new_tensor(const Tensor &like, std::vector<int64_t> sizes, ScalarType dtype)
{
    return torch::stable::new_empty(like, sizes, dtype);
}

Tensor new_counts(const Tensor &like, int64_t size)
{
    Tensor counts = new_tensor(like, {size}, ScalarType::Long);
    torch::stable::zero_(counts);
    return counts;
}

uint64_t *counts_of(const Tensor &counts) { return static_cast<uint64_t *>(counts.data_ptr()); }

// Sums partial counts of row ranges, one range a thread.
template <typename Count> Tensor count_on_cpu(const Tensor &data, int64_t num_counts, uint32_t row_bytes, const Count &count)
{
    const uint8_t *const rows = bytes_of(data, 0, "data");
    const int64_t num_rows = data.numel() / row_bytes;
    Tensor counts = new_counts(data, num_counts);
    std::mutex mutex;
    torch::stable::parallel_for(0, num_rows, std::max<int64_t>(1, 16 * kGrainBytes / row_bytes), [&](int64_t first, int64_t last) {
        std::vector<uint64_t> partial(static_cast<size_t>(num_counts));
        count(rows + first * row_bytes, static_cast<size_t>(last - first), partial.data());
        const std::lock_guard<std::mutex> lock(mutex);
        for (size_t i = 0; i < partial.size(); i++) counts_of(counts)[i] += partial[i];
    });
    return counts;
}

// ---- codebooks and analysis ----

Tensor codebook_words(Tensor mask, Tensor bitval, int64_t chunk_bytes, bool flag_all)
{
    const uint32_t row_bytes = to_u32(mask.numel(), 1, IBP_MAX_ROW_BYTES, "the size of mask");
    const auto num_words = static_cast<int64_t>(ibp_codebook_words(row_bytes));
    Tensor words = new_tensor(mask, {3, num_words}, ScalarType::Int);
    ibp_codebook unused;
    check(ibp_build_codebook(bytes_of(mask, 1, "mask"), bytes_of(bitval, row_bytes, "bitval"), row_bytes,
                             to_u32(chunk_bytes, 1, 8, "chunk_bytes"), flag_all, static_cast<uint32_t *>(words.data_ptr()),
                             &unused),
          "codebook_words");
    return words;
}

std::tuple<Tensor, Tensor> threshold_bits(Tensor counts, int64_t num_rows, double tau)
{
    const uint32_t row_bytes = to_u32(counts.numel() / 8, 1, IBP_MAX_ROW_BYTES, "row_bytes");
    Tensor mask = new_tensor(counts, {row_bytes}, ScalarType::Byte), bitval = new_tensor(counts, {row_bytes}, ScalarType::Byte);
    data_of<int64_t>(counts, ScalarType::Long, 8, "counts");
    check(ibp_threshold_bits(counts_of(counts), static_cast<uint64_t>(num_rows), row_bytes, tau, bytes_of(mask, row_bytes, "mask"),
                             bytes_of(bitval, row_bytes, "bitval")),
          "threshold_bits");
    return {mask, bitval};
}

// data: whole rows on the CPU. Returns (mask, bitval).
std::tuple<Tensor, Tensor> choose_masks(Tensor data, int64_t row_bytes, int64_t chunk_bytes)
{
    const uint32_t bytes = to_u32(row_bytes, 1, IBP_MAX_ROW_BYTES, "row_bytes"), chunk = to_u32(chunk_bytes, 1, 8, "chunk_bytes");
    const uint8_t *const rows = bytes_of(data, 0, "data");
    Tensor mask = new_tensor(data, {row_bytes}, ScalarType::Byte), bitval = new_tensor(data, {row_bytes}, ScalarType::Byte);
    require((chunk & (chunk - 1)) == 0, "chunk_bytes is ", chunk_bytes, ", not 1, 2, 4 or 8");
    uint8_t *const to_mask = bytes_of(mask, bytes, "mask"), *const to_bitval = bytes_of(bitval, bytes, "bitval");
    const auto num_rows = static_cast<size_t>(data.numel() / row_bytes);
    torch::stable::parallel_for(0, (row_bytes + chunk_bytes - 1) / chunk_bytes, 8, [&](int64_t first, int64_t last) {
        ibp_choose_masks(rows, num_rows, bytes, chunk, static_cast<uint32_t>(first), static_cast<uint32_t>(last), to_mask, to_bitval);
    });
    return {mask, bitval};
}

Tensor count_bits_cpu(Tensor data, int64_t row_bytes)
{
    const uint32_t bytes = to_u32(row_bytes, 1, IBP_MAX_ROW_BYTES, "row_bytes");
    return count_on_cpu(data, 8 * row_bytes, bytes, [&](const uint8_t *rows, size_t num_rows, uint64_t *counts) {
        ibp_count_bits(rows, num_rows, bytes, counts);
    });
}

Tensor count_bits_cuda(Tensor data, int64_t row_bytes)
{
    const auto device = guard(data);
    const uint32_t bytes = to_u32(row_bytes, 1, IBP_MAX_ROW_BYTES, "row_bytes");
    Tensor counts = new_counts(data, 8 * row_bytes);
    check(ibp_cuda_count_bits(bytes_of(data, 0, "data"), static_cast<size_t>(data.numel() / row_bytes), bytes, counts_of(counts),
                              current_stream(data)),
          "count_bits");
    return counts;
}

ibp_codebook masks_of(const Tensor &words, const std::vector<int64_t> &codec)
{
    require(!codec.empty() && codec[0] == IBP_SCHEME_IBP, "only scheme ibp has chunks");
    return codebook_of(words, codec);
}

int64_t chunks_of(const ibp_codebook &cb) { return (cb.row_bytes + cb.chunk_bytes - 1) / cb.chunk_bytes; }

Tensor count_hits_cpu(Tensor data, Tensor codebook, std::vector<int64_t> codec)
{
    const ibp_codebook cb = masks_of(codebook, codec);
    return count_on_cpu(data, chunks_of(cb), cb.row_bytes,
                        [&](const uint8_t *rows, size_t num_rows, uint64_t *hits) { ibp_count_hits(&cb, rows, num_rows, hits); });
}

Tensor count_hits_cuda(Tensor data, Tensor codebook, std::vector<int64_t> codec)
{
    const auto device = guard(data);
    on_device(data, {&codebook});
    const ibp_codebook cb = masks_of(codebook, codec);
    Tensor hits = new_counts(data, chunks_of(cb));
    check(ibp_cuda_count_hits(&cb, bytes_of(data, 0, "data"), static_cast<size_t>(data.numel() / cb.row_bytes), counts_of(hits),
                              current_stream(data)),
          "count_hits");
    return hits;
}

// ---- measuring, indexing and coding rows ----

Tensor measure_rows_cpu(Tensor data, Tensor codebook, std::vector<int64_t> codec)
{
    const ibp_codebook cb = codebook_of(codebook, codec);
    const uint8_t *const bytes = bytes_of(data, 0, "data");
    const int64_t num_rows = rows_of(data.numel(), cb.row_bytes);
    Tensor lengths = new_tensor(data, {num_rows}, ScalarType::UInt16);
    auto *const out = static_cast<uint16_t *>(lengths.data_ptr());
    const size_t scratch_bytes = ibp_scratch_bytes(cb.row_bytes);
    ibp_fault unused{};
    over_ranges(num_rows, cb.row_bytes, scratch_bytes, &unused, [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *) {
        const int64_t start = first * cb.row_bytes, end = std::min<int64_t>(data.numel(), last * cb.row_bytes);
        return ibp_measure_rows(&cb, bytes + start, end - start, out + first, scratch, scratch_bytes);
    });
    return lengths;
}

Tensor measure_rows_cuda(Tensor data, Tensor codebook, std::vector<int64_t> codec)
{
    const auto device = guard(data);
    on_device(data, {&codebook});
    const ibp_codebook cb = codebook_of(codebook, codec);
    Tensor lengths = new_tensor(data, {rows_of(data.numel(), cb.row_bytes)}, ScalarType::UInt16);
    check(ibp_cuda_measure_rows(&cb, bytes_of(data, 0, "data"), data.numel(), static_cast<uint16_t *>(lengths.data_ptr()),
                                current_stream(data)),
          "measure_rows");
    return lengths;
}

// Returns bases and, as the last entry, the bytes of overflow. index(lengths, row_bytes, slot_bytes, bases, overflow_bytes) fills them.
template <typename Index> Tensor index_rows(const Tensor &lengths, int64_t num_bytes, int64_t row_bytes, int64_t slot_bytes, const Index &index)
{
    const uint32_t bytes = to_u32(row_bytes, 1, IBP_MAX_ROW_BYTES, "row_bytes");
    const int64_t num_rows = rows_of(num_bytes, bytes), num_bases = (num_rows + 31) / 32;
    Tensor bases = new_tensor(lengths, {num_bases + 1}, ScalarType::Long);
    auto *const out = static_cast<int64_t *>(bases.data_ptr());
    index(data_of<uint16_t>(lengths, ScalarType::UInt16, lengths.numel() ? num_rows : 0, "lengths"), bytes,
          to_u32(slot_bytes, 0, IBP_MAX_ROW_BYTES, "slot_bytes"), static_cast<uint64_t *>(static_cast<void *>(out)), out + num_bases);
    return bases;
}

Tensor index_rows_cpu(Tensor lengths, int64_t num_bytes, int64_t row_bytes, int64_t slot_bytes)
{
    return index_rows(lengths, num_bytes, row_bytes, slot_bytes,
                      [&](const uint16_t *in, uint32_t bytes, uint32_t slot, uint64_t *bases, int64_t *overflow_bytes) {
                          ibp_index_rows(in, num_bytes, bytes, slot, bases, overflow_bytes);
                      });
}

Tensor index_rows_cuda(Tensor lengths, int64_t num_bytes, int64_t row_bytes, int64_t slot_bytes)
{
    const auto device = guard(lengths);
    return index_rows(lengths, num_bytes, row_bytes, slot_bytes,
                      [&](const uint16_t *in, uint32_t bytes, uint32_t slot, uint64_t *bases, int64_t *overflow_bytes) {
                          check(ibp_cuda_index_rows(in, num_bytes, bytes, slot, bases, overflow_bytes, current_stream(lengths)), "index_rows");
                      });
}

// Returns the stored bytes, and how many rows take 0, 1, ... sectors of 32 bytes.
template <typename Survey> Tensor survey_rows(const Tensor &lengths, int64_t num_bytes, int64_t row_bytes, const Survey &survey)
{
    const uint32_t bytes = to_u32(row_bytes, 1, IBP_MAX_ROW_BYTES, "row_bytes");
    require(num_bytes >= 0, "num_bytes is ", num_bytes);
    Tensor found = new_counts(lengths, 2 + (row_bytes + 31) / 32);
    survey(data_of<uint16_t>(lengths, ScalarType::UInt16, rows_of(num_bytes, bytes), "lengths"), bytes, counts_of(found));
    return found;
}

Tensor survey_rows_cpu(Tensor lengths, int64_t num_bytes, int64_t row_bytes)
{
    return survey_rows(lengths, num_bytes, row_bytes,
                       [&](const uint16_t *in, uint32_t bytes, uint64_t *found) { ibp_survey_rows(in, num_bytes, bytes, found); });
}

Tensor survey_rows_cuda(Tensor lengths, int64_t num_bytes, int64_t row_bytes)
{
    const auto device = guard(lengths);
    return survey_rows(lengths, num_bytes, row_bytes, [&](const uint16_t *in, uint32_t bytes, uint64_t *found) {
        check(ibp_cuda_survey_rows(in, num_bytes, bytes, found, current_stream(lengths)), "survey_rows");
    });
}

// The unpacking of TABLE's fields into TableArgs, the same in every op that takes a table.
#define IBP_TABLE_PARAMETERS                                                                                                      \
    Tensor slots, Tensor overflow, Tensor lengths, Tensor bases, Tensor codebook, std::vector<int64_t> codec, int64_t slot_bytes, \
        int64_t overflow_start, int64_t num_items, int64_t item_bytes
#define IBP_TABLE_ARGUMENTS \
    TableArgs { slots, overflow, lengths, bases, codebook, codec, slot_bytes, overflow_start, num_items, item_bytes }

void encode_rows_cpu(IBP_TABLE_PARAMETERS, Tensor data, Tensor fault)
{
    const ibp_table table = IBP_TABLE_ARGUMENTS.table();
    const uint8_t *const bytes = bytes_of(data, num_items * item_bytes, "data");
    const uint32_t row_bytes = table.codebook.row_bytes;
    const size_t scratch_bytes = ibp_scratch_bytes(row_bytes);
    over_ranges(ibp_num_rows(&table), row_bytes, scratch_bytes, fault_of(fault),
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                    return ibp_encode_rows(&table, bytes, first, last, static_cast<uint8_t *>(slots.data_ptr()),
                                           static_cast<uint8_t *>(overflow.data_ptr()), scratch, scratch_bytes, mine);
                });
}

void encode_rows_cuda(IBP_TABLE_PARAMETERS, Tensor data, Tensor fault)
{
    const auto device = guard(data);
    on_device(data, {&slots, &overflow, &lengths, &bases, &codebook, &fault});
    const ibp_table table = IBP_TABLE_ARGUMENTS.table();
    check(ibp_cuda_encode_rows(&table, bytes_of(data, num_items * item_bytes, "data"), static_cast<uint8_t *>(slots.data_ptr()),
                               static_cast<uint8_t *>(overflow.data_ptr()), fault_of(fault), current_stream(data)),
          "encode_rows");
}

// ---- gathering ----

ibp_ids ids_of(const Tensor &ids)
{
    require(ids.scalar_type() == ScalarType::Long || ids.scalar_type() == ScalarType::Int,
                    "ids must be int32 or int64");
    require(ids.is_contiguous(), "ids is not contiguous");
    const uint32_t id_bytes = ids.scalar_type() == ScalarType::Long ? 8u : 4u;
    return {ids.numel() == 0 ? nullptr : ids.data_ptr(), ids.numel(), id_bytes, nullptr, 0};
}

// Ids with the positions of out that their items go to: any of those that out has room for; without positions one after the other.
ibp_ids placed_ids_of(const Tensor &ids, const std::optional<Tensor> &positions, const Tensor &out, int64_t item_bytes)
{
    ibp_ids items = ids_of(ids);
    room_of(out, positions ? 0 : items.count * item_bytes, "out");
    if (!positions) return items;
    const auto *data = data_of<int32_t>(*positions, ScalarType::Int, items.count, "positions");
    items.positions = static_cast<const uint32_t *>(static_cast<const void *>(data));
    items.out_items = item_bytes ? out.numel() * static_cast<int64_t>(out.element_size()) / item_bytes : 0;
    return items;
}

void gather_items_cpu(IBP_TABLE_PARAMETERS, Tensor ids, int64_t /*max_sms*/, Tensor out, Tensor fault, std::optional<Tensor> positions)
{
    const ibp_table table = IBP_TABLE_ARGUMENTS.table();
    const ibp_ids items = placed_ids_of(ids, positions, out, item_bytes);
    uint8_t *const to = room_of(out, 0, "out");
    const int64_t row_bytes = table.codebook.row_bytes;
    const size_t scratch_bytes = ibp_scratch_bytes(table.codebook.row_bytes);
    over_ranges(items.count, std::max(item_bytes, row_bytes), scratch_bytes, fault_of(fault),
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                    return ibp_gather_items(&table, &items, first, last, to, scratch, scratch_bytes, mine);
                });
}

void gather_items_cuda(IBP_TABLE_PARAMETERS, Tensor ids, int64_t max_sms, Tensor out, Tensor fault, std::optional<Tensor> positions)
{
    const auto device = guard(out);
    on_device(out, {&slots, &overflow, &lengths, &bases, &codebook, &ids, &fault, positions ? &*positions : &ids});
    const ibp_table table = IBP_TABLE_ARGUMENTS.table();
    const ibp_ids items = placed_ids_of(ids, positions, out, item_bytes);
    check(ibp_cuda_gather_items(&table, &items, room_of(out, 0, "out"), fault_of(fault),
                                static_cast<int>(to_u32(max_sms, 0, 1 << 20, "max_sms")), current_stream(out)),
          "gather_items");
}

// ---- large tables ----

// (ids in the order of the windows of a table, the position of each): as many as ids.
template <typename Partition>
std::tuple<Tensor, Tensor> partition_ids(const Tensor &ids, int64_t num_items, int64_t window_bits, const Partition &partition)
{
    const ibp_ids items = ids_of(ids);
    const uint32_t bits = to_u32(window_bits, 0, 62, "window_bits");
    require(items.count <= INT32_MAX, "there are ", items.count, " ids, more than 2^31 - 1");
    require(ibp_num_windows(num_items, bits) <= IBP_MAX_WINDOWS, "window_bits is ", window_bits, ": ", num_items,
            " items fall into more than ", IBP_MAX_WINDOWS, " windows");
    Tensor sorted_ids = new_tensor(ids, {items.count}, ids.scalar_type()), positions = new_tensor(ids, {items.count}, ScalarType::Int);
    const auto num_bytes = static_cast<int64_t>(ibp_partition_workspace_bytes(items.count, num_items, bits));
    Tensor workspace = new_tensor(ids, {num_bytes}, ScalarType::Byte);
    check(partition(items, bits, workspace.data_ptr(), sorted_ids.data_ptr(),
                    static_cast<uint32_t *>(static_cast<void *>(positions.data_ptr()))),
          "partition_ids");
    return {sorted_ids, positions};
}

std::tuple<Tensor, Tensor> partition_ids_cpu(Tensor ids, int64_t num_items, int64_t window_bits)
{
    return partition_ids(ids, num_items, window_bits, [&](const ibp_ids &items, uint32_t bits, void *workspace, void *to, uint32_t *positions) {
        return ibp_partition_ids(&items, num_items, bits, workspace, to, positions);
    });
}

std::tuple<Tensor, Tensor> partition_ids_cuda(Tensor ids, int64_t num_items, int64_t window_bits)
{
    const auto device = guard(ids);
    return partition_ids(ids, num_items, window_bits, [&](const ibp_ids &items, uint32_t bits, void *workspace, void *to, uint32_t *positions) {
        return ibp_cuda_partition_ids(&items, num_items, bits, workspace, to, positions, current_stream(ids));
    });
}

// The selection of the items at ids from position `first` on, as many as fit lengths (and bases) by their rows and rows by their
// bytes, at least one; taken becomes [items, stored bytes]. Groups of the rows that share a base are measured and then copied by
// torch's threads. Nothing is taken where there is a fault.
void select_rows_cpu(IBP_TABLE_PARAMETERS, Tensor ids, int64_t first, Tensor lengths_out, Tensor bases_out, Tensor rows_out, Tensor taken,
                     Tensor fault)
{
    constexpr int64_t kGroup = 32; // rows that share a base
    const ibp_table table = IBP_TABLE_ARGUMENTS.table();
    const int64_t row_bytes = table.codebook.row_bytes;
    require(item_bytes > 0 && item_bytes % row_bytes == 0, "items of ", item_bytes, " bytes are not whole rows of ", row_bytes);
    ibp_ids items = ids_of(ids);
    require(0 <= first && first < items.count, "first is ", first, " of ", items.count, " ids");
    items.data = static_cast<const uint8_t *>(items.data) + first * items.id_bytes;
    items.count -= first;
    const int64_t rows_per_item = item_bytes / row_bytes;
    int64_t num_rows = std::min(items.count * rows_per_item, lengths_out.numel() / rows_per_item * rows_per_item);
    int64_t num_groups = rows_of(num_rows, kGroup);
    auto *const lengths_to = data_of<uint16_t>(lengths_out, ScalarType::UInt16, rows_per_item, "lengths_out");
    auto *const starts = data_of<int64_t>(bases_out, ScalarType::Long, num_groups, "bases_out");
    auto *const result = data_of<int64_t>(taken, ScalarType::Long, 2, "taken");
    uint8_t *const to = bytes_of(rows_out, (rows_per_item + kGroup) * row_bytes, "rows_out");
    const auto over_groups = [&](int64_t bytes_each, const auto &work) {
        over_ranges(num_groups, bytes_each, 0, fault_of(fault), [&](int64_t begin, int64_t end, uint8_t *, ibp_fault *mine) {
            for (int64_t g = begin; g < end && mine->status == IBP_OK; g++) work(g, kGroup * g, std::min(num_rows, kGroup * (g + 1)), mine);
            mine->position += first;
            return static_cast<ibp_status>(mine->status);
        });
    };
    const auto is_ok = [&] { return fault_of(fault)->status == IBP_OK; };
    result[0] = result[1] = 0;
    over_groups(64 * kGroup, [&](int64_t g, int64_t from, int64_t until, ibp_fault *mine) {
        uint64_t stored_bytes = 0;
        ibp_measure_selection(&table, &items, from, until, lengths_to + from, &stored_bytes, mine);
        starts[g] = static_cast<int64_t>(stored_bytes);
    });
    if (!is_ok()) return;
    int64_t end = 0;
    for (int64_t g = 0; g < num_groups; g++) {
        const int64_t start = end;
        end += starts[g];
        starts[g] = start;
        if (end <= rows_out.numel()) continue;
        end = start;
        num_groups = g;
        num_rows = kGroup * g;
    }
    over_groups(kGroup * row_bytes, [&](int64_t g, int64_t from, int64_t until, ibp_fault *mine) {
        const int64_t stop = g + 1 < num_groups ? starts[g + 1] : end;
        ibp_copy_selection(&table, &items, from, until, to + starts[g], static_cast<uint64_t>(stop - starts[g]), mine);
    });
    if (!is_ok()) return;
    result[0] = num_rows / rows_per_item;
    result[1] = end;
}

// ---- decoding ----

void decode_bytes_cpu(IBP_TABLE_PARAMETERS, int64_t start, int64_t end, int64_t /*max_sms*/, Tensor out, Tensor fault)
{
    const ibp_table table = IBP_TABLE_ARGUMENTS.table();
    require(0 <= start && start <= end && end <= num_items * item_bytes, "bytes [", start, ", ", end,
                    ") are not in the table");
    if (start == end) return;
    uint8_t *const to = room_of(out, end - start, "out");
    const int64_t row_bytes = table.codebook.row_bytes, first_row = start / row_bytes, last_row = (end - 1) / row_bytes + 1;
    const size_t scratch_bytes = ibp_scratch_bytes(table.codebook.row_bytes);
    over_ranges(last_row - first_row, row_bytes, scratch_bytes, fault_of(fault),
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                    const int64_t from = std::max(start, (first_row + first) * row_bytes),
                                  stop = std::min(end, (first_row + last) * row_bytes);
                    return ibp_decode_bytes(&table, from, stop, to + (from - start), scratch, scratch_bytes, mine);
                });
}

void decode_bytes_cuda(IBP_TABLE_PARAMETERS, int64_t start, int64_t end, int64_t max_sms, Tensor out, Tensor fault)
{
    const auto device = guard(out);
    on_device(out, {&slots, &overflow, &lengths, &bases, &codebook, &fault});
    const ibp_table table = IBP_TABLE_ARGUMENTS.table();
    check(ibp_cuda_decode_bytes(&table, start, end, room_of(out, end - start, "out"), fault_of(fault),
                                static_cast<int>(to_u32(max_sms, 0, 1 << 20, "max_sms")), current_stream(out)),
          "decode_bytes");
}

// host_bases: the table's bases on the CPU. streamer: address of an ibp_streamer of out's device. begins, ends: whether this is the first, the
// last table of a stream, all through the same ring.
void stream_bytes_cuda(IBP_TABLE_PARAMETERS, Tensor host_bases, int64_t start, int64_t end, int64_t streamer, bool begins,
                       bool ends, int64_t max_sms, Tensor ring, Tensor out, Tensor fault)
{
    const auto device = guard(out);
    on_device(out, {&slots, &overflow, &lengths, &bases, &codebook, &ring, &fault});
    require(!host_bases.is_cuda() && host_bases.numel() == bases.numel(), "host_bases must be bases on the CPU");
    require(streamer != 0, "no streamer");
    const ibp_table table = IBP_TABLE_ARGUMENTS.table();
    auto *const to = reinterpret_cast<ibp_streamer *>(static_cast<uintptr_t>(streamer));
    if (begins) check(ibp_cuda_begin_stream(to, bytes_of(ring, 0, "ring"), ring.numel()), "begin_stream");
    const auto *const starts = data_of<int64_t>(host_bases, ScalarType::Long, 0, "host_bases");
    check(ibp_cuda_stream_bytes(to, &table, static_cast<const uint64_t *>(static_cast<const void *>(starts)), start, end, ends,
                                bytes_of(out, end - start, "out"), fault_of(fault),
                                static_cast<int>(to_u32(max_sms, 0, 1 << 20, "max_sms")), current_stream(out)),
          "stream_bytes");
}

// A CUDA tensor over the memory of a pinned one, which must outlive it.
Tensor map_pinned(Tensor host, int64_t device_index)
{
    const auto index = static_cast<int32_t>(to_u32(device_index, 0, 1 << 10, "device_index"));
    const torch::stable::accelerator::DeviceGuard device(index);
    void *mapped = nullptr;
    check(ibp_cuda_map_pinned(host.data_ptr(), &mapped), "map_pinned");
    return torch::stable::from_blob(mapped, host.sizes(), host.strides(),
                                    torch::stable::Device(torch::headeronly::DeviceType::CUDA, index), host.scalar_type());
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CPU, m)
{
    m.impl("codebook_words", TORCH_BOX(&codebook_words));
    m.impl("threshold_bits", TORCH_BOX(&threshold_bits));
    m.impl("choose_masks", TORCH_BOX(&choose_masks));
    m.impl("count_bits", TORCH_BOX(&count_bits_cpu));
    m.impl("count_hits", TORCH_BOX(&count_hits_cpu));
    m.impl("measure_rows", TORCH_BOX(&measure_rows_cpu));
    m.impl("index_rows", TORCH_BOX(&index_rows_cpu));
    m.impl("survey_rows", TORCH_BOX(&survey_rows_cpu));
    m.impl("encode_rows", TORCH_BOX(&encode_rows_cpu));
    m.impl("gather_items", TORCH_BOX(&gather_items_cpu));
    m.impl("decode_bytes", TORCH_BOX(&decode_bytes_cpu));
    m.impl("partition_ids", TORCH_BOX(&partition_ids_cpu));
    m.impl("select_rows", TORCH_BOX(&select_rows_cpu));
    m.impl("map_pinned", TORCH_BOX(&map_pinned));
}

STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m)
{
    m.impl("count_bits", TORCH_BOX(&count_bits_cuda));
    m.impl("count_hits", TORCH_BOX(&count_hits_cuda));
    m.impl("measure_rows", TORCH_BOX(&measure_rows_cuda));
    m.impl("index_rows", TORCH_BOX(&index_rows_cuda));
    m.impl("survey_rows", TORCH_BOX(&survey_rows_cuda));
    m.impl("encode_rows", TORCH_BOX(&encode_rows_cuda));
    m.impl("gather_items", TORCH_BOX(&gather_items_cuda));
    m.impl("decode_bytes", TORCH_BOX(&decode_bytes_cuda));
    m.impl("stream_bytes", TORCH_BOX(&stream_bytes_cuda));
    m.impl("partition_ids", TORCH_BOX(&partition_ids_cuda));
}
