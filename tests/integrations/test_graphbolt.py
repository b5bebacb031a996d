"""ibp.integrations.graphbolt, with a stand-in for GraphBolt: its class Feature, a store of features, and how its
fetchers read them."""

import importlib
import sys
import types

import pytest
import torch

import ibp
from helpers import assert_same_bits, make_tensor

pytestmark = pytest.mark.frameworks
NUM_ROWS = 200
IDS = torch.tensor([7, 199, 0, 7])


class StandIn:
    """What DGL 2.4.0's Feature asks of those that derive from it."""

    def read(self, ids=None):
        raise NotImplementedError

    read_async = read_async_num_stages = size = count = update = read

    def metadata(self):
        return {}


@pytest.fixture
def feature_class(monkeypatch):
    package, graphbolt = types.ModuleType("dgl"), types.ModuleType("dgl.graphbolt")
    graphbolt.Feature, package.graphbolt = StandIn, graphbolt
    monkeypatch.setitem(sys.modules, "dgl", package)
    monkeypatch.setitem(sys.modules, "dgl.graphbolt", graphbolt)
    monkeypatch.delitem(sys.modules, "ibp.integrations.graphbolt", raising=False)
    yield importlib.import_module("ibp.integrations.graphbolt").Feature
    del sys.modules["ibp.integrations.graphbolt"]


def rows():
    return make_tensor((NUM_ROWS, 3, 40), torch.float32)


def read_in_stages(feature, ids):
    """As GraphBolt's fetcher does."""
    stages = feature.read_async(ids)
    for _ in range(feature.read_async_num_stages(ids.device)):
        future = next(stages)
    return future.wait()


def test_what_a_feature_answers(feature_class):
    x = rows()
    for given in (x, x.numpy(), ibp.compress(x), ibp.RowCache(ibp.compress(x), 40_000, range(NUM_ROWS))):
        feature = feature_class(given)
        assert isinstance(feature, StandIn)
        assert_same_bits(feature.read(IDS), x[IDS])
        assert_same_bits(feature.read(IDS.to(torch.int32)), x[IDS])
        assert_same_bits(feature.read(), x)
        assert_same_bits(read_in_stages(feature, IDS), x[IDS])
        assert feature.size() == (3, 40) and feature.count() == NUM_ROWS and feature.metadata() == {}
        assert feature.is_pinned() == feature.table.is_pinned()
    assert "RowCache" in repr(feature)
    with pytest.raises(ValueError, match="make another Feature"):
        feature.update(x)
    made = feature_class(x, {"unit": "m"}, scheme="planes")
    assert made.metadata() == {"unit": "m"} and made.table.scheme == "planes"
    assert feature_class(torch.arange(5)).size() == ()


def test_update(feature_class):
    feature, other = feature_class(rows()), make_tensor((NUM_ROWS, 3, 40), torch.float32, "narrow", seed=1)
    feature.update(other)
    assert_same_bits(feature.read(IDS), other[IDS])
    with pytest.raises(ValueError, match="ids are given; wanted None: rows of tables are fixed"):
        feature.update(other[IDS], IDS)
    with pytest.raises(ValueError, match=r"value is \[200, 3\] of torch.float32; wanted \[200, 3, 40\]"):
        feature.update(other[:, :, 0])
    with pytest.raises(ValueError, match="value is list"):
        feature.update([1])


def test_what_goes_wrong(feature_class):
    feature = feature_class(rows())
    for read in (feature.read, lambda ids: read_in_stages(feature, ids)):
        with pytest.raises(IndexError, match=rf"the feature: ids\[1\] is {NUM_ROWS}; wanted 0 to {NUM_ROWS - 1}"):
            read(torch.tensor([0, NUM_ROWS]))
    with pytest.raises(TypeError, match="x is a list; wanted a torch.Tensor, a numpy array"):
        feature_class([1.0])
    with pytest.raises(ValueError, match="x has no dimensions"):
        feature_class(torch.tensor(1.0))
    with pytest.raises(TypeError, match="x is a NoneType"):
        feature_class(None)
    with feature:
        assert feature.count() == NUM_ROWS
    for call in (feature.read, feature.size, feature.count, feature.is_pinned, lambda: feature.read(IDS)):
        with pytest.raises(RuntimeError, match="freed by close"):
            call()
    assert repr(feature) == "Feature(None)"


def test_rows_on_a_gpu(cuda, feature_class):
    x, feature = rows(), feature_class(rows())
    assert feature.is_pinned() and feature.pin_memory_() is feature
    for read in (feature.read, lambda ids: read_in_stages(feature, ids)):
        got, current = read(IDS.to(cuda)), torch.cuda.current_stream()
        assert got.device == cuda and current == torch.cuda.default_stream()
        assert_same_bits(got.cpu(), x[IDS])
