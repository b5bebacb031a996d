"""What docs/reproduction.md says of every table, figure and headline of five papers: what it shows, which script asks
the same here, on which data, their figure, and ours from the CSVs.

A row without a script names the reason. Ours is a function of the CSVs, so that no figure of ours is typed; `claims.py`
writes the tables. Theirs is what the papers' text says; of figures only what the text or the axes name is known here.
"""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from . import charts, densities, dlrm, gnn, ratio

MISSING = "not measured yet"
DRAWING = "a drawing; nothing to measure"
HARDWARE = "hardware that nobody can add to a GPU; nothing to measure here"
HEADS = ("item", "what it shows", "script", "data here", "theirs", "ours")
SPARSE = {"citeseer": "Citeseer", "cora": "Cora", "pubmed_1060rows": "Pubmed"}


@dataclass(frozen=True)
class Row:
    """One table, figure or headline.

    Attributes:
        item: its name in the paper.
        shows: what it says, in few words.
        script: the file in benchmarks/ that asks the same; empty where there is none.
        data: what it runs on here, and why that differs.
        theirs: the paper's own figures, as text.
        ours: function(Results) -> text, or None where a CSV is missing; or, without a script, the reason as text.
    """

    item: str
    shows: str
    script: str
    data: str
    theirs: str
    ours: "str | Callable[[Results], str | None]"


class Results:
    """The CSVs of a directory, each read once."""

    def __init__(self, directory):
        self.directory, self.read = directory, {}

    def rows(self, name, **wanted):
        """The rows of <name>.csv in which every named column has the wanted value."""
        if name not in self.read:
            self.read[name] = charts.read(self.directory / f"{name}.csv")
        return [row for row in self.read[name] if all(row.get(key) == value for key, value in wanted.items())]

    def row(self, name, **wanted):
        """The first of them, or None."""
        return next(iter(self.rows(name, **wanted)), None)


# ---- texts ---------------------------------------------------------------------------------------------------------


def percent(share, digits=1):
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"  # no "-0.0"


def span(values, unit="", digits=2):
    """ "1.20 to 3.40 times"; None without values."""
    if not values:
        return None
    low, high = (f"{value:,.{digits}f}" for value in (min(values), max(values)))
    return f"{low} to {high}{unit}" if low != high else f"{low}{unit}"


def listed(parts):
    """Those that are there, a line each; None if there is none."""
    return "<br>".join(part for part in parts if part) or None


def mean(values):
    return sum(values) / len(values)


def kind(row):
    return charts.DTYPE_NAMES.get(row["dtype"], row["dtype"])


# ---- Invariant Bit Packing -----------------------------------------------------------------------------------------


def scattered_copies(results):
    """GB/s of each arm, elements of 512 B, as many as there are most."""
    rows = results.rows("scattered", row_bytes=512)
    best = {}
    for row in sorted(rows, key=lambda row: row["rows"]):
        best[row["arm"]] = row
    texts = (f"{arm} {charts.fine_number(row['gbps'])} ({row['rows']:,})" for arm, row in best.items())
    text = "elements of 512 B, GB/s, in brackets how many: " + ", ".join(texts)
    return listed([best and text, alignment_gains(results)])


def alignment_gains(results):
    """What a warp an element from the boundary below it gains over words in their order, by the size of elements."""
    parts = []
    for words in results.rows("scattered", arm="by kernel, words", rows=100_000):
        aligned = results.row("scattered", arm="by kernel, aligned", rows=100_000, row_bytes=words["row_bytes"])
        if aligned:
            parts.append(f"{charts.size_name(words['row_bytes'])} {aligned['gbps'] / words['gbps'] - 1:+.0%}")
    return parts and f"aligned against words, 100,000 elements: {', '.join(parts).replace('%', ' %')}"


def shares_of_ideal(results):
    """Scheme ibp of the paper's synthetic rows."""
    parts = []
    for row_bytes in (256, 1024, 4096):
        found = {
            charts.savings_of(row["case"]): row["gbps"] / row["ideal_gbps"]
            for row in results.rows("gather", arm="ibp slots", row_bytes=row_bytes)
            if row["case"].startswith(charts.SYNTHETIC)
        }
        if found:
            low = [share for savings, share in found.items() if savings <= 0.5]
            parts.append(
                f"{charts.size_name(row_bytes)}: {percent(min(low), 0)} or more of the ideal to half of the bytes "
                f"saved, {percent(found[max(found)], 0)} at {percent(max(found), 0)}"
            )
    return listed(parts)


def graph_gains(results):
    """Epochs by the CPU's best gather over epochs by ibp."""
    gains = list(gnn.gains(results.rows("gnn")))
    return gains and (
        f"epochs {span([gain.epoch for gain in gains])} times as fast as with the best gather by the CPU, "
        f"{span([gain.raw_epoch for gain in gains])} times as with raw rows fetched by the GPU; mean of the first "
        f"{mean([gain.epoch for gain in gains]):.2f}"
    )


def graph_parts(results):
    """Of Cora's features: fetching, training and the epoch, raw rows and coded ones."""
    rows = (results.row("gnn", arm=arm, case="cora, batch 1024") for arm in (*gnn.CPU_ARMS, "raw rows", "ibp"))
    return listed(
        f"{row['arm']}: fetch {row['fetch_ms']:.2f} ms, train {row['train_ms']:.2f} ms, epoch {row['epoch_s']:.2f} s"
        for row in rows
        if row
    )


def lookups(results):
    """Look-ups by ibp against the CPU's gathers, and what coding adds to raw rows by the same kernel."""
    cells = {}
    for row in results.rows("dlrm"):
        cells.setdefault((row["case"], row["dtype"], row["row_bytes"]), {})[row["arm"]] = row["gbps"]
    every = [arms for arms in cells.values() if {"ibp", *dlrm.ARMS[:3]} <= arms.keys()]
    gather, pipelined, raw = ([arms["ibp"] / arms[arm] for arms in every] for arm in dlrm.ARMS[:3])
    return every and (
        f"{span(gather)} times as fast as gathered and then copied by the CPU, {span(pipelined)} times as gathered "
        f"while it is copied, {span(raw)} times as raw rows by the same kernel"
    )


