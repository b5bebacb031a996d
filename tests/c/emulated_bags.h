/* emulated_bags.h - bags of a table's rows, with and without a cache: the kernels of cuda/linear/bags.cu against one
 * float after the other. A part of emulated_tables.cpp, behind emulated_cache.h. */

/* Bags of ids, and what is asked for them. */
struct Bags {
    Array<int64_t> ids, offsets;
    Array<int32_t> short_offsets;
    Array<uint8_t> weights;
    ibp_bags bags = {};
    uint32_t element_bytes;

    Bags(const ibp_table &t, bool bad_ids)
    {
        const bool is_even = chance(20);
        const size_t num_bags = 1 + below(chance(30) ? 120 : 20), most = pick({size_t{1}, size_t{4}, size_t{40}});
        std::vector<int64_t> begins;
        size_t count = 0;
        for (size_t b = 0; b < num_bags; b++) {
            begins.push_back(static_cast<int64_t>(count));
            count += is_even ? 3 : chance(30) ? 0 : below(most + 1);
        }
        ids = Array<int64_t>(count);
        for (size_t k = 0; k < count; k++) {
            ids.data[k] = static_cast<int64_t>(below(static_cast<uint64_t>(t.num_items)));
            if (bad_ids && chance(5)) ids.data[k] = pick({int64_t{-1}, t.num_items, INT64_MIN, INT64_MAX});
        }
        bags.num_bags = static_cast<int64_t>(num_bags), bags.bag_size = is_even ? 3 : 0;
        offsets = Array<int64_t>(num_bags), short_offsets = Array<int32_t>(num_bags);
        for (size_t b = 0; b < num_bags; b++)
            offsets.data[b] = begins[b], short_offsets.data[b] = static_cast<int32_t>(begins[b]);
        bags.offset_bytes = chance(50) ? 4 : 8;
        if (bags.offset_bytes == 4) bags.offsets = short_offsets.data;
        if (bags.offset_bytes == 8) bags.offsets = offsets.data;
        if (is_even) bags.offsets = nullptr;
        bags.mode = pick({IBP_BAG_SUM, IBP_BAG_SUM, IBP_BAG_MEAN, IBP_BAG_MAX});
        bags.kind = pick({IBP_FLOAT32, IBP_FLOAT16, IBP_BFLOAT16});
        if (t.codebook.row_bytes % 4 != 0 && bags.kind == IBP_FLOAT32) bags.kind = IBP_FLOAT16;
        element_bytes = bags.kind == IBP_FLOAT32 ? 4 : 2;
        bags.padding_id = chance(50) ? -1 : static_cast<int64_t>(below(static_cast<uint64_t>(t.num_items)));
        if (bags.mode != IBP_BAG_SUM || chance(50)) return;
        weights = Array<uint8_t>(count * element_bytes);
        for (size_t i = 0; i < weights.size; i++) weights.data[i] = static_cast<uint8_t>(generator());
        bags.weights = weights.data;
    }

    float to_float(const uint8_t *bytes) const
    {
        uint32_t bits = 0;
        memcpy(&bits, bytes, element_bytes);
        if (bags.kind == IBP_FLOAT16) return ibp::float_of_half(bits);
        return ibp::float_of_bits(bags.kind == IBP_BFLOAT16 ? bits << 16 : bits);
    }
    size_t end_of(size_t bag) const
    {
        if (static_cast<int64_t>(bag) + 1 == bags.num_bags) return ids.size;
        return bags.offsets ? static_cast<size_t>(offsets.data[bag + 1]) : (bag + 1) * 3;
    }

    /* One element of a bag, of rows one after the other. */
    void reduce(const uint8_t *rows, size_t pitch, size_t bag, uint8_t *result) const
    {
        const uint8_t *greatest = nullptr;
        float sum = 0;
        uint32_t count = 0;
        for (size_t k = bag == 0 ? 0 : end_of(bag - 1); k < end_of(bag); k++) {
            const bool is_padding = ids.data[k] == bags.padding_id && bags.padding_id >= 0;
            const uint8_t *const element = rows + k * pitch;
            const float weight = bags.weights ? to_float(weights.data + k * element_bytes) : 1.0f;
            count += !is_padding;
            if (bags.mode != IBP_BAG_MAX)
                sum = std::fma(weight, is_padding ? 0.0f : to_float(element), sum);
            else if (!is_padding && (!greatest || to_float(element) > to_float(greatest)))
                greatest = element;
        }
        if (bags.mode == IBP_BAG_MEAN && count != 0) sum /= static_cast<float>(count);
        uint32_t bits = bags.kind == IBP_FLOAT32   ? ibp::bits_of_float(sum)
                        : bags.kind == IBP_FLOAT16 ? ibp::half_of_float(sum)
                                                   : ibp::bfloat16_of_float(sum);
        if (bags.mode == IBP_BAG_MAX) bits = 0;
        if (greatest) memcpy(&bits, greatest, element_bytes);
        memcpy(result, &bits, element_bytes);
    }
};

