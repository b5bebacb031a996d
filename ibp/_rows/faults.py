"""Defines the records in which operations note faults, which are errors inside operations, and raises the exceptions
for them.

If an operation meets a bad id or a damaged row, it writes zeros in place of that row, goes on, and notes the first
fault in a record. A record is the struct ibp_fault of ibp.h as int64 [4]: status, position, value (an id or a row
number), and a number that only GPUs use. A call that waits for its result passes a `new_record` to the operation and
raises the fault at once. A call that does not wait passes a record of the `Faults` object that belongs to the table (or
to another object with rows); the next call for this table finds the fault there and raises it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import _core
from .._common.modes import outside_of_modes
from .._machine import memory

_INVALID_ARGUMENT, _INDEX_OUT_OF_RANGE = 1, 2  # ibp_status
ENTRIES = 4  # Number of int64 words in a record.
_STATUS = operator.itemgetter(0)  # Returns the status of a record, which is 0 if no fault is noted.
_CPU = torch.device("cpu")


class CorruptTableError(ValueError):
    """Raised if a table's bytes are inconsistent, because they were damaged or forged."""


class FaultWords(NamedTuple):
    """The messages for faults of one kind of work. Messages are templates for `str.format`. {position} and {value} are
    the position and value of the record, {status} is the status of the record in words, and callers of `raise_for` may
    pass other names."""

    damaged: str  # The message for a damaged row, and for all faults that have no message of their own.
    kind: type[Exception] = CorruptTableError  # The class of the exception that carries this message.
    out_of_range: str | None = None  # The message of the IndexError for an id that is out of range.
    invalid: str | None = None  # The message of the ValueError for inconsistent arguments.
    # This is appended to the message if a later call raises the fault. {device} is the device that noted the fault.
    later: str = " (noted by an earlier call on {device}; its row was filled with zeros)"

    def raise_for(
        self, record: torch.Tensor | Sequence[int], noted_on: torch.device | None = None, **names: object
    ) -> None:
        """Raises the exception for the fault in a record. Does nothing if no fault is noted in the record.

        Args:
            noted_on: the device that noted the fault during an earlier call. None: the present call noted the fault.
            names: values for the other placeholders of the message.
        """
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
    """Raises RuntimeError if a CUDA graph is being captured on a device."""
    if memory.is_capturing(device):
        raise RuntimeError(
            f"the first use of a table on {device} copies its index there, which a CUDA graph cannot capture: call "
            "index_select or decompress once before capturing"
        )


def new_record(device: torch.device = _CPU) -> torch.Tensor:
    """Returns an empty record, in which the operations of one call can note a fault. device: the device on which the
    operations run."""
    return torch.zeros(ENTRIES, dtype=torch.int64, device=device)


class Faults:
    """The fault records of a table, or of another object with rows, for work that no call waits for. Each device has
    one record for each kind of work. The records are in host memory to which GPUs write, so the host can read them at
    any time.

    Args:
        words: the messages for each kind of work.

    Attributes:
        names: values for the placeholders of the messages that `FaultWords` does not fill. The owner keeps them up to
            date.
    """

    def __init__(self, *words: FaultWords) -> None:
        self._words = words
        self.names: dict[str, Any] = {}
        self._noted: dict[torch.device, np.ndarray] = {}  # All records of a device, int64 [number of kinds, ENTRIES].
        # For each device, one tensor for each of its records, over the memory of `_noted`, in which the device notes
        # faults.
        self._records: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    @property
    def devices(self) -> list[torch.device]:
        """The devices whose work may have noted faults, in the order of their first use."""
        return list(self._records)

    def on(self, device: torch.device, kind: int = 0) -> torch.Tensor:
        """Returns the record in which work on a device notes faults. The first call for a device allocates its records.
        kind: the index of the kind of work among the constructor's arguments.

        Raises:
            ibp.PinningError: the system does not pin memory.
            RuntimeError: a CUDA graph is being captured, and the device has no record yet.
        """
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
        """Returns the int64 words of all records of a device, one record after the other, as the host reads them. If a
        fault is noted in a record, the first word of the record is not 0."""
        return self._noted[device].reshape(-1).data

    def clear(self, device: torch.device) -> None:
        """Clears all records of a device."""
        self._noted[device][:] = 0

    def taken(self, device: torch.device) -> Iterator[tuple[FaultWords, list[int]]]:
        """Clears each of a device's records in which a fault is noted. For each of them, yields (messages for its kind
        of work, copy of the record before it was cleared)."""
        for words, noted in zip(self._words, self._noted.get(device, ())):
            if noted[0]:
                record = noted.tolist()
                noted[:] = 0
                yield words, record

    def raise_pending(self, device: torch.device) -> None:
        """Raises the first fault that work on a device has noted, if any, and clears its record."""
        if any(map(_STATUS, self._noted.get(device, ()))):
            for words, record in self.taken(device):
                words.raise_for(record, device, **self.names)

    def raise_when_done(self, device: torch.device) -> None:
        """Waits for the current stream of a GPU, and raises the first fault that work on this GPU has noted, if any."""
        torch.cuda.current_stream(device).synchronize()
        self.raise_pending(device)

    def raise_for(self, record: torch.Tensor, kind: int = 0) -> None:
        """Raises the fault in the record of a single call, if the record holds one. kind: as for `on`."""
        self._words[kind].raise_for(record, **self.names)
