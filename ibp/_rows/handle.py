"""Defines what operations are given for a table: a record of faults, a `Handle`, and the plan by which a GPU fetches
items from host memory.

Faults are errors inside operations. If an operation meets a bad id or a damaged row, it writes zeros in place of that
row, goes on, and notes the first fault in a record. A record is the struct ibp_fault of ibp.h as int64 [4]: status,
position, value (an id or a row number), and a number that only GPUs use. A call that waits for its result passes a
`new_record` to the operation and raises the fault at once. A call that does not wait passes a record of the `Faults`
object that belongs to the table (or to another object with rows); the next call for this table finds the fault there
and raises it.

A `Handle` describes the memory of a table (`Parts`) as one device reads it.

The plan follows from the rates of the calibration in force. There are three paths. A GPU fetches the items in the order
of the given ids; or it first sorts the ids by windows, which are ranges of consecutive items of the table; or the CPU
gathers the items, and the copy engine copies them to the GPU.

Windows help because address translation limits random reads of large memory. If a GPU fetches random rows from 0.5 GiB
of pinned memory, only the number of bytes limits the rate. From a table of 4 GiB, it fetches 1,000,000 rows of 128
bytes at 49 million rows per second in the given order, and at 370 to 400 million rows per second if the ids are first
sorted by windows of 64 KiB to 256 MiB. With windows of 64 KiB, 100,000 rows are fetched 3.5 times as fast from a table
of 4 GiB, and 1.6 times as fast from a table of 16 GiB (benchmarks/large_table.py, on an H200).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from .. import _core
from .._common.modes import outside_of_modes
from .._machine import memory
from .._machine.calibration import Calibration
from .codebook import coder_rates, work_of

if TYPE_CHECKING:
    from .table import Table

# ---- faults ----

_INVALID_ARGUMENT, _INDEX_OUT_OF_RANGE = 1, 2  # ibp_status
ENTRIES = 4  # Number of int64 words in a record.
_CPU = torch.device("cpu")


class CorruptTableError(ValueError):
    """Raised if a table's bytes are inconsistent, because they were damaged or forged."""


class FaultWords(NamedTuple):
    """The messages for faults of one kind of work. Messages are templates for `str.format`. {position} and {value} are
    the position and value of the record, {status} is the status of the record in words, and callers of `raise_for` may
    pass other names."""

    damaged: str  # The message for a damaged row, and for all faults that have no message of their own.
    kind: type[Exception] = CorruptTableError  # The class of the exception that carries this message.
    out_of_range: str | None = None  # The message of the IndexError for an id that is out of range.
    invalid: str | None = None  # The message of the ValueError for inconsistent arguments.
    # This is appended to the message if a later call raises the fault. {device} is the device that noted the fault.
    later: str = " (noted by an earlier call on {device}; its row was filled with zeros)"

    def raise_for(
        self, record: torch.Tensor | Sequence[int], noted_on: torch.device | None = None, **names: object
    ) -> None:
        """Raises the exception for the fault in a record. Does nothing if no fault is noted in the record.

        Args:
            noted_on: the device that noted the fault during an earlier call. None: the present call noted the fault.
            names: values for the other placeholders of the message.
        """
        status, position, value, _ = record.tolist() if isinstance(record, torch.Tensor) else record
        if status == 0:
            return
        kind, words = self.kind, self.damaged
        if status == _INDEX_OUT_OF_RANGE and self.out_of_range is not None:
            kind, words = IndexError, self.out_of_range
        elif status == _INVALID_ARGUMENT and self.invalid is not None:
            kind, words = ValueError, self.invalid
        words += "" if noted_on is None else self.later
        status = _core.status_string(status)
        raise kind(words.format(position=position, value=value, status=status, device=noted_on, **names))


