"""Loads compressed checkpoints into models of vLLM's own layers on the CPU, and pushes weights into them, through
vLLM's registry of weight transfer engines and its worker's methods. tools/try_adapters.py calls `try_checkpoints` and
`try_sync` for each unpacked release.

vLLM's weight loaders load a checkpoint, plain and compressed, for one and for two tensor-parallel ranks, for which
numbers stand. Then a trainer's sender pushes new versions of it. The parameters must have the bits that the loaders
give for the new checkpoint.
"""

import itertools
import tempfile
import types
from pathlib import Path

import torch
from safetensors.torch import save_file
from try_weights import KV, OPTIONS, UP, WORDS, K, Q, Ranks, check, coded, process, some_values

import ibp

# As in vLLM's models: the merged parameter, the part of it in a checkpoint, and the part's shard.
MERGED = (
    *(("qkv_proj", f"{part}_proj", part) for part in "qkv"),
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
)
NUM_EXPERTS = 3
SHAPES = {
    "embed_tokens.weight": (WORDS, K),
    "lm_head.weight": (WORDS, K),
    "0.q_proj.weight": (Q, K),
    "0.k_proj.weight": (KV, K),
    "0.v_proj.weight": (KV, K),
    "0.q_proj.bias": (Q,),
    "0.k_proj.bias": (KV,),
    "0.v_proj.bias": (KV,),
    "0.o_proj.weight": (K, Q),
    "0.gate_proj.weight": (UP, K),
    "0.up_proj.weight": (UP, K),
    "0.norm.weight": (K,),
    "0.scale": (),
    "0.experts": (NUM_EXPERTS, UP, K),
}


