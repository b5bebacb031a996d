"""How long is a token of a mixture of experts whose experts are in host memory, or coded on the GPU?

    python -m benchmarks.moe [--layers N] [--out DIR] [--device cpu] [--quick]

Layers of experts with the sizes of Qwen3-30B-A3B, by transformers' own class: 128 experts of 3 x 2048 x 768 BF16
values, N(0, 0.02), without attention; a token uses 8 experts. The model has 48 layers, --layers measures fewer. Arms:
`plain`, all on the GPU, by transformers' `grouped_mm`; `plain, batched_mm`; `coded on the GPU`, by `ibp.nn.compress`;
`streamed`, by `ibp.offload` layer by layer, as weights of other modules are; `by index`, by `ibp.offload`, which
fetches the experts that are asked for; `by index, cache`, with a cache on the GPU of half the raw bytes of all experts;
both of these with raw rows by the same code.

No model routes here: `uniform`, or `sticky`, by Zipf's law with exponent 1, where a token keeps each expert's draw of
the token before it with probability 0.5. Ways: `eager`, by the wall clock; `graph`, replays of a CUDA graph. Every call
has new experts; calls before the timed ones fill the caches. In the same run the results of all arms are compared with
those of `plain`, bit for bit, but for `plain, batched_mm` and `coded on the GPU`, which add in another order.

moe.csv has, after the common columns, layers, routing, way, ms (a call), ms_of_48 (the same for 48 layers), bound_ms
(link_bytes at the rate of kernels; where all experts are streamed, of the copy engine), asked_bytes (raw bytes of the
experts that a call asks for, each once), link_bytes (a call), hit_rate (of rows), host_bytes, device_bytes, and times
(how many times as fast as the faster of the plain arms `coded on the GPU` is); `rows` are the tokens of a call, and
gbps are of asked_bytes.
"""

import argparse
import itertools
import sys

import torch
from torch import nn

import ibp

from . import harness, ideal, weights

try:
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
except ImportError:
    transformers = None

QWEN3 = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
TINY = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}
ALL_LAYERS, LAYERS, QUICK_LAYERS = 48, 8, 2
BATCHES, QUICK_BATCHES, PREFILL, QUICK_PREFILL = (1, 8, 32), (1, 3), 2048, 40
DEVICE_BATCHES = (1, 2, 4, 8, 16)  # of arms with all experts on the GPU
CALLS, FEW_CALLS, ROUNDS = 16, 2, 12  # calls that are timed together; rounds of them before routes come again
ZIPF_EXPONENT, STICKINESS = 1.0, 0.5  # assumed
CACHE_SHARE = 0.5  # of the experts' raw bytes
PLAIN, STREAMED, BY_INDEX, CACHED = "plain", "streamed", "by index", "by index, cache"
BATCHED, CODED, RAW = "plain, batched_mm", "coded on the GPU", ", raw rows"
ON_DEVICE = (PLAIN, BATCHED, CODED)
ARMS = (*ON_DEVICE, STREAMED, BY_INDEX, BY_INDEX + RAW, CACHED, CACHED + RAW)
UNIFORM, STICKY, EAGER, GRAPH = "uniform", "sticky", "eager", "graph"
EXTRA_COLUMNS = "layers,routing,way,ms,ms_of_48,bound_ms,asked_bytes,link_bytes,hit_rate,host_bytes,device_bytes,times"
EXTRA_COLUMNS = EXTRA_COLUMNS.split(",")
# Wanted at batch 1: ms of 48 layers, and times the rate of raw rows behind a cache; else shares of the bound.
WANTED_MS = {(BY_INDEX, UNIFORM): 46.0, (CACHED, STICKY): 20.0}
WANTED_SHARE, WANTED_PREFILL, WANTED_TIMES_RAW = 0.90, 0.95, 1.3
WANTED_TIMES, WANTED_MEMORY = 1.2, 0.76  # of `coded on the GPU`, in a graph, against plain experts
CLOSE = 0.02  # of the largest result: how far sums in another order may differ


class Layers(nn.Module):
    """Layers of experts, whose routes are given."""

    def __init__(self, config, num_layers, device):
        super().__init__()
        with torch.device(device):
            self.experts = nn.ModuleList(Qwen3MoeExperts(config).bfloat16() for _ in range(num_layers))
        generator = torch.Generator(device).manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(std=0.02, generator=generator)
        self.eval().requires_grad_(False)

    def forward(self, x, routes, gates):
        for experts, index in zip(self.experts, routes):
            x = x + experts(x, index, gates)
        return x


