"""Progress bars."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import tqdm as _tqdm

from .closing import Closing


class _Bar(_tqdm.tqdm):
    """tqdm's bar, with a lock of this process alone. Its own one is shared with processes that are forked: a process
    that is killed while it has it would stop all others for good."""

    _lock = threading.RLock()


os.register_at_fork(after_in_child=lambda: _Bar.set_lock(threading.RLock()))


class _Hidden(Closing):
    """A bar that is not shown. It takes no lock, which tqdm's does also then: an interrupt in a thread that has it
    would stop all others."""

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
    """A bar of tqdm, as its class of this name makes it."""
    return _Hidden(iterable) if disable else _Bar(iterable, **options)
