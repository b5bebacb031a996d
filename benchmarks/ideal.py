"""The rate that the hardware allows: what a measured rate is compared with.

The link's rates are those of the calibration in force (`ibp.calibration.calibrate`): measured on this machine if it was
calibrated, else an H200's on PCIe 5 x16.
"""

import torch

import ibp
from ibp._layout.geometry import stored_sizes

SECTOR_BYTES = 32
# A kernel's reads reach host memory as requests for a line or less. What a line takes of the link beside its own bytes:
# with it raw rows of 320 and 576 B, which end within lines, come at the same share of what is allowed as rows of whole
# lines (families.csv).
LINE_BYTES, LINE_COST = 128, 29
MACHINE = LINK_KERNEL_GBPS = LINK_COPY_GBPS = LINK_REQUEST_NS = None  # see reckon_with


def reckon_with(machine):
    """Takes the link's rates of an `ibp.calibration.Calibration`."""
    global MACHINE, LINK_KERNEL_GBPS, LINK_COPY_GBPS, LINK_REQUEST_NS
    MACHINE = machine
    LINK_KERNEL_GBPS = machine.read_gbps  # kernels reading pinned host memory
    LINK_COPY_GBPS = machine.copy_in_gbps  # copy engine, host to device, from 64 MiB up
    LINK_REQUEST_NS = machine.least_row_ns  # a request of a kernel takes at least this, however short


reckon_with(ibp.calibration.H200)  # until a run on a GPU begins

ROWS_PER_BASE = 32  # FORMAT.md section 2
OVERFLOW_ALIGN = 32  # FORMAT.md section 3


def units_of_range(start, num_bytes, unit_bytes=SECTOR_BYTES):
    """Sectors, or other units, that num_bytes bytes from address start touch (int64 tensors); none of no bytes."""
    last = (start + num_bytes - 1) // unit_bytes
    return torch.where(num_bytes > 0, last - start // unit_bytes + 1, 0)


def _request_ns(sectors):
    """Time of the link for a request for so many sectors of one line; none of no sectors."""
    gbps = LINK_KERNEL_GBPS * (1 + LINE_COST / LINE_BYTES)  # with whole lines, LINK_KERNEL_GBPS of rows
    ns = torch.clamp((SECTOR_BYTES * sectors + LINE_COST) / gbps, min=LINK_REQUEST_NS)
    return torch.where(sectors > 0, ns, 0.0)


def link_ns_of_range(start, num_bytes):
    """Time of the link for a kernel that reads them, in ns (float tensors): a request for each line that they touch."""
    lines = units_of_range(start, num_bytes, LINE_BYTES)
    to_line_end = LINE_BYTES - start % LINE_BYTES
    first = units_of_range(start, torch.minimum(num_bytes, to_line_end))
    behind = (num_bytes - to_line_end).clamp(min=0)
    last = units_of_range(torch.zeros_like(start), torch.where(lines > 1, (behind - 1) % LINE_BYTES + 1, 0))
    whole = _request_ns(torch.full_like(start, LINE_BYTES // SECTOR_BYTES))
    return _request_ns(first) + _request_ns(last) + whole * (lines - 2).clamp(min=0)


def stored_row_bytes(table):
    """Bytes of every row as stored: its entry of `lengths`, all its bytes where that is 0 or there is none, and none of
    a default row's. int64, on the table's device.
    """
    original = original_bytes(table)
    valid = torch.full((table.num_rows,), table.row_bytes, dtype=torch.int64, device=table.slots.device)
    if table.num_rows:
        valid[-1] = original - (table.num_rows - 1) * table.row_bytes
    if table.lengths is None or table.lengths.numel() == 0:
        return valid
    return stored_sizes(table.lengths, table.row_bytes, valid)


def original_bytes(table):
    """Bytes of the tensor that the table holds."""
    num_elements = 1
    for extent in table.shape:
        num_elements *= extent
    return num_elements * table.dtype.itemsize


def overflow_starts(table, part):
    """Where each row's overflow part begins in `overflow` (FORMAT.md section 3). part: bytes of every row's part."""
    if table.bases is None or table.bases.numel() == 0:
        return torch.zeros_like(part)
    room = part if table.slot_bytes == 0 else (part + OVERFLOW_ALIGN - 1) // OVERFLOW_ALIGN * OVERFLOW_ALIGN
    before = torch.cumsum(room, 0) - room
    group = torch.arange(len(part), device=part.device) // ROWS_PER_BASE
    return table.bases[group] + before - before[group * ROWS_PER_BASE]


def _of_rows(table, rows, of_range):
    """What `of_range` says of the slot and of the overflow part of each of `rows`, added up, from the stored lengths
    and the real addresses. Row bytes only: not the row index, which is a copy in device memory. rows: int64 row
    numbers, or None for all rows. On the device of `rows`, or of the table."""
    stored = stored_row_bytes(table)
    in_slot = torch.clamp(stored, max=table.slot_bytes)
    part = stored - in_slot
    slot_start = (
        table.slots.data_ptr() % LINE_BYTES + torch.arange(table.num_rows, device=stored.device) * table.slot_bytes
    )
    part_start = table.overflow.data_ptr() % LINE_BYTES + overflow_starts(table, part)
    found = of_range(slot_start, in_slot) + of_range(part_start, part)
    return found if rows is None else found.to(rows.device)[rows.to(torch.int64)]


def row_sectors(table, rows=None):
    """Sectors that reading each of `rows` alone touches, see `_of_rows`."""
    return _of_rows(table, rows, units_of_range)


def row_link_ns(table, rows=None):
    """Time of the link for fetching each of `rows` alone, in ns, see `_of_rows`."""
    return _of_rows(table, rows, link_ns_of_range)


def gather_gbps(output_bytes, link_ns, memset_gbps):
    """Ideal rate of a gather from pinned memory: the link, link_ns a row, or the writing of the output, whichever
    takes longer."""
    return output_bytes / max(float(link_ns.sum()), output_bytes / memset_gbps)


def tensor_gbps(num_bytes, link_bytes):
    """Ideal rate of a tensor of num_bytes bytes brought to the GPU whole: link_bytes of it by the copy engine."""
    return LINK_COPY_GBPS * num_bytes / link_bytes


def device_gbps(num_bytes, moved_bytes, copy_gbps, memset_gbps=float("inf")):
    """Ideal rate of num_bytes bytes from device memory to device memory: moved_bytes read and written at the traffic of
    a device copy (twice its rate), and not faster than a memset where num_bytes is what is written."""
    return min(2 * copy_gbps * num_bytes / moved_bytes, memset_gbps)
