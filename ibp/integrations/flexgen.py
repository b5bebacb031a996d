"""Makes FlexGen (0.1.8) keep compressed weights in host memory, and decode them on the GPU.

    import ibp.integrations.flexgen

    ibp.integrations.flexgen.enable()          # before FlexGen makes its model; until close(), or as `with enable():`

From the command line, with the arguments of `python -m flexgen.flex_opt`:

    python -m ibp.integrations.flexgen --model facebook/opt-6.7b --percent 0 100 100 0 100 0

FlexGen's files are not changed. Two kinds of its functions are replaced at run time. `flex_opt.init_weight_list` then
returns a `CompressedWeight` for each matrix in host memory; its `copy` decodes the weight. `load_weight` of a layer
then decodes all weights that it copies in one call of `ibp.decompress`. FlexGen handles everything else as before:
weights on the GPU and on disk, weights that it quantises (`--compress-weight`), vectors, caches and activations.
"""
# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flexgen.flex_opt
import numpy as np
import torch
from flexgen.pytorch_backend import DeviceType, TorchDevice, TorchTensor
from flexgen.utils import torch_dtype_to_np_dtype

import ibp

from ..adapters import WeightCompressor

__all__ = ["CompressedWeight", "close", "enable", "main"]

# The classes of layers whose load_weight copies weights. TransformerLayer is not in this list, because its load_weight
# calls load_weight of two layers of these classes.
_LAYERS = ("InputEmbed", "SelfAttention", "MLP", "OutputEmbed")
_NUM_PERCENTS = 6  # number of values that flex_opt requires for --percent


class CompressedWeight(TorchTensor):
    """A weight that FlexGen keeps in host memory as a table: `data` is an `ibp.CompressedTensor`.

    `copy`, `smart_copy` and `move` return FlexGen's ordinary tensors. `shape`, `dtype` and `bytes` are those of the
    original tensor; `data.nbytes` is the size in bytes of the memory that the table takes.

    Args:
        compress: a function that makes the table of a tensor.
        x: the weight, on the CPU.
        device: FlexGen's device on which the weight is.
        name: FlexGen's name for the weight. None: FlexGen's next number.
    """

    def __init__(
        self,
        compress: Callable[[torch.Tensor], ibp.CompressedTensor],
        x: torch.Tensor,
        device: TorchDevice,
        name: str | None = None,
    ) -> None:
        self._compress = compress
        # FlexGen writes shapes into files, and could not read a torch.Size back.
        super().__init__(tuple(x.shape), x.dtype, compress(x), device, name=name)

    def load_from_np(self, np_array: np.ndarray) -> None:
        """Replaces the weight's values with those of an array, which is broadcast to the weight's shape."""
        x = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.data = self._compress(x.copy_(torch.from_numpy(np_array)))

    def copy(self, dst: Any, src_indices: Sequence[slice] | None = None) -> TorchTensor:
        """Copies the weight, or the part of it that src_indices selects, to new memory on one of FlexGen's devices.

        A copy on a GPU is decoded there, on the current stream; the host does not wait. Within `load_weight` of a
        layer, whole weights are decoded when `load_weight` ends.

        Raises:
            TypeError: dst is a compressed device: FlexGen cannot quantise while it copies.
            ValueError: a slice has a step.
        """
        if dst.device_type == DeviceType.COMPRESSED:
            raise TypeError(f"{self} is copied to FlexGen's compressed device; wanted a GPU, the CPU or a disk")
        if dst.device_type == DeviceType.DISK:
            plain = TorchTensor(self.shape, self.dtype, self.data.decompress(device="cpu"), self.device)
            return plain.copy(dst, src_indices)
        indices = tuple(src_indices or ())
        if any(index.step is not None for index in indices):
            raise ValueError(f"src_indices is {indices}; wanted slices without a step")
        spans = [index.indices(size)[:2] for index, size in zip(indices, self.shape)]
        shape = (*(max(0, stop - start) for start, stop in spans), *self.shape[len(spans) :])
        copied = dst.allocate(shape, torch_dtype_to_np_dtype[self.dtype])
        if shape == self.shape:
            _fetch(self.data, copied.data)
        elif shape[1:] == self.shape[1:]:
            self.data.decompress_items(*_rows(spans), out=copied.data)
        elif copied.data.numel():
            rows = self.data.decompress_items(*_rows(spans), device=copied.data.device)
            columns = tuple(slice(start, stop) for start, stop in spans[1:])
            copied.data.copy_(rows[(slice(None), *columns)], non_blocking=True)
        return copied

    def smart_copy(self, dst: Any, src_indices: Sequence[slice] | None = None) -> tuple[TorchTensor, bool]:
        """Returns (a copy, True). The weight is copied even if it is already on dst, because FlexGen can only compute
        with copies."""
        return self.copy(dst, src_indices), True

    def __str__(self) -> str:
        table = "" if self.data is None else f", {self.data!r}"
        return f"CompressedWeight({super().__str__()}{table})"


