"""Codebooks of scheme `planes`: their fields, what rows cost with them to the byte, and what is learned from tables and
samples."""

import copy
import dataclasses
import io
import itertools
import json
import pathlib
import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import ibp
import reference_planes as reference
from golden import make_learned
from golden.make_planes import CASES, load
from helpers import DTYPES, assert_same_bits, bytes_of, make_tensor, planes_codebook, reference_planes_codebook
from ibp._rows.geometry import stored_sizes
from ibp._rows.planes import PlanesCodebook, learn_planes, num_entries
from test_planes_rows import codec_of as coder_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHIPPED, SHARED = ROOT / "data", ROOT.parent / "shared" / "data"
examples = settings(deadline=None, derandomize=True, max_examples=200, suppress_health_check=[HealthCheck.too_slow])

FIELDS = {
    "row_bytes": 12,
    "element_bytes": 2,
    "rotate": 1,
    "residual_bits": 8,
    "digit_bits": (1, 1),
    "per_column": False,
    "listed": False,
    "default": 0,
    "closed": 0,
    "entries": torch.tensor([[0x7E, 0x7F]]),
}
WORKED = bytes.fromhex("003F 803F 40BF 4040 003F C03F")


def codec_of(codebook):
    """The C core's coder of single rows."""
    return coder_of(reference_planes_codebook(codebook))


def as_sample(rows):
    """Rows of bytes objects or a uint8 array as a sample."""
    return torch.from_numpy(
        np.frombuffer(b"".join(row if isinstance(row, bytes) else row.tobytes() for row in rows), np.uint8).copy()
    )


def row_bytes_of(codebook, sample):
    """Bytes of every row as stored."""
    lengths = torch.ops.ibp.measure_rows(sample, codebook.words("cpu"), codebook.codec)
    return stored_sizes(lengths, codebook.row_bytes, codebook.row_bytes)


