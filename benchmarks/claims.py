"""Writes the measured tables of README.md, docs/ and benchmarks/RESULTS.md from the CSVs.

    python -m benchmarks.claims [--out DIR] [--root DIR] [--check]

The text between the markers of each block is replaced, so that it holds no number but those of benchmarks/results.
--check writes nothing and exits with 1 where a page says something else. A block whose CSV is missing stays as it is:
empty, where it never was there. So headings and pictures that belong to a CSV are a part of its block.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from . import (
    charts,
    choose,
    dlrm,
    gnn,
    gnn_cache,
    gnn_parallel,
    harness,
    ratio,
    reference,
    reproduction,
    row_cache,
    scale,
)

ROWS = (256, 512, 1024, 2048, 4096, 16384, 65536)
CAPTION_OF_MACHINE = "{gpu}, torch {torch}, CUDA {cuda}, commit {commit:.10}"


def markers(name):
    return f"<!-- {name}: written by python -m benchmarks.claims -->", f"<!-- end of {name} -->"


def caption(rows):
    return CAPTION_OF_MACHINE.format(**rows[0])


def other_commits(rows, what, kind):
    """What a caption adds where rows are of other commits than the first, by how many kinds of what there are."""
    commits = Counter(commit for commit, _ in charts.in_order((row["commit"], kind(row)) for row in rows[1:]))
    return "".join(
        f", {what.format(count=count)} of {commit[:10]}"
        for commit, count in commits.items()
        if commit != rows[0]["commit"]
    )


def caption_by_case(rows):
    """The caption, and the cases that were measured on other commits than the first."""
    others = [row for row in rows if row["commit"] != rows[0]["commit"]]
    parts = [caption(rows)]
    for commit in charts.in_order(row["commit"] for row in others):
        cases = charts.in_order(f'"{row["case"]}"' for row in rates(others, commit=commit))
        parts.append(f"{', '.join(cases)}: commit {commit[:10]}")
    return "; ".join(parts)


def markdown(heads, lines):
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *lines])


def rates(rows, **wanted):
    """The rows in which every named column has the wanted value."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def rate(rows, **wanted):
    """GB/s of the best of them as text, empty where there is none."""
    return charts.number(max(row["gbps"] for row in found)) if (found := rates(rows, **wanted)) else ""


def with_ideal(rows, **wanted):
    if not (found := rates(rows, **wanted)):
        return ""
    best = max(found, key=lambda row: row["gbps"])
    return f"{charts.number(best['gbps'])} ({100 * best['gbps'] / best['ideal_gbps']:.0f} %)"


# ---- blocks --------------------------------------------------------------------------------------------------------


def rows_block(directory):
    """Random rows of normal BF16 tables by row size, and of synthetic ones by savings."""
    rows = charts.read(directory / "gather.csv")
    if not rows:
        return None
    most = max(row["sms"] for row in rows)
    normal = [row for row in rows if row["dtype"] == "bfloat16" and row["case"] == "normal 0.02"]
    few = min((row["sms"] for row in normal if row["arm"] == "planes slots" and row["sms"] > 4), default=most)
    lines = []
    for size in (size for size in ROWS if rates(normal, row_bytes=size)):
        own = rates(normal, row_bytes=size)
        lines.append(
            [
                charts.size_name(size),
                rate(own, arm="cpu index + copy"),
                rate(own, arm="cpu pipelined"),
                rate(own, arm="raw rows", sms=most),
                with_ideal(own, arm="ibp slots", sms=most),
                with_ideal(own, arm="planes slots", sms=most),
                with_ideal(own, arm="planes slots", sms=few),
            ]
        )
    heads = [
        "row",
        "CPU gather, then copy",
        "CPU gather pipelined with the copy",
        "raw rows",
        "`ibp`",
        "`planes`",
        f"`planes`, at most {few} SMs",
    ]
    text = []
    if lines:
        text.append(
            f"Random rows of BF16 N(0, 0.02) from pinned host memory (`gather.csv`: {caption(rows)}); GB/s of original "
            "bytes, in brackets the share of "
            "what the link allows for the sectors that the rows touch:\n\n" + markdown(heads, lines)
        )
    cells = [
        row
        for row in rows
        if row["case"].startswith(charts.SYNTHETIC) and row["arm"] == "ibp slots" and row["sms"] == most
    ]
    paper = {(row["row_bytes"], row["savings"]): row["gbps"] for row in charts.paper_rates("rows")}
    keys = [(row["row_bytes"], charts.savings_of(row["case"])) for row in cells]
    against = {key: row["gbps"] / paper[key] for key, row in zip(keys, cells) if key in paper}
    source = (
        "by figures that were copied by hand from a run of it on the same kind of GPU, whose commit and timing are not "
        "on record (`benchmarks/reference_rates.csv`)"
    )
    if beside := charts.read(directory / "reference.csv"):
        against = reference.gains(beside)
        source = f"timed in the same run (`reference.csv`: {caption(beside)}; theirs {beside[0]['reference']:.10})"
    if against:
        sizes, savings = zip(*against)
        text.append(
            f"Scheme `ibp` on the paper's synthetic rows of {charts.size_name(min(sizes))} to "
            f"{charts.size_name(max(sizes))}, {100 * min(savings):g} to "
            f"{100 * max(savings):g} % saved, comes {min(against.values()):.2f} to {max(against.values()):.2f} times "
            f"as fast as the paper's own code, {source}."
        )
    return "\n\n".join(text) or None


def device_block(directory):
    """Decoding in device memory beside a copy and nvCOMP."""
    rows = charts.read(directory / "codec.csv")
    device = {row["arm"]: row["gbps"] for row in rows if row["case"] == "device"}
    own = [
        row for row in rows if row["row_bytes"] == charts.OVERVIEW_ROW_BYTES and row["case"].startswith(charts.NORMAL)
    ]
    if not own or not device:
        return None
    most, lines = max(row["sms"] for row in own), []
    for case, dtype in charts.in_order((row["case"], row["dtype"]) for row in own):
        cell, few = rates(own, case=case, dtype=dtype), min(row["sms"] for row in own if row["sms"])
        lines.append(
            [
                f"{dtype}, N(0, {case.split()[-1]})",
                rate(cell, arm="planes decode", sms=most),
                rate(cell, arm="planes per column decode", sms=most),
                rate(cell, arm="decode", sms=most),
                rate(cell, arm="planes decode", sms=few),
                rate(cell, arm="nvcomp ANS decode"),
                rate(cell, arm="planes encode", sms=most),
                rate(cell, arm="nvcomp ANS compress"),
            ]
        )
    heads = [
        "table",
        "`planes`",
        "a codebook a column",
        "`ibp`",
        f"`planes`, at most {few} SMs",
        "nvCOMP ANS",
        "`planes` encoding",
        "nvCOMP ANS compressing",
    ]
    return (
        f"Decoding in device memory, rows of {charts.size_name(charts.OVERVIEW_ROW_BYTES)} (`codec.csv`: "
        f"{caption(rows)}{other_commits(rows, 'nvCOMP', lambda row: None)}); GB/s of original bytes, where "
        f"`copy_` does {charts.number(device['copy_'])} and a memset {charts.number(device['memset'])}:\n\n"
        + markdown(heads, lines)
    )


def tensor_block(directory):
    """Whole tensors brought to the GPU."""
    rows = charts.read(directory / "stream.csv")
    bars = charts.tensor_bars(rows)
    if not bars:
        return None
    return (
        f"A whole BF16 tensor, N(0, 0.02), from pinned host memory (`stream.csv`: {caption(rows)}; the paper's code "
        "by `reference_rates.csv`), GB/s of original bytes: "
        + ", ".join(f"{label} {charts.number(gbps)}" for label, gbps, _, _ in bars)
        + "."
    )


def beside_block(directory):
    """Matrix products beside fetches."""
    rows = [row for row in charts.read(directory / "overlap.csv") if row.get("matmul_share")]
    if not rows:
        return None

    def fetched(row):
        return (
            (charts.number(row["gbps"]), f"{100 * row['fetch_share']:.0f} %") if row["fetch_share"] else ("", "")
        )  # a kernel that sleeps is no fetch

    lines = [
        [
            row["arm"].removesuffix(", beside"),
            str(row["sms"]),
            *fetched(row),
            f"{100 * row['sm_share']:.1f} %",
            f"{100 - 100 * row['matmul_share']:.1f} %",
        ]
        for row in rows
    ]
    heads = ["fetch", "SMs at most", "GB/s", "of its rate alone", "SMs taken", "lost by the products"]
    return (
        f"BF16 matrix products beside fetches from pinned host memory (`overlap.csv`: {caption(rows)}):\n\n"
        + markdown(heads, lines)
    )


