"""A language model tells a story with its weights compressed: token for token the same, a third fewer bytes.

    python examples/story.py

The model is small and real (data/README.md). Needs the package transformers. Where there is a GPU, the weights stay in
host memory, compressed, and are decoded on the GPU layer by layer.
"""

import torch
from stories260k import FIRST, load_model, text_of

import ibp

NEW_TOKENS = 120


def tell(model, device):
    """Token ids [tokens] of a story, each the most likely one."""
    first = {name: tensor.to(device) for name, tensor in FIRST.items()}
    return model.generate(**first, max_new_tokens=NEW_TOKENS, do_sample=False)[0].cpu()


def main():
    device = "cuda" if ibp.cuda_is_available() else "cpu"
    plain = tell(load_model().to(device), device)

    model = load_model()
    offloaded = ibp.offload(model, device, min_bytes=4096)  # 1 MiB unless said otherwise: this model is tiny

    story = tell(model, device)
    print(text_of(story), "...\n")
    print(offloaded)
    print("Every token is the same." if torch.equal(story, plain) else "TOKENS DIFFER.")
    return 0 if torch.equal(story, plain) else 1


if __name__ == "__main__":
    raise SystemExit(main())
