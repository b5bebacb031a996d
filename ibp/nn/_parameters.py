"""The tables that modules hold, and the parameters by which `parameters()` lists them.

`SharedTable` holds the table of one or more modules, and `made_once` makes its plain weight once for a `state_dict()`.
`TableParameter` stands for the plain weight of such a table. The functions at the end convert between weights and rows
of tables.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from .._common.modes import outside_of_modes
from .._fetch.calls import target_of
from .._rows.geometry import bytes_of
from .._rows.planes import PlanesCodebook
from .._rows.table import pin_if_possible
from .._tables.compressed_tensor import CompressedTensor, compress_rows, with_tensors

_aten = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)
_SETS_DATA: Any = vars(torch._C.TensorBase)["data"].__set__
_ASKS_FOR_GRADIENTS: Any = (torch.Tensor.requires_grad_, vars(torch._C.TensorBase)["requires_grad"].__set__)
# Methods that read the memory of a tensor directly, without calling an operation that `__torch_dispatch__` sees.
_READS_MEMORY = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__)

# A function of (state dict, function that makes a tensor) that returns the tensor (see `made_once`).
Saved = Callable[[dict[str, Any], Callable[[], torch.Tensor]], torch.Tensor]


def made_once() -> Saved:
    """Returns a function of (state, make) that makes the tensor of a weight only once for a state dict, even if several
    names in the dict refer to the weight. The function returns the tensor that it has made for this state dict, if the
    tensor still exists. Otherwise it calls make(), and returns its result. It holds only weak references to the dict
    and to the tensor that was made last, so it keeps neither of them alive."""
    last: tuple[weakref.ref[Any], weakref.ref[torch.Tensor]] | None = None

    def saved(state: dict[str, Any], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        nonlocal last
        tensor = last[1]() if last is not None and last[0]() is state else None
        if tensor is None:
            tensor = make()
            # torch's state dicts are of class OrderedDict. A plain dict cannot be weakly referenced, so tensors for a
            # plain dict are not kept.
            if isinstance(state, OrderedDict):
                last = weakref.ref(state), weakref.ref(tensor)
        return tensor

    return saved


class SharedTable:
    """Holds a table that one or more modules use, just as plain modules can share a parameter. If the table is loaded
    or moved, the new table replaces the old one in all of these modules. The table is ready for compiled code and for
    products.

    Attributes:
        weight: the table [rows, columns].
        requires_grad: requires_grad of the parameter that the table has replaced.
        transposed: whether the plain weight is [columns, rows], or a stack of such matrices.
        stacked: the leading dimensions of the plain weight, if it is a stack of matrices; the table then holds the rows
            of all matrices, matrix by matrix. (): it is a single matrix.
        stays: whether the table stays where it is when a module is moved.
        saved: makes the plain weight once for a `state_dict()` (see `made_once`).
    """

    def __init__(
        self,
        table: CompressedTensor,
        requires_grad: bool = False,
        transposed: bool = False,
        stacked: tuple[int, ...] = (),
        stays: bool = False,
    ) -> None:
        self.weight, self.requires_grad, self.saved = table, requires_grad, made_once()
        self.transposed, self.stacked, self.stays = transposed, stacked, stays

    @property
    def weight(self) -> CompressedTensor:
        return self._weight

    @weight.setter
    def weight(self, table: CompressedTensor) -> None:
        self._weight = table.prepare_linear()

    @property
    def coded_shape(self) -> torch.Size:
        """The shape that the table has in the result of `coded_state_dict`."""
        rows, columns = self.weight.shape
        return torch.Size((*self.stacked, rows // prod(self.stacked), columns))

    @property
    def plain_shape(self) -> torch.Size:
        """The shape of the plain weight."""
        *leading, rows, columns = self.coded_shape
        return torch.Size((*leading, columns, rows) if self.transposed else (*leading, rows, columns))

    def plain_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns decoded rows of the table in the shape of the plain weight. rows: all rows, or the rows of some
        complete matrices of a stack."""
        matrices = rows.view(-1, *self.coded_shape[1:]) if self.stacked else rows
        return matrices.mT.contiguous() if self.transposed else matrices

    @outside_of_modes()
    def decoded(self, device: torch.device) -> torch.Tensor:
        """Returns the plain weight on a device, in newly allocated memory."""
        return self.plain_of(self.weight.decompress(device=device))

    def plain_parameter(self, requires_grad: bool) -> torch.nn.Parameter:
        """Returns the plain weight as a parameter, in the memory where the table is.

        Raises:
            CorruptTableError: the table is damaged.
        """
        return torch.nn.Parameter(self.plain_of(self.weight.decompress(check=True)), requires_grad=requires_grad)

    def holder_of(self, table: CompressedTensor) -> SharedTable:
        """Returns a new holder for a copy of the table in other memory. The copy moves with its modules, even if this
        table stays."""
        return SharedTable(table, self.requires_grad, self.transposed, self.stacked)

    def __reduce__(self) -> tuple[type[SharedTable], tuple]:
        return SharedTable, (self.weight, self.requires_grad, self.transposed, self.stacked, self.stays)


