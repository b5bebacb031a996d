"""Clusters: several codebooks in one table (FORMAT.md section 7), their bytes, how they are learned, and what is
refused."""

import copy
import dataclasses
import functools
import io
import pickle

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import ibp
import reference
import reference_planes
from golden import make_clusters
from golden.make_clusters import CASES, HERE, coded_rows, encode_row, load, make_entries, make_masks, make_rows, refused
from handles import BY_VALUES as OPS
from handles import values_of, with_handle
from helpers import (
    LAYOUTS,
    TENSORS,
    assert_same_bits,
    assert_same_table,
    bytes_of,
    compress_in_place,
    embedding,
    layout_arguments,
    planes_codebook,
    reference_planes_codebook,
    slow_but,
)
from ibp._rows import clusters as learned_clusters

CPU = torch.device("cpu")
CORRUPT = 3  # IBP_CORRUPT_ROW
SCHEMES = ["ibp", "planes"]
PLACES = ["pinned", "device"]
ON_CPU = {"device": "cpu", "memory": "host"}


# ---- codebooks and tensors -----------------------------------------------------------------------------------------


def library(codebooks):
    """Codebooks of the numpy references as the library's one."""
    return ibp.codecs.ClusteredCodebook(
        planes_codebook(one) if isinstance(one, reference_planes.Codebook) else masks_codebook(one) for one in codebooks
    )


def masks_codebook(codebook):
    mask, bitval = (torch.from_numpy(array.copy()) for array in reference.masks_of(codebook))
    return ibp.codecs.Codebook.from_masks(mask, bitval, codebook.chunk_bytes, codebook.flag_all)


def references_of(codebook):
    """The inverse of library()."""
    if codebook.scheme == "planes":
        return [reference_planes_codebook(one) for one in codebook.codebooks]
    return [
        reference.Codebook(c.row_bytes, c.chunk_bytes, c.flag_all, c.palette.numpy(), c.index.numpy())
        for c in codebook.codebooks
    ]


def random_bits(num_rows, row_bytes, seed=0):
    return torch.from_numpy(np.random.default_rng([seed, row_bytes]).integers(0, 256, (num_rows, row_bytes), np.uint8))


def prototypes(num_rows, columns, kinds=8, seed=0):
    """int32 rows near one of a few prototypes: only the low bytes of the elements differ."""
    rng = np.random.default_rng([seed, kinds])
    near = rng.integers(0, 2**32, (kinds, columns), np.uint32)[rng.integers(0, kinds, num_rows)]
    return torch.from_numpy((near ^ rng.integers(0, 256, near.shape, np.uint32)).view(np.int32))


def scales(num_rows, columns, kinds=8, seed=0):
    """float32 rows, each of one of a few magnitudes."""
    rng = np.random.default_rng([seed, kinds])
    return torch.from_numpy(
        (rng.normal(size=(num_rows, columns)) * 2.0 ** (rng.integers(0, kinds, (num_rows, 1)) * 12.0 - 40)).astype(
            np.float32
        )
    )


LOCAL = {"ibp": prototypes, "planes": scales}  # a scheme and data that clusters are good for


def local_table(scheme, layout="slots", num_rows=700):
    """(x, a table of it with 2 to 8 clusters)."""
    x = LOCAL[scheme](num_rows, 16)
    table = ibp.compress(x, scheme=scheme, clusters=8, **layout_arguments(layout, 64), **ON_CPU)
    assert table.scheme == scheme and num_clusters(table) > 1
    return x, table


def named(value):
    """The name of a parameter that is the same in every process: pytest-xdist compares them."""
    return value.__name__ if callable(value) else str(value)


def num_clusters(table):
    return len(table.codebook) if isinstance(table.codebook, ibp.codecs.ClusteredCodebook) else 1


# ---- against the reference -----------------------------------------------------------------------------------------

MASKS = [
    (row_bytes, chunk_bytes, flag_all)
    for row_bytes in (1, 2, 3, 7, 16, 33, 100, 129, 600)
    for chunk_bytes in (1, 2, 4, 8)
    for flag_all in (False, True)
]
ENTRIES = [
    (1, 50, 0, 2, (1, 1), "dense"),
    (1, 1, 0, 0, (4,), "dense"),
    (2, 33, 1, 4, (2, 2), "dense"),
    (4, 24, 1, 3, (4, 4), "dense"),
    (8, 17, 0, 10, (1, 2, 3, 4), "dense"),
    (1, 33, 0, 1, (1,), "per_column"),
    (2, 40, 1, 3, (3, 1), "per_column"),
    (4, 20, 0, 5, (1, 1, 1, 1), "per_column"),
    (8, 9, 1, 12, (2,), "per_column"),
    (1, 200, 0, 3, (1, 1), "listed"),
    (2, 64, 1, 8, (2, 1), "listed"),
    (4, 60, 0, 6, (4,), "listed"),
    (8, 30, 1, 20, (1, 1), "listed"),
    (4, 16, 0, 24, (1,), "dense"),
    (4, 16, 0, 16, (2,), "dense"),
    (4, 16, 0, 32, (1,), "dense"),
]


def slot_sizes(row_bytes):
    return [0, *([32] if row_bytes > 32 else []), row_bytes]


def core_arrays(codebook, data, slot_bytes, device=CPU):
    """slots, overflow, lengths and bases as the operations make them on a device, brought back."""
    data, words = data.to(device), codebook.words(device)
    lengths = OPS.measure_rows(data, words, codebook.codec)
    index = OPS.index_rows(lengths.cpu(), data.numel(), codebook.row_bytes, slot_bytes)
    num_slots = data.numel() if slot_bytes == codebook.row_bytes else lengths.numel() * slot_bytes
    slots, overflow = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (num_slots, int(index[-1])))
    fault = torch.zeros(4, dtype=torch.int64, device=device)
    OPS.encode_rows(
        slots,
        overflow,
        lengths,
        index[:-1].to(device),
        words,
        codebook.codec,
        slot_bytes,
        0,
        data.numel(),
        1,
        data,
        fault,
    )
    assert fault.tolist() == [0, 0, 0, 0]
    return [tensor.cpu() for tensor in (slots, overflow, lengths, index[:-1])]


