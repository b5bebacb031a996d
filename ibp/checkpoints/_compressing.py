"""Checkpoints compressed: `compress`."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from .._common.arguments import whole_number
from .._common.group import RankGroup, same_on_all
from .._common.progress import Bar, tqdm
from .._common.sequences import ahead
from .._common.whole_files import sync_directory
from .._files.fields import PLAIN_ITEM_BYTES, TableFields, dtype_name
from .._files.paths import PathLike, check_names_safetensors, is_url, output_of, path_text, written_to
from .._files.sets import index_of, outputs_of, replacing, write_index
from .._files.writer import FileWriter, Sink, checked_metadata
from .._schemes import AnyCodebook
from ..deltas._fingerprint import finished
from ._coding import Block, BlockCoder, CodedBlock, blocks_of, coder_for
from ._journal import Journal
from ._learning import CheckpointLearning, Codebooks
from ._model_files import check_free, copy_files_beside, weights_of
from ._planning import SHARD_BYTES, Shard, plan_of, shards_of, shares, state_of
from ._report import CheckpointReport, PeakMemory, TensorReport, joined_report
from ._source import Source, SourceTensor, chosen
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
    force: bool = False,
) -> CheckpointReport:
    """Compresses a checkpoint of any size to a file, or a set of files, that `ibp.open` and `ibp.load` read.

    Tensors are read, coded and written block by block, in bounded memory: some 100 MB besides 2 bytes a row, whatever
    their size. Names, shapes, dtypes, bytes and metadata are kept. Weights of a kind share a codebook. What does not
    get smaller, or is smaller than 4 KiB, is kept as it is. Each table has its fingerprint.

    A directory that becomes a directory keeps its other files: they are copied, and a config.json of transformers says
    that its weights are coded. Where `ibp.integrations.transformers` is imported, `from_pretrained` loads it.

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
        output: path of the file; a directory, for "model.safetensors" in it, or for the name that diffusers has for a
            file of its own; or a URL of fsspec, which the files are copied to when they are whole. A name without a
            suffix is a directory's where a directory is compressed.
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
        force: replace an output that is there, of one file or of a set.

    Returns:
        What was written; the same on all ranks but for its peak of memory.

    Raises:
        FileNotFoundError: there is no such input, or no such directory for the output.
        FileExistsError: the output is there, and force is not set.
        SourceFormatError, ibp.FileFormatError: an input is damaged, or no file of tensors.
        TypeError, ValueError: an argument is outside its range, a pattern of include matches no name, output ends as
            files of another format do (.npz, .pt), or two inputs have a tensor of one name.
        OSError: a file cannot be read or written, or another call writes the same output at this moment.
    """
    ranks = None if group is None else RankGroup(group)
    output = output_of(inputs, output)
    target_path = weights_of(inputs, output)
    with contextlib.ExitStack() as stack:

        def prepare() -> tuple[_BlockJob, Path, list[Shard]]:
            learning = CheckpointLearning(scheme, chunk_bytes, tau, None, clusters, level, row_bytes=row_bytes)
            learning = learning.checked(device)
            threads = len(os.sched_getaffinity(0)) if jobs is None else whole_number("jobs", jobs, 1, 1024)
            most = None if shard_bytes is None else whole_number("shard_bytes", shard_bytes, 1)
            checked = checked_metadata(metadata)
            shown = path_text(target_path)
            if ranks is not None and is_url(shown):
                raise ValueError(f"output is {shown!r}; with a group wanted a path that all ranks see")
            check_names_safetensors(shown)
            source = stack.enter_context(open_sources(inputs))
            for name, tensor in source.tensors.items():
                if dtype_name(tensor.dtype) not in PLAIN_ITEM_BYTES:
                    raise ValueError(f"tensor {name!r} has {tensor.dtype}, which safetensors lacks")
            kept = frozenset(source.tensors).difference(chosen(source.tensors, include, exclude))
            check_free(inputs, output, force)
            target = stack.enter_context(written_to(target_path))
            shards = shards_of(source, target, most, checked, ranks.size if ranks else 1)
            outputs_of(target, len(shards))
            return _BlockJob(learning, kept, threads, progress, shown, source, force), target, shards

        job, target, shards = _on_all(ranks, prepare)
        if ranks is None and len(shards) == 1:
            report = job.one_file(target, shards[0])
        else:
            report = job.files(target, shards, restart, ranks, stack)
        if ranks is None or ranks.rank == 0:
            copy_files_beside(inputs, output, is_coded=True)
        return report


_Made = TypeVar("_Made")


def _on_all(ranks: RankGroup | None, work: Callable[[], _Made]) -> _Made:
    """What work() returns here, once it has returned on all ranks; where it raises on one, it raises on all."""
    return work() if ranks is None else ranks.on_all(_NAME, work)


@dataclass(frozen=True)
class _BlockJob:
    """The work on each file. kept: names of the tensors that patterns leave as they are; force: what is there is
    replaced."""

    learning: CheckpointLearning
    kept: frozenset[str]
    jobs: int
    progress: bool
    output: str
    source: Source
    force: bool

    def one_file(self, target: Path, shard: Shard) -> CheckpointReport:
        books = Codebooks(self.learning, shard.tensors, self._kept(shard.tensors))
        with self._bar(shard.num_bytes) as bar, replacing(target, [target.name]):
            writing = _Writing(books, coder_for(self.learning.device, self.jobs), self.jobs, bar.update)
            fields = writing.write(target, shard, like=self.source.files, replace=self.force)
        record = {**fields, "file": target.name, "size": target.stat().st_size}
        return joined_report(self._shown(target), [record], 0, writing.peak.num_bytes)

    def files(
        self,
        target: Path,
        shards: list[Shard],
        restart: bool,
        ranks: RankGroup | None,
        stack: contextlib.ExitStack,
    ) -> CheckpointReport:
        """Makes a set of files: on this rank its own, with the others' all of them. stack: is left afterwards."""
        rank, size = (ranks.rank, ranks.size) if ranks else (0, 1)
        journal = Journal(target, plan_of(shards, state_of(self.source.files), self._options()))
        stack.callback(journal.release)
        if ranks:
            same_on_all(_NAME, ranks.together(_NAME, lambda: {"what to do": journal.summary}))
        _on_all(ranks, lambda: self._open(journal, target, restart) if rank == 0 else None)
        finished_before = _on_all(ranks, lambda: {shard.file: journal.finished(shard.file) for shard in shards})
        tensors = [tensor for shard in shards for tensor in shard.tensors]
        mine = [shard for shard in shares(shards, size)[rank] if finished_before[shard.file] is None]
        try:
            books = Codebooks(self.learning, tensors, self._kept(tensors), ranks)
            with self._bar(sum(shard.num_bytes for shard in mine), rank) as bar:
                writing = _Writing(books, coder_for(self.learning.device, self.jobs), self.jobs, bar.update)

                def write_one(shard: Shard) -> dict[str, Any]:
                    place, earlier = journal.directory / shard.file, target.with_name(shard.file)
                    like = [os.fspath(earlier)] if earlier.exists() else self.source.files
                    return journal.finish(shard.file, writing.write(place, shard, like=like, replace=True))

                def write_mine() -> dict[str, dict[str, Any]]:
                    return {shard.file: write_one(shard) for shard in mine}

                found = ranks.together(_NAME, write_mine) if ranks else [write_mine()]
        except BaseException:
            if ranks is None:
                journal.close_if_empty()
            raise
        records = {file: record for file, record in finished_before.items() if record is not None}
        kept_files = len(records)
        for some in found:
            records.update(some)
        ordered = [records[shard.file] for shard in shards]
        _on_all(ranks, lambda: _finish(target, journal, ordered) if rank == 0 else None)
        opened = index_of(target) if len(ordered) > 1 else target
        return joined_report(self._shown(opened), ordered, kept_files, writing.peak.num_bytes)

    def _open(self, journal: Journal, target: Path, restart: bool) -> None:
        """Opens the journal, unless a call that had it until now has made the output."""
        journal.open(restart)
        try:
            check_free((), target, self.force)
        except FileExistsError:
            journal.close_if_empty()
            raise

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

    def _shown(self, path: Path) -> str:
        """The path of a file of the output, as the caller knows it."""
        if not is_url(self.output):
            return os.fspath(path)
        return f"{self.output.rpartition('/')[0]}/{path.name}"


