"""Keeps weights coded in vLLM: `vllm serve MODEL --quantization ibp`.

vLLM finds this module by the entry point `vllm.general_plugins` and calls `register`. `docs/serving.md` lists the
tested releases, and says which weights stay plain.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

import ibp

from ...adapters import compress_matrix
from ...checkpoints import coded_name, is_coded
from ..shared import METHOD, CodingFields, check_engine
from ._layers import CodedMethod, IBPExpertsMethod, TablePart, incoming, joined, why_plain_experts

try:
    from vllm.config import get_current_vllm_config  # type: ignore
    from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod  # type: ignore
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

    _missing: ImportError | None = None
except ImportError as error:
    QuantizationConfig = LinearMethodBase = DefaultModelLoader = object
    _missing = error

__all__ = ["IBPConfig", "IBPModelLoader", "IBPWeightMethod", "register"]

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

    def table_of(self, weight: torch.Tensor, name: str, parts: Sequence[TablePart] = ()) -> ibp.CompressedTensor | None:
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
                for part in parts:
                    part.write()
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


class IBPModelLoader(DefaultModelLoader):
    """The loader that `--load-format ibp` selects. It reads a directory that `ibp compress` or `save_coded` wrote.

    A coded layer uses the coded rows of the files without decoding them if two conditions hold: `save_coded` wrote them
    in a form that `ibp.linear` can multiply by, and all weights of a merged layer have the same codebook. Other tables
    are copied to the GPU in coded form and decoded there. If a directory has no coded files, vLLM reads it as usual.
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
            with ibp.checkpoints.open(path) as opened:
                for name, tensor in opened.tensors.items():
                    table = tensor.table
                    yield source.prefix + name, tensor.tensor() if table is None else incoming(table)
