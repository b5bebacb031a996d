"""Reads and writes files of tensors of other libraries: arrays of numpy, and checkpoints of torch.

.npy files and stored members of .npz archives are mapped; deflated members are loaded when they are first read.
Checkpoints of torch.save are read with weights_only, and mapped if they are archives.

In a checkpoint of torch, the tensor at ["model"]["w"] has the name "model.w". A number or string at ["epoch"] is stored
as JSON in the metadata, under the key "torch.epoch". The names do not tell what the containers are. The entry
"torch_structure" of the metadata describes the containers, as JSON that consists of nodes:

    null                  is the tensor or the value whose name is the path of the node.
    [kind, children]      is a container of one of `_KINDS`. Its children are [key, node] pairs for a mapping, and nodes
                          for a list. For a mapping at the root, children may be null: then its keys are the names in
                          the file, in order, the names of tensors before those of values.
    [kind, children, x]   is a container that also has an attribute _metadata, as the state_dict of a module has. x is
                          the node of the attribute.

Keys and the attribute _metadata are nodes, too. In these nodes, values are written in place of null.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import math
import os
import re
import tokenize
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import numpy as np
import torch

from .._common.process import ForkLock
from .._files import MAX_HEADER_BYTES, MOST_TIMES, STORAGE, View, open_regular
from ._source import NotTensorsError, Pieces, Source, SourceFormatError, SourceTensor, loaded_tensor, write_pieces

# ---- arrays of numpy ----

# Size in bytes of the local header of a member of an archive, and the offset in it of two 16-bit numbers: the lengths
# of the name and of the extra field, which follow the header.
_LOCAL_HEADER_BYTES, _LENGTHS_AT = 30, 26
# The errors that numpy, zipfile and the libraries below them raise for bytes that are not an array or a member. A
# RuntimeError is raised for a member that is encrypted, or compressed by an unknown method.
_UNREADABLE = (
    ValueError,
    TypeError,
    SyntaxError,
    tokenize.TokenError,
    EOFError,
    OSError,
    OverflowError,
    RuntimeError,
    KeyError,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    lzma.LZMAError,
)


def open_npy(path: str | os.PathLike[str]) -> Source:
    """Opens an .npy file: one tensor, whose name is the name of the file without its suffix.

    Raises:
        SourceFormatError: numpy cannot map it, or torch does not have its dtype.
    """
    name = Path(path).stem
    with _refused(f"{path}: {name!r} is no array that numpy reads"):
        array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    return Source(os.fspath(path), "npy", {name: _tensor(name, array.dtype, array.shape, lambda: array, path)})


def open_npz(path: str | os.PathLike[str]) -> Source:
    """Opens an .npz archive: one tensor for each member.

    Raises:
        SourceFormatError: it is not an archive, numpy cannot read a member, two members have the same name, or torch
            does not have a member's dtype.
    """
    with contextlib.ExitStack() as stack:
        with _refused(f"{path} is no .npz archive"):
            archive = stack.enter_context(zipfile.ZipFile(path))
        tensors: dict[str, SourceTensor] = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in tensors:
                raise SourceFormatError(f"{path}: the archive has two members {name!r}")
            tensors[name] = _member(name, archive, member, path)
        source = Source(os.fspath(path), "npz", tensors)
        source.closing = stack.pop_all()
        return source


def _member(name: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: str | os.PathLike[str]) -> SourceTensor:
    """Returns the tensor of an array in an archive. A stored array is mapped. A deflated array is loaded as a whole
    when it is first read."""
    refusal = f"{path}: {name!r} is no array that numpy reads"
    loaded: list[np.ndarray] = []
    with _refused(refusal):
        with archive.open(member) as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(stream)
            data_at = stream.tell()
        if min(shape, default=0) < 0 or data_at + math.prod(shape) * dtype.itemsize > member.file_size:
            raise ValueError(f"it has shape {shape}, which its {member.file_size} bytes cannot hold")
        if member.compress_type == zipfile.ZIP_STORED and not dtype.hasobject:
            lengths = np.fromfile(path, "<u2", 2, offset=member.header_offset + _LENGTHS_AT)
            start = member.header_offset + _LOCAL_HEADER_BYTES + int(lengths.sum()) + data_at
            loaded.append(np.asarray(np.memmap(path, dtype, "r", start, shape, "F" if is_fortran else "C")))
    lock = ForkLock()

    def load() -> np.ndarray:
        try:
            with lock, _refused(refusal):
                if not loaded:
                    with archive.open(member) as stream:
                        loaded.append(np.lib.format.read_array(stream, allow_pickle=False))
                return loaded[0]
        except MemoryError:
            raise MemoryError(
                f"{path}: there is not enough memory for array {name!r}, which is deflated and so is loaded whole: "
                "unzip the archive and give the .npy files, which are mapped"
            ) from None

    return _tensor(name, dtype, shape, load, path)


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    """Converts the errors that numpy and zipfile raise for invalid bytes to SourceFormatError. what: the beginning of
    the message."""
    try:
        yield
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        text = str(error).partition("\n")[0]
        raise SourceFormatError(f"{what}: {text or type(error).__name__}") from None


def _tensor(
    name: str, dtype: np.dtype, shape: tuple[int, ...], load: Callable[[], np.ndarray], path: object
) -> SourceTensor:
    """Returns a tensor that reads its bytes from the array that `load` returns. If the array is big-endian or in
    Fortran order, its elements are converted and put in order when they are read. path: the file, for the message."""
    try:
        if dtype.subdtype is not None:
            raise TypeError
        made = torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        raise SourceFormatError(f"{path}: array {name!r} has dtype {dtype}, which torch does not have") from None
    size = made.itemsize

    def read(start_byte: int, end_byte: int) -> np.ndarray:
        array = load()
        if array.flags.c_contiguous and array.dtype.isnative:
            return array.reshape(-1).view(np.uint8)[start_byte:end_byte]
        first, last = start_byte // size, -(-end_byte // size)
        elements = array.flat[first:last].astype(array.dtype.newbyteorder("<"), copy=False)
        return np.ascontiguousarray(elements).view(np.uint8)[start_byte - first * size : end_byte - first * size]

    return SourceTensor(name, made, shape, read, has_items=True)


# ---- writing arrays ----


def write_npy(file: IO[bytes], source: Source, pieces: Pieces) -> None:
    """Writes an .npy file of one tensor. Raises ValueError unless the source has exactly one tensor, of a dtype that
    numpy has."""
    if len(source.tensors) != 1:
        count = len(source.tensors)
        raise ValueError(f"an .npy file holds one array, and there are {count} tensors; wanted a name with .npz")
    (tensor,) = source.tensors.values()
    _write_array(file, tensor, _dtype_of(tensor), pieces)


def write_npz(file: IO[bytes], source: Source, pieces: Pieces) -> None:
    """Writes an .npz archive, whose members are not deflated. Raises ValueError if numpy does not have a dtype."""
    dtypes = list(map(_dtype_of, source.tensors.values()))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for tensor, dtype in zip(source.tensors.values(), dtypes):
            with archive.open(f"{tensor.name}.npy", "w", force_zip64=True) as member:
                _write_array(member, tensor, dtype, pieces)


def _dtype_of(tensor: SourceTensor) -> np.dtype:
    """Returns the dtype of numpy for a tensor. Raises ValueError if numpy does not have the tensor's dtype."""
    try:
        return torch.empty(0, dtype=tensor.dtype, device="cpu").numpy().dtype
    except TypeError:
        raise ValueError(f"tensor {tensor.name!r} has {tensor.dtype}, which numpy lacks; wanted .safetensors") from None


