"""Adam and AdamW with coded states: weights have the bits that torch's fused kernel gives them."""

import copy
import dataclasses
import io
import itertools
import pickle
import unittest.mock
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ibp
from helpers import NoMemory, assert_same_bits, in_threads
from ibp._machine import calibration, pool
from ibp._schemes import surveyed
from ibp.optim import _chunks, _families, _learning, _replay, _reserve, _states, adamw
from ibp.optim._learning import ROW_BYTES

SHAPES = ((300, 70), (70,), (), (0, 5), (3, 33, 5), (1, 8192))
MODES = {"AdamW": (torch.optim.AdamW, ibp.optim.AdamW), "Adam": (torch.optim.Adam, ibp.optim.Adam)}


def parameters(dtype=torch.float32, device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def give_gradients(params, number, scale=1.0, copies=()):
    """Gradients of step `number`, the same for all copies of the parameters; every third step one parameter has
    none."""
    generator = torch.Generator().manual_seed(100 + number)
    for i, group in enumerate(zip(params, *copies)):
        grad = torch.randn(params[i].shape, generator=generator) * scale * 1.1**number
        for param in group:
            is_left_out = number % 3 == 2 and i == 1
            param.grad = None if is_left_out else grad.to(param.device, param.dtype, copy=True)


def check_same(torchs, ours):
    for wanted, found in zip(torchs, ours):
        assert_same_bits(found.detach(), wanted.detach())


def check_states(torchs, ours):
    """The same states, as tensors."""
    wanted, found = torchs.state_dict()["state"], ours.state_dict()["state"]
    assert wanted.keys() == found.keys()
    for number in wanted:
        assert wanted[number].keys() == found[number].keys()
        for name, value in wanted[number].items():
            assert_same_bits(found[number][name], value)


def train(torchs, ours, optimizers, steps, scale=1.0):
    for number in steps:
        give_gradients(torchs, number, scale, [ours])
        for optimizer in optimizers:
            optimizer.step()
        check_same(torchs, ours)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("mode, dtype", [*(("AdamW", dtype) for dtype in DTYPES), ("Adam", torch.float32)], ids=str)
def test_same_bits(mode, dtype):
    """Of all dtypes, over chunks that cut parameters anywhere."""
    torchs, ours = parameters(dtype), parameters(dtype)
    of_torch, of_ours = MODES[mode]
    options = {"lr": 0.01, "weight_decay": 0.1}
    optimizers = of_torch(torchs, **options, fused=True), of_ours(ours, **options, chunk_bytes=40_000)
    train(torchs, ours, optimizers, range(22))
    check_states(*optimizers)
    assert len(optimizers[1]._chunks[0]) > 2
    assert any(len(chunk.pieces) > 1 for chunk in optimizers[1]._chunks[0])


@pytest.mark.parametrize(
    "options",
    [
        {"maximize": True},
        {"lr": torch.tensor(0.02)},
        {"betas": (torch.tensor(0.8), torch.tensor(0.9))},
        {"eps": 1e-3, "foreach": False},
        {"level": "fast"},
    ],
    ids=str,
)
def test_options(options):
    torchs, ours = parameters(), parameters()
    known = {name: value for name, value in options.items() if name not in ("level", "foreach")}
    optimizers = torch.optim.AdamW(torchs, **known, fused=True), ibp.optim.AdamW(ours, **options)
    train(torchs, ours, optimizers, range(6))
    check_states(*optimizers)


def test_memory():
    """States of normal gradients shrink; those of rows without gradients take almost nothing."""
    (weight,) = ours = parameters(shapes=[(1 << 12, 512)])
    optimizer = ibp.optim.AdamW(ours)
    assert optimizer.stats() == dict.fromkeys(("exp_avg", "exp_avg_sq"), ibp.optim.Usage(0, 0, 0))
    for number in range(3):
        give_gradients(ours, number)
        optimizer.step()
    for usage in optimizer.stats().values():
        assert usage.original_bytes == 4 * weight.numel() and 0.12 < usage.savings < 0.3
        assert usage.host_bytes + usage.device_bytes < 1.01 * usage.original_bytes
    optimizer = ibp.optim.AdamW(ours)
    for _ in range(2):
        weight.grad = torch.zeros_like(weight)
        weight.grad[::1000] = 1.5
        optimizer.step()
    for usage in optimizer.stats().values():
        assert usage.savings > 0.95


def test_no_bit_is_lost():
    """Gradients that change all at once, and states that do not shrink: everything fits, and is judged later."""
    torchs, ours = (parameters(shapes=[(64, 512), (17,)]) for _ in range(2))
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours)
    train(torchs, ours, optimizers, range(2))
    (chunk,) = optimizers[1]._chunks[0]
    old = [state.place for state in chunk.states]
    for param, same in zip(torchs, ours):
        bits = torch.randint(-(2**31), 2**31, param.shape, dtype=torch.int32)
        param.grad = torch.where(bits.view(torch.float32).isfinite(), bits, 0).view(torch.float32)
        same.grad = param.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    check_states(*optimizers)
    assert [state.place for state in chunk.states] == old and all(place.counts().lost == 0 for place in old)
    train(torchs, ours, optimizers, range(3, 9))
    check_states(*optimizers)
    assert all(state.place is not place for state, place in zip(chunk.states, old))


def test_states_that_do_not_shrink(monkeypatch):
    monkeypatch.setattr(_states, "_LEAST_SAVED", 1.0)
    torchs, ours = parameters(), parameters()
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours)
    train(torchs, ours, optimizers, range(5))
    check_states(*optimizers)
    raw = sum(param.nbytes for param in ours)
    for usage in optimizers[1].stats().values():
        assert usage.original_bytes == raw and usage.device_bytes % ROW_BYTES == 0
        assert 0 <= usage.device_bytes - raw < ROW_BYTES + 64 * len(SHAPES)


def test_many_small_parameters_share_rows():
    """Also where chunks cut them."""
    shapes = [(size,) for size in (1, 15, 16, 17, 600, 3, 511, 512, 513, 2, 2600)]
    for chunk_bytes in (None, 8192, 18_000):
        torchs, ours = parameters(shapes=shapes), parameters(shapes=shapes)
        optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours, chunk_bytes=chunk_bytes)
        train(torchs, ours, optimizers, range(4))
        check_states(*optimizers)
        chunks = optimizers[1]._chunks[0]
        held = sum(piece.stop - piece.start for chunk in chunks for piece in chunk.pieces)
        assert held == sum(param.numel() for param in ours)
    assert [(chunk.num_elements, len(chunk.pieces)) for chunk in optimizers[1]._chunks[0]][0] == (2048, 8)


