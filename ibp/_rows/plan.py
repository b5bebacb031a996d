"""Chooses how the items of a call are fetched from host memory, by the rates of the calibration in force. A GPU fetches
them in the order of the ids given, or in the order of windows of the table; or the CPU gathers them and the copy engine
moves them.

A GPU that fetches rows at random places of 0.5 GiB of pinned memory is limited by the bytes that it reads. In a table
of 4 GiB it fetches 1,000,000 rows of 128 bytes at 49 million rows per second in the order given, and at 370 to 400
million rows per second if their ids are first put in the order of windows of 64 KiB to 256 MiB. With windows of 64 KiB,
100,000 rows are fetched 3.5 times as fast in a table of 4 GiB, and 1.6 times as fast in a table of 16 GiB
(benchmarks/large_table.py, an H200).
"""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._machine.calibration import Calibration
from .._schemes.codebook import coder_rates, work_of

if TYPE_CHECKING:
    from .table import Table

WINDOW_BYTES = 64 << 10  # Smallest size of a window, in bytes.
MAX_WINDOWS = 1 << 16  # Largest number of windows (IBP_MAX_WINDOWS).
# Fewer ids than this are not put in order, because the kernels that do it would take longer than they save.
LEAST_BUCKETED_IDS = 1 << 14
MOST_BUCKETED_IDS = 1 << 31  # The kernels that put ids in order count them in 32 bits.
LEAST_STAGED_BYTES = 4 << 20  # Fewer bytes of items than this do not fill the CPU's pipeline.
# Times that the ways take besides fetching the rows, measured by benchmarks/paths.py on an H100. A GPU takes
# PARTITION_NS, and PARTITION_ID_NS for each id, to put ids in order. If the ids come from the CPU, the GPU also waits
# for the launches (LAUNCHES_NS). The CPU's pipeline takes STAGING_NS to begin and to end. It stages rows at
# STAGED_SHARE of the rate that its threads or the copy engine reach alone. A way that has to prepare something is taken
# only if it is expected to be PROMISED times as fast as a way that does not.
PARTITION_NS, PARTITION_ID_NS, LAUNCHES_NS = 16e3, 0.055, 90e3
STAGING_NS, STAGED_SHARE = 100e3, 0.7
PROMISED = 1.2
NEVER = (1 << 63) - 1  # A number of ids that no call reaches.


class Plan(NamedTuple):
    """The rules by which a GPU sorts ids. `describe_table` takes all numbers except the last.

    Attributes:
        least_bucketed: the smallest number of ids that are put in order if they are on the GPU.
        window_bits: a window has 2^window_bits items.
        bucketed_sms: the number of multiprocessors that then fetch the items. 0: all.
        least_from_cpu: the smallest number of ids that are put in order if they come from the CPU.
    """

    least_bucketed: int = NEVER
    window_bits: int = 0
    bucketed_sms: int = 0
    least_from_cpu: int = NEVER


def plan_of(table: Table, machine: Calibration, device: torch.device) -> Plan:
    """Returns the plan of a table for a GPU. Rows are always fetched in the order given if they are in device memory,
    or in pinned memory of so few bytes that address translation reaches all of them (`reach_bytes`)."""
    all_sms = torch.cuda.get_device_properties(device).multi_processor_count
    windows = window_bits(table.geometry.num_items, spread_bytes(table)), bucketed_sms(table, machine, all_sms)
    if table.device.type == "cuda" or spread_bytes(table) < machine.reach_bytes:
        return Plan(NEVER, *windows)
    return Plan(least_bucketed(table, True, machine), *windows, least_bucketed(table, False, machine))


def least_bucketed(table: Table, ids_on_gpu: bool, machine: Calibration) -> int:
    """Returns the smallest number of ids that it pays to put in order, or NEVER if it never pays."""
    in_order_given = fetched_ns(table, machine)

    def pays(num_ids: int) -> bool:
        return PROMISED * bucketed_ns(table, num_ids, ids_on_gpu, machine) < in_order_given

    counts = range(LEAST_BUCKETED_IDS, MOST_BUCKETED_IDS)  # If it pays for some number of ids, it also pays for more.
    place = bisect.bisect_left(counts, True, key=pays)
    return counts[place] if place < len(counts) else NEVER


