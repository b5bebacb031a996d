"""Models whose weights are coded while a checkpoint is read."""

import json
import threading

import pytest
import torch

import ibp
from helpers import assert_same_bits, in_threads
from ibp.adapters import ModelLoading, ModelOptions, compress_matrix

SMALL = {"min_bytes": 1 << 10}


class Model(torch.nn.Module):
    """An embedding, a tied head, a matrix, and a norm that is no matrix."""

    def __init__(self, rows=64):
        super().__init__()
        self.embed, self.up = torch.nn.Embedding(rows, 64), torch.nn.Linear(64, 64)
        self.norm, self.head = torch.nn.LayerNorm(64), torch.nn.Linear(64, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.up(self.embed(ids))))


def made(seed=0):
    torch.manual_seed(seed)
    return Model().bfloat16().eval()


def blank():
    with torch.device("meta"):
        return Model().bfloat16().eval()


def load(loading, model, state):
    """As a framework does: a tensor that stays plain becomes a parameter."""
    tied = {}
    for name, value in state.items():
        held = loading.put(name, value)
        if isinstance(held, torch.Tensor):
            path, _, last = name.rpartition(".")
            parameter = tied.setdefault(held.data_ptr(), torch.nn.Parameter(held, requires_grad=False))
            setattr(model.get_submodule(path), last, parameter)


@pytest.mark.parametrize("later", [(), ("embed.weight", "head.weight")])
def test_a_model_is_coded_as_compress_codes_it(later):
    plain, model = made(), blank()
    loading = ModelLoading(ModelOptions(**SMALL), model, later=later)
    state = plain.state_dict()
    load(loading, model, state if later else {name: state[name] for name in state if name != "head.weight"})
    report = loading.finish()
    wanted = ibp.nn.compress(made(), **SMALL)
    assert sorted(report.coded) == sorted(wanted.coded) and report.num_bytes == wanted.num_bytes
    assert model.embed.weight is model.head.weight
    ids = torch.arange(9)
    assert_same_bits(model(ids), plain(ids))


def test_a_shared_weight_is_put_under_each_of_its_names():
    plain, model = made(), blank()
    loading, state = ModelLoading(ModelOptions(**SMALL), model), plain.state_dict()
    load(loading, model, state)
    table = loading.put("embed.weight", state["embed.weight"])  # and a second time
    assert table is model.embed.weight is model.head.weight is loading.put("head.weight", state["head.weight"].clone())
    read = ibp.compress(state["head.weight"], layout="packed")
    for given in (read, loading.value_of("head.weight", read, "cpu", None)):
        assert loading.put("head.weight", given) is table
    report = loading.finish()
    assert sorted(report.coded) == ["embed", "head", "up"]
    assert report.num_bytes == sum(weight.nbytes for weight in (plain.embed.weight, plain.up.weight))
    assert_same_bits(model(torch.arange(9)), plain(torch.arange(9)))


@pytest.mark.parametrize(
    "change", [lambda x: x.flip(0), lambda x: x[:9], lambda x: x.float(), lambda x: ibp.compress(x.flip(0))]
)
def test_a_shared_weight_of_two_values_is_refused(change):
    model, state = blank(), made().state_dict()
    loading = ModelLoading(ModelOptions(**SMALL), model)
    load(loading, model, {name: state[name] for name in state if name != "head.weight"})
    with pytest.raises(ValueError, match="head.weight has been put before with other values.*later="):
        loading.put("head.weight", change(state["head.weight"]))
    assert_same_bits(model.head.weight.decompress(), state["embed.weight"])


def test_a_transposed_matrix_is_put_twice():
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    weight = torch.randn(64, 128).mul(0.02).bfloat16()  # Conv1D multiplies by the columns
    with torch.device("meta"):
        model = torch.nn.Sequential(Conv1D(128, 64)).bfloat16().eval()
    loading = ModelLoading(ModelOptions(**SMALL), model)
    table = loading.put("0.weight", weight)
    assert table.shape == (128, 64)
    for given in (weight, table, ibp.compress(weight.mT.contiguous())):
        assert loading.put("0.weight", given) is table
    with pytest.raises(ValueError, match="0.weight has been put before"):
        loading.put("0.weight", ibp.compress(weight))


