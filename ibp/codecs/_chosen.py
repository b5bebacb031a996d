"""`Choice`: the coding that moves a tensor in the least time, and what every candidate takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._common.statistics import share_saved
from .._schemes import AnyCodebook
from .._tables.compressed_tensor import CompressedTensor
from ._compressing import compress
from ._whole import WholeTensor


@dataclass(frozen=True)
class CodingCost:
    """What it takes to code a tensor, to move it over a link and to decode it, one after the other.

    Attributes:
        scheme: the scheme, as an argument of `ibp.compress`. "raw": the tensor is moved as it is.
        level: the level of scheme planes.
        codebook: the codebook of a scheme of rows, learned from the tensor. None for other schemes.
        stored_bytes: bytes that are moved.
        encode_s, transfer_s, decode_s: seconds. Learning a codebook is not counted.
        total_s: their sum; without encode_s if the tensor is coded once and fetched often.
    """

    scheme: str
    level: str
    codebook: AnyCodebook | None
    stored_bytes: int
    encode_s: float
    transfer_s: float
    decode_s: float
    total_s: float

    @property
    def name(self) -> str:
        """The scheme and the level."""
        return self.scheme if self.level == "default" else f"{self.scheme}, {self.level}"


@dataclass(frozen=True, repr=False)
class Choice:
    """The result of `ibp.codecs.choose`. Its repr is a table.

    Attributes:
        num_bytes: bytes of the tensor.
        link_gbps: rate of the link, 10^9 bytes per second.
        encode: whether the time for coding counts.
        rows: whether rows must be decodable alone.
        table: every candidate, as `ibp.codecs.CodingCost`, the fastest first: this one is chosen.
    """

    num_bytes: int
    link_gbps: float
    encode: bool
    rows: bool
    table: tuple[CodingCost, ...]

    @property
    def best(self) -> CodingCost:
        """The chosen candidate."""
        return self.table[0]

    @property
    def scheme(self) -> str:
        """The chosen scheme, as an argument of `ibp.compress`."""
        return self.best.scheme

    @property
    def level(self) -> str:
        """The chosen level: "default", or "fast" for scheme planes."""
        return self.best.level

    @property
    def codebook(self) -> AnyCodebook | None:
        """The chosen codebook, for other tensors of the same kind. None unless the scheme is one of rows."""
        return self.best.codebook

    @property
    def stored_bytes(self) -> int:
        """Bytes that the choice moves."""
        return self.best.stored_bytes

    @property
    def savings(self) -> float:
        """1 - stored_bytes / bytes of the tensor; 0 for an empty one."""
        return share_saved(self.num_bytes, self.stored_bytes)

    @property
    def total_s(self) -> float:
        """Seconds that the choice is expected to take."""
        return self.best.total_s

    def at(self, link_gbps: float, encode: bool | None = None) -> Choice:
        """Returns the choice for another link, from the same measurements.

        Args:
            link_gbps: rate of that link, 10^9 bytes per second.
            encode: whether the time for coding counts. None: as before.
        """
        counts = self.encode if encode is None else encode
        return replace(self, link_gbps=link_gbps, encode=counts, table=ranked(self.table, link_gbps, counts))

    def compress(self, x: torch.Tensor, **options: Any) -> CompressedTensor | WholeTensor:
        """Returns `ibp.compress(x, scheme=self)`. options: device, memory, numa and progress of `ibp.compress`."""
        return compress(x, **arguments_of(self.scheme, self.codebook, self.rows), **options)

    def __repr__(self) -> str:
        counted = "encode + transfer + decode" if self.encode else "transfer + decode"
        head = f"ibp.codecs.Choice of {self.num_bytes:,} bytes at {self.link_gbps:g} GB/s, {counted}, in ms"
        cells: list[tuple[str, ...]] = [("", "bytes", "encode", "transfer", "decode", "total")]
        for cost in self.table:
            times = (f"{1e3 * time:,.3f}" for time in (cost.encode_s, cost.transfer_s, cost.decode_s, cost.total_s))
            cells.append((cost.name, f"{cost.stored_bytes:,}", *times))
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        lines = (
            "  ".join(text.rjust(width) if column else text.ljust(width) for column, (text, width) in fields)
            for fields in (list(enumerate(zip(line, widths))) for line in cells)
        )
        return "\n".join([head, *(f"  {line}".rstrip() for line in lines)])


def arguments_of(scheme: str, codebook: AnyCodebook | None, rows: bool) -> dict[str, Any]:
    """Returns the arguments of `ibp.compress` for a candidate."""
    if codebook is not None:
        return {"codebook": codebook, "layout": "slots" if rows else "packed"}
    if scheme == "raw":
        return {"scheme": scheme, "layout": "slots" if rows else "packed"}
    return {"scheme": scheme}


def ranked(table: Iterable[CodingCost], link_gbps: float, encode: bool) -> tuple[CodingCost, ...]:
    """Returns the candidates with their times over a link, the fastest first. Equal candidates keep their order."""
    costs = []
    for cost in table:
        transfer_s = cost.stored_bytes / link_gbps * 1e-9
        total_s = (cost.encode_s if encode else 0.0) + transfer_s + cost.decode_s
        costs.append(replace(cost, transfer_s=transfer_s, total_s=total_s))
    return tuple(sorted(costs, key=lambda cost: cost.total_s))
