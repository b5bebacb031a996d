"""Rows of a table as they are stored, kept in the memory of GPUs: `RowCache`. What is hot (`hotness.py`), what a budget
holds and the slabs that hold it (`slabs.py`), those of other processes (`peers.py`), the streams that read and write
them (`order.py`), the cache itself (`row_cache.py`)."""

from ._hotness import count_accesses
from ._row_cache import CacheStats, RowCache

__all__ = ["CacheStats", "RowCache", "count_accesses"]
