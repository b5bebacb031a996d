"""Writes the tables of docs/reproduction.md: what five papers show, and what the CSVs say about the same items.

A row has the item, what it shows and which data stand for the paper's here, the script that measures the same, the
paper's figure, and functions of the CSVs for our figure and for the figures that are compared. No figure of ours is
typed. NOT_MEASURED has the other items, with the reason. The papers' figures are what their texts say; of their
drawings only what the text or the axes name is known here.
"""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from . import (
    activations,
    charts,
    codec,
    densities,
    dlrm,
    gnn,
    gnn_cache,
    ratio,
    reading,
    reference,
    sets,
    spill,
    throttle,
)
from .reading import NVCOMP, SYNTHETIC, by_arm, fine_number, in_order, kind, number, percent, size_name

HEADS = ("item", "what it shows; data here", "script", "theirs", "ours", "ratio to the paper's")
# Each (set, dtype) stands for one of the papers' sets.
SETS = (
    ("citeseer", "float32"),
    ("cora", "float32"),
    ("pubmed_1060rows", "float32"),
    ("word2vec", "float32"),
    ("ncf mlp_user", "float32"),
    *((f"{part}-cache", dtype) for dtype in ("float16", "bfloat16") for part in "KV"),
    ("stories260k", "bfloat16"),
)

# Columns of the paper's table 1: the sets of transfers.csv that stand for them, and their dtype.
SETS_OF_TRANSFERS = {
    "sparse": (("cora", "citeseer", "pubmed"), "float32"),
    "dense": (("kokoro", "word2vec"), "float32"),
    "DLRM": (("embedding",), "float32"),
    "DLRM, 512 B": (("embedding, 512 B",), "float32"),
    "KV FP16": (("K-cache", "V-cache"), "float16"),
    "KV BF16": (("LLM keys", "LLM values"), "bfloat16"),
    "weights": (("LLM weights", "LLM weights, 512 B"), "bfloat16"),
}
# Columns of the paper's table 2: the sets of SETS that stand for them, and their dtype.
SETS_OF_SAVINGS = {
    "sparse": (("citeseer", "cora", "pubmed_1060rows"), "float32"),
    "dense": (("word2vec",), "float32"),
    "DLRM": (("ncf mlp_user",), "float32"),
    "KV FP16": (("K-cache", "V-cache"), "float16"),
    "KV BF16": (("K-cache", "V-cache"), "bfloat16"),
    "weights": (("stories260k",), "bfloat16"),
}


@dataclass(frozen=True)
class Row:
    """A table, figure or headline that is measured.

    Attributes:
        ours: function(Results) -> text.
        others: further scripts whose CSVs `ours` reads and which no row names as its own.
        compared: function(Results) -> (label, our figure, the paper's figure) for each figure that `theirs` names and
            that is comparable with ours.
    """

    item: str
    shows: str
    script: str
    theirs: str
    ours: Callable
    others: tuple[str, ...] = ()
    compared: Callable = lambda results: ()

    def ratios(self, results):
        """Returns our figures over the paper's, as text."""
        found = self.compared(results)
        return ", ".join(f"{label} {ours / theirs:.2f}".lstrip() for label, ours, theirs in found)


def span(values, unit="", digits=2):
    """Returns for example "1.20 to 3.40 times"."""
    low, high = (f"{value:,.{digits}f}" for value in (min(values), max(values)))
    return f"{low} to {high}{unit}" if low != high else f"{low}{unit}"


def listed(parts):
    """Returns the parts that are not empty, one per line."""
    return "<br>".join(part for part in parts if part)


def same_rows(row):
    """Returns a key for `by_arm`: what was fetched, its dtype and the size of its rows."""
    return row["case"], row["dtype"], row["row_bytes"]


# ---- Invariant Bit Packing -----------------------------------------------------------------------------------------


SHOWN_COPIES = (
    "gathered by the CPU",
    *(f"by kernel, {way}" for way in ("vectors", "warps", "aligned")),
    *("managed memory", "ibp, raw rows"),
)


def scattered_copies(results):
    """Returns GB/s of some arms for the largest number of elements of 512 B, and what aligning gains."""
    rows = sorted(results.rows("scattered", row_bytes=512), key=lambda row: row["rows"])
    best = {row["arm"]: row for row in rows if row["arm"] in SHOWN_COPIES}
    gains = (f"{size_name(size)} {gain - 1:+.0%}" for size, gain in aligned_gains(results).items())
    return listed(
        [
            "512 B, GB/s: "
            + ", ".join(f"{arm} {fine_number(row['gbps'])}" for arm, row in best.items())
            + "; raw rows of ibp are aligned",
            "aligning gains " + ", ".join(gains).replace("%", " %"),
        ]
    )


def aligned_gains(results):
    """Returns {bytes of an element: gain}. The gain is the rate of warps that begin at boundaries of 128 bytes, divided
    by the rate of warps that begin anywhere, or, if these are not measured, of one thread per word."""
    sizes = by_arm(results.rows("scattered", rows=100_000), lambda row: row["row_bytes"])
    controls = {size: arms.get("by kernel, warps", arms["by kernel, words"]) for size, arms in sizes.items()}
    return {size: arms["by kernel, aligned"]["gbps"] / controls[size]["gbps"] for size, arms in sizes.items()}


def shares_of_ideal(results):
    """Returns rates of scheme ibp on the paper's synthetic rows, as shares of the ideal."""
    parts = []
    for row_bytes in (256, 1024, 4096):
        found = {
            reading.savings_of(row["case"]): row["gbps"] / row["ideal_gbps"]
            for row in results.rows("gather", arm="ibp slots", row_bytes=row_bytes)
            if row["case"].startswith(SYNTHETIC)
        }
        low = min(share for savings, share in found.items() if savings <= 0.5)
        parts.append(f"{size_name(row_bytes)} {percent(low, 0)} and {percent(found[max(found)], 0)}")
    return f"the least to half of the bytes saved, and at {percent(max(found), 0)}: {', '.join(parts)}"


SCHEMES = ("ibp", "scheme ibp")  # The arms are the library's choice and the paper's scheme.


def graph_gains(results):
    """Returns how many times longer epochs take with raw rows, and with the CPU's best gather, than with ibp and with
    the paper's scheme, by kind of features. Also returns, by set, epochs whose neighbours DGL draws and epochs with a
    cache."""
    parts = ["epochs, times as fast as by raw rows and the GPU, as by the CPU's best gather:"]
    for kind_of_features, is_dense in (("sparse features", False), ("dense", True)):
        texts = []
        for arm in SCHEMES:
            found = gnn.gains(results.rows("gnn"), arm)
            own = [gain for gain in found if gain.case.startswith("dense") == is_dense]
            texts.append(f"{arm} {span([of.raw_epoch for of in own])}, {span([of.epoch for of in own])}")
        parts.append(f"{kind_of_features}: {'; '.join(texts)}")
    others = (*masked_epochs(results), sampled_by_dgl(results), cached_epochs(results), *loaded(results))
    return listed([*parts, *others])


LOADED = (
    ("gnn_pyg", "PyG", ("PrefetchLoader", "index_select of mapped rows", "raw rows")),
    ("gnn_dgl", "DGL", ("loader", "pin_prefetcher", "use_uva", "raw rows")),
)


def loaded(results):
    """Yields how many times longer training to an accuracy takes with a loader's own arms, and with raw rows, than with
    ibp, by set."""
    for csv, package, names in LOADED:
        for case, arms in by_arm(results.rows(csv)).items():
            seconds = {arm: row["accuracy_s"] for arm, row in arms.items()}
            if seconds.get("ibp"):
                ratios = [f"{name} {seconds[name] / seconds['ibp']:.2f}" for name in names if seconds.get(name)]
                yield f"{package}'s loader, to an accuracy, times as long as with ibp, {case}: {', '.join(ratios)}"


def masked_epochs(results):
    """Yields how many times longer epochs on Citeseer's rows, which are the paper's, take with raw rows, and with the
    CPU's best gather, than with the paper's scheme, by case."""
    found = [gain for gain in gnn.gains(results.rows("gnn"), "scheme ibp") if gain.case.startswith("citeseer")]
    if found:
        texts = (f"{gain.case.removeprefix('citeseer, ')} {gain.raw_epoch:.2f}, {gain.epoch:.2f}" for gain in found)
        yield f"Citeseer by scheme ibp: {'; '.join(texts)}"


def cached_epochs(results):
    """Returns the seconds of epochs with a cache: of raw rows, with misses, the cache, or both compressed; and of
    epochs with compressed rows and no cache."""
    ways = (gnn_cache.RAW, gnn_cache.MISSES_ALONE, gnn_cache.CACHE_ALONE, gnn_cache.IBP)
    cached = by_arm(results.rows("gnn_cache", cache_percent=1))
    texts = []
    for case, plain in by_arm(results.rows("gnn_cache", cache_percent=0)).items():
        arms = [cached[case][gnn_cache.arm_name(way, 1)] for way in ways] + [plain[gnn_cache.IBP]]
        texts.append(f"{case} {', '.join(fine_number(row['epoch_s']) for row in arms)}")
    return texts and (
        "behind a cache of 1 %, seconds: raw, misses coded, the cache coded, both, coded without a cache: "
        f"{'; '.join(texts)}"
    )


def sampled_by_dgl(results):
    """Returns epochs whose neighbours DGL draws, over those with ibp."""
    texts = []
    for case, arms in by_arm(row for row in results.rows("gnn") if row["case"].endswith(gnn.BY_DGL)).items():
        plain, raw = (arms[arm]["epoch_s"] / arms["ibp"]["epoch_s"] for arm in ("cpu plain", "raw rows"))
        texts.append(f"{case.split(', ')[0]} {plain:.2f}, {raw:.2f}")
    return texts and f"sampled by DGL, over rows by `x[ids].to()`, over raw rows by the GPU: {'; '.join(texts)}"


