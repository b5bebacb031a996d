"""How long does a request take in InfiniGen itself, by the public fork of the paper's authors (its figure 12)?

    python -m benchmarks.kv_request --infinigen FORK [--repository DIR] [--out DIR] [--device cpu] [--quick]

FORK is a clone of github.com/AKKamath/InfiniGen-IBP (529e2e3). It is Python alone, and names torch 2.0.1, but also runs
with torch 2.13 and NumPy 2. DIR, or IBP_REFERENCE, is a clone of the paper's library, which reference.py builds. The
fork's own command runs (`flex_opt.run_flexgen`, with the arguments of its script of figure 14: weights and activations
on the GPU, the cache in pinned host memory, no overlap), for the request of kv_request.py and all 32 layers of
OPT-6.7B. Times are those of the fork's timer: of the prompt, and of a token as the fork projects it from the first
ones. Its first two layers fetch every row of the cache for a token, the others a tenth for each head (--max-num-kv
192; the script has 400).

The fork is not changed. In place of the files and the text that it would read it gets random weights and random tokens.
Its rotation of the weights, which comes before the request, is left out, because it serves trained weights alone. For
its `import ibp` it gets what the arm says.

Arms: `cpu index + copy` is InfiniGen without the paper's library. `raw by the paper's code` (--ibp=transfer) and `the
paper's code` (--ibp=compress) call it. In `ibp`, `Calls` stands in place of the library in the mode compress: rows are
coded by the GPU into the same places of the fork's cache, in place of its copy to it. Without a clone of the library
the other two arms are measured. Before an arm of compressed rows is measured, the fork's own mode `validate` compares
the rows that it fetches with raw ones, in a tiny model. It is expected to take two minutes on an H200.

After the common columns, infinigen.csv has prefill_s, token_s, request_s, read (rows of a head that a layer fetches for
a token), `fork` and `reference` (the commits of both clones). `rows` is the number of rows that a token needs in all
layers, and `gbps` is their bytes over token_s. `savings` is 0, because all arms keep rows in places of their raw size.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

import ibp
from ibp._tables.coded_rows import live_table

from . import flexgen_parts, harness, ideal, reference
from .kv_request import DEVIATION, DTYPE

COLUMNS = ("prefill_s", "token_s", "request_s", "read", "fork", "reference")
MODEL = "facebook/opt-6.7b"
# Folders of the fork, and the files of its package flexgen that its scripts link from the folder of InfiniGen.
FLEXGEN, INFINIGEN, OF_INFINIGEN = "speedup/flexgen", "speedup/infinigen", ("flex_opt.py", "pytorch_backend.py")
WARM_TOKENS = 2048  # The fork's first run has a prompt of this many tokens.
FULL_LAYERS = 2  # So many of its layers fetch every row.
ON_GPU = "100 0 0 100 100 0"  # Percent of weights, cache and activations on the GPU and on the CPU.
CPU, RAW, IBP = "cpu index + copy", f"raw by {reference.THEIRS}", "ibp"
TRANSFER, COMPRESS, VALIDATE = "transfer", "compress", "validate"


class Request(NamedTuple):
    """A prompt, the new tokens and how many of them are measured, and the most rows that a head reads in a layer."""

    batch: int = 20
    prompt: int = 1920
    new: int = 128
    measured: int = 16
    most: int = 192


QUICK = Request(16, 64, 8, 6, 12)


def tiny(opt_config):
    """Returns a config of the fork for a tiny model, whose rows have 128 bytes."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "input_dim": 256, "n_head": 4, "ffn_embed_dim": 1024}
    return dataclasses.replace(opt_config("facebook/opt-125m"), name="tiny", vocab_size=1024, max_seq_len=128, **sizes)


# ---- what stands in place of the paper's library ---------------------------------------------------------------------


class Pool:
    """The compressed keys or values of one layer, in the memory of the fork's cache."""

    def __init__(self, sample):
        self.sample = sample

    def start(self, cache):
        """Learns a codebook from the sample and takes over the memory of a cache [tokens, batch * heads, dim]."""
        codebook = ibp.codecs.analyze(self.sample, scheme="planes", sample=None)
        num_rows, memory = cache.shape[0] * cache.shape[1], cache.view(torch.uint8).view(-1)
        device = self.sample.device
        self.rows = ibp.CodedRows(codebook, num_rows, device=device, memory="pinned", host_buffer=memory)
        self.table, self.dtype, self.sample = live_table(self.rows), cache.dtype, None


