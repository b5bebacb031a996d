"""How fast does a whole KV-cache come back to the GPU, layer by layer, as each token of generation needs it?

    python -m benchmarks.kv_fetch [--out DIR] [--device cpu] [--quick]

There are 32 layers of 8 KV heads of 128 BF16 values, N(0, 0.02), with 8,192 to 131,072 tokens and batches of 1 to 20;
and the keys and values of a real model (data/kv_stories260k.npz: 4 heads of 8 values, with tokens drawn from its
stories). A call is one step of generation without the model: every layer gets one new token and returns all its keys
and values. Arms: `CompressedCache` with compressed tokens in pinned host memory (also with the paper's scheme) and on
the GPU; the same with raw blocks, which use the same code; and transformers' `DynamicCache(offloading=True)`, if its
steps are short enough.

What every layer returns is compared with the tensors that it got. Steps follow each other, as in generation, and are
timed with the wall clock; `ms` is the time of one. The ideal is the copy engine's rate over the share of bytes that is
stored, and the rate of memory for compressed tokens on the GPU.
"""

import gc
import sys
import time

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig

import ibp
from ibp.integrations.transformers import CompressedCache
from ibp.kv import _states

from . import harness, ideal

COLUMNS = (*harness.TARGET_COLUMNS, "ms", "host_bytes", "device_bytes")
LAYERS, HEADS, HEAD_DIM, DTYPE = 32, 8, 128, torch.bfloat16
CELLS = ((1, 8192), (1, 32768), (20, 8192), (1, 131072))  # Each cell has (batch, tokens).
REAL_CELL, REAL_BLOCK = (20, 32768), 256
QUICK_CELLS, QUICK_REAL_CELL, QUICK_LAYERS = ((1, 300), (2, 200)), (2, 600), 2
WARM_STEPS, STEPS = 1, 3
# Raw bytes of the largest cache that transformers offloads, too. It sends the whole cache again in every step.
MOST_SLOW_BYTES = 2 << 30
PAPER_TOKENS = 4096  # Codebooks of the paper's scheme are learned from this many tokens.
OF_RAW, OF_IDEAL, OF_OFFLOADING = 1.42, 0.95, 3.0  # The targets are these multiples of the other rates.
RAW, HOST, GPU, OFFLOADING = "raw blocks", "ibp", "ibp, on the GPU", "transformers, offloading"
PAPER = "ibp, the paper's scheme"
ARMS = {RAW: {"scheme": "raw"}, HOST: {}, PAPER: {"scheme": "ibp"}, GPU: {"memory": "device"}}


def normal_states(num_layers, batch, num_tokens, device):
    shape = (batch, HEADS, num_tokens, HEAD_DIM)
    return [
        tuple(torch.randn(shape, dtype=DTYPE, device=device).mul_(0.02) for _ in range(2)) for _ in range(num_layers)
    ]


def real_states(num_layers, batch, num_tokens, device, data_dir):
    """Returns keys and values [batch, 4, num_tokens, 8] of each layer. The layers take the model's layers in turn. Each
    sequence draws its tokens from one of four stories, so that no two rows are equal."""
    with np.load(data_dir / "kv_stories260k.npz") as z:
        held = [torch.from_numpy(z[name].view(np.int16)).view(DTYPE).to(device) for name in ("k_bf16", "v_bf16")]
    stories = [x.view(4, 256, 5, 4, 8).permute(2, 0, 1, 3, 4) for x in held]  # layers, stories, tokens, heads, values
    sequences = torch.arange(batch, device=device)[:, None] % 4
    tokens = torch.randint(256, (num_layers, batch, num_tokens), device=device)
    return [
        tuple(x[layer % 5][sequences, tokens[layer]].transpose(1, 2).contiguous() for x in stories)
        for layer in range(num_layers)
    ]


