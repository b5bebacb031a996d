"""What does a training step of embedding tables cost beside a look-up of the same rows?

    python -m benchmarks.dlrm_train [--out DIR] [--device cpu] [--quick]

A table of 1 GiB in pinned memory, the rows of 26 tables one after the other, trained with row-wise Adagrad by 16,384
samples of an id a table: uniform ids, and ids of a Zipf distribution with exponent 1.05. Arms: raw rows and compressed
ones through the same code, each also behind a cache of 5 % of the table's bytes on the GPU, that hot rows fill; and, in
FP32, torch's EmbeddingBag (sparse gradients) and Adagrad on the CPU, whose results and gradients are copied. A step is
forward, backward, and rows that are changed and written back. `us` is a step, `forward_us` a forward pass without
gradients, `added` what the step adds to it, as a share of it; `gbps` counts the bytes of all rows looked up. After two
steps all arms of the GPU are compared bit for bit.
"""

import sys

import torch

import ibp

from . import families, harness, ideal, inputs

COLUMNS = ("us", "forward_us", "added", "distinct_rows")
NUM_TABLES, BATCH, QUICK_BATCH = 26, 16_384, 64
TABLE_BYTES, QUICK_TABLE_BYTES = 1024 * inputs.MIB, inputs.MIB
ROWS = ((256, torch.bfloat16), (128, torch.float32), (1024, torch.bfloat16))  # columns, dtype
CACHE_SHARE, CACHE_SAMPLES = 0.05, 10
MOST_ADDED = 1.3  # of a forward pass
NUM_BATCHES, NUM_CHECKED = 4, 2
RAW, IBP, RAW_CACHED, IBP_CACHED, CPU = "raw rows", "ibp", "raw rows + cache", "ibp + cache", "torch on the CPU"
LEARNING_RATE = 0.01


def uniform_ids(num_ids, num_rows, device):
    return torch.randint(num_rows, (num_ids,), device=device)


def zipf_ids(num_ids, num_rows, device):
    return inputs.scattered(inputs.zipf_ranks(num_ids, num_rows, device), num_rows)


IDS = {"uniform": uniform_ids, f"Zipf {inputs.ZIPF_EXPONENT}": zipf_ids}


class OnGpu:
    """An arm of ibp's modules."""

    def __init__(self, run, table, hotness=None):
        cache = None
        if hotness is not None:
            budget = int(CACHE_SHARE * ideal.original_bytes(table))
            cache = ibp.RowCache(table, budget, hotness, devices=run.device, writable=True)
        self.table = table
        self.module = ibp.nn.EmbeddingBag(table, mode="sum", trainable=True, cache=cache)
        self.optimizer = ibp.optim.RowWiseAdagrad(self.module, lr=LEARNING_RATE)

    def forward(self, ids):
        with torch.no_grad():
            self.module(ids)

    def step(self, ids, grad):
        self.optimizer.zero_grad()
        self.module(ids).backward(grad)
        self.optimizer.step()

    def rows(self):
        return self.module.current_table().decompress(device=self.module.weight.device)


class OnCpu:
    """torch's modules, whose results and gradients are copied to and from the device that trains."""

    def __init__(self, run, x):
        self.device = run.device
        self.module = torch.nn.EmbeddingBag.from_pretrained(x.cpu(), mode="sum", freeze=False, sparse=True)
        self.optimizer = torch.optim.Adagrad(self.module.parameters(), lr=LEARNING_RATE)

    def forward(self, ids):
        with torch.no_grad():
            self.module(ids.cpu()).to(self.device)

    def step(self, ids, grad):
        self.optimizer.zero_grad()
        self.module(ids.cpu()).to(self.device).backward(grad)
        self.optimizer.step()


