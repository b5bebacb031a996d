"""Writes files/ with the library: `python tests/golden/make_files.py`. Files of format version 1 stay as they are for
good: a later version gets files of its own beside them.

files/*.safetensors: a file for each feature, and a set of two. contents.json: what they hold. corrupt.json: edits of
these files, and what a reader says of each.
"""

import hashlib
import json
import pathlib
import sys
import zlib

import numpy as np
import torch

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "support"), str(HERE.parent.parent)]
import ibp  # noqa: E402
from golden import make_clusters, make_planes  # noqa: E402
from helpers import bytes_of, make_tensor, planes_codebook, spiky_rows  # noqa: E402
from ibp._files import FileWriter, TableFields, dtype_name, write_plain, write_table  # noqa: E402

FILES = HERE / "files"
PAGEABLE = {"device": "cpu", "memory": "host"}
PLANES = (
    "bfloat16",
    "float32_per_column",
    "int64_whole_symbols",
    "no_planes",
    "invariant_bits",
    "consecutive",
    "listed_zeros_and_ones",
    "listed_int64",
    "listed_signed_default",
    "constant_columns",
    "listed_constant_columns",
)
DTYPES = ("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "uint16", "float16", "bfloat16", "int32", "float32")


def rows_as_table(rows, codebook, **options):
    """A table of uint8 items, each a row."""
    return ibp.compress(torch.from_numpy(np.ascontiguousarray(rows)), codebook=codebook, **options, **PAGEABLE)


def made_table(x, slots, overflow, lengths, bases, slot_bytes, row_bytes, codebook=None):
    """A table of given arrays, which `compress` would not choose."""
    arrays = {"slots": slots, "overflow": overflow, "lengths": lengths, "bases": bases.view(np.int64)}
    return ibp.CompressedTensor(
        shape=tuple(x.shape),
        dtype=x.dtype,
        scheme="raw" if codebook is None else codebook.scheme,
        row_bytes=row_bytes,
        slot_bytes=slot_bytes,
        codebook=codebook,
        **{name: torch.from_numpy(array.copy()) for name, array in arrays.items()},
    )


def raw_tables():
    x = torch.randn(40, 24).bfloat16()
    data = bytes_of(x).numpy()
    rows, none = data.reshape(40, 48), np.zeros(0, np.uint8)
    overflow = np.pad(rows[:, 32:], ((0, 0), (0, 16))).reshape(-1)
    starts = np.array([0, 32 * 32], np.uint64)
    return {
        "slots": ibp.compress(x, scheme="raw", **PAGEABLE),
        "overflowing": made_table(x, rows[:, :32].reshape(-1), overflow, none.view("<u2"), starts, 32, 48),
        "packed": made_table(x, none, data, none.view("<u2"), np.array([0, 32 * 48], np.uint64), 0, 48),
        "short last row": ibp.compress(torch.randn(1100), scheme="raw", row_bytes=1000, **PAGEABLE),
        "no dimension": ibp.compress(torch.tensor(2.5), scheme="raw", **PAGEABLE),
        "empty": ibp.compress(torch.empty(0, 5), **PAGEABLE),
    }


def mask_tables():
    x = spiky_rows(70, 40)
    wide = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (9, 640), np.uint8))
    book = ibp.codecs.Codebook.from_masks(wide[0], wide[0] & wide[1], 2)
    wide[2:] = wide[2:] & ~wide[0] | (wide[0] & wide[1])
    return {
        "slots": ibp.compress(x, scheme="ibp", slot_bytes=32, **PAGEABLE),
        "packed": ibp.compress(x, scheme="ibp", layout="packed", chunk_bytes=8, **PAGEABLE),
        "in place": ibp.compress(x, codebook=ibp.codecs.analyze(x, paper=True), slot_bytes=160, **PAGEABLE),
        "index of 16 bits": ibp.compress(wide, codebook=book, layout="packed", **PAGEABLE),
        "short last row": ibp.compress(x.view(-1)[:1501], scheme="ibp", row_bytes=160, **PAGEABLE),
    }


