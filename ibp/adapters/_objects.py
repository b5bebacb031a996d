"""Base classes of objects that adapters return: statistics, and changes of a model that can be undone."""

from __future__ import annotations

from typing import Any

import torch

from .._common.closing import Closing
from .._common.conversions import guard_conversions
from .._common.in_place import NotTheModel, check_model
from .._common.process import OfThisProcess
from .._common.statistics import Saves, Statistics
from .._machine import memory


class CodedStatistics(Statistics, Saves):
    """The base class of the results of adapters' `stats()`. Subclasses are frozen dataclasses of counters, among them
    `original_bytes` and `stored_bytes`, from which `savings` is computed. An object can be unpacked like a tuple of its
    counters.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True)
        ... class PoolStats(ibp.adapters.CodedStatistics):
        ...     original_bytes: int
        ...     stored_bytes: int
        >>> original, stored = PoolStats(100, 75)
        >>> original, PoolStats(100, 75).as_dict()
        (100, {'original_bytes': 100, 'stored_bytes': 75, 'savings': 0.25})
    """


class ModelChange(OfThisProcess, Closing, NotTheModel):
    """The base class of objects that represent a change to a model. A function that changes a model in place returns
    such an object. A subclass has a `close()` that undoes the change; leaving a `with` block calls it. If a caller uses
    the object as if it were the model, for example by calling it, the error says where the model is. Subclasses set two
    strings for errors: `_instead` says what to do in place of pickling the object, and `changed_by` is the call that
    made the object.

    Example:
        >>> class Plain(ibp.adapters.ModelChange):
        ...     _instead, changed_by = "pickle the model", "make_plain(model)"
        ...     def close(self):
        ...         self.model.train()
        >>> with Plain(torch.nn.Linear(2, 2).eval()) as change:
        ...     change.model.training
        False
        >>> change(torch.ones(2))
        Traceback (most recent call last):
        TypeError: 'Plain' object is not callable: make_plain(model) returned it, and changed the model in place. ...

    Args:
        model: the model.
        hint: a string that says which models are accepted, for the error if `model` is not a module.

    Attributes:
        model: as given.

    Raises:
        TypeError: model is not a torch.nn.Module.
    """

    def __init__(self, model: Any, hint: str = "") -> None:
        check_model(model, hint)
        self.model: torch.nn.Module = model

    def guard_conversions(self) -> None:
        """Makes conversions such as `model.half()` all or nothing, for the model and each of its modules. If a part of
        the model, such as a table, refuses the conversion, the error is raised before anything has been converted. Call
        this method after such parts have been added or removed."""
        guard_conversions(self.model)


def checked_device(device: torch.device | str | int) -> torch.device:
    """Checks a device and returns it with its index: "cuda" becomes the current CUDA device.

    Example:
        >>> ibp.adapters.checked_device("cpu")
        device(type='cpu')

    Raises:
        TypeError: device is not a device, the name of a device, or the number of a CUDA device.
        ValueError: device is neither a CPU nor a CUDA device, or this build of ibp cannot use it.
    """
    return memory.canonical(device)
