"""How many activations are zero while a net is trained, by layer (cDMA's figures 4 to 7), and how much smaller do they
become (its figures 11 and 12)?

    python -m benchmarks.densities [--nets AlexNet,NiN] [--out DIR] [--device cpu] [--quick]

cDMA's six nets, from nets.py, are trained in single precision by SGD on images that are made here: waves and spots of
twenty kinds under noise. A tenth of the images has a wrong label, so that there is always something to learn.
AlexNet and VGG16 take 2,000 steps, the other nets 400, with batches of 128 (AlexNet) and 64. In the paper (section VI
and table II), Caffe trains the nets on ImageNet, in 82,000 to 300,000 steps with batches of 128 to 512 and a learning
rate that begins at 0.01 and falls when the validation error does not. Here it begins at 0.003 and falls twice, the
initial weights are He's, and the norm of the gradients is clipped.

`densities.csv` has the share of elements that are not zero, by layer and step, always for the same images.
`activation_ratios.csv` says how many times smaller the outputs of ReLUs and pools are at some steps, in three orders of
memory: `zvc` by cDMA's formula; `rle`, with a byte for each run of at most 128 zeros or non-zeros, and the non-zeros,
in windows of 4 KiB; `zlib` in windows of 4 KiB; `zlib_64k` in windows of 64 KiB; and `ibp`. Elements are in FP32 and
rounded to BF16. It also has the int64 indices that pools keep for the backward pass, as `ibp.offload_activations`
compresses them (`ibp`). `activation_maps.csv`, for figure 5, says which elements of AlexNet's outputs for one image are
zero, as hexadecimal bits.

--nets measures only the named nets and keeps the rows of the others.
"""

import argparse
import csv
import math
import sys
import zlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import ibp
from ibp._activations import coding

from . import harness, nets, ratio

COLUMNS = "net,layer,kind,shape,elements,step,progress,loss,density,gpu,commit".split(",")
MAP_COLUMNS = "net,layer,progress,channels,height,width,map,gpu,commit".split(",")
RATIO_COLUMNS = "net,layer,kind,elements,progress,layout,dtype,zvc,rle,zlib,zlib_64k,ibp,gpu,commit".split(",")
SHEETS = {"densities": COLUMNS, "activation_ratios": RATIO_COLUMNS, "activation_maps": MAP_COLUMNS}
CLASSES, WAVES, NOISE, WRONG_LABELS = 20, 3, 0.3, 0.1
MEASURED_IMAGES, QUICK_MEASURED_IMAGES = 50, 2  # cDMA looks at 50 images.
LAYOUTS = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "CHWN": (1, 2, 3, 0)}
WINDOW_BYTES, LARGE_WINDOW_BYTES = 4096, 1 << 16  # zlib compresses such windows. Runs end at the smaller ones.
LONGEST_RUN = 128  # One byte can stand for a run of this length.
MAX_BYTES = 32 * WINDOW_BYTES  # zlib compresses at most this many bytes of a layer.
MAX_LARGE_BYTES = 4 * LARGE_WINDOW_BYTES  # With large windows, zlib compresses at most this many bytes of a layer.
ROW_ELEMENTS, MAX_ROWS = 1024, 2048  # ibp compresses at most this many rows of a layer.
CHECKPOINTS = 12  # Densities are taken at the start and at this many times, which are closer together at first.
RATIO_PROGRESS = (0.0, 1.0)  # Sizes are taken at these shares of the training.
# Maps are taken at these shares of the training.
MAP_NET, MAP_CHANNELS, MAP_PROGRESS = "AlexNet", 8, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAIN_LAYOUT = "NCHW"  # Before the end, and in BF16, this is the only layout.


@dataclass(frozen=True)
class Plan:
    """How one net is trained."""

    net: str
    image: int
    batch: int
    steps: int
    width: float = 1.0

    def make(self):
        return MAKERS[self.net](CLASSES, self.width, self.image)


MAKERS = {
    "AlexNet": nets.alexnet,
    "OverFeat": nets.overfeat,
    "NiN": nets.nin,
    "VGG16": nets.vgg16,
    "SqueezeNet": nets.squeezenet,
    "GoogLeNet": nets.googlenet,
    "ResNet-50": lambda classes, width, image: nets.resnet50(classes, width),
}
PLANS = (
    Plan("AlexNet", 224, 128, 2000),
    *(Plan(net, 224, 64, 400) for net in ("OverFeat", "NiN", "SqueezeNet", "GoogLeNet")),
    Plan("VGG16", 224, 64, 2000),
)
QUICK_PLANS = (Plan("AlexNet", 64, 8, 4, 0.05), Plan("VGG16", 32, 8, 3, 0.05))
# The learning rate becomes a tenth at each progress in REDUCED_AT.
LEARNING_RATE, MOMENTUM, DECAY, REDUCED_AT = 0.003, 0.9, 5e-4, (0.6, 0.85)


