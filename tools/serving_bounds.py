"""An upper bound for the speed of a dense decoder that is served from one GPU. tools/serve_vllm.py writes the measured
share of it beside each load.

The bound follows from three things. Memory: the keys and values of all running requests have to fit beside the weights,
so that the memory limits how many requests run in a step. Products: a step multiplies by every matrix once, with as
many vectors as requests run, at the rates that benchmarks/linear.py measured on this kind of GPU. Attention: a step
reads the keys and values of the running requests at the rate of device memory. The bound takes everything else to be
free: the host, norms, samplers, and the memory for activations.
"""

import csv
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

VALUE_BYTES = 2  # BF16 has two bytes.
PIECE = 8192  # A step of vLLM's server takes this many tokens of prompts on a card of 80 GB.
# These arms of linear.csv count, depending on whether the weights are compressed.
PRODUCTS = {False: "cuBLAS", True: "ibp.linear"}


class Load(NamedTuple):
    """A number of requests that come at once, and for each of them the tokens of its prompt and the new tokens."""

    requests: int
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def parse(cls, text):
        """Returns the load that a text such as 256x128+1024 describes."""
        requests, tokens = text.split("x")
        prompt, new = tokens.split("+")
        load = cls(int(requests), int(prompt), int(new))
        if min(load) < 1:
            raise ValueError(f"wanted numbers from 1, got {text}")
        return load


class Bound(NamedTuple):
    """The most that a load can reach. tokens_per_s: the highest rate. sequences: how many requests run in a step on
    average at this rate."""

    tokens_per_s: float
    sequences: float


class Rates:
    """Times of products on one kind of GPU, read from a linear.csv of benchmarks/linear.py.

    Attributes:
        memory_gbps: GB that device memory reads and writes per second, measured with torch's copy.
    """

    def __init__(self, path: Path) -> None:
        self._us: dict[str, dict[int, list[tuple[int, float]]]] = {}  # by arm and bytes of the matrix: (vectors, us)
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
        Times between two measured numbers of vectors are interpolated. Beyond the last one, the time grows as cuBLAS's
        does, in proportion to the vectors, because with so many vectors compressed weights are decoded only once."""
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
    """Returns how often a step multiplies by a matrix of each shape (rows, columns). Matrices are merged as in vLLM."""
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
    """Returns the bytes of all matrices in BF16, including the embedding."""
    embedding = 0 if config.get("tie_word_embeddings") else config["vocab_size"] * config["hidden_size"]
    return VALUE_BYTES * (embedding + sum(rows * columns * n for (rows, columns), n in matrices_of(config).items()))


def bound_of(config: dict, rates: Rates, load: Load, is_coded: bool, weight_bytes: int, budget_bytes: float) -> Bound:
    """Returns the upper bound for a load.

    Args:
        config: the contents of config.json.
        is_coded: whether products read compressed weights.
        weight_bytes: GPU memory that the weights take.
        budget_bytes: GPU memory for weights, keys and values together.

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
    held = requests * sum(range(prompt + 1, prompt + new + 1))  # These are tokens in memory, summed over all steps.
    steps = max(new, held / room)
    sequences = requests * new / steps
    prompts_s = requests * prompt / PIECE * rates.step_s(config, PIECE, is_coded)
    seconds = steps * rates.step_s(config, sequences, is_coded) + held * kv_bytes / (rates.memory_gbps * 1e9)
    return Bound(requests * new / (seconds + prompts_s), sequences)
