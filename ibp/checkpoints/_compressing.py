"""`compress`: compresses checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._common.arguments import whole_number
from .._common.progress import Bar, tqdm
from .._common.sequences import ahead
from .._files import (
    FileWriter,
    PathLike,
    TableFields,
    check_names_safetensors,
    checked_metadata,
    dtype_name,
    index_of,
    is_of_weights,
    is_there,
    is_url,
    output_of,
    outputs_of,
    replacing,
    target_of,
    written_to,
)
from .._schemes import AnyCodebook, Options
from ..deltas._fingerprint import finished
from ._coding import Block, CodedBlock, CpuCoder, CudaCoder, blocks_of
from ._learning import CheckpointLearning, Codebooks
from ._model_files import CODED_WEIGHTS, already_there, check_output, conversion_of, exists
from ._outputs import (
    SHARD_BYTES,
    CheckpointReport,
    Journal,
    PeakMemory,
    Shard,
    TensorReport,
    plan_of,
    report_of,
    shards_of,
    work_directory,
)
from ._source import SourceTensor, chosen
from ._sources import open_sources

_AHEAD = 2  # number of coded blocks that wait to be written


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
    verify: bool = True,
    progress: bool = False,
    force: bool = False,
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

    The output gets its name only when it is complete. Until then, finished files of a set are kept in the directory
    `.<name>.ibp-work` beside the output. If the call is interrupted, the next call with the same arguments uses these
    files, unless the inputs have changed.

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
        verify: whether to check the checksums of inputs that are files of ibp, while their bytes are read. Inputs of
            other formats have no checksums.
        progress: whether to show a progress bar.
        force: whether to replace an existing output, which may be one file or a set.

    Returns:
        A report of the files and tensors that were written.

    Raises:
        FileNotFoundError: there is no such input, or no such directory for the output.
        FileExistsError: the output exists, and force is not set.
        SourceFormatError, ibp.FileFormatError: an input is damaged, or is not a file of tensors. With `verify`, damaged
            bytes raise ibp.ChecksumError, a FileFormatError, which names the file and the tensor.
        TypeError, ValueError: an argument is outside its range, a pattern of include matches no name, output has the
            suffix of another format (.npz, .pt), two inputs have a tensor with the same name, or a config.json beside
            weights is not JSON.
        OSError: a file cannot be read or written, or another call is writing the same output.
    """
    output = output_of(inputs, output)
    with contextlib.ExitStack() as stack:
        options = Options(scheme, chunk_bytes, tau, None, clusters, level, row_bytes=row_bytes, device=device)
        learning = CheckpointLearning.of(options)
        threads = len(os.sched_getaffinity(0)) if jobs is None else whole_number("jobs", jobs, 1, 1024)
        most = None if shard_bytes is None else whole_number("shard_bytes", shard_bytes, 1)
        checked = checked_metadata(metadata)
        check_names_safetensors(output)
        conversion = conversion_of(inputs, output, True, stack, verify)
        if conversion is None:
            opened = stack.enter_context(open_sources(inputs, verify=verify))
        there = None if force else already_there(output, CODED_WEIGHTS, conversion)
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
        writing = _Writing(learning, shards, kept, threads, progress)
        if len(shards) > 1:
            with Journal(target, plan_of(shards, learning.options, kept)) as journal:
                if not journal.open(restart) and not force:
                    # Another call, which has just released the journal, may have made the output.
                    there = there or next(filter(is_there, (os.fspath(target.parent / path) for path in sets)), None)
                    if there is not None:
                        raise exists(there)
                records, num_kept = _write_set(target, shards, writing, journal)
                journal.publish(sets, records)
        elif there is not None:
            raise exists(there)
        else:
            records, num_kept = {shards[0].file: _write_one(target, shards[0], writing, force)}, 0
        in_order = [records[shard.file] for shard in shards]
        report = report_of(_opened(output, target, sets), in_order, num_kept, writing.peak.num_bytes)
        if conversion is None:
            return report
        conversion.finish()
        return replace(report, other_files=conversion.other_files())


def _write_one(target: Path, shard: Shard, writing: _Writing, force: bool) -> dict[str, Any]:
    """Writes the only file of an output. Returns its record."""
    path = target.parent / shard.file
    path.parent.mkdir(parents=True, exist_ok=True)  # a directory within that of the output
    with writing.bar([shard]), replacing(path, [path.name]):
        fields = writing.write(path, shard, like=shard.inputs, replace=force)
    return {**fields, "file": shard.file, "size": path.stat().st_size}


def _write_set(
    target: Path, shards: list[Shard], writing: _Writing, journal: Journal
) -> tuple[dict[str, dict[str, Any]], int]:
    """Writes the files of a set to the journal's directory, except those that an earlier call has finished. Returns
    (the records of all files, by their paths; the number of files that were finished before)."""
    records = {shard.file: record for shard in shards if (record := journal.finished(shard.file)) is not None}
    num_kept, missing = len(records), [shard for shard in shards if shard.file not in records]
    with writing.bar(missing):
        for shard in missing:
            earlier = target.parent / shard.file  # if it exists, its permissions are kept
            like = [os.fspath(earlier)] if earlier.exists() else shard.inputs
            fields = writing.write(journal.path_of(shard.file), shard, like=like, replace=True)
            records[shard.file] = journal.write_record(shard.file, fields)
    return records, num_kept


