// threads.cpp - threads that share tables, places, maps of caches, counters and files, as ibp.h allows, for
// ThreadSanitizer: it finds accesses that nothing orders, and this program that results are right.
#include "internal/ibp_internal.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kThreads = 4, kRounds = 6;
constexpr uint32_t kRowBytes = 64, kChunkBytes = 4, kSlotBytes = 32;
constexpr int64_t kRows = 600, kBytes = kRows * kRowBytes;

void require(bool condition, const char *what)
{
    if (condition) return;
    fprintf(stderr, "wrong: %s\n", what);
    exit(1);
}

// work(0) to work(kThreads - 1), at once.
void in_threads(const std::function<void(int)> &work)
{
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; t++) threads.emplace_back(work, t);
    for (std::thread &thread : threads) thread.join();
}

struct Scratch {
    std::vector<uint8_t> bytes = std::vector<uint8_t>(ibp_scratch_bytes(kRowBytes));
    ibp_fault fault{};
};

// Rows that are coded in a few bytes, in more than a slot, or not at all.
std::vector<uint8_t> make_data()
{
    std::vector<uint8_t> data(kBytes);
    uint64_t state = 1;
    for (int64_t i = 0; i < kBytes; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const int64_t row = i / kRowBytes, kind = row % 4;
        const bool is_free = kind == 3 || (kind == 2 && i % 2 == 0) || (kind == 1 && i % 8 == 0);
        data[static_cast<size_t>(i)] = is_free ? static_cast<uint8_t>(state >> 40) : uint8_t{7};
    }
    return data;
}

struct Table {
    std::vector<uint8_t> data = make_data(), slots, overflow;
    alignas(16) uint32_t words[3 * kRowBytes / 4] = {};
    std::vector<uint16_t> lengths = std::vector<uint16_t>(kRows);
    std::vector<uint64_t> bases;
    ibp_table table{};

    Table()
    {
        std::vector<uint8_t> mask(kRowBytes, 0xff), bitval(kRowBytes, 7);
        require(ibp_build_codebook(mask.data(), bitval.data(), kRowBytes, kChunkBytes, false, words, &table.codebook) ==
                    IBP_OK,
                "codebook");
        table.num_items = kRows, table.item_bytes = kRowBytes, table.slot_bytes = kSlotBytes;
        slots.resize(kRows * kSlotBytes);
        table.slots_bytes = static_cast<int64_t>(slots.size());
        table.slots = slots.data(), table.lengths = lengths.data();
    }

    // Measured and indexed by one thread, coded by all.
    void encode()
    {
        Scratch scratch;
        bases.resize((kRows + IBP_ROWS_PER_BASE - 1) / IBP_ROWS_PER_BASE);
        require(ibp_measure_rows(&table.codebook, data.data(), kBytes, lengths.data(), scratch.bytes.data(),
                                 scratch.bytes.size()) == IBP_OK,
                "measured");
        ibp_index_rows(lengths.data(), kBytes, kRowBytes, kSlotBytes, bases.data(), &table.overflow_bytes);
        overflow.resize(static_cast<size_t>(table.overflow_bytes));
        table.overflow = overflow.data(), table.bases = bases.data();
        in_threads([this](int t) {
            Scratch own;
            require(ibp_encode_rows(&table, data.data(), kRows * t / kThreads, kRows * (t + 1) / kThreads, slots.data(),
                                    overflow.data(), own.bytes.data(), own.bytes.size(), &own.fault) == IBP_OK,
                    "coded");
        });
    }

    // Gathers every third row from `start` on, by the entries of a cache where there is one.
    void read(int start, const ibp_cache *cache = nullptr) const
    {
        Scratch own;
        std::vector<int64_t> rows;
        for (int64_t row = start; row < kRows; row += 3) rows.push_back(row);
        std::vector<uint8_t> out(rows.size() * kRowBytes);
        ibp_ids ids{};
        ids.data = rows.data(), ids.count = static_cast<int64_t>(rows.size()), ids.id_bytes = 8;
        const ibp_status status = cache ? ibp_gather_cached(&table, &ids, cache, 0, ids.count, out.data(),
                                                            own.bytes.data(), own.bytes.size(), &own.fault)
                                        : ibp_gather_items(&table, &ids, 0, ids.count, out.data(), own.bytes.data(),
                                                           own.bytes.size(), &own.fault);
        require(status == IBP_OK, "gathered");
        for (size_t k = 0; k < rows.size(); k++)
            require(memcmp(&out[k * kRowBytes], &data[static_cast<size_t>(rows[k]) * kRowBytes], kRowBytes) == 0,
                    "a row");
    }
};

