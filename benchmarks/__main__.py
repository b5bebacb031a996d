"""All benchmarks, then the charts: `python -m benchmarks [--all] [--out DIR] [--device cpu] [--quick]`.

Those of speed, in under 8 minutes on one H200; --all: those that count bytes as well, which are the same on every machine.
"""

import argparse
import importlib
import sys
import time
import traceback

from . import charts, harness

SPEED = ("gather", "large_table", "stream", "codec", "cpu", "overlap", "small_calls")
BYTES = ("ratio", "sampling", "clusters")


def run_script(name, argv):
    """@return the script's exit status, and 1 where it ended with an exception: the others run all the same."""
    started = time.perf_counter()
    try:
        status = importlib.import_module(f".{name}", __package__).main(argv)
    except Exception:
        traceback.print_exc()
        print(f"FAILED {name}")
        status = 1
    print(f"{name}: {time.perf_counter() - started:.0f} s\n", flush=True)
    return status


def main(argv=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--all", action="store_true")
    options, others = own.parse_known_args(argv)
    args, started = harness.parse_args(others, __doc__), time.perf_counter()
    status = {name: run_script(name, others) for name in SPEED + (BYTES if options.all else ())}
    charts.draw(args.out)
    failed = [name for name, result in status.items() if result]
    print(f"{len(status)} scripts in {time.perf_counter() - started:.0f} s" + (f", FAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
