"""How small are deltas of two versions of weights, and how fast are they made and applied?

    python -m benchmarks.deltas [--out DIR] [--device cpu] [--quick]

The versions are weights N(0, 0.02) before and after a step of an optimizer with FP32 weights, rounded. In BF16 there
are three sizes of steps, which change 1.5, 4.2 and 10 % of the weights; in FP16, FP8 and FP32 there is one. 36 tensors
of a model form a checkpoint.

Arms: `ibp` is `ibp.deltas.make`, including fingerprints. `ibp, apply` is `Delta.apply_`, which checks the base before
and the result afterwards. `index and value` has an int32 index and the new value for each changed weight, found and
applied by torch. `XOR and zstd` XORs the versions' bits and compresses them by zstd at level 3 with one thread of the
CPU, on a part of the weights, if the package zstandard is installed. Whole calls are timed with the wall clock; GB/s
count weights. `changed` is the share of weights that changed, `stored` the delta's bytes over the weights', and `fewer`
the bytes of `index and value` over the delta's. In every arm the result of applying has the new version's bits.
"""

import sys

import torch

import ibp

from . import codec, harness, ideal, inputs

try:
    import zstandard
except ImportError:
    zstandard = None

COLUMNS = ("changed", "stored", "fewer", *harness.TARGET_COLUMNS)
TENSOR_BYTES, CPU_TENSOR_BYTES, QUICK_TENSOR_BYTES = 1024 * inputs.MIB, 64 * inputs.MIB, inputs.MIB
ZSTD_BYTES, ZSTD_LEVEL = 32 * inputs.MIB, 3
IBP, APPLY, PLAIN, ZSTD = "ibp", "ibp, apply", "index and value", "XOR and zstd"
DEVIATION = 0.02
# Each step has (name, dtype, learning rate, target for how many times fewer bytes).
STEPS = (
    ("1.5 % changed", torch.bfloat16, 0.4e-6, 3.9),
    ("4.2 % changed", torch.bfloat16, 1.32e-6, 5.0),
    ("10 % changed", torch.bfloat16, 4e-6, 6.0),
    ("a step of 4e-7", torch.float16, 4e-7, None),
    ("a step of 1e-4", torch.float8_e4m3fn, 1e-4, None),
    ("a step of 1e-6", torch.float32, 1e-6, None),
)
# The checkpoint has layers with these shapes.
LAYERS, SHAPES = 4, [(4096, 4096)] * 4 + [(11008, 4096)] * 3 + [(4096,)] * 2
CHECKPOINT_STEP = STEPS[1]
# These are targets in GB/s of weights, by dtype.
MAKE_GBPS, APPLY_GBPS = {torch.bfloat16: 300.0}, {torch.bfloat16: 1500.0, torch.float8_e4m3fn: 750.0}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits_of(x):
    return x.view(INTEGERS[x.element_size()])


def stepped(num_weights, dtype, rate, device):
    """Returns (new, base): weights after and before a step."""
    weights = torch.randn(num_weights, device=device) * DEVIATION
    base = weights.to(dtype)
    return (weights - rate * torch.randn(num_weights, device=device).clamp(-3, 3)).to(dtype), base


class Case:
    """Two versions of weights, as mappings from names to tensors, and the run that records their measurements."""

    def __init__(self, run, rates, name, new, base):
        self.run, self.rates, self.name, self.new, self.base = run, rates, name, new, base
        self.weights = {name: tensor.clone() for name, tensor in base.items()}
        tensors = list(base.values())
        self.dtype, self.num_bytes = tensors[0].dtype, sum(tensor.nbytes for tensor in tensors)
        self.num_changed = sum(int((bits_of(new[name]) != bits_of(base[name])).sum()) for name in base)
        self.plain_bytes = self.num_changed * (4 + self.dtype.itemsize)

    def check(self, wanted, what):
        for name, tensor in self.weights.items():
            harness.check_bits(tensor, wanted[name], f"{self.name} {self.dtype}, {what}, {name}")

    def record(self, arm, num_bytes, stored_bytes, seconds, moved_bytes, wanted=None, on_gpu=True):
        gbps = num_bytes * 1e-9 / seconds
        stored = stored_bytes / num_bytes
        judged = wanted.get(self.dtype) if wanted and self.run.is_judged else None
        self.run.add(
            case=self.name,
            arm=arm,
            rows=len(self.base),
            row_bytes=num_bytes,
            dtype=self.dtype,
            savings=1 - stored,
            gbps=gbps,
            ideal_gbps=ideal.device_gbps(num_bytes, moved_bytes, self.rates.copy_gbps),
            sms=None if on_gpu and self.run.on_gpu else 0,
            changed=f"{self.num_changed * self.dtype.itemsize / self.num_bytes:.4f}",
            stored=f"{stored:.4f}",
            fewer=f"{self.plain_bytes / self.num_bytes / stored:.2f}" if stored else "",
            **harness.judged(gbps, judged),
        )

    def there_and_back(self, forward, backward, what):
        """Returns the seconds of a call that applies a delta to the weights. Calls apply one delta forward and the
        other one backward in turn."""
        turns = [(forward, self.new), (backward, self.base)]
        for turn, wanted in turns:
            turn()
            self.check(wanted, what)

        def call():
            turns[0][0]()
            turns.reverse()

        seconds = self.run.seconds([call], wall=True)
        if turns[0][0] is backward:
            call()
        return seconds


