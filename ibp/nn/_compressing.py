"""`compress` replaces the matrices and embeddings of a model by tables, one after the other. `decompress` turns the
modules of a model that hold tables back into plain modules.

`ModelOptions` says which weights are to be coded, and how. `ModelPlan` finds these weights, and codes them one by one:
for `compress` all at once, for `ibp.adapters.ModelLoading` as they are read from a checkpoint.

`check_model` checks the argument of functions that change a model in place. `NotTheModel` is the base class of the
objects that they return; such an object raises an error if the caller uses it as the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from .._common.arguments import is_chosen, whole_number
from .._common.manners import share_saved, shown_memory
from .._common.process import tqdm
from .._rows.planes import check_level
from .._tables.compressed_tensor import CompressedTensor, compress_rows
from .._tables.weights import is_worth_coding
from ._embedding import Embedding, EmbeddingBag
from ._experts import Experts, is_stack
from ._parameters import SharedTable, by_rows, reshaped
from ._tables import (
    CodedModule,
    Conv1D,
    Linear,
    TableModule,
    guard_conversions,
    is_fast_matrix,
    matrix_table,
    multiply_together,
)

_MIN_BYTES = 1 << 20  # Default of min_bytes: weights of fewer bytes stay plain.
# A weight stays plain unless its table saves at least this fraction of its plain size. With smaller savings, decoding
# the table at each use would not be worthwhile.
LEAST_SAVINGS = 0.02
# Each entry: names of sibling modules that models call with the same x, in the order of the calls.
_NEIGHBOURS = (
    ("q_proj", "k_proj", "v_proj"),
    ("to_q", "to_k", "to_v"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
# Neighbours share a codebook if possible, because engines join the coded rows of their tables. If a neighbour was
# already coded at level "fast", a weight gets the codebook of the first such neighbour, unless its savings are then
# lower by this much or more than those of the neighbour. Savings are fractions of the plain size.
_MOST_LACKING = 0.003
_NO_GAIN, _SHARED, _TRAINS = "without gain", "shared with a module that stays plain", "in training"
_SHARED_STACK = "in several modules of experts"
_DECOMPRESSED = (Conv1D, Embedding, EmbeddingBag, Experts, Linear)  # the classes that `decompress` turns plain

_Model = TypeVar("_Model", bound=torch.nn.Module)
_Options = TypeVar("_Options", bound="ModelOptions")


class NotTheModel:
    """Base class of the objects that are returned by functions that change a model in place. If the caller uses such an
    object as the model, an error says that the model itself was changed.

    Attributes:
        changed_by: the name of the function that returned the object.
    """

    changed_by: str

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(self._sentence("is not callable"))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):  # Python, pickle and copy look for such attributes in any object.
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(self._sentence(f"has no attribute {name!r}"))

    def _sentence(self, what: str) -> str:
        return (
            f"{type(self).__name__!r} object {what}: {self.changed_by} returned it, and changed the model in place. "
            "Do not assign the result to the name of the model, and use the model as before"
        )


def check_model(model: Any, hint: str = "") -> None:
    """Raises TypeError unless `model` is a torch.nn.Module. hint: a string for the error message that says which models
    are accepted."""
    if isinstance(model, NotTheModel):
        raise TypeError(model._sentence("is no torch.nn.Module"))
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; wanted a torch.nn.Module{hint and f': {hint}'}")


@dataclass(frozen=True)
class ModelReport(NotTheModel):
    """Says which weights of a model `ibp.nn.compress` has coded, and which stay plain.

    Example:
        >>> layers = torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1)
        >>> ibp.nn.compress(torch.nn.Sequential(*layers).bfloat16().eval())
        ibp.nn.ModelReport(1 module coded, nbytes=1,6... (76...% of 2,097,152), plain: 1 smaller than min_bytes)

    Attributes:
        coded: names of the modules that hold tables now; for experts, names of the stacked weights.
        plain: a dict from names to the reasons why the weights stay plain. It has every other `torch.nn.Linear`,
            `torch.nn.Embedding` and `Conv1D`, every instance of their subclasses, and every other stacked weight. It
            does not have modules that `include` and `exclude` leave out.
        num_bytes: size in bytes of the coded weights, uncompressed. A weight that several modules share counts once.
        nbytes: size in bytes of the tables of these weights.
    """

    changed_by = "ibp.nn.compress(model)"

    coded: tuple[str, ...]
    plain: dict[str, str]
    num_bytes: int
    nbytes: int

    @property
    def savings(self) -> float:
        """1 - nbytes / num_bytes; 0 if nothing is coded."""
        return share_saved(self.num_bytes, self.nbytes)

    def __repr__(self) -> str:
        reasons = list(self.plain.values())
        plain = ", ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))
        return (
            f"ibp.nn.ModelReport({len(self.coded)} {'module' if len(self.coded) == 1 else 'modules'} coded, "
            f"{shown_memory(self.nbytes, self.num_bytes)}"
            f"{f', plain: {plain}' if plain else ''})"
        )


class ModelOptions:
    """The options that say which weights of a model are coded, and how. They are arguments of `ibp.nn.compress`, in a
    form that JSON can hold.

    Example:
        >>> options = ibp.adapters.ModelOptions(exclude="lm_head")
        >>> vars(options)
        {'level': 'fast', 'fused': True, 'min_bytes': 1048576, 'include': None, 'exclude': ['lm_head']}
        >>> options.includes("model.layers.0.mlp.up_proj"), options.includes("lm_head")
        (True, False)

    Args:
        level, include, exclude, fused, min_bytes: as in `ibp.nn.compress`.

    Raises:
        TypeError, ValueError: an argument has a wrong type, or is out of range.
    """

    def __init__(
        self,
        *,
        level: str = "fast",
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        fused: bool = True,
        min_bytes: int = _MIN_BYTES,
    ) -> None:
        check_level(level)
        self.level, self.fused, self.min_bytes = level, bool(fused), whole_number("min_bytes", min_bytes, 0)
        self.include = None if include is None else _listed(include)
        self.exclude = _listed(exclude)

    @classmethod
    def of(cls: type[_Options], model: torch.nn.Module) -> _Options:
        """Returns options that select exactly the weights that are now coded in a model."""
        coded = [module for module in model.modules() if isinstance(module, CodedModule)]
        tables = [(module, shared.weight) for module in coded for shared in module.shared_tables().values()]
        min_bytes = min([_MIN_BYTES, *(table.original_bytes for _, table in tables)])
        plain, _ = _find(model, ModelOptions(min_bytes=min_bytes))
        matrices = [table for module, table in tables if not isinstance(module, Embedding)]
        return cls(
            level="fast" if all(map(is_fast_matrix, matrices)) else "default",
            exclude=[name.rpartition(".")[0] if each.is_stacked else name for each in plain for name in each.names],
            fused=all(getattr(module, "fused", True) for module in coded),
            min_bytes=min_bytes,
        )

    def includes(self, *names: str) -> bool:
        """Returns whether a module is to be coded. names: the module's name in the model; if a framework has merged
        several modules into this one, the names of all of them. `include` must match at least one of these
        modules, or a module that contains one of them. `exclude` must match none of these modules, and none of the
        modules that contain them."""
        paths = [name.split(".") for name in names]
        around = {".".join(path[:number]) for path in paths for number in range(1, len(path) + 1)}
        is_wanted = any(is_chosen(name, self.include, ()) for name in around)
        return is_wanted and all(is_chosen(name, None, self.exclude) for name in around)


def _listed(given: str | Iterable[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


class _Weight:
    """A weight, and the modules that hold it."""

    def __init__(self) -> None:
        self.num_bytes = 0  # uncompressed
        # Names of the modules that hold the weight and are of a kind that `compress` replaces; a module may have
        # several names. For a stacked weight: the names of the parameter.
        self.names: list[str] = []
        self.is_stacked = False  # whether it is a stacked weight of a module of experts
        self.is_left = False  # whether it is left plain
        # Why one of the named modules keeps it plain. None: the weight is coded, or it is left plain because a module
        # without an entry in `names` holds it, too.
        self.reason: str | None = None

    @property
    def keys(self) -> list[str]:
        """The names of the parameter in the model's state."""
        return self.names if self.is_stacked else [f"{name}.weight" for name in self.names]


