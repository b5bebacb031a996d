#!/usr/bin/env python3
"""Runs every family of kernels under the four tools of compute-sanitizer: `make sanitize-gpu`.

    python tools/sanitize_gpu.py [--seconds 60] [--seed 0] [--tools memcheck,racecheck,synccheck,initcheck]
                                 [--families rows,products]
    python tools/sanitize_gpu.py --calls FAMILY [--seconds 5]     # the calls themselves, without a tool

The calls are small and random. Calls of the family `rows` compress, decompress, change, sum, cache, subtract and page
rows of every dtype, kind, length, scheme and layout. Calls of the family `products` multiply by 1 to 300 vectors. Each
result is compared with torch's own indexing, or with a product in double precision on the CPU. cuBLAS's kernels are
kept out of the process, because racecheck itself fails under them.

The tools run side by side on one GPU. Each of them makes calls for the given seconds. All tools but initcheck look only
at kernels of the namespace ibp; initcheck also has to see which kernels write the memory that these read. The exit
status is 1 if a tool reports anything that KNOWN does not list, if a result is wrong, or if a process does not end.
"""

import argparse
import collections
import itertools
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ibp  # noqa: E402

ONLY_OURS = ["--kernel-name", "kns=ibp"]  # The tools look at kernels whose mangled names contain this text.
# The options of each tool.
TOOLS = {
    "memcheck": ["--leak-check", "no", *ONLY_OURS],
    "racecheck": ["--racecheck-report", "analysis", *ONLY_OURS],
    "synccheck": ONLY_OURS,
    "initcheck": ["--check-api-memory-access", "no"],  # Only accesses by kernels are checked.
}
FAMILIES = "rows", "products"
# Kernels that a tool reports although they have no fault.
# racecheck: blocks of a cluster read each other's sums. They first wait, by try_wait.acquire.cluster, for an mbarrier
# in their own shared memory, at which the other blocks arrive by mbarrier.arrive.release.cluster. This orders the reads
# and writes (PTX ISA, memory consistency model), but the tool does not follow barriers at which other blocks arrive.
# With random delays before each write and each read, a million products had the same bits.
# initcheck: decoders load 16 bytes at once. The last load of a row may reach into bytes of its slot that were never
# written; no result depends on them.
KNOWN = {"racecheck": {"many_kernel", "tiles_kernel"}, "initcheck": {"gather_items"}}
REPORTED = re.compile(r"\bat (?:void )?ibp::(\w+)")  # Kernels of ibp count; those of torch and cuBLAS do not.
STARTING_S = 150  # Until CUDA has started, a tool takes at most this many seconds.
FAILED = 99  # A tool ends with this status if it has reported something.
DTYPES = (
    *(torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.int64, torch.uint8, torch.int8),
    torch.float8_e4m3fn,
)
COLUMNS = (8, 16, 33, 64, 65, 128, 257, 512, 1000, 1024, 4096, 9000, 32768)
KINDS = {
    "normal": lambda x: x,
    "half zeros": lambda x: x * (torch.rand_like(x) < 0.5),
    "few values": lambda x: (torch.rand_like(x) < 0.03).float(),
    "ReLU": lambda x: x.clamp(min=0),
    "zeros": torch.zeros_like,
    "random bytes": None,
}
VECTORS = (1, 7, 8, 16, 32, 40, 64, 70, 130, 300)
SHAPES = ((64, 256), (130, 512), (512, 1024), (192, 4096), (128, 16384), (5120, 256))


class WrongBits(Exception):
    pass


def check(got, want, what):
    got, want = (x.contiguous().view(-1).view(torch.uint8).cpu() for x in (got, want))
    if not torch.equal(got, want):
        raise WrongBits(what)


# ---- rows ------------------------------------------------------------------------------------------------------------


def drawn_rows(draw, device):
    """Returns (rows [n, columns] of a random dtype and kind, a description of them)."""
    dtype, columns, num_rows, kind = draw(DTYPES), draw(COLUMNS), draw((3, 40, 130)), draw(tuple(KINDS))
    if KINDS[kind] is None:
        data = torch.randint(0, 256, (num_rows, columns * dtype.itemsize), dtype=torch.uint8)
        x = data.view(dtype)
    else:
        x = KINDS[kind](torch.randn(num_rows, columns) * 3).to(dtype)
    return x.to(device), f"{kind} {dtype} [{num_rows}, {columns}]"


def compressed(draw, x):
    """Returns (a table of x that is compressed with random options, the options)."""
    options = {"scheme": draw(("planes", "ibp")), "layout": draw(("slots", "packed")), "device": x.device}
    options |= draw(({}, {"clusters": 3}, {"level": "fast"} if options["scheme"] == "planes" else {}))
    if options["layout"] == "slots":
        options |= draw(({}, {"slot_bytes": 32}))
    return ibp.compress(x, **options), options


