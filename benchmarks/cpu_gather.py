"""The ways in which users fetch rows without compression: the CPU gathers them, and they are copied to the GPU."""

import contextlib

import torch

NUM_BUFFERS = 4
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = (
    1 << 20,
    8 << 20,
)  # Smaller copies waste the link; larger ones leave it idle at the start and the end.
# There are at least this many chunks, unless they would be too small, so that gathering overlaps with copying.
CHUNKS = 8


class PipelinedGather:
    """x[ids] as fast as a machine with idle cores can bring it to a GPU. torch's intra-op threads gather the rows into
    pinned chunks, and the copy engine moves each chunk while the next ones are gathered.

    Args:
        host: 2-D tensor [N, C] in host memory, pinned or not.
        num_ids: the largest number of ids of a call.
    """

    def __init__(self, host, num_ids, device):
        self.host, self.on_gpu = host, torch.device(device).type == "cuda"
        row_bytes = host.shape[1] * host.element_size()
        chunk_bytes = min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, num_ids * row_bytes // CHUNKS))
        self.chunk_rows = max(1, min(num_ids, chunk_bytes // row_bytes))
        self.buffers = [
            torch.empty(self.chunk_rows, host.shape[1], dtype=host.dtype, pin_memory=self.on_gpu)
            for _ in range(NUM_BUFFERS)
        ]
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None
        self.copied = [torch.cuda.Event() for _ in range(NUM_BUFFERS)] if self.on_gpu else []

    def __call__(self, ids, out):
        """Writes x[ids] to out and returns it. It is written when the current stream gets there. ids: int64 [K] on the
        CPU. out: [K, C] on the GPU."""
        if self.on_gpu:
            self.stream.wait_stream(torch.cuda.current_stream())
        for i, part in enumerate(ids.split(self.chunk_rows)):
            place = i % NUM_BUFFERS
            if self.on_gpu:
                self.copied[place].synchronize()  # This returns at once if the buffer was never used.
            chunk = self.buffers[place][: len(part)]
            torch.index_select(self.host, 0, part, out=chunk)
            with torch.cuda.stream(self.stream) if self.on_gpu else contextlib.nullcontext():
                out[i * self.chunk_rows :][: len(part)].copy_(chunk, non_blocking=True)
                if self.on_gpu:
                    self.copied[place].record(self.stream)
        if self.on_gpu:
            torch.cuda.current_stream().wait_stream(self.stream)
        return out