def learned(x, row_bytes=None, **kwargs):
    """(the codebook that is learned from all rows x[i] of a tensor, bytes of every row as stored)."""
    data = bytes_of(x)
    row_bytes = row_bytes or data.numel() // len(x)
    codebook, lengths, _ = learn_planes(data, row_bytes, data.numel() // row_bytes, x.dtype, **kwargs)
    return codebook, stored_sizes(lengths, row_bytes, row_bytes)


# ---- codebooks -----------------------------------------------------------------------------------------------------


def test_the_worked_example():
    codebook = PlanesCodebook(**FIELDS)
    assert (codebook.columns, codebook.symbol_bits, codebook.symbol_bytes, codebook.num_entries, codebook.nbytes) == (
        6,
        8,
        1,
        2,
        2,
    )
    assert codebook.codec == [2, 12, 2, 1, 8, *[0] * 10, 1, 1]
    assert codebook.words(torch.device("cpu")).tolist() == [0x7E, 0x7F]
    assert row_bytes_of(codebook, as_sample([WORKED])).tolist() == [9]
    assert len(codec_of(codebook).encode(WORKED)) == 9


def test_codec_and_words_of_wide_elements():
    entries = torch.tensor([[-1, 5, 1 << 40]])
    codebook = PlanesCodebook(16, 8, 0, 0, (2,), False, True, 2**64 - 2, 2**63, entries)
    assert codebook.codec == [2, 16, 8, 0, 0, 0, 1, -2, -(2**63), *[0] * 6, 2]
    assert codebook.words("cpu").numpy().tobytes() == b"\xff" * 8 + (5).to_bytes(8, "little") + (1 << 40).to_bytes(
        8, "little"
    )


@pytest.mark.parametrize("bits, size", [(0, 1), (1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (32, 4), (33, 8), (64, 8)])
def test_symbol_bytes(bits, size):
    codebook = PlanesCodebook(8, 8, 0, 64 - bits, (1,), False, False, 0, 0, torch.zeros(1, 1, dtype=torch.int64))
    assert codebook.symbol_bytes == size == codebook.nbytes == codebook.words("cpu").numel()


def test_no_entries():
    codebook = PlanesCodebook(**{**FIELDS, "digit_bits": (), "entries": torch.empty(1, 0, dtype=torch.int64)})
    assert codebook.nbytes == codebook.num_entries == 0
    assert codebook.words("cpu").dtype == torch.uint8 and codebook.words("cpu").shape == (0,)


WRONG = {
    "row_bytes": [0, 65538, 13, 1.5, None],
    "element_bytes": [0, 3, 16, 8, "2"],
    "rotate": [2, -1],
    "residual_bits": [-1, 17, 9],
    "digit_bits": [(1, 5), (0, 1), (1, 1, 1), (1,) * 5, 2, (1.0, 1), ((1,), 1)],
    "per_column": [True, 2, "no"],
    "listed": [2, -1, None],
    "default": [-1, 2**16, 0.0],
    "closed": [-1, 2**16],
    "entries": [
        torch.tensor([[0x7E, 0x7F]], dtype=torch.int32),
        torch.tensor([0x7E, 0x7F]),
        torch.tensor([[0x7E, 256]]),
        torch.tensor([[-1, 0x7F]]),
        torch.tensor([[0x7E]]),
        [[0x7E, 0x7F]],
        torch.zeros(6, 2, dtype=torch.int64),
        torch.eye(2, dtype=torch.int64)[:1].to_sparse(),
    ],
    "expected_savings": ["much"],
}


@pytest.mark.parametrize("name, value", [(name, value) for name in WRONG for value in WRONG[name]])
def test_wrong_fields(name, value):
    fields = {**FIELDS, name: value}
    if name == "residual_bits" and value == 9:
        fields["entries"] = torch.tensor([[0x7E, 0x80]])  # of 8 bits, one more than symbols have
    with pytest.raises(ValueError):
        PlanesCodebook(**fields)
    hostile = PlanesCodebook.__new__(PlanesCodebook)
    with pytest.raises(ValueError):
        hostile.__setstate__({"expected_savings": None, **fields})


def test_columns_of_their_own_are_never_listed():
    with pytest.raises(ValueError, match="per_column and listed"):
        PlanesCodebook(
            **{**FIELDS, "per_column": True, "listed": True, "entries": torch.zeros(6, 2, dtype=torch.int64)}
        )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"invariant_bits": 16}, "invariant_bits is 16; wanted 0 to 15"),
        ({"invariant_bits": 9}, "residual_bits is 8; wanted 0 to 7"),
        ({"invariant_bits": 2, "invariant_value": 4}, "invariant_value is 4; wanted 0 to 3"),
        ({"first_symbol": 256}, "first_symbol is 256; wanted 0 to 255"),
        ({"first_symbol": 0}, r"entries .*wanted torch.int64 \[1, 0\]"),
        ({"first_symbol": 0, "per_column": True}, "per_column and first_symbol are both set"),
        ({"signed_default": True}, "signed_default is set, but not listed"),
        ({"live_columns": torch.tensor([0])}, "row_template is a NoneType"),
        ({"row_template": torch.zeros(12, dtype=torch.uint8)}, "live_columns is a NoneType"),
        ({"live_columns": torch.tensor([], dtype=torch.int64)}, "live_columns is torch.int64"),
        ({"live_columns": [0], "row_template": torch.zeros(12, dtype=torch.uint8)}, "live_columns is a list"),
        ({"live_columns": torch.tensor([0.5]), "row_template": torch.zeros(12, dtype=torch.uint8)}, "live_columns"),
        ({"live_columns": torch.tensor([1, 1]), "row_template": torch.zeros(12, dtype=torch.uint8)}, "not increasing"),
        ({"live_columns": torch.tensor([-1]), "row_template": torch.zeros(12, dtype=torch.uint8)}, "not increasing"),
        ({"live_columns": torch.tensor([6]), "row_template": torch.zeros(12, dtype=torch.uint8)}, "not increasing"),
        ({"live_columns": torch.tensor([0]), "row_template": torch.zeros(10, dtype=torch.uint8)}, "row_template"),
    ],
)
def test_what_is_left_out_is_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        PlanesCodebook(**{**FIELDS, **changes})


