"""What do fewer SMs, a second GPU and the meter of energy say of steps whose activations are offloaded (cDMA, sections
V-C, VII and VIII)?

    python -m benchmarks.throttle [--energy | --together] [--out DIR] [--device cpu] [--quick]

The nets, and the arms `plain`, `raw` and `ibp`, are those of activations.py; gradients are checked as there. Each
option measures its own rows (`what`) and keeps the others. On an H200 the runs are expected to take about two minutes,
five minutes, and two minutes.

`sweep`     Without an option: coded offload with at most 8 to 64 SMs (`max_sms`), and with all.
`energy`    --energy: a minute of steps of ResNet-50. `joules` is the energy of a step, `watts` the mean power, by
            NVML's counter of the GPU's energy. Needs the package nvidia-ml-py.
`together`  --together: steps on one GPU, and on 2, 4, ... GPUs that begin each step at the same time. The slowest GPU
            counts. The arm `copies to the host` says at which rate each GPU's copy engine copies while the others do
            the same: GPUs that share a link, or memory of the host, have less together than alone.

After the common columns, throttle.csv has what, gpus, step_ms, out_ms (from the beginning of the step until the forward
pass and its copies to the host have ended), back_ms (from the end of the forward pass to the end of the step), out_gbps
and back_gbps (bytes sent over these times: the rates of copies), saved_gb and sent_gb (of a step and a GPU, as in
activations.py), steps (of which the medians, or for energy the means, are taken), joules, watts and checked. All times
are of CUDA events, but for `energy`, which is by the wall clock.
"""

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from . import activations, harness, ideal
from .activations import IBP, PLAIN, RAW

COLUMNS = (
    *("what", "gpus", "step_ms", "out_ms", "back_ms", "out_gbps", "back_gbps", "saved_gb", "sent_gb"),
    *("steps", "joules", "watts", "checked"),
)
SWEEP, ENERGY, TOGETHER = "sweep", "energy", "together"
SMS = (8, 16, 24, 32, 48, 64)
NETS, ENERGY_NETS = activations.BESIDE_NETS, ("ResNet-50",)
TIMED_STEPS = 5
ENERGY_S, QUICK_ENERGY_S = 60.0, 0.2
COPIES, COPIED_BYTES, QUICK_COPIED_BYTES = "copies to the host", 1 << 30, 1 << 20
GB = activations.GB


def cases(run, names):
    """Returns the nets that are measured. Those for a CPU and for --quick are small."""
    if run.quick or not run.on_gpu:
        return [case for case in activations.QUICK_CASES if case.name in activations.QUICK_NETS]
    return [case for case in activations.CASES if case.name in names]


def by_sms(count):
    """Returns the name of the arm that uses at most so many SMs."""
    return f"{IBP} by {count} SMs"


def arms(run):
    """Returns {name of an arm: (a function that makes its context, the most SMs of coding, None for all)}."""
    found = {
        PLAIN: (contextlib.nullcontext, 0),
        RAW: (lambda: activations.offloaded(run, coded=False), 0),
        IBP: (lambda: activations.offloaded(run), None),
    }
    return found | {by_sms(n): (lambda n=n: activations.offloaded(run, max_sms=n), n) for n in SMS}


# ---- steps ---------------------------------------------------------------------------------------------------------


def parted_step(run, net, x, context):
    """Runs a step. Returns the milliseconds of (the step, the forward pass and its copies to the host, what follows the
    forward pass)."""
    begun = mark(run)
    with context:
        loss = net(x).float().square().mean()
    forwarded = [mark(run), *(mark(run, stream) for stream in streams_out(context))]
    loss.backward()
    ended = mark(run)
    run.sync()
    net.zero_grad()
    return (
        milliseconds(run, begun, ended),
        max(milliseconds(run, begun, each) for each in forwarded),
        milliseconds(run, forwarded[0], ended),
    )


def mark(run, stream=None):
    """Returns an event that a stream records, by default the current one; without a GPU the clock."""
    if not run.on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def milliseconds(run, begun, ended):
    return begun.elapsed_time(ended) if run.on_gpu else 1e3 * (ended - begun)


