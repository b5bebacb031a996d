"""Applies the deltas of a call. If an error occurs, no delta is applied: the changes that have been made are undone.

A job is a delta and the base to which it is applied. Jobs are done in batches. There are three classes of batches, with
the same methods: `InPlace`, `InPieces`, and `DeltaBatch` for several jobs on a GPU. If a batch runs on a GPU, `begin`
queues its work and `apply` waits for it; otherwise `apply` does the work. `take_back` undoes the changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .._layout.geometry import bytes_of
from .._machine import staging
from .._rows.faults import CorruptTableError, new_record
from .._rows.table import handle_on
from . import _on_gpu
from ._coding import bits_of, element_bytes_of, note_change
from ._fingerprint import DeltaMismatchError, check_source, fingerprint
from ._on_pieces import InPieces, Pieces, in_one_piece

if TYPE_CHECKING:
    from ._tensors import Delta

    Job = tuple[str, Delta, "Base"]  # name of the base for messages, delta, base

Base = torch.Tensor | Pieces


class InPlace:
    """The batch of one job whose base is on the CPU and contiguous. The differences are added in the base's own memory.

    Attributes:
        indices: a list of one number, the index of the job.
    """

    def __init__(self, index: int, delta: Delta, base: torch.Tensor) -> None:
        self.indices = [index]
        self._delta, self._base = delta, bytes_of(base)
        self._table = delta.to("cpu").table
        self._is_begun = False

    def begin(self) -> None:
        """Does nothing, because `apply` does all the work."""

    def apply(self) -> int | None:
        """Applies the delta and returns None. If the base is not the one that the delta was made for, or if the delta
        is damaged, leaves the base unchanged and returns the index of the job."""
        before = fingerprint(self._base)
        if before != self._delta.base:
            return self.indices[0]
        self._is_begun = True
        change, is_good = self._add(False)
        if is_good and (before + change) % 2**64 == self._delta.result:
            return None
        self.take_back()
        return self.indices[0]

    def take_back(self) -> None:
        """Undoes `apply`, even if it was interrupted. Does nothing if the base has not changed."""
        if self._is_begun and fingerprint(self._base) != self._delta.base:
            self._add(True)

    def _add(self, subtracts: bool) -> tuple[int, bool]:
        """Adds the differences to the base, or subtracts them. Corrupt rows are skipped. Returns (the change of the
        base's fingerprint, modulo 2^64; whether no row is corrupt)."""
        change, fault = torch.zeros(1, dtype=torch.int64, device="cpu"), new_record()
        width = element_bytes_of(self._delta.dtype)
        table = handle_on(self._table, torch.device("cpu")).table
        torch.ops.ibp.add_rows.default(table, width, subtracts, self._base, change, fault)
        return int(change), not int(fault[0])


Batch = _on_gpu.DeltaBatch | InPlace | InPieces


def apply_all(jobs: Sequence[Job], whole: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
    """Applies deltas to bases that share no memory with each other.

    Args:
        jobs: (name of the base for messages, delta, base).
        whole: (tensor, its new values). The values are copied to the tensors after all deltas have been applied.

    Raises:
        As in `Delta.apply_`. All bases are then as they were before the call.
    """
    for job in jobs:
        _check_base(*job)
    jobs = [(name, delta, base.detach() if isinstance(base, torch.Tensor) else base) for name, delta, base in jobs]
    begun: list[Batch] = []
    try:
        for batch in _batches(jobs):
            begun.append(batch)
            batch.begin()
        for batch in begun:
            wrong = batch.apply()
            if wrong is not None:
                _refuse(*jobs[wrong])
        if whole:
            staging.copy_all([bits_of(base.detach()) for base, _ in whole], [bits_of(new) for _, new in whole])
    except BaseException:
        for batch in begun:
            batch.take_back()
        raise
    finally:
        note_change(base for _, _, base in jobs if isinstance(base, torch.Tensor))


def _batches(jobs: Sequence[Job]) -> Iterator[Batch]:
    """Divides jobs into batches. All jobs on one GPU whose deltas have equal codebooks are one batch, if the kernels
    support these deltas. Every other job is a separate batch. If its base is a contiguous tensor on the CPU, and the
    size of a row is a multiple of 8 bytes, the delta is applied in place (`InPlace`); otherwise it is applied to a copy
    of the base (`InPieces`)."""
    # The results of coding_key, by identity of the codebook and dtype, because deltas often share a codebook.
    keys: dict[tuple[Hashable, ...], tuple[Hashable, ...] | None] = {}
    groups: dict[tuple[Hashable, ...], list[tuple[int, Delta, torch.Tensor]]] = {}
    others: list[Batch] = []
    for index, (_, delta, base) in enumerate(jobs):
        if isinstance(base, Pieces):
            others.append(InPieces(index, delta, base))
            continue
        key = None
        if _on_gpu.can_apply(delta, base):
            book = id(delta.table.codebook), delta.dtype
            if book not in keys:
                keys[book] = _on_gpu.coding_key(delta)
            key = keys[book]
        if key is not None:
            groups.setdefault((base.device, *key), []).append((index, delta, base))
        elif base.device.type == "cpu" and base.is_contiguous() and base.numel() and delta.table.row_bytes % 8 == 0:
            others.append(InPlace(index, delta, base))
        else:
            others.append(InPieces(index, delta, in_one_piece(base)))
    for group in groups.values():
        yield _on_gpu.DeltaBatch(*zip(*group))
    yield from others


def _refuse(name: str, delta: Delta, base: Base) -> NoReturn:
    """Raises the error for a delta that was not applied: DeltaMismatchError if the base does not have the fingerprint
    that the delta names, else CorruptTableError."""
    found = fingerprint(base if isinstance(base, torch.Tensor) else base.read())
    if found != delta.base:
        advice = "were new and base exchanged in ibp.deltas.make(new, base), or has the delta been applied before?"
        raise DeltaMismatchError(
            f"{name} has fingerprint {found:016x}; the delta is for a tensor with fingerprint {delta.base:016x}"
            + (f", and makes what is there: {advice}" if found == delta.result else "")
        )
    raise CorruptTableError(
        f"{name} would not become the tensor with fingerprint {delta.result:016x}: the delta is damaged"
    )


def _check_base(name: str, delta: Delta, base: Any) -> None:
    """Raises TypeError or DeltaMismatchError unless a base is a tensor or a `Pieces` with the dtype and shape of a
    delta."""
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
