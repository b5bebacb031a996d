"""`CompressedTensor.prefetch` brings items and whole tensors to a GPU before they are needed."""

from __future__ import annotations

from typing import Any

import torch

from .._common.process import OfThisProcess
from .._machine import memory
from .._rows.protocols import Ids
from .._rows.table import Table
from .gather import index_select
from .streaming import decompress


class Prefetch(OfThisProcess):
    """The result of `table.prefetch`: items, or a whole tensor, that are brought to a device on another stream.

    `wait` makes the current stream wait for the result; the host does not wait. Call `close` when all work that uses
    the result has been queued on the current stream. A `with` block calls `wait` at its beginning and `close` at its
    end.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> table = ibp.compress(x, device="cpu", memory="host")
        >>> with table.prefetch([3, 1, 3]) as rows:
        ...     torch.equal(rows, x[[3, 1, 3]])
        True
    """

    _instead = "wait() gives its tensor, which can be pickled"

    def __init__(self, result: torch.Tensor, stream: torch.cuda.Stream | None, owned: bool) -> None:
        self._result: torch.Tensor | None = result
        self._stream, self._owned, self._event = stream, owned, None
        if stream is not None:
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def is_ready(self) -> bool:
        """Returns whether the result has arrived. Does not wait."""
        return self._event is None or self._event.query()

    def wait(self) -> torch.Tensor:
        """Makes the current stream of the result's device wait until the result has arrived. Returns the result. The
        method may be called on several streams.

        Raises:
            RuntimeError: the prefetch has been closed.
        """
        if self._result is None:
            raise RuntimeError("the prefetch is closed: its result may be another one's by now")
        if self._event is not None:
            current = torch.cuda.current_stream(self._result.device)
            current.wait_event(self._event)
            if self._owned:
                self._result.record_stream(current)
        return self._result

    def close(self) -> None:
        """Releases the result. Later prefetches on the same stream wait for the work that is now queued on the current
        stream, so they may write to the same memory. A second call does nothing."""
        if self._result is not None and self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._result.device))
        self._result = None

    def __enter__(self) -> torch.Tensor:
        return self.wait()

    def __exit__(self, *_: Any) -> None:
        self.close()


_streams: dict[torch.device, torch.cuda.Stream] = {}


def stream_of(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of a GPU on which prefetches run by default."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def prefetch(
    table: Table,
    ids: Ids | None = None,
    *,
    device: torch.device | str | int | None = None,
    out: torch.Tensor | None = None,
    stream: torch.cuda.Stream | None = None,
    max_sms: int | None = None,
    path: str | None = None,
) -> Prefetch:
    """Starts a prefetch: the implementation of `CompressedTensor.prefetch`."""
    target = memory.canonical(_target(table, ids, device, out))
    if target.type != "cuda":
        return Prefetch(_fetch(table, ids, target, out, max_sms, path), None, out is None)
    side = stream_of(target) if stream is None else stream
    if side.device != target:
        raise ValueError(f"stream is of {side.device}; wanted one of {target}, where the result goes")
    side.wait_stream(torch.cuda.current_stream(target))
    for given in (ids, out):
        if isinstance(given, torch.Tensor) and given.is_cuda:
            given.record_stream(side)
    with torch.cuda.stream(side):
        result = _fetch(table, ids, target, out, max_sms, path)
    return Prefetch(result, side, out is None)


def _target(table: Table, ids: Any, device: Any, out: torch.Tensor | None) -> Any:
    if device is not None:
        return device
    if out is not None:
        return out.device
    return ids.device if isinstance(ids, torch.Tensor) else table.device


def _fetch(
    table: Table, ids: Ids | None, device: torch.device, out: torch.Tensor | None, max_sms: int | None, path: str | None
) -> torch.Tensor:
    if ids is None:
        return decompress(table, device=device, out=out, max_sms=max_sms, path=path)
    return index_select(table, ids, device=device, out=out, max_sms=max_sms, path=path)