def test_names_and_places():
    loading = ModelLoading(ModelOptions(exclude="up", **SMALL), blank(), later=["head.weight"])
    assert loading.has("head.weight") and not loading.codes("head.weight")
    assert loading.codes("embed.weight") and not loading.has("up.weight") and not loading.has("norm.weight")
    loading.leave(["embed"])
    assert loading.has("embed.weight") and not loading.codes("embed.weight")
    with pytest.raises(ValueError, match="there is no module whose name matches 'down'"):
        ModelLoading(ModelOptions(include="down"), blank())


def test_a_weight_without_values():
    """A checkpoint lacks a matrix, or has another shape of it."""
    state, model = made().state_dict(), blank()
    loading = ModelLoading(ModelOptions(**SMALL), model)
    wrong = state.pop("up.weight")[:, :32].contiguous()
    assert loading.put("up.weight", wrong) is wrong
    load(loading, model, {name: state[name] for name in state if name != "head.weight"})
    with pytest.raises(ValueError, match="up.weight is on the meta device: load the model's weights first"):
        loading.finish()


def test_tables_of_a_checkpoint():
    """A table of the form that a module needs is taken as it is. Another one is decoded, and coded anew."""
    plain, model = made(), blank()
    loading = ModelLoading(ModelOptions(**SMALL), model)
    weight = plain.up.weight.detach()
    fits, other = compress_matrix(weight), ibp.compress(weight, layout="packed")
    assert loading.takes("up.weight", fits, None) and not loading.takes("up.weight", fits, torch.float32)
    assert not loading.takes("up.weight", other, None) and not loading.takes("norm.weight", fits, None)
    assert loading.value_of("up.weight", fits, "cpu", None) is fits.to("cpu")
    again = loading.value_of("up.weight", other, "cpu", torch.bfloat16)
    assert isinstance(again, ibp.CompressedTensor) and again.fits_linear
    assert_same_bits(again.decompress(), weight)
    held = loading.value_of("norm.bias", other, "cpu", torch.float32)
    assert_same_bits(held, weight.float())


def test_a_weight_of_another_shape_is_the_hosts_affair():
    model = blank()
    loading = ModelLoading(ModelOptions(**SMALL), model)
    wrong = torch.randn(8, 64).bfloat16()
    assert loading.put("up.weight", wrong) is wrong
    assert_same_bits(loading.put("up.weight", compress_matrix(wrong.repeat(4, 1))), wrong.repeat(4, 1))
    assert isinstance(model.up, torch.nn.Linear)


def test_threads_decode_one_table_at_a_time(monkeypatch):
    table, inside, most = ibp.compress(torch.randn(64, 64), device="cpu", memory="host"), [], []
    decompress = ibp.CompressedTensor.decompress

    def watched(self, **options):
        inside.append(threading.get_ident())
        most.append(len(inside))
        made = decompress(self, **options)
        inside.remove(threading.get_ident())
        return made

    monkeypatch.setattr(ibp.CompressedTensor, "decompress", watched)
    in_threads(*[lambda: [ModelLoading.decoded(table, "cpu", torch.float64) for _ in range(20)] for _ in range(4)])
    assert len(most) == 80 and max(most) == 1


def test_options():
    options = ModelOptions(include="up", exclude=("norm", "head"), level="default", fused=False, min_bytes=5)
    again = ModelOptions(**json.loads(json.dumps(vars(options))))
    assert vars(again) == vars(options) and again.exclude == ["norm", "head"]
    model = made()
    ibp.nn.compress(model, exclude="up", fused=False, **SMALL)
    own = ModelOptions.of(model)
    other = made()
    assert sorted(ibp.nn.compress(other, **vars(own)).coded) == ["embed", "head"]
    assert not own.fused and own.exclude == ["up"]
    for wrong, error in (
        ({"level": "best"}, ValueError),
        ({"min_bytes": -1}, ValueError),
        ({"min_bytes": 0.5}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(wrong))):
            ModelOptions(**wrong)


def test_modules_that_a_host_has_merged():
    options = ModelOptions(include=["*.q_proj", "mlp"], exclude="*.k_proj")
    assert options.includes("layer.q_proj") and options.includes("mlp.up_proj") and not options.includes("layer.v_proj")
    assert options.includes("layer.qkv_proj", "layer.q_proj", "layer.v_proj")
    assert not options.includes("layer.qkv_proj", "layer.q_proj", "layer.k_proj")
