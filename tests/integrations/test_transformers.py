"""`ibp.offload` of the models of transformers: decoders, encoders, both, mixtures of experts, and adapters of PEFT."""

import copy
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

import ibp
from helpers import assert_same_bits
from models import losses_of
from native import ROOT

pytestmark = pytest.mark.frameworks
transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4}
MIXTURES = {"mixtral": 3, "qwen3 moe": 3, "olmoe": 3, "gpt-oss": 3, "deepseek v3": 2}  # layers with experts
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]])


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **HEADS, **options))


MODELS = {
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL, **HEADS)),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**SMALL, **HEADS, head_dim=16)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, **HEADS, head_dim=16)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, **HEADS, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen3 moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SMALL, **HEADS, **EXPERTS, head_dim=16, moe_intermediate_size=32)
    ),
    "olmoe": lambda: transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(**SMALL, **HEADS, **EXPERTS, eos_token_id=None)
    ),
    "gpt-oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SMALL, **HEADS, head_dim=16, num_local_experts=16, num_experts_per_tok=4)
    ),
    "deepseek v3": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **SMALL,
            **{"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 16, "num_experts_per_tok": 4},
            **{"n_group": 4, "topk_group": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
            **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=512, n_embd=64, n_layer=3, n_head=4, n_positions=128)
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=512,
            hidden_size=64,
            num_hidden_layers=3,
            ffn_dim=128,
            num_attention_heads=4,
            word_embed_proj_dim=64,
        )
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    ),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SMALL, num_attention_heads=4)),
    "albert": lambda: transformers.AlbertModel(
        transformers.AlbertConfig(**SMALL, embedding_size=32, num_attention_heads=4)
    ),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=512, hidden_size=64, num_hidden_layers=3, state_size=8)
    ),
}
OFFLOAD = {"min_bytes": 1000, "group_bytes": 40000}


def make(name):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return MODELS[name]().eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def outputs(model, device="cpu"):
    """What a model returns for some ids: one tensor."""
    arguments = {"input_ids": IDS.to(device)}
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = IDS[:, :4].to(device)
    return model(**arguments)[0]


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_outputs(name, lookahead):
    model = make(name)
    wanted = outputs(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with ibp.offload(model, "cpu", lookahead=lookahead, **OFFLOAD) as offloaded:
        for _ in range(3):
            assert_same_bits(outputs(model), wanted)
        stats = offloaded.stats()
        assert stats.host_bytes < 0.8 * stats.weight_bytes and stats.weight_bytes > 0.5 * sum(
            value.nbytes for value in {value.data_ptr(): value for value in state.values()}.values()
        )
        for key, value in model.state_dict().items():
            assert_same_bits(value, state[key])
    assert_same_bits(outputs(model), wanted)


@pytest.mark.parametrize("name", ["llama", "gemma3", *MIXTURES, "t5", "mamba"])
@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": False, "num_beams": 3}], ids=["greedy", "beams"]
)
def test_generate(name, options):
    model = make(name)
    wanted = model.generate(IDS, max_new_tokens=6, **options)
    with ibp.offload(model, "cpu", lookahead=1, **OFFLOAD):
        assert torch.equal(model.generate(IDS, max_new_tokens=6, **options), wanted)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures(name, implementation):
    """Tokens come from the experts that routers choose, by whichever implementation, and prompts from all."""
    model = make(name)
    model.set_experts_implementation(implementation)
    ids, options = IDS.repeat(1, 3), {"max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(ids, **options)
    for resident_bytes in (0, sum(parameter.nbytes for parameter in model.parameters()) // 2):
        with ibp.offload(model, "cpu", lookahead=1, resident_bytes=resident_bytes, **OFFLOAD) as offloaded:
            assert torch.equal(model.generate(ids, **options), wanted)
            assert len(offloaded._experts) == MIXTURES[name]
            assert offloaded.stats().expert_misses > 0
            offloaded.reset_stats()
            model(ids)
            assert offloaded.stats().expert_misses == 0


def test_the_example_of_a_mixture(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "mixture.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Every token is the same." in done.stdout, done.stderr
    assert (tmp_path / "hits.png").exists() == bool(importlib.util.find_spec("matplotlib"))


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama tied", "gpt2", "t5"])
def test_saved_models(name, tmp_path):
    """An offloaded model saves what the model saves, and a model without weights takes them from there."""
    model = make(name)
    wanted = outputs(model)
    with ibp.offload(model, "cpu", **OFFLOAD):
        model.save_pretrained(tmp_path, max_shard_size="60KB")
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same_bits(outputs(loaded), wanted)
    with torch.device("meta"):
        empty = type(model)(model.config).to(torch.bfloat16).eval()
    if name == "llama tied":
        empty.model.rotary_emb = type(empty.model.rotary_emb)(config=model.config)
    empty.tie_weights()
    with ibp.offload(empty, "cpu", checkpoint=tmp_path, **OFFLOAD):
        assert_same_bits(outputs(empty), wanted)


def test_lora():
    """Adapters are trained on weights that are streamed, and on adapters added afterwards, to the same bits."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    losses = []
    for order in ("plain", "adapters first", "offloaded first"):
        model = make("llama")
        if order == "offloaded first":
            ibp.offload(model, "cpu", lookahead=1, **OFFLOAD)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config).train()
        if order == "adapters first":
            ibp.offload(model, "cpu", lookahead=1, **OFFLOAD)
        losses.append(losses_of(model, IDS, 4))
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][0] != losses[0][-1]


def test_a_static_cache():
    model = make("llama")
    options = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    wanted = copy.deepcopy(model).generate(IDS, **options)
    with ibp.offload(model, "cpu", **OFFLOAD):
        assert torch.equal(model.generate(IDS, **options), wanted)


@pytest.mark.parametrize("name", ["llama tied", "gemma", *MIXTURES, "t5"])
@torch.no_grad()
def test_on_a_gpu(name, cuda):
    plain, model = make(name).to(cuda), make(name)
    wanted = outputs(plain, cuda)
    for options in ({}, {"resident_bytes": 60000}):
        with ibp.offload(model, cuda, **OFFLOAD, **options):
            for _ in range(3):
                assert_same_bits(outputs(model, cuda), wanted)
            assert torch.equal(
                model.generate(IDS.to(cuda), max_new_tokens=5, do_sample=False),
                plain.generate(IDS.to(cuda), max_new_tokens=5, do_sample=False),
            )
