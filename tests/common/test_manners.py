"""Counters and their fractions, and changes that are undone: `_common.manners`, `_common.process`."""

from dataclasses import dataclass

import pytest

from ibp._common.manners import Saves, Statistics, share_saved
from ibp._common.process import Closing


@dataclass(frozen=True)
class Counted(Statistics, Saves):
    original_bytes: int
    stored_bytes: int


def test_counters_and_fractions():
    found = Counted(100, 25)
    assert found.savings == 0.75 and found.as_dict() == {"original_bytes": 100, "stored_bytes": 25, "savings": 0.75}
    assert tuple(found) == (100, 25) and found == Counted(100, 25) and repr(found).endswith("stored_bytes=25)")
    assert Counted(0, 0).savings == 0 and share_saved(10, 15) == -0.5


def test_the_end_of_a_block_closes():
    class Door(Closing):
        is_open = True

        def close(self):
            self.is_open = False

    with pytest.raises(KeyError), Door() as door:
        assert door.is_open
        raise KeyError
    assert not door.is_open