def routes(routing, config, num_layers, tokens, calls, device):
    """Experts of calls that follow each other, int64 [calls, layers, tokens, choices]; those of a token differ."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (num_layers, tokens, config.num_experts)

    def drawn():
        return -torch.empty(shape, device=device).exponential_(generator=generator).log_()  # Gumbel's distribution

    ranks = torch.rand(num_layers, 1, config.num_experts, generator=generator, device=device).argsort(-1) + 1
    favour = -ZIPF_EXPONENT * ranks.log() if routing == STICKY else torch.zeros_like(ranks, dtype=torch.float32)
    draws, found = drawn(), []
    for _ in range(calls):
        found.append((favour + draws).topk(config.num_experts_per_tok).indices)
        is_kept = torch.rand(shape, generator=generator, device=device) < (STICKINESS if routing == STICKY else 0.0)
        draws = torch.where(is_kept, draws, drawn())
    return torch.stack(found)


class Bench:
    """The arms of one number of layers. wanted: results of `plain`, by routing and tokens; plain_s: seconds of calls of
    the faster of the plain arms, by routing, tokens and way."""

    def __init__(self, run, num_layers):
        self.run, self.num_layers, self.wanted, self.plain_s = run, num_layers, {}, {}
        self.config = transformers.Qwen3MoeConfig(**(TINY if run.quick else QWEN3))
        self.config._experts_implementation = "grouped_mm"
        self.expert_bytes = 3 * 2 * self.config.hidden_size * self.config.moe_intermediate_size
        self.num_bytes = num_layers * self.config.num_experts * self.expert_bytes

    def model(self, arm):
        """(model, what `ibp.offload` or `ibp.nn.compress` returned, if it was called)."""
        self.config._experts_implementation = "batched_mm" if arm == BATCHED else "grouped_mm"
        model, handle = Layers(self.config, self.num_layers, self.run.device), None
        if arm == STREAMED:
            for experts in model.experts:
                experts.forward = experts.forward  # of its own: `ibp.offload` then takes it as any other module
        least = 1000 if self.run.quick else 1 << 20
        if arm == CODED:
            handle = ibp.nn.compress(model, min_bytes=least)
        elif arm not in ON_DEVICE:
            handle = ibp.offload(
                model,
                self.run.device,
                resident_bytes=int(CACHE_SHARE * self.num_bytes) if CACHED in arm else None,
                scheme="raw" if RAW in arm else "auto",
                min_bytes=least,
            )
        return model, handle

    def measure_arm(self, arm):
        run, (model, handle) = self.run, self.model(arm)
        batches = {PLAIN: {*BATCHES, *DEVICE_BATCHES}, BATCHED: DEVICE_BATCHES, CODED: DEVICE_BATCHES}.get(arm, BATCHES)
        cells = list(itertools.product((UNIFORM, STICKY), QUICK_BATCHES if run.quick else sorted(batches)))
        if arm in (PLAIN, CODED, STREAMED, BY_INDEX):
            cells.append((UNIFORM, QUICK_PREFILL if run.quick else PREFILL))
        for routing, tokens in cells:
            with run.cell(f"{arm}, {tokens} tokens, {routing}"):
                self.measure(arm, model, handle, tokens, routing)

    @torch.inference_mode()
    def measure(self, arm, model, handle, tokens, routing):
        run, config = self.run, self.config
        num_calls = FEW_CALLS if run.quick or arm == STREAMED or tokens > max(BATCHES) else CALLS
        chosen = routes(routing, config, self.num_layers, tokens, num_calls * ROUNDS, run.device)
        generator = torch.Generator(run.device).manual_seed(2)
        x = torch.randn(tokens, config.hidden_size, generator=generator, device=run.device, dtype=torch.bfloat16)
        gates = torch.full((tokens, chosen.shape[-1]), 1 / chosen.shape[-1], dtype=torch.bfloat16, device=run.device)
        asked = [len(layer.unique()) for call in chosen[: 2 * num_calls] for layer in call]
        asked_bytes = sum(asked) * self.expert_bytes // (2 * num_calls)

        def call(route):
            return model(x, route, gates)

        for way in (EAGER, GRAPH) if run.on_gpu and arm != STREAMED and tokens <= max(BATCHES) else (EAGER,):
            called = self.captured(call, chosen[0].clone()) if way == GRAPH else call
            with run.cell(f"{arm}, {tokens} tokens, {routing}, {way}: results"):
                self.check(arm, called(chosen[0]).clone(), (routing, tokens))
            source, made = itertools.cycle(chosen), itertools.count()

            def some_calls(called=called, source=source, made=made):
                for _ in range(num_calls):
                    called(next(source))
                next(made)

            some_calls()
            if arm not in ON_DEVICE:
                handle.reset_stats()
            seconds = run.seconds([some_calls], wall=True) / num_calls
            num_made = (next(made) - 1) * num_calls
            stats = None if arm in ON_DEVICE else handle.stats()
            self.add(arm, tokens, routing, way, seconds, asked_bytes, stats, num_made, handle if arm == CODED else None)

    def check(self, arm, result, key):
        wanted = self.wanted.setdefault(key, result.cpu()).to(result.device)
        if arm in (BATCHED, CODED):
            torch.testing.assert_close(result, wanted, rtol=CLOSE, atol=CLOSE * float(wanted.abs().max()))
        else:
            harness.check_bits(result, wanted, arm)

    def captured(self, call, route):
        """A function as call, whose work is a graph's."""
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
        """How many times as fast as the faster of the plain arms, which are noted."""
        if arm in (PLAIN, BATCHED):
            self.plain_s[key] = min(seconds, self.plain_s.get(key, seconds))
        return f"{self.plain_s[key] / seconds:.3f}" if arm == CODED and key in self.plain_s else ""

    def add(self, arm, tokens, routing, way, seconds, asked_bytes, stats, made, report):
        link_bytes = stats.link_bytes // made if stats else 0
        by_engine = arm == STREAMED or tokens > max(BATCHES)
        bound = link_bytes / (ideal.LINK_COPY_GBPS if by_engine else ideal.LINK_KERNEL_GBPS) * 1e-9
        gbps, ms, ms_of_48 = asked_bytes / seconds * 1e-9, 1e3 * seconds, 1e3 * seconds * ALL_LAYERS / self.num_layers
        case = f"{self.num_layers} layers, {tokens} tokens, {routing}, {way}"
        times = self.times_plain(arm, (routing, tokens, way), seconds)
        device_bytes = report.nbytes if report else self.num_bytes
        self.run.add(
            case=case,
            arm=arm,
            rows=tokens,
            row_bytes=self.expert_bytes,
            dtype=torch.bfloat16,
            savings=1 - (stats.host_bytes / stats.weight_bytes if stats else device_bytes / self.num_bytes),
            gbps=gbps,
            ideal_gbps=asked_bytes / bound * 1e-9 if bound else gbps,
            sms=None,
            layers=self.num_layers,
            routing=routing,
            way=way,
            ms=f"{ms:.3f}",
            ms_of_48=f"{ms_of_48:.2f}",
            bound_ms=f"{1e3 * bound:.3f}" if bound else "",
            asked_bytes=asked_bytes,
            link_bytes=link_bytes,
            hit_rate=f"{stats.expert_hit_rate:.4f}" if stats else "",
            host_bytes=stats.host_bytes if stats else 0,
            device_bytes=stats.device_bytes if stats else device_bytes,
            times=times,
        )
        hits = f", {stats.expert_hit_rate:.1%} hits" if stats else f", {times} of plain's rate" * bool(times)
        print(f"{case}, {arm}: {ms:.2f} ms, {ms_of_48:.1f} of 48 layers, bound {1e3 * bound:.2f}{hits}", flush=True)


