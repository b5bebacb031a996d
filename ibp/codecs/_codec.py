"""General codecs, which code tensors as a whole. A codec cuts the bytes of a tensor into blocks, and codes each block
alone (FORMAT.md section 9).

`GeneralCodec` is the base class. `HostCodec` is for zstd and lz4 on the CPU: several threads code and decode blocks at
the same time, which is possible because the packages release Python's global interpreter lock. `NvComp` is for nvCOMP's
codecs on a GPU, which are called through its Python package. They run on the caller's stream, in memory from torch's
allocator, and their coders and configurations are kept for later calls. `CODECS` has all codecs by name, and `codec_of`
finds the codec of a scheme.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch

from .._common.arguments import near
from .._common.process import ForkLock
from .._common.sequences import in_threads
from .._machine import staging
from .._rows.geometry import INTEGERS
from .._rows.handle import CorruptTableError

_CPU = torch.device("cpu")
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


def package(name: str, pip_name: str, codec: str) -> ModuleType:
    """Imports a module of the package that has a codec, and returns it. If the package is missing, raises ImportError
    with the command that installs it. name: the module; pip_name: the package; codec: the codec's name."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"the codec {codec!r} needs the package {pip_name}: type `pip install {pip_name}` ({error})"
        ) from error


# ---- codecs of the CPU ----

# Size in bytes of a block before coding: the default, and the smallest size that a caller can ask for.
_HOST_BLOCK_BYTES, _LEAST_HOST_BLOCK_BYTES = 2 << 20, 4096


@dataclass(eq=False)
class HostCodec(GeneralCodec):
    """Codes and decodes with a package that works on host memory."""

    name: str
    package: str
    module: str  # the name of the module to import
    error: str  # the name of the module's exception for invalid bytes
    levels: range  # the levels that a scheme can ask for
    # A function of (module, block, level) that codes a block, and returns the coded bytes.
    encode_block: Callable[[ModuleType, memoryview, int | None], bytearray]
    # A function of (module, coded block, num_bytes) that returns the original bytes. Allocates at most num_bytes bytes,
    # the size that the block is expected to have. Raises ValueError or the package's exception for invalid bytes.
    decode_block: Callable[[ModuleType, memoryview, int], bytes]
    level: int | None = None  # the level that the codec codes with; None: the default
    device_type = "cpu"
    is_safe = True

    def require(self) -> ModuleType:
        return package(self.module, self.package, self.name)

    def variant(self, text: str) -> HostCodec | None:
        if not text.removeprefix("-").isdecimal():
            return None
        if int(text) not in self.levels:
            raise ValueError(
                f"the level of {self.name!r} is {int(text)}; wanted {self.levels.start} to {self.levels.stop - 1}"
            )
        return replace(self, level=int(text))

    def plan(self, dtype: torch.dtype, chunk_bytes: int | None) -> tuple[int, dict[str, str]]:
        if chunk_bytes is None:
            return _HOST_BLOCK_BYTES, {}
        if chunk_bytes % 8 or not _LEAST_HOST_BLOCK_BYTES <= chunk_bytes <= MAX_BLOCK_BYTES:
            raise ValueError(
                f"chunk_bytes is {chunk_bytes}; {self.name!r} takes a multiple of 8 from {_LEAST_HOST_BLOCK_BYTES} to "
                f"{MAX_BLOCK_BYTES}"
            )
        return chunk_bytes, {}

    def encode(
        self, data: torch.Tensor, worker: torch.device, block_bytes: int, options: Mapping[str, str], on_bytes: OnBytes
    ) -> list[torch.Tensor]:
        module = self.require()

        def encode_block(block: torch.Tensor) -> torch.Tensor:
            coded = self.encode_block(module, block.numpy().data, self.level)
            on_bytes(block.numel())
            return torch.frombuffer(coded, dtype=torch.uint8) if len(coded) < block.numel() else block

        return list(in_threads(encode_block, staging.to_host(data).split(block_bytes), torch.get_num_threads()))

    def decode(
        self,
        blocks: torch.Tensor,
        offsets: Sequence[int],
        block_bytes: int,
        options: Mapping[str, str],
        out: torch.Tensor,
    ) -> None:
        module, coded, targets = self.require(), blocks.numpy(), out.split(block_bytes)
        errors: tuple[type[Exception], ...] = (ValueError, getattr(module, self.error))

        def decode_block(number: int) -> None:
            part, target = coded[offsets[number] : offsets[number + 1]], targets[number].numpy()
            if part.size == target.size:
                target[:] = part
                return
            try:
                data = self.decode_block(module, part.data, target.size)
                if len(data) != target.size:
                    raise ValueError(f"it stands for {len(data)} bytes; wanted {target.size}")
            except errors as error:
                raise CorruptTableError(
                    f"block {number} of a tensor coded by {self.name!r} is damaged: {error}"
                ) from error
            target[:] = np.frombuffer(data, np.uint8)

        for _ in in_threads(decode_block, range(len(targets)), torch.get_num_threads()):
            pass


