"""Computes the rate that the hardware allows, with which measured rates are compared.

The link's rates are those of the calibration in force (`ibp.calibration.calibrate`). They were measured on this machine
if it was calibrated, and are otherwise an H200's on PCIe 5 x16.
"""

import torch

import ibp
from ibp._rows.geometry import stored_sizes

SECTOR_BYTES = 32
# A kernel's reads reach host memory as requests for a line or less. LINE_COST is the number of bytes that a request
# takes on the link beside its own bytes. With this value, raw rows of 320 and 576 B, which end within lines, reach the
# same share of the ideal as rows of whole lines (families.csv).
LINE_BYTES, LINE_COST = 128, 29
MACHINE = LINK_KERNEL_GBPS = LINK_COPY_GBPS = LINK_REQUEST_NS = None  # These are set by reckon_with.


def reckon_with(machine):
    """Takes the link's rates from an `ibp.calibration.Calibration`."""
    global MACHINE, LINK_KERNEL_GBPS, LINK_COPY_GBPS, LINK_REQUEST_NS
    MACHINE = machine
    LINK_KERNEL_GBPS = machine.read_gbps  # Kernels read pinned host memory at this rate.
    LINK_COPY_GBPS = machine.copy_in_gbps  # The copy engine copies at least 64 MiB to the device at this rate.
    LINK_REQUEST_NS = machine.least_row_ns  # A kernel's request takes at least this long.


reckon_with(ibp.calibration.H200)  # An H200's rates hold until a run on a GPU begins.

ROWS_PER_BASE = 32  # This is a constant of FORMAT.md, section 2.
OVERFLOW_ALIGN = 32  # This is a constant of FORMAT.md, section 3.


def units_of_range(start, num_bytes, unit_bytes=SECTOR_BYTES):
    """Returns the number of sectors, or of other units, that num_bytes bytes from address start touch. int64
    tensors."""
    last = (start + num_bytes - 1) // unit_bytes
    return torch.where(num_bytes > 0, last - start // unit_bytes + 1, 0)


def _request_ns(sectors):
    """Returns the time of the link for a request for some sectors of one line, in ns. It is 0 if there are no
    sectors."""
    gbps = LINK_KERNEL_GBPS * (1 + LINE_COST / LINE_BYTES)  # Whole lines of rows then come at LINK_KERNEL_GBPS.
    ns = torch.clamp((SECTOR_BYTES * sectors + LINE_COST) / gbps, min=LINK_REQUEST_NS)
    return torch.where(sectors > 0, ns, 0.0)


def link_ns_of_range(start, num_bytes):
    """Returns the time of the link for a kernel that reads num_bytes bytes from address start, in ns (float tensors).
    There is one request for each line that the bytes touch."""
    lines = units_of_range(start, num_bytes, LINE_BYTES)
    to_line_end = LINE_BYTES - start % LINE_BYTES
    first = units_of_range(start, torch.minimum(num_bytes, to_line_end))
    behind = (num_bytes - to_line_end).clamp(min=0)
    last = units_of_range(torch.zeros_like(start), torch.where(lines > 1, (behind - 1) % LINE_BYTES + 1, 0))
    whole = _request_ns(torch.full_like(start, LINE_BYTES // SECTOR_BYTES))
    return _request_ns(first) + _request_ns(last) + whole * (lines - 2).clamp(min=0)


def stored_row_bytes(table):
    """Returns the stored bytes of every row, int64 on the table's device: its entry of `lengths`; all its bytes if the
    entry is 0 or if there are no lengths; 0 for a default row."""
    original = original_bytes(table)
    valid = torch.full((table.num_rows,), table.row_bytes, dtype=torch.int64, device=table.slots.device)
    if table.num_rows:
        valid[-1] = original - (table.num_rows - 1) * table.row_bytes
    if table.lengths is None or table.lengths.numel() == 0:
        return valid
    return stored_sizes(table.lengths, table.row_bytes, valid)


def original_bytes(table):
    """Returns the bytes of the tensor that the table holds."""
    num_elements = 1
    for extent in table.shape:
        num_elements *= extent
    return num_elements * table.dtype.itemsize


def overflow_starts(table, part):
    """Returns where each row's overflow part begins in `overflow` (FORMAT.md section 3). part: bytes of every row's
    part."""
    if table.bases is None or table.bases.numel() == 0:
        return torch.zeros_like(part)
    room = part if table.slot_bytes == 0 else (part + OVERFLOW_ALIGN - 1) // OVERFLOW_ALIGN * OVERFLOW_ALIGN
    before = torch.cumsum(room, 0) - room
    group = torch.arange(len(part), device=part.device) // ROWS_PER_BASE
    return table.bases[group] + before - before[group * ROWS_PER_BASE]


def _of_rows(table, rows, of_range):
    """Returns the sum of what `of_range` returns for the slot and for the overflow part of each row, computed from
    stored lengths and real addresses. The row index is not included, because it is copied to device memory. rows: int64
    row numbers, or None for all rows. The result is on the device of `rows`, or of the table."""
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
    """Returns the sectors that reading each row alone touches. rows: see `_of_rows`."""
    return _of_rows(table, rows, units_of_range)


def row_link_ns(table, rows=None):
    """Returns the time of the link for fetching each row alone, in ns. rows: see `_of_rows`."""
    return _of_rows(table, rows, link_ns_of_range)


def gather_gbps(output_bytes, link_ns, memset_gbps):
    """Returns the ideal rate of a gather from pinned memory. The bottleneck is the link or writing the output,
    whichever takes longer. link_ns: time of the link for each row."""
    return output_bytes / max(float(link_ns.sum()), output_bytes / memset_gbps)


def tensor_gbps(num_bytes, link_bytes):
    """Returns the ideal rate of bringing a tensor of num_bytes bytes to the GPU, if the copy engine moves link_bytes
    for it."""
    return LINK_COPY_GBPS * num_bytes / link_bytes


def device_gbps(num_bytes, moved_bytes, copy_gbps, memset_gbps=float("inf")):
    """Returns the ideal rate of num_bytes bytes from device memory to device memory. moved_bytes are read and written
    at the traffic of a device copy, which is twice its rate. If num_bytes are written, the rate is not above a
    memset's."""
    return min(2 * copy_gbps * num_bytes / moved_bytes, memset_gbps)
