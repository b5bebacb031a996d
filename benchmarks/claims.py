"""Writes benchmarks/RESULTS.md, and the figures that README.md and docs/ cite, from the CSVs in benchmarks/results; and
benchmarks/PAPERS.md from benchmarks/papers.csv.

    python -m benchmarks.claims [--check]

TABLES lists the tables of RESULTS.md: for each the CSV, the cells that identify a line, and the columns. FIGURES lists
the sentences that pages cite. A page has such a sentence between `<!-- NAME: written by python -m benchmarks.claims
-->` and `<!-- end of NAME -->`. --check writes nothing, and exits with 1 if a page says something else.
"""

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from . import (
    activations,
    charts,
    choose,
    codec,
    compress,
    dcp,
    gnn_cache,
    harness,
    papers,
    ratio,
    reproduction,
    spill,
    throttle,
)
from .reading import (
    NORMAL,
    NVCOMP,
    SYNTHETIC,
    Results,
    fine_number,
    in_order,
    kind,
    markdown,
    number,
    percent,
    size_name,
    value_of,
    whole,
)

RESULTS = harness.ROOT / "benchmarks" / "RESULTS.md"
BLOCK = re.compile(r"<!-- ([^:>]+): written by python -m benchmarks\.claims -->\n(.*?)<!-- end of \1 -->", re.DOTALL)


def machine(rows):
    """Returns where and at which commits the rows were measured, and how many rows name no commit."""
    first, commits = rows[0], in_order(row["commit"][:10] for row in rows if row.get("commit"))
    nameless = sum(not row.get("commit") for row in rows)
    parts = [first.get("gpu"), first.get("torch") and f"torch {first['torch']}, CUDA {first['cuda']}"]
    if commits:
        parts.append(f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}")
    if nameless:
        parts.append(f"{nameless} of {len(rows)} rows name no commit")
    return "".join(f", {part}" for part in parts if part)


# ---- cells ---------------------------------------------------------------------------------------------------------


def cell(column, text=str):
    """Returns function(row) -> the value of a column as text. The text is empty if the row has no value."""
    return lambda row: "" if row.get(column) is None else text(row[column])


def gigabytes(num_bytes):
    return f"{num_bytes / 1e9:.2f}"


def megabytes(num_bytes):
    return f"{num_bytes / 1e6:,.1f}"


def mebibytes(num_bytes):
    return f"{num_bytes / 2**20:,.0f}"


def real(digits):
    return lambda value: f"{value:,.{digits}f}"


def judged(row):
    """Returns GB/s. If the target is missed, it follows in brackets."""
    return number(row["gbps"]) + (f" (of {number(row['target_gbps'])})" if row.get("met") == "no" else "")


def of_ideal(row):
    return f"{number(row['gbps'])} ({percent(row['gbps'] / row['ideal_gbps'], 0)})"


def rows_name(row):
    """Returns the case, and the dtype and size of the rows."""
    return f"{row['case']}, {kind(row)}" + (f", {size_name(row['row_bytes'])}" if row["row_bytes"] else "")


def arm_name(row):
    """Returns the arm, and the number of SMs that it may use if that is not all."""
    return row["arm"] + (f", {row['sms']} SMs" if 0 < row["sms"] < row["most"] else "")


def coding_rates(row):
    """Returns GB/s of encoding and of decoding, of a row of choose.csv."""
    times = row["encode_us"], row["decode_us"]
    return ", ".join(number(row["rows"] * row["row_bytes"] / us * 1e-3) for us in times)


def with_bound(row):
    share = f" ({percent(row['bound_ms'] / row['ms'], 0)})" if row["bound_ms"] else ""
    return number(row["ms"]) + share


def over_torch(row):
    wanted = f" ({row['over_torch'] * row['target_gbps'] / row['gbps']:.2f})" if row["met"] == "no" else ""
    return f"{row['over_torch']:.2f}{wanted}"


def beside_wanted(column):
    """Returns function(row) -> a number. If it is below its target, the target follows in brackets."""

    def text(row):
        value, wanted = row[column], row[f"wanted_{column}"]
        return f"{value:.2f}" + (f" ({wanted:g})" if wanted and value < wanted else "") if value else ""

    return text


def step(row):
    late = row["target_ms"] and row["step_ms"] > row["target_ms"]
    return fine_number(row["step_ms"]) + (f" ({number(row['target_ms'])})" if late else "")


def over(arm, other, column="gbps"):
    """Returns function({arm: row}) -> the ratio of an arm's column to another arm's."""
    return lambda arms: f"{arms[arm][column] / arms[other][column]:.2f}" if {arm, other} <= arms.keys() else ""


def is_transfer(row):
    """Returns whether a link takes part in a row of kv_transfer.csv."""
    return row["link_gbits"] is not None or "processes" in row["case"]


def is_whole(row):
    """Returns whether an arm may use the whole GPU, or uses none of it."""
    return row["sms"] in (0, row["most"])


