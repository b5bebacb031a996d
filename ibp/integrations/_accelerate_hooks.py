"""Changes accelerate's hooks: in modules with tables, they move plain tensors and leave tables where they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import big_modeling, hooks

from ..nn import TableParameter

_named_module_tensors, _find_tied_parameters = hooks.named_module_tensors, big_modeling.find_tied_parameters


def _plain_tensors(*args: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) for the tensors that hooks move: all tensors except tables. Tables need not be moved,
    because their rows are decoded on the device of a module's input. Replaces a function of accelerate."""
    for name, tensor in _named_module_tensors(*args, **options):
        if not isinstance(tensor, TableParameter):
            yield name, tensor


def _plain_ties(model: torch.nn.Module, **options: Any) -> list[list[str]]:
    """Returns the lists of tied parameters that contain no table. `dispatch_model` calls this function, which replaces
    a function of accelerate."""
    named = model.named_parameters(remove_duplicate=False)
    tables = {name for name, parameter in named if isinstance(parameter, TableParameter)}
    return [names for names in _find_tied_parameters(model, **options) if tables.isdisjoint(names)]


hooks.named_module_tensors = _plain_tensors
big_modeling.find_tied_parameters = _plain_ties
