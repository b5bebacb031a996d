"""How long does a token take with a model whose weights `ibp.offload` streams?

    python -m benchmarks.weights [--generate] [--out DIR] [--device cpu] [--quick]

It is compared with raw weights through the same hooks, weights by scheme ibp (`scheme ibp`, BF16), weights on the GPU,
and accelerate's cpu_offload. `llm.py` has compressed weights that stay on the GPU. The model is a Llama of transformers
with 7 billion random weights, N(0, 0.02) in BF16, FP16 and FP8 (E4M3, cast before each product). A token is one call of
the model after a prompt, with its cache, until the host has seen its end; the median of several counts. `prompt` 0
stands for one call with `rows` sequences of 1,024 tokens, so many that the GPU computes for as long as raw weights take
to arrive.

In the same run the bits of every weight that a layer sees are summed on the device and compared, and with batch 1 the
tokens are compared. The bits of accelerate's weights are not, because no hook sees them. The bound is the bytes stored
over the copy engine's rate, or for `prompt` 0, 1.03 times the time with weights on the GPU. With two GPUs layers take
turns.

--generate measures transformers' `generate()` alone, with a model of Llama-3-8B's shape, in BF16. The time of a token
is the difference between answers of many and of few tokens. It keeps the other rows, and the other arms keep its rows.

After the common columns, weights.csv has prompt (tokens), ms (of a token, or of the call), bound_ms, host_bytes and
device_bytes (that weights take there, including the arena) and weight_bytes (of the raw weights). `rows` is the batch.
"""

import argparse
import inspect
import shutil
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import ibp
from ibp._fetch.streaming import STREAM_SMS

from . import harness, ideal

try:
    import transformers
except ImportError:
    transformers = None
try:
    import accelerate
except ImportError:
    accelerate = None
try:
    import safetensors.torch
except ImportError:
    safetensors = None

LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA_8B = LLAMA_7B | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
CELLS, QUICK_CELLS = ((1, 256), (1, 1920), (16, 512)), ((1, 8),)  # Each cell has (batch, prompt).
# Tokens that are timed; FEW_TOKENS are for accelerate, which takes over a second for each.
NUM_TOKENS, FEW_TOKENS = 6, 2
ON_GPU, HOOKS, ACCELERATE, MASKS = "on the GPU", "raw through hooks", "accelerate cpu_offload", "scheme ibp"  # arms
GENERATING = ", generate()"  # The names of arms that --generate measures end so.
# --generate has this prompt, answers with these numbers of tokens, and repeats them so often.
GENERATE_PROMPT, ANSWERS, GENERATE_TIMES = 64, (2, 12), 3
FEW_SMS = 8  # Besides, ibp.offload's default number of SMs is measured.
STREAM_SHARE, RAW_FACTOR, ACCELERATE_FACTOR, TWO_GPUS_FACTOR = {"bfloat16": 0.95, "float16": 0.95}, 1.42, 8.0, 1.85
FP8_SHARE, COMPUTE_SHARE, LOAD_SECONDS = 0.90, 1.03, 10.0
EXTRA_COLUMNS = ("prompt", "ms", "bound_ms", "host_bytes", "device_bytes", "weight_bytes")


def continuing(model, cache):
    """Returns the argument with which a call of a model continues from a cache. Its name depends on the release of
    transformers."""
    name = "cache" if "cache" in inspect.signature(getattr(model, "forward", model)).parameters else "past_key_values"
    return {name: cache}


