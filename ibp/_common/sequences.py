"""Rounds numbers up to multiples of a unit, cuts sequences into parts, and processes items on other threads, ahead of
the caller."""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_workers = threading.local()  # Has the attribute `is_one` in the threads of `in_threads`.


def rounded_up(number: int, unit: int) -> int:
    """Returns the least multiple of a unit that is at least `number`."""
    return -(-number // unit) * unit


def cut(items: Iterable[Item], size_of: Callable[[Item], int], most: int | None) -> list[list[Item]]:
    """Divides items, in their order, into parts. Returns the list of parts. If there are no items, the list has one
    empty part.

    Args:
        size_of: returns the size of an item in bytes.
        most: the largest size in bytes of a part that has several items. None: all items are in one part.
    """
    parts: list[list[Item]] = [[]]
    used = 0
    for item in items:
        num_bytes = size_of(item)
        if most is not None and used and used + num_bytes > most:
            parts.append([])
            used = 0
        parts[-1].append(item)
        used += num_bytes
    return parts


def one_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Yields the items in order. Before it yields an item, it takes the next one from the iterable. It keeps no
    reference to an item that it has yielded."""
    coming: deque[Item] = deque()
    for item in items:
        coming.append(item)
        if len(coming) > 1:
            yield coming.popleft()
    yield from coming


def ahead(
    threads: Executor, work: Callable[[Item], Result], items: Iterable[Item], num_ahead: int
) -> Generator[Result, None, None]:
    """Calls work(item) for each item on the executor `threads`, and yields the results in the order of the items. If
    the generator is closed early, no more calls begin.

    Args:
        num_ahead: before the result of an item is yielded, this number of later items are submitted.
    """
    coming: deque[Future[Result]] = deque()
    try:
        for item in items:
            coming.append(threads.submit(work, item))
            if len(coming) > num_ahead:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        for future in coming:
            future.cancel()


def in_threads(
    work: Callable[[Item], Result], items: Iterable[Item], num_threads: int
) -> Generator[Result, None, None]:
    """Calls work(item) for each item, on up to num_threads threads. Yields the results in the order of the items.
    At most 2 * num_threads items after the next one to be yielded are begun, so that few results wait in memory.
    After an exception, or if the generator is closed early, no more calls begin.

    If num_threads or the number of items is 1, the calling thread makes the calls. If the calling thread was itself
    started by `in_threads`, it also makes the calls, because other threads of that call are working at the same time.
    """
    num_threads = min(num_threads, operator.length_hint(items, num_threads))
    if num_threads <= 1 or hasattr(_workers, "is_one"):
        yield from map(work, items)
        return
    with ThreadPoolExecutor(num_threads, "ibp-worker", setattr, (_workers, "is_one", True)) as threads:
        yield from ahead(threads, work, items, 2 * num_threads)
