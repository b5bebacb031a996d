"""Fuzz targets of tests/fuzz as programs, and their corpora."""

import shutil
import struct

from native import CORE_SOURCES, INCLUDES, SANITIZED, TESTS, c_compiler, compiled, core_objects, linked, made, written

FUZZ = TESTS.parent / "fuzz"
CORPORA = FUZZ / "corpus"
GOLDEN_FILES = TESTS.parent / "golden" / "files"
TARGETS = {path.stem.removeprefix("fuzz_"): path for path in sorted(FUZZ.glob("fuzz_*.c"))}
MOST_BYTES = {"files": 100_000}  # of an input; of other targets:
FEW_BYTES = 512
# What gcc and clang tell driver.c of the code that is reached; a driver that told of itself would not end.
COVERED = [*SANITIZED, "-fsanitize-coverage=trace-pc"]


def most_bytes(target):
    return MOST_BYTES.get(target, FEW_BYTES)


def corpus(target):
    """The inputs that are kept for a target, and where files are wanted the golden ones."""
    packed = CORPORA / f"{target}.bin"
    inputs = unpack(packed.read_bytes()) if packed.exists() else []
    return inputs + [path.read_bytes() for path in sorted(GOLDEN_FILES.glob("*.safetensors")) if target == "files"]


def pack(inputs):
    """Inputs as driver.c reads them: each after its length."""
    return b"".join(struct.pack("<I", len(each)) + each for each in inputs)


def unpack(packed):
    inputs, at = [], 0
    while at < len(packed):
        (size,) = struct.unpack_from("<I", packed, at)
        inputs.append(packed[at + 4 : at + 4 + size])
        at += 4 + size
    return inputs


def linked_target(compile_command, link_command, target):
    """The program of a target that a command compiles, and one links."""
    sources = [*CORE_SOURCES, FUZZ / "fuzz.c", TARGETS[target]]
    objects = compiled([([*compile_command, "-std=c11", *INCLUDES, f"-I{FUZZ}"], source) for source in sources])
    return linked(link_command, objects, f"fuzz_{target}")


def driver():
    """The object of driver.c."""
    return core_objects([*SANITIZED, f"-I{FUZZ}"], [FUZZ / "driver.c"])[0]


def with_driver(target):
    """The program that runs a target by driver.c."""
    return linked_target([*c_compiler(), *COVERED], [*c_compiler(), *SANITIZED, driver()], target)


def with_libfuzzer(clang, target):
    """The program that runs a target by the libFuzzer of clang."""
    command = [clang, *SANITIZED]
    return linked_target([*command, "-fsanitize=fuzzer-no-link"], [*command, "-fsanitize=fuzzer"], target)


def clang_with_libfuzzer():
    """The name of a clang that has libFuzzer, None if there is none."""
    source = written("target.c", "int LLVMFuzzerTestOneInput(const char *data, long size) { return !data && size; }\n")
    for name in filter(shutil.which, ["clang", *(f"clang-{version}" for version in range(25, 10, -1))]):
        try:
            made([name, "-fsanitize=fuzzer,address,undefined", source], "target", [source])
        except AssertionError:
            continue
        return name
    return None
