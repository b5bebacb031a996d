"""Writes and reads checkpoints of torch.distributed.checkpoint (DCP) with compressed tensors. FSDP2, torchtitan and
Lightning use DCP.

    import torch.distributed.checkpoint as dcp
    from ibp.integrations.dcp import Reader, Writer

    dcp.save(state_dict, storage_writer=Writer("step-1000"))
    dcp.load(state_dict, storage_reader=Reader("step-1000"))

Each rank writes its tensors to one file, which `ibp.open` and `ibp inspect` can also read. It writes everything else to
files in torch's own format. As in all of DCP, planners decide which rank writes which part of a tensor, so any number
of ranks can load a checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
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

import ibp

__all__ = ["Reader", "Writer"]

# In DCP's metadata, this transform descriptor marks tensors that are in a file of ibp. torch's own FileSystemReader
# finds no extension with this name, and raises a ValueError that contains the name.
_DESCRIPTOR = "ibp.integrations.dcp/1"
_SUFFIX = ".ibp.safetensors"
_JOBS = 4  # largest number of threads that compress; a few threads compress faster than a file is written


class Writer(FileSystemWriter):
    """Writes a checkpoint of `torch.distributed.checkpoint` with compressed tensors.

    Loaded tensors have the same bits as saved ones. Tensors that would not get smaller, or have less than 4 KiB, are
    stored uncompressed. Python objects, tensor subclasses, and tensors with a dtype that safetensors lacks are stored
    as torch stores them. Tensors of the same kind, such as the same weight in all layers, share a codebook. A tensor on
    a GPU is compressed on that GPU, and a tensor on the CPU is compressed on the CPU, by up to 4 threads, but no more
    than torch uses. The planner's `resolve_data` is called several times for each tensor, also by these threads, so
    that only a few of the tensors that a planner makes are in memory at the same time.

    Every save writes files with new names. A file appears under its name only when it is complete. So an earlier
    checkpoint in the same directory stays complete until the new metadata replace the old metadata. Then the old files
    are removed.

    The writer also works with `dcp.async_save`, in a thread or in a process.

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
        options: arguments of torch's FileSystemWriter, such as `overwrite` and `thread_count`, which apply to the files
            that torch writes. Files of tensors are always flushed to the disk.

    Raises:
        TypeError: FileSystemWriter has no such argument, or the argument decides how tensors are stored:
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
        # A planner may make a new tensor in each call, so the tensors are not kept but requested again.
        tensors: dict[str, Callable[[], Any]] = {}
        shapes: dict[str, torch.Size] = {}
        indices: dict[str, MetadataIndex] = {}
        others: list[WriteItem] = []
        for item in plan.items:
            tensor: Any = None if item.type == WriteItemType.BYTE_IO else planner.resolve_data(item)
            if tensor is not None and ibp.checkpoints.CheckpointWriter.takes(item.index.fqn, tensor):
                name = _name_of(item.index)
                tensors[name] = functools.partial(planner.resolve_data, item)
                shapes[name], indices[name] = tensor.shape, item.index
            else:
                others.append(item)
            del tensor
        results: list[WriteResult] = []
        if others:
            storage = dataclasses.replace(plan.storage_data, prefix=prefix)
            results += super().write_data(dataclasses.replace(plan, items=others, storage_data=storage), planner).wait()
        if tensors:
            path = Path(self.path) / f"{prefix}tensors{_SUFFIX}"
            with ibp.checkpoints.CheckpointWriter(path, shapes) as writer:
                stored = writer.compress(tensors, jobs=min(_JOBS, torch.get_num_threads()))
            results += [
                WriteResult(indices[name], size, _StorageInfo(path.name, 0, size, [_DESCRIPTOR]))
                for name, size in stored.items()
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        written = {result.storage_data.relative_path for of_rank in results for result in of_rank}
        # If every rank writes separate metadata, `results` has only the files of this rank. Then only old files of this
        # rank are removed.
        rank = r"\d+" if self.use_collectives or self.rank is None else str(self.rank)
        own = re.compile(rf"__{rank}_[0-9a-f]{{32}}_(tensors{re.escape(_SUFFIX)}|\d+\.distcp)")
        for file in Path(self.path).iterdir():
            if own.fullmatch(file.name) and file.name not in written:
                file.unlink(missing_ok=True)


class Reader(FileSystemReader):
    """Reads a checkpoint of `torch.distributed.checkpoint` that `Writer` or torch's FileSystemWriter wrote.

    Tensors that are loaded to a GPU are decompressed there. If a rank needs only some rows of a stored tensor, for
    example because the number of ranks has changed since the save, only these rows are read. Checksums are compared
    only for tensors that are read whole.

    Args:
        path: the directory of the checkpoint.

    Raises:
        ValueError: path is a URL.
        FileFormatError: (raised by `dcp.load`) a file is inconsistent with the checkpoint's metadata.
        ChecksumError: (raised by `dcp.load`) the bytes of a tensor that is read whole are damaged.
        CorruptTableError: (raised by `dcp.load`) the bytes of a tensor are inconsistent.
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
            with ibp.open(Path(self.path) / name, memory="host") as file:
                self._read_tensors(file, items, planner)
        return super().read_data(dataclasses.replace(plan, items=others), planner)

    def _read_tensors(self, file: ibp.File, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        """Reads parts of tensors into the tensors that the planner gives. All tables that are read whole are
        decompressed in one call."""
        tables: list[ibp.CompressedTensor] = []
        outs: list[torch.Tensor] = []
        planned = []
        for item in items:
            out = planner.resolve_tensor(item).detach()
            planned.append((item, out))
            value = self._value(file, item.storage_index)
            whole = tuple(value.shape)
            if tuple(item.lengths) == whole:
                file.verify([_name_of(item.storage_index)])
            if tuple(item.lengths) != tuple(out.shape):
                raise ValueError(
                    f"{item.storage_index.fqn!r}: the plan wants {list(item.lengths)} for {list(out.shape)}"
                )
            if isinstance(value, ibp.CompressedTensor) and tuple(item.lengths) == whole and out.dtype == value.dtype:
                tables.append(value)
                outs.append(out)
            else:
                out.copy_(_part(value, item, out.device))
        ibp.decompress(tables, out=outs, check=True)
        for item, out in planned:
            planner.commit_tensor(item, out)

    def _value(self, file: ibp.File, index: MetadataIndex) -> ibp.CompressedTensor | torch.Tensor:
        """Returns a chunk of a tensor in its stored form. Raises FileFormatError if the file does not have the chunk,
        or if the dtype or shape of the chunk differs from the metadata."""
        name = _name_of(index)
        if name not in file:
            raise ibp.FileFormatError(f"{file.path} has no tensor {name!r}, which the checkpoint's metadata name")
        value = file[name]
        tensor = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        offset = None if index.offset is None else tuple(index.offset)
        sizes = [tuple(chunk.sizes) for chunk in tensor.chunks if offset in (None, tuple(chunk.offsets))]
        if value.dtype != tensor.properties.dtype or tuple(value.shape) not in sizes:
            raise ibp.FileFormatError(
                f"{file.path} has {name!r} as {value.dtype} {list(value.shape)}; the checkpoint's metadata say "
                f"{tensor.properties.dtype} {', '.join(str(list(size)) for size in sizes) or 'nothing'}"
            )
        return value  # type: ignore[return-value]


def _check_path(path: Any) -> None:
    protocol, is_split, _ = str(path).partition("://")
    if is_split and protocol not in ("file", "local"):
        raise ValueError(f"{str(path)!r} is a URL; wanted a directory of this machine")


def _name_of(index: MetadataIndex) -> str:
    """Returns the name of a part of a tensor in its file: the tensor's name, followed by the part's offset unless the
    offset is 0 in all dimensions."""
    offset = list(index.offset or ())
    return f"{index.fqn}{offset}" if any(offset) else index.fqn


def _part(value: ibp.CompressedTensor | torch.Tensor, item: ReadItem, device: torch.device) -> torch.Tensor:
    """Returns the part of a stored tensor that `item` asks for. Only the rows of this part are decompressed. device:
    the device on which a table without dimensions is decompressed."""
    if not value.shape:
        return value if isinstance(value, torch.Tensor) else ibp.decompress(value, device=device)
    first, count = item.storage_offsets[0], item.lengths[0]
    rows = value[first : first + count]
    for dim, (start, length) in enumerate(zip(item.storage_offsets[1:], item.lengths[1:]), 1):
        rows = rows.narrow(dim, start, length)
    return rows
