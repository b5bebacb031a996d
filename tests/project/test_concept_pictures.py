"""The pictures of docs/concepts.md and docs/architecture.md: they are what tools/draw_concepts.py draws, and show the
codecs' own bytes."""

import importlib
import importlib.util
import sys

import pytest
import torch

import row_codecs
from native import ROOT


@pytest.fixture(scope="module")
def draw_concepts():
    tools = ROOT / "tools"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tools))
        spec = importlib.util.spec_from_file_location("draw_concepts", tools / "draw_concepts.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    sys.modules.pop("svg", None)


def test_the_pictures_are_as_drawn(draw_concepts):
    drawn = {f"{name}.svg": draw().svg() for name, draw in draw_concepts.PICTURES.items()}
    kept = {name: (draw_concepts.IMAGES / name).read_text() for name in drawn}
    assert drawn == kept, "run python tools/draw_concepts.py"


def test_the_floors_are_in_the_order_that_is_checked(draw_concepts):
    drawn = [folder for *_, folders in reversed(draw_concepts.FLOORS) for folder in folders if "/" not in folder]
    assert drawn == list(importlib.import_module("shape").FLOORS)


def bytes_of(numbers, size):
    return b"".join(number.to_bytes(size, "little") for number in numbers)


def test_masks_are_coded_as_drawn(draw_concepts):
    mask, bitval = (
        torch.tensor(list(bytes_of(words, 2)), dtype=torch.uint8)
        for words in (draw_concepts.MASKS, draw_concepts.BITVALS)
    )
    codec = row_codecs.RowCodec(mask.numpy(), bitval.numpy(), 2)
    flags, kept = draw_concepts.masks_row(draw_concepts.CHUNKS)
    coded = draw_concepts.to_bytes(flags + [bit for part in kept for bit in part])
    assert codec.encode(bytes_of(draw_concepts.CHUNKS, 2)) == coded


def test_planes_are_coded_as_drawn(draw_concepts):
    codec = row_codecs.PlanesCodec(12, 2, 1, 8, [1, 1], False, False, 0, 0, bytes(draw_concepts.ENTRIES))
    _, residuals, first, second, raw = draw_concepts.planes_row()
    second, raw = ([digit for digit in part if digit is not None] for part in (second, raw))
    coded = bytes(residuals) + draw_concepts.to_bytes(first) + draw_concepts.to_bytes(second) + bytes(raw)
    assert codec.encode(bytes_of(draw_concepts.ELEMENTS, 2)) == coded


def test_a_listed_row_is_coded_as_drawn(draw_concepts):
    codec = row_codecs.PlanesCodec(draw_concepts.COLUMNS, 1, 0, 8, [], False, True, 0, 1, b"")
    row = bytes(draw_concepts.LISTED.get(column, 0) for column in range(draw_concepts.COLUMNS))
    assert codec.encode(row) == b"".join(part for _, _, part in draw_concepts.listed_row())
