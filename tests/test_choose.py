"""`ibp.choose`: what it measures, what it takes for which link, and what it refuses."""

import importlib.util
import pickle

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp._codecs import choice, chosen


def weights(num_rows=2000):
    return (torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()


def cost(scheme, stored_bytes, encode_s, decode_s):
    return ibp.CodingCost(scheme, "default", None, stored_bytes, encode_s, 0.0, decode_s, 0.0)


@pytest.fixture
def measured(monkeypatch):
    """Candidates are not timed: (bytes of the tensor for one coded, seconds a byte to encode, to decode) by scheme."""
    rates = {"planes": (2 / 3, 1e-9, 1e-9), "zstd": (0.5, 1e-7, 1e-8), "lz4": (0.9, 1e-10, 1e-10)}

    def measure(scheme, level, sample, rows):
        if scheme not in rates or level != "default":
            return None
        share, encode_s, decode_s = rates[scheme]
        return cost(scheme, round(share * sample.num_bytes), encode_s * sample.num_bytes, decode_s * sample.num_bytes)

    monkeypatch.setattr(choice, "_measured", measure)
    monkeypatch.setattr(choice, "_is_there", lambda name: True)


def test_which_is_taken(measured):
    """1 + 2/3 / link + 1 ns a byte of planes, 0.1 + 0.9 / link + 0.1 of lz4, 100 + 0.5 / link + 10 of zstd."""
    x = weights()
    for link_gbps, scheme in ((100, "raw"), (0.2, "lz4"), (0.1, "planes"), (0.001, "zstd")):
        found = ibp.choose(x, link_gbps, device="cpu")
        assert found.scheme == scheme and found.num_bytes == x.nbytes
        assert [one.total_s for one in found.table] == sorted(one.total_s for one in found.table)
        assert found.best.transfer_s == found.stored_bytes / link_gbps * 1e-9
        assert found.total_s == found.best.encode_s + found.best.transfer_s + found.best.decode_s
        assert ibp.choose(x, 7, device="cpu").at(link_gbps).table == found.table


def test_coding_that_does_not_count(measured):
    """Without encoding zstd takes 10 + 0.5 / link, planes 1 + 2/3 / link."""
    x = weights()
    found = ibp.choose(x, 0.01, device="cpu", encode=False)
    assert (found.scheme, ibp.choose(x, 0.01, device="cpu").scheme) == ("zstd", "planes")
    assert found.total_s == found.best.transfer_s + found.best.decode_s and found.best.encode_s > 0
    assert found.at(0.01, encode=True).scheme == "planes" and found.at(0.1).encode is False


def test_the_link_of_the_calibration(measured):
    assert ibp.choose(weights(), device="cpu").link_gbps == ibp.H200.copy_in_gbps


def test_compress():
    x = weights()
    found = ibp.choose(x, 1e-3, device="cpu", schemes=["planes", "ibp"])
    assert found.scheme == "planes" and isinstance(found.codebook, ibp.PlanesCodebook)
    for table in (found.compress(x, device="cpu"), ibp.compress(x, scheme=found, pin_memory=False, device="cpu")):
        assert (table.scheme, table.layout, table.codebook) == ("planes", "packed", found.codebook)
        assert table.stored_bytes + table.index_bytes == found.stored_bytes
        assert_same_bits(table.decompress(), x)
    other = weights(500) * 2
    assert_same_bits(found.compress(other, device="cpu").decompress(), other)
    raw = found.at(1e9)
    assert raw.scheme == "raw" and raw.savings == 0 and raw.compress(x, device="cpu").scheme == "raw"
    with pytest.raises(ValueError, match="tau is given, but a choice says how x is coded"):
        ibp.compress(x, scheme=found, tau=0.8)
    assert pickle.loads(pickle.dumps(found)).table == found.table


def test_rows():
    found = ibp.choose(weights(), 1e-3, device="cpu", rows=True)
    assert {one.scheme for one in found.table} <= {"raw", "planes", "ibp"}
    table = found.compress(weights(), device="cpu")
    assert table.layout == "slots" and found.stored_bytes == table.link_bytes + table.index_bytes


def test_general_codecs():
    pytest.importorskip("zstandard")
    x = torch.arange(1 << 18) // 7
    found = ibp.choose(x, 1e-4, device="cpu", schemes=["zstd", "zstd:1", "planes"])
    assert {"zstd", "zstd:1", "raw"} <= {one.scheme for one in found.table} and found.scheme.startswith("zstd")
    whole = found.compress(x)
    assert isinstance(whole, ibp.WholeTensor) and whole.nbytes == found.stored_bytes
    assert_same_bits(ibp.decompress(whole), x)
    is_there = importlib.util.find_spec("lz4") is not None
    assert any(one.scheme == "lz4" for one in ibp.choose(x, 1, device="cpu").table) == is_there


def test_repr(measured):
    text = repr(ibp.choose(weights(), 0.1, device="cpu"))
    head, names, *lines = text.splitlines()
    assert "1,024,000 bytes at 0.1 GB/s, encode + transfer + decode" in head
    assert names.split() == ["bytes", "encode", "transfer", "decode", "total"]
    assert [line.split()[0] for line in lines] == ["planes", "lz4", "raw", "zstd"]


@pytest.mark.parametrize("x", [torch.empty(0, 4), torch.tensor(3.0), torch.arange(3), torch.rand(5).requires_grad_()])
def test_small_tensors(x):
    found = ibp.choose(x, 10, device="cpu")
    assert found.scheme == "raw" and found.num_bytes == x.nbytes
    assert_same_bits(found.compress(x.detach(), device="cpu").decompress(), x.detach())


def test_samples(monkeypatch):
    """Pieces from the first item to the last; few long items are sampled as a flat tensor."""
    monkeypatch.setattr(choice, "_CPU_SAMPLE_BYTES", 1 << 12)
    monkeypatch.setattr(choice, "_CPU_THREAD_BYTES", 1)
    monkeypatch.setattr(choice, "_PIECE_BYTES", 1 << 10)
    cpu = torch.device("cpu")
    x = torch.arange(1 << 14, dtype=torch.int32).view(-1, 16)
    sample = choice._Sample.of(x, cpu)
    whole, short = sample.sizes
    assert whole.shape == (64, 16) and short.shape == (16, 16) and sample.num_bytes == x.nbytes
    assert whole[0, 0] == 0 and whole[-1, -1] == x[-1, -1] and len(whole.unique()) == whole.numel()
    assert torch.equal(short, whole[:16])
    assert choice._Sample.of(x.view(2, -1), cpu).whole.shape == (1024,)
    assert choice._Sample.of(x[:64], cpu).sizes[0] is not None and len(choice._Sample.of(x[:64], cpu).sizes) == 1


def test_extrapolation():
    """A call of 1 ms and 1 us a byte, seen at 400 and at 100 bytes, of 10,000."""
    sample = choice._Sample((torch.empty(400, dtype=torch.uint8), torch.empty(100, dtype=torch.uint8)), 10000)
    assert choice._extrapolated([1e-3 + 400e-6, 1e-3 + 100e-6], sample) == pytest.approx(1e-3 + 10000e-6)
    assert choice._extrapolated([1e-3, 2e-3], sample) == pytest.approx(10000 / 400 * 1e-3)
    assert choice._extrapolated([3.0], sample._replace(sizes=sample.sizes[:1], num_bytes=400)) == 3.0


def test_ranking_keeps_the_order_of_equals():
    table = chosen.ranked([cost("raw", 10, 0, 0), cost("planes", 10, 0, 0), cost("ibp", 5, 0, 0)], 1.0, True)
    assert [one.scheme for one in table] == ["ibp", "raw", "planes"]


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"link_gbps": 0}, ValueError, "link_gbps is 0.0; wanted a positive number"),
        ({"link_gbps": float("inf")}, ValueError, "link_gbps is inf"),
        ({"link_gbps": "fast"}, TypeError, "link_gbps is 'fast'"),
        ({"schemes": ["brotli"]}, ValueError, "schemes has 'brotli'; wanted some of"),
        ({"schemes": ["zstd"], "rows": True}, ValueError, "'zstd', which has no rows that decode alone"),
        ({"schemes": ["nvcomp:ans"]}, ValueError, "'nvcomp:ans', which codes on a CUDA device"),
        ({"x": [1.0]}, TypeError, "x is a list; wanted a torch.Tensor"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        ibp.choose(**{"x": weights(10), "link_gbps": 1, "device": "cpu", **options})


def test_on_a_gpu(cuda):
    x = (torch.randn(1 << 14, 1024, device=cuda) * 0.02).bfloat16()
    found = ibp.choose(x, 1)
    assert found.scheme != "raw" and found.savings > 0.2
    table = found.compress(x)
    assert table.device == x.device and torch.equal(ibp.decompress(table), x)
    assert ibp.choose(x, 1e6).scheme == "raw"
    general = {one.scheme for one in found.table if one.scheme.startswith("nvcomp:")}
    assert bool(general) == choice._is_there("nvcomp:ans")