# ---- the tables of RESULTS.md --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table of RESULTS.md.

    Attributes:
        heading: heading of its section. Empty: the table continues the section before it.
        csv: name of the CSV.
        text: what the table shows.
        line: by head, function(row) -> text of the cells that identify a line.
        cell: function(row) -> text in an arm's column. None: each row is a line, without columns for arms.
        where: function(row) -> whether the row is shown.
        across: function(row) -> head of its column.
        more: by head, function({head: row}) -> text of columns after the arms.
        order: function(row) -> key by which lines are sorted. None: lines are in the order of measurement.
    """

    heading: str
    csv: str
    text: str
    line: dict[str, Callable]
    cell: Callable | None = None
    where: Callable = lambda row: True
    across: Callable = arm_name
    more: dict[str, Callable] = field(default_factory=dict)
    order: Callable | None = None

    def rows(self, results):
        rows = [row for row in results.rows(self.csv) if row.get("case") != "device"]
        rows = rows if self.order is None else sorted(rows, key=self.order)
        most = max((row.get("sms") or 0 for row in rows), default=0)
        return [row for row in (row | {"most": most} for row in rows) if self.where(row)]

    def markdown(self, results):
        rows, groups = self.rows(results), {}
        for row in rows:
            key = tuple(text(row) for text in self.line.values())
            key = key if self.cell else (*key, len(groups))
            groups.setdefault(key, {})[self.across(row) if self.cell else ""] = row
        if self.cell is None:
            return markdown([*self.line], [key[:-1] for key in groups])
        arms = in_order(self.across(row) for row in rows)
        lines = [
            [*key, *(self.cell(own[arm]) if arm in own else "" for arm in arms), *(f(own) for f in self.more.values())]
            for key, own in groups.items()
        ]
        heads = [*self.line, *arms, *self.more]
        if len(arms) > len(lines) and len(self.line) == 1:  # Each arm becomes a line.
            heads, *lines = zip(heads, *lines)
        return markdown(heads, lines)


ROWS = {"rows": rows_name}
GBPS = "GB/s of original bytes"
MISSED = "in brackets the target where it is missed"
READ_OR_WRITTEN = "decode", "index_select", "update_"  # Arms of spill.csv begin with these words.
# These arms of codec.csv are shown.
CODERS = {
    *("planes decode", "planes per column decode", "decode", "nvcomp ANS decode", "planes encode", "encode"),
    *(
        "nvcomp ANS decode, latency",
        "nvcomp ANS compress, latency",
        "nvcomp ANS compress",
        "planes compress",
        "compress",
        "analyze",
    ),
}
RATIO_METHODS = ("paper", "ibp", "planes", ratio.ZSTD)


def by_size(row):
    """Returns the key that sorts rows of llm.csv from small models to large ones."""
    return row["weight_bytes"], row["context"] or 0, row["rows"]


def beside_plain(row):
    """Returns milliseconds, and for arms other than plain the speed-up over plain."""
    times = f" ({row['times']:.2f})" if row["times"] and row["arm"] != "plain" else ""
    return fine_number(row["ms"]) + times


def of_all_layers(row):
    """Returns milliseconds of all experts of a model. For experts that are compressed on the GPU the speed-up over
    plain ones follows, for others the share of their bound."""
    if row["times"]:
        return f"{fine_number(row['ms_of_all'])} ({row['times']:.2f})"
    share = f" ({percent(row['bound_ms'] / row['ms'], 0)})" if row["bound_ms"] else ""
    return fine_number(row["ms_of_all"]) + share


EXPERT_CALLS = {"tokens": cell("rows", "{:,}".format), "routing": cell("routing"), "way": cell("way")}


def matrix_name(row):
    """Returns the name of the matrix of a row of linear.csv."""
    return row["case"].partition(",")[0]


def times_of_cublas(row):
    """Returns microseconds, and for arms other than cuBLAS the speed-up over it."""
    times = "" if row["arm"] == "cuBLAS" else f" ({row['times']:.2f})"
    return fine_number(row["us"]) + times


PRODUCTS = Table(
    "Products with compressed matrices",
    "linear",
    "Microseconds of a product of BF16 vectors, by their number, with a matrix of outputs x inputs in a CUDA graph; in "
    "brackets the times of cuBLAS's rate with plain weights",
    {"matrix": matrix_name, "arm": cell("arm")},
    times_of_cublas,
    lambda row: " x " in row["case"] and not any(word in row["case"] for word in ("another", "together")),
    cell("vectors"),
)
TOGETHER = replace(
    PRODUCTS,
    heading="",
    text="The same by several matrices in one call, as by a model's query, key and value, or gate and up; in brackets "
    "the times of the rate of cuBLAS with all rows in one plain matrix",
    where=lambda row: "together, " in row["case"] and " x " in row["case"] and "another" not in row["case"],
)
STEPS = Table(
    "Language models from compressed weights",
    "llm",
    "Milliseconds in which each sequence of a batch gets a token, by transformers with a static cache, in a CUDA graph "
    "or compiled by `torch.compile` (`offloaded`: plain weights in host memory, without a graph); in brackets how many "
    "times as fast as plain",
    {
        "model": lambda row: row["model"] + ", compiled" * (row["way"] == "compiled step"),
        "batch": cell("rows"),
        "context": cell("context", "{:,}".format),
    },
    beside_plain,
    lambda row: row["way"] in ("step", "compiled step"),
    lambda row: "compressed" if row["arm"] == "coded" else row["arm"],
    {
        "tokens a second, compressed": lambda arms: (
            fine_number(arms["compressed"]["tokens_per_s"]) if "compressed" in arms else ""
        )
    },
    by_size,
)

TABLES = (
    Table(
        "Random rows from pinned host memory",
        "gather",
        f"Normal rows, {GBPS}, in brackets the share of what the link allows for the sectors that rows touch",
        ROWS,
        of_ideal,
        lambda row: row["case"].startswith(NORMAL) and (is_whole(row) or row["sms"] == 8),
    ),
    Table(
        "",
        "gather",
        "Rows of real tables",
        ROWS,
        of_ideal,
        lambda row: not row["case"].startswith((NORMAL, SYNTHETIC.strip())) and is_whole(row),
    ),
    Table(
        "",
        "gather",
        "The paper's synthetic rows by savings",
        ROWS,
        of_ideal,
        lambda row: row["case"].startswith(SYNTHETIC) and is_whole(row),
    ),
    Table(
        "",
        "reference",
        f"The same rows beside the paper's own code (commit b2f7100), in one run, {GBPS}",
        ROWS,
        cell("gbps", number),
        more={"ibp / the paper's code": over("ibp slots", "the paper's code")},
    ),
    Table("", "large_table", f"Tables of some GiB, {GBPS}", ROWS, judged, lambda row: row["arm"] != "partition alone"),
    Table("", "scattered", f"Elements at random places of pinned memory, {GBPS}", ROWS, cell("gbps", fine_number)),
    Table(
        "",
        "copy_threads",
        f"100,000 rows by threads of the CPU or by SMs, {GBPS}",
        {"rows": rows_name, "arm": cell("arm")},
        cell("gbps", fine_number),
        across=cell("workers"),
    ),
    Table("Whole tensors from pinned host memory", "stream", GBPS, ROWS, judged, is_whole),
    Table(
        "Decoding and encoding in device memory",
        "codec",
        GBPS,
        ROWS,
        judged,
        lambda row: (
            row["arm"] in CODERS
            and (is_whole(row) or row["sms"] == 4)
            and row["row_bytes"] >= 256
            and not row["case"].startswith(codec.SIZED)
        ),
    ),
    Table(
        "",
        "codec",
        f"Tables of several sizes; {GBPS}",
        {"data, way": lambda row: f"{row['case'].removeprefix(codec.SIZED)} {kind(row)}, {row['arm'].split(' ')[1]}"},
        judged,
        lambda row: row["case"].startswith(codec.SIZED),
        lambda row: f"{row['rows'] * row['row_bytes'] >> 20:,} MiB",
    ),
    Table(
        "",
        "codec",
        f"Decoding to memory that begins at an aligned address, or one element after it; {GBPS}",
        {
            "data": lambda row: f"{row['case'].removeprefix(codec.JOINS)} {kind(row)}",
            "MiB": lambda row: f"{row['rows'] * row['row_bytes'] >> 20:,}",
        },
        judged,
        lambda row: row["case"].startswith(codec.JOINS),
    ),
    Table(
        "",
        "families",
        f"Rows of every kind: fetched from pinned host memory, and decoded and encoded in device memory; {GBPS}, "
        f"{MISSED}",
        ROWS,
        judged,
    ),
    Table(
        "",
        "profiles",
        "What binds kernels, read by Nsight Compute, of the longest kernel of a call: shares of the cycles in which an "
        "instruction could be issued, of the rates of device memory and caches, of the tensor cores' cycles and of an "
        "SM's warps, and what a warp waits for longest, with its share of the warp's time",
        {
            "rows": rows_name,
            "arm": cell("arm"),
            "kernel": lambda row: f"`{row['kernel']}`",
            "us": cell("us", number),
            **{name: cell(name, real(0)) for name in ("issue", "memory", "l2", "l1", "tensor", "warps")},
            "waits for": lambda row: f"{row['stall']} ({percent(row['stall_share'], 0)})" if row["stall"] else "",
        },
    ),
    Table(
        "Compressing",
        "compress",
        f"Calls of `ibp.compress`, the choice of the codebook included: milliseconds, and {GBPS}, {MISSED}",
        ROWS,
        lambda row: f"{fine_number(row['ms'])}: {judged(row)}",
        lambda row: not row["arm"].startswith(("copy_", compress.IN_PLACE)),
    ),
    Table(
        "",
        "compress",
        "A table in host memory compressed in place: seconds of the call, learning included, seconds of learning where "
        "it was timed, and how many rows were compared afterwards",
        {
            "table": cell("case"),
            "arm": lambda row: row["arm"].removeprefix(compress.IN_PLACE),
            "seconds": lambda row: fine_number(row["ms"] / 1000),
            "learning": lambda row: fine_number(row["learn_ms"] / 1000) if row["learn_ms"] else "",
            "million rows a second": lambda row: fine_number(row["rows"] / row["ms"] / 1000),
            "GB/s": cell("gbps", number),
            "host memory, GB": cell("host_gb", number),
            "rows compared": cell("checked_rows", real(0)),
        },
        where=lambda row: row["arm"].startswith(compress.IN_PLACE),
    ),
    Table(
        "",
        "encode_into",
        f"Rows coded by one launch into memory that is there, {GBPS}, {MISSED}",
        ROWS,
        judged,
        lambda row: row["arm"] != "until it returns",
    ),
    Table(
        "",
        "chunk_rates",
        f"Decoding scheme `ibp` in device memory by the bytes of a chunk, {GBPS}",
        ROWS,
        cell("gbps", number),
        across=cell("chunk_bytes"),
    ),
    Table(
        "",
        "transfers",
        "Tables of real sets: how many times as fast as raw rows, or as `copy_`, they come to the GPU. `LLM keys` and "
        "`LLM values` in FP16 are BF16 ones that were cast",
        ROWS,
        cell("gain", real(2)),
        is_whole,
    ),
    Table(
        "Rows that change",
        "changes",
        f"Microseconds of a call, in brackets {GBPS}",
        {"in": cell("case")},
        lambda row: f"{fine_number(row['us'])} ({fine_number(row['gbps'])})",
    ),
    Table(
        "Deltas",
        "deltas",
        f"Two versions of weights: the share of the bytes that a delta takes, and {GBPS} of whole calls, {MISSED}",
        {"weights": lambda row: f"{row['case']}, {kind(row)}", "changed": cell("changed", percent)},
        lambda row: ("" if row["arm"].endswith("apply") else f"{percent(row['stored'], 2)}: ") + judged(row),
        across=cell("arm"),
    ),
    Table(
        "",
        "sync",
        "A step's weights from a trainer to an engine: milliseconds for all layers, reckoned from some of them, and in "
        "brackets the share of the weights' bytes that is sent. Links of 100 and 400 Gb/s are reckoned",
        {"weights": cell("case"), "changed": cell("changed", percent)},
        lambda row: f"{number(row['ms_of_all'])} ({percent(1 - row['savings'], 2)})",
        across=cell("arm"),
    ),
    Table(
        "Checkpoints",
        "checkpoints",
        "4 GiB of BF16 weights, from the page cache to a tmpfs; GB/s of weights, seconds without fsync, and the most "
        "memory of its own that the process was seen to have",
        {
            "part or call": cell("arm"),
            "GB/s": judged,
            "seconds": cell("seconds", fine_number),
            "memory, MiB": cell("peak_mib", number),
        },
    ),
    Table(
        "",
        "dcp",
        "Checkpoints of torch.distributed.checkpoint, a billion parameters by two processes that share a GPU or the "
        "cores of a CPU: seconds to save, with fsync, and to load, and the share of the bytes that is stored; arms in "
        "one order and in the other",
        {
            "what": cell("case"),
            "arm": cell("arm"),
            "order": cell("order"),
            "save, s": cell("save_seconds", fine_number),
            "load, s": cell("load_seconds", fine_number),
            "stored": lambda row: percent(1 - row["savings"], 1),
        },
    ),
    Table(
        "Small calls",
        "small_calls",
        "`index_select` of few rows of 512 bytes, microseconds",
        {"from": cell("case")},
        lambda row: number(row["rows"] * row["row_bytes"] / row["gbps"] * 1e-3),
    ),
    Table(
        "What the host does",
        "host_calls",
        "Microseconds until a call returns: of 64 rows of 512 bytes, 4 MiB, or 4 vectors by a matrix of 1,024 x 1,024",
        {
            "call": cell("case"),
            "ibp": cell("us", number),
            "torch": cell("torch_us", number),
            "times torch's": cell("times_torch", fine_number),
            "wanted": cell("wanted", number),
            "Python functions of ibp": cell("python_calls", lambda count: f"{count:.0f}"),
        },
    ),
    Table(
        "Beside other work",
        "overlap",
        "BF16 matrix products beside fetches from pinned host memory",
        {
            "fetch": cell("arm"),
            "SMs at most": cell("sms"),
            "GB/s": cell("gbps", number),
            "of its rate alone": cell("fetch_share", lambda share: percent(share, 0)),
            "SMs taken": cell("sm_share", percent),
            "lost by the products": cell("matmul_share", lambda share: percent(1 - share)),
        },
        where=lambda row: bool(row["matmul_share"]),
    ),
    Table("On the CPU alone", "cpu", GBPS, ROWS, cell("gbps", fine_number)),
    PRODUCTS,
    TOGETHER,
    Table(
        "",
        "linear",
        "The same where another kernel writes the vectors before each product, whose time counts for both arms",
        {"matrix": matrix_name, "arm": cell("arm")},
        times_of_cublas,
        lambda row: row["case"].endswith("another kernel"),
        cell("vectors"),
    ),
    Table(
        "",
        "linear",
        "The same: tokens a second through the matrices of a model, and microseconds until a call comes back without "
        "a graph",
        {
            "stack, vectors": cell("case"),
            "arm": cell("arm"),
            "tokens a second": cell("tokens_per_s", fine_number),
            "us of the host": cell("host_us", fine_number),
        },
        where=lambda row: bool(row["tokens_per_s"]),
    ),
    STEPS,
    Table(
        "",
        "llm",
        "A prompt of one sequence, in a CUDA graph: milliseconds, in brackets how many times as fast as plain",
        {"model": cell("model"), "tokens": cell("rows", "{:,}".format)},
        beside_plain,
        lambda row: row["way"] == "prefill",
        cell("arm"),
        order=by_size,
    ),
    Table(
        "",
        "llm",
        "GB of weights, and seconds of coding them on the GPU",
        {
            "model": cell("model"),
            "plain": cell("weight_bytes", gigabytes),
            "compressed": cell("device_bytes", gigabytes),
            "share": lambda row: f"{row['device_bytes'] / row['weight_bytes']:.3f}",
            "most while they are compressed": cell("peak_bytes", gigabytes),
            "seconds": lambda row: fine_number(row["ms"] / 1e3),
        },
        where=lambda row: row["way"] == "weights" and row["arm"] == "coded",
        order=by_size,
    ),
    Table(
        "",
        "llm",
        "Milliseconds of `from_pretrained` from the page cache, in brackets how many times as fast as plain",
        {"model": cell("model"), "GB": cell("weight_bytes", gigabytes)},
        beside_plain,
        lambda row: row["way"] == "loading",
        cell("arm"),
    ),
    Table(
        "",
        "real_weights",
        "Weights of trained models in BF16, which all come back bit for bit: savings at both levels, the share of the "
        "weights in matrices that the kernel takes, matrices of these that are decoded for every call, irregular rows "
        "of the others, escapes, and rows whose scale is over 8 times another than the median of their matrix",
        {
            "model": cell("case"),
            "weights": cell("weights", "{:,}".format),
            "fast": cell("fast", percent),
            "default": cell("default", percent),
            "taken": cell("taken", percent),
            "decoded": lambda row: f"{row['decoded']} of {row['matrices']}",
            "irregular rows": cell("irregular", partial(percent, digits=2)),
            "escapes a million": cell("escapes", "{:,.0f}".format),
            "rows of another scale": cell("outlier_rows", partial(percent, digits=2)),
            "largest row over smallest": cell("row_scales", fine_number),
        },
    ),
    Table(
        "",
        "digit_forms",
        "Bits that a kernel reads of a weight whose exponent is a digit, with 8 bytes for each weight whose exponent "
        "has none; in brackets what a product can gain at most over plain weights",
        {"weights": cell("case"), "digits of": lambda row: f"{row['digit_bits']} bits"},
        lambda row: f"{row['bits']:.2f} ({row['bound']:.2f})",
        lambda row: row["digit_bits"] <= 4,
        cell("form"),
    ),
    Table(
        "Mixtures of experts",
        "moe",
        "Milliseconds of a call through the experts of all 48 layers of Qwen3-30B-A3B's shape, reckoned from some "
        "layers; in brackets the bound's share (the link's time for the bytes that cross it), or how many times as "
        "fast as the faster plain arm",
        EXPERT_CALLS,
        of_all_layers,
    ),
    Table(
        "",
        "moe",
        "The same: GB of the measured layers on the host and on the GPU, the share of rows that were in the cache, and "
        "microseconds a layer until a call comes back without a graph",
        {
            "arm": cell("arm"),
            "GB on the host": cell("host_bytes", gigabytes),
            "GB on the GPU": cell("device_bytes", gigabytes),
            "hits": lambda row: percent(row["hit_rate"], 0) if row["hit_rate"] else "",
            "us of the host": cell("host_us", fine_number),
        },
        where=lambda row: row["rows"] == 1 and row["way"] == "eager" and row["routing"] == "sticky",
    ),
    Table(
        "",
        "moe_deepseek",
        "Milliseconds of a call through the FP8 experts of all 58 layers of DeepSeek-V3's shape, reckoned from some "
        "layers; in brackets the bound's share",
        EXPERT_CALLS,
        of_all_layers,
    ),
    Table(
        "",
        "moe_policies",
        "The share of rows that a simulated cache finds after it has filled, by the share of a layer's rows that it "
        "holds and by what a missing row replaces: what was used longest ago, as in `ibp.RowCache`, or what was used "
        "least, by counts that are halved from time to time. `changing`: other favourites every 100 "
        "tokens",
        {"routing": cell("routing"), "holds": cell("share", lambda share: percent(share, 0))},
        cell("hit_rate", percent),
        across=cell("policy"),
    ),
    Table(
        "Models larger than the GPU",
        "weights",
        "Milliseconds a token of a Llama with random weights, or of a call on many tokens at once (prompt 0: that "
        "many sequences of 1,024 tokens). In brackets the bound's share: the link's time for the stored bytes",
        {
            "weights": lambda row: f"{row['weight_bytes'] / 1e9:.2f} GB, {kind(row)}, {arm_name(row)}",
            "GB on the host": cell("host_bytes", gigabytes),
        },
        with_bound,
        lambda row: row["arm"] != "ibp, loading",
        lambda row: f"batch {row['rows']}, prompt {row['prompt']:,}",
    ),
    Table(
        "",
        "flexgen_opt",
        "FlexGen with all weights in host memory; a request is reckoned from its prompt and first tokens",
        {
            "model and request": lambda row: f"{row['case']}, {kind(row)}",
            "arm": cell("arm"),
            "ms a token": cell("token_s", lambda value: number(1e3 * value)),
            "seconds until the first tokens": cell("prefill_s", real(2)),
            "seconds of a request": cell("request_s", real(1)),
            "seconds of loading": cell("load_s", real(1)),
            "GB on the host": cell("host_bytes", gigabytes),
        },
    ),
    Table(
        "Graph neural networks",
        "gnn",
        "Seconds of an epoch of 200 batches of GraphSAGE, the next batch sampled and fetched beside the one that "
        'trains; `cpu plain` is `x[ids].to("cuda")`',
        {"features": rows_name, "GiB": cell("table_gib", real(1))},
        cell("epoch_s", fine_number),
        more={
            "epochs: raw rows / ibp": over("raw rows", "ibp", "epoch_s"),
            "fetches: raw rows / ibp": over("raw rows", "ibp", "fetch_ms"),
        },
    ),
    Table(
        "",
        "gnn_parallel",
        "Data-parallel, a table a GPU: seconds of an epoch",
        {"features": cell("case")},
        cell("epoch_s", fine_number),
        more={"times as fast": over("ibp, 1 GPU", "ibp, 2 GPUs", "epoch_s")},
    ),
    Table(
        "",
        "gnn_cache",
        "With a cache on the GPU of a share of the features' bytes, filled with the rows that an epoch asks for most",
        {
            "features": rows_name,
            "arm": cell("arm"),
            "rows held": cell("held_rows", "{:,}".format),
            "hits": cell("hit_rate", percent),
            "seconds of an epoch": cell("epoch_s", fine_number),
            "ms of a fetch": cell("fetch_ms", fine_number),
        },
    ),
    *(
        Table(
            "",
            csv,
            f"Training to an accuracy with a loader of {loader}: how many batches and seconds that took, milliseconds "
            f"of a batch, and the largest relative difference of a loss from {first}",
            {
                "features": rows_name,
                "arm": cell("arm"),
                "accuracy": cell("accuracy", percent),
                "batches": cell("batches"),
                "seconds": cell("accuracy_s", fine_number),
                "ms of a batch": cell("batch_ms", fine_number),
                "losses": cell("loss_difference"),
            },
        )
        for csv, loader, first in (
            ("gnn_pyg", "PyTorch Geometric", "the loader's alone"),
            ("gnn_dgl", "DGL", "that of the first arm with the same batches"),
        )
    ),
    Table(
        "A cache of rows",
        "row_cache",
        "Rows that a cache holds, its map included",
        {
            "rows": rows_name,
            "MiB": cell("budget_bytes", mebibytes),
            "raw rows in them": cell("raw_rows", "{:,}".format),
            "rows held": cell("held_rows", "{:,}".format),
        },
        where=lambda row: row["arm"] == "own hits",
    ),
    Table("", "row_cache", f"Rows through it, {GBPS}, {MISSED}", ROWS, judged),
    Table(
        "Several processes",
        "scale",
        "A process a GPU, caches of a share of the features' bytes on each, all fetching at once; `sharded`: each "
        "process has a part of the rows",
        {
            "features": rows_name,
            "arm": cell("arm"),
            "hits": cell("hit_rate", percent),
            "from a peer": cell("peer_share", percent),
            "GB/s": cell("gbps", number),
            "seconds of an epoch": cell("epoch_s", fine_number),
        },
    ),
    Table(
        "Embedding tables",
        "dlrm",
        f"A row of each of 26 tables for each sample, the cache 2 % of the raw bytes; {GBPS}, {MISSED}",
        ROWS,
        judged,
        more={
            f"{arm} / {other}": over(arm, other)
            for arm, other in (
                ("ibp", "cpu gather + copy"),
                ("ibp", "cpu pipelined"),
                ("ibp", "raw rows"),
                ("ibp + cache", "raw + cache"),
            )
        },
    ),
    Table("", "bags", f"Bags of rows summed, {GBPS}, {MISSED}", ROWS, judged),
    Table(
        "",
        "dlrm_train",
        "A training step with row-wise Adagrad: milliseconds, in brackets what it adds to a forward pass, as a share "
        "of the time of its gather",
        ROWS,
        lambda row: f"{row['us'] / 1e3:.2f} ({row['added']:.2f})",
        across=cell("arm"),
    ),
    Table(
        "KV-caches",
        "kv_fetch",
        f"All keys and values, a layer at a time: {GBPS}, in brackets the share of what the link or the GPU's memory "
        "allows, and the time of all layers",
        {"KV-cache": cell("case")},
        lambda row: f"{of_ideal(row)}, {number(row['ms'])} ms",
    ),
    Table("", "kv_pages", f"Pages of 64 KiB to host memory and back, {GBPS}, {MISSED}", ROWS, judged),
    Table(
        "",
        "kv_decoding",
        "Decoding steps of Llama-3-8B's shape beside pages that go to host memory and come back without a pause: "
        "tokens a second and their share of the steps alone, GB/s of the pages both ways together and their share of "
        "the pages alone, and how many tokens are kept in the host memory of a raw one",
        {
            "batch": cell("batch"),
            "arm": arm_name,
            "tokens a second": cell("tokens_per_s", fine_number),
            "share": cell("tokens_share", percent),
            "pages": cell("pages_gbps", fine_number),
            "share of the pages alone": cell("pages_share", percent),
            "tokens kept": cell("gain", real(2)),
        },
        where=lambda row: row["tokens_per_s"] is not None,
    ),
    Table("", "kv_rows", f"Tokens by index, {GBPS}, {MISSED}", ROWS, judged),
    Table(
        "",
        "kv_request",
        "A request whose heads read a tenth of the tokens in host memory: milliseconds of a layer, and seconds of all, "
        "reckoned from some layers and tokens",
        {
            "layers and request": cell("case"),
            "arm": cell("arm"),
            "prompt": cell("prefill_ms", number),
            "learning": cell("learn_ms", fine_number),
            "rows of a token": cell("fetch_ms", fine_number),
            "a token": cell("step_ms", fine_number),
            "request, s": cell("request_s", real(2)),
        },
        where=lambda row: not row.get("workers"),
    ),
    Table(
        "",
        "kv_request",
        "The same request by threads of the CPU and by SMs: milliseconds of a token and layer",
        {"arm": lambda row: row["arm"].rpartition(" by ")[0]},
        cell("step_ms", fine_number),
        lambda row: row.get("workers"),
        cell("workers"),
    ),
    Table(
        "",
        "infinigen",
        "The same request by InfiniGen's fork itself: seconds of the prompt, of a token and of all",
        {
            "model and request": cell("case"),
            "arm": cell("arm"),
            "prompt": cell("prefill_s", real(2)),
            "a token": cell("token_s", real(3)),
            "request": cell("request_s", real(2)),
        },
    ),
    Table(
        "",
        "kv_transfer",
        f"Pages packed to a message on a GPU and unpacked there, {GBPS}, {MISSED}, and how many times fewer bytes the "
        "message has",
        {"arm": cell("arm")},
        lambda row: f"{judged(row)}, {row['ratio']:.2f}",
        lambda row: not is_transfer(row),
        lambda row: f"{row['case']}, {kind(row)}",
    ),
    Table(
        "",
        "kv_transfer",
        "Milliseconds until a machine has the pages of another one: reckoned from these rates, and between two "
        "processes by way of a socket",
        {"pages": cell("case"), "link": lambda row: row["arm"].rpartition(", ")[0]},
        cell("ms", fine_number),
        is_transfer,
        lambda row: row["arm"].rpartition(", ")[2],
        {f"raw / {level}": over("raw", level, "ms") for level in ("default", "fast")},
    ),
    Table(
        "Serving engines",
        "serve_vllm",
        "vLLM answers 16 prompts one after the other, twice: milliseconds to the first token the second time, tokens a "
        "second after it and of four prompts together, the share of tokens that were not computed anew, and how many "
        "answers have plain's tokens (the gap, in nats, says how likely another choice was). With random weights "
        "nearly all tokens are equally likely",
        {
            "model": lambda row: f"{row['case']}, {row['mode']}, {row['prompt_tokens']:,} tokens",
            "arm": cell("arm"),
            "to the first token": cell("ttft_ms", fine_number),
            "tokens a second": cell("tokens_per_s", fine_number),
            "four together": cell("batch_tokens_per_s", fine_number),
            "found": cell("found", partial(percent, digits=0)),
            "plain's answers": lambda row: f"{row['equal']} of {row['answers']}",
            "gap": cell("largest_gap", str),
            "weights, MB": cell("weight_bytes", megabytes),
            "loaded, s": cell("load_s", fine_number),
            "host memory, MB": cell("host_bytes", megabytes),
        },
        where=lambda row: row["answers"] is not None,
    ),
    Table(
        "",
        "serve_vllm",
        "vLLM serves requests that come at once, with 0.95 of a card's memory: tokens a second, the share of what "
        "memory, products and attention allow at most, milliseconds to a request's first token (median and 99th "
        "percentile) and between two tokens, the requests in a step, the tokens of keys and values that fit, and the "
        "memory of the weights. Arms run in the order of their numbers",
        {
            "model": lambda row: f"{row['case']}, {row['mode']}, {row['card_gib']:g} GiB",
            "requests": lambda row: f"{row['requests']} x {row['prompt_tokens']:,} + {row['new_tokens']:,}",
            "arm": lambda row: f"{row['order']}: {row['arm']}",
            "tokens a second": cell("tokens_per_s", fine_number),
            "of the bound": cell("share_of_bound", partial(percent, digits=0)),
            "to the first token": lambda row: f"{fine_number(row['ttft_ms'])}, {fine_number(row['ttft_p99_ms'])}",
            "between tokens": cell("between_ms", fine_number),
            "in a step": cell("sequences", fine_number),
            "tokens that fit": cell("kv_tokens", "{:,}".format),
            "weights, GB": cell("weight_bytes", gigabytes),
        },
        where=lambda row: row["requests"] is not None,
    ),
    Table(
        "",
        "serve_steps",
        "A step of these engines in milliseconds: by the clock, of the host's thread without its waiting, of the GPU's "
        "kernels, and how many kernels there are. More tokens than sequences are those of prompts",
        {
            "model": lambda row: f"{row['case']}, {row['mode']}",
            "sequences, tokens": lambda row: f"{row['sequences']}, {row['tokens']:,}",
            "arm": lambda row: f"{row['order']}: {row['arm']}",
            "step": cell("step_ms", fine_number),
            "host": cell("host_ms", fine_number),
            "GPU": cell("gpu_ms", fine_number),
            "kernels": cell("kernels", "{:,.0f}".format),
        },
    ),
    Table(
        "Slots and overflow",
        "spill",
        f"Tables in device memory, the share of rows that leave their slots, and {GBPS} with overflow on the GPU "
        f"(`device only`) and in host memory (`spilled`), {MISSED}",
        {
            "rows": rows_name,
            "slot": cell("slot_bytes", "{:,}".format),
            "leave it": cell("spilled", percent),
        },
        judged,
        lambda row: row["arm"].partition(",")[0] in READ_OR_WRITTEN and not row["case"].startswith(spill.PEER),
    ),
    Table(
        "",
        "spill",
        f"The same on one of two GPUs, with overflow in the other's memory too (`{spill.ON_PEER}`); {GBPS}, {MISSED}",
        {
            "rows": lambda row: rows_name(row).removeprefix(spill.PEER),
            "slot": cell("slot_bytes", "{:,}".format),
            "leave it": cell("spilled", percent),
        },
        judged,
        lambda row: row["arm"].partition(",")[0] in READ_OR_WRITTEN and row["case"].startswith(spill.PEER),
    ),
    Table(
        "",
        "spill",
        f"{GBPS} and in brackets the share of what is possible: a table of random bytes that is read whole, by the "
        "share of it in overflow, which is in host memory or in another GPU's",
        {"in overflow": cell("spilled", percent)},
        of_ideal,
        lambda row: row["arm"].startswith(spill.PLACED),
        cell("arm"),
    ),
    Table(
        "",
        "spill",
        "Pages of a KV-cache on the GPU, by slot; in brackets the share of what is possible",
        {
            "slot": cell("slot_bytes", "{:,}".format),
            "pages for each raw one": cell("target", real(2)),
            "leave it": cell("spilled", percent),
            "arm": cell("arm"),
            "GB/s": of_ideal,
        },
        where=lambda row: row["arm"].startswith("load"),
    ),
    Table(
        "",
        "spill",
        f"{GBPS}: a table in managed memory that a kernel reads whole, by the share of its pages on the host",
        {"on the host": cell("spilled", percent)},
        lambda row: number(row["gbps"]),
        lambda row: row["case"] == spill.MANAGED,
        cell("arm"),
    ),
    Table(
        "",
        "spill",
        "A net in training, ten snapshots: what its profile says at each threshold, and what the last snapshot does "
        "when it is placed, its 15 small tensors decoded one after the other",
        {
            "slots": cell("case"),
            "threshold": cell("arm"),
            "times less memory": cell("target", real(2)),
            "rows to leave": cell("predicted_spilled", percent),
            "that left": cell("spilled", percent),
            "overflow, MiB": cell("host_bytes", lambda value: f"{value / 2**20:.1f}"),
            "decoded, GB/s": of_ideal,
        },
        where=lambda row: row["arm"].startswith("profile"),
    ),
    Table(
        "",
        "thresholds",
        "Nets in training, ten snapshots, counted: times less memory, and the rows to leave their slots, by threshold",
        {
            "net": cell("program"),
            "rows": cell("row_bytes", size_name),
            "slots": cell("slots"),
            "times less with no threshold": cell("best_ratio", real(2)),
            "index": cell("index", percent),
        },
        lambda row: f"{row['ratio']:.2f}, {percent(row['spilled'])}",
        across=cell("threshold", lambda share: percent(share, 0)),
    ),
    Table(
        "Activations",
        "activations",
        "A forward and a backward pass in BF16: the time, the peak beyond weights and input, and how much less that "
        "is than plain; bytes saved and sent to the host; how many times as fast as the same hooks with raw bytes, "
        "and as torch's `save_on_cpu`. In brackets the target where it is missed",
        {
            "net": cell("case"),
            "arm": cell("arm"),
            "ms": step,
            "peak, GB": cell("peak_gb", real(2)),
            "freed, GB": cell("freed_gb", real(2)),
            "pinned, GB": cell("pinned_gb", real(2)),
            "saved, GB": cell("saved_gb", real(2)),
            "sent, GB": cell("sent_gb", real(2)),
            "times smaller": beside_wanted("times_smaller"),
            "by entropy": cell("most_times_smaller", real(2)),
            "times raw": beside_wanted("times_raw"),
            "times save_on_cpu": beside_wanted("times_save_on_cpu"),
        },
        where=lambda row: not row["arm"].startswith(activations.BESIDE) and not row["arm"].endswith(activations.CAPPED),
    ),
    Table(
        "",
        "activations",
        f"{GBPS}: outputs of a ReLU coded while a plain step runs, in brackets the share of the rate alone; the step "
        "beside them, and without",
        {
            "net": cell("case"),
            "SMs": cell("sms"),
            "coded": of_ideal,
            "step, ms": cell("step_ms", fine_number),
            "alone, ms": cell("bound_ms", fine_number),
        },
        where=lambda row: row["arm"].startswith(activations.BESIDE),
    ),
    Table(
        "",
        "activations",
        f"Where torch may take {activations.CAPPED_GB} GB of the GPU: the largest batch that trains, and its samples "
        "per second divided by plain's",
        {
            "net": cell("case"),
            "arm": lambda row: row["arm"].removesuffix(activations.CAPPED),
            "batch": cell("rows"),
            "step, ms": cell("step_ms", fine_number),
            "samples a second": lambda row: f"{row['gbps'] / row['ideal_gbps']:.2f}",
        },
        where=lambda row: row["arm"].endswith(activations.CAPPED),
    ),
    Table(
        "",
        "throttle",
        "Offloaded activations coded by at most so many SMs: milliseconds of a step, GB/s of the bytes that cross the "
        "link in the forward pass and after it",
        {
            "net": cell("case"),
            "arm": cell("arm"),
            "step, ms": cell("step_ms", fine_number),
            "out, GB/s": cell("out_gbps", number),
            "back, GB/s": cell("back_gbps", number),
        },
        where=lambda row: row["what"] == throttle.SWEEP,
    ),
    Table(
        "",
        "throttle",
        "Steps one after the other for a minute: milliseconds, joules and mean watts of the GPU, by NVML's counter",
        {
            "net": cell("case"),
            "arm": cell("arm"),
            "step, ms": cell("step_ms", fine_number),
            "joules a step": cell("joules", number),
            "watts": cell("watts", number),
        },
        where=lambda row: row["what"] == throttle.ENERGY,
    ),
    Table(
        "",
        "throttle",
        "Steps that several GPUs begin together: milliseconds of the slowest GPU's step, and for copies to the host "
        "the slowest GPU's GB/s",
        {"net": cell("case"), "arm": cell("arm")},
        lambda row: fine_number(row["gbps"] if row["arm"] == throttle.COPIES else row["step_ms"]),
        lambda row: row["what"] == throttle.TOGETHER,
        lambda row: f"{row['gpus']} GPU{'s' if row['gpus'] > 1 else ''}",
    ),
    Table(
        "",
        "densities",
        "The share of a layer's outputs that are not zero, by step of training",
        {"net": cell("net"), "layer": cell("layer")},
        cell("density", lambda share: percent(share, 0)),
        across=cell("step"),
    ),
    Table(
        "Collectives",
        "collectives",
        "Two GPUs, calls in a row: how many times as fast as torch's, in brackets the target where it is missed",
        {
            "link, call, tensor": lambda row: f"{row['case']}, {row['dtype']}",
            "MiB": cell("mib"),
        },
        over_torch,
        across=cell("arm"),
        more={"torch, ms": lambda arms: fine_number(arms["torch"]["ms"])},
    ),
    Table(
        "General codecs",
        "choose",
        "What the choice of `ibp.codecs.choose` takes longer than the fastest of all candidates, over sets and links, "
        "256 MiB of each set",
        {"set": rows_name},
        lambda row: f"{row['best']}, {percent(row['loss'])}",
        lambda row: bool(row["chosen"]),
    ),
    Table(
        "",
        "choose",
        "Each candidate: savings, and GB/s of coding and decoding together",
        {"set": rows_name},
        lambda row: f"{percent(row['savings'])}, {number(row['gbps'])}",
        lambda row: not row["chosen"] and not row["arm"].startswith(choose.CASCADED),
        across=cell("arm"),
    ),
    Table(
        "",
        "choose",
        "nvCOMP's Cascaded by its options, from one coder: times smaller, and GB/s of coding and of decoding",
        {"set": rows_name},
        lambda row: f"{1 / (1 - row['savings']):.2f}, {coding_rates(row)}",
        lambda row: row["arm"].startswith(choose.CASCADED),
        across=lambda row: row["arm"].removeprefix(choose.CASCADED),
    ),
    Table(
        "Savings",
        "ratio",
        "Bytes of coded rows and codebooks, packed, every set by every method",
        {"set": cell("set"), "dtype": cell("dtype")},
        lambda row: percent(row["savings"]),
        lambda row: row["method"] in RATIO_METHODS,
        across=cell("method"),
    ),
    Table(
        "",
        "ratio",
        "The same by codecs of nvCOMP, in chunks of 64 KiB",
        {"set": cell("set"), "dtype": cell("dtype")},
        lambda row: percent(row["savings"]),
        lambda row: row["method"].startswith(NVCOMP),
        across=cell("method"),
    ),
    Table(
        "",
        "ratio",
        "Bit-plane compression by entries of 128 bytes, with their metadata",
        {"set": cell("set"), "dtype": cell("dtype"), "saves": cell("savings", percent)},
        where=lambda row: row["method"] == ratio.BPC,
    ),
    Table(
        "",
        "ratio",
        "Floats as DietGPU codes them, by an rANS on the CPU: FP64 by two coders or by one, and zeros by a bitmap, as "
        "it is or coded",
        {"set": cell("set"), "dtype": cell("dtype")},
        lambda row: percent(row["savings"]),
        lambda row: row["method"].startswith(ratio.RANS),
        across=cell("method"),
    ),
    Table(
        "",
        "clusters",
        "By number of codebooks, all of them included",
        {"set": cell("set"), "scheme": cell("scheme")},
        lambda row: percent(row["savings"]),
        across=cell("clusters"),
    ),
)


GRIDS = "paths", "paths_h100"  # These CSVs are written by paths.py.


def targets(results):
    """Returns how many targets are met and missed, in total and by script. benchmarks/README.md explains those of
    `paths`."""
    lines, total = [], Counter()
    for path in sorted(set(results.directory.glob("*.csv")) - {results.directory / f"{name}.csv" for name in GRIDS}):
        counts = Counter(row["met"] for row in results.rows(path.stem) if row.get("met"))
        if counts:
            total += counts
            lines.append([f"`{path.stem}`", counts["yes"], counts["no"]])
    return (
        f"Of {sum(total.values())} targets, which the project set for itself, {total['yes']} are met and "
        f"{total['no']} are missed:\n\n" + markdown(["script", "met", "missed"], lines)
    )


def grid_of_paths(results):
    """Returns, by GPU and place of the ids, in how many cases of paths.py the chosen way is not the fastest."""
    lines = []
    for name in GRIDS:
        counts, gpu, commits = {}, "", []
        for row in results.rows(name, arm="chosen"):
            gpu, commits = row["gpu"], in_order([*commits, row["commit"][:10]])
            place = re.search(r"ids on the (?:GPU|CPU)|whole", row["case"])[0]
            counts.setdefault(place, Counter())[row["met"]] += bool(row["met"])
        lines += [
            [gpu.removeprefix("NVIDIA "), ", ".join(commits), place, found["yes"] + found["no"], found["no"]]
            for place, found in counts.items()
        ]
    heads = ["GPU", "commit", "what is fetched", "cases", "chosen below 0.9 of the fastest named"]
    return markdown(heads, lines)


def spreads(results):
    """Returns, by GPU and script, how much cells differ between passes of one tree (see tools/compare_commits.py)."""
    lines, rows = [], results.rows("spreads")
    for gpu, script in in_order((row["gpu"], row["benchmark"]) for row in rows):
        found = sorted(row["spread"] for row in rows if (row["gpu"], row["benchmark"]) == (gpu, script))
        most = found[-(-95 * len(found) // 100) - 1]
        shares = (percent(value, 2) for value in (statistics.median(found), most, found[-1]))
        lines.append([gpu.removeprefix("NVIDIA "), f"`{script}`", len(found), *shares])
    return markdown(["GPU", "script", "cells", "median", "95 % of the cells below", "largest"], lines)


def memory(results):
    """Returns a sentence about GPU memory."""
    rows = [row for row in results.rows("memory") if row["peak_bytes"] is not None and row["index_bytes"]]
    peak = max(row["peak_bytes"] for row in rows)
    share = max(map(harness.metadata_share, harness.of_tables(rows)))
    return (
        f"A table's metadata takes at most {percent(share, 2)} of the original bytes in the GPU's memory (rows from "
        f"{harness.METADATA_ROW_BYTES} B), and no path takes more than {peak / 2**20:.1f} MiB of temporaries beyond "
        "its output."
    )


def results_page(results):
    parts = [
        "# Results",
        "Written by `python -m benchmarks.claims` from the CSVs in [results/](results/). "
        "[README.md](README.md) says what each script measures and how. A table's commits are those of the code that "
        "was measured; a row of its CSV names its own, unless the table counts it among those that name none. CSVs "
        "that count bytes name no GPU.",
        "## What a user gains",
        headline(results).replace("[other runs](benchmarks/RESULTS.md)", "other runs"),
        memory(results),
    ]
    for table in TABLES:
        rows = table.rows(results)
        if table.heading and results.rows(table.csv):
            parts.append(f"## {table.heading}")
        if rows:
            parts += [f"{table.text} (`{table.csv}.csv`{machine(rows)}):", table.markdown(results)]
    return "\n\n".join(parts) + "\n"


# ---- the figures that pages cite -----------------------------------------------------------------------------------

GPU_GB = (24, 80, 141)  # The free memory is computed for GPUs of these sizes.
LEAST_SHARE = 0.2  # Models whose weights take less of a GPU's memory than this are left out, because they gain little.
PROMPT, SEQUENCE = 2048, 8192  # tokens of a prompt and of a sequence
# Columns whose numbers are not shown as they are have a function that returns their text.
TEXTS = {
    **dict.fromkeys(("ms", "step_ms"), lambda value: f"{fine_number(value)} ms"),
    **dict.fromkeys(("host_bytes", "weight_bytes"), gigabytes),
    **dict.fromkeys(("m_savings", "v_savings", "changed", "found"), percent),
    "us": lambda value: f"{value / 1e3:.2f} ms",
    "equal": str,
    "token_s": lambda value: f"{1e3 * value:.0f} ms",
    "stored": lambda share: percent(share, 2),
}


def cited(results, text):
    """Returns a sentence with its figures. `{CSV|COLUMN|CASE|ARM|NAME=VALUE|...}` stands for the column of the one row
    that has these values; if the arm is "A / B", for the ratio of A's value to B's. `{from CSV}` names the GPU and
    links the section of RESULTS.md."""

    def figure(match):
        if match[1].startswith("from "):
            return source(results, match[1].removeprefix("from "))
        csv, column, case, arms, *others = match[1].split("|")
        wanted = {name: value_of(name, text) for name, text in (other.split("=") for other in others)}
        wanted |= {"case": case} if case else {}
        values = [only(results, csv, **wanted, **({"arm": arm} if arm else {}))[column] for arm in arms.split(" / ")]
        return f"{values[0] / values[1]:.2f}" if len(values) > 1 else TEXTS.get(column, fine_number)(values[0])

    return re.sub(r"\{([^}]+)\}", figure, text)


def only(results, csv, **wanted):
    """Returns the one row with these values. Raises ValueError if there is none, or if there are several."""
    row = results.row(csv, **wanted)
    if row is None:
        raise ValueError(f"{csv}.csv has no row with {wanted}; wanted one")
    return row


def source(results, csv):
    heading = ""
    for table in TABLES:
        heading = table.heading or heading
        if table.csv == csv:
            break
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    gpus = ", ".join(in_order(row["gpu"] for row in results.rows(csv)))
    return f"({gpus}; [RESULTS.md](../benchmarks/RESULTS.md#{anchor}))"


def on_the_device(results):
    """Returns for how many nets compressed activations on the GPU lower the peak, the nets for which they do so most
    and least, and the same of recomputed blocks."""
    wanted = (activations.PLAIN, activations.ON_DEVICE, activations.RECOMPUTED)
    arms = reproduction.by_arm(row for row in results.rows("activations") if row["arm"] in wanted)
    nets = sorted(arms.items(), key=lambda net: -net[1][activations.ON_DEVICE]["freed_gb"])

    def text(case, of):
        plain, coded, recomputed = (of[arm] for arm in wanted)
        slower = [f"{row['step_ms'] / plain['step_ms']:.1f} times" for row in (coded, recomputed)]
        return (
            f"{case} {coded['peak_gb']:.2f} GB instead of {plain['peak_gb']:.2f}, steps {slower[0]} as long "
            f"(recomputed {recomputed['peak_gb']:.2f} GB, {slower[1]})"
        )

    num_lower = sum(of[activations.ON_DEVICE]["freed_gb"] > 0 for _, of in nets)
    ends = "; ".join(text(*net) for net in dict([nets[0], nets[-1]]).items())
    return f"The peak falls for {num_lower} of {len(nets)} measured nets, most and least: {ends}."


def pinned_activations(results):
    """Returns for how many nets compressed activations pin more host memory than raw ones with the same hooks."""
    raw = {row["case"]: row["pinned_gb"] for row in results.rows("activations", arm=activations.RAW)}
    rows = results.rows("activations", arm=activations.IBP)
    more = [row for row in rows if row["pinned_gb"] > raw[row["case"]]]
    least = min(rows, key=lambda row: row["pinned_gb"] / raw[row["case"]])

    def text(row):
        return f"{row['case']} {row['pinned_gb']:.2f} for {raw[row['case']]:.2f}"

    if not more:
        return (
            f"Compressed activations pin no more host memory than raw ones in any of {len(rows)} measured nets; least "
            f"of raw {text(least)} GB."
        )
    return (
        f"Compressed activations pin more host memory than raw ones in {len(more)} of {len(rows)} measured nets, in "
        f"GB: {', '.join(map(text, more))}; least of raw {text(least)}."
    )


def distributed_checkpoints(results):
    """Returns a table of what torch's writer, the same with zstd, and ibp's store, and of the seconds that they take to
    save and to load, in both orders."""
    rows = [row for row in results.rows("dcp") if row["arm"] != dcp.WRITING]
    arms, lines = (dcp.TORCH, dcp.ZSTD, dcp.IBP), []
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {arm: [row for row in rows if row["case"] == case and row["arm"] == arm] for arm in arms}
        cells = [percent(of[0]["savings"]) if of else "" for of in (found[dcp.ZSTD], found[dcp.IBP])]
        for column in ("save_seconds", "load_seconds"):
            for of in found.values():
                cells.append(" and ".join(fine_number(row[column]) for row in sorted(of, key=lambda row: row["order"])))
        lines.append(f"| {' | '.join([case, *cells])} |")
    heads = [
        "what",
        "fewer bytes, zstd",
        "ibp",
        *(f"{of}, {arm.split(', ')[-1]}" for of in ("save", "load") for arm in arms),
    ]
    return (
        "A billion parameters, by two processes that share a GPU or the cores of a CPU; bytes, and seconds to save, "
        "with fsync, and to load, by torch, by torch with its own extension for zstd, and by ibp; two runs, in one "
        f"order of the arms and in the other {source(results, 'dcp')}:\n\n"
        + "\n".join([f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads), *lines])
    )


def spilled_rates(results):
    """Returns rates of decoding by the share of rows that leave their slots, and by the place of overflow."""

    def rates(case, where):
        rows = results.rows("spill", case=case, slot_bytes=1408, arm=f"decode, {where}")
        return {round(100 * row["spilled"]): number(row["gbps"]) for row in rows}

    host, peer = rates("normal 0.02", spill.SPILLED), rates(f"{spill.PEER}normal 0.02", spill.ON_PEER)
    alone = rates(f"{spill.PEER}normal 0.02", spill.DEVICE)
    return (
        f"A BF16 table of 1 GiB in device memory decodes at {host[0]} GB/s when no row leaves its slot, at "
        f"{host[10]} when 10 % of the rows have a part in host memory, and at {host[30]} when 30 % have. With overflow "
        f"in another GPU's memory, over NVLink, these rates are {peer[0]}, {peer[10]} and {peer[30]}, and "
        f"{alone[0]}, {alone[10]} and {alone[30]} with overflow in the same GPU's {source(results, 'spill')}."
    )


def real_weights(results):
    """Returns what the levels save on trained models with at least a million weights, and how the kernel handles
    them."""
    rows = [row for row in results.rows("real_weights") if row["weights"] >= 1_000_000]

    def span(column, text):
        values = [row[column] for row in rows]
        return f"{text(min(values))} to {text(max(values))}"

    def total(column):
        return sum(row[column] for row in rows)

    return (
        f"Of {len(rows)} trained models with {total('weights') / 1e6:.0f} million weights, rounded to BF16, level "
        f'"fast" saves {span("fast", percent)}, level "default" {span("default", percent)}. Of a million weights '
        f"{span('escapes', '{:,.0f}'.format)} are escaped; {total('decoded')} of {total('matrices')} matrices have so "
        "many irregular rows that every call decodes them "
        "([RESULTS.md](../benchmarks/RESULTS.md#products-with-compressed-matrices))."
    )


def digit_forms(results):
    """Returns how much the best forms of other dtypes could gain over plain weights, and shorter digits over those of
    BF16."""

    def span(form, digit_bits, column="bound_short"):
        rows = results.rows("digit_forms", form=form, digit_bits=digit_bits)
        return " to ".join(dict.fromkeys(f"{bound(row[column] for row in rows):.2f}" for bound in (min, max)))

    one, block = "FP8, a scale in all", "FP8, a scale a block"
    return (
        f"By their bytes, products from compressed weights can be at most {span('BF16', 4)} times as fast in BF16 "
        f"({span('BF16', 3)} with digits of three bits), {span('FP16', 4)} in FP16, whose exponents have five bits, "
        f"and {span(one, 3)} in FP8 E4M3, {span(block, 3)} with a scale a block "
        "([RESULTS.md](../benchmarks/RESULTS.md#products-with-compressed-matrices))."
    )


def expert_hits(results):
    """Returns the hit rates of a cache of compressed experts and of one of raw experts, after they have filled."""

    def found(arm, routing):
        rows = results.rows("moe_hits", arm=arm, routing=routing)
        return rows[len(rows) // 2 :]

    def hits(arm, routing):
        return percent(statistics.fmean(row["hit_rate"] for row in found(arm, routing)), 0)

    def share(arm, routing):
        rows = found(arm, routing)
        return percent(sum(row["link_bytes"] for row in rows) / sum(row["asked_bytes"] for row in rows), 0)

    coded, raw = "by index, cache", "by index, cache, raw rows"
    return (
        "Counted for 8 of 128 experts a token and a cache of half their raw bytes, after 100 tokens: where tokens keep "
        f"to popular experts (by Zipf's law) {hits(coded, 'sticky')} of the rows are in a cache of compressed experts, "
        f"{hits(raw, 'sticky')} in one of raw experts, and {share(coded, 'sticky')} and {share(raw, 'sticky')} of the "
        f"experts' raw bytes cross the link; where all experts are as likely, {hits(coded, 'uniform')} and "
        f"{hits(raw, 'uniform')}, and {share(coded, 'uniform')} and {share(raw, 'uniform')}.\n\n"
        "![Hits and bytes on the link by token, of caches of compressed and of raw experts]"
        "(../benchmarks/results/experts.png)"
    )


def mixtures(results):
    """Returns the time of a token's experts, in host memory or compressed on the GPU. Empty if nothing was measured."""
    rows = results.rows("moe")
    if not rows:
        return ""
    best = {}
    for row in rows:
        key = row["arm"], row["rows"], row["routing"]
        best[key] = min(best.get(key, float("inf")), row["ms_of_all"])
    calls = [(1, "uniform"), (1, "sticky"), (8, "uniform"), (32, "uniform")]
    others = ("raw rows", "batched_mm", "between experts")
    arms = [arm for arm in in_order(row["arm"] for row in rows) if not arm.endswith(others)]
    lines = [
        [arm.replace("coded", "compressed")]
        + [fine_number(best[key]) if (key := (arm, *call)) in best else "" for call in calls]
        for arm in arms
    ]
    heads = ["experts", *(f"{tokens} {'token' if tokens == 1 else 'tokens'}, {routing}" for tokens, routing in calls)]
    return (
        "Milliseconds for a call's experts in all 48 layers of Qwen3-30B-A3B's shape, the faster way of eager and "
        f"graph, reckoned from {rows[0]['layers']} layers ({rows[0]['gpu']}; "
        f"[RESULTS.md](../benchmarks/RESULTS.md#mixtures-of-experts)):\n\n{markdown(heads, lines)}"
    )


