"""How long does an engine of reinforcement learning wait for the weights of a step, and how many bytes does it get?

    python -m benchmarks.sync [--out DIR] [--device cpu] [--quick]

A trainer's process has BF16 weights N(0, 0.02) with the shapes of Qwen3-8B and Qwen3-30B-A3B, before and after a step
of an optimizer with FP32 weights, which changes about 1, 4 and 10 % of them. An engine's process on the same GPU has
the weights before the step. Only `layers` of `of_layers` exist, with embedding and head; `ms_of_all` is the time for
all layers, computed by their bytes. Arms: `all weights` sends them as they are. `ibp` is `ibp.deltas.Sender.push` and
`Receiver.apply`, which check fingerprints before and after. `index and value` compares bits with a kept copy and sends
an int32 index and the new value of each change; torch finds and applies them in one list for each 256 MiB of weights.

`link` is `sockets` (TCP) or `shared memory` (on one machine, with pinned memory on both sides). The engine takes each
message as soon as it has come, while the next one is on its way. For 100 and 400 Gb/s the times are computed: making
and applying as measured with shared memory, and the messages' bytes at that rate, or the time that the engine takes for
all messages but the last one and waits for the first one, if this is longer. `make_ms` is the time until the messages
are in device memory, `move_ms` until the last one is in the engine's, `apply_ms` from then until the engine has the
weights, and `ms` is their sum. They are medians by the wall clock. `changed` is the share of weights that changed,
`mib` the size of messages, and `fewer` the bytes of `index and value` over theirs. GB/s count weights. The ideal is the
link's rate over the share of the bytes that is sent; the rate of a link on one machine is that of all weights. After
every step of every arm the engine's weights must have the trainer's fingerprints.
"""

import contextlib
import itertools
import multiprocessing
import socket
import statistics
import sys
import time
from typing import NamedTuple

import torch

import ibp

from . import harness, inputs

COLUMNS = (
    "link",
    "changed",
    "layers",
    "of_layers",
    "mib",
    "fewer",
    "make_ms",
    "move_ms",
    "apply_ms",
    "ms",
    "ms_of_all",
)
PIECE_BYTES, CHUNK_BYTES, SLOTS = 256 * inputs.MIB, 32 * inputs.MIB, 4
VOCABULARY, DEVIATION, SEED = 151_936, 0.02, 7
STEPS = {"1 %": 0.26e-6, "4 %": 1.26e-6, "10 %": 4e-6}  # The optimizer has these learning rates.
GBITS = (100, 400)
IBP, PLAIN, ALL = "ibp", "index and value", "all weights"
SOCKETS, SHARED = "sockets", "shared memory"
WAIT_S = 60  # A process waits this many seconds for the other one.
# Each arm makes this many pushes over a link, alternately forward and back. The first one does not count.
TURNS = 4


