"""`ibp.offload`: models whose weights are streamed, compared by bits with the same models as they were."""

import bisect
import contextlib
import copy
import functools
import gc
import io
import json
import pickle
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode

import ibp
from helpers import assert_same_bits, in_threads
from ibp._offload.events import Schedule, moved
from ibp._offload.fetcher import WeightFetcher, overlap
from ibp._offload.plan import plan_for, spread
from ibp._offload.weights import Resting
from ibp._rows.table import handle_on
from ibp._tables.weights import WeightCompressor
from interrupts import interrupt_at
from models import IDS, WIDTH, Net, Wide


class Interrupted(BaseException):
    """As KeyboardInterrupt: torch runs no hooks after it."""


offload = functools.partial(ibp.offload, device="cpu", min_bytes=1000, group_bytes=20000)


def is_offloaded(tensor):
    return isinstance(tensor, Resting)


def bits_seen(model):
    """The bits of the weights that linear layers compute with, by layer, as calls go on: a dict that fills."""
    seen = {}

    def note(module, args, name):
        seen.setdefault(name, []).append(module.weight.detach().clone())

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(functools.partial(note, name=name))
    return seen


# ---- the same results ----


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1, 2, 50])
@torch.no_grad()
def test_results_and_weights_are_the_same(lookahead, tie):
    model = Net(tie=tie)
    wanted = model(IDS)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    offloaded = offload(model, lookahead=lookahead)
    seen = bits_seen(model)
    for _ in range(3):
        assert_same_bits(model(IDS), wanted)
    assert len(seen) == 11
    for name, values in seen.items():
        assert len(values) == 3
        for value in values:
            assert_same_bits(value, weights[f"{name}.weight"])
    stats = offloaded.stats()
    assert stats.misses == (0 if lookahead else stats.uses)
    assert stats.host_bytes < stats.weight_bytes and stats.seconds > 0 and stats.gb_per_s > 0
    assert 0 < stats.waited_seconds
    offloaded.reset_stats()
    assert offloaded.stats().waited_seconds == offloaded.stats().seconds == offloaded.stats().uses == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_dtypes(dtype):
    model = Net(dtype=dtype)
    wanted = model(IDS)
    offload(model, lookahead=2)
    assert_same_bits(model(IDS), wanted)


class Cast(nn.Module):
    """A layer whose packed weight is a buffer, as quantisers have them."""

    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x):
        return x @ self.weight.to(torch.float32)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
@torch.no_grad()
def test_buffers_of_quantised_layers(dtype):
    weights = [(torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)) * 20).to(dtype) for seed in range(4)]
    model = nn.Sequential(*(Cast(weight) for weight in weights)).eval()
    x = torch.eye(64)
    wanted = model(x)
    with pytest.raises(ValueError, match="nothing|no frozen weight"):
        offload(model)
    with offload(model, buffers=True) as offloaded:
        assert_same_bits(model(x), wanted)
        assert offloaded.stats().weight_bytes == sum(weight.nbytes for weight in weights)
        assert offloaded.stats().host_bytes <= sum(weight.nbytes for weight in weights) * 1.05 + 4096
    for layer, weight in zip(model, weights):
        assert_same_bits(layer.weight, weight)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_linear_weights_of_8_bits(dtype):
    layer = nn.Linear(64, 64, bias=False)
    layer.weight = nn.Parameter(layer.weight.data.to(dtype), requires_grad=False)
    model = nn.Sequential(layer, nn.Identity()).eval()
    before = layer.weight.data.clone()
    layer.register_forward_pre_hook(lambda module, args: (assert_same_bits(module.weight, before), None)[1])
    layer.forward = lambda x: x @ layer.weight.to(x.dtype).t()
    offload(model)
    model(torch.eye(64))


def test_memory_order_is_kept():
    """Weights that are dense but not in the order of their dimensions, and one with gaps."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 3), nn.Conv2d(8, 8, 3)).eval()
    model[0].to(memory_format=torch.channels_last)
    model[1].weight.data = model[1].weight.data.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    wide = torch.randn(8, 8, 3, 6)
    model[2].weight.data = wide[..., ::2]
    x = torch.randn(2, 8, 12, 12)
    strides = [layer.weight.stride() for layer in model]
    with torch.no_grad():
        wanted = model(x)
        seen = []
        for layer in model:
            layer.register_forward_pre_hook(lambda module, args: seen.append(module.weight.stride()), prepend=False)
        offloaded = offload(model, min_bytes=100)
        for layer in model:
            layer.register_forward_pre_hook(lambda module, args: seen.append(module.weight.stride()))
        assert_same_bits(model(x)[0], wanted[0])
    assert seen[1::2][:2] == strides[:2] or seen[:2] == strides[:2]
    offloaded.close()
    assert [layer.weight.stride() for layer in model][:2] == strides[:2]
    assert_same_bits(model[2].weight.data, wide[..., ::2])


def test_weights_that_share_memory():
    """Two parameters over the same elements are one weight, before and after."""
    model = Net()
    model.head.weight = nn.Parameter(model.embed.weight.data)
    assert model.head.weight is not model.embed.weight
    with torch.no_grad():
        wanted = model(IDS)
        offloaded = offload(model)
        assert_same_bits(model(IDS), wanted)
        state = model.state_dict()
        assert state["head.weight"] is state["embed.weight"]
        offloaded.close()
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert_same_bits(model(IDS).detach(), wanted)


@torch.no_grad()
def test_modules_that_use_the_weights_of_others():
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    for part in model.modules():  # with hooks torch takes no fused path: neither here
        part.register_forward_pre_hook(lambda module, args: None)
    x = torch.randn(2, 5, WIDTH)
    wanted = model(x)
    offload(model, lookahead=1, group_bytes=1)
    assert_same_bits(model(x), wanted)

    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True).eval()
    model = nn.ModuleDict({"attention": attention, "head": nn.Linear(WIDTH, WIDTH)}).eval()
    attention.register_forward_pre_hook(lambda module, args: None)
    wanted = attention(x, x, x, need_weights=False)[0]
    offload(model, group_bytes=1)
    assert_same_bits(attention(x, x, x, need_weights=False)[0], wanted)


class Borrower(nn.Module):
    """Uses the weight of a module below it without calling that."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2)])

    def forward(self, x):
        return nn.functional.linear(x, self.inner.weight) @ self.parts[0] @ self.parts[1]


@pytest.mark.parametrize("lookahead", [0, 2])
@torch.no_grad()
def test_weights_that_are_used_by_a_module_above(lookahead):
    """They are decoded for it in the first call, and brought to it from then on."""
    model = nn.Sequential(*(Borrower() for _ in range(3)), nn.Linear(WIDTH, WIDTH)).eval()
    x = torch.randn(3, WIDTH)
    wanted = model(x)
    with offload(model, group_bytes=1, lookahead=lookahead) as offloaded:
        uses = []
        for _ in range(4):
            assert_same_bits(model(x), wanted)
            uses.append(offloaded.stats().uses)
            offloaded.reset_stats()
        assert uses == [4, 7, 7, 7]
    assert_same_bits(model(x), wanted)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