def cases_block(name, what, cases_with=""):
    """A table of every arm by every case of one script that is named so, each at its best number of SMs."""

    def block(directory):
        rows = [
            row
            for row in charts.read(directory / f"{name}.csv")
            if row["arm"] not in charts.PARTS and cases_with in row["case"]
        ]
        if not rows:
            return None
        cases = charts.in_order((row["case"], row["dtype"], row["row_bytes"]) for row in rows)
        lines = [
            [arm, *(rate(rows, arm=arm, case=case, dtype=dtype, row_bytes=size) for case, dtype, size in cases)]
            for arm in charts.in_order(row["arm"] for row in rows)
        ]
        heads = ["arm", *(f"{case}, {dtype}, rows of {charts.size_name(size)}" for case, dtype, size in cases)]
        return f"{what} (`{name}.csv`: {caption(rows)}); GB/s of original bytes:\n\n" + markdown(heads, lines)

    return block


def judged_rate(rows, **wanted):
    """GB/s of the one of them as text, in brackets what is wanted where that is missed."""
    if not (found := rates(rows, **wanted)):
        return ""
    row = found[0]
    missed = f" (of {charts.number(row['target_gbps'])})" if row.get("met") == "no" else ""
    return charts.number(row["gbps"]) + missed


def families_block(directory):
    """Rows of every kind, from host memory with few SMs and in device memory."""
    rows = charts.read(directory / "families.csv")
    cells = [row for row in rows if row["case"] != "device"]
    if not cells:
        return None
    few, some, most = (sorted({row["sms"] for row in cells}) * 3)[:3]
    lines = []
    for case, dtype, size in charts.in_order((row["case"], row["dtype"], row["row_bytes"]) for row in cells):
        own = rates(cells, case=case, dtype=dtype, row_bytes=size)
        coded = rates(own, arm="planes slots", sms=most)
        lines.append(
            [
                f"{case}, {dtype}, {charts.size_name(size)}",
                charts.number(coded[0]["ideal_gbps"]) if coded else "",
                *(judged_rate(own, arm="raw rows", sms=sms) for sms in (most, few)),
                *(judged_rate(own, arm="planes slots", sms=sms) for sms in (most, some, few)),
                judged_rate(own, arm="auto", sms=most),
                *(judged_rate(own, arm=arm, sms=most) for arm in ("planes decode", "planes encode")),
            ]
        )
    raw = ["raw rows", f"raw rows, {few} SMs"]
    coded = ["`planes`", f"`planes`, {some} SMs", f"`planes`, {few} SMs", "`auto`"]
    heads = ["rows", "ideal", *raw, *coded, "decode, device memory", "encode, device memory"]
    missed = sum(row["met"] == "no" for row in cells)
    far, near = (rates(cells, arm=arm)[:1] or rows for arm in ("planes slots", "planes decode"))
    differs = f"; in device memory commit {near[0]['commit']:.10}" if near[0]["commit"] != far[0]["commit"] else ""
    return (
        "## Rows of every kind\n\nRandom rows from pinned host memory, and whole tables in device memory "
        f"(`families.csv`: {caption(far)}{differs}); GB/s of original bytes, in brackets what is wanted where that is "
        f"missed ({missed} of {sum(row['met'] != '' for row in cells)}):\n\n{markdown(heads, lines)}\n\n"
        "![Rows of every kind](results/families.png)"
    )


def compress_block(directory):
    """Whole calls of compress."""
    rows = [row for row in charts.read(directory / "compress.csv") if not row["arm"].startswith("copy_")]
    if not rows:
        return None
    arms, lines = charts.in_order(row["arm"] for row in rows), []
    for case, dtype, size in charts.in_order((row["case"], row["dtype"], row["row_bytes"]) for row in rows):
        own = {row["arm"]: row for row in rates(rows, case=case, dtype=dtype, row_bytes=size)}
        texts = (timed_text(own[arm]) if arm in own else "" for arm in arms)
        lines.append([f"{case}, {dtype}, rows of {charts.size_name(size)}", *texts])
    return (
        "## Compressing\n\nThe whole of `ibp.compress`, its choice of scheme and codebook included "
        f"(`compress.csv`: {caption(rows)}); milliseconds, in brackets GB/s, in bold where less than wanted:\n\n"
        f"{markdown(['tensor', *arms], lines)}\n\n![Compressing](results/compress.png)"
    )


def places_block(directory):
    """Rows coded into memory that is there."""
    rows = charts.read(directory / "encode_into.csv")
    timed = [row for row in rows if row["case"] != "device" and row["arm"] != CALL_ARM]
    if not timed:
        return None
    most, lines = max(row["sms"] for row in timed), []
    cases = charts.in_order((row["case"], row["dtype"], row["row_bytes"]) for row in timed)
    for arm, sms in charts.in_order((row["arm"], row["sms"]) for row in timed):
        texts = (
            judged_rate(timed, arm=arm, sms=sms, case=case, dtype=dtype, row_bytes=size) for case, dtype, size in cases
        )
        lines.append([arm + (f", {sms} SMs" if 0 < sms < most else ""), *texts])
    call = "".join(
        f" A call that codes one page of 64 KiB comes back after {charts.number(row['us'])} us."
        for row in rates(rows, arm=CALL_ARM)
    )
    heads = ["arm", *(f"{case}, {dtype}, rows of {charts.size_name(size)}" for case, dtype, size in cases)]
    return (
        "## Coding into given memory\n\nRows coded into slots and an overflow area by one launch, without the host "
        f"(`encode_into.csv`: {caption(rows)}); GB/s of original bytes, in brackets what is wanted where that is "
        f"missed.{call}\n\n{markdown(heads, lines)}\n\n![Coding into given memory](results/encode_into.png)"
    )


def times_by_case(rows, beside):
    """(arms, a line for each case): microseconds by arm, and in brackets what `beside` says of a row."""
    arms, lines = charts.in_order(row["arm"] for row in rows), []
    for case in charts.in_order(row["case"] for row in rows):
        own = {row["arm"]: row for row in rates(rows, case=case)}
        texts = (f"{charts.fine_number(own[arm]['us'])} ({beside(own[arm])})" if arm in own else "" for arm in arms)
        lines.append([case, *texts])
    return arms, lines


def changes_block(directory):
    """Rows of tables that change."""
    rows = [row for row in charts.read(directory / "changes.csv") if row["case"] != "device"]
    if not rows:
        return None
    arms, lines = times_by_case(rows, lambda row: charts.fine_number(row["gbps"]))
    return (
        f"## Rows that change\n\nRows of {charts.size_name(rows[0]['row_bytes'])} of a table (`changes.csv`: "
        f"{caption(rows)}); microseconds of a call, in brackets GB/s:\n\n{markdown(['in', *arms], lines)}"
    )


def deltas_table(directory):
    """Bytes and rates of deltas by case: the arms side by side."""
    rows = [row for row in charts.read(directory / "deltas.csv") if row["case"] != "device"]
    if not rows:
        return None
    arms, lines = charts.in_order(row["arm"] for row in rows), []
    makes = [arm for arm in arms if not arm.endswith(", apply")]
    for case, dtype in charts.in_order((row["case"], row["dtype"]) for row in rows):
        own = {row["arm"]: row for row in rates(rows, case=case, dtype=dtype)}
        sizes = (f"{100 * own[arm]['stored']:.2f} %" if arm in own else "" for arm in makes)
        texts = (judged_rate([own[arm]]) if arm in own else "" for arm in arms)
        of_ibp = own.get(makes[0])
        changed, fewer = (f"{100 * of_ibp['changed']:.1f} %", f"{of_ibp['fewer']:.1f}") if of_ibp else ("", "")
        lines.append([f"{dtype}, {case}", changed, *sizes, fewer, *texts])
    heads = [
        "weights",
        "changed",
        *(f"bytes, {arm}" for arm in makes),
        "times fewer",
        *(f"{arm}, GB/s" for arm in arms),
    ]
    return (
        f"Two versions of weights (`deltas.csv`: {caption(rows)}): bytes as a share of the weights', how many times "
        "fewer ibp takes than an index and the value of each weight that changed, and GB/s of weights of whole calls, "
        f"in brackets what is wanted where that is missed:\n\n{markdown(heads, lines)}"
    )


