"""How fast do pages of a KV-cache get to another machine, if prefill and decode run on different machines?

    python -m benchmarks.kv_transfer [--out DIR] [--device cpu] [--quick]

`Llama-8B` has keys and values of 32 layers, in blocks of 16 tokens of 8 heads of 128 values, N(0, 1) in BF16 and FP8;
2,048 tokens, with blocks in random order. `real` has keys and values of a model (data/kv_stories260k.npz), with tokens
drawn from its stories, in pages of 4 KiB. `pack` and `unpack` are measured alone on a GPU, with block numbers on the
host and, as `by ids on the GPU`, on the GPU. `gathered` copies raw pages to one piece with torch, as a raw message
needs them. The ideal is the traffic of `copy_` in the same run. SplitZip (arXiv 2605.01708) encodes BF16 pages at 613
GB/s, decodes them at 2,182 GB/s, and makes transfers 1.32 times as fast; the targets here are 800 and 2,000 GB/s.

`reckoned` computes from the measured rates what 8,192 tokens of Llama-8B add to the time to the first token over links
of 25, 100 and 400 Gb/s. There is one message; packing, the link and unpacking follow each other. `two processes` sends
the same 2,048 tokens to another process over a TCP socket of this machine, through pinned memory, in 8 messages, as
fast as the socket moves them and with a limit of 10 Gb/s. The wall clock runs from the first page until the receiver
has all of them. `ratio` is the bytes of pages over the bytes sent. In every arm the pages that arrive are compared with
those that were packed.
"""

import contextlib
import socket
import struct
import sys
import time

import numpy as np
import torch
import torch.multiprocessing as mp

import ibp

from . import harness

COLUMNS = ("pages", "ratio", "link_gbits", "ms", *harness.TARGET_COLUMNS)
LAYERS, BLOCK_SHAPE, NUM_BLOCKS = 32, (16, 8, 128), 128  # The pages have keys and values of 2,048 tokens.
QUICK_LAYERS, QUICK_BLOCKS = 2, 6
# A page has REAL_TOKENS tokens; the others are bytes of all pages.
REAL_TOKENS, REAL_BYTES, QUICK_REAL_BYTES = 64, 256 << 20, 1 << 18
LEVELS = ("default", "fast")
SAMPLE_BLOCKS = 4  # Codecs are learned from this many blocks of each tensor.
WANTED = {"pack": 800.0, "unpack": 2000.0}  # The targets are in GB/s of BF16 pages.
LINKS_GBITS, RECKONED_TOKENS, TOKENS_A_BLOCK = (25, 100, 400), 8192, 16
RAW, NO_LIMIT, LIMIT_GBITS = "raw", 0, 10
# Between two processes: messages and trials, and the bytes that are sent between two looks at the clock.
NUM_MESSAGES, TRIALS, PIECE_BYTES = 8, 3, 1 << 20
TWO_PROCESSES_S = 60  # One process waits for the other at most this many seconds.
LENGTH = struct.Struct("<q")


class Pages:
    """A paged cache of several tensors, the random order of its blocks, and the tensors that they go to."""

    def __init__(self, name, tensors):
        self.name, self.tensors, self.device = name, tensors, tensors[0].device
        self.out = [torch.empty_like(tensor) for tensor in tensors]
        self.paged, self.to = ibp.kv.PagedTensors(tensors), ibp.kv.PagedTensors(self.out)
        order = torch.Generator().manual_seed(0)
        count = len(tensors[0])
        self.blocks, self.targets = (torch.randperm(count, generator=order) for _ in range(2))
        self.num_pages = count * len(tensors)
        self.num_bytes = self.num_pages * self.paged.block_bytes

    def codec(self, level):
        sample = torch.cat([tensor[:SAMPLE_BLOCKS].view(torch.uint8) for tensor in self.tensors])
        return ibp.kv.PageCodec.learn(sample.view(self.tensors[0].dtype), level=level)

    def gather(self, near):
        """Returns raw pages in one piece."""
        return [tensor.view(torch.uint8)[near] for tensor in self.tensors]

    def check(self, what):
        """Checks that the blocks have arrived, and overwrites them."""
        near, targets = self.blocks.to(self.device), self.targets.to(self.device)
        for tensor, out in zip(self.tensors, self.out):
            harness.check_bits(out.view(torch.uint8)[targets], tensor.view(torch.uint8)[near], what)
            harness.poison(out)