# ---- images --------------------------------------------------------------------------------------------------------


class Images:
    """Seeded images [N, 3, side, side] and their classes. Each class has its own waves, with random phases, and spots
    of its own size. All images have noise of large and of small scale."""

    def __init__(self, side, device):
        generator = torch.Generator().manual_seed(0)
        self.side, self.device = side, device
        self.frequencies = (torch.rand(CLASSES, WAVES, 2, generator=generator) - 0.5).to(device) * side / 3
        self.colours = torch.randn(CLASSES, WAVES, 3, generator=generator).to(device)
        self.spots = torch.linspace(0.03, 0.15, CLASSES, device=device)
        self.generator = torch.Generator(device).manual_seed(0)

    def draw(self, count):
        at = torch.linspace(-0.5, 0.5, self.side, device=self.device)
        labels = torch.randint(CLASSES, (count,), generator=self.generator, device=self.device)
        phases = 2 * math.pi * self._uniform(count, WAVES, 1, 1)
        turns = self.frequencies[labels][..., None, None]
        waves = torch.sin(2 * math.pi * (turns[:, :, 0] * at[:, None] + turns[:, :, 1] * at) + phases)
        x = torch.einsum("nwhv,nwc->nchv", waves, self.colours[labels])
        centre, size = self._uniform(count, 2, 1, 1) - 0.5, self.spots[labels][:, None, None]
        x += 2 * torch.exp(-((at[:, None] - centre[:, 0]) ** 2 + (at - centre[:, 1]) ** 2) / size**2)[:, None]
        coarse = self._normal(count, 3, 8, 8)
        x += F.interpolate(coarse, size=(self.side, self.side), mode="bilinear")
        is_wrong = self._uniform(count) < WRONG_LABELS
        others = torch.randint(CLASSES, (count,), generator=self.generator, device=self.device)
        return x + NOISE * self._normal(*x.shape), torch.where(is_wrong, others, labels)

    def _uniform(self, *shape):
        return torch.rand(shape, generator=self.generator, device=self.device)

    def _normal(self, *shape):
        return torch.randn(shape, generator=self.generator, device=self.device)


# ---- training ------------------------------------------------------------------------------------------------------


def started(plan, device):
    """Returns the net with He's initial weights, with which signals neither vanish nor explode."""
    torch.manual_seed(0)
    net = plan.make()
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return net.to(device)


def checkpoints(steps):
    """Returns the steps after which densities are taken. They are closer together when training begins."""
    return sorted({round(steps * (k / CHECKPOINTS) ** 2) for k in range(CHECKPOINTS + 1)})


def learning_rate(step, steps):
    return LEARNING_RATE * 0.1 ** sum(step >= share * steps for share in REDUCED_AT)


