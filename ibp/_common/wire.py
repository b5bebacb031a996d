"""Passes values to other processes: as bytes (`written`, `read`), by collective calls over a process group
(`RankGroup`), and as memory of a GPU (`lent`, `opened`).

A message is JSON, followed by the data of tensors and of bytes objects. It is read as data: it can name only a few
kinds of values, and classes that are registered here. Nothing in it is executed, unlike in a pickle. The fields of
named tuples are compared with their annotations; other classes check their fields themselves.

Memory of a GPU is lent by CUDA IPC, as torch does when it sends tensors. Unlike in torch, plain values describe the
memory, so no pickle is needed.

The last part of the file makes collective calls, and checks that all ranks are on one machine and have passed the same
arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import numbers
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

_Class = TypeVar("_Class", bound=type)
_Record = TypeVar("_Record", bound=tuple[Any, ...])

_LENGTH = struct.Struct("<Q")  # The first bytes of a message: the length of the JSON in bytes.
# The registered classes by name, each with the names of its constructor's arguments.
_classes: dict[str, tuple[type, tuple[str, ...]]] = {}


# ---- messages ----


def sent(kind: _Class) -> _Class:
    """Registers a class whose objects can then be sent: a named tuple, a dataclass or a class of codebooks. An object
    is sent as the arguments of its constructor.

    The sender chooses these values, so the constructors of dataclasses and codebooks must check their arguments and
    raise ValueError or TypeError if they are wrong."""
    is_record = dataclasses.is_dataclass(kind)
    names = [field.name for field in dataclasses.fields(kind)] if is_record else kind._fields  # type: ignore[attr-defined]
    _classes[kind.__name__] = kind, tuple(names)
    return kind


def written(value: Any) -> bytes:
    """Converts a value to bytes. The value may be None, a number, a string, bytes, a dtype, a device, a dense tensor,
    an object of a registered class, or a list, tuple or dict of such values. Raises TypeError for any other value."""
    parts: list[bytes] = []
    text = json.dumps(_form_of(value, parts)).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *parts))


def read(content: bytes) -> Any:
    """Returns the value that `written` has converted to bytes. Tensors are on the CPU and do not share the memory of
    the bytes. Raises ValueError if `written` did not make the bytes."""
    try:
        (length,) = _LENGTH.unpack_from(content)
        text = content[_LENGTH.size : _LENGTH.size + length]
        if len(text) != length:
            raise ValueError(f"there are {len(text)} bytes of {length}")
        data = io.BytesIO(content)
        data.seek(_LENGTH.size + length)
        value = _value_of(json.loads(text), data)
        if rest := len(data.read()):
            raise ValueError(f"there are {rest} bytes too many")
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError, struct.error) as error:
        raise ValueError(f"the message is damaged, or no message of ibp's: {error}") from error
    return value


def checked(record: _Record) -> _Record:
    """Checks a named tuple and returns it. Raises ValueError if a field does not match its annotation."""
    for (name, hint), value in zip(_hints_of(type(record)).items(), record, strict=True):
        if not _is_of(value, hint):
            raise ValueError(f"{name} of a {type(record).__name__} is a {type(value).__name__}; wanted {hint}")
    return record


_hints_of = functools.cache(get_type_hints)


@functools.cache
def _parts_of(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the origin and the arguments of an annotation, such as (tuple, (int, str)) for tuple[int, str]."""
    return get_origin(hint), get_args(hint)


def _is_of(value: Any, hint: Any) -> bool:
    """Returns whether a value matches an annotation. The annotation is a class, Any, a union, or a tuple, list or dict
    of such annotations."""
    kind, parts = _parts_of(hint)
    if hint is Any:
        return True
    if kind is UnionType:
        return any(_is_of(value, part) for part in parts)
    if not isinstance(value, kind or hint):
        return False
    if kind is dict:
        return all(_is_of(key, parts[0]) and _is_of(held, parts[1]) for key, held in value.items())
    if kind is tuple and parts[-1] is not ...:
        return len(value) == len(parts) and all(map(_is_of, value, parts))
    return kind is None or all(_is_of(held, parts[0]) for held in value)


