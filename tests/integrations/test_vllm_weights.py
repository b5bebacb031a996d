"""`--quantization ibp` of vLLM, as far as it goes without vLLM: operations, and what is said where vLLM is missing.
tools/try_adapters.py runs the methods with the classes of releases.
"""

import importlib.util
import itertools
import logging
import sys
import types

import pytest
import torch
import torch.nn.functional as F

import ibp
from helpers import assert_same_bits
from ibp._files import read_header
from ibp.checkpoints import SourceTensor
from ibp.integrations.vllm import weights as vllm_weights
from ibp.integrations.vllm.weights import IncomingTensor, incoming, joined, noted, write
from ibp.nn._tables import matrix_table
from native import ROOT
from products import kernels_on_the_cpu, lists

sys.path.insert(0, str(ROOT / "tools"))

import try_experts  # noqa: E402

without_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")


@pytest.fixture
def table():
    made = matrix_table(torch.randn(48, 64).mul(0.02).bfloat16())
    vllm_weights._tables[made.slots.data_ptr()] = made
    return made


def product(x, table, bias=None):
    return torch.ops.ibp_engines.linear(x, table.slots, bias, table.shape[0])


def test_products_and_rows(table):
    x, bias, weight = torch.randn(2, 3, 64).bfloat16(), torch.randn(48).bfloat16(), table.decompress()
    assert_same_bits(product(x, table), F.linear(x, weight))
    assert_same_bits(product(x[0], table, bias), F.linear(x[0], weight, bias))
    ids = torch.tensor([[3, 47], [0, 3]])
    assert_same_bits(torch.ops.ibp_engines.rows(ids, table.slots, 64), weight[ids])


def test_shapes_without_values(table):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(5, 64).bfloat16())
        y = product(x, table)
        rows = torch.ops.ibp_engines.rows(mode.from_tensor(torch.tensor([[1], [2]])), table.slots, 64)
    assert y.shape == (5, 48) and rows.shape == (2, 1, 64) and y.dtype == rows.dtype == torch.bfloat16


@pytest.mark.slow  # torch.compile is loaded
def test_compiled_code_is_for_all_numbers_of_tokens_and_all_layers(table):
    other = matrix_table(torch.randn(48, 64).mul(0.02).bfloat16())
    vllm_weights._tables[other.slots.data_ptr()] = other
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    run = torch.compile(
        lambda x, slots: torch.ops.ibp_engines.linear(x, slots, None, 48) + 1, backend=backend, fullgraph=True
    )
    for count, of in ((600, table), (2, table), (9, other)):
        x = torch.randn(count, 64).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        assert_same_bits(run(x, of.slots), F.linear(x, of.decompress()) + 1)
    assert len(compiled) == 1


def test_a_table_that_is_gone_is_not_kept(table):
    address = table.slots.data_ptr()
    assert address in vllm_weights._tables
    slots = table.slots
    vllm_weights._tables.pop(address)
    with pytest.raises(RuntimeError, match="have been moved or replaced"):
        torch.ops.ibp_engines.linear(torch.randn(1, 64).bfloat16(), slots, None, 48)


@without_vllm
def test_without_vllm(caplog):
    with pytest.raises(ImportError, match=r"needs vLLM 0.26.0 to 0.33.0; none is installed"):
        vllm_weights.IBPConfig()
    with caplog.at_level(logging.WARNING, "vllm.ibp"):
        vllm_weights.register()
    assert "--quantization ibp is not there with this vLLM: No module named 'vllm'" in caplog.text


def test_the_entry_point():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["ibp"].split(":")
    assert getattr(importlib.import_module(module), name) is vllm_weights.register


# ---- coded checkpoints ----

MATRIX, STACK = (24, 64), (3, 16, 64)


def stored(table):
    """The table as a tensor of a checkpoint."""
    return SourceTensor("w", table.dtype, tuple(table.shape), None, make_table=lambda: table)


def some_tensor(shape, **options):
    """A tensor of a checkpoint, and its plain values."""
    plain = torch.randn(shape).mul(0.02).bfloat16()
    return incoming(stored(ibp.compress(plain, **options))), plain


