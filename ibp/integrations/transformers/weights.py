"""A quantizer with which transformers' `from_pretrained` loads models with coded weights, and `save_coded`, which saves
such models."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import transformers.modeling_utils
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, revert_weight_conversion
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from transformers.utils.quantization_config import QuantizationConfigMixin

import ibp

from ...adapters import ModelLoading
from ...checkpoints import SourceTensor, coded_name, is_coded
from ..shared import METHOD, CodingFields, CodingQuantizer, away_of, holds_table

__all__ = ["IbpConfig", "IbpQuantizer", "save_coded"]

# Size of a coded BF16 matrix at level "fast", including escapes, divided by its plain size. transformers uses it to
# choose device maps.
_CODED_SHARE = 0.77
_SHARD_BYTES = 5 << 30  # default for the largest size in bytes of the weights in a file; `ibp compress` has the same
_TRANSPOSED = "_transposed"  # suffix of the names of transposed tables in `ibp.nn.coded_state_dict`
_INITIALIZED = "_is_hf_initialized"  # transformers does not initialise parameters that have this attribute
# True if transformers tells the quantizer, before it reads a tensor of a checkpoint, into which parameter the tensor
# will be loaded. Releases since 5.20 do.
_SAYS_TARGETS = hasattr(HfQuantizer, "get_new_dtype")
_without_weights: ContextVar[bool] = ContextVar("without_weights", default=False)  # whether to save without weights


# ---- the configuration ----


@register_quantization_config(METHOD)
class IbpConfig(CodingFields, QuantizationConfigMixin):
    """Makes `from_pretrained` code the matrices of a model while it loads them. Pass an instance as
    `quantization_config`.

    The model becomes what `ibp.nn.compress` would make of it. Each weight is coded as soon as it is read, so memory
    holds the coded model and one plain weight. Weights that several modules share, such as a tied head and its
    embedding, are loaded plain and coded afterwards. On the CPU, results are bit-identical to those of the plain model.
    `model.hf_quantizer.report` says which weights are coded, and why others stay plain.

    A directory of coded weights, written by `ibp compress model/ -o small/` or `save_coded`, needs no
    `quantization_config`, but ibp must be imported: `from_pretrained("small/")`. The options are then read from its
    config.json. Tables go to the device as coded bytes. Tables that `save_coded` wrote at the `level` of these options
    are used without decoding them. Tables of other forms, such as those of `ibp compress`, are decoded on the device
    and coded again.

    With `device_map="auto"`, transformers plans with coded sizes. A device map may put a part of the model on "cpu" or
    "disk" and the rest on one GPU. Then that part stays in host memory, from where `ibp.offload` brings it to the GPU,
    and the rest is coded on the GPU.

    `model.save_pretrained` writes plain weights and a plain config.json, which load without ibp.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
        >>> from ibp.integrations.transformers import IbpConfig
        >>> config = LlamaConfig(vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=1)
        >>> LlamaForCausalLM(config).bfloat16().save_pretrained("plain")
        >>> model = AutoModelForCausalLM.from_pretrained("plain", quantization_config=IbpConfig())
        >>> len(model.hf_quantizer.report.coded), model.generate(torch.tensor([[1, 2]]), max_new_tokens=3).shape
        (5, torch.Size([1, 5]))

    Args:
        level, include, exclude, fused, min_bytes: as in `ibp.nn.compress`. Names are names of the model's modules.
        quant_method: "ibp", as in config.json.

    Raises:
        TypeError, ValueError: an argument has a wrong type, or is out of range.
    """

    __module__ = "ibp.integrations.transformers"


# ---- loading ----


@register_quantizer(METHOD)
class IbpQuantizer(CodingQuantizer, HfQuantizer, ConversionOps):
    """The quantizer whose methods transformers calls while it loads a model with an `IbpConfig`. It is also the
    conversion that transformers calls after its own conversions of a checkpoint's tensors.

    Attributes:
        report: which weights are coded, and why others stay plain. None until the model has been loaded.
        offloaded: the result of `ibp.offload` if a device map puts a part of the model on "cpu" or "disk", else None.
    """

    __module__ = "ibp.integrations.transformers"

    quantization_config: IbpConfig

    def __init__(self, quantization_config: IbpConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.offloaded: ibp.Offloaded | None = None
        self._away: tuple[str, ...] = ()  # modules that a device map puts on "cpu" or "disk" while a GPU computes
        self._device: torch.device | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **options: Any) -> None:
        """Checks a device map. If the map puts parts of the model on "cpu" or "disk", changes the map in place to the
        one that `update_device_map` returns. transformers calls this method with the user's map, and again with the map
        that it has made for "auto"."""
        if self._loading is not None and away_of(device_map):
            kept = self.update_device_map(device_map)
            self._loading.leave(self._away)
            device_map.clear()
            device_map.update(kept)

    def update_device_map(self, device_map: Any) -> Any:
        """Returns the device map with which the model is loaded. If the given map puts parts on "cpu" or "disk", the
        returned map puts the complete model in host memory. Once the model has been loaded, its tables move to the GPU,
        and `ibp.offload` handles the rest.

        Raises:
            ValueError: the map puts parts on "cpu" or "disk", and the other parts are not all on one device.
        """
        away = away_of(device_map)
        if not away:
            return device_map
        devices = {str(place) for place in device_map.values()}.difference(away.values())
        if len(devices) != 1:
            part, place = next(iter(away.items()))
            raise ValueError(
                f"the device map puts {part or 'the model'!r} on {place!r} and others on {sorted(devices)}; wanted "
                "one device that computes"
            )
        self._away, self._device = tuple(away), _device_of(devices.pop())
        return {"": "cpu"}

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Returns the average size in bytes of an element of a parameter after coding. transformers uses it to choose
        device maps."""
        is_smaller = param.dtype == torch.bfloat16 and self.param_needs_quantization(model, param_name)
        return param.element_size() * (_CODED_SHARE if is_smaller else 1)

    def param_needs_quantization(self, model: PreTrainedModel | None, param_name: str, **options: Any) -> bool:
        """Returns whether a parameter is coded when it is loaded. Tied parameters are coded after transformers has
        tied them."""
        return self._codes(param_name)

    def get_quantize_ops(self) -> IbpQuantizer:
        return self

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Notes in a tensor of a coded checkpoint which parameter it will become, so that the tensor is read in the
        form that the parameter needs. Returns the dtype that transformers' own method returns. transformers calls this
        for each tensor before it reads the tensor."""
        if isinstance(param, _CodedEntry):
            converter.quantization_operation = self
            if isinstance(converter, WeightRenaming) and self._loading is not None:
                param.wanted = self._loading, converter.target_patterns[0]
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **options: Any
    ) -> None:
        model.eval()  # from_pretrained does this later; weights in training mode would stay plain
        coded = [path for path in checkpoint_files or () if is_coded(path)]
        self.pre_quantized = bool(coded) and _SAYS_TARGETS  # otherwise transformers calls `param_needs_quantization`
        tied = model.all_tied_weights_keys
        self._loading = ModelLoading(self.quantization_config, model, later={*tied, *tied.values()})
        self._loading.leave(self._away)
        if not _SAYS_TARGETS:
            _loadings.update(dict.fromkeys(coded, self._loading))

    def convert(
        self, input_dict: dict[str, Any], *, missing_keys: set[str] | None = None, **options: Any
    ) -> dict[str, torch.Tensor]:
        """Codes weights, and puts their tables into the modules that hold the weights. Returns the other weights, which
        transformers then loads as plain parameters."""
        assert self._loading is not None
        plain = {}
        for key, value in input_dict.items():
            held = self._loading.put(key, value[0] if isinstance(value, list) else value)
            if isinstance(held, torch.Tensor):
                plain[key] = held
                continue
            setattr(held, _INITIALIZED, True)  # otherwise transformers would fill it with random numbers
            if missing_keys is not None:
                missing_keys.discard(key)
        return plain

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **options: Any) -> PreTrainedModel:
        assert self._loading is not None
        self.report, self._loading = self._loading.finish(), None
        for module in model.modules():
            if isinstance(module, PreTrainedModel):  # modules with tied weights share a table
                module.all_tied_weights_keys = {
                    target: source
                    for target, source in module.all_tied_weights_keys.items()
                    if not any(holds_table(module.get_submodule(key.rpartition(".")[0])) for key in (target, source))
                }
        for module in model.modules():
            if holds_table(module):
                for shared in module.shared_tables().values():
                    vars(shared.weight).pop(_INITIALIZED, None)
        del model.config.quantization_config  # makes save_pretrained write a plain configuration
        if self._device is not None:
            for module in model.modules():
                if holds_table(module):
                    module.to(self._device)
            self.offloaded = ibp.offload(model, self._device, min_bytes=self.quantization_config.min_bytes)
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Any] | None, dict[str, str]]:
        return ({} if _without_weights.get() else None), {}

    def is_serializable(self) -> bool:
        return True


def _device_of(place: str) -> torch.device:
    """Returns the device that an entry of a device map names. A GPU is named by its number."""
    return torch.device("cuda", int(place)) if place.isdigit() else torch.device(place)


# ---- files of coded weights ----


# A map from the paths of coded files to the loads that read them. It serves releases of transformers that do not tell
# quantizers which parameter a tensor becomes. With such releases, a tensor is assumed to become the parameter of the
# same name, if the model has one. When a load ends or fails, its entries disappear.
_loadings: WeakValueDictionary[str, ModelLoading] = WeakValueDictionary()


class _CodedEntry:
    """A tensor of a coded file. transformers reads it as it reads a slice of a safetensors file: `entry[...].to(device,
    dtype)`. For a table, `entry[...]` is the entry itself, and `to` returns the values on the device, in the form in
    which the model keeps the parameter.

    wanted: (the `ModelLoading`, which knows the form in which the model keeps the parameter; the name of the
    parameter). None: the tensor is read as a plain tensor.
    """

    def __init__(self, tensor: SourceTensor) -> None:
        self._tensor = tensor
        self.wanted: tuple[ModelLoading, str] | None = None

    def get_dtype(self) -> str:
        return self._tensor.header_entry()[0]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, items: Any) -> Any:
        is_whole_table = items is Ellipsis and self._tensor.make_table is not None
        return self if is_whole_table else self._tensor.tensor()[items]

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Any:
        table, device = self._tensor.table, "cpu" if device is None else device
        assert table is not None
        if self.wanted is None:
            return ModelLoading.decoded(table, device, dtype)
        loading, key = self.wanted
        return loading.value_of(key, table, device, dtype)


class _CodedFile:
    """A coded file. It has those methods of a safetensors file that transformers calls."""

    def __init__(self, path: str) -> None:
        self._source, self._loading = ibp.checkpoints.open(path, verify=True), _loadings.get(path)

    def keys(self) -> list[str]:
        return list(self._source.tensors)

    def metadata(self) -> dict[str, str]:
        return dict(self._source.metadata)

    def get_slice(self, name: str) -> _CodedEntry:
        entry = _CodedEntry(self._source.tensors[name])
        if self._loading is not None and self._loading.has(name):
            entry.wanted = self._loading, name
        return entry

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._source.tensors[name].tensor()

    def __enter__(self) -> _CodedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()


_safe_open = transformers.modeling_utils.safe_open


def _open_either(path: str, *args: Any, **options: Any) -> Any:
    """Opens a coded or a plain file. Replaces transformers' `safe_open`, because transformers gives quantizers no other
    way to open the files of a checkpoint."""
    return _CodedFile(path) if is_coded(path) else _safe_open(path, *args, **options)


transformers.modeling_utils.safe_open = _open_either

_resize_token_embeddings = PreTrainedModel.resize_token_embeddings


@functools.wraps(_resize_token_embeddings)
def _resize_plain(
    model: PreTrainedModel, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **options: Any
) -> Any:
    """Replaces `resize_token_embeddings`. Raises TypeError if coded embeddings would be resized. It does so before
    transformers resizes either the input or the output embeddings."""
    held = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if holds_table(module) and module in held]
    for name in names:
        num_rows = model.get_submodule(name).weight.shape[0]
        wanted = num_rows if new_num_tokens is None else new_num_tokens
        wanted = wanted if pad_to_multiple_of is None else -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
        if wanted != num_rows:
            raise TypeError(
                f"{name} is coded and has {num_rows} rows, which cannot become {wanted}: call ibp.nn.decompress(model) "
                f"first, or leave these modules plain by exclude={names}"
            )
    return _resize_token_embeddings(model, new_num_tokens, pad_to_multiple_of, **options)


PreTrainedModel.resize_token_embeddings = _resize_plain


_resolve = transformers.modeling_utils._get_resolved_checkpoint_files


def _resolve_either(**options: Any) -> Any:
    """Finds the files of a checkpoint, as the function of transformers that it replaces does. If there are no plain
    files, it looks for coded ones, which have other names."""
    try:
        return _resolve(**options)
    except OSError:
        for plain in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
            name = coded_name(transformers.modeling_utils._add_variant(plain, options.get("variant")))
            for explicit in (name, f"{name}.index.json"):
                with contextlib.suppress(OSError, ValueError):
                    files, index = _resolve(**{**options, "transformers_explicit_filename": explicit})
                    if all(map(os.path.isfile, files)):
                        return files, index
        raise


transformers.modeling_utils._get_resolved_checkpoint_files = _resolve_either


def save_coded(
    model: PreTrainedModel, directory: str | os.PathLike[str], *, shard_bytes: int | None = _SHARD_BYTES
) -> None:
    """Writes a model to a directory, with its tables in coded form, so that `from_pretrained(directory)` need not code
    the weights again.

    The directory has the files that `model.save_pretrained` writes, except that the weights are in a coded file,
    "model.ibp.safetensors", or in a set of coded files. `ibp decompress` converts coded files to plain ones. Parameters
    that are plain in the model stay plain. The function prints the lines of Python that load the model; without `import
    ibp`, transformers finds no weights in the directory.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from ibp.integrations.transformers import save_coded
        >>> config = LlamaConfig(vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(config).bfloat16().eval()
        >>> report = ibp.nn.compress(model)
        >>> save_coded(model, "small")
        import ibp, transformers
        model = transformers.LlamaForCausalLM.from_pretrained('small')
        >>> loaded = LlamaForCausalLM.from_pretrained("small")
        >>> sorted(loaded.hf_quantizer.report.coded) == sorted(report.coded)
        True

    Args:
        model: a model of transformers, from `from_pretrained` with an `IbpConfig`, or after `ibp.nn.compress`.
        directory: path of the directory; it is made if it does not exist.
        shard_bytes: largest size in bytes of the weights in a file, unless one tensor is larger. None: a single file.

    Raises:
        TypeError: model is not a model of transformers.
        OSError: a file cannot be written.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}; wanted a transformers.PreTrainedModel")
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, IbpQuantizer):
        config = quantizer.quantization_config
    else:
        config = IbpConfig.of(model)
    with _saved_as(model.config, config.to_dict()):
        model.save_pretrained(directory, state_dict={})
    folder = Path(directory)
    for plain in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME):
        (folder / plain).unlink(missing_ok=True)
    target = folder / coded_name(SAFE_WEIGHTS_NAME)
    ibp.save(target, _in_file(model), metadata={"format": "pt"}, shard_bytes=shard_bytes)
    kind = model.config.architectures[0]
    print(f"import ibp, transformers\nmodel = transformers.{kind}.from_pretrained({os.fspath(directory)!r})")


