"""ibp.deltas.PlacedReceiver: pushes into weights that an engine keeps merged, sharded or coded."""

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp.deltas import PlacedReceiver, Sender, ShardPlace


class Engine(PlacedReceiver):
    """Keeps "q" and "k" in one tensor, the left columns of "down", "up" as a table, and "scale", which has no
    dimensions. It keeps nothing of "elsewhere", and "up" under two names."""

    def __init__(self, checkpoint):
        super().__init__()
        self.merged = torch.cat([checkpoint["q"], checkpoint["k"]])
        self.columns = checkpoint["down"][:, :24].clone()
        self.table = ibp.compress(checkpoint["up"], device="cpu", memory="host")
        self.scale, self.asked = checkpoint["scale"].clone(), []

    def places_of(self, tensors):
        self.asked += tensors
        return {name: self._places_of(name, *shape) for name, (shape, _) in tensors.items()}

    def _places_of(self, name, *shape):
        box = tuple((0, length) for length in shape)
        if name in ("q", "k"):
            return [ShardPlace(self.merged, 0 if name == "q" else 48, box)]
        if name == "down":
            return [ShardPlace(self.columns, 0, ((0, shape[0]), (0, 24)))]
        if name == "up":
            return [ShardPlace(self.table, 0, box)]
        return [ShardPlace(self.scale, 0, ())] if name == "scale" else []


SHAPES = {"q": (48, 40), "k": (16, 40), "down": (40, 48), "up": (80, 64), "elsewhere": (7, 7), "scale": ()}


def versions():
    generator = torch.Generator().manual_seed(0)
    old = {name: torch.randn(shape, generator=generator).mul(0.02).bfloat16() for name, shape in SHAPES.items()}
    changed = {name: torch.rand(shape, generator=generator) < 0.05 for name, shape in SHAPES.items()}
    return old, {name: torch.where(changed[name], weight * 1.01, weight) for name, weight in old.items()}


def check(engine, checkpoint):
    assert_same_bits(engine.merged, torch.cat([checkpoint["q"], checkpoint["k"]]))
    assert_same_bits(engine.columns, checkpoint["down"][:, :24].contiguous())
    assert_same_bits(engine.table.decompress(), checkpoint["up"])
    assert_same_bits(engine.scale, checkpoint["scale"])


@pytest.mark.parametrize("piece_bytes", [500, 1 << 20])
@pytest.mark.parametrize("full", [False, True])
def test_pushes(piece_bytes, full):
    old, new = versions()
    engine, sender = Engine(old), Sender(old, piece_bytes=piece_bytes)
    check(engine, old)
    for version in (new, old):
        done = [engine.apply(message) for message in sender.push(version, full=full)]
        assert done == [False] * (len(done) - 1) + [True]
        check(engine, version)
    assert sorted(engine.asked) == sorted(SHAPES)  # once each


def test_parts_of_rows():
    """A process keeps some rows of a tensor, in two places."""
    old, new = versions()
    top, bottom = old["up"][10:30].clone(), old["up"][50:].clone()

    class Shards(PlacedReceiver):
        def places_of(self, tensors):
            places = [ShardPlace(top, 0, ((10, 20), (0, 64))), ShardPlace(bottom, 0, ((50, 30), (0, 64)))]
            return {name: places if name == "up" else [] for name in tensors}

    engine = Shards()
    for message in Sender(old, piece_bytes=1500).push(new):
        engine.apply(message)
    assert_same_bits(top, new["up"][10:30])
    assert_same_bits(bottom, new["up"][50:])


def test_other_weights_are_refused():
    """A process that keeps whole tensors notices that they are other ones than the sender's."""
    old, new = ({name: version[name] for name in ("q", "k")} for version in versions())
    engine, (message,) = Engine(versions()[0]), Sender(old).push(new)
    engine.merged[5] += 1
    before = engine.merged.clone()
    with pytest.raises(ibp.deltas.OutOfSyncError, match="q, joined with 1 others"):
        engine.apply(message)
    assert_same_bits(engine.merged, before)
    with pytest.raises(TypeError, match="abstract"):
        PlacedReceiver()
