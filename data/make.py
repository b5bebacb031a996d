"""Makes the shipped data files from the larger ones that README.md beside this script describes.

python data/make.py SOURCE_DIRECTORY
"""

import shutil
import sys
from pathlib import Path

import numpy as np

COPIED = ("cora.npz", "citeseer.npz", "pubmed_1060rows.npz")
KV_TOKENS = 1024


def to_bfloat16(values):
    """float32 to BF16 bit patterns (uint16), round to nearest, ties to even. The sources hold no NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def make_ncf(source):
    with np.load(source / "ncf_ml1m.npz") as tables:
        return {name: tables[name] for name in ("mlp_user", "mlp_item")}


def make_stories(source):
    """Every weight matrix whose rows have 64 values, one below the other, and all else that the model needs."""
    with np.load(source / "stories260k.npz") as model:
        matrices = [model[name].reshape(-1, 64) for name in ("emb", "wq", "wk", "wv", "wo", "w1", "w3")]
        rest = {f"{name}_bf16": to_bfloat16(model[name]) for name in ("w2", "ra", "rf", "rfin")}
        vocabulary = {"vocab": model["vocab"]}
    return {"weights_bf16": to_bfloat16(np.concatenate(matrices)), **rest, **vocabulary}


def make_kv(source):
    """[layers, tokens, 32] to [tokens, layers * 32]: what one token leaves in the cache is one row."""
    with np.load(source / "kv_stories260k.npz") as cache:
        rows = {name: np.concatenate(list(cache[name][:, :KV_TOKENS]), axis=1) for name in ("k", "v")}
    return {f"{name}_bf16": to_bfloat16(values) for name, values in rows.items()}


def main():
    source, here = Path(sys.argv[1]), Path(__file__).resolve().parent
    for name in COPIED:
        shutil.copyfile(source / name, here / name)
    np.savez_compressed(here / "ncf_mlp.npz", **make_ncf(source))
    np.savez_compressed(here / "stories260k.npz", **make_stories(source))
    np.savez_compressed(here / "kv_stories260k.npz", **make_kv(source))


if __name__ == "__main__":
    main()
