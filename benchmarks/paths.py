"""Is the way that `index_select` and `decompress` choose by default ever slower than one that the caller can name?

    python -m benchmarks.paths [--out DIR] [--device cpu] [--quick] [--every N] [--pageable]

The rows are every kind of families.py, the real sets, and rows in which 75 and 90 % of the bits are invariant: raw, and
compressed by scheme planes, by scheme ibp and at level "fast". Each kind is measured as a table within the reach of
address translation and as one beyond it (more than 512 MiB as stored), in pinned, device and pageable memory, with few
and many ids, on the GPU and on the CPU. The arms of each case are `chosen`, a call without `path=` and `max_sms=`, and
calls that name a path, with all SMs and with some.

Arms that are timed with the wall clock run in both orders, because threads of the arm before keep running for a while;
the shorter time counts. The target of `chosen` is 0.9 of the fastest of the others. A case that misses it is measured
again before it counts. --pageable measures only the cases of pageable memory, and the CSV keeps the others.
"""

import argparse
import functools
import itertools
import math
import sys

import torch

import ibp
from ibp._machine import memory
from ibp._rows.handle import spread_bytes

from . import families, harness, ideal, inputs
from .large_table import tiled

# In original bytes, and in stored bytes.
NEAR_BYTES, FAR_BYTES, QUICK_BYTES = 128 * inputs.MIB, 640 * inputs.MIB, inputs.MIB // 4
FEW_IDS, MANY_IDS, LONG_IDS = 4096, 65536, 16384  # LONG_IDS replaces MANY_IDS for rows of more than LONG_ROW_BYTES.
LONG_ROW_BYTES = 4096
# A bucketed gather of a table beyond reach gets these numbers of SMs. None stands for all.
SMS = (16, 32, 64, None)
# The chosen call should reach this share of the rate of the fastest call that names its path.
SHARE = 0.9
CHOSEN = "chosen"
GROUP_ROWS = 32  # This many rows of a table share a base (FORMAT.md).
NUM_SETS = 2  # There are this many sets of ids and of results.
SPARSE = (("synthetic 75%", 0.75), ("synthetic 90%", 0.9))  # Each kind has (name, savings).
SPARSE_ROW_BYTES = (512, 2048)


# ---- tables ----------------------------------------------------------------------------------------------------------


