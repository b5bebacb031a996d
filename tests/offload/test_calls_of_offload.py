"""How many Python functions of ibp a call of an offloaded module enters: few run before and after its own forward."""

import torch
from torch import nn

import ibp
from counted import calls_of
from test_experts import SIZES, Experts, tokens

MOST_OF_LINEAR, MOST_OF_EXPERTS, MOST_OF_ROWS = 30, 45, 16


@torch.no_grad()
def test_a_linear_layer_that_is_the_model():
    model, x = nn.Linear(64, 64).eval(), torch.ones(2, 64)
    with ibp.offload(model, "cpu", min_bytes=1000):
        entered = calls_of(lambda: model(x))
    assert len(entered) <= MOST_OF_LINEAR, entered


@torch.no_grad()
def test_experts_by_index():
    model, x, weights = Experts(), tokens(1), torch.ones(1, 2, dtype=torch.bfloat16)
    with ibp.offload(model, "cpu", **SIZES):
        entered = calls_of(lambda: model(x, torch.tensor([[1, 5]]), weights))
    assert len(entered) <= MOST_OF_EXPERTS, entered


@torch.no_grad()
def test_rows_of_an_embedding():
    model, ids = nn.Sequential(nn.Embedding(1000, 32), nn.Linear(32, 32)).eval(), torch.tensor([1, 2])
    with ibp.offload(model, "cpu", min_bytes=1000):
        entered = calls_of(lambda: model[0](ids))
    assert len(entered) <= MOST_OF_ROWS, entered
