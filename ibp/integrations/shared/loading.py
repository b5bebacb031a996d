"""What the quantizers of transformers and diffusers share: their configuration, and weights that are coded while
they are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import safe_open

from ..._common.arguments import whole_number
from ..._common.conversions import guard_conversions
from ..._files.header import FORMAT
from ..._files.paths import SUFFIX
from ..._tables.compressed_tensor import CompressedTensor
from ..._tables.weights import is_worth_coding
from ...checkpoints._model_files import METHOD
from ...nn import ModelReport
from ...nn._compressing import ModelPlan, join_neighbours


class CodingFields:
    """The fields of a configuration: arguments of `ibp.nn.compress`, in the form for JSON."""

    def __init__(
        self,
        *,
        level: str = "fast",
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        fused: bool = True,
        min_bytes: int = 1 << 20,
        quant_method: str = METHOD,
    ) -> None:
        if quant_method != METHOD:
            raise ValueError(f"quant_method is {quant_method!r}; wanted {METHOD!r}")
        if level not in ("fast", "default"):
            raise ValueError(f"level is {level!r}; wanted 'fast' or 'default'")
        self.quant_method = quant_method
        self.level, self.fused, self.min_bytes = level, bool(fused), whole_number("min_bytes", min_bytes, 0)
        self.include = None if include is None else _names(include)
        self.exclude = _names(exclude)

    def plan(self, model: torch.nn.Module) -> ModelPlan:
        """Returns a plan of how a model's weights are coded while they are loaded."""
        names = ("include", "exclude", "level", "fused", "min_bytes")
        return ModelPlan(model, **{name: getattr(self, name) for name in names})


def _names(given: str | Iterable[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


class Loading:
    """A model whose weights are read from a checkpoint, and coded one after the other.

    Args:
        fields: what to do to the model.
        model: on the meta device, in eval mode.
        later: names of weights that are loaded plain and coded at the end, because modules may share them.
    """

    def __init__(self, fields: CodingFields, model: torch.nn.Module, later: Iterable[str] = ()) -> None:
        self._fields, self._model, self._later = fields, model, set(later)
        self._plan, self._away = fields.plan(model), frozenset[str]()
        self._tables: dict[str, CompressedTensor] = {}  # tables of these weights, from the checkpoint

    def leave(self, names: Iterable[str]) -> None:
        """Keeps modules with these names, and all modules below them, plain. Call it before the first weight is
        read."""
        self._away = frozenset(names)

    def has(self, key: str) -> bool:
        """Returns whether the model has a parameter with this name that is coded, now or later."""
        return self._plan.has(key)

    def codes(self, key: str) -> bool:
        """Returns whether a parameter, with this name in the model, is coded when it is read."""
        return self._plan.has(key) and key not in self._later and not self._is_away(key)

    def _is_away(self, key: str) -> bool:
        return any(key.startswith(f"{name}.") for name in self._away)

    def takes(self, key: str, table: CompressedTensor, dtype: torch.dtype | None) -> bool:
        """Returns whether the model can hold a table of a checkpoint as it is."""
        return self.codes(key) and dtype in (None, table.dtype) and self._plan.takes(key, table)

    def value_of(
        self, key: str, table: CompressedTensor, device: Any, dtype: torch.dtype | None
    ) -> CompressedTensor | torch.Tensor:
        """Returns the form in which the model holds a table of a checkpoint, on a device: a table, or a plain
        tensor."""
        dtype = table.dtype if dtype is None else dtype
        if self.takes(key, table, dtype):
            return table.to(device)
        if key in self._later:
            self._tables[key] = table
        values = table.decompress(device=device).to(dtype)
        return self._plan.table_of(key, values) if self.codes(key) else values

    def put(self, key: str, value: CompressedTensor | torch.Tensor) -> CompressedTensor | torch.Tensor:
        """Puts a weight into its modules, coded, and returns its table. If it stays plain, returns the tensor that
        is to be a parameter."""
        if isinstance(value, torch.Tensor) and not (self.codes(key) and is_worth_coding(value.detach())):
            return value
        held = self._model.get_parameter(key)  # tables of some modules hold transposed matrices
        is_transposed = not isinstance(value, torch.Tensor) and self._plan.is_transposed(key)
        if value.shape != (held.mT.shape if is_transposed else held.shape):
            self._later.add(key)  # the framework refuses it, or fills the weight with other values
            return value if isinstance(value, torch.Tensor) else value.decompress()
        table = self._plan.table_of(key, value) if isinstance(value, torch.Tensor) else value
        if self._plan.put(key, table):
            return table
        return value if isinstance(value, torch.Tensor) else value.decompress()

    def finish(self) -> ModelReport:
        """Codes the remaining weights, after the checkpoint has been read."""
        rest = self._fields.plan(self._model)
        rest.code_all(self._tables, but=self._is_away)
        join_neighbours(self._model)
        guard_conversions(self._model)
        first, second = self._plan.report(), rest.report()
        coded = (*first.coded, *second.coded)
        plain = {name: why for name, why in (first.plain | second.plain).items() if name not in set(coded)}
        return ModelReport(coded, plain, first.num_bytes + second.num_bytes, first.nbytes + second.nbytes)


def check_device_map(device_map: object) -> None:
    """Raises ValueError for a device map that puts a part of the model elsewhere than on the devices that compute."""
    for key, place in away_of(device_map).items():
        raise ValueError(
            f"the device map puts {key or 'the model'!r} on {place!r}, from where hooks of accelerate would bring "
            "weights that they do not know: load the model without quantization_config and device_map, and call "
            "ibp.offload(model)"
        )


def away_of(device_map: object) -> dict[str, str]:
    """Returns the parts of a model that a device map puts elsewhere than on the devices that compute, each with its
    place."""
    places = {key: str(place) for key, place in device_map.items()} if isinstance(device_map, Mapping) else {}
    names = {"disk"} if set(places.values()) == {"cpu"} else {"cpu", "disk"}
    return {key: place for key, place in places.items() if place in names}


def is_coded(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file of a checkpoint is one of ibp."""
    if not os.fspath(path).endswith(SUFFIX):
        return False
    with safe_open(path, framework="pt") as file:
        return FORMAT in (file.metadata() or {})


class CodingQuantizer:
    """What the quantizers of both frameworks have: a report, and a `Loading` while a model is loaded. It must come
    before the framework's class among the bases."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.report: ModelReport | None = None
        self._loading: Loading | None = None

    def _codes(self, name: str) -> bool:
        """Returns whether a parameter is coded when it is loaded."""
        return self._loading is not None and self._loading.codes(name)

    @property
    def is_trainable(self) -> bool:
        """True, because gradients reach adapters through coded weights."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True
