"""ibp.deltas.make: tensors and checkpoints, on the CPU and, with the fixture cuda, on a GPU."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import ibp
import reference
from helpers import assert_same_bits, bytes_of, reference_decode
from ibp._rows.table import handle_on
from ibp.deltas import _applying

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.uint16,
    torch.float32,
    torch.complex64,
    torch.float64,
    torch.int64,
]
SHAPES = [(0,), (0, 5), (), (1,), (7,), (3, 5), (1000, 33), (4097,), (2, 3, 4096)]


def bits(dtype, *shape):
    """Any bits; of bool those that there are."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = torch.randint(2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


def changed(x, share, most=1 << 62):
    """A copy with other bits in a share of the elements: small differences where most is small."""
    new = x.clone()
    data = bytes_of(new)
    width = x.dtype.itemsize // (2 if x.dtype.is_complex else 1)
    if x.dtype == torch.bool:
        return torch.where(torch.rand(x.shape) < share, ~x, x)
    words = data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width])
    hit = torch.rand(words.shape) < share
    steps = torch.randint(1, most + 1, words.shape) * (1 - 2 * torch.randint(2, words.shape))
    words.add_(torch.where(hit, steps, 0).to(words.dtype))
    return new


def optimizer_step(size, rate, dtype=torch.bfloat16):
    """Two versions of weights: (new, base), as rounded after a step of an optimizer of 32-bit weights."""
    weights = torch.randn(size) * 0.02
    return (weights - rate * torch.randn(size).clamp(-3, 3)).to(dtype), weights.to(dtype)


def check(new, base, device=None):
    before = base.clone()
    delta = ibp.deltas.make(new, base, device=device)
    assert_same_bits(base, before)
    assert (delta.base, delta.result) == (ibp.deltas.fingerprint(base), ibp.deltas.fingerprint(new))
    assert delta.shape == new.shape and delta.dtype == new.dtype
    assert delta.apply_(before) is before
    assert_same_bits(before, new)
    return delta


# ---- tensors ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.02, 1, *(pytest.param(share, marks=pytest.mark.slow) for share in (0, 0.6))])
def test_any_difference(dtype, share):
    base = bits(dtype, 37, 501)
    for most in (3, 100, 1 << 62):
        check(changed(base, share, most), base)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex64], ids=str)
def test_shapes(shape, dtype):
    base = bits(dtype, *shape)
    check(changed(base, 0.1, 2), base)
    check(bits(dtype, *shape), base)


def test_strides():
    new, base = optimizer_step((60, 60, 4), 1e-5)
    for view in (lambda x: x.transpose(0, 2), lambda x: x[::2], lambda x: x[:, 1:, ::3], lambda x: x[3, :, 2]):
        other = view(base.clone())
        ibp.deltas.make(view(new), view(base)).apply_(other)
        assert_same_bits(other, view(new))
    around = base.clone()
    ibp.deltas.make(new[:, 7], base[:, 7]).apply_(around[:, 7])
    around[:, 7] = base[:, 7]
    assert_same_bits(around, base)


def test_starts_that_are_not_aligned():
    new, base = optimizer_step((5000,), 3e-6)
    for start in range(1, 5):
        memory = torch.zeros(5010, dtype=torch.bfloat16)
        memory[start : start + 5000] = base
        check(new, memory[start : start + 5000])
        assert memory[:start].eq(0).all() and memory[start + 5000 :].eq(0).all()


@pytest.mark.parametrize(("rate", "share", "times"), [(0.43e-6, 0.0165, 3.9), (1.3e-6, 0.0414, 5), (3.9e-6, 0.099, 6)])
def test_weights_take_few_bytes(rate, share, times):
    """Times fewer than an int32 index and the value of each that changed."""
    new, base = optimizer_step((1 << 20,), rate)
    num_changed = int((new != base).sum())
    assert num_changed == pytest.approx(share * new.numel(), rel=0.05)
    delta = check(new, base)
    assert delta.stored_bytes * times <= num_changed * (4 + 2)
    assert delta.nbytes >= delta.stored_bytes and delta.original_bytes == new.nbytes


