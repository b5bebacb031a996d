"""Runs `--quantization ibp` with vLLM's own class of fused experts on the CPU. tools/try_adapters.py calls
`try_experts` for each unpacked release.

Experts are made, loaded by vLLM's weight loaders from single matrices and from stacks, and multiplied, once without a
quantization and once with ibp's. Then new weights are pushed to them. A kernel of the tests replaces vLLM's. Numbers
stand for ranks: a tensor-parallel rank has a part of each expert, and an expert-parallel rank has some of the experts.
"""

import types

import torch
import torch.nn.functional as F
from try_weights import OPTIONS, Ranks, check, coded, some_values

import ibp

EXPERTS, H, WIDTH, CHOICES = 6, 128, 192, 2
NAME = "model.layers.0.mlp.experts"


class Activation:
    """A stand-in for vLLM's MoEActivation: "silu", multiplied by the other half."""

    value, is_gated = "silu", True


class Kernel:
    """A stand-in for vLLM's kernel and for the part of it that activates."""

    def __init__(self, **made):
        self.fused_experts, self.is_monolithic, self.consumes_expert_mask = self, False, False

    def activation(self, activation, output, input):
        output.copy_(F.silu(input[:, : len(output[0])]) * input[:, len(output[0]) :])

    def process_weights_after_loading(self, layer):
        """Does nothing, because the weights need no processing."""

    def apply(
        self,
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        global_num_experts,
        expert_map,
        apply_router_weight_on_input,
        shared_experts=None,
        shared_experts_input=None,
    ):
        out = torch.zeros(hidden_states.shape)
        for token, choice in torch.cartesian_prod(torch.arange(len(topk_ids)), torch.arange(topk_ids.shape[1])):
            number, weight = int(topk_ids[token, choice]), topk_weights[token, choice]
            number = number if expert_map is None else int(expert_map[number])
            if number >= 0:
                y = F.linear(hidden_states[token], w1[number])[None]
                z = y.new_empty(1, w2.shape[2])
                self.activation(activation, z, y)
                out[token] += weight * F.linear(z, w2[number])[0].float()
        return out.to(hidden_states.dtype)


