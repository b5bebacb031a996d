"""What is the bottleneck of the kernels that miss their targets? Needs a GPU and Nsight Compute (`ncu`).

    python -m benchmarks.profiles [--out DIR] [--device cpu] [--quick]

Calls of families.py, linear.py, kv_transfer.py, bags.py, row_cache.py and deltas.py, one of each kind, run under `ncu`:
tables of 256 MiB are decoded and encoded in device memory, vectors are multiplied by compressed matrices, pages are
packed and unpacked, bags of rows are summed, rows come through a cache, and deltas are applied. Without a GPU the calls
run, and nothing is written.

After the common columns, profiles.csv describes the kernel of a call that takes longest: its name, `us`, its share of
the time of all kernels of the call (`share`) and their number (`launches`). The next columns say how much of the
hardware it used, in percent: `issue` of the cycles in which a scheduler may issue an instruction, `memory` of device
memory's rate, `l2` and `l1` of the caches' rates, `tensor` of the cycles of tensor cores, and `warps` of the warps that
an SM can hold. `stall` is what a warp waits for longest, and `stall_share` its share of the time (`selected` means that
it does not wait). `bound` names what is used most, and `ideal_gbps` is what the call would reach if that were used all
the time. GB/s are those of all kernels of the call under the profiler, which empties the caches before each.
"""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

import ibp

from . import bags, families, harness, inputs, kv_transfer, linear

USED = ("issue", "memory", "l2", "l1", "tensor")
COLUMNS = ("kernel", "us", "share", "launches", *USED, "warps", "stall", "stall_share", "bound")
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "Occupancy", "WarpStateStats")
# Each column has a pattern of its counter's name. If several match, the largest counts.
COUNTERS = {
    "issue": r"^sm__inst_issued\.avg\.pct",
    "memory": r"^(gpu__)?dram__?throughput\.avg\.pct",
    "l2": r"^lts__throughput\.avg\.pct",
    "l1": r"^l1tex__throughput\.avg\.pct",
    "tensor": r"^sm__pipe_tensor_cycles_active\.avg\.pct|^sm__inst_executed_pipe_tensor_op_gmma\.avg\.pct",
    "warps": r"^sm__warps_active\.avg\.pct",
}
DURATION = "gpu__time_duration.sum"  # This counter is in nanoseconds.
STALL = re.compile(r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_not_issued)?_per_issue_active")
LIMIT_S = 330  # All calls together may take this many seconds.
VECTORS, SHAPES = (1, 16, 64, 128, 256, 512), ((4096, 4096), (4096, 14336), (8192, 8192))
ROW_BYTES = 2048  # Rows of bags and deltas have this many bytes.
# The bytes of rows of cached tables, the cache's share of a table's bytes, and the share of ids that hit.
CACHED_BYTES, CACHED_SHARE, HIT_SHARE = (128, 512), 0.5, 0.9
CHANGED_SHARE = 0.042  # This share of a tensor's elements changes.
LEAST_NS = 1.0


# ---- the calls -----------------------------------------------------------------------------------------------------


