"""Puts small mistakes into the Python package and the C core, one at a time, and says which of them the tests see.

    python tools/mutate.py record quick                     # the tests of `make test`: which lines each reaches
    python tools/mutate.py record rest                      # the tests that `make test-all` adds, without LEFT_OUT
    python tools/mutate.py run --number 200 --seed 1 --results results.csv
    python tools/mutate.py run --goes-on --results results.csv ...   # after an interruption
    python tools/mutate.py run --again results.csv          # after new tests: only mistakes that no test saw

`run` draws lines, and one mistake for each (tools/mutations.py). It applies the mistakes in copies of the tree, never
in the tree itself. After a mistake in C it builds the library again. The tests that reach the line run, short tests
first, until one fails. A mistake is

    seen         if a test fails, ends the process or takes too long
    alive        if all tests pass
    equivalent   if tools/equivalent_mutants.csv gives the reason why no test can see it
    unreached    if no recorded test reaches the line, for example code for a GPU on a machine without one

A mistake is not counted if it does not compile, or if it compiles to the same machine code.

Run `record` again after a source has changed. After new tests, `record NAME TESTS ...` adds what they reach. A
recording leaves out tests that take more than `--most-seconds`; `rest` also leaves out tests that fuzz or build the
library anew (LEFT_OUT).
"""

import argparse
import ast
import bisect
import concurrent.futures
import csv
import fcntl
import filecmp
import hashlib
import itertools
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tracing
from mutations import Mutation, mutations_of

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "mutants"
REASONS = ROOT / "tools" / "equivalent_mutants.csv"
COLUMNS = ["file", "line", "column", "was", "becomes", "outcome", "test", "tests_run", "seconds", "text"]
KEY = ["file", "text", "at", "was", "becomes"]  # These columns of tools/equivalent_mutants.csv identify a mistake.
SOURCES = ["ibp/*.py", "ibp_command.py", "csrc/core/*.[ch]", "csrc/x86/*.[ch]"]
FULL = ["--hypothesis-profile=full"]
# Tests that build the library or its kernels in other ways, run one test again and again, or measure.
LEFT_OUT = ["sanitized", "fuzz", "emulated_*", "install", "reproduction"]
SETS = {
    "quick": ["-m", "not slow and not frameworks"],
    "rest": [
        *("-m", "slow or hypothesis or frameworks", *FULL),
        *(f"--ignore-glob=*/test_{name}.py" for name in LEFT_OUT),
    ],
}
# Programs that are compiled from the C core instead of being linked with the library. The lines that they reach are not
# recorded, so they run for every mistake in C.
C_CORE = "tests/core/test_c_core.py::test_c_core"
C_PROGRAMS = {"quick": [f"{C_CORE}[quick]"], "rest": [f"{C_CORE}[all]"]}
# Tests that look at what modules define but run none of their lines.
OF_MODULES = ["tests/project/test_annotations.py"]
MOST_SECONDS = 600.0  # One test may take this many seconds.
# The successive runs of pytest take about this many seconds. The first run sees most mistakes.
BATCHES = (4, 30, 120, float("inf"))


# ---- copies of the tree ----


