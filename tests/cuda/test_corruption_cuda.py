"""Random damage to all that a GPU reads: none is fatal, and the GPU works as before after every round.

IBP_CORRUPTIONS is how many places are damaged in all; 100000 take a minute on a GPU.
"""

import os

import pytest

import corruption
from corruption import CPU, KINDS
from helpers import assert_same_bits

ALL = int(os.environ.get("IBP_CORRUPTIONS", "6000"))
OF_TABLES, OF_PINNED, OF_CACHES = (share * ALL // len(KINDS) // 100 for share in (35, 15, 20))
OF_PLACES, OF_FILES, OF_DELTAS = (share * ALL // 100 for share in (10, 15, 5))
FEW = 200  # where there is no GPU: that the test itself is right


@pytest.mark.parametrize("pinned", [False, True], ids=["near", "pinned"])
@pytest.mark.parametrize("kind", KINDS)
def test_tables(cuda, kind, pinned):
    """A GPU reads what plain C reads of the first damaged table, and never fails."""
    count = OF_PINNED if pinned else OF_TABLES
    done, (read, arguments) = corruption.corrupt_table(KINDS[kind], cuda, count, pinned=pinned)
    assert done >= count
    assert_same_bits(read.cpu(), corruption.read_by_c(arguments))


@pytest.mark.parametrize("kind", KINDS)
def test_caches(cuda, kind):
    assert corruption.corrupt_cache(KINDS[kind], cuda, OF_CACHES) >= OF_CACHES


def test_places(cuda):
    assert corruption.corrupt_place(cuda, OF_PLACES) >= OF_PLACES


def test_files(cuda, tmp_path):
    done, read = corruption.corrupt_file(tmp_path / "tables.safetensors", cuda, OF_FILES)
    assert done >= OF_FILES and read > 0


def test_deltas(cuda):
    done, _ = corruption.corrupt_delta(cuda, OF_DELTAS)
    assert done >= OF_DELTAS


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gpu(kind):
    done, (read, arguments) = corruption.corrupt_table(KINDS[kind], CPU, FEW)
    assert done >= FEW
    assert_same_bits(read, corruption.read_by_c(arguments))
    assert corruption.corrupt_cache(KINDS[kind], CPU, FEW) >= FEW


def test_the_rest_without_a_gpu(tmp_path):
    assert corruption.corrupt_place(CPU, FEW) >= FEW
    assert corruption.corrupt_file(tmp_path / "tables.safetensors", CPU, 2 * FEW)[1] > 0
    assert corruption.corrupt_delta(CPU, FEW)[0] >= FEW
