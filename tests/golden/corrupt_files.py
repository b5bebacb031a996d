"""Edits of golden files that a reader refuses, and what it says: `CASES`, by name."""

from __future__ import annotations

import dataclasses

from golden.make_files import FILES


@dataclasses.dataclass(frozen=True)
class Case:
    """A golden file with something wrong.

    Attributes:
        file: its name.
        message: a pattern of the error's message.
        tensor: that is refused; None: the whole file is.
        text: what stands in the header, and what is put in its place. The header keeps its size.
        data: the new bytes of the file, from its old ones.
    """

    file: str
    message: str
    tensor: str | None = None
    text: tuple[str, str] | None = None
    data: object = None

    def bytes(self) -> bytes:
        data = (FILES / self.file).read_bytes()
        if self.text is None:
            return self.data(data)
        old, new = self.text
        return with_header(data, header_of(data).replace(old, new))


def header_of(data: bytes) -> str:
    return data[8 : 8 + int.from_bytes(data[:8], "little")].decode()


def with_header(data: bytes, text: str) -> bytes:
    """The file with another header, which has the size of the old one where it fits."""
    size = int.from_bytes(data[:8], "little")
    header = text.rstrip(" ").encode()
    header = header.ljust(size if len(header) <= size else -(-(len(header) + 8) // 128) * 128 - 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def moved(data: bytes) -> bytes:
    """The second and the third tensor begin a byte later."""
    text = header_of(data).replace("[3, 19]", "[4, 20]").replace("[19, 23]", "[20, 24]")
    return with_header(data, text) + b"\0"


def with_header_size(size: int):
    return lambda data: size.to_bytes(8, "little") + data[8:]


def with_empty(header: str, shape: str) -> str:
    """A header that has one more tensor, without bytes."""
    return f'{{"another":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}},{header[1:]}'


def followed(data: bytes) -> bytes:
    """A tensor of 8 bytes follows the checksums."""
    end = len(data) - 8 - int.from_bytes(data[:8], "little")
    entry = f'{{"after":{{"dtype":"U8","shape":[8],"data_offsets":[{end},{end + 8}]}},'
    return with_header(data, entry + header_of(data)[1:]) + bytes(8)


def entry_of(data: bytes, name: str) -> tuple[int, str]:
    """Where a tensor's bytes begin in the file, and its entry in the header as text."""
    text = header_of(data)
    start = text.index(f'"{name}":{{')
    entry = text[start : text.index("}", start) + 1]
    offset = int(entry.rpartition("[")[2].split(",")[0])
    return 8 + len(text.encode()) + offset, entry


def written(name: str, new: bytes):
    """A tensor's data begins with other bytes."""

    def edit(data: bytes) -> bytes:
        start, _ = entry_of(data, name)
        return data[:start] + new + data[start + len(new) :]

    return edit


def flipped(name: str, at: int = 0, bits: int = 1):
    """A bit of a tensor's data is another."""

    def edit(data: bytes) -> bytes:
        start, _ = entry_of(data, name)
        return data[: start + at] + bytes([data[start + at] ^ bits]) + data[start + at + 1 :]

    return edit


def without(name: str):
    """The entry of a tensor is gone, and its bytes belong to a filler."""

    def edit(data: bytes) -> bytes:
        _, entry = entry_of(data, name)
        start, end = entry.rpartition("[")[2].rstrip("]}").split(",")
        size = int(end) - int(start)
        filler = f'"ibp.padding.900":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{end}]}}'
        return with_header(data, header_of(data).replace(entry, filler))

    return edit


SLOTS = '"ibp.table.slots":"dtype=BF16 shape=40,24 scheme=raw row_bytes=48 slot_bytes=48'
MASKS = "scheme=ibp row_bytes=160 chunk_bytes=4 flag_all=0 pairs=1"
PLANES = "scheme=planes row_bytes=192 element_bytes=2 rotate=1 residual_bits=8 digit_bits=4,4"


def of_table(new: str, message: str) -> Case:
    """A wrong line of a table of raw rows."""
    return Case("raw.safetensors", message, "slots", (SLOTS, f'"ibp.table.slots":"{new}'))


def of_masks(new: str, message: str) -> Case:
    return Case("masks.safetensors", message, "slots", (MASKS, new))


def of_planes(old: str, new: str, message: str) -> Case:
    return Case("planes.safetensors", message, "bfloat16", (PLANES, PLANES.replace(old, new)))


OF_FILES = {
    "nothing": Case("raw.safetensors", "is no file of safetensors: it has 0 bytes", data=lambda data: b""),
    "seven bytes": Case("raw.safetensors", "it has 7 bytes", data=lambda data: data[:7]),
    "no header": Case("raw.safetensors", "its header has 0;", data=with_header_size(0)),
    "a header beyond the end": Case("raw.safetensors", "its header has 100000;", data=with_header_size(100_000)),
    "a header of 2^63 bytes": Case(
        "raw.safetensors", "its header has 9223372036854775808", data=with_header_size(2**63)
    ),
    "a header that is cut": Case("raw.safetensors", "wanted a header in JSON, from { to }", data=with_header_size(200)),
    "a byte less": Case("raw.safetensors", "within the file, which was cut or added to", data=lambda data: data[:-1]),
    "a byte more": Case("raw.safetensors", "it was cut or added to", data=lambda data: data + b"\0"),
    "half of it": Case("mixed.safetensors", "wanted 2 to", data=lambda data: data[: len(data) // 8]),
    "most of it": Case(
        "masks.safetensors", "within the file, which was cut or added to", data=lambda data: data[: len(data) - 5000]
    ),
    "no JSON": Case("raw.safetensors", "wanted JSON: a name and a colon", text=('{"__metadata__"', '{__metadata__"')),
    "a list": Case("raw.safetensors", "wanted a header in JSON, from {", data=lambda data: with_header(data, "[1]")),
    "no Unicode": Case(
        "raw.safetensors", "wanted JSON: a name and a colon", data=lambda data: data[:12] + b"\xff" + data[13:]
    ),
    "half a surrogate pair": Case("mixed.safetensors", "ud800.*wanted JSON", text=("no dimension", "\\ud800")),
    "nested lists": Case(
        "raw.safetensors",
        "it has .*; wanted JSON: dtype, shape and data_offsets",
        data=lambda data: with_header(data, '{"a":' + "[" * 99999 + "]" * 99999 + "}"),
    ),
    "a number of many digits": Case(
        "raw.safetensors",
        "wanted JSON: dtype, shape and data_offsets",
        data=lambda data: with_header(data, '{"a":' + "9" * 5000 + "}"),
    ),
    "too many bits": Case(
        "raw.safetensors",
        r"it has .*\[4611686018427387904,8,0\].*; wanted a shape of at most 2\^63 - 1 bits, each size 0 taken as 1",
        data=lambda data: with_header(data, with_empty(header_of(data), "4611686018427387904,8,0")),
    ),
    "too many bits behind a zero": Case(
        "raw.safetensors",
        r"it has .*\[0,1152921504606846976\].*; wanted a shape of at most",
        data=lambda data: with_header(data, with_empty(header_of(data), "0,1152921504606846976")),
    ),
    "escaped digits": Case(
        "raw.safetensors",
        r"\[\\+u0031\\+u0032\\+u0038\].*wanted JSON: dtype",
        text=('"shape":[128]', '"shape":[\\u0031\\u0032\\u0038]'),
    ),
    "not a number": Case("raw.safetensors", r"\[NaN\].*wanted JSON", text=('"shape":[128]', '"shape":[NaN]')),
    "a key that is there twice": Case(
        "raw.safetensors",
        "it has 'ibp.table.slots'; wanted each name of a file of ibp once",
        text=("ibp.release", "ibp.format"),
    ),
    "a tensor that is there twice": Case(
        "raw.safetensors", "'packed:overflow' is there twice", text=("packed:bases", "packed:overflow")
    ),
    "metadata that is no text": Case(
        "raw.safetensors", "wanted text by text in __metadata__", text=('"ibp.format":"1"', '"ibp.format":1')
    ),
    "another field of a tensor": Case(
        "raw.safetensors",
        "shapes.*; wanted JSON: dtype, shape and data_offsets of a tensor, and no other fields",
        text=('"shape":', '"shapes":'),
    ),
    "a size that is no number": Case(
        "raw.safetensors", r'\["128"\].*wanted JSON: dtype', text=('"shape":[128]', '"shape":["128"]')
    ),
    "a size that is a fraction": Case(
        "raw.safetensors", r"\[128.0\].*wanted JSON: dtype", text=('"shape":[128]', '"shape":[128.0]')
    ),
    "a negative size": Case(
        "raw.safetensors", r"\[-128\].*wanted JSON: dtype", text=('"shape":[128]', '"shape":[-128]')
    ),
    "a size that is true": Case(
        "raw.safetensors", r"\[true\].*wanted JSON: dtype", text=('"shape":[128]', '"shape":[true]')
    ),
    "another size": Case(
        "raw.safetensors",
        r'"U8","shape":\[127\].*; wanted as many bytes as its dtype and shape have',
        text=('"shape":[128]', '"shape":[127]'),
    ),
    "another dtype": Case(
        "raw.safetensors",
        r'"U16","shape":\[1920\].*; wanted as many bytes as its dtype and shape have',
        text=('"dtype":"U8"', '"dtype":"U16"'),
    ),
    "a gap": Case("foreign.safetensors", "wanted tensors one after the other up to the end of the file", data=moved),
    "data from back to front": Case(
        "delta.safetensors",
        r"\[128,0\].*; wanted the first byte and the end of its data in data_offsets",
        text=("[0,128]", "[128,0]"),
    ),
    "a newer format": Case(
        "raw.safetensors",
        r"has format 2, and ibp .* reads formats up to 1: ibp \d+\.\d+\.\d+ wrote it and reads it",
        text=('"ibp.format":"1"', '"ibp.format":"2"'),
    ),
    "format 0": Case("raw.safetensors", "wanted a number from 1 on", text=('"ibp.format":"1"', '"ibp.format":"0"')),
    "a format in words": Case(
        "raw.safetensors", "wanted a number from 1", text=('"ibp.format":"1"', '"ibp.format":"one"')
    ),
    "a table and a tensor of one name": Case(
        "mixed.safetensors",
        "there are a table and a tensor of the name 'bool'",
        text=("ibp.table.table", "ibp.table.bool"),
    ),
}
OF_TABLES = {
    "an unknown field": of_table(
        "colour=1 dtype=BF16 shape=40,24 scheme=raw row_bytes=48 slot_bytes=48",
        "table 'slots': it has 'colour=1'; wanted a field that this release knows: a newer one may",
    ),
    "no scheme": of_table("dtype=BF16 shape=40,24 row_bytes=48 slot_bytes=48", "the field 'scheme' is missing"),
    "another scheme": of_table(
        "dtype=BF16 shape=40,24 scheme=zip row_bytes=48 slot_bytes=48",
        "table 'slots': scheme is 'zip'; wanted a scheme that this release knows",
    ),
    "a field that is there twice": of_table(
        "dtype=BF16 dtype=BF16 shape=40,24 scheme=raw row_bytes=48 slot_bytes=48", "twice"
    ),
    "two spaces": of_table("dtype=BF16  shape=40,24 scheme=raw row_bytes=48 slot_bytes=48", "wanted key=value"),
    "a field without a value": of_table("dtype shape=40,24 scheme=raw row_bytes=48 slot_bytes=48", "wanted key=value"),
    "no fields": of_table('","x":"', "table 'slots': the field 'scheme' is missing"),
    "another dtype of the table": of_table(
        "dtype=BF17 shape=40,24 scheme=raw row_bytes=48 slot_bytes=48", "is none of torch"
    ),
    "a name that is no dtype": of_table(
        "dtype=LOAD shape=40,24 scheme=raw row_bytes=48 slot_bytes=48", "is none of torch"
    ),
    "quantized elements": of_table(
        "dtype=QINT8 shape=40,24 scheme=raw row_bytes=48 slot_bytes=48", "has QINT8, which tables cannot have"
    ),
    "elements of 16 bytes": of_table(
        "dtype=COMPLEX128 shape=10,12 scheme=raw row_bytes=48 slot_bytes=48", "has COMPLEX128, which tables cannot have"
    ),
    "another shape": of_table(
        "dtype=BF16 shape=80,24 scheme=raw row_bytes=48 slot_bytes=48", "wanted U8 of 3840 bytes"
    ),
    "a negative dimension": of_table(
        "dtype=BF16 shape=-40,24 scheme=raw row_bytes=48 slot_bytes=48", "shape is '-40,24'"
    ),
    "a dimension in other digits": of_table("dtype=BF16 shape=٤,24 scheme=raw row_bytes=48 slot_bytes=48", "shape is"),
    "a huge shape": of_table(
        "dtype=BF16 shape=4294967296,4294967296 scheme=raw row_bytes=48 slot_bytes=48",
        r"wanted at most 2\^63 - 1 bits",
    ),
    "a huge shape without elements": of_table(
        "dtype=BF16 shape=4611686018427387904,8,0 scheme=raw row_bytes=48 slot_bytes=48",
        r"wanted at most 2\^63 - 1 bits",
    ),
    "a leading zero": of_table("dtype=BF16 shape=40,24 scheme=raw row_bytes=048 slot_bytes=48", "row_bytes is '048'"),
    "a leading zero in a list": of_table("dtype=BF16 shape=040,24 scheme=raw row_bytes=48 slot_bytes=48", "shape is"),
    "rows without bytes": of_table(
        "dtype=BF16 shape=40,24 scheme=raw row_bytes=0 slot_bytes=48",
        "row_bytes is '0'; wanted a number from 1 to 65536",
    ),
    "long rows": of_table(
        "dtype=BF16 shape=40,24 scheme=raw row_bytes=65537 slot_bytes=48",
        "row_bytes is '65537'; wanted a number from 1 to 65536",
    ),
    "slots of an odd size": of_table(
        "dtype=BF16 shape=40,24 scheme=raw row_bytes=48 slot_bytes=33", "wanted|slot_bytes"
    ),
    "raw rows that have a codebook": of_table(
        "dtype=BF16 shape=40,24 scheme=raw row_bytes=48 slot_bytes=48 codebook=0", "codebook"
    ),
    "rows a base": of_table(
        "dtype=BF16 shape=40,24 scheme=raw row_bytes=48 slot_bytes=48 rows_per_base=7", "wanted 32 or 1"
    ),
    "half of a delta": of_table(
        "dtype=BF16 shape=40,24 scheme=raw row_bytes=48 slot_bytes=48 base=0000000000000000",
        "the field 'result' is missing",
    ),
    "a delta with content": of_table(
        "dtype=BF16 shape=40,24 scheme=raw row_bytes=48 slot_bytes=48 base=0000000000000000 result=0000000000000000",
        "content is '.*'; wanted no such field beside the others",
    ),
    "another content": Case(
        "raw.safetensors",
        "wanted 16 hexadecimal digits",
        "slots",
        ("slot_bytes=48 content=", "slot_bytes=48 content=0x"),
    ),
    "no slots": Case(
        "raw.safetensors", "'slots:slots', of 1920 bytes, is missing", "slots", data=without("slots:slots")
    ),
    "no bases": Case(
        "raw.safetensors", "'packed:bases', of 16 bytes, is missing", "packed", data=without("packed:bases")
    ),
    "no lengths": Case(
        "masks.safetensors", "'slots:lengths', of 140 bytes, is missing", "slots", data=without("slots:lengths")
    ),
    "a part of another table": Case(
        "raw.safetensors", "which such a table lacks", "slots", text=("packed:overflow", "slots:overflow")
    ),
    "a codebook that is not there": Case(
        "masks.safetensors", "has no codebook 9", "slots", ("codebook=0 content", "codebook=9 content")
    ),
    "a codebook of other rows": Case(
        "masks.safetensors", "the table's codebook is", "slots", ("codebook=0 content", "codebook=3 content")
    ),
    "no codec": Case(
        "codec.safetensors", "is coded by 'example_zlib'", "coded", text=("codec_level=6", "codec_level=7")
    ),
    "a codec's field that is none": Case(
        "codec.safetensors",
        "it has 'level=6'; wanted a field that this release knows",
        "coded",
        text=("codec_level=6", "level=6"),
    ),
}
OF_CODEBOOKS = {
    "no pairs": of_masks(MASKS.replace("pairs=1", "pairs=0"), "pairs is '0'; wanted a number from 1 to 65536"),
    "more pairs": of_masks(MASKS.replace("pairs=1", "pairs=30"), "'ibp.codebook.0:palette' is U8"),
    "pairs without an index": of_masks(
        MASKS.replace("pairs=1", "pairs=2"), "'ibp.codebook.0:index', of 40 bytes, is missing"
    ),
    "too many pairs": of_masks(MASKS.replace("pairs=1", "pairs=65537"), "pairs is '65537'"),
    "chunks of 3 bytes": of_masks(MASKS.replace("chunk_bytes=4", "chunk_bytes=3"), "wanted 1, 2, 4 or 8"),
    "a flag of 2": of_masks(MASKS.replace("flag_all=0", "flag_all=2"), "flag_all is '2'"),
    "bitvals without a mask": Case(
        "masks.safetensors", "codebook 0: .*bit", "slots", data=written("ibp.codebook.0:palette", b"\0\0\0\0\1")
    ),
    "a tau that is no number": Case("masks.safetensors", "tau is 'nan'", "slots", text=("tau=0.55", "tau=nan")),
    "another field of a codebook": of_masks(f"colour=1 {MASKS}", "it has 'colour=1'; wanted a field that"),
    "elements of 3 bytes": of_planes("element_bytes=2", "element_bytes=3", "element_bytes is '3'; wanted 1, 2, 4 or 8"),
    "elements of no bytes": of_planes(
        "element_bytes=2", "element_bytes=0", "element_bytes is '0'; wanted 1, 2, 4 or 8"
    ),
    "rows of no elements": of_planes("row_bytes=192", "row_bytes=0", "codebook .*: row_bytes is '0'"),
    "rotated by two": of_planes("rotate=1", "rotate=2", "codebook .*: rotate is '2'; wanted a number from 0 to 1"),
    "long residuals": of_planes(
        "residual_bits=8",
        "residual_bits=17",
        "residual_bits is '17'; wanted at most as many bits as an element has left",
    ),
    "a residual of 2^64 bits": of_planes(
        "residual_bits=8",
        "residual_bits=18446744073709551615",
        "residual_bits is '18446744073709551615'; wanted at most",
    ),
    "digits of 5 bits": of_planes("digit_bits=4,4", "digit_bits=4,5", "digit_bits is '4,5'"),
    "digits of no bits": of_planes(
        "digit_bits=4,4", "digit_bits=4,4,0", "digit_bits is '4,4,0'; wanted at most 4 numbers from 1 to 4"
    ),
    "five planes": of_planes("digit_bits=4,4", "digit_bits=1,1,1,1,1", "wanted at most 4 numbers"),
    "a list that ends too late": of_planes("digit_bits=4,4", "digit_bits=4,4,", "digit_bits is"),
    "a flag that is there twice": of_planes("rotate=1", "rotate=1 per_column=1", "there twice"),
    "live columns that do not increase": Case(
        "planes.safetensors",
        "codebook 9: live_columns",
        "constant_columns",
        data=flipped("ibp.codebook.9:live_columns", 1, 255),
    ),
    "clusters within clusters": Case(
        "clusters.safetensors", "codebook 3|codebook 8", "ibp_slots", text=("clusters=0,1,2", "clusters=0,1,8")
    ),
    "clusters that are their own": Case(
        "clusters.safetensors",
        "codebook 3: it has clusters of its own",
        "ibp_slots",
        text=("clusters=0,1,2", "clusters=0,1,3"),
    ),
    "clusters of two kinds": Case(
        "clusters.safetensors", "do not fit each other", "ibp_slots", text=("clusters=0,1,2", "clusters=0,1,4")
    ),
    "no clusters": Case("clusters.safetensors", "wanted 2 to 256", "ibp_slots", text=("clusters=0,1,2", "clusters=")),
}
OF_CHECKSUMS = {
    "a bit of a table": Case(
        "masks.safetensors", "block 0, bytes .* has another checksum", "slots", data=flipped("slots:slots", 100)
    ),
    "a bit of a codebook": Case(
        "masks.safetensors", "has another checksum", "slots", data=flipped("ibp.codebook.0:palette", 0)
    ),
    "a bit of a tensor": Case("mixed.safetensors", "block 0, bytes .* is damaged", "int32", data=flipped("int32", 3)),
    "a bit of the checksums": Case(
        "raw.safetensors", "the checksums have another checksum", None, data=flipped("ibp.checks", 2)
    ),
    "a word of the header": Case(
        "mixed.safetensors", "the header has another checksum", None, text=('"note"', '"vote"')
    ),
    "another hash": Case(
        "raw.safetensors", "ibp.checks: hash is 'md5'; wanted xxh3_64", None, text=("hash=xxh3_64", "hash=md5")
    ),
    "blocks of 1000 bytes": Case(
        "raw.safetensors",
        "ibp.checks: block_bytes is '1000'; wanted a power of two",
        None,
        text=("block_bytes=1048576", "block_bytes=1000"),
    ),
    "blocks of no bytes": Case(
        "raw.safetensors",
        "ibp.checks: block_bytes is '0'; wanted a power of two",
        None,
        text=("block_bytes=1048576", "block_bytes=0"),
    ),
    "a tensor behind the checksums": Case(
        "raw.safetensors", "ibp.checks: it has 'ibp.checks'; wanted it after all other tensors", None, data=followed
    ),
    "more blocks": Case(
        "raw.safetensors",
        "wanted U64 of one dimension: an entry for each block, and two more",
        None,
        text=("block_bytes=1048576", "block_bytes=1024"),
    ),
}
CASES = {**OF_FILES, **OF_TABLES, **OF_CODEBOOKS}
