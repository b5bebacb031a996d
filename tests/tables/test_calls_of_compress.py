"""How many Python functions of ibp a call of `compress` enters: what a tensor costs does not grow by checks, bars,
blocks and devices that it does not need, and its way through the files is short."""

import pytest
import torch

import ibp
from counted import calls_of, files_of, returns_of, stations_of
from helpers import assert_same_bits

MOST_WITH_A_CODEBOOK = 39
ON_CPU = {"device": torch.device("cpu"), "memory": "host"}


def rows(dtype, num_rows=64):
    x = torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(0))
    return (x * 100).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64], ids=str)
@pytest.mark.parametrize("options", [{}, {"layout": "packed"}, {"slot_bytes": 128}], ids=str)
@pytest.mark.parametrize("num_rows", [64, 4096])
def test_a_given_codebook(dtype, options, num_rows):
    x = rows(dtype, num_rows)
    codebook = ibp.codecs.analyze(x, scheme="planes", device="cpu")
    for place in (ON_CPU, {}) if not torch.cuda.is_available() else (ON_CPU,):
        call = lambda place=place: ibp.compress(x, codebook=codebook, **options, **place)  # noqa: E731
        table = call()
        assert table.scheme == "planes" and table.layout == options.get("layout", "slots")
        assert_same_bits(table.decompress(), x)
        entered = calls_of(call)
        assert len(entered) <= MOST_WITH_A_CODEBOOK, entered


def test_raw_rows():
    x = rows(torch.bfloat16)
    assert len(calls_of(lambda: ibp.compress(x, scheme="raw", **ON_CPU))) <= 30


@pytest.mark.parametrize("options", [{}, {"layout": "packed"}], ids=str)
def test_the_way_of_a_tensor(options):
    """With a given codebook few functions are given the tensor or its bytes, and few files are entered twice."""
    x = rows(torch.bfloat16)
    codebook = ibp.codecs.analyze(x, scheme="planes", device="cpu")
    call = lambda: ibp.compress(x, codebook=codebook, **options, **ON_CPU)  # noqa: E731
    stations = stations_of(call, x)
    assert len(stations) <= 15 and returns_of(stations) <= 5, stations
    assert len(files_of(call)) <= 8, files_of(call)