def linear_table(directory):
    """Products with coded matrices, by matrix and number of vectors: the arms side by side."""
    rows = [row for row in charts.read(directory / "linear.csv") if row["case"] != "device"]
    if not rows:
        return None
    arms, lines = times_by_case(rows, lambda row: f"{row['times']:.2f}")
    return (
        f"Products of BF16 (`linear.csv`: {caption(rows)}) of matrices, outputs x inputs, and the number of vectors: "
        f"microseconds of a product in a CUDA graph, in brackets the times of cuBLAS's rate. Products overlap as far "
        f"as the kernels let them; where another kernel writes the vectors before each, its time is counted, too.\n\n"
        f"{markdown(['matrix, vectors', *arms], lines)}\n\n{linear_text(rows, arms)}"
    )


def linear_text(rows, arms):
    """Tokens a second through the matrices of a model, and the host's time of a call."""
    tokens = {
        arm: [charts.fine_number(row["tokens_per_s"]) for row in rates(rows, arm=arm) if row["tokens_per_s"]]
        for arm in arms
    }
    host = {arm: max(row["host_us"] for row in rates(rows, arm=arm) if row["host_us"]) for arm in arms}
    return (
        "Tokens a second through the matrices of the stack, of 1 and of 8 vectors: "
        + "; ".join(f"{arm} {' and '.join(tokens[arm])}" for arm in arms)
        + ". Without a graph a call comes back after at most "
        + ", ".join(f"{charts.fine_number(host[arm])} us ({arm})" for arm in arms)
        + "."
    )


def linear_block(directory):
    text = linear_table(directory)
    return text and f"## Products with coded matrices\n\n{text}"


def choices_block(directory):
    text = choose_table(directory)
    return text and f"## General codecs\n\n{text}"


def deltas_block(directory):
    text = deltas_table(directory)
    return text and f"## Deltas of versions\n\n{text}"


def collectives_table(directory):
    """Collectives by link, call and tensor: torch's time, and how many times as fast the others are."""
    rows = [row for row in charts.read(directory / "collectives.csv") if row["case"] != "device"]
    if not rows:
        return None
    lines, arms = [], charts.in_order(row["arm"] for row in rows)
    for case, dtype, mib in charts.in_order((row["case"], row["dtype"], row["mib"]) for row in rows):
        own = {row["arm"]: row for row in rates(rows, case=case, dtype=dtype, mib=mib)}
        link, call, kind = case.split(", ")
        saved = max(row["savings"] for row in own.values())
        texts = (_over_torch(own.get(arm)) for arm in arms[1:])
        lines.append(
            [link, f"`{call}`", f"{kind}, {dtype}", mib, percent(saved), charts.fine_number(own[arms[0]]["ms"]), *texts]
        )
    heads = ["link", "call", "tensor", "MiB", "saved", f"{arms[0]}, ms", *(f"`{arm}`" for arm in arms[1:])]
    others = [link for link in charts.in_order(row["link"] for row in rows) if _commit(rows, link) != rows[0]["commit"]]
    earlier = "".join(f"; {link}: commit {_commit(rows, link):.10}" for link in others)
    text = (
        f"Two GPUs (`collectives.csv`: {caption(rows)}{earlier}), calls in a row: torch's time, and how many times as "
        "fast calls of ibp are, in brackets what is wanted where that is missed. `saved`: by messages, index and "
        "overflow counted."
    )
    return f"{text}\n\n{markdown(heads, lines)}\n\n![Collectives](../benchmarks/results/collectives.png)"


def _commit(rows, link):
    return rates(rows, link=link)[0]["commit"]


def _over_torch(row):
    if row is None:
        return ""
    times = float(row["over_torch"])
    wanted = times * row["target_gbps"] / row["gbps"] if row["met"] == "no" else None
    return f"{times:.2f}" + (f" ({wanted:.2f})" if wanted else "")


def choose_table(directory):
    """Which coding wins over which link, what `ibp.codecs.choose` loses, and what every candidate takes on a few
    sets."""
    rows = charts.read(directory / "choose.csv")
    choices = [row for row in rows if row["chosen"]]
    if not choices:
        return None
    lines = []
    for arm in charts.in_order(row["arm"] for row in choices):
        own = rates(choices, arm=arm)
        wins = Counter(row["best"] for row in own).most_common()
        missed = [row for row in own if row["loss"] > float(row["wanted_loss"])]
        worst = max(row["loss"] for row in own)
        texts = ", ".join(f"{name} {count}" for name, count in wins)
        lines.append([arm.removeprefix("choice at "), texts, f"{len(own) - len(missed)} of {len(own)}", percent(worst)])
    wanted = 100 * float(choices[0]["wanted_loss"])
    others = other_commits(rows, "{count} sets", lambda row: (row["case"], row["dtype"]))
    heads = ["link", "sets on which each is the soonest", f"choices within {wanted:g} % of it", "the most lost"]
    text = (
        f"Every set of `ratio.csv` and typed columns, 256 MiB of each (`choose.csv`: {caption(rows)}{others}): the "
        "candidate that is coded, moved and decoded the soonest as measured, and what the choice of "
        f"`ibp.codecs.choose`, by its own sample, takes longer. `fetched often` leaves coding out."
        f"\n\n{markdown(heads, lines)}"
    )
    picture = "![What is chosen, set by set](results/choose.png)"
    candidates = [row for row in rows if not row["chosen"]]
    parts = [text, picture, *_won_by_general(choices, candidates), _coded_cases(candidates)]
    return "\n\n".join([*parts, *_ans_as_floats(candidates, directory)])


def _ans_as_floats(candidates, directory):
    """On how many sets ANS was measured by the worse one of its types."""
    rows = [row for row in candidates if row["arm"] == "nvcomp:ans"]
    if worse := reproduction.ans_as_floats(rows, reproduction.Results(directory)):
        sets = ", ".join(
            f"{name} ({percent(floats)}; as bytes {percent(of_bytes)})" for name, floats, of_bytes in worse
        )
        yield (
            f"ANS coded as floats, in an older run, what it codes smaller as bytes (`ratio.csv`): {sets}. Today's "
            "`nvcomp:ans` takes the type that saves more of a sample."
        )


def _won_by_general(choices, candidates):
    """Where a general codec is the soonest, and how many times as fast as raw bytes and all schemes of rows."""
    arms = charts.in_order(row["arm"] for row in choices)
    lines = []
    for case, dtype in charts.in_order((row["case"], row["dtype"]) for row in choices if _is_general(row["best"])):
        others = [row for row in rates(candidates, case=case, dtype=dtype) if not _is_general(row["arm"])]
        own = {row["arm"]: row for row in rates(choices, case=case, dtype=dtype)}
        lines.append([f"{case}, {dtype}", *(_gain(own.get(arm), others) for arm in arms)])
    if not lines:
        return
    yield (
        "Sets on which a general codec is the soonest over some link, and how many times as fast it is there as the "
        "best of raw bytes and the schemes of rows:\n\n"
        + markdown(["set", *(arm.removeprefix("choice at ") for arm in arms)], lines)
    )


def _is_general(name):
    return name not in ("raw", "ibp") and not name.startswith("planes")


def _gain(choice, others):
    """The best of a choice beside the soonest of other candidates and of raw bytes."""
    if choice is None or not _is_general(choice["best"]):
        return ""
    num_bytes, link_gbps = choice["rows"] * choice["row_bytes"], float(choice["link_gbps"])
    counts = not choice["arm"].endswith(choose.OFTEN)
    seconds = [num_bytes / link_gbps * 1e-9]
    for row in others:
        coding_us = (row["encode_us"] if counts else 0) + row["decode_us"]
        seconds.append(int(row["stored_bytes"]) / link_gbps * 1e-9 + coding_us * 1e-6)
    return f"`{choice['best']}` {min(seconds) * choice['ideal_gbps'] * 1e9 / num_bytes:.2f}"


def _coded_cases(rows):
    """Bytes and rates of every candidate on a few sets."""
    arms, lines = charts.in_order(row["arm"] for row in rows), []
    for case, dtype in charts.in_order((row["case"], row["dtype"]) for row in rows if row["case"] in choose.SHOWN):
        own = {row["arm"]: row for row in rates(rows, case=case, dtype=dtype)}
        lines.append([f"{case}, {dtype}", *(_coded(own.get(arm)) for arm in arms)])
    return (
        "Saved, and in brackets GB/s of coding and of decoding, whole calls, where a candidate saves anything:\n\n"
        + markdown(["set", *(f"`{arm}`" for arm in arms)], lines)
    )


def _coded(row):
    if row is None:
        return ""
    num_bytes = row["rows"] * row["row_bytes"]
    coding, decoding = (charts.number(num_bytes / row[name] * 1e-3) for name in ("encode_us", "decode_us"))
    return f"{percent(row['savings'])} ({coding}, {decoding})"


