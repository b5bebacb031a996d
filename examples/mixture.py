"""A mixture whose experts stay in host memory: token for token the same, and few bytes for each token.

    python examples/mixture.py

Draws hits.png, where matplotlib is installed. The weights are random, so the picture shows how the cache fills, not how
a trained router chooses. Needs the package transformers; without a GPU the CPU decodes.
"""

import importlib.util

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import ibp

EXPERTS = {"moe_intermediate_size": 128, "num_experts": 64, "num_experts_per_tok": 8}
OTHERS = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
CACHE_BYTES, NEW_TOKENS = 24 << 20, 60


def draw(tokens, path):
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 1, sharex=True, layout="constrained")
    for panel, values, name in zip(panels, zip(*tokens), ("hits", "bytes on the link")):
        panel.plot(range(1, len(values) + 1), values)
        panel.set_ylabel(name)
    panels[-1].set_xlabel("token")
    figure.savefig(path)


def main():
    device, seen = "cuda" if ibp.cuda_is_available() else "cpu", []
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS, **OTHERS)).bfloat16().eval().to(device)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    prompt = torch.tensor([[1, 2, 3]], device=device)
    plain = model.generate(prompt, **options)

    offloaded = ibp.offload(model, device, resident_bytes=CACHE_BYTES, min_bytes=1 << 16)

    def note(ids, scores, **_):  # a criterion of `generate` that never stops it
        stats = offloaded.stats()
        seen.append((stats.expert_hit_rate, stats.link_bytes))
        offloaded.reset_stats()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    tokens = model.generate(prompt, stopping_criteria=[note], **options)
    print(offloaded)
    print(f"The last token: {seen[-1][0]:.0%} hits, {seen[-1][1]:,} bytes on the link")
    if importlib.util.find_spec("matplotlib"):
        draw(seen[1:], "hits.png")  # the first is the prompt's
    print("Every token is the same." if torch.equal(tokens, plain) else "TOKENS DIFFER.")
    return 0 if torch.equal(tokens, plain) else 1


if __name__ == "__main__":
    raise SystemExit(main())