def core_decode(codebook, arrays, slot_bytes, num_bytes, device=CPU):
    """(bytes, fault) of a whole table."""
    out, fault = (
        torch.full((num_bytes,), 0xA5, dtype=torch.uint8, device=device),
        torch.zeros(4, dtype=torch.int64, device=device),
    )
    OPS.decode_bytes(
        *(tensor.to(device) for tensor in arrays),
        codebook.words(device),
        codebook.codec,
        slot_bytes,
        0,
        num_bytes,
        1,
        0,
        num_bytes,
        0,
        out,
        fault,
    )
    return out.cpu().numpy(), fault.tolist()


def torch_arrays(table):
    return [
        torch.from_numpy(array.copy())
        for array in (table.slots, table.overflow, table.lengths, table.bases.view(np.int64))
    ]


def check_rows(codebooks, rows, cut):
    """The core codes rows, the last one short, to the reference's bytes in every layout, and decodes them."""
    codebook, data = library(codebooks), rows.reshape(-1)[: rows.size - cut]
    sizes = slot_sizes(codebook.row_bytes)
    for slot_bytes, table in zip(sizes, make_clusters.encode_tables(codebooks, data, sizes)):
        arrays = core_arrays(codebook, torch.from_numpy(data), slot_bytes)
        for name, array, expected in zip(
            ("slots", "overflow", "lengths"), arrays, (table.slots, table.overflow, table.lengths)
        ):
            np.testing.assert_array_equal(array.numpy(), expected, err_msg=f"{name}, slots of {slot_bytes}")
        assert arrays[3].tolist() == (table.bases.tolist() or [0] * len(arrays[3]))
        out, fault = core_decode(codebook, arrays, slot_bytes, len(data))
        assert fault == [0, 0, 0, 0] and out.tobytes() == data.tobytes()
    return table