def rows_call(draw, device):
    """Makes one table, reads it in every way and makes every change."""
    x, what = drawn_rows(draw, device)
    try:
        table, options = compressed(draw, x)
    except (ValueError, TypeError):  # These options cannot be combined with these rows.
        return
    what = f"{what}, {options}"
    ids = torch.randint(0, len(x), (draw((1, 5, 70)),)).to(device)
    near = table.cpu().pin_memory() if device.type == "cuda" and draw((True, False)) else table
    check(ibp.decompress(near, device=device), x, f"decompress: {what}")
    sms = draw(({}, {"max_sms": 8}))
    check(ibp.index_select(near, ids, device=device, **sms), x[ids], f"index_select: {what}")
    if device.type == "cuda":
        check(ibp.index_select(near, ids, device=device, path="bucketed"), x[ids], f"bucketed: {what}")
    check(ibp.index_select([table, table], ids, table_numbers=ids * 0), x[ids], f"of several tables: {what}")
    for call in (rows_coded, rows_changed, rows_cached, rows_summed, rows_subtracted):
        call(draw, x, table, ids, what)


def rows_coded(draw, x, table, ids, what):
    """Calls `encode_into`, in order and with row ids."""
    if table.codebook is None or table.row_bytes != x[0].nbytes or x.dtype.itemsize > 8:
        return
    place = ibp.CodedRows(table.codebook, 2 * len(x), slot_bytes=table.row_bytes, device=x.device)
    ibp.encode_into(x, place, first_row=len(x))
    ibp.encode_into(x, place, torch.randperm(len(x)).to(x.device))
    rows = place.table([2 * len(x), x.shape[1]], x.dtype)
    check(rows[len(x) :], x, f"encode_into: {what}")


def rows_changed(draw, x, table, ids, what):
    """Calls `update_`, `append` and `refit` for a copy of a table."""
    if table.layout != "slots":
        return
    x, table = x.clone(), table.clone()
    places = torch.tensor([0, len(x) - 1], device=x.device)
    table.update_(places, x[[1, 2]])
    x[places] = x[[1, 2]]
    table.append(x[:3])
    x = torch.cat([x, x[:3]])
    check(ibp.decompress(table), x, f"update_, append: {what}")
    table.refit()
    check(ibp.decompress(table), x, f"refit: {what}")


def rows_cached(draw, x, table, ids, what):
    """Reads a table through a `RowCache` with one of both policies. A cache needs items that are whole rows."""
    if x[0].nbytes != table.row_bytes:
        return
    policy = draw(("static", "lru"))
    hotness = None if policy == "lru" else torch.rand(len(x), device=x.device)
    cache = ibp.RowCache(table, 1 << 14, hotness, devices=x.device, policy=policy)
    for _ in range(2):
        check(cache.index_select(ids), x[ids], f"{policy} cache: {what}")


def rows_summed(draw, x, table, ids, what):
    """Calls `embedding_bag` with bags of one row, whose sums are the rows."""
    if not x.dtype.is_floating_point or x.dtype.itemsize not in (2, 4) or x.isnan().any() or x.isinf().any():
        return
    offsets = torch.arange(len(ids), device=x.device)
    bags = ibp.embedding_bag(table, ids, offsets, mode="sum")
    if not torch.equal(bags, x[ids]):  # Values are compared, because -0 may become 0.
        raise WrongBits(f"embedding_bag: {what}")


def rows_subtracted(draw, x, table, ids, what):
    """Calls `deltas.make`, `apply_` and `fingerprint`."""
    new = x.clone()
    new[ids[0]] = new[-1]
    base = x.clone()
    ibp.deltas.make(new, base).apply_(base)
    check(base, new, f"delta: {what}")
    if ibp.deltas.fingerprint(base) != ibp.deltas.fingerprint(new.cpu()):
        raise WrongBits(f"fingerprint: {what}")