class TableParameter(torch.nn.Parameter):
    """The parameter by which `parameters()` lists a weight whose rows are coded. Its shape, dtype and device are those
    of the plain weight, and it takes no memory in addition to the table.

    Functions of torch that read it decode the whole weight for the call. Functions that write to it, such as `copy_`,
    decode it and code the results. A view such as `parameter[0]` is a view of a decoded copy: writing to it does not
    change the weight.

    Never assign it to the `data` of a plain tensor: torch does not tell subclasses of such an assignment, and the
    tensor then has no memory, so that reading it crashes. Write `tensor.data = parameter.clone()`.

    A `TableParameter` never has a gradient. `requires_grad` is True if rows of the table train; their gradients are
    given to an optimizer of `ibp.optim`. If the table stays in host memory, `device` is the one that the module was
    moved to.

    Example:
        >>> linear = ibp.nn.Linear(ibp.compress(torch.ones(128, 64), device="cpu"))
        >>> weight = next(linear.parameters())
        >>> weight
        ibp.nn.TableParameter([128, 64], torch.float32, cpu)
        >>> weight.numel(), weight.sum(), weight.table is linear.weight
        (8192, tensor(8192.), True)

    Args:
        table: the table, or the holder that the parameter shares with modules.
        requires_grad: whether rows of the table train.
        device: the device that the parameter shows. None: the table's device.

    Attributes:
        table: the table that the modules use. It cannot be set.
    """

    __module__ = "ibp.nn"

    _shared: SharedTable
    _trains: bool

    def __new__(
        cls,
        table: CompressedTensor | SharedTable,
        requires_grad: bool = False,
        device: torch.device | None = None,
    ) -> TableParameter:
        shared = table if isinstance(table, SharedTable) else SharedTable(table)
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            shared.plain_shape,
            dtype=shared.weight.dtype,
            device=shared.weight.device if device is None else device,
            requires_grad=requires_grad,
        )
        made._shared, made._trains = shared, requires_grad
        return made

    @property
    def table(self) -> CompressedTensor:
        return self._shared.weight

    def show(self, device: torch.device | None = None) -> None:
        """Updates the shape, dtype and device that the parameter shows. Call it after the table has been replaced.
        device: the device to show. None: the table's device."""
        with torch._C.DisableTorchFunctionSubclass():
            self.data = TableParameter(self._shared, device=device)

    def decoded(self) -> torch.Tensor:
        """Returns the plain weight on the parameter's device, in newly allocated memory."""
        return self._shared.decoded(self.device)

    @torch.no_grad()
    @outside_of_modes()
    def _write(self, values: torch.Tensor) -> None:
        """Encodes values into the table, unless the table already has the same values bit for bit."""
        held = self.decoded()
        new = values.detach().to(held.device, held.dtype).expand_as(held).contiguous()
        if not torch.equal(bytes_of(held), bytes_of(new)):
            rows = rows_of(new, self._shared.transposed)
            table = self.table.update_(torch.arange(len(rows), device=rows.device), rows)
            # A matrix of level "fast" keeps its slot size, because the kernel of `ibp.linear` requires it.
            table.refit(slot_bytes=table.slot_bytes or None if is_fast(table) else None).prepare_linear()

    def _set_data(self, data: torch.Tensor) -> None:
        """Implements `parameter.data = data`. If data is a plain tensor, its values are coded into this parameter's
        table. If data is a TableParameter, its table replaces this parameter's table, unless this parameter's table has
        to stay in its memory; the values of data are then coded into that table."""
        if (data.shape, data.dtype) != (self.shape, self.dtype):
            raise self._refusal(f"of {self.dtype} cannot become {list(data.shape)} of {data.dtype}")
        if not isinstance(data, TableParameter):
            self._write(data)
        elif data.table is not self.table and self._shared.stays:
            self._write(data.decoded())
        elif data.table is not self.table:
            self._shared.weight = data.table
        self.show(data.device if self._shared.stays else None)

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"a coded weight {list(self.shape)} {what}: ibp.nn.decompress(model) gives a model plain weights"
        )

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(first, TableParameter):
            if function == _SETS_DATA:
                return first._set_data(args[1])
            if function in _ASKS_FOR_GRADIENTS and all((*args[1:], *kwargs.values())) and not first._trains:
                raise first._refusal("is fixed and cannot require grad")
            if function is torch.Tensor.__setitem__:
                values = first.decoded()
                values[args[1]] = args[2]
                return first._write(values)
            if function is torch.Tensor.share_memory_:
                first.table.share_memory_()
                return first
            if function in _READS_MEMORY:
                args = first.decoded(), *args[1:]
        elif function is torch.Tensor.set_:  # which would give a plain tensor the parameter's memory
            args = tree_map_only(TableParameter, TableParameter.decoded, args)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(first, TableParameter):
            if operation in _ALIASES:
                return TableParameter(first._shared, device=first.device)
            if operation is _aten.is_pinned.default:
                return first.table.is_pinned()
            if operation is _aten._pin_memory.default:
                return TableParameter(first._shared.holder_of(first.table.clone().pin_memory()), device=first.device)
            if operation is _aten.record_stream.default:
                for part in (first.table.slots, first.table.overflow, first.table.lengths, first.table.bases):
                    if part.is_cuda:
                        operation(part, *args[1:])
                return None
            if operation is _aten._to_copy.default and kwargs.get("dtype") in (None, first.dtype):
                device = kwargs.get("device") or first.device
                if device.type != "meta":
                    return first._moved(target_of(device, None, first.device))
        given = {each._shared: each for each in tree_leaves((args, kwargs)) if isinstance(each, TableParameter)}
        values = {shared: each.decoded() for shared, each in given.items()}  # one tensor for all aliases of a weight
        args, kwargs = tree_map_only(TableParameter, lambda each: values[each._shared], (args, kwargs))
        result = operation(*args, **kwargs)
        if not operation._schema.is_mutable:
            return result
        for shared, parameter in given.items():
            parameter._write(values[shared])
        written = {id(values[shared]): parameter for shared, parameter in given.items()}
        return tree_map_only(torch.Tensor, lambda tensor: written.get(id(tensor), tensor), result)

    def _moved(self, device: torch.device) -> TableParameter:
        """Returns a parameter for a copy of the table on a device, or for the table itself if it stays where it is."""
        shared = self._shared
        if shared.stays:
            return TableParameter(shared, device=device)
        return TableParameter(shared.holder_of(self.table.to(device, copy=True)), device=device)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        copied = memo[id(self)] = TableParameter(copy.deepcopy(self._shared, memo), self._trains, self.device)
        copied.requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[type[TableParameter], tuple]:
        return TableParameter, (self._shared, self._trains)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        trains = ", requires_grad=True" if self.requires_grad else ""
        return f"ibp.nn.TableParameter({list(self.shape)}, {self.dtype}, {self.device}{trains})"