def llama_pages(device, quick, dtype):
    layers, blocks = (QUICK_LAYERS, QUICK_BLOCKS) if quick else (LAYERS, NUM_BLOCKS)
    generator = torch.Generator(device).manual_seed(0)

    def tensor():
        return torch.randn(blocks, *BLOCK_SHAPE, generator=generator, device=device).to(dtype)

    return Pages("Llama-8B", [tensor() for _ in range(2 * layers)])


def real_pages(device, quick, data_dir):
    """Returns keys and values of 4 heads of 8 values. Tokens are drawn, so that no page comes twice."""
    with np.load(data_dir / "kv_stories260k.npz") as z:
        held = [torch.from_numpy(z[name].view(np.int16)).view(torch.bfloat16) for name in ("k_bf16", "v_bf16")]
    rows = [x.reshape(-1, 32).to(device) for x in held]  # A row is a token in a layer.
    count = (QUICK_REAL_BYTES if quick else REAL_BYTES) // (2 * REAL_TOKENS * rows[0][0].nbytes)
    drawn = torch.randint(len(rows[0]), (count * REAL_TOKENS,), device=device)
    return Pages("real", [x[drawn].view(count, REAL_TOKENS, 4, 8) for x in rows])


# ---- a GPU alone ---------------------------------------------------------------------------------------------------


class Rates:
    """The rates of one GPU, which are measured and recorded."""

    def __init__(self, run):
        self.run = run
        source, target = run.scratch.chunk(2)
        self.copy_gbps = source.numel() * 1e-9 / run.seconds([lambda: target.copy_(source)])
        # By level, for Llama-8B in BF16: bytes a second of pack and of unpack, and the ratio.
        self.found = {}

    def measure(self, pages):
        run, dtype = self.run, pages.tensors[0].dtype
        with run.cell(f"{pages.name}, {dtype}, gathered"):
            near = pages.blocks.to(pages.device)
            self.add(pages, "gathered", run.seconds([lambda: pages.gather(near)]), 1.0, None)
        for level in LEVELS:
            with run.cell(f"{pages.name}, {dtype}, {level}"):
                self.measure_level(pages, level)

    def measure_level(self, pages, level):
        codec, is_judged = pages.codec(level), pages.paged.layout.dtype == torch.bfloat16
        buffer = torch.empty(ibp.kv.packed_bytes(codec, pages.num_pages), dtype=torch.uint8, device=pages.device)
        rates = {}
        for where, blocks, targets in (
            ("", pages.blocks, pages.targets),
            (", by ids on the GPU", pages.blocks.to(pages.device), pages.targets.to(pages.device)),
        ):

            def pack():
                return ibp.kv.pack(pages.paged, codec, blocks=blocks, out=buffer)

            def unpack():
                ibp.kv.unpack(buffer, codec, out=pages.to, blocks=targets)

            harness.poison(buffer)
            ratio = pages.num_bytes / int(pack().used)
            unpack()
            codec.check()
            pages.check(f"{pages.name}, {level}{where}")
            for name, call in (("pack", pack), ("unpack", unpack)):
                wanted = WANTED[name] if is_judged and not where else None
                seconds = self.run.seconds([call])
                self.add(pages, f"{name}, {level}{where}", seconds, ratio, wanted, codec)
                rates.setdefault(name, pages.num_bytes / seconds)
            codec.check()
            pages.check(f"{pages.name}, {level}{where}, timed")
        if pages.name == "Llama-8B" and is_judged:
            self.found[level] = (rates["pack"], rates["unpack"], ratio)

    def add(self, pages, arm, seconds, ratio, wanted, codec=None):
        gbps = pages.num_bytes * 1e-9 / seconds
        record(
            self.run, pages, pages.name, arm, gbps, 2 * self.copy_gbps / (1 + 1 / ratio), ratio,
            row_bytes=codec.codebook.row_bytes if codec else pages.paged.block_bytes,
            sms=None, ms=harness.four_digits(1e3 * seconds), **harness.judged(gbps, wanted),
        )  # fmt: skip

    def reckon(self, pages):
        """Records what transfers add to the time to the first token."""
        num_bytes = pages.num_bytes / (len(pages.blocks) * TOKENS_A_BLOCK) * RECKONED_TOKENS
        for gbits in LINKS_GBITS:
            link = gbits * 1e9 / 8
            for level, (pack, unpack, ratio) in {RAW: (0, 0, 1.0), **self.found}.items():
                seconds = num_bytes / ratio / link + (num_bytes / pack + num_bytes / unpack if pack else 0)
                record(
                    self.run, pages, "Llama-8B, 8,192 tokens, reckoned", f"{gbits} Gb/s, {level}",
                    num_bytes * 1e-9 / seconds, link * ratio * 1e-9, ratio, row_bytes=pages.paged.block_bytes,
                    sms=None, link_gbits=gbits, ms=harness.four_digits(1e3 * seconds),
                )  # fmt: skip


