/* emulated_changing.cpp - kernels of csrc/cuda under emulated_simt.h while another stream, as it were, changes ids,
 * lengths and entries after any of their looks (changing.h). What they write stays in its arrays. Only kernels whose
 * lanes look at ids of their own: lanes of a warp that load one address together see one value on a GPU, not here. */
#include "emulated_simt.h"
#include "changing.h"
#include "core/cache.h"
#include "cuda/launch.cuh"
#include "internal/ibp_internal.h"

extern "C" const char *__asan_default_options() { return "abort_on_error=1:detect_leaks=0"; }

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

namespace {

long num_wrong = 0;

void check(bool holds, const char *what)
{
    if (!holds) printf("wrong: %s\n", what);
    num_wrong += !holds;
}

/* Memory of a fence's, as an array. */
template <class T> struct Fenced {
    fenced memory;
    T *data;
    explicit Fenced(size_t count) : memory(fenced_new(nullptr, count * sizeof(T))), data(as<T>(memory.bytes)) {}
    Fenced(const Fenced &) = delete;
    ~Fenced() { fenced_free(&memory); }
    template <class U> static U *as(void *bytes) { return static_cast<U *>(bytes); }
};

/* Runs a call with an array that turns into others: larger numbers, negative ones, and those in reverse order. */
template <class T, size_t COUNT>
void check_array(const char *name, void (*call)(void *, void *), const T (&array)[COUNT])
{
    T others[COUNT];
    for (int kind = 0; kind < 3; kind++) {
        for (size_t i = 0; i < COUNT; i++)
            others[i] = kind == 0   ? std::numeric_limits<T>::max()
                        : kind == 1 ? static_cast<T>(~array[i])
                                    : array[COUNT - 1 - i];
        check(at_each_look(call, nullptr, array, others, sizeof array) > 1, name);
    }
}

/* ---- ids in the order of windows ---- */

constexpr int64_t kIds = 300, kItems = 1000;
constexpr uint32_t kWindowBits = 4;

template <class Id> void partition(void *, void *array)
{
    const ibp_ids ids = {.data = array, .count = kIds, .id_bytes = sizeof(Id)};
    const Fenced<uint8_t> workspace(ibp_partition_workspace_bytes(kIds, kItems, kWindowBits));
    const Fenced<Id> sorted(kIds);
    const Fenced<uint32_t> positions(kIds);
    bool is_there[kIds] = {}, are_all = true;
    check(ibp_cuda_partition_ids(&ids, kItems, kWindowBits, workspace.data, sorted.data, positions.data, nullptr) ==
              IBP_OK,
          "ids are refused");
    for (int64_t k = 0; k < kIds; k++) {
        const uint32_t at = positions.data[k];
        are_all = are_all && at < kIds && !is_there[at];
        if (at < kIds) is_there[at] = true;
    }
    check(are_all, "positions that are not all there");
}

/* ---- a cache ---- */

constexpr int64_t kRows = 40, kAsked = 6;
constexpr uint32_t kRowBytes = 64, kWays = 32;
uint8_t slots[kRows * kRowBytes];
uint16_t all_lengths[kRows];
const int64_t asked_rows[kAsked] = {3, 17, 39, 3, 0, 21};

/* Claims rows, then looks them up, with an array that changes. */
void claim(const int64_t *ids, const uint16_t *lengths, uint64_t *entries)
{
    ibp_table table = {};
    table.num_items = kRows, table.item_bytes = table.slot_bytes = kRowBytes;
    table.slots = slots, table.slots_bytes = sizeof slots, table.lengths = lengths;
    table.codebook.scheme = IBP_SCHEME_PLANES, table.codebook.row_bytes = kRowBytes;
    table.codebook.planes.element_bytes = table.codebook.planes.symbol_bytes = 1;
    const Fenced<uint8_t> slab(kWays * kRowBytes);
    const Fenced<ibp_cached_row> ways(kWays);
    const Fenced<uint32_t> stamps(kWays + 1);
    const Fenced<uint64_t> own_entries(kAsked);
    uint64_t clock[2] = {};
    for (uint32_t w = 0; w < kWays; w++) ways.data[w] = {IBP_WAY_EMPTY, 0};
    const ibp_lru lru = {
        {{ways.data, 1, kWays}, slab.data, int64_t{kWays} * kRowBytes, 0}, kRowBytes, stamps.data, clock};
    const ibp_ids request = {.data = ids, .count = kAsked, .id_bytes = 8};
    ibp_fault fault = {};
    if (entries == nullptr) entries = own_entries.data;
    check(ibp_cuda_claim_cached(&table, &request, &lru, entries, nullptr, &fault, nullptr) == IBP_OK, "a claim");
    for (uint32_t w = 0; w < kWays; w++) {
        const ibp_cached_row way = ways.data[w];
        if (way.row < 0 || way.entry == 0) continue;
        const uint32_t stored = ibp_stored_bytes(ibp_length_of_entry(way.entry), kRowBytes, kRowBytes);
        check(way.row < kRows && stored <= kRowBytes &&
                  memcmp(slab.data + ibp_offset_in_slab(way.entry), slots + way.row * kRowBytes, stored) == 0,
              "a row that is not what its entry says");
    }
    const ibp_row_query query = {&request, 1, kRowBytes, lengths, kRows};
    check(ibp_cuda_find_cached(&query, &lru.slab.map, 1, entries, nullptr, nullptr) == IBP_OK, "a search");
    check(ibp_cuda_drop_cached(ids, kAsked, &lru.slab.map, nullptr) == IBP_OK, "rows to drop");
}
void claim_ids(void *, void *array) { claim(static_cast<int64_t *>(array), all_lengths, nullptr); }
void claim_lengths(void *, void *array) { claim(asked_rows, static_cast<uint16_t *>(array), nullptr); }
void claim_entries(void *, void *array) { claim(asked_rows, all_lengths, static_cast<uint64_t *>(array)); }

/* ---- pages ---- */

constexpr int64_t kPages = 4;

/* array: pages, and then blocks. */
void plan(void *, void *array)
{
    constexpr uint32_t kTensors = 2, kIdsPerBlock = 2;
    const uint64_t starts[kTensors] = {1000, 2000};
    const Fenced<uint64_t> block_starts(3), addresses(kPages * kTensors);
    const Fenced<int64_t> ids(kPages * kTensors * kIdsPerBlock);
    ibp_page_transfer transfer = {};
    transfer.pages = static_cast<int64_t *>(array), transfer.blocks = transfer.pages + kPages;
    transfer.count = transfer.num_pages = kPages, transfer.num_blocks = 3;
    transfer.num_tensors = transfer.tensors = kTensors, transfer.pieces = 1, transfer.ids_per_block = kIdsPerBlock;
    transfer.starts = starts, transfer.block_starts = block_starts.data;
    check(ibp_cuda_plan_pages(&transfer, nullptr, ids.data, addresses.data, nullptr) == IBP_OK, "a plan");
    for (size_t i = 0; i < ids.memory.num_bytes / sizeof(int64_t); i++)
        check(ids.data[i] >= -1 && ids.data[i] < kPages * kTensors * kIdsPerBlock, "an id of no page");
}

} // namespace

int main()
{
    if (!CAN_STEP) {
        puts("this processor cannot step");
        return 0;
    }
    int64_t ids[kIds];
    int32_t short_ids[kIds];
    uint16_t lengths[kRows];
    for (int64_t k = 0; k < kIds; k++) ids[k] = short_ids[k] = static_cast<int32_t>(k * 7 % 50);
    for (size_t i = 0; i < sizeof slots; i++) slots[i] = static_cast<uint8_t>(i * 37 + i / 64);
    for (int64_t r = 0; r < kRows; r++) lengths[r] = all_lengths[r] = static_cast<uint16_t>(8 + r);
    const uint64_t entries[kAsked] = {};
    const int64_t pages[2 * kPages] = {0, 3, 1, 2, 2, 0, 1, 2};
    check_array("ids are not looked at", partition<int64_t>, ids);
    check_array("short ids are not looked at", partition<int32_t>, short_ids);
    check_array("ids to claim are not looked at", claim_ids, asked_rows);
    check_array("lengths are not looked at", claim_lengths, lengths);
    check_array("entries are not looked at", claim_entries, entries);
    check_array("pages are not looked at", plan, pages);
    printf("%ld wrong\n", num_wrong);
    return num_wrong != 0;
}
