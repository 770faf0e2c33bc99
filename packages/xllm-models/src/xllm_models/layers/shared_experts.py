"""The mixture-of-experts MLP with shared experts, which every token takes (DeepSeek-V2 and V3, GLM-4.5, Qwen3-Next)."""

from __future__ import annotations

import torch
from torch import nn

from ..config import ModelConfig
from ..ops import linear
from .mlp import GatedMLP
from .moe import Experts, SparseMoE
from .parallel import TensorParallel


class SharedExpertsMoE(nn.Module):
    """x [T, hidden] -> [T, hidden], this rank's term of the sum over the ranks: chosen experts plus shared experts.

    `gate` is the router, with the results of `TopKRouter`. The shared experts are one MLP, with the features of
    config.own["n_shared_experts"] experts and biases by the config's mlp_bias. ValueError for a config without experts.
    """

    def __init__(self, config: ModelConfig, gate: nn.Module, tp: TensorParallel) -> None:
        super().__init__()
        if config.moe is None:
            raise ValueError(f"the config of {config.architecture} has no experts")
        size, moe, act = config.hidden_size, config.moe, config.hidden_act
        self.gate = gate
        self.experts = Experts(
            size, moe.num_experts, moe.intermediate_size, hidden_act=act, reduce_results=False, tp=tp
        )
        shared_size = moe.intermediate_size * config.own["n_shared_experts"]
        self.shared_experts = GatedMLP(
            size, shared_size, hidden_act=act, bias=config.mlp_bias, reduce_results=False, tp=tp
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, ids = self.gate(x)
        out: torch.Tensor = self.experts(x, weights, ids) + self.shared_experts(x)
        return out


class GatedSharedExpertMoE(SparseMoE):
    """x [T, hidden] -> [T, hidden], this rank's term of the sum over the ranks: chosen experts plus a shared one.

    The shared expert has config.own["shared_expert_intermediate_size"] features, and its result is multiplied by the
    sigmoid of one value per token. ValueError for a config without experts.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        if config.moe is None:
            raise ValueError(f"the config of {config.architecture} has no experts")
        size, act = config.hidden_size, config.hidden_act
        super().__init__(size, config.moe, hidden_act=act, reduce_results=False, tp=tp)
        shared_size = config.own["shared_expert_intermediate_size"]
        self.shared_expert = GatedMLP(size, shared_size, hidden_act=act, reduce_results=False, tp=tp)
        self.shared_expert_gate = nn.Linear(size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(linear(x, self.shared_expert_gate.weight))  # [T, 1]
        out: torch.Tensor = super().forward(x) + gate * self.shared_expert(x)
        return out
