"""A reader of files in plain numpy, written from csrc/FORMAT.md, section 9, alone. It decodes rows with the other
references.

It is slow and simple on purpose, because the library's readers are compared with it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

import numpy as np
import xxhash

import reference
import reference_planes

ALIGNMENT = 128
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32", "COMPLEX32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
OWN_NAMES = ("ibp.checks", "ibp.padding.", "ibp.codebook.")
PARTS = {"slots": "U8", "overflow": "U8", "lengths": "U16", "bases": "U64"}
CODED_PARTS = {"blocks": "U8", "offsets": "U64"}


class Refused(ValueError):
    """A file that a reader must refuse."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise Refused(message)


@dataclasses.dataclass
class File:
    """A file's tensors and metadata.

    Attributes:
        tensors: dtype, shape and bytes by name.
        metadata: all metadata by name.
    """

    data: bytes
    tensors: dict[str, tuple[str, list[int], bytes]]
    metadata: dict[str, str]

    @classmethod
    def of(cls, data: bytes) -> File:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        metadata, end = header.pop("__metadata__", {}), 0
        tensors = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            bits = math.prod(max(1, size) for size in entry["shape"]) * 8 * ITEM_BYTES[entry["dtype"]]
            require(bits < 2**63, f"{name} has too large a shape")
            require(start == end, f"{name} does not begin where the one before it ends")
            require(math.prod(entry["shape"]) * ITEM_BYTES[entry["dtype"]] == stop - start, f"{name} has another size")
            tensors[name] = entry["dtype"], entry["shape"], data[8 + size + start : 8 + size + stop]
            end = stop
        require(len(data) == 8 + size + end, "the file does not end with its tensors")
        version = int(metadata.get("ibp.format", "0"))
        require(version <= 1, f"format {version}")
        named = "ibp.format" in metadata, "ibp.checks" in metadata, "ibp.checks" in tensors
        require(all(named) or not any(key.startswith("ibp.") for key in metadata), "a name of the format is missing")
        return cls(data, tensors, metadata)

    @classmethod
    def at(cls, path: pathlib.Path) -> File:
        return cls.of(path.read_bytes())

    @property
    def is_plain(self) -> bool:
        return "ibp.format" not in self.metadata

    @property
    def tables(self) -> dict[str, dict[str, str]]:
        """Returns the fields of the tables, by name."""
        start = "ibp.table."
        return {key[len(start) :]: fields_of(text) for key, text in self.metadata.items() if key.startswith(start)}

    @property
    def plain(self) -> list[str]:
        """Returns the names of the tensors that are stored as they are."""
        if self.is_plain:
            return list(self.tensors)
        parts = {f"{name}:{part}" for name in self.tables for part in (*PARTS, *CODED_PARTS)}
        return [name for name in self.tensors if name not in parts and not name.startswith(OWN_NAMES)]

    def check(self) -> None:
        """Compares all checksums, and checks the alignment that the metadata names."""
        fields = fields_of(self.metadata["ibp.checks"])
        require(fields["hash"] == "xxh3_64", "another hash")
        block_bytes, start = int(fields["block_bytes"]), 8 + int.from_bytes(self.data[:8], "little")
        name, (dtype, _, entries) = list(self.tensors.items())[-1]
        require(name == "ibp.checks" and dtype == "U64", "the last tensor is not ibp.checks")
        covered = self.data[start : len(self.data) - len(entries)]
        blocks = [covered[at : at + block_bytes] for at in range(0, len(covered), block_bytes)]
        wanted = [xxhash.xxh3_64_intdigest(block) for block in (*blocks, self.data[:start])]
        wanted.append(xxhash.xxh3_64_intdigest(np.array(wanted, "<u8").tobytes()))
        require(np.array(wanted, "<u8").tobytes() == entries, "a checksum is wrong")
        require(start % ALIGNMENT == 0, "the data is not aligned")
        at = start
        for name, (_, _, data) in self.tensors.items():
            require(at % ALIGNMENT == 0 or name.startswith("ibp.padding."), f"{name} is not aligned")
            if name.startswith("ibp.padding."):
                require(not any(data), f"{name} is not of zeros")
            at += len(data)


def fields_of(text: str) -> dict[str, str]:
    pairs = [pair.split("=", 1) for pair in text.split(" ")]
    require(len({key for key, _ in pairs}) == len(pairs), "a field is there twice")
    return dict(pairs)


def numbers_of(text: str) -> list[int]:
    return [int(part) for part in text.split(",")] if text else []


# ---- codebooks -----------------------------------------------------------------------------------------------------


