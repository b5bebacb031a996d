"""All-gathers of torch's FSDP2 that travel coded.

The host waits for the first ones only. Before a later forward pass every rank codes what it will send, only to see
whether all rows have room, and the ranks tell each other in one small exchange. What has no room travels raw.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._group import all_taking_part
from .calls import check_options, copy_own, finished, gather, gathering, kind_of, messages_of, movable, run
from .codec import Codec, as_bytes
from .links import raw_all_gather
from .messages import Part, Status, lost_and_missing, spans_of, status_entries
from .planning import RAW, Kind, Plan, State, state_of
from .staging import Staging, on


def compress_all_gather(
    module: torch.nn.Module, *, codec: Codec | None = None, level: str = "auto", recurse: bool = True
) -> int:
    """See `ibp.distributed.compress_all_gather`."""
    check_options(codec, level)
    from torch.distributed.fsdp import FSDPModule  # here: not every build of torch has it

    if not hasattr(FSDPModule, "set_custom_all_gather"):
        raise RuntimeError(f"torch {torch.__version__} has no FSDPModule.set_custom_all_gather; 2.8 and later have")
    modules = module.named_modules() if recurse else [("", module)]
    sharded = [(name, one) for name, one in modules if isinstance(one, FSDPModule)]
    if not sharded:
        raise ValueError(f"{type(module).__name__} has no module that torch.distributed.fsdp.fully_shard was called on")
    shards = [Shards(one, codec, level, name) for name, one in sharded]
    for (_, one), mine in zip(sharded, shards):
        one.set_custom_all_gather(_comm_class()(mine))
    before = getattr(module, _HOOK, None)
    if before is not None:
        before.remove()
    hook = module.register_forward_pre_hook(functools.partial(_before_forward, Rooms(shards)), prepend=True)
    setattr(module, _HOOK, hook)
    return len(sharded)


_HOOK = "_ibp_before_forward"


def _before_forward(rooms: Rooms, module: torch.nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():  # in a compiled net the host waits for each all-gather
        rooms.check()


class Shards:
    """What a rank sends of one module in all-gathers. The name of the module is the codec's: all modules have one of
    their own.

    Attributes:
        kind, state, plan: of the last all-gather that was agreed on; None: there was none.
        status: where all-gathers that are not waited for note what is lost.
        versions: of the parameters when their rows were seen to have room, on all ranks; None: they were not.
        is_raw: rows had no room before this forward pass, on some rank.
    """

    def __init__(self, module: Any, codec: Codec | None, level: str, name: str) -> None:
        self.module, self.codec, self.level, self.name = module, codec, level, name
        self.kind: Kind | None = None
        self._group: weakref.ref[dist.ProcessGroup] | None = None  # which ends before the module, perhaps
        self.state: State | None = None
        self.plan: Plan | None = None
        self.status: Status | None = None
        self.versions: tuple[int, ...] | None = None
        self.is_raw = False

    def gather(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        """The all-gather."""
        if self._is_same(input_tensor, group):
            assert self.state is not None and self.kind is not None
            if self.is_raw or self.state.plans.get(self.kind) is RAW:
                raw = movable(output_tensor), movable(input_tensor)
                return raw_all_gather(*raw, group=group, async_op=async_op)
            if self.versions is not None and self.versions == self._versions():
                assert self.plan is not None
                job = gathering(self.plan, self.state, group, output_tensor, input_tensor, _no_repair, self.status)
                work = run(job, self.state, async_op)
                copy_own(output_tensor, input_tensor, self.state)
                return finished(work, async_op)
        self._note(input_tensor, group)
        # Of a call that may have to be repeated always work: FSDP waits for it when it needs the parameters, and so
        # does the host.
        options: dict[str, Any] = {"codec": self.codec, "level": self.level, "name": self.name}
        return gather(output_tensor, input_tensor, group, async_op, True, is_known_to_fit=True, **options)

    def _is_same(self, x: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """Whether the call is one of those that `Rooms` has looked at."""
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
            self.versions, self.plan, self.is_raw = None, None, False
            self._group, self.state = weakref.ref(group), state_of(group)
            self.kind = kind_of("all_gather_into_tensor", x, self.codec, self.level, self.name)

    def torchs(self) -> Any:
        """torch's group of the module's parameters; None: there are none or several, they are made by extensions, or
        are on another device than they are gathered on."""
        state = self.module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        groups = [state._fsdp_param_group] if groups is None else groups
        if len(groups) != 1 or groups[0] is None or not hasattr(groups[0], "fsdp_params"):
            return None
        for param in groups[0].fsdp_params:
            if param.offload_to_cpu or hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
                return None
        return groups[0]

    def is_known(self) -> bool:
        """Whether an all-gather of the module was agreed on, and the next one is such a one. The same on all ranks."""
        self.plan, self.is_raw = None, False
        if self.kind is None or self.state is None:
            return False
        plan, torchs = self.state.plans.get(self.kind), self.torchs()
        if plan is None or plan.codec is None or torchs is None or not torchs.is_sharded:
            self.versions = None
            return False
        self.plan = plan
        return True

    def code(self, staging: Staging, status: Status) -> tuple[int, ...] | None:
        """Codes what the next all-gather sends, for the status. Not again where parameters that are not trained have
        not changed. Returns their versions; None: they are other tensors than before."""
        assert self.plan is not None and self.kind is not None and self.state is not None
        self.status, versions = status, self._versions()
        params = self.torchs().fsdp_params
        if versions == self.versions and not any(param.sharded_param.requires_grad for param in params):
            return versions
        inputs = _all_gather_inputs(params)
        if sum(x.numel() for x in inputs) != self.kind.numel or any(x.dtype != self.kind.dtype for x in inputs):
            return None
        x = as_bytes(torch.cat(inputs) if len(inputs) > 1 else inputs[0])
        for span in spans_of(x.numel(), self.plan.num_pieces):
            messages = messages_of(self.plan, [span.payload] * self.state.size, x.device)
            slot = staging.take(messages.num_bytes)
            messages.code(slot, Part(self.state.rank, x[span.bytes]), status, 0)
            staging.leave(slot)
        return versions

    def decide(self, versions: tuple[int, ...] | None, is_lost: bool) -> None:
        """How all-gathers travel until the next forward pass. is_lost: rows had no room, on some rank."""
        assert self.plan is not None and self.kind is not None and self.state is not None
        self.versions = None if is_lost else versions
        if is_lost and self.plan.is_checked:
            self.state.forget(self.kind)
        self.is_raw = is_lost and not self.plan.is_checked  # with a codec that was given

    def _versions(self) -> tuple[int, ...]:
        """Numbers that grow as torch's operations write parameters, by the distributed tensors or by those in them."""
        params = [param.sharded_param for param in self.torchs().fsdp_params]
        return tuple(number for param in params for number in (param._version, param._local_tensor._version))


