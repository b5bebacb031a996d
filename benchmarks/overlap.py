"""How much does fetching slow down other work? A BF16 matrix product on all SMs runs during fetches that keep few SMs
busy.

    python -m benchmarks.overlap [--out DIR] [--device cpu] [--quick]

Both are timed alone and together. A train of matrix products runs on one stream. Fetches run back to back on another
stream of higher priority for longer than the train. The rate of the fetches counts those that began and ended during
the train. The loss of the products is compared with the share of SMs that the fetches may take. The copy engine, which
takes no SMs, shows what the link's traffic costs. A kernel that only sleeps on some SMs shows what it costs that the
products do not have them. For `planned products`, cuBLAS is told to plan products for the SMs that are left.

overlap.csv has the rates of fetches and, after the common columns, those of the products: matmul_tflops, matmul_share
(of the rate of products alone), fetch_share (of the rate of fetches alone), sm_share (share of the GPU's SMs that the
fetches may take) and loss_ratio ((1 - matmul_share) / sm_share).
"""

import contextlib
import statistics
import sys

import torch

import ibp

from . import harness, ideal, inputs

COLUMNS = "matmul_tflops,matmul_share,fetch_share,sm_share,loss_ratio".split(",")
SIDE, QUICK_SIDE = 8192, 256
TRAIN, QUICK_TRAIN = (
    64,
    4,
)  # TRAIN products take 0.1 s on an H200. There are a quarter of them if fetches may take all SMs.
REPEATS, MAX_DOUBLINGS = 3, 5
ROW_BYTES = 2048
TABLE_BYTES, QUICK_TABLE_BYTES = 256 * inputs.MIB, 2 * inputs.MIB
# One fetch reads every row of the table this often. Its kernel is long, so that few kernels begin and end during the
# train.
PASSES = 2
PLANNED = ("planes decompress", "sleep")
JUDGED_SMS, MOST_LOSS_RATIO, LEAST_SHARE = 16, 1.5, 0.9  # LEAST_SHARE is a share of the fetch's rate alone.
COPY_ARM = "planes decompress by the copy engine"  # This arm is not judged, because its chunks wait for products.
# The fetch alone has to reach this share of the ideal, because otherwise the loss would mean nothing.
LINE_RATE = 0.92
SMS = {
    "planes gather": (8, 16, None),
    "raw gather": (8,),
    "planes decompress": (8, 16),
    COPY_ARM: (16,),
    "sleep": (8, 16),
}


class Products:
    """The matrix product C = A @ B in BF16, over and over."""

    def __init__(self, run):
        self.num = QUICK_TRAIN if run.quick else TRAIN
        side = QUICK_SIDE if run.quick else SIDE
        self.a, self.b = (torch.randn(side, side, device=run.device).to(torch.bfloat16) for _ in range(2))
        self.c = torch.empty_like(self.a)
        self.flops = 2 * side**3
        self.want = torch.matmul(self.a, self.b)

    @contextlib.contextmanager
    def planned_beside(self, num_sms):
        """Makes cuBLAS, inside a block, plan products for the SMs that num_sms leave. Their sums may then have another
        order."""
        library, want = torch.backends.cuda.preferred_blas_library(), self.want
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch._C._set_sm_carveout_experimental(num_sms)
        try:
            self.want = torch.matmul(self.a, self.b)
            yield
        finally:
            self.want = want
            torch._C._set_sm_carveout_experimental(None)
            torch.backends.cuda.preferred_blas_library(library)

    def launch(self, num):
        for _ in range(num):
            torch.matmul(self.a, self.b, out=self.c)

    def check(self, what):
        harness.check_bits(self.c, self.want, f"matrix product {what}")
        harness.poison(self.c)


