"""Cuts sequences into parts, and works on items before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def cut(items: Iterable[Item], size_of: Callable[[Item], int], most: int | None) -> list[list[Item]]:
    """Returns the items in parts, in order. Each part has as many items as have `most` bytes together, but at least
    one. None: all items are in one part, which may be empty."""
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
    """Yields the items in order, each when the next one is also there. It keeps no item that the caller has had."""
    coming: deque[Item] = deque()
    for item in items:
        coming.append(item)
        if len(coming) > 1:
            yield coming.popleft()
    yield from coming


def ahead(
    threads: Executor, work: Callable[[Item], Result], items: Iterable[Item], num_ahead: int
) -> Generator[Result, None, None]:
    """Yields the results of `work` for each item, in order. num_ahead: number of further items that are submitted
    before a result is yielded. If the generator ends early, no more items are begun."""
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
