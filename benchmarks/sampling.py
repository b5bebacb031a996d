"""From how many rows must a codebook be learned (the paper's table 5)? Codebooks of 1 to 100 % of the rows are applied
to all of them.

The sets are those of ratio.py. Savings are those of the packed layout and include codebooks.
"""

import math
import sys

import torch

import ibp

from . import harness, ratio, reading, sets

COLUMNS = "set,dtype,scheme,sample,savings,commit".split(",")
SCHEMES = ("ibp", "planes")
SAMPLES = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)


def codebook_of(x, scheme, sample, device):
    """Returns a codebook that is learned from ceil(sample * rows) rows, drawn with a fixed seed.

    Scheme ibp's analysis looks at 1,024 rows at least, so that it is given only these rows. Scheme planes' analysis
    takes any number, and has to know how many rows share the codebook.
    """
    if scheme == "ibp":
        chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: math.ceil(sample * len(x))]
        return ibp.codecs.analyze(x[chosen.sort().values.to(x.device)], scheme=scheme, sample=1.0, device=device)
    return ibp.codecs.analyze(x, scheme=scheme, sample=sample, device=device)


def savings_of(case, scheme, sample, device):
    stored_bytes = sum(
        ibp.estimate(x, codebook_of(x, scheme, sample, device), device=device).stored_bytes for x in case.tensors
    )
    return 1 - stored_bytes / case.num_bytes


def print_table(rows):
    lines = {}
    for row in rows:
        lines.setdefault((row["set"], row["dtype"], row["scheme"]), []).append(ratio.show(float(row["savings"]), 2))
    heads = [
        "set",
        "dtype",
        "scheme",
        *(f"{100 * sample:g}%" for sample in reading.in_order(row["sample"] for row in rows)),
    ]
    texts = [[*key, *texts] for key, texts in lines.items()]
    ratio.print_lines("Percent saved, or times smaller, by the share of rows learned from", heads, texts, 3)


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    device, sheet = torch.device(args.device), ratio.Sheet(args.out / "sampling.csv", COLUMNS)
    for case in sets.all_sets(args.data, args.quick):
        case, dtype = sets.Set(case.name, tuple(x.to(device) for x in case.tensors)), harness.dtype_name(case.dtype)
        for scheme in SCHEMES:
            for sample in SAMPLES:
                try:
                    savings = savings_of(case, scheme, sample, device)
                    sheet.add(set=case.name, dtype=dtype, scheme=scheme, sample=sample, savings=f"{savings:.6f}")
                except Exception as error:
                    sheet.failed(f"{scheme}, {case.name} {dtype}, {sample:g}", error)
        print(".", end="", flush=True)
    print()
    print_table(sheet.rows)
    return sheet.finish()


if __name__ == "__main__":
    sys.exit(main())