class Rooms:
    """Sees before each forward pass which modules' parameters have room in their messages, on all ranks.

    Args:
        shards: of the modules.
    """

    def __init__(self, shards: Sequence[Shards]) -> None:
        self.shards = shards
        self._statuses: dict[State, tuple[torch.Tensor, list[Status]]] = {}  # of all modules, by process group

    def check(self) -> None:
        """A collective call, where all-gathers travel coded. The host waits for it.

        Raises:
            RuntimeError: rows were lost since the last one: parameters were written behind torch's back.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        groups: dict[State, list[int]] = {}
        for k, shard in enumerate(self.shards):
            if shard.is_known():
                assert shard.state is not None
                groups.setdefault(shard.state, []).append(k)
        for state, numbers in groups.items():
            self._check(state, numbers)

    @torch.no_grad()
    def _check(self, state: State, numbers: Sequence[int]) -> None:
        device = self.shards[numbers[0]].torchs().device
        staging, (table, statuses) = state.staging(device), self._statuses_of(state, device)
        if staging.coding is not None and staging.decoding is not None:
            staging.coding.wait_stream(torch.cuda.current_stream(device))
            staging.coding.wait_stream(staging.decoding)
            self._wait_for_optimizer(staging.coding)
        versions = {}
        with on(staging.coding):
            missing = lost_and_missing(table)[1]
            table.zero_()
            for k in numbers:
                versions[k] = self.shards[k].code(staging, statuses[k])
            flags = torch.stack([lost_and_missing(table)[0], missing])
            with all_taking_part():
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.shards[numbers[0]].group())
            is_lost, is_missing = flags.tolist()
            table.zero_()
        if any(is_missing):
            names = [self.shards[k].name for k, lacks in enumerate(is_missing) if lacks]
            raise RuntimeError(
                f"parameters of modules {names} were written between a forward pass and an all-gather, past torch's "
                "version counters, and rows of them were lost: write them before the forward pass"
            )
        for k in numbers:
            self.shards[k].decide(versions[k], bool(is_lost[k]))

    def _statuses_of(self, state: State, device: torch.device) -> tuple[torch.Tensor, list[Status]]:
        if state not in self._statuses:
            shape = len(self.shards), status_entries(state.size, 0)
            table = torch.zeros(shape, dtype=torch.int64, device=device)
            self._statuses[state] = table, [Status(state.size, 0, device, row) for row in table]
        return self._statuses[state]

    def _wait_for_optimizer(self, stream: torch.cuda.Stream) -> None:
        """Where the user has given FSDP an event instead of the current stream."""
        context = getattr(self.shards[0].module._get_fsdp_state(), "_state_ctx", None)
        event = getattr(context, "post_optim_event", None)
        if event is not None:
            stream.wait_event(event)


def _all_gather_inputs(params: Sequence[Any]) -> list[torch.Tensor]:
    """What torch copies into an all-gather's input, one behind the other."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_param_all_gather_inputs

    return [x for inputs in _get_param_all_gather_inputs(list(params)) for x in inputs]


def _no_repair(status: Status) -> None:
    """Of a call whose status nobody looks at."""


@functools.cache
def _comm_class() -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

    class CodedAllGather(AllGather):
        """What FSDP2 calls for the parameters of one module."""

        def __init__(self, shards: Shards) -> None:
            super().__init__()
            self.shards = shards

        def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: dist.ProcessGroup,
            async_op: bool = False,
        ) -> dist.Work | None:
            return self.shards.gather(output_tensor, input_tensor, group, async_op)

    return CodedAllGather
