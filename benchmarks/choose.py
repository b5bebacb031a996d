"""Which coding gets a tensor over a link the soonest, and does `ibp.choose` take it?

    python -m benchmarks.choose [--out DIR] [--device cpu] [--quick]

Every set of ratio.csv and typed columns, repeated to 256 MiB on a GPU: what each candidate takes to code and to decode
the whole of it, beside what `choose` has predicted from its sample, by the wall clock; its bits are checked. Candidates
that are predicted to take three times the time of the best over every link are measured on a few sets only. `choice at
G GB/s`: the measured total of what was chosen for that link, the transfer being its bytes over the link's rate; ideal
is the best measured candidate. `fetched often`: without coding. Where the choice loses more than 3 % it is printed
last, as BELOW.
"""

import sys

import torch

import ibp
from ibp._codecs import choice as choosing

from . import harness, inputs, sets

COLUMNS = (
    "stored_bytes,encode_us,decode_us,predicted_bytes,predicted_encode_us,predicted_decode_us,"
    "link_gbps,chosen,best,loss,wanted_loss"
).split(",")
LINKS_GBPS = (6.0, 55.0, 360.0)  # a network or NVMe, PCIe 5 x16, NVLink
DATA_BYTES = 256 * inputs.MIB  # of a set on a GPU
TYPED_ITEMS, QUICK_ITEMS = 1 << 21, 1 << 14
WANTED_LOSS = 0.03
BUDGET_S = 12e-3  # of a measurement
HOPELESS = 3.0  # times the predicted time of the best, over every link
OFTEN = ", fetched often"


# ---- sets ----------------------------------------------------------------------------------------------------------


def sorted_ids(count, generator):
    """int64: increasing ids, each in a run of 1 to 20, as a key of a fact table that is sorted by it."""
    ids = torch.randint(1, 1000, (count,), generator=generator).cumsum(0)
    return ids.repeat_interleave(torch.randint(1, 21, (count,), generator=generator))[:count]


def dates(count, generator):
    """int32: days since 1970 within seven years, in no order."""
    return torch.randint(8035, 10592, (count,), dtype=torch.int32, generator=generator)


