"""Writes the golden files with the numpy reference: `python tests/golden/make.py`. A change of the format is a change
of these.

*.npz: one table each, original bytes and coded ones. corrupt_rows.json: coded rows that no decoder may accept.
corrupt_tables.json: edits of a golden table, and which rows a decoder must then report.
"""

import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))
import reference  # noqa: E402


def float_rows(rng, num_rows, row_bytes):
    """Trained-embedding-like float32 rows, cut to row_bytes."""
    return rng.normal(0, 0.02, (num_rows, -(-row_bytes // 4))).astype("<f4").view(np.uint8)[:, :row_bytes]


def sparse_rows(rng, num_rows, row_bytes):
    """A few 1.0 in rows of zeros: many rows alike, some twice as full."""
    dense = rng.random((num_rows, 1)) < 0.2
    ones = rng.random((num_rows, -(-row_bytes // 4))) < np.where(dense, 0.5, 0.05)
    return ones.astype("<f4").view(np.uint8)[:, :row_bytes]


def random_rows(rng, num_rows, row_bytes):
    return rng.integers(0, 256, (num_rows, row_bytes), np.uint8)


def majority_masks(rows, threshold):
    """Masks and bitvals of the bits on which at least a share `threshold` of the rows agree."""
    share = np.unpackbits(rows, axis=1, bitorder="little").mean(axis=0)
    mask = (share >= threshold) | (share <= 1 - threshold)
    bits = np.stack([mask, mask & (share >= 0.5)]).astype(np.uint8)
    return np.packbits(bits, axis=1, bitorder="little")


def random_masks(rng, row_bytes):
    mask = rng.integers(0, 256, row_bytes, np.uint8)
    return np.stack([mask, mask & rng.integers(0, 256, row_bytes, np.uint8)])


# name: rows, item_bytes, row_bytes, chunk_bytes, flag_all, slot_bytes, bytes cut off the last row
CASES = {
    "slots_chunk4": (float_rows, 128, 128, 4, False, 96, 0),
    "slots_chunk1": (float_rows, 70, 70, 1, False, 32, 0),
    "slots_chunk8_short_last_row": (sparse_rows, 10, 130, 8, False, 32, 70),
    "slots_small_with_long_parts": (sparse_rows, 200, 200, 4, False, 32, 0),
    "packed_chunk2": (float_rows, 50, 50, 2, False, 0, 0),
    "packed_chunk8_tail_chunk": (float_rows, 99, 99, 8, False, 0, 0),
    "packed_flag_all": (sparse_rows, 60, 60, 4, True, 0, 0),
    "packed_items_span_rows": (float_rows, 99, 64, 4, False, 0, 50),
    "in_place_chunk2": (sparse_rows, 66, 66, 2, False, 66, 0),
    "in_place_flag_all_short_last_row": (float_rows, 3, 45, 1, True, 45, 6),
    "in_place_one_byte_rows": (sparse_rows, 1, 1, 1, False, 1, 0),
    "slots_of_random_rows": (random_rows, 64, 64, 4, False, 32, 0),
    "packed_wide_index": (random_rows, 640, 640, 2, False, 0, 0),
    "packed_one_pair": (sparse_rows, 48, 48, 4, False, 0, 0),
    "raw": (random_rows, 24, 96, 4, False, 96, 24),
    "empty": (random_rows, 32, 32, 4, False, 0, 0),
}


def make_codebook(name, rng, rows, chunk_bytes, flag_all):
    if name == "raw":
        return None
    row_bytes = rows.shape[1]
    if name == "packed_one_pair":
        masks = np.tile(np.frombuffer(bytes.fromhex("FFFFFF7F00000000"), np.uint8).reshape(2, 4), row_bytes // 4)
    elif name in ("empty", "packed_wide_index"):
        masks = random_masks(rng, row_bytes)
        rows[::3] = rows[::3] & ~masks[0] | masks[1]
    elif name == "slots_of_random_rows":
        masks = random_masks(rng, row_bytes)
    else:
        masks = majority_masks(rows, 0.8)
    return reference.make_codebook(masks[0], masks[1], chunk_bytes, flag_all)


def make_table(number, name):
    rows_of, item_bytes, row_bytes, chunk_bytes, flag_all, slot_bytes, cut = CASES[name]
    rng = np.random.default_rng(number)
    rows = rows_of(rng, 0 if name == "empty" else 9 if name == "packed_wide_index" else 70, row_bytes).copy()
    codebook = make_codebook(name, rng, rows, chunk_bytes, flag_all)
    data = rows.reshape(-1)[: rows.size - cut]
    data = data[: data.size // item_bytes * item_bytes]
    table = reference.encode_table(data, row_bytes, slot_bytes, codebook)
    assert reference.decode_table(table) == data.tobytes()
    fields = {"original": data, "item_bytes": item_bytes, "row_bytes": row_bytes, "slot_bytes": table.slot_bytes}
    if codebook is not None:
        fields |= {
            "chunk_bytes": chunk_bytes,
            "flag_all": flag_all,
            "palette": codebook.palette,
            "index": codebook.index,
        }
    arrays = {"lengths": table.lengths, "bases": table.bases, "slots": table.slots, "overflow": table.overflow}
    np.savez_compressed(HERE / f"{name}.npz", **fields, **arrays)
    return table


def make_corrupt_rows(rng):
    """Right rows made wrong: one byte less, one more, a participation bit flipped, nothing at all."""
    rows = []
    for chunk_bytes, flag_all in [(1, False), (2, False), (4, False), (8, False), (4, True)]:
        row = sparse_rows(rng, 1, 50)[0]
        codebook = reference.make_codebook(bytes([255] * 50), bytes(50), chunk_bytes, flag_all)
        coded = reference.encode_row(codebook, row)
        wrong = {
            "a byte less": coded[:-1],
            "a byte more": coded + b"\0",
            "nothing": b"",
            "the row itself": row.tobytes(),
        }
        wrong["participation bit 0 flipped"] = bytes([coded[0] ^ 1]) + coded[1:]
        wrong["no chunk participates"] = bytes(len(coded))
        mask, bitval = (array.tobytes().hex() for array in reference.masks_of(codebook))
        common = {
            "mask": mask,
            "bitval": bitval,
            "chunk_bytes": chunk_bytes,
            "flag_all": flag_all,
            "status": "IBP_CORRUPT_ROW",
        }
        rows += [{"why": why, **common, "coded": bytes_.hex()} for why, bytes_ in wrong.items()]
    return rows


def corrupt_row_numbers(table):
    numbers = []
    for row in range(table.num_rows):
        try:
            reference.decode_table_row(table, row)
        except reference.CorruptRow:
            numbers.append(row)
    return numbers


def make_corrupt_tables(tables):
    edits = [
        ("slots_chunk4", "lengths", 3, 1), ("slots_chunk4", "lengths", 3, 127), ("slots_chunk4", "lengths", 69, 129),
        ("slots_chunk4", "lengths", 64, 65535), ("slots_small_with_long_parts", "lengths", 2, 201),
        ("slots_small_with_long_parts", "bases", 1, 2**64 - 1), ("slots_small_with_long_parts", "bases", 2, 2**63),
        ("slots_small_with_long_parts", "bases", 0, 2**64 - 32), ("slots_small_with_long_parts", "slots", None, 100),
        ("slots_small_with_long_parts", "overflow", None, 33), ("slots_small_with_long_parts", "bases", None, 0),
        ("packed_chunk2", "bases", 1, 2**32), ("packed_chunk2", "overflow", None, 0),
        ("packed_chunk2", "lengths", 5, 51),
        ("in_place_chunk2", "slots", None, 66 * 35 + 1), ("in_place_chunk2", "lengths", 0, 67),
        ("slots_chunk8_short_last_row", "lengths", 69, 61), ("packed_items_span_rows", "bases", None, 0),
    ]  # fmt: skip
    made = []
    for name, array, at, value in edits:
        table = edit_table(tables[name], array, at, value)
        made.append(
            {"table": name, "array": array, "at": at, "value": value, "corrupt_rows": corrupt_row_numbers(table)}
        )
        assert made[-1]["corrupt_rows"], f"no row of {name} is corrupt after {array}[{at}] = {value}"
    return made


def edit_table(table, array, at, value):
    """A copy of table with array[at] = value; at None: the array cut to `value` entries."""
    edited = dict(vars(table))
    if at is None:
        edited[array] = edited[array][:value]
    else:
        edited[array] = edited[array].copy()
        edited[array][at] = value
    return reference.Table(**edited)


def write_json(name, entries):
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    (HERE / name).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    golden_tables = {name: make_table(number, name) for number, name in enumerate(CASES)}
    write_json("corrupt_rows.json", make_corrupt_rows(np.random.default_rng(100)))
    write_json("corrupt_tables.json", make_corrupt_tables(golden_tables))
