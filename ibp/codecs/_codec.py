"""The base class of general codecs, which code tensors as a whole. A codec cuts the bytes of a tensor into blocks, and
codes each block alone (FORMAT.md section 9).

zstd and lz4 on the CPU. Several threads code and decode blocks at the same time, which is possible because the
packages release Python's global interpreter lock.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import torch

from .._machine import staging
from .._rows.faults import CorruptTableError

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


# Size in bytes of a block before coding: the default, and the smallest size that a caller can ask for.
_BLOCK_BYTES, _LEAST_BLOCK_BYTES = 2 << 20, 4096


class HostCodec(GeneralCodec):
    """A codec of a package that works on host memory.

    Attributes:
        module: the name of the module to import.
        error: the name of the module's exception for invalid bytes.
        levels: the levels that a scheme can ask for.
        level: the level that the codec codes with. None: the default.
    """

    device_type = "cpu"
    is_safe = True
    module: str
    error: str
    levels: range

    def __init__(self, level: int | None = None) -> None:
        self.level = level

    def require(self) -> ModuleType:
        return package(self.module, self.package, self.name)

    def variant(self, text: str) -> HostCodec | None:
        if not text.removeprefix("-").isdecimal():
            return None
        if int(text) not in self.levels:
            raise ValueError(
                f"the level of {self.name!r} is {int(text)}; wanted {self.levels.start} to {self.levels.stop - 1}"
            )
        return type(self)(int(text))

    def plan(self, dtype: torch.dtype, chunk_bytes: int | None) -> tuple[int, dict[str, str]]:
        if chunk_bytes is None:
            return _BLOCK_BYTES, {}
        if chunk_bytes % 8 or not _LEAST_BLOCK_BYTES <= chunk_bytes <= MAX_BLOCK_BYTES:
            raise ValueError(
                f"chunk_bytes is {chunk_bytes}; {self.name!r} takes a multiple of 8 from {_LEAST_BLOCK_BYTES} to "
                f"{MAX_BLOCK_BYTES}"
            )
        return chunk_bytes, {}

    def encode(
        self, data: torch.Tensor, worker: torch.device, block_bytes: int, options: Mapping[str, str], on_bytes: OnBytes
    ) -> list[torch.Tensor]:
        def encode_block(block: torch.Tensor) -> torch.Tensor:
            coded = self._encode(block.numpy().data)
            on_bytes(block.numel())
            return torch.frombuffer(coded, dtype=torch.uint8) if len(coded) < block.numel() else block

        return _by_threads(encode_block, staging.to_host(data).split(block_bytes))

    def decode(
        self,
        blocks: torch.Tensor,
        offsets: Sequence[int],
        block_bytes: int,
        options: Mapping[str, str],
        out: torch.Tensor,
    ) -> None:
        coded, targets = blocks.numpy(), out.split(block_bytes)
        errors: tuple[type[Exception], ...] = (ValueError, getattr(self.require(), self.error))

        def decode_block(number: int) -> None:
            part, target = coded[offsets[number] : offsets[number + 1]], targets[number].numpy()
            if part.size == target.size:
                target[:] = part
                return
            try:
                data = self._decode(part.data, target.size)
                if len(data) != target.size:
                    raise ValueError(f"it stands for {len(data)} bytes; wanted {target.size}")
            except errors as error:
                raise CorruptTableError(
                    f"block {number} of a tensor coded by {self.name!r} is damaged: {error}"
                ) from error
            target[:] = np.frombuffer(data, np.uint8)

        _by_threads(decode_block, range(len(targets)))

    @abstractmethod
    def _encode(self, data: memoryview) -> bytearray:
        """Codes a block, and returns the coded bytes."""

    @abstractmethod
    def _decode(self, data: memoryview, num_bytes: int) -> bytes:
        """Decodes a block, and returns its original bytes. Allocates at most num_bytes bytes, the size that the block
        is expected to have. Raises ValueError or the package's exception for invalid bytes."""


class Zstd(HostCodec):
    """Frames of Zstandard (RFC 8878) that include the size of their content."""

    name, package, module, error = "zstd", "zstandard", "zstandard", "ZstdError"
    levels = range(-100, 23)

    def _encode(self, data: memoryview) -> bytearray:
        # A new coder for each block, because threads cannot share one; it takes 10 us.
        coder = self.require().ZstdCompressor(level=3 if self.level is None else self.level)
        return bytearray(coder.compress(data))

    def _decode(self, data: memoryview, num_bytes: int) -> bytes:
        zstandard = self.require()
        found = zstandard.frame_content_size(data)
        if found != num_bytes:
            raise ValueError(f"it stands for {found} bytes; wanted {num_bytes}")
        coder = zstandard.ZstdDecompressor()
        decoded: bytes = coder.decompress(data, max_output_size=num_bytes, allow_extra_data=False)
        return decoded


class Lz4(HostCodec):
    """Blocks of LZ4, without a frame. A higher level makes the search for matches longer, but the format of the blocks
    is the same."""

    name, package, module, error = "lz4", "lz4", "lz4.block", "LZ4BlockError"
    levels = range(1, 13)

    def _encode(self, data: memoryview) -> bytearray:
        options: dict[str, Any] = {}
        if self.level is not None:
            options = {"mode": "high_compression", "compression": self.level}
        coded: bytearray = self.require().compress(data, store_size=False, return_bytearray=True, **options)
        return coded

    def _decode(self, data: memoryview, num_bytes: int) -> bytes:
        decoded: bytes = self.require().decompress(data, uncompressed_size=num_bytes)
        return decoded


def _by_threads(work: Any, items: Sequence[Any]) -> list[Any]:
    """Calls a function for each item, on up to torch.get_num_threads() threads. Returns the results in order."""
    count = min(torch.get_num_threads(), len(items))
    if count <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(count, "ibp-codec") as threads:
        return list(threads.map(work, items))
