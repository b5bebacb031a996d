"""What the library uses of nvCOMP's package, by zlib and on the CPU."""

import types
import zlib

import numpy as np
import torch


def as_array(x, stream):
    return types.SimpleNamespace(data=x.view(torch.uint8), buffer_size=0)


class FakeCodec:
    """Codes by zlib. Of floats it codes the last bytes alone, and leaves the others as they are."""

    def __init__(self, *, algorithm, device_id, cuda_stream, uncomp_chunk_size, data_type="|u1"):
        self.size = int(data_type[-1]) if data_type[1] == "f" else 0

    def get_max_comp_buffer_size(self, array):
        return 2 * array.data.numel() + 1024

    def compression_config(self, num_bytes):
        return num_bytes

    def decompression_config(self, coding):
        return coding

    def encode(self, array, out, compression_config):
        data = array.data.numpy()
        if self.size:
            exponents = zlib.compress(data[self.size - 1 :: self.size].tobytes())
            others = np.delete(data.reshape(-1, self.size), self.size - 1, axis=1).tobytes()
            coded = len(exponents).to_bytes(8, "little") + exponents + others
        else:
            coded = zlib.compress(data.tobytes())
        out.data[: len(coded)] = torch.frombuffer(bytearray(coded), dtype=torch.uint8)
        out.buffer_size = len(coded)

    def decode(self, array, out, decompression_config):
        data = array.data.numpy().tobytes()
        if self.size:
            end = 8 + int.from_bytes(data[:8], "little")
            whole = np.empty((decompression_config // self.size, self.size), np.uint8)
            whole[:, -1] = np.frombuffer(zlib.decompress(data[8:end]), np.uint8)
            others = whole[:, :-1].size
            whole[:, :-1] = np.frombuffer(data[end : end + others], np.uint8).reshape(-1, self.size - 1)
            data = whole.tobytes()
        else:
            data = zlib.decompressobj().decompress(data)
        out.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
