"""Models of Hugging Face diffusers with coded weights, and its group offloading with compressed weights.

    from ibp.integrations.diffusers import IbpDiffusersConfig

    DiTTransformer2DModel.from_pretrained(name, quantization_config=IbpDiffusersConfig(), torch_dtype=torch.bfloat16)

Matrices become tables while the model is loaded. Or they rest in host memory:

    from diffusers.hooks import apply_group_offloading
    from ibp.integrations.diffusers import compress_groups

    apply_group_offloading(model, onload_device=torch.device("cuda"), offload_type="leaf_level", use_stream=True)
    compress_groups(model)

Hooks, prefetching and streams stay diffusers' own. What changes is where a group's parameters come from: instead of raw
copies in host memory, tables that are decoded on the onload device, all of a group in one call.

Works with diffusers 0.39 and newer; checked up to 0.42.
"""
# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch

from .._common.closing import Closing
from .._common.in_place import NotTheModel, check_model
from .._common.process import OfThisProcess
from .._common.statistics import Saves, Statistics, shown_memory
from .._fetch.streaming import decompress
from .._tables.compressed_tensor import CompressedTensor
from .._tables.weights import CodedWeight, WeightCompressor, is_worth_coding
from ._releases import check_release

check_release(diffusers, "0.39")  # before names are imported that older releases lack

from diffusers.hooks.group_offloading import _GROUP_OFFLOADING, ModuleGroup  # noqa: E402

from ._diffusers_weights import IbpDiffusersConfig, IbpDiffusersQuantizer  # noqa: E402

__all__ = ["CompressedGroups", "GroupBytes", "IbpDiffusersConfig", "IbpDiffusersQuantizer", "close", "compress_groups"]

_STATE_HOOK = "_ibp_state_hook"  # attribute of a model: what removes its hook


@dataclass(frozen=True)
class GroupBytes(Statistics, Saves):
    """Bytes of a model's compressed parameters as they were, and as they are stored; a shared one counts once."""

    original_bytes: int
    stored_bytes: int


