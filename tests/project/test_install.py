"""`make install`: the C library without Python, used from C11, C++17, pkg-config and CMake; and what is built again
when.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import ibp

ROOT = pathlib.Path(__file__).parents[2]
CSRC = ROOT / "csrc"
EXAMPLES = ROOT / "examples" / "c"
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wpedantic", "-Werror"]
HEADERS = sorted(path.name for path in (CSRC / "include").glob("*.h"))
VERSION = re.search(r'#define IBP_VERSION "([^"]+)"', (CSRC / "include" / "ibp.h").read_text()).group(1)
SONAME = f"libibp.so.{re.match('(0[.])?[0-9]+', VERSION)[0]}"  # of 0.x the minor version counts
# Optimising makes no difference to what is tested here.
NO_CUDA = {"IBP_NO_CUDA": "1", "CC": "cc", "CFLAGS": "-O0"}
WITH_CUDA = {"IBP_NO_CUDA": "", "IBP_ONLY_PTX": "", "NVCCFLAGS": ""}


def run(*command, cwd=None, stdin=None, **variables):
    """Runs a command with more environment variables. Returns what it printed; a failure is one of the test."""
    # A make that runs the tests keeps its flags to itself.
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "DESTDIR", "PREFIX")
    }
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**kept, **variables},
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def make(*arguments, **variables):
    return run("make", "-C", CSRC, *arguments, **variables)


def files_below(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())


class Installed:
    """A library that make installed below a directory of its own."""

    def __init__(self, directory, build=None, **variables):
        self.build, self.prefix = build or directory / "build", directory / "prefix"
        self.variables = variables
        self.output = self.make("install")

    def make(self, *arguments, **variables):
        return make(f"BUILD={self.build}", f"PREFIX={self.prefix}", *arguments, **{**self.variables, **variables})

    def pkg_config(self, *arguments):
        return run("pkg-config", *arguments, "ibp", PKG_CONFIG_PATH=str(self.prefix / "lib" / "pkgconfig")).split()

    def compile(self, compiler, source, program, *flags):
        """A program that finds the library through pkg-config, and when it runs."""
        rpath = f"-Wl,-rpath,{self.prefix / 'lib'}"
        run(*compiler, source, *flags, *self.pkg_config("--cflags", "--libs"), rpath, "-o", program)
        return program


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Installed without CUDA, and where a Python that is run leaves a trace."""
    directory = tmp_path_factory.mktemp("installed")
    stubs, trace = directory / "stubs", directory / "python_ran"
    stubs.mkdir()
    for name in ("python", "python3"):
        (stubs / name).write_text(f"#!/bin/sh\ntouch {trace}\nexit 1\n")
        (stubs / name).chmod(0o755)
    library = Installed(directory, **NO_CUDA, PATH=f"{stubs}:{os.environ['PATH']}")
    assert not trace.exists()
    return library


@pytest.fixture(scope="module")
def pkg_config():
    if not shutil.which("pkg-config"):
        pytest.skip("there is no pkg-config")


@pytest.mark.slow
def test_installed_files(installed):
    files = files_below(installed.prefix)
    lib = ["libibp.a", "libibp.so", SONAME, f"libibp.so.{VERSION}", "pkgconfig/ibp.pc"]
    cmake = ["ibpConfig.cmake", "ibpConfigVersion.cmake"]
    headers = [str(path.relative_to(CSRC)) for path in (CSRC / "include").rglob("*") if path.is_file()]
    wanted = [*headers, *(f"lib/{name}" for name in lib), *(f"lib/cmake/ibp/{name}" for name in cmake)]
    wanted += ["share/doc/ibp/FORMAT.md", "share/doc/ibp/LICENSE"]
    assert [name for name in files if not name.startswith("include/ibp/")] == sorted(wanted)
    lib = installed.prefix / "lib"
    assert (lib / "libibp.so").readlink() == pathlib.Path(SONAME) and (lib / SONAME).readlink() == pathlib.Path(
        f"libibp.so.{VERSION}"
    )
    for name in (path for path in files if path.endswith((".pc", ".cmake"))):
        assert "@" not in (installed.prefix / name).read_text(), name


