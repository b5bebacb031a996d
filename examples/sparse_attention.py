"""Sparse attention over a long context whose keys and values stay in host memory, coded.

    python examples/sparse_attention.py [--tokens 131072] [--device cpu]

For every token that is generated, each head looks at few pages of 16 tokens: those whose keys can have the largest
product with its queries, by the least and the greatest of each element that a page has (the estimate of Quest,
ICML 2024). The bounds stay on the GPU; keys and values are rows of two `ibp.kv.KVRows` in pinned host memory, and those
that are chosen come through a cache of coded rows on the GPU. A step is one CUDA graph: the new token's rows are put,
pages are scored and chosen, their rows are selected, and attention is computed over them.

The same steps run with raw rows beside, and every result has to be the same bits.
"""

import argparse
import sys

import torch

import ibp

PAGE_TOKENS = 16
DTYPE = torch.bfloat16


class RawRows:
    """Rows as they are, on the device: what `ibp.kv.KVRows` has to equal."""

    def __init__(self, num_tokens, num_heads, dim, device):
        self.rows = torch.zeros(num_tokens, num_heads, dim, dtype=DTYPE, device=device)
        self.heads = torch.arange(num_heads, device=device).unsqueeze(1)

    def store(self, layer, rows, tokens):
        self.rows.index_copy_(0, tokens, rows)

    def load(self, layer, tokens, per_head):
        return self.rows[tokens, self.heads]


