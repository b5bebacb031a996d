// torch_tables.h - reads the arguments that many operations share, and makes the structs of ibp.h from them. It checks
// that tensors have the sizes that the core will read. The core itself checks the bytes in them.
//
//     table     uint8 on the CPU: the bytes of a table's handle, as describe_table returns them. The handle must be for
//               the device that the call's other tensors are on. The table is in memory of this device, or in pinned
//               host memory that the device can read. The bytes are trusted, and they do not keep the table's memory
//               alive. The schemas of encode_rows and encode_into say that `table` is written, so that torch.compile
//               keeps these operations in order. In fact they write the memory that the handle describes.
//     cache     uint8 on the CPU: the bytes of a cache's handle, as describe_cache returns them. They are trusted.
//     codec     int[]. Scheme raw: [0, row_bytes]. Scheme ibp: [1, row_bytes, chunk_bytes, num_flags]. Scheme planes:
//               [2, row_bytes, element_bytes, rotate, residual_bits, per_column, listed, default, closed,
//               invariant_bits, invariant_value, consecutive, first_symbol, signed_default, num_constant,
//               digit_bits ...], with one number of digit_bits for each plane, up to four.
//     codebook  Scheme raw: not read. Scheme ibp: int32 [3, words], as codebook_words returns it, aligned to 16 bytes.
//               Scheme planes: uint8 symbols; if num_constant is not 0, the row template and the live columns (as
//               uint16) precede them, each padded to a multiple of 16 bytes. If there are clusters (up to 256), their
//               codebooks follow one another. In scheme ibp [num_flags, 0, 0, 0] then follows each codebook.
//     ids       int32 or int64 [ids].
//     fault     int64 [4]: a struct ibp_fault (ibp_status.h), which keeps the first fault; at first all zeros.
//     max_sms   The largest number of multiprocessors that a kernel keeps busy; 0: all. It has no effect on the CPU.
//     entries   int64 [rows]: for each row that is fetched, its entry in a cache (ibp_cache.h); 0 if the cache does not
//               hold the row.
//     slabs     Up to 8 tensors, uint8 [bytes] each: the memory of a cache, which holds rows in their stored form.
//               Slabs may be on other CUDA devices than the call's other tensors, if the call's device can read them.
#ifndef IBP_TORCH_TABLES_H
#define IBP_TORCH_TABLES_H

#include "torch_tensors.h"

#include "../core/locate.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

namespace ibp_torch {

using Codec = std::vector<int64_t>;

// ---- codebooks ----

inline uint32_t row_bytes_of(int64_t row_bytes) { return to_u32(row_bytes, 1, IBP_MAX_ROW_BYTES, "row_bytes"); }

// Reads a codebook of scheme ibp. If `words` has more numbers than one codebook needs, it holds clusters: for each
// cluster a codebook, then num_flags of this codebook, then three numbers that are not read.
inline void read_masks(const Tensor &words, const Codec &codec, ibp_codebook *codebook)
{
    require(codec.size() == 4, "codec of scheme ibp has ", codec.size(), " numbers, 4 are needed");
    codebook->chunk_bytes = to_u32(codec[2], 1, 8, "chunk_bytes");
    require((codebook->chunk_bytes & (codebook->chunk_bytes - 1)) == 0, "chunk_bytes is ", codec[2],
            ", not 1, 2, 4 or 8");
    codebook->num_flags = to_u32(codec[3], 0, divide_up(codebook->row_bytes, codebook->chunk_bytes), "num_flags");
    const auto num_words = static_cast<int64_t>(ibp_codebook_words(codebook->row_bytes));
    const auto *data = data_of<uint32_t>(words, ScalarType::Int, 3 * num_words, "codebook");
    require(reinterpret_cast<uintptr_t>(data) % 16 == 0, "codebook is not aligned to 16 bytes");
    codebook->mask = data;
    codebook->bitval = data + num_words;
    codebook->flags = data + 2 * num_words;
    const int64_t stride = 3 * num_words + 4;
    if (words.numel() == 3 * num_words) return;
    require(words.numel() % stride == 0 && words.numel() / stride <= int64_t{IBP_MAX_CLUSTERS}, "codebook has ",
            words.numel(), " numbers, ", 3 * num_words, " or 1 to 256 times ", stride, " are needed");
    codebook->num_clusters = static_cast<uint32_t>(words.numel() / stride);
    codebook->cluster_stride = static_cast<uint32_t>(stride);
    codebook->cluster_flags = data + 3 * num_words;
}

// The layout of the arrays for constant columns at the beginning of the argument `codebook` of scheme planes: first the
// row template, then the numbers of the live columns, which begin at byte live_start. Each array is padded to a
// multiple of 16 bytes. num_bytes is the size of both arrays together; 0 if no column is constant.
struct ConstantColumns {
    int64_t num_live, live_start, num_bytes;