def symbols(installed):
    """Names that the installed library exports."""
    output = run("nm", "-D", "--defined-only", installed.prefix / "lib" / "libibp.so")
    return {line.split()[-1] for line in output.splitlines()}


def declared(headers):
    """Names of the functions that headers declare as exported."""
    text = re.sub(r"/\*.*?\*/", "", "".join(path.read_text() for path in headers), flags=re.DOTALL)
    return re.findall(r"^IBP_API [^;]*?\b(ibp_\w+)\(", text, re.MULTILINE)


def test_soname_and_symbols(installed):
    """Each exported function is declared once, in an installed header or in one for the Python package alone."""
    assert f"soname: [{SONAME}]" in run("readelf", "-d", installed.prefix / "lib" / "libibp.so")
    public = declared(installed.prefix / "include" / name for name in HEADERS)
    names = public + declared((CSRC / "internal").glob("*.h"))
    assert symbols(installed) == set(names) and len(names) == len(set(names))
    assert 30 < len(public) < 65


def test_installed_headers_include_installed_headers(installed):
    """Below include/ibp/ there is what ibp_device.cuh includes, all of it and nothing else."""
    include = (installed.prefix / "include").resolve()
    seen, found = set(), {include / "ibp_device.cuh"}
    while found:
        seen |= found
        # Public headers name each other, and ibp_device.cuh names headers, from include/; others from their own place.
        names = {(path, name) for path in found for name in re.findall(r'^#include "(.+)"', path.read_text(), re.M)}
        names = {(path, name) for path, name in names if not name.startswith("../cuda/")}  # of the source tree
        found = {
            next(p for p in ((path.parent / name).resolve(), include / name) if p.exists()) for path, name in names
        }
        found -= seen
    below = {path.resolve() for path in (include / "ibp").rglob("*") if path.is_file()}
    assert below == {path for path in seen if path.is_relative_to(include / "ibp")}


VERSIONS = """
#include <ibp_cuda.h>
#include <stdio.h>

int main(void)
{
    printf("%s %d.%d.%d %d %d\\n", IBP_VERSION, IBP_VERSION_MAJOR, IBP_VERSION_MINOR, IBP_VERSION_PATCH,
           IBP_VERSION_NUMBER, IBP_FORMAT_VERSION);
    const int number = ibp_version_number();
    printf("%s %d.%d.%d %d %d\\n", ibp_version(), number / 10000, number / 100 % 100, number % 100, number,
           ibp_format_version());
    return ibp_cuda_is_built() || ibp_cuda_device_count() != 0;
}
"""


@pytest.mark.parametrize("standard", ["c11", "c++17"])
def test_headers_stand_alone(installed, standard, pkg_config, tmp_path):
    """Each header compiles by itself, and the library is the version that its header says."""
    compiler = ["c++", "-x", "c++"] if "++" in standard else ["cc", "-x", "c"]
    for name in HEADERS:
        (tmp_path / "alone.c").write_text(f"#include <{name}>\n")
        run(
            *compiler,
            f"-std={standard}",
            *WARNINGS,
            *installed.pkg_config("--cflags"),
            "-fsyntax-only",
            tmp_path / "alone.c",
        )
    source = tmp_path / "version.c"
    source.write_text(VERSIONS)
    program = installed.compile([*compiler, f"-std={standard}", *WARNINGS], source, tmp_path / "version")
    header, library = run(program).splitlines()
    assert header == library and header.split()[:2] == [VERSION, VERSION]
    assert installed.pkg_config("--modversion") == [VERSION]


def test_examples(installed, pkg_config, tmp_path):
    """The programs in C compile; those that need no file check themselves. (core/test_c_files.py runs the other.)"""
    for source in sorted(EXAMPLES.glob("*.c")):
        program = installed.compile(["cc", "-std=c11", *WARNINGS], source, tmp_path / source.stem)
        if source.stem != "open_file":
            assert "every byte is the same" in run(program)


