"""Processes of a group that run the functions that a test sends them."""

import datetime
import multiprocessing
import os
import traceback

import torch
import torch.distributed as dist

SECONDS = 60  # Other processes may take at most this many seconds.


class Ranks:
    """Processes of one group, which run the functions that they get. Without a GPU they are forked, because torch takes
    seconds to import."""

    def __init__(self, size, directory, timeout=SECONDS, backend="gloo"):
        context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            args = rank, size, str(directory / "store"), timeout, backend, there
            work = context.Process(target=_serve, args=args, daemon=True)  # Daemons end with this process.
            work.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(work)

    def __call__(self, function, *args):
        """Returns what function(rank, *args) returns on each rank. Raises AssertionError with the traceback if a rank
        raises."""
        for pipe in self.pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(SECONDS), f"rank {rank} does not answer"
            failure, value = pipe.recv()
            assert failure is None, f"rank {rank}: {failure}"
            results.append(value)
        return results

    def survivors(self, function, dead):
        """Yields (rank, result) of all ranks except one, which dies in function(rank). Then ends all processes."""
        try:
            for pipe in self.pipes:
                pipe.send((function, ()))
            for rank, pipe in enumerate(self.pipes):
                if rank == dead:
                    continue
                assert pipe.poll(SECONDS), f"rank {rank} does not answer"
                failure, value = pipe.recv()
                assert failure is None, f"rank {rank}: {failure}"
                yield rank, value
        finally:
            self.end()

    def end(self):
        for process in self.processes:
            process.kill()
            process.join(SECONDS)


def _serve(rank, size, store, timeout, backend, pipe):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # The machine's name may resolve to another address.
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((None, function(rank, *args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


def raised(work):
    """Returns (name, message) of the exception that work() raises, or None if it raises none."""
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    return None