# Frames of Zstandard (RFC 8878) include the size of their content. Threads cannot share a coder, so each block gets a
# new one. Making a coder takes 10 us.


def _encode_zstd(zstandard: ModuleType, data: memoryview, level: int | None) -> bytearray:
    return bytearray(zstandard.ZstdCompressor(level=3 if level is None else level).compress(data))


def _decode_zstd(zstandard: ModuleType, data: memoryview, num_bytes: int) -> bytes:
    found = zstandard.frame_content_size(data)
    if found != num_bytes:
        raise ValueError(f"it stands for {found} bytes; wanted {num_bytes}")
    decoder = zstandard.ZstdDecompressor()
    decoded: bytes = decoder.decompress(data, max_output_size=num_bytes, allow_extra_data=False)
    return decoded


# Blocks of LZ4 have no frame. A higher level makes the search for matches longer, but the format of the blocks is the
# same.


def _encode_lz4(block: ModuleType, data: memoryview, level: int | None) -> bytearray:
    options: dict[str, Any] = {} if level is None else {"mode": "high_compression", "compression": level}
    coded: bytearray = block.compress(data, store_size=False, return_bytearray=True, **options)
    return coded


def _decode_lz4(block: ModuleType, data: memoryview, num_bytes: int) -> bytes:
    decoded: bytes = block.decompress(data, uncompressed_size=num_bytes)
    return decoded


_HOST_CODECS = (
    HostCodec("zstd", "zstandard", "zstandard", "ZstdError", range(-100, 23), _encode_zstd, _decode_zstd),
    HostCodec("lz4", "lz4", "lz4.block", "LZ4BlockError", range(1, 13), _encode_lz4, _decode_lz4),
)


# ---- codecs of nvCOMP ----

_CHUNK, _TYPE = "codec_chunk_bytes", "codec_data_type"  # names of the options
_ALGORITHMS = {  # nvCOMP's names of the codecs, by their names in schemes
    "ans": "ANS",
    "bitcomp": "Bitcomp",
    "cascaded": "Cascaded",
    "deflate": "Deflate",
    "gdeflate": "GDeflate",
    "lz4": "LZ4",
    "snappy": "Snappy",
    "zstd": "Zstd",
}
_TYPED = ("bitcomp", "cascaded")  # codecs that work on whole elements, not on bytes
# The variants of ANS: the strings that can follow its name in a scheme, to say whether it codes floats as floats or as
# bytes. The other codecs have no variants.
_VARIANTS = ("floats", "bytes")
_SAMPLE_BYTES = 4 << 20  # size in bytes of the sample of a tensor on which ANS is tried with floats and with bytes
_HUNGRY = ("deflate", "gdeflate", "zstd")  # coding with these needs several times a block's size of additional memory
# Limit in bytes of a block before coding: for most codecs, and for those in _HUNGRY.
_GPU_BLOCK_BYTES, _LESS_GPU_BLOCK_BYTES = 256 << 20, 32 << 20
# Size in bytes of a chunk: the default, the smallest and the largest.
CHUNK_BYTES, _LEAST_CHUNK_BYTES, _MAX_CHUNK_BYTES = 1 << 16, 1 << 10, 1 << 24
_ALIGNMENT = 16  # bytes; no codec of nvCOMP needs a larger alignment of coded blocks
# CUDA's handle cudaStreamLegacy of the default stream. nvCOMP takes the usual handle, 0, to mean that no stream is
# given.
_LEGACY_STREAM = 1
_MOST_CODERS = 4  # number of coders that are kept; each has memory on its GPU
# The element types that files may name, as array-protocol type strings.
_TYPES = ("|u1", "<u2", "<u4", "<u8", "<f2", "<f4")