def streamed_weights(results):
    parts = []
    for row in results.rows("weights", arm="ibp", prompt=256):
        raw = [
            other["ms"]
            for other in results.rows("weights", arm="raw through hooks", dtype=row["dtype"], rows=row["rows"])
            if other["prompt"] == row["prompt"]
        ]
        if raw and row["sms"] == max(other["sms"] for other in results.rows("weights", arm="ibp", dtype=row["dtype"])):
            parts.append(f"{kind(row)}: a token in {percent(row['ms'] / raw[0], 0)} of the time of raw weights")
    plain, coded = (results.row("flexgen_opt", arm=arm) for arm in ("FlexGen", "FlexGen, ibp"))
    if plain and coded:
        parts.append(
            f"FlexGen itself, FP16: {percent(coded['token_s'] / plain['token_s'], 0)} of the time, "
            f"{percent(coded['savings'])} less host memory"
        )
    return listed(parts)


def cache_rows(results):
    """Rows of chosen tokens, and whole caches."""
    parts = []
    for case in charts.in_order(row["case"] for row in results.rows("kv_rows")):
        arms = {row["arm"]: row["us"] for row in reversed(results.rows("kv_rows", case=case))}
        if {"ibp", "cpu index + copy", "raw by kernel"} <= arms.keys():
            parts.append(
                f"heads x width {case}: {percent(1 - arms['ibp'] / arms['cpu index + copy'], 0)} less time than the "
                f"CPU's gather, {percent(1 - arms['ibp'] / arms['raw by kernel'], 0)} less than raw rows by kernel"
            )
    return listed(parts)


def chunk_savings(results):
    """Of the set nearest to Products: dense FP32 rows of some 100 values."""
    parts = []
    for name in ("kokoro", "ncf mlp_user"):
        rows = results.rows("chunks", set=name, dtype="float32")
        best = {}
        for row in rows:
            if row["chunk_bytes"] not in best or row["savings"] > best[row["chunk_bytes"]]["savings"]:
                best[row["chunk_bytes"]] = row
        if best:
            parts.append(
                f"{name}, FP32, chunks of {', '.join(map(str, best))} B: "
                f"{', '.join(percent(row['savings']) for row in best.values())}, best at thresholds of "
                f"{span([row['tau'] for row in best.values()])}; at a threshold of 1 at most "
                f"{percent(max(row['savings'] for row in rows if row['tau'] == 1))}"
            )
    rates = results.rows("chunk_rates", case="ncf mlp_user")
    texts = [f"{row['chunk_bytes']} B {charts.number(row['gbps'])}" for row in rates]
    return listed([*parts, texts and f"decoding ncf mlp_user in device memory, GB/s: {', '.join(texts)}"])


# Gathers of the CPU through pinned memory, by the scripts that measure them: name of the CSV, arm, other columns.
PINNED_GATHERS = (
    ("copy_threads", "cpu pinned", {}),
    ("copy_threads", "cpu pipelined", {}),
    ("kv_rows", "cpu index + copy", {}),
    ("gather", "cpu pipelined", {"case": "normal 0.02", "dtype": "bfloat16"}),
)


def workers(results):
    """The CPU's rates by threads, its best through pinned memory, and the fewest SMs within 5 % of the most."""
    parts = []
    for row_bytes in (256, 1024, 4096):
        cpu = results.rows("copy_threads", arm="cpu index + copy", row_bytes=row_bytes)
        coded = results.rows("copy_threads", arm="planes slots", row_bytes=row_bytes)
        pinned = [
            (row["gbps"], name)
            for name, arm, wanted in PINNED_GATHERS
            for row in results.rows(name, arm=arm, row_bytes=row_bytes, **wanted)
        ]
        if cpu and coded:
            most = max(row["gbps"] for row in coded)
            few = min(row["workers"] for row in coded if row["gbps"] >= 0.95 * most)
            best = max(pinned, default=None)
            parts.append(
                f"rows of {charts.size_name(row_bytes)}: `x[ids].to()` {charts.fine_number(cpu[0]['gbps'])} GB/s with "
                f"{cpu[0]['workers']} thread, {charts.fine_number(max(row['gbps'] for row in cpu))} with the best "
                "number, "
                + (f"the CPU through pinned memory {charts.number(best[0])} (`{best[1]}.csv`), " if best else "")
                + f"coded rows by the GPU {charts.number(most)}, within a twentieth of it from {few} SMs"
            )
    return listed(parts)


def cluster_savings(results):
    """One cluster, the best number and the most by k-means, and the best that the library gets."""
    parts = []
    for name in charts.in_order(row["set"] for row in results.rows("more_clusters")):
        rows = results.rows("more_clusters", set=name, method="k-means")
        own = results.rows("more_clusters", set=name, method="ibp.compress")
        best, most = (max(found, key=lambda row: row["savings"]) for found in (rows, own))
        parts.append(
            f"{name}: {percent(rows[0]['savings'])} with one, {percent(best['savings'])} with {best['clusters']}, "
            f"{percent(rows[-1]['savings'])} with {rows[-1]['clusters']} (`ibp.compress`: {percent(most['savings'])} "
            f"with {most['clusters']})"
        )
    return listed(parts)


def by_set(results, text_of, arms=("planes",)):
    """text_of(row) of each set of transfers.csv and arm: the best of nvCOMP last."""
    parts = []
    for name, dtype in charts.in_order((row["case"], row["dtype"]) for row in results.rows("transfers")):
        found = {row["arm"]: row for row in results.rows("transfers", case=name, dtype=dtype)}
        codecs = [row for arm, row in found.items() if arm.startswith(charts.NVCOMP) and not arm.endswith("by row")]
        shown = [f"{arm} {text_of(found[arm])}" for arm in arms if arm in found]
        if codecs:
            best = max(codecs, key=lambda row: float(row["gain"]))
            shown.append(f"{best['arm'].replace(charts.NVCOMP, 'nvCOMP ')} {text_of(best)}")
        parts.append(f"{name} {charts.DTYPE_NAMES.get(dtype, dtype)}: " + ", ".join(shown))
    return listed(parts)


def transfer_gains(results):
    gains = by_set(results, lambda row: f"{float(row['gain']):.2f}", ("ibp", "planes", "auto"))
    worse = ans_as_floats(results.rows("transfers", arm="nvcomp ans"), results)
    texts = (f"{name} {percent(floats, 0)}, as bytes {percent(of_bytes, 0)}" for name, floats, of_bytes in worse)
    note = f"ANS coded sparse sets as floats; as bytes it saves more, at a rate {MISSING}: {'; '.join(texts)}"
    return listed([gains, worse and note])


