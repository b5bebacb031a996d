"""How fast does a language model run from compressed weights? Needs transformers.

    python -m benchmarks.llm [--compiled | --loading | --qwen | --large] [--out DIR] [--device cpu] [--quick]

The models are transformers' own classes with random weights, N(0, 0.02) in BF16, which are made on the GPU from one
seed. Without an option the shape is Llama-3-8B's. --compiled: 8 layers of it and its head, compiled by
torch.compile(mode="reduce-overhead"). --qwen: Qwen3-32B's shape. --loading: 3 layers of Llama-3-8B's shape, from
directories. --large: Llama-3-70B's shape, only compressed, because its plain weights fit no GPU. Each option keeps the
rows that the others left in the CSV.

Arms: `plain`; `coded`, which `ibp.nn.compress` has made; and `offloaded`, with the plain weights in host memory by
`ibp.offload(scheme="raw")`, for GPUs that are too small for them. `way` names the measurement, and `rows` counts the
tokens of a call:

    step           every sequence of a batch gets its next token, greedily; a static cache of `context` positions is
                   full of random keys and values; attention is transformers' "sdpa"; in a CUDA graph, except for
                   `offloaded`
    compiled step  the same with torch.compile, which makes CUDA graphs itself; the choice of the token is not compiled
    prefill        one sequence, with logits of its last token, in a CUDA graph
    weights        making the plain weights, or compressing them layer by layer
    loading        transformers' from_pretrained of a directory with plain weights and of one with compressed weights,
                   from the page cache to the device; a model of few layers

After the common columns, llm.csv has model, way, context, ms, tokens_per_s, times (the speed-up over plain),
device_bytes (of the arm's weights, including lists of escapes), peak_bytes (the most memory that weights, cache and
temporaries took together), weight_bytes (of plain weights), token_bytes (of a token's keys and values) and the target.
For `weights`, `met` says whether device_bytes are at most WEIGHTS_SHARE of the plain bytes. GB/s count plain weights.
The ideal is the time that device memory takes for the arm's weights, or the link if weights come from the host.

In the same run every weight of compressed modules is compared with the plain one, bit for bit. The product of every
compressed matrix is compared with products in double precision, by linear.py's check. The logits of a call are compared
with plain ones: they have other bits, because sums are added in another order, and may differ by LOGITS_ERROR of their
norm.
"""

import argparse
import gc
import math
import sys
import tempfile
import time
import zlib
from functools import partial
from pathlib import Path

import torch
from torch import nn

import ibp

from . import codec, harness, ideal, linear
from .weights import continuing, memory_directory

try:
    import transformers
except ImportError:
    transformers = None
try:
    from ibp.integrations.transformers import save_coded
except ImportError:  # transformers is missing, or is a release that the quantizer does not know
    save_coded = None

