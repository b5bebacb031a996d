"""Modules whose weights are tables: their bases, and the modules that multiply by matrices.

`CodedModule` is the base of all modules with tables: it moves, saves and loads tables where torch.nn.Module moves,
saves and loads parameters. `TableModule` is a module with one table, its `weight`. `Linear` and `Conv1D` multiply by
that table. `Neighbours` are modules that are called one after the other with the same x; `multiply_together` makes
them, and the first module computes the results of all of them. `guard_conversions` makes a model check all that it
contains before it converts anything. `coded_state_dict` returns a state dict that has tables.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, cast

import torch

from .._common.modes import cannot_record
from .._fetch.linear import differentiable, linear, slot_bytes_for, wants_gradients
from .._tables.compressed_tensor import CompressedTensor, compress_rows, linear_of
from ._parameters import SharedTable, TableParameter, is_fast, made_once, placed_like, reshaped, rows_of_weight

_LEAVES_SLOTS = {"device", "memory", "numa", "progress", "level"}  # arguments of `compress` that do not choose slots
TRANSPOSED = "_transposed"  # suffix of the names of transposed tables in a coded state
# Attributes that every module has besides its contents: its mode and its hooks.
_OF_ANY_MODULE = vars(torch.nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}
# True while `coded_state_dict` makes a state dict, which gets tables instead of plain tensors.
_is_coded: ContextVar[bool] = ContextVar("is_coded", default=False)


def saves_tables() -> bool:
    """Returns whether `coded_state_dict` is making the present state dict. If so, the state dict gets tables."""
    return _is_coded.get()


class CodedModule(torch.nn.Module):
    """A module that holds weights as tables. `parameters()` lists each table as a `TableParameter`, which `forward`
    does not use."""

    def shared_tables(self) -> dict[str, SharedTable]:
        """Returns the holders of the tables, by the names of the plain weights."""
        raise NotImplementedError

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields names and parameters as torch does, but leaves tables out if recurse is False. FSDP2, DDP's reducer
        and hooks of accelerate call it with recurse=False to find the parameters that they shard, reduce or move."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if recurse or not isinstance(parameter, TableParameter):
                yield name, parameter

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Registers a parameter; torch also calls this for `module.name = param`.

        Raises:
            RuntimeError: the name is that of a table.
        """
        if isinstance(self._parameters.get(name), TableParameter):
            raise RuntimeError(
                f"the {name} of an ibp.nn.{type(self).__name__} is a table, which no parameter can replace: "
                "load_state_dict() takes a plain tensor, which it codes, or an ibp.CompressedTensor"
            )
        super().register_parameter(name, param)

    def check_conversion(self, convert: Callable) -> None:
        """Raises TypeError for conversions that a table does not support, such as one to another dtype."""
        for shared in self.shared_tables().values():
            if not shared.stays:
                table = shared.weight
                convert(compress_rows(torch.empty(0, table.shape[1], dtype=table.dtype, device="cpu")))

    def __prepare_scriptable__(self) -> NoReturn:
        """Raises an error. torch.jit.script calls this method of the module that it compiles and of all modules in
        it."""
        raise cannot_record("torch.jit.script")

    @contextlib.contextmanager
    def _only_plain_parameters(self) -> Iterator[None]:
        """A context in which tables are hidden from those methods of torch.nn.Module that convert, save and load each
        parameter."""
        state, held = vars(self), self._parameters
        state["_parameters"] = {name: own for name, own in held.items() if not isinstance(own, TableParameter)}
        try:
            yield
        finally:
            state["_parameters"] = {**held, **self._parameters}

    def _apply(self, fn: Callable, recurse: bool = True) -> CodedModule:
        check_conversion(self, fn)
        with self._only_plain_parameters():
            super()._apply(fn, recurse)
        for name, shared in self.shared_tables().items():
            if shared.stays:
                parameter = self._parameter_of(name)
                device = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device)).device
                if device.type != "meta":
                    parameter.show(device)
                continue
            moved = fn(shared.weight)
            if moved is not shared.weight:
                self._take(name, moved)
        return self

    def _parameter_of(self, name: str) -> TableParameter:
        """Returns the `TableParameter` of the table called `name`."""
        return cast(TableParameter, self._parameters[name])

    def _take(self, name: str, table: CompressedTensor) -> None:
        """Replaces a table by one that was loaded or moved."""
        shared, parameter = self.shared_tables()[name], self._parameter_of(name)
        shared.weight = table
        parameter.show(parameter.device if shared.stays else None)

    # ---- states ----

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self._save_tables(destination, prefix)
        with self._only_plain_parameters():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _save_tables(self, state: dict[str, Any], prefix: str) -> None:
        """Puts the weights into a state: tables if `coded_state_dict` is making it, otherwise plain tensors."""
        for name, shared in self.shared_tables().items():
            key, table = prefix + name, shared.weight
            if saves_tables():
                state[key + TRANSPOSED if shared.transposed else key] = (
                    reshaped(table, shared.coded_shape) if shared.stacked else table
                )
                continue
            if key in state:  # an earlier state_dict() filled the same dict, and its tensor may be out of date
                shared.saved = made_once()
            state[key] = shared.saved(state, functools.partial(shared.decoded, torch.device("cpu")))

    def _load_from_state_dict(self, *args: Any) -> None:
        with self._only_plain_parameters():
            super()._load_from_state_dict(*args)
        for name, shared in self.shared_tables().items():
            self._load_table(name, shared, *args)

    def _load_table(self, name: str, shared: SharedTable, *args: Any) -> None:
        """Replaces a table by its entry in a state, which is a table or a plain tensor. If the entry is missing or does
        not fit, keeps the table and reports the error in torch's lists. args: the arguments of `_load_from_state_dict`,
        which contain these lists."""
        state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs = args
        held, key, shape = shared.weight, prefix + name, shared.plain_shape
        is_coded = shared.transposed and key + TRANSPOSED in state_dict
        if is_coded:
            key, shape = key + TRANSPOSED, shared.coded_shape
        if key in unexpected_keys:
            unexpected_keys.remove(key)
        if key not in state_dict:
            missing_keys += [key] if strict else []
            return
        value = state_dict[key]
        if not isinstance(value, (CompressedTensor, torch.Tensor)):
            error_msgs.append(f"{key} is a {type(value).__name__}; wanted an ibp.CompressedTensor or a tensor")
        elif (value.shape, value.dtype) != (shape, held.dtype):
            error_msgs.append(
                f"{key} has shape {list(value.shape)} and dtype {value.dtype}; wanted {list(shape)} and {held.dtype}"
            )
        else:
            table = rows_of_weight(value, shared.transposed and not is_coded)
            # True if the module is to hold the state's own table object. Otherwise the module gets a moved table or a
            # copy.
            assigns = metadata.get("assign_to_params_buffers", False)
            self._take(name, table if assigns and isinstance(table, CompressedTensor) else placed_like(held, table))


