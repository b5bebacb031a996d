"""Compressing tensors into tables: `compress_rows` into new memory, `compress_in_place` in the tensor's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .. import _core
from .._common.once import warn_once
from .._layout import geometry as _rows
from .._machine import memory as _memory
from .._machine import staging
from .._rows.faults import new_record
from .._rows.handle import Handle, Parts
from .._schemes import Options, Request, checked
from .coding import CHANGED, Coding, coded, compressed, geometry_of
from .compressed_tensor import CompressedTensor


def warn_of_gradient(x: torch.Tensor) -> None:
    """Warns, once a process, that a table of a tensor that requires grad has no gradient."""
    if x.requires_grad and torch.is_grad_enabled():
        warn_once(
            "x requires grad, and a table of it has no gradient: give x.detach() if its values alone are meant. Rows "
            "of ibp.nn.Embedding and EmbeddingBag train, with trainable=True",
            stacklevel=3,
        )


def compress_rows(x: torch.Tensor | np.ndarray, **options: Any) -> CompressedTensor:
    """Returns a table of a tensor's rows: `ibp.compress` for the schemes of rows. options: fields of `Options`."""
    x = _rows.given_tensor(x)
    _rows.check_tensor(x)
    return compressed(CompressedTensor, x, Options(**options))


def compress_in_place(x: torch.Tensor, options: Options) -> CompressedTensor:
    """Returns a table in x's own memory: `ibp.compress(x, inplace=True)`.

    All analysis is done before the first write. Rows are then rewritten in blocks, each with its lengths by one
    operation, so that the table decompresses to x at any time."""
    _check_owns_memory(x)
    options = checked(options)
    worker = _memory.usual(options.device, x)
    geometry = geometry_of(x, options.row_bytes, options.codebook)
    home, pin = _memory.home_of(x, options.memory, worker)
    if home != x.device:
        raise ValueError(f"memory is {options.memory!r}, but inplace=True leaves x where it is, on {x.device}")
    data, row_bytes = _rows.bytes_of(x), geometry.row_bytes
    coding = coded(Request(data, geometry, worker, options, row_bytes), in_place=True)
    if coding is None or coding.stored_bytes >= geometry.num_bytes:
        coding = None
        table = CompressedTensor.of_parts(geometry, "raw", row_bytes, data)
    else:
        book, raw = coding.codebook, torch.zeros_like(coding.lengths, device=data.device)  # what the memory holds
        table = CompressedTensor.of_parts(geometry, book.scheme, row_bytes, data, book, raw)
    table._owner = x
    kept: list[CompressedTensor] = []

    def work() -> CompressedTensor:
        kept.append(table)  # from the first row rewritten, the table is all that is left of x
        if coding is not None:
            _encode_in_place(table, data, coding, options.progress)
        if pin:
            table.pin_memory()
        elif pin is None:
            _memory.pin_if_possible(table)
        return table

    try:
        return _core.call_keeping_table(kept, work)
    except BaseException as interruption:  # Python handles signals as that function returns, too
        if kept:
            interruption.table = table  # type: ignore[attr-defined]
        raise


def _check_owns_memory(x: torch.Tensor) -> None:
    if not x.is_contiguous() or x.is_conj() or x.is_neg():
        raise ValueError(f"x has strides {x.stride()}; compress(inplace=True) wants a contiguous tensor")
    held = x.untyped_storage().nbytes()
    if x.storage_offset() != 0 or held != x.nbytes:
        raise ValueError(
            f"x has {x.nbytes} bytes of a storage of {held}; "
            "compress(inplace=True) wants a tensor that owns all of its storage"
        )
    if x.requires_grad:
        raise ValueError("x requires grad; compress(inplace=True) would destroy its values: detach it first")


def _encode_in_place(table: CompressedTensor, data: torch.Tensor, coding: Coding, progress: bool) -> None:
    """Rewrites the rows of a table that are still raw. The bytes and the lengths of a block change by one operation of
    torch, before and after which the table decodes: an interrupt finds it so, however many there are."""
    codebook, lengths, worker = coding.codebook, coding.lengths, coding.lengths.device
    row_bytes, words, entries = table.row_bytes, codebook.words(worker), table.lengths.view(torch.uint8)
    no_bases = torch.empty(0, dtype=torch.int64, device=worker)
    no_overflow = torch.empty(0, dtype=torch.uint8, device=worker)
    blocks = _rows.blocks(data, row_bytes, worker, "compress" if progress else None, whole=False)
    with staging.outlet(worker, data.device, pageable=True) as outlet:
        for first, last, block in blocks:
            targets = data[first * row_bytes : last * row_bytes], entries[2 * first : 2 * last]
            rows, new_lengths = outlet.take([target.numel() for target in targets])
            new_lengths.copy_(lengths[first:last].view(torch.uint8))
            index, sizes, fault = (lengths[first:last], no_bases), (row_bytes, 0, 1, block.numel()), new_record(worker)
            place = Handle(Parts(rows, no_overflow, *index, words, codebook.codec, *sizes))
            torch.ops.ibp.encode_rows.default(place.table, block, fault)
            CHANGED.raise_for(fault)
            outlet.put(targets, (rows, new_lengths))
