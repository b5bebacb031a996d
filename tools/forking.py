"""Runs pytest again and again, each time in a process that is forked from one which has imported what takes seconds.

Reads requests from standard input, a line of JSON each: {"arguments": of pytest, "output": path, "seconds": at most}.
Answers each with a line: pytest's exit status, negative where a signal has ended it, null after too many seconds. All
that a run has left running is killed.
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
    """In the child: never returns."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, to in ((0, os.open(os.devnull, os.O_RDONLY)), (1, file), (2, file)):
        os.dup2(to, number)
    status = 70  # of what raises
    try:
        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)


def status_of(child, seconds):
    """The exit status of a child, None after too many seconds."""
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
