"""How fast are few vectors multiplied by a matrix that is kept compressed in device memory?

    python -m benchmarks.linear [--out DIR] [--device cpu] [--quick]

BF16 weights N(0, 0.02) at level "fast" are multiplied by 1 to 512 vectors. The matrices have shapes of models. One
shape exists several times in memory, more often than the L2 cache can hold, and a CUDA graph multiplies by one after
the other. Arms: `cuBLAS` is torch.nn.functional.linear with the plain weights; `decode, then cuBLAS` first decodes the
weights; `ibp.linear` decodes them in registers in the kernel that multiplies.

In cases named `together`, with shapes such as `4096 + 1024 + 1024 x 4096`, the same vectors are multiplied by several
matrices. `cuBLAS` has all rows in one matrix, as engines do, `cuBLAS, one by one` has several matrices, and
`ibp.linear` takes the tables in one call. `stack` has the matrices of 32 layers of Llama-7B's shape, one after the
other. This is the least time of a token, and `tokens_per_s` is the highest rate of tokens. Products overlap there as
far as the kernels let them. In cases named `after another kernel` another kernel writes the vectors before each
product, as in a model's layers, and its time counts for all arms.

GB/s count the original bytes of the weights. `us` is the time of a product, or of the products of a call; `host_us` is
the time until a call with one vector returns without a graph; `times` is the speed-up over cuBLAS, for which WANTED is
the target; and `vectors` is the number of vectors of a product. Results are compared with products in double precision,
and products of one-hot vectors with the weights themselves.
"""

import sys

import torch
import torch.nn.functional as F

import ibp

from . import codec, families, harness, ideal, small_calls

COLUMNS = ("us", "vectors", "times", "tokens_per_s", "host_us", *harness.TARGET_COLUMNS)
SHAPES = (
    (4096, 4096),
    (11008, 4096),
    (4096, 11008),
    (1024, 4096),
    (14336, 4096),
    (4096, 14336),
    (8192, 8192),
    (28672, 8192),
    (128256, 4096),
)
QUICK_SHAPES = ((64, 256), (96, 128))
COUNTS, QUICK_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (1, 8)
# Targets, as multiples of cuBLAS's rate, by number of vectors. For other numbers the target is 1.
WANTED = {16: 1.25, 32: 1.2, 64: 1.1, 128: 1.0, 256: 0.9, 512: 0.95}
FEW = 32  # Other kernels multiply more vectors than these.
STACK_COUNTS = (1, 8)  # Stacks, and cases after another kernel, have these numbers of vectors.
LAYERS, QUICK_LAYERS = 32, 2
# The matrices of a layer, as indices in SHAPES. Those in one tuple have the same vectors.
LAYER = ((0, 0, 0), (0,), (1, 1), (2,))
TOGETHER = (
    ((4096, 1024, 1024), 4096),
    ((14336, 14336), 4096),
    ((8192, 1024, 1024), 8192),
    ((28672, 28672), 8192),
)
QUICK_TOGETHER = (((64, 32), 128),)
ROTATED_BYTES = 256 << 20  # The copies of a matrix have this many bytes, several times the L2 cache.
LEAST_CALLS = 8  # A graph has at least this many products.
CUBLAS, ONE_BY_ONE, DECODED, FUSED = "cuBLAS", "cuBLAS, one by one", "decode, then cuBLAS", "ibp.linear"


def make(shape, device):
    """Returns weights and their table."""
    weight = families.weights(*shape, device).bfloat16()
    module = torch.nn.Linear(1, 1, bias=False)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.out_features, module.in_features = shape
    return weight, ibp.nn.Linear.from_linear(module).weight


class Group:
    """Matrices that are multiplied by the same vectors: weights, tables, and the weights as one matrix."""

    def __init__(self, *matrices):
        self.weights, self.tables = zip(*matrices)
        self.weight = torch.cat(self.weights) if len(matrices) > 1 else self.weights[0]
        self.columns = self.weight.shape[1]

    def clone(self):
        return Group(*((weight.clone(), table.clone()) for weight, table in zip(self.weights, self.tables)))

    def multiply(self, arm, x):
        if arm == CUBLAS:
            F.linear(x, self.weight)
        elif arm == FUSED:
            ibp.linear(x, self.tables)
        else:
            for weight in self.weights if arm == ONE_BY_ONE else self.tables:
                F.linear(x, weight)


