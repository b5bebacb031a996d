"""`ibp.nn.compress`: models whose matrices become tables compute, save and load as the plain models."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import ibp
from helpers import assert_same_bits
from ibp.nn._tables import TableModule
from models import IDS, Block

WIDTH = 256


class Net(nn.Module):
    """A decoder in miniature, in eval mode: an embedding, blocks, and a head."""

    def __init__(self, dtype=torch.float32, tie=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(512, WIDTH, dtype=dtype)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(dtype, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 512, bias=False, dtype=dtype)
        if tie:
            self.head.weight = self.embed.weight
        self.eval()

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compress(model, **options):
    return ibp.nn.compress(model, **{"min_bytes": 4096, **options})


def tables_of(model):
    return {name: module.weight for name, module in model.named_modules() if isinstance(module, TableModule)}


@pytest.mark.parametrize("convert", ["half", "double", "bfloat16", "to", "to_empty", "type"])
def test_a_conversion_is_refused_before_it_changes_anything(convert):
    model = nn.Sequential(nn.LayerNorm(WIDTH), Net().blocks)
    compress(model)
    arguments = {"to": (torch.float16,), "type": (torch.float16,)}.get(convert, ())
    options = {"device": "cpu"} if convert == "to_empty" else {}
    for root in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        before = {name: value.clone() for name, value in root.state_dict().items()}
        for module in (root, root[1], root[1][4], root[1][4].up):
            with pytest.raises((TypeError, AttributeError), match="a table keeps its own|empty_like|'type'"):
                getattr(module, convert)(*arguments, **options)
            assert module.float() is module
        for name, value in root.state_dict().items():
            assert_same_bits(value, before[name])


def test_a_state_that_was_taken_in_inference_mode():
    model = Net()
    compress(model)
    with torch.inference_mode():
        state = model.state_dict()
    assert not any(value.is_inference() for value in state.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tie", [False, True])
@torch.no_grad()
def test_results_and_states_are_those_of_the_plain_model(dtype, tie):
    model = Net(dtype=dtype, tie=tie)
    wanted, before = model(IDS), {name: value.clone() for name, value in model.state_dict().items()}
    shapes = [(name, p.shape, p.dtype) for name, p in model.named_parameters()]
    report = compress(model)
    assert set(report.coded) == set(tables_of(model)) and len(report.coded) == 12 and not report.plain
    assert_same_bits(model(IDS), wanted)
    state = model.state_dict()
    assert list(state) == list(before)
    for name, value in state.items():
        assert type(value) is torch.Tensor and value.is_contiguous()
        assert_same_bits(value, before[name])
    assert (state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()) == tie
    assert (model.embed.weight is model.head.weight) == tie
    tables = {id(table): table for table in tables_of(model).values()}.values()
    assert report.nbytes == sum(table.nbytes for table in tables)
    assert report.num_bytes == sum(
        before[f"{name}.weight"].nbytes for name in report.coded if not tie or name != "head"
    )
    assert report.savings == 1 - report.nbytes / report.num_bytes > 0.05
    assert [(name, p.shape, p.dtype) for name, p in model.named_parameters()] == shapes
    assert all(isinstance(p, ibp.nn.TableParameter) == (p.dim() > 1) for p in model.parameters())


@pytest.mark.parametrize("tie", [False, True])
@torch.no_grad()
def test_states_are_loaded(tie):
    """Plain ones, which are coded, and coded ones; each into models of tables and plain models."""
    plain, other = Net(tie=tie, seed=1), Net(tie=tie)
    wanted = plain(IDS)
    compress(other)
    assert str(other.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert_same_bits(other(IDS), wanted)
    assert (other.embed.weight is other.head.weight) == tie
    fresh = Net(tie=tie)
    fresh.load_state_dict(other.state_dict())
    assert_same_bits(fresh(IDS), wanted)
    again = Net(tie=tie)
    compress(again)
    coded = ibp.nn.coded_state_dict(other)
    assert isinstance(coded["head.weight"], ibp.CompressedTensor) and list(coded) == list(plain.state_dict())
    again.load_state_dict(coded)
    assert_same_bits(again(IDS), wanted)
    assert isinstance(other.state_dict()["head.weight"], torch.Tensor)


@torch.no_grad()
def test_states_are_of_the_moment(tmp_path):
    """A state_dict() that is used again has the weights as they are now, and shared ones once."""
    model, other = Net(tie=True), Net(tie=True, seed=1)
    compress(model)
    state = model.state_dict()
    model.load_state_dict(other.state_dict())
    assert model.state_dict(destination=state) is state
    for name, value in other.state_dict().items():
        assert_same_bits(state[name], value)
    plain_dict = model.state_dict(destination={})
    assert_same_bits(plain_dict["head.weight"], plain_dict["embed.weight"])
    torch.save(state, tmp_path / "state.pt")
    assert set(torch.load(tmp_path / "state.pt", weights_only=True)) == set(state)


@torch.no_grad()
def test_tied_tables_stay_tied():
    model = Net(tie=True)
    wanted = model(IDS)
    compress(model)
    for changed in (model.to("cpu"), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert changed.embed.weight is changed.head.weight
        assert_same_bits(changed(IDS), wanted)
    moved = model.head._apply(lambda table: copy.copy(table) if isinstance(table, ibp.CompressedTensor) else table)
    assert moved.weight is model.embed.weight


def test_gradients_reach_everything_else():
    model, plain = Net().requires_grad_(False), Net().requires_grad_(False)
    compress(model)
    results = []
    for net in (model, plain):
        x = torch.ones(2, WIDTH).requires_grad_()
        net.blocks[0].up.bias.requires_grad_(True)
        net.blocks[0](x).square().sum().backward()
        results.append((x.grad, net.blocks[0].up.bias.grad))
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)


# ---- choosing modules ----


@pytest.mark.parametrize(
    "options, coded",
    [
        ({"include": "head"}, {"head"}),
        ({"include": ["blocks.0", "blocks.*.down"]}, {"blocks.0.up", *(f"blocks.{n}.down" for n in range(5))}),
        ({"exclude": "blocks"}, {"embed", "head"}),
        ({"include": "blocks.1", "exclude": ["*.up"]}, {"blocks.1.down"}),
        (
            {"min_bytes": 4096, "exclude": ["embed", "head"]},
            {f"blocks.{n}.{name}" for n in range(5) for name in ("up", "down")},
        ),
    ],
)
@torch.no_grad()
def test_include_and_exclude(options, coded):
    model = Net()
    wanted = model(IDS)
    report = compress(model, **options)
    assert set(report.coded) == coded == set(tables_of(model))
    assert set(report.plain.values()) <= {"smaller than min_bytes"}
    assert_same_bits(model(IDS), wanted)


def test_a_shared_weight_stays_plain_if_one_module_keeps_it():
    model = Net(tie=True)
    report = compress(model, exclude="embed")
    assert report.plain == {"head": "shared with a module that stays plain"}
    assert model.head.weight is model.embed.weight


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 2


class Reader(nn.Module):
    """Uses the weight of a layer as its own."""

    def __init__(self, layer):
        super().__init__()
        self.own = layer.weight


def hooked():
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda *_: None)
    return layer


def patched():
    layer = nn.Linear(WIDTH, WIDTH)
    layer.forward = lambda x: x
    return layer


def noise():
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.data = (
        torch.randint(-(1 << 31), 1 << 31, (WIDTH, WIDTH), dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    return layer


@pytest.mark.parametrize(
    "layer, reason",
    [
        (lambda: Scaled(WIDTH, WIDTH), "with a class or forward of its own"),
        (patched, "with a class or forward of its own"),
        (hooked, "with hooks"),
        (lambda: nn.Embedding(WIDTH, WIDTH, max_norm=1.0), "with max_norm or scale_grad_by_freq"),
        (lambda: nn.Embedding(WIDTH, WIDTH, scale_grad_by_freq=True), "with max_norm or scale_grad_by_freq"),
        (lambda: nn.Linear(WIDTH, 3), "smaller than min_bytes"),
        (noise, "without gain"),
        (lambda: nn.Linear(WIDTH, WIDTH).train(), "in training"),
    ],
    ids=["subclass", "patched", "hooked", "max_norm", "scale_grad", "small", "noise", "training"],
)
def test_what_stays_plain(layer, reason):
    model = nn.ModuleDict({"kept": layer(), "coded": nn.Linear(WIDTH, WIDTH).eval()})
    model["coded"].eval()
    if reason != "in training":
        model.eval()
    kept = model["kept"]
    report = compress(model)
    assert report.coded == ("coded",) and report.plain == {"kept": reason} and model["kept"] is kept
    share = report.nbytes / 262144
    assert f"1 module coded, nbytes={report.nbytes:,} ({share:.1%} of 262,144), plain" in repr(report)
    assert f"plain: 1 {reason})" in repr(report)


def test_a_weight_that_another_module_reads_stays_plain():
    layer = nn.Linear(WIDTH, WIDTH)
    model = nn.ModuleList([layer, Reader(layer), nn.Linear(WIDTH, WIDTH)]).eval()
    report = compress(model)
    assert report.coded == ("2",) and report.plain == {"0": "shared with a module that stays plain"}


@torch.no_grad()
def test_modules_that_are_held_twice():
    layer, table = nn.Linear(WIDTH, WIDTH), nn.Embedding(WIDTH, WIDTH, padding_idx=3)
    model = nn.ModuleDict({"a": nn.Sequential(layer, layer), "b": nn.Sequential(table)}).eval()
    model["c"] = model["a"]
    wanted = model["a"](torch.eye(WIDTH))
    report = compress(model)
    assert report.coded == ("a.0", "a.1", "c.0", "c.1", "b.0") and report.num_bytes == 2 * WIDTH * WIDTH * 4
    assert model["a"][0] is model["a"][1] and model["a"] is model["c"] and model["b"][0].padding_idx == 3
    assert_same_bits(model["a"](torch.eye(WIDTH)), wanted)


@torch.no_grad()
@pytest.mark.parametrize("columns", [32768, 32800, 53248])
def test_long_rows(columns):
    """Rows of more than 65,536 bytes are cut, and `ibp.linear` decodes them."""
    plain = nn.Linear(columns, 20, dtype=torch.bfloat16)
    model, x = nn.Sequential(plain).eval(), torch.ones(2, columns, dtype=torch.bfloat16)
    wanted = plain(x)
    assert compress(model).coded == ("0",)
    assert_same_bits(model(x), wanted)
    assert_same_bits(model.state_dict()["0.weight"], plain.weight.detach())


@torch.no_grad()
def test_modules_of_torch_that_hold_layers():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True), 2, enable_nested_tensor=False
    )
    x = torch.randn(2, 5, WIDTH)
    for layer in model.layers:  # torch has a fused path for layers of plain weights alone
        layer.register_forward_pre_hook(lambda *_: None)
    wanted = model.eval()(x)
    report = compress(model)
    assert set(report.coded) == {f"layers.{n}.linear{k}" for n in range(2) for k in (1, 2)}
    assert set(report.plain) == {f"layers.{n}.self_attn.out_proj" for n in range(2)}
    assert_same_bits(model(x), wanted)


@pytest.mark.slow
def test_one_plain_weight_at_a_time():
    """Each weight is gone before the next one is coded."""
    model = Net()
    weights = [weakref.ref(layer.weight) for block in model.blocks for layer in (block.up, block.down)]
    alive = []
    make = ibp.nn._compressing.matrix_table

    def watched(*args, **options):
        gc.collect()
        alive.append(sum(weight() is not None for weight in weights))
        return make(*args, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("ibp.nn._compressing.matrix_table", watched)
        compress(model)
    assert alive == [*range(10, 0, -1), 0]


def test_neighbours_share_a_codebook():
    """Where it codes the second one's rows as well: engines join the rows then as they are coded."""
    model = nn.Module()
    for name, scale in (("q_proj", 0.02), ("k_proj", 0.02), ("v_proj", 20.0), ("o_proj", 0.02)):
        setattr(model, name, nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16))
        nn.init.normal_(getattr(model, name).weight, std=scale)
    plain = {name: weight.detach() for name, weight in model.named_parameters()}
    compress(model.eval())
    books = {name: table.codebook for name, table in tables_of(model).items()}
    assert books["q_proj"] is books["k_proj"]
    assert books["q_proj"].codec != books["v_proj"].codec and books["o_proj"] is not books["q_proj"]
    for name, weight in plain.items():
        assert_same_bits(model.state_dict()[name], weight)


