"""Every public name has an example in its docstring, and the examples are right."""

import doctest
import importlib.util
import inspect
import re
import types

import pytest
import torch

import ibp
from public_names import MODULES

# Results and constants, each with the name whose example shows it.
SHOWN = {
    "ibp.ActivationStats": "ibp.offload_activations",
    "ibp.Estimate": "ibp.estimate",
    "ibp.OffloadStats": "ibp.offload",
    "ibp.RowCounts": "ibp.encode_into",
    "ibp.TensorInfo": "ibp.File",
    "ibp.cache.CacheStats": "ibp.RowCache",
    "ibp.calibration.CoderRates": "ibp.calibration.Calibration",
    "ibp.calibration.H200": "ibp.calibration.Calibration",
    "ibp.checkpoints.Source": "ibp.checkpoints.open",
    "ibp.checkpoints.SourceTensor": "ibp.checkpoints.open",
    "ibp.codecs.Choice": "ibp.codecs.choose",
    "ibp.codecs.CodingCost": "ibp.codecs.choose",
    "ibp.spill.Profile": "ibp.spill.profile",
    "ibp.spill.TensorProfile": "ibp.spill.profile",
}


def public_names():
    """Public names but modules and errors, each with its object; an object that has two names by the first."""
    found = {}
    for module in MODULES:
        for name in module.__all__:
            thing = getattr(module, name)
            is_error = inspect.isclass(thing) and issubclass(thing, Exception)
            if not is_error and not isinstance(thing, types.ModuleType) and all(thing is not x for x in found.values()):
                found[f"{module.__name__}.{name}"] = thing
    return found


PUBLIC = public_names()


def can_run(needs):
    """Whether an example runs here, by what the comment on its first line says."""
    if needs.startswith("# on each rank"):
        return False
    if needs == "# needs a GPU":
        return ibp.cuda_is_available()
    if package := re.fullmatch(r"# needs the package (\w+)", needs):
        return importlib.util.find_spec(package[1]) is not None
    assert not needs.startswith("# needs"), needs
    return True


def run_example(name):
    """Runs the example of a name, or compiles one that needs what is not here. Returns the docstring's example and its
    variables."""
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(PUBLIC[name]), {}, name, None, None)
    assert example.examples, f"the docstring of {name} has no example"
    assert any(statement.want for statement in example.examples), f"the example of {name} shows no value"
    if not can_run(re.search(r">>> (.*)", example.docstring)[1]):
        for statement in example.examples:
            compile(statement.source, name, "single")
        return example
    example.globs.update(ibp=ibp, torch=torch)
    torch.manual_seed(0)
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed = runner.run(example, out=report.append, clear_globs=False).failed
    assert not failed, "".join(report)
    return example


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in SHOWN])
def test_example(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_example(name)


@pytest.mark.parametrize("name", SHOWN)
def test_result_is_shown_elsewhere(name, tmp_path, monkeypatch):
    """The example of another name mentions the result, or keeps one in a variable."""
    monkeypatch.chdir(tmp_path)
    example = run_example(SHOWN[name])
    text = "".join(statement.source + statement.want for statement in example.examples)
    is_made = inspect.isclass(PUBLIC[name]) and any(type(value) is PUBLIC[name] for value in example.globs.values())
    assert is_made or re.search(rf"\b{name.rpartition('.')[2]}\b", text), f"{SHOWN[name]} does not show {name}"