def test_constant_columns():
    template = torch.arange(12, dtype=torch.uint8)
    with_one = {**FIELDS, "live_columns": torch.tensor([0, 1, 2, 4, 5]), "row_template": template, "default": 0x0203}
    codebook = PlanesCodebook(**with_one)
    assert codebook.num_constant == 1 and "num_constant=1" in repr(codebook) and template.tolist() == list(range(12))
    assert codebook.row_template.tolist() == [3, 2, 3, 2, 3, 2, 6, 7, 3, 2, 3, 2]
    assert codebook != PlanesCodebook(**{**with_one, "live_columns": torch.tensor([0, 1, 2, 3, 5])})
    all_live = PlanesCodebook(**{**with_one, "live_columns": torch.arange(6)})
    assert all_live.live_columns is None and all_live == PlanesCodebook(**{**FIELDS, "default": 0x0203})


def test_clusters_share_constant_columns():
    template = torch.zeros(12, dtype=torch.uint8)
    fields = {**FIELDS, "live_columns": torch.tensor([1, 2, 3]), "row_template": template, "invariant_bits": 2}
    books = [PlanesCodebook(**{**fields, "residual_bits": 6, "entries": torch.tensor([[a, 1]])}) for a in (0x7E, 0x30)]
    codebook = ibp.codecs.ClusteredCodebook(books)
    assert codebook.words("cpu").numel() == 2 * 16 + 2 * 2
    x = torch.zeros(500, 6, dtype=torch.int16)
    x[::2, 2], x[1::2, 3] = 0x7E << 6 - 1, 0x60 << 6
    x[::7, 0] = 5  # a constant column
    table = ibp.compress(x, codebook=codebook, device="cpu", memory="host")
    assert_same_bits(table.decompress(), x)
    assert table.scheme == "planes" and (table.lengths.view(torch.int16)[::7] == 0).all()


@pytest.mark.parametrize("state", [None, [], {}, {**FIELDS}, {**FIELDS, "expected_savings": None, "_words": {}}])
def test_wrong_state(state):
    with pytest.raises(ValueError, match="fields"):
        PlanesCodebook.__new__(PlanesCodebook).__setstate__(state)


def test_immutable_and_apart_from_what_it_was_made_of():
    entries = torch.tensor([[0x7E, 0x7F]])
    codebook = PlanesCodebook(**{**FIELDS, "entries": entries})
    entries.zero_()
    assert codebook.entries.tolist() == [[0x7E, 0x7F]]
    with pytest.raises(AttributeError):
        codebook.rotate = 0


def test_equal_hash_repr():
    one, same = PlanesCodebook(**FIELDS), PlanesCodebook(**FIELDS, expected_savings=0.25)
    other = PlanesCodebook(**{**FIELDS, "entries": torch.tensor([[0x7F, 0x7E]])})
    assert one == same and hash(one) == hash(same) and one != other and one != "a codebook"
    assert PlanesCodebook(**{**FIELDS, "rotate": 0}) != one
    assert "expected_savings=25.0%" in repr(same) and "row_bytes=12" in repr(same)
    assert "default=0x7" in repr(PlanesCodebook(**{**FIELDS, "listed": True, "default": 7}))


@pytest.mark.parametrize("name", CASES)
def test_pickle(name):
    codebook = planes_codebook(load(name)[0])
    codebook.words("cpu")
    state = codebook.__getstate__()
    assert all(type(value) in (int, bool, tuple, torch.Tensor, type(None)) for value in state.values())
    file = io.BytesIO()
    torch.save(codebook, file)
    file.seek(0)
    for again in (pickle.loads(pickle.dumps(codebook)), torch.load(file, weights_only=True), copy.deepcopy(codebook)):
        assert again == codebook and again.digit_bits == codebook.digit_bits and again.codec == codebook.codec
        assert torch.equal(again.words("cpu"), codebook.words("cpu"))


# ---- cost ----------------------------------------------------------------------------------------------------------


