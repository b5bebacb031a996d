"""Types of the extension module that csrc/bindings/python_module.cpp makes, where its functions are described."""

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, TypeVar

import torch
from typing_extensions import Buffer

_Result = TypeVar("_Result")

CPU_AVX2_BMI2: int
CPU_AVX512: int
FORMAT_VERSION: int
MAX_ROW_BYTES: int
MAX_SLABS: int
ROWS_PER_BASE: int
SECTOR_BYTES: int
TABLE_BYTES: int

def version() -> str: ...
def status_string(status: SupportsIndex) -> str: ...
def cpu_features() -> int: ...
def set_cpu_features(features: SupportsIndex) -> int: ...
def cuda_is_built() -> bool: ...
def cuda_device_count() -> int: ...
def call_keeping_table(kept: list[Any], call: Callable[[], _Result]) -> _Result: ...
def release_pinned(most_bytes: SupportsIndex = ...) -> int: ...
def kept_pinned_bytes() -> int: ...
def pinned_limit() -> int: ...
def set_pinned_limit(limit: SupportsIndex) -> None: ...
def enable_peer(device: SupportsIndex, peer: SupportsIndex) -> None: ...
def map_pinned(owner: object, address: SupportsIndex, num_bytes: SupportsIndex, device: SupportsIndex) -> object: ...

class _RowCodec:
    @property
    def row_bytes(self) -> int: ...
    def coded_bytes(self, row: Buffer) -> int | None: ...
    def encode(self, row: Buffer) -> bytes: ...
    def decode(self, coded: Buffer) -> bytes: ...

class RowCodec(_RowCodec):
    def __init__(self, mask: Buffer, bitval: Buffer, chunk_bytes: SupportsIndex, flag_all: bool = ...) -> None: ...
    @property
    def num_flags(self) -> int: ...

class PlanesCodec(_RowCodec):
    def __init__(
        self,
        row_bytes: SupportsIndex,
        element_bytes: SupportsIndex,
        rotate: SupportsIndex,
        residual_bits: SupportsIndex,
        digit_bits: Sequence[SupportsIndex],
        per_column: bool,
        listed: bool,
        default: SupportsIndex,
        closed: SupportsIndex,
        entries: Buffer,
        invariant_bits: SupportsIndex = ...,
        invariant_value: SupportsIndex = ...,
        first_symbol: SupportsIndex | None = ...,
        signed_default: bool = ...,
        live_columns: Sequence[SupportsIndex] = ...,
        row_template: Buffer = ...,
    ) -> None: ...

class PinnedBuffer:
    def __init__(self, num_bytes: SupportsIndex, node: SupportsIndex = ...) -> None: ...
    @property
    def is_used(self) -> bool: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class PinnedRange:
    def __init__(self, owner: object, address: SupportsIndex, num_bytes: SupportsIndex) -> None: ...

class Stager:
    def __init__(self, pinned: SupportsIndex, near: SupportsIndex, ring_bytes: SupportsIndex, kept: object) -> None: ...
    @property
    def address(self) -> int: ...

class ReadyCache:
    def __init__(
        self,
        kept: object,
        maps: Sequence[tuple[int, int]],
        ways: SupportsIndex,
        slabs: Sequence[tuple[int, int]],
        counts: SupportsIndex,
        stamps: SupportsIndex,
        clock: SupportsIndex,
        slot_bytes: SupportsIndex,
    ) -> None: ...

class ReadyTable:
    def __init__(
        self,
        packed: Buffer,
        kept: object,
        ranges: Sequence[tuple[int, int]],
        device: SupportsIndex,
        torch_device: torch.device,
        faults: Sequence[int],
        fault: SupportsIndex,
        item_shape: Sequence[int],
        dtype: torch.dtype,
        is_complex: bool,
        most_items: SupportsIndex,
    ) -> None: ...
    @staticmethod
    def take_many(
        tables: Sequence[ReadyTable],
        starts: Sequence[int],
        ids: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
        max_sms: SupportsIndex,
    ) -> bool: ...
    def take(
        self, ids: object, out: object, max_sms: SupportsIndex, cache: ReadyCache | None = ...
    ) -> torch.Tensor | None: ...

class SharedPages:
    def __init__(
        self, file: SupportsIndex, num_bytes: SupportsIndex, is_new: bool = ..., node: SupportsIndex = ...
    ) -> None: ...
    @property
    def is_pinned(self) -> bool: ...
    def pin(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Streamer:
    def __init__(self) -> None: ...
    def continue_stream(self) -> None: ...
    @property
    def address(self) -> int: ...
