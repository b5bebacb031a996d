"""A real language model on compressed weights: the story it tells, token for token and bit for bit."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.frameworks
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import cpu_offload  # noqa: E402

import ibp  # noqa: E402
from examples.stories260k import FIRST, load_model, text_of  # noqa: E402
from helpers import assert_same_bits  # noqa: E402
from ibp.integrations.accelerate import CompressedWeights  # noqa: E402
from native import ROOT  # noqa: E402

BEGINNING = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


def tell(model, device="cpu", new_tokens=60):
    first = {name: tensor.to(device) for name, tensor in FIRST.items()}
    return model.generate(**first, max_new_tokens=new_tokens, do_sample=False)[0].cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_model_tells_a_story(dtype):
    model = load_model(dtype)
    assert sum(parameter.numel() for parameter in model.parameters()) == 260_032
    assert text_of(tell(model)).startswith(BEGINNING)


def offload(model, device):
    stats = ibp.offload(model, device, min_bytes=4096).stats()
    assert stats.host_bytes < 0.7 * stats.weight_bytes


def offload_by_accelerate(model, device):
    weights = CompressedWeights(model.state_dict(), device=device)
    assert weights.stored_bytes < 0.7 * weights.original_bytes
    for name, x in load_model().state_dict().items():
        assert_same_bits(weights[name].cpu(), x)
    cpu_offload(model, execution_device=torch.device(device), state_dict=weights)


def check_story(how, device):
    plain, model = load_model().to(device), load_model()
    how(model, device)
    assert torch.equal(tell(model, device), tell(plain, device))
    ids = tell(plain, device)[None].to(device)
    with torch.no_grad():
        assert_same_bits(model(ids).logits.cpu(), plain(ids).logits.cpu())


@pytest.mark.parametrize("how", [offload, offload_by_accelerate])
def test_the_same_story_from_compressed_weights(how):
    check_story(how, "cpu")


@pytest.mark.parametrize("how", [offload, offload_by_accelerate])
def test_the_same_story_on_a_gpu(how, cuda):
    check_story(how, cuda)


@pytest.mark.parametrize("name", ["story", "story_cache"])
def test_the_example(name):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(BEGINNING) and "Every token is the same." in done.stdout
