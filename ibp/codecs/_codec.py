"""A codec of whole tensors cuts bytes into blocks, and codes each block alone (FORMAT.md section 9)."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from .._rows.faults import CorruptTableError

MAX_BLOCK_BYTES = 1 << 30  # of the bytes that a block stands for
OnBytes = Callable[[int], object]  # called with bytes of the tensor that are done


class BlockCoding(NamedTuple):
    """How a codec codes blocks."""

    block_bytes: int  # of the tensor, that a block stands for
    options: Mapping[str, str]  # of the codec, as text
    level: int | None = None  # one of the codec's levels, to code by; None: its default


class GeneralCodec(ABC):
    """One codec, as the names of schemes and files have it."""

    name: str  # such as "zstd", "nvcomp:ans"
    package: str  # by which it is there, as pip knows it
    device_type: str  # of the devices that code and decode
    block_bytes: int  # of a block, unless something else is asked for
    is_safe: bool  # whether its makers promise that decoding is safe with any bytes
    option_names: tuple[str, ...] = ()  # of the fields of files that decoding needs, each beginning with "codec_"

    @abstractmethod
    def require(self) -> object:
        """What the package gives. ImportError, in a sentence that names the package, where it is not there."""

    @abstractmethod
    def options(self, dtype: torch.dtype, level: int | None, chunk_bytes: int | None) -> dict[str, str]:
        """What decoding needs, as text. ValueError for a level or chunk_bytes that the codec does not have."""

    def suited(
        self, options: dict[str, str], dtype: torch.dtype, data: torch.Tensor, worker: torch.device
    ) -> dict[str, str]:
        """The options by which bytes of elements of a dtype are coded: those given, or others that suit these better.
        data: uint8 [bytes], on any device; worker: the device that codes."""
        return options

    def check_options(self, options: Mapping[str, str]) -> None:
        """ValueError for options that are not those of `options`."""
        if set(options) != set(self.option_names):
            raise ValueError(f"{self.name!r} has the options {sorted(options)}; wanted {sorted(self.option_names)}")

    @abstractmethod
    def blocks_of(self, options: Mapping[str, str], chunk_bytes: int | None) -> int:
        """Bytes of a block when chunk_bytes are asked for."""

    @abstractmethod
    def encode(
        self, data: torch.Tensor, worker: torch.device, how: BlockCoding, on_bytes: OnBytes
    ) -> list[torch.Tensor]:
        """The coded blocks of bytes, on the worker, the device that codes; a block that would not shrink is kept as it
        is. data: uint8 [bytes], at least one, on any device."""

    @abstractmethod
    def decode(self, blocks: torch.Tensor, offsets: Sequence[int], how: BlockCoding, out: torch.Tensor) -> None:
        """Decodes consecutive blocks, on the current stream of a CUDA device. blocks, out: uint8, contiguous, on the
        device that decodes; out is as long as the blocks stand for; offsets: where each block begins in `blocks`, and
        where the last one ends. CorruptTableError: a block is none of the codec, or stands for another number of
        bytes."""

    def worker(self, *devices: torch.device) -> torch.device:
        """The device that codes or decodes: the first of the right type, else the current one. RuntimeError: there is
        none."""
        for device in devices:
            if device.type == self.device_type:
                return device
        if self.device_type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"{self.name!r} codes and decodes on a GPU, and torch sees no CUDA device")
        return torch.device(self.device_type, torch.cuda.current_device()) if self.device_type == "cuda" else _CPU


_CPU = torch.device("cpu")


def package(name: str, pip_name: str, codec: str) -> ModuleType:
    """Imports the package that a codec is in. ImportError, with the command that installs it, where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"the codec {codec!r} needs the package {pip_name}: type `pip install {pip_name}` ({error})"
        ) from error


def corrupt(codec: GeneralCodec, block: int, why: object) -> CorruptTableError:
    """The error of a block that cannot be decoded."""
    return CorruptTableError(f"block {block} of a tensor coded by {codec.name!r} is damaged: {why}")
