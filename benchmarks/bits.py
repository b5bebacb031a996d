"""Which bits of each set are invariant, and what would packing bits without the paper's idea remove (the paper's table
4)?

    python -m benchmarks.bits [--data DIR] [--out DIR]

The sets are those of ratio.py that have one table. All columns except `rows` and `row_bytes` are shares from 0 to 1.
Nothing is compressed except in memory, so a GPU is not needed.
"""

import sys

import numpy as np
import torch

import ibp

from . import harness, ratio, sets

COLUMNS = "set,dtype,rows,row_bytes,bit_pack,group_pack,invariant,chunks,packed_rows,removed,bound,commit".split(",")
GROUP_ROWS = 100  # The columns of this many rows are packed together (the paper's section 3.1).
TAU, CHUNK_BYTES = 0.8, 4  # The paper calls such bits "80p-invariant".
EXPONENT_BITS = {sets.FP64: 11, sets.FP32: 8, sets.BF16: 8, sets.FP16: 5}
BLOCK_ROWS = 256


def words_of(x):
    """Returns the elements' bits as unsigned numbers, numpy [rows, columns]."""
    size = x.dtype.itemsize
    return x.contiguous().view(torch.uint8).numpy().view(f"<u{size}").reshape(len(x), -1)


def widths(most, size):
    """Returns how many bits each of the numbers `most` needs. size: bytes of a number."""
    powers = np.left_shift(np.uint64(1), np.arange(8 * size, dtype=np.uint64))
    return np.searchsorted(powers, most.astype(np.uint64), side="right")


def packed_share(words, group_rows):
    """Returns the share of bits that packing removes. The elements of a group are packed at the width of the largest of
    them. A group is group_rows rows of one column, or the whole table if group_rows is None. The widths themselves are
    not counted."""
    size = words.dtype.itemsize
    if group_rows is None:
        return 1 - int(widths(words.max(), size)) / (8 * size)
    parts = (words[start : start + group_rows] for start in range(0, len(words), group_rows))
    kept = sum(len(part) * int(widths(part.max(0), size).sum()) for part in parts)
    return 1 - kept / (8 * size * words.size)


def set_bits(values):
    return int(np.unpackbits(values).sum())


def invariance(x):
    """Returns (share of the bit positions at which at least TAU of the rows agree, share of the chunks in which all of
    these bits agree, share of the rows that become smaller, share of all bits that this removes). This follows the
    paper's sections 4.1 and 4.2, with one threshold."""
    codebook = ibp.codecs.analyze(x, paper=True, tau=TAU, chunk_bytes=CHUNK_BYTES, sample=1.0, device="cpu")
    mask, bitval, num_bytes = codebook.mask.numpy(), codebook.bitval.numpy(), codebook.row_bytes
    starts = np.arange(0, num_bytes, CHUNK_BYTES)
    fixed = np.add.reduceat(np.unpackbits(mask).reshape(-1, 8).sum(1).astype(np.int64), starts)
    rows = x.contiguous().view(torch.uint8).reshape(len(x), -1).numpy()
    chunks = removed = packed_rows = 0
    for start in range(0, len(rows), BLOCK_ROWS):
        differs = ((rows[start : start + BLOCK_ROWS] & mask) != bitval).astype(np.uint8)
        agrees = np.add.reduceat(differs, starts, axis=1, dtype=np.int64) == 0
        saved_bytes = np.maximum((agrees * fixed).sum(1) - len(starts), 0) // 8
        chunks, packed_rows = chunks + int(agrees.sum()), packed_rows + int((saved_bytes > 0).sum())
        removed += int(saved_bytes.sum())
    return (
        set_bits(mask) / (8 * num_bytes),
        chunks / (len(rows) * len(starts)),
        packed_rows / len(rows),
        removed / rows.size,
    )


def entropy(counts):
    """Returns bits per symbol."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def entropy_bound(x):
    """Returns the share of bits that a perfect entropy coder would remove if it coded which elements are zero and the
    exponents of the others, and left signs and mantissas as they are. Returns None for integers and narrow floats."""
    exponent_bits = EXPONENT_BITS.get(x.dtype)
    if exponent_bits is None:
        return None
    bits = 8 * x.dtype.itemsize
    words = words_of(x).reshape(-1)
    kept = words[words != 0]
    exponents = (kept >> (bits - 1 - exponent_bits)) & ((1 << exponent_bits) - 1)
    a_word = entropy(np.bincount(exponents.astype(np.int64))) + bits - exponent_bits if len(kept) else 0
    is_kept = entropy(np.array([len(kept), len(words) - len(kept)]))
    return 1 - (is_kept + a_word * len(kept) / len(words)) / bits


def shares_of(x):
    words, bound = words_of(x), entropy_bound(x)
    invariant, chunks, packed_rows, removed = invariance(x)
    shares = {
        "bit_pack": packed_share(words, None),
        "group_pack": packed_share(words, GROUP_ROWS),
        "invariant": invariant,
        "chunks": chunks,
        "packed_rows": packed_rows,
        "removed": removed,
        "bound": bound,
    }
    return {name: "" if share is None else f"{share:.4f}" for name, share in shares.items()}


def print_table(rows):
    names = COLUMNS[4:-1]
    lines = [
        [
            row["set"],
            row["dtype"],
            str(row["row_bytes"]),
            *(row[name] and f"{100 * float(row[name]):.1f}" for name in names),
        ]
        for row in rows
    ]
    ratio.print_lines("Percent", ["set", "dtype", "row bytes", *names], lines, 2)


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    sheet = ratio.Sheet(args.out / "bits.csv", COLUMNS)
    for case in (case for case in sets.all_sets(args.data, args.quick) if len(case.tensors) == 1):
        same = {"set": case.name, "dtype": harness.dtype_name(case.dtype), "rows": case.rows}
        try:
            sheet.add(**same, row_bytes=case.row_bytes, **shares_of(case.tensors[0]))
        except Exception as error:
            sheet.failed(f"{case.name} {same['dtype']}", error)
    print_table(sheet.rows)
    return sheet.finish()


if __name__ == "__main__":
    sys.exit(main())
