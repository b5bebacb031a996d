"""How many bits of a weight would a kernel read, by the width of the digits that stand for exponents?

    python -m benchmarks.digit_forms [--data DIR] [--out DIR]

The kernel of `ibp.linear` reads the sign and the mantissa of a weight as they are, and a digit for its exponent: the
exponent's number in a run of 2^digit_bits - 1 exponents. A weight whose exponent is outside of the run is an escape. It
takes an entry of a list, `ENTRY_BITS` in all: its column, its value, and the value that the digit made the kernel
multiply. `bits` is the mean of a weight including its share of the list. `bound` is plain bits over `bits`: the most
that a product can gain over plain weights that are read at the same rate. `bound_short` is the same with entries of
half the size. The run is the best one.

The forms are BF16, FP16, and FP8 E4M3 with one scale for the matrix or, as in DeepSeek-V3, one for each block of 128 x
128. A scale makes the largest weight 448.
"""

import sys

import torch

from . import harness, ratio, sets

COLUMNS = "case,form,weights,digit_bits,escapes,bits,bound,bound_short,commit".split(",")
ENTRY_BITS = 64  # An ibp_escape has this many bits.
BLOCK = 128  # Blocks of this many rows and columns share a scale.
LARGEST = 448.0  # This is the largest number of E4M3.
# Bits of the exponent, bits of the mantissa.
EXPONENTS = {torch.bfloat16: (8, 7), torch.float16: (5, 10), torch.float8_e4m3fn: (4, 3)}
DATA = {"stories260k, codebook a tensor": "stories260k, a language model", "kokoro": "Kokoro's voices"}


def scaled(weight, block):
    """Returns a weight in E4M3, scaled so that the largest number is LARGEST in each block of `block` rows and columns,
    or, if block is None, in the whole matrix."""
    if block is None:
        return (weight * (LARGEST / weight.abs().max())).to(torch.float8_e4m3fn)
    rows, columns = (size - size % block for size in weight.shape)
    tiles = weight[:rows, :columns].unflatten(0, (-1, block)).unflatten(2, (-1, block))
    largest = tiles.abs().amax((1, 3), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (tiles * (LARGEST / largest)).to(torch.float8_e4m3fn).flatten()


FORMS = {
    "BF16": lambda weight: weight.bfloat16(),
    "FP16": lambda weight: weight.half(),
    "FP8, a scale in all": lambda weight: scaled(weight, None),
    "FP8, a scale a block": lambda weight: scaled(weight, BLOCK),
}


def exponent_counts(weights):
    """Returns how many of the weights have each exponent: float64 [2^exponent bits]."""
    bits, mantissa_bits = EXPONENTS[weights.dtype]
    patterns = weights.flatten().view(torch.uint8 if weights.itemsize == 1 else torch.int16).int()
    return torch.bincount(patterns >> mantissa_bits & (1 << bits) - 1, minlength=1 << bits).double()


def forms_of(dtype, counts):
    """Yields the bits that weights with these exponents take, by the bits of a digit."""
    exponent_bits, plain_bits = EXPONENTS[dtype][0], 8 * dtype.itemsize
    for digit_bits in range(3, exponent_bits):
        inside = counts.unfold(0, (1 << digit_bits) - 1, 1).sum(1).max()
        escapes = 1 - float(inside / counts.sum())
        of_a_digit = plain_bits - exponent_bits + digit_bits
        bits = of_a_digit + escapes * ENTRY_BITS
        yield {
            "digit_bits": digit_bits,
            "escapes": harness.four_digits(1e6 * escapes),
            "bits": f"{bits:.2f}",
            "bound": f"{plain_bits / bits:.3f}",
            "bound_short": f"{plain_bits / (of_a_digit + escapes * ENTRY_BITS / 2):.3f}",
        }


def weights(args):
    """Yields (name, matrices of FP32) of each case."""
    size = 1024 if args.quick else 4096
    yield "normal 0.02", [0.02 * torch.randn(size, size, generator=torch.Generator().manual_seed(0))]
    held = {case.name: case.tensors for case in sets.real_sets(args.data)}
    for name, title in DATA.items():
        if name in held:
            yield title, [x.float().flatten(1) for x in held[name] if x.dim() > 1 and x.is_floating_point()]


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    sheet = ratio.Sheet(args.out / "digit_forms.csv", COLUMNS)
    for case, matrices in weights(args):
        for form, to_form in FORMS.items():
            coded = [part for part in map(to_form, matrices) if part.numel()]
            if not coded:  # No matrix has a whole block.
                continue
            counts = sum(map(exponent_counts, coded))
            for found in forms_of(coded[0].dtype, counts):
                sheet.add(case=case, form=form, weights=int(counts.sum()), **found)
    lines = [[str(row[column]) for column in COLUMNS[:-1]] for row in sheet.rows]
    ratio.print_lines("Digits of exponents", list(COLUMNS[:-1]), lines, 2)
    return sheet.finish()


if __name__ == "__main__":
    sys.exit(main())