def planes_tables():
    made = {}
    for name in PLANES:
        codebook, rows = make_planes.make_rows(list(make_planes.CASES).index(name), name)
        made[name] = rows_as_table(rows, planes_codebook(codebook), layout="packed")
    codebook, rows = make_planes.make_rows(0, "bfloat16")
    made["slots"] = rows_as_table(np.tile(rows, (5, 1)), planes_codebook(codebook), slot_bytes=128)
    return made


def cluster_tables():
    made = {}
    for name in ("ibp_slots", "planes_slots", "planes_packed_per_column"):
        codebooks, data, table, _ = make_clusters.load(name)
        if name.startswith("ibp"):
            books = [
                ibp.codecs.Codebook.from_masks(*map(torch.tensor, masks_of(one)), one.chunk_bytes) for one in codebooks
            ]
        else:
            books = [planes_codebook(one) for one in codebooks]
        arrays = {part: getattr(table, part) for part in ("slots", "overflow", "lengths", "bases")}
        joined, x = ibp.codecs.ClusteredCodebook(books, 0.25), torch.from_numpy(data.copy())
        made[name] = made_table(x, **arrays, slot_bytes=table.slot_bytes, row_bytes=table.row_bytes, codebook=joined)
    return made


def masks_of(codebook):
    return [mask.copy() for mask in make_clusters.reference.masks_of(codebook)]


def changed_tables():
    table = ibp.compress(spiky_rows(70, 40), slot_bytes=32, **PAGEABLE)
    table.update_(torch.tensor([3, 69, 5]), torch.randn(3, 40))
    packed = ibp.compress(spiky_rows(40, 30), layout="packed", **PAGEABLE)
    packed.update_(torch.tensor([0]), torch.randn(1, 30))
    return {"slots": table, "packed": packed}


def mixed():
    tensors = {name: make_tensor((3, 5), getattr(torch, name), "random") for name in DTYPES}
    x = torch.randn(30, 20).bfloat16()
    table = ibp.compress(x, scheme="planes", **PAGEABLE)
    same = ibp.compress(x[:10], codebook=table.codebook, **PAGEABLE)
    more = {"no dimension": torch.tensor(7), "empty": torch.empty(2, 0), 'ünï/código "x"\\': torch.ones(1)}
    return {"table": table, **tensors, "same codebook": same, **more}


def delta():
    base = {"w": torch.randn(40, 64).bfloat16(), "gone": torch.ones(2), "fp32": torch.randn(50)}
    new = {"w": base["w"].clone(), "fp32": base["fp32"].clone(), "new": torch.arange(3)}
    new["w"][3, :9] += 1
    new["fp32"][7] = 0
    return ibp.deltas.make(new, base)


def write_codec():
    """A table of a codec that no reader has, between ones that all have."""
    x = torch.arange(1000, dtype=torch.int32)
    data = bytes_of(x).numpy().tobytes()
    blocks = [zlib.compress(data[start : start + 2048]) for start in range(0, len(data), 2048)]
    offsets = np.cumsum([0, *map(len, blocks)]).astype("<u8")
    with FileWriter(FILES / "codec.safetensors", header_bytes=4096) as writer:
        write_plain(writer, "before", x[:10])
        facts = "dtype=I32 shape=1000 codec=example_zlib block_bytes=2048"
        text = f"{facts} content={ibp.deltas.fingerprint(x):016x} codec_level=6"
        writer._lines["ibp.table.coded"] = text
        for part, dtype, array in (("blocks", "U8", b"".join(blocks)), ("offsets", "U64", offsets)):
            with writer.part(f"coded:{part}", dtype) as write:
                write(array)
        write_table(writer, "after", ibp.compress(x.view(10, 100), **PAGEABLE))
    return {"before": x[:10], "after": x.view(10, 100)}