bool takes_bags(const ibp_table &t)
{
    const ibp_codebook &cb = t.codebook;
    const bool decodes =
        cb.scheme == IBP_SCHEME_RAW || (cb.scheme == IBP_SCHEME_PLANES && !cb.planes.listed &&
                                        (cb.planes.element_bytes == 2 || cb.planes.element_bytes == 4));
    return decodes && t.item_bytes == cb.row_bytes && cb.row_bytes <= 8192 && cb.row_bytes % 2 == 0;
}

/* Some rows of a table in one slab, and what it has of ids. */
struct Cached {
    Slab slab;
    Array<uint64_t> entries;
    ibp_cache cache = {};

    Cached(const ibp_table &t, const Wanted &wanted, const ibp_ids &ids)
        : slab(wanted.num_bytes, static_cast<int64_t>(1 + wanted.rows.size()), 4, 0),
          entries(static_cast<size_t>(ids.count))
    {
        const auto count = static_cast<int64_t>(wanted.rows.size());
        const ibp_row_query query = query_of(t, &ids);
        ibp_fault fault = {};
        ibp_fill_slab(&t, wanted.rows.data(), wanted.offsets.data(), 0, count, &slab.slab(), &fault);
        ibp_find_cached(&query, &slab.slab().map, 1, 0, ids.count, entries.data, nullptr);
        for (size_t k = 0; k < entries.size; k++) /* anywhere */
            if (chance(2)) entries.data[k] ^= uint64_t{1} << below(62);
        cache.entries = entries.data, cache.slabs[cache.num_slabs++] = slab.reading();
    }
};

void check_bags(const Made &made, bool bad_ids, bool is_cached)
{
    const ibp_table &t = made.table;
    const size_t row_bytes = t.codebook.row_bytes;
    Bags asked(t, bad_ids);
    const ibp_ids ids = {.data = asked.ids.data, .count = static_cast<int64_t>(asked.ids.size), .id_bytes = 8};
    const size_t offset = asked.element_bytes * below(9), num_bags = static_cast<size_t>(asked.bags.num_bags);
    const std::string what = std::to_string(num_bags) + " bags of " + std::to_string(ids.count) + " ids, mode " +
                             std::to_string(asked.bags.mode) + ", kind " + std::to_string(asked.bags.kind);
    Output met(num_bags * row_bytes, offset), wanted(num_bags * row_bytes, offset), rows(asked.ids.size * row_bytes, 0);
    Array<uint8_t> scratch(ibp_scratch_bytes(t.codebook.row_bytes));
    ibp_fault fault = {};
    if (!takes_bags(t)) {
        if (ibp_cuda_sum_bags(&t, &ids, nullptr, &asked.bags, met.out, &fault, 0, nullptr) != IBP_INVALID_ARGUMENT)
            complain("%s: not refused", what.c_str());
        return;
    }
    std::unique_ptr<Cached> cached;
    if (is_cached && ids.count != 0) cached = std::make_unique<Cached>(t, choose_rows(t, 0, 1), ids);
    const ibp_cache *const cache = cached ? &cached->cache : nullptr;
    Faults faults;
    for (int64_t k = 0; k < ids.count; k++) {
        fault = {};
        if (cache)
            ibp_gather_cached(&t, &ids, cache, k, k + 1, rows.out, scratch.data, scratch.size, &fault);
        else
            ibp_gather_items(&t, &ids, k, k + 1, rows.out, scratch.data, scratch.size, &fault);
        const bool is_padding = asked.bags.padding_id >= 0 && asked.ids.data[k] == asked.bags.padding_id;
        if (fault.status != 0 && !is_padding) faults.all.push_back(fault);
    }
    for (size_t b = 0; b < num_bags; b++)
        for (size_t i = 0; i < row_bytes; i += asked.element_bytes)
            asked.reduce(rows.out + i, row_bytes, b, wanted.out + b * row_bytes + i);
    fault = {};
    if (!made.is_corrupt) simt::watch(met.bytes.data, met.bytes.size);
    const ibp_status status =
        ibp_cuda_sum_bags(&t, &ids, cache, &asked.bags, met.out, &fault, static_cast<int>(below(4)), nullptr);
    if (status != IBP_OK) complain("%s: status %d", what.c_str(), status);
    compare(met, wanted, what);
    faults.check(fault, what.c_str());
    if (asked.bags.offsets == nullptr || num_bags < 3) return;
    const size_t position = 1 + below(num_bags - 1); /* nothing outside is touched, and it is noted */
    const int64_t before = position == 1 ? 0 : asked.offsets.data[position - 1],
                  value = before > 0 && chance(50) ? before - 1 : pick({int64_t{-1}, ids.count + 1});
    asked.offsets.data[position] = value, asked.short_offsets.data[position] = static_cast<int32_t>(value);
    fault = {};
    if (ibp_cuda_sum_bags(&t, &ids, cache, &asked.bags, met.out, &fault, 0, nullptr) != IBP_OK || fault.taken == 0)
        complain("%s: offset %zu of %lld is not noted", what.c_str(), position, (long long)value);
}
