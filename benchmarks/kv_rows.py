"""How fast do rows of chosen tokens come from a KV-cache in host memory, as sparse attention asks for them?

    python -m benchmarks.kv_rows [--out DIR] [--device cpu] [--quick]

There are 131,072 tokens, BF16 N(0, 0.02), and every head asks for a random 10 % of its own. Rows have 128 and 256 bytes
per head with 8 heads, or 1,152 bytes per token (MLA). `ibp` is `KVRows.load`, with all SMs and with at most 8. `ibp,
cache` has a cache with room for 15 % of the rows, and each call asks for 90 % of the rows of the call before;
`hit_rate` says how many of them the cache had. For comparison there are raw rows: `cpu index + copy`; `raw by kernel`,
in one launch like ibp's; and `device memory`, where all rows are on the GPU. `put` stores the rows of one token by
replaying a CUDA graph, and `us` is its time; `raw put` stores them as raw rows in device memory.
"""

import sys

import torch

import ibp

from . import families, harness, ideal

COLUMNS = ("hit_rate", "gain", "us", *harness.TARGET_COLUMNS)
NUM_TOKENS, QUICK_TOKENS = 131_072, 2_000
# A call asks for this share of the tokens, and the next call asks again for this share of them.
SHARE, KEPT = 0.1, 0.9
CACHED_SHARE = 0.15  # The cache has room for this share of the rows.
# There are so many calls that the rows of the first one have left the cache when it comes again.
NUM_CALLS = 25
CASES = ((8, 128), (8, 64), (1, 576))  # Each case has (heads, head dim).
FEW_SMS = families.FEW_SMS
# Targets, as multiples of the rates of the raw gather, the CPU's path, and rows in device memory.
OVER_RAW, OVER_CPU, OF_DEVICE = 1.2, 3.0, 1 / 1.3


class Case:
    """Tokens of one shape, and the tokens that each call asks for."""

    def __init__(self, run, heads, dim):
        self.run, self.heads, self.dim, self.row_bytes = run, heads, dim, 2 * dim
        num_tokens = QUICK_TOKENS if run.quick else NUM_TOKENS
        self.rows = families.weights(num_tokens * heads, dim, run.device).to(torch.bfloat16).view(-1, heads, dim)
        self.count = int(SHARE * num_tokens)
        self.name = f"{heads} x {dim}"
        self.tokens = list(self.sets(num_tokens))
        self.head = torch.arange(heads, device=run.device).unsqueeze(1)
        self.ids = [(tokens * heads + self.head).view(-1) for tokens in self.tokens]
        self.out = torch.empty(heads, self.count, dim, dtype=torch.bfloat16, device=run.device)
        self.num_bytes = self.out.numel() * 2

    def sets(self, num_tokens):
        """Yields [heads, tokens] of each call. Most tokens are those of the call before."""
        orders = torch.stack([torch.randperm(num_tokens) for _ in range(self.heads)])
        new = self.count - int(KEPT * self.count)
        for call in range(NUM_CALLS):
            start = call * new
            yield orders[:, start : start + self.count].to(self.run.device)

    def check(self, number, what):
        harness.check_bits(self.out, self.rows[self.tokens[number], self.head], what)
        harness.poison(self.out)

    def measure(
        self, arm, call, wanted=None, sms=None, savings=0.0, ideal_gbps=None, wall=False, hit_rate=None, gain=1.0
    ):
        """Measures an arm and returns its GB/s. call(k) fetches what call number k asks for. hit_rate is called after
        the timed calls."""
        with self.run.cell(f"{self.name}, {self.row_bytes} B, {arm}"):
            for number in (0, 1):
                call(number)
                self.run.sync()
                self.check(number, arm)
            calls = [lambda number=number: call(number) for number in range(NUM_CALLS)]
            seconds = self.run.seconds(calls, wall=wall)
            gbps = self.num_bytes * 1e-9 / seconds
            hits = {} if hit_rate is None else {"hit_rate": f"{hit_rate():.3f}"}
            self.record(arm, gbps, seconds, wanted, sms, savings, ideal_gbps or self.link_gbps(savings), gain, **hits)
            return gbps

    def link_gbps(self, savings):
        """Returns the ideal rate over the link for rows whose stored bytes are contiguous."""
        stored = round((1 - savings) * self.row_bytes)
        starts = stored * torch.arange(ideal.LINE_BYTES)
        link_ns = ideal.link_ns_of_range(starts, torch.full_like(starts, stored))
        return ideal.gather_gbps(len(starts) * self.row_bytes, link_ns, self.run.memset_gbps)

    def record(self, arm, gbps, seconds, wanted, sms, savings, ideal_gbps, gain, **extra):
        self.run.add(
            case=self.name,
            arm=arm,
            rows=self.heads * self.count,
            row_bytes=self.row_bytes,
            dtype=torch.bfloat16,
            savings=savings,
            gbps=gbps,
            ideal_gbps=ideal_gbps,
            sms=sms,
            gain=f"{gain:.3f}",
            us=harness.four_digits(1e6 * seconds),
            **extra,
            **harness.judged(gbps, wanted, ideal_gbps),
        )


