"""Adapters for Hugging Face diffusers: models with coded weights, and group offloading with compressed weights.

    from ibp.integrations.diffusers import IbpDiffusersConfig

    DiTTransformer2DModel.from_pretrained(name, quantization_config=IbpDiffusersConfig(), torch_dtype=torch.bfloat16)

Matrices become tables while the model is loaded. `from_pretrained` calls the quantizer that is defined here.
Alternatively, compressed weights stay in host memory and are decoded on the GPU for each use:

    from diffusers.hooks import apply_group_offloading
    from ibp.integrations.diffusers import compress_groups

    apply_group_offloading(model, onload_device=torch.device("cuda"), offload_type="leaf_level", use_stream=True)
    compress_groups(model)

diffusers still runs hooks, prefetches groups and uses its streams. Only the source of a group's parameters changes: raw
parameters are no longer copied from host memory. Instead, all tables of the group are decoded on the onload device in
one call.

Works with diffusers 0.39 and newer; tested up to 0.42.
"""
# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch

import ibp

from ..adapters import CodedStatistics, ModelChange, ModelLoading, RestingWeight, WeightCompressor, shown_memory
from ..checkpoints import SourceTensor, coded_name, is_coded
from .shared import METHOD, CodingFields, CodingQuantizer, away_of, check_release

check_release(diffusers, "0.39")  # before the import of names that older releases do not have

from diffusers.configuration_utils import FrozenDict  # noqa: E402
from diffusers.models import modeling_utils  # noqa: E402
from diffusers.quantizers import auto  # noqa: E402
from diffusers.quantizers.base import DiffusersQuantizer  # noqa: E402
from diffusers.quantizers.quantization_config import QuantizationConfigMixin  # noqa: E402

# The functions that need diffusers.hooks import it. ibp imports this module as soon as diffusers.models.modeling_utils
# has been imported, when diffusers.hooks, which imports models, cannot always be imported yet.
if TYPE_CHECKING:
    from diffusers.hooks.group_offloading import ModuleGroup

__all__ = ["CompressedGroups", "GroupBytes", "close", "compress_groups", "IbpDiffusersConfig", "IbpDiffusersQuantizer"]

# Pickles of earlier releases name a module that was merged into this one.
sys.modules[f"{__name__}.weights"] = sys.modules[__name__]


# ---- coded weights ----


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

    use_keep_in_fp32_modules = True

    def __init__(self, quantization_config: IbpDiffusersConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._coded: dict[str, SourceTensor] = {}  # the tensors in coded files, by name
        self._files = contextlib.ExitStack()  # closes these files

    def validate_environment(self, *args: Any, device_map: Any = None, **options: Any) -> None:
        """Raises ValueError if a device map puts a part of the model on "cpu" or "disk", because this part would have
        to be moved to a GPU for each use. A map that puts all parts on "cpu" is accepted."""
        for key, place in away_of(device_map).items():
            raise ValueError(
                f"the device map puts {key or 'the model'!r} on {place!r}, from where hooks of accelerate would bring "
                "weights that they do not know: load the model without quantization_config and device_map, and call "
                "ibp.offload(model)"
            )

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


# The names of coded files.
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


# ---- compressed groups ----


@dataclass(frozen=True)
class GroupBytes(CodedStatistics):
    """The sizes in bytes of a model's compressed parameters: the original size of the parameters, and the size of their
    coded rows and codebooks. A shared parameter counts once."""

    original_bytes: int
    stored_bytes: int


class CompressedGroups(ModelChange):
    """A model that `compress_groups` has compressed. `close()` or the end of a `with` block undoes the compression.

    Attributes:
        model: the argument.
    """

    _instead = "save the model's state_dict()"
    changed_by = "compress_groups(model)"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, "of a pipeline each of its models")

    def stats(self) -> GroupBytes:
        """Returns the total sizes in bytes of all parameters of the model that are now compressed."""
        tables = self._tables()
        return GroupBytes(sum(table.original_bytes for table in tables), sum(table.stored_bytes for table in tables))

    @property
    def nbytes(self) -> int:
        """Size in bytes of the memory that the tables of the compressed parameters occupy."""
        return sum(table.nbytes for table in self._tables())

    def _tables(self) -> list[ibp.CompressedTensor]:
        return [weight.coded.table for weight in _weights_of(_groups_of(self.model)).values()]

    def close(self) -> None:
        """Undoes the compression: the parameters of the model's groups become raw tensors in host memory again. Does
        nothing for groups that are not compressed."""
        for group in _groups_of(self.model):
            compressed = _compressed(group)
            if compressed is not None:
                compressed.restore()
        self.guard_conversions()

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"ibp.integrations.diffusers.CompressedGroups({type(self.model).__name__}, "
            f"{shown_memory(self.nbytes, stats.original_bytes)}, stored_bytes={stats.stored_bytes:,}, "
            f"savings={stats.savings:.1%})"
        )