@pytest.mark.parametrize("row_bytes, chunk_bytes, flag_all", MASKS)
def test_masks(row_bytes, chunk_bytes, flag_all):
    rng = np.random.default_rng([row_bytes, chunk_bytes, flag_all])
    codebooks = make_masks(rng, int(rng.integers(2, 6)), row_bytes, chunk_bytes, flag_all)
    check_rows(codebooks, make_rows(rng, codebooks, 40), cut=row_bytes // 5)


@pytest.mark.parametrize("arguments", ENTRIES, ids=str)
def test_entries(arguments):
    rng = np.random.default_rng([len(str(arguments)), arguments[3]])
    codebooks = make_entries(rng, int(rng.integers(2, 6)), *arguments)
    check_rows(codebooks, make_rows(rng, codebooks, 40), cut=codebooks[0].row_bytes // 5)


@pytest.mark.parametrize(
    "make, arguments",
    [
        (make_masks, (65536, 4)),
        (make_masks, (65535, 8)),
        (make_entries, (2, 32768, 1, 4, (1, 2), "dense")),
        # Fmt: skip
        (make_entries, (1, 65536, 0, 3, (1, 1), "listed")),
    ],
    ids=named,
)
def test_long_rows(make, arguments):
    rng = np.random.default_rng(len(arguments))
    codebooks = make(rng, 2, *arguments)
    check_rows(codebooks, make_rows(rng, codebooks, 4), cut=10_000)


@pytest.mark.parametrize(
    "make, arguments", [(make_masks, (24, 4)), (make_entries, (2, 16, 1, 2, (2, 1), "dense"))], ids=["ibp", "planes"]
)
@pytest.mark.slow
def test_256_clusters(make, arguments):
    rng = np.random.default_rng(256)
    codebooks = make(rng, 256, *arguments)
    table = check_rows(
        codebooks, np.concatenate([make_rows(rng, [codebook], 2) for codebook in codebooks[1::2]]), cut=0
    )
    numbers = {int(reference.stored_row(table, row)[0]) for row in coded_rows(table)}
    assert len(numbers) > 32 and max(numbers) > 240


@pytest.mark.parametrize(
    "make, arguments",
    [(make_masks, (50, 4)), (make_entries, (2, 20, 1, 2, (2, 1), "per_column"))],
    ids=["ibp", "planes"],
)
def test_of_equal_codebooks_the_first_is_taken(make, arguments):
    rng = np.random.default_rng(3)
    first, second = make(rng, 2, *arguments)
    codebooks = [first, second, first, second, second]
    table = check_rows(codebooks, make_rows(rng, codebooks, 60), cut=0)
    assert {int(reference.stored_row(table, row)[0]) for row in coded_rows(table)} == {0, 1}


def test_codebooks_of_different_numbers_of_flags():
    """The num_flags in codec is the first codebook's; those of the others come with their words."""
    rng = np.random.default_rng(5)
    codebooks = make_masks(rng, 4, 64, 2)
    assert len({int(codebook.flagged().sum()) for codebook in codebooks}) > 1
    check_rows(codebooks, make_rows(rng, codebooks, 40), cut=0)


# ---- FORMAT.md's example and the golden files ----------------------------------------------------------------------


def test_worked_example():
    mask, bitval = (
        torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8) for text in ("FFF0 0000 FF00", "0040 0000 3C00")
    )
    nothing = torch.zeros(6, dtype=torch.uint8)
    codebook = ibp.codecs.ClusteredCodebook(
        [ibp.codecs.Codebook.from_masks(nothing, nothing, 2), ibp.codecs.Codebook.from_masks(mask, bitval, 2)]
    )
    row = torch.tensor(list(bytes.fromhex("0045 EFBE 3C12")), dtype=torch.uint8)
    slots, overflow, lengths, _ = core_arrays(codebook, row, 0)
    assert (
        bytes(overflow.tolist()) == bytes.fromhex("01 D7 BB AF 04") and lengths.tolist() == [5] and slots.numel() == 0
    )
    assert encode_row(references_of(codebook), row.tolist()) == bytes.fromhex("01 D7 BB AF 04")
    out, fault = core_decode(codebook, [slots, overflow, lengths, torch.zeros(1, dtype=torch.int64)], 0, 6)
    assert fault[0] == 0 and out.tolist() == row.tolist()


def test_every_golden_case_has_a_file():
    files = list(HERE.glob("clusters_*.npz"))
    assert {path.stem for path in files} == {f"clusters_{name}" for name in CASES}
    assert sum(path.stat().st_size for path in files) < 60_000


@pytest.mark.parametrize("name", slow_but([name for name in CASES if "256" not in name], CASES))
def test_golden(name):
    """The reference and the core code the original bytes to the file's, and decode them."""
    codebooks, original, table, _ = load(name)
    again = make_clusters.encode_table(codebooks, original, table.slot_bytes)
    for array in ("lengths", "bases", "slots", "overflow"):
        np.testing.assert_array_equal(getattr(again, array), getattr(table, array), err_msg=array)
    assert make_clusters.decode_table(codebooks, table) == original.tobytes()
    codebook = library(codebooks)
    for array, expected in zip(
        core_arrays(codebook, torch.from_numpy(original), table.slot_bytes)[:3],
        (table.slots, table.overflow, table.lengths),
    ):
        np.testing.assert_array_equal(array.numpy(), expected)
    out, fault = core_decode(codebook, torch_arrays(table), table.slot_bytes, len(original))
    assert fault == [0, 0, 0, 0]
    np.testing.assert_array_equal(out, original)


@pytest.mark.parametrize("name", CASES)
def test_golden_corrupt_rows(name):
    codebooks, _, _, corrupt = load(name)
    codebook = library(codebooks)
    assert len(corrupt) > 10
    for coded in corrupt:
        assert refused(codebooks, coded)
        assert decode_one(codebook, coded) is None


def decode_one(codebook, coded, device=CPU):
    """The row that coded bytes stand for, or None if they are refused, and zeros written for them."""
    arrays = [
        torch.empty(0, dtype=torch.uint8),
        torch.tensor(list(coded), dtype=torch.uint8),
        torch.tensor([len(coded)], dtype=torch.uint16),
        torch.zeros(1, dtype=torch.int64),
    ]
    out, fault = core_decode(codebook, arrays, 0, codebook.row_bytes, device)
    assert fault[0] in (0, CORRUPT) and (fault[0] == 0 or not out.any())
    return None if fault[0] else out.tobytes()


# ---- bytes that are no coded row -----------------------------------------------------------------------------------

FEW = [
    (make_masks, (60, 4)),
    (make_masks, (45, 1, True)),
    (make_masks, (100, 8)),
    (make_entries, (4, 24, 1, 5, (2, 1), "dense")),
    # Fmt: skip
    (make_entries, (2, 30, 1, 2, (1, 2), "per_column")),
    (make_entries, (4, 40, 0, 9, (2, 2), "listed")),
]


def first_byte(table, row):
    """The array and the place where a row's number of a codebook is."""
    return ("slots", row * table.slot_bytes) if table.slot_bytes else ("overflow", table.overflow_start(row))


def renumbered(codebooks, data, seed=0):
    """Tables of which a row names another codebook: (row, table, the bytes that a decoder is to write, whether the row
    is corrupt)."""
    rng, row_bytes = np.random.default_rng(seed), codebooks[0].row_bytes
    for slot_bytes in slot_sizes(row_bytes):
        table = make_clusters.encode_table(codebooks, data, slot_bytes)
        for row in rng.choice(coded_rows(table), 5, replace=False):
            for number in (0, 1, len(codebooks) - 1, len(codebooks), len(codebooks) + 1, 127, 128, 255):
                edited = dataclasses.replace(table, slots=table.slots.copy(), overflow=table.overflow.copy())
                array, at = first_byte(table, row)
                getattr(edited, array)[at] = number
                expected, span = data.copy(), slice(row * row_bytes, row * row_bytes + table.valid(row))
                try:
                    expected[span] = np.frombuffer(make_clusters.decode_table_row(codebooks, edited, row), np.uint8)
                    yield row, edited, expected, False
                except make_clusters.CORRUPT_ROW:
                    expected[span] = 0
                    yield row, edited, expected, True


def check_renumbered(make, arguments, device):
    rng = np.random.default_rng(11)
    codebooks = make(rng, 4, *arguments)
    codebook, data = library(codebooks), make_rows(rng, codebooks, 60).reshape(-1)
    kinds = set()
    for row, table, expected, is_corrupt in renumbered(codebooks, data):
        out, fault = core_decode(codebook, torch_arrays(table), table.slot_bytes, len(data), device)
        np.testing.assert_array_equal(out, expected)
        assert fault[:3] == ([CORRUPT, row, row] if is_corrupt else [0, 0, 0])
        kinds.add(is_corrupt)
    assert kinds == {False, True}


@pytest.mark.parametrize("make, arguments", FEW, ids=named)
def test_numbers_of_other_codebooks(make, arguments):
    """Those that there are not give zeros and a fault, others what their codebook makes of the row."""
    check_renumbered(make, arguments, CPU)


def check_damaged(make, arguments, device):
    rng = np.random.default_rng(12)
    codebooks = make(rng, 3, *arguments)
    codebook = library(codebooks)
    for row in make_rows(rng, codebooks, 6):
        coded = encode_row(codebooks, row)
        for bad in make_clusters.wrong_rows(rng, codebooks, coded):
            if 0 < len(bad) <= codebook.row_bytes:
                assert decode_one(codebook, bad, device) == (
                    None if refused(codebooks, bad) else make_clusters.decode_row(codebooks, bad)
                ), bad.hex()


@pytest.mark.parametrize("make, arguments", FEW, ids=named)
def test_damaged_rows(make, arguments):
    check_damaged(make, arguments, CPU)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_corrupt_number_is_reported(scheme, layout):
    x, table = local_table(scheme, layout)
    row = damage_number(table)
    for call in (table.decompress, lambda: table[[row]], lambda: table[row : row + 1]):
        with pytest.raises(ibp.CorruptTableError, match=f"row {row} "):
            call()
    assert_same_bits(table[:row], x[:row])
    out = torch.full((3, 16), 7, dtype=x.dtype)
    with pytest.raises(ibp.CorruptTableError):
        ibp.index_select(table, torch.tensor([row - 1, row, row + 1]), out=out)
    assert (out[1] == 0).all()
    assert_same_bits(out[[0, 2]], x[[row - 1, row + 1]])


def damage_number(table):
    """Makes a coded row of a table name a codebook that there is not, and returns the row."""
    lengths = table.lengths.cpu().to(torch.int64)
    is_coded = (lengths > 0) & (lengths < table.row_bytes)
    row = int(is_coded[40:-1].nonzero()[0]) + 40
    plain = reference.Table(
        table.original_bytes,
        table.row_bytes,
        table.slot_bytes,
        None,
        table.lengths.cpu().numpy(),
        table.bases.cpu().numpy().view(np.uint64),
        None,
        None,
    )
    array, at = first_byte(plain, row)
    getattr(table, array)[at] = num_clusters(table)
    return row


# ---- tables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", slow_but(["slots of 32"], LAYOUTS))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tables(scheme, layout):
    """Every coded row of a learned table is what the reference makes of it; whatever is asked of the table is right."""
    x, table = local_table(scheme, layout)
    assert (
        table.scheme == scheme
        and isinstance(table.codebook, ibp.codecs.ClusteredCodebook)
        and 2 < len(table.codebook) <= 8
    )
    codebooks, data = references_of(table.codebook), bytes_of(x).numpy()
    expected = make_clusters.encode_table(codebooks, data, table.slot_bytes)
    for name in ("slots", "overflow", "lengths"):
        np.testing.assert_array_equal(getattr(table, name).numpy(), getattr(expected, name), err_msg=name)
    assert (
        table.stored_bytes
        == sum(expected.stored(row) for row in range(table.num_rows)) + table.codebook.nbytes
        == ibp.estimate(x, table.codebook, device="cpu").stored_bytes
    )
    assert table.codebook.nbytes == sum(codebook.nbytes for codebook in table.codebook.codebooks)
    assert_same_bits(table.decompress(), x)
    ids = torch.randint(len(x), (300,))
    assert_same_bits(ibp.index_select(table, ids), x[ids])
    assert_same_bits(table[100:333], x[100:333])
    assert_same_bits(table[-1], x[-1])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_codebook_for_other_tensors(scheme):
    """A clustered codebook can be given; items need not be rows, and the last row may be short."""
    _, table = local_table(scheme)
    x = LOCAL[scheme](500, 16).reshape(-1)[:-5].reshape(-1, 5)
    for layout in LAYOUTS:
        other = ibp.compress(x, codebook=table.codebook, **layout_arguments(layout, 64), **ON_CPU)
        assert other.scheme == scheme and other.codebook is table.codebook and other.row_bytes == 64
        assert_same_bits(other.decompress(), x)
        ids = torch.randint(len(x), (200,))
        assert_same_bits(ibp.index_select(other, ids), x[ids])
    noise = random_bits(300, 64)
    assert ibp.compress(noise, codebook=table.codebook, **ON_CPU).scheme == "raw"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_place(scheme):
    x, table = local_table(scheme, "in place")
    memory = x.clone()
    in_place = ibp.compress(memory, scheme=scheme, clusters=8, **ON_CPU, inplace=True)
    assert (
        in_place.slots.data_ptr() == memory.data_ptr()
        and in_place.stored_bytes == table.stored_bytes
        and in_place.codebook == table.codebook
    )
    assert_same_bits(in_place.decompress(), x)
    assert_same_bits(in_place[[5, 0, -1]], x[[5, 0, -1]])
    assert_same_bits(ibp.compress(x.clone(), codebook=table.codebook, **ON_CPU, inplace=True).decompress(), x)


@pytest.mark.parametrize("scheme", [*SCHEMES, "auto"])
@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (1, 7), (2, 3), (3, 100), (4096,)], ids=str)
def test_shapes(shape, scheme):
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    for clusters in (1, 2, 256) if shape == (4096,) else (1, 2, 256, "auto"):
        assert_same_bits(ibp.compress(x, scheme=scheme, clusters=clusters, **ON_CPU).decompress(), x)


