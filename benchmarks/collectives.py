"""When are collectives of torch.distributed faster if their tensors travel compressed?

    python -m benchmarks.collectives [--out DIR] [--device cpu] [--quick]

There are two processes with a GPU each, and NCCL over three links: as NCCL finds it (`direct`); `no peer access`
(NCCL_P2P_DISABLE=1, which goes through host memory); and `sockets` (also NCCL_SHM_DISABLE=1), which stand for a
network. On the CPU gloo is used. Arms: `torch` is torch.distributed; `default` and `fast` compress tensors at that
level; `default in 4` travels in that number of pieces; `auto` is what `ibp.distributed` does without options; `copies`,
for the direct link alone, are copies between both GPUs at once by one process, without NCCL.

The calls are all-gathers of BF16 weights N(0, 0.02) in three sizes, and of other kinds in one size: FP32 gradients,
FP8, half zeros, small integers, random bytes; broadcasts, all-to-alls, gathers, scatters and sends of BF16 weights; and
`FSDP2`, steps of nets whose all-gathers work in this way and whose losses must be equal.

Several calls in a row are timed with the wall clock, and the slower rank's time counts. The arms take turns, in
alternating order. `over_torch` is the median of an arm's speed over torch's in the same turn, and the arm's time is
torch's median divided by it. On the direct link, `torch again` is torch's own call once more; its difference from
`torch` is noise. GB/s count the original bytes that arrive at a rank. The ideal is torch's rate divided by the
messages' share of the bytes. `mib` is the size of the output, for scatters that of all parts, for FSDP2 that of one
module. Every arm's result has torch's bits.
"""

import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ibp.distributed as coded
from ibp.distributed import _links

from . import families, harness, inputs

COLUMNS = ("link", "call", "mib", "ms", "over_torch", *harness.TARGET_COLUMNS)
WORLD = 2
DIRECT, NO_PEERS, SOCKETS, GLOO = "direct", "no peer access", "sockets", "gloo"
# For each link, the environment variables that NCCL gets.
LINKS = {
    DIRECT: {},
    NO_PEERS: {"NCCL_P2P_DISABLE": "1"},
    SOCKETS: {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
}
# Targets of `auto` with BF16 weights, as multiples of torch's rate.
WANTED = {DIRECT: 0.98, NO_PEERS: 1.35, SOCKETS: 1.4}
SIZES_MIB, QUICK_SIZES_MIB = (64, 256, 1024), (2,)  # The outputs have these sizes in MiB.
ONE_MIB = 256
TORCH, AGAIN, DEFAULT, FAST, AUTO = "torch", "torch again", "default", "fast", "auto"
ARMS = (TORCH, DEFAULT, FAST, AUTO)
# All-gathers of ONE_MIB are also measured in these numbers of pieces.
COPIES, IN_PIECES, PIECES = "copies", "weights in pieces", (1, 2, 4, 8, 16)
ALL_GATHER, BROADCAST, ALL_TO_ALL, SEND, FSDP = (
    "all_gather_into_tensor",
    "broadcast",
    "all_to_all_single",
    "send",
    "FSDP2",
)
GATHER, SCATTER = "gather", "scatter"
# Calls before timing; calls in a row; the seconds of a call from which on a row has one call; the most turns.
WARM, TIMED, LONG_S, ROWS = 2, 10, 0.05, 31
ROW_S = 0.006  # torch's calls in a row take about this many seconds.
# Seconds of the turns of a case, about, in full and in quick runs; seconds that a link may take.
CASE_S, QUICK_CASE_S, LINK_S = 0.4, 0.02, 24.0
WEIGHTS = "weights"
# Each net has (modules, width, rows). Its modules have 64 or 256 MiB.
FSDP_NETS, QUICK_FSDP_NETS = ((6, 2048, 8192), (3, 4096, 8192)), ((2, 64, 8),)


def random_bytes(rows, columns, device):
    return torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=device)


def small_integers(rows, columns, device):
    return torch.randint(0, 1000, (rows, columns), device=device)


# Each kind has (name, dtype, maker).
KINDS = (
    (WEIGHTS, torch.bfloat16, families.weights),
    ("integers", torch.int64, small_integers),
    ("gradients", torch.float32, lambda *shape: 1e-4 * families.normal(*shape)),
    ("normal 1", torch.float8_e4m3fn, families.normal),
    ("half zeros", torch.bfloat16, families.masked),
    ("random bytes", torch.uint8, random_bytes),
)


