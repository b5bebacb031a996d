"""Keeps weights coded in vLLM: `vllm serve MODEL --quantization ibp`.

vLLM finds this module by the entry point `vllm.general_plugins` and calls `register`. `docs/serving.md` lists the
tested releases, and says which weights stay plain. This file follows a weight from the checkpoint to its layer:

`IBPConfig` decides which layers are coded, and makes the tables of their weights. If the checkpoint is coded,
`IBPModelLoader` gives vLLM's weight loaders `IncomingTensor`s, which represent tensors of the checkpoint and have no
memory. Loaders take views of them, as they do of other tensors, and copy the views to weights. Each of these copies is
passed to the origin of the tensor instead. `CodedOrigin` notes which rows of a coded table make up a layer's weight.

`CodedMethod` is the base of the methods that replace the weights of vLLM's layers by tables. `IBPWeightMethod`
multiplies by the table of a linear layer, an embedding or a head, and `IBPExpertsMethod` by the tables of fused
experts.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import ibp

from ...adapters import ExpertTables, compress_matrix, join
from ...checkpoints import SourceTensor, coded_name, is_coded
from ..shared import METHOD, CodingFields, check_engine

try:
    from vllm.config import get_current_vllm_config  # type: ignore
    from vllm.model_executor.layers.fused_moe import (  # type: ignore
        FusedMoEMethodBase,
        RoutedExperts,
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.layers.linear import (  # type: ignore
        LinearBase,
        LinearMethodBase,
        UnquantizedLinearMethod,
        register_weight_loader_v2_supported_method,
    )
    from vllm.model_executor.layers.quantization import register_quantization_config  # type: ignore
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig  # type: ignore
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )
    from vllm.model_executor.model_loader import register_model_loader  # type: ignore
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # type: ignore
    from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing  # type: ignore

    _missing: ImportError | None = None
except ImportError as error:
    QuantizationConfig = LinearMethodBase = FusedMoEMethodBase = DefaultModelLoader = object
    _missing = error

__all__ = ["IBPConfig", "IBPModelLoader", "IBPWeightMethod", "register"]

_CPU = torch.device("cpu")
_WEIGHTS = "model.safetensors"
# A weight stays plain if its table would save less than this fraction of its size, as in `ibp.nn.compress`.
_LEAST_SAVINGS = 0.02
_logger = logging.getLogger("vllm.ibp")  # vLLM shows the messages of loggers whose names begin with "vllm."
# A map from the address of a table's slots to the table. Compiled graphs take the slots as inputs rather than as
# constants, so that layers of the same shape share a graph; the operations find the table here.
_tables: WeakValueDictionary[int, ibp.CompressedTensor] = WeakValueDictionary()


def register() -> None:
    """Registers `--quantization ibp` and `--load-format ibp` with vLLM. vLLM calls this in each of its processes,
    even for models that use neither. If this vLLM lacks a class that is needed, the function only logs a warning."""
    if _missing is not None:
        _logger.warning("ibp: --quantization ibp is not there with this vLLM: %s", _missing)
        return
    register_quantization_config(METHOD)(IBPConfig)
    register_model_loader(METHOD)(IBPModelLoader)
    register_weight_loader_v2_supported_method(IBPWeightMethod)


# ---- the configuration ----


class IBPConfig(QuantizationConfig):
    """The configuration that `--quantization ibp` selects. It codes BF16 weights of linear layers, fused experts,
    embeddings and heads.

    Args:
        fields: fields of `quantization_config` in config.json or `--hf-overrides`: include, exclude and min_bytes, as
            in `ibp.nn.compress`; level and fused are accepted and have no effect: everything is coded at level "fast".
            Names are those of vLLM's layers. A layer that vLLM has merged, such as qkv_proj, is excluded if one of the
            layers that it merges, such as q_proj, is excluded.

    Raises:
        ImportError: vLLM is not installed, or lacks a class that is needed.
        TypeError, ValueError: a field is unknown, has a wrong type, or is out of range.
    """

    def __init__(self, **fields: Any) -> None:
        check_engine("vllm", _missing)
        super().__init__()
        self.fields = CodingFields(**fields)
        self._is_coded = False  # whether the checkpoint has tables
        self._said: set[str] = set()  # reasons that are already in the log
        self._has_told = False  # whether the log already says that weights are compressed

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80  # BF16

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json has the fields, or there are none

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> IBPConfig:
        return cls(**config)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        self._is_coded = any(is_coded(path) for path in Path(model_name).glob("*.safetensors"))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Returns the method that keeps the weights of a linear layer, fused experts, an embedding or a head, coded or
        plain, and multiplies by them. Returns None for other layers, such as attention, which vLLM then handles itself.

        Raises:
            ValueError: the checkpoint is coded, and `--load-format ibp` is missing.
        """
        if self._is_coded and get_current_vllm_config().load_config.load_format != METHOD:
            raise ValueError("the checkpoint is coded by ibp; wanted --load-format ibp, which reads it")
        made: type[CodedMethod] = IBPWeightMethod
        if isinstance(layer, LinearBase):
            plain = UnquantizedLinearMethod()
        elif isinstance(layer, VocabParallelEmbedding):
            plain = UnquantizedEmbeddingMethod()
        elif isinstance(layer, RoutedExperts):
            made, plain = IBPExpertsMethod, UnquantizedFusedMoEMethod(layer.moe_config)
        else:
            return None
        if not self._includes(prefix):
            return plain
        why = why_plain_experts(plain) if made is IBPExpertsMethod else ""
        self._say(prefix, why)
        return plain if why else made(self, prefix, plain)

    def _includes(self, prefix: str) -> bool:
        around, _, last = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(last, [last])
        names = [prefix, *(f"{around}.{part}".lstrip(".") for part in parts)]
        return self.fields.includes(*names)

    def table_of(self, weight: torch.Tensor, name: str, parts: Sequence[Part] = ()) -> ibp.CompressedTensor | None:
        """Returns a table of a loaded weight, or None if the weight stays plain. In that case the reason is logged,
        unless the same reason has been logged before.

        parts: the parts of the weight that come from tables of a coded checkpoint, and have not been copied to the
        weight's memory.
        """
        weight = weight.detach().as_subclass(torch.Tensor)
        num_bytes, table, why = weight.numel() * weight.element_size(), None, ""
        if weight.dim() != 2 or weight.dtype != torch.bfloat16:
            why = f"it has {weight.dim()} dimensions of {weight.dtype}; wanted 2 of torch.bfloat16"
        elif num_bytes < self.fields.min_bytes:
            why = f"it has fewer bytes than min_bytes, {self.fields.min_bytes}"
        else:
            table = joined(parts, weight)
            if table is None or not table.fits_linear:
                write(parts)
                table = compress_matrix(weight)
            if table.nbytes > num_bytes * (1 - _LEAST_SAVINGS) or not table.fits_linear:
                table, why = None, f"it does not shrink, or the kernel takes no shape {list(weight.shape)}"
        if table is not None and not self._has_told:
            self._has_told, sizes = True, (table.nbytes / 1e6, num_bytes / 1e6)
            _logger.info("ibp: weights are compressed while they are loaded: %s takes %.1f MB of %.1f", name, *sizes)
        self._say(name, why)
        return None if table is None else table.prepare_linear()

    def _say(self, name: str, why: str) -> None:
        """Logs why weights stay plain, once for each reason. If why is empty, it logs nothing."""
        if why and why not in self._said:
            self._said.add(why)
            _logger.warning("ibp: the weight of %s stays plain, as may others: %s", name, why)


