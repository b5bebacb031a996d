"""A second tier for LMCache that keeps coded objects in host memory. LMCache's adapter type "plugin" loads it.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "ibp.integrations.lmcache",
        "class_name": "IBPL2Adapter", "adapter_params": {"pool_bytes": 34359738368}}'

`docs/serving.md` lists the tested releases, and says how they were tested. Objects are chunks of a KV-cache. Objects of
the same size share a pool, an `ibp.kv.KeyedPages`. If a pool is full, it drops the least recently used objects, except
those that LMCache has locked in order to load them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import ibp

from .shared import Tasks, check_engine, pages_by

try:
    from lmcache.lmcache_native import Bitmap  # type: ignore
    from lmcache.v1.distributed.internal_api import L2StoreResult  # type: ignore
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface  # type: ignore
    from lmcache.v1.platform import create_event_notifier  # type: ignore

    _missing: ImportError | None = None
except ImportError as error:
    L2AdapterInterface = object
    _missing = error

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import ObjectKey  # type: ignore
    from lmcache.v1.memory_management import MemoryObj  # type: ignore

__all__ = ["IBPL2Adapter"]


class IBPL2Adapter(L2AdapterInterface):
    """Stores LMCache's objects in coded form. LMCache makes this adapter from `module_path` and `class_name`.

    `adapter_params` has these options: `pool_bytes`, the size of each pool's host memory in bytes; optionally `device`,
    the device that codes, "cpu" (the default) or "cuda"; and `level`, "default" or "fast". Stores, lookups and loads
    run on three separate threads. If the pool has no room for an object, the object is not stored, and LMCache does not
    find it later. The sizes that LMCache is told are the original sizes of objects.

    Raises:
        ImportError: LMCache is not installed, or lacks a class that is needed.
        ValueError: `pool_bytes` is missing.
    """

    def __init__(self, adapter_params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        check_engine("lmcache", _missing)
        self._make_pool = pages_by(adapter_params, "adapter_params")
        super().__init__()
        self._pools: dict[int, ibp.kv.KeyedPages] = {}  # by the size of an object in bytes
        # (key, size in bytes) of dropped objects that LMCache has not been told of yet. Several threads put and take
        # entries.
        self._dropped: queue.SimpleQueue[tuple[ObjectKey, int]] = queue.SimpleQueue()
        self._notifiers = [create_event_notifier() for _ in range(3)]
        numbers = itertools.count()
        self._stores, self._lookups, self._loads = (Tasks(numbers, each.notify) for each in self._notifiers)

    def _pool(self, num_bytes: int) -> ibp.kv.KeyedPages:
        if num_bytes in self._pools:
            return self._pools[num_bytes]
        on_drop = functools.partial(self._note_dropped, num_bytes)
        return self._pools.setdefault(num_bytes, self._make_pool(on_drop=on_drop))

    # ---- tasks ----

    def get_store_event_fd(self) -> int:
        return self._notifiers[0].fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._notifiers[1].fileno()

    def get_load_event_fd(self) -> int:
        return self._notifiers[2].fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begins to store objects. Returns the number of the task."""
        return self._stores.submit(self._store, keys, objects, failed=L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Returns {number of the task: (success, original size in bytes of the objects that were stored)} for the tasks
        that have ended since the last call."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: Any) -> int:
        """Begins to look for objects. Returns the number of the task. Objects that are found cannot be dropped until
        `submit_unlock` is called for them."""
        return self._lookups.submit(self._find, keys, failed=Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Returns a bitmap of the objects that a lookup has found, and drops it. Returns None if the lookup has not
        ended."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Unlocks objects that a lookup has locked, so that they may be dropped again."""
        for pool in list(self._pools.values()):
            for key in keys:
                pool.unpin(key)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begins to load stored objects into the memory of `objects`. Returns the number of the task."""
        return self._loads.submit(self._load, keys, objects, failed=Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Returns a bitmap of the objects that have been loaded, and drops it. Returns None if the load has not
        ended."""
        return self._loads.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Removes objects, even if they are locked."""
        for num_bytes, pool in list(self._pools.items()):
            for key in filter(pool.delete, keys):
                self._note_dropped(num_bytes, key)
        self._tell_dropped()

    def report_status(self) -> dict[str, Any]:
        """Returns LMCache's status fields. The field "pools" maps the size in bytes of an object to the statistics of
        the pool for this size: the result of `ibp.kv.KeyedPages.stats`, as a dict."""
        pools = {num_bytes: pool.stats().as_dict() for num_bytes, pool in list(self._pools.items())}
        return {"is_healthy": True, "type": type(self).__name__, "pools": pools}

    def close(self) -> None:
        """Waits for the tasks that are running, and frees the pools. Tasks that have not begun do not run."""
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        for notifier in self._notifiers:
            notifier.close()
        self._pools.clear()

    # ---- implementation ----

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        stored = []
        for key, memory in zip(keys, objects):
            page = _page_of(memory)
            pool = self._pool(page.nbytes)
            if key not in pool and pool.put(key, page):
                stored.append((key, page.nbytes))
        if stored:
            self._notify_keys_stored(*map(list, zip(*stored)))
        self._tell_dropped()
        return L2StoreResult(True, sum(num_bytes for _, num_bytes in stored))

    def _find(self, keys: Sequence[ObjectKey]) -> Bitmap:
        found = Bitmap(len(keys))
        for number, key in enumerate(keys):
            if any(pool.pin(key) for pool in list(self._pools.values())):
                found.set(number)
        return found

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        loaded, accessed = Bitmap(len(keys)), []
        for number, (key, memory) in enumerate(zip(keys, objects)):
            page = _page_of(memory)
            if self._pool(page.nbytes).get(key, page):
                loaded.set(number)
                accessed.append(key)
        if accessed:
            self._notify_keys_accessed(accessed)
        self._tell_dropped()
        return loaded

    def _note_dropped(self, num_bytes: int, key: ObjectKey) -> None:
        self._dropped.put((key, num_bytes))

    def _tell_dropped(self) -> None:
        dropped = []
        with contextlib.suppress(queue.Empty):
            while True:
                dropped.append(self._dropped.get_nowait())
        if dropped:
            self._notify_keys_deleted(*map(list, zip(*dropped)))


def _page_of(memory: MemoryObj) -> torch.Tensor:
    """Returns the memory of an object, without the padding past its end. The result has the object's dtype if its size
    is a multiple of the dtype's size."""
    page, dtype = memory.raw_tensor[: memory.get_size()], memory.get_dtype()
    return page.view(dtype) if dtype is not None and page.nbytes % dtype.itemsize == 0 else page
