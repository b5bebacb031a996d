"""Builds and runs the C unit tests of tests/c, once plainly and once under the address and undefined behaviour sanitizers."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
CSRC, TESTS = ROOT / "csrc", ROOT / "tests" / "c"
INCLUDES = [f"-I{CSRC / 'include'}", f"-I{CSRC}"]
CORE_SOURCES = sorted([*CSRC.glob("core/*.c"), *CSRC.glob("x86/*.c")])
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def compiler(variable, *names):
    """The compiler that the library is built with: the environment's, else the first one there is."""
    if os.environ.get(variable):
        return shlex.split(os.environ[variable])
    found = [name for name in names if shutil.which(name)]
    assert found, f"no compiler: none of {names} is on the PATH, and {variable} is not set"
    return found[:1]


def run(command, **options):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    return done.returncode, done.stdout


def can_sanitize(directory):
    source = directory / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    built, _ = run([*compiler("CC", "cc", "gcc", "clang"), *SANITIZE, source, "-o", directory / "empty"])
    return built == 0 and run([directory / "empty"])[0] == 0


@pytest.mark.parametrize("flags", [["-O2"], ["-O1", "-g", *SANITIZE]], ids=["plain", "sanitized"])
def test_c_core(flags, tmp_path):
    if SANITIZE[0] in flags and not can_sanitize(tmp_path):
        pytest.skip("the C compiler has no address and undefined behaviour sanitizers")
    program = tmp_path / "test_core"
    sources = [*sorted(TESTS.glob("*.c")), *CORE_SOURCES, CSRC / "cuda" / "no_cuda.c"]
    code, output = run([*compiler("CC", "cc", "gcc", "clang"), "-std=c11", *flags, *WARNINGS, *INCLUDES, *sources, "-pthread", "-o", program])
    assert code == 0, output
    code, output = run([program], env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}, timeout=300)
    print(output)
    passed, failed = map(int, re.search(r"^(\d+) passed, (\d+) failed$", output, re.M).groups())
    assert code == 0 and failed == 0 and passed > 1_000_000, output


# What stream.cu makes wait for what, in the order of the file; without any one of them a tensor comes out wrong.
WAITS = ("cudaStreamWaitEvent(streamer->decodes, streamer->begun, 0)", "cudaStreamWaitEvent(streamer->copies, streamer->begun, 0)",
         "cudaStreamWaitEvent(stream, streamer->ended, 0)", "cudaStreamWaitEvent(copies, streamer->freed[place], 0)",
         "cudaStreamWaitEvent(streamer->decodes, streamer->filled[place], 0)")  # fmt: skip


@pytest.mark.parametrize("left_out", [None, *WAITS])
def test_stream_order(left_out, tmp_path):
    """The streams and events of csrc/cuda/stream.cu, without a GPU: right in every order that they allow, and no wait too many."""
    source, program = tmp_path / "stream.cpp", tmp_path / "stream_order"
    text = (CSRC / "cuda" / "stream.cu").read_text().replace('"../core/', '"core/').replace('#include "warp.cuh"\n', "")
    assert all(text.count(wait) == 1 for wait in WAITS)
    source.write_text(text.replace(left_out, "cudaSuccess") if left_out else text)
    flags = ["-O1", "-g", *SANITIZE] if not left_out and can_sanitize(tmp_path) else ["-O1"]
    objects = []
    for path in CORE_SOURCES:
        objects.append(tmp_path / f"{path.stem}.o")
        code, output = run([*compiler("CC", "cc", "gcc", "clang"), "-std=c11", *flags, *INCLUDES, "-c", path, "-o", objects[-1]])
        assert code == 0, output
    emulated = ["-std=c++17", *INCLUDES, f"-I{TESTS}", "-include", "emulated_cuda.h"]
    code, output = run([*compiler("CXX", "c++", "g++", "clang++"), *emulated, *flags, source, TESTS / "stream_order.cpp", *objects, "-o", program])
    assert code == 0, output
    code, output = run([program], timeout=300)
    print(output)
    runs, wrong, chunks = map(int, re.search(r"^(\d+) runs, (\d+) wrong, (\d+) chunks$", output, re.M).groups())
    assert chunks > 10 * runs
    assert (code, wrong) == (0, 0) if left_out is None else wrong > 0, output


@pytest.mark.parametrize("header", ["ibp.h", "ibp_cuda.h"])
@pytest.mark.parametrize("language", ["c", "c++"])
def test_headers_stand_alone(header, language, tmp_path):
    """Each public header compiles by itself, as C11 and as C++17, without a warning."""
    is_c = language == "c"
    command = compiler("CC", "cc", "gcc", "clang") if is_c else compiler("CXX", "c++", "g++", "clang++")
    source = tmp_path / ("main.c" if is_c else "main.cpp")
    source.write_text(f'#include "{header}"\n#include "{header}"\n')
    code, output = run([*command, "-std=c11" if is_c else "-std=c++17", *WARNINGS, INCLUDES[0], "-c", source, "-o", tmp_path / "main.o"])
    assert code == 0, output
