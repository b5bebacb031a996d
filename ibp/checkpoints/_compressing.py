"""`compress`: compresses checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._common.arguments import whole_number
from .._common.progress import Bar, tqdm
from .._common.sequences import ahead
from .._common.whole_files import sync_directory
from .._files import (
    FileWriter,
    PathLike,
    Sink,
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
    write_index,
    written_to,
)
from .._schemes import AnyCodebook, Options
from ..deltas._fingerprint import finished
from ._coding import Block, BlockCoder, CodedBlock, blocks_of, coder_for
from ._journal import Journal, work_directory
from ._learning import CheckpointLearning, Codebooks
from ._model_files import CODED_WEIGHTS, already_there, check_output, conversion_of, exists
from ._planning import SHARD_BYTES, Shard, plan_of, shards_of, state_of
from ._report import CheckpointReport, PeakMemory, TensorReport, joined_report
from ._source import SourceTensor, chosen
from ._sources import open_sources

_AHEAD = 2  # blocks that wait to be written


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
    progress: bool = False,
    force: bool = False,
) -> CheckpointReport:
    """Compresses a checkpoint of any size to a file, or a set of files, that `ibp.open` and `ibp.load` read.

    Tensors are read, coded and written block by block, in bounded memory: about 100 MB plus 2 bytes per row, whatever
    their size. Names, shapes, dtypes, bytes and metadata are kept. Weights of a kind share a codebook. Tensors that
    would not get smaller, or that are smaller than 4 KiB, are kept as they are. Each table has its fingerprint.

    If a directory is compressed to a directory, each file of tensors becomes a file of its own, and a set stays a set:
    "model.safetensors" becomes "model.ibp.safetensors", and "optimizer.pt" becomes "optimizer.pt.ibp.safetensors". All
    other files are copied, including files that hold objects of Python, and a config.json says that the weights beside
    it are coded. If ibp is imported, `from_pretrained` of transformers and diffusers loads them; without ibp it finds
    no weights.

    The output appears under its name when it is whole. Finished files of a set wait in a directory beside it,
    `.<name>.ibp-work`. After an interruption the same call finds them there, if the inputs have not changed.

    Example:
        >>> torch.save({"w": torch.arange(1000.0).repeat(100, 1)}, "model.pt")
        >>> report = ibp.checkpoints.compress("model.pt", "model.ibp", device="cpu")
        >>> report.savings > 0.5
        True
        >>> ibp.load("model.ibp", device="cpu")["w"][0, :3]
        tensor([0., 1., 2.])

    Args:
        inputs: one or many paths, globs, directories, indices of sets or URLs of fsspec: safetensors, .npy, .npz,
            checkpoints of torch.save (read with weights_only), files of ibp.
        output: path of the file; a directory, for "model.ibp.safetensors" in it unless a directory is compressed; or a
            URL of fsspec, to which the files are copied when they are whole. If a directory is compressed, a name
            without a suffix is that of a directory.
        scheme, level, chunk_bytes, tau, clusters: as in `ibp.compress`; "raw" keeps all tensors as they are.
        row_bytes: bytes of a row. None: 4,096 bytes of the flat tensor, or an item of an array of numpy if it has 512
            bytes to 64 KiB.
        include, exclude: patterns of names ("*.weight", as in fnmatch). Only tensors that match a pattern of include,
            and none of exclude, are compressed. The others are kept as they are.
        metadata: texts by keys, added to the metadata of the inputs.
        shard_bytes: the largest number of bytes of tensors before coding in a file, unless one tensor is larger. None:
            one file. Files of a set, such as those of a sharded model, are never joined.
        device: the device that codes the rows. None: the current GPU if there is one, else the CPU.
        jobs: the number of threads. None: one for each core.
        restart: whether to use the files that an interrupted call has finished.
        progress: whether to show a progress bar.
        force: whether to replace an existing output, which may be one file or a set.

    Returns:
        What was written.

    Raises:
        FileNotFoundError: there is no such input, or no such directory for the output.
        FileExistsError: the output exists, and force is not set.
        SourceFormatError, ibp.FileFormatError: an input is damaged, or is not a file of tensors.
        TypeError, ValueError: an argument is outside its range, a pattern of include matches no name, output ends like
            files of another format (.npz, .pt), two inputs have a tensor with the same name, or a config.json beside
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
        conversion = conversion_of(inputs, output, True, stack)
        if conversion is None:
            opened = stack.enter_context(open_sources(inputs))
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
            # A file of another format becomes one file again, so that it must stay one file.
            is_cut = conversion is None or path in conversion.sets or is_of_weights(path.name)
            sets[path] = shards_of(source, path, most if is_cut else None, checked)
            outputs_of(target.parent / path, len(sets[path]))
        files = {path: source.files for path, source in sources.items()}
        job = _BlockJob(learning, kept, threads, progress, output, target, sets, files, force, there)
        report = job.one_file() if len(job.shards) == 1 else job.all_files(restart, stack)
        if conversion is None:
            return report
        conversion.finish()
        return replace(report, other_files=conversion.other_files())


