"""The mixture-of-experts MLP: a router and its experts, whose features are sharded over tensor-parallel ranks.

E experts, N hidden, I features of one expert on this rank.
"""

from __future__ import annotations

import torch
from torch import nn

from ..config import MoEConfig
from ..ops import all_reduce_, linear, moe
from .parallel import ShardedModule, TensorParallel, WeightShard


class Router(nn.Module):
    """x [T, N] -> logits [T, E]. Every rank holds the whole weight."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)


class Experts(ShardedModule):
    """The experts' weights: gate_up [E, 2I, N] (gate rows, then up rows) and down [E, N, I]."""

    def __init__(self, hidden_size: int, num_experts: int, intermediate_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.shard = tp.shard("moe_intermediate_size", intermediate_size)
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * self.shard.size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, self.shard.size))

    def weight_shards(self, name: str) -> tuple[WeightShard, ...]:
        """gate_up: the gate and the up region of expert 0, then of expert 1, ...; down: one region per expert."""
        total, size = self.shard.total, self.shard.size
        share = self.shard.rows
        hidden = slice(0, self.hidden_size)
        found = []
        for expert in range(self.down.shape[0]):
            here = slice(expert, expert + 1)
            if name == "down":
                target = (here, hidden, slice(0, size))
                found.append(WeightShard(shape=(self.hidden_size, total), source=(hidden, share), target=target))
                continue
            for offset in (0, size):
                target = (here, slice(offset, offset + size), hidden)
                found.append(WeightShard(shape=(total, self.hidden_size), source=(share, hidden), target=target))
        return tuple(found)


class SparseMoE(nn.Module):
    """x [T, N] -> [T, N]: each token through its top k experts; `reduce_results` as for `RowParallelLinear`.

    An activation other than silu is a ValueError.
    """

    def __init__(
        self, hidden_size: int, config: MoEConfig, *, hidden_act: str, reduce_results: bool = True, tp: TensorParallel
    ) -> None:
        super().__init__()
        if hidden_act not in ("silu", "swish"):
            raise ValueError(f"hidden_act {hidden_act!r} of experts is not supported; supported: ['silu', 'swish']")
        self.tp = tp
        self.reduce_results = reduce_results
        self.top_k = config.num_experts_per_token
        self.normalize = config.normalize
        self.gate = Router(hidden_size, config.num_experts)
        self.experts = Experts(hidden_size, config.num_experts, config.intermediate_size, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = moe(x, self.gate(x), self.experts.gate_up, self.experts.down, self.top_k, self.normalize)
        return all_reduce_(out, self.tp.group) if self.reduce_results and self.tp.size > 1 else out
