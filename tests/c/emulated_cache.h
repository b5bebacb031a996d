/* emulated_cache.h - caches of a table's rows: the kernels of cuda/cache/cache.cu, and gathers from slabs, against the
 * C core. A part of emulated_tables.cpp. */

/* A slab with its map, or the state of a cache whose rows are replaced. */
struct Slab {
    Array<uint8_t> bytes;
    Array<ibp_cached_row> rows;
    Array<uint32_t> stamps;
    uint64_t clock[2] = {0, 0};
    ibp_lru lru = {};

    Slab(size_t num_bytes, int64_t num_sets, uint32_t ways, uint32_t number, uint32_t slot_bytes = 32)
        : bytes(num_bytes, slot_bytes == 32 ? below(17) : 0), rows(static_cast<size_t>(num_sets) * ways),
          stamps(static_cast<size_t>(num_sets) * (ways + 1))
    {
        for (size_t w = 0; w < rows.size; w++) rows.data[w] = {IBP_WAY_EMPTY, 0};
        for (size_t w = 0; w < stamps.size; w++) stamps.data[w] = 0;
        lru = {{{rows.data, num_sets, ways}, bytes.data, static_cast<int64_t>(num_bytes), number},
               slot_bytes,
               stamps.data,
               clock};
    }
    const ibp_cache_slab &slab() const { return lru.slab; }
    ibp_slab reading() const { return {bytes.data, static_cast<int64_t>(bytes.size)}; }
};

uint32_t stored_bytes_of(const ibp_table &t, int64_t row)
{
    return ibp_stored_bytes(t.lengths ? t.lengths[row] : 0u, t.codebook.row_bytes, t.codebook.row_bytes);
}

/* Rows that a slab is to hold: not all are rows, and some come twice. */
struct Wanted {
    std::vector<int64_t> rows, offsets;
    size_t num_bytes = 0;
};
Wanted choose_rows(const ibp_table &t, uint32_t slab, uint32_t num_slabs)
{
    Wanted wanted;
    const int64_t num_rows = ibp_num_rows(&t);
    for (int64_t row = 0; row < num_rows; row++)
        if (ibp_owner_of_row(row, num_slabs) == slab && chance(60)) wanted.rows.push_back(row);
    const size_t count = wanted.rows.size();
    for (size_t i = 0; i < count; i++)
        if (chance(15)) wanted.rows.push_back(wanted.rows[i]);
    std::shuffle(wanted.rows.begin(), wanted.rows.end(), generator);
    const uint32_t align = pick({1u, 4u, 16u, 32u});
    for (const int64_t row : wanted.rows) {
        wanted.num_bytes = (wanted.num_bytes + align - 1) / align * align;
        wanted.offsets.push_back(static_cast<int64_t>(wanted.num_bytes));
        wanted.num_bytes += std::min(stored_bytes_of(t, row), t.codebook.row_bytes);
    }
    for (size_t i = 0; i < wanted.rows.size(); i++) {
        if (chance(3)) wanted.rows[i] = pick({int64_t{-1}, int64_t{-2}, INT64_MIN});
        if (chance(3)) wanted.offsets[i] = pick({int64_t{-1}, INT64_MIN});
    }
    return wanted;
}

/* A way has the entry of its row, dirty or not, and the row lies there as the table has it. */
void check_row(const ibp_table &t, const Slab &slab, const ibp_cached_row &way)
{
    const uint64_t offset = ibp_offset_in_slab(way.entry);
    const int64_t start = 0;
    Slab alone(stored_bytes_of(t, way.row), 1, 2, slab.slab().number);
    ibp_fault fault = {};
    if (ibp_fill_slab(&t, &way.row, &start, 0, 1, &alone.slab(), &fault) != IBP_OK ||
        (alone.rows.data[0].entry | offset) != (way.entry & ~IBP_ENTRY_DIRTY))
        complain("row %lld has the entry %llx", (long long)way.row, (unsigned long long)way.entry);
    else if (memcmp(alone.bytes.data, slab.bytes.data + offset, alone.bytes.size) != 0)
        complain("row %lld is not as it is stored", (long long)way.row);
}

