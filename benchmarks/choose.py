"""Which coding gets a tensor over a link the soonest, and does `ibp.codecs.choose` choose it?

    python -m benchmarks.choose [--out DIR] [--data DIR] [--sets NAME,NAME] [--cascaded] [--device cpu] [--quick]

The sets are those of ratio.csv and typed columns, some of them like columns of mortgage reports. On a GPU each set is
repeated to 256 MiB. For each candidate this measures, with the wall clock, the times for encoding and decoding the
whole set, beside what `choose` has predicted from its sample; bits are checked. If `choose` predicts that a candidate
takes more than three times the time of the best over every link, it is measured only on a few sets.

`choice at G GB/s` is the measured time of the candidate that was chosen for this link: encoding, decoding, and the
transfer, which is its bytes over the link's rate. The ideal is the best measured candidate. `fetched often` leaves out
the time for encoding. If the choice loses more than 3 %, it is printed last, as BELOW, with the measured and the
predicted times.

`--sets dates,K-cache` measures only the named sets, and keeps the CSV's rows of other sets that are from the same
machine.

`--cascaded` only measures nvCOMP's Cascaded by its options on the typed columns of integers, in 20 s. Other runs keep
these rows, and this one keeps all others, if they are from the same machine. The arms are the levels of the asymmetric
mode (3 is the default, and above 7 nothing changes), this mode without run lengths or without differences, and the
symmetric mode. Each calls one coder, with memory that was allocated before, and is timed with the wall clock;
`nvcomp:cascaded` is whole calls of `ibp.compress` and `ibp.decompress`. The ideal is the traffic of a device copy of
the same tensor. If the package refuses an option, the reason is printed, and there is no row.
"""

import argparse
import math
import sys
import time
from dataclasses import replace
from functools import partial

import torch

import ibp
from ibp._rows.geometry import bytes_of
from ibp.codecs import _compressing as choosing
from ibp.codecs._codec import CHUNK_BYTES, CODECS, Coder, stream_number

from . import harness, ideal, inputs, sets
from .ratio import nvcomp

COLUMNS = (
    "stored_bytes,encode_us,decode_us,predicted_bytes,predicted_encode_us,predicted_decode_us,"
    "link_gbps,chosen,best,loss,wanted_loss"
).split(",")
LINKS_GBPS = (6.0, 55.0, 360.0)  # The links are a network or NVMe, PCIe 5 x16, and NVLink.
DATA_BYTES = 256 * inputs.MIB  # On a GPU each set has this many bytes.
QUICK_ITEMS = 1 << 14
WANTED_LOSS = 0.03
ROUNDS = 3  # The candidates are measured in turn, in this many rounds.
STEADY_S = 20e-3  # If encoding and decoding take more seconds than this, they are measured once.
HOPELESS = 3.0  # Candidates that take this many times as long as the best one over every link are left out.
OFTEN = ", fetched often"
CASCADED = "nvcomp:cascaded, "  # The names of arms of --cascaded begin with this text.
LEVELS = (1, 2, 3, 7)  # These are the measured levels of Cascaded's asymmetric mode.


# ---- sets ----------------------------------------------------------------------------------------------------------