@dataclass(frozen=True)
class _BlockJob:
    """Compresses the sources to files, as one job that can be interrupted and resumed.

    Attributes:
        kept: names of the tensors that patterns leave as they are.
        target: the output on this machine, or, if a directory is compressed, a file in its directory.
        sets: the files that are written, by the path, within the directory of the target, that each set is named after.
        inputs: paths of the files that each set is made from.
        force: whether to replace what exists.
        there: what exists already. Only the call that began to write it goes on with it.
    """

    learning: CheckpointLearning
    kept: frozenset[str]
    jobs: int
    progress: bool
    output: str
    target: Path
    sets: Mapping[Path, list[Shard]]
    inputs: Mapping[Path, Sequence[str]]
    force: bool
    there: str | None

    @property
    def shards(self) -> list[Shard]:
        return [shard for shards in self.sets.values() for shard in shards]

    def one_file(self) -> CheckpointReport:
        if self.there is not None:
            raise exists(self.there)
        ((named, (shard,)),) = self.sets.items()
        path = self.target.parent / shard.file
        path.parent.mkdir(parents=True, exist_ok=True)  # a directory within that of the output
        books = Codebooks(self.learning, shard.tensors, self._kept(shard.tensors))
        with self._bar(shard.num_bytes) as bar, replacing(path, [path.name]):
            writing = _Writing(books, coder_for(self.learning.device, self.jobs), self.jobs, bar.update)
            fields = writing.write(path, shard, like=self.inputs[named], replace=self.force)
        record = {**fields, "file": shard.file, "size": path.stat().st_size}
        return joined_report(self._opened(), [record], 0, writing.peak.num_bytes)

    def all_files(self, restart: bool, stack: contextlib.ExitStack) -> CheckpointReport:
        """Makes all files. stack: the caller closes it afterwards."""
        files = [file for of_set in self.inputs.values() for file in of_set]
        shards = self.shards
        journal = Journal(self.target, plan_of(shards, state_of(files), self._options()))
        stack.callback(journal.release)
        self._open(journal, restart)
        records = {shard.file: record for shard in shards if (record := journal.finished(shard.file)) is not None}
        kept_files, missing = len(records), [shard for shard in shards if shard.file not in records]
        tensors = [tensor for shard in shards for tensor in shard.tensors]
        try:
            books = Codebooks(self.learning, tensors, self._kept(tensors))
            with self._bar(sum(shard.num_bytes for shard in missing)) as bar:
                writing = _Writing(books, coder_for(self.learning.device, self.jobs), self.jobs, bar.update)
                for shard in missing:
                    path, like = journal.path_of(shard.file), self._like(shard)
                    fields = writing.write(path, shard, like=like, replace=True)
                    records[shard.file] = journal.finish(shard.file, fields)
        except BaseException:
            journal.close_if_empty()
            raise
        self._finish(journal, records)
        ordered = [records[shard.file] for shard in shards]
        return joined_report(self._opened(), ordered, kept_files, writing.peak.num_bytes)

    def _open(self, journal: Journal, restart: bool) -> None:
        """Opens the journal.

        Raises:
            FileExistsError: the output exists, and this call does not go on with it. A call that had the journal until
                now may have made it.
        """
        goes_on = journal.open(restart)
        made = (os.fspath(self.target.parent / path) for path in self.sets)
        there = self.there or next(filter(is_there, made), None)
        if there is not None and not (self.force or goes_on):
            journal.close_if_empty()
            raise exists(there)

    def _like(self, shard: Shard) -> Sequence[str]:
        """Returns the file that a file of the set replaces, or else the files that the set is made from."""
        earlier = self.target.parent / shard.file
        if earlier.exists():
            return [os.fspath(earlier)]
        return next(self.inputs[path] for path, shards in self.sets.items() if shard in shards)

    def _finish(self, journal: Journal, records: Mapping[str, dict[str, Any]]) -> None:
        """Moves the files to their places, and writes the index of each set."""
        for path, shards in self.sets.items():
            home, made = self.target.parent / path, [records[shard.file] for shard in shards]
            with replacing(home, outputs_of(home, len(made))):
                for record in made:
                    journal.move(record)
                if len(made) > 1:
                    weight_map = {name: Path(record["file"]).name for record in made for name in record["names"]}
                    write_index(home, weight_map, sum(record["data_bytes"] for record in made))
            sync_directory(home.parent)
        journal.close()

    def _opened(self) -> str:
        """Returns what the caller should open: the file, the index of the set, or the directory of several."""
        (path, shards), *others = self.sets.items()
        if others:
            return os.fspath(self.target.parent)
        file = index_of(path) if len(shards) > 1 else path
        if is_url(self.output):
            return f"{self.output.rpartition('/')[0]}/{file}"
        return os.fspath(self.target.parent / file)

    def _kept(self, tensors: Iterable[SourceTensor]) -> frozenset[str]:
        """Returns the names of those tensors that are not to be coded."""
        return frozenset(tensor.name for tensor in tensors).intersection(self.kept)

    def _options(self) -> dict[str, Any]:
        names = ("scheme", "chunk_bytes", "tau", "clusters", "level", "row_bytes")
        return {**{name: getattr(self.learning.options, name) for name in names}, "kept": sorted(self.kept)}

    def _bar(self, num_bytes: int) -> Bar:
        return tqdm(total=num_bytes, desc="compress", unit="B", unit_scale=True, disable=not self.progress)