def _form_of(value: Any, parts: list[bytes]) -> Any:
    """Returns the form of a value, which stands for it in the JSON: the value itself, or a list [kind, ...]. The data
    of tensors and of bytes objects is appended to parts."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value).__name__ in _classes and type(value) is _classes[type(value).__name__][0]:
        name = type(value).__name__
        return ["object", name, [_form_of(getattr(value, field), parts) for field in _classes[name][1]]]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, bytes):
        parts.append(value)
        return ["bytes", len(value)]
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts.append(data)
        return ["tensor", _name_of(value.dtype), list(value.shape), len(data)]
    if isinstance(value, torch.dtype):
        return ["dtype", _name_of(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, dict):
        return ["dict", [[_form_of(key, parts), _form_of(held, parts)] for key, held in value.items()]]
    for kind, name in ((torch.Size, "size"), (tuple, "tuple"), (list, "list")):
        if type(value) is kind:
            return [name, [_form_of(held, parts) for held in value]]
    raise TypeError(f"a {type(value).__name__} cannot be sent to other processes")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def _value_of(form: Any, data: io.BytesIO) -> Any:
    """Converts a form, as `_form_of` returns it, back to a value. The forms must be converted in their order, because
    each bytes object or tensor takes the next bytes of the data that follows the JSON."""
    if not isinstance(form, (list, dict)):
        return form
    if not isinstance(form, list) or not form or not isinstance(form[0], str) or form[0] not in _KINDS:
        raise ValueError(f"{str(form)[:60]} is no value")
    return _KINDS[form[0]](data, *form[1:])


def _values_of(data: io.BytesIO, forms: Any) -> list[Any]:
    if not isinstance(forms, list):
        raise ValueError(f"{str(forms)[:60]} is no list")
    return [_value_of(form, data) for form in forms]


def _taken(data: io.BytesIO, size: Any) -> bytes:
    """Reads the next bytes of the data."""
    is_size = type(size) is int and size >= 0
    taken = data.read(size if is_size else -1)
    if not is_size or len(taken) != size:
        raise ValueError(f"{size} bytes are wanted; {len(taken)} are there")
    return taken


def _tensor_of(data: io.BytesIO, dtype: Any, shape: Any, size: Any) -> torch.Tensor:
    taken, kind = _taken(data, size), _dtype(dtype)
    if not isinstance(shape, list) or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"{shape} is no shape")
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    if size:
        flat = torch.frombuffer(bytearray(taken), dtype=torch.uint8)
    return flat.view(kind).view(shape)


def _object_of(data: io.BytesIO, name: Any, fields: Any) -> Any:
    if not isinstance(name, str) or name not in _classes:
        raise ValueError(f"{name!r} is no class of ibp's that is sent")
    kind, names = _classes[name]
    found = kind(**dict(zip(names, _values_of(data, fields), strict=True)))
    return checked(found) if isinstance(found, tuple) else found


# For each kind of form, the function that takes the data and the rest of the form, and returns the value.
_KINDS: dict[str, Callable[..., Any]] = {
    "bytes": _taken,
    "tensor": _tensor_of,
    "dtype": lambda data, name: _dtype(name),
    "device": lambda data, name: torch.device(str(name)),
    "dict": lambda data, pairs: {_value_of(key, data): _value_of(held, data) for key, held in pairs},
    "size": lambda data, sizes: torch.Size(_values_of(data, sizes)),
    "tuple": lambda data, held: tuple(_values_of(data, held)),
    "list": _values_of,
    "object": _object_of,
}


# ---- memory of a GPU ----

_CLASS, _STORAGE, _DEVICE = 0, 4, 6  # Positions among the arguments of rebuild_cuda_tensor.
_CLASSES = torch.Tensor, torch.storage.TypedStorage


def lent(tensor: torch.Tensor) -> tuple:
    """Returns plain values that describe a CUDA tensor. One other process can pass them to `opened`, once. Until then,
    this process keeps the memory."""
    arguments = reduce_tensor(tensor.detach())[1]
    assert (arguments[_CLASS], arguments[_STORAGE]) == _CLASSES
    return (*arguments[_CLASS + 1 : _STORAGE], *arguments[_STORAGE + 1 :])


def opened(how: Any, device: int | None = None) -> torch.Tensor:
    """Opens a tensor that another process has lent.

    Args:
        how: the values that `lent` has returned in that process.
        device: the index of the tensor's GPU in this process. None: the same index as in the other process.

    Raises:
        ValueError: `how` does not have the form of a result of `lent`.
    """
    arguments = list(how) if isinstance(how, tuple) else []
    for place, kind in zip((_CLASS, _STORAGE), _CLASSES):
        arguments.insert(place, kind)
    if len(arguments) != rebuild_cuda_tensor.__code__.co_argcount:
        raise ValueError("what another process has lent is no memory of a GPU")
    if device is not None:
        arguments[_DEVICE] = device
    with torch.cuda.device(arguments[_DEVICE]):
        return rebuild_cuda_tensor(*arguments)


# ---- collective calls over a process group ----

_Result = TypeVar("_Result")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RankGroup:
    """A process group and this process's rank in it.

    Attributes:
        process_group: the group. None: the default group.
        rank, size: the rank of this process in the group, and the size of the group.
        device: the device of tensors that the ranks exchange: the current CUDA device for NCCL, otherwise the CPU.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Makes the object for a group. None: the default group.

        Raises:
            RuntimeError: torch.distributed is not initialised.
            ValueError: this process is not in the group.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group first, in each "
                "process that torchrun has started"
            )
        # No reference to the default group is kept: if the group outlived destroy_process_group, gloo would abort at
        # the end of the program.
        self.process_group = None if group is dist.group.WORLD else group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group: only the group's own ranks take part")
        on_gpu = "nccl" in str(dist.get_backend_config(group))
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Calls work() on each rank. Returns the results of all ranks, in the order of the ranks. Results must be
        values that `wire.written` accepts. A collective call.

        If work() raises on one rank, the call raises on all ranks: on that rank the exception itself, and on the other
        ranks a RuntimeError with the message of the exception. what: the name of the work in error messages.

        Raises:
            RuntimeError: work() has raised on another rank, or a rank does not take part, because it ended or the
                group's timeout has passed.
            ValueError: a rank has sent bytes that are not a message of this package."""
        raised: Exception | None = None
        try:
            content = written((None, work()))
        except Exception as error:
            raised, content = error, written((f"{type(error).__name__}: {error}", None))
        contents = self.gather(content)
        if raised is not None:
            raise raised
        values = []
        for rank, sent in enumerate(contents):
            try:
                failure, value = read(sent)
                if failure is not None and not isinstance(failure, str):
                    raise ValueError(f"a failure is a {type(failure).__name__}")
            except (ValueError, TypeError) as error:
                raise ValueError(f"{what}: what rank {rank} of the group has sent cannot be read: {error}") from error
            if failure is not None:
                raise RuntimeError(f"{what} has failed on rank {rank} of the group: {failure}")
            values.append(value)
        return values

    def on_all(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Calls work() on each rank, and waits until it has returned on all ranks. Returns the result of this rank,
        which is not sent to the others. Raises errors as `together` does. A collective call."""
        made: list[_Result] = []
        self.together(what, lambda: made.append(work()))
        return made[0]

    def from_rank(self, src: int, what: str, work: Callable[[], Any]) -> Any:
        """Calls work() on rank src alone. Returns its result on all ranks. Raises errors as `together` does. Also
        raises ValueError if src is not a rank of the group, or if ranks pass different values of src. A collective
        call."""

        def offer() -> tuple[dict[str, int], Any]:
            if not 0 <= src < self.size:
                raise ValueError(f"src is {src}; wanted 0 to {self.size - 1}")
            return {"src": src}, work() if self.rank == src else None

        offers = self.together(what, offer)
        same_on_all(what, [arguments for arguments, _ in offers])
        return offers[src][1]

    def gather(self, content: bytes) -> list[bytes]:
        """Sends bytes from each rank to all ranks. Returns the bytes of all ranks, in the order of the ranks. Each rank
        must give at least one byte. A collective call."""
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        sizes = torch.cat(self.gathered(torch.tensor([mine.numel()], dtype=torch.int64, device=self.device))).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: mine.numel()] = mine
        return [part[:size].cpu().numpy().tobytes() for part, size in zip(self.gathered(padded), sizes)]

    def gathered(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Sends a tensor from each rank to all ranks. Returns the tensors of all ranks, in the order of the ranks. The
        tensors must be on the group's device and have the same shape and dtype. They travel as bytes, because not every
        backend supports every dtype. A collective call."""
        data = part.contiguous().view(torch.uint8)
        parts = [torch.empty_like(data) for _ in range(self.size)]
        with all_taking_part():
            dist.all_gather(parts, data, group=self.process_group)
        return [found.view(part.dtype) for found in parts]

    def counts(self, sent: list[int]) -> list[int]:
        """Sends a number from each rank to each rank: sent[r] goes to rank r. Returns the numbers that this rank has
        received, in the order of the ranks. A collective call."""
        mine = torch.tensor(sent, dtype=torch.int64, device=self.device)
        received = torch.empty_like(mine)
        with all_taking_part():
            dist.all_to_all_single(received, mine, group=self.process_group)
        return received.tolist()

    def exchange(self, sent: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        """Sends a part of a 1-D tensor on the group's device to each rank. A collective call.

        Args:
            sent: the parts, one after the other. The part for rank r has send_counts[r] elements.
            receive_counts: the number of elements that come from each rank.

        Returns:
            The elements that this rank has received, in the order of the ranks.
        """
        received = torch.empty(sum(receive_counts), dtype=sent.dtype, device=self.device)
        with all_taking_part():
            dist.all_to_all_single(received, sent, receive_counts, send_counts, group=self.process_group)
        return received


@contextlib.contextmanager
def all_taking_part() -> Iterator[None]:
    """Replaces an error of torch.distributed by one that explains it: some rank has not taken part in the call."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "not all ranks of the group have taken part: one has ended, has made another call, or the group's timeout "
            f"has passed ({error})"
        ) from error


def machine() -> str:
    """Returns a string that identifies this machine. The string changes when the machine reboots."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"


def check_one_machine(what: str, machines: list[str]) -> None:
    """Raises ValueError unless all ranks are on one machine. machines: the results of `machine` on all ranks."""
    others = [rank for rank, name in enumerate(machines) if name != machines[0]]
    if others:
        raise ValueError(
            f"{what} is for processes of one machine; ranks {others} of the group are on other ones than rank 0: give "
            "a group of each machine's own ranks"
        )


def same_on_all(what: str, given: list[dict[str, Any]]) -> None:
    """Raises ValueError if an argument has different values on different ranks. The message names the argument. given:
    for each rank, a dict of its arguments by name."""
    for name, first in given[0].items():
        for rank, other in enumerate(given):
            if other[name] != first:
                raise ValueError(
                    f"{what}: {name} is {first!r} on rank 0 of the group and {other[name]!r} on rank {rank}"
                )