# ---- embeddings ----


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * self.weight.dtype.itemsize


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
@torch.no_grad()
def test_embeddings_fetch_rows(kind):
    model = nn.Sequential(kind(1000, 32), nn.Linear(32, 32)).eval()
    wanted = model(IDS)
    offloaded = offload(model)
    assert_same_bits(model(IDS), wanted)
    assert offloaded.stats().fetched_bytes == 32 * 32 * 4
    with pytest.raises(IndexError):
        model(IDS + 1000)
    assert_same_bits(model(IDS), wanted)
    assert is_offloaded(model[0].weight) and list(model.state_dict()) == ["0.weight", "1.weight", "1.bias"]


@torch.no_grad()
def test_an_embedding_that_changes_its_rows_is_brought_whole():
    model = nn.Sequential(nn.Embedding(1000, 32, max_norm=1.0), nn.Linear(32, 32)).eval()
    offloaded = offload(model)
    model(IDS)
    assert offloaded.stats().fetched_bytes == 1000 * 32 * 4 + 32 * 32 * 4


# ---- the order of use ----


@torch.no_grad()
def test_order_is_learned_again():
    model = Net()
    plain = copy.deepcopy(model)
    offloaded = offload(model, lookahead=2)
    for order, most_misses in (
        ([0, 1, 2, 3, 4], 0),
        ([4, 3, 2, 1, 0], 7),
        ([4, 3, 2, 1, 0], 0),
        ([4, 3, 2, 1, 0], 0),
        ([0, 0, 1], 6),
        ([0, 0, 1], 2),
        ([0, 0, 1], 2),
        ([2], 3),
        ([0, 1, 2, 3, 4], 6),
    ):
        model.order = plain.order = order
        offloaded.reset_stats()
        assert_same_bits(model(IDS), plain(IDS))
        assert offloaded.stats().misses <= most_misses, order


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=8), min_size=1, max_size=6),
    st.integers(0, 6),
    st.integers(1, 60000),
)
def test_any_order(orders, lookahead, group_bytes):
    model = Net()
    plain = copy.deepcopy(model)
    with torch.no_grad(), offload(model, lookahead=lookahead, group_bytes=group_bytes):
        for order in orders:
            model.order = plain.order = order
            assert_same_bits(model(IDS), plain(IDS))


def test_schedule():
    schedule = Schedule("abc")
    coming = schedule.coming()
    assert [next(coming) for _ in range(4)] == list("abca")
    for item in "abbcabbc":
        schedule.saw(item)
    coming = schedule.coming()
    assert [next(coming) for _ in range(8)] == list("abbcabbc")
    assert list(Schedule([]).coming()) == []


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=60), st.integers(1, 100))
def test_arena_gives_places_that_are_free(wanted, num_bytes):
    fetcher, held = WeightFetcher(torch.device("cpu"), num_bytes, None), []
    for size, num_held in wanted:
        held = held[-num_held:] if num_held else []
        region = fetcher.free_region(size, held, held[0] if held else None)
        if region is None:
            # No gap is large enough.
            ends = [0, *sorted(end for _, end in held)]
            starts = [*sorted(start for start, _ in held), num_bytes]
            assert all(free - end < size for end, free in zip(ends, starts))
        else:
            assert (
                0 <= region[0]
                and region[1] == region[0] + size
                and region[1] <= num_bytes
                and not any(overlap(region, other) for other in held)
            )
            held.append(region)


# ---- the model between calls ----


def test_weights_at_rest():
    """What a weight is asked about itself it answers as ever; its values are decoded for who asks."""
    model = Net()
    model.head.weight.data = model.head.weight.data.t().contiguous().t()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    held = list(model.parameters())
    strides = [value.stride() for value in held]
    offloaded = offload(model, lookahead=0)
    assert all(one is other for one, other in zip(held, model.parameters()))
    assert [value.stride() for value in held] == strides
    assert not is_offloaded(model.blocks[2].norm.weight) and not is_offloaded(model.scale)
    x = torch.randn(2, WIDTH)
    for name, weight in model.named_parameters():
        value = before[name]
        assert isinstance(weight, nn.Parameter) and (weight.shape, weight.dtype) == (value.shape, value.dtype)
        assert weight.numel() == value.numel() and weight.nbytes == value.nbytes and weight.is_leaf
        assert not weight.requires_grad or not is_offloaded(weight)
        assert_same_bits(weight.detach(), value)
        assert_same_bits(weight.data, value)
        assert_same_bits(weight * 2, value * 2)
        assert_same_bits(torch.stack([weight, value])[0], value)
        if value.dim() == 2 and value.shape[1] == WIDTH:
            assert_same_bits(nn.functional.linear(x, weight), nn.functional.linear(x, value))
    weight = model.blocks[2].up.weight
    assert weight.device == torch.device("cpu") and weight.to("cpu") is weight and hash(weight) == id(weight)
    assert "Parameter containing" in repr(weight) and "nan" not in repr(weight)
    assert_same_bits(weight.to(torch.float64), before["blocks.2.up.weight"].double())
    assert_same_bits(weight[3], before["blocks.2.up.weight"][3])
    assert offloaded.stats().uses == 0
    model.to("cpu")
    for write in (
        lambda: weight.zero_(),
        lambda: weight.__setitem__(0, 1.0),
        lambda: torch.add(weight.data, 1, out=weight),
        lambda: setattr(weight, "data", before["blocks.2.up.weight"]),
        lambda: nn.init.normal_(weight),
    ):
        with pytest.raises(RuntimeError, match="is offloaded and cannot be written to"):
            write()
    offloaded.close()
    for name, weight in model.named_parameters():
        assert type(weight) is nn.Parameter and not vars(weight)
        assert_same_bits(weight, before[name])


def _step(optimizer):
    def write(weight):
        weight.grad = torch.ones_like(weight)
        optimizer([weight]).step()

    return write


def _in_inference_mode(weight):
    with torch.inference_mode():
        weight.detach().zero_()