class _Writing:
    """Writes files, block by block. peak: memory of the process's own, as seen after each block."""

    def __init__(self, books: Codebooks, coder: BlockCoder, jobs: int, on_bytes: Callable[[int], object]) -> None:
        self._books, self._coder, self._jobs, self._on_bytes = books, coder, jobs, on_bytes
        self.peak = PeakMemory()

    def write(self, path: Path, shard: Shard, *, like: Iterable[str], replace: bool) -> dict[str, Any]:
        """Writes a file, which no other call writes meanwhile. Returns the fields of its record. like, replace: as of
        `FileWriter`."""
        self._books.prepare(shard.tensors, self._jobs)
        room = shard.header_bytes(filter(None, map(self._books.of, shard.tensors)))
        with FileWriter(
            path, metadata=shard.metadata, header_bytes=room, like=like, alone=True, replace=replace
        ) as writer:
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
            with writer.plain(tensor.name, tensor.dtype, tensor.shape) as sink:
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


def _finish(target: Path, journal: Journal, records: list[dict[str, Any]]) -> None:
    """Moves the files of a set to their places, and writes their index."""
    with replacing(target, outputs_of(target, len(records))):
        for record in records:
            journal.move(record)
        if len(records) > 1:
            weight_map = {name: record["file"] for record in records for name in record["names"]}
            write_index(target, weight_map, sum(record["data_bytes"] for record in records))
        sync_directory(target.parent)
    journal.close()