# The messages for tables. Work that reads a selection of a table's items, which the CPU has gathered
# (_fetch/host_gather.py), knows the positions of the items in the list of ids, but not the ids. Its faults need other
# messages, and a record of their own: the one with the index OF_SELECTIONS.
_OF_TABLES = FaultWords(
    "{status}: item or row {value} at position {position}",
    out_of_range="ids[{position}] is {value}; wanted 0 to {last}",
    invalid="offsets[{position}] is {value}; wanted the number of an id, not less than the one before",
)
WORDS_OF_TABLES = _OF_TABLES, _OF_TABLES._replace(damaged="{status}: the item of ids[{position}]")
OF_SELECTIONS = 1


def refuse_capture(device: torch.device) -> None:
    """Raises RuntimeError if a CUDA graph is being captured on a device."""
    if memory.is_capturing(device):
        raise RuntimeError(
            f"the first use of a table on {device} copies its index there, which a CUDA graph cannot capture: call "
            "index_select or decompress once before capturing"
        )


def new_record(device: torch.device = _CPU) -> torch.Tensor:
    """Returns an empty record, in which the operations of one call can note a fault. device: the device on which the
    operations run."""
    return torch.zeros(ENTRIES, dtype=torch.int64, device=device)


class Faults:
    """The fault records of a table, or of another object with rows, for work that no call waits for. Each device has
    one record for each kind of work. The records are in host memory to which GPUs write, so the host can read them at
    any time.

    Args:
        words: the messages for each kind of work.

    Attributes:
        names: values for the placeholders of the messages that `FaultWords` does not fill. The owner keeps them up to
            date.
    """

    def __init__(self, *words: FaultWords) -> None:
        self._words = words
        self.names: dict[str, Any] = {}
        self._noted: dict[torch.device, np.ndarray] = {}  # All records of a device, int64 [number of kinds, ENTRIES].
        # For each device, one tensor for each of its records, over the memory of `_noted`, in which the device notes
        # faults.
        self._records: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    @property
    def devices(self) -> list[torch.device]:
        """The devices whose work may have noted faults, in the order of their first use."""
        return list(self._records)

    def on(self, device: torch.device, kind: int = 0) -> torch.Tensor:
        """Returns the record in which work on a device notes faults. The first call for a device allocates its records.
        kind: the index of the kind of work among the constructor's arguments.

        Raises:
            ibp.PinningError: the system does not pin memory.
            RuntimeError: a CUDA graph is being captured, and the device has no record yet.
        """
        if device not in self._records:
            refuse_capture(device)
            on_gpu, kinds = device.type == "cuda", len(self._words)
            with outside_of_modes():
                host = memory.empty(8 * kinds * ENTRIES, _CPU, on_gpu).view(torch.int64).zero_().view(kinds, ENTRIES)
                self._noted[device] = host.numpy()
                near = memory.device_view(host, device) if on_gpu else host
                self._records[device] = tuple(near[number] for number in range(kinds))
        return self._records[device][kind]

    def words(self, device: torch.device) -> memoryview:
        """Returns the int64 words of all records of a device, one record after the other, as the host reads them. If a
        fault is noted in a record, the first word of the record is not 0."""
        return self._noted[device].reshape(-1).data

    def clear(self, device: torch.device) -> None:
        """Clears all records of a device."""
        self._noted[device][:] = 0

    def taken(self, device: torch.device) -> Iterator[tuple[FaultWords, list[int]]]:
        """Clears each of a device's records in which a fault is noted. For each of them, yields (messages for its kind
        of work, copy of the record before it was cleared)."""
        for words, noted in zip(self._words, self._noted.get(device, ())):
            if noted[0]:
                record = noted.tolist()
                noted[:] = 0
                yield words, record

    def raise_pending(self, device: torch.device) -> None:
        """Raises the first fault that work on a device has noted, if any, and clears its record. If the call is
        interrupted, the record is not cleared."""
        for words, noted in zip(self._words, self._noted.get(device, ())):
            if noted[0]:
                try:
                    words.raise_for(noted.tolist(), device, **self.names)
                except Exception:
                    noted[:] = 0
                    raise

    def raise_when_done(self, device: torch.device) -> None:
        """Waits for the current stream of a GPU, and raises the first fault that work on this GPU has noted, if any."""
        torch.cuda.current_stream(device).synchronize()
        self.raise_pending(device)

    def raise_for(self, record: torch.Tensor, kind: int = 0) -> None:
        """Raises the fault in the record of a single call, if the record holds one. kind: as for `on`."""
        self._words[kind].raise_for(record, **self.names)