def ans_as_floats(rows, results):
    """(set, savings, savings as bytes by ratio.csv) of those rows of nvCOMP's ANS that coded floats as such where
    coding their bytes saves over 2 points more."""
    found = []
    for row in rows:
        name = {"pubmed": "pubmed_1060rows"}.get(row["case"], row["case"])
        of_bytes = results.row("ratio", set=name, dtype=row["dtype"], method="nvcomp ANS")
        if of_bytes and of_bytes["savings"] > row["savings"] + 0.02:
            found.append((row["case"], row["savings"], of_bytes["savings"]))
    return found


def encode_times(results):
    return by_set(results, lambda row: f"{float(row['encode_ms']):.1f} ms", ("planes",))


def codec_savings(results):
    """Every set of ratio.csv that stands for one of theirs: the paper's choice, planes, the best of the others."""
    parts = []
    for name, dtype in (
        *((name, "float32") for name in SPARSE),
        ("word2vec", "float32"),
        ("ncf mlp_user", "float32"),
        ("K-cache", "float16"),
        ("V-cache", "float16"),
        ("K-cache", "bfloat16"),
        ("V-cache", "bfloat16"),
        ("stories260k", "bfloat16"),
    ):
        found = {row["method"]: row["savings"] for row in results.rows("ratio", set=name, dtype=dtype)}
        others = {method: savings for method, savings in found.items() if method not in ratio.OURS}
        if found and others:
            best = max(others, key=others.get)
            parts.append(
                f"{name} {charts.DTYPE_NAMES.get(dtype, dtype)}: the paper's choice {percent(found['paper'])}, planes "
                f"{percent(found['planes'])}, {best} {percent(others[best])}"
            )
    return listed(parts)


def packed_bits(results):
    parts = []
    for name, dtype in (
        *((name, "float32") for name in ("pubmed_1060rows", "citeseer", "cora", "word2vec", "ncf mlp_user")),
        *((f"{part}-cache", dtype) for dtype in ("float16", "bfloat16") for part in "KV"),
    ):
        if row := results.row("bits", set=name, dtype=dtype):
            shares = (percent(float(row[column])) for column in ("bit_pack", "group_pack", "invariant"))
            parts.append(f"{name} {kind(row)}: {' / '.join(shares)}")
    return listed(parts)


def sampled_ratios(results):
    """Times smaller with codebooks of 1, 10 and 100 % of the rows."""
    parts = []
    for name, dtype in (*((name, "float32") for name in (*SPARSE, "ncf mlp_user", "word2vec")), ("V-cache", "float16")):
        for scheme in ("ibp", "planes"):
            rows = results.rows("sampling", set=name, dtype=dtype, scheme=scheme)
            found = {float(row["sample"]): row["savings"] for row in rows}
            if found:
                times = " / ".join(f"{1 / (1 - found[share]):.2f}" for share in (0.01, 0.1, 1.0))
                parts.append(f"{name} {charts.DTYPE_NAMES.get(dtype, dtype)}, {scheme}: {times}")
    return listed(parts)


def graph_sets(results):
    rows = {row["case"]: row for row in results.rows("gnn", arm="ibp")}
    return listed(f"{case}: rows of {row['row_bytes']:,} B, {row['table_gib']:.1f} GiB" for case, row in rows.items())


def cached_rows(results):
    """Rows in a cache of equal bytes."""
    parts = []
    for case in charts.in_order(row["case"] for row in results.rows("gnn_cache")):
        held = {row["arm"]: row["held_rows"] for row in results.rows("gnn_cache", case=case, cache_percent=1)}
        raw, coded = (held.get(f"{arm}, cache of 1 %") for arm in ("raw rows", "ibp"))
        if raw and coded:
            parts.append(f"{case}: {raw:,} and {coded:,}, {coded / raw:.2f} times")
    return listed(parts)


def compress_times(results):
    rows = [
        row
        for row in results.rows("compress")
        if row["arm"] in ("on the GPU", "pinned") and row["rows"] * row["row_bytes"] >= 1 << 27
    ]
    largest = {row["arm"]: row for row in sorted(rows, key=lambda row: row["rows"] * row["row_bytes"])}
    return listed(
        f"{row['rows'] * row['row_bytes'] / 2**30:.0f} GiB {'in device memory' if arm == 'on the GPU' else arm}: "
        f"{row['ms']:.1f} ms"
        for arm, row in largest.items()
    )


