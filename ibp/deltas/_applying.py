"""Applies deltas: all deltas of a call, or, if an error occurs, none.

A *job* is a delta and its *base*, the elements that it changes. A base is a tensor, or a `SplitBase`: elements that
this process keeps in several tensors, in items of tables, or only partly, as it keeps the shard of a weight. Each of
its parts (`BasePart`) says which elements a tensor, or the items of a table, have.

`apply_all` divides jobs into *batches* and undoes all of them if one fails. There are three classes of batches, with
the same methods: `GpuBatch` for several jobs on a GPU, `HostBatch` for one job on the CPU, and `CopyBatch` for one job
whose base has to be copied into one tensor, changed there, and written back. If a batch runs on a GPU, `begin` queues
its work and `apply` waits for it; otherwise `apply` does the work. If a delta does not match its base or is damaged,
`apply` raises the error for it, and leaves the bases of its batch as they were. `take_back` undoes the changes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch

from .._fetch.streaming import decode_items, decompress
from .._machine import staging
from .._rows.geometry import bytes_of
from .._rows.handle import CorruptTableError, new_record
from .._rows.planes import PlanesCodebook
from .._rows.table import handle_on, has_own_bases
from .._tables.changes import put_items
from .._tables.compressed_tensor import CompressedTensor
from ._coding import (
    DeltaMismatchError,
    Version,
    bits_of,
    check_source,
    element_bytes_of,
    fingerprint,
    finished,
    first_rows,
    integers_of,
    mix,
)

if TYPE_CHECKING:
    from ._delta import Delta

    Job = tuple[str, Delta, "Base"]  # name of the base for messages, delta, base

# ---- bases ----


class BasePart(NamedTuple):
    """A part of a base, and the memory that holds the part.

    The elements of a base form one sequence. They are the elements of some rows of a tensor. If several tensors are
    joined, the elements of each tensor follow those of the tensor before it.

    memory: a tensor that holds the part, or a table.
    first: the index of the first item of the table that has elements of the part; 0 if memory is a tensor.
    size, strides, offset: the arguments with which `torch.as_strided` selects the part's elements from the sequence.
    """

    memory: Version
    first: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def whole(cls, memory: torch.Tensor) -> BasePart:
        """Returns the part that has all elements of the sequence."""
        return cls(memory, 0, tuple(memory.shape), _strides_of(memory.shape), 0)

    @classmethod
    def at(cls, weight: Version, first: int, shape: torch.Size, box: Sequence[slice] | None = None) -> BasePart:
        """Returns the part for a box, which is a range of elements in each dimension of a tensor's rows. The sequence
        begins with these rows.

        Args:
            weight: the tensor or table that holds the elements of the box. A weight of no dimensions is one item.
            first: the index of the item of `weight` that has the first of these elements.
            shape: the shape of the rows.
            box: a slice for each dimension of the rows. None: all elements of the rows.
        """
        ranges = [range(length)[part] for length, part in zip(shape, box or (slice(None),) * len(shape))]
        size, strides = tuple(map(len, ranges)), _strides_of(shape)
        offset = sum(each.start * stride for each, stride in zip(ranges, strides))
        if isinstance(weight, torch.Tensor):
            items = slice(first, first + (size[0] if size else 1))
            weight, first = (weight.detach()[items] if weight.dim() else weight.detach()), 0
        return cls(weight, first, size, strides, offset)

    @property
    def items(self) -> tuple[int, int]:
        """The index of the part's first item in a table, and of the item after the last one."""
        return self.first, self.first + (self.size[0] if self.size else 1)

    def alone(self) -> SplitBase:
        """Returns a base that consists of this part."""
        shape = torch.Size(self.size)
        part = self._replace(strides=_strides_of(shape), offset=0)
        return SplitBase([part], shape, self.memory.dtype, True)

    def read(self) -> torch.Tensor:
        """Returns the values of the part: the memory itself if it is a tensor. Items of a table are decompressed."""
        if isinstance(self.memory, torch.Tensor):
            return self.memory
        return decode_items(self.memory, *self.items, self.memory.device, check=True).view(self.size)

    def write_items(self, values: torch.Tensor) -> None:
        """Replaces all of the part's items in a table, or none if an error occurs. The new items are coded with the
        table's codebook."""
        assert isinstance(self.memory, CompressedTensor)
        put_items(self.memory, torch.arange(*self.items, device="cpu"), values)

    def of(self, elements: torch.Tensor) -> torch.Tensor:
        """Returns a view of the part's elements. elements: all elements of the base, 1-D."""
        return elements.as_strided(self.size, self.strides, elements.storage_offset() + self.offset)


