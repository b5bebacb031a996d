"""Optimizers that train the rows of compressed tables: those of `ibp.nn.Embedding`, `EmbeddingBag` and
`EmbeddingCollection`.

ibp.optim.SGD, Adagrad, RowWiseAdagrad   change the rows that were looked up
ibp.optim.average_gradients              averages the gradients of such rows over the processes of a group

    optimizer = ibp.optim.RowWiseAdagrad(model, lr=0.05)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

They are used like torch's optimizers and work with its learning-rate schedulers. A step reads and writes only the rows
that were looked up since `zero_grad()`. All other parameters need an optimizer of torch in addition. Call `zero_grad()`
of the optimizer to drop the gradients of rows; `zero_grad()` of a module does not drop them, because the gradients of
rows are not gradients of the module's parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ._common.modes import outside_of_graphs
from ._common.process import published
from ._common.wire import RankGroup
from ._tables.changes import put_items
from ._tables.compressed_tensor import CompressedTensor, compress_rows
from .nn._embedding import RowGradient, RowsModule, summed
from .nn._parameters import placed_like

__all__ = ["SGD", "Adagrad", "RowWiseAdagrad", "average_gradients"]

# On the CPU, tensors are padded to a multiple of this number of elements, because torch's loops round the last few
# elements of a tensor differently.
_VECTOR_ELEMENTS = 64
_GIVE_MODULES = "give the module itself, as in ibp.optim.SGD(model), because its parameters() have no gradients"
# Number of equal rows that `_constant_like` compresses as a sample: enough for their table to be smaller than the rows.
_CONSTANT_ROWS = 1024


class RowOptimizer(torch.optim.Optimizer):
    """The common base of the optimizers. Parameter groups hold a stand-in, an empty tensor, for each module with
    rows."""

    def __init__(self, modules: Any, defaults: dict[str, Any]) -> None:
        for name, value in defaults.items():
            if not float(value) >= 0:
                raise ValueError(f"{name} is {value}; wanted at least 0")
        self._modules: dict[torch.Tensor, RowsModule] = {}
        super().__init__(_listed(modules), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds modules to the optimizer as a group with its own options.

        Args:
            param_group: {"params": a module or several modules, and options}.

        Raises:
            TypeError, ValueError: an entry is not a module, has no rows to train, or has rows that the optimizer
                already has.
        """
        found = _row_modules(param_group["params"])
        held = set(self._modules.values())
        if any(module in held for module in found):
            raise ValueError("a module is in the optimizer already")
        stand_ins = {torch.empty(0, dtype=torch.float32, device="cpu"): module for module in found}
        self._modules.update(stand_ins)
        super().add_param_group({**param_group, "params": list(stand_ins)})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all rows. set_to_none: as in torch; both values have the same effect here."""
        for module in self._modules.values():
            module.drop_gradients()

    @outside_of_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the rows that have gradients, and writes them to their tables or caches.

        Args:
            closure: a function that computes the loss again, with gradients, and returns it.

        Returns:
            What closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for stand_in in group["params"]:
                module = self._modules[stand_in]
                gradient = module.row_gradient()
                if gradient is not None and gradient.ids.numel():
                    self._update(module, gradient, group, self.state[stand_in])
        return loss

    def _update(self, module: RowsModule, gradient: RowGradient, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Computes and writes the new values of the rows of a gradient, and the new state of these rows."""
        raise NotImplementedError

    def _loaded_state(self, module: RowsModule, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns the optimizer's state of a module, made from a saved state. Raises ValueError if the saved state does
        not fit."""
        if saved:
            raise ValueError(f"the state has {sorted(saved)}; wanted none")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads options and states that `state_dict()` returned, for the same number of modules in the same order.

        Raises:
            ValueError: groups or states do not match those of this optimizer. Nothing has changed then.
        """
        saved_groups = state_dict["param_groups"]
        sizes, saved_sizes = (
            [len(group["params"]) for group in groups] for groups in (self.param_groups, saved_groups)
        )
        if sizes != saved_sizes:
            raise ValueError(f"the state is of groups of {saved_sizes} modules; wanted {sizes}")
        state, groups = {}, []
        for group, saved_group in zip(self.param_groups, saved_groups):
            groups.append({**copy.deepcopy(saved_group), "params": group["params"]})
            for stand_in, key in zip(group["params"], saved_group["params"]):
                if key in state_dict["state"]:
                    state[stand_in] = self._loaded_state(self._modules[stand_in], state_dict["state"][key])
        self.state.clear()
        self.state.update(state)
        self.param_groups[:] = groups


class SGD(RowOptimizer):
    """Stochastic gradient descent: w -= lr * grad.

    On the CPU, rows have the same bits as with torch.optim.SGD. Without weight decay, this holds even for rows that no
    forward pass has looked up.

    Example:
        >>> embedding = ibp.nn.Embedding(ibp.compress(torch.zeros(1000, 64), device="cpu"), trainable=True)
        >>> optimizer = ibp.optim.SGD(embedding, lr=0.5)
        >>> embedding(torch.tensor([3])).sum().backward()
        >>> optimizer.step()
        >>> embedding(torch.tensor([3, 4]))[:, 0].tolist()
        [-0.5, 0.0]

    Args:
        modules: a module, several modules, or dicts of "params" and options. All modules of `ibp.nn` in them whose rows
            train are optimized.
        lr: the learning rate.
        weight_decay: if a row has a gradient, this factor times the row is added to the gradient.

    Raises:
        TypeError, ValueError: a module has no rows to train, or an option is negative.
    """

    def __init__(self, modules: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(modules, {"lr": lr, "weight_decay": weight_decay})

    def _update(self, module: RowsModule, gradient: RowGradient, group: dict[str, Any], state: dict[str, Any]) -> None:
        rows, grad = (_whole_vectors(part) for part in (gradient.rows, gradient.grad))
        changed = rows.add(_decayed(grad, rows, group["weight_decay"]), alpha=-group["lr"])
        module.write_rows(gradient.ids, changed[: gradient.rows.numel()].view_as(gradient.rows))


class Adagrad(RowOptimizer):
    """Adagrad with a state for each weight (Duchi, Hazan and Singer, 2011): sum += grad^2,
    w -= lr / (1 + step * lr_decay) * grad / (sqrt(sum) + eps).

    On the CPU, rows have the same bits as with torch.optim.Adagrad. Without weight decay, this holds even for rows that
    no forward pass has looked up. The states are a table with the weights' dtype, in the same kind of memory as the
    weights. The state of a row that has not trained takes bytes only in the table's index; the state of any other row
    takes its uncompressed size until `refit`.

    Example:
        >>> embedding = ibp.nn.Embedding(ibp.compress(torch.zeros(1000, 64), device="cpu"), trainable=True)
        >>> optimizer = ibp.optim.Adagrad(embedding, lr=0.5)
        >>> embedding(torch.tensor([3])).sum().backward()
        >>> optimizer.step()
        >>> embedding(torch.tensor([3, 4]))[:, 0].tolist()
        [-0.5, 0.0]

    Args:
        modules, weight_decay: as in `SGD`.
        lr: the learning rate.
        lr_decay: the learning rate is lr / (1 + step * lr_decay), where step is the number of earlier steps in which
            the module had gradients.
        initial_accumulator_value: the initial value of sum.
        eps: added to the denominator.

    Raises:
        TypeError, ValueError: as in `SGD`.
    """

    def __init__(
        self,
        modules: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        super().__init__(
            modules,
            {
                "lr": lr,
                "lr_decay": lr_decay,
                "weight_decay": weight_decay,
                "initial_accumulator_value": initial_accumulator_value,
                "eps": eps,
            },
        )

    def refit(self, **options: Any) -> None:
        """Compresses all states again. options: arguments of `CompressedTensor.refit`."""
        for state in self.state.values():
            state["sum"].refit(**options)

    def _update(self, module: RowsModule, gradient: RowGradient, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, sum=_constant_like(module.weight, group["initial_accumulator_value"]))
        sums: CompressedTensor = state["sum"]
        grad = _decayed(_whole_vectors(gradient.grad), _whole_vectors(gradient.rows), group["weight_decay"])
        grad = grad[: gradient.rows.numel()].view_as(gradient.rows)
        new_sums = sums.index_select(gradient.ids).addcmul_(grad, grad, value=1)
        lr = group["lr"] / (1 + state["step"] * group["lr_decay"])
        changed = gradient.rows.addcdiv(grad, new_sums.sqrt().add_(group["eps"]), value=-lr)
        module.write_rows(gradient.ids, changed)
        put_items(sums, gradient.ids, new_sums)
        state["step"] += 1

    def _loaded_state(self, module: RowsModule, saved: dict[str, Any]) -> dict[str, Any]:
        sums = _checked(saved, module.weight.shape, module.weight.dtype)
        return {"step": int(saved["step"]), "sum": placed_like(module.weight, sums)}


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one state for each row, as in FBGEMM's exact row-wise Adagrad: sum += mean(grad^2), w -= lr * grad /
    (sqrt(sum) + eps). New weights are computed in float32 and rounded once.

    The states are a float32 tensor, 4 bytes per row, on the device that trains.

    Example:
        >>> embedding = ibp.nn.Embedding(ibp.compress(torch.zeros(1000, 64), device="cpu"), trainable=True)
        >>> optimizer = ibp.optim.RowWiseAdagrad(embedding, lr=0.5)
        >>> embedding(torch.tensor([3])).sum().backward()
        >>> optimizer.step()
        >>> embedding(torch.tensor([3, 4]))[:, 0].tolist()
        [-0.5, 0.0]

    Args:
        modules, weight_decay: as in `SGD`.
        lr: the learning rate.
        eps: added to the denominator.

    Raises:
        TypeError, ValueError: as in `SGD`.
    """

    def __init__(self, modules: Any, lr: float = 1e-2, eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        super().__init__(modules, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def _update(self, module: RowsModule, gradient: RowGradient, group: dict[str, Any], state: dict[str, Any]) -> None:
        ids = gradient.ids
        sums = state.get("sum")
        if sums is None:
            sums = torch.zeros(module.num_embeddings, dtype=torch.float32, device=ids.device)
        elif sums.device != ids.device:
            sums = sums.to(ids.device)
        grad = gradient.grad
        if group["weight_decay"]:
            grad = torch.add(grad.float(), gradient.rows, alpha=group["weight_decay"])
        new_sums = sums[ids] + torch.linalg.vector_norm(grad, dim=1, dtype=torch.float32).square() / grad.shape[1]
        rate = group["lr"] / (new_sums.sqrt() + group["eps"])
        changed = torch.empty_like(gradient.rows)
        torch.addcmul(gradient.rows, rate[:, None], grad, value=-1, out=changed)  # in float32, rounded once
        module.write_rows(ids, changed)
        sums[ids] = new_sums
        state["sum"] = sums

    def _loaded_state(self, module: RowsModule, saved: dict[str, Any]) -> dict[str, Any]:
        sums = _checked(saved, module.weight.shape[:1], torch.float32)
        return {"sum": sums.clone()}


def average_gradients(modules: Any, group: dist.ProcessGroup | None = None) -> None:
    """Averages the gradients of rows over the processes of a group, as DistributedDataParallel does for parameters.
    Every process of the group must call it between `backward()` and `step()`.

    Each process has its own copy of the module. If all copies begin with the same rows, their rows are bit-identical
    after every step, because every process adds up the gradients of a row in the order of the ranks.

    Example:
        >>> # on each rank of a group
        >>> embedding = ibp.nn.Embedding(ibp.compress(torch.zeros(1000, 64), device="cpu"), trainable=True)
        >>> (embedding(torch.tensor([3])).sum() * torch.distributed.get_rank()).backward()
        >>> ibp.optim.average_gradients(embedding)  # of two ranks: the mean of 0 and 1
        >>> ibp.optim.SGD(embedding, lr=0.5).step()
        >>> embedding(torch.tensor([3]))[0, 0].item()
        -0.25

    Args:
        modules: as in the optimizers, in the same order on all ranks.
        group: a process group of torch.distributed. None: the default group.

    Raises:
        TypeError, ValueError: a module has no rows to train.
        RuntimeError: torch.distributed is not initialised, or a rank has failed.
    """
    for module in _row_modules(modules):
        _average(module, group)


def _average(module: RowsModule, group: dist.ProcessGroup | None) -> None:
    own, members = module.row_gradient(), RankGroup(group)
    if own is None:
        ids = torch.empty(0, dtype=torch.int64, device=members.device)
        grad = torch.empty(0, module.embedding_dim, dtype=module.weight.dtype, device=members.device)
    else:
        ids, grad = own.ids, own.grad / members.size
    count = torch.tensor([ids.numel()], dtype=torch.int64, device=members.device)
    counts = list(map(int, members.gathered(count)))
    if not max(counts):
        return
    all_ids, all_grads = (
        [part[:count] for part, count in zip(members.gathered(_padded(of.to(members.device), max(counts))), counts)]
        for of in (ids, grad)
    )
    union, total, _ = summed(all_ids, all_grads)
    module.set_gradient(union.to(ids.device), total.to(ids.device))


def _padded(part: torch.Tensor, num_rows: int) -> torch.Tensor:
    padded = part.new_zeros(num_rows, *part.shape[1:])
    padded[: len(part)] = part
    return padded


def _listed(modules: Any) -> list[Any]:
    """Returns the argument `modules` of an optimizer as a list. Raises ValueError if it is empty."""
    listed = [modules] if isinstance(modules, torch.nn.Module) else list(modules)
    if not listed:
        raise ValueError(f"there are no modules: {_GIVE_MODULES}")
    return listed


def _row_modules(modules: Any) -> list[RowsModule]:
    """Returns the modules whose rows train, among the given modules and their submodules, each once and in order.
    Raises ValueError if a given module contains no such module."""
    found: dict[RowsModule, None] = {}
    for module in _listed(modules):
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"params has a {type(module).__name__}; wanted modules: {_GIVE_MODULES}")
        own = [part for part in module.modules() if isinstance(part, RowsModule) and part.trainable]
        if not own:
            raise ValueError(f"a {type(module).__name__} has no ibp.nn module that trains: make it with trainable=True")
        found.update(dict.fromkeys(own))
    return list(found)


def _decayed(grad: torch.Tensor, rows: torch.Tensor, weight_decay: float) -> torch.Tensor:
    return grad.add(rows, alpha=weight_decay) if weight_decay else grad


def _whole_vectors(rows: torch.Tensor) -> torch.Tensor:
    """Returns the elements of rows as a tensor of one dimension. On the CPU, the tensor is padded with zeros to a
    multiple of _VECTOR_ELEMENTS, so that every element is rounded as it would be in a large tensor."""
    flat = rows.reshape(-1)
    rest = -flat.numel() % _VECTOR_ELEMENTS if flat.device.type == "cpu" else 0
    return torch.nn.functional.pad(flat, (0, rest)) if rest else flat


def _constant_like(weight: CompressedTensor, value: float) -> CompressedTensor:
    """Returns a table whose elements are all `value`. It has the shape of the table `weight`, and is in the same kind
    of memory. All of its rows are default rows, which take no bytes outside of the index."""
    block = torch.full((_CONSTANT_ROWS, weight.shape[1]), value, dtype=weight.dtype, device="cpu")
    one = compress_rows(block, layout="packed", scheme="planes", device="cpu", memory="host")
    num_rows = weight.num_rows
    lengths = one.lengths[:1].view(torch.int16).expand(num_rows).clone().view(torch.uint16)
    bases = torch.zeros(-(-num_rows // 32), dtype=torch.int64, device="cpu")
    geometry, parts = replace(one.geometry, shape=weight.shape), (one.slots, one.codebook, lengths, one.overflow, bases)
    return placed_like(weight, CompressedTensor.of_parts(geometry, one.scheme, 0, *parts))


def _checked(saved: dict[str, Any], shape: Iterable[int], dtype: torch.dtype) -> Any:
    """Returns the entry `sum` of a saved state, which is a tensor or a table. Raises ValueError if it is missing or has
    another shape or dtype."""
    sums = saved.get("sum")
    if not isinstance(sums, (torch.Tensor, CompressedTensor)):
        raise ValueError(f"the state's sum is a {type(sums).__name__}; wanted a tensor or a table")
    if tuple(sums.shape) != tuple(shape) or sums.dtype != dtype:
        raise ValueError(f"the state's sum is {sums.dtype} {list(sums.shape)}; wanted {dtype} {list(shape)}")
    return sums


def __getattr__(name: str) -> NoReturn:
    if name in ("Adam", "AdamW", "Usage"):
        raise AttributeError(
            f"ibp.optim.{name} was removed: use torch.optim.Adam or AdamW with fused=True, which give the same bits "
            "and load the same state_dict(); if their states take too much memory, shard them by FSDP, or use "
            "bitsandbytes' 8-bit optimizers"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__dir__ = published(__name__)
