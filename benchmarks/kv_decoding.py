"""How much do travelling pages of a KV-cache slow down decoding steps that run at the same time? Needs transformers.

    python -m benchmarks.kv_pages --decoding [--out DIR] [--device cpu] [--quick]

A model of Llama-3-8B's shape with random weights generates tokens greedily, like the steps of llm.py: in a CUDA graph,
with a static cache. At the same time another stream of higher priority stores 256 MiB of a paged cache to pinned host
memory and loads them back, over and over. `raw` uses one copy in each direction. `ibp` uses one `ibp.kv.KVStore` for
keys and one for values, with the multiprocessors that a store takes by default. Trains of steps alone and with pages
alternate (see overlap.py).

Pages are blocks of 16 tokens of all 32 layers. They have real values: tokens of data/kv_stories260k.npz, 32 values
drawn at a time for each of 8 heads of 128. `gain` is how many tokens the compressed pool keeps in the host memory of
one raw token.

After the common columns, kv_decoding.csv has batch, context, tokens_per_s, tokens_share (of the rate of steps alone),
pages_gbps (of original bytes, both directions together), pages_share (of the rate of the same pages alone), gain and
the target. GB/s of steps count weights. Rows with `pages alone` measure only pages. In the same run the tokens, keys
and values of every train must equal the first train's, and pages must come back as they left.
"""

import sys

import numpy as np
import torch

import ibp

from . import codec, harness, ideal, llm, overlap

COLUMNS = ("batch", "context", "tokens_per_s", "tokens_share", "pages_gbps", "pages_share", "gain")
COLUMNS = (*COLUMNS, *harness.TARGET_COLUMNS)
MODEL, BATCHES, QUICK_BATCHES = "Llama-3-8B", (8, 16), (2,)
STEPS = 24  # A train has this many steps, which take 0.2 s on an H200.
BLOCK_TOKENS, NUM_BLOCKS, QUICK_BLOCKS = 16, 128, 8
TOKEN_VALUES = 32  # A token of the real set has this many values in a layer.
USUAL_SMS = 24  # A store's transfers take this many SMs by default.
WANTED_SHARE, WANTED_GAIN = 0.97, 1.4
RAW, IBP, ALONE = "raw", "ibp", "steps alone"


class Steps:
    """Decoding steps, with the methods that overlap.py needs of products. Each train begins with the same cache and
    tokens."""

    num = STEPS

    def __init__(self, run, model, batch):
        self.step = llm.Step(run, model, batch, llm.QUICK_CONTEXT if run.quick else llm.CONTEXT)
        self.call = llm.graphed(run, self.step)
        self.tails = [tail for layer in self.step.cache.layers for tail in self.tails_of(layer)]
        self.first = [tail.clone() for tail in self.tails]
        self.launch(self.num)
        self.want = self.made()

    def tails_of(self, layer):
        return layer.keys[:, :, self.step.start :], layer.values[:, :, self.step.start :]

    def launch(self, num):
        torch._foreach_copy_(self.tails, self.first)
        self.step.rewind()
        for _ in range(num):
            self.call()

    def made(self):
        return [self.step.token.clone(), *(tail.clone() for tail in self.tails)]

    def check(self, what):
        for got, want in zip(self.made(), self.want):
            harness.check_bits(got, want, f"decoding steps {what}")
        self.step.token.zero_()


