"""`from_pretrained` with coded weights: models of many families load, compute, generate and are saved as plain ones."""

import doctest
import inspect
import json
import shutil
import subprocess
import sys

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp._files import read_header
from ibp.nn._tables import CodedModule, TableModule

pytestmark = pytest.mark.frameworks
transformers = pytest.importorskip("transformers")
weights = pytest.importorskip("ibp.integrations.transformers")
IbpConfig, save_coded = weights.IbpConfig, weights.save_coded
# Older ones do not say which parameter a tensor of a file becomes, and nothing of shapes that do not fit (seen with
# 5.10).
IS_OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20)

SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 7, 6, 5, 3], [11, 7, 1, 8, 13, 8, 1, 8, 13, 8]])
LEAST = 1 << 14


def causal(config, model, **options):
    def make():
        return getattr(transformers, model)(getattr(transformers, config)(**SIZES, **HEADS, **TOKENS, **options))

    return make


def gpt2():
    sizes = {"vocab_size": 512, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 128}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **TOKENS))


def t5():
    sizes = {"vocab_size": 512, "d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def whisper():
    layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"vocab_size": 512, "d_model": 256, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "num_mel_bins": 16}
    config = transformers.WhisperConfig(
        **layers, **sizes, max_source_positions=20, max_target_positions=64, decoder_start_token_id=3, **TOKENS
    )
    return transformers.WhisperForConditionalGeneration(config)


def llava():
    vision = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=28, patch_size=14),
        text_config=transformers.LlamaConfig(**SIZES, **HEADS, **TOKENS),
        image_token_index=500,
    )
    return transformers.LlavaForConditionalGeneration(config)


def gemma3():
    more = {"head_dim": 64, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    return causal("Gemma3TextConfig", "Gemma3ForCausalLM", **more)()


QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}

