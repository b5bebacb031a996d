"""Measures how fast a machine moves and decodes data.

    calibration = ibp.calibration.calibrate()    # a few seconds, once for each GPU and driver
    print(calibration)

`ibp.compress` uses the rates to choose a scheme, and calls that fetch rows use them to choose a path to the GPU. Each
rate is measured with the calls whose speed it describes, on synthetic data: first the rates of the link and of device
memory, then those of tables beyond the reach of address translation, then those of the coders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from . import _core
from ._common import ops
from ._common.arguments import number
from ._common.process import published
from ._fetch import host_gather
from ._fetch.gather import index_select
from ._fetch.streaming import decompress
from ._machine import memory as _memory
from ._machine.calibration import (
    FEW_SMS,
    H200,
    LARGE_BYTES,
    LARGE_IDS,
    Calibration,
    Clock,
    CoderRates,
    free_host_bytes,
    in_force,
    keep,
)
from ._rows.codebook import AnyCodebook, work_of
from ._rows.geometry import Geometry
from ._rows.handle import spread_bytes
from ._rows.masks import Codebook
from ._rows.planes import PlanesCodebook
from ._tables.coded_rows import CodedRows, encode_into
from ._tables.compressed_tensor import CompressedTensor, compress_rows

__all__ = ["H200", "Calibration", "CoderRates", "calibrate"]


_NEAR_BYTES = 128 << 20  # Size in bytes of pinned memory for which address translation is fast on every GPU.
_STREAMED_BYTES = 32 << 20  # Size in bytes of the tensor with which stream_start_us is measured.
_ROW_BYTES, _SHORT_ROW_BYTES, _MEDIUM_ROW_BYTES, _SECTOR_BYTES = 2048, 128, 256, _core.SECTOR_BYTES
_ID_SETS = 16  # Number of different sets of random ids that repeated calls use in turn.
_BUCKETED_SMS = (8, 16, 32)  # The numbers of multiprocessors that are tried for bucketed_sms.
# A rate counts as lower than another if it is below _SMALLER times the other. A time counts as equal to the best time
# if it is at most _AS_FAST times as long.
_SMALLER, _AS_FAST = 0.8, 1.03
# The measured time of a short row is multiplied by this factor, because codebooks of a family differ in speed, and
# "auto" must not choose a codebook that is slower than raw rows.
_SPREAD = 1.08
# If fetching and decoding rows takes at most this many times as long as the link alone needs, the link is taken to be
# the bottleneck, not the decoder.
_LINK_BOUND = 1.1
_NUM_MEASUREMENTS = 60  # Approximate number of measurements, which share the time that the caller allows.
_CPU = torch.device("cpu")


def calibrate(
    device: torch.device | str | int | None = None, *, refresh: bool = False, seconds: float = 4.0
) -> Calibration:
    """Measures how fast this machine and one of its GPUs move and decode data. Takes a few seconds, and saves the
    result.

    From then on `ibp.compress` uses the result to choose a scheme, and calls that fetch rows use it to choose a path to
    the GPU. This holds for this process and for all later processes with the same GPU, driver and version of ibp. The
    result is saved in the folder `ibp` of the directory that XDG_CACHE_HOME names, or of `~/.cache`. ibp never measures
    unless `calibrate` is called; until then, it uses the rates of an H200.

    The GPU should be idle. Up to 2 GiB of host memory are pinned during the call, so a few GiB should be free.

    Example:
        >>> # needs a GPU
        >>> rates = ibp.calibration.calibrate(seconds=0.5)
        >>> rates.copy_in_gbps > 0
        True

    Args:
        device: a CUDA device. None: the current CUDA device.
        refresh: whether to measure even if there is already a calibration in memory or on disk.
        seconds: approximate time to measure, in seconds, 0.5 to 60. Pinning memory takes additional time.

    Returns:
        The calibration. Its repr shows the rates as a table.

    Raises:
        RuntimeError: there is no CUDA device, or this build of ibp has no CUDA kernels.
        TypeError, ValueError: device is not a CUDA device, or seconds is out of range.
    """
    seconds = number("seconds", seconds)
    if not 0.5 <= seconds <= 60:
        raise ValueError(f"seconds is {seconds}; wanted 0.5 to 60")
    if not ops.cuda_is_available():
        raise RuntimeError("calibrate measures a GPU: it needs a CUDA device and a build of ibp with CUDA")
    found = _memory.canonical("cuda" if device is None else device)
    if found.type != "cuda":
        raise ValueError(f"device is {str(device)!r}; wanted a CUDA device")
    known = H200 if refresh else in_force(found)
    if known is H200:  # there is no calibration yet, or the caller wants a new one
        known = measure(found, seconds)
        keep(found, known)
    return known


def measure(device: torch.device, seconds: float) -> Calibration:
    """Measures a CUDA device for about `seconds` seconds, on a new stream. Returns the calibration."""
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        clock = Clock(device, seconds / _NUM_MEASUREMENTS)
        rates = _of_link(clock) | _of_device(clock)
        known = replace(H200, gpu=torch.cuda.get_device_name(device), **rates)
        families = _families(clock)
        share, start_us = (take(clock, families["pairs"], known) for take in (_coded_read_share, _stream_start_us))
        known = replace(known, coded_read_share=share, stream_start_us=start_us)
        coders: dict[str, Any] = {name: _of_coder(clock, family, known) for name, family in families.items()}
        large = _of_large_table(clock)
    _memory.release_pinned()
    return replace(known, **coders, **large)


# ---- the link and device memory ----


def _of_link(clock: Clock) -> dict[str, Any]:
    host = _memory.empty(min(_NEAR_BYTES, clock.table_bytes), _CPU, pin=True)
    near = torch.empty_like(host, device=clock.device)
    rows = _raw_table(host, _ROW_BYTES)
    short = _raw_table(host, _SECTOR_BYTES)
    num_bytes = host.numel()
    return {
        "copy_in_gbps": num_bytes / clock.gpu_s(lambda: near.copy_(host, non_blocking=True)) / 1e9,
        "copy_out_gbps": num_bytes / clock.gpu_s(lambda: host.copy_(near, non_blocking=True)) / 1e9,
        "read_gbps": _ROW_BYTES / _row_ns(clock, rows),
        "few_read_gbps": _ROW_BYTES / _row_ns(clock, rows, max_sms=FEW_SMS),
        "least_row_ns": _row_ns(clock, short),
    }


def _stream_start_us(clock: Clock, family: _Family, known: Calibration) -> float:
    """Returns the fixed cost of the copy engine, in us. A whole table, whose slots and overflow take n bytes, is
    decompressed in the time C with the copy engine, and in the time K with a kernel that reads host memory. The result
    is max(1, C - K - (n / copy_in_gbps - n / read_gbps)), with all times in us."""
    table = family.table(_ROW_BYTES, min(_STREAMED_BYTES, clock.table_bytes), _CPU)
    out = torch.empty(table.shape, dtype=table.dtype, device=clock.device)

    def whole_ns(path: str) -> float:
        return 1e9 * clock.wall_s(lambda: decompress(table, out=out, path=path))

    by_rates_ns = spread_bytes(table) * (1 / known.read_gbps - 1 / known.copy_in_gbps)
    return max(1.0, (whole_ns("copy") - whole_ns("gpu") + by_rates_ns) / 1e3)


def _of_device(clock: Clock) -> dict[str, Any]:
    source = torch.empty(clock.table_bytes, dtype=torch.uint8, device=clock.device)
    target = torch.zeros_like(source)
    return {
        "device_copy_gbps": clock.table_bytes / clock.gpu_s(lambda: target.copy_(source)) / 1e9,
        "memset_gbps": clock.table_bytes / clock.gpu_s(target.zero_) / 1e9,
    }


def _raw_table(memory: torch.Tensor, row_bytes: int) -> CompressedTensor:
    """Returns a table of raw rows that uses the given memory, which is neither copied nor initialised."""
    rows = memory[: memory.numel() // row_bytes * row_bytes].view(-1, row_bytes)
    return CompressedTensor.of_parts(Geometry.of(rows, row_bytes), "raw", row_bytes, rows.view(-1))


def _row_ns(
    clock: Clock,
    table: CompressedTensor,
    *,
    num_ids: int = LARGE_IDS,
    in_order: bool = False,
    max_sms: int | None = None,
    path: str = "gpu",
) -> float:
    """Measures a gather of random rows. Returns the time per row, in ns. Successive calls gather different rows,
    because the address translations of earlier rows may still be cached.

    Args:
        num_ids: the largest number of rows per call.
        in_order: whether the rows of a call are in the order of their addresses.
        max_sms, path: as in `index_select`.
    """
    num_ids = min(num_ids, max(1, clock.table_bytes // table.row_bytes))
    sets = torch.randint(table.num_rows, (_ID_SETS, num_ids), device=clock.device)
    ids = itertools.cycle(sets.sort(1).values if in_order else sets)
    out = torch.empty(num_ids, *table.shape[1:], dtype=table.dtype, device=clock.device)
    return clock.gpu_s(lambda: index_select(table, next(ids), out=out, max_sms=max_sms, path=path)) * 1e9 / num_ids


# ---- tables beyond the reach of address translation ----


def _of_large_table(clock: Clock) -> dict[str, Any]:
    most_bytes = free_host_bytes() // 8
    large_bytes = max(2 * _NEAR_BYTES, min(LARGE_BYTES, most_bytes) // _ROW_BYTES * _ROW_BYTES)
    host = _memory.empty(large_bytes, _CPU, pin=True)
    reach_bytes = _reach_bytes(clock, host)
    sectors, rows = _raw_table(host, _SECTOR_BYTES), _raw_table(host, _SHORT_ROW_BYTES)
    return {
        "reach_bytes": reach_bytes,
        "random_row_ns": _row_ns(clock, sectors),
        "sorted_row_ns": _row_ns(clock, sectors, in_order=True),
        "bucketed_sms": _bucketed_sms(clock, rows),
        "gather_gbps": _gather_gbps(clock, host),
    }


def _reach_bytes(clock: Clock, host: torch.Tensor) -> int:
    """Measures tables of growing size. Returns the size in bytes of the largest table from which random rows of one
    sector are fetched about as fast as from the smallest table."""
    size, reached = _NEAR_BYTES, _NEAR_BYTES
    least_ns = _row_ns(clock, _raw_table(host[:size], _SECTOR_BYTES))
    while 2 * size <= host.numel():
        size *= 2
        if _SMALLER * _row_ns(clock, _raw_table(host[:size], _SECTOR_BYTES)) > least_ns:
            break
        reached = size
    return reached


def _bucketed_sms(clock: Clock, table: CompressedTensor) -> int:
    """Tries the numbers of multiprocessors in _BUCKETED_SMS. Returns the smallest of them whose time is within 3 % of
    the best time."""
    times = {sms: _row_ns(clock, table, max_sms=sms, path="bucketed") for sms in _BUCKETED_SMS}
    return min(sms for sms, taken in times.items() if taken <= _AS_FAST * min(times.values()))


def _gather_gbps(clock: Clock, host: torch.Tensor) -> float:
    """Gathers rows of 512 bytes from host memory on all of torch's threads. Returns the rate per thread, in GB/s."""
    table = _raw_table(host, 512)
    ids = torch.randint(table.num_rows, (host_gather.rows_at_once(table),), device="cpu")
    parts = host_gather.parts_of(_memory.empty(host_gather.CHUNK_BYTES, _CPU, pin=True), ids.numel())
    taken = clock.wall_s(lambda: host_gather.select(table, ids, 0, parts))
    return ids.numel() * table.row_bytes / taken / 1e9 / torch.get_num_threads()


