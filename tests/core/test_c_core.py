"""Builds and runs the C unit tests of tests/c, plainly and under the address and undefined behaviour sanitizers."""

import os
import re

import pytest

from native import (
    CORE_SOURCES,
    CSRC,
    INCLUDES,
    PLAIN,
    SANITIZED,
    TESTS,
    WARNINGS,
    c_compiler,
    can_sanitize,
    compiled,
    core_objects,
    cxx_compiler,
    linked,
    run,
    written,
)


@pytest.mark.parametrize("rounds", ["quick", pytest.param("all", marks=pytest.mark.slow)])
def test_c_core(rounds):
    flags = SANITIZED if rounds == "all" and can_sanitize() else PLAIN
    objects = core_objects(flags, [*sorted(TESTS.glob("*.c")), *CORE_SOURCES, CSRC / "cuda" / "no_cuda.c"])
    program = linked([*c_compiler(), *flags, "-pthread"], objects)
    code, output = run([program, rounds], env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}, timeout=900)
    print(output)
    passed, failed = map(int, re.search(r"^(\d+) passed, (\d+) failed$", output, re.M).groups())
    assert code == 0 and failed == 0 and passed > 1_000_000, output


# What stream.cu makes wait for what, in the order of the file; without any one of them a tensor comes out wrong.
WAITS = (
    "cudaStreamWaitEvent(streamer->decodes, streamer->begun, 0)",
    "cudaStreamWaitEvent(streamer->copies, streamer->begun, 0)",
    "cudaStreamWaitEvent(stream, streamer->ended, 0)",
    "cudaStreamWaitEvent(copies, streamer->freed[place], 0)",
    "cudaStreamWaitEvent(streamer->decodes, streamer->filled[place], 0)",
)


# The same of stage.cu.
STAGE_WAITS = (
    "cudaStreamWaitEvent(stager_->copies, stager_->decoded[place], 0)",
    "cudaStreamWaitEvent(stream_, stager_->copied[place], 0)",
    "cudaEventQuery(stager_->copied[place_of(open)])",
)


@pytest.mark.parametrize(
    ("name", "waits", "left_out", "flags"),
    [
        pytest.param(name, waits, wait, flags, marks=[pytest.mark.slow] if wait or flags is SANITIZED else [])
        for name, waits in (("stream", WAITS), ("stage", STAGE_WAITS))
        for wait, flags in ((None, PLAIN), (None, SANITIZED), *((wait, PLAIN) for wait in waits))
    ],
)
def test_stream_order(name, waits, left_out, flags):
    """Streams and events of csrc/cuda/stream without a GPU: right in any order they allow, and no wait too many."""
    folder = "cuda/stream"
    text = (CSRC / folder / f"{name}.cu").read_text()
    text = re.sub(r'(?<=#include ")\.\./[\w./]+', lambda found: os.path.normpath(f"{folder}/{found[0]}"), text)
    assert all(text.count(wait) == 1 for wait in waits)
    place = f"{name}_order/{waits.index(left_out) if left_out else 'whole'}.cpp"
    source = written(place, text.replace(left_out, "cudaSuccess") if left_out else text)
    if flags is SANITIZED and not can_sanitize():
        pytest.skip("the C compiler has no address and undefined behaviour sanitizers")
    emulated = [
        *cxx_compiler(),
        "-std=c++17",
        "-O1",
        *(flag for flag in flags if flag not in WARNINGS),
        *INCLUDES,
        f"-I{TESTS}",
        "-include",
        "emulated_cuda.h",
    ]
    objects = compiled([(emulated, source), (emulated, TESTS / f"{name}_order.cpp")])
    program = linked([*cxx_compiler(), *flags, "-pthread"], [*objects, *core_objects(flags)])
    code, output = run([program], timeout=900)
    print(output)
    runs, wrong, chunks = map(int, re.search(r"^(\d+) runs, (\d+) wrong, (\d+) chunks$", output, re.M).groups())
    assert chunks > 10 * runs
    assert (code, wrong) == (0, 0) if left_out is None else wrong > 0, output


HEADERS = sorted((CSRC / "include").glob("*.h"))
INTERNAL_HEADERS = sorted((CSRC / "internal").glob("*.h"))


@pytest.mark.parametrize("header", HEADERS + INTERNAL_HEADERS, ids=lambda path: path.name)
@pytest.mark.parametrize("language", ["c", "c++"])
def test_headers_stand_alone(header, language, tmp_path):
    """Each header of exported functions compiles by itself, as C11 and as C++17, without a warning."""
    is_c = language == "c"
    command = [*c_compiler(), "-std=c11"] if is_c else [*cxx_compiler(), "-std=c++17"]
    source = tmp_path / ("main.c" if is_c else "main.cpp")
    source.write_text(f'#include "{header}"\n#include "{header}"\n')
    code, output = run([*command, *WARNINGS, INCLUDES[0], "-c", source, "-o", tmp_path / "main.o"])
    assert code == 0, output


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_examples_of_headers(header, tmp_path):
    """The comment at the top of each public header has an example, which needs nothing but that header."""
    comment = header.read_text().partition("*/")[0]
    example = "\n".join(re.findall(r"^ \*     (.*)$", comment, re.MULTILINE))
    assert "ibp_" in example, header
    source = tmp_path / "main.c"
    source.write_text(f'#include "{header.name}"\n{example}\n')
    code, output = run([*c_compiler(), "-std=c11", *WARNINGS, INCLUDES[0], "-c", source, "-o", tmp_path / "main.o"])
    assert code == 0, output


def test_headers_are_short():
    assert [path.name for path in HEADERS + INTERNAL_HEADERS if path.read_text().count("\n") >= 300] == []
