"""Checkpoints as they were: `decompress`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .._common.progress import tqdm
from .._common.sequences import ahead
from .._common.whole_files import replaced
from .._files.paths import PathLike, file_of, output_of, written_to
from .._files.sets import outputs_of, replacing, write_index
from ._model_files import check_free, copy_files_beside, weights_of
from ._outputs import FORMATS, Begin, format_of_output
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
    force: bool = False,
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
        output: path of the file; a directory, for "model.safetensors" in it; or a URL of fsspec. A name without a
            suffix is a directory's where a directory is decompressed, and else a safetensors file's.
        format: "safetensors", "npy" (one tensor), "npz" or "torch" (torch.save, which needs all of it in memory), which
            the suffix of the output does not contradict. None: by the suffix.
        include, exclude: patterns of names ("*.weight", as fnmatch has them): only tensors that match one of include,
            and none of exclude, are written.
        progress: show a bar.
        force: replace an output that is there.

    Returns:
        Paths or URLs of the files that were written, the index of a set last.

    Raises:
        FileNotFoundError: there is no such input, or no such directory for the output.
        FileExistsError: the output is there, and force is not set.
        ibp.FileFormatError, SourceFormatError, ibp.CorruptTableError: an input is damaged.
        ValueError: the format is none, is not what the suffix says, or does not have a tensor's dtype; or the patterns
            leave no tensor.
        OSError: a file cannot be read or written, or another call writes the same output at this moment.
    """
    output = output_of(inputs, output)
    with open_sources(inputs) as opened:
        source = opened.only(chosen(opened.tensors, include, exclude))
        if opened.tensors and not source.tensors:
            raise ValueError(f"{opened.path} has no tensor whose name the patterns choose")
        check_free(inputs, output, force)
        target = weights_of(inputs, output)
        begin = functools.partial(replaced, like=opened.files, alone=True, replace=force)
        written = write_source(source, target, format, "decompress", progress, begin)
    copy_files_beside(inputs, output, is_coded=False)
    return written


def write_source(
    source: Source, output: PathLike, format: str | None, what: str, progress: bool, begin: Begin
) -> list[str]:
    """Writes the tensors of a source. Returns the paths or URLs of the files; what: named by the bar; begin: begins each
    file. The others are as of `decompress`."""
    shown = file_of(output)
    kind = format_of_output(Path(shown), format)
    count = len(source.parts) if kind == "safetensors" else 1
    with written_to(output) as target:
        names = outputs_of(target, count)
        with (
            tqdm(total=source.num_bytes, desc=what, unit="B", unit_scale=True, disable=not progress) as bar,
            ThreadPoolExecutor(1, "ibp-decoder") as pool,
            replacing(target, names),
        ):
            pieces = functools.partial(_pieces, threads=pool, on_bytes=bar.update)
            parts = [source] if count == 1 else source.parts
            weight_map: dict[str, str] = {}
            for name, part in zip(names, parts):
                tensors = list(part.tensors.values())
                FORMATS[kind](target.with_name(name), tensors, part.metadata, pieces, begin)
                weight_map.update(dict.fromkeys(part.tensors, name))
            if count > 1:
                write_index(target, weight_map, source.num_bytes)
    folder, slash, _ = shown.rpartition("/")
    return [f"{folder}{slash}{name}" for name in names]


def _pieces(
    tensor: SourceTensor, threads: ThreadPoolExecutor, on_bytes: Callable[[int], object]
) -> Iterator[np.ndarray]:
    """The bytes of a tensor in order, the next ones read while the caller has some."""

    def read(start: int) -> np.ndarray:
        return tensor.read(start, min(start + _BLOCK_BYTES, tensor.num_bytes))

    for piece in ahead(threads, read, range(0, tensor.num_bytes, _BLOCK_BYTES), _AHEAD):
        yield piece
        on_bytes(piece.size)