// Readers of one table, while another thread chooses the processor's features.
void share_a_table(const Table &table)
{
    in_threads([&table](int t) {
        for (int round = 0; round < kRounds; round++) {
            if (t == 0) ibp_set_cpu_features(round % 2 == 0 ? 0 : UINT32_MAX);
            table.read(t % 3);
        }
    });
    ibp_set_cpu_features(UINT32_MAX);
}

// Rows of one place coded by all threads: each its own rows first, then all of them rows that they share.
void share_a_place(const Table &from)
{
    std::vector<uint8_t> slots(kRows * kSlotBytes), overflow(2 * kBytes);
    std::vector<uint16_t> lengths(kRows), rooms(kRows);
    std::vector<uint64_t> bases(kRows, IBP_NO_BASE);
    uint64_t used = 0;
    ibp_place_counts counts{};
    ibp_place place{};
    place.table = from.table;
    place.table.rows_per_base = 1, place.table.overflow_bytes = static_cast<int64_t>(overflow.size());
    place.slots = slots.data(), place.overflow = overflow.data(), place.lengths = lengths.data();
    place.bases = bases.data(), place.rooms = rooms.data(), place.used = &used, place.counts = &counts;
    ibp_row_source source{};
    source.data = from.data.data(), source.num_rows = kRows;
    std::vector<int64_t> all(kRows), few(kRows);
    for (int64_t row = 0; row < kRows; row++)
        all[static_cast<size_t>(row)] = row, few[static_cast<size_t>(row)] = row % 5;
    in_threads([&](int t) {
        Scratch own;
        require(ibp_encode_into(&place, &source, all.data(), 0, kRows * t / kThreads, kRows * (t + 1) / kThreads,
                                own.bytes.data(), own.bytes.size(), &own.fault) == IBP_OK,
                "coded into a place");
    });
    ibp_table table = place.table;
    table.slots = slots.data(), table.overflow = overflow.data(), table.lengths = lengths.data(),
    table.bases = bases.data();
    Scratch scratch;
    std::vector<uint8_t> out(kBytes);
    require(ibp_decode_bytes(&table, 0, kBytes, out.data(), scratch.bytes.data(), scratch.bytes.size(),
                             &scratch.fault) == IBP_OK &&
                out == from.data && counts.lost == 0,
            "rows of a place");
    in_threads([&](int) {
        Scratch own; // what two threads code at once is one's or the other's, and noted
        const ibp_status status =
            ibp_encode_into(&place, &source, few.data(), 0, 0, kRows, own.bytes.data(), own.bytes.size(), &own.fault);
        require(status == IBP_OK || status == IBP_INVALID_ARGUMENT, "rows that threads share");
    });
    scratch.fault = ibp_fault{};
    require(ibp_decode_bytes(&table, 5 * kRowBytes, kBytes, out.data(), scratch.bytes.data(), scratch.bytes.size(),
                             &scratch.fault) == IBP_OK &&
                memcmp(out.data(), &from.data[5 * kRowBytes], kBytes - 5 * kRowBytes) == 0,
            "the other rows of the place");
}

// A map that threads fill, search, change and empty at once, and counters that they add to.
void share_a_cache(const Table &table)
{
    constexpr uint32_t kWays = 4;
    std::vector<ibp_cached_row> ways(2 * kRows / kWays * kWays, ibp_cached_row{IBP_WAY_EMPTY, 0});
    std::vector<uint8_t> bytes(kRows * kRowBytes);
    ibp_cache_slab slab{};
    slab.map.rows = ways.data(), slab.map.num_sets = 2 * kRows / kWays, slab.map.ways = kWays;
    slab.bytes = bytes.data(), slab.num_bytes = static_cast<int64_t>(bytes.size());
    ibp_cache_counts counts{};
    std::vector<int64_t> rows(kRows), offsets(kRows);
    for (int64_t row = 0; row < kRows; row++)
        rows[static_cast<size_t>(row)] = row, offsets[static_cast<size_t>(row)] = row * kRowBytes;
    in_threads([&](int t) {
        Scratch own;
        std::vector<int64_t> wanted;
        for (int64_t row = t % 3; row < kRows; row += 3) wanted.push_back(row);
        std::vector<uint64_t> entries(wanted.size());
        ibp_ids ids{};
        ids.data = wanted.data(), ids.count = static_cast<int64_t>(wanted.size()), ids.id_bytes = 8;
        const ibp_row_query query{&ids, 1, kRowBytes, table.lengths.data(), kRows};
        ibp_cache cache{};
        cache.entries = entries.data(), cache.num_slabs = 1;
        cache.slabs[0] = ibp_slab{bytes.data(), slab.num_bytes};
        require(ibp_fill_slab(&table.table, rows.data(), offsets.data(), kRows * t / kThreads,
                              kRows * (t + 1) / kThreads, &slab, &own.fault) == IBP_OK,
                "filled");
        for (int round = 0; round < kRounds; round++) {
            require(ibp_find_cached(&query, &slab.map, 1, 0, ids.count, entries.data(), &counts) == IBP_OK, "found");
            table.read(t % 3, &cache);
            ibp_set_cached(wanted.data(), nullptr, 5, round % 2 == 0, &slab.map);
            if (t == 3) ibp_drop_cached(&wanted[static_cast<size_t>(5 * round)], 3, &slab.map);
        }
    });
    uint64_t asked = counts.misses;
    for (uint64_t hits : counts.hits) asked += hits;
    require(counts.hits[0] > 0 && asked == 4 * kRounds * kRows / 3, "counts of a cache");
}

