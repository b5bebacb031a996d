"""SGLang's hierarchical cache with a tier of coded pages in host memory, by its storage backend "dynamic".

    python -m sglang.launch_server --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "ibp", "module_path": "ibp.integrations.sglang",
        "class_name": "IBPHiCacheStorage", "pool_bytes": 34359738368}'

Written against the source of `sglang.srt.mem_cache.hicache_storage` (HiCacheStorage with get, set, their batches, and
the batches of versions 1 and 2) and tested with stand-ins for these classes: it has not run inside SGLang. Pages are
kept by their keys in pools of `ibp.KVStore`, one for each of SGLang's host pools; those used longest ago make room.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

import ibp

try:
    from sglang.srt.mem_cache.hicache_storage import (  # type: ignore
        HiCacheStorage,
        HiCacheStorageConfig,
        PoolHitPolicy,
        PoolTransfer,
        PoolTransferResult,
    )

    _missing: ImportError | None = None
except ImportError as error:
    HiCacheStorage = object
    _missing = error

__all__ = ["IBPHiCacheStorage"]

_KV = "kv"  # PoolName.KV
_PUTS_A_COMPACTION = 16  # overflow is compacted at most once in such a part of the pages


class _Pool:
    """Pages of one size by their keys. The codebook and the number of pages come from the first one that is stored."""

    def __init__(self, pool_bytes: int, device: str, level: str) -> None:
        self._pool_bytes, self._device, self._level = pool_bytes, device, level
        self._store: ibp.KVStore | None = None
        self._pages: OrderedDict[str, int] = OrderedDict()  # those used last at the end
        self._free: list[int] = []
        self._num_put = 0  # since the last compaction

    def __contains__(self, key: str) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def store(self) -> ibp.KVStore | None:
        return self._store

    def put(self, key: str, value: torch.Tensor) -> bool:
        """Stores a page. False where it finds no room."""
        if key in self._pages:
            self._pages.move_to_end(key)
            return True
        value = value.detach().contiguous().view(1, -1)
        if self._store is None:
            self._store = self._made_for(value)
            self._free = list(range(self._store.num_pages))[::-1]
        if value.nbytes != self._store.page_bytes or not (self._free or self._pages):
            return False
        page = self._free.pop() if self._free else self._pages.popitem(last=False)[1]
        self._num_put += 1
        if not self._is_put(self._store, page, value.to(self._device)):
            self._free.append(page)
            return False
        self._pages[key] = page
        return True

    def _is_put(self, store: ibp.KVStore, page: int, value: torch.Tensor) -> bool:
        if not store.store([page], value, [0]).lost():
            return True
        if self._num_put <= store.num_pages // _PUTS_A_COMPACTION:
            return False
        self._num_put = 0
        store.compact()
        return not store.store([page], value, [0]).lost()

    def get(self, key: str, out: torch.Tensor) -> bool:
        """Loads a page into a contiguous tensor. False where it is not there."""
        if key not in self._pages or self._store is None or out.nbytes != self._store.page_bytes:
            return False
        near = out.view(1, -1) if out.device == self._store.device else torch.empty_like(out, device=self._device)
        try:
            self._store.load([self._pages[key]], near.view(1, -1), [0]).synchronize()
        except (IndexError, ibp.CorruptTableError):
            self._free.append(self._pages.pop(key))
            return False
        if near.device != out.device:
            out.copy_(near)
        self._pages.move_to_end(key)
        return True

    def clear(self) -> None:
        self._pages.clear()
        if self._store is not None:
            self._store.clear()
            self._free = list(range(self._store.num_pages))[::-1]

    def _made_for(self, value: torch.Tensor) -> ibp.KVStore:
        return ibp.KVStore(
            value, page_bytes=value.nbytes, pool_bytes=self._pool_bytes, level=self._level, device=self._device
        )


class IBPHiCacheStorage(HiCacheStorage):
    """What SGLang makes by `module_path` and `class_name`.

    Of the extra config it reads `pool_bytes`, bytes of host memory for the pages of each host pool, and optionally:
    `device`, "cpu" (the default: pages are coded where they are) or "cuda"; `level`, "default" or "fast". Calls come
    back when they are done; threads may call at the same time.

    Raises:
        ImportError: SGLang is not there.
        ValueError: `pool_bytes` is missing.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        if _missing is not None:
            raise ImportError(
                "ibp.integrations.sglang needs SGLang with sglang.srt.mem_cache.hicache_storage"
            ) from _missing
        options = storage_config.extra_config or {}
        if not options.get("pool_bytes"):
            raise ValueError("the extra config has no pool_bytes: bytes of host memory for coded pages")
        self._options = int(options["pool_bytes"]), options.get("device", "cpu"), options.get("level", "default")
        self._pools: dict[str, _Pool] = {}
        self._lock = threading.Lock()

    def _pool(self, name: str = _KV) -> _Pool:
        name = str(getattr(name, "value", name))
        if name not in self._pools:
            self._pools[name] = _Pool(*self._options)
        return self._pools[name]

    # ---- a page at a time, and lists of them ----

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores a page; True if it is there now."""
        with self._lock:
            return value is not None and self._pool().put(key, value)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """The page, in target_location, a contiguous tensor; None where it is not there."""
        with self._lock:
            found = target_location is not None and self._pool().get(key, target_location)
        return target_location if found else None

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """`set` of each; False from the first that is not stored on."""
        return all(self.set(key, value) for key, value in zip(keys, values or ()))

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """`get` of each."""
        return [self.get(key, to) for key, to in zip(keys, target_locations or [None] * len(keys))]

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        with self._lock:
            return key in self._pool()

    def clear(self) -> None:
        """Forgets all pages."""
        with self._lock:
            for pool in self._pools.values():
                pool.clear()

    def get_stats(self) -> dict[str, Any]:
        """By host pool: pages, and what `ibp.KVStore.stats` says."""
        with self._lock:
            return {
                name: {"pages": len(pool), **(pool.store.stats()._asdict() if pool.store else {})}
                for name, pool in self._pools.items()
            }

    # ---- pages of SGLang's host pools ----

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Stores pages of the registered host pool; host_indices: of their tokens."""
        return self._write(_KV, self.mem_pool_host, keys, host_indices)

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Loads pages into the registered host pool."""
        return self._read(_KV, self.mem_pool_host, keys, host_indices)

    def batch_set_v2(self, transfers: Sequence[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """The same for several host pools."""
        return self._of_pools(transfers, self._write)

    def batch_get_v2(self, transfers: Sequence[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """The same for several host pools."""
        return self._of_pools(transfers, self._read)

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """How many pages from the first on can be used: of the KV-cache, and, as each asks for it, of other pools."""
        with self._lock:
            usable = hits = _leading(key in self._pool() for key in keys)
            found = {_KV: hits} if hits else {}
            for transfer in pool_transfers or ():
                if usable == 0:
                    break
                there = [key in self._pool(transfer.name) for key in keys[:hits]]
                if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                    count = _leading(there)
                else:
                    trailing = max(1, len(transfer.keys or ()))
                    ends = (end for end in range(hits, 0, -1) if all(there[max(0, end - trailing) : end]))
                    count = next(ends, 0)
                if count:
                    found[transfer.name] = count
                usable = min(usable, count)
        return PoolTransferResult(usable, found)

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
        with self._lock:
            return [
                at is not None and self._pool(name).put(key, host.get_data_page(at, flat=True))
                for key, at in zip(keys, _page_starts(host, keys, host_indices))
            ]

    def _read(self, name: str, host: Any, keys: Sequence[str], host_indices: Any) -> list[bool]:
        results = []
        for key, at in zip(keys, _page_starts(host, keys, host_indices)):
            page = host.get_dummy_flat_data_page()
            with self._lock:
                found = at is not None and self._pool(name).get(key, page)
            if found:
                host.set_from_flat_data_page(at, page)
            results.append(found)
        return results


def _page_starts(host: Any, keys: Sequence[str], host_indices: Any) -> list[int | None]:
    """The first token of each page; None where there are not as many tokens as pages have: what raises here ends the
    thread of SGLang that calls."""
    size = getattr(host, "page_size", 1) or 1
    if host_indices is None or host_indices.numel() != len(keys) * size:
        return [None] * len(keys)
    return [int(at) for at in host_indices[::size]]


def _leading(are_there: Any) -> int:
    count = 0
    for there in are_there:
        if not there:
            break
        count += 1
    return count