def sent_pages(results):
    """Returns rates of packing and unpacking, and the time of a transfer with them. Empty if nothing was measured."""
    if not results.rows("kv_transfer"):
        return ""
    reckoned = "{kv_transfer|ms|Llama-8B, 8,192 tokens, reckoned|100 Gb/s, %s}"
    return cited(
        results,
        "Pages of Llama-8B's shape in BF16 are packed at {kv_transfer|gbps|Llama-8B|pack, default|dtype=bfloat16} GB/s "
        "to {kv_transfer|ratio|Llama-8B|pack, default|dtype=bfloat16} times fewer bytes and unpacked at "
        '{kv_transfer|gbps|Llama-8B|unpack, default|dtype=bfloat16}; at level "fast" at '
        "{kv_transfer|gbps|Llama-8B|pack, fast|dtype=bfloat16} and "
        "{kv_transfer|gbps|Llama-8B|unpack, fast|dtype=bfloat16}, to "
        "{kv_transfer|ratio|Llama-8B|pack, fast|dtype=bfloat16} times fewer. By these rates 8,192 tokens take "
        f"{reckoned % 'default'} over 100 Gb/s in place of {reckoned % 'raw'} {{from kv_transfer}}.",
    )


def choices(results):
    rows = [row for row in results.rows("choose") if row["chosen"]]
    return (
        f"The {len(rows)} choices of `ibp.codecs.choose`, over sets and links, take at most "
        f"{percent(max(row['loss'] for row in rows))} longer than the fastest candidate {source(results, 'choose')}."
    )


