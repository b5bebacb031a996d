"""Decodes whole tensors, and ranges of their items: `decompress` and `decode_items`.

Stored bytes in pinned host memory come to a GPU on one of two paths. If there are few, one kernel fetches and decodes
them. If there are many, the copy engine brings them in chunks through a ring of buffers, and each chunk is decoded
while the next ones are copied (`TensorStream`, which `ibp.offload` uses, too). Several tables share one such stream.
Tables that lie in the memory of the GPU that decodes them are decoded together, in few launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, ValuesView
from typing import Any, NamedTuple, overload

import torch

from .. import _core
from .._common.arguments import sms_of
from .._common.modes import outside_of_modes
from .._machine import calibration, memory
from .._machine.calibration import FEW_SMS
from .._machine.memory import is_capturing
from .._rows.codebook import coder_rates
from .._rows.geometry import bytes_of
from .._rows.handle import ENTRIES, Handle, new_record, spread_bytes
from .._rows.table import Table, faults_of, handle_on, worker_of
from .calls import IN_ORDER, Decodable, check_out, check_path, check_table, target_of

# Least number of SMs that decode a stream of tables. On one H200, 32 SMs keep up with the link for every dtype (FP8
# needs 32, BF16 needs 8). If the computations of a model take as long as its weights take to arrive, decoding makes the
# model slower by 1 % with 32 SMs, and by 4 % with 8. The reason: if a decoder starts in a gap between two kernels of
# the model, the next kernel waits for the decoder, which takes longer if it has fewer SMs.
STREAM_SMS = 32
# Size in bytes of the ring of staging buffers on the GPU. The ring is kept for the next request on the same stream.
_RING_BYTES = 32 << 20
_decode_bytes = torch.ops.ibp.decode_bytes.default
PATHS = ("copy", "gpu")
# A stream gets 1.75 times the number of SMs that decode at the rate of the copy engine. Fewer SMs would not keep up,
# because the decoding of a chunk begins some time after its copy, and the blocks of the decoder end at different times.
_SPARE_SMS = 1.75


@overload
def decompress(
    table: Table | Decodable,
    *,
    device: torch.device | str | int | None = None,
    out: torch.Tensor | None = None,
    check: bool = False,
    max_sms: int | None = None,
    path: str | None = None,
) -> torch.Tensor: ...
@overload
def decompress(
    table: Iterable[Table | Decodable],
    *,
    device: torch.device | str | int | None = None,
    out: Iterable[torch.Tensor | None] | None = None,
    check: bool = False,
    max_sms: int | None = None,
    path: str | None = None,
) -> list[torch.Tensor]: ...
def decompress(
    table: Any,
    *,
    device: torch.device | str | int | None = None,
    out: Any = None,
    check: bool = False,
    max_sms: int | None = None,
    path: str | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Returns the tensor that a table was made from.

    If the table is in pinned host memory and the result goes to a GPU, the copy engine moves the stored bytes into a
    ring of staging buffers of 32 MiB. Meanwhile the GPU decodes the bytes there, on separate streams, and the current
    stream waits for these streams. Less than 64 MiB of stored bytes (at the rates of an H200, see `ibp.calibration`)
    are fetched by one kernel instead. If out is on the GPU, and the table is pinned or on that GPU, the call does not
    synchronise. It can then be captured in a CUDA graph after one call outside the graph, and the graph keeps the ring.
    Inside torch.compile, the call also works only after one call outside, and a kernel always fetches the bytes.

    If several tables in pinned host memory go to one GPU, they come as one stream through one ring. The copies for one
    tensor run while the previous tensor is still being decoded, so the link is busy from the first tensor to the last,
    however small they are. Tables in the memory of the GPU that decodes them share launches. In each group of 32
    tables, one launch decodes all tables that have the same scheme, the same element size and similar row lengths of at
    most 2 KiB. All arguments are checked before anything is written.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> table = ibp.compress(x)
        >>> torch.equal(ibp.decompress(table), x)
        True
        >>> [y.shape for y in ibp.decompress([table, table])]
        [torch.Size([1000, 1024]), torch.Size([1000, 1024])]

    Args:
        table: a table made from a tensor x; or another object with a method `decompress`, such as an
            `ibp.codecs.WholeTensor` or an `ibp.RowCache`; or several of these, as a list, a tuple or an iterator.
        device: the device of the result. None: the device of out or, without out, that of the table.
        out: tensor of the shape and dtype of x, with any strides, to which the result is written. For several tables: a
            list with a tensor or None for each table.
        check: whether to wait for the result and raise faults at once, as in `index_select`.
        max_sms: the largest number of the GPU's multiprocessors to keep busy. None: all, except on path "copy", which
            uses only the number that keeps up with the link (32, or more if decoding is slow), so that other work can
            use the rest. If other kernels keep all multiprocessors busy, give a number, such as 16: it selects path
            "gpu" (see `path`).
        path: how rows come from pinned host memory to a GPU. Both paths give the same bits. None chooses "gpu" if
            max_sms is given, and otherwise chooses by the size.
            "copy": the copy engine moves the rows into the ring. This is the fastest path if the GPU has free
                multiprocessors. If other kernels keep all of them busy, every chunk has to wait until some are free.
            "gpu": one kernel fetches the rows, and keeps its multiprocessors until it is done.

    Returns:
        Tensor of the shape and dtype of x; out if it was given. For several tables: a list of tensors, one for each
        table.

    Raises:
        TypeError, ValueError: out has a wrong shape, dtype or device, `path` cannot be taken, or the number of outs is
            not the number of tables.
        CorruptTableError: the table's bytes are inconsistent. Faults on a GPU are raised as in `index_select`.
    """
    if isinstance(table, Table):
        return decode_items(table, 0, None, device, out, check, max_sms, path)
    if isinstance(table, (list, tuple, Iterator, ValuesView)):
        tables = list(table)
        outs = [None] * len(tables) if out is None else list(out)
        if len(outs) != len(tables):
            raise ValueError(f"out has {len(outs)} tensors; wanted {len(tables)}, one a table")
        pairs = list(zip(tables, outs))
        itself = [not isinstance(table, Table) and isinstance(table, Decodable) for table in tables]
        jobs = [_DecodeJob.of(table, device, to) for (table, to), alone in zip(pairs, itself) if not alone]
        decoded = iter(_decode_many(jobs, check, max_sms, path))
        return [
            _decode_itself(table, device, to, check, max_sms, path) if alone else next(decoded)
            for (table, to), alone in zip(pairs, itself)
        ]
    if isinstance(table, Decodable):
        return _decode_itself(table, device, out, check, max_sms, path)
    return decode_items(table, 0, None, device, out, check, max_sms, path)


