"""How fast is the paper's own code compared with ours, for random rows of pinned host memory (its figure 7)?

    python -m benchmarks.reference --repository DIR [--out DIR] [--quick]

DIR, or IBP_REFERENCE, is a clone of github.com/AKKamath/InvariantBitPacking. torch's builder of extensions builds its
library there for the GPU of this machine. This needs nvcc and ninja, and takes some minutes the first time. Both codes
fetch the same rows of the same synthetic tables in one run, and are timed and checked in the same way. `the paper's
code` is `decompress_fetch` of rows that are compressed in place, called with the length of a compressed row and with an
output that exists; its sort of the ids is part of the call. The other arms are `ibp slots` and `raw rows`. `reference`
is the commit of the clone, or IBP_REFERENCE_COMMIT for a copy without .git.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

import ibp

from . import gather, harness, inputs, reading

COLUMNS = ("reference",)
THEIRS, OURS = "the paper's code", "ibp slots"
ROW_BYTES, QUICK_ROW_BYTES = (256, 512, 1024, 2048, 4096), (1024,)
SOURCES = ("ibp_api.cu", "preprocess.cu", "compress.cu", "decompress.cu")  # These sources are listed in its setup.py.
INCLUDES = ("include", "include/preproc", "include/misc", "include/compress")


def sources_of(repository):
    """Returns the files that its library is built from. Raises FileNotFoundError if one is missing."""
    sources = [repository / "src" / name for name in SOURCES]
    for path in sources:
        if not path.is_file():
            raise FileNotFoundError(
                f"{repository} has no {path.relative_to(repository)}; wanted a clone of the paper's code"
            )
    return sources


def headers_of_wheels(toolkit):
    """Returns the folders of NVIDIA's wheels that have headers which torch's headers include and a small toolkit
    lacks."""
    if toolkit is not None and (Path(toolkit) / "include" / "cusparse.h").exists():
        return []
    return [path.parent for path in Path(torch.__file__).parents[1].glob("nvidia/*/include/cusparse.h")]


def built(repository):
    """Returns the paper's library as a module."""
    from torch.utils import cpp_extension

    return cpp_extension.load(
        name="ibp_cuda",
        sources=list(map(str, sources_of(repository))),
        extra_include_paths=list(
            map(str, [*(repository / name for name in INCLUDES), *headers_of_wheels(cpp_extension.CUDA_HOME)])
        ),
        extra_cflags=["-O3"],
        extra_cuda_cflags=["-O3", "--use_fast_math"],
    )


def commit_of(repository, variable="IBP_REFERENCE_COMMIT"):
    """Returns the value of the variable of the environment if it is set (for copies of a tree), otherwise the commit of
    the clone, or "unknown"."""
    if os.environ.get(variable):
        return os.environ[variable]
    if not (repository / ".git").exists():
        return "unknown"
    found = subprocess.run(["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


class Case:
    """A synthetic table that both codes fetch."""

    def __init__(self, run, commit, name, x, fetches):
        self.run, self.commit, self.name, self.x, self.fetches = run, commit, name, x, fetches

    def measure(self, arm, call, savings, ideal_gbps):
        """Checks and times an arm. call(k) fetches set k into its output."""
        fetches = self.fetches
        with self.run.cell(f"{self.name}, {arm}"):
            harness.poison(fetches.outs[0])
            harness.check_bits(call(0), torch.index_select(self.x, 0, fetches.ids[0]), f"{self.name}, {arm}")
            seconds = self.run.seconds([lambda k=k: call(k) for k in range(len(fetches.ids))])
            self.run.add(
                case=self.name,
                arm=arm,
                rows=len(fetches.ids[0]),
                row_bytes=self.x.shape[1] * self.x.element_size(),
                dtype=self.x.dtype,
                savings=savings,
                gbps=fetches.output_bytes * 1e-9 / seconds,
                ideal_gbps=ideal_gbps,
                sms=None,
                reference=self.commit,
            )


def measure_ours(case, host, arm, **options):
    """Measures our code. Returns the ideal rate for the sectors that our rows take, which the other code also gets."""
    table, fetches = ibp.compress(host, layout="slots", **options), case.fetches
    ideal_gbps = gather.table_ideal(case.run, table, fetches)
    case.measure(arm, lambda k: ibp.index_select(table, fetches.ids[k], out=fetches.outs[k]), table.savings, ideal_gbps)
    return ideal_gbps


def measure_theirs(case, library, host, mask, bitval, ideal_gbps):
    """Measures the paper's code, which compresses the host's rows in place and so overwrites them."""
    run, fetches = case.run, case.fetches
    mask, bitval = (words.to(run.device).view(case.x.dtype) for words in (mask, bitval))
    sizes = library.get_compress_size(host, mask, bitval, None, None)
    run.sync()
    share = sizes.sum().item() / host.nbytes
    bitmask = library.compress_inplace(host, mask, bitval, None)
    run.sync()
    coded_elements = max(1, round(share * host.shape[1]))

    def call(k):
        out = fetches.outs[k]
        return library.decompress_fetch(
            host, mask, bitval, bitmask, out.device, coded_elements, fetches.ids[k], None, None, None, out
        )

    case.measure(THEIRS, call, 1 - share, ideal_gbps)


def measure_size(run, library, commit, row_bytes):
    num_rows = gather.table_bytes(run, row_bytes) // row_bytes
    fetches = gather.Fetches(run, num_rows, row_bytes // 4, torch.int32)
    host = torch.empty(num_rows, row_bytes // 4, dtype=torch.int32, pin_memory=run.on_gpu)
    for savings in inputs.QUICK_SAVINGS if run.quick else inputs.SAVINGS:
        with run.cell(f"{savings}, {row_bytes} B"):
            mask, bitval = inputs.synthetic_mask(row_bytes, savings)
            x = inputs.agreeing_rows(num_rows, mask, bitval, run.device)
            host.copy_(x)
            case = Case(run, commit, f"{reading.SYNTHETIC}{100 * savings:g}%", x, fetches)
            measure_ours(case, host, "raw rows", scheme="raw")
            codebook = ibp.codecs.Codebook.from_masks(mask, bitval, chunk_bytes=inputs.CHUNK_BYTES)
            measure_theirs(case, library, host, mask, bitval, measure_ours(case, host, OURS, codebook=codebook))


def main(argv=None):
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--repository", type=Path, default=os.environ.get("IBP_REFERENCE"))
    own, others = parser.parse_known_args(argv)
    args = harness.parse_args(others, __doc__)
    if own.repository is None:
        print("reference: name a clone of the paper's code by --repository or IBP_REFERENCE")
        return 2
    repository = Path(own.repository).resolve()
    library = built(repository)
    run = harness.Run("reference", args, COLUMNS)
    torch.manual_seed(0)
    for row_bytes in QUICK_ROW_BYTES if run.quick else ROW_BYTES:
        measure_size(run, library, commit_of(repository), row_bytes)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