def language_models(results):
    """Returns a table of steps of language models in CUDA graphs. Empty if nothing was measured."""
    steps = replace(
        STEPS,
        text="Time per token in milliseconds, by transformers with a static cache in a CUDA graph, after 512 tokens; "
        "in brackets the speed-up over plain weights",
        line={"model": cell("model"), "batch": cell("rows")},
        where=lambda row: row["way"] == "step" and row["arm"] != "offloaded" and row["context"] == SHOWN_CONTEXT,
        more={},
    )
    return f"{steps.text} {source(results, 'llm')}:\n\n{steps.markdown(results)}" if steps.rows(results) else ""


LOAD = ("case", "card_gib", "requests", "prompt_tokens", "new_tokens")
SHOWN_CONTEXT = 512  # In docs/llm.md this many tokens come before the token that is timed.
SHOWN_VECTORS = (1, 16, 64, 512)  # docs/llm.md shows these numbers of vectors.


def products(results):
    """Returns a table of `ibp.linear` by matrix and some numbers of vectors."""
    fused = replace(
        PRODUCTS,
        line={"vectors": cell("vectors")},
        where=lambda row: row["arm"] == "ibp.linear" and row["vectors"] in SHOWN_VECTORS and PRODUCTS.where(row),
        across=matrix_name,
    )
    return f"{fused.text} {source(results, 'linear')}:\n\n{fused.markdown(results)}"