# ---- learning ------------------------------------------------------------------------------------------------------


def stored(x, clusters, scheme, **arguments):
    table = ibp.compress(x, clusters=clusters, scheme=scheme, layout="packed", **ON_CPU, **arguments)
    assert_same_bits(table.decompress(), x)
    return table.stored_bytes


@pytest.mark.parametrize("scheme", SCHEMES)
def test_local_structure_is_found(scheme):
    x = LOCAL[scheme](1500, 32)
    sizes = [stored(x, clusters, scheme) for clusters in (None, 1, 2, 8, "auto")]
    assert sizes[0] == sizes[1] > 1.01 * sizes[2] > 1.01 * sizes[3]
    assert sizes[4] <= sizes[2]
    assert 1 - sizes[3] / x.nbytes > {"ibp": 0.6, "planes": 0.08}[scheme]


def test_auto_takes_a_scheme_and_clusters():
    x = prototypes(2000, 16)
    table, plain = (ibp.compress(x, clusters=clusters, layout="packed", **ON_CPU) for clusters in ("auto", None))
    assert table.scheme == "ibp" and num_clusters(table) >= 8 and table.stored_bytes < 0.95 * plain.stored_bytes
    assert_same_bits(table.decompress(), x)


def never_worse(rng):
    yield "normal", torch.from_numpy(rng.normal(0, 0.02, (300, 24)).astype(np.float32))
    yield "normal, bfloat16", torch.from_numpy(rng.normal(0, 0.02, (300, 40)).astype(np.float32)).to(torch.bfloat16)
    yield "normal integers", torch.from_numpy(rng.normal(0, 1e6, (300, 16)).astype(np.int32))
    yield "uniform integers", torch.from_numpy(rng.integers(0, 2**22, (300, 16)).astype(np.int32))
    yield "sparse", torch.from_numpy((rng.random((300, 50)) < rng.choice([0.01, 0.5], (300, 1))).astype(np.float32))
    yield "prototypes", prototypes(300, 16)
    yield "scales", scales(300, 16)
    yield "few rows", prototypes(9, 30)


