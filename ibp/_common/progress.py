"""`tqdm`, which makes a progress bar whose lock is not shared with other processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import tqdm as _tqdm

from .process import Closing


class _Bar(_tqdm.tqdm):
    """tqdm's bar with a lock of this process alone. tqdm's own lock is shared with forked processes. If one of them
    were killed while it holds the lock, the others would wait for the lock forever."""

    _lock = threading.RLock()


os.register_at_fork(after_in_child=lambda: _Bar.set_lock(threading.RLock()))


class _Hidden(Closing):
    """A bar that is not shown. It takes no lock, unlike tqdm's hidden bar, where an interrupt in a thread that holds
    the lock would make all other threads wait forever."""

    def __init__(self, iterable: Iterable[Any] | None) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self._iterable or ())

    def update(self, n: float | None = 1) -> None:
        pass

    def close(self) -> None:
        pass


Bar = _Bar | _Hidden


def tqdm(iterable: Iterable[Any] | None = None, *, disable: bool = False, **options: Any) -> Bar:
    """Returns a progress bar. The arguments are those of tqdm's class `tqdm`."""
    return _Hidden(iterable) if disable else _Bar(iterable, **options)
