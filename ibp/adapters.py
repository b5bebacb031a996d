"""Tools for adapters of frameworks. With them, an adapter needs only the code that is specific to its framework.

    compressor = ibp.adapters.WeightCompressor({"memory": "pinned"})
    coded = compressor.code("model.layers.0.mlp.up_proj.weight", weight)    # one codebook for the weights of a kind
    weight = coded.decoded("cuda")                                          # a plain tensor on a device

    loading = ibp.adapters.ModelLoading(ibp.adapters.ModelOptions(exclude="lm_head"), model)
    for name, tensor in checkpoint:
        loading.put(name, tensor)                                           # codes it, and puts the table into modules
    report = loading.finish()

WeightCompressor, CodedWeight    code weights one by one, and decode them
CodedStatistics, ModelChange     base classes of objects that adapters return: statistics, and changes of a model that
                                 can be undone
ModelOptions, ModelLoading       say which weights of a model are coded, and how; code them while a checkpoint is read
RestingWeight                    keeps the values of a parameter in a table while no computation uses the parameter
compress_matrix, join            for engines that multiply by tables: make tables of matrices, join tables of shards
ExpertTables                     multiplies by the stacked matrices of experts

Other tools are in `ibp.kv` (`BlockStore`, `KeyedPages`, `TokenCoder`), `ibp.checkpoints` (`open`, `CheckpointWriter`)
and `ibp.deltas` (`Receiver`, `PlacedReceiver`). docs/adapters.md shows two complete adapters, and `ibp.integrations`
has adapters of known frameworks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ._common.manners import Saves, Statistics, shown_memory
from ._common.process import Closing, ForkLock, OfThisProcess, published
from ._machine import memory
from ._offload.weights import release, rest, wake
from ._rows.geometry import bytes_of
from ._rows.learning import Learner
from ._tables.compressed_tensor import CompressedTensor
from ._tables.weights import CodedWeight, WeightCompressor, is_worth_coding
from ._tables.weights import join as join_rows
from .nn import ModelReport
from .nn._compressing import ModelOptions, ModelPlan, NotTheModel, check_model, join_neighbours
from .nn._experts import ExpertTables
from .nn._parameters import SharedTable, by_rows, reshaped
from .nn._tables import guard_conversions, matrix_table

__all__ = [
    "Closing",
    "CodedStatistics",
    "CodedWeight",
    "ExpertTables",
    "ModelChange",
    "ModelLoading",
    "ModelOptions",
    "OfThisProcess",
    "RestingWeight",
    "WeightCompressor",
    "checked_device",
    "compress_matrix",
    "join",
    "shown_memory",
]

# Checkpoints may be read by several threads, but only one table at a time is decoded or coded, to save memory.
_LOCK = ForkLock()


# ---- objects that adapters return ----


class CodedStatistics(Statistics, Saves):
    """The base class of the results of adapters' `stats()`. Subclasses are frozen dataclasses of counters, among them
    `original_bytes` and `stored_bytes`, from which `savings` is computed. An object can be unpacked like a tuple of its
    counters.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True)
        ... class PoolStats(ibp.adapters.CodedStatistics):
        ...     original_bytes: int
        ...     stored_bytes: int
        >>> original, stored = PoolStats(100, 75)
        >>> original, PoolStats(100, 75).as_dict()
        (100, {'original_bytes': 100, 'stored_bytes': 75, 'savings': 0.25})
    """


class ModelChange(OfThisProcess, Closing, NotTheModel):
    """The base class of objects that represent a change to a model. A function that changes a model in place returns
    such an object. A subclass has a `close()` that undoes the change; leaving a `with` block calls it. If a caller uses
    the object as if it were the model, for example by calling it, the error says where the model is. Subclasses set two
    strings for errors: `_instead` says what to do in place of pickling the object, and `changed_by` is the call that
    made the object.

    Example:
        >>> class Plain(ibp.adapters.ModelChange):
        ...     _instead, changed_by = "pickle the model", "make_plain(model)"
        ...     def close(self):
        ...         self.model.train()
        >>> with Plain(torch.nn.Linear(2, 2).eval()) as change:
        ...     change.model.training
        False
        >>> change(torch.ones(2))
        Traceback (most recent call last):
        TypeError: 'Plain' object is not callable: make_plain(model) returned it, and changed the model in place. ...

    Args:
        model: the model.
        hint: a string that says which models are accepted, for the error if `model` is not a module.

    Attributes:
        model: as given.

    Raises:
        TypeError: model is not a torch.nn.Module.
    """

    def __init__(self, model: Any, hint: str = "") -> None:
        check_model(model, hint)
        self.model: torch.nn.Module = model

    def guard_conversions(self) -> None:
        """Makes conversions such as `model.half()` all or nothing, for the model and each of its modules. If a part of
        the model, such as a table, refuses the conversion, the error is raised before anything has been converted. Call
        this method after such parts have been added or removed."""
        guard_conversions(self.model)


def checked_device(device: torch.device | str | int) -> torch.device:
    """Checks a device and returns it with its index: "cuda" becomes the current CUDA device.

    Example:
        >>> ibp.adapters.checked_device("cpu")
        device(type='cpu')

    Raises:
        TypeError: device is not a device, the name of a device, or the number of a CUDA device.
        ValueError: device is neither a CPU nor a CUDA device, or this build of ibp cannot use it.
    """
    return memory.canonical(device)


# ---- models while they are loaded ----


class ModelLoading:
    """Codes the weights of a model, one after the other, while they are read from a checkpoint. Memory holds the coded
    model and one plain weight.

    Example:
        >>> checkpoint = torch.nn.Sequential(torch.nn.Linear(1024, 1024)).bfloat16().state_dict()
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(1024, 1024)).bfloat16().eval()
        >>> loading = ibp.adapters.ModelLoading(ibp.adapters.ModelOptions(), model)
        >>> for name, tensor in checkpoint.items():
        ...     held = loading.put(name, tensor)
        ...     if isinstance(held, torch.Tensor):    # it stays plain
        ...         module = model.get_submodule(name.rpartition(".")[0])
        ...         setattr(module, name.rpartition(".")[2], torch.nn.Parameter(held, requires_grad=False))
        >>> loading.finish().coded, model(torch.ones(1, 1024).bfloat16()).shape
        (('0',), torch.Size([1, 1024]))

    Args:
        options: which weights are coded, and how.
        model: the model, on the meta device and in eval mode.
        later: names of weights that are loaded plain and coded by `finish`, because modules may share them.

    Raises:
        ValueError: a pattern of include or exclude matches no module.
    """

    def __init__(self, options: ModelOptions, model: torch.nn.Module, later: Iterable[str] = ()) -> None:
        self._options, self._model, self._later = options, model, set(later)
        self._plan, self._away = ModelPlan(model, options), frozenset[str]()
        self._tables: dict[str, CompressedTensor] = {}  # tables of the weights in `later`, from the checkpoint

    def leave(self, names: Iterable[str]) -> None:
        """Keeps weights plain: those of the modules with these names, and of all modules inside them. Call this method
        before the first weight is read."""
        self._away = frozenset(names)

    def has(self, key: str) -> bool:
        """Returns whether the model has a parameter with this name that the options select for coding. `leave` does not
        change the result."""
        return self._plan.has(key)

    def codes(self, key: str) -> bool:
        """Returns whether the model's parameter with this name is coded as soon as it is read."""
        return self._plan.has(key) and key not in self._later and not self._is_away(key)

    def _is_away(self, key: str) -> bool:
        return any(key.startswith(f"{name}.") for name in self._away)

    def takes(self, key: str, table: CompressedTensor, dtype: torch.dtype | None) -> bool:
        """Returns whether the model can hold a table of a checkpoint without converting it. dtype: the dtype of the
        parameter in the model. None: the table's dtype."""
        return self.codes(key) and dtype in (None, table.dtype) and self._plan.takes(key, table)

    def value_of(
        self, key: str, table: CompressedTensor, device: Any, dtype: torch.dtype | None
    ) -> CompressedTensor | torch.Tensor:
        """Converts a table of a checkpoint to the form in which the model holds the weight, on a device: a table or a
        plain tensor. If several threads call, only one at a time decodes or codes.

        Args:
            key: the name of the parameter.
            table: the table of the checkpoint.
            device: the device of the result.
            dtype: the dtype of the parameter in the model. None: the table's dtype.
        """
        if self.takes(key, table, dtype):
            return table.to(device)
        if key in self._later:
            self._tables[key] = table
        with _LOCK:
            values = self.decoded(table, device, dtype)
            return self._plan.table_of(key, values) if self.codes(key) and self._plan.held(key) is None else values

    @staticmethod
    def decoded(table: CompressedTensor, device: Any, dtype: torch.dtype | None) -> torch.Tensor:
        """Decodes a table of a checkpoint on a device, and returns the tensor in a dtype (None: the table's dtype). If
        several threads call, only one at a time decodes, to save memory."""
        with _LOCK:
            return table.decompress(device=device).to(table.dtype if dtype is None else dtype)

    def put(self, key: str, value: CompressedTensor | torch.Tensor) -> CompressedTensor | torch.Tensor:
        """Codes a weight, puts its table into its modules, and returns the table. If the weight stays plain, or if the
        tensor's shape differs from the parameter's, it returns the plain tensor instead, and the caller must make it a
        parameter.

        A weight that several modules share may be put under each of its names, if the values are the same. The first
        call codes the weight for all of these modules; later calls return its table.

        Raises:
            ValueError: the weight has been put before, with other values.
        """
        shared = self._plan.held(key) if self._plan.has(key) else None
        if shared is not None:
            self._check_same(key, shared, value)
            return reshaped(shared.weight, shared.coded_shape) if shared.stacked else shared.weight
        if isinstance(value, torch.Tensor) and not (self.codes(key) and is_worth_coding(value.detach())):
            return value
        held = self._model.get_parameter(key)  # tables of some modules hold transposed matrices
        is_transposed = not isinstance(value, torch.Tensor) and self._plan.is_transposed(key)
        if value.shape != (held.mT.shape if is_transposed else held.shape):
            self._later.add(key)  # another shape: the framework refuses the tensor, or fills in other values
            return value if isinstance(value, torch.Tensor) else value.decompress()
        table = self._plan.table_of(key, value) if isinstance(value, torch.Tensor) else value
        if self._plan.put(key, table):
            return table
        return value if isinstance(value, torch.Tensor) else value.decompress()

    @staticmethod
    def _check_same(key: str, shared: SharedTable, value: CompressedTensor | torch.Tensor) -> None:
        """Raises ValueError unless a value is equal, bit for bit, to a weight that has been coded already. shared: the
        weight's table."""
        with _LOCK:
            plain = value if isinstance(value, torch.Tensor) else value.decompress()
            if plain is not value and shared.transposed:
                plain = plain.mT
            held = shared.decoded(plain.device)
        is_alike = (plain.shape, plain.dtype) == (held.shape, held.dtype)
        if not is_alike or not torch.equal(bytes_of(plain), bytes_of(held)):
            raise ValueError(
                f"{key} has been put before with other values, under this name or that of a module that shares it: "
                "name such weights in later=, or untie the modules"
            )

    def finish(self) -> ModelReport:
        """Codes the remaining weights. Must be called after the whole checkpoint has been read. Returns a report of the
        weights that are coded, and of the reasons why others stay plain.

        Raises:
            ValueError: a weight that is to be coded has no values, because the checkpoint lacks the weight or has it
                with another shape.
        """
        rest = ModelPlan(self._model, self._options)
        rest.code_all(self._tables, but=self._is_away)
        join_neighbours(self._model)
        guard_conversions(self._model)
        first, second = self._plan.report(), rest.report()
        coded = (*first.coded, *second.coded)
        plain = {name: why for name, why in (first.plain | second.plain).items() if name not in set(coded)}
        return ModelReport(coded, plain, first.num_bytes + second.num_bytes, first.nbytes + second.nbytes)


