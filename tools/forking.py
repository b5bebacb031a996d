"""Runs pytest many times, each time in a process forked from this one, which has imported torch, numpy and hypothesis.
A run therefore saves the seconds of these imports.

A request is a line of JSON on standard input: {"arguments": for pytest, "output": path, "seconds": at most}. The answer
is a line: pytest's exit status, minus the signal's number if a signal ended the run, or null if it took too many
seconds. Processes that a run has left running are killed.
"""

import contextlib
import json
import os
import signal
import sys
import time

import hypothesis  # noqa: F401
import numpy  # noqa: F401
import pytest
import torch  # noqa: F401


def run(arguments, output):
    """Runs pytest in the child process. Never returns."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, to in ((0, os.open(os.devnull, os.O_RDONLY)), (1, file), (2, file)):
        os.dup2(to, number)
    status = 70  # The run has this status if pytest raises an exception.
    try:
        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)


def status_of(child, seconds):
    """Returns the exit status of a child, or None if it takes too many seconds."""
    until, left = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        left, status = os.waitpid(child, os.WNOHANG)
        if left:
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if left:
        return os.waitstatus_to_exitcode(status)
    os.waitpid(child, 0)
    return None


for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        run(request["arguments"], request["output"])
    print(json.dumps(status_of(child, request["seconds"])), flush=True)
