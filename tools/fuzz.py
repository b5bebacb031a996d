"""Fuzzes the C library, one target after the other, for a given time.

    python tools/fuzz.py [--seconds 3600] [--targets files tables ...] [--keep] [--csv PATH]

The fuzzer is libFuzzer if there is a clang that has it, and otherwise tests/fuzz/driver.c. Both run under the address
and undefined behaviour sanitizers. build/fuzz/TARGET contains the inputs; logs are beside it. An input that ends the
process is written to build/fuzz/crash-*, and the exit status is 1.

--keep writes a sample of the inputs that were found to tests/fuzz/corpus. It needs libFuzzer, which says which inputs
are worth keeping. --csv also writes what was run and reached to a file.
"""

import argparse
import csv
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
import fuzzing  # noqa: E402

ROOM = ROOT / "build" / "fuzz"
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0"}
# A corpus keeps at most this many inputs of a target, each of fewer bytes than this.
MOST_KEPT, MOST_KEPT_BYTES = 150, 2000


def run(command, log):
    """Runs a command, writes its output to a file, and returns its exit status."""
    with open(log, "w") as output:
        return subprocess.run(
            command, cwd=ROOM, env={**os.environ, **OPTIONS}, stdout=output, stderr=output, check=False
        ).returncode


def found_by_libfuzzer(text):
    """Returns the numbers of a run that libFuzzer's log gives."""
    runs = re.findall(r"number_of_executed_units: (\d+)", text)
    reached = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", text)
    edges, features, inputs = map(int, reached[-1]) if reached else (0, 0, 0)
    executions = int(runs[-1]) if runs else 0
    return {"fuzzer": "libFuzzer", "executions": executions, "edges": edges, "features": features, "inputs": inputs}


def with_libfuzzer(clang, target, seconds):
    """Fuzzes a target with libFuzzer. Returns (exit status, what was found)."""
    found, program = ROOM / target, fuzzing.with_libfuzzer(clang, target)
    for each in fuzzing.corpus(target):
        (found / hashlib.sha256(each).hexdigest()[:16]).write_bytes(each)
    words = fuzzing.FUZZ / f"{target}.dict"
    command = [program, f"-max_total_time={seconds}", f"-max_len={fuzzing.most_bytes(target)}", "-print_final_stats=1"]
    command += [f"-dict={words}"] if words.exists() else []
    log = ROOM / f"{target}.log"
    code = run([*command, found], log)
    return code, found_by_libfuzzer(log.read_text(errors="replace"))


def with_driver(target, seconds):
    """Fuzzes a target with the driver. Returns the same as `with_libfuzzer`."""
    packed, log = ROOM / f"{target}.bin", ROOM / f"{target}.log"
    packed.write_bytes(fuzzing.pack(fuzzing.corpus(target)))
    command = [fuzzing.with_driver(target), f"-seconds={seconds}", f"-most={fuzzing.most_bytes(target)}", packed]
    code = run(command, log)
    numbers = re.findall(r"^(\d+) executions, (\d+) edges reached, (\d+) inputs", log.read_text(errors="replace"), re.M)
    executions, edges, inputs = map(int, numbers[-1]) if numbers else (0, 0, 0)
    return code, {"fuzzer": "driver.c", "executions": executions, "edges": edges, "features": "", "inputs": inputs}


def keep(clang, target):
    """Writes a sample of a smallest set of inputs that reaches everything that all inputs reach."""
    best = ROOM / f"{target}.best"
    best.mkdir(exist_ok=True)
    program = fuzzing.with_libfuzzer(clang, target)
    run(
        [program, "-merge=1", f"-max_len={fuzzing.most_bytes(target)}", best, ROOM / target],
        ROOM / f"{target}.merge.log",
    )
    golden = {path.read_bytes() for path in fuzzing.GOLDEN_FILES.glob("*.safetensors")}
    inputs = {path.read_bytes() for path in best.iterdir()} - golden
    inputs = sorted((each for each in inputs if len(each) < MOST_KEPT_BYTES), key=lambda each: (len(each), each))
    step = max(1, -(-len(inputs) // MOST_KEPT))
    fuzzing.CORPORA.mkdir(exist_ok=True)
    (fuzzing.CORPORA / f"{target}.bin").write_bytes(fuzzing.pack(inputs[::step]))


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=3600, help="of all targets (default: an hour)")
    parser.add_argument("--targets", nargs="+", choices=list(fuzzing.TARGETS), default=list(fuzzing.TARGETS))
    parser.add_argument("--keep", action="store_true", help="write found inputs to tests/fuzz/corpus")
    parser.add_argument("--csv", type=Path, help="a file for what was run and reached")
    arguments = parser.parse_args()
    clang, rows, failed = fuzzing.clang_with_libfuzzer(), [], False
    print("by libFuzzer" if clang else "by tests/fuzz/driver.c: there is no clang with libFuzzer")
    for target in arguments.targets:
        (ROOM / target).mkdir(parents=True, exist_ok=True)
        seconds = arguments.seconds // len(arguments.targets)
        code, found = with_libfuzzer(clang, target, seconds) if clang else with_driver(target, seconds)
        failed |= code != 0
        rows.append({"target": target, "seconds": seconds, **found})
        numbers = ", ".join(
            f"{found[name]} {name}" for name in ("executions", "edges", "features", "inputs") if found[name]
        )
        print(f"{target}: {numbers}{', FAILED' if code else ''}", flush=True)
        if arguments.keep and clang:
            keep(clang, target)
    if arguments.csv:
        write_csv(arguments.csv, rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
