"""Defines `AnyCodebook`, the base class of the codebooks of all schemes. Codebooks are immutable, and are checked once,
when they are made or unpickled. The second part of the file checks their fields.

The third part concerns rows that are coded with a codebook. `measure` and `surveyed` return the sizes of such rows.
`coder_rates` returns the rates at which a machine encodes and decodes them.
"""

from __future__ import annotations

import hashlib
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar, TypeVar

import torch

from .._common import wire
from .._common.modes import outside_of_modes
from .._machine.calibration import Calibration, CoderRates
from . import geometry as _geometry
from .geometry import Geometry, Survey

_CPU = torch.device("cpu")
_RAW = 0  # IBP_SCHEME_RAW of ibp.h
_Class = TypeVar("_Class", bound=type)
_Book = TypeVar("_Book", bound="AnyCodebook")


def public(kind: _Class) -> _Class:
    """A class decorator. Allows torch.load(weights_only=True), and messages from other processes, to make objects of
    the class. Objects that ibp 0.2 pickled, in which the class has the name `ibp.<name>`, are allowed, too."""
    wire.sent(kind)
    torch.serialization.add_safe_globals([kind, (kind, f"ibp.{kind.__name__}")])
    return kind


class AnyCodebook(ABC):
    """The base class of `Codebook`, `PlanesCodebook` and `ClusteredCodebook` of `ibp.codecs`. A codebook describes how
    the rows of a table are coded.

    A codebook is checked when it is made and cannot be changed afterwards, because encoders and decoders rely on it.
    Its tensors are its own copies, on the CPU, and must not be written to. Tables and threads may share codebooks.

    Example:
        >>> codebook = ibp.compress(torch.randn(1000, 1024).bfloat16(), device="cpu").codebook
        >>> isinstance(codebook, ibp.codecs.AnyCodebook), codebook.scheme, codebook.row_bytes
        (True, 'planes', 2048)

    Attributes:
        scheme: name of the scheme.
        row_bytes: size in bytes of a row, 1 to 65,536.
        expected_savings: 1 - coded / original bytes on the rows that were analysed. The coded bytes include the
            codebook. None if the codebook was not learned.
    """

    # Names of the constructor's arguments, which are the fields of a pickled codebook.
    _fields: ClassVar[tuple[str, ...]] = ()

    scheme: str
    row_bytes: int
    expected_savings: float | None

    @property
    @abstractmethod
    def form(self) -> Hashable:
        """The fields that are equal in all codebooks of one table, as a hashable value."""

    @property
    @abstractmethod
    def can_differ(self) -> bool:
        """Whether codebooks with the same `form` can have different contents. Only such codebooks can be combined in a
        `ClusteredCodebook`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size in bytes of the codebook as stored."""

    @property
    @abstractmethod
    def codec(self) -> list[int]:
        """The numbers that the operations of torch.ops.ibp take together with `words`: [number of the scheme,
        row_bytes, ...] (csrc/bindings/torch_tables.h)."""

    @property
    def level(self) -> str:
        """The level at which codebooks of this form are learned (see `ibp.compress`)."""
        return "default"

    @property
    @abstractmethod
    def _coder(self) -> str:
        """Name of the field of `Calibration` that holds the rates of the coders for rows of this form."""

    @abstractmethod
    def _work(self, row_bytes: int, stored_bytes: float) -> float:
        """Returns the amount of work in decoding a row, in the unit of the decoders' rate `work_per_ns` (see
        `CoderRates`)."""

    @property
    @abstractmethod
    def cluster_words(self) -> torch.Tensor:
        """The part of the words of a clustered codebook that describes this codebook, as a flat CPU tensor."""

    @property
    def shared_words(self) -> torch.Tensor:
        """The words that all clusters share. In a clustered codebook they come once, before the words of the first
        cluster."""
        return self.cluster_words[:0]

    @property
    def is_partial(self) -> bool:
        """Whether coded rows omit bits or columns that are the same in all analysed rows. A row in which these bits or
        columns differ then has no coded form and is stored raw."""
        return False

    def words(self, device: torch.device | str) -> torch.Tensor:
        """Returns the words of the codebook on a device. The words are the form of the codebook that encoders and
        decoders read. They are copied to each device once and then kept. Callers must not write to them."""
        device = torch.device(device)
        if device not in self._words:
            with outside_of_modes():
                self._words[device] = self._words[_CPU].to(device)
        return self._words[device]

    def with_savings(self: _Book, expected_savings: float | None) -> _Book:
        """Returns a copy of the codebook with another value of expected_savings."""
        same = object.__new__(type(self))
        vars(same).update(vars(self), expected_savings=checked_savings(expected_savings))
        return same

    @property
    def is_finished(self) -> bool:
        """Whether the codebook has been made and checked; False between __new__ and __setstate__ while it is
        unpickled."""
        return "_words" in vars(self)

    _words: dict[torch.device, torch.Tensor]
    _shared: bytes = b""  # The bytes of `shared_words`.

    def _finish(self, words: torch.Tensor, **attributes: Any) -> None:
        """Finishes the codebook: sets its words and attributes, which the caller has checked. They cannot be changed
        afterwards."""
        vars(self).update(attributes, _words={_CPU: words})

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set: codebooks do not change")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted: codebooks do not change")

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Finishes a codebook that is being unpickled, after checking its state.

        Raises:
            ValueError: the codebook is already finished, or the state is invalid or has wrong fields.
        """
        kind = type(self).__name__
        if self.is_finished:
            raise ValueError(f"the state of a finished {kind} cannot be set again")
        if not isinstance(state, dict):
            raise ValueError(
                f"the state of a {kind} is a {type(state).__name__}; wanted a dict with the fields "
                f"{sorted(self._fields)}"
            )
        if set(state) != set(self._fields):
            raise ValueError(
                f"the state of a {kind} has the fields {sorted(map(str, state))}; wanted {sorted(self._fields)}"
            )
        self.__init__(**state)  # type: ignore[misc]

    @abstractmethod
    def _description(self) -> list[str]:
        """Returns the parts of __repr__ other than expected_savings."""

    def __repr__(self) -> str:
        parts = self._description() if self.is_finished else ["unfinished"]
        if self.is_finished and self.expected_savings is not None:
            parts.append(f"expected_savings={self.expected_savings:.1%}")
        return f"{type(self).__module__}.{type(self).__name__}({', '.join(parts)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AnyCodebook):
            return NotImplemented
        return (
            type(self) is type(other) and self.form == other.form and torch.equal(self.words(_CPU), other.words(_CPU))
        )

    def __hash__(self) -> int:
        return hash((self.form, self.words(_CPU).numpy().tobytes()))


# ---- checks of fields, which may come from a malicious file --------------------------------------------------------


def whole(name: str, value: object, least: int, most: int) -> int:
    """Returns the value as an int. Raises ValueError unless it is a whole number from least to most."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # A tensor may raise any of these.
        raise ValueError(f"{name} is a {type(value).__name__}; wanted a whole number") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}; wanted {least} to {most}")
    return number


