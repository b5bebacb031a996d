"""Tensors that share memory with another one of their checkpoint, and are stored as a view of it.

A key "ibp_view.<name>" of a file's metadata has [base, shape, strides, offset] as JSON: the tensor is
`torch.as_strided` of the contiguous base, and has its dtype. A base whose name begins with "torch_storage." holds
memory that no single tensor covers; it is no tensor itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping
from typing import NamedTuple

import torch

from .fields import FileFormatError, refused

VIEW_KEY, STORAGE = "ibp_view.", "torch_storage."
MOST_TIMES = 1000  # that a view is larger than its base, at most
_MOST = 1 << 62  # of a number of a view: torch takes no larger ones


class View(NamedTuple):
    """A tensor as a view of the memory of its base."""

    base: str  # the name
    shape: tuple[int, ...]
    # strides, offset: in elements
    strides: tuple[int, ...]
    offset: int

    def check(self, num_elements: int) -> None:
        """FileFormatError: a base of so many elements has no such view, or the view is 1,000 times as large."""
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
        if math.prod(self.shape) > MOST_TIMES * num_elements or (0 not in self.shape and last >= num_elements):
            elements = f"{math.prod(self.shape)} elements up to number {last}"
            raise FileFormatError(f"a view of {self.base!r} has {elements}; the base has {num_elements}")

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The view of the base's values. FileFormatError as `check`."""
        self.check(base.numel())
        return base.contiguous().view(-1).as_strided(self.shape, self.strides, self.offset)

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the view covers a whole base of this shape."""
        return self[1:] == (tuple(shape), torch.empty(shape, dtype=torch.uint8, device="meta").stride(), 0)

    def text(self) -> str:
        """The view as metadata has it."""
        return json.dumps(self)


def views_of(metadata: Mapping[str, str], names: Container[str]) -> dict[str, View]:
    """The views that metadata names. FileFormatError: one is none, has the name of a tensor, or there is no such base.

    names: of the tensors that are stored.
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
    """The view of a text. ValueError: it is none."""
    try:
        base, shape, strides, offset = json.loads(text)
        numbers = [*shape, *strides, offset]
        are_right = len(shape) == len(strides) and all(type(each) is int and 0 <= each < _MOST for each in numbers)
    except (ValueError, TypeError, RecursionError):
        are_right = False
    if not are_right or not isinstance(base, str):
        raise ValueError(f"it is {text[:80]!r}; wanted a base, a shape, as many strides, and an offset")
    return View(base, tuple(shape), tuple(strides), offset)