def general_tables():
    """Tables of zstd and of LZ4: several blocks, of which one is as it is and the last one short; one without bytes."""
    random = torch.randint(-(2**31), 2**31, (1024,), generator=torch.Generator().manual_seed(0)).int()
    ids = torch.cat([torch.arange(2500, dtype=torch.int32) // 3, random, torch.arange(1000, dtype=torch.int32)])
    options = {"chunk_bytes": 4096, "memory": "host"}
    return {
        "zstd": ibp.compress(ids, scheme="zstd", **options),
        "lz4": ibp.compress(ids[:4000].view(40, 100), scheme="lz4", **options),
        "empty": ibp.compress(ids[:0], scheme="zstd", **options),
        "plain": ids[:7],
    }


def write_set():
    """Two files; of one table the overflow is in the other file."""
    split = ibp.compress(spiky_rows(70, 40), scheme="planes", slot_bytes=32, **PAGEABLE)
    own = ibp.compress(spiky_rows(30, 20), layout="packed", **PAGEABLE)
    names = [f"set-0000{number}-of-00002.safetensors" for number in (1, 2)]
    with (
        FileWriter(FILES / names[0], header_bytes=4096) as first,
        FileWriter(FILES / names[1], header_bytes=4096) as second,
    ):
        number = first.codebook(split.codebook)
        fields = TableFields(
            dtype_name(split.dtype), tuple(split.shape), split.scheme, split.row_bytes, split.slot_bytes, number
        )
        first.table("split", fields)
        for writer, part in ((first, "slots"), (first, "lengths"), (first, "bases"), (second, "overflow")):
            with writer.part(f"split:{part}", {"lengths": "U16", "bases": "U64"}.get(part, "U8")) as write:
                write(getattr(split, part).view(torch.uint8))
        write_table(second, "own", own)
        write_plain(second, "plain", torch.arange(5))
        places = {**dict.fromkeys(first.names, names[0]), **dict.fromkeys(second.names, names[1])}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (FILES / "set.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return {"split": spiky_rows(70, 40), "own": spiky_rows(30, 20), "plain": torch.arange(5)}


def write_foreign():
    """An ordinary safetensors file, whose data is not aligned and whose names look like those of tables."""
    tensors = {"odd": torch.arange(3, dtype=torch.uint8), "x:slots": torch.arange(4.0), "ibp.checks": torch.ones(1)}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        more = bytes_of(tensor).numpy().tobytes()
        dtype = "U8" if tensor.dtype == torch.uint8 else "F32"
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(more)]}
        data += more
    text = json.dumps(header).encode()
    (FILES / "foreign.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return tensors


def described(items):
    """Dtype, shape and hash of the bytes of each tensor; of a delta those of its differences."""
    found = {}
    for name, value in items.items():
        table = value.table if isinstance(value, ibp.deltas.Delta) else value
        x = table if isinstance(table, torch.Tensor) else table.decompress()
        sha256 = hashlib.sha256(bytes_of(x).numpy().tobytes()).hexdigest()
        found[name] = {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape), "sha256": sha256}
    return found


def main():
    torch.manual_seed(14)
    FILES.mkdir(exist_ok=True)
    made = {
        "raw": raw_tables(),
        "masks": mask_tables(),
        "planes": planes_tables(),
        "clusters": cluster_tables(),
        "changed": changed_tables(),
        "mixed": mixed(),
        "delta": delta(),
        "general": general_tables(),
    }
    contents = {}
    for name, items in made.items():
        metadata = {"format": "pt", "note": 'ünï "x"\n'} if name == "mixed" else None
        ibp.save(FILES / f"{name}.safetensors", items, metadata=metadata, content=True)
        contents[f"{name}.safetensors"] = described(items)
    contents["codec.safetensors"] = described(write_codec())
    contents["set.safetensors.index.json"] = described(write_set())
    contents["foreign.safetensors"] = described(write_foreign())
    (FILES / "contents.json").write_text(json.dumps(contents, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