def compress_groups(
    model: torch.nn.Module, *, path: str | None = None, max_sms: int | None = None, **compress_options: Any
) -> CompressedGroups:
    """Compresses the parameters of a model that has diffusers' group offloading.

    diffusers itself still moves buffers, parameters of less than 4 KiB, and parameters of classes other than
    torch.nn.Parameter (such as quantised parameters). Tables are in host memory, which is pinned if there is a GPU. The
    option low_cpu_mem_usage of diffusers does not change this, because it only controls additional pinned copies. While
    a group is offloaded, its parameters keep their shape, dtype and device, and take no memory. Code that reads the
    values of such a parameter gets a decoded copy. Examples are `model.state_dict()`, and a module that is called while
    its group is not on the onload device. The parameters cannot be written to. If `compress_groups` is called again, it
    compresses the groups that are not compressed yet. When diffusers removes its hooks, for instance to load LoRAs, the
    parameters become raw again. Call `compress_groups` again afterwards.

    Args:
        model: a module whose groups are offloaded to the CPU. For a pipeline, call `compress_groups` for each of its
            models.
        path, max_sms: as in `ibp.decompress`. If matrix products keep the GPU busy, path "gpu" may be faster.
        compress_options: options of `ibp.compress`, except x and codebook. By default layout is "packed" and row_bytes
            4,096.

    Returns:
        An object whose `close()` undoes the compression; it is also a context manager. Its `stats()` also counts the
        parameters that earlier calls compressed.

    Raises:
        TypeError: model is not a module, or an option is not one of `ibp.compress`.
        ValueError: model has no group offloading, or groups that are offloaded to disk or to another device.
    """
    compressor, change = WeightCompressor(compress_options), CompressedGroups(model)
    groups = _groups_of(model)
    if not groups:
        raise ValueError(
            f"{type(model).__name__} has no group offloading: call diffusers' apply_group_offloading first"
        )
    for group in groups:
        if group.offload_to_disk_path is not None:
            raise ValueError(f"a group is offloaded to disk, {group.offload_to_disk_path}; wanted host memory")
        if torch.device(group.offload_device).type != "cpu":
            raise ValueError(f"a group is offloaded to {group.offload_device}; wanted the CPU")
    names = {parameter: name for name, parameter in model.named_parameters()}
    known = _weights_of(groups)
    for group, hooks in groups.items():
        if _compressed(group) is None:
            at_rest = {parameter: known[parameter] for parameter in _parameters_of(group) if parameter in known}
            for parameter, weight in at_rest.items():  # parameters that also belong to another group
                weight.wake(parameter)
            group._offload_to_memory()  # the values may still be on the onload device
            for parameter, weight in at_rest.items():
                weight.rest(parameter)
            device = group.onload_device if torch.device(group.onload_device).type == "cuda" else None
            for parameter in _parameters_of(group):
                is_plain = type(parameter) is torch.nn.Parameter
                if is_plain and parameter not in known and compressor.takes(parameter.data):
                    coded = compressor.code(names.get(parameter, ""), parameter.data, device=device)
                    known[parameter] = RestingWeight(names.get(parameter, "a parameter"), coded, group.offload_device)
            _CompressedGroup(group, hooks, known, {"path": path, "max_sms": max_sms})
    change.guard_conversions()
    return change


def close(model: torch.nn.Module) -> None:
    """Undoes `compress_groups`: the parameters of the model's groups become raw tensors in host memory again. Does
    nothing for groups that are not compressed.

    Raises:
        TypeError: model is not a module.
    """
    CompressedGroups(model).close()


