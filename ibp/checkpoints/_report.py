"""What became of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._common.statistics import share_saved
from .._files.fields import as_json, dtype_of


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
        name: in the checkpoint.
        dtype, shape: of the tensor.
        scheme: "ibp" or "planes"; None of a tensor that is kept as it is.
        num_bytes: of the tensor.
        stored_bytes: of the file that it takes, index and padding included, codebook apart.
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
        """The fields as JSON has them."""
        return as_json(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> TensorReport:
        """What `as_dict` gave."""
        return cls(**{**fields, "dtype": dtype_of(fields["dtype"]), "shape": tuple(fields["shape"])})


@dataclass(frozen=True)
class CheckpointReport:
    """What `compress` wrote.

    Example:
        >>> torch.save({"w": torch.randn(1000, 256), "b": torch.zeros(256)}, "model.pt")
        >>> report = ibp.checkpoints.compress("model.pt", "model.ibp", device="cpu")
        >>> report.path, report.num_bytes, f"{report.savings:.0%}"
        ('model.ibp', 1025024, '16%')

    Attributes:
        path: what to open: the file, the index of a set of files, or the directory of several files that are no set;
            text, of a URL the URL.
        files: paths of the files with tensors, within their directory.
        tensors: a `TensorReport` for each tensor, in the order of the files.
        num_bytes: of all tensors.
        file_bytes: of all files, headers and checksums included.
        kept_files: how many files an earlier, interrupted call had finished.
        peak_bytes: the most memory of its own (RssAnon of Linux) that this process was seen to have meanwhile.
        other_files: paths of the files that were copied, or written anew, beside them where a directory was compressed.
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
        """`share_saved`: 1 - file_bytes / num_bytes; negative where headers take more than is saved."""
        return share_saved(self.num_bytes, self.file_bytes)

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        own = {**vars(self), "savings": self.savings, "files": list(self.files), "other_files": list(self.other_files)}
        return {**own, "tensors": [tensor.as_dict() for tensor in self.tensors]}

    def __repr__(self) -> str:
        coded = sum(tensor.scheme is not None for tensor in self.tensors)
        return (
            f"ibp.checkpoints.CheckpointReport({self.path!r}, {len(self.files)} files, {len(self.tensors)} tensors, "
            f"{coded} of them compressed, {self.num_bytes:,} -> {self.file_bytes:,} bytes, {self.savings:.1%} saved)"
        )


class PeakMemory:
    """The most memory of its own that this process was seen to have."""

    _BETWEEN_BYTES = 64 << 20  # of data: a look takes as long as coding half a megabyte

    def __init__(self) -> None:
        self.num_bytes, self._passed_bytes = 0, 0
        self.look()

    def passed(self, num_bytes: int) -> None:
        """Looks now and then; called when num_bytes more bytes of data have passed."""
        self._passed_bytes += num_bytes
        if self._passed_bytes >= self._BETWEEN_BYTES:
            self._passed_bytes = 0
            self.look()

    def look(self) -> None:
        """Looks once; without Linux's /proc the peak stays 0."""
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return
        found = next((line for line in lines if line.startswith("RssAnon:")), "RssAnon: 0 kB")
        self.num_bytes = max(self.num_bytes, 1024 * int(found.split()[1]))


def joined_report(path: str, records: Sequence[dict[str, Any]], kept_files: int, peak_bytes: int) -> CheckpointReport:
    """The report of shards by their records (see `journal`)."""
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
