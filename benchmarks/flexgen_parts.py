"""What runs of FlexGen need without a trained model or without a GPU: random weights in its file format, stand-ins.

This module does not import FlexGen, because `flexgen_opt.py` runs a release of it and `infinigen.py` runs a fork.
"""

import contextlib
from unittest import mock

import numpy as np
import torch

DEVIATION = 0.02  # The weights have this standard deviation.


def shapes(config):
    """Yields (name, shape) of every file that FlexGen reads for a model."""
    h, f = config.input_dim, config.ffn_embed_dim
    yield "embed_tokens.weight", (config.vocab_size, h)
    yield "embed_positions.weight", (config.max_seq_len + 2, h)
    names = ["layer_norm"]
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}"
        names += [f"{prefix}.self_attn_layer_norm", f"{prefix}.final_layer_norm"]
        for name, out, columns in (
            *((f"self_attn.{kind}_proj", h, h) for kind in ("q", "k", "v", "out")),
            ("fc1", f, h),
            ("fc2", h, f),
        ):
            yield f"{prefix}.{name}.weight", (out, columns)
            yield f"{prefix}.{name}.bias", (out,)
    for name in names:
        yield f"{name}.weight", (h,)
        yield f"{name}.bias", (h,)


def write_weights(config, directory, device):
    """Writes random FP16 weights in FlexGen's file format. Matrices and biases are normal, and gains of norms are
    around 1. The values come from torch's generator on the device. Returns the folder of the files."""
    home = directory / f"{config.name}-np"
    home.mkdir(parents=True)
    for name, shape in shapes(config):
        values = torch.randn(shape, device=device) * DEVIATION
        if name.endswith("layer_norm.weight"):
            values += 1
        with open(home / f"decoder.{name}", "wb") as file:
            np.save(file, values.half().cpu().numpy())
    return home


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
