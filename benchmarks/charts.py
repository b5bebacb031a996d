"""Draws PNG charts beside the CSV files: `python -m benchmarks.charts [--out DIR]`."""

import argparse
import csv
import sys
from pathlib import Path

from . import harness
from .sets import SYNTHETIC as SYNTHETIC_SETS

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator
except ImportError:
    plt = None

RATE_LABEL = "GB/s of original bytes"
SYNTHETIC = "synthetic "  # cases "synthetic 12.5%" and so on; raw rows and the CPU's gathers are the case "synthetic"
NORMAL = "normal"
IBP_ARM, PLANES_ARM, RAW_ARM, CPU_ARM, PAPER_ARM = "ibp slots", "planes slots", "raw rows", "cpu pipelined", "paper"
BLUE, PURPLE, ORANGE, GREY, GREEN, LIGHT_GREEN, RED, OLIVE, SAND = (
    "#1f5fa8",
    "#8e5ea2",
    "#d9822b",
    "#7a7a7a",
    "#5d8c3e",
    "#a5c78b",
    "#b5453c",
    "#8a8d00",
    "#eab676",
)
# Arm: label, colour. An arm is one thing in every chart.
GATHER_STYLE = {
    PLANES_ARM: ("planes, slots", PURPLE),
    IBP_ARM: ("ibp, slots", BLUE),
    "ibp in place": ("ibp, in place", ORANGE),
    RAW_ARM: ("raw rows, same kernel", GREY),
    CPU_ARM: ("CPU gather, pipelined with the copy", GREEN),
    "cpu index + copy": ("CPU gather, then copy", LIGHT_GREEN),
}
COPY_THREADS_STYLE = {
    PLANES_ARM: ("planes, by SMs", PURPLE),
    RAW_ARM: ("raw rows, by SMs", GREY),
    "cpu index + copy": ("CPU gather, then copy, by threads", LIGHT_GREEN),
    "cpu pinned": ("CPU gather into pinned memory, then copy", "#80a962"),
    "cpu pipelined": ("CPU gather, pipelined with the copy", GREEN),
}
PAPER_LABEL = "the paper's code (measured apart, same kind of GPU)"
DECODE_STYLE = {
    "planes decode": ("planes", PURPLE, "-"),
    "planes decode packed": ("planes, packed", PURPLE, "--"),
    "planes per column decode": ("planes, codebook a column", OLIVE, "-"),
    "decode": ("ibp", BLUE, "-"),
    "decode packed": ("ibp, packed", BLUE, "--"),
}
CODEC_STYLE = {
    "decode": ("ibp decode", BLUE),
    "planes decode": ("planes decode", PURPLE),
    "planes per column decode": ("planes decode, codebook a column", OLIVE),
    "planes listed decode": ("planes decode, listed", "#c9a0d8"),
    "nvcomp ANS decode": ("nvCOMP ANS decode", GREEN),
    "encode": ("ibp encode", ORANGE),
    "planes encode": ("planes encode", SAND),
    "nvcomp ANS compress": ("nvCOMP ANS compress", LIGHT_GREEN),
    "analyze": ("analyze", GREY),
}
OTHER_COLORS = (BLUE, PURPLE, ORANGE, GREEN, GREY, RED, OLIVE, SAND, LIGHT_GREEN, "#4fa3a5", "#c9a0d8", "#444444")

NVCOMP = "nvcomp "  # methods of ratio.csv that are codecs of nvCOMP
RATIO_STYLE = {
    "paper": ("the paper's choice", "#bdbdbd"),
    "ibp": ("ibp", "#eab676"),
    "planes": ("planes", "#7fb0de"),
    "auto": ("auto", "#1f5fa8"),
    "zstd -3": ("zstd -3, 64 KiB", "#a5c78b"),
    NVCOMP: ("nvCOMP, its best codec", "#5d8c3e"),
}
SPARSE_SAVINGS = 0.8  # sets of which auto saves more are drawn as times smaller
WEIGHTS_STYLE = {
    "on the GPU": ("raw weights on the GPU", "#444444"),
    "ibp, on the GPU": ("ibp, coded rows on the GPU", "#7fb0de"),
    "ibp, two GPUs": ("ibp, streamed to two GPUs", "#4fa3a5"),
    "ibp": ("ibp, streamed", BLUE),
    "raw through hooks": ("raw weights, streamed through the same hooks", GREY),
    "accelerate cpu_offload": ("accelerate's cpu_offload", SAND),
}
TIMELINE_STYLE = {
    "copy": ("copies over the link", GREY),
    "decode": ("decoding", BLUE),
    "compute": ("the model", ORANGE),
}
GNN_STYLE = {
    "cpu plain": ('x[ids].to("cuda")', LIGHT_GREEN),
    "cpu pinned": ("CPU gather into pinned memory, then copy", "#80a962"),
    "cpu pipelined": ("CPU gather, pipelined with the copy", GREEN),
    "raw rows": ("raw rows, fetched by the GPU", GREY),
    "ibp": ("ibp, fetched by the GPU", BLUE),
}


WHOLE_COLUMNS = (
    *("rows", "row_bytes", "sms"),
    *("prompt", "host_bytes", "device_bytes", "weight_bytes"),  # weights.csv
    *("workers", "chunk_bytes"),  # copy_threads.csv, chunks.csv
    *("step", "elements"),  # densities.csv, activation_ratios.csv
    *("batch", "batches", "gpus"),  # gnn.csv, gnn_parallel.csv
    *("budget_bytes", "held_rows", "raw_rows", "formula_rows", "cache_percent"),  # row_cache.csv, gnn_cache.csv
    "distinct_rows",  # dlrm_train.csv
    *("slot_bytes", "spilled_bytes"),  # spill.csv
    "vectors",  # linear.csv
)
REAL_COLUMNS = (
    *("step_ms", "peak_gb", "freed_gb", "pinned_gb", "saved_gb", "sent_gb", "outgrown_gb"),  # activations.csv
    *("learning_s", "target_ms", "times_raw", "wanted_times_raw", "times_save_on_cpu"),  # likewise
    *("wanted_times_save_on_cpu", "times_smaller", "wanted_times_smaller", "most_times_smaller"),  # likewise
    *("slowdown", "wanted_slowdown"),  # likewise
    "savings",
    "link_savings",
    "gbps",
    "ideal_gbps",
    "matmul_share",
    "fetch_share",
    "sm_share",
    "loss_ratio",
    "target_gbps",
    *("ms", "us", "bound_ms", "start_us", "end_us"),  # weights.csv, timeline.csv, compress.csv, encode_into.csv
    *("sample_ms", "fetch_ms", "train_ms", "epoch_s", "table_gib"),  # gnn.csv, gnn_parallel.csv
    *("prefill_s", "token_s", "load_s"),  # flexgen_opt.csv
    *("changed", "stored", "fewer"),  # deltas.csv
    *("seconds", "fsync_seconds", "peak_mib"),  # checkpoints.csv
    *("hit_rate", "predicted", "own_share", "peer_share"),  # row_cache.csv, dlrm.csv, gnn_cache.csv, scale.csv
    *("forward_us", "gather_us", "added"),  # dlrm_train.csv
    *("gain", "share_of_alone"),  # kv_pages.csv
    *("times", "tokens_per_s", "host_us"),  # linear.csv
    "tau",  # chunks.csv
    *("spilled", "predicted_spilled"),  # spill.csv
    *("mean_ms", "first_ms", "slowest_ms", "host_ms", "ratio", "m_savings", "v_savings", "target_ratio"),  # adamw.csv
    *("encode_us", "decode_us", "predicted_encode_us", "predicted_decode_us"),  # choose.csv
    *("progress", "loss", "density", "zvc", "zlib", "ibp"),  # densities.csv, activation_ratios.csv
)
REFERENCE = Path(__file__).with_name("reference_rates.csv")


