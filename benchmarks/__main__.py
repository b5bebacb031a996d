"""All benchmarks, then the charts: `python -m benchmarks [--out DIR] [--device cpu] [--quick]`."""

import sys

from . import charts, clusters, codec, gather, harness, ratio, sampling


def main():
    argv = sys.argv[1:]
    args = harness.parse_args(argv, __doc__)
    status = 0
    for script in (gather, codec, ratio, sampling, clusters):
        status = max(status, script.main(argv))
        print(flush=True)
    charts.draw(args.out)
    return status


if __name__ == "__main__":
    sys.exit(main())
