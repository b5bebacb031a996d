"""What rows take with a codebook, as the coders themselves find it."""

from __future__ import annotations

import torch

from .._layout import geometry as _rows
from .._layout import slots
from .codebook import AnyCodebook


def measure(data: torch.Tensor, codebook: AnyCodebook, device: torch.device, progress: bool = False) -> torch.Tensor:
    """Returns the `lengths` of all rows of the bytes (FORMAT.md section 2), uint16 on the device."""
    words, codec, parts = codebook.words(device), codebook.codec, []
    for _, _, block in _rows.blocks(data, codebook.row_bytes, device, "measure" if progress else None):
        parts.append(torch.ops.ibp.measure_rows.default(block, words, codec))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint16, device=device)


def surveyed(data: torch.Tensor, codebook: AnyCodebook, device: torch.device | None = None) -> slots.Survey:
    """What all rows of the bytes take. device: that measures them; None: where they are. Waits for it."""
    rows = _rows.Geometry(data.shape, torch.uint8, codebook.row_bytes)
    return slots.survey(measure(data, codebook, device or data.device), rows)


def stored_share(rows: torch.Tensor, codebook: AnyCodebook) -> float:
    """Bytes of rows, uint8, as stored, to their raw bytes; 1 of no rows. Waits for the device."""
    return surveyed(rows, codebook).stored / rows.numel() if rows.numel() else 1.0


def total_stored(lengths: torch.Tensor, geometry: _rows.Geometry) -> int:
    """Bytes of the coded and raw rows that `lengths` describes."""
    return slots.survey(lengths, geometry).stored
