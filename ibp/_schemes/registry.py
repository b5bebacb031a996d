"""The table of schemes: all that the package knows of each. A new scheme is its own folder and a row here (and what
csrc/FORMAT.md and csrc/core/schemes.h say of it)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .codebook import AnyCodebook
from .masks import learning as masks
from .masks.codebook import Codebook, check_chunk_bytes
from .planes import learning as planes
from .planes.codebook import PlanesCodebook
from .request import Options, Request


@dataclass(frozen=True)
class Scheme:
    """How rows can be coded."""

    name: str  # in the API
    number: int  # enum ibp_scheme of ibp.h, the first number of every codec
    codebook: type[AnyCodebook] | None  # class of its codebooks; None where rows are as they are
    learn: Callable[[Request], AnyCodebook | None]  # finds a codebook for a request
    # (rows, row_bytes, num_rows): upper bounds of the share of a table's bytes that the scheme saves, the cheapest
    # first, by a sample of its rows on the CPU, uint8 [n * row_bytes]; None where learning takes no longer
    estimates: Callable[[torch.Tensor, int, int], Iterable[float]] | None = None
    # (codebook, rows, sizes, options): codebooks of the same form, one for each group of rows; rows is uint8 [n *
    # row_bytes], those of a group next to each other, and sizes says how many each has
    relearn: Callable[[Any, torch.Tensor, list[int], Options], Sequence[AnyCodebook]] | None = None
    # arguments of `ibp.compress` and `ibp.codecs.analyze` that belong to it, and what raises ValueError for wrong ones
    options: Mapping[str, Callable[..., object]] = field(default_factory=dict)


_ROWS = (
    Scheme("raw", 0, None, learn=lambda request: None),
    Scheme(
        Codebook.scheme,
        Codebook.number,
        Codebook,
        learn=masks.learn,
        estimates=masks.estimates,
        relearn=lambda codebook, rows, sizes, options: masks.relearn(codebook, rows, sizes, options.tau),
        options={"chunk_bytes": check_chunk_bytes, "tau": masks.check_tau, "paper": bool},
    ),
    Scheme(
        PlanesCodebook.scheme,
        PlanesCodebook.number,
        PlanesCodebook,
        learn=planes.learn,
        relearn=lambda codebook, rows, sizes, options: planes.relearn(codebook, rows, sizes),
        options={"level": planes.check_level},
    ),
)
SCHEMES: Mapping[str, Scheme] = {scheme.name: scheme for scheme in _ROWS}


def coding_of(codebook: AnyCodebook | None, row_bytes: int, device: torch.device) -> tuple[list[int], torch.Tensor]:
    """(codec, words) of the operations for a device. codebook: None for raw rows."""
    if codebook is None:
        return [SCHEMES["raw"].number, row_bytes], torch.empty(0, dtype=torch.int32, device=device)
    return codebook.codec, codebook.words(device)


def check_scheme(scheme: str, **options: object) -> None:
    """Raises ValueError for a scheme that is none, for wrong options, and for those of other schemes; "auto" takes the
    options of any one scheme."""
    if scheme not in ("auto", *SCHEMES):
        raise ValueError(
            f"scheme is {scheme!r}; wanted one of {['auto', *SCHEMES]} (general codecs, such as 'zstd' and "
            "'nvcomp:ans', are for ibp.compress alone)"
        )
    for name, value in options.items():
        if value is None or value is False or value == "default":
            continue
        owner = _owner(name)
        if scheme not in ("auto", owner.name):
            raise ValueError(f"{' and '.join(owner.options)} belong to scheme {owner.name!r}, but scheme is {scheme!r}")
        owner.options[name](value)


def scheme_of(**options: object) -> str | None:
    """Returns the scheme that the given options belong to, or None if none is given. An option that is None, False or
    "default" is not given."""
    given = [name for name, value in options.items() if value is not None and value is not False and value != "default"]
    return _owner(given[0]).name if given else None


def _owner(option: str) -> Scheme:
    return next(scheme for scheme in _ROWS if option in scheme.options)