/* Every row of the map is one that was wanted, once, and lies where it was wanted as the table has it. */
void check_filled(const ibp_table &t, const Slab &slab, const Wanted &wanted)
{
    std::set<int64_t> found;
    for (size_t w = 0; w < slab.rows.size; w++) {
        const ibp_cached_row way = slab.rows.data[w];
        if (way.row == IBP_WAY_EMPTY && way.entry == 0) continue;
        const auto offset = static_cast<int64_t>(ibp_offset_in_slab(way.entry));
        bool is_wanted = false;
        for (size_t i = 0; i < wanted.rows.size(); i++)
            is_wanted = is_wanted || (wanted.rows[i] == way.row && wanted.offsets[i] == offset);
        if (!found.insert(way.row).second) complain("row %lld is cached twice", (long long)way.row);
        if (!is_wanted) complain("row %lld is cached at %lld", (long long)way.row, (long long)offset);
        check_row(t, slab, way);
    }
}

void check_same_counts(const ibp_cache_counts &met, const ibp_cache_counts &wanted, const char *what)
{
    if (memcmp(&met, &wanted, sizeof met) != 0)
        complain("%s: %lld rows missed, of %lld bytes; not %lld of %lld", what, (long long)met.misses,
                 (long long)met.missed_bytes, (long long)wanted.misses, (long long)wanted.missed_bytes);
}

/* The same gather on the processor and by a kernel. */
void check_cached_gather(const Made &made, const ibp_ids &ids, const ibp_cache &cache, const char *what)
{
    const ibp_table &t = made.table;
    const size_t offset = choose_offset(), out_bytes = static_cast<size_t>(ids.count * t.item_bytes);
    Output met(out_bytes, offset), wanted(out_bytes, offset);
    Array<uint8_t> scratch(ibp_scratch_bytes(t.codebook.row_bytes));
    Faults faults;
    for (int64_t k = 0; k < ids.count; k++) {
        ibp_fault fault = {};
        ibp_gather_cached(&t, &ids, &cache, k, k + 1, wanted.out, scratch.data, scratch.size, &fault);
        if (fault.status != 0) faults.all.push_back(fault);
    }
    ibp_fault fault = {};
    if (ibp_cuda_gather_cached(&t, &ids, &cache, met.out, &fault, static_cast<int>(below(4)), nullptr) != IBP_OK)
        complain("%s: refused", what);
    compare(met, wanted, what);
    faults.check(fault, what);
}

Array<int64_t> choose_ids(const ibp_table &t, bool bad_ids)
{
    Array<int64_t> ids(1 + below(60));
    for (size_t k = 0; k < ids.size; k++) {
        ids.data[k] = static_cast<int64_t>(below(static_cast<uint64_t>(t.num_items)));
        if (k != 0 && chance(20)) ids.data[k] = ids.data[below(k)];
        if (bad_ids && chance(10)) ids.data[k] = pick({int64_t{-1}, int64_t{-2}, t.num_items, INT64_MAX, INT64_MIN});
    }
    return ids;
}

ibp_row_query query_of(const ibp_table &t, const ibp_ids *ids)
{
    const uint32_t row_bytes = t.codebook.row_bytes;
    return {ids, t.item_bytes / row_bytes, row_bytes, t.lengths, ibp_num_rows(&t)};
}

