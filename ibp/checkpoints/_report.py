"""The report of what became of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._common.statistics import share_saved
from .._files import as_json, dtype_of


@dataclass(frozen=True)
class TensorReport:
    """A tensor of a compressed checkpoint.

    Example:
        >>> torch.save({"w": torch.randn(1000, 256), "b": torch.zeros(256)}, "model.pt")
        >>> for tensor in ibp.checkpoints.compress("model.pt", "model.ibp", device="cpu").tensors:
        ...     print(tensor.name, tensor.scheme, f"{tensor.savings:.0%}")
        w planes 17%
        b None 0%

    Attributes:
        name: name in the checkpoint.
        dtype, shape: dtype and shape of the tensor.
        scheme: "ibp" or "planes". None if the tensor is kept as it is.
        num_bytes: bytes of the tensor.
        stored_bytes: bytes that it takes in the file, index and padding included, without the codebook.
        file: path of its file, within the directory of the output.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    scheme: str | None
    num_bytes: int
    stored_bytes: int
    file: str

    @property
    def savings(self) -> float:
        """`share_saved` of the tensor: 1 - stored_bytes / num_bytes."""
        return share_saved(self.num_bytes, self.stored_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields in the form for JSON."""
        return as_json(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> TensorReport:
        """Returns the report that `as_dict` was called on."""
        return cls(**{**fields, "dtype": dtype_of(fields["dtype"]), "shape": tuple(fields["shape"])})


@dataclass(frozen=True)
class CheckpointReport:
    """What `compress` has written.

    Example:
        >>> torch.save({"w": torch.randn(1000, 256), "b": torch.zeros(256)}, "model.pt")
        >>> report = ibp.checkpoints.compress("model.pt", "model.ibp", device="cpu")
        >>> report.path, report.num_bytes, f"{report.savings:.0%}"
        ('model.ibp', 1025024, '16%')

    Attributes:
        path: the path to open: the file, the index of a set of files, or the directory of several files that are not a
            set. For a URL it is the URL.
        files: paths of the files with tensors, within their directory.
        tensors: a `TensorReport` for each tensor, in the order of the files.
        num_bytes: bytes of all tensors.
        file_bytes: bytes of all files, headers and checksums included.
        kept_files: how many files an earlier, interrupted call had finished.
        peak_bytes: the largest amount of its own memory (RssAnon of Linux) that this process was seen to have during
            the call.
        other_files: paths of the files beside them that were copied or written, if a directory was compressed.
    """

    path: str
    files: tuple[str, ...]
    tensors: tuple[TensorReport, ...]
    num_bytes: int
    file_bytes: int
    kept_files: int
    peak_bytes: int
    other_files: tuple[str, ...] = ()

    @property
    def savings(self) -> float:
        """`share_saved`: 1 - file_bytes / num_bytes; negative if headers take more than is saved."""
        return share_saved(self.num_bytes, self.file_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields in the form for JSON."""
        own = {**vars(self), "savings": self.savings, "files": list(self.files), "other_files": list(self.other_files)}
        return {**own, "tensors": [tensor.as_dict() for tensor in self.tensors]}

    def __repr__(self) -> str:
        coded = sum(tensor.scheme is not None for tensor in self.tensors)
        return (
            f"ibp.checkpoints.CheckpointReport({self.path!r}, {len(self.files)} files, {len(self.tensors)} tensors, "
            f"{coded} of them compressed, {self.num_bytes:,} -> {self.file_bytes:,} bytes, {self.savings:.1%} saved)"
        )


class PeakMemory:
    """Notes the largest amount of its own memory that this process was seen to have."""

    _BETWEEN_BYTES = 64 << 20  # bytes of data between two looks; a look takes as long as coding half a megabyte

    def __init__(self) -> None:
        self.num_bytes, self._passed_bytes = 0, 0
        self.look()

    def passed(self, num_bytes: int) -> None:
        """Looks from time to time. It is called when num_bytes more bytes of data have passed."""
        self._passed_bytes += num_bytes
        if self._passed_bytes >= self._BETWEEN_BYTES:
            self._passed_bytes = 0
            self.look()

    def look(self) -> None:
        """Looks once. Without Linux's /proc the peak stays 0."""
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return
        found = next((line for line in lines if line.startswith("RssAnon:")), "RssAnon: 0 kB")
        self.num_bytes = max(self.num_bytes, 1024 * int(found.split()[1]))


def joined_report(path: str, records: Sequence[dict[str, Any]], kept_files: int, peak_bytes: int) -> CheckpointReport:
    """Returns the report of shards from their records (see `journal`)."""
    tensors = tuple(TensorReport.from_dict(fields) for record in records for fields in record["tensors"])
    return CheckpointReport(
        path,
        tuple(record["file"] for record in records),
        tensors,
        sum(tensor.num_bytes for tensor in tensors),
        sum(record["size"] for record in records),
        kept_files,
        peak_bytes,
    )