class CompressedGroups(OfThisProcess, Closing, NotTheModel):
    """A model that `compress_groups` has compressed. `close()`, and the end of a `with` block, undo that.

    Attributes:
        model: as given.
    """

    _instead = "save the model's state_dict()"
    changed_by = "compress_groups(model)"

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def stats(self) -> GroupBytes:
        """The bytes of all compressed parameters that the model has now."""
        tables = self._tables()
        return GroupBytes(sum(table.original_bytes for table in tables), sum(table.stored_bytes for table in tables))

    @property
    def nbytes(self) -> int:
        """Bytes of all memory that the tables of these parameters take."""
        return sum(table.nbytes for table in self._tables())

    def _tables(self) -> list[CompressedTensor]:
        return [coded.table for coded in _coded_of(_groups_of(self.model)).values()]

    def close(self) -> None:
        """The model's groups have raw parameters in host memory again. No-op the second time."""
        for group in _groups_of(self.model):
            compressed = _compressed(group)
            if compressed is not None:
                compressed.restore()
        if hasattr(self.model, _STATE_HOOK):
            getattr(self.model, _STATE_HOOK).remove()
            delattr(self.model, _STATE_HOOK)

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

    Parameters of less than 4 KiB, those of subclasses of torch.Tensor (as quantised ones are) and buffers stay with
    diffusers. Tables are in host memory, pinned if there is a GPU, whatever low_cpu_mem_usage says: that is about
    pinned copies besides. While a group is offloaded its parameters keep their shape, dtype and device, but take no
    memory and are NaN (integers 0); `model.state_dict()` has their values nevertheless, decoded. Called again, it
    compresses groups that are not compressed yet. When diffusers removes its hooks, as it does to load LoRAs, the
    parameters come back uncompressed: call it again afterwards.

    Args:
        model: a module whose groups are offloaded to the CPU. Of a pipeline: each of its models.
        path, max_sms: of `ibp.decompress`. Where matrix products keep the GPU busy, path "gpu" may be faster.
        compress_options: of `ibp.compress`, but x and codebook. By default layout is "packed" and row_bytes 4,096.

    Returns:
        What undoes it, by `close()` or as a context manager. Its `stats()` count earlier calls, too.

    Raises:
        TypeError: model is no module, or an option is none of `ibp.compress`.
        ValueError: model has no group offloading, or groups that are offloaded to disk or to another device.
    """
    compressor = WeightCompressor(compress_options)
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
    known = _coded_of(groups)
    for group, hooks in groups.items():
        if _compressed(group) is None:
            group._offload_to_memory()  # the values may still be on the onload device
            device = group.onload_device if torch.device(group.onload_device).type == "cuda" else None
            for parameter in _parameters_of(group):
                if parameter not in known and is_worth_coding(parameter.data):
                    known[parameter] = compressor.code(names.get(parameter, ""), parameter.data, device=device)
            _CompressedGroup(group, hooks, known, {"path": path, "max_sms": max_sms})
    if not hasattr(model, _STATE_HOOK):
        setattr(model, _STATE_HOOK, model.register_state_dict_post_hook(_decode_state))
    return CompressedGroups(model)


def close(model: torch.nn.Module) -> None:
    """Undoes `compress_groups`: the model's groups have raw parameters in host memory again. No-op without.

    Raises:
        TypeError: model is no module.
    """
    CompressedGroups(model).close()


class _CompressedGroup:
    """A group of diffusers whose parameters come from tables. Puts itself in the place of the group's two functions.
    coded, placeholders: by parameter, the weights, and what takes their place at rest; rest: diffusers' own group of
    all other tensors."""

    def __init__(
        self,
        group: ModuleGroup,
        hooks: list[Any],
        known: dict[torch.nn.Parameter, CodedWeight],
        fetching: dict[str, Any],
    ) -> None:
        self.group, self.hooks, self.fetching = group, hooks, fetching
        self.coded = {parameter: known[parameter] for parameter in _parameters_of(group) if parameter in known}
        self.placeholders = {parameter: _placeholder(parameter) for parameter in self.coded}
        self.rest = ModuleGroup(
            modules=[],
            offload_device=group.offload_device,
            onload_device=group.onload_device,
            offload_leader=group.offload_leader,
            parameters=[parameter for parameter in _parameters_of(group) if parameter not in self.coded],
            buffers=_buffers_of(group),
            non_blocking=group.non_blocking,
            stream=group.stream,
            record_stream=group.record_stream,
            low_cpu_mem_usage=group.low_cpu_mem_usage,
        )
        for parameter in self.coded:
            group.cpu_param_dict.pop(parameter, None)
        vars(group).update(_onload_from_memory=self.onload, _offload_to_memory=self.offload)
        for hook in hooks:
            hook.deinitalize_hook = self._on_removal
        self._let_go()

    def onload(self) -> None:
        """Decodes the parameters on the onload device: on the group's stream if it has one, else on the current one."""
        group = self.group
        self.rest.non_blocking = group.non_blocking
        self.rest._onload_from_memory()  # waits for the stream, as diffusers does
        backend = group._torch_accelerator_module
        current: Any = None if group.stream is None else backend.current_stream()
        with contextlib.nullcontext() if group.stream is None else backend.stream(group.stream):
            tables = [coded.table for coded in self.coded.values()]
            decoded = decompress(tables, device=group.onload_device, **self.fetching)
            for (parameter, coded), values in zip(self.coded.items(), decoded):
                parameter.data = coded.as_it_was(values)
                if group.record_stream:
                    values.record_stream(current)
        if group.stream is not None and group.onload_self:  # what no other group prefetches is needed at once
            current.wait_stream(group.stream)

    def offload(self) -> None:
        """Frees the decoded parameters."""
        self.rest._offload_to_memory()  # waits for what computes with them, where the group has a stream
        self._let_go()

    def restore(self) -> None:
        """Raw parameters in host memory, and diffusers' own functions. No-op the second time."""
        group = self.group
        if _compressed(group) is not self:
            return
        self.offload()
        for parameter, coded in self.coded.items():
            parameter.data = coded.decoded(group.offload_device)
            if group.stream is not None:
                parameter.data = group.cpu_param_dict[parameter] = group._to_cpu(parameter, group.low_cpu_mem_usage)
        del vars(group)["_onload_from_memory"], vars(group)["_offload_to_memory"]
        for hook in self.hooks:
            del hook.deinitalize_hook

    def _let_go(self) -> None:
        for parameter, placeholder in self.placeholders.items():
            parameter.data = placeholder

    def _on_removal(self, module: torch.nn.Module) -> torch.nn.Module:
        """Takes the place of a hook's `deinitalize_hook` (so spelled there)."""
        self.restore()
        return module


# ---- a parameter at rest ---------------------------------------------------------------------------------------------


def _placeholder(parameter: torch.Tensor) -> torch.Tensor:
    """One element of memory in the shape of the parameter; NaN, so that what computes with it is seen to."""
    value = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    return torch.full((), value, dtype=parameter.dtype, device="cpu").expand(parameter.shape)


def _decode_state(model: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Gives a state dict the values of the parameters that are at rest."""
    coded = _coded_of(_groups_of(model))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_at_rest = parameter.untyped_storage().nbytes() < parameter.nbytes
        if is_at_rest and prefix + name in state and parameter in coded:
            state[prefix + name] = coded[parameter].decoded(parameter.device)


# ---- a model's groups ------------------------------------------------------------------------------------------------


def _groups_of(model: torch.nn.Module) -> dict[ModuleGroup, list[Any]]:
    """diffusers' groups, each with the hooks that it is reached by."""
    check_model(model, "of a pipeline each of its models")
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


def _coded_of(groups: Iterable[ModuleGroup]) -> dict[torch.nn.Parameter, CodedWeight]:
    found: dict[torch.nn.Parameter, CodedWeight] = {}
    for group in groups:
        compressed = _compressed(group)
        if compressed is not None:
            found |= compressed.coded
    return found
