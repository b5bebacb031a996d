"""`ibp.nn.Experts`: stacked experts with tables, compared with the plain module; in a mixture, by `ibp.nn.compress`."""

import copy
import functools
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ibp
from helpers import assert_same_bits, embedding
from ibp.nn._experts import slots_for, stand_in
from products import kernels_on_the_cpu, lists

WIDTH, INNER, EXPERTS, CHOICES = 128, 64, 8, 2
LEAST = 1 << 12  # bytes of weights that are coded: fewer than a stack has


class PlainExperts(nn.Module):
    """As classes that transformers' `use_experts_implementation` decorates. Weights have escapes."""

    def __init__(self, has_gate=True, has_bias=False, is_transposed=False, has_post_expert_norm=False):
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias, self.is_transposed = EXPERTS, has_gate, has_bias, is_transposed
        self.has_post_expert_norm, self.act_fn = has_post_expert_norm, nn.SiLU()
        self.up = "gate_up_proj" if has_gate else "up_proj"
        for seed, (name, rows, columns) in enumerate(
            ((self.up, INNER * (1 + has_gate), WIDTH), ("down_proj", WIDTH, INNER))
        ):
            weight = embedding(EXPERTS * rows, columns, torch.bfloat16, seed=seed).view(EXPERTS, rows, columns)
            weight[:, ::7, 5] = 0
            self.register_parameter(name, nn.Parameter(weight.mT.contiguous() if is_transposed else weight, False))
            if has_bias:
                bias = nn.Parameter(embedding(EXPERTS, rows, torch.bfloat16, seed=2 + seed), False)
                self.register_parameter(name + "_bias", bias)
        if has_post_expert_norm:
            self.post_expert_norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.eval()

    def _apply_gate(self, x):
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def times(self, name, x, number):
        weight = getattr(self, name)[number]
        y = x @ weight if self.is_transposed else nn.functional.linear(x, weight)
        return y + getattr(self, name + "_bias")[number] if self.has_bias else y

    def forward(self, hidden_states, top_k_index, top_k_weights):
        results = torch.zeros_like(hidden_states)
        for number in range(self.num_experts):
            tokens, choices = torch.where(top_k_index == number)
            if not len(tokens):
                continue
            x = self.times(self.up, hidden_states[tokens], number)
            x = self.times("down_proj", self._apply_gate(x) if self.has_gate else self.act_fn(x), number)
            x = self.post_expert_norm(x) if self.has_post_expert_norm else x
            results.index_add_(0, tokens, (x * top_k_weights[tokens, choices, None]).to(x.dtype))
        return results


class Layer(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.experts = PlainExperts(**options)

    def forward(self, *args, **kwargs):
        return self.experts(*args, **kwargs)


KINDS = [
    {},
    {"has_bias": True},
    {"has_gate": False},
    {"is_transposed": True, "has_bias": True},
    {"has_post_expert_norm": True},
]


def pair(device="cpu", lists_escapes=False, fused=True, **options):
    """A layer, and a coded one of the same weights."""
    plain, coded = Layer(**options).to(device), Layer(**options).to(device)
    report = ibp.nn.compress(coded, min_bytes=LEAST, fused=fused)
    assert report.coded == (f"experts.{plain.experts.up}", "experts.down_proj") and not report.plain
    if lists_escapes:
        for stack in coded.experts.stacks.values():
            lists(stack.weight)
    return plain, coded


def arguments(number, device="cpu", choices=CHOICES):
    x = torch.randn(number, WIDTH).bfloat16()
    index = torch.rand(number, EXPERTS).argsort(1)[:, :choices]
    return x.to(device), index.to(device), torch.rand(number, choices).bfloat16().to(device)


@pytest.fixture
def kernel(monkeypatch):
    with kernels_on_the_cpu(monkeypatch) as calls:
        yield calls


def assert_close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max().nan_to_num(1)))


# ---- slots ----


@given(
    num_experts=st.integers(1, 9),
    ids=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=0, max_size=12),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_slots(num_experts, ids, dtype):
    ids = torch.tensor(ids, dtype=dtype).reshape(-1, 2) % num_experts
    num_spare = torch.tensor(5)
    slots, held, rows = slots_for(ids, num_experts, [3, 1, 7], num_spare)
    assert slots.shape == ids.shape and slots.dtype == dtype and torch.equal(held[slots], ids.long())
    assert 2 <= len(held) <= max(2, min(ids.numel(), num_experts + 1))
    used = held[held >= 0]
    assert torch.equal(used, ids.unique().long()) and torch.equal(held[: len(used)], used)
    assert num_spare == 5 + len(held) - len(used)
    for number, found in zip([3, 1, 7], rows, strict=True):
        wanted = used[:, None] * number + torch.arange(number)
        assert torch.equal(found[: wanted.numel()], wanted.view(-1)) and not found[wanted.numel() :].any()