def free_name() -> str:
    """Returns the name of a copy that no other run uses. The copy belongs to this run until its end."""
    for number in itertools.count():
        name = f"copy{number}"
        lock = os.open(FOLDER / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return name
        except BlockingIOError:
            os.close(lock)
    raise AssertionError("there is no end of names")


def copied(name: str) -> Path:
    """Updates a copy of the tree with the files that git does not ignore, and returns its path. Files that were built
    in the copy stay."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    said = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths, copy = [path for path in said.splitlines() if (ROOT / path).is_file()], FOLDER / name
    kept = copy / "build" / "paths.txt"
    for path in set(kept.read_text().splitlines() if kept.exists() else ()) - set(paths):
        (copy / path).unlink(missing_ok=True)
    for path in paths:
        if not (copy / path).exists() or not filecmp.cmp(ROOT / path, copy / path, shallow=False):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy / path)  # The copy gets the present time, so that make builds it again.
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("\n".join(paths))
    return copy


def environment_of(copy: Path, **changes: str) -> dict[str, str]:
    paths = [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "IBP_NO_CUDA": "1", "PYTHONPATH": ":".join(paths), **changes}


def build(copy: Path, **flags: str) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=copy, env=environment_of(copy, **flags), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"the copy {copy} cannot be built:\n{done.stdout}{done.stderr}")


def library_of(copy: Path) -> Path:
    return next(path for path in (copy / "ibp" / "_lib").glob("libibp.so.*"))


def build_library(copy: Path) -> bool:
    """Builds the C library again. Returns whether it compiles, and whether its code differs from before."""
    installed = library_of(copy)
    made = copy / "build" / "native" / installed.name
    command = ["make", "-s", "-C", "csrc", "BUILD=../build/native", f"../build/native/{installed.name}"]
    environment = {"CC": "cc", **environment_of(copy)}
    if subprocess.run(command, cwd=copy, env=environment, capture_output=True).returncode != 0:
        return False
    if made.read_bytes() == installed.read_bytes():
        return False
    shutil.copy2(made, installed.with_suffix(".new"))
    os.replace(installed.with_suffix(".new"), installed)
    return True


# ---- which tests reach a line ----


class Reach(NamedTuple):
    """The findings of one recording."""

    tests: list[str]
    seconds: np.ndarray  # of each test
    options: list[str]  # arguments of pytest
    digests: dict[str, str]  # by source
    lines: dict[str, np.ndarray]  # by source: for each line, the tests that reach it, as packed bits

    def reaching(self, path: str, lines: range | None) -> np.ndarray:
        """Returns the numbers of the tests that reach one of the lines. None stands for all lines."""
        bits = self.lines.get(path)
        if bits is None:
            return np.empty(0, np.int64)
        chosen = bits if lines is None else bits[lines.start : lines.stop]
        return np.flatnonzero(np.unpackbits(np.bitwise_or.reduce(chosen, axis=0))[: len(self.tests)])

    def save(self, path: Path) -> None:
        said = {"tests": self.tests, "options": self.options, "digests": self.digests}
        np.savez_compressed(path, about=json.dumps(said), seconds=self.seconds, **self.lines)

    @classmethod
    def load(cls, path: Path) -> "Reach":
        with np.load(path) as held:
            arrays = dict(held)
        about, seconds = json.loads(str(arrays.pop("about"))), arrays.pop("seconds")
        return cls(about["tests"], seconds, about["options"], about["digests"], arrays)


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def record(name: str, arguments: list[str], jobs: int, most_seconds: float) -> None:
    """Runs tests in a copy whose C code is traced, and writes which lines each test has reached."""
    tree, raw = copied("traced"), FOLDER / "raw" / name
    shutil.rmtree(raw, ignore_errors=True)
    (raw / "site").mkdir(parents=True)
    (raw / "site" / "sitecustomize.py").write_text(tracing.SITE)
    (tree / "csrc" / "cuda" / "reached.c").write_text(tracing.TRACE_C)
    build(tree, CFLAGS="-Og -gdwarf-4 -fsanitize-coverage=trace-pc")
    paths = [str(tree), str(raw / "site"), str(ROOT / "tools")]
    environment = environment_of(tree, IBP_TRACED_TREE=str(tree), IBP_RECORD=str(raw))
    environment["IBP_RECORD_SECONDS"] = str(most_seconds)
    environment["PYTHONPATH"] = ":".join([*paths, environment["PYTHONPATH"]])
    workers = ["-n", str(jobs), "--dist", "load"] if jobs > 1 else []
    arguments = arguments or SETS[name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "reach", "-p", "no:cacheprovider", *workers, *arguments]
    subprocess.run(command, cwd=tree, env=environment, preexec_fn=be_killed_first)
    found = collected(raw, tree, [word for word in arguments if word in FULL])
    found.save(FOLDER / f"{name}.npz")
    print(f"{len(found.tests)} tests, {len(found.lines)} sources")


def collected(raw: Path, tree: Path, options: list[str]) -> Reach:
    tests: dict[str, dict] = {}
    found: list[tuple[str, np.ndarray]] = []
    for path in raw.glob("tests-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            found.append((line.get("test") or line["fixture"], np.array(line.pop("reached"), np.int32)))
            if "test" in line:
                tests[line["test"]] = line
    # A test that fails without a mistake says nothing about mistakes.
    kept = sorted(name for name, test in tests.items() if test["passed"] and not test["skipped"])
    print(f"left out: {[name for name in tests if not tests[name]['passed']]}")
    places = places_of(set().union(*(reached.tolist() for _, reached in found)), tree)
    numbers: dict[str, list[int]] = {}
    for number, name in enumerate(kept):
        for context in (name, *tests[name]["fixtures"]):
            numbers.setdefault(context, []).append(number)
    sources = sources_of(SOURCES)
    lines = {path: np.zeros((len((tree / path).read_text().splitlines()) + 1, len(kept)), bool) for path in sources}
    for context, reached in found:
        for path, line in {places[number] for number in reached.tolist() if number in places}:
            if path in lines and context in numbers:
                lines[path][line, numbers[context]] = True
    seconds = np.array([tests[name]["seconds"] for name in kept])
    bits = {path: np.packbits(matrix, axis=1) for path, matrix in lines.items()}
    return Reach(kept, seconds, options, {path: digest_of(tree / path) for path in sources}, bits)


def places_of(numbers: set[int], tree: Path) -> dict[int, tuple[str, int]]:
    """Returns the source and the line of each byte that was set."""
    starts = sorted((start, os.path.relpath(path, tree)) for path, start in tracing.starts_of(tree).items())
    places = {}
    for number in numbers:
        if number >= tracing.C_BYTES:
            start, path = starts[bisect.bisect_right(starts, (number, "~")) - 1]
            places[number] = (path, number - start)
    addresses = sorted(number for number in numbers if number < tracing.C_BYTES)
    asked = "\n".join(hex(address - 1) for address in addresses)  # One less than the return address is the call.
    command = ["addr2line", "-e", str(library_of(tree))]
    said = subprocess.run(command, input=asked, capture_output=True, text=True, check=True).stdout.splitlines()
    for address, line in zip(addresses, said, strict=True):
        path, _, number = line.partition(" ")[0].rpartition(":")
        if number.isdigit():
            places[address] = (os.path.relpath(os.path.join(tree, "csrc", path), tree), int(number))
    return places


def lines_that_matter(mutation: Mutation, found: Reach) -> range | None:
    """Returns the lines for a mutation: a test runs if it reaches one of them. None stands for any line of the file."""
    if not mutation.path.endswith(".py"):  # A block of C is recorded at its first line.
        bits = found.lines[mutation.path]
        reached = [line for line in range(mutation.line + 1) if bits[line].any()]
        return range(reached[-1], mutation.line + 1) if reached else range(0)
    return lines_of_statement(ast.parse((ROOT / mutation.path).read_text()), mutation.line)


def lines_of_statement(tree: ast.Module, line: int) -> range | None:
    """Returns the lines of the innermost statement that contains a line, up to the first statement inside it. If the
    line runs when a function is defined, returns the lines of the function's body. If it runs when the module is
    imported, returns None."""
    within: ast.stmt | ast.Module = tree
    functions = 0
    while True:
        inner = [
            node
            for node in ast.walk(within)
            if isinstance(node, ast.stmt) and node is not within and first_line(node) <= line <= (node.end_lineno or 0)
        ]
        if not inner:
            break
        within = min(inner, key=lambda node: first_line(node))
        functions += isinstance(within, ast.FunctionDef | ast.AsyncFunctionDef)
    if isinstance(within, ast.FunctionDef | ast.AsyncFunctionDef):
        return range(within.body[0].lineno, (within.end_lineno or 0) + 1)
    if functions == 0 or isinstance(within, ast.Module):
        return None
    body = getattr(within, "body", None)
    return range(within.lineno, body[0].lineno if body else (within.end_lineno or 0) + 1)


def first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(name.lineno for name in getattr(node, "decorator_list", []))])


# ---- mistakes ----


class Outcome(NamedTuple):
    word: str
    test: str
    tests_run: int
    seconds: float


class Copy:
    """A copy of the tree in which mistakes are tried, one after another."""

    def __init__(self, tree: Path, maps: dict[str, Reach], most: int) -> None:
        self._tree, self._maps, self._most = tree, maps, most
        self._trusted: set[str] = set()  # These tests pass without a mistake.
        self._distrusted: set[str] = set()
        self._python_mistakes = 0
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, str(ROOT / "tools" / "forking.py")]
        environment = environment_of(tree, OMP_NUM_THREADS="1")
        self._runner = subprocess.Popen(command, cwd=tree, env=environment, preexec_fn=be_killed_first, **pipes)

    def outcome_of(self, mutation: Mutation) -> Outcome | None:
        """Tries a mistake and returns its outcome, or None if the mistake is not counted."""
        start, tests_run = time.monotonic(), 0
        while True:
            found = self._with(mutation)
            if found is None:
                return None
            word, test, count = found
            tests_run += count
            if word != "seen" or test in self._trusted or not self._is_test(test):
                return Outcome(word, test, tests_run, time.monotonic() - start)
            if self._failing([test], [], MOST_SECONDS) is None:
                self._trusted.add(test)
            else:  # The test fails without a mistake, too, and says nothing.
                self._distrusted.add(test)

    def _is_test(self, test: str) -> bool:
        return test.partition("::")[0].endswith(".py")

    def _with(self, mutation: Mutation) -> tuple[str, str, int] | None:
        """Applies a mistake, runs the tests and takes the mistake back. Returns (word, test, tests run), or None if the
        library does not compile to other code."""
        source, is_c = self._tree / mutation.path, not mutation.path.endswith(".py")
        text, time_ns = source.read_text(), source.stat().st_mtime_ns
        source.write_text(mutation.applied(text))
        # The source gets a time that no other version of it has, so that Python never uses bytecode of another version.
        if not is_c:
            self._python_mistakes += 1
            os.utime(source, ns=(time_ns, time_ns - self._python_mistakes * 10**9))
        try:
            return self._tried(mutation, is_c) if not is_c or build_library(self._tree) else None
        finally:
            source.write_text(text)
            if is_c:
                build_library(self._tree)
            else:
                os.utime(source, ns=(time_ns, time_ns))

    def _tried(self, mutation: Mutation, is_c: bool) -> tuple[str, str, int]:
        tests_run = 0
        run: set[tuple] = set()  # These tests have run. Recordings may have tests in common.
        for name, found in self._maps.items():
            lines = lines_that_matter(mutation, found)
            numbers = found.reaching(mutation.path, lines)
            others = C_PROGRAMS.get(name, []) if is_c else OF_MODULES if lines is None else []
            for batch, seconds in batches(found, numbers, others, self._most):
                tests = [test for test in batch if test not in self._distrusted and (test, *found.options) not in run]
                if not tests:
                    continue
                run.update((test, *found.options) for test in tests)
                tests_run += len(tests)
                test = self._failing(tests, found.options, 120 + 8 * seconds)
                if test is not None:
                    return "seen", test, tests_run
        return ("alive" if tests_run else "unreached"), "", tests_run

    def _failing(self, tests: list[str], options: list[str], limit_seconds: float) -> str | None:
        """Returns the test that fails first, or a description of how the run ended; None if all tests pass."""
        output = self._tree / "build" / "output.txt"
        arguments = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", *options, *tests]
        request = {"arguments": arguments, "output": str(output), "seconds": limit_seconds}
        self._runner.stdin.write(json.dumps(request) + "\n")
        self._runner.stdin.flush()
        status = json.loads(self._runner.stdout.readline())
        if status in (0, None):
            return None if status == 0 else f"more than {limit_seconds:.0f} s"
        said = output.read_text(errors="replace")
        named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.MULTILINE)
        return named.group(1) if named else f"pytest ended with {status}: {said.strip()[-200:]}"


def be_killed_first() -> None:
    """Makes the kernel kill this process first if memory runs out. A mistake may allocate without end."""
    Path("/proc/self/oom_score_adj").write_text("1000")


def batches(found: Reach, numbers: np.ndarray, others: list[str], most: int) -> Iterator[tuple[list[str], float]]:
    """Yields (tests, seconds that they take) for each run of pytest. The two shortest tests of each function come
    first, then two more of each, then four more, and so on up to `most`. `others` come last."""
    places: dict[int, int] = {}  # of each test among the tests of its function
    seen: dict[str, int] = {}
    for number in numbers[np.argsort(found.seconds[numbers], kind="stable")].tolist():
        function = found.tests[number].partition("[")[0]
        places[number] = seen[function] = seen.get(function, -1) + 1
    chosen = [number for number in places if places[number] < most]
    chosen.sort(key=lambda number: ((places[number] // 2).bit_length(), found.seconds[number]))
    order = [(found.tests[number], found.seconds[number]) for number in chosen]
    names, seconds, limits = [], 0.0, iter(BATCHES)
    at_most = next(limits)
    for name, each in [*order, *((program, 10.0) for program in others)]:
        if names and seconds + each > at_most:
            yield names, seconds
            names, seconds, at_most = [], 0.0, next(limits)
        names.append(name)
        seconds += each
    if names:
        yield names, seconds


def sources_of(patterns: list[str]) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for path in listed.stdout.split("\n") if path.endswith((".py", ".c", ".h"))]


def drawn(sources: list[str], seed: int) -> Iterator[Mutation]:
    """Yields one mistake for each line of the files, with the lines in random order."""
    chance = random.Random(seed)
    lines: dict[tuple[str, int], list[Mutation]] = {}
    for path in sources:
        for mutation in mutations_of(ROOT, path):
            lines.setdefault((mutation.path, mutation.line), []).append(mutation)
    order = sorted(lines)
    chance.shuffle(order)
    for place in order:
        yield chance.choice(lines[place])


def reasons() -> dict[tuple[str, ...], str]:
    """Returns the reason why a mistake is equivalent, for each `key_of` a mistake."""
    if not REASONS.exists():
        return {}
    return {tuple(row[column] for column in KEY): row["reason"] for row in rows_of(REASONS)}


def key_of(mutation: Mutation) -> tuple[str, ...]:
    """Returns what identifies a mistake while the lines around it change: its file, the line without indentation, the
    column in that line (from 1), the old text and the new text."""
    line = (ROOT / mutation.path).read_text().splitlines()[mutation.line - 1]
    at = mutation.column - (len(line) - len(line.lstrip())) + 1
    return mutation.path, line.strip(), str(at), mutation.was, mutation.becomes


def text_of(mutation: Mutation) -> str:
    return key_of(mutation)[1]


def rows_of(results: Path) -> list[dict[str, str]]:
    with results.open(newline="") as file:
        return list(csv.DictReader(file))


def mutation_of(row: dict[str, str]) -> Mutation:
    return Mutation(row["file"], int(row["line"]), int(row["column"]) - 1, row["was"], row["becomes"])


def unseen_in(results: Path) -> list[Mutation]:
    return [mutation_of(row) for row in rows_of(results) if row["outcome"] in ("alive", "unreached")]


def run(options: argparse.Namespace) -> None:
    maps = {path.stem: Reach.load(path) for path in sorted(FOLDER.glob("*.npz"))}
    if options.tests:
        maps = {name: maps[name] for name in options.tests}
    patterns = options.paths or [p for p in SOURCES if options.language in (None, "python" if ".py" in p else "c")]
    sources = sources_of(patterns)
    changed = {path for found in maps.values() for path in sources if found.digests.get(path) != digest_of(ROOT / path)}
    if not maps or changed:
        sys.exit(f"nothing is recorded of {', '.join(sorted(changed)[:3]) or 'any test'} as it is: record first")
    wanted = iter(unseen_in(options.again) if options.again else drawn(sources, options.seed))
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for _ in range(options.jobs):
        tree = copied(free_name())
        build(tree)
        copies.put(Copy(tree, maps, options.most))
    known, counts = reasons(), dict.fromkeys(["seen", "alive", "equivalent", "unreached"], 0)

    def outcome_of(mutation: Mutation) -> tuple[Mutation, Outcome | None]:
        if key_of(mutation) in known:
            return mutation, Outcome("equivalent", "", 0, 0.0)
        copy = copies.get()
        try:
            return mutation, copy.outcome_of(mutation)
        finally:
            copies.put(copy)

    kept = rows_of(options.results) if options.goes_on else []
    done_before = {mutation_of(row) for row in kept}
    wanted = (mutation for mutation in wanted if mutation not in done_before)
    counts.update(Counter(row["outcome"] for row in kept))

    with options.results.open("w", newline="") as file, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        table.writerows([row[column] for column in COLUMNS] for row in kept)
        file.flush()
        running: set[concurrent.futures.Future] = set()
        while sum(counts.values()) < options.number:
            while len(running) < min(options.jobs, options.number - sum(counts.values())):
                mutation = next(wanted, None)
                if mutation is None:
                    break
                running.add(pool.submit(outcome_of, mutation))
            if not running:
                break
            done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                mutation, outcome = future.result()
                if outcome is None:
                    continue
                counts[outcome.word] += 1
                place = [mutation.path, mutation.line, mutation.column + 1, mutation.was, mutation.becomes]
                end = [outcome.word, outcome.test, outcome.tests_run, round(outcome.seconds, 1), text_of(mutation)]
                table.writerow([*place, *end])
                file.flush()
                print(f"{outcome.word} {mutation} {outcome.test}", flush=True)
    counted = counts["seen"] + counts["alive"]
    print(f"{counts}: seen {counts['seen']} of {counted}, {100 * counts['seen'] / max(counted, 1):.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    jobs = {"type": int, "default": len(os.sched_getaffinity(0)), "help": "processes at a time; default: one a core"}
    recording = commands.add_parser("record", help="find out which tests reach which lines")
    recording.add_argument("name", help="quick, rest, or any name with arguments for pytest")
    recording.add_argument("arguments", nargs="*", help="for pytest, after --")
    recording.add_argument("--jobs", **jobs)
    recording.add_argument("--most-seconds", type=float, default=60, help="tests that take longer are left out")
    running = commands.add_parser("run", help="make mistakes, run the tests that reach them")
    running.add_argument("--number", type=int, default=200, help="mistakes; default: 200")
    running.add_argument("--seed", type=int, default=1)
    running.add_argument("--language", choices=["python", "c"], help="default: both")
    running.add_argument("--paths", nargs="+", help="sources, as git ls-files takes them; default: all")
    running.add_argument("--tests", nargs="+", help="names of recordings, in this order; default: all")
    running.add_argument("--again", type=Path, help="results, of which those that no test saw are tried again")
    running.add_argument("--most", type=int, default=1 << 30, help="tests of one function; default: all")
    running.add_argument("--goes-on", action="store_true", help="keep what the results hold, and do the rest")
    running.add_argument("--results", type=Path, default=FOLDER / "results.csv")
    running.add_argument("--jobs", **jobs)
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if options.command == "record":
        record(options.name, options.arguments, options.jobs, options.most_seconds)
    else:
        run(options)


if __name__ == "__main__":
    main()
