"""Defines `Statistics`, the base class of counters, and computes `savings` for all classes that have coded bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any


def share_saved(num_bytes: int, stored_bytes: int) -> float:
    """Returns the fraction of the bytes that coding saves: 1 - stored_bytes / num_bytes, or 0 if num_bytes is 0. It is
    negative if coding has made the tensors larger.

    Args:
        num_bytes, stored_bytes: size in bytes of the tensors before and after coding. The caller decides whether
            headers, the index and codebooks count.
    """
    return 1 - stored_bytes / num_bytes if num_bytes else 0.0


def shown_memory(nbytes: int, original_bytes: int) -> str:
    """Returns a string for the `repr` of coded objects: the size of all memory that coded tensors take, and the ratio
    of this size to the size of the plain tensors. The memory includes the index and codebooks, so the ratio cannot be
    computed from `savings`, for which only coded rows and codebooks count.

    Example:
        >>> ibp.adapters.shown_memory(1500, 2000)
        'nbytes=1,500 (75.0% of 2,000)'

    Args:
        nbytes: size in bytes of all memory that coded tensors take.
        original_bytes: size in bytes of the plain tensors. 0: the ratio is not shown.
    """
    share = f" ({nbytes / original_bytes:.1%} of {original_bytes:,})" if original_bytes else ""
    return f"nbytes={nbytes:,}{share}"


class Saves:
    """Adds `savings` to classes that have `original_bytes` and `stored_bytes`."""

    @property
    def savings(self: Any) -> float:
        """1 - stored_bytes / original_bytes; 0 if original_bytes is 0."""
        return share_saved(self.original_bytes, self.stored_bytes)


class Statistics:
    """Base class of the objects that `stats()` returns. A subclass is a frozen dataclass. Its fields are counters, and
    its properties are fractions that are computed from the counters. An object can be unpacked like a tuple of the
    counters."""

    def as_dict(self) -> dict[str, Any]:
        """Returns counters and fractions by name."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        names += [name for name in dir(type(self)) if isinstance(getattr(type(self), name), property)]
        return {name: getattr(self, name) for name in names}

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]
