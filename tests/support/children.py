"""Processes that are forked for a test."""

import os
import signal
import time

SECONDS = 60  # that a process may take


def in_child(work):
    """The process that is forked for some work: it ends with 0 after it, with 1 after an exception."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
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