ONES, IDS_OF_ROWS = torch.ones(2 * WIDTH, WIDTH), torch.tensor([1, 3])
WRITES = {
    "values": lambda weight: weight.data.add_(5),
    "detached": lambda weight: weight.detach().zero_(),
    "foreach": lambda weight: torch._foreach_mul_([weight], 2),
    "foreach, the second": lambda weight: torch._foreach_add_([ONES.clone(), weight], [ONES, ONES]),
    "foreach_lerp": lambda weight: torch._foreach_lerp_([weight], [ONES], 0.5),
    "SGD": _step(functools.partial(torch.optim.SGD, lr=1.0, foreach=False)),
    "SGD, foreach": _step(functools.partial(torch.optim.SGD, lr=1.0, foreach=True)),
    "SGD, fused": _step(functools.partial(torch.optim.SGD, lr=1.0, fused=True)),
    "AdamW, fused": _step(functools.partial(torch.optim.AdamW, lr=1.0, fused=True)),
    "set": lambda weight: weight.set_(ONES),
    "set data": lambda weight: setattr(weight, "data", ONES),
    "set data of values": lambda weight: setattr(weight.detach(), "data", ONES),
    "copy": lambda weight: weight.copy_(ONES),
    "item": lambda weight: weight.__setitem__(0, 1.0),
    "item of values": lambda weight: weight.data.__setitem__(0, 1.0),
    "out": lambda weight: torch.mul(ONES, 2, out=weight),
    "out of values": lambda weight: torch.mul(ONES, 2, out=weight.data),
    "out, a tuple": lambda weight: torch.max(ONES, 1, out=(weight.data[:, 0], torch.zeros(2 * WIDTH).long())),
    "out, a resting tuple": lambda weight: torch.aminmax(ONES, out=(weight, weight)),
    "init": lambda weight: nn.init.xavier_uniform_(weight),
    "init of values": lambda weight: nn.init.normal_(weight.data),
    "row": lambda weight: weight[0].zero_(),
    "rows": lambda weight: [row.zero_() for row in weight],
    "view": lambda weight: weight.view(-1).add_(1),
    "views": lambda weight: weight.split(8)[1].zero_(),
    "transposed": lambda weight: weight.T.mul_(2),
    "diagonal": lambda weight: weight.diagonal().fill_(0),
    "itself": lambda weight: weight.contiguous().zero_(),
    "operator": lambda weight: weight.data.__iadd__(1),
    "masked": lambda weight: weight.masked_fill_(weight > 0, 0),
    "index_copy": lambda weight: weight.index_copy_(0, IDS_OF_ROWS, ONES[:2]),
    "max_norm": lambda weight: nn.functional.embedding(IDS_OF_ROWS, weight.detach(), max_norm=1e-3),
    "operation": lambda weight: torch.ops.aten.mul_.Tensor(weight, ONES),
    "resize": lambda weight: weight.detach().resize_(3),
    "by a function": lambda weight: weight.detach().apply_(lambda value: 0.0),
    "parameter of values": lambda weight: nn.Parameter(weight.data).data.zero_(),
    "vector_to_parameters": lambda weight: nn.utils.vector_to_parameters(ONES.view(-1), [weight]),
    "inference mode": _in_inference_mode,
    "transform": lambda weight: torch.func.grad(lambda x: weight.detach().zero_().sum() * x)(torch.ones(())),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@torch.no_grad()
def test_nothing_that_is_written_is_lost(write):
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with offload(model):
        with pytest.raises(RuntimeError, match="blocks.2.up.weight is offloaded and cannot be written to: close"):
            write(model.blocks[2].up.weight)
        assert_same_bits(model.blocks[2].up.weight.detach(), before["blocks.2.up.weight"])
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name])


def test_values_that_were_read():
    """They are as any other tensor, but for writes."""
    model = Net()
    before = model.blocks[2].up.weight.detach().clone()
    offloaded = offload(model)
    values = model.blocks[2].up.weight.detach()
    for other in (values, values.to("cpu"), values.contiguous(), values.view(-1).view_as(values), nn.Parameter(values)):
        assert_same_bits(other.detach(), before)
    assert values.to("cpu") is values and values.stride() == before.stride() and values.grad is None
    assert repr(values) == repr(before)
    file = io.BytesIO()
    torch.save({"values": values, "row": values[3]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same_bits(loaded["row"], before[3])
    for copied in (values.clone(), values + 0, copy.deepcopy(values), loaded["values"], torch.stack(list(values))):
        assert type(copied) is torch.Tensor
        assert_same_bits(copied, before)
        copied.zero_()
    assert_same_bits(values, before)
    assert_same_bits(ibp.compress(values).decompress(), before)
    array = values.numpy()
    assert_same_bits(torch.from_numpy(array.copy()), before)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    leaf = model.blocks[2].up.weight.detach().requires_grad_()
    (leaf * 2).sum().backward()
    assert_same_bits(leaf.grad, torch.full_like(before, 2))
    (grad,) = torch.autograd.grad((leaf * 3).sum(), leaf)
    assert_same_bits(grad, torch.full_like(before, 3))
    target = torch.zeros_like(before)
    target.copy_(model.blocks[2].up.weight)
    assert_same_bits(target, before)
    offloaded.close()
    with pytest.raises(RuntimeError, match="write to a clone"):
        values.zero_()


def test_a_weight_that_was_replaced():
    """Another parameter in the place of an offloaded one is what the model has, computes with and loads."""
    model = Net()
    offloaded = offload(model)
    model.head.weight = nn.Parameter(torch.ones(64, WIDTH), requires_grad=False)
    with torch.no_grad():
        assert_same_bits(model(IDS)[..., 0], model(IDS)[..., 1])
    assert_same_bits(model.state_dict()["head.weight"], torch.ones(64, WIDTH))
    model.head.load_state_dict({"weight": torch.zeros(64, WIDTH)})
    assert not model.head.weight.any()
    offloaded.close()
    assert not model.head.weight.any()


CONVERSIONS = {
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "bfloat16": lambda module: module.bfloat16(),
    "to dtype": lambda module: module.to(torch.float16),
    "to device": lambda module: module.to("meta"),
    "to device and dtype": lambda module: module.to("cpu", torch.float16),
    "to_empty": lambda module: module.to_empty(device="cpu"),
    "type": lambda module: module.type(torch.float64),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
@torch.no_grad()
def test_a_conversion_is_refused_before_it_changes_anything(convert):
    model = nn.Sequential(nn.LayerNorm(WIDTH), Net().blocks)
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    offloaded = offload(model, group_bytes=1)
    for module in (model, model[1], model[1][4], model[1][4].up):
        with pytest.raises(
            RuntimeError, match=r"up.weight is offloaded and keeps its dtype, device and memory format: close\(\) first"
        ):
            convert(module)
        assert module.float() is module and module.to("cpu", torch.float32) is module
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name])
    offloaded.close()
    assert not any("_apply" in vars(module) for module in model.modules())
    assert model.half()[1][4].up.weight.dtype == torch.float16


@pytest.mark.parametrize("tie", [False, True])
def test_state_dict(tie):
    model = Net(tie=tie)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    offloaded = offload(model)
    for module, prefix in ((model, ""), (model.blocks[1], "blocks.1."), (model.blocks[1].up, "blocks.1.up.")):
        state = module.state_dict()
        assert list(state) == [name[len(prefix) :] for name in before if name.startswith(prefix)]
        for name, value in state.items():
            assert type(value) is torch.Tensor and value.is_contiguous()
            assert_same_bits(value, before[prefix + name])
    assert_same_bits(model.state_dict(prefix="a.")["a.head.weight"], before["head.weight"])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert set(torch.load(file, weights_only=True)) == set(before)
    if tie:
        state = model.state_dict()
        assert state["head.weight"] is state["embed.weight"]
    with pytest.raises(RuntimeError, match="embed.weight is offloaded.*close"):
        model.load_state_dict(before)
    offloaded.close()
    model.load_state_dict(before)
    Net().load_state_dict(before)


def test_remove():
    model = Net()
    model.blocks[0].up.weight.requires_grad_(False)
    before = {name: (value.detach().clone(), value.requires_grad) for name, value in model.named_parameters()}
    offloaded = offload(model, lookahead=1)
    with torch.no_grad():
        model(IDS)
    stats = offloaded.stats()
    memory = f"nbytes={stats.nbytes:,} ({stats.nbytes / stats.weight_bytes:.1%} of {stats.weight_bytes:,})"
    assert memory in repr(offloaded) and "closed" not in repr(offloaded)
    assert stats.nbytes == stats.host_bytes + stats.device_bytes
    offloaded.close()
    offloaded.close()
    assert "closed" in repr(offloaded)
    for name, value in model.named_parameters():
        assert_same_bits(value, before[name][0])
        assert value.requires_grad == before[name][1]
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks and not module._state_dict_hooks
        assert not module._load_state_dict_pre_hooks and "forward" not in vars(module)
    offload(model).close()


def test_remove_from_within_a_call():
    model = Net()
    offloaded = offload(model)
    handle = model.blocks[1].up.register_forward_pre_hook(lambda module, args: offloaded.close())
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="in use"):
            model(IDS)
        handle.remove()
        model(IDS)
    offloaded.close()