    ConstantColumns(const ibp_planes &planes, uint32_t row_bytes)
        : num_live(row_bytes / planes.element_bytes - int64_t{planes.num_constant}), live_start(padded(row_bytes)),
          num_bytes(planes.num_constant == 0 ? 0 : live_start + padded(num_live * int64_t{sizeof(uint16_t)}))
    {
    }

  private:
    static int64_t padded(int64_t bytes) { return divide_up(bytes, 16) * 16; }
};

// Reads a codebook of scheme planes. words: the constant columns, if there are any, followed by the packed symbols of
// each cluster.
inline void read_planes(const Tensor &words, const Codec &codec, ibp_codebook *codebook)
{
    constexpr size_t kFields = 15;
    require(codec.size() >= kFields && codec.size() <= kFields + IBP_MAX_PLANES, "codec of scheme planes has ",
            codec.size(), " numbers, 15 to 19 are needed");
    ibp_planes planes{};
    planes.element_bytes = to_u32(codec[2], 1, 8, "element_bytes");
    planes.rotate = to_u32(codec[3], 0, 1, "rotate");
    planes.residual_bits = to_u32(codec[4], 0, 8 * codec[2], "residual_bits");
    planes.per_column = codec[5] != 0;
    planes.listed = codec[6] != 0;
    planes.default_value = static_cast<uint64_t>(codec[7]);
    planes.closed_value = static_cast<uint64_t>(codec[8]);
    planes.invariant_bits = to_u32(codec[9], 0, 63, "invariant_bits");
    planes.invariant_value = static_cast<uint64_t>(codec[10]);
    planes.consecutive = codec[11] != 0;
    planes.first_symbol = static_cast<uint64_t>(codec[12]);
    planes.signed_default = codec[13] != 0;
    planes.num_constant = to_u32(codec[14], 0, codebook->row_bytes, "num_constant");
    planes.num_planes = static_cast<uint32_t>(codec.size() - kFields);
    for (uint32_t p = 0; p < planes.num_planes; p++)
        planes.digit_bits[p] = static_cast<uint8_t>(to_u32(codec[kFields + p], 1, IBP_MAX_DIGIT_BITS, "digit_bits"));
    const uint8_t *const data = bytes_of(words, 0, "codebook");
    const ConstantColumns constants(planes, codebook->row_bytes);
    if (planes.num_constant != 0) {
        require(constants.num_live > 0 && constants.num_bytes <= words.numel(), "codebook has ", words.numel(),
                " bytes, too few for ", planes.num_constant, " constant columns");
        planes.row_template = data;
        planes.live_columns = static_cast<const uint16_t *>(static_cast<const void *>(data + constants.live_start));
    }
    const int64_t entries_bytes = words.numel() - constants.num_bytes;
    planes.entries = entries_bytes == 0 ? nullptr : data + constants.num_bytes;
    const ibp_status status =
        ibp_build_planes_codebook(&planes, codebook->row_bytes, static_cast<size_t>(entries_bytes), codebook);
    require(status == IBP_OK, "codebook has ", entries_bytes,
            " bytes of entries, not those of 1 to 256 sets aligned to their ",
            "symbols; or the codec of scheme planes is out of range");
}

// Reads a codebook of any scheme. Each scheme defines which numbers follow [scheme, row_bytes] in its codec, so a new
// scheme needs a case here.
inline ibp_codebook codebook_of(const Tensor &words, const Codec &codec)
{
    require(codec.size() >= 2, "codec is not [scheme, row_bytes, ...]");
    ibp_codebook codebook{};
    codebook.row_bytes = row_bytes_of(codec[1]);
    switch (codec[0]) {
    case IBP_SCHEME_RAW:
        require(codec.size() == 2, "codec of scheme raw has ", codec.size(), " numbers, 2 are needed");
        break;
    case IBP_SCHEME_IBP: read_masks(words, codec, &codebook); break;
    case IBP_SCHEME_PLANES: read_planes(words, codec, &codebook); break;
    default: throw std::runtime_error("ibp: unknown scheme " + to_text(codec[0]));
    }
    codebook.scheme = static_cast<ibp_scheme>(codec[0]);
    return codebook;
}

// ---- tables and caches ----

// Copies a handle out of the tensor that describe_table or describe_cache returned. what: "table" or "cache".
template <typename Handle> Handle handle_in(const Tensor &tensor, const char *what)
{
    Handle handle;
    require_cpu(tensor);
    std::memcpy(&handle, bytes_of(tensor, sizeof(Handle), what), sizeof(Handle));
    require(handle.mark == Handle::kMark, what, " is not what describe_", what, " has described");
    return handle;
}

// The argument `table` of an operation. WRITTEN: a mask with a bit for each part (ibp::TablePart) that the operation
// writes.
template <uint32_t WRITTEN> struct TableOf : OnCpu, ibp::TableHandle {
    explicit TableOf(const Tensor &tensor)
        : OnCpu(tensor), ibp::TableHandle(handle_in<ibp::TableHandle>(tensor, "table"))
    {
    }

    void add_parts(Given &given) const
    {
        for (uint32_t p = 0; p < ibp::kNumParts; p++) {
            const bool is_written = (WRITTEN >> p & 1u) != 0;
            // An operation that does not write the table's own fault record does not use this record at all.
            if (p != ibp::kFault || is_written) given.add_part(ibp::kPartNames[p], parts[p], is_written);
        }
        given.require_device(ibp::TableHandle::device);
    }
};
using Table = TableOf<0>;
using Source = TableOf<1u << ibp::kFault>;                             // a table whose own fault record is written
using TableOut = TableOf<1u << ibp::kSlots | 1u << ibp::kOverflow>;    // a table whose rows are written
using PlaceOut = TableOf<~(1u << ibp::kCodebook | 1u << ibp::kFault)>; // a place into which rows are coded

// A table in a list that may be long, and that may contain the same table twice. Given compares each piece of memory
// with all others, which would take long and would refuse such lists. So add_parts adds no memory, and the operation
// checks that no table overlaps the memory that the operation writes.
struct Listed : Table {
    using Table::Table;
    void add_parts(Given &given) const { given.require_device(ibp::TableHandle::device); }
};

// The argument `cache` of an operation, which may write all of the cache's memory.
struct Cache : OnCpu, ibp::CacheHandle {
    explicit Cache(const Tensor &tensor) : OnCpu(tensor), ibp::CacheHandle(handle_in<ibp::CacheHandle>(tensor, "cache"))
    {
    }

