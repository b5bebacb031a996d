"""CompressedWeights: the tensors it was given, bit for bit, and models that accelerate runs from it."""

import pickle
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.frameworks
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import cpu_offload, dispatch_model  # noqa: E402
from accelerate.hooks import remove_hook_from_module  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from helpers import assert_same_bits, embedding  # noqa: E402
from ibp.integrations.accelerate import CompressedWeights  # noqa: E402

ON_CPU = {"memory": "host"}
IDS = torch.arange(1, 41).view(2, 20)


def make_model(tied, device="cpu"):
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).to(device).eval()


def logits(model, device="cpu"):
    with torch.no_grad():
        return model(IDS.to(device)).logits.cpu()


def states():
    x = embedding(64, 128, torch.bfloat16)
    return {
        "layers.0.weight": x,
        "layers.1.weight": embedding(64, 128, torch.bfloat16, seed=1),
        "tied": x,
        "view of it": x[:32],
        "float32": embedding(40, 64),
        "random": torch.randint(256, (8192,), dtype=torch.uint8),
        "strided": embedding(128, 64).t(),
        "channels last": torch.randn(64, 16, 3, 5).to(memory_format=torch.channels_last),
        "overlapping": torch.randn(100, 1).expand(100, 30),
        "bias": torch.randn(128),
        "number": torch.tensor(3),
        "none": torch.zeros(0, 4),
        "none either": torch.zeros(0, 4),
        "flags": torch.rand(5000) < 0.5,
        "parameter": torch.nn.Parameter(embedding(64, 64)),
    }


@pytest.mark.parametrize("as_pairs", [False, True], ids=["state dict", "pairs"])
def test_it_holds_what_it_was_given(as_pairs):
    given = states()
    expected = {name: x.detach().clone() for name, x in given.items()}
    weights = CompressedWeights(iter(given.items()) if as_pairs else given, **ON_CPU)
    for x in given.values():
        x.detach().zero_()  # the values are its own
    assert list(weights) == list(expected) and len(weights) == len(expected)
    assert "tied" in weights and "other" not in weights and weights.get("other") is None
    for name, x in weights.items():
        assert type(x) is torch.Tensor and not x.requires_grad and x.stride() == expected[name].stride()
        assert_same_bits(x, expected[name])
    with pytest.raises(KeyError):
        weights["other"]
    tables = weights.tables
    assert set(tables) == set(expected) - {"bias", "number", "none", "none either"}
    assert tables["tied"] is tables["layers.0.weight"] is not tables["view of it"]
    assert tables["layers.0.weight"].codebook is tables["layers.1.weight"].codebook
    assert {name for name, table in tables.items() if table.layout != "packed"} == {"random"}  # which saves nothing


def test_bytes():
    x, small = embedding(512, 64, torch.bfloat16), torch.randn(10)
    weights = CompressedWeights({"a": x, "b": x, "small": small}, **ON_CPU)
    assert weights.original_bytes == x.nbytes + small.nbytes
    assert weights.stored_bytes == weights.tables["a"].stored_bytes + small.nbytes < 0.7 * weights.original_bytes
    assert weights.nbytes == weights.tables["a"].nbytes + small.nbytes
    assert repr(weights).startswith(
        f"ibp.integrations.accelerate.CompressedWeights(3 names, 2 tensors, nbytes={weights.nbytes:,} "
        f"({weights.nbytes / 65576:.1%} of 65,576), stored_bytes={weights.stored_bytes:,}, savings="
    )
    assert "device=cpu" in repr(weights) and "savings=0.0%" in repr(CompressedWeights({}))


@pytest.mark.parametrize("as_views", [False, True], ids=["a buffer", "its views"])
def test_what_is_freed_or_filled_again_is_another_tensor(as_views):
    """Shards may come one after the other in the same memory."""
    buffer = torch.empty(256, 64)

    def shards():
        for i in range(4):
            buffer.numpy()[:] = embedding(256, 64, seed=i)  # which torch's count of changes does not see
            if not as_views:
                buffer.add_(0)
            yield f"w{i}", buffer.view(256, 64) if as_views else buffer

    weights = CompressedWeights(shards(), **ON_CPU)
    for i, x in enumerate(weights.values()):
        assert_same_bits(x, embedding(256, 64, seed=i))


def test_inference_tensors():
    with torch.inference_mode():
        x = embedding(256, 64)
    weights = CompressedWeights({"a": x, "b": x}, **ON_CPU)
    assert weights.tables["a"] is weights.tables["b"]
    assert_same_bits(weights["b"], x)


