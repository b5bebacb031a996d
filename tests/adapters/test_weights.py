"""Weights that are coded one by one, and parameters that rest in them."""

import copy

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp.adapters import RestingWeight, WeightCompressor

ON_CPU = {"device": "cpu", "memory": "host"}


def weight(shape=(64, 256), seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(0.02).bfloat16()


def test_weights_of_a_kind_share_a_codebook():
    compressor = WeightCompressor(ON_CPU)
    coded = [compressor.code(f"layers.{number}.up.weight", weight(seed=number)) for number in range(3)]
    other = compressor.code("layers.0.down.weight", weight().mul(1e-3))
    assert len({id(each.table.codebook) for each in coded}) == 1
    assert other.table.codebook is not coded[0].table.codebook
    for number, each in enumerate(coded):
        assert_same_bits(each.decoded("cpu"), weight(seed=number))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x.view(8, 8, 16, 16).to(memory_format=torch.channels_last),
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(64, 256),
    ],
)
def test_strides(make):
    """A dense weight keeps its strides. A weight with gaps, or one that overlaps itself, becomes contiguous."""
    given = make(weight())
    coded = WeightCompressor(ON_CPU).code("a", given)
    decoded = coded.decoded("cpu")
    is_dense = given.numel() == 64 * 256 and 0 not in given.stride()
    assert decoded.stride() == coded.stride == (given.stride() if is_dense else given.contiguous().stride())
    assert_same_bits(decoded, given)
    assert decoded.data_ptr() == coded.as_it_was(decoded).data_ptr()


def test_what_is_worth_coding():
    x = torch.ones(1024)
    assert WeightCompressor.takes(x) and WeightCompressor({}).takes(torch.nn.Parameter(x).data)
    for other in (x[:1023], torch.nn.Parameter(x), x.to_sparse(), torch.ones(512, dtype=torch.complex64)[:1]):
        assert not WeightCompressor.takes(other)
    with pytest.raises(TypeError, match="speed: no such option; wanted some of"):
        WeightCompressor({"speed": 9})


def resting(device="cpu"):
    layer = torch.nn.Linear(64, 64).to(device).requires_grad_(False)
    values = layer.weight.detach().clone()
    return layer, values, RestingWeight("the weight", WeightCompressor({}).code("weight", values), device)


def test_a_parameter_at_rest():
    layer, values, held = resting()
    held.rest(layer.weight)
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device) == (values.shape, values.dtype, values.device)
    assert layer.weight.stride() == values.stride()
    with torch._C.DisableTorchFunctionSubclass():
        assert layer.weight.untyped_storage().nbytes() == 4
    assert_same_bits(layer.weight.clone(), values)
    x = torch.randn(3, 64)
    assert_same_bits(layer(x), torch.nn.functional.linear(x, values, layer.bias))
    with pytest.raises(RuntimeError, match="the weight is offloaded and cannot be written to"):
        layer.weight.zero_()
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(layer.weight)


def test_a_parameter_wakes_and_rests_again():
    layer, values, held = resting()
    held.rest(layer.weight)
    decoded = ibp.decompress(held.coded.table)
    held.wake(layer.weight, decoded)
    assert type(layer.weight) is torch.nn.Parameter and layer.weight.data_ptr() == decoded.data_ptr()
    assert_same_bits(layer.weight.detach(), values)
    held.rest(layer.weight)
    held.wake(layer.weight)  # its content is not asked for
    held.rest(layer.weight)
    assert_same_bits(layer.weight.clone(), values)
    held.release(layer.weight)
    assert type(layer.weight) is torch.nn.Parameter and not vars(layer.weight)
    layer.weight.zero_()


def test_a_parameter_rests_on_a_gpu(cuda):
    layer, values, held = resting(cuda)
    held.rest(layer.weight)
    assert layer.weight.device == cuda
    assert_same_bits(layer.weight.clone(), values)
