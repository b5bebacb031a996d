"""The kernels of linear.cu and many.cu in csrc/cuda/linear as C++, run without a GPU, lane by lane, against products of
decoded rows.
"""

import pytest

from native import can_sanitize, run
from test_emulated_kernels import OPTIMISED_FLAGS, build

pytestmark = pytest.mark.slow


def test_products():
    if not can_sanitize():
        pytest.skip("the C compiler has no address and undefined behaviour sanitizers")
    num_cases = 40
    kernels = [f"linear/{name}.cu" for name in ("linear", "many", "tiles", "groups")]
    code, output = run([build(OPTIMISED_FLAGS, "linear", kernels), "1", num_cases], timeout=300)
    assert code == 0 and output.endswith(f"{num_cases} cases, 0 wrong\n"), output