def graph_parts(results):
    """Returns, for Cora's features and Reddit's row size, the times of fetching and of training alone, the time of
    training beside the next batch, and the time that a batch waits, all by CUDA events. In rows of an older gnn.py the
    times alone are by the wall clock, and the wait is what an epoch's batch takes beyond its training."""
    parts, is_old = [], False
    for name, arm in itertools.product(("cora", "dense 602"), ("raw rows", "ibp")):
        row = results.row("gnn", arm=arm, case=f"{name}, batch 1024")
        batch_ms, beside_ms, wait_ms = 1e3 * row["epoch_s"] / gnn.EPOCH_BATCHES, row["beside_ms"], row.get("wait_ms")
        if wait_ms is None:
            is_old, wait_ms = True, max(0, batch_ms - beside_ms)
        parts.append(
            f"{name}, {arm}: {', '.join(map(short_number, (row['fetch_ms'], row['train_ms'], beside_ms)))}, "
            f"{short_number(wait_ms)} of {short_number(batch_ms)} ms"
        )
    heads = "fetch alone, train alone, train beside fetches, wait, by CUDA events:"
    if is_old:
        heads = "fetch alone, train alone (wall clock), train beside fetches (CUDA events), wait:"
    return listed([heads, *parts])


def short_number(value):
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def lookups(results):
    """Returns how fast look-ups with ibp are, compared with raw rows with the same kernel, the CPU's gathers, and
    caches of the same bytes."""
    parts = [
        "times as fast as raw rows by the same kernel, as the CPU's gather pipelined with the copy, as its gather:"
    ]
    for arm in SCHEMES:
        gains = list(dlrm.gains(results.rows("dlrm"), arm))
        spans = (span([getattr(gain, other) for gain in gains]) for other in ("raw", "pipelined", "plain"))
        parts.append(f"{arm} {', '.join(spans)}")
    cached = [gain.cached for gain in dlrm.gains(results.rows("dlrm")) if gain.cached]
    parts.append(f"with a cache of 2 %, as raw rows with it: {span(cached)}")
    return listed([*parts, cached_bags(results), bags_inside(results)])


def bag_pairs(results, arm, other=dlrm.COLOSSALAI):
    """Returns the speed-up of an arm over another one, for each look-up that has both."""
    found = by_arm(results.rows("dlrm"), same_rows).values()
    return [arms[arm]["gbps"] / arms[other]["gbps"] for arms in found if {arm, other} <= arms.keys()]


def cached_bags(results):
    """Returns how fast look-ups with a cache are, compared with ColossalAI's class, which copies back the rows that it
    drops."""
    coded, raw = (bag_pairs(results, arm) for arm in (dlrm.IBP_CACHE, dlrm.RAW_CACHE))
    told = all(row.get("sets") for row in results.rows("dlrm", arm=dlrm.COLOSSALAI))  # Other rows had two sets of ids.
    return coded and (
        f"as CachedEmbeddingBag{'' if told else ', two sets of ids in turn'}: {span(coded)}, "
        f"{statistics.mean(coded):.2f} on average of {len(coded)}; raw rows with the cache {span(raw)}, "
        f"{statistics.mean(raw):.2f}"
    )


def bags_inside(results):
    """Returns how fast ColossalAI's class is if the GPU fetches coded rows for it, and how fast coded rows are beside
    the paper's baseline. Neither of these two has hits of a cache."""
    parts = []
    for arm in SCHEMES:
        inside = f"{dlrm.COLOSSALAI}, {arm}"
        pairs = ((inside, dlrm.NO_WRITE_BACK), (inside, dlrm.RAW_INSIDE), (arm, dlrm.CPU_UNIQUE))
        gains = [bag_pairs(results, own, other) for own, other in pairs]
        if all(gains):
            parts.append(f"{arm} " + ", ".join(f"{span(gain)} ({statistics.mean(gain):.2f})" for gain in gains))
    heads = (
        "inside CachedEmbeddingBag, as plain rows without write-back, as raw rows by the GPU; without it, as rows that "
        "the CPU gathers into new pinned memory; means in brackets:"
    )
    return parts and listed([heads, *parts])


def streamed_weights(results):
    """Returns the time of a token with compressed weights, over that with raw weights through the same hooks."""
    parts = []
    for dtype in in_order(row["dtype"] for row in results.rows("weights", arm="ibp")):
        rows = results.rows("weights", arm="ibp", dtype=dtype, prompt=256)
        row = max(rows, key=lambda row: row["sms"])
        raw = results.row("weights", arm="raw through hooks", dtype=dtype, prompt=256, rows=row["rows"])
        parts.append(f"{kind(row)} {percent(row['ms'] / raw['ms'], 0)}")
    parts = ["a token, of the time with raw weights through the same hooks: " + ", ".join(parts)]
    for plain, coded in flexgen_runs(results):
        times = [f"a token in {percent(coded['token_s'] / plain['token_s'], 0)} of the time"]
        if plain.get("request_s"):
            times.append(f"a request in {percent(coded['request_s'] / plain['request_s'], 0)}")
        parts.append(f"FlexGen, {kind(plain)}: {', '.join(times)}, {percent(coded['savings'])} less host memory")
    return listed(parts)


def flexgen_runs(results):
    """Yields (row of FlexGen, row of FlexGen with ibp) for each dtype."""
    for plain in results.rows("flexgen_opt", arm="FlexGen"):
        if coded := results.row("flexgen_opt", arm="FlexGen, ibp", dtype=plain["dtype"]):
            yield plain, coded


def cache_rows(results):
    """Returns the time that ibp saves on rows of chosen tokens and on whole requests, over each of the arms that the
    case has."""
    rows = by_arm(reading.whole(results.rows("kv_rows"))).items()
    rows_of_requests = results.rows("kv_request", workers=None)
    requests = by_arm(rows_of_requests, lambda row: f"{request_name(row)}, learning included").items()
    others = "cpu index + copy", "raw by kernel", reference.THEIRS
    parts = [
        f"{case}: {', '.join(percent(less_time(arms, other, column), 0) for other in others if other in arms)}"
        for found, column in ((rows, "us"), (requests, "request_s"))
        for case, arms in found
    ]
    heads = "less time than the CPU's gather, than raw rows by kernel, than by the paper's code:<br>"
    return heads + listed([*parts, *fork_requests(results)])


def fork_requests(results):
    """Yields the time that ibp saves on a request of InfiniGen's fork, over each of the other arms."""
    for case, arms in by_arm(results.rows("infinigen")).items():
        saved = (f"{percent(less_time(arms, other, 'request_s'), 0)} than {other}" for other in arms if other != "ibp")
        if "ibp" in arms:
            yield f"InfiniGen's fork, {case.split(',')[0]}, a request takes less time: {', '.join(saved)}"


def request_name(row):
    """Returns the model of a row of kv_request.csv, or "a request" for the shape that has no name."""
    name = row.get("case", "").split(", ")[0]
    return name if name.startswith("OPT-") else "a request"


def less_time(arms, other, column):
    """Returns the share of an arm's time that ibp saves."""
    return 1 - arms["ibp"][column] / arms[other][column]


def chunk_savings(results):
    """Returns the savings by chunk size for the sets that are nearest to Products: dense FP32 rows of about 100
    values."""
    parts = []
    for name in ("kokoro", "ncf mlp_user"):
        rows, best = results.rows("chunks", set=name, dtype="float32"), {}
        for row in rows:
            size = row["chunk_bytes"]
            best[size] = max(row, best.get(size, row), key=lambda row: row["savings"])
        saved = "/".join(f"{100 * row['savings']:.1f}" for row in best.values())
        most = percent(max(row["savings"] for row in rows if row["tau"] == 1))
        parts.append(f"{name} {saved} %, at {span([row['tau'] for row in best.values()])}; at 1 {most}")
    return listed([f"{'/'.join(map(str, best))} B, at the best threshold:", *parts])


# Measurements of gathers by the CPU through pinned memory: name of the CSV, arm, other columns.
PINNED_GATHERS = (
    ("copy_threads", "cpu pinned", {}),
    ("copy_threads", "cpu pipelined", {}),
    ("kv_rows", "cpu index + copy", {}),
    ("gather", "cpu pipelined", {"case": "normal 0.02", "dtype": "bfloat16"}),
)


def workers(results):
    """Returns the CPU's rates by threads, its best rate through pinned memory, and the smallest number of SMs within 5
    % of the highest rate."""
    parts = []
    for row_bytes in (256, 1024, 4096):
        cpu = results.rows("copy_threads", arm="cpu index + copy", row_bytes=row_bytes)
        coded = results.rows("copy_threads", arm="planes slots", row_bytes=row_bytes)
        pinned = [
            row["gbps"]
            for name, arm, wanted in PINNED_GATHERS
            for row in results.rows(name, arm=arm, row_bytes=row_bytes, **wanted)
        ]
        most = max(row["gbps"] for row in coded)
        few = min(row["workers"] for row in coded if row["gbps"] >= 0.95 * most)
        threads = f"{fine_number(cpu[0]['gbps'])} to {fine_number(max(row['gbps'] for row in cpu))}"
        parts.append(f"{size_name(row_bytes)}: {threads}, {number(max(pinned))}, {number(most)} from {few} SMs")
    commits = {row["commit"] for row in results.rows("copy_threads") if row.get("commit")}
    several = f"; rows of {len(commits)} commits" if len(commits) > 1 else ""
    heads = f"`x[ids].to()`, through pinned memory, coded rows within 5 % of the most{several}:"
    return listed([heads, *parts, *workers_of_requests(results)])