def test_rows_of_zero_value_compression():
    """The setting that is cDMA's: k values and a bitmap, or what is less, and a header."""
    columns = 64
    codebook = PlanesCodebook(4 * columns, 4, 0, 32, (), False, True, 0, 0, torch.empty(1, 0, dtype=torch.int64))
    x = torch.randn(65, columns)
    for k in range(columns + 1):
        x[k, k:] = 0
    cost = row_bytes_of(codebook, bytes_of(x))
    assert (cost <= 1 + columns // 8 + 4 * torch.arange(columns + 1)).all() and cost[0] == 0


# ---- degenerate tables ---------------------------------------------------------------------------------------------


def assert_learned_is_exact(x, row_bytes=None, **kwargs):
    """The lengths promised are those of the encoder, which decodes again."""
    codebook, sizes = learned(x, row_bytes, **kwargs)
    data = bytes_of(x).numpy()
    rows = [row.tobytes() for row in data.reshape(-1, codebook.row_bytes)]
    codec = codec_of(codebook)
    coded = [codec.encode(row) for row in rows]
    stored = [0 if row == reference_planes_codebook(codebook).default_row else len(c) for row, c in zip(rows, coded)]
    assert sizes.tolist() == [min(size, codebook.row_bytes) for size in stored]
    assert [codec.decode(row) for row in coded] == rows
    assert reference.encode_row(reference_planes_codebook(codebook), rows[0]) == coded[0]
    total = int(sizes.sum()) + codebook.nbytes
    assert codebook.expected_savings == pytest.approx(1 - total / len(data), abs=1e-12)
    return codebook


@pytest.mark.parametrize("kind", ["sparse", "narrow", "random", "equal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes(dtype, kind):
    codebook = assert_learned_is_exact(make_tensor((60, 24), dtype, kind))
    assert codebook.expected_savings >= 0  # row after row as it is costs nothing
    if kind != "random" and dtype.itemsize > 1:
        assert codebook.expected_savings > 0.1


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(1, 1),
        torch.randn(1, 50),
        torch.tensor([[1.0], [3.7]]),  # a codebook for them would be larger than they are
        torch.full((7, 5), -0.0),
        torch.arange(4096).view(64, 64),
    ],
    ids=["one element", "one row", "two small rows", "all equal", "all distinct"],
)
def test_few_rows(x):
    assert assert_learned_is_exact(x).expected_savings >= 0


def test_all_equal_rows_take_nothing():
    codebook, sizes = learned(torch.full((100, 300), 1.5))
    assert sizes.tolist() == [0] * 100 and codebook.num_entries == 0


def test_random_bits_are_left_alone():
    codebook, sizes = learned(torch.randint(-(2**63), 2**63 - 1, (100, 64)))
    assert sizes.tolist() == [512] * 100 and codebook.nbytes == 0 and codebook.expected_savings == 0


def test_no_rows():
    with pytest.raises(ValueError, match="no row"):
        learn_planes(torch.empty(0, dtype=torch.uint8), 8, 0, torch.float32)
    codebook = PlanesCodebook(**FIELDS)
    assert row_bytes_of(codebook, torch.empty(0, dtype=torch.uint8)).tolist() == []


def test_samples_that_are_none():
    for sample in (
        torch.zeros(10, dtype=torch.uint8),
        torch.zeros(2, 8, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.int8),
    ):
        with pytest.raises(ValueError, match="the sample is"):
            learn_planes(sample, 8, 2, torch.float32)


@pytest.mark.parametrize("row_bytes, element_bytes", [(6, 2), (5, 1), (12, 4), (8, 4)])
def test_rows_that_cut_elements(row_bytes, element_bytes):
    x = torch.randn(60, 4)
    codebook = assert_learned_is_exact(x, row_bytes)
    assert codebook.element_bytes == element_bytes


def test_parts_of_complex_numbers():
    assert learned(torch.randn(64, 32, dtype=torch.complex64))[0].element_bytes == 4
    assert learned(torch.randn(64, 32, dtype=torch.complex128))[0].element_bytes == 8


def test_a_sample_that_starts_anywhere():
    x = torch.randn(64, 32)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), bytes_of(x)])[1:]
    codebook, lengths, _ = learn_planes(shifted, 128, 64, torch.float32)
    here = learned(x)
    assert codebook == here[0] and torch.equal(stored_sizes(lengths, 128, 128), here[1])


