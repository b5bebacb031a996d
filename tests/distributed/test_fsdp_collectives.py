"""FSDP2 whose all-gathers travel coded: the losses and weights are those of torch's own, bit for bit."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # here: the processes that are forked need not import it
from torch.utils.checkpoint import checkpoint

import ibp
from helpers import assert_same_bits, torchrun
from ibp.distributed import Codec, _calls, _fsdp, _links, compress_all_gather
from native import ROOT
from ranks import Ranks, raised
from test_collectives import nccl  # noqa: F401, a fixture

STEPS, WIDTH = 4, 256


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    two = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield two
    two.end()


def make_net(device):
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(3)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 7)).to(device)


def nothing(when, step, net):
    """Leaves a net as it is."""


def sharded(device, dtype, **options):
    """A net. options: of compress_all_gather, where there are any."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    net, mesh = make_net(device), init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in net:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    if options:
        assert compress_all_gather(net, **options) == len(net) + 1
    return net


def trained(rank, device, dtype, change=nothing, **options):
    """(losses, weights) of some steps of a net. change: is called before and after forward passes."""
    net = sharded(device, dtype, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(rank), []
    for step in range(STEPS):
        change("before", step, net)
        x = torch.randn(16, WIDTH, generator=generator).to(device)
        loss = net(x).float().square().mean()
        change("after", step, net)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return torch.stack(losses), [weight.to_local().detach().cpu() for weight in net.parameters()]


def compare(rank, device, dtype, change=nothing, **options):
    """Trains with and without. Returns how many all-gathers were known to fit."""
    if device != "cpu":
        device = f"cuda:{rank}"
    losses, weights = trained(rank, device, dtype, change)
    known, coded = [], _calls.AllGather.coded

    def count_known(call, plan, is_async, status=None):
        known.extend([1] if status is not None else [])
        return coded(call, plan, is_async, status)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_calls.AllGather, "coded", count_known)
        coded_losses, coded_weights = trained(rank, device, dtype, change, **(options or {"level": "default"}))
    assert_same_bits(coded_losses, losses)
    for coded, weight in zip(coded_weights, weights, strict=True):
        assert_same_bits(coded, weight)
    return len(known)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_losses_are_equal(ranks, dtype):
    # The first step learns codecs; later each of the layers is gathered twice a step, but for one that has no room in
    # some step. What is left of the net has a whole row in some precisions.
    for count in ranks(compare, "cpu", dtype):
        assert (STEPS - 2) * 2 * 3 <= count <= (STEPS - 1) * 2 * 4


def ask_for_work(when, step, net):
    """All-gathers are asked for with async_op."""
    if (when, step) == ("before", 0):
        net._set_unshard_async_op(True)


def grow(when, step, net):
    """Weights that are unlike those that codecs were learned from, written by torch's operations and behind them."""
    if (when, step) == ("before", 2):
        for layer in net[:3]:
            layer[0].weight.data.to_local().mul_(1e-20)
        with torch.no_grad():
            net[3].weight.mul_(1e-20)


def freeze(when, step, net):
    """All but the last layer, and later a change of what is frozen, both by and past torch's version counters."""
    if when == "before":
        net[:3].requires_grad_(False)
        if step == 2:
            with torch.no_grad():
                net[0][0].weight.mul_(2)
                net[1][0].weight.to_local().mul_(2)


def synchronize():
    """FSDP's streams do not wait for what is written within a step."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write_on_one_rank(when, step, net):
    """After the first pass has seen what has room, in ways that torch counts and not: what changes has room."""
    if (when, step, dist.get_rank()) == ("after", 2, 1):
        with torch.no_grad():
            net[0][0].weight.to_local().mul_(1.01)
            net[1][0].weight.data.to_local().mul_(1.01)
        synchronize()


def gather_outside(when, step, net):
    """All-gathers outside of passes are waited for: what they find is unlike what was learned."""
    if (when, step) == ("before", 2):
        net[1][0].weight.data.to_local().mul_(1e-20)
        net[1].unshard()
        net[1].reshard()


def recompute(when, step, net):
    """Backward passes compute the layers' activations again."""
    if (when, step) == ("before", 0):
        for layer in net[:3]:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def no_room(rank):
    """A codec that is given is not learned anew."""
    generator = torch.Generator().manual_seed(0)
    learned = Codec.learn(torch.randn(1 << 16, generator=generator) * 0.05)
    return compare(rank, "cpu", None, grow, codec=Codec(learned.codebook, learned.slot_bytes, 0.0))


@pytest.mark.slow
def test_weights_that_change(ranks):
    for change in (ask_for_work, grow, freeze, write_on_one_rank, gather_outside, recompute):
        counts = ranks(compare, "cpu", None, change)
        assert counts[0] == counts[1] > 0
    first, second = ranks(no_room)
    assert first == second < (STEPS - 1) * 2 * 4


