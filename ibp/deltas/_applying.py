"""Applies deltas: all of a call, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._machine import staging
from .._rows.faults import CorruptTableError, new_record
from .._rows.table import handle_on
from ._coding import INTEGERS, PIECE_BYTES, bits_of, element_bytes_of, integers_in, note_change
from ._fingerprint import DeltaMismatchError, check_source
from ._on_pieces import Pieces, Step, fingerprints, in_one_piece

if TYPE_CHECKING:
    from ._tensors import Delta

    Job = tuple[str, Delta, "Base"]  # name for messages, delta, base

Base = torch.Tensor | Pieces


class Change:
    """A delta and its base, which changes in steps. In a step, a piece of the differences is decoded and added.

    Attributes:
        base: the memory that changes.
        before: the fingerprint of the base before the first step. The caller sets it.
    """

    before: int

    def __init__(self, delta: Delta, base: Pieces) -> None:
        self.base, self._delta = base, delta
        width = element_bytes_of(base.dtype)
        self._steps = base.steps(PIECE_BYTES[base.device.type] // width)
        self._num_done = 0
        self._fault = new_record(base.device)

    def apply(self) -> None:
        """Adds the differences. A GPU does so after the call."""
        for step in self._steps:
            self._take(step, False)
            self._num_done += 1

    def take_back(self) -> None:
        """Undoes `apply`, which an exception may have ended. It can have done one step more than it has counted."""
        for step in self._steps[: self._num_done]:
            self._take(step, True)
        if self._num_done < len(self._steps) and fingerprints([self.base]) != [self.before]:
            self._take(self._steps[self._num_done], True)

    def is_damaged(self) -> bool:
        """Waits for `apply`. Returns whether the delta has a damaged row. Zeros are added in its place."""
        return bool(self._fault[0])

    def _take(self, step: Step, subtracts: bool) -> None:
        """Adds or subtracts the differences of a step. Python runs no signal handler before all of it is written."""
        width, rows = element_bytes_of(self.base.dtype), step.rows
        differences = torch.empty(step.end - step.first, dtype=INTEGERS[width], device=self.base.device)
        table = handle_on(self._delta.to(self.base.device).table, self.base.device).table
        bounds = width * step.first, width * step.end
        torch.ops.ibp.decode_bytes.default(table, *bounds, 0, differences, self._fault)
        change = torch._foreach_sub_ if subtracts else torch._foreach_add_
        own = [piece.of(differences, step.first) for piece in step.pieces]
        if rows is not None:
            items = rows.read()
            change([integers_in(items)], own)
            rows.write(items)
            return
        with torch.inference_mode():  # Tensors that were made in inference mode change only here.
            change([piece.memory for piece in step.pieces], own)


def apply_all(jobs: Sequence[Job], whole: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
    """Applies deltas to tensors, or pieces, that share no memory.

    Args:
        whole: pairs of a tensor and its new values, which are copied when all deltas are applied.

    Raises:
        As `Delta.apply_`; then all bases are as they were.
    """
    for job in jobs:
        _check_base(*job)
    changes = [
        Change(delta, in_one_piece(base.detach()) if isinstance(base, torch.Tensor) else base)
        for _, delta, base in jobs
    ]
    for (name, delta, _), change, found in zip(jobs, changes, fingerprints([change.base for change in changes])):
        change.before = found
        if change.base.is_whole and found != delta.base:
            advice = "were new and base exchanged in ibp.deltas.make(new, base), or has the delta been applied before?"
            raise DeltaMismatchError(
                f"{name} has fingerprint {found:016x}; the delta is for a tensor with fingerprint {delta.base:016x}"
                + (f", and makes what is there: {advice}" if found == delta.result else "")
            )
    begun: list[Change] = []
    try:
        for change in changes:
            begun.append(change)
            change.apply()
        _check_results(jobs, changes)
        if whole:
            staging.copy_all([bits_of(base.detach()) for base, _ in whole], [bits_of(new) for _, new in whole])
    except BaseException:
        for change in begun:
            change.take_back()
        raise
    finally:
        note_change(base for _, _, base in jobs if isinstance(base, torch.Tensor))


def _check_results(jobs: Sequence[Job], changes: Sequence[Change]) -> None:
    """Raises CorruptTableError unless all bases have become what their deltas say."""
    results = iter(fingerprints([change.base for change in changes if change.base.is_whole]))
    for (name, delta, _), change in zip(jobs, changes):
        if change.is_damaged() if not change.base.is_whole else next(results) != delta.result:
            raise CorruptTableError(
                f"{name} would not become the tensor with fingerprint {delta.result:016x}: the delta is damaged"
            )


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
