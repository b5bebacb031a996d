"""The libraries built with AddressSanitizer and UndefinedBehaviorSanitizer, under everything hostile: arguments, files,
codebooks, rows, and memory that changes while it is read."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock  # which torch depends on

import ibp

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
# Large allocations fail as they do elsewhere; Python's own are no concern of ours.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4000",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
SECONDS = 5  # of noise for each set of processor features


def environment(**changes):
    """That of programs over a sanitized build, which has no kernels: no GPU is asked for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("IBP_REQUIRE_")}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


def output_of(command, cwd, **changes):
    """What a command prints; fails with it where the command does."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    done = subprocess.run(command, cwd=cwd, env=environment(**changes), timeout=900, **both)
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def runtime_library(name):
    """The path of a library of gcc's, None where it has none."""
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else None


def of_the_run(tmp_path_factory):
    """A directory that all processes of a run of pytest share, so that one builds for all."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """run(script arguments ...): what Python prints over a sanitized build."""
    if not (shutil.which("gcc") and shutil.which("g++") and (ROOT / "setup.py").exists()):
        pytest.skip("needs gcc, g++ and the sources")
    preload = [runtime_library("libasan.so"), runtime_library("libstdc++.so")]
    if None in preload:
        pytest.skip("gcc has no libasan.so")
    made = of_the_run(tmp_path_factory) / "sanitized"
    path = os.pathsep.join([str(made / "lib"), str(SUPPORT)])
    inside = {**OPTIONS, "LD_PRELOAD": " ".join(preload), "PYTHONMALLOC": "malloc", "PYTHONPATH": path}
    command = [sys.executable, "-c", "import torch"]
    probe = subprocess.run(command, env=environment(**inside), capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"torch does not run under AddressSanitizer here: {probe.stderr[-200:]}")
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", str(made / "base")]
    build += ["--build-lib", str(made / "lib")]
    # C++ here converts and checks arguments, allocates results and calls the C core, which reads and writes rows
    # and has all checks. To optimise it would take half of the time, and to look at every pointer in the headers of
    # torch and pybind11 half of the rest. What reads through a null pointer ends by a signal; x86 reads what is not
    # aligned, and no class here is cast to one that it derives from.
    less = "-fno-sanitize=null,alignment,vptr"
    flags = {"CFLAGS": f"-O1 -g1 {SANITIZERS}", "CXXFLAGS": f"-O0 -g1 {SANITIZERS} {less}"}
    compilers = {"CC": "gcc", "CXX": "g++", "IBP_NO_CUDA": "1", **flags}
    with FileLock(made.with_suffix(".lock")):
        if not (made / "lib").exists():
            output_of(build, ROOT, IBP_BUILD_DIR=str(made / "objects"), **compilers)

    def run(*arguments):
        return output_of([sys.executable, *arguments], made, **inside)

    assert run("-c", "import ibp; print(ibp.__file__)").strip().startswith(str(made))
    return run


READS_PAST_THE_END = """
import ctypes, pathlib, ibp

core = ctypes.CDLL(str(min(pathlib.Path(ibp.__file__).parent.glob("_lib/libibp.so.*"))))
data, counts = ctypes.create_string_buffer(64), ctypes.create_string_buffer(8 * 64 * 8)
core.ibp_count_bits(data, ctypes.c_size_t(1000), ctypes.c_uint32(64), counts)
"""


def test_a_mistake_is_found(sanitized):
    """The sanitizer is at work: whoever reads past the end of an array ends the process."""
    with pytest.raises(AssertionError, match="AddressSanitizer: heap-buffer-overflow"):
        sanitized("-c", READS_PAST_THE_END)


RUNS_TESTS = """
import pathlib, sys
import ibp, pytest

status = pytest.main(sys.argv[2:])
assert not pathlib.Path(ibp.__file__).is_relative_to(sys.argv[1]), ibp.__file__
sys.exit(status)
"""


def test_operations_and_files(sanitized, monkeypatch):
    """The tests of hostile arguments, of damaged memory and files, and of codebooks that a file builds twice; also
    where tests must not skip for want of a GPU."""
    monkeypatch.setenv("IBP_REQUIRE_CUDA", "1")
    monkeypatch.setenv("IBP_REQUIRE_CUDA_DEVICES", "2")
    names = [
        "bindings/test_hostile_ops.py",
        "cache/test_cache_ops.py",
        "core/test_golden.py",
        "schemes/test_codebooks.py::test_a_file_cannot_rebuild_a_member",
        "cuda/test_corruption_cuda.py",
        "bindings/test_changing.py",
    ]
    files = [str(ROOT / "tests" / name) for name in names]
    # Left out: a test that counts threads, and one that looks for names in an optimised library.
    chosen = "not little_work and not an_error_of_torch_says_what_it_was"
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", chosen]
    # pyproject.toml has the sources on the path, whose build is not sanitized.
    options += ["-o", f"pythonpath={SUPPORT}"]
    out = sanitized("-c", RUNS_TESTS, ROOT, *options, *files)
    assert " passed" in out


AVX2, AVX512 = ibp._core.CPU_AVX2_BMI2, ibp._core.CPU_AVX512


@pytest.mark.parametrize("features", [0, AVX2, AVX2 | AVX512], ids=["plain", "avx2", "avx512"])
def test_noise_and_changing_memory(sanitized, features):
    out = sanitized(str(SUPPORT / "hostile_rows.py"), str(features), str(SECONDS))
    if "lacks the features" in out:
        pytest.skip(out.strip())
    assert "noisy tables" in out
