"""Builds C and C++ programs for the tests. Each object and program is built once and kept in build/tests.

A kept file is identified by its command, the compiler's version and the contents of every file that it was made from,
including headers. If one of these differs, it is built again. If several processes want the same file, one builds it
and the others wait.
"""

import concurrent.futures
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import shlex
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
CSRC, TESTS = ROOT / "csrc", ROOT / "tests" / "c"
KEPT = ROOT / "build" / "tests"
INCLUDES = [f"-I{CSRC / 'include'}", f"-I{CSRC}"]
CORE_SOURCES = sorted([*CSRC.glob("core/*.c"), *CSRC.glob("x86/*.c")])
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
# The two builds of the C core that tests link. Most tests of compiled code share these objects.
PLAIN, SANITIZED = ["-O2", *WARNINGS], ["-O1", "-g", *SANITIZE, *WARNINGS]


def run(command, **options):
    """Runs a command. Returns (exit status, output)."""
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,
    )
    return done.returncode, done.stdout


def compiler(variable, *names):
    """Returns the command of a compiler: the environment variable's value if it is set, otherwise the first of names
    that is on the PATH."""
    if os.environ.get(variable):
        return shlex.split(os.environ[variable])
    found = [name for name in names if shutil.which(name)]
    assert found, f"no compiler: none of {names} is on the PATH, and {variable} is not set"
    return found[:1]


def c_compiler():
    return compiler("CC", "cc", "gcc", "clang")


def cxx_compiler():
    return compiler("CXX", "c++", "g++", "clang++")


@functools.cache
def version_of(program):
    return run([program, "--version"])[1]


def digest_of(path):
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def is_current(output, record):
    if not (output.exists() and record.exists()):
        return False
    inputs = json.loads(record.read_text())
    return all(os.path.exists(path) and digest_of(path) == digest for path, digest in inputs.items())


def headers_in(depfile):
    """Returns the inputs of a make rule `output: input input ...`. No path here contains a space."""
    return depfile.read_text().replace("\\\n", " ").partition(": ")[2].split() if depfile.exists() else []


def made(command, name, inputs):
    """Returns the path of the file that `command -o name` makes from the inputs and the headers that they include."""
    command = [str(word) for word in command]
    identity = hashlib.sha256(shlex.join([*command, name, version_of(command[0])]).encode()).hexdigest()
    place = KEPT / identity[:20]
    place.mkdir(parents=True, exist_ok=True)
    output, record, depfile = place / name, place / "inputs.json", place / "headers.d"
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_current(output, record):
            record.unlink(missing_ok=True)
            code, messages = run([*command, "-MMD", "-MF", depfile, "-o", output])
            assert code == 0, f"{shlex.join(command)}\n{messages}"
            read = {str(path) for path in [*inputs, *headers_in(depfile)]}
            record.write_text(json.dumps({path: digest_of(path) for path in sorted(read)}, indent=1))
    return output


def compiled(commands):
    """Returns the objects that `command -c source` makes, for pairs (command, source). As many compilers run as there
    are cores."""
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda pair: made([*pair[0], "-c", pair[1]], f"{pair[1].stem}.o", [pair[1]]), commands))


def linked(command, objects, name="program"):
    """Returns the program that the command makes from the objects."""
    return made([*command, *objects, "-lm"], name, objects)


def core_objects(flags, sources=CORE_SOURCES):
    """Compiles the C core, or other C sources, with flags, and returns the objects. Many tests share the flags PLAIN
    and SANITIZED."""
    return compiled([([*c_compiler(), "-std=c11", *flags, *INCLUDES], source) for source in sources])


def written(name, text):
    """Returns the path of a source in build/tests with this text. A file that already has this text is not written
    again."""
    path = KEPT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(text)
        os.replace(part, path)
    return path


@functools.cache
def can_sanitize():
    """Returns whether the C compiler has the address and undefined behaviour sanitizers, and whether their programs
    run."""
    source = written("empty.c", "int main(void) { return 0; }\n")
    try:
        return run([linked([*c_compiler(), *SANITIZE], core_objects(SANITIZE, [source]))])[0] == 0
    except AssertionError:
        return False
