"""Things other than a file that may exist at a path, and limits for a call that meets them."""

import contextlib
import os
import resource
import signal
import socket

SECONDS = 30  # Each call takes less than one second, unless the machine is busy.


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.fspath(path))


NO_FILES = {
    "a pipe": os.mkfifo,
    "a socket": make_socket,
    "a device": lambda path: os.symlink("/dev/zero", path),
}


@contextlib.contextmanager
def soon():
    """Fails a call that takes longer than SECONDS, for example because it waits for a pipe."""

    def stop(number, frame):
        raise AssertionError(f"it has taken {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def few_descriptors():
    """Limits the number of files that the process can open to about 30 more than are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