class Fetch:
    """A way to bring bytes of x to the GPU. call: writes `out`, which must then be `want`. num_bytes: original bytes of
    a call. table: None for raw copies."""

    def __init__(self, arm, x, call, out, want, *, table, ideal_gbps, sms):
        self.arm, self.x, self.call, self.out, self.want = arm, x, call, out, want
        self.table, self.ideal_gbps, self.sms = table, ideal_gbps, sms
        self.savings = table.savings if table else 0.0
        self.num_bytes = out.numel() * out.element_size()

    def check(self, what):
        harness.check_bits(self.out, self.want, f"{self.arm} {what}")
        harness.poison(self.out)


class Sleep:
    """A kernel that takes SMs and does nothing with them, over and over."""

    SOURCE = """
    extern "C" __global__ void __launch_bounds__(1024) sleep_for(int microseconds)
    {
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do {
            __nanosleep(1000);
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        } while (now - start < 1000ull * microseconds);
    }
    """
    MICROSECONDS, THREADS, SHARED_BYTES = (
        5000,
        1024,
        120_000,
    )  # Beside a block with these sizes, a block of the products finds no room.

    def __init__(self, sms):
        self.arm, self.sms = "sleep", sms
        self.kernel = torch.cuda._compile_kernel(self.SOURCE, "sleep_for")
        self.kernel.set_shared_memory_config(self.SHARED_BYTES)

    def call(self):
        self.kernel(
            grid=(self.sms, 1, 1), block=(self.THREADS, 1, 1), args=[self.MICROSECONDS], shared_mem=self.SHARED_BYTES
        )

    def check(self, what):
        pass


