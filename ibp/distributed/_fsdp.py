"""Makes the all-gathers of torch's FSDP2 send coded tensors.

The host waits for the first all-gather of each module, but normally not for later all-gathers. Instead, before each
later forward pass, every rank codes the shards that it will send, to find out whether all rows fit in their messages.
The ranks share the results in one small all-reduce, for which the host waits. If the rows of a module's shards do not
fit, the shards travel raw, or their codec is learned anew. During the pass, coders and decoders record rows that did
not fit (lost rows) in a status for each module. The host reads these statuses at the end of the forward pass and of the
backward pass, before results can be used.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._common.wire import all_taking_part
from ._calls import AllGather
from ._links import RAW, CallOptions, GroupState, Kind, Plan, state_of
from ._messages import Codec, MessageBuffers, Status, as_bytes, has_lost, on, spans_of, status_entries


def compress_all_gather(
    module: torch.nn.Module, *, codec: Codec | None = None, level: str = "auto", recurse: bool = True
) -> int:
    """Makes FSDP2's all-gathers send coded tensors if that is faster. Training computes the same bits.

    Every module that `fully_shard` was called on has a separate codec, which is learned at the module's first
    all-gather. Before each later forward pass of `module`, the ranks check together which modules' parameters fit in
    their messages. The host then does not wait for each all-gather. At the end of the forward pass and of the backward
    pass, it checks whether all rows of the parameters fitted. If parameters were written after the first check, and
    some rows no longer fit, the pass raises RuntimeError on all ranks.

    Example:
        >>> # on each rank of a group
        >>> from torch.distributed.fsdp import fully_shard
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
        >>> layers = [fully_shard(layer) for layer in model]
        >>> model = fully_shard(model)
        >>> ibp.distributed.compress_all_gather(model)  # the two layers and the model itself
        3

    Args:
        module: a module. `torch.distributed.fsdp.fully_shard` must have been called on it or on some of its submodules.
        codec, level: as in `all_gather_into_tensor`.
        recurse: whether to change the submodules, too.

    Returns:
        The number of sharded modules that were changed.

    Raises:
        TypeError, ValueError: an argument is not as described, or no module is sharded.
        RuntimeError: this torch has no `FSDPModule.set_custom_all_gather`.
    """
    options = CallOptions(codec, level, "")
    options.check()
    from torch.distributed.fsdp import FSDPModule  # Imported here, because not every build of torch has this class.

    if not hasattr(FSDPModule, "set_custom_all_gather"):
        raise RuntimeError(f"torch {torch.__version__} has no FSDPModule.set_custom_all_gather; 2.8 and later have")
    modules = module.named_modules() if recurse else [("", module)]
    sharded = [(name, one) for name, one in modules if isinstance(one, FSDPModule)]
    if not sharded:
        raise ValueError(f"{type(module).__name__} has no module that torch.distributed.fsdp.fully_shard was called on")
    for before in getattr(module, _HOOKS, ()):
        before.remove()
    checks = FitChecks([(one, options._replace(name=name)) for name, one in sharded])
    for shards in checks.shards:
        shards.module.set_custom_all_gather(shards)
    hooks = (
        module.register_forward_pre_hook(checks.begin_forward, prepend=True),
        module.register_forward_hook(checks.leave_forward, always_call=True),
        module.register_forward_hook(checks.end_forward),
    )
    setattr(module, _HOOKS, hooks)
    return len(sharded)


_HOOKS = "_ibp_hooks"  # The attribute of a module that holds the handles of the module's hooks.


class Shards:
    """Holds this rank's shards of one module's parameters, and makes the all-gathers of the module. FSDP2 calls the
    object for each of them: it has the methods of `AllGather`, torch's class for custom all-gathers. It does not derive
    from that class, because some versions of torch lack it.

    Attributes:
        module: the module.
        options: how shards are coded. Their `name` is the name of the module, so that the module has its own codec.
        kind, state: the kind of the last all-gather for which the ranks compared their calls, and the state of its
            group. Both are None if there was no such all-gather.
        plan: the plan by which the shards were coded in the check before this pass. None: the shards were not checked.
        status: the status in which lost rows are recorded if the host does not wait for all-gathers.
        fits: whether the check before this pass has found that all rows of all ranks have room.
        is_raw: whether shards travel raw in this pass. This is the case if the check has found rows without room, and
            the codec cannot be learned anew, because the user gave it.

    Args:
        checks: the checks that are made before and after each pass.
    """

    def __init__(self, module: Any, options: CallOptions, checks: FitChecks) -> None:
        self.module, self.options, self._checks = module, options, checks
        self._group: weakref.ref[dist.ProcessGroup] | None = None  # The group may be freed before the module.
        self.kind: Kind | None = None
        self.state: GroupState | None = None
        self.plan: Plan | None = None
        self.status: Status | None = None
        self.fits = self.is_raw = False

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates a tensor for an all-gather of FSDP."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Makes an all-gather for FSDP. The check before the pass has decided how: raw, coded without the host waiting,
        or by `AllGather.call`. Returns work, or None once the call is done."""
        is_watched = self._checks.is_watched()
        call = AllGather(output_tensor, input_tensor, group, self.options, is_known_to_fit=True)
        if self._is_same(input_tensor, group):
            assert self.state is not None and self.kind is not None
            if self.is_raw or self.state.plans.get(self.kind) is RAW:
                return call.raw(async_op)
            if self.fits and is_watched:
                assert self.plan is not None
                return call.coded(self.plan, async_op, self.status)
        self._note(input_tensor, group)
        # A coded call returns work even if async_op is not set. FSDP waits for the work only when it needs the
        # parameters.
        return call.call(async_op)

    def _is_same(self, x: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """Returns whether an all-gather of x is the call that the check before this pass was made for. It is if the
        kind and the group are the same, and no CUDA graph is being captured."""
        kind = self.kind
        if kind is None or group is not self.group() or (kind.numel, kind.dtype) != (x.numel(), x.dtype):
            return False
        return not (x.is_cuda and torch.cuda.is_current_stream_capturing())

    def group(self) -> dist.ProcessGroup | None:
        """Returns the group of the last all-gather for which the ranks compared their calls. Returns None if there was
        no such all-gather, or if the group no longer exists."""
        return None if self._group is None else self._group()

    def _note(self, x: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Records the kind and the group of a call if the call gathers the shards that the optimizer updates. After a
        forward pass FSDP may reshard to a smaller group; calls that gather those shards are not recorded."""
        torchs = self.torchs()
        if torchs is not None and torchs.is_sharded:
            self.plan, self.fits, self.is_raw = None, False, False
            self._group, self.state = weakref.ref(group), state_of(group)
            self.kind = self.options.kind_of("all_gather_into_tensor", x)

    def torchs(self) -> Any:
        """Returns torch's object for the module's parameters (`FSDPParamGroup`).

        Returns None if the module has no such object or several of them, if an extension (`fsdp_pre_all_gather`) makes
        the input of the all-gather, if parameters are offloaded to the CPU, or if this torch lacks an attribute that
        this file reads."""
        state = getattr(self.module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None)
        groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
        if len(groups) != 1 or _inputs_function() is None or not _has_all(groups[0], _OF_GROUPS):
            return None
        for param in groups[0].fsdp_params:
            if not _has_all(param, _OF_PARAMETERS) or param.offload_to_cpu:
                return None
            if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
                return None
        return groups[0]

    def is_known(self) -> bool:
        """Discards the decision for the previous pass. Returns whether the next forward pass may gather the module's
        parameters in coded form. It may if the ranks have agreed to code the module's all-gathers, and the parameters
        are sharded. All ranks return the same value."""
        self.plan, self.fits, self.is_raw = None, False, False
        if self.kind is None or self.state is None:
            return False
        plan, torchs = self.state.plans.get(self.kind), self.torchs()
        if plan is None or plan.codec is None or torchs is None or not torchs.is_sharded:
            return False
        self.plan = plan
        return True

    def code(self, buffers: MessageBuffers, status: Status) -> None:
        """Encodes the shards of the next all-gather in advance, and discards the messages. The status records the rows
        that have no room."""
        assert self.plan is not None and self.kind is not None and self.state is not None
        self.status, inputs = status, _inputs_of(self.torchs())
        if sum(x.numel() for x in inputs) != self.kind.numel or any(x.dtype != self.kind.dtype for x in inputs):
            # The next all-gather will be of another kind, and the ranks will then compare their calls and make a plan.
            return
        x = as_bytes(torch.cat(inputs) if len(inputs) > 1 else inputs[0])
        for k, span in enumerate(spans_of(x.numel(), self.plan.num_pieces)):
            messages = self.plan.messages_of([len(span)] * self.state.size, x.device)
            buffer = buffers.take(k, messages.num_bytes)
            messages.code(buffer, self.state.rank, x[span.start : span.stop], status, 0)

    def decide(self, is_lost: bool) -> None:
        """Decides how all-gathers travel until the next forward pass.

        Args:
            is_lost: whether rows had no room on any rank.
        """
        assert self.plan is not None and self.kind is not None and self.state is not None
        self.fits = not is_lost
        if is_lost and self.plan.is_checked:
            self.state.forget(self.kind)
        self.is_raw = is_lost and not self.plan.is_checked


class FitChecks:
    """Checks whether the parameters of all modules fit in their messages on all ranks. The check is made before each
    forward pass, and again at the end of each forward pass and each backward pass.

    For each all-gather, either the hosts of all ranks wait, or none of them does. They decide this from facts that are
    the same on all ranks: the result of the check before the pass, and whether a pass is under way.

    Args:
        modules: (a module, how its shards are coded) for each module.

    Attributes:
        shards: the shards of each module.
    """

    def __init__(self, modules: Sequence[tuple[Any, CallOptions]]) -> None:
        self.shards = [Shards(module, options, self) for module, options in modules]
        # For each process group: (a tensor [modules, entries] that holds the statuses of all modules; the statuses,
        # which are views of its rows).
        self._statuses: dict[GroupState, tuple[torch.Tensor, list[Status]]] = {}
        # Whether a forward pass has begun and not ended. A pass that was interrupted does not end, because torch calls
        # no hooks then. So this is set anew by each pass, instead of being counted.
        self._is_in_forward = False
        self._backward = _NO_BACKWARD  # The number of the last backward pass for which `end_pass` was registered.

    def is_watched(self) -> bool:
        """Returns whether a forward or backward pass is under way. If so, the host will read the statuses at the end of
        the pass. If a backward pass is under way, registers `end_pass` as a callback that runs at its end."""
        backward = _current_backward()
        if backward not in (_NO_BACKWARD, self._backward):
            torch.autograd.Variable._execution_engine.queue_callback(self.end_pass)
            self._backward = backward
        return self._is_in_forward or backward != _NO_BACKWARD

    def begin_forward(self, module: torch.nn.Module, args: Any) -> None:
        """Checks which modules' parameters fit in their messages. If all-gathers travel coded, this is a collective
        call, and the host waits for it."""
        if torch.compiler.is_compiling():  # In a compiled module the host waits for each all-gather.
            return
        self._is_in_forward = True
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self._check_before()

    def leave_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Records that a forward pass has ended. If passes are nested, the all-gathers after the inner pass make the
        host wait. Torch calls this hook even if the pass has raised an error, unless it was interrupted."""
        if not torch.compiler.is_compiling():
            self._is_in_forward = False

    def end_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """At the end of a forward pass, checks the statuses of the all-gathers."""
        if not torch.compiler.is_compiling():
            self._check_after()

    def end_pass(self) -> None:
        """At the end of a backward pass, reads the statuses. Discards the result of the check that was made before the
        forward pass, because the optimizer changes the parameters next."""
        for shard in self.shards:
            shard.fits = False
        self._check_after()

    @torch.no_grad()
    def _check_before(self) -> None:
        """Makes the check before a forward pass, in all process groups, and decides how the all-gathers of each module
        travel. A collective call."""
        groups: dict[GroupState, list[int]] = {}
        for k, shard in enumerate(self.shards):
            if shard.is_known():
                assert shard.state is not None
                groups.setdefault(shard.state, []).append(k)
        for state, numbers in groups.items():
            device = self.shards[numbers[0]].torchs().device
            buffers, (table, statuses) = state.buffers(device), self._statuses_of(state, device)
            context = getattr(self.shards[0].module._get_fsdp_state(), "_state_ctx", None)
            event = getattr(context, "post_optim_event", None)
            if event is not None:  # The user told FSDP to wait for this event instead of the current stream.
                torch.cuda.current_stream(device).wait_event(event)
            buffers.begin()
            table.zero_()
            for k in numbers:
                self.shards[k].code(buffers, statuses[k])
            flags = has_lost(table).to(torch.int64)
            with all_taking_part():
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.shards[numbers[0]].group())
            is_lost = flags.tolist()
            table.zero_()
            buffers.end()
            for k in numbers:
                self.shards[k].decide(bool(is_lost[k]))

    def _check_after(self) -> None:
        """Waits for the all-gathers of the pass, and reads their statuses. All ranks get the same result, because each
        rank gets every message.

        Raises:
            RuntimeError: rows were lost, because parameters were written after the check before the pass.
        """
        names = []
        for state, (table, _) in self._statuses.items():
            buffers = state.buffers(table.device)
            with on(buffers.side):  # So the host waits only for all-gathers, not for the work on the current stream.
                buffers.begin()
                flags = has_lost(table).tolist()
            names += [shard.options.name for shard, is_lost in zip(self.shards, flags) if is_lost]
        if names:
            raise RuntimeError(
                f"parameters of modules {names} were written between the start of a forward pass and an all-gather, "
                "and rows of them were lost, so what the pass has computed is wrong: write them before the forward pass"
            )

    @torch.inference_mode(False)  # Later passes write to the memory.
    def _statuses_of(self, state: GroupState, device: torch.device) -> tuple[torch.Tensor, list[Status]]:
        """Returns (the tensor that holds the statuses of all modules in a process group; these statuses)."""
        if state not in self._statuses:
            shape = len(self.shards), status_entries(state.size)
            table = torch.zeros(shape, dtype=torch.int64, device=device)
            self._statuses[state] = table, [Status(state.size, device, data=row) for row in table]
        return self._statuses[state]


# ---- private parts of torch ----------------------------------------------------------------------------------------

_NO_BACKWARD = -1  # The number that torch returns if no backward pass is running.
# Private attributes of torch's FSDPParamGroup and FSDPParam that this file uses.
_OF_GROUPS = ("fsdp_params", "is_sharded", "device")
_OF_PARAMETERS = ("offload_to_cpu", "_sharded_local_tensor")


def _has_all(what: Any, names: Sequence[str]) -> bool:
    return all(hasattr(what, name) for name in names)


def _current_backward() -> int:
    """Returns the number of the backward pass that is running on this thread. Returns _NO_BACKWARD if none is running,
    or if this torch lacks the function that tells the number."""
    return getattr(torch._C, "_current_graph_task_id", lambda: _NO_BACKWARD)()


@functools.cache
def _inputs_function() -> Any:
    """Returns torch's function that lists the tensors of an all-gather's input, or None if this torch has no such
    function."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    return getattr(_fsdp_collectives, "_get_param_all_gather_inputs", None)


def _inputs_of(group: Any) -> list[torch.Tensor]:
    """Returns the tensors that torch copies into the input of an all-gather, in the order in which it copies them."""
    return [x for inputs in _inputs_function()(list(group.fsdp_params)) for x in inputs]