class Case:
    """Batches of one distribution of ids, and a weight of one kind of rows."""

    def __init__(self, run, columns, dtype, distribution):
        self.run, self.dtype, self.row_bytes, self.distribution = run, dtype, columns * dtype.itemsize, distribution
        num_rows = (QUICK_TABLE_BYTES if run.quick else TABLE_BYTES) // self.row_bytes
        self.x = families.weights(num_rows, columns, run.device).to(dtype)
        num_ids = NUM_TABLES * (QUICK_BATCH if run.quick else BATCH)
        make = IDS[distribution]
        self.batches = [make(num_ids, num_rows, run.device).view(-1, 1) for _ in range(NUM_BATCHES)]
        self.grads = [torch.randn(num_ids, columns, device=run.device).to(dtype) for _ in range(2)]
        seen = torch.cat([make(num_ids, num_rows, run.device) for _ in range(CACHE_SAMPLES)])
        self.hotness = torch.bincount(seen, minlength=num_rows).cpu()
        self.distinct_rows = sum(batch.unique().numel() for batch in self.batches) // NUM_BATCHES

    def table(self, scheme):
        table = ibp.compress(self.x, scheme=scheme).cpu()
        return table.pin_memory() if self.run.on_gpu else table

    def grad(self, number):
        return self.grads[number % len(self.grads)]

    def ideal_seconds(self, table):
        """Every row that is looked up is read over the link once, and written once."""
        num_bytes = self.distinct_rows * ideal.row_sectors(table).float().mean().item() * ideal.SECTOR_BYTES
        return num_bytes * 1e-9 * (1 / ideal.MACHINE.read_gbps + 1 / ideal.MACHINE.copy_out_gbps)

    def measure(self, name, arm, ideal_seconds, savings):
        """Records one arm. Returns what a step adds to a forward pass, as a share of it."""
        run, num_bytes = self.run, self.batches[0].numel() * self.row_bytes
        forward = run.seconds([lambda ids=ids: arm.forward(ids) for ids in self.batches], wall=True)
        steps = [lambda ids=ids, n=n: arm.step(ids, self.grad(n)) for n, ids in enumerate(self.batches)]
        step = run.seconds(steps, wall=True)
        run.add(
            case=self.distribution,
            arm=name,
            rows=self.batches[0].numel(),
            row_bytes=self.row_bytes,
            dtype=self.dtype,
            savings=savings,
            gbps=num_bytes * 1e-9 / step,
            ideal_gbps=num_bytes * 1e-9 / ideal_seconds,
            sms=None if run.on_gpu and name != CPU else 0,
            us=harness.four_digits(1e6 * step),
            forward_us=harness.four_digits(1e6 * forward),
            added=harness.four_digits((step - forward) / forward),
            distinct_rows=self.distinct_rows,
        )
        return (step - forward) / forward


def measure_case(case):
    """All arms of one case. Returns lines on those whose steps add too much."""
    run, shortfalls, expected, ideal_seconds = case.run, [], None, None
    for name, scheme, is_cached in (
        (RAW, "raw", False),
        (IBP, "auto", False),
        (RAW_CACHED, "raw", True),
        (IBP_CACHED, "auto", True),
    ):
        table = case.table(scheme)
        arm = OnGpu(run, table, case.hotness if is_cached else None)
        ideal_seconds, savings = case.ideal_seconds(table), table.savings
        for number in range(NUM_CHECKED):
            arm.step(case.batches[number], case.grad(number))
        rows = arm.rows()
        expected = rows if expected is None else expected
        what = f"{case.distribution}, rows of {case.row_bytes} B, {name}"
        harness.check_bits(rows, expected, what)
        added = case.measure(name, arm, ideal_seconds, savings)
        if added > MOST_ADDED:
            shortfalls.append(f"{what}: a step adds {added:.2f} forward passes, wanted {MOST_ADDED} at most")
    if case.dtype == torch.float32:
        case.measure(CPU, OnCpu(run, case.x), ideal_seconds, 0)
    return shortfalls


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("dlrm_train", args, COLUMNS)
    torch.manual_seed(0)
    shortfalls = []
    for columns, dtype in ROWS:
        for distribution in IDS:
            with run.cell(f"{distribution}, {columns} columns of {dtype}"):
                shortfalls += measure_case(Case(run, columns, dtype, distribution))
    return run.finish(shortfalls)


if __name__ == "__main__":
    sys.exit(main())
