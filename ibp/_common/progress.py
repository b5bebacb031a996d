"""Progress bars."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import tqdm as _tqdm

from .closing import Closing


class _Bar(_tqdm.tqdm):
    """tqdm's bar with a lock that belongs to this process alone. tqdm's own lock is shared with forked processes: a
    process that is killed while it holds the lock would stop all others for good."""

    _lock = threading.RLock()


os.register_at_fork(after_in_child=lambda: _Bar.set_lock(threading.RLock()))


class _Hidden(Closing):
    """A bar that is not shown. It takes no lock. tqdm's hidden bar does take one: an interrupt in a thread that
    holds it would stop all other threads."""

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
    """Returns a bar of tqdm, with the arguments of its class of the same name."""
    return _Hidden(iterable) if disable else _Bar(iterable, **options)