def measure_raw(case):
    """Returns GB/s of the CPU's path, of raw rows with a kernel, and of rows in device memory."""
    run, flat = case.run, case.rows.view(-1, case.dim)
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=run.on_gpu).copy_(flat)
    staging = torch.empty(case.out.shape, dtype=flat.dtype, pin_memory=run.on_gpu).view(-1, case.dim)
    host_ids = [ids.cpu() for ids in case.ids]

    def by_cpu(number):
        torch.index_select(host, 0, host_ids[number], out=staging)
        case.out.view(-1, case.dim).copy_(staging, non_blocking=True)

    table, out = ibp.compress(host, scheme="raw", device=run.device), case.out.view(-1, case.dim)
    return (
        case.measure("cpu index + copy", by_cpu, sms=0, wall=True),
        case.measure("raw by kernel", lambda number: ibp.index_select(table, case.ids[number], out=out)),
        case.measure(
            "device memory",
            lambda number: torch.index_select(flat, 0, case.ids[number], out=out),
            ideal_gbps=run.memset_gbps,
        ),
    )


def rows_of(case, cached):
    """Returns the tokens in a KVRows, with a cache or without."""
    slot_bytes = int(0.75 * case.row_bytes)
    cache_bytes = int(CACHED_SHARE * case.rows.numel() // case.dim * (slot_bytes + 21)) if cached else 0
    kv = ibp.kv.KVRows(
        case.rows[:4096],
        num_layers=1,
        num_tokens=len(case.rows),
        num_heads=case.heads,
        cache_bytes=cache_bytes,
        device=case.run.device,
    )
    kv.store(0, case.rows, torch.arange(len(case.rows), device=case.run.device))
    kv.check()
    return kv


def measure_coded(case, cpu_gbps, raw_gbps, device_gbps):
    kv = rows_of(case, False)
    savings = 1 - kv.places[0].slot_bytes / case.row_bytes
    same = {"savings": savings, "gain": kv.gain}

    def fetch(of, sms=None):
        return lambda number: of.load(0, case.tokens[number], per_head=True, out=case.out, max_sms=sms)

    wanted = max(OVER_RAW * (raw_gbps or 0), OVER_CPU * (cpu_gbps or 0))
    case.measure("ibp", fetch(kv), wanted, **same)
    if case.run.on_gpu:
        case.measure("ibp", fetch(kv, FEW_SMS), sms=FEW_SMS, **same)
    measure_put(case, kv)
    cached = rows_of(case, True)

    def hit_rate():
        """Returns the hit rate of consecutive calls."""
        fetch(cached)(0)
        cached.caches[0].reset_stats()
        for number in range(1, NUM_CALLS):
            fetch(cached)(number)
        stats = cached.stats()
        return stats.hits / max(1, stats.hits + stats.misses)

    misses_gbps = case.link_gbps(savings) / (1 - KEPT)
    wanted = OF_DEVICE * device_gbps if device_gbps else None
    case.measure("ibp, cache", fetch(cached), wanted, ideal_gbps=misses_gbps, hit_rate=hit_rate, **same)
    cached.check()


def measure_put(case, kv):
    """Measures storing the rows of one token, in compressed slots in host memory and as raw rows in device memory."""
    token, row = torch.tensor([7], device=case.run.device), case.rows[7:8].clone()
    raw = case.rows.clone()
    for arm, call in (("put", lambda: kv.store(0, row, token)), ("raw put", lambda: raw.index_copy_(0, token, row))):
        with case.run.cell(f"{case.name}, {arm}"):
            call()
            if case.run.on_gpu:
                case.run.sync()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    call()
                call = graph.replay
            seconds = case.run.seconds([call])
            gbps = row.numel() * 2e-9 / seconds
            case.record(arm, gbps, seconds, None, None, 0.0, case.link_gbps(0.0), 1.0)
    kv.check()


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("kv_rows", args, COLUMNS)
    torch.manual_seed(0)
    for heads, dim in CASES:
        with run.cell(f"{heads} heads of {dim}"):
            case = Case(run, heads, dim)
            measure_coded(case, *measure_raw(case))
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