def write_between(net):
    """After the forward pass has seen what has room: what backward gathers has none."""
    with torch.no_grad():
        net[0][0].weight.mul_(1e-20)  # counted by torch
    net[1][0].weight.data._local_tensor.data.normal_().mul_(1e30)
    synchronize()


def write_within(net):
    """The same between the begin of the forward pass and the all-gather."""
    net[1].register_forward_pre_hook(lambda *_: write_between(net), prepend=True)


def lose(rank, device, where):
    """What each step of a net raises, whose weights are written in the wrong place in the third one; and whether later
    steps give the loss of a net that was never compressed."""
    device = f"cuda:{rank}" if device == "cuda" else device
    _links._states.clear()  # codecs of other tests
    net, plain = (sharded(device, None, **options) for options in ({"level": "fast"}, {}))
    x, found = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(rank)).to(device), []

    def step(net, k):
        if (k, where) == (2, "forward"):
            write_within(net)
        with torch.set_grad_enabled(where != "no grad"):
            if (k, where) == (2, "no grad"):
                write_within(net)
            loss = net(x).float().square().mean()
        if (k, where) == (2, "backward"):
            write_between(net)
        if where != "no grad":
            loss.backward()
        return float(loss.detach())

    for k in range(3):
        found.append(raised(lambda: step(net, k)))
    for hook in list(net[1]._forward_pre_hooks)[:1] if where != "backward" else ():
        del net[1]._forward_pre_hooks[hook]
    for weight, other in zip(plain.parameters(), net.parameters(), strict=True):
        weight.data._local_tensor.copy_(other.data._local_tensor)
    with torch.no_grad():
        assert_same_bits(net(x).cpu(), plain(x).cpu())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward", "no grad"])
def test_rows_that_are_lost_raise_on_all_ranks(ranks, where):
    for first, second, (name, message) in ranks(lose, "cpu", where):
        assert first is None and second is None
        assert name == "RuntimeError" and "write them before the forward pass" in message and "'1'" in message


def interrupt_and_lose(rank):
    """What the two steps of a net without gradients raise that follow a step which is interrupted: the weights of the
    second of them are written in the wrong place."""
    _links._states.clear()  # codecs of other tests
    net, x = sharded("cpu", None, level="fast"), torch.randn(16, WIDTH)

    def interrupt(*_):
        raise KeyboardInterrupt

    def step():
        with torch.no_grad():
            net(x)

    for _ in range(2):
        step()
    hook = net[2].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        step()
    hook.remove()
    found = [raised(step)]
    write_within(net)
    return [*found, raised(step)]


@pytest.mark.slow
def test_rows_that_are_lost_raise_after_an_interrupt(ranks):
    for first, (name, message) in ranks(interrupt_and_lose):
        assert first is None
        assert name == "RuntimeError" and "write them before the forward pass" in message and "'1'" in message


def no_backward():
    return -1


def compare_with_another_torch(rank, name, value):
    """Where torch does not have something that is looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp, name, value)
        return compare(rank, "cpu", None)


@pytest.mark.slow
def test_a_torch_with_other_names(ranks):
    for name in ("_OF_GROUPS", "_OF_PARAMETERS"):
        assert ranks(compare_with_another_torch, name, ("no_such_name",)) == [0, 0]
    assert 0 < min(ranks(compare_with_another_torch, "_current_backward", no_backward)) <= (STEPS - 1) * 4


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


def test_modules_inside_are_compressed_too(tmp_path):
    """Unless that is not wanted."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net = sharded("cpu", None)
        assert compress_all_gather(net) == compress_all_gather(net, recurse=True) == len(net) + 1
        assert compress_all_gather(net, recurse=False) == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_the_example():
    """examples/fsdp_compressed.py, with gloo where there are not two GPUs."""
    world = min(2, torch.cuda.device_count()) if ibp.cuda_is_available() else 2
    assert "the same bits: True" in torchrun(world, ROOT / "examples" / "fsdp_compressed.py")


# ---- GPUs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_losses_are_equal_with_nccl(nccl, dtype):  # noqa: F811
    assert min(nccl(compare, "cuda", dtype)) > 0


def compare_fast(rank, device, change):
    return compare(rank, device, None, change, level="fast")


@pytest.mark.parametrize("change", [ask_for_work, grow, write_on_one_rank], ids=lambda change: change.__name__)
def test_weights_that_change_with_nccl(nccl, change):  # noqa: F811
    first, second = nccl(compare_fast, "cuda", change)
    assert first == second > 0


@pytest.mark.parametrize("where", ["forward", "backward", "no grad"])
def test_rows_that_are_lost_raise_with_nccl(nccl, where):  # noqa: F811
    for first, second, (name, message) in nccl(lose, "cuda", where):
        assert first is None and second is None
        assert name == "RuntimeError" and "write them before the forward pass" in message