def spill_table(directory):
    """Reads and changes of rows that leave their slots, pages, and profiles of a net."""
    rows = charts.read(directory / "spill.csv")
    kinds = [row for row in rows if row["arm"].partition(", ")[0] in SPILL_CALLS]
    if not kinds:
        return None
    lines = []
    keys = ("case", "dtype", "row_bytes", "slot_bytes", "spilled")
    for key in charts.in_order(tuple(row[name] for name in keys) for row in kinds if row["arm"].startswith("decode")):
        own = rates(kinds, **dict(zip(keys, key)))
        case, dtype, row_bytes, slot_bytes, spilled = key
        texts = (
            judged_rate(rates(own, arm=f"{call}, {where}"))
            for call in SPILL_CALLS
            for where in ("device only", "spilled")
        )
        lines.append([f"{case}, {dtype}", f"{slot_bytes:,} of {row_bytes:,}", f"{100 * spilled:.1f} %", *texts])
    heads = ["rows", "slot", "leave it", *(f"`{call}`, {where}" for call in SPILL_CALLS for where in ("GPU", "host"))]
    text = (
        f"Tables in device memory (`spill.csv`: {caption(rows)}): slots, the share of the rows that leave them, and "
        "GB/s of original bytes with overflow on the GPU and in host memory, in brackets what is wanted where that is "
        f"missed:\n\n{markdown(heads, lines)}"
    )
    picture = "![Slots and overflow](../benchmarks/results/spill.png)"
    return "\n\n".join([text, picture, *spilled_pages(rows), *spilled_profiles(rows)])


SPILL_CALLS = ("decode", "index_select", "update_")


def spilled_pages(rows):
    lines = [
        [
            f"{row['slot_bytes']:,}",
            f"{float(row['target']):.2f}",
            f"{100 * row['spilled']:.1f} %",
            with_ideal([row]),
        ]
        for row in rows
        if row["arm"].startswith("load, ")
    ]
    heads = ["slot", "pages for each raw one", "rows that leave their slot", "loaded, GB/s (of what is possible)"]
    if lines:
        yield "Pages of a KV-cache of keys on the GPU, the first line with overflow there:\n\n" + markdown(heads, lines)


def spilled_profiles(rows):
    lines = [
        [
            row["case"].removeprefix("training, "),
            row["arm"].removeprefix("profile, "),
            f"{float(row['target']):.2f}",
            *(f"{100 * row[name]:.1f} %" for name in ("predicted_spilled", "spilled")),
            f"{row['host_bytes'] / 2**20:.1f}",
            with_ideal([row]),
        ]
        for row in rows
        if row["arm"].startswith("profile, ")
    ]
    heads = ["slots", "threshold", "times less memory", "rows to leave them", "that left them", "overflow, MiB"]
    if lines:
        yield (
            "A net in training, ten snapshots: what its profile says at each threshold, and what the last snapshot "
            "does when it is placed, its 15 small tensors decoded one after the other:\n\n"
            + markdown([*heads, "decoded, GB/s (of what is possible)"], lines)
        )


def checkpoints_table(directory):
    """Rates of whole checkpoints, and of the parts of their way."""
    rows = [row for row in charts.read(directory / "checkpoints.csv") if row["case"] != "device"]
    if not rows:
        return None
    lines = [
        [
            row["arm"],
            judged_rate([row]),
            charts.fine_number(row["seconds"]),
            charts.number(row["peak_mib"]) if row["peak_mib"] else "",
        ]
        for row in rows
    ]
    return (
        f"{rows[0]['case']}, BF16, from the page cache to a tmpfs (`checkpoints.csv`: {caption(rows)}): GB/s of "
        "weights, in brackets what is wanted where that is missed, seconds without fsync, and the most memory of its "
        "own, in MiB, that the process was seen to have:\n\n"
        + markdown(["part or call", "GB/s", "seconds", "memory"], lines)
    )


def checkpoints_block(directory):
    text = checkpoints_table(directory)
    return text and f"## Checkpoints\n\n{text}"


# ---- caches, tables that train, KV-caches --------------------------------------------------------------------------


def kind_of_rows(row):
    return f"{charts.DTYPE_NAMES.get(row['dtype'], row['dtype'])}, {charts.size_name(row['row_bytes'])}"


def times(value):
    return "" if value is None else charts.fine_number(value)


def every_arm(rows):
    """GB/s of each arm, number of SMs, case, dtype and row size, and what is wanted where that is missed: a column a
    case, or where there are more of these an arm."""
    cases = charts.in_order((row["case"], row["dtype"], row["row_bytes"]) for row in rows)
    arms, most = charts.in_order((row["arm"], row["sms"]) for row in rows), max(row["sms"] for row in rows)
    names = [arm + (f", at most {sms} SMs" if 0 < sms < most else "") for arm, sms in arms]
    heads = [
        f"{case}, {kind_of_rows({'dtype': dtype, 'row_bytes': size})}" if size else case for case, dtype, size in cases
    ]

    def text(arm, case):
        found = dict(zip(("arm", "sms", "case", "dtype", "row_bytes"), (*arm, *case)))
        return judged_rate(rows, **found)

    if len(cases) > len(arms):
        lines = [[head, *(text(arm, case) for arm in arms)] for head, case in zip(heads, cases)]
        return markdown(["rows", *names], lines)
    return markdown(["arm", *heads], [[name, *(text(arm, case) for case in cases)] for name, arm in zip(names, arms)])


def arms_table(name, what):
    """What a script of few cases has measured."""

    def block(directory):
        rows = [row for row in charts.read(directory / f"{name}.csv") if row["case"] != "device"]
        if not rows:
            return None
        brackets = ", in brackets what is wanted where that is missed" if any(row.get("met") for row in rows) else ""
        return f"{what} (`{name}.csv`: {caption(rows)}); GB/s of original bytes{brackets}:\n\n{every_arm(rows)}"

    return block


def row_cache_table(directory):
    """Rows that a cache holds, and how fast they come out of it."""
    rows = [row for row in charts.read(directory / "row_cache.csv") if row["case"] != "device"]
    if not rows:
        return None
    lines = [
        [
            f"{row['case']}, {kind_of_rows(row)}",
            f"{row['budget_bytes'] / 2**20:,.0f}",
            f"{row['raw_rows']:,}",
            f"{row['held_rows']:,}",
            charts.fine_number(gain),
            f"{100 * share:.0f} %",
        ]
        for row, gain, share in row_cache.capacities(rows)
        if row["arm"] == "own hits"
    ]
    heads = ["rows", "MiB of the cache", "raw rows in them", "rows held", "times as many", "of the formula"]
    return (
        f"Rows that a cache holds, its map included (`row_cache.csv`: {caption(rows)}), and of the formula's rows, the "
        f"cache's bytes over the stored bytes of a row and 16 of a map:\n\n{markdown(heads, lines)}\n\n"
        "Rows through it, beside those of a table that is all in device memory or all in host memory; GB/s of original "
        f"bytes, in brackets what is wanted where that is missed:\n\n{every_arm(rows)}"
    )


def dlrm_table(directory):
    """Look-ups, an arm a column, and how many times as fast ibp is."""
    rows = charts.read(directory / "dlrm.csv")
    if not rows:
        return None
    cells, lines = {}, []
    for row in rows:
        cells.setdefault((row["case"], row["dtype"], row["row_bytes"]), {})[row["arm"]] = row
    gains = {(gain.row["case"], gain.row["dtype"], gain.row["row_bytes"]): gain for gain in dlrm.gains(rows)}
    for cell, arms in cells.items():
        gain = gains.get(cell)
        texts = (judged_rate([arms[arm]]) if arm in arms else "" for arm in dlrm.ARMS)
        factors = map(times, gain[1:]) if gain else [""] * 4
        lines.append([f"{kind_of_rows(next(iter(arms.values())))}, {cell[0]}", *texts, *factors])
    of_cache = [dlrm.RAW_CACHE, dlrm.IBP_CACHE]
    heads = ["rows", *(f"`{arm}`" for arm in dlrm.ARMS), *(f"`ibp` / `{arm}`" for arm in dlrm.ARMS[:3])]
    return (
        f"A row of each of {dlrm.NUM_TABLES} tables for each sample of a batch (`dlrm.csv`: {caption(rows)}), the "
        f"cache {100 * dlrm.CACHE_SHARE:g} % of the raw bytes; GB/s of original bytes, in brackets what is wanted "
        "where that is missed, and how many times as fast ibp is:\n\n"
        + markdown([*heads, f"`{of_cache[1]}` / `{of_cache[0]}`"], lines)
    )


