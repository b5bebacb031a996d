"""Writes pickles/RELEASE/ with the ibp that Python imports: `python tests/golden/make_pickles.py RELEASE KIND ...`.
RELEASE is a version or a commit. What a release wrote stays as it is for good; this script runs with old releases too:

    0.2.0     (d64cb9eb) tables codebooks deltas states optimizers
    a0b6f550  (the last commit with all names at the root) the same, wholes values
    9a775411  all kinds but reports; no modules "Conv1D" and "coded"
    0.3.0     all kinds but coded_rows, which no longer pickle

The other kinds of the first two did not load in 9a775411 any more.

For each kind, KIND.pt.xz is {name: object} by torch.save, and KIND.pickle.xz is the same by pickle, which does not load
`CodedRows` again. contents.json is {KIND: {name: what `contents` reads from the object}}, with digests in place of
tensors. saved.safetensors is what `ibp.save` makes of some tables and a delta. The kind "wholes" needs the packages
lz4 and zstandard.
"""

import dataclasses
import hashlib
import io
import json
import lzma
import pathlib
import pickle
import sys
import tempfile
from collections.abc import Mapping

import torch

import ibp

PICKLES = pathlib.Path(__file__).parent / "pickles"
IDS = torch.tensor([3, 0, 19, 3])


def rows(num_rows=20, columns=16, dtype=torch.float32):
    """Values by a formula, so that every release makes the same: a few that are common, some rows of zeros, one of none
    that is like others."""
    numbers = torch.arange(num_rows * columns)
    values = torch.where(numbers % 11 == 0, numbers % 7, 1 + numbers % 3).view(num_rows, columns)
    values[5::10] = 0
    values[7] = torch.arange(columns) * 7919 % 251
    return values.to(dtype)


def at_root_or(module, name):
    """A public name of a module, which releases up to 0.2 have at the root; None if they lack it."""
    held = getattr(ibp, module, None)
    return getattr(held, name) if hasattr(held, name) else vars(ibp).get(name)


def table_of(x, **options):
    return ibp.compress(x, device="cpu", **options)


def tables():
    x, made = rows(), {}
    for scheme in ("ibp", "planes"):
        made[f"{scheme}, slots"] = table_of(x, scheme=scheme, slot_bytes=32)
        made[f"{scheme}, in place"] = table_of(x, scheme=scheme, slot_bytes=64)
        made[f"{scheme}, packed"] = table_of(x, scheme=scheme, layout="packed")
        made[f"{scheme}, clusters"] = table_of(x, scheme=scheme, clusters=2)
    made["fast"] = table_of(rows(dtype=torch.bfloat16), scheme="planes", level="fast")
    made["raw"] = table_of(x, scheme="raw")
    for dtype in (torch.bool, torch.int64, torch.float8_e4m3fn):
        made[str(dtype)] = table_of(rows(dtype=dtype), scheme="planes")
    made["one dimension"] = table_of(x.view(-1), scheme="planes", row_bytes=160)
    made["no dimension"] = table_of(torch.tensor(1.5))
    made["empty"] = table_of(torch.empty(0, 5))
    made["changed"] = table_of(x, scheme="planes", slot_bytes=32)
    made["changed"].update_(torch.tensor([4, 13]), 1000 * torch.rand(2, 16, generator=torch.Generator().manual_seed(0)))
    made["appended"] = table_of(x, scheme="planes", slot_bytes=32)
    made["appended"].append(x[:3] + 1)
    return made


def codebooks():
    return {name: table.codebook for name, table in tables().items() if name.endswith("clusters") or "packed" in name}


def wholes():
    return {name: table_of(rows(), scheme=name) for name in ("zstd", "lz4")}


def deltas():
    base, new = rows(), rows()
    new[3, 4:7] += 1
    make = at_root_or("deltas", "make") or ibp.delta  # the name in 0.2
    both = {"w": new, "added": new[:2]}, {"w": base, "gone": base[:2]}
    return {"tensor": make(new, base, device="cpu"), "checkpoint": make(*both, device="cpu")}


def coded_rows():
    codebook = table_of(rows(), scheme="planes").codebook
    held = ibp.CodedRows(codebook, 20, slot_bytes=32, overflow_bytes=4096, device="cpu")
    ibp.encode_into(rows(), held, torch.arange(20))
    return {"filled": held}


def modules():
    nn, weight = ibp.nn, rows()
    made = {
        "Embedding": nn.Embedding(table_of(weight)),
        "EmbeddingBag": nn.EmbeddingBag(table_of(weight), mode="sum", trainable=True),
        "EmbeddingCollection": nn.EmbeddingCollection({"a": table_of(weight), "b": table_of(weight[:10])}),
        "Linear": nn.Linear(table_of(weight), torch.arange(20.0)),
    }
    made["Sequential"] = torch.nn.Sequential(made["Embedding"], made["Linear"]).eval()
    if hasattr(nn, "Conv1D"):  # not in 0.2
        made["Conv1D"] = nn.Conv1D(table_of(weight), torch.arange(20.0))
        made["compressed"] = compressed_model(rows())  # which stays plain since codebooks count as stored bytes
        made["coded"] = compressed_model(rows(200, 64))
    return made


def compressed_model(weight):
    """A model whose embedding is its last layer, too."""
    model = torch.nn.Sequential(torch.nn.Embedding(*weight.shape), torch.nn.Linear(*weight.T.shape, bias=False))
    model[0].weight.data = weight
    model[1].weight = model[0].weight
    ibp.nn.compress(model.requires_grad_(False), min_bytes=0)
    return model


