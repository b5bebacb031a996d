"""Compiles csrc/gather.cu as C++ and runs it without a GPU, lane by lane (tests/c/emulated_simt.h), against the C core."""

import concurrent.futures
import os
import re

import pytest
from test_c_core import CSRC, SANITIZE, TESTS, can_sanitize, compiler, run

# Pointers of corrupt tables are computed before they are checked, as numbers.
FLAGS = ["-O1", "-g1", *SANITIZE, "-fno-sanitize=pointer-overflow", "-fno-strict-aliasing"]


def translate(text):
    """The text of a kernel's source or header as C++: launches and named barriers become calls."""
    launches = text.count("<<<")
    text, found = re.subn(r"([\w:]+(?:<[\w:, ]*>)?)<<<(.*?)>>>\(", r"emulate(\1, \2, ", text, flags=re.S)
    assert found == launches, f"{launches} launches, {found} of them understood"
    text = re.sub(r'asm volatile\("bar\.sync %0, %1;"\s*::\s*"r"\((.*?)\), "n"\((.*?)\) : "memory"\);', r"named_barrier(\1, \2);", text)
    return text


def build(csrc, directory, flags):
    """The program of tests/c/emulated_gather.cpp for the sources in csrc."""
    for path in [*csrc.glob("*.h"), *csrc.glob("*.cuh"), csrc / "gather.cu"]:
        (directory / path.name).with_suffix(".cpp" if path.suffix == ".cu" else path.suffix).write_text(translate(path.read_text()))
    c, cxx = compiler("CC", "cc", "gcc", "clang"), compiler("CXX", "c++", "g++", "clang++")
    emulated = ["-std=c++17", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused", "-Wno-attributes", f"-I{directory}", f"-I{TESTS}", "-include", "emulated_simt.h"]
    sources = [directory / "gather.cpp", TESTS / "emulated_gather.cpp", TESTS / "emulated_simt.cpp", *(p for p in sorted(csrc.glob("*.c")) if p.name != "no_cuda.c")]
    commands = {directory / f"{path.stem}.o": [*(c + ["-std=c11"] if path.suffix == ".c" else cxx + emulated), *flags, "-c", path] for path in sources}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for code, output in pool.map(lambda item: run([*item[1], "-o", item[0]]), commands.items()):
            assert code == 0, output
            print(output, end="")
    program = directory / "emulated_gather"
    code, output = run([*cxx, *flags, *commands, "-o", program])
    assert code == 0, output
    return program


def test_gather_kernels(tmp_path):
    if not can_sanitize(tmp_path):
        pytest.skip("the C compiler has no address and undefined behaviour sanitizers")
    program = build(CSRC, tmp_path, FLAGS)
    code, output = run([program, "1", "300"], env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}, timeout=600)
    print(output)
    cases, wrong = map(int, re.search(r"^(\d+) cases, (\d+) wrong$", output, re.M).groups())
    assert (code, cases, wrong) == (0, 300, 0), output