# ---- tensors of a checkpoint, without memory ----


class IncomingTensor(torch.Tensor):
    """Represents a tensor of a checkpoint, and has no memory. Views of it are of this class, too.

    Attributes:
        origin: the object that has the values. Its method `copy(source, target)` is called in place of a loader's
            `target.copy_(source)`. Its method `values(source, device)` returns the values of `source` as a tensor on a
            device; it is called for operations other than views and copies. In both methods, `source` is a view of this
            tensor.
    """

    origin: Any

    @classmethod
    def of(cls, origin: Any, shape: Sequence[int], dtype: torch.dtype) -> IncomingTensor:
        return cls._viewed(torch.empty(shape, dtype=dtype, device="meta"), origin)

    @classmethod
    def _viewed(cls, source: torch.Tensor, origin: Any) -> IncomingTensor:
        made = source.as_subclass(cls)
        made.origin = origin
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], cls) and _writes(function):
            raise NotImplementedError("a weight loader writes to a tensor of the checkpoint, which has no memory")
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.Tensor.__setitem__:
                function, args = torch.Tensor.copy_, (args[0][args[1]], args[2])
            if function is torch.Tensor.copy_:
                args[1].origin.copy(args[1], args[0])
                return args[0]
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if len(given) == 1:
                source: Any = given[0]
                try:
                    made = function(*args, **kwargs)
                except (NotImplementedError, RuntimeError):  # the function reads values
                    made = None
                leaves = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
                if made is not None and not leaves:
                    return made
                if leaves and all(storage_of(x) == storage_of(source) for x in leaves):
                    return tree_map_only(torch.Tensor, lambda view: cls._viewed(view, source.origin), made)
            devices = [x.device for x in given if not isinstance(x, cls)]

            def values(source: IncomingTensor) -> torch.Tensor:
                return source.origin.values(source, devices[0] if devices else _CPU)

            args, kwargs = tree_map_only(cls, values, (args, kwargs))
        return function(*args, **kwargs)


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a number that is the same for all views of one tensor, whether the tensor has memory or not."""
    return tensor.untyped_storage()._cdata


def _writes(function: Any) -> bool:
    """Returns whether a function writes to its first argument, judged by the function's name."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


