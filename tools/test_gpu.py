"""Runs every test file in a process of its own, as many at a time as there are cores. A test that finds no GPU fails.

Tests that need two GPUs also fail if there is a second one that cannot be used.

    python tools/test_gpu.py [arguments of pytest]

Prints the last line of each file's run as it ends, all output of pytest for files that failed, and the total.
build/tests/gpu has the output of each file. Exits with 1 if a file failed.
"""

import collections
import concurrent.futures
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "tests" / "gpu"
NO_TESTS_COLLECTED = 5  # pytest ends with this status if -k or -m leaves no test of a file.


def run_file(path, arguments):
    """Runs a test file. Returns (path, whether it succeeded, pytest's output)."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--hypothesis-profile=full",
        "-p",
        "no:cacheprovider",
        path.relative_to(ROOT),
        *arguments,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "IBP_REQUIRE_CUDA": "1", "IBP_REQUIRE_CUDA_DEVICES": str(torch.cuda.device_count())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    (LOGS / f"{path.stem}.txt").write_text(done.stdout)
    return path, done.returncode in (0, NO_TESTS_COLLECTED), done.stdout


def counts_in(line):
    """Returns the counts in pytest's last line: {"passed": 3, "skipped": 1}."""
    return {
        outcome: int(number)
        for number, outcome in re.findall(r"(\d+) (passed|failed|skipped|error|xfailed|xpassed|deselected)", line)
    }


def main():
    LOGS.mkdir(parents=True, exist_ok=True)
    started, total, failed = time.monotonic(), collections.Counter(), []
    files = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: path.stat().st_size, reverse=True)
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for running in concurrent.futures.as_completed([pool.submit(run_file, path, sys.argv[1:]) for path in files]):
            path, is_well, output = running.result()
            last = output.strip().rpartition("\n")[2]
            print(f"{path.name}: {last}", flush=True)
            total.update(counts_in(last))
            if not is_well:
                failed.append(path.name)
                print(f"==== {path.name} ====\n{output}", flush=True)
    said = ", ".join(f"{number} {outcome}" for outcome, number in total.items())
    names = f" ({', '.join(failed)})" if failed else ""
    print(f"{len(files)} files, {len(failed)} of them failed{names}: {said} in {time.monotonic() - started:.0f} s")
    return 1 if failed or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
