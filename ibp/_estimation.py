"""Codebooks and sizes without compressing: `analyze` and `estimate`."""

from __future__ import annotations

import torch

from . import _choice, _rows, _schemes
from ._arguments import number, whole_number
from ._schemes import AnyCodebook, Codebook, PlanesCodebook, measure, total_stored


def analyze(x: torch.Tensor, *, scheme: str = "ibp", sample: float | None = 0.1, chunk_bytes: int | None = None, tau: float | None = None,
            paper: bool = False, row_bytes: int | None = None, device: torch.device | str | int | None = None,
            progress: bool = False) -> Codebook | PlanesCodebook | None:
    """Learns a codebook from a sample of the rows of a tensor (the paper's sections 4.1 and, for samples, 6.1).

    Args:
        x: tensor [N, ...] with elements of 1, 2, 4 or 8 bytes, on the CPU or a GPU.
        scheme: "ibp", "planes", or "auto" for the better one, then None if raw rows are best.
        sample: fraction of the rows to look at, in (0, 1]; at least 1,024 rows are. None: what `compress` looks at.
        chunk_bytes: 1, 2, 4 or 8; None takes the best. Scheme ibp only.
        tau: one threshold for all chunks, in [0.5, 1], as in the paper. None sweeps 0.55 to 1 and takes the best one of each chunk.
        paper: sweep one threshold for all chunks, and give every chunk a participation bit: the paper's own choice and bytes.
        row_bytes: bytes of a row, see `compress`.
        device: where the analysis runs. None: x's GPU, else the current GPU if there is one, else the CPU.
        progress: show a progress bar.

    Raises:
        TypeError: x is not a dense tensor of a supported dtype.
        ValueError: an argument is outside its range.
    """
    _rows.check_tensor(x)
    chunk_bytes, tau, sample = check_learning(scheme, chunk_bytes, tau, sample)
    if paper and scheme != "ibp":
        raise ValueError(f"paper=True is a choice of scheme 'ibp', but scheme is {scheme!r}")
    geometry = _rows.Geometry.of(x, row_bytes)
    request = _schemes.Request(_rows.bytes_of(x), geometry, _rows.working_device(x, device), sample, chunk_bytes, tau, paper, progress=progress)
    return _choice.learn(scheme, request)


def estimate(x: torch.Tensor, codebook: Codebook | PlanesCodebook | None = None, *, row_bytes: int | None = None,
             device: torch.device | str | int | None = None, progress: bool = False) -> int | dict[str, float]:
    """What compressing x would give, without compressing it.

    With a codebook: the exact bytes of rows and codebook, as `compress(x, codebook=codebook)` reports in `stored_bytes`, x's own size where
    nothing would be saved. Without: the savings that each scheme is expected to give, measured on a sample of the rows.

    Args:
        x: tensor [N, ...].
        codebook: from `analyze`, `Codebook.from_masks` or a table; x is cut into rows of `codebook.row_bytes`.
        row_bytes: bytes of a row where no codebook is given, see `compress`.
        device: where rows are measured, as in `analyze`.

    Returns:
        int, bytes; or {"raw": 0.0, "ibp": 0.23, "planes": 0.33}, 1 - stored / original bytes by scheme.

    Raises:
        TypeError, ValueError: as `compress`.
    """
    _rows.check_tensor(x)
    if codebook is None:
        geometry = _rows.Geometry.of(x, row_bytes)
        request = _schemes.Request(_rows.bytes_of(x), geometry, _rows.working_device(x, device), slot_bytes=0, progress=progress)
        return {found.scheme: 1 - found.stored / geometry.num_bytes if geometry.num_bytes else 0.0 for found in _choice.compare(request)}
    check_codebook(codebook)
    geometry = _rows.Geometry.of(x, codebook.row_bytes)
    lengths = measure(_rows.bytes_of(x), codebook, _rows.working_device(x, device), progress)
    return min(total_stored(lengths, geometry) + codebook.nbytes, geometry.num_bytes)


def check_learning(scheme: str, chunk_bytes: int | None, tau: float | None, sample: float | None) -> tuple[int | None, float | None, float | None]:
    """(chunk_bytes, tau, sample) as numbers of Python. Raises TypeError for what is no number, ValueError for what cannot be learned from."""
    chunk_bytes = None if chunk_bytes is None else whole_number("chunk_bytes", chunk_bytes)
    tau, sample = (None if value is None else number(name, value) for name, value in (("tau", tau), ("sample", sample)))
    _schemes.check_scheme(scheme, chunk_bytes=chunk_bytes, tau=tau)
    _schemes.check_sample(sample)
    return chunk_bytes, tau, sample


def check_codebook(codebook) -> None:
    if not isinstance(codebook, AnyCodebook):
        raise TypeError(f"codebook is a {type(codebook).__name__}; wanted an ibp.Codebook, PlanesCodebook or ClusteredCodebook")
