"""Makes collective calls over a process group of torch.distributed (`RankGroup`), and checks that all ranks are on one
machine and have passed the same arguments."""

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
        device: the device of tensors that the ranks exchange: the current CUDA device for NCCL, otherwise the CPU.
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
        # No reference to the default group is kept: if the group outlived destroy_process_group, gloo would abort at
        # the end of the program.
        self.process_group = None if group is dist.group.WORLD else group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group: only the group's own ranks take part")
        on_gpu = "nccl" in str(dist.get_backend_config(group))
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Calls work() on each rank. Returns the results of all ranks, in the order of the ranks. Results must be
        values that `wire.written` accepts. A collective call.

        If work() raises on one rank, the call raises on all ranks: on that rank the exception itself, and on the other
        ranks a RuntimeError with the message of the exception. what: the name of the work in error messages.

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
        """Calls work() on each rank, and waits until it has returned on all ranks. Returns the result of this rank,
        which is not sent to the others. Raises errors as `together` does. A collective call."""
        made: list[_Result] = []
        self.together(what, lambda: made.append(work()))
        return made[0]

    def from_rank(self, src: int, what: str, work: Callable[[], Any]) -> Any:
        """Calls work() on rank src alone. Returns its result on all ranks. Raises errors as `together` does. Also
        raises ValueError if src is not a rank of the group, or if ranks pass different values of src. A collective
        call."""

        def offer() -> tuple[dict[str, int], Any]:
            if not 0 <= src < self.size:
                raise ValueError(f"src is {src}; wanted 0 to {self.size - 1}")
            return {"src": src}, work() if self.rank == src else None

        offers = self.together(what, offer)
        same_on_all(what, [arguments for arguments, _ in offers])
        return offers[src][1]

    def gather(self, content: bytes) -> list[bytes]:
        """Sends bytes from each rank to all ranks. Returns the bytes of all ranks, in the order of the ranks. Each rank
        must give at least one byte. A collective call."""
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        sizes = torch.cat(self.gathered(torch.tensor([mine.numel()], dtype=torch.int64, device=self.device))).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: mine.numel()] = mine
        return [part[:size].cpu().numpy().tobytes() for part, size in zip(self.gathered(padded), sizes)]

    def gathered(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Sends a tensor from each rank to all ranks. Returns the tensors of all ranks, in the order of the ranks. The
        tensors must be on the group's device and have the same shape and dtype. They travel as bytes, because not every
        backend supports every dtype. A collective call."""
        data = part.contiguous().view(torch.uint8)
        parts = [torch.empty_like(data) for _ in range(self.size)]
        with all_taking_part():
            dist.all_gather(parts, data, group=self.process_group)
        return [found.view(part.dtype) for found in parts]

    def counts(self, sent: list[int]) -> list[int]:
        """Sends a number from each rank to each rank: sent[r] goes to rank r. Returns the numbers that this rank has
        received, in the order of the ranks. A collective call."""
        mine = torch.tensor(sent, dtype=torch.int64, device=self.device)
        received = torch.empty_like(mine)
        with all_taking_part():
            dist.all_to_all_single(received, mine, group=self.process_group)
        return received.tolist()

    def exchange(self, sent: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        """Sends a part of a 1-D tensor on the group's device to each rank. A collective call.

        Args:
            sent: the parts, one after the other. The part for rank r has send_counts[r] elements.
            receive_counts: the number of elements that come from each rank.

        Returns:
            The elements that this rank has received, in the order of the ranks.
        """
        received = torch.empty(sum(receive_counts), dtype=sent.dtype, device=self.device)
        with all_taking_part():
            dist.all_to_all_single(received, sent, receive_counts, send_counts, group=self.process_group)
        return received


@contextlib.contextmanager
def all_taking_part() -> Iterator[None]:
    """Replaces an error of torch.distributed by one that explains it: some rank has not taken part in the call."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "not all ranks of the group have taken part: one has ended, has made another call, or the group's timeout "
            f"has passed ({error})"
        ) from error


def machine() -> str:
    """Returns a string that identifies this machine. The string changes when the machine reboots."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"


def check_one_machine(what: str, machines: list[str]) -> None:
    """Raises ValueError unless all ranks are on one machine. machines: the results of `machine` on all ranks."""
    others = [rank for rank, name in enumerate(machines) if name != machines[0]]
    if others:
        raise ValueError(
            f"{what} is for processes of one machine; ranks {others} of the group are on other ones than rank 0: give "
            "a group of each machine's own ranks"
        )


def same_on_all(what: str, given: list[dict[str, Any]]) -> None:
    """Raises ValueError if an argument has different values on different ranks. The message names the argument. given:
    for each rank, a dict of its arguments by name."""
    for name, first in given[0].items():
        for rank, other in enumerate(given):
            if other[name] != first:
                raise ValueError(
                    f"{what}: {name} is {first!r} on rank 0 of the group and {other[name]!r} on rank {rank}"
                )