def workers_of_requests(results):
    """Yields the times of a token by threads and by SMs, within a request whose rows are in host memory."""
    arms = {}
    for row in results.rows("kv_request"):
        if row.get("workers"):
            arms.setdefault(row["arm"].rpartition(" by ")[0], []).append(row)
    for arm, rows in arms.items():
        times, counts = ("/".join(map(text, rows)) for text in (step_time, lambda row: str(row["workers"])))
        yield f"in a request, ms of a token and layer, {arm}: {times} by {counts} {rows[0]['arm'].split(' ')[-1]}"


def step_time(row):
    return fine_number(row["step_ms"])


CLUSTERED_SETS = ("ncf mlp_user", "kokoro", "huge smooth 3D field")  # The largest field stands for the paper's.


def cluster_savings(results):
    """Returns the savings of one cluster, of the best number of clusters with k-means, and of the best with the
    library."""
    parts = []
    for name in CLUSTERED_SETS:
        rows = results.rows("more_clusters", set=name, method="k-means")
        own = results.rows("more_clusters", set=name, method="ibp.compress")
        best, most = (max(found, key=lambda row: row["savings"]) for found in (rows, own))
        found = (f"{percent(row['savings'])} ({row['clusters']})" for row in (best, most))
        parts.append(f"{name} {percent(rows[0]['savings'])}, {', '.join(found)}")
    return listed(parts)


def means(rows, name, column):
    """Returns {value in the column `name`: mean of `column`}, for the arms or methods that all sets have."""
    found = {}
    for row in rows:
        if row[column] is not None:
            found.setdefault(row[name], []).append(row[column])
    most = max(map(len, found.values()), default=0)
    return {value: statistics.mean(of) for value, of in found.items() if len(of) == most}


def rows_of_kind(results, label):
    """Returns the rows of transfers.csv for a column of the paper's table 1."""
    names, dtype = SETS_OF_TRANSFERS[label]
    return [row for name in names for row in results.rows("transfers", case=name, dtype=dtype)]


def transfer_gains(results):
    """Returns, by the paper's columns, the lowest and highest gain of a column's sets: of ibp, of auto, and of the
    other codec that is the best one for each set."""
    parts = []
    for label in SETS_OF_TRANSFERS:
        rows = rows_of_kind(results, label)
        gains = [[row["gain"] for row in rows if row["arm"] == arm] for arm in ("ibp", "auto")]
        others = [row for row in rows if row["arm"].startswith((NVCOMP, ratio.NDZIP))]
        others = [row for row in others if row["gain"] and not row["arm"].endswith("by row")]
        best = [max(of.values(), key=lambda row: row["gain"]) for of in by_arm(others).values()]
        if rows:
            spans = [span(found) for found in (*gains, [row["gain"] for row in best]) if found]
            names = f" ({', '.join(in_order(row['arm'].removeprefix(NVCOMP) for row in best))})" if best else ""
            parts.append(f"{label} {', '.join(spans)}{names}")
    return listed(["ibp, auto, the best other codec (copied, then decoded, if not pipelined):", *parts])


def encode_times(results):
    own, masks = ([row["encode_ms"] for row in results.rows("transfers", arm=arm)] for arm in ("planes", "ibp"))
    others = [row["encode_ms"] for row in results.rows("transfers") if row["arm"].startswith(NVCOMP)]
    others = [value for value in others if value]
    mib = max(row["table_bytes"] for row in results.rows("transfers")) / 2**20
    return (
        f"{mib:.0f} MiB: ibp {span(masks, ' ms', 1)}, planes {span(own, ' ms', 1)}, nvCOMP's codecs "
        f"{span(others, ' ms', 1)}<br>4 GiB, ibp by one threshold: {percent(analysis_share(results), 0)} analysis"
    )


def analysis_share(results):
    """Returns the share of analysis in the time of choosing masks from all rows and compressing, in device memory."""
    analysis, coding = (
        1 / results.row("codec", case="4 GiB, normal 0.02", arm=arm)["gbps"] for arm in ("analyze", "compress")
    )
    return analysis / (analysis + coding)


def analysis_headline(results):
    yield "analysis", analysis_share(results), 0.5


def codec_savings(results):
    """Returns, by the paper's columns, the savings of the paper's choice, of planes, and of the best other method."""
    parts = []
    for label, (names, dtype) in SETS_OF_SAVINGS.items():
        saved = means(
            [row for name in names for row in results.rows("ratio", set=name, dtype=dtype)], "method", "savings"
        )
        best = max((method for method in saved if method not in ratio.OURS), key=saved.get)
        shown = ", ".join(percent(saved[method]) for method in ("paper", "planes", best))
        parts.append(f"{label} {shown} ({best.removeprefix(NVCOMP)})")
    return listed(parts)


def named(row):
    """Returns the name of a set, and its dtype if that is not FP32."""
    return row["set"] + ("" if row["dtype"] == "float32" else f" {kind(row)}")


def packed_bits(results):
    parts = []
    for name, dtype in SETS[:-1]:
        row = results.row("bits", set=name, dtype=dtype)
        shares = (f"{100 * row[column]:.0f}" for column in ("bit_pack", "group_pack", "invariant"))
        parts.append(f"{named(row)} {'/'.join(shares)} %")
    return listed(parts)


def sampled_ratios(results):
    """Returns how many times smaller sets become with codebooks of 1, 10 and 100 % of the rows: the lowest and the
    highest."""
    parts = []
    for name, dtype in (*SETS[:5], ("V-cache", "float16")):
        rows = results.rows("sampling", set=name, dtype=dtype, scheme="ibp")
        found = {row["sample"]: row["savings"] for row in rows}
        parts.append(f"{named(rows[0])} {span([1 / (1 - found[share]) for share in (0.01, 0.1, 1)])}")
    return listed(parts)


def graph_sets(results):
    rows = results.rows("gnn", arm="ibp")
    sizes, tables = [row["row_bytes"] for row in rows], [row["table_gib"] for row in rows]
    return f"rows of {span(sizes, ' B', 0)}, {span(tables, ' GiB', 1)}"


def cached_rows(results):
    """Returns how many more compressed than raw rows a cache of equal bytes holds."""
    cases = by_arm(results.rows("gnn_cache", cache_percent=1))
    parts = []
    for case, arms in cases.items():
        raw, coded = (arms[f"{arm}, cache of 1 %"]["held_rows"] for arm in ("raw rows", "ibp"))
        parts.append(f"{case}: {coded / raw:.2f} times {raw:,}")
    return listed(parts)


def compress_times(results):
    """Returns the times for the largest tensors by place, and those for the paper's largest one in place. If these were
    not measured, computes them, for a codebook that is learned from a sample."""
    largest = {
        where: max(results.rows("compress", arm=arm), key=lambda row: row["rows"] * row["row_bytes"])
        for arm, where in (("on the GPU", "in device memory"), ("pinned", "pinned"), ("pageable", "pageable"))
    }
    parts = [
        f"{row['rows'] * row['row_bytes'] / 2**30:.0f} GiB {where}: {row['ms']:.1f} ms"
        for where, row in largest.items()
    ]
    if in_place := [row for row in results.rows("compress") if row.get("checked_rows")]:
        times = (f"{row['arm'].removeprefix('in place, ')} {row['ms'] / 1000:.1f} s" for row in in_place)
        return listed([*parts, f"{in_place[0]['case'].rpartition(', ')[2]} in place: {'; '.join(times)}"])
    reckoned = (f"{where} {174 / largest[where]['gbps']:.1f} s" for where in ("pinned", "pageable"))
    return listed([*parts, f"174 GB reckoned, by a sample of the rows: {', '.join(reckoned)}"])


def mean_of(rows, column):
    return statistics.mean(row[column] for row in rows)


def aligned_gain(results):
    yield "512 B", aligned_gains(results)[512], 1.25


def ideal_at_most_savings(results):
    for row_bytes, theirs in ((256, 0.5), (1024, 0.78), (4096, 0.86)):
        rows = results.rows("gather", arm="ibp slots", row_bytes=row_bytes)
        row = max(
            (row for row in rows if row["case"].startswith(SYNTHETIC)), key=lambda row: reading.savings_of(row["case"])
        )
        yield size_name(row_bytes), row["gbps"] / row["ideal_gbps"], theirs


def training_beside_fetches(results):
    """Yields the share by which training during fetches is shorter with compressed rows than with raw ones."""
    raw, coded = (results.row("gnn", arm=arm, case="cora, batch 1024")["beside_ms"] for arm in ("raw rows", "ibp"))
    yield "training", 1 - coded / raw, 0.12


def lookup_headline(results):
    """Yields the paper's comparison, of the class with ibp inside it and without; if it was not measured, that of a
    cache of ibp's with the class."""
    if gains := bag_pairs(results, dlrm.IBP_INSIDE, dlrm.NO_WRITE_BACK):
        yield "inside CachedEmbeddingBag", statistics.mean(gains), 2.8
    elif gains := bag_pairs(results, dlrm.IBP_CACHE):
        yield "over CachedEmbeddingBag", statistics.mean(gains), 2.8


def weight_headlines(results):
    for plain, coded in flexgen_runs(results):
        what = "request_s" if plain.get("request_s") else "token_s"
        yield f"over FlexGen {kind(plain)}", plain[what] / coded[what], 1.22
    wanted = {"dtype": "bfloat16", "prompt": 256, "rows": 1}
    raw = results.row("weights", arm="raw through hooks", **wanted)
    coded = max(results.rows("weights", arm="ibp", **wanted), key=lambda row: row["sms"])
    yield "over raw BF16 weights", raw["ms"] / coded["ms"], 1.25


def cache_row_headlines(results):
    cases = by_arm(reading.whole(results.rows("kv_rows"))).values()
    most = max(less_time(arms, "cpu index + copy", "us") for arms in cases)
    yield "less than the CPU's gather, rows, most", most, 0.37
    for name, arms in by_arm(results.rows("kv_request", workers=None), request_name).items():
        yield name, less_time(arms, "cpu index + copy", "request_s"), 0.27


