"""A port of dots.llm1, whose router takes sigmoid scores, adds a bias for the choice only, and limits it to groups.

Imported by path. T tokens, E experts, k experts per token, N hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from xllm_models import ModelConfig, TensorParallel
from xllm_models.layers import Experts, GatedMLP, KeepDtypeParameter
from xllm_models.models.qwen3_moe import Qwen3MoeForCausalLM


class Router(nn.Module):
    """x [T, N] -> (logits [T, E], weights [T, k], experts [T, k])."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe = config.moe
        self.num_groups, self.top_groups = config.own["n_group"], config.own["topk_group"]
        self.factor = config.own["routed_scaling_factor"]
        shape = (config.moe.num_experts, config.hidden_size)
        self.weight = KeepDtypeParameter(torch.empty(shape, dtype=torch.float32))
        self.e_score_correction_bias = KeepDtypeParameter(torch.empty(shape[0], dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = functional.linear(x.float(), self.weight)
        scores = logits.sigmoid()
        for_choice = scores + self.e_score_correction_bias
        grouped = for_choice.unflatten(1, (self.num_groups, -1))
        groups = torch.topk(grouped.topk(2, dim=-1).values.sum(-1), self.top_groups, dim=-1).indices
        allowed = torch.zeros_like(grouped[..., 0]).scatter(1, groups, 1.0).bool()
        masked = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
        experts = torch.topk(masked, self.moe.num_experts_per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.moe.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.factor, experts


class SigmoidMoE(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        assert config.moe is not None
        size = config.moe.intermediate_size
        self.gate = Router(config)
        self.experts = Experts(config.hidden_size, config.moe.num_experts, size, hidden_act=config.hidden_act, tp=tp)
        self.shared_experts = GatedMLP(
            config.hidden_size, size * config.own["n_shared_experts"], hidden_act="silu", tp=tp
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, experts = self.gate(x)
        out: torch.Tensor = self.experts(x, weights, experts) + self.shared_experts(x)
        return out


class Dots1ForCausalLM(Qwen3MoeForCausalLM):
    own_config: ClassVar[Mapping[str, Any]] = {
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
    }

    @classmethod
    def parse_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        config = super().parse_config(raw)
        assert config.moe is not None
        dense = tuple(range(config.own["first_k_dense_replace"]))
        return replace(config, moe=replace(config.moe, dense_layers=dense))

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().build(config, tp)
        layers: Any = self.model.get_submodule("layers")
        for layer_id, layer in enumerate(layers):
            layer.post_attention_layernorm.tp = tp
            if layer_id >= config.own["first_k_dense_replace"]:
                layer.mlp = SigmoidMoE(config, tp)
                following = layers[layer_id + 1].input_layernorm if layer_id + 1 < len(layers) else self.model.norm
                following.tp = None
                following.group = None


class WithoutBias(Dots1ForCausalLM):
    """Chooses without the correction bias."""

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().build(config, tp)
        layers: Any = self.model.get_submodule("layers")
        choose = Router.forward

        def forward(router: Router, x: torch.Tensor) -> Any:
            bias = router.e_score_correction_bias
            router.e_score_correction_bias = nn.Parameter(torch.zeros_like(bias))
            try:
                return choose(router, x)
            finally:
                router.e_score_correction_bias = bias

        layers[2].mlp.gate.forward = forward.__get__(layers[2].mlp.gate)