def record(run, pages, case, arm, gbps, ideal_gbps, ratio, **extra):
    run.add(
        case=case,
        arm=arm,
        rows=pages.num_pages,
        pages=pages.num_pages,
        dtype=pages.tensors[0].dtype,
        savings=1 - 1 / ratio,
        gbps=gbps,
        ideal_gbps=ideal_gbps,
        ratio=f"{ratio:.3f}",
        **extra,
    )


# ---- two processes -------------------------------------------------------------------------------------------------


class Groups:
    """Groups of the tensors of pages. Each group has a message, with memory for it on the device and, pinned, on the
    host. Both sides have the same groups. codec: None if raw pages travel."""

    def __init__(self, pages, codec):
        self.pages, self.codec = pages, codec
        count = min(NUM_MESSAGES, len(pages.tensors))
        self.parts = [slice(k, None, count) for k in range(count)]
        self.sources, self.outs = (
            [ibp.kv.PagedTensors(tensors[part]) for part in self.parts] for tensors in (pages.tensors, pages.out)
        )
        sizes = [len(source) * len(pages.blocks) * source.block_bytes for source in self.sources]
        if codec is not None:
            sizes = [ibp.kv.packed_bytes(codec, size // codec.page_bytes) for size in sizes]
        on_gpu = pages.device.type == "cuda"
        self.near = [torch.empty(size, dtype=torch.uint8, device=pages.device) for size in sizes]
        self.host = [torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for size in sizes]

    def send(self, connection, gbits):
        """Sends all messages. Returns the number of bytes sent."""
        if self.codec is None:
            near, used = self.pages.blocks.to(self.pages.device), [memory.numel() for memory in self.near]
            for source, memory in zip(self.sources, self.near):
                for tensor, part in zip(source.tensors, memory.chunk(len(source))):
                    torch.index_select(
                        tensor.view(torch.uint8), 0, near, out=part.view(len(near), *tensor.shape[1:-1], -1)
                    )
        else:
            packed = [
                ibp.kv.pack(source, self.codec, blocks=self.pages.blocks, out=memory)
                for source, memory in zip(self.sources, self.near)
            ]
            used = torch.cat([one.used for one in packed]).tolist()
        arrived = [self._to_host(k, count) for k, count in enumerate(used)]
        started, sent = time.perf_counter(), 0
        for k, count in enumerate(used):
            arrived[k]()
            connection.sendall(LENGTH.pack(count))
            data = memoryview(self.host[k].numpy())[:count]
            for first in range(0, count, PIECE_BYTES):
                piece = data[first : first + PIECE_BYTES]
                connection.sendall(piece)
                sent += len(piece)
                while gbits and (time.perf_counter() - started) * gbits * 1e9 / 8 < sent:
                    pass
        return sum(used)

    def _to_host(self, k, count):
        """Begins the copy of a message to the host. Returns a function that waits for it."""
        self.host[k][:count].copy_(self.near[k][:count], non_blocking=True)
        if self.pages.device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def receive(self, connection):
        for k, (memory, out) in enumerate(zip(self.near, self.outs)):
            (count,) = LENGTH.unpack(received(connection, memoryview(bytearray(LENGTH.size))))
            received(connection, memoryview(self.host[k].numpy())[:count])
            memory[:count].copy_(self.host[k][:count], non_blocking=True)
            if self.codec is not None:
                ibp.kv.unpack(memory[:count], self.codec, out=out, blocks=self.pages.targets)
                continue
            targets = self.pages.targets.to(self.pages.device)
            for tensor, part in zip(out.tensors, memory.chunk(len(out))):
                tensor.view(torch.uint8)[targets] = part.view(len(targets), *tensor.shape[1:-1], -1)
        if self.codec is not None:
            self.codec.check()
        elif self.pages.device.type == "cuda":
            torch.cuda.synchronize()


def received(connection, view):
    count = 0
    while count < len(view):
        got = connection.recv_into(view[count:])
        if not got:
            raise ConnectionError("the sender is gone")
        count += got
    return view


def receiver(port, kind, quick, codecs):
    """Runs the other process, which makes the same pages from the same seed. It answers when they have arrived, and
    again when they have been compared."""
    pages = llama_pages(torch.device(kind), quick, torch.bfloat16)
    arms = {name: Groups(pages, content and ibp.kv.PageCodec.from_bytes(content)) for name, content in codecs.items()}
    with socket.create_connection(("127.0.0.1", port), TWO_PROCESSES_S) as connection:
        connection.sendall(b"+")
        while (name := bytes(received(connection, memoryview(bytearray(16)))).decode().strip()) != "end":
            arms[name].receive(connection)
            connection.sendall(b"+")
            pages.check(name)
            connection.sendall(b"+")


@contextlib.contextmanager
def connected(run, codecs):
    """Yields a connection to a process that receives."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TWO_PROCESSES_S)
        port, contents = server.getsockname()[1], {name: codec and codec.to_bytes() for name, codec in codecs.items()}
        process = mp.get_context("spawn").Process(
            target=receiver, args=(port, run.device.type, run.quick, contents), daemon=True
        )
        process.start()
        try:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(TWO_PROCESSES_S)
                received(connection, memoryview(bytearray(1)))
                yield connection
                connection.sendall(b"end".ljust(16))
                process.join(TWO_PROCESSES_S)
        finally:
            process.kill()


def measure_two_processes(run, pages):
    codecs = {RAW: None, **{level: pages.codec(level) for level in LEVELS}}
    arms = {name: Groups(pages, codec) for name, codec in codecs.items()}
    with connected(run, codecs) as connection:
        for gbits in (NO_LIMIT, LIMIT_GBITS):
            for name, groups in arms.items():
                times = []
                for _ in range(1 if run.quick else 1 + TRIALS):
                    run.sync()
                    began = time.perf_counter()
                    connection.sendall(name.encode().ljust(16))
                    sent = groups.send(connection, gbits)
                    received(connection, memoryview(bytearray(1)))
                    times.append(time.perf_counter() - began)
                    received(connection, memoryview(bytearray(1)))  # The receiver has compared all pages.
                seconds, ratio = min(times), pages.num_bytes / sent
                link = f"{gbits} Gb/s" if gbits else "socket"
                gbps = pages.num_bytes * 1e-9 / seconds
                ideal_gbps = gbits / 8 * ratio if gbits else gbps
                record(
                    run, pages, "Llama-8B, two processes", f"{link}, {name}", gbps, ideal_gbps, ratio,
                    row_bytes=pages.paged.block_bytes, sms=None, link_gbits=gbits or "",
                    ms=harness.four_digits(1e3 * seconds),
                )  # fmt: skip


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("kv_transfer", args, COLUMNS)
    torch.manual_seed(0)
    rates = Rates(run)
    pages = llama_pages(run.device, run.quick, torch.bfloat16)
    rates.measure(pages)
    rates.reckon(pages)
    rates.measure(llama_pages(run.device, run.quick, torch.float8_e4m3fn))
    if (args.data / "kv_stories260k.npz").exists():
        rates.measure(real_pages(run.device, run.quick, args.data))
    with run.cell("two processes"):
        measure_two_processes(run, pages)
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
