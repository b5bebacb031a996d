"""`ibp.nn.compress` of the models of transformers: they compute, generate, save and load as the plain models."""

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp.nn._tables import TableModule
from models import losses_of
from products import kernels_on_the_cpu, lists

pytestmark = pytest.mark.frameworks
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]])


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS, **options))


def gpt2():
    sizes = {"vocab_size": 512, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 128}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def t5():
    sizes = {"vocab_size": 512, "d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **HEADS, num_local_experts=4))


def qwen3_moe():
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **HEADS, **sizes))


def gpt_oss():
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, **HEADS, **sizes))


# By name: how a model is made, and how many of its modules hold tables then.
MODELS = {
    "llama": (llama, 2 * 7 + 2),
    "llama tied": (lambda: llama(tie_word_embeddings=True), 2 * 7 + 2),
    "gpt2": (gpt2, 2 * 4 + 3),
    "t5": (t5, 2 * 6 + 2 * 10 + 4),
    "mixtral": (mixtral, 2 * 6 + 2),
    "qwen3 moe": (qwen3_moe, 2 * 6 + 2),
    "gpt-oss": (gpt_oss, 2 * 6 + 2),
}


def make(name, dtype=torch.bfloat16):
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        return MODELS[name][0]().eval()
    finally:
        torch.set_default_dtype(torch.float32)


def compress(model):
    return ibp.nn.compress(model, min_bytes=1 << 14)


def outputs(model, device="cpu"):
    arguments = {"input_ids": IDS.to(device)}
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = IDS[:, :4].to(device)
    return model(**arguments)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_models(name, dtype, tmp_path):
    model = make(name, dtype)
    wanted, before = outputs(model), {key: value.clone() for key, value in model.state_dict().items()}
    options = {"max_new_tokens": 6, "do_sample": False}
    tokens, beams = model.generate(IDS, **options), model.generate(IDS, num_beams=3, **options)
    report = compress(model)
    assert len(report.coded) == MODELS[name][1] and report.savings > 0.05
    assert {type(module) for module in model.modules() if isinstance(module, TableModule)} >= {
        ibp.nn.Conv1D if name == "gpt2" else ibp.nn.Linear,
        ibp.nn.Embedding,
    }
    assert_same_bits(outputs(model), wanted)
    assert torch.equal(model.generate(IDS, **options), tokens)
    assert torch.equal(model.generate(IDS, num_beams=3, **options), beams)
    state = model.state_dict()
    assert set(state) == set(before)
    for key, value in state.items():
        assert_same_bits(value, before[key])
    model.save_pretrained(tmp_path, max_shard_size="600KB")
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype).eval()
    assert_same_bits(outputs(loaded), wanted)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_models_are_decompressed(name):
    """Classes, names in their order and ties are those of the plain model."""
    plain, model = make(name), make(name)
    compress(model)
    assert ibp.nn.decompress(model) is model
    assert repr(model) == repr(plain)
    for ours, wanted in zip(model.modules(), plain.modules(), strict=True):
        assert type(ours) is type(wanted)
    named = [dict(net.named_parameters(remove_duplicate=False)) for net in (model, plain)]
    assert [list(parameters) for parameters in named] == [list(named[1])] * 2
    for key, parameter in named[0].items():
        assert parameter.requires_grad == named[1][key].requires_grad
        assert_same_bits(parameter, named[1][key])
    ties = [[key for key in net if net[key] is not net[first]] for net in named for first in net]
    assert ties[: len(named[0])] == ties[len(named[0]) :]
    assert_same_bits(outputs(model), outputs(plain))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_states(name):
    """Plain and coded states of one model are taken by another; what was tied stays tied."""
    model = make(name)
    for key, value in model.state_dict().items():
        if value.dim() > 1 and "relative" not in key:
            value.copy_(value.flip(0))
    wanted = outputs(model)
    for is_coded in (False, True):
        other = make(name)
        compress(other)
        num_tables = len({id(module.weight) for module in other.modules() if isinstance(module, TableModule)})
        if is_coded:
            compress(model)
            state = ibp.nn.coded_state_dict(model)
            assert any(key.endswith("weight_transposed") for key in state) == (name == "gpt2")
        else:
            state = model.state_dict()
        assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
        assert_same_bits(outputs(other), wanted)
        assert num_tables == len({id(module.weight) for module in other.modules() if isinstance(module, TableModule)})


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe", "gpt-oss"])
@torch.no_grad()
def test_experts_by_the_kernel(name, compiled, monkeypatch):
    """The same sums as transformers', in another order."""
    plain, coded = (make(name).model.layers[0].mlp for _ in range(2))
    ibp.nn.compress(coded, min_bytes=1 << 14)
    for stack in coded.experts.stacks.values():
        lists(stack.weight)
    torch.compiler.reset()
    experts = torch.compile(coded.experts, fullgraph=True, backend="aot_eager") if compiled else coded.experts
    with kernels_on_the_cpu(monkeypatch) as calls:
        for number in (1, 12):
            x, index = (
                torch.randn(number, 256).bfloat16(),
                torch.rand(number, coded.experts.num_experts).argsort(1)[:, :2],
            )
            weights = torch.rand(number, 2).bfloat16()
            wanted = plain.experts(x, index, weights)
            torch.testing.assert_close(
                experts(x, index, weights), wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max())
            )
        assert calls == [2, 2, 24, 24]


