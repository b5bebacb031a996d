"""`--quantization ibp` of vLLM, as far as it goes without vLLM: operations, and what is said where vLLM is missing.
tools/try_adapters.py runs the methods with the classes of releases.
"""

import importlib.util
import logging

import pytest
import torch
import torch.nn.functional as F

from helpers import assert_same_bits
from ibp.integrations import vllm_weights
from ibp.nn._tables import matrix_table
from native import ROOT

without_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")


@pytest.fixture
def table():
    made = matrix_table(torch.randn(48, 64).mul(0.02).bfloat16())
    vllm_weights._tables[made.slots.data_ptr()] = made
    return made


def product(x, table, bias=None):
    return torch.ops.ibp_engines.linear(x, table.slots, bias, table.shape[0])


def test_products_and_rows(table):
    x, bias, weight = torch.randn(2, 3, 64).bfloat16(), torch.randn(48).bfloat16(), table.decompress()
    assert_same_bits(product(x, table), F.linear(x, weight))
    assert_same_bits(product(x[0], table, bias), F.linear(x[0], weight, bias))
    ids = torch.tensor([[3, 47], [0, 3]])
    assert_same_bits(torch.ops.ibp_engines.rows(ids, table.slots, 64), weight[ids])


def test_shapes_without_values(table):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(5, 64).bfloat16())
        y = product(x, table)
        rows = torch.ops.ibp_engines.rows(mode.from_tensor(torch.tensor([[1], [2]])), table.slots, 64)
    assert y.shape == (5, 48) and rows.shape == (2, 1, 64) and y.dtype == rows.dtype == torch.bfloat16


@pytest.mark.slow  # torch.compile is loaded
def test_compiled_code_is_for_all_numbers_of_tokens_and_all_layers(table):
    other = matrix_table(torch.randn(48, 64).mul(0.02).bfloat16())
    vllm_weights._tables[other.slots.data_ptr()] = other
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    run = torch.compile(
        lambda x, slots: torch.ops.ibp_engines.linear(x, slots, None, 48) + 1, backend=backend, fullgraph=True
    )
    for count, of in ((600, table), (2, table), (9, other)):
        x = torch.randn(count, 64).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        assert_same_bits(run(x, of.slots), F.linear(x, of.decompress()) + 1)
    assert len(compiled) == 1


def test_a_table_that_is_gone_is_not_kept(table):
    address = table.slots.data_ptr()
    assert address in vllm_weights._tables
    slots = table.slots
    vllm_weights._tables.pop(address)
    with pytest.raises(KeyError):
        torch.ops.ibp_engines.linear(torch.randn(1, 64).bfloat16(), slots, None, 48)


@without_vllm
def test_without_vllm(caplog):
    with pytest.raises(ImportError, match=r"needs vLLM 0.26.0 to 0.33.0; none is installed"):
        vllm_weights.IBPConfig()
    with caplog.at_level(logging.WARNING, "ibp.integrations.vllm_weights"):
        vllm_weights.register()
    assert "--quantization ibp is not there with this vLLM: No module named 'vllm'" in caplog.text


def test_the_entry_point():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["ibp"].split(":")
    assert getattr(importlib.import_module(module), name) is vllm_weights.register
