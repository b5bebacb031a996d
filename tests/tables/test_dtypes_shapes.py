"""Every dtype, every shape and every bit pattern comes back as it was, on the CPU."""

import re

import numpy as np
import pytest
import torch

import ibp
from helpers import DTYPES, SCHEMES, assert_same_bits, bytes_of, make_tensor, pairwise, take, tensor_from

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
LAYOUTS = ["slots", "packed"]
LAYOUT_SCHEMES = [("slots", "ibp"), ("slots", "planes"), ("packed", "ibp"), ("packed", "planes"), ("slots", "auto")]
KINDS = ["sparse", "narrow", "random", "equal"]


def check(x, **arguments):
    """Compresses, decompresses, and takes items out of x. Returns the table."""
    table = ibp.compress(x, device="cpu", memory="host", **arguments)
    assert table.shape == x.shape and table.dtype == x.dtype and table.scheme in ("ibp", "planes", "raw")
    assert arguments.get("scheme", "auto") in ("auto", table.scheme) or table.scheme == "raw"
    assert 0 <= table.stored_bytes <= x.numel() * x.element_size()
    assert_same_bits(table.decompress(), x)
    if x.dim():
        n = len(x)
        ids = torch.tensor([n - 1, 0, n // 2, 0] if n else [], dtype=torch.int64)
        assert_same_bits(table.index_select(ids), take(x, ids))
        assert_same_bits(table.index_select(ids.to(torch.int32)), take(x, ids))
        assert_same_bits(table[n // 3 :], take(x, torch.arange(n // 3, n)))
    return table


def layout_arguments(layout, x):
    row_bytes = x.shape[1:].numel() * x.element_size()
    return {
        "slots": {},
        "packed": {"layout": "packed"},
        "in place": {"slot_bytes": row_bytes},
        "slots of 32": {"slot_bytes": 32},
    }[layout]


ALL_LAYOUTS = [("slots", "ibp"), ("packed", "ibp"), ("in place", "ibp"), ("slots of 32", "ibp"), ("slots", "auto"),
    ("packed", "planes"),
               ("slots of 32", "planes")]  # fmt: skip


@pytest.mark.parametrize("dtype, kind, layout_scheme", pairwise(DTYPES, KINDS, ALL_LAYOUTS), ids=str)
def test_dtypes(dtype, kind, layout_scheme):
    layout, scheme = layout_scheme
    x = make_tensor((70, 50), dtype, kind)
    table = check(x, scheme=scheme, **layout_arguments(layout, x))
    if kind in ("sparse", "equal"):
        assert table.scheme in ("ibp", "planes") and table.savings > 0.4
    if kind == "random" and dtype != torch.bool:
        assert table.scheme == "raw" and table.savings == 0


def test_every_dtype_of_torch_is_tried():
    """A new dtype of torch must be added to the list, unless its elements share bytes or are quantized."""
    left_out = re.compile(r"torch\.(q.*|bits.*|u?int[1-7]|float4.*)")
    fitting = {
        dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.itemsize in (1, 2, 4, 8)
    }
    assert {str(dtype) for dtype in fitting if not left_out.fullmatch(str(dtype))} == {str(dtype) for dtype in DTYPES}


FOUR_SIZES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64]


@pytest.mark.parametrize(
    "dtype, num_rows, layout_scheme", pairwise(FOUR_SIZES, [0, 1, 2, 31, 32, 33, 64, 65], LAYOUT_SCHEMES), ids=str
)
def test_row_counts(dtype, num_rows, layout_scheme):
    layout, scheme = layout_scheme
    x = make_tensor((num_rows, 40), dtype, "sparse")
    table = check(x, scheme=scheme, layout=layout)
    assert table.num_rows == num_rows and len(table) == num_rows


SHAPES = [(), (1,), (5000,), (0,), (0, 7), (7, 0), (3, 0, 5), (1, 1), (4, 1), (6, 5, 4), (6, 5, 4, 3), (2, 3, 2, 3, 2)]
FOUR_DTYPES = [torch.uint8, torch.float16, torch.float32, torch.complex64]


@pytest.mark.parametrize("dtype, shape, layout_scheme", pairwise(FOUR_DTYPES, SHAPES, LAYOUT_SCHEMES), ids=str)
def test_shapes(dtype, shape, layout_scheme):
    layout, scheme = layout_scheme
    x = make_tensor(shape, dtype, "sparse")
    table = check(x, scheme=scheme, layout=layout)
    if x.numel() == 0:
        assert table.scheme == "raw" and table.stored_bytes == table.nbytes == table.savings == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zero_dimensions(scheme):
    x = torch.tensor(3.25)
    table = ibp.compress(x, scheme=scheme)
    assert_same_bits(table.decompress(), x)
    with pytest.raises(TypeError):
        len(table)


ROW_BYTES = [
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    129,
    255,
    600,
    2408,
    4095,
    4097,
    14812,
    16384,
    65535,
    65536,
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row_bytes, layout_scheme, kind",
    pairwise(ROW_BYTES, [("slots", "ibp"), ("packed", "planes")], ["sparse", "random"]),
    ids=str,
)
def test_row_sizes(row_bytes, layout_scheme, kind):
    layout, scheme = layout_scheme
    x = make_tensor((35, row_bytes), torch.uint8, kind, seed=row_bytes)
    table = check(x, scheme=scheme, layout=layout)
    assert table.row_bytes == row_bytes and table.num_rows == 35


@pytest.mark.parametrize("chunk_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("row_bytes", [1, 2, 3, 5, 7, 9, 12, 21, 100, 1003])
def test_tails_shorter_than_a_chunk(row_bytes, chunk_bytes):
    """The savings are in the tail as elsewhere: rows of ones are all participation bits."""
    x = torch.ones(300, row_bytes, dtype=torch.uint8)
    table = check(x, scheme="ibp", chunk_bytes=chunk_bytes)
    num_chunks = -(-row_bytes // chunk_bytes)
    coded = -(-num_chunks // 8)
    if coded < row_bytes:
        assert table.lengths.tolist() == [coded] * 300


@pytest.mark.parametrize("row_bytes", [1, 2, 3, 5, 6, 7, 9, 12, 14, 21, 36, 100, 1003])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64], ids=str)
def test_rows_that_cut_elements(dtype, row_bytes):
    """Scheme planes takes smaller elements where a row does not hold whole ones."""
    x = make_tensor((4000,), dtype, "sparse")
    table = check(x, scheme="planes", row_bytes=row_bytes)
    if row_bytes > 1:
        assert table.scheme == "planes" and row_bytes % table.codebook.element_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout, scheme", [("slots", "ibp"), ("packed", "planes")])
@pytest.mark.parametrize("item_bytes", [65537, 65536 + 4096, 100_001, 1 << 18])
def test_items_longer_than_a_row(item_bytes, layout, scheme):
    """Such items start in the middle of rows, and the last row is short."""
    for kind in ("sparse", "random"):
        x = make_tensor((5, item_bytes), torch.uint8, kind, seed=item_bytes)
        table = check(x, scheme=scheme, layout=layout)
        assert table.row_bytes == 4096 and table.num_rows == -(-5 * item_bytes // 4096)


@pytest.mark.parametrize(
    "shape, row_bytes, layout_scheme",
    pairwise([(997,), (50, 20), (7, 11, 13)], [1, 10, 33, 64, 1000, 65536], LAYOUT_SCHEMES),
    ids=str,
)
def test_rows_that_are_not_items(shape, row_bytes, layout_scheme):
    layout, scheme = layout_scheme
    x = make_tensor(shape, torch.int16, "sparse")
    table = check(x, scheme=scheme, row_bytes=row_bytes, layout=layout)
    assert table.num_rows == -(-2 * x.numel() // row_bytes)


NON_CONTIGUOUS = {
    "transposed": lambda x: x.t(),
    "every other row": lambda x: x[::2],
    "every third column": lambda x: x[:, 1::3],
    "expanded": lambda x: x[:1].expand(40, 64),
    "permuted": lambda x: x.reshape(4, 16, 64).permute(2, 0, 1),
    "part of a storage": lambda x: x[5:20],
    "odd offset": lambda x: x.reshape(-1)[3 : 3 + 63 * 64].view(63, 64),
    "flipped": lambda x: x.flip(0),
}


@pytest.mark.parametrize(
    "dtype, name, scheme", pairwise([*FOUR_DTYPES, torch.float64], list(NON_CONTIGUOUS), SCHEMES), ids=str
)
def test_non_contiguous(dtype, name, scheme):
    x = NON_CONTIGUOUS[name](make_tensor((64, 64), dtype, "sparse"))
    check(x, scheme=scheme)


AT_MOST_ONE_ELEMENT = {
    "one element of every other": lambda x: x[::2][:1],
    "none of every other": lambda x: x[::2][:0],
    "a part of a matrix": lambda x: x.view(8, 8)[3:4, 5:6],
    "any strides": lambda x: x.as_strided((1, 1), (3, 5)),
    "a scalar": lambda x: x[::2][1],
    "no columns": lambda x: x.new_zeros(5, 0).t(),
    "a size of 1 among others": lambda x: x.view(8, 8)[:, ::2][:1, :1].reshape(1),
    "expanded": lambda x: x[:1].expand(1),
}


@pytest.mark.parametrize("name", AT_MOST_ONE_ELEMENT)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64], ids=str)
def test_strides_of_at_most_one_element(dtype, name):
    """Torch calls such a tensor contiguous, whatever its strides are."""
    x = AT_MOST_ONE_ELEMENT[name](torch.arange(64).to(dtype))
    check(x)
    ibp.codecs.analyze(x, device="cpu")
    assert ibp.estimate(x, device="cpu").original_bytes == x.numel() * x.element_size()
    alone = (
        torch.empty(0, dtype=dtype).set_(x.clone().untyped_storage(), 0, x.shape, x.stride())
        if x.numel()
        else x.clone()
    )
    assert alone.stride() == x.stride()
    assert_same_bits(ibp.compress(alone, device="cpu", memory="host", inplace=True).decompress(), x.clone())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lazily_conjugated_and_negated(scheme):
    x = torch.randn(30, 8, dtype=torch.complex64)
    for lazy in (x.conj(), x.conj().imag, x.real, x.imag):
        assert_same_bits(ibp.compress(lazy, scheme=scheme).decompress(), lazy.resolve_conj().resolve_neg().contiguous())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_unaligned_memory(scheme):
    """Bytes that start at an odd address."""
    data = np.zeros(1 + 33 * 50, np.uint8)
    data[1:] = bytes_of(make_tensor((33, 50), torch.uint8, "sparse")).numpy()
    x = torch.from_numpy(data)[1:].view(33, 50)
    assert x.data_ptr() % 2 == 1
    check(x, scheme=scheme)


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGER_OF = {2: np.uint16, 4: np.uint32, 8: np.uint64}
FRACTION_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}


def special_values(dtype):
    """Bit patterns of one float dtype: zeros, infinities, denormals, quiet and signalling NaNs with payloads, of both
    signs.
    """
    bits, fraction = 8 * dtype.itemsize, FRACTION_BITS[dtype]
    infinity, quiet = ((1 << (bits - 1 - fraction)) - 1) << fraction, 1 << (fraction - 1)
    patterns = [
        0,
        1,
        2,
        (1 << fraction) - 1,
        1 << fraction,
        infinity - 1,
        infinity,
        infinity | quiet,
        infinity | 1,
        infinity | quiet | 5,
    ]
    patterns += [infinity | ((1 << fraction) - 1), (infinity >> 1) & ~((1 << fraction) - 1)]
    patterns += [pattern | 1 << (bits - 1) for pattern in patterns]
    return np.array(patterns, INTEGER_OF[dtype.itemsize])


@pytest.mark.parametrize("layout, scheme", LAYOUT_SCHEMES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_floats(dtype, layout, scheme):
    values = special_values(dtype)
    rng = np.random.default_rng(0)
    mostly_zero = np.where(rng.random((200, 32)) < 0.95, values[0], rng.choice(values, (200, 32)))
    for array in (np.resize(values, (200, 32)), rng.choice(values, (200, 32)), mostly_zero.astype(values.dtype)):
        x = tensor_from(array.reshape(-1).view(np.uint8), (200, 32), dtype)
        assert_same_bits(torch.from_numpy(array.reshape(-1)), bytes_of(x).view(torch.from_numpy(array).dtype))
        table = check(x, scheme=scheme, layout=layout)
    assert table.scheme in (("ibp", "planes") if scheme == "auto" else (scheme,))


@pytest.mark.parametrize("num_rows, value, scheme", pairwise([1, 33, 5000], [0x00, 0xFF, 0x80, 0x01, 0xA5], SCHEMES))
def test_all_rows_equal(num_rows, value, scheme):
    """All that is left of a row is one participation bit a chunk, a header, or nothing."""
    x = torch.full((num_rows, 256), value, dtype=torch.uint8)
    table = check(x, scheme=scheme)
    lengths = table.lengths.to(torch.int64)
    longest = int(torch.where(lengths == table.row_bytes, 0, lengths).max())  # row_bytes marks a default row
    assert (
        longest <= 2
        if table.scheme == "planes"
        else table.scheme == "ibp" and longest <= 4 * (1 if num_rows > 1 else 8)
    )


def test_every_bit_pattern_of_16_bits():
    """Each value once, so that most symbols of the rows were never met before."""
    for dtype in (torch.int16, torch.bfloat16, torch.float16):
        values = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(dtype)
        check(values.view(256, 256), scheme="planes", sample=0.05)
        check(
            values.view(256, 256),
            codebook=ibp.codecs.analyze(torch.randn(2000, 256).to(torch.bfloat16), scheme="planes"),
        )


def test_every_byte_value():
    check(torch.arange(256, dtype=torch.uint8).repeat(20).view(40, 128))