class Calls:
    """The functions of the paper's library that the fork calls, made of ibp. `copy` is for the fork's `general_copy`.
    Masks are `Pool`s, and the fork's bits that say which rows are compressed are not used."""

    def __init__(self, copy):
        self.fork_copy, self.pools = copy, []

    def preprocess(self, words, threshold):
        """Returns a pool in place of a mask, and nothing in place of a bitval. words: rows of a prompt, as int64."""
        self.pools.append(Pool(words.view(DTYPE)))
        return self.pools[-1], None

    def compress_inplace(self, words, pool, bitval):
        """Returns bits for the fork to keep. The rows are compressed by `copy`."""
        return 0

    def copy(self, to, to_indices, source, source_indices):
        """Codes rows of a layer into its pool. Other copies are the fork's."""
        pool = getattr(to, "mask", None)
        if not isinstance(pool, Pool):
            self.fork_copy(to, to_indices, source, source_indices)
            return
        if pool.sample is not None:
            pool.start(to.data)
        ibp.encode_into(source.data.contiguous(), pool.rows, first_row=to_indices[0].start * to.shape[1])

    def decompress_fetch(self, words, pool, bitval, bits, device, index_arr=None):
        """Returns rows of a pool, as int64: those with the given numbers, or as many as `words` has."""
        ids = torch.arange(len(words), device=device) if index_arr is None else index_arr
        return ibp.index_select(pool.table, ids, path="gpu" if device.type == "cuda" else None).view(torch.int64)

    def check(self):
        """Raises an error if rows were lost, given twice or damaged."""
        for pool in self.pools:
            pool.rows.check()
            pool.table.check()
            assert pool.rows.counts().lost == 0


def papers_library(repository):
    """Returns the Python module of the paper's library. Its name is also ibp."""
    path = repository / "ibp" / "__init__.py"
    if not path.is_file():
        raise FileNotFoundError(f"{repository} has no ibp/__init__.py; wanted a clone of the paper's code")
    spec = importlib.util.spec_from_file_location("papers_ibp", path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"ibp_cuda": reference.built(repository)}):
        spec.loader.exec_module(module)
    return module


# ---- the fork --------------------------------------------------------------------------------------------------------


class NoTokenizer:
    """A stand-in for a tokenizer, for tokens that belong to no text."""

    @classmethod
    def from_pretrained(cls, name, padding_side):
        return cls()

    def batch_decode(self, ids, skip_special_tokens):
        return ["" for _ in ids]


def imported(fork, directory):
    """Imports the fork's modules for this process, which must not have imported another FlexGen. Returns its flex_opt.
    directory: one that stays, for links to the files of the fork's package."""
    package = directory / "flexgen"
    package.mkdir()
    for path in [*(fork / FLEXGEN / "flexgen").glob("*.py"), *(fork / FLEXGEN / "infinigen" / n for n in OF_INFINIGEN)]:
        if not path.is_file():
            raise FileNotFoundError(f"{fork} has no {path.relative_to(fork)}; wanted a clone of InfiniGen-IBP")
        (package / path.name).symlink_to(path.resolve())
    sys.path[:0] = [str(directory), str(fork / INFINIGEN)]
    sys.modules["transformers"] = types.SimpleNamespace(AutoTokenizer=NoTokenizer)
    return importlib.import_module("flexgen.flex_opt")


def fill(tensor, filename):
    """Fills a weight of the fork with normal values, and with values around 1 if it is the gain of a norm. filename:
    the file that the fork would read."""
    values = torch.randn(tensor.shape, device=tensor.data.device) * DEVIATION
    tensor.data.copy_(values + filename.endswith("layer_norm.weight"))


