"""What does it cost to keep activations out of a GPU's memory between the forward and the backward pass?

    python -m benchmarks.activations [--batches] [--out DIR] [--device cpu] [--quick] [--nets NAME,NAME]
        [--arms ARM,ARM]

Each arm runs steps (forward and backward pass, no optimizer) of the nets of nets.py in BF16:

`plain`            without any of these
`recomputed`       each block by torch.utils.checkpoint
`ibp`              `ibp.offload_activations`
`raw`              `ibp.offload_activations(coded=False)`
`recomputed + ibp` recomputed blocks, whose inputs are offloaded
`on the device`    `memory="device"`
`ibp by 16 SMs`    `max_sms=16`
`save_on_cpu`      torch's own hooks with pinned memory
`zeros listed`     `ibp` by cDMA's zero-value compression alone, in listed rows of scheme planes

The first steps of each arm, in which it learns and pins memory, do not count. In the arms `coding beside by N SMs`, 256
MiB of ReLU's outputs are compressed on N multiprocessors while a plain step runs; `gbps` is the rate during the step,
`ideal_gbps` the rate without one.

`saved_gb` counts the bytes that are offloaded or compressed, `sent_gb` those that cross the link each way, `peak_gb` is
the most GPU memory that a step takes beyond weights and input, and `freed_gb` is how much less that is than plain's.
`bound_ms` is the larger of the plain step and the time for sending sent_gb over the link and back. `times_smaller` is
saved bytes over sent bytes. `most_times_smaller` is what the entropy of the same tensors' elements would allow: the
entropy of the upper 16 bits of floats, with the lower bits as they are, and of int64 elements as they are coded.

The targets of `ibp`: a step takes at most 1.1 times bound_ms and is 3 times as fast as with `save_on_cpu`; if the link
is the bottleneck, it is some factor faster than `raw`; and saved bytes become some factor smaller. The target of `on
the device` is a lower peak than plain's.

`--nets` and `--arms` measure only the named nets and arms and `plain`, and keep the other rows of the CSV. `--batches`
measures only the rows of `ARM in 4 GB`: the largest batch (`rows`) that trains if torch may take 4 GB of the GPU, and
the time of its step.

`zeros listed` stands for cDMA's engine: each row has one bit for each element, or a list of positions if that is
shorter, and the elements that are not zero (FORMAT.md section 6). Kernels and hooks are those of `ibp`, and tensors
that would gain nothing are sent raw, as there. throttle.py measures more numbers of SMs, energy, and several GPUs.

Before an arm is timed, its gradients are compared with plain's bit for bit, if plain's own are the same every time with
torch's deterministic algorithms (`checked` is `gradients`; plain's is `repeats`). Otherwise every saved tensor is
compared when it comes back (`saved tensors`; plain's is `differs`). Weights are random, except in `trained` nets, which
densities.py trains.
"""

import argparse
import contextlib
import functools
import os
import statistics
import sys
import time
import warnings
from dataclasses import dataclass

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

import ibp
from ibp._activations import coding, offload
from ibp._rows import geometry
from ibp._rows.codebook import surveyed

from . import densities, harness, ideal, nets

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this setting.

