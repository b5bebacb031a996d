"""Runs `--quantization ibp` with vLLM's own linear layers, embeddings and heads on the CPU. tools/try_adapters.py calls
`try_weights` for each unpacked release.

Layers are made, loaded by vLLM's weight loaders, and multiplied, once without a quantization and once with ibp's. Both
results must have the same bits. Numbers stand for ranks, and nothing is sent between them.
"""

import contextlib
import tempfile
import types
from pathlib import Path

import torch

import ibp

# Modules of vLLM that are imported as they are.
REAL = (
    "vllm.model_executor.custom_op",
    "vllm.model_executor.utils",
    "vllm.model_executor.parameter",
    "vllm.model_executor.layers.linear",
    "vllm.model_executor.layers.vocab_parallel_embedding",
    "vllm.model_executor.layers.quantization",
    "vllm.model_executor.layers.quantization.base_config",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.model_loader.base_loader",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.model_loader.reload*",
    "vllm.model_executor.layers.fused_moe",
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base",
    "vllm.model_executor.layers.fused_moe.routed_experts",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
    "vllm.model_executor.layers.fused_moe.oracle.unquantized",
    "vllm.distributed.weight_transfer",
    "vllm.distributed.weight_transfer.base",
    "vllm.distributed.weight_transfer.factory",
)
# Packages that vLLM's modules import and that need not be installed.
OTHERS = ("transformers", "huggingface_hub")
K, Q, KV, UP, WORDS = 256, 512, 128, 384, 1000
OPTIONS = {"min_bytes": 0, "exclude": ["*.skipped", "*.up_proj_of_two"]}


class Ranks:
    rank, size = 0, 1
    experts = False  # If this is set, a rank has some of the experts, and not a part of each.


def _plain_product(layer, x, weight, bias=None):
    return torch.nn.functional.linear(x, weight, bias)


class _Platform:
    """A platform that vLLM does not recognise."""

    simple_compile_backend = "eager"
    supported_quantization = []

    def __getattr__(self, name):
        return lambda *args: False


class _Experts:
    """A stand-in for vLLM's EplbState, in which no expert moves."""

    @staticmethod
    def build_initial_global_physical_to_logical_map(num_experts, num_redundant_experts):
        return list(range(num_experts))


# Stand-ins for names that vLLM's modules import.
GIVEN = {
    "current_platform": _Platform(),
    "rocm_aiter_ops": _Platform(),
    "EplbState": _Experts,
    "divide": lambda whole, parts: whole // parts,
    "get_tensor_model_parallel_rank": lambda: Ranks.rank,
    "get_tensor_model_parallel_world_size": lambda: Ranks.size,
    "tensor_model_parallel_all_reduce": lambda x: x,
    "split_tensor_along_last_dim": lambda x, num_partitions: x.chunk(num_partitions, dim=-1),
    "dispatch_unquantized_gemm": lambda *args: _plain_product,
    "is_deferred_attention_layer": lambda layer: False,
    "get_current_vllm_config_or_none": lambda: None,
    "maybe_roundup_layer_hidden_size": lambda hidden_size, *others: hidden_size,
    "get_cached_compilation_config": lambda: types.SimpleNamespace(
        custom_ops=["all"], enabled_custom_ops=set(), disabled_custom_ops=set()
    ),
    "set_current_vllm_config": lambda *args, **options: contextlib.nullcontext(),
    "get_current_vllm_config": lambda: types.SimpleNamespace(load_config=types.SimpleNamespace(load_format="auto")),
}


def check(is_so, what):
    if not is_so:
        raise SystemExit(f"not as it should be: weights: {what}")


def some_values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).mul(0.02).bfloat16()


def coded(checkpoint):
    """Returns a checkpoint in which tables that products can read, as `save_coded` writes them, replace the
    matrices."""
    from ibp.nn._parameters import reshaped
    from ibp.nn._tables import matrix_table

    matrices = {name: weight for name, weight in checkpoint.items() if weight.dim() > 1}
    tables = {name: reshaped(matrix_table(each.flatten(0, -2)), each.shape) for name, each in matrices.items()}
    return checkpoint | tables


def _layers(config):
    """Returns layers by name, each with the calls of its weight loader: (parameter, values, shard)."""
    from vllm.model_executor.layers import linear as made
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    options = {"params_dtype": torch.bfloat16, "quant_config": config}
    tokens = VocabParallelEmbedding(WORDS, K, prefix="model.embed_tokens", **options)
    tied = ParallelLMHead(WORDS, K, prefix="tied_head", **options).tie_weights(tokens)
    head = ParallelLMHead(WORDS, K, prefix="lm_head", **options)
    qkv = made.QKVParallelLinear(K, 64, Q // 64, KV // 64, bias=True, prefix="0.qkv_proj", **options)
    two = made.MergedColumnParallelLinear(K, [UP, UP], bias=False, prefix="0.gate_up_proj", **options)
    row = made.RowParallelLinear(Q, K, bias=False, prefix="0.o_proj", reduce_results=False, **options)
    column = made.ColumnParallelLinear(K, Q, bias=True, prefix="0.fc", **options)
    replicated = made.ReplicatedLinear(K, Q, bias=False, prefix="0.router", **options)
    skipped = made.ReplicatedLinear(K, Q, bias=False, prefix="0.skipped", **options)
    merged = made.MergedColumnParallelLinear(K, [UP, UP], bias=False, prefix="0.merged", **options)
    parts = [("q", Q), ("k", KV), ("v", KV)]
    return {
        "tokens": (tokens, [("weight", some_values(WORDS, K), None)]),
        "tied": (tied, []),
        "head": (head, [("weight", some_values(WORDS, K) * 2, None)]),
        "qkv": (qkv, [(name, some_values(rows, *end), part) for name, end in (("weight", [K]), ("bias", []))
                      for part, rows in parts]),
        "two": (two, [("weight", some_values(UP + number, K)[:UP], number) for number in range(2)]),
        "row": (row, [("weight", some_values(K, Q), None)]),
        "column": (column, [("weight", some_values(Q, K), None), ("bias", some_values(Q), None)]),
        "replicated": (replicated, [("weight", some_values(Q, K), None)]),
        "skipped": (skipped, [("weight", some_values(Q, K), None)]),
        "merged": (merged, [("weight", some_values(UP, K), number) for number in range(2)]),
    }  # fmt: skip


def load(layers):
    """Loads layers as vLLM's models do."""
    for layer, calls in layers.values():
        for name, values, shard in calls:
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, values, *([] if shard is None else [shard]))