def training_table(directory):
    """Steps by arm."""
    rows = charts.read(directory / "dlrm_train.csv")
    if not rows:
        return None
    arms, lines = charts.in_order(row["arm"] for row in rows), []
    for case, dtype, size in charts.in_order((row["case"], row["dtype"], row["row_bytes"]) for row in rows):
        own = {row["arm"]: row for row in rates(rows, case=case, dtype=dtype, row_bytes=size)}
        texts = (f"{own[arm]['us'] / 1e3:.2f} ({own[arm]['added']:.2f})" if arm in own else "" for arm in arms)
        lines.append([f"{kind_of_rows({'dtype': dtype, 'row_bytes': size})}, {case}", *texts])
    return (
        f"A training step with row-wise Adagrad (`dlrm_train.csv`: {caption(rows)}); milliseconds, in brackets what it "
        f"adds to a forward pass, as a share of the time of its gather:\n\n{markdown(['rows and ids', *arms], lines)}"
    )


def kv_fetch_block(directory):
    """Rates of whole KV-caches by case and arm, and what coded tokens save."""
    rows = charts.read(directory / "kv_fetch.csv")
    if not rows:
        return None
    arms = charts.in_order(row["arm"] for row in rows)
    lines = []
    for case in charts.in_order(row["case"] for row in rows):
        own = rates(rows, case=case)
        coded = max(own, key=lambda row: row["savings"])
        times = {row["arm"]: row["ms"] for row in own}
        cells = [f"{with_ideal(own, arm=arm)}, {charts.number(times[arm])} ms" if arm in times else "" for arm in arms]
        lines.append([case, f"{100 * coded['savings']:.1f} %", *cells])
    return (
        f"All keys and values of all layers, a layer at a time, as one token needs them (`kv_fetch.csv`: "
        f"{caption(rows)}): GB/s of original bytes, in brackets the share of what the link, or the GPU's memory, "
        "allows for the bytes stored, and the time of all layers:\n\n" + markdown(["KV-cache", "saved", *arms], lines)
    )


def gnn_cache_table(directory):
    """Epochs and fetches by cache."""
    rows = charts.read(directory / "gnn_cache.csv")
    if not rows:
        return None
    lines = []
    for row, fetch, epoch in gnn_cache.gains(rows):
        percent = row["cache_percent"]
        lines.append(
            [
                f"{row['case']}, {kind_of_rows(row)}",
                f"{percent} %" if percent else "none",
                f"{row['held_rows'] / max(1, row['raw_rows']):.2f}" if percent else "",
                f"{100 * row['hit_rate']:.1f} %" if percent else "",
                charts.fine_number(row["epoch_s"]),
                charts.fine_number(epoch),
                charts.fine_number(fetch),
                times(row["predicted"]),
            ]
        )
    heads = ["features", "cache", "rows held / raw rows", "hits", "seconds of an epoch", "epochs: raw / ibp"]
    return (
        "The same graphs on one GPU with a cache of a share of the features' bytes there, filled with the rows that an "
        f"epoch asks for most often (`gnn_cache.csv`: {caption(rows)}). Beside how many times as fast as raw rows with "
        "a cache of the same bytes `ibp` is, what its larger number of cached rows alone predicts for a fetch:\n\n"
        + markdown([*heads, "fetches: raw / ibp", "predicted"], lines)
    )


def percent(share):
    return "" if share is None else f"{100 * share:.1f} %"


def scale_table(directory):
    """Fetches and epochs by number of GPUs and cache."""
    rows = charts.read(directory / "scale.csv")
    if not rows:
        return None
    lines = []
    for row, fetch in scale.gains(rows):
        held = row["held_rows"] / row["raw_rows"] if row["raw_rows"] else None
        shares = (percent(row[name]) for name in ("hit_rate", "own_share", "peer_share"))
        size = f"{row['cache_percent']} %" if row["cache_percent"] else "none"
        factors = map(times, (row["epoch_s"], fetch, row["predicted"]))
        name = f"{row['case']}, {kind_of_rows(row)}"
        lines.append([name, str(row["gpus"]), size, times(held), *shares, charts.number(row["gbps"]), *factors])
    heads = ["features", "GPUs", "cache", "rows held / raw rows", "hits", "own", "peer", "GB/s", "seconds of an epoch"]
    return (
        "A process a GPU, caches of a share of the features' bytes on each, all fetching at once (`scale.csv`: "
        f"{caption(rows)}); `sharded`: rows of a table of which each process has a part. Shares are of the rows asked "
        "for; beside how many times as fast as raw rows with the same cache coded ones come, what their larger number "
        "of cached rows alone predicts:\n\n" + markdown([*heads, "fetches: raw / ibp", "predicted"], lines)
    )


# By the name of the CSV: the heading of RESULTS.md, and the table, which pages of docs/ take as well.
MEASURED = {
    "row_cache": ("A cache of rows", row_cache_table),
    "dlrm": ("Look-ups of recommendation models", dlrm_table),
    "dlrm_train": ("Training steps of embedding tables", training_table),
    "bags": ("Rows decoded and pooled", arms_table("bags", "Bags of rows summed")),
    "kv_fetch": ("Whole KV-caches", kv_fetch_block),
    "kv_pages": ("Pages of KV-caches", arms_table("kv_pages", "Pages of 64 KiB to host memory and back")),
    "kv_rows": ("Rows of KV-caches", arms_table("kv_rows", "Tokens of a KV-cache by index")),
    "gnn_cache": ("Graph neural networks with a cache", gnn_cache_table),
    "scale": ("Several processes", scale_table),
}


def section(name):
    """The block of RESULTS.md that is named so."""
    heading, table = MEASURED[name]

    def block(directory):
        text = table(directory)
        return text and f"## {heading}\n\n{text}\n\n![{heading}](results/{name}.png)"

    return block


def illustrated(name):
    """The block of a page of docs/ that is named so."""
    heading, table = MEASURED[name]

    def block(directory):
        text = table(directory)
        return text and f"{text}\n\n![{heading}](../benchmarks/results/{name}.png)"

    return block


CALL_ARM = "until it returns"
# Scripts that say beside each rate what is wanted.
JUDGED = (
    "families",
    "compress",
    "encode_into",
    "row_cache",
    "dlrm",
    "bags",
    "kv_fetch",
    "kv_pages",
    "kv_rows",
    "deltas",
    "checkpoints",
    "linear",
    "spill",
)


def missed_block(directory):
    """Every rate of these scripts that is below what is wanted."""
    found = [row for name in JUDGED for row in charts.read(directory / f"{name}.csv")]
    if not found:
        return None
    lines = [
        [
            f"`{row['benchmark']}`",
            f"{row['case']}, {row['dtype']}, {charts.size_name(row['row_bytes'])}",
            row["arm"] + (f", {row['sms']} SMs" if row["sms"] else ""),
            *map(charts.fine_number, (row["target_gbps"], row["gbps"])),
            f"{100 * row['gbps'] / row['target_gbps']:.0f} %",
        ]
        for row in found
        if row.get("met") == "no"
    ]
    text = f"Of {sum(bool(row.get('met')) for row in found)} targets of these scripts {len(lines)} are missed"
    heads = ["script", "rows", "arm", "wanted, GB/s", "measured", "of it"]
    return f"{text}:\n\n{markdown(heads, lines)}" if lines else f"{text}."


def timed_text(row):
    text = f"{charts.fine_number(row['ms'])} ({charts.fine_number(row['gbps'])})"
    return f"**{text}**" if row["met"] == "no" else text


def calls_block(directory):
    """Calls for few rows, in microseconds."""
    rows = charts.read(directory / "small_calls.csv")
    if not rows:
        return None
    arms, lines = charts.in_order(row["arm"] for row in rows), []
    for case in charts.in_order(row["case"] for row in rows):
        times = {row["arm"]: row["rows"] * row["row_bytes"] / row["gbps"] * 1e-3 for row in rates(rows, case=case)}
        lines.append([case, *(charts.number(times[arm]) if arm in times else "" for arm in arms)])
    return (
        f"A call of `index_select` for few rows of {charts.size_name(rows[0]['row_bytes'])} (`small_calls.csv`: "
        f"{caption(rows)}), in microseconds:\n\n" + markdown(["from", *arms], lines)
    )


def memory_block(directory):
    """Metadata and temporaries in the GPU's memory."""
    rows = [row for row in charts.read(directory / "memory.csv") if row["peak_bytes"]]
    tables, own = harness.of_tables(rows), [row for row in rows if row["index_bytes"]]
    if not tables:
        return None
    return (
        f"In the GPU's memory a table's metadata takes at most {100 * max(map(harness.metadata_share, tables)):.2f} % "
        "of the original bytes (rows from "
        f"{harness.METADATA_ROW_BYTES} B), and no path more than "
        f"{max(int(row['peak_bytes']) for row in own) / 2**20:.1f} MiB of temporaries beyond its output "
        "(`memory.csv`)."
    )


