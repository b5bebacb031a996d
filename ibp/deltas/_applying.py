"""How deltas are applied: all of a call, or none."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .._fetch.streaming import decompress
from .._machine import staging
from .._rows.faults import CorruptTableError
from . import _on_cpu, _on_gpu
from ._coding import bits_of, integers_of, note_change
from ._fingerprint import DeltaMismatchError, check_source, fingerprint
from ._on_pieces import InPieces, Pieces

if TYPE_CHECKING:
    from ._tensors import Delta

    Job = tuple[str, Delta, "Base"]  # name for messages, delta, base

Base = torch.Tensor | Pieces
Batch = _on_gpu.DeltaBatch | _on_cpu.InPlace | InPieces


def apply_all(jobs: Sequence[Job], whole: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
    """Applies deltas to tensors, or pieces, that share no memory. whole: pairs of a tensor and its new values, which
    are copied when all deltas are applied.

    Raises:
        As `Delta.apply_`; then all bases are as they were.
    """
    for job in jobs:
        _check_base(*job)
    jobs = [(name, delta, base.detach() if isinstance(base, torch.Tensor) else base) for name, delta, base in jobs]
    ways = [_way_of(delta, base) for _, delta, base in jobs]
    others = [job for job, way in zip(jobs, ways) if way is None]
    for job in others:
        _check_fingerprint(*job)
    made = [(base.detach(), new) for base, new in whole]
    for name, delta, base in others:
        if not delta.is_empty:
            assert isinstance(base, torch.Tensor)
            made.append((base, _new_version(name, delta, base)))
    begun: list[Batch] = []
    try:
        for batch in _batches(jobs, ways):
            begun.append(batch)
            batch.apply()
            if batch.wrong is not None:
                _refuse(*jobs[batch.wrong])
        for batch in begun:
            batch.wait()
            if batch.wrong is not None:
                _refuse(*jobs[batch.wrong])
        if made:
            staging.copy_all([bits_of(base) for base, _ in made], [bits_of(new) for _, new in made])
    except BaseException:
        for batch in begun:
            batch.take_back()
        raise
    finally:
        note_change(base for _, _, base in jobs if isinstance(base, torch.Tensor))


def _way_of(delta: Delta, base: Base) -> type[Batch] | None:
    """What changes a base where it is; None: a new version is made beside it."""
    if isinstance(base, Pieces):
        return InPieces
    if _on_gpu.can_apply(delta, base):
        return _on_gpu.DeltaBatch
    return _on_cpu.InPlace if _on_cpu.can_apply(delta, base) else None


def _batches(jobs: Sequence[Job], ways: Sequence[type[Batch] | None]) -> Iterator[Batch]:
    """What is applied in place, by numbers of jobs: by GPUs all that have one codebook at once, the others one after
    the other."""
    keys: dict[int, tuple[Hashable, ...]] = {}  # of codebooks, which deltas often share
    groups: dict[tuple[Hashable, ...], list[int]] = {}
    for index, (_, delta, base) in enumerate(jobs):
        if ways[index] is _on_gpu.DeltaBatch:
            book = id(delta.table.codebook)
            if book not in keys:
                keys[book] = _on_gpu.coding_key(delta)
            groups.setdefault((base.device, *keys[book]), []).append(index)
    for indices in groups.values():
        bases = [base for base in (jobs[i][2] for i in indices) if isinstance(base, torch.Tensor)]
        yield _on_gpu.DeltaBatch(indices, [jobs[i][1] for i in indices], bases)
    for index, (_, delta, base) in enumerate(jobs):
        if isinstance(base, Pieces):
            yield InPieces(index, delta, base)
        elif ways[index] is _on_cpu.InPlace:
            yield _on_cpu.InPlace(index, delta, base)


def _refuse(name: str, delta: Delta, base: Base) -> NoReturn:
    """Raises what is wrong with a delta that was not applied."""
    _check_fingerprint(name, delta, base)
    raise _damaged(name, delta)


def _check_base(name: str, delta: Delta, base: Any) -> None:
    if not isinstance(base, Pieces):
        if not isinstance(base, torch.Tensor):
            raise TypeError(f"{name} is a {type(base).__name__}; wanted a torch.Tensor")
        check_source(base, name)
    if base.dtype != delta.dtype:
        raise TypeError(f"{name} has dtype {base.dtype}; the delta is for {delta.dtype}")
    if isinstance(base, torch.Tensor) and (base.is_conj() or base.is_neg()):
        raise TypeError(f"{name} is a conjugated or negated view of other memory; wanted the tensor itself")
    if base.shape != delta.shape:
        raise DeltaMismatchError(f"{name} has shape {list(base.shape)}; the delta is for {list(delta.shape)}")


def _check_fingerprint(name: str, delta: Delta, base: Base) -> None:
    found = fingerprint(base if isinstance(base, torch.Tensor) else base.read())
    if found != delta.base:
        raise DeltaMismatchError(
            f"{name} has fingerprint {found:016x}; the delta is for a tensor with fingerprint {delta.base:016x}"
        )


def _new_version(name: str, delta: Delta, base: torch.Tensor) -> torch.Tensor:
    new = decompress(delta.table, device=base.device, check=True)
    integers_of(new).add_(integers_of(base))
    if fingerprint(new) != delta.result:
        raise _damaged(name, delta)
    return new


def _damaged(name: str, delta: Delta) -> CorruptTableError:
    return CorruptTableError(
        f"{name} would not become the tensor with fingerprint {delta.result:016x}: the delta is damaged"
    )