def test_symbols_never_seen():
    codebook = learned(torch.randn(64, 32))[0]
    codec = codec_of(codebook)
    for row in (b"\xff" * 128, bytes(128), bytes(range(128))):
        assert codec.decode(codec.encode(row)) == row


def test_entries_that_are_missing_repeat_the_first():
    x = torch.randn(500, 64).to(torch.bfloat16)
    codebook = learned(x)[0]
    for column in codebook.entries.tolist():
        distinct = dict.fromkeys(column)
        assert column == list(distinct) + [column[0]] * (len(column) - len(distinct))


# ---- settings ------------------------------------------------------------------------------------------------------


def every_setting(x, widths):
    """Bytes of every dense setting with entries of the whole table or a column, found without any search."""
    data, columns, width = bytes_of(x), x.shape[1], 8 * x.element_size()
    rows = data.view(len(x), -1).numpy()
    for rotate, bits, per_column, digits in itertools.product(
        (0, 1), widths, (False, True), ((2, 2, 2, 3), (2, 2, 2), (1, 1, 2), (4, 4), (3, 3))
    ):
        made = reference.make_codebook(
            rows, x.element_size(), rotate=rotate, residual_bits=width - bits, digit_bits=digits, per_column=per_column
        )
        size = num_entries(digits) * (columns if per_column else 1) * made.entries.dtype.itemsize
        yield int(row_bytes_of(planes_codebook(made), data).sum()) + size


def shifted_columns(num_rows=600, num_columns=32):
    return torch.arange(num_columns) / 4 + torch.randn(num_rows, num_columns).abs() / 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, dtype, widths",
    [
        (lambda: torch.randn(600, 32), torch.bfloat16, range(7, 13)),
        (lambda: torch.randn(600, 32), torch.float16, range(4, 10)),
        (shifted_columns, torch.bfloat16, range(8, 17)),
        (lambda: torch.randn(600, 32) * 300, torch.int16, range(4, 14)),
        (lambda: torch.randn(600, 32) * 20, torch.int8, range(2, 9)),
        (lambda: torch.randn(600, 32) * 4 / 8, torch.float32, range(7, 13)),
    ],
    ids=["bfloat16", "float16", "columns", "int16", "int8", "float32"],
)
def test_within_a_hundredth_of_every_setting(make, dtype, widths):
    x = make().to(dtype)
    codebook, sizes = learned(x)
    assert int(sizes.sum()) + codebook.nbytes <= 1.01 * min(every_setting(x, widths))


def test_choices():
    normal = learned(torch.randn(600, 64))[0]
    assert (normal.rotate, normal.symbol_bits, normal.listed, normal.per_column) == (1, 8, False, False)
    columns = learned(shifted_columns().to(torch.bfloat16))[0]
    assert columns.per_column and columns.symbol_bits > 9
    clipped = learned(torch.randn(600, 64).relu())[0]
    assert clipped.listed and clipped.default == 0 and clipped.rotate == 0
    ones = learned((torch.rand(600, 64) < 0.05).to(torch.float32))[0]
    assert ones.listed and (ones.default, ones.closed, ones.nbytes) == (0, 0x3F800000, 8)
    ids = learned(torch.randint(0, 1 << 20, (600, 64)))[0]
    assert not ids.listed and ids.residual_bits <= 20 and ids.expected_savings > 0.65
    stamps = learned(torch.arange(64) * 10**9 + torch.randint(0, 1000, (600, 64)))[0]
    assert stamps.per_column and stamps.expected_savings > 0.75


def test_a_codebook_is_paid_for():
    """Entries a column need rows to be worth their bytes: the same sample, more rows in the table."""
    x = shifted_columns(64, 256).to(torch.bfloat16)
    few = learn_planes(bytes_of(x), 512, 64, x.dtype)[0]
    many = learn_planes(bytes_of(x), 512, 1 << 20, x.dtype)[0]
    assert few.nbytes < many.nbytes and many.per_column


