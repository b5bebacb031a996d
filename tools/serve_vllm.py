"""Lets vLLM generate with a compressed KV-cache and with compressed weights. Compares the tokens with those of plain
vLLM, and measures the speed.

    python tools/serve_vllm.py MODEL_DIR [--mode eager] [--prompts FILE] [--arms ARM,ARM] [--out DIR]
    python tools/serve_vllm.py --mixture --mode graphs --length 504 --arms "plain,coded weights"
    python tools/serve_vllm.py --shape qwen3-32b --mode graphs --load 256x128+1024 --arms "plain,coded weights"

vLLM has to be installed, and to find ibp's plugins by its entry points. MODEL_DIR is a directory of `save_pretrained`.
`--mixture` serves a mixture of experts with random weights, which transformers makes: 4 layers of 32 experts, 8 for
each token. `--shape` serves a model of a known shape with random weights, which are made on the GPU and never stored.

Each arm runs vLLM's engine in a process of its own, for at most `--limit` seconds. Each result is written at once, so
that an arm that fails does not lose the results of others. serve_vllm.log in the output directory has vLLM's output.
The arms run in the order that `--arms` gives; an arm that is named twice runs twice.

Answers (without `--load`). An arm answers all prompts one after the other, twice. The second time, their KV-cache is
where the arm keeps it. Prompts are lists of token ids in a JSON file. Without a file they are pieces of docs/, or
random ids if the model has no tokenizer.json. The arms `plain`, `coded weights` and `coded checkpoint`, which
`save_coded` has written, keep the whole KV-cache on the GPU. In the arms `computed anew`, `raw KV` and `coded KV`, the
GPU keeps a quarter of it. `raw KV` and `coded KV` have equally much host memory, which is too small for the raw
KV-cache of all prompts. `ttft_ms` is the time to the first token, and `tokens_per_s` the rate after it; both are
medians of the second time, over prompts that the small GPU memory does not keep. `found` is the share of these prompts
that was not computed anew. `batch_tokens_per_s` is the rate of a quarter of the prompts together, and includes the time
for reading them.

`equal` counts the answers of both times that have plain's tokens. Products of other shapes add in another order, and so
do `ibp.linear` and cuBLAS, so that tokens may differ. `largest_gap` says by how much: at the first token that differs,
it is how much likelier, in nats, plain's own token was to plain than the answer's; the largest difference counts. If
the answer's token is not among plain's 20 likeliest, the last of these is taken instead. Plain returns its
probabilities the first time, when nothing is timed. If its second answer differs before that token, no gap is known.

Features. `plain with FEATURE` and `coded weights with FEATURE` are also arms of answers. `two adapters`: requests take
turns with two random LoRA adapters for all matrices of a layer. `a draft`: a model of two layers with random weights
proposes three tokens at a time. `FP8 KV`: the KV-cache has 8 bits a value. `four together`: four prompts are answered
at a time. `two ranks`: two GPUs have one half of each matrix each; `load_s` and what it contains are then not measured,
and `weight_bytes` counts both. `equal` and `largest_gap` compare an arm that has a draft with the same weights without
a draft, and other arms with plain weights and the same feature. `plain with four together` is compared with plain, and
shows what another batch size alone does to the answers.

Loads (`--load 256x128+1024,1x128+1024`: first 256 requests at once with 128 tokens each, which are continued by 1,024
tokens; then one such request alone). vLLM takes 0.95 of a card of `--card-gib`, which may be smaller than the GPU, for
weights, keys and values together; torch's allocator refuses more than the card has. If requests find no room, `plain`
and `coded weights` recompute them. `coded weights and KV` keeps their pages compressed in `--host-gib` of host memory,
and `coded weights and raw KV` keeps them there as vLLM does without ibp. `ttft_ms` and `ttft_p99_ms` are median and
99th percentile of the time to a request's first token, `between_ms` is the median time between two tokens of a request,
`sequences` is the number of requests that got a token in a step on average, `long_steps` is the share of the time in
steps that took more than twice as long as the median one, and `kv_tokens` is the number of tokens that vLLM has room
for. `load_peak_bytes` and `peak_bytes` are the most that torch's allocator held while weights were loaded, and
afterwards. `load_s` includes making random weights; `capture_s` includes compiling, warming up and capturing graphs.
`bound_tokens_per_s` is the highest rate that memory, products and attention allow (tools/serving_bounds.py, with the
rates of `--rates`), and `share_of_bound` is the measured share of it.

serve_steps.csv has the steps of `--sequences`. `step_ms` is wall-clock time, `host_ms` is the processor time of the
thread, which sleeps while it waits, and `gpu_ms` and `kernels` are the time and the number of kernels. The row with
more tokens than sequences is a step that reads prompts. serve_parts.csv lists the kernels and the functions of the host
that take longest; the latter are measured under Python's profiler, which makes them slower.
"""

