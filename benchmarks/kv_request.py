"""How long does a request take whose keys and values are in host memory, if every head reads a tenth of them (the
paper's figure 12)?

    python -m benchmarks.kv_request [--workers | --opt [--repository DIR] | --infinigen FORK [--repository DIR]]
                                    [--out DIR] [--device cpu] [--quick]

The request is the paper's: a prompt of 1,920 tokens and 128 new tokens, batch 20, FP16, with layers of OPT-6.7B's
shape, which have random weights and are on the GPU. A few layers and tokens are measured; `request_s` is computed for
all of them. While a layer computes, every head of the next layer chooses 10 % of the tokens, as in InfiniGen: by
products of 30 % of the elements of keys, which stay on the GPU, and of queries that are computed from this layer's
input. The chosen rows come to the GPU while the layer computes. InfiniGen also rotates the weights of trained models so
that these elements tell more.

Arms: `cpu index + copy` gathers with the CPU into pinned memory and copies, as InfiniGen does; `raw by kernel`; and
`ibp`, which has two `ibp.kv.KVRows` per layer, whose codebooks are learned from rows of the prompt. The rows that each
arm fetches are compared with the stored ones bit for bit. Outputs are not compared, because on a GPU two runs of one
arm give outputs that differ in some bits.

--workers measures the same arms in one run with 1 to 32 threads of the CPU and with 1 to all SMs (the paper's figure
14), which is expected to take about a minute on an H200. The rows of the other run stay. Without the option, all
threads of torch and FETCH_SMS SMs fetch.

--opt measures the same request of five shapes of OPT, four of which the authors measure in their fork of InfiniGen
(github.com/AKKamath/InfiniGen-IBP, flex_opt.py and kv_selection_controller.py, read at 529e2e3). The fork is Python
alone; its fetches are calls of the paper's library, of which DIR, or IBP_REFERENCE, is a clone: see reference.py, which
builds it. Two arms make these calls at the places where the fork makes them. `raw by the paper's code` fetches raw rows
by its kernel (--ibp=transfer there). `the paper's code` (--ibp=compress) learns masks from the first rows of the prompt
with threshold 0.8, compresses rows on the GPU before they go to host memory, and fetches them; learning is in its
prefill_ms. Both get an output that exists, and take all SMs. `reference` is the commit of the clone. Without a clone
the other arms are measured. Rows of other runs stay. It is expected to take two minutes on an H200.

--infinigen runs InfiniGen itself, by the fork in FORK: see infinigen.py, which writes infinigen.csv.

After the common columns, the CSV has for a layer prefill_ms (including storing the rows), learn_ms (its two codebooks),
fetch_ms (the rows of one token alone) and step_ms (of one token, including storing its rows). `workers` is the number
of threads or SMs in rows of --workers, and empty in others. `gbps` is the rate of fetch_ms.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import ibp

from . import copy_threads, families, harness, ideal, reference

COLUMNS = ("prefill_ms", "learn_ms", "fetch_ms", "step_ms", "request_s", "workers", "reference")
DTYPE, DEVIATION = torch.float16, 0.02  # The weights have this standard deviation.
# The share of the tokens that a head reads, and the share of the elements with which it chooses them.
SHARE, PARTIAL = 0.1, 0.3
SAMPLE_TOKENS = 256  # Codebooks are learned from this many tokens of the prompt.
FETCH_SMS = families.FEW_SMS  # With 8 SMs rows keep their rate (kv_rows.csv), and the others are free for layers.
WARM_STEPS = 2
CPU, RAW, IBP = "cpu index + copy", "raw by kernel", "ibp"
THEIRS, THEIRS_RAW = reference.THEIRS, f"raw by {reference.THEIRS}"
THRESHOLD = 0.8  # The fork gives it to `preprocess`.


class Shape(NamedTuple):
    """Sizes of the request and the model. measured_layers and measured_steps say how much of it is measured."""

    batch: int = 20
    prompt: int = 1920
    new: int = 128
    layers: int = 32
    heads: int = 32
    dim: int = 128
    ffn: int = 16_384
    measured_layers: int = 4
    measured_steps: int = 8
    name: str = ""

    @property
    def case(self):
        request = f"batch {self.batch}, {self.prompt:,} + {self.new} tokens"
        return ", ".join([self.name] * bool(self.name) + [f"{self.layers} layers of {self.width}", request])

    @property
    def width(self):
        return self.heads * self.dim

    @property
    def count(self):
        """Returns the number of tokens that a head reads."""
        return int(SHARE * self.prompt)

    @property
    def places(self):
        """Returns the number of rows of all sequences. Token t of sequence b is row t * batch + b."""
        return self.batch * (self.prompt + WARM_STEPS + self.measured_steps)


QUICK = Shape(2, 40, 4, 3, 2, 64, 256, 3, 2)
OPT = "OPT-"  # The names of the shapes of --opt begin with this text.
OPTS = (
    Shape(name=f"{OPT}1.3B", layers=24, heads=32, dim=64, ffn=8192),
    Shape(name=f"{OPT}2.7B", layers=32, heads=32, dim=80, ffn=10_240),
    Shape(name=f"{OPT}6.7B"),
    Shape(name=f"{OPT}13B", layers=40, heads=40, ffn=20_480),
    Shape(name=f"{OPT}30B", layers=48, heads=56, ffn=28_672),
)
QUICK_OPTS = (QUICK._replace(name=f"{OPT}6.7B", batch=16),)


class Layer:
    """A layer of OPT without biases, and the parts of keys and queries with which its heads choose tokens."""

    def __init__(self, shape, generator):
        def weights(*sizes):
            return (torch.randn(sizes, generator=generator, device=generator.device) * DEVIATION).to(DTYPE)

        self.shape, width = shape, shape.width
        self.qkv, self.out = weights(3 * width, width), weights(width, width)
        self.up, self.down = weights(shape.ffn, width), weights(width, shape.ffn)
        self.num_partial = int(PARTIAL * shape.dim)
        queries = self.qkv[:width].view(shape.heads, shape.dim, width)
        self.partial_queries = queries[:, : self.num_partial].reshape(-1, width)
        size = (shape.batch, shape.heads, self.num_partial, shape.places // shape.batch)
        self.partial_keys = torch.zeros(size, dtype=DTYPE, device=generator.device)

    def projected(self, x, start):
        """Returns queries, keys and values [batch, heads, tokens, dim] of inputs [batch, tokens, width]. start: the
        position of the first token."""
        q, k, v = F.linear(normed(x), self.qkv).unflatten(2, (3, self.shape.heads, -1)).permute(2, 0, 3, 1, 4)
        self.partial_keys[..., start : start + x.shape[1]] = k[..., : self.num_partial].transpose(2, 3)
        return q, k, v

    def rest(self, x, attended):
        """Returns the layer's output. attended: the output of attention."""
        x = x + F.linear(attended.transpose(1, 2).flatten(2), self.out)
        return x + F.linear(F.linear(normed(x), self.up).relu_(), self.down)

    def chosen(self, x, length):
        """Returns the rows that each head reads, int64 [batch, heads, count]. x: the input [batch, 1, width] of the
        layer before."""
        q = F.linear(normed(x), self.partial_queries).view(len(x), self.shape.heads, 1, -1)
        tokens = (q @ self.partial_keys[..., :length]).squeeze(2).topk(self.shape.count).indices
        return tokens * self.shape.batch + torch.arange(len(x), device=x.device).view(-1, 1, 1)