/* Slabs that stay as they are but for rows that are dropped and set. */
void check_static_cache(const Made &made)
{
    const ibp_table &t = made.table;
    const uint32_t num_slabs = 1 + static_cast<uint32_t>(below(chance(50) ? 1 : IBP_MAX_SLABS)),
                   ways = pick({2u, 4u, 32u});
    std::vector<std::unique_ptr<Slab>> slabs;
    ibp_cache_map maps[IBP_MAX_SLABS];
    ibp_cache cache = {};
    for (uint32_t s = 0; s < num_slabs; s++) {
        const Wanted wanted = choose_rows(t, s, num_slabs);
        const size_t num_bytes = wanted.num_bytes - (chance(10) ? std::min<size_t>(wanted.num_bytes, 5) : 0);
        const auto num_sets = static_cast<int64_t>(1 + wanted.rows.size() * 2 / ways);
        slabs.push_back(std::make_unique<Slab>(num_bytes + (chance(50) ? 16 : 0), num_sets, ways, s));
        ibp_fault fault = {};
        if (ibp_cuda_fill_slab(&t, wanted.rows.data(), wanted.offsets.data(), static_cast<int64_t>(wanted.rows.size()),
                               &slabs[s]->slab(), &fault, nullptr) != IBP_OK)
            complain("slab %u is not filled", s);
        check_filled(t, *slabs[s], wanted);
        maps[s] = slabs[s]->slab().map;
        cache.slabs[cache.num_slabs++] = slabs[s]->reading();
    }
    const Array<int64_t> ids = choose_ids(t, chance(20));
    const ibp_ids request = {.data = ids.data, .count = static_cast<int64_t>(ids.size), .id_bytes = 8};
    const ibp_row_query query = query_of(t, &request);
    const size_t num_rows = ids.size * static_cast<size_t>(query.rows_per_item);
    Array<uint64_t> entries(num_rows), wanted(num_rows);
    ibp_cache_counts counts = {}, wanted_counts = {};
    ibp_find_cached(&query, maps, num_slabs, 0, request.count, wanted.data, &wanted_counts);
    if (ibp_cuda_find_cached(&query, maps, num_slabs, entries.data, &counts, nullptr) != IBP_OK)
        complain("rows are not found");
    if (memcmp(entries.data, wanted.data, 8 * num_rows) != 0) complain("entries differ");
    check_same_counts(counts, wanted_counts, "found rows");
    cache.entries = entries.data;
    check_cached_gather(made, request, cache, "a gather from slabs");
    for (size_t i = 0; i < num_rows; i++) /* anywhere */
        if (chance(30)) entries.data[i] ^= uint64_t{1} << below(62);
    check_cached_gather(made, request, cache, "a gather by hostile entries");
}

/* Rows of one map dropped, and given other lengths, by a kernel and on the processor. */
void check_changed_map(const ibp_table &t)
{
    const Wanted wanted = choose_rows(t, 0, 1);
    const auto count = static_cast<int64_t>(wanted.rows.size());
    Slab met(wanted.num_bytes, 1 + count / 3, 4, 0);
    ibp_fault fault = {};
    ibp_fill_slab(&t, wanted.rows.data(), wanted.offsets.data(), 0, count, &met.slab(), &fault);
    Slab twin(0, met.slab().map.num_sets, 4, 0);
    memcpy(twin.rows.data, met.rows.data, met.rows.size * sizeof *met.rows.data);
    std::vector<int64_t> rows;
    std::vector<uint16_t> lengths;
    const std::set<int64_t> each(wanted.rows.begin(), wanted.rows.end());
    for (const int64_t row : each)
        if (chance(30)) rows.push_back(row), lengths.push_back(static_cast<uint16_t>(generator()));
    const auto num_changed = static_cast<int64_t>(rows.size());
    const bool dirty = chance(50), has_lengths = chance(70);
    const ibp_cache_map &map = met.slab().map, &other = twin.slab().map;
    ibp_set_cached(rows.data(), has_lengths ? lengths.data() : nullptr, num_changed, dirty, &other);
    if (ibp_cuda_set_cached(rows.data(), has_lengths ? lengths.data() : nullptr, num_changed, dirty, &map, nullptr))
        complain("rows are not set");
    const int64_t half = num_changed / 2;
    ibp_drop_cached(rows.data(), half, &other);
    if (ibp_cuda_drop_cached(rows.data(), half, &map, nullptr) != IBP_OK) complain("rows are not dropped");
    if (memcmp(met.rows.data, twin.rows.data, met.rows.size * sizeof *met.rows.data) != 0)
        complain("maps differ after %lld rows were set and %lld dropped", (long long)num_changed, (long long)half);
}

