"""ibp.integrations.peft: LoRA adapters on coded matrices train, load and merge as those on plain ones."""

import copy
import subprocess
import sys

import pytest
import torch

import ibp
from helpers import assert_same_bits
from models import losses_of
from products import kernels_on_the_cpu

pytestmark = pytest.mark.frameworks
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from ibp.integrations.peft import LoraLinear  # noqa: E402
from ibp.integrations.transformers import IbpConfig  # noqa: E402

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]])
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
LEAST = 1 << 14


def llama(**options):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **heads, **options))


def gpt2():
    sizes = {"vocab_size": 512, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


# By name: how a model is made, and which of its modules get adapters.
MODELS = {
    "llama": (llama, ["q_proj", "v_proj", "down_proj"]),
    "llama tied": (lambda: llama(tie_word_embeddings=True), ["q_proj", "lm_head"]),
    "gpt2": (gpt2, ["c_attn", "c_proj"]),
}


@pytest.fixture(params=MODELS)
def case(request):
    """(a plain model, the same with coded weights, the configuration of adapters)"""
    make, modules = MODELS[request.param]
    torch.manual_seed(0)
    plain = make().bfloat16().eval().requires_grad_(False)
    coded = copy.deepcopy(plain)
    ibp.nn.compress(coded, min_bytes=LEAST)
    return plain, coded, {"r": 4, "target_modules": modules, "init_lora_weights": False, "task_type": "CAUSAL_LM"}


def adapted(model, options):
    """The model with adapters of random weights, the same in each call."""
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**options)).eval()


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def test_adapters_have_the_bits_of_plain_models(case):
    plain, coded, options = case
    models = [adapted(model, options) for model in (plain, coded)]
    assert any(isinstance(module, LoraLinear) for module in models[1].modules())
    assert_same_bits(logits(models[1]), logits(models[0]))
    losses = []
    for model in models:
        torch.manual_seed(2)  # of dropout
        losses.append(losses_of(model.train(), IDS, 3))
    assert losses[0] == losses[1] and losses[0][0] != losses[0][-1]


@pytest.mark.parametrize("safe_merge", [False, True])
def test_merging(case, safe_merge):
    plain, coded, options = case
    before = logits(plain)
    plain, coded = (adapted(model, options).merge_and_unload(safe_merge=safe_merge) for model in (plain, coded))
    assert not torch.equal(logits(plain), before)
    assert_same_bits(logits(coded), logits(plain))
    for key, x in plain.state_dict().items():
        assert_same_bits(coded.state_dict()[key], x)
    assert any(isinstance(module, ibp.nn.Linear) for module in coded.modules())


def test_unmerging(case):
    models = [adapted(model, case[2]) for model in case[:2]]
    for model in models:
        model.merge_adapter()
    assert_same_bits(*(logits(model) for model in models))
    for model in models:
        model.unmerge_adapter()
    assert_same_bits(*(logits(model) for model in models))


def test_saved_adapters_load(case, tmp_path):
    """By PEFT, and by transformers into the model itself."""
    plain, coded, options = case
    made = adapted(copy.deepcopy(plain), options)
    made.save_pretrained(tmp_path / "adapter")
    wanted = logits(made)
    assert_same_bits(logits(peft.PeftModel.from_pretrained(copy.deepcopy(coded), tmp_path / "adapter").eval()), wanted)
    again = adapted(copy.deepcopy(coded), options)
    again.save_pretrained(tmp_path / "of coded")
    assert_same_bits(logits(peft.PeftModel.from_pretrained(plain, tmp_path / "of coded").eval()), wanted)


def test_transformers_loads_adapters(case, tmp_path):
    plain, coded, options = case
    adapted(copy.deepcopy(plain), options).save_pretrained(tmp_path)
    if "lm_head" in options["target_modules"]:  # the adapter's file has the head itself, too
        with pytest.raises(RuntimeError, match=r"the weight of an ibp\.nn\.Linear is a table"):
            coded.load_adapter(tmp_path)
        return
    before = logits(plain)
    for model in (plain, coded):
        model.load_adapter(tmp_path)
    assert_same_bits(logits(coded), logits(plain))
    assert not torch.equal(logits(coded), before)


def test_models_that_were_loaded_coded(tmp_path):
    llama().bfloat16().save_pretrained(tmp_path / "plain")
    plain, coded = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16, **options)
        for options in ({}, {"quantization_config": IbpConfig(min_bytes=LEAST)})
    )
    options = {"r": 4, "target_modules": MODELS["llama"][1], "init_lora_weights": False}
    wanted = logits(adapted(plain, options).merge_and_unload())
    merged = adapted(coded, options).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    for model in (merged, loaded):
        assert_same_bits(logits(model), wanted)


def test_a_merge_that_fails_changes_nothing(case):
    coded = adapted(case[1], case[2])
    before = {key: x.clone() for key, x in coded.state_dict().items()}
    module = next(module for module in coded.modules() if isinstance(module, LoraLinear))
    with torch.no_grad():
        module.lora_B["default"].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaNs detected"):
        module.merge(safe_merge=True)
    assert isinstance(module.base_layer, ibp.nn.Linear) and not module.merged
    for key, x in coded.state_dict().items():
        if "lora_" not in key:
            assert_same_bits(x, before[key])


def test_what_is_merged_is_multiplied(monkeypatch):
    """Kernels multiply by the new digits and escapes, and neighbours together."""
    torch.manual_seed(0)
    coded = llama().bfloat16().eval().requires_grad_(False)
    ibp.nn.compress(coded, min_bytes=LEAST)
    coded = adapted(coded, {"r": 4, "target_modules": ["q_proj", "k_proj"], "init_lora_weights": False})
    kernels_on_the_cpu(monkeypatch)
    logits(coded)
    merged = coded.merge_and_unload()
    x = torch.randn(2, 256).bfloat16()
    for name in ("q_proj", "k_proj"):
        module = getattr(merged.model.layers[0].self_attn, name)
        torch.testing.assert_close(module(x), x @ module.weight.decompress().T, rtol=0.02, atol=0.02)


def test_coded_modules_do_not_train(case):
    with pytest.raises(TypeError, match=r"modules_to_save has an ibp\.nn\.Linear, whose weights are fixed: leave"):
        peft.get_peft_model(case[1], peft.LoraConfig(**case[2] | {"modules_to_save": ["lm_head"]}))


@pytest.mark.parametrize(
    "kind, options", [("DoRA", {"use_dora": True}), ("LoRA", {"target_modules": ["embed_tokens"]})]
)
def test_adapters_that_coded_modules_cannot_have(kind, options):
    coded = llama().bfloat16().eval()
    ibp.nn.compress(coded, min_bytes=LEAST)
    with pytest.raises(TypeError, match=rf"{kind} cannot adapt an ibp\.nn\.\w+: leave this module plain, by exclude="):
        peft.get_peft_model(coded, peft.LoraConfig(**{"target_modules": ["q_proj"]} | options))


_ADAPTS = """
import {first}, {second}, torch
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024)).bfloat16().eval()
ibp.nn.compress(model)
peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("modules", [{"first": "ibp", "second": "peft"}, {"first": "peft", "second": "ibp"}], ids=str)
def test_importing_ibp_is_enough(modules):
    subprocess.run([sys.executable, "-c", _ADAPTS.format(**modules)], check=True)
