"""Functions for engines that multiply by tables: they make tables of matrices, join the tables of shards, and multiply
by the stacked matrices of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._fetch.escapes import matrix_of
from .._fetch.linear import MOST_GROUPED, MOST_STACKED, escapes_for_groups
from .._tables import joining
from .._tables.compressed_tensor import CompressedTensor
from ..nn._experts import multiply_experts
from ..nn._stacks import by_rows
from ..nn._tables import matrix_table


def compress_matrix(weight: torch.Tensor, **options: Any) -> CompressedTensor:
    """Compresses a matrix. If possible, the table has the form that the kernel of `ibp.linear` can multiply by;
    `fits_linear` of the result says whether it has this form.

    Example:
        >>> table = ibp.adapters.compress_matrix(torch.randn(512, 1024).mul(0.02).bfloat16())
        >>> table.fits_linear, table.slot_bytes
        (True, 1568)

    Args:
        weight: [rows, columns].
        options: options of `ibp.compress`. If they do not choose slots, the default level is "fast".

    Raises:
        TypeError, ValueError: as in `ibp.compress`.
    """
    return matrix_table(weight, **options)


def join(
    parts: Sequence[tuple[CompressedTensor, int, int]], device: torch.device | str | int
) -> CompressedTensor | None:
    """Joins coded rows of several tables in one table [rows, columns] on a device. Coded rows are copied as they are,
    without decoding. Loaders use it to join the shards of a merged weight.

    Example:
        >>> query, key = torch.randn(2, 64, 1024).mul(0.02).bfloat16()
        >>> table = ibp.adapters.compress_matrix(query)
        >>> beside = ibp.compress(key, codebook=table.codebook, slot_bytes=table.slot_bytes)
        >>> joined = ibp.adapters.join([(table, 0, 64), (beside, 32, 64)], "cpu")
        >>> joined.shape, torch.equal(joined[64:], key[32:])
        (torch.Size([96, 1024]), True)

    Args:
        parts: (table, number of the first row, number of the last row + 1) for each part, in order. A row consists of
            the elements of a tensor's last dimension.
        device: the device of the result.

    Returns:
        The table, or None if the tables cannot be joined. In each table, one coded row must be one row of the tensor,
        and slots must be smaller than a row. All tables must have equal codebooks, and slots of the same size.
    """
    for table, *_ in parts:
        if not table.shape or table.row_bytes != table.shape[-1] * table.dtype.itemsize:
            return None
    items = [joining.Items(by_rows(table), first, last) for table, first, last in parts]
    return joining.join(items, torch.device(device))


class ExpertTables:
    """The two tables of a mixture of experts, for engines that stack the matrices of all experts: one table has the
    first matrix of every expert, and the other has the second one.

    Example:
        >>> up, down = (ibp.adapters.compress_matrix(torch.randn(rows, 64).bfloat16()) for rows in (8 * 32, 8 * 64))
        >>> experts = ibp.adapters.ExpertTables(up, down, num_experts=8)
        >>> [stack.shape for stack in experts.decoded("cpu")]
        [torch.Size([8, 32, 64]), torch.Size([8, 64, 64])]
        >>> experts.multiplies(torch.ones(3, 64).bfloat16(), torch.zeros(3, 2).long())    # a CPU has no such kernel
        False

    Args:
        up, down: tables [num_experts * rows, columns] of the first and the second stacked matrix.
        num_experts: number of experts.
    """

    def __init__(self, up: CompressedTensor, down: CompressedTensor, num_experts: int) -> None:
        self.up, self.down, self.num_experts = up, down, num_experts

    def multiplies(self, x: torch.Tensor, ids: torch.Tensor) -> bool:
        """Returns whether `multiply` can be called. The tables must be on the GPU of x, in the form that the kernel
        supports. There must be at most 1,024 pairs of a token and an expert, and at most 4,096 experts. If the result
        is False, multiply by the matrices that `decoded` returns.

        Args:
            x: [tokens, columns], BF16.
            ids: [tokens, choices], the experts of each token.
        """
        if not 0 < ids.numel() <= MOST_GROUPED or self.num_experts > MOST_STACKED:
            return False
        return escapes_for_groups(x, [self.up, self.down], self._rows()) is not None

    def multiply(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activate: Callable[[torch.Tensor], torch.Tensor],
        *,
        biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        absent: float = torch.nan,
    ) -> torch.Tensor:
        """Returns, for each token, the weighted sum of its experts' results. The kernel decodes the matrices in
        registers. The call does not wait for the GPU, so that CUDA graphs can capture it.

        Args:
            x, ids: as in `multiplies`.
            weights: [tokens, choices], the weights of the experts' results.
            activate: a function that takes the products by the first matrix, [n, rows of up], and returns the vectors
                that the second matrix multiplies, [n, columns of down].
            biases: the biases of both matrices, [num_experts, rows] or None.
            absent: the value that stands for the products with the second matrix if an id is not in [0, num_experts).
                For example, an id may be -1 if the expert is on another rank.

        Raises:
            ValueError: the kernel does not support these arguments.
        """
        found = escapes_for_groups(x, [self.up, self.down], self._rows())
        if found is None:
            raise ValueError("the kernel does not multiply x by these experts: ask `multiplies` first")
        stacks = [(self.up, found[0], biases[0], activate), (self.down, found[1], biases[1], None)]
        return multiply_experts(x, ids, weights, self.num_experts, stacks, absent=absent)

    def decoded(self, device: torch.device | str) -> list[torch.Tensor]:
        """Returns both stacked matrices, [num_experts, rows, columns], decoded on a device."""
        tables = (self.up, self.down)
        return [matrix_of(table, torch.device(device)).view(self.num_experts, -1, table.shape[1]) for table in tables]

    def _rows(self) -> list[int]:
        return [table.shape[0] // self.num_experts for table in (self.up, self.down)]