import argparse
import functools
import importlib.util
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import serving_load  # noqa: E402
from serving_bounds import Load, Rates, bound_of, head_size_of, kv_bytes_of, weight_bytes_of  # noqa: E402

from benchmarks import harness  # noqa: E402

COLUMNS = (
    "benchmark,case,arm,mode,prompt_tokens,new_tokens,equal,answers,largest_gap,ttft_ms,tokens_per_s,"
    "batch_tokens_per_s,found,load_s,weight_bytes,host_bytes,stored_pages,raw_pages,requests,order,card_gib,ttft_p99_ms,"
    "between_ms,sequences,long_steps,kv_tokens,capture_s,load_peak_bytes,peak_bytes,bound_tokens_per_s,bound_sequences,"
    "share_of_bound,command,engine,gpu,torch,cuda,commit"
).split(",")
OF_STEPS = "benchmark,case,arm,mode,order,card_gib,sequences,tokens".split(",")
MACHINE = "engine,gpu,torch,cuda,commit".split(",")
# For each kind of result, the CSV that gets it and its columns.
PROFILES = {
    "step": ("serve_steps.csv", [*OF_STEPS, "step_ms", "host_ms", "gpu_ms", "kernels", *MACHINE]),
    "part": ("serve_parts.csv", [*OF_STEPS, "side", "name", "calls", "us", *MACHINE]),
}
OF_ARM = ("case", "mode", "arm", "order", "card_gib")  # These columns identify rows.
OF_LOAD = (*OF_ARM, "requests", "prompt_tokens", "new_tokens")
PROMPTS, QUARTER, NEW_TOKENS = 16, 4, 64
BLOCK = 16  # A block of the KV-cache has this many tokens.
LIKELIEST = 20  # vLLM returns the probabilities of at most this many tokens of a position.
UTILIZATION = 0.95  # Loads may take this share of a card's memory.
# On cards of at least this size vLLM's server reads 8,192 tokens of prompts in a step, and otherwise 2,048.
LARGE_CARD_GIB = 70
PLAIN, CODED = "plain", "coded weights"  # These are arms.
# These are features of arms.
ADAPTERS, DRAFT, FP8, RANKS, TOGETHER = "two adapters", "a draft", "FP8 KV", "two ranks", "four together"
RANK, DRAFT_LAYERS, DRAFT_TOKENS = 8, 2, 3
MODES = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compiled": {},  # This is vLLM's default.
}

# The model's config.json, and the GiB that a program sees of the card that serves it: an H100 of 80 GB, an RTX 4090.
SHAPES = {
    "qwen3-32b": (
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 64, "hidden_size": 5120}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600}
        | {"vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
        79.0,
    ),
    "llama-3-8b": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336}
        | {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 5e5, "rms_norm_eps": 1e-5},
        23.5,
    ),
}