def states():
    """What `load_state_dict` of a module takes: with tables, and without."""
    made = {}
    for name, module in modules().items():
        made[name] = module.state_dict()
        if hasattr(ibp.nn, "coded_state_dict"):
            made[f"{name}, coded"] = ibp.nn.coded_state_dict(module)
        else:
            made[f"{name}, plain"] = ibp.nn.dense_state_dict(module)
    return made


def optimizers():
    """What `load_state_dict` of an optimizer takes, after a step."""
    made = {}
    for name in ("SGD", "Adagrad", "RowWiseAdagrad"):
        module = ibp.nn.Embedding(table_of(rows()), trainable=True)
        optimizer = getattr(ibp.optim, name)(module, lr=0.25, weight_decay=0.5)
        (module(IDS) * 2).sum().backward()
        optimizer.step()
        made[name] = optimizer.state_dict()
    for name in ("Adam", "AdamW"):  # which torch's load
        if hasattr(ibp.optim, name):
            weight = torch.nn.Parameter(rows())
            optimizer = getattr(ibp.optim, name)([weight], lr=0.25)
            (weight * weight).sum().backward()
            optimizer.step()
            made[name] = optimizer.state_dict()
    return made


def values():
    """Reports and settings: what they say is compared."""
    x = rows()
    made = {"estimate": ibp.estimate(x), "H200": at_root_or("calibration", "H200")}
    made["profile"] = at_root_or("spill", "profile")([{"w": x}])
    made["choice"] = at_root_or("codecs", "choose")(x, 1.0, device="cpu", schemes=["planes"])
    if hasattr(ibp, "kv") and hasattr(ibp.kv, "PageCodec"):
        made["PageCodec"] = ibp.kv.PageCodec(table_of(x, scheme="planes").codebook, 128)
    return made


def reports():
    """What calls say of their work, and what processes tell each other."""
    x = rows(200, 64)
    pages = ibp.kv.pack(x.view(100, 2, 64), ibp.kv.PageCodec(table_of(x, scheme="planes").codebook, 512))
    with tempfile.TemporaryDirectory() as folder:
        ibp.save(f"{folder}/plain.safetensors", {"w": x})
        report = ibp.checkpoints.compress(f"{folder}/plain.safetensors", f"{folder}/coded.safetensors", device="cpu")
        with ibp.open(f"{folder}/coded.safetensors") as file:
            info = file.info("w")
    return {
        "ModelReport": ibp.nn.compress(torch.nn.Sequential(torch.nn.Embedding.from_pretrained(x)), min_bytes=0),
        "CheckpointReport": dataclasses.replace(report, path="coded.safetensors"),  # no path of a machine
        "CheckpointEstimate": ibp.checkpoints.estimate({"w": x}),
        "TensorInfo": info,
        "RowCounts": coded_rows()["filled"].counts(),
        "Codec": ibp.distributed.Codec.learn(x.repeat(16, 1)),
        "Link": ibp.distributed.Link(12.5),
        "PackedPages": pages._replace(message=pages.message[: int(pages.used)].clone()),
        "ModelOptions": ibp.adapters.ModelOptions(exclude="lm_head"),
        "CodedWeight": ibp.adapters.WeightCompressor({"device": "cpu"}).code("w", x),
        "OutOfSyncError": ibp.deltas.OutOfSyncError("a message is lost"),
    }


INPUTS = {"EmbeddingBag": IDS.view(2, 2), "EmbeddingCollection": {"a": IDS.view(2, 2), "b": IDS.view(2, 2) % 10}}
# Of small integers, whose sums of products are exact in any order.
INPUTS["Linear"], INPUTS["Conv1D"] = rows()[:2], rows()[:2]


@torch.no_grad()
def contents(kind, name, value):
    """What an object says, in numbers, strings and digests of tensors."""
    if kind == "modules":
        return contents("states", name, [value.state_dict(), value(INPUTS.get(name, IDS))])
    if kind == "deltas":
        base = {"w": rows(), "gone": rows()[:2]} if name == "checkpoint" else rows()
        value.apply_(base)
        return contents("states", name, base)
    if isinstance(value, torch.Tensor):
        data = value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()[:16]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.dtype, Exception)):
        return repr(value)
    if hasattr(value, "decompress"):
        return contents(kind, name, value.decompress())
    if hasattr(value, "decode"):
        return contents(kind, name, value.decode())
    if hasattr(value, "page_bytes"):
        return [value.page_bytes, contents(kind, name, value.codebook)]
    if hasattr(value, "expected_savings"):  # a codebook
        packed = table_of(rows(), codebook=value, layout="packed").overflow
        return [value.scheme, value.row_bytes, value.expected_savings, contents(kind, name, packed)]
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "min_bytes"):  # options of models
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): contents(kind, name, of_key) for key, of_key in value.items()}
    return [contents(kind, name, item) for item in value]


SAVED = ("ibp, slots", "planes, packed", "planes, clusters")  # in saved.safetensors
KINDS = (tables, codebooks, deltas, states, optimizers, wholes, values, coded_rows, modules, reports)


def main(release, *kinds):
    folder, made = PICKLES / release, {make.__name__: make() for make in KINDS if make.__name__ in kinds}
    folder.mkdir(parents=True, exist_ok=True)
    for kind, objects in made.items():
        torch.save(objects, file := io.BytesIO())
        (folder / f"{kind}.pt.xz").write_bytes(lzma.compress(file.getvalue()))
        if kind != "coded_rows":
            (folder / f"{kind}.pickle.xz").write_bytes(lzma.compress(pickle.dumps(objects)))
    saved = {name: table for name, table in made["tables"].items() if name in SAVED}
    ibp.save(folder / "saved.safetensors", {**saved, "delta": made["deltas"]["tensor"]})
    found = {kind: {name: contents(kind, name, x) for name, x in objects.items()} for kind, objects in made.items()}
    (folder / "contents.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
