"""How long does a token of a mixture of experts take if the experts are in host memory, or compressed on the GPU?

    python -m benchmarks.moe [--deepseek | --between | --hits] [--layers N] [--out DIR] [--device cpu] [--quick]

Layers of experts have the sizes of Qwen3-30B-A3B and are of transformers' own class: 128 experts of 3 x 2048 x 768 BF16
values, N(0, 0.02), without attention. A token uses 8 experts. The model has 48 layers; --layers sets how many are
measured. Arms:

`plain`                  all experts on the GPU, with transformers' `grouped_mm`
`plain, batched_mm`      the same with `batched_mm`
`coded on the GPU`       compressed by `ibp.nn.compress`
`accelerate cpu_offload` brings all experts of a layer, raw
`CPU gather and copy`    the host waits for indices, gathers the call's experts in pinned memory, and copies them raw
`streamed`               `ibp.offload` layer by layer, as for the weights of other modules
`by index`               `ibp.offload`, which fetches the experts that are asked for
`by index, cache`        the same with a cache on the GPU of half the raw bytes of all experts
`..., raw rows`          the last two arms with raw rows and the same code
`between experts`        the rest of such layers, whose experts return their input: attention to 2,048 positions, norms
                         and router in a CUDA graph. Experts that are fetched early, for a router's guess of the next
                         layer's, would hide as much time.

--between measures only the last arm, and keeps the rows of the others.

--deepseek has layers with the sizes of DeepSeek-V3, of transformers' class for FP8: 256 experts of 3 x 7168 x 2048
values in FP8 E4M3, N(0, 112), with a scale for each block of 128 x 128; the model has 58 layers. The arms are `by
index`, compressed and raw. The class would download its FP8 kernels; here the experts of a call are dequantised to BF16
and multiplied by `grouped_mm`. moe_deepseek.csv has the results.

No model routes here. Routes are `uniform`, or `sticky`: they follow Zipf's law with exponent 1, and a token keeps each
expert's draw of the token before it with probability 0.5. The ways are `eager`, timed with the wall clock, and `graph`,
replays of a CUDA graph. Every call has new experts; calls before the timed ones fill the caches. In the same run the
results of all arms are compared with those of `plain`, bit for bit, except for `plain, batched_mm` and `coded on the
GPU`, which add in another order.

After the common columns, moe.csv has layers, routing, way, ms (of a call), ms_of_all (for all layers of the model),
bound_ms (link_bytes at the rate of kernels, or at that of the copy engine if all experts are streamed), asked_bytes
(raw bytes of the experts that a call asks for, each once; for `between experts` of its own weights), link_bytes (of a
call), hit_rate (of rows), host_bytes, device_bytes, host_us (per layer, until an eager call returns that finds the GPU
idle), times (speed-up of `coded on the GPU` over the faster of the plain arms) and own_us (host_us if the class's
forward reads its weights and computes nothing, which is the library's own work). `rows` is the number of tokens of a
call, and gbps counts asked_bytes. The launches of a call fit the GPU's queue, so that the host does not wait.

--hits counts and measures no time. moe_hits.csv has what each of the first tokens brings over the link, with a cache of
compressed and of raw rows and one token per call. The bytes are the same on every machine. moe_policies.csv has
hit_rate, the share of rows that a simulated cache finds after it has filled; it holds some share of a layer's rows. A
missing row takes the way that was used longest ago, as in `ibp.RowCache`, or the least used one, by counts that are
halved every 16 to 256 calls. With `sticky, changing`, tokens have other favourites every 100 tokens.
"""

import argparse
import contextlib
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

import ibp
from ibp.nn._experts import Calls, stand_in

from . import harness, ideal, llm, ratio

try:
    import accelerate
except ImportError:
    accelerate = None
try:
    import transformers
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import grouped_mm_experts_forward, use_experts_implementation
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
except ImportError:
    transformers = None

