"""Coded weights in vLLM: `vllm serve MODEL --quantization ibp`.

vLLM finds this module by the entry point `vllm.general_plugins` and calls `register`. `docs/serving.md` names the
releases that were tried, and what stays plain.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from .._fetch.escapes import takes
from .._fetch.linear import linear
from .._files.sets import INDEX_SUFFIX
from .._tables.compressed_tensor import CompressedTensor
from .._tables.torch_functions import embedding_of
from ..checkpoints._ibp_files import open_ibp
from ..checkpoints._model_files import METHOD, WEIGHTS
from ..nn._compressing import LEAST_SAVINGS, is_included
from ..nn._tables import matrix_table
from ._engines import check_engine
from ._loading import CodingFields, is_coded

try:
    from vllm.config import get_current_vllm_config  # type: ignore
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
    QuantizationConfig = LinearMethodBase = DefaultModelLoader = object
    _missing = error

__all__ = ["IBPConfig", "IBPModelLoader", "IBPWeightMethod", "register"]

_logger = logging.getLogger(__name__)
# By the address of a table's slots. Compiled graphs have the slots as inputs, so that layers of a shape share them.
_tables: WeakValueDictionary[int, CompressedTensor] = WeakValueDictionary()


def register() -> None:
    """Makes `--quantization ibp` and `--load-format ibp` known to vLLM. vLLM calls it in each of its processes, also
    for models that are served otherwise: where vLLM lacks a class, it only warns."""
    if _missing is not None:
        _logger.warning("ibp: --quantization ibp is not there with this vLLM: %s", _missing)
        return
    register_quantization_config(METHOD)(IBPConfig)
    register_model_loader(METHOD)(IBPModelLoader)
    register_weight_loader_v2_supported_method(IBPWeightMethod)


class IBPConfig(QuantizationConfig):
    """What `--quantization ibp` makes: linear layers, embeddings and heads of BF16 weights are coded.

    Args:
        fields: of `quantization_config` in config.json or `--hf-overrides`: include, exclude and min_bytes, as in
            `ibp.nn.compress`; level and fused are ignored, for all is coded at level "fast". Names are those of vLLM's
            layers; a layer that vLLM has merged, such as qkv_proj, is excluded with any of its parts, such as q_proj.

    Raises:
        ImportError: vLLM is not there, or lacks a class.
        TypeError, ValueError: a field is unknown, not of its type, or outside its range.
    """

    def __init__(self, **fields: Any) -> None:
        check_engine("vllm", _missing)
        super().__init__()
        self.fields = CodingFields(**fields)
        self._is_coded = False  # whether the checkpoint has tables
        self._said: set[str] = set()

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
        """How a layer keeps its weight. None: as vLLM does, for experts and attention.

        Raises:
            ValueError: the checkpoint is coded, and `--load-format ibp` is missing.
        """
        if self._is_coded and get_current_vllm_config().load_config.load_format != METHOD:
            raise ValueError("the checkpoint is coded by ibp; wanted --load-format ibp, which decodes it while loading")
        if isinstance(layer, LinearBase):
            plain = UnquantizedLinearMethod()
        elif isinstance(layer, VocabParallelEmbedding):
            plain = UnquantizedEmbeddingMethod()
        else:
            return None
        return IBPWeightMethod(self, prefix, plain) if self._includes(prefix) else plain

    def _includes(self, prefix: str) -> bool:
        around, _, last = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(last, [last])
        names = [prefix, *(f"{around}.{part}".lstrip(".") for part in parts)]
        is_wanted = any(is_included(name, self.fields.include, ()) for name in names)
        return is_wanted and all(is_included(name, None, self.fields.exclude) for name in names)

    def table_of(self, weight: torch.Tensor, name: str) -> CompressedTensor | None:
        """A table of a loaded weight. None: it stays plain. The log says why, once for each reason."""
        num_bytes, table, why = weight.numel() * weight.element_size(), None, ""
        if weight.dim() != 2 or weight.dtype != torch.bfloat16:
            why = f"it has {weight.dim()} dimensions of {weight.dtype}; wanted 2 of torch.bfloat16"
        elif num_bytes < self.fields.min_bytes:
            why = f"it has fewer bytes than min_bytes, {self.fields.min_bytes}"
        else:
            table = matrix_table(weight)
            if table.nbytes > num_bytes * (1 - LEAST_SAVINGS) or not takes(table):
                table, why = None, f"it does not shrink, or the kernel takes no shape {list(weight.shape)}"
        if why and why not in self._said:
            self._said.add(why)
            _logger.warning("ibp: the weight of %s stays plain, as may others: %s", name, why)
        return None if table is None else table.prepare_linear()


class IBPWeightMethod(LinearMethodBase):
    """How a layer keeps its weight: plain until it is loaded, in vLLM's shards, then as one table.

    Linear layers are made without memory and coded one after the other while they are loaded. Embeddings and heads,
    which may be tied, are coded at the end.

    Args:
        plain: vLLM's own method, for weights that stay plain.

    Attributes:
        table: the layer's shard; None where it is plain.
    """

    def __init__(self, config: IBPConfig, prefix: str, plain: Any) -> None:
        self._config, self._plain, self._name = config, plain, prefix
        self.uses_meta_device = isinstance(plain, UnquantizedLinearMethod)
        self.table: CompressedTensor | None = None
        self._is_done = False  # whether the weight is processed
        self._made_by: tuple[tuple[Any, ...], dict[str, Any]] = (), {}  # arguments of `create_weights`
        self._tied: Any = None  # an embedding of the same weight

    def create_weights(self, layer: Any, *sizes: Any, **options: Any) -> None:
        self._made_by = sizes, options
        if not self.uses_meta_device:
            self._plain.create_weights(layer, *sizes, **options)
            return
        with torch.device("meta"):
            self._plain.create_weights(layer, *sizes, **options)
        initialize_online_processing(layer)

    @property
    def is_tied(self) -> bool:
        """Whether the table is an embedding's."""
        return self._tied is not None

    @contextlib.contextmanager
    def as_plain(self, layer: Any) -> Iterator[torch.Tensor]:
        """Gives a layer a plain weight without memory, with vLLM's loaders, for the time of the context."""
        empty, (sizes, options) = layer.weight, self._made_by
        with torch.device("meta"):
            self._plain.create_weights(layer, *sizes, **options)
        try:
            yield layer.weight
        finally:
            del layer.weight
            layer.register_parameter("weight", empty)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Lets a head multiply by an embedding's table."""
        layer.weight, self._tied = embed_tokens.weight, embed_tokens
        return layer

    def process_weights_after_loading(self, layer: Any) -> None:
        """Codes a loaded weight and frees it. vLLM calls this once more at the end.

        Raises:
            NotImplementedError: weights were loaded anew: graphs have the addresses of the old table.
        """
        if self._is_done:
            if self.table is not None and layer.weight.numel():
                raise NotImplementedError(f"{self._name} is coded; wanted no weights that are loaded anew")
            return
        self._is_done = True
        if self._tied is None:
            self.table = self._config.table_of(layer.weight.detach().as_subclass(torch.Tensor), self._name)
        elif isinstance(self._tied.quant_method, IBPWeightMethod):
            self._tied.quant_method.process_weights_after_loading(self._tied)
            self.table = self._tied.quant_method.table
        if self.table is None:
            self._plain.process_weights_after_loading(layer)
            return
        _tables[self.table.slots.data_ptr()] = self.table
        empty = torch.empty(0, self.table.shape[1], dtype=self.table.dtype, device=layer.weight.device)
        del layer.weight
        layer.register_parameter("weight", torch.nn.Parameter(empty, requires_grad=False))
        layer.register_buffer("ibp_slots", self.table.slots, persistent=False)
        layer.ibp_shape = tuple(self.table.shape)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.table is None:
            return self._plain.apply(layer, x, bias)
        return torch.ops.ibp_engines.linear(x, layer.ibp_slots, bias, layer.ibp_shape[0])

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            return self._plain.embedding(layer, input_)
        return torch.ops.ibp_engines.rows(input_, layer.ibp_slots, layer.ibp_shape[1])


