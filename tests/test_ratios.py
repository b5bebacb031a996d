"""Savings on real data: at least what the paper's algorithm gives, less a tenth of a point.

savings = 1 - table.stored_bytes / original bytes. The sets of data/ are always tried; larger ones where shared/data stands beside the
repository. Every table is decompressed and compared as well.
"""

import pathlib

import numpy as np
import pytest
import torch

import ibp
from helpers import assert_same_bits

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHIPPED, SHARED = ROOT / "data", ROOT.parent / "shared" / "data"
DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}


def dense(path):
    """A CSR file as a dense float32 matrix."""
    z = np.load(path)
    x = np.zeros(z["shape"], np.float32)
    x[np.repeat(np.arange(len(x)), np.diff(z["indptr"])), z["indices"]] = z["data"]
    return torch.from_numpy(x)


def array(path, name):
    """One array of a file; bit patterns of BF16 become bfloat16."""
    values = torch.from_numpy(np.load(path)[name])
    return values.view(torch.bfloat16) if name.endswith("bf16") else values


def weights(path, dtype):
    """The model's matrices with rows of 64, one below the other."""
    z = np.load(path)
    rows = np.concatenate([z[name].reshape(-1, 64) for name in ("emb", "wq", "wk", "wv", "wo", "w1", "w3")])
    assert rows.shape == (3192, 64)
    return torch.from_numpy(rows).to(dtype)


def cache(path, name, dtype):
    """What a token leaves in the KV-cache, five layers a row: [layer, token, 32] as [token, 5 * 32]."""
    values = torch.from_numpy(np.load(path)[name])
    return values.transpose(0, 1).reshape(values.shape[1], -1).to(dtype)


def savings_of(x):
    table = ibp.compress(x, device="cpu", pin_memory=False)
    assert_same_bits(table.decompress(), x)
    assert table.savings == pytest.approx(1 - table.stored_bytes / (x.numel() * x.element_size()))
    return 100 * table.savings


# Percent saved by the paper's algorithm (4-byte chunks, the best tau of 0.70 to 0.95), one codebook a table.
IN_DATA = {
    "citeseer": (lambda: dense(SHIPPED / "citeseer.npz"), 96.0),
    "pubmed, 1,060 rows": (lambda: dense(SHIPPED / "pubmed_1060rows.npz"), 86.5),
    "cora": (lambda: dense(SHIPPED / "cora.npz"), 95.6),
    "ncf mlp_user": (lambda: array(SHIPPED / "ncf_mlp.npz", "mlp_user"), 12.8),
    "ncf mlp_item": (lambda: array(SHIPPED / "ncf_mlp.npz", "mlp_item"), 10.8),
    "stories260k weights BF16": (lambda: array(SHIPPED / "stories260k.npz", "weights_bf16"), 24.6),
    "stories260k K BF16": (lambda: array(SHIPPED / "kv_stories260k.npz", "k_bf16"), 14.9),
    "stories260k V BF16": (lambda: array(SHIPPED / "kv_stories260k.npz", "v_bf16"), 27.0),
}


def shared(name, dtype="FP32", arrays="x"):
    """A set of shared/data."""
    path, dtype = SHARED / f"{name}.npz", DTYPES[dtype]
    if name == "stories260k":
        return lambda: weights(path, dtype)
    if name == "kv_stories260k":
        return lambda: cache(path, arrays, dtype)
    return lambda: dense(path) if "shape" in np.load(path).files else array(path, arrays).to(dtype)


IN_SHARED = {
    "citeseer": (shared("citeseer"), 96.0),
    "pubmed, 1,060 rows": (shared("pubmed_1060rows"), 86.5),
    "cora": (shared("cora"), 95.6),
    "amazon_photo": (shared("amazon_photo"), 75.0),
    "ncf mlp_user": (shared("ncf_ml1m", arrays="mlp_user"), 12.8),
    "ncf mlp_item": (shared("ncf_ml1m", arrays="mlp_item"), 10.8),
    "ncf gmf_user": (shared("ncf_ml1m", arrays="gmf_user"), 3.3),
    "ncf gmf_item": (shared("ncf_ml1m", arrays="gmf_item"), 0.0),
    "kokoro FP32": (shared("kokoro_voices", "FP32"), 12.3),
    "kokoro FP16": (shared("kokoro_voices", "FP16"), 9.4),
    "kokoro BF16": (shared("kokoro_voices", "BF16"), 26.4),
    "word2vec FP32": (shared("word2vec_1000x300", "FP32"), 13.0),
    "word2vec FP16": (shared("word2vec_1000x300", "FP16"), 10.8),
    "word2vec BF16": (shared("word2vec_1000x300", "BF16"), 24.7),
    "stories260k weights FP32": (shared("stories260k", "FP32"), 11.5),
    "stories260k weights FP16": (shared("stories260k", "FP16"), 7.9),
    "stories260k weights BF16": (shared("stories260k", "BF16"), 24.6),
    "stories260k K FP16": (shared("kv_stories260k", "FP16", "k"), 7.2),
    "stories260k V FP16": (shared("kv_stories260k", "FP16", "v"), 9.2),
    "stories260k K BF16": (shared("kv_stories260k", "BF16", "k"), 14.9),
    "stories260k V BF16": (shared("kv_stories260k", "BF16", "v"), 27.0),
}


@pytest.mark.parametrize("name", IN_DATA)
def test_data(name):
    load, percent = IN_DATA[name]
    assert savings_of(load()) >= percent - 0.1


@pytest.mark.skipif(not SHARED.exists(), reason="there is no shared/data beside the repository")
@pytest.mark.parametrize("name", IN_SHARED)
def test_shared_data(name):
    load, percent = IN_SHARED[name]
    assert savings_of(load()) >= percent - 0.1


@pytest.mark.parametrize("name, ratio", [("citeseer", 25.1), ("pubmed, 1,060 rows", 7.39)])
def test_the_papers_algorithm_gives_the_papers_ratio(name, ratio):
    """4-byte chunks, each with a participation bit, one threshold for all: what the paper reports, to three digits."""
    x = IN_DATA[name][0]()
    codebook = ibp.analyze(x, sample=1.0, chunk_bytes=4, paper=True, device="cpu")
    table = ibp.compress(x, codebook=codebook, device="cpu", pin_memory=False)
    rows_only = table.stored_bytes - codebook.nbytes
    assert x.nbytes / rows_only >= 0.999 * ratio


def test_the_default_is_no_worse_than_the_papers_algorithm():
    """Analysed from the same rows: a threshold a chunk, the best chunk size and no idle participation bits only ever help."""
    for name in ("cora", "ncf mlp_user", "stories260k weights BF16", "stories260k K BF16"):
        x = IN_DATA[name][0]()
        paper = ibp.estimate(x, ibp.analyze(x, sample=1.0, chunk_bytes=4, paper=True, device="cpu"), device="cpu")
        assert ibp.estimate(x, ibp.analyze(x, sample=1.0, device="cpu"), device="cpu") <= 1.001 * paper, name