def config_of(**options):
    """Returns the fields of vLLM's FusedMoEConfig that are read."""
    rank, size = (0, 1) if Ranks.experts else (Ranks.rank, Ranks.size)
    return types.SimpleNamespace(
        **{
            **dict(num_experts=EXPERTS, num_logical_experts=EXPERTS, experts_per_token=CHOICES, has_bias=False),
            **dict(num_local_experts=EXPERTS // (Ranks.size if Ranks.experts else 1), hidden_dim=H),
            **dict(hidden_dim_unpadded=H, intermediate_size=WIDTH, intermediate_size_per_partition=WIDTH // size),
            **dict(intermediate_size_per_partition_unpadded=WIDTH // size, is_act_and_mul=True, tp_rank=rank),
            **dict(activation=Activation(), in_dtype=torch.bfloat16, tp_size=size, dp_size=1, swiglu_limit=None),
            **dict(is_lora_enabled=False, is_sequence_parallel=False, rocm_aiter_fmoe_enabled=False),
            **dict(tp_shard_with_padding=False, shared_expert_prefix=None),
            "moe_parallel_config": types.SimpleNamespace(
                tp_size=size, tp_rank=rank, use_ep=Ranks.experts, enable_eplb=False, **options
            ),
        }
    )


class Places:
    """A stand-in for vLLM's ExpertMapManager, which says which rank has which experts."""

    def __init__(self):
        self.local_num_experts, first = EXPERTS, 0
        self.expert_map = self.expert_mask = self.routing_tables = None
        self.placement_strategy, self.num_fused_shared_experts = "linear", 0
        if Ranks.experts:
            self.local_num_experts = EXPERTS // Ranks.size
            first = Ranks.rank * self.local_num_experts
            self.expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
            self.expert_map[first : first + self.local_num_experts] = torch.arange(self.local_num_experts)
        self._first = first

    def map_global_to_local(self, number):
        number -= self._first
        return number if 0 <= number < self.local_num_experts else -1


def checkpoint_of(seed, is_stacked=False):
    """Returns names and tensors as vLLM's models pass them to the layer."""
    shapes = {"gate_proj": (WIDTH, H), "up_proj": (WIDTH, H), "down_proj": (H, WIDTH)}
    made = {
        f"{number}.{part}.weight": some_values(*shape).roll(7 * seed + 3 * number + k)
        for number in range(EXPERTS)
        for k, (part, shape) in enumerate(shapes.items())
    }
    if not is_stacked:
        return made
    gate, up, down = (torch.stack([made[f"{n}.{part}.weight"] for n in range(EXPERTS)]) for part in shapes)
    return {"gate_up_proj": torch.cat((gate, up), dim=1), "down_proj": down}


def layer_of(checkpoint, config):
    from vllm.model_executor.layers import fused_moe

    layer = fused_moe.RoutedExperts(NAME, torch.bfloat16, config_of(), config, expert_map_manager=Places())
    list(layer.load_weights(checkpoint.items()))
    method = layer.quant_method
    early = bool(getattr(method, "tables", {}))
    for _ in range(2):  # vLLM processes all layers again after it has processed each one.
        method.process_weights_after_loading(layer)
    check(early == bool(getattr(method, "tables", {})), "experts are not coded while they are loaded")
    return layer


def results_of(layer, num_tokens):
    x, ids = some_values(num_tokens, H) * 50, torch.arange(num_tokens * CHOICES).view(-1, CHOICES) % EXPERTS
    return layer.forward_modular(x, torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)), ids)


class Model(torch.nn.Module):
    """A model of one layer, whose `load_weights` takes names of a checkpoint."""

    def __init__(self, layer):
        super().__init__()
        self.experts = layer

    def load_weights(self, weights):
        return list(self.experts.load_weights(weights))


def _try_rank(api, sync, what):
    from ibp.integrations.vllm.weights import incoming

    made = {}
    for is_stacked in (False, True):
        config = api.IBPConfig.from_config({"quant_method": "ibp", **OPTIONS})
        checkpoint = checkpoint_of(0, is_stacked)
        tables = {name: incoming(table) for name, table in coded(checkpoint).items()}
        plain, pushed = layer_of(checkpoint, None), layer_of(checkpoint, config)
        for layer in (pushed, layer_of(tables, config)):
            method = layer.quant_method
            check(isinstance(method, api.IBPExpertsMethod) and method.tables, f"{what}: experts are not coded")
            check(not any(weight.numel() for weight in layer.parameters()), f"{what}: plain weights are kept")
            for name, table in method.tables.items():
                wanted = getattr(plain, name)
                check(torch.equal(table.decompress(), wanted.flatten(0, 1)), f"{what}: {name} has other weights")
            wanted, got = results_of(plain, 5), results_of(layer, 5)
            check(torch.equal(wanted, got) and bool(got.count_nonzero()), f"{what}: results differ from plain")
        from_tables = layer_of(tables, None)
        check(torch.equal(from_tables.w13_weight, plain.w13_weight), f"{what}: plain experts have other weights")
        made[is_stacked] = pushed
    receiver = sync.ModelReceiver(Model(made[False]), is_eager=True)
    sender = ibp.deltas.Sender(checkpoint_of(0), piece_bytes=100_000)
    for message in sender.push(checkpoint_of(1)):
        receiver.apply(message)
    pushed = layer_of(checkpoint_of(1), None)
    for name, table in made[False].quant_method.tables.items():
        wanted = getattr(pushed, name).flatten(0, 1)
        check(torch.equal(table.decompress(), wanted), f"{what}: {name} has other weights after a push")


def _try_refusals(api):
    """Checks that experts work that stay plain."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized

    wanted = results_of(layer_of(checkpoint_of(0), None), 3)
    excluded = api.IBPConfig(min_bytes=0, exclude=["*.experts"])
    large = api.IBPConfig(min_bytes=1 << 30)
    for config, is_ours in ((excluded, False), (large, True)):
        layer = layer_of(checkpoint_of(0), config)
        check(isinstance(layer.quant_method, api.IBPExpertsMethod) == is_ours, "which experts are ours")
        check(torch.equal(results_of(layer, 3), wanted), "plain experts differ")
    given = unquantized.select_unquantized_moe_backend
    other = types.SimpleNamespace(name="FLASHINFER_TRTLLM", value="FlashInfer TRTLLM")
    unquantized.select_unquantized_moe_backend = lambda moe_config: (other, Kernel)
    layer = layer_of(checkpoint_of(0), api.IBPConfig(min_bytes=0))
    check(not isinstance(layer.quant_method, api.IBPExpertsMethod), "experts of another kernel are coded")
    unquantized.select_unquantized_moe_backend = given


def try_experts():
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized

    from ibp.integrations.vllm import sync, weights

    unquantized.select_unquantized_moe_backend = lambda moe_config: (unquantized.UnquantizedMoeBackend.TRITON, Kernel)
    unquantized.convert_to_unquantized_kernel_format = lambda backend, moe_config, w13_weight, w2_weight, **more: (
        w13_weight,
        w2_weight,
    )
    unquantized.make_unquantized_moe_kernel = Kernel
    unquantized.is_weights_pre_processed = lambda: False
    for rank, size, experts in ((0, 1, False), (0, 2, False), (1, 2, False), (0, 2, True), (1, 2, True)):
        Ranks.rank, Ranks.size, Ranks.experts = rank, size, experts
        kind = "expert" if experts else "tensor"
        _try_rank(weights, sync, f"{kind}-parallel rank {rank} of {size}")
    Ranks.rank, Ranks.size, Ranks.experts = 0, 1, False
    _try_refusals(weights)
    print("experts: fused ones of 1 and 2 tensor- and expert-parallel ranks have the bits of plain ones")
