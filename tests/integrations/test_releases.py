"""Releases of host frameworks that are too old: the import says which ones work."""

import importlib
import subprocess
import sys
import types

import pytest

from ibp.integrations.shared.releases import check_release, numbers

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize(
    "name, installed, first",
    [
        ("transformers", "4.49.0", "5.17"),
        ("transformers", "5.16.1", "5.17"),
        ("transformers", "5.2.0.dev0", "5.17"),
        ("diffusers", "0.38.0", "0.39"),
    ],
)
def test_old_releases_are_refused(monkeypatch, name, installed, first):
    """Before anything of the adapter is registered with the framework."""
    framework, adapter = pytest.importorskip(name), f"ibp.integrations.{name}"
    monkeypatch.setattr(framework, "__version__", installed)
    monkeypatch.delitem(sys.modules, adapter, raising=False)
    with pytest.raises(ImportError, match=f"^{adapter} needs {name} {first} or newer; {installed} is installed$"):
        importlib.import_module(adapter)


@pytest.mark.parametrize("installed", ["5.17.0", "5.17", "5.24.0", "5.25.0.dev0", "6.0"])
def test_newer_releases_are_taken(installed):
    check_release(types.SimpleNamespace(__name__="transformers", __version__=installed), "5.17")


def test_numbers_of_versions():
    assert numbers("5.24.0") == [5, 24, 0] and numbers("0.2.0+cu130") == [0, 2, 0]
    assert numbers("5.9.1") < numbers("5.17") < numbers("5.17.0") < numbers("5.17.1")


@pytest.mark.parametrize(
    "old, new, name",
    [
        ("vllm_tiers", "vllm.tiers", "IBPSecondaryTier"),
        ("vllm_weights", "vllm.weights", "register"),
        ("vllm_sync", "vllm.sync", "send"),
        ("sglang_pool", "sglang.pool", "register"),
    ],
)
def test_former_names_of_modules(old, new, name):
    """Options of engines, imports and pickles name them: both names are one module."""
    code = f"""
import importlib, pickle
former, module = (importlib.import_module("ibp.integrations." + name) for name in ("{old}", "{new}"))
assert former is module and module.__name__ == "ibp.integrations.{new}"
from ibp.integrations.{old} import {name}
assert pickle.loads(b"cibp.integrations.{old}\\n{name}\\n.") is module.{name}
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "package, names",
    [
        ("vllm", ["IBPOffloadingSpec", "IBPOffloadingWorker"]),
        ("sglang", ["IBPHiCacheStorage"]),
        ("transformers", ["CompressedCache", "CompressedCacheStats", "CompressedLayer", "IbpConfig", "IbpQuantizer"]),
        ("diffusers", ["CompressedGroups", "GroupBytes", "IbpDiffusersConfig", "IbpDiffusersQuantizer"]),
    ],
)
def test_names_of_a_package(package, names):
    """A package has the names of its modules, and imports a module when one of its names is asked for. It is imported
    in a process of its own, because other tests import adapters with stand-ins for their hosts."""
    if package in ("transformers", "diffusers"):
        pytest.importorskip(package)
    code = f"""
import importlib, sys
module, names = importlib.import_module("ibp.integrations.{package}"), {names}
assert set(names) <= set(module.__all__)
assert [getattr(module, name).__name__ for name in names] == names
try:
    module.none
except AttributeError as error:
    assert str(error) == "module 'ibp.integrations.{package}' has no attribute 'none'", error
else:
    raise AssertionError("it has any name")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
