"""Compiles the gathering and the encoding kernels of csrc/cuda as C++ and runs them without a GPU, lane by lane (tests/c/emulated_simt.h), against the C core."""

import concurrent.futures
import os
import re

import pytest
from test_c_core import CORE_SOURCES, CSRC, INCLUDES, SANITIZE, TESTS, can_sanitize, compiler, run

KERNELS = ("gather.cu", "encode.cu", "decode/*.cu", "encode/*.cu")  # sources in csrc/cuda
# A collective must stay in one place of the program, by which lanes that come to different ones are told.
COMMON = ["-O1", "-g1", "-fno-strict-aliasing", "-fno-thread-jumps", "-fno-tree-dominator-opts"]
# Pointers of corrupt tables are computed before they are checked, as numbers.
FLAGS = [*COMMON, *SANITIZE, "-fno-sanitize=pointer-overflow"]
# Accesses of the kernels are looked at by tests/c/emulated_races.cpp instead; addresses as addr2line wants them.
RACE_FLAGS = [*COMMON, "-fno-pie"]


def translate(text):
    """The text of a kernel's source or header as C++: launches become calls."""
    launches = text.count("<<<")
    text, found = re.subn(r"([\w:]+(?:<[\w:, ]*>)?)<<<(.*?)>>>\(", r"emulate(\1, \2, ", text, flags=re.S)
    assert found == launches, f"{launches} launches, {found} of them understood"
    return re.sub(r"(?<!extern )__shared__ ", "static ", text)


def compile_all(directory, commands, flags):
    """Runs the commands, by the source that each compiles, and links what they make."""
    cxx = compiler("CXX", "c++", "g++", "clang++")
    commands = {directory / f"{source.parent.name}_{source.stem}.o": [*command, *flags, "-c", source] for source, command in commands.items()}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for code, output in pool.map(lambda item: run([*item[1], "-o", item[0]]), commands.items()):
            assert code == 0, output
    no_pie = ["-no-pie"] if "-fno-pie" in flags else []
    code, output = run([*cxx, *flags, *no_pie, *commands, "-o", directory / "program"])
    assert code == 0, output
    return directory / "program"


def emulated(directory):
    """The command that compiles kernels as C++."""
    command = [*compiler("CXX", "c++", "g++", "clang++"), "-std=c++17", f"-I{directory}", *INCLUDES, f"-I{TESTS}", "-include", "emulated_simt.h"]
    return [*command, "-Wall", "-Wno-unknown-pragmas", "-Wno-unused", "-Wno-attributes", "-Wno-maybe-uninitialized"]


def build(csrc, directory, flags):
    """The program of tests/c/emulated_tables.cpp for the sources in csrc."""
    kernels = []
    sources = [path for pattern in KERNELS for path in sorted((csrc / "cuda").glob(pattern))]
    for path in [*csrc.glob("core/*.h"), *csrc.glob("cuda/**/*.*h"), *sources]:
        target = (directory / path.relative_to(csrc)).with_suffix(".cpp" if path.suffix == ".cu" else path.suffix)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(translate(path.read_text()))
        if path in sources:
            kernels.append(target)
    commands = {path: emulated(directory) for path in (*kernels, TESTS / "emulated_tables.cpp", TESTS / "emulated_simt.cpp")}
    if flags is RACE_FLAGS:
        for path in kernels:
            commands[path].append("-fsanitize=thread")
        commands[TESTS / "emulated_races.cpp"] = emulated(directory)
    for path in CORE_SOURCES:
        commands[path] = [*compiler("CC", "cc", "gcc", "clang"), "-std=c11", *INCLUDES]
    return compile_all(directory, commands, flags)


@pytest.fixture(scope="module", autouse=True)
def sanitizers(tmp_path_factory):
    if not can_sanitize(tmp_path_factory.mktemp("sanitizers")):
        pytest.skip("the C compiler has no address and undefined behaviour sanitizers")


@pytest.mark.parametrize("flags", [FLAGS, RACE_FLAGS], ids=["sanitized", "races"])
def test_kernels(flags, tmp_path):
    program = build(CSRC, tmp_path, flags)
    code, output = run([program, "1", "400"], timeout=900)
    print(output)
    assert code == 0, output
    cases, wrong, kernels = map(int, re.search(r"^(\d+) cases, (\d+) wrong, (\d+) kernels$", output, re.M).groups())
    assert (cases, wrong) == (400, 0) and kernels > 30, output


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    directory = tmp_path_factory.mktemp("faults")
    return compile_all(directory, {TESTS / f"emulated_{name}.cpp": emulated(directory) for name in ("faults", "simt")}, FLAGS)


@pytest.mark.parametrize("kernel", ["exchanges", "barriers", "numbers"])
def test_emulation_is_right(faults, kernel):
    code, output = run([faults, kernel], timeout=60)
    assert code == 0 and output == "0 wrong\n", output


MISTAKES = {
    "no_sync": r"^[1-9]\d* wrong", "diverging": "wait for each other at different collectives", "other_line": "wait for each other at different collectives",
    "other_instance": "wait for each other at different collectives", "returning": "returned; threads 5$", "outside_mask": "is not in the mask 0000ffff", "absent_source": "a lane that takes no part", "missing_warp": "no warp can go on",
    "different_counts": "a barrier of different numbers of threads", "past_shared": "use-after-poison", "misaligned": "misaligned address",
}  # fmt: skip


@pytest.mark.parametrize("kernel", MISTAKES)
def test_mistakes_are_seen(faults, kernel):
    code, output = run([faults, kernel], timeout=60)
    assert code != 0 and re.search(MISTAKES[kernel], output, re.M), output
