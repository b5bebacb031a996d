"""Compresses a checkpoint by several processes, which share codebooks and divide its files.

    torchrun --standalone --nproc-per-node 2 examples/torchrun_compress.py IN OUT

On several machines IN and OUT are on a file system that all of them see. Without arguments a small model is made up,
compressed, and compared bit for bit.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import ibp

if on_gpu := ibp.cuda_is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()


def made_up(directory):
    """A checkpoint of 8 layers, by rank 0."""
    layers = {f"layers.{i}.weight": (torch.randn(512, 1024) * 0.02).bfloat16() for i in range(8)}
    ibp.save(directory / "model.safetensors", layers)
    return layers


given = sys.argv[1:]
shared = [tempfile.mkdtemp(prefix="ibp-") if rank == 0 and not given else None]
dist.broadcast_object_list(shared)
directory = Path(shared[0] or ".")
layers = made_up(directory) if not given and rank == 0 else {}
dist.barrier()
source, target = given or (directory / "model.safetensors", directory / "small.safetensors")
report = ibp.checkpoints.compress(source, target, group=dist.group.WORLD, shard_bytes=4 << 20 if not given else 5 << 30)
if rank == 0:
    print(report)
    with ibp.open(report.path) as file:
        file.verify(content=True)
        same = all(torch.equal(ibp.decompress(file[name], device="cpu"), layer) for name, layer in layers.items())
    print(f"{len(report.files)} files, the same bits: {same}")
    if not given:
        shutil.rmtree(directory)
dist.destroy_process_group()
