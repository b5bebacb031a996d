"""The manners of what counts: `Statistics`, and `savings` of all that has coded bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any


def share_saved(num_bytes: int, stored_bytes: int) -> float:
    """1 - stored_bytes / num_bytes; 0 of nothing, and negative where more is stored than there was. num_bytes: of
    tensors before coding. stored_bytes: after it. The caller says whether headers, index and codebooks count."""
    return 1 - stored_bytes / num_bytes if num_bytes else 0.0


def shown_memory(nbytes: int, original_bytes: int) -> str:
    """The memory that coded bytes take with all that belongs to them, and its share of the plain tensors' bytes, as
    every `repr` begins with it: what coded rows save is not the memory that is saved."""
    share = f" ({nbytes / original_bytes:.1%} of {original_bytes:,})" if original_bytes else ""
    return f"nbytes={nbytes:,}{share}"


class Saves:
    """The savings of something that has `original_bytes` and `stored_bytes`."""

    @property
    def savings(self: Any) -> float:
        """1 - stored_bytes / original_bytes; 0 of nothing."""
        return share_saved(self.original_bytes, self.stored_bytes)


class Statistics:
    """What `stats()` gives: a frozen dataclass that names its counters, with fractions of them as properties. It
    unpacks as a tuple of the counters."""

    def as_dict(self) -> dict[str, Any]:
        """Counters and fractions by name."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        names += [name for name in dir(type(self)) if isinstance(getattr(type(self), name), property)]
        return {name: getattr(self, name) for name in names}

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]
