"""Defines deltas, and makes them. The deltas of tensors (`Delta`) and of checkpoints (`CheckpointDelta`) are
values: they hold coded differences and the fingerprints of the versions before and after. `_applying.py` applies them.

`make` compares pairs of versions in batches. On a GPU, the differences of many pairs are coded at once, with the
known codebook. If these take too many bytes, and on a CPU, the versions of a pair are subtracted, and the difference is
coded like any other tensor. `begin_differences` queues the work that measures a batch, so that a GPU measures the next
batch while the deltas of the present one are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, overload

import numpy as np
import torch

from .. import _core
from .._common.arguments import whole_number
from .._common.manners import Movable
from .._common.sequences import cut, one_ahead
from .._fetch.streaming import decompress
from .._machine import memory, staging
from .._rows.geometry import Geometry, bytes_of
from .._tables.compressed_tensor import CompressedTensor
from ._applying import apart, apply_all, memory_of
from ._coding import (
    ROW_BYTES,
    WELL_CODED,
    Version,
    bits_of,
    check_source,
    code,
    element_bytes_of,
    fingerprint,
    finished,
    first_rows,
    integers_of,
    known_codebook,
)


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
    """Holds the changes that turn one version of a checkpoint, the base, into another version. `ibp.deltas.make`
    returns a CheckpointDelta for two checkpoints. A CheckpointDelta is a read-only mapping.

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
        jobs = [(name, change, base[name]) for name, change in self._changes.items() if isinstance(change, Delta)]
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
        apply_all(apart(jobs))
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


# ---- making ----

# A batch has one pair, or several pairs whose new versions together have at most this many bytes.
_MOST_BYTES = 2 << 30


@overload
def make(new: Version, base: Version, *, device: torch.device | str | int | None = None) -> Delta: ...
@overload
def make(
    new: Mapping[str, Version], base: Mapping[str, Version], *, device: torch.device | str | int | None = None
) -> CheckpointDelta: ...
def make(
    new: Version | Mapping[str, Version],
    base: Version | Mapping[str, Version],
    *,
    device: torch.device | str | int | None = None,
) -> Delta | CheckpointDelta:
    """Returns the delta from `base` to `new`, which can be sent or stored in place of new. `delta.apply_(base)` turns
    base into new.

    The delta holds the difference of the elements' bits, taken as integers, and not of their values. So `apply_`
    restores new bit for bit, including NaNs and negative zeros. The fewer elements have changed, and the less they have
    changed, the smaller the delta is. A delta is correct even if every element has changed.

    Example:
        >>> old = {"w": torch.zeros(1000, 64)}
        >>> new = {"w": torch.ones(1000, 64)}
        >>> change = ibp.deltas.make(new, old, device="cpu")
        >>> change.apply_(old)["w"][0, 0]
        tensor(1.)

    Args:
        new, base: two versions of a tensor, with the same shape and dtype, contiguous or not; or two mappings from
            names to tensors, such as state dicts. Each tensor may also be an `ibp.CompressedTensor`.
        device: the device on which the differences are computed and stored. None: the device of new.

    Returns:
        An `ibp.deltas.Delta` for two tensors, or an `ibp.deltas.CheckpointDelta` for two mappings. The latter has no
        entry for a tensor whose bits have not changed. It stores a tensor whole if the tensor is new, or if its shape
        or dtype has changed.

    Raises:
        TypeError: an argument is not as described, or the dtypes differ.
        ValueError: the shapes differ, or the device cannot be used.
    """
    if isinstance(new, Mapping) and isinstance(base, Mapping):
        return _compared(new, base, device)
    for name, version in (("new", new), ("base", base)):
        if isinstance(version, Mapping):
            raise TypeError(f"only {name} is a mapping; wanted two tensors, or two mappings from names to tensors")
        check_source(version, name)
    assert not isinstance(new, Mapping) and not isinstance(base, Mapping)
    if new.dtype != base.dtype:
        raise TypeError(f"new has dtype {new.dtype}, base {base.dtype}; wanted the same")
    if new.shape != base.shape:
        raise ValueError(f"new has shape {list(new.shape)}, base {list(base.shape)}; wanted the same")
    return differences([(new, base)], device)[0]


