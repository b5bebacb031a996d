"""What compress, index_select, decompress, analyze and estimate do, on the CPU."""

import itertools
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import ibp
import reference
import row_codecs
from helpers import (
    SCHEMES,
    assert_same_bits,
    assert_same_table,
    bytes_of,
    embedding,
    make_tensor,
    one_hot_rows,
    plain_table,
    reference_decode,
    spiky_rows,
    tensor_from,
)  # fmt: skip
from ibp._rows import geometry
from interrupts import Interrupted, InterruptedOperations, assert_kept, interrupt_at

LAYOUTS = [{}, {"slot_bytes": 32}, {"slot_bytes": "row"}, {"layout": "packed"}]


@pytest.fixture(scope="module")
def x():
    return spiky_rows(500, 60)


@pytest.fixture(scope="module", params=SCHEMES)
def table(x, request):
    return ibp.compress(x, scheme=request.param, device="cpu")


def compress(x, **arguments):
    if arguments.get("slot_bytes") == "row":
        arguments["slot_bytes"] = x[0].numel() * x.element_size()
    return ibp.compress(x, device="cpu", **arguments)


# ---- compress and what a table says of itself ----


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("arguments", LAYOUTS, ids=str)
def test_numpy_decodes_what_compress_makes(x, arguments, scheme):
    table = compress(x, scheme=scheme, **arguments)
    assert reference_decode(table) == bytes_of(x).numpy().tobytes()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("arguments", LAYOUTS, ids=str)
def test_round_trip(x, arguments, scheme):
    before = x.clone()
    table = compress(x, scheme=scheme, **arguments)
    assert_same_bits(table.decompress(), before)
    assert_same_bits(x, before)


def test_attributes(x, table):
    assert table.shape == x.shape and table.dtype == x.dtype and table.device == x.device
    assert table.layout == "slots" and table.codebook.scheme == table.scheme and table.codebook.row_bytes == 240
    assert isinstance(table.codebook, {"ibp": ibp.codecs.Codebook, "planes": ibp.codecs.PlanesCodebook}[table.scheme])
    assert table.row_bytes == 240 and table.num_rows == 500 and len(table) == 500
    assert table.slot_bytes % 32 == 0 and 0 < table.slot_bytes < 240
    assert table.slots.dtype == torch.uint8 and table.slots.numel() == 500 * table.slot_bytes
    assert (
        table.overflow.dtype == torch.uint8 and table.lengths.dtype == torch.uint16 and table.bases.dtype == torch.int64
    )
    assert table.lengths.numel() == 500 and table.bases.numel() == 16


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("arguments", LAYOUTS, ids=str)
def test_sizes(x, arguments, scheme):
    table = compress(x, scheme=scheme, **arguments)
    plain = plain_table(table, None)
    assert table.stored_bytes == reference.stored_bytes(plain) + table.codebook.nbytes
    if table.scheme == "ibp":
        assert table.codebook.nbytes == table.codebook.palette.nbytes + table.codebook.index.nbytes
    else:
        values = 2 * table.codebook.element_bytes if table.codebook.listed else 0
        assert table.codebook.nbytes == table.codebook.entries.numel() * table.codebook.symbol_bytes + values
    assert table.savings == pytest.approx(1 - table.stored_bytes / (500 * 240))
    assert table.index_bytes == table.lengths.nbytes + table.bases.nbytes <= 2.25 * 500 + 8
    assert table.nbytes >= table.slots.nbytes + table.overflow.nbytes + table.index_bytes + table.codebook.nbytes
    assert table.link_bytes == link_bytes(plain)


