// ready_cache.h - a cache of rows on a device, ready for calls for few items as a TableHandle is: what a look-up needs
// besides its table.
#ifndef IBP_READY_CACHE_H
#define IBP_READY_CACHE_H

#include "ibp.h"
#include "ibp_cuda.h"
#include "table_handle.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace ibp_python {

namespace py = pybind11;

using ibp::Range;

class ReadyCache {
  public:
    using Memory = std::vector<std::pair<uintptr_t, int64_t>>; // (address, bytes)

    // kept: what owns the memory. maps, slabs: one of each slab. counts: address of a struct ibp_cache_counts. stamps,
    // clock, slot_bytes: of a cache that replaces rows (struct ibp_lru) and has one slab; else 0.
    ReadyCache(py::object kept, const Memory &maps, uint32_t ways, const Memory &slabs, uintptr_t counts,
               uintptr_t stamps, uintptr_t clock, uint32_t slot_bytes)
        : kept_(std::move(kept)), counts_(reinterpret_cast<ibp_cache_counts *>(counts))
    {
        if (maps.size() > IBP_MAX_SLABS || maps.size() != slabs.size() || ways == 0)
            throw py::value_error("maps and slabs are not those of a cache");
        for (const auto &[address, num_bytes] : maps) {
            const auto set_bytes = static_cast<int64_t>(sizeof(ibp_cached_row) * ways);
            maps_.push_back({reinterpret_cast<ibp_cached_row *>(address), num_bytes / set_bytes, ways});
            add_range(address, num_bytes);
        }
        for (const auto &[address, num_bytes] : slabs) {
            slabs_.slabs[slabs_.num_slabs++] = {reinterpret_cast<const uint8_t *>(address), num_bytes};
            add_range(address, num_bytes);
        }
        if (slot_bytes == 0) return;
        const auto [address, num_bytes] = slabs.at(0);
        lru_.slab = {maps_.at(0), reinterpret_cast<uint8_t *>(address), num_bytes, 0};
        lru_.slot_bytes = slot_bytes;
        lru_.stamps = reinterpret_cast<uint32_t *>(stamps);
        lru_.clock = reinterpret_cast<uint64_t *>(clock);
    }

    // Whether what a call writes is a part of the cache.
    bool meets(const Range &written) const
    {
        return std::any_of(ranges_.begin(), ranges_.end(), [&](const Range &range) { return range.meets(written); });
    }

    // Looks the rows of items up: their entries, and the slabs.
    ibp_status find(const ibp_table &table, const ibp_ids &items, uint64_t *entries, ibp_fault *fault, bool on_cpu,
                    ibp_stream stream, ibp_cache *found) const
    {
        *found = slabs_;
        found->entries = entries;
        if (lru_.slot_bytes != 0)
            return on_cpu ? ibp_claim_cached(&table, &items, &lru_, entries, counts_, fault)
                          : ibp_cuda_claim_cached(&table, &items, &lru_, entries, counts_, fault, stream);
        const int64_t row_bytes = table.codebook.row_bytes;
        const ibp_row_query query{&items, table.item_bytes / row_bytes, table.codebook.row_bytes, table.lengths,
                                  table.num_items * (table.item_bytes / row_bytes)};
        const auto num_maps = static_cast<uint32_t>(maps_.size());
        return on_cpu ? ibp_find_cached(&query, maps_.data(), num_maps, 0, items.count, entries, counts_)
                      : ibp_cuda_find_cached(&query, maps_.data(), num_maps, entries, counts_, stream);
    }

  private:
    void add_range(uintptr_t address, int64_t num_bytes)
    {
        if (num_bytes > 0) ranges_.push_back({address, address + static_cast<uintptr_t>(num_bytes)});
    }

    py::object kept_;
    std::vector<ibp_cache_map> maps_;
    ibp_cache slabs_{};
    ibp_lru lru_{};
    ibp_cache_counts *counts_;
    std::vector<Range> ranges_;
};

} // namespace ibp_python

#endif