COLUMNS = (
    *("step_ms", "bound_ms", "peak_gb", "freed_gb", "pinned_gb", "saved_gb", "sent_gb", "outgrown_gb", "learning_s"),
    *("checked", "target_ms", "times_raw", "wanted_times_raw", "times_save_on_cpu", "wanted_times_save_on_cpu"),
    *("times_smaller", "wanted_times_smaller", "most_times_smaller", "met"),
)
PLAIN, SAVE_ON_CPU, RAW, RECOMPUTED, IBP = "plain", "save_on_cpu", "raw", "recomputed", "ibp"
ON_DEVICE, RECOMPUTED_IBP, LISTED_ZEROS = "on the device", "recomputed + ibp", "zeros listed"
FEW_SMS = 16
IBP_FEW, BESIDE = f"ibp by {FEW_SMS} SMs", "coding beside by "
# Compression beside a plain step is measured for these nets and numbers of SMs, and calls it at least BESIDE_CODINGS
# times.
BESIDE_NETS, BESIDE_SMS, BESIDE_CODINGS = ("ResNet-50", "SwiGLU 4096"), (8, 16, 32), 4
# The GPU sleeps for this many cycles, about 0.1 s. The host can queue all codings meanwhile, because codings of this
# many bytes need few launches.
BESIDE_BYTES, QUEUED_CYCLES = 256 << 20, 200_000_000
CAPPED_GB = 4
CAPPED = f" in {CAPPED_GB} GB"  # The names of these arms end with this text.
CAPPED_NETS, CAPPED_ARMS = ("ResNet-50", "VGG16"), (PLAIN, RECOMPUTED, IBP, ON_DEVICE)
QUICK_NETS = ("ReLU RNN 32",)
BATCHES, QUICK_BATCHES = (32, 64, 80, 96, 128, 192, 256, 384, 512), (2, 4)
LEARNING_STEPS, TIMED_STEPS = 3, 3
REPEATS = 5  # The gradients of this many plain steps are compared, because they may differ from step to step.
# The entropy of a tensor, and what listing its zeros saves, are computed from this many rows, which have 16 MiB.
SAMPLED_ROWS = 4096
# Targets: a step takes at most 1.1 times bound_ms, and is 3 times as fast as save_on_cpu.
STEP_SHARE, TIMES_SAVE_ON_CPU = 1.1, 3.0
GB = 1e9


@dataclass(frozen=True)
class Case:
    """A net and its input.

    Attributes:
        wanted: the target for the time of raw hooks over ours, which holds if the link is the bottleneck. None: no
            target.
        smaller: the target for saved over sent bytes. None: no target.
        dtype: the dtype on a GPU.
        plan: how the net is trained. None: its weights are random.
    """

    name: str
    make: object
    shape: tuple
    wanted: float | None = None
    smaller: float | None = None
    dtype: torch.dtype = torch.bfloat16
    plan: densities.Plan | None = None

    def dtype_on(self, device):
        """Returns the dtype on a device. It is FP32 on a CPU, because many CPUs are slow in BF16."""
        return self.dtype if device.type == "cuda" else torch.float32

    def build(self, device, batch=None):
        """Returns the net, and a batch of the case's size or of another one."""
        torch.manual_seed(0)
        dtype, count = self.dtype_on(device), batch or self.shape[0]
        if self.plan is not None:
            net, x = (of.to(dtype) for of in densities.trained(self.plan, device, count))
        else:
            with torch.device(device):
                net = self.make().to(dtype)
            x = torch.randn(count, *self.shape[1:], dtype=dtype, device=device)
        if x.dim() == 4:
            net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        return net, x


CASES = (
    Case("ResNet-50", nets.resnet50, (256, 3, 224, 224), 1.7, 2.05),
    Case("VGG16", nets.vgg16, (256, 3, 224, 224), 2.4, 3.3),
    Case("SwiGLU 4096", lambda: nets.llama(2, 4096, 14336, 32), (2, 4096, 4096), 1.35, 1.51),
    Case("ReLU squared 4096", lambda: nets.llama(2, 4096, 14336, 32, "relu2"), (2, 4096, 4096), None, 1.86),
    Case("AlexNet", nets.alexnet, (256, 3, 224, 224), None, 3.1),
    Case("trained AlexNet", None, (256, 3, 224, 224), plan=densities.Plan("AlexNet", 224, 128, 600)),
    Case("trained VGG16", None, (128, 3, 224, 224), plan=densities.Plan("VGG16", 224, 64, 110)),
    Case("SwiGLU 8192", lambda: nets.llama(1, 8192, 28672, 64), (1, 4096, 8192), 1.35, 1.51),
    Case("ReLU squared 8192", lambda: nets.llama(1, 8192, 28672, 64, "relu2"), (1, 4096, 8192), None, 1.86),
    *(
        Case(name, lambda kind=kind: nets.Blocks([nets.Recurrent(kind, 1024, 2)]), (64, 512, 1024), dtype=torch.float16)
        for name, kind in (("LSTM 1024", "lstm"), ("ReLU RNN 1024", "relu"))  # cuDNN always supports FP16.
    ),
)
QUICK_CASES = (
    Case("trained AlexNet", None, (4, 3, 64, 64), plan=densities.Plan("AlexNet", 64, 8, 4, 0.05)),
    Case("AlexNet", lambda: nets.alexnet(10, 0.1, 63), (4, 3, 63, 63)),
    Case("SwiGLU 64", lambda: nets.llama(1, 64, 176, 4), (2, 64, 64), 1.35),
    Case("ReLU RNN 32", lambda: nets.Blocks([nets.Recurrent("relu", 32)]), (4, 32, 32)),
)