def test_what_did_not_change_takes_next_to_nothing():
    x = torch.randn(100_000)
    delta = ibp.deltas.make(x, x.clone())
    assert delta.is_empty and delta.stored_bytes < 400
    assert_same_bits(delta.apply(x), x)


def test_numpy_reads_the_differences():
    new, base = optimizer_step((3, 5000), 1e-6)
    delta = ibp.deltas.make(new, base)
    differences = np.frombuffer(reference_decode(delta.table), np.uint16)
    wanted = bytes_of(new).numpy().view(np.uint16) - bytes_of(base).numpy().view(np.uint16)
    assert np.array_equal(differences, wanted)
    assert delta.result == reference.fingerprint(bytes_of(new).numpy().tobytes())


def test_tables_are_versions_too():
    new, base = optimizer_step((100, 64), 1e-6)
    tables = ibp.compress(new, device="cpu"), ibp.compress(base, device="cpu")
    for pair in ((tables[0], base), (new, tables[1]), tables):
        delta = ibp.deltas.make(*pair)
        assert_same_bits(delta.apply(base), new)


def test_parameters_change_in_place():
    module = torch.nn.Linear(20, 30)
    with torch.no_grad():
        new = module.weight + 1
    version = module.weight._version
    ibp.deltas.make(new, module.weight).apply_(module.weight)
    assert_same_bits(module.weight.detach(), new)
    assert module.weight._version > version  # autograd sees that it changed


def test_what_it_says_and_keeps():
    new, base = optimizer_step((64, 64), 1e-6)
    delta = ibp.deltas.make(new, base)
    assert "shape=[64, 64]" in repr(delta) and f"{delta.base:016x}" in repr(delta)
    file = io.BytesIO()
    torch.save(delta, file)
    file.seek(0)
    others = [pickle.loads(pickle.dumps(delta)), copy.copy(delta), copy.deepcopy(delta), delta.to("cpu")]
    others += [ibp.deltas.Delta(delta.table, delta.base, delta.result), torch.load(file, weights_only=False)]
    for other in others:
        assert_same_bits(other.apply(base), new)
    with pytest.raises(AttributeError, match="never changes"):
        delta.base = 0


# ---- what is refused ----


def test_another_base_is_refused_and_left():
    new, base = optimizer_step((50, 50), 1e-5)
    delta = ibp.deltas.make(new, base)
    for other in (new, base + 1, base.t()):
        before = other.clone()
        with pytest.raises(ibp.deltas.DeltaMismatchError, match="base has fingerprint"):
            delta.apply_(other)
        assert_same_bits(other, before)
    with pytest.raises(ibp.deltas.DeltaMismatchError, match=r"base has shape \[2500\]; the delta is for \[50, 50\]"):
        delta.apply_(base.view(-1))
    with pytest.raises(TypeError, match=r"base has dtype torch.int16; the delta is for torch.bfloat16"):
        delta.apply_(base.view(torch.int16))
    with pytest.raises(TypeError, match="base is a list"):
        delta.apply_([1])
    x = torch.randn(9, dtype=torch.complex64)
    with pytest.raises(TypeError, match="base is a conjugated or negated view"):
        ibp.deltas.make(x + 1, x.conj()).apply_(x.conj())


def test_exchanged_versions():
    """`make(old, new)` in place of `make(new, old)`, or a second `apply_`."""
    new, old = torch.ones(50, 50), torch.zeros(50, 50)
    match = (
        " has fingerprint .*, and makes what is there: were new and base exchanged in .*, or has the delta been applied"
    )
    with pytest.raises(ibp.deltas.DeltaMismatchError, match="base" + match):
        ibp.deltas.make(old, new).apply_(old)
    with pytest.raises(ibp.deltas.DeltaMismatchError, match="w" + match):
        ibp.deltas.make({"w": old}, {"w": new}).apply_({"w": old})
    assert not old.any()
    assert ibp.deltas.make(old, old).apply_(old) is old