def normed(x):
    return F.layer_norm(x, x.shape[-1:])


def by_place(rows):
    """Returns [tokens * batch, heads, dim] for [batch, heads, tokens, dim]."""
    return rows.permute(2, 0, 1, 3).flatten(0, 1).contiguous()


# ---- where rows are --------------------------------------------------------------------------------------------------


class RawPools:
    """Raw keys and values of layers in pinned memory."""

    on_host = False  # If this is set, the host waits while rows come.
    max_sms = FETCH_SMS
    savings = 0.0

    def __init__(self, run, shape):
        self.run, self.shape = run, shape
        self.heads = torch.arange(shape.heads, device=run.device).unsqueeze(1)
        size = (shape.places * shape.heads, shape.dim)
        self.pools = [
            [torch.empty(size, dtype=DTYPE, pin_memory=run.on_gpu) for _ in range(2)]
            for _ in range(shape.measured_layers)
        ]
        self.tables = [[ibp.compress(pool, scheme="raw", inplace=True) for pool in pools] for pools in self.pools]

    def store(self, number, rows, first):
        """Stores keys and values. rows: of both, [places, heads, dim]. first: the place of the first row."""
        start = first * self.shape.heads
        for pool, some in zip(self.pools[number], rows):
            pool[start : start + some.shape[0] * self.shape.heads].copy_(
                some.view(-1, self.shape.dim), non_blocking=True
            )

    def ask(self, places):
        """Sets the rows that `fetch` reads. Returns the tensor that it reads."""
        self.ids = (places * self.shape.heads + self.heads).view(-1)
        return self.ids

    def fetch(self, number, outs):
        for table, out in zip(self.tables[number], outs):
            ibp.index_select(table, self.ids, out=out.view(-1, self.shape.dim), max_sms=self.max_sms)


