"""benchmarks/weights.py on the CPU: rows, columns, checks of bits and tokens, and what it asks for."""

import csv
import types

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from benchmarks import harness, weights  # noqa: E402

pytestmark = pytest.mark.frameworks

ARMS = ["on the GPU", "raw through hooks", "ibp", "ibp, loading", "ibp, two GPUs"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(exit status, directory) of a run of the whole script."""
    directory = tmp_path_factory.mktemp("weights")
    return weights.main(["--device", "cpu", "--quick", "--out", str(directory)]), directory


def lines_of(directory):
    with open(directory / "weights.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_the_script_on_the_cpu(measured):
    status, directory = measured
    rows = lines_of(directory)
    assert status == 0 and list(rows[0]) == [*harness.COLUMNS, *weights.EXTRA_COLUMNS]
    arms = {}
    for row in rows:
        arms.setdefault(row["dtype"], set()).add(row["arm"])
    assert arms.pop("bfloat16") == {*ARMS, weights.MASKS, *([weights.ACCELERATE] if weights.accelerate else [])}
    assert arms == {dtype: set(ARMS[:3]) for dtype in ("float16", "float8_e4m3fn")}
    cells = {(row["arm"], int(row["rows"]), int(row["prompt"])) for row in rows if row["dtype"] == "bfloat16"}
    assert {(arm, *cell) for arm in ARMS[:3] for cell in (*weights.QUICK_CELLS, (1, 0))} <= cells
    assert ("ibp, loading", 0, 0) in cells
    assert all(float(row["ms"]) > 0 and float(row["gbps"]) > 0 for row in rows)


def test_answers_by_generate(tmp_path):
    assert weights.main(["--generate", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    rows = {row["arm"]: row for row in lines_of(tmp_path)}
    assert list(rows) == [arm + weights.GENERATING for arm in ARMS[:3]]
    assert all(int(row["prompt"]) == weights.GENERATE_PROMPT and row["dtype"] == "bfloat16" for row in rows.values())
    assert float(rows["ibp" + weights.GENERATING]["savings"]) > 0.28


def test_what_weights_take(measured):
    rows = {(row["arm"], row["dtype"]): row for row in lines_of(measured[1])}
    for (arm, dtype), row in rows.items():
        host_bytes, weight_bytes, savings = int(row["host_bytes"]), int(row["weight_bytes"]), float(row["savings"])
        if arm == "on the GPU":
            assert host_bytes == 0 and int(row["device_bytes"]) == weight_bytes
        elif arm == weights.ACCELERATE:
            assert host_bytes == weight_bytes and row["device_bytes"] == ""
        elif arm == "raw through hooks":
            assert host_bytes == weight_bytes and savings == 0
        else:
            assert savings > (0.13 if dtype == "float16" else 0.2 if arm == weights.MASKS else 0.28), (arm, dtype)
            assert host_bytes < weight_bytes and int(row["device_bytes"]) < weight_bytes


# ---- what is checked -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    args = harness.parse_args(["--device", "cpu", "--quick", "--out", str(tmp_path_factory.mktemp("bench"))])
    return weights.Bench(harness.Run("weights", args, weights.EXTRA_COLUMNS), torch.bfloat16)


def test_a_wrong_bit_is_found(bench):
    model, _ = bench.offloaded()
    bench.check_weights(model)
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = {**bench.state, name: bench.state[name].clone()}
    wrong[name].view(torch.int16)[3, 5] ^= 1
    model, _ = bench.offloaded(checkpoint=wrong)
    with pytest.raises(AssertionError, match=f"1 of 29 weights differ, .'{name}'"):
        bench.check_weights(model)


def test_swapped_weights_are_found(bench):
    names = ["model.layers.1.self_attn.q_proj.weight", "model.layers.2.self_attn.q_proj.weight"]
    swapped = {**bench.state, names[0]: bench.state[names[1]], names[1]: bench.state[names[0]]}
    model, _ = bench.offloaded(checkpoint=swapped)
    with pytest.raises(AssertionError, match="2 of 29 weights differ"):
        bench.check_weights(model)


def test_other_tokens_are_found(bench):
    bench.tokens.clear()
    bench.check_tokens(1, 8, torch.tensor([[1, 2, 3, 4]]))
    bench.check_tokens(1, 8, torch.tensor([[1, 2]]))  # of an arm with fewer
    with pytest.raises(AssertionError, match="a prompt of 8 differ"):
        bench.check_tokens(1, 8, torch.tensor([[1, 3]]))
    for last in (4, 5):
        bench.check_tokens(16, 8, torch.tensor([[1, last]]))  # sums of large batches can differ


def test_first_tokens_are_not_timed(bench, monkeypatch):
    """Neither those of the first time, which allocates, nor the first one after the prompt."""
    now, calls = [0.0], []

    def model(x, **options):
        calls.append(x.shape)
        now[0] += 100 if len(calls) < 8 else 1  # the first time, the prompt, the first token
        logits = torch.zeros(len(x), 1, 12)
        logits[:, :, len(calls)] = 1
        return types.SimpleNamespace(logits=logits, past_key_values=None)

    monkeypatch.setattr(weights.time, "perf_counter", lambda: now[0])
    seconds, tokens = bench.seconds_a_token(model, 2, 8, 3)
    assert seconds == 1 and calls == [(2, 8), (2, 1), (2, 1), (2, 1), (2, 1)] * 2
    assert tokens.tolist() == [[6, 7, 8, 9, 10]] * 2


def test_where_files_are_in_memory():
    assert weights.memory_directory(1 << 60) is None


# ---- targets -------------------------------------------------------------------------------------------------------


def row_of(arm, ms, *, bound_ms="", batch=1, prompt=256, sms=0, dtype="bfloat16", device_bytes=600, weight_bytes=1000):
    return {
        "arm": arm,
        "dtype": dtype,
        "rows": batch,
        "prompt": prompt,
        "sms": sms,
        "ms": f"{ms:.2f}",
        "bound_ms": bound_ms,
        "device_bytes": device_bytes,
        "weight_bytes": weight_bytes,
    }


def ibp(ms, **changed):
    return row_of("ibp", ms, **({"bound_ms": "152.00", "sms": weights.STREAM_SMS} | changed))


@pytest.mark.parametrize(
    "reached, short, said",
    [
        ([ibp(159)], [ibp(161)], "161.0 ms, wanted 160.0"),
        ([ibp(159, dtype="float16")], [ibp(161, dtype="float16")], "161.0 ms, wanted 160.0"),
        ([ibp(168, dtype="float8_e4m3fn")], [ibp(170, dtype="float8_e4m3fn")], "170.0 ms, wanted 168.9"),
        (
            [ibp(155), row_of("raw through hooks", 221)],
            [ibp(155), row_of("raw through hooks", 219)],
            "1.41 times as fast as raw weights, wanted 1.42",
        ),
        ([ibp(100, prompt=0, bound_ms="101.00")], [ibp(102, prompt=0, bound_ms="101.00")], "102.0 ms, wanted 101.0"),
        (
            [row_of("ibp, loading", 9000, bound_ms="10000.00", prompt=0)],
            [row_of("ibp, loading", 11000, bound_ms="10000.00", prompt=0)],
            "11000.0 ms, wanted 10000.0",
        ),
        (
            [ibp(155), row_of("ibp, two GPUs", 83)],
            [ibp(155), row_of("ibp, two GPUs", 85)],
            "1.82 times one GPU, wanted 1.85",
        ),
        (
            [ibp(155), row_of(weights.ACCELERATE, 1250, device_bytes="")],
            [ibp(155), row_of(weights.ACCELERATE, 1200, device_bytes="")],
            "ibp is 7.7 times as fast, wanted 8.0",
        ),
    ],
    ids=["bf16", "fp16", "fp8", "raw", "balance", "loading", "two GPUs", "accelerate"],
)
def test_targets(reached, short, said):
    assert list(weights.shortfalls(reached)) == []
    (line,) = weights.shortfalls(short)
    assert said in line


def test_few_sms_have_no_target():
    assert list(weights.shortfalls([ibp(155), ibp(300, sms=weights.FEW_SMS), row_of("on the GPU", 999)])) == []


# ---- on a GPU ------------------------------------------------------------------------------------------------------


def test_the_script_on_a_gpu(cuda, tmp_path):
    assert weights.main(["--device", "cuda", "--quick", "--out", str(tmp_path)]) == 0
    rows = lines_of(tmp_path)
    assert {row["sms"] for row in rows if row["arm"] == "ibp"} == {str(weights.STREAM_SMS), str(weights.FEW_SMS)}
