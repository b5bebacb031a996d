"""`estimate`: estimates the result of compressing a checkpoint or a model from samples of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from .._common.progress import tqdm
from .._common.statistics import share_saved
from .._files import PathLike, as_json
from .._layout.geometry import as_tensor, bytes_of, check_tensor
from .._schemes import Options, Request
from .._schemes.estimation import expected_savings
from ._learning import TRIED_BYTES, CheckpointLearning, Codebooks, sample_of, savings_of
from ._outputs import compressed_bytes, table_bytes
from ._source import Source, SourceTensor, chosen
from ._sources import open_sources

_COMPARED = ("ibp", "planes")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TensorEstimate:
    """An estimate of how `compress` would store a tensor.

    Example:
        >>> torch.save({"w": torch.randn(1000, 256), "b": torch.zeros(256)}, "model.pt")
        >>> for tensor in ibp.checkpoints.estimate("model.pt").tensors:
        ...     print(tensor.name, tensor.num_bytes, tensor.best)
        w 1024000 planes
        b 1024 None

    Attributes:
        name, dtype, shape, num_bytes: name, dtype, shape and size in bytes of the tensor.
        savings: for each scheme, the share of the tensor's bytes that a table would save in a file. The size of the
            table includes its index and its padding, but not its codebook. The share is approximate for schemes that
            `compress` would not choose. The mapping is empty for a tensor that is never coded, because it is smaller
            than 4 KiB, because tables do not support its dtype, or because the patterns do not choose it.
        best: the scheme that `compress` chooses. None if `compress` would store the tensor uncompressed, for example
            because no scheme saves more than 1 %.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int
    savings: Mapping[str, float]
    best: str | None

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of the tensor in a file, as in `TensorReport`."""
        return self.num_bytes - (round(self.savings[self.best] * self.num_bytes) if self.best else 0)


@dataclass(frozen=True)
class CheckpointEstimate:
    """An estimate of the files that `compress` would write for a checkpoint.

    Example:
        >>> torch.save({"w": torch.randn(1000, 256), "b": torch.zeros(256)}, "model.pt")
        >>> estimate = ibp.checkpoints.estimate("model.pt")
        >>> f"{estimate.savings:.0%} of {estimate.num_bytes:,} bytes"
        '16% of 1,025,024 bytes'

    Attributes:
        tensors: a `TensorEstimate` for each tensor.
        num_bytes, stored_bytes: size in bytes of all tensors before and after compression, without headers and
            codebooks.
        file_bytes: size in bytes of the files, with headers, codebooks and checksums.
    """

    tensors: tuple[TensorEstimate, ...]
    num_bytes: int
    stored_bytes: int
    file_bytes: int

    @property
    def savings(self) -> float:
        """1 - file_bytes / num_bytes: an estimate of `CheckpointReport.savings`."""
        return share_saved(self.num_bytes, self.file_bytes)

    def __repr__(self) -> str:
        return (
            f"ibp.checkpoints.CheckpointEstimate({len(self.tensors)} tensors, {self.num_bytes:,} -> "
            f"{self.file_bytes:,} bytes, {self.savings:.1%} saved)"
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as a dict that JSON can hold."""
        tensors = [{**as_json(tensor), "stored_bytes": tensor.stored_bytes} for tensor in self.tensors]
        own = {key: getattr(self, key) for key in ("num_bytes", "stored_bytes", "file_bytes", "savings")}
        return {**own, "tensors": tensors}


