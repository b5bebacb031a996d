"""Caches rows of a table, in compressed form, in the memory of GPUs.

    hotness = ibp.cache.count_accesses(batches, len(table))
    cache   = ibp.RowCache(table, 1 << 30, hotness)       # 1 GiB of the hottest rows
    rows    = cache.index_select(ids)                     # from the cache if it has them, else from the table
    print(cache.stats().hit_rate)

`_hotness.py` counts accesses of items, `_slabs.py` copies rows within a budget, `_peers.py` reads slabs of other
processes, `_order.py` orders the streams that read and write slabs, `_state.py` has the state that these modules share,
`_changes.py` changes cached rows, and `_row_cache.py` has the cache itself.
"""

from ._peers import count_accesses
from ._row_cache import CacheStats, RowCache

__all__ = ["CacheStats", "RowCache", "count_accesses"]


def __dir__() -> list[str]:
    return __all__