def least_bytes(run):
    """Returns the size from which on tensors are offloaded. Nets for a CPU are small."""
    return offload.LEAST_BYTES if run.on_gpu else 4096


def offloaded(run, **options):
    """Returns the context of an arm that offloads activations. options: those of `ibp.offload_activations`."""
    return ibp.offload_activations(device=run.device.type, least_bytes=least_bytes(run), **options)


def arms(run):
    """Returns {name of an arm: a function that makes its context}."""
    return {
        PLAIN: contextlib.nullcontext,
        RECOMPUTED: contextlib.nullcontext,
        IBP: lambda: offloaded(run),
        RAW: lambda: offloaded(run, coded=False),
        RECOMPUTED_IBP: lambda: offloaded(run),
        ON_DEVICE: lambda: offloaded(run, memory="device"),
        IBP_FEW: lambda: offloaded(run, max_sms=FEW_SMS),
        LISTED_ZEROS: lambda: zeros_listed(run),
        SAVE_ON_CPU: lambda: save_on_cpu(pin_memory=run.on_gpu),
    }


class ListedZeros(offload.ActivationPolicy):
    """Encodes each region by cDMA's zero-value compression (section V-A). A region that this does not make smaller is
    sent raw."""

    def __init__(self):
        super().__init__("pinned", True, None)
        self.recipes = {}  # by a region's number in its pass, and dtype

    def _recipe(self, number, data, view):
        key = number, view.dtype
        if key not in self.recipes:
            self.recipes[key] = zeros_recipe(data, view.dtype)
        return self.recipes[key]


def zeros_listed(run):
    """Returns the context of the arm LISTED_ZEROS."""
    device = None if run.on_gpu else run.device
    return offload.ActivationOffload(ListedZeros(), least_bytes(run), offload.WINDOW_BYTES, 0, device)


def zeros_recipe(data, dtype):
    """Returns a recipe with which rows list the elements that are not zero, in all their bits, or None if this makes
    them no smaller. data: uint8 [num_bytes]."""
    codebook = ibp.codecs.PlanesCodebook(
        row_bytes=coding.ROW_BYTES,
        element_bytes=dtype.itemsize,
        rotate=0,
        residual_bits=8 * dtype.itemsize,
        digit_bits=(),
        per_column=False,
        listed=True,
        default=0,
        closed=0,
        entries=torch.empty(1, 0, dtype=torch.int64),
    )
    rows = geometry.sample(data, coding.ROW_BYTES, SAMPLED_ROWS)
    share = surveyed(rows, codebook).spilled(0)[1] / rows.numel() if rows.numel() else 1.0
    return coding.ActivationRecipe(codebook, share) if share < 1 else None


# ---- what is checked -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def deterministic(x):
    """Uses torch's deterministic algorithms inside a block. If x is a batch of images, layers without such an algorithm
    are allowed, without a warning. FlashAttention becomes deterministic if it is the only kind of attention that is
    allowed; no other kind does."""
    attention = contextlib.nullcontext()
    if x.is_cuda and x.dim() == 3:
        attention = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    torch.use_deterministic_algorithms(True, warn_only=x.dim() == 4)
    torch.backends.cudnn.deterministic = True
    try:
        with warnings.catch_warnings(), attention:
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


