"""Codes the keys or values of a layer, and keeps the coded bytes and their index.

Tokens are coded in blocks of a fixed number of consecutive tokens. A `Form` says how the blocks are cut into items, and
items into rows. `CodedStates` codes the keys of a layer, or its values, and learns their codebooks. It codes items into
an `ibp.CodedRows`. The bytes of these rows are then copied to a `TokenArena`, which grows at its end, and their index
becomes a part of a `TokenSpan`, the index of consecutive blocks of one codebook.

A coded sequence is one block of one sequence of the batch, as it was coded. Coded sequences are numbered over all
blocks, in the order in which they were coded. If the sequences of the batch are reordered later, nothing is coded
again: the `order` of a layer, int64 [blocks, B], says that block t of the present sequence b is the coded sequence
order[t, b].
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch

from .. import _core
from .._common.modes import outside_of_modes
from .._common.sequences import rounded_up
from .._fetch.streaming import STREAM_SMS
from .._machine import memory as _memory
from .._rows import geometry as _rows
from .._rows.codebook import AnyCodebook, check_codebook, surveyed
from .._rows.handle import Parts
from .._rows.learning import CLEARLY_LESS, Learner, learned_from
from .._rows.planes import PlanesCodebook
from .._tables.coded_rows import CodedRows

# ---- rows ----

# Largest size of a row in bytes, unless one token is larger. On average a row wastes 16 bytes, half of its last sector,
# which is 0.2 % of a row of this size.
_MOST_ROW_BYTES = 8192
_LEARN_ELEMENTS = 1 << 19  # number of elements of the sample from which a codebook is learned
_LEAST_SAVINGS = 0.02  # if a codebook saves a smaller fraction of the bytes than this, tokens are kept raw
_OUTER_DIMS = 3  # number of dimensions that index the items of a tensor (see `Form`): block, sequence and head

# The result of `CodedStates.encode`: coded rows, or the bytes of blocks that are kept raw.
Coded = CodedRows | torch.Tensor


@dataclass(frozen=True)
class Form:
    """Describes how the keys or values of a layer, [B, num_heads, T, head_dim], are cut into items, and how the items
    are cut into rows.

    An item has the tokens of one block, one head and one sequence. Its item_bytes bytes are contiguous, and are cut
    into rows of row_bytes bytes without a remainder.
    """

    dtype: torch.dtype
    num_heads: int
    head_dim: int
    block: int
    row_bytes: int

    @classmethod
    def of(cls, states: torch.Tensor, block: int, codebook: AnyCodebook | None) -> Form:
        """Returns the form of keys or values. states: [B, num_heads, T, head_dim]. codebook: the codebook that will
        code them, or None if it is not known yet.

        Raises:
            ValueError: the size of an item is not a multiple of the codebook's row size, or one token of a head is
                empty or too large for a row.
        """
        token_bytes = states.shape[-1] * states.element_size()
        item_bytes = block * token_bytes
        if codebook is not None:
            check_codebook(codebook)
            row_bytes = codebook.row_bytes
            if item_bytes % row_bytes:
                raise ValueError(
                    f"a codebook has rows of {row_bytes} bytes; wanted a divisor of {item_bytes}, the bytes of "
                    f"{block} tokens of a head"
                )
        else:
            tokens = [count for count in range(1, block + 1) if block % count == 0]
            row_bytes = max(
                (n * token_bytes for n in tokens if n * token_bytes <= _MOST_ROW_BYTES), default=token_bytes
            )
        if not 0 < row_bytes <= _core.MAX_ROW_BYTES:
            raise ValueError(f"one token of a head has {token_bytes} bytes; wanted 1 to {_core.MAX_ROW_BYTES}")
        return cls(states.dtype, states.shape[1], states.shape[-1], block, row_bytes)

    @property
    def item_bytes(self) -> int:
        return self.block * self.head_dim * self.dtype.itemsize

    @property
    def rows_per_item(self) -> int:
        return self.item_bytes // self.row_bytes

    def items(self, tokens: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Returns the items of blocks first to last - 1, as a view [blocks, B, num_heads, block * head_dim] of tokens.
        tokens: [B, num_heads, tokens, head_dim], whose last two dimensions must be contiguous."""
        batch, heads, _, dim = tokens.shape
        of_batch, of_head, of_token, _ = tokens.stride()
        start = tokens.storage_offset() + first * self.block * of_token
        sizes, strides = (last - first, batch, heads, self.block * dim), (self.block * of_token, of_batch, of_head, 1)
        return tokens.as_strided(sizes, strides, start)


