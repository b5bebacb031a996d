"""vLLM serves a model from coded weights, three quarters of BF16's bytes: the rest of the GPU keeps more tokens.

    vllm serve MODEL --quantization ibp

vLLM finds the method by itself: ibp's package has an entry point of the group `vllm.general_plugins`. MODEL is a plain
checkpoint in BF16. Every rank codes its own shards, layer by layer while they are loaded, and multiplies by
`ibp.linear`. What does not shrink, other dtypes, and experts stay plain. `docs/serving.md` names the versions that were
tried, and how.

Options are fields of `quantization_config` in the model's config.json, or of the command line:

    --hf-overrides '{"quantization_config": {"quant_method": "ibp", "exclude": ["lm_head"]}}'
"""

from __future__ import annotations

import fnmatch
import logging
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

import ibp

from .._fetch.escapes import takes
from .._tables.compressed_tensor import CompressedTensor
from ..checkpoints._model_files import METHOD
from ..nn._compressing import LEAST_SAVINGS
from ..nn._tables import matrix_table
from ._engines import check_engine
from ._loading import CodingFields, is_coded

try:
    from vllm.model_executor.layers.linear import (  # type: ignore
        LinearBase,
        LinearMethodBase,
        UnquantizedLinearMethod,
    )
    from vllm.model_executor.layers.quantization import register_quantization_config  # type: ignore
    from vllm.model_executor.layers.quantization.base_config import (  # type: ignore
        QuantizationConfig,
        QuantizeMethodBase,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )
    from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing  # type: ignore

    _missing: ImportError | None = None
except ImportError as error:
    LinearMethodBase = QuantizationConfig = QuantizeMethodBase = object
    _missing = error

__all__ = ["IBPConfig", "IBPEmbeddingMethod", "IBPLinearMethod", "register"]

_logger = logging.getLogger(__name__)
_DONE = "_already_called_process_weights_after_loading"  # vLLM takes it away where it loads a layer anew
# By the address of a table's slots: compiled code has the slots as inputs, and layers of a shape share it.
_TABLES: WeakValueDictionary[int, CompressedTensor] = WeakValueDictionary()


@torch.library.custom_op(
    "ibp_engines::linear", mutates_args=(), schema="(Tensor x, Tensor slots, Tensor? bias, int rows) -> Tensor"
)
def _engine_linear(x: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    """`ibp.linear`, whose choice of a kernel compiled code must not make once for all numbers of tokens."""
    return ibp.linear(x, _TABLES[slots.data_ptr()], bias)


@_engine_linear.register_fake
def _(x: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows))


