"""Decodes and reduces bags of a table's rows: `embedding_bag`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from .._common.arguments import sms_of
from .._rows.handle import Handle
from .._rows.planes import PlanesCodebook
from .._rows.table import Table, faults_of, handle_on, worker_of
from .calls import CachedRows, Rows, check_out, check_range, checked_ids, list_of_ids, target_of

MODES = ("sum", "mean", "max")  # The operation receives the position of the mode in this tuple.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_KINDS = _DTYPES[:3]  # The dtypes that the kernel sums. The position of a dtype is its ibp_float_kind.
_MOST_ROW_BYTES = 8192  # The kernel sums rows of at most this many bytes.
# Coded rows of at most 128 bytes in device memory are gathered and then reduced by torch's function, because this is
# faster for bags of several rows. With rows of 128 bytes in bags of 10 and of 50 rows, the kernel sums 167 and 177 GB/s
# of BF16, and 299 and 354 GB/s of FP32. Torch's function, over gathered rows, sums 206 and 225 GB/s of BF16, and 397
# and 426 GB/s of FP32. Bags of one row are slower with torch's function: 103 instead of 167 GB/s (benchmarks/bags.py,
# on an H200).
_SHORT_ROW_BYTES = 128


class Bags(NamedTuple):
    """The checked arguments of a call to `embedding_bag`."""

    ids: torch.Tensor  # int32 or int64 [K], contiguous.
    offsets: torch.Tensor | None  # The position of each bag's first id. None: every bag has bag_size ids.
    num_bags: int
    bag_size: int
    mode: str
    weights: torch.Tensor | None  # [K], of the source's dtype. None: rows are not weighted.
    padding_idx: int | None  # An id in [0, N) that is ignored. None: no id is ignored.

    def to(self, device: torch.device) -> Bags:
        offsets = None if self.offsets is None else self.offsets.to(device)
        weights = None if self.weights is None else self.weights.to(device)
        return self._replace(ids=self.ids.to(device), offsets=offsets, weights=weights)


def embedding_bag(
    source: Rows,
    ids: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    mode: str = "mean",
    per_sample_weights: torch.Tensor | None = None,
    padding_idx: int | None = None,
    include_last_offset: bool = False,
    device: torch.device | str | int | None = None,
    out: torch.Tensor | None = None,
    check: bool = False,
    max_sms: int | None = None,
) -> torch.Tensor:
    """Returns the sums, means or maxima of bags of a table's rows. The result has the same bits as that of
    torch.nn.functional.embedding_bag(ids, x, offsets, ...) on the same device, where x is the tensor that was
    compressed.

    Bad ids are handled as in `ibp.index_select`. On the CPU they raise IndexError at once. On a GPU their rows count as
    zeros, and the error is raised by the next call on the table, by `table.check()`, or by this call if check=True.

    Example:
        >>> x, ids = torch.randn(1000, 1024), torch.tensor([[1, 2, 3], [4, 5, 5]])
        >>> bags = ibp.embedding_bag(ibp.compress(x), ids, mode="sum")
        >>> torch.equal(bags, torch.nn.functional.embedding_bag(ids, x, mode="sum"))
        True

    Args:
        source: a table [N, D] of float32, float16, bfloat16 or float64, or an `ibp.RowCache` over such a table.
        ids: int32 or int64 [K], or [B, L]: B bags of L ids each.
        offsets: integers [B] for ids [K]: the position in ids of each bag's first id, in ascending order, beginning
            with 0. If two consecutive offsets are equal, the first of the two bags has no ids, and its result is zeros.
            None: ids is [B, L].
        mode: "sum", "mean" or "max".
        per_sample_weights: tensor of the shape of ids and the dtype of the table. Each row is multiplied by its weight.
            Only mode "sum" supports weights. The result is differentiable with respect to them.
        padding_idx: an id that is ignored in every bag. A negative id counts from the end. None: no id is ignored.
        include_last_offset: whether offsets has one more element at the end, which is K.
        device: the device of the result. None: the device of out or, without out, that of the ids.
        out: tensor [B, D] of the table's dtype, to which the result is written.
        check: whether to wait for the result and raise faults in this call.
        max_sms: the largest number of the GPU's multiprocessors to keep busy. None: all.

    Returns:
        Tensor [B, D]; out if it was given.

    Raises:
        TypeError: source is not a table, or a tensor has a wrong dtype.
        ValueError: a shape, mode, offset or padding_idx is invalid.
        NotImplementedError: per_sample_weights are given for a mode other than "sum".
        IndexError: an id is out of range.
        CorruptTableError: the table's bytes are inconsistent.
    """
    if not hasattr(source, "index_select") or not hasattr(source, "dtype") or isinstance(source, torch.Tensor):
        raise TypeError(f"source is a {type(source).__name__}; wanted an ibp.CompressedTensor or an ibp.RowCache")
    if len(source.shape) != 2:
        raise ValueError(f"the table has shape {list(source.shape)}; wanted two dimensions")
    if source.dtype not in _DTYPES:
        raise TypeError(f"the table has dtype {source.dtype}; wanted one of {', '.join(map(str, _DTYPES))}")
    bags = _asked(source, ids, offsets, mode, per_sample_weights, padding_idx, include_last_offset)
    target = target_of(device, out, bags.ids.device)
    if not bags.ids.is_cuda and not torch.compiler.is_compiling():
        check_range(bags.ids, source.shape[0])
        _check_offsets(bags)
    bags = bags.to(target)
    if out is not None:
        check_out(out, (bags.num_bags, source.shape[1]), source.dtype)
    if bags.ids.numel() == 0 or bags.num_bags == 0:
        result = torch.zeros(bags.num_bags, source.shape[1], dtype=source.dtype, device=target)
    elif isinstance(source, (Table, CachedRows)) and _is_fused(source, bags):
        return _sum_bags(source, bags, out, check, max_sms)
    else:
        result = _pool_gathered(source, bags, check, max_sms)
    return result if out is None else out.copy_(result)


# ---- arguments ----


def _asked(
    source: Rows,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    mode: str,
    weights: torch.Tensor | None,
    padding_idx: int | None,
    include_last_offset: bool,
) -> Bags:
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; wanted 'sum', 'mean' or 'max'")
    ids = checked_ids(ids)
    _check_weights(source, ids, mode, weights)
    if ids.dim() == 2:
        if offsets is not None:
            raise ValueError(f"ids has shape {list(ids.shape)}, a bag a row; wanted no offsets beside it")
        num_bags, bag_size = ids.shape
    elif ids.dim() == 1:
        offsets, num_bags, bag_size = *_checked_offsets(offsets, include_last_offset), 0
    else:
        raise ValueError(f"ids has shape {list(ids.shape)}; wanted one or two dimensions")
    weights = None if weights is None else weights.reshape(-1)
    padding_idx = checked_padding(padding_idx, source.shape[0])
    return Bags(ids.reshape(-1).contiguous(), offsets, num_bags, bag_size, mode, weights, padding_idx)


def _check_weights(source: Rows, ids: torch.Tensor, mode: str, weights: torch.Tensor | None) -> None:
    if weights is None:
        return
    if mode != "sum":
        raise NotImplementedError(f"per_sample_weights are for mode 'sum' only; mode is {mode!r}")
    if weights.shape != ids.shape:
        raise ValueError(f"per_sample_weights has shape {list(weights.shape)}; wanted that of ids, {list(ids.shape)}")
    if weights.dtype != source.dtype:
        raise TypeError(f"per_sample_weights has dtype {weights.dtype}; wanted the table's, {source.dtype}")


def _checked_offsets(offsets: torch.Tensor | np.ndarray | None, include_last_offset: bool) -> tuple[torch.Tensor, int]:
    """Checks offsets. Returns (contiguous offsets, number of bags)."""
    if offsets is None:
        raise ValueError("ids has one dimension: wanted offsets, which say where each bag begins in it")
    offsets = list_of_ids(offsets, "offsets")
    if include_last_offset and offsets.numel() == 0:
        raise ValueError("offsets is empty; wanted one element at least, with include_last_offset")
    return offsets.contiguous(), offsets.numel() - bool(include_last_offset)


def checked_padding(padding_idx: int | None, num_items: int) -> int | None:
    """Returns padding_idx as an id in [0, num_items), or None. Raises ValueError if there is no such item."""
    if padding_idx is None:
        return None
    if not -num_items <= padding_idx < num_items:
        raise ValueError(f"padding_idx is {padding_idx}; wanted -{num_items} to {num_items - 1}")
    return padding_idx + num_items if padding_idx < 0 else padding_idx


def _check_offsets(bags: Bags) -> None:
    """Raises ValueError unless offsets on the CPU begin with 0, never decrease, and are at most the number of ids."""
    offsets, num_ids = bags.offsets, bags.ids.numel()
    if offsets is None or offsets.is_cuda or offsets.numel() == 0:
        return
    if offsets[0] != 0:
        raise ValueError(f"offsets[0] is {int(offsets[0])}; wanted 0, where the first bag begins")
    if offsets[-1] > num_ids:
        raise ValueError(f"offsets[{offsets.numel() - 1}] is {int(offsets[-1])}; wanted at most {num_ids}, the ids")
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        position = int(falls.nonzero()[0]) + 1
        raise ValueError(
            f"offsets[{position}] is {int(offsets[position])}, less than the one before, {int(offsets[position - 1])}"
        )


# ---- rows decoded and reduced in one kernel ----


def _is_fused(source: Table | CachedRows, bags: Bags) -> bool:
    """Returns True if one kernel should decode and reduce these bags, and False if `_pool_gathered` should. The kernel
    must support the table, the device and the weights. It is not used where `_pool_gathered` is faster: for coded rows
    of at most _SHORT_ROW_BYTES bytes in device memory, and for so many ids that `index_select` would choose path
    "bucketed"."""
    table, device = _table_of(source), bags.ids.device
    is_near = table.device.type == "cuda" or isinstance(source, CachedRows)
    if is_near and table.codebook is not None and table.row_bytes <= _SHORT_ROW_BYTES:
        return False
    if device.type != "cuda" or not _sums_rows_of(table):
        return False
    if bags.weights is not None and bags.weights.requires_grad and torch.is_grad_enabled():
        return False
    if isinstance(source, CachedRows):
        is_served = source.serves(device)
    else:
        is_served = worker_of(table, device) == device
    return is_served and bags.ids.numel() < handle_on(table, device).plan.least_bucketed


def _table_of(source: Table | CachedRows) -> Table:
    return source.view if isinstance(source, CachedRows) else source


@contextmanager
def _found(
    source: Table | CachedRows, ids: torch.Tensor
) -> Iterator[tuple[Handle, torch.Tensor | None, Sequence[torch.Tensor]]]:
    """Yields (handle of the table, entries of the rows in a cache, slabs of the cache), as `CachedRows.found` does. If
    the source is a table, the entries are None and there are no slabs."""
    if isinstance(source, CachedRows):
        with source.found(ids) as found:
            yield found
    else:
        yield handle_on(source, ids.device), None, []


def _sums_rows_of(table: Table) -> bool:
    """Returns whether the kernel (ibp_cuda_sum_bags in ibp_linear.h) can decode and sum rows of a table."""
    if table.dtype not in _KINDS or table.geometry.item_bytes != table.row_bytes or table.row_bytes > _MOST_ROW_BYTES:
        return False
    if table.codebook is None:
        return True
    # The first number of a codec is that of the scheme; see `PlanesCodebook` for the others.
    codec = table.codebook.codec
    return codec[0] == PlanesCodebook.number and codec[2] in (2, 4) and not codec[6]


def _sum_bags(
    source: Table | CachedRows, bags: Bags, out: torch.Tensor | None, check: bool, max_sms: int | None
) -> torch.Tensor:
    """Computes `embedding_bag` with one kernel, on the GPU of the ids."""
    table, device = _table_of(source), bags.ids.device
    mode, kind, padding = MODES.index(bags.mode), _KINDS.index(table.dtype), bags.padding_idx
    weights = None if bags.weights is None else bags.weights.detach().contiguous()
    result = out
    if out is None or not out.is_contiguous():
        result = torch.empty((bags.num_bags, table.shape[1]), dtype=table.dtype, device=device)
    assert result is not None
    is_compiling, faults = torch.compiler.is_compiling(), faults_of(table)
    fault = faults.on(device)
    if not is_compiling:
        faults.raise_pending(device)
    with _found(source, bags.ids) as (handle, entries, slabs):
        torch.ops.ibp.sum_bags.default(
            handle.table,
            bags.ids,
            entries,
            list(slabs),
            bags.offsets,
            weights,
            mode,
            -1 if padding is None else padding,
            kind,
            sms_of(max_sms),
            result,
            fault,
        )
    if check and not is_compiling:
        faults.raise_when_done(device)
    return result if out is None or out is result else out.copy_(result)


# ---- rows gathered, then reduced by torch ----


def _pool_gathered(source: Rows, bags: Bags, check: bool, max_sms: int | None) -> torch.Tensor:
    """Computes `embedding_bag` with torch's own function, over gathered rows."""
    gather = _gather_all if bags.ids.is_cuda or torch.compiler.is_compiling() else _gather_unique
    rows, places, padding = gather(source, bags, check, max_sms)
    offsets, includes_last = bags.offsets, False
    if offsets is None:
        places = places.view(bags.num_bags, bags.bag_size)
    else:
        includes_last = offsets.numel() != bags.num_bags
        if offsets.is_cuda:  # torch's kernel does not check offsets on a GPU.
            offsets = offsets.clamp(0, bags.ids.numel()).cummax(0).values
    weights = None if bags.weights is None else bags.weights.view(places.shape)
    return F.embedding_bag(
        places,
        rows,
        offsets,
        mode=bags.mode,
        per_sample_weights=weights,
        padding_idx=padding,
        include_last_offset=includes_last,
    )