def test_arguments():
    x = torch.zeros(4)
    for arguments, error, match in (
        ((x, [1]), TypeError, "base is a list"),
        ((x, {"a": x}), TypeError, "only base is a mapping"),
        ((x, x.double()), TypeError, "new has dtype torch.float32, base torch.float64"),
        ((x, x[:3]), ValueError, r"new has shape \[4\], base \[3\]"),
        (({"a": 1}, {"a": x}), TypeError, "a is a int"),
    ):
        with pytest.raises(error, match=match):
            ibp.deltas.make(*arguments)
    table = ibp.compress(x, device="cpu")
    with pytest.raises(TypeError, match="table is a Tensor"):
        ibp.deltas.Delta(x, 0, 0)
    with pytest.raises(ValueError, match="base is -1"):
        ibp.deltas.Delta(table, -1, 0)


def damaged_deltas(delta, count):
    """Deltas with a byte of the coded rows, the lengths or the bases changed, and with another result."""
    table = delta.table
    generator = np.random.default_rng(0)
    for number in range(count):
        tensors = {name: getattr(table, name).clone() for name in ("slots", "overflow", "lengths", "bases")}
        names = [name for name in ("overflow", "slots", "lengths", "bases") if tensors[name].numel()]
        name = names[number % len(names)]
        data = tensors[name].view(torch.uint8)
        data[generator.integers(data.numel())] ^= int(generator.integers(1, 256))
        fields = {
            field: getattr(table, field)
            for field in ("shape", "dtype", "scheme", "row_bytes", "slot_bytes", "codebook")
        }
        yield ibp.deltas.Delta(ibp.CompressedTensor(**fields, **tensors), delta.base, delta.result)
    yield ibp.deltas.Delta(table, delta.base, delta.result ^ 1)


def check_damage(new, base, count):
    before = base.clone()
    for damaged in damaged_deltas(ibp.deltas.make(new, base), count):
        try:
            damaged.apply_(base)
            assert_same_bits(base, new)  # the byte meant nothing
            base.copy_(before)
        except ibp.CorruptTableError:
            assert_same_bits(base, before)


@pytest.mark.parametrize("rate", [1e-6, 1e-4, 1.0])
def test_a_damaged_delta_leaves_the_base(rate):
    check_damage(*optimizer_step((8000,), rate), 60)


@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("number", [0, 1])
def test_interrupted(number, after, monkeypatch):
    """Before and after the differences of either tensor are added."""
    new, old = (dict(zip("ab", tensors)) for tensors in zip(*(optimizer_step((8000,), 1e-4) for _ in "ab")))
    delta = ibp.deltas.make(new, old)
    assert delta.changed == ("a", "b")
    base = {name: tensor.clone() for name, tensor in old.items()}
    add, calls = _applying.HostBatch._add, []

    def interrupted(self, subtracts):
        calls.append(subtracts)
        if len(calls) - 1 != number:
            return add(self, subtracts)
        if after:
            add(self, subtracts)
        raise KeyboardInterrupt

    monkeypatch.setattr(_applying.HostBatch, "_add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        delta.apply_(base)
    for name, tensor in old.items():
        assert_same_bits(base[name], tensor)


@pytest.mark.slow
def test_many_damaged_deltas_leave_the_base():
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        for rate in (1e-6, 1e-4, 1.0):
            check_damage(*optimizer_step((20_000,), rate, dtype), 400)


@pytest.mark.parametrize("kept", ["zeros", "ones", "constant columns"])
@pytest.mark.parametrize("layout", ["slots", "packed"])
def test_tables_of_any_codebook_are_added(kept, layout):
    """Rows that take no bytes are added too where they are no zeros: those of a default, and of constant columns."""
    x = torch.full((70, 16), int(kept == "ones"), dtype=torch.int32)
    x[::3] = torch.randint(4, (24, 16), dtype=torch.int32)
    if kept == "constant columns":
        x[:, ::2] = torch.arange(8, dtype=torch.int32) + 5
    table = ibp.compress(x, scheme="planes", layout=layout, device="cpu", memory="host")
    assert (table.lengths == table.row_bytes).any(), "rows that take no bytes"
    assert (table.codebook.row_template is not None) == (kept == "constant columns")
    base, change, fault = (
        torch.randint_like(x, 1 << 30),
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int64),
    )
    for subtracts, wanted in ((False, base + x), (True, base)):
        before = ibp.deltas.fingerprint(wanted - x if not subtracts else wanted + x)
        moved = base.clone() if not subtracts else base + x
        change.zero_()
        torch.ops.ibp.add_rows.default(handle_on(table, torch.device("cpu")).table, 4, subtracts, moved, change, fault)
        assert_same_bits(moved, wanted)
        assert (before + int(change)) % 2**64 == ibp.deltas.fingerprint(wanted) and not fault.any()


