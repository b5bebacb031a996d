"""Writes learned.json, what is learned from samples that are made here: `python tests/golden/make_learned.py`. A change
of what is learned is a change of it: say in the changelog whether rows take less.
"""

import hashlib
import json
import pathlib
import sys

import numpy as np
import torch

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]
import ibp  # noqa: E402
from ibp._rows.geometry import stored_sizes  # noqa: E402
from ibp._rows.planes import learn_planes, relearn  # noqa: E402

FILE = HERE / "learned.json"


def random_words(shape, seed):
    """Random uint64, by splitmix64: the same with every numpy."""
    with np.errstate(over="ignore"):
        x = (np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).reshape(shape)


def integers(shape, below, seed=0):
    return (random_words(shape, seed) >> np.uint64(33)).astype(np.int64) % below


def normal(shape, scale=0.02, seed=0):
    """About normal float64 numbers: sums of integers, so that no library rounds them."""
    return integers((*shape, 12), 1 << 16, seed).sum(-1).astype(np.float64) / 65536.0 * scale - 6.0 * scale


def uniform(shape, seed=0):
    return integers(shape, 1 << 24, seed).astype(np.float64) / (1 << 24)


def columns(shape):
    return np.arange(shape[1]) / 4 + np.abs(normal(shape, 0.05))


def where(shape, share, values, seed=9):
    """Zeros, but for a share."""
    return np.where(uniform(shape, seed) < share, values, 0)


def some_rows(shape):
    """Rows of one value only, of zeros, and of several."""
    x = where(shape, 0.05, integers(shape, 3, 4) + 1)
    x[::4] = where(x[::4].shape, 0.1, 1, 5)
    return x


def clustered(shape):
    x = normal(shape, 1.0)
    x[: shape[0] // 3] *= 1e-3
    return x


# What a sample holds, and the dtypes that it is learned in.
SAMPLES = {
    "normal": (lambda: normal((400, 48)), ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn"]),
    "large": (lambda: normal((9000, 40), 1.0), ["bfloat16", "float32"]),
    "columns": (lambda: columns((500, 32)), ["bfloat16", "float16", "float32", "float64"]),
    "many columns": (lambda: columns((40, 700)), ["bfloat16", "float32"]),
    "few rows": (lambda: columns((5, 60)), ["bfloat16", "int32"]),
    "one row": (lambda: normal((1, 100)), ["float32", "bfloat16"]),
    "half zeros": (lambda: where((300, 60), 0.5, normal((300, 60), 1.0)), ["bfloat16", "float32", "float64", "int8"]),
    "few numbers": (lambda: where((300, 90), 0.06, normal((300, 90), 1.0)), ["bfloat16", "float32", "float64"]),
    "clipped": (lambda: np.maximum(normal((400, 64), 1.0), 0), ["bfloat16", "float16", "float8_e5m2"]),
    "ones": (lambda: where((300, 120), 0.05, 1), ["uint8", "int16", "float32", "int64", "bool"]),
    "ones and twos": (lambda: some_rows((300, 80)), ["uint8", "float32", "int64"]),
    "signed zeros": (lambda: np.where(uniform((200, 50)) < 0.5, -0.0, normal((200, 50))), ["bfloat16", "float32"]),
    "negative": (lambda: np.where(uniform((200, 50), 3) < 0.9, -2.5, normal((200, 50), 1.0)), ["bfloat16", "float64"]),
    "ids": (lambda: integers((300, 50), 1 << 20), ["int32", "int64"]),
    "small ids": (lambda: integers((300, 50), 200) * 4, ["int16", "int32", "int64", "uint8"]),
    "stamps": (lambda: np.arange(48) * 10**9 + integers((300, 48), 1000), ["int64"]),
    "skewed": (lambda: integers((300, 40), 40) * integers((300, 40), 40, 1) // 40, ["uint8", "int16", "int64"]),
    "constant columns": (lambda: np.where(np.arange(60) % 3 == 0, 7, normal((300, 60), 40.0)), ["int16", "float32"]),
    "rare": (lambda: np.where(uniform((700, 40)) < 0.999, 3, integers((700, 40), 256)), ["uint8", "float32"]),
    "two scales": (lambda: clustered((300, 50)), ["bfloat16", "float32"]),
    "noise": (lambda: integers((100, 64), 256), ["uint8"]),
    "complex": (lambda: normal((200, 20)) + 1j * normal((200, 20), seed=1), ["complex64"]),
}
# How it is learned: arguments of learn_planes, and times as many rows as the sample has.
WAYS = {
    "default": ({}, 1),
    "fast": ({"level": "fast"}, 1),
    "of a larger table": ({}, 50),
    "coded whole": ({"codes_invariant": True}, 3),
}


def sample(name, dtype):
    return torch.from_numpy(np.asarray(SAMPLES[name][0]())).to(getattr(torch, dtype))


def said(codebook):
    """What a codebook says: its fields, and what its words are."""
    words = codebook.words("cpu").contiguous().view(torch.uint8).numpy().tobytes()
    return [*codebook.codec, hashlib.sha256(words).hexdigest()[:16]]


def learned(name, dtype):
    """For each way what is learned, and the bytes of all rows with it; the entries of each half of the rows; and what
    the scheme ibp learns."""
    x = sample(name, dtype)
    data = x.contiguous().view(torch.uint8).reshape(-1)
    row_bytes, found = data.numel() // len(x), {}
    for way, (options, times) in WAYS.items():
        codebook, lengths, _ = learn_planes(data, row_bytes, times * len(x), x.dtype, **options)
        found[way] = [*said(codebook), int(stored_sizes(lengths, row_bytes, row_bytes).sum())]
    codebook = learn_planes(data, row_bytes, len(x), x.dtype)[0]
    if codebook.num_entries and len(x) > 1:
        halves = relearn(codebook, data, [len(x) // 2, len(x) - len(x) // 2])
        found["halves"] = [said(half)[-1] for half in halves]
    found["ibp"] = said(ibp.codecs.analyze(x, scheme="ibp", sample=None))
    return found


CASES = [(name, dtype) for name, (_, dtypes) in SAMPLES.items() for dtype in dtypes]


def main():
    lines = [f"{json.dumps(f'{name}, {dtype}')}: {json.dumps(learned(name, dtype))}" for name, dtype in CASES]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
