"""Writes PAPERS.md: every feature and figure of five papers, whether it is here, and where.

papers.csv has a row for each of them: the paper, what it is, its state, the scripts, CSVs and tests that show it, and
why it is only partly here. The table is kept by hand. A test checks that everything it names exists, and that it has
each item of reproduction.py.
"""

from collections import Counter
from pathlib import Path

from . import harness, reading, reproduction

SHEET = Path(__file__).with_name("papers.csv")
PAGE = SHEET.with_name("PAPERS.md")
STATES = ("yes", "part", "no")
TITLES = {
    "ibp": "Invariant Bit Packing",
    "dietgpu": "DietGPU",
    "cdma": "cDMA",
    "buddy": "Buddy Compression",
    "nvcomp": "NVIDIA's introduction of nvCOMP",
    "beyond": "In no paper",
}
# By paper, the name of a file in results/ and its caption.
PICTURES = {
    "cdma": ("activation_maps.png", "Zeros of AlexNet's outputs, black, by layer and progress of training"),
    "buddy": ("entries.png", "Bytes of 128-byte entries under bit-plane compression: a line a page of 8 KiB, blue few"),
}
HEADS = ("feature or figure", "state", "where", "what lacks")
INTRODUCTION = """# Papers

Written by `python -m benchmarks.claims` from [papers.csv](papers.csv): what each paper has, whether it is here, and the
script, CSV of [results/](results/) or test that shows it. *part*: an arm, a workload, data or a baseline is missing,
because it is not feasible here, by choice, or because nobody has made it yet; or the result is another one (not
confirmed).
[reproduction.md](../docs/reproduction.md) has the figures of both."""


def parts_of(name):
    """Returns the rows of one paper."""
    return [row for row in reading.read(SHEET) if row["paper"] == name]


def summary(results):
    """Returns a table that counts the parts of each paper by state."""
    counts = {title: Counter(row["state"] for row in parts_of(name)) for name, title in TITLES.items()}
    return reading.markdown(("paper", *STATES), [[title, *(of[s] for s in STATES)] for title, of in counts.items()])


def files_of(row):
    """Returns the names of scripts, CSVs and tests of a row."""
    return row["where"].split(", ") if row["where"] else []


def page():
    """Returns the text of PAPERS.md."""
    texts = [INTRODUCTION]
    for name, title in TITLES.items():
        lines = [
            [row["what"], row["state"], ", ".join(f"`{file}`" for file in files_of(row)), row["why"] or ""]
            for row in parts_of(name)
        ]
        texts.append(f"## {title}\n\n{reading.markdown(HEADS, lines)}")
        if missing := reproduction.NOT_MEASURED.get(name):
            reasons = "; ".join(f"{items} ({reason})" for items, reason in missing.items())
            texts.append(f"Not measured: {reasons}.")
        file, shown = PICTURES.get(name, ("", ""))
        if file and (harness.RESULTS / file).exists():
            texts.append(f"![{shown}](results/{file})")
    return "\n\n".join(texts) + "\n"