# ---- checkpoints ----


def checkpoints():
    """(new, base): weights that changed, did not, came, went, and have another shape or dtype."""
    base, new = {}, {}
    for i in range(6):
        new[f"layer.{i}"], base[f"layer.{i}"] = optimizer_step((64, 100 + i), 1e-6 * i)
    for shape in ((), (0,), (5,)):
        new[f"small.{shape}"], base[f"small.{shape}"] = torch.randn(shape), torch.randn(shape)
    new["same"] = base["same"] = torch.arange(1000)
    new["larger"], base["larger"] = torch.randn(6, 4), torch.randn(5, 4)
    new["converted"], base["converted"] = torch.ones(3, dtype=torch.int32), torch.ones(3)
    new["added"] = torch.randn(10)
    base["dropped"] = torch.randn(10)
    return new, base


def cloned(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_same_tensors(tensors, wanted):
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(tensors[name], tensor)


def test_checkpoints():
    new, base = checkpoints()
    delta = ibp.deltas.make(new, base)
    assert set(delta.new) == {"larger", "converted", "added"} and delta.removed == ("dropped",)
    assert "same" not in delta and "layer.0" not in delta and "small.(0,)" not in delta
    assert set(delta.changed) == {*(f"layer.{i}" for i in range(1, 6)), "small.()", "small.(5,)"}
    assert len(delta) == len(delta.changed) + 3 and "7 changed, 3 new, 1 removed" in repr(delta)
    assert delta.stored_bytes < 0.08 * delta.original_bytes
    held = base["layer.3"]
    assert delta.apply_(base) is base and base["layer.3"] is held
    assert_same_tensors(base, new)


def test_unchanged_checkpoints_take_nothing():
    _, base = checkpoints()
    delta = ibp.deltas.make(cloned(base), base)
    assert len(delta) == delta.stored_bytes == 0 and delta.removed == ()
    assert_same_tensors(delta.apply_(cloned(base)), base)


def test_modules_change_with_their_state_dicts():
    module = torch.nn.Sequential(torch.nn.Linear(9, 8), torch.nn.Linear(8, 7))
    module[1].tied = module[0].weight
    new = {name: tensor + 1 for name, tensor in module.state_dict().items()}
    ibp.deltas.make(new, module.state_dict()).apply_(module.state_dict())
    assert_same_tensors(module.state_dict(), new)
    assert module[1].tied is module[0].weight


def test_a_checkpoint_changes_as_a_whole_or_not_at_all():
    new, base = checkpoints()
    delta = ibp.deltas.make(new, base)
    base["layer.5"][3, 3] += 1
    before = cloned(base)
    with pytest.raises(ibp.deltas.DeltaMismatchError, match=r"layer\.5 has fingerprint"):
        delta.apply_(base)
    assert_same_tensors(base, before)
    good = delta["layer.5"]
    changes = {**delta, "layer.5": ibp.deltas.Delta(good.table, ibp.deltas.fingerprint(base["layer.5"]), 5)}
    with pytest.raises(ibp.CorruptTableError, match=r"layer\.5 would not become"):
        ibp.deltas.CheckpointDelta(changes, delta.removed).apply_(base)
    assert_same_tensors(base, before)


def test_checkpoints_that_are_refused():
    new, base = checkpoints()
    delta = ibp.deltas.make(new, base)
    with pytest.raises(KeyError, match=r"layer\.1"):
        delta.apply_({name: tensor for name, tensor in base.items() if name != "layer.1"})
    with pytest.raises(TypeError, match="base is a Tensor"):
        delta.apply_(base["layer.1"])
    one = {name: delta[name] for name in ("layer.1",)}
    with pytest.raises(ValueError, match=r"layer\.1 is among"):
        ibp.deltas.CheckpointDelta(one, ["layer.1"])
    with pytest.raises(TypeError, match="a is a int"):
        ibp.deltas.CheckpointDelta({"a": 1})
    memory = torch.zeros(100)
    versions = {"a": memory[:60], "b": memory[40:]}
    shifted = ibp.deltas.make({name: tensor + 1 for name, tensor in versions.items()}, cloned(versions))
    with pytest.raises(ibp.deltas.DeltaMismatchError, match="a and b share memory"):
        shifted.apply_(versions)
    assert memory.eq(0).all()


def check_damaged_new_tensor(device):
    """A new tensor that is damaged is found before anything changes."""
    table = ibp.compress(torch.randn(400, 64) * 0.02, scheme="planes", layout="packed", device="cpu")
    table.lengths.view(torch.int16)[7] = 1  # of which no row can be decoded
    changed = torch.arange(9, device=device)
    whole = {"a": changed, "b": torch.ones(3, device=device)}
    delta = ibp.deltas.CheckpointDelta(
        {**ibp.deltas.make({"a": changed + 1}, {"a": changed}), "new": table.to(device)}, ["b"]
    )
    before = cloned(whole)
    with pytest.raises(ibp.CorruptTableError, match="contradicts its length"):
        delta.apply_(whole)
    assert_same_tensors(whole, before)


def test_a_damaged_new_tensor_leaves_the_base(monkeypatch):
    """The CPU finds damage as it decodes; of a GPU it has to be asked for."""
    decompress, checks = ibp.CompressedTensor.decompress, []

    def noted(table, **options):
        checks.append(options["check"])
        return decompress(table, **options)

    monkeypatch.setattr(ibp.CompressedTensor, "decompress", noted)
    check_damaged_new_tensor("cpu")
    assert checks == [True]


def test_checkpoint_deltas_are_kept(tmp_path):
    new, base = checkpoints()
    delta = ibp.deltas.make(new, base)
    others = [pickle.loads(pickle.dumps(delta)), delta.to("cpu")]
    ibp.save(tmp_path / "delta.safetensors", delta)
    with ibp.open(tmp_path / "delta.safetensors", verify=True) as file:
        others.append(ibp.deltas.CheckpointDelta(file, file.removed))
        for other in others:
            assert_same_tensors(other.apply_(cloned(base)), new)


# ---- on a GPU ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0, 0.02, 0.2, 1])
def test_cuda_any_difference(cuda, dtype, share):
    base = bits(dtype, 301, 501)
    for most in (1, 3, 100, 1 << 62):
        new = changed(base, share, most)
        near = check(new.to(cuda), base.to(cuda))
        far = ibp.deltas.make(new, base)
        assert (near.base, near.result) == (far.base, far.result)
        assert_same_bits(near.cpu().apply(base), new)
        assert_same_bits(far.apply(base.to(cuda)).cpu(), new)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64], ids=str)
