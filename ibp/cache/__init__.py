"""Caches rows of a table, in compressed form, in the memory of GPUs.

    hotness = ibp.cache.count_accesses(batches, len(table))
    cache   = ibp.RowCache(table, 1 << 30, hotness)       # 1 GiB of the hottest rows
    rows    = cache.index_select(ids)                     # from the cache if it has them, else from the table
    print(cache.stats().hit_rate)

`_slabs.py` chooses the rows that are cached, keeps copies of them within a budget, and changes them. `_peers.py` shares
these copies among processes, and `_row_cache.py` has the cache itself.
"""

from ._row_cache import CacheStats, RowCache
from ._slabs import count_accesses

__all__ = ["CacheStats", "RowCache", "count_accesses"]


def __dir__() -> list[str]:
    return __all__
