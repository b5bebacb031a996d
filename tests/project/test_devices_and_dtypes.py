"""Calls in ibp/ that make tensors say on which device and of which dtype: a program may have set torch's defaults."""

import ast
import functools
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[2]
FROM_VALUES = {"arange", "as_tensor", "asarray", "randint", "randperm"}  # have a dtype without the default one


def maker(call):
    """The function of torch that a call calls, if the default device decides where its result is; else None."""
    path = ast.unparse(call.func).split(".")
    if path[0] != "torch":
        return None
    found = functools.reduce(lambda owner, name: getattr(owner, name, None), path[1:], torch)
    return found if found in _device_constructors() else None


def left_to_defaults(source):
    """(line, keyword) of each keyword that a call lacks."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or maker(call) is None:
            continue
        wanted = {"device"} if call.func.attr in FROM_VALUES else {"device", "dtype"}
        for keyword in sorted(wanted - {keyword.arg for keyword in call.keywords}):
            yield call.lineno, keyword


def test_tensors_do_not_depend_on_the_defaults_of_torch():
    found = [
        f"{path.relative_to(ROOT)}:{line}: wanted {keyword}="
        for path in sorted((ROOT / "ibp").rglob("*.py"))
        for line, keyword in left_to_defaults(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source, wanted",
    [
        ("torch.zeros(3, dtype=torch.int64)", [(1, "device")]),
        ("x = [\n    torch.ones(3)]", [(2, "device"), (2, "dtype")]),
        ("torch.arange(3)", [(1, "device")]),
        ("torch.fft.fftfreq(3, device='cpu')", [(1, "dtype")]),
        ("torch.full((2,), 1.0, dtype=x.dtype, device=x.device); torch.zeros_like(x); numpy.zeros(3)", []),
    ],
)
def test_what_is_left_to_the_defaults(source, wanted):
    assert list(left_to_defaults(source)) == wanted
