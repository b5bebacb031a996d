"""Which tests reach which lines: a plugin of pytest that `tools/mutate.py` records with.

A fixture of several tests is made once: the lines it reaches count for all of them. A test that takes more than
IBP_RECORD_SECONDS fails.
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
    """Writes a line for each test, and for each fixture of several: which bytes were set meanwhile, as JSON."""

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
        """The bytes that have been set since the last call."""
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
        tracing.use(self._tracer)  # again: a test before may have put its own in its place
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
    """Before a conftest.py loads the library. The process that only hands tests to others records nothing."""
    if "PYTEST_XDIST_WORKER" in os.environ or "-n" not in args:
        early_config.pluginmanager.register(Recorder(Path(os.environ["IBP_RECORD"])), "recorder of reach")
