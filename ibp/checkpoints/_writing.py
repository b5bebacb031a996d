"""Writes files of ibp. A thread writes the blocks that a coder of `_coding.py` yields, while later blocks are coded
(`write_blocks`). `write_file` writes a file of a converted checkpoint. `CheckpointWriter` is for programs that make
tables one after the other, or that have tensors in memory.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._common.arguments import whole_number
from .._common.process import Closing, ForkLock
from .._common.sequences import ahead
from .._files import (
    FileWriter,
    PathLike,
    TableFields,
    check_names_safetensors,
    dtype_name,
    entry_of,
    header_room,
    write_plain,
    write_table,
    written_to,
)
from .._rows.geometry import KEPT_DTYPES, check_tensor
from .._rows.learning import Options
from .._tables.compressed_tensor import CompressedTensor
from .._tables.weights import WeightCompressor
from ..deltas._coding import finished
from ._coding import Block, Codebooks, Coder, blocks_of, checked_options, coded_on_cpu, coded_on_its_gpu
from ._outputs import TensorReport
from ._source import Source, SourceTensor, loaded_tensor

_AHEAD = 2  # number of blocks that have been coded, and that wait to be written
# Matches names that the format reserves, and names that look like those of a table's parts, such as "weight:slots".
_UNUSUAL_NAME = re.compile(r"ibp\.|__metadata__|.*[:\[]", re.DOTALL)
# Tensors by name, or functions that return them.
_Tensors = Mapping[str, "torch.Tensor | Callable[[], torch.Tensor]"]
# The classes of plain tensors. Objects of other subclasses may keep their values elsewhere.
_CLASSES = (torch.Tensor, torch.nn.Parameter)


# ---- blocks ----


def write_file(
    path: Path,
    shard: Source,
    books: Codebooks,
    coder: Coder,
    jobs: int,
    on_bytes: Callable[[int], object],
    like: Iterable[str],
) -> dict[str, Any]:
    """Writes a file of ibp. Returns the fields of its record (see `Journal.write_record`).

    Args:
        path: the path to which the file is written.
        shard: the tensors and the metadata of the file; `shard.path` is its path within the directory of the output.
        books: the codebooks of the tensors.
        coder: the coder of the device of `books`.
        jobs: the number of threads that learn codebooks.
        on_bytes: called after each block that is written, with its number of bytes before coding.
        like: as in `FileWriter`.
    """
    tensors = list(shard.tensors.values())
    books.prepare(tensors, jobs)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    room = header_room(shapes, shard.metadata, map(books.of, tensors))
    with FileWriter(path, metadata=shard.metadata, header_bytes=room, like=like) as writer:
        coded = coder(block for tensor in tensors for block in blocks_of(tensor, books))
        reports = write_blocks(writer, shard.path, coded, on_bytes)
        fields = {"names": writer.names, "data_bytes": writer.data_bytes}
    return {**fields, "tensors": [report.as_dict() for report in reports]}


def write_blocks(
    writer: FileWriter,
    file: str,
    coded: Generator[Block, None, None],
    on_bytes: Callable[[int], object] = lambda _: None,
) -> list[TensorReport]:
    """Writes blocks on another thread, while the calling thread takes later blocks from their coder. Returns the
    reports of their tensors.

    Args:
        writer: the writer of the file.
        file: the file's path within the directory of the output, for the reports.
        coded: yields coded blocks: all blocks of a tensor in order, then those of the next tensor. It is closed.
        on_bytes: as in `write_file`.
    """
    reports: list[TensorReport] = []
    with (
        writer.unit(),
        contextlib.closing(_written_to(writer, file, reports)) as writing,
        contextlib.closing(coded),
        ThreadPoolExecutor(1, "ibp-writer") as thread,
        contextlib.closing(ahead(thread, writing.send, coded, _AHEAD)) as written,
    ):
        next(writing)
        for num_bytes in written:
            on_bytes(num_bytes)
    return reports


def _written_to(writer: FileWriter, file: str, reports: list[TensorReport]) -> Generator[int, Block, None]:
    """Receives coded blocks by `send` and writes them: all blocks of a tensor in order, then those of the next tensor.
    When a block has been written and its memory released, yields the number of bytes that the block had before coding.

    After the last block of a coded tensor, it writes the lengths of the tensor's rows, the bases if any row has stored
    bytes, and the fields of the table. Then it appends the report of the tensor to `reports`. file: the file's path
    within the directory of the output.
    """
    num_bytes = 0
    while True:
        block = yield num_bytes
        tensor, codebook = block.tensor, block.codebook
        if codebook is None:
            place = writer.plain(tensor.name, *tensor.header_entry())
        else:
            writer.codebook(codebook)
            place = writer.part(f"{tensor.name}:overflow", "U8")
        start, total, of_blocks = writer.data_bytes, 0, list[np.ndarray]()
        with place as write:
            while True:
                write(block.data)
                block.release()
                total, num_bytes = total + (block.words or 0), block.end - block.start
                if codebook is not None:
                    of_blocks.append(block.lengths)
                if block.end == tensor.num_bytes:
                    break
                block = yield num_bytes
        scheme, stored = None, tensor.num_bytes
        if codebook is not None:
            lengths = torch.from_numpy(np.concatenate(of_blocks))
            with writer.part(f"{tensor.name}:lengths", "U16") as write:
                write(lengths)
            index = torch.ops.ibp.index_rows.default(lengths, tensor.num_bytes, codebook.row_bytes, 0)
            if index[-1]:
                with writer.part(f"{tensor.name}:bases", "U64") as write:
                    write(index[:-1])
            form = dtype_name(tensor.dtype), tensor.shape, codebook.scheme, codebook.row_bytes
            content = None if block.words is None else finished(total, tensor.num_bytes)
            writer.table(tensor.name, TableFields(*form, codebook=writer.codebook(codebook), content=content))
            scheme, stored = codebook.scheme, writer.data_bytes - start
        reports.append(TensorReport(tensor.name, tensor.dtype, tensor.shape, scheme, tensor.num_bytes, stored, file))


# ---- files that are written tensor by tensor ----


class CheckpointWriter(Closing):
    """A file of ibp that is written by several calls: `compress` compresses and writes tensors that are in memory, and
    `write` writes one table or tensor, for programs that make them one after the other. If all tables and tensors are
    there already, `ibp.save` is simpler. `ibp.open` reads the file.

    It is a context manager. When the `with` block ends normally, the file appears under its name, complete and on disk.
    When the block ends with an exception, an earlier file of that name stays unchanged. If `write` or `compress` fails
    after it has begun to write, no file appears, even if the block catches the exception: the end of the block then
    raises ValueError. After an exception for wrong arguments, which comes before anything is written, the block can go
    on.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> with ibp.checkpoints.CheckpointWriter("weights.safetensors", {"a": x.shape, "b": [4]}) as writer:
        ...     a_bytes = writer.write("a", ibp.compress(x))
        ...     b_bytes = writer.write("b", torch.ones(4))
        >>> a_bytes < x.nbytes, torch.equal(ibp.open("weights.safetensors")["b"], torch.ones(4))
        (True, True)

    Args:
        output: path of the file; or a directory, in which the file is "model.safetensors"; or a URL that fsspec
            supports.
        shapes: the shapes, by name, of all tables and tensors that will be written. They decide how much space is
            reserved for the header. If the header needs more, for example for the codebooks of tables with clusters,
            the end of the `with` block moves all data in the file, which takes as long as copying the file.
        metadata: a dict of strings, which is stored in the file. No key may begin with "ibp.".

    Raises:
        TypeError, ValueError: shapes or metadata is invalid, output has the suffix of another format, or (on leaving) a
            call has failed.
        OSError: (on entering, writing and leaving) the file cannot be written.
    """

    def __init__(
        self,
        output: PathLike,
        shapes: Mapping[str, Sequence[int]],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        check_names_safetensors(output)
        if not isinstance(shapes, Mapping) or not all(isinstance(shape, Sequence) for shape in shapes.values()):
            raise TypeError(f"shapes is {str(shapes)[:80]}; wanted a mapping from names to shapes")
        self._output, self._metadata, self._header_bytes = output, metadata, header_room(shapes, metadata)
        self._file: FileWriter | None = None
        self._open = contextlib.ExitStack()

    @staticmethod
    def takes(name: str, tensor: torch.Tensor) -> bool:
        """Returns whether a file can hold a tensor under a name.

        The tensor must be dense. Its class must be torch.Tensor or torch.nn.Parameter, and its dtype must be one that
        safetensors has. The name must be printable. It must not be reserved, and must not look like the name of a part
        of a table, such as "weight:slots".

        Example:
            >>> [ibp.checkpoints.CheckpointWriter.takes(name, torch.ones(3)) for name in ("weight", "weight:slots")]
            [True, False]
        """
        if not isinstance(name, str) or not name.isprintable() or _UNUSUAL_NAME.match(name):
            return False
        is_plain = type(tensor) in _CLASSES and tensor.layout == torch.strided
        return is_plain and entry_of(tensor.dtype, tuple(tensor.shape)) is not None and not tensor.is_meta

    def write(self, name: str, value: CompressedTensor | torch.Tensor) -> int:
        """Writes a table or tensor, which may be on any device, block by block. Returns its size in bytes in the file.

        Raises:
            TypeError: the name is not a string, or the value is neither a table nor a dense tensor.
            ValueError: the file is not open, already has a value of this name, or cannot have such a name; or
                safetensors does not have the tensor's dtype; or an earlier call has failed.
        """
        file = self._opened()
        start = file.data_bytes
        if isinstance(value, CompressedTensor):
            write_table(file, name, value)
        else:
            write_plain(file, name, value)
        return file.data_bytes - start

    def compress(self, tensors: _Tensors, *, jobs: int | None = None) -> dict[str, int]:
        """Compresses tensors and writes them, in order. A separate thread writes what is compressed while the next
        tensors are compressed. Tensors of the same kind share a codebook: their names differ only in numbers, and their
        shapes and dtypes are equal. Tensors that would not get smaller, or that have less than 4 KiB, are stored
        uncompressed.

        A tensor in host memory is compressed on the CPU, block by block, by up to `jobs` threads. A tensor on a GPU is
        compressed on that GPU as a whole, by the calling thread and the current stream of the GPU, so that the stream
        may still have work queued that fills the tensor. When the call returns, all tensors have been read.

        Example:
            >>> layers = {f"layers.{number}.weight": torch.randn(1000, 1024) for number in range(4)}
            >>> shapes = {name: tensor.shape for name, tensor in layers.items()}
            >>> with ibp.checkpoints.CheckpointWriter("layers.safetensors", shapes) as writer:
            ...     stored = writer.compress(layers, jobs=2)
            >>> all(stored[name] < tensor.nbytes for name, tensor in layers.items())
            True
            >>> torch.equal(ibp.load("layers.safetensors")["layers.3.weight"].decompress(), layers["layers.3.weight"])
            True

        Args:
            tensors: dense tensors by name, in host memory or on GPUs, with any strides; or functions that return them,
                for programs that cannot hold all tensors at once. A function is called several times, by any thread,
                and must return a tensor of its own, with the same values each time. At most `jobs` of the tensors that
                functions have returned are kept, and a few more while their blocks are written.
            jobs: the largest number of threads that compress tensors in host memory. None: one for each core.

        Returns:
            The size in bytes of each tensor in the file, by name, without its codebook.

        Raises:
            TypeError: tensors is not a mapping from strings to dense tensors, or a tensor is of a subclass other than
                torch.nn.Parameter.
            ValueError: the file is not open, already has a tensor of such a name, or cannot have such a name; or
                safetensors does not have the dtype of a tensor; or jobs is not 1 to 1024; or an earlier call has
                failed.
            RuntimeError: a tensor on a GPU has changed while it was compressed, or a function has returned a tensor of
                another shape, dtype or device than before.
            OSError: the file cannot be written.
        """
        file = self._opened()
        jobs = len(os.sched_getaffinity(0)) if jobs is None else whole_number("jobs", jobs, 1, 1024)
        if not isinstance(tensors, Mapping):
            raise TypeError(f"tensors is a {type(tensors).__name__}; wanted a mapping from names to tensors")
        file.check_names(dict.fromkeys(tensors, True))
        are_on_cpu, load = _sources_of(tensors, jobs, file.path)
        on_host = [source for source, is_on_cpu in are_on_cpu.items() if is_on_cpu]
        books = Codebooks(checked_options(Options(device="cpu")), on_host)
        with file.unit():  # because functions may fail
            books.prepare(on_host, jobs)
        compressor = WeightCompressor({"memory": "host"})

        def coded() -> Generator[Block, None, None]:
            for is_on_cpu, some in itertools.groupby(are_on_cpu, are_on_cpu.__getitem__):
                if is_on_cpu:
                    blocks = (block for source in some for block in blocks_of(source, books))
                    yield from coded_on_cpu(blocks, jobs, content=False)
                else:
                    yield from (coded_on_its_gpu(source, load(source.name), compressor) for source in some)

        return {report.name: report.stored_bytes for report in write_blocks(file, file.path.name, coded())}

    def _opened(self) -> FileWriter:
        """Returns the writer of the file. Raises ValueError if the file is not open."""
        if self._file is None:
            raise ValueError("the file is not open; wanted `with ibp.checkpoints.CheckpointWriter(...) as writer:`")
        return self._file

    def __enter__(self) -> CheckpointWriter:
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(written_to(self._output))
            file = FileWriter(target, metadata=self._metadata, header_bytes=self._header_bytes)
            self._file = stack.enter_context(file)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._file = None
        self._open.__exit__(*error)  # type: ignore[arg-type]

    def close(self) -> None:
        """Finishes the file, like the end of the `with` block. Does nothing if the file is finished already."""
        self.__exit__(None, None, None)


def _sources_of(
    tensors: _Tensors, num_held: int, path: Path
) -> tuple[dict[SourceTensor, bool], Callable[[str], torch.Tensor]]:
    """Returns (a `SourceTensor` for each tensor, and whether the tensor is in host memory; a function that returns the
    tensor of a name, without a gradient). A source does not hold its tensor, but calls the function, as any thread may
    do. The function holds the last num_held tensors that it has returned. Raises what `CheckpointWriter.compress`
    raises for a wrong tensor. path: the file to which the tensors are written."""
    # Functions run on the stream of the calling thread, whichever thread calls them.
    lock = ForkLock()
    on_stream: Callable[[], Any] = contextlib.nullcontext
    if torch.cuda.is_initialized():
        on_stream = functools.partial(torch.cuda.stream, torch.cuda.current_stream())

    first: dict[str, tuple[object, ...]] = {}  # the dtype, the shape and the device of each tensor

    @functools.lru_cache(num_held)
    def held(name: str) -> torch.Tensor:
        given = tensors[name]
        with on_stream():
            tensor = given() if callable(given) else given
        check_tensor(tensor, repr(name), KEPT_DTYPES)
        if type(tensor) not in _CLASSES:
            raise TypeError(f"{name!r} is a {type(tensor).__name__}; wanted a torch.Tensor or torch.nn.Parameter")
        found = tensor.dtype, tensor.shape, tensor.device
        if first.setdefault(name, found) != found:
            raise RuntimeError(f"the function of {name!r} has returned {first[name]}, and now {found}: wanted the same")
        return tensor.detach()

    def load(name: str) -> torch.Tensor:
        with lock:  # `lru_cache` would let each of several threads call a function
            return held(name)

    def read(name: str, start: int, end: int) -> np.ndarray:
        return loaded_tensor(name, load(name), path).read(start, end)

    are_on_cpu: dict[SourceTensor, bool] = {}
    for name in tensors:
        tensor = load(name)
        source = loaded_tensor(name, tensor, path)
        source.header_entry()  # raises ValueError if safetensors does not have the dtype
        are_on_cpu[replace(source, read=functools.partial(read, name))] = tensor.is_cpu
    return are_on_cpu, load