def streams_out(context):
    """Returns the streams on which an offload copies to the host. They have begun all copies of a forward pass when it
    ends."""
    found = context._transfers.values() if hasattr(context, "_transfers") else ()
    return [
        torch.cuda.Stream(stream_id=of.out.stream_id, device_index=of.out.device_index, device_type=of.out.device_type)
        for of in found
    ]


def measured(run, net, x, arm, plain, ready=lambda: None):
    """Returns the numbers of an arm by column. plain: see `activations.check`. ready: a function that is called before
    each timed step."""
    make, _ = arms(run)[arm]
    context = make()
    of = activations.Measured(run, net, x, arm, context, plain)
    times = []
    for _ in range(TIMED_STEPS):
        run.sync()
        ready()
        times.append(parted_step(run, net, x, context))
    step_ms, out_ms, back_ms = map(statistics.median, zip(*times))
    return {
        "step_ms": step_ms,
        "out_ms": out_ms,
        "back_ms": back_ms,
        "out_gbps": 1e-6 * of.sent / out_ms,
        "back_gbps": 1e-6 * of.sent / back_ms,
        "saved_gb": of.saved / GB,
        "sent_gb": of.sent / GB,
        "steps": TIMED_STEPS,
        "checked": of.checked,
    }


def add(run, case, what, arm, numbers, plain_ms, gpus=1):
    """Records the numbers of an arm. plain_ms: the time of a plain step."""
    _, sms = arms(run)[arm]
    saved, sent = numbers["saved_gb"] * GB, numbers["sent_gb"] * GB
    bound_ms = max(plain_ms, activations.link_ms(sent))
    dtype = case.dtype_on(run.device)
    shown = {name: value if isinstance(value, str) else harness.four_digits(value) for name, value in numbers.items()}
    run.add(
        case=case.name,
        arm=arm,
        rows=case.shape[0],
        row_bytes=dtype.itemsize * torch.Size(case.shape[1:]).numel(),
        dtype=dtype,
        savings=1 - sent / saved if sent else 0.0,
        gbps=max(saved, 1) * 1e-6 / numbers["step_ms"],
        ideal_gbps=max(saved, 1) * 1e-6 / bound_ms,
        sms=sms,
        what=what,
        gpus=gpus,
        **shown,
    )


def measure_sweep(run, case):
    net, x = case.build(run.device)
    plain, plain_ms = activations.plain_gradients(net, x), 0.0
    for arm in arms(run):
        with run.cell(f"{case.name}, {arm}"):
            numbers = measured(run, net, x, arm, plain)
            plain_ms = plain_ms or numbers["step_ms"]
            add(run, case, SWEEP, arm, numbers, plain_ms)
        activations.clean(run)


# ---- energy --------------------------------------------------------------------------------------------------------


def energy_meter(run):
    """Returns a function that returns the joules that the GPU has taken since its driver was loaded. Returns None, and
    prints why, if nothing counts them."""
    if not run.on_gpu:
        print("energy: needs --device cuda, left out")
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        print("energy: the package nvidia-ml-py is not installed, left out")
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(run.device).uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        print(f"energy: NVML does not count it ({error}), left out")
        return None
    return lambda: 1e-3 * nvml.nvmlDeviceGetTotalEnergyConsumption(handle)


def measure_energy(run, case, meter):
    """Measures the energy of steps, one after the other for a minute. meter: a function that returns joules."""
    net, x = case.build(run.device)
    plain, plain_ms = activations.plain_gradients(net, x), 0.0
    for arm in (PLAIN, RAW, IBP, by_sms(activations.FEW_SMS)):
        with run.cell(f"{case.name}, {arm}"):
            make, _ = arms(run)[arm]
            context = make()
            of = activations.Measured(run, net, x, arm, context, plain)
            run.sync()
            steps, before, began = 0, meter(), time.perf_counter()
            while time.perf_counter() - began < (QUICK_ENERGY_S if run.quick else ENERGY_S):
                activations.step(net, x, context)
                net.zero_grad()
                run.sync()
                steps += 1
            seconds, joules = time.perf_counter() - began, meter() - before
            numbers = {
                "step_ms": 1e3 * seconds / steps,
                "saved_gb": of.saved / GB,
                "sent_gb": of.sent / GB,
                "steps": steps,
                "joules": joules / steps,
                "watts": joules / seconds,
                "checked": of.checked,
            }
            plain_ms = plain_ms or numbers["step_ms"]
            add(run, case, ENERGY, arm, numbers, plain_ms)
        activations.clean(run)