/* What holds after a call whatever the order in which rows took their ways. before: the map before the call. */
void check_claimed(const Slab &cache, const Array<ibp_cached_row> &before, const std::vector<int64_t> &asked,
                   const Array<uint64_t> &entries)
{
    std::set<int64_t> wanted(asked.begin(), asked.end()), there;
    wanted.erase(-1); /* ids out of range */
    for (size_t w = 0; w < before.size; w++) {
        const ibp_cached_row way = cache.rows.data[w];
        const bool stays = way.row == before.data[w].row;
        if (way.row >= 0 && !there.insert(way.row).second) complain("row %lld is cached twice", (long long)way.row);
        if (!stays && wanted.count(before.data[w].row) != 0)
            complain("row %lld has lost its way", (long long)before.data[w].row);
        if (!stays && wanted.count(way.row) == 0) complain("row %lld was not asked for", (long long)way.row);
        if (!stays && (before.data[w].entry & IBP_ENTRY_DIRTY) != 0) complain("way %zu was dirty", w);
        if (cache.stamps.data[w] != static_cast<uint32_t>(cache.clock[0]) && wanted.count(way.row) != 0)
            complain("row %lld has the time %u", (long long)way.row, cache.stamps.data[w]);
    }
    for (size_t i = 0; i < asked.size(); i++)
        if ((entries.data[i] != 0) != (there.count(asked[i]) != 0))
            complain("row %lld has the entry %llx", (long long)asked[i], (unsigned long long)entries.data[i]);
    for (size_t s = before.size; s < cache.stamps.size; s++)
        if (cache.stamps.data[s] != 0) complain("a set is locked");
}

void check_lru(const Made &made)
{
    const ibp_table &t = made.table;
    const uint32_t row_bytes = t.codebook.row_bytes,
                   slot_bytes = (1 + static_cast<uint32_t>(below((row_bytes + 31) / 32))) * 32;
    const auto num_sets = static_cast<int64_t>(below(3));
    Slab cache(static_cast<size_t>(num_sets) * 32 * slot_bytes + 16, num_sets, 32, 0, slot_bytes);
    for (int call = 0; call < 4; call++) {
        const Array<int64_t> ids = choose_ids(t, chance(20));
        const ibp_ids request = {.data = ids.data, .count = static_cast<int64_t>(ids.size), .id_bytes = 8};
        const ibp_row_query query = query_of(t, &request);
        std::vector<int64_t> asked;
        for (size_t k = 0; k < ids.size; k++)
            for (int64_t r = 0; r < query.rows_per_item; r++)
                asked.push_back(ibp_row_of_item(ids.data[k], r, query.rows_per_item, query.num_rows));
        Array<ibp_cached_row> before(cache.rows.size);
        if (before.size != 0) memcpy(before.data, cache.rows.data, before.size * sizeof *before.data);
        Array<uint64_t> entries(asked.size());
        ibp_cache_counts counts = {};
        ibp_fault fault = {};
        if (ibp_cuda_claim_cached(&t, &request, &cache.lru, entries.data, &counts, &fault, nullptr) != IBP_OK)
            complain("rows are not claimed");
        check_claimed(cache, before, asked, entries);
        for (size_t w = 0; w < cache.rows.size; w++)
            if (cache.rows.data[w].row >= 0) check_row(t, cache, cache.rows.data[w]);
        uint64_t missed = 0, hits = counts.hits[0];
        for (const int64_t row : asked) missed += row >= 0 && stored_bytes_of(t, row) != 0 && !made.is_corrupt;
        if (!made.is_corrupt && hits + counts.misses != missed)
            complain("%llu hits and %llu misses of %llu rows", (unsigned long long)hits,
                     (unsigned long long)counts.misses, (unsigned long long)missed);
        ibp_cache reading = {entries.data, 1, {cache.reading()}};
        check_cached_gather(made, request, reading, "a gather of claimed rows");
        for (size_t w = 0; w < cache.rows.size; w++) /* between calls rows change */
            if (cache.rows.data[w].row >= 0 && chance(10)) cache.rows.data[w].entry ^= IBP_ENTRY_DIRTY;
    }
}

void check_cache(const Made &made)
{
    const ibp_table &t = made.table;
    if (t.item_bytes % t.codebook.row_bytes != 0) return;
    check_static_cache(made);
    check_changed_map(t);
    check_lru(made);
}