def chunks_of_8_bytes(results):
    for name in ("kokoro", "ncf mlp_user"):
        rows = results.rows("chunks", set=name, dtype="float32", chunk_bytes=8)
        yield f"{name}, 8 B", max(row["savings"] for row in rows), 0.127


def cluster_headline(results):
    rows = results.rows("more_clusters", dtype="float32", method="k-means")
    yield "field", max(row["savings"] for row in rows if row["set"].endswith("field")), 0.47


def transfer_ratios(results):
    theirs = {"sparse": 9.7, "dense": 1.2, "DLRM": 1.1, "DLRM, 512 B": 1.1}
    theirs |= {"KV FP16": 1.02, "KV BF16": 1.27, "weights": 1.32}
    for label, figure in theirs.items():
        rows = [row for row in rows_of_kind(results, label) if row["arm"] == "ibp"]
        if rows:
            yield label, mean_of(rows, "gain"), figure


def savings_ratios(results):
    theirs = {"sparse": 0.929, "dense": 0.104, "DLRM": 0.083, "KV FP16": 0.045, "KV BF16": 0.234, "weights": 0.267}
    for label, figure in theirs.items():
        names, dtype = SETS_OF_SAVINGS[label]
        rows = [row for name in names for row in results.rows("ratio", method="paper", set=name, dtype=dtype)]
        if rows:
            yield label, mean_of(rows, "savings"), figure


def invariant_ratios(results):
    theirs = {"pubmed_1060rows": 0.894, "citeseer": 0.99, "cora": 0.992}
    for name, figure in theirs.items():
        yield name.split("_")[0], results.row("bits", set=name, dtype="float32")["invariant"], figure
    for dtype, figure in (("float16", 0.08), ("bfloat16", 0.27)):
        rows = [row for part in "KV" for row in results.rows("bits", set=f"{part}-cache", dtype=dtype)]
        yield f"KV {reading.DTYPE_NAMES[dtype]}", mean_of(rows, "invariant"), figure


def sampled_ratio_of_all(results):
    theirs = {"pubmed_1060rows": 7.35, "citeseer": 25.09, "cora": 26.34, "ncf mlp_user": 1.14}
    for name, figure in theirs.items():
        row = results.row("sampling", set=name, dtype="float32", scheme="ibp", sample=1)
        yield name.split("_")[0], 1 / (1 - row["savings"]), figure


def largest_graph(results):
    yield "", max(row["table_gib"] for row in results.rows("gnn", arm="ibp")) * 2**30 / 1e9, 174


def cached_row_ratios(results):
    theirs = {"pubmed": 6.84, "citeseer": 24.15, "dense 602": 1.11}
    for case, arms in by_arm(results.rows("gnn_cache", cache_percent=1)).items():
        if case in theirs:
            raw, coded = (arms[f"{arm}, cache of 1 %"]["held_rows"] for arm in ("raw rows", "ibp"))
            yield case, coded / raw, theirs[case]


IBP = (
    Row(
        "Figure 5",
        "ways to copy scattered, unaligned elements from the CPU's memory; kernels at another commit",
        "scattered.py",
        "by the GPU and aligned 25 % faster than by the GPU alone, of 25 GB/s",
        scattered_copies,
        compared=aligned_gain,
    ),
    Row(
        "Figure 7",
        "the rate of 100,000 synthetic rows (of 4 KiB 65,536) as a share of the ideal, in whole sectors",
        "gather.py",
        "50 to 90 % saved: 1 KB 78 %, 4 KB 86 %, 256 B half of the ideal at the end",
        shares_of_ideal,
        compared=ideal_at_most_savings,
    ),
    Row(
        "Figure 8; headline",
        "training of GraphSAGE; a random graph of 2.4 million nodes, without Legion",
        "gnn.py",
        "56 % faster than DGL, 74 % than Legion on average",
        graph_gains,
        ("gnn_pyg.py", "gnn_dgl.py"),
    ),
    Row(
        "Figure 9",
        "where the time of a batch goes; Cora, rows of 602",
        "gnn.py",
        "hardly any waiting left; training on Cora 12 % shorter",
        graph_parts,
        compared=training_beside_fetches,
    ),
    Row(
        "Figure 10; headline",
        "look-ups of embeddings, against CachedEmbeddingBag; 26 tables of random values",
        "dlrm.py",
        "180 % faster on average, 8 to 20 % by compression",
        lookups,
        compared=lookup_headline,
    ),
    Row(
        "Figure 11; headline",
        "FlexGen with Gemma-7B's weights in the CPU's memory; a Llama of 7 billion random weights, FlexGen with OPT",
        "weights.py",
        "22 % faster, weights loaded 25 % faster; LLMs 24 % faster",
        streamed_weights,
        ("flexgen_opt.py",),
        compared=weight_headlines,
    ),
    Row(
        "Figure 12",
        "fetches of InfiniGen with the KV-cache in the CPU's memory, 10 % of random rows; its fork itself with random "
        "weights",
        "kv_rows.py",
        "up to 37 % less time for KV transfers, 2 % by compression; 27 % for requests; FP16",
        cache_rows,
        ("kv_request.py",),
        compared=cache_row_headlines,
    ),
    Row(
        "Figure 13",
        "savings by size of chunks and threshold; FP32 embeddings in place of Products",
        "chunks.py",
        "1 B less than 3 %, 8 B to 12.7 %; best at 0.80 to 0.85; none at 1",
        chunk_savings,
        compared=chunks_of_8_bytes,
    ),
    Row(
        "Figure 14",
        "copying random BF16 rows with one thread of the CPU and more, GB/s",
        "copy_threads.py",
        "faster with more threads, never as fast as by the GPU",
        workers,
        ("kv_request.py",),
    ),
    Row(
        "Figure 15",
        "net savings with one cluster, with the best number, and by `ibp.compress`; smooth fields for the asteroid set",
        "more_clusters.py",
        "Reddit 12.0 % with one, 12.7 % with 477; asteroid 47 % with 13,725",
        cluster_savings,
        compared=cluster_headline,
    ),
    Row(
        "Table 1",
        "times as fast as raw rows or a raw copy, decoding included; least and most of a column's sets",
        "transfers.py",
        "sparse: Cascaded 8.6, IBP 9.7; dense FP32 1.2; DLRM 1.1; KV FP16 1.02, BF16 1.27; weights BF16 1.32",
        transfer_gains,
        compared=transfer_ratios,
    ),
    Row(
        "Table 2",
        "savings: the paper's choice, `planes`, the best other codec (nvCOMP, zstd and LZ4 by blocks of 64 KiB)",
        "ratio.py",
        "sparse: zstd 93.4 %, IBP 92.9; dense FP32 10.4; DLRM 8.3; KV FP16 4.5, BF16 23.4; weights BF16 26.7",
        codec_savings,
        compared=savings_ratios,
    ),
    Row(
        "Table 3",
        "time of compressing, in device memory",
        "transfers.py",
        "sparse 151.5, dense 53.2, DLRM 34.2, KV 42.8 and 40.9, weights 94.9 (units are lost); 50 to 70 % analysis",
        encode_times,
        compared=analysis_headline,
    ),
    Row(
        "Table 4",
        "bits removed by packing / by packing in groups / invariant in 80 % of the rows",
        "bits.py",
        "Pubmed 6.3 / 7.5 / 89.4 %, Citeseer 6.3 / 65.3 / 99.0, Cora 6.3 / 76 / 99.2, dense 0 / 0 / 13 to 15, KV FP16 "
        "0 / 2 / 8, BF16 0 / 0.1 / 27",
        packed_bits,
        compared=invariant_ratios,
    ),
    Row(
        "Table 5",
        "times smaller with a codebook of 1 / 10 / 100 % of the rows",
        "sampling.py",
        "Pubmed 7.37 / 7.34 / 7.35, Citeseer 25.09, Cora 26.36 / 26.36 / 26.34, DLRM 1.11 / 1.13 / 1.14, KV FP16 1.03 "
        "/ 1.06 / 1.05",
        sampled_ratios,
        compared=sampled_ratio_of_all,
    ),
    Row(
        "Table 6",
        "sizes of the graphs",
        "gnn.py",
        "rows of 400 B to 34 KB, 0.5 to 174 GB",
        graph_sets,
        compared=largest_graph,
    ),
    Row(
        "Table 7",
        "rows that a cache of 1 % of the bytes holds",
        "gnn_cache.py",
        "Pubmed 6.84, Citeseer 24.15, Cora 25.88, dense 1.11 to 1.13 times",
        cached_rows,
        compared=cached_row_ratios,
    ),
    Row(
        "Headline: preprocessing",
        "time to choose and to compress; normal BF16",
        "compress.py",
        "half a second to 3 minutes; 174 GB 139 s, 84 of them analysis",
        compress_times,
    ),
)


# ---- DietGPU -------------------------------------------------------------------------------------------------------

FLOATS = ("float16", "bfloat16", "float32", "float64")


def output_shares(name):
    """Returns function(Results) -> output over input of planes, and the bound of bits.csv."""

    def ours(results):
        parts = []
        for dtype in FLOATS:
            if row := results.row("ratio", set=name, dtype=dtype, method="planes"):
                bound = results.row("bits", set=name, dtype=dtype)["bound"]
                parts.append(f"{kind(row)} {1 - row['savings']:.3f} ({1 - bound:.3f})")
        return ", ".join(parts)

    return ours


# Measurements of coding in device memory, in the order in which they are preferred: name of the CSV, and its arm.
DEVICE_CODERS = {
    "encode": (("encode_into", "one tensor"), ("codec", "planes encode"), ("families", "planes encode")),
    "decode": (("encode_into", "decode"), ("codec", "planes decode"), ("families", "planes decode")),
}


