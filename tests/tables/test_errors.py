"""Bad input raises ValueError, TypeError or IndexError that says what was wrong and what was wanted."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import ibp
from handles import BY_VALUES as OPS
from handles import values_of
from helpers import assert_same_bits, compress_in_place, embedding, make_tensor, one_hot_rows
from ibp._common import process


@pytest.fixture(scope="module")
def x():
    return one_hot_rows(100, 60)


@pytest.fixture(scope="module", params=["ibp", "planes"])
def table(x, request):
    return ibp.compress(x, scheme=request.param, device="cpu", memory="host")


@pytest.fixture(scope="module", params=["ibp", "planes"])
def codebook(x, request):
    return ibp.codecs.analyze(x, scheme=request.param, device="cpu")


# ---- compress, analyze, estimate ----


class Frame:
    """What has `to_numpy`, as tables of pandas and polars."""

    def to_numpy(self):
        raise AssertionError


class Picture:
    """What has `__array__`, as pictures of Pillow."""

    def __array__(self, *_, **__):
        raise AssertionError


@pytest.mark.parametrize("function", [ibp.compress, ibp.estimate, ibp.codecs.analyze])
@pytest.mark.parametrize(
    "given, way",
    [
        ("m.safetensors", ": ibp.checkpoints.compress(path, output) takes a file, ibp.load(path) reads one"),
        (Path("m.pt"), ": ibp.checkpoints.compress(path, output) takes a file, ibp.load(path) reads one"),
        (torch.nn.Linear(2, 2), ": ibp.nn.compress(model) takes a model"),
        (
            {"a": torch.ones(2)},
            ": call this for each of its tensors; ibp.checkpoints.compress(path, output) takes a file of them",
        ),
        ([1.0, 2.0], ": torch.tensor(x) makes one of numbers, torch.stack(x) of tensors"),
        ((torch.ones(2),), ": torch.tensor(x) makes one of numbers, torch.stack(x) of tensors"),
        (3, ": torch.tensor(x) makes one of numbers, torch.stack(x) of tensors"),
        (Frame(), ": x.to_numpy() gives an array, torch.from_numpy(array) a tensor"),
        (Picture(), ": numpy.asarray(x) gives an array, torch.from_numpy(array) a tensor"),
        (ibp.compress(torch.ones(4, 4), memory="host"), ": it is coded already, and ibp.decompress(table) gives its t"),
        (None, ""),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_tensor_is_told_what_takes_it(function, given, way):
    with pytest.raises(TypeError) as caught:
        function(given)
    assert str(caught.value).startswith(f"x is a {type(given).__name__}; wanted a torch.Tensor{way}")
    assert way or str(caught.value).endswith("wanted a torch.Tensor")


@pytest.mark.parametrize("make_table", [ibp.compress, lambda x: ibp.spill.place(x, 1.25, device="cpu")])
def test_tensors_that_require_grad_are_warned_of_once(make_table):
    process.said.clear()
    weight = torch.nn.Parameter(embedding(64, 64))
    with pytest.warns(RuntimeWarning, match="^x requires grad, and a table of it has no gradient") as told:
        for x in (weight, weight, 2 * weight):
            assert_same_bits(make_table(x).decompress(), x.detach())
    assert [Path(warning.filename) for warning in told] == [Path(__file__)]
    process.said.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_table(weight.detach())
        with torch.no_grad():
            make_table(weight)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("function", [ibp.compress, compress_in_place, ibp.codecs.analyze])
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: [1.0, 2.0], "list"),
        (lambda: np.zeros((3, 3), object), "ndarray|array of object"),
        (lambda: None, "NoneType"),
        (lambda: torch.zeros(3, 3, dtype=torch.complex128), "complex128.*16"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.zeros(3, 3, device="meta"), "meta"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "nested"),
        (lambda: torch.empty(4, dtype=torch.uint4), "uint4.*whole bytes"),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4.*whole bytes"),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "bits8.*whole bytes"),
    ],
    ids=["list", "numpy", "None", "complex128", "sparse", "meta", "nested", "uint4", "float4", "bits8"],
)
def test_what_cannot_be_compressed(function, make, message):
    with pytest.raises(TypeError, match=message):
        function(make())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"scheme": "zip"}, "scheme.*zip.*auto.*ibp.*planes"),
        ({"scheme": "planes", "chunk_bytes": 4}, "chunk_bytes.*'ibp'.*'planes'"),
        ({"scheme": "planes", "tau": 0.8}, "tau.*'ibp'.*'planes'"),
        ({"scheme": "raw", "tau": 0.8}, "tau.*'ibp'.*'raw'"),
        ({"layout": "diagonal"}, "layout.*diagonal.*packed"),
        ({"chunk_bytes": 3}, r"chunk_bytes.*3.*\(1, 2, 4, 8\)"),
        ({"chunk_bytes": 0}, "chunk_bytes.*0"),
        ({"chunk_bytes": 16}, "chunk_bytes.*16"),
        ({"tau": 0.49}, "tau.*0.49.*0.5"),
        ({"tau": 1.01}, "tau.*1.01"),
        ({"tau": float("nan")}, "tau.*nan"),
        ({"sample": 0}, "sample.*0"),
        ({"sample": 1.5}, "sample.*1.5"),
        ({"sample": -0.1}, "sample.*-0.1"),
        ({"row_bytes": 0}, "row_bytes.*0.*65536"),
        ({"row_bytes": -4}, "row_bytes.*-4"),
        ({"row_bytes": 65537}, "row_bytes.*65537"),
        ({"slot_bytes": 33}, "slot_bytes.*33.*32.*240"),
        ({"slot_bytes": 0}, "slot_bytes.*0"),
        ({"slot_bytes": -32}, "slot_bytes.*-32"),
        ({"slot_bytes": 256}, "slot_bytes.*256.*240"),
        ({"layout": "packed", "slot_bytes": 32}, "slot_bytes.*32.*packed"),
        ({"device": "meta"}, "device.*meta"),
    ],
    ids=str,
)
def test_arguments_of_compress(x, arguments, message):
    with pytest.raises(ValueError, match=message):
        ibp.compress(x, **arguments)


@pytest.mark.parametrize("arguments, message", [
    ({"scheme": "zip"}, "scheme.*zip"), ({"scheme": "planes", "paper": True}, "paper.*'ibp'.*'planes'"),
    ({"scheme": "auto", "paper": True}, "paper"),
    ({"scheme": "planes", "tau": 0.9}, "tau"), ({"scheme": "planes", "chunk_bytes": 2}, "chunk_bytes"),
    ({"chunk_bytes": 5}, "chunk_bytes.*5"), ({"tau": 2.0}, "tau.*2"), ({"sample": 2.0}, "sample.*2"),
    ({"row_bytes": 1 << 20}, "row_bytes"),
], ids=str)  # fmt: skip
def test_arguments_of_analyze(x, arguments, message):
    with pytest.raises(ValueError, match=message):
        ibp.codecs.analyze(x, **arguments)


@pytest.mark.filterwarnings("ignore")  # torch says that quantized tensors will go
@pytest.mark.parametrize("function", [ibp.compress, compress_in_place, ibp.codecs.analyze, ibp.estimate])
def test_quantized_tensors(function):
    x = torch.quantize_per_tensor(torch.zeros(3, 3), 0.1, 0, torch.quint8)
    with pytest.raises(TypeError, match="quint8.*quantized.*int_repr"):
        function(x)


WRONG_TYPES = [
    ({"row_bytes": 1.5}, TypeError, "row_bytes.*1.5.*int"),
    ({"row_bytes": True}, TypeError, "row_bytes.*True.*bool.*int"),
    ({"row_bytes": "240"}, TypeError, "row_bytes.*'240'.*int"),
    ({"sample": "all"}, TypeError, "sample.*'all'.*float"),
    ({"sample": True}, TypeError, "sample.*True.*float"),
    ({"sample": [0.5]}, TypeError, "sample.*list.*float"),
    ({"tau": "0.8"}, TypeError, "tau.*'0.8'.*float"),
    ({"tau": False}, TypeError, "tau.*False.*float"),
    ({"chunk_bytes": 4.0}, TypeError, "chunk_bytes.*4.0.*int"),
    ({"chunk_bytes": True}, TypeError, "chunk_bytes.*True.*int"),
    ({"device": "foo"}, ValueError, "device.*'foo'.*CUDA"),
    ({"device": 1.5}, TypeError, "device.*float.*torch.device"),
    ({"device": True}, TypeError, "device.*bool.*torch.device"),
]


@pytest.mark.parametrize("function", [ibp.compress, compress_in_place, ibp.codecs.analyze])
@pytest.mark.parametrize("arguments, error, message", WRONG_TYPES, ids=str)
def test_types_of_arguments(x, function, arguments, error, message):
    before = x.clone()
    with pytest.raises(error, match=message):
        function(before, **arguments)
    assert_same_bits(before, x)


@pytest.mark.parametrize("arguments, error, message", [
    ({"slot_bytes": 32.0}, TypeError, "slot_bytes.*32.0.*int"), ({"slot_bytes": "32"}, TypeError, "slot_bytes.*int"),
    ({"clusters": 2.0}, TypeError, "clusters.*2.0.*int"),
    ({"clusters": True}, TypeError, "clusters.*True"), ({"clusters": "many"}, ValueError, "clusters.*many.*auto"),
    ({"clusters": 257}, ValueError, "clusters.*257.*256"),
    ({"clusters": np.int64(0)}, ValueError, "clusters.*0"),
], ids=str)  # fmt: skip
def test_types_of_arguments_of_compress(x, arguments, error, message):
    with pytest.raises(error, match=message):
        ibp.compress(x, **arguments)


def test_numbers_of_numpy_are_numbers(x):
    table = ibp.compress(
        x,
        row_bytes=np.int32(120),
        slot_bytes=np.uint16(32),
        sample=np.float32(1),
        tau=np.float64(0.9),
        chunk_bytes=np.int8(4),
        device="cpu",
    )
    assert (table.row_bytes, table.slot_bytes, table.codebook.chunk_bytes, table.codebook.tau) == (120, 32, 4, 0.9)
    assert type(table.row_bytes) is type(table.slot_bytes) is int
    assert_same_bits(ibp.compress(x, clusters=np.int64(2), scheme="ibp", device="cpu").decompress(), x)


def test_bad_arguments_are_refused_for_empty_and_tiny_tensors_too():
    for x in (torch.zeros(0, 8), torch.zeros(1, 1)):
        for arguments in ({"chunk_bytes": 3}, {"tau": 0.1}, {"sample": 7.0}, {"layout": "diagonal"}, {"scheme": "zip"}):
            with pytest.raises(ValueError):
                ibp.compress(x, **arguments)


@pytest.mark.parametrize("codebook_", ["codebook", 3, {"mask": 1}], ids=str)
def test_what_is_no_codebook(x, codebook_):
    with pytest.raises(TypeError, match="codebook.*" + type(codebook_).__name__):
        ibp.compress(x, codebook=codebook_)
    with pytest.raises(TypeError, match="codebook"):
        ibp.estimate(x, codebook_)


def test_row_bytes_against_the_codebook(x, codebook):
    with pytest.raises(ValueError, match="row_bytes.*100.*240"):
        ibp.compress(x, codebook=codebook, row_bytes=100)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda(x, table):
    for call in (
        lambda: ibp.compress(x, device="cuda"),
        lambda: table.decompress(device="cuda"),
        lambda: ibp.codecs.analyze(x, device="cuda"),
        lambda: ibp.index_select(table, torch.tensor([0]), device="cuda"),
    ):
        with pytest.raises(ValueError, match="cuda"):
            call()
    for call in (lambda: ibp.compress(x, memory="pinned"), lambda: ibp.compress(x).pin_memory()):
        with pytest.raises(RuntimeError, match="CUDA"):
            call()


# ---- codebooks ----


BYTES = torch.zeros(8, dtype=torch.uint8)


@pytest.mark.parametrize("mask, bitval, chunk_bytes, error, message", [
    (BYTES, BYTES + 1, 4, ValueError, "bitval"),
    (BYTES, BYTES[:7], 4, ValueError, "8.*7"),
    (BYTES.view(2, 4), BYTES.view(2, 4), 4, ValueError, r"\[2, 4\]"),
    (BYTES[:0], BYTES[:0], 4, ValueError, "row_bytes.*0"),
    (torch.zeros(65537, dtype=torch.uint8), torch.zeros(65537, dtype=torch.uint8), 4, ValueError, "65537.*65536"),
    (BYTES, BYTES, 3, ValueError, "chunk_bytes.*3"),
    (BYTES.to(torch.int32), BYTES, 4, TypeError, "mask.*int32.*uint8"),
    (BYTES, b"12345678", 4, TypeError, "bitval.*bytes"),
])  # fmt: skip
def test_codebook_from_masks(mask, bitval, chunk_bytes, error, message):
    with pytest.raises(error, match=message):
        ibp.codecs.Codebook.from_masks(mask, bitval, chunk_bytes)


PAIR = torch.tensor([[[255], [1]], [[15], [0]]], dtype=torch.uint8)


@pytest.mark.parametrize("palette, index, message", [
    (PAIR[:0], torch.zeros(0, dtype=torch.uint8), "palette"),
    (PAIR.to(torch.int16), torch.zeros(4, dtype=torch.uint8), "palette.*int16"),
    (PAIR[:, :1], torch.zeros(4, dtype=torch.uint8), "palette"),
    (PAIR, torch.zeros(3, dtype=torch.uint8), r"index.*\[3\].*\[4\]"),
    (PAIR, torch.zeros(4, dtype=torch.uint16), "index.*uint16"),
    (PAIR, torch.full((4,), 2, dtype=torch.uint8), "index.*2"),
    (PAIR[:1], torch.zeros(4, dtype=torch.uint8), "index"),
    (PAIR.flip(1), torch.zeros(4, dtype=torch.uint8), "bitval"),
])  # fmt: skip
def test_codebook_of_parts(palette, index, message):
    with pytest.raises(ValueError, match=message):
        ibp.codecs.Codebook(4, 1, False, palette, index)


def test_codebook_with_bits_past_the_row():
    palette = torch.tensor([[[255, 255], [0, 0]]], dtype=torch.uint8)
    ibp.codecs.Codebook(4, 2, False, palette, torch.zeros(0, dtype=torch.uint8))
    with pytest.raises(ValueError, match="past the end"):
        ibp.codecs.Codebook(3, 2, False, palette, torch.zeros(0, dtype=torch.uint8))


# ---- index_select, decompress, [] ----


@pytest.mark.parametrize(
    "ids, position, bad", [([100], 0, 100), ([0, -1], 1, -1), ([5, 6, 2**40, -7], 2, 2**40), ([-(2**63)], 0, -(2**63))]
)
def test_ids_out_of_range(table, ids, position, bad):
    with pytest.raises(IndexError, match=rf"ids\[{position}\] is {bad}; wanted 0 to 99"):
        ibp.index_select(table, torch.tensor(ids))
    if abs(bad) < 2**31:
        with pytest.raises(IndexError, match=f"{bad}"):
            ibp.index_select(table, torch.tensor(ids, dtype=torch.int32))


def test_ids_of_an_empty_table():
    table = ibp.compress(torch.zeros(0, 4))
    assert ibp.index_select(table, torch.zeros(0, dtype=torch.int64)).shape == (0, 4)
    with pytest.raises(IndexError):
        ibp.index_select(table, torch.tensor([0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.uint64], ids=str)
def test_dtype_of_ids(table, dtype):
    with pytest.raises(TypeError, match=f"ids.*{dtype}.*int32.*int64"):
        ibp.index_select(table, torch.zeros(3).to(dtype))


def test_shape_of_ids(table):
    with pytest.raises(ValueError, match=r"ids.*\[2, 3\]"):
        ibp.index_select(table, torch.zeros(2, 3, dtype=torch.int64))


def test_what_is_no_table(x):
    with pytest.raises(TypeError, match="table.*Tensor"):
        ibp.index_select(x, torch.tensor([0]))
    with pytest.raises(TypeError, match="table.*Tensor"):
        ibp.decompress(x)


@pytest.mark.parametrize("make_out, error, message", [
    (lambda: torch.empty(3, 60, dtype=torch.float64), TypeError, "out.*float64.*float32"),
    (lambda: torch.empty(3, 59), ValueError, r"out.*\[3, 59\].*\[3, 60\]"),
    (lambda: torch.empty(2, 60), ValueError, r"out.*\[2, 60\].*\[3, 60\]"),
    (lambda: torch.empty(180), ValueError, r"out.*\[180\]"),
    (lambda: torch.empty(3, 60, requires_grad=True), ValueError, "out.*grad"),
    (lambda: np.empty((3, 60), np.float32), TypeError, "out.*ndarray"),
    (lambda: torch.empty(3, 60, device="meta"), ValueError, "meta"),
])  # fmt: skip
def test_out(table, make_out, error, message):
    with pytest.raises(error, match=message):
        ibp.index_select(table, torch.tensor([1, 2, 3]), out=make_out())


def test_out_of_decompress(table):
    for out, error in (
        (torch.empty(100, 61), ValueError),
        (torch.empty(100, 60, dtype=torch.int32), TypeError),
        (torch.empty(60, 100), ValueError),
    ):
        with pytest.raises(error, match="out"):
            table.decompress(out=out)


@pytest.mark.parametrize("max_sms", [0, -1])
def test_max_sms(table, max_sms):
    with pytest.raises(ValueError, match=f"max_sms.*{max_sms}"):
        ibp.index_select(table, torch.tensor([0]), max_sms=max_sms)


def test_getitem(x, table):
    for key in (100, -101, [0, 100], torch.tensor([[0], [-101]]), torch.ones(99, dtype=torch.bool)):
        with pytest.raises(IndexError):
            table[key]
    for key in (
        1.5,
        "1",
        True,
        {1},
        {1: 2},
        [0.5],
        (0, "1"),
        torch.tensor([0.5]),
        torch.tensor([1], dtype=torch.uint8),
    ):
        with pytest.raises(TypeError):
            table[key]
    for key in (slice(None, None, -1), slice(0, 5, 0)):
        with pytest.raises(ValueError):
            table[key]


def test_a_list_that_is_iterated_ends(x, table):
    """__getitem__ with __len__ makes a table iterable; the IndexError at its end stops that."""
    rows = list(table)
    assert len(rows) == 100
    assert_same_bits(torch.stack(rows), x)


# ---- compress in place ----


@pytest.mark.parametrize("make, message", [
    (lambda: one_hot_rows(60, 60).t(), "strides.*contiguous"),
    (lambda: one_hot_rows(60, 60)[::2], "strides.*contiguous"),
    (lambda: one_hot_rows(60, 60)[10:], "own"),
    (lambda: one_hot_rows(60, 60)[:10], "own"),
    (lambda: one_hot_rows(60, 60).requires_grad_(), "grad"),
    (lambda: torch.nn.Parameter(one_hot_rows(60, 60)), "grad"),
], ids=["transposed", "every other row", "end of a storage", "start of a storage", "requires grad",
"parameter"])  # fmt: skip
def test_compress_in_place_refuses(make, message):
    x = make()
    before = x.detach().clone()
    with pytest.raises(ValueError, match=message):
        ibp.compress(x, inplace=True)
    assert_same_bits(x.detach().contiguous(), before.contiguous())


def test_compress_in_place_refuses_bad_arguments_before_it_writes(codebook):
    x = one_hot_rows(50, 60)
    before = x.clone()
    for arguments in (
        {"chunk_bytes": 3},
        {"tau": 7.0},
        {"scheme": "zip"},
        {"scheme": "planes", "tau": 0.9},
        {"row_bytes": 70000},
        {"codebook": codebook, "row_bytes": 100},
        {"device": "meta"},
        {"sample": 9.0},
    ):
        with pytest.raises(ValueError):
            ibp.compress(x, **arguments, inplace=True)
    with pytest.raises(TypeError):
        ibp.compress(x, codebook="codebook", inplace=True)
    assert_same_bits(x, before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_compress_in_place_that_cannot_pin_leaves_x():
    x = one_hot_rows(50, 60)
    before = x.clone()
    with pytest.raises(RuntimeError, match="CUDA"):
        ibp.compress(x, memory="pinned", inplace=True)
    assert_same_bits(x, before)


# ---- the operations beneath ----


def test_ops_check_their_arguments(x):
    table = ibp.compress(x, scheme="ibp", device="cpu", memory="host")
    ids, fault = torch.tensor([0]), torch.zeros(4, dtype=torch.int64)
    out = torch.zeros(240, dtype=torch.uint8)
    arguments = values_of(table, torch.device("cpu"))
    slots, _, lengths, _, words, (_, row_bytes, chunk_bytes, num_flags) = arguments[:6]
    changes = [
        (0, slots.to(torch.int16)),
        (2, lengths[:-1]),
        (2, lengths.view(torch.int16)),
        (4, words[:, :-1].contiguous()),
        (6, -1),
        (6, 65537),
        (7, -1),
        (8, -5),
        (8, 2**62),
        (8, 2**56),
        (9, -240),
        (9, 2**62),
    ]
    codecs = [
        [7, row_bytes, chunk_bytes, num_flags],
        [],
        [1],
        [1, row_bytes],
        [1, 0, chunk_bytes, num_flags],
        [1, 65537, chunk_bytes, num_flags],
        [1, row_bytes, 9, num_flags],
        [1, row_bytes, 3, num_flags],
        [1, row_bytes, chunk_bytes, -1],
        [0, row_bytes],
    ]
    for place, wrong in changes + [(5, codec) for codec in codecs]:
        with pytest.raises(RuntimeError, match="ibp"):
            OPS.gather_items(*arguments[:place], wrong, *arguments[place + 1 :], ids, 0, out, fault)
    for wrong_ids, wrong_out, wrong_fault in (
        (ids.float(), out, fault),
        (ids, out[:-1], fault),
        (ids, out, fault[:3]),
        (ids, out.repeat(2)[::2], fault),
    ):
        with pytest.raises(RuntimeError, match="ibp"):
            OPS.gather_items(*arguments, wrong_ids, 0, wrong_out, wrong_fault)
    for start, end in ((-1, 5), (5, 4), (0, 24001)):
        with pytest.raises(RuntimeError, match="ibp"):
            OPS.decode_bytes(*arguments, start, end, 0, torch.zeros(30000, dtype=torch.uint8), fault)
    OPS.gather_items(*arguments, ids, 0, out, fault)
    assert fault[0] == 0


def test_a_raw_tensor_is_not_mistaken(x):
    """Errors leave no table half used: the same table answers right afterwards."""
    table = ibp.compress(make_tensor((50, 8), torch.int32, "random"), device="cpu")
    with pytest.raises(IndexError):
        table[50]
    assert table[49].shape == (8,)
