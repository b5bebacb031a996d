"""Kernels of csrc/cuda as C++, run without a GPU, lane by lane (tests/c/emulated_simt.h), against the C core."""

import re

import pytest

from native import (
    CSRC,
    INCLUDES,
    KEPT,
    PLAIN,
    SANITIZE,
    SANITIZED,
    TESTS,
    can_sanitize,
    compiled,
    core_objects,
    cxx_compiler,
    linked,
    run,
    version_of,
    written,
)

pytestmark = pytest.mark.slow  # compiling the kernels takes a minute

# Sources in csrc/cuda.
KERNELS = ("linear/bags.cu", "cache/*.cu", "decode/*.cu", "encode/*.cu", "rows/analysis.cu", "rows/index.cu")
# A collective is told from others by the calls that lead to it, which are found by frame pointers.
COMMON = ["-g1", "-fno-strict-aliasing", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls"]
# gcc compiles the checks of addresses in two thirds of the time if they are calls.
CALLS = [] if "clang" in version_of(cxx_compiler()[0]) else ["--param=asan-instrumentation-with-call-threshold=0"]
# Pointers of corrupt tables are computed before they are checked, as numbers. What reads or writes through a null
# pointer ends by a signal; to look for it at each access takes a third of the time of compiling.
FLAGS = ["-O0", *COMMON, *SANITIZE, "-fno-sanitize=pointer-overflow,null", *CALLS]
# For kernels that run for longer than it takes to compile them.
OPTIMISED_FLAGS = ["-O1", *FLAGS[1:]]
# Accesses of the kernels are looked at by tests/c/emulated_races.cpp instead; addresses as addr2line wants them.
RACE_FLAGS = ["-O0", *COMMON, "-fno-pie"]


def translate(text):
    """The text of a kernel's source or header as C++: launches become calls."""
    launches = text.count("<<<")
    text, found = re.subn(r"([\w:]+(?:<[\w:, ]*>)?)<<<(.*?)>>>\(", r"emulate(\1, \2, ", text, flags=re.S)
    assert found == launches, f"{launches} launches, {found} of them understood"
    return re.sub(r"(?<!extern )__shared__ ", "static ", text)


def emulated(directory):
    """The command that compiles kernels as C++."""
    command = [*cxx_compiler(), "-std=c++17", f"-I{directory}", *INCLUDES, f"-I{TESTS}", "-include", "emulated_simt.h"]
    return [*command, "-Wall", "-Wno-unknown-pragmas", "-Wno-unused", "-Wno-attributes", "-Wno-maybe-uninitialized"]


def machine(looks_for_races=False):
    """The commands and sources of what runs the lanes. They hold no kernel: they are optimised, and not sanitized."""
    command = [*emulated(KEPT / "emulated"), "-O2", *COMMON]
    if looks_for_races:
        return [([*command, "-fno-pie"], TESTS / f"emulated_{name}.cpp") for name in ("simt", "races")]
    return [([*command, "-DSIMT_ASAN"], TESTS / "emulated_simt.cpp")]


def elements_of(path):
    """The flags with which a source is compiled: once for each type of element if csrc/Makefile says so."""
    name = path.relative_to(CSRC / "cuda").with_suffix("")
    listed = re.search(rf"^    {name}:([\d,]+)", (CSRC / "Makefile").read_text(), re.M)
    return [[f"-DIBP_ELEMENT=uint{bits}_t"] for bits in listed[1].split(",")] if listed else [[]]


def build(flags, program="tables", kernels=KERNELS):
    """A program, tests/c/emulated_{program}.cpp, for kernels in csrc/cuda, compiled with flags: FLAGS, OPTIMISED_FLAGS
    or RACE_FLAGS."""
    sources = [path for pattern in kernels for path in sorted((CSRC / "cuda").glob(pattern))]
    sources.sort(key=lambda path: len(elements_of(path)) == 1)  # what takes longest to compile is begun first
    translated = {}
    for path in [*CSRC.glob("core/*.h"), *CSRC.glob("internal/*.h"), *CSRC.glob("cuda/**/*.*h"), *sources]:
        name = path.relative_to(CSRC).with_suffix(".cpp" if path.suffix == ".cu" else path.suffix)
        translated[path] = written(f"emulated/{name}", translate(path.read_text()))
    looks_for_races = flags is RACE_FLAGS
    command = [*emulated(KEPT / "emulated"), *flags]
    of_kernels = [*command, "-fsanitize=thread"] if looks_for_races else command
    objects = compiled(
        [
            *(([*of_kernels, *flag], translated[path]) for path in sources for flag in elements_of(path)),
            (command, TESTS / f"emulated_{program}.cpp"),
            *machine(looks_for_races),
        ]
    )
    core = core_objects(PLAIN if looks_for_races else SANITIZED)
    return linked([*cxx_compiler(), *flags, *(["-no-pie"] if looks_for_races else [])], [*objects, *core])


@pytest.fixture(scope="module", autouse=True)
def sanitizers():
    if not can_sanitize():
        pytest.skip("the C compiler has no address and undefined behaviour sanitizers")


# Arguments of the program, and how many kernels run at least. BF16 rows, most of them short, have kernels of their own.
ANY_ROWS, PAIRS = ([1, 120], 150), ([1, 150, "element_bytes=2 digit_bits=22"], 80)


@pytest.mark.parametrize(
    ("flags", "rows"),
    [(FLAGS, ANY_ROWS), (FLAGS, PAIRS), (RACE_FLAGS, ANY_ROWS)],
    ids=["sanitized", "sanitized, pairs of bits", "races"],
)
def test_kernels(flags, rows):
    arguments, least_kernels = rows
    code, output = run([build(flags), *arguments], timeout=900)
    print(output)
    assert code == 0, output
    cases, wrong, kernels = map(int, re.search(r"^(\d+) cases, (\d+) wrong, (\d+) kernels$", output, re.M).groups())
    assert (cases, wrong) == (arguments[1], 0) and kernels >= least_kernels, output


def test_changing_arrays():
    """Ids, lengths and entries that another stream changes between any two looks of a kernel."""
    code, output = run([build(FLAGS, "changing", ("rows/partition.cu", "cache/*.cu", "kv/*.cu"))], timeout=300)
    assert code == 0 and output == "0 wrong\n", output


@pytest.fixture(scope="module")
def faults():
    command = [*emulated(KEPT / "emulated"), *FLAGS]
    return linked([*cxx_compiler(), *FLAGS], compiled([(command, TESTS / "emulated_faults.cpp"), *machine()]))


@pytest.mark.parametrize("kernel", ["exchanges", "barriers", "numbers"])
def test_emulation_is_right(faults, kernel):
    code, output = run([faults, kernel], timeout=60)
    assert code == 0 and output == "0 wrong\n", output


MISTAKES = {
    "no_sync": r"^[1-9]\d* wrong",
    "diverging": "wait for each other at different collectives",
    "other_line": "wait for each other at different collectives",
    "other_instance": "wait for each other at different collectives",
    "other_call": "wait for each other at different collectives",
    "returning": "returned; threads 5$",
    "outside_mask": "is not in the mask 0000ffff",
    "absent_source": "a lane that takes no part",
    "missing_warp": "no warp can go on",
    "different_counts": "a barrier of different numbers of threads",
    "past_shared": "use-after-poison",
    "misaligned": "misaligned address",
}


@pytest.mark.parametrize("kernel", MISTAKES)
def test_mistakes_are_seen(faults, kernel):
    code, output = run([faults, kernel], timeout=60)
    assert code != 0 and re.search(MISTAKES[kernel], output, re.M), output