def stages(table: Table, num_ids: int, machine: Calibration) -> bool:
    """Returns whether it pays to let the CPU gather the items of a pinned table, for ids that are on the CPU."""
    if num_ids * table.geometry.item_bytes < LEAST_STAGED_BYTES or spread_bytes(table) < machine.reach_bytes:
        return False
    by_gpu = min(fetched_ns(table, machine), bucketed_ns(table, num_ids, False, machine))
    return PROMISED * staged_ns(table, num_ids, machine, torch.get_num_threads()) < by_gpu


def spread_bytes(table: Table) -> int:
    """Returns the bytes of the slots and the overflow, which is the memory that fetches of random rows are spread
    over."""
    return table.slots.numel() + table.overflow.numel()


def stored_item_bytes(table: Table) -> float:
    """Returns how many bytes an item of a table takes as stored, on average."""
    return spread_bytes(table) / max(1, table.geometry.num_items)


def fetched_ns(table: Table, machine: Calibration, translation_ns: float | None = None) -> float:
    """Returns the time, in ns, in which a GPU fetches an item of a pinned table, by a machine's rates. Meanwhile the
    link brings the item's bytes, addresses are translated, and the item is written to device memory.

    Args:
        translation_ns: the time that the translation of an item's addresses takes alone, in ns. None: the time that it
            takes for items in random order.
    """
    link_ns = max(stored_item_bytes(table) / machine.read_gbps, machine.least_row_ns)
    if translation_ns is None:
        translation_ns = machine.random_ns(spread_bytes(table))
    return max(math.hypot(link_ns, translation_ns), table.geometry.item_bytes / machine.device_copy_gbps)


def bucketed_ns(table: Table, num_ids: int, ids_on_gpu: bool, machine: Calibration) -> float:
    """Returns the time, in ns, in which a GPU fetches an item of a pinned table in the order of windows, including an
    item's share of the time in which num_ids ids are put in order."""
    translation_ns = machine.sorted_ns(spread_bytes(table), num_ids)
    prepared_ns = PARTITION_NS if ids_on_gpu else PARTITION_NS + LAUNCHES_NS
    return fetched_ns(table, machine, translation_ns) + prepared_ns / num_ids + PARTITION_ID_NS


def staged_ns(table: Table, num_ids: int, machine: Calibration, num_threads: int) -> float:
    """Returns the time, in ns, in which the CPU gathers an item and the copy engine moves it, including an item's share
    of the time in which the pipeline begins and ends."""
    gbps = min(num_threads * machine.gather_gbps, machine.copy_in_gbps)
    return stored_item_bytes(table) / (STAGED_SHARE * gbps) + STAGING_NS / num_ids


def bucketed_sms(table: Table, machine: Calibration, all_sms: int) -> int:
    """Returns how many of a GPU's SMs fetch items in the order of windows, or 0 for all. For raw rows a few SMs are
    enough; with more SMs the rows that are fetched at the same time would lie farther apart. For coded rows it is the
    smallest number of SMs that decode and write rows as fast as the link delivers them, but at least the number for raw
    rows."""
    if table.codebook is None:
        return machine.bucketed_sms
    stored_bytes = spread_bytes(table) / max(1, table.num_rows)
    work = work_of(table.codebook, table.row_bytes, stored_bytes)
    decode_ns = max(work / coder_rates(table.codebook, machine).work_per_ns, table.row_bytes / machine.memset_gbps)
    link_ns = max(stored_bytes / machine.read_gbps, machine.least_row_ns)
    sms = max(machine.bucketed_sms, math.ceil(all_sms * decode_ns / link_ns))
    return sms if sms < all_sms else 0


def window_bits(num_items: int, num_bytes: int) -> int:
    """Returns b for windows of 2^b items: the smallest b for which a window has at least WINDOW_BYTES bytes and there
    are at most MAX_WINDOWS windows. num_bytes: bytes of all items as stored."""
    num_items = max(1, num_items)
    items = max(-(-num_items // MAX_WINDOWS), WINDOW_BYTES * num_items // max(1, num_bytes), 1)
    return (items - 1).bit_length()


def looks_sorted(ids: torch.Tensor) -> bool:
    """Returns whether about a thousand of the ids, which are on the CPU, are in increasing order. To look at all of
    them takes longer than to put them in order on a GPU."""
    some = ids[:: max(1, ids.numel() // 1024)]
    return bool((some[1:] >= some[:-1]).all())
