"""How fast does FlexGen generate with OPT-6.7B in host memory, without ibp and with it?

    python -m benchmarks.flexgen_opt [--trace] [--out DIR] [--device cpu] [--quick]

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

`--trace` says what binds a token, and writes `flexgen_trace.csv` alone. Some tokens of the same request run under
torch.profiler. FlexGen copies the weights of the next layer while a layer computes, and waits for both. So the CSV has,
for each traced token, a row for the layers of each class, while they compute, and one for all: `ms` from one wait
to the next; in which of them the link moves bytes (`link_ms`: copies between host and GPU, and kernels of ibp if they
read pinned memory themselves), kernels of ibp decode what was copied (`decode_ms`), other kernels compute
(`compute_ms`), link and computations are busy at once (`both_ms`), and the GPU is idle (`idle_ms`). `longer_ms` sums
the longer of link and computation over the layers, which is the time if all else were free, and `link_binds` counts the
layers in which this is the link. `untraced_ms` is the median of tokens of the same run without the profiler.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from flexgen import flex_opt
from flexgen.compression import CompressionConfig
from flexgen.opt_config import get_opt_config
from flexgen.pytorch_backend import TorchDevice, TorchDisk, TorchMixedDevice
from flexgen.timer import timers
from flexgen.utils import ExecutionEnv, np_dtype_to_torch_dtype, torch_dtype_to_np_dtype, torch_dtype_to_num_bytes

import ibp.integrations.flexgen as ibp_flexgen

from . import flexgen_parts, harness, ideal, ratio

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
# With --trace, these tokens are traced of this many. The prompt gives token 0.
TRACED_STEPS, TRACED_TOKENS = (3, 4, 5), 8
EXTRA_COLUMNS = ("prefill_s", "token_s", "request_s", "load_s", "host_bytes")
TIMES = ("ms", "link_ms", "decode_ms", "compute_ms", "both_ms", "idle_ms", "longer_ms")
TRACE_COLUMNS = ("step", "part", "layers", *TIMES, "link_binds", "copied_bytes", "kernels", "untraced_ms")
# What the names of copies, of those between host and GPU, and of ibp's decoding kernels contain.
COPY, OVER_LINK, DECODERS = "Memcpy", ("HtoD", "DtoH"), ("gather_items", "gather_parts")


# ---- FlexGen without its command -------------------------------------------------------------------------------------


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
    """Yields FlexGen's devices: a GPU with a disk below the directory, or stand-ins on the CPU. With these, `half()`
    converts to the dtype that FlexGen takes for FP16."""
    if torch.device(device).type == "cuda":
        gpu, cpu, disk = TorchDevice("cuda:0"), TorchDevice("cpu"), TorchDisk(str(directory / "offload"))
        try:
            yield ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=TorchMixedDevice([gpu, cpu, disk]))
        finally:
            disk.close_copy_threads()
    else:

        def half(tensor):
            return tensor.to(np_dtype_to_torch_dtype[np.float16])

        with flexgen_parts.without_cuda(), mock.patch.object(torch.Tensor, "half", half):
            (gpu, cpu), disk = map(flexgen_parts.cpu_device(TorchDevice), ("gpu", "cpu")), flexgen_parts.NoDisk()
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


# ---- a trace ---------------------------------------------------------------------------------------------------------


def union(intervals):
    """Returns the disjoint intervals that cover the same points as some intervals (start, end), in their order."""
    found = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def length(intervals):
    """Returns the length of the union of intervals."""
    return sum(end - start for start, end in union(intervals))


def length_of_both(one, other):
    """Returns the length of the points that two lists of intervals both cover."""
    return length(one) + length(other) - length([*one, *other])


@dataclasses.dataclass(frozen=True)
class Work:
    """A copy or a kernel on the GPU. Times are in microseconds: when the host launched it, its start and its end."""

    name: str
    launched: float
    start: float
    end: float
    num_bytes: int = 0

    @property
    def over_link(self):
        return self.name.startswith(COPY) and any(way in self.name for way in OVER_LINK)

    @property
    def decodes(self):
        return any(name in self.name for name in DECODERS)


def read_trace(path):
    """Returns (the work of a GPU, the ends of the host's waits for all of it) from a trace of torch.profiler."""
    with open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    work = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            own, start = event.get("args", {}), event["ts"]
            at = launched.get(own.get("correlation"), start)
            work.append(Work(event["name"], at, start, start + event["dur"], int(own.get("bytes", 0))))
    waits = [event["ts"] + event["dur"] for event in events if event["name"] == "cudaDeviceSynchronize"]
    return sorted(work, key=lambda one: one.start), sorted(waits)


def by_layer(work, waits, step_us):
    """Returns the work and the microseconds of each layer of a token: FlexGen waits for the GPU after each of them.
    step_us: the time of the token."""
    layers, ends = [], []
    for before, wait in zip([float("-inf"), *waits], waits):
        own = [one for one in work if before < one.launched <= wait]
        if own:  # The profiler waits, too, when there is nothing to wait for.
            layers.append(own)
            ends.append(wait)
    starts = [ends[-1] - step_us, *ends] if ends else ()
    return [(own, end - start) for own, start, end in zip(layers, starts, ends)]


def times_of(work, span_us, decodes_copies):
    """Returns a Counter of TIMES, in milliseconds, and of the other numbers of a layer. decodes_copies: whether ibp's
    kernels decode what was copied; otherwise they read pinned memory."""
    link, decoding, computing = [], [], []
    for one in work:
        is_link = one.over_link or (one.decodes and not decodes_copies)
        (link if is_link else decoding if one.decodes else computing).append((one.start, one.end))
    link_us, compute_us = length(link), length(computing)
    us = span_us, link_us, length(decoding), compute_us, length_of_both(link, computing)
    us = *us, span_us - length([*link, *decoding, *computing]), max(link_us, compute_us)
    return Counter(
        {name: value / 1000 for name, value in zip(TIMES, us)}
        | {"layers": 1, "link_binds": int(link_us > compute_us), "kernels": len(work)}
        | {"copied_bytes": sum(one.num_bytes for one in work if one.over_link)}
    )


def traced(model, prompts, on_gpu):
    """Generates tokens. Returns (the tokens, {step: (its work, the ends of waits, its seconds)} of TRACED_STEPS, the
    median seconds of the tokens after the first that are not traced)."""
    model.generate(prompts, max_new_tokens=2)
    timer, found, profilers = timers("generate"), {}, []
    timer.reset()
    start, stop = timer.start, timer.stop

    def start_traced(*arguments):
        if on_gpu and len(timer.costs) in TRACED_STEPS:
            profilers.append(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]))
            profilers[-1].start()
        start(*arguments)

    def stop_traced(*arguments):
        stop(*arguments)
        step = len(timer.costs) - 1
        if step in TRACED_STEPS:
            found[step] = [], [], timer.costs[-1]
        if profilers:
            profiler = profilers.pop()
            profiler.stop()
            with tempfile.TemporaryDirectory() as name:
                path = f"{name}/trace.json"
                profiler.export_chrome_trace(path)
                found[step] = *read_trace(path), timer.costs[-1]

    with mock.patch.multiple(timer, start=start_traced, stop=stop_traced):
        tokens = model.generate(prompts, max_new_tokens=TRACED_TOKENS).copy()
    others = [seconds for step, seconds in enumerate(timer.costs) if step not in (0, *TRACED_STEPS)]
    return tokens, found, statistics.median(others)


