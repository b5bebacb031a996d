// torch_gather.h - items gathered from a table, and from a cache of its rows, on the device of a call.
#ifndef IBP_TORCH_GATHER_H
#define IBP_TORCH_GATHER_H

#include "torch_ranges.h"
#include "torch_tables.h"

namespace ibp_torch {

// cache: nullptr for all rows from the table. out: what positions count from; not read where items have addresses.
inline void gather(const Device &device, const ibp_table &table, const ibp_ids &items, const ibp_cache *cache,
                   uint8_t *out, const Tensor &fault, int max_sms, const char *name)
{
    ibp_fault *const first_fault = fault_of(fault);
    if (device.is_cuda()) {
        const ibp_stream stream = device.stream();
        check(cache ? ibp_cuda_gather_cached(&table, &items, cache, out, first_fault, max_sms, stream)
                    : ibp_cuda_gather_items(&table, &items, out, first_fault, max_sms, stream),
              name);
        return;
    }
    const size_t scratch_bytes = ibp_scratch_bytes(table.codebook.row_bytes);
    over_ranges(items.count, std::max<int64_t>(table.item_bytes, table.codebook.row_bytes), scratch_bytes, first_fault,
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                    return cache ? ibp_gather_cached(&table, &items, cache, first, last, out, scratch, scratch_bytes,
                                                     mine)
                                 : ibp_gather_items(&table, &items, first, last, out, scratch, scratch_bytes, mine);
                });
}

} // namespace ibp_torch

#endif
