"""Compares the machine code of two builds, kernel by kernel.

    nvcc -cubin -arch=sm_90 -O3 -std=c++17 -Icsrc/include -o new/raw.cubin csrc/cuda/decode/decode_raw.cu
    python tools/compare_kernels.py old/raw.cubin[,more.cubin] new/raw.cubin[,more.cubin]

Kernels are the .text sections of the ELF files, identified by their mangled names. The script prints each kernel that
differs or that only one side has, with the number of instructions (16 bytes each since sm_70), the registers and the
bytes of stack on both sides. The exit status is 1 if anything differs.
"""

import struct
import sys
from pathlib import Path
from typing import NamedTuple

INSTRUCTION_BYTES = 16
# An attribute in section .nv.info is a format byte, the attribute's number, and for format 4 (SIZED) a 16-bit size and
# that many bytes. The bytes of FRAME_SIZE and REGCOUNT are the kernel's symbol and a number. The names are those of
# cuobjdump --dump-elf.
SIZED, FRAME_SIZE, REGCOUNT = 0x04, 0x11, 0x2F


class Kernel(NamedTuple):
    code: bytes
    registers: int  # per thread
    stack_bytes: int

    def __str__(self) -> str:
        return f"{len(self.code) // INSTRUCTION_BYTES} instr. {self.registers} regs {self.stack_bytes} B stack"


class Section(NamedTuple):
    name: str
    data: bytes


def sections(path: str) -> list[Section]:
    elf = Path(path).read_bytes()
    if elf[:5] != b"\x7fELF\x02":
        sys.exit(f"{path} is no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 40)
    header_bytes, count, names = struct.unpack_from("<HHH", elf, 58)
    # The fields of a section header are name, type, flags, address, start and size.
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * header_bytes) for i in range(count)]
    return [
        Section(text(elf, headers[names][4] + name), elf[start : start + size])
        for name, _, _, _, start, size in headers
    ]


def text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def attributes(info: bytes) -> dict[tuple[int, int], int]:
    """Returns the numbers in section .nv.info by attribute and symbol."""
    found, at = {}, 0
    while at + 4 <= len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind != SIZED:
            continue
        if attribute in (FRAME_SIZE, REGCOUNT):
            symbol, number = struct.unpack_from("<II", info, at)
            found[attribute, symbol] = number
        at += size
    return found


def kernels(paths: str) -> dict[str, Kernel]:
    """Returns the kernels of cubins by name. paths: the file names, separated by commas."""
    found = {}
    for path in paths.split(","):
        by_name = {section.name: section.data for section in sections(path)}
        numbers, symbols = attributes(by_name[".nv.info"]), by_name[".symtab"]
        places = {
            text(by_name[".strtab"], struct.unpack_from("<I", symbols, 24 * i)[0]): i for i in range(len(symbols) // 24)
        }
        for name, code in by_name.items():
            if name.startswith(".text."):
                kernel = name.removeprefix(".text.")
                of_kernel = (numbers.get((attribute, places[kernel]), 0) for attribute in (REGCOUNT, FRAME_SIZE))
                found[kernel] = Kernel(code, *of_kernel)
    return found


def main() -> int:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    before, after = kernels(sys.argv[1]), kernels(sys.argv[2])
    different = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in different:
        print(f"{before.get(name, 'none')} -> {after.get(name, 'none')}: {name}")
    print(f"{len(before.keys() | after.keys()) - len(different)} kernels are the same, {len(different)} are not")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