def test_what_is_refused():
    with pytest.raises(TypeError, match="'a' is a list; wanted a torch.Tensor"):
        CompressedWeights({"a": [1]})
    with pytest.raises(ValueError, match="'a' is on the meta device; wanted a tensor with values"):
        CompressedWeights({"a": torch.empty(4, device="meta")})
    with pytest.raises(ValueError, match="'a' comes twice"):
        CompressedWeights([("a", torch.zeros(4)), ("a", torch.ones(4))])
    with pytest.raises(TypeError, match="colour: no such option"):
        CompressedWeights({}, colour=1)


def test_options():
    weights = CompressedWeights({"a": embedding(512, 64)}, scheme="ibp", layout="slots", row_bytes=256, **ON_CPU)
    table = weights.tables["a"]
    assert (table.scheme, table.layout, table.row_bytes) == ("ibp", "slots", 256)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_cpu_offload(tied):
    model = make_model(tied)
    expected, state = logits(model), {name: x.clone() for name, x in model.state_dict().items()}
    weights = CompressedWeights(model.state_dict(), **ON_CPU)
    assert len(weights) == len(state) and weights.stored_bytes < 0.72 * weights.original_bytes
    assert (weights.tables["lm_head.weight"] is weights.tables["model.embed_tokens.weight"]) == tied
    cpu_offload(model, execution_device=torch.device("cpu"), state_dict=weights)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    for _ in range(2):
        assert_same_bits(logits(model), expected)
    remove_hook_from_module(model, recurse=True)  # takes the weights out of the mapping
    for name, x in model.state_dict().items():
        assert_same_bits(x, state[name])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_dispatch_model(tied):
    model = make_model(tied)
    expected = logits(model)
    weights = CompressedWeights(model.state_dict(), **ON_CPU)
    places = {"model.embed_tokens": "disk", "model.layers.0": "disk", "model.layers.1": "cpu", "model.layers.2": "disk"}
    others = dict.fromkeys(("model.norm", "model.rotary_emb"), "cpu") | {"lm_head": "disk"}
    dispatch_model(model, places | others, main_device="cpu", state_dict=weights, offload_index={})
    assert {parameter.device.type for parameter in model.model.layers[2].parameters()} == {"meta"}
    for _ in range(2):
        assert_same_bits(logits(model), expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_on_a_gpu(cuda, tied):
    expected, model = logits(make_model(tied, cuda), cuda), make_model(tied)
    weights = CompressedWeights(model.state_dict(), device=cuda)
    assert all(table.is_pinned() for table in weights.tables.values())
    assert {x.device for x in weights.values()} == {cuda}
    for name, x in model.state_dict().items():
        assert_same_bits(weights[name].cpu(), x)
    cpu_offload(model, execution_device=cuda, state_dict=weights)
    for _ in range(3):
        assert_same_bits(logits(model, cuda), expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_dispatch_on_a_gpu(cuda, tied):
    expected, model = logits(make_model(tied, cuda), cuda), make_model(tied)
    weights = CompressedWeights(model.state_dict(), device=cuda)
    places = {"model.embed_tokens": "cpu", "model.layers.0": 0, "model.layers.1": "cpu", "model.layers.2": "cpu"}
    others = {"model.norm": 0, "model.rotary_emb": 0, "lm_head": "cpu"}
    dispatch_model(model, places | others, state_dict=weights, offload_index={})
    for _ in range(3):
        assert_same_bits(logits(model, cuda), expected)


def test_weights_of_a_gpu_move_to_host_memory(cuda):
    x = embedding(512, 64, torch.bfloat16)
    weights = CompressedWeights({"a": x.to(cuda), "small": x[0].to(cuda)})
    assert weights.tables["a"].device.type == "cpu" and weights.tables["a"].is_pinned()
    assert_same_bits(weights["a"], x)
    assert_same_bits(weights["small"], x[0])


def test_pickles_under_the_former_names():
    """Pickles made before the classes were public name the modules that define them."""
    given = {"a": torch.randn(64, 128).bfloat16(), "b": torch.ones(3)}
    text = pickle.dumps(CompressedWeights(given, **ON_CPU), protocol=0)
    former = text.replace(b"cibp.adapters\nCodedWeight", b"cibp._tables.weights\nCodedWeight").replace(
        b"ibp.adapters\n", b"ibp._tables.weights\n"
    )
    assert former != text and b"adapters" not in former
    loaded = pickle.loads(former)
    for name, tensor in given.items():
        assert_same_bits(loaded[name], tensor)


@pytest.mark.parametrize("imports", ["accelerate, ibp", "ibp, accelerate"])
def test_hooks_change_without_an_import_of_the_adapter(imports):
    code = f"""
import {imports}
from accelerate import big_modeling, hooks
for function in (hooks.named_module_tensors, big_modeling.find_tied_parameters):
    assert function.__module__ == "ibp.integrations.accelerate", function
"""
    subprocess.run([sys.executable, "-c", code], check=True)
