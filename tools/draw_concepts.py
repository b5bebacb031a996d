"""Draws the pictures of docs/concepts.md and docs/architecture.md: `python tools/draw_concepts.py [DIRECTORY]`, by
default docs/images.

The examples are those of csrc/FORMAT.md. Their compressed forms are computed here by its rules.
"""

import sys
from html import escape
from pathlib import Path

from svg import Drawing

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


def to_bits(number: int, width: int) -> list[int]:
    """Returns the bits of a number, the lowest first."""
    return [number >> i & 1 for i in range(width)]


def to_bytes(bits: list[int]) -> bytes:
    """Returns the bytes that consist of these bits. The lowest bit of each byte comes first."""
    padded = bits + [0] * (-len(bits) % 8)
    return bytes(sum(bit << i for i, bit in enumerate(padded[at : at + 8])) for at in range(0, len(padded), 8))


def hex_of(data: bytes) -> str:
    return data.hex(" ").upper()


# ---- rows, slots, overflow, index ----

ROW_BYTES, SLOT_BYTES = 256, 160
LENGTHS = (148, 156, 0, 139, ROW_BYTES, 171)  # 0 marks a raw row, and ROW_BYTES a default row.


def stored_bytes(length: int) -> int:
    return ROW_BYTES if length == 0 else 0 if length == ROW_BYTES else length


def rows() -> Drawing:
    picture = Drawing(880, 410, "A tensor's rows in slots, with overflow and index")
    top, step, scale = 82, 40, 0.72
    heads = ((20, "tensor", "rows of 256 bytes"), (262, "slots", "160 bytes a row"), (440, "overflow", "the rest"))
    for x, name, note in (*heads, (664, "lengths", "2 bytes a row"), (768, "bases", "8 bytes, 32 rows")):
        picture.text(x, 38, name, "head")
        picture.text(x, 57, note, "small note")
    spilled = 0.0
    for row, length in enumerate(LENGTHS):
        y, stored = top + row * step, stored_bytes(length)
        kind = "raw" if length == 0 else "kept"
        picture.box("plain", 20, y, ROW_BYTES * scale, 26, f"row {row}", "small")
        picture.arrow((20 + ROW_BYTES * scale + 6, y + 13), (256, y + 13))
        picture.box("left", 262, y, SLOT_BYTES * scale, 26)
        in_slot = min(stored, SLOT_BYTES)
        if in_slot:
            picture.box(
                kind, 262, y, in_slot * scale, 26, f"{stored} bytes" + (", raw" if length == 0 else ""), "small"
            )
        else:
            picture.text(262 + SLOT_BYTES * scale / 2, y + 18, "default: none", "small note mid")
        spilled += draw_part(picture, y, stored - in_slot, 440 + spilled, kind, scale)
        picture.box("index", 664, y, 60, 26, str(length), "mono small")
    picture.box("index", 768, top, 60, 26, "0", "mono small")
    picture.arrow((848, top), (856, top), (856, top + 5 * step + 26), (848, top + 5 * step + 26), tip=False)
    end = top + len(LENGTHS) * step + 22
    kinds = ("plain", "kept", "raw", "left", "index")
    meanings = ("as the user has it", "coded", "did not shrink: raw", "not read", "index")
    picture.legend(20, end, list(zip(kinds, meanings)), 164)
    picture.text(20, end + 34, "Row 1 is found by multiplying: 156 bytes from slots[1 * 160]. Row 5 goes on in", "")
    picture.text(20, end + 54, "overflow, after the rooms of the rows before it: rooms are rounded up to 32 bytes.", "")
    return picture


