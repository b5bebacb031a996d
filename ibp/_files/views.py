"""Tensors that share memory with another tensor of their checkpoint, and are stored as a view of it.

A key "ibp_view.<name>" of a file's metadata has [base, shape, strides, offset] as JSON: the tensor is
`torch.as_strided` of the contiguous base, and has its dtype. A base whose name begins with "torch_storage." holds
memory that no single tensor covers; it is not itself a tensor of the checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping
from typing import NamedTuple

import torch

from .fields import FileFormatError, refused

VIEW_KEY, STORAGE = "ibp_view.", "torch_storage."
MOST_TIMES = 1000  # a view has at most this many times the elements of its base
_MOST = 1 << 62  # upper limit of the numbers of a view, because torch takes no larger ones


class View(NamedTuple):
    """A tensor as a view of the memory of its base."""

    base: str  # the name of the base
    shape: tuple[int, ...]
    # strides, offset: in elements
    strides: tuple[int, ...]
    offset: int

    def check(self, num_elements: int) -> None:
        """Raises FileFormatError if a base of num_elements elements has no such view, or if the view has more than
        1,000 times as many elements."""
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
        if math.prod(self.shape) > MOST_TIMES * num_elements or (0 not in self.shape and last >= num_elements):
            elements = f"{math.prod(self.shape)} elements up to number {last}"
            raise FileFormatError(f"a view of {self.base!r} has {elements}; the base has {num_elements}")

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """Returns the view of the base's values. Raises FileFormatError like `check`."""
        self.check(base.numel())
        return base.contiguous().view(-1).as_strided(self.shape, self.strides, self.offset)

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the view covers a whole base of this shape."""
        return self[1:] == (tuple(shape), torch.empty(shape, dtype=torch.uint8, device="meta").stride(), 0)

    def text(self) -> str:
        """Returns the text of the view in metadata."""
        return json.dumps(self)


def views_of(metadata: Mapping[str, str], names: Container[str]) -> dict[str, View]:
    """Returns the views that metadata names.

    names: the names of the tensors that are stored.

    Raises:
        FileFormatError: an entry is not a view, has the name of a stored tensor, or has a base that does not exist.
    """
    found = {}
    for key, text in metadata.items():
        if key.startswith(VIEW_KEY):
            with refused(f"the metadata {key!r}"):
                name, view = key.removeprefix(VIEW_KEY), _read(text)
                if name in names or view.base not in names:
                    raise ValueError(f"{name!r} is a tensor already, or there is no tensor {view.base!r}")
                found[name] = view
    return found


def _read(text: str) -> View:
    """Reads a view from a text. Raises ValueError if it is not a view."""
    try:
        base, shape, strides, offset = json.loads(text)
        numbers = [*shape, *strides, offset]
        are_right = len(shape) == len(strides) and all(type(each) is int and 0 <= each < _MOST for each in numbers)
    except (ValueError, TypeError, RecursionError):
        are_right = False
    if not are_right or not isinstance(base, str):
        raise ValueError(f"it is {text[:80]!r}; wanted a base, a shape, as many strides, and an offset")
    return View(base, tuple(shape), tuple(strides), offset)