@pytest.mark.slow
def test_static_library(installed, pkg_config, tmp_path):
    """libibp.a is enough without libibp.so."""
    private = [flag for flag in installed.pkg_config("--static", "--libs") if flag != "-libp"]
    include, archive = installed.prefix / "include", installed.prefix / "lib" / "libibp.a"
    run("cc", "-std=c11", EXAMPLES / "whole_table.c", f"-I{include}", archive, *private, "-o", tmp_path / "program")
    assert "libibp" not in run("readelf", "-d", tmp_path / "program")
    assert "every byte is the same" in run(tmp_path / "program")


def test_library_of_the_python_package(tmp_path):
    """What a wheel brings is enough for a C program."""
    include, library = ibp.get_include(), ibp.get_library_dir()
    source, program = EXAMPLES / "whole_table.c", tmp_path / "program"
    run("cc", "-std=c11", source, f"-I{include}", f"-L{library}", "-libp", f"-Wl,-rpath,{library}", "-o", program)
    assert f"[{SONAME}]" in run("readelf", "-d", program)
    assert "every byte is the same" in run(program)


CMAKE_LISTS = """
cmake_minimum_required(VERSION 3.16)
project(consumer C)
find_package(ibp {wanted} REQUIRED CONFIG)
message(STATUS "ibp is ${{IBP_VERSION}}")
add_executable(program {source})
set_property(TARGET program PROPERTY C_STANDARD 11)
target_link_libraries(program PRIVATE ibp::ibp)
"""