def test_what_cannot_be_copied():
    model = Net()
    offloaded = offload(model)
    with pytest.raises(RuntimeError, match="copied"):
        copy.deepcopy(model)
    for error, thing in ((RuntimeError, model), (TypeError, offloaded)):
        with pytest.raises(error, match="pickled"):
            pickle.dumps(thing)
    with pytest.raises(RuntimeError, match="pickled"):
        torch.save(model, io.BytesIO())
    offloaded.close()
    copy.deepcopy(model)


def test_a_model_without_resting_weights_is_not_copied_either():
    """All of its weights stay on the device, and its hooks are closures."""
    model = Net()
    offloaded = offload(model.blocks, resident_bytes=1 << 30)
    assert not any(map(is_offloaded, model.parameters()))
    for thing in (model, model.blocks):
        with pytest.raises(RuntimeError, match="copied"):
            copy.deepcopy(thing)
        with pytest.raises(RuntimeError, match="pickled"):
            pickle.dumps(thing)
        assert len(list(copy.copy(thing).parameters())) == len(list(thing.parameters()))
    offloaded.close()
    copy.deepcopy(model)
    pickle.dumps(model)


def test_models_beside_each_other():
    models = [Net(seed=seed) for seed in range(3)]
    with torch.no_grad():
        wanted = [model(IDS) for model in models]
        handles = [offload(model, lookahead=1) for model in models]
        for _ in range(2):
            for model, result in zip(models, wanted):
                assert_same_bits(model(IDS), result)
        handles[0].close()
        for model, result in zip(models, wanted):
            assert_same_bits(model(IDS), result)


def test_offloaded_already():
    model = Net()
    offloaded = offload(model.blocks[1])
    borrower = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH))
    borrower[0].weight = model.blocks[1].up.weight
    for other in (model.blocks[1], model, borrower):
        with pytest.raises(ValueError, match="already"):
            offload(other)
    offloaded.close()
    offload(model)


# ---- errors and interrupts ----


@pytest.mark.parametrize("error", [RuntimeError, Interrupted])
@pytest.mark.parametrize("lookahead", [0, 2])
@torch.no_grad()
def test_errors_inside_a_layer(error, lookahead):
    model = Net()
    wanted = model(IDS)
    offloaded = offload(model, lookahead=lookahead)
    for number, module in enumerate([model.embed, model.blocks[0].up, model.blocks[3].down, model.head]):

        def fail(*_):
            raise error

        handle = module.register_forward_hook(fail) if number % 2 else module.register_forward_pre_hook(fail)
        with pytest.raises(error):
            model(IDS)
        handle.remove()
        assert_same_bits(model(IDS), wanted)
    offloaded.close()
    assert_same_bits(model(IDS), wanted)


@torch.no_grad()
def test_a_forward_that_other_code_has_wrapped():
    """It stays, and works after close()."""
    model, calls = Net(), []
    wanted, offloaded = model(IDS), offload(model)
    forward = model.embed.forward
    assert "forward" in vars(model.embed)

    def wrapped(ids):
        calls.append(ids)
        return forward(ids)

    model.embed.forward = wrapped
    assert_same_bits(model(IDS), wanted)
    offloaded.close()
    assert_same_bits(model(IDS), wanted)
    assert len(calls) == 2


def installed(model):
    """(module, attribute, names or keys of what is there) for all that hooks and other forwards leave in a model."""
    for name, module in model.named_modules():
        for attribute, held in vars(module).items():
            yield name, attribute, tuple(held) if isinstance(held, dict) else None


@pytest.mark.slow
@torch.no_grad()
def test_interrupted_while_it_is_installed():
    """Wherever it is, the model is as it was, and can be offloaded."""
    model = nn.Sequential(nn.Embedding(100, 64), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))).eval().bfloat16()
    ids, before = torch.arange(9), list(installed(model))
    wanted = model(ids)

    def interrupted(moment):
        offloaded, interrupts = interrupt_at(moment, None, lambda: offload(model))
        if offloaded is not None:
            offloaded.close()
        return bool(interrupts)

    end = bisect.bisect_left(range(1 << 13), True, key=lambda moment: not interrupted(moment))
    assert 1000 < end < 1 << 13
    for moment in (*range(0, end, 53), *range(end - 500, end, 3)):
        assert interrupted(moment)
        assert not any(map(is_offloaded, model.parameters())) and list(installed(model)) == before
    with offload(model):
        assert any(map(is_offloaded, model.parameters()))
        assert_same_bits(model(ids), wanted)
    assert_same_bits(model(ids), wanted)


@torch.no_grad()
def test_a_part_is_offloaded_apart():
    """The part's own hooks are removed, and not those of the model, which has left the part's small weights alone."""
    part = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model = nn.Sequential(nn.Linear(512, 64), part, nn.Linear(64, 512)).eval()
    with ibp.offload(model, ["cpu", "cpu"], min_bytes=20_000):
        before = list(installed(model))
        with ibp.offload(part, "cpu", min_bytes=0):
            assert list(installed(model)) != before
        assert list(installed(model)) == before


@torch.no_grad()
def test_removed_after_an_interrupt():
    """What an interrupted call had in use is no longer; what a call of this moment has is."""
    model = Net()
    wanted = model(IDS)
    offloaded = offload(model)

    def interrupt(*_):
        with pytest.raises(RuntimeError, match="in use"):
            offloaded.close()
        raise Interrupted

    handle = model.blocks[1].down.register_forward_pre_hook(interrupt)
    with pytest.raises(Interrupted):
        model(IDS)
    handle.remove()
    offloaded.close()
    assert_same_bits(model(IDS), wanted)


def test_arguments_are_brought_to_the_device_of_their_module():
    device, near, cache = torch.device("meta"), torch.ones(2), object()
    args = moved((near, [near, 3], (near,)), device)
    kwargs = moved({"mask": near, "more": {"x": near}, "cache": cache}, device)
    found = [args[0], args[1][0], args[2][0], kwargs["mask"], kwargs["more"]["x"]]
    assert all(tensor.is_meta and tensor.shape == near.shape for tensor in found)
    assert args[1][1] == 3 and kwargs["cache"] is cache


def test_a_damaged_table():
    model = Net()
    with torch.no_grad():
        offloaded = offload(model, lookahead=1)
        (weight,) = [weight for group in offloaded._plan.users[model.blocks[2].up] for weight in group.weights]
        kept = weight.table.lengths.clone()
        weight.table.lengths.fill_(1)
        for _ in range(2):
            with pytest.raises(ibp.CorruptTableError):
                model(IDS)
        weight.table.lengths.copy_(kept)
        wanted = Net()(IDS)
        assert_same_bits(model(IDS), wanted)