def make_shape(folder, name):
    """Writes the config.json of a known shape and returns its folder, which has no weights."""
    path = folder / f"{name}-random"
    path.mkdir()
    config = SHAPES[name][0] | {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def make_mixture(folder):
    """Writes a mixture of experts with random weights and returns its folder. The experts have 0.6 GB of the
    weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4}
    sizes |= {"head_dim": 64, "num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    sizes |= {"vocab_size": 4096, "max_position_embeddings": 4096, "tie_word_embeddings": False, "norm_topk_prob": True}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, eos_token_id=1, dtype=torch.bfloat16)
    model = Qwen3MoeForCausalLM(config).bfloat16()
    path = folder / "qwen3-moe-4-layers-random"
    model.save_pretrained(path)
    return path


def make_adapters(config, folder):
    """Writes two LoRA adapters with random weights for all matrices of a dense model's layers, and returns their
    folders."""
    from safetensors.torch import save_file

    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], head_size_of(config)
    queries, keys = (config[f"num_{name}_heads"] * heads for name in ("attention", "key_value"))
    sizes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    names = [name.rpartition(".")[2] for name in sizes]
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": RANK, "lora_alpha": 2 * RANK}
    paths = [folder / f"adapter-{number}" for number in (1, 2)]
    for seed, path in enumerate(paths):
        path.mkdir()
        generator, tensors = torch.Generator().manual_seed(seed), {}
        for layer in range(config["num_hidden_layers"]):
            for name, (rows, columns) in sizes.items():
                start = f"base_model.model.model.layers.{layer}.{name}"
                for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
                    values = serving_load.SPREAD * torch.randn(shape, generator=generator)
                    tensors[f"{start}.{part}.weight"] = values.bfloat16()
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": names}))
    return paths


def make_draft(config, folder):
    """Writes the config.json of a model with fewer layers and the same vocabulary, and returns its folder."""
    path = folder / "draft-random"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": DRAFT_LAYERS}))
    return path


def make_coded(model, folder, min_bytes):
    """Writes the compressed weights of a model to a folder."""
    from transformers import AutoModelForCausalLM

    import ibp
    from ibp.integrations.transformers import save_coded

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    ibp.nn.compress(plain, min_bytes=min_bytes)
    save_coded(plain, folder)


def prompts_of(args):
    """Returns the prompts as lists of token ids."""
    if args.prompts is not None:
        return json.loads(args.prompts.read_text())[:PROMPTS]
    if (args.model / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
        return np.resize(AutoTokenizer.from_pretrained(args.model)(text)["input_ids"], (PROMPTS, args.length)).tolist()
    num_words = json.loads((args.model / "config.json").read_text())["vocab_size"]
    return np.random.default_rng(0).integers(3, num_words, (PROMPTS, args.length)).tolist()


def answer(engine, prompts, adapters=(), **options):
    """Answers prompts together. Returns for each of them (tokens, the log-probabilities of the likeliest tokens by
    position and token, seconds to the first token, seconds after it, number of prompt tokens that were found in a
    cache).

    Args:
        prompts: {(number, name): list of tokens}.
        adapters: LoRA adapters; a prompt takes the one at its number modulo their number. Empty: none.
    """
    from vllm import SamplingParams

    options |= {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "detokenize": False}
    start, first, last = time.perf_counter(), {}, {}
    for (number, name), prompt in prompts.items():
        taken = {"lora_request": adapters[number % len(adapters)]} if adapters else {}
        engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**options), **taken)
    while engine.has_unfinished_requests():
        for output in engine.step():
            now = time.perf_counter()
            first.setdefault(output.request_id, now)
            last[output.request_id] = output, now
    found = []
    for _, name in prompts:
        output, end = last[name]
        likely = [{token: one.logprob for token, one in each.items()} for each in output.outputs[0].logprobs or ()]
        seconds = first[name] - start, end - first[name]
        found.append((list(output.outputs[0].token_ids), likely, *seconds, output.num_cached_tokens))
    return found


def bytes_of(model):
    """Returns the bytes of parameters and buffers. Tensors with the same storage count once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({x.data_ptr(): x.numel() * x.element_size() for x in tensors if x.numel()}.values())


def timed(function, seconds):
    """Returns a function that calls `function` and appends the seconds that the call takes to a list."""

    @functools.wraps(function)
    def call(*args, **options):
        start = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            seconds.append(time.perf_counter() - start)

    return call


def run_arm(task):
    """Makes an arm's engine, measures it, and writes each result as a line of JSON to the original standard output. All
    other output goes to the standard error from here on."""
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if task["share"] < 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(task["share"])

    import vllm
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.v1.worker.gpu_worker import Worker

    serving_load.register_random_weights()
    load_s, capture_s, peaks = [], [], []
    load = timed(BaseModelLoader.load_model, load_s)

    def load_and_look(*args, **options):
        model = load(*args, **options)
        peaks.append(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
        return model

    BaseModelLoader.load_model = load_and_look
    Worker.compile_or_warm_up_model = timed(Worker.compile_or_warm_up_model, capture_s)
    llm = vllm.LLM(**task["options"])
    made = {"load_s": sum(load_s), "capture_s": sum(capture_s), "load_peak_bytes": max(peaks)} if peaks else {}
    made |= {"weight_bytes": sum(llm.apply_model(bytes_of)), "engine": f"vllm {vllm.__version__}"}

    def tell(result):
        told.write(json.dumps(result | (made if result["kind"] != "progress" else {})) + "\n")

    tell({"kind": "progress", "text": f"loaded in {sum(load_s):.1f} s, captured in {sum(capture_s):.1f} s"})
    if task["loads"]:
        serving_load.measure(llm, task, lambda result: tell(result | pages_of(task)))
    else:
        tell(answers_of(llm, task) | pages_of(task))


def pages_of(task):
    """Returns how many pages an arm keeps in host memory; empty if it keeps no compressed pages."""
    connector = task["options"].get("kv_transfer_config", {}).get("kv_connector_extra_config", {})
    if "ibp_gain" not in connector:
        return {}
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    blocks = get_kv_transfer_group().connector_worker.worker.blocks
    stored_pages = sum(pool.stats().stored_pages for pool in blocks.pools)
    return {"stored_pages": stored_pages, "raw_pages": blocks.num_raw_pages}


def answers_of(llm, task):
    """Lets an arm answer the prompts. Returns the answers and how long they took."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    prompts, fits, engine = task["prompts"], PROMPTS // QUARTER, llm.llm_engine
    size = fits if task["arm"].endswith(TOGETHER) else 1
    told = {"logprobs": LIKELIEST} if task["is_baseline"] else {}
    adapters = [LoRARequest(path, number, path) for number, path in enumerate(task["adapters"], 1)]

    def answered(name, numbers, **options):
        found = []
        for first in range(0, len(numbers), size):
            of_call = {(number, f"{name} {number}"): prompts[number] for number in numbers[first : first + size]}
            found += answer(engine, of_call, adapters, **options)
        return found

    for number in range(2):  # Kernels are compiled during the first calls.
        answer(engine, {(number, f"warm {number}"): prompts[number][::-1]}, adapters)
    once = answered("once", range(PROMPTS), **told)
    backwards = range(PROMPTS - fits - 1, -1, -1)  # The prompt that was used last is evicted last.
    again = dict(zip(backwards, answered("again", backwards)))
    start = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt[::-1]} for prompt in prompts[-fits:]], params, use_tqdm=False)
    return {
        "kind": "answers",
        "prompts": [*range(PROMPTS), *again],
        "tokens": [tokens for tokens, *_ in (*once, *again.values())],
        "likely": [likely for _, likely, *_ in once],
        "batch_tokens_per_s": fits * NEW_TOKENS / (time.perf_counter() - start),
        "ttft_ms": statistics.median(one[2] for one in again.values()) * 1e3,
        "tokens_per_s": statistics.median((NEW_TOKENS - 1) / one[3] for one in again.values()),
        "found": sum(one[4] for one in again.values()) / sum(len(prompts[i]) for i in again),
    }


def arms_of(args, length, coded_folder):
    """Returns the options of `vllm.LLM` by arm. length: tokens of a prompt for answers."""
    config = json.loads((args.model / "config.json").read_text())
    base = {"model": str(args.model), "dtype": "bfloat16", "skip_tokenizer_init": True, "block_size": BLOCK}
    base |= MODES[args.mode] | ({"load_format": "random"} if args.shape else {})
    fields = {"quantization_config": {"quant_method": "ibp", "min_bytes": args.min_bytes}}
    weights = {"quantization": "ibp", "hf_overrides": fields}
    coded = {"ibp_gain": args.gain, "spec_name": "IBPOffloadingSpec", "spec_module_path": "ibp.integrations.vllm"}

    def tier(num_bytes, **extra):
        options = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        extra = {"cpu_bytes_to_use": int(num_bytes), **extra}
        return {"kv_transfer_config": options | {"kv_connector_extra_config": extra}}

    if args.load:
        loads = [*args.load, serving_load.STEPS, serving_load.PROMPTS]
        longest = max(load.prompt_tokens + load.new_tokens for load in loads)
        most = max(*(load.requests for load in loads), *args.sequences)
        base |= {"max_model_len": longest, "max_num_seqs": most}
        base |= {"max_num_batched_tokens": 8192 if args.card_gib >= LARGE_CARD_GIB else 2048}
        base |= {"gpu_memory_utilization": UTILIZATION * args.share}
        arms = {"plain": base, "coded weights": base | weights}
        for pages, extra in (("raw KV", {}), ("KV", coded)):
            arms[f"coded weights and {pages}"] = base | weights | tier(args.host_gib * 2**30, **extra)
        return arms
    # There are blocks for all prompts, and a few to warm up.
    needed = (PROMPTS + 3) * -(-(length + NEW_TOKENS) // BLOCK)
    host_bytes = int(needed / args.gain) * BLOCK * kv_bytes_of(config)
    base |= {"max_model_len": length + NEW_TOKENS, "max_num_seqs": PROMPTS // QUARTER, "gpu_memory_utilization": 0.5}
    large, small = ({"num_gpu_blocks_override": number} for number in (2 * needed, needed // QUARTER + 2))
    checkpoint = {"model": str(coded_folder), "load_format": "ibp"}
    arms = {
        "plain": base | large,
        "coded weights": base | large | weights,
        "coded checkpoint": base | large | weights | checkpoint,
        "computed anew": base | small,
        "raw KV": base | small | tier(host_bytes),
        "coded KV": base | small | tier(host_bytes, **coded),
    }
    if args.shape:
        del arms["coded checkpoint"]  # There is no checkpoint to compress.
    features = {TOGETHER: {}, FP8: {"kv_cache_dtype": "fp8"}, RANKS: {"tensor_parallel_size": 2}}
    if "num_experts" not in config:
        features[ADAPTERS] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    if args.shape:  # The loader of random weights makes the draft's weights, too.
        draft = {"model": str(args.draft), "method": "draft_model", "num_speculative_tokens": DRAFT_TOKENS}
        features[DRAFT] = {"speculative_config": draft}
    for feature, options in features.items():
        for arm in (PLAIN, CODED):
            arms[f"{arm} with {feature}"] = arms[arm] | options
    return arms


def baseline_of(arm):
    """Returns the arm with whose answers an arm's answers are compared."""
    weights, _, feature = arm.partition(" with ")
    if feature == DRAFT:
        return weights
    return f"{PLAIN} with {feature}" if feature in (ADAPTERS, FP8, RANKS) else PLAIN


def run_in_process(task, folder, args, take):
    """Runs an arm in a process and passes each of its results to `take` at once. Returns whether the arm finished;
    otherwise prints the end of its log."""
    path = folder / "task.json"
    path.write_text(json.dumps(task))
    environment = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # With several ranks, each has a process, to which `bytes_of` is sent.
    environment |= {"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    if importlib.util.find_spec("flashinfer") is None:
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM's own sampler needs no other package.
    command = [sys.executable, __file__, "--task", str(path)]
    with open(args.out / "serve_vllm.log", "a+") as said:
        said.seek(0, os.SEEK_END)
        start = said.tell()
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=said, text=True) as process:
            timer = threading.Timer(args.limit, process.kill)
            timer.start()
            try:
                for line in process.stdout:
                    if line.endswith("\n"):  # Otherwise the process was killed during the write.
                        take(json.loads(line))
            finally:
                timer.cancel()
        said.seek(start)
        lines = said.readlines()
    if process.returncode:
        was_killed = process.returncode == -signal.SIGKILL
        why = f"killed, its limit is {args.limit:g} s" if was_killed else f"exit status {process.returncode}"
        print(f"FAILED {task['arm']}: {why}\n{''.join(lines)[-3000:]}", flush=True)
        return False
    print("".join(f"  {line}" for line in lines if " ibp: " in line), end="", flush=True)
    return True


def compared(result, baseline):
    """Returns how many answers have the baseline's tokens, and the largest gap at a first token that differs."""
    others, gaps = 0, []
    for prompt, got, want in zip(result["prompts"], result["tokens"], baseline["tokens"]):
        if got == want:
            continue
        others += 1
        at = next(k for k in range(NEW_TOKENS) if got[k] != want[k])
        if baseline["tokens"][prompt][: at + 1] == want[: at + 1]:
            likely = baseline["likely"][prompt][at]
            gaps.append(likely[str(want[at])] - likely.get(str(got[at]), min(likely.values())))
    answers = len(baseline["tokens"])
    return {"equal": answers - others, "answers": answers} | ({"largest_gap": max(gaps)} if gaps else {})


def start_file(path, columns, names, rows):
    """Starts a CSV. Earlier rows stay unless one of the coming rows has the same values in the columns `names`."""

    def named(row):
        return tuple(str(row.get(name, "")) for name in names)

    replaced = {named(row) for row in rows}
    harness.start_file(path, columns, lambda row: named(row) not in replaced)


def bound_on_card(args, config, load, is_coded, weight_bytes):
    """Returns the bound of a load, or None for mixtures of experts, whose products the bound does not model."""
    if "num_experts" in config:
        return None
    return bound_of(config, args.rates, load, is_coded, weight_bytes, UTILIZATION * args.card_gib * 2**30)


def write_result(args, config, named, options, answers, result):
    """Writes and prints one result of an arm.

    Args:
        config: the contents of config.json.
        named: the columns that are known before the arm runs.
        options: the arm's options of `vllm.LLM`.
        answers: results by arm; a result of kind "answers" is added.
    """
    kind = result.pop("kind")
    if kind == "progress":
        print(f"{named['arm']}: {result['text']}", flush=True)
        return
    file, columns = PROFILES.get(kind, ("serve_vllm.csv", COLUMNS))
    row = named | result
    if kind == "answers":
        answers[row["arm"]] = result
        row |= compared(result, answers[baseline_of(row["arm"])])
    load = Load(*(result.get(name) for name in Load._fields))
    if kind == "load" and (bound := bound_on_card(args, config, load, "coded" in row["arm"], result["weight_bytes"])):
        row |= {"bound_tokens_per_s": bound.tokens_per_s, "bound_sequences": bound.sequences}
        row["share_of_bound"] = row["tokens_per_s"] / bound.tokens_per_s
    if kind in ("answers", "load"):  # Arms with a connector keep keys and values in host memory, too.
        connector = options.get("kv_transfer_config", {}).get("kv_connector_extra_config", {})
        row |= {"host_bytes": connector["cpu_bytes_to_use"]} if connector else {}
    row = {column: row[column] for column in columns if column in row}
    row = {name: harness.four_digits(x) if isinstance(x, float) else x for name, x in row.items()}
    harness.append_row(args.out / file, columns, row)
    if kind != "part":
        told = [f"{name} {x}" for name, x in row.items() if name not in named]
        print(f"{row['case']}, {row['mode']}, {row['arm']}: {', '.join(told)}", flush=True)


def named_rows(args, arms, length):
    """Returns, for each arm in order, the columns that are known before it runs."""
    same = {"benchmark": "serve_vllm", "case": args.model.resolve().name, "mode": args.mode, "command": args.command}
    same |= {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "torch": torch.__version__}
    same |= {"cuda": torch.version.cuda or "none", "commit": harness.commit_id()}
    if not args.load:
        return [same | {"arm": arm, "prompt_tokens": length, "new_tokens": NEW_TOKENS} for arm in arms]
    card = harness.four_digits(args.card_gib)
    return [same | {"arm": arm, "order": order, "card_gib": card} for order, arm in enumerate(arms, 1)]


def run_arms(args, made):
    prompts = [] if args.load else prompts_of(args)
    length = len(prompts[0]) if prompts else 0
    config = json.loads((args.model / "config.json").read_text())
    args.draft = make_draft(config, made)
    options, answers, failed = arms_of(args, length, made / "coded"), {}, 0
    arms = args.arms or [arm for arm in options if " with " not in arm]
    if unknown := set(arms) - set(options):
        raise SystemExit(f"no arm named {', '.join(sorted(unknown))}; wanted some of: {', '.join(options)}")
    for number, arm in enumerate(arms) if prompts else ():
        if baseline_of(arm) not in arms[: number + 1]:
            raise SystemExit(f"{arm} is compared with {baseline_of(arm)}; wanted this arm before it")
    adapters = make_adapters(config, made) if any(arm.endswith(ADAPTERS) for arm in arms) else []
    rows = named_rows(args, arms, length)
    coming = [row | load._asdict() for row in rows for load in args.load] or rows
    args.out.mkdir(parents=True, exist_ok=True)
    start_file(args.out / "serve_vllm.csv", COLUMNS, OF_LOAD, coming)
    for name, columns in PROFILES.values() if args.sequences else ():
        start_file(args.out / name, columns, OF_ARM, coming)
    for arm, named in zip(arms, rows):
        if arm == "coded checkpoint":
            make_coded(args.model, made / "coded", args.min_bytes)
        try:
            for load in args.load if arm == "plain" else ():
                bound_on_card(args, config, load, False, weight_bytes_of(config))
        except ValueError as error:
            print(f"FAILED {arm}: {error}", flush=True)
            failed += 1
            continue
        task = {"arm": arm, "options": options[arm], "prompts": prompts, "loads": args.load, "share": args.share}
        task |= {"sequences": args.sequences, "is_baseline": arm in map(baseline_of, arms)}
        task["adapters"] = list(map(str, adapters)) if arm.endswith(ADAPTERS) else []
        take = functools.partial(write_result, args, config, named, options[arm], answers)
        failed += not run_in_process(task, made, args, take)
        if task["is_baseline"] and prompts and arm not in answers:  # There is nothing to compare the others with.
            return 1
    return 1 if failed else 0


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR", type=Path, nargs="?")
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the CSVs and the log")
    parser.add_argument("--mode", choices=MODES, default="compiled", help="compiled: as vLLM does by default")
    parser.add_argument("--mixture", action="store_true", help="in place of MODEL_DIR: a mixture with random weights")
    parser.add_argument("--shape", choices=SHAPES, help="in place of MODEL_DIR: a known shape with random weights")
    parser.add_argument(
        "--arms",
        type=lambda given: given.split(","),
        help="some of the arms; of answers each after the one it is compared with",
    )
    parser.add_argument("--limit", type=float, default=240, metavar="S", help="seconds of an arm")
    parser.add_argument("--min-bytes", type=int, default=1 << 20, help="weights of fewer stay plain")
    parser.add_argument("--gain", type=float, default=1.4, help="pages for each raw one that fits: ibp_gain")
    answers = parser.add_argument_group("answers")
    answers.add_argument("--length", type=int, default=2040, help="tokens of a prompt")
    answers.add_argument("--prompts", type=Path, help=f"JSON: {PROMPTS} lists of token ids, of one length")
    loads = parser.add_argument_group("loads")
    loads.add_argument(
        "--load",
        type=lambda given: [Load.parse(load) for load in given.split(",")],
        default=[],
        metavar="LOAD,LOAD",
        help="requests x tokens of a prompt + new tokens, such as 256x128+1024,1x128+1024",
    )
    loads.add_argument("--card-gib", type=float, help="memory of the card: the shape's, or the GPU's")
    loads.add_argument("--host-gib", type=float, default=32, help="host memory for keys and values")
    loads.add_argument("--rates", type=Path, default=harness.RESULTS / "linear.csv", help="products on this GPU")
    loads.add_argument(
        "--sequences",
        type=lambda given: [int(number) for number in given.split(",") if number],
        default=[1, 4, 32, 128],
        help="in the steps that are timed; empty: none",
    )
    return parser


def main():
    parser = make_parser()
    args = parser.parse_args()
    if args.task is not None:
        run_arm(json.loads(args.task.read_text()))
        return 0
    if sum([args.model is not None, args.mixture, args.shape is not None]) != 1:
        parser.error("wanted one of MODEL_DIR, --mixture and --shape")
    args.sequences = args.sequences if args.load else []
    words = sys.argv[1:]
    at = words.index("--out") if "--out" in words else len(words)
    args.command = shlex.join(["tools/serve_vllm.py", *words[:at], *words[at + 2 :]])
    if args.load:
        args.rates = Rates(args.rates)
        total_gib = torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 80.0
        args.card_gib = args.card_gib or (SHAPES[args.shape][1] if args.shape else total_gib)
        if args.card_gib > total_gib:
            parser.error(f"--card-gib {args.card_gib:g}: the GPU has {total_gib:.1f} GiB")
    args.share = args.card_gib / total_gib if args.load else 1.0
    with tempfile.TemporaryDirectory() as made:
        if args.mixture:
            args.model = make_mixture(Path(made))
        elif args.shape:
            args.model = make_shape(Path(made), args.shape)
        return run_arms(args, Path(made))


if __name__ == "__mp_main__":  # vLLM's process of a rank, which imports this file before it loads the model
    serving_load.register_random_weights()
elif __name__ == "__main__":
    sys.exit(main())