# ---- samples -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.02, 0.1])
@pytest.mark.parametrize(
    "make",
    [lambda: torch.randn(20000, 16) * 0.02, lambda: shifted_columns(20000, 16), lambda: torch.randn(20000, 16).relu()],
    ids=["normal", "columns", "clipped"],
)
def test_a_sample_does_nearly_as_well(make, fraction):
    x = make().to(torch.bfloat16)
    rows = bytes_of(x).view(len(x), -1)
    chosen = rows[torch.randperm(len(x))[: int(fraction * len(x))]]
    codebook = learn_planes(chosen.reshape(-1), rows.shape[1], len(x), x.dtype)[0]
    savings = 1 - (int(row_bytes_of(codebook, rows.reshape(-1)).sum()) + codebook.nbytes) / rows.numel()
    assert savings >= learned(x)[0].expected_savings - 0.01
    assert savings == pytest.approx(codebook.expected_savings, abs=0.01)


def test_columns_of_their_own_do_not_collapse_on_small_samples():
    x = torch.randn(20000, 64).to(torch.bfloat16)  # all columns alike: entries a column could only be noise
    rows = bytes_of(x).view(len(x), -1)
    codebook = learn_planes(rows[:60].reshape(-1), 128, len(x), x.dtype)[0]
    assert (int(row_bytes_of(codebook, rows.reshape(-1)).sum()) + codebook.nbytes) / rows.numel() <= 0.68


def test_the_same_codebook_every_time():
    x = torch.randn(40000, 32).to(torch.float16)
    state = torch.random.get_rng_state()
    first, _, _ = learn_planes(bytes_of(x), 64, len(x), x.dtype)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(1)
    assert learn_planes(bytes_of(x), 64, len(x), x.dtype)[0] == first