class Case:
    """Keys and values of all layers, and those that a step adds to them."""

    def __init__(self, run, name, states, block):
        self.run, self.name, self.states, self.block = run, name, states, block
        keys, values = states[0]
        self.num_tokens = keys.shape[2]
        self.new = [x[:, :, :1].clone() for x in (keys, values)]
        self.num_bytes = sum(x.numel() * x.element_size() for pair in states for x in pair)

    def step(self, cache, check=None):
        for layer in range(len(self.states)):
            got = cache.update(*self.new, layer)
            if check is not None:
                for tensor, given in zip(got, self.states[layer]):
                    harness.check_bits(tensor[:, :, : self.num_tokens], given, f"{self.name}, {check}")

    def seconds(self, cache, arm):
        """Returns the seconds of one step. Keys and values are checked in the first steps and in the last one."""
        for layer, pair in enumerate(self.states):
            cache.update(*pair, layer)
        warm_steps, steps = (WARM_STEPS, STEPS) if arm != OFFLOADING else (1, 1)
        for _ in range(warm_steps):
            self.step(cache, arm)
        self.run.sync()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(cache)
        self.run.sync()
        seconds = (time.perf_counter() - start) / steps
        self.step(cache, arm)
        return seconds

    def add(self, arm, seconds, *, savings, ideal_gbps, row_bytes, wanted=None, stats=None):
        gbps = self.num_bytes * 1e-9 / seconds
        self.run.add(
            case=self.name,
            arm=arm,
            rows=self.num_tokens,
            row_bytes=row_bytes,
            dtype=DTYPE,
            savings=savings,
            gbps=gbps,
            ideal_gbps=ideal_gbps,
            sms=None,
            ms=harness.four_digits(1e3 * seconds),
            host_bytes="" if stats is None else stats.host_bytes,
            device_bytes="" if stats is None else stats.device_bytes,
            **harness.judged(gbps, wanted),
        )
        return gbps


def paper_codebooks(case):
    """Returns codebooks of the paper's scheme. They are learned from the first layer and used for all, because learning
    them takes long."""
    row_bytes = _states.Form.of(case.states[0][0], case.block, None).row_bytes
    rows = [x[0, 0, : PAPER_TOKENS // case.block * case.block].cpu().view(-1) for x in case.states[0]]
    return {"codebooks": tuple(ibp.codecs.analyze(x, scheme="ibp", sample=1.0, row_bytes=row_bytes) for x in rows)}


def measure_compressed(case, arm, wanted):
    """Measures an arm and returns its GB/s. wanted: function(ideal GB/s) -> target in GB/s."""
    run, found = case.run, 0.0
    with run.cell(f"{case.name}, {arm}"):
        cache = CompressedCache(block=case.block, **ARMS[arm], **(paper_codebooks(case) if arm == PAPER else {}))
        seconds, stats = case.seconds(cache, arm), cache.stats()
        link = ideal.LINK_COPY_GBPS if arm != GPU else run.memset_gbps
        ideal_gbps = link / (1 - stats.savings) if arm != GPU else link
        row_bytes = cache.layers[0].history.keys.form.row_bytes
        found = case.add(
            arm,
            seconds,
            savings=stats.savings,
            ideal_gbps=ideal_gbps,
            row_bytes=row_bytes,
            wanted=wanted(ideal_gbps),
            stats=stats,
        )
    gc.collect()
    return found


def measure_offloading(case, config):
    """Measures transformers' own offloading and returns its GB/s, or None if it is left out."""
    if not case.run.on_gpu or case.num_bytes > MOST_SLOW_BYTES:
        return None
    with case.run.cell(f"{case.name}, {OFFLOADING}"):
        seconds = case.seconds(DynamicCache(config=config, offloading=True), OFFLOADING)
        return case.add(OFFLOADING, seconds, savings=0.0, ideal_gbps=ideal.LINK_COPY_GBPS, row_bytes=0)
    return None


def measure(run, name, states, block, is_real):
    case = Case(run, name, states, block)
    config = LlamaConfig(num_hidden_layers=len(states))
    offloaded = measure_offloading(case, config)
    raw = measure_compressed(case, RAW, lambda ideal_gbps: None)

    def wanted(ideal_gbps):
        least = OF_IDEAL * ideal_gbps if is_real else OF_RAW * raw
        return least if offloaded is None else max(least, OF_OFFLOADING * offloaded)

    measure_compressed(case, HOST, wanted)
    if case.num_bytes <= MOST_SLOW_BYTES:
        measure_compressed(case, PAPER, lambda ideal_gbps: None)
    measure_compressed(case, GPU, lambda ideal_gbps: None)


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("kv_fetch", args, COLUMNS)
    torch.manual_seed(0)
    num_layers = QUICK_LAYERS if run.quick else LAYERS
    batch, num_tokens = QUICK_REAL_CELL if run.quick else REAL_CELL
    with run.cell("real keys and values"):
        states = real_states(num_layers, batch, num_tokens, run.device, args.data)
        measure(run, f"real, batch {batch}, {num_tokens:,} tokens", states, REAL_BLOCK, True)
        del states
    for batch, num_tokens in QUICK_CELLS if run.quick else CELLS:
        with run.cell(f"batch {batch}, {num_tokens} tokens"):
            states = normal_states(num_layers, batch, num_tokens, run.device)
            measure(run, f"batch {batch}, {num_tokens:,} tokens", states, 64, False)
            del states
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