def sorted_ids(count, generator):
    """Returns int64: increasing ids in runs of 1 to 20, like the key by which a fact table is sorted."""
    ids = torch.randint(1, 1000, (count // 8,), generator=generator).cumsum(0)
    return ids.repeat_interleave(torch.randint(1, 21, (count // 8,), generator=generator))[:count]


def dates(count, generator):
    """Returns int32: days since 1970 within seven years, in random order."""
    return torch.randint(8035, 10592, (count,), dtype=torch.int32, generator=generator)


def strings(count, generator):
    """Returns uint8 [n, 16]: words of 3 to 15 letters, padded with spaces. There are 1,000 words; word r has a
    frequency proportional to 1/r."""
    words = torch.randint(ord("a"), ord("z") + 1, (1000, 16), dtype=torch.uint8, generator=generator)
    lengths = torch.randint(3, 16, (1000, 1), generator=generator)
    words.masked_fill_(torch.arange(16) >= lengths, ord(" "))
    return words[torch.multinomial(1 / torch.arange(1.0, 1001), count // 8, replacement=True, generator=generator)]


def strings_as_words(count, generator):
    """Returns int32 [n, 4]: the bytes of `strings`, four in an element."""
    return strings(count, generator).view(torch.int32)


LOAN_COLUMNS = ("loan rate", "loan balance", "loan age", "loan month", "loan delinquency")


def loans(count, generator):
    """Returns made-up columns of monthly reports of mortgages, by the names of LOAN_COLUMNS. The reports of a loan
    follow each other, month by month."""

    def draw(low, high):
        return torch.randint(low, high, (count // 8,), generator=generator)

    lengths = draw(1, 61)
    loan = torch.arange(count // 8).repeat_interleave(lengths)[:count]
    age = torch.arange(count) - (lengths.cumsum(0) - lengths)[loan]
    terms = torch.tensor([180, 240, 360])[draw(0, 3)]
    balance = 1000.0 * draw(20, 700)[loan] * (1 - age / terms[loan])
    is_late = torch.rand(count, generator=generator) < 0.02
    columns = (
        (draw(16, 64) / 8).float()[loan],
        (100 * balance).round().double() / 100,
        age.int(),
        (draw(0, 216)[loan] + age).int(),
        torch.where(is_late, torch.randint(1, 10, (count,), generator=generator), 0).to(torch.int8),
    )
    return dict(zip(LOAN_COLUMNS, columns))


def loan_column(name):
    return lambda count, generator: loans(count, generator)[name]


# Name, maker and number of items. Of sorted ids there are as many as a GPU measures, because repeated columns are not
# sorted.
TYPED = (
    ("sorted ids with runs", sorted_ids, DATA_BYTES // 8),
    ("dates", dates, 1 << 21),
    ("strings", strings, 1 << 21),
    ("strings as int32", strings_as_words, 1 << 21),
    *((name, loan_column(name), 1 << 21) for name in LOAN_COLUMNS),
)
SHOWN = ("normal 0.02", "citeseer", *(name for name, _, _ in TYPED))  # Every candidate is measured on these sets.


def typed_columns(args):
    """Yields (name, tensor) of each typed column."""
    for name, make, items in TYPED:
        yield name, make(QUICK_ITEMS if args.quick else items, torch.Generator().manual_seed(0))


def tensors(args):
    """Yields (name, tensor) of each set. The first set of every name comes first, so that a run that is stopped has
    seen most kinds. Sets of several tensors are left out, because another set has the same bytes."""
    yield from typed_columns(args)
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
    """Returns the set on the device. On a GPU it is repeated up to DATA_BYTES."""
    x = x.to(run.device)
    if not run.on_gpu or run.quick:
        return x
    times = -(-DATA_BYTES // x.nbytes)
    return x.repeat(times, *[1] * (x.dim() - 1))[: DATA_BYTES // (x.nbytes // len(x))].contiguous()


# ---- measuring -----------------------------------------------------------------------------------------------------


def is_hopeless(found, cost):
    """Returns whether a candidate is predicted to take more than HOPELESS times as long as the best over every link."""
    choices = (found.at(link_gbps, counts) for link_gbps in LINKS_GBPS for counts in (True, False))
    return all(
        one.total_s > HOPELESS * choice.total_s for choice in choices for one in choice.table if one.name == cost.name
    )


def measured_in_turn(run, found, costs, x, what):
    """Returns (predicted, measured) cost of each candidate that does not fail. The whole tensor is encoded and decoded,
    in turns, and compared."""
    real = {}
    for _ in range(ROUNDS):
        for cost in costs:
            before = real.get(cost.name, replace(cost, encode_s=math.inf, decode_s=math.inf))
            if cost.name in real and before.encode_s + before.decode_s > STEADY_S:
                continue
            with run.cell(f"{what}, {cost.name}"):
                again = choosing.measured(before, x, found.rows)
                assert again.stored_bytes < x.nbytes, f"{what}, {cost.name}: not the same bits, or nothing is saved"
                real[cost.name] = again
    return [(cost, real[cost.name]) for cost in costs if cost.name in real]


def us(value):
    return harness.four_digits(1e6 * value)


def measure_set(run, name, x):
    what = f"{name} {harness.dtype_name(x.dtype)}"
    found = ibp.codecs.choose(x, LINKS_GBPS[0])
    raw = next(cost for cost in found.table if cost.scheme == "raw")
    common = {
        "case": name,
        "rows": len(x),
        "row_bytes": x.nbytes // len(x),
        "dtype": x.dtype,
        "sms": None,
    }
    costs = [
        cost
        for cost in sorted(found.table, key=lambda cost: cost.name)
        if cost is not raw and (name in SHOWN or not is_hopeless(found, cost))
    ]
    both = measured_in_turn(run, found, costs, x, what)
    for cost, real in both:
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
    costs = [raw, *(real for _, real in both)]
    real = ibp.codecs.Choice(found.num_bytes, LINKS_GBPS[0], True, False, tuple(costs))
    for link_gbps in LINKS_GBPS:
        for counts in (True, False):
            add_choice(run, common, x.nbytes, found.at(link_gbps, counts), real.at(link_gbps, counts))


def add_choice(run, common, num_bytes, found, real):
    """Records the time of a choice, from the measured costs of all candidates."""
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


# ---- Cascaded by its options ---------------------------------------------------------------------------------------


def cascaded_options(dtype):
    """Returns {end of an arm's name: options of nvCOMP's Cascaded} for integers of a dtype. The asymmetric mode needs
    frames of reference (`FOR`). The symmetric mode is for integers of four and eight bytes."""
    encoding = nvcomp.CascadedFineGrainedEncoding
    found = {f"level {level}": {"compression_level": level} for level in LEVELS}
    found["no differences"] = {"fine_grained_encodings": encoding.RLE | encoding.FOR}
    found["no run lengths"] = {"fine_grained_encodings": encoding.DELTA | encoding.FOR}
    if dtype.itemsize in (4, 8):
        found["symmetric"] = {
            "mode": nvcomp.CascadedMode.SYMMETRIC,
            "fine_grained_encodings": encoding.DELTA | encoding.RLE | encoding.FOR,
        }
    return found


def cascaded_coder(x, options):
    """Returns a coder of nvCOMP's Cascaded on the current stream, as `ibp.compress` uses it but for the options."""
    codec = CODECS["nvcomp:cascaded"]
    of = codec.require(), codec.kind, codec.types(x.dtype)[0], CHUNK_BYTES
    return Coder(*of, x.device.index, stream_number(x.device), **options)


def measure_cascaded(run, name, x):
    what, data, out = f"{name} {harness.dtype_name(x.dtype)}", bytes_of(x), torch.empty_like(x)
    copy_gbps = x.nbytes * 1e-9 / run.seconds([lambda: out.copy_(x)])
    for end, options in cascaded_options(x.dtype).items():
        arm = CASCADED + end
        with run.cell(f"{what}, {arm}"):
            try:
                coder = cascaded_coder(x, options)
                room = coder.room(data)
                coded = coder.encode(data, room).clone()
            except (TypeError, ValueError, RuntimeError) as error:
                print(f"{what}, {arm}: nvCOMP refuses this: {error}", flush=True)
                continue
            harness.poison(out)
            coder.decode(coded, bytes_of(out))
            harness.check_bits(out, x, f"{what}, {arm}")
            encode_s = run.seconds([partial(coder.encode, data, room)], wall=True)
            decode_s = run.seconds([partial(coder.decode, coded, bytes_of(out))], wall=True)
            moved_bytes = 2 * (x.nbytes + coded.numel())  # Each direction reads the one and writes the other.
            run.add(
                case=name,
                rows=len(x),
                row_bytes=x.nbytes // len(x),
                dtype=x.dtype,
                sms=None,
                arm=arm,
                savings=1 - coded.numel() / x.nbytes,
                gbps=x.nbytes * 1e-9 / (encode_s + decode_s),
                ideal_gbps=ideal.device_gbps(x.nbytes, moved_bytes, copy_gbps),
                stored_bytes=coded.numel(),
                encode_us=us(encode_s),
                decode_us=us(decode_s),
            )


def run_cascaded(run, columns):
    """Measures Cascaded by its options on the columns of integers. columns: (name, tensor) of each typed column."""
    if not (nvcomp and run.on_gpu):
        print("nvCOMP: " + ("the package nvidia-nvcomp-cu13 is not installed" if run.on_gpu else "needs --device cuda"))
        return
    for name, x in columns:
        if not x.is_floating_point():
            with run.cell(name):
                measure_cascaded(run, name, on_device(run, x))


# ---- judging -------------------------------------------------------------------------------------------------------


def shortfalls(rows):
    """Returns lines that say where the choice loses too much."""
    costs = {(row["case"], row["dtype"], row["arm"]): row for row in rows if not row.get("loss")}

    def times(row, arm):
        cost = costs.get((row["case"], row["dtype"], arm))
        if cost is None:
            return arm
        real, predicted = (
            " + ".join(str(cost[column]) for column in (f"{kind}encode_us", f"{kind}decode_us"))
            for kind in ("", "predicted_")
        )
        return f"{arm} ({cost['stored_bytes']} bytes, {real} us, predicted {predicted})"

    return [
        f"{row['case']} {row['dtype']}, {row['arm']}: {times(row, row['chosen'])} takes {100 * float(row['loss']):.1f} "
        f"% longer than {times(row, row['best'])}, wanted {100 * WANTED_LOSS:g} %"
        for row in rows
        if row.get("loss") and float(row["loss"]) > WANTED_LOSS
    ]


def main(argv=None):
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--sets", type=lambda text: text.split(","))
    parser.add_argument("--cascaded", action="store_true")
    only, others = parser.parse_known_args(argv)
    args = harness.parse_args(others, __doc__)

    def is_measured(name):
        return only.sets is None or name in only.sets

    def is_kept(row):
        return row["arm"].startswith(CASCADED) != only.cascaded or not is_measured(row["case"])

    run = harness.Run("choose", args, COLUMNS, keep=is_kept)
    torch.manual_seed(0)
    found = typed_columns(args) if only.cascaded else tensors(args)
    found = ((name, x) for name, x in found if is_measured(name))
    if only.cascaded:
        run_cascaded(run, found)
        return run.finish()
    for name, x in found:
        what, start = f"{name} {harness.dtype_name(x.dtype)}", time.perf_counter()
        with run.cell(what):
            measure_set(run, name, on_device(run, x))
        print(f"{what}: {time.perf_counter() - start:.2f} s", flush=True)
    below = shortfalls(run.rows)
    choices = sum(bool(row.get("loss")) for row in run.rows)
    print(f"{choices - len(below)} of {choices} choices lose at most {100 * WANTED_LOSS:g} %")
    return run.finish(below)


if __name__ == "__main__":
    sys.exit(main())