@pytest.mark.parametrize("number", [0, 1, 5, 10])
def test_interrupted_while_it_compresses(number, monkeypatch):
    model = Net(tie=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compress = WeightCompressor.compress
    calls = iter(range(100))

    def interrupted(*args, **options):
        if next(calls) == number:
            raise Interrupted
        return compress(*args, **options)

    monkeypatch.setattr(WeightCompressor, "compress", interrupted)
    with pytest.raises(Interrupted):
        offload(model)
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name])
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"model": 3}, TypeError, "model is a int; wanted a torch.nn.Module"),
        ({"device": []}, ValueError, "at least one"),
        ({"device": "disk"}, ValueError, "disk"),
        ({"device": 1.5}, TypeError, "device"),
        ({"resident": "compressed"}, ValueError, r"wanted 'raw': for coded weights .* use ibp.nn.compress\(model\)"),
        ({"resident_bytes": -1}, ValueError, "resident_bytes"),
        ({"lookahead": -1}, ValueError, "lookahead"),
        ({"group_bytes": 0}, ValueError, "group_bytes"),
        ({"min_bytes": 1 << 40}, ValueError, "no frozen weight of at least 1,099,511,627,776 bytes"),
        ({"max_sms": 0}, ValueError, "max_sms"),
        ({"scheme": "zip"}, ValueError, "zip"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    model = arguments.pop("model", None) or Net()
    with pytest.raises(error, match=message):
        offload(model, **arguments)


def test_offloaded_says_that_it_is_no_model():
    model = Net()
    where = r": ibp.offload\(model\) returned it, and changed the model in place. Do not assign the result"
    with offload(model) as offloaded:
        with pytest.raises(TypeError, match="'Offloaded' object is not callable" + where):
            offloaded(IDS)
        with pytest.raises(AttributeError, match="'Offloaded' object has no attribute 'generate'" + where):
            offloaded.generate(IDS)
        with pytest.raises(TypeError, match="'Offloaded' object is no torch.nn.Module" + where):
            offload(offloaded)


# ---- gradients ----


def test_training_mode_keeps_what_is_trained():
    model = Net().train()
    with pytest.raises(ValueError, match="eval"):
        offload(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.2" in name)
    offloaded = offload(model)
    assert not is_offloaded(model.blocks[2].up.weight)
    model(IDS).sum().backward()
    assert model.blocks[2].up.weight.grad is not None
    offloaded.close()


class Adapter(nn.Module):
    """A frozen linear layer and a trained product of low rank beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(base.out_features)
        self.a = nn.Parameter(torch.randn(4, base.in_features, generator=generator))
        self.b = nn.Parameter(torch.randn(base.out_features, 4, generator=generator) * 0.1)

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


def with_adapters():
    model = Net().requires_grad_(False).train()
    for block in model.blocks:
        block.up, block.down = Adapter(block.up), Adapter(block.down)
    return model


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_are_trained(checkpointed, lookahead):
    models = [with_adapters(), with_adapters()]
    losses = []
    for number, model in enumerate(models):
        if checkpointed:
            model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
        if number:
            offload(model, lookahead=lookahead)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
        losses.append([])
        for _ in range(4):
            loss = model(IDS).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    for one, other in zip(*(model.parameters() for model in models)):
        if one.requires_grad:
            assert_same_bits(one, other)
            assert_same_bits(one.grad, other.grad)


def test_gradients_of_inputs():
    torch.manual_seed(3)
    plain = nn.Sequential(nn.MultiheadAttention(WIDTH, 4), nn.Linear(WIDTH, WIDTH)).eval()
    model = copy.deepcopy(plain)
    offloaded = offload(model)
    xs = [torch.ones(5, WIDTH).requires_grad_() for _ in range(2)]
    for x, net in zip(xs, (plain, model)):
        y = net[1](net[0](x * 0.5, x, x, need_weights=False)[0])
        net[1](torch.zeros(1, WIDTH))  # other weights take the memory
        if net is model:
            assert all(not parameter.requires_grad for parameter in net.parameters() if parameter.dim() > 1)
        y.square().sum().backward()
    assert_same_bits(xs[0].grad, xs[1].grad)
    y = model[1](model[0](xs[1], xs[1], xs[1])[0])
    offloaded.close()  # between forward and backward
    y.sum().backward()


def test_results_under_inference_mode_and_then_with_gradients():
    model, plain = Net(), Net()
    offload(model, lookahead=1)
    with torch.inference_mode():
        assert_same_bits(model(IDS).clone(), plain(IDS).clone())
    out = model.blocks[0](torch.ones(1, WIDTH, requires_grad=True))
    out.sum().backward()


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).square().sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](f(x))[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x[0, 0]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x + 1,))[1],
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x[0, 0]),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).square().sum())(x[0, 0]),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "gradients of samples": lambda f, x: torch.func.vmap(torch.func.grad(lambda y: f(y).square().sum()))(x),
}


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(transform, lookahead):
    """Results are the plain model's, and calls before and after have the same bits."""
    model = Net().requires_grad_(False)
    x = torch.randn(2, 3, WIDTH)

    def layers(y):
        for block in model.blocks:
            y = block(y)
        return model.head(y)

    wanted, outputs = transform(layers, x), model(IDS)
    offloaded = offload(model, lookahead=lookahead)
    for _ in range(2):
        torch.testing.assert_close(transform(layers, x), wanted)
        assert_same_bits(model(IDS), outputs)
        assert_same_bits(torch.func.vmap(model)(IDS), outputs)
    offloaded.close()
    assert_same_bits(model(IDS), outputs)


def test_a_model_that_differentiates_itself():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def energy(self, x):
            return self.outer(self.inner(x).tanh()).sum()

        def forward(self, x):
            return torch.func.vmap(torch.func.grad(self.energy))(x)

    model, x = Force().eval().requires_grad_(False), torch.randn(2, WIDTH)
    wanted = model(x)
    with offload(model) as offloaded:
        for _ in range(2):
            torch.testing.assert_close(model(x), wanted)
        assert not any(group.uses for group in offloaded._events.groups)


@torch.no_grad()
def test_a_call_without_data_fetches_real_weights():
    """FakeTensorMode, which gives shapes alone, takes no part in the fetches that later calls rely on."""
    model = Net()
    wanted = model(IDS)
    offload(model, lookahead=1)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model.blocks[0](mode.from_tensor(torch.randn(2, WIDTH))).shape == (2, WIDTH)
    assert_same_bits(model(IDS), wanted)


def test_closed_in_inference_mode():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).eval()
    offloaded = offload(model)
    with torch.inference_mode():
        state = model.state_dict()
        offloaded.close()
    model(torch.randn(2, WIDTH)).sum().backward()
    assert model[0].weight.grad is not None and not state["0.weight"].is_inference()


def test_an_embedding_of_the_shape_of_a_matrix():
    """Weights of one kind share a codebook only if their rows have one length."""
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64)).eval().requires_grad_(False)
    wanted = model(IDS)
    offload(model)
    assert_same_bits(model(IDS), wanted)