class ModelShape(NamedTuple):
    """The shape of a model. layers: how many are measured. experts: None for a dense model."""

    name: str
    layers: int
    of_layers: int
    hidden: int
    wide: int
    heads: int
    kv_heads: int
    experts: int | None

    def shapes(self):
        """Returns the shapes of the weights outside the layers, and of the weights of a layer."""
        outside = [(VOCABULARY * self.hidden // 4096 if self.layers == 1 else VOCABULARY, self.hidden)] * 2
        attention = [(self.heads * 128, self.hidden), (self.hidden, self.heads * 128)]
        attention += [(self.kv_heads * 128, self.hidden)] * 2
        expert = [(self.wide, self.hidden)] * 2 + [(self.hidden, self.wide)]
        return [*outside, (self.hidden,)], [*attention, *expert * (self.experts or 1), (self.hidden,), (self.hidden,)]

    def num_bytes(self, layers):
        outside, layer = (sum(2 * torch.Size(shape).numel() for shape in shapes) for shapes in self.shapes())
        return outside + layers * layer


FULL = (
    ModelShape("Qwen3-8B", 4, 36, 4096, 12288, 32, 8, None),
    ModelShape("Qwen3-30B-A3B", 2, 48, 2048, 768, 32, 4, 128),
)
QUICK = (
    ModelShape("Qwen3-8B", 1, 36, 64, 192, 1, 1, None),
    ModelShape("Qwen3-30B-A3B", 1, 48, 64, 32, 1, 1, 8),
)


class ModelWeights:
    """Random weights, the same in every process.

    Attributes:
        flats: [elements], each of 256 MiB or one tensor.
        tensors: views of them by name.
    """

    def __init__(self, shape, device, rate=0.0):
        outside, layer = shape.shapes()
        self.flats, self.tensors, part = [], {}, []
        named = [(f"{number}", each) for number, each in enumerate([*outside, *layer * shape.layers])]
        for number, (name, each) in enumerate(named):
            part.append((name, torch.Size(each)))
            held = sum(size.numel() for _, size in part)
            if number + 1 == len(named) or 2 * (held + torch.Size(named[number + 1][1]).numel()) > PIECE_BYTES:
                flat = self._values(held, device, rate)
                pieces = flat.split([size.numel() for _, size in part])
                self.tensors |= {name: piece.view(size) for (name, size), piece in zip(part, pieces)}
                self.flats.append(flat)
                part = []

    def _values(self, count, device, rate):
        generator = torch.Generator(device).manual_seed(SEED + len(self.flats))
        flat = torch.empty(count, dtype=torch.bfloat16, device=device)
        for part in flat.split(64 << 20):
            weights = torch.randn(len(part), device=device, generator=generator).mul_(DEVIATION)
            moves = torch.randn(len(part), device=device, generator=generator).clamp_(-3, 3)
            part.copy_(weights.sub_(moves, alpha=rate))
        return flat

    @property
    def num_bytes(self):
        return sum(flat.nbytes for flat in self.flats)

    def prints(self):
        return [ibp.deltas.fingerprint(flat) for flat in self.flats]


def bits_of(flat):
    return flat.view(torch.int16)


# ---- arms: the trainer's side makes messages, the engine's side takes them ----


class IbpTrainer:
    def __init__(self, weights):
        self.sender = ibp.deltas.Sender(weights.tensors)

    def make(self, weights):
        return self.sender.push(weights.tensors)


class IbpEngine:
    def __init__(self, weights):
        self.receiver = ibp.deltas.Receiver(weights.tensors)

    def take(self, message):
        self.receiver.apply(message)


class PlainTrainer:
    def __init__(self, weights):
        self.kept = [flat.clone() for flat in weights.flats]

    def make(self, weights):
        messages = []
        for new, kept in zip(weights.flats, self.kept):
            indices = (bits_of(new) != bits_of(kept)).nonzero().view(-1)
            values = new[indices]
            messages += [indices.int().view(torch.uint8), values.view(torch.uint8)]
            kept.index_copy_(0, indices, values)
        return messages


class PlainEngine:
    def __init__(self, weights):
        self.flats, self.indices = itertools.cycle(weights.flats), None

    def take(self, message):
        if self.indices is None:
            self.indices = message.view(torch.int32)
        else:
            next(self.flats).index_copy_(0, self.indices.long(), message.view(torch.bfloat16))
            self.indices = None


class AllTrainer:
    def __init__(self, weights):
        """Does nothing, because nothing has to be kept."""

    def make(self, weights):
        return [flat.view(torch.uint8) for flat in weights.flats]


class AllEngine:
    def __init__(self, weights):
        self.flats = itertools.cycle(weights.flats)

    def take(self, message):
        next(self.flats).copy_(message.view(torch.bfloat16))


ARMS = {ALL: (AllTrainer, AllEngine), IBP: (IbpTrainer, IbpEngine), PLAIN: (PlainTrainer, PlainEngine)}


# ---- links: bytes of device memory from one process to the other, through pinned memory ----


def pinned(num_bytes, on_gpu):
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)


class Sockets:
    def __init__(self, connection, on_gpu):
        self.connection, self.stage = connection, pinned(CHUNK_BYTES, on_gpu)

    def send(self, message):
        for chunk in message.split(CHUNK_BYTES):
            part = self.stage[: len(chunk)]
            part.copy_(chunk)
            self.connection.sendall(part.numpy())

    def receive(self, message):
        for chunk in message.split(CHUNK_BYTES):
            part = self.stage[: len(chunk)]
            view, got = memoryview(part.numpy()), 0
            while got < len(chunk):
                count = self.connection.recv_into(view[got:])
                if not count:
                    raise EOFError("the other process has ended")
                got += count
            chunk.copy_(part)


class SharedMemory:
    """A ring of chunks that both processes map. free, full: semaphores."""

    def __init__(self, memory, free, full, on_gpu):
        self.slots, self.free, self.full, self.turn = memory.view(SLOTS, CHUNK_BYTES), free, full, 0
        if on_gpu:
            status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
            if int(status):
                raise RuntimeError(f"the shared memory cannot be pinned: CUDA error {int(status)}")

    def _next(self, semaphore):
        if not semaphore.acquire(timeout=WAIT_S):
            raise TimeoutError("the other process does not answer")
        self.turn += 1
        return self.slots[(self.turn - 1) % SLOTS]

    def send(self, message):
        for chunk in message.split(CHUNK_BYTES):
            self._next(self.free)[: len(chunk)].copy_(chunk)
            self.full.release()

    def receive(self, message):
        for chunk in message.split(CHUNK_BYTES):
            chunk.copy_(self._next(self.full)[: len(chunk)])
            self.free.release()


# ---- the engine's process ----


def serve(kind, shape, pipe, port, memory, semaphores):
    """Takes what the trainer sends until that is None."""
    device, on_gpu = torch.device(kind), kind == "cuda"
    weights, engine, links = ModelWeights(shape, device), None, None
    while (said := pipe.recv()) is not None:
        what, value = said
        if what == "link":
            if links is None:
                connection = socket.create_connection(("127.0.0.1", port))
                links = {SOCKETS: Sockets(connection, on_gpu), SHARED: SharedMemory(memory, *semaphores, on_gpu)}
            link = links[value]
        elif what == "arm":
            engine = ARMS[value][1](weights)
        elif what == "take":
            seconds = []
            for message in [torch.empty(size, dtype=torch.uint8, device=device) for size in value]:
                link.receive(message)
                synchronize(on_gpu)
                came = time.perf_counter()
                engine.take(message)
                synchronize(on_gpu)
                seconds.append(time.perf_counter() - came)
            pipe.send((sum(seconds[:-1]), seconds[-1]))
            continue
        pipe.send(weights.prints() if what == "prints" else None)


def synchronize(on_gpu):
    if on_gpu:
        torch.cuda.synchronize()


class Engine:
    """The engine's process, as the trainer sees it."""

    def __init__(self, run, shape):
        context = multiprocessing.get_context("spawn")
        self.on_gpu, self.pipe = run.on_gpu, None
        self.memory = torch.zeros(SLOTS * CHUNK_BYTES, dtype=torch.uint8).share_memory_()
        semaphores = context.Semaphore(SLOTS), context.Semaphore(0)
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2 * WAIT_S)
            self.pipe, there = context.Pipe()
            port = server.getsockname()[1]
            arguments = run.device.type, shape, there, port, self.memory, semaphores
            self.process = context.Process(target=serve, args=arguments, daemon=True)
            self.process.start()
            there.close()
            self.pipe.send(("link", SOCKETS))
            connection, _ = server.accept()
        self.pipe.recv()
        self.links = {
            SOCKETS: Sockets(connection, self.on_gpu),
            SHARED: SharedMemory(self.memory, *semaphores, self.on_gpu),
        }

    def ask(self, what, value=None):
        self.pipe.send((what, value))
        return self.pipe.recv()

    def step(self, trainer, weights, link):
        """Returns the seconds of making, moving and applying, and those of taking all messages but the last; and the
        number and the bytes of the messages."""
        synchronize(self.on_gpu)
        started = time.perf_counter()
        messages = trainer.make(weights)
        synchronize(self.on_gpu)
        made = time.perf_counter()
        self.pipe.send(("take", [message.numel() for message in messages]))
        for message in messages:
            self.links[link].send(message)
        taking, applying = self.pipe.recv()
        moving = time.perf_counter() - made - applying
        return made - started, moving, applying, taking, len(messages), sum(message.numel() for message in messages)

    def end(self):
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
        if self.on_gpu:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())


