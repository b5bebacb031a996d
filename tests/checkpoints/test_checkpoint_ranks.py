"""Checkpoints that several processes compress, as torchrun starts them, over gloo."""

import pathlib

import numpy as np
import pytest
import torch

import ibp
from helpers import torchrun
from ibp.checkpoints._sources import open_source
from ranks import Ranks
from test_checkpoints import assert_same_tensors, model, read_back

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory):
    several = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield several
    several.end()


def compressed(rank, inputs, output, options):
    """What a rank gets: the report, or the error."""
    try:
        group = torch.distributed.group.WORLD
        report = ibp.checkpoints.compress(inputs, output, device="cpu", jobs=1, group=group, **options)
        return report.path, report.files, report.kept_files, len(report.tensors), report.file_bytes
    except Exception as error:
        return type(error).__name__, str(error)


def test_ranks_share_files_and_codebooks(ranks, tmp_path):
    tensors = model()
    safetensors.save_file(tensors, tmp_path / "in.safetensors", metadata={"format": "pt"})
    arguments = str(tmp_path / "in.safetensors"), str(tmp_path / "m.safetensors"), {"shard_bytes": 60_000}
    reports = ranks(compressed, *arguments)
    path, files, kept, count, _ = reports[0]
    assert reports == [reports[0]] * len(reports) and kept == 0 and count == len(tensors) and len(files) > 2
    found, metadata = read_back(path)
    assert_same_tensors(found, tensors)
    assert metadata == {"format": "pt"}
    with ibp.open(path) as file:
        file.verify(content=True)
        assert file["layers.0.weight"].codebook == file["layers.2.weight"].codebook
        assert file.info("layers.0.weight").files != file.info("layers.2.weight").files


def test_ranks_share_the_items_of_one_array(ranks, tmp_path):
    array = (np.random.default_rng(0).standard_normal((1003, 160)) * 0.1).astype(np.float32)
    np.save(tmp_path / "x.npy", array)
    path, files, *_ = ranks(compressed, str(tmp_path / "x.npy"), str(tmp_path / "x.safetensors"), {})[0]
    assert len(files) == len(ranks.pipes)
    with open_source(path) as source:
        assert list(source.tensors) == ["x"] and torch.equal(source.tensors["x"].tensor(), torch.from_numpy(array))
        cut = source.tensors["x"].read(333 * 160 * 4 + 5, 999 * 160 * 4 + 7)
    assert bytes(cut) == array.tobytes()[333 * 160 * 4 + 5 : 999 * 160 * 4 + 7]
    kept, *_ = ranks(compressed, str(tmp_path / "x.npy"), str(tmp_path / "kept.safetensors"), {"exclude": ["x"]})[0]
    with ibp.open(kept) as file:
        assert not file.tables and len(file) == len(files)
    for written in (path, kept):
        ibp.checkpoints.decompress(written, tmp_path / "back.npy", force=True)
        assert (tmp_path / "back.npy").read_bytes() == (tmp_path / "x.npy").read_bytes()


def test_what_fails_on_one_rank_fails_on_all(ranks, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((100, 100)))
    for outcome in ranks(compressed, str(tmp_path / "absent.npy"), str(tmp_path / "m"), {}):
        assert outcome[0] == "FileNotFoundError"
    for outcome in ranks(compressed, str(tmp_path / "x.npy"), "memory://m", {}):
        assert outcome[0] == "ValueError" and "a path that all ranks see" in outcome[1]
    given = ranks(compressed_differently, str(tmp_path / "x.npy"), str(tmp_path / "m"))
    assert all(kind == "ValueError" and "what to do" in text for kind, text in given)


def compressed_differently(rank, inputs, output):
    return compressed(rank, inputs, output, {"level": "fast" if rank else "default"})


@pytest.mark.slow
def test_the_example():
    path = pathlib.Path(__file__).parents[2] / "examples" / "torchrun_compress.py"
    size = min(2, torch.cuda.device_count()) or 2
    assert "2 files, the same bits: True" in torchrun(size, path)
