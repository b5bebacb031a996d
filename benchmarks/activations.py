"""What does it cost to keep activations out of a GPU's memory between the forward and the backward pass?

    python -m benchmarks.activations [--out DIR] [--device cpu] [--quick]

Steps (forward and backward pass, no optimizer) of the nets of nets.py in BF16: `plain`; `save_on_cpu`, torch's own
hooks with pinned memory; `raw`, `ibp.offload_activations(coded=False)`; `recomputed`, each block by
torch.utils.checkpoint; `ibp`; `on the device`, coded but not sent; `5 %`, with `slowdown=0.05`, and `5 % raw`, the same
without coding. The first steps of each arm, in which it learns and pins memory, do not count. `saved_gb` are the bytes
that leave or are coded, `sent_gb` those over the link each way, `peak_gb` what a step takes of the GPU's memory at most
beyond weights and input. `bound_ms` is the larger of the plain step and the time of sent_gb over the link and back.

Before it is timed, an arm's gradients are compared with plain's bit for bit, where plain's own are the same every time
with torch's deterministic algorithms (`checked` is `gradients`); else every saved tensor that comes back is (`saved
tensors`). Weights are random.
"""

import contextlib
import gc
import os
import statistics
import sys
import time
import warnings
from dataclasses import dataclass

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import ibp

from . import harness, ideal, nets

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # with which cuBLAS is deterministic

COLUMNS = (
    *("step_ms", "bound_ms", "peak_gb", "freed_gb", "saved_gb", "sent_gb", "outgrown_gb", "learning_s", "checked"),
    *("target_ms", "times_raw", "wanted_times_raw", "times_save_on_cpu", "wanted_times_save_on_cpu", "met"),
)
PLAIN, SAVE_ON_CPU, RAW, RECOMPUTED, IBP = "plain", "save_on_cpu", "raw", "recomputed", "ibp"
ON_DEVICE, BUDGET, RAW_BUDGET = "on the device", "5 %", "5 % raw"
LEARNING_STEPS, TIMED_STEPS = 4, 3
REPEATS = 5  # of a plain step, whose gradients may be other ones every time
OFFLOADS = (IBP, RAW, ON_DEVICE, BUDGET, RAW_BUDGET)
STEP_SHARE, TIMES_SAVE_ON_CPU, SLOWDOWN = 1.1, 3.0, 0.05  # wanted of a step, over bound_ms; over save_on_cpu
GB = 1e9


def dtype_on(device):
    """BF16, or FP32 on a CPU, many of which take long for BF16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@dataclass(frozen=True)
class Case:
    """A net and its input. wanted: times the raw hooks' rate, where the link binds."""

    name: str
    make: object
    shape: tuple
    wanted: float | None = None

    def build(self, device):
        torch.manual_seed(0)
        dtype = dtype_on(device)
        net = self.make().to(device, dtype)
        x = torch.randn(self.shape, dtype=dtype, device=device)
        if x.dim() == 4:
            net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        return net, x


CASES = (
    Case("ResNet-50", nets.resnet50, (256, 3, 224, 224), 1.7),
    Case("VGG16", nets.vgg16, (256, 3, 224, 224), 2.4),
    Case("SwiGLU 4096", lambda: nets.llama(2, 4096, 14336, 32), (2, 4096, 4096), 1.35),
    Case("ReLU squared 4096", lambda: nets.llama(2, 4096, 14336, 32, "relu2"), (2, 4096, 4096), 1.35),
    Case("AlexNet", nets.alexnet, (256, 3, 224, 224)),
    Case("SwiGLU 8192", lambda: nets.llama(1, 8192, 28672, 64), (1, 4096, 8192), 1.35),
)
QUICK_CASES = (
    Case("AlexNet", lambda: nets.alexnet(10, 0.1, 63), (4, 3, 63, 63)),
    Case("SwiGLU 64", lambda: nets.llama(1, 64, 176, 4), (2, 64, 64), 1.35),
)