def test_cuda_shapes(cuda, shape, dtype):
    base = bits(dtype, *shape)
    for new in (changed(base, 0.1, 2), bits(dtype, *shape)):
        check(new.to(cuda), base.to(cuda))


def test_cuda_strides_and_starts(cuda):
    new, base = (x.to(cuda) for x in optimizer_step((60, 60, 4), 1e-5))
    for view in (lambda x: x.transpose(0, 2), lambda x: x[::2], lambda x: x[3, :, 2], lambda x: x.view(-1)[1:]):
        other = view(base.clone())
        ibp.deltas.make(view(new), view(base)).apply_(other)
        assert_same_bits(other, view(new))
    for start in range(1, 9):
        memory = torch.zeros(14_500, dtype=torch.bfloat16, device=cuda)
        memory[start : start + 14_400] = base.view(-1)
        check(new.view(-1), memory[start : start + 14_400])
        assert memory[:start].eq(0).all() and memory[start + 14_400 :].eq(0).all()


def test_cuda_autograd_sees_changes(cuda):
    new, base = (x.to(cuda) for x in optimizer_step((300, 50), 1e-5))
    delta, version = ibp.deltas.make(new, base), base._version
    delta.apply_(base)
    assert base._version > version
    with torch.inference_mode():
        assert_same_bits(ibp.deltas.make(base, new + 1).apply_(new + 1), base)


