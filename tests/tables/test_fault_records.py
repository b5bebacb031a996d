"""What operations note and the exceptions that it becomes: `_rows.handle`."""

import pytest
import torch

import ibp
from ibp._rows.handle import Faults, FaultWords, new_record

CPU = torch.device("cpu")
WORDS = FaultWords(
    "{status}: row {value} at {position}", out_of_range="{value} of {count}", invalid="{position} contradicts"
)


def note(record, *values):
    record.copy_(torch.tensor(values))


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (1, ValueError, "^7 contradicts$"),
        (2, IndexError, "^-3 of 9$"),
        (3, ibp.CorruptTableError, "^a coded row contradicts.*: row -3 at 7$"),
        (4, ibp.CorruptTableError, ": row -3 at 7$"),
    ],
)
def test_statuses_become_exceptions(status, kind, message):
    record = new_record()
    WORDS.raise_for(record, count=9)
    note(record, status, 7, -3, 1)
    with pytest.raises(kind, match=message) as found:
        WORDS.raise_for(record, count=9)
    assert type(found.value) is kind


def test_one_message_stands_for_all_that_have_none():
    for status in (1, 2, 3):
        with pytest.raises(RuntimeError, match="^the states are damaged$"):
            FaultWords("the states are damaged", RuntimeError).raise_for([status, 0, 0, 0])


def test_later_calls_raise_what_was_noted_once():
    faults = Faults(WORDS, WORDS._replace(damaged="another kind", later=""))
    assert faults.devices == []
    faults.raise_pending(CPU)
    first, second = faults.on(CPU), faults.on(CPU, 1)
    assert faults.devices == [CPU] and faults.on(CPU) is first
    words = faults.words(CPU)
    note(second, 3, 0, 0, 1)
    assert list(words) == first.tolist() + second.tolist()
    with pytest.raises(ibp.CorruptTableError, match="^another kind$"):
        faults.raise_pending(CPU)
    note(first, 2, 0, 5, 1)
    faults.names["count"] = 4
    with pytest.raises(IndexError, match="^5 of 4 .noted by an earlier call on cpu"):
        faults.raise_pending(CPU)
    faults.raise_pending(CPU)
    note(first, 3, 0, 0, 1)
    faults.clear(CPU)
    faults.raise_pending(CPU)
