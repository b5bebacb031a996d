"""Keeps the older tokens of a growing KV-cache coded, and decodes them when they are needed.

Three objects own the memory:

- A `TokenCoder` belongs to a cache. It has the options, and one decoder for each device.
- A `TokenDecoder` has what all layers on a device share: the streams and buffers through which coded bytes pass.
- A `TokenHistory` belongs to a layer. It has the coded bytes of the layer (`TokenArena`), and the index and the
  codebooks of its keys and of its values (`CodedStates`); `_states.py` has these classes.

Tokens go through four states. New tokens are raw, and belong to the caller. `encode` makes `PendingBlocks` of the
oldest raw tokens; while these are being encoded, their tokens still count as raw ones. `store` copies the coded bytes
to the arena, and the history keeps a note of them (`StoredBlocks`). `fetch` decodes stored tokens into new tensors,
which a `Fetch` holds until the decoding has ended.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from .. import _core
from .._common.arguments import sms_of, whole_number
from .._common.process import OfThisProcess
from .._machine import memory as _memory
from .._machine.staging import Coming, Ring, Turn
from .._rows.codebook import AnyCodebook
from .._rows.handle import Faults, FaultWords
from .._rows.learning import check_scheme
from .._tables.coded_rows import CodedRows
from ._states import Coded, CodedStates, Form, TokenArena

# ---- the tokens of a layer ----

_stamps = itertools.count(1)


class PendingBlocks:
    """Blocks that are being encoded. Until they are stored, their tokens count as raw tokens of the layer.

    Args:
        keys, values: the encodings that were queued on the current stream.
        num_blocks: number of blocks. The blocks hold the oldest raw tokens.
        batch_size: number of sequences in a block.
    """

    def __init__(self, keys: Coded, values: Coded, num_blocks: int, batch_size: int) -> None:
        self.keys, self.values, self.num_blocks, self.batch_size = keys, values, num_blocks, batch_size
        # int64 [B]: for each present sequence, its index at the time of the encoding. None: the order has not changed.
        self.sequences: torch.Tensor | None = None
        counters = [coded.counters for coded in (keys, values) if isinstance(coded, CodedRows)]
        none = torch.empty(0, 8, dtype=torch.int64, device="cpu")
        self._counters = Coming(torch.stack(counters) if counters else none)

    def is_ready(self) -> bool:
        """Returns whether the sizes of the encoded blocks have arrived on the host."""
        return self._counters.is_here

    def data(self) -> list[torch.Tensor]:
        """Waits for the encoding. Returns [bytes of the encoded keys, bytes of the encoded values], both uint8.

        Raises:
            RuntimeError: rows were lost, or the status or a size is invalid. This is an internal check: it always holds
                for encodings that `encode` has queued.
        """
        found, counters = [], iter(self._counters.wait().tolist())
        for coded in (self.keys, self.values):
            if isinstance(coded, CodedRows):
                used, _, lost, status, *_ = next(counters)
                if lost or status or not 0 <= used <= coded.overflow.numel():
                    raise RuntimeError(f"tokens were not coded: {lost} rows lost, status {status}, {used} bytes in use")
                found.append(coded.overflow[:used])
            else:
                found.append(coded)
        return found

    def take(self, sequences: torch.Tensor) -> None:
        """Reorders the sequences: sequence b becomes the former sequence sequences[b]."""
        self.sequences = sequences.clone() if self.sequences is None else self.sequences[sequences]


@dataclass(frozen=True)
class StoredBlocks:
    """Describes the blocks that one call of `TokenHistory.store` has added. All numbers, except batch_size, count these
    blocks together with those of earlier calls, so that a call need not add up what all earlier calls have added."""

    before: StoredBlocks | None  # the blocks that the call before has added
    batch_size: int  # number of sequences in a block of this call
    num_blocks: int  # number of blocks that have not been removed
    num_slots: int  # number of coded sequences in these blocks
    num_coded: int  # number of coded sequences whose bytes are kept, including those in removed blocks
    end: int  # number of bytes of the arena that are in use


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
        coder: the coder of the cache.
        decoder: the coder's decoder for the layer's device.
        keys, values: the coded keys and the coded values of the layer.

    Attributes:
        device: the device that encodes and decodes.
        num_blocks: number of encoded blocks. A block has the same number of consecutive tokens of every sequence.
        batch_size: number of sequences, or 0 if there are no blocks yet.
    """

    _instead = "fetch() its keys and values, which can be pickled"

    def __init__(self, coder: TokenCoder, decoder: TokenDecoder, keys: CodedStates, values: CodedStates) -> None:
        self._coder, self._decoder, self.device = coder, decoder, decoder.device
        self.arena, self.keys, self.values = TokenArena(self.device, decoder.memory == "pinned"), keys, values
        self._become(StoredBlocks(None, 0, 0, 0, 0, 0), None, 0)

    @property
    def num_tokens(self) -> int:
        """Number of coded tokens of each sequence."""
        return self.num_blocks * self._coder.block

    @property
    def original_bytes(self) -> int:
        """Uncompressed size in bytes of all tokens whose coded bytes are still kept."""
        return self._stored.num_coded * self._block_bytes

    @property
    def plain_bytes(self) -> int:
        """Uncompressed size in bytes of the coded tokens of all present sequences."""
        return self.num_blocks * self.batch_size * self._block_bytes

    @property
    def _block_bytes(self) -> int:
        """Uncompressed size in bytes of a block of one sequence, keys and values."""
        return sum(states.form.item_bytes * states.form.num_heads for states in (self.keys, self.values))

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
        order = 0 if self.order is None else self.order.numel() * 8
        return order + sum(span.index_bytes for states in (self.keys, self.values) for span in states.spans)

    @property
    def is_sparse(self) -> bool:
        """Whether the coded tokens of the present sequences are fewer than half of the tokens whose coded bytes are
        kept. Tokens that several present sequences share count once for each of these sequences."""
        return 2 * self.num_blocks * self.batch_size < self._stored.num_coded

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> PendingBlocks:
        """Queues the encoding of the next n complete blocks of tokens. keys, values: [B, heads, n * block, head_dim].

        Returns:
            An object for `store`. Its `num_blocks` is n. `is_ready()` returns whether `store` can run without waiting
            for the GPU. `take(sequences)` reorders the sequences of these blocks; call it whenever `take` of the
            history is called before the blocks are stored.
        """
        num_blocks = keys.shape[2] // self._coder.block
        return PendingBlocks(self.keys.encode(keys), self.values.encode(values), num_blocks, keys.shape[0])

    # `_become` and `take` replace what they change in one statement, so that a call that is interrupted or fails has
    # changed all of it or nothing. Bytes and index entries beyond the stored blocks may be left by such a call. `fetch`
    # does not read them, and the next call of `store` writes over them.

    def store(self, pending: PendingBlocks) -> None:
        """Adds blocks to the history. pending: the result of `encode` for these blocks. Waits for the GPU unless
        `pending.is_ready()`. If the call is interrupted or fails, either all blocks have been added, or no block."""
        with torch.inference_mode(False):
            data, num_blocks, batch_size = pending.data(), pending.num_blocks, pending.batch_size
            pairs = (self.keys, pending.keys), (self.values, pending.values)
            held, new_slots = self._stored, num_blocks * batch_size
            plain_bytes = self.original_bytes + new_slots * self._block_bytes
            self._decoder.fence()
            try:
                for (states, coded), whole in zip(pairs, data):
                    alignment = _core.SECTOR_BYTES if isinstance(coded, CodedRows) else states.form.item_bytes
                    offset, memory = self.arena.reserve(whole.numel(), alignment, plain_bytes)
                    for to, part in zip(memory, whole.split([to.numel() for to in memory])):
                        self._decoder.put(self.arena, to, part)
                    states.add(coded, whole.numel(), offset, held.num_blocks, held.num_slots)
                counts = held.num_blocks + num_blocks, held.num_slots + new_slots, held.num_coded + new_slots
                added = StoredBlocks(held, batch_size, *counts, self.arena.used)
                self._become(added, *self._order_with(pending))
            finally:
                self.arena.rewind(self._stored.end)

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

    def _become(self, stored: StoredBlocks, order: torch.Tensor | None, batch_size: int) -> None:
        """Replaces the description of the stored blocks, the order of sequences and the number of sequences.

        Args:
            stored: the blocks of the last call of `store`, which lead to those of earlier calls.
            order: int64 [num_blocks, B]: for each block and present sequence, the number of its coded sequence. The
                tensor must not be changed later (see `_states.py`). None: the sequences are in the order of encoding.
            batch_size: the number of present sequences.
        """
        self.stamp = next(_stamps)  # A buffer of the decoder's ring that has the bytes of another stamp is out of date.
        self._stored, self.order, self.batch_size, self.num_blocks = stored, order, batch_size, stored.num_blocks

    def _order_with(self, pending: PendingBlocks) -> tuple[torch.Tensor | None, int]:
        """Returns (the order of the blocks of the history and of pending blocks, the number of present sequences)."""
        num_blocks, batch_size, sequences = pending.num_blocks, pending.batch_size, pending.sequences
        if self.order is None and sequences is None:
            return None, batch_size
        num_slots = self._stored.num_slots
        new = torch.arange(num_slots, num_slots + num_blocks * batch_size, device=self.device)
        new = new.view(num_blocks, batch_size)
        if sequences is not None:
            new = new[:, sequences]
        return torch.cat((self._slots(), new)) if self.num_blocks else new, new.shape[1]

    def _slots(self) -> torch.Tensor:
        """Returns int64 [num_blocks, B]: for each block and present sequence, the number of its coded sequence."""
        if self.order is not None:
            return self.order
        slots = torch.arange(self._stored.num_slots, device=self.device)
        return slots.view(self.num_blocks, -1) if self.num_blocks else slots.view(0, 0)

    def take(self, sequences: torch.Tensor) -> None:
        """Reorders the sequences without decoding: sequence b becomes the former sequence sequences[b]. sequences:
        int64 [B]."""
        if self.num_blocks:
            order, batch_size = self._slots()[:, sequences], sequences.numel()
            self._decoder.fence()
            self.order, self.batch_size = order, batch_size

    def truncate(self, num_blocks: int) -> None:
        """Keeps the first num_blocks blocks and removes the others. The bytes of blocks that one call of `store` added
        become free when all of these blocks have been removed. If the call is interrupted or fails, either all these
        blocks have been removed, or no block."""
        held = self._stored
        while held.before is not None and held.before.num_blocks >= num_blocks:
            held = held.before
        if held.num_blocks > num_blocks:
            num_slots = held.num_slots - (held.num_blocks - num_blocks) * held.batch_size
            held = replace(held, num_blocks=num_blocks, num_slots=num_slots)
        order = None if self.order is None or held.before is None else self.order[:num_blocks]
        self._decoder.fence()
        self._become(held, order, self.batch_size)
        for states in (self.keys, self.values):
            states.truncate(held.num_blocks, held.num_slots)
        self.arena.rewind(held.end)

    def empty(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocates keys and values for num_tokens tokens of all sequences, [B, heads, num_tokens, head_dim]."""
        keys, values = (
            torch.empty(
                (self.batch_size, form.num_heads, num_tokens, form.head_dim), dtype=form.dtype, device=self.device
            )
            for form in (self.keys.form, self.values.form)
        )
        return keys, values

    def __copy__(self) -> TokenHistory:
        """Returns another history of the same tokens, which shares the coded bytes. After either of the two has been
        changed by `store` or `truncate`, the other one must not be used."""
        copied = TokenHistory.__new__(TokenHistory)
        vars(copied).update(vars(self))
        return copied

    def clone(self, coder: TokenCoder | None = None) -> TokenHistory:
        """Returns a copy of the history, with a separate copy of the coded bytes. coder: the coder to which the copy
        belongs. None: the coder of this history."""
        coder = coder or self._coder
        copied = TokenHistory(coder, coder._decoder_on(self.device), self.keys.clone(), self.values.clone())
        copied.arena = self.arena.clone()
        copied._become(self._stored, self.order, self.batch_size)
        return copied


# ---- decoding ----

_WORDS = FaultWords("coded tokens were damaged: {status}, item {value} at position {position}", RuntimeError, later="")
_SLACK = 8  # a buffer that must grow gets (1 + 1 / _SLACK) times the bytes that the layer needs


class Fetch:
    """Keys and values, [B, heads, num_tokens, head_dim], whose first tokens are being decoded.

    The memory of these tensors belongs to the stream that was current when they were allocated. If the object is
    destroyed before `wait` was called on that stream, later work on that stream waits for the decoding.

    Args:
        keys, values: the tensors.
        owner: the stream that was current when the tensors were allocated. None: the decoding has ended.
        ready: an event that has been recorded after the decoding. It may be recorded again after later work on the same
            stream; `wait` then waits for that work, too. None: the decoding has ended.
    """

    _owner: torch.cuda.Stream
    _ready: torch.cuda.Event | None = None

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        owner: torch.cuda.Stream | None = None,
        ready: torch.cuda.Event | None = None,
    ) -> None:
        self.keys, self.values = keys, values
        if owner is not None:
            self._owner, self._ready = owner, ready

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes the current stream wait for the decoding, and returns the keys and values."""
        if self._ready is not None:
            current = torch.cuda.current_stream(self.keys.device.index)
            current.wait_event(self._ready)
            if current == self._owner:
                self._ready = None
            else:
                self.keys.record_stream(current)
                self.values.record_stream(current)
        return self.keys, self.values

    def __del__(self) -> None:
        if self._ready is not None:
            self._owner.wait_event(self._ready)


class TokenDecoder:
    """Moves coded tokens to the memory that keeps them, and decodes tokens for use, for all layers on one device.

    On a CPU, `fetch` decodes at once. On a GPU, it decodes on a stream of its own while the current stream goes on.
    `fetch` does not make the host wait, and `Fetch.wait` makes the current stream wait for the decoding.

    If coded bytes are in pinned host memory, there is a ring of two buffers on the GPU. The copy engine copies the
    bytes of one layer to one buffer while the GPU decodes another layer from the other buffer. If a buffer still has
    the bytes of a layer, they are not copied again.

    Args:
        device: the device of the keys and values.
        memory: the memory that keeps coded tokens: "host" if the device is a CPU; "device" or "pinned" if it is a GPU.
        sms: number of multiprocessors that decode. 0: all, or enough to keep up with the link if memory is "pinned".

    Attributes:
        device, memory: the arguments.
        fetched_bytes: number of bytes that have been copied from host memory to the device.
        sent_bytes: number of bytes that have been copied from the device to host memory.
    """

    def __init__(self, device: torch.device, memory: str, sms: int) -> None:
        self.device, self.memory = device, memory
        self.fetched_bytes = self.sent_bytes = 0
        self._sms, self._faults = (sms or None) if memory == "pinned" else sms, Faults(_WORDS)
        self._fault = self._faults.on(device)
        self._stream: torch.cuda.Stream | None = None  # decodes; None on a CPU
        self._ring: Ring | None = None  # the buffers; None unless memory is "pinned"
        self._stamps: dict[Turn, int] = {}  # for each buffer, the stamp of the history whose bytes it has or receives
        if memory != "host":
            stream = torch.cuda.Stream(device)
            self._stream, self._issued, self._decoded = stream, torch.cuda.Event(), torch.cuda.Event()
            if memory == "pinned":
                self._ring, self._sender = Ring(device, stream), torch.cuda.Stream(device)

    @property
    def device_bytes(self) -> int:
        """Size in bytes of the buffers on the device to which coded bytes are copied."""
        return 0 if self._ring is None else self._ring.num_bytes

    def put(self, arena: TokenArena, memory: torch.Tensor, data: torch.Tensor) -> None:
        """Queues a copy of coded bytes to memory that was reserved in an arena."""
        if arena.filled is None:
            memory.copy_(data)
            return
        self._sender.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._sender):
            memory.copy_(data, non_blocking=True)
            arena.filled.record(self._sender)
        data.record_stream(self._sender)
        self.sent_bytes += data.numel()

    def fetch(self, history: TokenHistory, num_tokens: int, blocks: range | None = None) -> Fetch:
        """Allocates keys and values for num_tokens tokens, and begins to decode blocks into their first tokens. blocks:
        the numbers of the blocks. None: all blocks of the history."""
        blocks, arena, stream = range(history.num_blocks) if blocks is None else blocks, history.arena, self._stream
        if stream is None:
            keys, values = history.empty(num_tokens)
            self._decode(history, keys, values, blocks, arena.parts()[0][1])
            self.check()
            return Fetch(keys, values)
        self.check()
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            keys, values = history.empty(num_tokens)
            self._issued.record(current)
            stream.wait_event(self._issued)
            try:
                if self._ring is None:
                    torch.cuda.set_stream(stream)
                    self._decode(history, keys, values, blocks, arena.parts()[0][1])
                else:
                    turn = self._brought(self._ring, history)
                    torch.cuda.set_stream(stream)
                    turn.wait(stream)
                    self._decode(history, keys, values, blocks, turn.memory)
                    turn.release(stream)
                self._decoded.record(stream)
                return Fetch(keys, values, current, self._decoded)
            except BaseException:
                stream.synchronize()  # because the memory of the keys and values is freed now
                raise
            finally:
                torch.cuda.set_stream(current)

    def fence(self) -> None:
        """Makes the current stream wait for all decoding so far, so that memory that this decoding reads may be freed
        or written by later work of the stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self._decoded)

    def _brought(self, ring: Ring, history: TokenHistory) -> Turn:
        """Returns a buffer of the ring that has the bytes of a history. If both buffers have other bytes, queues copies
        of the history's bytes to the buffer that was used longer ago, and returns this buffer."""
        turn = ring.last
        if self._stamps.get(turn) != history.stamp:
            turn = ring.next()
        if self._stamps.get(turn) != history.stamp:
            self._stamps.pop(turn, None)
            arena, parts = history.arena, history.arena.parts()
            assert arena.filled is not None
            if turn.memory.numel() < arena.used:
                turn.reserve(arena.used + arena.used // _SLACK)
            ring.stream.wait_event(arena.filled)
            turn.bring(ring.stream, ((turn.memory[start : start + part.numel()], part) for start, part in parts))
            self.fetched_bytes += arena.used
            self._stamps[turn] = history.stamp
        return turn

    def _decode(
        self, history: TokenHistory, keys: torch.Tensor, values: torch.Tensor, blocks: range, staged: torch.Tensor
    ) -> None:
        """Queues the decoding of blocks into the first tokens of keys and values, on the current stream. staged: memory
        that begins with all used bytes of the arena, or with a copy of them on the device."""
        used, order, sms, fault = history.arena.used, history.order, self._sms, self._fault
        history.keys.decode(staged, used, keys, blocks, order, sms, fault)
        history.values.decode(staged, used, values, blocks, order, sms, fault)

    def check(self) -> None:
        """Raises an error if decoding has noted a fault so far. Does not wait.

        Raises:
            RuntimeError: coded bytes in memory were damaged.
        """
        self._faults.raise_pending(self.device)


# ---- the coder of a cache ----

_SCHEMES = ("planes", "ibp", "raw")
_MOST_TOKENS = 2**31  # the largest block and window, in tokens


class TokenCoder(OfThisProcess):
    """Codes the older tokens of a KV-cache that grows token by token, and decodes them when they are needed.

    The class is for engines that keep the keys of a layer in one tensor, and the values in another, as transformers
    does. (`BlockStore` is for engines with paged caches.) All layers of a cache must use the same coder, so that the
    coded bytes of one layer can be copied while those of another layer are decoded. Tokens are coded in blocks, on the
    device of the keys and values. Codebooks are learned from the first blocks, which are usually those of the prompt,
    as in section 6.4 of the paper. They are learned again when savings fall.

    Example:
        >>> coder = ibp.kv.TokenCoder(block=16, window=32)
        >>> [coder.num_due(num_raw) for num_raw in (32, 47, 48, 100)]    # blocks of 16 tokens that leave the window
        [0, 0, 1, 4]
        >>> layers = [coder.history(*torch.randn(2, 1, 4, 48, 32)) for _ in range(2)]
        >>> layers[0].num_tokens, coder.fetched_bytes
        (0, 0)

    Args:
        block: number of tokens that are coded together, at least 1.
        window: number of the newest tokens that stay raw with the caller, at least 0.
        memory: the memory that holds coded tokens: "pinned" (host memory that the GPU reads) or "device". None:
            "pinned".
        scheme: "planes", "ibp" (the paper's) or "raw", which stores blocks without coding them. With every scheme, keys
            or values are stored raw if a learned codebook would save less than 2 % of their bytes.
        level: level of scheme "planes", as in `ibp.compress`.
        codebooks: the initial codebooks (for keys, for values) of all layers. `ibp.codecs.analyze` must have made them
            from tensors whose rows are one or more complete tokens of a head. None: codebooks are learned.
        max_sms: keep at most this many multiprocessors busy with decoding. None: all if coded tokens are on the device,
            or if a codebook has separate entries for each column; otherwise 32, which are enough to keep up with the
            link.

    Attributes:
        block: number of tokens that are coded together.
        memory: "pinned" or "device".
        devices: the devices of the layers for which `history` has been called.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    _instead = "make another with the same arguments"

    def __init__(
        self,
        *,
        block: int = 64,
        window: int = 64,
        memory: str | None = None,
        scheme: str = "planes",
        level: str = "default",
        codebooks: tuple[AnyCodebook, AnyCodebook] | None = None,
        max_sms: int | None = None,
    ) -> None:
        _memory.check_memory(memory, among=("device", "pinned"))
        if scheme not in _SCHEMES:
            raise ValueError(f"scheme is {scheme!r}; wanted one of {list(_SCHEMES)}")
        check_scheme("planes", level=level)
        if codebooks is not None and (scheme == "raw" or len(codebooks) != 2):
            raise ValueError("codebooks are a pair, of keys and of values, and not for scheme 'raw'")
        self.block = whole_number("block", block, 1, _MOST_TOKENS)
        self._window, self.memory = whole_number("window", window, 0, _MOST_TOKENS), memory or "pinned"
        self._scheme, self._level, self._codebooks, self._sms = scheme, level, codebooks, sms_of(max_sms)
        self._decoders: dict[torch.device, TokenDecoder] = {}

    @property
    def devices(self) -> list[torch.device]:
        return list(self._decoders)

    def history(self, keys: torch.Tensor, values: torch.Tensor) -> TokenHistory:
        """Returns an empty history for a layer. keys, values: [B, heads, tokens, head_dim], tensors with the dtype,
        heads and head_dim of the layer's keys and values. Their tokens are not added to the history.

        Raises:
            ValueError: keys are on neither a CPU nor a CUDA device, or keys or values do not suit the codebooks.
        """
        decoder, books = self._decoder_on(keys.device), self._codebooks or (None, None)
        keys_of_layer, values_of_layer = (
            CodedStates(Form.of(states, self.block, book), self._scheme, self._level, book, decoder.device)
            for states, book in zip((keys, values), books)
        )
        return TokenHistory(self, decoder, keys_of_layer, values_of_layer)

    def clone_of(self, history: TokenHistory) -> TokenHistory:
        """Returns a copy of a layer's history that belongs to this coder."""
        return history.clone(self)

    def copy(self) -> TokenCoder:
        """Returns a coder with the same options, for another cache."""
        copied = TokenCoder.__new__(TokenCoder)
        vars(copied).update(vars(self), _decoders={})
        return copied

    def num_due(self, num_raw: int) -> int:
        """Returns the number of blocks that should be coded now, max(0, num_raw - window) // block: the newest `window`
        tokens stay raw, and the older ones are coded in complete blocks. num_raw: number of raw tokens of the layer."""
        return max(0, num_raw - self._window) // self.block

    @property
    def device_bytes(self) -> int:
        """Size in bytes of the buffers on devices to which coded bytes are copied."""
        return sum(decoder.device_bytes for decoder in self._decoders.values())

    @property
    def fetched_bytes(self) -> int:
        """Number of bytes that have been copied from host memory to GPUs."""
        return sum(decoder.fetched_bytes for decoder in self._decoders.values())

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that have been copied from GPUs to host memory."""
        return sum(decoder.sent_bytes for decoder in self._decoders.values())

    def _decoder_on(self, device: torch.device) -> TokenDecoder:
        """Returns the decoder for layers whose keys and values are on a device.

        Raises:
            ValueError: the device is neither a CPU nor a GPU that this build of ibp can use.
        """
        if device not in self._decoders:
            place = _memory.canonical(device)
            with torch.inference_mode(False):
                memory = "host" if place.type == "cpu" else self.memory
                self._decoders[device] = TokenDecoder(place, memory, self._sms)
        return self._decoders[device]
