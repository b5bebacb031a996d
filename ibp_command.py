"""The program `ibp`.

It loads the command line, ibp/_cli, by its folder and not by its name: that would import ibp first, and with it torch,
which takes seconds. Commands import ibp when they run.
"""

import importlib.util
import os
import sys
from typing import Any

_NAME = "ibp_cli"


def program() -> None:
    """Runs the command line with the arguments of the process, which it ends."""
    try:
        main = _command_line()
    except KeyboardInterrupt:
        sys.exit(130)
    main.program()


def _command_line() -> Any:
    """The module ibp/_cli/main.py."""
    package = importlib.util.find_spec("ibp")
    assert package is not None and package.origin is not None  # they are installed together
    folder = os.path.join(os.path.dirname(package.origin), "_cli")
    spec = importlib.util.spec_from_file_location(
        _NAME, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[_NAME])
    return importlib.import_module(f"{_NAME}.main")