@pytest.mark.parametrize("options", [{}, {"level": "fast", "layout": "packed"}, {"row_bytes": 100}])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[3:7],
        lambda x: x.narrow(1, 8, 4)[..., 1:],
        lambda x: x.transpose(0, 1).chunk(2)[1],
        lambda x: x[5].unsqueeze(0).expand(2, *x.shape[1:]),
        lambda x: x.view(-1, 16)[1::3].data.detach(),
        lambda x: x[:0],
        lambda x: x.mT.contiguous()[1:],
        lambda x: x.float() + 1,
        lambda x: torch.cat([x, x.new_ones(x.shape)])[1:],
        lambda x: torch.stack([torch.ones(x.shape), x]),
        lambda x: torch.cat(tensors=[x, x], dim=1),
        lambda x: x.sum() if x[0].flatten()[0].item() else x,
    ],
)
@pytest.mark.parametrize("shape", [MATRIX, STACK])
def test_what_loaders_do_to_tensors(shape, function, options):
    if shape == STACK:
        function = lambda x, of=function: of(x.flatten(0, 1))  # noqa: E731
    coded, plain = some_tensor(shape, **options)
    target, wanted = (torch.zeros(function(plain).shape, dtype=torch.bfloat16) for _ in range(2))
    target.copy_(function(coded))
    assert_same_bits(target, wanted.copy_(function(plain)))
    target.zero_()[...] = function(coded)
    assert_same_bits(target, wanted)


def test_what_a_tensor_says():
    coded, plain = some_tensor(MATRIX)
    assert coded.shape == coded[:].size() == torch.Size(MATRIX) and type(coded.shape) is torch.Size
    assert (coded.dtype, coded.dim(), coded.numel(), coded.is_meta) == (plain.dtype, 2, plain.numel(), True)
    assert torch.equal(coded, plain) and bool((coded == plain).all()) and coded.tolist() == plain.tolist()
    for function in (lambda x: x.mul_(2), lambda x: x[1:].fill_(0), lambda x: x.__setitem__(0, 1)):
        with pytest.raises(NotImplementedError, match="writes to a tensor of the checkpoint"):
            function(coded)


@pytest.mark.parametrize("shape", [(), (7,)])
def test_small_tensors(shape):
    coded, plain = some_tensor(shape)
    assert_same_bits(torch.zeros(shape).bfloat16().copy_(coded), plain)


def notes(copies):
    """What is noted of copies to a weight, each (target, tensor)."""
    token = noted.set([])
    try:
        for target, tensor in copies:
            target.copy_(tensor)
        return noted.get()
    finally:
        noted.reset(token)


def matrices(*scales):
    """Tensors of a checkpoint in the form of `ibp.linear`."""
    plain = [torch.randn(32, 64).mul(scale).bfloat16() for scale in scales]
    return [incoming(stored(matrix_table(weight))) for weight in plain], plain


def test_merged_rows_are_joined():
    (first, second), plain = matrices(0.02, 0.02)
    weight = torch.zeros(48, 64).bfloat16()
    parts = notes([(weight[16:], second), (weight[:16], first.narrow(0, 16, 16))])
    assert not weight.any()
    table = joined(parts, weight)
    assert_same_bits(table.decompress(), torch.cat([plain[0][16:], plain[1]]))
    assert any(table.codebook is source.origin.table.codebook for source, _ in parts)
    write(parts)
    assert_same_bits(weight, table.decompress())


@pytest.mark.parametrize(
    "copies",
    [
        lambda weight, first, second: [(weight[:32], first)],  # not all rows
        lambda weight, first, second: [(weight[:32], first), (weight[16:], first), (weight[:16], second[16:])],
        lambda weight, first, second: [(weight[:, :32], first[:, :32]), (weight[:, 32:], first[:, 32:])],
        lambda weight, first, second: [(weight.t(), first.t())],
        lambda weight, first, second: [(weight.view(-1)[8:2056], first.view(-1))],
        lambda weight, first, second: [(weight.float()[:32], first), (weight[32:], second[:16])],
    ],
)
def test_other_parts_are_not_joined(copies):
    (first, second), _ = matrices(0.02, 0.02)
    weight = torch.zeros(48, 64).bfloat16()
    copied = [(target, tensor) for target, tensor in copies(weight, first, second) if target.shape == tensor.shape]
    assert joined(notes(copied), weight) is None


