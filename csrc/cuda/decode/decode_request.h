// decode_request.h - what a gather is asked for, as the kernels of every decoder get it, and the list of decoders.
#ifndef IBP_DECODE_REQUEST_H
#define IBP_DECODE_REQUEST_H

#include "../../internal/ibp_cache.h"
#include "ibp_cuda.h"

namespace ibp {

constexpr int64_t kMostJobs = 1ll << 31; // of a launch: job numbers have 32 bits

// The items at ids, or, where there are none, the rows of the bytes [start, end): an "item" each, in order.
struct Request {
    ibp_ids ids;
    int64_t start, end;
    int64_t rows_per_item, first_row; // of the bytes
    uint32_t num_jobs;
    bool by_id, whole_rows; // whole_rows: items begin and end with rows
    // Regular are the rows of the num_regular items from first_regular on: whole ones, of row_bytes bytes, that
    // begin in `rows`.
    int64_t first_regular;
    uint64_t num_regular;
    uint32_t out_items, most_stored; // most_stored: bytes of a row as stored that lie in one piece
    uint8_t *dst;                    // where the row of item 0 would go
    const uint8_t *rows;             // slots or overflow
    int64_t rows_bytes;
    const uint8_t *stage;   // where there is one: slots of the jobs' rows, one after the other,
    int64_t stage_bytes;    // which `rows` then are
    int64_t first_position; // of a larger request, for faults
    bool staged;
    bool packed, copies_vectors; // copies_vectors: raw rows at multiples of 16 bytes can be
    bool uneven;                 // rows leave their slots, which the GPU has, for memory that it has not
    ibp_cache cache;             // where there are entries, one a job: rows that are present come from their slabs
};

// A request as a kernel gets it. out and fault as in ibp_cuda_gather_items.
struct Part {
    ibp_table table;
    Request request;
    uint8_t *out;
    ibp_fault *fault;
};
constexpr uint32_t kMostParts = 32; // of a launch

// Requests of one launch. Each gets blocks of its own, by the bytes of its rows.
struct Parts {
    Part parts[kMostParts];
    uint32_t ends[kMostParts]; // of their blocks
};
static_assert(sizeof(Parts) <= 32760u, "parameters of a kernel");

// A request as it is launched: now, or, where `together` is not NULL and its decoder can, with others by the function
// that is put there.
struct Gather;
using LaunchParts = ibp_status (*)(const Gather *const *gathers, uint32_t num_gathers);
struct Gather : Part {
    int max_sms;
    ibp_stream stream;
    LaunchParts *together;
};

// Shares blocks, a request one at least, among requests that are launched together.
void share_blocks(const Gather *const *gathers, uint32_t num_gathers, uint32_t num_blocks, Parts *parts);

// A request for the items at ids, which are at most kMostJobs rows, for a kernel of its own output: positions are
// counted from NULL on. table and ids: as in ibp_cuda_gather_items, checked.
Request describe_items(const ibp_table &table, const ibp_ids &ids);

// As ibp_cuda_gather_items, of items of whole rows whose slots have been copied to stage, in the order of ids. The
// table's own bytes are read for what is not in slots. first_position: number of the first id among those of a larger
// call, for faults.
ibp_status gather_staged(const ibp_table *table, const ibp_ids *ids, const uint8_t *stage, int64_t first_position,
                         uint8_t *out, ibp_fault *fault, int max_sms, ibp_stream stream);

// Whether a cache can be gathered from, and has entries for all jobs where it needs them. Slabs past the last one
// become empty ones in the request.
bool use_cache(const ibp_cache *cache, Request *request);

// The decoders, each in a translation unit of its own under decode/. gather.cu says which codebooks each one takes.
ibp_status gather_raw(const Gather &gather);
ibp_status gather_masks(const Gather &gather);
ibp_status gather_fast(const Gather &gather);
ibp_status gather_pairs(const Gather &gather);
ibp_status gather_triples(const Gather &gather);
ibp_status gather_dense(const Gather &gather);
ibp_status gather_listed(const Gather &gather);

} // namespace ibp

#endif
