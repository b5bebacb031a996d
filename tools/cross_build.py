"""Builds the library for another processor, and runs its C unit tests if qemu is installed.

    python tools/cross_build.py aarch64-linux-gnu [BUILD_DIRECTORY]

The compilers are those with the given prefix, such as aarch64-linux-gnu-gcc and aarch64-linux-gnu-g++. Torch's
operations and `_core` are compiled against the headers of this Python, its torch and pybind11. They are not linked,
because this machine has no torch for the other processor.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"


def fail(sentence):
    sys.exit(f"cross_build: {sentence}")


def includes(directories):
    return " ".join(f"-isystem {directory}" for directory in directories)


def build_library(triple, build):
    """Builds libibp.so, libibp.a and the objects of the extensions."""
    spec = find_spec("torch")
    if not (spec and find_spec("pybind11")):
        fail(f"{sys.executable} has no torch, or no pybind11.")
    torch = Path(spec.origin).parent / "include"
    import pybind11

    sources = sorted(CSRC.glob("bindings/*.cpp"))
    objects = [str(build / f"{source.relative_to(CSRC)}.o") for source in sources]
    settings = {
        "BUILD": build,
        "CC": f"{triple}-gcc",
        "CXX": f"{triple}-g++",
        "AR": f"{triple}-ar",
        "IBP_NO_CUDA": "1",
        "TORCH_FLAGS": "-DTORCH_TARGET_VERSION=0x020A000000000000 -DIBP_BUILT_WITH_TORCH=headers "
        + includes([torch, torch / "torch" / "csrc" / "api" / "include"]),
        "MODULE_FLAGS": includes([pybind11.get_include(), sysconfig.get_path("include")]),
    }
    jobs = os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0))
    words = [f"{name}={value}" for name, value in settings.items()]
    done = subprocess.run(["make", "--no-print-directory", "-C", CSRC, f"-j{jobs}", *words, "library", *objects])
    if done.returncode:
        fail("the library could not be built: the messages of the compilers stand above.")


def run_tests(triple, build):
    """Runs the C unit tests. They are linked statically, so that qemu needs no file of the other system."""
    qemu = shutil.which(f"qemu-{triple.split('-')[0]}")
    if not qemu:
        print(f"not run: there is no qemu-{triple.split('-')[0]}")
        return
    program = build / "tests"
    flags = ["-std=c11", "-O2", "-static", "-pthread", f"-I{CSRC / 'include'}", f"-I{CSRC}"]
    sources = sorted((ROOT / "tests" / "c").glob("*.c"))
    command = [f"{triple}-gcc", *flags, *sources, build / "libibp.a", "-lm", "-o", program]
    if subprocess.run(command).returncode or subprocess.run([qemu, program, "quick"]).returncode:
        fail("the C unit tests did not pass.")


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    triple = sys.argv[1]
    lacking = [f"{triple}-{tool}" for tool in ("gcc", "g++") if not shutil.which(f"{triple}-{tool}")]
    if lacking:
        fail(f"{' and '.join(lacking)} cannot be found on the PATH (Debian: g++-{triple}).")
    build = Path(sys.argv[2] if len(sys.argv) == 3 else ROOT / "build" / triple).resolve()
    build_library(triple, build)
    run_tests(triple, build)


if __name__ == "__main__":
    main()