def test_saved_hooks_of_the_caller_are_kept():
    model = Net()
    offload(model)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(1) or x, lambda x: x):
        x = torch.ones(2, WIDTH, requires_grad=True)
        model.blocks[0](x)
        packed.clear()
        (x * x).sum()
        assert packed


# ---- what stays on the device ----


@pytest.mark.parametrize("share", [0, 0.3, 0.7, 5, None])
@torch.no_grad()
def test_resident_weights(share):
    model = Net()
    wanted, weights = model(IDS), {name: value.clone() for name, value in model.state_dict().items()}
    total = sum(p.nbytes for p in model.parameters() if p.nbytes >= 1000) - model.embed.weight.nbytes
    num_bytes = None if share is None else int(share * total)
    offloaded = offload(model, resident_bytes=num_bytes, lookahead=1)
    assert_same_bits(model(IDS), wanted)
    raw = [p.nbytes for name, p in model.named_parameters() if p.nbytes >= 1000 and not is_offloaded(p)]
    assert sum(raw) <= (num_bytes or 0)
    assert sum(raw) >= min(total, (num_bytes or 0) - 20000)
    for name, value in model.state_dict().items():
        assert_same_bits(value, weights[name])
    assert offloaded.stats().weight_bytes == total + model.embed.weight.nbytes
    offloaded.close()
    assert_same_bits(model(IDS), wanted)


def layers(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(512, 256), *(nn.Linear(256, 256) for _ in range(4))).to(dtype).eval()


@torch.no_grad()
def test_a_part_of_coded_modules_is_left_alone():
    """Tables of ibp.nn stay where they are, and the other weights are streamed."""
    model = layers()
    wanted, before = model(IDS), {name: value.clone() for name, value in model.state_dict().items()}
    report = ibp.nn.compress(model, include=["0", "2"], min_bytes=1000)
    assert report.coded == ("0", "2")
    tables = model[0].weight, model[2].weight
    offloaded = offload(model, lookahead=1, group_bytes=1)
    for number in (1, 2):
        assert_same_bits(model(IDS), wanted)
        assert offloaded.stats().uses == 3 * number
    assert (model[0].weight, model[2].weight) == tables and is_offloaded(model[1].weight)
    state = model.state_dict()
    assert list(state) == list(before)
    for name, value in state.items():
        assert_same_bits(value, before[name])
    report = ibp.nn.compress(model, min_bytes=1000)
    assert not report.coded and set(report.plain) == {"1", "3", "4"}  # offloaded weights are not coded again
    offloaded.close()
    assert_same_bits(model(IDS), wanted)
    assert (model[0].weight, model[2].weight) == tables
    with pytest.raises(ValueError, match="no frozen weight"):
        ibp.nn.compress(model, min_bytes=1000)
        offload(model)


@torch.no_grad()
def test_a_part_of_coded_modules_stays_on_the_gpu(cuda):
    plain, model = layers().to(cuda), layers()
    ids = IDS.to(cuda)
    wanted = plain(ids)
    for name in ("0", "2"):
        ibp.nn.compress(model, include=name, min_bytes=1000, fused=False)
        model.get_submodule(name).to(cuda)
    with ibp.offload(model, cuda, min_bytes=1000):
        for _ in range(2):
            assert_same_bits(model(ids), wanted)
        assert model[0].weight.is_cuda and model[2].weight.is_cuda and is_offloaded(model[1].weight)
        for name, value in model.state_dict().items():
            assert_same_bits(value.cpu(), plain.state_dict()[name].cpu())


def test_resident_groups_lie_apart():
    model = Net(16)
    plan = plan_for(model, [torch.device("cpu")], min_bytes=1000, group_bytes=40000)
    blocks = [group for group in plan.groups if group.name.startswith("blocks")]
    assert len(blocks) == 16
    chosen = spread(blocks, 4 * blocks[0].num_bytes)
    numbers = sorted(blocks.index(group) for group in chosen)
    assert len(numbers) == 4 and all(3 <= b - a <= 5 for a, b in zip(numbers, numbers[1:]))
    assert spread(blocks, 0) == [] and set(spread(blocks, 1 << 40)) == set(blocks)


@torch.no_grad()
def test_several_devices_take_turns():
    """Blocks alternate, and arguments are brought to them; here all devices are the CPU."""
    model = Net()
    wanted = model(IDS)
    plan = plan_for(model, 2 * [torch.device("cpu")], min_bytes=1000, group_bytes=20000)
    lanes = {group.name: group.device_number for group in plan.groups}
    assert lanes["blocks.0.up"] == lanes["blocks.2.down"] == lanes["head"] == 0 and lanes["blocks.3.up"] == 1
    offloaded = offload(model, device=["cpu", "cpu"], lookahead=2)
    for _ in range(2):
        assert_same_bits(model(IDS), wanted)
    assert offloaded.stats().misses == 0
    offloaded.close()
    assert_same_bits(model(IDS), wanted)


# ---- threads ----


def in_four_threads(work):
    """Calls work(number) in four threads. Raises what one of them raised."""

    def run(number):
        with torch.no_grad():
            work(number)

    in_threads(*(functools.partial(run, number) for number in range(4)))


def test_threads():
    model = Net()
    wanted = [model(ids).detach() for ids in IDS]
    offload(model, lookahead=1)

    def work(number):
        for _ in range(20):
            assert_same_bits(model(IDS[number % 2]), wanted[number % 2])

    in_four_threads(work)


def test_more_in_use_than_the_arena_holds():
    """Four threads are in four layers at once: three of the weights get memory of their own, for as long."""
    model = Net()
    layers = [block.up for block in model.blocks[:4]]
    x = torch.randn(3, WIDTH)
    wanted = [layer(x).detach() for layer in layers]
    offloaded = offload(model, group_bytes=1)
    least = offloaded.stats().device_bytes
    barrier, most = threading.Barrier(4), []

    def meet(*_):
        barrier.wait(60)
        most.append(offloaded.stats().device_bytes)
        barrier.wait(60)

    for layer in layers:
        layer.register_forward_pre_hook(meet)
    in_four_threads(lambda number: assert_same_bits(layers[number](x), wanted[number]))
    assert set(most) == {least + 3 * layers[0].weight.nbytes}
    assert offloaded.stats().device_bytes == least

    def gradient(layer):
        with torch.enable_grad():
            given = x.clone().requires_grad_()
            layer(given).sum().backward()
            return given.grad

    copies = [nn.Linear(WIDTH, 2 * WIDTH) for _ in layers]
    for layer, other in zip(layers, copies):
        other.load_state_dict(layer.state_dict())
    in_four_threads(lambda number: assert_same_bits(gradient(layers[number]), gradient(copies[number])))
    offloaded.close()


# ---- checkpoints ----


def save(state, directory, num_shards):
    from safetensors.torch import save_file

    names, index = list(state), {}
    for shard in range(num_shards):
        file = f"model-{shard}.safetensors" if num_shards > 1 else "model.safetensors"
        part = {name: state[name].contiguous() for name in names[shard::num_shards]}
        save_file(part, directory / file)
        index.update(dict.fromkeys(part, file))
    if num_shards > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def meta_net(**options):
    with torch.device("meta"):
        return Net(**options)