class SparseAttention:
    """One layer. q: [heads, queries a head, dim]; k, v: [1, heads, dim]; position: int64 [1] on the device.

    Args:
        keys, values: where rows of tokens are put and selected from.
        num_pages: of the context at most.
        num_chosen: pages that each head looks at.
    """

    def __init__(self, keys, values, num_pages, num_chosen, num_heads, dim, device):
        self.keys, self.values, self.num_chosen = keys, values, num_chosen
        self.least = torch.full((num_heads, num_pages, dim), float("inf"), dtype=DTYPE, device=device)
        self.greatest = torch.full_like(self.least, -float("inf"))
        self.pages = torch.arange(num_pages, device=device)
        self.in_page = torch.arange(PAGE_TOKENS, device=device)

    def prefill(self, k, v):
        """Keys and values of a prompt: [tokens, heads, dim]."""
        tokens = torch.arange(len(k), device=k.device)
        self.keys.store(0, k, tokens)
        self.values.store(0, v, tokens)
        whole = len(k) // PAGE_TOKENS
        paged = k[: whole * PAGE_TOKENS].view(whole, PAGE_TOKENS, *k.shape[1:])
        self.least[:, :whole] = paged.amin(1).transpose(0, 1)
        self.greatest[:, :whole] = paged.amax(1).transpose(0, 1)
        for token in range(whole * PAGE_TOKENS, len(k)):
            self._bound(k[token : token + 1], tokens[token : token + 1] // PAGE_TOKENS)

    def step(self, q, k, v, position):
        """Attention of a new token over the pages that each head chooses: [heads, queries a head, dim] of float32."""
        page = position // PAGE_TOKENS
        self.keys.store(0, k, position)
        self.values.store(0, v, position)
        self._bound(k, page)
        tokens = self._chosen(q, page)
        scores = q.float() @ self.keys.load(0, tokens, per_head=True).float().transpose(1, 2)
        scores = scores * q.shape[-1] ** -0.5
        scores = scores.masked_fill((tokens > position).unsqueeze(1), -float("inf"))
        return scores.softmax(-1) @ self.values.load(0, tokens, per_head=True).float()

    def _bound(self, k, page):
        k = k.transpose(0, 1)
        for bounds, of in ((self.least, torch.minimum), (self.greatest, torch.maximum)):
            bounds.index_copy_(1, page, of(bounds.index_select(1, page), k))

    def _chosen(self, q, page):
        """Tokens of the pages with the largest bounds, the newest among them: [heads, tokens]."""
        q = q.float()
        least, greatest = (torch.nan_to_num(bounds.float(), 0, 0, 0) for bounds in (self.least, self.greatest))
        scores = q.clamp(min=0) @ greatest.transpose(1, 2) + q.clamp(max=0) @ least.transpose(1, 2)
        scores = scores.amax(1).masked_fill(self.pages > page, -float("inf"))
        scores = scores.masked_fill(self.pages == page, float("inf"))
        chosen = scores.topk(self.num_chosen, dim=1).indices
        return (chosen.unsqueeze(-1) * PAGE_TOKENS + self.in_page).flatten(1)


class Step:
    """A step with inputs of its own, replayed as a CUDA graph on a GPU."""

    def __init__(self, attention, inputs):
        self.attention, self.inputs, self.graph = attention, [tensor.clone() for tensor in inputs], None
        self.result = attention.step(*self.inputs)  # the same token may be put again
        if self.inputs[0].is_cuda:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = attention.step(*self.inputs)

    def __call__(self, inputs):
        for own, given in zip(self.inputs, inputs):
            own.copy_(given)
        if self.graph is None:
            self.result = self.attention.step(*self.inputs)
        else:
            self.graph.replay()
        return self.result


def tokens_of(generator, num_tokens, num_heads, dim, device):
    """Keys or values of a context."""
    rows = torch.randn(num_tokens, num_heads, dim, generator=generator) * 0.02
    return rows.to(DTYPE).to(device)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072, help="of the context")
    parser.add_argument("--steps", type=int, default=32, help="tokens that are generated")
    parser.add_argument("--pages", type=int, default=128, help="that each head looks at, of 16 tokens")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--cache-mib", type=float, default=32, help="of the GPU, for keys and for values each")
    parser.add_argument("--device", default="cuda" if ibp.cuda_is_available() else "cpu")
    args = parser.parse_args(argv)
    device, shape = torch.device(args.device), (args.heads, args.dim)
    num_pages = -(-(args.tokens + args.steps) // PAGE_TOKENS)
    generator = torch.Generator().manual_seed(0)
    k, v = (tokens_of(generator, args.tokens, *shape, device) for _ in range(2))

    def coded(sample):
        return ibp.kv.KVRows(
            sample[:4096],
            num_layers=1,
            num_tokens=num_pages * PAGE_TOKENS,
            num_heads=args.heads,
            cache_bytes=int(args.cache_mib * 2**20),
            device=device,
        )

    keys, values = coded(k), coded(v)
    raw = [RawRows(num_pages * PAGE_TOKENS, *shape, device) for _ in range(2)]
    layers = [SparseAttention(*rows, num_pages, args.pages, *shape, device) for rows in ((keys, values), raw)]
    for layer in layers:
        layer.prefill(k, v)
    q = torch.randn(args.heads, 4, args.dim, generator=generator)
    steps, wrong = [], 0
    for number in range(args.steps):  # queries of one token are like those of the one before
        q = 0.95 * q + 0.3 * torch.randn(q.shape, generator=generator)
        new = [tokens_of(generator, 1, *shape, device) for _ in range(2)]
        inputs = [q.to(device), *new, torch.tensor([args.tokens + number], device=device)]
        steps = steps or [Step(layer, inputs) for layer in layers]
        results = [step(inputs) for step in steps]
        wrong += not torch.equal(*results)
    keys.check(), values.check()
    stats, looked_at = keys.stats(), args.pages * PAGE_TOKENS
    print(f"{args.tokens:,} tokens, {args.heads} heads of {args.dim}; each looks at {looked_at:,} of them")
    print(
        f"host memory: {keys.pool_bytes + values.pool_bytes:,} bytes, {keys.gain:.2f} times as many tokens as raw ones"
    )
    print(f"keys: {stats.hits / max(1, stats.hits + stats.misses):.1%} of the rows came from the cache")
    print(f"{args.steps} steps, {wrong} of which differ from those with raw rows")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
