"""Trains a small net with FSDP2, with torch's all-gathers and with those whose tensors travel coded.

torchrun --standalone --nproc-per-node 2 examples/fsdp_compressed.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ibp
import ibp.distributed

on_gpu = ibp.cuda_is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def trained(is_coded):
    """The losses of a few steps."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(4)]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(256, 1)).to(device)
    for layer in net:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    if is_coded:
        ibp.distributed.compress_all_gather(net, level="default")  # coded whatever the link; by itself where it pays
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-3), []
    for step in range(5):
        torch.manual_seed(step)
        x = torch.randn(32, 256, device=device)
        loss = (net(x).squeeze(1) - x.sum(1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


plain, coded = trained(False), trained(True)
if dist.get_rank() == 0:
    print("losses:", " ".join(f"{loss:.2f}" for loss in plain))
    print("the same bits:", plain == coded)
dist.destroy_process_group()
