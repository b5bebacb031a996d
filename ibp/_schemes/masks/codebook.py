"""Codebooks of scheme ibp: which bits of a row are invariant, and their values (FORMAT.md section 5)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ... import _core
from ..._common.rounding import rounded_up
from ..codebook import AnyCodebook, checked_savings, fraction, kind_of, private_copy, public, whole

CHUNK_BYTES = (1, 2, 4, 8)
_INDEX_DTYPES = {torch.uint8: 256, torch.uint16: 65536}  # of an index, by the most pairs that it can name


class MasksForm(NamedTuple):
    """What codebooks of one table have in common."""

    row_bytes: int
    chunk_bytes: int
    flag_all: bool

    def codec(self, num_flags: int) -> list[int]:
        """What the operations are told besides the words (read_masks in csrc/bindings)."""
        return [Codebook.number, self.row_bytes, self.chunk_bytes, num_flags]


@public
class Codebook(AnyCodebook):
    """The masks and bitvals of a row's chunks, each distinct pair stored once.

    Made by `ibp.codecs.analyze`, by `ibp.compress`, or from masks by `Codebook.from_masks`. It never changes, and is
    shared freely between tables; its tensors are copies of its own and must not be written to.

    Example:
        >>> x = torch.arange(64000, dtype=torch.int32).reshape(1000, 64)  # the two high bytes are always zero
        >>> mask = torch.tensor([0, 0, 255, 255], dtype=torch.uint8).repeat(64)
        >>> codebook = ibp.codecs.Codebook.from_masks(mask, torch.zeros_like(mask), chunk_bytes=4)
        >>> f"{ibp.compress(x, codebook=codebook, device='cpu').savings:.0%}"
        '47%'

    Attributes:
        row_bytes: bytes of a row, 1 to 65,536.
        chunk_bytes: bytes of a chunk: 1, 2, 4 or 8.
        flag_all: whether chunks without a mask have a participation bit too (the paper's bytes).
        palette: uint8 [P, 2, chunk_bytes], the distinct (mask, bitval) pairs, P from 1 to 65,536.
        index: uint8 or, from 257 pairs on, uint16 [num_chunks], the pair of each chunk; empty if there is only one
            pair.
        tau: the paper's threshold, where one was used for all chunks, else None.
        expected_savings: 1 - coded / original bytes on the rows that were analysed, codebook included; None if made
            from masks.
        mask, bitval: uint8 [row_bytes], the same spread over a whole row.
        num_flags: participation bits of a row.

    Raises:
        ValueError: fields are out of range or contradict each other.
    """

    scheme = "ibp"
    number = 1  # IBP_SCHEME_IBP
    can_differ = True
    _fields = ("row_bytes", "chunk_bytes", "flag_all", "palette", "index", "tau", "expected_savings")

    row_bytes: int
    chunk_bytes: int
    flag_all: bool
    palette: torch.Tensor
    index: torch.Tensor
    tau: float | None
    expected_savings: float | None
    mask: torch.Tensor
    bitval: torch.Tensor
    num_flags: int

    def __init__(
        self,
        row_bytes: int,
        chunk_bytes: int,
        flag_all: bool,
        palette: torch.Tensor,
        index: torch.Tensor,
        tau: float | None = None,
        expected_savings: float | None = None,
    ) -> None:
        row_bytes = whole("row_bytes", row_bytes, 1, _core.MAX_ROW_BYTES)
        chunk_bytes = check_chunk_bytes(whole("chunk_bytes", chunk_bytes, 1, 8))
        flag_all = bool(whole("flag_all", flag_all, 0, 1))
        num_chunks = -(-row_bytes // chunk_bytes)
        palette, index = _checked_pairs(palette, index, chunk_bytes, num_chunks)
        pairs = palette.numpy()[index.numpy() if index.numel() else np.zeros(num_chunks, np.int64)]
        ones, values = (np.ascontiguousarray(pairs[:, i]).reshape(-1) for i in (0, 1))
        if ones[row_bytes:].any():
            raise ValueError("the mask of the last chunk has bits past the end of the row")
        if (values & ~ones).any():
            raise ValueError("bitval has bits set where mask has none")
        mask, bitval = torch.from_numpy(ones[:row_bytes]), torch.from_numpy(values[:row_bytes])
        starts = np.arange(0, row_bytes, chunk_bytes)  # of chunks
        words = torch.ops.ibp.codebook_words(mask, bitval, chunk_bytes, flag_all)
        self._finish(
            words,
            row_bytes=row_bytes,
            chunk_bytes=chunk_bytes,
            flag_all=flag_all,
            palette=palette,
            index=index,
            tau=fraction("tau", tau),
            expected_savings=checked_savings(expected_savings),
            mask=mask,
            bitval=bitval,
            num_flags=num_chunks if flag_all else int(np.count_nonzero(np.bitwise_or.reduceat(mask.numpy(), starts))),
        )

    @classmethod
    def from_masks(
        cls,
        mask: torch.Tensor,
        bitval: torch.Tensor,
        chunk_bytes: int,
        flag_all: bool = False,
        *,
        tau: float | None = None,
        expected_savings: float | None = None,
    ) -> Codebook:
        """A codebook from the mask and bitval of a whole row.

        Args:
            mask: uint8 [row_bytes]; bits that are 1 are invariant.
            bitval: uint8 [row_bytes]; the values of the invariant bits, 0 elsewhere.
            chunk_bytes: 1, 2, 4 or 8.
            flag_all: give chunks without a mask a participation bit too, as the paper does.
            tau, expected_savings: attributes of the codebook; nothing depends on them.

        Raises:
            ValueError: sizes differ or are out of range, or bitval has a bit set where mask has not.
            TypeError: mask or bitval is not a uint8 tensor.
        """
        for name, tensor in (("mask", mask), ("bitval", bitval)):
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8:
                raise TypeError(f"{name} is {kind_of(tensor)}; wanted a uint8 tensor")
        if mask.dim() != 1 or mask.shape != bitval.shape:
            raise ValueError(
                f"mask has shape {list(mask.shape)}, bitval {list(bitval.shape)}; wanted two equal shapes [row_bytes]"
            )
        row_bytes = whole("row_bytes", mask.numel(), 1, _core.MAX_ROW_BYTES)
        chunk_bytes = check_chunk_bytes(chunk_bytes)
        pairs = np.zeros((2, rounded_up(row_bytes, chunk_bytes)), np.uint8)
        pairs[0, :row_bytes] = mask.cpu().numpy()
        pairs[1, :row_bytes] = bitval.cpu().numpy()
        if (pairs[1] & ~pairs[0]).any():
            raise ValueError("bitval has bits set where mask has none")
        pairs = pairs.reshape(2, -1, chunk_bytes).transpose(1, 0, 2).reshape(-1, 2 * chunk_bytes)
        palette, index = _distinct(pairs)
        num_pairs = len(palette)
        stored = (
            torch.from_numpy(index.astype(np.uint8 if num_pairs <= 256 else np.uint16))
            if num_pairs > 1
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        return cls(
            row_bytes,
            chunk_bytes,
            flag_all,
            torch.from_numpy(palette.reshape(num_pairs, 2, chunk_bytes)),
            stored,
            tau,
            expected_savings,
        )

    @property
    def form(self) -> MasksForm:
        return MasksForm(self.row_bytes, self.chunk_bytes, self.flag_all)

    @property
    def codec(self) -> list[int]:
        return self.form.codec(self.num_flags)

    @property
    def num_chunks(self) -> int:
        """Chunks of a row; the last may be short."""
        return -(-self.row_bytes // self.chunk_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the codebook as stored: palette and index."""
        return self.palette.numel() + self.index.nbytes

    @property
    def cluster_words(self) -> torch.Tensor:
        """The words of one cluster, then its num_flags and three numbers that mean nothing: the next one's words are
        aligned to 16 bytes."""
        return torch.cat(
            [self.words("cpu").reshape(-1), torch.tensor([self.num_flags, 0, 0, 0], dtype=torch.int32, device="cpu")]
        )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self.index.dtype == torch.uint16:  # plain pickle cannot load uint16 tensors
            state["index"] = self.index.view(torch.int16)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        index = state.get("index") if isinstance(state, dict) else None
        if isinstance(index, torch.Tensor) and index.dtype == torch.int16:
            state = {**state, "index": index.view(torch.uint16)}
        super().__setstate__(state)

    def _description(self) -> list[str]:
        fixed = int(np.unpackbits(self.mask.numpy()).sum())
        parts = [
            f"row_bytes={self.row_bytes}",
            f"chunk_bytes={self.chunk_bytes}",
            f"invariant={fixed / (8 * self.row_bytes):.1%} of bits",
            f"palette={len(self.palette)}",
            f"nbytes={self.nbytes}",
        ]
        if self.flag_all:
            parts.append("flag_all=True")
        if self.tau is not None:
            parts.append(f"tau={self.tau:g}")
        return parts


def check_chunk_bytes(chunk_bytes: int) -> int:
    """The argument; ValueError unless it is 1, 2, 4 or 8."""
    if chunk_bytes not in CHUNK_BYTES:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; wanted one of {CHUNK_BYTES}")
    return int(chunk_bytes)


def _checked_pairs(
    palette: object, index: object, chunk_bytes: int, num_chunks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of palette and index."""
    if not isinstance(palette, torch.Tensor) or palette.dim() != 3 or not 1 <= len(palette) <= 65536:
        raise ValueError(
            f"palette is {kind_of(palette)}; wanted torch.uint8 [P, 2, {chunk_bytes}] with P from 1 to 65,536"
        )
    num_pairs = len(palette)
    palette = private_copy("palette", palette, torch.uint8, (num_pairs, 2, chunk_bytes))
    dtype = next(dtype for dtype, most in _INDEX_DTYPES.items() if num_pairs <= most)
    index = private_copy(f"for a palette of {num_pairs}, index", index, dtype, (num_chunks if num_pairs > 1 else 0,))
    most = int(index.numpy().max(initial=0))
    if most >= num_pairs:
        raise ValueError(f"index names pair {most} of a palette of {num_pairs}")
    return palette, index


def _distinct(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of uint8 [n, up to 16] in increasing order, and which of them each row is."""
    keys = np.zeros((len(pairs), 16), np.uint8)
    keys[:, : pairs.shape[1]] = pairs
    words = keys.view(">u8").astype(np.uint64)
    order = np.lexsort((words[:, 1], words[:, 0]))
    ordered, is_new = words[order], np.ones(len(words), bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(1)
    index = np.empty(len(words), np.int64)
    index[order] = is_new.cumsum() - 1
    return pairs[order[is_new]], index
