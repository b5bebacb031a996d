"""Prepares the virtual environment that the targets of the Makefile run in.

    python tools/make_venv.py VENV GROUP ... [--optional GROUP ...]

Makes VENV if it does not exist, then installs the requirements of the groups (tools/requirements.py) that it lacks, and
nothing else. If it lacks none, no network is used. If the Python that runs this script imports a torch that is new
enough, VENV sees that Python's packages; otherwise a pinned torch is installed. Requirements of the groups after
--optional that cannot be installed are left out.
"""

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import requirements

MIN_PYTHON = (3, 10)
# If there is no torch yet, this version is installed, so that a first look at ibp uses a tested one.
PINNED = {"torch": "torch==2.13.0"}


def has_torch():
    """Returns whether this Python imports a torch that is new enough."""
    try:
        importlib.import_module("torch")
    except (ImportError, OSError):
        return False
    return not any(requirement.startswith("torch") for requirement in requirements.missing("build"))


def search_path(python):
    """Returns the folders in which a Python looks for packages, without the user's own packages and PYTHONPATH."""
    done = subprocess.run(
        [python, "-I", "-c", "import json, sys; print(json.dumps(sys.path))"], check=True, stdout=subprocess.PIPE
    )
    return json.loads(done.stdout)


def make_venv(directory):
    """Makes a venv, which sees the packages of the running Python if torch is among them."""
    inherit = has_torch()
    own_pip = not (inherit and requirements.is_met("pip"))
    try:
        venv.create(directory, with_pip=own_pip, system_site_packages=inherit, symlinks=True)
    except (subprocess.CalledProcessError, OSError):
        shutil.rmtree(directory, ignore_errors=True)
        sys.exit(
            f"ibp: {sys.executable} cannot make a virtual environment: install its venv module (for example the "
            "package "
            f"python{sys.version_info[0]}.{sys.version_info[1]}-venv)."
        )
    if inherit:
        python = str(directory / "bin" / "python")
        add_packages(directory, python)
        if own_pip and requirements.is_met("setuptools"):
            # Up to Python 3.11 a new venv gets a setuptools with pip. It would hide the newer one of the running
            # Python.
            subprocess.run(
                [python, "-m", "pip", "--quiet", "uninstall", "--yes", "setuptools"], stderr=subprocess.DEVNULL
            )


def add_packages(directory, python):
    """Lets a venv see the packages of the running Python. "System site packages" are those of the Python that a venv
    was made with, so that if the running Python is in a venv itself, its packages are added here."""
    known = search_path(python)
    missing = [path for path in search_path(sys.executable) if path not in known and os.path.isdir(path)]
    site_packages = next(Path(path) for path in known if path.startswith(str(directory)))
    (site_packages / "parent_environment.pth").write_text("".join(path + "\n" for path in missing))


def missing(python, groups):
    """Returns the requirements of groups that the venv lacks."""
    done = subprocess.run([python, requirements.__file__, *groups], check=True, stdout=subprocess.PIPE, text=True)
    return [PINNED.get(requirement.partition(">")[0], requirement) for requirement in done.stdout.split()]


def install(python, wanted):
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    return subprocess.run([*pip, *wanted]).returncode == 0


def main():
    if sys.version_info < MIN_PYTHON:
        sys.exit(
            f"ibp: Python {'.'.join(map(str, MIN_PYTHON))} or newer is needed, {sys.executable} is "
            f"{sys.version.split()[0]}: name another one, for example `make test PYTHON=python3.12`."
        )
    parser = argparse.ArgumentParser()
    parser.add_argument("venv", type=Path)
    parser.add_argument("groups", nargs="*")
    parser.add_argument("--optional", nargs="+", default=[])
    arguments = parser.parse_args()
    directory = arguments.venv.resolve()
    python = str(directory / "bin" / "python")
    if not os.path.exists(python):
        make_venv(directory)
    wanted = missing(python, arguments.groups)
    optional = [requirement for requirement in missing(python, arguments.optional) if requirement not in wanted]
    if not wanted + optional:
        return
    print("installing", *wanted, *optional, "(torch is large)" if PINNED["torch"] in wanted else "", flush=True)
    # One call for all takes less time than one for each. If it fails, it says why, and has installed nothing.
    if install(python, wanted + optional):
        return
    if wanted and not install(python, wanted):
        sys.exit(f"ibp: these packages could not be installed: {' '.join(wanted)}.")
    left_out = [requirement for requirement in optional if not install(python, [requirement])]
    if left_out:
        print(f"ibp: going on without {' '.join(left_out)}, which could not be installed", flush=True)


if __name__ == "__main__":
    main()
