"""Damage that decoders note on their device. It is looked for without waiting, when the next pass begins."""

from __future__ import annotations

import torch


class DecodeFaults:
    """The memory of each device in which decoders note damage."""

    def __init__(self) -> None:
        self._noted: dict[torch.device, torch.Tensor] = {}
        self._copied: dict[torch.device, tuple[torch.Tensor, torch.cuda.Event]] = {}

    def of(self, device: torch.device) -> torch.Tensor:
        """int64 [4], to which decoders write."""
        if device not in self._noted:
            self._noted[device] = torch.zeros(4, dtype=torch.int64, device=device)
        return self._noted[device]

    def check(self) -> None:
        """Raises RuntimeError for damage that the host knows of, and asks devices for more."""
        for device, noted in self._noted.items():
            if device.type == "cpu":
                _raise_for(noted)
            elif not torch.cuda.is_current_stream_capturing():
                self._check_gpu(device, noted)

    def _check_gpu(self, device: torch.device, noted: torch.Tensor) -> None:
        if device in self._copied:
            copy, done = self._copied[device]
            if not done.query():
                return
            _raise_for(copy)
        copy = torch.empty(4, dtype=torch.int64, pin_memory=True).copy_(noted, non_blocking=True)
        self._copied[device] = copy, torch.cuda.current_stream(device).record_event()


def _raise_for(noted: torch.Tensor) -> None:
    if int(noted[0]) != 0:
        raise RuntimeError("saved activations came back damaged in an earlier step: its gradients are wrong")