NEVER_WORSE = dict(never_worse(np.random.default_rng(0)))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NEVER_WORSE)
def test_never_worse_than_one_codebook(name, scheme):
    x = NEVER_WORSE[name]
    one = stored(x, None, scheme)
    assert one == stored(x, 1, scheme)
    for clusters in (3, 20, "auto"):
        assert stored(x, clusters, scheme) <= one, clusters


def test_never_worse_where_the_sample_is_a_part():
    x = embedding(20_000, 16)
    assert stored(x, 64, "ibp", sample=0.02) <= stored(x, None, "ibp", sample=0.02)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "x",
    [
        torch.from_numpy(np.random.default_rng(1).integers(0, high, (1500, 16)).astype(np.int32))
        for high in (2**31, 2**20, 1000)
    ],
    ids=["of 31 bits", "of 20 bits", "to 1000"],
)
def test_auto_leaves_uniform_data_alone(x, scheme):
    table, plain = (ibp.compress(x, scheme=scheme, clusters=clusters, **ON_CPU) for clusters in ("auto", None))
    assert num_clusters(table) == 1 and table.codebook == plain.codebook


@pytest.mark.parametrize("clusters", [5, "auto"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_learning_is_deterministic(scheme, clusters):
    x = LOCAL[scheme](800, 24)
    tables = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        tables.append(ibp.compress(x, scheme=scheme, clusters=clusters, **ON_CPU))
    assert num_clusters(tables[0]) > 1
    assert_same_table(*tables)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_expected_savings_are_those_of_the_table(scheme):
    """The sample is the whole table here."""
    _, table = local_table(scheme, "packed")
    assert table.codebook.expected_savings == pytest.approx(table.savings, abs=1e-9)


def test_learned_codebooks_keep_the_form_of_one():
    for arguments in ({"chunk_bytes": 2}, {"tau": 0.8}, {"chunk_bytes": 8, "tau": 0.9}):
        table = ibp.compress(prototypes(1000, 16), clusters=8, **arguments, **ON_CPU)
        assert table.scheme == "ibp" and num_clusters(table) > 1
        assert {codebook.chunk_bytes for codebook in table.codebook.codebooks} == {
            arguments.get("chunk_bytes", table.codebook.codebooks[0].chunk_bytes)
        }
        assert "tau" not in arguments or {codebook.tau for codebook in table.codebook.codebooks} == {arguments["tau"]}


def test_kinds_that_take_turns_before_a_short_last_row():
    rng = np.random.default_rng(0)
    near = rng.integers(0, 2**32, (2, 16), np.uint32)[np.arange(2000) % 2] ^ rng.integers(0, 256, (2000, 16), np.uint32)
    x = torch.from_numpy(near.view(np.int32).reshape(-1)[:-3])
    assert stored(x, 2, "ibp", row_bytes=64) < 0.6 * stored(x, None, "ibp", row_bytes=64)


def test_only_a_threshold_that_was_asked_for_is_kept():
    x = scales(3000, 16)
    assert ibp.codecs.analyze(x, sample=1.0, device="cpu").tau is not None
    table = ibp.compress(x, scheme="ibp", clusters=4, layout="packed", **ON_CPU)
    assert len({codebook.tau for codebook in table.codebook.codebooks}) > 1 and table.savings > 0.05


@pytest.mark.parametrize("call", [ibp.compress, compress_in_place])
def test_clusters_that_cannot_be(call):
    x = prototypes(100, 16)
    with pytest.raises(ValueError, match="clusters is 2, but a codebook is given"):
        call(x.clone(), codebook=ibp.codecs.analyze(x, device="cpu"), clusters=2, **ON_CPU)
    with pytest.raises(ValueError, match="clusters is 'auto', but rows of scheme 'raw'"):
        call(x.clone(), scheme="raw", clusters="auto", **ON_CPU)


def test_as_many_clusters_as_asked_for_at_the_most():
    x = prototypes(1000, 16, kinds=40)
    for clusters in (2, 3, 17):
        assert 1 < num_clusters(ibp.compress(x, scheme="ibp", clusters=clusters, **ON_CPU)) <= clusters


@pytest.mark.slow
def test_256_learned_clusters():
    x = prototypes(3000, 8, kinds=300)
    table = ibp.compress(x, scheme="ibp", clusters=256, **ON_CPU)
    assert 100 < num_clusters(table) <= 256 and table.savings > 0.1
    assert_same_bits(table.decompress(), x)


def test_codebooks_of_many_clusters_take_little_work(monkeypatch):
    """One codebook for each cluster and round is made, whatever is tried, and rows are measured once with each."""
    made, measured = [], []
    from_masks, measure = ibp.codecs.Codebook.from_masks, learned_clusters.measure
    monkeypatch.setattr(
        ibp.codecs.Codebook, "from_masks", lambda *args, **kwargs: made.append(1) or from_masks(*args, **kwargs)
    )
    monkeypatch.setattr(learned_clusters, "measure", lambda *args: measured.append(1) or measure(*args))
    x = prototypes(800, 16, kinds=64)
    count = num_clusters(ibp.compress(x, scheme="ibp", clusters=64, **ON_CPU))
    rounds = 1 + learned_clusters._COST_ROUNDS
    assert 32 < count <= 64
    assert len(made) <= 64 * rounds + 8  # and one of each size of chunk for the table
    assert len(measured) <= 64 * learned_clusters._COST_ROUNDS + 8


def test_rows_that_stay_end_the_rounds(monkeypatch):
    """Rows that fall apart at once: k-means ends when its centres stay, and codebooks are learned once."""
    distances, learned = [], []
    plain, relearned = learned_clusters._distances, learned_clusters._relearned
    monkeypatch.setattr(learned_clusters, "_distances", lambda *args: distances.append(1) or plain(*args))
    monkeypatch.setattr(learned_clusters, "_relearned", lambda *args: learned.append(1) or relearned(*args))
    x = (
        torch.tensor([0x11111111, 0x2468ACE0, -1, 0x0F0F0F0F])
        .to(torch.int32)[torch.arange(400) % 4, None]
        .expand(-1, 32)
    )
    assert num_clusters(ibp.compress(x, scheme="ibp", clusters=8, **ON_CPU)) == 4
    assert len(distances) == 4 + 1  # four seeds, and a round that finds the centres where they were
    assert 1 <= len(learned) <= 2


def test_fewer_rows_than_clusters():
    for num_rows in (2, 3, 10):
        x = prototypes(num_rows, 300, kinds=2)
        assert_same_bits(ibp.compress(x, scheme="ibp", clusters=256, **ON_CPU).decompress(), x)


@pytest.mark.slow
def test_more_sampled_rows_than_2_to_the_24():
    x = torch.randint(0, 3, ((1 << 24) + 1, 1)).to(torch.uint8)
    assert_same_bits(ibp.compress(x, scheme="ibp", clusters=2, sample=1.0, **ON_CPU).decompress(), x)


# ---- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clusters", [0, -1, 257, 10**9, "all", "2", ""], ids=repr)
def test_clusters_out_of_range(clusters):
    x = torch.zeros(5, 4)
    for call in (ibp.compress, compress_in_place):
        with pytest.raises(ValueError, match="clusters is .*wanted 1 to 256"):
            call(x, clusters=clusters, **ON_CPU)
    assert (x == 0).all()


@pytest.mark.parametrize("clusters", [True, False, 2.0, [2], (2,), float("nan")], ids=repr)
def test_clusters_that_are_no_number(clusters):
    x = torch.zeros(5, 4)
    for call in (ibp.compress, compress_in_place):
        with pytest.raises(TypeError, match="clusters is .*wanted an int"):
            call(x, clusters=clusters, **ON_CPU)
    assert (x == 0).all()


def masks(row_bytes=8, chunk_bytes=4, flag_all=False, seed=0):
    mask, bitval = random_bits(2, row_bytes, seed)
    return ibp.codecs.Codebook.from_masks(mask, bitval & mask, chunk_bytes, flag_all)


def entries(*values, **changes):
    fields = {
        "row_bytes": 8,
        "element_bytes": 2,
        "rotate": 1,
        "residual_bits": 8,
        "digit_bits": (1, 1),
        "per_column": False,
        "listed": False,
        "default": 0,
        "closed": 0,
        "entries": torch.tensor([values or (126, 127)]),
    }
    return ibp.codecs.PlanesCodebook(**{**fields, **changes})


def test_codebooks_that_fit():
    for codebooks in (
        [masks(seed=seed) for seed in range(3)],
        [masks(flag_all=True)] * 2,
        [entries(1, 2), entries(3, 4)],
        (masks(seed=seed) for seed in range(256)),
        # Fmt: skip
        [entries(listed=True, default=7, entries=torch.tensor([[k, k]])) for k in range(5)],
        [entries(1, 2)] * 256,
    ):
        codebook = ibp.codecs.ClusteredCodebook(codebooks)
        assert (
            codebook.row_bytes == 8
            and codebook.scheme == codebook.codebooks[0].scheme
            and codebook.codec == codebook.codebooks[0].codec
        )
        assert codebook.nbytes == sum(one.nbytes for one in codebook.codebooks) and len(codebook) == len(
            codebook.codebooks
        )


@pytest.mark.parametrize(
    "codebooks",
    [
        [],
        [masks()],
        [entries()],
        [masks(), masks(row_bytes=12)],
        [masks(), masks(chunk_bytes=2)],
        [masks(), masks(flag_all=True)],
        [masks(), entries()],
        [entries(), masks()],
        [entries(), entries(row_bytes=10)],
        [entries(), entries(rotate=0)],
        [entries(), entries(residual_bits=9)],
        [entries(), entries(digit_bits=(1,), entries=torch.tensor([[1]]))],
        [entries(1, 2, 3, digit_bits=(2,)), entries(1, 2, 3, digit_bits=(1, 1, 1))],
        [entries(), entries(per_column=True, entries=torch.ones(4, 2, dtype=torch.int64))],
        [entries(), entries(listed=True)],
        [entries(listed=True), entries(listed=True, default=1)],
        [entries(listed=True), entries(listed=True, closed=1)],
        [entries(digit_bits=(), entries=torch.empty(1, 0, dtype=torch.int64))] * 2,
        [masks()] * 257,
        [masks(), None],
        [None, masks()],
        ["ab", "cd"],
        [1, 2],
        [torch.zeros(3), torch.zeros(3)],
        [ibp.codecs.ClusteredCodebook([masks(), masks(seed=1)])] * 2,
        "ab",
        {0: 1, 1: 2},
    ],
    ids=lambda codebooks: f"{len(codebooks)}-{type(codebooks).__name__}",
)
def test_codebooks_that_do_not_fit(codebooks):
    with pytest.raises(ValueError, match="codebooks|do not fit"):
        ibp.codecs.ClusteredCodebook(codebooks)


def test_equality():
    a, b = masks(seed=1), masks(seed=2)
    assert ibp.codecs.ClusteredCodebook([a, b]) == ibp.codecs.ClusteredCodebook((masks(seed=1), b)) and hash(
        ibp.codecs.ClusteredCodebook([a, b])
    ) == hash(ibp.codecs.ClusteredCodebook([a, b]))
    assert ibp.codecs.ClusteredCodebook([a, b]) != ibp.codecs.ClusteredCodebook(
        [b, a]
    ) and ibp.codecs.ClusteredCodebook([a, b]) != ibp.codecs.ClusteredCodebook([a, b, b])
    assert ibp.codecs.ClusteredCodebook([a, b]) != a and ibp.codecs.ClusteredCodebook(
        [a, b]
    ) != ibp.codecs.ClusteredCodebook([entries(), entries()])


def test_repr():
    codebook = ibp.codecs.ClusteredCodebook([masks(seed=1), masks(seed=2), masks(seed=3)])
    assert repr(codebook).startswith(
        "ibp.codecs.ClusteredCodebook(3 of ibp.codecs.Codebook(row_bytes=8"
    ) and f"nbytes={codebook.nbytes})" in repr(codebook)
    assert "expected_savings=12.3%" in repr(ibp.codecs.ClusteredCodebook([entries(), entries()], 0.1234))
    _, table = local_table("planes")
    assert "expected_savings=" in repr(table.codebook) and "scheme='planes'" in repr(table)


# ---- pickling ------------------------------------------------------------------------------------------------------


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def through_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


WAYS = {"pickle": through_pickle, "torch, weights only": through_torch, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["slots of 32", "packed"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_through_files(scheme, layout, way):
    x, table = local_table(scheme, layout)
    loaded = WAYS[way](table)
    assert_same_table(loaded, table)
    assert loaded.codebook.expected_savings == table.codebook.expected_savings and hash(loaded.codebook) == hash(
        table.codebook
    )
    assert_same_bits(loaded.decompress(), x)
    codebook = WAYS[way](table.codebook)
    assert codebook == table.codebook and codebook.nbytes == table.codebook.nbytes
    assert_same_bits(codebook.words(CPU), table.codebook.words(CPU))


def load_state(kind, state):
    value = kind.__new__(kind)
    value.__setstate__(state)
    return value


def hostile_states():
    """States that nobody would write, as parameters of a test."""
    good = {"codebooks": (masks(seed=1), masks(seed=2)), "expected_savings": None}
    unfinished = ibp.codecs.Codebook.__new__(ibp.codecs.Codebook)
    for name, codebooks in {
        "none": (),
        "one": good["codebooks"][:1],
        "too many": good["codebooks"] * 129,
        "of two schemes": (masks(), entries()),
        "of other rows": (masks(), masks(row_bytes=12)),
        "nested": (ibp.codecs.ClusteredCodebook(good["codebooks"]),) * 2,
        "text": "ab",
        "a tensor": torch.zeros(2),
        "tensors": (torch.zeros(2), torch.zeros(2)),
        "numbers": [1, 2],
        "None": None,
        "a number": 5,
        "unfinished": (unfinished, unfinished),
    }.items():
        yield pytest.param({**good, "codebooks": codebooks}, id=name)
    yield pytest.param({"expected_savings": None}, id="no codebooks")
    yield pytest.param({**good, "colour": "red"}, id="one field more")
    yield pytest.param(None, id="no state")
    yield pytest.param({**good, "expected_savings": "much"}, id="savings of text")
    yield pytest.param({**good, "expected_savings": torch.zeros(3)}, id="savings of a tensor")


@pytest.mark.parametrize("state", list(hostile_states()))
def test_hostile_states(state):
    with pytest.raises(ValueError):
        load_state(ibp.codecs.ClusteredCodebook, state)


def test_tables_with_another_codebook():
    _, table = local_table("ibp")
    state, (_, other) = table.__getstate__(), local_table("planes")
    wide = ibp.codecs.ClusteredCodebook([masks(row_bytes=65), masks(row_bytes=65, seed=1)])
    for codebook in (other.codebook, wide, None):
        with pytest.raises(ValueError, match="codebook"):
            load_state(ibp.CompressedTensor, {**state, "codebook": codebook})
    fewer = ibp.codecs.ClusteredCodebook(table.codebook.codebooks[:2])
    with pytest.raises(ibp.CorruptTableError):
        load_state(ibp.CompressedTensor, {**state, "codebook": fewer}).decompress()


# ---- operations ----------------------------------------------------------------------------------------------------


@functools.cache
@functools.cache
def op_samples():
    """(operation, arguments) with codebooks of several clusters."""
    samples = []
    for scheme in SCHEMES:
        for layout in ("slots of 32", "packed"):
            x, table = local_table(scheme, layout, num_rows=400)
            arguments = values_of(table, CPU)
            slots, overflow, *rest = arguments
            fault = torch.zeros(4, dtype=torch.int64)
            samples.append(("measure_rows", (bytes_of(x), table.codebook.words(CPU), table.codebook.codec)))
            samples.append(
                ("encode_rows", (torch.zeros_like(slots), torch.zeros_like(overflow), *rest, bytes_of(x), fault))
            )
            samples.append(
                (
                    "gather_items",
                    (*arguments, torch.tensor([5, 99, 5, 0]), 0, torch.zeros(4 * 64, dtype=torch.uint8), fault),
                )
            )
            samples.append(("decode_bytes", (*arguments, 1000, 7777, 0, torch.zeros(6777, dtype=torch.uint8), fault)))
    return samples


@pytest.mark.parametrize(
    "number", [*range(4), *(pytest.param(number, marks=pytest.mark.slow) for number in range(4, 12)), *range(12, 16)]
)
def test_opcheck(number):
    name, arguments = op_samples()[number]
    torch.library.opcheck(getattr(torch.ops.ibp, name).default, with_handle(name, arguments))


@pytest.mark.parametrize("number", range(16))
def test_fake_tensors_have_the_real_shapes(number):
    name, arguments = op_samples()[number]
    given = with_handle(name, arguments)
    real = getattr(torch.ops.ibp, name)(*given)
    with FakeTensorMode() as mode:
        fake = getattr(torch.ops.ibp, name)(*tree_map_only(torch.Tensor, mode.from_tensor, given))
    assert (real is None) == (fake is None)
    if real is not None:
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_words_of_a_wrong_size(scheme):
    x, table = local_table(scheme)
    words, codec, data = table.codebook.words(CPU), table.codebook.codec, bytes_of(x)
    one = words.numel() // len(table.codebook)
    for wrong in (words[:0], words[:-1], words[: one - 5], words[: one + 1], words.repeat(100)[: 257 * one]):
        with pytest.raises(RuntimeError, match="codebook has|needed"):
            OPS.measure_rows(data, wrong, codec)
    OPS.measure_rows(data, words.repeat(100)[: 256 * one], codec)


# ---- the GPU against the CPU ---------------------------------------------------------------------------------------


def check_on_gpu(cuda, codebooks, rows, cut):
    codebook, data = library(codebooks), torch.from_numpy(rows.reshape(-1)[: rows.size - cut])
    for slot_bytes in slot_sizes(codebook.row_bytes):
        on_cpu, on_gpu = (core_arrays(codebook, data, slot_bytes, device) for device in (CPU, cuda))
        for a, b in zip(on_gpu, on_cpu):
            assert_same_bits(a, b)
        out, fault = core_decode(codebook, on_gpu, slot_bytes, data.numel(), cuda)
        assert fault == [0, 0, 0, 0] and out.tobytes() == data.numpy().tobytes()


@pytest.mark.parametrize(
    "row_bytes, chunk_bytes, flag_all",
    [*MASKS, (1024, 4, False), (4096, 1, False), (16384, 8, False), (65535, 2, False), (65536, 4, True)],
)
def test_masks_on_gpu(cuda, row_bytes, chunk_bytes, flag_all):
    rng = np.random.default_rng([row_bytes, chunk_bytes, flag_all])
    codebooks = make_masks(rng, int(rng.integers(2, 6)), row_bytes, chunk_bytes, flag_all)
    check_on_gpu(cuda, codebooks, make_rows(rng, codebooks, 70), cut=row_bytes // 5)


@pytest.mark.parametrize(
    "arguments",
    [
        *ENTRIES,
        (4, 256, 1, 8, (2, 2), "dense"),
        (2, 512, 1, 2, (1, 1, 2), "per_column"),
        (1, 4096, 0, 3, (1, 1), "listed"),
        # Fmt: skip
        (2, 32768, 1, 4, (1, 2), "dense"),
        (4, 16384, 0, 9, (2, 2), "listed"),
        (8, 512, 0, 9, (4,), "dense"),
    ],
    ids=str,
)
def test_entries_on_gpu(cuda, arguments):
    rng = np.random.default_rng([len(str(arguments)), arguments[3]])
    codebooks = make_entries(rng, int(rng.integers(2, 6)), *arguments)
    check_on_gpu(cuda, codebooks, make_rows(rng, codebooks, 70), cut=codebooks[0].row_bytes // 5)


@pytest.mark.parametrize(
    "make, arguments",
    [
        (make_masks, (24, 4)),
        (make_entries, (2, 16, 1, 2, (2, 1), "dense")),
        (make_entries, (4, 40, 0, 9, (2, 2), "listed")),
    ],
    ids=named,
)
def test_256_clusters_on_gpu(cuda, make, arguments):
    rng = np.random.default_rng(256)
    codebooks = make(rng, 256, *arguments)
    check_on_gpu(cuda, codebooks, np.concatenate([make_rows(rng, [codebook], 2) for codebook in codebooks]), cut=3)


@pytest.mark.parametrize("name", CASES)
def test_golden_on_gpu(cuda, name):
    codebooks, original, table, corrupt = load(name)
    codebook = library(codebooks)
    out, fault = core_decode(codebook, torch_arrays(table), table.slot_bytes, len(original), cuda)
    assert fault == [0, 0, 0, 0]
    np.testing.assert_array_equal(out, original)
    assert [decode_one(codebook, coded, cuda) for coded in corrupt] == [None] * len(corrupt)


@pytest.mark.parametrize("make, arguments", FEW, ids=named)
def test_wrong_rows_on_gpu(cuda, make, arguments):
    check_renumbered(make, arguments, cuda)
    check_damaged(make, arguments, cuda)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tables_on_gpu(cuda, scheme, layout, place):
    """Coded to the same bytes, fetched from pinned memory and from the device's, and an unknown number reported."""
    x, on_cpu = local_table(scheme, layout)
    slots = {"layout": "packed"} if layout == "packed" else {"slot_bytes": on_cpu.slot_bytes}
    table = ibp.compress(x.to(cuda) if place == "device" else x, codebook=on_cpu.codebook, device=cuda, **slots)
    assert table.is_pinned() == (place == "pinned") and table.device.type == ("cuda" if place == "device" else "cpu")
    for name in TENSORS:
        assert_same_bits(getattr(table, name).cpu(), getattr(on_cpu, name))
    ids = torch.randint(len(x), (500,))
    assert_same_bits(ibp.index_select(table, ids.to(cuda), check=True).cpu(), x[ids])
    assert_same_bits(table.decompress(device=cuda, check=True).cpu(), x)
    assert_same_bits(table[99:301].cpu(), x[99:301])
    row = damage_number(table)
    out = torch.full((3, 16), 7, dtype=x.dtype, device=cuda)
    with pytest.raises(ibp.CorruptTableError, match=f"row {row} "):
        ibp.index_select(table, torch.tensor([row - 1, row, row + 1], device=cuda), out=out, check=True)
    assert (out[1] == 0).all()
    assert_same_bits(out[[0, 2]].cpu(), x[[row - 1, row + 1]])
    with pytest.raises(ibp.CorruptTableError, match=f"row {row} "):
        table.decompress(device=cuda, check=True)


@pytest.mark.parametrize("clusters", [4, "auto"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_learning_on_gpu(cuda, scheme, clusters):
    x = LOCAL[scheme](3000, 32)
    tables = [
        ibp.compress(where, scheme=scheme, clusters=clusters, device=cuda, layout="packed")
        for where in (x, x, x.to(cuda))
    ]
    assert num_clusters(tables[0]) > 1 and tables[0].stored_bytes < stored(x, None, scheme)
    for table in tables:
        assert_same_table(table, tables[0])
        assert_same_bits(table.decompress(device=cuda, check=True).cpu(), x)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_place_on_gpu(cuda, scheme):
    x = LOCAL[scheme](700, 16)
    for memory in (x.clone(), x.to(cuda, copy=True)):
        table = ibp.compress(memory, scheme=scheme, clusters=8, device=cuda, inplace=True)
        assert num_clusters(table) > 1 and table.slots.data_ptr() == memory.data_ptr()
        assert_same_bits(table.decompress(device=cuda, check=True).cpu(), x)