def savings_block(directory):
    """What every set saves by every method, and the best of nvCOMP's codecs."""
    if not (rows := charts.read(directory / "ratio.csv")):
        return None
    lines = []
    for (name, dtype), saved in ratio.cells_of(rows).items():
        best = max((method for method in saved if method.startswith(charts.NVCOMP)), key=saved.get, default=None)
        lines.append(
            [
                name,
                dtype,
                *(savings_text(saved.get(method)) for method in ("paper", "ibp", "planes", ratio.ZSTD)),
                f"{savings_text(saved[best])} ({best.removeprefix(charts.NVCOMP)})" if best else "",
            ]
        )
    heads = ["set", "dtype", "the paper's choice", "`ibp`", "`planes`", f"{ratio.ZSTD}, 64 KiB", "nvCOMP, its best"]
    return (
        "Savings, or how many times smaller (`ratio.csv`: bytes of coded rows and codebooks, every set by every "
        "method; packed layout):\n\n" + markdown(heads, lines)
    )


def savings_text(savings):
    """ "33.6 %", or "12.3x" where most is saved; empty where there is no such method."""
    if savings is None:
        return ""
    text = ratio.show(savings)
    return text if text.endswith("x") else f"{text} %"


def headline_block(directory):
    """The few figures that the README shows, beside what people do without ibp."""
    gather, stream = (charts.read(directory / f"{name}.csv") for name in ("gather", "stream"))
    saved = ratio.cells_of(charts.read(directory / "ratio.csv"))
    rows = rates(gather, case="normal 0.02", dtype="bfloat16", row_bytes=charts.OVERVIEW_ROW_BYTES)
    if not rows or not stream:
        return None
    size, most = charts.size_name(charts.OVERVIEW_ROW_BYTES), max(row["sms"] for row in gather)
    lines = [
        [
            f"random rows of {size}, BF16",
            f'`x[ids].to("cuda")` {rate(rows, arm="cpu index + copy")}, gathered by the CPU while it is copied '
            f"{rate(rows, arm='cpu pipelined')}, a kernel that reads raw rows {rate(rows, arm='raw rows', sms=most)}",
            rate(rows, arm="planes slots", sms=most),
        ]
    ]
    if own := rates(gather, case="citeseer"):
        lines.append(
            [
                "random rows of Citeseer's features",
                f"raw rows {rate(own, arm='raw rows', sms=most)}",
                rate([row for row in own if row["arm"] in ("ibp slots", "planes slots")], case="citeseer"),
            ]
        )
    bars = {label: gbps for label, gbps, _, _ in charts.tensor_bars(stream)}
    lines.append(
        [
            "a whole BF16 tensor",
            ", ".join(
                f"`copy_` {charts.number(gbps)}" if label == "raw copy_" else f"{label} {charts.number(gbps)}"
                for label, gbps in bars.items()
                if label not in ("ibp", "the paper's code")
            ),
            charts.number(bars["ibp"]),
        ]
    )
    if own := saved.get(("normal 0.02", "bfloat16")):
        best = max((method for method in own if method.startswith(charts.NVCOMP)), key=own.get, default=None)
        other = f"nvCOMP {savings_text(own[best])}, " if best else ""
        others = f"{other}zstd {savings_text(own.get(ratio.ZSTD))}"
        lines.append(["bytes saved of BF16 N(0, 0.02)", others, savings_text(own["planes"])])
    differs = any(row["commit"] != gather[0]["commit"] for row in stream)
    others = ", whole tensors and nvCOMP of [others](benchmarks/RESULTS.md)" if differs else ""
    return f"GB/s of original bytes, from pinned host memory ({caption(gather)}{others}):\n\n" + markdown(
        ["what", "without ibp", "with ibp"], lines
    )


# ---- sentences of pages --------------------------------------------------------------------------------------------

DELTA_CASE, LINK_CHOICE = ("1.5 % changed", "bfloat16"), "choice at 55 GB/s"


def checkpoints_line(directory):
    """How fast a checkpoint is compressed, and in how much memory."""
    rows = {row["arm"]: row for row in charts.read(directory / "checkpoints.csv")}
    arms = [arm for arm in rows if arm.startswith("compress, ")]
    if not arms:
        return None
    first = rows[arms[0]]
    texts = (
        f"{charts.number(rows[arm]['gbps'])} GB/s with {arm.removeprefix('compress, ').replace('GPU', 'a GPU')} and "
        f"{charts.number(rows[arm]['peak_mib'])} MiB of memory"
        for arm in arms
    )
    return (
        f"{first['case']} in BF16 are compressed at {', at '.join(texts)} (`checkpoints.csv`: {caption([first])}); "
        "the rest is in [RESULTS.md](../benchmarks/RESULTS.md#checkpoints)."
    )


def deltas_line(directory):
    """What a delta of a small step takes."""
    case, dtype = DELTA_CASE
    rows = {row["arm"]: row for row in rates(charts.read(directory / "deltas.csv"), case=case, dtype=dtype)}
    if "ibp" not in rows or "index and value" not in rows:
        return None
    own, other = rows["ibp"], rows["index and value"]
    return (
        f"Where {percent(own['changed'])} of BF16 weights changed, a delta takes {100 * own['stored']:.2f} % of their "
        f"bytes, an index and a value for each change {100 * other['stored']:.2f} % (`deltas.csv`: {caption([own])}); "
        "other steps and rates are in [RESULTS.md](../benchmarks/RESULTS.md#deltas-of-versions)."
    )


def scale_line(directory):
    """What coded rows gain in a cache that two GPUs share."""
    arms = ("ibp, cache of 1 %, 2 GPUs", "raw rows, cache of 1 %, 2 GPUs")
    rows = [rates(charts.read(directory / "scale.csv"), case="pubmed", arm=arm) for arm in arms]
    if not all(rows):
        return None
    coded, raw = (charts.number(found[0]["gbps"]) for found in rows)
    return (
        f"Two GPUs that fetch at once, each with a cache of 1 % of the bytes, get {coded} GB/s of Pubmed's rows coded, "
        f"{raw} raw (`scale.csv`: {caption(rows[0])}); other features are in "
        "[RESULTS.md](../benchmarks/RESULTS.md#several-processes)."
    )


def choices_line(directory):
    """How often the choice of a coding is as good as the best."""
    choices = rates(charts.read(directory / "choose.csv"), arm=LINK_CHOICE)
    if not choices:
        return None
    good = sum(row["loss"] <= float(row["wanted_loss"]) for row in choices)
    return (
        f"Over a link of 55 GB/s the choice takes at most {100 * float(choices[0]['wanted_loss']):g} % longer than the "
        f"fastest candidate on {good} of {len(choices)} sets (`choose.csv`: {caption(choices)}), each of which is "
        "listed in [RESULTS.md](../benchmarks/RESULTS.md#general-codecs)."
    )


# ---- weights and graphs --------------------------------------------------------------------------------------------

LOADING_ARM, RESIDENT_ARM, FLEXGEN_ARM = "ibp, loading", "ibp, on the GPU", "FlexGen"


def with_bound(row):
    """Milliseconds, and the share that the bound is of them."""
    if row is None:
        return ""
    share = f" ({100 * row['bound_ms'] / row['ms']:.0f} %)" if row["bound_ms"] else ""
    return charts.number(row["ms"]) + share


def gigabytes(num_bytes):
    return "" if num_bytes is None else f"{num_bytes / 1e9:.2f}"


def tokens_table(rows):
    """A line for each arm and number of SMs of one dtype, a column for each batch and prompt."""
    shown = [row for row in rows if row["arm"] in charts.WEIGHTS_STYLE]
    cells = list(charts.of_tokens(shown))
    most = {arm: max(row["sms"] for row in rates(shown, arm=arm)) for arm in {row["arm"] for row in shown}}
    lines = []
    for arm, (label, _) in charts.WEIGHTS_STYLE.items():
        for sms in sorted({row["sms"] for row in rates(shown, arm=arm) if row["prompt"]}, reverse=True):
            own = {(row["rows"], row["prompt"]): row for row in rates(shown, arm=arm, sms=sms)}
            first = next(iter(own.values()))
            lines.append(
                [
                    label + (f", at most {sms} SMs" if sms < most[arm] else ""),
                    *(with_bound(own.get(cell)) for cell in cells),
                    gigabytes(first["host_bytes"]),
                    gigabytes(first["device_bytes"]),
                ]
            )
    return markdown(["weights", *(charts.cell_name(*cell) for cell in cells), "GB on the host", "GB on GPUs"], lines)