# ---- weights and rows ----


def reshaped(table: CompressedTensor, shape: torch.Size) -> CompressedTensor:
    """Returns a table over the same memory, with the same rows, in another shape."""
    return with_tensors(table, lambda tensor: tensor, shape)


def by_rows(table: CompressedTensor) -> CompressedTensor:
    """Returns a table over the same memory whose items are its rows."""
    return reshaped(table, torch.Size((table.num_rows, table.row_bytes // table.dtype.itemsize)))


def rows_of(weight: torch.Tensor, turns: bool) -> torch.Tensor:
    """Returns the rows that the table of a plain weight (a matrix or a stack of matrices) is to have, as one contiguous
    matrix. turns: whether these rows are the columns of the weight's matrices."""
    matrices = weight.mT if turns else weight
    return matrices.reshape(-1, matrices.shape[-1]).contiguous()


def rows_of_weight(weight: torch.Tensor | CompressedTensor, turns: bool) -> torch.Tensor | CompressedTensor:
    """Returns the rows that a module's table is to have: a table if weight is a table with the same rows, otherwise a
    plain matrix.

    Args:
        weight: a matrix or a stack of matrices, plain or coded.
        turns: whether the rows are the columns of the weight's matrices.
    """
    columns = weight.shape[-1]
    if isinstance(weight, CompressedTensor):
        if weight.dim() == 2 and not turns:
            return weight
        if weight.row_bytes == columns * weight.dtype.itemsize and not turns:
            return by_rows(weight)
        weight = weight.decompress()
    return rows_of(weight, turns)


def placed_like(held: CompressedTensor, weight: CompressedTensor | torch.Tensor) -> CompressedTensor:
    """Returns a table of `weight` on the device of another table, `held`, and in pinned memory if `held` is pinned. A
    plain tensor is compressed with the layout and the level of `held`. If weight is a table, the result may share the
    memory of weight until one of the two changes."""
    if isinstance(weight, torch.Tensor):
        options: dict[str, Any] = {"layout": held.layout, "row_bytes": held.row_bytes}
        if is_fast(held):
            options |= {"level": "fast", "slot_bytes": held.slot_bytes or None}
        table = compress_rows(weight.detach(), **options, memory=None if weight.is_cuda else "host").to(held.device)
    else:
        table = weight.to(held.device)
        table = copy.copy(table) if table is weight else table
    if held.is_pinned():
        pin_if_possible(table)
    return table


def is_fast(table: CompressedTensor) -> bool:
    """Returns whether a table was coded at level "fast"."""
    return isinstance(table.codebook, PlanesCodebook) and table.codebook.first_symbol is not None
