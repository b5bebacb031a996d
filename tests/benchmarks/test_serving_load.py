"""tools/serve_vllm.py with loads, as far as it goes without vLLM: bounds, random weights, what is measured of an
engine, and which rows a run writes.
"""

import collections
import csv
import json
import sys
import types

import pytest
import safetensors.torch
import torch

from native import ROOT

TINY = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
TINY |= {"vocab_size": 256, "tie_word_embeddings": False}
LINEAR_CSV = """case,arm,rows,row_bytes,dtype,gbps,us,vectors
device,copy_,1,268435456,uint8,500,,
"1000 x 1000, 1",cuBLAS,1000,2000,bfloat16,,10,1
"1000 x 1000, 101",cuBLAS,1000,2000,bfloat16,,20,101
"1000 x 1000, 1",ibp.linear,1000,2000,bfloat16,,8,1
"1000 x 1000, 101",ibp.linear,1000,2000,bfloat16,,28,101
"1000 x 1000, 1, after another kernel",cuBLAS,1000,2000,bfloat16,,999,1
"""


@pytest.fixture
def tools(monkeypatch):
    """The modules serving_bounds, serving_load and serve_vllm."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import serve_vllm
    import serving_bounds
    import serving_load

    return types.SimpleNamespace(bounds=serving_bounds, load=serving_load, serve=serve_vllm)


@pytest.fixture
def rates(tools, tmp_path):
    path = tmp_path / "rates" / "linear.csv"
    path.parent.mkdir()
    path.write_text(LINEAR_CSV)
    return tools.bounds.Rates(path)


# ---- bounds ----


def test_loads_are_named(tools):
    assert tools.bounds.Load.parse("256x128+1024") == (256, 128, 1024)
    for text in ("256", "256x128", "0x128+1", "ax1+1"):
        with pytest.raises(ValueError):
            tools.bounds.Load.parse(text)


def test_bytes_of_the_known_shapes(tools):
    sizes = {name: config for name, (config, _) in tools.serve.SHAPES.items()}
    weights = {name: tools.bounds.weight_bytes_of(config) / 1e9 for name, config in sizes.items()}
    assert weights == pytest.approx({"qwen3-32b": 65.52, "llama-3-8b": 16.06}, abs=0.01)
    tokens = {name: tools.bounds.kv_bytes_of(config) for name, config in sizes.items()}
    assert tokens == {"qwen3-32b": 262144, "llama-3-8b": 131072}


def test_times_of_products(rates):
    assert rates.memory_gbps == 1000
    assert rates.product_s(2_000_000, 1, False) == pytest.approx(10e-6)
    assert rates.product_s(4_000_000, 51, False) == pytest.approx(2 * 15e-6)
    assert rates.product_s(2_000_000, 202, False) == pytest.approx(40e-6)
    assert rates.product_s(2_000_000, 202, True) == pytest.approx(48e-6)  # decoded once, then as cuBLAS


def test_what_fits_decides_how_many_steps_there_are(tools, rates):
    load, weights, kv = tools.bounds.Load(8, 10, 5), 1_000_000, tools.bounds.kv_bytes_of(TINY)
    held = 8 * (11 + 12 + 13 + 14 + 15)
    prompts_s = 80 / tools.bounds.PIECE * rates.step_s(TINY, tools.bounds.PIECE, False)
    for room, sequences in ((held / 5, 8), (held / 20, 2)):  # all at once in 5 steps; in 20
        bound = tools.bounds.bound_of(TINY, rates, load, False, weights, weights + room * kv)
        seconds = 40 / sequences * rates.step_s(TINY, sequences, False) + held * kv / 1e12 + prompts_s
        assert bound == pytest.approx((40 / seconds, sequences))
    with pytest.raises(ValueError, match=r"leaves room for 14 tokens; one request has 15"):
        tools.bounds.bound_of(TINY, rates, load, False, weights, weights + 14 * kv)


# ---- random weights ----


def test_random_weights(tools, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    weights = dict(tools.load.random_weights(tmp_path, torch.device("cpu")))
    again = dict(tools.load.random_weights(tmp_path, torch.device("cpu")))
    assert all(torch.equal(values, again[name]) for name, values in weights.items())
    matrices = torch.cat([values.float().flatten() for values in weights.values() if values.dim() > 1])
    assert matrices.numel() * 2 == tools.bounds.weight_bytes_of(TINY)
    assert matrices.mean() == pytest.approx(0, abs=1e-4) and matrices.std() == pytest.approx(0.02, rel=0.01)
    assert all(values.eq(1).all() for values in weights.values() if values.dim() == 1)
    assert {values.dtype for values in weights.values()} == {torch.bfloat16}
    names = [name for name in weights if name.startswith("model.layers.0.self_attn")]
    assert [name.split(".")[4] for name in names][:3] == ["q_proj", "k_proj", "v_proj"]  # parts of a layer together


def module(monkeypatch, name, **members):
    made = types.ModuleType(name)
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, name, made)


def test_the_loader_hands_weights_to_the_model(tools, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    loaders = {}
    register = lambda name: lambda made: loaders.setdefault(name, made)  # noqa: E731
    for name in ("vllm", "vllm.model_executor"):
        module(monkeypatch, name)
    module(monkeypatch, "vllm.model_executor.model_loader", register_model_loader=register)
    module(monkeypatch, "vllm.model_executor.model_loader.base_loader", BaseModelLoader=object)
    tools.load.register_random_weights()
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    model = torch.nn.Module()
    model.waits = torch.nn.Parameter(torch.empty(2, 2, device="meta"))
    model.weight = torch.nn.Parameter(torch.empty(2, 2))
    found = []
    model.load_weights = found.extend
    loaders["random"]().load_weights(model, types.SimpleNamespace(model=tmp_path))
    assert ("lm_head.weight", (256, 64), "cpu") in [(name, tuple(x.shape), x.device.type) for name, x in found]


# ---- an engine ----


class Engine:
    """An engine that gives each request a token in a step, at most `room` requests at a time."""

    def __init__(self, room, short=0):
        self.room, self.short = room, short
        self.left, self.prompts, self.num_steps = collections.OrderedDict(), {}, 0

    def add_request(self, name, prompt, params):
        self.prompts[name] = prompt["prompt_token_ids"]
        self.left[name] = params.max_tokens - self.short

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        self.num_steps += 1
        if self.num_steps % 4 == 1:  # as vLLM does while it fills its queue
            return []
        names = [*self.left][: self.room]
        for name in names:
            self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
        return [
            types.SimpleNamespace(request_id=name, outputs=[types.SimpleNamespace(token_ids=[7])]) for name in names
        ]


@pytest.fixture
def vllm(monkeypatch):
    module(monkeypatch, "vllm", SamplingParams=types.SimpleNamespace)
    module(monkeypatch, "vllm.sampling_params", RequestOutputKind=types.SimpleNamespace(DELTA="delta"))


def test_a_load_is_served(tools, vllm):
    engine = Engine(room=2)
    found = tools.load.serve(engine, tools.bounds.Load(6, 5, 10), "a", 100)
    assert found["sequences"] == 2 and 0 < found["ttft_ms"] <= found["ttft_p99_ms"]
    assert found["between_ms"] > 0 and found["tokens_per_s"] > 0 and 0 <= found["long_steps"] < 1
    assert [len(prompt) for prompt in engine.prompts.values()] == [5] * 6
    assert len({tuple(prompt) for prompt in engine.prompts.values()}) == 6
    with pytest.raises(RuntimeError, match="wanted 60 tokens, got 54"):
        tools.load.serve(Engine(room=2, short=1), tools.bounds.Load(6, 5, 10), "a", 100)


def test_steps_are_timed(tools, vllm):
    (step, *parts) = tools.load.time_steps(Engine(room=9), 3, 100)
    assert (step["kind"], step["sequences"], step["tokens"]) == ("step", 3, 3)
    assert step["step_ms"] > 0 and step["host_ms"] >= 0
    assert any(part["side"] == "host" and part["name"].endswith(" step") for part in parts)
    (step, *_) = tools.load.time_prompts(Engine(room=9), 100)
    assert (step["sequences"], step["tokens"]) == (4, 2048)


# ---- a run ----

ARM = """
import json, sys, time
task = json.loads(open(sys.argv[2]).read())
tell = lambda **result: print(json.dumps(result), flush=True)
tell(kind="progress", text="loaded")
print("said of", task["arm"], file=sys.stderr)
coded = task["options"].get("quantization") == "ibp"
for requests, prompt, new in task["loads"]:
    tell(kind="load", requests=requests, prompt_tokens=prompt, new_tokens=new, tokens_per_s=1234.5678 * (1 + coded),
         weight_bytes=10**9, sequences=2.0, engine="a fake")
    if "KV" in task["arm"]:
        time.sleep(600)
