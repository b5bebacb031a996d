"""The parameters by which `parameters()` lists coded weights, as optimizers, DDP, FSDP2, PEFT, accelerate and others
take them."""

import copy
import functools
import io
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ibp
from helpers import assert_same_bits, assert_same_table, embedding
from ibp.nn._tables import is_fast_matrix
from ranks import Ranks
from test_coded_experts import PlainExperts
from test_compressing import IDS, WIDTH, Net, compress
from test_modules import one_process  # noqa: F401


def pair(dtype=torch.bfloat16, tie=False, seed=0):
    """A plain model, and a coded one of the same weights."""
    plain = Net(dtype, tie, seed)
    coded = copy.deepcopy(plain)
    compress(coded)
    return plain, coded


def coded_of(model):
    return {name: own for name, own in model.named_parameters() if isinstance(own, ibp.nn.TableParameter)}


def parameter_of(values, **options):
    """A module over a table of some values, and its parameter."""
    module = ibp.nn.Linear(ibp.compress(values, device="cpu", **options))
    return module, next(module.parameters())


def describe(model):
    return [(name, own.shape, own.dtype, own.device, own.numel(), own.nbytes) for name, own in model.named_parameters()]


# ---- what modules list ----


@pytest.mark.parametrize("tie", [False, True])
def test_they_are_those_of_the_plain_model(tie):
    plain, coded = pair(tie=tie)
    assert describe(coded) == describe(plain)
    assert len(coded_of(coded)) == 11 + (not tie) and not any(own.requires_grad for own in coded_of(coded).values())
    for name, own in coded_of(coded).items():
        assert own.is_leaf and own.table is coded.get_submodule(name.rpartition(".")[0]).weight
        assert_same_bits(own.clone(), plain.get_parameter(name).detach())
    names = [[name for name, _ in model.named_parameters(remove_duplicate=False)] for model in (plain, coded)]
    assert names[0] == names[1]


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts(is_transposed):
    plain = nn.Sequential(PlainExperts(has_bias=True, is_transposed=is_transposed))
    coded = copy.deepcopy(plain)
    compress(coded)
    assert describe(coded) == describe(plain) and len(coded_of(coded)) == 2
    for name, own in coded_of(coded).items():
        assert_same_bits(own.clone(), plain.get_parameter(name))
        assert own is getattr(coded[0], name[2:])
    with torch.no_grad():
        coded[0].down_proj.mul_(2)
        plain[0].down_proj.mul_(2)
    assert_same_bits(coded.state_dict()["0.down_proj"], plain[0].down_proj)
    with pytest.raises(RuntimeError, match="the down_proj of an ibp.nn.Experts is a table, which no parameter can"):
        coded[0].down_proj = plain[0].down_proj


def test_a_model_of_coded_weights_alone():
    module, weight = parameter_of(embedding(24, 32))
    assert weight is next(nn.Sequential(module).parameters())
    assert repr(weight) == "ibp.nn.TableParameter([24, 32], torch.float32, cpu)"
    assert isinstance(weight, nn.Parameter) and type(weight.data) is ibp.nn.TableParameter


def test_rows_that_train():
    bags = ibp.nn.EmbeddingBag(50, 16, mode="sum")
    (weight,) = bags.parameters()
    assert weight.requires_grad and repr(weight).endswith("cpu, requires_grad=True)")
    optimizers = torch.optim.AdamW(bags.parameters(), lr=0.1), ibp.optim.SGD(bags, lr=0.1)
    before = weight.clone()
    bags(torch.tensor([[1, 2]])).sum().backward()
    assert weight.grad is None
    for optimizer in optimizers:
        optimizer.step()
    assert weight.sum() != before.sum() and torch.equal(weight[3:], before[3:])
    assert not nn.Sequential(bags).requires_grad_(False)[0].weight.requires_grad
    assert not weight.requires_grad and bags.trainable
    assert weight.requires_grad_(True).requires_grad


def test_collections():
    collection = ibp.nn.EmbeddingCollection({"a": (9, 4), "b": (5, 4), "c": (7, 8)})
    assert [(name, tuple(own.shape)) for name, own in collection.named_parameters()] == [
        ("groups.0.weight", (14, 4)),
        ("groups.1.weight", (7, 8)),
    ]


# ---- functions of torch ----