class Fork:
    """The fork's modules, and its command with random weights.

    Args:
        run: the run of the benchmark.
        flex_opt: the fork's module of this name.
        directory: for files of the fork.
    """

    def __init__(self, run, flex_opt, directory):
        self.run, self.flex_opt, self.directory = run, flex_opt, directory
        self.backend = sys.modules[flex_opt.TorchDevice.__module__]
        self.selection = sys.modules[flex_opt.select_kv_ibp.__module__]
        self.tiny = tiny(flex_opt.get_opt_config)
        self.config = flex_opt.get_opt_config(MODEL) if run.is_judged else self.tiny

    @contextlib.contextmanager
    def given(self, config, request, library, counts):
        """Gives the fork what it looks for, inside a block. counts: a list for the rows that a head chooses."""
        is_full, speculate = config is not self.tiny, self.backend.speculate_attention
        tokens = np.random.default_rng(0).integers(5, config.vocab_size, WARM_TOKENS if is_full else request.prompt)

        def chosen(*args):
            found = speculate(*args)
            counts.append(found.shape[0])
            return found

        of_opt = {
            "get_opt_config": lambda name: config,
            "download_opt_weights": lambda name, path: None,
            "get_inputs": lambda length, num, tokenizer, path: (tokens[:length].tolist(),) * num,
            "ibp": library,
            "general_copy": library.copy if isinstance(library, Calls) else self.flex_opt.general_copy,
        }
        with contextlib.ExitStack() as stack:
            if not self.run.on_gpu:
                stack.enter_context(flexgen_parts.without_cuda())
                of_opt["TorchDevice"] = flexgen_parts.cpu_device(self.backend.TorchDevice)
                of_opt["TorchDisk"] = flexgen_parts.NoDisk
            for module, patches in (
                (self.flex_opt, of_opt),
                (self.selection, {"ibp": library}),
                (self.backend, {"skew": lambda q, k, wq, wk, *sizes: (wq, wk), "speculate_attention": chosen}),
                (self.backend.TorchTensor, {"load_from_np_file": fill}),
            ):
                stack.enter_context(mock.patch.multiple(module, **patches))
            yield

    def generate(self, config, request, mode, library):
        """Runs the fork's command. mode: the value of its option --ibp. Returns (the seconds of the prompt and of each
        measured token, the mean number of rows that a head chose)."""
        words = (
            f"--path {self.directory} --offload-dir {self.directory}/offload --percent {ON_GPU} --overlap false "
            f"--gpu-batch-size {request.batch} --num-gpu-batches 1 --prompt-len {request.prompt} --gen-len "
            f"{request.new} --cut-gen-len {request.measured} --alpha 4 --partial-weight-ratio 0.2 --max-num-kv "
            f"{request.most} --ibp={mode}"
        )
        torch.manual_seed(0)  # Every arm has the same weights.
        parser, counts = argparse.ArgumentParser(), []
        self.flex_opt.add_parser_arguments(parser)
        with self.given(config, request, library, counts):
            self.flex_opt.run_flexgen(parser.parse_args(words.split()))
        costs = list(self.flex_opt.timers("generate").costs)
        gc.collect()
        harness.release(self.run)
        return costs, sum(counts) / len(counts)

    def measure(self, request, arm, mode, library, commits):
        """Measures an arm. commits: those of the fork and of the library."""
        if mode == COMPRESS:
            self.generate(self.tiny, QUICK, VALIDATE, library)
        costs, read = self.generate(self.config, request, mode, library)
        if isinstance(library, Calls):
            library.check()
        config, request_rows = self.config, request.batch * self.config.n_head
        token_s = self.flex_opt.project_decode_latency(costs, request.prompt, request.new) / (request.new - 1)
        layers, row_bytes = config.num_hidden_layers, config.input_dim // config.n_head * DTYPE.itemsize
        rows = 2 * request_rows * (FULL_LAYERS * request.prompt + (layers - FULL_LAYERS) * read)
        self.run.add(
            case=f"{config.name}, {layers} layers of {config.input_dim}, batch {request.batch}, {request.prompt:,} + "
            f"{request.new} tokens",
            arm=arm,
            rows=round(rows),
            row_bytes=row_bytes,
            dtype=DTYPE,
            savings=0.0,
            gbps=rows * row_bytes * 1e-9 / token_s,
            ideal_gbps=ideal.LINK_KERNEL_GBPS if mode else ideal.LINK_COPY_GBPS,
            sms=None if mode and self.run.on_gpu else 0,
            prefill_s=harness.four_digits(costs[0]),
            token_s=harness.four_digits(token_s),
            request_s=harness.four_digits(costs[0] + (request.new - 1) * token_s),
            read=f"{read:.0f}",
            fork=commits[0],
            reference=commits[1],
        )


def main(argv=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--infinigen", type=Path, required=True, metavar="FORK")
    own.add_argument("--repository", type=Path, default=os.environ.get("IBP_REFERENCE"))
    options, others = own.parse_known_args(argv)
    args = harness.parse_args(others, __doc__)
    run = harness.Run("infinigen", args, COLUMNS)
    request, path = Request() if run.is_judged else QUICK, options.infinigen.resolve()
    with tempfile.TemporaryDirectory() as name, run.cell("the fork"):
        fork = Fork(run, imported(path, Path(name)), Path(name))
        commit = reference.commit_of(path, "IBP_INFINIGEN_COMMIT")
        with run.cell(CPU):
            fork.measure(request, CPU, "", ibp, (commit, ""))
        if options.repository:
            repository = Path(options.repository).resolve()
            commits = commit, reference.commit_of(repository)
            with run.cell(reference.THEIRS):
                library = papers_library(repository)
                for arm, mode in ((RAW, TRANSFER), (reference.THEIRS, COMPRESS)):
                    with run.cell(arm):
                        fork.measure(request, arm, mode, library, commits)
        else:
            print("the paper's code: no clone is named by --repository or IBP_REFERENCE, left out")
        with run.cell(IBP):
            fork.measure(request, IBP, COMPRESS, Calls(fork.flex_opt.general_copy), (commit, ""))
    return run.finish()