def offload_block(directory):
    """Milliseconds a token by where the weights are, and where they lie, a table for each dtype."""
    rows = charts.read(directory / "weights.csv")
    tables = {dtype: own for dtype, own in charts.by_dtype(rows).items() if charts.of_tokens(own)}
    if not tables:
        return None
    text = [
        f"Milliseconds a token of a Llama with random weights, N(0, 0.02) (`weights.csv`: {caption(rows)}), or of one "
        "call on many tokens at once. In brackets the share that its bound is of it: the time that the link needs for "
        "the bytes stored; for coded rows on the GPU the time of raw ones plus that of decoding; for tokens at once, "
        "with which computing takes as long as the link does, the time of raw weights on the GPU plus 3 %."
    ]
    for dtype, own in tables.items():
        text.append(f"{charts.DTYPE_NAMES.get(dtype, dtype)}, {own[0]['weight_bytes'] / 1e9:.2f} GB:")
        text.append(tokens_table(own))
    if loading := rates(rows, arm=LOADING_ARM):
        text.append(
            "From safetensors in the page cache to a compressed model in pinned memory: "
            f"{loading[0]['ms'] / 1e3:.1f} s."
        )
    if resident := rates(rows, arm=RESIDENT_ARM):
        share = resident[0]["device_bytes"] / resident[0]["weight_bytes"]
        text.append(
            f"As coded rows, {100 * resident[0]['savings']:.1f} % smaller, and with the memory for decoding, weights "
            f"take {100 * share:.1f} % of their bytes on the GPU: the largest model that fits has {1 / share:.2f} "
            "times as many weights as without (computed from these bytes, not tried)."
        )
    text.append("![Milliseconds a token, by where the weights are](../benchmarks/results/weights.png)")
    if timeline := charts.read(directory / "timeline.csv"):
        window = charts.window_of(timeline)
        busy = {kind: charts.busy_share(own, window) for kind, own in charts.spans_of(timeline).items()}
        text.append(
            f"In {(window[1] - window[0]) / 1e3:.0f} ms of a token of BF16 weights copies over the link are under way "
            f"{100 * busy['copy']:.0f} % of the time, decoding {100 * busy['decode']:.0f} %, and the model's own "
            f"kernels {100 * busy['compute']:.0f} %:"
        )
        text.append("![Copies, decoding and the model during a token](../benchmarks/results/timeline.png)")
    return "\n\n".join(text)


def offload_line(directory):
    """The first cell of the first dtype in a sentence."""
    rows = charts.read(directory / "weights.csv")
    tables = [cells for own in charts.by_dtype(rows).values() if (cells := charts.of_tokens(own))]
    if not tables:
        return None
    (batch, prompt), arms = next(iter(tables[0].items()))
    row = next(iter(arms.values()))
    return (
        "## Models larger than the GPU\n\n"
        f"A token of a Llama with {row['weight_bytes'] / 1e9:.2f} GB of "
        f"{charts.DTYPE_NAMES.get(row['dtype'], row['dtype'])} weights, {charts.cell_name(batch, prompt)} "
        f"(`weights.csv`: {caption(rows)}), in milliseconds: "
        + "; ".join(
            f"{label} {with_bound(arms[arm])}" for arm, (label, _) in charts.WEIGHTS_STYLE.items() if arm in arms
        )
        + "; in brackets the share that the bound is of it. All of it: [docs/llm.md](../docs/llm.md#ibpoffload)."
    )


def tokens_a_second(row):
    """Of all sequences of a batch, which ends the name of the case."""
    return int(row["case"].rsplit(" ", 1)[1]) / row["token_s"]


def flexgen_block(directory):
    """FlexGen's loop by arm."""
    rows = charts.read(directory / "flexgen_opt.csv")
    if not rows:
        return None
    lines = [
        [
            row["arm"],
            f"{tokens_a_second(row):.2f}",
            f"{row['prefill_s']:.2f}",
            f"{row['load_s']:.1f}",
            gigabytes(row["host_bytes"]),
        ]
        for row in rows
    ]
    heads = ["", "tokens a second", "seconds until the first tokens", "seconds of loading", "GB on the host"]
    return (
        f"FlexGen with {rows[0]['case']}, FP16, all weights in host memory (`flexgen_opt.csv`: {caption(rows)}); "
        "tokens after the first, of the whole batch:\n\n" + markdown(heads, lines)
    )


def flexgen_line(directory):
    rows = charts.read(directory / "flexgen_opt.csv")
    plain, coded = (rates(rows, arm=arm) for arm in (FLEXGEN_ARM, f"{FLEXGEN_ARM}, ibp"))
    if not plain or not coded:
        return None
    return (
        f"## FlexGen\n\n{rows[0]['case']}, FP16, all weights in host memory (`flexgen_opt.csv`: {caption(rows)}): "
        f"{tokens_a_second(plain[0]):.2f} tokens a second without ibp, {tokens_a_second(coded[0]):.2f} with it; "
        f"{gigabytes(plain[0]['host_bytes'])} and {gigabytes(coded[0]['host_bytes'])} GB of host memory. All of it: "
        "[docs/llm.md](../docs/llm.md#flexgen)."
    )


def graphs_block(directory):
    """Seconds an epoch by set and arm, and how much faster fetches are."""
    rows = charts.read(directory / "gnn.csv")
    if not rows:
        return None
    gains, lines = {gain.case: gain for gain in gnn.gains(rows)}, []
    for case in charts.in_order(row["case"] for row in rows):
        own = {row["arm"]: row for row in rates(rows, case=case)}
        row, gain = next(iter(own.values())), gains.get(case)
        lines.append(
            [
                case.split(", batch")[0],
                f"{charts.DTYPE_NAMES.get(row['dtype'], row['dtype'])}, {row['row_bytes']:,} B",
                f"{row['table_gib']:.1f}",
                f"{row['batch']:,}",
                *(charts.fine_number(own[arm]["epoch_s"]) if arm in own else "" for arm in charts.GNN_STYLE),
                *(map(charts.fine_number, gain[1:]) if gain else [""] * 3),
            ]
        )
    heads = ["features", "rows", "GiB", "batch", *(f"`{arm}`" for arm in charts.GNN_STYLE)]
    heads += ["fetches: `raw rows` / `ibp`", "epochs: the CPU's best / `ibp`", "epochs: `raw rows` / `ibp`"]
    return (
        f"Seconds of an epoch of {gnn.EPOCH_BATCHES} batches, the next one sampled and fetched beside the one that "
        f'trains (`gnn.csv`: {caption(rows)}). `cpu plain` is `x[ids].to("cuda")`, `cpu pinned` and `cpu pipelined` '
        "gather into pinned memory; `raw rows` and `ibp` are fetched by the GPU. The last three columns: how many "
        "times as fast ibp is, in fetches alone and in epochs:\n\n"
        + markdown(heads, lines)
        + "\n\n![Epochs and fetches, by features and arm](../benchmarks/results/gnn.png)"
    )


def several_block(directory):
    """Seconds an epoch by number of GPUs."""
    rows = charts.read(directory / "gnn_parallel.csv")
    if not rows:
        return None
    factors = {(case, gpus): factor for case, gpus, factor in gnn_parallel.speedups(rows)}
    counts = sorted({row["gpus"] for row in rows})
    lines = []
    for case in charts.in_order(row["case"] for row in rows):
        epochs = {row["gpus"]: row["epoch_s"] for row in rates(rows, case=case)}
        shares = {n: f" ({charts.fine_number(factors[case, n])})" for n in counts if (case, n) in factors}
        lines.append(
            [case, *(charts.fine_number(epochs[n]) + shares.get(n, "") if n in epochs else "" for n in counts)]
        )
    return (
        f"The same on several GPUs, data-parallel, each with a table of its own (`gnn_parallel.csv`: {caption(rows)}); "
        "seconds of an epoch with `ibp`, in brackets how many times as fast as one GPU:\n\n"
        + markdown(["features", *(f"{n} GPU{'s' if n > 1 else ''}" for n in counts)], lines)
    )


def graphs_line(directory):
    """What ibp gains, from the least to the most."""
    rows = charts.read(directory / "gnn.csv")
    gains = list(gnn.gains(rows))
    if not gains:
        return None

    def span(factors):
        first, *others = map(charts.fine_number, sorted(factors))
        return f"{first} to {others[-1]} times" if others else f"{first} times"

    return (
        f"## Graph neural networks\n\nEpochs of GraphSAGE with ibp (`gnn.csv`: {caption(rows)}) are "
        f"{span(gain.epoch for gain in gains)} as fast as with the best gather by the CPU and "
        f"{span(gain.raw_epoch for gain in gains)} as fast as with raw rows fetched by the GPU; fetches alone are "
        f"{span(gain.fetch for gain in gains)} as fast as those. All of it: "
        "[docs/gnn.md](../docs/gnn.md#what-it-gains)."
    )


