"""Builds the native parts of ibp; pyproject.toml holds the metadata.

Three shared libraries (and the headers, for C programs) are placed in the package:

    ibp/_lib/libibp.so          the core: csrc/core, csrc/x86 and csrc/cuda; depends on neither Python nor torch
    ibp/_lib/libibp_torch.so    torch ops over torch's stable ABI; depends on neither a Python nor a torch version
    ibp/_core.<abi>.so          pybind11 module; tied to one Python version

Environment: CC, CXX, CFLAGS, CXXFLAGS; CUDA_HOME or CUDA_PATH; TORCH_CUDA_ARCH_LIST (default "8.0 9.0+PTX");
IBP_NO_CUDA=1 builds without CUDA even where nvcc is found; MAX_JOBS limits parallel compilers.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "native"
INCLUDE = CSRC / "include"
NO_CUDA = CSRC / "cuda" / "no_cuda.c"  # what a build without nvcc has instead of the kernels

MIN_TORCH = (2, 10)
TORCH_TARGET_VERSION = "0x020A000000000000"
DEFAULT_ARCHS = "8.0 9.0+PTX"

WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
COMMON = ["-O3", "-fPIC", "-fvisibility=hidden"]
CUDA_FLAGS = ["-O3", "-std=c++17", "-Werror", "all-warnings", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wshadow"]


def fail(sentence):
    sys.exit(f"\nibp: {sentence}")


def version():
    return re.search(r'#define IBP_VERSION "([^"]+)"', (INCLUDE / "ibp.h").read_text()).group(1)


# ---- what is there to build with ----


def compiler(variable, names, language):
    """The command of a compiler, as a list: the environment's, else the first of names on the PATH."""
    candidates = [shlex.split(os.environ[variable])] if os.environ.get(variable) else [[name] for name in names]
    for command in candidates:
        if shutil.which(command[0]):
            return command
    wanted = " or ".join(command[0] for command in candidates)
    fail(f"no {language} compiler found ({wanted}): install one, or name it in the environment variable {variable}.")


def find_nvcc():
    """Path of nvcc, or None for a build without CUDA."""
    if os.environ.get("IBP_NO_CUDA", "0") not in ("", "0"):
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    in_homes = [os.path.join(home, "bin", "nvcc") for home in homes if home]
    for path in [*in_homes, shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]:
        if path and os.access(path, os.X_OK):
            return path
    return None


def gencode_flags(arch_list):
    """nvcc flags for a list as torch writes it: "8.0;9.0+PTX", "9.0a 10.0", separated by semicolons, commas or spaces."""
    flags = []
    for arch in re.split(r"[;,\s]+", arch_list.strip(";, \t")):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
        if not match:
            fail(f"TORCH_CUDA_ARCH_LIST has {arch!r}: want compute capabilities like '8.0;9.0+PTX', or leave it unset.")
        number = "".join(match.group(1, 2, 3))
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match.group(4):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def torch_paths():
    """(version, include directories, library directories) of the torch that is importable."""
    wanted = "torch >= " + ".".join(map(str, MIN_TORCH))
    how = f"install {wanted}, then build against it with `pip install --no-build-isolation .`."
    try:
        with contextlib.redirect_stderr(None):
            import torch
            from torch.utils import cpp_extension
    except ImportError as error:
        fail(f"torch cannot be imported by {sys.executable} ({error}): {how}")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MIN_TORCH:
        fail(f"torch {torch.__version__} is too old: {how}")
    return torch.__version__, cpp_extension.include_paths(), cpp_extension.library_paths()


def pybind11_include():
    try:
        import pybind11
    except ImportError:
        fail(f"pybind11 cannot be imported by {sys.executable}: install it (`pip install pybind11`), "
             "then build with `pip install --no-build-isolation .`.")
    return pybind11.get_include()


def python_include():
    include = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(include, "Python.h")):
        fail(f"Python.h is not in {include}: install this Python's development headers (for example the package "
             f"python{sys.version_info[0]}.{sys.version_info[1]}-dev).")
    return include


# ---- compile and link steps ----