# ---- wrong arguments ----


def test_reports_say_that_they_are_no_model():
    model = Net()
    report = compress(model)
    where = r": ibp.nn.compress\(model\) returned it, and changed the model in place. Do not assign the result"
    with pytest.raises(TypeError, match="'ModelReport' object is not callable" + where):
        report(IDS)
    for name in ("parameters", "eval", "generate", "config"):
        with pytest.raises(AttributeError, match=f"'ModelReport' object has no attribute '{name}'" + where):
            getattr(report, name)
    for function in (compress, ibp.nn.decompress, ibp.offload):
        with pytest.raises(TypeError, match="'ModelReport' object is no torch.nn.Module" + where):
            function(report)
    assert not hasattr(report, "_private")
    assert copy.deepcopy(report) == pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize(
    "model, options, error, message",
    [
        (3, {}, TypeError, "model is a int; wanted a torch.nn.Module"),
        (None, {"level": "high"}, ValueError, r"level is 'high'; wanted one of \['default', 'fast'\]"),
        (None, {"min_bytes": -1}, ValueError, "min_bytes"),
        (None, {"include": "lm_head"}, ValueError, "there is no module whose name matches 'lm_head'"),
        (None, {"exclude": ["head", "x*"]}, ValueError, r"there is no module whose name matches 'x\*'"),
        (nn.Linear(WIDTH, WIDTH).eval(), {}, ValueError, "model is a Linear, which cannot be replaced in place"),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH)), {}, ValueError, "weights of the model train: call model.eval"),
        (
            nn.Sequential(nn.Linear(WIDTH, WIDTH, device="meta")).eval(),
            {},
            ValueError,
            "0.weight is on the meta device: load",
        ),
    ],
)
def test_wrong_arguments(model, options, error, message):
    model = Net() if model is None else model
    with pytest.raises(error, match=message):
        compress(model, **options)
    assert not isinstance(model, nn.Module) or not tables_of(model)