def device_gbps(results, case, what):
    """Returns GB/s in device memory by dtype. Each is from the first script that has the dtype. case: the start of the
    cases' names."""
    found = {}
    for name, arm in DEVICE_CODERS[what]:
        rows = [row for row in results.rows(name, arm=arm) if row["case"].startswith(case)]
        rows = [row for row in rows if not row["case"].endswith(", fast") and row["row_bytes"] >= 2048]
        most = max((row["sms"] for row in rows), default=0)
        best = charts.best_by([row for row in rows if row["sms"] == most], lambda row: row["dtype"])
        found = best | found
    return found


def device_rates(case, what):
    """Returns function(Results) -> the rates as text, beside the rate of copy_."""

    def ours(results):
        found = device_gbps(results, case, what)
        rates = (f"{reading.DTYPE_NAMES[dtype]} {number(found[dtype])}" for dtype in FLOATS if dtype in found)
        copy = results.row("encode_into", case="device", arm="copy_")
        return f"GB/s: {', '.join(rates)}, `copy_` {number(copy['gbps'])}"

    return ours


ONE_THREAD, ALL_THREADS = "normal 0.02, 1 thread", "normal 0.02, 16 threads"  # These are cases of cpu.csv.


def against_a_cpu(results, what, other):
    """Returns the GPU's rate, and its ratio to those of one thread of the CPU and of 16."""
    gbps = device_gbps(results, "normal 0.02", what)["bfloat16"]
    cpus = {
        case.removeprefix("normal 0.02, "): row["gbps"]
        for case in (ONE_THREAD, ALL_THREADS)
        if (row := results.row("cpu", case=case, arm=other, dtype="bfloat16"))
    }
    times = (f"by {name} {fine_number(cpu)}: {number(gbps / cpu)} times" for name, cpu in cpus.items())
    return f"{number(gbps)} GB/s, {other} {', '.join(times)}"


def against_rans(results):
    """Returns the GPU's rate, and its ratio to an rANS on the CPU, if one is measured, and to our own CPU coder."""
    arms = (f"{arm} decompress" for arm in ("rans", "rans of bytes"))
    found = [arm for arm in arms if results.row("cpu", case=ONE_THREAD, arm=arm)]
    return listed(against_a_cpu(results, "decode", arm) for arm in [*found, "planes decode"])


def times_rans(results):
    if cpu := results.row("cpu", case=ONE_THREAD, arm="rans of bytes decompress"):
        yield "rans of bytes, 1 thread", device_gbps(results, "normal 0.02", "decode")["bfloat16"] / cpu["gbps"], 160


def against_zstd(results):
    ways = (("encode", "zstd -1 compress"), ("decode", "zstd -1 decompress"))
    saved = {row["method"]: row["savings"] for row in results.rows("ratio", set="normal 0.02", dtype="bfloat16")}
    sizes = f"output over input: planes {1 - saved['planes']:.2f}, {ratio.ZSTD} {1 - saved[ratio.ZSTD]:.2f}"
    return listed([*(against_a_cpu(results, *way) for way in ways), sizes, *against_zstd_simulated(results)])


def against_zstd_simulated(results):
    """Yields the ratio of the GPU's rate to that of zstd on one thread for each simulation, if both are measured."""
    for name, *_ in sets.SIMULATIONS:
        times = list(times_zstd_simulated(results, name))
        if times:
            yield f"{name}, 1 thread: {', '.join(f'{what} {number(of)} times' for what, of in times)}"


def times_zstd_simulated(results, name):
    for what, other in (("encode", "zstd -1 compress"), ("decode", "zstd -1 decompress")):
        ours = results.row("codec", case=codec.SIZED + name, arm=f"planes {what}")
        theirs = results.row("cpu", case=f"{name}, 1 thread", arm=other)
        if ours and theirs:
            yield what, ours["gbps"] / theirs["gbps"]


def simulated_shares(results):
    """Returns output over input of planes and of zstd for the simulations."""
    parts = []
    for name, *_ in sets.SIMULATIONS:
        found = {row["method"]: 1 - row["savings"] for row in results.rows("ratio", set=name)}
        parts.append(f"{name} {found['planes']:.3f}, {ratio.ZSTD} {found[ratio.ZSTD]:.3f}")
    return listed(parts)


def simulated_ratios(results):
    rows = (results.row("ratio", set=name, method="planes") for name, *_ in sets.SIMULATIONS)
    yield "mean", statistics.mean(1 - row["savings"] for row in rows), 0.89


def shares_of_memory(case, what, dtype, theirs):
    """Returns function(Results) -> rates, as shares of what `copy_` reads and writes."""

    def compared(results):
        memory_gbps = 2 * results.row("encode_into", case="device", arm="copy_")["gbps"]
        yield reading.DTYPE_NAMES[dtype], device_gbps(results, case, what)[dtype] / memory_gbps, theirs

    return compared


def output_ratios(name, theirs, method="planes", suffix=""):
    """Returns function(Results) -> figures to compare. theirs: the paper's, by dtype of FLOATS. suffix: the end of
    labels."""

    def compared(results):
        for dtype, figure in zip(FLOATS, theirs):
            if row := results.row("ratio", set=name, dtype=dtype, method=method):
                yield kind(row) + suffix, 1 - row["savings"], figure

    return compared


def sparse_shares(results):
    """Returns output over input with the list of elements that are not zero, and without it; and by an rANS with a
    bitmap and without."""
    parts = [output_shares(ratio.SPARSE_SET)(results)]
    for label, method in (
        ("without the list", ratio.NO_LIST),
        ("rANS, bitmap", ratio.RANS_BITMAP),
        ("rANS alone", ratio.RANS),
    ):
        if rows := results.rows("ratio", set=ratio.SPARSE_SET, method=method):
            parts.append(f"{label} " + ", ".join(f"{1 - row['savings']:.2f}" for row in rows))
    return listed(parts)


def shares_by_rans(*methods, **wanted):
    """Returns function(Results) -> output over input by each of the methods, of all sets that have the last one."""

    def ours(results):
        parts = []
        for last in results.rows("ratio", method=methods[-1], **wanted):
            rows = (results.row("ratio", set=last["set"], dtype=last["dtype"], method=method) for method in methods)
            parts.append(f"{last['set']} " + ", ".join(f"{1 - row['savings']:.3f}" for row in rows))
        return listed(parts) or NOT_YET

    return ours


def coders_compared(results):
    for label, method, theirs in (("two", ratio.RANS, 0.87), ("one", ratio.RANS_ONE, 0.90)):
        if row := results.row("ratio", set="normal 1", dtype="float64", method=method):
            yield label, 1 - row["savings"], theirs


def sparse_ratios(results):
    yield from output_ratios(ratio.SPARSE_SET, (0.49, 0.40, 0.45, 0.45))(results)
    yield from output_ratios(ratio.SPARSE_SET, (0.76, 0.66, 0.83, 0.85), ratio.NO_LIST, " without")(results)


def times_zstd(results):
    for label, what, other, theirs in (
        ("coding", "encode", "zstd -1 compress", 360),
        ("decoding", "decode", "zstd -1 decompress", 141),
    ):
        cpu = results.row("cpu", case=ONE_THREAD, arm=other)["gbps"]
        yield f"{label}, 1 thread", device_gbps(results, "normal 0.02", what)["bfloat16"] / cpu, theirs


DIETGPU = (
    Row(
        "Section 3.1",
        "output over input of FP64, whose two coded bytes have a coder each, or one for both; an rANS on the CPU",
        "ratio.py",
        "N(0, 1), by entropy: two 0.87, one 0.90",
        shares_by_rans(ratio.RANS, ratio.RANS_ONE),
        compared=coders_compared,
    ),
    Row(
        "Section 3.3",
        "output over input of FP32 with a bitmap of zeros, as it is and coded; an rANS on the CPU",
        "ratio.py",
        "coded for further gains",
        shares_by_rans(ratio.RANS_BITMAP, ratio.RANS_CODED_BITMAP, dtype="float32"),
    ),
    Row(
        "Section 5.1.1, chart",
        "rate of compressing floats in the GPU's memory; FP16 by `codec.py`, FP64 by `families.py`",
        "encode_into.py",
        "a fifth of the memory's 500 GB/s, over 90 GB/s at best",
        device_rates("normal", "encode"),
        ("codec.py", "families.py"),
        compared=shares_of_memory("normal", "encode", "bfloat16", 0.2),
    ),
    Row(
        "Section 5.1.2, chart",
        "rate of decompressing them; likewise",
        "encode_into.py",
        "a fifth of the memory's rate",
        device_rates("normal", "decode"),
        ("codec.py", "families.py"),
        compared=shares_of_memory("normal", "decode", "bfloat16", 0.2),
    ),
    Row(
        "Table 1",
        "output over input of N(0, 1) (what entropy allows)",
        "ratio.py",
        "FP16 0.87, BF16 0.68 (0.66), FP32 0.83 (0.83), FP64 0.88 (0.87)",
        output_shares("normal 1"),
        compared=output_ratios("normal 1", (0.87, 0.68, 0.83, 0.88)),
    ),
    Row(
        "Table 2",
        "output over input of FP64 simulations; waves in shallow water and particles, simulated here",
        "ratio.py",
        "Comet 0.91, Head Impact 0.86, Control 0.90, Plasma 0.88; 0.89 on average",
        simulated_shares,
        compared=simulated_ratios,
    ),
    Row(
        "Section 5.1.5",
        "decoding against an rANS on the CPU, and our own CPU coder; BF16",
        "cpu.py",
        "90 GB/s against 0.55: over 160 times",
        against_rans,
        compared=times_rans,
    ),
    Row(
        "Section 5.1.6",
        "against zstd on one thread of the CPU; BF16 N(0, 0.02) in place of simulations",
        "cpu.py",
        "50 GB/s against 0.139 (360 times), sizes 0.91 against 0.88; 60 against 0.423 (141 times), 0.86 against 0.94",
        against_zstd,
        compared=times_zstd,
    ),
    Row(
        "Section 5.2.1, chart",
        "rate of compressing floats, half of them zero; FP32 and FP64 by `families.py`",
        "encode_into.py",
        "near 50 GB/s in FP64, a tenth of the memory's rate",
        device_rates("half zeros", "encode"),
        ("codec.py", "families.py"),
        compared=shares_of_memory("half zeros", "encode", "float64", 0.1),
    ),
    Row(
        "Section 5.2.2, chart",
        "rate of decompressing them; likewise",
        "encode_into.py",
        "below that of dense floats",
        device_rates("half zeros", "decode"),
        ("codec.py", "families.py"),
    ),
    Row(
        "Table 3",
        "output over input where half are zero (what entropy allows)",
        "ratio.py",
        "FP16 0.49, BF16 0.40, FP32 0.45, FP64 0.45; without the bitmap 0.76, 0.66, 0.83, 0.85",
        sparse_shares,
        compared=sparse_ratios,
    ),
)


