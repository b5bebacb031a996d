"""Codes the differences of many pairs of tensors at once, block by block, without waiting for a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from .. import _core
from .._common.rounding import rounded_up
from .._common.sequences import cut
from .._layout.geometry import Geometry, stored_sizes
from .._machine import staging
from .._rows.handle import Handle, Parts
from .._schemes import PlanesCodebook
from .._tables.compressed_tensor import CompressedTensor
from ._coding import BLOCK_BYTES, ROW_BYTES, WELL_CODED, code, integers_of, known_codebook
from ._fingerprint import WORD_BYTES, finished
from ._tensors import Delta

_GROUP = _core.ROWS_PER_BASE


class CodedDifferences:
    """The differences of pairs of tensors, coded with the known codebook.

    The rows of all pairs are numbered in one sequence. Each pair begins with a new row, and zeros fill its last row up.
    The sequence is subtracted, summed and encoded block by block, so that each operation finds its data in the cache.
    Encoded rows go to spare memory, in any order. `deltas` moves them, in the order of the sequence, to memory of the
    right size.

    A GPU begins to work when the object is made. Only `deltas` waits for it.

    Args:
        pairs: (newer, base). The two tensors of a pair have the same shape and dtype, and are not empty. All pairs are
            on one device, and have integers of the same width.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._like = [newer for newer, _ in pairs]
        self._pairs = [(integers_of(newer), integers_of(base)) for newer, base in pairs]
        first = self._pairs[0][0]
        self._device, self._width = first.device, first.element_size()
        self._codebook = known_codebook(self._width)
        self._sizes = [newer.nbytes for newer, _ in self._pairs]
        self._rows = list(itertools.accumulate((-(-size // ROW_BYTES) for size in self._sizes), initial=0))
        num_rows = self._rows[-1]
        self._lengths = first.new_empty(num_rows, dtype=torch.uint16)
        # Pairs that take more are coded anew. Each row takes whole sectors of spare memory.
        num_spare = int(WELL_CODED * sum(self._sizes)) + _core.SECTOR_BYTES * num_rows
        self._spare = first.new_empty(num_spare, dtype=torch.uint8)
        used, own_bases = first.new_zeros(1, dtype=torch.int64), first.new_empty(num_rows, dtype=torch.int64)
        self._counts = first.new_zeros(2, dtype=torch.int64)  # of rows in spare memory, and of lost rows
        index = self._lengths, own_bases, self._codebook.words(self._device), self._codebook.codec
        self._place = Handle(Parts(self._spare[:0], self._spare, *index, 0, 0, num_rows, ROW_BYTES, None, used))
        self._sums = first.new_zeros(2 * len(pairs), dtype=torch.int64)  # of each pair's base and newer tensor
        self._encode()
        self._index()

    def _encode(self) -> None:
        """Encodes all pairs, block by block, and adds their words to the sums."""
        row = ROW_BYTES // self._width  # `row`, `step`, `sizes` and `spans` count elements.
        step = BLOCK_BYTES[self._device.type] // self._width
        sizes = [newer.numel() for newer, _ in self._pairs]
        spans = [(i, at, min(at + step, size)) for i, size in enumerate(sizes) for at in range(0, size, step)]
        scratch = self._pairs[0][0].new_empty(min(step, row * self._rows[-1]))
        first_row = 0
        for block in cut(spans, lambda span: rounded_up(span[2] - span[1], row), step):
            end = 0
            summed: list[torch.Tensor] = []
            for pair, first, last in block:
                newer, base = (version[first:last] for version in self._pairs[pair])
                torch.sub(newer, base, out=scratch[end : end + last - first])
                summed += base, newer
                end += last - first
                if end % row:
                    scratch[end : rounded_up(end, row)].zero_()
                    end = rounded_up(end, row)
            first_words = [first * self._width // WORD_BYTES for _, first, _ in block for _ in range(2)]
            numbers = [2 * pair + which for pair, _, _ in block for which in range(2)]
            torch.ops.ibp.sum_parts.default(summed, first_words, numbers, self._sums)
            self._place.encode(scratch[:end], self._counts, first_row=first_row, is_new=True)
            first_row += end // row

    def _index(self) -> None:
        """Computes where the coded rows begin, and starts to copy to the host what `deltas` reads there."""
        first, end = np.array(self._rows[:-1]), np.array(self._rows[1:])
        groups = [np.arange(start, stop, _GROUP) for start, stop in zip(first, end)]  # the first row of each
        self._groups = [0, *itertools.accumulate(map(len, groups))]
        numbers = [end - 1, np.concatenate(groups), np.repeat(first, list(map(len, groups)))]
        near = staging.queued(torch.from_numpy(np.concatenate(numbers)), self._device)
        last_rows, of_groups, of_pairs = near.split(list(map(len, numbers)))
        sizes = stored_sizes(self._lengths, ROW_BYTES, ROW_BYTES)
        ends = sizes.cumsum(0)
        self._starts = ends - sizes
        self._bases = self._starts[of_groups] - self._starts[of_pairs]
        known = [ends[last_rows], sizes[last_rows], self._counts[1:], self._sums]
        self._found = staging.Coming(torch.cat(known))

    def deltas(self) -> list[Delta]:
        """Returns the delta of each pair."""
        count = len(self._pairs)
        found = self._found.wait().tolist()
        alone = self._badly_coded(found[:count], found[count : 2 * count], found[2 * count])
        if alone and len(alone) < count:
            for i in alone:
                of_pair = self._lengths[self._rows[i] : self._rows[i + 1]]
                of_pair.view(torch.int16).fill_(ROW_BYTES)  # Default rows take no memory.
            self._index()
            found = self._found.wait().tolist()
        ends, sums = [0, *found[:count]], found[2 * count + 1 :]
        overflow = self._spare.new_empty(0 if len(alone) == count else ends[-1])
        if overflow.numel():
            torch.ops.ibp.move_parts.default(self._place.table, self._starts[::_GROUP].contiguous(), overflow)
        made = []
        for i, (newer, base) in enumerate(self._pairs):
            if i in alone:
                table = code(newer - base, self._like[i], alone[i])
            else:
                is_there = ends[i + 1] > ends[i]
                table = CompressedTensor.of_parts(
                    Geometry(self._like[i].shape, self._like[i].dtype, ROW_BYTES),
                    "planes",
                    0,
                    overflow[:0],
                    self._codebook,
                    self._lengths[self._rows[i] : self._rows[i + 1]],
                    overflow[ends[i] : ends[i + 1]],
                    self._bases[self._groups[i] : self._groups[i + 1]] if is_there else self._bases[:0],
                )
            fingerprints = (finished(total, self._sizes[i]) for total in sums[2 * i : 2 * i + 2])
            made.append(Delta(table, *fingerprints))
        return made

    def _badly_coded(
        self, ends: Sequence[int], last_sizes: Sequence[int], num_lost: int
    ) -> dict[int, PlanesCodebook | None]:
        """Returns the codebooks of the pairs that have to be coded again, each by itself, by their numbers. None: a
        codebook has to be learned.

        Args:
            ends: for each pair, where its coded rows end.
            last_sizes: for each pair, the bytes of its last coded row.
            num_lost: the number of rows for which spare memory had no room.
        """
        alone: dict[int, PlanesCodebook | None] = {}
        for i, (start, end, size) in enumerate(zip([0, *ends], ends, self._sizes)):
            short = size % ROW_BYTES
            # The last row was coded as a whole row. It has to be raw if it is short and does not become shorter.
            is_raw = 0 < short <= last_sizes[i]
            num_coded = end - start - (last_sizes[i] - short if is_raw else 0)
            if num_coded > WELL_CODED * size:
                alone[i] = None
            elif is_raw or num_lost or num_coded + self._codebook.nbytes >= size:
                alone[i] = self._codebook
        return alone