def _decode_itself(
    source: Any,
    device: torch.device | str | int | None,
    out: torch.Tensor | None,
    check: bool,
    max_sms: int | None,
    path: str | None,
) -> torch.Tensor:
    """Returns the tensor of an object that is not a table. Calls the object's own method `decompress`."""
    if max_sms is not None or path is not None:
        raise ValueError(f"max_sms and path are for tables; an ibp.{type(source).__name__} has neither")
    result = source.decompress(device=device, out=out)
    if check and result.is_cuda:
        torch.cuda.current_stream(result.device).synchronize()
    return result


def decode_items(
    table: Table,
    first_item: int,
    last_item: int | None,
    device: torch.device | str | int | None = None,
    out: torch.Tensor | None = None,
    check: bool = False,
    max_sms: int | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """Decodes the items first_item to last_item - 1 of a table, in order. If last_item is None, decodes the whole table
    and returns it in its own shape. The other arguments are those of `decompress`."""
    if not isinstance(table, Table):
        check_table(table)
    is_compiling = torch.compiler.is_compiling()
    sms = 0 if max_sms is None else sms_of(max_sms)
    shape = table.shape if last_item is None else (last_item - first_item, *table.geometry.item_shape)
    start = first_item * table.geometry.item_bytes
    end = (table.geometry.num_items if last_item is None else last_item) * table.geometry.item_bytes
    if device is None and (out is None or type(out) is torch.Tensor):
        target = table.slots.device if out is None else out.device
    else:
        target = target_of(device, out, table.slots.device)
    if out is not None:
        check_out(out, shape, table.dtype)
    handles, worker = table._handles, target
    handle = handles.get(target)
    if handle is None:
        target = memory.canonical(target)
        worker = worker_of(table, target)
        handle = handles.get(worker) or handle_on(table, worker)
    elif handle.machine is not None and not is_compiling and handle.machine is not calibration.in_force(target):
        handle = handle_on(table, target)
    crosses = end > start and worker != table.slots.device
    if path is not None:
        check_path(path, PATHS)
        if end > start:
            _refuse(path, table, crosses, target)
    if not is_compiling and (handle.noted[0] or handle.noted[ENTRIES]):
        handle.faults.raise_pending(worker)
    if crosses and _copies(worker, _stored_bytes(table, end - start), sms, path):
        stream = TensorStream(worker, 1)
        try:
            result = _decode(table, handle, shape, start, end, target, worker, out, sms, stream)
        finally:
            stream.close()
    else:
        result = _decode(table, handle, shape, start, end, target, worker, out, sms, None)
    if check and worker.type == "cuda":
        handle.faults.raise_when_done(worker)
    return result


def _decode(
    table: Table,
    handle: Handle,
    shape: Sequence[int],
    start: int,
    end: int,
    target: torch.device,
    worker: torch.device,
    out: torch.Tensor | None,
    sms: int,
    stream: TensorStream | None,
) -> torch.Tensor:
    """Decodes bytes [start, end) of a table's tensor on the worker device. Returns them as a tensor of the given shape
    on the target device, or writes them to out.

    Args:
        handle: the table's handle for the worker.
        stream: the stream through which the copy engine brings the stored bytes. None: the worker reads them where they
            are.
    """
    is_compiling, on_cpu = torch.compiler.is_compiling(), worker.type == "cpu"
    fault = new_record() if on_cpu and not is_compiling else handle.parts.fault
    assert fault is not None
    is_direct = out is not None and target == worker and out.is_contiguous()
    is_spread = out is not None and target == worker and not on_cpu and stream is None and not is_direct
    is_whole = end - start == table.geometry.num_bytes
    is_spread = is_spread and is_whole and table.geometry.item_bytes % table.row_bytes == 0
    result = out if is_direct or is_spread else memory.empty_tensor(shape, table.dtype, worker)
    assert result is not None
    if stream is not None:
        stream.decode(table, start, end, worker, sms, result, fault)
    elif is_spread:
        torch.ops.ibp.take.out(handle.table, None, result, sms, IN_ORDER)
    else:
        _decode_bytes(handle.table, start, end, sms, result, fault)
    if on_cpu and not is_compiling:
        handle.faults.raise_for(fault)
    if out is not None and result is not out:
        return out.copy_(result.view(out.shape))
    return result if worker == target else result.to(target)


def _stored_bytes(table: Table, num_bytes: int) -> int:
    """Returns the approximate size in bytes of the slots and overflow that hold num_bytes bytes of a table's tensor."""
    return (table.slots.numel() + table.overflow.numel()) * num_bytes // max(1, table.geometry.num_bytes)


# ---- paths ----


def _copies(worker: torch.device, stored_bytes: int, sms: int, path: str | None) -> bool:
    """Returns True if the copy engine should bring rows over the link, and False if a kernel should fetch them.

    If the caller limits the number of SMs and names no path, a kernel fetches the rows: the caller probably has other
    kernels that keep SMs busy for long, and every chunk of a stream would have to wait for free SMs."""
    if path is not None or sms or torch.compiler.is_compiling():
        return path == "copy"
    return stored_bytes >= calibration.in_force(worker).least_streamed_bytes


def _refuse(path: str, table: Table, crosses: bool, target: torch.device) -> None:
    """Raises ValueError if a path cannot be taken. crosses: whether the rows come from pinned host memory to a GPU."""
    if path == "copy" and torch.compiler.is_compiling():
        reason = "it cannot be compiled: its ring is not torch's"
    elif not crosses:
        reason = "it goes from pinned host memory to a GPU"
    else:
        return
    raise ValueError(
        f"path {path!r} cannot be taken: {reason}, but the table is {table!r} and the result goes to {target}"
    )


# ---- several tables ----


class _DecodeJob(NamedTuple):
    """A table to decode on the worker device. The result goes to `out` or, if it is None, to a new tensor on the target
    device."""

    table: Table
    out: torch.Tensor | None
    target: torch.device
    worker: torch.device

    @classmethod
    def of(cls, table: Any, device: torch.device | str | int | None, out: torch.Tensor | None) -> _DecodeJob:
        check_table(table)
        if out is not None:
            check_out(out, table.shape, table.dtype)
        target = target_of(device, out, table.device)
        return cls(table, out, target, worker_of(table, target))

    @property
    def crosses(self) -> bool:
        """Whether the stored bytes have to cross the link."""
        return self.worker != self.table.device and self.table.original_bytes > 0

    @property
    def is_plain(self) -> bool:
        """Whether a GPU decodes the table directly to a contiguous result in its memory. False for an empty table and
        for a table without dimensions."""
        if self.worker.type != "cuda" or self.worker != self.target or not self.table.original_bytes:
            return False
        is_direct = self.out is None or (self.out.shape == self.table.shape and self.out.is_contiguous())
        return bool(self.table.shape) and is_direct


def _decode_many(jobs: list[_DecodeJob], check: bool, max_sms: int | None, path: str | None) -> list[torch.Tensor]:
    """Decodes all jobs and returns their results. Tables that the copy engine brings to one GPU share a stream.

    If a GPU decodes a table and the result goes to the CPU, the host waits for this result before it queues the work of
    the next job. If check is set, the host also waits for all GPUs, after the work of all jobs is queued."""
    sms = sms_of(max_sms)
    if path is not None:
        check_path(path, PATHS)
        for job in jobs:
            if job.table.original_bytes:
                _refuse(path, job.table, job.crosses, job.target)
    for job in jobs:  # These calls may wait, so they come before the streams begin and do not delay them.
        handle = handle_on(job.table, job.worker)
        if not torch.compiler.is_compiling():
            handle.faults.raise_pending(job.worker)
    crossing: dict[torch.device, list[_DecodeJob]] = {}
    for job in jobs:
        if job.crosses:
            crossing.setdefault(job.worker, []).append(job)
    streams: dict[torch.device, TensorStream] = {}
    try:
        for worker, group in crossing.items():
            if _copies(worker, sum(spread_bytes(job.table) for job in group), sms, path):
                streams[worker] = TensorStream(worker, len(group))
        by_job = [streams.get(job.worker) if job.crosses else None for job in jobs]
        done = {} if torch.compiler.is_compiling() else _decode_together(jobs, by_job, sms)
        for number, ((table, out, target, worker), stream) in enumerate(zip(jobs, by_job)):
            if number not in done:
                handle, end = handle_on(table, worker), table.original_bytes
                done[number] = _decode(table, handle, table.shape, 0, end, target, worker, out, sms, stream)
    finally:
        for stream in streams.values():
            stream.close()
    for job in jobs:
        if check and job.worker.type == "cuda":
            faults_of(job.table).raise_when_done(job.worker)
    return [done[number] for number in range(len(jobs))]


def _decode_together(
    jobs: list[_DecodeJob], streams: Sequence[TensorStream | None], sms: int
) -> dict[int, torch.Tensor]:
    """Decodes jobs that have no stream and whose results are contiguous on a GPU, if that GPU has at least two such
    jobs. Tables that the same kernel decodes share launches. Returns a dictionary from the position of a job to its
    result. The caller must do all jobs that are not in the dictionary."""
    groups: dict[torch.device, list[int]] = {}
    for number, (job, stream) in enumerate(zip(jobs, streams)):
        if stream is None and job.is_plain:
            groups.setdefault(job.worker, []).append(number)
    results: dict[int, torch.Tensor] = {}
    for worker, numbers in groups.items():
        if len(numbers) < 2:
            continue
        some = [jobs[number] for number in numbers]
        outs = [
            memory.empty_tensor(job.table.shape, job.table.dtype, worker) if job.out is None else job.out
            for job in some
        ]
        try:
            torch.ops.ibp.decode_many.default([handle_on(job.table, worker).table for job in some], sms, outs)
        except RuntimeError:  # Two results share memory. The caller decodes these tables one after the other.
            continue
        results.update(zip(numbers, outs))
    return results


# ---- streams ----


def sms_at_link_rate(table: Table, device: torch.device, num_bytes: int, stored_bytes: int) -> int:
    """Returns the number of SMs with which a device decodes stored bytes faster than the copy engine brings them. It is
    _SPARE_SMS times the number that decodes at the rate of the copy engine.

    Args:
        num_bytes: size in bytes of the part of the tensor that is decoded.
        stored_bytes: size in bytes of the coded form of that part.
    """
    machine = calibration.in_force(device)
    rates = machine.pairs if table.codebook is None else coder_rates(table.codebook, machine)
    brought_gbps = machine.copy_in_gbps * num_bytes / max(1, stored_bytes)
    return math.ceil(_SPARE_SMS * FEW_SMS * brought_gbps / rates.few_decode_gbps)


def streamed_sms(table: Table, device: torch.device, num_bytes: int, stored_bytes: int) -> int:
    """Returns the number of SMs that decode a stream if the caller does not limit it. The arguments are those of
    `sms_at_link_rate`."""
    return max(STREAM_SMS, sms_at_link_rate(table, device, num_bytes, stored_bytes))


# Streamers that are not in use, each with its ring, or with None if it has no ring. The key is (device, stream, True if
# a CUDA graph was being captured), because a ring must be used only on its own stream, and the ring of a captured
# stream belongs to the graph.
_idle_streamers: dict[tuple[int, int, bool], list[tuple[_core.Streamer, torch.Tensor | None]]] = {}


class TensorStream:
    """A stream of tables from pinned host memory to one GPU, one after the other, through a ring of staging buffers.

    While a table is decoded, the copy engine already copies the next table, whatever the current stream is waiting for.
    A ring of the usual size is kept for the next `TensorStream` on the same stream, so the copies for its first table
    also begin while the last table of this one is decoded.

    Args:
        device: the GPU. Its current stream waits for every table, and the ring's memory is allocated on this stream.
        num_tables: the number of tables. If it is given, the last table ends in small chunks, so that its decoding ends
            sooner. None: the number is not known.
        ring_bytes: size in bytes of the ring, which holds four chunks. None: 32 MiB. The size is also an attribute.
            With a larger ring the copy engine pauses less often, and the host issues fewer calls.
    """

    def __init__(self, device: torch.device, num_tables: int | None = None, ring_bytes: int | None = None) -> None:
        self._num_tables, self._num_done = num_tables, 0
        self.ring_bytes = _RING_BYTES if ring_bytes is None else ring_bytes
        is_captured, stream = is_capturing(device), torch.cuda.current_stream(device).cuda_stream
        self._keeps_ring, self._failed = not is_captured and ring_bytes is None, False
        self._idle = _idle_streamers.setdefault((device.index, stream, is_captured), [])
        with torch.cuda.device(device):  # A streamer makes its streams and events on the current device.
            try:
                self._streamer, ring = self._idle.pop()
            except IndexError:
                self._streamer, ring = _core.Streamer(), None
            self._continues = ring is not None and self._keeps_ring and ring.numel() == self.ring_bytes
            if self._continues:
                self._streamer.continue_stream()
        if ring is None or not self._continues:
            with outside_of_modes():
                ring = torch.empty(self.ring_bytes, dtype=torch.uint8, device=device)
        self._ring = ring

    def decode(
        self, table: Table, start: int, end: int, worker: torch.device, sms: int, out: torch.Tensor, fault: torch.Tensor
    ) -> None:
        """Queues the decoding of bytes [start, end) of a table's tensor.

        Args:
            worker: the GPU of the stream.
            sms: the largest number of SMs that decode. 0: the number that keeps up with the link.
            out: receives the bytes; contiguous, on the worker.
            fault: the fault record to write to.
        """
        self.issue(self.prepare(table, start, end, worker, sms, out, fault))

    def prepare(
        self, table: Table, start: int, end: int, worker: torch.device, sms: int, out: torch.Tensor, fault: torch.Tensor
    ) -> tuple[Any, ...]:
        """Returns the argument for `issue`. The caller may pass it to `issue` several times, to decode the same bytes
        to the same memory again. The arguments are those of `decode`."""
        stored_bytes = _stored_bytes(table, end - start)
        return (
            (handle_on(table, worker).table, table.bases, start, end, self._streamer.address),
            (sms or streamed_sms(table, worker, end - start, stored_bytes), self._ring, bytes_of(out), fault),
        )

    def issue(self, prepared: tuple[Any, ...]) -> None:
        """Queues a decoding. prepared: the result of `prepare`."""
        self._num_done += 1
        begins = self._num_done == 1 and not self._continues
        ends, self._failed = self._num_done == self._num_tables, True
        torch.ops.ibp.stream_bytes.default(*prepared[0], begins, ends, *prepared[1])
        self._failed = False

    def close(self) -> None:
        """Keeps the streamer and the ring for the next `TensorStream`, unless work has failed."""
        if not self._failed:  # After a failure it is not known which bytes are still on their way through the ring.
            has_begun = self._num_done > 0 or self._continues
            self._idle.append((self._streamer, self._ring if self._keeps_ring and has_begun else None))
