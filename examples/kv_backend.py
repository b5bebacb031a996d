"""A KV backend for an engine of your own: blocks that the engine gives up stay coded in host memory, and come back bit
for bit when a prompt begins with the same tokens.

    python examples/kv_backend.py

`CodedBackend` is the whole adapter. `Engine` stands for yours, with a paged cache that prompts share.
"""

import hashlib

import torch

import ibp

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, WIDTH, POOL_BYTES = 4, 12, 16, 2, 64, 4 << 20


class CodedBackend:
    """Keeps blocks of a paged cache by keys. caches: a tensor [blocks, ...] of keys and values for each layer."""

    def __init__(self, caches, pool_bytes):
        self.caches, self.pages = caches, ibp.kv.KeyedPages(pool_bytes, device=caches[0].device)

    def save(self, keys, blocks):
        """Codes blocks that are not here yet. Blocks that were used longest ago make room for them."""
        for key, block in zip(keys, blocks):
            self.pages.put(key, torch.stack([cache[block] for cache in self.caches]))

    def load(self, keys, blocks):
        """Decodes pages to blocks, as many as are here before the first that is not. Returns how many."""
        page = torch.stack([cache[0] for cache in self.caches])
        for number, (key, block) in enumerate(zip(keys, blocks)):
            if not self.pages.get(key, page):
                return number
            for cache, values in zip(self.caches, page):
                cache[block].copy_(values)
        return len(keys)


class Engine:
    """Computes keys and values of prompts, block by block, in few blocks that prompts use in turn."""

    def __init__(self, device):
        torch.manual_seed(0)
        shape = BLOCKS, 2, BLOCK_TOKENS, HEADS, WIDTH  # keys and values
        self.caches = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
        self.weights = torch.randn(LAYERS, 256, 2 * HEADS * WIDTH, device=device) * 0.02
        self.backend, self.num_computed = CodedBackend(self.caches, POOL_BYTES), 0

    def compute(self, tokens, block):
        """Computes one block, the last one of these tokens. It depends on all tokens before it."""
        self.num_computed += 1
        for cache, weights in zip(self.caches, self.weights):
            states = weights[tokens].cumsum(0)[-BLOCK_TOKENS:] / len(tokens) ** 0.5
            cache[block] = states.view(BLOCK_TOKENS, 2, HEADS, WIDTH).transpose(0, 1)

    def prefill(self, prompt):
        """Returns the keys and values of a prompt of whole blocks."""
        ends = range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)
        keys = [hashlib.sha256(bytes(prompt[:end].tolist())).digest() for end in ends]
        blocks = torch.randperm(BLOCKS)[: len(keys)].tolist()
        for number in range(self.backend.load(keys, blocks), len(keys)):
            self.compute(prompt[: ends[number]], blocks[number])
        self.backend.save(keys, blocks)
        return torch.stack([cache[blocks] for cache in self.caches])


def main():
    device = "cuda" if ibp.cuda_is_available() else "cpu"
    engine, shared = Engine(device), torch.randint(256, (128,))
    prompts = [torch.cat((shared, torch.randint(256, (64,)))) for _ in range(4)]
    same = all(torch.equal(engine.prefill(prompt), Engine(device).prefill(prompt)) for prompt in prompts * 2)
    print(f"{engine.num_computed} of {8 * 12} blocks were computed; the others came from host memory")
    print(engine.backend.pages.stats(), "All bits are the same." if same else "BITS DIFFER.", sep="\n")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