def compress(
    model: torch.nn.Module,
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    level: str = "fast",
    fused: bool = True,
    min_bytes: int = _MIN_BYTES,
    progress: bool = False,
) -> ModelReport:
    """Replaces the matrices and embeddings of a model by tables, in place. The memory of each plain weight is freed
    before the next weight is coded, so memory never holds more than the plain model and one table.

    Every `torch.nn.Linear` becomes an `ibp.nn.Linear`, `torch.nn.Embedding` an `ibp.nn.Embedding`, transformers'
    `Conv1D` an `ibp.nn.Conv1D`, and a module of experts that transformers has stacked an `ibp.nn.Experts`. Subclasses
    of the first three, modules with hooks and modules whose forward was replaced stay as they are. So do modules whose
    weights train, that is, require grad in training mode. A weight that several modules share, such as a tied head and
    its embedding, becomes one table that all of them use; if one of these modules stays plain, all do. A weight stays
    plain unless its table is at least 2 % smaller.

    Tables are in the memory where the weights were: on the GPU, or in host memory, which is pinned if there is a GPU.
    `model.to("cuda")` moves them to the GPU. Coded weights are fixed: `parameters()` lists each one as an
    `ibp.nn.TableParameter`, which gets no gradient. Gradients reach inputs, biases and all other parameters. On the
    CPU, results have the same bits as those of the plain model. On a GPU, `ibp.linear` multiplies if there are few
    vectors, unless `fused=False`; it adds products in a different order, so results may differ by rounding.

    `model.state_dict()`, `save_pretrained` and `safetensors.torch.save_model` produce plain tensors on the CPU, under
    the names of the plain model; `load_state_dict` accepts these tensors and codes them. `ibp.nn.coded_state_dict`
    returns the tables. If the compressed model still does not fit on the GPU, call `ibp.offload` afterwards: it leaves
    tables where they are.

    Tables keep their dtype. `model.half()` and other conversions to another dtype raise TypeError before they change
    anything: convert the plain model, and then compress it. If a module that contains the model is converted, other
    parts of that module may already have changed when the error is raised.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(4096, 512), torch.nn.Linear(512, 4096)).bfloat16().eval()
        >>> wanted = model(torch.tensor([7]))
        >>> report = ibp.nn.compress(model)
        >>> report.coded, f"{report.savings:.0%}"
        (('0', '1'), '28%')
        >>> torch.equal(model(torch.tensor([7])), wanted)
        True

    Args:
        model: on the CPU or on GPUs; in eval mode, or with frozen weights.
        include: names of modules, or patterns of `fnmatch`. The modules that match are compressed, with all modules
            below them. None: all modules.
        exclude: names or patterns of modules that are left out, with all modules below them: `exclude="lm_head"`.
        level: the level of matrices that are multiplied: "fast", the form that `ibp.linear` multiplies without decoding
            it first, or "default", as in `ibp.compress`. FP16 weights shrink by an eighth at "fast", by a seventh at
            "default". Embeddings that share no table with a matrix always get "default", which needs the fewest bytes.
        fused: as in `ibp.nn.Linear`.
        min_bytes: weights of fewer bytes stay plain.
        progress: whether to show a progress bar.

    Returns:
        A report that says which weights are coded, and which stay plain and why.

    Raises:
        TypeError: model is not a module, or an argument has a wrong type.
        ValueError: a weight is on the meta device; all weights train; a pattern of include or exclude matches no
            module; model itself would have to be replaced; level is unknown. The model is unchanged then.
    """
    check_model(model)
    options = ModelOptions(level=level, include=include, exclude=exclude, fused=fused, min_bytes=min_bytes)
    plan = ModelPlan(model, options)
    plan.code_all(progress=progress)
    join_neighbours(model)
    guard_conversions(model)
    return plan.report()


