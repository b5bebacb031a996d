"""Rows of scheme `planes` on the GPU against the C core: the same bytes coded, the same bits fetched, the same rows
refused.
"""

import dataclasses

import numpy as np
import pytest
import torch

import ibp
import reference_planes as reference
import row_codecs
from golden.make_planes import (
    CASES,
    KINDS,
    adversarial_rows,
    bytes_of,
    damaged,
    in_all_columns,
    load,
    make_rows,
    random_codebook,
    rows_of_k,
    with_later_fields,
)
from handles import BY_VALUES as OPS
from handles import values_of
from helpers import (
    LAYOUTS,
    assert_same_bits,
    assert_same_table,
    embedding,
    layout_arguments,
    make_tensor,
    one_hot_rows,
    pairwise,
    planes_codebook,
)  # fmt: skip

CPU = torch.device("cpu")
CORRUPT = 3  # IBP_CORRUPT_ROW
ELEMENT_BYTES = [1, 2, 4, 8]
DIGIT_BITS = [(), (1,), (4, 4), (3, 3, 4), (2, 2, 2, 3), (1, 1, 1, 1), (4, 4, 4, 4), (3,), (2, 1)]
LARGE_ROWS = [600, 1024, 2408, 4096, 14808, 16384, 32760, 65528, 65536]


def any_codebook(rng, element_bytes, columns, rotate, residual_bits, digit_bits, kind, number):
    """Any entries; listed with a default of 0 if the number is even, else of anything."""
    codebook = random_codebook(rng, element_bytes, columns, rotate, residual_bits, digit_bits, kind)
    return codebook if number % 2 else dataclasses.replace(codebook, default=0)