def _in_file(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the tables and tensors to write, by their names in the model's checkpoint. A table or tensor with several
    names is returned only under the first of them."""
    held: dict[object, str] = {}
    state = {}
    for key, value in ibp.nn.coded_state_dict(model).items():
        is_table = isinstance(value, ibp.CompressedTensor)
        place = id(value) if is_table else (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if held.setdefault(place, key) != key and (is_table or value.numel()):
            continue
        if is_table and key.endswith(_TRANSPOSED):
            key = key.removesuffix(_TRANSPOSED)
            value = ibp.compress(value.decompress().mT.contiguous(), layout="packed")
        state[key] = value if isinstance(value, ibp.CompressedTensor) else value.contiguous()
    conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    if any(isinstance(conversion, WeightConverter) for conversion in conversions):
        return state  # a WeightConverter needs plain tensors; transformers also loads the model's own names
    return revert_weight_conversion(model, state)


@contextlib.contextmanager
def _saved_as(config: Any, fields: dict[str, Any]) -> Iterator[None]:
    """Inside the context, `save_pretrained` writes the model's config with these fields of an `IbpConfig`, and writes
    no weights."""
    before = {name: value for name, value in vars(config).items() if name == "quantization_config"}
    config.quantization_config, token = fields, _without_weights.set(True)
    try:
        yield
    finally:
        _without_weights.reset(token)
        del config.quantization_config
        vars(config).update(before)
