"""`KVRows` keeps rows of keys or values compressed, in host memory or on the GPU, and fetches them by the numbers of
their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._common.arguments import sms_of, whole_number
from .._common.manners import Statistics
from .._common.process import OfThisProcess
from .._fetch.calls import Ids, check_range, checked_ids
from .._machine import memory as _memory
from .._rows.codebook import AnyCodebook
from .._rows.handle import Faults, FaultWords
from .._tables.coded_rows import CodedRows
from ..cache import RowCache
from . import _paged

_WORDS = FaultWords(
    "{status}: row {value} of a layer",
    out_of_range="a token that was selected is {token}; wanted 0 to {last}",
    later="",
)


@dataclass(frozen=True)
class KVRowsStats(Statistics):
    """The counts of a `KVRows`.

    Attributes:
        hits, misses: number of rows that `load` found in a cache, and number of rows that `load` fetched from the
            memory in which all rows are stored. Both are 0 without caches.
        link_bytes: total stored size in bytes of the missed rows, each rounded up to whole 32-byte sectors.
        spilled_rows: number of rows that were stored with bytes in overflow since the last `clear`.
        lost_rows: number of rows that were lost since the last `clear` because overflow had no room for them.
        used_overflow_bytes: number of bytes of overflow that are reserved for rows.

    Example:
        >>> k = torch.randn(64, 1, 128, dtype=torch.bfloat16)  # [tokens, heads, dim]
        >>> keys = ibp.kv.KVRows(k, num_layers=1, num_tokens=64, cache_bytes=1 << 20, device="cpu")
        >>> keys.store(0, k, torch.arange(64))
        >>> rows = keys.load(0, torch.tensor([3, 60]))
        >>> keys.stats()
        KVRowsStats(hits=0, misses=2, ...)
    """

    hits: int
    misses: int
    link_bytes: int
    spilled_rows: int
    lost_rows: int
    used_overflow_bytes: int


class KVRows(OfThisProcess):
    """A store of compressed keys or values, in pinned host memory or on the GPU. A token has one row for each head.

    The store is for attention that reads only a few tokens, and chooses them anew for every generated token (top-k
    sparse attention; InfiniGen). A cache on the GPU, whose size you choose, holds the most recently loaded rows, also
    compressed.

    All work is queued on the current stream, and the GPU does not wait for the host. If token numbers are on the GPU, a
    CUDA graph can capture `store` and `load`, after a call of each outside the graph. Token numbers are indices into
    the store: give each sequence of a batch a range of numbers, and reuse the numbers of tokens that you no longer
    need. Loading a row that was never stored returns a default row of the codebook, usually zeros. Only one thread at a
    time may call the methods of the store.

    Example:
        >>> k = torch.randn(2, 64, 8, 128, dtype=torch.bfloat16)  # [layers, tokens, heads, dim]
        >>> keys = ibp.kv.KVRows(k[0], num_layers=2, num_tokens=1024, num_heads=8, device="cpu")
        >>> keys.store(1, k[1], torch.arange(64))
        >>> chosen = torch.arange(16).view(8, 2)  # two tokens for each head
        >>> torch.equal(keys.load(1, chosen, per_head=True)[7], k[1, 14:16, 7])
        True

    Args:
        codebook: the codebook that compresses rows. Or a sample of rows, [..., dim]: the codebook is learned from it,
            and the sizes of slots and overflow are chosen to suit it. Make one `KVRows` for keys and one for values.
            For latents that all heads share (MLA), make a single `KVRows` with num_heads 1.
        num_layers, num_tokens: number of layers, and number of tokens of each layer.
        num_heads: number of rows of a token.
        dtype: dtype of the rows. None: the dtype of the sample.
        cache_bytes: total size in bytes of the device memory for the caches of all layers. 0: no caches.
        slot_bytes: size in bytes of the slot of each row. Bytes of a row that do not fit in its slot go to the overflow
            of the row's layer. None: a size that suits the sample, or the savings that the codebook expects.
        overflow_bytes: size in bytes of the overflow of each layer. None: a size that suits the sample, or the savings
            that the codebook expects.
        level: level of the codebook that is learned, see `ibp.compress`.
        device: the GPU that compresses and decompresses, or "cpu". None: the current CUDA device if there is one, else
            the CPU.
        memory: the memory that holds the rows: "pinned" (host memory that the GPU writes and reads) or "device". None:
            "pinned". If the device is the CPU, rows are always in host memory.

    Attributes:
        places: for each layer, the `ibp.CodedRows` that holds its rows. Row token * num_heads + head belongs to this
            token and head.
        caches: for each layer, its `ibp.RowCache`. Empty if cache_bytes is 0.

    Raises:
        TypeError, ValueError: an argument is not as described, or is inconsistent with another.
    """

    _instead = "load() its rows into tensors, which can be pickled"

    def __init__(
        self,
        codebook: AnyCodebook | torch.Tensor,
        *,
        num_layers: int,
        num_tokens: int,
        num_heads: int = 1,
        dtype: torch.dtype | None = None,
        cache_bytes: int = 0,
        slot_bytes: int | None = None,
        overflow_bytes: int | None = None,
        level: str = "default",
        device: torch.device | str | int | None = None,
        memory: str | None = None,
    ) -> None:
        self.num_layers = whole_number("num_layers", num_layers, 1)
        self.num_tokens = whole_number("num_tokens", num_tokens, 0)
        self.num_heads = whole_number("num_heads", num_heads, 1)
        cache_bytes = whole_number("cache_bytes", cache_bytes, 0)
        self.device = _memory.usual(device)
        memory = _memory.memory_read_by(self.device, memory, "pinned")
        sample = codebook if isinstance(codebook, torch.Tensor) else None
        if sample is not None and (sample.dim() == 0 or not sample.numel()):
            raise ValueError(f"the sample has shape {list(sample.shape)}; wanted rows [..., dim]")
        self.dtype = sample.dtype if sample is not None else dtype
        if self.dtype is None or (dtype is not None and dtype != self.dtype):
            raise ValueError(f"dtype is {dtype}; wanted that of the rows, which a codebook does not know")
        row_bytes = 0 if sample is None else sample.shape[-1] * sample.element_size()
        self.codebook = _paged.learned(codebook, row_bytes, level)
        self.dim = self.codebook.row_bytes // self.dtype.itemsize
        num_rows, usual = self.num_tokens * self.num_heads, _paged.usual_sizes(sample, self.codebook)
        slot_bytes, overflow_bytes = _paged.checked_sizes(slot_bytes, overflow_bytes, num_rows, *usual)
        on_gpu = self.device.type == "cuda"
        self.places = tuple(
            CodedRows(
                self.codebook,
                num_rows,
                slot_bytes=slot_bytes,
                overflow_bytes=overflow_bytes,
                device=self.device,
                memory=memory if on_gpu else None,
            )
            for _ in range(self.num_layers)
        )
        self.caches = tuple(
            RowCache(place, cache_bytes // num_layers, devices=self.device, policy="lru", slot_bytes=slot_bytes or None)
            for place in (self.places if cache_bytes else ())
        )
        self._heads = torch.arange(self.num_heads, device=self.device)
        self._heads_of_lists = self._heads.unsqueeze(1)  # [num_heads, 1], for tokens [..., num_heads, k]
        self._faults = Faults(_WORDS)
        self._fault = self._faults.on(self.device)  # graphs need the record to exist before they are captured

    @property
    def pool_bytes(self) -> int:
        """Size in bytes of the slots and the overflow of all layers."""
        return sum(place.slots.numel() + place.overflow.numel() for place in self.places)

    @property
    def gain(self) -> float:
        """Raw size of all rows divided by `pool_bytes`: the factor by which compression increases the number of tokens
        that fit."""
        held = self.num_layers * self.num_tokens * self.num_heads * self.codebook.row_bytes
        return held / max(1, self.pool_bytes)

    def __repr__(self) -> str:
        return (
            f"ibp.kv.KVRows({self.num_layers} layers of {self.num_tokens} tokens, {self.num_heads} x {self.dim} of "
            f"{self.dtype}, slots of {self.places[0].slot_bytes} bytes, pool of {self.pool_bytes} bytes, "
            f"{self.device}, {self.places[0].memory} memory, cache of "
            f"{sum(cache.capacity for cache in self.caches)} rows)"
        )

    # ---- rows ----

    def store(self, layer: int, rows: torch.Tensor, tokens: Ids, *, max_sms: int | None = None) -> None:
        """Compresses and stores rows of tokens, such as those of a prompt or of a generated token. They replace rows
        that these tokens had before.

        Args:
            layer: number of the layer.
            rows: [tokens, num_heads, dim] of `dtype` on the device. The last dimension must be contiguous; the other
                dimensions may have any strides. If num_heads is 1, [tokens, dim] also works.
            tokens: the numbers of the tokens, all different: a tensor [tokens] on the CPU or the device, a list, or a
                `range`. For consecutive tokens a `range` is fastest, because no numbers are copied to the device.
            max_sms: keep at most this many multiprocessors busy; None: all.

        Raises:
            IndexError: there is no such layer or token. For token numbers on a GPU, `check` raises it.
            TypeError, ValueError: rows or tokens are not as described.
        """
        place, chosen, first_row = self.places[self._layer(layer)], None, 0
        if isinstance(tokens, range) and tokens.step == 1 and 0 <= tokens.start <= tokens.stop <= self.num_tokens:
            shape, first_row = torch.Size((len(tokens),)), tokens.start * self.num_heads
        else:
            chosen = self._tokens(tokens)
            shape = chosen.shape
        if rows.dim() == 2 and self.num_heads == 1:
            rows = rows.unsqueeze(1)
        if rows.shape != (*shape, self.num_heads, self.dim) or len(shape) != 1 or rows.dtype != self.dtype:
            raise ValueError(
                f"rows are {list(rows.shape)} of {rows.dtype} for tokens {list(shape)}; wanted "
                f"[tokens, {self.num_heads}, {self.dim}] of {self.dtype}"
            )
        if rows.device != self.device or (self.dim > 1 and rows.stride(-1) != 1):
            raise ValueError(f"rows are on {rows.device}, strides {rows.stride()}; wanted whole rows on {self.device}")
        rows, sms = rows.detach() if rows.requires_grad else rows, sms_of(max_sms)
        row_ids = None if chosen is None else self._rows(chosen.unsqueeze(1))
        if self.caches:  # Rows leave the cache before they change, so that an interrupted call leaves no old row in it.
            cached = row_ids
            if cached is None:
                cached = torch.arange(first_row, first_row + shape[0] * self.num_heads, device=self.device)
            self.caches[layer].invalidate(cached.view(-1))
        place.handle.encode(rows, place.tally, place.fault, row_ids=row_ids, first_row=first_row, max_sms=sms)

    def load(
        self,
        layer: int,
        tokens: Ids,
        *,
        per_head: bool = False,
        out: torch.Tensor | None = None,
        max_sms: int | None = None,
    ) -> torch.Tensor:
        """Returns rows of tokens, with the bits that were stored.

        Args:
            layer: number of the layer.
            tokens: the numbers of the tokens: a tensor [...] on the CPU or the device, or a list. With per_head, its
                shape is [..., num_heads, k].
            per_head: whether `tokens` has k tokens for each head separately. If not, the rows of all heads are loaded
                for each token.
            out: the contiguous tensor to which the result is written. None: a new tensor.
            max_sms: as in `store`.

        Returns:
            A tensor [..., num_heads, dim] of `dtype` on the device; with per_head, [..., num_heads, k, dim].

        Raises:
            IndexError: there is no such layer or token. For token numbers on a GPU, `check` raises it, and the rows of
                missing tokens are zeros.
            TypeError, ValueError: tokens or out are not as described.
        """
        place = self.places[self._layer(layer)]
        chosen = self._tokens(tokens)
        if per_head and (chosen.dim() < 2 or chosen.shape[-2] != self.num_heads):
            raise ValueError(f"tokens are {list(chosen.shape)}; wanted [..., {self.num_heads}, k] with per_head")
        rows = self._rows(chosen if per_head else chosen.unsqueeze(-1), per_head)
        shape = (*rows.shape, self.dim)
        if out is None:
            out = torch.empty(shape, dtype=self.dtype, device=self.device)
        elif (tuple(out.shape), out.dtype, out.device) != (shape, self.dtype, self.device) or not out.is_contiguous():
            raise ValueError(
                f"out is {list(out.shape)} of {out.dtype} on {out.device}, strides {out.stride()}; wanted contiguous "
                f"{list(shape)} of {self.dtype} on {self.device}"
            )
        if self.caches:
            self.caches[layer].index_select(rows.view(-1), out=out, max_sms=max_sms)
        else:
            torch.ops.ibp.gather_items.default(place.handle.table, rows, sms_of(max_sms), out, self._fault)
        return out

    def clear(self, layer: int | None = None) -> None:
        """Removes the rows of a layer and frees their overflow. layer: number of the layer. None: all layers."""
        for number in range(self.num_layers) if layer is None else (self._layer(layer),):
            if self.caches:
                self.caches[number].invalidate()
            self.places[number].clear()

    def check(self) -> None:
        """Waits for the work on the current stream, and raises an error if a call of `store` or `load` has noted a
        fault.

        Raises:
            IndexError: a token number on the GPU was out of range.
            RuntimeError: a token was given twice in one call of `store`, or a row was lost because overflow had no room
                for it.
            ibp.CorruptTableError: a row is damaged.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        for number, place in enumerate(self.places):
            try:
                place.check()
            except IndexError:
                raise IndexError(f"a token that was put to layer {number} is not in [0, {self.num_tokens})") from None
            if lost := place.counts().lost:
                raise RuntimeError(f"{lost} rows of layer {number} found no room in overflow: give more overflow_bytes")
        for cache in self.caches:
            cache.check()
        for words, record in self._faults.taken(self.device):
            words.raise_for(record, token=record[2] // self.num_heads, last=self.num_tokens - 1)

    def stats(self) -> KVRowsStats:
        """Returns the counts so far. Waits for the work on the device."""
        counts, cached = [place.counts() for place in self.places], [cache.stats() for cache in self.caches]
        return KVRowsStats(
            sum(of.hits for of in cached),
            sum(of.misses for of in cached),
            sum(of.link_bytes for of in cached),
            sum(of.spilled for of in counts),
            sum(of.lost for of in counts),
            sum(of.used_bytes for of in counts),
        )

    # ---- arguments ----

    def _layer(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer is {layer}; wanted 0 to {self.num_layers - 1}")
        return layer

    def _tokens(self, given: Ids) -> torch.Tensor:
        """Returns token numbers as an int64 tensor on the device. Numbers that are given on the host are checked."""
        tokens = checked_ids(given, "tokens")
        if not tokens.is_cuda:
            check_range(tokens.reshape(-1), self.num_tokens, name="tokens")
        return tokens.to(self.device, torch.int64)

    def _rows(self, tokens: torch.Tensor, per_head: bool = False) -> torch.Tensor:
        """Returns the numbers of rows in a layer, contiguous. Without per_head, tokens is [..., 1], and the result is
        [..., num_heads]. With per_head, both are [..., num_heads, k]."""
        heads = self._heads_of_lists if per_head else self._heads
        return torch.add(heads, tokens, alpha=self.num_heads).contiguous()