def test_codebooks_that_differ():
    (first, second), plain = matrices(0.02, 200.0)
    weight = torch.zeros(64, 64).bfloat16()
    parts = notes([(weight[:32], first), (weight[32:], second)])
    assert joined(parts, weight) is None
    write(parts)
    assert_same_bits(weight, torch.cat(plain))


def test_a_config_joins_parts_or_decodes_them(caplog):
    caplog.set_level(logging.INFO, "vllm.ibp")
    config = object.__new__(vllm_weights.IBPConfig)
    config.fields, config._said, config._has_told = types.SimpleNamespace(min_bytes=0), set(), False
    for scale, is_joined in ((0.02, True), (0.3, False)):
        (first, second), plain = matrices(0.02, scale)
        weight = torch.zeros(64, 64).bfloat16()
        table = config.table_of(weight, "a", notes([(weight[:32], first), (weight[32:], second)]))
        assert bool(weight.any()) != is_joined
        assert_same_bits(table.decompress(), torch.cat(plain))
    told = [record.getMessage() for record in caplog.records]
    assert told == ["ibp: weights are compressed while they are loaded: a takes 0.0 MB of 0.0"]  # once
    (first, second), plain = matrices(0.02, 200.0)  # one codebook for both saves nothing
    method, layer = object.__new__(vllm_weights.CodedMethod), torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(64, 64).bfloat16(), requires_grad=False)
    method._config, method._name = config, "a"
    method._parts = {"weight": notes([(layer.weight.data[:32], first), (layer.weight.data[32:], second)])}
    assert method._tables_of(layer) == {}
    assert_same_bits(layer.weight.data, torch.cat(plain))


def test_a_layer_that_stays_plain_is_loaded_anew():
    """The first time, parts of tables are noted until all have come; the second time, loaders copy them."""
    config = types.SimpleNamespace(table_of=lambda *args: None)  # keeps weights plain
    made = lambda layer, *sizes, **options: layer.register_parameter("weight", loaded_weight())  # noqa: E731
    plain = types.SimpleNamespace(create_weights=made, process_weights_after_loading=lambda layer: None)
    method, layer = Plain(config, "a", plain), torch.nn.Module()
    method.create_weights(layer)
    for _ in range(2):
        (first, second), values = matrices(0.02, 200.0)
        for rows, tensor in ((slice(32), first), (slice(32, 64), second)):
            layer.weight.weight_loader(layer.weight, rows, tensor)
        method.process_weights_after_loading(layer)
        assert_same_bits(layer.weight.data, torch.cat(values))


class Plain(vllm_weights.CodedMethod):
    uses_meta_device = False

    def _coded(self, layer):
        return self._tables_of(layer)


def loaded_weight():
    """A parameter with a loader, as vLLM's are."""
    weight = torch.nn.Parameter(torch.zeros(64, 64).bfloat16(), requires_grad=False)
    weight.weight_loader = lambda weight, rows, tensor: weight.data[rows].copy_(tensor)
    return weight


def test_the_loader(tmp_path):
    """Tables come as they are coded, and all else as plain tensors."""
    plain = {"a.weight": torch.randn(64, 64).mul(0.02).bfloat16(), "a.bias": torch.randn(64)}
    ibp.save(tmp_path / "model.safetensors", {"a.weight": matrix_table(plain["a.weight"]), "a.bias": plain["a.bias"]})
    loader = object.__new__(vllm_weights.IBPModelLoader)
    loader._prepare_weights = lambda *args: (str(tmp_path), [str(tmp_path / "model.safetensors")], True)
    fields = dict.fromkeys(("model_or_path", "subfolder", "revision", "fall_back_to_pt", "allow_patterns_overrides"))
    found = dict(loader._get_weights_iterator(types.SimpleNamespace(prefix="x.", **fields)))
    assert type(found["x.a.bias"]) is torch.Tensor and torch.equal(found["x.a.bias"], plain["a.bias"])
    assert type(found["x.a.weight"]) is IncomingTensor
    assert_same_bits(torch.zeros(64, 64).bfloat16().copy_(found["x.a.weight"]), plain["a.weight"])


