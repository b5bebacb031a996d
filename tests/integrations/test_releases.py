"""Releases of host frameworks that are too old: the import says which ones work."""

import importlib
import subprocess
import sys
import types

import pytest

from ibp.integrations.shared import check_release, numbers

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


def run(code):
    """Runs code in a process of its own, because other tests import adapters with stand-ins for their hosts."""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_modules_of_a_package_and_their_former_names():
    """A package has its modules and some of their names. They are imported when they are first asked for. Options of
    engines, imports and pickles name the modules by former names, too: both names are one module."""
    run("""
import sys
from ibp.integrations import sglang, vllm
loaded = [name for name in sys.modules if name.startswith(("ibp.integrations.vllm.", "ibp.integrations.sglang."))]
assert loaded == [], loaded
assert vllm.IBPOffloadingSpec.__module__ == vllm.IBPOffloadingWorker.__module__ == "ibp.integrations.vllm.offloading"
assert sglang.IBPHiCacheStorage.__module__ == "ibp.integrations.sglang.storage"
for package, name in ((vllm, "tiers"), (vllm, "weights"), (vllm, "sync"), (sglang, "pool")):
    assert f"{package.__name__}.{name}" not in sys.modules
    assert getattr(package, name) is sys.modules[f"{package.__name__}.{name}"]
try:
    vllm.none
except AttributeError as error:
    assert str(error) == "module 'ibp.integrations.vllm' has no attribute 'none'", error
else:
    raise AssertionError("it has any name")

import importlib, pickle
for old, new, name in (
    ("vllm_tiers", "vllm.tiers", b"IBPSecondaryTier"),
    ("vllm_weights", "vllm.weights", b"register"),
    ("vllm_sync", "vllm.sync", b"send"),
    ("sglang_pool", "sglang.pool", b"register"),
):
    former, module = (importlib.import_module("ibp.integrations." + name) for name in (old, new))
    assert former is module and module.__name__ == "ibp.integrations." + new
    assert pickle.loads(b"cibp.integrations." + old.encode() + b"\\n" + name + b"\\n.") is vars(module)[name.decode()]
from ibp.integrations.vllm_weights import register
from ibp.integrations import vllm_sync
assert vllm_sync is vllm.sync and register is vllm.weights.register
""")


@pytest.mark.parametrize("package", ["transformers", "diffusers"])
def test_names_of_a_package(package):
    """Classes say, to pickle and to readers, that they are the package's."""
    pytest.importorskip(package)
    module = importlib.import_module(f"ibp.integrations.{package}")
    for name in module.__all__:
        found = getattr(module, name)
        assert found.__name__ == name
        assert not isinstance(found, type) or found.__module__ == module.__name__
