"""Lets vLLM generate with a coded KV-cache and with coded weights: are the tokens plain ones, and how fast are they?

    python tools/serve_vllm.py MODEL_DIR [--mode eager] [--prompts FILE] [--arms ARM,ARM] [--out DIR]
    python tools/serve_vllm.py --mixture --mode graphs --length 504 --arms "plain,coded weights"

vLLM has to be installed, and to find ibp's plugins by its entry points. The directory is one of `save_pretrained`.
Prompts are lists of token ids in a JSON file; else pieces of docs/, or random ids for a model without tokenizer.json.
`--mixture` serves a mixture with random weights, which transformers makes: 4 layers of 32 experts, 8 for each token.

Each arm is a process, with vLLM's engine inside. It answers all prompts one after the other, twice: the second time
their KV-cache is where the arm keeps it. `plain`, `coded weights` and `coded checkpoint`, which `save_coded` has
written, keep all on the GPU; `load_s` is what vLLM takes to load the model. The GPU of `computed anew`, `raw KV` and
`coded KV` keeps a quarter; host memory of the last two has one size, too small for all prompts raw.
Medians of the second time, over prompts that the small GPU memory does not keep: `ttft_ms`, to the first token;
`tokens_per_s`, after it. `found` is the share of these prompts that was not computed anew; `batch_tokens_per_s` is the
rate of a quarter of the prompts together, reading them included.

`equal` counts answers, of both times, with plain's tokens. Products of other shapes add in another order, and so do
`ibp.linear` and cuBLAS: `largest_gap` is how much likelier, in nats, plain found its own token than the answer's where
they first differ, at most; of a token that is none of plain's 20 likeliest, than the last of these. Plain tells its
probabilities the first time, when nothing is timed; where its second answer is another one by then, no gap is known.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402

COLUMNS = (
    "benchmark,case,arm,mode,prompt_tokens,new_tokens,equal,answers,largest_gap,ttft_ms,tokens_per_s,"
    "batch_tokens_per_s,found,load_s,weight_bytes,host_bytes,stored_pages,raw_pages,engine,gpu,torch,cuda,commit"
).split(",")
PROMPTS, QUARTER, NEW_TOKENS = 16, 4, 64
BLOCK = 16  # tokens
LIKELIEST = 20  # tokens whose probabilities vLLM tells, at most
LONGEST_S = 240  # of an arm
MODES = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compiled": {},  # as vLLM does by default
}


def make_mixture(folder):
    """Writes a mixture with random weights, 0.6 GB of them experts', and returns its folder."""
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


def make_coded(model, folder, min_bytes):
    """Writes a model's coded weights."""
    from transformers import AutoModelForCausalLM

    import ibp
    from ibp.integrations.transformers import save_coded

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    ibp.nn.compress(plain, min_bytes=min_bytes)
    save_coded(plain, folder)


def prompts_of(args):
    """Lists of token ids [length]."""
    if args.prompts is not None:
        return json.loads(args.prompts.read_text())[:PROMPTS]
    if (args.model / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
        return np.resize(AutoTokenizer.from_pretrained(args.model)(text)["input_ids"], (PROMPTS, args.length)).tolist()
    num_words = json.loads((args.model / "config.json").read_text())["vocab_size"]
    return np.random.default_rng(0).integers(3, num_words, (PROMPTS, args.length)).tolist()


def answer(engine, name, prompt, **options):
    """(tokens, logarithms of the likeliest ones' probabilities by position and token, seconds to the first token and
    after it, how many tokens of the prompt were found)."""
    from vllm import SamplingParams

    options |= {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "detokenize": False}
    start, first, outputs = time.perf_counter(), 0.0, []
    engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**options))
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
        first = first or (time.perf_counter() if outputs else 0.0)
    last, seconds = outputs[-1].outputs[0], (first - start, time.perf_counter() - first)
    likely = [{token: one.logprob for token, one in each.items()} for each in last.logprobs or ()]
    return list(last.token_ids), likely, *seconds, outputs[-1].num_cached_tokens


