"""Models of diffusers whose offloaded groups are compressed: what they compute, bit for bit, and what they hold."""

import contextlib
import copy
import pickle

import pytest
import torch

pytestmark = pytest.mark.frameworks
pytest.importorskip("diffusers")

from diffusers import AutoencoderKL, UNet2DModel  # noqa: E402
from diffusers.hooks import apply_group_offloading  # noqa: E402
from diffusers.hooks.group_offloading import ModuleGroup, _maybe_remove_and_reapply_group_offloading  # noqa: E402

import ibp  # noqa: E402
from helpers import assert_same_bits  # noqa: E402
from ibp._offload.weights import Resting  # noqa: E402
from ibp.integrations import diffusers as adapter  # noqa: E402
from ibp.integrations.diffusers import close, compress_groups  # noqa: E402

CPU = torch.device("cpu")
ON_CPU = {"memory": "host"}
LEVELS = [{"offload_type": "leaf_level"}, {"offload_type": "block_level", "num_blocks_per_group": 1}]
levels = pytest.mark.parametrize("level", LEVELS, ids=["leaf", "block"])


def make_unet():
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return unet.to(torch.bfloat16).eval()


class Toy(torch.nn.Module):
    """What else groups hold: a parameter of the top, buffers large and small, one that changes, a shared parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight
        self.norm = torch.nn.BatchNorm1d(64)
        self.top = torch.nn.Parameter(torch.randn(64, 64))
        self.small = torch.nn.Parameter(torch.randn(64))
        self.whole = torch.nn.Parameter(torch.randint(0, 9, (64, 64)), requires_grad=False)
        self.register_buffer("large", torch.randn(64, 64))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        x = x @ self.top + self.small + self.large[0] + self.whole[1]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


def offloaded(model, level=None, device=CPU, **options):
    model = copy.deepcopy(model)
    apply_group_offloading(model, onload_device=device, offload_device=CPU, **(level or LEVELS[0]), **options)
    return model


def compute(model, device=CPU):
    """Of every kind of model here, on an input of its own."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        if isinstance(model, Toy):
            return model(torch.randn(8, 64, generator=generator).to(device)).cpu()
        x = torch.randn(1, 3, 16, 16, generator=generator).to(device, torch.bfloat16)
        return (model(x, 3) if isinstance(model, UNet2DModel) else model(x)).sample.cpu()


def tables_of(model):
    weights = adapter._weights_of(adapter._groups_of(model))
    return {parameter: weight.coded.table for parameter, weight in weights.items()}


def memory_of(model):
    """Bytes of the parameters that are not at rest."""
    return sum(p.nbytes for p in model.parameters() if not isinstance(p, Resting))


def test_what_to_save_instead_of_compressed_groups():
    groups = compress_groups(offloaded(make_unet(), LEVELS[0]), **ON_CPU)
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"cannot be pickled or copied: save the model's state_dict\(\)"):
            copied(groups)


@levels
def test_a_unet(level):
    plain = make_unet()
    expected, model = compute(plain), offloaded(plain, level)
    raw_bytes = memory_of(model)
    sizes = compress_groups(model, **ON_CPU).stats()
    assert 0.9 * raw_bytes < sizes.original_bytes <= raw_bytes and sizes.stored_bytes < 0.7 * sizes.original_bytes
    assert memory_of(model) < 0.1 * raw_bytes
    for _ in range(3):
        assert_same_bits(compute(model), expected)
        for (name, parameter), original in zip(model.named_parameters(), plain.parameters()):
            assert (parameter.shape, parameter.dtype, parameter.device) == (original.shape, original.dtype, CPU), name
    assert memory_of(model) < 0.1 * raw_bytes and model.dtype == torch.bfloat16
    close(model)
    for parameter, original in zip(model.parameters(), plain.parameters()):
        assert_same_bits(parameter.data, original.data)
    assert_same_bits(compute(model), expected)


def test_blocks_of_an_autoencoder():
    """Groups within groups, by the names of blocks."""
    torch.manual_seed(0)
    plain = AutoencoderKL(block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2,
                          up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8)  # fmt: skip
    plain = plain.to(torch.bfloat16).eval()
    model = offloaded(plain, LEVELS[1], block_modules=["encoder", "decoder"])
    compress_groups(model, **ON_CPU)
    assert_same_bits(compute(model), compute(plain))


