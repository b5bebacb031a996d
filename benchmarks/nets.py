"""Nets whose activations are measured: AlexNet, OverFeat, NiN, VGG16, SqueezeNet, GoogLeNet, ResNet-50, and transformer
blocks of Llama's shape.

Shapes and layers are those of the papers: Krizhevsky's one-column AlexNet, OverFeat's fast model, Lin and others'
network in network for ImageNet, Simonyan and Zisserman's configuration D, SqueezeNet 1.0, GoogLeNet without its
auxiliary classifiers and normalisation, and He and others' bottlenecks with the stride in the 3 x 3 convolution.
Weights are random. `width` scales all channels, for small nets that run anywhere.
"""

import contextlib
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

VGG16_CHANNELS = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512, "pool")
RESNET50_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # Each stage has (channels of the bottleneck, blocks).
EXPANSION = 4  # A bottleneck has this multiple of its inner channels.
FIRES = ((16, 64), (16, 64), (32, 128), "pool", (32, 128), (48, 192), (48, 192), (64, 256), "pool", (64, 256))
# Channels of the branches: 1 x 1; 3 x 3 after fewer channels; 5 x 5 after fewer channels; after the pool.
INCEPTIONS = (
    *((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), "pool"),
    *((192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64)),
    *((112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128), "pool"),
    *((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
ROTARY_BASE = 10_000.0


class Blocks(nn.Module):
    """Blocks that run one after the other. recompute: whether each runs in `torch.utils.checkpoint`, so that what it
    saves inside is computed again in the backward pass."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList(blocks), False

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def alexnet(classes=1000, width=1.0, image=224):
    """Returns AlexNet for images [N, 3, image, image]; image is at least 63."""
    c1, c2, c3, c4, hidden = (max(4, int(width * c)) for c in (64, 192, 384, 256, 4096))
    side = _pooled(_pooled(_pooled((image - 7) // 4 + 1)))
    return Blocks(
        [
            nn.Sequential(nn.Conv2d(3, c1, 11, 4, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
            nn.Sequential(nn.Conv2d(c1, c2, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
            nn.Sequential(nn.Conv2d(c2, c3, 3, padding=1), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Conv2d(c3, c4, 3, padding=1), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Conv2d(c4, c4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
            _classifier(c4 * side * side, hidden, classes),
        ]
    )


def overfeat(classes=1000, width=1.0, image=224):
    """Returns OverFeat's fast model for images [N, 3, image, image]; image is at least 71."""
    c1, c2, c3, c4, h1, h2 = (max(4, int(width * c)) for c in (96, 256, 512, 1024, 3072, 4096))
    side = (((image - 11) // 4 + 1) // 2 - 4) // 2 // 2
    return Blocks(
        [
            nn.Sequential(*_activated(3, c1, 11, 4, 0), nn.MaxPool2d(2)),
            nn.Sequential(*_activated(c1, c2, 5, 1, 0), nn.MaxPool2d(2)),
            nn.Sequential(*_activated(c2, c3, 3)),
            nn.Sequential(*_activated(c3, c4, 3)),
            nn.Sequential(*_activated(c4, c4, 3), nn.MaxPool2d(2)),
            _classifier(c4 * side * side, h1, classes, h2),
        ]
    )


def nin(classes=1000, width=1.0, image=224):
    """Returns network in network for images [N, 3, image, image]; image is at least 63."""
    blocks, channels = [], 3
    for out, kernel, stride in ((96, 11, 4), (256, 5, 1), (384, 3, 1), (1024, 3, 1)):
        out, is_last = max(4, int(width * out)), out == 1024
        layers = [*_activated(channels, out, kernel, stride), *_activated(out, out, 1)]
        layers += [*_activated(out, classes if is_last else out, 1)]
        blocks.append(nn.Sequential(*layers, Mean() if is_last else nn.MaxPool2d(3, 2)))
        channels = out
    return Blocks(blocks)


def squeezenet(classes=1000, width=1.0, image=224):
    """Returns SqueezeNet 1.0 for images [N, 3, image, image]; image is at least 63."""
    channels = max(4, int(width * 96))
    blocks = [nn.Sequential(*_activated(3, channels, 7, 2, 0), nn.MaxPool2d(3, 2))]
    for fire in FIRES:
        if fire == "pool":
            blocks.append(nn.MaxPool2d(3, 2))
            continue
        squeezed, out = (max(4, int(width * c)) for c in fire)
        branches = [nn.Conv2d(squeezed, out, 1), nn.Conv2d(squeezed, out, 3, padding=1)]
        blocks.append(nn.Sequential(*_activated(channels, squeezed, 1), Branches(branches)))
        channels = 2 * out
    return Blocks([*blocks, nn.Sequential(nn.Dropout(), *_activated(channels, classes, 1), Mean())])


def googlenet(classes=1000, width=1.0, image=224):
    """Returns GoogLeNet for images [N, 3, image, image]; image is at least 32."""
    c1, c2 = (max(4, int(width * c)) for c in (64, 192))
    blocks = [
        nn.Sequential(*_activated(3, c1, 7, 2), nn.MaxPool2d(3, 2, 1)),
        nn.Sequential(*_activated(c1, c1, 1), *_activated(c1, c2, 3), nn.MaxPool2d(3, 2, 1)),
    ]
    channels = c2
    for sizes in INCEPTIONS:
        if sizes == "pool":
            blocks.append(nn.MaxPool2d(3, 2, 1))
            continue
        one, less3, three, less5, five, pooled = (max(4, int(width * c)) for c in sizes)
        branches = [
            nn.Conv2d(channels, one, 1),
            nn.Sequential(*_activated(channels, less3, 1), nn.Conv2d(less3, three, 3, padding=1)),
            nn.Sequential(*_activated(channels, less5, 1), nn.Conv2d(less5, five, 5, padding=2)),
            nn.Sequential(LocalMaximum(), nn.Conv2d(channels, pooled, 1)),
        ]
        blocks.append(Branches(branches))
        channels = one + three + five + pooled
    return Blocks([*blocks, nn.Sequential(Mean(), nn.Dropout(0.4), nn.Linear(channels, classes))])


def vgg16(classes=1000, width=1.0, image=224):
    """Returns VGG16 (configuration D) for images [N, 3, image, image]; image is a multiple of 32."""
    blocks, layers, channels = [], [], 3
    for out in VGG16_CHANNELS:
        if out == "pool":
            blocks.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
            layers = []
            continue
        out = max(4, int(width * out))
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(inplace=True)]
        channels = out
    return Blocks([*blocks, _classifier(channels * (image // 32) ** 2, max(4, int(width * 4096)), classes)])


def resnet50(classes=1000, width=1.0):
    """Returns ResNet-50 for images [N, 3, H, W]."""
    channels = first = max(4, int(width * 64))
    blocks = [
        nn.Sequential(
            nn.Conv2d(3, first, 7, 2, 3, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
    ]
    for stage, (inner, count) in enumerate(RESNET50_STAGES):
        inner = max(4, int(width * inner))
        for k in range(count):
            blocks.append(Bottleneck(channels, inner, 2 if stage and k == 0 else 1))
            channels = EXPANSION * inner
    return Blocks([*blocks, nn.Sequential(Mean(), nn.Linear(channels, classes))])


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 with batch norms, whose result is added to their input."""

    def __init__(self, channels, inner, stride):
        super().__init__()
        out = EXPANSION * inner
        self.inner = nn.Sequential(
            *_normed(channels, inner, 1),
            nn.ReLU(inplace=True),
            *_normed(inner, inner, 3, stride),
            nn.ReLU(inplace=True),
            *_normed(inner, out, 1),
        )
        self.beside = nn.Identity()
        if stride != 1 or channels != out:
            self.beside = nn.Sequential(*_normed(channels, out, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.inner(x) + self.beside(x))


class Recurrent(nn.Module):
    """Recurrent layers for [N, tokens, width]. kind: "lstm", or "relu", whose states pass through a ReLU."""

    def __init__(self, kind, width, layers=1):
        super().__init__()
        options = {"batch_first": True, "num_layers": layers}
        make = nn.LSTM if kind == "lstm" else functools.partial(nn.RNN, nonlinearity=kind)
        self.layers = make(width, width, **options)

    def forward(self, x):
        return self.layers(x)[0]


class Branches(nn.Module):
    """Convolutions of one input, whose outputs are joined and pass through one ReLU."""

    def __init__(self, branches):
        super().__init__()
        self.branches, self.relu = nn.ModuleList(branches), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(torch.cat([branch(x) for branch in self.branches], 1))


class LocalMaximum(nn.Module):
    """The largest of 3 x 3 neighbours. This pool does not make its input smaller, so it is not one of the measured
    pools."""

    def forward(self, x):
        return F.max_pool2d(x, 3, 1, 1)


class Mean(nn.Module):
    """The mean over height and width."""

    def forward(self, x):
        return x.mean((2, 3))


class LlamaBlock(nn.Module):
    """Attention with rotary positions and an MLP as in Llama. Each follows an RMSNorm and is added to its input.

    Args:
        hidden, ffn: widths; hidden is a multiple of 2 * heads.
        heads: number of heads of the attention.
        activation: that of the MLP: "swiglu" (two projections, one through SiLU, multiplied) or "relu2" (one projection
            through the square of ReLU: So and others, Primer).
    """

    def __init__(self, hidden, ffn, heads, activation="swiglu"):
        super().__init__()
        self.heads, self.activation = heads, activation
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, ffn, bias=False), nn.Linear(ffn, hidden, bias=False)
        self.gate = nn.Linear(hidden, ffn, bias=False) if activation == "swiglu" else None

    def forward(self, x):
        x = x + self._attention(self.attention_norm(x))
        return x + self._mlp(self.mlp_norm(x))

    def _attention(self, x):
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        turns = _turns(x.shape[1], query.shape[-1], x)
        mixed = F.scaled_dot_product_attention(_rotated(query, *turns), _rotated(key, *turns), value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _mlp(self, x):
        if self.gate is None:
            return self.down(F.relu(self.up(x)).square())
        return self.down(F.silu(self.gate(x)) * self.up(x))


def llama(layers, hidden, ffn, heads, activation="swiglu"):
    """Returns blocks of Llama's shape for hidden states [N, tokens, hidden]."""
    return Blocks([LlamaBlock(hidden, ffn, heads, activation) for _ in range(layers)])


@contextlib.contextmanager
def densities(net):
    """Yields a dict that a forward pass inside the block fills. It has for the name of each ReLU, in their order, the
    share of its output's elements that are not zero, as a tensor of one element."""
    found, hooks = {}, []
    for name, module in net.named_modules():
        if isinstance(module, nn.ReLU):
            hooks.append(module.register_forward_hook(_density_into(found, name)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _density_into(found, name):
    def note(module, inputs, output):
        found[name] = torch.count_nonzero(output.detach()) / output.numel()

    return note


def _pooled(side):
    """Returns the side after a pool with 3 x 3 windows and stride 2."""
    return (side - 3) // 2 + 1


def _classifier(features, hidden, classes, second=None):
    """Returns a classifier with two hidden layers. second: width of the second one, the same as the first's by
    default."""
    second = second or hidden
    return nn.Sequential(
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(features, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(hidden, second),
        nn.ReLU(inplace=True),
        nn.Linear(second, classes),
    )


def _activated(channels, out, kernel, stride=1, padding=None):
    """Yields a convolution and its ReLU. padding: half of the kernel by default."""
    yield nn.Conv2d(channels, out, kernel, stride, kernel // 2 if padding is None else padding)
    yield nn.ReLU(inplace=True)


def _normed(channels, out, kernel, stride=1):
    yield nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False)
    yield nn.BatchNorm2d(out)


def _turns(tokens, width, like):
    """Returns (cosines, sines) [tokens, width] of rotary positions."""
    rates = ROTARY_BASE ** -(torch.arange(0, width, 2, device=like.device) / width)
    angles = torch.outer(torch.arange(tokens, device=like.device), rates).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotated(x, cosines, sines):
    left, right = x.chunk(2, -1)
    return x * cosines + torch.cat([-right, left], -1) * sines