@pytest.mark.parametrize(
    "read",
    [
        torch.sum,
        torch.norm,
        lambda x: x[3, 5:9],
        lambda x: x.T,
        lambda x: x.half(),
        lambda x: x.data.double(),
        lambda x: x.detach().view(-1),
        lambda x: x == x,
        lambda x: torch.cat([x, x]),
        lambda x: torch.zeros_like(x),
        lambda x: nn.functional.linear(torch.ones(2, 32), x),
        lambda x: torch.stack(torch._foreach_norm([x, x])),
        lambda x: torch.from_numpy(x.detach().cpu().numpy()),
        lambda x: torch.tensor(x.tolist()),
        lambda x: torch.from_numpy(np.asarray(x.data)),
        lambda x: torch.from_dlpack(x.detach()),
        lambda x: torch.zeros(3).set_(x.detach()),
        lambda x: torch.vmap(torch.sum)(x),
        lambda x: x.to("meta"),
        lambda x: x.new_ones(3),
        lambda x: nn.utils.parameters_to_vector([x]),
    ],
)
def test_reading(read):
    values = embedding(24, 32)
    got, wanted = read(parameter_of(values)[1]), read(nn.Parameter(values, requires_grad=False))
    assert type(got) is torch.Tensor and got.device == wanted.device
    if got.is_meta:
        got, wanted = got.new_zeros(1, device="cpu").expand(got.shape), torch.zeros(24, 32)
    assert_same_bits(got, wanted)


def test_what_a_parameter_is_asked():
    _, weight = parameter_of(embedding(24, 32))
    assert torch.equal(weight, weight.detach()) and weight in {weight} and weight.is_contiguous()
    assert weight.stride() == (32, 1) and weight.is_pinned() == torch.cuda.is_available()
    assert not weight.is_meta and weight.grad is None
    assert weight.to("cpu") is weight and weight.float() is weight
    moved = weight.to("cpu", copy=True)
    assert type(moved) is ibp.nn.TableParameter and moved.table is not weight.table
    assert_same_table(moved.table, weight.table)


def set_data(weight, values):
    weight.data = values


def set_items(weight, values):
    weight[2:5] = values[2:5]


