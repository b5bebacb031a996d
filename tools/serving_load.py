"""Measures loads and single steps inside an arm of tools/serve_vllm.py. Also has a loader that makes random weights
instead of reading them.

The engine runs in the process that measures it, so that each step can be timed. `serve` times a load with the wall
clock; the time to a request's first token counts from the moment when all requests are submitted. `time_steps` runs
some sequences and measures their steps three times: with the wall clock and the processor time of the thread, which
sleeps while it waits for the GPU; under Python's profiler; and under torch's profiler, which also sees the kernels
inside CUDA graphs.
"""

import cProfile
import pstats
import statistics
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from serving_bounds import Load

SPREAD = 0.02  # Random weights have this standard deviation.
# Before a load is timed, this smaller one is served, because kernels are compiled during the first calls.
WARM = {"requests": 16, "new_tokens": 4}
SETTLE, TIMED, PROFILED = 8, 24, 8  # SETTLE steps are not measured, TIMED are timed, and PROFILED are profiled.
# Each sequence gets enough tokens for all steps. The last 24 pass until all sequences have begun.
STEPS = Load(1, 128, SETTLE + 2 * TIMED + PROFILED + 24)
PROMPTS = Load(4, 512, 1)  # The single step of this load stands for reading prompts.
MOST_LISTED = 15  # The CSV lists at most this many kernels, and this many functions of the host.
TELL_S = 10.0  # A line about a load is printed every this many seconds.


def random_weights(folder, device):
    """Yields the names and values of the tensors of a checkpoint. `folder` needs only the model's config.json. Values
    are N(0, 0.02) for matrices, ones for norms and zeros for biases. They are made on the device, one tensor after the
    other, and are the same each time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in [(name, each.shape) for name, each in model.state_dict().items()]:
        values = torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=torch.bfloat16, device=device)
        yield name, values if len(shape) == 1 else values.normal_(0, SPREAD, generator=generator)


def register_random_weights():
    """Makes `load_format="random"` known to vLLM. Weights pass through the loaders of vLLM's model like weights from a
    file, so that a quantization compresses each layer as soon as it has its weights."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("random")
    class RandomWeightsLoader(BaseModelLoader):
        def download_model(self, model_config):
            """Does nothing, because there is no file."""

        def load_weights(self, model, model_config):
            device = next(each.device for each in model.parameters() if not each.is_meta)
            model.load_weights(random_weights(model_config.model, device))