def learned(rows, *others):
    return _learning.learn(rows, "default", *others)


def grouped(parts, families, learn=learned):
    """The groups of rows, each of whose parts is a section."""
    ends = list(itertools.accumulate(len(part) for part in parts))
    keys = (object() for _ in parts)
    sections = [_families.Section(*section) for section in zip([0, *ends], ends, keys)]
    return _families.grouped(torch.cat(parts), sections, families, learn)


def stored(rows, codebook):
    """The share of their bytes that rows take by a codebook."""
    (group,) = grouped([rows], [], lambda _: codebook)
    return group.survey.stored / rows.nbytes


def test_slots_that_hold_whole_rows(monkeypatch):
    """As pinned memory has of random bits."""
    monkeypatch.setattr(_states, "_LEAST_SAVED", -1.0)
    coding = _states.StateCoding("default", None, False, {})
    state = _states.CodedState(8, 8 * ROW_BYTES, torch.device("cpu"), coding)
    for number in range(5):
        data = torch.randint(0, 256, (8 * ROW_BYTES,), dtype=torch.uint8)
        if state.is_new or number == 3:
            rows = data.view(torch.float32).view(8, -1)
            state.fit(rows, *grouped([rows], []))
        _states.free_overflow([state])
        state.write(data)
        state.stores += 1
        out = torch.empty_like(data)
        state.load(out)
        assert_same_bits(out, data)
        assert state.place.slot_bytes == ROW_BYTES and not state.place.overflow.numel(), number


def test_memory_that_cannot_be_pinned(monkeypatch):
    """States stay raw, or in the memory that they have."""

    def refuse(*_):
        raise _states.PinningError("no")

    torchs, ours = parameters(), parameters()
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours)
    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="stay raw on cpu"):
        patch.setattr(_states.CodedState, "_new_place", refuse)
        train(torchs, ours, optimizers, range(2))
    train(torchs, ours, optimizers, range(2, 5))
    with monkeypatch.context() as patch:
        patch.setattr(_states.CodedState, "_new_place", refuse)
        train(torchs, ours, optimizers, range(5, 18))
    check_states(*optimizers)
    assert all(usage.savings > 0 for usage in optimizers[1].stats().values())


def step_without_memory(optimizer, params, number, stays):
    """Makes a step in which an allocation fails; if it raises, nothing has changed. How many allocations there were,
    and whether it raised."""
    weights = [param.detach().clone() for param in params]
    states = copy.deepcopy(optimizer.state_dict()["state"])
    mode = NoMemory(number, stays)
    try:
        with mode:
            optimizer.step()
        return mode.count, False
    except torch.OutOfMemoryError:
        pass
    for param, weight in zip(params, weights):
        assert_same_bits(param.detach(), weight)
    found = optimizer.state_dict()["state"]
    assert found.keys() == states.keys()
    for key, values in states.items():
        for name, value in values.items():
            assert_same_bits(found[key][name], value)
    return mode.count, True


@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_the_first_step_has_no_memory(request, place, stays):
    """Nothing has changed, wherever it fails, and the same optimizer goes on."""
    device = request.getfixturevalue("cuda") if place == "cuda" else place
    shapes = [(30, 512), (5,), (0,)]
    torchs, ours = parameters(device=device, shapes=shapes), parameters(device=device, shapes=shapes)
    ours[0].data = ours[0].detach().t().contiguous().t()  # whose gradient is laid out otherwise
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours, chunk_bytes=90_000)
    give_gradients(torchs, 0, copies=[ours])
    number, has_failed = 0, True
    while has_failed:
        number += 1 + number // 20
        _, has_failed = step_without_memory(optimizers[1], ours, number, stays)
    # Where it is missing once, what cannot be pinned comes out of other memory, and the step goes on.
    assert number > (20 if place == "cpu" or stays else 10)
    optimizers[0].step()
    check_same(torchs, ours)
    train(torchs, ours, optimizers, range(1, 6))
    check_states(*optimizers)


@pytest.mark.parametrize("stays", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["once", "from then on"])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_later_steps_have_no_memory(request, monkeypatch, place, stays):
    """They are made all the same: codebooks for which there is no memory are learned later, and counters are looked at
    later."""
    device = request.getfixturevalue("cuda") if place == "cuda" else place
    for ratio in ("_REFIT_RATIO", "_FIRST_REFIT_RATIO", "_LEAST_MOVED"):
        monkeypatch.setattr(_states, ratio, 1.0)
    monkeypatch.setattr(_states, "_WATCHED_STEPS", 1 << 30)
    sizes = itertools.cycle([3456, 3392, 3520])
    monkeypatch.setattr(_states._layout, "slots_for", lambda *_: (next(sizes), 0.0))
    torchs, ours = (parameters(device=device, shapes=[(30, 512), (5,)]) for _ in "ab")
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours, chunk_bytes=90_000)
    train(torchs, ours, optimizers, range(2))
    count = number = 0
    while count >= number:
        number += 1
        give_gradients(torchs, 2 + number, 1.1**-number, copies=[ours])
        optimizers[0].step()
        count, has_failed = step_without_memory(optimizers[1], ours, number, stays)
        assert not has_failed
        check_same(torchs, ours)
    check_states(*optimizers)
    assert number > 20


@pytest.mark.parametrize("stays", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["once", "from then on"])
def test_states_are_loaded_without_memory(stays):
    """They are there all the same, and coded later."""
    torchs = parameters(shapes=[(30, 512), (5,)])
    of_torch = torch.optim.AdamW(torchs, fused=True)
    train(torchs, torchs, [of_torch], range(3))
    saved, number, has_failed = of_torch.state_dict(), 0, True
    while has_failed:
        number += 1 + number // 8
        ours = [torch.nn.Parameter(param.detach().clone()) for param in torchs]
        optimizer = ibp.optim.AdamW([{"params": ours[:1]}, {"params": ours[1:]}], chunk_bytes=90_000)
        given = {**saved, "param_groups": [{**saved["param_groups"][0], "params": [i]} for i in range(2)]}
        try:
            with NoMemory(number, stays):
                optimizer.load_state_dict(given)
            has_failed = False
        except torch.OutOfMemoryError:
            has_failed = True
        if number % 2:
            give_gradients(ours, 3)
            optimizer.step()
            steps = [int(values["step"]) for values in optimizer.state_dict()["state"].values()]
            assert steps == [4, 3] or (has_failed and steps == [1, 1])
        elif optimizer.state_dict()["state"] or not has_failed:
            check_states(of_torch, optimizer)
    assert number > 20