@pytest.fixture(scope="module")
def golden_codebooks():
    return json.loads(make_learned.FILE.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", make_learned.CASES)
def test_the_same_codebook_in_every_version(golden_codebooks, name, dtype):
    """Files that are written again stay the same bytes, and ranks with other machines find the same codebooks."""
    assert make_learned.learned(name, dtype) == golden_codebooks[f"{name}, {dtype}"]


@pytest.mark.parametrize(
    "make",
    [lambda: torch.randn(3000, 256) * 0.02, lambda: shifted_columns(3000, 256), lambda: torch.randn(3000, 256).relu()],
    ids=["normal", "columns", "clipped"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64], ids=str)
def test_the_same_on_a_gpu(cuda, make, dtype):
    x = (make() * (1000 if dtype == torch.int64 else 1)).to(dtype)
    here, there = (ibp.codecs.analyze(x.to(device), scheme="planes", sample=None) for device in ("cpu", cuda))
    assert here == there and here.expected_savings == there.expected_savings
    assert torch.equal(there.words(cuda).cpu(), here.words("cpu"))


# ---- savings -------------------------------------------------------------------------------------------------------


def sparse(path):
    """A CSR file as a dense float32 matrix."""
    z = np.load(path)
    x = np.zeros(z["shape"], np.float32)
    x[np.repeat(np.arange(len(x)), np.diff(z["indptr"])), z["indices"]] = z["data"]
    return torch.from_numpy(x)


def array(path, name="x"):
    """One array of a file; bit patterns of BF16 become bfloat16."""
    values = torch.from_numpy(np.load(path)[name])
    return values.view(torch.bfloat16) if name.endswith("bf16") else values


def cache(name):
    """[layer, token, 32] as [token, 5 * 32]."""
    values = array(SHARED / "kv_stories260k.npz", name)
    return values.transpose(0, 1).reshape(values.shape[1], -1)


def normal():
    return torch.randn(1024, 1024, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def half_zeros():
    x = normal()
    return torch.where(
        torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.5, x, torch.zeros((), dtype=x.dtype)
    )


FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


def ratio(times):
    return 100 * (1 - 1 / times)


# Percent saved at least, of rows and codebook.
MADE = {
    "normal of 0.02": (lambda: normal() * 0.02, {BF16: 33.0, FP16: 14.4}),
    "normal": (normal, {FP32: 16.5, FP64: 12.4}),
    "half zeros": (half_zeros, {FP16: 50.9, BF16: 60, FP32: 55, FP64: 54.5}),
    "clipped at 0": (lambda: normal().relu(), {FP32: 56, FP16: 53.5, BF16: 63}),
}
IN_DATA = {
    "citeseer": (lambda: sparse(SHIPPED / "citeseer.npz"), {FP32: ratio(350)}),
    "cora": (lambda: sparse(SHIPPED / "cora.npz"), {FP32: ratio(240)}),
    "pubmed": (lambda: sparse(SHIPPED / "pubmed_1060rows.npz"), {FP32: ratio(10), FP16: ratio(8.5), BF16: ratio(10)}),
    "mlp_user": (lambda: array(SHIPPED / "ncf_mlp.npz", "mlp_user"), {FP32: 16}),
    "mlp_item": (lambda: array(SHIPPED / "ncf_mlp.npz", "mlp_item"), {FP32: 15.3}),
    "stories weights": (
        lambda: array(SHIPPED / "stories260k.npz", "weights_bf16"),
        {BF16: 31.2},
    ),  # 32 with a codebook a matrix, below
    "keys": (lambda: array(SHIPPED / "kv_stories260k.npz", "k_bf16"), {BF16: 33.4}),
    "values": (lambda: array(SHIPPED / "kv_stories260k.npz", "v_bf16"), {BF16: 32.0}),
}
IN_SHARED = {
    "kokoro": (lambda: array(SHARED / "kokoro_voices.npz"), {BF16: 33.9, FP16: 15.3, FP32: 17}),
    "word2vec": (lambda: array(SHARED / "word2vec_1000x300.npz"), {BF16: 33, FP16: 14.6, FP32: 16.7}),
    "amazon_photo": (lambda: sparse(SHARED / "amazon_photo.npz"), {FP32: ratio(38)}),
    "keys": (lambda: cache("k"), {BF16: 33.4, FP16: 15.6}),
    "values": (lambda: cache("v"), {BF16: 32.0, FP16: 13.9}),
}


def cases(sets):
    return [
        pytest.param(make, dtype, least, id=f"{name}-{dtype}")
        for name, (make, dtypes) in sets.items()
        for dtype, least in dtypes.items()
    ]


@pytest.mark.parametrize("make, dtype, least", cases(MADE) + cases(IN_DATA))
def test_savings(make, dtype, least):
    assert 100 * learned(make().to(dtype))[0].expected_savings >= least


@pytest.mark.skipif(not SHARED.exists(), reason="there is no shared/data beside the repository")
@pytest.mark.parametrize("make, dtype, least", cases(IN_SHARED))
def test_savings_on_shared_data(make, dtype, least):
    assert 100 * learned(make().to(dtype))[0].expected_savings >= least


@pytest.mark.skipif(not SHARED.exists(), reason="there is no shared/data beside the repository")
def test_savings_with_a_codebook_a_matrix():
    matrices = np.load(SHARED / "stories260k.npz")
    coded = original = 0
    for name in ("emb", "wq", "wk", "wv", "wo", "w1", "w2", "w3"):
        for layer in matrices[name] if matrices[name].ndim == 3 else matrices[name][None]:
            x = torch.from_numpy(layer).to(BF16)
            codebook, sizes = learned(x)
            coded, original = coded + int(sizes.sum()) + codebook.nbytes, original + x.nbytes
    assert 1 - coded / original >= 0.32


@pytest.mark.parametrize("level", ["default", "fast"])
@pytest.mark.parametrize("kind", ["sparse", "narrow", "random", "equal"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_codebooks_of_words_are_as_checked_ones(dtype, kind, level):
    x = make_tensor((300, 48), dtype, kind)
    x[:, ::3] = x[0, 0]
    row_bytes = 48 * dtype.itemsize
    learned = learn_planes(bytes_of(x), row_bytes, 1 << 20, dtype, level=level)[0]
    checked = PlanesCodebook(**{field.name: getattr(learned, field.name) for field in dataclasses.fields(learned)})
    assert checked == learned and checked.codec == learned.codec and repr(checked) == repr(learned)
    assert_same_bits(checked.words("cpu"), learned.words("cpu"))
    assert_same_bits(checked.entries, learned.entries)