@pytest.mark.parametrize("source", ["file", "directory", "shards", "mapping", "pairs"])
@torch.no_grad()
def test_checkpoints(source, tmp_path):
    plain = Net(dtype=torch.bfloat16)
    state = plain.state_dict()
    if source in ("mapping", "pairs"):
        checkpoint = state if source == "mapping" else iter(state.items())
    else:
        pytest.importorskip("safetensors")
        save(state, tmp_path, 3 if source == "shards" else 1)
        checkpoint = tmp_path / "model.safetensors" if source == "file" else str(tmp_path)
    model = meta_net(dtype=torch.bfloat16)
    held = list(model.parameters())
    offloaded = offload(model, checkpoint=checkpoint, lookahead=1, resident_bytes=20000)
    assert all(one is other for one, other in zip(held, model.parameters()))
    assert_same_bits(model(IDS), plain(IDS))
    offloaded.close()
    assert_same_bits(model(IDS), plain(IDS))
    for name, value in model.state_dict().items():
        assert_same_bits(value, state[name])


@pytest.mark.parametrize("scheme", ["auto", pytest.param("ibp", marks=pytest.mark.slow)])
@torch.no_grad()
def test_compressed_checkpoints_are_opened_directly(scheme, tmp_path):
    """Tables become the weights' own; what does not fit, here of another scheme, is decoded."""
    plain = Net(dtype=torch.bfloat16)
    state = plain.state_dict()
    ibp.save(tmp_path / "plain.safetensors", state)
    report = ibp.checkpoints.compress(
        tmp_path / "plain.safetensors", tmp_path / "m.safetensors", scheme="planes", device="cpu", shard_bytes=30_000
    )
    assert len(report.files) > 1
    for checkpoint in (report.path, tmp_path):
        (tmp_path / "plain.safetensors").unlink(missing_ok=True)
        model = meta_net(dtype=torch.bfloat16)
        offloaded = offload(model, checkpoint=checkpoint, scheme=scheme)
        tables = {weight.name: weight.table for weight in offloaded._plan.weights}
        with ibp.open(report.path) as file:
            own = {name: file[name] for name in file.tables if name in tables}
            assert own
            for name, table in own.items():
                is_same = tables[name].codebook == table.codebook and tables[name].row_bytes == table.row_bytes
                assert is_same == (scheme == "auto" and name != "embed.weight"), name  # whose rows are shorter
        assert_same_bits(model(IDS), plain(IDS))
        offloaded.close()
        for name, value in model.state_dict().items():
            assert_same_bits(value, state[name])


@torch.no_grad()
def test_a_gpu_takes_tables_of_compressed_checkpoints(cuda, tmp_path):
    plain = Wide(num_layers=3)
    ibp.save(tmp_path / "plain.safetensors", plain.state_dict())
    ibp.checkpoints.compress(tmp_path / "plain.safetensors", tmp_path / "m.safetensors", device=cuda)
    (tmp_path / "plain.safetensors").unlink()
    ids = torch.tensor([[1, 999, 3]], device=cuda)
    wanted = plain.to(cuda)(ids)
    with torch.device("meta"):
        model = Wide(num_layers=3)
    model.wanted = plain.wanted
    offloaded = offload(model, device=cuda, checkpoint=tmp_path)
    tables = [weight.table for weight in offloaded._plan.weights if weight.group is not None]
    assert tables and all(table.is_pinned() for table in tables)
    model.forget()
    assert_same_bits(model(ids), wanted)
    model.check(1)
    offloaded.close()


@torch.no_grad()
def test_tables_of_another_dtype_are_decoded():
    plain = Net(dtype=torch.bfloat16)
    tables = {
        name: ibp.compress(value, device="cpu", memory="host") if value.dim() > 1 else value
        for name, value in plain.state_dict().items()
    }
    model = meta_net(dtype=torch.float32)
    offload(model, checkpoint=tables)
    assert_same_bits(model(IDS), plain.float()(IDS))


@torch.no_grad()
def test_a_checkpoint_without_the_second_name_of_a_tied_weight():
    plain = Net(tie=True)
    state = {name: value for name, value in plain.state_dict().items() if name != "head.weight"}
    model = meta_net()
    model.head.weight = model.embed.weight
    offload(model, checkpoint=state)
    assert model.head.weight is model.embed.weight
    assert_same_bits(model(IDS), plain(IDS))


@torch.no_grad()
def test_a_checkpoint_of_another_dtype():
    plain = Net(dtype=torch.bfloat16)
    model = meta_net(dtype=torch.float32)
    offload(model, checkpoint=plain.state_dict())
    assert_same_bits(model(IDS), plain.float()(IDS))


def test_checkpoints_that_do_not_fit(tmp_path):
    state = Net().state_dict()
    for wrong, message in (
        ({k: v for k, v in state.items() if k != "blocks.1.up.weight"}, "lacks 1 .*'blocks.1.up.weight'"),
        ({k: v for k, v in state.items() if k != "scale"}, "lacks 1 .*'scale'"),
        ({**state, "other": torch.ones(3)}, "'other', which the model has not"),
        ({**state, "head.weight": torch.ones(3, 3)}, r"head.weight has shape \[3, 3\].*wanted \[64, 48\]"),
    ):
        with pytest.raises(ValueError, match=message):
            offload(meta_net(), checkpoint=wrong)
    with pytest.raises(RuntimeError, match="meta device: give its values as checkpoint="):
        offload(meta_net())
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        offload(meta_net(), checkpoint=tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"has no files \*.safetensors"):
        offload(meta_net(), checkpoint=tmp_path)
    model = meta_net()
    model.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(RuntimeError, match="buffer table"):
        offload(model, checkpoint=state)


# ---- torch.compile ----


@pytest.mark.slow
@pytest.mark.parametrize("part", ["blocks", "model"])
@torch.no_grad()
def test_compiled(part):
    torch._dynamo.reset()
    model, plain = Net(2), Net(2)
    offloaded = offload(model, lookahead=1)
    for net in (model, plain):
        for module in net.blocks if part == "blocks" else [net]:
            module.compile(backend="aot_eager")
    for _ in range(3):
        assert_same_bits(model(IDS), plain(IDS))
    offloaded.close()
    assert_same_bits(model(IDS), plain(IDS))


# ---- GPUs ----


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8], ids=str
)
@pytest.mark.parametrize("options", [{}, {"max_sms": 4, "lookahead": 1}], ids=str)
@torch.no_grad()
def test_gpu_weights(cuda, options, dtype):
    model = Wide(dtype)
    with ibp.offload(model, cuda, group_bytes=1 << 24, **options) as offloaded:
        for _ in range(4):
            model(IDS.to(cuda))
        model.check(4)
        stats = offloaded.stats()
        assert stats.misses == 0 and stats.uses == 4 * len(model.layers)
        assert stats.link_bytes > 0
        assert 0 < stats.waited_seconds <= stats.seconds + 1
    assert not any(parameter.is_cuda for parameter in model.parameters())