class Bench:
    """Weights of one dtype and shape in host memory, and the models that are made with them."""

    def __init__(self, run, dtype, shape=LLAMA_7B):
        self.run, self.dtype = run, dtype
        self.config = transformers.LlamaConfig(**(TINY if run.quick else shape))
        self.compute_dtype = dtype if dtype.itemsize > 1 else torch.bfloat16
        self.min_bytes = 1000 if run.quick else 1 << 20
        self.state, self.sums = {}, {}
        generator = torch.Generator(run.device).manual_seed(0)
        for name, parameter in self.model().named_parameters():
            if parameter.dim() == 1:
                x = torch.ones(parameter.shape, dtype=self.compute_dtype, device=run.device)
            else:
                x = torch.randn(parameter.shape, generator=generator, device=run.device, dtype=torch.float32) * 0.02
                x = x.to(self.compute_dtype if "embed" in name else dtype)
            self.sums[name] = bits_of(x)
            self.state[name] = x.cpu()
        self.num_bytes = sum(x.nbytes for x in self.state.values())
        self.tokens = {}

    def model(self):
        """Returns a model without weights."""
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(self.config).to(self.compute_dtype)
        for module in model.modules():
            if isinstance(module, nn.Linear) and self.dtype.itemsize == 1:
                module.weight = nn.Parameter(module.weight.to(self.dtype), requires_grad=False)
                module.forward = types.MethodType(cast_linear, module)
        model.model.rotary_emb = type(model.model.rotary_emb)(config=self.config)
        return model.eval()

    def on_gpu(self):
        model = self.model()
        model.load_state_dict(self.state, assign=True)
        return model.to(self.run.device)

    def offloaded(self, device=None, checkpoint=None, **options):
        model = self.model()
        handle = ibp.offload(
            model,
            self.run.device if device is None else device,
            checkpoint=self.state if checkpoint is None else checkpoint,
            min_bytes=self.min_bytes,
            **options,
        )
        return model, handle

    def prompt(self, batch, prompt):
        generator = torch.Generator(self.run.device).manual_seed(1)
        return torch.randint(0, self.config.vocab_size, (batch, prompt), generator=generator, device=self.run.device)

    def seconds_a_token(self, model, batch, prompt, num_tokens):
        """Returns (median seconds of a token, the tokens). Unless there are few tokens, they are generated twice: the
        first time fills the allocator's cache, whose calls would otherwise be timed."""
        if num_tokens > FEW_TOKENS:
            self.generate(model, batch, prompt, num_tokens)
        times, tokens = self.generate(model, batch, prompt, num_tokens)
        return statistics.median(times[1:]), tokens

    @torch.inference_mode()
    def generate(self, model, batch, prompt, num_tokens):
        """Returns (seconds of each token after the prompt, one more than num_tokens; the tokens). The host waits for
        each."""
        out = model(self.prompt(batch, prompt), use_cache=True, logits_to_keep=1)
        cache, tokens, times = out.past_key_values, [out.logits[:, -1:].argmax(-1)], []
        for _ in range(1 + num_tokens):
            self.run.sync()
            start = time.perf_counter()
            out = model(tokens[-1], use_cache=True, **continuing(model, cache))
            tokens.append(out.logits[:, -1:].argmax(-1))
            self.run.sync()
            times.append(time.perf_counter() - start)
        return times, torch.cat(tokens, 1)

    def seconds_an_answer(self, model, num_tokens):
        """Returns the median seconds of an answer of num_tokens tokens by `generate()`. Checks the tokens."""
        ids, times = self.prompt(1, GENERATE_PROMPT), []
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        for _ in range(GENERATE_TIMES):
            self.run.sync()
            start = time.perf_counter()
            tokens = model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, **options)
            self.run.sync()
            times.append(time.perf_counter() - start)
            self.check_tokens(1, GENERATE_PROMPT, tokens)
        return statistics.median(times)

    @torch.inference_mode()
    def seconds_a_call(self, model, num_tokens):
        """Returns the seconds of one call without a cache on num_tokens tokens, in sequences of at most 1,024."""
        x = self.prompt(max(1, num_tokens // 1024), min(num_tokens, 1024))
        times = []
        for _ in range(3):
            self.run.sync()
            start = time.perf_counter()
            model(x, use_cache=False, logits_to_keep=1)
            self.run.sync()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    @torch.inference_mode()
    def check_weights(self, model):
        """Raises AssertionError unless every layer sees the bits of its weight."""
        seen, handles = {}, []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):

                def note(module, args, name=f"{name}.weight"):
                    seen[name] = bits_of(module.weight)

                handles.append(module.register_forward_pre_hook(note))
        for _ in range(2):
            model(self.prompt(1, 8), use_cache=False)
        for handle in handles:
            handle.remove()
        wrong = [name for name, sums in seen.items() if not torch.equal(sums.cpu(), self.sums[name].cpu())]
        if wrong or not seen:
            raise AssertionError(f"the bits of {len(wrong)} of {len(seen)} weights differ, {wrong[:3]}")

    def check_tokens(self, batch, prompt, tokens):
        """Checks that with batch 1 all arms have the same tokens. With larger batches, sums in products can differ from
        run to run."""
        first = self.tokens.setdefault((batch, prompt), tokens.cpu())[:, : tokens.shape[1]]
        if batch == 1 and not torch.equal(first, tokens.cpu()[:, : first.shape[1]]):
            raise AssertionError(f"the tokens after a prompt of {prompt} differ from those of the first arm")

    def add(self, arm, batch, prompt, seconds, *, handle=None, bound=0.0, sms=0):
        """Records a time. handle: that of ibp.offload; None: all weights are where the arm says."""
        # accelerate has one layer's weights on the GPU at a time, and does not say how many bytes they have.
        on_host = arm == ACCELERATE
        host_bytes, device_bytes = (self.num_bytes, "") if on_host else (0, self.num_bytes)
        weight_bytes, savings = self.num_bytes, 0.0
        if handle is not None:
            stats = handle.stats()
            host_bytes, device_bytes, weight_bytes = stats.host_bytes, stats.device_bytes, stats.weight_bytes
            tables = [weight.table for weight in handle._plan.weights if weight.table is not None]
            savings = 1 - sum(table.stored_bytes for table in tables) / sum(table.original_bytes for table in tables)
        self.run.add(
            case=f"Llama of {self.num_bytes / 1e9:.2f} GB",
            arm=arm,
            rows=batch,
            row_bytes=self.config.hidden_size * self.dtype.itemsize,
            dtype=self.dtype,
            savings=savings,
            gbps=weight_bytes / seconds / 1e9,
            ideal_gbps=weight_bytes / (bound or seconds) / 1e9,
            sms=sms,
            prompt=prompt,
            ms=f"{1e3 * seconds:.2f}",
            bound_ms=f"{1e3 * bound:.2f}" if bound else "",
            host_bytes=host_bytes,
            device_bytes=device_bytes,
            weight_bytes=weight_bytes,
        )


def bits_of(x):
    """Returns three sums over the bytes of a tensor, which distinguish any two weights of a model."""
    words = x.detach().contiguous().view(torch.uint8).view(-1).view(torch.int16)
    half = len(words) // 2
    return torch.stack([words.sum(dtype=torch.int64), words[:half].sum(dtype=torch.int64), words[::3].sum()])


def cast_linear(self, x):
    return F.linear(x, self.weight.to(x.dtype), self.bias)


def link_bytes_a_token(handle):
    return sum(group.stored_bytes for group in handle._events.groups)


def measure(bench, arm, model, cells, *, handle=None, num_tokens=NUM_TOKENS, bound=0.0, sms=0, check=True):
    """Times all cells of an arm. Checks tokens, and with `check` also bits, which the hooks of this script have to
    see."""
    with bench.run.cell(f"{arm}, {bench.dtype}"):
        if check:
            bench.check_weights(model)
        for batch, prompt in cells:
            seconds, tokens = bench.seconds_a_token(model, batch, prompt, num_tokens)
            bench.check_tokens(batch, prompt, tokens)
            bench.add(arm, batch, prompt, seconds, handle=handle, bound=bound, sms=sms)
        if check:
            bench.check_weights(model)


def measure_streams(bench, cells):
    """Measures the arms with hooks, and weights on the GPU."""
    run = bench.run
    balance, compute = measure_on_gpu(bench, cells)
    for arm, options in ((HOOKS, {"scheme": "raw"}), ("ibp", {})):
        harness.release(run)
        with run.cell(f"{arm}, {bench.dtype}"):
            measure_stream(bench, arm, options, cells, balance, compute)
    if bench.dtype == torch.bfloat16:
        harness.release(run)
        with run.cell(MASKS):
            measure_stream(bench, MASKS, {"scheme": "ibp"}, cells[:1], 0, 0.0)


def measure_on_gpu(bench, cells):
    """Measures weights on the GPU. Returns (tokens of one call, its seconds) for BF16, and zeros for other dtypes."""
    model = bench.on_gpu()
    measure(bench, ON_GPU, model, cells)
    balance = balanced_tokens(bench, model) if bench.dtype == torch.bfloat16 else 0
    if not balance:
        return 0, 0.0
    compute = bench.seconds_a_call(model, balance)
    bench.add(ON_GPU, max(1, balance // 1024), 0, compute)
    return balance, compute


def measure_stream(bench, arm, options, cells, balance, compute):
    run = bench.run
    model, handle = bench.offloaded(**options)
    bound = link_bytes_a_token(handle) / ideal.LINK_COPY_GBPS / 1e9
    decoding_sms = STREAM_SMS if arm in ("ibp", MASKS) else 0
    few = arm == "ibp" and run.on_gpu and bench.dtype == torch.bfloat16
    for sms in (None, FEW_SMS) if few else (None,):
        for fetcher in handle._events.fetchers:
            fetcher.max_sms = sms
        measure(bench, arm, model, cells, handle=handle, bound=bound, sms=sms or decoding_sms)
    for fetcher in handle._events.fetchers:
        fetcher.max_sms = None
    if balance:
        seconds = bench.seconds_a_call(model, balance)
        batch, limit = max(1, balance // 1024), compute * COMPUTE_SHARE
        bench.add(arm, batch, 0, seconds, handle=handle, bound=limit, sms=decoding_sms)


def balanced_tokens(bench, model):
    """Returns the number of tokens on which the GPU computes for as long as the copy engine brings raw weights."""
    if not bench.run.on_gpu:
        return 64
    few = 4096
    return round(few * bench.num_bytes / ideal.LINK_COPY_GBPS / 1e9 / bench.seconds_a_call(model, few) / 1024) * 1024


def measure_accelerate(bench):
    if accelerate is None:
        print("accelerate: not installed, left out")
        return
    harness.release(bench.run)
    with bench.run.cell("accelerate"):
        model = bench.model()
        model.load_state_dict(bench.state, assign=True)
        accelerate.cpu_offload(model, execution_device=bench.run.device, state_dict=bench.state)
        measure(bench, ACCELERATE, model, bench_cells(bench.run)[:1], num_tokens=FEW_TOKENS, check=False)


def measure_two_gpus(bench, cells):
    devices = [torch.device("cuda", number) for number in range(2)] if bench.run.on_gpu else ["cpu", "cpu"]
    harness.release(bench.run)
    with bench.run.cell("two GPUs"):
        model, handle = bench.offloaded(devices)
        bound = link_bytes_a_token(handle) / ideal.LINK_COPY_GBPS / 1e9 / 2
        measure(bench, "ibp, two GPUs", model, cells, handle=handle, bound=bound, sms=STREAM_SMS)


def measure_loading(bench):
    """Measures loading, from safetensors in the page cache to a model that can be called."""
    if safetensors is None:
        print("loading: safetensors is not installed, left out")
        return
    harness.release(bench.run)
    with bench.run.cell("loading"), tempfile.TemporaryDirectory(dir=memory_directory(bench.num_bytes)) as directory:
        names = list(bench.state)
        for shard in range(4):
            part = {name: bench.state[name] for name in names[shard::4]}
            safetensors.torch.save_file(part, Path(directory) / f"model-{shard}.safetensors")
        bench.run.sync()
        start = time.perf_counter()
        model, handle = bench.offloaded(checkpoint=directory)
        bench.run.sync()
        bench.add("ibp, loading", 0, 0, time.perf_counter() - start, handle=handle, bound=LOAD_SECONDS)
        bench.check_weights(model)


def measure_generate(run):
    """Measures `generate()` with weights on the GPU and in host memory, raw and coded."""
    bench = Bench(run, torch.bfloat16, LLAMA_8B)
    for arm, options in ((ON_GPU, None), (HOOKS, {"scheme": "raw"}), ("ibp", {})):
        harness.release(run)
        with run.cell(arm + GENERATING):
            model, handle = (bench.on_gpu(), None) if options is None else bench.offloaded(**options)
            bench.seconds_an_answer(model, ANSWERS[1])
            few, many = (bench.seconds_an_answer(model, count) for count in ANSWERS)
            bound = 0.0 if handle is None else link_bytes_a_token(handle) / ideal.LINK_COPY_GBPS / 1e9
            seconds, sms = (many - few) / (ANSWERS[1] - ANSWERS[0]), STREAM_SMS if arm == "ibp" else 0
            bench.add(arm + GENERATING, 1, GENERATE_PROMPT, seconds, handle=handle, bound=bound, sms=sms)


def memory_directory(num_bytes):
    """Returns a directory whose files are in memory. Returns None, which stands for the place for temporary files, if
    it lacks room for num_bytes."""
    directory = Path("/dev/shm")
    return directory if directory.is_dir() and shutil.disk_usage(directory).free > num_bytes else None


@torch.inference_mode()
def bench_cells(run):
    return QUICK_CELLS if run.quick else CELLS


def shortfalls(rows):
    """Yields lines that say where a figure misses its target."""
    by = {(row["arm"], row["dtype"], row["rows"], row["prompt"], row["sms"]): row for row in rows}
    for (arm, dtype, batch, prompt, _), row in by.items():
        ms, bound = float(row["ms"]), float(row["bound_ms"] or 0)
        what = f"{arm}, {dtype}, batch {batch}, prompt {prompt}: {ms:.1f} ms"
        if arm == "ibp" and prompt:
            share = STREAM_SHARE.get(dtype, FP8_SHARE)
            if row["sms"] == STREAM_SMS and ms * share > bound:
                yield f"{what}, wanted {bound / share:.1f}"
            raw = next((r for key, r in by.items() if key[:4] == (HOOKS, dtype, batch, prompt)), None)
            if row["sms"] == STREAM_SMS and raw and dtype == "bfloat16" and float(raw["ms"]) < RAW_FACTOR * ms:
                yield f"{what}, {float(raw['ms']) / ms:.2f} times as fast as raw weights, wanted {RAW_FACTOR}"
        elif arm in ("ibp", "ibp, loading") and bound and ms > bound:
            yield f"{what}, wanted {bound:.1f}"
        if arm == "ibp, two GPUs":
            one = by.get(("ibp", dtype, batch, prompt, STREAM_SMS))
            if one and float(one["ms"]) < TWO_GPUS_FACTOR * ms:
                yield f"{what}, {float(one['ms']) / ms:.2f} times one GPU, wanted {TWO_GPUS_FACTOR}"
        if arm == ACCELERATE:
            own = by.get(("ibp", dtype, batch, prompt, STREAM_SMS))
            if own and ms < ACCELERATE_FACTOR * float(own["ms"]):
                yield f"{what}, ibp is {ms / float(own['ms']):.1f} times as fast, wanted {ACCELERATE_FACTOR}"


def main(argv=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--generate", action="store_true")
    found, others = own.parse_known_args(argv)
    args = harness.parse_args(others, __doc__)
    run = harness.Run(
        "weights", args, EXTRA_COLUMNS, keep=lambda row: row["arm"].endswith(GENERATING) != found.generate
    )
    if transformers is None:
        print("transformers is not installed: nothing to measure")
        return run.finish()
    cells = bench_cells(run)
    transformers.logging.set_verbosity_error()
    if found.generate:
        measure_generate(run)
        return run.finish()
    with run.cell("BF16"):
        bench = Bench(run, torch.bfloat16)
        measure_streams(bench, cells)
        measure_loading(bench)
        if not run.on_gpu or torch.cuda.device_count() > 1:
            measure_two_gpus(bench, cells)
        measure_accelerate(bench)
        del bench
    for dtype in (torch.float16, torch.float8_e4m3fn):
        harness.release(run)
        with run.cell(str(dtype)):
            measure_streams(Bench(run, dtype), cells[:1])
    return run.finish(shortfalls(run.rows))


if __name__ == "__main__":
    sys.exit(main())