    void add_parts(Given &given) const
    {
        for (const Memory &part : parts) given.add_part("cache", part, true);
        given.require_device(ibp::CacheHandle::device);
    }
};

// An argument that is a list of tables or of caches. T: Source or Listed, for example.
template <typename T> struct ListOf : Role<Tensors, kCpu> {
    std::vector<T> each;
    explicit ListOf(const Tensors &tensors) : Role(tensors)
    {
        for (const Tensor &tensor : tensors) each.emplace_back(tensor);
    }

    void add_parts(Given &given) const
    {
        for (const T &one : each) one.add_parts(given);
    }
};

inline ibp_fault *fault_of(const Tensor &fault) { return data_of<ibp_fault>(fault, ScalarType::Long, 4, "fault"); }

// ---- ids ----

inline ibp_ids ids_of(const Tensor &ids)
{
    const bool is_long = ids.scalar_type() == ScalarType::Long;
    require(is_long || ids.scalar_type() == ScalarType::Int, "ids must be int32 or int64");
    ibp_ids items{};
    items.data = memory_of(ids, "ids").data, items.count = ids.numel(), items.id_bytes = is_long ? 8u : 4u;
    return items;
}

inline int sms_of(int64_t max_sms) { return static_cast<int>(to_u32(max_sms, 0, 1 << 20, "max_sms")); }

// The dimensions that number the items of a strided tensor: for each dimension its stride in bytes and its size.
using Steps = std::vector<std::array<int64_t, 2>>;

// Returns the number of bytes from the first item to the end of the last one; -1 if two items share memory.
inline int64_t bytes_of_items(Steps steps, int64_t item_bytes)
{
    int64_t end = item_bytes;
    std::sort(steps.begin(), steps.end());
    for (const auto &[stride, size] : steps) {
        if (stride < end) return -1;
        end += total_bytes(size - 1, stride, "out");
    }
    return end;
}

// Spreads the items of a call over a strided tensor. The first outer_dims dimensions number the items; the other
// dimensions hold one item, contiguously. Fills in the dimensions of ids. Returns the memory from the tensor's first
// byte to its last.
inline Memory spread_over(const Tensor &out, int64_t outer_dims, int64_t item_bytes, ibp_ids *ids)
{
    const auto element_bytes = static_cast<int64_t>(out.element_size());
    require(0 <= outer_dims && outer_dims <= out.dim(), "outer_dims is ", outer_dims, " of ", out.dim());
    int64_t inner_bytes = element_bytes, count = 1;
    for (int64_t d = out.dim(); d-- > outer_dims;) {
        require(out.size(d) == 1 || out.stride(d) * element_bytes == inner_bytes, "out's items are not contiguous");
        inner_bytes = total_bytes(out.size(d), inner_bytes, "out");
    }
    require(inner_bytes == item_bytes, "out has items of ", inner_bytes, " bytes, ", item_bytes, " are needed");
    Steps steps;
    for (int64_t d = 0; d < outer_dims; d++) {
        count = total_bytes(out.size(d), count, "out");
        if (out.size(d) == 1) continue;
        require(ids->num_dims < IBP_MAX_OUT_DIMS, "out has more than ", int64_t{IBP_MAX_OUT_DIMS},
                " dimensions of items");
        ids->sizes[ids->num_dims] = out.size(d);
        ids->strides[ids->num_dims++] = total_bytes(out.stride(d), element_bytes, "out");
        steps.push_back({ids->strides[ids->num_dims - 1], out.size(d)});
    }
    require(count == ids->count, "out has room for ", count, " items, there are ", ids->count);
    if (count == 0 || item_bytes == 0) return {nullptr, 0};
    const int64_t end = bytes_of_items(steps, item_bytes);
    require(end >= 0, "items of out share memory");
    return {static_cast<uint8_t *>(out.data_ptr()), end};
}

// ---- rows of items ----

// Returns the number of rows of an item. Throws if an item does not consist of whole rows.
inline int64_t rows_per_item_of(const ibp_table &table)
{
    const int64_t row_bytes = table.codebook.row_bytes;
    require(table.item_bytes > 0 && table.item_bytes % row_bytes == 0, "items of ", table.item_bytes,
            " bytes are not whole rows of ", row_bytes);
    return table.item_bytes / row_bytes;
}

// Makes the struct that a gather reads from the arguments `entries` and `slabs`. num_rows: the number of rows that the
// call fetches.
inline ibp_cache cache_of(const Tensor &entries, const std::vector<Tensor> &slabs, int64_t num_rows)
{
    ibp_cache cache{};
    require(slabs.size() <= IBP_MAX_SLABS, "there are ", static_cast<int64_t>(slabs.size()), " slabs, more than 8");
    cache.entries = unsigned_longs_of(entries, num_rows, "entries");
    for (const Tensor &slab : slabs) cache.slabs[cache.num_slabs++] = {bytes_of(slab, 0, "slabs"), slab.numel()};
    return cache;
}

// Looks up the rows of items in the maps of a cache (ibp_find_cached). counts: nullptr if nothing is counted.
inline void find_in_maps(const Device &device, const ibp_row_query &query, const ibp_cache_map *maps, uint32_t num_maps,
                         uint64_t *entries, ibp_cache_counts *counts)
{
    constexpr int64_t kLookUpBytes = 128; // looking up a row takes about as long as reading this many bytes
    if (device.is_cuda()) {
        check(ibp_cuda_find_cached(&query, maps, num_maps, entries, counts, device.stream()), "find_cached");
        return;
    }
    ibp_fault unused{};
    over_ranges(query.ids->count, query.rows_per_item * kLookUpBytes, 0, &unused,
                [&](int64_t first, int64_t last, uint8_t *, ibp_fault *) {
                    return ibp_find_cached(&query, maps, num_maps, first, last, entries, counts);
                });
}

// Looks up the rows of items in a cache that replaces the least recently used rows, and copies missing rows into this
// cache (ibp_claim_cached). counts: nullptr if nothing is counted.
inline void claim_ways(const Device &device, const ibp_table &table, const ibp_ids &items, const ibp_lru &lru,
                       uint64_t *entries, ibp_cache_counts *counts, ibp_fault *fault)
{
    const auto claim_on_cpu = [](auto... given) {
        const ibp_status status = ibp_claim_cached(given...);
        return status == IBP_INVALID_ARGUMENT ? status : IBP_OK; // other statuses are in fault
    };
    run_on(device, "claim_cached", ibp_cuda_claim_cached, claim_on_cpu, &table, &items, &lru, entries, counts, fault);
}

} // namespace ibp_torch

#endif
