"""The encoded tokens of a layer (`TokenHistory`), and the memory of their encoded bytes (`TokenArena`)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .._common.process import OfThisProcess
from .._common.rounding import rounded_up
from .._machine import memory as _memory
from .._machine.staging import Coming
from ._coding import CodedTokens, Form, Options, TokenCodec, TokenOrder

if TYPE_CHECKING:
    from ._decoder import Fetch, TokenDecoder

# Each allocation of pinned memory takes time, and adds a copy to every later fetch. So an arena grows in large steps:
# by its used size if that is below 1 MiB, by 1 MiB if the used size is below 4 MiB, and otherwise by a quarter of the
# used size.
_SHARE, _FIRST_BYTES = 4, 1 << 20
# An arena and the index of its tokens should take no more memory than the raw tokens. The index usually takes less than
# a 64th of the tokens' uncompressed size, so an arena grows to at most 63/64 of this size. If compression saves too
# little for that, the arena grows by an eighth of its used size, so that the number of allocations stays logarithmic.
_INDEX_SHARE, _LEAST_SHARE = 64, 8
_stamps = itertools.count(1)


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
        self.used = end
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

    def rewind(self, used: int) -> None:
        """Keeps the first `used` bytes and frees the bytes that were reserved after them."""
        self.used = used
        while self._pinned and self._pieces and self._pieces[-1][0] >= used:
            self._pieces.pop()

    def parts(self) -> list[tuple[int, torch.Tensor]]:
        """Returns (offset, used bytes) for each allocation."""
        ends = [*(start for start, _ in self._pieces[1:]), self.used]
        return [(start, memory[: end - start]) for (start, memory), end in zip(self._pieces, ends)]

    @property
    def nbytes(self) -> int:
        return sum(memory.numel() for _, memory in self._pieces)

    def clone(self) -> TokenArena:
        """Returns an arena with a copy of the used bytes. Device memory is copied on the current stream, after the work
        that is queued there. For pinned memory, the host first waits for the copies to it."""
        if self.filled is not None:
            self.filled.synchronize()
        copied = TokenArena(self._device, self._pinned)
        if self.used:
            _, (memory,) = copied.reserve(self.used, 1, 0)
            for offset, part in self.parts():
                memory[offset : offset + part.numel()].copy_(part)
        return copied


@dataclass
class Batch:
    """The blocks that one call of `TokenHistory.add` has appended."""

    num_blocks: int  # number of these blocks that have not been removed
    num_coded: int  # number of blocks that the call appended
    batch_size: int  # number of sequences in a block
    start: int  # number of bytes of the arena that were in use before these blocks were added


class Pending:
    """Blocks that are being encoded. Until they are stored, their tokens count as raw tokens of the layer.

    Args:
        keys, values: the encodings that were queued on the current stream.
        num_blocks: number of blocks. The blocks hold the oldest raw tokens.
        batch_size: number of sequences in a block.
    """

    def __init__(self, keys: CodedTokens, values: CodedTokens, num_blocks: int, batch_size: int) -> None:
        self.keys, self.values, self.num_blocks, self.batch_size = keys, values, num_blocks, batch_size
        # int64 [B]: for each present sequence, its index at the time of the encoding. None: the order has not changed.
        self.sequences: torch.Tensor | None = None
        states = [coded.state for coded in (keys, values) if coded.state is not None]
        self._states = Coming(torch.stack(states) if states else torch.empty(0, 8, dtype=torch.int64, device="cpu"))

    def is_ready(self) -> bool:
        """Returns whether the sizes of the encoded blocks have arrived on the host."""
        return self._states.is_here

    def sizes(self) -> tuple[int, int]:
        """Waits for the encoding. Returns (size of the encoded keys, size of the encoded values), in bytes.

        Raises:
            RuntimeError: rows were lost, or the status or a size is invalid. This is an internal check: it always holds
                for encodings that `encode` has queued.
        """
        states = iter(self._states.wait().tolist())
        keys, values = (
            coded.num_bytes(None if coded.state is None else next(states)) for coded in (self.keys, self.values)
        )
        return keys, values

    def take(self, sequences: torch.Tensor) -> None:
        """Reorders the sequences: sequence b becomes the former sequence sequences[b]."""
        self.sequences = sequences.clone() if self.sequences is None else self.sequences[sequences]


class TokenHistory(OfThisProcess):
    """The oldest tokens of a layer, encoded in complete blocks. `TokenCoder.history` makes the object.

    The caller keeps the newer tokens raw. `encode` queues the encoding of the oldest raw tokens. The caller must keep
    these tokens until `store` has added their blocks to the history. `fetch` decodes the tokens of the history to the
    beginning of new tensors; the caller then copies its raw tokens to the rest of these tensors.

    Example:
        >>> coder = ibp.kv.TokenCoder(block=16, window=16)
        >>> keys, values = torch.randn(2, 1, 4, 48, 32).bfloat16()    # [B, heads, tokens, head_dim] each
        >>> history = coder.history(keys, values)
        >>> pending = history.encode(keys[..., :32, :], values[..., :32, :])
        >>> history.store(pending)    # now the caller may forget these 32 tokens
        >>> fetched, _ = history.fetch(num_tokens=48).wait()
        >>> fetched.shape, torch.equal(fetched[..., :32, :], keys[..., :32, :])
        (torch.Size([1, 4, 48, 32]), True)

    Args:
        keys, values: the geometry of keys and of values.
        options: the options of the cache.
        decoder: the object that stores and decodes blocks on the layer's device.

    Attributes:
        device: the device that encodes and decodes.
        num_blocks: number of encoded blocks. A block has the same number of consecutive tokens of every sequence.
    """

    _instead = "fetch() its keys and values, which can be pickled"

    def __init__(self, keys: Form, values: Form, options: Options, decoder: TokenDecoder) -> None:
        given, self.device = options.codebooks or (None, None), decoder.device
        self._options, self._decoder, self.arena = options, decoder, decoder.new_arena()
        self.keys, self.values = (
            TokenCodec(form, options, book, self.device) for form, book in zip((keys, values), given)
        )
        self.num_blocks = 0
        self.stamp = next(_stamps)  # changes whenever the bytes of the arena change
        self._batches: list[Batch] = []
        self._num_slots, self._batch_size = 0, 0
        # For each block and present sequence, its coded sequence. None: sequences are in the order of encoding.
        self.order: TokenOrder | None = None

    @property
    def num_tokens(self) -> int:
        """Number of coded tokens of each sequence."""
        return self.num_blocks * self._options.block

    @property
    def batch_size(self) -> int:
        """The number of sequences, or 0 if there are no blocks yet."""
        return self._batch_size

    @property
    def original_bytes(self) -> int:
        """Uncompressed size in bytes of all tokens whose coded bytes are still kept."""
        return sum(batch.num_coded * batch.batch_size for batch in self._batches) * self._block_bytes

    @property
    def plain_bytes(self) -> int:
        """Uncompressed size in bytes of the coded tokens of all present sequences."""
        return self.num_blocks * self.batch_size * self._block_bytes

    @property
    def _block_bytes(self) -> int:
        """Uncompressed size in bytes of a block of one sequence, keys and values."""
        return sum(codec.form.item_bytes * codec.form.num_heads for codec in (self.keys, self.values))

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of the coded rows that are kept, each rounded up to a multiple of 32."""
        return self.arena.used

    @property
    def nbytes(self) -> int:
        """Size in bytes of the memory that is allocated for coded rows, on the device or on the host."""
        return self.arena.nbytes

    @property
    def num_codebooks(self) -> int:
        """Number of codebooks that were learned."""
        return self.keys.num_learned + self.values.num_learned

    @property
    def index_bytes(self) -> int:
        """Size in bytes of the index of rows, the codebooks and the order of sequences, all in device memory."""
        order = 0 if self.order is None else self.order.slots.numel() * 8
        return order + sum(span.index_bytes for codec in (self.keys, self.values) for span in codec.spans)

    @property
    def is_sparse(self) -> bool:
        """Whether the coded tokens of the present sequences are fewer than half of the tokens whose coded bytes are
        kept. Tokens that several present sequences share count once for each of these sequences."""
        coded = sum(batch.num_coded * batch.batch_size for batch in self._batches)
        return 2 * self.num_blocks * self._batch_size < coded

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Pending:
        """Queues the encoding of the next n complete blocks of tokens. keys, values: [B, heads, n * block, head_dim].

        Returns:
            An object for `store`. Its `num_blocks` is n. `is_ready()` returns whether `store` can run without waiting
            for the GPU. `take(sequences)` reorders the sequences of these blocks; call it whenever `take` of the
            history is called before the blocks are stored.
        """
        num_blocks = keys.shape[2] // self._options.block
        return Pending(self.keys.encode(keys), self.values.encode(values), num_blocks, keys.shape[0])

    def store(self, pending: Pending) -> None:
        """Adds blocks to the history. pending: the result of `encode` for these blocks. Waits for the GPU unless
        `pending.is_ready()`. If the call is interrupted, either all blocks have been added, or no block."""
        with torch.inference_mode(False):
            self._decoder.store(self, pending)

    def fetch(self, num_tokens: int, blocks: range | None = None) -> Fetch:
        """Begins to decode coded tokens into new keys and values.

        Args:
            num_tokens: number of tokens of the new keys and values, at least the number of tokens that are decoded.
            blocks: the numbers of the blocks to decode. None: all blocks.

        Returns:
            An object whose `wait()` makes the current stream wait for the decoding, and returns the new keys and
            values, [B, heads, num_tokens, head_dim]. Their first tokens are the decoded ones; the others are
            uninitialised.

        Raises:
            RuntimeError: coded bytes in memory were damaged.
        """
        return self._decoder.fetch(self, num_tokens, blocks)

    def add(self, pending: Pending, sizes: tuple[int, int], offsets: tuple[int, int], start: int) -> None:
        """Appends blocks to the history. The caller must already have copied their bytes to the arena, or have queued
        the copy so that later work that reads the arena waits for it.

        Args:
            pending: the blocks.
            sizes: (size of the encoded keys, size of the encoded values), in bytes.
            offsets: (offset of the encoded keys, offset of the encoded values) in the arena.
            start: number of bytes of the arena that were in use before these blocks.
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
        """Returns int64 [num_blocks, B]: for each block and present sequence, the number of its coded sequence, as in
        `TokenOrder.slots`."""
        if self.order is not None:
            return self.order.slots
        slots = torch.arange(self._num_slots, device=self.device)
        return slots.view(self.num_blocks, -1) if self.num_blocks else slots.view(0, 0)

    def take(self, sequences: torch.Tensor) -> None:
        """Reorders the sequences without decoding: sequence b becomes the former sequence sequences[b]. sequences:
        int64 [B]."""
        if self.num_blocks:
            self.order = TokenOrder(self._slots()[:, sequences], next(_stamps))
            self._batch_size = sequences.numel()

    def truncate(self, num_blocks: int) -> None:
        """Keeps the first num_blocks blocks and removes the others. The bytes of blocks that one call of `add` appended
        become free when all of these blocks have been removed."""
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
        """Allocates keys and values for num_tokens tokens of all sequences, [B, heads, num_tokens, head_dim]."""
        keys, values = (
            torch.empty(
                (self._batch_size, form.num_heads, num_tokens, form.head_dim), dtype=form.dtype, device=self.device
            )
            for form in (self.keys.form, self.values.form)
        )
        return keys, values

    def clone(self, decoder: TokenDecoder | None = None) -> TokenHistory:
        """Returns a copy of the history, with a separate copy of the coded bytes. decoder: the decoder of the copy.
        None: the decoder of this history."""
        copied = TokenHistory(self.keys.form, self.values.form, self._options, decoder or self._decoder)
        copied.arena = self.arena.clone()
        copied.keys, copied.values = self.keys.clone(), self.values.clone()
        copied.num_blocks, copied._num_slots, copied._batch_size = self.num_blocks, self._num_slots, self._batch_size
        copied._batches = [Batch(**vars(batch)) for batch in self._batches]
        copied.order = self.order
        return copied
