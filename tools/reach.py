"""Records which tests reach which lines. This is a plugin of pytest, which `tools/mutate.py record` uses.

A fixture that several tests share is made once; the lines that it reaches count for all of them. A test fails if it
takes more than IBP_RECORD_SECONDS.
"""

import json
import mmap
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import tracing


class Recorder:
    """A plugin that writes a line of JSON for each test and each shared fixture, with the bytes that were set
    meanwhile."""

    def __init__(self, folder: Path) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "only")
        path = folder / f"reached-{worker}"
        path.write_bytes(bytes(tracing.TRACED_BYTES))
        os.environ["IBP_REACHED"] = str(path)
        with path.open("r+b") as file:
            self._reached = np.frombuffer(mmap.mmap(file.fileno(), tracing.TRACED_BYTES), np.uint8)
        self._lines = (folder / f"tests-{worker}.jsonl").open("w")
        self._test: dict = {}
        self._most_seconds = float(os.environ["IBP_RECORD_SECONDS"])
        self._tracer = tracing.tracer()

    def _taken(self) -> set[int]:
        """Returns the bytes that have been set since the last call, and clears them."""
        eights = 8 * self._reached.view(np.uint64).nonzero()[0]
        found = (eights[:, None] + np.arange(8)).ravel()
        found = found[self._reached[found] != 0]
        self._reached[found] = 0
        return set(found.tolist())

    def _write(self, about: dict, reached: set[int]) -> None:
        self._lines.write(json.dumps({**about, "reached": sorted(reached)}) + "\n")
        self._lines.flush()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        fixtures = [one for several in item._fixtureinfo.name2fixturedefs.values() for one in several]
        shared = [name_of(fixture) for fixture in fixtures if fixture.scope != "function"]
        self._test = {"test": item.nodeid, "fixtures": shared, "passed": True, "skipped": False}
        self._own: set[int] = set()
        self._taken()
        tracing.use(self._tracer)  # A test before may have replaced it.
        start = time.perf_counter()
        yield
        self._test["seconds"] = time.perf_counter() - start
        self._write(self._test, self._own | self._taken())

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item):
        before = signal.signal(signal.SIGALRM, too_long)
        signal.setitimer(signal.ITIMER_REAL, self._most_seconds)
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope != "function":
            self._own |= self._taken()
        yield
        if fixturedef.scope != "function":
            self._write({"fixture": name_of(fixturedef)}, self._taken())

    def pytest_runtest_logreport(self, report):
        if report.nodeid == self._test.get("test"):
            self._test["passed"] &= report.outcome != "failed"
            self._test["skipped"] |= report.outcome == "skipped"


def too_long(number, frame):
    pytest.fail("takes too long to be recorded")


def name_of(fixturedef) -> str:
    return f"{fixturedef.baseid}::{fixturedef.argname} (fixture)"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config, args):
    """Registers the recorder before a conftest.py loads the library. A process that only hands out tests to workers
    records nothing."""
    if "PYTEST_XDIST_WORKER" in os.environ or "-n" not in args:
        early_config.pluginmanager.register(Recorder(Path(os.environ["IBP_RECORD"])), "recorder of reach")
