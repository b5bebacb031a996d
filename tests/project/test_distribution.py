"""What is distributed: the files of the source distribution, and the script that builds wheels."""

import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools

import ibp
from native import ROOT

# Tracked files that only a clone of the repository has: what git and continuous integration read, and charts.
NOT_DISTRIBUTED = r"\.gitignore|\.ci/.*|benchmarks/results/.*\.png"


def test_source_distribution_has_every_file(tmp_path):
    """What an sdist would hold is what git tracks."""
    if not (shutil.which("git") and (ROOT / ".git").exists()):
        pytest.skip("this is no clone of the repository")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    listed = set((tmp_path / "ibp.egg-info" / "SOURCES.txt").read_text().split("\n"))
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tracked = {name for name in listing.splitlines() if not re.fullmatch(NOT_DISTRIBUTED, name)}
    there = {name for name in tracked if (ROOT / name).is_file()}
    assert sorted(there - listed) == []
    assert [name for name in listed if re.search(r"\.(o|so|pyc|whl)$|^(build|\.venv|dist)/", name)] == []


def test_pages_name_this_version():
    """What a release changes beside csrc/include/ibp.h. The changelog may begin with a section that is not released."""
    minor = re.match(r"0\.\d+|\d+", ibp.__version__)[0]
    for page, text in (
        ("CITATION.cff", f"\nversion: {ibp.__version__}\n"),
        ("docs/c.md", f"find_package(ibp {minor} REQUIRED)\n"),
        ("docs/c.md", f"The soname is `libibp.so.{minor}` for\n  {minor}.x"),
    ):
        assert text in (ROOT / page).read_text(), text
    sections = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(name for name in sections if not name.endswith(" (unreleased)")) == ibp.__version__


def test_the_library_of_an_earlier_version_is_removed(monkeypatch, tmp_path):
    """Otherwise a folder in which two versions were built would have both, and so would its wheels."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    install_package = runpy.run_path(str(ROOT / "setup.py"))["install_package"]
    (tmp_path / "libibp").write_text("")
    for name in ("libibp.so.0.2", "libibp.so.0.3"):
        install_package([(tmp_path / "libibp", f"ibp/_lib/{file}") for file in ("libibp.so", name)], tmp_path)
    assert sorted(path.name for path in (tmp_path / "ibp" / "_lib").iterdir()) == ["libibp.so", "libibp.so.0.3"]


@pytest.fixture
def build_wheels(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import build_wheels

    return build_wheels


@pytest.mark.parametrize(("python", "has_dgl"), [((3, 10, 13), True), ((3, 12, 1), True), ((3, 13, 0), False)])
def test_extras_ask_for_what_a_python_can_install(build_wheels, monkeypatch, python, has_dgl):
    monkeypatch.setattr(sys, "version_info", python)
    named = build_wheels.requirements.read("frameworks")
    assert ("dgl==2.1.0" in named) == has_dgl and "scipy" in named


def test_wheels_for_pythons_that_are_there(build_wheels):
    (python,) = build_wheels.pythons_of([sys.executable])
    assert python.version == "{}.{}".format(*sys.version_info[:2]) and python.has_torch
    assert build_wheels.torch_directory(None).name == "torch"
    assert build_wheels.local_version(False) == "cpu"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--python", "no-such-python"], "no-such-python: no Python 3.10 or newer with its headers"),
        (["--python", "true"], "true: no Python 3.10 or newer"),
        (["--python", sys.executable, "--torch", "/nowhere"], "there are no headers of torch"),
    ],
)
def test_wheels_refuse_in_a_sentence(build_wheels, arguments, sentence):
    with pytest.raises(SystemExit, match=sentence):
        build_wheels.main(arguments)


@pytest.mark.parametrize(("local", "tags"), [("cpu", ["--tag-build=+cpu"]), ("", [])])
def test_a_local_version_is_left_out_for_an_index(build_wheels, monkeypatch, tmp_path, local, tags):
    def run(*command, **_):
        assert [word for word in command if str(word).startswith("--tag-build")] == tags
        directory = Path(command[command.index("--dist-dir") + 1])
        directory.mkdir(parents=True)
        (directory / "made.whl").touch()

    monkeypatch.setattr(build_wheels, "build_environment", lambda *_: sys.executable)
    monkeypatch.setattr(build_wheels, "run", run)
    python = build_wheels.look_at(sys.executable)
    assert build_wheels.build_wheel(python, tmp_path, tmp_path, tmp_path, False, local).name == "made.whl"


def test_wheels_with_cuda_want_nvcc(build_wheels, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(SystemExit, match="there is no nvcc: set CUDA_HOME"):
        build_wheels.main(["--cuda", "--python", sys.executable])


def test_a_wheel_names_no_directory_of_its_builder(build_wheels, tmp_path):
    with zipfile.ZipFile(tmp_path / "ibp.whl", "w") as archive:
        archive.writestr("ibp/_lib/libibp.so.0.3", b"text")
        archive.writestr("ibp/_cli/doctor.py", f"built in {tmp_path}/here")
    assert build_wheels.faults_of_wheel(tmp_path / "ibp.whl", [tmp_path]) == [
        f"ibp/_cli/doctor.py holds the path {tmp_path}"
    ]


def test_libraries_of_a_wheel(build_wheels):
    """Those of this build look beside themselves, and need torch and the system only."""
    pytest.importorskip("elftools")
    (core,) = (ROOT / "ibp" / "_lib").glob("libibp.so.*.*")
    for path in (core, ROOT / "ibp" / "_lib" / "libibp_torch.so"):
        assert build_wheels.faults_of_library(path.name, path.read_bytes(), core.name) == []
    faults = build_wheels.faults_of_library("x", (ROOT / "ibp" / "_lib" / "libibp_torch.so").read_bytes(), "other.so")
    assert faults == [f"x needs {core.name}, which is not in the wheel"]
