"""All-gathers of torch's FSDP2 that travel coded.

The host waits for the first ones only. Before a later forward pass every rank codes what it will send, only to see
whether all rows have room, and the ranks tell each other in one small exchange. What has no room travels raw. All
messages of the pass say again whether they have lost rows; the host looks at that at the end of the forward pass and of
the backward pass, before anybody can use what was computed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._common.group import all_taking_part
from ._calls import AllGather
from ._codec import Codec, as_bytes
from ._exchange import movable
from ._links import raw_all_gather
from ._messages import MessageSlots, Part, Status, has_lost, on, spans_of, status_entries
from ._planning import RAW, CallOptions, Kind, Plan, State, state_of


def compress_all_gather(
    module: torch.nn.Module, *, codec: Codec | None = None, level: str = "auto", recurse: bool = True
) -> int:
    """Lets the all-gathers of FSDP2 travel coded, where that is faster. Training gives the same bits.

    Every module that `fully_shard` was called on has a codec of its own, which is learned at its first all-gather.
    Before later forward passes of `module`, ranks check together which modules' parameters fit into their messages.
    The host then does not wait for each all-gather: at the end of the forward pass and of the backward pass it checks
    whether all parameters did fit. If parameters are written in between to values that do not fit, that pass raises
    RuntimeError on all ranks.

    Example:
        >>> # on each rank of a group
        >>> from torch.distributed.fsdp import fully_shard
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
        >>> layers = [fully_shard(layer) for layer in model]
        >>> model = fully_shard(model)
        >>> ibp.distributed.compress_all_gather(model)  # the layers, and what is around them
        3

    Args:
        module: sharded by `torch.distributed.fsdp.fully_shard`, itself or parts of it.
        codec, level: as in `all_gather_into_tensor`.
        recurse: also the modules inside.

    Returns:
        How many modules there are.

    Raises:
        TypeError, ValueError: an argument is not as described, or nothing is sharded.
        RuntimeError: this torch has no `FSDPModule.set_custom_all_gather`.
    """
    options = CallOptions(codec, level, "")
    options.check()
    from torch.distributed.fsdp import FSDPModule  # here: not every build of torch has it

    if not hasattr(FSDPModule, "set_custom_all_gather"):
        raise RuntimeError(f"torch {torch.__version__} has no FSDPModule.set_custom_all_gather; 2.8 and later have")
    modules = module.named_modules() if recurse else [("", module)]
    sharded = [(name, one) for name, one in modules if isinstance(one, FSDPModule)]
    if not sharded:
        raise ValueError(f"{type(module).__name__} has no module that torch.distributed.fsdp.fully_shard was called on")
    for before in getattr(module, _HOOKS, ()):
        before.remove()
    rooms = Rooms([Shards(one, options._replace(name=name)) for name, one in sharded])
    for (_, one), mine in zip(sharded, rooms.shards):
        one.set_custom_all_gather(_comm_class()(rooms, mine))
    hooks = (
        module.register_forward_pre_hook(rooms.begin_forward, prepend=True),
        module.register_forward_hook(rooms.leave_forward, always_call=True),
        module.register_forward_hook(rooms.end_forward),
    )
    setattr(module, _HOOKS, hooks)
    return len(sharded)


_HOOKS = "_ibp_hooks"


class Shards:
    """What a rank sends of one module in all-gathers. The name of the module is the codec's: all modules have one of
    their own."""

    def __init__(self, module: Any, options: CallOptions) -> None:
        self.module, self.options = module, options
        self._group: weakref.ref[dist.ProcessGroup] | None = None  # which ends before the module, perhaps
        # kind, state, plan: of the last all-gather that was agreed on; None: there was none.
        self.kind: Kind | None = None
        self.state: State | None = None
        self.plan: Plan | None = None
        self.status: Status | None = None  # where all-gathers note lost rows if the host does not wait for them
        self.is_seen = False  # the rows were seen to have room before this pass, on all ranks
        self.is_raw = False  # they were not, and the codec is not learned anew

    def gather(
        self,
        is_watched: bool,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        """The all-gather. is_watched: whether the status is looked at before what was computed can be used."""
        if self._is_same(input_tensor, group):
            assert self.state is not None and self.kind is not None
            if self.is_raw or self.state.plans.get(self.kind) is RAW:
                raw = movable(output_tensor), movable(input_tensor)
                return raw_all_gather(*raw, group=group, async_op=async_op)
            if self.is_seen and is_watched:
                assert self.plan is not None
                call = AllGather(output_tensor, input_tensor, group, self.options)
                return call.coded(self.plan, async_op, self.status)  # `Rooms` looks at the status.
        self._note(input_tensor, group)
        # A coded call always returns work, because it may have to be repeated: FSDP waits for it when it needs the
        # parameters, and the host does so, too.
        return AllGather(output_tensor, input_tensor, group, self.options, is_known_to_fit=True).call(async_op)

    def _is_same(self, x: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """Whether `Rooms` has looked at a call like this one."""
        kind = self.kind
        if kind is None or group is not self.group() or (kind.numel, kind.dtype) != (x.numel(), x.dtype):
            return False
        return not (x.is_cuda and torch.cuda.is_current_stream_capturing())

    def group(self) -> dist.ProcessGroup | None:
        """That the all-gather was in."""
        return None if self._group is None else self._group()

    def _note(self, x: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Notes how the call is agreed on, where it is one that torch does of parameters as the optimizer has them."""
        torchs = self.torchs()
        if torchs is not None and torchs.is_sharded:
            self.plan, self.is_seen, self.is_raw = None, False, False
            self._group, self.state = weakref.ref(group), state_of(group)
            self.kind = self.options.kind_of("all_gather_into_tensor", x)

    def torchs(self) -> Any:
        """torch's group of the module's parameters; None: there are none or several, they are made by extensions or are
        on another device than they are gathered on, or this torch does not have what is looked at here."""
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
        """Whether an all-gather of the module was agreed on, and the next one is such a one. The same on all ranks."""
        self.plan, self.is_seen, self.is_raw = None, False, False
        if self.kind is None or self.state is None:
            return False
        plan, torchs = self.state.plans.get(self.kind), self.torchs()
        if plan is None or plan.codec is None or torchs is None or not torchs.is_sharded:
            return False
        self.plan = plan
        return True

    def code(self, slots: MessageSlots, status: Status) -> None:
        """Codes what the next all-gather sends, for the status."""
        assert self.plan is not None and self.kind is not None and self.state is not None
        self.status, inputs = status, _inputs_of(self.torchs())
        if sum(x.numel() for x in inputs) != self.kind.numel or any(x.dtype != self.kind.dtype for x in inputs):
            return  # a call of another kind, then, which is agreed on
        x = as_bytes(torch.cat(inputs) if len(inputs) > 1 else inputs[0])
        for k, span in enumerate(spans_of(x.numel(), self.plan.num_pieces)):
            messages = self.plan.messages_of([span.payload] * self.state.size, x.device)
            slot = slots.take(k, messages.num_bytes)
            messages.code(slot, Part(self.state.rank, x[span.bytes]), status, 0)

    def decide(self, is_lost: bool) -> None:
        """How all-gathers travel until the next forward pass. is_lost: rows had no room, on some rank."""
        assert self.plan is not None and self.kind is not None and self.state is not None
        self.is_seen = not is_lost
        if is_lost and self.plan.is_checked:
            self.state.forget(self.kind)
        self.is_raw = is_lost and not self.plan.is_checked  # with a codec that was given