@levels
def test_what_else_groups_hold(level):
    """Buffers keep what a call changes, a shared parameter has one table, integers come back."""
    plain = Toy()
    model = offloaded(plain, level)
    sizes = compress_groups(model, **ON_CPU).stats()
    assert sizes.original_bytes == 3 * 64 * 64 * 4 + 64 * 64 * 8  # two weights of blocks, top, and whole
    assert_same_bits(model.large, plain.large)
    for i in range(1, 4):
        assert_same_bits(compute(model), compute(plain))
        assert model.calls.item() == plain.calls.item() == i
        assert_same_bits(model.norm.running_var, plain.norm.running_var)
    tables = tables_of(model)
    assert len(tables) == 4 and set(tables) >= {model.top, model.whole, model.blocks[0].weight}
    close(model)
    assert model.blocks[2].weight is model.blocks[0].weight
    for x, expected in zip(model.state_dict().values(), plain.state_dict().values()):
        assert_same_bits(x, expected)
    assert_same_bits(compute(model), compute(plain))


def test_channels_last():
    """Strides come back, which convolutions choose their arithmetic by."""
    plain = make_unet().to(memory_format=torch.channels_last)
    model = offloaded(plain)
    strides = {name: p.stride() for name, p in plain.named_parameters()}
    compress_groups(model, **ON_CPU)
    assert_same_bits(compute(model), compute(plain))
    for group in adapter._groups_of(model):
        group.onload_()
    for name, p in model.named_parameters():
        assert p.stride() == strides[name], (name, p.shape)
    close(model)
    for (name, p), original in zip(model.named_parameters(), plain.parameters()):
        assert p.stride() == strides[name]
        assert_same_bits(p.data, original.data)


@levels
def test_state_dict_of_a_model_at_rest(level, tmp_path):
    plain = make_unet()
    model = offloaded(plain, level)
    compress_groups(model, **ON_CPU)
    for prefix in ("", "unet."):
        state = model.state_dict(prefix=prefix)
        assert list(state) == [prefix + name for name in plain.state_dict()]
        for name, x in plain.state_dict().items():
            assert_same_bits(state[prefix + name], x)
    model.save_pretrained(tmp_path)
    loaded = UNet2DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert_same_bits(compute(loaded.eval()), compute(plain))


@levels
def test_a_conversion_is_refused_before_it_changes_anything(level):
    plain = Toy()
    model = offloaded(plain, level)
    with compress_groups(model, **ON_CPU):
        for convert in (model.half, model.double, lambda: model.to(torch.bfloat16), model.blocks.half):
            with pytest.raises(RuntimeError, match="is offloaded and keeps its dtype, device and memory format"):
                convert()
        assert {name: x.dtype for name, x in model.state_dict().items()} == {
            name: x.dtype for name, x in plain.state_dict().items()
        }
        assert_same_bits(compute(model), compute(plain))
    assert not any("_apply" in vars(module) for module in model.modules())


@levels
def test_a_parameter_at_rest(level):
    """Its values are decoded for those who ask, and it refuses to be written to."""
    plain = Toy()
    model = offloaded(plain, level)
    with compress_groups(model, **ON_CPU):
        weight = model.blocks[1].weight
        for _ in range(2):
            for name, parameter in model.named_parameters():
                assert_same_bits(parameter.detach(), plain.get_parameter(name).detach())
            assert_same_bits(model.top[3] * 2, plain.top[3] * 2)
            for write in (weight.zero_, weight.data.zero_, lambda: torch._foreach_mul_([weight], 2)):
                with pytest.raises(RuntimeError, match="blocks.1.weight is offloaded and cannot be written to"):
                    with torch.no_grad():
                        write()
            with pytest.raises(RuntimeError, match="blocks.1.weight is offloaded and cannot be written to"):
                model.load_state_dict(Toy().state_dict())
            compute(model)
    assert_same_bits(weight, plain.blocks[1].weight)
    assert type(weight) is torch.nn.Parameter


class Norm(torch.nn.Module):
    """A module whose parts its block calls, as DiT's blocks do with the embedding of their norm."""

    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Linear(64, 64)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = Norm(), torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(x)


class CallsParts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x + self.blocks[0].norm.emb(x)))
        return x


@pytest.mark.parametrize("num_blocks", [1, 2])
@torch.no_grad()
def test_parts_of_a_block_that_is_at_rest(num_blocks):
    plain = CallsParts()
    model = offloaded(plain, {"offload_type": "block_level", "num_blocks_per_group": num_blocks})
    compress_groups(model, **ON_CPU)
    x = torch.randn(2, 64)
    for _ in range(2):
        assert_same_bits(model(x), plain(x))