# By name: how a model is made, and how many of its modules hold tables then.
MODELS = {
    "llama": (causal("LlamaConfig", "LlamaForCausalLM"), 2 * 7 + 2),
    "llama tied": (causal("LlamaConfig", "LlamaForCausalLM", tie_word_embeddings=True), 2 * 7 + 2),
    "qwen3": (causal("Qwen3Config", "Qwen3ForCausalLM", head_dim=64), 2 * 7 + 2),
    "gemma3": (gemma3, 2 * 7),  # an embedding with a forward of its own, which is the tied head's
    "mistral": (causal("MistralConfig", "MistralForCausalLM"), 2 * 7 + 2),
    "mixtral": (causal("MixtralConfig", "MixtralForCausalLM", num_local_experts=4), 2 * 6 + 2),
    "qwen3 moe": (causal("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **QWEN3_MOE), 2 * 6 + 2),
    "gpt-oss": (causal("GptOssConfig", "GptOssForCausalLM", head_dim=64, num_local_experts=8), 2 * 6 + 2),
    "phi": (causal("PhiConfig", "PhiForCausalLM"), 2 * 6 + 2),
    "gpt2": (gpt2, 2 * 4 + 3),
    "t5": (t5, 2 * 6 + 2 * 10 + 4),
    "whisper": (whisper, 6 + 2 * 10 + 2),
    "llava": (llava, 2 * 7 + 2 + 2 * 6 + 2),
}


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    """(name, directory with a plain checkpoint, the plain model)"""
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    make = MODELS[request.param][0]
    with transformers.modeling_utils.local_torch_dtype(torch.bfloat16, "a model"):
        made = make()
    made.save_pretrained(folder)
    return request.param, folder, type(made).from_pretrained(folder)


def inputs(model):
    if model.config.model_type == "whisper":
        torch.manual_seed(1)
        return {"input_features": torch.randn(2, 16, 40).bfloat16()}
    if model.config.model_type == "llava":
        torch.manual_seed(1)
        image = torch.tensor([[500] * 4, [500] * 4])
        return {"input_ids": torch.cat((image, IDS), dim=1), "pixel_values": torch.randn(2, 3, 28, 28).bfloat16()}
    return {"input_ids": IDS}


@torch.no_grad()
def outputs(model):
    more = {"decoder_input_ids": IDS[:, :4]} if model.config.is_encoder_decoder else {}
    return model(**inputs(model), **more)[0]


def tokens(model, **options):
    return model.generate(**inputs(model), max_new_tokens=6, do_sample=False, **options)


def num_tables(model):
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    return sum(len(module.shared_tables()) for module in modules if isinstance(module, CodedModule))


def check(model, plain, name):
    assert num_tables(model) == MODELS[name][1] == len(model.hf_quantizer.report.coded)
    assert_same_bits(outputs(model), outputs(plain))
    assert not hasattr(model.config, "quantization_config") and not model.training


def test_plain_checkpoints(saved, tmp_path):
    name, folder, plain = saved
    model, info = type(plain).from_pretrained(
        folder, quantization_config=IbpConfig(min_bytes=LEAST), output_loading_info=True
    )
    assert not any(info.values())
    check(model, plain, name)
    assert torch.equal(tokens(model), tokens(plain))
    assert torch.equal(tokens(model, num_beams=3), tokens(plain, num_beams=3))
    if name not in ("t5", "whisper", "llava"):
        assert torch.equal(tokens(model, cache_implementation="static"), tokens(plain, cache_implementation="static"))
    model.save_pretrained(tmp_path)
    plain.save_pretrained(tmp_path / "plain")
    assert (tmp_path / "config.json").read_text() == (tmp_path / "plain" / "config.json").read_text()
    again = type(plain).from_pretrained(tmp_path)
    assert num_tables(again) == 0
    assert_same_bits(outputs(again), outputs(plain))


def refuse(*arguments, **options):
    raise AssertionError("a table was made")


@pytest.mark.parametrize("shard_bytes", [None, 200_000])
def test_directories_that_models_are_saved_to(saved, tmp_path, monkeypatch, shard_bytes):
    name, folder, plain = saved
    model = type(plain).from_pretrained(folder, quantization_config=IbpConfig(min_bytes=LEAST))
    save_coded(model, tmp_path, shard_bytes=shard_bytes)
    assert (tmp_path / "model.ibp.safetensors").exists() == (shard_bytes is None)
    del model
    if name not in ("gpt2", "gpt-oss", *(["llava"] if IS_OLD else [])):  # whose files have other rows, or names
        monkeypatch.setattr("ibp.nn._compressing.ModelPlan.table_of", refuse)
    loaded, info = type(plain).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    check(loaded, plain, name)
    monkeypatch.undo()
    back = tmp_path / "back"
    back.mkdir()
    ibp.checkpoints.decompress(tmp_path, back)
    again = type(plain).from_pretrained(back)
    assert num_tables(again) == 0
    assert_same_bits(outputs(again), outputs(plain))


def test_compressed_directories(saved, tmp_path):
    name, folder, plain = saved
    ibp.checkpoints.compress(folder, f"{tmp_path}/", device="cpu", shard_bytes=400_000)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("quantization_config") == {"quant_method": "ibp"}
    config["quantization_config"] = {"quant_method": "ibp", "min_bytes": LEAST}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, info = type(plain).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    check(model, plain, name)
    shutil.copy(folder / "config.json", tmp_path)
    decoded, info = type(plain).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and num_tables(decoded) == 0
    assert_same_bits(outputs(decoded), outputs(plain))


# ---- one model ----


@pytest.mark.parametrize("shown", [IbpConfig, save_coded])
def test_examples(shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"torch": torch, "ibp": ibp}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(shown), names, shown.__name__, None, None)
    report = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert not doctest.DocTestRunner(optionflags=flags).run(example, out=report.append).failed, "".join(report)


@pytest.fixture
def llama(tmp_path):
    """(directory, plain model) of a Llama."""
    folder = tmp_path / "llama"
    torch.manual_seed(0)
    MODELS["llama"][0]().bfloat16().save_pretrained(folder)
    return folder, transformers.LlamaForCausalLM.from_pretrained(folder)


def load(folder, quantization_config=None, **options):
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def test_weights_are_coded_as_they_are_read(llama, monkeypatch):
    """While a weight is coded, no other weight that is to be coded is there."""
    folder, plain = llama
    put, held = ibp.nn._compressing.ModelPlan.put, []

    def watched(self, key, table):
        parameters = dict(self._model.named_parameters())
        plain = {name for name, weight in parameters.items() if type(weight) is torch.nn.Parameter}
        held.append([name for name in self._of if name in plain and not parameters[name].is_meta])
        return put(self, key, table)

    monkeypatch.setattr(ibp.nn._compressing.ModelPlan, "put", watched)
    model = load(folder, IbpConfig(min_bytes=LEAST))
    assert len(held) == MODELS["llama"][1] == num_tables(model) and not any(held)


def test_options(llama, tmp_path):
    folder, plain = llama
    model = load(folder, IbpConfig(min_bytes=LEAST, exclude="lm_head", include="*.mlp", level="default", fused=False))
    report = model.hf_quantizer.report
    assert num_tables(model) == 6 == len(report.coded) and not report.plain and report.savings > 0.2
    assert not model.model.layers[0].mlp.up_proj.fused
    model = load(folder, IbpConfig())
    assert num_tables(model) == 0 and set(model.hf_quantizer.report.plain.values()) == {"smaller than min_bytes"}
    model = load(folder, IbpConfig(min_bytes=LEAST), dtype=torch.float32)
    assert model.lm_head.weight.dtype == torch.float32
    assert_same_bits(outputs(model), outputs(load(folder, dtype=torch.float32)))
    with pytest.raises(ValueError, match="no module whose name matches 'nothing'"):
        load(folder, IbpConfig(exclude="nothing"))
    save_coded(load(folder, IbpConfig(min_bytes=LEAST, exclude=["lm_head"])), tmp_path / "small")
    loaded = load(tmp_path / "small")
    assert num_tables(loaded) == 15 and loaded.hf_quantizer.quantization_config.exclude == ["lm_head"]
    loaded = load(tmp_path / "small", dtype=torch.float32)
    assert_same_bits(outputs(loaded), outputs(load(folder, dtype=torch.float32)))


def test_configs():
    config = IbpConfig(include="model", exclude=("a", "b"), level="default", min_bytes=5)
    fields = json.loads(config.to_json_string())
    assert fields["quant_method"] == "ibp" and fields["exclude"] == ["a", "b"]
    assert IbpConfig.from_dict(fields).to_dict() == config.to_dict()
    for wrong, message in [
        ({"level": "slow"}, "wanted one of"),
        ({"min_bytes": -1}, "min_bytes"),
        ({"quant_method": "fp8"}, "wanted 'ibp'"),
    ]:
        with pytest.raises(ValueError, match=message):
            IbpConfig(**wrong)
    with pytest.raises(TypeError, match="unexpected keyword"):
        IbpConfig(bits=4)


def test_models_that_were_compressed_are_saved(llama, tmp_path):
    _, plain = llama
    wanted = outputs(plain)
    ibp.nn.compress(plain, min_bytes=LEAST)
    save_coded(plain, tmp_path / "small")
    assert not hasattr(plain.config, "quantization_config")
    save_coded(plain, tmp_path / "small", shard_bytes=300_000)
    files = {path.name for path in (tmp_path / "small").iterdir()}
    assert "model.ibp.safetensors" not in files and "model.ibp.safetensors.index.json" in files
    assert_same_bits(outputs(load(tmp_path / "small")), wanted)
    save_coded(plain, tmp_path / "small")
    assert "model.ibp.safetensors.index.json" not in {path.name for path in (tmp_path / "small").iterdir()}
    assert_same_bits(outputs(load(tmp_path / "small")), wanted)
    with pytest.raises(TypeError, match="wanted a transformers.PreTrainedModel"):
        save_coded(torch.nn.Linear(2, 2), tmp_path / "other")


@pytest.mark.parametrize(
    "options",
    [{"exclude": ["lm_head", "*.mlp"]}, {"include": "*.mlp", "level": "default", "fused": False}, {}],
    ids=str,
)
def test_a_saved_model_says_what_was_coded(llama, tmp_path, options):
    """The modules that were coded are coded when it is loaded, and no others."""
    _, plain = llama
    wanted = outputs(plain)
    report = ibp.nn.compress(plain, min_bytes=LEAST, **options)
    save_coded(plain, tmp_path / "small")
    loaded = load(tmp_path / "small")
    assert sorted(loaded.hf_quantizer.report.coded) == sorted(report.coded)
    assert loaded.hf_quantizer.quantization_config.level == options.get("level", "fast")
    assert loaded.hf_quantizer.quantization_config.fused == options.get("fused", True)
    assert_same_bits(outputs(loaded), wanted)


IMPORTS = """
import sys, {first}
import torch, transformers
(to, *folders), ids = sys.argv[1:], torch.arange(12)[None]
load = transformers.AutoModelForCausalLM.from_pretrained
for folder in folders if "ibp" not in sys.modules else ():
    try:
        load(folder)
    except OSError as error:
        assert "no file named model.safetensors" in str(error), error
    else:
        raise AssertionError("loaded without ibp")
import ibp
assert not {is_lazy} or "ibp.integrations.transformers.weights" not in sys.modules
torch.save([load(folder)(ids).logits for folder in folders], to)
"""


@pytest.mark.parametrize(
    "first, names",
    [("transformers", ["files", "coded"]), pytest.param("ibp", ["coded", "files"], marks=pytest.mark.slow)],
)
def test_coded_directories_load_where_ibp_is_imported_and_nowhere_else(llama, tmp_path, first, names):
    """Whether the files are compressed or the modules coded. What is loaded first is another one in each order of
    imports."""
    folder, plain = llama
    save_coded(load(folder, IbpConfig(min_bytes=LEAST)), tmp_path / "coded")
    ibp.checkpoints.compress(folder, f"{tmp_path}/files/", device="cpu")
    script = IMPORTS.format(first=first, is_lazy=first == "ibp")
    command = [sys.executable, "-c", script, "logits.pt", *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        for logits in torch.load(tmp_path / "logits.pt"):
            assert_same_bits(logits, plain(torch.arange(12)[None]).logits)


def test_names_that_coded_weights_are_found_by(llama, tmp_path):
    folder, plain = llama
    wanted = outputs(plain)
    old = tmp_path / "old"  # as earlier versions named them
    shutil.copytree(folder, old)
    ibp.checkpoints.compress(folder / "model.safetensors", old / "model.safetensors", device="cpu", force=True)
    assert_same_bits(outputs(load(old)), wanted)
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    ibp.checkpoints.compress(folder, f"{tmp_path}/small/", device="cpu")
    assert_same_bits(outputs(load(tmp_path / "small", variant="fp16")), wanted)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        load(tmp_path / "small")
    torch.save(plain.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.fp16.safetensors").unlink()
    ibp.checkpoints.compress(folder, f"{tmp_path}/small/", device="cpu", force=True)
    assert_same_bits(outputs(load(tmp_path / "small")), wanted)


def test_saving_coded_weights_says_how_to_load_them(llama, tmp_path, capsys):
    save_coded(load(llama[0], IbpConfig(min_bytes=LEAST)), tmp_path / "small")
    lines = capsys.readouterr().out.splitlines()
    call = f"model = transformers.LlamaForCausalLM.from_pretrained({str(tmp_path / 'small')!r})"
    assert lines == ["import ibp, transformers", call]


def flip(path, part):
    """Flips a bit of a part of a file. Returns whether the file has the part."""
    entry = read_header(path).tensors.get(part)
    if entry is not None:
        data = bytearray(path.read_bytes())
        data[entry.start] ^= 2
        path.write_bytes(data)
    return entry is not None


@pytest.mark.parametrize("part", ["model.embed_tokens.weight:overflow", "model.norm.weight"])
def test_damaged_files_are_not_loaded(part, llama, tmp_path):
    ibp.checkpoints.compress(llama[0], f"{tmp_path}/small/", device="cpu")
    (path,) = (tmp_path / "small").glob("*.safetensors")
    assert flip(path, part)
    with pytest.raises(ibp.ChecksumError, match=f"{path}: block .* is damaged"):
        load(tmp_path / "small")


def test_tied_weights_that_differ_in_the_checkpoint(tmp_path):
    torch.manual_seed(0)
    model = MODELS["llama"][0]().bfloat16()
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path)
    wanted = outputs(load(tmp_path))
    model = load(tmp_path, IbpConfig(min_bytes=LEAST))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert_same_bits(outputs(model), wanted)


@pytest.mark.skipif(IS_OLD, reason="wants transformers from 5.20 on")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_shapes_that_do_not_fit(tmp_path, name):
    torch.manual_seed(0)
    make = MODELS[name][0]
    made = make().bfloat16()
    made.save_pretrained(tmp_path / "plain")
    ibp.checkpoints.compress(tmp_path / "plain", f"{tmp_path / 'small'}/", device="cpu")
    shutil.copy(tmp_path / "plain" / "config.json", tmp_path / "small")
    wrong = {"intermediate_size": 384} if name == "llama" else {"n_inner": 384}
    for folder in ("plain", "small"):
        options = {"quantization_config": IbpConfig(min_bytes=LEAST), **wrong}
        with pytest.raises(RuntimeError, match="mismatch"):
            type(made).from_pretrained(tmp_path / folder, **options)
        model, info = type(made).from_pretrained(
            tmp_path / folder, ignore_mismatched_sizes=True, output_loading_info=True, **options
        )
        assert len(info["mismatched_keys"]) == 2 * 3 and num_tables(model) == MODELS[name][1]
        assert outputs(model).isfinite().all()


def test_parts_off_the_device_are_offloaded(llama, tmp_path, monkeypatch):
    """Here the CPU stands for the GPU that computes."""
    folder, plain = llama
    device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.norm": 0, "model.rotary_emb": 0}
    device_map |= {"model.layers.1": "cpu", "lm_head": "disk"}
    monkeypatch.setattr("ibp.integrations.transformers.weights._device_of", lambda place: torch.device("cpu"))
    infer = lambda *arguments, **options: dict(device_map)  # noqa: E731
    monkeypatch.setattr("transformers.integrations.accelerate.infer_auto_device_map", infer)
    save_coded(load(folder, IbpConfig(min_bytes=LEAST)), tmp_path / "small")
    for place in (dict(device_map), "auto"):
        for options in ({"quantization_config": IbpConfig(min_bytes=LEAST)}, {}):
            model = load(folder if options else tmp_path / "small", device_map=place, **options)
            report = model.hf_quantizer.report
            assert num_tables(model) == len(report.coded) == 8 and not any("layers.1" in name for name in report.coded)
            assert model.hf_quantizer.offloaded.stats().weight_bytes > 0
            assert_same_bits(outputs(model), outputs(plain))
            assert torch.equal(tokens(model), tokens(plain))
    assert device_map["lm_head"] == "disk"
    save_coded(model, tmp_path / "saved")
    model.save_pretrained(tmp_path / "plain")
    for folder in ("saved", "plain"):
        assert_same_bits(outputs(load(tmp_path / folder)), outputs(plain))


def test_device_maps_that_are_refused(llama):
    folder, _ = llama
    for device_map in ({"model": 0, "lm_head": "cpu", "x": 1}, {"": "disk"}):
        with pytest.raises(ValueError, match="wanted one device that computes"):
            load(folder, IbpConfig(), device_map=device_map)
    model = load(folder, IbpConfig(min_bytes=LEAST), device_map={"": "cpu"})
    assert num_tables(model) == MODELS["llama"][1] and model.hf_quantizer.offloaded is None


def test_assisted_decoding(llama):
    folder, plain = llama
    model, assistant = (load(folder, IbpConfig(min_bytes=LEAST)) for _ in range(2))
    row = IDS[:1]
    wanted = plain.generate(row, max_new_tokens=8, do_sample=False, assistant_model=load(folder))
    assert torch.equal(model.generate(row, max_new_tokens=8, do_sample=False, assistant_model=assistant), wanted)


def test_embeddings_are_not_resized(llama):
    """Nothing has changed; the number of rows that there are is taken."""
    model = load(llama[0], IbpConfig(min_bytes=LEAST))
    wanted, num_rows = outputs(model), model.config.vocab_size
    for options in ({"new_num_tokens": num_rows + 2}, {"pad_to_multiple_of": num_rows - 1}):
        with pytest.raises(TypeError, match=rf"embed_tokens is coded and has {num_rows} rows, .* plain by exclude=\["):
            model.resize_token_embeddings(**options)
    for options in ({"new_num_tokens": num_rows}, {"pad_to_multiple_of": num_rows // 2}, {}):
        assert model.resize_token_embeddings(**options) is model.get_input_embeddings()
    assert_same_bits(outputs(model), wanted)
    assert model.config.vocab_size == num_rows
    ibp.nn.decompress(model).resize_token_embeddings(num_rows + 2)  # what the message says
    assert outputs(model).shape[-1] == num_rows + 2


def test_embeddings_that_are_plain_are_resized(llama):
    names = ["model.embed_tokens", "lm_head"]
    model, plain = load(llama[0], IbpConfig(min_bytes=LEAST, exclude=names)), load(llama[0])
    for each in (model, plain):
        torch.manual_seed(0)
        each.resize_token_embeddings(each.config.vocab_size + 3)
    assert_same_bits(outputs(model), outputs(plain))


def test_a_plain_embedding_stays_beside_a_coded_head(llama):
    model = load(llama[0], IbpConfig(min_bytes=LEAST, exclude="model.embed_tokens"))
    num_rows = model.config.vocab_size
    with pytest.raises(TypeError, match="lm_head is coded"):
        model.resize_token_embeddings(num_rows + 2)
    assert model.get_input_embeddings().weight.shape[0] == num_rows


def test_a_part_off_the_gpu(llama, cuda):
    folder, plain = llama
    device_map = {"model": 0, "model.layers.1": "cpu", "lm_head": 0}
    model = load(folder, IbpConfig(min_bytes=LEAST), device_map=device_map)
    assert num_tables(model) == 9 and model.model.layers[0].mlp.up_proj.weight.device.type == "cuda"
    torch.testing.assert_close(model(IDS.to(cuda)).logits.cpu(), outputs(plain), rtol=0.1, atol=0.2)
    model.generate(IDS.to(cuda), max_new_tokens=3, do_sample=False)


def test_on_a_gpu(llama, tmp_path, cuda):
    folder, plain = llama
    wanted = outputs(plain)
    model = load(folder, IbpConfig(min_bytes=LEAST), device_map={"": cuda})
    assert {module.weight.device.type for module in model.modules() if isinstance(module, TableModule)} == {"cuda"}
    torch.testing.assert_close(model(IDS.to(cuda)).logits.cpu(), wanted, rtol=0.1, atol=0.2)
    save_coded(model, tmp_path / "small")
    ibp.checkpoints.compress(folder, f"{tmp_path / 'packed'}/")
    shutil.copy(tmp_path / "small" / "config.json", tmp_path / "packed")
    for small in ("small", "packed"):
        model = load(tmp_path / small, device_map={"": cuda})
        assert num_tables(model) == MODELS["llama"][1]
        torch.testing.assert_close(model(IDS.to(cuda)).logits.cpu(), wanted, rtol=0.1, atol=0.2)
    torch.testing.assert_close(load(tmp_path / "small").to(cuda)(IDS.to(cuda)).logits.cpu(), wanted, rtol=0.1, atol=0.2)
