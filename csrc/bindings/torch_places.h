// torch_places.h - how rows that are coded into a place are given to an operation (encode_into of ibp/_common/ops.py),
// as the structs of ibp.h.
#ifndef IBP_TORCH_PLACES_H
#define IBP_TORCH_PLACES_H

#include "torch_tables.h"

namespace ibp_torch {

// A dimension in which something is counted: how many there are, and how many bytes they are apart.
struct Dimension {
    int64_t size, stride;
};

// The dimensions of a tensor in bytes, from the innermost on; dimensions that continue each other are merged. The first
// one is the bytes that lie one after the other.
inline std::vector<Dimension> dimensions_of(const Tensor &x)
{
    const auto element_bytes = static_cast<int64_t>(x.element_size());
    std::vector<Dimension> dimensions{{element_bytes, 1}};
    for (int64_t d = x.dim(); d-- > 0;) {
        const int64_t size = x.size(d), stride = x.stride(d) * element_bytes;
        Dimension &inner = dimensions.back();
        if (size == 1) continue;
        if (stride == inner.size * inner.stride)
            inner.size *= size;
        else
            dimensions.push_back({size, stride});
    }
    return dimensions;
}

// The elements of a tensor in its own order, as rows. A contiguous one may end with a short row.
inline ibp_row_source rows_of(const Tensor &x, int64_t row_bytes)
{
    ibp_row_source source{};
    const Memory memory = extent_of(x);
    source.data = memory.data;
    if (memory.data == nullptr) return source;
    std::vector<Dimension> dimensions = dimensions_of(x);
    const int64_t run = dimensions[0].size;
    if (dimensions.size() == 1) {
        source.num_rows = divide_up(run, row_bytes);
        source.last_row_bytes = static_cast<uint32_t>(run - (source.num_rows - 1) * row_bytes);
        return source;
    }
    require(run % row_bytes == 0, "x has runs of ", run, " bytes, which are no whole rows of ", row_bytes);
    dimensions[0] = {run / row_bytes, row_bytes};
    if (dimensions[0].size == 1) dimensions.erase(dimensions.begin());
    require(dimensions.size() <= IBP_MAX_SOURCE_DIMS, "rows of x lie in ", static_cast<int64_t>(dimensions.size()),
            " dimensions, more than 4");
    source.num_rows = 1;
    source.num_dims = static_cast<uint32_t>(dimensions.size());
    for (uint32_t d = 0; d < source.num_dims; d++) { // outermost first there
        source.sizes[source.num_dims - 1 - d] = dimensions[d].size;
        source.strides[source.num_dims - 1 - d] = dimensions[d].stride;
        source.num_rows *= dimensions[d].size; // no more than elements
    }
    return source;
}

} // namespace ibp_torch

#endif