class _Writing:
    """Writes files, block by block. peak: notes the process's own memory after each block."""

    def __init__(self, books: Codebooks, coder: BlockCoder, jobs: int, on_bytes: Callable[[int], object]) -> None:
        self._books, self._coder, self._jobs, self._on_bytes = books, coder, jobs, on_bytes
        self.peak = PeakMemory()

    def write(self, path: Path, shard: Shard, *, like: Iterable[str], replace: bool) -> dict[str, Any]:
        """Writes a file, which no other call writes meanwhile. Returns the fields of its record. like, replace: as
        in `FileWriter`."""
        self._books.prepare(shard.tensors, self._jobs)
        room = shard.header_bytes(filter(None, map(self._books.of, shard.tensors)))
        options: dict[str, Any] = {"like": like, "alone": True, "replace": replace}
        with FileWriter(path, metadata=shard.metadata, header_bytes=room, **options) as writer:
            coming = self._coder.coded(self._blocks(shard.tensors))
            with contextlib.closing(coming), ThreadPoolExecutor(1, "ibp-writer") as self._thread:
                reports = [self._write_tensor(writer, tensor, coming, shard.file) for tensor in shard.tensors]
            fields = {"names": writer.names, "data_bytes": writer.data_bytes}
        return {**fields, "tensors": [report.as_dict() for report in reports]}

    def _blocks(self, tensors: Iterable[SourceTensor]) -> Iterator[Block]:
        for tensor in tensors:
            yield from blocks_of(tensor, self._books.of(tensor), self._coder.block_bytes)

    def _write_tensor(
        self, writer: FileWriter, tensor: SourceTensor, coming: Iterator[CodedBlock], file: str
    ) -> TensorReport:
        codebook = self._books.of(tensor)
        scheme, number = (None, None) if codebook is None else (codebook.scheme, writer.codebook(codebook))
        start = writer.data_bytes
        if codebook is None:
            with writer.plain(tensor.name, *tensor.header_entry()) as sink:
                self._write_blocks(tensor, coming, sink)
        else:
            self._write_table(writer, tensor, codebook, number, coming)
        stored = writer.data_bytes - start
        return TensorReport(tensor.name, tensor.dtype, tensor.shape, scheme, tensor.num_bytes, stored, file)

    def _write_table(
        self,
        writer: FileWriter,
        tensor: SourceTensor,
        codebook: AnyCodebook,
        number: int | None,
        coming: Iterator[CodedBlock],
    ) -> None:
        with writer.part(f"{tensor.name}:overflow", "U8") as sink:
            start = writer.data_bytes
            parts, words = self._write_blocks(tensor, coming, sink)
            has_overflow = writer.data_bytes > start
        lengths = torch.from_numpy(np.concatenate(parts))
        with writer.part(f"{tensor.name}:lengths", "U16") as sink:
            sink.write(lengths)
        if has_overflow:
            index = torch.ops.ibp.index_rows.default(lengths, tensor.num_bytes, codebook.row_bytes, 0)
            with writer.part(f"{tensor.name}:bases", "U64") as sink:
                sink.write(index[:-1])
        fields = TableFields(
            dtype_name(tensor.dtype),
            tensor.shape,
            codebook.scheme,
            codebook.row_bytes,
            codebook=number,
            content=finished(words, tensor.num_bytes),
        )
        writer.table(tensor.name, fields)

    def _write_blocks(
        self, tensor: SourceTensor, coming: Iterator[CodedBlock], sink: Sink
    ) -> tuple[list[np.ndarray], int]:
        """Writes the blocks of a tensor as they come, on a thread, while the next ones are read and coded. Returns
        the lengths of their rows, and the sum of words."""

        def put(coded: CodedBlock) -> CodedBlock:
            sink.write(coded.data)
            coded.release()
            return coded

        blocks = list(self._blocks([tensor]))
        parts, words = [], 0
        with contextlib.closing(ahead(self._thread, put, itertools.islice(coming, len(blocks)), _AHEAD)) as written:
            for block, coded in zip(blocks, written):
                parts.append(coded.lengths)
                words += coded.words
                self._on_bytes(block.end - block.start)
                self.peak.passed(block.end - block.start)
        return parts, words