# ---- handles ----


class Parts(NamedTuple):
    """Holds the memory of a table as one device reads it. The fields are the arguments of torch.ops.ibp.describe_table
    (csrc/bindings/torch_ops.cpp).

    Attributes:
        codebook, codec: the words and the codec of the codebook (see `AnyCodebook`).
        overflow_start: the offset in bytes at which `overflow` begins in the overflow of the whole table. It is 0
            unless the parts belong to only some of the table's rows.
        rooms, used: needed only if rows are to be encoded into the memory (see `forms.Index`).
        fault, plan: the fault record and the plan that the operation `take` uses on a GPU.
    """

    slots: torch.Tensor
    overflow: torch.Tensor
    lengths: torch.Tensor
    bases: torch.Tensor
    codebook: torch.Tensor
    codec: list[int]
    slot_bytes: int
    overflow_start: int
    num_items: int
    item_bytes: int
    rooms: torch.Tensor | None = None
    used: torch.Tensor | None = None
    fault: torch.Tensor | None = None
    plan: Sequence[int] = ()


class Handle:
    """The description of a table for the operations on one device. It is checked and made once, and used by all later
    operations. This saves time, because describing a table takes about as long as calling an operation.

    Attributes:
        parts: the table's memory.
        table: the tensor that operations take as their argument `table`. It keeps the table's memory alive.

    Raises:
        RuntimeError: parts are inconsistent.
    """

    # Only handles that `handle_on` returns have the following attributes. Calls of `take` use them.
    like: torch.Tensor  # An empty tensor [0, *item_shape] with the table's dtype.
    plan: GatherPlan
    machine: Calibration | None  # The calibration that the plan is for; None if the table is in the device's memory.
    faults: Faults  # The faults of the table.
    noted: memoryview  # The words of the table's fault records for the device (see `Faults.words`).
    staged: dict[tuple[int, int], bool]  # (number of ids, number of threads) -> whether the CPU gathers the rows.

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.table = torch.ops.ibp.describe_table.default(*parts)
        self.table.parts = parts

    def __reduce__(self) -> tuple[type[Handle], tuple[Parts]]:
        """Copies and pickles only the parts, so that a copy makes its own description of its own parts."""
        return Handle, (self.parts,)

    def encode(
        self,
        x: torch.Tensor,
        counts: torch.Tensor | None = None,
        fault: torch.Tensor | None = None,
        *,
        buffers: torch.Tensor | None = None,
        row_ids: torch.Tensor | None = None,
        first_row: int = 0,
        max_sms: int = 0,
        is_new: bool = False,
    ) -> None:
        """Encodes the rows of x, or of buffers with the layout of x, into the table's memory.

        For the arguments counts, fault and is_new, see the operation encode_into in csrc/bindings/torch_ops.cpp. For
        all others, see `_tables.coded_rows.encode_into`.
        """
        given = (buffers, row_ids, first_row, max_sms, counts, fault, is_new)
        torch.ops.ibp.encode_into.default(self.table, x, *given)


# ---- the plan ----

