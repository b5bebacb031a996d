"""Caches rows of a table, in compressed form, in the memory of GPUs.

    hotness = ibp.cache.count_accesses(batches, len(table))
    cache   = ibp.RowCache(table, 1 << 30, hotness)       # 1 GiB of the hottest rows
    rows    = cache.index_select(ids)                     # from the cache if it has them, else from the table
    print(cache.stats().hit_rate)

A `RowCache` (`_row_cache.py`) takes the arguments, looks rows up and counts. Its `CacheState` (`_slabs.py`) has what
changes: the `Generation` that is in use, and the order of the streams that read and write it. A generation has a `Slab`
for each device, with the stored bytes of rows and a map that finds them. A refill makes a new generation, of as many of
the hottest rows as the budget allows, and puts it in the place of the old one when it is filled. If the processes of a
group share a cache, `_peers.py` makes generations of the slabs of all ranks.
"""

from ._row_cache import CacheStats, RowCache
from ._slabs import count_accesses

__all__ = ["CacheStats", "RowCache", "count_accesses"]


def __dir__() -> list[str]:
    return __all__