@pytest.fixture
def mesh():
    """One process that is a mesh by itself."""
    tensors = pytest.importorskip("torch.distributed.tensor")
    if not torch.distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield tensors, torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def test_sharded_parameters(mesh):
    """DTensors, as FSDP2 makes them: the same bits, states that torch loads and that come back. In a thread of its own:
    what torch keeps of meshes for a thread would end the group a second time in a process that is forked later."""
    in_threads(lambda: check_sharded_parameters(*mesh))


def check_sharded_parameters(tensors, cpu):
    plain = parameters(shapes=[(300, 70), (70,)])
    torchs, ours, others = (
        [torch.nn.Parameter(tensors.distribute_tensor(p.detach().clone(), cpu, [tensors.Shard(0)])) for p in plain]
        for _ in "abc"
    )
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours, chunk_bytes=40_000)
    for number in range(4):
        give_gradients(plain, number)
        for params in (torchs, ours):
            for param, of in zip(params, plain):
                param.grad = None if of.grad is None else tensors.distribute_tensor(of.grad, cpu, [tensors.Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
        check_same([p.to_local() for p in torchs], [p.to_local() for p in ours])
    loaded = ibp.optim.AdamW(others)
    loaded.load_state_dict(optimizers[0].state_dict())
    for optimizer in (optimizers[1], loaded):
        for number, wanted in optimizers[0].state_dict()["state"].items():
            found = optimizer.state_dict()["state"][number]
            assert isinstance(found["exp_avg"], tensors.DTensor)
            for name in ("exp_avg", "exp_avg_sq"):
                assert_same_bits(found[name].to_local(), wanted[name].to_local())
    plain_state = ibp.optim.AdamW(plain)
    with pytest.raises(ValueError, match="spread as the parameter"):
        plain_state.load_state_dict(optimizers[1].state_dict())


def test_large_parameters_have_codebooks_of_their_own(monkeypatch):
    """Of parameters whose gradients differ in scale both save; small ones share a run, behind the large ones."""
    monkeypatch.setattr(_chunks, "_LARGE_BYTES", 60_000)
    shapes = [(100,), (40, 1024), (7,), (30, 1024), (20, 1024), (100, 100)]
    torchs, ours = parameters(shapes=shapes), parameters(shapes=shapes)
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours, chunk_bytes=450_000)
    for number in range(5):
        give_gradients(torchs, number, 1.0, [ours])
        for i in (3, 4):
            torchs[i].grad *= 10.0**i
            ours[i].grad *= 10.0**i
        for optimizer in optimizers:
            optimizer.step()
        check_same(torchs, ours)
    check_states(*optimizers)
    chunks = optimizers[1]._chunks[0]
    found = [[piece.param.shape for piece in chunk.pieces] for chunk in chunks]
    assert found == [[(40, 1024), (30, 1024)], [(30, 1024), (20, 1024), (100,), (7,), (100, 100)]]
    assert [[run.which for run in chunk.runs] for chunk in chunks] == [[0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    for chunk in chunks:
        rows = [(run.which, run.start, run.stop) for run in chunk.runs]
        assert all(start == (stop if i == j else 0) for (i, _, stop), (j, start, _) in zip(rows, rows[1:]))
    slots = [run.state.place.slot_bytes for chunk in chunks for run in (*chunk.runs[:2], *chunk.runs[-3:-1])]
    assert max(slots) <= 3456
    for index in range(2):  # parts of one parameter
        parts = [[run for run in chunk.runs if run.which == index] for chunk in chunks]
        assert parts[0][1].state.learner.found is parts[1][0].state.learner.found


@pytest.mark.parametrize("most_sampled", [16, 1024])
def test_parameters_alike_share_a_run(monkeypatch, most_sampled):
    """Whatever their number, until a codebook is learned for values that differ, by some or all of their rows."""
    monkeypatch.setattr(_chunks, "_LARGE_BYTES", 60_000)
    monkeypatch.setattr(_chunks, "_SAMPLED_ROWS", most_sampled)
    monkeypatch.setattr(_chunks, "_LEAST_SAMPLED", min(16, most_sampled))
    shapes = [(64, 1024)] * 3
    torchs, ours = parameters(shapes=shapes), parameters(shapes=shapes)
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours)
    train(torchs, ours, optimizers, range(2))
    (chunk,) = optimizers[1]._chunks[0]
    assert [run.which for run in chunk.runs] == [0, 1] and len(chunk._sections) == 3
    for number in range(2, 18):
        give_gradients(torchs, number, 1.0, [ours])
        for params in (torchs, ours):
            if params[1].grad is not None:
                params[1].grad *= 1000
        for optimizer in optimizers:
            optimizer.step()
        check_same(torchs, ours)
    check_states(*optimizers)
    for index in range(2):
        runs = [run for run in chunk.runs if run.which == index]
        assert [run.start >> 16 for run in runs] == [0, 1, 2]
        assert runs[0].state.learner.found is runs[2].state.learner.found is not runs[1].state.learner.found
        assert sum(run.state.num_bytes for run in runs) == sum(param.nbytes for param in ours)
    for usage in optimizers[1].stats().values():
        assert usage.savings > 0.14


def test_rows_that_are_alike():
    """By what they take, both ways; fewer bytes will do for another part of the same values."""
    v = states_of_a_step(torch.float32)[1]
    families, calls = [], []

    def counted(rows):
        calls.append(len(rows))
        return learned(rows)

    quarter = len(v) // 4
    first, *others = grouped([*v.split(quarter)], families, counted)
    assert not others and (first.start, first.stop) == (0, len(v)) and calls == [quarter] and len(families) == 1
    assert grouped([v], families, counted)[0].codebook is first.codebook and len(calls) == 1
    sparse = torch.where(torch.arange(v.numel()).view(v.shape) % 50 == 0, v, 0)
    parts = [v[:9], sparse, 1e5 * v, v[9:20], v[20:]]
    groups = grouped(parts, families, counted)
    codebooks = [group.codebook for group in groups]
    assert [group.stop for group in groups] == list(itertools.accumulate([9, len(v), len(v), len(v) - 9]))
    assert len(calls) == len(families) == 3 and codebooks[0] is codebooks[3] is first.codebook
    assert codebooks[1] is families[1].codebook and codebooks[2] is families[2].codebook
    assert sum(group.survey.stored for group in groups) < 0.8 * sum(part.nbytes for part in parts)
    (family,) = families[:1]
    section, other = (_families.Section(0, 1, key) for key in ("key", "other"))
    family.keys.add("key")
    limits = [family.mean_bytes + more for more in (33, 31, -31, -33)]
    assert [family.suits(section, mean_bytes) for mean_bytes in limits] == [False, True, True, True]
    assert [family.suits(other, mean_bytes) for mean_bytes in limits] == [False, True, True, False]
    grouped([sparse.flip(0)], [family], counted)  # learns, since it takes less by a codebook of its own
    assert len(calls) == 4


def check_old_slots(monkeypatch, are_kept):
    """Trains over two codebooks, and says whether nothing keeps the first places when all is coded by the second."""
    ours = parameters(shapes=[(64, 512)])
    optimizer = ibp.optim.AdamW(ours)
    monkeypatch.setattr(_learning, "_CLEARLY_BETTER", 0.0)
    for number in range(9):
        give_gradients(ours, number)
        optimizer.step()
        states = optimizer._chunks[0][0].states
        if number == 6:
            old = [weakref.ref(state.place) for state in states]
            slots = [state.place.slots.data_ptr() for state in states]
            codebooks = [state.place.codebook for state in states]
    assert [state.learner.learned_at for state in states] == [9, 10]
    assert [place() is not None for place in old] == [are_kept, are_kept]
    assert all(state.place.codebook is not one for state, one in zip(states, codebooks))
    assert not are_kept or slots == [state.place.slots.data_ptr() for state in states]


def test_slots_are_kept_while_codebooks_are_learned(monkeypatch):
    """Where their size suits the new codebook."""
    monkeypatch.setattr(_states._layout, "slots_for", lambda *_: (3456, 0.0))
    check_old_slots(monkeypatch, True)


def test_old_slots_go_while_codebooks_are_learned(monkeypatch):
    """Nothing keeps those of one codebook when there are others for the next."""
    sizes = itertools.cycle([3456, 3456, 3392, 3392])
    monkeypatch.setattr(_states._layout, "slots_for", lambda *_: (next(sizes), 0.0))
    check_old_slots(monkeypatch, False)


def test_codebooks_and_rows_stay_where_others_save_no_more(monkeypatch):
    """A later codebook that is not clearly better is left out, and rows whose slots suit them are not coded anew."""
    ours = parameters(shapes=[(64, 512)])
    optimizer = ibp.optim.AdamW(ours, betas=(0.0, 0.999))  # exp_avg is the gradient: its values stay as large
    for number in range(9):
        versions = [state.version for chunk in optimizer._chunks[0] for state in chunk.states]
        ours[0].grad = torch.randn(ours[0].shape, generator=torch.Generator().manual_seed(number))
        optimizer.step()
        states = optimizer._chunks[0][0].states
        if number == 0:
            codebooks = [state.place.codebook for state in states]
    assert [state.learner.learned_at for state in states] == [9, 10]
    assert states[0].place.codebook is codebooks[0] and states[0].version == versions[0]
    assert states[1].version == versions[1] + 1 and all(usage.savings > 0.12 for usage in optimizer.stats().values())
    monkeypatch.setattr(_states, "_LEAST_MOVED", 0)
    slot_bytes = states[0].place.slot_bytes
    survey = surveyed(torch.randn(64 * 512).view(torch.uint8), codebooks[0])
    group = _families.StateGroup(0, 16, codebooks[0], survey)
    assert not states[0]._serves(states[0].place, group, slot_bytes)
    assert not states[0]._serves(states[0].place, group._replace(codebook=codebooks[1]), slot_bytes + 1)


def test_few_codebooks_are_learned_in_a_step(monkeypatch):
    """One for all chunks of a parameter, in the first step one a parameter and state, later those of a few; whatever is
    postponed comes in one of the next steps."""
    monkeypatch.setattr(_chunks, "_LARGE_BYTES", 60_000)
    monkeypatch.setattr(_states, "_LEARNED_SHARE", 4)
    calls, learn = [], _chunks.learn

    def counted(rows, *others):
        calls.append(len(rows))
        return learn(rows, *others)

    monkeypatch.setattr(_chunks, "learn", counted)
    shapes = [(60, 1024)] * 10
    torchs, ours = parameters(shapes=shapes), parameters(shapes=shapes)
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours, chunk_bytes=200_000)
    counts = []
    for number in range(16):
        calls.clear()
        give_gradients(torchs, number)
        for i, (param, same) in enumerate(zip(torchs, ours)):
            if param.grad is not None:
                param.grad *= 10.0 ** (i - 6)
            same.grad = None if param.grad is None else param.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        counts.append(len(calls))
        states = [state for chunk in optimizers[1]._chunks[0] for state in chunk.states]
        if number == 0:
            codebooks = {id(state.learner.found) for state in states}
    check_same(torchs, ours)
    check_states(*optimizers)
    assert len(states) > 20 == len(codebooks) == counts[0] and 0 < max(counts[1:]) <= 5
    assert min(state.learner.learned_at for state in states) > 1


def train_in_parts(monkeypatch, device, memory="device"):
    """Trains with parameters cut into chunks; how many blocks of pinned memory each step took."""
    monkeypatch.setattr(_chunks, "_LARGE_BYTES", 60_000)
    taken, empty = [], pool.memory.empty
    is_cuda = torch.device(device).type == "cuda"  # where memory can be pinned

    def counted(num_bytes, where, pin):
        taken.append(num_bytes)
        return empty(num_bytes, where, pin and is_cuda)

    monkeypatch.setattr(pool.memory, "empty", lambda *args: counted(*args) if args[2] else empty(*args))
    if not is_cuda:
        monkeypatch.setattr(_states, "CodedRows", lambda *args, memory, **options: ibp.CodedRows(*args, **options))
    shapes = [(200, 512)] * 4 + [(100, 30)] * 3
    torchs, ours = (parameters(device=device, shapes=shapes) for _ in "ab")
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours, chunk_bytes=300_000, memory=memory)
    coding = _states.StateCoding("default", _reserve.Reserve(), memory == "pinned", {})
    optimizers[1]._codings[ours[0].device] = coding
    counts = []
    for number in range(48):
        for i, (param, same) in enumerate(zip(torchs, ours)):
            grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * number + i))
            param.grad, same.grad = grad.to(device), grad.to(device)
        for optimizer in optimizers:
            optimizer.step()
        check_same(torchs, ours)
        counts.append(len(taken))
        taken.clear()
    check_states(*optimizers)
    states = [state for chunk in optimizers[1]._chunks[0] for state in chunk.states]
    assert all(state.learner.learned_at > 1 and state.place is not None for state in states)
    return counts