class Case:
    """Groups of matrices that are multiplied one after the other by vectors of their width, and the run that records
    rates.

    Attributes:
        of_model: whether they are all matrices of a model.
        after_another: whether a kernel writes the vectors before each product.
    """

    def __init__(self, run, rates, name, groups, of_model=False, after_another=False):
        self.run, self.rates, self.groups, self.of_model = run, rates, groups, of_model
        self.after_another, self.is_together = after_another, any(len(group.tables) > 1 for group in groups)
        self.name, self.suffix = name, ", after another kernel" if after_another else ""
        self.num_bytes = sum(group.weight.nbytes for group in groups)
        self.stored = sum(table.stored_bytes for group in groups for table in group.tables)
        columns = sorted({group.columns for group in groups})
        self.written = {count: groups[0].weight.new_empty(count, groups[0].columns) for count in COUNTS}
        new = lambda *shape: torch.randn(*shape, device=run.device).bfloat16()  # noqa: E731
        self.x = {count: {k: new(count, k) for k in columns} for count in COUNTS}

    def products(self, arm, count):
        for group in self.groups:
            x = self.x[count][group.columns]
            if self.after_another:
                torch.mul(x, 1, out=self.written[count])
                x = self.written[count]
            group.multiply(arm, x)

    def host_us(self, arm, count):
        """Returns the microseconds until a call returns."""
        group = self.groups[0]
        x = self.x[count][group.columns]
        return 1e6 * small_calls.returning_s(self.run, lambda: group.multiply(arm, x))

    def seconds(self, arm, count):
        """Returns the seconds of all products."""
        call = lambda: self.products(arm, count)  # noqa: E731
        if not self.run.on_gpu:
            return self.run.seconds([call])
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return self.run.seconds([graph.replay])

    def ideal_gbps(self, arm):
        moved = self.num_bytes if arm in (CUBLAS, ONE_BY_ONE) else self.stored
        moved += 2 * self.num_bytes if arm == DECODED else 0  # The decoded weights are written, and read again.
        return ideal.device_gbps(self.num_bytes, moved, self.rates.copy_gbps)

    def record(self, arm, count, seconds, cublas_s):
        gbps = self.num_bytes * 1e-9 / seconds
        times = WANTED.get(count, 1.0) if arm == FUSED else None
        wanted = times and times * self.num_bytes * 1e-9 / cublas_s
        rows, columns = self.groups[0].weight.shape
        self.run.add(
            case=f"{self.name}, {count}{self.suffix}",
            arm=arm,
            rows=rows,
            row_bytes=2 * columns,
            dtype=torch.bfloat16,
            savings=0.0 if arm in (CUBLAS, ONE_BY_ONE) else 1 - self.stored / self.num_bytes,
            gbps=gbps,
            ideal_gbps=self.ideal_gbps(arm),
            sms=None,
            us=harness.four_digits(1e6 * seconds / len(self.groups)),
            vectors=count,
            times=f"{cublas_s / seconds:.3f}",
            tokens_per_s=harness.four_digits(count / seconds) if self.of_model else None,
            host_us=harness.four_digits(self.host_us(arm, count)) if count == 1 and not self.after_another else None,
            **harness.judged(gbps, wanted, self.ideal_gbps(arm)),
        )

    def measure(self, counts):
        for count in counts:
            with self.run.cell(f"{self.name}, {count} vectors{self.suffix}"):
                cublas_s = self.seconds(CUBLAS, count)
                self.record(CUBLAS, count, cublas_s, cublas_s)
                others = (ONE_BY_ONE,) if self.is_together else () if self.after_another else (DECODED,)
                for arm in (*others, FUSED):
                    self.record(arm, count, self.seconds(arm, count), cublas_s)


def check(weight, table, x):
    """Raises AssertionError unless a product is right and one-hot vectors give weights."""
    wanted = F.linear(x.double(), weight.double())
    scale = F.linear(x.double().abs(), weight.double().abs())
    error = (ibp.linear(x, table, check=True).double() - wanted).abs()
    if not (error <= wanted.abs() / 256 + scale * 1e-5).all():
        raise AssertionError(f"a product of {list(weight.shape)} is off by {error.max().item():.3g}")
    columns = torch.randperm(weight.shape[1], device=x.device)[: len(x)]
    one_hot = F.one_hot(columns, weight.shape[1]).to(x.dtype)
    for part in (one_hot, one_hot[:FEW]):
        if not torch.equal(ibp.linear(part, table).t(), weight[:, columns[: len(part)]]):
            raise AssertionError(f"weights of {list(weight.shape)} are not decoded as they were")


def cloned(run, group):
    """Returns copies of a group, after checking its products."""
    for weight, table in zip(group.weights, group.tables):
        check(weight, table, torch.randn(max(COUNTS), group.columns, device=run.device).bfloat16())
    count = max(LEAST_CALLS, -(-ROTATED_BYTES // (group.weight.nbytes * 3 // 4))) if run.on_gpu else 2
    return [group, *(group.clone() for _ in range(count - 1))]


def measure_group(run, rates, name, group):
    groups = cloned(run, group)
    Case(run, rates, name, groups).measure(QUICK_COUNTS if run.quick else COUNTS)
    Case(run, rates, name, groups, after_another=True).measure(STACK_COUNTS)


def measure_together(run, rates, rows, columns):
    group = Group(*(make((of_matrix, columns), run.device) for of_matrix in rows))
    x = torch.randn(1, columns, device=run.device).bfloat16()
    for got, table in zip(ibp.linear(x, group.tables), group.tables):
        harness.check_bits(got, ibp.linear(x, table), "products together")
    measure_group(run, rates, f"{' + '.join(map(str, rows))} x {columns}, together", group)


def measure_stack(run, rates, made):
    layers = QUICK_LAYERS if run.quick else LAYERS
    layer = [Group(*(made[number % len(made)] for number in numbers)) for numbers in LAYER]
    groups = [group.clone() for _ in range(layers) for group in layer]
    single = [Group(matrix) for group in groups for matrix in zip(group.weights, group.tables)]
    for name, of_model in (("", single), (", together", groups)):
        Case(run, rates, f"stack of {layers} layers{name}", of_model, of_model=True).measure(STACK_COUNTS)


def main(argv=None):
    run = harness.Run("linear", harness.parse_args(argv, __doc__), COLUMNS)
    torch.manual_seed(0)
    rates = codec.DeviceRates(run)
    made = []
    for shape in run.some(QUICK_SHAPES if run.quick else SHAPES):
        made.append(make(shape, run.device))
        with run.cell(f"{shape[0]} x {shape[1]}"):
            measure_group(run, rates, f"{shape[0]} x {shape[1]}", Group(made[-1]))
    for rows, columns in run.some(QUICK_TOGETHER if run.quick else TOGETHER):
        with run.cell(f"{rows} x {columns}, together"):
            measure_together(run, rates, rows, columns)
    if run.every == 1:
        with run.cell("stack"):
            measure_stack(run, rates, made)
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