def shortfalls(rows):
    """Lines that say where a figure falls short of its target: the faster way of each arm counts."""
    best = {}
    for row in rows:
        if row["arm"] == CODED and row["way"] == GRAPH and float(row["times"]) < WANTED_TIMES:
            yield f"{row['case']}: {row['times']} times as fast as plain, wanted {WANTED_TIMES}"
        if row["arm"] == CODED and 1 - float(row["savings"]) > WANTED_MEMORY:
            yield f"{row['case']}: {row['savings']} saved, wanted {1 - WANTED_MEMORY:.2f}"
    for row in rows:
        key, bound = (row["arm"], row["rows"], row["routing"]), float(row["bound_ms"] or 0) * ALL_LAYERS / row["layers"]
        best[key] = min(best.get(key, (float("inf"), 0.0)), (float(row["ms_of_48"]), bound))
    for (arm, tokens, routing), (ms, bound) in best.items():
        wanted = WANTED_MS.get((arm, routing)) if tokens == 1 else None
        raw = best.get((arm + RAW, tokens, routing))
        if arm == BY_INDEX and tokens > 1 and routing == UNIFORM:
            wanted = bound / (WANTED_PREFILL if tokens > max(BATCHES) else WANTED_SHARE)
        elif wanted and arm == CACHED and raw:
            wanted = min(wanted, raw[0] / WANTED_TIMES_RAW)
        if wanted and ms > wanted:
            yield f"{arm}, {tokens} tokens, {routing}: {ms:.1f} ms of 48 layers, wanted {wanted:.1f}"


def main(argv=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--layers", type=int)
    found, others = own.parse_known_args(argv)
    args = harness.parse_args(others, __doc__)
    run = harness.Run("moe", args, EXTRA_COLUMNS)
    if transformers is None:
        print("transformers with stacked experts is not installed: nothing to measure")
        return run.finish()
    bench = Bench(run, found.layers or (QUICK_LAYERS if run.quick else LAYERS))
    for arm in ARMS:
        with run.cell(arm):
            bench.measure_arm(arm)
        weights.release(run)
    return run.finish(shortfalls(run.rows))


if __name__ == "__main__":
    sys.exit(main())