@pytest.mark.parametrize("part", ["a.weight:slots", "a.bias"])
def test_damaged_files_are_not_loaded(part, tmp_path):
    path = tmp_path / "model.safetensors"
    weight = matrix_table(torch.randn(64, 64).mul(0.02).bfloat16())
    ibp.save(path, {"a.weight": weight, "a.bias": torch.randn(64)})
    data = bytearray(path.read_bytes())
    data[read_header(path).tensors[part].start] ^= 2
    path.write_bytes(data)
    loader = object.__new__(vllm_weights.IBPModelLoader)
    loader._prepare_weights = lambda *args: (str(tmp_path), [str(path)], True)
    fields = dict.fromkeys(("model_or_path", "subfolder", "revision", "fall_back_to_pt", "allow_patterns_overrides"))
    with pytest.raises(ibp.ChecksumError, match=f"{path}: block .* is damaged"):
        for _, tensor in list(loader._get_weights_iterator(types.SimpleNamespace(prefix="", **fields))):
            joined(notes([(torch.zeros_like(tensor, device="cpu"), tensor)]), torch.zeros(tensor.shape).bfloat16())


def test_loaders_without_values():
    """vLLM counts elements that loaders copy to weights without memory."""
    (first,), _ = matrices(0.02)
    target = torch.empty(32, 64, dtype=torch.bfloat16, device="meta")
    assert notes([(target, first)]) == [] and target.is_meta
    with pytest.raises(RuntimeError, match="size of tensor"):
        target[:3].copy_(first)


# ---- fused experts ----

EXPERTS, HIDDEN, WIDTH, CHOICES = 6, 64, 32, 2


class ExpertsMethod(vllm_weights.IBPExpertsMethod):
    __init__ = vllm_weights.CodedMethod.__init__  # vLLM's class wants its configuration


def coded_table(weight, name, parts):
    made = matrix_table(weight)
    lists(made)
    return made


def coded_experts(has_bias=False, expert_map=None, on_input=False):
    """A layer as vLLM's, its method, and its plain weights."""
    layer, kernel = torch.nn.Module(), try_experts.Kernel()
    local = EXPERTS if expert_map is None else EXPERTS // 2
    shapes = {"w13_weight": (local, 2 * WIDTH, HIDDEN), "w2_weight": (local, HIDDEN, WIDTH)}
    shapes |= {"w13_bias": (local, 2 * WIDTH), "w2_bias": (local, HIDDEN)} if has_bias else {}
    weights = {name: torch.randn(shape).mul(0.2).bfloat16() for name, shape in shapes.items()}
    for name, weight in weights.items():
        layer.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
    given = {"local_num_experts": local, "global_num_experts": EXPERTS, "activation": "silu"}
    given |= {"expert_map": expert_map, "apply_router_weight_on_input": on_input}
    vars(layer).update(given)
    plain = types.SimpleNamespace(
        process_weights_after_loading=lambda layer: None,
        moe_kernel=kernel,
        moe_quant_config=None,
        apply=lambda layer, x, weights, ids, *shared: kernel.apply(
            x, layer.w13_weight, layer.w2_weight, weights, ids, "silu", EXPERTS, layer.expert_map, False
        ),
    )
    method = ExpertsMethod(types.SimpleNamespace(table_of=coded_table), "experts", plain)
    method.process_weights_after_loading(layer)
    assert layer.w13_weight.numel() == layer.w2_weight.numel() == 0 and len(method.tables) == 2
    return layer, method, weights