class Rooms:
    """Sees before each forward pass which modules' parameters have room in their messages, on all ranks, and at the
    end of the pass whether all had, in fact.

    Whether the host waits for an all-gather is decided by what is the same on all ranks: what was seen before the pass,
    and whether a pass is under way.

    shards: of the modules."""

    def __init__(self, shards: Sequence[Shards]) -> None:
        self.shards = shards
        self._statuses: dict[State, tuple[torch.Tensor, list[Status]]] = {}  # of all modules, by process group
        self._depth = 0  # forward passes that are under way, one in the other
        self._backward = _NO_BACKWARD  # the last backward pass at whose end the host looks

    def is_watched(self) -> bool:
        """Whether the host looks at what was lost at the end of this pass; a backward pass is told to."""
        if self._depth:
            return True
        backward = _current_backward()
        if backward not in (_NO_BACKWARD, self._backward):
            torch.autograd.Variable._execution_engine.queue_callback(self.end_pass)
            self._backward = backward
        return backward != _NO_BACKWARD

    def begin_forward(self, module: torch.nn.Module, args: Any) -> None:
        """A collective call, where all-gathers travel coded. The host waits for it."""
        if torch.compiler.is_compiling():  # in a compiled net the host waits for each all-gather
            return
        self._depth += 1
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self._see()

    def leave_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Of a pass that has failed, too."""
        if not torch.compiler.is_compiling():
            self._depth = max(0, self._depth - 1)

    def end_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not (torch.compiler.is_compiling() or self._depth):
            self._look()

    def end_pass(self) -> None:
        """Of a backward pass: what was seen before does not hold for parameters that the optimizer writes."""
        for shard in self.shards:
            shard.is_seen = False
        self._look()

    @torch.no_grad()
    def _see(self) -> None:
        """What has room, in all groups."""
        groups: dict[State, list[int]] = {}
        for k, shard in enumerate(self.shards):
            if shard.is_known():
                assert shard.state is not None
                groups.setdefault(shard.state, []).append(k)
        for state, numbers in groups.items():
            device = self.shards[numbers[0]].torchs().device
            slots, (table, statuses) = state.slots(device), self._statuses_of(state, device)
            context = getattr(self.shards[0].module._get_fsdp_state(), "_state_ctx", None)
            event = getattr(context, "post_optim_event", None)
            if event is not None:  # the user has given FSDP it in place of the current stream
                torch.cuda.current_stream(device).wait_event(event)
            slots.begin()
            table.zero_()
            for k in numbers:
                self.shards[k].code(slots, statuses[k])
            flags = has_lost(table).to(torch.int64)
            with all_taking_part():
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.shards[numbers[0]].group())
            is_lost = flags.tolist()
            table.zero_()
            slots.end()
            for k in numbers:
                self.shards[k].decide(bool(is_lost[k]))

    def _look(self) -> None:
        """The host waits for the all-gathers of the pass. Every rank has every message, and so sees the same.
        RuntimeError: rows were lost: parameters were written after they were seen to have room."""
        names = []
        for state, (table, _) in self._statuses.items():
            slots = state.slots(table.device)
            with on(slots.side):  # the current stream has other work to do, which the host does not wait for
                slots.begin()
                flags = has_lost(table).tolist()
            names += [shard.options.name for shard, is_lost in zip(self.shards, flags) if is_lost]
        if names:
            raise RuntimeError(
                f"parameters of modules {names} were written between the begin of a forward pass and an all-gather, "
                "and rows of them were lost, so what the pass has computed is wrong: write them before the forward pass"
            )

    @torch.inference_mode(False)  # later passes write to them
    def _statuses_of(self, state: State, device: torch.device) -> tuple[torch.Tensor, list[Status]]:
        if state not in self._statuses:
            shape = len(self.shards), status_entries(state.size)
            table = torch.zeros(shape, dtype=torch.int64, device=device)
            self._statuses[state] = table, [Status(state.size, device, data=row) for row in table]
        return self._statuses[state]


# ---- what is torch's own -------------------------------------------------------------------------------------------

_NO_BACKWARD = -1
_OF_GROUPS = ("fsdp_params", "is_sharded", "device")  # what is looked at
_OF_PARAMETERS = ("offload_to_cpu", "_sharded_local_tensor")


def _has_all(what: Any, names: Sequence[str]) -> bool:
    return all(hasattr(what, name) for name in names)


def _current_backward() -> int:
    """A number of the backward pass that runs on this thread; _NO_BACKWARD: none, or this torch does not say."""
    return getattr(torch._C, "_current_graph_task_id", lambda: _NO_BACKWARD)()


@functools.cache
def _inputs_function() -> Any:
    """What gives the tensors that torch copies into an all-gather's input; None: this torch has another one."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    return getattr(_fsdp_collectives, "_get_param_all_gather_inputs", None)


def _inputs_of(group: Any) -> list[torch.Tensor]:
    """What torch copies into the input of a group's all-gather, one behind the other."""
    return [x for inputs in _inputs_function()(list(group.fsdp_params)) for x in inputs]


@functools.cache
def _comm_class() -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

    class CodedAllGather(AllGather):
        """What FSDP2 calls for the parameters of one module."""

        def __init__(self, rooms: Rooms, shards: Shards) -> None:
            super().__init__()
            self.rooms, self.shards = rooms, shards

        def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: dist.ProcessGroup,
            async_op: bool = False,
        ) -> dist.Work | None:
            return self.shards.gather(self.rooms.is_watched(), output_tensor, input_tensor, group, async_op)

    return CodedAllGather
