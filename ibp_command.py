"""The program `ibp`.

It loads the command line, ibp/_cli, by its folder and not by its name: that would import ibp first, and with it torch,
which takes seconds. Commands import ibp when they run.
"""

import importlib.util
import sys
from pathlib import Path

_NAME = "ibp_cli"


def program() -> None:
    """Runs the command line with the arguments of the process, which it ends."""
    package = importlib.util.find_spec("ibp")
    assert package is not None and package.origin is not None  # they are installed together
    folder = Path(package.origin).parent / "_cli"
    spec = importlib.util.spec_from_file_location(
        _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[_NAME])
    importlib.import_module(f"{_NAME}.main").program()