def test_cuda_damage(cuda):
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        for rate in (1e-6, 1e-4, 1.0):
            new, base = optimizer_step((50_000,), rate, dtype)
            check_damage(new.to(cuda), base.to(cuda), 100)


def test_cuda_other_bases_are_refused(cuda):
    new, base = (x.to(cuda) for x in optimizer_step((500, 50), 1e-5))
    delta = ibp.deltas.make(new, base)
    for other in (new.clone(), base + 1, base.t().contiguous().view(500, 50)):
        before = other.clone()
        with pytest.raises(ibp.deltas.DeltaMismatchError, match="base has fingerprint"):
            delta.apply_(other)
        assert_same_bits(other, before)


def test_cuda_checkpoints(cuda):
    new, base = checkpoints()
    near = {name: tensor.to(cuda) for name, tensor in base.items()}
    far = ibp.deltas.make(new, base)
    delta = ibp.deltas.make({name: tensor.to(cuda) for name, tensor in new.items()}, near)
    assert delta.keys() == far.keys() and delta.removed == far.removed
    assert delta.stored_bytes == far.stored_bytes
    held = near["layer.3"].data_ptr()
    far.apply_(near)
    assert near["layer.3"].data_ptr() == held
    assert_same_tensors({name: tensor.cpu() for name, tensor in near.items()}, new)
    assert_same_tensors(delta.to("cpu").apply_(cloned(base)), new)
    broken = {name: tensor.to(cuda) for name, tensor in base.items()}
    broken["layer.4"].view(-1)[-1] += 1
    before = cloned(broken)
    with pytest.raises(ibp.deltas.DeltaMismatchError, match=r"layer\.4"):
        delta.apply_(broken)
    assert_same_tensors(broken, before)


def test_cuda_a_damaged_new_tensor_leaves_the_base(cuda):
    check_damaged_new_tensor(cuda)


def test_the_device_of_new_tensors():
    """It is that of the base's tensors, for each of them, if these are all on one device."""
    changes = {name: torch.ones(3) for name in "abc"}
    base = ibp.deltas.CheckpointDelta(changes).apply_({"x": torch.empty(2, device="meta")})
    assert {name: tensor.device.type for name, tensor in base.items()} == dict.fromkeys("xabc", "meta")
    base = ibp.deltas.CheckpointDelta(changes).apply_({"x": torch.empty(2, device="meta"), "y": torch.empty(2)})
    assert [base[name].device.type for name in "abc"] == ["cpu"] * 3
