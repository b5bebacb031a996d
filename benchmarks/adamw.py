"""What does a step of AdamW cost whose states are coded, and how small are they?

    python -m benchmarks.adamw [--out DIR] [--device cpu] [--quick]

Arms: `torch`, `torch.optim.AdamW(fused=True)`; `torch, states in pinned memory`, the same kernel with raw states that
the copy engine brings and takes, a chunk ahead; `ibp` and `ibp, fast`, `ibp.optim.AdamW` at both levels; `ibp, pinned`,
with `memory="pinned"`. All arms take the same gradients in the same steps, and their weights are compared bit for bit
after the last one.

Models: one tensor of 1 GiB; 320 small ones; 96 of 4 MiB; blocks of Llama's shape, trained; the same in BF16; an
embedding table of which 1 % of the rows have gradients. A model that takes longer than its share of a minute gets fewer
steps. `gbps` counts the 28 bytes an FP32 parameter (14 of BF16) that torch's kernel moves, `ideal_gbps` is what `copy_`
moves. Of the steps' times `ms` is the median; `first_ms` is the first one, which learns all codebooks and takes all
memory; `mean_ms` and `slowest_ms` are the mean and the most of the others, with the codebooks that they learn;
`host_ms` is the median until the call returns. The GPU is idle when a step begins. `ratio` is to `torch`.
"""

import statistics
import sys
import time

import torch

import ibp
from ibp.optim._learning import ROW_BYTES

from . import harness, nets

COLUMNS = (
    "ms",
    "mean_ms",
    "first_ms",
    "slowest_ms",
    "host_ms",
    "ratio",
    "m_savings",
    "v_savings",
    "device_bytes",
    "host_bytes",
    "steps",
    "target_ratio",
    "met",
)
TORCH, RAW, IBP, FAST, PINNED = "torch", "torch, states in pinned memory", "ibp", "ibp, fast", "ibp, pinned"
ARMS = {  # how many steps each takes at most, and the options of ibp.optim.AdamW
    TORCH: (1 << 30, None),
    RAW: (5, None),
    IBP: (1 << 30, {}),
    FAST: (1 << 30, {"level": "fast"}),
    PINNED: (5, {"memory": "pinned"}),
}
MOST_RATIO = 4.0  # of a step to torch's, states on the device
RATE, MOVED_VALUES = 1e-3, 7  # read: weight, gradient, both states; written: weight, both states
MODEL_SECONDS, LEAST_STEPS = 10, 6  # of a model, from which on it gets no more steps than these
CHUNK_BYTES, NUM_NEAR = 64 << 20, 3  # of raw states in pinned memory, and how many are on the device


class RawOffload:
    """Steps of torch's fused kernel over raw states in pinned memory: three chunks at a time are on the device, one of
    which is used while others come and go."""

    def __init__(self, params, lr):
        self.params, self.options = list(params), {"lr": lr, "beta1": 0.9, "beta2": 0.999}
        self.count = torch.zeros((), device=self.params[0].device)
        most = CHUNK_BYTES // (2 * self.params[0].element_size())
        self.pieces = [(p, k, min(k + most, p.numel())) for p in self.params for k in range(0, p.numel(), most)]
        on_gpu, like = self.count.is_cuda, self.params[0]
        self.kept = [
            [torch.zeros(end - start, dtype=p.dtype, pin_memory=on_gpu) for _ in "mv"] for p, start, end in self.pieces
        ]
        self.near = [[torch.empty(most, dtype=like.dtype, device=like.device) for _ in "mv"] for _ in range(NUM_NEAR)]
        if on_gpu:
            self.into, self.out = torch.cuda.Stream(), torch.cuda.Stream()
            self.taken = [torch.cuda.Event() for _ in self.near]

    @torch.no_grad()
    def step(self):
        self.count += 1
        if not self.count.is_cuda:
            for i, kept in enumerate(self.kept):
                self._update(i, kept)
            return
        main = torch.cuda.current_stream()
        self.into.wait_stream(main)
        for i, kept in enumerate(self.kept):
            turn = i % NUM_NEAR
            near = [memory[: len(raw)] for memory, raw in zip(self.near[turn], kept)]
            self.into.wait_event(self.taken[turn])
            with torch.cuda.stream(self.into):
                for memory, raw in zip(near, kept):
                    memory.copy_(raw, non_blocking=True)
            main.wait_stream(self.into)
            self._update(i, near)
            self.out.wait_stream(main)
            with torch.cuda.stream(self.out):
                for raw, memory in zip(kept, near):
                    raw.copy_(memory, non_blocking=True)
            self.taken[turn].record(self.out)
        main.wait_stream(self.out)

    def _update(self, i, states):
        param, start, end = self.pieces[i]
        weights, grads = (tensor.detach().view(-1)[start:end] for tensor in (param, param.grad))
        lists = [[x] for x in (weights, grads, *states)]
        torch._fused_adamw_(
            *lists, [], [self.count], **self.options, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False
        )


