"""What would more clusters than the format's 256 save, and what do their numbers cost (the paper's figure 15)?

    python -m benchmarks.more_clusters [--data DIR] [--out DIR]

Sets as in clusters.py, and a larger field. `k-means`: rows counted as the paper codes them, chunks of 4 bytes
and the best threshold of each cluster, with a mask and a bitval a cluster and a number of 1 or 2 bytes a row.
`ibp.compress`: scheme ibp as it is, to 256 clusters. Only bytes are counted, so a GPU is not needed.
"""

import sys

import numpy as np
import torch

import ibp
from ibp._schemes.clusters.codebook import MAX_CLUSTERS

from . import clusters, harness, ratio, reading

COLUMNS = "set,dtype,rows,row_bytes,method,clusters,savings,codebooks,numbers,commit".split(",")
COUNTS, QUICK_COUNTS = (1, 16, 64, 128, 256, 512, 1024, 2048), (1, 4, 512)
LARGER_SIDE = 160  # of the field: 25,600 rows
ROUNDS = 8
TAUS = (0.70, 0.75, 0.80, 0.85, 0.90, 0.95, 0.98, 1.0)
CHUNK_BYTES = 4


def kmeans(rows, count):
    """The cluster of each of uint8 rows, int64 [n]: Lloyd's iteration on all bits, from rows drawn with a seed."""
    shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
    bits = ((rows.unsqueeze(2) >> shifts) & 1).reshape(len(rows), -1).to(torch.float32)
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count]
    centres, norms = bits[chosen.to(rows.device)], bits.sum(1, keepdim=True)
    for _ in range(ROUNDS):
        assigned = (bits @ centres.t()).mul_(-2).add_(norms).add_(centres.sum(1)).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, assigned, bits)
        sizes = torch.bincount(assigned, minlength=count).unsqueeze(1)
        centres = torch.where(sizes > 0, (2 * sums > sizes).to(torch.float32), centres)
    return assigned


def coded_bytes(rows):
    """Bytes of uint8 rows of one cluster under the best threshold, without its mask and bitval (the paper's sections
    4.1 and 4.2); row_bytes is a multiple of CHUNK_BYTES."""
    num_rows, row_bytes = rows.shape
    flags = row_bytes // CHUNK_BYTES
    bits = np.unpackbits(rows, axis=1)
    ones = bits.sum(0, dtype=np.int64)
    least = rows.size
    for tau in TAUS:
        threshold = tau * num_rows - (tau == 1)  # "more than" counts all rows where tau is 1
        is_one, is_zero = ones > threshold, num_rows - ones > threshold
        mask, bitval = np.packbits(is_one | is_zero), np.packbits(is_one & ~is_zero)
        fixed = (is_one | is_zero).reshape(flags, -1).sum(1)
        agrees = (((rows & mask) ^ bitval).reshape(num_rows, flags, -1) == 0).all(2)
        saved = np.maximum((agrees * fixed).sum(1) - flags, 0) // 8
        least = min(least, rows.size - int(saved.sum()))
    return least


def estimate(x, count):
    """(savings, share of masks and bitvals, share of clusters' numbers) of the original bytes."""
    rows = x.contiguous().view(torch.uint8).reshape(len(x), -1)
    assigned = kmeans(rows, count).cpu().numpy() if count > 1 else np.zeros(len(rows), np.int64)
    rows, found = rows.cpu().numpy(), np.unique(assigned)
    stored = sum(coded_bytes(rows[assigned == cluster]) for cluster in found)
    codebooks = len(found) * 2 * rows.shape[1]
    numbers = 0 if len(found) == 1 else len(rows) * (1 if len(found) <= 256 else 2)
    return 1 - (stored + codebooks + numbers) / rows.size, codebooks / rows.size, numbers / rows.size


def measure(x, count):
    """The same of what the library makes."""
    table = ibp.compress(
        x,
        scheme="ibp",
        clusters=count,
        sample=1.0,
        layout="packed",
        device=x.device,
        memory=None if x.is_cuda else "host",
    )
    harness.check_bits(table.decompress(), x, f"{count} clusters")
    num_bytes = x.numel() * x.element_size()
    numbers = 0 if count == 1 else len(x) / num_bytes
    return table.savings, (table.codebook.nbytes if table.codebook else 0) / num_bytes, numbers


def all_sets(args):
    """On the device."""
    for name, x in clusters.all_sets(args.data, args.quick):
        yield name, x.to(args.device)
    if not args.quick:
        yield "larger smooth 3D field", clusters.smooth_field(LARGER_SIDE).to(args.device)


def print_table(rows):
    lines = {}
    for row in rows:
        shown = ratio.show(float(row["savings"]), 2)
        lines.setdefault((row["set"], row["dtype"], row["method"]), {})[row["clusters"]] = shown
    heads = reading.in_order(row["clusters"] for row in rows)
    ratio.print_lines(
        "Percent saved by number of clusters, codebooks and numbers included",
        ["set", "dtype", "method", *map(str, heads)],
        [[*key, *(found.get(count, "") for count in heads)] for key, found in lines.items()],
        3,
    )


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    sheet, commit = ratio.Sheet(args.out / "more_clusters.csv", COLUMNS), harness.commit_id()
    for name, x in all_sets(args):
        same = {"set": name, "dtype": harness.dtype_name(x.dtype), "rows": len(x), "row_bytes": x[0].nbytes}
        for method, function, most in (("k-means", estimate, len(x) // 2), ("ibp.compress", measure, MAX_CLUSTERS)):
            for count in (count for count in (QUICK_COUNTS if args.quick else COUNTS) if count <= most):
                try:
                    shares = dict(zip(("savings", "codebooks", "numbers"), function(x, count)))
                    sheet.add(
                        **same,
                        method=method,
                        clusters=count,
                        **{key: f"{share:.6f}" for key, share in shares.items()},
                        commit=commit,
                    )
                except Exception as error:
                    sheet.failed(f"{method}, {name}, {count} clusters", error)
        print(".", end="", flush=True)
    print()
    print_table(sheet.rows)
    return sheet.finish()


if __name__ == "__main__":
    sys.exit(main())
