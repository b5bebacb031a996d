"""The golden files: decoded and coded again by the numpy reference and by the C core, to the same bytes."""

import numpy as np
import pytest
import torch

import ibp
import reference
import row_codecs
from golden.load import (
    CORRUPT_ROWS,
    CORRUPT_TABLES,
    GOLDEN,
    arrays_of,
    core_codebook,
    load,
    op_arguments,
    reference_table,
)
from golden.make import CASES, edit_table
from handles import BY_VALUES

CORRUPT = 3  # IBP_CORRUPT_ROW
CPU = torch.device("cpu")


def core_decode(table, start, end):
    """(bytes start to end, fault) as the C core decodes them."""
    out, fault = torch.full((end - start,), 0xA5, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    BY_VALUES.decode_bytes(*op_arguments(table, *arrays_of(table, CPU)), start, end, 0, out, fault)
    return out.numpy(), fault.tolist()


def test_every_case_has_a_file():
    assert {path.stem for path in GOLDEN.glob("*.npz") if not path.stem.startswith(("planes_", "clusters_"))} == set(
        CASES
    )


@pytest.mark.parametrize("name", CASES)
def test_reference_decodes(name):
    golden = load(name)
    assert reference.decode_table(reference_table(golden)) == golden["original"].tobytes()


@pytest.mark.parametrize("name", CASES)
def test_reference_encodes(name):
    golden = load(name)
    table = reference_table(golden)
    again = reference.encode_table(golden["original"], table.row_bytes, table.slot_bytes, table.codebook)
    for array in ("lengths", "bases", "slots", "overflow"):
        np.testing.assert_array_equal(getattr(again, array), golden[array], err_msg=array)


@pytest.mark.parametrize("name", CASES)
def test_core_decodes(name):
    golden = load(name)
    out, fault = core_decode(reference_table(golden), 0, len(golden["original"]))
    assert fault[0] == 0
    np.testing.assert_array_equal(out, golden["original"])


@pytest.mark.parametrize("name", [name for name in CASES if name != "raw"])
def test_core_encodes(name):
    golden = load(name)
    table = reference_table(golden)
    data, num_bytes = torch.from_numpy(golden["original"].copy()), len(golden["original"])
    codebook = core_codebook(table.codebook)
    lengths = torch.ops.ibp.measure_rows(data, codebook.words(CPU), codebook.codec)
    expected = golden["lengths"] if len(golden["lengths"]) else np.zeros(table.num_rows, np.uint16)
    np.testing.assert_array_equal(lengths.numpy(), expected)
    *bases, overflow_bytes = torch.ops.ibp.index_rows(lengths, num_bytes, table.row_bytes, table.slot_bytes).tolist()
    assert overflow_bytes == len(golden["overflow"])
    assert bases == (golden["bases"].tolist() or [0] * len(bases))
    slots, overflow = (
        torch.zeros(len(golden["slots"]), dtype=torch.uint8),
        torch.zeros(overflow_bytes, dtype=torch.uint8),
    )
    arguments = op_arguments(table, slots, overflow, lengths, torch.tensor(bases, dtype=torch.int64))
    fault = torch.zeros(4, dtype=torch.int64)
    BY_VALUES.encode_rows(*arguments, data, fault)
    assert fault[0] == 0
    np.testing.assert_array_equal(slots.numpy(), golden["slots"])
    np.testing.assert_array_equal(overflow.numpy(), golden["overflow"])


@pytest.mark.parametrize("name", CASES)
def test_public_api(name):
    """compress() with the golden codebook gives the golden table, unless that would not save anything."""
    golden = load(name)
    table = reference_table(golden)
    x = torch.from_numpy(golden["original"].copy()).view(-1, int(golden["item_bytes"]))
    layout = {"layout": "packed"} if table.slot_bytes == 0 else {"slot_bytes": table.slot_bytes}
    codebook = (
        {"codebook": core_codebook(table.codebook)}
        if table.codebook
        else {"row_bytes": table.row_bytes, "scheme": "raw"}
    )
    made = ibp.compress(x, memory="host", device="cpu", **codebook, **layout)
    assert torch.equal(made.decompress(), x)
    if table.codebook is None or reference.stored_bytes(table) >= x.numel():
        assert made.scheme == "raw" and made.stored_bytes == x.numel() and torch.equal(made.slots, x.reshape(-1))
        return
    assert made.scheme == "ibp" and made.stored_bytes == reference.stored_bytes(table)
    for array in ("lengths", "bases", "slots", "overflow"):
        np.testing.assert_array_equal(
            getattr(made, array).numpy(), golden[array].astype(getattr(made, array).numpy().dtype), err_msg=array
        )


def test_wide_index_is_wide():
    golden = load("packed_wide_index")
    assert golden["index"].dtype == np.uint16 and len(golden["palette"]) > 256
    assert load("packed_one_pair")["index"].size == 0


@pytest.mark.parametrize("row", CORRUPT_ROWS, ids=lambda row: f"{row['why']}-{row['chunk_bytes']}-{row['flag_all']}")
def test_corrupt_rows(row):
    mask, bitval, coded = (bytes.fromhex(row[name]) for name in ("mask", "bitval", "coded"))
    with pytest.raises(reference.CorruptRow):
        reference.decode_row(reference.make_codebook(mask, bitval, row["chunk_bytes"], row["flag_all"]), coded)
    codec = row_codecs.RowCodec(mask, bitval, row["chunk_bytes"], row["flag_all"])
    assert row["status"] == "IBP_CORRUPT_ROW"
    with pytest.raises(ValueError, match="corrupt|contradicts"):
        codec.decode(coded)


@pytest.mark.parametrize(
    "edit", CORRUPT_TABLES, ids=lambda edit: f"{edit['table']}-{edit['array']}-{edit['at']}-{edit['value']}"
)
def test_corrupt_tables(edit):
    table = edit_table(reference_table(load(edit["table"])), edit["array"], edit["at"], edit["value"])
    corrupt = []
    for row in range(table.num_rows):
        start = row * table.row_bytes
        out, fault = core_decode(table, start, start + table.valid(row))
        try:
            expected = reference.decode_table_row(table, row)
        except reference.CorruptRow:
            corrupt.append(row)
            expected = bytes(table.valid(row))
        assert out.tobytes() == expected
        assert fault[:3] == ([CORRUPT, row, row] if row in corrupt else [0, 0, 0])
    assert corrupt == edit["corrupt_rows"]
    out, fault = core_decode(table, 0, table.num_bytes)
    assert fault[:3] == [CORRUPT, corrupt[0], corrupt[0]]
