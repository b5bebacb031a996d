"""What does a training step of embedding tables cost, compared with a look-up of the same rows?

    python -m benchmarks.dlrm_train [--out DIR] [--device cpu] [--quick]

A table of 1 GiB in pinned memory has the rows of 26 tables one after the other. It is trained with row-wise Adagrad and
batches of 16,384 samples, which have one id per table. Ids are uniform, or follow Zipf's law with exponent 1.05. Arms:
raw and compressed rows with the same code, each also behind a cache on the GPU that has 5 % of the table's bytes and
holds hot rows; and, in FP32, torch's EmbeddingBag (sparse gradients) and Adagrad on the CPU, whose results and
gradients are copied.

A step consists of the forward pass, the backward pass, and the change of rows, which are written back. `us` is the time
of a step, `forward_us` of a forward pass without gradients, and `gather_us` of fetching the batch's rows. `added` is
what the step adds to the forward pass, as a multiple of `gather_us`. `gbps` counts the bytes of all rows that are
looked up. All arms of ibp take the same steps, and afterwards their tables are compared bit for bit.
"""

import statistics
import sys
import time

import torch

import ibp

from . import families, harness, ideal, inputs

COLUMNS = ("us", "forward_us", "gather_us", "added", "distinct_rows")
NUM_TABLES, BATCH, QUICK_BATCH = 26, 16_384, 64
TABLE_BYTES, QUICK_TABLE_BYTES = 1024 * inputs.MIB, inputs.MIB
ROWS = ((256, torch.bfloat16), (128, torch.float32), (1024, torch.bfloat16))  # Each kind of rows has (columns, dtype).
CACHE_SHARE, CACHE_SAMPLES = 0.05, 10
# A step may add at most this multiple of the gather's time to the forward pass.
MOST_ADDED = 1.3
NUM_BATCHES, NUM_STEPS, NUM_CPU_STEPS = 4, 7, 2  # The first steps are not timed.
RAW, IBP, CACHED, CPU = "raw rows", "ibp", " + cache", "torch on the CPU"
LEARNING_RATE = 0.001


def uniform_ids(num_ids, num_rows, device):
    return torch.randint(num_rows, (num_ids,), device=device)


def zipf_ids(num_ids, num_rows, device):
    return inputs.scattered(inputs.zipf_ranks(num_ids, num_rows, device), num_rows)


IDS = {"uniform": uniform_ids, f"Zipf {inputs.ZIPF_EXPONENT}": zipf_ids}


class Arm:
    """ibp's module and optimizer over a table."""

    def __init__(self, table, device, hotness=None):
        cache = None
        if hotness is not None:
            budget = int(CACHE_SHARE * ideal.original_bytes(table))
            cache = ibp.RowCache(table, budget, hotness, devices=device, writable=True)
        self.source, self.num_steps = table if cache is None else cache, NUM_STEPS
        self.module = ibp.nn.EmbeddingBag(table, mode="sum", trainable=True, cache=cache)
        self.optimizer = ibp.optim.RowWiseAdagrad(self.module, lr=LEARNING_RATE)

    def pooled(self, ids):
        return self.module(ids)

    def forward(self, ids):
        with torch.no_grad():
            self.pooled(ids)

    def gather(self, ids):
        self.source.index_select(ids.view(-1))

    def step(self, ids, grad):
        self.optimizer.zero_grad()
        self.pooled(ids).backward(grad)
        self.optimizer.step()


class CpuArm(Arm):
    """torch's modules on the CPU. Their results and gradients are copied to and from the device that trains."""

    def __init__(self, table, device):
        self.device, self.num_steps = device, NUM_CPU_STEPS
        weight = table.decompress(device="cpu")
        self.module = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum", freeze=False, sparse=True)
        self.optimizer = torch.optim.Adagrad(self.module.parameters(), lr=LEARNING_RATE)

    def pooled(self, ids):
        return self.module(ids.cpu()).to(self.device)

    def gather(self, ids):
        self.module.weight.detach()[ids.view(-1).cpu()].to(self.device)


