"""How tensors are coded into messages of fixed size: `Codec`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .._common import wire
from .._common.rounding import rounded_up
from .._layout import geometry as _rows
from .._schemes import AnyCodebook, check_codebook, surveyed
from .._schemes.codebook import fingerprint_of
from .._schemes.learning import learned_from
from .._schemes.planes import check_level
from .._tables.coded_rows import CodedRows

ROW_BYTES = 4096  # of messages
_SECTOR = _rows.SECTOR_BYTES  # of slots and of parts of overflow
_SLACK = 1 / 256  # of a message's raw bytes: overflow beyond what rows of the sample take
_LEAST_OVERFLOW = 4096  # bytes
# The largest slots are taken that cost this many times the least: the fewest rows leave them.
_NEAR = 1.01
_LEAST_SAVINGS = 0.02  # a codec that saves less is none
_LAYOUT = 2  # of messages: it changes when the meaning of their bytes does


@wire.sent
@dataclass(frozen=True, eq=False)
class Codec:
    """How tensors of one kind are coded into messages, whose size follows from the tensor's alone.

    A message holds a slot for each row of 4,096 bytes, and overflow for what does not fit, which is bounded. Ranks that
    exchange tensors need equal ones.

    Example:
        >>> x = torch.randn(1000, 1024)
        >>> codec = ibp.distributed.Codec.learn(x)
        >>> codec.message_bytes(1000) < x.nbytes  # 1000 rows of 4,096 bytes
        True
        >>> f"{codec.savings:.0%}"
        '15%'

    Attributes:
        codebook: how rows are coded.
        slot_bytes: bytes of a row's slot.
        overflow_bytes: bytes of overflow for each row.

    Raises:
        TypeError, ValueError: an attribute is out of range, or the codebook is for other rows.
    """

    codebook: AnyCodebook
    slot_bytes: int
    overflow_bytes: float

    def __post_init__(self) -> None:
        check_codebook(self.codebook)
        if self.codebook.row_bytes != ROW_BYTES:
            raise ValueError(f"the codebook is for rows of {self.codebook.row_bytes} bytes; wanted {ROW_BYTES}")
        if not (0 <= self.slot_bytes < ROW_BYTES and self.slot_bytes % _SECTOR == 0):
            raise ValueError(f"slot_bytes is {self.slot_bytes}; wanted a multiple of 32 below {ROW_BYTES}")
        if not 0 <= self.overflow_bytes <= ROW_BYTES:
            raise ValueError(f"overflow_bytes is {self.overflow_bytes}; wanted 0 to {ROW_BYTES}")

    @classmethod
    def learn(cls, x: torch.Tensor, *, level: str = "default") -> Codec | None:
        """A codec for tensors like x, learned from some of its rows; None where they would not be 2 % smaller.

        Args:
            x: a dense tensor of any dtype, on the CPU or a GPU.
            level: "default" or "fast", see `ibp.compress`.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__}; wanted a tensor")
        check_level(level)
        return learned(sample_of(x), x.dtype, level)

    @functools.cached_property
    def fingerprint(self) -> int:
        """A number that differs where codecs do: 63 bits."""
        return fingerprint_of(self.codebook, self.slot_bytes, self.overflow_bytes, _LAYOUT)

    def sizes(self, num_rows: int) -> dict[str, int]:
        """Sizes of the `CodedRows` for a message of num_rows rows."""
        slack = int(num_rows * self.overflow_bytes) + _LEAST_OVERFLOW
        return {"slot_bytes": self.slot_bytes, "overflow_bytes": rounded_up(slack, 64)}

    def message_bytes(self, num_rows: int) -> int:
        """Bytes of a message of num_rows rows."""
        return rounded_up(CodedRows.memory_bytes(self.codebook, num_rows, **self.sizes(num_rows)), 64)

    @property
    def savings(self) -> float:
        """The share of its bytes that a large message saves."""
        return 1 - self.message_bytes(1 << 16) / (ROW_BYTES << 16)


def rows_of(num_bytes: int) -> int:
    """How many rows num_bytes bytes make; the last row can be short."""
    return -(-num_bytes // ROW_BYTES)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, uint8 [n], in the same memory."""
    x = x.detach() if x.requires_grad else x
    if x.numel() == 1:  # it is contiguous, whatever its strides
        x = x.as_strided((1,), (1,))
    return (x if x.dim() == 1 else x.reshape(-1)).view(torch.uint8)


def sample_of(x: torch.Tensor, num_rows: int = 512) -> torch.Tensor:
    """At most num_rows whole rows, spread over all of x, on the CPU: uint8 [n, 4096]."""
    return _rows.sample(_rows.bytes_of(x), ROW_BYTES, num_rows).view(-1, ROW_BYTES).cpu()


def learned(rows: torch.Tensor, dtype: torch.dtype, level: str) -> Codec | None:
    """A codec for rows like these, uint8 [n, 4096] on the CPU; None where they would not be 2 % smaller."""
    if not len(rows):
        return None
    is_known = dtype in _rows.DTYPES or dtype.is_complex
    data = rows.reshape(-1)
    codebook = learned_from(data, ROW_BYTES, dtype if is_known else torch.uint8, level=level)
    if codebook is None:
        return None
    slot_bytes, mean_overflow = surveyed(data, codebook).best_slots(near=_NEAR)
    if slot_bytes == ROW_BYTES:
        return None
    codec = Codec(codebook, slot_bytes, 1.25 * mean_overflow + _SLACK * ROW_BYTES)
    return codec if codec.savings >= _LEAST_SAVINGS else None
