"""The three functions that convert checkpoints. `estimate` estimates the result of compressing a checkpoint or a model
from samples of its rows, `compress` compresses checkpoints, and `decompress` writes the tensors of compressed
checkpoints to ordinary files.

Both directions work block by block, so tensors may be larger than the memory. `compress` plans the files, and
`write_file` of `_writing.py` writes each of them. `decompress` passes the blocks of each tensor to the function that
writes its format.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._common.arguments import chosen, whole_number
from .._common.manners import share_saved
from .._common.process import tqdm
from .._common.sequences import in_threads
from .._common.whole_files import replaced
from .._files import (
    SUFFIXES,
    WEIGHTS,
    PathLike,
    check_names,
    check_names_safetensors,
    checked_metadata,
    file_of,
    format_of_name,
    index_of,
    is_of_weights,
    is_url,
    output_of,
    outputs_of,
    replacing,
    target_of,
    write_index,
    written_to,
)
from .._files import open as open_file
from .._rows.learning import Options
from ._coding import Codebooks, checked_options, coder_on, rows_of, savings_of
from ._inputs import (
    FORMATS,
    conversion_of,
    files_to_verify,
    local_path,
    open_sources,
)
from ._outputs import (
    CODED_WEIGHTS,
    SHARD_BYTES,
    CheckpointEstimate,
    CheckpointReport,
    Journal,
    TensorEstimate,
    check_output,
    compressed_bytes,
    plan_of,
    report_of,
    shards_of,
    table_bytes,
    work_directory,
)
from ._source import BLOCK_BYTES, Source, SourceTensor, source_of
from ._writing import write_file

_COMPARED = ("ibp", "planes")  # the schemes that `estimate` compares
_MOST_DECODERS = 4  # number of threads that decode for one thread that writes
# Number of bytes between two looks at this process's memory. A look takes as long as coding half a megabyte.
_BETWEEN_BYTES = 64 << 20
_A_SUFFIX = re.compile(r"\.[A-Za-z]\w*")  # ".1" does not match, so "llama-3.1" has no suffix


# ---- estimating ----


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
    options = checked_options(Options(level=level, row_bytes=row_bytes, device="cpu"))
    if isinstance(inputs, torch.nn.Module):
        inputs = inputs.state_dict()
    with source_of(inputs) if isinstance(inputs, Mapping) else open_sources(inputs) as source:
        kept = frozenset(source.tensors).difference(chosen(source.tensors, include, exclude))
        codebooks = Codebooks(options, source.stored(), kept)
        of_others: dict[tuple, float] = {}  # savings of schemes that are not chosen, by kind and scheme
        found, books, stored = [], {}, {}
        for tensor in tqdm(source.stored(), desc="estimate", unit="tensor", disable=not progress):
            codebooks.prepare([tensor])
            taken, savings = codebooks.of(tensor), dict[str, float]()
            geometry = codebooks.geometry_of(tensor)
            for scheme in _COMPARED if codebooks.is_coded(tensor) else ():
                if taken is not None and taken.scheme == scheme:
                    tried = codebooks.savings(tensor)
                    saved = savings_of(rows_of(tensor, geometry), taken) if tried is None else tried
                else:
                    key = *codebooks.kind_of(tensor), scheme
                    if key not in of_others:
                        of_others[key] = codebooks.expected_savings(tensor, scheme)
                    saved = of_others[key]
                in_file = table_bytes(round((1 - saved) * tensor.num_bytes), geometry.num_rows)
                savings[scheme] = max(0.0, share_saved(tensor.num_bytes, in_file))
            best = None if taken is None else taken.scheme
            of = TensorEstimate(tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes, savings, best)
            stored[tensor.name] = of.stored_bytes
            books[tensor.name] = taken
            found.append(of)
        file_bytes = compressed_bytes(source, stored, books)
    before, after = sum(tensor.num_bytes for tensor in found), sum(tensor.stored_bytes for tensor in found)
    return CheckpointEstimate(tuple(found), before, after, file_bytes)


# ---- compressing ----


def compress(
    inputs: PathLike | Iterable[PathLike],
    output: PathLike,
    *,
    scheme: str = "auto",
    level: str = "default",
    chunk_bytes: int | None = None,
    tau: float | None = None,
    clusters: int | str | None = None,
    row_bytes: int | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int | None = SHARD_BYTES,
    device: torch.device | str | int | None = None,
    jobs: int | None = None,
    restart: bool = True,
    verify_inputs: bool = True,
    verify_output: bool = False,
    progress: bool = False,
    force: bool = False,
    verify: bool | None = None,
) -> CheckpointReport:
    """Compresses a checkpoint of any size to a file, or a set of files, that `ibp.open` and `ibp.load` read.

    Tensors of any size are read, coded and written block by block. The call needs about 100 MB of memory, plus 2 bytes
    per row. Names, shapes, dtypes, bytes and metadata are kept. Weights whose names differ only in numbers, and whose
    shapes and dtypes are equal, share a codebook. Tensors that would not get smaller, or that are smaller than 4 KiB,
    are stored uncompressed. The file also has the fingerprint of each compressed tensor.

    If a directory is compressed to a directory, each file of tensors is compressed to a separate file, and each set of
    files to a set (see shard_bytes): "model.safetensors" becomes "model.ibp.safetensors", and "optimizer.pt" becomes
    "optimizer.pt.ibp.safetensors". All other files, including files that hold objects of Python, are copied. A
    config.json beside weights gets an entry that says that the weights are coded. `from_pretrained` of transformers and
    diffusers loads such weights if ibp is imported; otherwise it finds no weights.

    The output gets its name only when it is complete. Until then, its files are in the directory `.<name>.ibp-work`
    beside the output. If the call is interrupted, the next call with the same arguments uses the finished files, unless
    the inputs have changed.

    Example:
        >>> torch.save({"w": torch.arange(1000.0).repeat(100, 1)}, "model.pt")
        >>> report = ibp.checkpoints.compress("model.pt", "model.ibp", device="cpu")
        >>> report.savings > 0.5
        True
        >>> ibp.load("model.ibp", device="cpu")["w"][0, :3]
        tensor([0., 1., 2.])

    Args:
        inputs: one or more paths, globs, directories, indices of sets of files, or URLs of fsspec. The formats of files
            are safetensors, .npy, .npz, checkpoints of torch.save (read with weights_only), and files of ibp.
        output: path of the file; or a directory, in which the file is "model.ibp.safetensors" unless the input is a
            directory, too; or a URL of fsspec, to which the files are copied when they are complete. If the input is a
            directory, and the output has no suffix of a format, the output is a directory.
        scheme, level, chunk_bytes, tau, clusters: as in `ibp.compress`; "raw" stores all tensors uncompressed.
        row_bytes: size in bytes of a row of the flat tensor. None: 4,096; for an array of numpy, the size of an item,
            if that is 512 bytes to 64 KiB.
        include, exclude: patterns of names ("*.weight", as in fnmatch). Only tensors that match a pattern of include,
            and no pattern of exclude, are compressed. Other tensors are stored uncompressed.
        metadata: a mapping from strings to strings, which is added to the metadata of the inputs.
        shard_bytes: the largest total size in bytes, before coding, of the tensors in a file. A tensor that is larger
            is alone in its file. None: there is no limit. The files of a sharded model (ordinary safetensors files or
            checkpoints of torch) are not joined, even if they are smaller. Files of other formats are joined.
        device: the device that codes the rows. None: the current GPU if there is one, else the CPU.
        jobs: the number of threads. None: one for each core.
        restart: whether to use the files that an interrupted call has finished.
        verify_inputs: whether to check the checksums of inputs that are files of ibp, while their bytes are read.
            Inputs of other formats have no checksums.
        verify_output: whether to read the finished output again. Its checksums are compared, every compressed tensor is
            decoded, and its fingerprint is compared with that of the original tensor.
        progress: whether to show a progress bar.
        force: whether to replace an existing output, which may be one file or a set.
        verify: the former name of verify_inputs, which it replaces if it is given.

    Returns:
        A report of the files and tensors that were written.

    Raises:
        FileNotFoundError: there is no such input, or no such directory for the output.
        FileExistsError: the output exists, and force is not set.
        SourceFormatError, ibp.FileFormatError: an input is damaged, or is not a file of tensors. With `verify_inputs`,
            damaged bytes raise ibp.ChecksumError, a FileFormatError, which names the file and the tensor.
        ibp.ChecksumError, ibp.CorruptTableError: with `verify_output`, the output holds other bytes than were written.
            The output stays, so that its faults can be examined.
        TypeError, ValueError: an argument is outside its range, a pattern of include matches no name, output has the
            suffix of another format (.npz, .pt), two inputs have a tensor with the same name, a name begins with "ibp."
            or is that of a part of a table, or a config.json beside weights is not JSON.
        OSError: a file cannot be read or written, or another call is writing the same output.
    """
    output = output_of(inputs, output)
    with contextlib.ExitStack() as stack:
        given = Options(scheme, chunk_bytes, tau, None, clusters, level, row_bytes=row_bytes, device=device)
        options = checked_options(given)
        threads = len(os.sched_getaffinity(0)) if jobs is None else whole_number("jobs", jobs, 1, 1024)
        most = None if shard_bytes is None else whole_number("shard_bytes", shard_bytes, 1)
        checked = checked_metadata(metadata)
        check_names_safetensors(output)
        verifies = verify_inputs if verify is None else verify
        conversion = conversion_of(inputs, output, True, stack, verifies)
        if conversion is None:
            opened = stack.enter_context(open_sources(inputs, verify=verifies))
        is_unfinished = not is_url(output) and work_directory(target_of(output, CODED_WEIGHTS)).is_dir()
        check_output(output, CODED_WEIGHTS, conversion, force or is_unfinished)
        target = stack.enter_context(written_to(output, CODED_WEIGHTS))
        sources = conversion.sources if conversion is not None else {Path(target.name): opened}
        for source in sources.values():
            for tensor in source.stored():
                tensor.header_entry()  # raises ValueError if safetensors does not have its dtype
        names = dict.fromkeys(name for source in sources.values() for name in source.tensors)
        kept = frozenset(names).difference(chosen(names, include, exclude))
        sets = {}
        for path, source in sources.items():
            # A single file of a format other than safetensors is decompressed to a single file again, so it is not
            # divided.
            is_cut = conversion is None or path in conversion.sets or is_of_weights(path.name)
            sets[path] = shards_of(source, path, most if is_cut else None, checked)
            outputs_of(target.parent / path, len(sets[path]))
        shards = list(itertools.chain(*sets.values()))
        books = Codebooks(options, [tensor for shard in shards for tensor in shard.tensors.values()], kept)
        for of_set in sets.values():
            tensors = itertools.chain(*(shard.tensors.values() for shard in of_set))
            check_names({tensor.name: books.is_coded(tensor) for tensor in tensors})
        with Journal(target, plan_of(shards, options, kept)) as journal:
            # Checks again, because another call, which has just released the journal, may have made the output.
            journal.open(restart, functools.partial(check_output, output, CODED_WEIGHTS, conversion, force))
            records, num_kept, peak_bytes = _written(shards, journal, books, threads, progress)
            journal.publish(sets, records)
            others = () if conversion is None else conversion.finish()
            journal.close()
        in_order = [records[shard.path] for shard in shards]
        report = report_of(_path_to_open(output, target, sets), in_order, num_kept, peak_bytes, others)
    if verify_output:
        verified_bytes(report.path, progress)
    return report


def verified_bytes(path: str, progress: bool) -> int:
    """Verifies an output of `compress`, as its `verify_output` says. Returns the number of bytes that were compared.
    path: `CheckpointReport.path`."""
    checked = 0
    for each in files_to_verify(path):
        with local_path(each) as near, open_file(near) as file:
            checked += file.verify(content=True, progress=progress)
    return checked


def _written(
    shards: Sequence[Source], journal: Journal, books: Codebooks, jobs: int, progress: bool
) -> tuple[dict[str, dict[str, Any]], int, int]:
    """Writes the files of an output to the directory of its journal, except those that an earlier call has finished.
    Returns (the records of all files, by their paths within the directory of the output; the number of files that an
    earlier call has finished; the peak of this process's own memory in bytes).

    Args:
        shards: the files, as `shards_of` plans them.
        books, jobs: as in `write_file`.
    """
    finished = {shard.path: journal.finished(shard.path) for shard in shards}
    records = {path: record for path, record in finished.items() if record is not None}
    num_kept, missing = len(records), [shard for shard in shards if shard.path not in records]
    coder, peak_bytes, passed_bytes = coder_on(books.device, jobs), own_memory(), 0
    total = sum(shard.num_bytes for shard in missing)
    with tqdm(total=total, desc="compress", unit="B", unit_scale=True, disable=not progress) as bar:

        def passed(num_bytes: int) -> None:
            nonlocal peak_bytes, passed_bytes
            bar.update(num_bytes)
            passed_bytes += num_bytes
            if passed_bytes >= _BETWEEN_BYTES:
                peak_bytes, passed_bytes = max(peak_bytes, own_memory()), 0

        for shard in missing:
            path = journal.home / shard.path
            like = [os.fspath(path)] if path.exists() else shard.files  # A file that is there keeps its permissions.
            fields = write_file(journal.path_of(shard.path), shard, books, coder, jobs, passed, like)
            records[shard.path] = journal.write_record(shard.path, fields)
    return records, num_kept, peak_bytes


def own_memory() -> int:
    """Returns the size in bytes of this process's own memory, or 0 without Linux's /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    found = next((line for line in lines if line.startswith("RssAnon:")), "RssAnon: 0 kB")
    return 1024 * int(found.split()[1])


def _path_to_open(output: str, target: Path, sets: Mapping[Path, Sequence[Source]]) -> str:
    """Returns the path or URL that the caller of `compress` should open: that of the file; for a set of files, that of
    its index; and for several files or sets, that of their directory."""
    (path, shards), *others = sets.items()
    if others:
        return os.fspath(target.parent)
    file = index_of(path) if len(shards) > 1 else path
    return f"{output.rpartition('/')[0]}/{file}" if is_url(output) else os.fspath(target.parent / file)


# ---- decompressing ----


def decompress(
    inputs: PathLike | Iterable[PathLike],
    output: PathLike,
    *,
    format: str | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    verify_inputs: bool = True,
    progress: bool = False,
    force: bool = False,
    verify: bool | None = None,
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
        verify_inputs: whether to check the checksums of inputs that are files of ibp, while their bytes are read.
            Inputs of other formats have no checksums.
        progress: whether to show a progress bar.
        force: whether to replace an existing output.
        verify: the former name of verify_inputs, which it replaces if it is given.

    Returns:
        Paths or URLs of the files that were written; the index of a set follows its files.

    Raises:
        FileNotFoundError: there is no such input, or no such directory for the output.
        FileExistsError: the output exists, and force is not set.
        ibp.FileFormatError, SourceFormatError, ibp.CorruptTableError: an input is damaged. With `verify_inputs`,
            damaged bytes raise ibp.ChecksumError, a FileFormatError, which names the file and the tensor.
        ValueError: the format does not exist, differs from that of the suffix, or does not support a tensor's dtype; a
            format is given although a directory is decompressed to a directory; a pattern of include matches no name;
            or there are no tensors to write.
        OSError: a file cannot be read or written, or another call is writing the same output.
    """
    output = output_of(inputs, output)
    with contextlib.ExitStack() as stack:
        verifies = verify_inputs if verify is None else verify
        conversion = conversion_of(inputs, output, False, stack, verifies)
        if conversion is None:
            sources = [stack.enter_context(open_sources(inputs, verify=verifies))]
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
            return write_source(source.only(wanted), target, format, "decompress", progress, force, as_set)

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
    force: bool,
    as_set: bool = False,
) -> list[str]:
    """Writes the tensors of a source. Returns the paths or URLs of the files.

    Args:
        source: the source. The new files get the permissions that all of its files have.
        output, format, progress, force: as in `decompress`.
        what: the description that the progress bar shows.
        as_set: whether a set of files is written as a set even in formats other than safetensors.
    """
    shown = file_of(output)
    kind = format_of_output(Path(shown), format)
    _, write_part = FORMATS[kind]
    parts = source.parts if as_set or kind == "safetensors" else [source]
    with written_to(output) as target:
        names = outputs_of(target, len(parts))
        with (
            tqdm(total=source.num_bytes, desc=what, unit="B", unit_scale=True, disable=not progress) as bar,
            replacing(target, names),
        ):
            pieces = functools.partial(_pieces, on_bytes=bar.update)
            weight_map: dict[str, str] = {}
            with contextlib.ExitStack() as files:  # when this block ends, all files get their names
                for name, part in zip(names, parts):
                    path = target.with_name(name)
                    new = replaced(path, part.num_bytes, like=source.files, alone=True, replace=force)
                    file = files.enter_context(new)
                    write_part(file, part, pieces)
                    file.flush()
                    os.fsync(file.fileno())  # If the disk is full, no file gets its name.
                    weight_map.update(dict.fromkeys(part.tensors, name))
            if len(parts) > 1:
                write_index(target, weight_map, source.num_bytes)
    folder, slash, _ = shown.rpartition("/")
    return [f"{folder}{slash}{name}" for name in names]


def _pieces(tensors: Iterable[SourceTensor], on_bytes: Callable[[int], object]) -> Generator[np.ndarray, None, None]:
    """Yields the bytes of tensors in order, block by block. While the caller uses a block, other threads read the next
    blocks, each thread a whole block. on_bytes: called with the size of each block after the caller has used it."""
    blocks = ((tensor, span) for tensor in tensors for span in tensor.spans(BLOCK_BYTES))
    num_threads = min(_MOST_DECODERS, torch.get_num_threads())
    with contextlib.closing(in_threads(lambda block: block[0].read(*block[1]), blocks, num_threads)) as pieces:
        for piece in pieces:
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