class Step:
    """One compiler call. It is run again when an input is newer than the output or the command itself has changed.

    depfile: where the compiler lists the headers that it read (-MMD); these are inputs too.
    """

    def __init__(self, tool, command, inputs, output, salt="", depfile=None):
        self.tool = tool
        self.command = [str(word) for word in command] + ["-o", str(output)]
        self.inputs = [Path(path) for path in inputs]
        self.output = Path(output)
        self.depfile = depfile
        self.record = self.output.with_name(self.output.name + ".cmd")
        self.text = shlex.join(self.command) + salt

    def is_current(self):
        if not (self.output.exists() and self.record.exists() and self.record.read_text() == self.text):
            return False
        if self.depfile and not self.depfile.exists():
            return False
        made = self.output.stat().st_mtime_ns
        inputs = self.inputs + (read_depfile(self.depfile) if self.depfile else [])
        return all(path.exists() and path.stat().st_mtime_ns <= made for path in inputs)

    def run(self):
        """None, or the sentence that says what failed."""
        if self.is_current():
            return None
        self.record.unlink(missing_ok=True)
        done = subprocess.run(self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        name = os.path.relpath(self.output, ROOT)
        print(f"{self.tool} {name}\n{done.stdout}", end="", flush=True)
        if done.returncode == 0:
            self.record.write_text(self.text)
            return None
        print(shlex.join(self.command), flush=True)
        advice = "; IBP_NO_CUDA=1 builds without CUDA" if self.tool == "nvcc" else ""
        return f"{self.tool} failed to make {name}, its messages stand above{advice}."


def run_steps(steps):
    jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        failures = [sentence for sentence in pool.map(Step.run, steps) if sentence]
    if failures:
        fail(failures[0])


def read_depfile(path):
    """The files that a make rule `output: input input ...` names as inputs."""
    text = path.read_text().replace("\\\n", " ").partition(":")[2]
    return [Path(name.replace("\\ ", " ")) for name in re.split(r"(?<!\\)\s+", text.strip()) if name]


def compile_step(tool, command, source, flags, extra_flags, salt=""):
    output = BUILD / ("_".join(source.relative_to(CSRC).parts) + ".o")
    depfile = output.with_suffix(".d")
    command = [*command, f"-I{INCLUDE}", *flags, *extra_flags, "-MMD", "-MF", depfile, "-c", source]
    return Step(tool, command, [source], output, salt, depfile)


class BuildNative(build_ext):
    """build_ext for the three libraries. Objects are kept in build/native from one build to the next."""

    def run(self):
        BUILD.mkdir(parents=True, exist_ok=True)
        core, core_steps, core_link = self.plan_core()
        torch_step, torch_link = self.plan_torch_ops(core)
        module_step, module_link = self.plan_python_module(core)
        run_steps([*core_steps, torch_step, module_step])
        run_steps([core_link])
        run_steps([torch_link, module_link])
        for built, target in self.artefacts():
            install_file(built, self.package_parent() / target)

    def plan_core(self):
        c = compiler("CC", ["cc", "gcc", "clang"], "C")
        nvcc = find_nvcc()
        cuda_sources = sorted(CSRC.rglob("*.cu")) if nvcc else []
        c_sources = sorted(path for path in CSRC.rglob("*.c") if not (cuda_sources and path == NO_CUDA))
        steps = [compile_step("cc", c, path, ["-std=c11", *COMMON, *WARNINGS], environment_flags("CFLAGS")) for path in c_sources]
        link = [*c, "-shared", "-Wl,-soname,libibp.so", "-Wl,--no-undefined"]
        if cuda_sources:
            nvcc = [nvcc, *gencode_flags(os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or DEFAULT_ARCHS)]
            if os.environ.get("CXX"):
                nvcc += ["-ccbin", shlex.split(os.environ["CXX"])[0]]
            steps += [compile_step("nvcc", nvcc, path, CUDA_FLAGS, []) for path in cuda_sources]
            linker = ["-soname=libibp.so", "--no-undefined", "--as-needed", "--exclude-libs=ALL"]
            link = [*nvcc, "-shared", "-cudart=static", *[word for option in linker for word in ("-Xlinker", option)]]
        else:
            print("no nvcc: building without CUDA", flush=True)
        steps.sort(key=lambda step: step.tool != "nvcc")  # the slow ones first
        objects = [step.output for step in steps]
        core = BUILD / "libibp.so"
        return core, steps, Step("nvcc" if cuda_sources else "cc", [*link, *objects], objects, core)

    def plan_torch_ops(self, core):
        torch_version, includes, libraries = torch_paths()
        flags = ["-std=c++17", *COMMON, *WARNINGS, f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
        for directory in includes:
            flags += ["-isystem", directory]
        step = compile_step("c++", self.cxx(), CSRC / "bindings" / "torch_ops.cpp", flags, environment_flags("CXXFLAGS"), torch_version)
        link = [*self.cxx(), "-shared", step.output, core, "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]
        link += [f"-L{directory}" for directory in libraries] + ["-ltorch", "-ltorch_cpu"]
        return step, Step("c++", link, [step.output, core], BUILD / "libibp_torch.so", torch_version)

    def plan_python_module(self, core):
        flags = ["-std=c++17", *COMMON, *WARNINGS, "-isystem", pybind11_include(), "-isystem", python_include()]
        step = compile_step("c++", self.cxx(), CSRC / "bindings" / "python_module.cpp", flags, environment_flags("CXXFLAGS"))
        link = [*self.cxx(), "-shared", step.output, core, "-Wl,-rpath,$ORIGIN/_lib"]
        return step, Step("c++", link, [step.output, core], BUILD / self.module_name())

    def cxx(self):
        return compiler("CXX", ["c++", "g++", "clang++"], "C++")

    def module_name(self):
        return os.path.basename(self.get_ext_filename("ibp._core"))

    def artefacts(self):
        """(file, its place relative to the directory that holds the package) of everything that is installed."""
        libraries = [(BUILD / name, f"ibp/_lib/{name}") for name in ("libibp.so", "libibp_torch.so")]
        module = [(BUILD / self.module_name(), f"ibp/{self.module_name()}")]
        headers = [(path, f"ibp/include/{path.relative_to(INCLUDE)}") for path in sorted(INCLUDE.rglob("*.*h"))]
        return libraries + module + headers + [(CSRC / "FORMAT.md", "ibp/include/FORMAT.md")]

    def package_parent(self):
        return ROOT if self.inplace or self.editable_mode else Path(self.build_lib)

    # What setuptools asks of a build_ext: the files that a build makes, and where an in-place one puts them.

    def get_outputs(self):
        return [os.path.join(self.build_lib, target) for _, target in self.artefacts()]

    def get_output_mapping(self):
        if not (self.inplace or self.editable_mode):
            return {}
        return {os.path.join(self.build_lib, target): str(ROOT / target) for _, target in self.artefacts()}


def environment_flags(variable):
    return shlex.split(os.environ.get(variable, ""))


def install_file(source, target):
    """Copies through a rename, so that a process that has the old library mapped keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".new")
    shutil.copyfile(source, temporary)
    os.replace(temporary, target)


setup(
    version=version(),
    license="Apache-2.0",
    # The source stands here so that setuptools makes a wheel for one platform; BuildNative compiles it.
    ext_modules=[Extension("ibp._core", sources=["csrc/bindings/python_module.cpp"])],
    cmdclass={"build_ext": BuildNative},
)
