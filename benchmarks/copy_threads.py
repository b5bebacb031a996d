"""How many threads of the CPU, or how many SMs of the GPU, does it take to copy rows (the paper's figure 14)?

    python -m benchmarks.copy_threads [--out DIR] [--device cpu] [--quick]

Random BF16 rows in pinned host memory are brought to the GPU. Either a number of CPU threads gathers them, and they are
copied by `x[ids].to()`, through pinned memory, or pipelined through pinned chunks; or a kernel on a number of SMs
fetches them, raw and compressed. The column `workers` has the number of threads or SMs. Both are measured in one run,
which is expected to take under a minute on an H200. `kv_request.py --workers` measures them within the request of a
language model.
"""

import sys

import torch

import ibp

from . import gather, harness, ideal, inputs
from .cpu_gather import PipelinedGather

COLUMNS = ("workers",)
ROW_BYTES, QUICK_ROW_BYTES = (128, 256, 512, 1024, 4096), (256, 1024)
THREADS, QUICK_THREADS = (1, 2, 4, 8, 16, 32), (1, 2)
SMS = (1, 2, 4, 8, 16, 32, 64)  # A last measurement uses all SMs.
MAX_OUTPUT_BYTES, QUICK_TABLE_BYTES = 32 * inputs.MIB, inputs.MIB
TABLE_BYTES = 128 * inputs.MIB
SAMPLE = 0.1


class Rows(gather.Fetches):
    """A table with one row size, and ids and outputs. No call brings more than MAX_OUTPUT_BYTES."""

    def __init__(self, run, row_bytes):
        num_bytes = QUICK_TABLE_BYTES if run.quick else TABLE_BYTES
        self.x = inputs.normal_rows(num_bytes, torch.bfloat16, 0.02, run.device, columns=row_bytes // 2)
        self.host = torch.empty(self.x.shape, dtype=self.x.dtype, pin_memory=run.on_gpu).copy_(self.x)
        num_rows = len(self.x)
        super().__init__(run, num_rows, row_bytes // 2, torch.bfloat16)
        most = min(num_rows, MAX_OUTPUT_BYTES // row_bytes)
        self.ids, self.cpu_ids = ([ids[:most].clone() for ids in found] for found in (self.ids, self.cpu_ids))
        self.outs = [out[:most] for out in self.outs]
        self.output_bytes = self.outs[0].numel() * 2


def measure(run, arm, rows, call, *, savings, ideal_gbps, sms, workers, wall=False):
    """Checks an arm on poisoned output, then times it. call(k) fetches set k, into its output or into a new one."""
    harness.poison(rows.outs[0])
    harness.check_bits(call(0), rows.x[rows.ids[0]], f"{arm}, {workers}")
    seconds = run.seconds([lambda k=k: call(k) for k in range(len(rows.ids))], wall)
    run.add(
        case="normal 0.02",
        arm=arm,
        rows=len(rows.ids[0]),
        row_bytes=rows.x.shape[1] * 2,
        dtype=rows.x.dtype,
        savings=savings,
        gbps=rows.output_bytes * 1e-9 / seconds,
        ideal_gbps=ideal_gbps,
        sms=sms,
        workers=workers,
    )


def cpu_arms(run, rows):
    """Returns {arm: function(number of a fetch) -> its rows on the GPU}. These are the ways in which the CPU gathers
    rows and has them copied."""
    staging = torch.empty(rows.outs[0].shape, dtype=rows.x.dtype, pin_memory=run.on_gpu)
    pipelined = PipelinedGather(rows.host, len(rows.cpu_ids[0]), run.device)

    def plain(k):
        return rows.host[rows.cpu_ids[k]].to(run.device)

    def pinned(k):
        torch.index_select(rows.host, 0, rows.cpu_ids[k], out=staging)
        return rows.outs[k].copy_(staging, non_blocking=True)

    return {
        "cpu index + copy": plain,
        "cpu pinned": pinned,
        "cpu pipelined": lambda k: pipelined(rows.cpu_ids[k], rows.outs[k]),
    }


def measure_threads(run, rows):
    """Measures torch's index_select with a number of threads, and copies. The wall clock waits for each call's copy."""
    before = torch.get_num_threads()
    try:
        for arm, call in cpu_arms(run, rows).items():
            for threads in QUICK_THREADS if run.quick else THREADS:
                with run.cell(f"{arm}, {threads} threads"):
                    torch.set_num_threads(threads)
                    measure(
                        run, arm, rows, call, savings=0.0, ideal_gbps=ideal.LINK_COPY_GBPS, sms=0, workers=threads,
                        wall=True,
                    )  # fmt: skip
    finally:
        torch.set_num_threads(before)


def measure_sms(run, rows):
    """Measures raw and compressed rows that one kernel fetches."""
    codebook = ibp.codecs.analyze(rows.x, scheme="planes", sample=SAMPLE)
    for arm, options in (("raw rows", {"scheme": "raw"}), ("planes slots", {"codebook": codebook, "layout": "slots"})):
        table = ibp.compress(rows.host, **options)
        ideal_gbps = gather.table_ideal(run, table, rows)
        for sms in (*SMS, run.num_sms) if run.on_gpu else (1,):
            with run.cell(f"{arm}, {sms} SMs"):

                def call(k):
                    return ibp.index_select(table, rows.ids[k], out=rows.outs[k], max_sms=sms)

                measure(
                    run, arm, rows, call, savings=table.savings, ideal_gbps=ideal_gbps, sms=sms if run.on_gpu else None,
                    workers=sms,
                )  # fmt: skip


def main(argv=None):
    run = harness.Run("copy_threads", harness.parse_args(argv, __doc__), COLUMNS)
    for row_bytes in QUICK_ROW_BYTES if run.quick else ROW_BYTES:
        with run.cell(f"rows of {row_bytes} B"):
            rows = Rows(run, row_bytes)
            measure_threads(run, rows)
            measure_sms(run, rows)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
