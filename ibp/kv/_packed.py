"""Packs pages into messages for other machines: `PageCodec`, `packed_bytes`, `pack`, `unpack`.

A message is a packed piece of coded rows (see `_rows.forms`): a head, an index with a base and a length for each row,
and the rows. Every row begins at a multiple of 32 bytes. The rows lie in the order in which the GPU happened to encode
them. The head's field `note` is a number that is computed from the codec and the number of rows. By this number
`unpack` recognises messages of its codec. If a row was not encoded, every byte of its base and of its length is 255.
Decoders refuse such a row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import _core
from .._common import wire
from .._common.arguments import sms_of, whole_number
from .._common.sequences import rounded_up
from .._rows import forms
from .._rows.codebook import AnyCodebook, check_codebook, fingerprint_of
from .._rows.geometry import check_bytes
from .._rows.handle import Faults, FaultWords, Handle, Parts
from . import _paged
from ._paged import PagedTensors, Pages, blocks_on, check_different, check_paged, plan_pages

_NONE = 255  # value of each byte of the base and the length of a row that has not been encoded
# Largest size of a row in bytes. In a message, the length 0xFFFF marks a row that has not been encoded. If rows were
# longer, the same length would mark a default row.
_MOST_ROW_BYTES = 0xFFFE
_LAYOUT = 1  # version of the message format; it changes when the meaning of the bytes changes
# 2^64 divided by the golden ratio. Multiplying by it maps similar numbers of rows to numbers that are far apart.
_SPREAD = 0x9E3779B97F4A7C15
# Kinds of faults: a message does not belong to the codec; packing has failed; unpacking has failed. A fault of the
# first kind also causes faults of the third kind.
_STRANGE, _PACKING, _UNPACKING = range(3)
_LATER = " (noted on {device})"
_WORDS = (
    FaultWords(
        "{status}", invalid="a message was not packed by this codec, or holds a different number of pages", later=_LATER
    ),
    FaultWords(
        "{status}: row {value} of a message",
        out_of_range="a block number that was packed is out of range; its page is marked as damaged",
        later=_LATER,
    ),
    FaultWords(
        "{status}: piece {value} of a message",
        out_of_range="a block number that was to be unpacked to is out of range",
        later=_LATER,
    ),
)

Tensors = torch.Tensor | PagedTensors | Sequence[torch.Tensor]


class PackedPages(NamedTuple):
    """Pages that `pack` has packed into one message.

    Attributes:
        message: uint8 [packed_bytes(...)], on the device of the pages.
        used: int64 [1] on that device: the number of bytes to send, from the beginning of the message.

    Example:
        >>> kv = torch.randn(64, 16, 8, 64).bfloat16()  # 64 blocks of 16 tokens
        >>> codec = ibp.kv.PageCodec.learn(kv)
        >>> packed = ibp.kv.pack(kv, codec, blocks=[3, 5])
        >>> int(packed.used) < 2 * codec.page_bytes < packed.message.numel()
        True
    """

    message: torch.Tensor
    used: torch.Tensor


@wire.sent
@dataclass(frozen=True, eq=False)
class PageCodec:
    """A codec that compresses pages of one size into messages. A page is a block of one tensor of a paged cache.

    Both machines need the same codec: send the result of `to_bytes`, and pass it to `from_bytes` on the other machine.
    Models with pages of several sizes need a codec and a message for each size.

    Example:
        >>> kv = torch.randn(64, 16, 8, 64).bfloat16()  # 64 blocks of 16 tokens
        >>> codec = ibp.kv.PageCodec.learn(kv)
        >>> codec.page_bytes, codec.codebook.row_bytes
        (16384, 2048)
        >>> ibp.kv.PageCodec.from_bytes(codec.to_bytes()).fingerprint == codec.fingerprint
        True

    Attributes:
        codebook: the codebook that compresses rows.
        page_bytes: size in bytes of a page.

    Raises:
        TypeError, ValueError: an attribute is not as described, page_bytes is not a multiple of the codebook's row
            size, or the rows are larger than 65,534 bytes.
    """

    codebook: AnyCodebook
    page_bytes: int

    def __post_init__(self) -> None:
        check_codebook(self.codebook)
        row_bytes = _paged.row_bytes_of(self.codebook, None, whole_number("page_bytes", self.page_bytes, 1))
        if row_bytes > _MOST_ROW_BYTES:
            raise ValueError(f"a codebook has rows of {row_bytes} bytes; wanted at most {_MOST_ROW_BYTES}")

    def __reduce__(self) -> tuple[type[PageCodec], tuple[AnyCodebook, int]]:
        """Pickles and copies only the codebook and the page size, so that a copy has its own records of faults."""
        return PageCodec, (self.codebook, self.page_bytes)

    @classmethod
    def learn(cls, pages: torch.Tensor, *, row_bytes: int | None = None, level: str = "default") -> PageCodec:
        """Learns a codec from a sample of pages.

        Args:
            pages: [pages, ...], real keys and values in their dtype. If a cache of FP8 values is declared as uint8,
                view it as torch.float8_e4m3fn or torch.float8_e5m2.
            row_bytes: size in bytes of a row, which must be contiguous in a page. None: 1 to 2 KiB if the page size
                allows it.
            level: "default" or "fast", see `ibp.compress`.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        page_bytes = PagedTensors(pages).block_bytes
        row_bytes = _paged.row_bytes_of(pages, row_bytes, page_bytes)
        return cls(_paged.learned(pages, row_bytes, level), page_bytes)

    @classmethod
    def from_bytes(cls, content: bytes) -> PageCodec:
        """Returns the codec whose `to_bytes` returned these bytes.

        Raises:
            ValueError: the bytes are damaged, or `to_bytes` did not return them.
        """
        codec = wire.read(content)
        if not isinstance(codec, cls):
            raise ValueError(f"the bytes are of a {type(codec).__name__}; wanted those of a PageCodec")
        return codec

    def to_bytes(self) -> bytes:
        """Returns the codec as bytes that can be sent to another process. Unlike a pickle, the bytes are read as data,
        and nothing in them is executed."""
        return wire.written(self)

    @functools.cached_property
    def fingerprint(self) -> int:
        """A 63-bit hash of the codec. Equal codecs have equal hashes in every process."""
        return fingerprint_of(self.codebook, self.page_bytes, _LAYOUT)

    @functools.cached_property
    def _faults(self) -> Faults:
        return Faults(*_WORDS)

    def check(self) -> None:
        """Waits for the work on the current streams, and raises an error if a call of `pack` or `unpack` with this
        codec has noted a fault. The next such call also raises the error, but does not wait.

        Raises:
            IndexError: a block number on a GPU was out of range.
            ValueError: a message was packed by another codec, or holds a different number of pages. All pages of the
                call have become zeros.
            ibp.CorruptTableError: a message is damaged, or has not arrived. The damaged parts have become zeros.
        """
        for device in self._faults.devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            self._raise_pending(device)

    def _raise_pending(self, device: torch.device) -> None:
        # `list` clears all records before the first fault is raised, because that fault has caused the others.
        for words, record in list(self._faults.taken(device)):
            words.raise_for(record, device if device.type == "cuda" else None)

    def _number(self, num_rows: int) -> int:
        return (self.fingerprint ^ num_rows * _SPREAD) & (1 << 63) - 1

    def _rows(self, num_pages: int) -> int:
        return num_pages * (self.page_bytes // self.codebook.row_bytes)


def _head_of(message: torch.Tensor) -> forms.PieceHead:
    return forms.head_of(message[: forms.HEAD_BYTES].view(torch.int64))


def _handle(codec: PageCodec, message: torch.Tensor, num_rows: int, item_bytes: int) -> Handle:
    """Returns a handle of a message of num_rows rows as a table with items of item_bytes bytes. Rows are encoded into
    this table and decoded from it."""
    form, codebook = forms.packed(num_rows), codec.codebook
    index = message[form.lengths].view(torch.uint16), message[form.bases].view(torch.int64)
    data = message[form.overflow.start :]
    sizes = (0, 0, num_rows * codebook.row_bytes // item_bytes, item_bytes)
    words, used = codebook.words(message.device), _head_of(message).used
    return Handle(Parts(data[:0], data, *index, words, codebook.codec, *sizes, used=used))


def _paged_for(codec: PageCodec, tensors: Tensors) -> PagedTensors:
    paged = tensors if isinstance(tensors, PagedTensors) else PagedTensors(tensors)
    check_paged(paged, "codec", paged.device, codec.page_bytes, codec.codebook.row_bytes)
    return paged


def _plan(
    paged: PagedTensors, blocks: torch.Tensor, ids_per_page: int, stored: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (ids of the rows or pieces of the message's pages, addresses of the pieces of the blocks), as
    `plan_pages` does. blocks: the numbers of the blocks, int64 on the device."""
    count = blocks.numel()
    pages = torch.arange(count, device=paged.device)
    return plan_pages(paged, pages, blocks, ids_per_page, count, len(paged), stored=stored)


def packed_bytes(codec: PageCodec, num_pages: int) -> int:
    """Returns the largest possible size in bytes of a message of num_pages pages, rounded up to a multiple of 64.

    Each block of each tensor counts as one page. The size is known before pages are compressed, so the memory for
    messages can be allocated, and registered with the network, once. Usually fewer bytes have to be sent, see `pack`.
    If pages cannot be compressed, a message is about 0.5 % larger than the pages.

    Example:
        >>> kv = torch.randn(64, 16, 8, 64).bfloat16()  # 64 blocks of 16 tokens
        >>> codec = ibp.kv.PageCodec.learn(kv)
        >>> ibp.kv.packed_bytes(codec, 64) / kv.nbytes
        1.0049...

    Raises:
        TypeError, ValueError: num_pages is not an integer of at least 0.
    """
    num_rows = codec._rows(whole_number("num_pages", num_pages, 0))
    room = rounded_up(codec.codebook.row_bytes, _core.SECTOR_BYTES)  # size in bytes of a raw row in the message
    return rounded_up(forms.packed(num_rows, num_rows * room).overflow.stop, forms.ALIGNMENT)


def pack(
    pages: Tensors,
    codec: PageCodec,
    *,
    blocks: Pages | None = None,
    out: torch.Tensor | None = None,
    max_sms: int | None = None,
) -> PackedPages:
    """Compresses blocks of a paged cache into one message, on the current stream of their device.

    The host does not wait for the GPU. A CUDA graph can capture the call, after one call outside the graph, if pages
    are `PagedTensors` and blocks are on the GPU or None.

    Example:
        >>> kv = torch.randn(64, 16, 8, 64).bfloat16()  # 64 blocks of 16 tokens
        >>> codec = ibp.kv.PageCodec.learn(kv)
        >>> buffer = torch.empty(ibp.kv.packed_bytes(codec, 8), dtype=torch.uint8)
        >>> message, used = ibp.kv.pack(kv, codec, blocks=[3, 5], out=buffer)
        >>> received = message[: int(used)].clone()  # the bytes that have to be sent
        >>> ibp.kv.unpack(received, codec, out=kv, blocks=[20, 21])
        >>> torch.equal(kv[20:22], kv[[3, 5]])
        True

    Args:
        pages: a tensor [num_blocks, ...], a sequence of such tensors of the same shape, such as the tensors of all
            layers, or a `PagedTensors` of them. If it is not a `PagedTensors`, the call makes one, and waits for a copy
            of addresses to the GPU.
        codec: a codec for pages of this size.
        blocks: the numbers of the blocks, in any order, as a list, or as an int32 or int64 tensor on the CPU or the
            device. Number b means block b of every tensor. None: all blocks, in order.
        out: the memory for the message, a uint8 tensor of one dimension on the device of the pages, at an address that
            is a multiple of 64. The message takes its first `packed_bytes(codec, number of blocks * number of tensors)`
            bytes. None: new memory is allocated.
        max_sms: keep at most this many multiprocessors busy. None: all.

    Raises:
        IndexError: there is no such block. For block numbers on a GPU, `codec.check` and the next call raise it.
        TypeError, ValueError: arguments are not as described.
    """
    paged = _paged_for(codec, pages)
    near, host = blocks_on(paged, blocks)
    device, num_pages = paged.device, near.numel() * len(paged)
    size = packed_bytes(codec, num_pages)
    fault = codec._faults.on(device, _PACKING)
    codec._raise_pending(device)
    if out is None:
        out = torch.empty(size, dtype=torch.uint8, device=device)
    check_bytes("out", out, size, device, forms.ALIGNMENT)
    message, num_rows = out[:size], codec._rows(num_pages)
    start, head = forms.packed(num_rows).overflow.start, _head_of(message)
    with torch.inference_mode():  # the memory may have been allocated in inference mode
        message[: forms.HEAD_BYTES].zero_()
        head.note.fill_(codec._number(num_rows))
        message[forms.HEAD_BYTES : start].fill_(_NONE)
    if num_pages:
        planned, addresses = _plan(paged, near, num_rows // num_pages)
        # Encoding is faster with row_ids=None, which means 0, 1, 2 and so on. That is right only if the host knows that
        # all blocks exist.
        row_ids = None if blocks is None or host is not None else planned
        _handle(codec, message, num_rows, codec.codebook.row_bytes).encode(
            paged.layout, head.counts, fault, buffers=addresses, row_ids=row_ids, max_sms=sms_of(max_sms)
        )
    return PackedPages(message, head.used + start)


def unpack(
    message: torch.Tensor, codec: PageCodec, *, out: Tensors, blocks: Pages | None = None, max_sms: int | None = None
) -> None:
    """Decompresses a message into blocks of a paged cache, on the current stream of their device. The blocks get the
    bits that were packed. The host does not wait for the GPU. CUDA graphs can capture the call under the same
    conditions as `pack`.

    The device checks whether an equal codec has packed the message, for this number of pages. If not, the blocks become
    zeros, and `codec.check()` and the next call raise ValueError. On the CPU, the call itself raises it.

    Example:
        >>> kv = torch.randn(64, 16, 8, 64).bfloat16()  # 64 blocks of 16 tokens
        >>> codec = ibp.kv.PageCodec.learn(kv)
        >>> message, _ = ibp.kv.pack(kv, codec, blocks=[3, 5])
        >>> ibp.kv.unpack(message, codec, out=kv, blocks=[20, 21, 22])
        Traceback (most recent call last):
        ValueError: a message was not packed by this codec, or holds a different number of pages

    Args:
        message: a uint8 tensor of one dimension on the device of out, at an address that is a multiple of 64. It has at
            least the first `used` bytes of a message that `pack` returned.
        codec: a codec equal to the one that was given to `pack`.
        out: the tensors that receive the pages, in any form that `pack` takes. The number of tensors must be the same
            as in the call of `pack`.
        blocks: the numbers of the blocks that receive the pages, all different, in the order in which the pages were
            packed. None: all blocks, in order.
        max_sms: as in `pack`.

    Raises:
        IndexError, ValueError, ibp.CorruptTableError: as in `PageCodec.check`. On the CPU, the call raises its own
            faults. On a GPU, it raises faults that earlier work has noted.
        TypeError, ValueError: arguments are not as described.
    """
    paged = _paged_for(codec, out)
    near, host = blocks_on(paged, blocks)
    check_different("blocks", host, paged.num_blocks)
    device, piece_bytes, num_pages = paged.device, paged.piece_bytes, near.numel() * len(paged)
    strange, fault = (codec._faults.on(device, kind) for kind in (_STRANGE, _UNPACKING))
    codec._raise_pending(device)
    num_rows = codec._rows(num_pages)
    check_bytes("message", message, forms.packed(num_rows).overflow.start, device, forms.ALIGNMENT)
    with torch.inference_mode():
        is_other = _head_of(message).note != codec._number(num_rows)  # bool [1] on the device
        strange[:1].bitwise_or_(is_other)  # sets the status "invalid argument"
        is_ours = ~is_other
    if num_pages:
        stored = is_ours.view(torch.uint8).expand(num_pages).contiguous()
        pieces, addresses = _plan(paged, near, codec.page_bytes // piece_bytes, stored)
        table, like = _handle(codec, message, num_rows, piece_bytes).table, paged.tensors[0]
        torch.ops.ibp.gather_items.default(table, pieces, sms_of(max_sms), like, fault, addresses=addresses)
    if device.type == "cpu":
        codec._raise_pending(device)
