"""How do the size of chunks and the threshold of invariance affect savings (the paper's figure 13), and how fast are
chunks of each size decoded?

    python -m benchmarks.chunks [--data DIR] [--out DIR] [--device cpu] [--quick]

The sets are the real ones, in all dtypes of ratio.py. `chunks.csv` has the savings of scheme ibp with one threshold for
all chunks, as in the paper, including the codebook, which is learned from all rows. They are the same on every machine.
`chunk_rates.csv` has the rates in device memory at one threshold, and needs a GPU.
"""

import sys

import torch

import ibp

from . import harness, ideal, inputs, ratio, reading, sets

COLUMNS = "set,dtype,rows,row_bytes,chunk_bytes,tau,savings,commit".split(",")
RATE_COLUMNS = ("chunk_bytes",)
CHUNK_BYTES = (1, 2, 4, 8)
TAUS, QUICK_TAUS = (0.70, 0.75, 0.80, 0.85, 0.90, 0.95, 0.98, 1.0), (0.80, 1.0)
RATE_TAU = 0.80
RATE_BYTES = 64 * inputs.MIB


def codebook_of(x, chunk_bytes, tau, device):
    return ibp.codecs.analyze(x, paper=True, chunk_bytes=chunk_bytes, tau=tau, sample=1.0, device=device)


def savings_of(case, chunk_bytes, tau, device):
    """Returns the savings with one codebook per table."""
    stored_bytes = sum(
        ibp.estimate(x, codebook_of(x, chunk_bytes, tau, device), device=device).stored_bytes for x in case.tensors
    )
    return 1 - stored_bytes / case.num_bytes


def count_bytes(sheet, case, taus, device):
    same = {"set": case.name, "dtype": harness.dtype_name(case.dtype), "rows": case.rows, "row_bytes": case.row_bytes}
    for chunk_bytes in CHUNK_BYTES:
        for tau in taus:
            try:
                savings = savings_of(case, chunk_bytes, tau, device)
                sheet.add(**same, chunk_bytes=chunk_bytes, tau=f"{tau:g}", savings=f"{savings:.6f}")
            except Exception as error:
                sheet.failed(f"{case.name} {same['dtype']}, chunks of {chunk_bytes} B, {tau:g}", error)


def time_decoding(run, case, copy_gbps):
    """Decodes the set's rows, repeated, under codebooks of each chunk size."""
    rows = case.tensors[0].to(run.device)
    x = inputs.replicated(rows, max(1, RATE_BYTES // case.row_bytes), run.device)
    outs = [torch.empty_like(x) for _ in range(run.rotation(x.numel() * x.element_size()))]
    for chunk_bytes in CHUNK_BYTES:
        with run.cell(f"{case.name}, chunks of {chunk_bytes} B"):
            codebook = codebook_of(rows, chunk_bytes, RATE_TAU, run.device)
            table = ibp.compress(x, codebook=codebook, layout="slots")
            harness.poison(outs[0])
            harness.check_bits(ibp.decompress(table, out=outs[0]), x, f"chunks of {chunk_bytes} B")
            seconds = run.seconds([lambda out=out: ibp.decompress(table, out=out) for out in outs])
            num_bytes = x.numel() * x.element_size()
            run.add(
                case=case.name,
                arm="decode",
                rows=len(x),
                row_bytes=case.row_bytes,
                dtype=case.dtype,
                savings=table.savings,
                gbps=num_bytes * 1e-9 / seconds,
                ideal_gbps=ideal.device_gbps(num_bytes, num_bytes + table.stored_bytes, copy_gbps, run.memset_gbps),
                sms=None,
                chunk_bytes=chunk_bytes,
            )


def time_sets(args, cases):
    """Measures the rates. Returns the exit status of this part."""
    run = harness.Run("chunk_rates", args, RATE_COLUMNS)
    source, copy = (torch.empty(256 * inputs.MIB, dtype=torch.uint8, device=run.device) for _ in range(2))
    copy_gbps = source.numel() * 1e-9 / run.seconds([lambda: copy.copy_(source)])
    for case in (case for case in cases if len(case.tensors) == 1):
        time_decoding(run, case, copy_gbps)
    return run.finish()


def print_table(rows):
    lines = {}
    for row in rows:
        key = (row["set"], row["dtype"], str(row["chunk_bytes"]))
        lines.setdefault(key, []).append(ratio.show(float(row["savings"]), 2))
    heads = ["set", "dtype", "chunk", *(f"{float(tau):.2f}" for tau in reading.in_order(row["tau"] for row in rows))]
    ratio.print_lines(
        "Percent saved, or times smaller, by bytes of a chunk and threshold",
        heads,
        [[*key, *texts] for key, texts in lines.items()],
        3,
    )


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    sheet = ratio.Sheet(args.out / "chunks.csv", COLUMNS)
    cases = list(sets.shortened(sets.real_sets(args.data)) if args.quick else sets.real_sets(args.data))
    for case in cases:
        count_bytes(sheet, case, QUICK_TAUS if args.quick else TAUS, torch.device(args.device))
    print_table(sheet.rows)
    failed = time_sets(args, cases) if args.device == "cuda" else 0
    return sheet.finish() | failed


if __name__ == "__main__":
    sys.exit(main())