COLUMNS = (
    *("model", "way", "context", "ms", "tokens_per_s", "times"),
    *("device_bytes", "peak_bytes", "weight_bytes", "token_bytes"),
    *harness.TARGET_COLUMNS,
)
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN_32B = {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
SHAPES = {
    "Llama-3-8B": ("Llama", LLAMA_8B),
    "Llama-3-8B, 8 layers": ("Llama", LLAMA_8B | {"num_hidden_layers": 8}),
    # This shape is for loading.
    "Llama-3-8B, 3 layers": ("Llama", LLAMA_8B | {"num_hidden_layers": 3, "vocab_size": 32000}),
    "Qwen3-32B": ("Qwen3", QWEN_32B),
    "Llama-3-70B": ("Llama", LLAMA_70B),
}
BATCHES, CONTEXT, LONG_CONTEXT = (1, 8, 16, 32, 64, 128), 512, 8192
LARGE_BATCHES, LONG_BATCHES = (1, 8, 32), (1, 8)
COMPILED_BATCHES = (1, 32, 8, 128, 16, 64)  # The most important ones come first, because compiling takes long.
PREFILLS, FEW_PREFILLS = (64, 256, 512, 2048, 8192), (512, 2048)
QUICK_BATCHES, QUICK_CONTEXT, QUICK_PREFILLS = (1, 8), 64, (48,)
# Steps take these last positions of a cache one by one. There are more of them than steps between two calls of
# `rewind`.
ROOM = 32
WARM_UPS = 3
LOADS = 2  # Each directory is loaded this many times. The fastest load counts.

WANTED_COMPILED = {1: 1.25, 8: 1.2, 16: 1.2, 32: 1.2, 128: 1.0}  # By batch, the target is this speed-up over plain.
WANTED_PREFILL, WANTED_LOADING, WEIGHTS_SHARE = 0.97, 1.0, 0.76
# Rounding to BF16 in other places moves the logits of 32 random layers by 0.03, and those of 80 layers by 0.06.
LOGITS_ERROR = 0.1
CHECKED_TOKENS = 8  # Products and logits are checked in a call with this many tokens.

# These are the ways.
STEP, COMPILED, PREFILL, WEIGHTS, LOADING = "step", "compiled step", "prefill", "weights", "loading"
PLAIN, CODED, OFFLOADED = "plain", "coded", "offloaded"  # These are the arms.


# ---- models --------------------------------------------------------------------------------------------------------


def values(name, shape, device):
    """Returns the parameter of this name, with the same values in every call."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)


def config_of(model, quick):
    family, fields = SHAPES[model]
    return getattr(transformers, f"{family}Config")(**(TINY if quick else fields))


def empty_model(config):
    """Returns a model in BF16 on the meta device, without values except for its rotary embedding."""
    kind = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))
    with torch.device("meta"):
        model = kind(config).to(torch.bfloat16)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval()


def parts_of(model):
    """Returns the names of modules that together hold all parameters, in the order of their use."""
    layers = (f"model.layers.{number}" for number in range(len(model.model.layers)))
    return ["model.embed_tokens", *layers, "model.norm", "lm_head"]


def fill(model, part, device):
    """Makes the parameters of a part of a model."""
    for name, parameter in list(model.get_submodule(part).named_parameters(prefix=part)):
        owner, _, attribute = name.rpartition(".")
        made = nn.Parameter(values(name, parameter.shape, device), requires_grad=False)
        setattr(model.get_submodule(owner), attribute, made)


def is_coded(module):
    return isinstance(module, (ibp.nn.Linear, ibp.nn.Embedding))


def check_weights(model, part=""):
    """Raises AssertionError unless the matrices and embeddings of a part have the bits of `values`."""
    for name, module in model.get_submodule(part).named_modules(prefix=part):
        if is_coded(module) or isinstance(module, (nn.Linear, nn.Embedding)):
            weight = module.weight.decompress() if is_coded(module) else module.weight.detach()
            harness.check_bits(weight, values(f"{name}.weight", weight.shape, weight.device), name)


def build(run, config, arm):
    """Returns (a model with weights, seconds of making or compressing them, the most bytes that they took meanwhile).
    If the model is compressed, at most one part of it is plain at any time."""
    model, seconds, memory = empty_model(config), 0.0, Memory(run)
    model.model.rotary_emb.to(run.device)
    for part in parts_of(model):
        start = now(run)
        fill(model, part, run.device)
        if arm == CODED:
            start = now(run)
            ibp.nn.compress(model, include=part, min_bytes=least_bytes(run))
        seconds += now(run) - start
        memory.note_peak()
        if arm == CODED:
            check_weights(model, part)
            memory.forget_peak()
    return model, seconds, memory.peak_bytes


def least_bytes(run):
    """Returns `min_bytes` for compressing and for offloading a model."""
    return 1000 if run.quick else 1 << 20


def now(run):
    run.sync()
    return time.perf_counter()


# ---- memory --------------------------------------------------------------------------------------------------------


class Memory:
    """A counter of the GPU memory that is allocated from now on. Without a GPU it is 0.

    Attributes:
        peak_bytes: the most that was taken up to the last `note_peak`.
    """

    def __init__(self, run):
        self.run, self.peak_bytes = run, 0
        harness.release(run)
        self.before = self.held_bytes()
        self.forget_peak()

    def held_bytes(self):
        return torch.cuda.memory_allocated(self.run.device) if self.run.on_gpu else 0

    def taken_bytes(self):
        gc.collect()
        return self.held_bytes() - self.before

    def note_peak(self):
        if self.run.on_gpu:
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self.run.device) - self.before)

    def forget_peak(self):
        if self.run.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.run.device)


def counted_bytes(model):
    """Returns the bytes of a model's weights, by their `nbytes`."""
    plain = [tensor for tensor in model.parameters() if not isinstance(tensor, ibp.nn.TableParameter)]
    tensors = [*plain, *(module.weight for module in model.modules() if is_coded(module))]
    return sum(tensor.nbytes for tensor in tensors)


# ---- calls ---------------------------------------------------------------------------------------------------------


class Step:
    """A decoding step of a model. Call it once per token, at most `ROOM` times, then `rewind` it."""

    def __init__(self, run, model, batch, context):
        config, device = model.config, run.device
        generator = torch.Generator(device).manual_seed(0)
        self.call, self.start = model, context - ROOM
        self.cache = transformers.StaticCache(config=config, max_cache_len=context)
        heads, head_dim = config.num_key_value_heads, head_dim_of(config)
        self.continued = continuing(model, self.cache)
        self.cache.early_initialization(batch, heads, head_dim, torch.bfloat16, device)
        for layer in self.cache.layers:
            layer.keys.normal_(generator=generator)
            layer.values.normal_(generator=generator)
        self.first = torch.randint(config.vocab_size, (batch, 1), generator=generator, device=device)
        self.token = self.first.clone()
        self.position = torch.full((batch, 1), self.start, device=device)
        self.mask = torch.ones((batch, 1, 1, context), dtype=torch.bool, device=device)
        self.rewind()

    def rewind(self):
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.start)
        self.position.fill_(self.start)
        self.token.copy_(self.first)

    def __call__(self):
        logits = self.call(self.token, position_ids=self.position, attention_mask=self.mask, **self.continued).logits
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.position.add_(1)


