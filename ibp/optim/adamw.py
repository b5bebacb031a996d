"""Adam and AdamW whose states are coded in memory."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._common.arguments import whole_number
from .._common.graphs import outside_of_graphs
from .._machine.memory import check_memory
from .._schemes.planes.learning import check_level
from ._calling import loss_of
from ._chunks import NAMES, Chunk, ChunkPiece, Work, local, planned
from ._learning import ROW_BYTES
from ._reserve import Reserve
from ._states import CodedState, StateCoding, Usage, Watch, choose_learners, free_overflow, growths
from ._transfers import StateTransfers

_LEAST_CHUNK_BYTES, _MOST_CHUNK_BYTES, _CHUNKS = 16 << 20, 256 << 20, 8  # if chunk_bytes is not given


class _Job:
    """What a step does to a chunk: the pieces that have gradients, and their states in work memory.

    Args:
        is_decoupled: whether weight decay is AdamW's.
        options: of torch's fused kernel.
        grads: of the parameters that have some, each laid out as its parameter.
        steps: of the same ones.
    """

    def __init__(
        self,
        chunk: Chunk,
        work: Work,
        is_decoupled: bool,
        options: dict[str, Any],
        grads: dict[torch.Tensor, torch.Tensor],
        steps: dict[torch.Tensor, torch.Tensor],
    ) -> None:
        self.chunk, self.work, self.is_decoupled, self.options = chunk, work, is_decoupled, options
        self._all_grads, self._all_steps = grads, steps

    @functools.cached_property
    def _live(self) -> list[tuple[ChunkPiece, tuple[torch.Tensor, ...]]]:
        """The pieces, and both states of each."""
        pieces = zip(self.chunk.pieces, self.chunk.views(self.work))
        return [(piece, states) for piece, states in pieces if piece.param in self._all_grads]

    @functools.cached_property
    def _lists(self) -> tuple[list[torch.Tensor], ...]:
        """Parameters, gradients, exp_avgs and exp_avg_sqs. Made when they are needed: the GPU has work by then."""
        params = [piece.of(piece.param) for piece, _ in self._live]
        grads = [piece.of(self._all_grads[piece.param]) for piece, _ in self._live]
        return params, grads, *([states[i] for _, states in self._live] for i in range(len(NAMES)))

    def change(self) -> None:
        """Calls torch's fused kernel for the states in work memory."""
        fused: Callable[..., None] = torch._fused_adamw_ if self.is_decoupled else torch._fused_adam_
        steps = [self._all_steps[piece.param] for piece, _ in self._live]
        fused(*self._lists, [], steps, amsgrad=False, **self.options)

    def foresee(self) -> None:
        """Puts to work memory about what the states become by the first step."""
        params, grads, exp_avgs, exp_avg_sqs = self._lists
        scale, decay = self.options["grad_scale"], self.options["weight_decay"]
        for memory in self.chunk.raw(self.work):
            memory.zero_()
        torch._foreach_copy_(exp_avgs, grads)
        if scale is not None:
            torch._foreach_div_(exp_avgs, scale)
        if decay and not self.is_decoupled:
            torch._foreach_add_(exp_avgs, params, alpha=decay)
        torch._foreach_copy_(exp_avg_sqs, exp_avgs)
        torch._foreach_mul_(exp_avg_sqs, (1 - self.options["beta2"]) ** 0.5)
        torch._foreach_mul_(exp_avg_sqs, exp_avg_sqs)
        torch._foreach_mul_(exp_avgs, 1 - self.options["beta1"])


class _StepPlan:
    """What a step does on a device. found_inf: of a GradScaler."""

    def __init__(self, device: torch.device, found_inf: torch.Tensor | None) -> None:
        self.device, self.found_inf = device, found_inf
        self.jobs: list[_Job] = []
        self.steps: dict[torch.Tensor, torch.Tensor] = {}  # of each parameter with a gradient
        self.transfers: StateTransfers | None = None