def read(path):
    """Rows of a CSV with numbers as numbers, None where there is none, without its comments; [] if there is no such
    file.
    """
    if not path.exists():
        return []
    with open(path, newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    for row in rows:
        for number, names in ((int, WHOLE_COLUMNS), (float, REAL_COLUMNS)):
            for name in row.keys() & set(names):
                row[name] = number(row[name]) if row[name] else None
    return rows


def size_name(num_bytes):
    return f"{num_bytes // 1024} KiB" if num_bytes >= 1024 and num_bytes % 1024 == 0 else f"{num_bytes} B"


def case_label(row):
    return f"{row['case']}\n{row['dtype']}, {size_name(row['row_bytes'])}"


def with_most_sms(rows):
    """The rows of the arms that may use the whole GPU, or none of it."""
    most = max((row["sms"] for row in rows), default=0)
    return [row for row in rows if row["sms"] in (0, most)]


def in_order(values):
    return list(dict.fromkeys(values))


def machine(rows):
    commits = in_order(row["commit"][:10] for row in rows)
    return f"{rows[0]['gpu']}, torch {rows[0]['torch']}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}"


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def fine_number(value):
    """With two digits more where the value is small."""
    return number(value) if value >= 10 else f"{value:.2f}"


def paper_rates(path):
    """Rows of reference_rates.csv: "rows", "tensor" or "device"."""
    return [row for row in read(REFERENCE) if row["path"] == path]


# ---- rows of host memory -------------------------------------------------------------------------------------------


def draw_lines(panel, points, color, label, line="-"):
    """points: (row bytes, GB/s)."""
    if points:
        panel.plot(*zip(*sorted(points)), color=color, linestyle=line, marker="o", markersize=3.5, label=label)


def finish_lines(panel, sizes, title):
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [size_name(size) for size in sizes], rotation=60, fontsize=8)
    panel.minorticks_off()
    panel.set_xlabel("row", fontsize=9)
    panel.set_title(title, fontsize=10)
    panel.grid(alpha=0.3)


def legend_below(figure, panels, ncols):
    """One legend for all panels, of what any of them shows."""
    found = {label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels())}
    figure.legend(found.values(), found, fontsize=8, ncols=ncols, loc="outside lower center", frameon=False)


