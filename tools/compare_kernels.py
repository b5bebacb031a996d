"""Compares the machine code of two builds kernel by kernel: python tools/compare_kernels.py before.cubin[,more] after.cubin[,more]

Makes its input with `nvcc -cubin -gencode=arch=compute_90,code=sm_90 ... -o x.cubin x.cu`. Kernels are the .text sections of the ELF
files, by their mangled names. Prints those whose bytes differ, with their numbers of instructions (16 bytes each from sm_70 on), and those that only one side
has. The exit status is 1 if anything differs.
"""

import re
import struct
import sys
from pathlib import Path

INSTRUCTION_BYTES = 16


def kernels(paths):
    """Machine code by kernel name of the cubins, whose names are separated by commas."""
    found = {}
    for path in paths.split(","):
        data = Path(path).read_bytes()
        assert data[:5] == b"\x7fELF\x02", f"{path} is no 64-bit ELF file"
        table, = struct.unpack_from("<Q", data, 40)
        entry_bytes, count, names = struct.unpack_from("<HHH", data, 58)
        headers = [struct.unpack_from("<IIQQQQ", data, table + i * entry_bytes) for i in range(count)]
        strings = headers[names][4]
        for name, _, _, _, start, size in headers:
            text = data[strings + name : data.index(b"\0", strings + name)].decode()
            if text.startswith(".text."):
                found[text.removeprefix(".text.")] = data[start : start + size]
    return found


def without_file(name):
    """A kernel's name without the part that names the source file of a function that is local to it."""
    return re.sub(r"_GLOBAL__N__[0-9a-f_]+", "", name)


def main():
    before, after = ({without_file(name): code for name, code in kernels(side).items()} for side in sys.argv[1:3])
    same = [name for name in before if before[name] == after.get(name)]
    for name in sorted(before.keys() | after.keys() - set(same)):
        counts = [str(len(side[name]) // INSTRUCTION_BYTES) if name in side else "none" for side in (before, after)]
        if name not in same:
            print(f"{counts[0]:>6} -> {counts[1]:>6} instructions  {name}")
    print(f"{len(same)} kernels are the same, {len(before.keys() | after.keys()) - len(same)} are not")
    return int(len(same) != len(before.keys() | after.keys()))


if __name__ == "__main__":
    sys.exit(main())