@torch.library.custom_op(
    "ibp_engines::rows", mutates_args=(), schema="(Tensor ids, Tensor slots, int columns, ScalarType dtype) -> Tensor"
)
def _engine_rows(ids: torch.Tensor, slots: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    rows = ibp.index_select(_TABLES[slots.data_ptr()], ids.reshape(-1))
    return rows.view(*ids.shape, columns)


@_engine_rows.register_fake
def _(ids: torch.Tensor, slots: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return ids.new_empty((*ids.shape, columns), dtype=dtype)


class IBPConfig(CodingFields, QuantizationConfig):
    """`--quantization ibp`.

    Args:
        include, exclude: patterns of `fnmatch` for vLLM's names of layers, such as "model.layers.*.mlp.*" or "lm_head";
            as in `ibp.nn.compress`, a layer below a name that matches is meant, too.
        min_bytes: smaller shards stay plain.
        level, fused: of `ibp.nn.compress`, as a config.json may have them; only "fast" and True are taken.

    Raises:
        ImportError: vLLM is not there, or lacks a class.
        TypeError, ValueError: a field is unknown, or out of range.
    """

    def __init__(self, **fields: Any) -> None:
        check_engine("vllm", _missing)
        CodingFields.__init__(self, **fields)
        QuantizationConfig.__init__(self)
        if self.level != "fast" or not self.fused:
            raise ValueError(f"level is {self.level!r} and fused {self.fused}; vLLM multiplies by level 'fast', fused")

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> IBPConfig:
        return cls(**config)

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for a directory whose weights are coded: vLLM reads plain ones."""
        if any(map(is_coded, Path(model_name).glob("*.safetensors"))):
            raise ValueError(
                f"the weights in {model_name!r} are coded, and vLLM reads plain ones, which it codes while it loads: "
                f"run `ibp decompress {model_name} -o plain/`"
            )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return IBPLinearMethod(self, prefix) if self._has(prefix) else UnquantizedLinearMethod()
        if isinstance(layer, VocabParallelEmbedding):
            return IBPEmbeddingMethod(self, prefix) if self._has(prefix) else UnquantizedEmbeddingMethod()
        return None  # attention, and experts, which vLLM multiplies by its own kernels

    def _has(self, prefix: str) -> bool:
        def names(patterns: list[str]) -> bool:
            return any(fnmatch.fnmatchcase(prefix, form) for name in patterns for form in (name, f"{name}.*"))

        return (self.include is None or names(self.include)) and not names(self.exclude)


class _Coded:
    """What both methods do: code a layer's weight, and multiply by it."""

    def __init__(self, config: IBPConfig, prefix: str, plain: Any) -> None:
        self._config, self._prefix, self._plain = config, prefix, plain

    def process_weights_after_loading(self, layer: Any) -> None:
        """Puts a table in the place of the layer's weight, or leaves the weight plain and logs why."""
        if getattr(layer, _DONE, False):
            return
        setattr(layer, _DONE, True)
        self._put(layer, self._table_of(layer.weight.data))

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.coded is None:
            return self._plain.apply(layer, x, bias)
        return torch.ops.ibp_engines.linear(x, layer.coded_slots, bias, layer.coded.shape[0])

    def _table_of(self, weight: torch.Tensor) -> CompressedTensor | None:
        reason = None
        if weight.dtype != torch.bfloat16:
            reason = f"it is in {weight.dtype}"
        elif weight.nbytes < self._config.min_bytes:
            reason = f"it has {weight.nbytes:,} bytes, fewer than min_bytes"
        elif weight.shape[0] < 16 or weight.shape[1] % 32:
            reason = f"of its shape {list(weight.shape)} the kernel takes multiples of 32 columns and 16 rows or more"
        if reason is None:
            table = matrix_table(weight)
            if table.nbytes <= weight.nbytes * (1 - LEAST_SAVINGS) and takes(table):
                return table.prepare_linear() if table.device.type == "cuda" else table
            reason = "it does not shrink"
        _logger.info("ibp: the weight of %s stays plain: %s", self._prefix, reason)
        return None

    @staticmethod
    def _put(layer: Any, table: CompressedTensor | None) -> None:
        layer.coded = table
        if table is None:
            return
        _TABLES[table.slots.data_ptr()] = table
        layer.register_buffer("coded_slots", table.slots, persistent=False)
        # An empty weight says the device to what asks for it, such as adapters (LoRA).
        layer.register_parameter("weight", torch.nn.Parameter(layer.weight.data.new_empty(0), requires_grad=False))


class IBPLinearMethod(_Coded, LinearMethodBase):
    """Of plain, merged, query-key-value and row-parallel layers: each is one matrix, and one table, on a rank.

    vLLM brings the plain weight of one layer to the GPU at a time, as for its own quantization while loading.
    """

    uses_meta_device = True

    def __init__(self, config: IBPConfig, prefix: str) -> None:
        super().__init__(config, prefix, UnquantizedLinearMethod())

    def create_weights(self, layer: Any, *args: Any, **attributes: Any) -> None:
        with torch.device("meta"):
            self._plain.create_weights(layer, *args, **attributes)
        initialize_online_processing(layer)


class IBPEmbeddingMethod(_Coded, QuantizeMethodBase):
    """Of embeddings and heads. A head that is tied to its embedding has the embedding's table."""

    def __init__(self, config: IBPConfig, prefix: str) -> None:
        super().__init__(config, prefix, UnquantizedEmbeddingMethod())

    def create_weights(self, layer: Any, *args: Any, **attributes: Any) -> None:
        self._plain.create_weights(layer, *args, **attributes)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        vars(layer)["tied_to"] = embed_tokens  # no module of this one
        layer.weight = embed_tokens.weight
        return layer

    def process_weights_after_loading(self, layer: Any) -> None:
        embedding = vars(layer).get("tied_to")
        if embedding is None or not isinstance(embedding.quant_method, IBPEmbeddingMethod):
            return super().process_weights_after_loading(layer)
        embedding.quant_method.process_weights_after_loading(embedding)
        self._put(layer, embedding.coded)

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        if layer.coded is None:
            return self._plain.embedding(layer, input_)
        return torch.ops.ibp_engines.rows(input_, layer.coded_slots, layer.coded.shape[1], layer.coded.dtype)


def register() -> None:
    """Makes `--quantization ibp` known to vLLM, which calls it when it starts, in all of its processes. Of a vLLM that
    lacks a class it only says so: everyone who has both packages starts vLLM with it."""
    if _missing is not None:
        _logger.warning("ibp: --quantization ibp is not there with this vLLM: %s", _missing)
        return
    register_quantization_config(METHOD)(IBPConfig)
