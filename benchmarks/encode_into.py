"""How fast are rows encoded into existing memory, in one launch and without the host?

    python -m benchmarks.encode_into [--out DIR] [--device cpu] [--quick]

256 MiB of rows of 2 KiB are encoded with a given codebook into slots and an overflow area. Arms: `one tensor`, with all
SMs and with at most 16 and 8; `again`, which overwrites the same rows; `pages`, 4,096 buffers of 64 KiB in one launch;
`strided`, one half of every row of a cache; `by ids`, in random order; `to pinned memory`; and `graph`, which replays a
CUDA graph. For comparison there are `copy_` of the same bytes and `measured, then coded`, the two passes that
`compress` makes over tensors in host memory. `until it returns` is the host's time for a call that encodes one page. In
every arm the rows are decoded and checked; `decode` is the time of that.
"""

import sys

import torch

import ibp
from ibp import calibration
from ibp._rows.handle import Handle, Parts

from . import codec, families, harness, ideal, inputs, small_calls

COLUMNS = ("us", *harness.TARGET_COLUMNS)
TABLE_BYTES, QUICK_TABLE_BYTES = 256 * inputs.MIB, inputs.MIB
PAGE_BYTES = 1 << 16
SMS = (None, families.MANY_SMS, families.FEW_SMS)
# There are so many places that a timed call encodes rows that were never encoded there. Pinned memory has fewer.
NUM_PLACES = 12
NUM_PINNED_PLACES = 2
# Each row has this many bytes of overflow, which is more than rows take on average.
OVERFLOW_ROOM = 64
ONE, PAGES, PINNED, CALL, DECODE = "one tensor", "pages", "to pinned memory", "until it returns", "decode"
FAST = ", fast"  # The names of cases with level "fast" end with this text.
# Each case has (name, dtype, columns, function that returns float rows).
CASES = (
    ("normal 0.02", torch.bfloat16, 1024, families.weights),
    ("normal 0.02" + FAST, torch.bfloat16, 1024, families.weights),
    ("normal 1", torch.float32, 512, families.normal),
    ("normal 1" + FAST, torch.float32, 512, families.normal),
    ("normal 1", torch.float8_e4m3fn, 2048, families.normal),
    ("half zeros", torch.bfloat16, 1024, families.masked),
)
MAIN_CASES = 2  # This many of CASES, the first ones, have all arms.
SIGN_AND_MANTISSA_BITS = {torch.bfloat16: 8, torch.float32: 24}  # At level "fast" the residual has this many bits.

# Targets: GB/s of one tensor with all SMs, at both levels; the rate of pages as a share of that; the host's
# microseconds in a call; and the rate of decoding at level "fast" as a share of a copy's.
WANTED_GBPS, WANTED_FAST_GBPS, PAGES_SHARE, CALL_US, FAST_DECODE_SHARE = 800.0, 1500.0, 0.8, 20.0, 0.95


class Case:
    """One kind of rows, and the run that records its measurements."""

    def __init__(self, run, rates, name, x):
        self.run, self.rates, self.name, self.x = run, rates, name, x
        self.is_fast = name.endswith(FAST)
        self.codebook = (
            calibration.consecutive(x, SIGN_AND_MANTISSA_BITS[x.dtype]).codebook(x.shape[1] * x.dtype.itemsize)
            if self.is_fast
            else ibp.codecs.analyze(x, scheme="planes", sample=families.SAMPLE)
        )
        self.table = ibp.compress(x, codebook=self.codebook)
        self.num_bytes = x.numel() * x.dtype.itemsize
        self.one_gbps, self.sms = None, SMS if run.on_gpu else (None,)

    def places(self, num_rows=None, pinned=False):
        """Returns empty places for num_rows rows, or as many as x has."""
        num_rows = len(self.x) if num_rows is None else num_rows
        sizes = {"slot_bytes": self.table.slot_bytes, "overflow_bytes": num_rows * OVERFLOW_ROOM}
        count = NUM_PINNED_PLACES if pinned else 2 if self.run.quick else NUM_PLACES
        return [
            ibp.CodedRows(
                self.codebook, num_rows, **sizes, device=self.run.device, memory="pinned" if pinned else "device"
            )
            for _ in range(count)
        ]

    def check(self, place, want, what):
        """Asserts that a place has the right rows and that none was lost."""
        place.check()
        if lost := place.counts().lost:
            raise AssertionError(f"{what}: {lost} rows lost")
        harness.check_bits(place.decode(dtype=want.dtype), want.reshape(place.num_rows, -1), what)

    def record(self, arm, seconds, num_bytes, ideal_gbps, wanted=None, sms=None):
        self.run.add(
            case=self.name,
            arm=arm,
            rows=num_bytes // self.codebook.row_bytes,
            row_bytes=self.codebook.row_bytes,
            dtype=self.x.dtype,
            savings=self.table.savings,
            gbps=num_bytes * 1e-9 / seconds,
            ideal_gbps=ideal_gbps,
            sms=sms,
            us=harness.four_digits(1e6 * seconds),
            **harness.judged(num_bytes * 1e-9 / seconds, wanted),
        )

    @property
    def ideal_gbps(self):
        return ideal.device_gbps(self.num_bytes, self.num_bytes + self.table.stored_bytes, self.rates.copy_gbps)

    def measure(self, arm, places, encode, want, ideal_gbps=None, wanted=None, sms=None):
        """Measures one arm and returns its GB/s. encode(place) encodes all rows. want: the rows that the place then
        has."""
        with self.run.cell(f"{self.name} {harness.dtype_name(self.x.dtype)}, {arm}"):
            for place in places:
                place.clear()
                harness.poison(place.slots)
            encode(places[0])
            self.check(places[0], want, f"{self.name}, {arm}")
            seconds = self.run.seconds([lambda place=place: encode(place) for place in places])
            self.record(arm, seconds, self.num_bytes, ideal_gbps or self.ideal_gbps, wanted, sms)
            return self.num_bytes * 1e-9 / seconds