# ---- cDMA ----------------------------------------------------------------------------------------------------------


def nets(results):
    return in_order(row["net"] for row in results.rows("densities"))


def densities_by_layer(results):
    """Returns densities of AlexNet's first layer, of the other convolutions and of the fully connected layers, each at
    the start, at its lowest and at the end."""
    rows = results.rows("densities", net="AlexNet", kind="relu")
    layers = densities_over_time(rows)
    groups = {
        "conv0": [found for layer, found in layers.items() if layer == "conv0"],
        "other conv": [found for layer, found in layers.items() if layer.startswith("conv") and layer != "conv0"],
        "fc": [found for layer, found in layers.items() if layer.startswith("fc")],
    }
    texts = (
        f"{name} " + ", ".join(span([100 * pick(of) for of in own], " %", 0) for pick in (first, min, last))
        for name, own in groups.items()
        if own
    )
    return "; ".join(filter(None, [*texts, cut_off(rows)]))


def densities_over_time(rows):
    """Returns {layer: its densities, in the order of the steps}."""
    layers = {}
    for row in rows:
        layers.setdefault(row["layer"], []).append(row["density"])
    return layers


def densities_of_deeper(results):
    """Returns, for all nets except AlexNet, the mean over nets of the mean density of convolutions after the first, at
    the start, at its lowest and at the end."""
    found, notes = [], []
    for net in nets(results):
        rows = results.rows("densities", net=net, kind="relu")
        layers = densities_over_time(row for row in rows if row["layer"] != "conv0" and row["layer"][:4] == "conv")
        if net != "AlexNet" and layers:
            means_of_layers = [100 * statistics.mean(of) for of in zip(*layers.values())]
            found.append([pick(means_of_layers) for pick in (first, min, last)])
            notes.append(cut_off(rows) and f"{net} {cut_off(rows)}")
    means_of_nets = ", ".join(f"{statistics.mean(of):.0f}" for of in zip(*found))
    return "; ".join(filter(None, [f"nets: {len(found)}, on average {means_of_nets} %", *notes]))


def first(values):
    return values[0]


def last(values):
    return values[-1]


def cut_off(rows):
    """Returns a text that says that a net's training was stopped before its end. The text is empty if it was not."""
    end = max(rows, key=lambda row: row["step"])
    if end["progress"] == 1:
        return ""
    planned, today = round(end["step"] / end["progress"]), {plan.net: plan.steps for plan in densities.PLANS}
    text = f"stopped after {end['step']} of {planned} steps"
    return text if today[end["net"]] == planned else f"{text}; today's script has {today[end['net']]}"


def densities_of_pools(results):
    """Returns how many pools are denser at the end than the layer before them."""
    denser, count = 0, 0
    for net in nets(results):
        rows = results.rows("densities", net=net)
        end = max(row["progress"] for row in rows)
        layers = [(row["layer"], row["density"]) for row in rows if row["progress"] == end]
        pairs = [(layers[i - 1][1], density) for i, (name, density) in enumerate(layers) if name.startswith("pool")]
        denser, count = denser + sum(pool >= before for before, pool in pairs), count + len(pairs)
    return f"{denser} of {count} pools, nets: {len(nets(results))}"


def net_sparsity(results):
    """Returns shares of zeros over all checkpoints, weighted by the sizes of layers, and the share in the sparsest
    layer."""
    found = {net: (zeros, most) for net, zeros, most in sparsities(results)}
    zeros, most = zip(*found.values())
    return (
        f"AlexNet {percent(found['AlexNet'][0])}; nets: {len(found)}, {percent(statistics.mean(zeros))} on average, at "
        f"most {percent(max(most))}"
    )


def sparsities(results):
    """Yields (net, share of zeros, share of zeros in its sparsest layer)."""
    for net in nets(results):
        rows = results.rows("densities", net=net)
        dense = sum(row["density"] * row["elements"] for row in rows) / sum(row["elements"] for row in rows)
        yield net, 1 - dense, 1 - min(row["density"] for row in rows)


GONE = 0.001  # With a loss below this a net learns nothing more.


def losses(results):
    found = [row for row in results.rows("densities", net="AlexNet", layer="conv1") if row["loss"] is not None]
    low = min(found, key=lambda row: row["density"])
    gone = next((row for row in found if row["loss"] < GONE), None)
    texts = [
        f"AlexNet: loss {found[0]['loss']:.2f} to {found[-1]['loss']:.4f}",
        gone and f"{gone['loss']:.4f} after {gone['step']} steps",
        f"conv1 least dense, {percent(low['density'], 0)}, after {low['step']} steps, at last "
        f"{percent(found[-1]['density'], 0)}",
        cut_off(found),
    ]
    return "; ".join(filter(None, texts))


SHOWN_COLUMNS = ("rle", "zvc", "zlib", "ibp")  # These columns are shown in three orders of memory.
# These columns of activation_ratios.csv are shown if rows have them.
RATIO_COLUMNS = ("rle", "zvc", "zlib", "zlib_64k", "ibp")


def end_of(rows):
    """Returns the rows of a net's last checkpoint."""
    last_one = max(row["progress"] for row in rows)
    return [row for row in rows if row["progress"] == last_one]


def ratios_at_the_end(results, layout, dtype):
    """Returns {net: the rows of its last sizes}."""
    rows = results.rows("activation_ratios", layout=layout, dtype=dtype)
    return {net: end_of([row for row in rows if row["net"] == net]) for net in in_order(row["net"] for row in rows)}


def times_smaller(rows, column):
    """Returns how many times smaller all layers of a net together become."""
    return sum(row["elements"] for row in rows) / sum(row["elements"] / row[column] for row in rows)


def layout_ratios(results):
    """Returns how many times smaller activations become by order of memory: the mean of the nets, and the layer that
    becomes smallest."""
    parts = []
    for layout in densities.LAYOUTS:
        found = ratios_at_the_end(results, layout, "float32").values()
        texts = mean_ratios(found, SHOWN_COLUMNS)
        parts.append(f"{layout}: {texts}")
    most = max(row["zvc"] for rows in ratios_at_the_end(results, "NCHW", "float32").values() for row in rows)
    return listed([*parts, f"nets: {len(found)}; zvc at most {most:.1f}"])


def mean_ratios(nets, columns):
    """Returns how many times smaller nets become on average, for the columns that all rows have."""
    columns = [column for column in columns if all(column in row for rows in nets for row in rows)]
    means = (statistics.mean(times_smaller(rows, column) for rows in nets) for column in columns)
    return ", ".join(f"{column} {mean:.2f}" for column, mean in zip(columns, means))


def net_ratios(results):
    """Returns how many times smaller the nets become in BF16, on average."""
    found = ratios_at_the_end(results, "NCHW", "bfloat16").values()
    return f"nets: {len(found)}: {mean_ratios(found, RATIO_COLUMNS)}"


def offload_steps(results):
    """Returns {net: {arm: milliseconds of a step}}."""
    steps = {}
    for row in results.rows("activations"):
        steps.setdefault(row["case"], {})[row["arm"]] = row["step_ms"]
    return steps


def offload_costs(results):
    """Returns the times of steps with all activations offloaded raw, over those of steps without offload."""
    steps = offload_steps(results).values()
    raw, torchs = ([arms[arm] / arms["plain"] for arms in steps] for arm in ("raw", "save_on_cpu"))
    return f"{span(raw)} times the step without offload, by torch's `save_on_cpu` {span(torchs)}"


def offload_gains(results):
    """Returns the times of steps with compressed offload: over no offload, and compared with the same hooks without
    compression."""
    steps = offload_steps(results)
    gains = [arms["raw"] / arms["ibp"] - 1 for arms in steps.values()]
    slower = sum(gain < 0 for gain in gains)
    return listed(
        [
            f"{span([arms['ibp'] / arms['plain'] for arms in steps.values()])} times the step without offload",
            f"{percent(statistics.median(gains), 0)} faster than without coding in the median, "
            f"{percent(statistics.mean(gains), 0)} on average, {slower} of {len(gains)} nets slower",
            *(
                f"{arm} {statistics.median(found):.2f} times the rate of {other} in the median"
                for arm, other in FURTHER_ARMS
                if (found := times_of_arms(results, arm, other))
            ),
            *throttled_steps(results),
        ]
    )


# Arms that only some nets have, and the arms with which they are compared.
FURTHER_ARMS = ((activations.IBP_FEW, activations.IBP), (activations.LISTED_ZEROS, activations.RAW))


def throttled_steps(results):
    """Yields, for each net, the rates of steps by numbers of SMs over that with all SMs, and at which rate bytes are
    sent."""
    for net, arms in by_arm(results.rows("throttle", what=throttle.SWEEP)).items():
        found = [(row["sms"], row) for arm, row in arms.items() if arm.startswith(f"{activations.IBP} by ")]
        shares = "/".join(f"{arms[activations.IBP]['step_ms'] / row['step_ms']:.2f}" for _, row in found)
        rates = "/".join(number(row["out_gbps"]) for _, row in found)
        counts = "/".join(str(sms) for sms, _ in found)
        yield f"{net} by {counts} SMs: {shares} times the rate by all, {rates} GB/s to the host"