WINDOW_BYTES = 64 << 10  # Smallest size of a window, in bytes.
MAX_WINDOWS = 1 << 16  # Largest number of windows (IBP_MAX_WINDOWS).
# Fewer ids than this are not sorted by windows, because the sorting kernels would take longer than sorting saves.
LEAST_BUCKETED_IDS = 1 << 14
MOST_BUCKETED_IDS = 1 << 31  # The kernels that sort ids by windows count the ids in 32 bits.
LEAST_STAGED_BYTES = 4 << 20  # Items of fewer bytes in total do not fill the CPU's pipeline.
# Times, in ns, that a path takes in addition to the time for fetching the rows, measured by benchmarks/paths.py on an
# H100. To sort ids by windows, a GPU takes PARTITION_NS for a call and PARTITION_ID_NS for each id. If the ids come
# from the CPU, the GPU also waits LAUNCHES_NS for the launches.
PARTITION_NS, PARTITION_ID_NS, LAUNCHES_NS = 16e3, 0.055, 90e3
# The CPU's pipeline takes STAGING_NS to begin and end. It moves rows at STAGED_SHARE times the rate of its slower step
# alone: gathering by the threads, or copying by the copy engine.
STAGING_NS, STAGED_SHARE = 100e3, 0.7
# A path that needs preparation is taken only if it is expected to be PROMISED times as fast as a path without any.
PROMISED = 1.2
NEVER = (1 << 63) - 1  # A number of ids that no call reaches.


class GatherPlan(NamedTuple):
    """The rules by which a GPU sorts ids by windows. `describe_table` takes the first three numbers.

    Attributes:
        least_bucketed: the smallest number of ids that are sorted if the ids are on the GPU.
        window_bits: a window has 2^window_bits items.
        bucketed_sms: the number of multiprocessors that fetch the items of sorted ids. 0: all.
        least_from_cpu: the smallest number of ids that are sorted if the ids come from the CPU.
    """

    least_bucketed: int = NEVER
    window_bits: int = 0
    bucketed_sms: int = 0
    least_from_cpu: int = NEVER


def plan_of(table: Table, machine: Calibration, device: torch.device) -> GatherPlan:
    """Returns the plan of a table for a GPU. Ids are never sorted if the table is in device memory, or if its slots and
    overflow have fewer bytes than the calibration's `reach_bytes`."""
    all_sms = torch.cuda.get_device_properties(device).multi_processor_count
    windows = window_bits(table.geometry.num_items, spread_bytes(table)), bucketed_sms(table, machine, all_sms)
    if table.device.type == "cuda" or spread_bytes(table) < machine.reach_bytes:
        return GatherPlan(NEVER, *windows)
    return GatherPlan(least_bucketed(table, True, machine), *windows, least_bucketed(table, False, machine))


def least_bucketed(table: Table, ids_on_gpu: bool, machine: Calibration) -> int:
    """Returns the smallest number of ids for which sorting by windows pays, or NEVER if it never pays. ids_on_gpu:
    whether the ids are on the GPU."""
    in_order_given = fetched_ns(table, machine)

    def pays(num_ids: int) -> bool:
        return PROMISED * bucketed_ns(table, num_ids, ids_on_gpu, machine) < in_order_given

    # If sorting pays for some number of ids, it also pays for more ids, so bisection finds the smallest number.
    counts = range(LEAST_BUCKETED_IDS, MOST_BUCKETED_IDS)
    place = bisect.bisect_left(counts, True, key=pays)
    return counts[place] if place < len(counts) else NEVER


def stages(table: Table, num_ids: int, machine: Calibration) -> bool:
    """Returns whether the CPU should gather the items of a pinned table, for num_ids ids that are on the CPU."""
    if num_ids * table.geometry.item_bytes < LEAST_STAGED_BYTES or spread_bytes(table) < machine.reach_bytes:
        return False
    by_gpu = min(fetched_ns(table, machine), bucketed_ns(table, num_ids, False, machine))
    return PROMISED * staged_ns(table, num_ids, machine, torch.get_num_threads()) < by_gpu


def spread_bytes(table: Table) -> int:
    """Returns the total size in bytes of slots and overflow. Random rows may lie anywhere in this memory."""
    return table.slots.numel() + table.overflow.numel()


