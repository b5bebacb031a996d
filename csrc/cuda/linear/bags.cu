// bags.cu - ibp_cuda_sum_bags: checks the arguments and chooses the decoder.
#include "bags.cuh"

#include "../cuda_checks.h"
#include "../decode/decode_dense.cuh"
#include "../decode/decode_fast.cuh"
#include "../decode/decode_pairs.cuh"
#include "../decode/decode_raw.cuh"
#include "../kinds.h"

namespace ibp {

template <class G> using Pairs2 = PairsDecoder<uint16_t, G, false>;
template <class G> using Pairs4 = PairsDecoder<uint32_t, G, false>;
template <class G> using Fast2 = FastDecoder<uint16_t, G>;
template <class G> using Fast4 = FastDecoder<uint32_t, G>;
template <class G> using Dense2 = DenseDecoder<uint16_t, G, true>;
template <class G> using Dense4 = DenseDecoder<uint32_t, G, true>;

// Launches the kernel with the group that suits the length of rows. Any: the decoder of rows that are too long for
// Decoder.
template <template <class> class Decoder, template <class> class Any> static ibp_status by_length(const BagsCall &call)
{
    const uint32_t row_bytes = call.table.codebook.row_bytes;
    if (row_bytes <= kShortRowBytes) return launch_bags<ShortRows<Decoder>, Pool>(call);
    if constexpr (!std::is_same<Decoder<Group<kWarp, 1>>, Any<Group<kWarp, 1>>>::value)
        if (row_bytes <= Pool::kMostRowBytes) return launch_bags<WarpRows<Decoder>, Pool>(call);
    return launch_bags<LongRows<Any>, LongPool>(call);
}

static ibp_status sum(const BagsCall &call)
{
    const ibp_codebook &cb = call.table.codebook;
    if (cb.scheme == IBP_SCHEME_RAW) return by_length<RawDecoder, RawDecoder>(call);
    if (cb.scheme != IBP_SCHEME_PLANES || cb.planes.listed || !knows_fields(cb, kDenseFields))
        return IBP_INVALID_ARGUMENT;
    const bool is_two = cb.planes.element_bytes == 2u;
    if (!is_two && cb.planes.element_bytes != 4u) return IBP_INVALID_ARGUMENT;
    if (is_fast(cb)) return is_two ? by_length<Fast2, Dense2>(call) : by_length<Fast4, Dense4>(call);
    if (decodes_pairs(cb.planes) && !cb.planes.per_column)
        return is_two ? by_length<Pairs2, Dense2>(call) : by_length<Pairs4, Dense4>(call);
    return is_two ? by_length<Dense2, Dense2>(call) : by_length<Dense4, Dense4>(call);
}

static bool are_bags(const ibp_table &table, const ibp_ids &ids, const ibp_bags &bags)
{
    const bool has_mode = bags.mode == IBP_BAG_SUM || bags.mode == IBP_BAG_MEAN || bags.mode == IBP_BAG_MAX,
               has_kind = bags.kind == IBP_FLOAT32 || bags.kind == IBP_FLOAT16 || bags.kind == IBP_BFLOAT16;
    if (!has_mode || !has_kind || bags.num_bags < 0 || bags.num_bags > UINT32_MAX / 2) return false;
    const uint32_t row_bytes = table.codebook.row_bytes;
    if (table.item_bytes != row_bytes || row_bytes > LongPool::kMostRowBytes) return false;
    if (row_bytes % (bags.kind == IBP_FLOAT32 ? 4u : 2u) != 0u) return false;
    if (bags.weights != nullptr && bags.mode != IBP_BAG_SUM) return false;
    if (bags.offsets != nullptr) return bags.offset_bytes == 4u || bags.offset_bytes == 8u;
    return bags.bag_size >= 0 && (bags.num_bags == 0 || bags.bag_size <= ids.count / bags.num_bags);
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_sum_bags(const ibp_table *table, const ibp_ids *ids, const ibp_cache *cache,
                                        const ibp_bags *bags, uint8_t *out, ibp_fault *fault, int max_sms,
                                        ibp_stream stream)
{
    if (!ibp::is_table(table) || !ibp::are_ids(ids) || ids->positions != nullptr || bags == nullptr ||
        fault == nullptr || max_sms < 0 || ids->count >= ibp::kMostJobs || !ibp::are_bags(*table, *ids, *bags))
        return IBP_INVALID_ARGUMENT;
    if (bags->num_bags == 0) return IBP_OK;
    if (out == nullptr) return IBP_INVALID_ARGUMENT;
    ibp_ids items = *ids;
    // Positions have a stride of 0, because a group decodes all its rows to the same memory.
    items.num_dims = 1, items.sizes[0] = ids->count, items.strides[0] = 0;
    ibp::Request request = ibp::describe_items(*table, items);
    if (cache != nullptr && !ibp::use_cache(cache, &request)) return IBP_INVALID_ARGUMENT;
    return ibp::sum({*table, request, *bags, out, fault, max_sms, stream});
}
