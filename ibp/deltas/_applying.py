"""Applies deltas: all of a call, or none."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._machine import staging
from .._machine.memory import seen_from
from .._rows.faults import CorruptTableError, new_record
from .._rows.handle import Handle, Parts
from .._schemes import coding_of
from ._coding import INTEGERS, bits_of, element_bytes_of, integers_in, note_change
from ._fingerprint import DeltaMismatchError, check_source
from ._on_pieces import Pieces, Step, begin_fingerprints, fingerprints, in_one_piece

if TYPE_CHECKING:
    from ._tensors import Delta

    Job = tuple[str, Delta, "Base"]  # (what messages call the base, delta, base)

Base = torch.Tensor | Pieces


def apply_all(jobs: Sequence[Job], whole: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
    """Applies deltas to tensors, or pieces, that share no memory.

    All bases are read before the first one changes, and again after the last one has changed. A base changes in steps:
    a block of the differences is decoded, and added to the memory. If anything is wrong, or interrupts the call, the
    steps that were taken are undone by the same operations, with the opposite sign.

    Args:
        whole: pairs of a tensor and its new values, which are copied when all deltas are applied.

    Raises:
        TypeError, DeltaMismatchError, CorruptTableError: as `Delta.apply_` raises them. Then all bases are as they
            were.
    """
    for job in jobs:
        _check_base(*job)
    bases = [in_one_piece(base.detach()) if isinstance(base, torch.Tensor) else base for _, _, base in jobs]
    found = begin_fingerprints(bases)
    steps = [(number, step) for number, base in enumerate(bases) for step in base.steps]  # while GPUs read the bases
    before = found()
    for job, base, fingerprint in zip(jobs, bases, before):
        if base.is_whole and fingerprint != job[1].base:
            raise _mismatch(job, fingerprint)
    faults = {device: new_record(device) for device in {base.device for base in bases}}

    @functools.lru_cache(1)  # The steps of a base follow each other.
    def differences_of(number: int) -> Handle:
        device = bases[number].device
        table = jobs[number][1].to(device).table
        codec, words = coding_of(table.codebook, table.row_bytes, device)
        stored = seen_from(device, table.slots), seen_from(device, table.overflow), table.lengths, table.bases
        sizes = table.slot_bytes, 0, table.geometry.num_items, table.geometry.item_bytes
        return Handle(Parts(*stored, words, codec, *sizes))

    def take(number: int, step: Step, subtracts: bool) -> None:
        base = bases[number]
        _take(differences_of(number), base, step, subtracts, faults[base.device])

    num_done = 0
    try:
        for number, step in steps:
            take(number, step, False)
            num_done += 1
        _check_results(jobs, bases, faults)
        if whole:
            staging.copy_all([bits_of(base.detach()) for base, _ in whole], [bits_of(new) for _, new in whole])
    except BaseException:
        for number, step in steps[:num_done]:
            take(number, step, True)
        for number, step in steps[num_done : num_done + 1]:  # The call may have been interrupted behind this step.
            if fingerprints([bases[number]]) != [before[number]]:
                take(number, step, True)
        raise
    finally:
        note_change(base for _, _, base in jobs if isinstance(base, torch.Tensor))


def _mismatch(job: Job, found: int) -> DeltaMismatchError:
    """Returns the error of a job whose base has another fingerprint than the delta wants."""
    name, delta, _ = job
    advice = "were new and base exchanged in ibp.deltas.make(new, base), or has the delta been applied before?"
    return DeltaMismatchError(
        f"{name} has fingerprint {found:016x}; the delta is for a tensor with fingerprint {delta.base:016x}"
        + (f", and makes what is there: {advice}" if found == delta.result else "")
    )


def _take(table: Handle, base: Pieces, step: Step, subtracts: bool, fault: torch.Tensor) -> None:
    """Adds or subtracts the differences of a step. Python runs no signal handler before all of them are written.

    Args:
        fault: a record in which damaged rows are noted. Zeros are added in their place.
    """
    width, device, rows = element_bytes_of(base.dtype), base.device, step.rows
    differences = torch.empty(step.end - step.first, dtype=INTEGERS[width], device=device)
    torch.ops.ibp.decode_bytes.default(table.table, width * step.first, width * step.end, 0, differences, fault)
    own = [piece.of(differences, step.first) for piece in step.pieces]
    if rows is not None:
        items = rows.read()
        _change([integers_in(items)], own, subtracts)
        rows.write(items)
        return
    with torch.inference_mode():  # Tensors that were made in inference mode change only here.
        _change([piece.memory for piece in step.pieces if isinstance(piece.memory, torch.Tensor)], own, subtracts)


def _change(integers: list[torch.Tensor], differences: list[torch.Tensor], subtracts: bool) -> None:
    """Adds differences to integers, or subtracts them, by one operation of torch."""
    if subtracts:
        torch._foreach_sub_(integers, differences)
    else:
        torch._foreach_add_(integers, differences)


def _check_results(jobs: Sequence[Job], bases: Sequence[Pieces], faults: Mapping[torch.device, torch.Tensor]) -> None:
    """Raises CorruptTableError unless all bases have become what their deltas say.

    Args:
        faults: for each device, the record of damaged rows. It counts if the fingerprint of a base is not known here.
    """
    whole = [(job, base) for job, base in zip(jobs, bases) if base.is_whole]
    wrong = [job for (job, _), found in zip(whole, fingerprints([base for _, base in whole])) if found != job[1].result]
    if not wrong and len(whole) < len(jobs):
        damaged = {device for device, fault in faults.items() if int(fault[0])}
        wrong = [job for job, base in zip(jobs, bases) if base.device in damaged]
    if wrong:
        name, delta, _ = wrong[0]
        raise CorruptTableError(
            f"{name} would not become the tensor with fingerprint {delta.result:016x}: the delta is damaged"
        )


def _check_base(name: str, delta: Delta, base: Any) -> None:
    """Raises TypeError or DeltaMismatchError if a delta is for other tensors than its base. name: what messages call
    the base."""
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
