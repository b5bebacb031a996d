"""CSVs of measurements, read, and their numbers as text."""

import csv

SYNTHETIC = "synthetic "  # cases "synthetic 12.5%" and so on; raw rows and the CPU's gathers are the case "synthetic"
NORMAL = "normal"
NVCOMP = "nvcomp "  # methods of ratio.csv and arms of transfers.csv that are codecs of nvCOMP
DTYPE_NAMES = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "float64": "FP64", "float8_e4m3fn": "FP8"}
# Columns whose values are names, even where a name looks like a number.
NAMES = {
    *("benchmark", "case", "arm", "set", "net", "layer", "program", "sizes", "map", "dtype"),
    *("gpu", "torch", "cuda", "commit", "reference"),
}


def value_of(name, text):
    """A cell: a name, an int, a float, other text, or None where the cell is empty."""
    if name in NAMES:
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text or None


def read(path):
    """The rows of a CSV without its comments; [] if there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [{name: value_of(name, text) for name, text in row.items()} for row in rows]


class Results:
    """The CSVs of a directory, each read once."""

    def __init__(self, directory):
        self.directory, self.sheets = directory, {}

    def rows(self, name, **wanted):
        """The rows of <name>.csv in which every named column has the wanted value."""
        if name not in self.sheets:
            self.sheets[name] = read(self.directory / f"{name}.csv")
        return [row for row in self.sheets[name] if all(row.get(key) == value for key, value in wanted.items())]

    def row(self, name, **wanted):
        """The row with these values, or None. ValueError: there are several, which may be unlike each other."""
        rows = self.rows(name, **wanted)
        if len(rows) > 1:
            raise ValueError(f"{name}.csv has {len(rows)} rows with {wanted}; wanted one")
        return rows[0] if rows else None


def whole(rows):
    """The rows of arms that may use the whole GPU, or none of it."""
    most = max((row["sms"] for row in rows), default=0)
    return [row for row in rows if row["sms"] in (0, most)]


def in_order(values):
    return list(dict.fromkeys(values))


def savings_of(case):
    """Of a synthetic case, as its name says them."""
    return float(case.removeprefix(SYNTHETIC).removesuffix("%")) / 100


def size_name(num_bytes):
    return f"{num_bytes // 1024} KiB" if num_bytes >= 1024 and num_bytes % 1024 == 0 else f"{num_bytes:,} B"


def kind(row):
    """The short name of its dtype."""
    return DTYPE_NAMES.get(row["dtype"], row["dtype"])


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def fine_number(value):
    """With two digits more where the value is small."""
    return number(value) if value >= 10 else f"{value:.2f}"


def percent(share, digits=1):
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"  # no "-0.0"


def markdown(heads, lines):
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [heads, ["---"] * len(heads), *lines])
