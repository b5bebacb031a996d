"""Tables whose slots are on a GPU, and whose overflow is in pinned host memory or in the memory of another GPU (Buddy
Compression, ISCA 2020).

    profile = ibp.spill.profile(snapshots)               # finds the sizes of slots
    table   = ibp.spill.place(x, profile["weight"])      # slots of this size on the GPU, the rest in host memory

A target ratio is the size of a tensor divided by the size of its slots. The first part of this file computes sizes of
slots from target ratios, and from the fraction of rows that may be larger than their slots. `profile` finds the sizes
that snapshots of a run need. `place` moves tensors and tables to slots on a device, with overflow in pinned host memory
or on another GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from . import _core
from ._common.arguments import number
from ._common.process import published, tqdm
from ._fetch.streaming import decompress
from ._machine import memory
from ._machine.staging import to_device
from ._rows import geometry
from ._rows.codebook import AnyCodebook, surveyed
from ._rows.geometry import Survey
from ._rows.learning import Options, Request, checked
from ._tables.coding import Coding, coded_in_slots, placed, warn_of_gradient
from ._tables.compressed_tensor import CompressedTensor, with_tensors

__all__ = ["Profile", "TensorProfile", "place", "profile"]


# ---- sizes of slots ----

# The target ratios of Buddy Compression (section 3.4), including 16 for data that is mostly zero; plus infinity, at
# which rows have no slots.
RATIOS = (1.0, 4 / 3, 2.0, 4.0, 16.0, math.inf)
THRESHOLD = 0.30  # The fraction of rows that may be larger than their slots, as in the paper.


def slot_bytes_of(ratio: float, row_bytes: int) -> int:
    """Returns the size of a slot in bytes: 1/ratio of the size of a row, rounded down to whole sectors of 32 bytes, but
    at least one sector. A ratio of 1 gives row_bytes, and infinity gives 0."""
    if ratio == 1:
        return row_bytes
    if math.isinf(ratio):
        return 0
    sectors = max(1, int(row_bytes / ratio) // _core.SECTOR_BYTES)
    return min(row_bytes, sectors * _core.SECTOR_BYTES)


def checked_ratio(target: float) -> float:
    """Returns target as a float. Raises TypeError or ValueError if it is not a number of at least 1."""
    ratio = number("target", target)
    if not ratio >= 1:
        raise ValueError(
            f"target is {target}; wanted a ratio of at least 1, such as 4/3, 2, 4, or math.inf for no slots"
        )
    return ratio


def checked_threshold(threshold: float) -> float:
    """Returns threshold as a float. Raises TypeError or ValueError if it is not a number from 0 to 1."""
    share = number("threshold", threshold)
    if not 0 <= share <= 1:
        raise ValueError(f"threshold is {threshold}; wanted a share of the rows from 0 to 1")
    return share


def slots_within(share: float, found: Survey, ratios: Sequence[float] | None) -> int:
    """Returns the smallest size of slots, in bytes, such that at most a given fraction of the rows is larger than its
    slot.

    Args:
        share: the largest fraction of the rows that may be larger than their slots, 0 to 1.
        found: the survey of the rows.
        ratios: the target ratios to choose from, in addition to 1. None: slots of any whole number of sectors.
    """
    row_bytes = found.row_bytes
    sizes = None if ratios is None else [row_bytes, *(slot_bytes_of(ratio, row_bytes) for ratio in ratios)]
    return found.best_slots(overflow_cost=0.0, most_spilled=share * found.num_rows, sizes=sizes)[0]


# ---- profiling ----

_SWEEP = (0.10, 0.20, 0.30, 0.40)  # The thresholds in figure 9 of Buddy Compression.
# From each snapshot, sampled rows of each tensor are kept: about _SAMPLE_BYTES bytes, but at least _LEAST_ROWS rows.
_LEAST_ROWS = 64
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class Spill:
    """The cost of rows that are larger than their slots.

    Attributes:
        rows: fraction of the rows that have a part in host memory.
        num_bytes: total size in bytes of these parts, each rounded up to whole sectors of 32 bytes.
        traffic: num_bytes / original bytes. This is the traffic over the link if each row is read once.
    """

    rows: float
    num_bytes: int
    traffic: float


@dataclass(frozen=True)
class TensorProfile:
    """The sizes of a tensor's rows in each snapshot, and the slot size that was chosen for the tensor. It can be passed
    to `ibp.spill.place` as the target.

    Attributes:
        name: name of the tensor in the snapshots.
        num_bytes, row_bytes: size in bytes of the tensor, and of each of its rows.
        codebook: a codebook that was learned from rows of all snapshots.
        slot_bytes: the chosen size of a slot in bytes. 0: there are no slots, and only the index is on the GPU.
        histograms: for each snapshot, a histogram of its sampled rows. Entry k is the number of rows that take k
            sectors of 32 bytes when stored.
        ratios: the target ratios to choose from. None: slots of any whole number of sectors.
    """

    name: str
    num_bytes: int
    row_bytes: int
    codebook: AnyCodebook = field(repr=False)
    slot_bytes: int
    histograms: tuple[tuple[int, ...], ...] = field(repr=False)
    ratios: tuple[float, ...] | None = field(repr=False)

    @property
    def num_rows(self) -> int:
        return -(-self.num_bytes // self.row_bytes)

    @property
    def target(self) -> float:
        """The size of the tensor divided by the size of all slots; infinity if there are no slots."""
        return self.row_bytes / self.slot_bytes if self.slot_bytes else math.inf

    @property
    def device_bytes(self) -> int:
        """Size in bytes of the slots and the index on the GPU. The index takes 2 bytes for each row, plus 8 bytes for
        every 32 rows if slots are smaller than rows."""
        index = 2 * self.num_rows + (8 * -(-self.num_rows // 32) if self.slot_bytes < self.row_bytes else 0)
        return self.num_rows * self.slot_bytes + index

    @property
    def host_bytes(self) -> int:
        """Size in bytes of the overflow for the snapshot that needs the most overflow."""
        return max(self.spill(snapshot).num_bytes for snapshot in range(len(self.histograms)))

    def spill(self, snapshot: int | None = None, slot_bytes: int | None = None) -> Spill:
        """Returns the cost of the rows that are larger than their slots.

        Args:
            snapshot: index of the snapshot. None: the mean of all snapshots.
            slot_bytes: size in bytes of a slot. None: the chosen size.
        """
        chosen = self.histograms if snapshot is None else (self.histograms[snapshot],)
        slot_bytes = self.slot_bytes if slot_bytes is None else slot_bytes
        found = [self._survey(sectors).spilled(slot_bytes) for sectors in chosen]
        looked_at = sum(map(sum, chosen))
        rows, num_bytes = (sum(part) / max(1, looked_at) for part in zip(*found))
        return Spill(rows, round(num_bytes * self.num_rows), num_bytes * self.num_rows / max(1, self.num_bytes))

    def at(self, threshold: float) -> TensorProfile:
        """Returns a copy of the profile with the smallest slot size at which, in every snapshot, at most the fraction
        `threshold` of the rows is larger than the slots."""
        share = checked_threshold(threshold)
        surveys = map(self._survey, self.histograms)
        wanted = (slots_within(share, found, self.ratios) for found in surveys)
        return replace(self, slot_bytes=max(wanted))

    def _survey(self, sectors: tuple[int, ...]) -> geometry.Survey:
        """Returns a survey of the sampled rows of a snapshot. sectors: the histogram of the snapshot."""
        stored = geometry.SECTOR_BYTES * sum(k * count for k, count in enumerate(sectors))
        return geometry.Survey(self.row_bytes, stored, torch.tensor(sectors, dtype=torch.int64, device="cpu"))


class Profile(Mapping[str, TensorProfile]):
    """The result of `ibp.spill.profile`: a mapping from names of tensors to `TensorProfile`.

    Attributes:
        threshold: the threshold for which the slot sizes were chosen.
        num_snapshots: number of snapshots that were profiled.
        original_bytes: size in bytes of all tensors together.
        device_bytes: size in bytes of the slots and the index of all tensors.
        host_bytes: size in bytes of the overflow of all tensors. For each tensor, the snapshot that needs the most
            overflow is counted.
        ratio: original_bytes / device_bytes.
        rows: the fraction of all rows that are larger than their slots, averaged over the snapshots.
        traffic: number of bytes that are read from host memory if each row is read once, divided by original_bytes.
        best_ratio: original_bytes / size in bytes of all stored rows, each rounded up to whole sectors. This would be
            the ratio if each row took exactly the sectors that it needs, all on the GPU.
        sweep: the profiles of the same snapshots at thresholds of 10, 20, 30 and 40 % (Buddy Compression, figure 9).
    """

    def __init__(self, tensors: Mapping[str, TensorProfile], threshold: float, num_snapshots: int) -> None:
        self._tensors, self.threshold, self.num_snapshots = dict(tensors), threshold, num_snapshots

    def __getitem__(self, name: str) -> TensorProfile:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def original_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.values())

    @property
    def device_bytes(self) -> int:
        return sum(tensor.device_bytes for tensor in self.values())

    @property
    def host_bytes(self) -> int:
        return sum(tensor.host_bytes for tensor in self.values())

    @property
    def ratio(self) -> float:
        return self.original_bytes / max(1, self.device_bytes)

    @property
    def best_ratio(self) -> float:
        held = sum(tensor.spill(None, 0).num_bytes for tensor in self.values())
        return self.original_bytes / max(1, held)

    @property
    def rows(self) -> float:
        num_rows = sum(tensor.num_rows for tensor in self.values())
        return sum(tensor.spill().rows * tensor.num_rows for tensor in self.values()) / max(1, num_rows)

    @property
    def traffic(self) -> float:
        return sum(tensor.spill().num_bytes for tensor in self.values()) / max(1, self.original_bytes)

    @property
    def sweep(self) -> tuple[Profile, ...]:
        return tuple(self.at(threshold) for threshold in _SWEEP)

    def at(self, threshold: float) -> Profile:
        """Returns a profile of the same snapshots with the slot sizes for another threshold."""
        tensors = {name: tensor.at(threshold) for name, tensor in self.items()}
        return Profile(tensors, threshold, self.num_snapshots)

    def __repr__(self) -> str:
        width = max([len("tensor"), *(len(name) for name in self)])
        lines = [
            f"ibp.spill.profile of {self.num_snapshots} snapshots, {len(self)} tensors of {self.original_bytes:,} "
            f"bytes: {self.device_bytes:,} on the GPU ({self.ratio:.2f}x), {self.host_bytes:,} in host memory",
            f"{'tensor':{width}}{'bytes':>16}{'row':>8}{'slot':>8}{'target':>8}{'rows out':>10}{'bytes out':>11}",
        ]
        for name, tensor in self.items():
            spill = tensor.spill()
            lines.append(
                f"{name:{width}}{tensor.num_bytes:>16,}{tensor.row_bytes:>8,}{tensor.slot_bytes:>8,}"
                f"{tensor.target:>7.2f}x{spill.rows:>10.1%}{spill.traffic:>11.1%}"
            )
        lines += [
            f"threshold {point.threshold:.0%}: {point.ratio:.2f}x, {point.rows:.1%} of the rows and "
            f"{point.traffic:.1%} of the bytes out"
            for point in self.sweep
        ]
        return "\n".join([*lines, f"as stored: {self.best_ratio:.2f}x"])


def profile(
    snapshots: Iterable[Mapping[str, torch.Tensor]],
    threshold: float = THRESHOLD,
    *,
    ratios: Sequence[float] | None = RATIOS,
    scheme: str = "planes",
    level: str = "default",
    row_bytes: int | None = None,
    device: torch.device | str | int | None = None,
    progress: bool = False,
) -> Profile:
    """Finds how small the slots of tensors can be, from snapshots of a run (Buddy Compression, section 3.4). For each
    tensor it chooses the largest target ratio at which, in every snapshot, at most a given fraction of the rows is
    larger than the slots.

    From every snapshot, rows are drawn at random (1 MiB of each tensor, but at least 64 rows) and copied to host
    memory. After the last snapshot, a codebook for each tensor is learned from these rows, and the stored sizes of the
    rows are measured. Because the rows are copied, the tensors of a snapshot may be changed in place afterwards, as the
    parameters of a model are.

    Example:
        >>> snapshots = [{"weight": torch.randn(1000, 1024).bfloat16()} for _ in range(3)]
        >>> profile = ibp.spill.profile(snapshots, device="cpu")
        >>> profile["weight"]
        TensorProfile(name='weight', num_bytes=2048000, row_bytes=2048, slot_bytes=1536)
        >>> tables = {name: ibp.spill.place(x, profile[name], device="cpu") for name, x in snapshots[-1].items()}

    Args:
        snapshots: mappings from names to tensors, such as 10 state_dicts. A tensor must have the same shape and dtype
            in all snapshots that contain it. Tensors without elements are ignored.
        threshold: the largest fraction of a tensor's rows that may be larger than their slots. The paper uses 0.30.
        ratios: target ratios to choose from. None: slots of any whole number of 32-byte sectors.
        scheme, level, row_bytes: as in `ibp.compress`.
        device: the device that measures rows. None: the GPU of each tensor that is on one, otherwise the current GPU if
            there is one, otherwise the CPU.
        progress: whether to show progress bars.

    Raises:
        TypeError, ValueError: an argument is not as described, or there are no snapshots.
    """
    threshold = checked_threshold(threshold)
    kept_ratios = None if ratios is None else tuple(checked_ratio(ratio) for ratio in ratios)
    options = checked(Options(scheme, level=level))
    kept: dict[str, tuple[geometry.Geometry, torch.device, list[torch.Tensor]]] = {}  # with the samples of a tensor
    num_snapshots = 0
    for snapshot in snapshots:
        if not isinstance(snapshot, Mapping):
            raise TypeError(f"a snapshot is a {type(snapshot).__name__}; wanted a mapping from names to tensors")
        num_snapshots += 1
        for name, x in snapshot.items():
            geometry.check_tensor(x, name)
            if x.numel():
                if name not in kept:
                    kept[name] = geometry.Geometry.of(x, row_bytes), memory.usual(device, x), []
                form, _, samples = kept[name]
                samples.append(_sample_of(name, x, form, len(samples)))
    if num_snapshots == 0:
        raise ValueError("there are no snapshots")
    with tqdm(total=len(kept), desc="profile", unit="tensor", disable=not progress) as bar:
        tensors = {}
        for name in list(kept):
            tensors[name] = _profile_of(name, *kept.pop(name), options, kept_ratios).at(threshold)
            bar.update()
    return Profile(tensors, threshold, num_snapshots)


def _sample_of(name: str, x: torch.Tensor, form: geometry.Geometry, number: int) -> torch.Tensor:
    """Returns sampled rows of a tensor in host memory. form: the geometry that the tensor must have; number: the number
    of earlier samples of this tensor."""
    if (x.shape, x.dtype) != (form.shape, form.dtype):
        raise ValueError(
            f"{name} is {list(x.shape)} of {x.dtype}; it was {list(form.shape)} of {form.dtype} in an earlier snapshot"
        )
    data = geometry.bytes_of(x)
    if data.numel() < form.row_bytes:
        data = torch.nn.functional.pad(data, (0, form.row_bytes - data.numel()))
    wanted = max(_LEAST_ROWS, _SAMPLE_BYTES // form.row_bytes)
    return geometry.sample(data, form.row_bytes, wanted, seed=number).to("cpu", copy=True)


def _profile_of(
    name: str,
    form: geometry.Geometry,
    worker: torch.device,
    samples: list[torch.Tensor],
    options: Options,
    ratios: tuple[float, ...] | None,
) -> TensorProfile:
    """Learns a codebook from the samples of a tensor, one for each snapshot, and measures their rows. The slots of the
    profile have the size of a row."""
    row_bytes, data = form.row_bytes, torch.cat(samples)
    of_samples = geometry.Geometry(torch.Size((data.numel() // form.dtype.itemsize,)), form.dtype, row_bytes)
    codebook = coded_in_slots(Request(data, of_samples, worker, replace(options, device=worker))).codebook
    surveys = [surveyed(sample.view(-1), codebook, worker) for sample in samples]
    histograms = tuple(tuple(found.sectors.tolist()) for found in surveys)
    return TensorProfile(name, form.num_bytes, row_bytes, codebook, row_bytes, histograms, ratios)


# ---- placing ----


def place(
    x: torch.Tensor | CompressedTensor,
    target: float | TensorProfile | None = None,
    *,
    slot_bytes: int | None = None,
    threshold: float = THRESHOLD,
    codebook: AnyCodebook | None = None,
    scheme: str = "planes",
    level: str = "default",
    row_bytes: int | None = None,
    device: torch.device | str | int | None = None,
    overflow_memory: torch.device | str | None = None,
    progress: bool = False,
) -> CompressedTensor:
    """Returns a table whose slots are on a GPU. Bytes that do not fit in the slots, the overflow, are in pinned host
    memory or in the memory of another GPU. The GPU reads them over the link or over NVLink when it decodes rows (Buddy
    Compression, ISCA 2020).

    Every row has a slot of the same size on the device. If a stored row is larger than its slot, the rest of its bytes
    are in the overflow. If `update_` makes a row larger than its slot, the row's further bytes also go to the overflow;
    the slots do not grow, and no other row moves. A default row (zeros, or another row that the codebook defines) has
    no bytes, so no slot is read for it. With a target of infinity there are no slots, and all rows except default rows
    are in the overflow.

    The table can be used like any other table. `table.device_bytes`, `table.host_bytes` and `table.peer_bytes` are the
    sizes of its memory on the GPU, in host memory and on another GPU. `to(device)` moves the slots to another GPU. It
    leaves overflow in host memory where it is, and moves overflow from another GPU to the device of the slots. `cpu()`
    returns an ordinary table, whose slots and overflow are both in host memory. A table that is saved and loaded again
    is also an ordinary table. `place` can move it to a GPU again. In a pickle, overflow on another GPU becomes overflow
    in host memory. If the device is a CPU, everything is in host memory.

    If the overflow is on another GPU, only the GPU of the slots works on it, in the order of its own streams: nothing
    has to be synchronised with the other GPU, and the table may be freed whenever a table on one GPU may be freed.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> table = ibp.spill.place(x, 4 / 3, device="cpu")
        >>> table.slot_bytes, torch.equal(table.decompress(), x)  # a slot has 3/4 of a row's 2,048 bytes
        (1536, True)

    Args:
        x: tensor [N, ...]; or a table. The rows of a table are moved without decoding them. But if target or slot_bytes
            is given, they are decoded and encoded again.
        target: the size of x divided by the size of all slots, at least 1. The size of a slot is rounded down to
            sectors of 32 bytes, but is at least one sector. math.inf: there are no slots. Or a profile of the tensor
            from `ibp.spill.profile`, whose codebook and slot size are used. None: the largest of 1, 4/3, 2, 4, 16 and
            infinity at which at most the fraction `threshold` of the rows is larger than the slots.
        slot_bytes: size in bytes of a row's slot, given instead of target: row_bytes, or a smaller multiple of 32.
        threshold: the largest fraction of the rows that may be larger than their slots, 0 to 1. It is used only if
            target and slot_bytes are None. The paper uses 0.30.
        codebook, scheme, level, row_bytes: as in `compress`; scheme is "planes", "ibp" or "auto".
        device: the device of the slots. None: the GPU of x if x is on one, otherwise the current GPU if there is one,
            otherwise the CPU. But if the rows of a table are moved without decoding them, None means the table's
            device.
        overflow_memory: the memory of the overflow: "pinned", or another GPU, such as "cuda:1", to whose memory the
            GPU of the slots has access (`torch.cuda.can_device_access_peer`). None: "pinned".
        progress: whether to show progress bars.

    Raises:
        TypeError, ValueError: as in `compress`. Also if target, slot_bytes or threshold is out of range, if target and
            slot_bytes are both given, if x does not match the profile, or if overflow_memory is neither "pinned" nor
            another GPU whose memory the device can read.
        RuntimeError: the system refuses to pin the memory of the overflow.
        torch.OutOfMemoryError: a GPU has too little free memory.
    """
    if isinstance(target, TensorProfile):
        if codebook is not None or slot_bytes is not None or row_bytes is not None:
            raise ValueError("target is a profile, which says codebook, slot_bytes and row_bytes: give none of them")
        codebook, slot_bytes, target = target.codebook, target.slot_bytes, None
    ratio = None if target is None else checked_ratio(target)
    if ratio is not None and slot_bytes is not None:
        raise ValueError("target and slot_bytes are both given; wanted one of them")
    threshold = checked_threshold(threshold)
    if isinstance(x, CompressedTensor):
        if ratio is None and slot_bytes is None:
            return _moved(x, memory.canonical(x.device if device is None else device), overflow_memory)
        codebook = x.codebook if codebook is None and x.codebook is not None else codebook
        x = decompress(x, check=x.is_cuda)
    geometry.check_tensor(x)
    warn_of_gradient(x)
    if scheme == "raw":
        raise ValueError("scheme is 'raw'; wanted 'planes', 'ibp' or 'auto': raw rows need slots of their full size")
    worker = memory.usual(device, x)
    home = memory.overflow_home(overflow_memory, worker)
    options = Options(scheme, level=level, codebook=codebook, row_bytes=row_bytes, device=worker, progress=progress)
    request = Request.of(x, options)
    if slot_bytes not in (None, 0):
        geometry.checked_slot_bytes("slots", slot_bytes, request.geometry.row_bytes)

    def slots_for(coding: Coding) -> int:
        if slot_bytes is not None:
            return slot_bytes
        if ratio is not None:
            return slot_bytes_of(ratio, request.geometry.row_bytes)
        return slots_within(threshold, coding.survey, RATIOS)

    return placed(CompressedTensor, request, slots_for, home)


def _moved(
    table: CompressedTensor, device: torch.device, overflow_memory: torch.device | str | None
) -> CompressedTensor:
    """Returns a table with the same coded rows, whose slots are on the device, and whose overflow is in the memory that
    the argument `overflow_memory` of `place` says. If the device is a CPU, both are in host memory. If both are already
    where they should be, returns the table itself."""
    home = memory.overflow_home(overflow_memory, device)
    if device.type == "cpu" or (table.device == device and table.overflow.device == home):
        return table.to(device)

    def moved(overflow: torch.Tensor) -> torch.Tensor:
        return memory.copied_overflow(memory.empty_overflow(overflow.numel(), home, device), overflow, device)

    return with_tensors(table, lambda tensor: to_device(tensor, device), change_overflow=moved)


__dir__ = published(__name__)