@pytest.mark.parametrize("bad", [-1, -7, 4, 1 << 40])
def test_slots_of_ids_out_of_range(bad):
    """They remain out of range, and no expert takes their place, however many experts are chosen besides."""
    for ids in ([[bad, 1]], [[0, bad], [1, 2]], [[0, 1], [2, 3], [bad, 0]]):
        ids = torch.tensor(ids)
        slots, held, (rows,) = slots_for(ids, 4, [3])
        assert bool((slots < len(held)).all())
        found, is_bad = held[slots], ids == bad
        assert torch.equal(found[~is_bad], ids[~is_bad])
        assert int(found[is_bad]) == 4 and bool((rows >= 12).any())


# ---- results ----


@torch.no_grad()
def test_one_token_of_many_choices():
    """Its experts are added in the order of the plain module's loop, not of its choices."""
    plain, coded = pair(fused=False)
    for _ in range(10):
        given = arguments(1, choices=5)
        assert_same_bits(coded(*given), plain(*given))


@pytest.mark.parametrize("number", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("options", KINDS, ids=str)
@torch.no_grad()
def test_decoded(options, number):
    """The bits of the plain module, for few tokens and for many."""
    plain, coded = pair(**options)
    args = arguments(number)
    assert_same_bits(coded(*args), plain(*args))
    hidden, index, weights = args
    assert_same_bits(coded(hidden, index.int(), top_k_weights=weights), plain(*args))


@pytest.mark.parametrize("number", [1, 2, 5, 40])
@pytest.mark.parametrize("options", KINDS, ids=str)
@torch.no_grad()
def test_by_the_kernel(kernel, options, number):
    plain, coded = pair(lists_escapes=True, **options)
    for choices in (1, CHOICES, 4):
        kernel.clear()
        args = arguments(number, choices=choices)
        assert_close(coded(*args), plain(*args))
        assert kernel == [number * choices] * 2


@torch.no_grad()
def test_who_is_left_to_the_class(kernel):
    """Calls that the kernel does not take have the plain module's bits."""
    x, index, weights = arguments(3)
    plain, coded = pair(lists_escapes=True)
    assert_same_bits(coded(x, index, top_k_weights=weights), plain(x, index, weights))
    assert_same_bits(coded(x[:0], index[:0], weights[:0]), x[:0])
    _, unfused = pair(lists_escapes=True, fused=False)
    assert_same_bits(unfused(x, index, weights), plain(x, index, weights))
    many = arguments(257, choices=4)
    assert_same_bits(coded(*many), plain(*many))
    for layer in (plain, coded):
        layer.experts.register_buffer("scale", torch.ones(EXPERTS))
    assert_same_bits(coded(x, index, weights), plain(x, index, weights))
    assert not kernel


@torch.no_grad()
def test_irregular_rows(kernel):
    """Where the kernel would leave rows out, experts are decoded."""
    plain, coded = Layer(), Layer()
    for layer in (plain, coded):
        layer.experts.down_proj.data[3, 5] *= 2.0**-60
    ibp.nn.compress(coded, min_bytes=LEAST)
    for stack in coded.experts.stacks.values():
        lists(stack.weight)
    args = arguments(4)
    assert_same_bits(coded(*args), plain(*args))
    assert not kernel


def test_gradients(kernel):
    """Of inputs, by decoded experts."""
    plain, coded = pair(lists_escapes=True)
    x, index, weights = arguments(3)
    grads = []
    for layer in (plain, coded):
        leaf = x.clone().requires_grad_()
        layer(leaf, index, weights).float().square().sum().backward()
        grads.append(leaf.grad)
    assert_same_bits(*grads)
    assert not kernel


@pytest.mark.slow  # torch.compile is loaded
@pytest.mark.parametrize("number", [1, 3])
@torch.no_grad()
def test_compiled(kernel, number):
    plain, coded = pair(lists_escapes=True, has_bias=True)
    torch.compiler.reset()
    args = arguments(number)
    assert_close(torch.compile(coded, fullgraph=True)(*args), plain(*args))
    assert kernel == [number * CHOICES] * 2


# ---- bad input ----


@pytest.mark.parametrize("bad", [-1, EXPERTS, 1 << 40])
@torch.no_grad()
def test_experts_that_are_not_there(bad):
    _, coded = pair()
    x, index, weights = arguments(3)
    index[1] = torch.tensor([bad, 2])
    with pytest.raises(IndexError, match=rf"top_k_index of PlainExperts\[2\] is {bad}; wanted 0 to 7"):
        coded(x, index, weights)


@pytest.mark.parametrize("bad", [-1, EXPERTS, 1 << 40])
@torch.no_grad()
def test_the_kernel_gives_nan_for_experts_that_are_not_there(kernel, bad):
    """To the tokens that ask for them, and to no others."""
    plain, coded = pair(lists_escapes=True, has_bias=True)
    x, index, weights = arguments(3)
    index[1] = torch.tensor([bad, 2])
    y = coded(x, index, weights)
    assert y[1].isnan().all()
    assert_close(y[::2], plain(x[::2], index[::2], weights[::2]))
    assert coded(x[1:2], index[1:2], weights[1:2]).isnan().all()


@torch.no_grad()
def test_gates_that_are_nan(kernel):
    plain, coded = pair(lists_escapes=True)
    x, index, weights = arguments(3)
    weights[1, 0] = torch.nan
    y = coded(x, index, weights)
    assert y[1].isnan().all() and not y[::2].isnan().any()


@pytest.mark.parametrize("number", [1, 3])
@torch.no_grad()
def test_more_choices_than_experts(kernel, number):
    """Some of a token's choices are then the same expert."""
    x, weights = torch.randn(number, WIDTH).bfloat16(), torch.rand(number, EXPERTS + 3).bfloat16()
    index = (torch.arange(number * (EXPERTS + 3)) * 5 % EXPERTS).view(number, -1)
    plain, coded = pair(lists_escapes=True)
    assert_close(coded(x, index, weights), plain(x, index, weights))
    assert kernel


@torch.no_grad()
def test_tokens_that_are_dropped(kernel):
    """Their gates are zero, or there are no tokens, or no choices."""
    plain, coded = pair(lists_escapes=True)
    x, index, weights = arguments(3)
    weights[1] = 0
    y = coded(x, index, weights)
    assert not y[1].any()
    assert_close(y, plain(x, index, weights))
    assert coded(x[:0], index[:0], weights[:0]).shape == (0, WIDTH)
    assert not coded(x, index[:, :0], weights[:, :0]).any()


@torch.no_grad()
def test_damaged_rows():
    """A damaged expert is an error where it is asked for, and nowhere else."""
    plain, coded = pair()
    stack = coded.experts.stacks["down_proj"]
    stack.weight.lengths[5 * WIDTH] = 4000
    x, index, weights = arguments(1)
    with pytest.raises(ibp.CorruptTableError):
        coded(x, torch.tensor([[5, 2]]), weights)
    index = torch.tensor([[1, 2]])
    assert_same_bits(coded(x, index, weights), plain(x, index, weights))


def test_a_call_without_experts():
    _, coded = pair()
    with pytest.raises(TypeError, match="top_k_index"):
        coded(torch.ones(1, WIDTH))


# ---- as modules ----


@pytest.mark.parametrize("options", KINDS, ids=str)
@torch.no_grad()
def test_states(options):
    """Plain and coded ones; a coded table is taken as it is with assign=True."""
    plain, coded = pair(**options)
    args = arguments(3)
    state = coded.state_dict()
    assert state.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert_same_bits(state[name], value)
    tables = ibp.nn.coded_state_dict(coded)
    names = {name for name, value in tables.items() if isinstance(value, ibp.CompressedTensor)}
    end = "_transposed" if plain.experts.is_transposed else ""
    assert names == {f"experts.{plain.experts.up}{end}", f"experts.down_proj{end}"}
    assert all(tables[name].dim() == 3 for name in names)
    for assign in (False, True):
        for held in (state, tables):
            _, other = pair(**options)
            other.experts.stacks["down_proj"].weight.update_([0], torch.ones(1, INNER).bfloat16())
            assert str(other.load_state_dict(held, assign=assign)) == "<All keys matched successfully>"
            assert_same_bits(other(*args), plain(*args))


def test_states_that_do_not_fit():
    _, coded = pair()
    state = coded.state_dict()
    del state["experts.down_proj"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "experts.down_proj"'):
        coded.load_state_dict(state)
    assert coded.load_state_dict(state, strict=False).missing_keys == ["experts.down_proj"]
    state["experts.down_proj"] = torch.ones(EXPERTS, INNER, WIDTH).bfloat16()
    with pytest.raises(RuntimeError, match=r"experts.down_proj has shape \[8, 64, 128\] .* wanted \[8, 128, 64\]"):
        coded.load_state_dict(state)
    state["experts.down_proj.weight"] = state.pop("experts.down_proj")
    with pytest.raises(RuntimeError, match='Unexpected key.*"experts.down_proj.weight"'):
        coded.load_state_dict(state)


def test_tables_of_other_rows():
    """A checkpoint's table whose rows are no rows of the matrices is coded again."""
    plain, coded = pair()
    args = arguments(2)
    state = dict(coded.state_dict())
    state["experts.down_proj"] = ibp.compress(state["experts.down_proj"], row_bytes=4096, layout="packed")
    coded.load_state_dict(state, assign=True)
    assert coded.experts.stacks["down_proj"].weight.shape == (EXPERTS * WIDTH, INNER)
    assert_same_bits(coded(*args), plain(*args))


@torch.no_grad()
def test_copies():
    plain, coded = pair(has_bias=True)
    args, file = arguments(3), io.BytesIO()
    torch.save(coded, file)
    file.seek(0)
    copies = copy.deepcopy(coded), pickle.loads(pickle.dumps(coded)), torch.load(file, weights_only=False)
    for copied in copies:
        assert_same_bits(copied(*args), plain(*args))
    assert "PlainExperts, 8 experts, fused=True" in repr(coded)


# ---- what compress takes ----


def test_what_stays_plain():
    def report(layer, **options):
        return ibp.nn.compress(layer, **{"min_bytes": LEAST, **options})

    assert set(report(Layer(), min_bytes=1 << 20).plain.values()) == {"smaller than min_bytes"}
    noise = Layer()
    bits = torch.randint(-(2**15), 2**15, noise.experts.down_proj.shape).short()
    noise.experts.down_proj.data = bits.view(torch.bfloat16)
    found = report(noise)
    assert found.coded == ("experts.gate_up_proj",) and found.plain == {"experts.down_proj": "without gain"}
    args = arguments(3)
    assert noise(*args).shape == args[0].shape
    shared = nn.ModuleList([Layer(), Layer()])
    shared[1].experts.down_proj = shared[0].experts.down_proj
    assert list(report(shared).plain.values()) == ["in several modules of experts"] * 2
    trains = Layer().train().requires_grad_()
    with pytest.raises(ValueError, match="the weights of the model train"):
        report(trains)
    hooked = Layer()
    hooked.experts.register_forward_hook(lambda *args: None)
    assert set(report(hooked).plain.values()) == {"with hooks"}
    with pytest.raises(ValueError, match="model is a PlainExperts, which cannot be replaced in place"):
        report(PlainExperts())
    assert report(Layer(), exclude="experts").coded == ()


@torch.no_grad()
def test_a_list_of_experts():
    """Experts that are modules of a list, called one by one: their matrices are coded as all others."""

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            parts = (nn.Sequential(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)) for _ in range(4))
            self.experts = nn.ModuleList(parts)

        def forward(self, x, index):
            return torch.stack([self.experts[int(number)](row) for row, number in zip(x, index)])

    torch.manual_seed(0)
    model = Listed().bfloat16().eval()
    x, index = torch.randn(5, WIDTH).bfloat16(), torch.tensor([3, 0, 0, 1, 2])
    wanted = model(x, index)
    assert len(ibp.nn.compress(model, min_bytes=LEAST).coded) == 8
    assert_same_bits(model(x, index), wanted)


# ---- GPUs ----


@pytest.mark.parametrize("number", [1, 2, 5, 40, 600])
@pytest.mark.parametrize("options", KINDS, ids=str)
@torch.no_grad()
def test_on_a_gpu(cuda, options, number):
    plain, coded = pair(cuda, **options)
    args = arguments(number, cuda)
    assert_close(coded(*args), plain(*args))
    moved = pair(**options)[1].to(cuda)
    assert all(stack.weight.is_cuda for stack in moved.experts.stacks.values())
    assert_close(moved(*args), plain(*args))


@pytest.mark.parametrize("number", [1, 3])
@torch.no_grad()
def test_a_cuda_graph(cuda, number):
    """Of experts that each replay asks for; no call waits."""
    plain, coded = pair(cuda, has_bias=True)
    x, index, weights = arguments(number, cuda)
    coded(x, index, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = coded(x, index, weights)
    for _ in range(4):
        new = arguments(number, cuda)
        for held, value in zip((x, index, weights), new):
            held.copy_(value)
        graph.replay()
        assert_close(y, plain(*new))
    torch.cuda.set_sync_debug_mode("error")
    try:
        coded(x, index, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_attribute_that_is_read_later():
    """A function's result takes the place of a module's attribute, also of a stand-in's own, when it is first read."""
    module, calls = nn.Linear(2, 3), []
    first = stand_in(module, {"weight": torch.ones(3, 2), "extra": 1}, nn.Linear)
    later = functools.partial(lambda: calls.append("weight") or 2 * first.weight)
    second = stand_in(first, {"weight": later}, nn.Linear)
    assert not calls and second.extra == 1 and second.bias is module.bias
    assert second.weight.eq(2).all() and second.weight is second.weight and calls == ["weight"]