IBP = (
    Row("Figure 1", "bits that conventional and invariant packing remove", "", "", "", DRAWING),
    Row("Figure 2", "an example of the coding", "", "", "", DRAWING),
    Row("Figure 3", "pseudo-code of compressing", "", "", "", "code; ours is `csrc/core/masks.c`"),
    Row("Figure 4", "the steps of decoding", "", "", "", DRAWING),
    Row(
        "Figure 5",
        "ways to copy scattered, unaligned elements from the CPU's memory",
        "scattered.py",
        "elements of 8 B to 2 KiB at random places of a pinned table. Unlike theirs, our kernel without alignment "
        "spreads the words of all elements over its threads, and asks for an element's lines at once; a warp an "
        "element asks for one after the other, which is taken to be why aligning loses here",
        "by the GPU and aligned 25 % faster than by the GPU alone, both past the CPU's ways; the link 25 GB/s",
        scattered_copies,
    ),
    Row("Figure 6", "a compressed cache, and compressed tensors in the CPU's memory", "", "", "", DRAWING),
    Row(
        "Figure 7",
        "the rate of 100,000 fetched rows by savings and row size, as a share of the ideal",
        "gather.py",
        "synthetic rows made as theirs are; the ideal counts whole sectors of the link",
        "past 50 % saved and at most 90 %: 1 KB 78 %, 4 KB 86 %, 256 B half of the ideal at the end",
        shares_of_ideal,
    ),
    Row(
        "Figure 8",
        "training of GraphSAGE with IBP against DGL and Legion",
        "gnn.py",
        "features of Citeseer, Cora and Pubmed and dense ones on a random graph of 2.4 million nodes with a power law; "
        "Products, MAG and Reddit are no part of the data here. Legion needs older CUDA; the arms are what DGL does "
        "and the same pipeline with raw rows by the GPU",
        "56 % faster than DGL and 74 % than Legion on average",
        graph_gains,
    ),
    Row(
        "Figure 9",
        "where the time of an epoch goes",
        "gnn.py",
        "as figure 8, Cora",
        "Cora: hardly any waiting is left; training itself 12 % faster",
        graph_parts,
    ),
    Row(
        "Figure 10",
        "look-ups of embeddings by batch and row size, against CachedEmbeddingBag",
        "dlrm.py",
        "26 tables of random values: the trained Criteo weights are not here, and ColossalAI pins an old torch",
        "180 % faster on average, of which compression is 8 to 20 %",
        lookups,
    ),
    Row(
        "Figure 11",
        "FlexGen with the weights of Gemma-7B in the CPU's memory",
        "weights.py",
        "a Llama of 7 billion random weights; FlexGen itself runs OPT in FP16 only (`flexgen_opt.py`)",
        "22 % faster end to end, weights loaded 25 % faster",
        streamed_weights,
    ),
    Row(
        "Figure 12",
        "InfiniGen with the KV-cache of OPT in the CPU's memory",
        "kv_rows.py",
        "rows of random tokens, 10 % of them, of random values in BF16; InfiniGen itself is not run",
        "KV transfers up to 37 % and inference up to 27 % shorter, of which compression is 2 %; FP16",
        cache_rows,
    ),
    Row(
        "Figure 13",
        "savings by size of chunks and threshold",
        "chunks.py",
        "real sets in place of Products",
        "1 B: less than 3 %; 8 B: to 12.7 %; best at thresholds of 0.80 to 0.85; no savings where all must agree",
        chunk_savings,
    ),
    Row(
        "Figure 14",
        "copying KV rows with more threads of the CPU, against the GPU",
        "copy_threads.py",
        "random BF16 rows instead of InfiniGen's. `x[ids].to()` goes through pageable memory",
        "faster with more threads, and never as fast as by the GPU",
        workers,
    ),
    Row(
        "Figure 15",
        "net savings by number of clusters",
        "more_clusters.py",
        "normal and uniform integers, embeddings, and smooth fields in place of the asteroid set, which is not here. "
        "The format has 256 at most; more are counted, each with a mask, a bitval and a number of two bytes a row",
        "Reddit 12.0 % with one cluster, 12.7 % with 477; asteroid: 47 % with 13,725",
        cluster_savings,
    ),
    Row(
        "Table 1",
        "the rate of fetched and decoded tensors, against raw ones",
        "transfers.py",
        "real sets of `data/`. nvCOMP codes whole tables in chunks of 64 KiB; the CSV has it row by row too. ndzip has "
        "no package for this CUDA",
        "sparse: Cascaded 8.6, IBP 9.7; dense FP32: IBP 1.1 to 1.2; KV FP16 1.02, BF16 1.27; weights BF16 1.32",
        transfer_gains,
    ),
    Row(
        "Table 2",
        "savings by codec and set",
        "ratio.py",
        "the nearest sets here; zstd, LZ4 and nvCOMP by blocks of 64 KiB",
        "sparse: zstd 93.4 %, IBP 92.9; dense FP32 10.4; DLRM 8.3; KV FP16 4.5, BF16 23.4; weights BF16 26.7",
        codec_savings,
    ),
    Row(
        "Table 3",
        "seconds of compressing by codec and set",
        "transfers.py",
        "tables of 32 MiB of real sets, in device memory",
        "sparse 151.5, dense 53.2, DLRM 34.2, KV 42.8 and 40.9, weights 94.9 (IBP; units were lost from the text)",
        encode_times,
    ),
    Row(
        "Table 4",
        "bits removed by packing, by packing in groups, and bits invariant in 80 % of the rows",
        "bits.py",
        "Citeseer as theirs; of Pubmed 1,060 rows; their Cora has rows of 34 KB, ours is Planetoid's of 5.7 KB",
        "Pubmed 6.3 / 7.5 / 89.4 %, Citeseer 6.3 / 65.3 / 99.0, Cora 6.3 / 76 / 99.2, dense 0 / 0 / 13 to 15, KV FP16 "
        "0 / 2 / 8, BF16 0 / 0.1 / 27",
        packed_bits,
    ),
    Row(
        "Table 5",
        "how many times smaller with a codebook of 1, 10 and 100 % of the rows",
        "sampling.py",
        "the nearest sets here",
        "Pubmed 7.37 / 7.34 / 7.35, Citeseer 25.09 in all, Cora 26.36 / 26.36 / 26.34, DLRM 1.11 / 1.13 / 1.14, KV "
        "FP16 1.03 / 1.06 / 1.05",
        sampled_ratios,
    ),
    Row(
        "Table 6",
        "sizes of the graphs",
        "gnn.py",
        "as figure 8",
        "rows of 400 B to 34 KB, 0.5 to 174 GB",
        graph_sets,
    ),
    Row(
        "Table 7",
        "rows that a cache of 1 % of the bytes holds",
        "gnn_cache.py",
        "as figure 8",
        "Pubmed 6.84, Citeseer 24.15, Cora 25.88, dense 1.11 to 1.13 times",
        cached_rows,
    ),
    Row("Headline: graphs", "74 % faster training on average", "gnn.py", "as figure 8", "1.74", graph_gains),
    Row("Headline: embeddings", "180 % faster look-ups", "dlrm.py", "as figure 10", "2.8", lookups),
    Row("Headline: LLMs", "24 % faster inference", "weights.py", "as figure 11", "1.24", streamed_weights),
    Row(
        "Headline: preprocessing",
        "time to choose and to compress, before a run",
        "compress.py",
        "normal BF16",
        "half a second to 3 minutes; 84 and 55 s for one of the sets",
        compress_times,
    ),
)


# ---- DietGPU -------------------------------------------------------------------------------------------------------

FLOATS = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64"}


def output_shares(name):
    """Output over input of planes, and the bound of bits.csv."""

    def ours(results):
        parts = []
        for dtype, label in FLOATS.items():
            row = results.row("ratio", set=name, dtype=dtype, method="planes")
            bound = results.row("bits", set=name, dtype=dtype)
            if row:
                end = f" (entropy {1 - float(bound['bound']):.3f})" if bound else ""
                parts.append(f"{label} {1 - row['savings']:.3f}{end}")
        return listed(parts)

    return ours


# Who measures coding in device memory, the first one first: name of the CSV, and its arm.
DEVICE_CODERS = {
    "encode": (("encode_into", "one tensor"), ("codec", "planes encode"), ("families", "planes encode")),
    "decode": (("encode_into", "decode"), ("codec", "planes decode"), ("families", "planes decode")),
}


