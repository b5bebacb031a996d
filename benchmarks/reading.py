"""Reads CSVs of measurements, and shows their numbers as text."""

import csv

# The names of cases begin with this, such as "synthetic 12.5%". Raw rows and the CPU's gathers have the case
# "synthetic".
SYNTHETIC = "synthetic "
NORMAL = "normal"
# Methods of ratio.csv and arms of transfers.csv begin with this text if they are codecs of nvCOMP.
NVCOMP = "nvcomp "
DTYPE_NAMES = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "float64": "FP64", "float8_e4m3fn": "FP8"}
# Columns whose values are names, even if they look like numbers.
NAMES = {
    *("benchmark", "case", "arm", "set", "net", "layer", "program", "sizes", "map", "dtype"),
    *("gpu", "torch", "cuda", "commit", "reference", "colossalai"),
}


def value_of(name, text):
    """Returns the value of a cell: a name, an int, a float, other text, or None if the cell is empty."""
    if name in NAMES:
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text or None


def read(path):
    """Returns the rows of a CSV without its comments, or [] if the file does not exist."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [{name: value_of(name, text) for name, text in row.items()} for row in rows]


class Results:
    """The CSVs of a directory. Each is read only once."""

    def __init__(self, directory):
        self.directory, self.sheets = directory, {}

    def rows(self, name, **wanted):
        """Returns the rows of <name>.csv in which every named column has the wanted value."""
        if name not in self.sheets:
            self.sheets[name] = read(self.directory / f"{name}.csv")
        return [row for row in self.sheets[name] if all(row.get(key) == value for key, value in wanted.items())]

    def row(self, name, **wanted):
        """Returns the row with these values, or None. Raises ValueError if there are several, which may differ."""
        rows = self.rows(name, **wanted)
        if len(rows) > 1:
            raise ValueError(f"{name}.csv has {len(rows)} rows with {wanted}; wanted one")
        return rows[0] if rows else None


def by_arm(rows, key=lambda row: row["case"]):
    """Returns {key: {arm: its row}}. Raises ValueError if an arm has two rows with one key, because rows that differ
    would be compared."""
    found = {}
    for row in rows:
        if found.setdefault(key(row), {}).setdefault(row["arm"], row) is not row:
            raise ValueError(f"{row['arm']} has two rows for {key(row)}; wanted a key that tells them apart")
    return found


def whole(rows):
    """Returns the rows of arms that may use the whole GPU, or that use none of it."""
    most = max((row["sms"] for row in rows), default=0)
    return [row for row in rows if row["sms"] in (0, most)]


def in_order(values):
    return list(dict.fromkeys(values))


def savings_of(case):
    """Returns the savings that the name of a synthetic case gives."""
    return float(case.removeprefix(SYNTHETIC).removesuffix("%")) / 100


def size_name(num_bytes):
    return f"{num_bytes // 1024} KiB" if num_bytes >= 1024 and num_bytes % 1024 == 0 else f"{num_bytes:,} B"


def kind(row):
    """Returns the short name of a row's dtype."""
    return DTYPE_NAMES.get(row["dtype"], row["dtype"])


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def fine_number(value):
    """Returns a number as text, with more digits if it is small."""
    return number(value) if value >= 10 else f"{value:.2f}"


def percent(share, digits=1):
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"  # Adding 0.0 avoids "-0.0".


def markdown(heads, lines):
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [heads, ["---"] * len(heads), *lines])
