"""Encodes and decodes with random codebooks, rows and indexes, and with memory that changes meanwhile, through
torch.ops.ibp.

    python hostile_rows.py FEATURES SECONDS

tests/core/test_sanitized.py runs this with libraries that are built with sanitizers. They end it if something is wrong.
"""

import random
import sys
import threading
import time

import torch

import ibp
from handles import BY_VALUES as OPS
from helpers import bytes_of, spiky_rows

U8, U16, I32, I64 = torch.uint8, torch.uint16, torch.int32, torch.int64
CPU = torch.device("cpu")


def noise(draw, num_bytes):
    """Returns random bytes, in which all, few or none are replaced by zeros or ones."""
    kind = draw.randrange(4)
    if kind == 0:
        return torch.randint(0, 256, (num_bytes,), dtype=U8)
    if kind == 1:
        return torch.full((num_bytes,), draw.choice([0, 1, 127, 128, 255]), dtype=U8)
    few = torch.randint(0, 256, (num_bytes,), dtype=U8)
    return torch.where(torch.rand(num_bytes) < 0.1, few, torch.full_like(few, 0 if kind == 2 else 255))


def some_row_bytes(draw):
    return draw.choice([1, 64]) * draw.choice([draw.randrange(1, 40), draw.randrange(1, 500), draw.randrange(1, 1025)])