class Case:
    """Batches with one distribution of ids, for tables with one kind of rows."""

    def __init__(self, run, tables, columns, dtype, distribution):
        self.run, self.tables, self.distribution = run, tables, distribution
        self.dtype, self.row_bytes = dtype, columns * dtype.itemsize
        num_rows, num_ids = len(tables[RAW]), NUM_TABLES * (QUICK_BATCH if run.quick else BATCH)
        make = IDS[distribution]
        self.batches = [make(num_ids, num_rows, run.device).view(-1, 1) for _ in range(NUM_BATCHES)]
        self.grad = torch.randn(num_ids, columns, device=run.device).to(dtype)
        seen = torch.cat([make(num_ids, num_rows, run.device) for _ in range(CACHE_SAMPLES)])
        self.hotness = torch.bincount(seen, minlength=num_rows).cpu()
        self.distinct_rows = sum(batch.unique().numel() for batch in self.batches) // NUM_BATCHES

    def ideal_seconds(self, table):
        """Returns the seconds for reading every distinct row of a batch over the link once, and writing it once."""
        num_bytes = self.distinct_rows * ideal.row_sectors(table).float().mean().item() * ideal.SECTOR_BYTES
        return num_bytes * 1e-9 * (1 / ideal.MACHINE.read_gbps + 1 / ideal.MACHINE.copy_out_gbps)

    def step_seconds(self, arm):
        """Returns the median time of the later half of some steps."""
        times = []
        for number in range(arm.num_steps):
            self.run.sync()
            start = time.perf_counter()
            arm.step(self.batches[number % NUM_BATCHES], self.grad)
            self.run.sync()
            times.append(time.perf_counter() - start)
        return statistics.median(times[arm.num_steps // 2 :])

    def measure(self, name, arm, table, on_gpu):
        """Records one arm. Returns what a step adds to a forward pass, as a multiple of the gather's time."""
        run, num_bytes = self.run, self.batches[0].numel() * self.row_bytes
        step = self.step_seconds(arm)
        forward, gather = (
            run.seconds([lambda ids=ids: call(ids) for ids in self.batches], wall=True)
            for call in (arm.forward, arm.gather)
        )
        run.add(
            case=self.distribution,
            arm=name,
            rows=self.batches[0].numel(),
            row_bytes=self.row_bytes,
            dtype=self.dtype,
            savings=table.savings,
            gbps=num_bytes * 1e-9 / step,
            ideal_gbps=num_bytes * 1e-9 / self.ideal_seconds(table),
            sms=None if on_gpu else 0,
            us=harness.four_digits(1e6 * step),
            forward_us=harness.four_digits(1e6 * forward),
            gather_us=harness.four_digits(1e6 * gather),
            added=harness.four_digits((step - forward) / gather),
            distinct_rows=self.distinct_rows,
        )
        return (step - forward) / gather

    def check(self):
        rows = [table.decompress(device=self.run.device) for table in self.tables.values()]
        harness.check_bits(rows[1], rows[0], f"{self.distribution}, rows of {self.row_bytes} B")


def measure_case(case):
    """Measures all arms of one case. Returns lines on arms whose steps add too much."""
    run, shortfalls = case.run, []
    if case.dtype == torch.float32:
        case.measure(CPU, CpuArm(case.tables[RAW], run.device), case.tables[RAW], False)
    for suffix, hotness in (("", None), (CACHED, case.hotness)):
        for name, table in case.tables.items():
            arm = Arm(table, run.device, hotness)
            added = case.measure(name + suffix, arm, table, run.on_gpu)
            arm.module.flush()
            if added > MOST_ADDED:
                shortfalls.append(
                    f"{case.distribution}, rows of {case.row_bytes} B, {name + suffix}: a step adds {added:.2f} "
                    f"times the gather, wanted {MOST_ADDED} at most"
                )
        case.check()
    return shortfalls


def make_tables(run, columns, dtype):
    num_rows = (QUICK_TABLE_BYTES if run.quick else TABLE_BYTES) // (columns * dtype.itemsize)
    x = families.weights(num_rows, columns, run.device).to(dtype).cpu()
    return {
        name: ibp.compress(x, scheme=scheme, memory=None if run.on_gpu else "host")
        for name, scheme in ((RAW, "raw"), (IBP, "auto"))
    }


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("dlrm_train", args, COLUMNS)
    torch.manual_seed(0)
    shortfalls = []
    for columns, dtype in ROWS:
        with run.cell(f"{columns} columns of {dtype}"):
            tables = make_tables(run, columns, dtype)
            for distribution in IDS:
                shortfalls += measure_case(Case(run, tables, columns, dtype, distribution))
    return run.finish(shortfalls)


if __name__ == "__main__":
    sys.exit(main())
