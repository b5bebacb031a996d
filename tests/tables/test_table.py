"""A table as an object: what cannot be changed or made, what tensors' manners it has, and `table[key]` beside
x[key]."""

import copy
import dataclasses
import io
import itertools
import multiprocessing
import pickle
import warnings

import numpy as np
import pytest
import torch

import ibp
from helpers import (
    TENSORS,
    assert_same_bits,
    assert_same_table,
    embedding,
    make_tensor,
    plain_table,
    spiky_rows,
)
from ibp._rows import geometry
from ibp._rows.learning import Options, Request
from ibp._tables import coding
from ibp._tables.compressed_tensor import CompressedTensor

ON_CPU = {"device": "cpu", "memory": "host"}
FIELDS = ("shape", "dtype", "scheme", "row_bytes", "slot_bytes", *TENSORS, "codebook")


def assert_equal(a, b):
    """As assert_same_bits, for views of any strides, whose memory it does not look at."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)


def compress(x, **arguments):
    return ibp.compress(x, **ON_CPU, **arguments)


def empty(dtype):
    return torch.empty(0, dtype=dtype)


@pytest.fixture(scope="module")
def x():
    return spiky_rows(100, 60)


@pytest.fixture(scope="module")
def table(x):
    return compress(x, scheme="planes", slot_bytes=32)


# ---- what cannot be changed ----


@pytest.mark.parametrize("name", [*FIELDS, "device", "nbytes", "colour"])
def test_fields_cannot_be_set(table, name):
    before = getattr(table, name, None)
    with pytest.raises(AttributeError, match=f"{name} .*cannot be set"):
        setattr(table, name, before)
    with pytest.raises(AttributeError, match=f"{name} .*cannot be deleted"):
        delattr(table, name)
    assert getattr(table, name, None) is before or name in ("device", "nbytes")


def test_state_is_set_once(table):
    again = copy.copy(table)
    with pytest.raises(RuntimeError, match="made already"):
        again.__setstate__(table.__getstate__())
    with pytest.raises(RuntimeError, match="made already"):
        again.__init__(**{name: getattr(table, name) for name in FIELDS})
    assert_same_table(again, table)


class BuiltTwice:
    """Pickles as a table whose state a file sets a second time."""

    def __init__(self, table, state):
        self.table, self.state = table, state

    def __reduce__(self):
        return copy.copy, (self.table,), self.state


def test_a_file_cannot_build_twice(table):
    with pytest.raises(RuntimeError, match="made already"):
        pickle.loads(pickle.dumps(BuiltTwice(table, {**table.__getstate__(), "slot_bytes": 0})))


def test_tensors_given_cannot_be_exchanged(x):
    """What holds the tensors that a table was made of may set them anew: the table keeps its own."""
    state = compress(x, scheme="planes").__getstate__()
    table = load(state)
    for name in ("slots", "lengths", "bases"):
        state[name].set_(torch.empty(0, dtype=state[name].dtype))
    assert_same_bits(table.decompress(), x)
    assert_same_bits(table[5], x[5])


# ---- what cannot be made ----

RAW = {
    "format_version": 1,
    "shape": (4, 64),
    "dtype": torch.uint8,
    "scheme": "raw",
    "row_bytes": 64,
    "slot_bytes": 64,
    "slots": torch.zeros(256, dtype=torch.uint8),
    "overflow": empty(torch.uint8),
    "lengths": empty(torch.int16),
    "bases": empty(torch.int64),
    "codebook": None,
}
LARGE = {"row_bytes": 65536, "slot_bytes": 0, "slots": empty(torch.uint8)}


def load(state):
    table = ibp.CompressedTensor.__new__(ibp.CompressedTensor)
    table.__setstate__(state)
    return table


def on_meta(*names):
    return {name: RAW[name].to("meta") for name in names}


def test_the_raw_state_is_good():
    assert torch.equal(load(RAW).decompress(), torch.zeros(4, 64, dtype=torch.uint8))
    packed = load(
        {
            **RAW,
            "slot_bytes": 0,
            "slots": empty(torch.uint8),
            "overflow": RAW["slots"],
            "bases": torch.zeros(1, dtype=torch.int64),
        }
    )
    assert torch.equal(packed.decompress(), torch.zeros(4, 64, dtype=torch.uint8))
    halves = {
        "slot_bytes": 32,
        "slots": torch.zeros(128, dtype=torch.uint8),
        "overflow": torch.ones(128, dtype=torch.uint8),
    }
    assert load({**RAW, **halves, "bases": torch.zeros(1, dtype=torch.int64)}).decompress().sum() == 128


@pytest.mark.parametrize(
    "change, message",
    [
        ({"shape": (2**61,), **LARGE}, "overflow.*wanted"),
        ({"shape": (2**63,), **LARGE}, "2\\^63 - 1 bytes"),
        ({"shape": (5, 2**32, 2**32), "slots": empty(torch.uint8)}, "2\\^63 - 1 bytes"),
        ({"shape": (4, 2**62 + 16, 4)}, "2\\^63 - 1 bytes"),
        ({"shape": (4, 2**61, 3), **LARGE}, "2\\^63 - 1 bytes"),
        ({"shape": (0, 2**40, 2**40), **LARGE}, "2\\^63 - 1 bytes"),
        ({"shape": (True, 256)}, "shape"),
        ({"shape": torch.tensor([4, 64])}, "shape"),
        ({"shape": "46"}, "shape"),
        ({"shape": (4.0, 64)}, "shape"),
        ({"shape": (-4, -64)}, "shape"),
        ({"shape": None}, "shape"),
        ({"shape": {4: 64}}, "shape"),
        ({"dtype": torch.quint8}, "dtype"),
        ({"dtype": torch.quint4x2}, "dtype"),
        ({"dtype": torch.bits8}, "dtype"),
        ({"dtype": torch.int1}, "dtype"),
        ({"dtype": torch.float4_e2m1fn_x2}, "dtype"),
        ({"dtype": torch.complex128}, "dtype"),
        ({"dtype": "uint8"}, "dtype"),
        ({"overflow": torch.zeros(32, dtype=torch.uint8)}, "overflow.*wanted"),
        ({"slot_bytes": 32, "slots": RAW["slots"][:128].clone()}, "overflow.*wanted"),
        (
            {"slot_bytes": 32, "slots": RAW["slots"][:128].clone(), "overflow": torch.zeros(128, dtype=torch.uint8)},
            "bases.*wanted",
        ),
        ({"lengths": torch.zeros(4, dtype=torch.int16)}, "lengths.*wanted"),
        (on_meta("slots", "overflow", "lengths", "bases"), "slots.*meta"),
        (on_meta("overflow"), "overflow.*meta"),
        (on_meta("lengths"), "lengths.*"),
        ({"slots": RAW["slots"].to_sparse()}, "slots.*sparse"),
        ({"slots": torch.zeros(1, dtype=torch.uint8).expand(256)}, "slots.*contiguous"),
        ({"slots": torch._efficientzerotensor(256, dtype=torch.uint8)}, "slots.*zero"),
        ({"slots": torch._neg_view(RAW["slots"])}, "slots.*negated"),
        ({"slots": np.zeros(256, np.uint8)}, "slots.*ndarray"),
        ({"codebook": "raw"}, "codebook"),
        ({"codebook": 5}, "codebook"),
        ({"codebook": ibp.codecs.ClusteredCodebook.__new__(ibp.codecs.ClusteredCodebook)}, "codebook"),
    ],
    ids=itertools.count(),
)
def test_states_that_describe_no_table(change, message):
    with pytest.raises(ValueError, match=message):
        load({**RAW, **change})
    fields = {**RAW, "lengths": empty(torch.uint16), **change}
    del fields["format_version"]
    with pytest.raises(ValueError, match=message.replace("lengths.*wanted", "lengths")):
        ibp.CompressedTensor(**fields)


@pytest.mark.parametrize(
    "state", [5, None, [1, 2], [("format_version", 0)], "state", torch.zeros(3)], ids=itertools.count()
)
def test_states_that_are_no_dicts(state):
    with pytest.raises(ValueError, match=f"{type(state).__name__}; wanted a dict"):
        load(state)


def test_states_with_odd_keys():
    with pytest.raises(ValueError, match="lacks or has too many"):
        load({**RAW, 5: 6, None: 7})


def test_a_scheme_that_is_no_name():
    for scheme in (["raw"], None, 0, "zip"):
        with pytest.raises((TypeError, ValueError)):
            load({**RAW, "scheme": scheme})


# ---- table[key] ----

BLOCK = torch.randn(24, 6, 5) * (torch.rand(24, 6, 5) < 0.3)
IDS, MASK = torch.tensor([[3, -1], [0, 23]]), torch.arange(24) % 3 == 0
ROWS = [
    0,
    5,
    -1,
    -24,
    np.int64(7),
    torch.tensor(3),
    torch.tensor(-3, dtype=torch.int32),
    slice(None),
    slice(3, 9),
    slice(10, 5, 2),
    slice(9, 2),
    slice(2, 23, 4),
    slice(-5, None),
    slice(30, 40),
    slice(None, None, 50),
    slice(torch.tensor(1), np.int32(4)),
    IDS,
    IDS[0],
    IDS[0, :0],
    IDS.to(torch.int32),
    [1, 2, 2],
    [],
    [[0, 1], [5, -2]],
    MASK,
    MASK.tolist(),
    torch.zeros(24, dtype=torch.bool),
    range(3, 6),
    np.array([4, -4]),
    np.array([[1]]),
    MASK.numpy(),
    np.arange(12)[::-2],
    (1, 2),
    ...,
]
REST = [
    (),
    (2,),
    (slice(1, 4),),
    (slice(None), slice(0, 2)),
    (..., 3),
    (None,),
    (2, 4),
    (None, slice(None), None, 1),
    (slice(5, 2), ...),
    (0, ..., None),
]


def index_of(row):
    """An index that torch takes too."""
    if isinstance(row, (list, range, tuple)):
        return torch.tensor(row, dtype=torch.int64) if len(row) == 0 else torch.tensor(row)
    return torch.from_numpy(row.copy()) if isinstance(row, np.ndarray) else row


@pytest.fixture(scope="module", params=["slots", "packed", "rows of 28 bytes"])
def block(request):
    return compress(BLOCK, **({"row_bytes": 28} if "28" in request.param else {"layout": request.param}))


@pytest.mark.parametrize("place", range(len(ROWS)))
def test_keys(block, place):
    """Of dimension 0 alone, then with every kind of index behind it and None or ... in front."""
    row = ROWS[place]
    if row is not ... and not isinstance(row, tuple):
        assert_equal(block[row], BLOCK[index_of(row)])
    for rest in REST:
        if row is ... and ... in rest:
            continue
        for front in ((), (None,), (None, None)) if ... in rest or row is ... else ((), (None,), (...,)):
            if front == (...,) and len([1 for index in rest if index is not None]) < 2:
                continue
            assert_equal(block[(*front, row, *rest)], BLOCK[(*front, index_of(row), *rest)])


@pytest.mark.parametrize(
    "key",
    [
        (),
        ...,
        None,
        (None, ...),
        (..., None),
        (..., 2),
        (..., 1, 2),
        (None, ..., 2, None),
        (..., 3, 2, 1),
        (slice(None), ..., 4),
        (..., slice(2, 3), 0, 0),
        (IDS, torch.tensor([1, 2])),
        (IDS, [0, 5], 3),
        (slice(2, 4), torch.tensor([[1], [2]]), [0, 4]),
        (3, IDS.clamp(0, 5)),
        (MASK, torch.arange(8) % 6),
        (BLOCK != 0),
        (BLOCK[:, :, 0] > 0),
        (BLOCK[:, :, 0] > 0, 2),
        (None, BLOCK[:, :, 0] > 0),
        (MASK, slice(None), torch.arange(5) == 3),
        (torch.zeros(24, 6, dtype=torch.bool),),
        (torch.tensor(4), torch.tensor([1, 2])),
        (..., MASK[:5]),
        (slice(None), IDS.clamp(0, 5), 2),
        (IDS, None, [[1, 2], [3, 4]]),
    ],
    ids=itertools.count(),
)
def test_keys_of_several_dimensions(block, key):
    assert_equal(block[key], BLOCK[key])


@pytest.mark.parametrize("shape", [(), (7,), (0,), (0, 4), (3, 0), (1, 1), (2, 3, 2, 2)], ids=str)
def test_shapes(shape):
    x = make_tensor(shape, torch.float32, "narrow")
    table = compress(x)
    for key in (
        (),
        ...,
        None,
        (None, ...),
        slice(None),
        slice(5, 2, 2),
        0,
        -1,
        [0],
        [],
        torch.tensor([[0]]),
        (..., 0),
        (slice(None), slice(None)),
        (0, 0, 0, 0),
        x == x,
    ):
        try:
            expected = x[key]
        except (IndexError, ValueError):
            with pytest.raises(IndexError):
                table[key]
        else:
            if not (isinstance(key, torch.Tensor) and key.dim() == 0):
                assert_equal(table[key], expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint16, torch.uint32], ids=str)
def test_shorter_ids(table, x, dtype):
    ids = torch.tensor([3, 99, 0], dtype=dtype)
    assert_same_bits(table[ids], x[[3, 99, 0]])
    assert_same_bits(ibp.index_select(table, ids), x[[3, 99, 0]])


def test_ids_of_index_select(table, x):
    for ids in (
        [3, 99, 0],
        (3, 99, 0),
        np.array([3, 99, 0]),
        np.array([3, 99, 0], np.int16),
        np.array([0, 99, 3])[::-1],
        torch.tensor([3, 99, 0], dtype=torch.uint8),
    ):
        assert_same_bits(ibp.index_select(table, ids), x[[3, 99, 0]])
    assert_same_bits(ibp.index_select(table, range(3, 9, 2)), x[3:9:2])
    assert_same_bits(ibp.index_select(table, []), x[:0])
    assert_same_bits(ibp.index_select(table, torch.tensor(5)), x[5:6])


@pytest.mark.parametrize(
    "key, error, message",
    [
        (1000, IndexError, "index 1000 is out of range; wanted -100 to 99"),
        (-101, IndexError, "index -101"),
        (np.int64(100), IndexError, "index 100"),
        (torch.tensor(100), IndexError, "index 100"),
        ([0, 100], IndexError, r"ids\[1\] is 100; wanted -100 to 99"),
        (torch.ones(99, dtype=torch.bool), IndexError, r"mask has shape \[99\]; wanted \[100\]"),
        ((0, 1, 2), IndexError, "too many indices"),
        ((slice(None), 60), IndexError, "60"),
        (torch.ones(100, 61, dtype=torch.bool), IndexError, r"\[100, 61\]; wanted \[100, 60\]"),
        (torch.ones(100, 60, 1, dtype=torch.bool), IndexError, "wanted"),
        (True, TypeError, "index is a bool; wanted"),
        (np.bool_(False), TypeError, "index is a bool"),
        (torch.tensor(True), TypeError, "torch.bool"),
        (1.5, TypeError, "index is a float; wanted an int"),
        ("1", TypeError, "index is a str"),
        ({1}, TypeError, "index is a set"),
        (object(), TypeError, "object"),
        ((0, {}), TypeError, "index is a dict"),
        ([1.5], TypeError, "float32"),
        (["1"], TypeError, "list"),
        ([[1], [2, 3]], TypeError, "list"),
        (torch.tensor([1], dtype=torch.uint8), TypeError, "takes for a mask"),
        (np.zeros(100, np.uint8), TypeError, "takes for a mask"),
        (torch.tensor([1j]), TypeError, "complex64"),
        (slice(1.5, 3), TypeError, "indices"),
        (slice(None, None, -1), ValueError, "step -1; wanted"),
        (slice(0, 5, 0), ValueError, "step"),
    ],
    ids=itertools.count(),
)
def test_keys_that_are_refused(table, key, error, message):
    with pytest.raises(error, match=message):
        table[key]


@pytest.mark.parametrize(
    "ids",
    [None, {1, 2}, "12", 1.5, 3, True, {1: 2}, [None], [1.5], [[1], [2, 3]], object(), [2**70], np.array(["a"])],
    ids=itertools.count(),
)
def test_ids_that_are_refused(table, ids):
    with pytest.raises(TypeError, match="ids .*wanted|that is no array of integers"):
        ibp.index_select(table, ids)


@pytest.mark.parametrize("max_sms", [True, 1.5, "8", None.__class__])
def test_max_sms_is_an_int(table, max_sms):
    for call in (lambda: ibp.index_select(table, [0], max_sms=max_sms), lambda: table.decompress(max_sms=max_sms)):
        with pytest.raises(TypeError, match="max_sms is .*wanted an int"):
            call()


def test_devices_that_are_refused(table):
    for call in (
        lambda device: ibp.index_select(table, [0], device=device),
        lambda device: table.decompress(device=device),
        table.to,
    ):
        with pytest.raises(ValueError, match="foo"):
            call("foo")
        with pytest.raises(TypeError, match="float"):
            call(1.5)


# ---- iteration ----


def test_a_table_is_a_data_set(table, x, monkeypatch):
    """A DataLoader gets the items of a batch by one call."""
    calls = []
    monkeypatch.setattr(type(table), "__getitem__", lambda self, key: calls.append(len(key)) or x[key])
    batches = list(torch.utils.data.DataLoader(table, batch_size=7))
    assert_same_bits(torch.cat(batches), x)
    assert calls == [len(batch) for batch in batches]
    monkeypatch.undo()
    assert_same_bits(torch.stack(table.__getitems__([3, 0, 3])), x[[3, 0, 3]])
    with pytest.raises(IndexError):
        table.__getitems__([len(x)])


@pytest.mark.parametrize("block_bytes", [1, 1000, 4 << 20])
def test_iteration(table, x, monkeypatch, block_bytes):
    monkeypatch.setattr("ibp._tables.compressed_tensor._ITERATED_BYTES", block_bytes)
    rows = list(table)
    assert len(rows) == 100
    assert_same_bits(torch.stack(rows), x)
    assert_same_bits(next(iter(table)), x[0])
    assert list(compress(torch.zeros(0, 3))) == []
    assert [item.shape for item in compress(torch.zeros(3, 0))] == [torch.Size([0])] * 3


def test_what_has_no_length():
    table = compress(torch.tensor(2.5))
    for call in (len, iter):
        with pytest.raises(TypeError, match="0-d"):
            call(table)
    assert float(table[()]) == 2.5 == float(table[...])


# ---- the manners of tensors ----


@pytest.mark.parametrize(
    "make",
    [
        lambda: spiky_rows(30, 20),
        lambda: torch.tensor(1.5),
        lambda: torch.zeros(0, 5),
        lambda: torch.arange(3000),
        lambda: embedding(20, 30, torch.bfloat16),
    ],
    ids=["float32", "no dimension", "empty", "int64", "bfloat16"],
)
def test_what_it_says_of_itself(make):
    x = make()
    table = compress(x)
    for name in ("shape", "dtype", "device", "ndim", "itemsize", "is_cuda", "requires_grad", "is_meta"):
        assert getattr(table, name) == getattr(x, name), name
    for name in ("size", "dim", "numel", "element_size", "is_floating_point", "is_complex", "is_shared"):
        assert getattr(table, name)() == getattr(x, name)(), name
    assert [table.size(d) for d in range(-x.dim(), x.dim())] == [x.size(d) for d in range(-x.dim(), x.dim())]
    assert table.detach() is table and table.requires_grad_(False) is table
    with pytest.raises(RuntimeError, match="cannot require grad"):
        table.requires_grad_()


def test_repr_begins_with_memory():
    """What the coded rows save, which is not what the memory saves, has its name behind it."""
    x = torch.randn(2000, 48).bfloat16()
    table = compress(x, scheme="planes", slot_bytes=96)
    assert table.nbytes > x.nbytes and table.savings > 0.2
    assert (
        f"nbytes={table.nbytes:,} ({table.nbytes / x.nbytes:.1%} of 192,000), stored_bytes={table.stored_bytes:,}, "
        f"savings={table.savings:.1%}, "
    ) in repr(table)
    assert "nbytes=0" in repr(compress(torch.zeros(0, 4)))


def test_to(table, x):
    for same in (
        table.to("cpu"),
        table.to(torch.device("cpu")),
        table.to(x),
        table.to(table),
        table.to(torch.float32),
        table.to(),
        table.cpu(),
        table.float(),
        table.to("cpu", torch.float32),
        table.to("cpu", non_blocking=True),
        table.to(None, None, False),
    ):
        assert same is table
    for call in (
        table.half,
        table.double,
        table.bfloat16,
        lambda: table.to("cpu", torch.int8),
        lambda: table.to(torch.float64),
        lambda: table.to(x.double()),
    ):
        with pytest.raises(TypeError, match="a table keeps its own, torch.float32: decompress it"):
            call()
    copied = table.to("cpu", copy=True)
    assert copied is not table and copied.slots.data_ptr() != table.slots.data_ptr()
    assert_same_table(copied, table)


def test_copies(table, x):
    for copied, shares in (
        (table.clone(), False),
        (copy.deepcopy(table), False),
        (copy.copy(table), True),
        (pickle.loads(pickle.dumps(table)), False),
    ):
        assert copied is not table and type(copied) is CompressedTensor
        assert (copied.slots.data_ptr() == table.slots.data_ptr()) == shares
        assert_same_table(copied, table)
        assert_same_bits(copied.decompress(), x)
    twice = copy.deepcopy([table, table])
    assert twice[0] is twice[1]


def test_identity(table):
    other = table.clone()
    assert table == table and table != other and len({table, other, table}) == 2 and {table: 1}[table] == 1


def test_a_copy_of_a_table_in_a_tensors_memory(x):
    table = copy.copy(ibp.compress(x.clone(), **ON_CPU, inplace=True))
    assert_same_bits(table.decompress(), x)
    assert table._owner is not None, "the memory lives as long as the copy"
    with pytest.raises(RuntimeError, match="clone"):
        table.share_memory_()


def test_as_an_array(table, x):
    for array in (np.asarray(table), np.array(table), table.__array__()):
        assert array.dtype == np.float32 and np.array_equal(array, x.numpy())
    assert np.asarray(table, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="without a copy"):
        table.__array__(copy=False)
    with pytest.raises(TypeError):
        np.asarray(compress(embedding(20, 30, torch.bfloat16)))


def rows_in_another_process(table, ids, results):
    results.put(table.is_shared() and table[ids].tolist())


def test_shared_memory(x):
    table = compress(x, scheme="planes", slot_bytes=32)
    assert not table.is_shared()
    assert table.share_memory_() is table and table.is_shared()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=rows_in_another_process, args=(table, [5, 7], results), daemon=True)
    process.start()
    assert results.get(timeout=60) == x[[5, 7]].tolist()
    process.join(60)
    assert_same_bits(table.decompress(), x)


def test_pin_memory_without_a_gpu(table):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert table.is_pinned() is False
    with pytest.raises(RuntimeError, match="CUDA"):
        table.clone().pin_memory()


# ---- names ----


def test_names_of_classes_are_the_packages():
    for name in ("CompressedTensor", "CorruptTableError"):
        kind = getattr(ibp, name)
        assert kind.__module__ == "ibp" and pickle.loads(pickle.dumps(kind)) is kind


def test_files_name_the_package(table, x):
    data = pickle.dumps(table, protocol=2)
    assert b"cibp\nCompressedTensor\n" in data and b"_table" not in data
    file = io.BytesIO()
    torch.save(table, file)
    file.seek(0)
    assert_same_bits(torch.load(file, weights_only=True).decompress(), x)


def test_public_names():
    assert set(dir(ibp)) == {*ibp.__all__, "__version__"} and all(hasattr(ibp, name) for name in dir(ibp))
    assert sorted(ibp.__all__) == ibp.__all__ and not any(name.startswith("_") for name in ibp.__all__)


def test_show_config(capsys):
    assert ibp.show_config() is None
    text = capsys.readouterr().out
    for part in (
        ibp.__version__,
        "format version 1",
        torch.__version__,
        "CUDA kernels",
        "CPU coders",
        "GPUs",
        "index_select",
        "decompress",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) < 200


# ---- on GPUs ----


def test_manners_on_a_gpu(cuda, x):
    table = ibp.compress(x, memory="pinned")
    assert table.is_pinned() and table.pin_memory() is table and not table.is_cuda and not table.clone().is_pinned()
    for near in (
        table.cuda(),
        table.to("cuda"),
        table.to(cuda, non_blocking=True),
        table.to(torch.empty(0, device=cuda)),
    ):
        assert near.is_cuda and near.device == cuda and not near.is_pinned() and near.pin_memory() is near
        assert_same_bits(near.decompress().cpu(), x)
        assert near.to(cuda) is near
        assert_same_bits(near.cpu().decompress(), x)
    with pytest.raises(TypeError, match="keeps its own"):
        table.to(cuda, torch.float16)


@pytest.mark.parametrize("place", ["pinned", "device", "pageable"])
def test_keys_on_a_gpu(cuda, place):
    table = ibp.compress(BLOCK.to(cuda) if place == "device" else BLOCK, memory={"pageable": "host"}.get(place, place))
    for key in (
        3,
        -1,
        slice(3, 9),
        slice(10, 5, 2),
        (IDS, 2),
        (slice(2, 4), None, ..., 1),
        MASK,
        (MASK, 0),
        BLOCK[:, :, 0] > 0,
        ...,
        (..., 2),
        [],
    ):
        assert_equal(table[key].cpu(), BLOCK[key])
    for key in (IDS.to(cuda), MASK.to(cuda), (BLOCK[:, :, 0] > 0).to(cuda)):
        result = table[key]
        assert result.device == cuda
        assert_equal(result.cpu(), BLOCK[key.cpu()])
        assert_equal(table[key, ..., None].cpu(), BLOCK[key.cpu(), ..., None])
    assert_equal(torch.stack([item.cpu() for item in table]), BLOCK)
    assert np.array_equal(np.asarray(table), BLOCK.numpy())


# ---- bases of the rows' own -----------------------------------------------------------------------------------------


def with_own_bases(table, seed=0):
    """The table with a base for every row, its parts in any order with gaps."""
    rng = np.random.default_rng(seed)
    plain, num_rows = plain_table(table, None), table.num_rows
    bases, parts, end = np.full(num_rows, -1, np.int64), [], 0
    for row in rng.permutation(num_rows):
        part = plain.part(row)
        if part == 0:
            continue
        start = plain.overflow_start(row)
        room = -(-part // 32) * 32 + 32 * int(rng.integers(0, 2))
        parts.append(np.pad(plain.overflow[start : start + part], (0, room - part), constant_values=0xA5))
        bases[row] = end
        end += room
    fields = {name: getattr(table, name) for name in FIELDS}
    overflow = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    return CompressedTensor(
        **{**fields, "bases": torch.from_numpy(bases), "overflow": torch.from_numpy(overflow)}
    )  # fmt: skip


@pytest.mark.parametrize("options", [{"layout": "packed"}, {"slot_bytes": 32}], ids=str)
@pytest.mark.parametrize("scheme", ["ibp", "planes"])
def test_bases_of_the_rows_own(scheme, options):
    x = spiky_rows(200, 60)
    x[::9] = 0
    table = with_own_bases(compress(x, scheme=scheme, **options))
    assert table.bases.numel() == table.num_rows and table.scheme == scheme
    assert_same_bits(table.decompress(), x)
    ids = torch.tensor([199, 0, 9, 9, 150])
    assert_equal(ibp.index_select(table, ids), x[ids])
    assert_equal(table[20:50], x[20:50])
    assert_same_table(pickle.loads(pickle.dumps(table)), table)
    assert table.index_bytes == 10 * table.num_rows and table.nbytes > table.stored_bytes


def test_a_part_that_found_no_room():
    x = spiky_rows(200, 60)
    table = with_own_bases(compress(x, scheme="planes", layout="packed"))
    lost = int((table.bases >= 0).nonzero()[5])
    table.bases[lost] = -1
    with pytest.raises(ibp.CorruptTableError, match=f"row {lost} at"):
        table.decompress()
    ids = torch.tensor([row for row in range(200) if row != lost])
    assert_equal(ibp.index_select(table, ids), x[ids])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint16", "bool", "complex64"])
def test_arrays_are_compressed(dtype):
    """As the tensors of the same bytes: read-only, reversed, Fortran-order and of records too."""
    array = (np.random.default_rng(0).random((300, 40)) * 50).astype(dtype)
    locked, records = array.copy(), np.zeros((300, 40), [("pad", "u1"), ("x", dtype)])
    locked.flags.writeable, records["x"] = False, array
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swapped = array.astype(array.dtype.newbyteorder())
        for given in (array, locked, array[::-1], np.asfortranarray(array), records["x"], array[:, ::3], swapped):
            table = ibp.compress(given, memory="host")
            native = np.array(given, dtype)
            assert_same_bits(table.decompress(), torch.from_numpy(native))
    assert_same_bits(torch.from_numpy(locked.copy()), torch.from_numpy(array))


def test_arrays_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn"):
        x = torch.randn(300, 40).to(getattr(torch, name))
        array = x.view(torch.uint8).numpy().view(getattr(ml_dtypes, name))
        assert_same_bits(ibp.compress(array, memory="host").decompress(), x)


@pytest.mark.parametrize("dtype", ["object", "datetime64[s]", "S4", "longdouble"])
def test_arrays_that_are_refused(dtype):
    with pytest.raises(TypeError, match="x is an array of .*; wanted a dtype that torch has"):
        ibp.compress(np.zeros((30, 4), dtype))


def test_what_tables_do_not_do():
    """Errors say what to call."""
    table = ibp.compress(torch.randn(300, 40).bfloat16(), memory="host")
    for call in (
        lambda: table + 1,
        lambda: 2.0 * table,
        lambda: table - torch.ones(40),
        lambda: torch.ones(40) + table,
        lambda: table @ torch.ones(40),
        lambda: -table,
        lambda: table > 0,
        lambda: np.asarray(table),
    ):
        with pytest.raises(TypeError, match="decompress"):
            call()
    assert np.asarray(ibp.compress(torch.ones(300, 40), memory="host")).sum() == 12_000


@pytest.mark.parametrize("num_rows, is_free, device", [(16, True, "cpu"), (16, False, "cuda"), (17, True, "cuda")])
def test_few_bytes_of_the_host_are_coded_there(monkeypatch, num_rows, is_free, device):
    """Also where a GPU would do the work, unless it is asked for."""
    asked, measure = [], coding.measure
    monkeypatch.setattr(
        coding, "measure", lambda *args: asked.append(args[2].type) or measure(*args[:2], torch.device("cpu"))
    )
    x = torch.randn(num_rows, 16 << 10)
    named = None if is_free else "cuda"
    options = Options("planes", sample=0.9, device=named)  # lengths of all sampled rows are known without a device
    codebook = ibp.codecs.analyze(x, scheme="planes", device="cpu")
    for given in (options, dataclasses.replace(options, codebook=codebook)):
        request = Request.of(x, dataclasses.replace(given, device="cpu"))
        found = coding.coded(dataclasses.replace(request, device=torch.device("cuda", 0), options=given))
        assert found.stored_bytes < x.nbytes and asked.pop() == device and not asked


@pytest.mark.parametrize("options", [{}, {"slot_bytes": 640}, {"layout": "packed"}], ids=str)
def test_rows_coded_while_they_are_measured(monkeypatch, options):
    """In the slots that the sample asks for; also where all rows ask for others, or for more overflow, and where the
    codebook is given."""
    x = (torch.randn(1 << 12, 512, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    table = ibp.compress(x, device="cpu", **options)
    assert_same_table(ibp.compress(x, device="cpu", codebook=table.codebook, **options), table)
    with monkeypatch.context() as patched:  # many enough to survey some of them
        ahead, surveyed = coding._encoded_ahead, []
        patched.setattr(coding, "_encoded_ahead", lambda *args: surveyed.append(args[2].num_rows) or ahead(*args))
        patched.setattr(coding, "_SURVEYED_BYTES", x.nbytes // coding._LEAST_TIMES)
        assert_same_table(ibp.compress(x, device="cpu", codebook=table.codebook, **options), table)
        assert surveyed == ([] if "layout" in options else [len(x) // coding._LEAST_TIMES])
    with monkeypatch.context() as patched:  # in several blocks
        patched.setattr(geometry, "_NEAR_BLOCK_BYTES", x.nbytes // 3)
        assert_same_table(ibp.compress(x, device="cpu", **options), table)
    right = geometry.Survey.table_slot_bytes.func
    wrong = property(lambda survey: right(survey) - (64 if survey.num_rows < len(x) else 0))
    with monkeypatch.context() as patched:
        patched.setattr(geometry.Survey, "table_slot_bytes", wrong)
        assert_same_table(ibp.compress(x, device="cpu", **options), table)
    monkeypatch.setattr(coding, "_MORE_OVERFLOW", 0)
    monkeypatch.setattr(coding, "_LEAST_SHARE", 0)
    assert_same_table(ibp.compress(x, device="cpu", **options), table)


@pytest.mark.parametrize("shape", [(50, 40), (50, 3, 700), (50,), ()])
@pytest.mark.parametrize("options", [{}, {"layout": "packed"}, {"scheme": "raw"}], ids=str)
def test_some_items_in_given_memory(shape, options):
    x = torch.randn(shape)
    table = ibp.compress(x, device="cpu", memory="host", **options)
    items = x if shape else x.view(1)
    for first, last in [(0, len(items)), (7, 31), (20, 20), (len(items), len(items))] if shape else [(0, 1)]:
        wanted = items[first:last]
        assert_same_bits(table.decompress_items(first, last), wanted)
        out = torch.full_like(wanted, -1)
        assert table.decompress_items(first, last, out=out, check=True) is out
        assert_same_bits(out, wanted)
    for first, last in [(-1, 3), (3, 2), (0, len(items) + 1)]:
        with pytest.raises(IndexError, match=f"items {first} to {last} are asked of {len(items)}; wanted some of them"):
            table.decompress_items(first, last)
    with pytest.raises(ValueError, match="out"):
        table.decompress_items(0, 1, out=torch.empty(2, 2))


def test_some_items_on_a_gpu(cuda):
    x = torch.randn(5000, 64).bfloat16()
    pinned, near = ibp.compress(x, device="cpu"), ibp.compress(x.to(cuda))
    for table, device in ((pinned, cuda), (near, None)):
        got = table.decompress_items(100, 4000, device=device, check=True)
        assert got.device == cuda
        assert_same_bits(got.cpu(), x[100:4000])