def codebook_part(file: File, number: int, part: str, dtype: str, count: int) -> np.ndarray:
    """Returns the entries of a part without padding."""
    numpy_dtype = np.dtype(f"<u{ITEM_BYTES[dtype]}")
    if count == 0:
        return np.empty(0, numpy_dtype)
    return array_of(file.tensors[f"ibp.codebook.{number}:{part}"], dtype, count)


def array_of(tensor: tuple[str, list[int], bytes], dtype: str, count: int) -> np.ndarray:
    found, shape, data = tensor
    size = count * ITEM_BYTES[dtype]
    require(found == dtype and len(shape) == 1, "a part has another dtype or shape")
    require(len(data) == -(-size // ALIGNMENT) * ALIGNMENT and not any(data[size:]), "a part has another size")
    return np.frombuffer(data[:size], f"<u{ITEM_BYTES[dtype]}")


def read_codebooks(file: File, number: int) -> list:
    """Returns the codebooks of the clusters, or one codebook if there are no clusters."""
    fields = fields_of(file.metadata[f"ibp.codebook.{number}"])
    if "clusters" in fields:
        return [codebook for k in numbers_of(fields["clusters"]) for codebook in read_codebooks(file, k)]
    return [read_masks(file, number, fields) if fields["scheme"] == "ibp" else read_planes(file, number, fields)]


def read_masks(file: File, number: int, fields: dict[str, str]) -> reference.Codebook:
    row_bytes, chunk_bytes, pairs = (int(fields[key]) for key in ("row_bytes", "chunk_bytes", "pairs"))
    palette = codebook_part(file, number, "palette", "U8", 2 * pairs * chunk_bytes).reshape(pairs, 2, chunk_bytes)
    num_chunks = reference.ceil_div(row_bytes, chunk_bytes)
    index = codebook_part(file, number, "index", "U8" if pairs <= 256 else "U16", num_chunks if pairs > 1 else 0)
    return reference.Codebook(row_bytes, chunk_bytes, fields["flag_all"] == "1", palette, index)


def read_planes(file: File, number: int, fields: dict[str, str]) -> reference_planes.Codebook:
    names = ("element_bytes", "row_bytes", "rotate", "residual_bits", "default", "closed")
    values = {name: int(fields[name]) for name in (*names, "invariant_bits", "invariant_value")}
    values |= {name: fields[name] == "1" for name in ("per_column", "listed", "signed_default")}
    values["digit_bits"] = digits = tuple(numbers_of(fields["digit_bits"]))
    columns = values["row_bytes"] // values["element_bytes"]
    if "live" in fields:
        columns = int(fields["live"])
        values["live_columns"] = tuple(codebook_part(file, number, "live_columns", "U16", columns).tolist())
        values["row_template"] = codebook_part(file, number, "row_template", "U8", values["row_bytes"]).tobytes()
    symbol_bits = 8 * values["element_bytes"] - values["invariant_bits"] - values["residual_bits"]
    symbol = reference_planes.symbol_type(symbol_bits)
    shape = (columns if values["per_column"] else 1, sum(2**b - 1 for b in digits))
    if "first_symbol" in fields:
        values["first_symbol"] = int(fields["first_symbol"])
        entries = np.zeros((1, 0), symbol)
    else:
        part = codebook_part(file, number, "entries", f"U{8 * symbol.itemsize}", math.prod(shape))
        entries = part.reshape(shape)
    return reference_planes.Codebook(**values, entries=entries)


# ---- tables --------------------------------------------------------------------------------------------------------


def decode(files: list[File], name: str) -> tuple[str, list[int], bytes]:
    """Returns dtype, shape and bytes of a tensor in a set of files. For a delta, these are those of the differences."""
    for file in files:
        if name in file.tables:
            return decode_table(files, file, name)
    return next(file.tensors[name] for file in files if name in file.plain)


def decode_table(files: list[File], file: File, name: str) -> tuple[str, list[int], bytes]:
    fields = file.tables[name]
    if "codec" in fields:
        return decode_whole(files, fields, name)
    known = {"dtype", "shape", "scheme", "row_bytes", "slot_bytes", "codebook", "rows_per_base", "content"}
    require(fields.keys() <= known | {"base", "result"}, "a field is unknown")
    shape = numbers_of(fields["shape"])
    table = table_of(files, file, name, math.prod(shape) * ITEM_BYTES[fields["dtype"]])
    codebooks = [] if fields["scheme"] == "raw" else read_codebooks(file, int(fields["codebook"]))
    if codebooks and isinstance(codebooks[0], reference_planes.Codebook):
        table.default = codebooks[0].default_row
    data = b"".join(decode_row(table, codebooks, row) for row in range(table.num_rows))
    require("content" not in fields or reference.fingerprint(data) == int(fields["content"], 16), "another content")
    return fields["dtype"], shape, data


def decode_whole(files: list[File], fields: dict[str, str], name: str) -> tuple[str, list[int], bytes]:
    """Decodes a table of an external codec, whose blocks are raw or compressed by a codec of the CPU."""
    codec, block_bytes, shape = fields["codec"], int(fields["block_bytes"]), numbers_of(fields["shape"])
    require(codec in ("zstd", "lz4"), f"codec {codec}")
    known = {"dtype", "shape", "codec", "block_bytes", "content"}
    require(fields.keys() <= known and block_bytes > 0, "a field is unknown, or blocks have no bytes")
    num_bytes = math.prod(shape) * ITEM_BYTES[fields["dtype"]]
    count = reference.ceil_div(num_bytes, block_bytes)
    found = {part: one.tensors.get(f"{name}:{part}") for one in files for part in ("blocks", "offsets")}
    offsets = array_of(found["offsets"], "U64", count + 1).tolist()
    require(offsets[0] == 0 and offsets == sorted(offsets), "offsets do not rise")
    blocks = array_of(found["blocks"], "U8", offsets[-1]).tobytes() if count else b""
    data = b""
    for number in range(count):
        valid = min(block_bytes, num_bytes - number * block_bytes)
        data += decode_block(codec, blocks[offsets[number] : offsets[number + 1]], valid)
    require("content" not in fields or reference.fingerprint(data) == int(fields["content"], 16), "another content")
    return fields["dtype"], shape, data


def decode_block(codec: str, block: bytes, valid: int) -> bytes:
    """Returns the bytes of a block, decoded by a codec of the CPU."""
    if len(block) == valid:
        return block
    if codec == "zstd":
        import zstandard

        return zstandard.ZstdDecompressor().decompress(block, max_output_size=valid)
    import lz4.block

    return lz4.block.decompress(block, uncompressed_size=valid)


def table_of(files: list[File], file: File, name: str, num_bytes: int) -> reference.Table:
    """Returns the arrays of a table, without its codebook, from whichever files have them."""
    fields = file.tables[name]
    row_bytes, slot_bytes = int(fields["row_bytes"]), int(fields["slot_bytes"])
    rows_per_base, is_raw = int(fields.get("rows_per_base", "32")), fields["scheme"] == "raw"
    num_rows = reference.ceil_div(num_bytes, row_bytes)
    found = {part: one.tensors[f"{name}:{part}"] for one in files for part in PARTS if f"{name}:{part}" in one.tensors}
    sizes = {
        "slots": num_bytes if slot_bytes == row_bytes else num_rows * slot_bytes,
        "lengths": 0 if is_raw else num_rows,
        "bases": reference.ceil_div(num_rows, rows_per_base) if "bases" in found else 0,
        "overflow": len(found["overflow"][2]) if "overflow" in found else 0,
    }
    if is_raw and slot_bytes != row_bytes:
        valid = [min(row_bytes, num_bytes - row * row_bytes) for row in range(num_rows)]
        parts = [max(0, size - slot_bytes) for size in valid]
        sizes["overflow"] = sum(reference.ceil_div(part, 32) * 32 if slot_bytes else part for part in parts)
    arrays = {}
    for part, count in sizes.items():
        require((count > 0) == (part in found), f"{part} is missing, or there though it is empty")
        arrays[part] = (
            array_of(found[part], PARTS[part], count) if count else np.empty(0, f"<u{ITEM_BYTES[PARTS[part]]}")
        )
    return reference.Table(num_bytes, row_bytes, slot_bytes, None, rows_per_base=rows_per_base, **arrays)


def decode_row(table: reference.Table, codebooks: list, row: int) -> bytes:
    stored = reference.stored_row(table, row).tobytes()
    if table.is_default(row):
        return table.default_row(row)
    if len(table.lengths) == 0 or table.lengths[row] == 0:
        return stored
    codebook, coded = codebooks[0], stored
    if len(codebooks) > 1:
        require(stored and stored[0] < len(codebooks), "the row names no codebook")
        codebook, coded = codebooks[stored[0]], stored[1:]
    coder = reference_planes if isinstance(codebook, reference_planes.Codebook) else reference
    return coder.decode_row(codebook, coded)[: table.valid(row)]