class Model(torch.nn.Module):
    """A model of vLLM's layers and of a stack of experts, whose matrices a rank loads one after the other."""

    def __init__(self, config):
        super().__init__()
        from vllm.model_executor.layers import linear as made
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        options = {"params_dtype": torch.bfloat16, "quant_config": config}
        self.embed_tokens = VocabParallelEmbedding(WORDS, K, prefix="embed_tokens", **options)
        self.lm_head = ParallelLMHead(WORDS, K, prefix="lm_head", **options).tie_weights(self.embed_tokens)
        layer = torch.nn.Module()
        layer.qkv_proj = made.QKVParallelLinear(K, 64, Q // 64, KV // 64, bias=True, prefix="0.qkv_proj", **options)
        layer.gate_up_proj = made.MergedColumnParallelLinear(
            K, [UP] * 2, bias=False, prefix="0.gate_up_proj", **options
        )
        layer.o_proj = made.RowParallelLinear(Q, K, bias=False, prefix="0.o_proj", reduce_results=False, **options)
        layer.norm = torch.nn.RMSNorm(K, dtype=torch.bfloat16)
        layer.scale = torch.nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
        layer.experts = torch.nn.Parameter(torch.zeros(NUM_EXPERTS, UP // Ranks.size, K, dtype=torch.bfloat16))
        layer.experts.weight_loader = self._load_experts
        self.add_module("0", layer)

    def _load_experts(self, param, loaded):
        rows = UP // Ranks.size
        for number in range(NUM_EXPERTS):
            param.data[number].copy_(loaded[number].narrow(0, Ranks.rank * rows, rows))

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        for name, loaded in weights:
            if name == "lm_head.weight":  # The head is tied to the embedding.
                continue
            for merged, part, shard in MERGED:
                if f".{part}." in name:
                    param = params[name.replace(part, merged)]
                    param.weight_loader(param, loaded, shard)
                    break
            else:
                param = params[name]
                loader = getattr(param, "weight_loader", lambda param, loaded: param.data.copy_(loaded))
                loader(param, loaded)


def model_of(checkpoint, config):
    """Returns a model that is loaded as vLLM loads models."""
    from vllm.model_executor.model_loader import reload

    model = Model(config)
    model.load_weights(checkpoint.items())
    reload.finalize_layerwise_processing(model, types.SimpleNamespace(dtype=torch.bfloat16))
    process({name: (layer, []) for name, layer in model.named_modules() if hasattr(layer, "quant_method")})
    return model


def bits_of(model):
    """Returns the bits of the parameters by name. Compressed parameters are decoded."""
    found = {name: param.detach().clone() for name, param in model.named_parameters() if param.numel()}
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "tables", None) and not method.is_tied:
            found[f"{name}.weight"] = method.tables["weight"].decompress()
    return {name: value.view(torch.int16) for name, value in found.items()}


def check_same(model, checkpoint, what):
    wanted, found = bits_of(model_of(checkpoint, None)), bits_of(model)
    for name, bits in found.items():
        check(torch.equal(bits, wanted[name]), f"{what}: {name} has other bits than loaded ones")


def first_checkpoint():
    made = {name: some_values(*shape) for name, shape in SHAPES.items()}
    return made | {"lm_head.weight": made["embed_tokens.weight"]}


def trained(checkpoint, step):
    """Returns a later version of a checkpoint, in which a few weights have moved to a neighbouring number."""
    generator = torch.Generator().manual_seed(step)
    moved = {}
    for name, weight in checkpoint.items():
        hit = torch.rand(weight.shape, generator=generator) < 0.05
        moved[name] = (weight.view(torch.int16) + hit.short()).view(torch.bfloat16)
    return moved | {"lm_head.weight": moved["embed_tokens.weight"]}


def _write_matrices(checkpoint, folder):
    """Writes a checkpoint as `save_coded` does."""
    ibp.save(folder / "model.safetensors", coded(checkpoint))


def _write_compressed(checkpoint, folder):
    """Writes a checkpoint as `ibp compress` does."""
    save_file({name: weight.clone() for name, weight in checkpoint.items()}, folder / "plain.safetensors")
    ibp.checkpoints.compress(folder / "plain.safetensors", folder / "model.safetensors")


def _loaded(api, folder, config):
    """Returns a model that vLLM's loader has read, and the names of the tensors that were decoded for it."""
    load_config = types.SimpleNamespace(load_format="ibp", model_loader_extra_config={}, safetensors_load_strategy=None)
    loader = api.IBPModelLoader(load_config)
    loader._prepare_weights = lambda *args: (str(folder), [str(folder / "model.safetensors")], True, "")
    source, decoded, names = loader.Source(str(folder), None, prefix=""), [], {}
    given = api.CodedOrigin.values

    def values(origin, *args):
        decoded.append(names[id(origin)])
        return given(origin, *args)

    def named(weights):
        for name, weight in weights:
            if isinstance(weight, api.IncomingTensor):
                names[id(weight.origin)] = name
                kept.append(weight)
            yield name, weight

    kept = []
    api.CodedOrigin.values = values
    model = model_of(dict(named(loader._get_weights_iterator(source))), config)
    api.CodedOrigin.values = given
    return model, {*decoded}


def try_checkpoints():
    """Checks which tensors are decoded. Tables that products can read stay compressed, except if a rank cuts their
    columns or if rows are padded."""
    from ibp.integrations.vllm import weights as api

    checkpoint = first_checkpoint()
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        Ranks.rank, Ranks.size = rank, size
        left = {"0.experts"} | ({"embed_tokens.weight"} if rank == size - 1 else set())
        left |= {"0.o_proj.weight"} if size > 1 else set()
        for write, is_coded in itertools.product((_write_matrices, _write_compressed), (False, True)):
            config = api.IBPConfig.from_config({"quant_method": "ibp", **OPTIONS}) if is_coded else None
            with tempfile.TemporaryDirectory() as folder:
                write(checkpoint, Path(folder))
                model, decoded = _loaded(api, Path(folder), config)
                what = f"{write.__name__}, rank {rank} of {size}"
                check_same(model, checkpoint, what)
                if is_coded and write == _write_matrices:
                    check(decoded == left, f"{what}: {decoded} are decoded")
    print("checkpoints: tables of 1 and 2 ranks are loaded as they are coded, or decoded, with the bits of plain ones")


class Workers:
    """The methods of one worker that vLLM's clients call. They are vLLM's own; vLLM's registry makes the engine."""

    def __init__(self, model, is_eager=True):
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
        from vllm.v1.worker import gpu_worker

        parallel = types.SimpleNamespace(rank=Ranks.rank, world_size=Ranks.size, data_parallel_index=0)
        config = types.SimpleNamespace(
            parallel_config=parallel, model_config=types.SimpleNamespace(enforce_eager=is_eager, dtype=torch.bfloat16)
        )
        chosen = types.SimpleNamespace(backend="ibp_delta")
        self.engine = WeightTransferEngineFactory.create_engine(chosen, config, torch.device("cpu"), model)
        self.worker = object.__new__(gpu_worker.Worker)
        self.worker.__dict__.update(
            vllm_config=config,
            rank=Ranks.rank,
            weight_transfer_engine=self.engine,
            model_runner=types.SimpleNamespace(reset_lora_state=lambda: None),
            _weight_update_active=False,
            _weight_update_is_draft=False,
        )

    def __getattr__(self, name):
        return getattr(self.worker, name)


class Group:
    """A stand-in for vLLM's communicator in one process. What rank 0 broadcasts waits here."""

    def __init__(self):
        self.sent, self.device = [], torch.device("cpu")

    def receiving(self):
        other = Group()
        other.broadcast = lambda message, src, stream: message.copy_(self.sent.pop(0))
        return other

    def broadcast(self, message, src, stream):
        self.sent.append(message)


def refused(workers, messages, kind, api):
    try:
        api.send(messages, workers)
    except kind:
        return
    check(False, f"sync: no {kind.__name__}")


def try_model(api, config, what):
    versions = [first_checkpoint()]
    for step in range(5):
        versions.append(trained(versions[-1], step))
    model = model_of(versions[0], config)
    workers, sender = Workers(model), ibp.deltas.Sender(versions[0], piece_bytes=100_000)
    workers.init_weight_transfer_engine({})
    with tempfile.TemporaryDirectory() as folder:
        api.send(sender.push(versions[1]), workers, folder=folder)
    check_same(model, versions[1], f"{what}, a push by files")
    lost = sender.push(versions[2])
    refused(workers, sender.push(versions[3]), ibp.deltas.OutOfSyncError, api)
    check_same(model, versions[1], f"{what}, a lost push")
    damaged = lost[0].clone()
    damaged[-1] ^= 1
    refused(workers, [damaged], ibp.CorruptTableError, api)
    api.send(sender.push(versions[4], full=True), workers)
    check_same(model, versions[4], f"{what}, all weights")
    group = Group()
    receiving = group.receiving()
    api.worker_init_process_group, api.NCCLWeightTransferInitInfo = lambda *args: receiving, dict
    workers.init_weight_transfer_engine({"nccl": {"world_size": 2}})
    messages = sender.push(versions[5])
    group.sent += messages
    api.send(messages, workers, group=types.SimpleNamespace(broadcast=lambda *args, **more: None))
    check_same(model, versions[5], f"{what}, a push by NCCL")
    check(not group.sent, "messages that nobody received")
    workers.engine.shutdown()
    return sum(message.numel() for message in messages)


def try_sync():
    from ibp.integrations.vllm import sync, weights

    torch.accelerator.synchronize = lambda *args: None
    torch.cuda.current_stream = lambda *args: None
    sync.register()
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        Ranks.rank, Ranks.size = rank, size
        try_model(sync, None, f"rank {rank} of {size}")
        config = weights.IBPConfig.from_config({"quant_method": "ibp", **OPTIONS})
        try_model(sync, config, f"coded, rank {rank} of {size}")
    try:
        Workers(model_of(first_checkpoint(), weights.IBPConfig(**OPTIONS)), is_eager=False)
    except NotImplementedError:
        print(
            "sync: pushes of deltas and of all weights give the bits that are loaded, plain and coded, on 1 and 2 ranks"
        )
        return
    check(False, "coded weights change under CUDA graphs")
