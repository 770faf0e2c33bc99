"""Which weight each module prefetches: that of the linear layer which runs next, in every family."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from xllm_models import CausalLM, TensorParallel, get_model_class
from xllm_models.layers import ColumnParallelLinear, PrefetchingModule, ResidualRMSNorm

FAMILIES = (
    *("gemma3_text", "glm4", "glm4_moe", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe"),
    *("qwen3_next", "qwen3_5_text", "gpt_oss"),
)
NORM_BEFORE_MLP = {"gemma3_text": "pre_feedforward_layernorm"}


def next_weights(model: CausalLM) -> dict[str, str]:
    """The full name of each prefetching module to the parameter that it prefetches, where it does."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules = {name: module for name, module in model.named_modules() if isinstance(module, PrefetchingModule)}
    return {name: names[id(module.next_weight)] for name, module in modules.items() if module.next_weight is not None}


def first_linear(layer: Any) -> str:
    """The layer's first product."""
    if hasattr(layer, "self_attn"):
        return "self_attn.qkv_proj"
    return "linear_attn.in_proj_qkvz" if hasattr(layer.linear_attn, "in_proj_qkvz") else "linear_attn.in_proj_qkv"


def expected(model: Any, family: str) -> dict[str, str]:
    want = {}
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}"
        norms = family != "olmo2"  # whose norms follow the block, and add no residual
        if index and norms:  # the first layer has no residual to add, and its kernel no prefetch
            want[f"{prefix}.input_layernorm"] = f"{prefix}.{first_linear(layer)}.weight"
        if hasattr(layer.mlp, "experts"):  # the router's product comes next
            for shared in ("shared_experts", "shared_expert"):
                if hasattr(layer.mlp, shared):
                    want[f"{prefix}.mlp.{shared}"] = f"{prefix}.mlp.{shared}.down_proj.weight"
            continue
        if norms:
            norm = NORM_BEFORE_MLP.get(family, "post_attention_layernorm")
            want[f"{prefix}.{norm}"] = f"{prefix}.mlp.gate_up_proj.weight"
        want[f"{prefix}.mlp"] = f"{prefix}.mlp.down_proj.weight"
    return want


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_prefetches_the_next_linear_weight(
    family: str, size: int, draw_config: Callable[[str, int], dict[str, Any]]
) -> None:
    for number in range(4):
        config = draw_config(family, number) | {"model_type": family}
        model = get_model_class(family)(config, tp=TensorParallel(size=size))
        assert next_weights(model) == expected(model, family)


def llama(**changes: Any) -> CausalLM:
    config = {
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    return get_model_class("llama")(config | changes)


def test_next_weights_are_no_parameters_of_the_norm() -> None:
    model: Any = llama()
    norm = model.model.layers[1].input_layernorm
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    assert list(norm.state_dict()) == ["weight"]
    assert norm.next_weight is model.model.layers[1].self_attn.qkv_proj.weight


def test_a_copied_model_prefetches_its_own_weights() -> None:
    model = llama()
    copied: Any = copy.deepcopy(model)
    assert next_weights(copied) == next_weights(model)
    assert copied.model.layers[1].input_layernorm.next_weight is not model.get_parameter(
        "model.layers.1.self_attn.qkv_proj.weight"
    )


def test_weights_that_are_shared_or_loaded_again_stay_the_next_weights() -> None:
    family = get_model_class("llama")

    class Shared(family):  # type: ignore[misc, valid-type]
        def build(self, config: Any, tp: TensorParallel) -> None:
            super().build(config, tp)
            first, second = self.model.layers
            second.mlp.gate_up_proj.weight = first.mlp.gate_up_proj.weight

    config = llama().config
    model: Any = Shared(config)
    first, second = model.model.layers
    assert second.post_attention_layernorm.next_weight is first.mlp.gate_up_proj.weight
    with torch.no_grad():
        first.mlp.gate_up_proj.weight.copy_(torch.ones(24, 8))
    assert second.post_attention_layernorm.next_weight.sum() == 24 * 8


def test_execution_decides_not_registration() -> None:
    """A layer that registers its norm last, runs another product first, or runs one norm twice."""

    class Layer(nn.Module):
        def __init__(self, tp: TensorParallel) -> None:
            super().__init__()
            self.late = ColumnParallelLinear(8, 8, tp=tp)
            self.early = ColumnParallelLinear(8, 8, tp=tp)
            self.plain = nn.Linear(8, 8)
            self.norm = ResidualRMSNorm(8, 1e-6)
            self.before_plain = ResidualRMSNorm(8, 1e-6)
            self.twice = ResidualRMSNorm(8, 1e-6)
            self.last = ResidualRMSNorm(8, 1e-6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear in (self.early, self.late):
                x = linear(self.twice(x, x)[0])
            x = self.early(self.norm(x, x)[0])
            x = self.late(self.plain(self.before_plain(x, x)[0]))
            return self.last(x, x)[0]  # type: ignore[no-any-return]

    family = get_model_class("llama")

    class Port(family):  # type: ignore[misc, valid-type]
        def build(self, config: Any, tp: TensorParallel) -> None:
            super().build(config, tp)
            self.model.layers = nn.ModuleList()
            self.model.layer = Layer(tp)
            self.model.forward = lambda ids, positions: self.model.layer(self.model.embed_tokens(ids))

    model: Any = Port(llama().config)
    layer = model.model.layer
    assert layer.norm.next_weight is layer.early.weight
    assert [m.next_weight for m in (layer.before_plain, layer.twice, layer.last)] == [None] * 3
