"""A storage backend for SGLang's hierarchical cache that keeps coded pages in host memory. SGLang's backend type
"dynamic" loads it.

    python -m sglang.launch_server --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "ibp", "module_path": "ibp.integrations.sglang",
        "class_name": "IBPHiCacheStorage", "interface_v1": 1, "pool_bytes": 34359738368}'

`docs/serving.md` lists the tested releases, and says how they were tested. The pages of each of SGLang's host pools are
kept in a separate `ibp.kv.KeyedPages`. A full `KeyedPages` drops its least recently used pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import ibp

from ..shared import check_engine, pages_by

try:
    from sglang.srt.mem_cache.hicache_storage import (  # type: ignore
        HiCacheStorage,
        HiCacheStorageConfig,
        PoolTransfer,
        PoolTransferResult,
    )

    _missing: ImportError | None = None
except ImportError as error:
    HiCacheStorage = object
    _missing = error

__all__ = ["IBPHiCacheStorage"]

_KV = "kv"  # PoolName.KV
_ALL_PAGES, _BLOCK_GROUPS = "all_pages", "block_groups"  # PoolHitPolicy; BLOCK_GROUPS since 0.5.22


class IBPHiCacheStorage(HiCacheStorage):
    """Stores SGLang's pages in coded form. SGLang makes this storage from `module_path` and `class_name`.

    The extra config has these options: `pool_bytes`, the size in bytes of the memory for coded pages of each host pool;
    optionally `device`, the device that codes, "cpu" (the default) or "cuda"; and `level`, "default" or "fast". Each
    method returns when its work is done. Several threads may call methods at the same time.

    Raises:
        ImportError: SGLang is not installed.
        ValueError: `pool_bytes` is missing, or an MLA model runs on several tensor-parallel ranks. With such a model,
            only one rank would give its pages to the storage, but a page is found only if all ranks have it.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        check_engine("sglang", _missing)
        self._make_pool = pages_by(storage_config.extra_config or {}, "the extra config")
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise ValueError(
                f"an MLA model on {storage_config.tp_size} tensor-parallel ranks: SGLang has one of them store pages, "
                "and each rank keeps its own; wanted one rank for attention, such as --enable-dp-attention gives"
            )
        self._pools: dict[str, ibp.kv.KeyedPages] = {}

    def _pool(self, name: str = _KV) -> ibp.kv.KeyedPages:
        name = str(getattr(name, "value", name))
        if name in self._pools:
            return self._pools[name]
        return self._pools.setdefault(name, self._make_pool())

    # ---- single pages, and lists of pages ----

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores a page. Returns whether the page is stored."""
        return value is not None and self._pool().put(key, value)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Loads a page into target_location, a contiguous tensor, and returns this tensor. Returns None if the page is
        not stored."""
        found = target_location is not None and self._pool().get(key, target_location)
        return target_location if found else None

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Calls `set` for each page, up to the first one that is not stored. Returns whether all pages are stored."""
        return all(self.set(key, value) for key, value in zip(keys, values or ()))

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Calls `get` for each page."""
        return [self.get(key, to) for key, to in zip(keys, target_locations or [None] * len(keys))]

    def exists(self, key: str) -> bool:
        """Returns whether a page is stored."""
        return key in self._pool()

    def clear(self) -> None:
        """Removes all pages."""
        for pool in list(self._pools.values()):
            pool.clear()

    def close(self) -> None:
        """Removes all pages, and frees the pools."""
        self._pools.clear()

    def stats(self) -> dict[str, dict[str, int]]:
        """Returns {name of the host pool: the result of `ibp.kv.KeyedPages.stats`, as a dict}. SGLang's own `get_stats`
        is not overridden and returns None, so SGLang's metrics count transfers themselves."""
        return {name: pool.stats().as_dict() for name, pool in list(self._pools.items())}

    # ---- pages of SGLang's host pools ----

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Stores pages of the registered host pool. host_indices: the indices of the pages' tokens in the host pool."""
        return self._write(_KV, self.mem_pool_host, keys, host_indices)

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Loads pages into the registered host pool."""
        return self._read(_KV, self.mem_pool_host, keys, host_indices)

    def batch_set_v2(self, transfers: Sequence[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Stores pages of several host pools."""
        return self._of_pools(transfers, self._write)

    def batch_get_v2(self, transfers: Sequence[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Loads pages into several host pools."""
        return self._of_pools(transfers, self._read)

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Returns a result that has the number of leading pages that can be used, and the number of hits of each pool.
        The first number is the length of the longest prefix of `keys` that the pool of the KV-cache has, and that each
        other pool can restore by its policy. A pool with the policy BLOCK_GROUPS has a second form of the KV-cache, and
        does not shorten the prefix."""
        hits = self._pool().leading(keys)
        found = {_KV: hits} if hits else {}
        usable = list(range(1, hits + 1))
        for transfer in pool_transfers or ():
            if not usable:
                break
            pool = self._pool(transfer.name)
            if transfer.hit_policy == _BLOCK_GROUPS:
                size = transfer.group_pages  # a group counts if all of its pages are stored
                count = pool.leading(transfer.keys or keys) // size * transfer.block_pages if size > 0 else 0
            else:
                window = hits if transfer.hit_policy == _ALL_PAGES else max(1, len(transfer.keys or ()))
                lengths = pool.restorable(keys[:hits], window)
                usable = sorted(lengths.intersection(usable))
                count = max(lengths, default=0)
            if count:
                found[transfer.name] = count
        result = PoolTransferResult(usable[-1] if usable else 0, found)
        if hasattr(result, "restorable_prefix_pages"):  # since 0.5.20
            result.restorable_prefix_pages = usable
        return result

    def _of_pools(
        self, transfers: Sequence[PoolTransfer], move: Callable[[str, Any, Sequence[str], Any], list[bool]]
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: move(
                transfer.name, self.registered_pools[transfer.name], transfer.keys or [], transfer.host_indices
            )
            for transfer in transfers
        }

    def _write(self, name: str, host: Any, keys: Sequence[str], host_indices: Any) -> list[bool]:
        return [
            at is not None and self._pool(name).put(key, host.get_data_page(at, flat=True))
            for key, at in zip(keys, _page_starts(host, keys, host_indices))
        ]

    def _read(self, name: str, host: Any, keys: Sequence[str], host_indices: Any) -> list[bool]:
        results = []
        for key, at in zip(keys, _page_starts(host, keys, host_indices)):
            page = host.get_dummy_flat_data_page()
            found = at is not None and self._pool(name).get(key, page)
            if found:
                host.set_from_flat_data_page(at, page)
            results.append(found)
        return results


def _page_starts(host: Any, keys: Sequence[str], host_indices: Any) -> list[int | None]:
    """Returns the index of the first token of each page. If the number of indices does not match the number of pages,
    returns None for each page instead of raising, because an error would end SGLang's calling thread."""
    size = getattr(host, "page_size", 1) or 1
    if host_indices is None or host_indices.numel() != len(keys) * size:
        return [None] * len(keys)
    return [int(at) for at in host_indices[::size]]