def _opened(output: str, target: Path, sets: Mapping[Path, list[Shard]]) -> str:
    """Returns the path or URL that the caller of `compress` should open: that of the file; for a set of files, that of
    its index; and for several files or sets, that of their directory."""
    (path, shards), *others = sets.items()
    if others:
        return os.fspath(target.parent)
    file = index_of(path) if len(shards) > 1 else path
    return f"{output.rpartition('/')[0]}/{file}" if is_url(output) else os.fspath(target.parent / file)


class _Writing:
    """Writes the files of an output block by block, and updates the progress bar that `bar` makes.

    Args:
        learning: how codebooks are learned, and on which device blocks are coded.
        shards: all files of the output.
        kept: names of the tensors that are stored uncompressed, because the caller's patterns do not choose them.
        jobs: the number of threads.
        progress: whether to show a progress bar.

    Attributes:
        peak: the largest size of the process's own memory, which is measured between blocks.
    """

    def __init__(
        self, learning: CheckpointLearning, shards: list[Shard], kept: frozenset[str], jobs: int, progress: bool
    ) -> None:
        self._books = Codebooks(learning, [tensor for shard in shards for tensor in shard.tensors], kept)
        device = learning.device
        self._coder = CpuCoder(jobs) if device.type == "cpu" else CudaCoder(device, jobs)
        self._jobs, self._progress = jobs, progress
        self.peak = PeakMemory()

    def bar(self, shards: Iterable[Shard]) -> Bar:
        """Makes and returns the progress bar, a context manager, for the files that `write` will write next."""
        total = sum(shard.num_bytes for shard in shards)
        self._bar = tqdm(total=total, desc="compress", unit="B", unit_scale=True, disable=not self._progress)
        return self._bar

    def write(self, path: Path, shard: Shard, *, like: Iterable[str], replace: bool) -> dict[str, Any]:
        """Writes a file. Returns the fields of its record (see `Journal.write_record`). Raises BlockingIOError if
        another call is writing the same file. like, replace: as in `FileWriter`."""
        self._books.prepare(shard.tensors, self._jobs)
        room = shard.header_bytes(filter(None, map(self._books.of, shard.tensors)))
        options: dict[str, Any] = {"like": like, "alone": True, "replace": replace}
        with FileWriter(path, metadata=shard.metadata, header_bytes=room, **options) as writer:
            file = _BlockWriter(writer, shard.file)
            of, block_bytes = self._books.of, self._coder.block_bytes
            blocks = (block for tensor in shard.tensors for block in blocks_of(tensor, of(tensor), block_bytes))
            with (
                contextlib.closing(self._coder.coded(blocks)) as coming,
                ThreadPoolExecutor(1, "ibp-writer") as thread,
                contextlib.closing(ahead(thread, file.write, coming, _AHEAD)) as written,
            ):
                for block in written:
                    self._bar.update(block.end - block.start)
                    self.peak.passed(block.end - block.start)
            fields = {"names": writer.names, "data_bytes": writer.data_bytes}
        return {**fields, "tensors": [report.as_dict() for report in file.reports]}


class _BlockWriter:
    """Writes coded blocks to a file: all blocks of a tensor in order, then those of the next tensor.

    Args:
        writer: writes the file.
        file: the file's path within the directory of the output.

    Attributes:
        reports: the reports of the tensors that have been written.
    """

    def __init__(self, writer: FileWriter, file: str) -> None:
        self._writer, self._file = writer, file
        self._start, self._words = 0, 0  # the current tensor's offset in the data, and its sum of words so far
        self._lengths: list[np.ndarray] = []  # lengths of the current tensor's rows so far, an array for each block
        self.reports: list[TensorReport] = []

    def write(self, coded: CodedBlock) -> Block:
        """Writes a block, and releases its memory. Returns the block."""
        tensor, start, end, codebook = coded.block
        if start == 0:
            if codebook is None:
                self._sink = self._writer.plain(tensor.name, *tensor.header_entry())
            else:
                self._writer.codebook(codebook)
                self._sink = self._writer.part(f"{tensor.name}:overflow", "U8")
            self._start, self._words, self._lengths = self._sink.start, 0, []
        self._sink.write(coded.data)
        coded.release()
        self._lengths.append(coded.lengths)
        self._words += coded.words
        if end == tensor.num_bytes:
            self._finish(tensor, codebook)
        return coded.block

    def _finish(self, tensor: SourceTensor, codebook: AnyCodebook | None) -> None:
        """Ends a tensor after its last block, and adds its report. If the tensor is coded, first writes the lengths of
        its rows, the bases if any row has stored bytes, and the fields of the table."""
        self._sink.close()
        if codebook is not None:
            lengths = torch.from_numpy(np.concatenate(self._lengths))
            with self._writer.part(f"{tensor.name}:lengths", "U16") as sink:
                sink.write(lengths)
            index = torch.ops.ibp.index_rows.default(lengths, tensor.num_bytes, codebook.row_bytes, 0)
            if index[-1]:
                with self._writer.part(f"{tensor.name}:bases", "U64") as sink:
                    sink.write(index[:-1])
            form = dtype_name(tensor.dtype), tensor.shape, codebook.scheme, codebook.row_bytes
            content = finished(self._words, tensor.num_bytes)
            fields = TableFields(*form, codebook=self._writer.codebook(codebook), content=content)
            self._writer.table(tensor.name, fields)
        scheme, stored = None, tensor.num_bytes
        if codebook is not None:
            scheme, stored = codebook.scheme, self._writer.data_bytes - self._start
        report = TensorReport(tensor.name, tensor.dtype, tensor.shape, scheme, tensor.num_bytes, stored, self._file)
        self.reports.append(report)