def alone(run, products, num):
    """Returns the seconds of a train of `num` products."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run.sync()
    start.record()
    products.launch(num)
    end.record()
    run.sync()
    return start.elapsed_time(end) * 1e-3


def beside(run, products, num, fetch, num_fetches):
    """Runs a train of products and fetches together. Returns (seconds of the train, seconds of one fetch), or None if
    the fetches ended before the train did."""
    stream, current = torch.cuda.Stream(run.device, priority=-1), torch.cuda.current_stream()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_fetches)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run.sync()

    def launch(mark):
        with torch.cuda.stream(stream):
            fetch.call()
            mark.record()

    launch(marks[0])
    current.wait_event(marks[0])  # The products begin with the second fetch.
    start.record()
    products.launch(num)
    end.record()
    for mark in marks[1:]:
        launch(mark)
    run.sync()
    train_ms = start.elapsed_time(end)
    ended_ms = [start.elapsed_time(mark) for mark in marks[1:]]
    if ended_ms[-1] < train_ms:
        return None
    during = [ended for ended in ended_ms if ended <= train_ms]
    if len(during) < 2:
        raise AssertionError(f"{fetch.arm}: {len(during)} fetches ended during the train; wanted two at least")
    return train_ms * 1e-3, (during[-1] - during[0]) * 1e-3 / (len(during) - 1)


def measure_beside(run, products, fetch, fetch_s):
    """Returns the median seconds of a product alone, of a product during fetches, and of a fetch during products.
    Trains alone and during fetches alternate, so that both have the same clocks. There are as many fetches as outlast
    the train. Both results are checked each time."""
    num = products.num if fetch.sms is not None else products.num // 4
    num_fetches, doublings, times = 3 + int(1.5 * alone(run, products, num) / fetch_s), 0, []
    while len(times) < REPEATS:
        alone_s = alone(run, products, num)
        products.check("alone")
        found = beside(run, products, num, fetch, num_fetches)
        fetch.check("beside products")
        products.check(f"beside {fetch.arm}")
        if found is not None:
            times.append((alone_s / num, found[0] / num, found[1]))
        elif doublings == MAX_DOUBLINGS:
            raise AssertionError(f"{fetch.arm}: {num_fetches} fetches ended before {num} products did")
        else:
            num_fetches, doublings = 2 * num_fetches, doublings + 1
    return [statistics.median(each) for each in zip(*times)]


def measure(run, products, fetch):
    harness.poison(fetch.out)
    _, peak_bytes = run.peak_bytes(fetch.call, out=fetch.out)
    fetch.check("alone")
    fetch_s = run.seconds([fetch.call])
    same = dict(
        case="normal 0.02",
        rows=len(fetch.out),
        row_bytes=ROW_BYTES,
        dtype=fetch.x.dtype,
        savings=fetch.savings,
        ideal_gbps=fetch.ideal_gbps,
        sms=fetch.sms,
    )
    if all(row["arm"] != fetch.arm for row in run.memory):
        run.add_memory(
            case=same["case"],
            arm=fetch.arm,
            row_bytes=ROW_BYTES,
            dtype=fetch.x.dtype,
            peak_bytes=peak_bytes,
            output_bytes=fetch.num_bytes,
            original_bytes=fetch.x.numel() * fetch.x.element_size(),
            table=fetch.table,
        )
    run.add(arm=f"{fetch.arm}, alone", gbps=fetch.num_bytes * 1e-9 / fetch_s, **same)
    if not run.on_gpu:
        return
    for arm, beside_s, losses in each_beside(run, products, fetch, fetch_s):
        run.add(
            arm=arm,
            gbps=fetch.num_bytes * 1e-9 / beside_s,
            **same,
            fetch_share=f"{fetch_s / beside_s:.4f}",
            **losses,
        )


def each_beside(run, products, fetch, fetch_s):
    """Yields (arm, seconds of a fetch, columns of the loss) for products that cuBLAS plans for all SMs and, if the
    fetch is one of PLANNED, for the SMs that it leaves."""
    alone_s, product_s, beside_s = measure_beside(run, products, fetch, fetch_s)
    yield f"{fetch.arm}, beside", beside_s, loss(run, products, alone_s, product_s, fetch.sms)
    if fetch.arm in PLANNED and fetch.sms:
        with products.planned_beside(fetch.sms):
            _, product_s, beside_s = measure_beside(run, products, fetch, fetch_s)
        yield f"{fetch.arm}, beside planned products", beside_s, loss(run, products, alone_s, product_s, fetch.sms)


def measure_sleep(run, products, sleep):
    for arm, _, losses in each_beside(run, products, sleep, sleep.MICROSECONDS * 1e-6):
        run.add(
            case="normal 0.02",
            arm=arm,
            rows=0,
            row_bytes=ROW_BYTES,
            dtype=torch.bfloat16,
            savings=0.0,
            gbps=0.0,
            ideal_gbps=ideal.LINK_COPY_GBPS,
            sms=sleep.sms,
            fetch_share="",
            **losses,
        )


def loss(run, products, alone_s, product_s, sms):
    """Returns the columns of the products. A product takes alone_s alone, and product_s during work that may take `sms`
    SMs."""
    share, sm_share = alone_s / product_s, (run.num_sms if sms is None else sms) / run.num_sms
    return {
        "matmul_tflops": harness.four_digits(products.flops * 1e-12 / product_s),
        "matmul_share": f"{share:.4f}",
        "sm_share": f"{sm_share:.4f}",
        "loss_ratio": f"{(1 - share) / sm_share:.3f}" if sm_share else "",
    }


def fetches(run):
    """Yields rows of a table in slots and raw rows, a whole tensor that is decompressed, and the copy engine."""
    num_bytes = QUICK_TABLE_BYTES if run.quick else TABLE_BYTES
    x = inputs.normal_rows(num_bytes, torch.bfloat16, 0.02, run.device, columns=ROW_BYTES // 2)
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=run.on_gpu).copy_(x)
    codebook = ibp.codecs.analyze(x, scheme="planes", sample=None)
    ids = torch.cat([torch.randperm(len(x), device=run.device) for _ in range(PASSES)])
    gathered, whole = torch.index_select(x, 0, ids), torch.empty_like(x)
    for arm, table in (
        ("planes gather", ibp.compress(host, codebook=codebook)),
        ("raw gather", ibp.compress(host, scheme="raw")),
    ):
        out = torch.empty_like(gathered)
        ideal_gbps = ideal.gather_gbps(
            gathered.numel() * x.element_size(), ideal.row_link_ns(table, ids), run.memset_gbps
        )
        for sms in SMS[arm] if run.on_gpu else (None,):
            yield Fetch(
                arm,
                x,
                lambda table=table, out=out, sms=sms: ibp.index_select(table, ids, out=out, max_sms=sms),
                out,
                gathered,
                table=table,
                ideal_gbps=ideal_gbps,
                sms=sms,
            )
        del out
    packed = ibp.compress(host, codebook=codebook, layout="packed")
    ideal_gbps = ideal.tensor_gbps(packed.original_bytes, packed.stored_bytes)
    for arm, path in (
        (("planes decompress", None), (COPY_ARM, "copy")) if run.on_gpu else (("planes decompress", None),)
    ):
        for sms in SMS[arm] if run.on_gpu else (None,):
            yield Fetch(
                arm,
                x,
                lambda sms=sms, path=path: ibp.decompress(packed, out=whole, max_sms=sms, path=path),
                whole,
                x,
                table=packed,
                ideal_gbps=ideal_gbps,
                sms=sms,
            )
    yield Fetch(
        "copy_",
        x,
        lambda: whole.copy_(host, non_blocking=True),
        whole,
        x,
        table=None,
        ideal_gbps=ideal.LINK_COPY_GBPS,
        sms=0,
    )


def shortfalls(rows):
    """Returns lines that say where the products lose more than their target, or where the fetches do not reach the
    link's rate."""
    found = []
    for row in rows:
        if row["sms"] != JUDGED_SMS or row["arm"].startswith(COPY_ARM):
            continue
        what, share = f"{row['arm']}, {row['sms']} SMs", float(row["gbps"]) / float(row["ideal_gbps"])
        if row["arm"].endswith(", alone") and share < LINE_RATE:
            found.append(f"{what}: {100 * share:.0f} % of the ideal, not the line rate ({100 * LINE_RATE:g} %)")
        if not row["arm"].endswith(", beside") or not row["fetch_share"]:
            continue
        if float(row["fetch_share"]) < LEAST_SHARE:
            found.append(f"{what}: {row['fetch_share']} of its rate alone, wanted {LEAST_SHARE:g} at least")
        if float(row["loss_ratio"]) > MOST_LOSS_RATIO:
            found.append(
                f"{what}: the products lose {row['loss_ratio']} times the share of SMs taken, wanted "
                f"{MOST_LOSS_RATIO:g} at most"
            )
    return found