class Model:
    """Parameters, and a function that gives them the gradients of a step."""

    def __init__(self, params, give, steps):
        self.params, self.give, self.steps = params, give, steps


def one_tensor(run):
    rows = 256 if run.quick else 1 << 18
    return Model([normal((rows, 1024), run.device)], given_normal, 4 if run.quick else 32)


def small_tensors(run):
    """Weights of 4 KiB to 2.25 MiB, as many as a ResNet-101 has, and a vector for each."""
    widths = [32 * (1 + i % 24) for i in range(8 if run.quick else 160)]
    shapes = [shape for width in widths for shape in ((width, width), (width,))]
    return Model([normal(shape, run.device) for shape in shapes], given_normal, 4 if run.quick else 32)


def many_tensors(run):
    """Weights that are just large enough to have codebooks of their own."""
    count, rows = (3, 1024) if run.quick else (96, 1024)
    return Model([normal((rows, 1024), run.device) for _ in range(count)], given_normal, 4 if run.quick else 32)


def embedding(run):
    rows = 1000 if run.quick else 1 << 20
    alive = (torch.rand(rows, device=run.device) < 0.01).nonzero()[:, 0]

    def give(params):
        (table,) = params
        table.grad = torch.zeros_like(table)
        table.grad[alive] = torch.randn(len(alive), table.shape[1], device=run.device) * 1e-3

    return Model([normal((rows, 128), run.device)], give, 4 if run.quick else 24)


