"""Several codebooks in one (FORMAT.md section 7)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch

from ..codebook import AnyCodebook, checked_savings, public

MAX_CLUSTERS = 256


@public
class ClusteredCodebook(AnyCodebook):
    """Two to 256 codebooks of one scheme; every coded row begins with the number of its own.

    Made by `ibp.compress(..., clusters=)` or from its parts. It never changes.

    Example:
        >>> x = torch.randn(200, 1024).bfloat16()
        >>> x[100:] *= 0.001
        >>> codebook = ibp.compress(x, scheme="planes", clusters=2, device="cpu").codebook
        >>> type(codebook).__name__, len(codebook.codebooks)
        ('ClusteredCodebook', 2)

    Attributes:
        codebooks: tuple of `Codebook` with equal chunk_bytes and flag_all, or of `PlanesCodebook` that differ in their
            entries only.
        expected_savings: 1 - coded / original bytes on the rows that were analysed, codebooks included; None if not
            learned.

    Raises:
        ValueError: the codebooks do not fit each other.
    """

    _fields = ("codebooks", "expected_savings")

    codebooks: tuple[AnyCodebook, ...]
    expected_savings: float | None

    def __init__(self, codebooks: Iterable[AnyCodebook], expected_savings: float | None = None) -> None:
        if not hasattr(codebooks, "__iter__"):
            raise ValueError(f"codebooks is a {type(codebooks).__name__}; wanted a tuple of codebooks")
        codebooks = tuple(codebooks)
        if not 2 <= len(codebooks) <= MAX_CLUSTERS:
            raise ValueError(f"there are {len(codebooks)} codebooks; wanted 2 to {MAX_CLUSTERS}")
        first = codebooks[0]
        for codebook in codebooks:
            if (
                not isinstance(codebook, AnyCodebook)
                or isinstance(codebook, ClusteredCodebook)
                or not codebook.is_finished
            ):
                raise ValueError(
                    f"there is a {type(codebook).__name__} among the codebooks; wanted finished codebooks, "
                    "each of one cluster"
                )
            if type(codebook) is not type(first) or codebook.form != first.form:
                raise ValueError(f"the codebooks {first!r} and {codebook!r} do not fit each other")
        if not first.can_differ:
            raise ValueError(f"codebooks like {first!r} cannot differ")
        words = torch.cat([first.shared_words, *(codebook.cluster_words for codebook in codebooks)])
        self._finish(words, codebooks=codebooks, expected_savings=checked_savings(expected_savings))

    @property
    def scheme(self) -> str:  # type: ignore[override]
        return self.codebooks[0].scheme

    @property
    def row_bytes(self) -> int:  # type: ignore[override]
        return self.codebooks[0].row_bytes

    @property
    def form(self) -> Hashable:
        return self.codebooks[0].form

    @property
    def is_partial(self) -> bool:
        return self.codebooks[0].is_partial

    @property
    def can_differ(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of all codebooks as stored."""
        return sum(codebook.nbytes for codebook in self.codebooks)

    @property
    def codec(self) -> list[int]:
        """What the operations are told besides the words: as of the first codebook."""
        return self.codebooks[0].codec

    @property
    def cluster_words(self) -> torch.Tensor:
        raise TypeError("clusters have no clusters")

    def __len__(self) -> int:
        return len(self.codebooks)

    def _description(self) -> list[str]:
        return [f"{len(self)} of {self.codebooks[0]!r} and others", f"nbytes={self.nbytes}"]


def with_clusters(codebook: AnyCodebook | None) -> list[AnyCodebook]:
    """A codebook, and those of its clusters; nothing for None."""
    if codebook is None:
        return []
    return [codebook, *codebook.codebooks] if isinstance(codebook, ClusteredCodebook) else [codebook]
