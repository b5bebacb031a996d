"""`decompress`: writes the tensors of compressed checkpoints to ordinary files."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import numpy as np

from .._common.process import tqdm
from .._common.sequences import ahead
from .._common.whole_files import replaced
from .._files import (
    SUFFIXES,
    WEIGHTS,
    PathLike,
    file_of,
    format_of_name,
    output_of,
    outputs_of,
    replacing,
    write_index,
    written_to,
)
from ._model_files import check_output, conversion_of
from ._source import Source, SourceTensor, chosen
from ._sources import FORMATS, open_sources

# A function that takes (path, size of the data in bytes) and returns a context manager for the new file. `decompress`
# passes `whole_files.replaced` with some of its options set.
Begin = Callable[[Path, int], AbstractContextManager[IO[bytes]]]

_A_SUFFIX = re.compile(r"\.[A-Za-z]\w*")  # ".1" does not match, so "llama-3.1" has no suffix
_BLOCK_BYTES = 4 << 20  # number of bytes of a tensor that are decoded at once
_AHEAD = 2  # number of blocks that are decoded ahead of the one that is written


def decompress(
    inputs: PathLike | Iterable[PathLike],
    output: PathLike,
    *,
    format: str | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    verify: bool = True,
    progress: bool = False,
    force: bool = False,
) -> list[str]:
    """Restores a checkpoint: writes its tensors with the names, shapes, dtypes and bytes that they had before
    compression, and its metadata.

    Tensors are decoded and written block by block. A file gets its name only when it is complete. If the input is a set
    of files and the output is safetensors, the output is a set of the same number of files, with an index; all files of
    a set get their names once the last of them is complete. In other formats the output is one file. If a directory is
    decompressed to a directory, each coded file or set gets the name and format from which it was compressed, all other
    files are copied, and the original config.json is restored.

    Example:
        >>> torch.save({"w": torch.arange(100_000.0)}, "model.pt")
        >>> report = ibp.checkpoints.compress("model.pt", "model.ibp", device="cpu")
        >>> ibp.checkpoints.decompress("model.ibp", "again.pt")
        ['again.pt']
        >>> torch.load("again.pt")["w"][:3]
        tensor([0., 1., 2.])

    Args:
        inputs: as in `ibp.checkpoints.compress`; usually a file of ibp, or an index or a directory of such files.
        output: path of the file; or a directory, in which the file is "model.safetensors" unless the input is a
            directory, too; or a URL of fsspec. An output whose name has no suffix is a directory if the input is a
            directory, and otherwise a safetensors file.
        format: "safetensors", "npy" (one tensor), "npz" or "torch" (torch.save, which needs all tensors in memory).
            It must agree with the suffix of the output. None: the suffix of the output decides; if a directory is
            decompressed to a directory, each file gets the format from which it was compressed.
        include, exclude: patterns of names ("*.weight", as in fnmatch). Only tensors that match a pattern of include,
            and no pattern of exclude, are written.
        verify: whether to check the checksums of inputs that are files of ibp, while their bytes are read. Inputs of
            other formats have no checksums.
        progress: whether to show a progress bar.
        force: whether to replace an existing output.

    Returns:
        Paths or URLs of the files that were written; the index of a set follows its files.

    Raises:
        FileNotFoundError: there is no such input, or no such directory for the output.
        FileExistsError: the output exists, and force is not set.
        ibp.FileFormatError, SourceFormatError, ibp.CorruptTableError: an input is damaged. With `verify`, damaged bytes
            raise ibp.ChecksumError, a FileFormatError, which names the file and the tensor.
        ValueError: the format does not exist, differs from that of the suffix, or does not support a tensor's dtype; a
            format is given although a directory is decompressed to a directory; a pattern of include matches no name;
            or there are no tensors to write.
        OSError: a file cannot be read or written, or another call is writing the same output.
    """
    output = output_of(inputs, output)
    with contextlib.ExitStack() as stack:
        conversion = conversion_of(inputs, output, False, stack, verify)
        if conversion is None:
            sources = [stack.enter_context(open_sources(inputs, verify=verify))]
        else:
            sources = list(conversion.sources.values())
        names = list(dict.fromkeys(name for source in sources for name in source.tensors))
        wanted = frozenset(chosen(names, include, exclude))
        if names and not wanted:
            given = sources[0].path if conversion is None else conversion.source
            raise ValueError(f"{given} has no tensor whose name the patterns choose")
        if conversion is not None and format is not None:
            raise ValueError(f"format is {format!r}; wanted None for a directory, whose files keep their kinds")
        check_output(output, WEIGHTS, conversion, force)

        def write(source: Source, target: PathLike, as_set: bool = False) -> list[str]:
            begin = functools.partial(replaced, like=source.files, alone=True, replace=force)
            return write_source(source.only(wanted), target, format, "decompress", progress, begin, as_set)

        if conversion is None:
            return write(sources[0], output)
        stack.enter_context(written_to(output))
        written = []
        for path, source in list(conversion.sources.items()):
            is_coded = any(part.format == "ibp" for part in source.parts)
            if not is_coded and wanted.issuperset(source.tensors):
                conversion.keep(path)
            elif wanted.isdisjoint(source.tensors):
                conversion.skip(path)
            else:
                target = conversion.target / path
                target.parent.mkdir(parents=True, exist_ok=True)  # a directory within that of the output
                written += write(source, target, path in conversion.sets)
        conversion.finish()
        return written


def write_source(
    source: Source,
    output: PathLike,
    format: str | None,
    what: str,
    progress: bool,
    begin: Begin,
    as_set: bool = False,
) -> list[str]:
    """Writes the tensors of a source. Returns the paths or URLs of the files.

    Args:
        source, output, format, progress: as in `decompress`.
        what: the description that the progress bar shows.
        begin: called for each file, see `Begin`.
        as_set: whether a set of files is written as a set even in formats other than safetensors.
    """
    shown = file_of(output)
    kind = format_of_output(Path(shown), format)
    parts = source.parts if as_set or kind == "safetensors" else [source]
    with written_to(output) as target:
        names = outputs_of(target, len(parts))
        with (
            tqdm(total=source.num_bytes, desc=what, unit="B", unit_scale=True, disable=not progress) as bar,
            ThreadPoolExecutor(1, "ibp-decoder") as pool,
            replacing(target, names),
        ):
            pieces = functools.partial(_pieces, threads=pool, on_bytes=bar.update)
            weight_map: dict[str, str] = {}
            with contextlib.ExitStack() as files:  # when this block ends, all files get their names
                for name, part in zip(names, parts):
                    file = files.enter_context(begin(target.with_name(name), part.num_bytes))
                    FORMATS[kind].write(file, part, pieces)
                    weight_map.update(dict.fromkeys(part.tensors, name))
            if len(parts) > 1:
                write_index(target, weight_map, source.num_bytes)
    folder, slash, _ = shown.rpartition("/")
    return [f"{folder}{slash}{name}" for name in names]


def _pieces(
    tensor: SourceTensor, threads: ThreadPoolExecutor, on_bytes: Callable[[int], object]
) -> Iterator[np.ndarray]:
    """Yields the bytes of a tensor in order, block by block. While the caller uses a block, the next blocks are read on
    `threads`. on_bytes: called with the size of each block after the caller has used it."""

    def read(span: tuple[int, int]) -> np.ndarray:
        return tensor.read(*span)

    for piece in ahead(threads, read, tensor.spans(_BLOCK_BYTES), _AHEAD):
        yield piece
        on_bytes(piece.size)


def format_of_output(target: Path, format: str | None) -> str:
    """Returns the format in which to write a file: `format` if it is given, otherwise the format of the suffix of
    `target`, or safetensors if the name has no suffix.

    Raises:
        ValueError: the format cannot be written, or the suffix is that of another format.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"format is {format!r}; wanted one of {sorted(FORMATS)}")
    named = format_of_name(target)
    if format is None and named is None and _A_SUFFIX.fullmatch(target.suffix):
        named = target.suffix
    kind = format or named or "safetensors"
    if kind not in FORMATS or named not in (None, kind):
        wanted = FORMATS if format is None else (format,)
        raise ValueError(
            f"the output is {os.fspath(target)!r}, whose suffix does not say {format or 'a format that is written'}; "
            f"wanted a name that ends in {', '.join(end for end, told in SUFFIXES.items() if told in wanted)}"
        )
    return kind