def _write_array(file: IO[bytes], tensor: SourceTensor, dtype: np.dtype, pieces: Pieces) -> None:
    """Writes a tensor in the format of an .npy file. dtype: its dtype, as `_dtype_of` returns it."""
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tensor.shape}
    np.lib.format.write_array_header_1_0(file, fields)
    write_pieces(file, pieces, [tensor])


# ---- checkpoints of torch ----

PREFIX = "torch."  # the prefix of the metadata keys under which values of the checkpoint are stored as JSON
STRUCTURE = "torch_structure"

_KINDS: dict[str, Any] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "list": list,
    "tuple": tuple,
    "Size": torch.Size,
}
_NAMES = {made: kind for kind, made in _KINDS.items()}
_SCALARS = (str, int, float, bool, type(None))
_MOST_LEVELS = 64  # largest depth of nested containers
_VALUE_BYTES = 16  # lower bound of the size in bytes of a value in the header, with quotes and commas, without its path
_ABSENT = object()
_WHY = re.compile(r"WeightsUnpickler error:\s*(.+)")
_UNKNOWN = re.compile(r"GLOBAL (\S+)")  # in torch's message about a class or function that weights_only does not accept


def open_torch(path: str | os.PathLike[str]) -> Source:
    """Opens a torch checkpoint. Nested dicts and lists become flat names (`nested`): ["model"]["w"] becomes "model.w".

    Raises:
        NotTensorsError: it holds values other than tensors, numbers and strings, and dicts and lists of these.
        SourceFormatError: it is not a checkpoint, or the total size of its tensors is more than 1,000 times the size of
            the file.
    """
    try:
        content = _load(os.fspath(path))
        found, metadata = flattened(content, min(MAX_HEADER_BYTES, MOST_TIMES * os.path.getsize(path)))
    except (OSError, MemoryError):
        raise
    except SourceFormatError as error:
        raise type(error)(f"{path}: {error}") from None
    except UnpicklingError as error:
        unknown = _UNKNOWN.search(str(error))
        if unknown is None:
            raise SourceFormatError(f"{path}: torch.load refuses it: {_reason(error)}") from None
        raise NotTensorsError(
            f"{path} holds {unknown[1]}; wanted tensors, numbers and texts, as torch.load(weights_only=True) takes them"
        ) from None
    except Exception as error:  # for damaged bytes torch raises errors of any kind
        raise SourceFormatError(f"{path}: torch.load refuses it: {_reason(error)}") from None
    tensors = {name: loaded_tensor(name, tensor, path) for name, tensor in found.items()}
    total, most = sum(tensor.num_bytes for tensor in tensors.values()), MOST_TIMES * os.path.getsize(path)
    if total > most:
        largest = max(tensors.values(), key=lambda tensor: tensor.num_bytes)
        raise SourceFormatError(
            f"{path}: its tensors have {total:,} bytes, more than {MOST_TIMES:,} times those of the file, and "
            f"{largest.name!r} has {largest.num_bytes:,}; wanted tensors that are stored whole, not expanded ones"
        )
    return Source(os.fspath(path), "torch", _with_views(tensors, found, path), metadata)