def _gather_unique(
    source: Rows, bags: Bags, check: bool, max_sms: int | None
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """Gathers each distinct row of the bags once. Returns (rows, for each id the position of its row in `rows`, the
    position of padding_idx's row in `rows` or None).

    If padding_idx is given, its row is gathered even if no id needs it: on the CPU, torch's function gives different
    bits with a padding_idx than without one, even if no id is padding."""
    ids = bags.ids
    if bags.padding_idx is not None:
        ids = torch.cat((ids, ids.new_tensor([bags.padding_idx])))
    unique, places = torch.unique(ids, return_inverse=True)
    rows = source.index_select(unique, check=check, max_sms=max_sms)
    places = places.to(ids.dtype)
    if bags.padding_idx is None:
        return rows, places, None
    return rows, places[:-1], int(places[-1])


def _gather_all(
    source: Rows, bags: Bags, check: bool, max_sms: int | None
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """Gathers a row for each id, without synchronising. Returns the same three values as `_gather_unique`. `rows` has
    an additional last row of zeros; ids that equal padding_idx get its position."""
    ids, num_ids = bags.ids, bags.ids.numel()
    rows = torch.empty(num_ids + 1, source.shape[1], dtype=source.dtype, device=ids.device)
    source.index_select(ids, out=rows[:num_ids], check=check, max_sms=max_sms)
    rows[num_ids].zero_()
    places = torch.arange(num_ids, dtype=ids.dtype, device=ids.device)
    if bags.padding_idx is None:
        return rows, places, None
    return rows, places.masked_fill_(ids == bags.padding_idx, num_ids), num_ids
