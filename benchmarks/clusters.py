"""What do codebooks for clusters of rows save, by their number (the paper's section 6.5 and figure 15)?

Savings are those of the packed layout and include all codebooks, which are learned from all rows.
"""

import math
import sys
from pathlib import Path

import numpy as np
import torch

import ibp

from . import harness, ratio, reading

COLUMNS = "set,dtype,rows,row_bytes,scheme,clusters,savings,metadata_bytes,commit".split(",")
SCHEMES = ("ibp", "planes")
CLUSTERS, QUICK_CLUSTERS = (1, 2, 4, 8, 16, 32, 64, "auto"), (1, 2, 4, "auto")
ROWS, QUICK_ROWS, NUM_COLUMNS = 8192, 512, 128
FIELD_SIDE, QUICK_FIELD_SIDE, NUM_WAVES = 96, 24, 8
EMBEDDINGS = (("ncf mlp_user", ("ncf_ml1m.npz", "ncf_mlp.npz"), "mlp_user"), ("kokoro", ("kokoro_voices.npz",), "x"))
STYLE = {
    "normal integers": ("#1f5fa8", "o"),
    "uniform integers": ("#7a7a7a", "s"),
    "ncf mlp_user": ("#5d8c3e", "^"),
    "kokoro": ("#a5c78b", "v"),
    "smooth 3D field": ("#d9822b", "D"),
}


# ---- sets ----------------------------------------------------------------------------------------------------------


def normal_integers(rows):
    """Returns int32 with standard deviation 2^24."""
    return (torch.randn(rows, NUM_COLUMNS, generator=seeded(), dtype=torch.float64) * 2**24).to(torch.int32)


def uniform_integers(rows):
    """Returns int32 that use all 32 bits."""
    return torch.randint(-(2**31), 2**31, (rows, NUM_COLUMNS), generator=seeded()).to(torch.int32)


def smooth_field(side):
    """Returns float32 on a cube: waves in random directions, with at most three wavelengths along each side. A row is a
    line of the cube, so that neighbouring rows are similar."""
    generator, points = seeded(), torch.arange(side, dtype=torch.float64) / side
    frequency = torch.randint(0, 4, (NUM_WAVES, 3), generator=generator).to(torch.float64)
    phase, height = torch.rand(2, NUM_WAVES, generator=generator, dtype=torch.float64)
    x, y, z = points[:, None, None], points[:, None], points
    waves = (
        (1 + h) * torch.sin(2 * math.pi * (f[0] * x + f[1] * y + f[2] * z + p))
        for f, p, h in zip(frequency, phase, height)
    )
    return sum(waves).to(torch.float32).reshape(side * side, side)


def embeddings(data_dir):
    """Yields (name, float32 table) of the files that exist."""
    for name, files, array in EMBEDDINGS:
        path = next((path for file in files if (path := Path(data_dir) / file).exists()), None)
        if path is None:
            print(f"{name}: not in {data_dir}, left out", flush=True)
            continue
        with np.load(path) as z:
            yield name, torch.from_numpy(z[array])


def all_sets(data_dir, quick):
    rows, side = (QUICK_ROWS, QUICK_FIELD_SIDE) if quick else (ROWS, FIELD_SIDE)
    yield "normal integers", normal_integers(rows)
    yield "uniform integers", uniform_integers(rows)
    for name, x in embeddings(data_dir):
        yield name, x[:QUICK_ROWS] if quick else x
    yield "smooth 3D field", smooth_field(side)


def seeded():
    return torch.Generator().manual_seed(0)


# ---- measuring and showing -----------------------------------------------------------------------------------------


def measure(x, scheme, clusters, device):
    """Returns (savings, bytes of the codebooks)."""
    table = ibp.compress(
        x,
        scheme=scheme,
        clusters=clusters,
        sample=1.0,
        layout="packed",
        device=device,
        memory=None if x.is_cuda else "host",
    )
    harness.check_bits(table.decompress(), x, f"{scheme}, {clusters} clusters")
    return table.savings, table.codebook.nbytes if table.codebook else 0


def print_table(rows):
    lines = {}
    for row in rows:
        lines.setdefault((row["set"], row["dtype"], row["scheme"]), {})[row["clusters"]] = ratio.show(
            float(row["savings"]), 2
        )
    heads = reading.in_order(row["clusters"] for row in rows)
    texts = [[*key, *(found.get(clusters, "") for clusters in heads)] for key, found in lines.items()]
    ratio.print_lines("Percent saved by number of clusters", ["set", "dtype", "scheme", *map(str, heads)], texts, 3)


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    device, sheet = torch.device(args.device), ratio.Sheet(args.out / "clusters.csv", COLUMNS)
    for name, x in all_sets(args.data, args.quick):
        x, dtype = x.to(device), harness.dtype_name(x.dtype)
        same = {"set": name, "dtype": dtype, "rows": len(x), "row_bytes": x[0].numel() * x.element_size()}
        for scheme in SCHEMES:
            for clusters in QUICK_CLUSTERS if args.quick else CLUSTERS:
                try:
                    savings, metadata_bytes = measure(x, scheme, clusters, device)
                    sheet.add(
                        **same,
                        scheme=scheme,
                        clusters=clusters,
                        savings=f"{savings:.6f}",
                        metadata_bytes=metadata_bytes,
                    )
                except Exception as error:
                    sheet.failed(f"{scheme}, {name}, {clusters} clusters", error)
        print(".", end="", flush=True)
    print()
    print_table(sheet.rows)
    return sheet.finish()


if __name__ == "__main__":
    sys.exit(main())
