"""Compressing tensors into tables: `compress_rows` into new memory, `compress_in_place` in the tensor's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .. import _core
from .._common.once import warn_once
from .._common.progress import tqdm
from .._layout import geometry as _rows
from .._machine import memory as _memory
from .._machine import numa as _numa
from .._machine import staging
from .._schemes import AnyCodebook
from .coding import Coding, Learning, check_faults, code, encode_block, geometry_of, table_of
from .compressed_tensor import CompressedTensor


def warn_of_gradient(x: torch.Tensor) -> None:
    """Warns, once a process, that a table of a tensor that requires grad has no gradient."""
    if x.requires_grad and torch.is_grad_enabled():
        warn_once(
            "x requires grad, and a table of it has no gradient: give x.detach() if its values alone are meant. Rows "
            "of ibp.nn.Embedding and EmbeddingBag train, with trainable=True",
            stacklevel=3,
        )


def compress_rows(
    x: torch.Tensor | np.ndarray,
    *,
    scheme: str = "auto",
    chunk_bytes: int | None = None,
    tau: float | None = None,
    codebook: AnyCodebook | None = None,
    sample: float | None = None,
    clusters: int | str | None = None,
    level: str = "default",
    layout: str = "slots",
    slot_bytes: int | None = None,
    row_bytes: int | None = None,
    device: torch.device | str | int | None = None,
    memory: str | None = None,
    numa: _numa.Numa = None,
    progress: bool = False,
) -> CompressedTensor:
    """A table of a tensor's rows: `ibp.compress` for the schemes of rows."""
    x = _rows.given_tensor(x)
    _rows.check_tensor(x)
    options = {"chunk_bytes": chunk_bytes, "tau": tau, "sample": sample, "clusters": clusters, "level": level}
    learning = Learning.of(scheme, codebook=codebook, **options)
    (home, pin), node = _memory.home_of(x, memory, _rows.working_device(x, device)), _numa.node_of(numa)
    is_there = home == x.device
    made_pinned = pin if is_there else False
    table = code(CompressedTensor, x, learning, layout, slot_bytes, row_bytes, device, made_pinned, node, progress)
    if is_there:
        return table
    moved = table.to(home)
    return moved.pin_memory(numa=numa) if pin else moved


def compress_in_place(
    x: torch.Tensor,
    row_bytes: int | None,
    device: torch.device | str | int | None,
    memory: str | None,
    progress: bool,
    **options: Any,
) -> CompressedTensor:
    """A table in x's own memory: `ibp.compress(x, inplace=True)`. options: of `Learning`.

    All analysis is done before the first write; rows are then rewritten in blocks, each with its lengths by one
    operation: the table decompresses to x at any time."""
    _rows.check_tensor(x)
    _check_owns_memory(x)
    learning = Learning.of(**options)
    geometry = geometry_of(x, row_bytes, learning.codebook)
    worker = _rows.working_device(x, device)
    home, pin = _memory.home_of(x, memory, worker)
    if home != x.device:
        raise ValueError(f"memory is {memory!r}, but inplace=True leaves x where it is, on {x.device}")
    data = _rows.bytes_of(x)
    request = learning.request(data, geometry, worker, slot_bytes=geometry.row_bytes, progress=progress)
    coding = learning.coding_of(request, in_place=True, is_free=device is None)
    if coding is None:
        table = table_of(CompressedTensor, geometry, "raw", geometry.row_bytes, data, None, None)
    else:
        coded = torch.zeros_like(coding.lengths, device=data.device)  # all rows raw: what the memory holds
        book = coding.codebook
        table = table_of(CompressedTensor, geometry, book.scheme, geometry.row_bytes, data, book, coded)
    table._owner = x
    kept: list[CompressedTensor] = []

    def work() -> CompressedTensor:
        kept.append(table)  # from the first row rewritten, the table is all that is left of x
        if coding is not None:
            _encode_in_place(table, data, coding, progress)
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
    """Rewrites the rows of a table that are still raw. Rows and lengths of a block change by one operation of torch,
    before and after which the table decodes: an interrupt finds it so, however many there are."""
    codebook, lengths, worker = coding.codebook, coding.lengths, coding.lengths.device
    row_bytes, coded = table.row_bytes, table.lengths.view(torch.uint8)
    no_bases, no_overflow = (
        torch.empty(0, dtype=torch.int64, device=worker),
        torch.empty(0, dtype=torch.uint8, device=worker),
    )
    with (
        staging.outlet(worker, data.device, pageable=True) as outlet,
        tqdm(total=table.num_rows, desc="compress", unit="row", unit_scale=True, disable=not progress) as bar,
    ):
        for first, last, block in _rows.blocks(data, row_bytes, worker, whole=False):
            targets = data[first * row_bytes : last * row_bytes], coded[2 * first : 2 * last]
            rows, new_lengths = outlet.take([target.numel() for target in targets])
            new_lengths.copy_(lengths[first:last].view(torch.uint8))
            check_faults(
                [encode_block(block, codebook, lengths[first:last], no_bases, row_bytes, 0, rows, no_overflow)]
            )
            outlet.put(targets, (rows, new_lengths))
            bar.update(last - first)
