"""The base class of general codecs, which code tensors as a whole. A codec cuts the bytes of a tensor into blocks, and
codes each block alone (FORMAT.md section 9)."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import torch

MAX_BLOCK_BYTES = 1 << 30  # largest size in bytes of a block before coding
OnBytes = Callable[[int], object]  # called after each block, with its number of bytes before coding


class GeneralCodec(ABC):
    """A codec that codes bytes of any kind, block by block."""

    name: str  # the name in schemes and files, such as "zstd" or "nvcomp:ans"
    package: str  # pip's name of the package that has the codec
    device_type: str  # the type of the devices that code and decode: "cpu" or "cuda"
    is_safe: bool  # whether the authors of the package promise that decoding damaged bytes is safe
    # Names of the options that decoding needs, which are fields of the table in a file. Each begins with "codec_".
    option_names: tuple[str, ...] = ()

    @abstractmethod
    def require(self) -> object:
        """Imports the codec's package, and returns the module or object that the codec uses. If the package is not
        installed, raises ImportError with the package's name."""

    @abstractmethod
    def variant(self, text: str) -> GeneralCodec | None:
        """Returns the variant of the codec for which a scheme asks. `text` is the part of the scheme after the codec's
        name, such as a level. Variants differ in how they code; the codec decodes the blocks of all variants. Returns
        None if `text` names no variant. Raises ValueError for a level that the codec does not have."""

    def tried_variants(self, dtype: torch.dtype) -> Sequence[str]:
        """Returns the names of the variants that `ibp.codecs.choose` tries for tensors of a dtype. "" stands for the
        codec itself."""
        return [""]

    @abstractmethod
    def plan(self, dtype: torch.dtype, chunk_bytes: int | None) -> tuple[int, dict[str, str]]:
        """Returns (size in bytes of a block before coding, options that decoding needs, as strings) for tensors of a
        dtype. Raises ValueError if the codec does not support chunk_bytes. chunk_bytes: the argument of `ibp.compress`.
        None: the codec's default."""

    def suited(
        self, options: dict[str, str], dtype: torch.dtype, data: torch.Tensor, worker: torch.device
    ) -> dict[str, str]:
        """Returns the options with which to code the bytes of a tensor: the given ones, or others that suit these bytes
        better. dtype: the dtype of the tensor. data: the bytes of the tensor, uint8 [bytes], on any device. worker: the
        device that codes."""
        return options

    def check_options(self, options: Mapping[str, str]) -> None:
        """Raises ValueError unless the options have exactly the names in option_names. Codecs with options also check
        their values."""
        if set(options) != set(self.option_names):
            raise ValueError(f"{self.name!r} has the options {sorted(options)}; wanted {sorted(self.option_names)}")

    @abstractmethod
    def encode(
        self, data: torch.Tensor, worker: torch.device, block_bytes: int, options: Mapping[str, str], on_bytes: OnBytes
    ) -> list[torch.Tensor]:
        """Codes bytes, and returns the coded blocks, on the device that codes. A block that coding would not shrink is
        returned uncompressed. data: uint8 [bytes], not empty, on any device; worker: the device that codes; options: as
        returned by `suited`."""

    @abstractmethod
    def decode(
        self,
        blocks: torch.Tensor,
        offsets: Sequence[int],
        block_bytes: int,
        options: Mapping[str, str],
        out: torch.Tensor,
    ) -> None:
        """Decodes consecutive blocks. A codec of a GPU decodes on the GPU's current stream.

        Args:
            blocks: uint8, contiguous, on the device that decodes.
            offsets: the offset in `blocks` at which each block begins, and the offset at which the last one ends.
            block_bytes, options: the values with which the blocks were coded.
            out: uint8, contiguous, on the device that decodes; its size is that of the blocks before coding.

        Raises:
            CorruptTableError: a block was not made by the codec, or decodes to another number of bytes.
        """

    def worker(self, *devices: torch.device) -> torch.device:
        """Returns the device that codes or decodes: the first of the given devices that has the codec's type, else the
        current device of that type. Raises RuntimeError if there is none."""
        for device in devices:
            if device.type == self.device_type:
                return device
        if self.device_type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"{self.name!r} codes and decodes on a GPU, and torch sees no CUDA device")
        return torch.device(self.device_type, torch.cuda.current_device()) if self.device_type == "cuda" else _CPU


_CPU = torch.device("cpu")


def package(name: str, pip_name: str, codec: str) -> ModuleType:
    """Imports a module of the package that has a codec, and returns it. If the package is missing, raises ImportError
    with the command that installs it. name: the module; pip_name: the package; codec: the codec's name."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"the codec {codec!r} needs the package {pip_name}: type `pip install {pip_name}` ({error})"
        ) from error
