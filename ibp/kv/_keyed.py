"""`KeyedPages` stores pages of a KV-cache by key, and drops the least recently used pages when it is full."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch

from .._common.arguments import whole_number
from .._common.process import ForkLock, OfThisProcess
from .._machine.memory import usual
from .._rows.handle import CorruptTableError
from .._rows.learning import check_scheme
from ._store import KVStore, KVStoreStats

_logger = logging.getLogger(__name__)

# An empty page counts as this number of bytes, which is about the size of its key in host memory.
_KEY_BYTES = 256


class KeyedPages(OfThisProcess):
    """A store of pages of one size, which are found by keys. The pages are compressed in a `KVStore`. If there is no
    room for a new page, the least recently used page is dropped.

    The first page that is stored determines the page size, the codebook and the number of pages. A logger whose name
    begins with "ibp." logs the page size and the number of pages at level INFO. The first page must hold real keys and
    values, because the codebook and the size of slots are learned from it. If it is all zeros, slots are so small that
    almost every later page is refused. Later pages of a different size are refused, and a warning is logged for the
    first of them. A page is also refused if the pool's overflow has no room for it. Calls return when their work is
    done. Several threads may call at the same time.

    Example:
        >>> pages = torch.randn(3, 4096).mul(0.02).bfloat16()
        >>> kept = ibp.kv.KeyedPages(1 << 16, device="cpu")
        >>> kept.put("a", pages[0]), kept.put("b", pages[1]), "a" in kept, len(kept)
        (True, True, True, 2)
        >>> out = torch.empty_like(pages[0])
        >>> kept.get("a", out), torch.equal(out, pages[0]), kept.get("c", out)
        (True, True, False)

    Args:
        pool_bytes: size in bytes of the pool in host memory.
        device: the device that compresses and decompresses, as in `KVStore`. Pages themselves may be on the CPU or on
            that device.
        level: level of the codebook, see `ibp.compress`.
        on_drop: a function that is called with the key of each page that is dropped because room is needed or because
            the page is damaged. It must not store, load or delete pages of this object; if it does, RuntimeError is
            raised. None: no function is called.

    Attributes:
        store: the `KVStore`. None until a page that has bytes is stored.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    _instead = "get() its pages into tensors, which can be pickled"

    def __init__(
        self,
        pool_bytes: int,
        *,
        device: torch.device | str | int | None = None,
        level: str = "default",
        on_drop: Callable[[Any], None] | None = None,
    ) -> None:
        check_scheme("planes", level=level)
        self._pool_bytes, self._device = whole_number("pool_bytes", pool_bytes, 0), usual(device)
        self._level, self._on_drop = level, on_drop
        self._lock = ForkLock()
        self.store: KVStore | None = None
        self._pages: OrderedDict[Hashable, int] = OrderedDict()  # the most recently used page is last
        self._pins: Counter[Hashable] = Counter()
        self._free: list[int] = []
        self._has_warned = False  # whether a warning about a tensor of another size has been logged
        self._calls_on_drop = False

    def __contains__(self, key: Hashable) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def put(self, key: Hashable, page: torch.Tensor) -> bool:
        """Stores the bytes of a page, unless a page with this key is stored already. Returns whether a page with this
        key is stored afterwards.

        Returns False if there is no room for the page, for example because all pages are pinned, or if its size in
        bytes is not that of the first page. The dtype does not matter.

        Raises:
            TypeError: page is not a tensor.
        """
        if not isinstance(page, torch.Tensor):
            raise TypeError(f"page is a {type(page).__name__}; wanted a torch.Tensor")
        with self._changing():
            if key in self._pages:
                self._pages.move_to_end(key)
                return True
            page = page.detach().contiguous().view(1, -1)
            if self._page_bytes is not None and not self._has_size_of_pages(page):
                return False
            number = self._number_for(page)
            if number is None:
                return False
            self._pages[key] = number
            return True

    def get(self, key: Hashable, out: torch.Tensor) -> bool:
        """Loads the bytes of a page into a contiguous tensor of any dtype. Returns whether the page was loaded.

        Returns False if no page with this key is stored, or if the size of `out` in bytes is not that of a page. If the
        page is damaged, drops it and returns False.

        Raises:
            TypeError: out is not a tensor.
            ValueError: out is not contiguous.
        """
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"out is a {type(out).__name__}; wanted a torch.Tensor")
        if not out.is_contiguous():
            raise ValueError(f"out is not contiguous: its strides are {out.stride()}; wanted a contiguous tensor")
        with self._changing():
            if key not in self._pages or not self._has_size_of_pages(out):
                return False
            if self.store is not None and not self._is_got(self.store, key, out):
                return False
            self._pages.move_to_end(key)
            return True

    def touch(self, keys: Iterable[Hashable]) -> None:
        """Marks pages as used now, the last key as the most recently used. Keys that are not stored are ignored."""
        with self._lock:
            for key in keys:
                if key in self._pages:
                    self._pages.move_to_end(key)

    def pin(self, key: Hashable) -> bool:
        """Protects a page from being dropped until `unpin` has been called as often as `pin`. Returns False if no page
        with this key is stored."""
        with self._lock:
            if key not in self._pages:
                return False
            self._pins[key] += 1
            return True

    def unpin(self, key: Hashable) -> None:
        """Undoes one `pin`."""
        with self._lock:
            self._pins[key] -= 1
            if self._pins[key] <= 0:
                del self._pins[key]

    def delete(self, key: Hashable) -> bool:
        """Removes a page, even if it is pinned. Returns False if no page with this key is stored."""
        with self._changing():
            if key not in self._pages:
                return False
            self._forget(key)
            return True

    def leading(self, keys: Iterable[Hashable]) -> int:
        """Returns the number of keys before the first key that is not stored."""
        return sum(1 for _ in itertools.takewhile(self._pages.__contains__, keys))

    def restorable(self, keys: Iterable[Hashable], window: int) -> set[int]:
        """Returns the lengths of the prefixes of `keys` for which layers that look back at most `window` keys can be
        restored. These are the prefixes whose last `window` keys are stored, and the prefixes of fewer than `window`
        keys whose keys are all stored."""
        run, lengths = 0, set()
        for length, key in enumerate(keys, 1):
            run = run + 1 if key in self._pages else 0
            if run >= min(length, window):
                lengths.add(length)
        return lengths

    def stats(self) -> KVStoreStats:
        """Returns the store's counts and sizes."""
        with self._lock:
            found = self.store.stats() if self.store is not None else KVStoreStats(0, 0, 0, 0, 0, 0)
            return dataclasses.replace(found, stored_pages=len(self._pages))

    def clear(self) -> None:
        """Removes all pages."""
        with self._changing():
            self._pages.clear()
            self._pins.clear()
            if self.store is not None:
                self.store.clear()
                self._count_free()

    # ---- implementation ----

    @property
    def _page_bytes(self) -> int | None:
        """Size in bytes of a page, or None before the first page."""
        if self.store is not None:
            return self.store.page_bytes
        return 0 if self._pages else None

    def _has_size_of_pages(self, page: torch.Tensor) -> bool:
        """Returns whether a tensor has the size of the first page in bytes. Logs a warning for the first tensor that
        has another size."""
        if page.nbytes != self._page_bytes and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "ibp: a page of %s bytes is refused, as others may be; wanted %s bytes, the size of the first page",
                f"{page.nbytes:,}",
                f"{self._page_bytes:,}",
            )
        return page.nbytes == self._page_bytes

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """A context for calls that change which page numbers are free. It holds the lock. If the call raises or is
        interrupted, it rebuilds the list of free numbers."""
        with self._lock:
            if self._calls_on_drop:
                raise RuntimeError(
                    "on_drop must not store, load or delete pages; note the key and do it after the call"
                )
            try:
                yield
            except BaseException:
                self._count_free()
                raise

    def _count_free(self) -> None:
        """Rebuilds the list of the page numbers that are free."""
        taken, count = set(self._pages.values()), 0 if self.store is None else self.store.num_pages
        self._free = [number for number in reversed(range(count)) if number not in taken]

    def _number_for(self, page: torch.Tensor) -> int | None:
        """Stores a page under a free number, dropping another page if necessary. Returns the number, or None if there
        is no room for the page."""
        if not page.nbytes:  # only the key of an empty page has to be kept
            return 0 if len(self._pages) < self._pool_bytes // _KEY_BYTES or self._drop_oldest() else None
        store, free = self.store, self._free
        if store is None:
            store = KVStore(
                page, page_bytes=page.nbytes, pool_bytes=self._pool_bytes, level=self._level, device=self._device
            )
            free = list(range(store.num_pages))[::-1]
        if not (free or self._drop_oldest()):
            return None
        number = free.pop()
        if not self._is_put(store, number, page.to(store.device)):
            free.append(number)
            return None
        if self.store is None:
            _logger.info(
                "ibp: the first page has %s bytes, which all pages must have; by its codebook %s pages fit the pool, "
                "%.2f times as many as raw ones",
                f"{page.nbytes:,}",
                f"{store.num_pages:,}",
                store.gain,
            )
        self.store, self._free = store, free  # only now: after a refused first page, the next one may have another size
        return number

    def _drop_oldest(self) -> bool:
        """Drops the least recently used page that is not pinned. Returns False if there is no such page."""
        oldest = next((key for key in self._pages if key not in self._pins), None)
        if oldest is None:
            return False
        self._drop(oldest)
        return True

    def _drop(self, key: Hashable) -> None:
        self._forget(key)
        if self._on_drop is not None:
            self._calls_on_drop = True
            try:
                self._on_drop(key)
            finally:
                self._calls_on_drop = False

    def _forget(self, key: Hashable) -> None:
        number = self._pages.pop(key)
        self._pins.pop(key, None)
        if self.store is not None:
            self._free.append(number)

    def _is_put(self, store: KVStore, number: int, page: torch.Tensor) -> bool:
        if not store.store([number], page, [0]).lost():
            return True
        return store.compact_if_due() and not store.store([number], page, [0]).lost()

    def _is_got(self, store: KVStore, key: Hashable, out: torch.Tensor) -> bool:
        near = out.view(1, -1) if out.device == store.device else torch.empty_like(out, device=store.device)
        try:
            store.load([self._pages[key]], near.view(1, -1), [0]).synchronize()
        except (IndexError, CorruptTableError):
            self._drop(key)
            return False
        if near.device != out.device:
            out.copy_(near)
        return True
