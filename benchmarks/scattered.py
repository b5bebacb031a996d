"""Which way brings scattered elements from host memory to the GPU the fastest (the paper's figure 5)?

    python -m benchmarks.scattered [--kernels] [--out DIR] [--device cpu] [--quick]

Elements of 8 B to 2 KiB are at random places of a pinned table of 256 MiB. Each begins four bytes after a multiple of
its size, so that none is aligned. Arms:

`copied one by one`    an asynchronous copy for each; only for 1,000 elements
`copied in a batch`    all of them in one call of the driver (CUDA 13)
`gathered by the CPU`  torch's `index_select` into a pinned buffer, then one copy
`by kernel, words`     a thread loads 4 bytes
`by kernel, warps`     a warp loads an element, beginning with its first word
`by kernel, aligned`   a warp begins each element at the boundary of 128 bytes below it, as the paper does
`by kernel, vectors`   a thread loads 16 aligned bytes
`managed memory`       the first kernel on memory that CUDA moves by itself, all of it in host memory before each call
`ibp, raw rows`        `index_select` of a raw table, whose rows are aligned

Arms in which the CPU works are timed with the wall clock. `us` is the time of a call. --kernels measures only the arms
with kernels; other rows of the CSV stay.
"""

import argparse
import ctypes
import functools
import statistics
import sys
import time

import torch

import ibp

from . import harness, ideal, inputs

COLUMNS = ("us",)
TABLE_BYTES, QUICK_TABLE_BYTES = 256 * inputs.MIB, inputs.MIB
ELEMENT_BYTES, QUICK_ELEMENT_BYTES = (8, 32, 128, 512, 2048), (32, 512)
COUNTS = (1_000, 100_000)
MOST_COPIES = 1_000  # At most this many elements are copied one by one, because each copy takes microseconds.
WORD_BYTES, VECTOR_BYTES = 4, 16
THREADS, WARP = 256, 32
MANAGED_CALLS = 3
ONE_BY_ONE, BATCH, CPU, MANAGED, RAW = (
    "copied one by one",
    "copied in a batch",
    "gathered by the CPU",
    "managed memory",
    "ibp, raw rows",
)
WORDS, WARPS, ALIGNED, VECTORS = (f"by kernel, {way}" for way in ("words", "warps", "aligned", "vectors"))

# table: the first word of element 0. ids: [num_elements]. words: of an element.
PARAMETERS = "const unsigned *table, const long long *ids, unsigned *out, int words, int num_elements"
# Each kernel has (body, function(words of an element) -> threads per element).
KERNELS = {
    WORDS: (
        """
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, element = i / words;
    if (element < num_elements) out[i] = table[ids[element] * words + i % words];
""",
        lambda words: words,
    ),
    WARPS: (
        """
    const long long element = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32;
    if (element >= num_elements) return;
    const unsigned *from = table + ids[element] * words;
    for (int k = threadIdx.x % 32; k < words; k += 32) out[element * words + k] = from[k];
""",
        lambda words: WARP,
    ),
    ALIGNED: (
        """
    const long long element = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32;
    if (element >= num_elements) return;
    const unsigned *from = table + ids[element] * words;
    const int before = (unsigned long long)from / 4 % 32;
    for (int k = (int)(threadIdx.x % 32) - before; k < words; k += 32)
        if (k >= 0) out[element * words + k] = from[k];
""",
        lambda words: WARP,
    ),
    VECTORS: (
        """
    const int vectors = (words + 6) / 4;
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, element = i / vectors;
    if (element >= num_elements) return;
    const unsigned *from = table + ids[element] * words;
    const int first = (int)(i % vectors) * 4 - (int)((unsigned long long)from / 4 % 4);
    if (first >= words) return;
    const uint4 vector = *(const uint4 *)(from + first);
    const unsigned loaded[4] = {vector.x, vector.y, vector.z, vector.w};
    for (int k = 0; k < 4; k++)
        if (first + k >= 0 && first + k < words) out[element * words + first + k] = loaded[k];
""",
        lambda words: (words + 6) // 4,
    ),
}


@functools.cache
def compiled(arm):
    source = f'extern "C" __global__ void kernel({PARAMETERS})\n{{{KERNELS[arm][0]}}}\n'
    return torch.cuda._compile_kernel(source, "kernel")