def _table_of(slots: torch.Tensor) -> CompressedTensor:
    table = _tables.get(slots.data_ptr())
    if table is None:
        raise RuntimeError("the coded weights of a layer have been moved or replaced since they were loaded")
    return table


# Compiled graphs hold these operations: how many vectors the kernel takes is decided when they run, not when vLLM
# compiles one graph for all numbers of tokens.


@torch.library.custom_op("ibp_engines::linear", mutates_args=())
def _linear(x: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    return linear(x, _table_of(slots), bias)


@_linear.register_fake
def _(x: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], num_rows)


@torch.library.custom_op("ibp_engines::rows", mutates_args=())
def _rows(ids: torch.Tensor, slots: torch.Tensor, num_columns: int) -> torch.Tensor:
    return embedding_of(ids, _table_of(slots))


@_rows.register_fake
def _(ids: torch.Tensor, slots: torch.Tensor, num_columns: int) -> torch.Tensor:
    return ids.new_empty(*ids.shape, num_columns, dtype=torch.bfloat16)


class IBPModelLoader(DefaultModelLoader):
    """What `--load-format ibp` makes: reads a directory of `ibp compress` or `save_coded`. Tensors are decoded on the
    CPU one after the other, so that every tensor-parallel size takes its shards of them; other directories are read as
    vLLM does."""

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
        index = os.path.join(folder, WEIGHTS + INDEX_SUFFIX)
        for path in [index] if os.path.exists(index) else files:
            with open_ibp(path) as opened:
                for name, tensor in opened.tensors.items():
                    yield source.prefix + name, tensor.tensor()