class Prefill:
    """A call of a model with a whole prompt."""

    def __init__(self, run, model, num_tokens):
        generator = torch.Generator(run.device).manual_seed(0)
        self.model = model
        self.ids = torch.randint(model.config.vocab_size, (1, num_tokens), generator=generator, device=run.device)

    def rewind(self):
        """Does nothing, because each call makes a cache."""

    def __call__(self):
        return self.model(self.ids, logits_to_keep=1).logits


def head_dim_of(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def graphed(run, call):
    """Returns a function that replays a call in a CUDA graph. Without a GPU it is the call itself."""
    if not run.on_gpu:
        call()
        call.rewind()
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    call.rewind()
    return graph.replay


def graph_seconds(run, call):
    """Returns the seconds of a call in a CUDA graph, or of the call itself without a GPU."""
    return run.seconds([graphed(run, call)])


def eager_seconds(run, call):
    """Returns the seconds of a call by the wall clock, for a model whose weights come from the host."""
    call()
    call.rewind()
    return run.seconds([call], wall=True)


def compiled_seconds(run, call):
    """Returns the seconds of a step whose model is compiled."""
    options = {"mode": "reduce-overhead"} if run.on_gpu else {"backend": "eager"}
    torch.compiler.reset()
    try:
        call.call = torch.compile(call.call, dynamic=False, **options)
        for _ in range(WARM_UPS + 1):  # These calls compile the step, record a graph, and replay it.
            call()
        call.rewind()
        return run.seconds([call])
    finally:
        torch.compiler.reset()


# ---- arms side by side ---------------------------------------------------------------------------------------------


class Bench:
    """The arms of one shape, and the run that records their measurements.

    Attributes:
        name: of the shape.
        models, device_bytes: by arm.
        plain_s: seconds of the arm "plain", by case.
    """

    def __init__(self, run, rates, name, arms=(PLAIN, CODED)):
        self.run, self.rates, self.name = run, rates, name
        self.config = config_of(name, run.quick)
        self.weight_bytes = sum(parameter.nbytes for parameter in empty_model(self.config).parameters())
        values_of_token = self.config.num_hidden_layers * self.config.num_key_value_heads * head_dim_of(self.config)
        self.token_bytes = 4 * values_of_token  # A key and a value have two bytes each.
        self.models, self.device_bytes, self.plain_s = {}, {}, {}
        product = torch.ones(64, 64, dtype=torch.bfloat16, device=run.device)
        product @ product  # cuBLAS takes its workspace now, so that it counts for no arm.
        for arm in arms:
            with run.cell(f"{name}, {arm}"), torch.no_grad():
                self.add_arm(arm)

    def add_arm(self, arm):
        memory = Memory(self.run)
        model, seconds, peak_bytes = build(self.run, self.config, arm)
        if arm == CODED:  # The first call lists escapes, which count, too.
            with self.run.cell(f"{self.name}, products and logits"):
                check(self.run, model, self.models.get(PLAIN))
        device_bytes = memory.taken_bytes() if self.run.on_gpu else counted_bytes(model)
        self.models[arm], self.device_bytes[arm] = model, device_bytes
        is_met = device_bytes <= WEIGHTS_SHARE * self.weight_bytes
        self.record(
            WEIGHTS,
            arm,
            0,
            seconds,
            peak_bytes=peak_bytes or "",
            ideal_gbps=self.ideal_gbps(self.weight_bytes + (device_bytes if arm == CODED else 0)),
            met={PLAIN: "", CODED: "yes" if is_met else "no"}[arm],
        )

    def ideal_gbps(self, moved_bytes):
        return ideal.device_gbps(self.weight_bytes, moved_bytes, self.rates.copy_gbps)

    def case(self, way, tokens, context):
        if way == PREFILL:
            return f"{self.name}, {way} of {tokens} tokens"
        return f"{self.name}, {way}" + f", batch {tokens}, context {context}" * bool(tokens)

    def record(self, way, arm, tokens, seconds, *, context=0, device_bytes=None, ideal_gbps=None, wanted=None, **more):
        """Records a measurement. wanted: the target as speed-up over plain. device_bytes: None for those of the arm's
        weights."""
        case = self.case(way, tokens, context)
        device_bytes = self.device_bytes[arm] if device_bytes is None else device_bytes
        gbps = self.weight_bytes * 1e-9 / seconds
        if arm == PLAIN:
            self.plain_s[case] = seconds
        plain_s = None if way == WEIGHTS else self.plain_s.get(case)
        if wanted and plain_s and arm == CODED:
            more |= harness.judged(gbps, wanted * self.weight_bytes * 1e-9 / plain_s)
        times = f"{plain_s / seconds:.3f}" if plain_s else ""
        self.run.add(
            case=case,
            arm=arm,
            rows=tokens,
            row_bytes=2 * self.config.hidden_size,
            dtype=torch.bfloat16,
            savings=1 - device_bytes / self.weight_bytes if arm == CODED else 0.0,
            gbps=gbps,
            ideal_gbps=ideal_gbps or self.ideal_gbps(device_bytes),
            sms=None,
            model=self.name,
            way=way,
            context=context or "",
            ms=harness.four_digits(1e3 * seconds),
            tokens_per_s=harness.four_digits(tokens / seconds) if tokens else "",
            times=times,
            device_bytes=device_bytes,
            weight_bytes=self.weight_bytes,
            token_bytes=self.token_bytes,
            **more,
        )
        print(f"{case}, {arm}: {1e3 * seconds:.2f} ms" + f", {times} of plain's rate" * bool(times), flush=True)

    @torch.no_grad()
    def measure(self, way, tokens, seconds_of, make_call, wanted=None, context=0):
        """Times a call of each arm. make_call: function(model) -> the argument of `seconds_of`."""
        for arm, model in self.models.items():
            with self.run.cell(f"{self.case(way, tokens, context)}, {arm}"):
                memory = Memory(self.run)
                seconds = seconds_of(self.run, make_call(model))
                memory.note_peak()
                peak_bytes = self.device_bytes[arm] + memory.peak_bytes if self.run.on_gpu else ""
                self.record(way, arm, tokens, seconds, context=context, wanted=wanted, peak_bytes=peak_bytes)

    def measure_steps(self, batches, context, way=STEP, seconds_of=graph_seconds):
        context = QUICK_CONTEXT if self.run.quick else context
        for batch in QUICK_BATCHES if self.run.quick else batches:
            wanted = WANTED_COMPILED.get(batch) if way == COMPILED else None
            make_call = partial(Step, self.run, batch=batch, context=context)
            self.measure(way, batch, seconds_of, make_call, wanted, context)

    def measure_prefills(self, counts):
        for count in QUICK_PREFILLS if self.run.quick else counts:
            make_call = partial(Prefill, self.run, num_tokens=count)
            self.measure(PREFILL, count, graph_seconds, make_call, WANTED_PREFILL)

    @torch.no_grad()
    def measure_offloaded(self):
        """Measures the plain model with its weights in host memory. The bench loses this model."""
        run, context = self.run, QUICK_CONTEXT if self.run.quick else CONTEXT
        with run.cell(f"{self.case(STEP, 1, context)}, {OFFLOADED}"):
            model = self.models.pop(PLAIN)
            handle = ibp.offload(model, run.device, scheme="raw", min_bytes=least_bytes(run))
            seconds = eager_seconds(run, Step(run, model, 1, context))
            held = {"device_bytes": handle.stats().device_bytes, "ideal_gbps": ideal.LINK_COPY_GBPS}
            self.record(STEP, OFFLOADED, 1, seconds, context=context, **held)


def check(run, coded, plain=None):
    """Asserts that every product of a call is right, and that its logits are close to the plain model's."""

    def check_product(module, args, result):
        x = args[0].reshape(-1, module.in_features)
        linear.check(values(f"{names[module]}.weight", module.weight.shape, run.device), module.weight, x)
        checked.append(module)

    names = {module: name for name, module in coded.named_modules() if isinstance(module, ibp.nn.Linear)}
    checked, handles = [], [module.register_forward_hook(check_product) for module in names]
    generator = torch.Generator(run.device).manual_seed(0)
    ids = torch.randint(coded.config.vocab_size, (CHECKED_TOKENS, 1), generator=generator, device=run.device)
    try:
        logits = coded(ids, use_cache=False).logits.float()
    finally:
        for handle in handles:
            handle.remove()
    if not names or set(checked) != set(names):
        raise AssertionError(f"{len(checked)} of {len(names)} coded matrices were multiplied")
    if plain is None:
        if not logits.isfinite().all():
            raise AssertionError("logits are not finite")
        return
    wanted = plain(ids, use_cache=False).logits.float()
    error = float((logits - wanted).norm() / wanted.norm())
    if not math.isfinite(error) or error > LOGITS_ERROR:
        raise AssertionError(f"logits differ by {error:.3g} of their norm from plain ones, wanted {LOGITS_ERROR}")


# ---- loading -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_loading(run, rates):
    """Measures loading of directories with plain and with compressed weights, which are in the page cache."""
    if save_coded is None:
        print("loading: the quantizer does not work with this release of transformers, left out")
        return
    bench = Bench(run, rates, "Llama-3-8B, 3 layers")
    with run.cell(LOADING), tempfile.TemporaryDirectory(dir=memory_directory(2 * bench.weight_bytes)) as directory:
        paths = {arm: Path(directory) / arm for arm in (PLAIN, CODED)}
        bench.models[PLAIN].save_pretrained(paths[PLAIN])
        save_coded(bench.models[CODED], paths[CODED])
        bench.models.clear()
        for arm, path in paths.items():
            seconds = min(load_seconds(run, path) for _ in range(LOADS))
            link_gbps = ideal.tensor_gbps(bench.weight_bytes, bench.device_bytes[arm])
            bench.record(LOADING, arm, 0, seconds, ideal_gbps=link_gbps, wanted=WANTED_LOADING)


def load_seconds(run, path):
    gc.collect()
    start = now(run)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, device_map=run.device.type)
    seconds = now(run) - start
    check_weights(model)
    return seconds