@pytest.fixture
def cmake(installed, tmp_path):
    """Configures the whole-table example with a wanted version of ibp, from a tree that was moved after it was
    installed.
    """
    if not shutil.which("cmake"):
        pytest.skip("there is no cmake")
    moved = tmp_path / "moved"
    shutil.copytree(installed.prefix, moved, symlinks=True)

    def configure(wanted):
        (tmp_path / "CMakeLists.txt").write_text(CMAKE_LISTS.format(wanted=wanted, source=EXAMPLES / "whole_table.c"))
        command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={moved}"]
        return subprocess.run(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return configure


@pytest.mark.slow
def test_cmake(cmake, tmp_path):
    major, minor, patch = VERSION.split(".")
    older = f"{major}.{int(minor) - 1}" if major == "0" else f"{int(major) - 1}.0"
    for refused in (f"{int(major) + 1}.0", f"{major}.{int(minor) + 1}", f"{VERSION}.1", older):
        done = cmake(refused)
        assert done.returncode != 0 and f'compatible with requested version "{refused}"' in " ".join(
            done.stdout.split()
        )
        shutil.rmtree(tmp_path / "build")
    for accepted in ("", f"{VERSION} EXACT", f"{major}.{minor}", f"{major}.{minor}...<{major}.{int(minor) + 1}"):
        done = cmake(accepted)
        assert done.returncode == 0 and f"ibp is {VERSION}" in done.stdout, done.stdout
    run("cmake", "--build", tmp_path / "build")
    assert "every byte is the same" in run(tmp_path / "build" / "program")
    assert f"[{SONAME}]" in run("readelf", "-d", tmp_path / "build" / "program")


def test_destdir_and_uninstall(installed, tmp_path):
    """A staged tree has no trace of where it is staged, and uninstall leaves nothing of it."""
    installed.make("install", f"DESTDIR={tmp_path}")
    staged = pathlib.Path(f"{tmp_path}{installed.prefix}")
    assert files_below(staged) == files_below(installed.prefix)
    assert str(tmp_path) not in (staged / "lib" / "pkgconfig" / "ibp.pc").read_text()
    installed.make("uninstall", f"DESTDIR={tmp_path}")
    assert files_below(tmp_path) == []


def test_makefile_of_the_project_installs(installed, tmp_path):
    """`make install` in the root takes a relative PREFIX as relative to the root."""
    prefix = os.path.relpath(tmp_path, ROOT)
    run("make", "-C", ROOT, "install", f"PREFIX={prefix}", f"BUILD={installed.build}", **installed.variables)
    assert files_below(tmp_path) == files_below(installed.prefix)


# ---- what is built again -------------------------------------------------------------------------------------------


def prerequisites(source):
    """The files of csrc that a C source includes, by the compiler's word."""
    text = run("cc", "-std=c11", "-Iinclude", "-MM", source, cwd=CSRC).replace("\\\n", " ").partition(":")[2]
    return {os.path.normpath(name) for name in text.split()}


@pytest.mark.slow
def test_changed_header_rebuilds_what_includes_it(installed, tmp_path):
    sources = [
        str(path.relative_to(CSRC))
        for path in [*CSRC.glob("core/*.c"), *CSRC.glob("x86/*.c"), CSRC / "cuda" / "no_cuda.c"]
    ]
    included = {source: prerequisites(source) for source in sources}
    headers = {name for names in included.values() for name in names if name.endswith(".h")}
    assert headers >= {"include/ibp_table.h", "core/bits.h"}
    # Depfiles name a header by the way to it: core/../core/bits.h.
    rules = [path.read_text() for path in installed.build.rglob("*.d")]
    ways = {name for text in rules for name in re.findall(r"^(\S+):$", text, re.MULTILINE)}
    # A compiler of the same name that only says what it is asked for.
    (tmp_path / "cc").write_text('#!/bin/sh\necho "asked for: $*"\n')
    (tmp_path / "cc").chmod(0o755)
    for header in sorted(headers):
        changed = [f"-W{way}" for way in sorted(ways) if os.path.normpath(way) == header]  # as if it had just changed
        output = installed.make("library", *changed, PATH=f"{tmp_path}:{os.environ['PATH']}")
        compiled = {source for source in sources if re.search(rf"asked for: .* -c {re.escape(source)} ", output)}
        assert changed and compiled == {source for source, names in included.items() if header in names}, header


def test_nothing_is_built_twice(installed):
    assert not re.search(r"^(cc|link|ar|gcc) ", installed.make("library"), re.MULTILINE)


def test_changed_flags_rebuild(tmp_path):
    output = f"{tmp_path}/core/version.c.o"
    assert "core/version.c" in make(f"BUILD={tmp_path}", output, **NO_CUDA)
    assert "core/version.c" not in make(f"BUILD={tmp_path}", output, **NO_CUDA)
    assert "core/version.c" in make(f"BUILD={tmp_path}", output, **{**NO_CUDA, "CFLAGS": "-O0 -DNAME='a b'"})
    assert "core/version.c" not in make(f"BUILD={tmp_path}", output, **{**NO_CUDA, "CFLAGS": "-O0 -DNAME='a b'"})


needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="there is no nvcc")


@pytest.fixture
def gencode(tmp_path):
    """What nvcc compiles for, on a machine whose nvidia-smi prints these lines."""

    def asked(arch_list, printed="", **changed):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{printed}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        path = f"{tmp_path}:{os.environ['PATH']}"
        variables = {**WITH_CUDA, "TORCH_CUDA_ARCH_LIST": arch_list, "PATH": path, **changed}
        output = make(f"BUILD={tmp_path}", "--dry-run", f"{tmp_path}/cuda/rows/index.cu.o", **variables)
        command = next(line for line in output.splitlines() if " -c cuda/rows/index.cu " in line)
        return re.findall(r"-gencode=arch=(\S+),code=(\S+)", command)

    return asked


@needs_nvcc
def test_architectures(gencode):
    """TORCH_CUDA_ARCH_LIST as torch takes it, and a wrong one."""
    assert gencode("8.0;9.0+PTX") == [("compute_80", "sm_80"), ("compute_90", "sm_90"), ("compute_90", "compute_90")]
    assert gencode("8.0, 9.0+PTX") == gencode("8.0;9.0+PTX")
    assert gencode("9.0a 10.0") == [("compute_90a", "sm_90a"), ("compute_100", "sm_100")]
    assert gencode("8.0 9.0+PTX", IBP_ONLY_PTX="1") == [("compute_80", "compute_80"), ("compute_90", "compute_90")]
    with pytest.raises(AssertionError, match="TORCH_CUDA_ARCH_LIST has Hopper"):
        gencode("8.0 Hopper")