# ---- tables of a coded checkpoint ----


def incoming(tensor: SourceTensor) -> IncomingTensor:
    """Returns a tensor that represents a coded tensor of a checkpoint and can be passed to weight loaders."""
    return IncomingTensor.of(CodedOrigin(tensor), tensor.shape, tensor.dtype)


class CodedOrigin:
    """The origin whose values come from a table of a checkpoint. While the loader of a coded layer's weight runs,
    `copy` only adds the part to the list `noted`. At other times, `copy` decodes the part on the target's device and
    writes the values to the target."""

    def __init__(self, tensor: SourceTensor) -> None:
        self._tensor = tensor
        self._near: ibp.CompressedTensor | None = None  # the table on the device that has decoded it last

    @functools.cached_property
    def table(self) -> ibp.CompressedTensor:
        """The table, whose checksums are compared when it is first asked for."""
        table = self._tensor.table
        assert table is not None
        return table

    def copy(self, source: IncomingTensor, target: torch.Tensor) -> None:
        parts = noted.get()
        if target.is_meta:  # vLLM counts what will be copied
            target.copy_(source)
        elif parts is None:
            write([(source, target)])
        else:
            parts.append((source, target))

    def values(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        if source.numel() == 0:
            return torch.empty(source.shape, dtype=source.dtype, device=device)
        size, at = self.table.shape[1:].numel(), source.storage_offset()
        last = at + sum((length - 1) * stride for length, stride in zip(source.shape, source.stride()))
        items = self._decoded(at // size, last // size + 1, device)
        return items.view(-1).as_strided(source.shape, source.stride(), at % size)

    def _decoded(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """Copies coded bytes to the device, decodes items first to last - 1 there, and returns them."""
        if self.table.dim() == 2:
            cut = join([(self.table, first, last)], device)
            if cut is not None:
                return cut.decompress(check=True)
        if self._near is None or self._near.device != device:
            self._near = self.table.to(device)
        return self._near.decompress_items(first, last, check=True)


# A part of a table that a loader copies to a weight: (a view of the table's tensor, a view of the weight).
Part = tuple[IncomingTensor, torch.Tensor]
# While the loader of a coded layer's weight runs, the list to which the parts of the weight are added; otherwise None.
noted: ContextVar[list[Part] | None] = ContextVar("noted", default=None)


def write(parts: Iterable[Part]) -> None:
    """Copies the values of parts to weights."""
    for source, target in parts:
        target.copy_(source.origin.values(source, target.device))


def joined(parts: Sequence[Part], weight: torch.Tensor) -> ibp.CompressedTensor | None:
    """Joins the parts of a weight [rows, columns] in one table, on the weight's device. Returns None if the parts do
    not cover all rows of the weight, are not complete rows of tables, or cannot be joined (see `join`)."""
    with torch._C.DisableTorchFunctionSubclass():
        places = [_place_of(*part) for part in parts]
    found = sorted((place for place in places if place is not None), key=lambda place: place[0])
    ends = [0, *(row + last - first for row, (_, first, last) in found)]
    if not found or len(found) < len(places) or ends != [*(row for row, _ in found), len(weight)]:
        return None
    return join([rows for _, rows in found], weight.device)


def _place_of(source: IncomingTensor, target: torch.Tensor) -> tuple[int, tuple[ibp.CompressedTensor, int, int]] | None:
    """Returns (row, (table, first, last)): rows first to last - 1 of the table are the weight's rows from `row` on.
    Returns None if the part does not consist of complete rows of both the table and the weight, or if their dtypes
    differ."""
    table, columns = source.origin.table, target.shape[-1]
    if table.dtype != target.dtype or table.row_bytes != columns * table.dtype.itemsize:
        return None
    at, to = source.storage_offset(), target.storage_offset()
    if at % columns or to % columns or not (source.is_contiguous() and target.is_contiguous()):
        return None
    first, count = at // columns, source.numel() // columns
    return to // columns, (table, first, first + count)


# ---- coded layers ----


class CodedMethod:
    """A quantization method, that is, the object with which vLLM loads and computes one layer. The layer's weights,
    which are this rank's shards, become tables after they have been loaded.

    If the layer is made without memory (`uses_meta_device`), it is coded as soon as its weights are complete, while the
    rest of the model is still being loaded. If the checkpoint is coded, the weight loaders copy nothing: they only note
    which rows of tables make up the weights.

    Args:
        config: the `IBPConfig`.
        prefix: the name of the layer.
        plain: vLLM's method for the layer, which is used if the weights stay plain.

    Attributes:
        names: names of the parameters that may become tables.
        tables: a dict from names of parameters to the layer's tables; empty if the layer is plain.
        is_tied: whether the tables belong to another layer.
    """

    uses_meta_device, is_tied = True, False
    names: tuple[str, ...] = ("weight",)

    def __init__(self, config: Any, prefix: str, plain: Any) -> None:
        self._config, self._name, self._plain = config, prefix, plain
        self.tables: dict[str, ibp.CompressedTensor] = {}
        self._is_done = False  # whether the weights have been processed
        self._parts: dict[str, list[Part]] = {name: [] for name in self.names}
        self._made_by: tuple[tuple[Any, ...], dict[str, Any]] = (), {}  # arguments of `create_weights`

    def create_weights(self, layer: Any, *sizes: Any, **options: Any) -> None:
        self._made_by = sizes, options
        with torch.device("meta") if self.uses_meta_device else contextlib.nullcontext():
            self._plain.create_weights(layer, *sizes, **options)
        for name in self.names:
            weight = getattr(layer, name)
            weight.weight_loader = self._noting(name, weight.weight_loader)
        if self.uses_meta_device:
            initialize_online_processing(layer)

    def _noting(self, name: str, load: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the loader of a weight. Until the weights have been processed, parts of tables that the loader would
        copy to the weight are added to the weight's list in `_parts` instead; afterwards, the loader copies them."""

        @functools.wraps(load)
        def note(*args: Any, **options: Any) -> Any:
            token = noted.set(self._parts.get(name))
            try:
                return load(*args, **options)
            finally:
                noted.reset(token)

        return note

    @contextlib.contextmanager
    def as_plain(self, layer: Any) -> Iterator[dict[torch.Tensor, ibp.CompressedTensor]]:
        """A context in which the layer has plain weights on the meta device, with vLLM's loaders. Yields a dict from
        these weights to the layer's tables."""
        held, (sizes, options) = dict(layer._parameters), self._made_by
        with torch.device("meta"):
            self._plain.create_weights(layer, *sizes, **options)
        plain = {name: layer._parameters[name] for name in self.tables}
        layer._parameters.update(held | plain)
        try:
            yield {weight: self.tables[name] for name, weight in plain.items()}
        finally:
            layer._parameters.update(held)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Codes loaded weights and frees them. vLLM calls this once more after the whole model has been loaded; that
        call does nothing.

        Raises:
            NotImplementedError: weights were loaded again. This is refused, because CUDA graphs hold the addresses of
                the old tables.
        """
        if self._is_done:
            if any(getattr(layer, name).numel() for name in self.tables):
                raise NotImplementedError(f"{self._name} is coded; wanted no weights that are loaded anew")
            return
        self._is_done, self.tables = True, self._coded(layer)
        for name, table in self.tables.items():
            weight = getattr(layer, name)
            empty = torch.empty(0, table.shape[1], dtype=table.dtype, device=weight.device)
            parameter: Any = torch.nn.Parameter(empty, requires_grad=False)
            # Weights of experts on other ranks may still come, and vLLM calls the loader for them, too.
            parameter.weight_loader = getattr(weight, "weight_loader", None)
            delattr(layer, name)
            layer.register_parameter(name, parameter)
            layer.register_buffer(f"ibp_{name}", table.slots, persistent=False)

    def _coded(self, layer: Any) -> dict[str, ibp.CompressedTensor]:
        """Returns the tables of a layer's loaded weights. If the weights stay plain, makes them ready for vLLM's method
        and returns an empty dict."""
        raise NotImplementedError

    def _tables_of(self, layer: Any) -> dict[str, ibp.CompressedTensor]:
        """Returns a dict from the parameters' names in `names` to their tables. If one of the weights must stay plain,
        copies the noted parts of all weights to the weights' memory and returns an empty dict."""
        all_parts, self._parts = self._parts, {}
        tables: dict[str, ibp.CompressedTensor] = {}
        for name, parts in all_parts.items():
            label = self._name if name == "weight" else f"{self._name}.{name}"
            table = self._config.table_of(getattr(layer, name).flatten(0, -2), label, parts)
            if table is None:
                write(itertools.chain.from_iterable(all_parts.values()))
                return {}
            tables[name] = table
        return tables


# ---- linear layers, embeddings and heads ----


class IBPWeightMethod(CodedMethod, LinearMethodBase):
    """The method of a linear layer, an embedding or a head. Embeddings and heads are coded after the whole model has
    been loaded, because they may be tied."""

    def __init__(self, config: IBPConfig, prefix: str, plain: Any) -> None:
        super().__init__(config, prefix, plain)
        self.uses_meta_device = isinstance(plain, UnquantizedLinearMethod)
        self._tied: Any = None  # an embedding with the same weight

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Makes a head use the weight, and the table, of an embedding."""
        layer.weight, self._tied, self.is_tied = embed_tokens.weight, embed_tokens, True
        return layer

    def _coded(self, layer: Any) -> dict[str, ibp.CompressedTensor]:
        if self._tied is None:
            table = self._tables_of(layer).get("weight")
        elif isinstance(self._tied.quant_method, IBPWeightMethod):
            self._tied.quant_method.process_weights_after_loading(self._tied)
            table = self._tied.quant_method.tables.get("weight")
        else:
            table = None
        if table is None:
            self._plain.process_weights_after_loading(layer)
            return {}
        _tables[table.slots.data_ptr()] = table
        layer.ibp_shape = tuple(table.shape)
        return {"weight": table}

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not self.tables:
            return self._plain.apply(layer, x, bias)
        return torch.ops.ibp_engines.linear(x, layer.ibp_weight, bias, layer.ibp_shape[0])

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        if not self.tables:
            return self._plain.embedding(layer, input_)
        return torch.ops.ibp_engines.rows(input_, layer.ibp_weight, layer.ibp_shape[1])


def _table_of(slots: torch.Tensor) -> ibp.CompressedTensor:
    table = _tables.get(slots.data_ptr())
    if table is None:
        raise RuntimeError("the coded weights of a layer have been moved or replaced since they were loaded")
    return table


# Compiled graphs call these operations. The operations choose a kernel for the number of tokens when they run, because
# vLLM compiles one graph for all numbers of tokens.


@torch.library.custom_op("ibp_engines::linear", mutates_args=())
def _linear(x: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    return ibp.linear(x, _table_of(slots), bias)


@_linear.register_fake
def _(x: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], num_rows)


@torch.library.custom_op("ibp_engines::rows", mutates_args=())
def _rows(ids: torch.Tensor, slots: torch.Tensor, num_columns: int) -> torch.Tensor:
    rows = ibp.index_select(_table_of(slots), ids.reshape(-1))
    return rows.view(*ids.shape, num_columns)


@_rows.register_fake
def _(ids: torch.Tensor, slots: torch.Tensor, num_columns: int) -> torch.Tensor:
    return ids.new_empty(*ids.shape, num_columns, dtype=torch.bfloat16)


# ---- experts ----


def why_plain_experts(plain: Any) -> str:
    """Returns the reason why experts cannot be coded, or "" if they can. plain: vLLM's own method for the experts."""
    moe = plain.moe
    if plain.unquantized_backend.name != "TRITON":
        return f"vLLM multiplies them by {plain.unquantized_backend.value}; wanted --moe-backend triton"
    if moe.is_lora_enabled:
        return "LoRA adapters of experts read plain weights"
    if moe.dp_size > 1 or moe.is_sequence_parallel or moe.moe_parallel_config.enable_eplb:
        return "they are spread over data-parallel ranks, or move between ranks"
    return ""


class IBPExpertsMethod(CodedMethod, FusedMoEMethodBase):
    """The method of fused experts with stacked weights. For few tokens, a kernel decodes the weights in registers and
    multiplies by them. For many tokens, the weights are decoded to memory for the call, and vLLM's own kernel
    multiplies. Compiled graphs contain vLLM's operation, which calls this method."""

    names = "w13_weight", "w2_weight"

    def __init__(self, config: Any, prefix: str, plain: Any) -> None:
        FusedMoEMethodBase.__init__(self, plain.moe)
        CodedMethod.__init__(self, config, prefix, plain)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return self._plain.get_fused_moe_quant_config(layer)

    def _coded(self, layer: Any) -> dict[str, ibp.CompressedTensor]:
        # Codes the weights in the form in which they were loaded, which is also the form that Triton's kernel takes.
        tables = self._tables_of(layer)
        self._plain.process_weights_after_loading(layer)
        self.moe_kernel, self.moe_quant_config = self._plain.moe_kernel, self._plain.moe_quant_config
        return tables

    def apply(
        self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, shared_experts: Any, shared_experts_input: Any
    ) -> torch.Tensor:
        if self.tables:
            up, down = self.tables.values()
            experts = ExpertTables(up, down, layer.local_num_experts)
            if experts.multiplies(x, topk_ids):
                return self._multiplied(layer, experts, x, topk_weights, topk_ids)
            layer = _with(layer, dict(zip(self.tables, experts.decoded(x.device))))
        return self._plain.apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)

    def _multiplied(
        self, layer: Any, experts: ExpertTables, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Returns the layer's result. The result may differ from that of vLLM's kernel by rounding, because products
        are added in a different order."""

        def activate(y: torch.Tensor) -> torch.Tensor:
            out = y.new_empty(len(y), experts.down.shape[1])
            self.moe_kernel.fused_experts.activation(layer.activation, out, y)
            return out

        if layer.apply_router_weight_on_input:
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        if layer.expert_map is not None:  # -1: the expert is on another rank
            ids = layer.expert_map[ids]
            weights = weights.masked_fill(ids < 0, 0)
        biases = getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None)
        return experts.multiply(x, ids, weights, activate, biases=biases, absent=0)


def _with(layer: Any, weights: dict[str, torch.Tensor]) -> Any:
    """Returns a shallow copy of a layer in which `weights` replace the parameters of the same names, for one call."""
    made = object.__new__(type(layer))
    parameters = {name: parameter for name, parameter in layer._parameters.items() if name not in weights}
    vars(made).update(vars(layer), _parameters=parameters)
    vars(made).update(weights)
    return made


# ---- coded checkpoints ----


class IBPModelLoader(DefaultModelLoader):
    """The loader that `--load-format ibp` selects. It reads a directory that `ibp compress` or `save_coded` wrote.

    A coded layer uses the coded rows of the files without decoding them if two conditions hold: `save_coded` wrote them
    in a form that `ibp.linear` can multiply by, and all weights of a merged layer have the same codebook. Other tables
    are copied to the GPU in coded form and decoded there. If a directory has no coded files, vLLM reads it as usual.

    The checksums of a coded tensor are compared when a rank first uses a part of it. All bytes of the tensor are read
    then. Coded tensors that only other ranks use are not read; plain tensors are read and compared by every rank.
    Damaged bytes raise `ibp.ChecksumError`.
    """

    def __init__(self, load_config: Any) -> None:
        load_config = copy.copy(load_config)
        load_config.load_format = "safetensors"
        super().__init__(load_config)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        folder, files, *_ = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if not any(is_coded(file) for file in files):
            yield from super()._get_weights_iterator(source)
            return
        indices = [os.path.join(folder, f"{name}.index.json") for name in (coded_name(_WEIGHTS), _WEIGHTS)]
        for path in list(filter(os.path.exists, indices))[:1] or files:
            # The file stays open, because a table is verified when it is first used, which may be after this loop. The
            # file is closed when its last tensor has been freed.
            for name, tensor in ibp.checkpoints.open(path, verify=True).tensors.items():
                yield source.prefix + name, tensor.tensor() if tensor.make_table is None else incoming(tensor)
