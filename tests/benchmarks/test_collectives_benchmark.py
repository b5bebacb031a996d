"""What benchmarks/collectives.py measures, without a GPU."""

import pytest
import torch
import torch.distributed.fsdp  # here: the processes that are forked need not import it

from benchmarks import collectives
from ranks import Ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("two"))
    yield ranks
    ranks.end()


def measured(rank):
    process = collectives.Rank(rank, torch.device("cpu"), collectives.DIRECT, small=True)
    for kind in collectives.KINDS:
        collectives.measure_gather(process, *kind, 1)
    collectives.measure_others(process, 2)
    collectives.measure_fsdp(process, *collectives.QUICK_FSDP_NETS[0])
    return process.found


@pytest.mark.slow
def test_every_arm_is_measured(two):
    found, _ = two(measured)
    kinds = [name for name, _, _ in collectives.KINDS]
    calls = [collectives.BROADCAST, collectives.SEND, collectives.ALL_TO_ALL, collectives.GATHER, collectives.SCATTER]
    arms = (*collectives.ARMS, collectives.AGAIN)
    assert {(row["call"], row["kind"], row["arm"]) for row in found} == {
        *((collectives.ALL_GATHER, kind, arm) for kind in kinds for arm in arms),
        *((call, collectives.WEIGHTS, arm) for call in calls for arm in arms if arm != collectives.FAST),
        *(
            (collectives.FSDP, collectives.WEIGHTS, arm)
            for arm in arms
            if arm not in (collectives.DEFAULT, collectives.FAST)
        ),
    }
    saved = {(row["call"], row["kind"]): row["savings"] for row in found if row["arm"] == collectives.DEFAULT}
    assert all(saved[call, collectives.WEIGHTS] > 0.3 for call in [collectives.ALL_GATHER, *calls])
    assert saved[collectives.ALL_GATHER, "random bytes"] == 0 and saved[collectives.ALL_GATHER, "half zeros"] > 0.55


def test_processes_inherit_what_nccl_is_told(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    monkeypatch.delenv("NCCL_SHM_DISABLE", raising=False)
    with collectives.environment(collectives.LINKS[collectives.SOCKETS]):
        assert collectives.os.environ["NCCL_P2P_DISABLE"] == collectives.os.environ["NCCL_SHM_DISABLE"] == "1"
    assert collectives.os.environ["NCCL_P2P_DISABLE"] == "0" and "NCCL_SHM_DISABLE" not in collectives.os.environ
