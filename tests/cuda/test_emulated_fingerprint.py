"""The kernel of csrc/cuda/rows/fingerprint.cu as C++, run without a GPU, lane by lane, against the C core."""

import pytest

from native import can_sanitize, run
from test_emulated_kernels import FLAGS, build

pytestmark = pytest.mark.slow


def test_sums_of_many_parts():
    if not can_sanitize():
        pytest.skip("the C compiler has no address and undefined behaviour sanitizers")
    code, output = run([build(FLAGS, "fingerprint", ["rows/fingerprint.cu"]), "1", 60], timeout=600)
    assert code == 0 and output == "60 cases, 0 wrong\n", output