class Pages:
    """A paged cache of real values, [tensors, blocks, tokens, heads, values], and the tensor that its blocks come back
    to."""

    def __init__(self, run, config, data_dir):
        heads, head_dim = config.num_key_value_heads, llm.head_dim_of(config)
        blocks = QUICK_BLOCKS if run.quick else NUM_BLOCKS
        with np.load(data_dir / "kv_stories260k.npz") as z:
            held = [torch.from_numpy(z[name].view(np.int16)).to(run.device) for name in ("k_bf16", "v_bf16")]
        shape = blocks, BLOCK_TOKENS, heads, head_dim
        tensors = []
        for rows in [x.view(-1, TOKEN_VALUES) for x in held] * config.num_hidden_layers:
            drawn = torch.randint(
                len(rows), (blocks * BLOCK_TOKENS * heads * head_dim // TOKEN_VALUES,), device=run.device
            )
            tensors.append(rows[drawn].view(torch.bfloat16).view(shape))
        self.run, self.kv = run, torch.stack(tensors)
        self.out = torch.empty_like(self.kv)
        self.num_bytes = 2 * self.kv.nbytes  # The bytes travel in both directions.


class Travel:
    """A way for pages to go to host memory and come back: `call`, with the methods that overlap.py needs of fetches."""

    def __init__(self, pages, arm, sms, call, kept, gain=1.0):
        """Makes a way of travel. kept: the host memory that a call writes."""
        self.pages, self.arm, self.sms, self.call, self.kept, self.gain = pages, arm, sms, call, kept, gain

    def check(self, what):
        harness.check_bits(self.pages.out, self.pages.kv, f"{self.arm} {what}")
        harness.poison(self.pages.out)
        for memory in self.kept:
            harness.poison(memory)


def raw_travel(pages):
    host = torch.empty(pages.kv.shape, dtype=pages.kv.dtype, pin_memory=pages.run.on_gpu)

    def call():
        host.copy_(pages.kv, non_blocking=True)
        pages.out.copy_(host, non_blocking=True)

    return Travel(pages, RAW, 0, call, [host])


def coded_travel(pages):
    """Returns a way with two stores, because keys and values have different codebooks."""
    run, kv = pages.run, pages.kv
    count, page_bytes = kv.shape[1], kv[0, 0].nbytes
    sizes = {"num_pages": count, "page_bytes": page_bytes, "num_tensors": len(kv) // 2}
    stores = [ibp.kv.KVStore(kv[part::2], **sizes, device=run.device) for part in range(2)]
    ways = [
        (store, *(ibp.kv.PagedTensors(list(x[part::2])) for x in (kv, pages.out))) for part, store in enumerate(stores)
    ]
    numbers, blocks = (torch.randperm(count, device=run.device) for _ in range(2))
    gain = kv.nbytes / sum(store.pool_bytes for store in stores)

    def call():
        stream = torch.cuda.current_stream() if run.on_gpu else None
        for store, from_, _ in ways:
            store.store(numbers, from_, blocks, stream=stream)
        for store, _, to in ways:
            store.load(numbers, to, blocks, stream=stream)

    return Travel(pages, IBP, USUAL_SMS, call, [store.place.slots for store in stores], gain)


class Bench:
    """The measurements of one batch size."""

    def __init__(self, run, steps, batch, weight_bytes, copy_gbps):
        self.run, self.steps, self.batch, self.weight_bytes = run, steps, batch, weight_bytes
        self.ideal_gbps = ideal.device_gbps(weight_bytes, weight_bytes, copy_gbps)

    def measure_alone(self):
        seconds = self.run.seconds([lambda: self.steps.launch(STEPS)]) / STEPS
        self.steps.check("alone")
        self.record(ALONE, seconds, 0)

    def measure_beside(self, travel):
        travel.call()
        self.run.sync()
        travel.check("alone")
        travel_s = self.run.seconds([travel.call])
        travel.check("alone")
        pages_gbps, savings = travel.pages.num_bytes * 1e-9 / travel_s, 1 - 1 / travel.gain
        is_judged = travel.arm == IBP and travel.sms == USUAL_SMS
        gains = {"gain": f"{travel.gain:.3f}"}
        if is_judged:
            gains |= {"met": "yes" if travel.gain >= WANTED_GAIN else "no"}
        self.add(f"pages alone, {travel.arm}", pages_gbps, ideal.LINK_COPY_GBPS, savings, travel.sms, **gains)
        if not self.run.on_gpu or self.run.quick:  # A short train of steps would end before two calls do.
            return
        alone_s, step_s, beside_s = overlap.measure_beside(self.run, self.steps, travel, travel_s)
        wanted = WANTED_SHARE * self.weight_bytes * 1e-9 / alone_s if is_judged else None
        beside = {
            "tokens_share": f"{alone_s / step_s:.4f}",
            "pages_gbps": harness.four_digits(travel.pages.num_bytes * 1e-9 / beside_s),
            "pages_share": f"{travel_s / beside_s:.4f}",
            "gain": f"{travel.gain:.3f}",
        }
        self.record(f"steps beside pages, {travel.arm}", step_s, travel.sms, savings, wanted, **beside)

    def record(self, arm, step_s, sms, savings=0.0, wanted=None, **more):
        gbps = self.weight_bytes * 1e-9 / step_s
        more |= {"tokens_per_s": harness.four_digits(self.batch / step_s), **harness.judged(gbps, wanted)}
        self.add(arm, gbps, self.ideal_gbps, savings, sms, **more)

    def add(self, arm, gbps, ideal_gbps, savings, sms, **more):
        self.run.add(
            case=f"{MODEL}, batch {self.batch}",
            arm=arm,
            rows=self.batch,
            row_bytes=BLOCK_TOKENS,
            dtype=torch.bfloat16,
            savings=savings,
            gbps=gbps,
            ideal_gbps=ideal_gbps,
            sms=sms,
            batch=self.batch,
            context=self.steps.step.cache.layers[0].keys.shape[2],
            **more,
        )


def shortfalls(rows):
    """Yields lines that say where a target is missed."""
    for row in rows:
        if row.get("met") == "no" and row.get("tokens_share"):
            yield f"{row['case']}, {row['arm']}: {row['tokens_share']} of the tokens alone, wanted {WANTED_SHARE}"
        elif row.get("met") == "no":
            yield f"{row['case']}, {row['arm']}: {row['gain']} times the tokens, wanted {WANTED_GAIN}"


@torch.no_grad()
def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("kv_decoding", args, COLUMNS)
    if llm.transformers is None:
        print("transformers is not installed: nothing to measure")
        return run.finish()
    torch.manual_seed(0)
    copy_gbps, config = codec.DeviceRates(run, record=False).copy_gbps, llm.config_of(MODEL, run.quick)
    model, _, _ = llm.build(run, config, llm.PLAIN)
    pages = Pages(run, config, args.data)
    travels = [raw_travel(pages), coded_travel(pages)]
    for batch in QUICK_BATCHES if run.quick else BATCHES:
        with run.cell(f"batch {batch}"):
            bench = Bench(run, Steps(run, model, batch), batch, llm.counted_bytes(model), copy_gbps)
            bench.measure_alone()
            for travel in travels:
                with run.cell(f"batch {batch}, {travel.arm}, {travel.sms} SMs"):
                    bench.measure_beside(travel)
    return run.finish(shortfalls(run.rows))


if __name__ == "__main__":
    sys.exit(main())
