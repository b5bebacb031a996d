"""torch.distributed.checkpoint (DCP) with compressed tensors: FSDP2, torchtitan and Lightning save with it.

    import torch.distributed.checkpoint as dcp
    from ibp.integrations.dcp import Reader, Writer

    dcp.save(state_dict, storage_writer=Writer("step-1000"))
    dcp.load(state_dict, storage_reader=Reader("step-1000"))

Every rank writes its tensors to one file, which `ibp.open` and `ibp inspect` read as well, and everything else to a
file of torch's own kind. DCP's planners decide, as always, which rank writes which part of a tensor, so that any number
of ranks can load a checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .._common.sequences import ahead
from .._fetch.streaming import decompress
from .._files import File, FileFormatError, FileWriter, entry_of, header_room, is_url, write_plain, write_table
from .._files import open as open_file
from .._tables.compressed_tensor import CompressedTensor
from .._tables.weights import WeightCompressor, is_worth_coding

__all__ = ["Reader", "Writer"]

# What DCP's metadata says of a tensor in a file of ibp. A FileSystemReader of torch finds no extension of this name,
# and refuses the tensor with a ValueError that has the name.
_DESCRIPTOR = "ibp.integrations.dcp/1"
_SUFFIX = ".ibp.safetensors"
_AHEAD = 1  # compressed tensors that wait while another one is written; each takes memory
_UNUSUAL_NAME = re.compile(
    r"ibp\.|__metadata__|.*[:\[]", re.DOTALL
)  # Names that parts of tables or of tensors can have.


class Writer(FileSystemWriter):
    """Writes a checkpoint of `torch.distributed.checkpoint` with compressed tensors.

    Tensors keep their bits. Those that would not get smaller, or have less than 4 KiB, are stored as they are; tensors
    of dtypes that safetensors lacks, of subclasses, and objects of Python are stored as torch stores them. Tensors of a
    kind, such as the same weight of all layers, share a codebook. A tensor is compressed where it is: on its GPU, or on
    the CPU.

    A file has a new name in every save, and appears under it when it is whole. Therefore an earlier checkpoint in the
    same directory stays whole until the new metadata replace its own; then its files are removed.

    It also serves `dcp.async_save`, in a thread or in a process.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> from ibp.integrations.dcp import Reader, Writer
        >>> state = {"weight": torch.randn(1000, 1024).bfloat16(), "step": 7}
        >>> _ = dcp.save(state, storage_writer=Writer("checkpoint"), no_dist=True)
        >>> loaded = {"weight": torch.empty(1000, 1024).bfloat16(), "step": 0}
        >>> dcp.load(loaded, storage_reader=Reader("checkpoint"), no_dist=True)
        >>> torch.equal(loaded["weight"], state["weight"]), loaded["step"]
        (True, 7)

    Args:
        path: the directory of the checkpoint.
        options: arguments of torch's FileSystemWriter, such as `overwrite` and `thread_count`, which concern what torch
            stores. Files of tensors are always flushed to the disk.

    Raises:
        TypeError: FileSystemWriter has no such argument, or it is one that says how tensors are stored:
            `serialization_format`, `_extensions`, `single_file_per_rank`.
        ValueError: path is a URL.
    """

    def __init__(self, path: Any, **options: Any) -> None:
        if taken := {"serialization_format", "_extensions", "single_file_per_rank"} & options.keys():
            raise TypeError(f"{', '.join(sorted(taken))}: ibp decides how tensors are stored; wanted other options")
        _check_path(path)
        super().__init__(path, **options)

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id:
            _check_path(checkpoint_id)
        super().reset(checkpoint_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # The name differs in every save, so that no file of an earlier checkpoint is overwritten.
        prefix = f"{plan.storage_data.prefix}{uuid.uuid4().hex}_"
        coded: list[WriteItem] = []
        others: list[WriteItem] = []
        for item in plan.items:
            (coded if _is_stored(item, planner) else others).append(item)
        results: list[WriteResult] = []
        if others:
            storage = dataclasses.replace(plan.storage_data, prefix=prefix)
            results += super().write_data(dataclasses.replace(plan, items=others, storage_data=storage), planner).wait()
        if coded:
            results += _write_tensors(Path(self.path) / f"{prefix}tensors{_SUFFIX}", coded, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        written = {result.storage_data.relative_path for of_rank in results for result in of_rank}
        # If ranks write metadata of their own, only the files of this rank can be judged.
        rank = r"\d+" if self.use_collectives or self.rank is None else str(self.rank)
        own = re.compile(rf"__{rank}_[0-9a-f]{{32}}_(tensors{re.escape(_SUFFIX)}|\d+\.distcp)")
        for file in Path(self.path).iterdir():
            if own.fullmatch(file.name) and file.name not in written:
                file.unlink(missing_ok=True)


class Reader(FileSystemReader):
    """Reads a checkpoint of `torch.distributed.checkpoint`, whether `Writer` or torch's FileSystemWriter wrote it.

    Tensors on a GPU are decompressed there, from the compressed bytes. If a rank wants some rows of a tensor, as with
    another number of ranks than the checkpoint was saved with, only these rows are read.

    Args:
        path: the directory of the checkpoint.

    Raises:
        ValueError: path is a URL.
        FileFormatError: (`dcp.load`) a file and the checkpoint's metadata contradict each other.
        CorruptTableError: (`dcp.load`) the bytes of a tensor contradict each other.
    """

    def __init__(self, path: Any) -> None:
        _check_path(path)
        super().__init__(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id:
            _check_path(checkpoint_id)
        super().reset(checkpoint_id)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, list[ReadItem]] = {}
        others = []
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            if _DESCRIPTOR in (place.transform_descriptors or ()):
                files.setdefault(place.relative_path, []).append(item)
            else:
                others.append(item)
        for name, items in files.items():
            with open_file(Path(self.path) / name, memory="host") as file:
                self._read_tensors(file, items, planner)
        return super().read_data(dataclasses.replace(plan, items=others), planner)

    def _read_tensors(self, file: File, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        """Reads parts of tensors to where the planner wants them. Whole tables are decompressed as one stream."""
        tables: list[CompressedTensor] = []
        outs: list[torch.Tensor] = []
        planned = []
        for item in items:
            out = planner.resolve_tensor(item).detach()
            planned.append((item, out))
            value = self._value(file, item.storage_index)
            whole = tuple(value.shape)
            if tuple(item.lengths) != tuple(out.shape):
                raise ValueError(
                    f"{item.storage_index.fqn!r}: the plan wants {list(item.lengths)} for {list(out.shape)}"
                )
            if isinstance(value, CompressedTensor) and tuple(item.lengths) == whole and out.dtype == value.dtype:
                tables.append(value)
                outs.append(out)
            else:
                out.copy_(_part(value, item, out.device))
        decompress(tables, out=outs, check=True)
        for item, out in planned:
            planner.commit_tensor(item, out)

    def _value(self, file: File, index: MetadataIndex) -> CompressedTensor | torch.Tensor:
        """Returns a chunk of a tensor as it is stored. Raises FileFormatError unless it is what the metadata say."""
        name = _name_of(index)
        if name not in file:
            raise FileFormatError(f"{file.path} has no tensor {name!r}, which the checkpoint's metadata name")
        value = file[name]
        tensor = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        sizes = [tuple(chunk.sizes) for chunk in tensor.chunks if _is_at(chunk, index)]
        if value.dtype != tensor.properties.dtype or tuple(value.shape) not in sizes:
            raise FileFormatError(
                f"{file.path} has {name!r} as {value.dtype} {list(value.shape)}; the checkpoint's metadata say "
                f"{tensor.properties.dtype} {', '.join(str(list(size)) for size in sizes) or 'nothing'}"
            )
        return value  # type: ignore[return-value]


def _check_path(path: Any) -> None:
    if is_url(str(path)):
        raise ValueError(f"{str(path)!r} is a URL; wanted a directory of this machine")


def _name_of(index: MetadataIndex) -> str:
    """Returns the name that a part of a tensor has in its file: the tensor's name, and where the part begins unless it
    begins where the tensor does."""
    offset = list(index.offset or ())
    return f"{index.fqn}{offset}" if any(offset) else index.fqn


def _is_at(chunk: ChunkStorageMetadata, index: MetadataIndex) -> bool:
    return index.offset is None or tuple(chunk.offsets) == tuple(index.offset)


# ---- writing ----


def _is_stored(item: WriteItem, planner: SavePlanner) -> bool:
    """Returns whether an item is a tensor that a file of ibp can hold: a dense one, of no subclass, of a dtype of
    safetensors, and of a name that no other entry of such a file can have."""
    name = item.index.fqn
    if item.type == WriteItemType.BYTE_IO or not name.isprintable() or _UNUSUAL_NAME.match(name):
        return False
    tensor = _tensor_of(item, planner)
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return is_plain and entry_of(tensor.dtype, tuple(tensor.shape)) is not None and not tensor.is_meta


def _tensor_of(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _write_tensors(path: Path, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    """Writes tensors to a file, each on a thread while the next one is compressed."""
    names = [_name_of(item.index) for item in items]
    dimensions = sum(len(item.tensor_data.size) for item in items if item.tensor_data is not None)
    room = header_room(names, None, len(items)) + 32 * dimensions
    compressor = WeightCompressor({"memory": "host"})

    def compressed() -> Iterator[tuple[WriteItem, CompressedTensor | torch.Tensor]]:
        # This runs in the caller's thread, because a tensor on a GPU is complete only in the order of this thread's
        # stream. A tensor is compressed where it is, because the GPU of a tensor in host memory may be training.
        for item in items:
            tensor = _tensor_of(item, planner).detach()
            if is_worth_coding(tensor):
                table = compressor.compress(item.index.fqn, tensor, device=tensor.device)
                yield item, tensor.cpu() if table.scheme == "raw" else table
            else:
                yield item, tensor.cpu()

    def write(pair: tuple[WriteItem, CompressedTensor | torch.Tensor]) -> WriteResult:
        item, value = pair
        start = writer.data_bytes
        if isinstance(value, CompressedTensor):
            write_table(writer, _name_of(item.index), value)
        else:
            write_plain(writer, _name_of(item.index), value)
        stored = writer.data_bytes - start
        return WriteResult(item.index, stored, _StorageInfo(path.name, 0, stored, [_DESCRIPTOR]))

    with FileWriter(path, header_bytes=room) as writer, ThreadPoolExecutor(1, "ibp-writer") as thread:
        with contextlib.closing(ahead(thread, write, compressed(), _AHEAD)) as results:
            return list(results)


# ---- reading ----


def _part(value: CompressedTensor | torch.Tensor, item: ReadItem, device: torch.device) -> torch.Tensor:
    """Returns the part of a stored tensor that an item names, on a device if rows are decompressed."""
    if not value.shape:
        return value if isinstance(value, torch.Tensor) else decompress(value, device=device)
    first, count = item.storage_offsets[0], item.lengths[0]
    rows = value[first : first + count]
    for dim, (start, length) in enumerate(zip(item.storage_offsets[1:], item.lengths[1:]), 1):
        rows = rows.narrow(dim, start, length)
    return rows
