"""How the ids of a call are fetched from host memory, by the rates of the calibration in force: in the order given, in
the order of windows of the table, or by the CPU and the copy engine.

A GPU that fetches at random places of 0.5 GiB of pinned memory is bound by bytes. From 4 GiB, 1,000,000 rows of 128 B
come at 49 million rows a second, and at 370 to 400 million if their ids are first put in the order of windows of 64 KiB
to 256 MiB. 100,000 rows gain 3.5 times from windows of 64 KiB there, and 1.6 times from 16 GiB
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

WINDOW_BYTES = 64 << 10  # at least, of a window
MAX_WINDOWS = 1 << 16  # IBP_MAX_WINDOWS
LEAST_BUCKETED_IDS = 1 << 14  # fewer are not put in order: the kernels that do it would take longer than they save
MOST_BUCKETED_IDS = 1 << 31  # ids are counted in 32 bits where they are put in order
LEAST_STAGED_BYTES = 4 << 20  # of items: fewer do not fill the CPU's pipeline
# What the ways cost beside the rows themselves, by benchmarks/paths.py (an H100). A GPU takes PARTITION_NS, and
# PARTITION_ID_NS for each id, to put ids in order; if the ids come from the CPU, the GPU waits for the launches, too
# (LAUNCHES_NS). STAGING_NS is the time in which the CPU's pipeline begins and ends; it stages rows at STAGED_SHARE of
# the rate of its threads and the copy engine alone. A way that prepares something must promise to be PROMISED times as
# fast as one that does not.
PARTITION_NS, PARTITION_ID_NS, LAUNCHES_NS = 16e3, 0.055, 90e3
STAGING_NS, STAGED_SHARE = 100e3, 0.7
PROMISED = 1.2
NEVER = (1 << 63) - 1  # ids


class Plan(NamedTuple):
    """When a GPU puts ids in order, and how. `describe_table` takes all but the last number.

    least_bucketed, least_from_cpu: the fewest ids that are put in order, if they are on the GPU, and if they come from
        the CPU.
    window_bits: windows have 2^window_bits items.
    bucketed_sms: multiprocessors that then fetch the items; 0: all.
    """

    least_bucketed: int = NEVER
    window_bits: int = 0
    bucketed_sms: int = 0
    least_from_cpu: int = NEVER


def plan_of(table: Table, machine: Calibration, device: torch.device) -> Plan:
    """Returns the plan of a table for a GPU. Rows in device memory, and rows of pinned memory that address translation
    reaches, are fetched in the order given."""
    all_sms = torch.cuda.get_device_properties(device).multi_processor_count
    windows = window_bits(table.geometry.num_items, spread_bytes(table)), bucketed_sms(table, machine, all_sms)
    if table.device.type == "cuda" or spread_bytes(table) < machine.reach_bytes:
        return Plan(NEVER, *windows)
    return Plan(least_bucketed(table, True, machine), *windows, least_bucketed(table, False, machine))


def least_bucketed(table: Table, ids_on_gpu: bool, machine: Calibration) -> int:
    """Returns how many ids there must be at least so that it pays to put them in order; NEVER if it never does."""
    in_order_given = fetched_ns(table, machine)

    def pays(num_ids: int) -> bool:
        return PROMISED * bucketed_ns(table, num_ids, ids_on_gpu, machine) < in_order_given

    counts = range(LEAST_BUCKETED_IDS, MOST_BUCKETED_IDS)  # if it pays for a number of ids, it does for more
    place = bisect.bisect_left(counts, True, key=pays)
    return counts[place] if place < len(counts) else NEVER


def stages(table: Table, num_ids: int, machine: Calibration) -> bool:
    """Returns whether it pays that the CPU gathers items of a pinned table whose ids it has."""
    if num_ids * table.geometry.item_bytes < LEAST_STAGED_BYTES or spread_bytes(table) < machine.reach_bytes:
        return False
    by_gpu = min(fetched_ns(table, machine), bucketed_ns(table, num_ids, False, machine))
    return PROMISED * staged_ns(table, num_ids, machine, torch.get_num_threads()) < by_gpu


def spread_bytes(table: Table) -> int:
    """Returns the bytes of the slots and the overflow: the memory that fetches of rows at random places are spread
    over."""
    return table.slots.numel() + table.overflow.numel()


def stored_item_bytes(table: Table) -> float:
    """Returns the bytes that the link brings for an item of a table, on average."""
    return spread_bytes(table) / max(1, table.geometry.num_items)


def fetched_ns(table: Table, machine: Calibration, translation_ns: float | None = None) -> float:
    """Returns the time, in ns, in which a GPU fetches an item of a pinned table, by a machine's rates: the link brings
    its bytes while addresses are translated, and it is written to device memory.

    translation_ns: the time that translation takes alone; None: that of items in any order."""
    link_ns = max(stored_item_bytes(table) / machine.read_gbps, machine.least_row_ns)
    if translation_ns is None:
        translation_ns = machine.random_ns(spread_bytes(table))
    return max(math.hypot(link_ns, translation_ns), table.geometry.item_bytes / machine.device_copy_gbps)


def bucketed_ns(table: Table, num_ids: int, ids_on_gpu: bool, machine: Calibration) -> float:
    """Returns the same for num_ids items in the order of windows, with the time in which they are put in order."""
    translation_ns = machine.sorted_ns(spread_bytes(table), num_ids)
    prepared_ns = PARTITION_NS if ids_on_gpu else PARTITION_NS + LAUNCHES_NS
    return fetched_ns(table, machine, translation_ns) + prepared_ns / num_ids + PARTITION_ID_NS


def staged_ns(table: Table, num_ids: int, machine: Calibration, num_threads: int) -> float:
    """Returns the time, in ns, in which the CPU gathers an item and the copy engine moves it."""
    gbps = min(num_threads * machine.gather_gbps, machine.copy_in_gbps)
    return stored_item_bytes(table) / (STAGED_SHARE * gbps) + STAGING_NS / num_ids


def bucketed_sms(table: Table, machine: Calibration, all_sms: int) -> int:
    """Returns how many of a GPU's SMs fetch items in the order of windows, or 0 for all. Few are enough for raw rows,
    and with more of them the rows that are fetched at the same time lie farther apart. Coded rows get as many as decode
    and write them at the rate at which the link brings them."""
    if table.codebook is None:
        return machine.bucketed_sms
    stored_bytes = spread_bytes(table) / max(1, table.num_rows)
    work = work_of(table.codebook, table.row_bytes, stored_bytes)
    decode_ns = max(work / coder_rates(table.codebook, machine).work_per_ns, table.row_bytes / machine.memset_gbps)
    link_ns = max(stored_bytes / machine.read_gbps, machine.least_row_ns)
    sms = max(machine.bucketed_sms, math.ceil(all_sms * decode_ns / link_ns))
    return sms if sms < all_sms else 0


def window_bits(num_items: int, num_bytes: int) -> int:
    """Returns the least power of two of items in a window that gives at least WINDOW_BYTES and at most MAX_WINDOWS
    windows. num_bytes: bytes of all items as stored."""
    num_items = max(1, num_items)
    items = max(-(-num_items // MAX_WINDOWS), WINDOW_BYTES * num_items // max(1, num_bytes), 1)
    return (items - 1).bit_length()


def looks_sorted(ids: torch.Tensor) -> bool:
    """Returns whether CPU ids are in order at a thousand places: looking at all of them costs more than putting them in
    order on a GPU."""
    some = ids[:: max(1, ids.numel() // 1024)]
    return bool((some[1:] >= some[:-1]).all())
