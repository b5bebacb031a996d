"""benchmarks/llm.py on the CPU: rows, columns, checks of bits, products and logits, and what it asks for."""

import csv

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import codec, harness, llm  # noqa: E402

pytestmark = pytest.mark.frameworks

STEPS = [str(batch) for batch in llm.QUICK_BATCHES]


def run_part(directory, option=""):
    argv = ["--device", "cpu", "--quick", "--out", str(directory)]
    return llm.main([f"--{option}", *argv] if option else argv)


def lines_of(directory, **wanted):
    with open(directory / "llm.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(exit statuses, directory) of runs of all parts."""
    directory = tmp_path_factory.mktemp("llm")
    return [run_part(directory, option) for option in llm.PARTS], directory


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    argv = ["--device", "cpu", "--quick", "--out", str(tmp_path_factory.mktemp("run"))]
    return harness.Run("llm", harness.parse_args(argv), llm.COLUMNS)


@pytest.fixture(scope="module")
def rates(run):
    return codec.DeviceRates(run, record=False)


@pytest.fixture(scope="module")
def config(run):
    return llm.config_of("Llama-3-8B", run.quick)


@pytest.fixture(scope="module")
def plain(run, config):
    return llm.build(run, config, llm.PLAIN)[0]


@pytest.fixture
def coded(run, config):
    return llm.build(run, config, llm.CODED)[0]


def test_the_script_on_the_cpu(measured):
    statuses, directory = measured
    rows = lines_of(directory)
    assert set(statuses) == {0} and list(rows[0]) == [*harness.COLUMNS, *llm.COLUMNS]
    assert {row["model"] for row in rows} == {model for models, _ in llm.PARTS.values() for model in models}
    both = [llm.PLAIN, llm.CODED]
    for model in ("Llama-3-8B", "Qwen3-32B"):
        steps = [(row["rows"], row["arm"]) for row in lines_of(directory, model=model, way=llm.STEP)]
        more = [("1", llm.OFFLOADED)] if model == "Llama-3-8B" else []
        assert steps == [(batch, arm) for batch in STEPS for arm in both] + more
        assert [row["arm"] for row in lines_of(directory, model=model, way=llm.PREFILL)] == both
    assert [row["rows"] for row in lines_of(directory, way=llm.COMPILED, arm=llm.CODED)] == STEPS
    assert [row["arm"] for row in lines_of(directory, way=llm.LOADING)] == (both if llm.save_coded else [])
    assert {row["arm"] for row in lines_of(directory, model="Llama-3-70B")} == {llm.CODED}
    for row in rows:
        assert float(row["ms"]) > 0 and float(row["gbps"]) > 0 and float(row["ideal_gbps"]) > 0
        assert (row["tokens_per_s"] != "") is (row["way"] not in (llm.WEIGHTS, llm.LOADING))


def test_what_is_compared_with_plain(measured):
    for row in lines_of(measured[1]):
        is_compared = row["way"] != llm.WEIGHTS and row["model"] != "Llama-3-70B"
        assert (row["times"] != "") is is_compared
        assert row["times"] == "1.000" or row["arm"] != llm.PLAIN or not is_compared
        has_target = is_compared and row["arm"] == llm.CODED and row["way"] != llm.STEP
        assert (row["target_gbps"] != "") is has_target
        assert (row["met"] != "") is (has_target or (row["way"], row["arm"]) == (llm.WEIGHTS, llm.CODED))


def test_what_weights_take(measured):
    for row in lines_of(measured[1]):
        share = int(row["device_bytes"]) / int(row["weight_bytes"])
        assert share == 1 if row["arm"] == llm.PLAIN else share < 0.85, row["case"]
        assert row["peak_bytes"] == ""  # no GPU


def test_a_part_keeps_the_rows_of_the_others(measured):
    before = lines_of(measured[1])
    assert run_part(measured[1], "large") == 0
    after = lines_of(measured[1])
    others = [row for row in before if row["model"] != "Llama-3-70B"]
    assert after[: len(others)] == others and len(after) == len(before)


def test_an_arm_that_fails_leaves_the_other(run, rates, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no room")

    monkeypatch.setattr(run, "failures", [])
    monkeypatch.setattr(llm.ibp.nn, "compress", fail)
    bench = llm.Bench(run, rates, "Llama-3-8B")
    assert list(bench.models) == [llm.PLAIN] and run.failures == ["Llama-3-8B, coded: RuntimeError: no room"]


def test_a_wrong_product_is_reported_and_the_arm_measured(run, rates, monkeypatch):
    linear = llm.ibp.linear
    monkeypatch.setattr(run, "failures", [])
    monkeypatch.setattr(llm.ibp, "linear", lambda x, table, **more: linear(x, table, **more) * 1.01)
    bench = llm.Bench(run, rates, "Llama-3-8B")
    (failure,) = run.failures
    assert failure.startswith("Llama-3-8B, products and logits: AssertionError: a product of")
    assert list(bench.models) == [llm.PLAIN, llm.CODED]


def test_loading_is_left_out_without_the_quantizer(run, rates, monkeypatch, capsys):
    monkeypatch.setattr(llm, "save_coded", None)
    before = len(run.rows)
    llm.measure_loading(run, rates)
    assert len(run.rows) == before and "left out" in capsys.readouterr().out


# ---- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", llm.SHAPES)
def test_shapes_have_the_parameters_that_their_names_say(name):
    count = sum(parameter.numel() for parameter in llm.empty_model(llm.config_of(name, False)).parameters())
    billions = {"Llama-3-8B": 8.03, "Qwen3-32B": 32.76, "Llama-3-70B": 70.55}
    assert name not in billions or round(count / 1e9, 2) == billions[name]
    assert count > 0.9e9


def test_a_model_has_the_same_values_at_every_time(run, config, plain):
    again = llm.build(run, config, llm.PLAIN)[0].state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in plain.state_dict().items())
    assert float(plain.lm_head.weight.std()) == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(plain.model.layers[0].mlp.up_proj.weight, plain.model.layers[1].mlp.up_proj.weight)


def test_every_matrix_and_embedding_is_coded(run, coded):
    modules = [module for module in coded.modules() if isinstance(module, (torch.nn.Linear, torch.nn.Embedding))]
    assert modules == [] and sum(map(llm.is_coded, coded.modules())) == 2 + 7 * len(coded.model.layers)


def test_steps_start_again_where_they_were_rewound(run, plain):
    with torch.no_grad():
        step = llm.Step(run, plain, 2, llm.QUICK_CONTEXT)
        for _ in range(llm.ROOM):  # to the end of the cache
            step()
        assert step.position.tolist() == [[llm.QUICK_CONTEXT]] * 2
        step.rewind()
        assert torch.equal(step.token, step.first) and step.position.tolist() == [[llm.QUICK_CONTEXT - llm.ROOM]] * 2
        assert {int(layer.cumulative_length) for layer in step.cache.layers} == {llm.QUICK_CONTEXT - llm.ROOM}


def test_no_timing_takes_more_steps_than_a_cache_has_room_for():
    assert max(llm.WARM_UPS + 1, harness.MAX_REPEATS + 2) < llm.ROOM < llm.QUICK_CONTEXT


# ---- what is checked -----------------------------------------------------------------------------------------------


def test_a_wrong_bit_is_found(plain, coded):
    llm.check_weights(plain)
    llm.check_weights(coded)
    layers = coded.model.layers
    layers[0].mlp.up_proj, layers[1].mlp.up_proj = layers[1].mlp.up_proj, layers[0].mlp.up_proj
    with pytest.raises(AssertionError, match=r"model.layers.0.mlp.up_proj: bits differ"):
        llm.check_weights(coded)
    llm.check_weights(coded, "model.layers.1.self_attn")


def test_a_wrong_product_is_found(run, plain, coded, monkeypatch):
    with torch.no_grad():
        llm.check(run, coded, plain)
        linear = llm.ibp.linear
        monkeypatch.setattr(llm.ibp, "linear", lambda x, table, **more: linear(x, table, **more) * 1.01)
        with pytest.raises(AssertionError, match="a product of .* is off by"):
            llm.check(run, coded)


def test_wrong_logits_are_found(run, config, coded):
    other = llm.build(run, config, llm.PLAIN)[0]
    other.lm_head.weight.mul_(1.2)
    with torch.no_grad(), pytest.raises(AssertionError, match="logits differ by 0.167 of their norm"):
        llm.check(run, coded, other)
    coded.model.norm.weight.fill_(float("nan"))
    with torch.no_grad(), pytest.raises(AssertionError):
        llm.check(run, coded)


def test_matrices_that_no_call_multiplies_are_found(run, coded, plain):
    with torch.no_grad(), pytest.raises(AssertionError, match="0 of 0 coded matrices"):
        llm.check(run, plain)
    coded.model.layers[1].forward = lambda hidden_states, **_: hidden_states
    with torch.no_grad(), pytest.raises(AssertionError, match="8 of 15 coded matrices were multiplied"):
        llm.check(run, coded)


# ---- targets -------------------------------------------------------------------------------------------------------


def test_targets(run, rates, capsys, monkeypatch):
    bench = llm.Bench(run, rates, "Llama-3-8B", ())
    bench.device_bytes = {llm.PLAIN: 100, llm.CODED: 75}
    monkeypatch.setattr(run, "rows", [])
    for seconds in (0.80, 0.81):
        bench.record(llm.COMPILED, llm.PLAIN, 1, 1.0, context=512, wanted=1.25)
        bench.record(llm.COMPILED, llm.CODED, 1, seconds, context=512, wanted=1.25)
    assert [row.get("met", "") for row in run.rows] == ["", "yes", "", "no"]
    assert list(llm.shortfalls(run.rows)) == [
        "Llama-3-8B, compiled step, batch 1, context 512: 1.235 times as fast as plain, wanted 1.25"
    ]
    row = {"way": llm.WEIGHTS, "case": "Llama-3-8B, weights", "met": "no", "device_bytes": 77, "weight_bytes": 100}
    assert list(llm.shortfalls([row])) == ["Llama-3-8B, weights: 0.770 of the plain bytes, wanted 0.76"]
    assert "Llama-3-8B, compiled step, batch 1, context 512, coded: 800.00 ms" in capsys.readouterr().out


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["", "large"])
def test_the_script_on_a_gpu(option, cuda, tmp_path):
    argv = ["--device", "cuda", "--quick", "--out", str(tmp_path)]
    assert llm.main([f"--{option}", *argv] if option else argv) == 0
    for row in lines_of(tmp_path):
        peak_bytes = int(row["peak_bytes"] or 0)
        assert peak_bytes == 0 if row["way"] == llm.LOADING or row["arm"] == llm.OFFLOADED else peak_bytes > 0