def train(plan, device, look):
    """Trains a net and returns it. At the checkpoints, calls look(net, step, loss of the step before or None)."""
    net, images = started(plan, device), Images(plan.image, device)
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE, MOMENTUM, weight_decay=DECAY)
    looks, loss = set(checkpoints(plan.steps)), None
    for step in range(plan.steps + 1):
        if step in looks:
            look(net, step, None if loss is None else loss.item())
        if step == plan.steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, plan.steps)
        x, labels = images.draw(plan.batch)
        loss = F.cross_entropy(net(x), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
    return net


def trained(plan, device, count):
    """Returns (the net after its last step, `count` of the images it was trained with)."""
    return train(plan, device, lambda *_: None), Images(plan.image, device).draw(count)[0]


# ---- what is measured ----------------------------------------------------------------------------------------------


def outputs_of(net, x, with_indices=False):
    """Returns (name, kind, output) of every ReLU and pool of one pass, in their order. with_indices: whether each pool
    is followed by its indices, of kind "indices"."""
    found, hooks = [], []

    def note(name, kind):
        return lambda module, inputs, output: found.append((name, kind, output.detach().clone()))

    def note_indices(pool, inputs, output):
        how = (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)
        found.append(("", "indices", F.max_pool2d(inputs[0], *how, return_indices=True)[1]))

    for name, module in net.named_modules():
        if isinstance(module, (nn.ReLU, nn.MaxPool2d)):
            kind = "relu" if isinstance(module, nn.ReLU) else "pool"
            hooks.append(module.register_forward_hook(note(name, kind)))
            if kind == "pool" and with_indices:
                hooks.append(module.register_forward_hook(note_indices))
    was_training = net.training
    net.eval()
    try:
        with torch.no_grad():
            net(x)
    finally:
        net.train(was_training)
        for hook in hooks:
            hook.remove()
    return list(numbered(found))


def numbered(found):
    """Yields the outputs with cDMA's names: conv0, pool0, conv1, ..., fc0."""
    counts = {}
    for _, kind, output in found:
        name = kind if kind != "relu" else "conv" if output.dim() == 4 else "fc"
        yield f"{name}{counts.setdefault(name, 0)}", kind, output
        counts[name] += 1


def density(x):
    return torch.count_nonzero(x).item() / x.numel()


def zvc_ratio(share, dtype):
    """Returns the ratio of cDMA's section V-A: one bit for each element, and the elements that are not zero."""
    return 1 / (share + 1 / (8 * dtype.itemsize))


def spread(flat, width, most):
    """Returns at most `most` full windows of a flat tensor, evenly spaced, [n, width]. A tensor with fewer elements
    gives one window."""
    width = min(width, flat.numel())
    windows = flat[: flat.numel() // width * width].view(-1, width)
    return windows[:: -(-len(windows) // most)].contiguous()


def rle_ratio(flat):
    """Returns the ratio of run-length encoding: a byte for each run of zeros or of non-zeros in a window, and the
    non-zeros. cDMA leaves the format open."""
    windows = spread(flat != 0, WINDOW_BYTES // flat.itemsize, len(flat))
    starts = torch.ones_like(windows)
    torch.ne(windows[:, 1:], windows[:, :-1], out=starts[:, 1:])
    at = starts.view(-1).nonzero().view(-1)
    lengths = torch.diff(at, append=at.new_tensor([windows.numel()]))
    runs = (lengths + LONGEST_RUN - 1).div(LONGEST_RUN, rounding_mode="floor").sum().item()
    return windows.numel() * flat.itemsize / (runs + flat.itemsize * torch.count_nonzero(windows).item())


def zlib_ratio(flat, window_bytes=WINDOW_BYTES, most_bytes=MAX_BYTES):
    """Returns the ratio of zlib on windows of a flat tensor. A window that would not become smaller counts as it is."""
    found = spread(flat.view(torch.uint8), window_bytes, most_bytes // window_bytes)
    windows = [window.tobytes() for window in found.cpu().numpy()]
    return sum(map(len, windows)) / sum(min(len(zlib.compress(window)), len(window)) for window in windows)


def ibp_ratio(flat):
    """Returns the ratio of scheme auto in rows of ROW_ELEMENTS, including the codebook."""
    rows = spread(flat, ROW_ELEMENTS, MAX_ROWS)
    codebook = ibp.codecs.analyze(rows, scheme="auto", sample=None)
    if codebook is None:
        return 1.0
    return rows.numel() * rows.element_size() / ibp.estimate(rows, codebook).stored_bytes


def indices_ratio(indices):
    """Returns the ratio of indices that are compressed as saved activations are: relative to their windows, with their
    own codebook."""
    span, view = coding.span_of(indices)
    recipe = coding.learn(coding.bytes_of(indices, span), view)
    return 1.0 if recipe is None else 1 / recipe.coded_share


def map_of(output):
    """Returns (channels, height, width, hexadecimal bits that say which elements are not zero) for the first channels
    of the first image."""
    x = (output if output.dim() == 4 else output[:, None, None])[0, :MAP_CHANNELS] != 0
    return *x.shape, np.packbits(x.cpu().numpy()).tobytes().hex()


def in_layout(x, layout):
    """Returns the elements in the order in which a layout has them in memory."""
    return (x.permute(LAYOUTS[layout]) if x.dim() == 4 else x).contiguous().view(-1)


def rows_of_others(path, columns, names, column="net"):
    """Returns the rows of an earlier CSV for nets other than `names`, if it has these columns; [] if all nets are
    measured."""
    if names is None or not path.exists():
        return []
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        return [row for row in reader if row[column] not in names] if reader.fieldnames == columns else []


def sheet_with_others(path, columns, column, names):
    """Returns a CSV to write, which already has the rows of nets that are not measured. column: the column with a row's
    net."""
    kept = rows_of_others(path, columns, names, column)
    sheet = ratio.Sheet(path, columns)
    sheet.rewrite(kept)
    return sheet


class Record:
    """The CSVs of a run. names: the nets that are measured, None for all."""

    def __init__(self, args, names=None):
        self.densities, self.ratios, self.maps = (
            sheet_with_others(args.out / f"{name}.csv", columns, "net", names) for name, columns in SHEETS.items()
        )
        on_gpu = args.device == "cuda"
        self.where = {"gpu": torch.cuda.get_device_name() if on_gpu else "none"}

    def look(self, plan, x):
        """Returns the function that `train` calls. It takes densities at every checkpoint, and sizes and maps at those
        nearest to their progress."""
        steps = checkpoints(plan.steps)
        sized, shown = (
            {min(steps, key=lambda step: abs(step - share * plan.steps)) for share in progress}
            for progress in (RATIO_PROGRESS, MAP_PROGRESS if plan.net == MAP_NET else ())
        )

        def at_checkpoint(net, step, loss):
            for name, kind, output in outputs_of(net, x, with_indices=True):
                same = {"net": plan.net, "layer": name, "kind": kind, "progress": f"{step / plan.steps:.3f}"}
                if kind == "indices":
                    if step in sized:
                        self._add_ratio(same, output, MAIN_LAYOUT, indices_ratio(output))
                    continue
                self._add_density(same, output, step, loss)
                if step in shown:
                    self._add_map(same, output)
                if step in sized:
                    self._add_ratios(same, output, LAYOUTS if step == plan.steps else (MAIN_LAYOUT,))

        return at_checkpoint

    def _add_density(self, same, output, step, loss):
        self.densities.add(
            **same,
            shape="x".join(map(str, output.shape[1:])),
            elements=output[0].numel(),
            step=step,
            loss="" if loss is None else f"{loss:.4f}",
            density=f"{density(output):.4f}",
            **self.where,
        )

    def _add_map(self, same, output):
        of = {name: same[name] for name in ("net", "layer", "progress")}
        self.maps.add(**of, **dict(zip(("channels", "height", "width", "map"), map_of(output))), **self.where)

    def _add_ratios(self, same, output, layouts):
        for layout in layouts:
            for dtype in (torch.float32, torch.bfloat16) if layout == MAIN_LAYOUT else (torch.float32,):
                self._add_ratio(same, output.to(dtype), layout)

    def _add_ratio(self, same, output, layout, ibp_times=None):
        """Adds a row of sizes. ibp_times: how many times smaller ibp makes the output; None: to be measured as rows of
        floats."""
        flat = in_layout(output, layout)
        self.ratios.add(
            **same,
            elements=output[0].numel(),
            layout=layout,
            dtype=harness.dtype_name(output.dtype),
            zvc=f"{zvc_ratio(density(output), output.dtype):.4f}",
            rle=f"{rle_ratio(flat):.4f}",
            zlib=f"{zlib_ratio(flat):.4f}",
            zlib_64k=f"{zlib_ratio(flat, LARGE_WINDOW_BYTES, MAX_LARGE_BYTES):.4f}",
            ibp=f"{ibp_times or ibp_ratio(flat):.4f}",
            **self.where,
        )


def print_table(rows):
    """Prints the densities of the last checkpoint, beside those of the first and the smallest."""
    lines = {}
    for row in rows:
        lines.setdefault((row["net"], row["layer"], row["shape"]), []).append(float(row["density"]))
    ratio.print_lines(
        "Percent of activations that are not zero",
        ["net", "layer", "shape", "at first", "least", "at last"],
        [[*key, *(f"{100 * x:.1f}" for x in (found[0], min(found), found[-1]))] for key, found in lines.items()],
        3,
    )


def named(argv):
    """Returns (names of the nets to measure, None for all; the other arguments)."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--nets", type=lambda text: text.split(","))
    found, others = parser.parse_known_args(argv)
    return found.nets, others


def main(argv=None):
    names, others = named(argv)
    args = harness.parse_args(others, __doc__)
    device, record = torch.device(args.device), Record(args, names)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    for plan in QUICK_PLANS if args.quick else PLANS:
        if names is not None and plan.net not in names:
            continue
        x, _ = Images(plan.image, device).draw(QUICK_MEASURED_IMAGES if args.quick else MEASURED_IMAGES)
        try:
            train(plan, device, record.look(plan, x))
        except Exception as error:
            record.densities.failed(plan.net, error)
    print_table(record.densities.rows)
    return record.densities.finish() | record.ratios.finish() | record.maps.finish()


if __name__ == "__main__":
    sys.exit(main())