def add_trace(run, config, model, arm, got, dtype, request):
    """Adds the rows of an arm. got: what `traced` returns."""
    (batch, prompt_tokens, new_tokens), weights = request, matrices_of(model)
    _, steps, untraced_s = got
    original_bytes = sum(int(weight.bytes) for weight in weights)
    stored_bytes = sum(
        weight.data.stored_bytes if isinstance(weight, ibp_flexgen.CompressedWeight) else int(weight.bytes)
        for weight in weights
    )
    kinds = [type(layer).__name__ for layer in model.layers]
    for step, (work, waits, seconds) in steps.items():
        # The copy engine has brought the stored bytes, or kernels have read them.
        decodes_copies = sum(one.num_bytes for one in work if one.over_link) > stored_bytes / 2
        layers = by_layer(work, waits, 1e6 * seconds)
        parts = {"all": times_of(work, 1e6 * seconds, decodes_copies)}
        parts["all"]["layers"] = len(layers)
        if len(layers) == len(kinds):
            found = [times_of(*layer, decodes_copies) for layer in layers]
            parts = {"all": sum(found, Counter())}
            for kind, own in zip(kinds, found):
                parts[kind] = parts.get(kind, Counter()) + own
        elif run.on_gpu:
            run.failures.append(f"{arm}, {dtype}, step {step}: {len(layers)} layers are traced, wanted {len(kinds)}")
        for part, times in parts.items():
            run.add(
                case=f"{config.name}, batch {batch}, {prompt_tokens:,} + {new_tokens} tokens, step {step}, {part}",
                arm=arm,
                rows=original_bytes // (2 * config.input_dim),
                row_bytes=2 * config.input_dim,
                dtype=dtype,
                savings=1 - stored_bytes / original_bytes,
                gbps=original_bytes * 1e-9 / seconds,
                ideal_gbps=ideal.LINK_COPY_GBPS * original_bytes / stored_bytes,
                sms=None if stored_bytes < original_bytes else 0,
                step=step,
                part=part,
                **{name: times[name] for name in ("layers", "link_binds", "copied_bytes", "kernels")},
                **{name: harness.four_digits(times[name]) for name in TIMES},
                untraced_ms=harness.four_digits(1000 * untraced_s),
            )


