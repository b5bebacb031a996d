"""KV-caches for transformers whose older tokens are compressed losslessly.

Blocks of older tokens are coded on the GPU, and stored in pinned host memory or on the GPU. While one layer computes,
the coded tokens of the next layer are copied to the GPU and decoded.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

import ibp

from ...adapters import CodedStatistics, OfThisProcess, shown_memory

__all__ = ["CompressedCache", "CompressedCacheStats", "CompressedLayer"]


@dataclass(frozen=True)
class CompressedCacheStats(CodedStatistics):
    """The sizes and counts of a cache. They are totals of all compressed layers, except for num_tokens and
    num_coded_tokens.

    Attributes:
        num_tokens: number of tokens of each sequence, in the layer that has the most tokens.
        num_coded_tokens: number of coded tokens of each sequence, in the layer that has the most coded tokens.
        original_bytes: uncompressed size in bytes of all tokens whose coded rows are kept. These tokens may include
            tokens that have been cropped.
        stored_bytes: size in bytes of the coded rows that are kept. The size of each row is rounded up to a multiple of
            32.
        host_bytes: size in bytes of the host memory for coded rows.
        device_bytes: size in bytes of the GPU memory for raw tokens, indices and staging buffers. With memory "device",
            coded rows are included.
        fetched_bytes: number of bytes that have been copied from host memory to GPUs.
        sent_bytes: number of bytes that have been copied from GPUs to host memory.
        num_codebooks: number of codebooks that were learned.
        plain_bytes: uncompressed size in bytes of all tokens of the present sequences, coded and raw.
    """

    __module__ = "ibp.integrations.transformers"

    num_tokens: int
    num_coded_tokens: int
    original_bytes: int
    stored_bytes: int
    host_bytes: int
    device_bytes: int
    fetched_bytes: int
    sent_bytes: int
    num_codebooks: int
    plain_bytes: int

    @property
    def nbytes(self) -> int:
        """Size in bytes of the memory that the cache occupies, on the host and on GPUs."""
        return self.host_bytes + self.device_bytes


def _decoded(number: int, what: str) -> property:
    """Returns a property of `CompressedLayer` that decodes the keys (number 0) or the values (number 1) of all tokens.
    what: the docstring of the property."""

    def decode(layer: CompressedLayer) -> torch.Tensor | None:
        return layer._all()[number] if layer.raw else None

    def refuse(layer: CompressedLayer, value: object) -> None:
        if value is not None:
            raise AttributeError("the keys and values of a compressed layer cannot be set; pass them to update()")

    return property(decode, refuse, doc=what)


class CompressedLayer(OfThisProcess, DynamicLayer):
    """A layer of full attention in a `CompressedCache`. Its oldest tokens are coded in whole blocks, and its newer
    tokens are raw.

    `update` returns the keys and values of all tokens as new tensors, contiguous [B, heads, tokens, head_dim], as
    `DynamicLayer.update` does. Reading `keys` or `values` decodes all tokens into a new tensor.

    Attributes:
        history: the coded tokens. None before the first call of `update`.
        raw: (keys, values) of the raw tokens, which follow the coded ones. () before the first call of `update`.
        last_query: number of tokens that the last call of `update` added.
    """

    __module__ = "ibp.integrations.transformers"

    _instead = "pickle its keys and values, or copy the cache"

    def __init__(self, coder: ibp.kv.TokenCoder) -> None:
        self._coder = coder
        self._forget()
        super().__init__()

    # A layer has the tokens of the first `_num_blocks` blocks of `history`, followed by the tokens in `raw`. One
    # statement replaces `_num_blocks` and `raw`, so that an interrupted call neither loses tokens nor keeps them twice.
    # An interrupted call may leave other blocks in the history after the first `_num_blocks`.
    history: ibp.kv.TokenHistory | None
    raw: tuple[torch.Tensor, ...]
    _num_blocks: int
    last_query: int
    _pending: Any  # a result of `TokenHistory.encode`: blocks that are being coded; or None
    _fetch: Any  # a result of `TokenHistory.fetch`: tokens that are decoded for the next update; or None

    def _forget(self) -> None:
        self._fetch, self.last_query = None, 0
        self.history, self.raw, self._num_blocks, self._pending, self.is_initialized = None, (), 0, None, False

    # ---- contents ----

    keys = _decoded(0, "All keys, decoded; None before the first ones.")
    values = _decoded(1, "All values, decoded; None before the first ones.")

    def _all(self) -> tuple[torch.Tensor, ...]:
        """Decodes the coded tokens. Returns (keys, values) of all tokens, coded and raw."""
        return self._joined(self._fetched()) if self._num_blocks else self.raw

    def get_seq_length(self) -> int:
        """Returns the number of tokens of each sequence, coded and raw."""
        return self._num_blocks * self._coder.block + self._num_raw()

    def _num_raw(self) -> int:
        return self.raw[0].shape[-2] if self.raw and self.raw[0].dim() == 4 else 0

    # ---- new tokens ----

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Prepares the layer for keys and values with the dtype, device and sizes of the given tensors. The given
        tokens are not added."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.history = self._coder.history(key_states, value_states)
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        self.raw = nothing, nothing.to(value_states.dtype)
        self.is_initialized = True

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values, [B, heads, new tokens, head_dim]. Returns the keys and values of all tokens. Raises the
        same errors as `CompressedCache.update`."""
        if key_states.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "coded keys and values have no gradients: call the model under torch.no_grad() or "
                "torch.inference_mode(), or with a DynamicCache"
            )
        if key_states.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CompressedCache cannot be captured in a CUDA graph: its tensors grow")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = torch.cat((self.raw[0], key_states), dim=-2), torch.cat((self.raw[1], value_states), dim=-2)
        self.raw, self.last_query = (keys, values), key_states.shape[-2]
        if self._num_blocks:
            keys, values = self._joined(self._fetched())
        self._begin_coding()
        return keys, values

    def _fetched(self, new_tokens: int = 0) -> Any:
        """Returns a fetch of all coded tokens. Its tensors have room for the raw tokens and for new_tokens others. If
        `fetch_ahead` has begun such a fetch, returns that one."""
        fetch, self._fetch = self._fetch, None
        num_tokens = self.get_seq_length() + new_tokens
        if fetch is not None and fetch.keys.shape[-2] == num_tokens:
            return fetch
        del fetch  # This must precede the next fetch. It makes the current stream wait for the decoding.
        assert self.history is not None
        return self.history.fetch(num_tokens, range(self._num_blocks))

    def _joined(self, fetch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits for a fetch of all coded tokens, and copies the raw tokens to the end of its tensors. Returns these
        tensors: (keys, values) of all tokens."""
        whole, num_raw = fetch.wait(), self._num_raw()
        for tensor, tail in zip(whole, self.raw):
            if num_raw:
                tensor[..., -num_raw:, :].copy_(tail)
        return whole

    # ---- coding ----

    def _begin_coding(self) -> None:
        """Queues work that codes those raw tokens that are older than the window, in whole blocks. Does nothing while
        other blocks are being coded."""
        num_blocks = self._coder.num_due(self._num_raw())
        if self._pending is None and self.history is not None and num_blocks > 0:
            keys, values = (tail[..., : num_blocks * self._coder.block, :] for tail in self.raw)
            self._pending = self.history.encode(keys, values)

    def is_coding_much(self) -> bool:
        """Returns whether more than one block is being coded. If so, it pays to wait for the coding, because `store`
        then frees much raw memory."""
        return self._pending is not None and self._pending.num_blocks > 1

    def store(self, wait: bool = False) -> None:
        """Replaces raw tokens with their coded blocks if the coding has ended. Otherwise the tokens stay raw until a
        later call of `store`. wait: whether to wait until the coding has ended."""
        pending = self._pending
        if pending is None or self.history is None or not (wait or pending.is_ready()):
            return
        self._fetch, num_tokens = None, pending.num_blocks * self._coder.block
        with torch.inference_mode(False), torch.no_grad():
            raw = tuple(tail[..., num_tokens:, :].clone() for tail in self.raw)
            if self.history.num_blocks > self._num_blocks:
                self.history.truncate(self._num_blocks)
            self.history.store(pending)
            self._pending, self.raw, self._num_blocks = None, raw, self.history.num_blocks

    # ---- prefetching ----

    def fetch_ahead(self, new_tokens: int) -> None:
        """Begins to decode the coded tokens for the next call of `update`, assuming that it adds `new_tokens`
        tokens."""
        if not self.is_initialized or self._fetch is not None:
            return
        self.store(wait=self.is_coding_much())
        if self._num_blocks:
            self._fetch = self._fetched(new_tokens)

    def prefetch(self) -> None:
        """Begins to decode the coded tokens for the next call of `update`, assuming that it adds one token."""
        self.fetch_ahead(1)

    def offload(self) -> None:
        """Does nothing: the cache itself moves coded tokens to the memory that its argument `memory` names, and raw
        tokens stay on the GPU."""

    # ---- changes ----

    def reset(self) -> None:
        """Forgets all tokens and codebooks."""
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest tokens. tokens_to_remove: 0, or minus the number of tokens to remove.

        Raises:
            ValueError: tokens_to_remove is above 0.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}; wanted minus the number of tokens, or 0")
        if tokens_to_remove == 0 or not self.raw:
            return
        self._fetch, history = None, self.history
        num_left = max(0, self.get_seq_length() + tokens_to_remove)
        num_coded = self._num_blocks * self._coder.block
        if history is not None and num_left < num_coded:
            num_blocks, num_raw = divmod(num_left, self._coder.block)
            fetch = history.fetch(self._coder.block, range(num_blocks, num_blocks + 1))
            raw = tuple(whole[..., :num_raw, :].clone() for whole in fetch.wait())
            self._pending, self.raw, self._num_blocks = None, raw, num_blocks
            with torch.inference_mode(False):
                history.truncate(num_blocks)
            self._code_anew_if_sparse()
        else:
            raw, pending = tuple(tail[..., : num_left - num_coded, :] for tail in self.raw), self._pending
            if pending is not None and pending.num_blocks * self._coder.block > num_left - num_coded:
                pending = None
            self._pending, self.raw = pending, raw

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorders the sequences: sequence b becomes the former sequence beam_idx[b]. The coded bytes do not change;
        only the order in which they are decoded changes."""
        if self.get_seq_length() > 0:
            self._take(beam_idx.to(self.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times. The copies of a sequence share its coded bytes."""
        if self.get_seq_length() > 0:
            self._take(torch.arange(len(self.raw[0]), device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps only the selected sequences. indices: a tensor of the numbers of these sequences, or a bool mask."""
        if self.get_seq_length() > 0:
            self._take(torch.arange(len(self.raw[0]), device=self.device)[indices])
            self._code_anew_if_sparse()

    def _take(self, sequences: torch.Tensor) -> None:
        self._fetch = None
        raw = tuple(tail.index_select(0, sequences) for tail in self.raw)
        history, pending = copy.copy(self.history), copy.copy(self._pending)
        for held in (history, pending):
            if held is not None:
                held.take(sequences)
        # In one statement, so that an interrupted call has reordered all tokens or none.
        self.raw, self.history, self._pending = raw, history, pending

    def _code_anew_if_sparse(self) -> None:
        """If fewer than half of the coded tokens belong to present sequences (`TokenHistory.is_sparse`), decodes the
        tokens of the present sequences, keeps them raw, and drops all coded bytes. The next call of `update` then
        begins to code these tokens again."""
        if self.history is None or not self.history.is_sparse:
            return
        self._pending, self.raw, self._num_blocks = None, self._all(), 0
        with torch.inference_mode(False):
            self.history.truncate(0)

    def clone(self, coder: ibp.kv.TokenCoder) -> CompressedLayer:
        """Returns a copy of the layer, for a cache with the given coder. Waits for blocks that are being coded."""
        self.store(wait=True)
        copied = CompressedLayer(coder)
        if self.history is not None:
            copied.dtype, copied.device, copied.is_initialized = self.dtype, self.device, True
            copied.last_query = self.last_query
            with torch.inference_mode(False):
                copied.history, copied.raw = coder.clone_of(self.history), tuple(tail.clone() for tail in self.raw)
                copied._num_blocks = self._num_blocks
        return copied

    def __repr__(self) -> str:
        coded = self._num_blocks * self._coder.block
        return f"CompressedLayer({self.get_seq_length()} tokens, {coded} of them coded)"


class CompressedCache(OfThisProcess, DynamicCache):
    """A `transformers.DynamicCache` whose older tokens are compressed. Pass it as `cache` (before transformers 5.24:
    `past_key_values`). Models compute the same bits with it as with a DynamicCache.

    In each layer of full attention, the newest `window` tokens stay raw, and older tokens are coded in blocks, on the
    GPU. As in section 6.4 of the paper, separate codebooks for keys and for values are learned from the first blocks,
    which are usually those of the prompt. The codebooks are learned again when savings fall. While a layer computes,
    the coded bytes of the next layer are copied to the GPU and decoded there, on separate streams. For other layers
    (sliding windows, states of linear attention, indexed and hybrid layers), the cache uses transformers' own classes,
    and their contents stay raw on the GPU. Models on the CPU also work; their tokens are coded and decoded during the
    calls.

    Beams can be reordered, and sequences repeated, without decoding tokens. `copy.deepcopy` copies the coded bytes, so
    the cache of a prompt can be copied and used for many answers. Keys and values have no gradients. The cache cannot
    be used in CUDA graphs, and `torch.compile` breaks the graph at the update of each layer.

    Args:
        config: configuration of the model, which lists the kinds of its layers. None: all layers are of full attention.
        memory: the memory that holds coded tokens: "pinned" (host memory that the GPU reads) or "device". None:
            "pinned".
        block: number of tokens that are coded together, at least 1.
        window: number of the newest tokens that stay raw on the GPU, at least 0.
        scheme: "planes", "ibp" (the paper's) or "raw", which stores blocks without coding them. Whatever the scheme,
            keys or values are stored raw if a learned codebook would save less than 2 % of their bytes.
        level: level of scheme "planes", as in `ibp.compress`.
        codebooks: (the codebook for keys, the codebook for values) with which all layers begin. `ibp.codecs.analyze`
            must have made them from tensors whose rows are one or more whole tokens of a head. None: codebooks are
            learned. Learning a codebook takes a few milliseconds, or about 100 ms with scheme "ibp".
        max_sms: the largest number of multiprocessors that decode. None: all multiprocessors if coded tokens are on the
            device, or if a codebook has separate entries for each column. Otherwise 32, which decode as fast as the
            link delivers.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    __module__ = "ibp.integrations.transformers"

    _instead = (
        "copy.deepcopy copies it; to keep it, pickle the keys and values of its layers, and give them to update() of a "
        "new cache"
    )

    layers: list[Any]
    layer_class_to_replicate: Any

    def __init__(
        self,
        config: Any = None,
        *,
        memory: str | None = None,
        block: int = 64,
        window: int = 64,
        scheme: str = "planes",
        level: str = "default",
        codebooks: tuple[ibp.codecs.AnyCodebook, ibp.codecs.AnyCodebook] | None = None,
        max_sms: int | None = None,
    ) -> None:
        coder = ibp.kv.TokenCoder(
            block=block,
            window=window,
            memory=memory,
            scheme=scheme,
            level=level,
            codebooks=codebooks,
            max_sms=max_sms,
        )
        super().__init__(config=config)
        self._begin(coder)
        self.layers = [CompressedLayer(coder) if type(one) is DynamicLayer else one for one in self.layers]

    def _begin(self, coder: ibp.kv.TokenCoder) -> None:
        self._coder = coder
        # The layer that is coding many tokens, or None. The next update of any layer waits for this coding, and then
        # frees the raw tokens.
        self._coding: CompressedLayer | None = None
        if self.layer_class_to_replicate is not None:
            self.layer_class_to_replicate = functools.partial(CompressedLayer, coder)

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values, [B, heads, new tokens, head_dim], to a layer. Returns the keys and values of all tokens
        of the layer.

        Raises:
            RuntimeError: the keys require grad, a CUDA graph is being captured, or coded tokens were damaged.
            ValueError: the keys are on neither a CPU nor a CUDA device, or keys or values do not suit the codebooks.
        """
        if self._coding is not None:
            self._coding.store(wait=True)
            self._coding = None
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        if isinstance(layer, CompressedLayer):
            self._coding = layer if layer.is_coding_much() else None
            # Fetch ahead for the layer that is used next; after the last layer, this is the first layer. Assume that it
            # gets the same number of new tokens as this layer. The exception is the first layer after the first tokens
            # (the prompt), which probably gets one token.
            index = (layer_idx + 1) % len(self.layers)
            while not isinstance(self.layers[index], CompressedLayer):
                index = (index + 1) % len(self.layers)
            is_after_prompt = index <= layer_idx and layer.last_query == layer.get_seq_length()
            self.layers[index].fetch_ahead(1 if is_after_prompt else layer.last_query)
        return keys, values

    def stats(self) -> CompressedCacheStats:
        """Returns the present sizes of the cache, and the numbers of bytes that it has copied so far."""
        layers = [layer for layer in self.layers if isinstance(layer, CompressedLayer)]
        histories = [layer.history for layer in layers if layer.history is not None]
        raw = sum(tail.numel() * tail.element_size() for layer in layers for tail in layer.raw)
        near = raw + sum(history.index_bytes for history in histories) + self._coder.device_bytes
        on_host, rows = self._coder.memory == "pinned", sum(history.nbytes for history in histories)
        in_host = sum(history.nbytes for history in histories if on_host or history.device.type == "cpu")
        return CompressedCacheStats(
            num_tokens=max((layer.get_seq_length() for layer in layers), default=0),
            num_coded_tokens=max((history.num_tokens for history in histories), default=0),
            original_bytes=sum(history.original_bytes for history in histories),
            stored_bytes=sum(history.stored_bytes for history in histories),
            host_bytes=in_host,
            device_bytes=near + rows - in_host,
            fetched_bytes=self._coder.fetched_bytes,
            sent_bytes=self._coder.sent_bytes,
            num_codebooks=sum(history.num_codebooks for history in histories),
            plain_bytes=sum(history.plain_bytes for history in histories) + raw,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied._begin(self._coder.copy())
        copied.layers = [
            layer.clone(copied._coder) if isinstance(layer, CompressedLayer) else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        return copied

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"CompressedCache({len(self.layers)} layers, tokens={stats.num_tokens}, coded={stats.num_coded_tokens}, "
            f"{shown_memory(stats.nbytes, stats.plain_bytes)}, stored_bytes={stats.stored_bytes:,}, "
            f"savings={stats.savings:.1%}, memory={self._coder.memory!r})"
        )