def _compared(
    new: Mapping[str, Version], base: Mapping[str, Version], device: torch.device | str | int | None
) -> CheckpointDelta:
    """Returns the delta from checkpoint `base` to checkpoint `new`. device: as for `make`."""
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
    made = dict(zip(pairs, differences(list(pairs.values()), device)))
    changes.update((name, made[pair]) for name, pair in names.items() if not made[pair].is_empty)
    return CheckpointDelta(
        {name: changes[name] for name in new if name in changes}, [name for name in base if name not in new]
    )


def differences(pairs: Sequence[tuple[Version, Version]], device: torch.device | str | int | None) -> list[Delta]:
    """Returns the deltas of pairs (new, base) of tensors or tables. The two versions of a pair have the same shape and
    dtype."""
    parts = cut(pairs, lambda pair: pair[0].numel() * pair[0].dtype.itemsize, _MOST_BYTES)
    return [delta for made in one_ahead(begin_differences(part, device) for part in parts) for delta in made()]


def begin_differences(
    pairs: Sequence[tuple[Version, Version]], device: torch.device | str | int | None, updates_bases: bool = False
) -> Callable[[], list[Delta]]:
    """For the pairs that are compared on a GPU, queues the kernels that measure how large the deltas become. Returns a
    function that waits for the GPUs, makes the deltas of all pairs, and returns them.

    updates_bases: whether each base is overwritten with the newer version once its delta is made. If so, all bases must
        be contiguous tensors.
    """
    targets = [memory.canonical(new.device if device is None else device) for new, _ in pairs]
    near: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for index, ((new, base), target) in enumerate(zip(pairs, targets)):
        if target.type == "cuda" and new.numel() > 0:
            near[index] = _brought(new, target), _brought(base, target)
            groups.setdefault((target, element_bytes_of(new.dtype)), []).append(index)
    begun = [(indices, begin_on_gpu([near[i] for i in indices], updates_bases)) for indices in groups.values()]

    def finish() -> list[Delta]:
        coded = {index: found for indices, made_by in begun for index, found in zip(indices, made_by())}
        made = []
        for index, ((new, base), target) in enumerate(zip(pairs, targets)):
            newer, older = near.get(index) or (_brought(new, target), _brought(base, target))
            delta = coded.get(index)
            is_updated = delta is not None and base.device == target
            if delta is None:
                difference = integers_of(newer) - integers_of(older)
                delta = Delta(code(difference, newer), fingerprint(older), fingerprint(newer))
            made.append(delta)
            if updates_bases and not is_updated:
                assert isinstance(base, torch.Tensor)
                bits_of(base).copy_(bits_of(newer))
        return made

    return finish


def _brought(x: Version, device: torch.device) -> torch.Tensor:
    if isinstance(x, CompressedTensor):
        return decompress(x, device=device, check=True)
    return x.detach().to(device)


# ---- on a GPU ----


