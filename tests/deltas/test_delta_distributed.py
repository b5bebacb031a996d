"""ibp.distributed.broadcast_delta over gloo, and over NCCL where there are two GPUs; and examples/sync_weights.py."""

import re

import pytest
import torch
import torch.distributed as dist

import ibp
from helpers import assert_same_bits, torchrun
from ibp.distributed import broadcast_delta
from native import ROOT
from ranks import Ranks
from test_delta import assert_same_tensors, checkpoints, optimizer_step


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    three = Ranks(3, tmp_path_factory.mktemp("ranks"))
    yield three
    three.end()


def versions():
    torch.manual_seed(5)
    return optimizer_step((300, 100), 1e-6)


def apply_one(rank, src):
    new, base = versions()
    delta = broadcast_delta(ibp.deltas.make(new, base) if rank == src else None, src)
    assert_same_bits(delta.apply_(base), new)
    return delta.stored_bytes


def apply_all(rank, src, device=None):
    torch.manual_seed(6)
    new, base = checkpoints()
    new["table"] = ibp.compress(torch.arange(3000), device="cpu")
    if device is not None:
        base = {name: tensor.to(device) for name, tensor in base.items()}
    delta = broadcast_delta(ibp.deltas.make(new, base) if rank == src else None, src, device=device)
    delta.apply_(base)
    new["table"] = new["table"].decompress()
    assert_same_tensors({name: tensor.cpu() for name, tensor in base.items()}, new)


def in_a_part(rank):
    part = dist.new_group([0, 2])
    if rank == 1:
        return
    new, base = versions()
    delta = broadcast_delta(ibp.deltas.make(new, base) if rank == 2 else None, 1, part)
    assert_same_bits(delta.apply_(base), new)


def refused(rank):
    new, base = versions()
    for given, src, kind, match in (
        (None, 0, TypeError, "delta is a NoneType"),
        (new, 1, TypeError, "delta is a Tensor"),
        (None, 3, ValueError, "src is 3; wanted 0 to 2"),
    ):
        with pytest.raises((kind, RuntimeError), match=match):
            broadcast_delta(given, src)
    with pytest.raises(ValueError, match="src is 0 on rank 0 of the group and 1 on rank 1"):
        broadcast_delta(ibp.deltas.make(new, base), min(rank, 1))


def test_broadcasts(ranks):
    for src in (0, 2):
        assert len(set(ranks(apply_one, src))) == 1
        ranks(apply_all, src)
    ranks(in_a_part)


def test_arguments_that_are_refused(ranks):
    ranks(refused)


def on_gpus(rank):
    for src in range(2):
        apply_all(rank, src, torch.device("cuda", rank))


def test_nccl(gpus, tmp_path):
    two = Ranks(2, tmp_path, backend="nccl")
    try:
        two(on_gpus)
    finally:
        two.end()


@pytest.mark.slow
def test_the_example():
    """As torchrun starts it."""
    size = torch.cuda.device_count() if torch.cuda.device_count() > 1 else 2
    said = torchrun(size, ROOT / "examples" / "sync_weights.py")
    share = re.search(rf"20 steps, {size - 1} workers with the trainer's bits: sent (\d\.\d)% of", said)
    assert share and 0.5 < float(share[1]) < 4
