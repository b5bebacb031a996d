"""Makes and applies deltas of many tensors at once on a GPU. The kernels subtract the bases while they code, and add
them while they decode."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from .. import _core
from .._machine import staging
from .._rows.planes import PlanesCodebook
from .._tables.compressed_tensor import CompressedTensor
from . import _coding
from ._coding import ROW_BYTES, finished, mix

if TYPE_CHECKING:
    from ._tensors import Delta

_MOST_ROW_BYTES = 8192  # Largest size in bytes of a row that the kernels support.
_APPLIED, _OTHER_BASE, _DAMAGED = range(3)  # The values of ibp_delta_verdict.
_GROUP = _core.ROWS_PER_BASE


class DeltaPair(NamedTuple):
    """Two versions of a tensor, as contiguous bytes on the same GPU."""

    newer: torch.Tensor
    base: torch.Tensor


class DeltaRows(NamedTuple):
    """Says where the rows of one tensor are in a sequence that has the rows of all tensors of a call. A group is
    ROWS_PER_BASE consecutive rows of the sequence. The first row of each tensor begins a new group."""

    first: int
    num_rows: int

    @property
    def groups(self) -> tuple[int, int]:
        """(index of the tensor's first group, index of the group after its last one)."""
        return self.first // _GROUP, self.first // _GROUP + -(-self.num_rows // _GROUP)


def sequence(sizes: Sequence[int], row_bytes: int) -> tuple[list[DeltaRows], int]:
    """Returns (a `DeltaRows` for each tensor, number of rows in the sequence). sizes: the sizes of the tensors in
    bytes."""
    rows, first = [], 0
    for num_bytes in sizes:
        rows.append(DeltaRows(first, -(-num_bytes // row_bytes)))
        first = _GROUP * rows[-1].groups[1]
    return rows, first


# ---- making ----


class CodedDeltas(NamedTuple):
    """The result for one pair. `parts` has the arrays of a packed table, by name. It is None if the coded differences
    would take more than WELL_CODED times the size of the tensor. `base` and `result` are the fingerprints of the base
    and of the newer version."""

    parts: dict[str, torch.Tensor] | None
    base: int
    result: int


class Making:
    """Codes the differences of pairs with the known codebook. All pairs must be on one GPU, and no tensor may be empty.
    The constructor queues a kernel that measures the size of each coded row; `coded` waits for this kernel.
    updates_bases: whether each base is overwritten with the newer version when the differences are coded."""

    def __init__(self, pairs: Sequence[DeltaPair], element_bytes: int, updates_bases: bool) -> None:
        self._pairs, self._updates_bases, codebook = pairs, updates_bases, _coding.known_codebook(element_bytes)
        self._device = device = pairs[0].base.device
        self._rows, num_rows = sequence([pair.base.numel() for pair in pairs], ROW_BYTES)
        self._tensors, self._edges, self._last_rows, self._first_groups = self._placed()
        self._coding = codebook.words(device), codebook.codec
        self._lengths = torch.empty(num_rows, dtype=torch.uint16, device=device)
        self._counts = torch.empty(8 * num_rows, dtype=torch.uint16, device=device)
        self._sums = torch.zeros(2 * len(pairs), dtype=torch.int64, device=device)
        torch.ops.ibp.measure_deltas.default(self._tensors, *self._coding, self._lengths, self._counts, self._sums)
        self._index()

    def _placed(self) -> tuple[torch.Tensor, ...]:
        """Returns four int64 tensors on the GPU: (the structs that describe the n pairs to the kernels [n, 10]; the
        index of each pair's first group, then the index of the group after each pair's last one [2 * n]; the index of
        each pair's last row [n]; for each group, the index of its pair's first group [number of groups])."""
        structs = [
            [pair.base.data_ptr(), pair.newer.data_ptr(), pair.base.numel(), rows.first, 0, 0, 0, 0, 0, 0]
            for pair, rows in zip(self._pairs, self._rows)
        ]
        first, last = np.array([rows.groups for rows in self._rows]).T
        last_rows = [rows.first + rows.num_rows - 1 for rows in self._rows]
        parts = [np.array(structs).ravel(), first, last, last_rows, np.repeat(first, last - first)]
        near = staging.queued(torch.from_numpy(np.concatenate(parts)), self._device)
        tensors, *others = near.split([len(parts[0]), 2 * len(first), len(first), len(parts[-1])])
        return tensors.view(-1, 10), *others

    def _index(self) -> None:
        """Queues the computation of the offsets at which coded rows begin, and a copy to the host of the numbers that
        `_read` needs."""
        self._bases = torch.ops.ibp.index_rows(self._lengths, self._lengths.numel() * ROW_BYTES, ROW_BYTES, 0)
        last_lengths = self._lengths.view(torch.int16)[self._last_rows].to(torch.int64)
        self._found = staging.Coming(torch.cat([self._bases[self._edges], last_lengths, self._sums]))

    def _read(self) -> tuple[list[int], list[int], list[int]]:
        """Waits for the results of `_index`. Returns (the offset at which each pair's coded rows begin, then the offset
        past the last pair's rows; the size in bytes of each pair's coded rows; the sums of the words of each pair's
        base and newer version)."""
        found, n = self._found.wait().tolist(), len(self._pairs)
        sizes = [
            # The offsets count a last row that is stored raw as a full row. A length of 0 marks a raw row.
            end - start - (-pair.base.numel() % ROW_BYTES if length == 0 else 0)
            for pair, start, end, length in zip(self._pairs, found[:n], found[n : 2 * n], found[2 * n : 3 * n])
        ]
        return [*found[:n], found[2 * n - 1]], sizes, found[3 * n :]

    def coded(self) -> list[CodedDeltas]:
        starts, sizes, sums = self._read()
        badly_coded = [i for i, pair in enumerate(self._pairs) if sizes[i] > _coding.WELL_CODED * pair.base.numel()]
        if badly_coded:
            for i in badly_coded:
                rows = self._rows[i]
                # Marks all rows of the pair as default rows, so that they take no bytes in `overflow` and encode_deltas
                # skips them.
                self._lengths.view(torch.int16)[rows.first :][: rows.num_rows] = ROW_BYTES
            self._index()
            starts, sizes, sums = self._read()
        overflow = torch.empty(starts[-1], dtype=torch.uint8, device=self._device)
        torch.ops.ibp.encode_deltas.default(
            self._tensors, *self._coding, self._lengths, self._counts, self._bases, self._updates_bases, overflow
        )
        bases = self._bases[:-1] - self._bases[self._first_groups]
        made = []
        for i, (pair, rows) in enumerate(zip(self._pairs, self._rows)):
            parts = {
                "overflow": overflow[starts[i] : starts[i] + sizes[i]],
                "lengths": self._lengths[rows.first : rows.first + rows.num_rows],
                "bases": bases[slice(*rows.groups)] if sizes[i] else bases[:0],
            }
            fingerprints = (finished(total, pair.base.numel()) for total in sums[2 * i : 2 * i + 2])
            made.append(CodedDeltas(None if i in badly_coded else parts, *fingerprints))
        return made


def table_of(coded: dict[str, torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> CompressedTensor:
    return CompressedTensor(
        shape=shape,
        dtype=dtype,
        scheme="planes",
        row_bytes=ROW_BYTES,
        slot_bytes=0,
        slots=coded["overflow"][:0],
        codebook=_coding.known_codebook(_coding.element_bytes_of(dtype)),
        **coded,
    )


# ---- applying ----


def can_apply(delta: Delta, base: torch.Tensor) -> bool:
    """Returns whether the kernels can apply a delta to its base, apart from the codebook, which `coding_key` checks.
    The two must have the same shape and dtype."""
    return (
        base.is_cuda
        and base.numel() > 0
        and base.is_contiguous()
        and not base.is_conj()
        and not base.is_neg()
        and delta.table.slot_bytes == 0
        and not delta.table._has_own_bases
    )


def coding_key(delta: Delta) -> tuple[Hashable, ...] | None:
    """Returns a key for the codebook of a delta, or None if the kernels do not support the codebook. Deltas with equal
    keys have equal codebooks, so one call may apply them together."""
    book = delta.table.codebook
    if not isinstance(book, PlanesCodebook) or not book.listed or book.default or book.signed_default:
        return None
    if book.is_partial or book.element_bytes != _coding.element_bytes_of(delta.dtype):
        return None
    if book.row_bytes % 16 or book.row_bytes > _MOST_ROW_BYTES:
        return None
    return tuple(book.codec), book.words(torch.device("cpu")).numpy().tobytes()


class DeltaBatch:
    """Deltas that are applied in one call. Their bases are on the same GPU, and their codebooks are equal.

    Args:
        indices: for each tensor, the number by which the caller identifies it.
        deltas, bases: the delta and the base of each tensor. The coded differences are copied to the GPU.

    Attributes:
        indices: the argument.
    """

    def __init__(self, indices: Sequence[int], deltas: Sequence[Delta], bases: Sequence[torch.Tensor]) -> None:
        self.indices = indices
        self._device, book = bases[0].device, deltas[0].table.codebook
        assert isinstance(book, PlanesCodebook)
        self._tables = [delta.to(self._device).table for delta in deltas]
        rows, self._num_rows = sequence([base.nbytes for base in bases], book.row_bytes)
        fields = []
        for delta, base, table, place in zip(deltas, bases, self._tables, rows):
            num_bytes, overflow = base.nbytes, table.overflow
            of_size = mix(num_bytes)
            sums = (delta.base - of_size) % 2**64, (delta.result - of_size) % 2**64
            addresses = table.lengths.data_ptr(), table.bases.data_ptr(), overflow.data_ptr()
            fields.append((base.data_ptr(), 0, num_bytes, place.first, *addresses, overflow.numel(), *sums))
        near = torch.from_numpy(np.array(fields, np.uint64).view(np.int64))  # torch.tensor would take longer for a list
        self._tensors = staging.queued(near, self._device)
        self._coding = book.words(self._device), book.codec
        self._state = torch.zeros(1 + 3 * len(bases), dtype=torch.int64, device=self._device)

    def begin(self) -> None:
        """Queues kernels that apply all deltas. If any delta is damaged or does not match its base, they apply no
        delta."""
        self._call(False)
        self._found = staging.Coming(self._state)

    def apply(self) -> int | None:
        """Waits for the work that `begin` queued. Returns None if the deltas have been applied. Otherwise no tensor has
        changed, and the result is the index of a tensor whose delta does not match its base or is damaged."""
        verdict, *of_tensors = self._found.wait().tolist()
        if verdict == _APPLIED:
            return None
        wanted = self._tensors[:, 8:].tolist()
        found_of = [of_tensors[i : i + 3] for i in range(0, len(of_tensors), 3)]
        for index, (base_sum, result_sum), found in zip(self.indices, wanted, found_of):
            is_other = found[0] != base_sum
            if is_other if verdict == _OTHER_BASE else found[2] or (found[0] + found[1] - result_sum) % 2**64:
                return index
        return self.indices[0]

    def take_back(self) -> None:
        """Undoes the changes of `begin`, even if `begin` was interrupted. If the sums of all tensors are 0, the kernels
        have not begun, and there is nothing to undo."""
        verdict, *of_tensors = self._state.tolist()
        if verdict == _APPLIED and any(of_tensors):
            self._state[0] = _DAMAGED
            self._call(True)

    def sum_before(self) -> int:
        """Returns the sum of the first tensor's mixed words (see `finished`) before the deltas were applied."""
        return int(self._state[1])

    def _call(self, takes_back: bool) -> None:
        words, codec = self._coding
        torch.ops.ibp.apply_deltas.default(self._tensors, self._num_rows, words, codec, takes_back, self._state)
