"""What all tests share: threads, seeds, markers, hypothesis profiles, and the GPU."""

import faulthandler
import gc
import os

# Set before torch makes its threads. The tests' operations are tiny: threads would spin for each other longer than they
# work, and processes of tests share the cores. Programs that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

import ibp  # noqa: E402
from ibp._machine import calibration as _calibration  # noqa: E402

torch.set_num_threads(1)  # where something imported torch before

hypothesis.settings.register_profile(
    "fast", deadline=None, derandomize=True, max_examples=30, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("full", hypothesis.settings.get_profile("fast"), max_examples=150)
hypothesis.settings.load_profile("fast")


# Seconds after which a process is ended with a traceback of all its threads: one that waits for another waits forever.
MOST_OF_A_TEST, MOST_OF_THE_EXIT = 1200, 120


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "slow: left out of `make test`: takes seconds, or much memory, or is a fast test with more data",
    )
    config.addinivalue_line("markers", "frameworks: needs a host framework; left out of `make test`")


def pytest_collection_modifyitems(items):
    """Names of tests are the same in every process, which pytest-xdist needs: none holds an address."""
    changing = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if changing:
        raise pytest.UsageError(f"{len(changing)} tests have addresses in their names; give ids to {changing[0]}")
    # What compiles for minutes comes first, so that other processes have the other tests to run meanwhile.
    items.sort(key=lambda item: "test_emulated_kernels" not in item.nodeid)


def pytest_collection_finish():
    """What was imported and collected stays: tests that collect garbage need not look at it each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session):
    """The terminal, also while pytest captures what tests print."""
    with session.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        session.config.terminal_file = os.dup(2)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    faulthandler.dump_traceback_later(MOST_OF_A_TEST, exit=True, file=item.config.terminal_file)
    yield
    faulthandler.cancel_dump_traceback_later()


def pytest_sessionfinish(session):
    """Threads and processes that tests have left, which the interpreter waits for. Workers of pytest-xdist live until
    all are done, and are ended then."""
    if hasattr(session.config, "workerinput"):
        return
    faulthandler.dump_traceback_later(MOST_OF_THE_EXIT, exit=True, file=session.config.terminal_file)


def pytest_collectstart():
    """What a file makes while it is imported, parameters of tests too, is the same in every run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def no_kept_calibration():
    """Tests reckon with an H200, whatever was measured on this machine before, and leave nothing for later programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_calibration, "_read", lambda device: None)
        patch.setattr(_calibration, "_write", lambda device, calibration: None)
        yield


@pytest.fixture(autouse=True)
def no_calibration_left(monkeypatch):
    """A calibration that a test measures is in force until its end: other processes use the GPU meanwhile."""
    monkeypatch.setattr(_calibration, "_in_force", {})


@pytest.fixture
def set_threads():
    """torch.set_num_threads, until the end of the test."""
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cannot_run():
    """Call with a reason why a GPU test cannot run here: a skip, or with IBP_REQUIRE_CUDA=1 a failure."""
    return pytest.fail if os.environ.get("IBP_REQUIRE_CUDA") == "1" else pytest.skip


@pytest.fixture(scope="session")
def cuda(cannot_run):
    """The first CUDA device."""
    if not torch.cuda.is_available():
        cannot_run("torch sees no CUDA device")
    if not ibp.cuda_is_available():
        cannot_run("this build of ibp has no CUDA kernels")
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def gpus():
    """The first two CUDA devices. Skips where there are fewer; with IBP_REQUIRE_CUDA_DEVICES=2 it fails there."""
    cannot_run = pytest.fail if int(os.environ.get("IBP_REQUIRE_CUDA_DEVICES") or 0) >= 2 else pytest.skip
    if torch.cuda.device_count() < 2:
        cannot_run(f"needs two GPUs, torch sees {torch.cuda.device_count()}")
    if not ibp.cuda_is_available():
        cannot_run("this build of ibp has no CUDA kernels")
    yield [torch.device("cuda", index) for index in range(2)]
    torch.cuda.set_device(0)