def pages_call(draw, device):
    """Stores and loads pages, messages and rows of KV-caches."""
    layers = [torch.randn(24, 16, 128, device=device).bfloat16() for _ in range(3)]
    cache, blocks = ibp.kv.PagedTensors(layers), [1, 5, 9]
    store = ibp.kv.KVStore(layers[0], page_bytes=cache.block_bytes, num_tensors=3, num_pages=8, device=device)
    kept = [layer[blocks].clone() for layer in layers]
    store.store([0, 1, 2], cache, blocks=blocks).wait()
    store.load([2, 1, 0], cache, blocks=[20, 21, 22]).wait()
    for layer, rows in zip(layers, kept):
        check(layer[[22, 21, 20]], rows, "pages")
    codec = ibp.kv.PageCodec.learn(layers[0])
    message, used = ibp.kv.pack(cache, codec, blocks=blocks)
    ibp.kv.unpack(message[: int(used)].clone(), codec, out=cache, blocks=[10, 11, 12])
    for layer, rows in zip(layers, kept):
        check(layer[10:13], rows, "messages of pages")
    k = torch.randn(64, 8, 128, device=device).bfloat16()
    tokens = ibp.kv.KVRows(k, num_layers=1, num_tokens=128, num_heads=8, device=device, cache_bytes=1 << 14)
    tokens.store(0, k, torch.arange(64, device=device))
    chosen = torch.randperm(64)[:16].view(8, 2).to(device)
    for _ in range(2):
        got = tokens.load(0, chosen, per_head=True)
        check(got, torch.stack([k[chosen[head], head] for head in range(8)]), "rows of tokens")


# ---- products --------------------------------------------------------------------------------------------------------


def products_call(draw, device):
    """Multiplies every number of vectors by one matrix and by two, and compares with products in double precision on
    the CPU."""
    shape = draw(SHAPES)
    weights = [(0.02 * torch.randn(shape)).bfloat16() for _ in range(2)]
    tables = []
    for weight in weights:
        module = torch.nn.Linear(1, 1, bias=False)
        module.weight = torch.nn.Parameter(weight.to(device), requires_grad=False)
        module.out_features, module.in_features = shape
        tables.append(ibp.nn.Linear.from_linear(module).weight)
    # With more vectors than these, ibp.linear uses cuBLAS.
    for count in (count for count in VECTORS if count <= max(128, shape[0] // 16)):
        x = torch.randn(count, shape[1]).bfloat16()
        wanted = [x.double() @ weight.double().T for weight in weights]
        with torch.no_grad():
            alone = ibp.linear(x.to(device), tables[0])
            for got, want in zip([alone, *ibp.linear(x.to(device), tables)], [wanted[0], *wanted]):
                error = (got.double().cpu() - want).norm() / want.norm()
                if not error < 1e-2:
                    raise WrongBits(f"{count} vectors, {list(shape)}: off by {error:.3g}")


def run_calls(family, seconds, seed):
    """Makes random calls of a family for some seconds, but at least one of each kind."""
    torch.manual_seed(seed)
    draw = random.Random(seed).choice
    device = torch.device("cuda" if ibp.cuda_is_available() else "cpu")
    calls = itertools.cycle((pages_call, *[rows_call] * 8) if family == "rows" else (products_call,))
    end, done = time.perf_counter() + seconds, 0
    while done < (2 if family == "rows" else 1) or time.perf_counter() < end:
        next(calls)(draw, device)
        done += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"{family}: {done} rounds on {device}, every result right")
    return 0


# ---- the tools -------------------------------------------------------------------------------------------------------


def start(tool, family, args, log):
    command = [
        *("compute-sanitizer", "--tool", tool, "--error-exitcode", str(FAILED), *TOOLS[tool]),
        *("--print-limit", "0", "--show-backtrace", "no"),
        *(sys.executable, __file__, "--calls", family, "--seconds", str(args.seconds), "--seed", str(args.seed)),
    ]
    # With torch's caching allocator, initcheck would take reused memory for initialised, and memcheck would miss
    # accesses out of bounds.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--calls", choices=FAMILIES)
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "sanitize", help="where the tools' output goes")
    args = parser.parse_args(argv)
    if args.calls:
        return run_calls(args.calls, args.seconds, args.seed)
    args.logs.mkdir(parents=True, exist_ok=True)
    runs, end, failed = [], time.perf_counter() + STARTING_S + 3 * args.seconds, 0
    for tool, family in itertools.product(args.tools.split(","), args.families.split(",")):
        path = args.logs / f"{tool}_{family}.txt"
        runs.append((tool, family, path, start(tool, family, args, path.open("w"))))
    for tool, family, path, process in runs:
        try:
            status = process.wait(max(1, end - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            status = "killed: it did not end in time"
        said = path.read_text()
        rounds = re.findall(r"^\w+: \d+ rounds.*", said, re.MULTILINE)
        kernels = collections.Counter(REPORTED.findall(said))
        is_known = status == FAILED and rounds and kernels.keys() <= KNOWN.get(tool, set())
        failed |= status != 0 and not is_known
        summary = re.findall(r"=+ (\S* ?SUMMARY: .*)", said)
        found = [f"{number} in {kernel}" for kernel, number in kernels.items()]
        words = [*rounds, *summary, *found, *(["known, see KNOWN"] if is_known else [])]
        print(f"{tool}, {family}: exit status {status}; {'; '.join(words) or said[-500:]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
