import os

import pytest
import torch

import ibp


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes many GiB of memory or more than half a minute; leave out with -m 'not slow'")


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def cannot_run():
    """Call with a reason why a GPU test cannot run here: a skip, or with IBP_REQUIRE_CUDA=1 a failure."""
    return pytest.fail if os.environ.get("IBP_REQUIRE_CUDA") == "1" else pytest.skip


@pytest.fixture(scope="session")
def cuda(cannot_run):
    """The first CUDA device."""
    if not torch.cuda.is_available():
        cannot_run("torch sees no CUDA device")
    if not ibp.cuda_is_available():
        cannot_run("this build of ibp has no CUDA kernels")
    return torch.device("cuda", 0)