// Caches of the rows used last, one a thread, over one table.
void claim_rows(const Table &table)
{
    in_threads([&table](int t) {
        constexpr int64_t kSets = 2, kWays = kSets * IBP_SEARCHED_WAYS;
        std::vector<ibp_cached_row> ways(kWays, ibp_cached_row{IBP_WAY_EMPTY, 0});
        std::vector<uint8_t> bytes(kWays * kRowBytes);
        std::vector<uint32_t> stamps(kWays + kSets);
        uint64_t clock[2] = {0, 0};
        ibp_lru lru{};
        lru.slab.map.rows = ways.data(), lru.slab.map.num_sets = kSets, lru.slab.map.ways = IBP_SEARCHED_WAYS;
        lru.slab.bytes = bytes.data(), lru.slab.num_bytes = static_cast<int64_t>(bytes.size());
        lru.slot_bytes = kRowBytes, lru.stamps = stamps.data(), lru.clock = clock;
        std::vector<int64_t> wanted;
        for (int64_t row = t % 3; row < kRows; row += 3) wanted.push_back(row);
        std::vector<uint64_t> entries(wanted.size());
        ibp_ids ids{};
        ids.data = wanted.data(), ids.count = static_cast<int64_t>(wanted.size()), ids.id_bytes = 8;
        ibp_cache cache{};
        cache.entries = entries.data(), cache.num_slabs = 1;
        cache.slabs[0] = ibp_slab{bytes.data(), lru.slab.num_bytes};
        ibp_fault fault{};
        require(ibp_claim_cached(&table.table, &ids, &lru, entries.data(), nullptr, &fault) == IBP_OK, "claimed");
        table.read(t % 3, &cache);
    });
}

// A file that all threads open tables of.
void share_a_file(const Table &table)
{
    const std::string size = std::to_string(kBytes);
    std::string header = R"({"__metadata__":{"ibp.format":"1","ibp.checks":"","ibp.table.t":"dtype=U8 shape=)" + size +
                         R"( scheme=raw row_bytes=64 slot_bytes=64"},"t:slots":{"dtype":"U8","shape":[)" + size +
                         R"(],"data_offsets":[0,)" + size +
                         R"(]},"ibp.checks":{"dtype":"U64","shape":[0],"data_offsets":[)" + size + "," + size + "]}}";
    while ((8 + header.size()) % 128 != 0) header += ' ';
    const uint64_t header_bytes = header.size(), num_bytes = 8 + header_bytes + kBytes;
    auto *const bytes = static_cast<uint8_t *>(aligned_alloc(128, (num_bytes + 127) / 128 * 128));
    require(bytes != nullptr, "memory");
    memcpy(bytes, &header_bytes, 8);
    memcpy(bytes + 8, header.data(), header.size());
    memcpy(bytes + 8 + header_bytes, table.data.data(), kBytes);
    ibp_file file;
    require(ibp_open_file(bytes, num_bytes, &file) == IBP_OK, "a file");
    in_threads([&](int) {
        Scratch own;
        ibp_file_table found;
        ibp_table opened;
        std::vector<uint8_t> out(kBytes);
        require(ibp_find_table(&file, 1, "t", &found) == IBP_OK &&
                    ibp_open_table(&found, nullptr, 0, &opened) == IBP_OK,
                "a table of a file");
        require(ibp_decode_bytes(&opened, 0, kBytes, out.data(), own.bytes.data(), own.bytes.size(), &own.fault) ==
                        IBP_OK &&
                    out == table.data,
                "its bytes");
    });
    free(bytes);
}

#if defined(PLANTED_RACE)
// What the sanitizer is to find: two threads that write where nothing orders them.
void race()
{
    uint64_t sum = 0;
    in_threads([&sum](int t) { sum += static_cast<uint64_t>(t); });
    printf("%llu\n", static_cast<unsigned long long>(sum));
}
#endif

} // namespace

int main()
{
#if defined(PLANTED_RACE)
    race();
#endif
    Table table;
    table.encode();
    for (int round = 0; round < kRounds; round++) {
        share_a_table(table);
        share_a_place(table);
        share_a_cache(table);
        claim_rows(table);
        share_a_file(table);
    }
    printf("%d threads agree\n", kThreads);
    return 0;
}
