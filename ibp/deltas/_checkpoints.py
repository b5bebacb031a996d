"""CheckpointDelta: the changes that turn one version of a checkpoint into another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._tables.compressed_tensor import CompressedTensor
from ._applying import apply_all
from ._fingerprint import DeltaMismatchError, check_source
from ._on_pieces import memory_of
from ._tensors import Delta

if TYPE_CHECKING:
    from ._applying import Job

Version = torch.Tensor | CompressedTensor


class CheckpointDelta(Mapping[str, Delta | Version]):
    """The changes that turn one version of a checkpoint, the base, into another version. `ibp.deltas.make` returns a
    CheckpointDelta for two checkpoints. A CheckpointDelta is a read-only mapping.

    It maps the name of each changed tensor to an `ibp.deltas.Delta`. A tensor that is new, or whose shape or dtype has
    changed, is stored whole. The names of unchanged tensors are not in the mapping.

    Example:
        >>> old = {"w": torch.zeros(1000, 64), "b": torch.zeros(64), "head": torch.zeros(64)}
        >>> new = {"w": torch.ones(1000, 64), "b": torch.zeros(64), "tail": torch.zeros(64)}
        >>> change = ibp.deltas.make(new, old, device="cpu")
        >>> change.changed, change.new, change.removed
        (('w',), ('tail',), ('head',))
        >>> change.original_bytes, change.stored_bytes < 1000
        (256256, True)

    Args:
        changes: for each name, an `ibp.deltas.Delta`, or a tensor or table that is stored whole.
        removed: the names of tensors that the new version does not have.

    Attributes:
        removed: the argument `removed`, as a tuple.
        changed: a tuple of the names of the tensors that are stored as deltas.
        new: a tuple of the names of the tensors that are stored whole.

    Raises:
        TypeError: a change is not a delta, a tensor or a table.
        ValueError: a name is in both `changes` and `removed`.
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
        """Size in bytes of the tensors that have changed or are new, before compression."""
        changes = self._changes.values()
        return sum(change.nbytes if isinstance(change, torch.Tensor) else change.original_bytes for change in changes)

    @property
    def stored_bytes(self) -> int:
        """Total size in bytes of the changes when they are sent or stored in a file."""
        return sum(_stored_bytes(change) for change in self._changes.values())

    def __repr__(self) -> str:
        return (
            f"ibp.deltas.CheckpointDelta({len(self.changed)} changed, {len(self.new)} new, "
            f"{len(self.removed)} removed, bytes={self.original_bytes:,} -> {self.stored_bytes:,})"
        )

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> CheckpointDelta:
        """Returns a CheckpointDelta with the same changes, whose data are on `device`."""
        moved = {name: change.to(device, non_blocking=non_blocking) for name, change in self._changes.items()}
        return CheckpointDelta(moved, self.removed)

    def apply_(self, base: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Turns `base`, the base version of a checkpoint, into the new version, and returns `base`.

        Changed tensors are updated in place. So if base is the state dict of a module, the module's parameters change.
        Removed tensors are deleted from the mapping, and new tensors are added to it. A new tensor that replaces a
        tensor of the same name is put on the device of the tensor that it replaces. Any other new tensor is put on the
        device of the tensors in base if all of them are on one device. Otherwise it stays on the device on which the
        delta stores it.

        Bases and results are checked as in `Delta.apply_`. If an error is raised, base is unchanged.

        Args:
            base: the mapping from names to tensors that the delta was made for. It must be mutable if there are new or
                removed names.

        Raises:
            KeyError: base has no tensor with the name of a tensor that the delta changes or removes.
            TypeError, DeltaMismatchError, CorruptTableError: as in `Delta.apply_`; the message names the tensor.
                DeltaMismatchError is also raised if two tensors of base overlap in memory. The exception is one tensor
                that has two names, if the delta has the same change for both names.
        """
        self._check_names(base)
        jobs = [(name, self._changes[name], base[name]) for name in self.changed]
        devices = {tensor.device for tensor in base.values() if isinstance(tensor, torch.Tensor)}
        only = devices.pop() if len(devices) == 1 else None
        whole = {}  # the new tensors by name
        for name in self.new:
            change = self._changes[name]
            assert not isinstance(change, Delta)
            device = base[name].device if name in base else only or change.device
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
    """Returns the delta from checkpoint `base` to checkpoint `new`.

    differences: a function that takes pairs (new, base) of tensors and returns their deltas. The two tensors of a pair
    have the same shape and dtype.
    """
    changes: dict[str, Delta | Version] = {}
    pairs: dict[tuple[Any, ...], tuple[Version, Version]] = {}
    names: dict[str, tuple[Any, ...]] = {}  # each name's key in `pairs`; tied weights share a key
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


def apart(jobs: Sequence[Job]) -> list[Job]:
    """Drops repeated jobs: returns one job for each base. If a base has several names, its job is the one of the first
    name. Raises DeltaMismatchError if two names of one base have different changes, or if different bases share
    memory."""
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
    """Returns the size in bytes of a change when it is sent."""
    if isinstance(change, torch.Tensor):
        return change.nbytes
    return change.stored_bytes if isinstance(change, Delta) else change.stored_bytes + change.index_bytes
