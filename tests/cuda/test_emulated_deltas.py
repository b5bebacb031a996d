"""Kernels of csrc/cuda/delta as C++, run without a GPU, lane by lane, against the C core."""

import pytest

from native import can_sanitize, run
from test_emulated_kernels import FLAGS, build

pytestmark = pytest.mark.slow


def test_deltas():
    if not can_sanitize():
        pytest.skip("the C compiler has no address and undefined behaviour sanitizers")
    code, output = run([build(FLAGS, "delta", ["delta/*.cu"]), "1", 24], timeout=600)
    assert code == 0 and output == "24 cases, 0 wrong\n", output