class SplitBase:
    """A base whose elements are kept in several places.

    Attributes:
        parts: the parts.
        shape: the shape of the rows; if several tensors are joined, [number of elements].
        dtype: the dtype of the elements.
        is_whole: whether each element of the base is in a part. Otherwise the fingerprint of the base cannot be
            computed in this process.
        groups: the parts, divided into groups that are written one after the other. The first groups have one part
            each: a part that is in a table. The last group has all parts that are in tensors.
        key: equal for bases that consist of the same elements in the same memory.
    """

    def __init__(self, parts: Sequence[BasePart], shape: torch.Size, dtype: torch.dtype, is_whole: bool) -> None:
        self.parts, self.shape, self.dtype, self.is_whole = parts, shape, dtype, is_whole
        dense = [each for each in parts if isinstance(each.memory, torch.Tensor)]
        self.groups = [[each] for each in parts if isinstance(each.memory, CompressedTensor)]
        self.groups += [dense] if dense else []
        self.key = tuple((*memory_of(each.memory), *each.items) for each in parts)
        # The tensors that hold the elements, as 1-D views, if the base consists of contiguous tensors, one after the
        # other (for example, the experts of a layer). Then one call of `split` makes the corresponding views of the
        # elements. Otherwise None.
        ends = list(itertools.accumulate(math.prod(each.size) for each in parts))
        self._flats: list[torch.Tensor] | None = None
        if is_whole and ends[-1] == shape.numel() and all(map(_is_run, parts, [0, *ends])):
            self._flats = [bits_of(each.memory).view(-1) for each in dense if isinstance(each.memory, torch.Tensor)]

    @property
    def device(self) -> torch.device:
        return self.parts[0].memory.device

    def as_tensor(self) -> torch.Tensor | None:
        """Returns a view of the elements, if they lie in memory as those of one contiguous tensor do: they are whole
        views of one buffer, in the buffer's order. Otherwise returns None."""
        if self._flats is None:
            return None
        filled = [flat for flat in self._flats if flat.numel()]
        ends = [(flat.untyped_storage().data_ptr(), flat.storage_offset() + flat.numel()) for flat in filled]
        begins = [(flat.untyped_storage().data_ptr(), flat.storage_offset()) for flat in filled]
        if not filled or begins[1:] != ends[:-1]:
            return None
        # The storage of the last view certainly has the elements of the other views, too.
        bits = filled[-1].as_strided(self.shape, _strides_of(self.shape), filled[0].storage_offset())
        return bits.view(self.dtype)

    def read(self) -> torch.Tensor:
        """Returns all elements, 1-D. Elements that are in no part are 0."""
        make = torch.empty if self.is_whole else torch.zeros
        elements = make(self.shape.numel(), dtype=self.dtype, device=self.device)
        for group in self.groups:
            staging.copy_all(*self._copied(group, bits_of(elements)))
        return elements

    def write(self, group: Sequence[BasePart], elements: torch.Tensor) -> None:
        """Writes the elements of a group to the memory of its parts: all of them, or none if an error occurs.
        elements: all elements of the base, 1-D."""
        first = group[0]
        if isinstance(first.memory, CompressedTensor):
            first.write_items(first.of(elements))
        else:
            parts, memories = self._copied(group, bits_of(elements))
            staging.copy_all(memories, parts)

    def _copied(
        self, group: Sequence[BasePart], bits: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Returns (for each part of a group, a view of its elements in `bits`; for each part, its values as integers).
        The values of a part in a tensor are a view of it. bits: all elements of the base as integers."""
        if self._flats is not None:
            return bits.split([flat.numel() for flat in self._flats]), self._flats
        return [each.of(bits) for each in group], [bits_of(each.read()) for each in group]


def _is_run(part: BasePart, first: int) -> bool:
    """Returns whether the memory of a part is a contiguous tensor, and the part has consecutive elements of the base,
    beginning at element `first`."""
    if part.offset != first or not isinstance(part.memory, torch.Tensor) or not part.memory.is_contiguous():
        return False
    wanted = _strides_of(torch.Size(part.size))
    return all(length == 1 or here == there for length, here, there in zip(part.size, part.strides, wanted))


def memory_of(x: Version | SplitBase) -> tuple[Any, ...]:
    """Returns a key that identifies the elements of x in memory. Two arguments have equal keys if they consist of the
    same elements in the same memory."""
    if isinstance(x, SplitBase):
        return x.key
    if isinstance(x, CompressedTensor) or x.numel() == 0:
        return (id(x),)
    return place_of(x)


def place_of(x: torch.Tensor) -> tuple[Any, ...]:
    """Returns the result of `memory_of` for a tensor that has elements."""
    return x.device, x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x.is_conj(), x.is_neg()


def _strides_of(shape: torch.Size) -> tuple[int, ...]:
    return tuple(shape[dim + 1 :].numel() for dim in range(len(shape)))


Base = torch.Tensor | SplitBase


# ---- batches ----

_MOST_ROW_BYTES = 8192  # Largest size in bytes of a row that the kernels support.
_APPLIED, _OTHER_BASE, _DAMAGED = range(3)  # The values of ibp_delta_verdict.


def can_apply(delta: Delta, base: torch.Tensor) -> bool:
    """Returns whether the kernels can apply a delta to its base, apart from the codebook, which `coding_key` checks.
    The two must have the same shape and dtype."""
    return (
        base.is_cuda
        and base.numel() > 0
        and base.is_contiguous()
        and not base.is_conj()
        and not base.is_neg()
        and delta.table.slot_bytes == 0
        and not has_own_bases(delta.table)
    )


def coding_key(delta: Delta) -> tuple[Hashable, ...] | None:
    """Returns a key for the codebook of a delta, or None if the kernels do not support the codebook. Deltas with equal
    keys have equal codebooks, so one call may apply them together."""
    book = delta.table.codebook
    if not isinstance(book, PlanesCodebook) or not book.listed or book.default or book.signed_default:
        return None
    if book.is_partial or book.element_bytes != element_bytes_of(delta.dtype):
        return None
    if book.row_bytes % 16 or book.row_bytes > _MOST_ROW_BYTES:
        return None
    return tuple(book.codec), book.words(torch.device("cpu")).numpy().tobytes()


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


class GpuBatch:
    """Jobs that are done in one call. The codebooks of their deltas are equal. The coded differences are copied to the
    GPU.

    Args:
        jobs: the jobs.
        elements: the elements of each job's base, in contiguous tensors on the same GPU. The kernels change these
            tensors. The batch does not keep them.
    """

    def __init__(self, jobs: Sequence[Job], elements: Sequence[torch.Tensor]) -> None:
        self._jobs = jobs
        self._device, book = elements[0].device, jobs[0][1].table.codebook
        assert isinstance(book, PlanesCodebook)
        self._tables = [delta.to(self._device).table for _, delta, _ in jobs]
        firsts = first_rows([tensor.nbytes for tensor in elements], book.row_bytes)
        self._num_rows = firsts[-1]
        fields = []
        for (_, delta, _), tensor, table, first in zip(jobs, elements, self._tables, firsts):
            num_bytes, overflow = tensor.nbytes, table.overflow
            of_size = mix(num_bytes)
            sums = (delta.base - of_size) % 2**64, (delta.result - of_size) % 2**64
            addresses = table.lengths.data_ptr(), table.bases.data_ptr(), overflow.data_ptr()
            fields.append((tensor.data_ptr(), 0, num_bytes, first, *addresses, overflow.numel(), *sums))
        near = torch.from_numpy(np.array(fields, np.uint64).view(np.int64))  # torch.tensor would take longer for a list
        self._tensors = staging.queued(near, self._device)
        self._coding = book.words(self._device), book.codec
        self._state = torch.zeros(1 + 3 * len(jobs), dtype=torch.int64, device=self._device)

    def begin(self) -> None:
        """Queues kernels that apply all deltas. If any delta is damaged or does not match its base, they apply no
        delta."""
        self._call(False)
        self._found = staging.Coming(self._state)

    def apply(self) -> None:
        """Waits for the work that `begin` queued. If no delta was applied, raises the error for one that does not match
        its base or is damaged."""
        verdict, *of_tensors = self._found.wait().tolist()
        if verdict == _APPLIED:
            return
        wanted = self._tensors[:, 8:].tolist()
        found_of = [of_tensors[i : i + 3] for i in range(0, len(of_tensors), 3)]
        for job, (base_sum, result_sum), found in zip(self._jobs, wanted, found_of):
            is_other = found[0] != base_sum
            if is_other if verdict == _OTHER_BASE else found[2] or (found[0] + found[1] - result_sum) % 2**64:
                _refuse(*job)
        _refuse(*self._jobs[0])

    def take_back(self) -> None:
        """Undoes the changes of `begin`, even if `begin` was interrupted. If the sums of all tensors are 0, the kernels
        have not begun, and there is nothing to undo."""
        verdict, *of_tensors = self._state.tolist()
        if verdict == _APPLIED and any(of_tensors):
            self._state[0] = _DAMAGED
            self._call(True)

    def sum_before(self) -> int:
        """Returns the sum of the first tensor's mixed words (see `finished`) before the deltas were applied."""
        return int(self._state[1])

    def _call(self, takes_back: bool) -> None:
        words, codec = self._coding
        torch.ops.ibp.apply_deltas.default(self._tensors, self._num_rows, words, codec, takes_back, self._state)


class HostBatch:
    """Does one job whose base is on the CPU and contiguous. The differences are added in the base's own memory."""

    def __init__(self, name: str, delta: Delta, base: torch.Tensor) -> None:
        self._name, self._delta, self._base = name, delta, bytes_of(base)
        self._table = delta.to("cpu").table
        self._is_begun = False

    def begin(self) -> None:
        """Does nothing, because `apply` does all the work."""

    def apply(self) -> None:
        """Applies the delta. If it was made for another base, or is damaged, leaves the base unchanged and raises."""
        before = fingerprint(self._base)
        if before == self._delta.base:
            self._is_begun = True
            change, is_good = self._add(False)
            if is_good and (before + change) % 2**64 == self._delta.result:
                return
            self.take_back()
        _refuse(self._name, self._delta, self._base)

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


class CopyBatch:
    """Does one job whose base is split, or cannot be changed in its own memory. The elements are copied into one
    tensor, changed there, and written back. This needs memory for all elements and for their differences."""

    def __init__(self, name: str, delta: Delta, base: SplitBase) -> None:
        self._name, self._delta, self._base = name, delta, base
        self._batch: GpuBatch | None = None  # applies the delta to the copied elements on a GPU
        # Returns the fingerprint that the elements had before. It is set just before the elements are written.
        self._before: Callable[[], int] | None = None

    def begin(self) -> None:
        """Queues work that reads, changes and writes the elements, if the base is whole and on a GPU, and the kernels
        can apply the delta. Otherwise `apply` does this work. If the delta was made for other elements, the kernels
        leave the elements unchanged, and the old values are written back."""
        if not (self._base.is_whole and self._base.device.type == "cuda"):
            return
        elements = self._base.read()
        if can_apply(self._delta, elements) and coding_key(self._delta) is not None:
            batch = GpuBatch([(self._name, self._delta, self._base)], [elements])
            batch.begin()
            self._batch = batch
            self._before = lambda: finished(batch.sum_before(), self._delta.table.original_bytes)
            self._write(elements)

    def apply(self) -> None:
        """Applies the delta. If it was made for another base, or is damaged, leaves the base as it was and raises. A
        base that is not whole is not checked."""
        if self._batch is not None:
            self._batch.apply()
            return
        elements = self._base.read()
        before = fingerprint(elements)
        if self._base.is_whole and before != self._delta.base:
            _refuse(self._name, self._delta, self._base)
        integers_of(elements).add_(self._differences())
        if self._base.is_whole and fingerprint(elements) != self._delta.result:
            _refuse(self._name, self._delta, self._base)
        self._before = lambda: before
        self._write(elements)

    def _write(self, elements: torch.Tensor) -> None:
        for group in self._base.groups:
            self._base.write(group, elements)

    def take_back(self) -> None:
        """Undoes the change, even if it was interrupted. After an interruption the first groups may have new values,
        and the others old values. So the old values are written group by group, until the elements have the old
        fingerprint."""
        if self._before is None:
            return
        before, elements = self._before(), self._base.read()
        old = integers_of(elements).sub(self._differences()).view(elements.dtype)
        for group in self._base.groups:
            if fingerprint(elements) == before:
                return
            for each in group:
                bits_of(each.of(elements)).copy_(bits_of(each.of(old)))
            self._base.write(group, elements)

    def _differences(self) -> torch.Tensor:
        """Returns the delta's differences, decompressed, as integers, 1-D."""
        return integers_of(decompress(self._delta.table, device=self._base.device, check=True))


Batch = GpuBatch | HostBatch | CopyBatch


# ---- applying ----


def apply_all(
    jobs: Sequence[Job],
    whole: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    commit: Callable[[list[Batch]], object] = list.clear,
) -> None:
    """Applies deltas to bases that share no memory with each other.

    Args:
        jobs: (name of the base for messages, delta, base).
        whole: (tensor, its new values). The values are copied to the tensors after all deltas have been applied.
        commit: a function that is called once everything has been applied. Its argument is the list of the batches that
            are undone if an error occurs. It must clear the list in the statement that records the changes, so that an
            interrupted call either has recorded them or undoes them.

    Raises:
        As in `Delta.apply_`. All bases are then as they were before the call.
    """
    for job in jobs:
        _check_base(*job)
    jobs = [(name, delta, base.detach() if isinstance(base, torch.Tensor) else base) for name, delta, base in jobs]
    begun: list[Batch] = []
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []  # bits of `whole`, once all deltas have been applied
    try:
        for batch in _batches(jobs):
            begun.append(batch)
            batch.begin()
        for batch in begun:
            batch.apply()
        if whole:
            copied = [(bits_of(base.detach()), bits_of(new)) for base, new in whole]
            staging.copy_all(*zip(*copied))
        commit(begun)
    except BaseException:
        # An interrupt during the copy is raised when all values have been copied, which cannot be undone.
        if copied and all(torch.equal(to, new.to(to.device)) for to, new in copied):
            commit(begun)
        for batch in begun:
            batch.take_back()
        raise
    finally:
        # Autograd does not see what the operations change.
        changed = [base for _, _, base in jobs if isinstance(base, torch.Tensor) and not base.is_inference()]
        torch.autograd.graph.increment_version(changed)


def _batches(jobs: Sequence[Job]) -> Iterator[Batch]:
    """Divides jobs into batches. All jobs on one GPU whose deltas have equal codebooks are one batch, if the kernels
    support these deltas. Every other job is a separate batch. If its base is a contiguous tensor on the CPU, and the
    size of a row is a multiple of 8 bytes, the delta is applied in place (`HostBatch`); otherwise it is applied to a
    copy of the base (`CopyBatch`)."""
    # The results of coding_key, by identity of the codebook and dtype, because deltas often share a codebook.
    keys: dict[tuple[Hashable, ...], tuple[Hashable, ...] | None] = {}
    groups: dict[tuple[Hashable, ...], list[tuple[str, Delta, torch.Tensor]]] = {}
    others: list[Batch] = []
    for name, delta, base in jobs:
        if isinstance(base, SplitBase):
            others.append(CopyBatch(name, delta, base))
            continue
        key = None
        if can_apply(delta, base):
            book = id(delta.table.codebook), delta.dtype
            if book not in keys:
                keys[book] = coding_key(delta)
            key = keys[book]
        if key is not None:
            groups.setdefault((base.device, *key), []).append((name, delta, base))
        elif base.device.type == "cpu" and base.is_contiguous() and base.numel() and delta.table.row_bytes % 8 == 0:
            others.append(HostBatch(name, delta, base))
        else:
            others.append(CopyBatch(name, delta, BasePart.whole(base).alone()))
    for group in groups.values():
        yield GpuBatch(group, [base for _, _, base in group])
    yield from others


def _check_base(name: str, delta: Delta, base: Any) -> None:
    """Raises TypeError or DeltaMismatchError unless a base is a tensor or a `SplitBase` with the dtype and shape of a
    delta."""
    if not isinstance(base, SplitBase):
        if not isinstance(base, torch.Tensor):
            raise TypeError(f"{name} is a {type(base).__name__}; wanted a torch.Tensor")
        check_source(base, name)
    if base.dtype != delta.dtype:
        raise TypeError(f"{name} has dtype {base.dtype}; the delta is for {delta.dtype}")
    if isinstance(base, torch.Tensor) and (base.is_conj() or base.is_neg()):
        raise TypeError(f"{name} is a conjugated or negated view of other memory; wanted the tensor itself")
    if base.shape != delta.shape:
        raise DeltaMismatchError(f"{name} has shape {list(base.shape)}; the delta is for {list(delta.shape)}")


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
