"""`decompress`: turns the modules of a model that hold tables back into plain modules."""

from __future__ import annotations

from typing import TypeVar

import torch

from .._common.in_place import check_model
from ._compressing import join_neighbours
from ._embedding import Embedding, EmbeddingBag
from ._experts import Experts
from ._tables import Conv1D, Linear, TableModule

_KINDS = (Conv1D, Embedding, EmbeddingBag, Experts, Linear)

_Model = TypeVar("_Model", bound=torch.nn.Module)


def decompress(model: _Model) -> _Model:
    """Undoes `compress`: gives plain weights back to the modules of a model, in place. The memory of each table is
    freed before the next table is decoded, so memory never holds more than the plain model and one table.

    Every `ibp.nn.Linear`, `Embedding` and `EmbeddingBag` becomes torch's module of that name, and `Conv1D` and
    `Experts` become modules of transformers. The modules stay the same objects, with their hooks, mode and biases.
    Weights are in the memory where their tables were. A weight that several modules share becomes one parameter.
    Weights of modules with trainable rows require grad; other weights require grad as they did before `compress`.
    Subclasses and `EmbeddingCollection`, for which torch has no module, stay as they are. If an optimizer of
    `ibp.optim` trained rows of the model, replace it by an optimizer of torch.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(4096, 512), torch.nn.Linear(512, 4096)).bfloat16().eval()
        >>> plain = {name: weight.clone() for name, weight in model.state_dict().items()}
        >>> report = ibp.nn.compress(model)
        >>> ibp.nn.decompress(model)
        Sequential(
          (0): Embedding(4096, 512)
          (1): Linear(in_features=512, out_features=4096, bias=True)
        )
        >>> all(torch.equal(weight, plain[name]) for name, weight in model.named_parameters())
        True

    Args:
        model: any module. A module without tables is not changed.

    Returns:
        The model.

    Raises:
        TypeError: model is not a module.
        ValueError: the forward of a module with a table has been replaced. The model is unchanged then.
        CorruptTableError: a table is damaged. This table and the following ones stay coded. If memory runs out, the
            tables that have not been decoded stay coded, too.
    """
    check_model(model)
    by_table: dict[int, list[TableModule | Experts]] = {}
    for name, module in model.named_modules():
        if type(module) not in _KINDS:
            continue
        if "forward" in vars(module):
            raise ValueError(
                f"the forward of {name or 'model'} has been replaced, by a hook of accelerate or by ibp.offload for "
                "example: undo that first"
            )
        by_table.setdefault(id(getattr(module, "_shared", module)), []).append(module)
    for module in model.modules():
        if isinstance(module, Linear):
            module.place = None  # modules multiply together only while all of them hold tables
    try:
        for modules in by_table.values():
            _turn_plain(modules)
    finally:
        join_neighbours(model)
    return model


def _turn_plain(modules: list[TableModule | Experts]) -> None:
    """Turns modules that share a table into plain modules."""
    weight = None
    for module in modules:
        if isinstance(module, Experts):
            module.turn_plain()
        else:
            weight = module.parameter() if weight is None else weight
            module.turn_plain(weight)