def results_of_experts(layer, weights, x, topk_weights, topk_ids):
    results = torch.zeros(x.shape)
    for token, choice in itertools.product(range(len(x)), range(topk_ids.shape[1])):
        number, weight = int(topk_ids[token, choice]), topk_weights[token, choice]
        number = number if layer.expert_map is None else int(layer.expert_map[number])
        if number < 0:
            continue
        row, weight = (x[token] * weight.bfloat16(), 1) if layer.apply_router_weight_on_input else (x[token], weight)
        y = F.linear(row, weights["w13_weight"][number])
        y = y + weights["w13_bias"][number] if "w13_bias" in weights else y
        y = F.linear(F.silu(y[:WIDTH]) * y[WIDTH:], weights["w2_weight"][number])
        results[token] += weight * (y + weights["w2_bias"][number] if "w2_bias" in weights else y).float()
    return results


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("is_spread", [False, True])
def test_experts_of_few_tokens(monkeypatch, has_bias, on_input, is_spread):
    """The kernel multiplies, by the experts of this rank alone."""
    expert_map = torch.tensor([-1, 0, -1, 1, 2, -1], dtype=torch.int32) if is_spread else None
    with kernels_on_the_cpu(monkeypatch) as calls:
        layer, method, weights = coded_experts(has_bias, expert_map, on_input)
        for dtype in (torch.int32, torch.int64):
            x = torch.randn(5, HIDDEN).bfloat16()
            ids = torch.stack([torch.randperm(EXPERTS)[: 1 if on_input else CHOICES] for _ in x]).to(dtype)
            topk_weights = torch.rand(ids.shape)
            got = method.apply(layer, x, topk_weights, ids, None, None)
            assert got.dtype == torch.bfloat16 and got.shape == x.shape
            wanted = results_of_experts(layer, weights, x, topk_weights, ids)
            torch.testing.assert_close(got.float(), wanted, rtol=0.03, atol=0.03)
        assert calls == [ids.numel()] * 4


def test_experts_of_many_tokens(monkeypatch):
    """vLLM's kernel multiplies by decoded weights."""
    with kernels_on_the_cpu(monkeypatch) as calls:
        layer, method, weights = coded_experts()
        monkeypatch.setattr("ibp.nn._experts.MOST_GROUPED", 7)
        x, ids = torch.randn(4, HIDDEN).bfloat16(), torch.arange(8).view(4, 2) % EXPERTS
        topk_weights = torch.rand(ids.shape)
        got = method.apply(layer, x, topk_weights, ids, None, None)
        kernel = method.moe_kernel
        wanted = kernel.apply(x, weights["w13_weight"], weights["w2_weight"], topk_weights, ids, "silu", 6, None, False)
        assert_same_bits(got, wanted)
        assert not calls


def test_experts_that_are_loaded_anew():
    layer, method, weights = coded_experts()
    method.process_weights_after_loading(layer)
    layer.w2_weight = torch.nn.Parameter(weights["w2_weight"], requires_grad=False)
    with pytest.raises(NotImplementedError, match="experts is coded; wanted no weights that are loaded anew"):
        method.process_weights_after_loading(layer)


MOE = {"is_lora_enabled": False, "dp_size": 1, "is_sequence_parallel": False}


@pytest.mark.parametrize(
    "backend, moe, balances, said",
    [
        ("TRITON", {}, False, ""),
        ("FLASHINFER_CUTLASS", {}, False, "vLLM multiplies them by FLASHINFER_CUTLASS; wanted --moe-backend triton"),
        ("TRITON", {"is_lora_enabled": True}, False, "LoRA adapters of experts read plain weights"),
        ("TRITON", {"dp_size": 2}, False, "they are spread over data-parallel ranks, or move between ranks"),
        ("TRITON", {"is_sequence_parallel": True}, False, "they are spread over data-parallel ranks, or move"),
        ("TRITON", {}, True, "they are spread over data-parallel ranks, or move between ranks"),
    ],
)
def test_experts_that_stay_plain(backend, moe, balances, said):
    parallel = types.SimpleNamespace(enable_eplb=balances)
    plain = types.SimpleNamespace(
        unquantized_backend=types.SimpleNamespace(name=backend, value=backend),
        moe=types.SimpleNamespace(**(MOE | moe), moe_parallel_config=parallel),
    )
    why = vllm_weights.why_plain_experts(plain)
    assert why.startswith(said) and bool(why) == bool(said)
