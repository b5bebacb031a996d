"""Compresses the weights of models that use the group offloading of diffusers.

diffusers still runs hooks, prefetches groups and uses its streams. Only the source of a group's parameters changes: raw
parameters are no longer copied from host memory. Instead, all tables of the group are decoded on the onload device in
one call.
"""
# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.hooks.group_offloading import _GROUP_OFFLOADING, ModuleGroup

from ... import CompressedTensor, decompress
from ...adapters import CodedStatistics, ModelChange, RestingWeight, WeightCompressor, shown_memory

__all__ = ["CompressedGroups", "GroupBytes", "close", "compress_groups"]


@dataclass(frozen=True)
class GroupBytes(CodedStatistics):
    """The sizes in bytes of a model's compressed parameters: the original size of the parameters, and the size of their
    coded rows and codebooks. A shared parameter counts once."""

    __module__ = "ibp.integrations.diffusers"

    original_bytes: int
    stored_bytes: int


class CompressedGroups(ModelChange):
    """A model that `compress_groups` has compressed. `close()` or the end of a `with` block undoes the compression.

    Attributes:
        model: the argument.
    """

    __module__ = "ibp.integrations.diffusers"

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

    def _tables(self) -> list[CompressedTensor]:
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
            decoded = decompress(tables, device=group.onload_device, **self.fetching)
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


# ---- a model's groups ------------------------------------------------------------------------------------------------


def _groups_of(model: torch.nn.Module) -> dict[ModuleGroup, list[Any]]:
    """Returns diffusers' groups of a model, each with the list of its hooks."""
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
