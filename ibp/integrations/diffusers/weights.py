"""Loads models of diffusers with coded weights. `from_pretrained` calls the quantizer that is defined here."""
# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.models import modeling_utils
from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin

import ibp

from ...adapters import ModelLoading
from ...checkpoints import SourceTensor, coded_name, is_coded
from ..shared import METHOD, CodingFields, CodingQuantizer, check_device_map

__all__ = ["IbpDiffusersConfig", "IbpDiffusersQuantizer"]


class _Method(str, Enum):
    IBP = METHOD


class IbpDiffusersConfig(CodingFields, QuantizationConfigMixin):
    """The argument `quantization_config` of `from_pretrained`, for models of diffusers. While a model is loaded, its
    matrices become tables like those that `ibp.nn.compress` makes.

    For a pipeline, load the model in this way and pass it to the pipeline. While the model is loaded, memory holds the
    coded model and one memory-mapped file of plain weights. `model.save_pretrained` writes plain weights and a plain
    config.json. A directory that `ibp compress` wrote can be loaded without this argument if ibp is imported.
    `model.hf_quantizer.report` names the coded weights.

    Example:
        >>> from diffusers import DiTTransformer2DModel
        >>> from ibp.integrations.diffusers import IbpDiffusersConfig
        >>> sizes = {"num_attention_heads": 4, "attention_head_dim": 64, "in_channels": 4, "sample_size": 8}
        >>> DiTTransformer2DModel(**sizes, num_layers=1, norm_num_groups=1).bfloat16().save_pretrained("dit")
        >>> model = DiTTransformer2DModel.from_pretrained(
        ...     "dit", quantization_config=IbpDiffusersConfig(min_bytes=1 << 16), torch_dtype=torch.bfloat16
        ... )
        >>> len(model.hf_quantizer.report.coded) > 5
        True

    Args:
        level, include, exclude, fused, min_bytes: as in `ibp.nn.compress`. Modules are named as in the model.
        quant_method: "ibp", as in config.json.

    Raises:
        TypeError, ValueError: an argument has a wrong type, or is out of range.
    """

    __module__ = "ibp.integrations.diffusers"

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.quant_method = _Method.IBP

    def to_diff_dict(self) -> dict[str, Any]:
        """Returns the fields that `repr` shows."""
        return self.to_dict()


class IbpDiffusersQuantizer(CodingQuantizer, DiffusersQuantizer):
    """The quantizer whose methods diffusers calls while it loads a model with an `IbpDiffusersConfig`.

    Attributes:
        report: which weights are coded, and why others stay plain. None until the model has been loaded.
    """

    __module__ = "ibp.integrations.diffusers"

    use_keep_in_fp32_modules = True

    def __init__(self, quantization_config: IbpDiffusersConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._coded: dict[str, SourceTensor] = {}  # the tensors in coded files, by name
        self._files = contextlib.ExitStack()  # closes these files

    def validate_environment(self, *args: Any, device_map: Any = None, **options: Any) -> None:
        """Raises ValueError for the device maps that `check_device_map` refuses."""
        check_device_map(device_map)

    @property
    def supports_parallel_loading(self) -> bool:
        return False

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: Iterable[Any]) -> list[str]:
        """Returns the names of the tensors in coded files, or loaded_keys if no file is coded. loaded_keys: the names
        in the headers of the files. In a coded file, these are the names of parts of tables."""
        for path in checkpoint_files:
            if is_coded(path):
                source = self._files.enter_context(ibp.checkpoints.open(path, verify=True))
                self._coded.update(source.tensors)
        return list(self._coded) or loaded_keys

    def maybe_update_state_dict(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors of a coded file by name. For a weight that will be coded and whose table is in the file,
        the result has a placeholder on the meta device. state_dict: the tensors of the file as diffusers reads them,
        which are plain tensors and parts of tables."""
        if not self._coded:
            return state_dict
        tensors, tables = {}, {name.rpartition(":")[0] for name in state_dict}  # parts of tables are "<table>:<part>"
        for name, tensor in self._coded.items():
            if name in state_dict or name in tables:
                is_table = self._codes(name) and tensor.table is not None
                placeholder = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                tensors[name] = placeholder if is_table else tensor.tensor()
        return tensors

    def check_if_quantized_param(
        self, model: Any, param_value: Any, param_name: str, state_dict: dict[str, Any], **options: Any
    ) -> bool:
        return self._codes(param_name)

    def create_quantized_param(
        self,
        model: torch.nn.Module,
        param_value: torch.Tensor,
        param_name: str,
        target_device: Any,
        *args: Any,
        **options: Any,
    ) -> None:
        """Codes a weight and puts it into its modules. If coding would not make the weight smaller, it becomes an
        ordinary parameter."""
        assert self._loading is not None
        source = self._coded.get(param_name)
        if param_value.is_meta and source is not None and source.table is not None:
            value = self._loading.value_of(param_name, source.table, target_device, param_value.dtype)
        else:
            value = param_value.to(target_device)
        held = self._loading.put(param_name, value)
        if isinstance(held, torch.Tensor):
            path, _, name = param_name.rpartition(".")
            setattr(model.get_submodule(path), name, torch.nn.Parameter(held, requires_grad=False))

    def _process_model_before_weight_loading(self, model: torch.nn.Module, **options: Any) -> None:
        model.eval()  # from_pretrained does this later; in training mode, weights would be trainable
        self._loading = ModelLoading(self.quantization_config, model)

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        assert self._loading is not None
        self.report, self._loading, self._coded = self._loading.finish(), None, {}
        self._files.close()
        fields = {key: value for key, value in model.config.items() if key != "quantization_config"}
        model._internal_dict = FrozenDict(fields)  # makes save_pretrained write plain fields
        return model

    @property
    def is_serializable(self) -> bool:
        return True


# diffusers has no function that registers a quantizer, but looks quantizers up in these dicts when it loads a model.
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = IbpDiffusersConfig
auto.AUTO_QUANTIZER_MAPPING[METHOD] = IbpDiffusersQuantizer


# ---- names of coded files ----


_get_file, _fetch_index = modeling_utils._get_model_file, modeling_utils._fetch_index_file


def _get_either(pretrained: Any, *, weights_name: str, **options: Any) -> Any:
    """Replaces a function of diffusers that finds a file of weights. Does the same, but if there is no plain file,
    looks for a coded file, which has another name."""
    try:
        return _get_file(pretrained, weights_name=weights_name, **options)
    except OSError:
        with contextlib.suppress(OSError):
            return _get_file(pretrained, weights_name=coded_name(weights_name), **options)
        raise


def _fetch_either(**options: Any) -> Path | None:
    """Replaces a function of diffusers that finds the index of a set of files. Does the same, but if there is no plain
    set, looks for the index of a coded set."""
    found: Path | None = _fetch_index(**options)
    if found is None or not found.is_file():
        plain = modeling_utils._add_variant(modeling_utils.SAFETENSORS_WEIGHTS_NAME, options["variant"])
        given = {key: value for key, value in options.items() if key not in ("is_local", "use_safetensors", "variant")}
        pretrained = given.pop("pretrained_model_name_or_path")
        with contextlib.suppress(OSError):
            return Path(_get_file(pretrained, weights_name=f"{coded_name(plain)}.index.json", **given))
    return found


modeling_utils._get_model_file, modeling_utils._fetch_index_file = _get_either, _fetch_either
