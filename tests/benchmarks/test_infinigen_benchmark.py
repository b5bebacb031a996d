"""benchmarks/infinigen.py: ibp where InfiniGen's fork calls the paper's library, and a run of a fork that only makes
these calls."""

import csv
import os
import subprocess
import sys
import types

import pytest
import torch

from benchmarks import harness, infinigen, reference

HEADS, DIM, PROMPT, NEW = 8, 64, 24, 5
BACKEND = """
import torch

class TorchDevice:
    def __init__(self, name):
        self.dev = torch.device(name)

    def allocate(self, shape, dtype, pin_memory=None, name=None):
        return torch.zeros(shape, dtype=dtype, pin_memory=pin_memory)

class TorchDisk:
    pass

class TorchTensor:
    def __init__(self, shape):
        self.shape, self.data = shape, torch.full(shape, torch.nan, dtype=torch.float16)

    def load_from_np_file(self, filename):
        raise AssertionError("a file of weights is read")

def skew(*args):
    raise AssertionError("the weights are rotated")

def speculate_attention(scores, most):
    return scores.topk(most, dim=0).indices

def general_copy(to, to_indices, source, source_indices):
    to.data[to_indices] = source.data
"""
SELECTION = """
import ibp
import torch

def select_kv_ibp(ids, cache, home, device):
    rows = ids * cache.shape[1] + torch.arange(cache.shape[1])
    words = cache.reshape(-1, cache.shape[2]).view(torch.int64)
    found = ibp.decompress_fetch(words, home.mask, home.bitval, home.bitmask, device, index_arr=rows.reshape(-1))
    return found.view(torch.float16).reshape(*ids.shape, -1)
"""
# A layer of the fork, without attention: it stores a prompt and fetches chosen rows of it.
FLEX_OPT = """
import dataclasses
import types

import ibp
import torch
from flexgen import pytorch_backend
from flexgen.pytorch_backend import TorchDevice, TorchDisk, general_copy
from infinigen.kv_selection_controller import select_kv_ibp
from transformers import AutoTokenizer

@dataclasses.dataclass(frozen=True)
class Config:
    name: str = "opt-125m"
    num_hidden_layers: int = 12
    max_seq_len: int = 2048
    hidden_size: int = 768
    n_head: int = 12
    input_dim: int = 768
    ffn_embed_dim: int = 3072
    vocab_size: int = 50272

def get_opt_config(name):
    return Config()

TIMER = types.SimpleNamespace(costs=[])

def timers(name):
    return TIMER

def project_decode_latency(costs, prompt, new):
    return (new - 1) * costs[1]

def get_inputs(*args):
    raise AssertionError("a text is read")

def download_opt_weights(*args):
    raise AssertionError("weights are downloaded")

def add_parser_arguments(parser):
    for name in ("path", "offload-dir", "percent", "overlap", "gpu-batch-size", "num-gpu-batches", "prompt-len"):
        parser.add_argument(f"--{name}", nargs="+")
    for name in ("gen-len", "cut-gen-len", "alpha", "partial-weight-ratio", "max-num-kv", "ibp"):
        parser.add_argument(f"--{name}")

def run_flexgen(args):
    config, prompt, batch = get_opt_config(""), int(args.prompt_len[0]), int(args.gpu_batch_size[0])
    download_opt_weights(config.name, args.path[0])
    weight = pytorch_backend.TorchTensor((config.ffn_embed_dim, config.input_dim))
    weight.load_from_np_file(f"{args.path[0]}/{config.name}-np/decoder.layers.3.fc1.weight")
    assert weight.data.isfinite().all()
    tokenizer = AutoTokenizer.from_pretrained("opt", padding_side="left")
    inputs = get_inputs(prompt, batch, tokenizer, None)
    assert len(inputs) == len(tokenizer.batch_decode(inputs, skip_special_tokens=True)) == batch
    assert {len(one) for one in inputs} == {prompt}
    gpu, bh = TorchDevice("cuda:0"), batch * config.n_head
    pytorch_backend.skew(0, 0, 0, 0)
    rows = torch.randn(prompt, bh, config.input_dim // config.n_head).half()
    home = types.SimpleNamespace(data=gpu.allocate((prompt + 7, *rows.shape[1:]), torch.float16, pin_memory=True))
    home.shape, source = home.data.shape, types.SimpleNamespace(data=rows.clone())
    ids = pytorch_backend.speculate_attention(torch.rand(prompt, bh), int(args.max_num_kv))
    if args.ibp:
        words = source.data.view(-1, rows.shape[2]).view(torch.int64)
        home.mask, home.bitval = ibp.preprocess(words[:prompt], 0.8)
        home.bitmask = ibp.compress_inplace(words, home.mask, home.bitval)
    general_copy(home, (slice(0, prompt), slice(0, bh)), source, None)
    wanted = rows[ids, torch.arange(bh)]
    if args.ibp:
        assert torch.equal(select_kv_ibp(ids, home.data, home, gpu.dev), wanted), "other rows"
    else:
        assert torch.equal(home.data[ids, torch.arange(bh)], wanted)
    TIMER.costs = [2.0, 0.5]
"""


def rows_of(count):
    return torch.randn(count, HEADS, DIM, generator=torch.Generator().manual_seed(count)).half()


