"""Codecs of whole tensors. Such a codec cuts bytes into blocks, and codes each block alone (FORMAT.md section 9)."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import torch

MAX_BLOCK_BYTES = 1 << 30  # of the tensor's bytes in a block
OnBytes = Callable[[int], object]  # called with the number of bytes of the tensor that are done


class GeneralCodec(ABC):
    """A codec, under the name that schemes and files give it."""

    name: str  # such as "zstd", "nvcomp:ans"
    package: str  # the package that has it, under its name for pip
    device_type: str  # the type of the devices that code and decode
    is_safe: bool  # whether its makers promise that decoding any bytes is safe
    option_names: tuple[str, ...] = ()  # names of the fields of files that decoding needs; each begins with "codec_"

    @abstractmethod
    def require(self) -> object:
        """Imports and returns what the codec needs of its package. Raises ImportError, with the package's name, if
        it is not installed."""

    @abstractmethod
    def variant(self, text: str) -> GeneralCodec | None:
        """Returns the codec that codes as the text behind its name in a scheme says, such as a level. Blocks of all
        variants are decoded alike. Returns None for any other text, and raises ValueError for a level that the codec
        does not have."""

    def tried_variants(self, dtype: torch.dtype) -> Sequence[str]:
        """Returns the texts of the variants among which `ibp.codecs.choose` chooses for elements of a dtype; "" is the
        codec itself."""
        return [""]

    @abstractmethod
    def plan(self, dtype: torch.dtype, chunk_bytes: int | None) -> tuple[int, dict[str, str]]:
        """Returns the bytes of a tensor of a dtype in a block, and what decoding needs, as text. Raises ValueError for
        chunk_bytes that the codec does not have. chunk_bytes: None: the codec's own."""

    def suited(
        self, options: dict[str, str], dtype: torch.dtype, data: torch.Tensor, worker: torch.device
    ) -> dict[str, str]:
        """Returns the options with which bytes of elements of a dtype are coded: those given, or others that suit
        these bytes better. data: uint8 [bytes], on any device; worker: the device that codes."""
        return options

    def check_options(self, options: Mapping[str, str]) -> None:
        """Raises ValueError if the options do not have the names that `plan` gives."""
        if set(options) != set(self.option_names):
            raise ValueError(f"{self.name!r} has the options {sorted(options)}; wanted {sorted(self.option_names)}")

    @abstractmethod
    def encode(
        self, data: torch.Tensor, worker: torch.device, block_bytes: int, options: Mapping[str, str], on_bytes: OnBytes
    ) -> list[torch.Tensor]:
        """Returns the coded blocks of bytes, on the worker, the device that codes. A block that would not shrink is
        kept as it is. data: uint8 [bytes], at least one, on any device."""

    @abstractmethod
    def decode(
        self,
        blocks: torch.Tensor,
        offsets: Sequence[int],
        block_bytes: int,
        options: Mapping[str, str],
        out: torch.Tensor,
    ) -> None:
        """Decodes consecutive blocks, on the current stream of a CUDA device.

        Args:
            blocks: uint8, contiguous, on the device that decodes.
            offsets: where each block begins in `blocks`, and where the last one ends.
            block_bytes, options: how the blocks were coded.
            out: uint8, contiguous, on the device that decodes; as long as the blocks' original bytes.

        Raises:
            CorruptTableError: a block was not made by the codec, or has another number of original bytes.
        """

    def worker(self, *devices: torch.device) -> torch.device:
        """Returns the device that codes or decodes: the first of the right type, else the current one. Raises
        RuntimeError if there is none."""
        for device in devices:
            if device.type == self.device_type:
                return device
        if self.device_type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"{self.name!r} codes and decodes on a GPU, and torch sees no CUDA device")
        return torch.device(self.device_type, torch.cuda.current_device()) if self.device_type == "cuda" else _CPU


_CPU = torch.device("cpu")


def package(name: str, pip_name: str, codec: str) -> ModuleType:
    """Imports the package that a codec is in. If it is missing, raises ImportError with the command that installs
    it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"the codec {codec!r} needs the package {pip_name}: type `pip install {pip_name}` ({error})"
        ) from error