@pytest.mark.parametrize("memory", ["device", "pinned"])
def test_later_steps_pin_no_memory(monkeypatch, memory):
    first, *others = train_in_parts(monkeypatch, "cpu", memory)
    assert first <= 2 and not any(others)


def test_chunks_learn_while_the_device_works(monkeypatch):
    """In a step after which it is idle, one of them; codebooks are shared with those of the next steps."""
    learned, learn, refits = [], _chunks.learn, []
    monkeypatch.setattr(_chunks, "learn", lambda *args: learned.append(args) or learn(*args))
    monkeypatch.setattr(adamw, "_asks_for_end", lambda device: lambda: refits.append(device) or True)
    train_in_parts(monkeypatch, "cpu")
    first = sum(before is None for _, _, before, _ in learned)
    assert len(refits) > 20 > 2 * (len(learned) - first)


@pytest.mark.parametrize("memory", ["device", "pinned"])
def test_parts_for_which_there_is_no_memory(monkeypatch, memory):
    """Values that were alike and are not any more keep one codebook: of two parts the second has no memory."""
    fit, numbers = _states.CodedState.fit, itertools.count()

    def fail_every_second_part(state, *arguments):
        if state.stores and state.place is None and next(numbers) % 2:
            raise torch.OutOfMemoryError("there is none")
        fit(state, *arguments)

    monkeypatch.setattr(_states.CodedState, "fit", fail_every_second_part)
    train_in_parts(monkeypatch, "cpu", memory)
    assert next(numbers) > 1