def llama(run, dtype=torch.float32):
    """Blocks that learn to double what they are given."""
    hidden, layers, tokens = (64, 1, 32) if run.quick else (2048, 2, 512)
    net = nets.llama(layers, hidden, hidden * 11 // 4, hidden // 64).to(run.device, dtype)
    noise = torch.Generator(run.device).manual_seed(0)

    def give(params):
        x = torch.randn(2, tokens, hidden, generator=noise, device=run.device).to(dtype)
        net.zero_grad()
        (net(x) - 2 * x).float().square().mean().backward()

    return Model([param for param in net.parameters() if param.requires_grad], give, 4 if run.quick else 24)


MODELS = {
    "one tensor": one_tensor,
    "small tensors": small_tensors,
    "tensors of 4 MiB": many_tensors,
    "Llama's shape": llama,
    "Llama's shape, BF16": lambda run: llama(run, torch.bfloat16),
    "embedding, 1 % alive": embedding,
}


def normal(shape, device):
    return torch.nn.Parameter(torch.randn(shape, device=device) * 0.02)


def given_normal(params):
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3


class Arm:
    """An optimizer of parameters of its own, and the seconds of its steps."""

    def __init__(self, run, name, params):
        self.run, self.name, (self.most_steps, options) = run, name, ARMS[name]
        self.seconds, self.host_seconds = [], []
        self.params = params if name == TORCH else [torch.nn.Parameter(param.detach().clone()) for param in params]
        if name == RAW:
            self.optimizer = RawOffload(self.params, RATE)
        elif name == TORCH:
            self.optimizer = torch.optim.AdamW(self.params, RATE, fused=True)
        else:
            self.optimizer = ibp.optim.AdamW(self.params, RATE, **options)

    def step(self, grads):
        for param, grad in zip(self.params, grads):
            param.grad = grad
        self.run.sync()
        if self.run.on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        started = time.perf_counter()
        self.optimizer.step()
        self.host_seconds.append(time.perf_counter() - started)
        if self.run.on_gpu:
            end.record()
            self.run.sync()
            self.seconds.append(start.elapsed_time(end) * 1e-3)
        else:
            self.seconds.append(self.host_seconds[-1])
        if self.params is not grads and self.name != TORCH:
            for param in self.params:
                param.grad = None

    def savings(self):
        """(exp_avg, exp_avg_sq, bytes on the device, bytes of host memory)."""
        raw = 2 * sum(param.numel() * param.element_size() for param in self.params)
        if self.name in (TORCH, RAW):
            return 0.0, 0.0, *((raw, 0) if self.name == TORCH else (NUM_NEAR * CHUNK_BYTES, raw))
        usages = self.optimizer.stats().values()
        return (
            *(usage.savings for usage in usages),
            sum(u.device_bytes for u in usages),
            sum(u.host_bytes for u in usages),
        )


def measure(run, name, copy_gbps):
    started, model = time.perf_counter(), MODELS[name](run)
    arms = [Arm(run, arm, model.params) for arm in ARMS]
    for number in range(model.steps):
        model.give(model.params)
        grads = [param.grad for param in model.params]
        for arm in arms:
            if number < arm.most_steps:
                arm.step(grads)
        is_last = number + 1 == model.steps
        is_last |= number + 1 >= LEAST_STEPS and time.perf_counter() - started > MODEL_SECONDS
        for arm in arms[1:]:
            if number + 1 == arm.most_steps or (is_last and number < arm.most_steps):
                check_weights(model, arm, f"{name}, {arm.name}")
        if is_last:
            break
    of_torch = statistics.median(arms[0].seconds)
    for arm in arms:
        record(run, name, model, arm, of_torch, copy_gbps)


def check_weights(model, arm, what):
    for param, wanted in zip(arm.params, model.params):
        harness.check_bits(param.detach(), wanted.detach(), what)


def record(run, name, model, arm, of_torch, copy_gbps):
    seconds, num_params = statistics.median(arm.seconds), sum(param.numel() for param in arm.params)
    m_savings, v_savings, device_bytes, host_bytes = arm.savings()
    first = model.params[0]
    wanted = MOST_RATIO if arm.name in (IBP, FAST) else None
    run.add(
        case=name,
        arm=arm.name,
        rows=num_params * first.element_size() // ROW_BYTES,
        row_bytes=ROW_BYTES,
        dtype=first.dtype,
        savings=(m_savings + v_savings) / 2,
        gbps=MOVED_VALUES * num_params * first.element_size() * 1e-9 / seconds,
        ideal_gbps=2 * copy_gbps,
        sms=None,
        ms=harness.four_digits(1e3 * seconds),
        mean_ms=harness.four_digits(1e3 * statistics.mean(arm.seconds[1:])),
        first_ms=harness.four_digits(1e3 * arm.seconds[0]),
        slowest_ms=harness.four_digits(1e3 * max(arm.seconds[1:])),
        host_ms=harness.four_digits(1e3 * statistics.median(arm.host_seconds)),
        ratio=harness.four_digits(seconds / of_torch),
        m_savings=f"{m_savings:.4f}",
        v_savings=f"{v_savings:.4f}",
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        steps=len(arm.seconds),
        **({"target_ratio": wanted, "met": "yes" if seconds <= wanted * of_torch else "no"} if wanted else {}),
    )


def missed(rows):
    return [
        f"{row['case']}, {row['arm']}: {row['ratio']} times torch's step, wanted {row['target_ratio']}"
        for row in rows
        if row.get("met") == "no"
    ]


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("adamw", args, COLUMNS)
    torch.manual_seed(0)
    source, target = run.scratch.chunk(2)
    copy_gbps = source.numel() * 1e-9 / run.seconds([lambda: target.copy_(source)])
    for name in MODELS:
        with run.cell(name):
            measure(run, name, copy_gbps)
    return run.finish(missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
