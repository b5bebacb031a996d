"""Fetches the matrices of a mixture of experts through caches. `StackFetcher` fetches from several stacks by one
operation, on a stream beside the caller's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._fetch.calls import refusal
from .._rows.geometry import rows_of
from ._row_cache import RowCache
from ._slabs import current_key

_take_matrices = torch.ops.ibp.take_matrices.default


class StackFetcher:
    """Fetches matrices, by their numbers, from several stacks, which all have the same number of matrices. Each stack
    is a table whose items are single rows, with a cache on one device; the rows of a matrix follow one another.

    A GPU fetches on a stream beside the caller's. `wait_for` makes the caller's stream wait for the matrices of a
    stack. The caller's stream must wait for the last stack before the memory of results is used again, also after a
    call of `take` that was interrupted, because fetches may still be under way. If the operation raises an error, the
    caller's stream has waited already.

    Args:
        caches: a new cache for each stack, all on the same device. Afterwards the caches have one lock in common,
            because one operation uses all of them.
        num_matrices: number of matrices of each stack.
        likes: for each stack an empty tensor on the device of the caches. The results have its dtype and its strides,
            and its dimensions after the first are those of a matrix.
        max_sms: for each stack, the largest number of the GPU's multiprocessors to keep busy; 0: all.
        beside: the stream on which a GPU fetches. None: the device is the CPU.
    """

    def __init__(
        self,
        caches: Sequence[RowCache],
        num_matrices: int,
        likes: Sequence[torch.Tensor],
        max_sms: Sequence[int],
        beside: torch.cuda.Stream | None,
    ) -> None:
        self._caches, self._num_matrices, self._likes, self._max_sms = caches, num_matrices, list(likes), list(max_sms)
        self._num_rows = [cache.view.num_rows // num_matrices for cache in caches]
        self._states = [cache._state for cache in caches]
        self._devices = frozenset.intersection(*(frozenset(state.serving) for state in self._states))
        first, *others = self._states
        for state in others:
            state.use_lock_of(first)
        self._beside, self._address = beside, 0 if beside is None else beside.cuda_stream
        # The first event is recorded on the caller's stream, and the others, one for each stack, on the stream beside.
        # A later call may record an event again before an earlier caller has waited for it. This caller then waits for
        # more than it needs, because the stream beside does its work in order.
        self._events = [] if beside is None else [torch.cuda.Event() for _ in range(len(caches) + 1)]
        for event in self._events:
            event.record(beside)  # torch creates an event when it is first recorded
        self._addresses = [event.cuda_event for event in self._events]

    def serves(self, device: torch.device) -> bool:
        """Returns whether matrices can be fetched on a device through all caches."""
        return device in self._devices

    def take(self, ids: torch.Tensor, num_slots: int, num_spare: torch.Tensor | None) -> list[torch.Tensor]:
        """Fetches the matrices with the given numbers into slots, each once and in increasing order.

        Args:
            ids: the numbers, int32 or int64 of any shape, contiguous, on the device of the caches.
            num_slots: number of slots, at least the smaller of the number of ids and num_matrices + 1.
            num_spare: an int64 counter, to which the number of slots that are left over is added. None: it is not
                counted.

        Returns:
            [slots, held, work, stack, ...]. slots: int64, with the shape of ids, the slot of each matrix. held: int64
            [num_slots], the matrix in each slot, -1 in slots that are left over. work: memory with which the stream
            beside works. stack: for each stack the matrices in the slots, [num_slots, *matrix].

        Raises:
            IndexError, CorruptTableError: as in `ibp.index_select`.
            RuntimeError: num_slots is too small.
        """
        worker = ids.device
        tables = [state.handle_on(worker).table for state in self._states]
        try:
            with self._states[0].lock:
                key = current_key(worker, self._beside)
                return _take_matrices(
                    tables,
                    [state.described_on(worker, self._beside, key) for state in self._states],
                    ids,
                    self._likes,
                    self._num_matrices,
                    num_slots,
                    self._num_rows,
                    num_spare,
                    self._max_sms,
                    self._address,
                    self._addresses,
                )
        except RuntimeError as error:
            if worker.type == "cpu":
                self._raise_for(ids)
            raise refusal(error) from None

    def _raise_for(self, ids: torch.Tensor) -> None:
        """Raises the error of a stack whose matrices cannot be fetched on the CPU."""
        matrices = ids.reshape(-1).unique().to(torch.int64)
        for cache, num_rows in zip(self._caches, self._num_rows):
            cache.index_select(rows_of(matrices, num_rows))

    def wait_for(self, number: int, stream: torch.cuda.Stream) -> None:
        """Makes a stream wait for the latest matrices of a stack, and of all stacks before it. number: the number of
        the stack."""
        self._events[1 + number].wait(stream)
