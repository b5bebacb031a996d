"""`WholeTensor`: a tensor that a general codec has coded as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from .._common.arguments import whole_number
from .._common.manners import CodedManners, Movable, Saves, shown_memory
from .._common.process import tqdm
from .._fetch.calls import check_out, target_of
from .._machine import memory as _memory
from .._machine import staging
from .._machine.memory import Numa, node_of
from .._rows.geometry import DTYPES, bytes_of, check_bytes
from ._codec import CODECS, MAX_BLOCK_BYTES, codec_of

_CPU = torch.device("cpu")
_FIELDS = ("shape", "dtype", "codec", "block_bytes", "options", "blocks", "offsets")


class WholeTensor(Movable, CodedManners, Saves):
    """A tensor that a general codec has coded as a whole, in blocks that decode independently. It is made by
    `ibp.compress` with a scheme such as "zstd" or "nvcomp:ans", by `ibp.load`, and by unpickling; its constructor is
    internal.

    It has no rows that decode alone. `ibp.decompress` returns the whole tensor; `index_select`, `update_`, `prefetch`
    and caches refuse it. `==` and `hash` compare identity, not contents.

    Example:
        >>> # needs the package zstandard
        >>> x = torch.arange(64000, dtype=torch.int32)
        >>> coded = ibp.compress(x, scheme="zstd", device="cpu")
        >>> coded.codec, coded.savings > 0.3, torch.equal(coded.decompress(), x)
        ('zstd', True, True)

    Attributes:
        shape, dtype: shape and dtype of the original tensor.
        codec: the name of the codec; `scheme` is the same.
        device: the device of the coded bytes.
        block_bytes: size in bytes of a block before coding; the last block may be shorter.
        options: options of the codec, a dict of strings.
        blocks: uint8, the coded blocks one after the other.
        offsets: int64 [number of blocks + 1] in host memory: the offset in `blocks` at which each block begins, and the
            offset at which the last one ends.
    """

    _is, _instead = "a tensor that is coded as a whole", "call ibp.decompress(coded) for the tensor"

    shape: torch.Size
    dtype: torch.dtype

    def __init__(
        self,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        codec: str,
        block_bytes: int,
        options: Mapping[str, str],
        blocks: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        if codec not in CODECS:
            raise ValueError(f"codec is {codec!r}; wanted one of {sorted(CODECS)}")
        if dtype not in DTYPES or any(size < 0 for size in shape):
            raise ValueError(f"shape {list(shape)} of {dtype} is that of no tensor that can be compressed")
        self.shape, self.dtype, self.codec = torch.Size(shape), dtype, codec
        self.block_bytes, self.options = block_bytes, dict(options)
        self.blocks, self.offsets = blocks, offsets
        self._codec = CODECS[codec]
        self._starts = self._checked_offsets()
        self._codec.check_options(self.options)

    def _checked_offsets(self) -> list[int]:
        """Returns the offsets as a list. Raises ValueError if block_bytes is invalid, or if the offsets do not fit the
        tensor and the coded blocks."""
        if not 8 <= self.block_bytes <= MAX_BLOCK_BYTES or self.block_bytes % 8:
            raise ValueError(f"block_bytes is {self.block_bytes}; wanted a multiple of 8 up to {MAX_BLOCK_BYTES}")
        if self.original_bytes > 2**63 - 1:
            raise ValueError(f"shape {list(self.shape)} of {self.dtype} has too many bytes; wanted at most 2^63 - 1")
        check_bytes("blocks", self.blocks, 0)
        count = -(-self.original_bytes // self.block_bytes)
        if self.offsets.dtype != torch.int64 or self.offsets.shape != (count + 1,) or self.offsets.is_cuda:
            raise ValueError(f"offsets is {self.offsets.dtype} {list(self.offsets.shape)}; wanted int64 [{count + 1}]")
        rising = bool((self.offsets[1:] > self.offsets[:-1]).all())
        if int(self.offsets[0]) != 0 or int(self.offsets[-1]) != self.blocks.numel() or not rising:
            raise ValueError(f"offsets do not rise from 0 to the {self.blocks.numel()} bytes of the blocks")
        return self.offsets.tolist()

    # ---- properties ----

    @property
    def scheme(self) -> str:
        """The codec's name."""
        return self.codec

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def is_pinned(self) -> bool:
        """Returns whether the coded bytes are in pinned host memory."""
        return self.blocks.numel() > 0 and self.blocks.is_pinned()

    @property
    def original_bytes(self) -> int:
        """Size in bytes of the original tensor."""
        return self.numel() * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of the coded blocks."""
        return self.blocks.numel()

    @property
    def nbytes(self) -> int:
        """Size in bytes of all memory that the object takes: the coded blocks and their offsets."""
        return self.blocks.nbytes + self.offsets.nbytes

    def __repr__(self) -> str:
        where = str(self.device) if self.is_cuda else "pinned" if self.is_pinned() else "pageable"
        return (
            f"ibp.codecs.WholeTensor(shape={list(self.shape)}, dtype={self.dtype}, codec={self.codec!r}, "
            f"{shown_memory(self.nbytes, self.original_bytes)}, stored_bytes={self.stored_bytes:,}, "
            f"savings={self.savings:.1%}, {where})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # ---- moving ----

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> WholeTensor:
        """Returns the tensor with its coded bytes on a device. If they are already there, returns self; otherwise
        returns a copy, which is not pinned.

        Args:
            device: the device of the result.
            non_blocking: whether copies from pinned memory to a GPU may still be running when the call returns.
        """
        target = _memory.canonical(device)
        if target == self.device:
            return self
        direct = non_blocking and self.is_pinned()
        moved = self.blocks.to(target, non_blocking=True) if direct else staging.to_device(self.blocks, target)
        return WholeTensor(**{**self.__getstate__(), "blocks": moved})

    def pin_memory(self) -> WholeTensor:
        """Moves the coded bytes from pageable to pinned host memory. Returns self. Coded bytes on a GPU stay there.

        Raises:
            RuntimeError: there is no CUDA device, or the system refuses to pin that much memory.
        """
        if not self.is_cuda:
            self.blocks = _memory.to_pinned(self.blocks)
        return self

    # ---- decoding ----

    def decompress(
        self, *, device: torch.device | str | int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the original tensor.

        A codec of the CPU decodes on several threads of the CPU. A codec of a GPU decodes on the current stream of the
        GPU that the result or the coded bytes are on, and the call does not wait for it. If the coded bytes are on
        another device, they are first copied to the device that decodes. If the result is to be on another device, it
        is copied there afterwards.

        Args:
            device: the device of the result. None: out's device, else that of the coded bytes.
            out: tensor of the same shape and dtype to write to, with any strides.

        Raises:
            TypeError, ValueError: out does not fit, or device is not a device.
            CorruptTableError: the coded bytes are damaged. Bytes coded by nvCOMP's codecs are not checked.
            ImportError: the codec's package is not installed.
            RuntimeError: the codec needs a GPU, and there is none.
        """
        if out is not None:
            check_out(out, self.shape, self.dtype)
        target = target_of(device, out, self.device)
        worker = self._codec.worker(target, self.device)
        fits = out is not None and out.is_contiguous() and out.device == worker
        result = out if fits and out is not None else torch.empty(self.shape, dtype=self.dtype, device=worker)
        if self.original_bytes:
            self._decode(0, len(self._starts) - 1, bytes_of(result))
        if out is None:
            return result.to(target)
        return out if result is out else out.copy_(result.view(out.shape))

    def _decode(self, first: int, last: int, out: torch.Tensor) -> None:
        """Decodes blocks [first, last) into `out`, a uint8 tensor on the device that decodes."""
        start, end = self._starts[first], self._starts[last]
        near = staging.to_host if out.device == _CPU else lambda data: staging.to_device(data, out.device)
        offsets = [offset - start for offset in self._starts[first : last + 1]]
        self._codec.require()
        self._codec.decode(near(self.blocks[start:end]), offsets, self.block_bytes, self.options, out)

    @property
    def _why_no_rows(self) -> str:
        return (
            f"a tensor coded by {self.codec!r} has no rows that decode alone: decompress it, or compress it with "
            "scheme='auto'"
        )

    def _refuse(self, *arguments: object, **options: object) -> NoReturn:
        """Raises TypeError, because there are no rows."""
        raise TypeError(self._why_no_rows)

    index_select = update_ = append = refit = prefetch = __getitem__ = __iter__ = _refuse


