"""LoRA adapters of PEFT on coded matrices: training, loading and merging.

    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    model = model.merge_and_unload()    # the matrices are coded again

If ibp is imported, PEFT treats `ibp.nn.Linear` and `ibp.nn.Conv1D` as it treats torch.nn.Linear. `ibp.nn.compress` and
`IbpConfig` put these modules into a model. Tested with peft 0.21.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper

from ..nn import Conv1D, Linear
from .shared import holds_table

__all__ = ["LoraLinear"]


class LoraLinear(lora.Linear):
    """PEFT's `lora.Linear` for a base layer that is an `ibp.nn.Linear` or `ibp.nn.Conv1D`. Merging decodes the matrix,
    adds the adapter's product to it, and codes the sum, which replaces the matrix."""

    base_layer: Any

    def merge(self, *args: Any, **options: Any) -> None:
        """Merges adapters as PEFT's method does."""
        with self._decoded():
            super().merge(*args, **options)

    def unmerge(self) -> None:
        """Unmerges adapters as PEFT's method does. Because sums are rounded, the subtraction does not always restore
        the bits of the matrix."""
        with self._decoded():
            super().unmerge()

    @contextlib.contextmanager
    def _decoded(self) -> Iterator[None]:
        """Inside the context, a plain module with the decoded weight takes the place of the base layer. At the end, the
        base layer returns and its weight is coded again. If an error is raised, the base layer's weight is
        unchanged."""
        coded, plain = self.base_layer, torch.nn.Module()
        plain.weight = weight = coded.parameter()
        plain.bias = coded.bias
        for adapter in self.lora_A.values():  # the adapters may be on a GPU while the table is in host memory
            weight.data = weight.data.to(adapter.weight.device)
        self.base_layer = plain
        try:
            yield
            coded.load_state_dict({"weight": weight.detach()}, strict=False)  # codes the weight where the table was
        finally:
            self.base_layer = coded


_dispatch_default = lora.model.dispatch_default


def _dispatch(target: torch.nn.Module, adapter_name: str, config: Any, **options: Any) -> torch.nn.Module | None:
    """Returns the adapter module for a module. Replaces PEFT's `dispatch_default`, which does not know coded modules.
    Raises TypeError if the module is a coded module that cannot have an adapter."""
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if holds_table(base) and (config.use_dora or not isinstance(base, Linear)):
        raise TypeError(
            f"{'DoRA' if config.use_dora else 'LoRA'} cannot adapt an ibp.nn.{type(base).__name__}: leave this module "
            "plain, by exclude= of ibp.nn.compress or IbpConfig"
        )
    if not isinstance(base, Linear):
        return _dispatch_default(target, adapter_name, config=config, **options)
    config.fan_in_fan_out = isinstance(base, Conv1D)
    return LoraLinear(target, adapter_name, config=config, is_target_conv_1d_layer=config.fan_in_fan_out, **options)


lora.model.dispatch_default = _dispatch

_check_module = ModulesToSaveWrapper.check_module


def _check_that_it_trains(wrapper: Any) -> None:
    """Raises TypeError if `modules_to_save` has a coded module. PEFT would train a copy of the module's parameters, but
    the weights of a coded module are in a table and cannot be trained."""
    for module in wrapper.original_module.modules():
        if holds_table(module):
            raise TypeError(
                f"modules_to_save has an ibp.nn.{type(module).__name__}, whose weights are fixed: leave a module that "
                "is to train plain, by exclude= of ibp.nn.compress or IbpConfig"
            )
    _check_module(wrapper)


ModulesToSaveWrapper.check_module = _check_that_it_trains