def test_who_learns_in_a_step(monkeypatch):
    """The codebooks that are wanted the most, a share of all, for all states of theirs that want it; then others."""
    monkeypatch.setattr(_states, "_LEARNED_SHARE", 4)
    coding, codebooks = _states.StateCoding("default", None, False, {}), [object() for _ in range(24)]
    states = [_states.CodedState(8, 8 * ROW_BYTES, torch.device("cpu"), coding, 7) for _ in range(48)]
    for number, state in enumerate(states):
        state.learner.take(codebooks[number // 2], use=5)
    for number, fitted_at in ((4, 1), (5, 1), (6, 2), (10, 1), (12, 2), (20, 1), (21, 5), (30, 7), (40, 2), (46, 1)):
        states[number].learner.learned_at = fitted_at
    for number in (30, 40):  # and 8 is no more than 7 * 1.25
        states[number].note_overflow(20 << 20, 10)
    _states.choose_learners(states)
    assert [number for number, state in enumerate(states) if state.may_refit] == [4, 5, 6, 10, 20, 40, 46]
    _states.choose_learners(states)
    assert [number for number, state in enumerate(states) if state.may_refit] == [4, 5, 6, 10, 12, 20, 40, 46]


def test_slots_that_pinned_memory_has_room_for():
    """Slots shrink by less than is gained only as far as pinned memory has room for what they leave."""
    coding = _states.StateCoding("default", None, False, {})
    state = _states.CodedState(10, 10 * ROW_BYTES, torch.device("cpu"), coding)
    assert state._with_host_memory(3600) == 3600
    state._host_memory = torch.empty(10 * 352 + 90, dtype=torch.uint8)
    wanted = {3808: 3808, 3744: 3744, 3712: 3744, 3520: 3744, 3488: 3488, 0: 0, 4096: 4096}
    assert {slot_bytes: state._with_host_memory(slot_bytes) for slot_bytes in wanted} == wanted


def states_of_a_step(dtype, num_steps=16):
    """(exp_avg, exp_avg_sq) of normal gradients, as rows."""
    weight, states = torch.zeros(1 << 18, dtype=dtype), torch.zeros(2, 1 << 18, dtype=dtype)
    count, generator = torch.zeros(()), torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        count += 1
        grad = torch.randn(len(weight), generator=generator).to(dtype)
        torch._fused_adamw_(
            *([x] for x in (weight, grad, *states)),
            [],
            [count],
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
    return states.view(2, -1, ROW_BYTES // dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codebooks_are_chosen_by_bytes_and_rates(monkeypatch, dtype):
    """Longer symbols save more of exp_avg_sq, but take longer than that is worth, unless coders are as fast."""
    rates = calibration.H200
    monkeypatch.setattr(calibration, "in_force", lambda device: rates)
    m, v = states_of_a_step(dtype)
    by_bytes = ibp.codecs.analyze(v, scheme="planes", sample=None, device="cpu")
    for rows in (m, v):
        codebook = _learning.learn(rows, "default")
        assert codebook.digit_bits == (2, 2, 2, 2) and codebook.symbol_bits == 8 and not codebook.listed
        assert 0.12 < (1 - stored(rows, codebook)) * dtype.itemsize / 4 < 0.1875
    sparse = torch.where(torch.arange(v.numel()).view(v.shape) % 50 == 0, v, 0)
    assert _learning.learn(sparse, "default").listed
    assert _learning.learn(v, "fast").digit_bits == (4,)
    assert by_bytes.symbol_bits > 8
    paired = _learning.learn(v, "default")
    assert _learning.learn(v, "default", paired) == _learning.learn(v, "default", by_bytes) == paired
    assert _learning.learn(sparse, "default", paired).listed
    fast_coders = dataclasses.replace(rates, dense=rates.pairs)
    monkeypatch.setattr(calibration, "in_force", lambda device: fast_coders)
    assert _learning.learn(v, "default").symbol_bits == by_bytes.symbol_bits
    assert _learning.learn(v, "default", paired) == paired


def test_codebooks_serve_values_that_grow():
    """Those of the first steps, in which averages grow by being of more steps."""
    assert _states.growths((0.9, 0.999), 0) == _states.growths((0.9, 0.999), 1)
    m, v = _states.growths((0.9, 0.999), 1)
    assert m == pytest.approx(((1 - 0.81**4) / (1 - 0.81)) ** 0.5) and v == pytest.approx(4, rel=0.01)
    assert _states.growths((0.0, 1.0), 3) == (1.0, 1.0)
    assert all(growth == pytest.approx(1, abs=0.01) for growth in _states.growths((0.9, 0.999), 10_000))
    _, rows = states_of_a_step(torch.float32, 4)
    plain = _learning.learn(rows, "default")
    serving = _learning.learn(rows, "default", plain, 4.0)
    assert stored(rows, serving) < stored(rows, plain) + 0.005
    assert stored(4 * rows, serving) < stored(4 * rows, plain) - 0.01


class Recording(TorchDispatchMode):
    """What a CUDA graph does, on the CPU: notes operations that write, without making them, and makes them later."""

    def __init__(self, work, device):
        super().__init__()
        self.calls = []
        with self:
            work()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function._schema.is_mutable:
            return function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}))
        return args[0] if function._schema.returns else None

    def replay(self):
        for function, args, kwargs in self.calls:
            function(*args, **kwargs)


def train_with_many_runs(monkeypatch, device, num_steps=22):
    """Trains with chunks of several large parameters, of which one has no gradient in every third step. The chunks."""
    monkeypatch.setattr(_chunks, "_LARGE_BYTES", 60_000)
    monkeypatch.setattr(_replay, "_LEAST_TIMES", 1)
    shapes = [(60, 512), (60, 512), (40, 512), (50, 512), (100,)]
    torchs, ours = (parameters(device=device, shapes=shapes) for _ in "ab")
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours, chunk_bytes=2_000_000)

    def give(number):
        give_gradients(torchs, number)
        for i, (param, same) in enumerate(zip(torchs, ours)):
            if param.grad is not None:
                param.grad *= 10.0 ** (2 * i - 6)
            same.grad = None if param.grad is None else param.grad.clone()

    give(0)
    optimizers[1]._plans()  # as by a step that fails
    assert optimizers[1].state_dict()["state"] == {}
    for number in range(num_steps):
        give(number)
        for optimizer in optimizers:
            optimizer.step()
        check_same(torchs, ours)
    check_states(*optimizers)
    (chunk,) = optimizers[1]._chunks[0]
    assert len(chunk.runs) == 10 and len({state.learner.learned_at for state in chunk.states}) > 1
    return optimizers, chunk