def bytes_of(model):
    """Of parameters and buffers; storage that several share counts once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({x.data_ptr(): x.numel() * x.element_size() for x in tensors if x.numel()}.values())


def run_arm(task):
    """Writes what one arm answered and took, as JSON."""
    import vllm
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    prompts, fits, load, load_s = task["prompts"], PROMPTS // QUARTER, BaseModelLoader.load_model, []

    def timed(*args, **options):
        start = time.perf_counter()
        model = load(*args, **options)
        load_s.append(time.perf_counter() - start)
        return model

    BaseModelLoader.load_model = timed
    llm = vllm.LLM(**task["options"])
    engine = llm.llm_engine
    for number in range(2):  # kernels are made for the first calls
        answer(engine, f"warm {number}", prompts[number][::-1])
    told = {"logprobs": LIKELIEST} if task["arm"] == "plain" else {}
    once = [answer(engine, f"once {i}", prompt, **told) for i, prompt in enumerate(prompts)]
    backwards = range(PROMPTS - fits - 1, -1, -1)  # what was used last is evicted last
    again = {i: answer(engine, f"again {i}", prompts[i]) for i in backwards}
    start = time.perf_counter()
    params = vllm.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt[::-1]} for prompt in prompts[-fits:]], params, use_tqdm=False)
    result = {
        "prompts": [*range(PROMPTS), *again],
        "tokens": [tokens for tokens, *_ in (*once, *again.values())],
        "likely": [likely for _, likely, *_ in once],
        "batch_tokens_per_s": fits * NEW_TOKENS / (time.perf_counter() - start),
        "ttft_ms": statistics.median(one[2] for one in again.values()) * 1e3,
        "tokens_per_s": statistics.median((NEW_TOKENS - 1) / one[3] for one in again.values()),
        "found": sum(one[4] for one in again.values()) / sum(len(prompts[i]) for i in again),
        "load_s": sum(load_s),
        "weight_bytes": sum(llm.apply_model(bytes_of)),
        "engine": f"vllm {vllm.__version__}",
    }
    if task["arm"] == "coded KV":
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        blocks = get_kv_transfer_group().connector_worker.worker.blocks
        result["stored_pages"] = sum(pool.stats().stored_pages for pool in blocks.pools)
        result["raw_pages"] = blocks.num_raw_pages
    Path(task["result"]).write_text(json.dumps(result))


def arms_of(args, length, coded_folder):
    """By arm, options of `vllm.LLM`."""
    config = json.loads((args.model / "config.json").read_text())
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    needed = (PROMPTS + 3) * -(-(length + NEW_TOKENS) // BLOCK)  # blocks of all prompts, and a few to warm up
    block_bytes = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_size * BLOCK * 2
    base = {"model": str(args.model), "dtype": "bfloat16", "skip_tokenizer_init": True, "block_size": BLOCK}
    base |= {"max_model_len": length + NEW_TOKENS, "max_num_seqs": PROMPTS // QUARTER, "gpu_memory_utilization": 0.5}
    base |= MODES[args.mode]
    large, small = ({"num_gpu_blocks_override": number} for number in (2 * needed, needed // QUARTER + 2))
    fields = {"quantization_config": {"quant_method": "ibp", "min_bytes": args.min_bytes}}
    extra = {"cpu_bytes_to_use": int(needed / args.gain) * block_bytes}
    coded = {"ibp_gain": args.gain, "spec_name": "IBPOffloadingSpec", "spec_module_path": "ibp.integrations.vllm"}
    tier = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    weights = {"quantization": "ibp", "hf_overrides": fields}
    checkpoint = {"model": str(coded_folder), "load_format": "ibp"}
    return {
        "plain": base | large,
        "coded weights": base | large | weights,
        "coded checkpoint": base | large | weights | checkpoint,
        "computed anew": base | small,
        "raw KV": base | small | {"kv_transfer_config": tier | {"kv_connector_extra_config": extra}},
        "coded KV": base | small | {"kv_transfer_config": tier | {"kv_connector_extra_config": extra | coded}},
    }


def run_in_process(task, folder):
    """What an arm gives. None: it failed; the end of what it said is printed."""
    path = folder / "task.json"
    path.write_text(json.dumps(task))
    environment = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", **os.environ}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with open(folder / "said.txt", "w+") as said:
        command = [sys.executable, __file__, "--task", str(path)]
        try:
            subprocess.run(command, env=environment, stdout=said, stderr=said, timeout=LONGEST_S, check=True)
        except subprocess.SubprocessError as error:
            said.seek(0)
            print(f"FAILED {task['arm']}: {type(error).__name__}\n{said.read()[-3000:]}", flush=True)
            return None
        said.seek(0)
        print("".join(f"  {line}" for line in said if " ibp: " in line), end="")
    return json.loads(Path(task["result"]).read_text())


def compared(result, plain):
    """How many answers are plain's, and the largest gap where one first differs."""
    others, gaps = 0, []
    for prompt, got, want in zip(result["prompts"], result["tokens"], plain["tokens"]):
        if got == want:
            continue
        others += 1
        at = next(k for k in range(NEW_TOKENS) if got[k] != want[k])
        if plain["tokens"][prompt][: at + 1] == want[: at + 1]:
            likely = plain["likely"][prompt][at]
            gaps.append(likely[str(want[at])] - likely.get(str(got[at]), min(likely.values())))
    answers = len(plain["tokens"])
    return {"equal": answers - others, "answers": answers} | ({"largest_gap": max(gaps)} if gaps else {})


