"""Work that is queued on a GPU again and again, by one call instead of many: `Replay`."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

_LEAST_TIMES = 4  # launches kernel by kernel before work is captured, which takes the host longer than a launch


class Replay:
    """Work that reads and writes the same memory each time, captured in a CUDA graph once it has been the same for some
    times: to launch a kernel takes the host longer than a small one runs."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._times = 0  # that work with this key was launched
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_refused = False

    def prepare(self, key: Hashable, work: Callable[[], None], device: torch.device) -> None:
        """Captures work that is about to be queued, if it is what was queued the last times. Where CUDA refuses, it is
        launched as before. key: equal where work does the same to the same memory."""
        if key != self._key:
            self._graph, self._is_refused = None, False
        elif self._graph is None and not self._is_refused and self._times >= _LEAST_TIMES:
            try:
                self._graph = _captured(work, device)
            except RuntimeError:
                self._is_refused = True

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Queues work on the current stream."""
        if self._graph is not None and key == self._key:
            self._graph.replay()
            return
        self._times = self._times + 1 if key == self._key else 1
        self._key, self._graph = key, None
        work()


def _captured(work: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    return graph
