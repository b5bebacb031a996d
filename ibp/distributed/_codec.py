"""`Codec`: how tensors are coded into messages of fixed size."""

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

ROW_BYTES = 4096  # A message cuts a tensor's bytes into rows of this size.
# The overflow of a message has 1.25 times the size that rows like those of the sample need, plus this fraction of the
# size of the message's rows before coding.
_SLACK = 1 / 256
_LEAST_OVERFLOW = 4096  # Every message has this many additional bytes of overflow.
# Among the slot sizes for which slots and overflow together take at most this many times the fewest possible bytes, the
# largest is used. The larger the slots, the fewer rows need overflow.
_NEAR = 1.01
_LEAST_SAVINGS = 0.02  # If a codec would save less than this fraction of the bytes, tensors travel raw.
# Version of the layout of messages. Raise it when the meaning of their bytes changes, so that ranks with different
# versions of this package refuse each other's messages.
_LAYOUT = 2


@wire.sent
@dataclass(frozen=True, eq=False)
class Codec:
    """Describes how tensors of one kind are coded into messages. The size of a message follows from the size of the
    tensor.

    A message has a slot for each row of 4,096 bytes, and an overflow of fixed size for the bytes that do not fit into
    the slots. Ranks that exchange tensors need equal codecs.

    Example:
        >>> x = torch.randn(1000, 1024)
        >>> codec = ibp.distributed.Codec.learn(x)
        >>> codec.message_bytes(1000) < x.nbytes  # 1000 rows of 4,096 bytes
        True
        >>> f"{codec.savings:.0%}"
        '15%'

    Attributes:
        codebook: how rows are coded. It is for rows of 4,096 bytes.
        slot_bytes: size of a row's slot in bytes, a multiple of 32 below 4,096.
        overflow_bytes: size in bytes of a message's overflow, divided by the message's number of rows: 0 to 4,096.

    Raises:
        TypeError, ValueError: an attribute is not as described.
    """

    codebook: AnyCodebook
    slot_bytes: int
    overflow_bytes: float

    def __post_init__(self) -> None:
        check_codebook(self.codebook)
        if self.codebook.row_bytes != ROW_BYTES:
            raise ValueError(f"the codebook is for rows of {self.codebook.row_bytes} bytes; wanted {ROW_BYTES}")
        if not (0 <= self.slot_bytes < ROW_BYTES and self.slot_bytes % _rows.SECTOR_BYTES == 0):
            raise ValueError(f"slot_bytes is {self.slot_bytes}; wanted a multiple of 32 below {ROW_BYTES}")
        if not 0 <= self.overflow_bytes <= ROW_BYTES:
            raise ValueError(f"overflow_bytes is {self.overflow_bytes}; wanted 0 to {ROW_BYTES}")

    @classmethod
    def learn(cls, x: torch.Tensor, *, level: str = "default") -> Codec | None:
        """Learns a codec for tensors like x from some rows of x.

        Args:
            x: a dense tensor of any dtype, on the CPU or a GPU.
            level: "default" or "fast", see `ibp.compress`.

        Returns:
            The codec, or None if it would save less than 2 % of the bytes.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__}; wanted a tensor")
        check_level(level)
        return learned(sample_of(x), x.dtype, level)

    @functools.cached_property
    def fingerprint(self) -> int:
        """A number of 63 bits. Different codecs almost certainly have different fingerprints."""
        return fingerprint_of(self.codebook, self.slot_bytes, self.overflow_bytes, _LAYOUT)

    def sizes(self, num_rows: int) -> dict[str, int]:
        """Returns the arguments slot_bytes and overflow_bytes, by name, of the `CodedRows` in a message of num_rows
        rows."""
        slack = int(num_rows * self.overflow_bytes) + _LEAST_OVERFLOW
        return {"slot_bytes": self.slot_bytes, "overflow_bytes": rounded_up(slack, 64)}

    def message_bytes(self, num_rows: int) -> int:
        """Returns the size in bytes of a message of num_rows rows."""
        return rounded_up(CodedRows.memory_bytes(self.codebook, num_rows, **self.sizes(num_rows)), 64)

    @property
    def savings(self) -> float:
        """The fraction of a large tensor's bytes that coding saves."""
        return 1 - self.message_bytes(1 << 16) / (ROW_BYTES << 16)


def rows_of(num_bytes: int) -> int:
    """Returns the number of rows into which num_bytes bytes are cut. The last row may be short."""
    return -(-num_bytes // ROW_BYTES)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor as a view, uint8 [n]."""
    x = x.detach() if x.requires_grad else x
    if x.numel() == 1:  # A tensor of one element is contiguous whatever its strides are, but `view` checks the strides.
        x = x.as_strided((1,), (1,))
    return (x if x.dim() == 1 else x.reshape(-1)).view(torch.uint8)


def sample_of(x: torch.Tensor, num_rows: int = 512) -> torch.Tensor:
    """Returns a sample of at most num_rows full rows of 4,096 bytes, spread over x, as uint8 [n, 4096] on the CPU."""
    return _rows.sample(_rows.bytes_of(x), ROW_BYTES, num_rows).view(-1, ROW_BYTES).cpu()


def learned(rows: torch.Tensor, dtype: torch.dtype, level: str) -> Codec | None:
    """Learns a codec from sampled rows. Returns None if it would save less than 2 % of the bytes.

    Args:
        rows: uint8 [n, 4096] on the CPU, rows of the tensors that will be coded.
        dtype: the dtype of the tensors.
        level: "default" or "fast".
    """
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