class Adam(torch.optim.Adam):
    """Adam (Kingma and Ba, 2015) with coded states: weights have the bits that `torch.optim.Adam(fused=True)` gives
    them. Like `AdamW`, except that weight_decay, 0 if not given, times the weight is added to the gradient.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(256, 256))
        >>> optimizer = ibp.optim.Adam([weights], lr=0.5)  # in place of torch.optim.Adam
        >>> weights.square().sum().backward()
        >>> optimizer.step()
        >>> weights.data[0, 0]
        tensor(0.5000)
    """

    _step_supports_amp_scaling = True  # of a GradScaler, by torch's kernel

    # `self.state` has the steps alone; the other states are in chunks, and each parameter group has a list of chunks.

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        level: str = "default",
        memory: str | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        check_level(level)
        check_memory(memory, among=("device", "pinned"))
        self._level, self._memory = level, memory or "device"
        least = 2 * ROW_BYTES
        self._chunk_bytes = None if chunk_bytes is None else whole_number("chunk_bytes", chunk_bytes, least)
        self._given: dict[torch.Tensor, dict[str, Any]] = {}  # states that are being loaded
        self._are_given = False  # whether `self.state` has states as tensors that are not coded yet
        self._forget()
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=_check_kernel(foreach, fused),
        )

    def _forget(self) -> None:
        """Drops all coded states and the memory to work in."""
        self._chunks: list[list[Chunk]] = [[] for _ in getattr(self, "param_groups", ())]
        self._in_chunks: dict[torch.Tensor, tuple[torch.dtype, torch.device]] = {}
        self._works: dict[tuple[torch.device, torch.dtype], Work] = {}
        self._transfers: dict[torch.device, StateTransfers] = {}
        self._codings: dict[torch.device, StateCoding] = {}
        self._watches: dict[torch.device, Watch] = {}

    # ---- parameters ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own, as torch's.

        Raises:
            TypeError: one is not of floating-point elements of 2, 4 or 8 bytes.
            ValueError: one overlaps itself or has gaps, or an option is none that is offered.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
        except BaseException:
            self.param_groups.pop()
            raise
        self._chunks.append([])

    def stats(self) -> dict[str, Usage]:
        """What the states take by now: {"exp_avg": usage, "exp_avg_sq": usage}, see `Usage`."""
        found = dict.fromkeys(NAMES, Usage(0, 0, 0))
        for run in (run for chunk in self._all_chunks() for run in chunk.runs):
            found[NAMES[run.which]] = found[NAMES[run.which]].plus(run.state.usage())
        return found

    # ---- steps ----

    @outside_of_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Changes the parameters that have gradients.

        Args:
            closure: computes the loss again, with gradients, and returns it.

        Returns:
            What closure returned, or None.

        Raises:
            RuntimeError: a gradient is sparse, or of another dtype or device than its parameter; a parameter has
                another dtype or device than its coded states; a CUDA graph is being captured; coded states are damaged;
                there is no memory (torch.OutOfMemoryError). No weight and no state has changed.
        """
        loss = loss_of(closure)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a step with coded states cannot be captured in a CUDA graph: it learns codebooks")
        if self._are_given:
            self._take_states()
        for watch in self._watches.values():
            watch.look()
        plans = self._plans()
        for plan in plans:
            self._begin(plan)
        self._watch()
        free_overflow([state for chunk in self._all_chunks() for state in chunk.states])
        for plan in plans:
            for param, step in plan.steps.items():
                self.state[param]["step"] = step
            self._run(plan)
        for plan in plans:
            self._look_ahead(plan)
        return loss

    def _plans(self) -> list[_StepPlan]:
        """A step's work on each device. All that can fail is done here: no weight and no state has changed."""
        plans: dict[torch.device, _StepPlan] = {}
        for group, chunks in zip(self.param_groups, self._chunks):
            grads = {param: _dense_grad(param) for param in group["params"] if param.grad is not None}
            for param in grads:
                _check_home(param, self._in_chunks.get(param))
            self._add_chunks([param for param in grads if param not in self._in_chunks], chunks)
            for device in {local(param).device for param in grads}:
                if device not in plans:
                    plans[device] = _StepPlan(device, _near(getattr(self, "found_inf", None), device))
                self._plan(plans[device], group, chunks, grads)
        for plan in plans.values():
            self._fit(plan.jobs)
            if self._memory == "pinned" and plan.device.type == "cuda" and plan.jobs:
                plan.transfers = self._transfers_for(plan.device, plan.jobs)
        return list(plans.values())

    def _plan(
        self, plan: _StepPlan, group: dict[str, Any], chunks: list[Chunk], grads: dict[torch.Tensor, torch.Tensor]
    ) -> None:
        """Adds what is to be done for the parameters of a group to a device's plan."""
        device = plan.device
        for param in grads:
            if local(param).device == device:
                step = self.state[param].get("step") if param in self.state else None
                plan.steps[param] = torch.zeros((), dtype=torch.float32, device=device) if step is None else step
        options = {
            "lr": _near(group["lr"], device),
            "beta1": float(group["betas"][0]),
            "beta2": float(group["betas"][1]),
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "maximize": group["maximize"],
            "grad_scale": _near(getattr(self, "grad_scale", None), device),
            "found_inf": plan.found_inf,
        }
        for chunk in chunks:
            if chunk.device == device and any(piece.param in grads for piece in chunk.pieces):
                work, is_decoupled = self._work(chunk), group["decoupled_weight_decay"]
                plan.jobs.append(_Job(chunk, work, is_decoupled, options, grads, plan.steps))

    def _fit(self, jobs: list[_Job]) -> None:
        """Gives codebooks to new states, and samples others that want a new codebook."""
        for job in jobs:
            unfit, betas = job.chunk.unfit(), (job.options["beta1"], job.options["beta2"])
            if any(run.state.is_new for run in unfit):
                job.foresee()
            for run in unfit:
                growth = growths(betas, run.state.stores)[run.which]
                if run.state.is_new:
                    job.chunk.fit(run, job.work, growth)
                else:
                    run.state.load(run.bytes_in(job.work))
                    job.chunk.sample(run, job.work, growth)

    def _begin(self, plan: _StepPlan) -> None:
        """Decodes the states of the first chunk: the GPU has work while the host gets the rest ready."""
        if plan.transfers is None and plan.jobs:
            plan.jobs[0].chunk.load(plan.jobs[0].work)

    def _run(self, plan: _StepPlan) -> None:
        """Decodes the states of one chunk after the other, changes them and the parameters, and codes them again."""
        steps, transfers, jobs = list(plan.steps.values()), plan.transfers, plan.jobs
        torch._foreach_add_(steps, 1)
        if transfers is not None:
            transfers.begin(torch.cuda.current_stream(plan.device))
            transfers.fetch(jobs[0].chunk)
        for job, following in zip(jobs, [*jobs[1:], None]):
            if transfers is None:
                if job is not jobs[0]:
                    job.chunk.load(job.work)
                job.change()
                job.chunk.store(job.work)
                continue
            if following is not None:
                transfers.fetch(following.chunk)
            transfers.load(job.chunk, job.work)
            job.change()
            transfers.store(job.chunk, job.work)
        if transfers is not None:
            transfers.end()
        if plan.found_inf is not None:  # a step that infinite gradients left out is not counted
            torch._foreach_sub_(steps, [plan.found_inf] * len(steps))

    def _look_ahead(self, plan: _StepPlan) -> None:
        """What later steps need of the host, while the device does what this one has queued; once it is done, they
        learn for the other chunks. Coded states become others that stand for the same bits."""
        is_done, asked = False, _asks_for_end(plan.device)
        for job in plan.jobs:
            if job.chunk.is_sampled and not is_done:
                job.chunk.refit(job.work)
                is_done = asked()
            if self._memory == "device":
                job.chunk.prepare(job.work)
        if not any(job.chunk.is_sampled for job in plan.jobs):
            self._coding(plan.device).families.clear()
            choose_learners([state for job in plan.jobs for state in job.chunk.states])

    def _transfers_for(self, device: torch.device, jobs: list[_Job]) -> StateTransfers:
        """Moves slots, with room for all chunks."""
        most = max(job.chunk.num_elements * job.chunk.dtype.itemsize for job in jobs)
        if device not in self._transfers or self._transfers[device].num_bytes < most:
            self._transfers[device] = StateTransfers(device, most)
        return self._transfers[device]

    def _add_chunks(self, params: list[torch.Tensor], chunks: list[Chunk]) -> None:
        """Adds the chunks of parameters that are in none, all of them before the first is used, for the reserves to
        know of."""
        chunk_bytes = self._chunk_bytes
        if chunk_bytes is None:
            held = sum(2 * local(param).nbytes for group in self.param_groups for param in group["params"])
            chunk_bytes = max(_LEAST_CHUNK_BYTES, min(_MOST_CHUNK_BYTES, held // _CHUNKS))
        chunks += list(planned(params, chunk_bytes, self._coding))
        self._in_chunks.update((param, _home_of(param)) for param in params)

    def _coding(self, device: torch.device) -> StateCoding:
        """How the states of chunks on a device are coded."""
        if device not in self._codings:
            reserve = Reserve() if device.type == "cuda" else None
            pinned = self._memory == "pinned" and reserve is not None
            self._codings[device] = StateCoding(self._level, reserve, pinned, {})
        return self._codings[device]

    def _work(self, chunk: Chunk) -> Work:
        """Memory for a chunk's states, which all chunks of a device and dtype share."""
        key, num_elements = (chunk.device, chunk.dtype), chunk.num_elements
        work = self._works.get(key)
        if work is None or work.exp_avg.numel() < num_elements:
            held = [of for of in self._all_chunks() if (of.device, of.dtype) == key]
            most = max([num_elements, *(of.num_elements for of in held)])
            both = torch.empty(2 * most, dtype=chunk.dtype, device=chunk.device)
            work = self._works[key] = Work(both[:most], both[most:])
        return work

    def _all_chunks(self) -> Iterator[Chunk]:
        return (chunk for chunks in self._chunks for chunk in chunks)

    def _watch(self) -> None:
        """Asks for the counters of all states, for a later step to look at."""
        states: dict[torch.device, list[CodedState]] = {}
        for chunk in self._all_chunks():
            states.setdefault(chunk.device, []).extend(chunk.states)
        for device, of_device in states.items():
            self._watches.setdefault(device, Watch()).ask(of_device)

    # ---- states as tensors ----

    def state_dict(self, device: torch.device | str | int | None = None) -> dict[str, Any]:
        """Options and states, as those of torch's optimizer, which loads them.

        Args:
            device: where exp_avg and exp_avg_sq are put, decoded; None: where the parameters are.

        Raises:
            RuntimeError: coded states are damaged.
        """
        with self._decoded(None if device is None else torch.device(device)):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes options and states that `state_dict()` gave, or that of torch's optimizer. States are coded one chunk
        after the other, so that they need not fit the device raw.

        Raises:
            ValueError: groups or states do not fit; nothing has changed.
            torch.OutOfMemoryError: there is no memory for them; they are kept as they are given, and coded by the next
                step.
        """
        state, params = state_dict["state"], [param for group in self.param_groups for param in group["params"]]
        ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        given = {param: state[number] for number, param in zip(ids, params) if number in state}
        for param, values in given.items():
            _check_state(param, values)
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise ValueError("the state is one with amsgrad; coded states are without it")
        steps = {number: {"step": state[number]["step"]} for number in ids if number in state}
        self._given = given
        try:
            super().load_state_dict({**state_dict, "state": steps})  # which calls __setstate__
        finally:
            self._given = {}

    def __getstate__(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in ("_level", "_memory", "_chunk_bytes")}
        with self._decoded(None):
            return {**super().__getstate__(), **options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.update(fused=True, foreach=None, capturable=False, differentiable=False)
        for param, values in getattr(self, "_given", {}).items():
            self.state[param].update({name: values[name] for name in NAMES})
        self._given = {}
        self._take_states()

    @torch.no_grad()
    def _take_states(self) -> None:
        """Codes the states that `self.state` has as tensors, in place of all that were coded before. Where that fails
        they stay tensors, for a later call."""
        self._are_given = True
        try:
            self._code_states()
        except BaseException:
            self._forget()
            raise
        for param, values in self.state.items():
            self.state[param] = {"step": values["step"]} if values else {}
        self._are_given = False

    def _code_states(self) -> None:
        self._forget()
        for group, chunks in zip(self.param_groups, self._chunks):
            given = [param for param in group["params"] if self.state.get(param)]
            for param in given:
                device = local(param).device
                step = torch.as_tensor(self.state[param]["step"], dtype=torch.float32, device=device)
                self.state[param]["step"] = step.clone()
            with_tensors = [param for param in given if NAMES[0] in self.state[param]]
            self._add_chunks(with_tensors, chunks)
            for chunk in chunks:
                work = self._work(chunk)
                for memory, name in zip(chunk.raw(work), NAMES):
                    memory.zero_()
                    for piece in chunk.pieces:
                        _put(piece, memory, local(self.state[piece.param][name]))
                for run in chunk.unfit():
                    chunk.fit(run, work)
                chunk.store(work)

    @contextlib.contextmanager
    def _decoded(self, device: torch.device | None) -> Iterator[None]:
        """`self.state` has the decoded states as tensors until the context is left."""
        if self._are_given:
            self._take_states()
        coded = self.state
        decoded: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        decoded.update((param, {"step": values["step"].clone()}) for param, values in coded.items() if values)
        for param, values in decoded.items():
            values.update({name: torch.empty_like(param, device=device, requires_grad=False) for name in NAMES})
        for chunk in self._all_chunks():
            work = self._work(chunk)
            chunk.load(work)
            begun = [both for both in zip(chunk.pieces, chunk.views(work)) if both[0].param in decoded]
            for piece, states in begun:
                for name, values in zip(NAMES, states):
                    piece.of(decoded[piece.param][name]).copy_(values)
            for state in chunk.states:
                state.check()
        self.state = decoded
        try:
            yield
        finally:
            self.state = coded


class AdamW(Adam, torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter, 2019) with coded states: weights have the bits that
    `torch.optim.AdamW(fused=True)` gives them.

    exp_avg and exp_avg_sq are kept coded in slots on the parameters' device; states with similar values have slots of
    one size. Rows that outgrow their slots are kept, in part, in pinned host memory, which has room for everything that
    slots do not hold: however badly states shrink, no bit is lost. A step decodes the states of a chunk to memory that
    all chunks share, calls torch's fused kernel, and codes them again. The first step learns all codebooks, and waits
    for the device. Later ones learn those of a few parameters, for each parameter ever more rarely, while the device
    does what they have queued.

    It replaces torch's optimizer: learning-rate schedulers, parameter groups, closures, `torch.amp.GradScaler`, hooks
    and `state_dict()` work the same way, and each optimizer loads the states of the other. Pickles and copies hold
    decoded states.

    Example:
        >>> model = torch.nn.Linear(512, 512)
        >>> optimizer = ibp.optim.AdamW(model.parameters(), lr=1e-3)  # in place of torch.optim.AdamW
        >>> model(torch.randn(8, 512)).square().mean().backward()
        >>> optimizer.step()
        >>> all(usage.savings > 0.1 for usage in optimizer.stats().values())  # exp_avg, exp_avg_sq
        True

    Args:
        params: as for torch: parameters of FP16, BF16, FP32 or FP64, which are dense in memory.
        lr, betas, eps, weight_decay, maximize: as for torch.
        amsgrad, capturable, differentiable: not offered.
        foreach, fused: None, or as they are: foreach=False and fused=True.
        level: "default", the codebooks that save the most for the time that coding takes; or "fast", which saves less
            and codes faster: see `ibp.compress`.
        memory: where coded states are: "device"; or "pinned", host memory that the device reads and writes, so that
            only their index is on the device. None: on the device.
        chunk_bytes: bytes of the raw states of a chunk, at least 8,192; None: an eighth of all states' bytes, 16 to 256
            MiB. Each device needs as much memory again to work in, and with memory="pinned" four times as much besides.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        level: str = "default",
        memory: str | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            level=level,
            memory=memory,
            chunk_bytes=chunk_bytes,
        )


def _check_group(group: dict[str, Any]) -> None:
    """TypeError, ValueError: a parameter cannot be coded, or an option is not offered."""
    for name in ("amsgrad", "capturable", "differentiable"):
        if group.get(name):
            raise ValueError(f"{name} is {group[name]}; coded states are without it")
    _check_kernel(group.get("foreach"), group.get("fused"))
    for param in group["params"]:
        if not param.is_floating_point() or param.dtype.itemsize not in (2, 4, 8):
            raise TypeError(f"a parameter is {param.dtype}; wanted floating-point elements of 2, 4 or 8 bytes")
        own = local(param)
        if own.layout is not torch.strided or not torch.ops.aten.is_non_overlapping_and_dense(own):
            raise ValueError(
                f"a parameter of shape {list(own.shape)} has strides {own.stride()}; wanted one that is dense"
            )


def _check_kernel(foreach: bool | None, fused: bool | None) -> bool:
    """True, which fused is. ValueError: another kernel than torch's fused one is asked for."""
    for name, value, wanted in (("foreach", foreach, False), ("fused", fused, True)):
        if value is not None and bool(value) != wanted:
            raise ValueError(
                f"{name} is {value}, but steps with coded states are those of torch's fused kernel, whose bits differ "
                f"from the others': leave {name} out, or use torch.optim's class"
            )
    return True


def _check_state(param: torch.Tensor, values: dict[str, Any]) -> None:
    """ValueError: a saved state is none of this parameter."""
    for name in ("step", *NAMES):
        if name not in values:
            raise ValueError(f"a state has {sorted(values)}; wanted {['step', *NAMES]}")
    for name in NAMES:
        value = values[name]
        if isinstance(value, torch.Tensor) and hasattr(value, "to_local") != hasattr(param, "to_local"):
            raise ValueError(
                f"a state's {name} is a {type(value).__name__}; wanted one that is spread as the parameter"
            )
        if not isinstance(value, torch.Tensor) or value.shape != param.shape:
            shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"a state's {name} is {shape}; wanted a tensor of shape {list(param.shape)}")


def _home_of(param: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return param.dtype, local(param).device


def _check_home(param: torch.Tensor, home: tuple[torch.dtype, torch.device] | None) -> None:
    """RuntimeError: a parameter whose states are coded has another dtype or device since then."""
    if home is not None and home != _home_of(param):
        raise RuntimeError(
            f"a parameter is {param.dtype} on {local(param).device}; wanted {home[0]} on {home[1]}, as its coded "
            "states: let the optimizer load its own state_dict() after parameters have moved"
        )


def _dense_grad(param: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient, laid out as the parameter.

    Raises:
        RuntimeError: it is sparse, or of another dtype or device.
    """
    assert param.grad is not None
    if param.grad.layout is not torch.strided:
        raise RuntimeError("a gradient is sparse; wanted a dense one: use torch.optim.SparseAdam for sparse ones")
    if (param.grad.dtype, param.grad.device) != (param.dtype, param.device):
        raise RuntimeError(
            f"a gradient is {param.grad.dtype} on {param.grad.device}; wanted {param.dtype} on {param.device}, as its "
            "parameter"
        )
    own, grad = local(param), local(param.grad)
    return grad if grad.stride() == own.stride() else torch.empty_like(own).copy_(grad)


def _asks_for_end(device: torch.device) -> Callable[[], bool]:
    """Says whether a GPU has done all that is queued by now; of a CPU, which the host is, never."""
    return torch.cuda.current_stream(device).record_event().query if device.type == "cuda" else lambda: False


def _near(value: Any, device: torch.device) -> Any:
    """A tensor on a device, if it is one on another device; a number as it is."""
    if isinstance(value, torch.Tensor) and value.device != device and (value.is_cuda or device.type == "cuda"):
        return value.to(device, non_blocking=device.type == "cuda")  # the host reads what comes to a CPU at once
    return value


def _put(piece: ChunkPiece, memory: torch.Tensor, values: torch.Tensor) -> None:
    """Copies a parameter's piece of a state, saved with any strides, into a chunk's memory."""
    like = local(piece.param)
    if not piece.is_whole and values.stride() != like.stride():
        values = torch.empty_like(like, dtype=values.dtype, device=values.device).copy_(values)
    piece.within(memory).copy_(piece.of(values))