@pytest.mark.parametrize(
    "write",
    [
        lambda weight, values: weight.copy_(values),
        lambda weight, values: weight.data.copy_(values),
        lambda weight, values: weight.mul_(2).add_(values),
        lambda weight, values: weight.copy_(values[0]),
        lambda weight, values: weight.zero_(),
        lambda weight, values: torch.add(values, 1, out=weight),
        lambda weight, values: torch._foreach_lerp_([weight, weight.detach()], [values, values], 0.5),
        lambda weight, values: nn.init.constant_(weight, 3),
        lambda weight, values: nn.utils.vector_to_parameters(values.reshape(-1), [weight]),
        set_data,
        set_items,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_writing(write, dtype):
    """The result is coded in place of the table's rows, and the module uses it."""
    values, other = embedding(64, 128, dtype), embedding(64, 128, dtype, seed=1)
    module = ibp.nn.Linear.from_linear(plain_of(values))
    weight, table, plain = module._parameters["weight"], module.weight, nn.Parameter(values.clone(), False)
    was_fast = is_fast_matrix(table)
    write(weight, other)
    write(plain, other)
    assert module.weight is table and table.version and is_fast_matrix(table) == was_fast
    assert_same_bits(weight.clone(), plain)
    assert_same_bits(module.state_dict()["weight"], plain)
    x = torch.ones(2, 128, dtype=dtype)
    assert_same_bits(module(x), nn.functional.linear(x, plain))


def plain_of(values):
    made = nn.Linear(values.shape[1], values.shape[0], bias=False)
    made.weight = nn.Parameter(values, requires_grad=False)
    return made


@torch.no_grad()
def test_what_is_written_takes_what_it_would_take_elsewhere():
    """Neither codebook nor slots of the earlier values limit it."""
    values = embedding(256, 64, torch.bfloat16)
    module, weight = parameter_of(torch.zeros_like(values))
    weight.copy_(values)
    wanted = ibp.compress(values, device="cpu")
    assert (module.weight.scheme, module.weight.slot_bytes) == (wanted.scheme, wanted.slot_bytes)
    assert module.weight.nbytes == wanted.nbytes
    assert_same_bits(weight.clone(), values)


@torch.no_grad()
def test_values_that_are_there_are_not_coded_anew():
    module, weight = parameter_of(embedding(24, 32))
    weight.copy_(weight.clone())
    weight.mul_(1)
    weight.data = weight.data
    assert not module.weight.version


def test_what_is_refused():
    module, weight = parameter_of(embedding(24, 32))
    for ask in (
        weight.requires_grad_,
        functools.partial(setattr, weight, "requires_grad", True),
        functools.partial(nn.Sequential(module).requires_grad_, True),
    ):
        with pytest.raises(RuntimeError, match=r"a coded weight \[24, 32\] is fixed and cannot require grad: ibp.nn"):
            ask()
    weight.requires_grad = False
    for wrong in (torch.ones(3), torch.ones(24, 32, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match=r"a coded weight \[24, 32\] of torch.float32 cannot become \["):
            weight.data = wrong
    with pytest.raises(RuntimeError, match="the weight of an ibp.nn.Linear is a table, which no parameter can replace"):
        module.weight = nn.Parameter(torch.ones(24, 32))
    with pytest.raises(RuntimeError, match="the weight of an ibp.nn.Linear is a table"):
        module.register_parameter("weight", None)


# ---- optimizers ----


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_optimizers_leave_fixed_weights_alone(options):
    plain, coded = pair(torch.float32)
    for name, own in plain.named_parameters():
        own.requires_grad_("norm" in name)
    tables = [own.table for own in coded_of(coded).values()]
    for model in (plain, coded):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, **options)
        model(IDS).square().mean().backward()
        norm = nn.utils.clip_grad_norm_((own for own in model.parameters() if own.dim() == 1), 0.5)
        nn.utils.clip_grad_norm_(coded_of(model).values(), 0.5)
        assert norm > 0 and nn.utils.clip_grad_norm_([own for own in model.parameters() if own.dim() > 1], 1.0) == 0
        optimizer.step()
        model.zero_grad()
    assert all(own.table is table and not table.version for own, table in zip(coded_of(coded).values(), tables))
    for name, own in plain.named_parameters():
        if "bias" not in name or "norm" in name:
            torch.testing.assert_close(coded.state_dict()[name], own.detach(), msg=name)


def test_averaged_models():
    plain, coded = pair()
    averages = []
    for model in (plain, coded):
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn())
        for _ in range(3):
            average.update_parameters(model)
        averages.append(average(IDS))
    assert_same_bits(*averages)


# ---- DDP and FSDP2 ----


def ddp_of(model):
    return nn.parallel.DistributedDataParallel(model)


def test_ddp_of_one_process(one_process):  # noqa: F811
    plain, coded = pair()
    for own in plain.parameters():
        own.requires_grad_(own.dim() == 1)
    models = [ddp_of(model) for model in (plain, coded)]
    for model in models:
        model(IDS).float().square().mean().backward()
    for name, own in plain.named_parameters():
        if own.requires_grad:
            assert_same_bits(coded.get_parameter(name).grad, own.grad)


def trained_by_ddp(rank):
    """Steps of DDP, on each rank from other weights and other ids. Returns the state, and whether tables are coded as
    `ibp.nn.compress` codes them."""
    _, coded = pair(seed=rank)
    tables = [own.table for own in coded_of(coded).values()]
    model = ddp_of(coded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(IDS.roll(rank + step, 1)).float().square().mean().backward()
        optimizer.step()
    found = [own.table for own in coded_of(coded).values()]
    is_same = all(one is other for one, other in zip(found, tables))
    return coded.state_dict(), is_same and all(map(is_fast_matrix, found[1:]))  # the first is the embedding's


def trained_rows(rank):
    """A step of rows that train beside plain weights under DDP. Returns the rows, and what DDP reduces."""
    torch.manual_seed(rank)
    net = nn.Sequential(ibp.nn.EmbeddingBag(50, 16, mode="sum"), nn.Linear(16, 3))
    model = ddp_of(net)
    model(torch.tensor([[rank, 7]])).sum().backward()
    ibp.optim.average_gradients(net)
    ibp.optim.SGD(net, lr=0.5).step()
    return net[0].weight.decompress(), net[1].weight.grad, sum(map(len, model._build_params_for_reducer()[0:1]))


def test_ddp_of_two_processes():
    """Each has the first one's weights from the start, as with plain weights."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(2, Path(folder))
        try:
            (first, is_good), (second, is_second_good) = ranks(trained_by_ddp)
            rows = ranks(trained_rows)
        finally:
            ranks.end()
    assert is_good and is_second_good
    plain = Net(torch.bfloat16)
    for name, value in first.items():
        assert_same_bits(second[name], value)
        if value.dim() > 1:
            assert_same_bits(value, plain.get_parameter(name).detach())
    assert_same_bits(rows[0][0], rows[1][0])
    assert_same_bits(rows[0][1], rows[1][1])
    assert rows[0][2] == 2  # weight and bias of the plain layer


@pytest.mark.parametrize("ignores", [False, True])
def test_fsdp2(one_process, ignores):  # noqa: F811
    """Tables stay whole, whether they are among `ignored_params` or not."""
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    plain, coded = pair()
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    options = {"ignored_params": set(coded_of(coded).values())} if ignores else {}
    for block in coded.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(coded, mesh=mesh, **options)
    assert len(coded_of(coded)) == 12
    assert {type(own).__name__ for own in coded.parameters()} == {"TableParameter", "DTensor"} or ignores
    assert_same_bits(coded(IDS), plain(IDS))
    coded(IDS).float().sum().backward()
    assert coded.blocks[0].norm.weight.grad is not None
    assert_same_bits(coded.state_dict()["head.weight"], plain.head.weight.detach())


def test_states_of_distributed_checkpoints():
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    plain, coded = pair()
    state = get_model_state_dict(coded)
    assert list(state) == list(plain.state_dict())
    other = pair(seed=1)[1]
    set_model_state_dict(other, state)
    assert_same_bits(other(IDS), plain(IDS))


# ---- copies, moves and conversions ----


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model)), torch_saved]
)
def test_copies(copied):
    _, model = pair(tie=True)
    other = copied(model)
    assert describe(other) == describe(model)
    assert other.embed._parameters["weight"] is other.head._parameters["weight"]
    assert coded_of(other)["embed.weight"].table is other.embed.weight is other.head.weight
    with torch.no_grad():
        other.embed._parameters["weight"].mul_(2)
    assert_same_bits(other.state_dict()["head.weight"], coded_of(other)["embed.weight"].clone())
    one = copied(coded_of(model)["blocks.0.up.weight"])
    assert type(one) is ibp.nn.TableParameter and torch.equal(one, coded_of(model)["blocks.0.up.weight"])


def test_modules_that_were_pickled_before():
    """Their tables were not among parameters, and their holders knew neither form nor place."""
    for module in (
        ibp.nn.Conv1D(ibp.compress(embedding(24, 32), device="cpu"), torch.zeros(24)),
        ibp.nn.Embedding(30, 8, device="cpu"),
    ):
        wanted = describe(module)
        state = {**vars(module), "stays": module.stays}
        state["_parameters"] = {name: own for name, own in state["_parameters"].items() if name != "weight"}
        state["_shared"] = type(module._shared)(module.weight, False)
        old = type(module).__new__(type(module))
        old.__setstate__(state)
        assert describe(old) == wanted and torch.equal(*(next(each.parameters()) for each in (old, module)))
        assert old._shared.stays == module.stays
        assert next(old.parameters()).requires_grad == next(module.parameters()).requires_grad


def test_moving():
    plain, coded = pair()
    held = coded_of(coded)
    for move in (lambda model: model.to("cpu"), nn.Module.cpu, nn.Module.bfloat16, nn.Module.share_memory):
        assert move(coded) is coded
        assert all(own is held[name] for name, own in coded_of(coded).items())
    with pytest.raises(TypeError, match="a table keeps its own, torch.bfloat16"):
        coded.half()
    assert describe(coded) == describe(plain)
    coded._apply(lambda tensor: tensor.clone())
    assert all(own is held[name] and own.table is coded.get_submodule(name[:-7]).weight for name, own in held.items())
    for assign in (False, True):
        coded.load_state_dict(ibp.nn.coded_state_dict(pair(seed=2)[1]), assign=assign)
        assert all(own is held[name] for name, own in coded_of(coded).items())
        assert_same_bits(coded_of(coded)["head.weight"].clone(), Net(torch.bfloat16, seed=2).head.weight.detach())


def test_tools_that_set_data():
    """As offloading tools move parameters: the table moves with its parameter, and a table that stays is used on."""
    module, weight = parameter_of(embedding(24, 32))
    table = module.weight
    weight.data = weight.data.to("cpu", copy=True)
    assert module.weight is weight.table is not table
    assert_same_table(module.weight, table)
    staying = ibp.nn.EmbeddingBag(ibp.compress(embedding(24, 32), device="cpu"))
    (weight,), table = staying.parameters(), staying.weight
    weight.data = weight.data.to("cpu", copy=True)
    assert staying.weight is weight.table is table
    assert staying.double().weight is table and weight.dtype == torch.float32


def test_replicas():
    """`torch.nn.DataParallel` sets copies of the parameters as attributes of modules without parameters."""
    module, weight = parameter_of(embedding(24, 32))
    replica, x = module._replicate_for_data_parallel(), embedding(3, 32)
    replica._parameters["bias"] = None
    for copied in (weight.detach(), weight.clone()):
        replica.weight = copied
        assert replica.weight is module.weight
        assert_same_bits(replica(x), module(x))


@pytest.mark.slow
@torch.no_grad()
def test_compiled():
    torch.compiler.reset()
    plain, coded = pair(tie=True)
    compiled = torch.compile(coded, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IDS), plain(IDS))
    assert len(list(compiled.parameters())) == len(list(plain.parameters()))
    coded.state_dict(), coded.to("cpu")
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(IDS), plain(IDS))


# ---- frameworks ----


@pytest.mark.frameworks
@pytest.mark.parametrize("tie", [False, True])
@torch.no_grad()
def test_accelerates_hooks(tie):
    """Hooks move plain tensors and leave tables where they are."""
    accelerate = pytest.importorskip("accelerate")
    hooks = accelerate.hooks
    parts = {"embed": "cpu", "blocks": "cpu", "head": "cpu"}
    on_cpu = functools.partial(hooks.AlignDevicesHook, execution_device="cpu")
    for attach in (
        lambda model: accelerate.cpu_offload(model, execution_device="cpu"),
        lambda model: accelerate.dispatch_model(model, parts, main_device="cpu", force_hooks=True),
        lambda model: hooks.add_hook_to_module(model, on_cpu(place_submodules=True, tied_params_map={})),
        lambda model: hooks.add_hook_to_module(model.blocks[0], on_cpu(offload=True, place_submodules=True)),
        lambda model: hooks.add_hook_to_module(model.head, on_cpu(offload=True)),
    ):
        plain, coded = pair(tie=tie)
        attach(coded)
        assert_same_bits(coded(IDS), plain(IDS))
        hooks.remove_hook_from_module(coded, recurse=True)
        assert_same_bits(coded(IDS), plain(IDS))
        assert describe(coded) == describe(plain)
    assert accelerate.infer_auto_device_map(coded, {"cpu": 1 << 30}) == {"": "cpu"}


@pytest.mark.frameworks
def test_peft_counts_them():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["up", "down"])
    counts = []
    for model in pair():
        model = peft.get_peft_model(model.requires_grad_(False), config)
        counts.append(model.get_nb_trainable_parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model.train()(IDS).float().square().mean().backward()
        optimizer.step()
    assert counts[0] == counts[1] and 0 < counts[0][0] < counts[0][1]


@pytest.mark.frameworks
def test_transformers_asks_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, **sizes)).bfloat16().eval()
    asked = model.num_parameters(), model.dtype, model.device, model.get_memory_footprint()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    compress(model)
    assert (model.num_parameters(), model.dtype, model.device, model.get_memory_footprint()) == asked
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert not coded_of(loaded)
    for name, value in loaded.state_dict().items():
        assert_same_bits(value, state[name])


# ---- on a GPU ----


def test_on_a_gpu(cuda):
    plain, coded = pair()
    held = coded_of(coded)
    coded.to(cuda)
    assert all(own is held[name] and own.device == cuda for name, own in coded_of(coded).items())
    assert describe(coded) == describe(plain.to(cuda))
    weight = held["head.weight"]
    assert_same_bits(weight.clone().cpu(), plain.head.weight.detach().cpu())
    with torch.no_grad():
        weight.mul_(2)
    assert_same_bits(weight.cpu().clone(), 2 * plain.head.weight.detach().cpu())
    weight.data = weight.data.cpu()
    assert coded.head.weight.device.type == "cpu" == weight.device.type
    pinned = weight.data.pin_memory()
    assert pinned.is_pinned() and pinned.table.is_pinned()
    weight.data = pinned.to(cuda, non_blocking=True)
    weight.data.record_stream(torch.cuda.current_stream())
    assert coded.head.weight.device == cuda == weight.device


def test_a_table_that_stays_beside_a_gpu(cuda):
    """Its parameter is on the device that the module was moved to, as DDP wants it."""
    bags = ibp.nn.EmbeddingBag(ibp.compress(embedding(24, 32), memory="pinned"), mode="sum")
    model = nn.Sequential(bags, nn.Linear(32, 3)).to(cuda)
    assert {own.device for own in model.parameters()} == {cuda} and bags.weight.is_pinned()
    assert_same_bits(next(bags.parameters()).clone().cpu(), embedding(24, 32))
    assert next(copy.deepcopy(model).parameters()).device == cuda
    model.cpu()
    assert {own.device.type for own in model.parameters()} == {"cpu"}