for number in task["sequences"]:
    step = {"sequences": number, "tokens": number, "engine": "a fake"}
    tell(kind="step", **step, step_ms=1.5, gpu_ms=1.0, kernels=9.0, host_ms=0.5)
    tell(kind="part", **step, side="GPU", name="a kernel", calls=1.0, us=3.0)
sys.exit(coded)
"""


# ---- answers ----


class Answering:
    """An engine that answers each prompt with NEW_TOKENS times its first token, one token a step for all requests."""

    def __init__(self, num_tokens):
        self.num_tokens, self.most_together = num_tokens, 0
        self.asked, self.adapters = {}, {}

    def add_request(self, name, prompt, params, lora_request=None):
        self.asked[name], self.adapters[name] = [prompt["prompt_token_ids"][0], 0], lora_request
        self.most_together = max(self.most_together, len(self.asked))

    def has_unfinished_requests(self):
        return bool(self.asked)

    def step(self):
        outputs = []
        for name, asked in [*self.asked.items()]:
            asked[1] += 1
            answer = types.SimpleNamespace(token_ids=[asked[0]] * asked[1], logprobs=None)
            outputs.append(types.SimpleNamespace(request_id=name, outputs=[answer], num_cached_tokens=1))
            if asked[1] == self.num_tokens:
                del self.asked[name]
        return outputs


def test_answers_with_adapters(tools, vllm):
    engine = Answering(tools.serve.NEW_TOKENS)
    prompts = {(4, "b"): [5, 1], (3, "a"): [6, 1], (0, "c"): [7, 1]}
    found = tools.serve.answer(engine, prompts, ["even", "odd"])
    assert [tokens for tokens, *_ in found] == [[number] * tools.serve.NEW_TOKENS for number in (5, 6, 7)]
    assert [engine.adapters[name] for name in "bac"] == ["even", "odd", "even"]
    assert all(to_first >= 0 and after >= 0 and cached == 1 for _, _, to_first, after, cached in found)
    assert tools.serve.answer(engine, {(0, "d"): [8]})[0][0][0] == 8 and engine.adapters["d"] is None


@pytest.mark.parametrize("feature, together", [("", 1), (" with four together", 4)])
def test_how_many_prompts_are_answered_together(tools, vllm, monkeypatch, feature, together):
    module(monkeypatch, "vllm.lora")
    module(monkeypatch, "vllm.lora.request", LoRARequest=lambda *which: which)
    engine = Answering(tools.serve.NEW_TOKENS)
    llm = types.SimpleNamespace(llm_engine=engine, generate=lambda *_, **__: None)
    prompts = [[number, 0] for number in range(tools.serve.PROMPTS)]
    task = {"arm": "coded weights" + feature, "prompts": prompts, "is_baseline": False, "adapters": ["x", "y"]}
    told = tools.serve.answers_of(llm, task)
    assert [engine.adapters[f"once {number}"] for number in (0, 1, 2)] == [("x", 1, "x"), ("y", 2, "y"), ("x", 1, "x")]
    assert engine.most_together == together
    assert [tokens[0] for tokens in told["tokens"]] == told["prompts"]
    assert told["prompts"][: tools.serve.PROMPTS] == [*range(tools.serve.PROMPTS)]


def test_what_an_arm_is_compared_with(tools):
    baseline_of = tools.serve.baseline_of
    assert {baseline_of(arm) for arm in ("plain", "coded KV", "coded weights with four together")} == {"plain"}
    assert baseline_of("coded weights with a draft") == "coded weights"
    assert baseline_of("coded weights with two adapters") == "plain with two adapters"


def test_adapters_fit_a_shape(tools, tmp_path):
    folders = tools.serve.make_adapters(TINY, tmp_path)
    assert len(folders) == 2
    for folder in folders:
        weights = safetensors.torch.load_file(folder / "adapter_model.safetensors")
        assert len(weights) == 2 * 7 * TINY["num_hidden_layers"]
        down = "base_model.model.model.layers.1.mlp.down_proj"
        assert weights[f"{down}.lora_A.weight"].shape == (8, 128) and weights[f"{down}.lora_B.weight"].shape == (64, 8)
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8


@pytest.fixture
def run(tools, rates, tmp_path, monkeypatch):
    """Runs the tool with arms that tell what ARM says; returns (exit status, rows by CSV)."""
    script = tmp_path / "arm.py"
    script.write_text(ARM)
    monkeypatch.setattr(tools.serve, "__file__", str(script))

    def call(*words):
        out, rates_file = tmp_path / "out", tmp_path / "rates" / "linear.csv"
        words = [*words, "--out", str(out), "--rates", str(rates_file)]
        monkeypatch.setattr(sys, "argv", ["serve_vllm.py", *words])
        status, found = tools.serve.main(), {}
        for path in out.glob("*.csv"):
            with open(path, newline="") as file:
                found[path.stem] = list(csv.DictReader(file))
        return status, found

    return call


@pytest.mark.slow
def test_a_failed_arm_loses_no_other(run, capsys, tmp_path):
    arms = "plain,coded weights,coded weights and KV,plain"
    status, found = run("--shape", "llama-3-8b", "--load", "4x8+8,1x8+8", "--arms", arms, "--limit", "3")
    rows = [(row["arm"], row["order"], row["requests"], row["tokens_per_s"]) for row in found["serve_vllm"]]
    assert status == 1 and rows == [
        ("plain", "1", "4", "1235"),
        ("plain", "1", "1", "1235"),
        ("coded weights", "2", "4", "2469"),
        ("coded weights", "2", "1", "2469"),
        ("coded weights and KV", "3", "4", "2469"),
        ("plain", "4", "4", "1235"),
        ("plain", "4", "1", "1235"),
    ]
    said = capsys.readouterr().out
    assert "FAILED coded weights: exit status 1\nsaid of coded weights\n" in said
    assert "FAILED coded weights and KV: killed, its limit is 3 s" in said and "plain: loaded" in said
    assert {row["card_gib"] for row in found["serve_vllm"]} == {"23.5"}
    row = found["serve_vllm"][0]
    assert float(row["share_of_bound"]) == pytest.approx(1234.6 / float(row["bound_tokens_per_s"]), rel=1e-3)
    assert "--out" not in row["command"] and row["command"].startswith("tools/serve_vllm.py --shape llama-3-8b")
    assert [row["sequences"] for row in found["serve_steps"]] == ["1", "4", "32", "128"] * 3
    assert len(found["serve_parts"]) == 12
    assert (tmp_path / "out" / "serve_vllm.log").read_text().count("said of plain") == 2


def test_rows_of_the_same_run_are_replaced(run):
    words = "--shape", "llama-3-8b", "--arms", "plain", "--sequences", "1"
    run(*words, "--load", "4x8+8")
    run(*words, "--load", "2x8+8", "--card-gib", "40")
    status, found = run(*words, "--load", "4x8+8,1x8+8")
    rows = [(row["requests"], row["card_gib"]) for row in found["serve_vllm"]]
    assert status == 0 and rows == [("2", "40"), ("4", "23.5"), ("1", "23.5")]
    assert [row["card_gib"] for row in found["serve_steps"]] == ["40", "23.5"]


def test_options_of_the_engine(tools, rates, tmp_path):
    folder = tools.serve.make_shape(tmp_path, "qwen3-32b")
    loads = [tools.bounds.Load(256, 128, 1024), tools.bounds.Load(1, 512, 256)]
    args = types.SimpleNamespace(model=folder, shape="qwen3-32b", mode="graphs", load=loads, sequences=[1, 128])
    vars(args).update(card_gib=79.0, share=0.5, host_gib=2, gain=1.4, min_bytes=1 << 20)
    arms = tools.serve.arms_of(args, 0, None)
    assert [*arms] == ["plain", "coded weights", "coded weights and raw KV", "coded weights and KV"]
    plain = arms["plain"]
    assert plain["load_format"] == "random" and plain["gpu_memory_utilization"] == 0.475
    assert (plain["max_num_seqs"], plain["max_model_len"], plain["max_num_batched_tokens"]) == (256, 1152, 8192)
    weights = {name: value for name, value in arms["coded weights"].items() if plain.get(name) != value}
    assert weights["quantization"] == "ibp" and [*weights] == ["quantization", "hf_overrides"]
    extra = arms["coded weights and KV"]["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 2 << 30 and extra["spec_name"] == "IBPOffloadingSpec"
    extra = arms["coded weights and raw KV"]["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra == {"cpu_bytes_to_use": 2 << 30}


def test_bad_input(run, capsys):
    status, found = run("--shape", "qwen3-32b", "--load", "4x8+8", "--card-gib", "60", "--arms", "plain,coded weights")
    assert status == 1 and [row["arm"] for row in found["serve_vllm"]] == ["coded weights"]
    said = capsys.readouterr().out
    assert "FAILED plain: the weights take 65.5 GB of 61.2 GB, which leaves room for 0 tokens" in said
    with pytest.raises(SystemExit, match="coded weights with FP8 KV is compared with plain with FP8 KV; wanted"):
        run("--shape", "qwen3-32b", "--arms", "plain,coded weights with FP8 KV")
    with pytest.raises(SystemExit, match="no arm named coded; wanted some of: plain, coded weights"):
        run("--shape", "qwen3-32b", "--load", "4x8+8", "--arms", "coded")
    for words in (["--shape", "qwen3-32b", "--mixture"], [], ["--shape", "qwen3-32b", "--load", "4"]):
        with pytest.raises(SystemExit, match="2"):
            run(*words)
