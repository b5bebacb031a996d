"""Codebooks of scheme ibp: which bits of a row are invariant, and their values (FORMAT.md section 5)."""

from __future__ import annotations

import numpy as np
import torch

from ... import _core

SCHEMES = {"raw": 0, "ibp": 1, "planes": 2}  # enum ibp_scheme
CHUNK_BYTES = (1, 2, 4, 8)


class Codebook:
    """The masks and bitvals of a row's chunks, each distinct pair stored once.

    Made by `ibp.analyze`, by `ibp.compress`, or from masks by `Codebook.from_masks`. Immutable; shared freely between tables.

    Attributes:
        row_bytes: bytes of a row, 1 to 65,536.
        chunk_bytes: bytes of a chunk: 1, 2, 4 or 8.
        flag_all: whether chunks without a mask have a participation bit too (the paper's bytes).
        palette: uint8 [P, 2, chunk_bytes], the distinct (mask, bitval) pairs.
        index: uint8 or uint16 [num_chunks], the pair of each chunk; empty if there is only one pair.
        tau: the paper's threshold, where one was used for all chunks, else None.
        expected_savings: 1 - coded / original bytes on the rows that were analysed, codebook included; None if made from masks.
    """

    scheme = "ibp"

    def __init__(self, row_bytes, chunk_bytes, flag_all, palette, index, tau=None, expected_savings=None):
        self.row_bytes = int(row_bytes)
        self.chunk_bytes = int(chunk_bytes)
        self.flag_all = bool(flag_all)
        self.palette = palette
        self.index = index
        self.tau = tau
        self.expected_savings = expected_savings
        self._check()
        self.mask, self.bitval = self._spread()
        self._words = {torch.device("cpu"): torch.ops.ibp.codebook_words(self.mask, self.bitval, self.chunk_bytes, self.flag_all)}
        self.num_flags = self._count_flags()

    @classmethod
    def from_masks(cls, mask: torch.Tensor, bitval: torch.Tensor, chunk_bytes: int, flag_all: bool = False, *, tau: float | None = None,
                   expected_savings: float | None = None) -> Codebook:
        """A codebook from the mask and bitval of a whole row.

        Args:
            mask: uint8 [row_bytes]; bits that are 1 are invariant.
            bitval: uint8 [row_bytes]; the values of the invariant bits, 0 elsewhere.
            chunk_bytes: 1, 2, 4 or 8.
            flag_all: give chunks without a mask a participation bit too, as the paper does.

        Raises:
            ValueError: sizes differ or are out of range, or bitval has a bit set where mask has not.
            TypeError: mask or bitval is not a uint8 tensor.
        """
        for name, tensor in (("mask", mask), ("bitval", bitval)):
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8:
                raise TypeError(f"{name} is {_kind(tensor)}; wanted a uint8 tensor")
        if mask.dim() != 1 or mask.shape != bitval.shape:
            raise ValueError(f"mask has shape {list(mask.shape)}, bitval {list(bitval.shape)}; wanted two equal shapes [row_bytes]")
        _check_sizes(mask.numel(), chunk_bytes)
        mask, bitval = mask.cpu(), bitval.cpu()
        if (bitval & ~mask).any():
            raise ValueError("bitval has bits set where mask has none")
        num_chunks = -(-mask.numel() // chunk_bytes)
        pairs = torch.zeros(2, num_chunks * chunk_bytes, dtype=torch.uint8)
        pairs[0, : mask.numel()] = mask
        pairs[1, : mask.numel()] = bitval
        pairs = pairs.view(2, num_chunks, chunk_bytes).transpose(0, 1).reshape(num_chunks, 2 * chunk_bytes)
        palette, index = _distinct(pairs)
        num_pairs = len(palette)
        index = index.to(torch.uint8 if num_pairs <= 256 else torch.uint16) if num_pairs > 1 else torch.empty(0, dtype=torch.uint8)
        return cls(mask.numel(), chunk_bytes, flag_all, palette.view(num_pairs, 2, chunk_bytes), index, tau, expected_savings)

    @property
    def num_chunks(self) -> int:
        """Chunks of a row, the last of which may be short."""
        return -(-self.row_bytes // self.chunk_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the codebook as stored: palette and index."""
        return self.palette.numel() + self.index.numel() * self.index.element_size()

    @property
    def codec(self) -> list[int]:
        """What the operations want to know besides the words: [scheme, row_bytes, chunk_bytes, num_flags]."""
        return [SCHEMES["ibp"], self.row_bytes, self.chunk_bytes, self.num_flags]

    def words(self, device: torch.device) -> torch.Tensor:
        """The working form that the coders read, int32 [3, words] on the device; kept once made."""
        if device not in self._words:
            self._words[device] = self._words[torch.device("cpu")].to(device)
        return self._words[device]

    def _check(self):
        _check_sizes(self.row_bytes, self.chunk_bytes)
        palette, index = self.palette, self.index
        if not isinstance(palette, torch.Tensor) or not isinstance(index, torch.Tensor):
            raise ValueError(f"palette and index are {_kind(palette)} and {_kind(index)}; wanted two tensors")
        if palette.dtype != torch.uint8 or palette.dim() != 3 or palette.shape[1:] != (2, self.chunk_bytes) or len(palette) < 1:
            raise ValueError(f"palette is {_kind(palette)}; wanted uint8 [P, 2, {self.chunk_bytes}] with P of at least 1")
        num_pairs = len(palette)
        dtype = torch.uint8 if num_pairs <= 256 else torch.uint16
        entries = self.num_chunks if num_pairs > 1 else 0
        if index.dtype != dtype or index.shape != (entries,):
            raise ValueError(f"index is {_kind(index)}; wanted {dtype} [{entries}] for a palette of {num_pairs}")
        if entries and int(index.to(torch.int64).max()) >= num_pairs:
            raise ValueError(f"index names pair {int(index.to(torch.int64).max())} of a palette of {num_pairs}")

    def _spread(self):
        index = self.index.to(torch.int64) if self.index.numel() else torch.zeros(self.num_chunks, dtype=torch.int64)
        pairs = self.palette[index]
        mask, bitval = (pairs[:, i].reshape(-1) for i in (0, 1))
        if mask[self.row_bytes :].any():
            raise ValueError("the mask of the last chunk has bits past the end of the row")
        mask, bitval = mask[: self.row_bytes].clone(), bitval[: self.row_bytes].clone()
        if (bitval & ~mask).any():
            raise ValueError("bitval has bits set where mask has none")
        return mask, bitval

    def _count_flags(self):
        if self.flag_all:
            return self.num_chunks
        has_mask = self.palette[:, 0].any(dim=1)
        return int(has_mask[self.index.to(torch.int64)].sum()) if self.index.numel() else int(has_mask[0]) * self.num_chunks

    def __getstate__(self):
        return {"row_bytes": self.row_bytes, "chunk_bytes": self.chunk_bytes, "flag_all": self.flag_all, "palette": self.palette,
                "index": self.index if self.index.dtype == torch.uint8 else self.index.view(torch.int16), "tau": self.tau, "expected_savings": self.expected_savings}

    def __setstate__(self, state):
        state = dict(state)
        if isinstance(state["index"], torch.Tensor) and state["index"].dtype == torch.int16:  # plain pickle cannot load uint16 tensors
            state["index"] = state["index"].view(torch.uint16)
        self.__init__(**state)

    def __eq__(self, other):
        if not isinstance(other, Codebook):
            return NotImplemented
        same = (self.row_bytes, self.chunk_bytes, self.flag_all) == (other.row_bytes, other.chunk_bytes, other.flag_all)
        return same and torch.equal(self.mask, other.mask) and torch.equal(self.bitval, other.bitval)

    def __hash__(self):
        return hash((self.row_bytes, self.chunk_bytes, self.flag_all, bytes(self.mask.tolist()), bytes(self.bitval.tolist())))

    def __repr__(self):
        fixed = sum(int(((self.mask >> b) & 1).sum()) for b in range(8))
        parts = [f"row_bytes={self.row_bytes}", f"chunk_bytes={self.chunk_bytes}",
                 f"invariant={fixed / (8 * self.row_bytes):.1%} of bits", f"palette={len(self.palette)}", f"nbytes={self.nbytes}"]
        if self.flag_all:
            parts.append("flag_all=True")
        if self.tau is not None:
            parts.append(f"tau={self.tau:g}")
        if self.expected_savings is not None:
            parts.append(f"expected_savings={self.expected_savings:.1%}")
        return f"ibp.Codebook({', '.join(parts)})"


def _distinct(pairs):
    """The distinct rows of uint8 [n, up to 16] in increasing order, and which of them each row is: as torch.unique(dim=0), 50 times faster."""
    keys = np.zeros((len(pairs), 16), np.uint8)
    keys[:, : pairs.shape[1]] = pairs.numpy()
    words = keys.view(">u8").astype(np.uint64)
    order = np.lexsort((words[:, 1], words[:, 0]))
    ordered, is_new = words[order], np.ones(len(words), bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(1)
    index = np.empty(len(words), np.int64)
    index[order] = is_new.cumsum() - 1
    return pairs[torch.from_numpy(order[is_new])], torch.from_numpy(index)


def _kind(value):
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _check_sizes(row_bytes, chunk_bytes):
    if not 1 <= row_bytes <= _core.MAX_ROW_BYTES:
        raise ValueError(f"row_bytes is {row_bytes}; wanted 1 to {_core.MAX_ROW_BYTES}")
    check_chunk_bytes(chunk_bytes)


def check_chunk_bytes(chunk_bytes):
    if chunk_bytes not in CHUNK_BYTES:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; wanted one of {CHUNK_BYTES}")


torch.serialization.add_safe_globals([Codebook])
