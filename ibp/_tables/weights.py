"""Makes tables of the weights of models, and joins tables.

`WeightCompressor` compresses weights into packed tables. A weight is coded with its dimensions in their order in
memory, and weights of one kind share a codebook. `join` puts rows of several tables together in one table.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from .._fetch.streaming import decompress
from .._rows.codebook import AnyCodebook, fingerprint_of
from .._rows.geometry import DTYPES, Geometry, memory_order
from .._rows.learning import LEAST_BYTES, ROW_BYTES, Kind, Learner, Options, kind_of
from .._rows.table import has_own_bases
from .compressed_tensor import CompressedTensor, compress_rows

# Options that say how a codebook is learned. These options are left out when a weight is compressed with an existing
# codebook.
_OF_LEARNING = {"scheme", "chunk_bytes", "tau", "sample", "clusters"}
_OF_A_MODEL = {field.name for field in fields(Options)} - {"codebook"}


def is_worth_coding(x: torch.Tensor) -> bool:
    """Returns whether x is worth coding: a dense tensor of a supported dtype, of at least 4 KiB, and of class
    torch.Tensor itself. Instances of subclasses, such as quantised weights, are not worth coding."""
    return type(x) is torch.Tensor and x.layout == torch.strided and x.dtype in DTYPES and x.nbytes >= LEAST_BYTES


@dataclass(frozen=True)
class CodedWeight:
    """A compressed weight, with the strides that the weight had in memory, for example those of channels_last.

    Example:
        >>> weight = torch.randn(64, 32, 3, 3).to(memory_format=torch.channels_last)
        >>> coded = ibp.adapters.WeightCompressor({}).code("conv.weight", weight)
        >>> coded.shape == weight.shape, coded.stride == weight.stride(), coded.table.shape
        (True, True, torch.Size([64, 3, 3, 32]))
        >>> torch.equal(coded.decoded("cpu"), weight)
        True

    Attributes:
        table: the weight, with its dimensions permuted to their order in memory.
        shape, stride: the shape and strides of the weight. If the weight had gaps in memory or overlapped itself, the
            strides are those of a contiguous tensor.
    """

    table: CompressedTensor
    shape: torch.Size
    stride: tuple[int, ...]

    def decoded(self, device: torch.device | str | int) -> torch.Tensor:
        """Decodes the weight on a device. Returns it with its own shape and strides."""
        return self.as_it_was(decompress(self.table, device=device))

    def as_it_was(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a view of `tensor` with the shape and strides of the weight. tensor: the decoded table."""
        return tensor.as_strided(self.shape, self.stride)