# ---- the trainer's process ----


def reckoned_moving(on_link, count, taking):
    """Returns the seconds until the last of several messages of equal size is in the engine's memory: until all have
    passed the link, or until the first has passed it and the engine has taken all but the last, if this is later.
    on_link: seconds of all messages on the link. taking: seconds of taking all messages but the last."""
    return max(on_link, on_link / count + taking)


class SyncCase:
    """A model's shape, a share of changes, both versions of the weights, and the run that records measurements. before:
    earlier measurements of the shape that do not depend on the changes, by arm and link."""

    def __init__(self, run, engine, shape, name, old, new, before):
        self.run, self.engine, self.shape, self.name, self.before = run, engine, shape, name, before
        self.old, self.new, self.prints = old, new, (old.prints(), new.prints())
        self.num_changed = sum(int((bits_of(a) != bits_of(b)).sum()) for a, b in zip(old.flats, new.flats))
        self.link_gbps = {f"{gbits} Gb/s": gbits / 8 for gbits in GBITS}

    def measure(self, arm):
        for link in (SOCKETS, SHARED):
            found = self.before.get((arm, link)) or self._measured(arm, link)
            *parts, taking, count, num_bytes = found
            if arm == ALL:
                self.before[arm, link] = found
                self.link_gbps[link] = self.old.num_bytes * 1e-9 / parts[1]
            self._record(arm, link, parts, num_bytes)
        for gbits in GBITS:
            moving = reckoned_moving(num_bytes * 1e-9 / (gbits / 8), count, taking)
            self._record(arm, f"{gbits} Gb/s", (parts[0], moving, parts[2]), num_bytes)

    def _measured(self, arm, link):
        """Returns medians of the results of `Engine.step`."""
        self.engine.ask("link", link)
        self.engine.ask("arm", arm)
        trainer, found = ARMS[arm][0](self.old), []
        for turn in range(TURNS):  # TURNS is even, so that the engine has the old weights again.
            is_new = turn % 2 == 0
            found.append(self.engine.step(trainer, self.new if is_new else self.old, link))
            if self.engine.ask("prints") != self.prints[is_new]:
                raise AssertionError(f"{arm} over {link}: the engine has other weights than the trainer")
        return [statistics.median(values) for values in zip(*found[1:])]

    def _record(self, arm, link, parts, num_bytes):
        seconds, shape, weight_bytes = sum(parts), self.shape, self.old.num_bytes
        share = num_bytes / weight_bytes
        gbps = weight_bytes * 1e-9 / seconds
        ms_of_all = 1e3 * seconds * shape.num_bytes(shape.of_layers) / weight_bytes
        self.run.add(
            case=f"{shape.name}, {self.name}, {link}",
            arm=arm,
            rows=len(self.old.tensors),
            row_bytes=weight_bytes,
            dtype=torch.bfloat16,
            savings=1 - share,
            gbps=gbps,
            ideal_gbps=self.link_gbps[link] / share,
            sms=None if self.run.on_gpu else 0,
            link=link,
            changed=f"{2 * self.num_changed / weight_bytes:.4f}",
            layers=shape.layers,
            of_layers=shape.of_layers,
            mib=harness.four_digits(num_bytes / inputs.MIB),
            fewer=f"{6 * self.num_changed / num_bytes:.2f}",
            **{
                name: harness.four_digits(1e3 * value) for name, value in zip(("make_ms", "move_ms", "apply_ms"), parts)
            },
            ms=harness.four_digits(1e3 * seconds),
            ms_of_all=harness.four_digits(ms_of_all),
        )
        print(
            f"{time.perf_counter() - self.run.started:5.1f} s  {shape.name}, {self.name}, {arm}, {link}: "
            f"{1e3 * seconds:.1f} ms, {num_bytes / inputs.MIB:.1f} MiB",
            flush=True,
        )


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("sync", args, COLUMNS)
    for shape in FULL if run.on_gpu and not run.quick else QUICK:
        with run.cell(shape.name):
            engine = Engine(run, shape)
            try:
                old, before = ModelWeights(shape, run.device), {}
                for name, rate in STEPS.items():
                    with run.cell(f"{shape.name}, {name}"):
                        new = ModelWeights(shape, run.device, rate)
                        case = SyncCase(run, engine, shape, name, old, new, before)
                        for arm in ARMS:
                            case.measure(arm)
                        del new, case
            finally:
                engine.end()
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
