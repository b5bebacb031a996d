"""What would more clusters than the format's 256 save, and what do their numbers cost (the paper's figure 15)?

    python -m benchmarks.more_clusters [--huge] [--data DIR] [--out DIR]

The sets are those of clusters.py, and a larger field. `k-means` counts rows as the paper encodes them, with chunks of 4
bytes and the best threshold of each cluster, a mask and a bitval per cluster, and a number of 1 or 2 bytes per row.
`ibp.compress` is scheme ibp as it is, with up to 256 clusters. Only bytes are counted, so that a GPU is not needed,
except for --huge, which measures only a field of the paper's 250,000 rows of 500 values, with up to 16,384 clusters.
Other rows of the CSV stay, and its rows stay in runs without the option.
"""

import argparse
import sys

import torch

import ibp
from ibp._rows.clusters import MAX_CLUSTERS

from . import clusters, harness, ratio, reading

COLUMNS = "set,dtype,rows,row_bytes,method,clusters,savings,codebooks,numbers,commit".split(",")
COUNTS, QUICK_COUNTS = (1, 16, 64, 128, 256, 512, 1024, 2048), (1, 8, 512)
HUGE_COUNTS = (1, 64, 256, 1024, 4096, 8192, 16_384)
LARGER_SIDE, HUGE_SIDE, QUICK_SIDE = 160, 500, 24  # The larger fields have 25,600 and 250,000 rows.
HUGE = "huge smooth 3D field"  # This set is only measured with --huge.
ROUNDS = 8
TAUS = (0.70, 0.75, 0.80, 0.85, 0.90, 0.95, 0.98, 1.0)
CHUNK_BYTES = 4
BLOCK_ROWS = 512  # The bits of this many rows are unpacked at once, which fit the caches of a CPU.


def bits_of(rows):
    """Returns int8 [n, 8 * row_bytes] for uint8 rows: the lowest bit of every byte, then the next one."""
    return torch.cat([(rows >> number) & 1 for number in range(8)], 1).view(torch.int8)


def bytes_of(bits):
    """Returns the uint8 rows that have these bits."""
    planes = bits.view(len(bits), 8, -1).to(torch.uint8)
    return sum(planes[:, number] << number for number in range(8))


def nearest(bits, centres):
    """Returns the centre that differs in the fewest bits from each row, int64 [n]. centres: int8; on a GPU their number
    is a multiple of 8."""
    return (centres.sum(1, dtype=torch.int32) - 2 * torch._int_mm(bits, centres.t())).argmin(1)


def assigned_rows(rows, centres):
    """Returns (the nearest centre of each uint8 row, int64 [n]; how many rows of each centre have each bit, int32
    [centres, bits])."""
    ones, parts = torch.zeros(centres.shape, dtype=torch.int32, device=rows.device), []
    for block in rows.split(BLOCK_ROWS):
        bits = bits_of(block)
        parts.append(nearest(bits, centres) if len(centres) > 1 else bits.new_zeros(len(bits), dtype=torch.int64))
        ones.index_add_(0, parts[-1], bits.to(torch.int32))
    return torch.cat(parts), ones


def kmeans(rows, count):
    """Returns (the cluster of each uint8 row, int64 [n]; how many rows of each cluster have each bit; the sizes of the
    clusters). Lloyd's iteration runs on all bits and begins with rows that are drawn with a seed."""
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count]
    centres = bits_of(rows[chosen.to(rows.device)])
    for _ in range(ROUNDS if count > 1 else 1):
        assigned, ones = assigned_rows(rows, centres)
        sizes = torch.bincount(assigned, minlength=count).unsqueeze(1)
        centres = torch.where(sizes > 0, (2 * ones > sizes).to(torch.int8), centres)
    return assigned, ones, sizes.squeeze(1)


def saved_bytes(rows, assigned, ones, sizes, tau):
    """Returns the bytes that each cluster of uint8 rows saves with a threshold, without its mask and bitval (the
    paper's sections 4.1 and 4.2): int64 [clusters]. row_bytes is a multiple of CHUNK_BYTES."""
    threshold = (tau * sizes.double() - int(tau == 1)).unsqueeze(1)  # If tau is 1, "more than" means all rows.
    is_one, is_zero = ones > threshold, sizes.unsqueeze(1) - ones > threshold
    mask, bitval = (bytes_of(bits).view(torch.int32) for bits in (is_one | is_zero, is_one & ~is_zero))
    fixed = (is_one | is_zero).view(len(sizes), 8, -1, CHUNK_BYTES).sum((1, 3))
    saved = torch.zeros(len(sizes), dtype=torch.int64, device=rows.device)
    for block, of in zip(rows.split(BLOCK_ROWS), assigned.split(BLOCK_ROWS)):
        agrees = block.view(torch.int32) & mask[of] == bitval[of]
        saved.index_add_(0, of, ((agrees * fixed[of]).sum(1) - fixed.shape[1]).clamp_(min=0) // 8)
    return saved


def estimate(x, count):
    """Returns (savings, share of masks and bitvals, share of the rows' cluster numbers), relative to the original
    bytes."""
    rows = x.contiguous().view(torch.uint8).reshape(len(x), -1)
    assigned, ones, sizes = kmeans(rows, count)
    saved = torch.stack([saved_bytes(rows, assigned, ones, sizes, tau) for tau in TAUS]).amax(0).sum().item()
    found = int((sizes > 0).sum())
    codebooks, numbers = found * 2 * rows.shape[1], 0 if found == 1 else len(rows) * (1 if found <= 256 else 2)
    share = 1 / rows.numel()
    return share * (saved - codebooks - numbers), share * codebooks, share * numbers


def measure(x, count):
    """Returns what `estimate` does, for a table that the library makes."""
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


def all_sets(args, huge):
    """Yields (name, set on the device)."""
    if huge:
        found = [(HUGE, clusters.smooth_field(QUICK_SIDE if args.quick else HUGE_SIDE))]
    else:
        found = clusters.all_sets(args.data, args.quick)
    for name, x in found:
        yield name, x.to(args.device)
    if not (huge or args.quick):
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


def parsed(argv):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--huge", action="store_true")
    options, others = own.parse_known_args(argv)
    return options.huge, harness.parse_args(others, __doc__)


def main(argv=None):
    huge, args = parsed(argv)
    sheet = ratio.Sheet(args.out / "more_clusters.csv", COLUMNS, lambda row: (row["set"] == HUGE) != huge)
    counts = QUICK_COUNTS if args.quick else HUGE_COUNTS if huge else COUNTS
    for name, x in all_sets(args, huge):
        same = {"set": name, "dtype": harness.dtype_name(x.dtype), "rows": len(x), "row_bytes": x[0].nbytes}
        for method, function, most in (("k-means", estimate, len(x) // 2), ("ibp.compress", measure, MAX_CLUSTERS)):
            for count in (count for count in counts if count <= most):
                try:
                    shares = dict(zip(("savings", "codebooks", "numbers"), function(x, count)))
                    sheet.add(
                        **same,
                        method=method,
                        clusters=count,
                        **{key: f"{share:.6f}" for key, share in shares.items()},
                    )
                except Exception as error:
                    sheet.failed(f"{method}, {name}, {count} clusters", error)
        print(".", end="", flush=True)
    print()
    print_table([row for row in sheet.rows if (row["set"] == HUGE) == huge])
    return sheet.finish()


if __name__ == "__main__":
    sys.exit(main())
