"""How fast does FlexGen generate with OPT-6.7B in host memory, without ibp and with it?

    python -m benchmarks.flexgen_opt [--out DIR] [--device cpu] [--quick]

The request is the paper's (figure 11): a prompt of 1,920 tokens and 128 new tokens, with batch 20. The prompt and the
first tokens are measured. `request_s` computes the time of the others from the median time of a token after the first.

FlexGen's own loop runs (`OptLM.generate`, as with `--percent 0 100 100 0 100 0`: all weights in host memory, caches and
activations on the GPU). It uses random weights in its file format, which are written to a temporary directory: 13 GB,
and as much host memory. FlexGen knows only FP16. For BF16 its table of dtypes is changed, and weights are rounded when
they are read. Tokens must be equal. The package flexgen (0.1.8) is needed, so `python -m benchmarks` leaves this script
out. With --device cpu, or --quick, model and request are tiny; on the CPU, stand-ins replace CUDA's streams and pinned
memory.

A token needs every weight once, so `gbps` is the weights' original bytes over the median time of a token after the
first.
"""

import contextlib
import dataclasses
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from flexgen import flex_opt
from flexgen.compression import CompressionConfig
from flexgen.opt_config import get_opt_config
from flexgen.pytorch_backend import TorchDevice, TorchDisk, TorchMixedDevice, TorchTensor
from flexgen.timer import timers
from flexgen.utils import ExecutionEnv, np_dtype_to_torch_dtype, torch_dtype_to_np_dtype, torch_dtype_to_num_bytes

import ibp.integrations.flexgen as ibp_flexgen

from . import harness, ideal

MODEL = "facebook/opt-6.7b"
TINY = dataclasses.replace(
    get_opt_config("facebook/opt-125m"),
    name="tiny",
    num_hidden_layers=2,
    hidden_size=128,
    input_dim=128,
    n_head=4,
    ffn_embed_dim=512,
    vocab_size=1024,
    max_seq_len=128,
)
REQUEST, QUICK_REQUEST = (20, 1920, 128), (4, 64, 12)  # A request has (batch, tokens of the prompt, new tokens).
NEW_TOKENS = 12  # This many of the new tokens are measured.
DTYPES = (torch.bfloat16, torch.float16)
DEVIATION = 0.02  # The weights have this standard deviation.
ARMS = {"FlexGen, ibp": {}, "FlexGen, ibp by 16 SMs": {"max_sms": 16}}  # The arms have these options of `enable`.
EXTRA_COLUMNS = ("prefill_s", "token_s", "request_s", "load_s", "host_bytes")


# ---- FlexGen without its command -------------------------------------------------------------------------------------


class CpuDevice(TorchDevice):
    """FlexGen's device for a machine without a GPU. Its memory is not pinned."""

    def allocate(self, shape, dtype, pin_memory=None, name=None):
        data = torch.empty(shape, dtype=np_dtype_to_torch_dtype[dtype])
        return TorchTensor.create_from_torch(data, self, name=name)


class NoDisk:
    """A stand-in for FlexGen's disk, whose threads need a GPU."""

    def synchronize(self):
        """Does nothing, because no transfer is ever under way."""


@contextlib.contextmanager
def without_cuda():
    """Lets FlexGen run without CUDA inside a block. Stand-ins replace streams, waiting for them, and cuda(). `half()`
    converts to the dtype that FlexGen takes for FP16."""
    with (
        mock.patch.multiple(
            torch.cuda,
            Stream=lambda: None,
            stream=lambda stream: contextlib.nullcontext(),
            synchronize=lambda *device: None,
        ),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *device: tensor),
        mock.patch.object(torch.Tensor, "half", lambda tensor: tensor.to(np_dtype_to_torch_dtype[np.float16])),
    ):
        yield


@contextlib.contextmanager
def computing_in(dtype):
    """Makes a dtype of torch the one that FlexGen takes for FP16, inside a block."""
    with (
        mock.patch.dict(np_dtype_to_torch_dtype, {np.float16: dtype}),
        mock.patch.dict(torch_dtype_to_np_dtype, {dtype: np.float16}),
        mock.patch.dict(torch_dtype_to_num_bytes, {dtype: dtype.itemsize}),
    ):
        yield


@contextlib.contextmanager
def environment(device, directory):
    """Yields FlexGen's devices: a GPU with a disk below the directory, or stand-ins on the CPU."""
    if torch.device(device).type == "cuda":
        gpu, cpu, disk = TorchDevice("cuda:0"), TorchDevice("cpu"), TorchDisk(str(directory / "offload"))
        try:
            yield ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=TorchMixedDevice([gpu, cpu, disk]))
        finally:
            disk.close_copy_threads()
    else:
        with without_cuda():
            gpu, cpu, disk = CpuDevice("cpu"), CpuDevice("cpu"), NoDisk()
            yield ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=TorchMixedDevice([gpu, cpu, disk]))


def policy(percent=(0, 100, 100, 0, 100, 0), *, batch, batches=1, on_gpu=True, **others):
    """Returns FlexGen's policy as its command makes it.

    Args:
        percent: of weights, of caches and of activations on the GPU and on the CPU.
        on_gpu: whether weights can be pinned.
        others: fields of Policy.
    """
    quantised = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
    fields = {
        "overlap": True,
        "sep_layer": True,
        "pin_weight": on_gpu,
        "cpu_cache_compute": False,
        "attn_sparsity": 1.0,
        "compress_weight": False,
        "comp_weight_config": quantised,
        "compress_cache": False,
        "comp_cache_config": dataclasses.replace(quantised, group_dim=2),
    }
    return flex_opt.Policy(batch, batches, *percent, **(fields | others))


