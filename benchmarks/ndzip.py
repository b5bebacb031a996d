"""ndzip's coder on the CPU, whose bytes are those of its coder on GPUs, for ratio.py.

IBP_NDZIP names a clone of github.com/celerity/ndzip. Its sources for arrays of FP32 in one dimension, which saves more
of these sets than two, are compiled with a C++ compiler ($CXX, or c++) into a directory for temporary files, which
takes some seconds.
"""

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import torch

OURS = """
extern "C" uint32_t bound(uint32_t size) { return ndzip::compressed_length_bound<float>({size}); }
extern "C" uint32_t encode(uint32_t size, const float *from, uint32_t *to)
{
    return ndzip::make_cpu_offloader<float>(1, 1)->compress(from, {size}, to);
}
extern "C" void decode(uint32_t size, const uint32_t *from, uint32_t num_words, float *to)
{
    ndzip::make_cpu_offloader<float>(1, 1)->decompress(from, num_words, to, {size});
}
"""
CONFIGURATIONS = [
    (dtype, dimensions) for dtype in ("float", "double") for dimensions in (1, 2, 3)
]  # its factory has all
FLAGS = "-O2 -std=c++17 -fPIC -w -DNDZIP_HIPSYCL_SUPPORT=0 -DNDZIP_CUDA_SUPPORT=0".split()
HEADERS = "".join(f"#include <{name}>\n" for name in ("cassert", "initializer_list", "iterator", "vector"))


def sources_of(repository):
    """Texts of the files to compile. FileNotFoundError: this is no clone of ndzip."""
    home = repository / "src" / "ndzip"
    for name in ("common.cc", "cpu_factory.cc", "cpu_codec.inl"):
        if not (home / name).is_file():
            raise FileNotFoundError(f"{repository} has no src/ndzip/{name}; wanted a clone of ndzip")
    yield f'{HEADERS}#include "{home}/common.cc"\n'
    yield f'{HEADERS}#include "{home}/cpu_factory.cc"\n{OURS}'
    for dtype, dimensions in CONFIGURATIONS:
        which = f"#define DATA_TYPE {dtype}\n#define DIMENSIONS {dimensions}\n#define SPLIT_CONFIGURATION_cpu_encoder\n"
        yield f'{HEADERS}{which}#include "{home}/cpu_codec.inl"\n'


@functools.cache
def library(repository):
    """The functions of OURS."""
    with tempfile.TemporaryDirectory() as name:
        files = []
        for number, text in enumerate(sources_of(repository)):
            files.append(Path(name) / f"{number}.cc")
            files[-1].write_text(text)
        built = Path(name) / "ndzip.so"
        command = [os.environ.get("CXX", "c++"), *FLAGS, f"-I{repository / 'include'}", "-shared", *files, "-o", built]
        subprocess.run(command, check=True)
        return ctypes.CDLL(built)


def repository():
    """The clone, as IBP_NDZIP names it; None where it is not set."""
    return Path(os.environ["IBP_NDZIP"]).resolve() if os.environ.get("IBP_NDZIP") else None


def coded_bytes(data):
    """How many bytes uint8 data take; what follows the last whole word counts as it is. AssertionError: the bits do not
    come back."""
    of, words = library(repository()), data[: data.numel() // 4 * 4].contiguous().view(torch.int32)

    def address(tensor):
        return ctypes.c_void_p(tensor.data_ptr())

    coded, back = torch.empty(of.bound(words.numel()), dtype=torch.int32), torch.empty_like(words)
    length = of.encode(words.numel(), address(words), address(coded))
    of.decode(words.numel(), address(coded), length, address(back))
    if not torch.equal(back, words):
        raise AssertionError("ndzip: bits differ")
    return 4 * length + data.numel() % 4
