"""Which tests reach which lines: a plugin of pytest that `tools/mutate.py` records with.

A fixture of several tests is made once: what is reached while it is made counts for all of them.
"""

import json
import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tracing


class Recorder:
    """Writes down which bytes were set in each test, and in each fixture of several."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._worker = folder, os.environ.get("PYTEST_XDIST_WORKER", "only")
        path = folder / f"reached-{self._worker}"
        path.write_bytes(bytes(tracing.TRACED_BYTES))
        os.environ["IBP_REACHED"] = str(path)
        with path.open("r+b") as file:
            self._reached = np.frombuffer(mmap.mmap(file.fileno(), tracing.TRACED_BYTES), np.uint8)
        tracing.trace()
        self._tests: dict[str, dict] = {}
        self._found: dict[str, set[int]] = {}
        self._now = ""

    def _switch(self, to: str) -> str:
        """Counts what is reached from now on for another test or fixture; returns the one until now."""
        eights = 8 * self._reached.view(np.uint64).nonzero()[0]
        found = (eights[:, None] + np.arange(8)).ravel()
        found = found[self._reached[found] != 0]
        self._found.setdefault(self._now, set()).update(found.tolist())
        self._reached[found] = 0
        before, self._now = self._now, to
        return before

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        fixtures = [one for several in item._fixtureinfo.name2fixturedefs.values() for one in several]
        shared = [name_of(fixture) for fixture in fixtures if fixture.scope != "function"]
        self._tests[item.nodeid] = {"fixtures": shared, "passed": True, "skipped": False}
        self._switch(item.nodeid)
        start = time.perf_counter()
        yield
        self._tests[item.nodeid]["seconds"] = time.perf_counter() - start
        self._switch("")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        before = self._now if fixturedef.scope == "function" else self._switch(name_of(fixturedef))
        yield
        if before != self._now:
            self._switch(before)

    def pytest_runtest_logreport(self, report):
        if report.nodeid in self._tests:  # of this process, which runs tests
            self._tests[report.nodeid]["passed"] &= report.outcome != "failed"
            self._tests[report.nodeid]["skipped"] |= report.outcome == "skipped"

    def pytest_sessionfinish(self):
        sys.settrace(None)
        both = {"tests": self._tests, "found": {name: sorted(found) for name, found in self._found.items()}}
        (self._folder / f"tests-{self._worker}.json").write_text(json.dumps(both))


def name_of(fixturedef) -> str:
    return f"{fixturedef.baseid}::{fixturedef.argname} (fixture)"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config, args):
    """Before a conftest.py loads the library. The process that only hands tests to others records nothing."""
    if "PYTEST_XDIST_WORKER" in os.environ or "-n" not in args:
        early_config.pluginmanager.register(Recorder(Path(os.environ["IBP_RECORD"])), "recorder of reach")