def stored_item_bytes(table: Table) -> float:
    """Returns the mean size in bytes of a stored item, including unused bytes of slots and overflow."""
    return spread_bytes(table) / max(1, table.geometry.num_items)


def fetched_ns(table: Table, machine: Calibration, translation_ns: float | None = None) -> float:
    """Estimates the mean time, in ns, in which a GPU fetches an item of a pinned table. In this time the link transfers
    the item's bytes, addresses are translated, and the item is written to device memory; these steps overlap.

    Args:
        machine: the calibration whose rates are used.
        translation_ns: the time, in ns, that the translation of an item's addresses alone takes. None: the time for
            items in random order.
    """
    link_ns = max(stored_item_bytes(table) / machine.read_gbps, machine.least_row_ns)
    if translation_ns is None:
        translation_ns = machine.random_ns(spread_bytes(table))
    return max(math.hypot(link_ns, translation_ns), table.geometry.item_bytes / machine.device_copy_gbps)


def bucketed_ns(table: Table, num_ids: int, ids_on_gpu: bool, machine: Calibration) -> float:
    """Estimates the mean time, in ns, in which a GPU fetches an item of a pinned table if num_ids ids are first sorted
    by windows. The time for sorting, divided by num_ids, is included."""
    translation_ns = machine.sorted_ns(spread_bytes(table), num_ids)
    prepared_ns = PARTITION_NS if ids_on_gpu else PARTITION_NS + LAUNCHES_NS
    return fetched_ns(table, machine, translation_ns) + prepared_ns / num_ids + PARTITION_ID_NS


def staged_ns(table: Table, num_ids: int, machine: Calibration, num_threads: int) -> float:
    """Estimates the mean time, in ns, in which the CPU gathers an item and the copy engine copies it to the GPU. The
    time in which the pipeline begins and ends, divided by num_ids, is included."""
    gbps = min(num_threads * machine.gather_gbps, machine.copy_in_gbps)
    return stored_item_bytes(table) / (STAGED_SHARE * gbps) + STAGING_NS / num_ids


def bucketed_sms(table: Table, machine: Calibration, all_sms: int) -> int:
    """Returns the number of SMs that should fetch items of sorted ids, or 0 for all SMs. For raw rows, a few SMs are
    enough; with more SMs, the rows that are fetched at the same time would lie farther apart. Coded rows need enough
    SMs to decode and write rows at the rate of the link, and no fewer than raw rows need. all_sms: the number of SMs of
    the GPU."""
    if table.codebook is None:
        return machine.bucketed_sms
    stored_bytes = spread_bytes(table) / max(1, table.num_rows)
    work = work_of(table.codebook, table.row_bytes, stored_bytes)
    decode_ns = max(work / coder_rates(table.codebook, machine).work_per_ns, table.row_bytes / machine.memset_gbps)
    link_ns = max(stored_bytes / machine.read_gbps, machine.least_row_ns)
    sms = max(machine.bucketed_sms, math.ceil(all_sms * decode_ns / link_ns))
    return sms if sms < all_sms else 0


def window_bits(num_items: int, num_bytes: int) -> int:
    """Returns the smallest b for which a window of 2^b items has at least WINDOW_BYTES bytes, and the table has at most
    MAX_WINDOWS windows. num_bytes: the total size in bytes of all stored items."""
    num_items = max(1, num_items)
    items = max(-(-num_items // MAX_WINDOWS), WINDOW_BYTES * num_items // max(1, num_bytes), 1)
    return (items - 1).bit_length()


def looks_sorted(ids: torch.Tensor) -> bool:
    """Returns whether ids seem to be in increasing order, judged by about a thousand of them. Checking all ids would
    take longer than sorting them on a GPU. The ids must be on the CPU."""
    some = ids[:: max(1, ids.numel() // 1024)]
    return bool((some[1:] >= some[:-1]).all())