def launch(arm, table, ids, out):
    words = out.shape[1]
    blocks = -(-len(ids) * KERNELS[arm][1](words) // THREADS)
    compiled(arm)(grid=(blocks, 1, 1), block=(THREADS, 1, 1), args=[table, ids, out, words, len(ids)])


# ---- the driver's copies and memory ----------------------------------------------------------------------------------


class Location(ctypes.Structure):
    """The driver's struct CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class CopyAttributes(ctypes.Structure):
    """The driver's struct CUmemcpyAttributes."""

    _fields_ = [("order", ctypes.c_int), ("source", Location), ("target", Location), ("flags", ctypes.c_uint)]


IN_STREAM_ORDER, ATTACH_GLOBAL, HOST, GPU = 1, 1, Location(2, 0), Location(1, 0)
PREFER_LOCATION, ACCESSED_BY = 3, 5  # These numbers are advice to the driver.


@functools.cache
def driver():
    return ctypes.CDLL("libcuda.so.1")


def checked(status, call):
    if status:
        raise RuntimeError(f"{call} failed with status {status}")


def addresses(tensor, ids):
    """Returns the addresses of rows as a list."""
    return (tensor.data_ptr() + ids.cpu() * (tensor.shape[1] * tensor.element_size())).tolist()


class Copies:
    """A call that makes an asynchronous copy for each element."""

    def __init__(self, elements, ids, out):
        self.pairs = list(zip(addresses(out, torch.arange(len(ids))), addresses(elements, ids), strict=True))
        self.num_bytes = ctypes.c_size_t(out.shape[1] * out.element_size())
        self.copy = driver().cuMemcpyHtoDAsync_v2
        self.copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def __call__(self):
        stream = torch.cuda.current_stream().cuda_stream
        for to, start in self.pairs:
            checked(self.copy(to, start, self.num_bytes, stream), "cuMemcpyHtoDAsync")


class Batch:
    """A call that copies all elements at once, on a stream of its own, because it takes no default stream."""

    def __init__(self, elements, ids, out):
        count = len(ids)
        self.targets = (ctypes.c_uint64 * count)(*addresses(out, torch.arange(count)))
        self.sources = (ctypes.c_uint64 * count)(*addresses(elements, ids))
        self.sizes = (ctypes.c_size_t * count)(*[out.shape[1] * out.element_size()] * count)
        self.attributes, self.first = CopyAttributes(order=IN_STREAM_ORDER), ctypes.c_size_t(0)
        self.stream = torch.cuda.Stream()

    def __call__(self):
        self.stream.wait_stream(torch.cuda.current_stream())
        status = driver().cuMemcpyBatchAsync_v2(
            self.targets,
            self.sources,
            self.sizes,
            ctypes.c_size_t(len(self.sizes)),
            ctypes.byref(self.attributes),
            ctypes.byref(self.first),
            ctypes.c_size_t(1),
            ctypes.c_void_p(self.stream.cuda_stream),
        )
        checked(status, "cuMemcpyBatchAsync")
        torch.cuda.current_stream().wait_stream(self.stream)


class ManagedCopy:
    """A copy of a tensor's bytes in managed memory."""

    def __init__(self, flat):
        self.address, self.num_bytes = ctypes.c_uint64(), flat.numel() * flat.element_size()
        size = ctypes.c_size_t(self.num_bytes)
        checked(driver().cuMemAllocManaged(ctypes.byref(self.address), size, ATTACH_GLOBAL), "cuMemAllocManaged")
        self.__cuda_array_interface__ = {
            "shape": tuple(flat.shape),
            "typestr": "<i4",
            "data": (self.address.value, False),
            "version": 2,
        }
        self.tensor = torch.as_tensor(self, device="cuda")
        self.tensor.copy_(flat)

    def _from(self, start):
        """Returns the address of byte `start`, and the number of bytes from there on."""
        return ctypes.c_uint64(self.address.value + start), ctypes.c_size_t(self.num_bytes - start)

    def to_host(self, start=0):
        """Moves the bytes from `start` on to the host's memory."""
        status = driver().cuMemPrefetchAsync_v2(*self._from(start), HOST, ctypes.c_uint(0), ctypes.c_void_p(0))
        checked(status, "cuMemPrefetchAsync")
        torch.cuda.synchronize()

    def stay_on_host(self, start):
        """Makes the GPU read the bytes from `start` on in the host's memory, over the link."""
        for advice, location in ((PREFER_LOCATION, HOST), (ACCESSED_BY, GPU)):
            checked(driver().cuMemAdvise_v2(*self._from(start), ctypes.c_int(advice), location), "cuMemAdvise")
        self.to_host(start)


# ---- arms ------------------------------------------------------------------------------------------------------------


class Case:
    """A number of elements of one size, and the run that records their measurements. flat: int32, the whole table in
    host memory."""

    def __init__(self, run, flat, element_bytes, count):
        self.run, self.flat, self.words = run, flat, element_bytes // WORD_BYTES
        self.num_elements = (flat.numel() - VECTOR_BYTES) // self.words
        self.elements = self.of(flat)
        self.ids = [torch.randint(self.num_elements, (count,)) for _ in range(2 if run.quick else 4)]
        self.device_ids = [ids.to(run.device) for ids in self.ids]
        self.out = torch.empty(count, self.words, dtype=torch.int32, device=run.device)

    def of(self, flat):
        """Returns all elements. The first one begins one word after the beginning."""
        return flat[1 : 1 + self.num_elements * self.words].view(-1, self.words)

    def ideal_gbps(self, start):
        starts = start + self.ids[0] * self.words * WORD_BYTES
        link_ns = ideal.link_ns_of_range(starts, torch.full_like(starts, self.words * WORD_BYTES))
        return ideal.gather_gbps(self.out.numel() * WORD_BYTES, link_ns, self.run.memset_gbps)

    def record(self, arm, seconds, sms, start=WORD_BYTES):
        self.run.add(
            case=f"{len(self.out):,} elements",
            arm=arm,
            rows=len(self.out),
            row_bytes=self.words * WORD_BYTES,
            dtype=torch.int32,
            savings=0,
            gbps=self.out.numel() * WORD_BYTES * 1e-9 / seconds,
            ideal_gbps=self.ideal_gbps(start) if sms is None else ideal.LINK_COPY_GBPS,
            sms=sms,
            us=harness.four_digits(1e6 * seconds),
        )

    def check(self, arm, call, want):
        harness.poison(self.out)
        call()
        harness.check_bits(self.out.cpu(), want, arm)

    def measure(self, arm, calls, wall=False, elements=None, start=WORD_BYTES):
        """Measures an arm. calls: returns one call for each set of ids. wall: whether the CPU works."""
        with self.run.cell(f"{len(self.out):,} elements of {self.words * WORD_BYTES} B, {arm}"):
            calls = calls()
            self.check(arm, calls[0], (self.elements if elements is None else elements)[self.ids[0]])
            self.record(arm, self.run.seconds(calls, wall=wall), 0 if wall else None, start)


def measure_cpu(case):
    buffer = torch.empty(case.out.shape, dtype=torch.int32, pin_memory=case.run.on_gpu)

    def gather(ids):
        torch.index_select(case.elements, 0, ids, out=buffer)
        case.out.copy_(buffer, non_blocking=True)
        case.run.sync()  # The buffer is used again.

    case.measure(CPU, lambda: [functools.partial(gather, ids) for ids in case.ids], wall=True)


def measure_copies(case):
    def calls(kind):
        return lambda: [kind(case.elements, ids, case.out) for ids in case.ids]

    if len(case.out) <= MOST_COPIES:
        case.measure(ONE_BY_ONE, calls(Copies), wall=True)
    if hasattr(driver(), "cuMemcpyBatchAsync_v2"):
        case.measure(BATCH, calls(Batch), wall=True)


def measure_kernels(case):
    for arm in KERNELS:
        case.measure(
            arm,
            lambda arm=arm: [functools.partial(launch, arm, case.elements, ids, case.out) for ids in case.device_ids],
        )


def measure_managed(case, managed):
    """Measures managed memory with the wall clock, because a missing page interrupts the CPU."""
    with case.run.cell(f"{len(case.out):,} elements of {case.words * WORD_BYTES} B, {MANAGED}"):
        call = functools.partial(launch, WORDS, case.of(managed.tensor), case.device_ids[0], case.out)
        case.check(MANAGED, call, case.elements[case.ids[0]])
        times = []
        for _ in range(MANAGED_CALLS):
            managed.to_host()
            begun = time.perf_counter()
            call()
            case.run.sync()
            times.append(time.perf_counter() - begun)
        case.record(MANAGED, statistics.median(times), None)


def measure_raw_rows(cases, flat):
    """Measures raw rows of one size. The table is made once for all cases."""
    case = cases[0]
    rows = flat[: case.num_elements * case.words].view(-1, case.words)
    table = ibp.compress(rows, scheme="raw", device="cpu", memory=None if case.run.on_gpu else "host")
    for case in cases:
        case.measure(
            RAW,
            lambda case=case: [functools.partial(table.index_select, ids, out=case.out) for ids in case.device_ids],
            elements=rows,
            start=0,
        )


def parsed(argv):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--kernels", action="store_true")
    options, others = own.parse_known_args(argv)
    return options.kernels, harness.parse_args(others, __doc__)


def main(argv=None):
    kernels, args = parsed(argv)
    run = harness.Run("scattered", args, COLUMNS, keep=lambda row: kernels and row["arm"] not in KERNELS)
    torch.manual_seed(0)
    num_words = (QUICK_TABLE_BYTES if run.quick else TABLE_BYTES) // WORD_BYTES
    flat = torch.empty(num_words, dtype=torch.int32, pin_memory=run.on_gpu)
    flat.copy_(torch.randint(-(2**31), 2**31, (num_words,), dtype=torch.int32, device=run.device))
    managed = ManagedCopy(flat) if run.on_gpu and not kernels else None
    for element_bytes in QUICK_ELEMENT_BYTES if run.quick else ELEMENT_BYTES:
        cases = [Case(run, flat, element_bytes, count) for count in COUNTS]
        for case in cases:
            if run.on_gpu:
                measure_kernels(case)
            if kernels:
                continue
            measure_cpu(case)
            if run.on_gpu:
                measure_copies(case)
                measure_managed(case, managed)
        if not kernels:
            measure_raw_rows(cases, flat)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