def _reason(error: Exception) -> str:
    """Returns why torch refuses a file, in one line, without torch's advice to trust the file."""
    found = _WHY.search(str(error))
    return found[1] if found else str(error).split("\n", 1)[0] or type(error).__name__


def _load(path: str) -> Any:
    """Returns the content of a checkpoint. Its tensors are mapped if torch can map the file."""
    with os.fdopen(open_regular(path), "rb") as file:
        is_archive = file.read(4) == b"PK\3\4"
    if is_archive:
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise SourceFormatError("members of the archive are deflated; wanted it as torch.save wrote it")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True if is_archive else None)


def write_torch(file: IO[bytes], source: Source, pieces: Pieces) -> None:
    """Writes a checkpoint with torch.save. The tensors are nested as the metadata says. If the metadata says nothing
    about this, the checkpoint is a dict from names to tensors. Tensors that shared memory in the original checkpoint
    share it again. All tensors are in memory at the same time."""
    held: dict[SourceTensor, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for tensor in source.tensors.values():
        base = tensor.base or tensor
        if base not in held:
            held[base] = base.tensor()
        values[tensor.name] = held[base] if tensor.view is None else tensor.view.of(held[base])
    torch.save(nested(values, source.metadata), file)


# ---- tensors that share memory ----


def _with_views(
    tensors: dict[str, SourceTensor], found: Mapping[str, torch.Tensor], path: object
) -> dict[str, SourceTensor]:
    """Returns the tensors. Those that overlap others in memory, or in which several indices lead to one element (as
    after `expand`), become views of a base tensor. found: the same tensors, by name, as torch loaded them."""
    of_storages: dict[tuple[int, torch.dtype], list[tuple[int, int, str]]] = {}
    for name, tensor in found.items():
        if tensor.numel() and not tensor.is_conj() and not tensor.is_neg():
            # torch.save refuses several dtypes in one storage
            storage = tensor.untyped_storage().data_ptr(), tensor.dtype
            of_storages.setdefault(storage, []).append((*_span_of(tensor), name))
    viewed = dict(tensors)
    for spans in of_storages.values():
        for start, end, names in _overlapping(sorted(spans)):
            if len(names) == 1 and found[names[0]].numel() <= end - start:
                continue
            whole = {name for name in names if found[name].is_contiguous() and _span_of(found[name]) == (start, end)}
            base = next((name for name in tensors if name in whole and not name.startswith(STORAGE)), None)
            if base is None:
                memory = found[names[0]].as_strided((end - start,), (1,), start)
                held = loaded_tensor(f"{STORAGE}{names[0]}", memory, path)
            else:
                held = tensors[base]
            for name in names:
                if name != base:
                    tensor = found[name]
                    offset = int(tensor.storage_offset()) - start
                    view = View(held.name, tuple(tensor.shape), tensor.stride(), offset)
                    viewed[name] = replace(tensors[name], base=held, view=view)
    return viewed


def _span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the range (start, end) of a tensor in its storage, counted in elements."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = int(tensor.storage_offset())
    return start, start + last + 1


def _overlapping(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, list[str]]]:
    """Joins sorted spans that overlap one another. Returns (start, end, names) for each joined span."""
    joined: list[tuple[int, int, list[str]]] = []
    for start, end, name in spans:
        if joined and start < joined[-1][1]:
            first, last, names = joined[-1]
            joined[-1] = first, max(last, end), [*names, name]
        else:
            joined.append((start, end, [name]))
    return joined