def measure_copies(case):
    with case.run.cell(f"{case.name}, copies"):
        other = torch.empty_like(case.x)
        case.record("copy_", case.run.seconds([lambda: other.copy_(case.x)]), case.num_bytes, case.rates.copy_gbps)
        words, data = case.codebook.words(case.run.device), case.x.view(torch.uint8).view(-1)
        form, table, fault = case.codebook.codec, case.table, torch.zeros(4, dtype=torch.int64, device=case.run.device)

        def encode():
            lengths = torch.ops.ibp.measure_rows(data, words, form)
            parts, shape = (table.slots, table.overflow, lengths, table.bases), (0, table.num_rows, table.row_bytes)
            handle = Handle(Parts(*parts, words, form, table.slot_bytes, *shape))
            torch.ops.ibp.encode_rows(handle.table, data, fault)

        encode()
        harness.check_bits(ibp.decompress(table), case.x, "measured, then coded")
        case.record("measured, then coded", case.run.seconds([encode]), case.num_bytes, case.ideal_gbps)


def measure_one(case, places):
    """Measures one tensor with several numbers of SMs, the same rows again, and decoding."""
    wanted = WANTED_FAST_GBPS if case.is_fast else WANTED_GBPS
    for sms in case.sms:
        gbps = case.measure(
            ONE,
            places,
            lambda place, sms=sms: ibp.encode_into(case.x, place, max_sms=sms),
            case.x,
            wanted=None if sms else wanted,
            sms=sms,
        )
        case.one_gbps = case.one_gbps or gbps
    case.measure("again", places[:1], lambda place: ibp.encode_into(case.x, place), case.x)
    measure_decode(case, places[0])


def measure_decode(case, place):
    table, out = place.table(case.x.shape, case.x.dtype), torch.empty_like(case.x)
    for sms in case.sms:
        with case.run.cell(f"{case.name}, decode"):
            harness.poison(out)
            harness.check_bits(ibp.decompress(table, out=out, max_sms=sms), case.x, f"{case.name}, decode")
            seconds = case.run.seconds([lambda sms=sms: ibp.decompress(table, out=out, max_sms=sms)])
            wanted = FAST_DECODE_SHARE * case.rates.copy_gbps if case.is_fast and sms is None else None
            case.record(DECODE, seconds, case.num_bytes, case.ideal_gbps, wanted, sms)


def measure_pages(case, places):
    """Measures buffers that are scattered over a larger allocation, in random order."""
    pages = case.x.view(-1, PAGE_BYTES // case.codebook.row_bytes, case.x.shape[1])
    order = torch.randperm(len(pages))
    buffers = ibp.Buffers([pages[k] for k in order.tolist()])
    case.measure(
        f"{PAGES} of 64 KiB",
        places,
        lambda place: ibp.encode_into(buffers, place),
        pages[order.to(case.run.device)],
        wanted=PAGES_SHARE * case.one_gbps if case.one_gbps else None,
    )


def measure_places(case, places):
    """Measures strided rows, rows by their ids, a graph, and pinned memory."""
    strided = torch.stack([case.x, case.x.flip(1)], 1)[:, 1]  # A cache whose rows have two parts looks like this.
    case.measure("strided", places, lambda place: ibp.encode_into(strided, place), strided)
    ids = torch.randperm(len(case.x), device=case.run.device)
    wanted = torch.empty_like(case.x)
    wanted[ids] = case.x
    case.measure("by ids", places, lambda place: ibp.encode_into(case.x, place, ids), wanted)
    if not case.run.on_gpu:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ibp.encode_into(case.x, places[0])
    case.measure("graph", places[:1], lambda place: graph.replay(), case.x)
    link_gbps = ideal.MACHINE.copy_out_gbps * case.num_bytes / case.table.stored_bytes
    pinned = case.places(pinned=True)
    case.measure(PINNED, pinned, lambda place: ibp.encode_into(case.x, place), case.x, ideal_gbps=link_gbps)


def measure_call(case):
    """Measures the host's time for a call that encodes a page."""
    page = case.x[: PAGE_BYTES // case.codebook.row_bytes]
    place = case.places(len(page))[0]
    with case.run.cell(CALL):
        ibp.encode_into(page, place)
        case.check(place, page, CALL)
        seconds = small_calls.returning_s(case.run, lambda: ibp.encode_into(page, place))
        case.record(CALL, seconds, PAGE_BYTES, case.ideal_gbps, wanted=PAGE_BYTES / CALL_US / 1e3)


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("encode_into", args, COLUMNS)
    torch.manual_seed(0)
    rates = codec.DeviceRates(run)
    for i, (name, dtype, columns, make) in enumerate(CASES):
        num_rows = (QUICK_TABLE_BYTES if run.quick else TABLE_BYTES) // (columns * dtype.itemsize)
        with run.cell(f"{name} {harness.dtype_name(dtype)}"):
            case = Case(run, rates, name, make(num_rows, columns, run.device).to(dtype))
            measure_copies(case)
            places = case.places()
            measure_one(case, places)
            measure_pages(case, places)
            if i < MAIN_CASES:
                measure_places(case, places)
                measure_call(case)
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
