"""A language model tells a story with a compressed KV-cache: token for token the same, in fewer bytes.

    python examples/story_cache.py

The model is small and real (data/README.md). Where there is a GPU, older tokens stay in host memory, compressed, and
each layer's are decoded on the GPU while the layer before it computes.
"""

import inspect

import torch
from stories260k import FIRST, load_model, text_of
from transformers import DynamicCache

import ibp
from ibp.integrations.transformers import CompressedCache

NEW_TOKENS = 250


def tell(model, cache, device):
    """Token ids [tokens] of a story, each the most likely one."""
    first = {name: tensor.to(device) for name, tensor in FIRST.items()}
    # Before transformers 5.24 the argument `cache` is called `past_key_values`.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model.generate(**first, **{name: cache}, max_new_tokens=NEW_TOKENS, do_sample=False)[0].cpu()


def main():
    device = "cuda" if ibp.cuda_is_available() else "cpu"
    model = load_model().to(device)
    plain = tell(model, DynamicCache(config=model.config), device)

    cache = CompressedCache(config=model.config)
    story = tell(model, cache, device)

    print(text_of(story), "...\n")
    print(cache)
    print("Every token is the same." if torch.equal(story, plain) else "TOKENS DIFFER.")
    return 0 if torch.equal(story, plain) else 1


if __name__ == "__main__":
    raise SystemExit(main())