def fraction(name: str, value: object) -> float | None:
    """Returns the value as a float, or None. Raises ValueError unless it is a finite number or None."""
    if value is None:
        return None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is {value if isinstance(value, float) else shown(value)}; wanted a number or None")
    return float(value)


def checked_savings(value: object) -> float | None:
    return fraction("expected_savings", value)


def private_copy(name: str, tensor: object, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a contiguous CPU copy of a tensor, to which no code but the caller's has access. Raises ValueError unless
    the tensor is dense and has the given dtype and shape."""
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.layout != torch.strided
        or tensor.dtype != dtype
        or tensor.shape != shape
        or tensor.is_meta
    ):
        raise ValueError(f"{name} is {shown(tensor)}; wanted {dtype} {list(shape)}")
    return torch.empty(shape, dtype=dtype, device="cpu").copy_(tensor.detach())


def shown(value: object) -> str:
    """Returns a description of a value for messages: the dtype and shape of a tensor, or the type of any other
    value."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{value.dtype} {list(value.shape)}" + (
        "" if value.layout == torch.strided and not value.is_meta else f" ({value.layout}, {value.device})"
    )


def check_codebook(codebook: object) -> None:
    """Raises TypeError unless the argument is a codebook."""
    if not isinstance(codebook, AnyCodebook):
        raise TypeError(
            f"codebook is a {type(codebook).__name__}; wanted an ibp.codecs.Codebook, a PlanesCodebook or a "
            "ClusteredCodebook"
        )


# ---- sizes and rates of rows that a codebook codes -----------------------------------------------------------------


def measure(data: torch.Tensor, codebook: AnyCodebook, device: torch.device, progress: bool = False) -> torch.Tensor:
    """Returns the `lengths` of all rows of `data` (FORMAT.md section 2), uint16 on the device."""
    words, codec, parts = codebook.words(device), codebook.codec, []
    for _, _, block in _geometry.blocks(data, codebook.row_bytes, device, "measure" if progress else None):
        parts.append(torch.ops.ibp.measure_rows.default(block, words, codec))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint16, device=device)


def surveyed(data: torch.Tensor, codebook: AnyCodebook, device: torch.device | None = None) -> Survey:
    """Measures all rows of `data` on a device. Returns the survey of their sizes. device: the device that measures.
    None: the device of the data."""
    rows = Geometry(data.shape, torch.uint8, codebook.row_bytes)
    return rows.survey(measure(data, codebook, device or data.device))


def coding_of(codebook: AnyCodebook | None, row_bytes: int, device: torch.device) -> tuple[list[int], torch.Tensor]:
    """Returns (codec, words): a codebook in the form that the operations of torch.ops.ibp take, with its words on a
    device. codebook: None for raw rows."""
    if codebook is None:
        return [_RAW, row_bytes], torch.empty(0, dtype=torch.int32, device=device)
    return codebook.codec, codebook.words(device)


def coder_rates(codebook: AnyCodebook, machine: Calibration) -> CoderRates:
    """Returns the rates at which a machine encodes and decodes rows with a codebook."""
    rates: CoderRates = getattr(machine, codebook._coder)
    return rates


def work_of(codebook: AnyCodebook, row_bytes: int, stored_bytes: float) -> float:
    """Returns the amount of work in decoding a row, in the unit of a decoder's rate `work_per_ns` (see `CoderRates`).

    Args:
        row_bytes: size in bytes of a row.
        stored_bytes: mean size in bytes of a stored row.
    """
    return codebook._work(row_bytes, stored_bytes)


def fingerprint_of(codebook: AnyCodebook, *sizes: float) -> int:
    """Returns a 63-bit hash of a codebook and of the given sizes."""
    content = hashlib.blake2b(repr((codebook.codec, sizes)).encode(), digest_size=8)
    content.update(codebook.words(_CPU).contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(content.digest(), "little") >> 1