def noisy_masks(draw, row_bytes):
    """Returns (words, codec) of scheme ibp, with one or several clusters. It is either right except for a few words, or
    all noise."""
    chunk_bytes, num_words = draw.choice([1, 2, 4, 8]), -(-row_bytes // 16) * 4
    num_flags = draw.randrange(-(-row_bytes // chunk_bytes) + 1)
    if draw.randrange(2):
        mask = noise(draw, row_bytes)
        words = OPS.codebook_words(mask, mask & noise(draw, row_bytes), chunk_bytes, bool(draw.randrange(2))).flatten()
        for _ in range(draw.randrange(4)):
            any_word = draw.randrange(-(2**31), 2**31)
            words[draw.randrange(len(words))] = draw.choice([-1, 0, 131071, 131071 | 15 << 17, any_word])
    else:
        words = noise(draw, 12 * num_words).view(I32)
    if draw.randrange(2):
        counts = [draw.choice([num_flags, -8, 2**31 - 1, 0]) for _ in range(draw.randrange(2, 6))]
        ends = [torch.tensor([count, 0, 0, 0], dtype=I32) for count in counts]
        words = torch.cat([part for end in ends for part in (words, end)])
    return words, [1, row_bytes, chunk_bytes, num_flags]


def noisy_planes(draw, row_bytes):
    """Returns (words, codec) of scheme planes."""
    element_bytes = draw.choice([size for size in (1, 2, 4, 8) if row_bytes % size == 0])
    residual_bits = draw.choice([0, draw.randrange(8 * element_bytes + 1), 8 * element_bytes])
    digits = [draw.randrange(1, 5) for _ in range(draw.randrange(5))]
    per_column, listed = draw.choice([(0, 0), (0, 1), (1, 0)])
    width, columns = 8 * element_bytes, row_bytes // element_bytes
    invariant_bits = draw.choice([0, 0, min(width - 1, draw.randrange(width - residual_bits + 1))])
    symbol_bits = width - invariant_bits - residual_bits
    consecutive, signed = int(not per_column and not draw.randrange(5)), int(listed and draw.randrange(2))
    num_constant = draw.choice([0, draw.randrange(columns)])
    symbol_bytes = next(size for size in (1, 2, 4, 8) if 8 * size >= symbol_bits)
    sets = (columns - num_constant if per_column else 1) * draw.choice([1, 1, 3])
    entries = noise(draw, 0 if consecutive else sets * sum(2**bits - 1 for bits in digits) * symbol_bytes)
    left_out = [
        invariant_bits,
        draw.randrange(2**invariant_bits),
        consecutive,
        draw.randrange(min(2**symbol_bits, 2**63)),
    ]
    values = [draw.choice([0, -1, draw.randrange(-(2**63), 2**63)]) for _ in range(2)]
    values = [value % 2**width if width < 64 and draw.randrange(2) else value for value in values]
    shape = [element_bytes, draw.randrange(2), residual_bits, per_column, listed]
    constants = [noise(draw, -(-size // 16) * 16) for size in (row_bytes, 2 * (columns - num_constant))]
    words = torch.cat([*constants, entries]) if num_constant else entries
    return words, [2, row_bytes, *shape, *values, *left_out, signed, num_constant, *digits]


def tried(operation, *arguments):
    """Returns the result of an operation, or None if it refuses its arguments."""
    try:
        return operation(*arguments)
    except RuntimeError:
        return None


def code_and_decode(draw):
    """Measures, indexes and writes a table with a random codebook, damages it, and reads it in every way."""
    row_bytes = some_row_bytes(draw)
    words, codec = draw.choice([noisy_masks, noisy_planes])(draw, row_bytes)
    num_rows = draw.randrange(1, 80) if row_bytes < 1000 else draw.randrange(1, 5)
    num_bytes = num_rows * row_bytes - draw.randrange(row_bytes)
    data, fault = noise(draw, num_bytes), torch.zeros(4, dtype=I64)
    tried(OPS.count_hits, data, words, codec)
    lengths = tried(OPS.measure_rows, data, words, codec)
    if lengths is None or not draw.randrange(3):
        lengths = (noise(draw, 2 * num_rows).view(U16).to(I32) % (row_bytes + 2)).to(U16)
    slot_bytes = draw.choice([0, row_bytes, draw.randrange(-(-row_bytes // 32)) * 32])
    *bases, overflow_bytes = OPS.index_rows(lengths, num_bytes, row_bytes, slot_bytes).tolist()
    bases = torch.tensor(bases)
    if not draw.randrange(4):  # Each row then has its own base.
        bases = torch.randint(0, overflow_bytes + 1, (num_rows,)) // 32 * 32
    slots, overflow = torch.zeros(num_rows * slot_bytes, dtype=U8), torch.zeros(overflow_bytes, dtype=U8)
    if not draw.randrange(4):
        bases[draw.randrange(len(bases))] = draw.choice([-1, -40, 2**62, draw.randrange(overflow_bytes + 1)])
    table = [slots, overflow, lengths, bases, words, codec, slot_bytes, 0, num_rows, row_bytes]
    if num_bytes < num_rows * row_bytes:
        table[-2:] = [num_bytes, 1]
    tried(OPS.encode_rows, *table, data, fault)
    for memory in (slots, overflow):
        for _ in range(draw.randrange(6) if memory.numel() else 0):
            memory[draw.randrange(memory.numel())] = draw.randrange(256)
    out = torch.zeros(num_bytes, dtype=U8)
    tried(OPS.decode_bytes, *table, 0, num_bytes, 0, out, fault.zero_())
    start = draw.randrange(num_bytes)
    tried(OPS.decode_bytes, *table, start, num_bytes, 0, out[: num_bytes - start].clone(), fault.zero_())
    ids = torch.randint(-1, table[-2] + 1, (20,))
    tried(OPS.gather_items, *table, ids, 0, torch.zeros(20 * table[-1], dtype=U8), fault.zero_())
    index, rows = [torch.zeros(32, dtype=U16), torch.zeros(1, dtype=I64)], torch.zeros(33 * row_bytes, dtype=U8)
    tried(OPS.select_rows, *table, ids, 0, *index, rows, torch.zeros(2, dtype=I64), fault.zero_())


def while_it_changes(seconds):
    """Compresses x, and decompresses its table, while another thread writes to their memory. Returns how many of the
    calls did not notice the change."""
    listed = torch.zeros(100, 4000, dtype=U8)
    listed[torch.rand(100, 4000) < 0.02] = 7
    dense = torch.randn(100, 1000).bfloat16()
    sixteen = ibp.codecs.PlanesCodebook(2000, 2, 0, 0, (2, 2), False, False, 0, 0, (torch.arange(6) * 257).view(1, 6))
    symbols = (torch.randint(0, 12, (100, 1000)) * 257).to(torch.int16)
    cases = [(listed, {"scheme": "planes"}), (dense, {"scheme": "planes"}), (symbols, {"codebook": sixteen}),
             (dense, {"scheme": "ibp"}), (spiky_rows(100, 60), {"scheme": "ibp"})]  # fmt: skip
    calls = 0
    for x, options in cases:
        table = ibp.compress(x, device="cpu", memory="host", **options)
        stored = table.slots if table.slots.numel() else table.overflow
        again = {"device": "cpu", "memory": "host", "codebook": table.codebook}
        for memory, work in ((x, lambda: ibp.compress(x, **again)), (stored, table.decompress)):
            calls += change_while(bytes_of(memory), work, seconds / 2 / len(cases))
    return calls


def change_while(memory, work, seconds):
    good, other, stop = memory.clone(), torch.randint(0, 256, (memory.numel(),), dtype=U8), threading.Event()

    def flip():
        while not stop.is_set():
            memory.copy_(other)
            memory.copy_(good)

    thread = threading.Thread(target=flip, daemon=True)
    thread.start()
    end, calls = time.monotonic() + seconds, 0
    try:
        while time.monotonic() < end:
            try:
                work()
                calls += 1
            except (RuntimeError, ValueError):  # x has changed, or the table is corrupt.
                pass
    finally:
        stop.set()
        thread.join(60)
        memory.copy_(good)
    return calls


def main(features, seconds):
    if ibp._core.set_cpu_features(features) != features:
        print("this processor lacks the features")
        return
    draw, calls = random.Random(features), 0
    torch.manual_seed(features)
    end = time.monotonic() + seconds / 2
    while time.monotonic() < end:
        code_and_decode(draw)
        calls += 1
    print(f"{calls} noisy tables, {while_it_changes(seconds / 2)} calls on memory that changed")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