def device_gbps(results, case, what):
    """GB/s in device memory by dtype, of cases whose names begin so, of the first script that has the dtype."""
    found = {}
    for name, arm in DEVICE_CODERS[what]:
        rows = [row for row in results.rows(name, arm=arm) if row["case"].startswith(case)]
        rows = [row for row in rows if not row["case"].endswith(", fast") and row["row_bytes"] >= 2048]
        most = max((row["sms"] for row in rows), default=0)
        best = {}
        for row in (row for row in rows if row["sms"] == most):
            best[row["dtype"]] = max(best.get(row["dtype"], 0), row["gbps"])
        found = best | found
    return found


def device_rates(case, what):
    """As text, beside what copy_ moves."""

    def ours(results):
        found = device_gbps(results, case, what)
        parts = [f"{label} {charts.number(found[dtype])}" for dtype, label in FLOATS.items() if dtype in found]
        copies = [row for name, _ in DEVICE_CODERS[what] for row in results.rows(name, case="device", arm="copy_")]
        if parts and copies:
            parts.append(f"`copy_` {charts.number(copies[0]['gbps'])}")
        return parts and "GB/s: " + ", ".join(parts)

    return ours


def against_a_cpu(what, other, cpu_case="normal 0.02, 1 thread"):
    """The GPU's rate over one thread of the CPU's."""

    def ours(results):
        gbps = device_gbps(results, "normal 0.02", what).get("bfloat16")
        cpu = results.row("cpu", case=cpu_case, arm=other)
        if gbps is None or not cpu:
            return None
        return f"{charts.number(gbps)} GB/s, {other} {cpu['gbps']:.2f} GB/s: {charts.number(gbps / cpu['gbps'])} times"

    return ours


def against_zstd(results):
    ways = (("encode", "compress"), ("decode", "decompress"))
    texts = [against_a_cpu(gpu, f"zstd -1 {cpu}")(results) for gpu, cpu in ways]
    saved = {row["method"]: row["savings"] for row in results.rows("ratio", set="normal 0.02", dtype="bfloat16")}
    if "planes" in saved and ratio.ZSTD in saved:
        texts.append(f"output / input: planes {1 - saved['planes']:.2f}, {ratio.ZSTD} {1 - saved[ratio.ZSTD]:.2f}")
    return listed(texts)


DIETGPU = (
    Row(
        "Section 5.1.1, chart",
        "rate of compressing floats, in the GPU's memory",
        "encode_into.py",
        "normal values; FP16 by `codec.py`, FP64 by `families.py`, of another run",
        "about a fifth of the memory's 500 GB/s, over 90 GB/s at best (Titan X)",
        device_rates("normal", "encode"),
    ),
    Row(
        "Section 5.1.2, chart",
        "rate of decompressing floats",
        "encode_into.py",
        "as above",
        "a fifth of the memory's rate",
        device_rates("normal", "decode"),
    ),
    Row(
        "Table 1",
        "output over input of N(0, 1), and what entropy allows",
        "ratio.py",
        "4,096 rows of 1,024 values, each row decodable alone",
        "FP16 0.87, BF16 0.68 (entropy 0.66), FP32 0.83 (0.83), FP64 0.88 (0.87)",
        output_shares("normal 1"),
    ),
    Row(
        "Table 2",
        "output over input of simulations in FP64",
        "",
        "",
        "0.91, 0.86, 0.90 and 0.88",
        "the four sets are not part of the data here; FP64 has random values only",
    ),
    Row(
        "Section 5.1.5",
        "against an rANS on the CPU",
        "cpu.py",
        "our own CPU coder in place of ryg_rans; BF16",
        "90 GB/s against 0.55: over 160 times",
        against_a_cpu("decode", "planes decode"),
    ),
    Row(
        "Section 5.1.6",
        "against zstd on the CPU",
        "cpu.py",
        "BF16 N(0, 0.02) in place of simulations; one thread",
        "50 GB/s against 0.139 (360 times), output over input 0.91 against 0.88; 60 against 0.423 (141 times), 0.86 "
        "against 0.94",
        against_zstd,
    ),
    Row(
        "Section 5.2.1, chart",
        "rate of compressing floats of which half are zero",
        "encode_into.py",
        "the same; FP32 and FP64 by `families.py`, of another run",
        "near 50 GB/s in FP64, a tenth of the memory's rate",
        device_rates("half zeros", "encode"),
    ),
    Row(
        "Section 5.2.2, chart",
        "rate of decompressing them",
        "encode_into.py",
        "the same; FP32 and FP64 by `families.py`, of another run",
        "below that of dense floats",
        device_rates("half zeros", "decode"),
    ),
    Row(
        "Table 3",
        "output over input where half are zero",
        "ratio.py",
        "the same",
        "FP16 0.49, BF16 0.40, FP32 0.45, FP64 0.45; without the bitmap 0.76, 0.66, 0.83, 0.85",
        output_shares("half zeros"),
    ),
)


# ---- cDMA ----------------------------------------------------------------------------------------------------------


def of_layers(results, column, progress):
    """{net: {layer: value}} at the checkpoint nearest to so much of the training."""
    found = {}
    for net in charts.in_order(row["net"] for row in results.rows("densities")):
        rows = results.rows("densities", net=net)
        at = min({row["progress"] for row in rows}, key=lambda value: abs(value - progress))
        found[net] = {row["layer"]: row[column] for row in rows if row["progress"] == at}
    return found


def densities_by_layer(net):
    """At the beginning, at its least and at the end, of each ReLU."""

    def ours(results):
        rows = results.rows("densities", net=net, kind="relu")
        layers = {}
        for row in rows:
            layers.setdefault(row["layer"], []).append(row["density"])
        texts = [
            f"{layer} {percent(found[0], 0)}, {percent(min(found), 0)}, {percent(found[-1], 0)}"
            for layer, found in layers.items()
        ]
        return listed([*texts, cut_off(rows)])

    return ours


def cut_off(rows):
    """That a net's training was stopped before its end, and whether today's script trains it so; None if it was not."""
    last = max(rows, key=lambda row: row["step"], default=None)
    if last is None or last["progress"] == 1:
        return None
    planned, today = round(last["step"] / last["progress"]), {plan.net: plan.steps for plan in densities.PLANS}
    text = f"the run was stopped after {last['step']} of {planned} steps"
    return text if today[last["net"]] == planned else f"{text}; today's script has {today[last['net']]}"