def add_requests(engine, load, name, num_words):
    """Submits a load's requests and returns their names. Their tokens are random and depend on `name`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    options = {"temperature": 0.0, "max_tokens": load.new_tokens, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(**options, output_kind=RequestOutputKind.DELTA)
    random = np.random.default_rng(list(name.encode()))
    prompts = random.integers(3, num_words, (load.requests, load.prompt_tokens)).tolist()
    names = [f"{name}, {number}" for number in range(load.requests)]
    for each, prompt in zip(names, prompts):
        engine.add_request(each, {"prompt_token_ids": prompt}, params)
    return names


def serve(engine, load, name, num_words, tell=lambda result: None):
    """Serves a load and returns its times. `sequences` is the average number of requests that got a token in a step.
    `long_steps` is the share of the time that passed in steps that took more than twice as long as the median step.

    Raises:
        RuntimeError: a request got too few tokens.
    """
    wanted, got, num_steps = load.requests * load.new_tokens, 0, 0
    times = defaultdict(list)  # when each token came, by request
    ends = []  # when each step ended
    start = told = time.perf_counter()
    add_requests(engine, load, name, num_words)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        ends.append(now)
        for output in outputs:
            num_tokens = len(output.outputs[0].token_ids)
            times[output.request_id] += [now] * num_tokens
            got += num_tokens
        num_steps += bool(outputs)
        if now > told + TELL_S:
            told = now
            tell({"kind": "progress", "text": f"{name}: {got:,} of {wanted:,} tokens after {now - start:.0f} s"})
    if got != wanted:
        raise RuntimeError(f"wanted {wanted} tokens, got {got}")
    first = [each[0] - start for each in times.values()]
    between = np.concatenate([np.diff(each) for each in times.values()])
    found = {"tokens_per_s": wanted / (max(each[-1] for each in times.values()) - start)}
    found |= {"ttft_ms": statistics.median(first) * 1e3, "ttft_p99_ms": float(np.percentile(first, 99)) * 1e3}
    found |= {"between_ms": float(np.median(between)) * 1e3} if between.size else {}
    step_s = np.diff(ends, prepend=start)
    long_steps = float(step_s[step_s > 2 * np.median(step_s)].sum() / step_s.sum())
    return found | {"sequences": wanted / num_steps, "long_steps": long_steps}


def kernels_of(profile, num_steps):
    """Returns {kernel: (calls, microseconds)} per step on the GPU, the longest first."""
    on_gpu = torch.autograd.DeviceType.CUDA
    events = [each for each in profile.key_averages() if each.device_type == on_gpu and not each.is_user_annotation]
    found = {each.key: (each.count / num_steps, each.self_device_time_total / num_steps) for each in events}
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def functions_of(profile, num_steps):
    """Returns {function: (calls, microseconds)} per step on the host, without the functions that it calls, the longest
    first."""
    found = {}
    for (path, line, name), (_, calls, seconds, *_) in pstats.Stats(profile).stats.items():
        where = "/".join(Path(path).parts[-3:])
        found[f"{where}:{line} {name}"] = calls / num_steps, seconds / num_steps * 1e6
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def gpu_profile():
    activity = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[activity.CUDA if torch.cuda.is_available() else activity.CPU])


def step_rows(what, kernels, functions):
    """Yields the result of timed steps, then a result for each of the longest kernels and functions."""
    times = {"gpu_ms": sum(us for _, us in kernels.values()) / 1e3}
    yield {"kind": "step", **what, **times, "kernels": sum(calls for calls, _ in kernels.values())}
    for side, listed in (("GPU", kernels), ("host", functions)):
        for name, (calls, us) in list(listed.items())[:MOST_LISTED]:
            yield {"kind": "part", **what, "side": side, "name": name, "calls": calls, "us": us}


def time_steps(engine, num_sequences, num_words):
    """Yields the rows of steps in which each of some sequences gets one token."""
    load = STEPS._replace(requests=num_sequences)
    waiting = set(add_requests(engine, load, f"{num_sequences} sequences", num_words))
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
    for _ in range(SETTLE):
        engine.step()
    start, busy = time.perf_counter(), time.thread_time()
    for _ in range(TIMED):
        engine.step()
    step_s, host_s = (
        (now - since) / TIMED for now, since in ((time.perf_counter(), start), (time.thread_time(), busy))
    )
    with cProfile.Profile() as functions:
        for _ in range(TIMED):
            engine.step()
    with gpu_profile() as kernels:
        for _ in range(PROFILED):
            engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    what = {"sequences": num_sequences, "tokens": num_sequences, "step_ms": step_s * 1e3, "host_ms": host_s * 1e3}
    yield from step_rows(what, kernels_of(kernels, PROFILED), functions_of(functions, TIMED))


def time_prompts(engine, num_words):
    """Yields the rows of one step that reads prompts."""
    took = [serve(engine, PROMPTS, f"prompts {number}", num_words)["ttft_ms"] for number in range(3)]
    with cProfile.Profile() as functions, gpu_profile() as kernels:
        serve(engine, PROMPTS, "prompts", num_words)
    tokens = PROMPTS.requests * PROMPTS.prompt_tokens
    what = {"sequences": PROMPTS.requests, "tokens": tokens, "step_ms": min(took)}
    yield from step_rows(what, kernels_of(kernels, 1), functions_of(functions, 1))


def measure(llm, task, tell):
    """Serves a task's loads, then times steps. Passes each result to `tell` at once."""
    engine, num_words = llm.llm_engine, llm.llm_engine.model_config.get_vocab_size()
    loads = [Load(*load) for load in task["loads"]]
    cache = engine.vllm_config.cache_config
    room = cache.num_gpu_blocks * cache.block_size
    for load in loads:
        name = f"{load.requests} x {load.prompt_tokens} + {load.new_tokens}"
        serve(engine, load._replace(**WARM), f"{name}, warm", num_words)
        result = serve(engine, load, name, num_words, tell)
        peak_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        tell({"kind": "load", **load._asdict(), **result, "kv_tokens": room, "peak_bytes": peak_bytes})
    for num_sequences in task["sequences"]:
        for row in time_steps(engine, num_sequences, num_words):
            tell(row)
    if task["sequences"]:
        for row in time_prompts(engine, num_words):
            tell(row)