# These files have all code that differs between compute capabilities, and one decoder.
FILES_OF_EACH_GPU = ("linear/linear", "linear/many", "linear/tiles", "encode/encode_fast", "cache/cache", "rows/index")


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90a", "120"])
def test_kernels_compile_for_gpus_that_are_not_here(arch, tmp_path):
    """To PTX, which shows what the compiler of device code refuses, but not what the assembler does."""
    flags = ["-std=c++17", "-Werror", "all-warnings", f"-arch=compute_{arch}", "-Xcicc", "-O0", "--ptx"]
    for name in FILES_OF_EACH_GPU:
        ptx = tmp_path / "kernels.ptx"
        command = ["nvcc", *flags, f"-I{ROOT}/csrc/include", "-o", ptx, f"{ROOT}/csrc/cuda/{name}.cu"]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, (name, result.stdout + result.stderr)
        assert f".target sm_{arch}" in ptx.read_text()


@needs_nvcc
@pytest.mark.parametrize(
    "printed, meant",
    [
        ("9.0\\n9.0\\n", "9.0+PTX"),
        ("9.0\\n8.6\\n", "8.6 9.0+PTX"),
        ("10.0\\n9.0\\n", "9.0 10.0+PTX"),
        ("99.0\\n9.0\\n", "9.0+PTX"),  # nvcc does not know the newest
        ("99.0\\n", "8.0 9.0+PTX"),
    ],
    ids=str.strip,
)
def test_the_gpus_of_this_machine_are_compiled_for(gencode, printed, meant):
    assert gencode("", printed) == gencode(meant, printed)
    assert gencode("8.9", printed) == [("compute_89", "sm_89")]


@needs_nvcc
@pytest.mark.parametrize("jobs", [1, 2, 16])
def test_a_build_says_what_nvcc_compiles(tmp_path, jobs):
    """Once, before it begins: how many units, for which GPUs, and about how long."""
    variables = {**WITH_CUDA, "TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX"}
    record = f"{tmp_path}/nvcc.cmd"
    said = make(f"BUILD={tmp_path}", f"-j{jobs}", record, **variables)
    planned = make(f"BUILD={tmp_path}", "--dry-run", "library", **variables)
    num_units = len(set(re.findall(r"-o (\S+\.cu\.o)", planned)))
    assert num_units > len(list((CSRC / "cuda").rglob("*.cu")))
    assert f"nvcc compiles {num_units} units for GPUs of compute capability 8.0 9.0+PTX, {jobs} at a time" in said
    assert re.search(r"about \d+ minutes? ", said) and "IBP_NO_CUDA=1" in said
    assert "nvcc compiles" not in make(f"BUILD={tmp_path}", record, **variables)


def test_the_readme_says_how_long_and_what_needs_a_gpu():
    text = (ROOT / "README.md").read_text()
    install = text.partition("## Install")[2].partition("\n## ")[0]
    assert "minutes" in install and "IBP_NO_CUDA=1" in install and "pip install -v" in install
    table = re.search(r"^\| you have .*?\n\n", text, re.MULTILINE | re.DOTALL)[0].strip().splitlines()
    needs = [re.split(r" ?(?<!\\)\| ?", line)[-3] for line in table]
    assert needs[0] == "GPU" and set(needs[2:]) == {"", "needed"}


def test_a_build_without_nvcc_says_so(tmp_path):
    build = (f"BUILD={tmp_path}", "NVCC=", f"{tmp_path}/cc.cmd")
    assert "no nvcc is found" in make(*build, IBP_NO_CUDA="")
    assert "nvcc" not in make(*build, **{**NO_CUDA, "CFLAGS": "-O1"})