class ModelPlan:
    """Finds the weights of a model that are to be coded, and codes them one by one. `compress` codes the values that
    the model has. A loader makes the plan for a model on the meta device, and passes the values as it reads them.

    options: which weights are coded, and how."""

    def __init__(self, model: torch.nn.Module, options: ModelOptions) -> None:
        self._model, self._level, self._fused = model, options.level, options.fused
        self._weights, self._plain = _find(model, options)
        if not self._weights and _TRAINS in self._plain.values():
            raise ValueError("the weights of the model train: call model.eval() or model.requires_grad_(False) first")
        self._of = {key: weight for weight in self._weights for key in weight.keys}
        self._coded: list[str] = []
        self._num_bytes = self._nbytes = 0
        self._beside: dict[tuple, CompressedTensor] = {}  # for each set of neighbours, the table of the first neighbour

    def has(self, key: str) -> bool:
        """Returns whether the parameter with this key in the model's state dict is to be coded."""
        return key in self._of

    def held(self, key: str) -> SharedTable | None:
        """Returns the holder of a parameter's table if its modules have been replaced, and otherwise None."""
        path, _, name = key.rpartition(".")
        module = self._model.get_submodule(path)
        return module.shared_tables().get(name) if isinstance(module, CodedModule) else None

    def is_transposed(self, key: str) -> bool:
        """Returns whether the table of a parameter holds the transposed matrix, or, for a stack, the transposed
        matrices."""
        module: Any = self._modules(key)[0]
        return bool(module.is_transposed) if self._of[key].is_stacked else not _has_rows(module)

    def takes(self, key: str, table: CompressedTensor) -> bool:
        """Returns whether the modules that hold a parameter can use a given table of the parameter. If they cannot, the
        caller must make another table of the parameter's values."""
        is_stacked = self._of[key].is_stacked
        if table.dim() != (3 if is_stacked else 2) or self.is_transposed(key):
            return False
        if is_stacked:
            if table.row_bytes != table.shape[-1] * table.dtype.itemsize:
                return False
            table = by_rows(table)
        modules = self._modules(key)
        is_looked_up = any(isinstance(module, torch.nn.Embedding) for module in modules)
        is_multiplied = not all(isinstance(module, torch.nn.Embedding) for module in modules)
        if is_looked_up and table.geometry.item_bytes != table.row_bytes:
            return False
        return not is_multiplied or self._level == "default" or is_fast_matrix(table)

    def table_of(self, key: str, values: torch.Tensor) -> CompressedTensor:
        """Compresses the values of a parameter. Returns a new table on the device of the values."""
        values = values.detach()
        if all(isinstance(module, torch.nn.Embedding) for module in self._modules(key)):
            return compress_rows(values.contiguous())
        matrices = (values.mT if self.is_transposed(key) else values).contiguous()
        rows = matrices.view(-1, matrices.shape[-1])
        if self._of[key].is_stacked:
            return reshaped(matrix_table(rows, level=self._level), matrices.shape)
        around, _, last = key.removesuffix(".weight").rpartition(".")
        place = around, next((names for names in _NEIGHBOURS if last in names), last), rows.shape[1], rows.dtype
        first = self._beside.get(place)
        if first is not None:
            table = compress_rows(rows, codebook=first.codebook, slot_bytes=first.slot_bytes)
            if table.savings > first.savings - _MOST_LACKING:
                return table
        table = matrix_table(rows, level=self._level)
        if is_fast_matrix(table):
            self._beside.setdefault(place, table)
        return table

    def put(self, key: str, table: CompressedTensor) -> bool:
        """Replaces all modules that hold a parameter by modules over a table, and returns True. If the table is not
        small enough, returns False, and the parameter stays plain."""
        weight = self._of[key]
        if table.nbytes > weight.num_bytes * (1 - LEAST_SAVINGS):
            self._plain.update(dict.fromkeys(weight.names, _NO_GAIN))
            return False
        if weight.is_stacked:
            path, _, attribute = weight.names[0].rpartition(".")
            module = self._model.get_submodule(path)
            if not isinstance(module, Experts):
                module = Experts(module, self._fused)
                self._model.set_submodule(path, module)
            table = module.put(attribute, table).weight  # in the form in which the module holds it
        else:
            made: dict[torch.nn.Module, TableModule] = {}
            for name, module in [(name, self._model.get_submodule(name)) for name in weight.names]:
                if module not in made:
                    made[module] = _module_over(table, module, self._fused)
                    made[module].share_table(next(iter(made.values())))
                    made[module].shared_tables()["weight"].requires_grad = module.get_parameter("weight").requires_grad
                    made[module].train(module.training)
                parent, _, attribute = name.rpartition(".")
                setattr(self._model.get_submodule(parent), attribute, made[module])
        self._coded += weight.names
        self._num_bytes, self._nbytes = self._num_bytes + weight.num_bytes, self._nbytes + table.nbytes
        return True

    def code_all(
        self,
        tables: Mapping[str, CompressedTensor] = MappingProxyType({}),
        *,
        but: Callable[[str], bool] = lambda key: False,
        progress: bool = False,
    ) -> None:
        """Codes all weights that are still plain, one after the other.

        Args:
            tables: known tables of the weights, by name of the parameter. A table is used if it has the form that the
                modules need; otherwise the weight is compressed.
            but: a function that receives the name of a parameter, and returns whether its weight is skipped.
            progress: whether to show a progress bar.

        Raises:
            ValueError: a weight is on the meta device. The model is unchanged then.
        """
        left = [weight for weight in self._weights if not any(map(but, weight.keys))]
        for key in (key for weight in left for key in weight.keys):
            if self._model.get_parameter(key).is_meta:
                raise ValueError(f"{key} is on the meta device: load the model's weights first")
        total = sum(weight.num_bytes for weight in left)
        with tqdm(total=total, desc="compress", unit="B", unit_scale=True, disable=not progress) as bar:
            for weight in left:
                key, known = weight.keys[0], self._known(weight, tables)
                self.put(key, self.table_of(key, self._model.get_parameter(key)) if known is None else known)
                bar.update(weight.num_bytes)

    def report(self) -> ModelReport:
        """Returns a report of the weights that are coded so far."""
        return ModelReport(tuple(self._coded), dict(self._plain), self._num_bytes, self._nbytes)

    def _modules(self, key: str) -> list[torch.nn.Module]:
        """Returns all modules that hold a parameter."""
        return [self._model.get_submodule(each.rpartition(".")[0]) for each in self._of[key].keys]

    def _known(self, weight: _Weight, tables: Mapping[str, CompressedTensor]) -> CompressedTensor | None:
        """Returns a known table of a weight, on the weight's device. Returns None if no known table can be used."""
        held = self._model.get_parameter(weight.keys[0])
        for key in weight.keys:
            table = tables.get(key)
            if table is not None and (table.shape, table.dtype) == (held.shape, held.dtype) and self.takes(key, table):
                return table.to(held.device)
        return None