def run_arms(args, made):
    prompts, plain, failed = prompts_of(args), None, 0
    case, length, path = args.model.resolve().name, len(prompts[0]), args.out / "serve_vllm.csv"
    same = {"benchmark": "serve_vllm", "case": case, "mode": args.mode, "prompt_tokens": length}
    same |= {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "torch": torch.__version__}
    same |= {"cuda": torch.version.cuda or "none", "commit": harness.commit_id(), "new_tokens": NEW_TOKENS}
    args.out.mkdir(parents=True, exist_ok=True)
    arms = {arm: of for arm, of in arms_of(args, length, made / "coded").items() if arm in (args.arms or [arm])}
    measured = {(case, args.mode, arm) for arm in arms}
    harness.start_file(path, COLUMNS, lambda row: (row["case"], row["mode"], row["arm"]) not in measured)
    for arm, options in arms.items():
        if arm == "coded checkpoint":
            make_coded(args.model, made / "coded", args.min_bytes)
        task = {"arm": arm, "options": options, "prompts": prompts, "result": str(made / "result.json")}
        result = run_in_process(task, made)
        plain = plain or result
        if plain is None:
            return 1
        if result is None:
            failed += 1
            continue
        row = {name: result[name] for name in COLUMNS if name in result} | compared(result, plain)
        if "KV" in arm:
            row["host_bytes"] = options["kv_transfer_config"]["kv_connector_extra_config"]["cpu_bytes_to_use"]
        row = {name: harness.four_digits(x) if isinstance(x, float) else x for name, x in row.items()}
        harness.append_row(path, COLUMNS, same | {"arm": arm} | row)
        print(f"{case}, {args.mode}, {arm}: " + ", ".join(f"{name} {x}" for name, x in row.items()), flush=True)
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR", type=Path, nargs="?")
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of serve_vllm.csv")
    parser.add_argument("--mode", choices=MODES, default="compiled", help="compiled: as vLLM does by default")
    parser.add_argument("--mixture", action="store_true", help="in place of MODEL_DIR: a mixture with random weights")
    parser.add_argument("--arms", type=lambda given: given.split(","), help="some of the arms, plain among them")
    parser.add_argument("--length", type=int, default=2040, help="tokens of a prompt")
    parser.add_argument("--prompts", type=Path, help=f"JSON: {PROMPTS} lists of token ids, of one length")
    parser.add_argument("--gain", type=float, default=1.4, help="pages for each raw one that fits: ibp_gain")
    parser.add_argument("--min-bytes", type=int, default=1 << 20, help="weights of fewer stay plain")
    args = parser.parse_args()
    if args.task is not None:
        run_arm(json.loads(args.task.read_text()))
        return 0
    if (args.model is None) != args.mixture:
        parser.error("wanted either MODEL_DIR or --mixture")
    with tempfile.TemporaryDirectory() as made:
        args.model = make_mixture(Path(made)) if args.mixture else args.model
        return run_arms(args, Path(made))


if __name__ == "__main__":
    sys.exit(main())
