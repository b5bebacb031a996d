"""How compressible is the memory of a net in training, entry by entry and within a step?

    python -m benchmarks.entries [--nets NAME,NAME] [--out DIR] [--device cpu] [--quick]

The nets are the programs of `spill.py --programs` with small batches, in single precision. `entries.csv` is for Buddy
Compression's figure 6. It takes pages of 8 KiB, evenly spaced in what a program holds after some steps, and has the
size of each entry of 128 bytes under bit-plane compression as a digit, which is an index in bpc.SIZES. `moments.csv` is
for its figure 8. At moments of one more step, which writes outputs, then gradients, then momentum and weights, it has
the share of rows of 2 KiB that overflow their slots; the slots' sizes come from one profile of all moments. Both count
bytes, and need no GPU.
"""

import argparse
import sys

import torch

import ibp

from . import bpc, densities, harness, ratio, spill

COLUMNS = "program,num_bytes,times_smaller,page,sizes,commit".split(",")
MOMENT_COLUMNS = "program,moment,ratio,spilled,commit".split(",")
PAGE_BYTES, SHOWN_PAGES, MEASURED_PAGES = 8192, 96, 1 << 14
BATCH, STEPS, MOMENTS = 8, 3, 10
STEP_PROGRAMS = ("SqueezeNet", "ResNet-50", "LSTM")  # The paper shows the first two.


def page_sizes(held):
    """Returns (bytes, times smaller, {page: digits of its entries}) of tensors, which are taken as one sequence of
    bytes."""
    data = torch.cat([x.reshape(-1).view(torch.uint8) for x in held.values()])
    pages = data[: data.numel() // PAGE_BYTES * PAGE_BYTES].view(-1, PAGE_BYTES)
    numbers = torch.linspace(0, len(pages) - 1, min(len(pages), MEASURED_PAGES)).long()
    found = pages[numbers.to(pages.device)].cpu()
    entries = bpc.entries_of(found.view(-1))
    classes, coded = bpc.encode(entries)
    harness.check_bits(bpc.decode(classes, coded), entries, "bit-plane compression")
    shown = torch.linspace(0, len(numbers) - 1, min(len(numbers), SHOWN_PAGES)).long()
    lines = classes.reshape(len(numbers), -1)[shown].tolist()
    texts = {int(page): "".join(map(str, line)) for page, line in zip(numbers[shown], lines)}
    return data.numel(), found.numel() / coded.size, texts


def copied(held):
    return {name: x.clone() for name, x in held.items()}


def written_when(name):
    """Returns when a program writes a tensor: 0 in the forward pass, 1 in the backward pass, 2 by the optimizer."""
    kinds = (("images", "output", "hidden"), ("gradient",))
    return next((k for k, starts in enumerate(kinds) if name.startswith(starts)), len(kinds))


def moments_of(program, least_bytes):
    """Yields what a program holds at MOMENTS + 1 moments of a step. From moment to moment more of it has been
    rewritten."""
    old = copied(program.snapshot(least_bytes))
    program.step()
    new = program.snapshot(least_bytes)
    order = sorted(new, key=written_when)
    for k in range(MOMENTS + 1):
        written = set(order[: round(k * len(order) / MOMENTS)])
        yield {name: new[name] if name in written else old[name] for name in order}


class Record:
    """Both CSVs of a run. names: the programs that are measured, None for all."""

    def __init__(self, directory, names):
        self.pages, self.moments = (
            densities.sheet_with_others(directory / f"{name}.csv", columns, "program", names)
            for name, columns in (("entries", COLUMNS), ("moments", MOMENT_COLUMNS))
        )

    def add(self, name, program, least_bytes):
        num_bytes, times, pages = page_sizes(program.snapshot(least_bytes))
        for page, sizes in pages.items():
            self.pages.add(program=name, num_bytes=num_bytes, times_smaller=f"{times:.3f}", page=page, sizes=sizes)
        if name not in STEP_PROGRAMS:
            return
        report = ibp.spill.profile(moments_of(program, least_bytes), row_bytes=spill.PROGRAM_ROW_BYTES)
        for k, share in enumerate(spill.spilled_by_snapshot(report)):
            self.moments.add(
                program=name, moment=f"{k / MOMENTS:g}", ratio=f"{report.ratio:.3f}", spilled=f"{share:.4f}"
            )


def main(argv=None):
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--nets", type=lambda text: text.split(","))
    own, others = parser.parse_known_args(argv)
    args = harness.parse_args(others, __doc__)
    record, device = Record(args.out, own.nets), torch.device(args.device)
    least_bytes = spill.PROGRAM_ROW_BYTES if args.quick else spill.PROGRAM_LEAST_BYTES
    for name in spill.PROGRAMS if own.nets is None else own.nets:
        try:
            program = spill.Program(device, name, args.quick, BATCH)
            for _ in range(STEPS):
                program.step()
            record.add(name, program, least_bytes)
        except Exception as error:
            record.pages.failed(name, error)
        print(name, flush=True)
    ratio.print_lines(
        "Bit-plane compression of what programs hold",
        ["program", "times smaller"],
        sorted({(row["program"], row["times_smaller"]) for row in record.pages.rows}),
        1,
    )
    return record.pages.finish() | record.moments.finish()


if __name__ == "__main__":
    sys.exit(main())