def test_many_runs_are_queued_by_one_call(monkeypatch):
    recorded = []
    monkeypatch.setattr(_chunks, "_REPLAYED_ON", "cpu")
    monkeypatch.setattr(_replay, "_captured", lambda *args: recorded.append(Recording(*args)) or recorded[-1])
    optimizers, chunk = train_with_many_runs(monkeypatch, "cpu")
    assert 4 <= len(recorded) <= 16 and all(len(recording.calls) == 10 for recording in recorded)
    assert [replay._graph for replay in chunk._replays.values()] == recorded[-2:]


def test_work_is_captured_where_it_lasts(monkeypatch):
    """Once it was launched four times, until it changes."""
    captured, launched, graph = [], [], unittest.mock.Mock()
    monkeypatch.setattr(_replay, "_captured", lambda work, device: captured.append(work) or graph)
    replay = _replay.Replay()
    for number, key in enumerate("aaaaaabbabbbbbb"):
        replay.prepare(key, launched.append, torch.device("cpu"))
        replay.run(key, lambda number=number: launched.append(number))
    assert launched == [0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12] and len(captured) == 2
    assert graph.replay.call_count == 4


def test_many_runs_that_cannot_be_captured(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(_chunks, "_REPLAYED_ON", "cpu")
    monkeypatch.setattr(_replay, "_captured", refuse)
    train_with_many_runs(monkeypatch, "cpu", 10)


def test_many_runs_are_queued_by_one_call_on_a_gpu(cuda, monkeypatch):
    optimizers, chunk = train_with_many_runs(monkeypatch, cuda)
    assert all(replay._graph is not None for replay in chunk._replays.values())


def test_damaged_states_are_seen():
    """By the steps that follow, and by what asks for the states."""
    ours = parameters(shapes=[(64, 512)])
    optimizer = ibp.optim.AdamW(ours)
    give_gradients(ours, 0)
    optimizer.step()
    optimizer._chunks[0][0].states[1].place.lengths.view(torch.int16)[3] = 5
    with pytest.raises(RuntimeError, match="damaged"):
        for _ in range(3):
            optimizer.step()
    with pytest.raises(RuntimeError, match="damaged"):
        optimizer.state_dict()


def test_the_reserve_of_pinned_memory(monkeypatch):
    """Blocks for all that is expected; parts that do not overlap, and are handed out again."""
    taken = []

    def empty(num_bytes, device, pin):
        assert device.type == "cpu" and pin
        taken.append(torch.empty(num_bytes, dtype=torch.uint8))
        return taken[-1]

    monkeypatch.setattr(pool.memory, "empty", empty)
    reserve = _reserve.Reserve()
    for _ in range(3):
        reserve.expect(10)
    parts = [reserve.take_first(10, 256) for _ in range(3)]
    assert len(taken) == 1 and taken[0].numel() == 3 * 2560
    starts = {part.data_ptr() for part in parts}
    assert starts == {taken[0].data_ptr() + 2560 * i for i in range(3)} and all(p.numel() == 2560 for p in parts)
    larger = reserve.take(5000)
    assert len(taken) == 2 and larger.numel() == 5120 and larger.data_ptr() == taken[1].data_ptr()
    reserve.give(parts[1])
    again = reserve.take(100)
    assert len(taken) == 2 and again.numel() == 256 and again.data_ptr() == parts[1].data_ptr()


def test_groups_schedulers_and_closures():
    torchs, ours = parameters(), parameters()
    optimizers = []
    for params, make in ((torchs, torch.optim.AdamW), (ours, ibp.optim.AdamW)):
        groups = [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:4], "lr": 0.1}]
        optimizers.append(make(groups, lr=0.01, fused=True))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    train(torchs[:4], ours[:4], optimizers, range(2))
    for optimizer, params in zip(optimizers, (torchs, ours)):
        optimizer.add_param_group({"params": params[4:], "betas": (0.5, 0.6)})
    for number in range(2, 6):
        train(torchs, ours, optimizers, [number])
        for scheduler in schedulers:
            scheduler.step()
    check_states(*optimizers)

    def closure():
        optimizers[1].zero_grad()
        loss = sum((param**2).sum() for param in ours)
        loss.backward()
        return loss

    before = sum((param.detach() ** 2).sum() for param in ours)
    assert torch.equal(optimizers[1].step(closure), before)
    assert ours[0].grad is not None


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("form", ["step", "function"])
def test_compiled_steps(form, name):
    """A compiled step, and one within a compiled function, are those of the plain one, and are not compiled again."""
    torch.compiler.reset()
    shapes, make = SHAPES[:1] + SHAPES[-1:], MODES[name][1]
    plain, compiled = parameters(shapes=shapes), parameters(shapes=shapes)
    optimizers = [make(plain, lr=0.01), make(compiled, lr=0.01)]
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph

    step = torch.compile(optimizers[1].step if form == "step" else lambda: optimizers[1].step(), backend=backend)
    for number in range(6):
        give_gradients(plain, number, 1.0, [compiled])
        optimizers[0].step()
        step()
        check_same(plain, compiled)
    check_states(*optimizers)
    assert graphs == []


