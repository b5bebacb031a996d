"""CheckpointDelta: the deltas of all tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._tables.compressed_tensor import CompressedTensor
from ._applying import apply_all
from ._fingerprint import DeltaMismatchError, check_source
from ._on_pieces import Pieces, TableRows
from ._tensors import Delta

if TYPE_CHECKING:
    from ._applying import Job

Version = torch.Tensor | CompressedTensor


class CheckpointDelta(Mapping[str, Delta | Version]):
    """What changed from one version of a checkpoint to another: a mapping from the names of what changed to deltas,
    and to whole tensors where there was none before or it had another shape or dtype. Made by `ibp.deltas.make`; it
    never changes. What is in neither did not change.

    Example:
        >>> old = {"w": torch.zeros(1000, 64), "b": torch.zeros(64), "head": torch.zeros(64)}
        >>> new = {"w": torch.ones(1000, 64), "b": torch.zeros(64), "tail": torch.zeros(64)}
        >>> change = ibp.deltas.make(new, old, device="cpu")
        >>> change.changed, change.new, change.removed
        (('w',), ('tail',), ('head',))
        >>> change.original_bytes, change.stored_bytes < 1000
        (256256, True)

    Args:
        changes: what changed: an `ibp.deltas.Delta`, a tensor or a table for each name.
        removed: names that are gone.

    Attributes:
        removed: the argument, a tuple.
        changed: the names of the tensors that are stored as deltas, a tuple.
        new: the names of the tensors that are stored whole, a tuple.

    Raises:
        TypeError, ValueError: an argument is none of these, or a name is both there and gone.
    """

    def __init__(self, changes: Mapping[str, Delta | Version], removed: Iterable[str] = ()) -> None:
        self._changes = dict(changes)
        self.removed = tuple(removed)
        for name, change in self._changes.items():
            if not isinstance(change, (Delta, torch.Tensor, CompressedTensor)):
                raise TypeError(f"{name} is a {type(change).__name__}; wanted an ibp.deltas.Delta, a tensor or a table")
        both = sorted(set(self.removed) & self._changes.keys())
        if both:
            raise ValueError(f"{both[0]} is among the changes and among removed")
        self.changed = tuple(name for name, change in self._changes.items() if isinstance(change, Delta))
        self.new = tuple(name for name, change in self._changes.items() if not isinstance(change, Delta))

    def __getitem__(self, name: str) -> Delta | Version:
        return self._changes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._changes)

    def __len__(self) -> int:
        return len(self._changes)

    @property
    def original_bytes(self) -> int:
        """Bytes of the tensors that changed or are new."""
        changes = self._changes.values()
        return sum(change.nbytes if isinstance(change, torch.Tensor) else change.original_bytes for change in changes)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all changes: what is sent, or stands in a file."""
        return sum(_stored_bytes(change) for change in self._changes.values())

    def __repr__(self) -> str:
        return (
            f"ibp.deltas.CheckpointDelta({len(self.changed)} changed, {len(self.new)} new, "
            f"{len(self.removed)} removed, bytes={self.original_bytes:,} -> {self.stored_bytes:,})"
        )

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> CheckpointDelta:
        """All changes on another device."""
        moved = {name: change.to(device, non_blocking=non_blocking) for name, change in self._changes.items()}
        return CheckpointDelta(moved, self.removed)

    def apply_(self, base: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Makes the new version of a checkpoint: changed tensors in their memory, so that what shares it, such as the
        parameters of a module whose state dict is given, changes too. Returns base.

        New tensors are put into the mapping, on the device of its others, and removed ones taken out. All is checked
        as by `Delta.apply_`; where anything does not fit, all of base is as it was.

        Args:
            base: the mapping from names to tensors that the delta was made for; mutable where names come or go.

        Raises:
            KeyError: a name that changed, or was removed, is not there.
            TypeError, DeltaMismatchError, CorruptTableError: as `Delta.apply_`, naming the tensor; also where two
                tensors share memory but not their changes.
        """
        self._check_names(base)
        jobs = [(name, self._changes[name], base[name]) for name in self.changed]
        others = {tensor.device for tensor in base.values() if isinstance(tensor, torch.Tensor)}
        whole = {}  # new tensors, each on the device of the tensor that it replaces, or of any
        for name in self.new:
            change = self._changes[name]
            assert not isinstance(change, Delta)
            device = base[name].device if name in base else others.pop() if len(others) == 1 else change.device
            whole[name] = (
                change.decompress(device=device, check=True)
                if isinstance(change, CompressedTensor)
                else change.detach().to(device, copy=True)
            )
        apply_all(apart([(name, change, tensor) for name, change, tensor in jobs if isinstance(change, Delta)]))
        if isinstance(base, MutableMapping):
            for name in self.removed:
                del base[name]
            base.update(whole)
        return base

    def _check_names(self, base: Any) -> None:
        if not isinstance(base, Mapping):
            raise TypeError(f"base is a {type(base).__name__}; wanted a mapping from names to tensors")
        missing = [name for name in (*self.changed, *self.removed) if name not in base]
        if missing:
            raise KeyError(f"base has no tensor {missing[0]!r}, which the delta changes or removes")
        if (self.new or self.removed) and not isinstance(base, MutableMapping):
            raise TypeError(f"base is a {type(base).__name__}, which cannot change; the delta adds or removes names")


def compare(
    new: Mapping[str, Version],
    base: Mapping[str, Version],
    differences: Callable[[list[tuple[Version, Version]]], list[Delta]],
) -> CheckpointDelta:
    """The delta of two checkpoints. differences: makes those of pairs of tensors of one shape and dtype."""
    changes: dict[str, Delta | Version] = {}
    pairs: dict[tuple[Any, ...], tuple[Version, Version]] = {}
    names: dict[str, tuple[Any, ...]] = {}  # the pair of each; tied weights are one with several names
    for name, tensor in new.items():
        check_source(tensor, name)
        older = base.get(name)
        if older is not None:
            check_source(older, name)
        if older is None or older.shape != tensor.shape or older.dtype != tensor.dtype:
            changes[name] = tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor
        else:
            names[name] = memory_of(tensor), memory_of(older)
            pairs.setdefault(names[name], (tensor, older))
    made = dict(zip(pairs, differences(list(pairs.values()))))
    changes.update((name, made[pair]) for name, pair in names.items() if not made[pair].is_empty)
    return CheckpointDelta(
        {name: changes[name] for name in new if name in changes}, [name for name in base if name not in new]
    )


def memory_of(x: Version | TableRows | Pieces) -> tuple[Any, ...]:
    """The same for tensors of the same elements in the same memory."""
    if isinstance(x, Pieces):
        return tuple(memory_of(each.memory) for each in x.pieces)
    if isinstance(x, TableRows):
        return id(x.table), x.first, x.last
    if isinstance(x, CompressedTensor) or x.numel() == 0:
        return (id(x),)
    return x.device, x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x.is_conj(), x.is_neg()


def apart(jobs: Sequence[Job]) -> list[Job]:
    """The jobs without those of tensors that have another name too. DeltaMismatchError where tensors share memory
    otherwise."""
    kept: dict[tuple[Any, ...], Job] = {}
    for job in jobs:
        name, delta, base = job
        same = kept.setdefault(memory_of(base), job)
        if (same[1].base, same[1].result) != (delta.base, delta.result):
            raise DeltaMismatchError(f"{same[0]} and {name} are one tensor in base, but change differently")
    ends: dict[torch.device, tuple[int, str]] = {}
    dense = [(name, base) for name, _, base in kept.values() if isinstance(base, torch.Tensor)]
    for name, base in sorted(dense, key=lambda job: job[1].data_ptr()):
        if base.numel() == 0 or not base.is_contiguous():
            continue
        end, other = ends.get(base.device, (0, ""))
        if base.data_ptr() < end:
            raise DeltaMismatchError(f"{other} and {name} share memory in base, but are not the same tensor")
        ends[base.device] = base.data_ptr() + base.nbytes, name
    return list(kept.values())


def _stored_bytes(change: Delta | Version) -> int:
    if isinstance(change, torch.Tensor):
        return change.nbytes
    return change.stored_bytes if isinstance(change, Delta) else change.stored_bytes + change.index_bytes
