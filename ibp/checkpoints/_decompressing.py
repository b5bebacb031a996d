"""Checkpoints as they were: `decompress`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .._common.progress import tqdm
from .._common.sequences import ahead
from .._files.paths import PathLike, file_of, written_to
from .._files.sets import index_of, names_of_set, write_index
from ._model_files import conversion_of, is_coded
from ._outputs import FORMATS, SUFFIXES, Pieces, Writer
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
    becomes a set of as many safetensors files, and its index. Where a directory becomes a directory, each coded file
    becomes a file of the name and kind that it was made of, all other files are copied, and config.json says again what
    it said before.

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
            None: by the suffix of the output; in a directory by the names of the files.
        include, exclude: patterns of names ("*.weight", as fnmatch has them): only tensors that match one of include,
            and none of exclude, are written.
        progress: show a bar.

    Returns:
        Paths or URLs of the files that were written, the index of a set last.

    Raises:
        FileNotFoundError: there is no such input.
        ibp.FileFormatError, SourceFormatError, ibp.CorruptTableError: an input is damaged.
        ValueError: the format is none, does not have a tensor's dtype, or is given for a directory; or the patterns
            leave no tensor.
        OSError: a file cannot be read or written.
    """
    with contextlib.ExitStack() as stack:
        conversion = conversion_of(inputs, output, False, stack)
        sources = (
            [stack.enter_context(open_sources(inputs))] if conversion is None else list(conversion.sources.values())
        )
        names = list(dict.fromkeys(name for source in sources for name in source.tensors))
        wanted = frozenset(chosen(names, include, exclude))
        if names and not wanted:
            given = sources[0].path if conversion is None else conversion.source
            raise ValueError(f"{given} has no tensor whose name the patterns choose")
        if conversion is None:
            return write_source(sources[0].only(wanted), output, format, "decompress", progress)
        if format is not None:
            raise ValueError(f"format is {format!r}; wanted None for a directory, whose files keep their kinds")
        written = []
        for path, source in list(conversion.sources.items()):
            if not is_coded(source) and wanted.issuperset(source.tensors):
                conversion.keep(path)
            elif wanted.isdisjoint(source.tensors):
                conversion.skip(path)
            else:
                target = conversion.target / path
                written += write_source(
                    source.only(wanted), target, None, "decompress", progress, path in conversion.sets
                )
        conversion.finish()
        return written


def write_source(
    source: Source, output: PathLike, format: str | None, what: str, progress: bool, as_set: bool = False
) -> list[str]:
    """Writes the tensors of a source. Returns the paths or URLs of the files.

    Args:
        source, output, format, progress: as of `decompress`.
        what: the name that the bar shows.
        as_set: whether a set of files becomes a set in other formats than safetensors, too.
    """
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
            if len(source.parts) == 1 or not (as_set or kind == "safetensors"):
                FORMATS[kind](target, list(source.tensors.values()), source.metadata, pieces)
                return [shown]
            names = _write_set(source, target, FORMATS[kind], pieces)
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


def _write_set(source: Source, target: Path, write: Writer, pieces: Pieces) -> list[str]:
    """Writes a file for each file of a set, and their index. Returns their names."""
    weight_map: dict[str, str] = {}
    for name, part in zip(names_of_set(target, len(source.parts)), source.parts):
        write(target.with_name(name), list(part.tensors.values()), part.metadata, pieces)
        weight_map.update(dict.fromkeys(part.tensors, name))
    write_index(target, weight_map, source.num_bytes)
    return [*dict.fromkeys(weight_map.values()), index_of(target).name]
