"""`ModelLoading` codes the weights of a model while a checkpoint is read. `ModelOptions` says which weights are coded,
and how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from .._common.arguments import whole_number
from .._common.conversions import guard_conversions
from .._common.locks import ForkLock
from .._layout.geometry import bytes_of
from .._tables.compressed_tensor import CompressedTensor
from .._tables.weights import is_worth_coding
from ..nn import ModelReport
from ..nn._compressing import ModelPlan, is_included, join_neighbours, options_of
from ..nn._parameters import SharedTable
from ..nn._stacks import reshaped

_Self = TypeVar("_Self", bound="ModelOptions")
_FIELDS = ("include", "exclude", "level", "fused", "min_bytes")
# Checkpoints may be read by several threads, but only one table at a time is decoded or coded, to save memory.
_LOCK = ForkLock()


class ModelOptions:
    """The options that say which weights of a model are coded, and how. They are arguments of `ibp.nn.compress`, in a
    form that JSON can hold.

    Example:
        >>> options = ibp.adapters.ModelOptions(exclude="lm_head")
        >>> vars(options)
        {'level': 'fast', 'fused': True, 'min_bytes': 1048576, 'include': None, 'exclude': ['lm_head']}
        >>> options.includes("model.layers.0.mlp.up_proj"), options.includes("lm_head")
        (True, False)

    Args:
        level, include, exclude, fused, min_bytes: as in `ibp.nn.compress`.

    Raises:
        TypeError, ValueError: an argument has a wrong type, or is out of range.
    """

    def __init__(
        self,
        *,
        level: str = "fast",
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        fused: bool = True,
        min_bytes: int = 1 << 20,
    ) -> None:
        if level not in ("fast", "default"):
            raise ValueError(f"level is {level!r}; wanted 'fast' or 'default'")
        self.level, self.fused, self.min_bytes = level, bool(fused), whole_number("min_bytes", min_bytes, 0)
        self.include = None if include is None else _names(include)
        self.exclude = _names(exclude)

    @classmethod
    def of(cls: type[_Self], model: torch.nn.Module) -> _Self:
        """Returns options that select exactly the weights that are now coded in a model."""
        return cls(**options_of(model))

    def includes(self, *names: str) -> bool:
        """Returns whether a module is to be coded. names: the module's name in the model; if a framework has merged
        several modules into this one, the names of all of them. `include` must match at least one of the names, and
        `exclude` must match none of them."""
        is_wanted = any(is_included(name, self.include, ()) for name in names)
        return is_wanted and all(is_included(name, None, self.exclude) for name in names)


def _names(given: str | Iterable[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


class ModelLoading:
    """Codes the weights of a model, one after the other, while they are read from a checkpoint. Memory holds the coded
    model and one plain weight.

    Example:
        >>> checkpoint = torch.nn.Sequential(torch.nn.Linear(1024, 1024)).bfloat16().state_dict()
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(1024, 1024)).bfloat16().eval()
        >>> loading = ibp.adapters.ModelLoading(ibp.adapters.ModelOptions(), model)
        >>> for name, tensor in checkpoint.items():
        ...     held = loading.put(name, tensor)
        ...     if isinstance(held, torch.Tensor):    # it stays plain
        ...         module = model.get_submodule(name.rpartition(".")[0])
        ...         setattr(module, name.rpartition(".")[2], torch.nn.Parameter(held, requires_grad=False))
        >>> loading.finish().coded, model(torch.ones(1, 1024).bfloat16()).shape
        (('0',), torch.Size([1, 1024]))

    Args:
        options: which weights are coded, and how.
        model: the model, on the meta device and in eval mode.
        later: names of weights that are loaded plain and coded by `finish`, because modules may share them.

    Raises:
        ValueError: a pattern of include or exclude matches no module.
    """

    def __init__(self, options: ModelOptions, model: torch.nn.Module, later: Iterable[str] = ()) -> None:
        self._options, self._model, self._later = options, model, set(later)
        self._plan, self._away = self._new_plan(), frozenset[str]()
        self._tables: dict[str, CompressedTensor] = {}  # tables of the weights in `later`, from the checkpoint

    def _new_plan(self) -> ModelPlan:
        return ModelPlan(self._model, **{name: getattr(self._options, name) for name in _FIELDS})

    def leave(self, names: Iterable[str]) -> None:
        """Keeps weights plain: those of the modules with these names, and of all modules inside them. Call this method
        before the first weight is read."""
        self._away = frozenset(names)

    def has(self, key: str) -> bool:
        """Returns whether the model has a parameter with this name that the options select for coding. `leave` does not
        change the result."""
        return self._plan.has(key)

    def codes(self, key: str) -> bool:
        """Returns whether the model's parameter with this name is coded as soon as it is read."""
        return self._plan.has(key) and key not in self._later and not self._is_away(key)

    def _is_away(self, key: str) -> bool:
        return any(key.startswith(f"{name}.") for name in self._away)

    def takes(self, key: str, table: CompressedTensor, dtype: torch.dtype | None) -> bool:
        """Returns whether the model can hold a table of a checkpoint without converting it. dtype: the dtype of the
        parameter in the model. None: the table's dtype."""
        return self.codes(key) and dtype in (None, table.dtype) and self._plan.takes(key, table)

    def value_of(
        self, key: str, table: CompressedTensor, device: Any, dtype: torch.dtype | None
    ) -> CompressedTensor | torch.Tensor:
        """Converts a table of a checkpoint to the form in which the model holds the weight, on a device: a table or a
        plain tensor. If several threads call, only one at a time decodes or codes.

        Args:
            key: the name of the parameter.
            table: the table of the checkpoint.
            device: the device of the result.
            dtype: the dtype of the parameter in the model. None: the table's dtype.
        """
        if self.takes(key, table, dtype):
            return table.to(device)
        if key in self._later:
            self._tables[key] = table
        with _LOCK:
            values = self.decoded(table, device, dtype)
            return self._plan.table_of(key, values) if self.codes(key) and self._plan.held(key) is None else values

    @staticmethod
    def decoded(table: CompressedTensor, device: Any, dtype: torch.dtype | None) -> torch.Tensor:
        """Decodes a table of a checkpoint on a device, and returns the tensor in a dtype (None: the table's dtype). If
        several threads call, only one at a time decodes, to save memory."""
        with _LOCK:
            return table.decompress(device=device).to(table.dtype if dtype is None else dtype)

    def put(self, key: str, value: CompressedTensor | torch.Tensor) -> CompressedTensor | torch.Tensor:
        """Codes a weight, puts its table into its modules, and returns the table. If the weight stays plain, or if the
        tensor's shape differs from the parameter's, it returns the plain tensor instead, and the caller must make it a
        parameter.

        A weight that several modules share may be put under each of its names, if the values are the same. The first
        call codes the weight for all of these modules; later calls return its table.

        Raises:
            ValueError: the weight has been put before, with other values.
        """
        shared = self._plan.held(key) if self._plan.has(key) else None
        if shared is not None:
            self._check_same(key, shared, value)
            return reshaped(shared.weight, shared.coded_shape) if shared.stacked else shared.weight
        if isinstance(value, torch.Tensor) and not (self.codes(key) and is_worth_coding(value.detach())):
            return value
        held = self._model.get_parameter(key)  # tables of some modules hold transposed matrices
        is_transposed = not isinstance(value, torch.Tensor) and self._plan.is_transposed(key)
        if value.shape != (held.mT.shape if is_transposed else held.shape):
            self._later.add(key)  # another shape: the framework refuses the tensor, or fills in other values
            return value if isinstance(value, torch.Tensor) else value.decompress()
        table = self._plan.table_of(key, value) if isinstance(value, torch.Tensor) else value
        if self._plan.put(key, table):
            return table
        return value if isinstance(value, torch.Tensor) else value.decompress()

    @staticmethod
    def _check_same(key: str, shared: SharedTable, value: CompressedTensor | torch.Tensor) -> None:
        """Raises ValueError unless a value is equal, bit for bit, to a weight that has been coded already. shared: the
        weight's table."""
        with _LOCK:
            plain = value if isinstance(value, torch.Tensor) else value.decompress()
            if plain is not value and shared.transposed:
                plain = plain.mT
            held = shared.decoded(plain.device)
        is_alike = (plain.shape, plain.dtype) == (held.shape, held.dtype)
        if not is_alike or not torch.equal(bytes_of(plain), bytes_of(held)):
            raise ValueError(
                f"{key} has been put before with other values, under this name or that of a module that shares it: "
                "name such weights in later=, or untie the modules"
            )

    def finish(self) -> ModelReport:
        """Codes the remaining weights. Must be called after the whole checkpoint has been read. Returns a report of the
        weights that are coded, and of the reasons why others stay plain.

        Raises:
            ValueError: a weight that is to be coded has no values, because the checkpoint lacks the weight or has it
                with another shape.
        """
        rest = self._new_plan()
        rest.code_all(self._tables, but=self._is_away)
        join_neighbours(self._model)
        guard_conversions(self._model)
        first, second = self._plan.report(), rest.report()
        coded = (*first.coded, *second.coded)
        plain = {name: why for name, why in (first.plain | second.plain).items() if name not in set(coded)}
        return ModelReport(coded, plain, first.num_bytes + second.num_bytes, first.nbytes + second.nbytes)
