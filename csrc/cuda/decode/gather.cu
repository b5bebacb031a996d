// gather.cu - the entry points of gathers: ibp_cuda_gather_items, ibp_cuda_decode_bytes and others. They check the
// arguments, describe the jobs in a Request, and choose the decoder (the paper's sections 4.3 and 4.4). The kernels are
// in gather.cuh.
#include "../../internal/ibp_gathers.h"
#include "../../core/ids.h"
#include "../cuda_checks.h"
#include "decode_request.h"
#include "../group.cuh"
#include "../kinds.h"
#include "../launch.cuh"

#include <algorithm>

namespace ibp {

// Returns the largest number of rows that an item can touch.
static int64_t rows_an_item(int64_t item_bytes, int64_t row_bytes)
{
    if (row_bytes % item_bytes == 0) return 1;
    if (item_bytes % row_bytes == 0) return item_bytes / row_bytes;
    return (item_bytes - 2) / row_bytes + 2;
}

// Fills in the fields of a request that describe its regular items, their stored rows, and the output.
static void describe_rows(const ibp_table &table, uint8_t *out, Request *request)
{
    const int64_t row_bytes = table.codebook.row_bytes;
    request->packed = table.slot_bytes == 0u;
    request->most_stored =
        request->packed ? table.codebook.row_bytes : std::min(table.slot_bytes, table.codebook.row_bytes);
    request->rows = request->packed ? table.overflow : table.slots;
    request->rows_bytes = request->packed ? table.overflow_bytes : table.slots_bytes;
    if (request->staged) request->rows = request->stage, request->rows_bytes = request->stage_bytes;
    const int64_t pitch = row_bytes * request->rows_per_item;
    // is_even: the addresses to which items go differ from the first item's address by multiples of 16 bytes. If this
    // is not known, raw rows are not copied in vectors.
    bool is_even = pitch % 16 == 0 && request->ids.addresses == nullptr;
    for (uint32_t d = 0; d < request->ids.num_dims; d++) is_even = is_even && request->ids.strides[d] % 16 == 0;
    if (request->by_id) {
        request->out_items = static_cast<uint32_t>(std::min<int64_t>(ibp_num_positions(&request->ids), UINT32_MAX));
        request->num_regular = request->whole_rows ? static_cast<uint64_t>(table.num_items) : 0u;
        request->dst = out;
    } else {
        request->out_items = request->num_jobs;
        request->first_regular = request->start % row_bytes != 0;
        request->num_regular = static_cast<uint64_t>(
            std::max<int64_t>(0, request->end / row_bytes - request->first_row - request->first_regular));
        request->dst = out + (request->first_row * row_bytes - request->start);
    }
    if (request->packed && !table.bases) request->num_regular = 0;
    request->copies_vectors = reinterpret_cast<uintptr_t>(request->dst) % 16 == 0 && is_even && row_bytes % 16 == 0;
}

// Returns true if a table's slots are in device memory, its overflow is in host memory, and the overflow is so large
// that warps wait for it.
static bool spills_far(const ibp_table &table)
{
    constexpr int64_t kShare = 100; // overflow matters if its size is more than 1 / kShare of the slots' size
    return table.slot_bytes != 0u && table.overflow_bytes > table.slots_bytes / kShare &&
           is_host_memory(table.overflow) && !is_host_memory(table.slots);
}

// ---- the decoders ----

static bool is_of_pairs(const ibp_codebook &cb) { return is_dense(cb) && decodes_pairs(cb.planes); }
static bool is_of_columns(const ibp_codebook &cb) { return is_of_pairs(cb) && cb.planes.per_column; }
// Returns whether decode_triples.cu decodes a codebook's rows. Digits of plane 0 must have three bits, as they often do
// for integers, and digits of all other planes two bits. Elements must be bytes, and all columns must be live and share
// their entries. Rows must be short enough for a warp or a part of a warp.
static bool is_of_triples(const ibp_codebook &cb)
{
    const ibp_planes &planes = cb.planes;
    return is_dense(cb) && are_pairs(planes, 3) && planes.element_bytes == 1 && planes.num_constant == 0u &&
           !planes.per_column && cb.row_bytes <= kWarpRowBytes;
}

// Launch gathers with the decoders that are compiled for each type of element.
static ibp_status gather_of_pairs(const Gather &gather)
{
    return by_element<1, 4>(gather.table.codebook, [&](auto zero) { return gather_pairs<decltype(zero)>(gather); });
}
static ibp_status gather_of_columns(const Gather &gather)
{
    return by_element<2, 4>(gather.table.codebook, [&](auto zero) { return gather_columns<decltype(zero)>(gather); });
}
static ibp_status gather_any_dense(const Gather &gather)
{
    return by_element(gather.table.codebook, [&](auto zero) { return gather_dense<decltype(zero)>(gather); });
}

// The decoders, in order of preference. A codebook is decoded by the first decoder of its scheme for which
// takes(codebook) is true and `known` has all PlanesFields that the codebook uses.
static const struct {
    ibp_scheme scheme;
    bool (*takes)(const ibp_codebook &codebook);
    uint32_t known; // flags of PlanesField
    ibp_status (*launch)(const Gather &gather);
} kDecoders[] = {
    {IBP_SCHEME_RAW, is_any, 0, gather_raw},
    {IBP_SCHEME_IBP, is_any, 0, gather_masks},
    {IBP_SCHEME_PLANES, is_listed, kListedFields, gather_listed},
    {IBP_SCHEME_PLANES, is_fast, kDenseFields, gather_fast},
    {IBP_SCHEME_PLANES, is_of_columns, kDenseFields, gather_of_columns},
    {IBP_SCHEME_PLANES, is_of_pairs, kDenseFields, gather_of_pairs},
    {IBP_SCHEME_PLANES, is_of_triples, kDenseFields, gather_triples},
    {IBP_SCHEME_PLANES, is_dense, kDenseFields, gather_any_dense},
};

static ibp_status launch(const Gather &gather)
{
    const ibp_codebook &cb = gather.table.codebook;
    for (const auto &decoder : kDecoders)
        if (decoder.scheme == cb.scheme && decoder.takes(cb) && knows_fields(cb, decoder.known))
            return decoder.launch(gather);
    return IBP_INVALID_ARGUMENT;
}

static Gather described(const ibp_table *table, const Request &request, uint8_t *out, ibp_fault *fault, int max_sms,
                        ibp_stream stream)
{
    Gather gather{{*table, request, out, fault}, max_sms, stream, nullptr};
    describe_rows(*table, out, &gather.request);
    gather.request.uneven = spills_far(*table);
    return gather;
}

void share_blocks(const Gather *const *gathers, uint32_t num_gathers, uint32_t num_blocks, Parts *parts)
{
    const auto work_of = [](const Gather *gather) {
        return int64_t{gather->request.num_jobs} * gather->table.codebook.row_bytes;
    };
    int64_t work = 0, so_far = 0;
    for (uint32_t k = 0; k < num_gathers; k++) work += work_of(gathers[k]);
    for (uint32_t k = 0, end = 0; k < num_gathers; parts->ends[k++] = end) {
        parts->parts[k] = *gathers[k];
        so_far += work_of(gathers[k]);
        const auto share = static_cast<uint32_t>((num_blocks * so_far + work / 2) / work);
        end = std::min(std::max(share, end + 1u), num_blocks - (num_gathers - 1u - k));
    }
}

// Launches at most kMostParts requests. Requests that can use the same kernel are launched together.
static ibp_status launch_together(Gather *gathers, uint32_t num_gathers)
{
    LaunchParts launches[kMostParts]{};
    ibp_status status = IBP_OK;
    for (uint32_t k = 0; k < num_gathers && status == IBP_OK; k++) {
        gathers[k].together = num_gathers > 1u ? &launches[k] : nullptr;
        status = launch(gathers[k]);
    }
    for (uint32_t k = 0; k < num_gathers && status == IBP_OK; k++) {
        const LaunchParts together = launches[k];
        const Gather *alike[kMostParts];
        uint32_t num_alike = 0;
        if (together == nullptr) continue;
        for (uint32_t j = k; j < num_gathers; j++)
            if (launches[j] == together) alike[num_alike++] = &gathers[j], launches[j] = nullptr;
        gathers[k].together = nullptr;
        status = num_alike > 1u ? together(alike, num_alike) : launch(gathers[k]);
    }
    return status;
}

static void ask_for(const ibp_table &table, const ibp_ids &ids, Request *request)
{
    request->ids = ids;
    request->rows_per_item = rows_an_item(table.item_bytes, table.codebook.row_bytes);
    request->num_jobs = static_cast<uint32_t>(ids.count * request->rows_per_item);
    request->by_id = true;
    request->whole_rows = table.item_bytes % table.codebook.row_bytes == 0;
}

// Checks the arguments of a call that gathers items, and describes its jobs in the request. The request has no jobs if
// there is nothing to do.
static ibp_status ask_for_items(const ibp_table *table, const ibp_ids *ids, const uint8_t *out, const ibp_fault *fault,
                                int max_sms, Request *request)
{
    if (!is_table(table) || !are_placed_ids(ids) || fault == nullptr || max_sms < 0) return IBP_INVALID_ARGUMENT;
    if (ids->count == 0 || table->item_bytes == 0) return IBP_OK;
    if ((out == nullptr && ids->addresses == nullptr) || (ids->positions != nullptr && ids->out_items < 0))
        return IBP_INVALID_ARGUMENT;
    if (ids->count > kMostJobs / rows_an_item(table->item_bytes, table->codebook.row_bytes))
        return IBP_INVALID_ARGUMENT;
    ask_for(*table, *ids, request);
    return IBP_OK;
}

// Does what ask_for_items does, for a call that decodes the bytes [start, end).
static ibp_status ask_for_bytes(const ibp_table *table, int64_t start, int64_t end, const uint8_t *out,
                                const ibp_fault *fault, int max_sms, Request *request)
{
    if (!is_table(table) || fault == nullptr || max_sms < 0) return IBP_INVALID_ARGUMENT;
    if (start < 0 || start > end || end > ibp_bytes_of_table(table)) return IBP_INVALID_ARGUMENT;
    if (start == end) return IBP_OK;
    if (out == nullptr) return IBP_INVALID_ARGUMENT;
    const int64_t row_bytes = table->codebook.row_bytes;
    request->start = start, request->end = end;
    request->rows_per_item = 1;
    request->first_row = start / row_bytes;
    const int64_t num_rows = (end - 1) / row_bytes - request->first_row + 1;
    if (num_rows > kMostJobs) return IBP_INVALID_ARGUMENT;
    request->num_jobs = static_cast<uint32_t>(num_rows);
    return IBP_OK;
}

bool use_cache(const ibp_cache *cache, Request *request)
{
    if (cache == nullptr || cache->num_slabs > IBP_MAX_SLABS || !request->whole_rows) return false;
    if (!has_bytes(cache->entries, request->num_jobs)) return false;
    request->cache.entries = cache->entries;
    request->cache.num_slabs = cache->num_slabs;
    for (uint32_t s = 0; s < cache->num_slabs; s++) {
        const ibp_slab &slab = request->cache.slabs[s] = cache->slabs[s];
        if (slab.num_bytes < 0 || !has_bytes(slab.bytes, slab.num_bytes)) return false;
    }
    return true;
}

Request describe_items(const ibp_table &table, const ibp_ids &ids)
{
    Request request{};
    ask_for(table, ids, &request);
    describe_rows(table, nullptr, &request);
    return request;
}

ibp_status gather_staged(const ibp_table *table, const ibp_ids *ids, const uint8_t *stage, int64_t first_position,
                         uint8_t *out, ibp_fault *fault, int max_sms, ibp_stream stream)
{
    Request request{};
    const ibp_status status = ask_for_items(table, ids, out, fault, max_sms, &request);
    if (status != IBP_OK || request.num_jobs == 0) return status;
    if (!request.whole_rows || table->slot_bytes == 0 || table->slots_start != 0 || stage == nullptr)
        return IBP_INVALID_ARGUMENT;
    request.staged = true;
    request.stage = stage;
    request.stage_bytes = int64_t{request.num_jobs} * table->slot_bytes;
    request.first_position = first_position;
    return launch(described(table, request, out, fault, max_sms, stream));
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_gather_items(const ibp_table *table, const ibp_ids *ids, uint8_t *out, ibp_fault *fault,
                                            int max_sms, ibp_stream stream)
{
    ibp::Request request{};
    const ibp_status status = ibp::ask_for_items(table, ids, out, fault, max_sms, &request);
    if (status != IBP_OK || request.num_jobs == 0) return status;
    return ibp::launch(ibp::described(table, request, out, fault, max_sms, stream));
}

extern "C" ibp_status ibp_cuda_gather_cached(const ibp_table *table, const ibp_ids *ids, const ibp_cache *cache,
                                             uint8_t *out, ibp_fault *fault, int max_sms, ibp_stream stream)
{
    ibp::Request request{};
    const ibp_status status = ibp::ask_for_items(table, ids, out, fault, max_sms, &request);
    if (status != IBP_OK || request.num_jobs == 0) return status;
    if (!ibp::use_cache(cache, &request)) return IBP_INVALID_ARGUMENT;
    return ibp::launch(ibp::described(table, request, out, fault, max_sms, stream));
}

extern "C" ibp_status ibp_cuda_decode_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out,
                                            ibp_fault *fault, int max_sms, ibp_stream stream)
{
    ibp::Request request{};
    const ibp_status status = ibp::ask_for_bytes(table, start, end, out, fault, max_sms, &request);
    if (status != IBP_OK || request.num_jobs == 0) return status;
    return ibp::launch(ibp::described(table, request, out, fault, max_sms, stream));
}

extern "C" ibp_status ibp_cuda_gather_tables(const ibp_gather *gathers, int64_t num_gathers, int max_sms,
                                             ibp_stream stream)
{
    using namespace ibp;
    if (num_gathers < 0 || max_sms < 0 || !has_bytes(gathers, num_gathers)) return IBP_INVALID_ARGUMENT;
    const uint32_t most = max_sms > 0 ? std::min(static_cast<uint32_t>(max_sms), kMostParts) : kMostParts;
    Gather waiting[kMostParts];
    uint32_t num_waiting = 0;
    for (const ibp_gather *g = gathers; g != gathers + num_gathers; g++) {
        Request request{};
        const int64_t num_bytes = is_table(g->table) ? ibp_bytes_of_table(g->table) : 0;
        ibp_status status = g->ids ? ask_for_items(g->table, g->ids, g->out, g->fault, max_sms, &request)
                                   : ask_for_bytes(g->table, 0, num_bytes, g->out, g->fault, max_sms, &request);
        if (status == IBP_OK && request.num_jobs != 0u)
            waiting[num_waiting++] = described(g->table, request, g->out, g->fault, max_sms, stream);
        if (status == IBP_OK && num_waiting == most) status = launch_together(waiting, num_waiting), num_waiting = 0;
        if (status != IBP_OK) return status;
    }
    return launch_together(waiting, num_waiting);
}
