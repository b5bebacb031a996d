"""What may stand at a path besides a file, and the limits of a call that meets it."""

import contextlib
import os
import resource
import signal
import socket

SECONDS = 30  # of a busy machine; each call takes less than one


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
    """Fails a call that takes longer than SECONDS, also one that waits for a pipe."""

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
    """The process may open few files more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