@pytest.mark.parametrize("place, other, is_async", [("cuda", "cpu", False), ("cpu", "cuda", True)])
def test_the_host_does_not_read_too_early(place, other, is_async):
    """torch copies from a GPU to pinned memory without waiting, if it is asked to."""

    class Value(torch.Tensor):
        device, is_cuda = torch.device(place), place == "cuda"

        def to(self, device, non_blocking):
            return device, non_blocking

    value = torch.zeros(()).as_subclass(Value)
    assert adamw._near(value, torch.device(other)) == (torch.device(other), is_async)
    assert adamw._near(value, torch.device(place)) is value


def test_gradients_of_a_scaler():
    """grad_scale and found_inf, as torch.amp.GradScaler gives them: a step that is left out changes nothing."""
    torchs, ours = parameters(), parameters()
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours)
    assert optimizers[1]._step_supports_amp_scaling
    for number, found in enumerate([0.0, 1.0, 0.0]):
        give_gradients(torchs, number, 1.0, [ours])
        for optimizer in optimizers:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found)
            optimizer.step()
        check_same(torchs, ours)
        check_same([p.grad for p in torchs if p.grad is not None], [p.grad for p in ours if p.grad is not None])
    check_states(*optimizers)


def test_a_step_of_parameters_without_elements():
    """Alone, at first and later."""
    torchs, ours = (parameters(shapes=((0, 5), (300, 70))) for _ in range(2))
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours)
    for has_all in (False, True, False):
        for params, optimizer in zip((torchs, ours), optimizers):
            for param in params[: 2 if has_all else 1]:
                param.grad = torch.ones_like(param)
            params[1].grad = params[1].grad if has_all else None
            optimizer.step()
        check_same(torchs, ours)
    check_states(*optimizers)


def test_layouts():
    """channels_last parameters, gradients with other strides, and pieces of transposed ones."""
    shape = (8, 6, 5, 5)
    torchs, ours = ([p.to(memory_format=torch.channels_last) for p in parameters(shapes=[shape] * 2)] for _ in "ab")
    torchs, ours = ([torch.nn.Parameter(p.detach()) for p in params] for params in (torchs, ours))
    for params in (torchs, ours):
        params.append(torch.nn.Parameter(torch.arange(6000.0).view(60, 100).t()))
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours, chunk_bytes=9000)
    for number in range(4):
        give_gradients(torchs, number, 1.0, [ours])
        for param, same in zip(torchs, ours):
            if param.grad is not None:
                same.grad = param.grad.contiguous()
                param.grad = torch.empty_like(param).copy_(param.grad)
        for optimizer in optimizers:
            optimizer.step()
        check_same(torchs, ours)
    check_states(*optimizers)


@pytest.mark.parametrize("fused", [True, None])
def test_state_dicts(fused):
    """Each takes up where the other was, through a file as well, and as a copy."""
    torchs, ours, others = parameters(), parameters(), parameters()
    optimizers = torch.optim.AdamW(torchs, lr=0.01, fused=True), ibp.optim.AdamW(ours, lr=0.01, chunk_bytes=40_000)
    train(torchs, ours, optimizers, range(3))
    with torch.no_grad():
        for param, value in zip(others, ours):
            param.copy_(value)
    kept, loaded = io.BytesIO(), ibp.optim.AdamW(others, lr=3.0)
    torch.save(optimizers[0].state_dict(), kept)
    kept.seek(0)
    saved = torch.load(kept, weights_only=True)
    for group in saved["param_groups"]:
        group["fused"] = fused
    loaded.load_state_dict(saved)
    assert loaded.param_groups[0]["lr"] == 0.01
    check_states(optimizers[0], loaded)
    back = torch.optim.AdamW(torchs, fused=True)
    back.load_state_dict(optimizers[1].state_dict())
    train(torchs, ours, [back, optimizers[1]], range(3, 6))
    for number in range(3, 6):
        give_gradients(others, number)
        loaded.step()
    check_same(ours, others)
    assert optimizers[1].state_dict("cpu")["state"][0]["exp_avg"].device.type == "cpu"


def test_copies():
    ours = parameters()
    optimizer = ibp.optim.AdamW(ours, chunk_bytes=40_000)
    for number in range(3):
        give_gradients(ours, number)
        optimizer.step()
    pickled = pickle.loads(pickle.dumps(optimizer))
    copied = copy.deepcopy(optimizer)
    for other in (pickled, copied):
        check_states(optimizer, other)
        params = [param for group in other.param_groups for param in group["params"]]
        assert params[0] is not ours[0]
        for number in range(3, 5):
            give_gradients(params, number)
            other.step()
    for number in range(3, 5):
        give_gradients(ours, number)
        optimizer.step()
    for other in (pickled, copied):
        check_same(ours, [param for group in other.param_groups for param in group["params"]])
        check_states(optimizer, other)
    assert "AdamW" in repr(optimizer) and "weight_decay: 0.01" in repr(optimizer)


def test_parameters_that_move():
    (weight,) = params = parameters(shapes=[(64, 64)])
    optimizer = ibp.optim.AdamW(params)
    weight.grad = torch.ones(64, 64, dtype=weight.dtype)
    optimizer.step()
    saved = optimizer.state_dict()["state"][0]
    weight.grad = None
    weight.data = weight.data.double()
    weight.grad = torch.ones(64, 64, dtype=torch.float64)
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match="a parameter is torch.float64 on cpu; wanted .* load its own state_dict"):
        optimizer.step()
    assert_same_bits(weight.detach(), before)
    assert int(optimizer.state[weight]["step"]) == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_bits(optimizer.state_dict()["state"][0]["exp_avg"], saved["exp_avg"].double())
    optimizer.step()
    assert int(optimizer.state[weight]["step"]) == 2


