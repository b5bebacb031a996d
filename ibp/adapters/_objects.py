"""Manners of what adapters return: changes of a model that can be undone, numbers, and devices."""

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
    """The base of what `stats()` of an adapter returns: a frozen dataclass of counters, among them `original_bytes` and
    `stored_bytes`, from which `savings` is computed. It can be unpacked like a tuple of the counters.

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
    """The base of what a function returns that changes a model in place. A subclass undoes the change by `close()`,
    which the end of a `with` block calls. If a caller takes the object for the model, the error says where the model
    is. Subclasses set `_instead`, what to do in place of pickling the object, and `changed_by`, the call that made it.

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
        hint: which models are accepted, for the error.

    Attributes:
        model: as given.

    Raises:
        TypeError: model is not a torch.nn.Module.
    """

    def __init__(self, model: Any, hint: str = "") -> None:
        check_model(model, hint)
        self.model: torch.nn.Module = model

    def guard_conversions(self) -> None:
        """Makes the model, and every module in it, refuse conversions before they convert anything, if a part of the
        module refuses, such as a table for `model.half()`. Call it when such parts have come or gone."""
        guard_conversions(self.model)


def checked_device(device: torch.device | str | int) -> torch.device:
    """Returns a device with its index, for adapters that keep it: "cuda" becomes the current CUDA device.

    Example:
        >>> ibp.adapters.checked_device("cpu")
        device(type='cpu')

    Raises:
        TypeError: it is not a device, the name of one, or the number of a CUDA device.
        ValueError: it is neither a CPU nor a CUDA device, or this build of ibp cannot use it.
    """
    return memory.canonical(device)