def times_of_arms(results, arm, other):
    """Returns the speed-up of an arm's steps over another arm's, for each net that has both."""
    return [arms[other] / arms[arm] for arms in offload_steps(results).values() if {arm, other} <= arms.keys()]


def first_layer(results):
    rows = results.rows("densities", net="AlexNet", layer="conv0")
    yield "conv0", rows[-1]["density"], 0.5


def compared_layouts(results):
    nets = ratios_at_the_end(results, "NCHW", "float32").values()
    yield "ZVC", statistics.mean(times_smaller(rows, "zvc") for rows in nets), 2.6
    yield "most", max(row["zvc"] for rows in nets for row in rows), 13.8
    yield "zlib", statistics.mean(times_smaller(rows, "zlib") for rows in nets), 2.76


def zlib_over_zvc(results):
    nets = ratios_at_the_end(results, "NCHW", "bfloat16").values()
    yield "zlib/ZVC", statistics.mean(times_smaller(rows, "zvc") / times_smaller(rows, "zlib") for rows in nets), 0.97


def offload_headlines(results):
    gains = [arms["raw"] / arms["ibp"] for arms in offload_steps(results).values()]
    yield "over hooks without coding, mean", statistics.mean(gains), 1.53
    yield "most", max(gains), 1.79
    if throttled := times_of_arms(results, activations.IBP_FEW, activations.IBP):
        yield "throttled, over all SMs", statistics.median(throttled), 0.94


def offload_losses(results):
    lost = [1 - arms["plain"] / arms["raw"] for arms in offload_steps(results).values()]
    yield "mean", statistics.mean(lost), 0.51
    yield "most", max(lost), 0.63


def sparsity_headlines(results):
    found = {net: (zeros, most) for net, zeros, most in sparsities(results)}
    yield "AlexNet", found["AlexNet"][0], 0.494
    yield "mean", statistics.mean(zeros for zeros, _ in found.values()), 0.62
    yield "most", max(most for _, most in found.values()), 0.93


CDMA = (
    Row(
        "Figure 3",
        "what offloading all activations costs; the same hooks without coding stand for vDNN",
        "activations.py",
        "51 % of the performance lost on average, at most 63 %",
        offload_costs,
        compared=offload_losses,
    ),
    Row(
        "Figure 4",
        "densities of AlexNet's layers in training: at first, least, at last",
        "densities.py",
        "conv0 within 2 points of 50 %; the others fall fast and rise again; fc the sparsest",
        densities_by_layer,
        compared=first_layer,
    ),
    Row("Figure 5", "pools denser than what they pool", "densities.py", "always", densities_of_pools),
    Row(
        "Figure 6",
        "mean densities of deeper nets' convolutions: at first, least, at last",
        "densities.py",
        "as AlexNet",
        densities_of_deeper,
    ),
    Row("Figure 7", "loss and density", "densities.py", "density falls with the loss, then rises slowly", losses),
    Row(
        "Figure 11; headline",
        "times smaller in three orders of memory; FP32",
        "densities.py",
        "ZVC 2.6 on average, at most 13.8, the same in all orders; zlib 2.76 in NCHW, less in others",
        layout_ratios,
        compared=compared_layouts,
    ),
    Row(
        "Figure 12",
        "bytes sent to the CPU; BF16, NCHW",
        "densities.py",
        "zlib 3 % less than ZVC on average",
        net_ratios,
        compared=zlib_over_zvc,
    ),
    Row(
        "Figure 13; headline",
        "steps with coded offload: time over a step without, rate over hooks without coding; random values",
        "activations.py",
        "53 % faster than vDNN on average, at most 79 %; throttled 94 % of it",
        offload_gains,
        ("throttle.py",),
        compared=offload_headlines,
    ),
    Row(
        "Headline: sparsity",
        "activations that are zero",
        "densities.py",
        "AlexNet 49.4 %; six nets 62 %, at most 93 %",
        net_sparsity,
        compared=sparsity_headlines,
    ),
)


# ---- Buddy Compression ---------------------------------------------------------------------------------------------

SLOTS = ("the paper's ratios", "slots of any size", "one target", "without 16 times")


def placed(target, spilled):
    return f"{target:.2f} with {percent(spilled)}"


def program_rows(results, slots):
    """Returns the row of each program of `spill.py --programs` at the paper's threshold."""
    return [
        row for row in results.rows("spill") if row["case"].startswith(spill.PROGRAM) and row["case"].endswith(slots)
    ]


def best_ratios(results):
    """Returns how many times smaller programs could be without a limit on what spills."""
    return ", ".join(
        f"{row['case'].removeprefix(spill.PROGRAM).split(',')[0]} {1 / (1 - row['savings']):.2f}"
        for row in program_rows(results, SLOTS[0])
    )


def chosen_ratios(results):
    """Returns the means of the programs: by tensor, with one target for all, and without the target for zeros."""
    found = {slots: program_rows(results, slots) for slots in SLOTS}
    return listed(
        f"{slots}: {placed(mean_of(rows, 'target'), mean_of(rows, 'spilled'))}" for slots, rows in found.items() if rows
    )


def entry_sizes(results):
    """Returns how many times smaller each program becomes under bit-plane compression."""
    found = {row["program"]: row["times_smaller"] for row in results.rows("entries")}
    return f"{', '.join(f'{name} {times:.2f}' for name, times in found.items())} times smaller"


def managed_reads(results):
    """Returns the time for reading a table in managed memory, or in slots and overflow, over that for reading it on the
    GPU, by the share of it that is elsewhere."""
    parts = []
    placed = [f"{spill.PLACED}, {where}" for where in (spill.SPILLED, spill.ON_PEER)]
    for arm in (spill.MIGRATED, spill.OVER_LINK, *placed):
        case = f"{spill.PEER}{spill.NOISE}" if arm in placed else spill.MANAGED
        rows = results.rows("spill", case=case, arm=arm)
        shown = [row for row in rows if round(row["spilled"], 2) in (0.1, 0.3, 0.5)]
        times = "/".join(f"{rows[0]['gbps'] / row['gbps']:.1f}" for row in shown)
        shares = "/".join(f"{100 * row['spilled']:.0f}" for row in shown)
        parts.append(rows and f"{arm}: {times} times as long at {shares} %")
    return listed(parts) or NOT_YET


def larger_batches(results):
    """Returns the largest batches in limited memory, and their images per second over the plain ones."""
    parts = []
    for case, arms in capped_steps(results).items():
        texts = (f"{arm.removesuffix(activations.CAPPED)} {rows}, {gain:.2f}" for arm, (rows, gain) in arms.items())
        parts.append(f"{case}: {'; '.join(texts)}")
    return listed(parts) or NOT_YET


def capped_steps(results):
    """Returns {net: {arm: (largest batch, its rate over plain's)}}."""
    cases = by_arm(row for row in results.rows("activations") if row["arm"].endswith(activations.CAPPED))
    plain = activations.PLAIN + activations.CAPPED
    return {
        case: {arm: (row["rows"], row["gbps"] / arms[plain]["gbps"]) for arm, row in arms.items()}
        for case, arms in cases.items()
        if plain in arms
    }


def larger_batches_compared(results):
    arms = capped_steps(results).get("VGG16", {})
    if of := arms.get(activations.IBP + activations.CAPPED):
        yield "VGG16, over plain", of[1], 1.3


def spilled_within_steps(results):
    """Returns the spill of each program that was measured within a step, placed by one profile."""
    parts = []
    for name in in_order(row["program"] for row in results.rows("moments")):
        rows = results.rows("moments", program=name)
        spilled = span([100 * row["spilled"] for row in rows], " %", 1)
        parts.append(f"{name} {span([row['ratio'] for row in rows])} with {spilled}")
    return ", ".join(parts)


def swept(results):
    """Returns the means of the programs at each threshold, in rows of either size."""
    rows = results.rows("thresholds", slots=SLOTS[0])
    texts = {}
    for threshold, row_bytes in itertools.product(*(in_order(row[name] for row in rows) for name in SWEPT)):
        own = [row for row in rows if (row["threshold"], row["row_bytes"]) == (threshold, row_bytes)]
        found = placed(mean_of(own, "ratio"), mean_of(own, "spilled"))
        texts.setdefault(threshold, []).append(f"{size_name(row_bytes)} {found}")
    lines = [f"{percent(threshold, 0)}: {', '.join(parts)}" for threshold, parts in texts.items()]
    return listed([f"nets: {len({row['program'] for row in rows})}", *lines]) if rows else NOT_YET


SWEPT = ("threshold", "row_bytes")
# These columns identify a table of spill.csv.
TABLE_OF = ("case", "dtype", "row_bytes", "target", "slot_bytes", "spilled")


def reads(results, where=spill.SPILLED, **wanted):
    """Yields (what was read, its row with overflow at the place `where`, the row of the same table on the device
    alone)."""
    for what in ("decode", "index_select"):
        spilled, alone = (
            {tuple(row[key] for key in TABLE_OF): row for row in results.rows("spill", arm=arm, **wanted)}
            for arm in (f"{what}, {where}", f"{what}, {spill.DEVICE}")
        )
        yield from ((what, row, alone[table]) for table, row in spilled.items() if table in alone)


NOT_YET = "not measured yet"
LINKS_GBPS = (50, 150)  # The paper's figure 11 has these links.


def decoded_spills(results):
    """Returns (row, the row of the same table on the device alone) for normal BF16 rows, in slots that rows without
    noise fit."""
    found = reads(results, case="normal 0.02")
    return [(row, alone) for what, row, alone in found if what == "decode" and not row["target"]]