# Pickles of ibp 0.2 have the class under the second name.
torch.serialization.add_safe_globals([WholeTensor, (WholeTensor, "ibp.WholeTensor")])


def decoded_range(whole: WholeTensor, start: int, end: int) -> torch.Tensor:
    """Returns bytes [start, end) of the original tensor, in host memory. Decodes only the blocks that hold them."""
    first, last = start // whole.block_bytes, -(-end // whole.block_bytes)
    at, stop = first * whole.block_bytes, min(last * whole.block_bytes, whole.original_bytes)
    data = torch.empty(stop - at, dtype=torch.uint8, device=whole._codec.worker(whole.device))
    whole._decode(first, last, data)
    return data.cpu()[start - at : end - at]


# ---- making a WholeTensor ----


def compress_whole(
    x: torch.Tensor,
    scheme: str,
    *,
    chunk_bytes: int | None,
    device: torch.device | str | int | None,
    memory: str | None,
    numa: Numa,
    progress: bool,
) -> WholeTensor:
    """Codes a tensor as a whole, see `ibp.compress`."""
    (home, pin), node = _memory.home_of(x.device, memory, _memory.usual(device, x)), node_of(numa)
    codec = codec_of(scheme)
    chunk_bytes = None if chunk_bytes is None else whole_number("chunk_bytes", chunk_bytes)
    block_bytes, options = codec.plan(x.dtype, chunk_bytes)
    asked = None if device is None else _memory.canonical(device)
    if asked is not None and asked.type != codec.device_type:
        raise ValueError(f"device is {str(asked)!r}, but {codec.name!r} codes on a {codec.device_type.upper()} device")
    codec.require()
    worker = codec.worker(asked or x.device, x.device)
    data = bytes_of(x)
    options = codec.suited(options, x.dtype, data, worker)
    with tqdm(total=data.numel(), desc="compress", unit="B", unit_scale=True, disable=not progress) as bar:
        pieces = codec.encode(data, worker, block_bytes, options, bar.update) if data.numel() else []
    blocks, offsets = _joined(pieces, x.device, pin if home == x.device else False, node)
    whole = WholeTensor(
        shape=tuple(x.shape),
        dtype=x.dtype,
        codec=codec.name,
        block_bytes=block_bytes,
        options=options,
        blocks=blocks,
        offsets=offsets,
    )
    moved = whole.to(home)
    return moved.pin_memory() if pin and moved is not whole else moved


def _joined(
    pieces: list[torch.Tensor], home: torch.device, pin: bool | None, node: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins coded blocks into one tensor on the device `home`. Returns (that tensor, the offset in it at which each
    block begins, followed by the offset at which the last block ends). Each piece is removed from the list as soon as
    it is copied, so that its memory is freed."""
    sizes = torch.tensor([0, *(piece.numel() for piece in pieces)], dtype=torch.int64, device="cpu")
    offsets = sizes.cumsum(0)
    if len(pieces) == 1 and pieces[0].device == home and home.type == "cuda":
        return pieces[0], offsets
    (blocks,), _ = _memory.empty_parts([int(offsets[-1])], home, pin, node)
    for end in reversed(offsets[1:].tolist()):
        piece = pieces.pop()
        blocks[end - piece.numel() : end].copy_(staging.to_host(piece) if home.type == "cpu" else piece)
    return blocks, offsets