def freed_memory(results):
    """Returns a table of what fits beside the weights. Empty if nothing was measured."""
    lines = [
        line
        for gb in GPU_GB
        for row in results.rows("llm", way="weights", arm="coded")
        if (line := room(row, gb, results))
    ]
    if not lines:
        return ""
    heads = ["model, GB plain and compressed", "GPU, GB", "beside plain weights", "beside compressed ones", "times"]
    return (
        f"Tokens whose BF16 keys and values fit beside the weights, with room to compute on a prompt of {PROMPT:,} "
        f"tokens, and how many sequences of {SEQUENCE:,} tokens these are; reckoned from measured bytes "
        f"{source(results, 'llm')}:\n\n{markdown(heads, lines)}"
    )


PLAIN, CODED = "plain", "coded weights"  # These are arms of serve_vllm.csv.


def loads(results):
    """Returns a table of the loads that vLLM served with plain and with compressed weights. Several runs of an arm are
    averaged."""
    rows = [row for row in results.rows("serve_vllm") if row["requests"] is not None]
    lines = []
    for key in dict.fromkeys(tuple(row[name] for name in LOAD) for row in rows):
        of_load = [row for row in rows if tuple(row[name] for name in LOAD) == key]
        arms = [[row for row in of_load if row["arm"] == arm] for arm in (PLAIN, CODED)]
        if not all(arms):
            continue
        case, card_gib, requests, prompt, new = key
        names = ("tokens_per_s", "bound_tokens_per_s", "ttft_ms", "between_ms", "kv_tokens")
        rates, bounds, first, between, fitting = (
            [statistics.fmean(row[name] for row in arm) for arm in arms] for name in names
        )
        lines.append(
            [
                f"{case.removesuffix('-random')}, {card_gib:g} GiB",
                f"{requests} x {prompt:,} + {new:,}",
                *map(fine_number, rates),
                f"{rates[1] / rates[0]:.2f}",
                f"{bounds[1] / bounds[0]:.2f}",
                " and ".join(map(fine_number, first)),
                " and ".join(map(fine_number, between)),
                " and ".join(f"{tokens:,.0f}" for tokens in fitting),
            ]
        )
    heads = ["model, card", "requests x prompt + new tokens", "tokens/s, plain", "tokens/s, ibp", "times", "at most"]
    heads += ["ms to the first token, plain and ibp", "ms between tokens, plain and ibp"]
    heads += ["tokens of KV that fit, plain and ibp"]
    return (
        f"vLLM with random weights. It may use 95 % of the card's memory {source(results, 'serve_vllm')}:\n\n"
        + markdown(heads, lines)
    )