# ---- parts of the script -------------------------------------------------------------------------------------------


def measure_both_arms(bench, prefills):
    bench.measure_steps(BATCHES, CONTEXT)
    bench.measure_prefills(prefills)
    if not bench.run.quick:
        bench.measure_steps(LONG_BATCHES, LONG_CONTEXT)


def measure_llama(run, rates):
    bench = Bench(run, rates, "Llama-3-8B")
    measure_both_arms(bench, PREFILLS)
    bench.measure_offloaded()


def measure_compiled(run, rates):
    bench = Bench(run, rates, "Llama-3-8B, 8 layers")
    bench.measure_steps(COMPILED_BATCHES, CONTEXT, COMPILED, compiled_seconds)


def measure_qwen(run, rates):
    measure_both_arms(Bench(run, rates, "Qwen3-32B"), FEW_PREFILLS)


def measure_large(run, rates):
    bench = Bench(run, rates, "Llama-3-70B", (CODED,))
    bench.measure_steps(LARGE_BATCHES, CONTEXT)
    bench.measure_prefills(FEW_PREFILLS)


# Each option has (models, function).
PARTS = {
    "": (("Llama-3-8B",), measure_llama),
    "compiled": (("Llama-3-8B, 8 layers",), measure_compiled),
    "loading": (("Llama-3-8B, 3 layers",), measure_loading),
    "qwen": (("Qwen3-32B",), measure_qwen),
    "large": (("Llama-3-70B",), measure_large),
}


