"""Checkpoints compressed: `compress`."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from .._common.arguments import whole_number
from .._common.group import RankGroup, same_on_all
from .._common.progress import Bar, tqdm
from .._common.sequences import ahead
from .._files.fields import TableFields, dtype_name
from .._files.paths import SUFFIX, PathLike, is_url, path_text, written_to
from .._files.sets import index_of, is_of_weights, write_index
from .._files.writer import FileWriter, Sink, checked_metadata, sync_directory
from .._schemes import AnyCodebook
from ..deltas._fingerprint import finished
from ._coding import Block, BlockCoder, CodedBlock, blocks_of, coder_for
from ._journal import Journal
from ._learning import CheckpointLearning, Codebooks
from ._model_files import Conversion, coded_target, conversion_of
from ._outputs import SUFFIXES
from ._planning import SHARD_BYTES, Shard, plan_of, shards_of, shares, state_of
from ._report import CheckpointReport, PeakMemory, TensorReport, joined_report
from ._source import SourceTensor, chosen
from ._sources import open_sources

_NAME = "compress"
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
    group: dist.ProcessGroup | None = None,
    restart: bool = True,
    progress: bool = False,
) -> CheckpointReport:
    """Compresses a checkpoint of any size to a file, or a set of files, that `ibp.open` and `ibp.load` read.

    Tensors are read, coded and written block by block, in bounded memory: some 100 MB besides 2 bytes a row, whatever
    their size. Names, shapes, dtypes, bytes and metadata are kept. Weights of a kind share a codebook. What does not
    get smaller, or is smaller than 4 KiB, is kept as it is. Each table has its fingerprint.

    Where a directory becomes a directory, each file of tensors becomes a file of its own, and a set stays a set: of
    "model.safetensors" comes "model.ibp.safetensors", of "optimizer.pt" "optimizer.pt.ibp.safetensors". All other files
    are copied, files that hold objects of Python too, and a config.json says that the weights beside it are coded.
    Where ibp is imported, `from_pretrained` of transformers and diffusers loads them; without ibp it finds no weights.

    The output appears under its name when it is whole. Finished files of a set wait in a directory beside it,
    `.<name>.ibp-work`, where the same call finds them after an interruption, if the inputs have not changed.

    Example:
        >>> torch.save({"w": torch.arange(1000.0).repeat(100, 1)}, "model.pt")
        >>> report = ibp.checkpoints.compress("model.pt", "model.ibp", device="cpu")
        >>> report.savings > 0.5
        True
        >>> ibp.load("model.ibp", device="cpu")["w"][0, :3]
        tensor([0., 1., 2.])

    Args:
        inputs: paths, globs, directories, indices of sets or URLs of fsspec, one or many: safetensors, .npy, .npz,
            checkpoints of torch.save (read with weights_only), files of ibp.
        output: path of the file; a directory, for "model.ibp.safetensors" in it unless a directory is compressed; or a
            URL of fsspec, which the files are copied to when they are whole.
        scheme, level, chunk_bytes, tau, clusters: as in `ibp.compress`; "raw" keeps all tensors as they are.
        row_bytes: bytes of a row; None: 4,096 bytes of the flat tensor, or an item of an array of numpy that has 512
            bytes to 64 KiB.
        include, exclude: patterns of names ("*.weight", as fnmatch has them): only tensors that match one of include,
            and none of exclude, are compressed. The others are kept as they are.
        metadata: text by text, added to that of the inputs.
        shard_bytes: bytes of tensors before coding that a file has at most, unless one tensor has more. None: one file.
            Files of a set, as of a sharded model, stay files of their own.
        device: that codes the rows. None: the current GPU if there is one, else the CPU.
        jobs: threads; None: one for each core.
        group: processes that share the work, as torchrun starts them, on one machine or several with a shared
            file system: each calls this function with the same arguments, and takes whole files, the largest first; the
            rows of a checkpoint of one tensor are divided among them. They share codebooks. None: this process alone.
        restart: take over what an interrupted call has finished.
        progress: show a bar.

    Returns:
        What was written; the same on all ranks but for its peak of memory.

    Raises:
        FileNotFoundError: there is no such input.
        SourceFormatError, ibp.FileFormatError: an input is damaged, or no file of tensors.
        TypeError, ValueError: an argument is outside its range, a pattern of include matches no name, output ends as
            files of another format do (.npz, .pt), two inputs have a tensor of one name, or a config.json beside
            weights is no JSON.
        OSError: a file cannot be read or written, or another call writes the same set of files at this moment.
    """
    ranks = None if group is None else RankGroup(group)
    target_path = coded_target(output)
    with contextlib.ExitStack() as stack:

        def prepare() -> tuple[_BlockJob, Conversion | None]:
            learning = CheckpointLearning(scheme, chunk_bytes, tau, None, clusters, level, row_bytes=row_bytes)
            learning = learning.checked(device)
            threads = len(os.sched_getaffinity(0)) if jobs is None else whole_number("jobs", jobs, 1, 1024)
            most = None if shard_bytes is None else whole_number("shard_bytes", shard_bytes, 1)
            checked = checked_metadata(metadata)
            shown = path_text(target_path)
            if ranks is not None and is_url(shown):
                raise ValueError(f"output is {shown!r}; with a group wanted a path that all ranks see")
            stem, suffix = os.path.splitext(shown)  # readers would take some for another format
            if SUFFIXES.get(suffix.lower(), "safetensors") != "safetensors" and not os.path.isdir(shown):
                raise ValueError(
                    f"output is {shown!r}, but compressing writes safetensors, which readers of {suffix} files refuse; "
                    f"wanted a name like {stem + SUFFIX!r}"
                )
            conversion = conversion_of(inputs, output, True, stack)
            target = stack.enter_context(written_to(target_path))
            if conversion is None:
                sources = {Path(target.name): stack.enter_context(open_sources(inputs))}
            else:
                sources = conversion.sources
            for source in sources.values():
                for tensor in source.stored():
                    tensor.header_entry()  # ValueError: safetensors lacks its dtype
            names = dict.fromkeys(name for source in sources.values() for name in source.tensors)
            kept = frozenset(names).difference(chosen(names, include, exclude))
            sets = {}
            for path, source in sources.items():
                # a file of another format comes back as one file, and stays one
                is_cut = conversion is None or path in conversion.sets or is_of_weights(path.name)
                num_ranks = ranks.size if ranks else 1
                sets[path] = shards_of(source, path, most if is_cut else None, checked, num_ranks)
            files = [file for source in sources.values() for file in source.files]
            return _BlockJob(learning, kept, threads, progress, shown, target, sets, files), conversion

        job, conversion = _on_all(ranks, prepare)
        report = job.one_file() if ranks is None and len(job.shards) == 1 else job.all_files(restart, ranks, stack)
        if conversion is None:
            return report
        _on_all(ranks, lambda: conversion.finish() if ranks is None or ranks.rank == 0 else None)
        return replace(report, other_files=conversion.other_files())


_Made = TypeVar("_Made")


def _on_all(ranks: RankGroup | None, work: Callable[[], _Made]) -> _Made:
    """What work() returns here, once it has returned on all ranks; where it raises on one, it raises on all."""
    return work() if ranks is None else ranks.on_all(_NAME, work)


@dataclass(frozen=True)
class _BlockJob:
    """The work on each file.

    kept: names of the tensors that patterns leave as they are. target: the output on this machine, or, where a
    directory is compressed, a file in its directory. sets: the files that are written, by the path, within the
    directory of the target, that each set is named after. inputs: paths of the files that are read.
    """

    learning: CheckpointLearning
    kept: frozenset[str]
    jobs: int
    progress: bool
    output: str
    target: Path
    sets: Mapping[Path, list[Shard]]
    inputs: list[str]

    @property
    def shards(self) -> list[Shard]:
        return [shard for shards in self.sets.values() for shard in shards]

    def one_file(self) -> CheckpointReport:
        (shard,) = self.shards
        path = self.target.parent / shard.file
        path.parent.mkdir(parents=True, exist_ok=True)
        books = Codebooks(self.learning, shard.tensors, self._kept(shard.tensors))
        with self._bar(shard.num_bytes) as bar:
            writing = _Writing(books, coder_for(self.learning.device, self.jobs), self.jobs, bar.update)
            fields = writing.write(path, shard)
        record = {**fields, "file": shard.file, "size": path.stat().st_size}
        return joined_report(self._opened(), [record], 0, writing.peak.num_bytes)

    def all_files(self, restart: bool, ranks: RankGroup | None, stack: contextlib.ExitStack) -> CheckpointReport:
        """Makes all files: on this rank its own, with the others' all of them. stack: is left afterwards."""
        (rank, size), shards = (ranks.rank, ranks.size) if ranks else (0, 1), self.shards
        journal = Journal(self.target, plan_of(shards, state_of(self.inputs), self._options()))
        stack.callback(journal.release)
        if ranks:
            same_on_all(_NAME, ranks.together(_NAME, lambda: {"what to do": journal.summary}))
        _on_all(ranks, lambda: journal.open(restart) if rank == 0 else None)
        finished_before = _on_all(ranks, lambda: {shard.file: journal.finished(shard.file) for shard in shards})
        tensors = [tensor for shard in shards for tensor in shard.tensors]
        mine = [shard for shard in shares(shards, size)[rank] if finished_before[shard.file] is None]
        try:
            books = Codebooks(self.learning, tensors, self._kept(tensors), ranks)
            with self._bar(sum(shard.num_bytes for shard in mine), rank) as bar:
                writing = _Writing(books, coder_for(self.learning.device, self.jobs), self.jobs, bar.update)

                def write_mine() -> dict[str, dict[str, Any]]:
                    return {
                        shard.file: journal.finish(shard.file, writing.write(journal.path_of(shard.file), shard))
                        for shard in mine
                    }

                found = ranks.together(_NAME, write_mine) if ranks else [write_mine()]
        except BaseException:
            if ranks is None:
                journal.close_if_empty()
            raise
        records = {file: record for file, record in finished_before.items() if record is not None}
        kept_files = len(records)
        for some in found:
            records.update(some)
        _on_all(ranks, lambda: self._finish(journal, records) if rank == 0 else None)
        ordered = [records[shard.file] for shard in shards]
        return joined_report(self._opened(), ordered, kept_files, writing.peak.num_bytes)

    def _finish(self, journal: Journal, records: Mapping[str, dict[str, Any]]) -> None:
        """Moves the files to their places, and writes the index of each set."""
        home = self.target.parent
        for path, shards in self.sets.items():
            made = [records[shard.file] for shard in shards]
            for record in made:
                journal.move(record)
            if len(made) > 1:
                weight_map = {name: Path(record["file"]).name for record in made for name in record["names"]}
                index = journal.path_of(os.fspath(path))  # a later call removes what a killed one leaves of it there
                write_index(index, weight_map, sum(record["data_bytes"] for record in made))
                os.replace(index_of(index), index_of(home / path))
            sync_directory((home / path).parent)
        journal.close()

    def _opened(self) -> str:
        """What to open, as the caller knows it: the file, the index of the set, or the directory of several."""
        (path, shards), *others = self.sets.items()
        if others:
            return os.fspath(self.target.parent)
        file = index_of(path) if len(shards) > 1 else path
        if is_url(self.output):
            return f"{self.output.rpartition('/')[0]}/{file}"
        return os.fspath(self.target.parent / file)

    def _kept(self, tensors: Iterable[SourceTensor]) -> frozenset[str]:
        """Names of those of the tensors, or of the items of one, that are not to be coded."""
        return frozenset(tensor.name for tensor in tensors if (tensor.whole or tensor).name in self.kept)

    def _options(self) -> dict[str, Any]:
        fields = {
            key: value for key, value in vars(self.learning).items() if key not in ("sample", "codebook", "device")
        }
        return {**fields, "kept": sorted(self.kept)}

    def _bar(self, num_bytes: int, rank: int = 0) -> Bar:
        hidden = not self.progress or rank != 0
        return tqdm(total=num_bytes, desc="compress", unit="B", unit_scale=True, disable=hidden)


class _Writing:
    """Writes files, block by block. peak: memory of the process's own, as seen after each block."""

    def __init__(self, books: Codebooks, coder: BlockCoder, jobs: int, on_bytes: Callable[[int], object]) -> None:
        self._books, self._coder, self._jobs, self._on_bytes = books, coder, jobs, on_bytes
        self.peak = PeakMemory()

    def write(self, path: Path, shard: Shard) -> dict[str, Any]:
        """Writes a file. Returns the fields of its record."""
        self._books.prepare(shard.tensors, self._jobs)
        room = shard.header_bytes(filter(None, map(self._books.of, shard.tensors)))
        with FileWriter(path, metadata=shard.metadata, header_bytes=room) as writer:
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
        """Writes the blocks of a tensor as they come, on a thread, while the next ones are brought. Returns the lengths
        of their rows, and the sum of words."""

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