# ---- coders ----


class _Family(NamedTuple):
    """Synthetic data for one family of coders.

    Attributes:
        rows: rows of 2 KiB on the device.
        codebook: a function of row_bytes that returns a codebook for the same elements, cut into rows of this size.
    """

    rows: torch.Tensor
    codebook: Callable[[int], AnyCodebook]

    def table(self, row_bytes: int, num_bytes: int, device: torch.device) -> CompressedTensor:
        """Returns a table, on a device, of the first num_bytes bytes of the data, cut into rows of row_bytes bytes. If
        the device is the CPU, the table is pinned."""
        rows = self.rows.view(-1)[: num_bytes // self.rows.itemsize].view(-1, row_bytes // self.rows.itemsize)
        return compress_rows(rows.to(device), codebook=self.codebook(row_bytes), device=self.rows.device)


def _families(clock: Clock) -> dict[str, _Family]:
    def rows(dtype: torch.dtype) -> torch.Tensor:
        values = torch.randn(clock.table_bytes // dtype.itemsize, dtype=torch.float32, device=clock.device)
        return values.to(dtype).view(-1, _ROW_BYTES // dtype.itemsize)

    floats, small = rows(torch.bfloat16), rows(torch.float8_e4m3fn)
    return {
        "pairs": _ranked(floats, 8, (2, 2, 2, 2)),
        "dense": _ranked(floats, 8, (3, 3)),
        "one_byte": _ranked(small, 4, (2, 2, 2)),
        "fast": consecutive(floats, 8),
        "listed": _ranked(floats.clamp(min=0), 8, (2, 2, 2, 2), listed=True),
        "masks": _masks(floats),
    }


def _exponents(rows: torch.Tensor, residual_bits: int, listed: bool) -> torch.Tensor:
    """Returns a histogram of the exponents of floats whose sign and mantissa together have residual_bits bits. listed:
    whether to leave out elements that are zero."""
    width = 8 * rows.itemsize
    elements = rows.view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[width]).view(-1)
    elements = elements[elements != 0] if listed else elements
    exponents = (elements.to(torch.int32) >> (residual_bits - 1)) & (2 ** (width - residual_bits) - 1)
    return torch.bincount(exponents)


def consecutive(rows: torch.Tensor, residual_bits: int) -> _Family:
    """Returns the data for the coders of scheme planes at level "fast". Its codebook has the fifteen consecutive
    exponents that together occur most often. residual_bits: the number of bits of sign and mantissa."""
    counts = torch.nn.functional.pad(_exponents(rows, residual_bits, listed=False), (0, 15))
    first = int(counts.unfold(0, 15, 1).sum(1).argmax())
    entries = torch.empty(1, 0, dtype=torch.int64, device="cpu")

    def codebook(row_bytes: int) -> AnyCodebook:
        fields = (row_bytes, rows.itemsize, 1, residual_bits, (4,), False, False, 0, 0, entries)
        return PlanesCodebook(*fields, first_symbol=first)

    return _Family(rows, codebook)


def _ranked(rows: torch.Tensor, residual_bits: int, digit_bits: tuple[int, ...], listed: bool = False) -> _Family:
    """Returns a family of scheme planes whose codebook has the most frequent exponents.

    Args:
        residual_bits: the number of bits of sign and mantissa of an element.
        digit_bits: the number of bits of a digit in each plane.
        listed: whether coded rows list the elements that are not zero.
    """
    ranked = _exponents(rows, residual_bits, listed).argsort(descending=True)
    num_entries = sum(2**bits - 1 for bits in digit_bits)
    entries = ranked[torch.arange(num_entries, device="cpu").clamp(max=len(ranked) - 1)].cpu().view(1, -1)

    def codebook(row_bytes: int) -> AnyCodebook:
        return PlanesCodebook(row_bytes, rows.itemsize, 1, residual_bits, digit_bits, False, listed, 0, 0, entries)

    return _Family(rows, codebook)


def _masks(floats: torch.Tensor) -> _Family:
    """Returns a family of scheme ibp. 26 of the 32 bits of every chunk are equal in all rows, so coded rows are short,
    and the bottleneck is more likely to be the decoder than the link."""
    fixed, chunk_bytes = 0x7FFFFFC1, 4
    rows = (floats.view(torch.int32) & ~fixed) | (fixed & 0x3F800001)

    def codebook(row_bytes: int) -> AnyCodebook:
        words = torch.tensor([fixed, fixed & 0x3F800001], dtype=torch.int32, device="cpu")
        mask, bitval = words.view(2, 1).expand(2, row_bytes // chunk_bytes).contiguous().view(torch.uint8)
        return Codebook.from_masks(mask, bitval, chunk_bytes)

    return _Family(rows, codebook)


def _of_coder(clock: Clock, family: _Family, known: Calibration) -> CoderRates:
    num_bytes = family.rows.numel() * family.rows.itemsize
    table, codebook = family.table(_ROW_BYTES, num_bytes, clock.device), family.codebook(_ROW_BYTES)
    out = torch.empty(table.shape, dtype=table.dtype, device=clock.device)
    decode_s = clock.gpu_s(lambda: decompress(table, out=out))
    few_s = clock.gpu_s(lambda: decompress(table, out=out, max_sms=FEW_SMS))
    work = work_of(codebook, _ROW_BYTES, table.stored_bytes / table.num_rows)
    place = _place_for(table, codebook, clock.device)
    encode_s = clock.gpu_s(lambda: encode_into(family.rows, place))
    few_encode_s = clock.gpu_s(lambda: encode_into(family.rows, place, max_sms=FEW_SMS))
    return CoderRates(
        decode_gbps=num_bytes / decode_s / 1e9,
        few_decode_gbps=num_bytes / few_s / 1e9,
        encode_gbps=num_bytes / encode_s / 1e9,
        few_encode_gbps=num_bytes / few_encode_s / 1e9,
        least_row_ns=_least_row_ns(clock, family, known),
        work_per_ns=table.num_rows * work / decode_s / 1e9,
    )


def _place_for(table: CompressedTensor, codebook: AnyCodebook, device: torch.device) -> CodedRows:
    """Allocates memory in which all rows of a table can be encoded again."""
    room_bytes = 2 * table.num_rows * _SECTOR_BYTES
    return CodedRows(codebook, table.num_rows, slot_bytes=table.slot_bytes, overflow_bytes=room_bytes, device=device)


def _coded_read_share(clock: Clock, family: _Family, known: Calibration) -> float:
    """Measures the rate at which sectors of coded rows of 256 original bytes are fetched. Returns this rate divided by
    the rate for raw rows, but at most 1."""
    table = family.table(_MEDIUM_ROW_BYTES, min(_NEAR_BYTES, clock.table_bytes), _CPU)
    return min(1.0, table.link_bytes / table.num_rows / _row_ns(clock, table) / known.read_gbps)


def _least_row_ns(clock: Clock, family: _Family, known: Calibration) -> float:
    """Returns the shortest time per row, in ns, in which coded rows are fetched from pinned memory and decoded. It is
    measured with rows of 128 original bytes, relative to raw rows of the same size, whose time follows from the rates
    of the link. If the link is the limit for these coded rows, returns the link's shortest time for any row,
    `known.least_row_ns`."""
    num_bytes = min(_NEAR_BYTES, clock.table_bytes)
    table = family.table(_SHORT_ROW_BYTES, num_bytes, _CPU)
    raw = _raw_table(_memory.empty(num_bytes, _CPU, pin=True), _SHORT_ROW_BYTES)
    link_ns = table.link_bytes / table.num_rows / (known.read_gbps * known.coded_read_share)
    raw_ns = max(_SHORT_ROW_BYTES / known.read_gbps, known.least_row_ns)
    taken_ns = raw_ns * _row_ns(clock, table) / _row_ns(clock, raw)
    return _SPREAD * taken_ns if taken_ns > _LINK_BOUND * max(link_ns, known.least_row_ns) else known.least_row_ns


__dir__ = published(__name__)