class Rank:
    """One process of a link."""

    def __init__(self, rank, device, link, small):
        self.rank, self.device, self.link, self.small = rank, device, link, small
        self.began, self.found = time.perf_counter(), []

    def has_time(self):
        """Returns, on all ranks, whether rank 0 has time left."""
        flag = torch.tensor([time.perf_counter() - self.began < LINK_S], device=self.device)
        dist.broadcast(flag, 0)
        return bool(flag)

    def sync(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, calls):
        """Returns the seconds of one call in a row of calls, by arm. For torch this is the median. For others it is
        torch's median, divided by the median of the arm's speed over torch's. The arms take turns. All decisions here
        are the same on both ranks, because they depend only on times that are."""
        once = {arm: self._row_s(call, 1) for arm, call in calls.items()}
        count = 1 if once[TORCH] > LONG_S else max(2, min(TIMED, int(ROW_S / once[TORCH])))
        turns = int((QUICK_CASE_S if self.small else CASE_S) / (count * sum(once.values())))
        rows = []
        for turn in range(max(2, min(turns, ROWS))):
            order = list(calls) if turn % 2 else reversed(calls)
            rows.append({arm: self._row_s(calls[arm], count) for arm in order})
        torch_s = statistics.median(row[TORCH] for row in rows)
        return {arm: torch_s / statistics.median(row[TORCH] / row[arm] for row in rows) for arm in calls}

    def _row_s(self, call, count):
        """Returns the seconds of one of `count` calls in a row, on the slower rank."""
        self.sync()
        dist.barrier()
        self.sync()
        began = time.perf_counter()
        for _ in range(count):
            call()
        self.sync()
        slowest = torch.tensor([(time.perf_counter() - began) / count], device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def measure(self, name, kind, dtype, calls, moved, check, mib):
        """Measures all arms of one case. calls: by arm. check(arm) raises unless the result is right."""
        if not self.has_time():
            return
        if self.link == DIRECT and AGAIN not in calls:
            calls = {**calls, AGAIN: calls[TORCH]}
        for arm, call in calls.items():
            for _ in range(WARM):
                call()
            check(arm)
        seconds = self.seconds(calls)
        check(arm)
        for arm in calls:
            self.found.append(
                {
                    "call": name,
                    "kind": kind,
                    "dtype": harness.dtype_name(dtype),
                    "arm": arm,
                    "mib": mib,
                    "moved": moved,
                    "savings": 0.0 if arm in (TORCH, AGAIN) else savings_of(name, dtype, arm, kind),
                    "seconds": seconds[arm],
                    "torch_s": seconds[TORCH],
                }
            )


def savings_of(call, dtype, level, name):
    """Returns the savings of the last messages that calls of a kind have sent, or 0 if they were raw."""
    state = _links.state_of(None)
    level, _, pieces = level.partition(" in ")
    name += f" in {pieces}" if pieces else ""
    if call == FSDP:  # Its codecs are named after modules.
        found = [plan for kind, plan in state.plans.items() if kind.name.isdigit() and kind.level == level]
    else:
        plans = [*state.plans.items(), *(item for channel in state.channels.values() for item in channel.plans.items())]
        wanted = call, dtype, level, name
        found = [plan for kind, plan in plans if (kind.what, kind.dtype, kind.level, kind.name) == wanted]
    return found[-1].codec.savings if found and found[-1].codec is not None else 0.0


def work(rank, kind, link, small, store, found):
    """Measures all cases on one rank. found: a file that gets what rank 0 has measured, as JSON."""
    with harness.process_group(kind, store, rank, WORLD) as device:
        process = Rank(rank, device, link, small)
        torch.manual_seed(rank)
        sizes = QUICK_SIZES_MIB if small else SIZES_MIB
        for mib in sizes:
            measure_gather(process, *KINDS[0], mib)
        one = sizes[0] if small else ONE_MIB
        measure_gather(process, IN_PIECES, *KINDS[0][1:], one, (TORCH, *(f"{DEFAULT} in {count}" for count in PIECES)))
        measure_others(process, one)
        for net in QUICK_FSDP_NETS if small else FSDP_NETS:
            measure_fsdp(process, *net)
        for name, dtype, make in KINDS[1:]:
            measure_gather(process, name, dtype, make, one, (TORCH, DEFAULT, AUTO))
        if rank == 0:
            Path(found).write_text(json.dumps(process.found))
        dist.barrier()


def tensor_of(process, make, dtype, num_bytes):
    columns = 2048 // dtype.itemsize
    return make(num_bytes // 2048, columns, process.device).to(dtype).view(-1)


def checker(out, wanted, what):
    """Returns a function that compares an arm's result, and then overwrites it for the next arm."""

    def check(arm):
        harness.check_bits(out, wanted, f"{what}, {arm}")
        harness.poison(out)

    return check


def measure_gather(process, name, dtype, make, mib, arms=ARMS):
    x = tensor_of(process, make, dtype, mib * inputs.MIB // WORLD)
    wanted = torch.empty(WORLD * len(x), dtype=dtype, device=process.device)
    dist.all_gather(list(wanted.view(torch.uint8).chunk(WORLD)), x.view(torch.uint8))
    out = torch.empty_like(wanted)
    calls = {TORCH: functools.partial(_torch_gather, out.view(torch.uint8), x.view(torch.uint8))}
    for arm in arms[1:]:
        level, _, pieces = arm.partition(" in ")
        kind = f"{name} in {pieces}" if pieces else name
        calls[arm] = functools.partial(coded.all_gather_into_tensor, out, x, level=level, name=kind)
        if pieces:  # The first call makes the plan, which the calls after it follow.
            with mock.patch.object(_links.Rates, "num_pieces", lambda *_, count=int(pieces): count):
                calls[arm]()
    moved = x.nbytes * (WORLD - 1)
    check = checker(out, wanted, f"{process.link}, {ALL_GATHER}, {name}")
    process.measure(ALL_GATHER, name, dtype, calls, moved, check, mib)


def _torch_gather(out, x):
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, x)


def measure_others(process, mib):
    """Measures the calls other than all-gathers. They leave out `fast`, which behaves as in all-gathers."""
    name, dtype, make = KINDS[0]
    x, rank = tensor_of(process, make, dtype, mib * inputs.MIB), process.rank
    sent = x.clone()
    dist.broadcast(sent, 0)
    out = torch.empty_like(x)

    def arms(plain, other):
        return {TORCH: plain, **{arm: functools.partial(other, level=arm, name=name) for arm in (DEFAULT, AUTO)}}

    tensor = sent if rank == 0 else out
    check = checker(out, sent, f"{process.link}, {BROADCAST}") if rank else lambda arm: None
    calls = arms(lambda: dist.broadcast(tensor, 0), functools.partial(coded.broadcast, tensor, 0))
    process.measure(BROADCAST, name, dtype, calls, x.nbytes, check, mib)

    plain, other = (dist.send, coded.send) if rank == 0 else (dist.recv, coded.recv)
    peer = 1 - rank
    calls = arms(lambda: plain(tensor, peer), functools.partial(other, tensor, peer))
    check = checker(out, sent, f"{process.link}, {SEND}") if rank else lambda arm: None
    process.measure(SEND, name, dtype, calls, x.nbytes, check, mib)

    wanted = torch.empty_like(x)
    dist.all_to_all_single(wanted, x)
    calls = arms(lambda: dist.all_to_all_single(out, x), functools.partial(coded.all_to_all_single, out, x))
    check = checker(out, wanted, f"{process.link}, {ALL_TO_ALL}")
    process.measure(ALL_TO_ALL, name, dtype, calls, x.nbytes // WORLD, check, mib)

    # nvCOMP's scenarios of one GPU: rank 0 gathers a part from each rank, and scatters the parts of its tensor.
    part, parts = x.chunk(WORLD)[rank], list(out.chunk(WORLD)) if rank == 0 else None
    dist.all_gather(list(wanted.chunk(WORLD)), part)
    calls = arms(lambda: dist.gather(part, parts), functools.partial(coded.gather, part, parts))
    check = (lambda arm: None) if rank else checker(out, wanted, f"{process.link}, {GATHER}")
    process.measure(GATHER, name, dtype, calls, x.nbytes // WORLD, check, mib)

    got, parts = out.chunk(WORLD)[rank], list(sent.chunk(WORLD)) if rank == 0 else None
    calls = arms(lambda: dist.scatter(got, parts), functools.partial(coded.scatter, got, parts))
    check = checker(got, sent.chunk(WORLD)[rank], f"{process.link}, {SCATTER}")
    process.measure(SCATTER, name, dtype, calls, x.nbytes // WORLD, check, mib)


# ---- FSDP2 ---------------------------------------------------------------------------------------------------------


def measure_fsdp(process, layers, width, rows):
    """Measures steps of a net of consecutive linear layers. rows: rows of its input."""
    losses, arms = {}, (TORCH, AUTO, AGAIN) if process.link == DIRECT else (TORCH, AUTO)
    nets = {arm: make_net(process, arm, layers, width) for arm in arms}
    calls = {arm: functools.partial(step, process, net, losses.setdefault(arm, []), rows) for arm, net in nets.items()}
    weights = sum(weight.numel() for weight in nets[TORCH][0].parameters())

    def check(arm):
        if losses[arm] != losses[TORCH]:
            raise AssertionError(f"{process.link}, {FSDP}, {arm}: losses {losses[arm]}, wanted {losses[TORCH]}")

    moved = 2 * weights * torch.bfloat16.itemsize * (WORLD - 1) // WORLD  # Weights are gathered for both passes.
    module_mib = weights // layers * torch.bfloat16.itemsize // inputs.MIB
    process.measure(FSDP, WEIGHTS, torch.bfloat16, calls, moved, check, module_mib)


def make_net(process, arm, count, width):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    with process.device:
        layers = [torch.nn.Linear(width, 4 * width, bias=False) for _ in range(count)]
        back = [torch.nn.Linear(4 * width, width, bias=False) for _ in range(count)]
    net = torch.nn.Sequential(*[torch.nn.Sequential(a, torch.nn.GELU(), b) for a, b in zip(layers, back)])
    mesh = init_device_mesh(process.device.type, (WORLD,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in net:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    if arm == AUTO:
        coded.compress_all_gather(net, level=arm)
    return net, torch.optim.SGD(net.parameters(), lr=1e-3)


def step(process, net_and_optimizer, losses, rows):
    net, optimizer = net_and_optimizer
    generator = torch.Generator(process.device).manual_seed(len(losses))
    width = net[0][0].in_features
    x = torch.randn(rows, width, generator=generator, device=process.device)
    loss = net(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))


# ---- a run ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def environment(values):
    """Sets environment variables, which processes inherit, inside a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def measure_link(run, link, told):
    """Runs the processes of one link and adds what they have measured to the CSV."""
    with tempfile.TemporaryDirectory() as directory, environment(told):
        found, store = Path(directory) / "found.json", str(Path(directory) / "store")
        mp.spawn(work, (run.device.type, link, run.quick or not run.on_gpu, store, str(found)), nprocs=WORLD)
        rows = json.loads(found.read_text())
    for row in rows:
        add(run, link, row)


def measure_copies(run):
    """Measures an all-gather of weights by copies between the memories of two GPUs. Adds it to the CSV beside torch's
    all-gather of the same size."""
    _, dtype, make = KINDS[0]
    mib = QUICK_SIZES_MIB[0] if run.quick else ONE_MIB
    num_bytes = mib * inputs.MIB // WORLD
    devices = [torch.device("cuda", number) for number in range(WORLD)]
    sent = [make(num_bytes // 2048, 2048 // dtype.itemsize, device).to(dtype) for device in devices]
    outs = [torch.empty_like(part, device=device) for part, device in zip(sent[::-1], devices)]
    # A copy makes the streams of both GPUs wait for it, so each direction has streams of its own.
    streams = [[torch.cuda.Stream(device) for device in devices] for _ in range(WORLD)]
    times = []
    for _ in range(WARM + ROWS):
        began = time.perf_counter()
        for part, out, (one, other) in zip(sent[::-1], outs, streams):
            with torch.cuda.stream(one), torch.cuda.stream(other):
                out.copy_(part, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    for part, out in zip(sent[::-1], outs):
        harness.check_bits(out, part.to(out.device), f"{DIRECT}, {COPIES}")
    of_torch = next(row for row in run.rows if row["case"].endswith(IN_PIECES) and row["arm"] == TORCH)
    torch_s, seconds = 1e-3 * float(of_torch["ms"]), statistics.median(times[WARM:])
    found = {"call": ALL_GATHER, "kind": IN_PIECES, "dtype": harness.dtype_name(dtype), "arm": COPIES, "mib": mib}
    add(run, DIRECT, {**found, "moved": num_bytes, "savings": 0.0, "seconds": seconds, "torch_s": torch_s})


def add(run, link, row):
    gbps, torch_gbps = (row["moved"] * 1e-9 / row[name] for name in ("seconds", "torch_s"))
    is_wanted = run.is_judged and row["arm"] == AUTO and row["kind"] == WEIGHTS and row["call"] != FSDP
    run.add(
        case=f"{link}, {row['call']}, {row['kind']}",
        arm=row["arm"],
        rows=row["moved"] // 2048,
        row_bytes=2048,
        dtype=row["dtype"],
        savings=row["savings"],
        gbps=gbps,
        ideal_gbps=torch_gbps / (1 - row["savings"]),
        sms=None,
        link=link,
        call=row["call"],
        mib=row["mib"],
        ms=harness.four_digits(1e3 * row["seconds"]),
        over_torch=harness.four_digits(row["torch_s"] / row["seconds"]),
        **harness.judged(gbps, WANTED[link] * torch_gbps if is_wanted else None),
    )


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    if args.device == "cuda" and torch.cuda.device_count() < WORLD:
        print(f"collectives: needs {WORLD} GPUs, torch sees {torch.cuda.device_count()}: results stay as they are")
        return 1
    run = harness.Run("collectives", args, COLUMNS)
    run.scratch = None  # This process measures nothing, and frees its buffer.
    for link, told in (LINKS if run.on_gpu else {GLOO: {"GLOO_SOCKET_IFNAME": "lo"}}).items():
        with run.cell(link):
            measure_link(run, link, told)
    if run.on_gpu:
        with run.cell(COPIES):
            measure_copies(run)
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
