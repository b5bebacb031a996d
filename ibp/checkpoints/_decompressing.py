"""Checkpoints as they were: `decompress`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .._common.progress import tqdm
from .._common.sequences import ahead
from .._files.paths import PathLike, file_of, written_to
from .._files.sets import index_of, names_of_set, write_index
from ._model_files import copy_files_beside, weights_of
from ._outputs import FORMATS, SUFFIXES
from ._source import Source, SourceTensor, chosen
from ._sources import open_sources

_BLOCK_BYTES = 4 << 20
_AHEAD = 2  # blocks that are decoded while one is written


def decompress(
    inputs: PathLike | Iterable[PathLike],
    output: PathLike,
    *,
    format: str | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    progress: bool = False,
) -> list[str]:
    """Writes the tensors of a checkpoint as they were: names, shapes, dtypes, bytes and metadata.

    Tensors are decoded and written block by block. Each file appears under its name when it is whole. A set of files
    becomes a set of as many safetensors files, and its index. A directory that becomes a directory keeps its other
    files, and config.json says again what it said before it was compressed.

    Example:
        >>> torch.save({"w": torch.arange(100_000.0)}, "model.pt")
        >>> report = ibp.checkpoints.compress("model.pt", "model.ibp", device="cpu")
        >>> ibp.checkpoints.decompress("model.ibp", "again.pt")
        ['again.pt']
        >>> torch.load("again.pt")["w"][:3]
        tensor([0., 1., 2.])

    Args:
        inputs: as of `ibp.checkpoints.compress`; usually a file of ibp, an index or a directory of them.
        output: path of the file; a directory, for "model.safetensors" in it; or a URL of fsspec.
        format: "safetensors", "npy" (one tensor), "npz" or "torch" (torch.save, which needs all of it in memory).
            None: by the suffix of the output.
        include, exclude: patterns of names ("*.weight", as fnmatch has them): only tensors that match one of include,
            and none of exclude, are written.
        progress: show a bar.

    Returns:
        Paths or URLs of the files that were written, the index of a set last.

    Raises:
        FileNotFoundError: there is no such input.
        ibp.FileFormatError, SourceFormatError, ibp.CorruptTableError: an input is damaged.
        ValueError: the format is none, or does not have a tensor's dtype; or the patterns leave no tensor.
        OSError: a file cannot be read or written.
    """
    with open_sources(inputs) as opened:
        source = opened.only(chosen(opened.tensors, include, exclude))
        if opened.tensors and not source.tensors:
            raise ValueError(f"{opened.path} has no tensor whose name the patterns choose")
        written = write_source(source, weights_of(inputs, output), format, "decompress", progress)
    copy_files_beside(inputs, output, is_coded=False)
    return written


def write_source(source: Source, output: PathLike, format: str | None, what: str, progress: bool) -> list[str]:
    """Writes the tensors of a source. Returns the paths or URLs of the files; what: named by the bar, the others are
    as of `decompress`."""
    with written_to(output) as target:
        kind = format or SUFFIXES.get(target.suffix.lower(), "safetensors")
        if kind not in FORMATS:
            raise ValueError(f"format is {kind!r}; wanted one of {sorted(FORMATS)}")
        target.parent.mkdir(parents=True, exist_ok=True)
        shown = file_of(output)
        with (
            tqdm(total=source.num_bytes, desc=what, unit="B", unit_scale=True, disable=not progress) as bar,
            ThreadPoolExecutor(1, "ibp-decoder") as pool,
        ):
            pieces = functools.partial(_pieces, threads=pool, on_bytes=bar.update)
            if kind != "safetensors" or len(source.parts) == 1:
                FORMATS[kind](target, list(source.tensors.values()), source.metadata, pieces)
                return [shown]
            names = _write_set(source, target, pieces)
    folder = shown.rpartition("/")[0]
    return [f"{folder}/{name}" if folder else name for name in names]


def _pieces(
    tensor: SourceTensor, threads: ThreadPoolExecutor, on_bytes: Callable[[int], object]
) -> Iterator[np.ndarray]:
    """The bytes of a tensor in order, the next ones read while the caller has some."""

    def read(start: int) -> np.ndarray:
        return tensor.read(start, min(start + _BLOCK_BYTES, tensor.num_bytes))

    for piece in ahead(threads, read, range(0, tensor.num_bytes, _BLOCK_BYTES), _AHEAD):
        yield piece
        on_bytes(piece.size)


def _write_set(source: Source, target: Path, pieces: Callable[[SourceTensor], Iterator[np.ndarray]]) -> list[str]:
    """Writes a safetensors file for each file of a set, and their index. Returns their names."""
    weight_map: dict[str, str] = {}
    for name, part in zip(names_of_set(target, len(source.parts)), source.parts):
        FORMATS["safetensors"](target.with_name(name), list(part.tensors.values()), part.metadata, pieces)
        weight_map.update(dict.fromkeys(part.tensors, name))
    write_index(target, weight_map, source.num_bytes)
    return [*dict.fromkeys(weight_map.values()), index_of(target).name]
