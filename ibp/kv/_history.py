"""All coded tokens of a layer: which blocks there are, whose they are now, and where their bytes are."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from .._machine.staging import Coming
from ._arena import TokenArena
from ._coding import CodedTokens, Form, Options, TokenCodec, TokenOrder

_stamps = itertools.count(1)


@dataclass
class Batch:
    """Blocks that were coded by one call.

    Attributes:
        num_blocks: how many of the blocks are left.
        num_coded: how many blocks the call coded.
        batch_size: sequences of a block.
        start: where their bytes start in the arena.
    """

    num_blocks: int
    num_coded: int
    batch_size: int
    start: int


class Pending:
    """Blocks that are being coded. They belong to the layer's raw tokens until they are stored.

    Args:
        keys, values: as queued on the current stream.
        num_blocks: of the oldest raw tokens.
        batch_size: sequences of a block.
    """

    def __init__(self, keys: CodedTokens, values: CodedTokens, num_blocks: int, batch_size: int) -> None:
        self.keys, self.values, self.num_blocks, self.batch_size = keys, values, num_blocks, batch_size
        self.sequences: torch.Tensor | None = None  # which of the coded ones each sequence is by now
        states = [coded.state for coded in (keys, values) if coded.state is not None]
        self._states = Coming(torch.stack(states) if states else torch.empty(0, 8, dtype=torch.int64))

    def is_ready(self) -> bool:
        """Whether their sizes are known without waiting."""
        return self._states.is_here

    def sizes(self) -> tuple[int, int]:
        """Bytes of the coded keys and values; waits for them. RuntimeError: they were not coded, which cannot
        happen."""
        states = iter(self._states.wait().tolist())
        keys, values = (
            coded.num_bytes(None if coded.state is None else next(states)) for coded in (self.keys, self.values)
        )
        return keys, values

    def take(self, sequences: torch.Tensor) -> None:
        """Sequence b is from now on what sequence sequences[b] was."""
        self.sequences = sequences.clone() if self.sequences is None else self.sequences[sequences]


class History:
    """The coded tokens of a layer, the oldest ones: whole blocks.

    Args:
        keys, values: how they are cut.
        options: of the cache.
        arena: for the coded bytes.
        device: where they are coded and decoded.

    Attributes:
        num_blocks: of all sequences.
        stamp: another one whenever the bytes change.
        order: which coded sequence is which one now; None: as they were coded.
    """

    def __init__(self, keys: Form, values: Form, options: Options, arena: TokenArena, device: torch.device) -> None:
        given = options.codebooks or (None, None)
        self._options, self.arena, self.device = options, arena, device
        self.keys, self.values = (TokenCodec(form, options, book, device) for form, book in zip((keys, values), given))
        self.num_blocks, self.stamp = 0, next(_stamps)
        self._batches: list[Batch] = []
        self._num_slots, self._batch_size = 0, 0
        self.order: TokenOrder | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self._options.block

    @property
    def batch_size(self) -> int:
        """Sequences, once there are blocks."""
        return self._batch_size

    @property
    def original_bytes(self) -> int:
        """Bytes of the tokens that were coded, and whose bytes are still there."""
        item_bytes = sum(codec.form.item_bytes * codec.form.num_heads for codec in (self.keys, self.values))
        return sum(batch.num_coded * batch.batch_size for batch in self._batches) * item_bytes

    @property
    def index_bytes(self) -> int:
        order = 0 if self.order is None else self.order.slots.numel() * 8
        return order + sum(span.index_bytes for codec in (self.keys, self.values) for span in codec.spans)

    @property
    def is_sparse(self) -> bool:
        """Whether more than half of the bytes are of tokens that nobody has any more."""
        coded = sum(batch.num_coded * batch.batch_size for batch in self._batches)
        return 2 * self.num_blocks * self._batch_size < coded

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Pending:
        """Queues the coding of whole blocks that come next, [B, heads, n * block, head_dim]."""
        num_blocks = keys.shape[2] // self._options.block
        return Pending(self.keys.encode(keys), self.values.encode(values), num_blocks, keys.shape[0])

    def add(self, pending: Pending, sizes: tuple[int, int], offsets: tuple[int, int], start: int) -> None:
        """Takes blocks whose bytes are, or will be for what reads the arena, at offsets of it.

        Args:
            sizes: bytes of keys and of values.
            offsets: where they are.
            start: what of the arena was used before.
        """
        first = self._num_slots
        for codec, coded, size, offset in zip((self.keys, self.values), (pending.keys, pending.values), sizes, offsets):
            codec.add(coded, size, offset, self.num_blocks, first)
        self._batches.append(Batch(pending.num_blocks, pending.num_blocks, pending.batch_size, start))
        self._append_order(pending)
        self._num_slots += pending.num_blocks * pending.batch_size
        self.num_blocks += pending.num_blocks
        self.stamp = next(_stamps)

    def _append_order(self, pending: Pending) -> None:
        num_blocks, batch_size, sequences = pending.num_blocks, pending.batch_size, pending.sequences
        self._batch_size = batch_size if sequences is None else sequences.numel()
        if self.order is None and sequences is None:
            return
        held = self._slots()
        new = torch.arange(self._num_slots, self._num_slots + num_blocks * batch_size, device=self.device)
        new = new.view(num_blocks, batch_size)
        if sequences is not None:
            new = new[:, sequences]
        self.order = TokenOrder(torch.cat((held, new)) if self.num_blocks else new, next(_stamps))

    def _slots(self) -> torch.Tensor:
        """Which coded sequence each one is, of every block: [num_blocks, B]."""
        if self.order is not None:
            return self.order.slots
        slots = torch.arange(self._num_slots, device=self.device)
        return slots.view(self.num_blocks, -1) if self.num_blocks else slots.view(0, 0)

    def take(self, sequences: torch.Tensor) -> None:
        """Sequence b is from now on what sequence sequences[b] was: nothing is decoded. sequences: int64 [B]."""
        if self.num_blocks:
            self.order = TokenOrder(self._slots()[:, sequences], next(_stamps))
            self._batch_size = sequences.numel()

    def truncate(self, num_blocks: int) -> None:
        """Forgets the blocks behind the first ones. Bytes are free again once nothing is left of the call that coded
        them."""
        while self._batches and self.num_blocks - self._batches[-1].num_blocks >= num_blocks:
            self.num_blocks -= self._batches[-1].num_blocks
            self.arena.rewind(self._batches.pop().start)
        if self.num_blocks > num_blocks:
            self._batches[-1].num_blocks -= self.num_blocks - num_blocks
            self.num_blocks = num_blocks
        self._num_slots = sum(batch.num_blocks * batch.batch_size for batch in self._batches)
        for codec in (self.keys, self.values):
            codec.truncate(num_blocks, self._num_slots)
        if self.order is not None:
            self.order = TokenOrder(self.order.slots[:num_blocks], next(_stamps)) if num_blocks else None
        self.stamp = next(_stamps)

    def empty(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values for that many tokens of all sequences, [B, heads, num_tokens, head_dim]."""
        keys, values = (
            torch.empty(
                (self._batch_size, form.num_heads, num_tokens, form.head_dim), dtype=form.dtype, device=self.device
            )
            for form in (self.keys.form, self.values.form)
        )
        return keys, values

    def clone(self) -> History:
        copied = History(self.keys.form, self.values.form, self._options, self.arena.clone(), self.device)
        copied.keys, copied.values = self.keys.clone(), self.values.clone()
        copied.num_blocks, copied._num_slots, copied._batch_size = self.num_blocks, self._num_slots, self._batch_size
        copied._batches = [Batch(**vars(batch)) for batch in self._batches]
        copied.order = self.order
        return copied
