"""Code that the quantizers of transformers and diffusers share: the configuration, and checks of device maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...adapters import ModelLoading, ModelOptions
from ...nn import Conv1D, Embedding, EmbeddingBag, Experts, Linear, ModelReport

METHOD = "ibp"  # frameworks find the quantizer by this value of quant_method in the quantization_config of config.json


class CodingFields(ModelOptions):
    """The fields of a configuration: those of `ibp.adapters.ModelOptions`, and quant_method."""

    def __init__(self, *, quant_method: str = METHOD, **options: Any) -> None:
        if quant_method != METHOD:
            raise ValueError(f"quant_method is {quant_method!r}; wanted {METHOD!r}")
        self.quant_method = quant_method
        super().__init__(**options)


def holds_table(module: torch.nn.Module) -> bool:
    """Returns whether `module` is a module of `ibp.nn`, whose weights are tables."""
    return isinstance(module, (Conv1D, Embedding, EmbeddingBag, Experts, Linear))


def check_device_map(device_map: object) -> None:
    """Raises ValueError if a device map puts a part of the model on "cpu" or "disk", because this part would have to be
    moved to a GPU for each use. A map that puts all parts on "cpu" is accepted."""
    for key, place in away_of(device_map).items():
        raise ValueError(
            f"the device map puts {key or 'the model'!r} on {place!r}, from where hooks of accelerate would bring "
            "weights that they do not know: load the model without quantization_config and device_map, and call "
            "ibp.offload(model)"
        )


def away_of(device_map: object) -> dict[str, str]:
    """Returns the entries of a device map whose part of the model is on "cpu" or "disk" and would have to be moved to a
    GPU for each use. If all parts are on "cpu", the CPU computes, and the result is empty."""
    places = {key: str(place) for key, place in device_map.items()} if isinstance(device_map, Mapping) else {}
    names = {"disk"} if set(places.values()) == {"cpu"} else {"cpu", "disk"}
    return {key: place for key, place in places.items() if place in names}


class CodingQuantizer:
    """The base class of the quantizers of both frameworks. In the list of bases, it must come before the framework's
    class. `report` is the report of the model that was loaded last. `_loading` is set while a model is loaded."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.report: ModelReport | None = None
        self._loading: ModelLoading | None = None

    def _codes(self, name: str) -> bool:
        """Returns whether a parameter is coded when it is loaded."""
        return self._loading is not None and self._loading.codes(name)

    @property
    def is_trainable(self) -> bool:
        """True, because gradients pass through coded weights to adapters."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True