class NvComp(GeneralCodec):
    """One of nvCOMP's codecs. A block is a buffer in nvCOMP's native format, with many chunks. The buffer is padded
    with zeros to a multiple of 16 bytes."""

    device_type = "cuda"
    package = "nvidia-nvcomp-cu13"
    is_safe = False
    option_names = (_CHUNK, _TYPE)

    def __init__(self, kind: str, variant: str = "") -> None:
        """Makes a codec. kind: a key of `_ALGORITHMS`. variant: for ANS one of `_VARIANTS`, or "", which leaves the
        choice to a sample."""
        self.kind, self.name, self._variant = kind, f"nvcomp:{kind}", variant

    def require(self) -> ModuleType:
        return _module(self.name)

    def variant(self, text: str) -> NvComp | None:
        if text.removeprefix("-").isdecimal():
            raise ValueError(f"the scheme is '{self.name}:{text}', but {self.name!r} has no levels")
        return NvComp(self.kind, text) if self.kind == "ans" and text in _VARIANTS else None

    def tried_variants(self, dtype: torch.dtype) -> Sequence[str]:
        return _VARIANTS if len(self.types(dtype)) > 1 else [""]

    def plan(self, dtype: torch.dtype, chunk_bytes: int | None) -> tuple[int, dict[str, str]]:
        chunk_bytes = CHUNK_BYTES if chunk_bytes is None else chunk_bytes
        options = self.fields(dtype, chunk_bytes)
        self.check_options(options)
        most = _LESS_GPU_BLOCK_BYTES if self.kind in _HUNGRY else _GPU_BLOCK_BYTES
        return most // chunk_bytes * chunk_bytes, options

    def fields(self, dtype: torch.dtype, chunk_bytes: int) -> dict[str, str]:
        """Returns the options for elements of a dtype and for chunks of chunk_bytes bytes. chunk_bytes is not
        checked."""
        return {_CHUNK: str(chunk_bytes), _TYPE: self.types(dtype)[0]}

    def suited(
        self, options: dict[str, str], dtype: torch.dtype, data: torch.Tensor, worker: torch.device
    ) -> dict[str, str]:
        """Codes a sample of the data as each of the types that `types` returns. Returns the options with the type that
        takes the fewest bytes; ties go to the first type."""
        types = self.types(dtype)
        if len(types) == 1 or not data.numel():
            return options
        sample = _sample(data, int(options[_CHUNK]))
        sizes = {}
        with torch.cuda.device(worker):
            near = aligned(staging.to_device(sample, worker))
            for data_type in types:
                coder = self.coder(worker, options | {_TYPE: data_type})
                sizes[data_type] = coder.encode(near, coder.room(near)).numel()
        return options | {_TYPE: min(types, key=sizes.__getitem__)}

    def check_options(self, options: Mapping[str, str]) -> None:
        super().check_options(options)
        text = options[_CHUNK]
        chunk_bytes = int(text) if text.isdecimal() and len(text) < 20 else 0
        if chunk_bytes % 16 or not _LEAST_CHUNK_BYTES <= chunk_bytes <= _MAX_CHUNK_BYTES:
            raise ValueError(
                f"chunk_bytes is {text}; {self.name!r} takes a multiple of 16 from {_LEAST_CHUNK_BYTES} to "
                f"{_MAX_CHUNK_BYTES}"
            )
        if options[_TYPE] not in _TYPES:
            raise ValueError(f"the type is {options[_TYPE]!r}; {self.name!r} takes one of {list(_TYPES)}")

    def types(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Returns the data types as which nvCOMP can code elements of a dtype, as array-protocol type strings. The
        first one is the default. ANS codes floats of two and four bytes as floats, whose exponents it splits off, or as
        bytes, which suits floats with many equal values. Other codecs code elements as bytes, or as integers of the
        elements' size."""
        size = dtype.itemsize
        if self.kind == "ans" and dtype.is_floating_point and size in (2, 4):
            found = dict(zip(_VARIANTS, (f"<f{size}", "|u1")))
            return (found[self._variant],) if self._variant else tuple(found.values())
        return (f"<u{size}" if self.kind in _TYPED and size > 1 else "|u1",)

    def encode(
        self, data: torch.Tensor, worker: torch.device, block_bytes: int, options: Mapping[str, str], on_bytes: OnBytes
    ) -> list[torch.Tensor]:
        pieces = []
        with torch.cuda.device(worker):
            coder = self.coder(worker, options)
            for part in data.split(block_bytes):
                near = aligned(staging.to_device(part, worker))
                coded = coder.encode(near, coder.room(near))
                pieces.append(_padded(coded) if coded.numel() + _ALIGNMENT < near.numel() else near.clone())
                on_bytes(part.numel())
        return pieces

    def decode(
        self,
        blocks: torch.Tensor,
        offsets: Sequence[int],
        block_bytes: int,
        options: Mapping[str, str],
        out: torch.Tensor,
    ) -> None:
        with torch.cuda.device(out.device):
            coder = self.coder(out.device, options)
            for number, target in enumerate(out.split(block_bytes)):
                coded = blocks[offsets[number] : offsets[number + 1]]
                if coded.numel() == target.numel():
                    target.copy_(coded)
                else:
                    coder.decode(aligned(coded), target)

    def coder(self, device: torch.device, options: Mapping[str, str]) -> Coder:
        """Returns the coder for the current stream of a device."""
        return _coder(self.kind, options[_TYPE], int(options[_CHUNK]), device.index, stream_number(device))


class Coder:
    """A codec of nvCOMP for one stream. nvCOMP needs a configuration for each size of data; a coder keeps the
    configurations that it has used. policies: further options of nvCOMP's codec."""

    def __init__(
        self,
        nvcomp: ModuleType,
        kind: str,
        data_type: str,
        chunk_bytes: int,
        device_index: int,
        stream: int,
        **policies: Any,
    ) -> None:
        self._nvcomp, self._stream, self._lock = nvcomp, stream, ForkLock()
        typed = {} if kind in ("deflate", "gdeflate", "snappy", "zstd") else {"data_type": data_type}
        self._words = INTEGERS[int(data_type[-1])] if kind in _TYPED else torch.uint8
        self._codec = nvcomp.Codec(
            algorithm=_ALGORITHMS[kind],
            device_id=device_index,
            cuda_stream=stream,
            uncomp_chunk_size=chunk_bytes,
            **typed,
            **policies,
        )
        self._configuration = functools.lru_cache(64)(self._configured)

    def _configured(self, num_bytes: int) -> tuple[Any, Any]:
        """Returns (configuration for coding, configuration for decoding) for data of num_bytes bytes. Neither
        configuration depends on the coded bytes."""
        coding = self._codec.compression_config(num_bytes)
        return coding, self._codec.decompression_config(coding)

    def room(self, data: torch.Tensor) -> torch.Tensor:
        """Returns memory that is large enough for the coded bytes of any data of this size."""
        with self._lock:
            most = self._codec.get_max_comp_buffer_size(self._array(data.view(self._words)))
        return torch.empty(most, dtype=torch.uint8, device=data.device)

    def encode(self, data: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """Codes data. Returns the coded bytes, a view of the beginning of `room`. Waits until their size is known."""
        with self._lock:
            coding, _ = self._configuration(data.numel())
            out = self._array(room)  # nvCOMP changes the size of its own arrays, but not of tensors
            self._codec.encode(self._array(data.view(self._words)), out=out, compression_config=coding)
            return room[: out.buffer_size]

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        """Decodes bytes into `out`. The bytes must have been coded by a coder with the same options. Does not wait for
        the GPU."""
        with self._lock:
            _, decoding = self._configuration(out.numel())
            self._codec.decode(self._array(coded), out=out, decompression_config=decoding)

    def _array(self, tensor: torch.Tensor) -> Any:
        return self._nvcomp.as_array(tensor, self._stream)


def _sample(data: torch.Tensor, chunk_bytes: int) -> torch.Tensor:
    """Returns a sample of at most _SAMPLE_BYTES of the data, in whole chunks at equal distances, but at least one
    chunk. If the data are no larger than this, returns all of them."""
    if data.numel() <= max(_SAMPLE_BYTES, chunk_bytes):
        return data
    chunks = data[: data.numel() // chunk_bytes * chunk_bytes].view(-1, chunk_bytes)
    return chunks[:: -(-len(chunks) // max(1, _SAMPLE_BYTES // chunk_bytes))].reshape(-1)


def aligned(data: torch.Tensor) -> torch.Tensor:
    """Returns `data`, or a copy of it if nvCOMP does not accept the alignment of its address."""
    return data if data.data_ptr() % _ALIGNMENT == 0 else data.clone()


def _padded(coded: torch.Tensor) -> torch.Tensor:
    """Copies the coded bytes to new memory, and adds zeros up to a multiple of _ALIGNMENT bytes. Returns the result."""
    return torch.nn.functional.pad(coded, (0, -coded.numel() % _ALIGNMENT))


@functools.lru_cache(_MOST_CODERS)
def _coder(kind: str, data_type: str, chunk_bytes: int, device_index: int, stream: int) -> Coder:
    """Returns one of the _MOST_CODERS most recently used coders, or a new coder."""
    return Coder(_module(f"nvcomp:{kind}"), kind, data_type, chunk_bytes, device_index, stream)


def forget_coders() -> None:
    """Discards all coders that are kept, so that their memory returns to torch's allocator."""
    _coder.cache_clear()


def stream_number(device: torch.device) -> int:
    """Returns the handle of a device's current stream as a number, for a `Coder`."""
    return torch.cuda.current_stream(device).cuda_stream or _LEGACY_STREAM


@functools.cache
def _module(codec: str) -> ModuleType:
    """Imports nvCOMP's package, makes it allocate device memory with torch's allocator, and returns it."""
    found = package("nvidia.nvcomp", NvComp.package, codec)
    found.set_device_allocator(_NvcompMemory)
    return found


class _NvcompMemory:
    """Device memory for nvCOMP. It comes from torch's allocator, for use on a stream, and is freed with the object.
    ptr: its address."""

    def __init__(self, num_bytes: int, stream: Any) -> None:
        device = torch.device("cuda", stream.device)
        is_default = stream.ptr <= _LEGACY_STREAM
        of = torch.cuda.default_stream(device) if is_default else torch.cuda.ExternalStream(stream.ptr, device)
        with torch.cuda.stream(of):
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.ptr = self._memory.data_ptr()


# ---- codecs by name ----

CODECS: Mapping[str, GeneralCodec] = {codec.name: codec for codec in (*_HOST_CODECS, *map(NvComp, _ALGORITHMS))}


def is_general(scheme: object) -> bool:
    """Returns whether a scheme asks for a general codec. Returns True even if the codec, or the variant that the scheme
    names, does not exist."""
    return isinstance(scheme, str) and scheme.partition(":")[0] in ("zstd", "lz4", "nvcomp")


def codec_of(scheme: str) -> GeneralCodec:
    """Returns the codec of a scheme such as "nvcomp:ans", "zstd:9" or "nvcomp:ans:bytes". Raises ValueError for other
    schemes."""
    if scheme in CODECS:
        return CODECS[scheme]
    name, _, text = scheme.rpartition(":")
    found = CODECS[name].variant(text) if name in CODECS else None
    if found is None:
        raise ValueError(
            f"scheme is {scheme!r}{near(scheme, CODECS)}; wanted one of {sorted(CODECS)}, or with a level, such as "
            "'zstd:9'"
        )
    return found