# ---- bytes ----

# Each allocation of pinned memory takes time, and adds a copy to every later fetch. So an arena grows in large steps:
# by its used size if that is below 1 MiB, by 1 MiB if the used size is below 4 MiB, and otherwise by a quarter of the
# used size.
_SHARE, _FIRST_BYTES = 4, 1 << 20
# An arena and the index of its tokens should take no more memory than the raw tokens. The index usually takes less than
# a 64th of the tokens' uncompressed size, so an arena grows to at most 63/64 of this size. If compression saves too
# little for that, the arena grows by an eighth of its used size, so that the number of allocations stays logarithmic.
_INDEX_SHARE, _LEAST_SHARE = 64, 8


class TokenArena:
    """An arena of bytes that grows at its end. In device memory it is a single allocation, whose bytes are copied to a
    larger one when it grows. In pinned host memory it is a list of allocations that never move; the offsets of each
    allocation continue those of the one before.

    Args:
        device: the device that encodes and decodes.
        pinned: whether the bytes are in pinned host memory.
    """

    def __init__(self, device: torch.device, pinned: bool) -> None:
        self._device, self._pinned = device, pinned
        self.used = 0  # number of bytes that are reserved, including gaps for alignment
        self._pieces: list[tuple[int, torch.Tensor]] = []  # for each allocation, (offset of its first byte, memory)
        self._parts: list[tuple[int, torch.Tensor]] | None = None  # the result of `parts`; None: not known
        # For pinned memory: an event that is recorded after each copy to reserved bytes.
        self.filled = torch.cuda.Event() if pinned else None

    def reserve(self, num_bytes: int, alignment: int, plain_bytes: int) -> tuple[int, list[torch.Tensor]]:
        """Reserves num_bytes bytes at the end of the arena. Returns (offset of the bytes, memory of the bytes). The
        offset is a multiple of the alignment. The memory is a list of one tensor, or of two if the bytes begin in one
        allocation of pinned memory and end in the next. If the call is interrupted, `rewind` with the former value of
        `used` undoes it.

        plain_bytes: uncompressed size in bytes of all tokens of the arena, including those that are about to be added.
        """
        offset = rounded_up(self.used, alignment)
        end = offset + num_bytes
        if not self._pieces or end > self.nbytes:
            self._grow(end, plain_bytes)
        self.used, self._parts = end, None
        return offset, [
            memory[max(0, offset - start) : end - start]
            for start, memory in self._pieces
            if offset < start + memory.numel() and start < end
        ]

    def _grow(self, end: int, plain_bytes: int) -> None:
        """Allocates memory so that the arena has at least `end` bytes."""
        held = self.nbytes
        saved = plain_bytes - plain_bytes // _INDEX_SHARE - held
        step = max(self.used // _SHARE, min(self.used, _FIRST_BYTES))
        added = max(end - held, self.used // _LEAST_SHARE, min(step, saved))
        if self._pinned:
            self._pieces.append((held, _memory.empty(added, torch.device("cpu"), pin=True)))
        else:
            larger = torch.empty(held + added, dtype=torch.uint8, device=self._device)
            for start, part in self.parts():
                larger[start : start + part.numel()].copy_(part)
            self._pieces = [(0, larger)]
        self._parts = None

    def rewind(self, used: int) -> None:
        """Keeps the first `used` bytes and frees the bytes that were reserved after them."""
        self.used, self._parts = used, None
        while self._pinned and self._pieces and self._pieces[-1][0] >= used:
            self._pieces.pop()

    def parts(self) -> list[tuple[int, torch.Tensor]]:
        """Returns (offset, used bytes) for each allocation."""
        if self._parts is None:
            ends = [*(start for start, _ in self._pieces[1:]), self.used]
            self._parts = [(start, memory[: end - start]) for (start, memory), end in zip(self._pieces, ends)]
        return self._parts

    @property
    def nbytes(self) -> int:
        return sum(memory.numel() for _, memory in self._pieces)

    def clone(self) -> TokenArena:
        """Returns an arena with a copy of the used bytes. Device memory is copied on the current stream, after the work
        that is queued there. For pinned memory, the host first waits for the copies to it."""
        if self.filled is not None:
            self.filled.synchronize()
        copied = TokenArena(self._device, self._pinned)
        if self._pieces:
            copied._grow(self.used, 0)
            copied.used = self.used
            for offset, part in self.parts():
                copied._pieces[0][1][offset : offset + part.numel()].copy_(part)
        return copied


# ---- index ----

_GROWTH = 1.5  # the factor by which index arrays grow
_MOST_TABLES = 2  # a span keeps descriptions for this many buffers, those of a ring


class TokenSpan:
    """Consecutive blocks that are encoded with the same codebook, or that are all raw.

    Args:
        form: the geometry of the blocks.
        codebook: the codebook of the blocks. None: the blocks are raw.
        first_block: number of the span's first block.
        first_slot: number of the span's first coded sequence.
        device: the device of the index.
    """

    def __init__(
        self, form: Form, codebook: AnyCodebook | None, first_block: int, first_slot: int, device: torch.device
    ) -> None:
        self.form, self.codebook, self.first_block, self.first_slot = form, codebook, first_block, first_slot
        self.num_items = 0
        none = torch.empty(0, dtype=torch.int64, device=device)
        self._none, self._no_bases = none.view(torch.uint8), none
        # If the items are raw, `_bases` has their offsets in the arena in units of item_bytes.
        self._lengths, self._bases = none.view(torch.uint16), none
        self._words = self._none if codebook is None else codebook.words(device)
        self._codec = [0, form.row_bytes] if codebook is None else codebook.codec
        self._index = self._lengths, self._bases  # the used entries of `_lengths` and `_bases`
        # The items as operations read them, described by `_described`. A key is the address and the size in bytes of
        # the arena's bytes, or of a copy of these bytes in one of the two buffers of a ring. The descriptions are kept
        # because making one takes as long as calling an operation. They hold addresses, and keep no memory alive.
        self._tables: dict[tuple[int, int], torch.Tensor] = {}
        # The last call of `ids` with an order: (order, first, last, result).
        self._ids: tuple[torch.Tensor, int, int, torch.Tensor] | None = None
        # Decoding is slow if the codebook has separate entries for each column. Then only all multiprocessors together
        # keep up with the link.
        by_column = isinstance(codebook, PlanesCodebook) and codebook.per_column
        self._streaming_sms = 0 if by_column else STREAM_SMS

    @property
    def num_rows(self) -> int:
        return self.num_items * self.form.rows_per_item

    @property
    def index_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._lengths, self._bases, self._words))

    def append(self, coded: Coded, num_items: int, offset: int) -> None:
        """Appends items, whose bytes begin at the given offset in the arena."""
        if isinstance(coded, CodedRows):
            self._lengths = _extended(self._lengths, self.num_rows, coded.lengths)
            self._bases = _extended(self._bases, self.num_rows, coded.bases + offset)
        else:
            first = offset // self.form.item_bytes
            places = torch.arange(first, first + num_items, device=self._bases.device)
            self._bases = _extended(self._bases, self.num_items, places)
        self._resize(self.num_items + num_items)

    def truncate(self, num_items: int) -> None:
        """Keeps the first num_items items and removes the others."""
        if num_items < self.num_items:
            self._ids = None
            self._resize(num_items)

    def _resize(self, num_items: int) -> None:
        # Descriptions hold addresses of the present index, which is freed when `_index` is replaced. So they go first.
        # An interrupt comes before this statement or after it.
        num_rows = num_items * self.form.rows_per_item
        num_bases = num_items if self.codebook is None else num_rows
        index = self._lengths[:num_rows], self._bases[:num_bases]
        self._tables, self.num_items, self._index = {}, num_items, index

    def decode(
        self,
        staged: torch.Tensor,
        used: int,
        out: torch.Tensor,
        ids: torch.Tensor | None,
        sms: int | None,
        fault: torch.Tensor,
    ) -> None:
        """Queues the decoding of items.

        Args:
            staged: uint8. It begins with the used bytes of the arena, or with a copy of them on the device.
            used: the number of these bytes.
            out: the destination, a view that `Form.items` returned.
            ids: int64: for each item of `out`, the number, within this span, of the item that is decoded to it. None:
                all items of the span, in order.
            sms: number of multiprocessors that decode. 0: all. None: enough to keep up with the link.
            fault: the record in which faults are noted (`ibp._rows.handle`).
        """
        if self.codebook is None:
            places = self._index[1]
            ids = places if ids is None else places[ids]
        table = self._tables.get((staged.data_ptr(), used))
        if table is None:
            table = self._described(staged, used)
        sms = self._streaming_sms if sms is None else sms
        torch.ops.ibp.gather_items.default(table, ids, sms, out, fault, outer_dims=_OUTER_DIMS)

    def _described(self, staged: torch.Tensor, used: int) -> torch.Tensor:
        """Describes the items for operations, and keeps the description. staged, used: as for `decode`."""
        with outside_of_modes():
            item_bytes, memory = self.form.item_bytes, staged[:used]
            if self.codebook is None:
                row_bytes, num_items = self.form.row_bytes, used // item_bytes
                parts = memory[: num_items * item_bytes], self._none, self._lengths, self._no_bases
            else:
                row_bytes, num_items = 0, self.num_items
                parts = self._none, memory, *self._index
            shape = row_bytes, 0, num_items, item_bytes
            table: torch.Tensor = torch.ops.ibp.describe_table.default(*Parts(*parts, self._words, self._codec, *shape))
        if len(self._tables) == _MOST_TABLES:
            self._tables.clear()
        self._tables[staged.data_ptr(), used] = table
        return table

    def ids(self, first: int, last: int, batch: int, order: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the numbers, within this span, of the items of blocks first to last - 1, as int64 [n] in the order of
        `Form.items`. Returns None if these are all items of the span, in the order in which they were encoded.

        Args:
            first, last: block numbers, counted over all spans.
            batch: number of present sequences.
            order: for all blocks and present sequences, the coded sequences; the tensor must not be changed later.
                None: the sequences are in the order in which they were encoded.
        """
        heads, device = self.form.num_heads, self._bases.device
        if order is None:
            start, end = (first * batch - self.first_slot) * heads, (last * batch - self.first_slot) * heads
            if start == 0 and end == self.num_items:
                return None
            return torch.arange(start, end, device=device)
        if self._ids is None or self._ids[0] is not order or self._ids[1:3] != (first, last):
            slots = order[first:last] - self.first_slot
            ids = slots[..., None] * heads + torch.arange(heads, device=device)
            self._ids = order, first, last, ids.view(-1)
        return self._ids[3]

    def clone(self) -> TokenSpan:
        copied = copy.copy(self)
        copied._lengths, copied._bases = self._lengths.clone(), self._bases.clone()
        copied._resize(self.num_items)
        return copied


class CodedStates:
    """The coded keys of a layer, or its coded values: it encodes and decodes them, and keeps the index of all blocks.

    Args:
        form: the geometry of the keys or values.
        scheme: "planes", "ibp" or "raw".
        level: the level of scheme "planes".
        given: the first codebook. None: it is learned from the first keys or values that are encoded.
        device: the device that encodes and decodes.
    """

    def __init__(self, form: Form, scheme: str, level: str, given: AnyCodebook | None, device: torch.device) -> None:
        self.form, self._scheme, self._level, self._device = form, scheme, level, device
        self._learner: Learner[AnyCodebook] = Learner()
        if given is not None:
            self._learner.take(given)
        self._num_encoded = self.num_learned = 0
        self.spans: list[TokenSpan] = []

    def encode(self, tokens: torch.Tensor) -> Coded:
        """Queues the encoding of complete blocks of tokens, [B, num_heads, n * block, head_dim], on the current stream.
        If the call learns a codebook from the tokens, it waits for the GPU.

        Returns:
            The rows, whose overflow has room for all of them even if they are raw. If there is no codebook, the bytes
            of the blocks, uint8, which are copied only if they are not contiguous.
        """
        items = self.form.items(tokens.detach(), 0, tokens.shape[2] // self.form.block)
        if items.numel() and self._scheme != "raw":
            self._num_encoded += 1
            if self._learner.is_due(self._num_encoded):
                self._look(items)
        codebook = self._learner.found
        if codebook is None:
            return items.contiguous().view(-1).view(torch.uint8)
        num_rows = items[..., 0].numel() * self.form.rows_per_item
        room = rounded_up(codebook.row_bytes, _core.SECTOR_BYTES)  # size in bytes of a raw row in overflow
        rows = CodedRows(codebook, num_rows, slot_bytes=0, overflow_bytes=num_rows * room, device=items.device)
        rows.handle.encode(items, rows.tally, rows.fault)
        return rows

    def _look(self, items: torch.Tensor) -> None:
        """Learns a codebook from a sample of the items. The learned codebook replaces the present one if it saves
        clearly more bytes of the sample, or if there is no present one. But if the learned codebook saves less than
        `_LEAST_SAVINGS`, items are kept raw instead."""
        num_blocks, batch, heads, elements = items.shape
        ids = _rows.sampled(num_blocks * batch * heads, max(1, _LEARN_ELEMENTS // elements)).to(items.device)
        taken = items.view(torch.uint8)[ids // (batch * heads), ids // heads % batch, ids % heads]
        sample, codebook = taken.cpu().view(-1), self._learner.found
        learned = learned_from(
            sample,
            self.form.row_bytes,
            self.form.dtype,
            scheme=self._scheme,
            level=self._level,
            num_rows=items[..., 0].numel() * self.form.rows_per_item,
        )
        found = _saved(sample, learned)
        if codebook is None or found > _saved(sample, codebook) + CLEARLY_LESS:
            codebook = None if found < _LEAST_SAVINGS else learned
            self.num_learned += codebook is not None
        self._learner.take(codebook, use=self._num_encoded)

    def add(self, coded: Coded, num_bytes: int, offset: int, first_block: int, first_slot: int) -> None:
        """Appends the items of blocks to the last span. If there is no span, or the last span has another codebook,
        appends them to a new span instead. Also tells the learner the sizes of the items before and after encoding.
        First removes items of the same and of later numbers, which an interrupted call may have left.

        Args:
            coded: the result of `encode` for these blocks.
            num_bytes: size in bytes of the encoded items.
            offset: the offset in the arena at which their bytes begin.
            first_block, first_slot: numbers of the first block and of the first coded sequence of the items.
        """
        self.truncate(first_block, first_slot)
        codebook, plain_bytes = None, num_bytes
        if isinstance(coded, CodedRows):
            codebook, plain_bytes = coded.codebook, coded.num_rows * coded.row_bytes
        if not self.spans or self.spans[-1].codebook is not codebook:
            self.spans.append(TokenSpan(self.form, codebook, first_block, first_slot, self._device))
        self.spans[-1].append(coded, plain_bytes // self.form.item_bytes, offset)
        if codebook is not None and plain_bytes:
            self._learner.note(num_bytes, plain_bytes)

    def decode(
        self,
        staged: torch.Tensor,
        used: int,
        out: torch.Tensor,
        blocks: range,
        order: torch.Tensor | None,
        sms: int | None,
        fault: torch.Tensor,
    ) -> None:
        """Queues the decoding of blocks into the first tokens of `out`.

        Args:
            staged, used, sms, fault: as for `TokenSpan.decode`.
            out: [B, num_heads, tokens, head_dim], whose last two dimensions must be contiguous.
            blocks: the numbers of the blocks.
            order: as for `TokenSpan.ids`.
        """
        last = blocks.stop
        for span in reversed(self.spans):
            first = max(blocks.start, span.first_block)
            if first < last:
                ids = span.ids(first, last, out.shape[0], order)
                items = self.form.items(out, first - blocks.start, last - blocks.start)
                span.decode(staged, used, items, ids, sms, fault)
                last = first

    def truncate(self, num_blocks: int, num_slots: int) -> None:
        """Keeps the first num_blocks blocks and the first num_slots coded sequences, and removes the others."""
        self.spans = [span for span in self.spans if span.first_block < num_blocks]
        if self.spans:
            self.spans[-1].truncate((num_slots - self.spans[-1].first_slot) * self.form.num_heads)

    def clone(self) -> CodedStates:
        copied = copy.copy(self)
        copied._learner, copied.spans = replace(self._learner), [span.clone() for span in self.spans]
        return copied


def _extended(held: torch.Tensor, size: int, new: torch.Tensor) -> torch.Tensor:
    """Returns an array that begins with the first `size` entries of `held`, followed by `new`. If `held` is long
    enough, writes to `held` and returns it. Otherwise allocates a longer array, with room for more entries."""
    end = size + new.numel()
    if end > held.numel():
        larger = torch.empty(max(end, int(_GROWTH * size)), dtype=held.dtype, device=held.device)
        _signed(larger)[:size].copy_(_signed(held)[:size])
        held = larger
    _signed(held)[size:end].copy_(_signed(new))
    return held


def _signed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a uint16 tensor as int16, because torch cannot copy uint16 on every device. Returns any other
    tensor as it is."""
    return tensor.view(torch.int16) if tensor.dtype == torch.uint16 else tensor


def _saved(sample: torch.Tensor, codebook: AnyCodebook | None) -> float:
    """Returns the fraction of the sample's bytes that a codebook saves, or 0 without a codebook."""
    return 0.0 if codebook is None else 1 - surveyed(sample, codebook).stored / sample.numel()
