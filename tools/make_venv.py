"""Prepares the virtual environment that `make demo` and `make test` run in.

    python tools/make_venv.py VENV MODULE ...

Makes VENV if it does not exist, then installs into it what VENV's Python cannot import of MODULE ... and nothing else: with
everything importable no network is used. If the Python that runs this script imports a torch that is new enough, VENV sees
that Python's packages; otherwise a pinned torch is installed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

MIN_PYTHON = (3, 10)
MIN_VERSION = {"torch": (2, 10), "setuptools": (64,), "pybind11": (2, 12)}
REQUIREMENT = {"torch": "torch==2.13.0", "setuptools": "setuptools>=77", "pybind11": "pybind11>=2.12", "xdist": "pytest-xdist"}

# Prints one module's version, or fails. Old setuptools make wheels only with the package wheel.
PROBE = """
import importlib, sys
module = importlib.import_module(sys.argv[1])
if sys.argv[1] == "setuptools":
    try:
        import setuptools.command.bdist_wheel
    except ImportError:
        import wheel
print(getattr(module, "__version__", ""))
"""


def has_module(python, name):
    """Whether this Python imports the module in a version that will do."""
    done = subprocess.run([python, "-c", PROBE, name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if done.returncode != 0:
        return False
    version = tuple(int(number) for number in re.findall(r"\d+", done.stdout)[:2])
    return version >= MIN_VERSION.get(name, ())


def search_path(python):
    """Where this Python looks for packages, without the user's own and PYTHONPATH."""
    done = subprocess.run([python, "-I", "-c", "import json, sys; print(json.dumps(sys.path))"], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def make_venv(directory):
    """A venv that sees the packages of the running Python if torch is among them."""
    inherit = has_module(sys.executable, "torch")
    own_pip = not (inherit and has_module(sys.executable, "pip"))
    try:
        venv.create(directory, with_pip=own_pip, system_site_packages=inherit, symlinks=True)
    except (subprocess.CalledProcessError, OSError):
        shutil.rmtree(directory, ignore_errors=True)
        sys.exit(f"ibp: {sys.executable} cannot make a virtual environment: install its venv module (for example the package "
                 f"python{sys.version_info[0]}.{sys.version_info[1]}-venv).")
    if inherit:
        python = str(directory / "bin" / "python")
        add_packages(directory, python)
        if own_pip and has_module(sys.executable, "setuptools"):
            # Up to Python 3.11 pip comes with a setuptools, older than most.
            subprocess.run([python, "-m", "pip", "--quiet", "uninstall", "--yes", "setuptools"], stderr=subprocess.DEVNULL)


def add_packages(directory, python):
    """System site packages are those of the Python below: if the running one is a venv itself, its own are added here."""
    known = search_path(python)
    missing = [path for path in search_path(sys.executable) if path not in known and os.path.isdir(path)]
    site_packages = next(Path(path) for path in known if path.startswith(str(directory)))
    (site_packages / "parent_environment.pth").write_text("".join(path + "\n" for path in missing))


def main():
    if sys.version_info < MIN_PYTHON:
        sys.exit(f"ibp: Python {'.'.join(map(str, MIN_PYTHON))} or newer is needed, {sys.executable} is "
                 f"{sys.version.split()[0]}: name another one, for example `make test PYTHON=python3.12`.")
    directory = Path(sys.argv[1]).resolve()
    python = str(directory / "bin" / "python")
    if not os.path.exists(python):
        make_venv(directory)
    wanted = [REQUIREMENT.get(name, name) for name in sys.argv[2:] if not has_module(python, name)]
    if wanted:
        print("installing", *wanted, "(torch is large)" if REQUIREMENT["torch"] in wanted else "", flush=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        if subprocess.run([*pip, *wanted]).returncode != 0:
            sys.exit(f"ibp: these packages could not be installed: {' '.join(wanted)}.")


if __name__ == "__main__":
    main()