class WeightCompressor:
    """Compresses the weights of a model into packed tables, one after the other.

    Weights of one kind share a codebook, which is learned from the first of them. Weights are of one kind if they have
    the same shape and dtype, and if their names differ only in numbers; examples are the same weight in all layers. If
    raw rows are best for the first weight, all weights of its kind are kept raw. If the codebook saves clearly less for
    a later weight (by more than 1 % of its bytes), another codebook is learned for this weight alone. That codebook is
    used if the weight then takes fewer bytes.

    Example:
        >>> compressor = ibp.adapters.WeightCompressor({"device": "cpu", "memory": "host"})
        >>> layers = [torch.randn(256, 1024).mul(0.02).bfloat16() for _ in range(2)]
        >>> tables = [compressor.compress(f"layers.{number}.weight", x) for number, x in enumerate(layers)]
        >>> tables[0].codebook is tables[1].codebook, torch.equal(tables[1].decompress(), layers[1])
        (True, True)
        >>> compressor.takes(layers[0]), compressor.takes(torch.ones(3))
        (True, False)

    Args:
        options: options of `ibp.compress` other than x and codebook. By default layout is "packed" and row_bytes is
            4,096.

    Raises:
        TypeError: `ibp.compress` has no such option.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        if unknown := sorted(set(options) - _OF_A_MODEL):
            raise TypeError(f"{', '.join(unknown)}: no such option; wanted some of {', '.join(sorted(_OF_A_MODEL))}")
        self._options = dict(options)
        self._learned: dict[tuple[Kind, int | None], Learner[AnyCodebook]] = {}

    @staticmethod
    def takes(x: torch.Tensor) -> bool:
        """Returns whether a tensor is worth compressing. It must be dense, have a supported dtype and at least 4 KiB,
        and be of class torch.Tensor itself. Instances of subclasses, such as quantised weights and parameters, are not
        worth compressing; for a parameter, pass `parameter.data`."""
        return is_worth_coding(x)

    def code(self, name: str, x: torch.Tensor, **defaults: Any) -> CodedWeight:
        """Compresses a weight with any strides. The arguments are those of `compress`."""
        ordered = x.permute(memory_order(x))
        if not ordered.is_contiguous():
            x = ordered = x.contiguous()
        return CodedWeight(self.compress(name, ordered, **defaults), x.shape, x.stride())

    def compress(self, name: str, x: torch.Tensor, **defaults: Any) -> CompressedTensor:
        """Compresses a weight. Returns the table.

        Args:
            name: the name of the weight in its model.
            x: the weight.
            defaults: options for this weight. If the constructor was given the same option, the constructor's value is
                used.
        """
        options = {"layout": "packed", "row_bytes": ROW_BYTES, **defaults, **self._options}
        kind = kind_of(name, x.shape, x.dtype), options["row_bytes"]  # A codebook fits only rows of one size.
        if kind in self._learned:
            learned = self._learned[kind]
            of_memory = {key: value for key, value in options.items() if key not in _OF_LEARNING}
            if learned.found is None:
                return compress_rows(x, scheme="raw", **of_memory)
            table = compress_rows(x, codebook=learned.found, **of_memory)
            if learned.fits(table.stored_bytes, table.original_bytes):
                return table
            own = compress_rows(x, **options)
            return own if own.stored_bytes < table.stored_bytes else table
        table = compress_rows(x, **options)
        self._learned[kind] = Learner(table.codebook, 1 - table.savings)
        return table


# ---- joining ---------------------------------------------------------------------------------------------------------


def join(parts: Sequence[tuple[CompressedTensor, int, int]], device: torch.device) -> CompressedTensor | None:
    """Concatenates items of several tables into a table on a device, by copying the coded rows. No row is decoded.
    Returns None if the tables cannot be joined.

    Tables can be joined if they have equal codebooks, dtypes, item shapes and slot sizes. Every item must be one row.
    The size of a slot must be above 0 and below the size of a row. No table may have a separate base for every row, as
    a table has after its rows have been changed.

    Args:
        parts: (table, first, last) for the items `first` to `last` - 1 of each table.
    """
    like, size = parts[0][0], parts[0][0].slot_bytes
    form = _form(like)
    if form is None or any(_form(table) != form for table, _, _ in parts[1:]):
        return None
    if len(parts) == 1 and parts[0][1:] == (0, like.geometry.num_items):
        return like.to(device)

    def on_device(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.to(device) for tensor in tensors])

    num_items = sum(last - first for _, first, last in parts)
    geometry = Geometry(torch.Size((num_items, *like.shape[1:])), like.dtype, like.row_bytes)
    slots = on_device([table.slots[first * size : last * size] for table, first, last in parts])
    lengths = on_device([table.lengths[first:last] for table, first, last in parts])
    ends = [(_overflow_before(table, first), _overflow_before(table, last)) for table, first, last in parts]
    overflow = on_device([table.overflow[start:end] for (table, _, _), (start, end) in zip(parts, ends)])
    bases = geometry.index_rows(lengths, size) if len(overflow) else None
    return CompressedTensor.of_parts(geometry, like.scheme, size, slots, like.codebook, lengths, overflow, bases)


def _form(table: CompressedTensor) -> Hashable | None:
    """Returns a value that is equal for tables that can be joined with each other. Returns None for a table that does
    not meet the conditions of `join` for a single table."""
    if table.codebook is None or table.geometry.item_bytes != table.row_bytes or has_own_bases(table):
        return None
    if not 0 < table.slot_bytes < table.row_bytes:
        return None
    return table.dtype, table.shape[1:], table.slot_bytes, fingerprint_of(table.codebook)


def _overflow_before(table: CompressedTensor, item: int) -> int:
    """Returns the total size in bytes of the overflow of all items before `item`."""
    geometry = Geometry(torch.Size((item, *table.shape[1:])), table.dtype, table.row_bytes)
    return geometry.survey(table.lengths[:item]).overflow_bytes(table.slot_bytes)
