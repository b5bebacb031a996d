"""An rANS coder of bytes on the CPU, by rans.c. For cpu.py it is the rival in section 5.1.5 of the report on DietGPU,
and for ratio.py it codes the sets of bytes of that report.

A C compiler ($CC, or cc) compiles rans.c for this processor at the first call, in about a second.
"""

import ctypes
import functools
import os
import shlex
import shutil
from pathlib import Path

import numpy as np

from . import harness

FLAGS = "-O3 -march=native -std=c11 -shared -fPIC".split()
LENGTH_BYTES = 8  # Coded bytes begin with the number of bytes that they stand for.
TABLE_BYTES = LENGTH_BYTES + 2 * 256  # The number and the frequencies; the rest of the coded bytes is data.


def compiler():
    """Returns the command of the C compiler, or None if it is not installed."""
    command = shlex.split(os.environ.get("CC", "cc"))
    return command if shutil.which(command[0]) else None


@functools.cache
def library():
    """Returns the functions of rans.c."""
    functions = harness.compiled([*compiler(), *FLAGS], Path(__file__).with_name("rans.c"))
    address, size = ctypes.c_void_p, ctypes.c_size_t
    for name, result, arguments in (
        ("rans_bound", size, (size,)),
        ("rans_encode", size, (address, size, address)),
        ("rans_decode", ctypes.c_int, (address, size, address, size)),
        ("split_bfloat16", None, (address, size, address, address)),
        ("join_bfloat16", None, (address, address, size, address)),
    ):
        getattr(functions, name).restype, getattr(functions, name).argtypes = result, arguments
    return functions


def _address(array):
    return array.ctypes.data


def encode(data):
    """Returns the coded bytes of uint8 [n], uint8 [coded]. data: contiguous."""
    coded = np.empty(library().rans_bound(data.size), np.uint8)
    return coded[: library().rans_encode(_address(data), data.size, _address(coded))]


def decode(coded):
    """Returns the bytes that were coded, uint8 [n]. coded: what `encode` returned. Raises ValueError if the coded bytes
    do not end as they should; they have no checksum."""
    data = np.empty(_length_of(coded), np.uint8)
    if library().rans_decode(_address(coded), coded.size, _address(data), data.size):
        raise ValueError(f"{coded.size} bytes do not decode; wanted the bytes that rans.encode returned, unchanged")
    return data


def encode_bfloat16(words):
    """Returns the coded bytes of BF16 values, uint16 [n], as DietGPU codes them: the rANS of their exponents, then a
    byte of sign and mantissa for each."""
    exponents, rest = np.empty((2, words.size), np.uint8)
    library().split_bfloat16(_address(words), words.size, _address(exponents), _address(rest))
    return np.concatenate([encode(exponents), rest])


def decode_bfloat16(coded):
    """Returns the values that `encode_bfloat16` was given, uint16 [n]."""
    num_values = _length_of(coded)
    rest = coded[coded.size - num_values :]
    exponents, words = decode(coded[: coded.size - num_values]), np.empty(num_values, np.uint16)
    library().join_bfloat16(_address(exponents), _address(rest), num_values, _address(words))
    return words


def _length_of(coded):
    return int.from_bytes(coded[:LENGTH_BYTES].tobytes(), "little")