@pytest.mark.parametrize("printed", ["No devices were found", "7.5"])  # the kernels need 8.0
def test_a_build_without_a_gpu_leaves_kernels_out_and_says_so(tmp_path, printed):
    if list(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a GPU")
    for name, text in (("nvidia-smi", f"echo {printed}"), ("nvcc", "echo compute_90")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {**WITH_CUDA, "CUDA_HOME": "", "CUDA_PATH": "", "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def built(arch_list):
        build = tmp_path / f"build {arch_list}".strip().replace(" ", "-")
        said = make(f"BUILD={build}", f"{build}/cc.cmd", **variables, TORCH_CUDA_ARCH_LIST=arch_list)
        planned = make(f"BUILD={build}", "--dry-run", "library", **variables, TORCH_CUDA_ARCH_LIST=arch_list)
        return "no GPU is found (TORCH_CUDA_ARCH_LIST names GPUs to compile for)" in said, "index.cu.o" in planned

    assert built("") == (True, False)
    assert built("9.0") == (False, True)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_makefile_of_the_project_compiles_for_the_gpu_that_there_is(tmp_path, has_gpu):
    if not has_gpu and list(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a GPU")
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {'9.0' if has_gpu else 'No devices were found'}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VENV": str(tmp_path / "venv")}
    unset = ("env", "-u", "IBP_NO_CUDA", "-u", "TORCH_CUDA_ARCH_LIST")  # as make test sets them
    for target, arch_list in (("test", []), ("test-all", [] if has_gpu else ["9.0"])):
        printed = run(*unset, "make", "-C", ROOT, "--dry-run", target, **variables)
        settings = re.search(r"^printf '%s.n' '(.*)' > \S+/.environment.new$", printed, re.MULTILINE)[1].split()
        assert [word for word in settings if word == "9.0"] == arch_list + ["9.0"] * has_gpu


# ---- with kernels --------------------------------------------------------------------------------------------------


def built_architectures(record):
    """What a build compiled kernels for, as variables, by the command that it left."""
    found = re.findall(r"code=(sm|compute)_(\d+)(\d[af]?)", record.read_text())
    machine_code = [f"{major}.{minor}" for kind, major, minor in found if kind == "sm"]
    portable = [f"{major}.{minor}" for kind, major, minor in found if kind == "compute"]
    names = [f"{arch}+PTX" if arch in portable else arch for arch in machine_code or portable]
    return {"TORCH_CUDA_ARCH_LIST": " ".join(names), "IBP_ONLY_PTX": "" if machine_code else "1"}


@pytest.fixture(scope="module")
def installed_with_cuda(tmp_path_factory):
    """Installed from what the Python package was built from, so that no kernel is compiled again."""
    record = ROOT / "build" / "native" / "nvcc.cmd"
    if not (shutil.which("nvcc") and record.exists() and ibp._core.cuda_is_built()):
        pytest.skip("there is no nvcc, or this build has no kernels")
    directory = tmp_path_factory.mktemp("installed_with_cuda")
    return Installed(directory, build=record.parent, IBP_NO_CUDA="", **built_architectures(record))


@pytest.fixture(scope="module", params=sorted(EXAMPLES.glob("*.cu")), ids=lambda path: path.stem)
def cuda_example(request, installed_with_cuda, tmp_path_factory):
    """A program that nvcc makes of an example, with pkg-config, for the first GPU that the library is built for."""
    arch = installed_with_cuda.variables["TORCH_CUDA_ARCH_LIST"].split()[0].removesuffix("+PTX").replace(".", "")
    program = tmp_path_factory.mktemp("example") / request.param.stem
    rpath = ["-Xlinker", "-rpath", "-Xlinker", installed_with_cuda.prefix / "lib"]
    host = ["-ccbin", os.environ["CXX"].split()[0]] if os.environ.get("CXX") else []
    flags = [
        "-std=c++17",
        f"-arch=sm_{arch}",
        *host,
        "-Werror",
        "all-warnings",
        *installed_with_cuda.pkg_config("--cflags", "--libs"),
    ]
    run("nvcc", *flags, *rpath, request.param, "-o", program)
    return program


@pytest.mark.slow
def test_cuda_examples_compile(cuda_example, pkg_config):
    assert f"[{SONAME}]" in run("readelf", "-d", cuda_example)


@pytest.mark.slow
def test_cuda_examples_run(cuda_example, pkg_config, cuda):
    """They end with status 0 where every byte is right."""
    run(cuda_example)


@pytest.mark.slow
def test_symbols_with_cuda(installed_with_cuda, installed):
    assert symbols(installed_with_cuda) == symbols(installed)


@pytest.mark.slow
@needs_nvcc
def test_depfile_of_several_architectures(tmp_path):
    """nvcc lists the headers of every pass, so that a changed one compiles the kernels again."""
    target = f"{tmp_path}/cuda/rows/index.cu.o"
    make(f"BUILD={tmp_path}", target, **WITH_CUDA, TORCH_CUDA_ARCH_LIST="8.0 9.0+PTX")
    text = (tmp_path / "cuda" / "rows" / "index.cu.d").read_text()
    assert {"include/ibp.h", "core/format.h"} <= {os.path.normpath(name) for name in re.findall(r"[\w./]+", text)}
    assert "nvcc" not in make(f"BUILD={tmp_path}", target, **WITH_CUDA, TORCH_CUDA_ARCH_LIST="8.0 9.0+PTX")


# ---- pip -----------------------------------------------------------------------------------------------------------


def test_sources_that_are_not_built_say_so(tmp_path):
    """As in a clone, whose folder ibp/ hides the ibp that is installed."""
    (tmp_path / "ibp").mkdir()
    shutil.copy(ROOT / "ibp" / "__init__.py", tmp_path / "ibp")
    command = [sys.executable, "-S", "-c", "import ibp"]
    for core, wanted in (
        (None, f"ImportError: {tmp_path}/ibp is the source of ibp, .*: leave its directory to import the ibp that is"),
        ("raise ImportError('a library is missing')", "ImportError: a library is missing"),
    ):
        if core is not None:
            (tmp_path / "ibp" / "_core.py").write_text(core)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and re.match(wanted, done.stderr.splitlines()[-1])


def test_build_without_requirements_ends_with_the_commands(tmp_path):
    """What `pip install .` runs first, in a Python without torch: one sentence, then what to type, and nothing after
    it.
    """
    script = (
        "import sys; sys.path.insert(0, 'tools'); import build_backend; build_backend.get_requires_for_build_wheel()"
    )
    command = [sys.executable, "-I", "-S", "-c", script]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode != 0
    first, *commands = done.stdout.rstrip("\n").split("\n")
    assert first.startswith("ibp: setuptools>=") and "torch>=2.10" in first
    assert commands[0].startswith("    pip install 'setuptools>=") and commands[1:] == [
        "    pip install --no-build-isolation ."
    ]


# ---- docs/c.md -----------------------------------------------------------------------------------------------------


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "docs" / "c.md").read_text(), re.MULTILINE | re.DOTALL)


def test_page_about_c(installed, pkg_config, tmp_path):
    """Every block of docs/c.md, with the home directory replaced by one where the library is installed."""
    (tmp_path / "ibp").symlink_to(installed.prefix)
    program, *_ = blocks("c")
    (cmake_lists,) = blocks("cmake")
    (output,) = blocks("text")
    install, *shell = blocks("sh")
    (tmp_path / "first.c").write_text(program)
    prefix = re.fullmatch(r"make install PREFIX=\$HOME/(\w+)\n", install)[1]
    assert prefix == "ibp" and len(shell) == 2
    printed = run("sh", "-e", cwd=tmp_path, stdin="".join(shell), HOME=str(tmp_path))
    assert printed == 3 * output
    run("cc", "-std=c11", *WARNINGS, *installed.pkg_config("--cflags"), "-fsyntax-only", tmp_path / "first.c")
    if shutil.which("cmake"):
        (tmp_path / "CMakeLists.txt").write_text(cmake_lists)
        run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={tmp_path}/ibp")
        run("cmake", "--build", tmp_path / "build")
        assert run(tmp_path / "build" / "first") == output
