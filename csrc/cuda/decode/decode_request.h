// decode_request.h - the request of a gather, which the kernel of every decoder receives, and the functions that launch
// the decoders.
#ifndef IBP_DECODE_REQUEST_H
#define IBP_DECODE_REQUEST_H

#include "../../internal/ibp_cache.h"
#include "ibp_cuda.h"

namespace ibp {

constexpr int64_t kMostJobs = 1ll << 31; // largest number of jobs in one launch; a job's index has 32 bits

// A request for items by their ids or, if by_id is false, for the bytes [start, end) of a table. In the second case
// each row that overlaps these bytes counts as one item. A job is one row of one item.
struct Request {
    ibp_ids ids;
    int64_t start, end;
    int64_t rows_per_item, first_row; // first_row: the row that holds byte `start`
    uint32_t num_jobs;
    // whole_rows: every item begins and ends where a row does.
    bool by_id, whole_rows;
    // Only the rows of items first_regular to first_regular + num_regular - 1 can be regular (fetch.cuh). Each of these
    // rows has row_bytes bytes, and its stored bytes begin in `rows`.
    int64_t first_regular;
    uint64_t num_regular;
    // out_items: number of positions in the output. most_stored: the largest number of bytes that a stored row can have
    // in its slot, which is min(slot_bytes, row_bytes); row_bytes if the table is packed.
    uint32_t out_items, most_stored;
    // Address of position 0 of the output or, if by_id is false, the address to which byte 0 of row first_row would go.
    uint8_t *dst;
    const uint8_t *rows; // the table's slots, or its overflow if it is packed
    int64_t rows_bytes;
    // If `staged` is set, `stage` holds a copy of the slots of the jobs' rows, one after the other, and `rows` is
    // `stage`.
    const uint8_t *stage;
    int64_t stage_bytes;
    // Added to the positions that faults report; not 0 if this request is a part of a larger one.
    int64_t first_position;
    bool staged;
    // packed: the table has no slots. copies_vectors: all rows go to addresses that are multiples of 16, so raw rows
    // that are stored at multiples of 16 bytes are copied in vectors of 16 bytes.
    bool packed, copies_vectors;
    // uneven: the slots are in device memory, but overflow is in host memory, so some rows take much longer than
    // others.
    bool uneven;
    // If cache.entries is not NULL, it has an entry for every job, and the rows that are in the cache are read from
    // their slabs.
    ibp_cache cache;
};

// A request as a kernel receives it. `out` and `fault` are as in ibp_cuda_gather_items.
struct Part {
    ibp_table table;
    Request request;
    uint8_t *out;
    ibp_fault *fault;
};
constexpr uint32_t kMostParts = 32; // largest number of requests in one launch

// The requests of one launch. Each request has its own blocks. The number of its blocks is about proportional to the
// total size of its rows.
struct Parts {
    Part parts[kMostParts];
    uint32_t ends[kMostParts]; // ends[k]: index of the last block of request k, plus 1
};
static_assert(sizeof(Parts) <= 32760u, "the parameters of a kernel must hold Parts");

// A request to launch. If `together` is not NULL and the decoder can take several requests in one launch, nothing is
// launched: `*together` receives the function that launches several requests at once.
struct Gather;
using LaunchParts = ibp_status (*)(const Gather *const *gathers, uint32_t num_gathers);
struct Gather : Part {
    int max_sms;
    ibp_stream stream;
    LaunchParts *together;
};

// Divides num_blocks blocks among requests that are launched together, in proportion to the sizes of their rows. Every
// request gets at least one block.
void share_blocks(const Gather *const *gathers, uint32_t num_gathers, uint32_t num_blocks, Parts *parts);

// Returns a request for the items at ids, for a kernel that does not write these items to an output. In the request the
// output begins at NULL, so the address of a position is its offset. Together the items must have at most kMostJobs
// rows. table, ids: as in ibp_cuda_gather_items; the caller must have checked them.
Request describe_items(const ibp_table &table, const ibp_ids &ids);

// Does what ibp_cuda_gather_items does, for items of whole rows whose slots have been copied to `stage` in the order of
// ids. The slots of regular rows are read from `stage`, and everything else from the table's own memory.
// first_position: the position that a fault reports for the first id; not 0 if these ids are a part of a larger call.
ibp_status gather_staged(const ibp_table *table, const ibp_ids *ids, const uint8_t *stage, int64_t first_position,
                         uint8_t *out, ibp_fault *fault, int max_sms, ibp_stream stream);

// Stores a cache in the request; slabs past the cache's last one are left empty there. Returns false if rows cannot be
// gathered from the cache, because its fields are invalid, it has no entries for the jobs, or items do not consist of
// complete rows.
bool use_cache(const ibp_cache *cache, Request *request);

// Each of these functions launches a gather with one decoder. Every decoder has its own .cu file in this folder.
// gather.cu says which codebooks each decoder takes. T: the type of an element, as in by_element (kinds.h).
ibp_status gather_raw(const Gather &gather);
ibp_status gather_masks(const Gather &gather);
ibp_status gather_fast(const Gather &gather);
template <typename T> ibp_status gather_pairs(const Gather &gather);
template <typename T> ibp_status gather_columns(const Gather &gather);
ibp_status gather_triples(const Gather &gather);
template <typename T> ibp_status gather_dense(const Gather &gather);
ibp_status gather_listed(const Gather &gather);

} // namespace ibp

#endif