QWEN3 = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
DEEPSEEK = {"hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8}
QWEN3_ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
TINY = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts_per_tok": 4}
TINY_EXPERTS = 16
BLOCK = (128, 128)  # An FP8 matrix has one scale for each such block.
# With this scale the largest number of a block is about 448, as in DeepSeek-V3.
FP8_STD, FP8_SCALE = 112.0, 0.02 / 112.0
QUICK_LAYERS = 2
CONTEXT, QUICK_CONTEXT = 2048, 300  # Attention looks at this many positions.
BATCHES, QUICK_BATCHES, PREFILL, QUICK_PREFILL = (1, 8, 32), (1, 3), 2048, 40
DEVICE_BATCHES = (1, 2, 4, 8, 16)  # Arms with all experts on the GPU have these batches.
# CALLS calls are timed together. Routes repeat after ROUNDS rounds of them.
CALLS, FEW_CALLS, ROUNDS = 16, 2, 12
ZIPF_EXPONENT, STICKINESS = 1.0, 0.5  # These are assumptions about routing.
CACHE_SHARE = 0.5  # The cache has this share of the experts' raw bytes.
PLAIN, STREAMED, BY_INDEX, CACHED = "plain", "streamed", "by index", "by index, cache"
BATCHED, CODED, RAW = "plain, batched_mm", "coded on the GPU", ", raw rows"
HOOKS, GATHERED, BETWEEN = "accelerate cpu_offload", "CPU gather and copy", "between experts"
ON_DEVICE, OTHERS = (PLAIN, BATCHED, CODED), (HOOKS, GATHERED)
ARMS = (*ON_DEVICE, *OTHERS, STREAMED, BY_INDEX, BY_INDEX + RAW, CACHED, CACHED + RAW, BETWEEN)
UNIFORM, STICKY, CHANGING, EAGER, GRAPH = "uniform", "sticky", "sticky, changing", "eager", "graph"
EXTRA_COLUMNS = (
    "layers,routing,way,ms,ms_of_all,bound_ms,asked_bytes,link_bytes,hit_rate,host_bytes,device_bytes,host_us,times,"
    "own_us"
).split(",")
HITS_COLUMNS = "arm,routing,token,layers,asked_bytes,link_bytes,hit_rate,cache_bytes,commit".split(",")
SHOWN_TOKENS, SIMULATED_TOKENS, QUICK_TOKENS = 200, 1000, 5
POLICIES_COLUMNS = "routing,share,policy,tokens,hit_rate,commit".split(",")
# Shares of rows; calls between two halvings, 0 for the way that was used longest ago; tokens between changes.
SHARES, HALVING, CHANGES = (0.25, 0.5, 0.75), (0, 16, 32, 64, 256), 100
# The simulated cache has the ways and counts of `ibp.RowCache`, but another number of sets.
SETS, WAYS, MOST_USES = 100, 32, 63
# Targets with batch 1: ms of all layers, and speed-up over raw rows behind a cache. Other targets are shares of the
# bound.
WANTED_MS = {(BY_INDEX, UNIFORM): 46.0, (CACHED, STICKY): 20.0}
WANTED_SHARE, WANTED_PREFILL, WANTED_TIMES_RAW = 0.90, 0.95, 1.3
WANTED_OWN_US = 60.0  # A layer whose experts are fetched by index should take at most this many microseconds.
# `coded on the GPU` should have this speed-up in a graph, and this share of the memory of plain experts.
WANTED_TIMES, WANTED_MEMORY = 1.2, 0.76
# Sums in another order may differ by this share of the largest result.
CLOSE = 0.02


# ---- models ----------------------------------------------------------------------------------------------------------


def qwen3_config(quick, **others):
    return transformers.Qwen3MoeConfig(**(TINY | {"num_experts": TINY_EXPERTS} if quick else QWEN3) | others)


def qwen3_experts(config):
    return Qwen3MoeExperts(config).bfloat16()


def normal_bfloat16(parameter, generator):
    parameter.data.normal_(std=0.02, generator=generator)


def deepseek_config(quick):
    return transformers.DeepseekV3Config(**(TINY | {"n_routed_experts": TINY_EXPERTS} if quick else DEEPSEEK))


def dequantized(experts, scale, block=BLOCK):
    """Returns matrices in BF16. scale: one for each block."""
    rows, columns = (sizes * of_block for sizes, of_block in zip(scale.shape[1:], block))
    if (rows, columns) != tuple(experts.shape[1:]):
        raise ValueError(f"matrices of {list(experts.shape[1:])} are not of whole blocks of {list(block)}")
    of_columns = scale.to(torch.bfloat16).repeat_interleave(block[1], 2)[:, :, None]
    return experts.to(torch.bfloat16).unflatten(1, (-1, block[0])).mul_(of_columns).flatten(1, 2)


def dequantized_forward(module, hidden_states, top_k_index, top_k_weights):
    """Computes the forward of FP8 experts in BF16, with `grouped_mm`."""

    def matrices_of(name):
        return dequantized(getattr(module, name), getattr(module, f"{name}_scale_inv"))

    values = {name: functools.partial(matrices_of, name) for name in ("gate_up_proj", "down_proj")}
    made = stand_in(module, values, type(module))
    return grouped_mm_experts_forward(made, hidden_states, top_k_index, top_k_weights)


@functools.cache
def fp8_class():
    """Returns the class that transformers makes for a checkpoint in FP8, with one more implementation."""
    ALL_FP8_EXPERTS_FUNCTIONS.register("dequantized", dequantized_forward)
    return use_experts_implementation(
        experts_class=FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS, has_bias=False, has_gate=True
    )


def deepseek_experts(config):
    return fp8_class()(config, block_size=BLOCK, has_bias=False, has_gate=True)


def normal_fp8(parameter, generator):
    if parameter.dtype == torch.float32:
        parameter.data.fill_(FP8_SCALE)
        return
    for expert in parameter.data:
        values = torch.randn(expert.shape, generator=generator, device=expert.device)
        expert.copy_(values.mul_(FP8_STD).clamp_(-448.0, 448.0))


@dataclass(frozen=True)
class Shape:
    """The layers of experts of a model.

    Attributes:
        csv: name of the CSV.
        layers: number of layers of the whole model.
        measured: number of layers that are measured.
        make_config, make_experts, fill: make its configuration and class, and fill a parameter with random values.
        dtype: of the experts.
        implementation: transformers' implementation that multiplies by experts.
        wanted_ms: targets for all layers with batch 1, by arm and routing.
    """

    csv: str
    layers: int
    measured: int
    make_config: Callable
    make_experts: Callable
    fill: Callable
    dtype: torch.dtype
    implementation: str
    arms: tuple[str, ...]
    wanted_ms: dict


QWEN3_30B = Shape(
    "moe", 48, 8, qwen3_config, qwen3_experts, normal_bfloat16, torch.bfloat16, "grouped_mm", ARMS, WANTED_MS
)
DEEPSEEK_V3 = Shape(
    "moe_deepseek",
    58,
    2,
    deepseek_config,
    deepseek_experts,
    normal_fp8,
    torch.float8_e4m3fn,
    "dequantized",
    (BY_INDEX, BY_INDEX + RAW),
    {},
)


class Layers(nn.Module):
    """Layers of experts. The call gives their routes."""

    def __init__(self, shape, config, num_layers, device):
        super().__init__()
        with torch.device(device):
            self.experts = nn.ModuleList(shape.make_experts(config) for _ in range(num_layers))
        generator = torch.Generator(device).manual_seed(0)
        for parameter in self.parameters():
            shape.fill(parameter, generator)
        self.eval().requires_grad_(False)

    def forward(self, x, routes, gates):
        for experts, index in zip(self.experts, routes):
            x = x + experts(x, index, gates)
        return x


@contextlib.contextmanager
def computing_nothing(kind):
    """Makes the forward of a class of experts, inside a block, read its weights, which are fetched for it, and return
    its input."""

    def read(self, hidden_states, top_k_index, top_k_weights):
        for name in ("gate_up_proj", "down_proj"):
            getattr(self, name)
        return hidden_states

    with mock.patch.object(kind, "forward", read):
        yield


class GatheredExperts(nn.Module):
    """Experts in host memory. The host gathers those of a call and copies them to the device."""

    def __init__(self, experts, device):
        super().__init__()
        names = [name for name, _ in experts.named_parameters()]
        self.calls, self.device, self.experts = Calls(type(experts), names), device, experts
        self.stacks, self.buffers = {}, {}
        for name, parameter in experts.named_parameters():
            self.stacks[name] = parameter.data.cpu()
            self.buffers[name] = torch.empty_like(self.stacks[name], pin_memory=device.type == "cuda")
            parameter.data = self.stacks[name][:0]
        self.copied = torch.cuda.Event() if device.type == "cuda" else None

    def forward(self, x, index, gates):
        chosen, slots = index.cpu().unique(return_inverse=True)
        if self.copied:
            self.copied.synchronize()  # The buffers are free now.
        found = {}
        for name, stack in self.stacks.items():
            part = self.buffers[name][: len(chosen)]
            torch.index_select(stack, 0, chosen, out=part)
            found[name] = part.to(self.device, non_blocking=True)
        if self.copied:
            self.copied.record()
        return self.calls.with_slots(self.experts, (x, index, gates), {}, slots.to(self.device), chosen, found)


def routes(routing, num_experts, num_choices, num_layers, tokens, calls, device):
    """Returns the experts of consecutive calls, int64 [calls, layers, tokens, choices]. Those of one token differ."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (num_layers, tokens, num_experts)

    def drawn():
        # This is Gumbel's distribution.
        return -torch.empty(shape, device=device).exponential_(generator=generator).log_()

    ranks = torch.rand(num_layers, 1, num_experts, generator=generator, device=device).argsort(-1) + 1
    favour = -ZIPF_EXPONENT * ranks.log() if routing == STICKY else torch.zeros_like(ranks, dtype=torch.float32)
    draws, found = drawn(), []
    for _ in range(calls):
        found.append((favour + draws).topk(num_choices).indices)
        is_kept = torch.rand(shape, generator=generator, device=device) < (STICKINESS if routing == STICKY else 0.0)
        draws = torch.where(is_kept, draws, drawn())
    return torch.stack(found)


class Bench:
    """The arms of one number of layers.

    Attributes:
        wanted: results of `plain`, by routing and tokens.
        plain_s: seconds of a call of the faster of the plain arms, by routing, tokens and way.
    """

    def __init__(self, run, shape, num_layers):
        self.run, self.shape, self.num_layers, self.wanted, self.plain_s = run, shape, num_layers, {}, {}
        self.config = shape.make_config(run.quick)
        self.num_experts = getattr(self.config, "num_experts", None) or self.config.n_routed_experts
        expert_values = 3 * self.config.hidden_size * self.config.moe_intermediate_size
        self.expert_bytes = expert_values * shape.dtype.itemsize
        self.num_bytes = num_layers * self.num_experts * self.expert_bytes

    def plain_model(self, implementation):
        self.config._experts_implementation = implementation
        return Layers(self.shape, self.config, self.num_layers, self.run.device)

    def model(self, arm):
        """Returns (model, the result of `ibp.offload` or `ibp.nn.compress`, or None if neither was called)."""
        model = self.plain_model("batched_mm" if arm == BATCHED else self.shape.implementation)
        handle = None
        if arm == HOOKS:
            accelerate.cpu_offload(model, execution_device=self.run.device)
        elif arm == GATHERED:
            model.experts = nn.ModuleList(GatheredExperts(part, self.run.device) for part in model.experts)
        if arm == STREAMED:
            for experts in model.experts:
                experts.forward = experts.forward  # `ibp.offload` streams modules with a forward of their own.
        least = 1000 if self.run.quick else 1 << 20
        if arm == CODED:
            handle = ibp.nn.compress(model, min_bytes=least)
        elif arm not in (*ON_DEVICE, *OTHERS):
            handle = ibp.offload(
                model,
                self.run.device,
                resident_bytes=int(CACHE_SHARE * self.num_bytes) if CACHED in arm else None,
                scheme="raw" if RAW in arm else "auto",
                min_bytes=least,
            )
        return model, handle

    def measure_arm(self, arm):
        if arm == HOOKS and accelerate is None:
            print("accelerate: not installed, left out")
            return
        if arm == BETWEEN:
            return self.measure_between()
        run, (model, handle) = self.run, self.model(arm)
        of_arms = {PLAIN: {*BATCHES, *DEVICE_BATCHES}, BATCHED: DEVICE_BATCHES, CODED: DEVICE_BATCHES, HOOKS: (1,)}
        batches = of_arms.get(arm, BATCHES)
        if run.quick:
            batches = QUICK_BATCHES[:1] if arm == HOOKS else QUICK_BATCHES
        cells = list(itertools.product((UNIFORM,) if arm == HOOKS else (UNIFORM, STICKY), sorted(batches)))
        if arm in (PLAIN, CODED, STREAMED, BY_INDEX) and PLAIN in self.shape.arms:
            cells.append((UNIFORM, QUICK_PREFILL if run.quick else PREFILL))
        for routing, tokens in cells:
            with run.cell(f"{arm}, {tokens} tokens, {routing}"):
                self.measure(arm, model, handle, tokens, routing)

    def measure_between(self):
        """Measures layers with the smallest experts that a model can have, which return their input."""
        run, batches = self.run, QUICK_BATCHES if self.run.quick else BATCHES
        small = {"vocab_size": 512, "moe_intermediate_size": 1, "num_hidden_layers": self.num_layers}
        config = self.shape.make_config(run.quick, **QWEN3_ATTENTION, **small)
        with torch.device(run.device):
            model = transformers.Qwen3MoeForCausalLM(config).bfloat16().eval().requires_grad_(False)
        for layer in model.model.layers:
            layer.mlp.experts.forward = lambda x, index, gates: x
        for batch in batches:
            step = llm.Step(run, model, batch, QUICK_CONTEXT if run.quick else CONTEXT)
            with run.cell(f"{BETWEEN}, {batch} tokens"), torch.inference_mode():
                seconds = llm.graph_seconds(run, step)
                num_bytes = llm.counted_bytes(model.model.layers)
                self.add(BETWEEN, batch, UNIFORM, GRAPH if run.on_gpu else EAGER, seconds, num_bytes, None, 1)

    def inputs(self, tokens, routing, num_calls):
        """Returns (vectors, routes of calls, gates). The first call has the same routes for any number of calls."""
        config, device = self.config, self.run.device
        num_choices, generator = config.num_experts_per_tok, torch.Generator(device).manual_seed(2)
        chosen = routes(routing, self.num_experts, num_choices, self.num_layers, tokens, num_calls, device)
        x = torch.randn(tokens, config.hidden_size, generator=generator, device=device, dtype=torch.bfloat16)
        return x, chosen, torch.full((tokens, num_choices), 1 / num_choices, dtype=torch.bfloat16, device=device)

    @torch.inference_mode()
    def note_wanted(self):
        """Notes the results of the plain model, for shapes in which it is not an arm."""
        model = self.plain_model(self.shape.implementation)
        for key in itertools.product((UNIFORM, STICKY), QUICK_BATCHES if self.run.quick else BATCHES):
            x, chosen, gates = self.inputs(key[1], key[0], 1)
            self.wanted[key] = model(x, chosen[0], gates).cpu()

    @torch.inference_mode()
    def measure(self, arm, model, handle, tokens, routing):
        run = self.run
        is_offloaded = arm not in (*ON_DEVICE, *OTHERS)
        is_slow = arm in (STREAMED, *OTHERS) or tokens > max(BATCHES) or (is_offloaded and tokens > 1)
        num_calls = FEW_CALLS if run.quick or is_slow else CALLS
        num_before = CALLS if CACHED in arm and not run.quick else num_calls  # This many calls fill the caches.
        x, chosen, gates = self.inputs(tokens, routing, num_before * ROUNDS)
        asked = [len(layer.unique()) for call in chosen[: 2 * num_calls] for layer in call]
        asked_bytes = sum(asked) * self.expert_bytes // (2 * num_calls)

        def call(route):
            return model(x, route, gates)

        can_capture = run.on_gpu and arm not in (STREAMED, *OTHERS) and tokens <= max(BATCHES)
        for way in (EAGER, GRAPH) if can_capture else (EAGER,):
            called = self.captured(call, chosen[0].clone()) if way == GRAPH else call
            with run.cell(f"{arm}, {tokens} tokens, {routing}, {way}: results"):
                self.check(arm, called(chosen[0]).clone(), (routing, tokens))
            source, made = itertools.cycle(chosen), itertools.count()

            def some_calls(called=called, source=source, made=made):
                for _ in range(num_calls):
                    called(next(source))
                next(made)

            for _ in range(num_before // num_calls):
                some_calls()
            if is_offloaded:
                handle.reset_stats()
            seconds = run.seconds([some_calls], wall=True) / num_calls
            num_made = (next(made) - num_before // num_calls) * num_calls
            stats = handle.stats() if is_offloaded else None
            host_us = own_us = ""
            if way == EAGER and not is_slow:
                host_us = self.returning_us(lambda: call(chosen[0]))
                if is_offloaded:
                    with computing_nothing(type(model.experts[0])):
                        own_us = self.returning_us(lambda: call(chosen[0]))
            report = handle if arm == CODED else None
            self.add(arm, tokens, routing, way, seconds, asked_bytes, stats, num_made, report, host_us, own_us)

    def returning_us(self, call):
        """Returns the median microseconds per layer until a call returns that finds the GPU idle."""
        times = []
        for _ in range(ROUNDS):
            self.run.sync()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return f"{1e6 * statistics.median(times) / self.num_layers:.1f}"

    def check(self, arm, result, key):
        wanted = self.wanted.setdefault(key, result.cpu()).to(result.device)
        if arm in (BATCHED, CODED):
            torch.testing.assert_close(result, wanted, rtol=CLOSE, atol=CLOSE * float(wanted.abs().max()))
        else:
            harness.check_bits(result, wanted, arm)

    def captured(self, call, route):
        """Returns a function like `call` that replays a graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(route)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(route)

        def replay(new):
            route.copy_(new)
            graph.replay()
            return result

        return replay

    def times_plain(self, arm, key, seconds):
        """Returns the speed-up over the faster of the plain arms, whose times it notes."""
        if arm in (PLAIN, BATCHED):
            self.plain_s[key] = min(seconds, self.plain_s.get(key, seconds))
        return f"{self.plain_s[key] / seconds:.3f}" if arm == CODED and key in self.plain_s else ""

    def link_bytes(self, arm, asked_bytes, stats, made):
        if stats:
            return stats.link_bytes // made
        return {HOOKS: self.num_bytes, GATHERED: asked_bytes}.get(arm, 0)

    def add(self, arm, tokens, routing, way, seconds, asked_bytes, stats, made, report=None, host_us="", own_us=""):
        link_bytes = self.link_bytes(arm, asked_bytes, stats, made)
        by_engine = arm in (STREAMED, *OTHERS) or tokens > max(BATCHES)
        bound = link_bytes / (ideal.LINK_COPY_GBPS if by_engine else ideal.LINK_KERNEL_GBPS) * 1e-9
        gbps, ms = asked_bytes / seconds * 1e-9, 1e3 * seconds
        ms_of_all = ms * self.shape.layers / self.num_layers
        case = f"{self.num_layers} layers, {tokens} tokens, {routing}, {way}"
        times = self.times_plain(arm, (routing, tokens, way), seconds)
        on_device = 0 if arm in (*OTHERS, BETWEEN) else self.num_bytes
        device_bytes = report.nbytes if report else on_device
        self.run.add(
            case=case,
            arm=arm,
            rows=tokens,
            row_bytes=self.expert_bytes,
            dtype=self.shape.dtype,
            savings=1
            - (stats.host_bytes / stats.weight_bytes if stats else (device_bytes or self.num_bytes) / self.num_bytes),
            gbps=gbps,
            ideal_gbps=asked_bytes / bound * 1e-9 if bound else gbps,
            sms=None,
            layers=self.num_layers,
            routing=routing,
            way=way,
            ms=f"{ms:.3f}",
            ms_of_all=f"{ms_of_all:.2f}",
            bound_ms=f"{1e3 * bound:.3f}" if bound else "",
            asked_bytes=asked_bytes,
            link_bytes=link_bytes,
            hit_rate=f"{stats.expert_hit_rate:.4f}" if stats else "",
            host_bytes=stats.host_bytes if stats else self.num_bytes * (arm in OTHERS),
            device_bytes=stats.device_bytes if stats else device_bytes,
            host_us=host_us,
            times=times,
            own_us=own_us,
        )
        hits = f", {stats.expert_hit_rate:.1%} hits" if stats else f", {times} of plain's rate" * bool(times)
        print(f"{case}, {arm}: {ms:.2f} ms, {ms_of_all:.1f} of all layers, bound {1e3 * bound:.2f}{hits}", flush=True)


@torch.inference_mode()
def count_hits(bench, path):
    """Writes what each token brings. Returns the exit status."""
    sheet, num_tokens = ratio.Sheet(path, HITS_COLUMNS), QUICK_TOKENS if bench.run.quick else SHOWN_TOKENS
    for arm, routing in itertools.product((CACHED, CACHED + RAW), (UNIFORM, STICKY)):
        model, handle = bench.model(arm)
        x, chosen, gates = bench.inputs(1, routing, num_tokens)
        for token, route in enumerate(chosen):
            handle.reset_stats()
            model(x, route, gates)
            stats = handle.stats()
            sheet.add(
                arm=arm,
                routing=routing,
                token=token,
                layers=bench.num_layers,
                asked_bytes=route.numel() * bench.expert_bytes,
                link_bytes=stats.link_bytes,
                hit_rate=f"{stats.expert_hit_rate:.4f}",
                cache_bytes=int(CACHE_SHARE * bench.num_bytes),
            )
        handle.close()
        del model, handle
        harness.release(bench.run)
    return sheet.finish()


@torch.inference_mode()
def compare_policies(bench, path):
    """Writes what caches with other policies find. Returns the exit status."""
    sheet, num_tokens = ratio.Sheet(path, POLICIES_COLUMNS), QUICK_TOKENS if bench.run.quick else SIMULATED_TOKENS
    num_choices, num_parts = bench.config.num_experts_per_tok, -(-num_tokens // CHANGES)

    def chosen(routing, num_layers, calls):
        return routes(routing, bench.num_experts, num_choices, num_layers, 1, calls, "cpu")[:, :, 0]

    asked = {routing: chosen(routing, 1, num_tokens)[:, 0] for routing in (UNIFORM, STICKY)}
    asked[CHANGING] = chosen(STICKY, num_parts, CHANGES).transpose(0, 1).flatten(0, 1)[:num_tokens]
    for routing, share, halving in itertools.product(asked, SHARES, HALVING):
        rate = hit_rate(asked[routing], bench.num_experts, share, halving)
        policy = f"used least, halved every {halving} calls" if halving else "used longest ago"
        sheet.add(
            routing=routing,
            share=share,
            policy=policy,
            tokens=num_tokens,
            hit_rate=f"{rate:.4f}",
        )
    return sheet.finish()


def hit_rate(chosen, num_experts, share, halving):
    """Returns the share of rows that a cache finds in the later half of calls [calls, choices], if it holds a share of
    all rows."""
    generator = torch.Generator().manual_seed(3)
    rows_of_sets = torch.poisson(torch.full((SETS,), WAYS / share), generator=generator)
    is_row = torch.arange(int(rows_of_sets.max())) < rows_of_sets[:, None]
    experts = torch.randint(num_experts, is_row.shape, generator=generator)
    held, uses, last = torch.zeros_like(is_row), torch.zeros_like(experts), torch.zeros_like(experts)
    found = []
    for call, ids in enumerate(chosen):
        wanted = is_row & torch.zeros(num_experts, dtype=torch.bool).index_fill_(0, ids, True)[experts]
        hits = wanted & held
        found.append((int(hits.sum()), int(wanted.sum())))
        if halving and call % halving == 0:
            uses >>= 1
        uses = torch.where(hits, (uses + 1).clamp_max(MOST_USES), torch.where(wanted, 1, uses))
        last[wanted] = call
        worth = held * (1 + last + (halving > 0) * len(chosen) * uses) + wanted * 100 * len(chosen)
        best = worth.topk(WAYS)
        held = torch.zeros_like(held).scatter_(1, best.indices, best.values > 0)
    later = found[len(found) // 2 :]
    return sum(hits for hits, _ in later) / sum(asked for _, asked in later)


def shortfalls(rows, shape=QWEN3_30B):
    """Yields lines that say where a figure misses its target. The faster way of each arm counts."""
    best = {}
    for row in rows:
        if row["arm"] == CODED and row["way"] == GRAPH and float(row["times"]) < WANTED_TIMES:
            yield f"{row['case']}: {row['times']} times as fast as plain, wanted {WANTED_TIMES}"
        if row["arm"] == CODED and 1 - float(row["savings"]) > WANTED_MEMORY:
            yield f"{row['case']}: {row['savings']} saved, wanted {1 - WANTED_MEMORY:.2f}"
        if float(row["own_us"] or 0) > WANTED_OWN_US:
            yield f"{row['case']}, {row['arm']}: {row['own_us']} us of the host's, wanted {WANTED_OWN_US:.0f}"
    for row in rows:
        key, bound = (
            (row["arm"], row["rows"], row["routing"]),
            float(row["bound_ms"] or 0) * shape.layers / row["layers"],
        )
        best[key] = min(best.get(key, (float("inf"), 0.0)), (float(row["ms_of_all"]), bound))
    for (arm, tokens, routing), (ms, bound) in best.items():
        wanted = shape.wanted_ms.get((arm, routing)) if tokens == 1 else None
        raw = best.get((arm + RAW, tokens, routing))
        if arm == BY_INDEX and routing == UNIFORM and (tokens > 1 or not shape.wanted_ms):
            wanted = bound / (WANTED_PREFILL if tokens > max(BATCHES) else WANTED_SHARE)
        elif wanted and arm == CACHED and raw:
            wanted = min(wanted, raw[0] / WANTED_TIMES_RAW)
        if wanted and ms > wanted:
            yield f"{arm}, {tokens} tokens, {routing}: {ms:.1f} ms of all layers, wanted {wanted:.1f}"


def main(argv=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--layers", type=int)
    own.add_argument("--deepseek", action="store_true")
    own.add_argument("--between", action="store_true")
    own.add_argument("--hits", action="store_true")
    found, others = own.parse_known_args(argv)
    args, shape = harness.parse_args(others, __doc__), DEEPSEEK_V3 if found.deepseek else QWEN3_30B
    if transformers is None:
        print("transformers with stacked experts is not installed: nothing to measure")
        return 0
    num_layers = found.layers or (QUICK_LAYERS if args.quick else shape.measured)
    if found.hits:
        untimed = SimpleNamespace(quick=args.quick, device=torch.device(args.device), on_gpu=args.device == "cuda")
        bench = Bench(untimed, shape, num_layers)
        return count_hits(bench, args.out / "moe_hits.csv") | compare_policies(bench, args.out / "moe_policies.csv")
    run = harness.Run(
        shape.csv, args, EXTRA_COLUMNS, keep=lambda row: found.between and row["arm"] not in ("device", BETWEEN)
    )
    bench = Bench(run, shape, num_layers)
    if PLAIN not in shape.arms:
        bench.note_wanted()
        harness.release(run)
    for arm in (BETWEEN,) if found.between else shape.arms:
        with run.cell(arm):
            bench.measure_arm(arm)
        harness.release(run)
    return run.finish(shortfalls(run.rows, shape))


if __name__ == "__main__":
    sys.exit(main())
