"""How weights get from a checkpoint to the layers of vLLM's models, and become tables there.

vLLM's weight loaders are given `IncomingTensor`s, which represent tensors of a checkpoint and have no memory. Loaders
take views of them, as they do of other tensors, and copy the views to weights. Each of these copies is passed to the
origin of the tensor instead. `CodedOrigin` notes which rows of a coded table make up a layer's weight.

`CodedMethod` is the base of the methods that replace the weights of vLLM's layers by tables. `IBPExpertsMethod`
multiplies by the tables of fused experts; the method of other layers is in `weights.py`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ... import CompressedTensor
from ...adapters import ExpertTables, join

try:
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase  # type: ignore
    from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing  # type: ignore
except ImportError:  # `weights` reports the error
    FusedMoEMethodBase = object

_CPU = torch.device("cpu")


# ---- tensors of a checkpoint, without memory ----


class IncomingTensor(torch.Tensor):
    """Represents a tensor of a checkpoint, and has no memory. Views of it are of this class, too.

    Attributes:
        origin: the object that has the values. Its method `copy(source, target)` is called in place of a loader's
            `target.copy_(source)`. Its method `values(source, device)` returns the values of `source` as a tensor on a
            device; it is called for operations other than views and copies. In both methods, `source` is a view of this
            tensor, on the meta device.
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
                args[1].origin.copy(args[1].as_subclass(torch.Tensor), args[0])
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
                return source.origin.values(source.as_subclass(torch.Tensor), devices[0] if devices else _CPU)

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


def incoming(table: CompressedTensor) -> IncomingTensor:
    """Returns a tensor that represents a table of a checkpoint and can be passed to weight loaders."""
    return IncomingTensor.of(CodedOrigin(table), table.shape, table.dtype)


class CodedOrigin:
    """The origin whose values come from a table of a checkpoint. While the loader of a coded layer's weight runs,
    `copy` only adds the part to the list `noted`. At other times, `copy` decodes the part on the target's device and
    writes the values to the target."""

    def __init__(self, table: CompressedTensor) -> None:
        self.table = table
        self._near = table

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        part, parts = TablePart(self, source, target), noted.get()
        if target.is_meta:  # vLLM counts what will be copied
            target.copy_(source)
        elif parts is None:
            part.write()
        else:
            parts.append(part)

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
        if self._near.device != device:
            self._near = self.table.to(device)
        return self._near.decompress_items(first, last, check=True)


class TablePart(NamedTuple):
    """A part of a table that a loader copies to a weight.

    Attributes:
        origin: the origin of the table.
        source: a view of the `IncomingTensor`, on the meta device.
        target: a view of the weight.
    """

    origin: CodedOrigin
    source: torch.Tensor
    target: torch.Tensor

    def write(self) -> None:
        self.target.copy_(self.origin.values(self.source, self.target.device))

    def place(self) -> tuple[int, tuple[CompressedTensor, int, int]] | None:
        """Returns (row, (table, first, last)): rows first to last - 1 of the table are the weight's rows from `row` on.
        Returns None if the part does not consist of complete rows of both the table and the weight, or if their dtypes
        differ."""
        table, columns = self.origin.table, self.target.shape[-1]
        if table.dtype != self.target.dtype or table.row_bytes != columns * table.dtype.itemsize:
            return None
        at, to = self.source.storage_offset(), self.target.storage_offset()
        if at % columns or to % columns or not (self.source.is_contiguous() and self.target.is_contiguous()):
            return None
        first, count = at // columns, self.source.numel() // columns
        return to // columns, (table, first, first + count)


# While the loader of a coded layer's weight runs, the list to which the parts of the weight are added; otherwise None.
noted: ContextVar[list[TablePart] | None] = ContextVar("noted", default=None)


def joined(parts: Sequence[TablePart], weight: torch.Tensor) -> CompressedTensor | None:
    """Joins the parts of a weight [rows, columns] in one table, on the weight's device. Returns None if the parts do
    not cover all rows of the weight, are not complete rows of tables, or cannot be joined (see `join`)."""
    places = [part.place() for part in parts]
    found = sorted((place for place in places if place is not None), key=lambda place: place[0])
    ends = [0, *(row + last - first for row, (_, first, last) in found)]
    if not found or len(found) < len(places) or ends != [*(row for row, _ in found), len(weight)]:
        return None
    return join([rows for _, rows in found], weight.device)


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
        self.tables: dict[str, CompressedTensor] = {}
        self._is_done = False  # whether the weights have been processed
        self._parts: dict[str, list[TablePart]] = {name: [] for name in self.names}
        self._made_by: tuple[tuple[Any, ...], dict[str, Any]] = (), {}  # arguments of `create_weights`

    def create_weights(self, layer: Any, *sizes: Any, **options: Any) -> None:
        self._made_by = sizes, options
        with torch.device("meta") if self.uses_meta_device else contextlib.nullcontext():
            self._plain.create_weights(layer, *sizes, **options)
        for name, parts in self._parts.items():
            weight = getattr(layer, name)
            weight.weight_loader = _noting(parts, weight.weight_loader)
        if self.uses_meta_device:
            initialize_online_processing(layer)

    @contextlib.contextmanager
    def as_plain(self, layer: Any) -> Iterator[dict[torch.Tensor, CompressedTensor]]:
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

    def _coded(self, layer: Any) -> dict[str, CompressedTensor]:
        """Returns the tables of a layer's loaded weights. If the weights stay plain, makes them ready for vLLM's method
        and returns an empty dict."""
        raise NotImplementedError

    def _tables_of(self, layer: Any) -> dict[str, CompressedTensor]:
        """Returns a dict from the parameters' names in `names` to their tables. If one of the weights must stay plain,
        copies the noted parts of all weights to the weights' memory and returns an empty dict."""
        all_parts, self._parts = self._parts, {}
        tables: dict[str, CompressedTensor] = {}
        for name, parts in all_parts.items():
            label = self._name if name == "weight" else f"{self._name}.{name}"
            table = self._config.table_of(getattr(layer, name).flatten(0, -2), label, parts)
            if table is None:
                for part in itertools.chain.from_iterable(all_parts.values()):
                    part.write()
                return {}
            tables[name] = table
        return tables


def _noting(parts: list[TablePart], load: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a weight's loader. Parts of tables that the loader would copy to the weight are added to `parts`
    instead."""

    @functools.wraps(load)
    def note(*args: Any, **options: Any) -> Any:
        token = noted.set(parts)
        try:
            return load(*args, **options)
        finally:
            noted.reset(token)

    return note


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

    def _coded(self, layer: Any) -> dict[str, CompressedTensor]:
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
