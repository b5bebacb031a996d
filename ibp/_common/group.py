"""Process groups of torch.distributed, in the form that collective calls of this package use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import wire

_Result = TypeVar("_Result")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RankGroup:
    """A process group and this process's rank in it.

    Attributes:
        process_group: the group. None: the default group.
        rank, size: the rank of this process in the group, and the size of the group.
        device: where tensors are exchanged: the current CUDA device for NCCL, else the CPU.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Makes the object for a group. None: the default group.

        Raises:
            RuntimeError: torch.distributed is not initialised.
            ValueError: this process is not in the group.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group first, in each "
                "process that torchrun has started"
            )
        # The default group is not held: if it is kept alive beyond destroy_process_group, gloo aborts at the end of a
        # program.
        self.process_group = None if group is dist.group.WORLD else group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group: only the group's own ranks take part")
        on_gpu = "nccl" in str(dist.get_backend_config(group))
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Returns what work() returns on each rank, by rank. These must be values that `wire.written` takes. A
        collective call.

        If work() raises on one rank, the call raises on all: there the exception itself, on other ranks a RuntimeError
        with its message. what: the name of the work in messages.

        Raises:
            RuntimeError: work() has raised on another rank, or a rank does not take part, because it ended or the
                group's timeout has passed.
            ValueError: a rank has sent bytes that are not a message of this package."""
        raised: Exception | None = None
        try:
            content = wire.written((None, work()))
        except Exception as error:
            raised, content = error, wire.written((f"{type(error).__name__}: {error}", None))
        contents = self.gather(content)
        if raised is not None:
            raise raised
        values = []
        for rank, sent in enumerate(contents):
            try:
                failure, value = wire.read(sent)
                if failure is not None and not isinstance(failure, str):
                    raise ValueError(f"a failure is a {type(failure).__name__}")
            except (ValueError, TypeError) as error:
                raise ValueError(f"{what}: what rank {rank} of the group has sent cannot be read: {error}") from error
            if failure is not None:
                raise RuntimeError(f"{what} has failed on rank {rank} of the group: {failure}")
            values.append(value)
        return values

    def on_all(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Returns what work() returns on this rank, once it has returned on all ranks, as in `together`. Other ranks
        are not told the result."""
        made: list[_Result] = []
        self.together(what, lambda: made.append(work()))
        return made[0]

    def from_rank(self, src: int, what: str, work: Callable[[], Any]) -> Any:
        """Returns what work() returns on rank src, on all ranks, as in `together`. Raises ValueError if src is not a
        rank, or if ranks give different ones."""

        def offer() -> tuple[dict[str, int], Any]:
            if not 0 <= src < self.size:
                raise ValueError(f"src is {src}; wanted 0 to {self.size - 1}")
            return {"src": src}, work() if self.rank == src else None

        offers = self.together(what, offer)
        same_on_all(what, [arguments for arguments, _ in offers])
        return offers[src][1]

    def gather(self, content: bytes) -> list[bytes]:
        """Returns the bytes of each rank, by rank. Each rank must give at least one byte. A collective call."""
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        sizes = torch.cat(self.gathered(torch.tensor([mine.numel()], dtype=torch.int64, device=self.device))).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: mine.numel()] = mine
        return [part[:size].cpu().numpy().tobytes() for part, size in zip(self.gathered(padded), sizes)]

    def gathered(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Returns a tensor of each rank, all of one shape and dtype, on the group's device. They are exchanged as
        bytes, because not every backend has every dtype."""
        data = part.contiguous().view(torch.uint8)
        parts = [torch.empty_like(data) for _ in range(self.size)]
        with all_taking_part():
            dist.all_gather(parts, data, group=self.process_group)
        return [found.view(part.dtype) for found in parts]

    def counts(self, sent: list[int]) -> list[int]:
        """Sends a number from each rank to each: sent[r] goes to rank r. Returns the numbers that the ranks sent
        here, by rank."""
        mine = torch.tensor(sent, dtype=torch.int64, device=self.device)
        received = torch.empty_like(mine)
        with all_taking_part():
            dist.all_to_all_single(received, mine, group=self.process_group)
        return received.tolist()

    def exchange(self, sent: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        """Sends parts of a 1-D tensor on the group's device: send_counts[r] elements go to rank r, one part after
        the other. Returns what the ranks sent here, in the same order."""
        received = torch.empty(sum(receive_counts), dtype=sent.dtype, device=self.device)
        with all_taking_part():
            dist.all_to_all_single(received, sent, receive_counts, send_counts, group=self.process_group)
        return received


@contextlib.contextmanager
def all_taking_part() -> Iterator[None]:
    """Explains errors of torch.distributed."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "not all ranks of the group have taken part: one has ended, has made another call, or the group's timeout "
            f"has passed ({error})"
        ) from error


def machine() -> str:
    """Returns a text that identifies this machine since its last start."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"


def check_one_machine(what: str, machines: list[str]) -> None:
    """Raises ValueError unless the ranks are on one machine. machines: what `machine` returns on each rank."""
    others = [rank for rank, name in enumerate(machines) if name != machines[0]]
    if others:
        raise ValueError(
            f"{what} is for processes of one machine; ranks {others} of the group are on other ones than rank 0: give "
            "a group of each machine's own ranks"
        )


def same_on_all(what: str, given: list[dict[str, Any]]) -> None:
    """Raises ValueError, with the argument's name, if ranks give an argument differently. given: the arguments of
    each rank."""
    for name, first in given[0].items():
        for rank, other in enumerate(given):
            if other[name] != first:
                raise ValueError(
                    f"{what}: {name} is {first!r} on rank 0 of the group and {other[name]!r} on rank {rank}"
                )