def print_losses(rows):
    for row in rows:
        if row.get("matmul_share"):
            taken = f"with {100 * float(row['sm_share']):.1f} % of the SMs taken" + (
                f" (ratio {row['loss_ratio']})" if row["loss_ratio"] else ""
            )
            print(
                f"{row['arm']}: the products run at {row['matmul_tflops']} TFLOP/s and lose "
                f"{100 - 100 * float(row['matmul_share']):.1f} % "
                f"{taken}"
                + (
                    f"; the fetch runs at {100 * float(row['fetch_share']):.0f} % of its rate alone"
                    if row["fetch_share"]
                    else ""
                )
            )


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("overlap", args, COLUMNS)
    torch.manual_seed(0)
    products = Products(run)
    products.launch(products.num)  # This does what only first calls do.
    products.check("alone")
    for fetch in fetches(run):
        with run.cell(f"{fetch.arm}, {fetch.sms} SMs"):
            measure(run, products, fetch)
    if not run.on_gpu:
        print("fetches beside products: need --device cuda, left out")
    elif not hasattr(torch.cuda, "_compile_kernel"):
        print("sleep: this torch does not compile kernels, left out")
    else:
        for sms in SMS["sleep"]:
            with run.cell(f"sleep, {sms} SMs"):
                measure_sleep(run, products, Sleep(sms))
    print_losses(run.rows)
    return run.finish(shortfalls(run.rows))


if __name__ == "__main__":
    sys.exit(main())
