"""What does it cost to read and change slots on the GPU whose overflow is in pinned host memory, or on another GPU
(ibp.spill.place)?

    python -m benchmarks.spill [--programs | --managed | --peer] [--out DIR] [--device cpu] [--quick]

Tables have 1 GiB in device memory. A share of the rows is noise, which overflows its slots. `decode` decodes the whole
table, and `index_select` half of its rows in random order; `device only` has the overflow on the GPU, too, and
`spilled` has it in host memory; `update_` changes every 16th row. Slots have a size that the other rows fit, or that of
a target ratio, also for real sets. `pages` are loads from an `ibp.kv.KVStore` of keys, with slots for 99.9 % of the
rows, and with smaller ones that spill.

`profile` takes ten snapshots of a net in training. At each threshold of the sweep it has what the last one spills when
it is placed, what was predicted, and the least and the most that was predicted for any snapshot. There are the paper's
ratios, slots of any size, `without 16 times` (which the paper keeps for zeros), and `one target` for all tensors, the
highest with which at most 30 % of all rows overflow. `ideal_gbps` of a spilled arm is the device's rate, or that at
which the link brings what spilled if that is slower. All results are compared bit for bit.

--programs measures only profiles of nets in training in single precision, of their weights, gradients, momentum and
layers' outputs of at least 1 MiB, in rows of 2 KiB. --managed measures only tables of 1 GiB in managed memory. A share
of their pages is on the host before a kernel reads all of them, as after the driver has evicted them: `migrated` by
page faults, or `read over the link`, where they stay. Beside them `slots and overflow` decodes a table of as many
random bytes, which no codebook makes smaller, with the same share of every row in overflow. No more memory is taken
than the GPU has free, because a driver that has to do more can stop a machine. --peer needs two GPUs. It measures
tables with overflow on the second GPU, `spilled to a GPU`, beside the other two places: BF16 weights in rows of 2,048
and of 128 bytes, and the random bytes of --managed. Other rows of the CSV stay, and these rows stay in runs without the
options.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
import sys

import torch

import ibp
from ibp import spill

from . import densities, families, harness, ideal, inputs, row_cache, scattered

COLUMNS = (
    *(
        "target",
        "slot_bytes",
        "spilled",
        "predicted_spilled",
        "least_spilled",
        "most_spilled",
        "spilled_bytes",
        "device_bytes",
        "host_bytes",
    ),
    *harness.TARGET_COLUMNS,
)
TABLE_BYTES, SMALL_TABLE_BYTES, QUICK_TABLE_BYTES = 1024 * inputs.MIB, 256 * inputs.MIB, inputs.MIB
DEVICE, SPILLED, ON_PEER = "device only", "spilled", "spilled to a GPU"
DECODE, SELECT, UPDATE = "decode", "index_select", "update_"
SHARES, FEW_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3), (0.0, 0.2)
RATIOS = (4 / 3, 2.0, 4.0)
BF16, FP32 = torch.bfloat16, torch.float32
NUM_SNAPSHOTS, PAGE_BYTES = 10, 1 << 16
REAL = {"LLM keys": RATIOS, "citeseer": (4.0, 16.0, 64.0, math.inf)}

# Targets: a share of the device's rate if nothing spills, and a share of the ideal if at most MOST_SPILLED of the rows
# do.
DEVICE_SHARE, IDEAL_SHARE, MOST_SPILLED = 0.9, 1 / 1.15, 0.31


def ids_in_runs(rows, columns, device):
    """Returns sorted numbers below 2^20 in each row, like edges of a graph."""
    return torch.randint(1 << 20, (rows, columns), device=device).sort(1).values


SMALL = ", 256 MiB"  # The names of smaller tables' cases end with this text.
SHORT = ", 128 bytes"  # These rows have the size of Buddy Compression's memory-entries.
PEER = "two GPUs, "  # The names of cases with overflow on another GPU begin with this text.
PEER_CASES = ("normal 0.02", "normal 0.02" + SHORT)
# Each case has (name, level, dtype, columns, maker, shares of noise, target ratios).
CASES = (
    ("normal 0.02", "default", BF16, 1024, families.weights, SHARES, RATIOS),
    ("normal 0.02" + SMALL, "default", BF16, 1024, families.weights, SHARES, ()),
    ("normal 0.02" + SHORT, "default", BF16, 64, families.weights, FEW_SHARES, (1.0, *RATIOS)),
    ("normal 0.02, fast", "fast", BF16, 1024, families.weights, SHARES, ()),
    ("normal 1", "default", FP32, 512, families.normal, FEW_SHARES, (4 / 3,)),
    ("half zeros", "default", BF16, 1024, families.masked, FEW_SHARES, (2.0,)),
    ("half zeros", "default", FP32, 512, families.masked, FEW_SHARES, (2.0,)),
    ("normal 1", "default", torch.float8_e4m3fn, 2048, families.normal, FEW_SHARES, ()),
    ("sorted ids", "default", torch.int64, 256, ids_in_runs, FEW_SHARES, (2.0, 4.0)),
    ("half zeros" + SHORT, "default", FP32, 32, families.masked, FEW_SHARES, (4 / 3, 2.0)),
    ("sorted ids" + SHORT, "default", torch.int64, 16, ids_in_runs, FEW_SHARES, (2.0,)),
)


def with_noise(x, share):
    """Returns x with random bits in a random share of its rows."""
    is_noise = torch.rand(len(x), device=x.device) < share
    x = x.clone()
    words = torch.randint(-(2**31), 2**31 - 1, (int(is_noise.sum()), x[0].nbytes // 4), device=x.device)
    x[is_noise] = words.to(torch.int32).view(x.dtype)
    return x


class Case:
    """Rows of one kind, and a codebook for them. peer: the memory of overflow on another GPU, or None."""

    def __init__(self, run, name, x, level, peer=None):
        self.run, self.name, self.x, self.peer = run, name, x, peer
        self.codebook = ibp.codecs.analyze(x, scheme="planes", sample=families.SAMPLE, level=level)
        self.ids = torch.randperm(len(x), device=run.device)[: len(x) // 2]

    def measure(self, x, slot_bytes, target=None):
        """Measures reading and changing a table with these slots, with overflow in all places."""
        layout = {"slot_bytes": slot_bytes} if slot_bytes else {"layout": "packed"}
        tables = {
            DEVICE: ibp.compress(x, codebook=self.codebook, **layout),
            SPILLED: ibp.spill.place(x, slot_bytes=slot_bytes, codebook=self.codebook),
        }
        if self.peer is not None:
            tables[ON_PEER] = ibp.spill.place(
                x, slot_bytes=slot_bytes, codebook=self.codebook, overflow_memory=self.peer
            )
        found = {"target": target, "x": x, "seconds": {}, "spill": spill_of(tables[DEVICE])}
        for where, table in tables.items():
            self.read(table, where, DECODE, found, lambda table, out: ibp.decompress(table, out=out), x)
            selected = x[self.ids]
            self.read(
                table, where, SELECT, found, lambda table, out: ibp.index_select(table, self.ids, out=out), selected
            )
        for where, table in tables.items():
            self.change(table, where, found)

    def read(self, table, where, what, found, read, want):
        outs = [torch.empty_like(want) for _ in range(self.run.rotation(want.nbytes))]
        harness.poison(outs[0])
        read(table, outs[0])
        table.check()
        harness.check_bits(outs[0], want, f"{self.name}, {where}, {what}")
        seconds = self.run.seconds([lambda out=out: read(table, out) for out in outs])
        self.record(table, where, what, found, seconds, want.nbytes)

    def change(self, table, where, found):
        """Measures changes in which every 16th row becomes the first or second one before it, so that noise moves."""
        ids = torch.arange(0, len(found["x"]), 16, device=self.run.device)
        rows = [found["x"][ids - shift] for shift in (1, 2)]
        table.update_(ids, rows[1])
        want = found["x"].clone()
        want[ids] = rows[1]
        got = ibp.decompress(table, device=self.run.device)
        harness.check_bits(got, want, f"{self.name}, {where}, {UPDATE}")
        seconds = self.run.seconds([lambda new=new: table.update_(ids, new) for new in rows], wall=True)
        self.record(table, where, UPDATE, found, seconds, rows[0].nbytes)

    def record(self, table, where, what, found, seconds, num_bytes):
        spilled, spilled_bytes = found["spill"]
        if where == DEVICE:
            found["seconds"][what] = seconds
        least = max(found["seconds"][what], link_seconds(spilled_bytes * num_bytes / found["x"].nbytes, where))
        gbps, ideal_gbps = num_bytes * 1e-9 / seconds, num_bytes * 1e-9 / least
        share = DEVICE_SHARE if spilled == 0 else IDEAL_SHARE
        is_judged = where == SPILLED and what != UPDATE and spilled <= MOST_SPILLED
        self.run.add(
            case=self.name,
            arm=f"{what}, {where}",
            rows=len(found["x"]),
            row_bytes=table.row_bytes,
            dtype=found["x"].dtype,
            savings=table.savings,
            gbps=gbps,
            ideal_gbps=ideal_gbps,
            sms=None,
            target="" if found["target"] is None else f"{found['target']:.3g}",
            slot_bytes=table.slot_bytes,
            spilled=f"{spilled:.4f}",
            spilled_bytes=spilled_bytes,
            device_bytes=table.nbytes if where == DEVICE else table.nbytes - table.overflow.numel(),
            host_bytes=table.overflow.numel() if where == SPILLED else 0,
            **harness.judged(gbps, share * ideal_gbps if is_judged else None),
        )


def spill_of(table):
    """Returns (share of a table's rows that overflow their slots, bytes of these parts in whole sectors)."""
    parts = (ideal.stored_row_bytes(table) - table.slot_bytes).clamp(min=0)
    sectors = (parts + ideal.SECTOR_BYTES - 1) // ideal.SECTOR_BYTES
    return float((parts > 0).double().mean()), int(sectors.sum()) * ideal.SECTOR_BYTES


def link_seconds(num_bytes, where=SPILLED):
    return num_bytes * 1e-9 / (row_cache.PEER_GBPS if where == ON_PEER else ideal.LINK_KERNEL_GBPS)


def measure_kinds(run, cases, peer=None):
    for name, level, dtype, columns, make, shares, ratios in cases:
        num_bytes = SMALL_TABLE_BYTES if name.endswith(SMALL) else TABLE_BYTES
        num_bytes = QUICK_TABLE_BYTES if run.quick else num_bytes
        with run.cell(f"{name} {harness.dtype_name(dtype)}"):
            x = make(num_bytes // (columns * dtype.itemsize), columns, run.device).to(dtype)
            case = Case(run, name if peer is None else f"{PEER}{name}", x, level, peer)
            slot_bytes = fitting(case)
            for share in shares:
                case.measure(with_noise(case.x, share), slot_bytes)
            for ratio in ratios:
                case.measure(case.x, spill.slot_bytes_of(ratio, case.codebook.row_bytes), ratio)


def fitting(case):
    """Returns the slots that all rows of a case fit."""
    stored = ideal.stored_row_bytes(ibp.compress(case.x, codebook=case.codebook, layout="packed"))
    return min(case.codebook.row_bytes, -(-int(stored.max()) // 32) * 32)


def measure_real(run, data):
    num_bytes = QUICK_TABLE_BYTES if run.quick else SMALL_TABLE_BYTES
    for name, rows in inputs.real_sets(data):
        if name not in REAL:
            continue
        with run.cell(name):
            x = inputs.replicated(rows, max(1, num_bytes // rows[0].nbytes), run.device)
            case = Case(run, name, x, "default")
            for ratio in REAL[name]:
                case.measure(x, spill.slot_bytes_of(ratio, case.codebook.row_bytes), ratio)


# ---- pages of a KV-cache -------------------------------------------------------------------------------------------


def measure_pages(run, data):
    """Measures keys in pages, with slots for nearly all rows, and with ones that more and more rows overflow."""
    found = dict(inputs.real_sets(data))
    if "LLM keys" not in found:
        return
    num_pages = 4 if run.quick else 4096
    rows, num_bytes = found["LLM keys"], num_pages * PAGE_BYTES
    x = inputs.replicated(rows, num_bytes // rows[0].nbytes + 1, run.device)
    x = x.view(-1)[: num_bytes // x.itemsize].view(num_pages, -1)
    usual = ibp.kv.KVStore(x, page_bytes=PAGE_BYTES, num_pages=num_pages, device=run.device, memory="device")
    seconds = {}
    all_sms = torch.cuda.get_device_properties(run.device).multi_processor_count if run.on_gpu else None
    for slots in range(0, 5):
        slot_bytes = usual.place.slot_bytes - 32 * slots
        overflow_memory = "pinned" if slots else None
        with run.cell(f"pages, slots of {slot_bytes}"):
            store = ibp.kv.KVStore(
                usual.codebook, page_bytes=PAGE_BYTES, num_pages=num_pages, slot_bytes=slot_bytes,
                overflow_bytes=None if slots else usual.place.overflow.numel(),
                device=run.device, memory="device", overflow_memory=overflow_memory,
            )  # fmt: skip
            if store.store(range(num_pages), x).lost():
                raise AssertionError("pages were lost")
            out, numbers = torch.empty_like(x), torch.arange(num_pages, device=run.device)
            store.load(numbers, out).synchronize()
            harness.check_bits(out, x, f"pages, slots of {slot_bytes}")
            store.check()
            seconds[slots] = run.seconds([lambda: store.load(numbers, out, max_sms=all_sms).wait()])
            spilled, spilled_bytes = spill_of(store.place.table())
            least = max(seconds[0], link_seconds(spilled_bytes if slots else 0))
            run.add(
                case="pages of LLM keys", arm=f"load, {SPILLED if slots else DEVICE}", rows=store.place.num_rows,
                row_bytes=store.place.row_bytes, dtype=x.dtype, savings=1 - 1 / store.gain,
                gbps=x.nbytes * 1e-9 / seconds[slots], ideal_gbps=x.nbytes * 1e-9 / least, sms=None,
                target=f"{store.gain:.3g}", slot_bytes=slot_bytes, spilled=f"{spilled:.4f}",
                spilled_bytes=spilled_bytes, device_bytes=store.pool_bytes + store.index_bytes,
                host_bytes=store.place.overflow.numel() if slots else 0,
            )  # fmt: skip


# ---- a net in training ---------------------------------------------------------------------------------------------


def snapshots(run):
    """Yields the tensors of a net with an embedding and layers with ReLU, at ten moments of its training: weights,
    states of AdamW, and outputs of layers."""
    rows, width = (256, 64) if run.quick else (50_000, 1024)
    kind = {"device": run.device, "dtype": BF16}
    table = torch.nn.Embedding(rows, width // 4, **kind)
    layers = [torch.nn.Linear(a, width, **kind) for a in (width // 4, width, width)]
    net = torch.nn.ModuleList([table, *layers])
    states = {name: [torch.zeros_like(weight) for _ in range(2)] for name, weight in net.named_parameters()}
    for _ in range(2 if run.quick else NUM_SNAPSHOTS):
        for _ in range(3):
            ids = (
                rows * torch.rand(256 if run.quick else 4096, device=run.device) ** 6
            ).long()  # Few rows come often, and most rows never.
            hidden, kept = table(ids), {}
            for k, layer in enumerate(layers):
                hidden = layer(hidden).relu()
                kept[f"activation {k}"] = hidden.detach()
            (hidden.float().mean(1) - ids / rows).square().mean().backward()
            step(net, states)
        weights = {name: weight.detach() for name, weight in net.named_parameters()}
        moments = {f"{kind} of {name}": x for name, pair in states.items() for kind, x in zip("mv", pair)}
        yield {name: x for name, x in {**weights, **moments, **kept}.items() if x.dim() == 2}


@torch.no_grad()
def step(net, states, rate=1e-3):
    """Makes a step of Adam without its bias corrections."""
    for name, weight in net.named_parameters():
        m, v = states[name]
        m.lerp_(weight.grad, 0.1)
        v.mul_(0.999).addcmul_(weight.grad, weight.grad, value=0.001)
        weight.addcdiv_(m, v.sqrt().add_(1e-8), value=-rate)
        weight.grad = None


PROGRAMS = ("AlexNet", "VGG16", "SqueezeNet", "GoogLeNet", "ResNet-50", "LSTM")
PROGRAM_BATCH, PROGRAM_ROW_BYTES, PROGRAM_LEAST_BYTES, STEPS_BETWEEN = 32, 2048, 1 << 20, 4
PROGRAM = "program "  # The names of programs' cases begin with this text.


class LanguageModel(torch.nn.Module):
    """A model with an embedding and two layers of LSTM for tokens [N, tokens]. width: that of all layers."""

    def __init__(self, tokens, width):
        super().__init__()
        self.embedding = torch.nn.Embedding(tokens, width)
        self.lstm = torch.nn.LSTM(width, width, 2, batch_first=True)
        self.out = torch.nn.Linear(width, tokens)

    def forward(self, ids):
        self.hidden = self.lstm(self.embedding(ids))[0]
        return self.out(self.hidden)


class Program:
    """A net in training by SGD with momentum on data that are made here. small: a narrow net."""

    def __init__(self, device, name, small, batch=PROGRAM_BATCH):
        self.name, self.device = name, device
        torch.manual_seed(0)
        self.batch, self.image = (4, 96) if small else (batch, 224)
        if name == "LSTM":
            self.tokens = 64 if small else 8192
            self.net = LanguageModel(self.tokens, 32 if small else 1024).to(device)
        else:
            self.net = densities.started(densities.Plan(name, self.image, self.batch, 1, 0.05 if small else 1), device)
            self.images = densities.Images(self.image, device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), densities.LEARNING_RATE, densities.MOMENTUM)

    def step(self):
        if self.name == "LSTM":  # Each token determines the next one.
            first = torch.randint(self.tokens, (self.batch, 1), device=self.device)
            ids = (first + torch.arange(65, device=self.device) ** 2) % self.tokens
            self.x, wanted = ids[:, :-1], ids[:, 1:].flatten()
        else:
            self.x, wanted = self.images.draw(self.batch)
        scores = self.net(self.x)
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, -2), wanted)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        self.optimizer.step()

    def snapshot(self, least_bytes):
        """Returns {name: tensor} of what the program holds, for tensors of at least least_bytes."""
        held = {}
        for name, weight in self.net.named_parameters():
            held |= {name: weight.detach(), f"gradient of {name}": weight.grad}
            held[f"momentum of {name}"] = self.optimizer.state[weight]["momentum_buffer"]
        if self.name == "LSTM":
            held["hidden states"] = self.net.hidden.detach()
        else:
            held |= {f"output {name}": x for name, _, x in densities.outputs_of(self.net, self.x)} | {"images": self.x}
        return {name: x.contiguous() for name, x in held.items() if x.nbytes >= least_bytes}


def program_snapshots(run, name):
    program = Program(run.device, name, run.quick or not run.on_gpu)
    for _ in range(2 if run.quick else NUM_SNAPSHOTS):
        for _ in range(STEPS_BETWEEN):
            program.step()
        yield program.snapshot(PROGRAM_ROW_BYTES if run.quick else PROGRAM_LEAST_BYTES)


def with_ratios(report, ratios):
    """Returns a profile of the same snapshots with other targets to choose from."""
    tensors = {name: dataclasses.replace(tensor, ratios=ratios) for name, tensor in report.items()}
    return ibp.spill.Profile(tensors, report.threshold, report.num_snapshots).at(report.threshold)


def with_one_target(report, most=spill.THRESHOLD):
    """Returns the profile of Buddy Compression's naive way: the highest of its targets with which at most `most` of all
    rows spill."""
    for ratio in sorted(filter(math.isfinite, spill.RATIOS), reverse=True):
        tensors = {
            name: dataclasses.replace(tensor, slot_bytes=spill.slot_bytes_of(ratio, tensor.row_bytes))
            for name, tensor in report.items()
        }
        found = ibp.spill.Profile(tensors, report.threshold, report.num_snapshots)
        if found.rows <= most:
            return found
    raise AssertionError("rows spill without a target")


def spilled_by_snapshot(report):
    """Yields the share of all rows that is predicted to spill, for each snapshot."""
    num_rows = sum(tensor.num_rows for tensor in report.values())
    for k in range(report.num_snapshots):
        yield sum(tensor.spill(k).rows * tensor.num_rows for tensor in report.values()) / num_rows


def measure_profile(run, name, moments, row_bytes=None, sweep=(0.1, 0.2, 0.3, 0.4)):
    """Measures profiles. name: the start of the cases' names. moments: snapshots. sweep: thresholds."""
    last = {}

    def seen():
        for snapshot in moments:
            last.clear()
            last.update(snapshot)
            yield snapshot

    report = ibp.spill.profile(seen(), row_bytes=row_bytes)
    print(f"{name}: {str(report).splitlines()[0]}")
    for kind, threshold, of in placements(report, sweep):
        arm = f"profile, {threshold:.0%}"
        with run.cell(f"{name}, {arm}, {kind}"):
            record_profile(run, f"{name}, {kind}", arm, of, last)


def placements(report, sweep):
    """Yields (kind of slots, threshold, profile) of the same snapshots with slots of every kind."""
    kinds = {"the paper's ratios": report, "slots of any size": with_ratios(report, None)}
    for (kind, of), threshold in itertools.product(kinds.items(), sweep):
        yield kind, threshold, of.at(threshold)
    few = tuple(ratio for ratio in spill.RATIOS if ratio < 16)
    yield "without 16 times", spill.THRESHOLD, with_ratios(report, few)
    yield "one target", spill.THRESHOLD, with_one_target(report)


def record_profile(run, case, arm, report, last):
    """Places the last snapshot as a profile says, and measures decoding it."""
    tables = {name: ibp.spill.place(x, report[name], device=run.device) for name, x in last.items()}
    for name, table in tables.items():
        harness.check_bits(ibp.decompress(table), last[name], name)
    seconds = run.seconds([lambda: [ibp.decompress(table, out=last[name]) for name, table in tables.items()]])
    spills, by_snapshot = [spill_of(table) for table in tables.values()], list(spilled_by_snapshot(report))
    num_rows = sum(table.num_rows for table in tables.values())
    spilled = sum(share * table.num_rows for (share, _), table in zip(spills, tables.values())) / num_rows
    spilled_bytes, num_bytes = sum(size for _, size in spills), report.original_bytes
    moved = num_bytes + sum(table.stored_bytes for table in tables.values())
    least = max(moved * 1e-9 / (2 * run.memset_gbps), link_seconds(spilled_bytes))
    run.add(
        case=case, arm=arm, rows=num_rows, row_bytes=0, dtype=next(iter(last.values())).dtype,
        savings=1 - 1 / report.best_ratio, gbps=num_bytes * 1e-9 / seconds, ideal_gbps=num_bytes * 1e-9 / least,
        sms=None, target=f"{report.ratio:.3g}", slot_bytes="", spilled=f"{spilled:.4f}",
        predicted_spilled=f"{report.rows:.4f}", least_spilled=f"{min(by_snapshot):.4f}",
        most_spilled=f"{max(by_snapshot):.4f}", spilled_bytes=spilled_bytes,
        device_bytes=sum(table.nbytes - table.overflow.numel() for table in tables.values()),
        host_bytes=sum(table.overflow.numel() for table in tables.values()),
    )  # fmt: skip


def measure_programs(run):
    for name in PROGRAMS:
        with run.cell(f"{PROGRAM}{name}"):
            measure_profile(run, f"{PROGRAM}{name}", program_snapshots(run, name), PROGRAM_ROW_BYTES, sweep=(0.3,))
        if run.on_gpu:
            torch.cuda.empty_cache()


# ---- managed memory ------------------------------------------------------------------------------------------------

MANAGED, MANAGED_READS = "managed memory", 3
MANAGED_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
MIGRATED, OVER_LINK, PLACED = "migrated", "read over the link", "slots and overflow"
NOISE, NOISE_ROW_BYTES = "random bytes", 2560  # The shares of such a row are multiples of 128 bytes.


def noise(run):
    """Returns random numbers, int32 [rows, numbers of a row]."""
    num_bytes = QUICK_TABLE_BYTES if run.quick or not run.on_gpu else TABLE_BYTES
    shape = num_bytes // NOISE_ROW_BYTES, NOISE_ROW_BYTES // 4
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=run.device)


def measure_placed(run, case, homes):
    """Measures decoding tables of random bytes, with the wall clock as `measure_managed`. homes: (arm, place of the
    overflow, memory of the overflow)."""
    x = noise(run)
    out = torch.empty_like(x)
    for arm, where, home in homes:
        first_s = None
        for share in MANAGED_SHARES:
            with run.cell(f"{case}, {arm}, {share:.0%}"):
                part = round(share * NOISE_ROW_BYTES)
                table = ibp.spill.place(
                    x, slot_bytes=NOISE_ROW_BYTES - part, scheme="planes", device=run.device, overflow_memory=home
                )
                harness.poison(out)
                ibp.decompress(table, out=out)
                harness.check_bits(out, x, f"{case}, {arm}")
                times = [run._wall_seconds(lambda: ibp.decompress(table, out=out)) for _ in range(MANAGED_READS)]
                seconds, spilled_bytes = statistics.median(times), part * len(x)
                first_s = first_s or seconds
                run.add(
                    case=case, arm=arm, rows=len(x), row_bytes=NOISE_ROW_BYTES, dtype=x.dtype, savings=table.savings,
                    gbps=x.nbytes * 1e-9 / seconds,
                    ideal_gbps=x.nbytes * 1e-9 / max(first_s, link_seconds(spilled_bytes, where)), sms=None,
                    slot_bytes=table.slot_bytes, spilled=f"{part / NOISE_ROW_BYTES:.4f}", spilled_bytes=spilled_bytes,
                    device_bytes=table.nbytes - table.overflow.numel(),
                    host_bytes=table.overflow.numel() if where == SPILLED else 0,
                )  # fmt: skip


def measure_managed(run):
    """Measures Buddy Compression's figure 12 with the wall clock, because a missing page interrupts the CPU."""
    x = noise(run).view(-1)
    num_bytes = x.nbytes
    out, managed = torch.empty_like(x), scattered.ManagedCopy(x) if run.on_gpu else None
    source = x if managed is None else managed.tensor
    first_s = None
    # Shares only grow, because advice to the driver cannot be taken back.
    for way, share in itertools.product((MIGRATED, OVER_LINK), MANAGED_SHARES):
        start = num_bytes - int(share * num_bytes) // inputs.MIB * inputs.MIB
        with run.cell(f"{MANAGED}, {way}, {share:.0%}"):
            if managed is not None and way == OVER_LINK and start < num_bytes:
                managed.stay_on_host(start)
            times = []
            for _ in range(MANAGED_READS):
                if managed is not None and way == MIGRATED and start < num_bytes:
                    managed.to_host(start)
                times.append(run._wall_seconds(lambda: torch.add(source, 0, out=out)))
            harness.check_bits(out, x, MANAGED)
            seconds = statistics.median(times)
            first_s = first_s or seconds
            run.add(
                case=MANAGED, arm=way, rows=1, row_bytes=num_bytes, dtype=x.dtype, savings=0.0,
                gbps=num_bytes * 1e-9 / seconds,
                ideal_gbps=num_bytes * 1e-9 / max(first_s, link_seconds(num_bytes - start)), sms=None,
                spilled=f"{1 - start / num_bytes:.4f}", spilled_bytes=num_bytes - start,
                device_bytes=start, host_bytes=num_bytes - start,
            )  # fmt: skip
    measure_placed(run, MANAGED, [(PLACED, SPILLED, "pinned")])


# ---- overflow on another GPU ---------------------------------------------------------------------------------------


def peer_of(device):
    """Returns the name of a GPU whose memory the current GPU can read, or None if there is none. On the CPU, where
    overflow has only one place, returns "pinned"."""
    if device == "cpu":
        return "pinned"
    near = torch.cuda.current_device()
    others = (gpu for gpu in range(torch.cuda.device_count()) if gpu != near)
    return next((f"cuda:{far}" for far in others if torch.cuda.can_device_access_peer(near, far)), None)


def measure_peer(run):
    peer = peer_of(run.device.type)
    measure_kinds(run, [case for case in CASES if case[0] in PEER_CASES], peer)
    homes = [(f"{PLACED}, {SPILLED}", SPILLED, "pinned"), (f"{PLACED}, {ON_PEER}", ON_PEER, peer)]
    measure_placed(run, f"{PEER}{NOISE}", homes)


def mode_of(case):
    """Returns the option that measures a case."""
    modes = {PROGRAM: "programs", MANAGED: "managed", PEER: "peer"}
    return next((mode for start, mode in modes.items() if case.startswith(start)), "")


def parsed(argv):
    own = argparse.ArgumentParser(add_help=False)
    for mode in ("programs", "managed", "peer"):
        own.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, default="")
    options, others = own.parse_known_args(argv)
    return options.mode, harness.parse_args(others, __doc__)


def main(argv=None):
    mode, args = parsed(argv)
    if mode == "peer" and peer_of(args.device) is None:
        print("spill --peer: needs two GPUs of which one reads the other's memory: results stay as they are")
        return 1
    run = harness.Run("spill", args, COLUMNS, keep=lambda row: mode_of(row["case"]) != mode)
    torch.manual_seed(0)
    if mode:
        {"programs": measure_programs, "managed": measure_managed, "peer": measure_peer}[mode](run)
        return run.finish()
    measure_kinds(run, CASES)
    measure_pages(run, args.data)
    measure_real(run, args.data)
    with run.cell("profile"):
        measure_profile(run, "training", snapshots(run), sweep=(0.1, 0.4) if run.quick else (0.1, 0.2, 0.3, 0.4))
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