def estimate(
    inputs: PathLike | Iterable[PathLike] | torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    level: str = "default",
    row_bytes: int | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    progress: bool = False,
) -> CheckpointEstimate:
    """Estimates, from a sample of rows, how `compress` would store a checkpoint or the state of a model. Nothing is
    written.

    Example:
        >>> torch.save({"w": torch.randn(1000, 256)}, "model.pt")
        >>> estimate = ibp.checkpoints.estimate("model.pt")
        >>> {scheme: f"{savings:.0%}" for scheme, savings in estimate.tensors[0].savings.items()}
        {'ibp': '13%', 'planes': '17%'}
        >>> ibp.checkpoints.estimate(torch.nn.Linear(1024, 512))
        ibp.checkpoints.CheckpointEstimate(2 tensors, 2,099,200 -> 1,65... bytes, 21...% saved)

    Args:
        inputs: as in `compress`; or a model, or its `state_dict()`, on any device. A tensor that has several
            names counts once.
        level, row_bytes: as in `compress`.
        include, exclude: patterns of names, as in `compress`. Other tensors are not compressed.
        progress: whether to show a progress bar.

    Raises:
        FileNotFoundError, SourceFormatError, ibp.FileFormatError: as in `compress`.
        TypeError, ValueError: level or row_bytes is invalid, a pattern of include matches no name, or a tensor of a
            model is of a kind that cannot be compressed.
    """
    learning = CheckpointLearning.of(Options(level=level, row_bytes=row_bytes, device="cpu"))
    if isinstance(inputs, torch.nn.Module):
        inputs = inputs.state_dict()
    with _source_of(inputs) if isinstance(inputs, Mapping) else open_sources(inputs) as source:
        kept = frozenset(source.tensors).difference(chosen(source.tensors, include, exclude))
        codebooks = Codebooks(learning, source.stored(), kept)
        of_others: dict[tuple, float] = {}  # savings of schemes that are not chosen, by kind and scheme
        found, books, stored = [], {}, {}
        for tensor in tqdm(source.stored(), desc="estimate", unit="tensor", disable=not progress):
            codebooks.prepare([tensor])
            taken, savings = codebooks.of(tensor), dict[str, float]()
            num_rows = learning.geometry_of(tensor).num_rows
            for scheme in _COMPARED if codebooks.is_coded(tensor) else ():
                if taken is not None and taken.scheme == scheme:
                    tried = codebooks.savings(tensor)
                    saved = savings_of(_rows_of(tensor, learning), taken) if tried is None else tried
                else:
                    key = *learning.kind_of(tensor), scheme
                    if key not in of_others:
                        rows, geometry = _rows_of(tensor, learning), learning.geometry_of(tensor)
                        of_others[key] = expected_savings(scheme, Request(rows, geometry, _CPU, learning.options, 0))
                    saved = of_others[key]
                in_file = table_bytes(round((1 - saved) * tensor.num_bytes), num_rows)
                savings[scheme] = max(0.0, share_saved(tensor.num_bytes, in_file))
            best = None if taken is None else taken.scheme
            of = TensorEstimate(tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes, savings, best)
            stored[tensor.name] = of.stored_bytes
            books[tensor.name] = taken
            found.append(of)
        file_bytes = compressed_bytes(source, stored, books)
    before, after = sum(tensor.num_bytes for tensor in found), sum(tensor.stored_bytes for tensor in found)
    return CheckpointEstimate(tuple(found), before, after, file_bytes)


def _rows_of(tensor: SourceTensor, learning: CheckpointLearning) -> torch.Tensor:
    """Returns a sample of about 256 KiB of a tensor's rows, or the whole tensor if it is smaller, as uint8 on the
    CPU."""
    if tensor.num_bytes > TRIED_BYTES:
        return sample_of([tensor], learning.geometry_of(tensor), TRIED_BYTES)
    return as_tensor(tensor.read(0, tensor.num_bytes))


def _source_of(state: Mapping[str, torch.Tensor]) -> Source:
    """Returns the tensors of a model as a source. Values that are not tensors are left out."""
    tensors, of_memory = dict[str, SourceTensor](), dict[tuple, SourceTensor]()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            check_tensor(value, name)
            read = partial(_read, bytes_of(value.detach()))
            tensor = SourceTensor(name, value.dtype, tuple(value.shape), read)
            memory = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else (name,)
            first = of_memory.setdefault(memory, tensor)
            tensors[name] = tensor if first is tensor else replace(tensor, base=first)
    return Source("the model", "torch", tensors)


def _read(data: torch.Tensor, start: int, end: int) -> np.ndarray:
    return data[start:end].cpu().numpy()