# ---- finding weights ----


def _find(model: torch.nn.Module, options: ModelOptions) -> tuple[list[_Weight], dict[str, str]]:
    """Finds the weights to code. Returns (these weights, a dict from names to reasons). The dict has every other module
    or stacked weight of the kinds that `compress` replaces, and the reason why it stays plain. The result does not keep
    the values of the weights alive. Raises ValueError if a pattern of the options matches no module."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in (*(options.include or ()), *options.exclude):
        if not any(is_chosen(name, [pattern], ()) for name in names):
            raise ValueError(f"there is no module whose name matches {pattern!r}")
    chosen = {name for name in names if options.includes(name)}
    found: dict[object, _Weight] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            weight = found.setdefault(place_of(parameter), _Weight())
            is_stacked = parameter.dim() == 3 and is_stack(module)
            is_of_a_kind = attribute == "weight" and isinstance(module, _kinds())
            if not (is_stacked or is_of_a_kind) or name not in chosen:
                weight.is_left = True
                continue
            weight.is_stacked = is_stacked
            weight.names.append(f"{name}.{attribute}" if is_stacked and name else name)
            reason = _reason(module, parameter, options.min_bytes)
            if is_stacked and len(weight.names) > 1:
                reason = _SHARED_STACK
            if reason is not None:
                weight.is_left, weight.reason = True, reason
                continue
            weight.num_bytes = parameter.numel() * parameter.element_size()
            if not name:
                raise ValueError(
                    f"model is a {type(module).__name__}, which cannot be replaced in place: wanted one around it, "
                    "or a call of ibp.nn.Linear.from_linear or ibp.nn.Embedding.from_pretrained"
                )
    weights = [weight for weight in found.values() if not weight.is_left]
    plain = {name: weight.reason or _SHARED for weight in found.values() if weight.is_left for name in weight.names}
    return weights, plain


def _kinds() -> tuple[type[torch.nn.Module], ...]:
    """Returns the classes of modules to replace. transformers' class is among them only if transformers is imported;
    otherwise no model has such a module."""
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return (torch.nn.Linear, torch.nn.Embedding, *(() if conv1d is None else (conv1d,)))


def place_of(tensor: torch.Tensor) -> object:
    """Returns a key that identifies a tensor's memory: tensors of the same dtype, shape and strides at the same address
    have equal keys. For a tensor without an address, or of a subclass, the key is the id of the object."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if tensor.is_meta or not is_plain:
        return id(tensor)
    return tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype


def _reason(module: torch.nn.Module, weight: torch.nn.Parameter, min_bytes: int) -> str | None:
    """Returns why a module stays plain, or None if its weight is to be coded. module: a module of a kind that
    `compress` replaces."""
    if not is_stack(module) and (type(module) not in _kinds() or "forward" in vars(module)):
        return "with a class or forward of its own"
    if any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks") and hooks):
        return "with hooks"
    if isinstance(module, torch.nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        return "with max_norm or scale_grad_by_freq"
    if type(weight) is not torch.nn.Parameter:
        return f"with a {type(weight).__name__}"
    if weight.requires_grad and module.training:
        return _TRAINS
    if weight.numel() * weight.element_size() < min_bytes:
        return "smaller than min_bytes"
    return None if weight.is_meta or is_worth_coding(weight.detach()) else _NO_GAIN


# ---- replacing modules ----


def join_neighbours(model: torch.nn.Module) -> None:
    """Calls `multiply_together` for each complete set of neighbours in a model, such as q_proj, k_proj and v_proj."""
    for module in model.modules():
        for names in _NEIGHBOURS:
            modules = [module._modules.get(name) for name in names]
            linears = [module for module in modules if type(module) is Linear and module.fused]
            if len(set(linears)) == len(modules) and len({module.in_features for module in linears}) == 1:
                multiply_together(*linears)


def _has_rows(module: torch.nn.Module) -> bool:
    """Returns True if the rows of the module's table are the rows of its plain weight, and False if they are the
    columns."""
    return isinstance(module, (torch.nn.Linear, torch.nn.Embedding))


def _module_over(table: CompressedTensor, module: torch.nn.Module, fused: bool) -> TableModule:
    if isinstance(module, torch.nn.Embedding):
        return Embedding(table, padding_idx=module.padding_idx)
    bias = module.bias if isinstance(module.bias, torch.Tensor) else None
    return (Linear if _has_rows(module) else Conv1D)(table, bias, fused=fused)


# ---- plain modules again ----


def decompress(model: _Model) -> _Model:
    """Undoes `compress`: gives plain weights back to the modules of a model, in place. The memory of each table is
    freed before the next table is decoded, so memory never holds more than the plain model and one table.

    Every `ibp.nn.Linear`, `Embedding` and `EmbeddingBag` becomes torch's module of that name, and `Conv1D` and
    `Experts` become modules of transformers. The modules stay the same objects, with their hooks, mode and biases.
    Weights are in the memory where their tables were. A weight that several modules share becomes one parameter.
    Weights of modules with trainable rows require grad; other weights require grad as they did before `compress`.
    Subclasses and `EmbeddingCollection`, for which torch has no module, stay as they are. If an optimizer of
    `ibp.optim` trained rows of the model, replace it by an optimizer of torch.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(4096, 512), torch.nn.Linear(512, 4096)).bfloat16().eval()
        >>> plain = {name: weight.clone() for name, weight in model.state_dict().items()}
        >>> report = ibp.nn.compress(model)
        >>> ibp.nn.decompress(model)
        Sequential(
          (0): Embedding(4096, 512)
          (1): Linear(in_features=512, out_features=4096, bias=True)
        )
        >>> all(torch.equal(weight, plain[name]) for name, weight in model.named_parameters())
        True

    Args:
        model: any module. A module without tables is not changed.

    Returns:
        The model.

    Raises:
        TypeError: model is not a module.
        ValueError: the forward of a module with a table has been replaced. The model is unchanged then.
        CorruptTableError: a table is damaged. This table and the following ones stay coded. If memory runs out, the
            tables that have not been decoded stay coded, too.
    """
    check_model(model)
    by_table: dict[int, list[TableModule | Experts]] = {}
    for name, module in model.named_modules():
        if type(module) not in _DECOMPRESSED:
            continue
        if "forward" in vars(module):
            raise ValueError(
                f"the forward of {name or 'model'} has been replaced, by a hook of accelerate or by ibp.offload for "
                "example: undo that first"
            )
        key = id(module if isinstance(module, Experts) else module.shared_tables()["weight"])
        by_table.setdefault(key, []).append(module)
    for module in model.modules():
        if isinstance(module, Linear):
            module.place = None  # modules multiply together only while all of them hold tables
    try:
        for modules in by_table.values():
            _turn_plain(modules)
    finally:
        join_neighbours(model)
    return model


def _turn_plain(modules: list[TableModule | Experts]) -> None:
    """Turns modules that share a table into plain modules."""
    weight = None
    for module in modules:
        if isinstance(module, Experts):
            module.turn_plain()
        else:
            weight = module.parameter() if weight is None else weight
            module.turn_plain(weight)
