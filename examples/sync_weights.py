"""Reinforcement learning in several processes: a trainer improves a policy on what workers have tried, and after every
step sends them what changed in its BF16 weights, a few hundredths of their bytes. They have its bits, every time.

    torchrun --nproc-per-node 3 examples/sync_weights.py

Rank 0 trains, with weights of 32 bits of its own; the others try actions in a game of one move: of 16 actions one wins,
which one depends on what they see. GPUs are used where there is one for each process.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ibp

SEEN, ACTIONS, GAMES, STEPS, RATE = 64, 16, 512, 20, 2e-6
on_gpu = ibp.cuda_is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # all begin with the same weights
shape = [SEEN, 512, 512, ACTIONS]
policy = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in zip(shape, shape[1:]))).to(device)
winning = torch.randn(SEEN, ACTIONS).to(device)
masters = {name: weight.detach().clone() for name, weight in policy.state_dict().items()}  # of the trainer
policy.bfloat16()
torch.manual_seed(rank)


def logits(seen):
    for layer in policy[:-1]:
        seen = layer(seen).relu()
    return policy[-1](seen)


def play():
    """What a worker saw, what it did, and 1 where that won: float [games, SEEN + 2]."""
    seen = torch.randn(GAMES, SEEN, device=device)
    with torch.no_grad():
        done = logits(seen.bfloat16()).float().softmax(1).multinomial(1)
    won = done == (seen @ winning).argmax(1, keepdim=True)
    return torch.cat([seen, done, won], 1)


def train(games, moments):
    """A step of Adam on the masters, by the gradient of the policy in BF16; the policy becomes what they round to."""
    seen, done, won = games[:, :SEEN], games[:, SEEN].long(), games[:, SEEN + 1]
    loss = (F.cross_entropy(logits(seen.bfloat16()).float(), done, reduction="none") * (won - won.mean())).mean()
    policy.zero_grad()
    loss.backward()
    for name, weight in policy.named_parameters():
        first, second = moments.setdefault(name, [torch.zeros_like(masters[name]) for _ in range(2)])
        first.lerp_(weight.grad.float(), 0.1)
        second.lerp_(weight.grad.float() ** 2, 0.05)
        masters[name] -= RATE * first / (second.sqrt() + 1e-8)
        weight.data.copy_(masters[name])


moments, sent, whole = {}, 0, sum(weight.nbytes for weight in policy.state_dict().values())
for _ in range(STEPS):
    played = [torch.empty(GAMES, SEEN + 2, device=device) for _ in range(world)]
    dist.all_gather(played, play())
    delta = None
    if rank == 0:
        before = {name: weight.clone() for name, weight in policy.state_dict().items()}
        train(torch.cat(played[1:] or played), moments)
        delta = ibp.deltas.make(policy.state_dict(), before)
    delta = ibp.distributed.broadcast_delta(delta, src=0)
    if rank != 0:
        delta.apply_(policy.state_dict())  # refused, and nothing changed, were the worker's weights other ones
    sent += delta.stored_bytes
    prints = [None] * world
    dist.all_gather_object(prints, [ibp.deltas.fingerprint(weight) for weight in policy.state_dict().values()])
    assert prints == world * prints[:1], "the workers have other weights than the trainer"

if rank == 0:
    share = sent / STEPS / whole
    print(f"{STEPS} steps, {world - 1} workers with the trainer's bits: sent {share:.1%} of the weights a step")
dist.destroy_process_group()