def strings(count, generator):
    """uint8 [n, 16]: words of 3 to 15 letters, padded with spaces; the r-th of 1,000 is chosen 1/r as often."""
    words = torch.randint(ord("a"), ord("z") + 1, (1000, 16), dtype=torch.uint8, generator=generator)
    lengths = torch.randint(3, 16, (1000, 1), generator=generator)
    words.masked_fill_(torch.arange(16) >= lengths, ord(" "))
    return words[torch.multinomial(1 / torch.arange(1.0, 1001), count // 8, replacement=True, generator=generator)]


TYPED = (("sorted ids with runs", sorted_ids), ("dates", dates), ("strings", strings))
SHOWN = ("normal 0.02", "citeseer", *(name for name, _ in TYPED))  # on which every candidate is measured


def tensors(args):
    """(name, tensor) of each set, one of every name first: a run that is stopped has seen most kinds. Sets of several
    tensors are the bytes of another set."""
    for name, make in TYPED:
        yield name, make(QUICK_ITEMS if args.quick else TYPED_ITEMS, torch.Generator().manual_seed(0))
    met, others = set(), []
    for found in sets.all_sets(args.data, args.quick):
        if len(found.tensors) != 1:
            continue
        if found.name in met:
            others.append((found.name, found.tensors[0]))
        else:
            met.add(found.name)
            yield found.name, found.tensors[0]
    yield from others


def on_device(run, x):
    """The set on the device; on a GPU as often one below the other as DATA_BYTES take."""
    x = x.to(run.device)
    if not run.on_gpu or run.quick:
        return x
    times = -(-DATA_BYTES // x.nbytes)
    return x.repeat(times, *[1] * (x.dim() - 1))[: DATA_BYTES // (x.nbytes // len(x))].contiguous()


# ---- measuring -----------------------------------------------------------------------------------------------------


def is_hopeless(found, cost):
    """Whether a candidate is predicted to be far from the best over every link."""
    choices = (found.at(link_gbps, counts) for link_gbps in LINKS_GBPS for counts in (True, False))
    return all(
        one.total_s > HOPELESS * choice.total_s for choice in choices for one in choice.table if one.name == cost.name
    )


def measured(run, found, cost, x, what):
    """The cost of a candidate as it is: the whole tensor coded and decoded, and compared."""
    alone = ibp.Choice(found.num_bytes, found.link_gbps, found.encode, found.rows, (cost,))

    def encode():
        return alone.compress(x, device=x.device, pin_memory=False)

    coded, encode_s = choosing.timed(encode, x.device, BUDGET_S)
    out = torch.empty_like(x)
    harness.poison(out)
    _, decode_s = choosing.timed(lambda: ibp.decompress(coded, out=out), x.device, BUDGET_S)
    harness.check_bits(out, x, f"{what}, {cost.name}")
    stored_bytes = choosing.moved_bytes(coded, found.rows)
    return ibp.CodingCost(cost.scheme, cost.level, None, stored_bytes, encode_s, 0.0, decode_s, 0.0)


def us(value):
    return harness.four_digits(1e6 * value)


def measure_set(run, name, x):
    what = f"{name} {harness.dtype_name(x.dtype)}"
    found = ibp.choose(x, LINKS_GBPS[0])
    raw = next(cost for cost in found.table if cost.scheme == "raw")
    costs = [raw]
    common = {
        "case": name,
        "rows": len(x),
        "row_bytes": x.nbytes // len(x),
        "dtype": x.dtype,
        "sms": None,
    }
    for cost in sorted(found.table, key=lambda cost: cost.name):
        if cost is raw or (name not in SHOWN and is_hopeless(found, cost)):
            continue
        with run.cell(f"{what}, {cost.name}"):
            real = measured(run, found, cost, x, what)
            costs.append(real)
            run.add(
                **common,
                arm=real.name,
                savings=1 - real.stored_bytes / x.nbytes,
                gbps=x.nbytes * 1e-9 / (real.encode_s + real.decode_s),
                ideal_gbps=x.nbytes * 1e-9 / (cost.encode_s + cost.decode_s),
                stored_bytes=real.stored_bytes,
                encode_us=us(real.encode_s),
                decode_us=us(real.decode_s),
                predicted_bytes=cost.stored_bytes,
                predicted_encode_us=us(cost.encode_s),
                predicted_decode_us=us(cost.decode_s),
            )
    real = ibp.Choice(found.num_bytes, LINKS_GBPS[0], True, False, tuple(costs))
    for link_gbps in LINKS_GBPS:
        for counts in (True, False):
            add_choice(run, common, x.nbytes, found.at(link_gbps, counts), real.at(link_gbps, counts))


def add_choice(run, common, num_bytes, found, real):
    """Records what a choice takes, by what was measured of all candidates."""
    best = real.best
    own = next(cost for cost in real.table if cost.name == found.best.name)
    run.add(
        **common,
        arm=f"choice at {real.link_gbps:g} GB/s" + ("" if real.encode else OFTEN),
        savings=1 - own.stored_bytes / num_bytes,
        gbps=num_bytes * 1e-9 / own.total_s,
        ideal_gbps=num_bytes * 1e-9 / best.total_s,
        link_gbps=f"{real.link_gbps:g}",
        chosen=own.name,
        best=best.name,
        loss=f"{own.total_s / best.total_s - 1:.4f}",
        wanted_loss=WANTED_LOSS,
    )


def shortfalls(rows):
    """Lines that say where the choice loses too much."""
    return [
        f"{row['case']} {row['dtype']}, {row['arm']}: {row['chosen']} takes {100 * float(row['loss']):.1f} % longer "
        f"than {row['best']}, wanted {100 * WANTED_LOSS:g} %"
        for row in rows
        if row.get("loss") and float(row["loss"]) > WANTED_LOSS
    ]


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("choose", args, COLUMNS)
    torch.manual_seed(0)
    for name, x in tensors(args):
        with run.cell(f"{name} {harness.dtype_name(x.dtype)}"):
            measure_set(run, name, on_device(run, x))
    below = shortfalls(run.rows)
    choices = sum(bool(row.get("loss")) for row in run.rows)
    print(f"{choices - len(below)} of {choices} choices lose at most {100 * WANTED_LOSS:g} %")
    return run.finish(below)


if __name__ == "__main__":
    sys.exit(main())
