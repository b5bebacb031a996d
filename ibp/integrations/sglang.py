"""SGLang's hierarchical cache with a tier of coded pages in host memory, by its storage backend "dynamic".

    python -m sglang.launch_server --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "ibp", "module_path": "ibp.integrations.sglang",
        "class_name": "IBPHiCacheStorage", "interface_v1": 1, "pool_bytes": 34359738368}'

For SGLang 0.5.10 and newer. `docs/kv-cache.md` names the versions that were tried, and how. Pages are kept by their
keys in pools of `ibp.kv.KVStore`, one for each of SGLang's host pools; those used longest ago make room.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import ibp

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
_KEY_BYTES = 256  # of host memory for a key: what a page without bytes counts as
_PUTS_A_COMPACTION = 16  # overflow is compacted at most once in such a part of the pages


class _HostPool:
    """Pages of one size by their keys. The codebook and the number of pages come from the first one that is stored.

    Pages may have no bytes: the KV pool of a model whose other pools hold all there is has keys alone."""

    def __init__(self, pool_bytes: int, device: str, level: str) -> None:
        self._pool_bytes, self._device, self._level = pool_bytes, device, level
        self._page_bytes: int | None = None
        self.store: ibp.kv.KVStore | None = None
        self._pages: OrderedDict[str, int] = OrderedDict()  # those used last at the end
        self._free: list[int] = []
        self._num_put = 0  # since the last compaction

    def __contains__(self, key: str) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def put(self, key: str, value: torch.Tensor) -> bool:
        """Stores a page. False where it finds no room."""
        if key in self._pages:
            self._pages.move_to_end(key)
            return True
        value = value.detach().contiguous().view(1, -1)
        if self._page_bytes is None:
            self._page_bytes = value.nbytes
        if value.nbytes != self._page_bytes:
            return False
        if value.nbytes == 0:
            if len(self._pages) >= self._pool_bytes // _KEY_BYTES:
                self._pages.popitem(last=False)
            self._pages[key] = 0
            return True
        if self.store is None:
            options: dict[str, Any] = {"pool_bytes": self._pool_bytes, "level": self._level, "device": self._device}
            self.store = ibp.kv.KVStore(value, page_bytes=value.nbytes, **options)
            self._free = list(range(self.store.num_pages))[::-1]
        if not (self._free or self._pages):
            return False
        page = self._free.pop() if self._free else self._pages.popitem(last=False)[1]
        self._num_put += 1
        if not self._is_put(self.store, page, value.to(self._device)):
            self._free.append(page)
            return False
        self._pages[key] = page
        return True

    def _is_put(self, store: ibp.kv.KVStore, page: int, value: torch.Tensor) -> bool:
        if not store.store([page], value, [0]).lost():
            return True
        if self._num_put <= store.num_pages // _PUTS_A_COMPACTION:
            return False
        self._num_put = 0
        store.compact()
        return not store.store([page], value, [0]).lost()

    def get(self, key: str, out: torch.Tensor) -> bool:
        """Loads a page into a contiguous tensor. False where it is not there."""
        if key not in self._pages or out.nbytes != self._page_bytes:
            return False
        if self.store is not None and not self._is_got(self.store, key, out):
            return False
        self._pages.move_to_end(key)
        return True

    def _is_got(self, store: ibp.kv.KVStore, key: str, out: torch.Tensor) -> bool:
        near = out.view(1, -1) if out.device == store.device else torch.empty_like(out, device=self._device)
        try:
            store.load([self._pages[key]], near.view(1, -1), [0]).synchronize()
        except (IndexError, ibp.CorruptTableError):
            self._free.append(self._pages.pop(key))
            return False
        if near.device != out.device:
            out.copy_(near)
        return True

    def clear(self) -> None:
        self._pages.clear()
        if self.store is not None:
            self.store.clear()
            self._free = list(range(self.store.num_pages))[::-1]


class IBPHiCacheStorage(HiCacheStorage):
    """What SGLang makes by `module_path` and `class_name`.

    Of the extra config it reads `pool_bytes`, bytes of host memory for the pages of each host pool, and optionally:
    `device`, "cpu" (the default: pages are coded where they are) or "cuda"; `level`, "default" or "fast". Calls come
    back when they are done; threads may call at the same time.

    Raises:
        ImportError: SGLang is not there.
        ValueError: `pool_bytes` is missing, or an MLA model runs on several tensor-parallel ranks: one of them alone
            gives its pages to the storage, and a page is found only where all ranks have it.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        if _missing is not None:
            raise ImportError(
                "ibp.integrations.sglang needs SGLang with sglang.srt.mem_cache.hicache_storage"
            ) from _missing
        options = storage_config.extra_config or {}
        if not options.get("pool_bytes"):
            raise ValueError("the extra config has no pool_bytes: bytes of host memory for coded pages")
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise ValueError(
                f"an MLA model on {storage_config.tp_size} tensor-parallel ranks: SGLang has one of them store pages, "
                "and each rank keeps its own; wanted one rank for attention, such as --enable-dp-attention gives"
            )
        self._options = int(options["pool_bytes"]), options.get("device", "cpu"), options.get("level", "default")
        self._pools: dict[str, _HostPool] = {}
        self._lock = threading.Lock()

    def _pool(self, name: str = _KV) -> _HostPool:
        name = str(getattr(name, "value", name))
        if name not in self._pools:
            self._pools[name] = _HostPool(*self._options)
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

    def close(self) -> None:
        """Forgets all pages, and frees the pools."""
        with self._lock:
            self._pools.clear()

    def stats(self) -> dict[str, dict[str, int]]:
        """By host pool: pages, and what `ibp.kv.KVStore.stats` says. SGLang's own `get_stats` gives None, so that its
        metrics count transfers as for backends without numbers of their own."""
        with self._lock:
            return {
                name: {"pages": len(pool), **(pool.store.stats().as_dict() if pool.store else {})}
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
        """How many pages from the first on can be used: the longest prefix that the KV-cache has and that all other
        pools can restore, as each asks for it. BLOCK_GROUPS, a second form of the KV-cache, does not shorten it."""
        with self._lock:
            hits = _leading(key in self._pool() for key in keys)
            found = {_KV: hits} if hits else {}
            usable = list(range(1, hits + 1))
            for transfer in pool_transfers or ():
                if not usable:
                    break
                pool = self._pool(transfer.name)
                if transfer.hit_policy == _BLOCK_GROUPS:
                    count = _covered_by_groups(pool, transfer, keys)
                else:
                    window = hits if transfer.hit_policy == _ALL_PAGES else max(1, len(transfer.keys or ()))
                    lengths = _restorable([key in pool for key in keys[:hits]], window)
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


def _leading(are_there: Iterable[bool]) -> int:
    return sum(1 for _ in itertools.takewhile(bool, are_there))


def _restorable(are_there: Sequence[bool], window: int) -> set[int]:
    """Lengths of the prefixes that end in `window` pages that are there, or are shorter and all there."""
    run, lengths = 0, set()
    for length, there in enumerate(are_there, 1):
        run = run + 1 if there else 0
        if run >= min(length, window):
            lengths.add(length)
    return lengths


def _covered_by_groups(pool: _HostPool, transfer: PoolTransfer, keys: Sequence[str]) -> int:
    """Pages of the KV-cache that the leading groups of a pool's keys cover, as far as a group has all of its pages."""
    size = transfer.group_pages
    if size < 1:
        return 0
    return _leading(key in pool for key in transfer.keys or keys) // size * transfer.block_pages