def test_refusals():
    (weight,) = params = parameters(shapes=[(4, 4)])
    optimizer = ibp.optim.AdamW(params)
    weight.grad = torch.eye(4).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(5)
    lacking = {**saved, "state": {0: {"step": 1.0}}}
    amsgrad = {**saved, "param_groups": [{**saved["param_groups"][0], "amsgrad": True}], "state": {}}
    gap_free = parameters(shapes=[(4, 4)])
    gaps, whole = torch.nn.Parameter(torch.zeros(8)[::2]), torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    for error, message, call in (
        (ValueError, "amsgrad is True", lambda: ibp.optim.AdamW(params, amsgrad=True)),
        (ValueError, "capturable is True", lambda: ibp.optim.Adam(params, capturable=True)),
        (ValueError, "differentiable is True", lambda: ibp.optim.Adam(params, differentiable=True)),
        (ValueError, "fused is False.*torch's fused kernel", lambda: ibp.optim.AdamW(params, fused=False)),
        (ValueError, "foreach is True.*torch's fused kernel", lambda: ibp.optim.Adam(params, foreach=True)),
        (ValueError, "fused is False", lambda: optimizer.add_param_group({"params": [*gap_free], "fused": False})),
        (ValueError, "level is 'best'", lambda: ibp.optim.AdamW(params, level="best")),
        (ValueError, "memory is 'disk'", lambda: ibp.optim.AdamW(params, memory="disk")),
        (ValueError, "chunk_bytes is 5; wanted 8192 or more", lambda: ibp.optim.AdamW(params, chunk_bytes=5)),
        (ValueError, "strides", lambda: optimizer.add_param_group({"params": [gaps]})),
        (TypeError, "complex64", lambda: optimizer.add_param_group({"params": [whole]})),
        (ValueError, "wanted a tensor of shape", lambda: optimizer.load_state_dict(saved)),
        (ValueError, "a state has", lambda: optimizer.load_state_dict(lacking)),
        (ValueError, "one with amsgrad", lambda: optimizer.load_state_dict(amsgrad)),
        (ValueError, "learning rate", lambda: ibp.optim.AdamW(params, lr=-1.0)),
    ):
        with pytest.raises(error, match=message):
            call()
    assert len(optimizer.param_groups) == len(optimizer._chunks) == 1
    assert int(optimizer.state_dict()["state"][0]["step"]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory", ["device", "pinned"])
def test_same_bits_on_a_gpu(cuda, monkeypatch, dtype, memory):
    """Also where no codebook is learned, without waiting for the device."""
    torchs, ours = parameters(dtype, cuda), parameters(dtype, cuda)
    options = {"lr": 0.01, "weight_decay": 0.1}
    optimizers = (
        torch.optim.AdamW(torchs, **options, fused=True),
        ibp.optim.AdamW(ours, **options, chunk_bytes=40_000, memory=memory),
    )
    train(torchs, ours, optimizers, range(12))
    check_states(*optimizers)
    give_gradients(torchs, 12, 1.0, [ours])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for optimizer in optimizers:
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_same(torchs, ours)
    check_states(*optimizers)


@pytest.mark.parametrize("memory", ["device", "pinned"])
def test_later_steps_pin_no_memory_on_a_gpu(cuda, monkeypatch, memory):
    first, *others = train_in_parts(monkeypatch, cuda, memory)
    assert first <= 2 and not any(others)


def test_no_bit_is_lost_on_a_gpu(cuda):
    """Random bits after states that shrink, with rows that lie in pinned memory from then on."""
    torchs, ours = (parameters(device=cuda, shapes=[(4096, 512)]) for _ in "ab")
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours)
    train(torchs, ours, optimizers, range(2))
    before = optimizers[1].stats()["exp_avg"]
    assert before.savings > 0.1 and before.host_bytes + before.device_bytes < 1.05 * before.original_bytes
    bits = torch.randint(0x20000000, 0x5F000000, (4096, 512), dtype=torch.int32, device=cuda).view(torch.float32)
    torchs[0].grad, ours[0].grad = bits.clone(), bits.clone()
    for optimizer in optimizers:
        optimizer.step()
    check_same(torchs, ours)
    check_states(*optimizers)
    train(torchs, ours, optimizers, range(3, 9))
    check_states(*optimizers)


def test_scaled_gradients_on_a_gpu(cuda):
    """torch.amp.GradScaler, with infinite gradients in one step."""
    torchs, ours = parameters(device=cuda), parameters(device=cuda)
    optimizers = torch.optim.AdamW(torchs, fused=True), ibp.optim.AdamW(ours)
    scalers = [torch.amp.GradScaler("cuda", init_scale=16.0) for _ in optimizers]
    for number in range(4):
        give_gradients(torchs, number, 16.0, [ours])
        if number == 1:
            torchs[0].grad[0, 0] = ours[0].grad[0, 0] = float("inf")
        for optimizer, scaler in zip(optimizers, scalers):
            scaler.scale(torch.ones((), device=cuda))
            scaler.step(optimizer)
            scaler.update()
        check_same(torchs, ours)
    check_states(*optimizers)


@pytest.mark.parametrize("of_parameters, of_rate", [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_rates_on_either_side(cuda, of_parameters, of_rate):
    """A learning rate that is a tensor, which a GPU changes late in each step: the value of that step counts."""
    torchs, ours = parameters(device=of_parameters), parameters(device=of_parameters)
    rates = torch.tensor(0.02), torch.tensor(0.02, device=of_rate)
    optimizers = torch.optim.AdamW(torchs, lr=rates[0], fused=True), ibp.optim.AdamW(ours, lr=rates[1])
    for number in range(5):
        torch.cuda._sleep(20_000_000)
        for rate in rates:
            rate.mul_(0.5)
        train(torchs, ours, optimizers, [number])
    check_states(*optimizers)


def test_capture_is_refused(cuda):
    ours = parameters(device=cuda)
    optimizer = ibp.optim.AdamW(ours)
    give_gradients(ours, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    optimizer.step()
