"""Whole tensors: `decompress` and `decompress_many`."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from .. import _core
from .._rows import bytes_of
from .._table import CompressedTensor
from .calls import check_out, check_path_name, check_table, produce, sms_of, target_of, worker_of

PATHS = ("copy", "gpu")  # from pinned host memory to a GPU

_RING_BYTES = 32 << 20  # staging buffers on the GPU, taken from torch's allocator for the time of a call
_LEAST_STREAMED_BYTES = 64 << 20  # stored; of less the kernel, which starts at once, fetches a tensor sooner than the faster copy engine
_SMS_AT_LINK_RATE = 5  # times original over stored bytes: they decode faster than the copy engine brings the rows


def decompress(table: CompressedTensor, *, device: torch.device | str | int | None = None, out: torch.Tensor | None = None,
               check: bool = False, max_sms: int | None = None, path: str | None = None) -> torch.Tensor:
    """The whole tensor again.

    From pinned host memory to a GPU the stored bytes are moved by the copy engine into a ring of staging buffers of 32 MiB, and decoded there
    meanwhile, on streams beside the current one, which waits for them; less than 64 MiB is fetched by a kernel itself. With
    out on the GPU and the table pinned or on that GPU, the call does not synchronise and can be captured in a CUDA graph (after
    one call outside it), which then keeps the ring. Several tensors are fetched faster by `decompress_many`.

    Args:
        table: a table made from a tensor x.
        device: where the result goes; None: out's device, else the table's.
        out: contiguous tensor of x's shape and dtype to write to.
        check: as in `index_select`.
        max_sms: keep at most this many of the GPU's multiprocessors busy; None: all, but for path "copy" no more than keep up with
            the link (8 where a third is saved).
        path: how rows come from pinned host memory to a GPU; None chooses by the size. All give the same bits.
            "copy": the copy engine moves them into the ring. The fastest on a GPU that has multiprocessors free; chunks wait for some, though, one
            after the other, while kernels that keep all of them busy run beside.
            "gpu": one kernel fetches them itself, and keeps the multiprocessors that it has once been given: beside such kernels take this.

    Returns:
        Tensor of x's shape and dtype; out if it was given.

    Raises:
        TypeError, ValueError: out does not fit, or `path` cannot be taken.
        CorruptTableError: the table's bytes contradict each other; from a GPU as `index_select` reports faults.
    """
    return _decode([_Job.of(table, 0, None, device, out)], check, max_sms, path)[0]


def decompress_many(tables, *, device: torch.device | str | int | None = None, out=None, check: bool = False,
                    max_sms: int | None = None, path: str | None = None) -> list[torch.Tensor]:
    """Several whole tensors, in order: those in pinned host memory that go to one GPU as one stream through one ring.

    The copies for one tensor run while the one before is still being decoded, so that the link is busy from the first tensor to the last,
    however small they are. Tables of other places are decompressed as `decompress` does it.

    Args:
        tables: the tables.
        device: where the results go; None: of each its out's device, else its table's.
        out: a tensor, as `decompress` takes it, or None for each table; None: all new.
        check, max_sms, path: as in `decompress`.

    Returns:
        List of tensors, one a table.

    Raises:
        As `decompress`; ValueError also if there are not as many outs as tables. Arguments are checked before anything is written.
    """
    tables = list(tables)
    outs = [None] * len(tables) if out is None else list(out)
    if len(outs) != len(tables):
        raise ValueError(f"out has {len(outs)} tensors; wanted {len(tables)}, one a table")
    return _decode([_Job.of(table, 0, None, device, to) for table, to in zip(tables, outs)], check, max_sms, path)


def decode_items(table, first_item, last_item, device, out, check, max_sms):
    """Items first_item to last_item - 1 in order; all of the tensor, in its own shape, if last_item is None."""
    return _decode([_Job.of(table, first_item, last_item, device, out)], check, max_sms)[0]


class _Job(NamedTuple):
    """Bytes [start, end) of a table's tensor, decoded on the worker device and brought to the target."""

    table: CompressedTensor
    shape: tuple
    start: int
    end: int
    out: torch.Tensor | None
    target: torch.device
    worker: torch.device

    @classmethod
    def of(cls, table, first_item, last_item, device, out):
        check_table(table)
        if out is not None:
            check_out(out, _shape(table, first_item, last_item), table.dtype)
        geometry = table._geometry
        start, end = first_item * geometry.item_bytes, (geometry.num_items if last_item is None else last_item) * geometry.item_bytes
        target = target_of(device, out, table.device)
        return cls(table, _shape(table, first_item, last_item), start, end, out, target, worker_of(table, target))

    @property
    def comes_over_the_link(self):
        return self.worker != self.table.device and self.end > self.start

    @property
    def stored_bytes(self):
        """Bytes of slots and overflow that hold the job's rows, about."""
        held = self.table.slots.numel() + self.table.overflow.numel()
        return held * (self.end - self.start) // self.table.original_bytes


