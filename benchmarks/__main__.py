"""All benchmarks, then the charts: `python -m benchmarks [--all] [--out DIR] [--device cpu] [--quick]`.

Those of speed, in under 8 minutes on one H200; --all: those that count bytes as well, which are the same on every machine. Each runs in a
process of its own, so that none is stopped by another's failure or has to live with the memory that it holds.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from . import charts, harness

SPEED = ("gather", "large_table", "stream", "codec", "cpu", "overlap", "small_calls")
BYTES = ("ratio", "sampling", "clusters")


def run_script(name, argv):
    """@return the script's exit status."""
    if not Path(__file__).with_name(f"{name}.py").exists():
        print(f"{name}: no such script, left out\n", flush=True)
        return 0
    started = time.perf_counter()
    status = subprocess.run([sys.executable, "-m", f"{__package__}.{name}", *argv]).returncode
    print(f"{name}: {time.perf_counter() - started:.0f} s" + (f", exit status {status}" if status else "") + "\n", flush=True)
    return status


def main(argv=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--all", action="store_true")
    options, others = own.parse_known_args(argv)
    args, started = harness.parse_args(others, __doc__), time.perf_counter()
    failed = [name for name in SPEED + (BYTES if options.all else ()) if run_script(name, others)]
    charts.draw(args.out)
    print(f"all in {time.perf_counter() - started:.0f} s" + (f", FAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
