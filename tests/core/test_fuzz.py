"""The fuzz targets of tests/fuzz for a while, by a driver that needs no libFuzzer (for longer: tools/fuzz.py)."""

import os
import re

import pytest

from fuzzing import FUZZ, TARGETS, corpus, driver, most_bytes, pack, with_driver
from native import SANITIZED, c_compiler, can_sanitize, core_objects, linked, run, written

pytestmark = pytest.mark.slow
SECONDS = float(os.environ.get("IBP_FUZZ_SECONDS", "30")) / len(TARGETS)  # of all targets
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0"}


@pytest.fixture(autouse=True)
def sanitizers():
    if not can_sanitize():
        pytest.skip("the C compiler has no address and undefined behaviour sanitizers")


@pytest.mark.parametrize("target", TARGETS)
def test_target(target, tmp_path):
    (tmp_path / "corpus.bin").write_bytes(pack(corpus(target)))
    command = [with_driver(target), f"-seconds={SECONDS}", f"-most={most_bytes(target)}", "corpus.bin"]
    code, output = run(command, cwd=tmp_path, env={**os.environ, **OPTIONS}, timeout=20 * SECONDS + 120)
    print(output)
    found = re.search(r"^(\d+) executions, (\d+) edges reached, (\d+) inputs", output, re.M)
    assert code == 0 and found, output[-6000:]
    executions, edges, inputs = map(int, found.groups())
    assert executions > 10 * SECONDS and edges > 500 and inputs > 1


PLANTED = """
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *const room = malloc(4);
    if (!room) abort();
    room[0] = 1;
    if (size > 2 && data[0] == 'i')
        if (data[1] == 'b')
            if (data[2] == 'p') room[size] = 1;
    free(room);
    return 0;
}
"""


def test_a_mistake_is_found(tmp_path):
    """The driver goes on from inputs that reach new code, and keeps the one that ends the process."""
    flags = [*SANITIZED, "-fsanitize-coverage=trace-pc", f"-I{FUZZ}"]
    objects = core_objects(flags, [written("planted.c", PLANTED)])
    program = linked([*c_compiler(), *SANITIZED], [*objects, driver()], "planted")
    options = {"cwd": tmp_path, "env": {**os.environ, **OPTIONS}, "timeout": 120}
    code, output = run([program, "-runs=3000000", "-most=8"], **options)
    assert code != 0 and re.search("heap-buffer-overflow|insufficient space", output), output[-3000:]
    assert (tmp_path / "crash-planted").read_bytes().startswith(b"ibp")