def process(layers):
    for layer, _ in layers.values():
        layer.quant_method.process_weights_after_loading(layer)


def _results(layers):
    found = {}
    ids = torch.tensor([[0, 3], [499, 7]])
    for name, (layer, _) in layers.items():
        if name == "tokens":
            found[name] = layer(ids)
        elif name in ("tied", "head"):
            found[name] = layer.quant_method.apply(layer, some_values(3, K), bias=layer.bias)
        else:
            x = some_values(5, layer.input_size_per_partition if name == "row" else K)
            found[name] = layer(x)[0]
    return found


def _try_layers(api, rank, size):
    Ranks.rank, Ranks.size = rank, size
    config = api.IBPConfig.from_config({"quant_method": "ibp", **OPTIONS})
    config.packed_modules_mapping = {"merged": ["gate_proj", "up_proj_of_two"]}
    plain, coded = _layers(None), _layers(config)
    for layers in (plain, coded):
        load(layers)
    is_early = {name for name, (layer, _) in coded.items() if getattr(layer.quant_method, "tables", None)}
    check(is_early == {"qkv", "two", "row", "column", "replicated"}, f"coded while loading: {is_early}")
    for layers in (plain, coded):
        process(layers)
        process(layers)  # vLLM processes all layers again after it has processed each one.
    wanted, found = _results(plain), _results(coded)
    for name, result in wanted.items():
        check(torch.equal(result, found[name]), f"{name} of rank {rank} of {size} differs from plain")
    for name, (layer, _) in coded.items():
        shape, method = plain[name][0].weight.shape, layer.quant_method
        if name in ("skipped", "merged"):
            check(not isinstance(method, api.IBPWeightMethod) and layer.weight.shape == shape, f"{name} is not plain")
        else:
            table = method.tables["weight"]
            check(layer.weight.numel() == 0 and table.shape == shape, f"{name} keeps its plain weight")
            check(torch.equal(table.decompress(), plain[name][0].weight), f"{name} has other weights")
    tied, tokens = (coded[name][0].quant_method.tables["weight"] for name in ("tied", "tokens"))
    check(tied is tokens, "a tied head has its own table")
    layer = coded["row"][0]
    x = some_values(5, layer.input_size_per_partition)
    compiled = torch.compile(
        lambda x: layer.quant_method.apply(layer, x), backend="eager", fullgraph=True, dynamic=True
    )
    check(torch.equal(compiled(x), found["row"]) and torch.equal(compiled(x[:2]), found["row"][:2]), "compiled code")
    layer.weight = torch.nn.Parameter(some_values(3, 3), requires_grad=False)
    try:
        layer.quant_method.process_weights_after_loading(layer)
    except NotImplementedError:
        return
    check(False, "weights that are loaded anew are taken")


def _try_plain(api):
    """Checks matrices that do not shrink, that are small, or that are not BF16."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    noise = torch.randint(-(2**15), 2**15, (Q, K), dtype=torch.int16).view(torch.bfloat16)
    for options, values in (
        ({}, some_values(Q, K)),
        ({"min_bytes": 0}, noise),
        ({"min_bytes": 0}, some_values(Q, K).float()),
    ):
        config = api.IBPConfig(**options)
        layer = ReplicatedLinear(K, Q, bias=False, params_dtype=values.dtype, quant_config=config, prefix="a")
        layers = {"a": (layer, [("weight", values, None)])}
        load(layers)
        process(layers)
        check(not layer.quant_method.tables and torch.equal(layer.weight.float().nan_to_num(),
               values.float().nan_to_num()), f"{options} codes {values.dtype}")  # fmt: skip
        x = torch.ones(2, K, dtype=values.dtype)
        check(layer(x)[0].shape == (2, Q), "a plain layer does not multiply")


def _try_config(api):
    """Checks that a compressed directory needs ibp's loader."""
    with tempfile.TemporaryDirectory() as folder:
        ibp.save(Path(folder) / "model.safetensors", {"a.weight": ibp.compress(some_values(Q, K))})
        config = api.IBPConfig()
        config.maybe_update_config(folder, hf_config=None, revision=None)
        try:
            config.get_quant_method(torch.nn.Linear(2, 2), "a")
        except ValueError as error:
            check("--load-format ibp" in str(error), str(error))
        else:
            check(False, "a coded checkpoint needs no --load-format ibp")


def try_weights():
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    from ibp.integrations.vllm import weights as api

    torch.manual_seed(0)
    api.register()
    check("ibp" in QUANTIZATION_METHODS, "the quantization is not registered")
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        _try_layers(api, rank, size)
    _try_plain(api)
    _try_config(api)
    print("weights: linear layers, embeddings and heads of 1 and 2 ranks have the bits of plain ones")