# ---- nested values ----


def flattened(content: Any, most_bytes: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns (tensors of a checkpoint by name, metadata with its other values as strings). most_bytes: largest total
    size in bytes of all names and strings.

    Raises:
        NotTensorsError: it holds a value that is not a tensor, a number, a string or a container of these.
        SourceFormatError: two values have one name, containers are nested too deeply, or there are too many values.
    """
    made = _Flattening(most_bytes)
    structure = made.node(content, "")
    # True if the root maps strings directly to tensors and values. Its keys are then their names in the file.
    is_flat = isinstance(structure, list) and structure[0] not in ("list", "tuple", "Size")
    is_flat = is_flat and all(isinstance(key, str) and key and node is None for key, node in structure[1])
    in_order = [*made.tensors, *(key.removeprefix(PREFIX) for key in made.texts)]  # as `nested` adds them
    is_in_order = is_flat and [key for key, _ in structure[1]] == in_order
    storages = [one.untyped_storage().data_ptr() for one in made.tensors.values() if one.layout == torch.strided]
    if is_in_order and len(set(storages)) == len(storages):
        structure = [structure[0], None, *structure[2:]]
    if structure != ["dict", None]:
        made.texts[STRUCTURE] = json.dumps(structure, separators=(",", ":"))
    return made.tensors, made.texts


class _Flattening:
    """Flattens a checkpoint. A checkpoint can refer to one list from many places, so a small file can expand to a huge
    number of values. Therefore the sizes that all names and values will have in the header of the output are added up,
    and their sum is limited."""

    def __init__(self, most_bytes: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.texts: dict[str, str] = {}
        self._most = self._room = most_bytes
        self._json_bytes: dict[int, int | None] = {}  # the key is the container's id; see `_bytes_as_json`

    def node(self, value: Any, path: str | None, level: int = 0) -> Any:
        """Returns the node of a value. Adds the tensors in the value to `tensors`, and the numbers and strings in it to
        `texts`, under their paths. path: the path of the value. None: nothing is added, and the node itself holds the
        values."""
        self._take(_VALUE_BYTES + len(path or ""))
        if level > _MOST_LEVELS:
            raise SourceFormatError(f"lists and dicts are nested more than {_MOST_LEVELS} levels deep")
        if isinstance(value, torch.Tensor) and path is not None:
            self._enter(self.tensors, path, value)
            return None
        num_bytes = self._bytes_as_json(value, level)
        if type(value) in _SCALARS or (type(value) is list and num_bytes is not None and path is not None):
            self._take(num_bytes or 0)
            if path is None:
                return value
            self._enter(self.texts, path, json.dumps(value))
            return None
        kind = _NAMES.get(type(value))
        if kind is None:
            raise NotTensorsError(
                f"the value at {path or 'the root'!r} is a {type(value).__name__}; wanted a tensor, a number, a text, "
                "or dicts and lists of them"
            )
        return [kind, *self._inside(value, path, level + 1)]

    def _inside(self, value: Any, path: str | None, level: int) -> list[Any]:
        """Returns the children of a container, and its attribute if it has one."""
        attributes = getattr(value, "__dict__", {})
        if attributes.keys() - {"_metadata"}:
            raise NotTensorsError(f"the {type(value).__name__} at {path or 'the root'!r} has attributes of its own")
        if not isinstance(value, Mapping):
            return [[self.node(inner, _joined(path, key), level) for key, inner in enumerate(value)]]
        children = [
            [self.node(key, None, level), self.node(inner, _joined(path, key), level)] for key, inner in value.items()
        ]
        return [children, *(self.node(inner, None, level) for inner in attributes.values())]

    def _enter(self, where: dict[str, Any], path: str, value: Any) -> None:
        """Adds a value under its path to `tensors` or `texts`. Raises SourceFormatError if the path is taken."""
        name = path or "tensor"
        if name in self.tensors or PREFIX + name in self.texts:
            raise SourceFormatError(f"two values have the path {name!r}")
        where[name if where is self.tensors else PREFIX + name] = value

    def _take(self, num_bytes: int) -> None:
        """Subtracts num_bytes from the bytes that the limit still allows. Raises SourceFormatError if the limit is
        exceeded."""
        self._room -= num_bytes
        if self._room < 0:
            raise SourceFormatError(
                f"names, and values besides the tensors, take more than {self._most:,} bytes as text; wanted a "
                "checkpoint that does not have the same lists or dicts in very many places"
            )

    def _bytes_as_json(self, value: Any, level: int) -> int | None:
        """Returns the approximate size in bytes of a value as JSON, or None if JSON cannot represent the value exactly,
        for example a container that contains itself. Each container is visited once."""
        if isinstance(value, str):
            return len(value)
        if type(value) in _SCALARS:
            return _VALUE_BYTES
        is_dict = type(value) is dict and all(type(key) is str for key in value)
        if level > _MOST_LEVELS or not (is_dict or type(value) is list):
            return None
        if id(value) not in self._json_bytes:
            self._json_bytes[id(value)] = None
            sizes = [self._bytes_as_json(inner, level + 1) for inner in (value.values() if is_dict else value)]
            keys = sum(map(len, value)) if is_dict else 0
            known = [size for size in sizes if size is not None]
            if len(known) == len(sizes):
                self._json_bytes[id(value)] = keys + sum(known) + 2 * len(sizes)
        return self._json_bytes[id(value)]


def nested(tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str]) -> Any:
    """Rebuilds the checkpoint that `flattened` was given. Tensors that have been left out are missing from their dicts.
    New tensors are added to the outermost dict.

    Raises:
        SourceFormatError: the metadata is damaged, a tensor of a list or tuple has been left out, or a new tensor
            cannot be added to the outermost container.
    """
    left: dict[str, Any] = dict(tensors)
    try:
        values = {key.removeprefix(PREFIX): json.loads(text) for key, text in texts.items() if key.startswith(PREFIX)}
        left.update(values)
        made = _content(json.loads(texts[STRUCTURE]) if STRUCTURE in texts else ["dict", None], "", left)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError) as error:
        if isinstance(error, SourceFormatError):
            raise
        raise SourceFormatError(f"the metadata does not say how the checkpoint was nested: {error}") from None
    if made is _ABSENT:
        made = {}
    for name, value in left.items():
        if not isinstance(made, dict) or name in made:
            raise SourceFormatError(
                f"{name!r} has no place in the checkpoint that metadata describes; wanted .safetensors"
            )
        made[name] = value
    return made


def _content(node: Any, path: str | None, left: dict[str, Any]) -> Any:
    """Returns the value that a node stands for, or `_ABSENT` if that value has been left out.

    path: the keys that lead to the node, joined by dots. None: the node itself holds the values within it.
    left: the tensors and values that are not used yet, by their paths. Those of the node are removed from it.
    """
    if not isinstance(node, list):
        if path is None:
            return node
        if node is not None:
            raise ValueError(f"{node!r} is neither a container nor null")
        return left.pop(path or "tensor", _ABSENT)
    kind, children, *attribute = node
    if kind in ("list", "tuple", "Size"):
        values = [_content(inner, _joined(path, key), left) for key, inner in enumerate(children)]
        if any(value is _ABSENT for value in values):
            raise SourceFormatError(f"a tensor of the {kind} at {path!r} is left out; wanted .safetensors")
        return _KINDS[kind](values)
    made = _KINDS[kind]()
    for key_node, inner in children or ():
        key = _content(key_node, None, left)
        value = _content(inner, _joined(path, key), left)
        if value is not _ABSENT:
            made[key] = value
    if attribute:
        made._metadata = _content(attribute[0], None, left)
    return made


def _joined(path: str | None, key: Any) -> str | None:
    """Returns the path of the value that a container has under a key. path: the container's path. None: there are no
    paths, so the result is None, too."""
    return None if path is None else f"{path}.{key}" if path else str(key)