def rows_in_device_memory(run, data_dir):
    """Yields (case, arm, tensor with the original bytes, call) for the kinds of families.py and for dense rows of FP16
    and FP32."""
    dense = [
        (f"normal 0.02, {columns * dtype.itemsize} B", "", x.to(dtype), x.to(dtype))
        for dtype, columns in ((torch.bfloat16, 1024), (torch.float16, 1024), (torch.float32, 512))
        for x in [families.weights(families.table_bytes(run) // (columns * dtype.itemsize), columns, run.device)]
    ]
    for name, _, x, rows in [*dense, *families.cases(run, data_dir)]:
        codebook = ibp.codecs.analyze(rows, scheme="planes", sample=families.SAMPLE)
        table = ibp.compress(x, codebook=codebook)
        out = torch.empty_like(x)
        yield name, families.DECODE, x, lambda table=table, out=out: ibp.decompress(table, out=out)
        sizes = {"slot_bytes": table.slot_bytes, "overflow_bytes": table.num_rows * table.slot_bytes}
        place = ibp.CodedRows(codebook, table.num_rows, **sizes, device=run.device)
        yield name, families.ENCODE, x, lambda x=x, place=place: ibp.encode_into(x, place)


def normal_rows(run, row_bytes):
    """Returns BF16 rows of a table."""
    return inputs.normal_rows(families.table_bytes(run), torch.bfloat16, 0.02, run.device, columns=row_bytes // 2)


def products(run):
    for shape in linear.QUICK_SHAPES if run.quick else SHAPES:
        weight, table = linear.make(shape, run.device)
        for count in VECTORS:
            x = torch.randn(count, shape[1], device=run.device).bfloat16()
            yield (
                f"{shape[0]} x {shape[1]}, {count} vectors",
                linear.FUSED,
                weight,
                lambda x=x, table=table: ibp.linear(x, table),
            )


def pages_and_bags(run):
    pages = kv_transfer.llama_pages(run.device, run.quick, torch.bfloat16)
    original = torch.empty(pages.num_pages, pages.paged.block_bytes, dtype=torch.uint8, device="meta")
    blocks, targets = (ids.to(run.device) for ids in (pages.blocks, pages.targets))
    codec = pages.codec("fast")
    message = torch.empty(ibp.kv.packed_bytes(codec, pages.num_pages), dtype=torch.uint8, device=run.device)
    yield "pages of Llama-8B", "pack", original, lambda: ibp.kv.pack(pages.paged, codec, blocks=blocks, out=message)
    yield "pages of Llama-8B", "unpack", original, lambda: ibp.kv.unpack(message, codec, out=pages.to, blocks=targets)
    x = normal_rows(run, ROW_BYTES)
    table, num_rows = ibp.compress(x), len(x)
    for size in bags.BAG_ROWS:
        ids = torch.randint(num_rows, (max(1, num_rows // size), size), device=run.device)
        summed = x[:1].expand(ids.numel(), -1)  # This tensor has as many bytes as are read.
        yield f"bags of {size} rows", "embedding_bag", summed, lambda ids=ids: ibp.embedding_bag(table, ids, mode="sum")


def caches_and_deltas(run):
    for row_bytes in CACHED_BYTES:
        x = normal_rows(run, row_bytes)
        table = ibp.compress(x, scheme="planes").cpu()
        cache = ibp.RowCache(
            table.pin_memory() if run.on_gpu else table,
            int(CACHED_SHARE * table.nbytes),
            torch.arange(len(x), 0, -1),
            devices=run.device,
        )
        held = torch.randint(len(x) // 4, (len(x) // 2,), device=run.device)
        mixed = torch.where(torch.rand(len(held), device=run.device) < HIT_SHARE, held, held + len(x) // 4 * 3)
        for arm, ids in (("own hits", held), (f"{HIT_SHARE:.0%} hits", mixed)):
            yield f"a cache of rows of {row_bytes} B", arm, x[: len(ids)], lambda ids=ids: cache.index_select(ids)
    x = normal_rows(run, ROW_BYTES)
    bits = x.view(torch.int16)
    changed = (bits ^ (torch.rand(x.shape, device=run.device) < CHANGED_SHARE).to(torch.int16)).view(torch.bfloat16)
    turns = [ibp.deltas.make({"x": changed}, {"x": x}), ibp.deltas.make({"x": x}, {"x": changed})]
    weights = {"x": x.clone()}

    def there_and_back():
        turns[0].apply_(weights)
        turns.reverse()

    yield f"{CHANGED_SHARE:.1%} changed", "apply", x, there_and_back


def run_calls(args, said):
    """Makes each call twice. The second time it runs under the profiler, after a kernel that sleeps. said: a file that
    gets a line of JSON for each call."""
    run = SimpleNamespace(device=torch.device(args.device), quick=args.quick, on_gpu=args.device == "cuda")
    torch.manual_seed(0)
    with torch.no_grad():
        for calls in (
            rows_in_device_memory(run, args.data),
            products(run),
            pages_and_bags(run),
            caches_and_deltas(run),
        ):
            for case, arm, original, call in calls:
                call()
                if run.on_gpu:
                    torch.cuda.synchronize()
                    torch.cuda.profiler.start()
                    torch.cuda._sleep(1)
                    call()
                    torch.cuda.synchronize()
                    torch.cuda.profiler.stop()
                row_bytes = original[0].numel() * original.itemsize
                said.write(json.dumps([case, arm, len(original), row_bytes, str(original.dtype)]) + "\n")


# ---- the counters --------------------------------------------------------------------------------------------------


def kernels_of(text):
    """Returns a list of kernels for each call. A kernel is a dict of counters. text: the output of `ncu --csv --page
    raw`."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    calls = []
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if not row["ID"]:
            continue  # This is the row of units.
        if "spin_kernel" in row["Kernel Name"]:
            calls.append([])
        elif calls:
            calls[-1].append(row)
    return calls


def value(row, name):
    return float((row.get(name) or "0").replace(",", "") or 0)


def name_of(kernel):
    """Returns a kernel's own name, without namespaces, template arguments and parameters."""
    return re.split(r"[<(]", kernel)[0].split("::")[-1].split()[-1]


def counted(kernels):
    """Returns the columns for the kernel that takes longest, and the time of all kernels in ns."""
    longest = max(kernels, key=lambda row: value(row, DURATION))
    all_ns, own_ns = sum(value(row, DURATION) for row in kernels), value(longest, DURATION)
    found = {
        column: max((value(longest, name) for name in longest if name and re.search(pattern, name)), default=0.0)
        for column, pattern in COUNTERS.items()
    }
    stalls = {match[1]: value(longest, name) for name in longest if name and (match := STALL.match(name))}
    stall = max(stalls, key=stalls.get, default="")
    return {
        "kernel": name_of(longest["Kernel Name"]),
        "us": harness.four_digits(own_ns * 1e-3),
        "share": f"{own_ns / max(all_ns, LEAST_NS):.3f}",
        "launches": len(kernels),
        **{name: f"{number:.1f}" for name, number in found.items()},
        "stall": stall,
        "stall_share": f"{stalls[stall] / max(sum(stalls.values()), 1e-9):.3f}" if stall else "",
        "bound": max(USED, key=found.get),
    }, all_ns


def profiled(args, folder):
    """Returns (calls as run_calls writes them, their kernels). Raises RuntimeError if ncu fails."""
    said, log = folder / "calls.jsonl", folder / "counters.csv"
    sections = [word for name in SECTIONS for word in ("--section", name)]
    options = ["--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
    command = [shutil.which("ncu"), *options, "--clock-control", "none", *sections, "--log-file", str(log)]
    script = [sys.executable, "-m", f"{__package__}.profiles", "--calls", str(said), "--data", str(args.data)]
    done = subprocess.run([*command, *script, *(["--quick"] if args.quick else [])], timeout=LIMIT_S)
    text = log.read_text() if log.exists() else ""
    if done.returncode != 0:
        raise RuntimeError(f"ncu ended with status {done.returncode}: {text[-1000:]}")
    return [json.loads(line) for line in said.read_text().splitlines()], kernels_of(text)


def main(argv=None):
    argv = [*(sys.argv[1:] if argv is None else argv)]
    if "--calls" in argv:  # This process runs under ncu.
        at = argv.index("--calls")
        path = Path(argv[at + 1])
        del argv[at : at + 2]
        with path.open("w") as said:
            run_calls(harness.parse_args(argv, __doc__), said)
        return 0
    args = harness.parse_args(argv, __doc__)
    if args.device == "cpu" or shutil.which("ncu") is None:
        run_calls(args, io.StringIO())
        print("profiles: needs a GPU and ncu: the calls ran, results stay as they are")
        return 0
    run = harness.Run("profiles", args, COLUMNS)
    with tempfile.TemporaryDirectory() as folder, run.cell("ncu"):
        calls, kernels = profiled(args, Path(folder))
        for (case, arm, rows, row_bytes, dtype), own in zip(calls, kernels, strict=True):
            columns, all_ns = counted(own)
            gbps, used = rows * row_bytes / all_ns, float(columns[columns["bound"]])
            run.add(
                case=case,
                arm=arm,
                rows=rows,
                row_bytes=row_bytes,
                dtype=getattr(torch, dtype.removeprefix("torch.")),
                savings=0.0,
                gbps=gbps,
                ideal_gbps=gbps * 100 / used if used else gbps,
                sms=None,
                **columns,
            )
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
