"""Implements scheme "ibp", which is called masks inside the library. A codebook says which bits of a row are invariant,
and which values they have (FORMAT.md section 5). Rows are cut into chunks. A coded row has a participation bit for each
chunk with invariant bits. The bit says whether all invariant bits of the chunk have the codebook's values; if so, they
are not stored.

The second half of the file learns codebooks from rows (the paper's sections 4.1 and 6.1). It works on groups of rows,
and learns a codebook for each group. Without clusters, the whole table is one group; with clusters, each cluster is a
group. K is the number of groups. Operations of `torch.ops.ibp` look at the rows and count their bits. The results, such
as masks and savings, are small; one NumPy array holds each kind of result for all groups.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import _core
from .._common.process import tqdm
from .._common.sequences import rounded_up
from .._machine import staging
from . import geometry as _geometry
from .codebook import AnyCodebook, checked_savings, fraction, private_copy, public, shown, whole

CHUNK_BYTES = (1, 2, 4, 8)
# Dtypes of an index, each with the largest number of pairs that it can number.
_INDEX_DTYPES = {torch.uint8: 256, torch.uint16: 65536}


@public
class Codebook(AnyCodebook):
    """The codebook of scheme "ibp": for each chunk of a row, a mask of the invariant bits and a bitval, which holds the
    values of these bits. Each distinct pair (mask, bitval) is stored once.

    Codebooks are made by `ibp.codecs.analyze`, by `ibp.compress`, or from masks by `Codebook.from_masks`. A codebook
    cannot be changed, and tables may share it. Its tensors are its own copies and must not be written to.

    Example:
        >>> x = torch.arange(64000, dtype=torch.int32).reshape(1000, 64)  # the two high bytes are always zero
        >>> mask = torch.tensor([0, 0, 255, 255], dtype=torch.uint8).repeat(64)
        >>> codebook = ibp.codecs.Codebook.from_masks(mask, torch.zeros_like(mask), chunk_bytes=4)
        >>> f"{ibp.compress(x, codebook=codebook, device='cpu').savings:.0%}"
        '47%'

    Attributes:
        row_bytes: size in bytes of a row, 1 to 65,536.
        chunk_bytes: size in bytes of a chunk: 1, 2, 4 or 8.
        flag_all: whether chunks without a mask also have a participation bit. If so, the coded bytes are those of the
            paper.
        palette: uint8 [P, 2, chunk_bytes], the distinct (mask, bitval) pairs. P is 1 to 65,536.
        index: uint8 [num_chunks], or uint16 if there are more than 256 pairs: for each chunk, the position of its pair
            in the palette. The index is empty if there is only one pair.
        tau: the paper's threshold, if one threshold was used for all chunks; otherwise None.
        expected_savings: 1 - coded / original bytes on the rows that were analysed. The coded bytes include the
            codebook. None if the codebook was made from masks.
        mask, bitval: uint8 [row_bytes], the mask and the bitval of a whole row.
        num_flags: the number of participation bits in a coded row.

    Raises:
        ValueError: fields are out of range or inconsistent.
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
        starts = np.arange(0, row_bytes, chunk_bytes)  # offsets of the chunks
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
        """Makes a codebook from the mask and bitval of a whole row.

        Args:
            mask: uint8 [row_bytes]. Bits that are 1 mark invariant bits of a row.
            bitval: uint8 [row_bytes], the values of the invariant bits, and 0 in all other bits.
            chunk_bytes: size in bytes of a chunk: 1, 2, 4 or 8.
            flag_all: whether chunks without a mask also get a participation bit, as in the paper.
            tau, expected_savings: attributes of the codebook. They do not affect how rows are coded.

        Raises:
            ValueError: sizes differ or are out of range, or a bit is set in bitval but not in mask.
            TypeError: mask or bitval is not a uint8 tensor.
        """
        for name, tensor in (("mask", mask), ("bitval", bitval)):
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8:
                raise TypeError(f"{name} is {shown(tensor)}; wanted a uint8 tensor")
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
    def form(self) -> Hashable:
        return self.row_bytes, self.chunk_bytes, self.flag_all

    @property
    def codec(self) -> list[int]:
        return _codec(self.row_bytes, self.chunk_bytes, self.num_flags)

    @property
    def _coder(self) -> str:
        return "masks"

    def _work(self, row_bytes: int, stored_bytes: float) -> float:
        return row_bytes

    @property
    def num_chunks(self) -> int:
        """Number of chunks in a row. The last chunk may be shorter than chunk_bytes."""
        return -(-self.row_bytes // self.chunk_bytes)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the codebook as stored: palette and index."""
        return self.palette.numel() + self.index.nbytes

    @property
    def cluster_words(self) -> torch.Tensor:
        """The words of this codebook as one cluster, followed by its num_flags and three unused words, which align the
        words of the next cluster to 16 bytes."""
        return torch.cat(
            [self.words("cpu").reshape(-1), torch.tensor([self.num_flags, 0, 0, 0], dtype=torch.int32, device="cpu")]
        )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self.index.dtype == torch.uint16:  # Plain pickle cannot load uint16 tensors.
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


def _codec(row_bytes: int, chunk_bytes: int, num_flags: int) -> list[int]:
    """Returns the numbers that the operations take together with the words (read_masks in csrc/bindings)."""
    return [Codebook.number, row_bytes, chunk_bytes, num_flags]


def check_chunk_bytes(chunk_bytes: int) -> int:
    """Returns chunk_bytes. Raises ValueError unless it is 1, 2, 4 or 8."""
    if chunk_bytes not in CHUNK_BYTES:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; wanted one of {CHUNK_BYTES}")
    return int(chunk_bytes)


def _checked_pairs(
    palette: object, index: object, chunk_bytes: int, num_chunks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns copies of palette and index. Raises ValueError if they are invalid or inconsistent."""
    if not isinstance(palette, torch.Tensor) or palette.dim() != 3 or not 1 <= len(palette) <= 65536:
        raise ValueError(
            f"palette is {shown(palette)}; wanted torch.uint8 [P, 2, {chunk_bytes}] with P from 1 to 65,536"
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
    """Returns (distinct, index). distinct has the distinct rows of pairs, in increasing order. index, int64 [n], has
    the position in distinct of each row of pairs. pairs: uint8 [n, up to 16]."""
    keys = np.zeros((len(pairs), 16), np.uint8)
    keys[:, : pairs.shape[1]] = pairs
    words = keys.view(">u8").astype(np.uint64)
    order = np.lexsort((words[:, 1], words[:, 0]))
    ordered, is_new = words[order], np.ones(len(words), bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(1)
    index = np.empty(len(words), np.int64)
    index[order] = is_new.cumsum() - 1
    return pairs[order[is_new]], index


# ---- learning --------------------------------------------------------------------------------------------------------

TAUS = (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)  # The paper's artifact sweeps 0.70 to 1.0.
# The greedy choice of masks looks at no more than max(_LEAST_GREEDY_ROWS, _GREEDY_BYTES / row_bytes) rows of each
# group.
_GREEDY_BYTES, _LEAST_GREEDY_ROWS = 2 << 20, 256
# In tables with fewer rows, masks that differ from chunk to chunk take more bytes than they save.
_LEAST_MASKED_ROWS = 64
# Samples of up to this many bytes are analysed on the CPU. A GPU would take longer, because the host waits for it about
# 60 times during an analysis.
_FEW_BYTES = 32 << 10
# If the gains of the thresholds are known (see `_Sweep.gains`) when one threshold is chosen for all chunks of a group,
# exact savings are computed only for the _FINALISTS thresholds with the largest gains.
_FINALISTS = 3
_BITS_SET = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)  # Number of ones in each byte.


def check_tau(tau: float) -> None:
    """Raises ValueError unless tau is in [0.5, 1]."""
    if not 0.5 <= tau <= 1:
        raise ValueError(f"tau is {tau}; wanted 0.5 to 1, or None to sweep")


def learn_masks(
    rows: torch.Tensor,
    row_bytes: int,
    num_rows: int,
    *,
    chunk_bytes: int | None = None,
    tau: float | None = None,
    paper: bool = False,
    progress: bool = False,
) -> Codebook:
    """Learns codebooks of scheme ibp from a sample of a table's rows. Returns the best one for the whole table.

    Args:
        rows: uint8 [n * row_bytes], whole rows in any order, on the device that analyses them.
        num_rows: number of rows of the whole table, over which the size of the codebook is spread.
        chunk_bytes, tau, paper, progress: as in `ibp.codecs.analyze`.
    """
    if rows.numel() <= _FEW_BYTES:
        rows = staging.to_host(rows)
    if rows.numel() == 0:
        nothing = torch.zeros(row_bytes, dtype=torch.uint8, device="cpu")
        return Codebook.from_masks(nothing, nothing, 4)
    sweep = _Sweep(rows, row_bytes, [rows.numel() // row_bytes], [num_rows])
    sizes = CHUNK_BYTES if chunk_bytes is None else (chunk_bytes,)
    tried = tqdm(sizes, desc="analyze", unit="chunk size", disable=not progress)
    found = [(*sweep.best(size, tau, paper), size, paper) for size in tried]
    return _codebooks(*max(found, key=lambda best: best[1][0]))[0]


def estimates(rows: torch.Tensor, row_bytes: int, num_rows: int) -> Iterator[float]:
    """Yields upper bounds on the fraction of a table's bytes that the scheme saves, estimated from a sample of the
    table's rows. The bound that takes the least time to compute comes first.

    Args:
        rows: uint8 [n * row_bytes], whole rows on the CPU.
        num_rows: number of rows of the table.
    """
    is_few = num_rows < _LEAST_MASKED_ROWS and row_bytes % max(CHUNK_BYTES) == 0
    yield float(torch.ops.ibp.estimate_masks.default(rows, max(CHUNK_BYTES) if is_few else row_bytes))
    if num_rows == 1:
        yield 1 - min(_single_row_bytes(rows.numpy(), size) for size in CHUNK_BYTES) / row_bytes


def _single_row_bytes(row: np.ndarray, chunk_bytes: int) -> int:
    """Returns a lower bound on the size in bytes of a table of one row. All bits of the only row are invariant, so the
    codebook holds all of its chunks."""
    whole = row[: len(row) // chunk_bytes * chunk_bytes].view(f"u{chunk_bytes}")
    # With chunks of one byte it is enough to know whether any two bytes differ. If so, there are two pairs or more, and
    # the index alone takes as many bytes as the row.
    ordered = np.sort(whole) if chunk_bytes > 1 else np.array([whole.min(), whole.max()])
    chunks, pairs = -(-len(row) // chunk_bytes), 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))
    flags = chunks // 8 if row.any() else 0  # A default row takes no bytes.
    return flags + _palette_bytes(pairs, chunks, chunk_bytes)


def _palette_bytes(pairs: int, chunks: int, chunk_bytes: int) -> int:
    """Returns the size in bytes of a stored codebook. pairs: the number of distinct pairs of a mask and a bitval.
    chunks: the number of chunks in a row."""
    return pairs * 2 * chunk_bytes + (chunks * (2 if pairs > 256 else 1) if pairs > 1 else 0)


def relearn(codebook: Codebook, rows: torch.Tensor, sizes: list[int], tau: float | None) -> list[Codebook]:
    """Learns a codebook for each group of rows. The new codebooks have the same form as the given one.

    Args:
        codebook: the codebook that gives the form.
        rows: uint8 [n * row_bytes], whole rows, with the rows of each group next to each other.
        sizes: number of rows in each group, at least 1.
        tau: the threshold for all chunks. None: the best masks are found for each group.
    """
    chunk_bytes, flag_all = codebook.chunk_bytes, codebook.flag_all
    masks, savings = _Sweep(rows, codebook.row_bytes, sizes, sizes).best(chunk_bytes, tau, flag_all)
    return _codebooks(masks, savings, chunk_bytes, flag_all)


class _Masks(NamedTuple):
    """The masks of all groups.

    Attributes:
        mask, bitval: uint8 [K, row_bytes], the mask and the bitval of a whole row, for each group.
        tau: float64 [K], the threshold of each group; nan if the group does not have one threshold for all chunks.
    """

    mask: np.ndarray
    bitval: np.ndarray
    tau: np.ndarray

    def where(self, condition: np.ndarray, other: _Masks) -> _Masks:
        """Returns the masks of `self` for the groups whose condition is true, and the masks of `other` for all other
        groups. condition: bool [K]."""
        by_row = condition[:, None]
        mask, bitval = np.where(by_row, self.mask, other.mask), np.where(by_row, self.bitval, other.bitval)
        return _Masks(mask, bitval, np.where(condition, self.tau, other.tau))


def _codebooks(masks: _Masks, savings: np.ndarray, chunk_bytes: int, flag_all: bool) -> list[Codebook]:
    """Makes a codebook for each group. savings: float64 [K], the expected_savings of each codebook."""
    return [
        Codebook.from_masks(
            torch.from_numpy(mask),
            torch.from_numpy(bitval),
            chunk_bytes,
            flag_all,
            tau=None if np.isnan(tau) else float(tau),
            expected_savings=float(saved),
        )
        for mask, bitval, tau, saved in zip(*masks, savings)
    ]


class _Sweep:
    """Tries thresholds and chunk sizes on the same sampled rows, for each group separately.

    Args:
        rows: uint8 [n * row_bytes], whole rows, with the rows of each group next to each other, on the device that
            analyses them.
        sizes: number of sampled rows in each group, at least 1.
        num_rows: for each group, the number of rows over which the size of its codebook is spread.
    """

    def __init__(self, rows: torch.Tensor, row_bytes: int, sizes: list[int], num_rows: list[int]) -> None:
        self.row_bytes, self.device = row_bytes, rows.device
        self.parts = rows.split([size * row_bytes for size in sizes])
        self.sizes, self.num_rows = np.array(sizes), np.array(num_rows)
        self.counts = torch.stack([torch.ops.ibp.count_bits.default(part, row_bytes) for part in self.parts]).cpu()
        self._thresholds: dict[float, _Masks] = {}

    def best(self, chunk_bytes: int, tau: float | None, paper: bool) -> tuple[_Masks, np.ndarray]:
        """Finds, for each group, the masks that save the most bytes with chunks of this size. Returns (the masks, the
        fraction of the bytes that the masks of each group save, float64 [K]).

        Args:
            tau: the only threshold to try. None: all of `TAUS`, and also a greedy choice of masks.
            paper: whether every chunk has a participation bit and all chunks have the same threshold.
        """
        tried = self.thresholds(TAUS if tau is None else (tau,))
        gains = self.gains(tried, chunk_bytes) if not paper and tau is None else []
        found, savings = self._best_threshold(tried, gains, chunk_bytes, paper)
        if gains:
            # Each chunk gets the mask that saves the most bits in it: the mask of a threshold, the greedy mask, or no
            # mask.
            greedy = self._greedy(chunk_bytes)
            mask, bitval = np.zeros_like(greedy.mask), np.zeros_like(greedy.mask)
            best = np.zeros_like(gains[0])
            for masks, gain in zip([greedy, *tried], [*self.gains([greedy], chunk_bytes), *gains]):
                better = (gain > best).repeat(chunk_bytes, axis=1)[:, : self.row_bytes]
                best = np.maximum(gain, best)
                mask, bitval = np.where(better, masks.mask, mask), np.where(better, masks.bitval, bitval)
            chosen = _Masks(mask, bitval, greedy.tau)
            of_chosen = self.savings(chosen, chunk_bytes, False)
            found, savings = found.where(savings >= of_chosen, chosen), np.maximum(savings, of_chosen)
        return found, savings

    def thresholds(self, taus: tuple[float, ...]) -> list[_Masks]:
        """Returns a list of the masks of each threshold, in order. A threshold is left out if it gives every group the
        same mask as the threshold before it."""
        found: list[_Masks] = []
        for tau in taus:
            if tau not in self._thresholds:
                pairs = [
                    torch.ops.ibp.threshold_bits.default(counts, size, float(tau))
                    for counts, size in zip(self.counts, self.sizes.tolist())
                ]
                mask, bitval = (np.stack([part.numpy() for part in parts]) for parts in zip(*pairs))
                self._thresholds[tau] = _Masks(mask, bitval, np.full(len(pairs), tau))
            if not found or (self._thresholds[tau].mask != found[-1].mask).any():
                found.append(self._thresholds[tau])
        return found

    def _best_threshold(
        self, tried: list[_Masks], gains: list[np.ndarray], chunk_bytes: int, paper: bool
    ) -> tuple[_Masks, np.ndarray]:
        """Chooses one threshold per group for all chunks, as the paper does: the threshold that saves the most bytes.
        Returns (masks of the chosen threshold for each group, savings [K]).

        Args:
            tried: the masks of each threshold.
            gains: the result of `gains` for `tried`. For each group, the exact savings are then computed only for the
                `_FINALISTS` thresholds with the largest gains. If the list is empty, they are computed for all
                thresholds.
        """
        ranked = np.tile(np.arange(len(tried))[:, None], (1, len(self.sizes)))
        if gains and len(tried) > _FINALISTS:
            totals = np.stack([gain.sum(1) for gain in gains])
            # A threshold that gives a group the same mask as the threshold before it is not a finalist of this group.
            for at in range(1, len(tried)):
                totals[at][(tried[at].mask == tried[at - 1].mask).all(1)] = np.iinfo(np.int64).min
            ranked = np.sort((-totals.astype(np.float64)).argsort(axis=0, kind="stable")[:_FINALISTS], axis=0)
        best, most = None, np.full(len(self.sizes), -np.inf)
        for places in ranked:
            masks = functools.reduce(
                lambda found, at: tried[at].where(places == at, found), np.unique(places)[1:], tried[places.min()]
            )
            savings = self.savings(masks, chunk_bytes, paper)
            best, most = masks if best is None else best.where(most >= savings, masks), np.maximum(most, savings)
        assert best is not None
        return best, most

    def _greedy(self, chunk_bytes: int) -> _Masks:
        pairs = [torch.ops.ibp.choose_masks.default(rows, self.row_bytes, chunk_bytes) for rows in self._few_rows]
        mask, bitval = (np.stack([part.numpy() for part in parts]) for parts in zip(*pairs))
        return _Masks(mask, bitval, np.full(len(pairs), np.nan))

    @functools.cached_property
    def _few_rows(self) -> list[torch.Tensor]:
        """For each group, the rows that the greedy choice looks at, on the CPU."""
        most = max(_LEAST_GREEDY_ROWS, _GREEDY_BYTES // self.row_bytes)
        return [_geometry.sample(part, self.row_bytes, most).cpu() for part in self.parts]

    def gains(self, tried: list[_Masks], chunk_bytes: int) -> list[np.ndarray]:
        """Returns a list of arrays, int64 [K, chunks], one for each of the tried masks. An entry is the number of bits
        that a chunk saves in all rows of a group, minus the number of the chunk's participation bits in these rows."""
        codec, found = _codec(self.row_bytes, chunk_bytes, 0), []
        for masks in tried:
            words = self._words(masks, chunk_bytes, False)
            hits = (
                torch.stack(
                    [torch.ops.ibp.count_hits.default(part, near, codec) for part, near in zip(self.parts, words)]
                )
                .cpu()
                .numpy()
            )
            fixed = self._per_chunk(_BITS_SET[masks.mask], chunk_bytes)
            found.append(hits * fixed - self.sizes[:, None] * (fixed > 0))
        return found

    def savings(self, masks: _Masks, chunk_bytes: int, flag_all: bool) -> np.ndarray:
        """Returns the exact savings on the rows of each group, 1 - coded / original bytes: float64 [K]. The coded bytes
        include the codebook. Rows that coding would enlarge count as raw."""
        fixed = self._per_chunk(_BITS_SET[masks.mask], chunk_bytes)
        num_flags = np.count_nonzero(fixed, axis=1) if not flag_all else np.full(len(fixed), fixed.shape[1])
        stored = []
        for part, words, flags in zip(self.parts, self._words(masks, chunk_bytes, flag_all), num_flags.tolist()):
            lengths = torch.ops.ibp.measure_rows.default(part, words, _codec(self.row_bytes, chunk_bytes, flags))
            stored.append(torch.ops.ibp.survey_rows.default(lengths, len(part), self.row_bytes)[0])
        coded = torch.stack(stored).cpu().numpy() / self.sizes
        return 1 - (coded + self._codebook_bytes(masks, chunk_bytes) / self.num_rows) / self.row_bytes

    def _words(self, masks: _Masks, chunk_bytes: int, flag_all: bool) -> torch.Tensor:
        """Returns the words (see `AnyCodebook.words`) of each group's masks, int32 [K, 3, words] on the device."""
        pairs = zip(torch.from_numpy(masks.mask), torch.from_numpy(masks.bitval))
        return torch.stack(
            [torch.ops.ibp.codebook_words.default(mask, bitval, chunk_bytes, flag_all) for mask, bitval in pairs]
        ).to(self.device)

    def _per_chunk(self, values: np.ndarray, chunk_bytes: int) -> np.ndarray:
        """Returns the sum of the values of each chunk's bytes, int64 [K, chunks]. values: [K, row_bytes]."""
        return np.add.reduceat(values, np.arange(0, self.row_bytes, chunk_bytes), axis=1, dtype=np.int64)

    def _codebook_bytes(self, masks: _Masks, chunk_bytes: int) -> np.ndarray:
        """Returns the size in bytes of each group's codebook, as `Codebook.nbytes`: int64 [K]."""
        chunks = -(-self.row_bytes // chunk_bytes)
        padded = np.zeros((2, len(self.sizes), chunks * chunk_bytes), np.uint8)
        padded[:, :, : self.row_bytes] = masks[:2]
        pairs = zip(*padded.view(f"u{chunk_bytes}"))
        return np.array([_palette_bytes(_num_distinct(*pair), chunks, chunk_bytes) for pair in pairs])


def _num_distinct(mask: np.ndarray, bitval: np.ndarray) -> int:
    """Returns the number of distinct pairs (mask[i], bitval[i])."""
    order = np.lexsort((bitval, mask))
    mask, bitval = mask[order], bitval[order]
    return 1 + int(np.count_nonzero((mask[1:] != mask[:-1]) | (bitval[1:] != bitval[:-1])))