def arms(run):
    """Name of each to what makes its context."""
    options = {"device": run.device.type, **({} if run.on_gpu else {"least_bytes": 4096})}
    return {
        PLAIN: contextlib.nullcontext,
        RECOMPUTED: contextlib.nullcontext,
        ON_DEVICE: lambda: ibp.offload_activations(to="device", **options),
        BUDGET: lambda: ibp.offload_activations(slowdown=SLOWDOWN, **options),
        RAW_BUDGET: lambda: ibp.offload_activations(slowdown=SLOWDOWN, coded=False, **options),
        IBP: lambda: ibp.offload_activations(**options),
        RAW: lambda: ibp.offload_activations(coded=False, **options),
        SAVE_ON_CPU: lambda: save_on_cpu(pin_memory=run.on_gpu),
    }


# ---- what is checked -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def deterministic(x):
    """torch's deterministic algorithms; for images without warnings of layers that have none. Attention has one where
    nothing else is allowed."""
    torch.use_deterministic_algorithms(True, warn_only=x.dim() == 4)
    torch.backends.cudnn.deterministic = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def gradients(net, x, context):
    torch.manual_seed(1)
    step(net, x, context)
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    return found


def same_bits(one, other):
    return all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(one, other, strict=True))


def bytes_of(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


@contextlib.contextmanager
def compared(offload):
    """The offload's hooks, and what comes back compared with what was saved, which stays."""
    with offload:
        pack, unpack = offload._pack, offload._unpack

        def check(saved):
            got = unpack(saved[0])
            if not same_bits([got], [saved[1]]):
                raise AssertionError(f"bits differ of a saved tensor {got.dtype} {list(got.shape)}")
            return got

        with saved_tensors_hooks(lambda x: (pack(x), x.detach().clone()), check):
            yield


def check(net, x, context, plain):
    """What was compared of a step of an offload. AssertionError: bits differ. plain: gradients of the plain step; None:
    it has other ones every time."""
    with deterministic(x):
        if plain is not None and same_bits(gradients(net, x, context), plain):
            return "gradients"
        gradients(net, x, compared(context))
        if plain is not None and repeats(net, x, plain):
            raise AssertionError("gradients differ from those of the plain step, whose saved tensors are the same")
    return "saved tensors"


def repeats(net, x, plain):
    """Whether plain steps have the gradients of an earlier one again and again: two can be equal by chance."""
    return all(same_bits(gradients(net, x, contextlib.nullcontext()), plain) for _ in range(REPEATS))


# ---- what is timed -------------------------------------------------------------------------------------------------


def step(net, x, context):
    with context:
        loss = net(x).float().square().mean()
    loss.backward()


class Measured:
    """An arm's steps: ms, peak bytes, and what it says of itself. plain: see `check`."""

    def __init__(self, run, net, x, arm, context, plain):
        self.checked, self.saved, self.sent, self.outgrown, self.peak_bytes = "", 0, 0, 0, 0
        started = time.perf_counter()
        for _ in range(LEARNING_STEPS if arm in OFFLOADS else 1):
            step(net, x, context)
            net.zero_grad()
        run.sync()
        self.learning_s = time.perf_counter() - started
        if arm in OFFLOADS:
            self.checked = check(net, x, context, plain)
        step(net, x, context)
        net.zero_grad()
        if run.on_gpu:
            before = torch.cuda.memory_allocated(run.device)
            torch.cuda.reset_peak_memory_stats(run.device)
        self.step_ms = 1e3 * statistics.median(self._seconds(run, net, x, context) for _ in range(TIMED_STEPS))
        if run.on_gpu:
            self.peak_bytes = torch.cuda.max_memory_allocated(run.device) - before
        if arm in OFFLOADS:
            stats = context.stats
            self.saved, self.sent = stats.coded_bytes + stats.raw_bytes, stats.sent_bytes
            self.outgrown = stats.outgrown_bytes

    def _seconds(self, run, net, x, context):
        if isinstance(context, ibp.ActivationOffload):
            context.reset_stats()
        seconds = run._wall_seconds(lambda: step(net, x, context))
        net.zero_grad()
        return seconds


def link_ms(num_bytes):
    """Of bytes from the device and back."""
    return 1e-6 * num_bytes * (1 / ideal.MACHINE.copy_out_gbps + 1 / ideal.MACHINE.copy_in_gbps)


def clean(run):
    """Nothing of an arm is left for the next one."""
    gc.collect()
    ibp.release_pinned()
    if run.on_gpu:
        torch.cuda.empty_cache()


def measure(run, case):
    net, x = case.build(run.device)
    with deterministic(x):
        plain, again = (gradients(net, x, contextlib.nullcontext()) for _ in range(2))
    plain = plain if same_bits(plain, again) else None
    del again
    found = {}
    for arm, make in arms(run).items():
        with run.cell(f"{case.name}, {arm}"):
            net.recompute = arm == RECOMPUTED
            found[arm] = Measured(run, net, x, arm, make(), plain)
        net.zero_grad()
        clean(run)
    for arm, of in found.items():
        record(run, case, arm, of, found)


def record(run, case, arm, of, found):
    plain, bound = found[PLAIN], max(found[PLAIN].step_ms, link_ms(of.sent))
    judged = {}
    if arm == IBP and {RAW, SAVE_ON_CPU} <= found.keys():
        raw, ours = found[RAW], found[SAVE_ON_CPU].step_ms / of.step_ms
        binds = case.wanted is not None and raw.step_ms >= case.wanted * plain.step_ms
        good = [of.step_ms <= STEP_SHARE * bound, ours >= TIMES_SAVE_ON_CPU]
        good += [raw.step_ms >= case.wanted * of.step_ms] if binds else []
        judged = {
            "target_ms": harness.four_digits(STEP_SHARE * bound),
            "times_raw": harness.four_digits(raw.step_ms / of.step_ms),
            "wanted_times_raw": case.wanted if binds else "",
            "times_save_on_cpu": harness.four_digits(ours),
            "wanted_times_save_on_cpu": TIMES_SAVE_ON_CPU,
            "met": "yes" if all(good) else "no",
        }
    shown = {
        "step_ms": of.step_ms,
        "bound_ms": bound,
        "peak_gb": of.peak_bytes / GB,
        "freed_gb": (plain.peak_bytes - of.peak_bytes) / GB,
        "saved_gb": of.saved / GB,
        "sent_gb": of.sent / GB,
        "outgrown_gb": of.outgrown / GB,
        "learning_s": of.learning_s,
    }
    run.add(
        case=case.name,
        arm=arm,
        rows=case.shape[0],
        row_bytes=dtype_on(run.device).itemsize * torch.Size(case.shape[1:]).numel(),
        dtype=dtype_on(run.device),
        savings=1 - of.sent / of.saved if of.sent else 0.0,
        gbps=max(of.saved, 1) * 1e-6 / of.step_ms,
        ideal_gbps=max(of.saved, 1) * 1e-6 / bound,
        sms=None,
        **{name: harness.four_digits(value) for name, value in shown.items()},
        checked=of.checked,
        **judged,
    )


def shortfalls(rows):
    """What is below its target."""
    for row in rows:
        if row.get("met") == "no":
            yield (
                f"{row['case']}: {row['step_ms']} ms, wanted {row['target_ms']}; {row['times_raw']} times raw, wanted "
                f"{row['wanted_times_raw'] or 'none'}; {row['times_save_on_cpu']} times save_on_cpu, wanted "
                f"{row['wanted_times_save_on_cpu']}"
            )


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("activations", args, COLUMNS)
    for case in QUICK_CASES if run.quick or not run.on_gpu else CASES:
        with run.cell(case.name):
            measure(run, case)
        clean(run)
    return run.finish(shortfalls(run.rows))


if __name__ == "__main__":
    sys.exit(main())
