"""Writes clusters_*.npz with the numpy references: `python tests/golden/make_clusters.py`. A change of the format is a
change of these.

Each file has a table as make.py's have one, the codebooks of its clusters, and coded rows that no decoder may accept.
The encoder and the decoder of rows with clusters (FORMAT.md section 7) that are here also serve
tests/schemes/test_clusters.py.
"""

import dataclasses
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "support")]
import reference  # noqa: E402
import reference_planes  # noqa: E402
from golden.make_planes import FIELDS, adversarial_rows, joined, random_codebook  # noqa: E402

CORRUPT_ROW = (reference.CorruptRow, reference_planes.CorruptRow)
PLANES_FIELDS = [field for field in FIELDS if field != "entries"]

# ---- one row --------------------------------------------------------------------------------------------------------


def coder_of(codebook):
    return reference_planes if isinstance(codebook, reference_planes.Codebook) else reference


def encode_row(codebooks, row):
    """The coded row, whether or not it is smaller than the row."""
    coded = [coder_of(codebook).encode_row(codebook, bytes(row)) for codebook in codebooks]
    best = min(range(len(coded)), key=lambda k: len(coded[k]))  # the first of equal ones
    return bytes([best]) + coded[best]


def decode_row(codebooks, coded):
    """The row; raises one of CORRUPT_ROW if coded is none."""
    if len(coded) == 0 or coded[0] >= len(codebooks):
        raise reference.CorruptRow("the row names no codebook")
    codebook = codebooks[coded[0]]
    return coder_of(codebook).decode_row(codebook, bytes(coded[1:]))


def refused(codebooks, coded):
    try:
        decode_row(codebooks, coded)
    except CORRUPT_ROW:
        return True
    return False


# ---- a table -------------------------------------------------------------------------------------------------------


def encode_table(codebooks, data, slot_bytes):
    """Codes a whole tensor's bytes, uint8. The table's own codebook is None."""
    return next(encode_tables(codebooks, data, [slot_bytes]))


def encode_tables(codebooks, data, slot_sizes):
    """The tables of several slot sizes."""
    row_bytes = codebooks[0].row_bytes
    rows = np.split(data, range(row_bytes, len(data), row_bytes))
    coded = [encode_row(codebooks, reference.padded(row, row_bytes)) for row in rows]
    for slot_bytes in slot_sizes:
        table = empty_table(codebooks, len(data), slot_bytes)
        stored = [reference.stored_form(table, r, row, coded[r]) for r, row in enumerate(rows)]
        reference.place_rows(table, stored)
        yield table


def empty_table(codebooks, num_bytes, slot_bytes):
    arrays = [np.zeros(0, dtype) for dtype in (np.uint16, np.uint64, np.uint8, np.uint8)]
    first = codebooks[0]
    return reference.Table(num_bytes, first.row_bytes, slot_bytes, None, *arrays, default=default_of(first))


def default_of(codebook):
    """What a default row repeats."""
    is_planes = isinstance(codebook, reference_planes.Codebook)
    return codebook.default.to_bytes(codebook.element_bytes, "little") if is_planes else b"\0"


def coded_rows(table):
    """The rows that have coded bytes."""
    return [row for row in np.flatnonzero(table.lengths).tolist() if not table.is_default(row)]


def decode_table_row(codebooks, table, row):
    """The valid(row) original bytes of a row."""
    stored = reference.stored_row(table, row).tobytes()
    if table.is_default(row):
        return table.default_row(row)
    return decode_row(codebooks, stored)[: table.valid(row)] if table.lengths[row] else stored


def decode_table(codebooks, table):
    return b"".join(decode_table_row(codebooks, table, row) for row in range(table.num_rows))


# ---- codebooks and rows of several kinds ---------------------------------------------------------------------------


def make_masks(rng, count, row_bytes, chunk_bytes, flag_all=False):
    """Codebooks of scheme ibp: chunks without a mask, full ones, and bits here and there."""
    return [make_mask(rng, row_bytes, chunk_bytes, flag_all) for _ in range(count)]


