"""Reads the golden files, for the numpy reference and for torch.ops.ibp."""

import json
import pathlib

import numpy as np
import torch

import ibp
import reference

GOLDEN = pathlib.Path(__file__).parent
CORRUPT_ROWS = json.loads((GOLDEN / "corrupt_rows.json").read_text())
CORRUPT_TABLES = json.loads((GOLDEN / "corrupt_tables.json").read_text())


def load(name):
    return dict(np.load(GOLDEN / f"{name}.npz"))


def reference_table(golden):
    codebook = None
    if "palette" in golden:
        sizes = int(golden["row_bytes"]), int(golden["chunk_bytes"]), bool(golden["flag_all"])
        codebook = reference.Codebook(*sizes, golden["palette"], golden["index"])
    arrays = {name: golden[name] for name in ("lengths", "bases", "slots", "overflow")}
    return reference.Table(
        len(golden["original"]), int(golden["row_bytes"]), int(golden["slot_bytes"]), codebook, **arrays
    )


def core_codebook(codebook):
    palette, index = torch.from_numpy(codebook.palette.copy()), torch.from_numpy(codebook.index.copy())
    return ibp.codecs.Codebook(codebook.row_bytes, codebook.chunk_bytes, codebook.flag_all, palette, index)


def arrays_of(table, device):
    """slots, overflow, lengths, bases as tensors."""
    arrays = table.slots, table.overflow, table.lengths, table.bases.view(np.int64)
    return [torch.from_numpy(array.copy()).to(device) for array in arrays]


def op_arguments(table, slots, overflow, lengths, bases):
    """What describes a table to torch.ops.ibp, as num_bytes items of one byte."""
    if table.codebook is None:
        codec, words = [0, table.row_bytes], torch.empty(0, dtype=torch.int32, device=slots.device)
    else:
        codebook = core_codebook(table.codebook)
        codec, words = codebook.codec, codebook.words(slots.device)
    return slots, overflow, lengths, bases, words, codec, table.slot_bytes, 0, table.num_bytes, 1