def link_bytes(table):
    """Bytes of the 32-byte sectors that fetching every row once touches, row by row."""
    sectors = 0
    for row in range(table.num_rows):
        part = table.part(row)
        in_slot = table.stored(row) - part
        places = [(row * table.slot_bytes, in_slot)] + ([(table.overflow_start(row), part)] if part else [])
        sectors += sum((start + size - 1) // 32 - start // 32 + 1 for start, size in places if size)
    return 32 * sectors


def test_compression_saves_memory(x, table):
    """The slots layout gives back what is saved; the in-place layout keeps every row's address."""
    assert table.savings > 0.7 and table.nbytes < 0.5 * x.nbytes
    in_place = compress(x, codebook=table.codebook, slot_bytes="row")
    assert in_place.slots.numel() == x.nbytes and in_place.overflow.numel() == 0 and in_place.bases.numel() == 0
    packed = compress(x, codebook=table.codebook, layout="packed")
    assert packed.layout == "packed" and packed.slot_bytes == 0 and packed.slots.numel() == 0
    assert packed.overflow.numel() == packed.stored_bytes - packed.codebook.nbytes
    assert packed.stored_bytes == in_place.stored_bytes == table.stored_bytes


def test_slot_bytes_is_taken(x):
    for slot_bytes in (32, 64, 224, 240):
        assert compress(x, slot_bytes=slot_bytes).slot_bytes == slot_bytes


@pytest.mark.parametrize("scheme", SCHEMES)
def test_equal_input_gives_equal_tables(x, scheme):
    assert_same_table(*(ibp.compress(same, scheme=scheme, device="cpu") for same in (x, x.clone())))


def test_repr_says_what_there_is(table):
    text = repr(table)
    for part in (
        "[500, 60]",
        "torch.float32",
        f"scheme={table.scheme!r}",
        "slots",
        "120,000",
        f"{table.stored_bytes:,}",
        f"{table.savings:.1%}",
        f"nbytes={table.nbytes:,}",
        "pinned" if table.is_pinned() else "pageable",
    ):
        assert part in text, f"{part} is not in {text}"


def test_a_table_that_saves_nothing_is_raw():
    x = make_tensor((300, 64), torch.uint8, "random")
    arguments_of = [
        {"scheme": scheme, **layout} for scheme in SCHEMES for layout in ({}, {"layout": "packed"}, {"slot_bytes": 32})
    ]
    for arguments in (*arguments_of, {"chunk_bytes": 8, "tau": 0.9}):
        table = ibp.compress(x, device="cpu", **arguments)
        assert table.scheme == "raw" and table.codebook is None and table.savings == 0 and "raw" in repr(table)
        assert table.stored_bytes == x.nbytes and table.index_bytes == 0 and table.slot_bytes == table.row_bytes
        assert torch.equal(table.slots, x.reshape(-1))
        assert_same_bits(table.decompress(), x)
        assert_same_bits(table[5:9], x[5:9])


def test_scheme_raw_on_request(x):
    table = ibp.compress(x, scheme="raw", device="cpu")
    assert table.scheme == "raw" and table.stored_bytes == x.nbytes and torch.equal(table.slots, bytes_of(x))
    assert table.slots.data_ptr() != x.data_ptr()
    assert_same_bits(ibp.index_select(table, torch.tensor([7, 7, 0])), x[[7, 7, 0]])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_raw_row_in_a_coded_table(x, scheme):
    """One row of noise among sparse ones: kept as it is, at no more than its size."""
    mixed = x.clone()
    mixed[123] = torch.randint(-(2**31), 2**31, (60,)).to(torch.int32).view(torch.float32)
    table = ibp.compress(mixed, scheme=scheme, device="cpu")
    assert table.scheme in (scheme, "ibp", "planes") and int(table.lengths[123]) == 0
    assert_same_bits(table.decompress(), mixed)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_row_bytes(x, scheme):
    for row_bytes in (1, 100, 240, 4096, 65536):
        table = compress(x, scheme=scheme, row_bytes=row_bytes)
        assert table.row_bytes == row_bytes and table.num_rows == -(-x.nbytes // row_bytes)
        assert_same_bits(table.decompress(), x)
        assert_same_bits(table.index_select(torch.tensor([499, 0, 250])), x[[499, 0, 250]])


def test_default_rows():
    """An item is a row up to 64 KiB; longer ones and 1-D tensors are cut into rows of 4 KiB."""

    def rows_of(*shape):
        table = ibp.compress(make_tensor(shape, torch.int16), device="cpu")
        return table.row_bytes, table.num_rows

    assert rows_of(50, 3, 5) == (30, 50)
    assert rows_of(3, 32768) == (65536, 3)
    assert rows_of(3, 32769) == (4096, -(-3 * 65538 // 4096))
    assert rows_of(5000) == (4096, 3)
    assert rows_of(2, 2, 2, 2) == (16, 2)


def test_pageable_on_request(x):
    table = ibp.compress(x, memory="host", device="cpu")
    assert not table.is_pinned() and not table.slots.is_pinned()


def test_progress_is_shown_only_if_asked_for(x, capfd):
    ibp.compress(x, device="cpu")
    assert capfd.readouterr() == ("", "")
    ibp.compress(x, device="cpu", progress=True)
    assert "compress" in capfd.readouterr().err


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_left_alone(x, scheme):
    weight = torch.nn.Parameter(x.clone())
    with torch.no_grad():
        table = ibp.compress(weight, scheme=scheme, device="cpu")
    result = table.decompress()
    assert not result.requires_grad and weight.grad is None
    assert_same_bits(result, weight.detach())


# ---- analysis ----


def threshold(x, tau):
    """mask and bitval of the paper's section 4.1, by numpy."""
    rows = bytes_of(x).numpy().reshape(len(x), -1)
    counts = np.unpackbits(rows, axis=1, bitorder="little").sum(axis=0, dtype=np.int64)
    if tau < 1:
        one, zero = counts > tau * len(x), counts < (1 - tau) * len(x)
    else:
        one, zero = counts == len(x), counts == 0
    return np.packbits(one | zero, bitorder="little"), np.packbits(one, bitorder="little")


@pytest.mark.parametrize("tau", [0.5, 0.75, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("chunk_bytes", [1, 2, 4, 8])
def test_analyze_with_a_threshold_is_the_papers(chunk_bytes, tau):
    x = embedding(777, 31)
    codebook = ibp.codecs.analyze(x, sample=1.0, chunk_bytes=chunk_bytes, tau=tau, device="cpu")
    mask, bitval = threshold(x, tau)
    assert codebook.chunk_bytes == chunk_bytes and codebook.tau == tau and not codebook.flag_all
    np.testing.assert_array_equal(codebook.mask.numpy(), mask)
    np.testing.assert_array_equal(codebook.bitval.numpy(), bitval)


def test_analyze_paper_flags_every_chunk_and_takes_the_best_tau():
    x = embedding(2000, 32)
    codebook = ibp.codecs.analyze(x, sample=1.0, chunk_bytes=4, paper=True, device="cpu")
    assert codebook.flag_all and 0.5 < codebook.tau <= 1
    np.testing.assert_array_equal(codebook.mask.numpy(), threshold(x, codebook.tau)[0])
    best = ibp.estimate(x, codebook, device="cpu").stored_bytes
    for tau in (0.7, 0.8, 0.9, 0.95):
        mask, bitval = (torch.from_numpy(array) for array in threshold(x, tau))
        assert (
            best
            <= 1.002
            * ibp.estimate(x, ibp.codecs.Codebook.from_masks(mask, bitval, 4, flag_all=True), device="cpu").stored_bytes
        )


@pytest.mark.parametrize(
    "make", [lambda: embedding(2000, 32), lambda: one_hot_rows(2000, 64), lambda: embedding(2000, 64, torch.bfloat16)]
)
def test_the_sweep_beats_every_single_choice(make):
    x = make()
    swept = ibp.estimate(x, ibp.codecs.analyze(x, sample=1.0, device="cpu"), device="cpu").stored_bytes
    for chunk_bytes in (1, 2, 4, 8):
        for tau in (0.7, 0.85, 0.95):
            codebook = ibp.codecs.analyze(x, sample=1.0, chunk_bytes=chunk_bytes, tau=tau, device="cpu")
            assert swept <= 1.005 * ibp.estimate(x, codebook, device="cpu").stored_bytes, (
                f"chunks of {chunk_bytes}, tau {tau}"
            )


def test_expected_savings(x):
    codebook = ibp.codecs.analyze(x, sample=1.0, device="cpu")
    assert codebook.expected_savings == pytest.approx(1 - ibp.estimate(x, codebook).stored_bytes / x.nbytes, abs=0.02)
    sampled = ibp.codecs.analyze(one_hot_rows(20000, 60), sample=0.1, device="cpu")
    assert sampled.expected_savings == pytest.approx(codebook.expected_savings, abs=0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sample_loses_little(scheme):
    x = embedding(20000, 32)
    whole, sampled = (
        ibp.compress(x, scheme=scheme, layout="packed", sample=sample, device="cpu").savings for sample in (1.0, 0.06)
    )
    assert 0.05 < whole and sampled > whole - 0.005


def test_estimate_is_exact(x):
    masks = [
        ibp.codecs.analyze(x),
        ibp.codecs.analyze(x, chunk_bytes=8, tau=0.9),
        ibp.codecs.analyze(x, paper=True),
        ibp.codecs.analyze(x, row_bytes=100),
    ]
    for codebook in (
        *masks,
        ibp.codecs.analyze(x, scheme="planes"),
        ibp.codecs.analyze(x, scheme="planes", row_bytes=100),
    ):
        table = ibp.compress(x, codebook=codebook)
        assert ibp.estimate(x, codebook).stored_bytes == table.stored_bytes and table.codebook == codebook


def test_a_codebook_of_another_tensor(x):
    """Codebooks are shared: they fit any tensor with rows of that size, of any dtype."""
    for codebook in (ibp.codecs.analyze(x), ibp.codecs.analyze(x, scheme="planes")):
        for other in (one_hot_rows(77, 60, seed=5), make_tensor((10, 120), torch.int16, "random"), embedding(40, 60)):
            table = ibp.compress(other, codebook=codebook, device="cpu")
            assert_same_bits(table.decompress(), other)


def test_chunk_bytes_and_tau_are_taken(x):
    table = ibp.compress(x, chunk_bytes=2, tau=0.9, device="cpu")
    assert table.codebook.chunk_bytes == 2 and table.codebook.tau == 0.9


# ---- codebooks ----


def test_codebook_from_masks():
    mask, bitval = (
        torch.tensor([255, 240, 0, 0, 255, 0], dtype=torch.uint8),
        torch.tensor([0, 64, 0, 0, 60, 0], dtype=torch.uint8),
    )
    codebook = ibp.codecs.Codebook.from_masks(mask, bitval, 2)
    assert (codebook.row_bytes, codebook.chunk_bytes, codebook.flag_all) == (6, 2, False)
    assert codebook.palette.shape == (3, 2, 2) and codebook.index.dtype == torch.uint8 and codebook.nbytes == 12 + 3
    assert torch.equal(codebook.mask, mask) and torch.equal(codebook.bitval, bitval)
    assert codebook == ibp.codecs.Codebook.from_masks(mask, bitval, 2) and hash(codebook) == hash(
        ibp.codecs.Codebook.from_masks(mask, bitval, 2)
    )
    others = [
        ibp.codecs.Codebook.from_masks(mask, bitval, 1),
        ibp.codecs.Codebook.from_masks(mask, bitval, 2, flag_all=True),
        ibp.codecs.Codebook.from_masks(mask, bitval & 15, 2),
        ibp.codecs.Codebook.from_masks(mask | 1, bitval, 2),
    ]
    assert all(codebook != other for other in others) and codebook != "codebook"
    assert "row_bytes=6" in repr(codebook) and "chunk_bytes=2" in repr(codebook)


def test_codebook_of_one_pair_has_no_index():
    codebook = ibp.codecs.Codebook.from_masks(
        torch.full((40,), 255, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8), 4
    )
    assert len(codebook.palette) == 1 and codebook.index.numel() == 0 and codebook.nbytes == 8


def test_pairs_that_come_again_are_in_the_palette_once():
    """Also chunks of 8 bytes that differ in their values alone."""
    mask = torch.full((32,), 0xF0, dtype=torch.uint8)
    bitval = torch.tensor([0x10, 0x20, 0x10, 0x20], dtype=torch.uint8).repeat_interleave(8)
    codebook = ibp.codecs.Codebook.from_masks(mask, bitval, 8)
    assert len(codebook.palette) == 2 and codebook.index.tolist() == [0, 1, 0, 1]


def test_codebook_of_many_pairs_has_a_wide_index():
    mask = make_tensor((2000,), torch.uint8, "random")
    codebook = ibp.codecs.Codebook.from_masks(mask, mask & 0x55, 4)
    assert codebook.index.dtype == torch.uint16 and len(codebook.palette) > 256
    assert codebook.nbytes == 8 * len(codebook.palette) + 2 * 500


def test_row_codec(x):
    codebook = ibp.codecs.analyze(x)
    codec = row_codecs.RowCodec(codebook.mask.numpy(), codebook.bitval.numpy(), codebook.chunk_bytes, codebook.flag_all)
    plain = reference.make_codebook(
        codebook.mask.numpy(), codebook.bitval.numpy(), codebook.chunk_bytes, codebook.flag_all
    )
    assert codec.row_bytes == 240 and codec.num_flags == int(plain.flagged().sum())
    for row in bytes_of(x).numpy().reshape(500, 240)[:20]:
        coded = reference.encode_row(plain, row)
        assert codec.encode(row) == coded and codec.coded_bytes(row.tobytes()) == len(coded)
        assert codec.decode(coded) == codec.decode(memoryview(coded)) == row.tobytes()
        for wrong in (coded[:-1], coded + b"\0", b""):
            with pytest.raises(ValueError):
                codec.decode(wrong)
    with pytest.raises(ValueError, match="240"):
        codec.encode(b"short")


# ---- index_select ----


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("arguments", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_select(x, arguments, dtype, scheme):
    table = compress(x, scheme=scheme, **arguments)
    ids = torch.randint(500, (1000,)).to(dtype)
    for chosen in (
        ids,
        ids[:0],
        ids[:1],
        ids[::3],
        ids.flip(0),
        torch.stack([ids, ids], 1)[:, 0],
        torch.full((40,), 7, dtype=dtype),
    ):
        assert_same_bits(ibp.index_select(table, chosen), torch.index_select(x, 0, chosen))
        assert_same_bits(table.index_select(chosen), x[chosen.long()])


def test_index_select_into_out(x, table):
    ids = torch.tensor([3, 1, 4, 1, 5])
    whole = torch.full((9, 60), 7.0)
    result = ibp.index_select(table, ids, out=whole[2:7])
    assert result.data_ptr() == whole[2:7].data_ptr()
    assert_same_bits(whole[2:7], x[ids])
    assert (whole[:2] == 7).all() and (whole[7:] == 7).all()


def test_decompress_into_out(x, table):
    whole = torch.full((502, 60), 7.0)
    result = ibp.decompress(table, out=whole[1:501], device="cpu")
    assert result.data_ptr() == whole[1:501].data_ptr()
    assert_same_bits(whole[1:501], x)
    assert (whole[0] == 7).all() and (whole[501] == 7).all()


def test_results_share_nothing_with_the_table():
    x = make_tensor((40, 16), torch.uint8, "random")
    table = ibp.compress(x, device="cpu")
    for result in (table.decompress(), table[:], table[torch.arange(40)]):
        result.fill_(0)
    assert_same_bits(table.decompress(), x)


@pytest.mark.parametrize(
    "key",
    [
        0,
        499,
        -1,
        -500,
        np.int64(3),
        slice(None),
        slice(3, 9),
        slice(-5, None),
        slice(9, 3),
        slice(0, 100, 7),
        slice(490, 600),
        [1, -2, 3],
        [],
    ],
    ids=repr,
)
def test_getitem(x, table, key):
    assert_same_bits(table[key], x[key])


def test_getitem_with_index_tensors(x, table):
    mask = torch.rand(500) < 0.1
    for key in (
        torch.tensor([5, -5]),
        torch.tensor([[1, 2], [3, -4]]),
        torch.tensor(17),
        mask,
        torch.tensor([1, 2], dtype=torch.int32),
        torch.tensor([1, 2], dtype=torch.uint8).to(torch.int16),
        torch.zeros(0, dtype=torch.int64),
    ):
        assert_same_bits(table[key], x[key.long() if key.dtype == torch.int16 else key])


def test_threads(x, table, set_threads):
    """Many ids in few and in many threads: the same bytes."""
    ids = torch.randint(500, (20000,))
    for count in (1, 4):
        set_threads(count)
        assert_same_bits(ibp.index_select(table, ids), x[ids])


def test_check_has_nothing_to_say(table):
    table.check()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_corrupt_table_is_reported_and_harmless(x, scheme):
    table = ibp.compress(x, scheme=scheme, slot_bytes=32, device="cpu")
    assert int(table.lengths[17]) > 0 and table.bases.numel()
    table.lengths.view(torch.int16)[17] += 1
    with pytest.raises(ibp.CorruptTableError, match="17"):
        table.decompress()
    with pytest.raises(ValueError, match="position 2"):
        ibp.index_select(table, torch.tensor([400, 300, 17]))
    assert_same_bits(ibp.index_select(table, torch.tensor([400, 16])), x[[400, 16]])
    table.bases.fill_(-1)
    with pytest.raises(ibp.CorruptTableError):
        table.decompress()


# ---- compress in place ----


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "make", [lambda: spiky_rows(500, 60), lambda: embedding(999, 33), lambda: one_hot_rows(1, 5000).reshape(-1)]
)
def test_compress_in_place(make, scheme):
    x = make()
    before, address = x.clone(), x.data_ptr()
    table = ibp.compress(x, scheme=scheme, device="cpu", memory="host", inplace=True)
    assert (
        table.scheme in ("ibp", "planes")
        and scheme in ("auto", table.scheme)
        and table.slots.data_ptr() == address
        and table.slots.numel() == x.nbytes
    )
    assert table.slot_bytes == table.row_bytes and table.overflow.numel() == 0 and table.bases.numel() == 0
    copied = ibp.compress(before, codebook=table.codebook, slot_bytes=table.row_bytes, device="cpu")
    assert table.stored_bytes == copied.stored_bytes and torch.equal(table.lengths, copied.lengths)
    assert_same_bits(table.decompress(), before)
    assert_same_bits(table[len(x) - 1], before[len(x) - 1])
    assert not torch.equal(x, before)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compress_in_place_keeps_the_memory_alive(scheme):
    before = one_hot_rows(500, 60)
    table = ibp.compress(before.clone(), scheme=scheme, device="cpu", inplace=True)
    assert_same_bits(table.decompress(), before)


@pytest.mark.parametrize("scheme", [*SCHEMES, "raw"])
def test_compress_in_place_of_noise_changes_nothing(scheme):
    x = make_tensor((100, 64), torch.uint8, "random")
    before = x.clone()
    table = ibp.compress(x, scheme=scheme, device="cpu", inplace=True)
    assert table.scheme == "raw" and table.slots.data_ptr() == x.data_ptr()
    assert_same_bits(x, before)
    assert_same_bits(table.decompress(), before)


@pytest.mark.parametrize("scheme", ["ibp", "planes"])
@pytest.mark.parametrize("blocks_done", [1, 2, 7])
def test_compress_in_place_interrupted_between_blocks(blocks_done, scheme, monkeypatch):
    blocks = geometry.blocks

    def interrupted(*args, whole=True):
        for number, block in enumerate(blocks(*args, whole=whole)):
            if number == blocks_done and not whole:  # of those that are rewritten
                raise Interrupted
            yield block

    x = one_hot_rows(1000, 60)
    before = x.clone()
    codebook = ibp.codecs.analyze(x, scheme=scheme)
    monkeypatch.setattr("ibp._rows.geometry._BLOCK_BYTES", 240 * 96)
    monkeypatch.setattr(geometry, "blocks", interrupted)
    with pytest.raises(Interrupted) as interruption:
        ibp.compress(x, codebook=codebook, device="cpu", memory="host", inplace=True)
    table = interruption.value.table
    assert int((table.lengths != 0).sum()) <= 96 * blocks_done and not torch.equal(x, before)
    assert_same_bits(table.decompress(), before)


def test_blocks_of_host_memory(x, monkeypatch):
    whole = ibp.compress(x, scheme="planes", slot_bytes=32, device="cpu", memory="host")
    monkeypatch.setattr("ibp._rows.geometry._NEAR_BLOCK_BYTES", 240 * 96)
    table = ibp.compress(x, codebook=whole.codebook, slot_bytes=32, device="cpu", memory="host")
    assert table.overflow.numel() > 0
    assert_same_table(table, whole)


@pytest.fixture
def in_blocks(monkeypatch):
    """200 rows in blocks of 96, and a codebook for them."""
    monkeypatch.setattr("ibp._rows.geometry._BLOCK_BYTES", 240 * 96)
    x = one_hot_rows(200, 60)
    return x, ibp.codecs.analyze(x, scheme="planes")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_compress_in_place_interrupted_at_every_moment(in_blocks):
    before, codebook = in_blocks
    seen = set()
    for moment in itertools.count():
        x = before.clone()
        table, raised = interrupt_at(
            moment, None, lambda: ibp.compress(x, codebook=codebook, device="cpu", memory="host", inplace=True)
        )
        seen.add(assert_kept(table, x, before))
        if not raised:
            break
    assert seen == {None, 0, 96, 192, 200}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_compress_in_place_interrupted_twice(in_blocks, stride):
    """At moments, and then at every point of what Python runs on its way out."""
    before, codebook = in_blocks
    seen, pairs = set(), 0
    for moment in itertools.count(stride // 2, stride):
        for point in itertools.count():
            x = before.clone()
            table, raised = interrupt_at(
                moment, point, lambda: ibp.compress(x, codebook=codebook, device="cpu", memory="host", inplace=True)
            )
            seen.add(assert_kept(table, x, before))
            pairs += raised == 2
            if raised < 2:
                break
        if not raised:
            break
    assert {None, 96, 192} <= seen and pairs > 100 / stride


@pytest.mark.parametrize("before_it", [True, False])
def test_compress_in_place_interrupted_at_every_operation(in_blocks, before_it):
    """As a signal that comes while torch works, and that Python handles when the operation returns; then a second one
    in the same way.
    """
    before, codebook = in_blocks
    seen, last = set(), 0
    for first in itertools.count():
        for others in ([], [first + 1]):
            x, table = before.clone(), None
            mode = InterruptedOperations([first, *others], before_it)
            try:
                with mode:
                    table = ibp.compress(x, codebook=codebook, device="cpu", memory="host", inplace=True)
            except Interrupted as interruption:
                table = getattr(interruption, "table", None)
            seen.add(assert_kept(table, x, before))
        if mode.number < first:
            break
        last = first
    assert last > 10 and {None, 96, 192, 200} <= seen


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("scheme", ["ibp", "planes"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_compress_in_place_interrupted_by_a_signal(share, scheme, monkeypatch):
    monkeypatch.setattr("ibp._rows.geometry._BLOCK_BYTES", 1 << 16)
    before = one_hot_rows(20000, 60)
    codebook = ibp.codecs.analyze(before[:1000], scheme=scheme)
    start = time.perf_counter()
    ibp.compress(before.clone(), codebook=codebook, device="cpu", memory="host", inplace=True)
    elapsed = time.perf_counter() - start

    def interrupt(number, frame):
        raise Interrupted

    x, table = before.clone(), None
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, share * elapsed)
        table = ibp.compress(x, codebook=codebook, device="cpu", memory="host", inplace=True)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupted as interruption:
        table = getattr(interruption, "table", table)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert_same_bits(x if table is None else table.decompress(), before)


def test_compress_in_place_reads_its_own_table_only():
    """Two tensors beside each other in memory: compressing one leaves the other alone."""
    data = torch.zeros(2, 500, 60)
    x = tensor_from(one_hot_rows(500, 60).numpy().view(np.uint8).reshape(-1), (500, 60), torch.float32)
    data[0] = x
    with pytest.raises(ValueError, match="own"):
        ibp.compress(data[0], inplace=True)
    assert_same_bits(data[0], x)
    assert (data[1] == 0).all()


def test_public_names():
    for name in ibp.__all__:
        assert hasattr(ibp, name), name
    assert ibp.__version__ == ibp._core.version()
    assert ibp._core.status_string(0) == "no error" and ibp._core.status_string(99)


def test_public_names_of_a_table():
    """A table answers what users ask. The library's own questions are functions of `ibp._rows`."""
    table = ibp.compress(torch.randn(100, 64), device="cpu", memory="host")
    of_tensors = """
        bfloat16 clone cpu cuda detach device dim double dtype element_size float half is_complex is_cuda
        is_floating_point is_meta is_pinned is_shared itemsize ndim numel pin_memory requires_grad requires_grad_ shape
        share_memory_ size to
    """
    of_tables = """
        append bases check codebook decompress decompress_items device_bytes fits_linear geometry host_bytes index_bytes
        index_select layout lengths link_bytes nbytes num_rows of_parts original_bytes overflow overflow_memory
        peer_bytes prefetch prepare_linear refit row_bytes savings scheme share slot_bytes slots spills_to_host
        stored_bytes update_ version
    """
    public = {name for name in dir(table) if not name.startswith("_")}
    assert public == {*of_tensors.split(), *of_tables.split()}


@pytest.mark.slow
def test_integrations_are_imported_when_they_are_named():
    code = """
import sys, ibp
assert "torch._dynamo" not in sys.modules  # torch's compiler, which takes a second to load
assert not [name for name in sys.modules if name.startswith("ibp.integrations")]
assert {"pyg", "dgl", "transformers"} <= set(dir(ibp.integrations))
assert not [name for name in sys.modules if name.startswith("ibp.integrations.")]
assert ibp.integrations.accelerate is sys.modules["ibp.integrations.accelerate"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'jax'; there are .*pyg"):
        ibp.integrations.jax  # noqa: B018
    with pytest.raises(AttributeError, match="module 'ibp' has no attribute 'comprss'"):
        ibp.comprss  # noqa: B018
