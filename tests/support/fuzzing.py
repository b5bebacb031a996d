"""Builds the fuzz targets of tests/fuzz as programs, and reads their corpora."""

import shutil
import struct

from native import CORE_SOURCES, INCLUDES, SANITIZED, TESTS, c_compiler, compiled, core_objects, linked, made, written

FUZZ = TESTS.parent / "fuzz"
CORPORA = FUZZ / "corpus"
GOLDEN_FILES = TESTS.parent / "golden" / "files"
TARGETS = {path.stem.removeprefix("fuzz_"): path for path in sorted(FUZZ.glob("fuzz_*.c"))}
MOST_BYTES = {"files": 100_000}  # A target's inputs have at most this many bytes. Other targets:
FEW_BYTES = 512
# With this flag gcc and clang report to driver.c which code is reached. driver.c itself is compiled without it, because
# its reports would cause further ones without end.
COVERED = [*SANITIZED, "-fsanitize-coverage=trace-pc"]


def most_bytes(target):
    return MOST_BYTES.get(target, FEW_BYTES)


def corpus(target):
    """Returns the inputs that are kept for a target. The target "files" also gets the golden files."""
    packed = CORPORA / f"{target}.bin"
    inputs = unpack(packed.read_bytes()) if packed.exists() else []
    return inputs + [path.read_bytes() for path in sorted(GOLDEN_FILES.glob("*.safetensors")) if target == "files"]


def pack(inputs):
    """Returns inputs in the format that driver.c reads: each after its length."""
    return b"".join(struct.pack("<I", len(each)) + each for each in inputs)


def unpack(packed):
    inputs, at = [], 0
    while at < len(packed):
        (size,) = struct.unpack_from("<I", packed, at)
        inputs.append(packed[at + 4 : at + 4 + size])
        at += 4 + size
    return inputs


def linked_target(compile_command, link_command, target):
    """Compiles a target with one command, links it with another, and returns the program."""
    sources = [*CORE_SOURCES, FUZZ / "fuzz.c", TARGETS[target]]
    objects = compiled([([*compile_command, "-std=c11", *INCLUDES, f"-I{FUZZ}"], source) for source in sources])
    return linked(link_command, objects, f"fuzz_{target}")


def driver():
    """Returns the object of driver.c."""
    return core_objects([*SANITIZED, f"-I{FUZZ}"], [FUZZ / "driver.c"])[0]


def with_driver(target):
    """Returns the program that runs a target with driver.c."""
    return linked_target([*c_compiler(), *COVERED], [*c_compiler(), *SANITIZED, driver()], target)


def with_libfuzzer(clang, target):
    """Returns the program that runs a target with clang's libFuzzer."""
    command = [clang, *SANITIZED]
    return linked_target([*command, "-fsanitize=fuzzer-no-link"], [*command, "-fsanitize=fuzzer"], target)


def clang_with_libfuzzer():
    """Returns the name of a clang that has libFuzzer, or None if there is none."""
    source = written("target.c", "int LLVMFuzzerTestOneInput(const char *data, long size) { return !data && size; }\n")
    for name in filter(shutil.which, ["clang", *(f"clang-{version}" for version in range(25, 10, -1))]):
        try:
            made([name, "-fsanitize=fuzzer,address,undefined", source], "target", [source])
        except AssertionError:
            continue
        return name
    return None