def share_by_link(row, alone, link_gbps):
    """Returns the rate as a share of that on the device alone, if the bottleneck is the slower of the device and a
    link."""
    device_s = row["rows"] * row["row_bytes"] / alone["gbps"]
    return device_s / max(device_s, row["spilled_bytes"] / link_gbps)


def spilled_reads(results):
    """Returns the rates of decoding by the share that spills. Also computes them for links that were not measured; the
    paper simulates its links."""
    parts = []
    for row, alone in decoded_spills(results):
        shares = "/".join(f"{100 * share_by_link(row, alone, link):.0f}" for link in LINKS_GBPS)
        parts.append(
            f"{percent(row['spilled'], 0)} spilled: {percent(row['gbps'] / alone['gbps'], 0)}, "
            f"{percent(row['gbps'] / row['ideal_gbps'], 0)}; reckoned {shares} %"
        )
    over_nvlink = [
        f"{percent(row['spilled'], 0)}: {percent(row['gbps'] / alone['gbps'], 0)}"
        for what, row, alone in reads(results, spill.ON_PEER, case=f"{spill.PEER}normal 0.02")
        if what == "decode" and not row["target"]
    ]
    return listed([*parts, over_nvlink and f"overflow on another GPU, over NVLink 4, {', '.join(over_nvlink)}"])


def spilled_reads_compared(results):
    rows = [found for found in decoded_spills(results) if 0 < found[0]["spilled"] < 0.07]
    if rows:
        yield "150 GB/s reckoned", share_by_link(*rows[0], 150), 0.978


def headline_of_spill(results):
    rates = [row["gbps"] / alone["gbps"] for _, row, alone in reads(results) if row["spilled"] == 0]
    far = [
        row["gbps"] / alone["gbps"]
        for _, row, alone in reads(results, spill.ON_PEER, case=f"{spill.PEER}normal 0.02")
        if 0 < row["spilled"] < 0.5
    ]
    programs = program_rows(results, SLOTS[0])
    shares = [100 * row["gbps"] / row["ideal_gbps"] for row in programs]
    return listed(
        [
            programs and f"{mean_of(programs, 'target'):.2f}, decoded at {span(shares, ' %', 0)} of the bound",
            f"tables without spilled rows: {span(rates)} times the rate of the same table on the GPU",
            far and f"5 to 30 % of the rows spilled to another GPU, over NVLink: {span(far)} times",
        ]
    )


def best_ratio_compared(results):
    if rows := program_rows(results, SLOTS[0]):
        yield "", statistics.mean(1 / (1 - row["savings"]) for row in rows), 1.85


def chosen_ratio_compared(results):
    for slots, times, accesses in (("the paper's ratios", 1.5, 0.04), ("one target", 1.18, 0.32)):
        if rows := program_rows(results, slots):
            yield slots, mean_of(rows, "target"), times
            yield "accesses", mean_of(rows, "spilled"), accesses


def headline_compared(results):
    if rows := program_rows(results, SLOTS[0]):
        yield "", mean_of(rows, "target"), 1.5


BUDDY = (
    Row(
        "Figure 3",
        "how many times smaller memory could be; six nets in training",
        "spill.py",
        "HPC 2.51, deep learning 1.85",
        best_ratios,
        compared=best_ratio_compared,
    ),
    Row(
        "Figure 6",
        "entries of 128 bytes under bit-plane compression; six nets, batch 8",
        "entries.py",
        "mixed regions",
        entry_sizes,
    ),
    Row(
        "Figure 7",
        "times smaller, and rows that reach the slower memory; means of figure 3's nets",
        "spill.py",
        "HPC 1.9 with 0.08 %, deep learning 1.5 with 4 %; with one target for all 1.57 with 8 % and 1.18 with 32 %",
        chosen_ratios,
        compared=chosen_ratio_compared,
    ),
    Row(
        "Figure 8",
        "times smaller, and accesses over a step of training",
        "entries.py",
        "constant; SqueezeNet 1.49, ResNet-50 1.64 times smaller",
        spilled_within_steps,
    ),
    Row(
        "Figure 9",
        "times smaller, and accesses, by threshold; means of nets of figure 3, batch 8; rows of 2 KiB and of 128 bytes",
        "thresholds.py",
        "30 % chosen",
        swept,
    ),
    Row(
        "Figure 11",
        "rate by the share of rows that spill, over large enough memory, and over what memory and link allow; PCIe 5; "
        "the first reckoned for 50 and 150 GB/s",
        "spill.py",
        "150 GB/s: within 1 % (HPC) and 2.2 % (deep learning); 50 GB/s: over 20 % slower",
        spilled_reads,
        compared=spilled_reads_compared,
    ),
    Row(
        "Figure 12",
        "managed memory, part of it on the host; and a table with as much in overflow",
        "spill.py",
        "often slower than pinned memory",
        managed_reads,
    ),
    Row(
        "Figure 13",
        f"largest batches in {activations.CAPPED_GB} GB, rates over plain ones",
        "activations.py",
        "14 % faster, VGG16 30 %",
        larger_batches,
        compared=larger_batches_compared,
    ),
    Row(
        "Headline",
        "more memory within 2 % of the time; the nets of figure 3 and the tables of figure 11",
        "spill.py",
        "1.9 (HPC), 1.5 (deep learning)",
        headline_of_spill,
        compared=headline_compared,
    ),
)


# ---- nvCOMP's introduction -----------------------------------------------------------------------------------------


def gathers(*links):
    """Returns function(Results) -> all-gathers of the largest output with `auto`, compared with NCCL's, by link."""

    def ours(results):
        parts = []
        for link, what in itertools.product(links, ("weights", "integers")):
            rows = results.rows("collectives", case=f"{link}, all_gather_into_tensor, {what}")
            most = max(row["mib"] for row in rows)
            found = {row["arm"]: row for row in rows if row["mib"] == most}
            parts.append(
                f"{link}, {what}: NCCL {number(found['torch']['gbps'])} GB/s, `auto` "
                f"{found['auto']['over_torch']:.2f} times"
            )
        return listed(parts)

    return ours


TYPED_CODECS = {"nvcomp:cascaded": "Cascaded", "nvcomp:lz4": "LZ4", "planes": "planes"}


def typed_columns(results):
    """Returns how many times smaller typed columns become, and the rate of encoding and decoding together."""
    parts = []
    for name in ("sorted ids with runs", "dates", "strings as int32"):
        found = ((label, results.row("choose", case=name, arm=arm)) for arm, label in TYPED_CODECS.items())
        texts = (f"{label} {1 / (1 - row['savings']):.1f}, {fine_number(row['gbps'])}" for label, row in found if row)
        parts.append(f"{name}: " + "; ".join(texts))
    return listed(parts)


def best_gather(theirs, *links):
    """Returns function(Results) -> the all-gather with `auto` that gains most over NCCL's."""

    def compared(results):
        rows = [row for row in results.rows("collectives", arm="auto") if row["link"] in links]
        most = max((row for row in rows if "all_gather" in row["call"]), key=lambda row: row["over_torch"])
        yield f"over NCCL, {most['case'].replace('all_gather_into_tensor, ', '')}", most["over_torch"], theirs

    return compared


def typed_column_ratios(results):
    for case, arm, theirs in (
        ("sorted ids with runs", "nvcomp:cascaded", 80),
        ("strings as int32", "nvcomp:lz4", 71.8),
        ("strings as int32", "nvcomp:cascaded", 3.2),
    ):
        row = results.row("choose", case=case, arm=arm)
        yield f"{TYPED_CODECS[arm]} on {case.split(' ')[0]}", 1 / (1 - row["savings"]), theirs


NVCOMP_POST = (
    Row(
        "Figure 3",
        "all-gathers of columns of the mortgage set over four T4s; BF16 weights and int64 below 1,000 over two H200s",
        "collectives.py",
        "to 150 GB/s, 12 times as fast, on the sorted column; slower on floats",
        gathers("no peer access", "sockets"),
        compared=best_gather(12, "no peer access", "sockets"),
    ),
    Row(
        "Figure 4",
        "times smaller and GB/s by LZ4 and Cascaded; columns made here",
        "choose.py",
        "column 0: Cascaded 80, nearly twice LZ4, 56 GB/s on a T4; column 2: LZ4 71.8, Cascaded 3.2",
        typed_columns,
        compared=typed_column_ratios,
    ),
    Row(
        "Headline: DGX-1",
        "all-gathers over NVLink; as figure 3",
        "collectives.py",
        "2 to 4 times as fast on some columns",
        gathers("direct"),
        compared=best_gather(2, "direct"),
    ),
)

PAPERS = {
    "ibp": IBP,
    "dietgpu": DIETGPU,
    "cdma": CDMA,
    "buddy": BUDDY,
    "nvcomp": NVCOMP_POST,
}
# Items of the papers that are not measured here, with the reason.
NOT_MEASURED = {
    "ibp": {"Figures 1, 2, 3, 4, 6": "drawings and code"},
    "cdma": {
        "Figures 1, 2, 8": "drawings",
        "Figures 9, 10": "hardware that nobody can add to a GPU",
        "Table I": "data sheets",
        "Table II": "no net is trained on ImageNet here",
    },
    "buddy": {
        "Figures 1, 2, 4": "drawings",
        "Figures 5, 10, Tables 1, 2": "simulations of HPC programs, which are not run here",
    },
    "nvcomp": {"Figures 1, 2, 5, 6": "drawings"},
}


def csvs_of(name, results):
    """Returns {CSV: its rows} from which the table of one paper is written."""
    own = reading.Results(results.directory)  # This object has read no CSV yet.
    for row in PAPERS[name]:
        row.ours(own)
        row.ratios(own)
    return own.sheets


def table(name, results):
    """Returns the table of one paper."""
    lines = [
        [row.item, row.shows, f"`{row.script}`", row.theirs, row.ours(results), row.ratios(results)]
        for row in PAPERS[name]
    ]
    return reading.markdown(HEADS, lines)