def kinds(run, data_dir):
    """Yields (name, rows on the device, {scheme: options of `ibp.compress` that select it})."""

    def num_rows(row_bytes):
        """Returns a number of rows in whole groups that share a base, so that a table can be repeated."""
        return max(1, (QUICK_BYTES if run.quick else NEAR_BYTES) // row_bytes // GROUP_ROWS) * GROUP_ROWS

    for name, _, dtype, columns, make in families.CASES:
        x = make(num_rows(columns * dtype.itemsize), columns, run.device).to(dtype)
        yield name, x, {"raw": {"scheme": "raw"}, "planes": {"scheme": "planes"}, "ibp": {"scheme": "ibp"}}
        if dtype == torch.bfloat16 and make is families.weights:
            yield name, x, {"fast": {"level": "fast"}}
    for row_bytes in SPARSE_ROW_BYTES:
        for name, savings in SPARSE:
            mask, bitval = inputs.synthetic_mask(row_bytes, savings)
            codebook = ibp.codecs.Codebook.from_masks(mask, bitval, chunk_bytes=inputs.CHUNK_BYTES)
            x = inputs.agreeing_rows(num_rows(row_bytes), mask, bitval, run.device)
            yield name, x, {"ibp": {"codebook": codebook}}
    for name, rows in inputs.real_sets(data_dir):
        x = inputs.replicated(rows, num_rows(rows.shape[1] * rows.dtype.itemsize), run.device)
        yield name, x, {"planes": {"scheme": "planes"}, "ibp": {"scheme": "ibp"}}


def every_table(run, data_dir):
    """Yields (name, rows, scheme, function that compresses the rows with it)."""
    for name, x, schemes in kinds(run, data_dir):
        for scheme, options in schemes.items():
            yield name, x, scheme, functools.partial(ibp.compress, x, layout="slots", **options)


# ---- measuring -------------------------------------------------------------------------------------------------------


class Case:
    """Calls that do the same work in different ways, and the result that they should have."""

    def __init__(self, run, what, x, table, num_rows, ideal_gbps, wall=False):
        self.run, self.what, self.x, self.table, self.wall = run, what, x, table, wall
        self.num_rows, self.ideal_gbps = num_rows, ideal_gbps
        self.num_bytes = num_rows * x.shape[1] * x.dtype.itemsize
        shape = num_rows, x.shape[1]
        self.outs = [torch.empty(shape, dtype=x.dtype, device=run.device) for _ in range(NUM_SETS)]

    def seconds(self, arm, call, wanted):
        """Checks set 0 against the wanted rows, and times call(k), which writes set k to self.outs[k]."""
        harness.poison(self.outs[0])
        call(0)
        harness.check_bits(self.outs[0], wanted, f"{self.what}, {arm}")
        return self.run.seconds([functools.partial(call, k) for k in range(NUM_SETS)], self.wall)

    def compare(self, make, arms, wanted):
        """Times all arms, and a second time if the chosen one misses its target. make(path, sms): returns the call of
        an arm. arms: {name: (path, sms)} of the arms that name a path."""
        arms = {**arms, CHOSEN: (None, None)}
        for is_last in (False, True):
            orders = [list(arms), list(arms)[::-1]] if self.wall else [list(arms)]
            named: dict[str, float] = {}
            for arm in itertools.chain(*orders):
                named[arm] = min(named.get(arm, math.inf), self.seconds(arm, make(*arms[arm]), wanted))
            chosen = named.pop(CHOSEN)
            if is_last or SHARE * chosen <= min(named.values(), default=math.inf):
                break
        del arms[CHOSEN]
        for arm, (_, sms) in arms.items():
            self.add(arm, sms, named[arm], {})
        best_s = min(named.values(), default=chosen)
        target = SHARE * self.num_bytes * 1e-9 / best_s
        self.add(CHOSEN, None, chosen, harness.judged(self.num_bytes * 1e-9 / chosen, target))

    def add(self, arm, sms, seconds, judged):
        self.run.add(
            case=self.what,
            arm=arm,
            rows=self.num_rows,
            row_bytes=self.x.shape[1] * self.x.dtype.itemsize,
            dtype=self.x.dtype,
            savings=self.table.savings,
            gbps=self.num_bytes * 1e-9 / seconds,
            ideal_gbps=self.ideal_gbps,
            sms=sms,
            **judged,
        )


def named_paths(run, place, ids_on_gpu, is_far):
    """Returns {arm: (path, max_sms)} of the calls that name a path which can be taken."""
    if not run.on_gpu:
        return {}
    if place == "pageable":
        return {"cpu": ("cpu", None)}
    arms = {"gpu": ("gpu", None)}
    if ids_on_gpu:
        arms["gpu, 16 SMs"] = "gpu", 16
        for sms in SMS if is_far and place == "pinned" else (16, None):
            arms["bucketed, all SMs" if sms is None else f"bucketed, {sms} SMs"] = "bucketed", sms or run.num_sms
        return arms
    arms["bucketed"] = "bucketed", None
    return arms | ({"cpu": ("cpu", None)} if place == "pinned" else {})


def measure_gathers(run, what, x, small, table, place, num_ids, ids_on_gpu):
    """Measures index_select of num_ids random rows, or as many as there are. small: the table that `table` repeats."""
    num_ids = min(num_ids, table.shape[0])
    sets = [torch.randint(table.shape[0], (num_ids,), device=run.device) for _ in range(NUM_SETS)]
    distinct = torch.cat(sets) % len(x)
    output_bytes = num_ids * x.shape[1] * x.dtype.itemsize
    link_ns = ideal.row_link_ns(small, distinct)
    of_link = ideal.gather_gbps(output_bytes * NUM_SETS, link_ns, run.memset_gbps)
    ideal_gbps = run.memset_gbps if place == "device" else of_link
    where = "GPU" if ids_on_gpu else "CPU"
    case = Case(run, f"{what}, {num_ids:,} ids on the {where}", x, table, num_ids, ideal_gbps, wall=not ids_on_gpu)
    ids = sets if ids_on_gpu else [some.cpu() for some in sets]

    def make(path, sms):
        return lambda k: ibp.index_select(table, ids[k], out=case.outs[k], path=path, max_sms=sms)

    is_far = spread_bytes(table) > NEAR_BYTES
    case.compare(make, named_paths(run, place, ids_on_gpu, is_far), x[sets[0] % len(x)])


def measure_whole(run, what, x, table, place):
    """Measures decompress of a whole table."""
    case = Case(run, f"{what}, whole", x, table, len(x), ideal.LINK_COPY_GBPS / (1 - table.savings), wall=True)

    def make(path, sms):
        return lambda k: ibp.decompress(table, out=case.outs[k], path=path)

    named = {path: (path, None) for path in ("gpu", "copy")} if run.on_gpu and place == "pinned" else {}
    case.compare(make, named, x)


def measure_pageable(run, what, x, near, compress, num_ids):
    with run.cell(f"{what}, pageable"):
        pageable = compress(memory="host")
        measure_gathers(run, f"{what}, near, pageable", x, near, pageable, "pageable", num_ids, False)


def measure_table(run, name, x, scheme, compress, buffer, only_pageable):
    """Measures a table near and far, in every memory. Rows that the scheme cannot make smaller are left out."""
    near = compress(memory="pinned" if run.on_gpu else "host")
    if near.scheme == "raw" and scheme != "raw":
        return
    num_ids = LONG_IDS if x.shape[1] * x.dtype.itemsize > LONG_ROW_BYTES else MANY_IDS
    few, many = (64, 256) if run.quick else (FEW_IDS, num_ids)
    what = f"{name}, {scheme}"
    if only_pageable:
        measure_pageable(run, what, x, near, compress, many)
        return
    far_bytes = QUICK_BYTES if run.quick else FAR_BYTES
    far = tiled(near, -(-far_bytes // spread_bytes(near)) * len(x), buffer(near, far_bytes))
    for size, table in (("near", near), ("far", far)):
        for ids_on_gpu, count in ((True, few), (True, many), (False, few), (False, many)):
            with run.cell(f"{what}, {size}"):
                measure_gathers(run, f"{what}, {size}, pinned", x, near, table, "pinned", count, ids_on_gpu)
        if run.on_gpu:
            with run.cell(f"{what}, {size}, device"):
                measure_gathers(run, f"{what}, {size}, device", x, near, table.to(run.device), "device", many, True)
    measure_pageable(run, what, x, near, compress, many)
    with run.cell(f"{what}, whole"):
        measure_whole(run, f"{what}, near, pinned", x, near, "pinned")


def main(argv=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--pageable", action="store_true")
    options, others = own.parse_known_args(argv)
    only_pageable, args = options.pageable, harness.parse_args(others, __doc__)
    run = harness.Run(
        "paths", args, harness.TARGET_COLUMNS, keep=lambda row: only_pageable and ", pageable, " not in row["case"]
    )
    torch.manual_seed(0)
    held = memory.empty(0, torch.device("cpu"), pin=run.on_gpu)

    def buffer(table, far_bytes):
        """Returns pinned memory for the slots of a table that is repeated until it has far_bytes."""
        nonlocal held
        num_bytes = -(-far_bytes // spread_bytes(table)) * table.slots.numel()
        if held.numel() < num_bytes:
            held = memory.empty(num_bytes, torch.device("cpu"), pin=run.on_gpu)
        return held

    for name, x, scheme, compress in run.some(every_table(run, args.data)):
        with run.cell(f"{name} {harness.dtype_name(x.dtype)}, {scheme}"):
            measure_table(run, name, x, scheme, compress, buffer, only_pageable)
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