def plain_gradients(net, x):
    """Returns the gradients of a plain step, or None if those of a second step have other bits."""
    with deterministic(x):
        plain, again = (gradients(net, x, contextlib.nullcontext()) for _ in range(2))
    return plain if same_bits(plain, again) else None


def same_bits(one, other):
    return all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(one, other, strict=True))


def bytes_of(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


@contextlib.contextmanager
def compared(offload):
    """Installs an offload's hooks. Also keeps a copy of every saved tensor, and compares it with what comes back."""
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
    """Runs a step with an offload and returns what was compared. Raises AssertionError if bits differ. plain: the
    gradients of the plain step, or None if they differ from step to step."""
    with deterministic(x):
        if plain is not None and same_bits(gradients(net, x, context), plain):
            return "gradients"
        gradients(net, x, compared(context))
        if plain is not None and repeats(net, x, plain):
            raise AssertionError("gradients differ from those of the plain step, whose saved tensors are the same")
    return "saved tensors"


def repeats(net, x, plain):
    """Returns whether REPEATS plain steps have the gradients of an earlier one. Two could be equal by chance."""
    return all(same_bits(gradients(net, x, contextlib.nullcontext()), plain) for _ in range(REPEATS))


# ---- how small saved bytes could be --------------------------------------------------------------------------------


def most_times_smaller(net, x, least_bytes):
    """Returns how many times smaller their entropy makes the tensors that are offloaded in a step."""
    spans_seen, sizes = set(), []

    def note(saved):
        found = coding.span_of(saved) if coding.is_plain(saved) and not coding.is_of_parameter(saved) else None
        if found is not None and found[0] not in spans_seen and found[0].num_bytes >= least_bytes:
            spans_seen.add(found[0])
            data = coding.bytes_of(saved.detach(), found[0])
            sizes.append((data.numel(), data.numel() * entropy_share(data, found[1])))
        return saved

    with saved_tensors_hooks(note, lambda saved: saved):
        net(x)
    return sum(size for size, _ in sizes) / sum(least for _, least in sizes)


def entropy_share(data, view):
    """Returns the entropy of a tensor's elements as a share of its bytes, computed from some of its rows. data: uint8
    [num_bytes]."""
    size = view.dtype.itemsize
    if size == 8:
        recipe = coding.learn(data, view)
        return 1.0 if recipe is None else recipe.needed_share / recipe.times_narrower
    rows = data[: data.numel() // coding.ROW_BYTES * coding.ROW_BYTES].view(-1, coding.ROW_BYTES)
    rows = rows[torch.randperm(len(rows), device=data.device)[:SAMPLED_ROWS]]
    coded = min(2, size)  # These are the upper bytes.
    elements = rows.view(-1, size)[:, size - coded :].contiguous().view(torch.int16 if coded == 2 else torch.uint8)
    counts = torch.bincount(elements.view(-1).int() & (256**coded - 1), minlength=256**coded).double()
    shares = counts[counts > 0] / counts.sum()
    return (-(shares * shares.log2()).sum().item() / 8 + size - coded) / size


# ---- what is timed -------------------------------------------------------------------------------------------------


def step(net, x, context):
    with context:
        loss = net(x).float().square().mean()
    loss.backward()


class Measured:
    """The steps of an arm: their time in ms, their peak bytes and the offload's statistics. plain: see `check`."""

    def __init__(self, run, net, x, arm, context, plain):
        self.checked, self.saved, self.sent, self.outgrown, self.peak_bytes, self.pinned = "", 0, 0, 0, 0, 0
        started = time.perf_counter()
        self._learn(run, net, x, context)
        self.learning_s = time.perf_counter() - started
        is_offload = isinstance(context, ibp.ActivationOffload)
        if is_offload:
            self.checked = check(net, x, context, plain)
        elif arm == PLAIN:
            self.checked = "differs" if plain is None else "repeats"
        if arm != SAVE_ON_CPU:
            step(net, x, context)
            net.zero_grad()
        if run.on_gpu:
            before = torch.cuda.memory_allocated(run.device)
            torch.cuda.reset_peak_memory_stats(run.device)
        count = 1 if arm == SAVE_ON_CPU else TIMED_STEPS
        self.step_ms = 1e3 * statistics.median(self._seconds(run, net, x, context) for _ in range(count))
        if run.on_gpu:
            self.peak_bytes = torch.cuda.max_memory_allocated(run.device) - before
        if is_offload:
            stats = context.stats()
            self.saved, self.sent = stats.coded_bytes + stats.raw_bytes, stats.sent_bytes
            self.outgrown, self.pinned = stats.outgrown_bytes, context.pinned_bytes

    def _learn(self, run, net, x, context):
        for _ in range(LEARNING_STEPS):
            step(net, x, context)
            net.zero_grad()
            run.sync()

    def _seconds(self, run, net, x, context):
        if hasattr(context, "reset_stats"):
            context.reset_stats()
        seconds = run._wall_seconds(lambda: step(net, x, context))
        net.zero_grad()
        return seconds


def link_ms(num_bytes):
    """Returns the time for sending bytes from the device and back."""
    return 1e-6 * num_bytes * (1 / ideal.MACHINE.copy_out_gbps + 1 / ideal.MACHINE.copy_in_gbps)


def clean(run):
    """Frees everything that an arm has left."""
    harness.release(run)
    ibp.release_pinned()


def measure(run, case, names):
    net, x = case.build(run.device)
    plain, found = plain_gradients(net, x), {}
    for arm, make in arms(run).items():
        if names is not None and arm not in (PLAIN, *names):
            continue
        with run.cell(f"{case.name}, {arm}"):
            net.recompute = arm in (RECOMPUTED, RECOMPUTED_IBP)
            found[arm] = Measured(run, net, x, arm, make(), plain)
        net.zero_grad()
        clean(run)
    if case.name in (QUICK_NETS if run.quick else BESIDE_NETS):
        measure_beside(run, case, net, x, found[PLAIN].step_ms, names)
    most = most_times_smaller(net, x, least_bytes(run)) if IBP in found else None
    for arm, of in found.items():
        record(run, case, arm, of, found, most)


def relu_outputs(run):
    """Returns the outputs of a ReLU as uint8, and a recipe to encode them."""
    count = coding.PIECE_BYTES // 1024 if run.quick else BESIDE_BYTES
    x = torch.randn(count // 2, device=run.device).relu().bfloat16()
    data = x.view(torch.uint8)
    return data, coding.learn(data, coding.span_of(x)[1])


def measure_beside(run, case, net, x, plain_ms, names):
    """Measures plain steps during which outputs of a ReLU are encoded again and again, for about as long as a step
    takes."""
    data, recipe = relu_outputs(run)
    memory = torch.empty(coding.memory_bytes(data.numel()), dtype=torch.uint8, device=run.device)
    for sms in BESIDE_SMS:
        arm = f"{BESIDE}{sms} SMs"
        if names is not None and arm not in names:
            continue
        with run.cell(f"{case.name}, {arm}"):
            alone_s = run.seconds([lambda sms=sms: coding.encode(data, recipe, memory, sms)])
            count = max(BESIDE_CODINGS, round(1e-3 * plain_ms / alone_s))
            call = functools.partial(coding.encode, data, recipe, memory, sms)
            times = [beside(run, net, x, call, count) for _ in range(TIMED_STEPS)]
            step_s, coding_s = (statistics.median(of) for of in zip(*times))
            run.add(
                case=case.name,
                arm=arm,
                rows=count,
                row_bytes=data.numel(),
                dtype=torch.bfloat16,
                savings=1 - recipe.coded_share,
                gbps=1e-9 * count * data.numel() / coding_s,
                ideal_gbps=1e-9 * data.numel() / alone_s,
                sms=sms,
                step_ms=harness.four_digits(1e3 * step_s),
                bound_ms=harness.four_digits(plain_ms),
            )


def beside(run, net, x, call, count):
    """Returns (seconds of a plain step, seconds of `count` calls). They run on two streams, which begin together after
    the host has queued both."""

    def calls():
        for _ in range(count):
            call()

    if not run.on_gpu:
        return tuple(run._wall_seconds(work) for work in (lambda: step(net, x, contextlib.nullcontext()), calls))
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    begun, stepped, coded = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    run.sync()
    torch.cuda._sleep(QUEUED_CYCLES)
    begun.record(main)
    side.wait_event(begun)
    with torch.cuda.stream(side):
        calls()
        coded.record(side)
    step(net, x, contextlib.nullcontext())
    stepped.record(main)
    run.sync()
    net.zero_grad()
    return 1e-3 * begun.elapsed_time(stepped), 1e-3 * begun.elapsed_time(coded)


# ---- larger batches ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def capped(run):
    """Limits torch to CAPPED_GB of the GPU's memory."""
    if not run.on_gpu:
        yield
        return
    total = torch.cuda.get_device_properties(run.device).total_memory
    torch.cuda.set_per_process_memory_fraction(CAPPED_GB * GB / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def largest_batch(run, case, arm):
    """Returns (the largest batch that trains, the milliseconds of its step)."""
    found = None
    for batch in QUICK_BATCHES if run.quick or not run.on_gpu else BATCHES:
        try:
            net, x = case.build(run.device, batch)
            net.recompute, context = arm == RECOMPUTED, arms(run)[arm]()
            for _ in range(LEARNING_STEPS - 1):
                step(net, x, context)
                net.zero_grad()
            times = [run._wall_seconds(lambda: step(net, x, context)) for _ in range(TIMED_STEPS)]
            found = batch, 1e3 * statistics.median(times)
        except torch.OutOfMemoryError:
            break
        finally:
            net = x = context = None
            harness.release(run)
    if found is None:
        raise AssertionError(f"no batch of {case.name} trains, {arm}{CAPPED}")
    return found


def measure_batches(run, case):
    """Measures what memory for larger batches gains, as figure 13 of Buddy Compression does."""
    row_bytes = case.dtype_on(run.device).itemsize * torch.Size(case.shape[1:]).numel()
    plain_gbps = None
    for arm in CAPPED_ARMS:
        with run.cell(f"{case.name}, {arm}{CAPPED}"), capped(run):
            batch, ms = largest_batch(run, case, arm)
            gbps = 1e-6 * batch * row_bytes / ms
            plain_gbps = plain_gbps or gbps
            run.add(
                case=case.name,
                arm=arm + CAPPED,
                rows=batch,
                row_bytes=row_bytes,
                dtype=case.dtype_on(run.device),
                savings=0.0,
                gbps=gbps,
                ideal_gbps=plain_gbps,
                sms=None,
                step_ms=harness.four_digits(ms),
            )
        clean(run)


def judged_ibp(case, of, found, bound, most):
    """Returns the columns for the targets of `ibp`. most: how many times smaller the saved bytes could be; the target
    is at most a part of it."""
    raw, ours = found[RAW], found[SAVE_ON_CPU].step_ms / of.step_ms
    smaller = of.saved / of.sent if of.sent else 0.0
    wanted_smaller = None if case.smaller is None else min(case.smaller, harness.MOST_WANTED * most)
    binds = case.wanted is not None and raw.step_ms >= case.wanted * found[PLAIN].step_ms
    good = [of.step_ms <= STEP_SHARE * bound, ours >= TIMES_SAVE_ON_CPU]
    good += [raw.step_ms >= case.wanted * of.step_ms] if binds else []
    good += [smaller >= wanted_smaller] if wanted_smaller is not None else []
    return {
        "target_ms": harness.four_digits(STEP_SHARE * bound),
        "times_raw": harness.four_digits(raw.step_ms / of.step_ms),
        "wanted_times_raw": case.wanted if binds else "",
        "times_save_on_cpu": harness.four_digits(ours),
        "wanted_times_save_on_cpu": TIMES_SAVE_ON_CPU,
        "times_smaller": harness.four_digits(smaller),
        "wanted_times_smaller": harness.four_digits(wanted_smaller) if wanted_smaller is not None else "",
        "most_times_smaller": harness.four_digits(most),
        "met": "yes" if all(good) else "no",
    }


def record(run, case, arm, of, found, most):
    plain, bound = found[PLAIN], max(found[PLAIN].step_ms, link_ms(of.sent))
    judged = {}
    if arm == IBP and {RAW, SAVE_ON_CPU} <= found.keys():
        judged = judged_ibp(case, of, found, bound, most)
    elif arm == ON_DEVICE and run.on_gpu:
        judged = {"met": "yes" if of.peak_bytes < plain.peak_bytes else "no"}
    shown = {
        "step_ms": of.step_ms,
        "bound_ms": bound,
        "peak_gb": of.peak_bytes / GB,
        "freed_gb": (plain.peak_bytes - of.peak_bytes) / GB,
        "pinned_gb": of.pinned / GB,
        "saved_gb": of.saved / GB,
        "sent_gb": of.sent / GB,
        "outgrown_gb": of.outgrown / GB,
        "learning_s": of.learning_s,
    }
    run.add(
        case=case.name,
        arm=arm,
        rows=case.shape[0],
        row_bytes=case.dtype_on(run.device).itemsize * torch.Size(case.shape[1:]).numel(),
        dtype=case.dtype_on(run.device),
        savings=1 - of.sent / of.saved if of.sent else 0.0,
        gbps=max(of.saved, 1) * 1e-6 / of.step_ms,
        ideal_gbps=max(of.saved, 1) * 1e-6 / bound,
        sms=None,
        **{name: harness.four_digits(value) for name, value in shown.items()},
        checked=of.checked,
        **judged,
    )


def shortfalls(rows):
    """Yields a line for each row that misses its target."""
    for row in rows:
        if row.get("met") != "no":
            continue
        if row["arm"] == ON_DEVICE:
            yield f"{row['case']}, {ON_DEVICE}: a peak of {row['peak_gb']} GB, which frees {row['freed_gb']} GB"
            continue
        yield (
            f"{row['case']}: {row['step_ms']} ms, wanted {row['target_ms']}; {row['times_raw']} times raw, wanted "
            f"{row['wanted_times_raw'] or 'none'}; {row['times_save_on_cpu']} times save_on_cpu, wanted "
            f"{row['wanted_times_save_on_cpu']}; {row['times_smaller']} times smaller, {row['most_times_smaller']} by "
            f"entropy, wanted {row['wanted_times_smaller'] or 'none'}"
        )


def named(argv):
    """Returns (names of the nets and of the arms to measure, None for all; whether to measure batches; the other
    arguments)."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--batches", action="store_true")
    for name in ("--nets", "--arms"):
        parser.add_argument(name, type=lambda text: text.split(","))
    found, others = parser.parse_known_args(argv)
    return found.nets, found.arms, found.batches, others


def main(argv=None):
    names, arm_names, batches, others = named(argv)
    args = harness.parse_args(others, __doc__)

    def is_kept(row):
        is_other_arm = arm_names is not None and row["arm"] not in (PLAIN, *arm_names)
        is_of_batches = row["arm"].endswith(CAPPED)
        return is_of_batches != batches or is_other_arm or (names is not None and row["case"] not in names)

    run = harness.Run("activations", args, COLUMNS, keep=is_kept)
    if batches:
        run.scratch = None  # This buffer would take memory of the cap.
    for case in QUICK_CASES if run.quick or not run.on_gpu else CASES:
        if names is not None and case.name not in names:
            continue
        with run.cell(case.name):
            if not batches:
                measure(run, case, arm_names)
            elif case.name in (QUICK_NETS if run.quick else CAPPED_NETS):
                measure_batches(run, case)
        clean(run)
    return run.finish(shortfalls(run.rows))


if __name__ == "__main__":
    sys.exit(main())