def adamw_table(directory):
    """Steps of AdamW and the memory of its states, a line for each model and arm."""
    rows = charts.read(directory / "adamw.csv")
    if not rows:
        return None
    times, lines = {"mean_ms": "mean ms", "slowest_ms": "slowest ms", "first_ms": "first ms"}, []
    times = {name: head for name, head in times.items() if all(row.get(name) for row in rows)}
    for row in rows:
        wanted = f" ({charts.number(row['target_ratio'])})" if row["met"] == "no" else ""
        is_coded = row["savings"] > 0
        lines.append(
            [
                row["case"],
                row["arm"],
                charts.fine_number(row["ms"]),
                *(charts.fine_number(row[name]) for name in times),
                f"{row['ratio']:.2f}{wanted}",
                *(percent(row[name]) if is_coded else "" for name in ("m_savings", "v_savings")),
                *(f"{int(row[name]) / 2**20:,.0f}" for name in ("device_bytes", "host_bytes")),
            ]
        )
    heads = ["model", "arm", "ms a step", *times.values(), "times torch's", "m saves", "v saves"]
    heads += ["GPU, MiB", "pinned, MiB"]
    others = ", from the second on, the slowest of these, and the first" if "first_ms" in times else ""
    return (
        f"A step (`adamw.csv`: {caption_by_case(rows)}): the median time, and the mean with the steps in which "
        f"codebooks are learned{others}; the median in times of torch's fused step with all states on the GPU, in "
        "brackets what is wanted where that is missed; what exp_avg (m) and exp_avg_sq (v) save of the GPU's memory, "
        "and what both take of it and of pinned memory:\n\n"
        f"{markdown(heads, lines)}"
    )


def activations_table(directory):
    """Steps of nets by what becomes of their activations."""
    rows = charts.read(directory / "activations.csv")
    if not rows:
        return None
    lines = []
    for row in rows:
        lines.append(
            [
                row["case"],
                row["arm"],
                charts.fine_number(row["step_ms"]) + _wanted_step(row),
                *(f"{round(row[name], 2) + 0.0:.2f}" for name in ("peak_gb", "freed_gb")),  # no -0.00
                *(f"{row[name]:.2f}" if row[name] else "" for name in ("pinned_gb", "saved_gb", "sent_gb")),
                *(_with_wanted(row, name) for name in ("times_smaller", "times_raw", "times_save_on_cpu")),
                f"{row['most_times_smaller']:.2f}" if row["most_times_smaller"] else "",
            ]
        )
    heads = ["net", "arm", "ms a step", "peak, GB", "freed, GB", "pinned, GB", "saved, GB", "sent, GB", "times smaller"]
    heads += ["times raw", "times save_on_cpu", "times smaller by entropy"]
    return (
        f"A forward and a backward pass in BF16 (`activations.csv`: {caption_by_case(rows)}): the median time; the "
        "most memory that it takes beyond weights and input, and how much less that is than plain; bytes that were "
        "saved, and went to the host, and the pinned memory for them; how many times as fast as the same hooks with "
        "raw bytes, and as torch's `save_on_cpu`; how many times smaller the same tensors are by the entropy of their "
        f"elements. In brackets what is wanted where it is missed:\n\n{markdown(heads, lines)}{_on_the_device(rows)}"
        "\n\n![Time and memory of a step](../benchmarks/results/activations.png)"
    )


def _on_the_device(rows):
    """For which nets keeping coded activations on the GPU lowers the peak, and for which it raises it."""
    plain = {row["case"]: row for row in rows if row["arm"] == "plain"}
    found = [row for row in rows if row["arm"] == "on the device" and row["case"] in plain]
    if not found:
        return ""

    def listed(chosen):
        return ", ".join(
            f"{row['case']} by {abs(row['freed_gb']):.2f} GB (steps "
            f"{row['step_ms'] / plain[row['case']]['step_ms']:.1f} times as long, saved tensors "
            f"{row['saved_gb'] / plain[row['case']]['peak_gb']:.0%} of the peak)"
            for row in sorted(chosen, key=lambda row: -row["freed_gb"])
        ).replace("%", " %")

    lower, higher = ([row for row in found if (row["freed_gb"] > 0) is is_lower] for is_lower in (True, False))
    texts = [f"lowers the peak of {listed(lower)}"] * bool(lower) + [f"raises that of {listed(higher)}"] * bool(higher)
    return f"\n\nKeeping coded activations on the device {', and '.join(texts)}."


def _wanted_step(row):
    """In brackets the step that is wanted, where a step takes longer; or what it may take longer than the plain one."""
    if row["target_ms"] and row["step_ms"] > row["target_ms"]:
        return f" ({charts.number(row['target_ms'])})"
    if row["wanted_slowdown"] and row["slowdown"] > row["wanted_slowdown"]:
        return f" ({row['slowdown']:.1%} slower than plain)"
    return ""


def _with_wanted(row, name):
    """A number, and in brackets what is wanted of it where that is more."""
    value, wanted = row[name], row[f"wanted_{name}"]
    if not value:
        return ""
    return f"{value:.2f}" + (f" ({wanted:g})" if wanted and value < wanted else "")


BLOCKS = {
    "rows": rows_block,
    "large tables": cases_block("large_table", "Random rows of large tables in host memory"),
    "tensors": tensor_block,
    "device": device_block,
    "compressing": cases_block("codec", "Decoding, compression and analysis of larger tensors", " GiB, "),
    "families": families_block,
    "compress": compress_block,
    "places": places_block,
    "changes": changes_block,
    "deltas": deltas_block,
    "linear": linear_block,
    "checkpoints": checkpoints_block,
    "missed": missed_block,
    "small calls": calls_block,
    "beside": beside_block,
    "cpu": cases_block("cpu", "On the CPU alone"),
    "memory": memory_block,
    "offload": offload_line,
    "flexgen": flexgen_line,
    "graphs": graphs_line,
    **{name: section(name) for name in MEASURED},
    "choices": choices_block,
    "savings": savings_block,
}
PAGES = {
    "README.md": {"headline": headline_block},
    "benchmarks/RESULTS.md": BLOCKS,
    "docs/llm.md": {"offload": offload_block, "linear": linear_table, "flexgen": flexgen_block},
    "docs/gnn.md": {"graphs": graphs_block, "several GPUs": several_block},
    "docs/guide.md": {"scale": scale_line, "choices": choices_line},
    "docs/distributed.md": {"collectives": collectives_table},
    "docs/spill.md": {"spill": spill_table},
    "docs/checkpoints.md": {"checkpoints": checkpoints_line, "deltas": deltas_line},
    "docs/reproduction.md": reproduction.BLOCKS,
    "docs/training.md": {"activations": activations_table, "optimizer states": adamw_table},
}  # relative to the repository
OPEN_PAGES = (
    "docs/gnn.md",
    "docs/embeddings.md",
    "docs/kv-cache.md",
)  # take what they have markers of


# ---- the pages -----------------------------------------------------------------------------------------------------


def blocks_of(name, text):
    """The blocks of a page."""
    blocks = dict(PAGES.get(name, {}))
    if name in OPEN_PAGES:
        blocks |= {of: illustrated(of) for of in MEASURED if markers(of)[0] in text}
    return blocks


def rewritten(text, blocks, directory):
    """A page's text with each block between its markers made anew. ValueError: markers are missing."""
    for name, make in blocks.items():
        start, end = markers(name)
        if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
            raise ValueError(f"wanted one {start!r} and after it one {end!r}")
        block = make(directory)
        if block is None:
            print(f"{name}: no measurements in {directory}, left as it is")
            continue
        before, rest = text.split(start)
        text = before + start + "\n" + block + "\n" + end + rest.split(end)[1]
    return text


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="directory of the CSV files")
    parser.add_argument("--root", type=Path, default=harness.ROOT, help="directory of the pages")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    differing = 0
    for name in dict.fromkeys((*PAGES, *(name for name in OPEN_PAGES if (args.root / name).exists()))):
        page = args.root / name
        was = page.read_text()
        text = rewritten(was, blocks_of(name, was), args.out)
        differing += text != was
        if args.check:
            print(f"{page}: " + ("as the CSVs say" if text == was else "differs from the CSVs"))
        else:
            page.write_text(text)
            print(page)
    return int(bool(args.check and differing))


if __name__ == "__main__":
    sys.exit(main())