def measure_ibp(case):
    with case.run.cell(f"{case.name} {case.dtype}, {IBP}"):
        seconds = case.run.seconds([lambda: ibp.deltas.make(case.new, case.base)], wall=True)
        forward, backward = ibp.deltas.make(case.new, case.base), ibp.deltas.make(case.base, case.new)
        stored, num_bytes = forward.stored_bytes, case.num_bytes
        case.record(IBP, num_bytes, stored, seconds, 2 * num_bytes + stored, MAKE_GBPS)
        seconds = case.there_and_back(
            lambda: forward.apply_(case.weights), lambda: backward.apply_(case.weights), "apply"
        )
        case.record(APPLY, num_bytes, stored, seconds, num_bytes + stored, APPLY_GBPS)
        return stored


def plain_delta(new, base):
    """Returns int32 indices and new values, as bits, of each tensor."""
    found = {}
    for name, tensor in new.items():
        bits = bits_of(tensor).view(-1)
        indices = (bits != bits_of(base[name]).view(-1)).nonzero().view(-1).int()
        found[name] = indices, bits[indices]
    return found


def apply_plain(weights, delta):
    for name, (indices, values) in delta.items():
        bits_of(weights[name]).view(-1).index_copy_(0, indices.long(), values)


def measure_plain(case):
    with case.run.cell(f"{case.name} {case.dtype}, {PLAIN}"):
        seconds = case.run.seconds([lambda: plain_delta(case.new, case.base)], wall=True)
        forward, backward = plain_delta(case.new, case.base), plain_delta(case.base, case.new)
        num_bytes, stored = case.num_bytes, case.plain_bytes
        case.record(PLAIN, num_bytes, stored, seconds, 2 * num_bytes + stored)
        seconds = case.there_and_back(
            lambda: apply_plain(case.weights, forward), lambda: apply_plain(case.weights, backward), PLAIN
        )
        case.record(f"{PLAIN}, apply", num_bytes, stored, seconds, num_bytes + stored)


def measure_zstd(case):
    """Measures zstd on the CPU, for the first bytes of the first tensor."""
    if zstandard is None:
        return
    with case.run.cell(f"{case.name} {case.dtype}, {ZSTD}"):
        name = next(iter(case.base))
        count = ZSTD_BYTES // case.dtype.itemsize
        new, base = (bits_of(tensors[name]).view(-1)[:count].cpu() for tensors in (case.new, case.base))
        packer, unpacker = zstandard.ZstdCompressor(ZSTD_LEVEL), zstandard.ZstdDecompressor()
        packed = packer.compress((new ^ base).numpy().tobytes())

        def unpack():
            data = bytearray(unpacker.decompress(packed))
            return torch.frombuffer(data, dtype=new.dtype) ^ base

        harness.check_bits(unpack(), new, f"{case.name}, {ZSTD}")
        seconds = case.run.seconds([lambda: packer.compress((new ^ base).numpy().tobytes())], wall=True)
        case.record(ZSTD, new.nbytes, len(packed), seconds, 2 * new.nbytes + len(packed), on_gpu=False)
        seconds = case.run.seconds([unpack], wall=True)
        case.record(f"{ZSTD}, apply", new.nbytes, len(packed), seconds, new.nbytes + len(packed), on_gpu=False)


def checkpoint(run):
    """Returns (new, base) of the checkpoint, which is smaller in a quick run."""
    shapes = (
        [tuple(max(1, size // 64) for size in shape) for shape in SHAPES] if not run.on_gpu or run.quick else SHAPES
    )
    new, base = {}, {}
    for layer in range(LAYERS):
        for number, shape in enumerate(shapes):
            pair = stepped(torch.Size(shape).numel(), *CHECKPOINT_STEP[1:3], run.device)
            new[f"{layer}.{number}"], base[f"{layer}.{number}"] = (tensor.view(shape) for tensor in pair)
    return new, base


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("deltas", args, COLUMNS)
    torch.manual_seed(0)
    rates, shortfalls = codec.DeviceRates(run), []
    num_bytes = QUICK_TENSOR_BYTES if run.quick else TENSOR_BYTES if run.on_gpu else CPU_TENSOR_BYTES
    for name, dtype, rate, wanted in STEPS:
        with run.cell(name):
            new, base = stepped(num_bytes // dtype.itemsize, dtype, rate, run.device)
            case = Case(run, rates, name, {"weights": new}, {"weights": base})
            stored = measure_ibp(case)
            measure_plain(case)
            measure_zstd(case)
            if wanted and stored and case.plain_bytes < wanted * stored:
                shortfalls.append(f"{name}: {case.plain_bytes / stored:.2f} times fewer bytes, wanted {wanted}")
            del case, new, base
    with run.cell("checkpoint"):
        case = Case(run, rates, f"{LAYERS * len(SHAPES)} tensors, {CHECKPOINT_STEP[0]}", *checkpoint(run))
        measure_ibp(case)
        measure_plain(case)
    return run.finish([*shortfalls, *harness.missed(run.rows)])


if __name__ == "__main__":
    sys.exit(main())