def draw_gather_synthetic(rows, path):
    """One panel for each savings: GB/s by row size, ibp beside its ideal, the paper's code, raw rows and the CPU's
    gathers.
    """
    rows = with_most_sms([row for row in rows if row["case"].startswith(SYNTHETIC.strip())])
    cases = in_order(row["case"] for row in rows if row["case"].startswith(SYNTHETIC))
    if not cases:
        return
    figure, panels = plt.subplots(
        1, len(cases), figsize=(2.3 * len(cases), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    sizes = sorted({row["row_bytes"] for row in rows})
    for panel, case in zip(panels[0], cases):
        ideal = sorted(
            (row["row_bytes"], row["ideal_gbps"]) for row in rows if row["case"] == case and row["arm"] == IBP_ARM
        )
        if ideal:
            panel.plot(*zip(*ideal), color="black", linestyle=":", label="ideal, slots")
        for arm, (label, color) in GATHER_STYLE.items():
            draw_lines(
                panel,
                [
                    (row["row_bytes"], row["gbps"])
                    for row in rows
                    if row["arm"] == arm and row["case"] in (case, SYNTHETIC.strip())
                ],
                color,
                label,
            )
        draw_lines(
            panel,
            [(row["row_bytes"], row["gbps"]) for row in paper_rates("rows") if row["savings"] == savings_of(case)],
            RED,
            PAPER_LABEL,
            "--",
        )
        set_rate_axis(panel)
        finish_lines(panel, sizes, f"{case.removeprefix(SYNTHETIC)} saved")
    panels[0][0].set_ylabel(RATE_LABEL)
    legend_below(figure, panels[0], 4)
    save(figure, path, f"Random rows from pinned host memory ({machine(rows)})")


def savings_of(case):
    """Of a synthetic case, as its name says them."""
    return float(case.removeprefix(SYNTHETIC).removesuffix("%")) / 100


def draw_gather_normal(rows, path):
    """One panel for each dtype: GB/s by row size of both schemes, planes by few SMs too, raw rows and the
    CPU's gather.
    """
    rows = [row for row in rows if row["case"].startswith(NORMAL)]
    tables = in_order((row["case"], row["dtype"]) for row in rows)
    if not tables:
        return
    most = max(row["sms"] for row in rows)
    figure, panels = plt.subplots(
        1, len(tables), figsize=(max(6.0, 3.6 * len(tables)), 4.4), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, table in zip(panels[0], tables):
        own = [row for row in rows if (row["case"], row["dtype"]) == table]
        ideal = sorted(
            (row["row_bytes"], row["ideal_gbps"]) for row in own if row["arm"] == PLANES_ARM and row["sms"] == most
        )
        if ideal:
            panel.plot(*zip(*ideal), color="black", linestyle=":", label="ideal, planes")
        for arm, (label, color) in GATHER_STYLE.items():
            for sms, line in zip(
                sorted({row["sms"] for row in own if row["arm"] == arm}, reverse=True), ("-", "--", ":")
            ):
                few = f", at most {sms} SMs" if 0 < sms < most else ""
                if arm == PLANES_ARM or not few:
                    draw_lines(
                        panel,
                        [(row["row_bytes"], row["gbps"]) for row in own if row["arm"] == arm and row["sms"] == sms],
                        color,
                        label + few,
                        line,
                    )
        finish_lines(panel, sorted({row["row_bytes"] for row in own}), f"N(0, {table[0].split()[-1]}), {table[1]}")
    panels[0][0].set_ylim(bottom=0)
    panels[0][0].set_ylabel(RATE_LABEL)
    legend_below(figure, panels[0], 4)
    save(figure, path, f"Random rows of normal tables from pinned host memory ({machine(rows)})")


def draw_gather_real(rows, path):
    """Real sets: bars of every arm, the ideal of the slots as ticks above them."""
    rows = with_most_sms([row for row in rows if not row["case"].startswith((SYNTHETIC.strip(), NORMAL))])
    labels = in_order(case_label(row) for row in rows)
    if not labels:
        return
    figure, panel = plt.subplots(figsize=(max(8.0, 1.7 * len(labels)), 5.0), layout="constrained")
    arms = [arm for arm in GATHER_STYLE if any(row["arm"] == arm for row in rows)]
    width = 0.84 / len(arms)
    for i, arm in enumerate(arms):
        draw_bars(panel, rows, labels, arm, i, len(arms), *GATHER_STYLE[arm])
        if arm in (IBP_ARM, PLANES_ARM):
            places = [
                (labels.index(case_label(row)) + (i - (len(arms) - 1) / 2) * width, row["ideal_gbps"])
                for row in rows
                if row["arm"] == arm
            ]
            panel.hlines(
                [gbps for _, gbps in places],
                [place - width / 2 for place, _ in places],
                [place + width / 2 for place, _ in places],
                color="black",
                linewidth=1.5,
                label="ideal" if arm == PLANES_ARM else None,
            )
    finish_bars(figure, panel, labels)
    save(figure, path, f"Random rows of real tables from pinned host memory ({machine(rows)})")


# ---- device memory -------------------------------------------------------------------------------------------------


def draw_codec(rows, path):
    """Above: decoding of normal tables by row size, a panel a dtype. Below: bars of every arm on real tables, and on
    normal ones of one row size. All SMs, with the copy's and the memset's rate across."""
    rows = with_most_sms(rows)
    device = {row["arm"]: row["gbps"] for row in rows if row["case"] == "device"}
    shown = [row for row in rows if row["case"] != "device" and not row["case"].startswith(SYNTHETIC)]
    tables = in_order((row["case"], row["dtype"]) for row in shown if row["case"].startswith(NORMAL))
    encoded = {case_label(row) for row in shown if row["arm"] == "encode"}
    labels = in_order(case_label(row) for row in shown if case_label(row) in encoded)
    if not tables or not labels:
        return
    figure = plt.figure(figsize=(12, 10), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(4.4, 5.6))
    panels = above.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for panel, table in zip(panels, tables):
        own = [row for row in shown if (row["case"], row["dtype"]) == table]
        for arm, (label, color, line) in DECODE_STYLE.items():
            draw_lines(panel, [(row["row_bytes"], row["gbps"]) for row in own if row["arm"] == arm], color, label, line)
        for row in own:
            if row["arm"] == "nvcomp ANS decode":
                panel.axhline(row["gbps"], color=GREEN, linewidth=1.5, label="nvCOMP ANS")
        draw_device_rates(panel, device)
        finish_lines(
            panel, sorted({row["row_bytes"] for row in own}), f"decoding N(0, {table[0].split()[-1]}), {table[1]}"
        )
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel(RATE_LABEL)
    legend_below(above, panels, 9)
    panel = below.subplots()
    arms = [arm for arm in CODEC_STYLE if any(row["arm"] == arm for row in shown)]
    for i, arm in enumerate(arms):
        draw_bars(panel, shown, labels, arm, i, len(arms), *CODEC_STYLE[arm])
    draw_device_rates(panel, device)
    finish_bars(below, panel, labels)
    save(figure, path, f"From device memory to device memory ({machine(rows)})")


def draw_device_rates(panel, device):
    for (arm, gbps), line in zip(device.items(), ("--", ":")):
        panel.axhline(gbps, color="black", linestyle=line, linewidth=1, label=arm)


# ---- whole tensors -------------------------------------------------------------------------------------------------

VARIANT_LINES = ((", list", "--"), (", by kernel", ":"), (" slots", "-."))


def draw_stream(rows, path):
    """A panel for each kind of tensor, every arm at its best number of SMs: lines by size beside the ideal of packed
    tables, bars where there is one size.
    """
    kinds = in_order((row["case"].split(",")[0], row["dtype"]) for row in rows)
    if not kinds:
        return
    lines = -(-len(kinds) // PANELS_A_ROW)
    columns = min(PANELS_A_ROW, len(kinds))
    figure, panels = plt.subplots(
        lines, columns, figsize=(max(6.0, 5.2 * columns), 3.6 * lines + 0.8), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(kinds) :]:
        panel.axis("off")
    for panel, kind in zip(panels.flat, kinds):
        own = [row for row in rows if (row["case"].split(",")[0], row["dtype"]) == kind]
        best = best_by(own, lambda row: (row["arm"], row["rows"] * row["row_bytes"]))
        sizes = sorted({size for _, size in best})
        if len(sizes) == 1:
            draw_numbered_bars(
                panel, [(arm, row["gbps"], arm_color(arm, 0), row["ideal_gbps"]) for (arm, _), row in best.items()]
            )
            panel.set_title(f"{', '.join(kind)}, {sizes[0] >> 20} MiB (tick: the ideal)", fontsize=10)
            panel.set_xlabel(RATE_LABEL, fontsize=9)
            continue
        for arm in in_order(arm for arm, _ in best if " slots," not in arm):  # variants of the packed layout suffice
            line = next((line for variant, line in VARIANT_LINES if variant in arm), "-")
            draw_lines(
                panel,
                [(size, row["gbps"]) for (name, size), row in best.items() if name == arm],
                arm_color(arm, 0),
                arm,
                line,
            )
        ideal = [
            (size, max(row["ideal_gbps"] for (arm, at), row in best.items() if arm.endswith("packed") and at == size))
            for size in sizes
            if any(arm.endswith("packed") and at == size for arm, at in best)
        ]
        if ideal:
            panel.plot(*zip(*ideal), color="black", linewidth=1, label="ideal, packed")
        finish_lines(panel, sizes, ", ".join(kind))
        panel.set_xticks(sizes, [f"{size >> 20} MiB" for size in sizes], rotation=60, fontsize=8)
        panel.set_xlabel("tensor", fontsize=9)
        panel.set_ylabel(RATE_LABEL)
        panel.set_ylim(bottom=0)
    legend_below(figure, panels.flat, 5)
    save(
        figure,
        path,
        f"Whole tensors from pinned host memory to the GPU, each arm at its best number of SMs ({machine(rows)})",
    )


SPILL_STYLE = {
    "device only": ("overflow on the GPU", GREY, "-"),
    "spilled": ("overflow in host memory", BLUE, "-"),
    "ideal": ("the slower of the GPU and the link", ORANGE, "--"),
}


def draw_spill(rows, path):
    """A panel for each kind of rows and call: GB/s by the share of the rows that leave their slots."""
    rows = [row for row in rows if row.get("target") == "" and row["arm"].startswith(("decode, ", "index_select, "))]
    kinds = in_order((row["case"], row["dtype"]) for row in rows)
    kinds = [kind for kind in kinds if len({row["spilled"] for row in rows if (row["case"], row["dtype"]) == kind}) > 2]
    if not kinds:
        return
    size = {"figsize": (4 * len(kinds), 6.4), "layout": "constrained", "sharey": True, "squeeze": False}
    figure, panels = plt.subplots(2, len(kinds), **size)
    for line, call in zip(panels, ("decode", "index_select")):
        for panel, (case, dtype) in zip(line, kinds):
            own = [row for row in rows if (row["case"], row["dtype"]) == (case, dtype)]
            for where, (label, color, style) in SPILL_STYLE.items():
                arm = f"{call}, {'spilled' if where == 'ideal' else where}"
                points = sorted(
                    (100 * row["spilled"], row["ideal_gbps" if where == "ideal" else "gbps"])
                    for row in own
                    if row["arm"] == arm
                )
                panel.plot(*zip(*points), style, color=color, marker="o", markersize=3, label=label)
            panel.set_title(f"{call}, {case} {dtype}", fontsize=10)
            panel.set_xlabel("rows that leave their slots, %", fontsize=9)
            panel.grid(alpha=0.3)
        line[0].set_ylabel(RATE_LABEL, fontsize=9)
    panels[0][0].set_ylim(bottom=0)
    legend_below(figure, list(panels.flat), 3)
    save(figure, path, f"Slots on the GPU, overflow there and in host memory ({machine(rows)})")


CHOICE_STYLE = {
    "link_gbps": ("raw bytes", GREY, "."),
    "gbps": ("what ibp.codecs.choose takes", BLUE, "o"),
    "ideal_gbps": ("the best that was measured", ORANGE, "|"),
}


def draw_choices(rows, path):
    """A panel for each link over which some coding pays, for all where none does: GB/s of the coding chosen for each
    set, beside the best and raw bytes."""
    rows = [row for row in rows if row["chosen"]]
    cases = in_order(row["case"] for row in rows)
    sets = sorted(in_order((row["case"], row["dtype"]) for row in rows), key=lambda key: cases.index(key[0]))
    arms = in_order(row["arm"] for row in rows if row["best"] != "raw") or in_order(row["arm"] for row in rows)
    if not arms:
        return
    figure, panels = plt.subplots(
        1, len(arms), figsize=(1.9 * len(arms) + 2, 0.2 * len(sets) + 1.6), layout="constrained", sharey=True,
        squeeze=False,
    )  # fmt: skip
    for panel, arm in zip(panels[0], arms):
        own = {(row["case"], row["dtype"]): row for row in rows if row["arm"] == arm}
        for column, (label, color, marker) in CHOICE_STYLE.items():
            rates = [float(own[key][column]) if key in own else None for key in sets]
            panel.plot(rates, range(len(sets)), marker, color=color, markersize=9 if marker == "|" else 5, label=label)
        panel.set_title(arm.removeprefix("choice at "), fontsize=10)
        panel.set_xscale("log")
        panel.set_ylim(-1, len(sets))
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.minorticks_off()
        panel.tick_params(axis="x", labelsize=7)
        panel.set_xlabel(RATE_LABEL, fontsize=8)
        panel.grid(alpha=0.3)
    names = [f"{case}, {DTYPE_NAMES.get(dtype, dtype)}" for case, dtype in sets]
    panels[0][0].set_yticks(range(len(sets)), names, fontsize=7)
    panels[0][0].invert_yaxis()
    legend_below(figure, panels[0], 3)
    save(figure, path, f"Tensors coded, moved and decoded, one after the other ({machine(rows)})")


COLLECTIVES_COLORS = {"default": BLUE, "fast": ORANGE, "auto": GREEN}


def draw_collectives(rows, path):
    """A panel for each link: how many times as fast as torch's all-gathers of BF16 weights are, by their size."""
    rows = [row for row in rows if row["case"].endswith(", all_gather_into_tensor, weights")]
    links = in_order(row["link"] for row in rows)
    if not links:
        return
    figure, panels = plt.subplots(
        1, len(links), figsize=(3.6 * len(links), 3.4), layout="constrained", sharey=True, squeeze=False
    )
    for panel, link in zip(panels[0], links):
        for arm, color in COLLECTIVES_COLORS.items():
            own = [row for row in rows if (row["link"], row["arm"]) == (link, arm)]
            points = sorted((int(row["mib"]), float(row["over_torch"])) for row in own)
            panel.plot(*zip(*points), color=color, marker="o", markersize=3, label=arm)
        panel.axhline(1, color=GREY, linewidth=1)
        panel.set_title(link, fontsize=10)
        sizes = sorted({int(row["mib"]) for row in rows})
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, sizes)
        panel.set_xlabel("MiB of the output", fontsize=9)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("times as fast as torch", fontsize=9)
    panels[0][0].set_ylim(bottom=0)
    legend_below(figure, list(panels.flat), 3)
    save(figure, path, f"All-gathers whose tensors travel coded ({machine(rows)})")


# ---- scripts whose cases are few: a panel a case -------------------------------------------------------------------

PANELS_A_ROW = 2
LOG_FROM = 1000  # times the shortest bar of a panel: where the longest is more, axes are logarithmic
CASE_CHARTS = {"large_table": "Random rows of large tables in host memory", "cpu": "On the CPU alone"}
CODING_CHARTS = {
    "compress": "The whole of ibp.compress",
    "encode_into": "Rows coded into memory that is there",
}  # of tensors of so many bytes
CODING_LEAST_BYTES = 64 << 20
CACHE_CHARTS = {
    "row_cache": "Rows through a cache in device memory",
    "dlrm": "Look-ups of recommendation models' tables",
    "dlrm_train": "Training steps of embedding tables",
    "bags": "Rows decoded and pooled",
    "kv_fetch": "Whole KV-caches, a layer at a time",
    "kv_pages": "Pages of a KV-cache",
    "kv_rows": "Rows of a KV-cache by index",
    "gnn_cache": "Features of graphs through a cache",
    "scale": "Features of graphs through caches of several processes",
}
PARTS = ("partition alone",)  # arms that are a part of others, not a way to fetch


def draw_cases(rows, path, title):
    """A panel for each case, dtype and row size: a bar an arm with its number, the ideal as a tick."""
    rows, groups = [row for row in rows if row.get("gbps") and row["arm"] not in PARTS], {}
    of_case = {row["case"]: case_label(row) for row in rows if row["row_bytes"]}
    for row in rows:
        label = case_label(row) if row["row_bytes"] else of_case.get(row["case"], case_label(row))  # 0: not in rows
        groups.setdefault(label, []).append(row)
    if not groups:
        return
    most = max(row["sms"] for row in rows)

    def name(row):
        return row["arm"] + (f", {row['sms']} SMs" if 0 < row["sms"] < most else "")

    names = in_order(name(row) for row in rows)
    color_of = {each: arm_color(each, i) for i, each in enumerate(names)}
    columns = min(PANELS_A_ROW, len(groups))
    drawn = list(groups.items())
    lines = [drawn[at : at + columns] for at in range(0, len(drawn), columns)]
    heights = [0.8 + 0.22 * max(len(group) for _, group in line) for line in lines]
    figure, panels = plt.subplots(
        len(lines),
        columns,
        figsize=(5.0 * columns, sum(heights) + 0.5),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    rates = [[row["gbps"] for row in group] for group in groups.values()]
    log = any(max(own) > LOG_FROM * min(own) for own in rates)
    span = (min(map(min, rates)), max(map(max, rates))) if log else None
    for line, shown in zip(lines, panels):
        room = max(len(group) for _, group in line)
        for panel, (label, group) in zip(shown, line):
            bars = [(name(row), row["gbps"], color_of[name(row)], row["ideal_gbps"]) for row in group]
            draw_numbered_bars(panel, bars, span)
            panel.set_ylim(room - 0.5, -0.5)  # bars are as high in all panels of a line
            panel.set_title(label.replace("\n", ", "), fontsize=9)
        for panel in shown[len(line) :]:
            panel.set_visible(False)
    unit = RATE_LABEL + (", logarithmic" if log else "")
    figure.supxlabel(unit + ("; tick: the ideal" if any(row["ideal_gbps"] for row in rows) else ""), fontsize=9)
    save(figure, path, f"{title} ({machine(rows)})")


# ---- kinds of rows -------------------------------------------------------------------------------------------------

# (title, least GB/s drawn where no bar is shorter): {(arm, which SMs): (label, colour)}; "few" are the fewest SMs,
# "all" the most
FAMILIES_PANELS = {
    ("From pinned host memory", 10): {
        (RAW_ARM, "few"): ("raw rows, {few} SMs", "#bdbdbd"),
        (RAW_ARM, "all"): ("raw rows, all SMs", GREY),
        (PLANES_ARM, "few"): ("planes, {few} SMs", "#c9a0d8"),
        (PLANES_ARM, "some"): ("planes, {some} SMs", "#a884b8"),
        (PLANES_ARM, "all"): ("planes, all SMs", PURPLE),
    },
    ("In device memory", 100): {
        ("planes decode", "all"): ("decode", BLUE),
        ("planes encode", "all"): ("encode", ORANGE),
    },
}


def draw_families(rows, path):
    """Bars of each kind of rows, from host memory by numbers of SMs and in device memory, under ticks of the ideal."""
    cells = [row for row in rows if row["case"] != "device"]
    if not cells:
        return
    counts = sorted({row["sms"] for row in cells})
    sms = {"few": counts[0], "some": counts[len(counts) // 2], "all": counts[-1]}
    figure, panels = plt.subplots(2, 1, figsize=(12, 10), layout="constrained")
    for panel, ((title, least), style) in zip(panels, FAMILIES_PANELS.items()):
        labels, width = in_order(map(case_label, cells)), 0.86 / len(style)
        for i, ((arm, which), (label, color)) in enumerate(style.items()):
            own = [row for row in cells if row["arm"] == arm and row["sms"] == sms[which]]
            places = [labels.index(case_label(row)) + (i - (len(style) - 1) / 2) * width for row in own]
            panel.bar(places, [row["gbps"] for row in own], width, color=color, label=label.format(**sms))
            panel.plot(places, [row["ideal_gbps"] for row in own], "_", color="black", markersize=8)
        panel.set_xticks(range(len(labels)), labels, fontsize=7, rotation=45, ha="right")
        arms = {arm for arm, _ in style}
        commit = next((row["commit"] for row in cells if row["arm"] in arms), "unknown")
        panel.set_title(f"{title} (commit {commit[:10]}; ticks: the ideal)", fontsize=10, loc="left")
        panel.set_ylabel(RATE_LABEL)
        set_rate_axis(panel)
        panel.set_ylim(bottom=min([least, *(0.9 * bar.get_height() for bar in panel.patches)]))
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
        panel.legend(fontsize=8, ncols=len(style), loc="lower right", bbox_to_anchor=(1, 1))
    save(figure, path, f"Rows of every kind ({rows[0]['gpu']}, torch {rows[0]['torch']})")


def arm_color(arm, i):
    """Peers look the same in all charts; other arms differ from each other."""
    for words, color in (
        (("torch",), ORANGE),
        (("nvcomp",), GREEN),
        (("planes",), PURPLE),
        (("ibp",), BLUE),
        (("raw", "copy_", "memcpy"), GREY),
        (("cpu", "zstd", "lz4"), LIGHT_GREEN),
        (("hits", "no cache", "zipf"), BLUE),  # of coded rows, in row_cache.csv
    ):
        if any(word in arm.lower() for word in words):
            return color
    return OTHER_COLORS[i % len(OTHER_COLORS)]


def draw_numbered_bars(panel, bars, span=None):
    """Horizontal bars from above: (label, value, colour, ideal or None). Ideals far beyond the longest bar are left
    out. A number stands behind its bar, and behind the tick of the ideal where that would cross it. The axis is linear
    from 0, or with a span, (least, most) of several panels, logarithmic.
    """
    longest = max(value for _, value, _, _ in bars)
    ideals = [ideal if ideal and ideal <= 1.5 * longest else None for _, _, _, ideal in bars]
    if span:
        panel.set_xscale("log")
        panel.set_xlim(span[0] / 2, span[1] * 6)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        panel.xaxis.set_minor_formatter("")
    else:
        panel.set_xlim(0, 1.18 * max([longest, *filter(None, ideals)]))

    def place(value):
        """Where a value is on the axis, from 0 to 1."""
        return panel.transAxes.inverted().transform(panel.transData.transform((value, 0)))[0]

    for i, ((_, value, color, _), ideal) in enumerate(zip(bars, ideals)):
        panel.barh(i, value, color=color, height=0.74)
        text = number(value) if value >= 0.095 else f"{value:.2f}"
        crossed = ideal and value < ideal and place(ideal) - place(value) < 0.02 + 0.025 * len(text)
        panel.annotate(
            text,
            (ideal if crossed else value, i),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            zorder=3,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
        if ideal:
            panel.vlines(ideal, i - 0.37, i + 0.37, color="black", linewidth=1.5)
    panel.set_yticks(range(len(bars)), [label for label, _, _, _ in bars], fontsize=8)
    panel.invert_yaxis()
    panel.tick_params(axis="x", labelsize=8)
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)


def draw_overlap(rows, path):
    """What the matrix products keep beside each fetch, and the fetch beside them; a tick where the share of SMs taken
    would be lost, and no more.
    """
    beside = [row for row in rows if row.get("matmul_share")]
    if not beside:
        return
    labels = [
        row["arm"].removesuffix(", beside").replace(" by ", "\nby ") + f"\n{row['sms'] or 'no'} SMs" for row in beside
    ]
    figure, panel = plt.subplots(figsize=(max(7.0, 1.5 * len(labels)), 4.4), layout="constrained")
    for offset, column, label, color in (
        (-0.2, "matmul_share", "matrix products", BLUE),
        (0.2, "fetch_share", "the fetch", ORANGE),
    ):
        present = [(i, row) for i, row in enumerate(beside) if row[column]]  # a kernel that sleeps is no fetch
        panel.bar(
            [i + offset for i, _ in present], [100 * row[column] for _, row in present], 0.4, color=color, label=label
        )
        for i, row in present:
            panel.annotate(
                f"{100 * row[column]:.1f}",
                (i + offset, 100 * row[column]),
                (0, -11),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color="white",
            )
    panel.hlines(
        [100 * (1 - row["sm_share"]) for row in beside],
        [i - 0.4 for i in range(len(beside))],
        [float(i) for i in range(len(beside))],
        color="black",
        linewidth=1.5,
        label="the share of SMs left to the products",
    )
    panel.set_xticks(range(len(labels)), labels, fontsize=9)
    panel.set_ylabel("percent of the rate alone")
    panel.set_ylim(0, 118)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
    panel.legend(fontsize=8, ncols=3, loc="upper center", frameon=False)
    save(figure, path, f"BF16 matrix products beside fetches from pinned host memory ({machine(beside)})")


# ---- what ibp gains, in one picture --------------------------------------------------------------------------------

OVERVIEW_ROW_BYTES = 2048
IBP_LABEL = "ibp"


def best_by(rows, key):
    """{key(row): the row of most GB/s}, in the order of the rows."""
    found = {}
    for row in rows:
        if key(row) not in found or row["gbps"] > found[key(row)]["gbps"]:
            found[key(row)] = row
    return found


def gather_groups(rows, label_of, paper):
    """{label: {kind: GB/s}} of all arms' best: the CPU's gather, raw rows, the paper's code, and ibp by its better
    scheme.
    """
    kinds = {CPU_ARM: CPU_ARM, RAW_ARM: RAW_ARM, IBP_ARM: IBP_LABEL, PLANES_ARM: IBP_LABEL}
    groups = {}
    for (label, kind), row in best_by(
        [row for row in rows if row["arm"] in kinds], lambda row: (label_of(row), kinds[row["arm"]])
    ).items():
        groups.setdefault(label, {})[kind] = row["gbps"]
    for label, gbps in paper.items():
        if label in groups:
            groups[label][PAPER_ARM] = gbps
    return groups


GROUP_STYLE = {
    CPU_ARM: ("CPU gather, pipelined with the copy", LIGHT_GREEN),
    RAW_ARM: ("raw rows by the same kernel", GREY),
    PAPER_ARM: (PAPER_LABEL, RED),
    IBP_LABEL: ("ibp, its better scheme", BLUE),
}


def draw_groups(panel, groups, title, log):
    kinds = [kind for kind in GROUP_STYLE if any(kind in group for group in groups.values())]
    width = 0.86 / len(kinds)
    for i, kind in enumerate(kinds):
        places = [
            (at + (i - (len(kinds) - 1) / 2) * width, group[kind])
            for at, group in enumerate(groups.values())
            if kind in group
        ]
        panel.bar(
            [place for place, _ in places],
            [gbps for _, gbps in places],
            width,
            color=GROUP_STYLE[kind][1],
            label=GROUP_STYLE[kind][0],
        )
        for place, gbps in places:
            panel.annotate(f"{gbps:,.0f}", (place, gbps), (0, 2), textcoords="offset points", ha="center", fontsize=7.5)
    panel.set_xticks(range(len(groups)), groups, fontsize=8)
    panel.set_ylabel(RATE_LABEL, fontsize=9)
    panel.set_title(title, fontsize=10, loc="left")
    if log:
        set_rate_axis(panel)
        shown = [gbps for group in groups.values() for gbps in group.values()]
        panel.set_ylim(min(10, 0.9 * min(shown)), 1.6 * max(shown))
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)


def rows_by_savings(gather):
    """Synthetic rows of one size."""
    own = with_most_sms(
        [row for row in gather if row["case"].startswith(SYNTHETIC.strip()) and row["row_bytes"] == OVERVIEW_ROW_BYTES]
    )
    cases = in_order(row["case"] for row in own if row["case"].startswith(SYNTHETIC))
    everywhere = [row for row in own if row["case"] == SYNTHETIC.strip()]
    paper = {row["savings"]: row["gbps"] for row in paper_rates("rows") if row["row_bytes"] == OVERVIEW_ROW_BYTES}
    shown = [
        {**row, "case": case} for case in cases for row in own + everywhere if row["case"] in (case, SYNTHETIC.strip())
    ]
    return gather_groups(
        shown,
        lambda row: f"{row['case'].removeprefix(SYNTHETIC)} saved",
        {
            f"{case.removeprefix(SYNTHETIC)} saved": paper[savings_of(case)]
            for case in cases
            if savings_of(case) in paper
        },
    )


def rows_of_tables(gather):
    """Real sets."""
    own = with_most_sms([row for row in gather if not row["case"].startswith((SYNTHETIC.strip(), NORMAL))])
    return gather_groups(own, lambda row: f"{row['case']}\n{size_name(row['row_bytes'])}", {})


def tensor_bars(stream):
    """The largest normal BF16 tensor brought to the GPU whole: raw, by the paper's code, nvCOMP and ibp, each at its
    best.
    """
    own = [row for row in stream if row["dtype"] == "bfloat16" and row["case"].startswith(NORMAL)]
    if not own:
        return []
    largest = max(row["rows"] * row["row_bytes"] for row in own)
    best = best_by(
        [row for row in own if row["rows"] * row["row_bytes"] == largest and stream_kind(row["arm"])],
        lambda row: stream_kind(row["arm"]),
    )
    bars = [
        (kind, best[kind]["gbps"], color, None)
        for kind, color in (("raw copy_", GREY), ("nvCOMP, pipelined", GREEN), ("ibp", BLUE))
        if kind in best
    ]
    paper = [
        ("the paper's code", row["gbps"], RED, None) for row in paper_rates("tensor") if row["dtype"] == "bfloat16"
    ]
    return bars[:1] + paper + bars[1:]


def stream_kind(arm):
    """Which of the overview's bars an arm of stream.csv belongs to; None: none."""
    words = arm.lower()
    if "nvcomp" in words:
        return "nvCOMP, pipelined"
    if "copy_" in words or words.startswith("raw"):
        return "raw copy_"
    return "ibp" if words.startswith(("planes", "ibp", "packed", "slots", "decompress")) else None


def device_bars(codec):
    """Decoding of normal BF16 tables in device memory."""
    rates = {row["arm"]: row["gbps"] for row in codec if row["case"] == "device"}
    own = [row for row in codec if row["dtype"] == "bfloat16" and row["case"].startswith(NORMAL)]
    best = best_by([row for row in own if row["row_bytes"] == OVERVIEW_ROW_BYTES], lambda row: row["arm"])
    ours = max((best[arm]["gbps"] for arm in ("planes decode", "planes decode packed") if arm in best), default=None)
    bars = [("copy_ of the tensor", rates.get("copy_"), GREY)] + [
        ("the paper's code, its best", row["gbps"], RED) for row in paper_rates("device")
    ]
    bars += [
        ("nvCOMP ANS", best["nvcomp ANS decode"]["gbps"] if "nvcomp ANS decode" in best else None, GREEN),
        ("ibp, planes", ours, BLUE),
    ]
    return [(label, gbps, color, None) for label, gbps, color in bars if gbps] if ours else []


def draw_overview(gather, stream, codec, path):
    """Rows by savings, rows of real tables, whole tensors to the GPU, decoding in device memory; panels without
    measurements are left out.
    """
    panels = [
        (
            "groups",
            rows_by_savings(gather),
            f"Random rows of {size_name(OVERVIEW_ROW_BYTES)} from host memory, by savings",
        ),
        ("log groups", rows_of_tables(gather), "Random rows of real tables from host memory (logarithmic)"),
        ("bars", tensor_bars(stream), "A whole BF16 tensor, N(0, 0.02), from host memory"),
        (
            "bars",
            device_bars(codec),
            f"Decoding BF16, N(0, 0.02), rows of {size_name(OVERVIEW_ROW_BYTES)}, in device memory",
        ),
    ]
    shown = [panel for panel in panels if panel[1]]
    if not shown:
        return
    figure, groups = plt.figure(figsize=(13, 3.9 * -(-len(shown) // 2)), layout="constrained"), []
    for i, (kind, values, title) in enumerate(shown):
        panel = figure.add_subplot(-(-len(shown) // 2), 2, i + 1)
        if kind == "bars":
            draw_numbered_bars(panel, values)
            panel.set_xlabel(RATE_LABEL, fontsize=9)
            panel.set_title(title, fontsize=10, loc="left")
        else:
            draw_groups(panel, values, title, kind == "log groups")
            groups.append(panel)
    legend_below(figure, groups, 4)
    save(figure, path, f"What ibp gains ({machine(gather or stream or codec)})")


# ---- weights that are streamed -------------------------------------------------------------------------------------

DTYPE_NAMES = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "float8_e4m3fn": "FP8"}


def of_tokens(rows):
    """{(batch, prompt): {arm: its row with the most SMs}} of one dtype, one call on many tokens last."""
    cells = {}
    for row in sorted(rows, key=lambda row: row["sms"]):
        if row["arm"] in WEIGHTS_STYLE:
            cells.setdefault((row["rows"], row["prompt"]), {})[row["arm"]] = row
    return {cell: cells[cell] for cell in sorted(cells, key=lambda cell: (cell[1] == 0, cell))}


def cell_name(batch, prompt):
    return f"batch {batch}, prompt {prompt:,}" if prompt else f"{1024 * batch:,} tokens at once"


def draw_weights(rows, path):
    """Milliseconds a token: a panel for each dtype, a group of bars for each batch and prompt, the bound as a tick."""
    tokens = {dtype: of_tokens(rates) for dtype, rates in by_dtype(rows).items()}
    tokens = {dtype: cells for dtype, cells in tokens.items() if cells}
    if not tokens:
        return
    widths = [sum(map(len, cells.values())) + len(cells) for cells in tokens.values()]
    figure, panels = plt.subplots(
        1,
        len(tokens),
        figsize=(max(8.0, 0.37 * sum(widths) + 1), 4.8),
        width_ratios=widths,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, (dtype, cells) in zip(panels[0], tokens.items()):
        draw_tokens(panel, cells)
        case = next(row["case"] for row in rows if row["dtype"] == dtype)
        panel.set_title(f"{DTYPE_NAMES.get(dtype, dtype)}, {case.split(' of ')[-1]}", fontsize=10)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    set_rate_axis(panels[0][0])
    shown = [row["ms"] for cells in tokens.values() for arms in cells.values() for row in arms.values()]
    panels[0][0].set_ylim(0.5 * min(shown), 1.6 * max(shown))
    panels[0][0].set_ylabel("ms a call of the model (logarithmic)")
    legend_below(figure, panels[0], 4)
    save(figure, path, f"A token of a Llama, by where its weights are ({machine(rows)})")


def by_dtype(rows):
    return {dtype: [row for row in rows if row["dtype"] == dtype] for dtype in in_order(row["dtype"] for row in rows)}


def draw_tokens(panel, cells):
    """Bars of the arms that each cell has, side by side."""
    at, centres = 0, []
    for arms in cells.values():
        present = [arm for arm in WEIGHTS_STYLE if arm in arms]
        for place, arm in enumerate(present, at):
            (label, color), row = WEIGHTS_STYLE[arm], arms[arm]
            panel.bar(place, row["ms"], 0.94, color=color, label=label)
            if row["bound_ms"]:
                panel.hlines(
                    row["bound_ms"], place - 0.47, place + 0.47, color="black", linewidth=1.5, label="its bound"
                )
            top = max(row["ms"], row["bound_ms"] or 0)
            panel.annotate(
                number(row["ms"]), (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=7.5
            )
        centres.append(at + (len(present) - 1) / 2)
        at += len(present) + 1
    names = [cell_name(*cell).replace(", ", "\n").replace(" tokens", "\ntokens") for cell in cells]
    panel.set_xticks(centres, names, fontsize=8)
    panel.tick_params(axis="x", length=0)
    panel.set_xlim(-1, at - 1)


def merged(spans):
    """Spans (start, end) in order, those that meet as one."""
    found = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def busy_share(spans, window):
    """How much of the window (start, end) the spans cover."""
    return sum(end - start for start, end in merged(spans)) / (window[1] - window[0])


def window_of(timeline):
    return min(row["start_us"] for row in timeline), max(row["end_us"] for row in timeline)


def spans_of(timeline):
    """{kind: its spans}, in the order of the chart."""
    return {
        kind: [(row["start_us"], row["end_us"]) for row in timeline if row["kind"] == kind] for kind in TIMELINE_STYLE
    }


def draw_timeline(timeline, rows, path):
    """What copies, decoding and the model keep busy during a part of one token: a line of spans each. rows: of the
    run that it is of.
    """
    if not timeline or not rows:
        return
    window, spans = window_of(timeline), spans_of(timeline)
    figure, panel = plt.subplots(figsize=(10, 2.5), layout="constrained")
    for i, (kind, own) in enumerate(spans.items()):
        panel.broken_barh(
            [((start - window[0]) / 1e3, (end - start) / 1e3) for start, end in own],
            (i - 0.4, 0.8),
            color=TIMELINE_STYLE[kind][1],
            linewidth=0,
        )
    panel.set_yticks(
        range(len(spans)),
        [f"{TIMELINE_STYLE[kind][0]}\n{100 * busy_share(own, window):.0f} % busy" for kind, own in spans.items()],
        fontsize=9,
    )
    panel.invert_yaxis()
    panel.set_xlim(0, (window[1] - window[0]) / 1e3)
    panel.set_xlabel("ms", fontsize=9)
    panel.tick_params(axis="x", labelsize=8)
    panel.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    save(figure, path, f"A part of one token, BF16 weights streamed by ibp ({machine(rows)})")


# ---- graphs --------------------------------------------------------------------------------------------------------


def draw_gnn(rows, path):
    """A group of bars for each set and batch. Above: seconds an epoch; below: the rate of a fetch alone, as multiples
    of that of raw rows by the GPU.
    """
    cells = {}
    for row in rows:
        if row["arm"] in GNN_STYLE:
            cells.setdefault(row["case"], {})[row["arm"]] = row
    if not cells:
        return
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(max(8.0, 1.6 * len(cells)), 7.2), sharex=True, height_ratios=(1.2, 1), layout="constrained"
    )
    draw_arms(above, {case: {arm: row["epoch_s"] for arm, row in arms.items()} for case, arms in cells.items()}, None)
    above.set_ylabel("seconds an epoch (logarithmic)")
    draw_arms(
        below,
        {
            case: {
                arm: arms["raw rows"]["fetch_ms"] / row["fetch_ms"] for arm, row in arms.items() if arm != "raw rows"
            }
            if "raw rows" in arms
            else {}
            for case, arms in cells.items()
        },
        1,
    )
    below.axhline(1, color="black", linewidth=1)
    below.set_ylabel("fetches, times raw rows (logarithmic)")
    below.set_xticks(range(len(cells)), [graph_label(next(iter(arms.values()))) for arms in cells.values()], fontsize=8)
    legend_below(figure, [above], 5)
    save(figure, path, f"Epochs of GraphSAGE, features in pinned host memory ({machine(rows)})")


def graph_label(row):
    name = row["case"].split(", batch")[0]
    dtype = DTYPE_NAMES.get(row["dtype"], row["dtype"])
    return f"{name}\nbatch {row['batch']:,}\n{dtype}, {row['row_bytes']:,} B"


def draw_arms(panel, cells, base):
    """Bars {case: {arm: value}} with their numbers, on a logarithmic axis. base: where they begin; None: below all."""
    values = [value for arms in cells.values() for value in arms.values()]
    start = base or 0.6 * min(values, default=1)
    width = 0.88 / len(GNN_STYLE)
    for i, (arm, (label, color)) in enumerate(GNN_STYLE.items()):
        places = [
            (at + (i - (len(GNN_STYLE) - 1) / 2) * width, arms[arm])
            for at, arms in enumerate(cells.values())
            if arm in arms
        ]
        panel.bar(
            [place for place, _ in places],
            [value - start for _, value in places],
            width,
            bottom=start,
            color=color,
            label=label,
        )
        for place, value in places:
            is_above = value >= start
            panel.annotate(
                fine_number(value),
                (place, value),
                (0, 2 if is_above else -2),
                textcoords="offset points",
                ha="center",
                va="bottom" if is_above else "top",
                fontsize=7,
            )
    set_rate_axis(panel)
    panel.set_ylim(min([start, *(0.6 * value for value in values)]), 1.6 * max(values, default=1))
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)


# ---- savings -------------------------------------------------------------------------------------------------------


def draw_ratio(rows, path):
    """Savings of every set by every method: synthetic sets and real ones in percent, very compressible ones as times
    smaller.
    """
    if plt is None or not rows:
        return
    sets = {}
    for row in rows:
        methods = sets.setdefault((row["set"], f"{row['set']}\n{row['dtype']}, {size_name(row['row_bytes'])}"), {})
        method = NVCOMP if row["method"].startswith(NVCOMP) else row["method"]
        if method not in methods or row["savings"] > methods[method]["savings"]:
            methods[method] = row
    panels = {"synthetic": {}, "real": {}, "very compressible": {}}
    synthetic = {name for name, _, _ in SYNTHETIC_SETS}
    for (name, label), methods in sets.items():
        is_sparse = max(row["savings"] for row in methods.values()) > SPARSE_SAVINGS
        panels["very compressible" if is_sparse else "synthetic" if name in synthetic else "real"][label] = methods
    panels = {title: shown for title, shown in panels.items() if shown}
    figure, axes = plt.subplots(len(panels), 1, figsize=(15, 4.4 * len(panels)), squeeze=False)
    for panel, (title, shown) in zip(axes[:, 0], panels.items()):
        draw_ratio_panel(panel, shown, title == "very compressible")
        panel.set_title(title, loc="left", fontsize=11)
    axes[0, 0].legend(fontsize=9, ncols=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    save(figure, path, "Bytes saved, lossless, codebooks included")


def draw_ratio_panel(panel, shown, as_times):
    """Bars of the methods in groups, one a set; a tick on auto's bar where its rows are read over the link."""

    def height(savings):
        return 1 / (1 - savings) if as_times else 100 * max(0.0, savings)

    arms = [arm for arm in RATIO_STYLE if any(arm in methods for methods in shown.values())]
    width = 0.84 / len(arms)
    for i, arm in enumerate(arms):
        label, color = RATIO_STYLE[arm]
        offset = (i - (len(arms) - 1) / 2) * width
        places = [(at + offset, methods[arm]) for at, methods in enumerate(shown.values()) if arm in methods]
        panel.bar(
            [place for place, _ in places],
            [height(row["savings"]) for _, row in places],
            width,
            color=color,
            label=label,
        )
        if arm == "auto":
            panel.hlines(
                [height(row["link_savings"]) for _, row in places],
                [place - width / 2 for place, _ in places],
                [place + width / 2 for place, _ in places],
                color="black",
                linewidth=1.5,
                label="auto, over the link",
            )
            for place, row in places:
                number = height(row["savings"])
                panel.annotate(
                    f"{number:.{0 if number >= 100 else 1}f}",
                    (place, number),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                )
    panel.set_xticks(range(len(shown)), shown, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    panel.set_xlim(-0.6, len(shown) - 0.4)
    panel.set_ylabel("times smaller" if as_times else "percent saved")
    panel.margins(y=0.1)
    if as_times:
        panel.set_yscale("log")
        panel.set_ylim(bottom=1)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)


def draw_chunks(rows, path):
    """Savings of each set by threshold, a line a chunk size."""
    if plt is None or not rows:
        return
    cases = in_order((row["set"], row["dtype"]) for row in rows)
    columns = 4
    figure, panels = plt.subplots(
        -(-len(cases) // columns), columns, figsize=(11, 2.3 * -(-len(cases) // columns)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for panel in panels.flat[len(cases) :]:
        panel.axis("off")
    for panel, (name, dtype) in zip(panels.flat, cases):
        own = [row for row in rows if (row["set"], row["dtype"]) == (name, dtype)]
        for color, chunk_bytes in zip(OTHER_COLORS, in_order(row["chunk_bytes"] for row in own)):
            points = [(row["tau"], 100 * row["savings"]) for row in own if row["chunk_bytes"] == chunk_bytes]
            panel.plot(*zip(*points), color=color, marker="o", markersize=3, label=f"chunks of {chunk_bytes} B")
        panel.set_title(f"{name}, {DTYPE_NAMES.get(dtype, dtype)}", fontsize=8)
        panel.grid(alpha=0.3)
        panel.set_ylim(bottom=0)
    legend_below(figure, panels.flat, len(OTHER_COLORS))
    save(figure, path, "Percent saved by one threshold of invariance for all chunks, by that threshold")


def draw_copy_threads(rows, path):
    """Rates by threads of the CPU or SMs, a panel a row size."""
    if plt is None or not rows:
        return
    sizes = in_order(row["row_bytes"] for row in rows)
    figure, panels = plt.subplots(
        1, len(sizes), figsize=(2.3 * len(sizes), 3.6), squeeze=False, sharey=True, layout="constrained"
    )
    for panel, size in zip(panels[0], sizes):
        for arm in COPY_THREADS_STYLE:
            own = [row for row in rows if row["row_bytes"] == size and row["arm"] == arm]
            label, color = COPY_THREADS_STYLE[arm]
            draw_lines(panel, [(row["workers"], row["gbps"]) for row in own], color, label)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set_title(f"rows of {size_name(size)}", fontsize=10)
        panel.set_xlabel("threads or SMs", fontsize=9)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel(RATE_LABEL)
    legend_below(figure, panels[0], len(COPY_THREADS_STYLE))
    save(figure, path, f"Random BF16 rows from pinned host memory ({machine(rows)})")


def draw_densities(rows, path):
    """Densities by training steps, a panel a net, a line a layer; pools dashed."""
    if plt is None or not rows:
        return
    names = in_order(row["net"] for row in rows)
    figure, panels = plt.subplots(
        1, len(names), figsize=(5.6 * len(names), 4.6), squeeze=False, sharey=True, layout="constrained"
    )
    for panel, name in zip(panels[0], names):
        layers = in_order((row["layer"], row["kind"]) for row in rows if row["net"] == name)
        for i, (layer, kind) in enumerate(layers):
            own = [row for row in rows if (row["net"], row["layer"]) == (name, layer)]
            points = [(row["step"], 100 * row["density"]) for row in own]
            line = "--" if kind == "pool" else "-"
            panel.plot(*zip(*points), line, color=plt.cm.viridis(i / len(layers)), linewidth=1.2, label=layer)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("steps", fontsize=9)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=6, ncols=3, frameon=False)
    panels[0][0].set_ylim(0, 100)
    panels[0][0].set_ylabel("percent of activations that are not zero")
    save(figure, path, "Outputs of ReLUs and pools while a net is trained on images made for it")


def draw_activations(rows, path):
    """The time of a step and the memory that it takes, a panel a net, a point an arm."""
    if plt is None or not rows:
        return
    names, arms = in_order(row["case"] for row in rows), in_order(row["arm"] for row in rows)
    columns = min(3, len(names))
    figure, panels = plt.subplots(
        -(-len(names) // columns), columns, figsize=(3.7 * columns, 3.2 * -(-len(names) // columns)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for panel in panels.flat[len(names) :]:
        panel.axis("off")
    for panel, name in zip(panels.flat, names):
        for i, arm in enumerate(arms):
            own = [row for row in rows if (row["case"], row["arm"]) == (name, arm)]
            points = [row["step_ms"] for row in own], [row["peak_gb"] for row in own]
            panel.plot(*points, "o", color=plt.cm.tab10(i), label=arm)
        panel.set_title(name, fontsize=10)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.minorticks_off()
        panel.set_ylim(0, 1.1 * max(row["peak_gb"] for row in rows if row["case"] == name))
        panel.set_xlabel("ms a step", fontsize=9)
        panel.set_ylabel("peak GB", fontsize=9)
        panel.grid(alpha=0.3)
    legend_below(figure, panels.flat, len(arms))
    save(figure, path, f"Activations off the GPU: a step's time and memory ({machine(rows)})")


def draw_bars(panel, rows, labels, arm, position, num_arms, label, color):
    points = [
        (labels.index(case_label(row)), row["gbps"]) for row in rows if row["arm"] == arm and case_label(row) in labels
    ]
    width = 0.84 / num_arms
    panel.bar(
        [place + (position - (num_arms - 1) / 2) * width for place, _ in points],
        [gbps for _, gbps in points],
        width,
        color=color,
        label=label,
    )


def finish_bars(figure, panel, labels):
    panel.set_xticks(range(len(labels)), labels, fontsize=8)
    set_rate_axis(panel)
    panel.set_ylim(bottom=1)  # bars on a logarithmic axis start at 1 GB/s in every chart
    panel.set_ylabel(RATE_LABEL)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
    legend_below(figure, [panel], 6)


def set_rate_axis(panel):
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.minorticks_off()


def save(figure, path, title):
    if len(title) > 12 * figure.get_figwidth():  # letters that an inch holds
        title = title.replace(" (", "\n(", 1)
    figure.suptitle(title, fontsize=10)
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(path)


def draw(directory):
    """Draws every chart for which the CSV is in `directory`; says so where matplotlib is missing."""
    if plt is None:
        print("no charts: matplotlib is not installed")
        return
    directory = Path(directory)
    gather, codec, stream = (
        read(directory / "gather.csv"),
        read(directory / "codec.csv"),
        read(directory / "stream.csv"),
    )
    draw_overview(gather, stream, codec, directory / "overview.png")
    draw_gather_synthetic(gather, directory / "gather.png")
    draw_gather_normal(gather, directory / "gather_normal.png")
    draw_gather_real(gather, directory / "gather_real.png")
    draw_codec(codec, directory / "codec.png")
    draw_stream(stream, directory / "stream.png")
    for name, title in CASE_CHARTS.items():
        draw_cases(read(directory / f"{name}.csv"), directory / f"{name}.png", title)
    for name, title in CODING_CHARTS.items():
        found = [row for row in read(directory / f"{name}.csv") if row["case"] != "device"]
        found = [row for row in found if row["rows"] * row["row_bytes"] >= CODING_LEAST_BYTES]
        draw_cases(found, directory / f"{name}.png", title)
    for name, title in CACHE_CHARTS.items():
        found = [row for row in read(directory / f"{name}.csv") if row["case"] != "device"]
        draw_cases(found, directory / f"{name}.png", title)
    draw_spill(read(directory / "spill.csv"), directory / "spill.png")
    draw_choices(read(directory / "choose.csv"), directory / "choose.png")
    draw_collectives(read(directory / "collectives.csv"), directory / "collectives.png")
    draw_families(read(directory / "families.csv"), directory / "families.png")
    draw_overlap(read(directory / "overlap.csv"), directory / "overlap.png")
    draw_ratio(read(directory / "ratio.csv"), directory / "ratio.png")
    draw_chunks(read(directory / "chunks.csv"), directory / "chunks.png")
    draw_copy_threads(read(directory / "copy_threads.csv"), directory / "copy_threads.png")
    draw_activations(read(directory / "activations.csv"), directory / "activations.png")
    draw_densities(read(directory / "densities.csv"), directory / "densities.png")
    weights = read(directory / "weights.csv")
    draw_weights(weights, directory / "weights.png")
    draw_timeline(read(directory / "timeline.csv"), weights, directory / "timeline.png")
    draw_gnn(read(directory / "gnn.csv"), directory / "gnn.png")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="directory of the CSV files")
    draw(parser.parse_args(argv).out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