class CpuPools(RawPools):
    """Raw keys and values that the CPU gathers."""

    on_host = True

    def __init__(self, run, shape):
        super().__init__(run, shape)
        rows = shape.batch * shape.heads * shape.count
        self.host_ids = torch.empty(rows, dtype=torch.int64, pin_memory=run.on_gpu)
        self.staging = torch.empty(2, 2, rows, shape.dim, dtype=DTYPE, pin_memory=run.on_gpu)
        self.asked, *self.copied = (torch.cuda.Event() for _ in range(3)) if run.on_gpu else (None,)

    def ask(self, places):
        self.host_ids.copy_(super().ask(places), non_blocking=True)
        if self.asked:
            self.asked.record()
        return self.ids

    def fetch(self, number, outs):
        if self.asked:
            self.asked.synchronize()
            self.copied[number % 2].synchronize()  # The buffers are used again.
        for pool, buffer, out in zip(self.pools[number], self.staging[number % 2], outs):
            torch.index_select(pool, 0, self.host_ids, out=buffer)
            out.view(-1, self.shape.dim).copy_(buffer, non_blocking=True)
        if self.asked:
            self.copied[number % 2].record()


class TheirPools(RawPools):
    """Keys and values that the paper's library fetches, as the fork of InfiniGen calls it. samples: keys and values of
    each layer, from which `savings` is computed, if rows are to be compressed. None: they stay raw."""

    max_sms = None

    def __init__(self, run, shape, library, samples=None):
        super().__init__(run, shape)
        self.library, self.samples = library, samples
        words = self.words(torch.zeros(shape.dim, dtype=DTYPE, device=run.device))[0]
        flags = torch.zeros(-(-shape.places * shape.heads // 32), dtype=torch.int32, device=run.device)
        # For keys and values of each layer: mask and bitval, and a bit for each row that says whether it is compressed.
        self.masks = [[(words, words)] * 2 for _ in self.pools]
        self.flags = [[flags.clone(), flags.clone()] for _ in self.pools]

    def words(self, rows):
        """Returns the same memory as rows of words of 8 bytes, which the fork gives to the library."""
        return rows.view(-1, self.shape.dim).view(torch.int64)

    def learned(self, words):
        """Returns mask and bitval. The fork looks at as many rows as the prompt has tokens."""
        return self.library.preprocess(words[: self.shape.prompt], THRESHOLD)

    def store(self, number, rows, first):
        if self.samples is not None:
            rows = [self.coded(number, i, some.clone(), first) for i, some in enumerate(rows)]
        super().store(number, rows, first)

    def coded(self, number, i, rows, first):
        """Compresses rows in place and returns them. i: 0 for keys, 1 for values."""
        words, start = self.words(rows), first * self.shape.heads // 32
        if first == 0:
            self.masks[number][i] = self.learned(words)
        flags = self.library.compress_inplace(words, *self.masks[number][i], None)
        self.flags[number][i][start : start + len(flags)] = flags
        return rows

    def fetch(self, number, outs):
        for pool, masks, flags, out in zip(self.pools[number], self.masks[number], self.flags[number], outs):
            # None stands for the length of coded rows, the grid and the kernel, which the fork does not name either.
            places = self.ids, None, None, None, self.words(out)
            self.library.decompress_fetch(self.words(pool), *masks, flags, out.device, None, *places)

    @property
    def savings(self):
        if self.samples is None:
            return 0.0
        every = [self.words(some) for some in self.samples[0]]
        sizes = [self.library.get_compress_size(words, *self.learned(words), None, None) for words in every]
        self.run.sync()
        return 1 - sum(size.sum().item() for size in sizes) / sum(words.nbytes for words in every)


class CodedPools:
    """Compressed keys and values of layers. samples: keys and values [tokens, heads, dim] of each layer."""

    on_host = False
    max_sms = FETCH_SMS

    def __init__(self, run, shape, samples):
        self.shape, self.run, self.samples = shape, run, samples
        self.rows = [[self.coded(sample, shape.places) for sample in pair] for pair in samples]

    def coded(self, sample, num_places):
        options = {"num_layers": 1, "num_tokens": num_places, "num_heads": self.shape.heads}
        return ibp.kv.KVRows(sample, **options, device=self.run.device)

    def learn(self):
        """Does what a prompt costs a layer: learns the codebooks and sizes of slots, for pools with one row."""
        for sample in self.samples[0]:
            self.coded(sample, 1)

    def store(self, number, rows, first):
        for kv, some in zip(self.rows[number], rows):
            kv.store(0, some, range(first, first + len(some)))

    def ask(self, places):
        self.places = places
        return places

    def fetch(self, number, outs):
        for kv, out in zip(self.rows[number], outs):
            kv.load(0, self.places, per_head=True, out=out, max_sms=self.max_sms)

    @property
    def savings(self):
        slots = [kv.places[0].slot_bytes for pair in self.rows for kv in pair]
        return 1 - sum(slots) / len(slots) / (self.shape.dim * DTYPE.itemsize)


# ---- requests --------------------------------------------------------------------------------------------------------


class Request:
    """Layers, and buffers for the rows of two of them."""

    def __init__(self, run, shape):
        self.run, self.shape = run, shape
        self.generator = torch.Generator(run.device).manual_seed(0)
        self.layers = [Layer(shape, self.generator) for _ in range(shape.measured_layers)]
        size = (2, 2, shape.batch, shape.heads, shape.count, shape.dim)
        self.outs = torch.empty(size, dtype=DTYPE, device=run.device)
        self.inputs = torch.randn(shape.batch, shape.prompt + WARM_STEPS + shape.measured_steps, shape.width,
                                  generator=self.generator, device=run.device).to(DTYPE)  # fmt: skip
        self.side = torch.cuda.Stream() if run.on_gpu else None
        # Recorded when a buffer may be overwritten.
        self.read = [torch.cuda.Event() for _ in range(2)] if run.on_gpu else []

    def prefill(self, pools):
        """Runs the prompt. Returns the seconds per layer."""
        x = self.inputs[:, : self.shape.prompt]
        self.run.sync()
        began = time.perf_counter()
        for number, layer in enumerate(self.layers):
            q, k, v = layer.projected(x, 0)
            pools.store(number, (by_place(k), by_place(v)), 0)
            x = layer.rest(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        self.run.sync()
        return (time.perf_counter() - began) / len(self.layers)

    def bring(self, number, pools):
        """Fetches the rows that were asked for, during other work. Returns an event, or None without a GPU."""
        outs = self.outs[number % 2]
        if not self.side:
            pools.fetch(number, outs)
            return None
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.read[number % 2])
            pools.fetch(number, outs)
            return self.side.record_event()

    def asked(self, number, x, position, pools):
        """Chooses the rows of a layer. The side stream waits until that is done."""
        read = pools.ask(self.layers[number].chosen(x, position))
        if self.side:
            self.side.wait_stream(torch.cuda.current_stream())
            read.record_stream(self.side)

    def step(self, position, pools):
        """Runs one token through all layers."""
        x, last = self.inputs[:, position : position + 1], len(self.layers) - 1
        self.asked(0, x, position, pools)
        ready = self.bring(0, pools)
        for number, layer in enumerate(self.layers):
            arriving, before = ready, x
            if number < last:
                self.asked(number + 1, before, position, pools)
                ready = None if pools.on_host else self.bring(number + 1, pools)
            x = self.compute(number, layer, x, position, pools, arriving)
            if number < last and pools.on_host:  # The host gathers while the layer computes.
                ready = self.bring(number + 1, pools)

    def compute(self, number, layer, x, position, pools, arriving):
        q, k, v = layer.projected(x, position)
        if arriving:
            torch.cuda.current_stream().wait_event(arriving)
        keys, values = (torch.cat(pair, 2) for pair in zip(self.outs[number % 2], (k, v)))
        if self.read:
            self.read[number % 2].record()
        x = layer.rest(x, F.scaled_dot_product_attention(q, keys, values))
        pools.store(number, (by_place(k), by_place(v)), position * self.shape.batch)
        return x

    def steps(self, pools):
        """Returns the seconds per layer and token."""
        for step in range(WARM_STEPS + self.shape.measured_steps):
            if step == WARM_STEPS:
                self.run.sync()
                began = time.perf_counter()
            self.step(self.shape.prompt + step, pools)
        self.run.sync()
        return (time.perf_counter() - began) / (self.shape.measured_steps * len(self.layers))

    def check(self, pools, arm):
        """Stores the first layer's rows of the prompt, and checks the rows that its heads choose."""
        _, *rows = self.layers[0].projected(self.inputs[:, : self.shape.prompt], 0)
        stored = [by_place(some) for some in rows]
        pools.store(0, stored, 0)
        places = self.layers[0].chosen(self.inputs[:, :1], self.shape.prompt)
        pools.ask(places)
        self.run.sync()
        harness.poison(self.outs[0])
        pools.fetch(0, self.outs[0])
        heads = torch.arange(self.shape.heads, device=places.device).unsqueeze(1)
        for some, out, name in zip(stored, self.outs[0], ("keys", "values")):
            harness.check_bits(out, some[places, heads], f"{name} of {arm}")

    def samples(self, pools):
        """Returns rows of the prompt's first tokens by layer, from pools of raw rows."""
        num_rows = min(SAMPLE_TOKENS, self.shape.prompt) * self.shape.heads
        return [
            [pool[:num_rows].to(self.run.device).view(-1, self.shape.heads, self.shape.dim) for pool in pair]
            for pair in pools.pools
        ]


def measure(request, arm, pools, workers=None, commit=""):
    """Measures an arm. workers: the number of threads or SMs, if it is not that of the other arms. commit: that of the
    paper's library, if it fetches."""
    run, shape, is_coded = request.run, request.shape, isinstance(pools, CodedPools)
    request.prefill(pools)
    prefill_s = request.prefill(pools)
    learn_s = run.seconds([pools.learn], wall=True) if is_coded else 0.0
    step_s = request.steps(pools)
    request.check(pools, arm)
    fetch_s = run.seconds([lambda: pools.fetch(0, request.outs[0])], wall=pools.on_host)
    link_gbps = ideal.LINK_COPY_GBPS if pools.on_host else ideal.LINK_KERNEL_GBPS / (1 - pools.savings)
    milliseconds = {"prefill": prefill_s, "learn": learn_s, "fetch": fetch_s, "step": step_s}
    run.add(
        case=shape.case,
        arm=arm,
        rows=2 * shape.batch * shape.heads * shape.count,
        row_bytes=shape.dim * DTYPE.itemsize,
        dtype=DTYPE,
        savings=pools.savings,
        gbps=request.outs[0].nbytes * 1e-9 / fetch_s,
        ideal_gbps=link_gbps,
        sms=0 if pools.on_host else pools.max_sms,
        **{f"{name}_ms": harness.four_digits(1e3 * seconds) for name, seconds in milliseconds.items()},
        request_s=harness.four_digits(shape.layers * (prefill_s + learn_s + (shape.new - 1) * step_s)),
        workers=workers or "",
        reference=commit,
    )


def measure_threads(request, pools):
    """Measures the CPU's gathers by each number of threads."""
    before = torch.get_num_threads()
    try:
        for threads in copy_threads.QUICK_THREADS if request.run.quick else copy_threads.THREADS:
            with request.run.cell(f"{CPU}, {threads} threads"):
                torch.set_num_threads(threads)
                measure(request, f"{CPU} by {threads} threads", pools, threads)
    finally:
        torch.set_num_threads(before)


def measure_sms(request, arm, pools):
    """Measures fetches by each number of SMs."""
    for sms in (*copy_threads.SMS, request.run.num_sms) if request.run.on_gpu else (1,):
        with request.run.cell(f"{arm}, {sms} SMs"):
            pools.max_sms = sms
            measure(request, f"{arm} by {sms} SMs", pools, sms)


def measure_theirs(request, library, commit, samples):
    """Measures fetches by the paper's library. commit: that of the clone that it was built from."""
    for arm, some in ((THEIRS_RAW, None), (THEIRS, samples)):
        with request.run.cell(f"{request.shape.name}, {arm}"):
            measure(request, arm, TheirPools(request.run, request.shape, library, some), commit=commit)


def measure_shape(run, shape, by_workers, library=None, commit=""):
    """Measures the arms of one shape. by_workers: whether by threads and SMs. library: the paper's, built from this
    commit, if its arms are measured, too."""
    by_sms = measure_sms if by_workers else measure
    request = Request(run, shape)
    pools = CpuPools(run, shape)
    if by_workers:
        measure_threads(request, pools)
    else:
        measure(request, CPU, pools)
    samples = request.samples(pools)
    del pools
    by_sms(request, RAW, RawPools(run, shape))
    if library:
        measure_theirs(request, library, commit, samples)
    coded = CodedPools(run, shape, samples)
    by_sms(request, IBP, coded)
    for kv in (kv for pair in coded.rows for kv in pair):
        kv.check()


def parsed(argv):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--workers", action="store_true")
    own.add_argument("--opt", action="store_true")
    own.add_argument("--infinigen", type=Path, metavar="FORK")
    own.add_argument("--repository", type=Path, default=os.environ.get("IBP_REFERENCE"))
    options, others = own.parse_known_args(argv)
    return options, harness.parse_args(others, __doc__)


def option_of(row):
    """Returns the option with which a row of the CSV is measured."""
    return "opt" if row["case"].startswith(OPT) else "workers" if row.get("workers") else ""


def main(argv=None):
    options, args = parsed(argv)
    if options.infinigen:
        from . import infinigen  # Its copies to host memory run in threads, which inference_mode would not reach.

        return infinigen.main(argv)
    return measure_all(options, args)


@torch.inference_mode()
def measure_all(options, args):
    """Measures the shapes and arms that the options name. Returns the exit status."""
    option = "opt" if options.opt else "workers" if options.workers else ""
    run = harness.Run("kv_request", args, COLUMNS, keep=lambda row: option_of(row) != option)
    small = run.quick or not run.on_gpu
    shapes = (QUICK_OPTS if small else OPTS) if options.opt else (QUICK if small else Shape(),)
    theirs = ()
    if options.opt and options.repository:
        repository = Path(options.repository).resolve()
        with run.cell(THEIRS):
            theirs = reference.built(repository), reference.commit_of(repository)
    elif options.opt:
        print("the paper's code: no clone is named by --repository or IBP_REFERENCE, left out")
    for shape in shapes:
        with run.cell(shape.name or "a request"):
            measure_shape(run, shape, options.workers, *theirs)
        harness.release(run)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