def shortfalls(rows):
    """Yields lines that say where a target is missed."""
    for row in rows:
        if row.get("met") != "no":
            continue
        if row["way"] == WEIGHTS:
            share = int(row["device_bytes"]) / int(row["weight_bytes"])
            yield f"{row['case']}: {share:.3f} of the plain bytes, wanted {WEIGHTS_SHARE}"
        else:
            wanted = float(row["times"]) * float(row["target_gbps"]) / float(row["gbps"])
            yield f"{row['case']}: {row['times']} times as fast as plain, wanted {wanted:.2f}"


def main(argv=None):
    own = argparse.ArgumentParser(add_help=False)
    group = own.add_mutually_exclusive_group()
    for name in filter(None, PARTS):
        group.add_argument(f"--{name}", dest="part", action="store_const", const=name, default="")
    found, others = own.parse_known_args(argv)
    models, measure = PARTS[found.part]
    args = harness.parse_args(others, __doc__)
    run = harness.Run("llm", args, COLUMNS, keep=lambda row: row["model"] not in models)
    if transformers is None:
        print("transformers is not installed: nothing to measure")
        return run.finish()
    transformers.logging.set_verbosity_error()
    with run.cell(models[0]):
        measure(run, codec.DeviceRates(run, record=False))
    return run.finish(shortfalls(run.rows))


if __name__ == "__main__":
    sys.exit(main())
