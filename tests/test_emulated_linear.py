"""The kernel of csrc/cuda/linear.cu as C++, run without a GPU, lane by lane, against products of decoded rows."""

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


def build():
    """The program of tests/c/emulated_linear.cpp."""
    translated = {
        path: written(
            f"emulated/{path.relative_to(CSRC).with_suffix('.cpp' if path.suffix == '.cu' else path.suffix)}",
            translate(path.read_text()),
        )
        for path in [*CSRC.glob("core/*.h"), *CSRC.glob("cuda/**/*.*h"), CSRC / "cuda/linear.cu"]
    }
    command = [*emulated(KEPT / "emulated"), *FLAGS]
    objects = compiled(
        [
            (command, translated[CSRC / "cuda/linear.cu"]),
            (command, TESTS / "emulated_linear.cpp"),
            ([*command, "-O1"], TESTS / "emulated_simt.cpp"),
        ]
    )
    return linked([*cxx_compiler(), *FLAGS], [*objects, *core_objects(SANITIZED)])


def test_products():
    if not can_sanitize():
        pytest.skip("the C compiler has no address and undefined behaviour sanitizers")
    num_cases = 40
    code, output = run([build(), "1", num_cases], timeout=300)
    assert code == 0 and output.endswith(f"{num_cases} cases, 0 wrong\n"), output