def room(coded, gpu_gb, results):
    """Returns a line of the table of `freed_memory`, or None if the compressed weights do not fit the GPU or take
    little of it."""
    name, token_bytes = coded["model"], coded["token_bytes"]
    prompts = [row for row in results.rows("llm", way="prefill", model=name, rows=PROMPT) if row["peak_bytes"]]
    besides = [row["peak_bytes"] - row["device_bytes"] - PROMPT * token_bytes for row in prompts]
    weights = coded["weight_bytes"], coded["device_bytes"]
    free = [1e9 * gpu_gb - num_bytes - max(besides, default=0) for num_bytes in weights]
    if not besides or free[1] < 0 or weights[1] < LEAST_SHARE * 1e9 * gpu_gb:
        return None
    tokens = [int(num_bytes // token_bytes) for num_bytes in free]
    texts = [f"{count:,}: {count // SEQUENCE}" if count > 0 else "do not fit" for count in tokens]
    times = f"{tokens[1] / tokens[0]:.1f}" if tokens[0] > 0 else ""
    return [f"{name}, {' and '.join(map(gigabytes, weights))}", gpu_gb, *texts, times]


NO_GAIN = (
    "No gain: an epoch of GraphSAGE on FP32 rows of 400 B takes {gnn|epoch_s|dense 100, batch 1024|ibp} s with ibp, "
    "and {gnn|epoch_s|dense 100, batch 1024|raw rows} s with raw rows."
)


def headline(results):
    """Returns the table of README.md: the usual ways without ibp, and ibp."""
    gather, normal = results.rows("gather"), {"case": "normal 0.02", "dtype": "bfloat16", "row_bytes": charts.ROW_BYTES}
    saved = ratio.cells_of(results.rows("ratio"))["normal 0.02", "bfloat16"]

    def rate(arm, **wanted):
        return number(max(row["gbps"] for row in whole(results.rows("gather", arm=arm, **wanted))))

    tensor = {way: number(gbps) for way, gbps in charts.tensor_rates(results.rows("stream")).items()}
    nvcomp = max(saving for method, saving in saved.items() if method.startswith(NVCOMP))
    lines = [
        [f"random rows of {size_name(charts.ROW_BYTES)}, BF16", way, rate("planes slots", **normal)]
        for way in (
            f'`x[ids].to("cuda")` {rate("cpu index + copy", **normal)}',
            f"gathered by the CPU while it is copied {rate('cpu pipelined', **normal)}",
            f"a kernel that reads raw rows {rate('raw rows', **normal)}",
        )
    ]
    lines.append(
        [
            "random rows of Citeseer's features",
            f"a kernel that reads raw rows {rate('raw rows', case='citeseer')}",
            rate("planes slots", case="citeseer"),
        ]
    )
    lines += [
        ["a whole BF16 tensor", way, tensor[charts.IBP]]
        for way in (f"`copy_` {tensor[charts.RAW_COPY]}", f"nvCOMP, pipelined {tensor[charts.NVCOMP]}")
    ]
    lines += [
        ["bytes saved of BF16 N(0, 0.02)", way, savings_text(saved["planes"])]
        for way in (f"nvCOMP's best {savings_text(nvcomp)}", f"zstd {savings_text(saved[ratio.ZSTD])}")
    ]
    return (
        f"GB/s of original bytes, from pinned host memory ({machine(gather)[2:]}; whole tensors and nvCOMP by "
        f"[other runs](benchmarks/RESULTS.md)):\n\n{markdown(['what', 'without ibp', 'with ibp'], lines)}\n\n"
        + cited(results, NO_GAIN)
    )


def savings_text(savings):
    """Returns "33.6 %", or for example "12.3x" if most of the bytes are saved."""
    text = ratio.show(savings)
    return text if text.endswith("x") else f"{text} %"


def served_pages(results):
    """Returns a table of vLLM with offloaded keys and values. Empty if nothing was measured."""
    arms = {"compressed in host memory": "coded KV", "raw in host memory": "raw KV", "nowhere": "computed anew"}
    rows = {way: results.rows("serve_vllm", case="llama-8-layers-random", arm=arm) for way, arm in arms.items()}
    if not all(rows.values()):
        return ""
    lines = [
        [
            way,
            percent(row["found"]),
            fine_number(row["ttft_ms"]),
            f"{number(row['tokens_per_s'])} and {number(row['batch_tokens_per_s'])}",
            f"{int(row['equal'])} of {int(row['answers'])}",
        ]
        for way, (row, *_) in rows.items()
    ]
    heads = [
        *("pages that left the GPU", "prompt tokens found, not computed anew", "ms to the first token"),
        *("tokens/s of one prompt, and of four together", "answers that are those of vLLM without offloading"),
    ]
    return (
        "A test of offloaded keys and values in vLLM asks prompts of 2,040 tokens twice, with random weights, for 64 "
        "new tokens each. The GPU keeps a quarter of their keys and values, and host memory has no room for all others "
        f"raw {source(results, 'serve_vllm')}:\n\n{markdown(heads, lines)}"
    )


# A cache pays if an epoch takes at most this fraction of its time without the cache: a smaller gain is not worth memory
# of the GPU.
CLEARLY_SHORTER = 0.97


def cached_epochs(results):
    """Returns how many caches of compressed rows make an epoch shorter, and a table of all. Empty if nothing was
    measured."""
    lines, num_caches, num_paying = [], 0, 0
    for arms in reproduction.by_arm(results.rows("gnn_cache")).values():
        bare, *cached = (arms[gnn_cache.arm_name(gnn_cache.IBP, share)] for share in gnn_cache.PERCENTS)
        rows, shorter = (bare, *cached), [row for row in cached if row["epoch_s"] < CLEARLY_SHORTER * bare["epoch_s"]]
        num_caches, num_paying = num_caches + len(cached), num_paying + len(shorter)
        fetches, epochs = ([fine_number(row[column]) for row in rows] for column in ("fetch_ms", "epoch_s"))
        epochs = [f"**{epoch}**" if row in shorter else epoch for row, epoch in zip(rows, epochs)]
        lines.append([rows_name(bare), *fetches, *epochs])
    if not lines:
        return ""
    sizes = ["no cache", *(f"{share} %" for share in gnn_cache.PERCENTS[1:])]
    heads = ["features", *(f"ms of a fetch, {size}" for size in sizes), *(f"s of an epoch, {size}" for size in sizes)]
    return (
        "Compressed rows with a cache of a share of the raw features' bytes, which holds the rows that an epoch asks "
        f"for most. {num_paying} of {num_caches} caches pay: their epochs, in bold, are at least "
        f"{percent(1 - CLEARLY_SHORTER, 0)} shorter "
        f"{source(results, 'gnn_cache')}:\n\n{markdown(heads, lines)}"
    )


def slower_links(results):
    """Returns a table of rates that slower links would give, reckoned from measured ones. Empty without these."""
    sizes = (512, 2048)
    arms = {"raw": "raw rows", "compressed": "planes slots"}
    normal = {"case": "normal 0.02", "dtype": "bfloat16"}
    measured = [
        max((row["gbps"] for row in results.rows("gather", arm=arm, row_bytes=size, **normal)), default=None)
        for size in sizes
        for arm in arms.values()
    ]
    if None in measured:
        return ""
    heads = ["link", *(f"{size_name(size)}, {arm}" for size in sizes for arm in arms)]
    links = {"PCIe 5 x16, measured": 1, "PCIe 4 x16, reckoned": 2, "PCIe 3 x16, reckoned": 4}
    lines = [[link, *(fine_number(gbps / divisor) for gbps in measured)] for link, divisor in links.items()]
    return (
        "Random BF16 rows that a GPU fetches from pinned host memory, normal values, GB/s before compression. The "
        "rates of PCIe 4 and 3 are a half and a quarter of those measured, as their links are; decompression is not "
        f"what binds {source(results, 'gather')}:\n\n{markdown(heads, lines)}"
    )


FIGURES: dict[str, str | Callable[[Results], str]] = {
    "slower links": slower_links,
    "headline": headline,
    "graphs": "An epoch of 200 batches of GraphSAGE on Cora's features takes {gnn|epoch_s|cora, batch 1024|ibp} s with "
    "compressed rows, {gnn|epoch_s|cora, batch 1024|raw rows} s with raw rows fetched by the GPU, and "
    "{gnn|epoch_s|cora, batch 1024|cpu pipelined} s with the CPU's gather pipelined with the copy; with dense rows of "
    "602 FP32 values {gnn|epoch_s|dense 602, batch 1024|ibp}, {gnn|epoch_s|dense 602, batch 1024|raw rows} and "
    "{gnn|epoch_s|dense 602, batch 1024|cpu pipelined} s. With dense rows of 400 bytes raw rows are faster: "
    "{gnn|epoch_s|dense 100, batch 1024|raw rows} s, compressed {gnn|epoch_s|dense 100, batch 1024|ibp} s {from gnn}.",
    "gnn_cache": cached_epochs,
    "lookups": "Look-ups of 65,536 ids by Zipf's law, in 26 BF16 tables of 40 GiB with rows of 2 KiB {from dlrm}:\n\n"
    "| how rows come | GB/s | with a cache of 2 % of the bytes |\n| --- | --- | --- |\n"
    "| compressed | {dlrm|gbps|40 GiB, Zipf, batch 65,536|ibp} "
    "| {dlrm|gbps|40 GiB, Zipf, batch 65,536|ibp + cache} |\n"
    "| raw, read by the GPU | {dlrm|gbps|40 GiB, Zipf, batch 65,536|raw rows} "
    "| {dlrm|gbps|40 GiB, Zipf, batch 65,536|raw + cache} |\n"
    "| gathered by the CPU while the batch before is copied | {dlrm|gbps|40 GiB, Zipf, batch 65,536|cpu pipelined} "
    "| |\n"
    "| gathered by the CPU, then copied | {dlrm|gbps|40 GiB, Zipf, batch 65,536|cpu gather + copy} | |\n\n"
    "Rows of 128 bytes gain nothing: BF16 "
    "{dlrm|gbps|4 GiB, Zipf, batch 16,384|ibp|row_bytes=128|dtype=bfloat16} GB/s, raw "
    "{dlrm|gbps|4 GiB, Zipf, batch 16,384|raw rows|row_bytes=128|dtype=bfloat16}; FP16 "
    "{dlrm|gbps|4 GiB, Zipf, batch 16,384|ibp|row_bytes=128|dtype=float16}, raw "
    "{dlrm|gbps|4 GiB, Zipf, batch 16,384|raw rows|row_bytes=128|dtype=float16}, by the CPU, pipelined, "
    "{dlrm|gbps|4 GiB, Zipf, batch 16,384|cpu pipelined|row_bytes=128|dtype=float16}.",
    "dlrm_train": "A training step with row-wise Adagrad on 512-byte BF16 rows, ids by Zipf's law, takes "
    "{dlrm_train|us|Zipf 1.05|ibp|dtype=bfloat16|row_bytes=512} with compressed rows, "
    "{dlrm_train|us|Zipf 1.05|raw rows|dtype=bfloat16|row_bytes=512} with raw ones, "
    "{dlrm_train|us|Zipf 1.05|raw rows + cache|dtype=bfloat16|row_bytes=512} with raw ones behind a cache "
    "{from dlrm_train}.",
    "kv_fetch": "All keys and values of a small language model, batch 20 and 32,768 tokens, come to the GPU layer by "
    "layer in {kv_fetch|ms|real, batch 20, 32,768 tokens|ibp} compressed and in "
    "{kv_fetch|ms|real, batch 20, 32,768 tokens|raw blocks} raw; compressed on the GPU, they are decompressed in "
    "{kv_fetch|ms|real, batch 20, 32,768 tokens|ibp, on the GPU} {from kv_fetch}.",
    "kv_pages": "Pages of 64 KiB of BF16 are stored at {kv_pages|gbps|store|ibp, alone|sms=24} GB/s and loaded at "
    "{kv_pages|gbps|load|ibp, alone|sms=16}; one raw copy moves {kv_pages|gbps|load|copied, alone} GB/s, raw copies "
    "page by page {kv_pages|gbps|load|copied page by page, alone} {from kv_pages}.",
    "kv_transfer": sent_pages,
    "served": served_pages,
    "kv_rows": "One token in ten, chosen at random, comes at {kv_rows|gbps|8 x 128|ibp|sms=132} GB/s as rows of 256 "
    "bytes, raw by a kernel at {kv_rows|gbps|8 x 128|raw by kernel} and by the CPU's gather at "
    "{kv_rows|gbps|8 x 128|cpu index + copy}; where a cache has nine of ten, at {kv_rows|gbps|8 x 128|ibp, cache}, of "
    "{kv_rows|target_gbps|8 x 128|ibp, cache} that are wanted {from kv_rows}.",
    "offload": "A token of a Llama with {weights|weight_bytes||ibp|dtype=bfloat16|rows=1|prompt=256|sms=32} GB of BF16 "
    "weights takes {weights|ms||ibp|dtype=bfloat16|rows=1|prompt=256|sms=32} with `ibp.offload`, "
    "{weights|ms||raw through hooks|dtype=bfloat16|rows=1|prompt=256} with raw weights through the same hooks, "
    "and {weights|ms||accelerate cpu_offload} with accelerate's `cpu_offload`; raw weights that fit the GPU take "
    "{weights|ms||on the GPU|dtype=bfloat16|rows=1|prompt=256} {from weights}.",
    "language models": language_models,
    "products": products,
    "freed memory": freed_memory,
    "loads": loads,
    "linear": "Through the matrices of a 32-layer model one token at a time, `ibp.linear` gives "
    "{linear|tokens_per_s|stack of 32 layers, together, 1|ibp.linear} tokens a second, cuBLAS with plain BF16 weights "
    "{linear|tokens_per_s|stack of 32 layers, together, 1|cuBLAS}, both with query, key and value together, and gate "
    "and up {from linear}.",
    "real weights": real_weights,
    "digit forms": digit_forms,
    "mixtures": mixtures,
    "expert hits": expert_hits,
    "flexgen": "With opt-6.7b, all weights in host memory and the paper's request, a step takes "
    "{flexgen_opt|token_s||FlexGen|dtype=bfloat16} in BF16 without ibp and "
    "{flexgen_opt|token_s||FlexGen, ibp|dtype=bfloat16} with it, in FP16 {flexgen_opt|token_s||FlexGen|dtype=float16} "
    "and {flexgen_opt|token_s||FlexGen, ibp|dtype=float16}; weights take "
    "{flexgen_opt|host_bytes||FlexGen|dtype=float16} GB, {flexgen_opt|host_bytes||FlexGen, ibp|dtype=bfloat16} "
    "and {flexgen_opt|host_bytes||FlexGen, ibp|dtype=float16} "
    "{from flexgen_opt}.",
    "spill": spilled_rates,
    "profiles": "A small net in training takes {spill|target|training, the paper's ratios|profile, 30%} times less of "
    "the GPU's memory at a threshold of 30 %, and its 15 tensors decode at "
    "{spill|gbps|training, the paper's ratios|profile, 30%} GB/s one after the other. Expect less of "
    "other nets: most of this one's embedding is never used, and "
    "{probes|value|AdamW's states of the embedding of spill.py's net, on a CPU; last snapshot|} % of the rows of that "
    "embedding's states are zero to the last {from spill}.",
    "activations": "A step of ResNet-50 has a peak of {activations|peak_gb|ResNet-50|plain} GB beyond weights and "
    "input, and takes {activations|step_ms|ResNet-50|plain}; with activations compressed and offloaded "
    "{activations|peak_gb|ResNet-50|ibp} GB and {activations|step_ms|ResNet-50|ibp}; offloaded without coding "
    "{activations|peak_gb|ResNet-50|raw} GB and {activations|step_ms|ResNet-50|raw}; by torch's `save_on_cpu` "
    "{activations|peak_gb|ResNet-50|save_on_cpu} GB and {activations|step_ms|ResNet-50|save_on_cpu}; with recomputed "
    "blocks {activations|peak_gb|ResNet-50|recomputed} GB and {activations|step_ms|ResNet-50|recomputed} "
    "{from activations}.",
    "on the device": on_the_device,
    "pinned activations": pinned_activations,
    "collectives": "An all-gather of 1 GiB of BF16 weights over two GPUs is "
    "{collectives|over_torch|no peer access, all_gather_into_tensor, weights|auto|mib=1024} times as fast as torch's "
    "through host memory, {collectives|over_torch|sockets, all_gather_into_tensor, weights|auto|mib=1024} times over "
    "sockets, and {collectives|over_torch|direct, all_gather_into_tensor, weights|auto|mib=1024} times over NVLink, "
    "where it travels raw {from collectives}.",
    "deltas": "Where {deltas|changed|1.5 % changed|ibp|dtype=bfloat16} of BF16 weights changed, a delta takes "
    "{deltas|stored|1.5 % changed|ibp|dtype=bfloat16} of their bytes, an index and a value for each change "
    "{deltas|stored|1.5 % changed|index and value|dtype=bfloat16}; a GPU applies it at "
    "{deltas|gbps|1.5 % changed|ibp, apply|dtype=bfloat16} GB/s, and an index and a value for each at "
    "{deltas|gbps|1.5 % changed|index and value, apply|dtype=bfloat16} {from deltas}.",
    "checkpoints": "4 GiB of BF16 weights are compressed at {checkpoints|gbps||compress, two cores} GB/s with two "
    "cores and {checkpoints|peak_mib||compress, two cores} MiB of memory, at {checkpoints|gbps||compress, GPU} GB/s "
    "with a GPU and {checkpoints|peak_mib||compress, GPU} MiB {from checkpoints}.",
    "dcp": distributed_checkpoints,
    "choices": choices,
    "scale": "Two GPUs that fetch at once, each with a cache of 1 % of the bytes, get "
    "{scale|gbps|pubmed|ibp, cache of 1 %, 2 GPUs} GB/s of Pubmed's rows compressed, "
    "{scale|gbps|pubmed|raw rows, cache of 1 %, 2 GPUs} raw; of dense BF16 rows "
    "{scale|gbps|dense 768|ibp, cache of 1 %, 2 GPUs} and "
    "{scale|gbps|dense 768|raw rows, cache of 1 %, 2 GPUs} {from scale}.",
    **{f"reproduction of {name}": partial(reproduction.table, name) for name in reproduction.PAPERS},
    "papers": papers.summary,
    "paths": grid_of_paths,
    "targets": targets,
    "spreads": spreads,
}


# ---- the pages -----------------------------------------------------------------------------------------------------


def rewritten(text, results):
    """Returns a page's text with each of its blocks written anew. Raises ValueError if a marker has no end."""
    if len(BLOCK.findall(text)) != text.count(": written by python -m benchmarks.claims -->"):
        raise ValueError("a marker has no end, or its end has another name")

    def block(match):
        start = f"<!-- {match[1]}: written by python -m benchmarks.claims -->"
        figures = FIGURES[match[1]]
        text = cited(results, figures) if isinstance(figures, str) else figures(results)
        return f"{start}\n{text}\n<!-- end of {match[1]} -->"

    return BLOCK.sub(block, text)


def pages(results):
    """Yields (path, its text, the text that it should have) of every page."""
    for path, text in ((RESULTS, results_page(results)), (papers.PAGE, papers.page())):
        yield path, path.read_text() if path.exists() else "", text
    others = harness.ROOT / "README.md", harness.ROOT / "benchmarks" / "README.md"
    for path in (*others, *sorted((harness.ROOT / "docs").glob("*.md"))):
        text = path.read_text()
        yield path, text, rewritten(text, results)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    differing = [(path, text) for path, was, text in pages(Results(harness.RESULTS)) if text != was]
    for path, text in differing:
        print(f"{path} " + ("differs from the CSVs" if args.check else "is written"))
        if not args.check:
            path.write_text(text)
    return int(bool(args.check and differing))


if __name__ == "__main__":
    sys.exit(main())