def test_conv1d_refuses_what_does_not_fit():
    model = make("gpt2")
    compress(model)
    layer, bias = model.transformer.h[0].mlp.c_fc, torch.zeros(1024).bfloat16()
    wrong = {"weight": torch.zeros(1024, 256).bfloat16(), "bias": bias}
    with pytest.raises(
        RuntimeError, match=r"weight has shape \[1024, 256\] and dtype torch.bfloat16; wanted \[256, 1024\]"
    ):
        layer.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match="weight is a list"):
        layer.load_state_dict({"weight": [1.0], "bias": bias})
    plain = torch.randn(256, 1024).bfloat16()
    layer.load_state_dict({"weight": ibp.compress(plain, device="cpu"), "bias": bias})  # as `ibp compress` writes it
    assert_same_bits(layer(torch.eye(256).bfloat16()).detach(), plain)


def test_adapters_train_on_coded_weights():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    losses = []
    for is_coded in (False, True):
        model = make("llama").requires_grad_(False)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config).train()
        if is_coded:
            compress(model)
            assert isinstance(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer, ibp.nn.Linear)
        losses.append(losses_of(model, IDS, 4))
    assert losses[0] == losses[1] and losses[0][0] != losses[0][-1]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_on_a_gpu(name, cuda):
    plain, model = make(name).to(cuda), make(name)
    compress(model)
    torch.testing.assert_close(outputs(model.to(cuda), cuda), outputs(plain, cuda), rtol=0.1, atol=0.2)
    model.generate(IDS.to(cuda), max_new_tokens=5, do_sample=False)


@torch.no_grad()
def test_halves_are_decoded():
    """FP16 models give the bits of torch's products."""
    plain, coded = make("llama", torch.float16), make("llama", torch.float16)
    report = compress(coded)
    assert not report.plain and 0.05 < report.savings < 0.1
    assert_same_bits(coded(IDS).logits, plain(IDS).logits)
    coded.load_state_dict(plain.state_dict())
    assert_same_bits(coded(IDS).logits, plain(IDS).logits)


def test_quantised_weights_stay_plain():
    """FP8 with scales, as transformers has it, is multiplied by its own kernels, and digits gain nothing there."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    model = torch.nn.Sequential(FP8Linear(1024, 1024, block_size=(128, 128))).requires_grad_(False).eval()
    report = ibp.nn.compress(model)
    assert report.plain == {"0": "with a class or forward of its own"} and not report.coded
    assert model[0].weight.dtype == torch.float8_e4m3fn
