"""Work that waits for the import of a module."""

import importlib
import importlib.util
import sys

import pytest

from ibp._common.process import after_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that nobody has imported."""
    (tmp_path / "waited").mkdir()
    (tmp_path / "waited" / "__init__.py").write_text("")
    (tmp_path / "waited" / "for_it.py").write_text("import sys\nvalue = 3\n")
    (tmp_path / "waited" / "broken.py").write_text("raise ValueError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield "waited.for_it"
    sys.meta_path[:] = finders
    for name in ("waited", "waited.for_it"):
        sys.modules.pop(name, None)


def test_work_is_done_once_the_module_is_there(module):
    values, finders = [], list(sys.meta_path)
    after_import(module, lambda: values.append(sys.modules[module].value))
    assert importlib.util.find_spec(module) is not None and not values  # asking for it imports nothing
    importlib.import_module("waited")
    assert not values
    importlib.import_module(module)
    assert values == [3] and sys.meta_path == finders
    after_import(module, lambda: values.append(4))
    assert values == [3, 4] and sys.meta_path == finders


def test_imports_that_fail_fail_as_before(module):
    values = []
    after_import("waited.broken", lambda: values.append(1))
    after_import("waited.missing", lambda: values.append(2))
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module("waited.broken")
    with pytest.raises(ModuleNotFoundError, match="waited.missing"):
        importlib.import_module("waited.missing")
    assert not values
