"""Settings that all tests share: threads, seeds, markers, hypothesis profiles, and the GPU."""

import faulthandler
import gc
import logging
import math
import os
import re
import time

# This is set before torch makes its threads. The tests' operations are tiny, so that threads would wait for each other
# longer than they work, and several test processes share the cores. Programs that tests start inherit the variable.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

import ibp  # noqa: E402
from ibp._machine import calibration as _calibration  # noqa: E402

torch.set_num_threads(1)  # Something may have imported torch before.

hypothesis.settings.register_profile(
    "fast", deadline=None, derandomize=True, max_examples=30, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("full", hypothesis.settings.get_profile("fast"), max_examples=90)
hypothesis.settings.load_profile("fast")


# After this many seconds a process ends with a traceback of all its threads, because a thread that waits for another
# one may wait forever. Setting the timer takes milliseconds, as its former thread has to end first; so a timer that was
# set at most SAME_TIMER seconds ago serves the next test, too.
MOST_OF_A_TEST, MOST_OF_THE_EXIT, SAME_TIMER = 1200, 120, 60

LONGEST = ("tests/cuda/test_emulated_", "tests/core/test_c_core.py::test_c_core", "tests/core/test_sanitized.py")
HAS_GPU = torch.cuda.is_available()
REQUIRED = ("IBP_REQUIRE_CUDA", "IBP_REQUIRE_CUDA_DEVICES")  # With these set, a test without its GPUs fails.


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "slow: left out of `make test`: takes seconds, or much memory, or is a fast test with more data",
    )
    config.addinivalue_line("markers", "frameworks: needs a host framework; left out of `make test`")


def pytest_ignore_collect(collection_path, config):
    """Leaves out files all of whose tests need a host framework, if no such test is to run. To import the frameworks
    takes each process seconds."""
    if collection_path.suffix == ".py" and "not frameworks" in config.option.markexpr:
        needs = re.search(r"^pytestmark = .*\bframeworks\b", collection_path.read_text(), re.MULTILINE)
        return True if needs else None


def pytest_collection_modifyitems(config, items):
    """Raises UsageError if the name of a test contains an address. pytest-xdist needs the same names in every process.
    Without a GPU, leaves out the tests that need one, because to skip each of thousands takes seconds. If
    IBP_REQUIRE_CUDA or IBP_REQUIRE_CUDA_DEVICES asks for GPUs, they stay, and fail."""
    changing = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if changing:
        raise pytest.UsageError(f"{len(changing)} tests have addresses in their names; give ids to {changing[0]}")
    are_required = any(os.environ.get(name, "0") not in ("", "0") for name in REQUIRED)
    if not HAS_GPU and not are_required:
        of_gpus = [item for item in items if {"cuda", "gpus"} & {*item.fixturenames}]
        config.hook.pytest_deselected(items=of_gpus)
        left_out = {*of_gpus}
        items[:] = [item for item in items if item not in left_out]
    # Tests that compile, or run one program, for longest come first, so that other processes can run the other tests
    # meanwhile.
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish():
    """Exempts everything that was imported and collected from garbage collection, so that tests that collect garbage
    need not look at it each time. Lets the messages of torch's loggers reach the root logger: if a logger keeps them to
    itself, pytest adds its handlers to it for each phase of each test, and torch has dozens of such loggers, one of
    which writes traces of what it compiles if it has a handler."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session):
    """Keeps a file descriptor of the terminal, because pytest captures standard error while tests run."""
    with session.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        session.config.terminal_file = os.dup(2)
    session.config.timer_set = -math.inf


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    now = time.monotonic()
    if now > item.config.timer_set + SAME_TIMER:
        faulthandler.dump_traceback_later(MOST_OF_A_TEST, exit=True, file=item.config.terminal_file)
        item.config.timer_set = now


def pytest_sessionfinish(session):
    """Ends the process if threads or processes that tests have left keep the interpreter from exiting. This does not
    apply to workers of pytest-xdist, which live until all are done and are then ended."""
    faulthandler.cancel_dump_traceback_later()
    if hasattr(session.config, "workerinput"):
        return
    faulthandler.dump_traceback_later(MOST_OF_THE_EXIT, exit=True, file=session.config.terminal_file)


def pytest_collectstart():
    """Sets the seed before a file is imported, so that what it makes, such as parameters of tests, is the same in every
    run."""
    set_seed()


def set_seed():
    """Sets the seed of torch's generators. Without a GPU this is the CPU's alone: torch.manual_seed would keep a
    traceback for each device that may come, which takes longer than many a test."""
    (torch.manual_seed if HAS_GPU else torch.default_generator.manual_seed)(0)


@pytest.fixture(scope="session", autouse=True)
def no_kept_calibration():
    """Lets tests compute with the rates of an H200, whatever was measured on this machine before. Writes no calibration
    for later programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_calibration, "_read", lambda device: None)
        patch.setattr(_calibration, "_write", lambda device, calibration: None)
        yield


@pytest.fixture(autouse=True)
def same_start():
    """Lets every test begin with the same seed, and without a calibration that another test has measured, because other
    processes use the GPU during it."""
    set_seed()
    before, _calibration._in_force = _calibration._in_force, {}
    yield
    _calibration._in_force = before


@pytest.fixture
def set_threads():
    """Yields torch.set_num_threads. After the test there is one thread again."""
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cannot_run():
    """Returns a function to call with the reason why a GPU test cannot run. It skips the test, or fails it if
    IBP_REQUIRE_CUDA=1."""
    return pytest.fail if os.environ.get("IBP_REQUIRE_CUDA") == "1" else pytest.skip


@pytest.fixture(scope="session")
def cuda(cannot_run):
    """Returns the first CUDA device."""
    if not torch.cuda.is_available():
        cannot_run("torch sees no CUDA device")
    if not ibp.cuda_is_available():
        cannot_run("this build of ibp has no CUDA kernels")
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def gpus():
    """Yields the first two CUDA devices. Skips the test if there are fewer, or fails it if
    IBP_REQUIRE_CUDA_DEVICES=2."""
    cannot_run = pytest.fail if int(os.environ.get("IBP_REQUIRE_CUDA_DEVICES") or 0) >= 2 else pytest.skip
    if torch.cuda.device_count() < 2:
        cannot_run(f"needs two GPUs, torch sees {torch.cuda.device_count()}")
    if not ibp.cuda_is_available():
        cannot_run("this build of ibp has no CUDA kernels")
    yield [torch.device("cuda", index) for index in range(2)]
    torch.cuda.set_device(0)
