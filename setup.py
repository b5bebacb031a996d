"""Builds the native parts of ibp with csrc/Makefile; pyproject.toml holds the metadata.

The package gets three shared libraries, and the headers for C programs:

    ibp/_lib/libibp.so.*        the core: csrc/core, csrc/x86 and csrc/cuda; depends on neither Python nor torch
    ibp/_lib/libibp_torch.so    torch ops over torch's stable ABI; depends on neither a Python nor a torch version
    ibp/_core.<abi>.so          pybind11 module; tied to one Python version

The build reads these environment variables:

    CC, CXX, CFLAGS, CXXFLAGS, LDFLAGS    the compilers and their flags
    CUDA_HOME or CUDA_PATH                the folder of the CUDA toolkit
    TORCH_CUDA_ARCH_LIST                  the GPU architectures to build kernels for; default: those of the GPUs of this
                                          machine. If the machine has no GPU, no kernels are built.
    IBP_ONLY_PTX=1                        builds kernels as PTX only, without machine code
    IBP_NO_CUDA=1                         builds without CUDA even if nvcc and a GPU are found
    MAX_JOBS                              limits how many compilers run in parallel
    V=1                                   shows the compilers' commands
    IBP_TORCH_DIR                         the folder of an installed torch whose headers and libraries are used. torch
                                          is then not imported, so a Python without torch can build a wheel.
    IBP_BUILD_DIR                         the folder that keeps objects between builds; default: build/native

Several builds can exist side by side. The following commands make a build with the address sanitizer, which is used if
PYTHONPATH is build/asan/lib:

    export IBP_BUILD_DIR=build/asan CFLAGS=-fsanitize=address CXXFLAGS=-fsanitize=address
    python setup.py build --build-lib build/asan/lib
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import build_backend  # noqa: E402

CSRC = ROOT / "csrc"
BUILD = ROOT / os.environ.get("IBP_BUILD_DIR", "build/native")

TORCH_TARGET_VERSION = "0x020A000000000000"


def fail(sentence):
    sys.exit(f"\nibp: {sentence}")


def version():
    return re.search(r'#define IBP_VERSION "([^"]+)"', (CSRC / "include" / "ibp.h").read_text()).group(1)


# ---- compilers, torch and headers ----


def compiler(variable, names, language):
    """Returns the command that runs a compiler: the value of the environment variable if it is set, or otherwise the
    first of `names` that is on the PATH. Ends the build if there is no such command."""
    candidates = [os.environ[variable]] if os.environ.get(variable) else names
    for command in candidates:
        if shutil.which(shlex.split(command)[0]):
            return command
    fail(
        f"no {language} compiler found ({' or '.join(candidates)}): install one, or name it in the environment "
        f"variable {variable}."
    )


def torch_paths():
    """Returns (version, include directories, library directories) of the torch to build against."""
    if os.environ.get("IBP_TORCH_DIR"):
        return paths_of_torch(Path(os.environ["IBP_TORCH_DIR"]).resolve())
    try:
        with contextlib.redirect_stderr(None):
            import torch
            from torch.utils import cpp_extension
    except (ImportError, OSError) as error:
        fail(f"torch cannot be imported by {sys.executable}: {error}.")
    return torch.__version__, cpp_extension.include_paths(), cpp_extension.library_paths()


def paths_of_torch(directory):
    """Returns the same as `torch_paths`, for the torch in a directory. This Python need not be able to import it."""
    try:
        version = re.search(r"__version__ = '([^']+)'", (directory / "version.py").read_text()).group(1)
    except (OSError, AttributeError):
        fail(f"IBP_TORCH_DIR={directory} is no folder of an installed torch: its version.py does not say a version.")
    include = directory / "include"
    return version, [include, include / "torch" / "csrc" / "api" / "include"], [directory / "lib"]


def pybind11_include():
    import pybind11

    return pybind11.get_include()


def python_include():
    include = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(include, "Python.h")):
        fail(
            f"Python.h is not in {include}: install this Python's development headers (for example the package "
            f"python{sys.version_info[0]}.{sys.version_info[1]}-dev)."
        )
    return include


def for_make(words):
    """Returns a command as the value of a make variable: its words are quoted for the shell, and each $ is doubled."""
    return shlex.join(map(str, words)).replace("$", "$$")


def system_includes(directories):
    """Returns compiler flags for directories with headers of other projects. The flags also remove these directories
    from the file names that macros such as __FILE__ put into the libraries."""
    return [word for directory in directories for word in ("-isystem", directory, f"-fmacro-prefix-map={directory}=")]


class BuildNative(build_ext):
    """The build_ext command that builds the three libraries."""

    def run(self):
        if not shutil.which("make"):
            fail("no make found: install it (for example the package make).")
        build_backend.require()
        torch_version, includes, libraries = torch_paths()
        # The headers of torch are not prerequisites in the Makefile. Instead, the flags contain the version of torch,
        # so that make builds the ops again when the version changes.
        torch_flags = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", f"-DIBP_BUILT_WITH_TORCH={torch_version}"]
        variables = {
            "BUILD": os.path.relpath(BUILD, CSRC),
            "CC": compiler("CC", ["cc", "gcc", "clang"], "C"),
            "CXX": compiler("CXX", ["g++", "c++", "clang++"], "C++"),
            "MODULE": self.module_name(),
            "TORCH_FLAGS": for_make([*torch_flags, *system_includes(includes)]),
            "TORCH_LIBS": for_make([*(f"-L{directory}" for directory in libraries), "-ltorch", "-ltorch_cpu"]),
            "MODULE_FLAGS": for_make(system_includes([pybind11_include(), python_include()])),
        }
        jobs = os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0))
        settings = [f"{name}={value}" for name, value in variables.items()]
        command = ["make", "--no-print-directory", "-C", CSRC, f"-j{jobs}", "package", *settings]
        # If this script was started by a make, the flags and the job server of that make must not be passed on to the
        # make that is started here.
        environment = {
            name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
        }
        if subprocess.run(command, env=environment, stderr=subprocess.STDOUT).returncode != 0:
            fail(
                "the libraries could not be built: the messages of the compilers stand above; IBP_NO_CUDA=1 builds "
                "without CUDA."
            )
        install_package(self.artefacts(), self.package_parent())

    def module_name(self):
        return os.path.basename(self.get_ext_filename("ibp._core"))

    def artefacts(self):
        """Returns (file, path relative to the directory that contains the package) for every file that is installed."""
        package = BUILD / "package"
        return [(path, f"ibp/{path.relative_to(package)}") for path in sorted(package.rglob("*")) if path.is_file()]

    def package_parent(self):
        return ROOT if self.inplace or self.editable_mode else Path(self.build_lib)

    # setuptools calls the next two methods for the paths of the built files, and for their paths in an in-place build.

    def get_outputs(self):
        return [os.path.join(self.build_lib, target) for _, target in self.artefacts()]

    def get_output_mapping(self):
        if not (self.inplace or self.editable_mode):
            return {}
        return {os.path.join(self.build_lib, target): str(ROOT / target) for _, target in self.artefacts()}


def install_package(artefacts, parent):
    """Installs the built files, and removes the library of an earlier version, which has another soname."""
    for built, target in artefacts:
        install_file(built, parent / target)
    for library in (parent / "ibp" / "_lib").glob("libibp.so.*"):
        if str(library.relative_to(parent)) not in dict(artefacts).values():
            library.unlink()


def install_file(source, target):
    """Copies a file under a temporary name and then renames the copy to the target. A process that has mapped the old
    library can go on using it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".new")
    shutil.copyfile(source, temporary)
    os.replace(temporary, target)


def readme_of_the_index():
    """Returns the text of README.md for a package index: without the images and links whose targets are only in the
    repository."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", text, flags=re.MULTILINE)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)


setup(
    version=version(),
    long_description=readme_of_the_index(),
    long_description_content_type="text/markdown",
    # The extension with a source makes setuptools build a wheel for one platform. BuildNative compiles the source.
    ext_modules=[Extension("ibp._core", sources=["csrc/bindings/python_module.cpp"])],
    cmdclass={"build_ext": BuildNative},
)
