"""What a dense decoder that is served from one GPU could reach at most. tools/serve_vllm.py writes the measured share
of it beside each load.

The bound follows from three things. Memory: the keys and values of all running requests have to fit beside the weights,
so that a request holds its tokens only for as many steps as the room allows. Products: a step multiplies by every
matrix once, at the rates that benchmarks/linear.py measured on this kind of GPU, for as many vectors as requests run.
Attention: a step reads the keys and values of the running requests at the rate of device memory. Nothing else costs
time in it: no host, no norms, no samplers, no memory for activations.
"""

import csv
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

VALUE_BYTES = 2  # of BF16
PIECE = 8192  # tokens of prompts in a step, as vLLM's server takes them on a card of 80 GB
PRODUCTS = {False: "cuBLAS", True: "ibp.linear"}  # arms of linear.csv, by whether the weights are coded


class Load(NamedTuple):
    """Requests that come at once, and how many tokens each brings and gets."""

    requests: int
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def parse(cls, text):
        """Returns the load that a text such as 256x128+1024 names."""
        requests, tokens = text.split("x")
        prompt, new = tokens.split("+")
        load = cls(int(requests), int(prompt), int(new))
        if min(load) < 1:
            raise ValueError(f"wanted numbers from 1, got {text}")
        return load


class Bound(NamedTuple):
    """tokens_per_s: the most tokens a second. sequences: how many requests run in a step on average then."""

    tokens_per_s: float
    sequences: float


class Rates:
    """Times of products on one kind of GPU, read from the linear.csv that benchmarks/linear.py has written.

    Attributes:
        memory_gbps: bytes that device memory reads or writes a second, by torch's copy.
    """

    def __init__(self, path: Path) -> None:
        self._us: dict[str, dict[int, list[tuple[int, float]]]] = {}  # by arm and bytes: (vectors, us)
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                if row["case"] == "device" and row["arm"] == "copy_":
                    self.memory_gbps = 2 * float(row["gbps"])
                elif row["arm"] in PRODUCTS.values() and row["case"].count(",") == 1 and row["dtype"] == "bfloat16":
                    matrix_bytes = int(row["rows"]) * int(row["row_bytes"])
                    of_matrix = self._us.setdefault(row["arm"], {}).setdefault(matrix_bytes, [])
                    of_matrix.append((int(row["vectors"]), float(row["us"])))

    def product_s(self, matrix_bytes: int, vectors: float, is_coded: bool) -> float:
        """Returns the seconds of one product. The rate is that of the measured matrix with the nearest number of bytes.
        Between two numbers of vectors time grows evenly. Beyond the last it grows as cuBLAS's does, in proportion to
        the vectors, because coded weights are decoded once then."""
        of_arm = self._us[PRODUCTS[is_coded]]
        nearest = min(of_arm, key=lambda measured: abs(math.log(measured / matrix_bytes)))
        counts, us = zip(*sorted(of_arm[nearest]))
        last_us = max(self._us[PRODUCTS[False]][nearest])[1]
        beyond_us = last_us * max(0.0, vectors / counts[-1] - 1)
        return (float(np.interp(vectors, counts, us)) + beyond_us) * 1e-6 * matrix_bytes / nearest

    def step_s(self, config: dict, vectors: float, is_coded: bool) -> float:
        """Returns the seconds of all products of a step."""
        return sum(
            count * self.product_s(rows * columns * VALUE_BYTES, vectors, is_coded)
            for (rows, columns), count in matrices_of(config).items()
        )


def matrices_of(config: dict) -> dict[tuple[int, int], int]:
    """Returns how often a step multiplies by a matrix of each shape (rows, columns), merged as vLLM merges them."""
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    queries, keys = (config[f"num_{name}_heads"] * head_size_of(config) for name in ("attention", "key_value"))
    matrices = [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]
    counts = {(config["vocab_size"], hidden): 1}
    for shape in matrices:
        counts[shape] = counts.get(shape, 0) + layers
    return counts


def head_size_of(config: dict) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def kv_bytes_of(config: dict) -> int:
    """Returns the bytes of one token's keys and values in all layers."""
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size_of(config) * VALUE_BYTES


def weight_bytes_of(config: dict) -> int:
    """Returns the bytes of all matrices in BF16, those of the embedding included."""
    embedding = 0 if config.get("tie_word_embeddings") else config["vocab_size"] * config["hidden_size"]
    return VALUE_BYTES * (embedding + sum(rows * columns * n for (rows, columns), n in matrices_of(config).items()))


def bound_of(config: dict, rates: Rates, load: Load, is_coded: bool, weight_bytes: int, budget_bytes: float) -> Bound:
    """Returns what a load can reach at most.

    Args:
        config: of config.json.
        is_coded: whether products read coded weights.
        weight_bytes: what the weights take of the GPU's memory.
        budget_bytes: of the GPU's memory, for weights, keys and values together.

    Raises:
        ValueError: one request does not fit beside the weights.
    """
    requests, prompt, new = load
    kv_bytes = kv_bytes_of(config)
    room = (budget_bytes - weight_bytes) / kv_bytes  # tokens
    if room < prompt + new:
        raise ValueError(
            f"the weights take {weight_bytes / 1e9:.1f} GB of {budget_bytes / 1e9:.1f} GB, which leaves room for "
            f"{max(0, int(room)):,} tokens; one request has {prompt + new:,}"
        )
    held = requests * sum(range(prompt + 1, prompt + new + 1))  # tokens in memory, added up over all steps
    steps = max(new, held / room)
    sequences = requests * new / steps
    prompts_s = requests * prompt / PIECE * rates.step_s(config, PIECE, is_coded)
    seconds = steps * rates.step_s(config, sequences, is_coded) + held * kv_bytes / (rates.memory_gbps * 1e9)
    return Bound(requests * new / (seconds + prompts_s), sequences)