def shapes(config):
    """Yields (name, shape) of every file that FlexGen reads for a model."""
    h, f = config.input_dim, config.ffn_embed_dim
    yield "embed_tokens.weight", (config.vocab_size, h)
    yield "embed_positions.weight", (config.max_seq_len + 2, h)
    names = ["layer_norm"]
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}"
        names += [f"{prefix}.self_attn_layer_norm", f"{prefix}.final_layer_norm"]
        for name, out, columns in (
            *((f"self_attn.{kind}_proj", h, h) for kind in ("q", "k", "v", "out")),
            ("fc1", f, h),
            ("fc2", h, f),
        ):
            yield f"{prefix}.{name}.weight", (out, columns)
            yield f"{prefix}.{name}.bias", (out,)
    for name in names:
        yield f"{name}.weight", (h,)
        yield f"{name}.bias", (h,)


def write_weights(config, directory, device):
    """Writes random FP16 weights in FlexGen's file format. Matrices and biases are normal, and gains of norms are
    around 1. The values come from torch's generator on the device."""
    home = directory / f"{config.name}-np"
    home.mkdir(parents=True)
    for name, shape in shapes(config):
        values = torch.randn(shape, device=device) * DEVIATION
        if name.endswith("layer_norm.weight"):
            values += 1
        with open(home / f"decoder.{name}", "wb") as file:
            np.save(file, values.half().cpu().numpy())


def matrices_of(model):
    """Returns every weight of FlexGen's model that is not a vector, in the order in which a token needs them."""
    homes = [home.val for home in model.weight_home]
    nested = [part.val if isinstance(part, flex_opt.ValueHolder) else (part,) for home in homes for part in home]
    return [weight for part in nested for weight in part if len(weight.shape) > 1]


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Generated:
    """The tokens of one run of FlexGen, its times in seconds, and the bytes of the matrices, of their compressed form,
    and of host memory."""

    tokens: np.ndarray
    load_s: float
    prefill_s: float
    token_s: float
    original_bytes: int
    stored_bytes: int
    host_bytes: int


def loaded(env, config, directory, its_policy):
    """Returns FlexGen's model, and the seconds that it took to load."""
    started = time.perf_counter()
    model = flex_opt.OptLM(config, env, str(directory), its_policy)
    return model, time.perf_counter() - started


def generate(model, load_s, prompts, new_tokens):
    """Generates tokens, after a first run with two tokens."""
    model.generate(prompts, max_new_tokens=2)
    timers("generate").reset()
    tokens = model.generate(prompts, max_new_tokens=new_tokens).copy()
    prefill_s, *token_s = timers("generate").costs
    weights = matrices_of(model)
    tables = [weight.data for weight in weights if isinstance(weight, ibp_flexgen.CompressedWeight)]
    original_bytes = sum(int(weight.bytes) for weight in weights)
    raw_bytes = original_bytes - sum(table.original_bytes for table in tables)
    return Generated(
        tokens,
        load_s,
        prefill_s,
        statistics.median(token_s),
        original_bytes,
        raw_bytes + sum(table.stored_bytes for table in tables),
        raw_bytes + sum(table.nbytes for table in tables),
    )


def add(run, config, arm, got, dtype, request):
    batch, prompt_tokens, new_tokens = request
    run.add(
        case=f"{config.name}, batch {batch}, {prompt_tokens:,} + {new_tokens} tokens",
        arm=arm,
        rows=got.original_bytes // (2 * config.input_dim),
        row_bytes=2 * config.input_dim,
        dtype=dtype,
        savings=1 - got.stored_bytes / got.original_bytes,
        gbps=got.original_bytes * 1e-9 / got.token_s,
        ideal_gbps=ideal.LINK_COPY_GBPS * got.original_bytes / got.stored_bytes,
        sms=None if got.stored_bytes < got.original_bytes else 0,
        prefill_s=harness.four_digits(got.prefill_s),
        token_s=harness.four_digits(got.token_s),
        request_s=harness.four_digits(got.prefill_s + (new_tokens - 1) * got.token_s),
        load_s=harness.four_digits(got.load_s),
        host_bytes=got.host_bytes,
    )


def measure(run, config, directory, env, dtype, request):
    """Measures FlexGen with plain weights, then with compressed weights, in one dtype."""
    batch, prompt_tokens, _ = request
    its_policy = policy(batch=batch, on_gpu=run.on_gpu)
    prompts = np.random.default_rng(0).integers(5, config.vocab_size, (batch, prompt_tokens))
    plain = generate(*loaded(env, config, directory, its_policy), prompts, NEW_TOKENS)
    add(run, config, "FlexGen", plain, dtype, request)
    with ibp_flexgen.enable():
        model, load_s = loaded(env, config, directory, its_policy)
        for arm, options in ARMS.items() if run.on_gpu else [("FlexGen, ibp", {})]:
            ibp_flexgen.enable(**options)
            coded = generate(model, load_s, prompts, NEW_TOKENS)
            if not np.array_equal(plain.tokens, coded.tokens):
                raise AssertionError(f"{arm}: FlexGen gives other tokens")
            add(run, config, arm, coded, dtype, request)


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("flexgen_opt", args, EXTRA_COLUMNS)
    torch.manual_seed(0)
    is_full = run.on_gpu and not run.quick
    config, request = (get_opt_config(MODEL), REQUEST) if is_full else (TINY, QUICK_REQUEST)
    with tempfile.TemporaryDirectory() as name, run.cell(config.name):
        directory = Path(name)
        write_weights(config, directory, run.device)
        with environment(run.device, directory) as env:
            for dtype in DTYPES:
                with run.cell(f"{config.name}, {dtype}"), computing_in(dtype):
                    measure(run, config, directory, env, dtype, request)
                gc.collect()
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