def slot_bytes_of(layout, row_bytes):
    return {"slots": max(32, row_bytes // 2 // 32 * 32), "slots of 32": 32, "in place": row_bytes,
        "packed": 0}[layout] if row_bytes > 32 else \
           {"packed": 0}.get(layout, row_bytes)  # fmt: skip


def ranked_rows(rng, num_rows, codebook):
    """Rows as a codebook wants them: first entries most often, few symbols that have none; listed rows nearly empty to
    full, some closed.
    """
    shape = (num_rows, codebook.columns)
    anything = rng.integers(0, 2**64, shape, np.uint64) & reference.low_bits(codebook.coded_bits)
    symbols, residuals = reference.split(anything, *codebook.split)
    num_entries = codebook.entries.shape[1]
    ranks = rng.geometric(rng.choice([0.999, 0.7, 0.3, 0.1], (num_rows, 1)), shape) - 1
    entries = np.broadcast_to(codebook.entries, (codebook.columns, num_entries)).astype(np.uint64)
    if num_entries:
        named = entries[np.arange(codebook.columns), np.minimum(ranks, num_entries - 1)]
        symbols = np.where(ranks < num_entries, named, symbols)
    elements = reference.join(symbols, residuals, *codebook.split)
    elements = elements << np.uint64(codebook.invariant_bits) | np.uint64(codebook.invariant_value)
    if codebook.listed:
        elements = np.where(rng.random((num_rows, 1)) < 0.3, np.uint64(codebook.closed), elements)
        elements = np.where(
            rng.random(shape) < rng.choice([0, 0.05, 0.5, 0.9, 0.99, 1], (num_rows, 1)),
            np.uint64(codebook.default),
            elements,
        )
    return in_all_columns(codebook, elements)


def zeros(like):
    return torch.zeros_like(like)


def fault_on(device):
    return torch.zeros(4, dtype=torch.int64, device=device)


def check_coding(cuda, codebook, rows, layout, cut=0):
    """CUDA measures and codes rows, the last one `cut` bytes short, to the bytes that C does, and reads them again.
    Returns how many were coded.
    """
    codebook = planes_codebook(codebook)
    data = torch.from_numpy(rows.reshape(-1)[: rows.size - cut])
    row_bytes, slot_bytes = codebook.row_bytes, slot_bytes_of(layout, codebook.row_bytes)
    lengths = OPS.measure_rows(data, codebook.words(CPU), codebook.codec)
    assert_same_bits(OPS.measure_rows(data.to(cuda), codebook.words(cuda), codebook.codec).cpu(), lengths)
    *bases, overflow_bytes = OPS.index_rows(lengths, len(data), row_bytes, slot_bytes).tolist()
    slots = torch.zeros(len(data) if slot_bytes == row_bytes else len(rows) * slot_bytes, dtype=torch.uint8)
    overflow, bases = torch.zeros(overflow_bytes, dtype=torch.uint8), torch.tensor(bases)
    written = []
    for device in (CPU, cuda):
        index = (
            lengths.to(device),
            bases.to(device),
            codebook.words(device),
            codebook.codec,
            slot_bytes,
            0,
            1,
            len(data),
        )
        arrays = zeros(slots).to(device), zeros(overflow).to(device)
        fault = fault_on(device)
        OPS.encode_rows(*arrays, *index, data.to(device), fault)
        assert fault.tolist() == [0, 0, 0, 0]
        written.append(arrays)
    for by_c, by_cuda in zip(*written):
        assert_same_bits(by_cuda.cpu(), by_c)
    out, fault = torch.full_like(data, 0xA5, device=cuda), fault_on(cuda)
    OPS.decode_bytes(*arrays, *index, 0, len(data), 0, out, fault)
    assert_same_bits(out.cpu(), data)
    assert fault.tolist() == [0, 0, 0, 0]
    return int((lengths.view(torch.int16) != 0).sum())


# ---- coding and decoding every kind of row -------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_golden_rows(cuda, name):
    codebook, rows, coded, _ = load(name)
    shorter = np.stack(
        [np.frombuffer(row, np.uint8) for row, bytes_ in zip(rows, coded) if len(bytes_) < len(row)]
        or [np.frombuffer(rows[0], np.uint8)]
    )
    for layout in LAYOUTS:
        check_coding(cuda, codebook, shorter, layout)
    codebook, rows = make_rows(4000, name)
    check_coding(cuda, codebook, rows, "packed", rows.shape[1] // 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element_bytes", ELEMENT_BYTES)
def test_every_split(cuda, element_bytes, kind):
    """Digit lists with residual widths from none to all, rotated and not."""
    rng, width, coded = np.random.default_rng([element_bytes, KINDS.index(kind)]), 8 * element_bytes, 0
    for number, digit_bits in enumerate(DIGIT_BITS):
        for residual_bits in {0, 1, width // 2 - 1, width - 8, width - 3, width - 1, width}:
            columns = int(rng.integers(1, 150))
            codebook = any_codebook(
                rng,
                element_bytes,
                columns,
                (number + residual_bits) % 2,
                residual_bits,
                digit_bits,
                kind,
                residual_bits,
            )
            rows = np.concatenate([ranked_rows(rng, 30, codebook), adversarial_rows(rng, 7, codebook)])
            coded += check_coding(cuda, codebook, rows, LAYOUTS[number % 4], int(rng.integers(0, codebook.row_bytes)))
    assert coded > 200


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element_bytes", ELEMENT_BYTES)
def test_every_small_row(cuda, element_bytes, kind):
    """Rows of 1 to 140 elements, most of them not of a multiple of 16 bytes."""
    rng, coded = np.random.default_rng([element_bytes, KINDS.index(kind), 1]), 0
    for columns in range(1, 141):
        residual_bits = 8 * element_bytes - int(rng.integers(2, 9))
        codebook = any_codebook(
            rng, element_bytes, columns, columns // 2 % 2, residual_bits, DIGIT_BITS[columns % 9], kind, columns
        )
        coded += check_coding(
            cuda, codebook, ranked_rows(rng, 37, codebook), LAYOUTS[columns % 4], columns * element_bytes // 3
        )
    assert coded > 1000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element_bytes", ELEMENT_BYTES)
@pytest.mark.parametrize("row_bytes", LARGE_ROWS)
def test_large_rows(cuda, row_bytes, element_bytes, kind):
    rng, coded = np.random.default_rng([row_bytes, element_bytes, KINDS.index(kind)]), 0
    for number, digit_bits in enumerate([(4, 4), (2, 2, 2, 3), (1,)]):
        residual_bits = [8 * element_bytes - 8, 0, 8 * element_bytes - 5][number]
        codebook = any_codebook(
            rng, element_bytes, row_bytes // element_bytes, 1, residual_bits, digit_bits, kind, number
        )
        rows = ranked_rows(rng, 5 if row_bytes > 10_000 else 35, codebook)
        coded += check_coding(cuda, codebook, rows, LAYOUTS[(number + element_bytes) % 4], row_bytes // 3)
    assert coded > 0


LEFT_OUT = [{"invariant_bits"}, {"first_symbol"}, {"live_columns"}, {"invariant_bits", "first_symbol", "live_columns"}]


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=lambda fields: "all" if len(fields) > 1 else "".join(fields))
@pytest.mark.parametrize("kind", ["dense", "per_column"])
@pytest.mark.parametrize("element_bytes", ELEMENT_BYTES)
def test_what_dense_rows_leave_out(cuda, element_bytes, kind, left_out):
    """Rows that C codes, the level for speed among them; all of them and some."""
    rng, coded = np.random.default_rng([element_bytes, len(kind), LEFT_OUT.index(left_out)]), 0
    for number, digit_bits in enumerate([*DIGIT_BITS, (4,), (2, 2, 2, 2)]):
        for residual_bits in {0, 3, 8 * element_bytes - 8, 8 * element_bytes - 5}:
            columns = int(rng.choice([7, 64, 150, 1100, 8000]))
            codebook = any_codebook(rng, element_bytes, columns, number % 2, residual_bits, digit_bits, kind, number)
            codebook = with_later_fields(rng, codebook, left_out)
            rows = torch.from_numpy(ranked_rows(rng, 9, codebook))
            table = ibp.compress(rows, codebook=planes_codebook(codebook), layout="packed" if number % 2 else "slots")
            coded += int((table.lengths.view(torch.int16) != 0).sum())
            on_gpu, ids = table.to(cuda), torch.tensor([8, 0, 3, 3])
            assert_same_bits(on_gpu.decompress().cpu(), rows)
            assert_same_bits(on_gpu[ids.to(cuda)].cpu(), rows[ids])
    assert coded > 10


@pytest.mark.parametrize("element_bytes", ELEMENT_BYTES)
@pytest.mark.parametrize("columns", [1, 2, 7, 8, 9, 33, 64, 65, 127, 128, 129, 300])
def test_every_k(cuda, columns, element_bytes):
    """Every number of listed elements, closed and not: every form of positions that these rows can have."""
    rng = np.random.default_rng([columns, element_bytes])
    codebook = any_codebook(rng, element_bytes, columns, 1, 7, (1, 2), "listed", columns)
    rows = rows_of_k(rng, codebook, range(columns + 1))
    check_coding(cuda, codebook, rows, "packed")
    check_coding(cuda, codebook, closed_of(codebook, rows), "in place")


def closed_of(codebook, rows):
    elements = rows.view(f"<u{codebook.element_bytes}")
    return bytes_of(
        np.where(
            elements == codebook.default, elements.dtype.type(codebook.default), elements.dtype.type(codebook.closed)
        )
    )


@pytest.mark.parametrize("columns", [4096, 8191, 32767, 32768, 65535, 65536])
def test_long_lists(cuda, columns):
    """Headers of one to three bytes, lists with up to 13 low bits, of the listed positions and of the others."""
    rng = np.random.default_rng(columns)
    codebook = random_codebook(rng, 1, columns, 0, 4, (2, 1), "listed")
    counts = [
        0,
        1,
        2,
        5,
        13,
        27,
        60,
        200,
        1000,
        columns // 3,
        columns - 300,
        columns - 20,
        columns - 3,
        columns - 1,
        columns,
    ]
    rows = rows_of_k(rng, codebook, counts)
    assert check_coding(cuda, codebook, rows, "packed") >= 10
    assert check_coding(cuda, codebook, closed_of(codebook, rows), "slots of 32") == 15


def test_forms_are_all_met():
    """The counts above choose bitmaps, lists of the listed and lists of the others."""
    for columns in (300, 65536):
        assert {reference.choose_form(columns, k)[0] for k in range(1, columns + 1, max(1, columns // 300))} == {
            "bitmap",
            "listed",
            "not listed",
        }
    assert max(reference.choose_form(65536, k)[1] or 0 for k in (1, 2, 5, 13)) == 13


def test_encoding_notes_lengths_of_other_data(cuda):
    for kind in KINDS:
        codebook = random_codebook(np.random.default_rng(0), 2, 64, 1, 8, (1, 1), kind)
        rows = ranked_rows(np.random.default_rng(1), 40, codebook)
        codebook, data = planes_codebook(codebook), torch.from_numpy(rows).reshape(-1).to(cuda)
        lengths = OPS.measure_rows(data, codebook.words(cuda), codebook.codec)
        row = int((lengths.to(torch.int64) > 1).nonzero()[0])
        lengths.view(torch.int16)[row] -= 1
        nothing, bases = data[:0], torch.empty(0, dtype=torch.int64, device=cuda)
        fault = fault_on(cuda)
        OPS.encode_rows(
            zeros(data), nothing, lengths, bases, codebook.words(cuda), codebook.codec, 128, 0, 40, 128, data, fault
        )
        assert fault.tolist()[:2] == [CORRUPT, row]


# ---- tables --------------------------------------------------------------------------------------------------------


def make_table(x, codebook, layout, place, cuda):
    """A table in pinned host memory, or in device memory, equal to the one that the CPU makes."""
    arguments = {"codebook": codebook, **layout_arguments(layout, codebook.row_bytes)}
    table = ibp.compress(x.to(cuda) if place == "device" else x, device=cuda, **arguments)
    assert table.scheme == "planes" and table.is_pinned() == (place == "pinned")
    assert_same_table(table, ibp.compress(x, device="cpu", **arguments))
    return table


@pytest.mark.parametrize("place", ["pinned", "device"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_table_from_cpu_and_gpu(cuda, kind, layout, place):
    """compress() on both with one codebook; then items fetched, once and again, in all orders."""
    for element_bytes in ELEMENT_BYTES:
        for columns in (1, 5, 16, 75, 256):
            rng, codebook = compressible(element_bytes, max(8, columns * element_bytes), kind, columns)
            x = torch.from_numpy(mostly_first(rng, 240, codebook))
            table = make_table(x, planes_codebook(codebook), layout, place, cuda)
            ids = torch.randint(240, (300,))
            assert_same_bits(ibp.index_select(table, ids.to(cuda), check=True).cpu(), x[ids])
            assert_same_bits(table.decompress(device=cuda, check=True).cpu(), x)
            assert_same_bits(table[77:200].cpu(), x[77:200])


def compressible(element_bytes, row_bytes, kind, seed=0):
    """(generator, a codebook) with which mostly_first() makes rows that save something, even of one element. A default
    of 0 for every other seed.
    """
    rng = np.random.default_rng([seed, element_bytes, row_bytes])
    codebook = any_codebook(
        rng,
        element_bytes,
        row_bytes // element_bytes,
        1,
        {1: 0, 2: 8, 4: 16, 8: 40}[element_bytes],
        (1, 2, 2),
        kind,
        seed,
    )
    return rng, codebook


def mostly_first(rng, num_rows, codebook):
    """Rows whose elements have the first entry, or the default; a few rows of anything."""
    rows = ranked_rows(rng, num_rows, codebook)
    elements = rows.view(f"<u{codebook.element_bytes}").astype(np.uint64)
    _, residuals = reference.split(elements, *codebook.split)
    named = reference.join(
        np.broadcast_to(codebook.entries.astype(np.uint64)[:, 0], elements.shape), residuals, *codebook.split
    )
    frequent = np.uint64(codebook.default) if codebook.listed else named
    keep = (rng.random(elements.shape) < 0.08) | (rng.random((num_rows, 1)) < 0.04)
    return bytes_of(np.where(keep, elements, frequent).astype(f"<u{codebook.element_bytes}"))


@pytest.mark.parametrize(
    "layout, place", [("slots", "pinned"), ("slots of 32", "device"), ("in place", "device"), ("packed", "pinned")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_out_at_any_address(cuda, kind, layout, place):
    """Views that start anywhere; not a byte beside them is touched."""
    for element_bytes in ELEMENT_BYTES:
        for row_bytes in (8, 24, 64, 104, 600, 4096):
            rng, codebook = compressible(element_bytes, row_bytes, kind, row_bytes // 8)
            x = torch.from_numpy(mostly_first(rng, 90, codebook))
            table = make_table(x, planes_codebook(codebook), layout, place, cuda)
            ids = torch.randint(90, (50,))
            on_gpu, expected = ids.to(cuda), x[ids].reshape(-1)
            for offset in (0, 1, 2, 4, 7, 8, 15, 16):
                memory = torch.full((offset + 50 * row_bytes + 37,), 0xA5, dtype=torch.uint8, device=cuda)
                ibp.index_select(
                    table, on_gpu, out=memory[offset : offset + 50 * row_bytes].view(50, row_bytes), check=True
                )
                wanted = torch.full_like(memory, 0xA5, device=CPU)
                wanted[offset : offset + 50 * row_bytes] = expected
                assert_same_bits(memory.cpu(), wanted)


ITEMS_AND_ROWS = [
    (70000, 4096),
    (100_001, 4096),
    (4, 4096),
    (3, 104),
    (250, 64),
    (64, 248),
    (1, 8),
    (1001, 8),
    (131, 40),
]


@pytest.mark.parametrize("sizes, kind, place", pairwise(ITEMS_AND_ROWS, KINDS, ["pinned", "device"]), ids=str)
def test_items_that_are_not_rows(cuda, sizes, kind, place):
    """Items of several rows, several items a row, items that start within an element; a short last row; and the same
    bytes in one dimension.
    """
    item_bytes, row_bytes = sizes
    for element_bytes in ELEMENT_BYTES:
        rng, codebook = compressible(element_bytes, row_bytes, kind, seed=item_bytes)
        num_items = 7 if item_bytes > 4096 else 3 + max(61, 20 * row_bytes // item_bytes)
        flat = (
            torch.from_numpy(mostly_first(rng, -(-num_items * item_bytes // row_bytes), codebook))
            .reshape(-1)[: num_items * item_bytes]
            .clone()
        )
        layout = LAYOUTS[(element_bytes + item_bytes) % 4]
        x = flat.view(num_items, item_bytes)
        codebook = planes_codebook(codebook)
        table = make_table(x, codebook, layout, place, cuda)
        ids = torch.randint(num_items, (100,))
        assert_same_bits(ibp.index_select(table, ids.to(cuda), check=True).cpu(), x[ids])
        assert_same_bits(table.decompress(device=cuda, check=True).cpu(), x)
        assert_same_bits(table[3:6].cpu(), x[3:6])
        line = make_table(flat, codebook, layout, place, cuda)
        at = torch.randint(len(flat), (500,))
        assert_same_bits(ibp.index_select(line, at.to(cuda), check=True).cpu(), flat[at])
        for first, last in ((0, 1), (1, len(flat)), (row_bytes - 1, row_bytes + 2), (len(flat) // 3, len(flat) - 1)):
            assert_same_bits(line[first:last].cpu(), flat[first:last])


# ---- bytes that are no coded rows ----------------------------------------------------------------------------------


def swapped(rng, coded, count):
    """A coded row with two bits exchanged: as many ones as before, elsewhere."""
    bits = np.unpackbits(np.frombuffer(coded, np.uint8), bitorder="little")
    for _ in range(count):
        a, b = rng.integers(0, min(len(bits), 8 * 40), 2)
        other = bits.copy()
        other[[a, b]] = bits[[b, a]]
        yield np.packbits(other, bitorder="little").tobytes()


def hostile_rows(rng, codec, rows, row_bytes):
    """Coded rows, those rows damaged, and bytes that never were any; none empty, none longer than a row."""
    found = []
    for row in rows:
        coded = codec.encode(row.tobytes())
        found += [coded, *damaged(rng, coded), *swapped(rng, coded, 8)]
        for _ in range(3):
            found.append(
                int(rng.integers(0, 40)).to_bytes(3, "little")[: int(rng.integers(1, 4))]
                + rng.bytes(int(rng.integers(0, 20)))
            )
    most = min(row_bytes, 65535) - 1  # a length of more marks a default row
    return [row[:most] for row in found if row[:most]]


def as_table(rows, codebook, slot_bytes):
    """A table whose coded rows are the given bytes, whatever they are; each is shorter than a row."""
    row_bytes, num_rows = codebook.row_bytes, len(rows)
    lengths = torch.tensor([len(row) for row in rows]).to(torch.uint16)
    *bases, overflow_bytes = OPS.index_rows(lengths, num_rows * row_bytes, row_bytes, slot_bytes).tolist()
    slots, overflow = np.full(num_rows * slot_bytes, 0x5A, np.uint8), np.full(overflow_bytes, 0x5A, np.uint8)
    end = 0
    for number, row in enumerate(rows):
        row = np.frombuffer(row, np.uint8)
        part = row[slot_bytes:]
        slots[number * slot_bytes :][: min(len(row), slot_bytes)] = row[:slot_bytes]
        overflow[end : end + len(part)] = part
        end += len(part) if slot_bytes == 0 else -(-len(part) // 32) * 32
    assert end == overflow_bytes
    return ibp.CompressedTensor(shape=(num_rows, row_bytes), dtype=torch.uint8, scheme="planes", row_bytes=row_bytes,
        slot_bytes=slot_bytes,
                                slots=torch.from_numpy(slots), overflow=torch.from_numpy(overflow), lengths=lengths,
                                bases=torch.tensor(bases if overflow_bytes else [], dtype=torch.int64),
                                codebook=codebook)  # fmt: skip


def decode_row_by_row(table, device):
    """(bytes of every row, the faults that decoding each row alone notes)."""
    size = table.row_bytes
    out = torch.full((table.num_rows * size,), 0xA5, dtype=torch.uint8, device=device)
    faults = torch.zeros(table.num_rows, 4, dtype=torch.int64, device=device)
    arguments = values_of(table, device)
    for row in range(table.num_rows):
        OPS.decode_bytes(*arguments, row * size, (row + 1) * size, 0, out[row * size : (row + 1) * size], faults[row])
    return out.cpu(), faults[:, :3].cpu()


def check_hostile(cuda, table):
    """The GPU accepts and refuses the rows that the C core does; refused ones are zeros. Returns how many of each."""
    by_c, faults_of_c = decode_row_by_row(table, CPU)
    refused = faults_of_c[:, 0] == CORRUPT
    numbers = torch.arange(table.num_rows)
    assert torch.equal(
        faults_of_c,
        torch.where(refused[:, None], torch.stack([torch.full_like(numbers, CORRUPT), numbers, numbers], 1), 0),
    )
    assert not by_c.view(table.num_rows, -1)[refused].any()
    on_gpu = table.to(cuda)
    by_cuda, faults = decode_row_by_row(on_gpu, cuda)
    assert_same_bits(by_cuda, by_c)
    assert torch.equal(faults, faults_of_c)
    for pinned_or_device in (on_gpu, table.pin_memory() if cuda.type == "cuda" else table):
        ids = torch.randperm(table.num_rows)
        fetched = torch.empty(len(ids), table.row_bytes, dtype=torch.uint8, device=cuda)
        if refused.any():
            with pytest.raises(ibp.CorruptTableError):
                ibp.index_select(pinned_or_device, ids.to(cuda), out=fetched, check=True)
        else:
            ibp.index_select(pinned_or_device, ids.to(cuda), out=fetched, check=True)
        assert_same_bits(fetched.cpu(), by_c.view(table.num_rows, -1)[ids])
    return int(refused.sum()), int((~refused).sum())


def codec_of(codebook):
    return row_codecs.PlanesCodec(
        codebook.row_bytes,
        codebook.element_bytes,
        codebook.rotate,
        codebook.residual_bits,
        list(codebook.digit_bits),
        codebook.per_column,
        codebook.listed,
        codebook.default,
        codebook.closed,
        codebook.words(CPU).numpy().tobytes(),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element_bytes", ELEMENT_BYTES)
def test_hostile_rows(cuda, element_bytes, kind, layout):
    rng, refused, accepted = np.random.default_rng([element_bytes, KINDS.index(kind), LAYOUTS.index(layout)]), 0, 0
    for number, columns in enumerate([1, 3, 33, 101, 127, 128, 300]):
        residual_bits = int(rng.integers(0, 8 * element_bytes + 1)) if number % 2 else 8 * element_bytes - 6
        codebook = any_codebook(
            rng,
            element_bytes,
            columns,
            number % 2,
            residual_bits,
            DIGIT_BITS[(number + element_bytes) % 9],
            kind,
            number // 2,
        )
        rows = list(ranked_rows(rng, 3, codebook))
        if kind == "listed":
            rows += list(rows_of_k(rng, codebook, [0, 1, min(2, columns), max(0, columns - 2), columns // 2, columns]))
            rows += list(closed_of(codebook, rows_of_k(rng, codebook, [min(2, columns), max(0, columns - 2)])))
        ours = planes_codebook(codebook)
        bad = hostile_rows(rng, codec_of(ours), rows, codebook.row_bytes)
        if not bad:  # a row of one byte has no coded form that is shorter
            continue
        counts = check_hostile(cuda, as_table(bad, ours, slot_bytes_of(layout, codebook.row_bytes)))
        refused, accepted = refused + counts[0], accepted + counts[1]
    assert refused > 50 and accepted > 50


@pytest.mark.parametrize("columns", [4097, 32768, 65536])
def test_hostile_long_lists(cuda, columns):
    """Positions out of order, equal, past the row; too few and too many."""
    rng = np.random.default_rng(columns)
    codebook = random_codebook(rng, 1, columns, 0, 4, (2, 1), "listed")
    rows = rows_of_k(rng, codebook, [2, 40, 400, columns // 2, columns - 40, columns - 2])
    ours = planes_codebook(codebook)
    codec = codec_of(ours)
    bad = [row for rows in (rows, closed_of(codebook, rows)) for row in hostile_rows(rng, codec, rows, columns)]
    refused, accepted = check_hostile(cuda, as_table(bad, ours, 0))
    assert refused > 50 and accepted > 50


@pytest.mark.parametrize("is_listed", [0, 1])
@pytest.mark.parametrize("columns", [37, 101, 301, 4097])
def test_wrong_lists(cuda, columns, is_listed):
    """Lists of two positions, all pairs of some: in order, the wrong way round, equal, and past the row."""
    codebook = reference.Codebook(1, columns, 0, 8, (), False, True, 0, 1, np.zeros((1, 0), np.uint8))
    k, size = 2 if is_listed else columns - 2, reference.header_bytes(columns)
    of, low = reference.choose_form(columns, k)
    assert of == ("listed" if is_listed else "not listed")
    rows = []
    for first in (0, 1, 2, 8, 31, 32, columns - 2, columns - 1, columns, columns + 1):
        for second in (0, 1, 2, 8, 31, 32, columns - 2, columns - 1, columns, columns + 1):
            upper = np.zeros(reference.num_upper_bits(2, low, columns), np.uint8)
            places = np.array([first >> low, 1 + (second >> low)])
            if places.max() >= len(upper):
                continue
            upper[places] = 1
            lows = np.array([first, second]) % 2**low
            rows.append(
                (k | 1 << (8 * size - 1)).to_bytes(size, "little")
                + reference.pack_fields(upper, 1)
                + reference.pack_fields(lows, low)
            )
    refused, accepted = check_hostile(cuda, as_table(rows, planes_codebook(codebook), 0))
    assert refused > 10 and accepted >= 21


@pytest.mark.parametrize("kind", KINDS)
def test_entries_that_are_no_symbols(cuda, kind):
    """Entries with more bits than symbols have, which only the operations take: the same bytes from both."""
    rng = np.random.default_rng(0)
    for number in range(40):
        element_bytes = ELEMENT_BYTES[number % 4]
        codebook = any_codebook(
            rng, element_bytes, 24, number % 2, int(rng.integers(1, 8 * element_bytes)), (1, 2, 2), kind, number // 2
        )
        rows = [codec_of(planes_codebook(codebook)).encode(row.tobytes()) for row in ranked_rows(rng, 40, codebook)]
        table = as_table([row for row in rows if len(row) < codebook.row_bytes], planes_codebook(codebook), 0)
        words = torch.from_numpy(rng.integers(0, 256, table.codebook.words(torch.device("cpu")).numel(), np.uint8))
        out = []
        for device, near in ((CPU, table), (cuda, table.to(cuda))):
            arguments = values_of(near, device)
            arguments[4] = words.to(device)
            out.append(torch.full((len(table) * table.row_bytes,), 0xA5, dtype=torch.uint8, device=device))
            fault = fault_on(device)
            OPS.decode_bytes(*arguments, 0, len(out[-1]), 0, out[-1], fault)
            assert fault.tolist() == [0, 0, 0, 0]
        assert_same_bits(out[1].cpu(), out[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_tables(cuda, kind, layout):
    """Other bytes in the index too: lengths past the row, bases anywhere."""
    for seed in range(12):
        element_bytes, row_bytes = ELEMENT_BYTES[seed % 4], [40, 64, 104, 600, 4104][seed % 5]
        rng, codebook = compressible(element_bytes, row_bytes, kind, seed)
        x = torch.from_numpy(mostly_first(rng, 70, codebook))
        table = ibp.compress(
            x, codebook=planes_codebook(codebook), device="cpu", memory="host", **layout_arguments(layout, row_bytes)
        )
        for name, most in (("slots", 256), ("overflow", 256), ("lengths", 65536), ("bases", 2**62)):
            tensor = getattr(table, name)
            if tensor.numel():
                at = rng.integers(0, tensor.numel(), 1 + seed % 4)
                tensor.numpy()[at] = rng.integers(0, [most, row_bytes][int(name == "lengths" and seed % 2)], len(at))
        check_hostile(cuda, table)


def test_the_gpu_is_well(cuda):
    """After all that was read: no error waits, and tables are read as ever."""
    torch.cuda.synchronize() if cuda.type == "cuda" else None
    x = embedding(300, 64)
    table = ibp.compress(x, scheme="planes", device=cuda)
    assert_same_bits(table.decompress(device=cuda, check=True).cpu(), x)


# ---- choosing ------------------------------------------------------------------------------------------------------

SETS = {
    "weights": lambda: embedding(4000, 64, torch.bfloat16),
    "wide": lambda: embedding(3000, 256),
    "one-hot": lambda: one_hot_rows(3000, 120),
    "clipped": lambda: torch.randn(3000, 100).relu(),
    "scaled columns": lambda: torch.randn(4000, 32) * 2.0 ** torch.arange(-16, 16),
    "ids": lambda: torch.randint(10**6, (2000, 16)),
    "noise": lambda: make_tensor((500, 64), torch.uint8, "random"),
}


@pytest.mark.parametrize("layout", ["slots", "packed"])
@pytest.mark.parametrize("name", SETS)
def test_auto(cuda, name, layout):
    """What is chosen on the GPU is what is chosen on the CPU, and no scheme asked for by name does better."""
    x = SETS[name]()
    here, there = (ibp.compress(x, device=device, layout=layout) for device in ("cpu", cuda))
    assert there.scheme == here.scheme
    assert there.stored_bytes <= 1.001 * here.stored_bytes and there.nbytes <= 1.001 * here.nbytes
    assert_same_bits(ibp.index_select(there, torch.arange(len(x)).to(cuda), check=True).cpu(), x)
    if layout == "packed":
        for scheme in ("ibp", "planes", "raw"):
            assert there.stored_bytes <= 1.001 * ibp.compress(x, scheme=scheme, device=cuda, layout=layout).stored_bytes
    on_gpu = ibp.compress(x.to(cuda), layout=layout)
    assert on_gpu.device.type == cuda.type
    assert_same_table(on_gpu, there)
    sizes = ibp.estimate(x, device="cpu"), ibp.estimate(x.to(cuda))
    assert sizes[1].keys() == {"raw", "ibp", "planes"} and sizes[1] == pytest.approx(sizes[0], abs=1e-3)
