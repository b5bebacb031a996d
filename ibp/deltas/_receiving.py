"""Receives the messages of an `ibp.deltas.Sender`, and keeps an engine's weights equal to those of a trainer.

`ibp.deltas.Receiver` changes weights that have the layout of the trainer's, and `PlacedReceiver` those of an engine
that keeps them merged, sharded or compressed.

A push is one call of `Sender.push`, which makes one or more messages. If several senders send the same weights, each of
them is called a part, and the messages of all parts together form the push. A message names regions. A region is some
rows of a tensor, or of several tensors that are joined. The *bases* of a region are the memory in this process that
holds these rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from .._rows.handle import CorruptTableError
from .._tables.compressed_tensor import CompressedTensor
from ._applying import Base, BasePart, Batch, SplitBase, apart, apply_all
from ._coding import DeltaMismatchError, check_weight, fingerprint
from ._delta import Delta, make
from ._messages import Change, Named, PushHead, Region, TensorRows, named, opened, read_message

_WANTED = "the weights are as they were, and are wanted whole unless what is missing still comes: push(..., full=True)"


class OutOfSyncError(DeltaMismatchError):
    """Raised if a message cannot be applied: an earlier message was lost, this message was received before, it is
    inconsistent with other messages of its push, or it is for other weights. The weights are unchanged.
    `Sender.push(weights, full=True)` makes messages that can be applied to any weights with these names, shapes and
    dtypes."""


# A region of a message, its change, and its bases. The change is None if the region has not changed.
_Arrival = tuple[Region, Change | None, list[Base]]


class _Arrived(NamedTuple):
    """The messages of a push that have come from one sender. `head` is the head of the message that came first. `came`
    maps the number of each message to its regions."""

    head: PushHead
    came: dict[int, list[_Arrival]]


class Receiver:
    """Changes an engine's weights to the versions that an `ibp.deltas.Sender` pushes.

    The messages of a push may come in any order. When the last of them has come, all changes are applied to the weights
    in place. If the call fails or is interrupted, the changes are undone, so the weights are never a mixture of two
    versions. Until the push is complete, the receiver keeps a copy of each message, on the device of the weights if the
    message has coded changes, otherwise on the device of the message. So the caller may reuse a message's memory as
    soon as `apply` has returned.

    Example:
        >>> there, here = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        >>> sender, receiver = ibp.deltas.Sender(), ibp.deltas.Receiver(here)
        >>> [receiver.apply(message) for message in sender.push(there)]
        [True]
        >>> torch.equal(here.weight, there.weight)
        True

    Args:
        weights: a module, whose state dict is used; or tensors by name, as a mapping or as pairs (name, tensor). The
            tensors are on the CPU or a GPU, and are changed in place. They may be `ibp.CompressedTensor`s, such as the
            table of an `ibp.nn.Linear`. The rows of a table are decompressed, changed and compressed again in the
            table's slots (`update_`), region by region. CUDA graphs that multiply by such a table must be captured
            again, after `prepare_linear`.

    Attributes:
        version: the number that the sender gave to the weights' present version; None before the first push.

    Raises:
        TypeError: a weight is neither a tensor nor a table.
    """

    def __init__(self, weights: Named) -> None:
        self._weights = named(weights)
        for name, weight in self._weights.items():
            check_weight(weight, name)
        self.version: int | None = None
        self._senders: dict[int, str] = {}  # for each part, the PushHead.sender that sent the present version
        self._pending: dict[int, _Arrived] = {}  # for each part, its messages for the next version
        self._known: dict[bytes, int] = {}  # fingerprints of the present version, by Region.rows
        self._bases: dict[tuple[bytes, torch.dtype], list[Base]] = {}  # the bases of regions, by Region.rows and dtype
        self._whole: frozenset[bytes] = frozenset()  # the Region.rows of the last push, which cover each tensor

    def apply(self, message: torch.Tensor) -> bool:
        """Receives a message. If it is the last one of its push, applies all changes of the push.

        Args:
            message: uint8 [bytes], on any device.

        Returns:
            True if the weights now have the message's version. False if more messages of the push must come first.

        Raises:
            OutOfSyncError: an earlier message is lost, this message was received before, it is inconsistent with other
                messages of its push, or it is for other weights.
            CorruptTableError: the message is damaged. It may be sent again.
            KeyError, TypeError, ValueError: a name, dtype or shape in the message does not match the weights.
        After any of these errors the weights are unchanged.
        """
        head, data = read_message(message)
        if not isinstance(head, PushHead):
            raise CorruptTableError(f"the message begins with a {type(head).__name__}; wanted a PushHead")
        self._check_agreement(head)
        self._check_order(head)
        part, (number, _) = head.part[0], head.piece
        all_parts = {of: each for of, each in self._pending.items() if each.head.version == head.version}
        arrived = all_parts.get(part)
        if arrived is None or arrived.head.sender != head.sender:
            arrived = all_parts[part] = _Arrived(head, {})
        num_wanted = sum(each.head.piece[1] - len(each.came) for each in all_parts.values())
        is_last = len(all_parts) == head.part[1] and num_wanted == 1
        # The caller may overwrite its message. What the changes need is prepared now, while other messages may still be
        # on their way. If this fails, the message has not come.
        changes = self._changes(head, data, copies=not is_last)
        if not is_last:
            arrived.came[number] = changes
            self._pending = all_parts
            return False
        self._pending = {}  # If the push is not applied, all of its messages have to come again.
        came = [arrival for each in all_parts.values() for some in each.came.values() for arrival in some]
        self._become([*came, *changes], {part: each.head.sender for part, each in all_parts.items()}, head.version)
        return True

    def _check_order(self, head: PushHead) -> None:
        """Raises OutOfSyncError if the message was received before, or if an earlier message was lost."""
        part, (number, count) = head.part[0], head.piece
        if self.version is not None and self._senders.get(part) == head.sender:
            if head.version <= self.version:
                raise OutOfSyncError(
                    f"version {head.version} came again: the weights are version {self.version}, so leave it out"
                )
            if head.base is not None and head.base != self.version:
                raise OutOfSyncError(
                    f"the message makes version {head.version} of version {head.base}, and the weights are version "
                    f"{self.version}: a message is lost; {_WANTED}"
                )
        arrived = self._pending.get(part)
        if arrived is None or arrived.head.sender != head.sender:
            return
        if arrived.head.version == head.version and number in arrived.came:
            raise OutOfSyncError(f"message {number} of {count} of version {head.version} came again: leave it out")
        if arrived.head.version != head.version and head.base is not None:
            raise OutOfSyncError(
                f"{len(arrived.came)} of {arrived.head.piece[1]} messages of version {arrived.head.version} have come, "
                f"and now one of version {head.version}: messages are lost; {_WANTED}"
            )

    def _check_agreement(self, head: PushHead) -> None:
        """Raises CorruptTableError if the numbers in a message's head are inconsistent, and OutOfSyncError if they are
        inconsistent with the numbers in other messages of the push."""
        if not all(0 <= number < count for number, count in (head.part, head.piece)):
            raise CorruptTableError(
                f"the message is damaged: it says that it is number {head.piece[0]} of {head.piece[1]}, of sender "
                f"{head.part[0]} of {head.part[1]}"
            )
        for other in (each.head for each in self._pending.values() if each.head.version == head.version):
            if other.part[1] != head.part[1]:
                raise OutOfSyncError(
                    f"the message is of one of {head.part[1]} senders, and others of version {head.version} are of one "
                    f"of {other.part[1]}; {_WANTED}"
                )
            if other.sender == head.sender and (other.piece[1], other.base) != (head.piece[1], head.base):
                raise OutOfSyncError(
                    f"the message is one of {head.piece[1]} that make version {head.version} of version {head.base}, "
                    f"and others are of {other.piece[1]}, and of version {other.base}; {_WANTED}"
                )

    def _become(self, arrivals: list[_Arrival], senders: dict[int, str], version: int) -> None:
        """Applies all changes of a push. If an error is raised, the weights are unchanged.

        Args:
            arrivals: the regions of all messages of the push.
            senders: for each part, the PushHead.sender of its messages.
            version: the version that the weights become.
        """
        jobs: list[tuple[str, Delta, Base]] = []
        whole: list[tuple[torch.Tensor, torch.Tensor]] = []
        results: dict[bytes, int] = {}
        rows = frozenset(region.rows for region, _, _ in arrivals)
        if rows != self._whole:  # most pushes have the same rows as the previous push
            _check_whole(region for region, _, _ in arrivals)
        self._whole = rows
        for region, change, bases in arrivals:
            _check_result(region, change)
            if results.setdefault(region.rows, region.result) != region.result:
                raise ValueError(f"two senders have sent {_name(region)}, and not the same")
            for base in bases:
                self._check_before(region, base)
                if isinstance(change, Delta):
                    jobs.append((_name(region), change, base))
                elif change is not None:
                    for part, new in _written(base, change):
                        if isinstance(part.memory, torch.Tensor):
                            whole.append((part.memory, new))
                        else:
                            delta = make(new, part.read(), device=part.memory.device)
                            jobs.append((_name(region), delta, part.alone()))
        # If the call is interrupted, no fingerprint is known any more, and the next push computes the fingerprints that
        # it needs.
        self._known = {}

        def commit(batches: list[Batch]) -> None:
            self._known, self._senders, self.version, batches[:] = results, senders, version, ()

        try:
            apply_all(apart(jobs), whole, commit)
        except DeltaMismatchError as error:
            raise OutOfSyncError(f"{error}; {_WANTED}") from error

    def _changes(self, head: PushHead, data: torch.Tensor, copies: bool) -> list[_Arrival]:
        """Returns the regions of a message. If the message has tables, the parts of all its changes are first copied to
        the device of the weights.

        Args:
            data: the buffer with the parts.
            copies: whether the changes must not use the memory of `data`.
        """
        new = [region for region in head.regions if (region.rows, region.dtype) not in self._bases]
        self._bases |= {(region.rows, region.dtype): found for region, found in zip(new, self.bases_of(new))}
        bases = [self._bases[region.rows, region.dtype] for region in head.regions]
        heads = [region.change for region in head.regions if region.change is not None]
        targets = [base for found in bases for base in found]
        has_tables = targets and any(each.fields is not None for each in heads)
        data = data.to(targets[0].device if has_tables else data.device, copy=copies)
        changes = iter(opened(heads, data))
        return [
            (region, None if region.change is None else next(changes), found)
            for region, found in zip(head.regions, bases)
        ]

    def bases_of(self, regions: Sequence[Region]) -> list[list[Base]]:
        """Returns a list of the bases of each region. It has one base, or several if a tensor has several names.
        Subclasses override this method for engines whose weights have another layout than the sender's.

        Raises:
            KeyError, TypeError, ValueError: as in `apply`.
        """
        return [
            bases_of_rows([(rows, self._parts_here(rows, region.dtype)) for rows in region.tensor_rows()], region.dtype)
            for region in regions
        ]

    def _parts_here(self, rows: TensorRows, dtype: torch.dtype) -> list[BasePart]:
        """Returns the parts of `rows` that this process holds. Here each part has all of the rows, under one of the
        names of their tensor."""
        found = []
        for name in rows.names:
            if name not in self._weights:
                raise KeyError(f"there is no tensor {name!r} here, which the message changes")
            weight = self._weights[name]
            if weight.dtype != dtype:
                raise TypeError(f"{name} has dtype {weight.dtype}; the message is for {dtype}")
            if weight.shape != rows.full_shape:
                raise ValueError(f"{name} has shape {list(weight.shape)}; the message is for {list(rows.full_shape)}")
            found.append(BasePart.at(weight, rows.start, rows.shape))
        return found

    def _check_before(self, region: Region, base: Base) -> None:
        """Raises OutOfSyncError if the rows in a base are not those that the sender had before the push. If the
        fingerprint of the rows is not known, the rows are read to compute it, but only if the region does not change.
        If the region is sent as a delta, `apply_all` checks the rows. Rows that are sent whole are not checked."""
        known = self._known.get(region.rows)
        if known is None and region.change is None:
            if isinstance(base, torch.Tensor):
                known = fingerprint(base.detach())
            elif base.is_whole:
                known = fingerprint(base.read())
        wanted = region.result if region.change is None else (region.change.fingerprints or (known,))[0]
        if known is not None and known != wanted:
            raise OutOfSyncError(
                f"{_name(region)} has fingerprint {known:016x}, and {wanted:016x} at the sender; {_WANTED}"
            )


def _name(region: Region) -> str:
    """Returns a name for a region, for error messages."""
    names = [rows.names[0] for rows in region.tensor_rows()]
    return names[0] if len(names) == 1 else f"{names[0]}, joined with {len(names) - 1} others,"


def _check_whole(regions: Iterable[Region]) -> None:
    """Raises OutOfSyncError unless the regions of a push together cover all rows of each tensor that they name."""
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for rows in (rows for region in regions for rows in region.tensor_rows()):
        for name in rows.names:
            found.setdefault((name, rows.num_tensor_rows), []).append((rows.start, rows.end))
    for (name, num_rows), ranges in found.items():
        end = 0
        for first, last in sorted(ranges):
            end = max(end, last) if first <= end else end
        if end < num_rows:
            raise OutOfSyncError(f"the messages have the first {end} of {num_rows} rows of {name} alone; {_WANTED}")


def _check_result(region: Region, change: Change | None) -> None:
    """Raises CorruptTableError if the result of a change does not have the fingerprint that its region names. A table
    that is sent whole is not checked."""
    if isinstance(change, torch.Tensor):
        result = fingerprint(change)
    else:
        result = change.result if isinstance(change, Delta) else region.result
    if result != region.result:
        raise CorruptTableError(
            f"{_name(region)} would not become the tensor with fingerprint {region.result:016x}: the message is damaged"
        )


def bases_of_rows(places: Sequence[tuple[TensorRows, Sequence[BasePart]]], dtype: torch.dtype) -> list[Base]:
    """Returns the bases of one region.

    - If the region has rows of a single tensor, and each memory is a tensor that holds all of these rows, each memory
      is a separate base. So a tensor with several names has several bases.
    - If the parts of the region lie one after the other in memory, as views of one buffer do, there is one base, which
      is a view of them.
    - Otherwise there is one base (`SplitBase`), which consists of all parts.
    - If this process holds none of the rows, there is no base.

    Args:
        places: for each tensor of the region, (its rows, the parts of these rows that this process holds). Different
            parts of a tensor must not overlap, unless one of them has all rows.
        dtype: the dtype of the rows.
    """
    if len(places) == 1:
        rows, found = places[0]
        memories = [part.memory for part in found if isinstance(part.memory, torch.Tensor)]
        if len(memories) == len(found) and all(memory.shape == rows.shape for memory in memories):
            return list(memories)
    parts, offset, num_missing = [], 0, 0
    for rows, found in places:
        parts += [part._replace(offset=offset + part.offset) for part in found]
        offset += rows.shape.numel()
        there = {(part.offset, part.size): math.prod(part.size) for part in found}
        num_missing += max(0, rows.shape.numel() - sum(there.values()))
    if not parts:
        return []
    shape = places[0][0].shape if len(places) == 1 else torch.Size((offset,))
    split = SplitBase(parts, shape, dtype, not num_missing)
    view = split.as_tensor()
    return [split if view is None else view]


def _written(base: Base, change: Change) -> list[tuple[BasePart, torch.Tensor]]:
    """For a base whose elements are sent whole, returns (part, its new values) for each of its parts. Raises
    CorruptTableError unless the change is a tensor with the shape and dtype of the base."""
    if not isinstance(change, torch.Tensor) or (change.shape, change.dtype) != (base.shape, base.dtype):
        raise CorruptTableError("the message holds something else than deltas and plain tensors of the weights' shapes")
    parts = [BasePart.whole(base)] if isinstance(base, torch.Tensor) else base.parts
    return [(part, part.of(change.view(-1))) for part in parts]


class ShardPlace(NamedTuple):
    """Says where a process keeps a part of a checkpoint's tensor. The part is a box: a range of elements in each
    dimension.

    Example:
        >>> merged = torch.zeros(8, 4)
        >>> place = ibp.deltas.ShardPlace(merged, first_row=4, box=((0, 4), (0, 4)))  # the lower half of merged
        >>> place.memory[place.first_row :].shape
        torch.Size([4, 4])

    Attributes:
        memory: the tensor or table that holds the part. Its rows have the same shape as the part's rows. A tensor
            without dimensions counts as one row.
        first_row: the index of the row of `memory` at which the part begins.
        box: for each dimension of the checkpoint's tensor, (index of the part's first element, number of elements).
    """

    memory: torch.Tensor | CompressedTensor
    first_row: int
    box: tuple[tuple[int, int], ...]

    def _within(self, rows: TensorRows) -> BasePart | None:
        """Returns the part of `rows` that this place holds, or None if it holds none of them."""
        if not rows.shape:
            return BasePart.at(self.memory, 0, rows.shape)
        (start, length), *others = self.box
        first, last = max(start, rows.start), min(start + length, rows.start + rows.shape[0])
        if first >= last:
            return None
        box = slice(first - rows.start, last - rows.start), *(slice(at, at + size) for at, size in others)
        return BasePart.at(self.memory, self.first_row + first - start, rows.shape, box)


class PlacedReceiver(Receiver, ABC):
    """A `Receiver` for an engine whose tensors differ from those of the checkpoint: the engine may merge several of the
    checkpoint's tensors, keep only parts of them, or keep them as tables. A subclass implements `places_of`, which
    returns where the engine keeps each tensor.

    Example:
        >>> merged = torch.zeros(8, 4)
        >>> class MergedReceiver(ibp.deltas.PlacedReceiver):
        ...     def places_of(self, tensors):
        ...         first_rows, box = {"gate": 0, "up": 4}, ((0, 4), (0, 4))
        ...         return {name: [ibp.deltas.ShardPlace(merged, first_rows[name], box)] for name in tensors}
        >>> sender, receiver = ibp.deltas.Sender(), MergedReceiver()
        >>> weights = {"gate": torch.ones(4, 4), "up": torch.full((4, 4), 2.0)}
        >>> [receiver.apply(message) for message in sender.push(weights)]
        [True]
        >>> merged[:, 0]
        tensor([1., 1., 1., 1., 2., 2., 2., 2.])
    """

    def __init__(self) -> None:
        super().__init__({})
        self._places: dict[str, Sequence[ShardPlace]] = {}

    @abstractmethod
    def places_of(self, tensors: Mapping[str, tuple[torch.Size, torch.dtype]]) -> Mapping[str, Sequence[ShardPlace]]:
        """Returns the places of a checkpoint's tensors in this process. It is called only once for each name.

        Args:
            tensors: (shape, dtype) of each tensor, by name.

        Returns:
            For each name, the places of the tensor's parts, or an empty sequence if this process keeps no part of the
            tensor. The boxes of a tensor's places must be equal or must not overlap.
        """

    def bases_of(self, regions: Sequence[Region]) -> list[list[Base]]:
        """Returns, for each region of a message, the memory that holds its rows. `Receiver.apply` calls this method."""
        asked = {
            name: (rows.full_shape, region.dtype)
            for region in regions
            for rows in region.tensor_rows()
            for name in rows.names
            if name not in self._places
        }
        if asked:
            self._places.update(self.places_of(asked))
        return super().bases_of(regions)

    def _parts_here(self, rows: TensorRows, dtype: torch.dtype) -> list[BasePart]:
        places = [place._within(rows) for name in rows.names for place in self._places[name]]
        return [place for place in places if place is not None]