def begin_on_gpu(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], updates_bases: bool
) -> Callable[[], list[Delta | None]]:
    """Queues a kernel on a GPU that measures how large the rows of several deltas become if they are coded with the
    known codebook. The kernels subtract the bases while they code.

    Args:
        pairs: (newer, base) for each delta, on one GPU. The elements of all tensors have the same size, and no tensor
            is empty.
        updates_bases: whether each base is overwritten with the newer version when the differences are coded. If so,
            all bases must be contiguous.

    Returns:
        A function that waits for the kernel, codes the differences, and returns the delta of each pair. The delta is
        None if its coded rows would take more than WELL_CODED times the size of the tensor; the base of such a pair is
        not overwritten.
    """
    device, codebook = pairs[0][0].device, known_codebook(element_bytes_of(pairs[0][0].dtype))
    # The structs that the kernels read hold addresses, so `finish` keeps these tensors.
    held = [(bytes_of(newer), bytes_of(base)) for newer, base in pairs]
    sizes = [newer.numel() for newer, _ in held]
    num_rows, firsts = [-(-size // ROW_BYTES) for size in sizes], first_rows(sizes, ROW_BYTES)
    tensors, edges, last_rows, first_groups = _placed(held, num_rows, firsts)
    coding = codebook.words(device), codebook.codec
    lengths = torch.empty(firsts[-1], dtype=torch.uint16, device=device)
    counts = torch.empty(8 * firsts[-1], dtype=torch.uint16, device=device)
    sums = torch.zeros(2 * len(pairs), dtype=torch.int64, device=device)
    torch.ops.ibp.measure_deltas.default(tensors, *coding, lengths, counts, sums)

    def indexed() -> tuple[torch.Tensor, staging.Coming]:
        """Queues the computation of the offsets at which coded rows begin. Returns (these offsets; the numbers that
        `_read` needs, on their way to the host)."""
        bases = torch.ops.ibp.index_rows(lengths, lengths.numel() * ROW_BYTES, ROW_BYTES, 0)
        last_lengths = lengths.view(torch.int16)[last_rows].to(torch.int64)
        return bases, staging.Coming(torch.cat([bases[edges], last_lengths, sums]))

    first_index = indexed()

    def finish() -> list[Delta | None]:
        bases, found = first_index
        starts, coded_sizes, totals = _read(found, sizes)
        badly_coded = {i for i, size in enumerate(sizes) if coded_sizes[i] > WELL_CODED * size}
        if badly_coded:
            for i in badly_coded:
                # Marks all rows of the pair as default rows, so that they take no bytes in `overflow` and encode_deltas
                # skips them.
                lengths.view(torch.int16)[firsts[i] :][: num_rows[i]] = ROW_BYTES
            bases, found = indexed()
            starts, coded_sizes, totals = _read(found, sizes)
        overflow = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        torch.ops.ibp.encode_deltas.default(tensors, *coding, lengths, counts, bases, updates_bases, overflow)
        own_bases = bases[:-1] - bases[first_groups]
        made: list[Delta | None] = []
        for i, ((like, _), (newer, _), first) in enumerate(zip(pairs, held, firsts)):
            if i in badly_coded:
                made.append(None)
                continue
            groups = slice(first // _core.ROWS_PER_BASE, firsts[i + 1] // _core.ROWS_PER_BASE)
            table = CompressedTensor.of_parts(
                Geometry(like.shape, like.dtype, ROW_BYTES),
                scheme="planes",
                slot_bytes=0,
                slots=overflow[:0],
                overflow=overflow[starts[i] : starts[i] + coded_sizes[i]],
                lengths=lengths[first : first + num_rows[i]],
                bases=own_bases[groups] if coded_sizes[i] else own_bases[:0],
                codebook=codebook,
            )
            made.append(Delta(table, *(finished(total, newer.numel()) for total in totals[2 * i : 2 * i + 2])))
        return made

    return finish


def _placed(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], num_rows: Sequence[int], firsts: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Returns four int64 tensors on the GPU: (the structs that describe the n pairs to the kernels [n, 10]; the index
    of each pair's first group of rows, then the index of the group after each pair's last one [2 * n]; the index of
    each pair's last row [n]; for each group, the index of its pair's first group [number of groups]).

    Args:
        pairs: the bytes of (newer, base) for each delta.
        num_rows: the number of rows of each pair.
        firsts: the result of `first_rows` for the pairs.
    """
    structs = [
        [base.data_ptr(), newer.data_ptr(), base.numel(), first, 0, 0, 0, 0, 0, 0]
        for (newer, base), first in zip(pairs, firsts)
    ]
    ends = np.array(firsts) // _core.ROWS_PER_BASE
    first, last = ends[:-1], ends[1:]
    parts = [np.array(structs).ravel(), first, last, np.add(firsts[:-1], num_rows) - 1, np.repeat(first, last - first)]
    near = staging.queued(torch.from_numpy(np.concatenate(parts)), pairs[0][0].device)
    tensors, *others = near.split([len(parts[0]), 2 * len(first), len(first), len(parts[-1])])
    return tensors.view(-1, 10), *others


def _read(coming: staging.Coming, sizes: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Waits for the numbers of `begin_on_gpu`. Returns (the offset at which each pair's coded rows begin, then the
    offset past the last pair's rows; the size in bytes of each pair's coded rows; the sums of the words of each pair's
    base and newer version). sizes: the size in bytes of each tensor."""
    found, n = coming.wait().tolist(), len(sizes)
    coded_sizes = [
        # The offsets count a last row that is stored raw as a full row. A length of 0 marks a raw row.
        end - start - (-size % ROW_BYTES if length == 0 else 0)
        for size, start, end, length in zip(sizes, found[:n], found[n : 2 * n], found[2 * n : 3 * n])
    ]
    return [*found[:n], found[2 * n - 1]], coded_sizes, found[3 * n :]