def densities_of_pools(results):
    """How much denser than the layer before."""
    parts = []
    for net, layers in of_layers(results, "density", 1.0).items():
        names = list(layers)
        pairs = [(names[i - 1], name) for i, name in enumerate(names) if name.startswith("pool")]
        denser = sum(layers[pool] >= layers[before] for before, pool in pairs)
        parts.append(f"{net}: {denser} of {len(pairs)} pools are denser than what they pool")
    return listed(parts)


def net_sparsity(results):
    """Weighted by the sizes of the layers, over all checkpoints."""
    parts = []
    for net in charts.in_order(row["net"] for row in results.rows("densities")):
        rows = results.rows("densities", net=net)
        elements = sum(row["elements"] for row in rows)
        sparsity = 1 - sum(row["density"] * row["elements"] for row in rows) / elements
        most = 1 - min(row["density"] for row in rows)
        parts.append(f"{net}: {percent(sparsity)} zero on average, {percent(most)} in the sparsest layer")
    return listed(parts)


GONE = 0.001  # a loss from which a net learns nothing more


def losses(results):
    parts = []
    for net in charts.in_order(row["net"] for row in results.rows("densities")):
        found = [row for row in results.rows("densities", net=net, layer="conv1") if row["loss"] is not None]
        if found:
            low = min(found, key=lambda row: row["density"])
            gone = next((row for row in found if row["loss"] < GONE), None)
            texts = [
                f"{net}: loss {found[0]['loss']:.2f} to {found[-1]['loss']:.4f}",
                gone and f"{gone['loss']:.4f} after {gone['step']} steps already",
                f"conv1 least dense, {percent(low['density'], 0)}, after {low['step']} steps",
                cut_off(found),
            ]
            parts.append("; ".join(filter(None, texts)))
    return listed(parts)


def net_ratios(dtype, layouts=None):
    """Times smaller where sizes were last taken, weighted by size, and of the layer that shrinks most."""

    def ours(results):
        parts = []
        rows = results.rows("activation_ratios", dtype=dtype)
        last = {net: max(row["progress"] for row in rows if row["net"] == net) for net in {row["net"] for row in rows}}
        for net, layout in charts.in_order((row["net"], row["layout"]) for row in rows):
            own = [row for row in rows if (row["net"], row["layout"], row["progress"]) == (net, layout, last[net])]
            if not own or (layouts and layout not in layouts):
                continue
            elements = sum(row["elements"] for row in own)
            texts = [
                f"{column} {elements / sum(row['elements'] / row[column] for row in own):.2f} "
                f"(most {max(row[column] for row in own):.1f})"
                for column in ("zvc", "zlib", "ibp")
            ]
            when = "" if last[net] == 1 else f", after {percent(last[net], 0)} of the steps"
            parts.append(f"{net}, {layout}{when}: {', '.join(texts)}")
        return listed(parts)

    return ours


def steps(results):
    """{net: {arm: milliseconds of a step}}."""
    found = {}
    for row in results.rows("activations"):
        found.setdefault(row["case"], {})[row["arm"]] = as_number(row["step_ms"])
    return {net: arms for net, arms in found.items() if {"plain", "raw", "ibp"} <= arms.keys()}


def offload_costs(results):
    """Steps with all activations sent as they are, over steps without."""
    return listed(
        f"{net}: {arms['raw'] / arms['plain']:.2f} times the step without offload"
        + (f", by torch's `save_on_cpu` {arms['save_on_cpu'] / arms['plain']:.2f}" if arms.get("save_on_cpu") else "")
        for net, arms in steps(results).items()
    )


def offload_gains(results):
    """The same with coding."""
    return listed(
        f"{net}: {arms['ibp'] / arms['plain']:.2f} times the step without offload, {arms['raw'] / arms['ibp']:.2f} "
        "times as fast as the same hooks without coding"
        for net, arms in steps(results).items()
    )


def offload_mean(results):
    gains = {net: arms["raw"] / arms["ibp"] - 1 for net, arms in steps(results).items()}
    nets = ", ".join(f"{net} {percent(gain, 0)}" for net, gain in sorted(gains.items(), key=lambda item: -item[1]))
    slower = sum(gain < 0 for gain in gains.values())
    return gains and (
        f"{percent(statistics.median(gains.values()), 0)} faster in the median, {percent(mean(gains.values()), 0)} on "
        f"average, {slower} of {len(gains)} nets slower: {nets}"
    )