class TableModule(CodedModule):
    """A module with one table [rows, columns], its `weight`.

    Attributes:
        transposed: whether the plain weight is [columns, rows]. In a coded state the name of such a table ends in
            `_transposed`, because the shape of a square table does not show that it is transposed.
    """

    transposed = False

    def __init__(self, table: CompressedTensor, stays: bool, trains: bool = False) -> None:
        super().__init__()
        if not isinstance(table, CompressedTensor):
            raise TypeError(
                f"table is a {type(table).__name__}; wanted an ibp.CompressedTensor: ibp.compress makes one of a tensor"
            )
        if table.dim() != 2:
            raise ValueError(f"table has shape {list(table.shape)}; wanted two dimensions")
        if trains and not table.is_floating_point():
            raise TypeError(f"table has dtype {table.dtype}; wanted floating-point rows to train")
        self._shared = SharedTable(table, transposed=self.transposed, stays=stays)
        self._parameters["weight"] = TableParameter(self._shared, trains)

    def shared_tables(self) -> dict[str, SharedTable]:
        return {"weight": self._shared}

    @property
    def stays(self) -> bool:
        """True if the table stays in its memory, with its dtype, when the module is moved or converted."""
        return self._shared.stays

    @stays.setter
    def stays(self, stays: bool) -> None:
        self._shared.stays = stays

    @property
    def weight(self) -> CompressedTensor:
        return self._shared.weight

    @weight.setter
    def weight(self, table: CompressedTensor) -> None:
        CodedModule._take(self, "weight", table)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        elif isinstance(value, CompressedTensor):
            object.__setattr__(self, name, value)  # torch's method would accept only a parameter under this name
        elif name in self._parameters:  # otherwise torch.nn.DataParallel sets a decoded copy, which is not used
            super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "weight" not in self._parameters:  # the module was pickled by a version in which tables were not parameters
            self._shared.transposed, self._shared.stays = self.transposed, vars(self).pop("stays")
            weight = TableParameter(self._shared, getattr(self, "trainable", False))
            vars(self)["_parameters"] = {"weight": weight, **self._parameters}

    def share_table(self, other: TableModule) -> None:
        """Uses another module's table from now on."""
        self._shared, self._parameters["weight"] = other._shared, other._parameters["weight"]

    # ---- the plain module ----

    @property
    def _requires_grad(self) -> bool:
        """True if the plain weights require grad."""
        return self._shared.requires_grad

    def current_table(self) -> CompressedTensor:
        """Returns the table. Modules that train write changed rows to the table first."""
        return self.weight

    def parameter(self) -> torch.nn.Parameter:
        """Returns the plain weights, in the memory where the table is.

        Raises:
            CorruptTableError: the table is damaged.
        """
        self.current_table()
        return self._shared.plain_parameter(self._requires_grad)

    def _module_over(self, weight: torch.nn.Parameter) -> torch.nn.Module:
        """Returns the plain module that corresponds to this one, with the given weights."""
        raise NotImplementedError

    def to_torch(self) -> torch.nn.Module:
        """Returns the plain module with the same weights, uncompressed, in the memory where the table is. Both modules
        have the same bias object."""
        return self._module_over(self.parameter())

    def turn_plain(self, weight: torch.nn.Parameter) -> None:
        """Turns this object into the plain module with the given weights. The object keeps its hooks and its mode."""
        plain, own = self._module_over(weight), vars(self)
        new = {name: value for name, value in vars(plain).items() if name not in _OF_ANY_MODULE}
        left = own.keys() - new.keys() - set(_OF_ANY_MODULE)
        # After each step this object is a module that works, in case an interrupt comes before the next step.
        own.update(new)
        self.__class__ = type(plain)  # type: ignore[assignment]
        for name in left:
            del own[name]

    def extra_repr(self) -> str:
        table = self.weight
        megabytes = f"{table.nbytes / 1e6:.2f} of {table.original_bytes / 1e6:.2f} MB"
        kept = f"{list(table.shape)}, {table.dtype}, scheme={table.scheme!r}, {megabytes}"
        return f"{kept}{', stays=True' if self.stays else ''}"