class _CompressedGroup:
    """One of diffusers' groups, whose parameters come from tables. The methods `onload` and `offload` replace the
    group's functions `_onload_from_memory` and `_offload_to_memory`.

    Attributes:
        weights: the coded weight of each parameter.
        rest: an ordinary group of diffusers, which has those tensors of the group that are not coded.
    """

    def __init__(
        self,
        group: ModuleGroup,
        hooks: list[Any],
        known: dict[torch.nn.Parameter, RestingWeight],
        fetching: dict[str, Any],
    ) -> None:
        from diffusers.hooks.group_offloading import ModuleGroup

        self.group, self.hooks, self.fetching = group, hooks, fetching
        self.weights = {parameter: known[parameter] for parameter in _parameters_of(group) if parameter in known}
        self.rest = ModuleGroup(
            modules=[],
            offload_device=group.offload_device,
            onload_device=group.onload_device,
            offload_leader=group.offload_leader,
            parameters=[parameter for parameter in _parameters_of(group) if parameter not in self.weights],
            buffers=_buffers_of(group),
            non_blocking=group.non_blocking,
            stream=group.stream,
            record_stream=group.record_stream,
            low_cpu_mem_usage=group.low_cpu_mem_usage,
        )
        for parameter in self.weights:
            group.cpu_param_dict.pop(parameter, None)
        vars(group).update(_onload_from_memory=self.onload, _offload_to_memory=self.offload)
        for hook in hooks:
            hook.deinitalize_hook = self._on_removal
        self._let_go()

    def onload(self) -> None:
        """Decodes the parameters on the onload device, on the group's stream. If the group has no stream, decodes them
        on the current stream."""
        group = self.group
        self.rest.non_blocking = group.non_blocking
        self.rest._onload_from_memory()  # waits for the stream, as diffusers does
        backend = group._torch_accelerator_module
        current: Any = None if group.stream is None else backend.current_stream()
        with contextlib.nullcontext() if group.stream is None else backend.stream(group.stream):
            tables = [weight.coded.table for weight in self.weights.values()]
            decoded = ibp.decompress(tables, device=group.onload_device, **self.fetching)
            for (parameter, weight), values in zip(self.weights.items(), decoded):
                weight.wake(parameter, values)
                if group.record_stream:
                    values.record_stream(current)
        # If no other group prefetches these parameters, they are needed at once.
        if group.stream is not None and group.onload_self:
            current.wait_stream(group.stream)

    def offload(self) -> None:
        """Frees the decoded parameters."""
        self.rest._offload_to_memory()  # if the group has a stream, this also waits for work that uses the parameters
        self._let_go()

    def restore(self) -> None:
        """Undoes the compression of the group: its parameters become raw tensors in host memory, and the group gets
        back diffusers' functions. Does nothing if the group is not compressed."""
        group = self.group
        if _compressed(group) is not self:
            return
        self.offload()
        for parameter, weight in self.weights.items():
            weight.release(parameter)
            if group.stream is not None:
                parameter.data = group.cpu_param_dict[parameter] = group._to_cpu(parameter, group.low_cpu_mem_usage)
        del vars(group)["_onload_from_memory"], vars(group)["_offload_to_memory"]
        for hook in self.hooks:
            del hook.deinitalize_hook

    def _let_go(self) -> None:
        """Frees the memory of the decoded parameters. The parameters then rest (see `RestingWeight`)."""
        for parameter, weight in self.weights.items():
            weight.rest(parameter)

    def _on_removal(self, module: torch.nn.Module) -> torch.nn.Module:
        """Restores the group when diffusers removes a hook. Replaces the hook's `deinitalize_hook`, which diffusers
        spells in this way."""
        self.restore()
        return module


# ---- a model's groups ----


def _groups_of(model: torch.nn.Module) -> dict[ModuleGroup, list[Any]]:
    """Returns diffusers' groups of a model, each with the list of its hooks."""
    from diffusers.hooks.group_offloading import _GROUP_OFFLOADING

    groups: dict[ModuleGroup, list[Any]] = {}
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        hook = None if registry is None else registry.get_hook(_GROUP_OFFLOADING)
        if hook is not None:
            groups.setdefault(hook.group, []).append(hook)
    return groups


def _parameters_of(group: ModuleGroup) -> list[torch.nn.Parameter]:
    of_modules = (module.parameters() for module in group.modules)
    return list(dict.fromkeys(itertools.chain(*of_modules, group.parameters)))


def _buffers_of(group: ModuleGroup) -> list[torch.Tensor]:
    return list(dict.fromkeys(itertools.chain(*(module.buffers() for module in group.modules), group.buffers)))


def _compressed(group: ModuleGroup) -> _CompressedGroup | None:
    owner = getattr(group._onload_from_memory, "__self__", None)
    return owner if isinstance(owner, _CompressedGroup) else None


def _weights_of(groups: Iterable[ModuleGroup]) -> dict[torch.nn.Parameter, RestingWeight]:
    """Returns the coded weight of each parameter of the groups."""
    found: dict[torch.nn.Parameter, RestingWeight] = {}
    for group in groups:
        compressed = _compressed(group)
        if compressed is not None:
            found |= compressed.weights
    return found