# ---- several GPUs --------------------------------------------------------------------------------------------------


def work(rank, world, number, kind, quick, directory):
    """Runs one process of several, which writes its numbers by arm to a file of the directory.

    Args:
        number: the place of the net among `cases`.
        kind: "cuda" or "cpu".
        directory: one that no other run uses.
    """
    own = Path(directory) / str(rank)
    with harness.process_group(kind, str(Path(directory) / "store"), rank, world):
        run = harness.Run("throttle", harness.parse_args(child_argv(kind, quick, own)), COLUMNS)
        case, found = cases(run, NETS)[number], {COPIES: {"gbps": copy_rate(run)}}
        net, x = case.build(run.device)
        plain = activations.plain_gradients(net, x)
        for arm in (PLAIN, RAW, IBP):
            found[arm] = measured(run, net, x, arm, plain, dist.barrier)
            activations.clean(run)
    (own / "found.json").write_text(json.dumps(found))


def child_argv(kind, quick, out):
    return ["--device", kind, "--out", str(out), *(["--quick"] if quick else [])]


def copy_rate(run):
    """Returns GB/s of a copy to pinned memory while the other GPUs copy, too."""
    num_bytes = QUICK_COPIED_BYTES if run.quick or not run.on_gpu else COPIED_BYTES
    x = torch.zeros(num_bytes, dtype=torch.uint8, device=run.device)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=run.on_gpu)
    host.copy_(x, non_blocking=True)
    times = []
    for _ in range(TIMED_STEPS):
        run.sync()
        dist.barrier()
        begun = mark(run)
        host.copy_(x, non_blocking=True)
        ended = mark(run)
        run.sync()
        times.append(milliseconds(run, begun, ended))
    return 1e-6 * num_bytes / statistics.median(times)


def measure_together(run, number, world):
    """Measures a net on `world` GPUs, each of which has a process. number: see `work`."""
    case = cases(run, NETS)[number]
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(work, (world, number, run.device.type, run.quick, directory), nprocs=world)
        found = [json.loads((Path(directory) / str(rank) / "found.json").read_text()) for rank in range(world)]
    run.add(
        case=case.name,
        arm=COPIES,
        rows=1,
        row_bytes=QUICK_COPIED_BYTES if run.quick or not run.on_gpu else COPIED_BYTES,
        dtype=torch.uint8,
        savings=0.0,
        gbps=min(of[COPIES]["gbps"] for of in found),
        ideal_gbps=ideal.MACHINE.copy_out_gbps,
        sms=0,
        what=TOGETHER,
        gpus=world,
    )
    plain_ms = max(of[PLAIN]["step_ms"] for of in found)
    for arm in (PLAIN, RAW, IBP):
        slowest = max((of[arm] for of in found), key=lambda numbers: numbers["step_ms"])
        add(run, case, TOGETHER, arm, slowest, plain_ms, world)


# ---- the script ----------------------------------------------------------------------------------------------------


def parsed(argv):
    own = argparse.ArgumentParser(add_help=False)
    which = own.add_mutually_exclusive_group()
    which.add_argument("--energy", action="store_const", dest="what", const=ENERGY)
    which.add_argument("--together", action="store_const", dest="what", const=TOGETHER)
    options, others = own.parse_known_args(argv)
    return options.what or SWEEP, harness.parse_args(others, __doc__)


def main(argv=None):
    what, args = parsed(argv)
    run = harness.Run("throttle", args, COLUMNS, keep=lambda row: row["what"] != what)
    if what == SWEEP:
        for case in cases(run, NETS):
            with run.cell(case.name):
                measure_sweep(run, case)
            activations.clean(run)
    elif what == ENERGY:
        if meter := energy_meter(run):
            for case in cases(run, ENERGY_NETS):
                with run.cell(case.name):
                    measure_energy(run, case, meter)
    else:
        num_gpus = torch.cuda.device_count() if run.on_gpu else 2
        if num_gpus < 2:
            print("several GPUs: there is one, which is measured alone")
        for number, case in enumerate(cases(run, NETS)):
            for world in (2**i for i in range(num_gpus.bit_length())):
                with run.cell(f"{case.name}, {world} GPUs"):
                    measure_together(run, number, world)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
