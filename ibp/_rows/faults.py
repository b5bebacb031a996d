"""Faults: what goes wrong inside operations, where they note it, and the exception that it becomes.

An operation that meets a bad id or a damaged row writes zeros in its place, goes on, and notes the first fault in a
record, the struct ibp_fault of ibp.h, as int64 [4]: status, position, value (an id or the number of a row), and a
number that only GPUs use. A call that waits for its result gives the operation a `new_record` and raises at once.
Calls that wait for nothing note in the `Faults` of their owner, which the next call looks at.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .. import _core
from .._common.modes import outside_of_modes
from .._machine import memory

_INVALID_ARGUMENT, _INDEX_OUT_OF_RANGE = 1, 2  # ibp_status
ENTRIES = 4  # int64 of a record
_STATUS = operator.itemgetter(0)  # the first of them: 0 if nothing is noted
_CPU = torch.device("cpu")


class CorruptTableError(ValueError):
    """A table's bytes contradict each other: it was damaged or made up."""


class FaultWords(NamedTuple):
    """How the faults of one owner read. Messages are templates of `str.format`: {position} and {value} are of the
    record, {status} is the status in words, and owners give other names to `raise_for`."""

    damaged: str  # of a damaged row, and of all faults that have no message of their own
    kind: type[Exception] = CorruptTableError  # of exception for these
    out_of_range: str | None = None  # of an id that is out of range: IndexError
    invalid: str | None = None  # of arguments that contradict each other: ValueError
    # follows the message where a later call raises it; {device} is where it was noted
    later: str = " (noted by an earlier call on {device}; its row was filled with zeros)"

    def raise_for(
        self, record: torch.Tensor | Sequence[int], noted_on: torch.device | None = None, **names: object
    ) -> None:
        """Raises what a record says; nothing was noted in one of zeros. noted_on: of an earlier call."""
        status, position, value, _ = record.tolist() if isinstance(record, torch.Tensor) else record
        if status == 0:
            return
        kind, words = self.kind, self.damaged
        if status == _INDEX_OUT_OF_RANGE and self.out_of_range is not None:
            kind, words = IndexError, self.out_of_range
        elif status == _INVALID_ARGUMENT and self.invalid is not None:
            kind, words = ValueError, self.invalid
        words += "" if noted_on is None else self.later
        status = _core.status_string(status)
        raise kind(words.format(position=position, value=value, status=status, device=noted_on, **names))


def refuse_capture(device: torch.device) -> None:
    """RuntimeError if a CUDA graph is being captured on a device."""
    if memory.is_capturing(device):
        raise RuntimeError(
            f"the first use of a table on {device} copies its index there, which a CUDA graph cannot capture: call "
            "index_select or decompress once before capturing"
        )


def new_record(device: torch.device = _CPU) -> torch.Tensor:
    """Where the operations of one call note a fault, on the device that works."""
    return torch.zeros(ENTRIES, dtype=torch.int64, device=device)


class Faults:
    """Records of each device's work that nobody waits for, in host memory that GPUs write to: the host reads them at
    any time. words: of each kind of work; each kind has a record of its own."""

    def __init__(self, *words: FaultWords) -> None:
        self._words = words
        self._noted: dict[torch.device, np.ndarray] = {}  # int64 [kinds, ENTRIES]
        self._records: dict[torch.device, tuple[torch.Tensor, ...]] = {}  # the same memory, for the device

    @property
    def devices(self) -> list[torch.device]:
        """Devices whose work may have noted faults."""
        return list(self._records)

    def on(self, device: torch.device, kind: int = 0) -> torch.Tensor:
        """The record that a device's work notes in. Memory is taken when a device is first asked for. ibp.PinningError:
        the system does not pin memory. RuntimeError: a CUDA graph is being captured, and the device has no record
        yet."""
        if device not in self._records:
            refuse_capture(device)
            on_gpu, kinds = device.type == "cuda", len(self._words)
            with outside_of_modes():
                host = memory.empty(8 * kinds * ENTRIES, _CPU, on_gpu).view(torch.int64).zero_().view(kinds, ENTRIES)
                self._noted[device] = host.numpy()
                near = memory.device_view(host, device) if on_gpu else host
                self._records[device] = tuple(near[number] for number in range(kinds))
        return self._records[device][kind]

    def words(self, device: torch.device) -> memoryview:
        """Returns the int64 words of the records of a device, as the host reads them: the first of each ENTRIES is not
        0 if something is noted."""
        return self._noted[device].reshape(-1).data

    def clear(self, device: torch.device) -> None:
        """Forgets what a device's work has noted."""
        self._noted[device][:] = 0

    def taken(self, device: torch.device) -> Iterator[tuple[FaultWords, list[int]]]:
        """The records in which something is noted, and the words for them; they are clear then."""
        for words, noted in zip(self._words, self._noted.get(device, ())):
            if noted[0]:
                record = noted.tolist()
                noted[:] = 0
                yield words, record

    def raise_pending(self, device: torch.device, **names: object) -> None:
        """Raises what a device's work has noted so far. names: as `FaultWords.raise_for` takes them."""
        if any(map(_STATUS, self._noted.get(device, ()))):
            for words, record in self.taken(device):
                words.raise_for(record, device, **names)