def test_level_default():
    model = Net(dtype=torch.bfloat16)
    fast, small = compress(copy.deepcopy(model)), compress(model, level="default", fused=False)
    assert small.nbytes < fast.nbytes and not model.head.fused


@torch.no_grad()
def test_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    for tie in (False, True):
        plain, model, other = Net(tie=tie), Net(tie=tie), Net(tie=tie, seed=1)
        compress(model)
        compress(other)
        safetensors.save_model(plain, tmp_path / "plain.safetensors")
        safetensors.save_model(model, tmp_path / "coded.safetensors")
        assert (tmp_path / "plain.safetensors").read_bytes() == (tmp_path / "coded.safetensors").read_bytes()
        assert safetensors.load_model(other, tmp_path / "plain.safetensors") == (set(), [])
        assert_same_bits(other(IDS), plain(IDS))


@torch.no_grad()
def test_on_a_gpu(cuda):
    """Tables lie in device memory; with few vectors the kernel multiplies, up to rounding."""
    plain, model = Net(dtype=torch.bfloat16, tie=True).to(cuda), Net(dtype=torch.bfloat16, tie=True)
    compress(model)
    near = Net(dtype=torch.bfloat16, tie=True).to(cuda)
    compress(near, fused=False)
    for net in (model.to(cuda), near):
        assert all(table.is_cuda for table in tables_of(net).values()) and net.embed.weight is net.head.weight
        torch.testing.assert_close(net(IDS.to(cuda)), plain(IDS.to(cuda)), rtol=0.05, atol=0.05)
        for name, value in net.state_dict().items():
            assert_same_bits(value.cpu(), plain.state_dict()[name].cpu())
    assert_same_bits(near(IDS.to(cuda)), plain(IDS.to(cuda)))


@torch.no_grad()
def test_gpu_memory(cuda):
    """The plain weights go one by one: memory never holds all weights and all tables."""
    layers = [nn.Linear(2048, 2048, dtype=torch.bfloat16, device=cuda) for _ in range(16)]
    model = nn.Sequential(*layers).eval()
    del layers
    compress(nn.Sequential(nn.Linear(WIDTH, WIDTH, device=cuda)).eval())
    gc.collect()
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    report = ibp.nn.compress(model)
    gc.collect()
    after = torch.cuda.memory_allocated(cuda)
    assert before - after > 0.9 * (report.num_bytes - report.nbytes)
    assert torch.cuda.max_memory_allocated(cuda) - before < report.num_bytes / 2
