"""What fails on the host: memory that there is not, wherever it is asked for."""

import os
import platform
import shutil
import sys

import pytest

from fault_cases import CASES
from helpers import NoMemory
from native import ROOT, TESTS, WARNINGS, cxx_compiler, made, run

# ---- memory of the library's own ----


@pytest.fixture(scope="module")
def shim():
    """The library that lets allocations fail."""
    if platform.libc_ver()[0] != "glibc" or not shutil.which(cxx_compiler()[0]):
        pytest.skip("it replaces the functions of glibc")
    source = TESTS / "failing_allocations.cpp"
    command = [*cxx_compiler(), "-std=c++17", "-O2", *WARNINGS, "-shared", "-fPIC", source]
    return made(command, "failing_allocations.so", [source])


@pytest.mark.slow
def test_each_allocation_fails(shim):
    """A MemoryError or RuntimeError, tables as they were or as they become, and the same call works afterwards."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), *sys.path])
    environment = {**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    code, output = run(
        [sys.executable, ROOT / "tests" / "support" / "fault_cases.py", shim], env=environment, timeout=300
    )
    assert code == 0 and output.endswith("0 failures\n"), output


# ---- memory of torch's tensors ----


# Those that change what is there; the others are left as they are by anything.
OFTEN = ["compress in place", "update_", "append", "RowCache.refill", "RowCache.update_", "KVStore", "KVRows"]


@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_torch_has_no_memory(name, stays):
    case, number, errors = CASES[name](), 0, set()
    while True:
        number += 1 + number // 20
        mode = NoMemory(number, stays)

        def call(subject, mode=mode):
            with mode:
                return case.call(subject)

        errors.add(case.fail(call))
        if mode.count < number:
            break
    assert errors <= {"OutOfMemoryError", None} and ("OutOfMemoryError" in errors) == (number > 1)