# ---- parameters that rest ----


class RestingWeight:
    """A coded weight that has the values of a parameter while the parameter rests.

    A resting parameter keeps its shape, dtype and device, and takes no memory. Code that reads its values gets a
    decoded copy, and code that writes to it raises RuntimeError.

    Example:
        >>> layer, compressor = torch.nn.Linear(64, 64), ibp.adapters.WeightCompressor({})
        >>> values = layer.weight.detach().clone()
        >>> weight = ibp.adapters.RestingWeight("weight", compressor.code("weight", values), "cpu")
        >>> weight.rest(layer.weight)
        >>> torch.equal(layer.weight, values)    # decoded for this call
        True
        >>> weight.wake(layer.weight, weight.coded.decoded("cpu"))    # an ordinary parameter, until it rests again
        >>> weight.release(layer.weight)                              # an ordinary parameter for good

    Args:
        name: the name of the parameter in error messages.
        coded: the weight.
        device: the device of the parameter while it rests.

    Attributes:
        name, coded: as given.
    """

    def __init__(self, name: str, coded: CodedWeight, device: torch.device | str) -> None:
        self.name, self.coded, self._device = name, coded, torch.device(device)
        # The data of a resting parameter: one element, expanded. It is NaN in every floating-point dtype.
        element = torch.full((coded.table.dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
        self._blank = element.view(coded.table.dtype)[0].expand(coded.shape)

    def like(self) -> torch.Tensor:
        """Returns a tensor on the meta device with the weight's shape, strides and dtype."""
        return torch.empty_strided(self.coded.shape, self.coded.stride, dtype=self.coded.table.dtype, device="meta")

    def read(self) -> torch.Tensor:
        """Returns the values in new memory, on the device of the resting parameter."""
        return self.coded.decoded(self._device)

    def rest(self, parameter: torch.nn.Parameter) -> None:
        """Makes a parameter rest: its memory is freed, and from now on its values are read from the table."""
        rest(parameter, self, self._blank)

    def wake(self, parameter: torch.nn.Parameter, decoded: torch.Tensor | None = None) -> None:
        """Makes a resting parameter an ordinary one. decoded: a tensor that holds the decoded table of the weight; the
        parameter uses its memory from now on. None: the parameter's content is undefined until it rests again."""
        wake(parameter)
        if decoded is not None:
            parameter.data = self.coded.as_it_was(decoded)

    def release(self, parameter: torch.nn.Parameter) -> None:
        """Makes a parameter an ordinary one for good: its values are decoded to new memory, on the device where it
        rested."""
        values = self.read()
        release(parameter)
        parameter.data = values


# ---- products ----


def compress_matrix(weight: torch.Tensor, **options: Any) -> CompressedTensor:
    """Compresses a matrix. If possible, the table has the form that the kernel of `ibp.linear` can multiply by;
    `fits_linear` of the result says whether it has this form.

    Example:
        >>> table = ibp.adapters.compress_matrix(torch.randn(512, 1024).mul(0.02).bfloat16())
        >>> table.fits_linear, table.slot_bytes
        (True, 1568)

    Args:
        weight: [rows, columns].
        options: options of `ibp.compress`. If they do not choose slots, the default level is "fast".

    Raises:
        TypeError, ValueError: as in `ibp.compress`.
    """
    return matrix_table(weight, **options)


def join(
    parts: Sequence[tuple[CompressedTensor, int, int]], device: torch.device | str | int
) -> CompressedTensor | None:
    """Joins coded rows of several tables in one table [rows, columns] on a device. Coded rows are copied as they are,
    without decoding. Loaders use it to join the shards of a merged weight.

    Example:
        >>> query, key = torch.randn(2, 64, 1024).mul(0.02).bfloat16()
        >>> table = ibp.adapters.compress_matrix(query)
        >>> beside = ibp.compress(key, codebook=table.codebook, slot_bytes=table.slot_bytes)
        >>> joined = ibp.adapters.join([(table, 0, 64), (beside, 32, 64)], "cpu")
        >>> joined.shape, torch.equal(joined[64:], key[32:])
        (torch.Size([96, 1024]), True)

    Args:
        parts: (table, number of the first row, number of the last row + 1) for each part, in order. A row consists of
            the elements of a tensor's last dimension.
        device: the device of the result.

    Returns:
        The table, or None if the tables cannot be joined. In each table, one coded row must be one row of the tensor,
        and slots must be smaller than a row. All tables must have equal codebooks, and slots of the same size.
    """
    for table, *_ in parts:
        if not table.shape or table.row_bytes != table.shape[-1] * table.dtype.itemsize:
            return None
    return join_rows([(by_rows(table), first, last) for table, first, last in parts], torch.device(device))


__dir__ = published(__name__, Learner)
