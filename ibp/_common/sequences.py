"""Sequences cut into parts, and worked on ahead of who asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def cut(items: Iterable[Item], size_of: Callable[[Item], int], most: int | None) -> list[list[Item]]:
    """The items in parts, in their order: as many in each as have `most` bytes together, at least one; None: all in
    one part, which may be empty."""
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
    """The items in their order, each once the next one is there too. None is kept that the caller has had."""
    coming: deque[Item] = deque()
    for item in items:
        coming.append(item)
        if len(coming) > 1:
            yield coming.popleft()
    yield from coming


def ahead(
    threads: Executor, work: Callable[[Item], Result], items: Iterable[Item], num_ahead: int
) -> Generator[Result, None, None]:
    """The results of `work` for each item, in their order. num_ahead: items that are worked on, or wait, while the
    caller has a result. When the generator ends early no more are begun."""
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
