"""The deltas of tensors (`Delta`) and of checkpoints (`CheckpointDelta`). Both are values: they hold coded differences
and the fingerprints of the versions before and after. `_applying.py` applies them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from .._common.arguments import whole_number
from .._common.manners import Movable
from .._machine import memory
from .._tables.compressed_tensor import CompressedTensor
from ._applying import apart, apply_all
from ._coding import Version


class Delta(Movable):
    """The differences between two versions of a tensor, the base and the new version. A delta turns the base into the
    new version. `ibp.deltas.make` makes deltas, and reading a file of deltas returns deltas. A delta is immutable.

    The bits of each element are taken as an unsigned integer of w bits, where w is the number of bits of an element.
    For each element, the table holds (new - base) modulo 2^w. For complex numbers, the real and the imaginary parts are
    subtracted separately. Elements that did not change take almost no memory.

    Example:
        >>> old = torch.zeros(1000, 64)
        >>> new = old.index_fill(0, torch.tensor([17]), 1)
        >>> delta = ibp.deltas.make(new, old, device="cpu")
        >>> delta.original_bytes, delta.stored_bytes < 1000
        (256000, True)
        >>> delta.apply(old)[16:19, 0]
        tensor([0., 1., 0.])

    Args:
        table: the compressed differences. The table has the shape and dtype of the tensor.
        base: the fingerprint (`ibp.deltas.fingerprint`) of the base.
        result: the fingerprint of the new version.

    Attributes:
        table, base, result: the arguments.
        shape, dtype: the shape and dtype of the tensor.
        device: the device of the compressed differences.

    Raises:
        TypeError: table is not an `ibp.CompressedTensor`, or a fingerprint is not an integer.
        ValueError: a fingerprint is not in [0, 2^64 - 1].
    """

    __slots__ = ("base", "result", "table")

    table: CompressedTensor
    base: int
    result: int

    def __init__(self, table: CompressedTensor, base: int, result: int) -> None:
        if not isinstance(table, CompressedTensor):
            raise TypeError(f"table is a {type(table).__name__}; wanted an ibp.CompressedTensor")
        fields = {name: whole_number(name, value, 0, 2**64 - 1) for name, value in (("base", base), ("result", result))}
        for name, value in {"table": table, **fields}.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} of an ibp.deltas.Delta cannot be set: it never changes")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.table, self.base, self.result)

    @property
    def shape(self) -> torch.Size:
        return self.table.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def is_empty(self) -> bool:
        """Whether both versions have the same fingerprint, so that they are almost certainly equal."""
        return self.base == self.result

    @property
    def original_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.table.original_bytes

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of the delta when it is sent or stored in a file. It is the size of the compressed differences,
        the index of their rows, and the codebook."""
        return self.table.stored_bytes + self.table.index_bytes

    @property
    def nbytes(self) -> int:
        """Size in bytes of the memory that the delta occupies."""
        return self.table.nbytes

    def __repr__(self) -> str:
        share = f" ({self.stored_bytes / self.original_bytes:.2%})" if self.original_bytes else ""
        return (
            f"ibp.deltas.Delta(shape={list(self.shape)}, dtype={self.dtype}, bytes={self.original_bytes:,} -> "
            f"{self.stored_bytes:,}{share}, base={self.base:016x}, result={self.result:016x}, device={self.device})"
        )

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Delta:
        """Returns a copy of the delta on a device, or the delta itself if it is already there."""
        target = memory.canonical(device)
        return (
            self if target == self.device else Delta(self.table.to(target, None, non_blocking), self.base, self.result)
        )

    def apply_(self, base: torch.Tensor) -> torch.Tensor:
        """Turns `base` into the new version, in place, and returns it.

        The call checks that the delta was made for this base, and that the result is the new version. If an error is
        raised, the base holds the same bits as before the call. Gradients are not computed.

        Args:
            base: a tensor of the delta's shape and dtype on the CPU or a CUDA device. It may have any strides, but
                elements must not overlap. The delta is copied to the device of base if necessary.

        Raises:
            TypeError: base is not a tensor, has another dtype, or is a conjugated or negated view.
            DeltaMismatchError: base does not have the shape and the bits of the tensor that the delta was made for.
            CorruptTableError: the delta is damaged.
        """
        apply_all([("base", self, base)])
        return base

    def apply(self, base: torch.Tensor) -> torch.Tensor:
        """Returns the new version. Works like `apply_`, but on a copy of the base."""
        return self.apply_(base.detach().clone())


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


def _stored_bytes(change: Delta | Version) -> int:
    """Returns the size in bytes of a change when it is sent."""
    if isinstance(change, torch.Tensor):
        return change.nbytes
    return change.stored_bytes if isinstance(change, Delta) else change.stored_bytes + change.index_bytes