def make_mask(rng, row_bytes, chunk_bytes, flag_all):
    kind = np.repeat(rng.integers(0, 4, -(-row_bytes // chunk_bytes)), chunk_bytes)[:row_bytes]
    mask = np.where(kind == 0, 0, np.where(kind == 1, 255, rng.integers(0, 256, row_bytes))).astype(np.uint8)
    return reference.make_codebook(mask, mask & rng.integers(0, 256, row_bytes, np.uint8), chunk_bytes, flag_all)


def make_entries(rng, count, element_bytes, columns, rotate, residual_bits, digit_bits, kind):
    """Codebooks of scheme planes that differ in their entries."""
    first = random_codebook(rng, element_bytes, columns, rotate, residual_bits, digit_bits, kind)
    entries = [
        random_codebook(rng, element_bytes, columns, rotate, residual_bits, digit_bits, kind).entries
        for _ in range(count - 1)
    ]
    return [first, *(dataclasses.replace(first, entries=e) for e in entries)]


def make_rows(rng, codebooks, num_rows):
    """Rows, uint8 [num_rows, row_bytes], each of a kind that one of the codebooks is for; some of noise,
    some of zeros.
    """
    return np.concatenate([make_row(rng, codebooks[k]) for k in rng.integers(0, len(codebooks), num_rows)])


def make_row(rng, codebook):
    noise = rng.integers(0, 256, (1, codebook.row_bytes), np.uint8)
    chance = rng.random()
    if chance < 0.1:
        return noise if chance < 0.05 else np.zeros_like(noise)
    if isinstance(codebook, reference_planes.Codebook):
        return adversarial_rows(rng, 2, codebook)[1:]
    mask, bitval = reference.masks_of(codebook)
    return np.where(rng.random(noise.shape) < 0.99, noise & ~mask | bitval, noise).astype(np.uint8)


# ---- the files -----------------------------------------------------------------------------------------------------

# name: how the codebooks are made, how many, the arguments, rows, slot_bytes, bytes cut off the last row
CASES = {
    "ibp_slots": (make_masks, 3, (60, 4), 40, 32, 0),
    "ibp_packed_short_last_row": (make_masks, 5, (45, 1), 40, 0, 5),
    "ibp_in_place_flag_all": (make_masks, 2, (99, 8, True), 40, 99, 50),
    "ibp_256_clusters": (make_masks, 256, (10, 2), 100, 0, 0),
    "planes_slots": (make_entries, 4, (4, 24, 1, 5, (2, 1), "dense"), 36, 64, 0),
    "planes_packed_per_column": (make_entries, 3, (2, 30, 1, 2, (1, 2), "per_column"), 40, 0, 11),
    "planes_in_place_listed": (make_entries, 2, (4, 40, 0, 9, (2, 2), "listed"), 33, 160, 4),
    "planes_256_clusters": (make_entries, 256, (1, 24, 0, 2, (1, 1), "dense"), 100, 0, 0),
}


def wrong_rows(rng, codebooks, coded):
    """A coded row with other numbers of a codebook, of wrong lengths, and with bits flipped: not all of these are
    corrupt.
    """
    numbers = {0, 1, len(codebooks) - 1, len(codebooks), 128, 255}
    yield from (bytes([number % 256]) + coded[1:] for number in sorted(numbers))
    yield from (coded[:1], coded[:-1], coded[1:], coded + b"\0")
    for at in rng.integers(0, len(coded), 4):
        yield coded[:at] + bytes([coded[at] ^ (1 << int(rng.integers(0, 8)))]) + coded[at + 1 :]


def make_case(number, name):
    make, count, arguments, num_rows, slot_bytes, cut = CASES[name]
    rng = np.random.default_rng([7, number])
    codebooks = make(rng, count, *arguments)
    rows = make_rows(rng, codebooks, num_rows)
    data = rows.reshape(-1)[: rows.size - cut]
    table = encode_table(codebooks, data, slot_bytes)
    assert decode_table(codebooks, table) == data.tobytes()
    coded = [reference.stored_row(table, row).tobytes() for row in coded_rows(table)[:4]]
    corrupt = [
        bad
        for good in coded
        for bad in wrong_rows(rng, codebooks, good)
        if 0 < len(bad) <= table.row_bytes and refused(codebooks, bad)
    ]
    arrays = {array: getattr(table, array) for array in ("lengths", "bases", "slots", "overflow")}
    np.savez_compressed(
        HERE / f"clusters_{name}.npz",
        original=data,
        slot_bytes=slot_bytes,
        **arrays,
        **fields_of(codebooks),
        **joined("corrupt", corrupt),
    )


def fields_of(codebooks):
    """What the codebooks share, and their masks or entries one after the other."""
    first = codebooks[0]
    if isinstance(first, reference.Codebook):
        return {
            "chunk_bytes": first.chunk_bytes,
            "flag_all": first.flag_all,
            "masks": np.stack([reference.masks_of(one) for one in codebooks]),
        }
    fields = {field: np.asarray(getattr(first, field)) for field in PLANES_FIELDS}
    fields |= {
        "default": np.uint64(first.default),
        "closed": np.uint64(first.closed),
        "digit_bits": np.array(first.digit_bits, np.int64),
    }
    return fields | {"entries": np.stack([one.entries for one in codebooks])}


def load(name):
    """(codebooks, original bytes, table, corrupt rows) of a golden file."""
    golden = np.load(HERE / f"clusters_{name}.npz")
    if "masks" in golden:
        settings = int(golden["chunk_bytes"]), bool(golden["flag_all"])
        codebooks = [reference.make_codebook(mask, bitval, *settings) for mask, bitval in golden["masks"]]
    else:
        fields = {field: golden[field].tolist() for field in PLANES_FIELDS}
        codebooks = [reference_planes.Codebook(**fields, entries=entries) for entries in golden["entries"]]
    arrays = [golden[array] for array in ("lengths", "bases", "slots", "overflow")]
    sizes = len(golden["original"]), codebooks[0].row_bytes, int(golden["slot_bytes"])
    table = reference.Table(*sizes, None, *arrays, default=default_of(codebooks[0]))
    corrupt = np.split(golden["corrupt"], golden["corrupt_lengths"].cumsum())[:-1]
    return codebooks, golden["original"], table, [row.tobytes() for row in corrupt]


if __name__ == "__main__":
    for case_number, case_name in enumerate(CASES):
        make_case(case_number, case_name)
