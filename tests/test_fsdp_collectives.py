"""FSDP2 whose all-gathers travel coded: the losses and weights are those of torch's own, bit for bit."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # here: the processes that are forked need not import it

import ibp
from helpers import assert_same_bits
from ibp._collectives import planning
from ibp.distributed import compress_all_gather
from native import ROOT
from test_collectives import nccl  # noqa: F401, a fixture
from test_distributed import Ranks, raised
from test_several_gpus import gpus  # noqa: F401, a fixture

STEPS, WIDTH = 3, 96


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    two = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield two
    two.end()


def make_net(device):
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(3)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 7)).to(device)


def trained(rank, device, is_coded, dtype, level):
    """(losses, weights) of some steps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    net, mesh = make_net(device), init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in net:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    if is_coded:
        assert compress_all_gather(net, level=level) == len(net) + 1
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(rank), []
    for _ in range(STEPS):
        x = torch.randn(16, WIDTH, generator=generator).to(device)
        loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return torch.stack(losses), [weight.to_local().detach().cpu() for weight in net.parameters()]


def compare(rank, device, dtype, level="default"):
    if device != "cpu":
        device = f"cuda:{rank}"
    losses, weights = trained(rank, device, False, dtype, level)
    coded_losses, coded_weights = trained(rank, device, True, dtype, level)
    assert_same_bits(coded_losses, losses)
    for coded, weight in zip(coded_weights, weights, strict=True):
        assert_same_bits(coded, weight)
    return sum(plan.codec is not None for state in planning._states.values() for plan in state.plans.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_losses_are_equal(ranks, dtype):
    assert min(ranks(compare, "cpu", dtype)) > 0  # some all-gathers were coded


def wrong(rank):
    return [
        raised(lambda: compress_all_gather(torch.nn.Linear(3, 3))),
        raised(lambda: compress_all_gather(torch.nn.Linear(3, 3), level="best")),
    ]


@pytest.mark.slow
def test_what_is_refused(ranks):
    for results in ranks(wrong):
        assert [name for name, _ in results] == ["ValueError", "ValueError"]
        assert "fully_shard" in results[0][1]


@pytest.mark.slow
def test_the_example():
    """examples/fsdp_compressed.py, with gloo where there are not two GPUs."""
    world = min(2, torch.cuda.device_count()) if ibp.cuda_is_available() else 2
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    command = [*launcher, str(ROOT / "examples" / "fsdp_compressed.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "the same bits: True" in done.stdout


# ---- GPUs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_losses_are_equal_with_nccl(nccl, dtype):  # noqa: F811
    assert min(nccl(compare, "cuda", dtype)) > 0