def as_number(value):
    """A column's value as a number, None if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


CDMA_DATA = "our own images (above)"
CDMA = (
    Row("Figure 1", "the steps of training", "", "", "", DRAWING),
    Row("Figure 2", "memory of a GPU and of the CPU, and vDNN's copies", "", "", "", DRAWING),
    Row(
        "Figure 3",
        "what offloading all activations costs as GPUs get faster",
        "activations.py",
        "one GPU; the same hooks without coding stand for vDNN",
        "51 % of the performance lost on average, at most 63 %",
        offload_costs,
    ),
    Row("Table I", "rates of four generations of GPUs", "", "", "", "data sheets; nothing to measure"),
    Row(
        "Figure 4",
        "density of each layer of AlexNet while it is trained: at first, least, at last",
        "densities.py",
        CDMA_DATA + "; 64 channels in conv0, theirs 96. Our fully connected layers end densest but for conv0: "
        "training begins with half of every layer's outputs at zero, and the loss is gone before the weights of these "
        "layers have moved much (`probes.csv`)",
        "conv0 always within 2 points of 50 %; the others fall fast and rise again; fc the sparsest",
        densities_by_layer("AlexNet"),
    ),
    Row(
        "Figure 5",
        "the zeros of each layer as pictures; pools are denser",
        "densities.py",
        CDMA_DATA + "; counted, not drawn",
        "pools always denser",
        densities_of_pools,
    ),
    Row(
        "Figure 6",
        "density by layer of deeper nets, VGG among them",
        "densities.py",
        CDMA_DATA + "; VGG16 only: no OverFeat, NiN, SqueezeNet and GoogLeNet here",
        "as AlexNet",
        densities_by_layer("VGG16"),
    ),
    Row(
        "Figure 7",
        "loss and density over training",
        "densities.py",
        CDMA_DATA,
        "density falls with the loss, then rises slowly",
        losses,
    ),
    Row("Figure 8", "zero-value compression", "", "", "", DRAWING),
    Row("Figure 9", "where a GPU would compress", "", "", "", HARDWARE),
    Row("Figure 10", "the engines' circuits", "", "", "", HARDWARE),
    Row("Table II", "accuracies of the trained nets", "", "", "", "no net is trained on ImageNet here"),
    Row(
        "Figure 11",
        "how many times smaller by RLE, ZVC and zlib in three orders of memory",
        "densities.py",
        CDMA_DATA + "; FP32; no RLE",
        "ZVC 2.6 on average, at most 13.8, the same in all orders; zlib 2.76 in NCHW, less in the others",
        net_ratios("float32"),
    ),
    Row(
        "Figure 12",
        "bytes sent to the CPU",
        "densities.py",
        CDMA_DATA + "; BF16, which nets are trained in today; NCHW",
        "zlib 3 % less than ZVC on average",
        net_ratios("bfloat16", ("NCHW",)),
    ),
    Row(
        "Figure 13",
        "steps with offload, coded and not, against no offload at all",
        "activations.py",
        "AlexNet, VGG16, ResNet-50 and blocks of transformers with random values",
        "53 % faster than vDNN on average, at most 79 % (Titan Xp); 32 and 61 % in its section on energy",
        offload_gains,
    ),
    Row(
        "Headline: sparsity",
        "62 % of the activations of six nets are zero, at most 93 %",
        "densities.py",
        CDMA_DATA,
        "AlexNet 49.4 %; six nets 62 %, at most 93 %",
        net_sparsity,
    ),
    Row(
        "Headline: steps",
        "training with offload 53 % faster on average than without coding",
        "activations.py",
        "as figure 13",
        "53 %, at most 79 %",
        offload_mean,
    ),
    Row(
        "Headline: ratio",
        "2.6 times smaller on average",
        "densities.py",
        CDMA_DATA + "; FP32",
        "2.6, at most 13.8",
        net_ratios("float32", ("NCHW",)),
    ),
)


# ---- Buddy Compression ---------------------------------------------------------------------------------------------


SLOT_KINDS = {
    "the paper's ratios": "training, the paper's ratios",
    "slots of any size": "training, slots of any size",
}
THRESHOLD = "profile, 30%"  # that the paper takes


def profiles(results):
    """(kind of slots, its row at the paper's threshold) of those that are there."""
    rows = ((name, results.row("spill", case=case, arm=THRESHOLD)) for name, case in SLOT_KINDS.items())
    return [(name, row) for name, row in rows if row]


def placed(row):
    return f"{as_number(row['target']):.2f} times smaller with {percent(as_number(row['spilled']))} of the rows spilled"


def best_ratios(results):
    """Without a limit on what spills."""
    return listed(f"{name}: {1 / (1 - row['savings']):.2f} times smaller" for name, row in profiles(results))


def chosen_ratios(results):
    """Ratio and spilled rows at the paper's threshold."""
    return listed(f"{name}: {placed(row)}" for name, row in profiles(results))


def foretold_spill(results):
    """Of the last snapshot."""
    return listed(
        f"{name}: {percent(as_number(row['predicted_spilled']))} of the rows foretold, "
        f"{percent(as_number(row['spilled']))} in the last snapshot"
        for name, row in profiles(results)
    )


def thresholds(results):
    rows = results.rows("spill", case=SLOT_KINDS["the paper's ratios"])
    return listed(f"{row['arm'].removeprefix('profile, ').replace('%', ' %')}: {placed(row)}" for row in rows)


SPILL_TABLE = (
    "case",
    "dtype",
    "row_bytes",
    "target",
    "spilled",
)  # names a table of spill.csv


def reads(results, **wanted):
    """(what was read, its row, that of the same table on the device alone) of each table that has both."""
    for what in ("decode", "index_select"):
        spilled, alone = (
            {tuple(row[key] for key in SPILL_TABLE): row for row in results.rows("spill", arm=arm, **wanted)}
            for arm in (f"{what}, spilled", f"{what}, device only")
        )
        yield from ((what, row, alone[table]) for table, row in spilled.items() if table in alone)


def spilled_reads(results):
    """Rates of normal BF16 rows by the share that spills, in slots that all others fit."""
    return listed(
        f"{what}, {percent(as_number(row['spilled']))} of the rows spilled: {charts.number(row['gbps'])} GB/s, "
        f"{percent(row['gbps'] / alone['gbps'], 0)} of the rate without spill, "
        f"{percent(row['gbps'] / row['ideal_gbps'], 0)} of what the link allows"
        for what, row, alone in reads(results, case="normal 0.02")
        if not row["target"]
    )


def placed_rates(results):
    """How fast the nets that are placed by their profiles are decoded."""
    return listed(
        f"{name}: {placed(row)}, decoded at {charts.number(row['gbps'])} GB/s, "
        f"{percent(row['gbps'] / row['ideal_gbps'], 0)} of the {charts.number(row['ideal_gbps'])} that memory and link "
        "allow"
        for name, row in profiles(results)
    )


def headline_of_spill(results):
    rates = [row["gbps"] / alone["gbps"] for _, row, alone in reads(results) if as_number(row["spilled"]) == 0]
    without = rates and (
        f"other tables, of which nothing spills: {span(rates)} times the rate of the same table on the GPU"
    )
    return listed([placed_rates(results), without])


BUDDY_PLACE = "needs a part of the GPU's memory controller; nothing to measure here"
BUDDY = (
    Row("Figure 1", "an entry divided over two memories", "", "", "", DRAWING),
    Row("Figure 2", "the system that it is for", "", "", "", DRAWING),
    Row("Table 1", "the programs and their bytes", "", "", "", "SpecAccel and FastForward programs are not run here"),
    Row(
        "Figure 3",
        "how many times smaller each program's memory could be over its run",
        "spill.py",
        "10 snapshots of a small net's training: weights, states of AdamW, activations; no HPC programs. The ratio "
        "rests on the states of an embedding, of which most rows were never touched and are zero "
        "([spill.md](spill.md#what-it-costs))",
        "HPC 2.51, deep learning 1.85",
        best_ratios,
    ),
    Row("Figure 4", "slots of 32-byte sectors", "", "", "", DRAWING),
    Row("Figure 5", "hits of the cache of metadata", "", "", "", BUDDY_PLACE),
    Row("Figure 6", "where in memory entries compress", "", "", "", "pictures of 16 programs that are not run here"),
    Row(
        "Figure 7",
        "ratio and accesses of the slower memory, by design",
        "spill.py",
        "as figure 3",
        "HPC 1.9 with 0.08 % of accesses, deep learning 1.5 with 4 %; with one target for all 1.57 with 8 % and 1.18 "
        "with 32 %",
        chosen_ratios,
    ),
    Row(
        "Figure 8",
        "accesses of the slower memory over a step of training",
        "spill.py",
        "as figure 3: foretold by the profile, and counted in the last snapshot",
        "constant; SqueezeNet 1.49 and ResNet-50 1.64 times smaller",
        foretold_spill,
    ),
    Row(
        "Figure 9",
        "ratio and accesses by threshold, 10 to 40 %",
        "spill.py",
        "as figure 3",
        "30 % chosen: near the best ratio",
        thresholds,
    ),
    Row("Figure 10", "how well their simulator foretells a V100", "", "", "", "nothing is simulated here"),
    Row("Table 2", "what was simulated", "", "", "", "nothing is simulated here"),
    Row(
        "Figure 11",
        "rate against memory that is large enough, by link",
        "spill.py",
        "tables read whole and at random, with more and more rows that spill; over PCIe 5 alone",
        "150 GB/s: within 1 % (HPC) and 2.2 % (deep learning); 50 GB/s: over 20 % slower",
        spilled_reads,
    ),
    Row(
        "Figure 12",
        "slow-downs of unified memory",
        "",
        "",
        "on a Power9 with NVLink",
        "not measured yet: managed memory that exceeds the GPU's, beside `ibp.spill.place`. `scattered.py` reads "
        "managed memory that fits",
    ),
    Row(
        "Figure 13",
        "batches that fit, and how fast and well they train",
        "",
        "",
        "batches that fit train 14 % faster on average, VGG16 30 %",
        "projected by their model for a Titan Xp; bytes freed while training stand under cDMA",
    ),
    Row(
        "Headline",
        "1.5 to 1.9 times more memory within 2 % of the time",
        "spill.py",
        "the net of figure 3, its 15 tensors decoded one after the other; and the tables of figure 11",
        "1.9 (HPC), 1.5 (deep learning)",
        headline_of_spill,
    ),
)


# ---- nvCOMP's introduction -----------------------------------------------------------------------------------------


GATHER = "all_gather_into_tensor"
GATHERED = ("weights", "integers")


def gathers(*links):
    """All-gathers of the largest output against NCCL's, by link: as ibp does them by itself, and the best level."""

    def ours(results):
        parts = []
        names = links or charts.in_order(row["link"] for row in results.rows("collectives"))
        for link, what in itertools.product(names, GATHERED):
            rows = results.rows("collectives", case=f"{link}, {GATHER}, {what}")
            most = max((as_number(row["mib"]) for row in rows), default=0)
            found = {row["arm"]: row for row in rows if as_number(row["mib"]) == most}
            coded = [as_number(found[arm]["over_torch"]) for arm in ("default", "fast") if arm in found]
            if coded and {"torch", "auto"} <= found.keys():
                parts.append(
                    f"{link}, {most:,.0f} MiB of {what}: NCCL {charts.number(found['torch']['gbps'])} GB/s, ibp by "
                    f"itself {as_number(found['auto']['over_torch']):.2f} times as fast, always coded {max(coded):.2f}"
                )
        return listed(parts)

    return ours


TYPED_CODECS = {"nvcomp:cascaded": "Cascaded", "nvcomp:lz4": "LZ4", "planes": "planes"}


def typed_columns(results):
    """Ratio, and the rate of coding and decoding together."""
    parts = []
    for name in ("sorted ids with runs", "dates", "strings"):
        found = ((label, results.row("choose", case=name, arm=arm)) for arm, label in TYPED_CODECS.items())
        texts = [
            f"{label} {1 / (1 - row['savings']):.1f} times smaller, {charts.fine_number(row['gbps'])} GB/s"
            for label, row in found
            if row
        ]
        parts.append(texts and f"{name}: " + ", ".join(texts))
    return listed(parts)


NVCOMP_POST = (
    Row("Figure 1", "an all-gather", "", "", "", DRAWING),
    Row("Figure 2", "an all-gather of compressed pieces", "", "", "", DRAWING),
    Row(
        "Figure 3",
        "all-gathers of columns of the mortgage set over four T4s",
        "collectives.py",
        "weights in BF16, and integers below 1,000 in int64, over two H200s by three links; the mortgage set is not "
        "here",
        "to 150 GB/s, 12 times as fast, on the sorted column; slower on floats",
        gathers(),
    ),
    Row(
        "Figure 4",
        "ratios and rates of LZ4 and Cascaded by column",
        "choose.py",
        "sorted ids with runs, dates and strings made here",
        "column 0: Cascaded 80, nearly twice LZ4, 56 GB/s on a T4; column 2: LZ4 71.8, Cascaded 3.2",
        typed_columns,
    ),
    Row("Figure 5", "a token of LZ4", "", "", "", DRAWING),
    Row("Figure 6", "the stages of Cascaded", "", "", "", DRAWING),
    Row(
        "Headline: DGX-1",
        "all-gathers between GPUs that NVLink joins, 2 to 4 times as fast on some columns",
        "collectives.py",
        "as figure 3, over NVLink",
        "2 to 4",
        gathers("direct"),
    ),
)

PAPERS = {  # name of the block: rows
    "reproduction of ibp": IBP,
    "reproduction of dietgpu": DIETGPU,
    "reproduction of cdma": CDMA,
    "reproduction of buddy": BUDDY,
    "reproduction of nvcomp": NVCOMP_POST,
}


# ---- the tables ----------------------------------------------------------------------------------------------------


def cells(row, results):
    """A line of the table."""
    ours = row.ours if isinstance(row.ours, str) else row.ours(results) or MISSING
    return [row.item, row.shows, f"`{row.script}`" if row.script else "", row.data, row.theirs, ours]


def block(rows, pictures):
    """function(directory of CSVs) -> the table and the pictures of CSVs that are there, as claims.py wants it."""

    def make(directory):
        results = Results(directory)
        lines = [HEADS, ["---"] * len(HEADS), *(cells(row, results) for row in rows)]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        shown = [f"![{title}](../benchmarks/results/{name}.png)" for name, title in pictures if results.rows(name)]
        return "\n\n".join([table, *shown])

    return make


PICTURES = {  # by block: the CSV of each, and what it shows
    "reproduction of ibp": (
        ("chunks", "Savings by chunk size and threshold, set by set"),
        ("copy_threads", "Rates by threads of the CPU and by SMs"),
    ),
    "reproduction of cdma": (("densities", "Densities of activations over training"),),
}
BLOCKS = {name: block(rows, PICTURES.get(name, ())) for name, rows in PAPERS.items()}
