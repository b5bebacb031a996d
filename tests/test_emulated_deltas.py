"""Kernels of csrc/cuda/delta as C++, run without a GPU, lane by lane, against the C core."""

import pytest

from native import (
    CSRC,
    KEPT,
    SANITIZED,
    TESTS,
    can_sanitize,
    compiled,
    core_objects,
    cxx_compiler,
    linked,
    run,
    written,
)
from test_emulated_kernels import FLAGS, emulated, translate

pytestmark = pytest.mark.slow


def test_deltas():
    if not can_sanitize():
        pytest.skip("the C compiler has no address and undefined behaviour sanitizers")
    sources = sorted((CSRC / "cuda" / "delta").glob("*.cu"))
    translated = {}
    for path in [*CSRC.glob("core/*.h"), *CSRC.glob("cuda/**/*.*h"), *sources]:
        name = path.relative_to(CSRC).with_suffix(".cpp" if path.suffix == ".cu" else path.suffix)
        translated[path] = written(f"emulated/{name}", translate(path.read_text()))
    command = [*emulated(KEPT / "emulated"), *FLAGS]
    objects = compiled(
        [
            *((command, translated[path]) for path in sources),
            (command, TESTS / "emulated_delta.cpp"),
            ([*command, "-O1"], TESTS / "emulated_simt.cpp"),
        ]
    )
    code, output = run([linked([*cxx_compiler(), *FLAGS], [*objects, *core_objects(SANITIZED)]), "1", 24], timeout=600)
    assert code == 0 and output == "24 cases, 0 wrong\n", output