def test_calls_of_the_papers_library_by_ibp():
    """Rows of a prompt and of tokens go to the fork's own memory, and come back by their numbers and all together."""
    copied = []
    calls = infinigen.Calls(lambda *args: copied.append(args))
    home = types.SimpleNamespace(data=torch.zeros(PROMPT + NEW - 1, HEADS, DIM, dtype=torch.float16))
    home.shape, parts = home.data.shape, [rows_of(PROMPT), rows_of(1)]
    words = parts[0].view(-1, DIM).view(torch.int64)
    home.mask, bitval = calls.preprocess(words[:PROMPT], 0.8)
    places = (slice(0, PROMPT), slice(0, HEADS)), (slice(PROMPT, PROMPT + 1), slice(0, HEADS))
    for where, part in zip(places, parts):
        assert calls.compress_inplace(part.view(-1, DIM).view(torch.int64), home.mask, bitval) == 0
        calls.copy(home, where, types.SimpleNamespace(data=part), None)
    every = torch.cat(parts).view(-1, DIM)
    ids = torch.randperm(len(every))[:50]
    words, device = home.data.view(-1, DIM).view(torch.int64), torch.device("cpu")
    assert torch.equal(
        calls.decompress_fetch(words, home.mask, bitval, 0, device, index_arr=ids), every.view(torch.int64)[ids]
    )
    found = calls.decompress_fetch(words[: len(every)], home.mask, bitval, 0, device)
    assert torch.equal(found, every.view(torch.int64))
    assert home.mask.rows.slots.data_ptr() == home.data.data_ptr() and home.data.any()
    assert home.mask.table.stored_bytes < 0.95 * every.nbytes
    calls.check()
    other = types.SimpleNamespace(data=home.data)
    calls.copy(other, places[0], home, None)
    assert copied == [(other, places[0], home, None)]


def test_weights_are_normal_and_gains_are_around_one():
    tensor = types.SimpleNamespace(shape=(64, 64), data=torch.empty(64, 64, dtype=torch.float16))
    for name, mean in (("decoder.layers.0.fc1.weight", 0), ("decoder.layers.0.final_layer_norm.weight", 1)):
        infinigen.fill(tensor, f"some/{name}")
        assert float(tensor.data.double().mean()) == pytest.approx(mean, abs=2e-3)
        assert float(tensor.data.double().std()) == pytest.approx(infinigen.DEVIATION, rel=0.1)


def test_clones_that_are_none(tmp_path, monkeypatch):
    with pytest.raises(
        FileNotFoundError, match="has no speedup/flexgen/infinigen/flex_opt.py; wanted a clone of Infini"
    ):
        infinigen.imported(tmp_path, tmp_path)
    with pytest.raises(FileNotFoundError, match="has no ibp/__init__.py; wanted a clone of the paper's code"):
        infinigen.papers_library(tmp_path)
    (tmp_path / "ibp").mkdir()
    (tmp_path / "ibp" / "__init__.py").write_text("import ibp_cuda\nfetch = ibp_cuda.fetch\n")
    monkeypatch.setattr(reference, "built", lambda repository: types.SimpleNamespace(fetch=len))
    assert infinigen.papers_library(tmp_path).fetch is len
    assert "ibp_cuda" not in sys.modules and sys.modules["ibp"] is infinigen.ibp


@pytest.mark.slow
def test_a_fork_that_makes_the_calls(tmp_path):
    """In a process of its own, because the fork's package has the name of another."""
    files = {
        "speedup/flexgen/flexgen/__init__.py": "",
        "speedup/flexgen/infinigen/flex_opt.py": FLEX_OPT,
        "speedup/flexgen/infinigen/pytorch_backend.py": BACKEND,
        "speedup/infinigen/infinigen/__init__.py": "",
        "speedup/infinigen/infinigen/kv_selection_controller.py": SELECTION,
    }
    for name, text in files.items():
        path = tmp_path / "fork" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(*options):
        words = [*("-m", "benchmarks.kv_request", "--infinigen", str(tmp_path / "fork"), "--device", "cpu", "--quick")]
        environment = os.environ | {"IBP_INFINIGEN_COMMIT": "529e2e3"}
        environment.pop("IBP_REFERENCE", None)
        words += ["--out", str(tmp_path), *options]
        done = subprocess.run(
            [sys.executable, *words], cwd=harness.ROOT, env=environment, capture_output=True, text=True
        )
        with open(tmp_path / "infinigen.csv", newline="") as file:
            return done, [*csv.DictReader(file)]

    done, rows = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no clone is named by --repository or IBP_REFERENCE" in done.stdout
    assert [row["arm"] for row in rows] == [infinigen.CPU, infinigen.IBP]
    request = infinigen.QUICK
    for row in rows:
        assert (row["fork"], row["reference"], row["read"]) == ("529e2e3", "", str(request.most))
        assert (float(row["prefill_s"]), float(row["token_s"])) == (2, 0.5)
        assert float(row["request_s"]) == 2 + 0.5 * (request.new - 1)
        assert int(row["rows"]) == 2 * request.batch * 4 * (2 * request.prompt + 2 * request.most)
    path = tmp_path / "fork" / "speedup/infinigen/infinigen/kv_selection_controller.py"
    path.write_text(SELECTION.replace("rows.reshape(-1)", "rows.reshape(-1).flip(0)"))
    done, rows = run("--repository", str(tmp_path))  # The folder is no clone; wrong rows give no row of the CSV.
    assert done.returncode == 1 and [row["arm"] for row in rows] == [infinigen.CPU]
    assert "wanted a clone of the paper's code" in done.stdout and "AssertionError: other rows" in done.stdout
