"""Forks processes for a test."""

import os
import signal
import sys
import time
import traceback

SECONDS = 60  # A process may take at most this many seconds.


def in_child(work):
    """Forks a process that does some work, and returns it. It ends with status 0 after the work. After an exception,
    which it prints, it ends with 1."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def status_of(child):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the process does not end")