def test_again_and_undone():
    plain = make_unet()
    model = offloaded(plain)
    sizes = compress_groups(model, scheme="planes", **ON_CPU).stats()
    tables = tables_of(model)
    assert compress_groups(model, **ON_CPU).stats() == sizes
    assert tables_of(model) == tables
    assert {table.scheme for table in tables.values()} <= {"planes", "raw"}
    assert_same_bits(compute(model), compute(plain))
    for _ in range(2):
        close(model)
    assert not tables_of(model)
    assert compress_groups(model, scheme="planes", **ON_CPU).stats() == sizes
    assert_same_bits(compute(model), compute(plain))


def test_what_compress_groups_gives_undoes_it():
    plain = make_unet()
    model = offloaded(plain)
    with compress_groups(model, **ON_CPU) as groups:
        assert groups.model is model and tables_of(model)
        sizes = groups.stats()
        assert 0 < sizes.savings < 1 and sizes.stored_bytes < groups.nbytes
        share = groups.nbytes / sizes.original_bytes
        assert f"UNet2DModel, nbytes={groups.nbytes:,} ({share:.1%} of {sizes.original_bytes:,}), st" in repr(groups)
        assert_same_bits(compute(model), compute(plain))
    assert not tables_of(model) and groups.stats() == adapter.GroupBytes(0, 0) and groups.stats().savings == 0
    for parameter, original in zip(model.parameters(), plain.parameters()):
        assert_same_bits(parameter.data, original.data)
    groups.close()
    assert_same_bits(compute(model), compute(plain))


def test_codebooks_are_shared():
    model = offloaded(Toy())
    compress_groups(model, **ON_CPU)
    tables = tables_of(model)
    assert tables[model.blocks[0].weight].codebook is tables[model.blocks[1].weight].codebook
    assert tables[model.top].codebook is not tables[model.blocks[0].weight].codebook


def test_diffusers_removes_its_hooks():
    """As it does to load LoRAs: the parameters are there again, and can be compressed again."""
    plain = make_unet()
    model = offloaded(plain)
    sizes = compress_groups(model, **ON_CPU).stats()
    _maybe_remove_and_reapply_group_offloading(model)
    for parameter, original in zip(model.parameters(), plain.parameters()):
        assert_same_bits(parameter.data, original.data)
    assert_same_bits(compute(model), compute(plain))
    assert compress_groups(model, **ON_CPU).stats() == sizes
    assert_same_bits(compute(model), compute(plain))


def test_what_undoes_it_is_no_model():
    groups = compress_groups(offloaded(Toy()), **ON_CPU)
    where = r"compress_groups\(model\) returned it, and changed the model in place"
    with pytest.raises(TypeError, match=f"'CompressedGroups' object is not callable: {where}"):
        groups(torch.randn(8, 64))
    with pytest.raises(TypeError, match=f"'CompressedGroups' object is no torch.nn.Module: {where}"):
        compress_groups(groups)


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="UNet2DModel has no group offloading: call diffusers' apply_group_offloading"):
        compress_groups(make_unet())
    for call in (compress_groups, close):
        with pytest.raises(TypeError, match="model is a dict; wanted a torch.nn.Module"):
            call({})
    close(make_unet())
    on_disk = offloaded(make_unet(), offload_to_disk_path=str(tmp_path))
    with pytest.raises(ValueError, match="a group is offloaded to disk, .*; wanted host memory"):
        compress_groups(on_disk)
    model = offloaded(Toy())
    with pytest.raises(TypeError, match="colour: no such option"):
        compress_groups(model, colour=1)
    next(iter(adapter._groups_of(model))).offload_device = torch.device("meta")
    with pytest.raises(ValueError, match="a group is offloaded to meta; wanted the CPU"):
        compress_groups(model)
    assert not model.top.isnan().any()


