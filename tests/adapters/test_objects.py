"""Manners of what adapters return: changes that can be undone, numbers, devices and reprs."""

import dataclasses
import pickle

import pytest
import torch

import ibp
from ibp.adapters import Closing, CodedStatistics, ModelChange, OfThisProcess, checked_device, shown_memory


class Undone(Exception):
    pass


class Attached(OfThisProcess, Closing):
    _instead = "attach it there"
    closed = 0

    def close(self):
        self.closed += 1


class Evaluated(ModelChange):
    _instead, changed_by = "pickle the model", "evaluate(model)"

    def close(self):
        self.model.train()


def test_close_is_called_once_however_the_block_ends():
    with Attached() as attached:
        assert attached.closed == 0
    assert attached.closed == 1
    with pytest.raises(Undone):
        with attached:
            raise Undone
    assert attached.closed == 2


def test_objects_of_a_process_are_not_pickled():
    with pytest.raises(TypeError, match=r"an test_objects\.Attached cannot be pickled or copied: attach it there"):
        pickle.dumps(Attached())


def test_a_change_of_a_model():
    model = torch.nn.Linear(2, 2).eval()
    with Evaluated(model) as change:
        assert change.model is model and not model.training
    assert model.training
    for use in (lambda: change(torch.ones(2)), lambda: change.weight):
        with pytest.raises((TypeError, AttributeError), match=r"evaluate\(model\) returned it, and changed the model"):
            use()
    with pytest.raises(TypeError, match="model is a list; wanted a torch.nn.Module: or one part of it"):
        Evaluated([], "or one part of it")
    with pytest.raises(TypeError, match="is no torch.nn.Module: evaluate"):
        Evaluated(change)


def test_a_change_guards_conversions():
    """A part that refuses a conversion is asked before any other part is converted."""

    class Refusing(torch.nn.Linear):
        def check_conversion(self, convert):
            raise TypeError("no")

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Refusing(2, 2))
    change = Evaluated(model)
    change.guard_conversions()
    with pytest.raises(TypeError, match="^no$"):
        model.half()
    assert model[0].weight.dtype == torch.float32
    model[1] = torch.nn.Linear(2, 2)
    change.guard_conversions()
    assert model.half()[0].weight.dtype == torch.float16


def test_statistics():
    @dataclasses.dataclass(frozen=True)
    class Stats(CodedStatistics):
        original_bytes: int
        stored_bytes: int

    assert tuple(Stats(8, 6)) == (8, 6) and Stats(8, 6).savings == 0.25 and Stats(0, 0).savings == 0
    assert Stats(8, 6).as_dict() == {"original_bytes": 8, "stored_bytes": 6, "savings": 0.25}


def test_devices():
    assert checked_device("cpu") == checked_device(torch.device("cpu", 0)) == torch.device("cpu")
    if not ibp.cuda_is_available():
        with pytest.raises(ValueError, match="device is 'cuda', but"):
            checked_device("cuda")
    with pytest.raises(ValueError, match="device is 'meta'; wanted a CPU or CUDA device"):
        checked_device("meta")
    with pytest.raises(TypeError, match="device is a float"):
        checked_device(0.5)


def test_a_device_gets_its_index(cuda):
    assert checked_device("cuda") == checked_device(cuda.index) == torch.device("cuda", torch.cuda.current_device())


def test_shown_memory():
    assert shown_memory(3, 4) == "nbytes=3 (75.0% of 4)" and shown_memory(0, 0) == "nbytes=0"