# ---- matrices ----


def matrix_table(weight: torch.Tensor, **options: Any) -> CompressedTensor:
    """Compresses a weight matrix for use in matrix products.

    Unless options choose slots, the level is "fast" by default. At that level the table gets the form that the kernel
    of `ibp.linear` multiplies, if the kernel supports the matrix's dtype and number of columns.
    """
    if options.keys() <= _LEAVES_SLOTS:
        options = {"level": "fast", **options}
        if options["level"] == "fast":
            options["slot_bytes"] = slot_bytes_for(weight.shape[1], weight.dtype)
    return compress_rows(weight.detach(), **options)


def is_fast_matrix(table: CompressedTensor) -> bool:
    """Returns whether a table has the form that `matrix_table` makes at level "fast"."""
    if not is_fast(table) or table.layout != "slots" or table.geometry.item_bytes != table.row_bytes:
        return False
    least = slot_bytes_for(table.shape[1], table.dtype)
    return least is None or table.slot_bytes >= least


def check_forward(name: str, module: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    """Raises TypeError unless a module has the forward of a class of torch. If the module had another forward, a module
    over a table could not replace it.

    Args:
        name: what the error calls the module.
        kind: the class of torch.
    """
    if type(module).forward is not kind.forward or "forward" in vars(module):
        raise TypeError(
            f"{name} is a {type(module).__name__} with a forward of its own, which a module over a table does not "
            f"have: wanted that of torch.nn.{kind.__name__}. Give ibp.compress(module.weight) to the constructor, and "
            "do in the model what else forward does"
        )


class Linear(TableModule):
    """`torch.nn.Linear` with fixed weights, which are decoded on the input's device for the duration of a call.

    Gradients reach inputs and bias. The backward pass decodes the weights again, so plain weights are not kept until
    then. Everything that `ibp.linear` needs on a GPU is prepared when the module is made, moved or loaded, so even the
    first call may be compiled or captured in a CUDA graph.

    Example:
        >>> dense = torch.nn.Linear(256, 128)
        >>> linear = ibp.nn.Linear.from_linear(dense, fused=False)
        >>> x = torch.randn(4, 256)
        >>> torch.equal(linear(x), dense(x))
        True

    Args:
        table: [out_features, in_features].
        bias: [out_features], an ordinary parameter. None: no bias.
        stays: as in `Embedding`.
        fused: if x has few vectors, multiply them with the kernel of `ibp.linear`, which decodes the weights in
            registers; results can differ from torch's by rounding. False: always decode the weights first; results are
            bit-identical to torch's.

    Attributes:
        place: (the modules that multiply together, the number of this module among them). `multiply_together` sets it.
            None: the module multiplies alone.

    Raises:
        TypeError: table is not an `ibp.CompressedTensor`.
        ValueError: table does not have two dimensions, or the length of bias is not out_features.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self, table: CompressedTensor, bias: torch.Tensor | None = None, *, stays: bool = False, fused: bool = False
    ) -> None:
        super().__init__(table, stays)
        self.fused = fused
        self.place: tuple[Neighbours, int] | None = None
        self.out_features, self.in_features = table.shape
        if bias is not None and bias.shape != table.shape[:1]:
            raise ValueError(f"bias has shape {list(bias.shape)}; wanted [{self.out_features}]")
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias)
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(cls, module: torch.nn.Linear, *, fused: bool = True, **options: Any) -> Linear:
        """Returns a module with the same weights, compressed, on their device, and with the same bias.

        Args:
            module: the plain module. Its weights are compressed at level "fast" unless options say otherwise.
            fused: as in the constructor. If False, results are bit-identical to torch's.
            options: arguments of `ibp.compress`.

        Raises:
            TypeError: module is not a torch.nn.Linear, or its forward is not that of torch.nn.Linear.
            TypeError, ValueError: as in `ibp.compress`.
        """
        if not isinstance(module, torch.nn.Linear):
            raise TypeError(f"module is a {type(module).__name__}; wanted a torch.nn.Linear")
        check_forward("module", module, torch.nn.Linear)
        return cls(matrix_table(module.weight, **options), module.bias, fused=fused)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the products of x [..., in_features] with the weights, plus the bias: [..., out_features]."""
        if self.place is not None:
            neighbours, number = self.place
            return neighbours.product(number, x)
        return (linear if self.fused else linear_of)(x, self.weight, self.bias)

    def _module_over(self, weight: torch.nn.Parameter) -> torch.nn.Module:
        made = torch.nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        made.weight = weight
        made.register_parameter("bias", self.bias)
        return made

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{', fused=True' if self.fused else ''}"


class Neighbours:
    """Modules over tables that share one call of `linear`, as long as the model calls them one after the other with the
    same x. modules: instances of `Linear`, in the order of the calls."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = tuple(modules)
        # (x; torch's count of its changes when it was multiplied, None if torch does not count them; the results of the
        # modules that have not been called yet). None: no results are kept.
        self._kept: tuple[torch.Tensor, int | None, list[torch.Tensor]] | None = None
        # Becomes False when a result that was computed ahead is not used. From then on, every module multiplies alone.
        self._is_used = True

    def product(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Returns the result of a module for x. number: the module's number in `modules`."""
        if self._kept is not None:
            (kept_x, version, results), self._kept = self._kept, None
            if number == len(self.modules) - len(results) and kept_x is x and version == _version(x):
                if len(results) > 1:
                    self._kept = x, version, results[1:]
                return results[0]
            self._is_used = False
        modules = self.modules
        if number or not self._is_used or any(wants_gradients(x, module.bias) for module in modules):
            return linear(x, modules[number].weight, modules[number].bias)
        results = linear(x, [module.weight for module in modules], [module.bias for module in modules])
        self._kept = x, _version(x), results[1:]
        return results[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": None}


def _version(x: torch.Tensor) -> int | None:
    return None if torch.compiler.is_compiling() or x.is_inference() else x._version


def multiply_together(*modules: Linear) -> None:
    """Makes modules that get the same x multiply in one launch of a kernel, as `ibp.linear` does for several tables.

    The first module computes the results of all of them. The other modules return their results if they are called
    next, one after the other, with the same tensor. If they are called otherwise, each module computes its own result
    from then on. x must not change between these calls; outside of compiled code and inference mode, a change is
    noticed and each module computes its own result. For up to 32 vectors, results have the same bits as without
    this function. `ibp.nn.compress` calls this function for modules with names such as q_proj, k_proj and v_proj.

    Example:
        >>> gate, up = (ibp.nn.Linear.from_linear(torch.nn.Linear(256, 512).bfloat16()) for _ in range(2))
        >>> ibp.nn.multiply_together(gate, up)
        >>> x = torch.randn(2, 256).bfloat16()
        >>> (torch.nn.functional.silu(gate(x)) * up(x)).shape
        torch.Size([2, 512])

    Args:
        modules: at least two different modules, all with fused=True and the same in_features.

    Raises:
        TypeError: a module is not an `ibp.nn.Linear`.
        ValueError: the modules are not as described.
    """
    for module in modules:
        if type(module) is not Linear:
            raise TypeError(f"one of the modules is a {type(module).__name__}; wanted ibp.nn.Linear")
        if not module.fused:
            raise ValueError("a module has fused=False; wanted True, as for all that multiply together")
        if module.in_features != modules[0].in_features:
            raise ValueError(
                f"modules have {modules[0].in_features} and {module.in_features} in_features; wanted the same"
            )
    if len(set(map(id, modules))) != len(modules) or len(modules) < 2:
        raise ValueError(f"there are {len(set(map(id, modules)))} different modules; wanted at least two, each once")
    neighbours = Neighbours(modules)
    for number, module in enumerate(modules):
        module.place = neighbours, number


class Conv1D(Linear):
    """transformers' `Conv1D` with fixed weights: a `Linear` whose plain weights are [in_features, out_features].

    The table holds the transposed weights, whose rows `ibp.linear` multiplies. On a GPU with `fused`, results have the
    same bits as those of `Linear`; otherwise they have the same bits as those of transformers' module. In
    `state_dict()` the plain weights are called `weight`; in `coded_state_dict` the table is called `weight_transposed`.

    Example:
        >>> plain = torch.randn(64, 128)
        >>> layer = ibp.nn.Conv1D(ibp.compress(plain.t().contiguous(), device="cpu"), torch.zeros(128))
        >>> layer.state_dict()["weight"].shape, layer(torch.ones(2, 64)).shape
        (torch.Size([64, 128]), torch.Size([2, 128]))

    Args:
        table: [out_features, in_features].
        bias, stays, fused: as in `Linear`.

    Raises:
        TypeError, ValueError: as in `Linear`.
    """

    transposed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the products of x [..., in_features] with the weights, plus the bias: [..., out_features]."""
        if self.fused and x.is_cuda:
            return linear(x, self.weight, self.bias)
        return differentiable(_transposed_product, x, self.weight, self.bias)

    def _module_over(self, weight: torch.nn.Parameter) -> torch.nn.Module:
        from transformers.pytorch_utils import Conv1D as Plain

        with torch.device("meta"):
            made = Plain(self.out_features, self.in_features)
        made.weight = weight
        made.bias = torch.nn.Parameter(weight.new_zeros(self.out_features)) if self.bias is None else self.bias
        return made


def _transposed_product(x: torch.Tensor, table: CompressedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes what transformers' `Conv1D` computes, with the same bits."""
    weight, vectors = table.decompress(device=x.device).t().contiguous(), x.reshape(-1, x.shape[-1])
    products = vectors @ weight if bias is None else torch.addmm(bias, vectors, weight)
    return products.view(*x.shape[:-1], table.shape[0])


# ---- conversions of models ----


def check_conversion(module: torch.nn.Module, convert: Callable) -> None:
    """Raises an error if a module, or a submodule or tensor in it, refuses a conversion, such as `half()` or
    `to("cuda")`. A module or tensor that may refuse has a method `check_conversion(convert)`, which raises the error.
    convert: the function that torch would apply to each tensor."""
    for part in _refusing(module):
        part.check_conversion(convert)


def guard_conversions(model: torch.nn.Module) -> None:
    """Makes a model and each of its submodules check all that they contain before they convert anything. Without this
    check, a submodule or a tensor could refuse after torch, which converts depth first, has converted other tensors. If
    a module no longer contains anything that may refuse, its check is removed.

    If the model later becomes a submodule of another module, that module does not check, because torch does not tell
    the model about it.
    """
    for module in model.modules():
        held = vars(module).get("_apply")
        if next(_refusing(module), None) is not None:
            vars(module)["_apply"] = functools.partial(_apply_checked, module)
        elif isinstance(held, functools.partial) and held.func is _apply_checked:
            del vars(module)["_apply"]


def _apply_checked(module: Any, convert: Callable, recurse: bool = True) -> torch.nn.Module:
    """Calls `check_conversion`, and then the method `_apply` of the module's class, by which torch converts modules."""
    check_conversion(module, convert)
    return type(module)._apply(module, convert, recurse)


def _refusing(module: torch.nn.Module) -> Iterator[Any]:
    """Yields those of a module, its submodules, and their parameters and buffers that may refuse conversions."""
    for part in module.modules():
        for held in (part, *part._parameters.values(), *part._buffers.values()):
            if hasattr(type(held), "check_conversion"):
                yield held


# ---- coded states ----


def coded_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """Returns `module.state_dict()` with tables in place of plain tensors. The tables are those of the module, so they
    take no additional memory. `torch.save` saves the dict, and `load_state_dict` loads it.

    Example:
        >>> embedding = ibp.nn.Embedding(1000, 64, device="cpu")
        >>> state = ibp.nn.coded_state_dict(embedding)
        >>> state["weight"].shape, embedding.load_state_dict(state)
        (torch.Size([1000, 64]), <All keys matched successfully>)
    """
    token = _is_coded.set(True)
    try:
        return module.state_dict()
    finally:
        _is_coded.reset(token)
