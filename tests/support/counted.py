"""Counts the Python functions of ibp that a call enters, and follows a tensor through them. Their number is the
overhead of a call beside torch's operations."""

import os
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ibp

_PACKAGE = os.path.dirname(ibp.__file__) + os.sep


class CountedOperations(TorchDispatchMode):
    """A mode that lists the names of the operations that torch dispatches inside it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def calls_of(function):
    """Returns the names of the functions in ibp that a call enters, without C functions. Two calls are made first, to
    warm up."""
    return [getattr(frame.f_code, "co_qualname", frame.f_code.co_name) for frame, _ in _entered(function)]


def files_of(function):
    """Returns the files of ibp whose functions a call enters."""
    return {_file_of(frame) for frame, _ in _entered(function)}


def stations_of(function, x):
    """Returns (file, name) of each function in ibp that receives the tensor x or its memory, in order. It may be an
    argument or an attribute of an argument."""
    memory = x.untyped_storage().data_ptr()

    def holds(value):
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == memory

    def is_station(arguments):
        held = [part for value in arguments if not isinstance(value, type) for part in _attributes(value)]
        return any(map(holds, [*arguments, *held]))

    entered = _entered(function)
    return [(_file_of(frame), frame.f_code.co_name) for frame, arguments in entered if is_station(arguments)]


def returns_of(stations):
    """Returns how often a sequence of stations comes back to a file that it has left."""
    files = [file for file, _ in stations]
    return sum(file != files[i - 1] and file in files[:i] for i, file in enumerate(files) if i)


def _attributes(value):
    return [] if isinstance(value, torch.Tensor) else getattr(value, "__dict__", {}).values()


def _file_of(frame):
    return frame.f_code.co_filename.removeprefix(_PACKAGE)


def _entered(function):
    """Returns (frame, arguments) of each call of a function in ibp."""
    entered = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            entered.append((frame, [frame.f_locals.get(name) for name in names]))

    function()
    function()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return entered
