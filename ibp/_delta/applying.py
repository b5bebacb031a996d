"""How deltas are applied: all of a call, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._fetch.streaming import decompress
from .._fingerprint import check_source, fingerprint
from .._table import CorruptTableError
from .coding import integers_of
from .tensors import Delta, DeltaMismatchError


def apply_all(jobs: Sequence[tuple[str, Delta, torch.Tensor]]) -> None:
    """Applies deltas to tensors that share no memory. jobs: names for messages, deltas, bases.

    Raises:
        As `Delta.apply_`; then all bases are as they were.
    """
    for name, delta, base in jobs:
        _check_base(name, delta, base)
    made = [(base, _new_version(name, delta, base.detach())) for name, delta, base in jobs if not delta.is_empty]
    for base, new in made:
        base.detach().copy_(new)


def _check_base(name: str, delta: Delta, base: Any) -> None:
    if not isinstance(base, torch.Tensor):
        raise TypeError(f"{name} is a {type(base).__name__}; wanted a torch.Tensor")
    check_source(base, name)
    if base.dtype != delta.dtype:
        raise TypeError(f"{name} has dtype {base.dtype}; the delta is for {delta.dtype}")
    if base.shape != delta.shape:
        raise DeltaMismatchError(f"{name} has shape {list(base.shape)}; the delta is for {list(delta.shape)}")
    found = fingerprint(base.detach())
    if found != delta.base:
        raise DeltaMismatchError(
            f"{name} has fingerprint {found:016x}; the delta is for a tensor with fingerprint {delta.base:016x}"
        )


def _new_version(name: str, delta: Delta, base: torch.Tensor) -> torch.Tensor:
    new = decompress(delta.table, device=base.device, check=True)
    integers_of(new).add_(integers_of(base))
    if fingerprint(new) != delta.result:
        raise damaged(name, delta)
    return new


def damaged(name: str, delta: Delta) -> CorruptTableError:
    return CorruptTableError(
        f"{name} would not become the tensor with fingerprint {delta.result:016x}: the delta is damaged"
    )
