"""Properties over drawn dtypes, shapes, chunk sizes, thresholds, layouts and ids: what goes in comes out."""

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import ibp
import reference
import row_codecs
from helpers import DTYPES, SCHEMES, assert_same_bits, bytes_of, make_tensor, reference_decode, take

ELEMENTS = [dtype for dtype in DTYPES if dtype != torch.complex32]  # torch warns of that one; it has tests of its own

shapes = st.one_of(
    st.tuples(st.integers(0, 130), st.integers(0, 90)),
    st.tuples(st.integers(0, 3000)),
    st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple),
)
tensors = st.builds(
    make_tensor,
    shapes,
    st.sampled_from(ELEMENTS),
    st.sampled_from(["sparse", "narrow", "random", "equal"]),
    st.integers(0, 1000),
)
schemes = st.sampled_from(SCHEMES)
chunks = st.sampled_from([None, 1, 2, 4, 8])
taus = st.one_of(st.none(), st.floats(0.5, 1.0))


@st.composite
def row_sizes(draw, x):
    """None (the default) or any row size, and a layout with a slot size that it allows."""
    row_bytes = draw(st.one_of(st.none(), st.integers(1, 300), st.sampled_from([4096, 16384, 65536])))
    layout = draw(st.sampled_from(["slots", "packed", "in place", "given"]))
    if layout in ("slots", "packed"):
        return {"row_bytes": row_bytes, "layout": layout}
    row = row_bytes or ibp.compress(x[:1] if x.dim() else x, device="cpu").row_bytes
    multiples = [row, *range(32, row, 32)] if layout == "given" else [row]
    return {"row_bytes": row, "slot_bytes": draw(st.sampled_from(multiples[:40]))}


@given(st.data(), tensors, schemes, chunks, taus)
def test_round_trip(data, x, scheme, chunk_bytes, tau):
    arguments = data.draw(row_sizes(x))
    learning = {} if scheme == "planes" else {"chunk_bytes": chunk_bytes, "tau": tau}
    table = ibp.compress(x, scheme=scheme, device="cpu", **learning, **arguments)
    assert_same_bits(table.decompress(), x)
    num_bytes = x.numel() * x.element_size()
    assert table.stored_bytes <= num_bytes and table.index_bytes <= 2.25 * table.num_rows + 8
    assert reference_decode(table) == bytes_of(x).numpy().tobytes()
    if table.scheme != "raw":
        assert scheme in ("auto", table.scheme)
        assert ibp.estimate(x, table.codebook, device="cpu").stored_bytes == table.stored_bytes < num_bytes


@given(st.data(), tensors, schemes, st.sampled_from([torch.int32, torch.int64]))
def test_index_select(data, x, scheme, ids_dtype):
    assume(x.dim() > 0 and len(x) > 0)
    table = ibp.compress(x, scheme=scheme, device="cpu", **data.draw(row_sizes(x)))
    ids = torch.tensor(data.draw(st.lists(st.integers(0, len(x) - 1), max_size=80)), dtype=ids_dtype)
    out = torch.empty(len(ids), *x.shape[1:], dtype=x.dtype) if data.draw(st.booleans()) else None
    assert_same_bits(ibp.index_select(table, ids, out=out), take(x, ids))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, len(x)), st.integers(0, len(x)))))
    assert_same_bits(table[start:stop], take(x, torch.arange(start, stop)))
    keys = torch.tensor(data.draw(st.lists(st.integers(-len(x), len(x) - 1), max_size=10)), dtype=torch.int64)
    assert_same_bits(table[keys], take(x, keys % len(x)))


@given(st.data(), tensors, schemes)
def test_ids_out_of_range_raise(data, x, scheme):
    assume(x.dim() > 0)
    table = ibp.compress(x, scheme=scheme, device="cpu")
    bad = data.draw(st.one_of(st.integers(-(2**63), -1), st.integers(len(x), 2**63 - 1)))
    ids = torch.tensor([0] * min(len(x), 3) + [bad], dtype=torch.int64)
    try:
        ibp.index_select(table, ids)
    except IndexError as error:
        assert str(bad) in str(error) and str(len(x) - 1) in str(error)
    else:
        raise AssertionError(f"id {bad} of {len(x)} items was taken")


@given(st.integers(1, 120), st.sampled_from([1, 2, 4, 8]), st.booleans(), st.integers(0, 2**32), st.integers(0, 100))
def test_core_rows_are_the_references(row_bytes, chunk_bytes, flag_all, seed, percent):
    """Any masks, any row: the same coded bytes from C and from numpy, and the same row back."""
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 256, row_bytes, np.uint8) & rng.choice(np.array([0, 255, 0xF0], np.uint8), row_bytes)
    bitval = mask & rng.integers(0, 256, row_bytes, np.uint8)
    row = rng.integers(0, 256, row_bytes, np.uint8)
    row = np.where(rng.integers(0, 100, row_bytes) < percent, row & ~mask | bitval, row).astype(np.uint8)
    codec = row_codecs.RowCodec(mask, bitval, chunk_bytes, flag_all)
    coded = reference.encode_row(reference.make_codebook(mask, bitval, chunk_bytes, flag_all), row)
    assert codec.encode(row) == coded and codec.decode(coded) == row.tobytes() and codec.coded_bytes(row) == len(coded)


@given(st.binary(max_size=80), st.integers(1, 60), st.sampled_from([1, 2, 4, 8]), st.booleans(), st.integers(0, 2**32))
def test_any_bytes_decode_alike_or_not_at_all(coded, row_bytes, chunk_bytes, flag_all, seed):
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 256, row_bytes, np.uint8)
    bitval = mask & rng.integers(0, 256, row_bytes, np.uint8)
    try:
        expected = reference.decode_row(reference.make_codebook(mask, bitval, chunk_bytes, flag_all), coded)
    except reference.CorruptRow:
        expected = None
    try:
        row = row_codecs.RowCodec(mask, bitval, chunk_bytes, flag_all).decode(coded)
    except ValueError:
        row = None
    assert row == expected


@given(st.data(), tensors, schemes)
def test_in_place(data, x, scheme):
    row_bytes = data.draw(st.one_of(st.none(), st.integers(1, 300)))
    mine = x.clone()
    table = ibp.compress(mine, scheme=scheme, row_bytes=row_bytes, device="cpu", memory="host", inplace=True)
    assert x.numel() == 0 or table.slots.data_ptr() == mine.data_ptr()
    assert_same_bits(table.decompress(), x)
