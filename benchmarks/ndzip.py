"""ndzip's coders on the CPU and on GPUs, for ratio.py and transfers.py.

IBP_NDZIP names a clone of github.com/celerity/ndzip. Only its sources for FP32 arrays of one dimension are used, which
save more on the sets here than those for two dimensions. A C++ compiler ($CXX, or c++) or nvcc compiles them to a
temporary directory in a few seconds. Both coders write the same bytes.
"""

import ctypes
import functools
import os
import subprocess
import tempfile
import weakref
from pathlib import Path

import torch

from . import harness

COMMON = """
#include <cassert>
#include <initializer_list>
#include <iterator>
#include <vector>
#define DATA_TYPE float
#define DIMENSIONS 1
{defines}
#include "{codec}"
#include "common.cc"
using Profile = ndzip::detail::profile<float, 1>;
extern "C" uint32_t bound(uint32_t size) {{ return ndzip::compressed_length_bound<float>({{size}}); }}
"""
ON_CPU = """
extern "C" uint32_t encode(uint32_t size, const float *from, uint32_t *to)
{
    return ndzip::detail::cpu::serial_compressor<Profile>{}.compress(from, {size}, to);
}
extern "C" void decode(uint32_t size, const uint32_t *from, float *to)
{
    ndzip::detail::cpu::serial_decompressor<Profile>{}.decompress(from, to, {size});
}
"""
ON_GPU = """
struct Coder {
    ndzip::detail::gpu_cuda::cuda_compressor_impl<Profile> compressor;
    ndzip::detail::gpu_cuda::cuda_decompressor_impl<Profile> decompressor;
    explicit Coder(uint32_t size) : compressor(nullptr, ndzip::extent{size}) {}
};
extern "C" Coder *new_coder(uint32_t size) { return new Coder(size); }
extern "C" void delete_coder(Coder *coder) { delete coder; }
extern "C" void encode(Coder *coder, uint32_t size, const float *from, uint32_t *to, uint32_t *num_words)
{
    coder->compressor.compress(from, {size}, to, num_words);
}
extern "C" void decode(Coder *coder, uint32_t size, const uint32_t *from, float *to)
{
    coder->decompressor.decompress(from, to, {size});
}
"""
FLAGS = "-O2 -std=c++17 -w -shared -DNDZIP_HIPSYCL_SUPPORT=0".split()


def repository():
    """Returns the clone that IBP_NDZIP names, or None if the variable is not set."""
    return Path(os.environ["IBP_NDZIP"]).resolve() if os.environ.get("IBP_NDZIP") else None


def commit():
    """Returns the commit of the clone. Raises CalledProcessError if the directory is no clone."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository(), check=True, capture_output=True, text=True)
    return found.stdout.strip()


def source_of(clone, on_gpu):
    """Returns the text of a source that includes all others. Raises FileNotFoundError if the directory is not a clone
    of ndzip."""
    codec = "cuda_codec.inl" if on_gpu else "cpu_codec.inl"
    for name in (codec, "common.cc"):
        if not (clone / "src" / "ndzip" / name).is_file():
            raise FileNotFoundError(f"{clone} has no src/ndzip/{name}; wanted a clone of ndzip")
    defines = "" if on_gpu else "#define SPLIT_CONFIGURATION_cpu_encoder"
    return COMMON.format(defines=defines, codec=codec) + (ON_GPU if on_gpu else ON_CPU)


def compiler(on_gpu):
    if not on_gpu:
        return [os.environ.get("CXX", "c++"), "-fPIC", "-DNDZIP_CUDA_SUPPORT=0"]
    major, minor = torch.cuda.get_device_capability()
    flags = f"-arch=sm_{major}{minor} --extended-lambda --expt-relaxed-constexpr -Xcompiler -fPIC"
    return ["nvcc", *flags.split(), "-DNDZIP_CUDA_SUPPORT=1"]


@functools.cache
def library(clone, on_gpu):
    """Returns the functions of ON_CPU or ON_GPU."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / f"ndzip.{'cu' if on_gpu else 'cc'}"
        source.write_text(source_of(clone, on_gpu))
        headers = [f"-I{clone / folder}" for folder in ("include", "src/ndzip")]
        functions = harness.compiled([*compiler(on_gpu), *FLAGS, *headers], source)
    if on_gpu:
        functions.new_coder.restype = ctypes.c_void_p
    return functions


def address(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def coded_bytes(data):
    """Returns how many bytes uint8 data take. Bytes after the last whole word count as they are. Raises AssertionError
    if the bits do not come back."""
    of, words = library(repository(), False), data[: data.numel() // 4 * 4].contiguous().view(torch.int32)
    coded, back = torch.empty(of.bound(words.numel()), dtype=torch.int32), torch.empty_like(words)
    length = of.encode(words.numel(), address(words), address(coded))
    of.decode(words.numel(), address(coded), address(back))
    if not torch.equal(back, words):
        raise AssertionError("ndzip: bits differ")
    return 4 * length + data.numel() % 4


class GpuCoder:
    """A coder of uint8 tensors of one size, a multiple of four bytes, on the default stream. It has the interface of
    the coders of ibp.codecs."""

    def __init__(self, num_bytes, device):
        self.of, self.num_words = library(repository(), True), num_bytes // 4
        self.length = torch.zeros(1, dtype=torch.int32, device=device)
        self.coder = ctypes.c_void_p(self.of.new_coder(self.num_words))
        weakref.finalize(self, self.of.delete_coder, self.coder)

    def room(self, data):
        return torch.empty(4 * self.of.bound(self.num_words), dtype=torch.uint8, device=data.device)

    def encode(self, data, room):
        self.of.encode(self.coder, self.num_words, address(data), address(room), address(self.length))
        return room[: 4 * int(self.length)]

    def decode(self, coded, out):
        self.of.decode(self.coder, self.num_words, address(coded), address(out))