class FakeStream:
    """Notes who waits for it; the stand-in of a side stream, which the CPU has none of."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def synchronize(self):
        self.log.append(f"{self.name} is waited for")

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("onload_self", [False, True])
@pytest.mark.parametrize("record_stream", [False, True])
def test_the_order_of_a_stream(onload_self, record_stream, monkeypatch):
    """The side stream is waited for before it is used, and by the current one where nothing prefetches. Memory is freed
    when what computes with it is over, unless the allocator knows of it."""
    model, log = offloaded(Toy()), []
    groups = list(adapter._groups_of(model))
    for group in groups:
        group.stream, group.record_stream, group.onload_self = FakeStream(log, "side"), record_stream, onload_self
        group.cpu_param_dict = {p: p.data for p in [*adapter._parameters_of(group), *adapter._buffers_of(group)]}

        @contextlib.contextmanager
        def stream(side):
            log.append("on the side")
            yield
            log.append("back")

        monkeypatch.setattr(group._torch_accelerator_module, "stream", stream, raising=False)
        current = FakeStream(log, "current")
        monkeypatch.setattr(group._torch_accelerator_module, "current_stream", lambda: current, raising=False)
        monkeypatch.setattr(ModuleGroup, "_to_cpu", staticmethod(lambda tensor, low: tensor.data.clone()))
        monkeypatch.setattr(
            ModuleGroup, "_pinned_memory_tensors", lambda self: contextlib.nullcontext(self.cpu_param_dict)
        )
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, s: log.append(f"{s.name} is recorded"))
    real = ibp.decompress
    monkeypatch.setattr(ibp, "decompress", lambda *a, **k: log.append("decode") or real(*a, **k))
    monkeypatch.setattr(ModuleGroup, "__init__", with_backend(ModuleGroup.__init__, groups[0]))
    expected = model.top.data.clone()
    compress_groups(model, **ON_CPU)
    group = next(group for group in groups if model.top in adapter._parameters_of(group))
    log.clear()
    group.onload_()
    assert_same_bits(model.top.data, expected)
    decoded = log.index("decode")
    assert log[0] == "side is waited for" and log[decoded - 1] == "on the side"
    recorded = ["current is recorded"] * (2 * record_stream)  # top and whole
    assert log[decoded + 1 :] == [*recorded, "back", *["current waits for side"] * onload_self]
    log.clear()
    group.offload_()
    assert log == ["current is waited for"] * (not record_stream) and isinstance(model.top, Resting)
    close(model)
    assert_same_bits(model.top.data, expected)
    assert group.cpu_param_dict[model.top] is not None and not model.top.isnan().any()


def with_backend(init, group):
    """ModuleGroup.__init__ that takes another group's stand-ins."""

    def make(self, *arguments, **options):
        init(self, *arguments, **options)
        self._torch_accelerator_module = group._torch_accelerator_module

    return make


# ---- on a GPU --------------------------------------------------------------------------------------------------------

STREAMS = [
    {},
    {"non_blocking": True},
    {"use_stream": True},
    {"use_stream": True, "record_stream": True},
    {"use_stream": True, "low_cpu_mem_usage": True},
]


@levels
@pytest.mark.parametrize("options", STREAMS, ids=str)
@pytest.mark.parametrize("path", [None, "copy", "gpu"])
def test_on_a_gpu(cuda, level, options, path):
    plain = make_unet()
    expected = compute(copy.deepcopy(plain).to(cuda), cuda)
    model = offloaded(plain, level, cuda, **options)
    compress_groups(model, path=path)
    tables = tables_of(model)
    assert all(table.is_pinned() and table.device == CPU for table in tables.values())
    for _ in range(4):  # the first traces the order that the others prefetch in
        assert_same_bits(compute(model, cuda), expected)
    assert {parameter.device for parameter in model.parameters()} == {CPU}
    close(model)
    for parameter, original in zip(model.parameters(), plain.parameters()):
        assert_same_bits(parameter.data, original.data)
    assert_same_bits(compute(model, cuda), expected)


@pytest.mark.parametrize("use_stream", [False, True])
def test_buffers_on_a_gpu(cuda, use_stream):
    plain = Toy()
    expected = compute(copy.deepcopy(plain).to(cuda), cuda)
    model = offloaded(plain, LEVELS[0], cuda, use_stream=use_stream)
    compress_groups(model)
    assert_same_bits(compute(model, cuda), expected)
    assert_same_bits(model.large.cpu(), plain.large)
    close(model)
    for name, x in model.named_parameters():
        assert_same_bits(x.data, dict(plain.named_parameters())[name].data)


def test_memory_of_the_gpu_is_freed(cuda):
    model = offloaded(make_unet(), LEVELS[0], cuda, use_stream=True)
    compress_groups(model)
    compute(model, cuda)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated(cuda)
    for _ in range(3):
        compute(model, cuda)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(cuda) <= held + (1 << 20)