def draw_part(picture: Drawing, y: float, part: int, x: float, kind: str, scale: float) -> float:
    """Draws the part of a row that overflows, and the room that it takes. Returns the width of the room."""
    if part <= 0:
        return 0
    room = -(-part // 32) * 32 * scale
    picture.arrow((262 + SLOT_BYTES * scale + 4, y + 13), (x - 5, y + 13))
    picture.box("left", x, y, room, 26)
    picture.box(kind, x, y, part * scale, 26, "", "small")
    picture.text(x + room + 8, y + 18, f"{part} bytes", "small")
    return room


# ---- masks and participation bits ----

MASKS, BITVALS, CHUNKS = (0xF0FF, 0x0000, 0x00FF), (0x4000, 0x0000, 0x003C), (0x4500, 0xBEEF, 0x123C)


def masks_row(chunks: tuple[int, ...]) -> tuple[list[int], list[list[int]]]:
    """Returns (participation bits, kept bits of each chunk) of a row, as in FORMAT.md section 5."""
    agrees = [chunk & mask == value for chunk, mask, value in zip(chunks, MASKS, BITVALS)]
    flags = [int(agree) for agree, mask in zip(agrees, MASKS) if mask]
    kept = [
        [bit for bit, fixed in zip(to_bits(chunk, 16), to_bits(mask, 16)) if not (fixed and agree)]
        for chunk, mask, agree in zip(chunks, MASKS, agrees)
    ]
    return flags, kept


def masks() -> Drawing:
    picture = Drawing(880, 430, "Scheme ibp: masks, participation bits and the bits that are kept")
    left, cell, gap = 124, 15, 10
    for y, label in ((92, "mask"), (122, "value"), (166, "a row")):
        picture.text(20, y, label, "head")
    picture.text(
        20, 36, "Most rows of a table agree on some bits. A codebook says which (mask) and what they are (value)."
    )
    for c, (mask, value, chunk) in enumerate(zip(MASKS, BITVALS, CHUNKS)):
        x, fixed = left + c * (16 * cell + gap), to_bits(mask, 16)
        picture.text(x, 64, f"chunk {c}: {chunk:04X}", "small note")
        picture.cells(["coder" if bit else "left" for bit in fixed], [str(bit) for bit in fixed], x, 76, cell, 22)
        values = [str(bit) if f else "" for bit, f in zip(to_bits(value, 16), fixed)]
        picture.cells(["coder" if bit else "left" for bit in fixed], values, x, 106, cell, 22)
        bits = [str(bit) for bit in to_bits(chunk, 16)]
        picture.cells(["left" if bit else "kept" for bit in fixed], bits, x, 150, cell, 22)
        verdict = "agrees with the mask: 1" if mask else "no mask: all bits are kept"
        picture.text(x, 192, verdict, "small note")
    flags, kept = masks_row(CHUNKS)
    draw_coded_row(picture, flags, kept)
    return picture


def draw_coded_row(picture: Drawing, flags: list[int], kept: list[list[int]]) -> None:
    left, cell, y = 124, 20, 236
    bits = flags + [bit for part in kept for bit in part]
    coded = to_bytes(bits)
    picture.text(20, y + 17, "coded", "head")
    kinds = ["coder"] * len(flags) + ["kept"] * (len(bits) - len(flags)) + ["left"] * (8 * len(coded) - len(bits))
    picture.cells(kinds, [str(bit) for bit in bits] + ["0"] * (8 * len(coded) - len(bits)), left, y, cell, 24)
    x = left
    for name, size in zip(("flags", *(f"chunk {c}" for c in range(3))), (len(flags), *map(len, kept))):
        picture.text(x + size * cell / 2, y + 42, name, "small note mid")
        x += size * cell
    for i, byte in enumerate(coded):
        picture.text(left + (8 * i + 4) * cell, y + 64, f"{byte:02X}", "mono mid")
    picture.text(20, y + 64, "as bytes", "small note")
    other_flags, other = masks_row((CHUNKS[0] | 1, *CHUNKS[1:]))
    num_bits = len(other_flags) + sum(map(len, other))
    picture.legend(20, 336, [("coder", "codebook, participation bits"), ("kept", "kept"), ("left", "left out")], 210)
    picture.text(20, 370, f"{len(coded)} bytes in place of 6. Bits are drawn from the lowest to the highest.")
    picture.text(
        20,
        394,
        f"A row with 4501 in chunk 0 has participation bit 0 there and keeps all its bits: {num_bits} bits are "
        f"{-(-num_bits // 8)} bytes,",
    )
    picture.text(20, 414, "no fewer than the row has, so it is stored raw.")


# ---- planes and escapes ----

VALUES = ("0.5", "1.0", "-0.75", "3.0", "0.5", "1.5")
ELEMENTS = (0x3F00, 0x3F80, 0xBF40, 0x4040, 0x3F00, 0x3FC0)
ENTRIES = (0x7E, 0x7F)  # Each plane has one entry, because a digit has one bit.


def planes_row() -> tuple[list[int], list[int], list[int | None], list[int | None], list[int | None]]:
    """Returns (symbols, residuals, digits of plane 0, digits of plane 1, raw symbols) of the dense example in FORMAT.md
    section 6. None stands for an element without a digit or raw symbol."""
    rotated = [(e << 1 | e >> 15) & 0xFFFF for e in ELEMENTS]
    symbols, residuals = [r >> 8 for r in rotated], [r & 0xFF for r in rotated]
    first = [int(s != ENTRIES[0]) for s in symbols]
    second = [int(s != ENTRIES[1]) if escaped else None for s, escaped in zip(symbols, first)]
    return symbols, residuals, list(first), second, [s if d else None for s, d in zip(symbols, second)]


def planes() -> Drawing:
    picture = Drawing(880, 470, "Scheme planes: exponents as digits with escapes, the other bits as they are")
    symbols, residuals, first, second, raw = planes_row()
    left, step = 216, 108
    for y, name, note in (
        (50, "BF16 values", "sign, exponent, mantissa"),
        (118, "symbols", "exponents: few are frequent"),
        (166, "residuals", "mantissa and sign"),
        (228, "plane 0", "0: 7E    1: escape"),
        (276, "plane 1", "0: 7F    1: escape"),
        (324, "raw symbols", "after the last escape"),
    ):
        picture.text(20, y, name, "head")
        picture.text(20, y + 17, note, "small note")
    for i, (value, element) in enumerate(zip(VALUES, ELEMENTS)):
        x = left + i * step
        picture.text(x + 46, 36, value, "mid")
        for kind, text, at, width in (
            ("kept", f"{element >> 15}", 0, 16),
            ("coder", f"{element >> 7 & 0xFF:02X}", 16, 38),
            ("kept", f"{element & 0x7F:02X}", 54, 38),
        ):
            picture.box(kind, x + at, 44, width, 26, text, "mono small")
        picture.arrow((x + 46, 74), (x + 46, 104))
        picture.box("coder", x + 20, 108, 52, 24, f"{symbols[i]:02X}", "mono small")
        picture.box("kept", x + 20, 156, 52, 24, f"{residuals[i]:02X}", "mono small")
        draw_digit(picture, x + 33, 218, first[i])
        draw_digit(picture, x + 33, 266, second[i])
        if raw[i] is not None:
            picture.box("raw", x + 20, 314, 52, 24, f"{raw[i]:02X}", "mono small")
    draw_planes_row(
        picture, residuals, [first, [d for d in second if d is not None]], [r for r in raw if r is not None]
    )
    return picture


def draw_digit(picture: Drawing, x: float, y: float, digit: int | None) -> None:
    """Draws a digit of one bit. An escape gets an arrow down to the next plane."""
    if digit is None:
        return
    picture.box("raw" if digit else "coder", x, y, 26, 24, str(digit), "mono small")
    if digit:
        picture.arrow((x + 13, y + 27), (x + 13, y + 45))


def draw_planes_row(picture: Drawing, residuals: list[int], digits: list[list[int]], raw: list[int]) -> None:
    planes = [to_bytes(plane) for plane in digits]
    parts = [("residuals", "kept", bytes(residuals)), ("raw symbols", "raw", bytes(raw))]
    parts[1:1] = [(f"plane {p}", "coder", data) for p, data in enumerate(planes)]
    picture.text(20, 386, "coded row", "head")
    x = 216.0
    for name, kind, data in parts:
        width = max(86, 40 * len(data))
        picture.box(kind, x, 368, width, 26, hex_of(data), "mono small")
        picture.text(x + width / 2, 412, name, "small note mid")
        x += width + 8
    size = sum(len(data) for _, _, data in parts)
    picture.text(
        20,
        446,
        f"{size} bytes in place of {2 * len(ELEMENTS)}. Digits have 1 to 4 bits: one of 2 bits names three symbols.",
    )


# ---- a listed row ----

COLUMNS, LISTED, LOW_BITS = 40, {3: 0x07, 21: 0x09}, 3


def listed_row() -> list[tuple[str, str, bytes]]:
    """Returns (name, kind, bytes) of each part of the listed example in FORMAT.md section 6."""
    upper: list[int] = []
    for group in range(-(-COLUMNS // 2**LOW_BITS)):
        upper += [1 for position in LISTED if position >> LOW_BITS == group] + [0]
    low = [bit for position in LISTED for bit in to_bits(position, LOW_BITS)]
    return [
        ("how many", "coder", bytes([len(LISTED)])),
        ("groups", "index", to_bytes(upper[:-1])),
        ("places", "index", to_bytes(low)),
        ("values", "kept", bytes(LISTED.values())),
    ]


def listed() -> Drawing:
    picture = Drawing(880, 330, "A listed row: positions and values of the elements that are not zero")
    left, cell = 40, 20
    picture.text(20, 36, "A row of 40 elements of one byte. All but two are the table's default, 0.")
    for group in range(COLUMNS // 8):
        x = left + group * 8 * cell
        picture.text(x + 4 * cell, 66, f"group {group}", "small note mid")
        picture.arrow((x + 3, 76), (x + 3, 72), (x + 8 * cell - 3, 72), (x + 8 * cell - 3, 76), tip=False)
    values = [LISTED.get(column) for column in range(COLUMNS)]
    picture.cells(
        ["left" if v is None else "kept" for v in values],
        ["" if v is None else f"{v:02X}" for v in values],
        left,
        82,
        cell,
        26,
    )
    parts, x = listed_row(), 120.0
    notes = (
        f"{len(LISTED)} are listed",
        "a 1 for each, a 0 to end a group",
        "3 bits each: 3 in group 0, 5 in 2",
        "coded as in dense rows",
    )
    picture.text(20, 218, "coded row", "head")
    for (name, kind, data), note, width in zip(parts, notes, (110, 210, 210, 180)):
        picture.box(kind, x + 10, 200, width - 20, 28, hex_of(data), "mono")
        picture.text(x + width / 2, 186, name, "small mid")
        picture.text(x + width / 2, 246, note, "small note mid")
        x += width
    for position in LISTED:
        picture.arrow((left + (position + 0.5) * cell, 112), (left + (position + 0.5) * cell, 140))
        picture.text(left + (position + 0.5) * cell, 156, f"position {position}", "small mid")
    size = sum(len(data) for _, _, data in parts)
    picture.text(
        20,
        286,
        f"{size} bytes in place of {COLUMNS}. Where more elements are listed, a bitmap or a list of those that are",
    )
    picture.text(20, 306, "not listed is shorter; the shortest form follows from the numbers, so that none is named.")
    return picture


# ---- a fetch over the link ----


def fetch() -> Drawing:
    picture = Drawing(880, 400, "A fetch: a GPU reads coded rows over the link and decodes them itself")
    for x, width, name, note in (
        (20, 300, "host memory, pinned", "coded rows: slots and overflow"),
        (540, 320, "GPU", "index, codebook, ids"),
    ):
        picture.text(x, 36, name, "head")
        picture.text(x, 54, note, "small note")
        picture.box("left", x, 66, width, 196)
    wanted = {1: 0, 3: 2, 4: 1}  # row: its position among the fetched rows
    for row in range(6):
        kind = "kept" if row in wanted else "plain"
        picture.box(kind, 36, 80 + row * 28, 268 * (0.62 + 0.05 * (row * 7 % 4)), 20, f"row {row}", "small")
    picture.box("index", 556, 80, 90, 40, "ids 1 4 3", "small")
    picture.box("index", 556, 130, 90, 40, "lengths", "small")
    picture.box("coder", 556, 180, 90, 40, "codebook", "small")
    picture.arrow((650, 100), (668, 100), (668, 150), (684, 150))
    picture.arrow((650, 150), (684, 150))
    picture.arrow((650, 200), (668, 200), (668, 150), (684, 150))
    picture.box("coder", 688, 120, 62, 60, "decode", "small")
    for row, position in wanted.items():
        picture.box("plain", 784, 92 + position * 42, 64, 28, f"x[{row}]", "small")
        picture.arrow((752, 150), (780, 106 + position * 42))
    picture.arrow((326, 150), (534, 150))
    picture.text(430, 138, "the link", "head mid")
    picture.text(430, 172, "only these rows, only their", "small note mid")
    picture.text(430, 188, "coded bytes, in sectors of 32", "small note mid")
    picture.text(
        20,
        290,
        "The kernel knows where each row is from its number and the index, and loads it straight from host memory.",
    )
    picture.text(
        20,
        310,
        "It decodes them where they arrive and writes whole rows: one pass, no staging buffer, no work for the CPU.",
    )
    draw_usual_way(picture)
    return picture


def draw_usual_way(picture: Drawing) -> None:
    y = 352
    picture.text(20, y + 5, 'x[ids].to("cuda")', "mono small")
    x = 176
    for text, width in (
        ("the CPU gathers rows", 160),
        ("a buffer in host memory", 176),
        ("whole rows over the link", 176),
    ):
        picture.box("raw", x, y - 15, width, 30, text, "small")
        picture.arrow((x + width + 3, y), (x + width + 19, y))
        x += width + 24
    picture.text(x, y + 5, "x[1] x[4] x[3]", "small")


# ---- a file ----


def file() -> Drawing:
    picture = Drawing(880, 420, "A file: header, parts of tables, plain tensors, checksums")
    picture.text(
        20, 36, "A safetensors file: any reader lists it. The data of every tensor begins at a multiple of 128 bytes."
    )
    boxes = (
        ("plain", 60, "N", "8 bytes"),
        ("coder", 120, "header", "JSON, N bytes"),
        ("kept", 130, "w:slots", ""),
        ("raw", 90, "w:overflow", ""),
        ("index", 80, "w:lengths", ""),
        ("index", 70, "w:bases", ""),
        ("coder", 110, "codebook 0", "its entries"),
        ("plain", 90, "norm", "plain"),
        ("index", 82, "checks", "XXH3"),
    )
    x, starts = 20.0, []
    for kind, width, name, note in boxes:
        picture.box(kind, x, 60, width, 44, name, "small")
        picture.text(x + width / 2, 122, note, "small note mid")
        starts.append(x)
        x += width + 1
    picture.arrow((starts[2], 136), (starts[2], 142), (starts[6] - 3, 142), (starts[6] - 3, 136), tip=False)
    picture.text((starts[2] + starts[6]) / 2, 160, "the parts of table w", "small note mid")
    draw_header(picture, starts[1] + 60)
    draw_blocks(picture, starts[2], starts[8])
    return picture


def draw_header(picture: Drawing, x: float) -> None:
    picture.arrow((x, 130), (x, 176))
    picture.box("left", 20, 180, 590, 122)
    lines = (
        '"__metadata__": {',
        '  "ibp.format": "1",',
        '  "ibp.table.w": "dtype=BF16 shape=4096,4096 scheme=planes codebook=0 ...",',
        '  "ibp.codebook.0": "scheme=planes row_bytes=8192 ...", ...},',
        '"w:slots": {"dtype": "U8", "shape": [...], "data_offsets": [...]}, ...',
    )
    for i, line in enumerate(lines):
        picture.parts.append(
            f'<text class="mono small" xml:space="preserve" x="32" y="{202 + 22 * i}">{escape(line)}</text>'
        )


def draw_blocks(picture: Drawing, first: float, last: float) -> None:
    """Draws the blocks of 1 MiB that have a checksum each."""
    y, step = 330, (last - first) / 5
    picture.text(20, y + 17, "blocks of 1 MiB", "head")
    for block in range(5):
        picture.box("left", first + block * step, y, step, 26, f"block {block}", "small")
    picture.arrow((last + 4, y + 13), (last + 41, y + 13), (last + 41, 130))
    picture.text(
        20,
        386,
        "Each block of the data has a checksum in the last tensor, and so has the header: a flipped bit is found",
    )
    picture.text(20, 406, "and named. Rows are read from a memory map, where they are.")


# ---- the floors of the sources ----

# The floors are in the reverse order of tools/shape.py. Each has (kind, what it is, folders).
FLOORS = (
    ("coder", "commands, hosts", ("_cli", "integrations")),
    ("coder", "models, ranks", ("nn", "optim", "_offload", "_activations", "distributed", "adapters")),
    ("coder", "versions, files", ("deltas", "_files", "checkpoints")),
    ("coder", "stores and choices", ("spill", "codecs", "kv", "calibration")),
    ("coder", "hot rows", ("cache",)),
    ("kept", "a table and its verbs", ("_tables",)),
    ("kept", "rows on their way", ("_fetch",)),
    ("kept", "rows, codebooks, tables", ("_rows",)),
    ("kept", "memory, rates", ("_machine",)),
    ("kept", "arguments, operations", ("_common",)),
    ("index", "torch.ops.ibp, ibp._core", ("csrc/bindings",)),
    ("raw", "kernels", ("csrc/cuda",)),
    ("raw", "the C library", ("csrc/include", "csrc/internal", "csrc/core", "csrc/x86")),
    ("plain", "the bytes", ("csrc/FORMAT.md",)),
)
FLOOR_HEIGHT, FLOOR_LEFT, FLOOR_WIDTH = 34, 200, 600


def floors() -> Drawing:
    step = FLOOR_HEIGHT + 6
    picture = Drawing(
        880, 62 + len(FLOORS) * step, "The floors of ibp: each uses only folders below it and to its left"
    )
    picture.text(20, 32, "floor", "head")
    picture.text(FLOOR_LEFT, 32, "folders of ibp/, and of csrc/", "head")
    for floor, (kind, what, folders) in enumerate(FLOORS):
        y, width = 48 + floor * step, FLOOR_WIDTH / len(folders)
        picture.text(20, y + FLOOR_HEIGHT / 2 + 5, what, "small note")
        for i, folder in enumerate(folders):
            picture.box(kind, FLOOR_LEFT + i * width, y, width - 6, FLOOR_HEIGHT, folder)
    x = FLOOR_LEFT + FLOOR_WIDTH + 30
    picture.arrow((x, 48), (x, 48 + len(FLOORS) * step - 6))
    picture.text(x - 8, 32, "uses", "small note")
    return picture


PICTURES = {
    "rows": rows,
    "masks": masks,
    "planes": planes,
    "listed": listed,
    "fetch": fetch,
    "file": file,
    "floors": floors,
}


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    directory.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (directory / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