def _shape(table, first_item, last_item):
    return table.shape if last_item is None else (last_item - first_item, *table.shape[1:])


def _check_path(path, jobs):
    """Raises ValueError unless all jobs can take the path."""
    if path is None:
        return
    check_path_name(path, PATHS)
    for job in jobs:
        if not job.comes_over_the_link and job.end > job.start:
            raise ValueError(f"path {path!r} goes from pinned host memory to a GPU, but the table is {job.table!r} and the result goes to {job.target}")


def _decode(jobs, check, max_sms, path=None):
    """The results of all jobs, queued without waiting for any of them but where a result goes to the CPU."""
    sms = sms_of(max_sms)
    _check_path(path, jobs)
    on_gpus = [job for job in jobs if job.worker.type == "cuda"]
    for job in on_gpus:  # what waits comes first, so that it does not hold up a stream
        job.table._raise_pending(job.worker)
        job.table._arguments(job.worker)
    with contextlib.ExitStack() as stack:
        streams = {}
        for worker in {job.worker for job in on_gpus}:
            streamed = [job for job in on_gpus if job.worker == worker and job.comes_over_the_link]
            least = _LEAST_STREAMED_BYTES if path is None else 0
            if path != "gpu" and streamed and sum(job.stored_bytes for job in streamed) >= least:
                streams[worker] = stack.enter_context(_borrow_stream(worker, len(streamed)))
        results = [_run(job, streams.get(job.worker), sms) for job in jobs]
    if check:
        for job in on_gpus:
            torch.cuda.current_stream(job.worker).synchronize()
            job.table._raise_pending(job.worker)
    return results


def _run(job, stream, sms):
    def run(result, fault):
        arguments = job.table._arguments(job.worker)
        if stream is not None and job.comes_over_the_link:
            stream.decode(job, arguments, sms, bytes_of(result), fault)
        else:
            torch.ops.ibp.decode_bytes(*arguments, job.start, job.end, sms, result, fault)

    return produce(job.table, job.shape, job.target, job.worker, job.out, False, run)


def sms_at_link_rate(num_bytes, stored_bytes):
    """SMs that decode num_bytes faster than the copy engine brings the stored bytes."""
    return -(-_SMS_AT_LINK_RATE * num_bytes // max(1, stored_bytes))


class _Stream:
    """The streamed jobs of one call on one GPU: the ring they go through, which nobody else uses before the current stream is done with it."""

    def __init__(self, device, streamer, num_jobs):
        self.streamer, self.num_jobs, self.num_done = streamer, num_jobs, 0
        self.ring = torch.empty(_RING_BYTES, dtype=torch.uint8, device=device)

    def decode(self, job, arguments, sms, data, fault):
        sms = sms or sms_at_link_rate(job.end - job.start, job.stored_bytes)
        self.num_done += 1
        torch.ops.ibp.stream_bytes(*arguments, job.table.bases, job.start, job.end, self.streamer.address, self.num_done == 1,
                                   self.num_done == self.num_jobs, sms, self.ring, data, fault)


_idle_streamers: dict[tuple[int, int], list] = {}  # by device and stream: captures of one stream must not reach another's work


@contextlib.contextmanager
def _borrow_stream(device, num_jobs):
    idle = _idle_streamers.setdefault((device.index, torch.cuda.current_stream(device).cuda_stream), [])
    try:
        streamer = idle.pop()
    except IndexError:
        with torch.cuda.device(device):
            streamer = _core.Streamer()
    try:
        yield _Stream(device, streamer, num_jobs)
    finally:
        idle.append(streamer)
