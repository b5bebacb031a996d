"""The language model of data/stories260k.npz, 260 thousand parameters, as a transformers LlamaForCausalLM.

model = load_model()                # weights in BF16, as the file has them
ids = model.generate(**FIRST, max_new_tokens=100, do_sample=False)
print(text_of(ids[0]))
"""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

PATH = Path(__file__).resolve().parent.parent / "data" / "stories260k.npz"
LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, HIDDEN, VOCABULARY, LONGEST = 5, 8, 4, 8, 64, 172, 512, 512
START = 1  # begins a story, and stands between two
FIRST = {"input_ids": torch.tensor([[START]]), "attention_mask": torch.ones(1, 1, dtype=torch.int64)}
# The matrices of `weights_bf16`, one below the other, and their rows in each layer.
MATRICES = {"wq": 64, "wk": 32, "wv": 32, "wo": 64, "w1": HIDDEN, "w3": HIDDEN}


def load_model(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """The model on the CPU, in evaluation mode; its output layer is its embedding."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=LONGEST,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=START,
        eos_token_id=START,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.load_state_dict(_weights())
    return model


def text_of(ids: torch.Tensor) -> str:
    """The text of token ids [tokens]."""
    with np.load(PATH) as file:
        pieces = [bytes(piece) for piece in file["vocab"]]
    shown = [_byte(pieces[token]) for token in ids.tolist() if token != START]
    return b"".join(shown).decode(errors="replace").strip()


def _byte(piece: bytes) -> bytes:
    """A piece such as b"<0x0A>" stands for one byte."""
    return bytes([int(piece[3:5], 16)]) if piece.startswith(b"<0x") else piece


def _weights() -> dict[str, torch.Tensor]:
    """The weights by the names of transformers."""
    with np.load(PATH) as file:
        arrays = {name: torch.from_numpy(file[name]).view(torch.bfloat16) for name in file if name.endswith("_bf16")}
    rows = arrays["weights_bf16"].split([VOCABULARY, *(LAYERS * n for n in MATRICES.values())])
    by_layer = {name: part.view(LAYERS, -1, WIDTH) for name, part in zip(MATRICES, rows[1:])}
    by_layer |= {name: arrays[f"{name}_bf16"] for name in ("w2", "ra", "rf")}
    names = {
        "wv": "self_attn.v_proj",
        "wo": "self_attn.o_proj",
        "w1": "mlp.gate_proj",
        "w3": "mlp.up_proj",
        "w2": "mlp.down_proj",
        "ra": "input_layernorm",
        "rf": "post_attention_layernorm",
    }
    weights = {
        "model.embed_tokens.weight": rows[0],
        "lm_head.weight": rows[0],
        "model.norm.weight": arrays["rfin_bf16"],
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights[f"{prefix}self_attn.q_proj.weight"] = _for_rotated_halves(by_layer["wq"][layer])
        weights[f"{prefix}self_attn.k_proj.weight"] = _for_rotated_halves(by_layer["wk"][layer])
        weights |= {f"{prefix}{name}.weight": by_layer[key][layer] for key, name in names.items()}
    return weights


def _for_rotated_halves(weight: torch.Tensor) -> torch.Tensor:
    """RoPE turns values (0, 1), (2, 3) and so on of a head in the file; transformers turns the first half of a head
    against the second. The rows of q and k change places accordingly."""
    return weight.view(-1, HEAD_DIM // 2, 2, WIDTH).transpose(1, 2).reshape(-1, WIDTH)