def _rows(spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    start, stop = spans[0]
    return start, max(start, stop)


# ---- all weights of a layer in one call ------------------------------------------------------------------------------


_Jobs = list[tuple[ibp.CompressedTensor, torch.Tensor]]  # (table, the memory to which it is decoded)
# The copies that a layer's load_weight has asked for while it runs; None if no load_weight is running.
_loading: _Jobs | None = None
_fetching: dict[str, Any] = {}  # the options path and max_sms of decompress


def _fetch(table: ibp.CompressedTensor, out: torch.Tensor) -> None:
    """Decodes a table into `out`. If a layer's load_weight is running, the table is decoded when load_weight ends."""
    if _loading is None:
        _decode([(table, out)])
    else:
        _loading.append((table, out))


def _decode(jobs: _Jobs) -> None:
    if jobs:
        tables, outs = map(list, zip(*jobs))
        ibp.decompress(tables, out=outs, **(_fetching if outs[0].is_cuda else {}))


def _as_one_stream(load_weight: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that calls a layer's load_weight, and then decodes all of the layer's weights in one call.
    This is possible because FlexGen uses the weights only after load_weight has returned. FlexGen calls load_weight
    with its copy stream as the current stream, so the tables are decoded on that stream."""

    @functools.wraps(load_weight)
    def load(*args: Any) -> None:
        global _loading
        _loading = []
        try:
            load_weight(*args)
            _decode(_loading)
        finally:
            _loading = None

    return load


# ---- enabling --------------------------------------------------------------------------------------------------------

_enabled = contextlib.ExitStack()  # restores FlexGen's functions


def _put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Until `close` is called, replaces the function `name` of `owner` with make(the function)."""
    original = getattr(owner, name)
    _enabled.callback(setattr, owner, name, original)
    setattr(owner, name, make(original))


def enable(*, path: str | None = None, max_sms: int | None = None, **compress_options: Any) -> contextlib.ExitStack:
    """Makes FlexGen compress the weights that it loads into host memory, until `close` is called.

    If `enable` is called again, the new options apply to models that are made afterwards. If FlexGen would pin the
    weights (`--pin-weight`, on by default), the tables are pinned, in memory of exactly their size. The weights of a
    layer are compressed as soon as the layer has been read, so memory holds the raw weights of only one layer at a
    time.

    Args:
        path, max_sms: as in `ibp.decompress`, for weights that are copied to a GPU. They also apply to models that were
            made before.
        compress_options: options of `ibp.compress`, except x and codebook. By default layout is "packed" and row_bytes
            4,096.

    Returns:
        An object whose `close()` calls the function `close` of this module; it is also a context manager. The caller
        may ignore it.

    Raises:
        TypeError: an option is not one of `ibp.compress`.
    """
    compressor = WeightCompressor(compress_options)
    close()
    _fetching.update(path=path, max_sms=max_sms)
    _enabled.callback(_fetching.clear)
    _put(flexgen.flex_opt, "init_weight_list", lambda original: _compressing(original, compressor))
    for layer in _LAYERS:
        _put(getattr(flexgen.flex_opt, layer), "load_weight", _as_one_stream)
    at_the_end = contextlib.ExitStack()
    at_the_end.callback(close)
    return at_the_end


def close() -> None:
    """Restores FlexGen's functions. Does nothing if compression is not enabled.

    Models that already have compressed weights still work, but decode a layer's weights one by one.
    """
    _enabled.close()


def _compressing(original: Callable[..., list[TorchTensor]], compressor: WeightCompressor) -> Callable[..., list]:
    """Returns a function that does the work of flex_opt.init_weight_list, but compresses weights in host memory."""

    @functools.wraps(original)
    def init_weight_list(weight_specs: list[tuple], policy: Any, env: Any) -> list[TorchTensor]:
        if policy.compress_weight:  # FlexGen quantises its matrices itself, so only vectors would be left to compress
            return original(weight_specs, policy, env)
        # Raw weights are soon freed. They are not pinned, because torch does not return freed pinned memory to the
        # system.
        weights = original(weight_specs, dataclasses.replace(policy, pin_weight=False), env)
        defaults: dict[str, Any] = {"device": env.gpu.dev, "memory": None if policy.pin_weight else "host"}
        for i, (weight, (_, _, file)) in enumerate(zip(weights, weight_specs)):
            if weight.device is env.cpu and len(weight.shape) > 1:
                compress = functools.partial(compressor.compress, file, **defaults)
                weights[i] = CompressedWeight(compress, weight.data, weight.device, weight.name)
        return weights

    return init_weight_list


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs FlexGen's command with compressed weights. arguments: the arguments of `python -m flexgen.flex_opt`. None:
    the arguments of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m ibp.integrations.flexgen", description="FlexGen's flex_opt, with compressed weights."
    )
    flexgen.flex_opt.add_parser_arguments(parser)
    parsed = parser.parse_args(arguments)
    if len(parsed.percent) != _NUM_PERCENTS:
        parser.error(f"--percent has {len(parsed.percent)} numbers; wanted {_NUM_PERCENTS}")
    with enable():
        flexgen.flex_opt.run_flexgen(parsed)


if __name__ == "__main__":
    main()
