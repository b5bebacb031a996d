"""Stand-ins with which FlexGen runs on a machine without a GPU. This module does not import FlexGen, because
`flexgen_opt.py` runs a release of it and `infinigen.py` runs a fork."""

import contextlib
from unittest import mock

import torch


def cpu_device(device_class):
    """Returns a class of FlexGen's devices for a machine without a GPU. device_class: FlexGen's TorchDevice. The memory
    of the devices is the CPU's, and it is not pinned."""

    class CpuDevice(device_class):
        def __init__(self, name):
            super().__init__("cpu")

        def allocate(self, shape, dtype, pin_memory=None, name=None):
            return super().allocate(shape, dtype, False, name)

    return CpuDevice


class NoDisk:
    """A stand-in for FlexGen's disk, whose threads need a GPU."""

    def __init__(self, path=None):
        self.path = path

    def synchronize(self):
        """Does nothing, because no transfer is ever under way."""

    def close_copy_threads(self):
        """Does nothing, because there are no threads."""


class NoEvent:
    """A stand-in for an event of a GPU."""

    def __init__(self, enable_timing=False):
        self.enable_timing = enable_timing

    def record(self):
        """Does nothing, because no work is under way when it is called."""

    def elapsed_time(self, later):
        """Returns 0 milliseconds, because events of a machine without a GPU know no times."""
        return 0.0


@contextlib.contextmanager
def without_cuda():
    """Lets FlexGen run without CUDA inside a block. Stand-ins replace streams, events, waiting for them, and cuda()."""
    with (
        mock.patch.multiple(
            torch.cuda,
            Stream=lambda: None,
            stream=lambda stream: contextlib.nullcontext(),
            Event=NoEvent,
            synchronize=lambda *device: None,
        ),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *device: tensor),
    ):
        yield
