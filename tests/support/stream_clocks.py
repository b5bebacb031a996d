"""Replaces torch.cuda's streams and events by clocks, so that tests need no GPU. The clocks know which work is certain
to have happened before which other work, however fast each stream runs."""

import contextlib
import itertools

import torch


class Gpu:
    """Streams as vector clocks, and every access to memory with the clock at which it was issued.

    The host is one of the streams: work that it issues comes after all that it has done and waited for.
    """

    def __init__(self):
        self.numbers = itertools.count()
        self.streams = []
        self.accesses = []  # (clock, stream, region, whether it is a write)
        self.current = self.Stream(self)
        self.host = self.Stream(self)
        self.capturing = False
        self.held = []  # These tensors are kept, so that no other tensor gets their addresses.
        self.pinned = []  # pinned host memory
        self.recorded = set()  # (address, stream) of the calls of record_stream

    class Stream:
        def __init__(self, gpu, device=None):
            self.gpu, self.cuda_stream, self.clock = gpu, next(gpu.numbers), {}
            gpu.streams.append(self)

        def learn(self, clock):
            for stream, time in clock.items():
                self.clock[stream] = max(time, self.clock.get(stream, 0))

        def wait_event(self, event):
            assert event.clock is not None, "the event was never recorded"
            self.learn(event.clock)

        def wait_stream(self, other):
            self.learn(other.clock)

        def synchronize(self):
            self.gpu.host.learn(self.clock)

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def access(self, start, end, writes):
        """Issues a read or a write of bytes on the current stream. Fails if it may race with an earlier access of these
        bytes, if one of both is a write."""
        stream = self.current
        stream.learn(self.host.clock)
        stream.clock[stream.cuda_stream] = stream.clock.get(stream.cuda_stream, 0) + 1
        for clock, other, region, wrote in self.accesses:
            if (wrote or writes) and region[0] < end and start < region[1]:
                assert clock <= stream.clock.get(other, 0), f"{'write' if writes else 'read'} of {start} to {end} races"
        self.accesses.append((stream.clock[stream.cuda_stream], stream.cuda_stream, (start, end), writes))

    def use(self, tensor, writes):
        """Issues a read or a write of a tensor's bytes, like `access`."""
        self.held.append(tensor)
        if tensor.numel():
            self.access(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, writes)


class Event:
    def __init__(self, enable_timing=False):
        self.clock, self.is_timed = None, enable_timing

    @property
    def cuda_event(self):
        return id(self)

    def record(self, stream):
        self.clock = dict(stream.clock)

    def wait(self, stream):
        stream.wait_event(self)

    def query(self):
        return True

    def elapsed_time(self, end):
        assert self.is_timed and end.is_timed and self.clock is not None
        return float(sum(end.clock.values()) - sum(self.clock.values()))


def clocked_gpu(monkeypatch):
    """Replaces torch.cuda by a GPU of clocks, and returns the GPU."""
    gpu = Gpu()
    for name, value in {
        "Stream": lambda device=None: Gpu.Stream(gpu),
        "Event": Event,
        "stream": gpu.on,
        "set_stream": lambda stream: setattr(gpu, "current", stream),
        "current_stream": lambda device=None: gpu.current,
        "device": lambda device: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: gpu.capturing,
        "synchronize": lambda device=None: gpu.accesses.clear(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: gpu.recorded.add((tensor.data_ptr(), stream))
    )
    return gpu


def clock_copies(monkeypatch, gpu):
    """Lets clocks follow copies and new memory. Copies run on the current stream, except for blocking copies to pinned
    memory, which the host makes. All memory is new, but the current stream may have used it before. It is allowed to
    wait for events that were never recorded."""
    copy, copy_all, empty, tolist = torch.Tensor.copy_, torch._foreach_copy_, torch.empty, torch.Tensor.tolist

    def is_pinned(tensor):
        return any(tensor.untyped_storage().data_ptr() == pinned.data_ptr() for pinned in gpu.pinned)

    def clocked_copy(to, source, non_blocking=False):
        with gpu.on(gpu.host if is_pinned(to) and not non_blocking else gpu.current):
            gpu.use(source, writes=False)
            gpu.use(to, writes=True)
        return copy(to, source)

    def clocked_copies(targets, sources):
        with gpu.on(gpu.host):
            for source in sources:
                gpu.use(source, writes=False)
        copy_all(targets, sources)

    def clocked_list(tensor):
        if is_pinned(tensor):
            with gpu.on(gpu.host):
                gpu.use(tensor, writes=False)
        return tolist(tensor)

    def clocked_empty(*size, pin_memory=False, **options):
        made = empty(*size, **options)
        gpu.held.append(made)
        if pin_memory:
            gpu.pinned.append(made)
        elif options.get("device") is not None:
            gpu.use(made, writes=True)
        return made

    monkeypatch.setattr(Event, "__init__", lambda event, enable_timing=False: setattr(event, "clock", {}))
    monkeypatch.setattr(Event, "synchronize", lambda event: gpu.host.learn(event.clock), raising=False)
    monkeypatch.setattr(torch.Tensor, "copy_", clocked_copy)
    monkeypatch.setattr(torch.Tensor, "tolist", clocked_list)
    monkeypatch.setattr(torch, "_foreach_copy_", clocked_copies)
    monkeypatch.setattr(torch, "empty", clocked_empty)