@pytest.mark.parametrize("options", [{}, {"resident_bytes": 1 << 14}], ids=str)
@torch.no_grad()
def test_gpu_results(cuda, options):
    plain, model = Net(dtype=torch.bfloat16).to(cuda), Net(dtype=torch.bfloat16)
    ids = IDS.to(cuda)
    wanted = plain(ids)
    with ibp.offload(model, cuda, min_bytes=1000, group_bytes=20000, **options):
        for _ in range(3):
            assert_same_bits(model(ids), wanted)
        with torch.cuda.stream(torch.cuda.Stream(cuda)):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream(cuda))
            assert_same_bits(model(ids), wanted)
        for name, value in model.state_dict().items():
            assert_same_bits(value.cpu(), plain.state_dict()[name].cpu())
        assert next(model.parameters()).is_cuda
    assert_same_bits(model(IDS).float(), Net(dtype=torch.bfloat16)(IDS).float())


def test_gpu_gradients(cuda):
    models = [with_adapters().to(cuda), with_adapters()]
    offloaded = ibp.offload(models[1], cuda, min_bytes=1000, group_bytes=20000)
    for model in models:
        model(IDS.to(cuda)).square().mean().backward()
    for one, other in zip(*(model.parameters() for model in models)):
        if one.requires_grad:
            assert_same_bits(one.grad, other.grad)
    offloaded.close()


def test_gpu_transforms(cuda):
    """The first use of all weights is in a transform."""
    plain, model = (Net().requires_grad_(False) for _ in range(2))
    plain.to(cuda)
    x = torch.randn(3, WIDTH, device=cuda)
    ibp.offload(model, cuda, min_bytes=1000, group_bytes=20000)
    grads = [torch.func.grad(lambda y, net=net: net.blocks[0](y).square().sum())(x) for net in (plain, model)]
    torch.testing.assert_close(*grads)
    assert_same_bits(model(IDS.to(cuda)), plain(IDS.to(cuda)))


@torch.no_grad()
def test_gpu_memory(cuda):
    """The device holds the arena, the ring and the index, whatever the model weighs; the host the coded rows."""
    model = Wide(num_layers=12)
    ibp.decompress(ibp.compress(torch.zeros(64, 64)), device=cuda)
    torch.ones(64, 64, dtype=torch.bfloat16, device=cuda) @ torch.ones(64, 64, dtype=torch.bfloat16, device=cuda)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated(cuda)
    offloaded = ibp.offload(model, cuda, group_bytes=1 << 23)
    model(IDS.to(cuda))
    model.forget()
    stats = offloaded.stats()
    used = torch.cuda.memory_allocated(cuda) - before
    assert stats.device_bytes <= used + (1 << 20) and used <= stats.device_bytes + (4 << 20)
    assert stats.host_bytes < 0.7 * stats.weight_bytes
    assert stats.device_bytes < 0.7 * stats.weight_bytes
    offloaded.close()
    del model, offloaded
    gc.collect()
    assert torch.cuda.memory_allocated(cuda) - before < 4 << 20


def test_without_room(monkeypatch):
    """Memory that is not there for the second device leaves the model as it was."""
    model, made = Wide(num_layers=3, width=512), []

    def fetcher(device, arena_bytes, max_sms):
        if made:
            raise torch.OutOfMemoryError("no room")
        made.append(WeightFetcher(device, arena_bytes, max_sms))
        return made[-1]

    before = {name: parameter for name, parameter in model.named_parameters()}
    monkeypatch.setattr("ibp._offload.events.WeightFetcher", fetcher)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        offload(model, device=["cpu", "cpu"])
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    monkeypatch.undo()
    with torch.no_grad(), offload(model):
        model(IDS)
    model.check(1)


def test_gpu_without_room(cuda):
    model = Wide()
    gc.collect()
    before = torch.cuda.memory_allocated(cuda)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-4, cuda)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            ibp.offload(model, cuda)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    assert torch.cuda.memory_allocated(cuda) - before < 1 << 20
    assert not any(parameter.is_cuda for parameter in model.parameters())
    with torch.no_grad(), ibp.offload(model, cuda):
        model(IDS.to(cuda))
    model.check(1)


@torch.no_grad()
def test_gpu_graphs(cuda):
    """A layer whose weights are streamed cannot be captured; one that stays on the GPU can."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128)).eval()
    x = torch.ones(2, 64, device=cuda)
    with ibp.offload(model, cuda, min_bytes=20000, group_bytes=1):
        wanted = model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model[0](x)
        graph.replay()
        assert_same_bits(model[1](out), wanted)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match="cannot capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            model[1](out)
        assert_same_bits(model(x), wanted)


def test_gpu_threads(cuda):
    """Each on a stream of its own."""
    model, plain = Net(), Net().to(cuda)
    with torch.no_grad():
        wanted = [plain(ids.to(cuda)) for ids in IDS]
    offloaded = ibp.offload(model, cuda, min_bytes=1000, group_bytes=20000)

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream(cuda)):
            for _ in range(20):
                out = model(IDS[number % 2].to(cuda))
                torch.cuda.current_stream().synchronize()
                assert_same_bits(out, wanted[number % 2])

    torch.cuda.synchronize()
    in_four_threads(work)
    offloaded.close()


@torch.no_grad()
def test_gpu_checkpoint(cuda, tmp_path):
    pytest.importorskip("safetensors")
    plain = Net(dtype=torch.bfloat16)
    save(plain.state_dict(), tmp_path, 3)
    model = meta_net(dtype=torch.bfloat16)
    with ibp.offload(model, cuda, checkpoint=tmp_path, min_bytes=1000):
        assert_same_bits(model(IDS.to(cuda)), plain.to(cuda)(IDS.to(cuda)))


@torch.no_grad()
def test_gpu_damaged_table(cuda):
    """A fault is raised by the next use of the weight, which is then fetched again."""
    model = Wide(num_layers=8)
    ids = IDS.to(cuda)
    offloaded = ibp.offload(model, cuda, group_bytes=1 << 23)
    (weight,) = offloaded._plan.groups[4].weights
    lengths = handle_on(weight.table, cuda).parts.lengths
    kept = lengths.clone()
    model(ids)
    torch.cuda.synchronize()
    lengths.view(torch.int16).fill_(1)
    torch.cuda.synchronize()
    with pytest.raises(ibp.CorruptTableError):
        for _ in range(3):
            model(ids)
            torch.cuda.synchronize()
    lengths.copy_(kept)
    torch.cuda.synchronize()
    for _ in range(2):
        model.forget()
        with contextlib.suppress(ibp.CorruptTableError):  # noted while it was damaged
            model(ids)
        torch.cuda.synchronize()
    model.forget()
    model(ids)
    model.check(1)
    offloaded.close()


@torch.no_grad()
def test_gpu_dropped_models(cuda):
    """The memory of a model that is dropped while fetches go on is not given to others before they end."""
    for _ in range(10):
        model = Wide(num_layers=3)
        ibp.offload(model, cuda, group_bytes=1 << 23, lookahead=3)
        model.embed(IDS.to(cuda))
        del model
        gc.collect()
        zeros = [torch.zeros(1 << 23, dtype=torch.uint8, device=cuda) for _ in range(12)]
        torch.cuda.synchronize()
        assert not any(bool(part.any()) for part in zeros)
