"""`ibp.offload` of mixtures of experts: the fetched experts, and results compared by bits with the plain model's."""

import functools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ibp
from counted import calls_of
from helpers import assert_same_bits, embedding, in_threads, pairwise
from ibp._offload.plan import plan_for

WIDTH, INNER, EXPERTS, CHOICES, LAYERS = 256, 128, 8, 2, 3
EXPERT_BYTES = 2 * 2 * WIDTH * INNER  # of a layer
ROWS = EXPERT_BYTES // 4096  # of an expert, in a layer's two stacks
OTHER_BYTES = LAYERS * 2 * WIDTH * WIDTH
CACHED = OTHER_BYTES + LAYERS * EXPERTS * EXPERT_BYTES * 3 // 4  # what stays on a device with most experts
SIZES = {"min_bytes": 5000, "group_bytes": 200_000}
offload = functools.partial(ibp.offload, device="cpu", **SIZES)


class Experts(nn.Module):
    """As classes that transformers' `use_experts_implementation` decorates."""

    def __init__(self, is_transposed=False):
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias, self.is_transposed = EXPERTS, False, False, is_transposed
        shapes = {"up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}
        for seed, (name, shape) in enumerate(shapes.items()):
            weight = embedding(EXPERTS * shape[0], shape[1], torch.bfloat16, seed=seed).view(-1, *shape)
            self.register_parameter(name, nn.Parameter(weight.mT.contiguous() if is_transposed else weight, False))
        self.bias = nn.Parameter(embedding(EXPERTS, INNER, torch.bfloat16, seed=9), False)

    def _apply_gate(self, x):
        raise AssertionError("there is no gate")

    def times(self, x, weight):
        return torch.einsum("tkh,tkhi->tki" if self.is_transposed else "tkh,tkih->tki", x, weight)

    def forward(self, hidden, index, weights):
        x = self.times(hidden[:, None].expand(-1, index.shape[1], -1), self.up_proj[index]) + self.bias[index]
        return (self.times(x.relu(), self.down_proj[index]) * weights[..., None]).sum(1)


class Layer(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.router = nn.Linear(WIDTH, EXPERTS, dtype=torch.bfloat16)
        self.experts = Experts(**options)

    def forward(self, x, index=None):
        x = x + self.attention(x).tanh()
        weights, chosen = self.router(x).topk(CHOICES)
        return x + self.experts(x, chosen if index is None else index, weights)


class Mixture(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = nn.ModuleList(Layer(**options) for _ in range(LAYERS))
        for seed, layer in enumerate(self.layers):
            for linear in (layer.attention, layer.router):
                linear.weight.data = embedding(*linear.weight.shape, torch.bfloat16, seed=20 + seed)
                linear.bias.data.zero_()
        self.eval().requires_grad_(False)

    def forward(self, x, index=None):
        for layer in self.layers:
            x = layer(x, index)
        return x


def tokens(number):
    return torch.randn(number, WIDTH, dtype=torch.bfloat16)


# ---- the same results ----


@pytest.mark.parametrize(
    "number, cache_bytes, options, is_transposed",
    pairwise([0, 1, 2, 5, 40], [0, CACHED], [{}, {"min_bytes": 2000}, {"scheme": "raw"}], [False, True]),
    ids=str,
)
def test_results(number, cache_bytes, options, is_transposed):
    model, x = Mixture(is_transposed=is_transposed), tokens(number)
    wanted, state = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    offloaded = offload(model, resident_bytes=cache_bytes, lookahead=2, **options)
    assert [one.caches["up_proj"].policy == "lru" for one in offloaded._experts] == 3 * [cache_bytes > 0]
    for _ in range(3):
        assert_same_bits(model(x), wanted)
    for name, value in model.state_dict().items():
        assert_same_bits(value, state[name])
    offloaded.close()
    assert_same_bits(model(x), wanted)
    assert all("forward" not in vars(layer.experts) for layer in model.layers)


def test_a_forward_that_other_code_has_wrapped():
    """After close() it computes with the module's own weights, not with those of the caches."""
    model, x = Mixture(), tokens(3)
    offloaded = offload(model)
    for layer in model.layers:
        layer.experts.forward = functools.partial(layer.experts.forward)
    model(x)
    offloaded.close()
    for layer in model.layers:
        layer.experts.up_proj.zero_()
    wanted = Mixture()
    for layer in wanted.layers:
        layer.experts.up_proj.data.zero_()
    assert_same_bits(model(x), wanted(x))


@pytest.mark.parametrize("cache_bytes", [0, CACHED])
def test_transforms(cache_bytes):
    """Of torch.func, which may make one tensor of the choices of many calls."""
    model, x = Mixture(), tokens(6)
    transforms = (
        lambda: torch.func.grad(lambda y: model(y).sum())(x),
        lambda: torch.func.vmap(model)(x.view(3, 2, WIDTH)),
    )
    outputs, wanted = model(x), [transform() for transform in transforms]
    offload(model, resident_bytes=cache_bytes, lookahead=2)
    for transform, value in zip(transforms, wanted):
        assert_same_bits(transform(), value)
        assert_same_bits(model(x), outputs)


def test_weights_that_stay():
    """Where all weights stay on the device, experts stay as they are."""
    model, x = Mixture(), tokens(3)
    wanted = model(x)
    offloaded = offload(model, resident_bytes=1 << 24)
    assert_same_bits(model(x), wanted)
    stats = offloaded.stats()
    assert stats.fetched_bytes == stats.expert_hits == stats.expert_misses == 0 and not offloaded._experts


def test_arguments_by_name():
    experts = Experts()
    x, weights = tokens(3), torch.ones(3, 2)
    index = torch.tensor([[0, 7], [3, 3], [0, 1]], dtype=torch.int32)
    wanted = experts(x, index, weights)
    offload(experts)
    assert_same_bits(experts(x, weights=weights, index=index), wanted)
    with pytest.raises(TypeError, match="index"):
        experts(x)


class Scaled(Experts):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(1, 2, EXPERTS).bfloat16())

    def forward(self, hidden, index, weights):
        return super().forward(hidden, index, weights * self.scale[index])


def test_a_class_of_another_one():
    """Its forward may call that class's, and has the part of buffers that belongs to the experts."""
    experts, x = Scaled(), tokens(3)
    index, weights = torch.tensor([[7, 2], [2, 5], [0, 7]]), torch.ones(3, 2, dtype=torch.bfloat16)
    wanted = experts(x, index, weights)
    with offload(experts) as offloaded:
        assert_same_bits(experts(x, index, weights), wanted)
        assert offloaded.stats().expert_misses and isinstance(experts.up_proj, nn.Parameter)


def test_gradients():
    models = [Mixture(), Mixture()]
    offload(models[1])
    for number in (3, 40):
        grads = []
        for model in models:
            x = tokens(number).fill_(0.5).requires_grad_()
            model(x).square().sum().backward()
            grads.append(x.grad)
        assert_same_bits(*grads)


def test_threads():
    """Calls at the same time have workspaces of their own."""
    model = Mixture()
    inputs = [tokens(1 + number) for number in range(4)]
    wanted = [model(x) for x in inputs]

    def call(number):
        for _ in range(10):
            assert_same_bits(model(inputs[number]), wanted[number])

    for cache_bytes in (0, CACHED):
        with offload(model, resident_bytes=cache_bytes):
            in_threads(*(functools.partial(call, number) for number in range(4)))


@pytest.mark.parametrize("compressed", [False, True])
def test_checkpoints(compressed, tmp_path):
    plain, x = Mixture(), tokens(2)
    ibp.save(tmp_path / "plain.safetensors", plain.state_dict())
    path = tmp_path / "plain.safetensors"
    if compressed:
        path = ibp.checkpoints.compress(path, tmp_path / "coded.safetensors", device="cpu").path
    with torch.device("meta"):
        model = Mixture()
    with offload(model, checkpoint=path):
        assert_same_bits(model(x), plain(x))


# ---- fetched experts ----


def called(offloaded, model, x, index):
    """Statistics of a call."""
    offloaded.reset_stats()
    model(x, torch.tensor(index))
    return offloaded.stats()


def misses(*call):
    return called(*call).expert_misses


def test_each_expert_is_fetched_once():
    model = Mixture()
    offloaded = offload(model)
    assert misses(offloaded, model, tokens(1), [[1, 5]]) == 2 * LAYERS * ROWS
    assert misses(offloaded, model, tokens(3), [[1, 5], [5, 1], [1, 5]]) == 2 * LAYERS * ROWS
    assert misses(offloaded, model, tokens(3), [[1, 5], [2, 1], [7, 6]]) == 5 * LAYERS * ROWS
    stats = offloaded.stats()
    assert stats.expert_hits == stats.expert_hit_rate == 0
    assert stats.fetched_bytes == LAYERS * 5 * EXPERT_BYTES and stats.uses == 2 * LAYERS
    assert 0.5 * stats.fetched_bytes < stats.link_bytes < 0.9 * stats.fetched_bytes


def test_many_tokens_use_the_group():
    """They do not go through the caches, and let the next layers' experts be fetched ahead; few tokens end that."""
    model = Mixture()
    offloaded = offload(model, lookahead=2)
    for call in range(2):
        offloaded.reset_stats()
        model(tokens(16))
        stats = offloaded.stats()
        assert stats.expert_misses == 0 and stats.uses == 2 * LAYERS
        assert stats.misses == (1 if call == 0 else 0)
        assert stats.fetched_bytes >= (LAYERS - 1) * EXPERTS * EXPERT_BYTES
    for _ in range(3):
        offloaded.reset_stats()
        model(tokens(1))
        assert offloaded.stats().misses == 0
    assert offloaded.stats().fetched_bytes == LAYERS * CHOICES * EXPERT_BYTES


def test_a_cache():
    """Experts that were asked for lately are not fetched; slots that are left over count as nothing."""
    model = Mixture()
    offloaded = offload(model, resident_bytes=CACHED)
    found = []
    for index in ([[1, 5]], [[5, 2]], [[1, 2], [5, 1]], [[0, 3], [3, 0]]):
        stats = called(offloaded, model, tokens(len(index)), index)
        found.append((stats.expert_hits, stats.expert_misses))
        assert stats.fetched_bytes == 4096 * stats.expert_misses
        assert stats.expert_hit_rate == stats.expert_hits / (stats.expert_hits + stats.expert_misses)
    rows, first = LAYERS * ROWS, LAYERS * 2  # first rows of stacks, which are always there
    assert found == [(0, 2 * rows), (rows, rows), (3 * rows, 0), (first, 2 * rows - first)]
    assert OTHER_BYTES < stats.device_bytes < OTHER_BYTES + 2 * LAYERS * EXPERTS * EXPERT_BYTES
    x = tokens(1)
    assert_same_bits(model(x), Mixture()(x))


# ---- bad input ----


@pytest.mark.parametrize("bad", [-1, EXPERTS])
def test_experts_that_are_not_there(bad):
    model = Mixture()
    offload(model)
    with pytest.raises(IndexError, match=rf"index of layers.0.experts\[3\] is {bad}; wanted 0 to 7"):
        model(tokens(2), torch.tensor([[0, 1], [2, bad]]))
    assert_same_bits(model(tokens(2).fill_(1)), Mixture()(tokens(2).fill_(1)))


def test_gates_that_are_nan():
    model, x = Mixture(), tokens(2)
    x[1] = torch.nan
    wanted = model(x)
    offload(model)
    assert_same_bits(model(x), wanted)


@pytest.mark.parametrize("cache_bytes", [0, CACHED])
@pytest.mark.parametrize("number", [1, 2])
def test_more_choices_than_experts(number, cache_bytes):
    """Some of a token's choices are then the same expert."""
    experts, x = Experts(), tokens(number)
    index = (torch.arange(number * (EXPERTS + 3)) * 5 % EXPERTS).view(number, -1)
    weights = torch.rand(index.shape).bfloat16()
    wanted = experts(x, index, weights)
    with offload(experts, resident_bytes=cache_bytes):
        assert_same_bits(experts(x, index, weights), wanted)


def test_tokens_that_are_dropped():
    """Their gates are zero, or the router asks for no expert at all."""
    experts, x, index = Experts(), tokens(3), torch.tensor([[1, 2], [0, 0], [7, 2]])
    weights = torch.tensor([[0.5, 0.5], [0, 0], [1, 0]]).bfloat16()
    wanted = experts(x, index, weights)
    with offload(experts):
        y = experts(x, index, weights)
        assert_same_bits(y, wanted)
        assert not y[1].any() and y[::2].all(1).any()
        assert not experts(x, index[:, :0], weights[:, :0]).any()


def test_experts_of_unequal_sizes():
    """They are modules of a list, which stream as other weights do."""

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = (64, 128, 96)
            parts = (nn.Sequential(nn.Linear(WIDTH, size), nn.Linear(size, WIDTH)) for size in sizes)
            self.experts = nn.ModuleList(parts)

        def forward(self, x, index):
            return torch.stack([self.experts[int(number)](row) for row, number in zip(x, index)])

    model, x, index = Listed().bfloat16().eval(), tokens(4), torch.tensor([2, 0, 1, 2])
    wanted = model(x, index).detach()
    with offload(model) as offloaded:
        assert_same_bits(model(x, index).detach(), wanted)
        assert not offloaded._experts and offloaded.stats().fetched_bytes


def test_damaged_rows():
    """A damaged expert is an error where it is asked for, and nowhere else."""
    model, x = Mixture(), tokens(1)
    wanted = model(x, torch.tensor([[1, 2]]))
    offloaded = offload(model)
    table = offloaded._experts[1].caches["up_proj"].table
    table.lengths[5 * table.num_rows // EXPERTS] = 4000
    with pytest.raises(ibp.CorruptTableError):
        model(x, torch.tensor([[5, 2]]))
    assert_same_bits(model(x, torch.tensor([[1, 2]])), wanted)


def is_taken(module):
    with_experts = nn.Sequential(module).eval().requires_grad_(False)
    return bool(plan_for(with_experts, [torch.device("cpu")], min_bytes=1, group_bytes=1 << 20).experts)


def test_what_is_no_stack_of_experts():
    def changed(change):
        module = Experts()
        change(module)
        return module

    assert is_taken(Experts())
    assert not is_taken(nn.Linear(4, 4))
    assert not is_taken(changed(lambda module: setattr(module, "_is_expert_parallel", True)))
    assert not is_taken(changed(lambda module: delattr(module, "has_gate")))
    assert not is_taken(changed(lambda module: setattr(module, "scale", nn.Parameter(torch.ones(3)))))
    assert not is_taken(changed(lambda module: setattr(module, "forward", module.forward)))
    strange = changed(lambda module: setattr(module, "up_proj", nn.Parameter(module.up_proj.mT[..., :-1, :].clone())))
    assert is_taken(strange)
    uneven = nn.Parameter(embedding(EXPERTS, 8191, torch.bfloat16), False)
    assert not is_taken(changed(lambda module: setattr(module, "up_proj", uneven)))
    last = nn.Parameter(torch.empty(INNER, WIDTH, EXPERTS).bfloat16().permute(2, 0, 1), False)
    assert not is_taken(changed(lambda module: setattr(module, "up_proj", last)))


def test_a_shared_stack():
    first, second = Experts(), Experts()
    second.up_proj = first.up_proj
    assert not is_taken(nn.ModuleList([first, second]))


# ---- the way into the operation ----

MOST_OF_EXPERTS = 43  # functions of ibp that a call of a layer of experts enters, if both stacks are cached


class Operations(TorchDispatchMode):
    """Notes the names of the operations that run on a device."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Reading(Experts):
    """Reads its weights and computes nothing."""

    def __init__(self):
        super().__init__()
        del self.bias

    def forward(self, hidden, index, weights):
        return [self.up_proj, self.down_proj]


@pytest.mark.parametrize("is_on_gpu", [False, True])
@torch.no_grad()
def test_one_operation_fetches_the_experts_of_a_layer(request, is_on_gpu):
    device = request.getfixturevalue("cuda") if is_on_gpu else torch.device("cpu")
    experts = Reading()
    x, index, weights = tokens(1).to(device), torch.tensor([[1, 5]], device=device), torch.ones(1, 2, device=device)
    wanted = [getattr(experts, name)[[1, 5]] for name in ("up_proj", "down_proj")]
    with ibp.offload(experts, device, resident_bytes=EXPERTS * EXPERT_BYTES * 3 // 4, **SIZES):
        call = functools.partial(experts, x, index, weights)
        for found, right in zip(call(), wanted, strict=True):
            assert_same_bits(found.cpu(), right)
        entered = calls_of(call)
        assert len(entered) <= MOST_OF_EXPERTS, entered
        with Operations() as operations:
            call()
    checks = ["aten.view.default", "aten.aminmax.default", *2 * ["aten._local_scalar_dense.default"]]
    assert operations.names == [*([] if is_on_gpu else checks), "ibp.take_matrices.default"]


# ---- GPUs ----


@pytest.mark.parametrize("cache_bytes", [0, CACHED])
@torch.no_grad()
def test_on_a_gpu(cuda, cache_bytes):
    plain, model = Mixture().to(cuda), Mixture()
    with ibp.offload(model, cuda, resident_bytes=cache_bytes, **SIZES) as offloaded:
        assert all(cache.table.is_pinned() for one in offloaded._experts for cache in one.caches.values())
        for number in (1, 2, 5, 40, 1):
            x = tokens(number).to(cuda)
            for _ in range(3):
                assert_same_bits(model(x), plain(x))
        assert offloaded.stats().expert_misses > 0


@torch.no_grad()
def test_a_gpu_is_not_waited_for(cuda):
    model, x, y = Mixture(), tokens(1).to(cuda), tokens(3).to(cuda)
    with ibp.offload(model, cuda, resident_bytes=CACHED, **SIZES):
        model(x), model(y)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x), model(y)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("number", [1, 3])
@torch.no_grad()
def test_a_cuda_graph(cuda, number):
    """Experts that are asked for in a graph are those of each replay, with a cache that replaces its rows."""
    plain, model = Mixture().to(cuda), Mixture()
    x = tokens(number).to(cuda)
    with ibp.offload(model, cuda, resident_bytes=CACHED, **SIZES):
        stream = torch.cuda.Stream(cuda)
        stream.wait_stream(torch.cuda.current_stream(cuda))
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.current_stream(cuda).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        for _ in range(5):
            x.copy_(tokens(number))
            graph.replay()
            assert_same_bits(y, plain(x))


@torch.no_grad()
def test_a_gpu_notes_experts_that_are_not_there(cuda):
    model = Mixture()
    with ibp.offload(model, cuda, **SIZES) as offloaded:
        for index in ([[0, EXPERTS]], [[0, 1], [2, EXPERTS]], [[0, 1], [2, -1]]):
            model.layers[0].experts(
                tokens(len(index)).to(cuda), torch.tensor(index, device=cuda), torch.ones(len(index), 2, device=cuda)
            )
            for cache in offloaded._experts[0].caches.values():
                with pytest.raises(IndexError):
                    cache.check()