def measure_trace(run, config, directory, env, dtype, request):
    """Traces FlexGen with plain weights, then with compressed weights, in one dtype."""
    batch, prompt_tokens, _ = request
    its_policy = policy(batch=batch, on_gpu=run.on_gpu)
    prompts = np.random.default_rng(0).integers(5, config.vocab_size, (batch, prompt_tokens))
    model, _ = loaded(env, config, directory, its_policy)
    plain = traced(model, prompts, run.on_gpu)
    add_trace(run, config, model, "FlexGen", plain, dtype, request)
    del model  # Its weights take as much host memory as the files.
    gc.collect()
    with ibp_flexgen.enable():
        model, _ = loaded(env, config, directory, its_policy)
        coded = traced(model, prompts, run.on_gpu)
        if not np.array_equal(plain[0], coded[0]):
            raise AssertionError("FlexGen, ibp: FlexGen gives other tokens")
        add_trace(run, config, model, "FlexGen, ibp", coded, dtype, request)


def print_trace(rows):
    """Prints the times of each part, in the median of the traced tokens."""
    lines = {}
    for row in rows:
        lines.setdefault((row["dtype"], row["arm"], row["part"]), []).append(row)
    ratio.print_lines(
        "Milliseconds of a token after the first, by the layers that compute",
        ["dtype", "arm", "part", *TIMES, "link_binds", "layers", "untraced_ms"],
        [
            [
                *key,
                *(f"{statistics.median(float(row[name]) for row in found):.2f}" for name in TIMES),
                *(str(found[0][name]) for name in ("link_binds", "layers", "untraced_ms")),
            ]
            for key, found in lines.items()
        ],
        3,
    )


def main(argv=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--trace", action="store_true")
    options, others = own.parse_known_args(argv)
    args = harness.parse_args(others, __doc__)
    name, columns = ("flexgen_trace", TRACE_COLUMNS) if options.trace else ("flexgen_opt", EXTRA_COLUMNS)
    run = harness.Run(name, args, columns)
    measured = measure_trace if options.trace else measure
    torch.manual_seed(0)
    is_full = run.on_gpu and not run.quick
    config, request = (get_opt_config(MODEL), REQUEST) if is_full else (TINY, QUICK_REQUEST)
    with tempfile.TemporaryDirectory() as name, run.cell(config.name):
        directory = Path(name)
        write_weights(config, directory, run.device)
        with environment(run.device, directory) as env:
            for dtype in DTYPES:
                with run.cell(f"{config.name}, {dtype}"), computing_in(dtype):
                    measured(run, config, directory, env, dtype, request)
                gc.collect()
    if options.trace:
        print_trace(run.rows)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
